"""Render conversations by the chat template of a tokenizer folder, as transformers does, and tell which
characters the assistant wrote.

Templates are Jinja, run in its sandbox: they change nothing and reach no file. One thing differs from
transformers: there is no strftime_now. The text must not depend on the day on which it is prepared, and
templates that ask for the date have one of their own where they find no clock.
"""

import json
import re
import secrets
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from runtime.cli import UserError

CONFIG_FILE, TEMPLATE_FILE, MAP_FILE = "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")      # begins what the assistant writes
REASONING = ("reasoning_content", "thinking", "reasoning")      # names of a message's reasoning
PROBE = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation and the places in it, (first, last + 1), that the assistant wrote."""
    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """The chat template of a tokenizer folder. Raises UserError where it has none or it is no Jinja."""

    def __init__(self, folder: str):
        self._folder = Path(folder)
        settings = _read_object(self._folder / CONFIG_FILE)
        self.sources = _template_sources(self._folder, settings)
        self._special_tokens = _special_tokens(_read_object(self._folder / MAP_FILE) | settings)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._environment = environment
        try:
            self._templates = {name: environment.from_string(text) for name, text in self.sources.items()}
        except jinja2.TemplateError as error:
            raise UserError(f"{folder}: its chat template is no Jinja that can be run here ({error})") from error

    @property
    def sha256(self) -> str:
        """Identity of the template and of the special tokens that it may write."""
        return sha256(json.dumps([self.sources, self._special_tokens], sort_keys=True).encode()).hexdigest()

    def render(self, row: dict) -> Rendered:
        """The text of row["messages"], with row["tools"] and row["chat_template_kwargs"] where there are.

        What the assistant wrote is what the template's own {% generation %} blocks hold; in a template
        without them, by which an answer makes the text longer than the text up to it with the
        beginning of an answer. Raises UserError where the row is no conversation, the template refuses
        it, or the text up to an answer is not how the text of the whole begins.
        """
        messages, tools, extra = _read_row(row)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise UserError(f"{self._folder} has chat templates named {', '.join(self.sources)}, but none named default")

        def text_of(some_messages: list[dict], add_generation_prompt: bool = False) -> str:
            return self._run(name, some_messages, tools, extra, add_generation_prompt)

        if GENERATION.search(self.sources[name]):
            return _read_marks(text_of(messages), self._marks)
        return self._by_prefixes(messages, text_of)

    @cached_property
    def _marks(self) -> tuple[str, str]:
        # Nobody's text holds them: they are drawn anew for each process.
        nonce = secrets.token_hex(16)
        self._environment.globals["generation_marks"] = marks = (f"<{nonce}+>", f"<{nonce}->")
        return marks

    def _run(self, name: str, messages: list[dict], tools, extra: dict, add_generation_prompt: bool) -> str:
        assert self._marks      # which the template's {% generation %} writes
        values = self._special_tokens | extra
        try:
            return self._templates[name].render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            raise UserError(f"the chat template of {self._folder} refuses a conversation ({error}): correct its "
                            f"messages") from error

    def _by_prefixes(self, messages: list[dict], text_of) -> Rendered:
        text = text_of(messages)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = text_of(messages[:i], True), text_of(messages[:i + 1])
            if not (text.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"the chat template of {self._folder} writes message {i + 1} of a conversation another way once "
                    f"messages follow it, so what the assistant wrote cannot be told: mark it in the template by "
                    f"{{% generation %}} ... {{% endgeneration %}}, or give conversations that end with their first answer")
            spans.append((len(before), len(after)))
        if spans and self._ends_with_a_beginning(text_of):
            raise UserError(
                f"the chat template of {self._folder} writes the beginning of an answer behind every conversation, whatever "
                f"add_generation_prompt says, so it would be learned: write it in {{% if add_generation_prompt %}}")
        return Rendered(text, spans)

    @staticmethod
    def _ends_with_a_beginning(text_of) -> bool:
        """Whether the template adds the beginning of an answer whatever it is asked for."""
        if text_of(PROBE[:1], True) != text_of(PROBE[:1]):
            return False
        return not text_of(PROBE).startswith(text_of(PROBE[:2]))


def _read_object(path: Path) -> dict:
    """The JSON object of the file, {} where there is none. Raises UserError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def _template_sources(folder: Path, settings: dict) -> dict[str, str]:
    """Name -> text of each template: chat_template.jinja goes before tokenizer_config.json."""
    if (folder / TEMPLATE_FILE).is_file():
        return {"default": (folder / TEMPLATE_FILE).read_text(encoding="utf-8")}
    template = settings.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        sources = {entry.get("name"): entry.get("template") for entry in named}
        if sources and all(isinstance(part, str) for pair in sources.items() for part in pair):
            return sources
    raise UserError(f"{folder} has no chat template, which rows of messages need: put one into chat_template.jinja, or "
                    f"into tokenizer_config.json as chat_template")


def _special_tokens(settings: dict) -> dict[str, str]:
    """bos_token, eos_token and others as a template may write them; a name without a token is left out."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _read_row(row: dict) -> tuple[list[dict], list | None, dict]:
    """The messages, tools and further values for the template of a row. Raises UserError."""
    messages, tools, extra = row["messages"], row.get("tools"), row.get("chat_template_kwargs")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"messages is {_name_type(messages)}, but must be a list of objects with role and content")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"a message is {json.dumps(message)[:80]}, but must be an object with role and content")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"tools is {_name_type(tools)}, but must be a list of functions as JSON schemas")
    if extra is not None and not isinstance(extra, dict):
        raise UserError(f"chat_template_kwargs is {_name_type(extra)}, but must be an object")
    return [_read_message(message) for message in messages], tools or None, extra or {}


def _name_type(value) -> str:
    return "empty" if value == [] else type(value).__name__


def _read_message(message: dict) -> dict:
    """Without keys that say nothing, and with its reasoning under the names that templates ask for."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def _read_marks(text: str, marks: tuple[str, str]) -> Rendered:
    """The text without the marks, and what lies between them."""
    parts, spans, length = [], [], 0
    for i, part in enumerate(re.split("|".join(map(re.escape, marks)), text)):
        parts.append(part)
        if i % 2 and part:
            spans.append((length, length + len(part)))
        length += len(part)
    return Rendered("".join(parts), spans)


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: its content between two marks."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller) -> str:
        begin, end = self.environment.globals["generation_marks"]
        return f"{begin}{caller()}{end}"


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own escapes what HTML would take for tags.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
