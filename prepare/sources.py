"""Where documents come from: files of this machine, data sets of the Hugging Face Hub."""

import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from lib.errors import MachineError, UserError

FORMATS, PACKINGS = (".txt", ".jsonl", ".parquet", ".json"), (".gz", ".xz", ".zst")
PAIR_FORMATS = (".jsonl", ".parquet", ".json")  # of instructions
PAIR = ("prompt", "response")  # columns of instructions
MESSAGES = ("messages",)  # column of conversations, rendered by the tokenizer's chat template
MESSAGES_MORE = ("tools", "chat_template_kwargs")  # columns that a template may be given beside
TXT_CHARS = 16_384  # a text file is cut at the first blank line after this many characters,
TXT_CHARS_MOST = 1_048_576  # or in mid-paragraph after this many: memory stays bounded
ROWS = 64  # of parquet in memory at once: documents of a megabyte must not fill the memory
KIND_ROWS = 100  # rows at the beginning of a file that tell pairs from conversations
BLANK = b" \t\n\r\f\v\xef\xbb\xbf"  # a line of these alone (also a byte order mark) is no row
TIMEOUT_S = 8.0  # of a question to the Hub; with ASK_WAITS half a minute where there is no network
ASK_WAITS = (1, 3)  # seconds before a question is asked again
# seconds before a block is: 18 minutes of silence cost no file
READ_WAITS = (1, 5, 25, 60, 120, 300, 600)
# Of .xz and .zst that are unpacked at once: at most 64 MB, of a file of zeros.
PACKED_BYTES = 1 << 11
# bytes a request: the default of 5 MiB makes 15,000 requests of 70 GB, and the Hub counts them
BLOCK = 16 << 20
# of a file whose first record is looked at: bytes a request, lines at most
HEAD_BYTES, HEAD_LINES = 1 << 16, 1000
# A file that begins with so many rows of no use, and none of use, is another one than was meant.
ODD_ROWS_MOST = 1000
SKIP_ROWS = "add skip_bad=true to leave out such rows"
# How a file that is one array begins. A line of .jsonl may be a list by mistake, of objects hardly.
ARRAY = {".json": re.compile(rb"\["), ".jsonl": re.compile(rb"\[\s*\{")}
# Of an array that are read at once; of one element.
JSON_CHARS, JSON_CHARS_MOST = 1 << 18, 1 << 26
# More characters than any literal or escape has, one of which may be cut.
JSON_WORD = 16
JSON_BLANK = re.compile(r"[ \t\r\n]*")
HEAD_LOOKED_AT = 4096  # bytes at the begin of a file whose NULs tell UTF-16 and -32
NAMES_MOST = 20  # columns that a message lists
NOTHING = r"(?!)"  # a pattern that matches nowhere
REPLACEMENT = "\ufffd"
ENCODING_REMEDY = (
    "convert it, such as by `iconv -f WINDOWS-1251 -t UTF-8 FILE`, with the encoding that it has"
)


class BadFile(MachineError):
    """An input file that cannot be read; the message says why. It is skipped, counted and
    listed."""


class Row(NamedTuple):
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
    read: Callable[[Reading], Iterator[Row]]


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

    def list_files(self) -> list[InputFile]:
        """The input files in the order in which they are taken in: those of the Hub, which is asked
        for them, by a hash of their names. A prefix, which is what a budget takes, is then a random
        sample, where the first names may be one crawl."""
        if self.local_files:
            return list(self.local_files)
        from fsspec.utils import glob_translate
        from huggingface_hub import HfApi

        is_pattern = isinstance(self.files, str)
        globs = expand_braces(self.files) if is_pattern else []
        patterns = [re.compile(glob_translate(glob)) for glob in globs]

        def is_wanted(path: str) -> bool:
            if not is_pattern:
                return path in self.files
            return any(pattern.fullmatch(path) for pattern in patterns)

        def ask() -> dict[str, int]:
            # fails soon, the listing tries long
            HfApi().dataset_info(self.dataset, revision=self.revision, timeout=TIMEOUT_S)
            entries = HfApi().list_repo_tree(
                self.dataset, recursive=True, revision=self.revision, repo_type="dataset"
            )
            return {entry.path: entry.size for entry in entries if hasattr(entry, "size")}

        there = _ask(ask, self)
        found = sorted(filter(is_wanted, there))
        for path in found:
            where = f"files= of {self.dataset}@{self.revision}: {path}"
            _check_format(PurePath(path), FORMATS, where)
        if self.grouped_by:
            found = _of_group(self, found, self.grouped_by, self.keep[self.grouped_by])
        if not found:
            wanted = self.files if is_pattern else ", ".join(self.files)
            values = "; ".join(f"{column}={', '.join(kept)}" for column, kept in self.keep.items())
            raise UserError(
                f"{self.dataset}@{self.revision} has no file"
                f" {wanted}{f' with {values}' if values else ''}: correct the pattern; there are"
                f" {', '.join([*there][:5]) or 'none'}"
            )
        found.sort(key=lambda path: hashlib.blake2b(path.encode(), digest_size=8).digest())
        return [
            InputFile(path, there[path], self.revision, partial(_read_hub, self, path))
            for path in found
        ]


