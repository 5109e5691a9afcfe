"""Render conversations by the chat template of a tokenizer folder, as transformers does, and tell
which characters the assistant wrote.

Templates are Jinja, run in its sandbox: they change nothing and reach no file. One thing differs
from transformers: there is no strftime_now. The text must not depend on the day on which it is
prepared, and templates that ask for the date have one of their own where they find no clock."""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from lib.errors import UserError

CONFIG_FILE, TEMPLATE_FILE, MAP_FILE = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # begins what the assistant writes
TEXT_PARTS = ("text", "input_text", "output_text")  # types of a part that is text
# A tool may answer with any JSON, which templates spell.
TOOL_ROLES = ("tool", "ipython", "function")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning
PROBE = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]


TextOf = Callable[..., str]  # (messages, add_generation_prompt=False) -> their text


class TemplateProblem(UserError):
    """A chat template that can render no conversation for training: no row is at fault."""


class OddConversation(UserError):
    """A conversation that cannot be learned from: what is wrong with it, and what mends it."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"{problem}: {remedy}")
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation and the places in it, (first, last + 1), that the assistant
    wrote."""

    text: str
    spans: list[tuple[int, int]]
    joined_parts: int = 0  # messages whose content came in parts, which were joined


class ChatTemplate:
    """The chat template of a tokenizer folder. Raises UserError where it has none or it is no
    Jinja."""

    def __init__(self, folder: str):
        self._folder = Path(folder)
        settings = _read_object(self._folder / CONFIG_FILE)
        self.sources = _template_sources(self._folder, settings)
        self._special_tokens = _special_tokens(_read_object(self._folder / MAP_FILE) | settings)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._environment = environment
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in self.sources.items()
            }
        except jinja2.TemplateError as error:
            raise TemplateProblem(
                f"{folder}: its chat template is no Jinja that can be run here ({error})"
            ) from error

    @property
    def sha256(self) -> str:
        """Identity of the template and of the special tokens that it may write."""
        return sha256(
            json.dumps([self.sources, self._special_tokens], sort_keys=True).encode()
        ).hexdigest()

    def render(self, row: dict) -> Rendered:
        """The text of row["messages"], with row["tools"] and row["chat_template_kwargs"] where
        there are.

        What the assistant wrote is what the template's own {% generation %} blocks hold; in a
        template without them, by which an answer makes the text longer than the text up to it with
        the beginning of an answer. An answer of weight 0 is not learned.

        Content in parts, all of them text, is joined where the template knows no parts.

        Raises OddConversation where the row is no conversation, the template refuses it, the text
        up to an answer is not how the text of the whole begins, or nothing is to be learned;
        TemplateProblem where the template itself is the cause.
        """
        messages, weights, tools, extra = _read_row(row)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateProblem(
                f"{self._folder} has chat templates named {', '.join(self.sources)}, but none named"
                " default"
            )

        def text_of(some_messages: list[dict], add_generation_prompt: bool = False) -> str:
            return self._run(name, some_messages, tools, extra, add_generation_prompt)

        has_marks = GENERATION.search(self.sources[name]) is not None
        if not has_marks:
            _check_roles(messages)
        joined = _join_parts(messages)
        pairs = zip(joined, messages, strict=True)
        joined_parts = sum(as_text is not message for as_text, message in pairs)
        if joined_parts and self._knows_parts(messages, joined, text_of):
            joined, joined_parts = messages, 0
        if has_marks:
            rendered = _read_marks(text_of(joined), self._marks)
        else:
            rendered = self._by_prefixes(joined, text_of)
        if not rendered.spans:
            _check_roles(joined)
        return Rendered(rendered.text, _weighted(rendered.spans, joined, weights), joined_parts)

    def _knows_parts(self, messages: list[dict], joined: list[dict], text_of: TextOf) -> bool:
        """Whether the template writes the text of `messages` whose content is in parts, rather than
        refuse them, leave them out or spell them as a list. joined: the same messages as texts."""
        try:
            text = text_of(messages)
        except OddConversation:
            return False
        parts: list[str | dict] = []
        for message, as_text in zip(messages, joined, strict=True):
            if message is not as_text:
                parts += message["content"]
        if any(spelling in text for part in parts for spelling in _spellings(part)):
            return False
        text_of_joined = text_of(joined)
        part_texts = [_part_text(part) for part in parts if _part_text(part) in text_of_joined]
        return all(part_text in text for part_text in part_texts)

    @cached_property
    def _marks(self) -> tuple[str, str]:
        # Nobody's text holds them: they are drawn anew for each process.
        nonce = secrets.token_hex(16)
        self._environment.globals["generation_marks"] = marks = (f"<{nonce}+>", f"<{nonce}->")
        return marks

    def _run(
        self,
        name: str,
        messages: list[dict],
        tools: list | None,
        extra: dict,
        add_generation_prompt: bool,
    ) -> str:
        assert self._marks  # which the template's {% generation %} writes
        values = self._special_tokens | extra
        try:
            return self._templates[name].render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            IndexError,
        ) as error:
            raise OddConversation(
                f"the chat template of {self._folder} refuses a conversation ({error})",
                "correct its messages",
            ) from error

    def _by_prefixes(self, messages: list[dict], text_of: TextOf) -> Rendered:
        text = text_of(messages)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            question = text_of(messages[:i], True)
            with_answer = text_of(messages[: i + 1])
            if not (text.startswith(question) and text.startswith(with_answer)):
                raise OddConversation(
                    f"the chat template of {self._folder} writes message {i + 1} of a conversation"
                    " another way once messages follow it, so what the assistant wrote cannot be"
                    " told",
                    "mark it in the template by {% generation %} ... {% endgeneration %}, or give"
                    " conversations that end with their first answer",
                )
            spans.append((len(question), len(with_answer)))
        if spans and self._ends_with_a_beginning(text_of):
            raise TemplateProblem(
                f"the chat template of {self._folder} writes the beginning of an answer behind"
                " every conversation, whatever add_generation_prompt says, so it would be learned:"
                " write it in {% if add_generation_prompt %}"
            )
        return Rendered(text, spans)

    @staticmethod
    def _ends_with_a_beginning(text_of: TextOf) -> bool:
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
        sources: dict[Any, Any] = {entry.get("name"): entry.get("template") for entry in named}
        if sources and all(isinstance(part, str) for pair in sources.items() for part in pair):
            return sources
    raise TemplateProblem(
        f"{folder} has no chat template, which rows of messages need: put one into"
        " chat_template.jinja, or into tokenizer_config.json as chat_template"
    )


