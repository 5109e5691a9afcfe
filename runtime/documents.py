"""Read the documents of local files one at a time.

A .jsonl file holds a document a line and a .parquet file one a row, under the name of a column. A .txt file is one
document; a long one is often a whole corpus, so it is cut at blank lines. Each may be packed as .gz, .xz or .zst.
"""

import codecs
import gzip
import io
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from runtime.config import ConfigError

FORMATS = (".txt", ".jsonl", ".parquet")
PACKINGS = (".gz", ".xz", ".zst")
TXT_CHARS = 16_384              # a text file is cut at the first blank line after this many characters,
TXT_CHARS_MOST = 1_048_576      # or in mid-paragraph after this many: memory stays bounded
ROWS = 1_000                    # parquet rows in memory at once


class LocalFiles:
    """Iterates the text of every document of `paths`, in order; `column` names the text of .jsonl and .parquet.

    Raises ConfigError at once: a file that is missing or of another kind. While iterating: a file cut short or
    malformed, a row without the column or with something else than text in it.
    """

    def __init__(self, paths: list[str], column: str):
        self.paths, self.column = [Path(p) for p in paths], column
        for path in self.paths:
            if not path.is_file():
                raise ConfigError(f"{path} is a folder: name the files in it" if path.is_dir() else
                                  f"there is no file {path}")
            if _format(path) not in FORMATS:
                raise ConfigError(f"{path}: its name must end in {', '.join(FORMATS)}, optionally followed by "
                                  f"{', '.join(PACKINGS)}")
        self.bytes_total = sum(p.stat().st_size for p in self.paths)
        self.bytes_read = 0     # of the files as they lie on disk

    def __iter__(self) -> Iterator[str]:
        read, done = {".txt": _read_txt, ".jsonl": self._read_jsonl, ".parquet": self._read_parquet}, 0
        for path in self.paths:
            with open(path, "rb") as file:
                try:
                    stream = _unpack(path, file)
                    if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                        raise ConfigError(f"{path} is UTF-16: save it as UTF-8")
                    for text in read[_format(path)](path, stream):
                        self.bytes_read = done + file.tell()
                        yield text
                except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                    raise ConfigError(f"{path} is damaged or was cut short ({error}): fetch it again") from error
            done += path.stat().st_size
            self.bytes_read = done

    def _read_jsonl(self, path: Path, stream: io.BufferedIOBase) -> Iterator[str]:
        for number, line in enumerate(stream, 1):
            text = line.decode("utf-8-sig", errors="replace")
            if not text.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where} is no line of JSON ({error}): each line must be one object, "
                                  f'such as {{"{self.column}": "..."}}') from error
            if not isinstance(row, dict):
                raise ConfigError(f'{where} is not an object: each line must look like {{"{self.column}": "..."}}')
            if self.column not in row:
                raise ConfigError(self._no_column(where, list(row)))
            yield self._text(where, row[self.column])

    def _read_parquet(self, path: Path, stream: io.BufferedIOBase) -> Iterator[str]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(f"{path}: reading parquet needs the package pyarrow: pip install pyarrow") from error
        with tempfile.TemporaryFile() as unpacked:
            if path.suffix in PACKINGS:     # parquet is read from its end, which a packed stream reaches last
                shutil.copyfileobj(stream, unpacked)
                stream = unpacked
            try:
                table, number = pyarrow.parquet.ParquetFile(stream), 0
                if self.column not in table.schema_arrow.names:
                    raise ConfigError(self._no_column(str(path), table.schema_arrow.names))
                for batch in table.iter_batches(ROWS, columns=[self.column]):
                    for value in batch.column(0).to_pylist():
                        number += 1
                        yield self._text(f"{path} row {number}", value)
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                reason = str(error).partition("\n")[0]
                raise ConfigError(f"{path} is no sound parquet file ({reason}): fetch it again") from error

    def _no_column(self, where: str, columns: list[str]) -> str:
        return f"{where} has no column {self.column!r}: set column= to one of {', '.join(columns) or '(none)'}"

    def _text(self, where: str, value) -> str:
        """The text of one row; a null is an empty document."""
        if value is None or isinstance(value, str):
            return value or ""
        raise ConfigError(f"{where}: column {self.column!r} holds {type(value).__name__}, not text: set column=...")


def _format(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in PACKINGS else path.suffix


def _read_txt(path: Path, stream: io.BufferedIOBase) -> Iterator[str]:
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


# ------------------------------------------------------------------------------------------------------------ unpacking

def _unpack(path: Path, file: io.BufferedReader) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(file)
    if path.suffix == ".xz":
        return lzma.open(file)
    return io.BufferedReader(_Zst(path, file), 1 << 20) if path.suffix == ".zst" else file


class _Zst(io.RawIOBase):
    """The content of a .zst file. The package's own reader takes a file cut short for a whole one; this one raises."""

    def __init__(self, path: Path, file: io.BufferedReader):
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(f"{path}: unpacking .zst needs the package zstandard: pip install zstandard") from error
        self._file, self._new_frame, self._error = file, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame = None                  # the frame being unpacked; a file may hold several
        self._packed = b""                  # read, of the next frame
        self._content = memoryview(b"")     # unpacked, not yet handed out

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
