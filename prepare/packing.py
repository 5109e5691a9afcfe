"""Unpack a .gz, .xz or .zst stream, and notice where it was cut short."""

import gzip
import io
import lzma
from pathlib import PurePath

from runtime.cli import UserError

PACKINGS = (".gz", ".xz", ".zst")


def unpacked(path: PurePath, file: io.BufferedIOBase) -> io.BufferedIOBase:
    """The content of the open binary `file`, packed as its name `path` says.

    Reading raises EOFError, OSError, zlib.error or lzma.LZMAError where it is damaged or has no end."""
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if path.suffix == ".xz":
        return lzma.open(file)
    return io.BufferedReader(_Zst(path, file), 1 << 20) if path.suffix == ".zst" else file


class _Zst(io.RawIOBase):
    """The content of a .zst file. The package's own reader takes a file cut short for a whole one, and a first frame for
    all; this one does neither."""

    def __init__(self, path: PurePath, file: io.BufferedIOBase):
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{path}: unpacking .zst needs the package zstandard: pip install zstandard") from error
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