def _special_tokens(settings: dict) -> dict[str, str]:
    """bos_token, eos_token and others as a template may write them; a name without a token is left
    out."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


LIST_REMEDY = "give a list of objects with role and content"


def _read_row(row: dict) -> tuple[list[dict], list[bool], list | None, dict]:
    """The messages of a row, whether each has the weight to be learned, the tools, and further
    values for the template. Raises OddConversation."""
    tools, extra = row.get("tools"), row.get("chat_template_kwargs")
    _check_messages(row["messages"])
    if tools is not None and not isinstance(tools, list):
        raise OddConversation(
            f"tools is {_name_type(tools)}", "give a list of functions as JSON schemas"
        )
    if extra is not None and not isinstance(extra, dict):
        raise OddConversation(f"chat_template_kwargs is {_name_type(extra)}", "give an object")
    messages = [_read_message(message) for message in row["messages"]]
    weights = [_take_weight(message, number) for number, message in enumerate(messages, 1)]
    for number, message in enumerate(messages, 1):
        _check_content(message, number)
    return messages, weights, tools or None, extra or {}


def _check_messages(messages: object) -> None:
    """Raises OddConversation where they are no list of objects with a role."""
    if not isinstance(messages, list) or not messages:
        raise OddConversation(f"messages is {_name_type(messages)}", LIST_REMEDY)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise OddConversation(f"a message is {json.dumps(message)[:80]}", LIST_REMEDY)


def _check_roles(messages: list[dict]) -> None:
    """Raises OddConversation where no message is one of the assistant."""
    roles = list(dict.fromkeys(message["role"] for message in messages))
    if "assistant" in roles:
        return
    raise OddConversation(
        f"no message has the role assistant, whose messages are learned, only {', '.join(roles)}",
        "give each answer the role assistant, and each question the role user",
    )


def _take_weight(message: dict, number: int) -> bool:
    """Whether a message may be learned by its weight, as OpenAI's format has it, which is taken
    out. Raises OddConversation."""
    weight = message.pop("weight", None)
    if weight is None:
        return True
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or weight not in (0, 1):
        raise OddConversation(
            f"message {number} has weight={json.dumps(weight)[:80]}",
            "give 1 for an answer that is learned and 0 for one that is not",
        )
    if weight == 1 and message["role"] != "assistant":
        raise OddConversation(
            f"message {number} has weight=1 and the role {message['role']}, but only what the"
            " assistant wrote is learned",
            "remove the weight",
        )
    return weight == 1


def _weighted(
    spans: list[tuple[int, int]], messages: list[dict], weights: list[bool]
) -> list[tuple[int, int]]:
    """The spans of the answers that have weight. Raises OddConversation."""
    weights_of_answers = [
        weight
        for message, weight in zip(messages, weights, strict=True)
        if message["role"] == "assistant"
    ]
    if all(weights_of_answers):
        return spans
    if not any(weights_of_answers):
        raise OddConversation(
            "each answer has weight=0, so nothing would be learned", "give one of them weight=1"
        )
    if len(spans) != len(weights_of_answers):
        raise OddConversation(
            f"the template marks {len(spans)} places as written by the assistant, but there are "
            f"{len(weights_of_answers)} answers, so which place an answer with weight=0 has cannot"
            " be told",
            "let the template mark each answer once",
        )
    return [span for span, weight in zip(spans, weights_of_answers, strict=True) if weight]


def _check_content(message: dict, number: int) -> None:
    """Raises OddConversation where the content is none that can be learned."""
    role, content = message["role"], message.get("content")
    subject = f"message {number}, of the role {role},"
    if content is None:
        if role == "assistant" and _has_calls(message):
            return
        raise OddConversation(f"{subject} has no content", "give its text")
    if role in TOOL_ROLES or isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise OddConversation(
            f"{subject} has content that is {_name_type(content)}",
            "give a text, or a list of parts",
        )
    for part in content:
        if not _is_text_part(part):
            raise OddConversation(
                f"{subject} has {_name_part(part)}, but only text is learned here",
                "leave the conversation out",
            )


def _has_calls(message: dict) -> bool:
    return any(message.get(name) for name in ("tool_calls", "function_call"))


def _name_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind:
        return f"a part of type {json.dumps(kind)[:80]}"
    return f"the part {json.dumps(part)[:80]}"


def _is_text_part(part: object) -> bool:
    if isinstance(part, str):
        return True
    return (
        isinstance(part, dict)
        and part.get("type", "text") in TEXT_PARTS
        and isinstance(part.get("text"), str)
    )


def _part_text(part: str | dict) -> str:
    return part if isinstance(part, str) else part["text"]


def _spellings(part: str | dict) -> list[str]:
    """How a part is spelled by templates that take it for a text: as Python, as JSON."""
    # A text alone is spelled with quotes only where it lies in a list.
    forms = [part] if isinstance(part, dict) else [[part]]
    return [
        spelling
        for form in forms
        for spelling in (str(form), json.dumps(form, ensure_ascii=False), json.dumps(form))
    ]


def _join_parts(messages: list[dict]) -> list[dict]:
    """The messages, those whose content is parts of text with the parts joined as one text."""
    joined = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and content and all(map(_is_text_part, content)):
            message = message | {"content": "".join(map(_part_text, content))}
        joined.append(message)
    return joined


def _name_type(value: object) -> str:
    return "empty" if value == [] else type(value).__name__


def _read_message(message: dict) -> dict:
    """Without keys that say nothing, and with its reasoning under the names that templates ask
    for."""
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

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        marks: Any = self.environment.globals["generation_marks"]
        begin, end = marks
        return f"{begin}{caller()}{end}"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML would take for tags.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
