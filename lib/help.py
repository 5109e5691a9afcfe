"""The page that --help prints, made from a dataclass and a docstring."""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from lib.values import union_members

# program, arguments
EXAMPLE = re.compile(r"^ {4}((?:torchrun|python|sbatch)(?: -m| --?\w+=\S+)* \S+)(.*)\n?", re.M)


HELP_WIDTH, HELP_COLUMN = 100, 44  # widest line; meanings begin at this column at the latest


def help_page(doc: str, options: str = "") -> str:
    """What --help prints of a command's docstring; its examples, indented lines that begin with a
    program, last."""
    what, _, description = EXAMPLE.sub("", doc.strip()).partition("\n\n")
    examples = list(EXAMPLE.finditer(doc))
    program, words = next(example.groups() for example in examples if "python" in example[0])
    bare = [word for word in words.split("  ")[0].split() if "=" not in word]
    parts = [
        " ".join(["usage:", program, *bare, "[key=value ...]"]),
        what,
        options and f"options:\n{options}",
        description.strip("\n"),
        "examples:\n" + "".join(example[0] for example in examples).rstrip(),
    ]
    return "\n\n".join(filter(None, parts))


def field_lines(prefix: str, cls: type) -> dict[str, str]:
    """What --help prints of each field of a dataclass: key, type, default and meaning.

    The meaning is the comment behind the field, or the lines of comment above it. A Literal is
    spelled out."""
    meanings = field_meanings(cls)
    hints = get_type_hints(cls, include_extras=True)
    own_fields = [f for f in fields(cls) if not is_dataclass(f.type)]
    heads = {f.name: _field_head(prefix, f, hints[f.name]) for f in own_fields}
    short_heads = [len(head) for head in heads.values() if len(head) <= HELP_COLUMN]
    column = max(short_heads, default=0) + 2
    return {name: _help_line(head, meanings.get(name, ""), column) for name, head in heads.items()}


def _field_head(prefix: str, field: Field, hint: object) -> str:
    """Such as "  optim.lr: float" or "  fp8.head: bool = False"."""
    head = (
        f"  {prefix}{field.name}: {' | '.join(_option_type(part) for part in union_members(hint))}"
    )
    return head if field.default is MISSING else f"{head} = {field.default!r}"


def _option_type(hint: object) -> str:
    """A type as it is written on a command line."""
    if hint is type(None):
        return "none"
    if get_origin(hint) is Literal:
        return " | ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) is Annotated:
        return "path"
    if get_origin(hint) is tuple:
        return f"{_option_type(get_args(hint)[0])},..."
    return inspect.formatannotation(hint)


def _help_line(head: str, meaning: str, column: int) -> str:
    """The head of a field and its meaning from `column` on; both are wrapped at HELP_WIDTH."""
    lines = textwrap.wrap(
        head.strip(),
        HELP_WIDTH,
        initial_indent="  ",
        subsequent_indent=" " * 6,
        break_long_words=False,
    )
    comment = textwrap.wrap(meaning, HELP_WIDTH - column - 2, break_long_words=False)
    if comment and len(lines[-1]) < column - 1:
        lines[-1] = f"{lines[-1]:{column}}# {comment.pop(0)}"
    return "\n".join([*lines, *(" " * column + f"# {line}" for line in comment)])


def field_meanings(cls: type) -> dict[str, str]:
    """Field -> its meaning: the comment behind it in the source, or else that on the lines above
    it."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        meanings |= _comments_of_fields(base)
    return meanings


def _comments_of_fields(cls: type) -> dict[str, str]:
    """field_meanings() of one class without its bases."""
    source = textwrap.dedent(inspect.getsource(cls))
    behind: dict[int, str] = {}  # line -> comment behind code
    alone: dict[int, str] = {}  # line -> comment that has the line for itself
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = not token.line[: token.start[1]].strip()
            (alone if is_alone else behind)[token.start[0]] = token.string.removeprefix("#").strip()
    comments = {}
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        above: list[str] = []
        line = node.lineno - 1
        while line in alone:
            above.insert(0, alone[line])
            line -= 1
        last_line = node.end_lineno or node.lineno
        comments[node.target.id] = behind.get(last_line, " ".join(above))
    return comments
