"""Sources of text: each a list of input files, one task each, whose documents can be read from any row on.

Here are local files: a .jsonl holds a document a line and a .parquet one a row, under the name of a column. A .txt is one
document; a long one is often a whole corpus, so it is cut at blank lines. .txt and .jsonl may be packed as .gz, .xz or .zst.
Instructions are .jsonl with a prompt and a response a line. hub.py reads the Hugging Face Hub, by the same two readers.

datatrove's readers do not serve: they pass over damaged lines and files with a warning in a log, where here each is counted,
listed and makes the command end with 1; and they cannot go on within a file.
"""

import codecs
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from datatrove.data import Document

from runtime.cli import UserError
from runtime.tokenizer import clean

FORMATS = (".txt", ".jsonl", ".parquet")
PACKINGS = (".gz", ".xz", ".zst")
PAIR = ("prompt", "response")   # columns of instructions
TXT_CHARS = 16_384              # a text file is cut at the first blank line after this many characters,
TXT_CHARS_MOST = 1_048_576      # or in mid-paragraph after this many: memory stays bounded
ROWS = 64                       # of parquet in memory at once: documents of a megabyte must not fill the memory
TASK_BYTES = 256 << 20          # a larger .jsonl or .parquet is read by several tasks, so that one file keeps many cores busy
TEXT_TYPES = ("string", "large_string", "string_view", "null")
BLANK = b" \t\n\r\f\v\xef\xbb\xbf"      # a line of these alone (also a byte order mark) is no row


class BadFile(Exception):
    """An input file that cannot be read, whatever was tried; the message says why. It is skipped, counted and listed."""


@dataclass(frozen=True)
class Source:
    """Where documents come from; everything after `files` is common to all sources.

    An input file has name, bytes (as it lies on disk or on the server; None where nobody knows), parts (the tasks that read
    it), stamp (an int that changes with its content, or None) and read(skip_rows), which yields datatrove's Documents after
    the first rows, the same at each call, with the metadata row (rows of the file up to its end), read (share of the file, 0
    to 1) and, of instructions, prompt."""
    name: str
    # The input files in the order they are taken in; one that several tasks read stands there several times. May ask a server,
    # hence the argument: names and sizes of an earlier call, which the list is then made from; None at the first.
    files: Callable[[list[tuple[str, int | None]] | None], list]
    dataset: str
    revision: str
    license: str
    selection: dict = field(default_factory=dict)   # what is taken of each row, in JSON: column, filter
    tokens: float | None = None     # of the whole source, about, by GPT-2's tokenizer; None where nobody knows
    may_age: bool = False           # whether shards of an older revision serve as well
    is_masked: bool = False         # whether its documents are prompts and responses, the responses alone to be learned
    has_stamps: bool = False        # the revision sums up stamps of the files: of what is begun a changed file alone is made anew


@dataclass(frozen=True)
class LocalFile:
    """An input file on this machine, or one part of it; `columns` names the text of .jsonl and .parquet.

    Reading raises BadFile: it was cut short, or is malformed; UserError: another column is meant."""
    name: str
    path: Path
    bytes: int
    columns: tuple[str, ...]    # one, or PAIR
    stamp: int                  # time of its last change, in ns
    part: int = 0
    parts: int = 1

    def read(self, skip_rows: int) -> Iterator[Document]:
        size = self.path.stat().st_size
        begin, end = size * self.part // self.parts, size * (self.part + 1) // self.parts
        with open(self.path, "rb") as file:
            stream = unpacked(self.path, file)
            try:
                if self.part == 0 and stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise UserError(f"{self.path} is UTF-16: save it as UTF-8")
                if self.path.suffix == ".parquet":
                    yield from parquet_documents(file, str(self.path), self.columns[0], {}, skip_rows, self.part, self.parts)
                    return
                lines = stream if self.parts == 1 else _lines(stream, begin, end)
                rows = (((text,), row) for row, text in enumerate(_texts(stream), 1)) if _format(self.path) == ".txt" else \
                    json_rows(lines, str(self.path), self.columns, {}, skip_rows)
                for texts, row in rows:
                    if row > skip_rows:
                        yield document(texts, self.path, row, (file.tell() - begin) / max(1, end - begin))
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                raise BadFile(f"{self.path} is damaged or was cut short ({error}): fetch it again") from error


