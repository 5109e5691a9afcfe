"""Read the documents of local files in batches.

A .jsonl file holds a document a line and a .parquet file one a row, under the name of a column. A .txt file is one
document; a long one is often a whole corpus, so it is cut at blank lines. Each may be packed as .gz, .xz or .zst.
Instructions are .jsonl with a prompt and a response a line.
"""

import codecs
import errno
import io
import json
import lzma
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepare.packing import PACKINGS, unpacked
from prepare.source import BATCH_BYTES, BadFile, Batch, batches, pair_batches
from runtime.cli import UserError
from runtime.tokenizer import clean

FORMATS = (".txt", ".jsonl", ".parquet")
PAIR = ("prompt", "response")   # columns of instructions
TXT_CHARS = 16_384              # a text file is cut at the first blank line after this many characters,
TXT_CHARS_MOST = 1_048_576      # or in mid-paragraph after this many: memory stays bounded
ROWS = 1_000                    # parquet rows in memory at once, fewer where they are long
BLANK = b" \t\n\r\f\v\xef\xbb\xbf"    # a line of these alone (also a byte order mark) is no row


@dataclass(frozen=True)
class LocalFile:
    """A prepare.source.InputFile on this machine; `columns` names the text of .jsonl and .parquet.

    Reading raises BadFile: it was cut short, or is malformed; UserError: another column is meant, or a package lacks.
    """
    name: str
    path: Path
    bytes: int
    columns: tuple[str, ...]    # one, or PAIR
    stamp: int          # time of its last change, in ns

    def read(self, skip_rows: int) -> Iterator[Batch]:
        with open(self.path, "rb") as file:
            try:
                stream = unpacked(self.path, file)
                if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise UserError(f"{self.path} is UTF-16: save it as UTF-8")
                if _format(self.path) == ".parquet":
                    yield from self._read_parquet(stream, skip_rows)
                else:
                    rows = self._read_jsonl(stream, skip_rows) if _format(self.path) == ".jsonl" else _read_txt(stream)
                    join = pair_batches if self.columns == PAIR else batches
                    yield from join(rows, skip_rows, lambda: file.tell() / max(1, self.bytes))
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                if getattr(error, "errno", None) == errno.ENOSPC:       # the disk that it is unpacked to is to blame
                    error.filename = tempfile.gettempdir()
                    raise
                raise BadFile(f"{self.path} is damaged or was cut short ({error}): fetch it again") from error

    def _read_jsonl(self, stream: io.BufferedIOBase, skip_rows: int) -> Iterator[str | tuple[str, str]]:
        """The text of the column, or of PAIR, line by line."""
        rows, example = 0, json.dumps(dict.fromkeys(self.columns, "..."))
        for number, line in enumerate(stream, 1):
            if not line.strip(BLANK):
                continue
            rows += 1
            if rows <= skip_rows:       # batches() drops it; to parse it would take most of the time
                yield ("", "") if self.columns == PAIR else ""
                continue
            where = f"{self.path}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig", errors="replace"))
            except (ValueError, RecursionError) as error:
                raise BadFile(f"{where} is no line of JSON ({error}): each line must be one object, such as {example}") from error
            if not isinstance(row, dict):
                raise BadFile(f"{where} is not an object: each line must look like {example}")
            for column in self.columns:
                if column not in row:
                    raise UserError(self._no_column(where, column, list(row)))
                if row[column] is not None and not isinstance(row[column], str):
                    raise UserError(f"{where}: {self._no_text(column, type(row[column]).__name__)}")
            texts = tuple(clean(row[column] or "") for column in self.columns)      # a null is an empty text
            yield texts if self.columns == PAIR else texts[0]

    def _read_parquet(self, stream: io.BufferedIOBase, skip_rows: int) -> Iterator[Batch]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise UserError(f"{self.path}: reading parquet needs the package pyarrow: pip install pyarrow") from error
        with tempfile.TemporaryFile() as whole:
            if self.path.suffix in PACKINGS:     # parquet is read from its end, which a packed stream reaches last
                shutil.copyfileobj(stream, whole)
                whole.flush()
                stream = whole
            try:
                column, = self.columns
                # By itself pyarrow reads a row group, which may be the whole file, into memory at once.
                table = pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20)
                if column not in table.schema_arrow.names:
                    raise UserError(self._no_column(str(self.path), column, table.schema_arrow.names))
                kind = table.schema_arrow.field(column).type
                plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
                if plain not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null()):
                    raise UserError(f"{self.path}: {self._no_text(column, str(kind))}")
                yield from _joined(_columns(table, column, skip_rows), table.metadata.num_rows)
            except (pyarrow.ArrowException, OSError) as error:
                reason = str(error).partition("\n")[0]
                raise BadFile(f"{self.path} is no sound parquet file ({reason}): fetch it again") from error

    def _no_column(self, where: str, column: str, columns: list[str]) -> str:
        there = ", ".join(columns) or "(none)"
        if self.columns == PAIR:
            return (f"{where} has no {column!r}, only {there}: with instruct=true each line must look like "
                    f"{json.dumps(dict.fromkeys(PAIR, '...'))}")
        return f"{where} has no column {column!r}: set column= to one of {there}"

    def _no_text(self, column: str, kind: str) -> str:
        return f"column {column!r} holds {kind}, not text" + ("" if self.columns == PAIR else ": set column=...")