# ------------------------------------------------------------------------------------- local files


def local_source(
    name: str, words: list[str], columns: tuple[str, ...], license: str | None
) -> Source:
    """The files as a source, its text in one column, or in PAIR. Raises UserError: one is missing
    or of another kind."""
    paths, files = [Path(word) for word in words], []
    if not words:
        raise UserError("no file is named: python prepare_data.py local FILE... name=mydata")
    if columns == PAIR and _holds_messages(paths[0]):
        columns = MESSAGES
    is_masked = columns in (PAIR, MESSAGES)
    alike = Counter(path.name for path in paths)
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is no file: name the files themselves, such as FOLDER/*.jsonl")
        _check_format(path, PAIR_FORMATS if is_masked else FORMATS, str(path))
        # Files of one name in several folders need their folders to be told apart.
        known_as, stat, where = (
            path.name if alike[path.name] == 1 else str(path),
            path.stat(),
            str(path.absolute()),
        )
        read = partial(read_file, partial(open, where, "rb"), where, columns, {}, True)
        files.append(InputFile(known_as, stat.st_size, stat.st_mtime_ns, read))
    stats = [(path.name, file.bytes, file.stamp) for path, file in zip(paths, files, strict=True)]
    return Source(
        name=name,
        dataset=f"local: {', '.join(path.name for path in paths)}; column {' and '.join(columns)}",
        revision=hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16],
        license=license or "not stated",
        local_files=tuple(files),
        is_masked=is_masked,
        is_chat=columns == MESSAGES,
    )


def _holds_messages(path: Path) -> bool:
    """Whether a file of instructions holds conversations, by the first row that is a conversation
    or a pair. Says so where that row is both. False where the file cannot be read: who reads it
    says so."""
    if not path.is_file() or _format(path) not in PAIR_FORMATS:
        return False
    reading = Reading(skips_odd_rows=True)
    records = _records(partial(open, path, "rb"), str(path), (), (*MESSAGES, *PAIR), reading)
    try:
        for record, _ in islice(records, KIND_ROWS):
            has_messages = record.values.get(MESSAGES[0]) is not None
            if all(record.values.get(column) is not None for column in PAIR):
                if has_messages:
                    print(
                        f"{path}: its rows have prompt and response as well as messages; the"
                        " responses are learned, and messages are not read: remove prompt and"
                        " response to learn from the messages",
                        file=sys.stderr,
                    )
                return False
            if has_messages:
                return True
    except (BadFile, UserError):
        return False
    return False


def is_text_file(name: str) -> bool:
    """Whether the name is that of plain text, packed or not."""
    return _format(PurePath(name)) == ".txt"


def _format(path: PurePath) -> str:
    return PurePath(path.stem).suffix if path.suffix in PACKINGS else path.suffix


def _check_format(path: PurePath, formats: tuple[str, ...], where: str) -> None:
    if _format(path) == ".parquet" and path.suffix != ".parquet":
        raise UserError(
            f"{where} is parquet packed as a whole: unpack it, parquet packs its columns itself"
        )
    if _format(path) not in formats:
        raise UserError(
            f"{where} cannot be read: its name must end in {', '.join(formats)}, text optionally"
            f" followed by {', '.join(PACKINGS)}"
        )


# ----------------------------------------------------------------------------------------- readers


class _Record(NamedTuple):
    """A row as it lies in a file."""

    number: int  # from 1: the line, element or row
    values: dict[str, Any]  # by column; texts that are not UTF-8 as bytes
    label: str = ":"  # before the number, in messages
    problem: str = ""  # why the row has no values
    is_continued: bool = False  # as Row has it
    # The values without the bytes that are not UTF-8, where a line of JSON has such bytes.
    undamaged: dict[str, Any] | None = None


def read_file(
    opened: Callable,
    where: str,
    columns: tuple[str, ...],
    keep: dict,
    is_strict: bool,
    reading: Reading,
) -> Iterator[Row]:
    """InputFile.read of the file `where`, whose name says its format: the texts of the columns of
    each row, a null as an empty one. keep: column, nested by dots -> values of the rows wanted.
    is_strict: each row must have the columns, not the first one alone."""
    is_first = True
    for record, share in _records(opened, where, columns, tuple(keep), reading):
        is_wanted = all(_nested(record.values, name) in values for name, values in keep.items())
        if not record.problem and not is_wanted:
            is_first = False
            continue
        problem, remedy = _problem(record, columns, is_strict or is_first)
        place = f"{where}{record.label}{record.number}"
        if problem:
            reading.skip_or_refuse(place, problem, remedy)
            continue
        is_first = False
        reading.rows += 1
        if columns == MESSAGES:
            yield Row((), share, conversation=_conversation(record, reading), place=place)
            continue
        yield Row(
            tuple(_text(record, column, reading) for column in columns), share, record.is_continued
        )
    reading.refuse_if_useless()


def _problem(record: _Record, columns: tuple[str, ...], is_strict: bool) -> tuple[str, str]:
    """What keeps a row from being used, "" where nothing does, and the remedy for a wrong
    column."""
    if record.problem:
        return record.problem, ""
    for column in columns:
        is_there, value = _look_up(record.values, column)
        if not is_there and is_strict:
            return _no_column(column, _column_names(record.values))
        if columns == MESSAGES:
            continue  # the chat template judges them
        is_text = value is None or isinstance(value, str | bytes)
        is_list_of_texts = (
            column not in PAIR
            and isinstance(value, list)
            and all(isinstance(v, str | bytes) for v in value)
        )
        if not is_text and not is_list_of_texts:
            return f": column {column!r} holds {_kind(value)}, not text", "set column="
    return "", ""


def _no_column(column: str, names: list[str]) -> tuple[str, str]:
    """What there is to say of a row or a file without a column, and the remedy. names: the
    columns that it has."""
    listed = ", ".join(names[:NAMES_MOST]) + (", ..." if len(names) > NAMES_MOST else "")
    remedy = "set column= to one of them"
    if column in (*PAIR, *MESSAGES):
        remedy = f"instruct=true needs {' and '.join(PAIR)}, or messages, in each row alike"
    return f" has no column {column!r}, only {listed or '(none)'}", remedy


def _kind(value) -> str:
    """What a value is, as messages say it."""
    if isinstance(value, list) and any(isinstance(element, str | bytes) for element in value):
        others = {
            type(element).__name__ for element in value if not isinstance(element, str | bytes)
        }
        return " and ".join(["a list with text", *sorted(others)]) if others else "list"
    return type(value).__name__


def _text(record: _Record, column: str, reading: Reading) -> str:
    """The text of a column, "" for null. Counts its characters and those that stand for bytes
    that are not UTF-8."""
    value = _look_up(record.values, column)[1]
    parts = value if isinstance(value, list) else [value]
    reading.joined_lists += isinstance(value, list)
    text, replaced = _joined(parts)
    if record.undamaged is not None:
        value = _look_up(record.undamaged, column)[1]
        undamaged = "\n".join(value) if isinstance(value, list) else value or ""
        replaced = text.count(REPLACEMENT) - undamaged.count(REPLACEMENT)
    reading.characters += len(text)
    reading.replaced += replaced
    return text


def _conversation(record: _Record, reading: Reading) -> dict:
    """The columns of a conversation. Counts characters as _text() does."""
    names = (*MESSAGES, *MESSAGES_MORE)
    conversation = {name: record.values.get(name) for name in names}
    text = json.dumps(conversation, ensure_ascii=False)
    reading.characters += len(text)
    if record.undamaged is not None:
        undamaged = json.dumps(
            {name: record.undamaged.get(name) for name in names}, ensure_ascii=False
        )
        reading.replaced += text.count(REPLACEMENT) - undamaged.count(REPLACEMENT)
    return conversation


def _joined(parts: list[str | bytes | None]) -> tuple[str, int]:
    """The parts as one text, a line each, and how often U+FFFD stands in it for bytes that are
    not UTF-8."""
    texts, replaced = [], 0
    for part in parts:
        text, count = _decoded(part) if isinstance(part, bytes) else (part or "", 0)
        texts.append(text)
        replaced += count
    return "\n".join(texts), replaced


def _decoded(raw: bytes) -> tuple[str, int]:
    """The text that UTF-8 bytes are, and how often U+FFFD stands in it for bytes that are not
    UTF-8."""
    try:
        return raw.decode(), 0
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        return text, text.count(REPLACEMENT) - raw.count(
            REPLACEMENT.encode()
        )  # the text may have had some itself


def _look_up(values: dict, column: str) -> tuple[bool, Any]:
    """Whether a row has a column, nested by dots unless that is its own name, and the value:
    None below a null."""
    if column in values:
        return True, values[column]
    inner: Any = values
    for name in column.split("."):
        if inner is None:
            return True, None
        if not isinstance(inner, dict) or name not in inner:
            return False, None
        inner = inner[name]
    return True, inner


def _nested(values: dict, column: str) -> Any:
    return _look_up(values, column)[1]


def _column_names(values: dict, prefix: str = "") -> list[str]:
    """The columns of a row, those of objects within it by dots."""
    names = []
    for name, value in values.items():
        is_object = isinstance(value, dict) and value
        names += _column_names(value, f"{prefix}{name}.") if is_object else [f"{prefix}{name}"]
    return names


def _records(
    opened: Callable, where: str, columns: tuple[str, ...], kept: tuple[str, ...], reading: Reading
) -> Iterator[tuple[_Record, float]]:
    """The rows of a file, each with the share of the file that was read. kept: columns that are
    looked at as well. Raises BadFile and UserError."""
    import pyarrow
    import zstandard

    packing = PurePath(where).suffix
    try:
        with opened() as file:
            size = max(1, file.seek(0, os.SEEK_END))
            file.seek(0)
            if packing == ".parquet":
                rows = _parquet_rows(file, where, columns, kept, reading)
            else:
                stream = _unpacked(file, packing)
                _refuse_wide_characters(stream.peek(HEAD_LOOKED_AT)[:HEAD_LOOKED_AT], where)
                if is_text_file(where):
                    rows = _stretches(stream, columns[0], reading)
                elif ARRAY[_format(PurePath(where))].match(
                    stream.peek(HEAD_LOOKED_AT).lstrip(BLANK)
                ):
                    rows = _json_array(stream, where)
                else:
                    rows = _json_lines(stream, where, reading)
            for row in rows:
                yield row, file.tell() / size
    except (
        OSError,
        EOFError,
        zlib.error,
        lzma.LZMAError,
        zstandard.ZstdError,
        pyarrow.ArrowException,
    ) as error:
        # Of the disk or the network; pyarrow and gzip have OSErrors for content.
        is_unread = isinstance(error, OSError) and (
            type(error) not in (OSError, gzip.BadGzipFile) or error.errno is not None
        )
        if isinstance(error, ConnectionError):
            sentence = f"{where} cannot be read: {_brief(error)}"
        elif is_unread:
            sentence = (
                f"{where} cannot be read ({_brief(error)}): check its permissions and the disk"
            )
        else:
            sentence = f"{where} is damaged or was cut short ({_brief(error)}): fetch it again"
        raise BadFile(sentence) from error


class FramesReader(io.RawIOBase):
    """What a packed file of any number of frames holds. new_frame: makes the decompressor of
    one, with decompress(), eof and unused_data. Raises EOFError: the file was cut short, which
    the reader of `zstandard` takes for the end; what the decompressor raises: it is damaged,
    which the reader of `lzma` takes for the end behind a first frame."""

    def __init__(self, file: io.BufferedIOBase, new_frame: Callable[[], Any]):
        self._file, self._new_frame, self._frame = file, new_frame, None
        self._left = b""  # packed bytes behind the last frame
        self._is_behind_frame = False  # whether a frame has just ended
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._unpacked:
            packed = self._left or self._file.read(PACKED_BYTES)
            self._left = b""
            if not packed:
                if self._frame:
                    raise EOFError("it ends within a frame")
                return 0
            if self._is_behind_frame:  # zeros may fill the space between frames of xz
                packed = packed.lstrip(b"\0")
                if not packed:
                    continue
            self._is_behind_frame = False
            self._frame = self._frame or self._new_frame()
            self._unpacked = memoryview(self._frame.decompress(packed))
            if self._frame.eof:
                self._left, self._frame, self._is_behind_frame = self._frame.unused_data, None, True
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count


def _unpacked(file: io.BufferedIOBase, packing: str) -> io.BufferedIOBase:
    """The content of a file of that packing, of one of none itself."""
    if packing == ".gz":
        return gzip.open(file)
    if packing == ".xz":
        return io.BufferedReader(
            FramesReader(file, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ)), 1 << 18
        )
    if packing == ".zst":
        import zstandard

        # By default windows end at 128 MB; `zstd --long=31` makes some of 2 GB, which then take as
        # much memory.
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        return io.BufferedReader(FramesReader(file, decompressor.decompressobj), 1 << 18)
    return file if hasattr(file, "peek") else io.BufferedReader(file, 1 << 18)


def _refuse_wide_characters(head: bytes, where: str) -> None:
    """Raises BadFile where the first bytes of a file are those of UTF-16 or UTF-32."""
    nuls = head.count(0)
    if head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff") or nuls > 0.6 * len(
        head
    ):  # three of four bytes of Latin text
        encoding = "UTF-32"
    elif head[:2] in (b"\xff\xfe", b"\xfe\xff") or nuls > 0.2 * len(head):
        encoding = "UTF-16"
    else:
        return
    raise BadFile(
        f"{where} is {encoding}: save it as UTF-8, such as by `iconv -f {encoding} -t UTF-8 FILE`"
    )


def _json_lines(lines: Iterable[bytes], where: str, reading: Reading) -> Iterator[_Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip(BLANK):
            continue
        try:
            value, undamaged = _parsed(line)
        except (ValueError, RecursionError) as error:
            text = line.decode(errors="replace")
            reason = str(error)
            # its own line numbers begin anew in each line
            if isinstance(error, json.JSONDecodeError):
                place = min(error.pos, len(text.rstrip())) + 1
                reason = f"{error.msg}, character {place} of the line"
            is_utf8 = REPLACEMENT not in text
            hint = "" if is_utf8 else f"; it is not UTF-8: {ENCODING_REMEDY}"
            if number == 1 and _format(PurePath(where)) == ".json":
                hint += "; a .json holds an object a line, or one array of objects"
            if reading.skips_odd_rows and reading.skips_broken_lines:
                yield _Record(number, {}, problem=f" is no line of JSON ({reason}){hint}")
                continue
            raise BadFile(f"{where}:{number} is no line of JSON ({reason}){hint}") from error
        if isinstance(value, dict):
            yield _Record(number, value, undamaged=undamaged)
        else:
            yield _Record(number, {}, problem=f" is no object but {type(value).__name__}")


def _json_array(stream: io.BufferedIOBase, where: str) -> Iterator[_Record]:
    """The elements of a file that is one array, of which JSON_CHARS and an element are in memory
    at a time; a string is a row whose column is "text". Raises BadFile: an element that is no
    JSON, behind which nothing can be read, or is too long."""
    array, number = _JsonText(stream), 0
    try:
        array.take("[")
        is_end = array.next() == "]"
        while not is_end:
            number += 1
            value, undamaged = array.take_value()
            if isinstance(value, str):
                value = {"text": value}
                undamaged = None if undamaged is None else {"text": undamaged}
            if isinstance(value, dict):
                yield _Record(number, value, ", element ", undamaged=undamaged)
            else:
                yield _Record(number, {}, ", element ", f" is no object but {type(value).__name__}")
            is_end = array.next() == "]"
            if not is_end:
                array.take(",")
        array.take("]")
        if array.next():
            raise ValueError("text follows the end of the array")
    except (ValueError, RecursionError) as error:
        raise BadFile(
            f"{where}, element {number} of its array: it cannot be read as JSON ({error})"
        ) from error


class _JsonText:
    """JSON that is read from its beginning to its end, a part in memory at a time."""

    def __init__(self, stream: io.BufferedIOBase):
        # Bytes that are not UTF-8 are kept, to be counted later.
        self._rest = io.TextIOWrapper(
            stream, encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        self._part, self._place = "", 0

    def next(self) -> str:
        """The next character that is no white space, which stays the next; "" at the end."""
        while True:
            blank = JSON_BLANK.match(self._part, self._place)
            self._place = blank.end() if blank else self._place
            if self._place < len(self._part):
                return self._part[self._place]
            if not self._read_on():
                return ""

    def take(self, letter: str) -> None:
        """Raises EOFError and ValueError: something else is there."""
        if not self.next():
            raise EOFError("its array has no end")
        if self.next() != letter:
            raise ValueError(f"{letter!r} is expected, {self.next()!r} is there")
        self._place += 1

    def take_value(self) -> tuple[Any, Any]:
        """As _parsed() returns it. Raises EOFError: the file ends within the value; ValueError
        and RecursionError."""
        self.next()
        decode = json.JSONDecoder(strict=False).raw_decode
        while True:
            error = None
            try:
                value, end = decode(self._part, self._place)
                if end < len(self._part):  # else a number may go on
                    break
            except json.JSONDecodeError as failure:
                error = failure
            is_open = error is None or error.msg.startswith("Unterminated string")
            letters_behind = len(self._part) - error.pos if error else 0
            if error and not is_open and letters_behind >= JSON_WORD:
                raise ValueError(error.msg)
            if len(self._part) - self._place > JSON_CHARS_MOST:
                raise ValueError(f"it is longer than {JSON_CHARS_MOST:,} characters")
            if self._read_on():
                continue
            if error and not is_open and letters_behind > 0:
                raise ValueError(error.msg)
            raise EOFError("it ends within an element of its array")
        raw = _unescaped(self._part[self._place : end])
        self._place = end
        return _parsed(raw) if isinstance(raw, bytes) else (value, None)

    def _read_on(self) -> bool:
        """Read as much again as is left, so that a long value is not tried too often; whether
        there was more."""
        left = self._part[self._place :]
        more = self._rest.read(max(JSON_CHARS, len(left)))
        self._part, self._place = left + more, 0
        return bool(more)


def _parsed(raw: bytes) -> tuple[Any, Any]:
    """The value that JSON spells, bytes that are not UTF-8 as U+FFFD, and the same without those
    bytes, None where there are none. Raises ValueError and RecursionError."""
    decode = json.JSONDecoder(strict=False).decode
    try:
        return decode(raw.decode("utf-8-sig")), None
    except UnicodeDecodeError:
        return decode(raw.decode("utf-8-sig", errors="replace")), decode(
            raw.decode("utf-8-sig", errors="ignore")
        )


# ----------------------------------------------------------------------------------------- parquet


def _parquet_rows(
    file: io.BufferedIOBase,
    where: str,
    columns: tuple[str, ...],
    kept: tuple[str, ...],
    reading: Reading,
) -> Iterator[_Record]:
    """Raises UserError or, where odd rows are skipped, BadFile: a column is missing or of a type
    that is no text."""
    import pyarrow.parquet

    # By themselves pyarrow and `datasets` read a row group, which may be the whole file, into
    # memory at once.
    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    schema = table.schema_arrow
    if problem := _schema_problem(schema, columns):
        if reading.skips_odd_rows:
            raise BadFile(where + problem[0])
        raise UserError(
            f"{where}{': '.join(problem)}, or add skip_bad=true to leave out such files"
        )
    more = MESSAGES_MORE if columns == MESSAGES else ()
    # What lies within a value of type JSON is looked up in each row, once the value is decoded.
    needed = dict.fromkeys(
        name.partition(".")[0] if _is_within_json(schema, name) else name
        for name in [*columns, *kept, *more]
        if _type_of(schema, name) is not None
    )
    number = 0
    for batch in table.iter_batches(ROWS, columns=list(needed)):
        arrays = [_values(_array_of(batch, name), name, where) for name in needed]
        for row in zip(*arrays, strict=True):
            number += 1
            values = dict(zip(needed, row, strict=True))
            broken = [name for name, value in values.items() if isinstance(value, BrokenJson)]
            if broken:
                problem = (
                    f": column {broken[0]!r} is of type JSON, but what it holds is not valid JSON"
                )
                yield _Record(number, {}, ", row ", problem)
                continue
            if columns == MESSAGES:
                values = _without_nulls(values)
            yield _Record(number, values, label=", row ")


def _without_nulls(value: Any) -> Any:
    """The value without keys of objects that are null: parquet gives each object the keys of
    all."""
    if isinstance(value, list):
        return [_without_nulls(element) for element in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}


def _schema_problem(schema, columns: tuple[str, ...]) -> tuple[str, str] | None:
    """What keeps a file of parquet from being used, and the remedy."""
    for column in columns:
        kind = _type_of(schema, column)
        if kind is None:
            return _no_column(column, _schema_names(schema))
        if columns == MESSAGES:
            continue  # the chat template judges them
        if not _holds_text(kind, is_list_allowed=column not in PAIR):
            return (
                f": column {column!r} holds {_type_name(kind)}, not text",
                "set column= to another one",
            )
    return None


def _type_of(schema, column: str):
    """The type of a column, nested by dots unless that is its own name; None where there is
    none."""
    import pyarrow

    if column in schema.names:
        return schema.field(column).type
    first, *inner = column.split(".")
    kind = schema.field(first).type if first in schema.names else None
    for name in inner:
        if isinstance(kind, pyarrow.JsonType):
            return kind  # each value tells what it holds
        if kind is None or not pyarrow.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _is_within_json(schema, column: str) -> bool:
    """Whether a column that _type_of() knows lies in values of type JSON."""
    import pyarrow

    if column in schema.names:
        return False
    first, *inner = column.split(".")
    kind = schema.field(first).type
    for name in inner:
        if isinstance(kind, pyarrow.JsonType):
            return True
        kind = kind.field(name).type
    return False


def _array_of(batch, column: str):
    """The values of a column that _type_of() knows."""
    import pyarrow.compute

    if column in batch.schema.names:
        return batch.column(column)
    first, *inner = column.split(".")
    return pyarrow.compute.struct_field(batch.column(first), inner)  # null where an outer one is


def _schema_names(fields, prefix: str = "") -> list[str]:
    """The columns of a schema or of a struct, those within structs by dots."""
    import pyarrow

    names = []
    for field_ in fields:
        name = prefix + field_.name
        is_struct = pyarrow.types.is_struct(field_.type)
        names += _schema_names(field_.type, f"{name}.") if is_struct else [name]
    return names


def is_list_type(kind) -> bool:
    """Whether values of an Arrow type are lists, in any of its layouts."""
    from pyarrow import types

    layouts = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    return any(is_layout(kind) for is_layout in layouts)


def _holds_text(kind, is_list_allowed: bool) -> bool:
    """Whether values of an Arrow type are texts, or nulls; of type JSON the values decide."""
    from pyarrow import JsonType, types

    if types.is_dictionary(kind):
        return _holds_text(kind.value_type, is_list_allowed)
    if is_list_type(kind):
        return is_list_allowed and _holds_text(kind.value_type, is_list_allowed=False)
    texts = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_null,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
        types.is_fixed_size_binary,
    )
    return any(is_text(kind) for is_text in texts) or isinstance(kind, JsonType)


def _type_name(kind) -> str:
    """An Arrow type as messages name it: numbers by Python's names, as those of other formats."""
    from pyarrow import types

    if types.is_integer(kind):
        return "int"
    if types.is_floating(kind):
        return "float"
    return str(kind)


def _values(array, column: str, where: str) -> list:
    """Of a column of parquet: texts that are not UTF-8, and binary ones, as bytes; what JSON
    spells decoded. Raises BadFile."""
    import pyarrow

    if isinstance(array.type, pyarrow.JsonType):
        texts = _values(array.storage, column, where)
        return [_decoded_json(text, array.type) for text in texts]
    try:
        values = array.to_pylist()
        if _holds_json(array.type):
            return [_decoded_json(value, array.type) for value in values]
        return values
    except UnicodeDecodeError:
        return array.cast(_as_binary(array.type)).to_pylist()
    except (
        ArithmeticError,
        LookupError,
        ValueError,
    ) as error:  # dates beyond Python's years, time zones it does not know
        raise BadFile(
            f"{where}: column {column!r} holds {array.type} that cannot be read ({_brief(error)})"
        ) from error


def _as_binary(kind):
    """The type of the same values as bytes, of an Arrow type of texts or of lists of them."""
    import pyarrow

    if _holds_text(kind, is_list_allowed=False):
        return pyarrow.large_binary()
    return pyarrow.list_(pyarrow.large_binary())


class BrokenJson:
    """In place of a value that is not the JSON which the type of its column promises."""


def _holds_json(kind) -> bool:
    """Whether an Arrow type has the type JSON within it."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return True
    if isinstance(kind, pyarrow.DataType) and kind.num_fields:
        return any(_holds_json(kind.field(number).type) for number in range(kind.num_fields))
    return False


def _decoded_json(value: Any, kind) -> Any:
    """A value of an Arrow type, that which has the type JSON decoded; BrokenJson where it cannot
    be."""
    try:
        return _with_json(value, kind)
    except (ValueError, RecursionError):
        return BrokenJson()


def _with_json(value: Any, kind) -> Any:
    import pyarrow

    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if isinstance(value, dict) and pyarrow.types.is_struct(kind):
        return {key: _with_json(inner, kind.field(key).type) for key, inner in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_with_json(element, kind.value_type) for element in value]
    return value


def _stretches(stream: io.BufferedIOBase, column: str, reading: Reading) -> Iterator[_Record]:
    """The documents of a text file, long ones in pieces. Without borders the file is one
    document."""
    # Line ends of any system become \n; bytes that are not UTF-8 are kept, to be counted later.
    lines, text = (
        io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape"),
        io.StringIO(),
    )
    find_border = re.compile("|".join(map(re.escape, reading.borders)) or NOTHING).search
    number, is_continued, has_borders, is_behind_border = 1, False, False, False

    def record(content: str) -> _Record:
        return _Record(number, {column: _unescaped(content)}, ", piece ", is_continued=is_continued)

    while line := lines.readline(TXT_CHARS_MOST):
        if find_border(line):
            if line.strip() in reading.borders:
                content = text.getvalue().rstrip("\n")
                if content and not content.isspace():
                    yield record(content if is_continued else content.lstrip("\n"))
                    number += 1
                text, is_continued, has_borders, is_behind_border = io.StringIO(), False, True, True
                continue
            reading.inner_borders += 1
        if is_behind_border and line.isspace():
            continue
        is_behind_border = False
        text.write(line)
        size = text.tell()
        if size >= TXT_CHARS_MOST or (size >= TXT_CHARS and line.isspace()):
            yield record(text.getvalue())
            text, number, is_continued = io.StringIO(), number + 1, True
    last = text.getvalue()
    if not has_borders:
        yield record(last)
    elif last and not last.isspace():
        yield record(last.rstrip("\n"))


def _unescaped(text: str) -> str | bytes:
    """A text that was read with surrogateescape: the bytes that were read, where some of them
    are not UTF-8."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")


# ----------------------------------------------------------------------------------------- the Hub


def expand_braces(pattern: str) -> list[str]:
    """The patterns that one with {a,b} means, as a shell expands it; braces without a comma are
    themselves."""
    for begin, end in _brace_pairs(pattern):
        choices = _split_at_commas(pattern[begin + 1 : end])
        if len(choices) > 1:
            return [
                expanded
                for choice in choices
                for expanded in expand_braces(pattern[:begin] + choice + pattern[end + 1 :])
            ]
    return [pattern]


def _brace_pairs(pattern: str) -> Iterator[tuple[int, int]]:
    """Where outer braces begin and end."""
    depth, begin = 0, 0
    for place, letter in enumerate(pattern):
        if letter == "{":
            begin = place if depth == 0 else begin
            depth += 1
        elif letter == "}" and depth:
            depth -= 1
            if depth == 0:
                yield begin, place


def _split_at_commas(text: str) -> list[str]:
    """The parts of a text between commas that are not within braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def any_dataset(
    dataset: str, column: str, revision: str | None, files: str | None, license: str | None
) -> Source:
    """A data set that configs/sources.py does not name: its train split, as datasets finds it, or
    what the pattern `files` means. The revision becomes the commit it means now. Raises UserError:
    no such data set, one with a script."""
    from huggingface_hub import HfApi

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset):
        raise UserError(f"hf:{dataset}: the name must look like hf:OWNER/NAME")
    source = Source(
        dataset=dataset,
        revision=revision or "main",
        files=files or (),
        column=column,
        license=license or "",
    )
    info = _ask(lambda: HfApi().dataset_info(dataset, revision=revision, timeout=TIMEOUT_S), source)
    licenses = [
        tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")
    ]
    source = replace(
        source, revision=info.sha, license=license or ", ".join(licenses) or "not stated"
    )
    if files:
        return source
    import datasets

    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False  # it would be loaded for nothing: 4 s, 180 MB
    try:
        builder = _ask(lambda: datasets.load_dataset_builder(dataset, revision=info.sha), source)
        paths = [
            path.partition(f"@{info.sha}/")[2]
            for path in (builder.config.data_files or {}).get("train", [])
        ]
        if not all(paths or [""]):  # files of another repository have no path here
            raise FileNotFoundError("it has no train split of its own")
    except UserError:
        raise
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise UserError(
            f"{dataset}: {_brief(error)}: give files= a pattern, such as files=data/*.parquet, or"
            " take revision=refs/convert/parquet"
        ) from error
    return replace(source, files=tuple(sorted(paths)))


def check(source: Source) -> None:
    """Prints a source's data set, revision, licence, size, first record. Raises UserError where it
    is not as named, OSError where the Hub cannot be asked."""
    print(f"{source.name}: {source.dataset}@{source.revision}, {source.license}", flush=True)
    files = source.list_files()
    print(
        f"  {len(files):,} files, {sum(file.bytes or 0 for file in files) / 1e9:,.2f} GB",
        flush=True,
    )
    rows = (row for file in files for row in islice(file.read(Reading()), HEAD_LINES))
    texts = (row.texts[0].strip() for row in rows)
    if (first := next(filter(None, texts), None)) is None:
        raise UserError(
            f"{source.name}: no row of {source.dataset} has {source.keep or 'any text'}: correct"
            " configs/sources.py"
        )
    print(f"  {first[:100]!r}", flush=True)


def _of_group(source: Source, paths: list[str], column: str, wanted: tuple[str, ...]) -> list[str]:
    """The files that may hold a wanted value: it begins them, or it begins the next one, as a group
    may begin in mid-file."""

    def first_value(path: str) -> str | None:
        """The column of the first record that has it, by a request for the file's first bytes."""
        opened, where = partial(_opened, source, path, HEAD_BYTES), f"{source.dataset}/{path}"
        rows = _records(opened, where, (), (column,), Reading())
        values = (_nested(record.values, column) for record, _ in islice(rows, HEAD_LINES))
        return next(filter(None, values), None)

    with ThreadPoolExecutor(8) as pool:
        begins = list(pool.map(first_value, paths))
    chosen = [
        path
        for path, *starts in zip(paths, begins, [*begins[1:], None], strict=True)
        if {*starts} & {*wanted}
    ]
    print(
        f"{source.dataset}: {len(chosen)} of {len(paths)} files may hold {', '.join(wanted)}",
        file=sys.stderr,
    )
    return chosen


# -------------------------------------------------------------------------- the Hub over a network


def _read_hub(source: Source, path: str, reading: Reading) -> Iterator[Row]:
    """A file of the data set; where it is damaged, maybe by the transfer, once more, behind the
    rows that were read."""
    opened, where = partial(_opened, source, path, BLOCK), f"{source.dataset}/{path}"
    read = partial(read_file, opened, where, (source.column,), source.keep, False)
    reading.skips_broken_lines = False  # one may be the transfer's fault: a second reading skips it
    try:
        yield from read(reading)
    except BadFile as error:
        is_sound = error.__cause__ is None  # but of no use
        is_unanswered = isinstance(error.__cause__, ConnectionError)  # after many tries
        if is_sound or is_unanswered:
            raise
        rows = reading.rows
        print(f"{error}; after {rows:,} rows it is opened again", file=sys.stderr)
        reading.restart()
        reading.skips_broken_lines = True
        yield from islice(read(reading), rows, None)


def _opened(source: Source, path: str, block: int):
    """A file of the data set, of which `block` bytes are asked for at a time, and again where the
    network fails."""
    from huggingface_hub import HfFileSystem

    where = f"datasets/{source.dataset}@{source.revision}/{path}"
    # A new file system each time: the size it knows of a file may have mended.
    file = _ask(
        lambda: HfFileSystem(skip_instance_cache=True).open(where, "rb", block_size=block),
        source,
        is_reading=True,
    )
    fetch = file.cache.fetcher  # huggingface_hub's own tries add 23 s to each of ours

    def fetch_whole(start: int, end: int) -> bytes:
        if len(data := fetch(start, end)) < end - start:
            raise ConnectionError(f"{path} was cut short")
        return data

    file.cache.fetcher = lambda start, end: _ask(
        partial(fetch_whole, start, end), source, is_reading=True
    )
    return file


def _ask(question: Callable, source: Source, is_reading: bool = False):
    """question(), asked again while the network fails. Raises UserError: a refusal;
    ConnectionError: no answer.

    is_reading: the data set was there before, so only the Hub's own word counts as a refusal. A 401
    or 403 without it, or by the servers that hold the large files, may come of a link that ran out
    or a server that is unwell."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    waits = iter(READ_WAITS if is_reading else ASK_WAITS)
    while True:
        try:
            return question()
        except (OSError, httpx2.HTTPError) as error:
            cause: BaseException | None = error
            while cause and not isinstance(cause, HfHubHTTPError):
                cause = cause.__cause__
            is_final = isinstance(cause, HfHubHTTPError) and (
                cause.response.status_code in (401, 403)
                or isinstance(cause, (RepositoryNotFoundError, RevisionNotFoundError))
            )
            if is_final and (not is_reading or "X-Error-Code" in cause.response.headers):
                raise UserError(
                    f"{source.dataset}@{source.revision} is refused by the Hub"
                    f" ({type(cause).__name__}): correct its name or revision, accept its terms at"
                    f" https://huggingface.co/datasets/{source.dataset} if it is gated, and log in"
                    " with `hf auth login` or HF_TOKEN if it is private"
                ) from error
            if isinstance(error, FileNotFoundError) and not is_reading:
                raise
            if (wait := next(waits, None)) is None:
                raise ConnectionError(
                    f"{HfApi().endpoint} gives no sound answer about"
                    f" {source.dataset} ({_brief(error)}): check the network, then the data set"
                ) from error
            print(f"{source.dataset}: {_brief(error)}; asked again in {wait} s", file=sys.stderr)
            time.sleep(wait)


def _brief(error: Exception) -> str:
    """An error in a few words on one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__