def folder_name(name: str) -> str:
    """The name, if it can be a source's. Raises UserError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise UserError(f"name={name!r} must be one folder name, of letters, digits, '_', '-' and '.', such as name=mydata")
    return name


def local_source(name: str, paths: list[str], columns: tuple[str, ...], license: str | None) -> Source:
    """The files as a source, its text in one column, or in PAIR. Raises UserError."""
    if not paths:
        raise UserError("no file is named: python prepare_data.py local FILE... name=mydata")
    files = local_files(paths, columns)
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in map(Path, paths)]
    dataset = f"local: {', '.join(p.name for p in map(Path, paths))}; column {' and '.join(columns)}"
    return Source(name, lambda known: files, dataset, hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16],
                  license or "not stated", {"instruct": list(columns)} if columns == PAIR else {}, is_masked=columns == PAIR,
                  has_stamps=True)


def local_files(paths: list[str | Path], columns: tuple[str, ...]) -> list[LocalFile]:
    """Each of `paths` as input files, its text in one column, or in PAIR. Raises UserError: one is missing, of another kind or
    named twice."""
    formats, paths, files = (".jsonl",) if columns == PAIR else FORMATS, [Path(path) for path in paths], []
    alike = Counter(path.name for path in paths)
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is a folder: name the files in it" if path.is_dir() else f"there is no file {path}")
        if _format(path) not in formats or path.suffixes[-2:-1] == [".parquet"]:
            raise UserError(f"{path}: its name must end in {', '.join(formats)}, where it is text optionally followed by "
                            f"{', '.join(PACKINGS)}" + (": it holds prompts and responses" if columns == PAIR else ""))
        if paths.count(path) > 1:
            raise UserError(f"{path} is named twice")
        # Files of one name in several folders need their folders to be told apart.
        name, stat = path.name if alike[path.name] == 1 else str(path), path.stat()
        parts = parts_of(path.name, stat.st_size)
        files += [LocalFile(name, path, stat.st_size, columns, stat.st_mtime_ns, part, parts) for part in range(parts)]
    return files


def parts_of(name: str, size: int | None) -> int:
    """How many tasks read a file: a function of its size alone, so that the pieces of a killed command are found again."""
    return -(-size // TASK_BYTES) or 1 if size and name.endswith((".jsonl", ".parquet")) else 1


def _format(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in PACKINGS else path.suffix


# -------------------------------------------------------------------------------------------------------------- readers

def document(texts: tuple[str, ...], where: PurePath | str, row: int, read: float) -> Document:
    """A text, or a prompt and a response."""
    prompt = {"prompt": texts[0]} if len(texts) > 1 else {}
    return Document(texts[-1], f"{where}/{row}", metadata={"row": row, "read": read, **prompt})


def json_rows(lines: Iterable[bytes], where: str, columns: tuple[str, ...], keep: dict[str, tuple[str, ...]], skip_rows: int,
              is_strict: bool = True) -> Iterator[tuple[tuple[str, ...], int]]:
    """(texts of the columns, rows so far) of lines of JSON whose fields, nested by dots, have the values to `keep`; a null is an
    empty text. is_strict: each row must have the columns, not the first one alone. Raises UserError, BadFile."""
    row, decode, example = 0, json.JSONDecoder(strict=False).decode, json.dumps(dict.fromkeys(columns, "..."))
    for line in lines:
        if not line.strip(BLANK):
            continue
        row += 1
        if row <= skip_rows:
            continue
        try:
            found = decode(line.decode("utf-8-sig", errors="replace"))
        except (ValueError, RecursionError) as error:
            raise BadFile(f"{where}:{row} is no line of JSON ({error}): each must be an object, such as {example}") from error
        if not isinstance(found, dict):
            raise BadFile(f"{where}:{row} is not an object: each line must look like {example}")
        if not all(nested(found, path) in values for path, values in keep.items()):
            continue
        for column in columns:
            if column not in found and (is_strict or row == 1):
                raise _no_column(f"{where}:{row}", column, columns, list(found))
            if not isinstance(found.get(column), str | None):
                raise _no_text(f"{where}:{row}", column, type(found[column]).__name__)
        yield tuple(clean(found.get(column) or "") for column in columns), row


def parquet_documents(file, where: str, column: str, keep: dict[str, tuple[str, ...]], skip_rows: int, part: int = 0,
                      parts: int = 1) -> Iterator[Document]:
    """The documents of some row groups of a parquet file, `part` of `parts` of all. Raises UserError, BadFile."""
    import pyarrow
    import pyarrow.parquet
    try:
        # By itself pyarrow reads a row group, which may be the whole file, into memory at once.
        table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        names, columns = table.schema_arrow.names, [column, *{path.split(".")[0] for path in keep} - {column}]
        if missing := [name for name in columns if name not in names]:
            raise _no_column(where, missing[0], (column,), names)
        kind = table.schema_arrow.field(column).type
        if str(kind.value_type if pyarrow.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
            raise _no_text(where, column, str(kind))
        groups, row = table.num_row_groups, 0
        groups = range(groups * part // parts, groups * (part + 1) // parts)
        total = sum(table.metadata.row_group(group).num_rows for group in groups)
        for group in groups:
            if row + table.metadata.row_group(group).num_rows <= skip_rows:
                row += table.metadata.row_group(group).num_rows
                continue
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=columns):
                # As bytes: a text that is not UTF-8 gets U+FFFD, not an error.
                texts = batch.column(column).cast(pyarrow.large_string()).cast(pyarrow.large_binary()).to_pylist()
                kept = {path: batch.column(path.split(".")[0]).to_pylist() for path in keep}
                for i, text in enumerate(texts):
                    row += 1
                    if row > skip_rows and all(nested({path.split(".")[0]: kept[path][i]}, path) in keep[path] for path in keep):
                        yield document(((text or b"").decode(errors="replace"),), where, row, row / total)
    except pyarrow.ArrowException as error:
        raise BadFile(f"{where} is no sound parquet file ({str(error).splitlines()[0]}): fetch it again") from error


def nested(record: dict, path: str):
    for name in path.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _no_column(where: str, column: str, columns: tuple[str, ...], there: list[str]) -> UserError:
    found = ", ".join(there) or "(none)"
    return UserError(f"{where} has no {column!r}, only {found}: with instruct=true each line must look like "
                     f"{json.dumps(dict.fromkeys(PAIR, '...'))}" if columns == PAIR else
                     f"{where} has no column {column!r}: set column= to one of {found}")


def _no_text(where: str, column: str, kind: str) -> UserError:
    return UserError(f"{where}: column {column!r} holds {kind}, not text: set column=")


def _lines(stream: io.BufferedIOBase, begin: int, end: int) -> Iterator[bytes]:
    """The lines that begin before `end`, after the one in which `begin` lies."""
    if begin:
        stream.seek(begin - 1)
        stream.readline()
    while stream.tell() < end and (line := stream.readline()):
        yield line


def _texts(stream: io.BufferedIOBase) -> Iterator[str]:
    """The stretches of a text file."""
    parts, chars = [], 0
    # Line ends of any system become \n; bytes that are not UTF-8 become U+FFFD.
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace")
    while line := lines.readline(TXT_CHARS_MOST):
        parts.append(line)
        chars += len(line)
        if chars >= TXT_CHARS_MOST or (chars >= TXT_CHARS and line.isspace()):
            yield "".join(parts)
            parts, chars = [], 0
    yield "".join(parts)


def unpacked(path: PurePath, file: io.BufferedIOBase) -> io.BufferedIOBase:
    """The content of the open binary `file`, packed as its name `path` says.

    Reading raises EOFError, OSError, zlib.error or lzma.LZMAError where it is damaged or has no end."""
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if path.suffix == ".xz":
        return lzma.open(file)
    return io.BufferedReader(_Zst(file), 1 << 20) if path.suffix == ".zst" else file


class _Zst(io.RawIOBase):
    """The content of a .zst file. The package's own reader takes a file cut short for a whole one; this one does not."""

    def __init__(self, file: io.BufferedIOBase):
        import zstandard
        self._file, self._new_frame, self._error = file, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame = None                  # the frame being unpacked; a file may hold several
        self._packed, self._content = b"", memoryview(b"")      # read, of the next frame; unpacked, not yet handed out

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._content:
            packed = self._packed or self._file.read(1 << 16)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame has no end")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._content = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(str(error)) from error
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        n = min(len(buffer), len(self._content))
        buffer[:n], self._content = self._content[:n], self._content[n:]
        return n