def local_files(paths: list[str | Path], *columns: str) -> list[LocalFile]:
    """Each of `paths` as an input file, its text in one column, or in PAIR. Raises UserError: one is missing, of another
    kind or named twice."""
    formats = (".jsonl",) if columns == PAIR else FORMATS
    paths, files = [Path(path) for path in paths], {}
    alike = Counter(path.name for path in paths)
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is a folder: name the files in it" if path.is_dir() else f"there is no file {path}")
        if _format(path) not in formats:
            raise UserError(f"{path}: its name must end in {', '.join(formats)}, optionally followed by {', '.join(PACKINGS)}" +
                              (", where it holds prompts and responses" if columns == PAIR else ""))
        if path in files:
            raise UserError(f"{path} is named twice")
        # Files of one name in several folders need their folders to be told apart.
        name, stat = path.name if alike[path.name] == 1 else str(path), path.stat()
        files[path] = LocalFile(name, path, stat.st_size, columns, stat.st_mtime_ns)
    return list(files.values())


# -------------------------------------------------------------------------------------------------------------- parquet

def _columns(table, column: str, skip_rows: int) -> Iterator[tuple[bytes, np.ndarray, int]]:
    """(text, ends, rows so far) of stretches of a parquet column, never a Python object per document."""
    import pyarrow
    done = 0
    for i in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(i)
        if done + group.num_rows <= skip_rows:
            done += group.num_rows
            continue
        a_row = group.total_byte_size / max(1, group.num_rows)
        for batch in table.iter_batches(max(1, min(ROWS, int(BATCH_BYTES / max(1, a_row)))), row_groups=[i], columns=[column]):
            values = batch.column(0)[max(0, skip_rows - done):]
            done += len(batch)
            if len(values):
                values = values.cast(pyarrow.large_string()).fill_null("")      # a null is an empty document
                ends = np.frombuffer(values.buffers()[1], np.int64)[values.offset:values.offset + len(values) + 1]
                text = memoryview(values.buffers()[2] or b"")[ends[0]:ends[-1]]
                yield bytes(text), ends[1:] - ends[0], done


def _joined(stretches: Iterator[tuple[bytes, np.ndarray, int]], rows_total: int) -> Iterator[Batch]:
    """Batches of about BATCH_BYTES: row groups may be small."""
    texts, ends, size, rows = [], [], 0, 0
    for text, stretch_ends, rows in stretches:      # noqa: B007  the last value is used below
        texts.append(text)
        ends.append(stretch_ends + size)
        size += len(text)
        if size >= BATCH_BYTES:
            yield Batch(b"".join(texts), np.concatenate(ends), rows, rows / rows_total)
            texts, ends, size = [], [], 0
    if texts:
        yield Batch(b"".join(texts), np.concatenate(ends), rows, 1.0)


# ----------------------------------------------------------------------------------------------------------------- text

def _format(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in PACKINGS else path.suffix


def _read_txt(stream: io.BufferedIOBase) -> Iterator[str]:
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
