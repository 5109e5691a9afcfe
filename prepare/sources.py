"""A source: a selection of one data set's files and rows, and what reading them yields."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lib.errors import MachineError, UserError

MESSAGES_MORE = ("tools", "chat_template_kwargs")  # columns that a template may be given beside
PAIR = ("prompt", "response")  # columns of instructions
MESSAGES = ("messages",)  # column of conversations, rendered by the tokenizer's chat template
# A file that begins with so many rows of no use, and none of use, is another one than was meant.
ODD_ROWS_MOST = 1000
SKIP_ROWS = "add skip_bad=true to leave out such rows"


class BadFile(MachineError):
    """An input file that cannot be read; the message says why. It is skipped, counted and
    listed."""


class SourceRow(NamedTuple):
    """What a reader takes of one row of a file."""

    texts: tuple[str, ...]  # (text,), or (prompt, response)
    share: float  # of the file that was read so far
    is_continued: bool = False  # whether it goes on with the row before: its document was cut
    # Instead of texts: the messages, with the other columns that a chat template may be given.
    conversation: dict | None = None
    place: str = ""  # where a conversation stands


@dataclass(kw_only=True)
class Reading:
    """How a file shall be read, and what its reader reports beside the rows; one object a
    reading."""

    borders: tuple[str, ...] = ()  # a line of a .txt that is one of these alone ends a document
    skips_odd_rows: bool = False  # rows that cannot be used are counted, not refused
    skips_broken_lines: bool = True  # a line that is not JSON is such a row; else the file is bad
    characters: int = 0  # of the texts
    replaced: int = 0  # of them, U+FFFD in place of bytes that are not UTF-8
    joined_lists: int = 0  # texts that were lists of strings, a line each
    inner_borders: int = 0  # lines of a .txt that hold a border beside other text: no border
    rows: int = 0  # that were taken
    odd_rows: int = 0  # that were skipped
    first_odd_row: str = ""  # where it is and what is wrong with it

    def restart(self) -> None:
        """Count from the first row of the file again."""
        self.characters = self.replaced = self.joined_lists = self.inner_borders = 0
        self.rows = self.odd_rows = 0
        self.first_odd_row = ""

    def skip_or_refuse(self, place: str, problem: str, remedy: str = "") -> None:
        """Count an odd row. Raises UserError where odd rows are refused, BadFile where the file
        has no other rows."""
        if not self.skips_odd_rows:
            remedies = [remedy] if remedy else []
            raise UserError(f"{place}{problem}: {', or '.join([*remedies, SKIP_ROWS])}")
        self.odd_rows += 1
        self.first_odd_row = self.first_odd_row or f"{place}{problem}"
        if self.odd_rows >= ODD_ROWS_MOST:
            self.refuse_if_useless()

    def refuse_if_useless(self) -> None:
        """Raises BadFile where rows were skipped and none could be taken."""
        if self.odd_rows and not self.rows:
            raise BadFile(
                f"none of {self.odd_rows:,} rows can be used; the first: {self.first_odd_row}"
            )


@dataclass(frozen=True)
class InputFile:
    """One task's input."""

    name: str
    bytes: int | None  # as it lies on disk or on the server; None where nobody knows
    stamp: str | int | None  # changes with its content
    # Yields the rows, the same at each call. Raises BadFile: it cannot be read; UserError: another
    # column is meant, a row is odd, or the Hub refuses.
    read: Callable[[Reading], Iterator[SourceRow]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A selection of one data set's files and rows."""

    name: str | None = None  # of its folder
    dataset: str
    revision: str  # a commit: a branch would change under a resume
    license: str
    # of the Hub: pattern of paths within the repository, or the paths themselves
    files: str | tuple[str, ...] = ()
    local_files: tuple[InputFile, ...] = ()  # of this machine
    column: str = "text"
    # column, nested by dots -> values of the rows wanted
    keep: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # a column of `keep` by whose values the files are grouped, to read only those that matter
    grouped_by: str | None = None
    # of the whole source, about, by GPT-2's tokenizer; None where nobody knows
    tokens: float | None = None
    budget: int | None = None  # training tokens to prepare; None: all there are
    may_age: bool = False  # whether shards of an older revision serve as well
    # whether its documents are prompts and responses, the responses alone to be learned
    is_masked: bool = False
    is_chat: bool = False  # whether they are conversations, lists of messages, and masked

    def __post_init__(self):
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise UserError(
                f"name={self.name!r} must be one folder name, of letters, digits, '_', '-' and '.',"
                " such as mydata"
            )

    @property
    def selection(self) -> dict:
        """What is taken of each row, as index.json says it."""
        if self.local_files:
            return {"instruct": MESSAGES if self.is_chat else PAIR} if self.is_masked else {}
        return {"column": self.column, "files": self.files, "keep": self.keep}
