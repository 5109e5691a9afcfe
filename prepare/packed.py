"""Packed files, unpacked as they are read."""

import gzip
import io
import lzma
from collections.abc import Callable
from functools import partial
from typing import Any, cast

# Of .xz and .zst that are unpacked at once: at most 64 MB, of a file of zeros.
PACKED_BYTES = 1 << 11


class FramesReader(io.RawIOBase):
    """What a packed file of any number of frames holds. new_frame: makes the decompressor of
    one, with decompress(), eof and unused_data. Raises EOFError: the file was cut short, which
    the reader of `zstandard` takes for the end; what the decompressor raises: it is damaged,
    which the reader of `lzma` takes for the end behind a first frame."""

    def __init__(self, file: io.BufferedIOBase, new_frame: Callable[[], Any]):
        self._file = file
        self._new_frame = new_frame
        self._frame: Any = None
        self._left = b""  # packed bytes behind the last frame
        self._is_behind_frame = False  # whether a frame has just ended
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
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


def unpacked(file: io.BufferedIOBase, packing: str) -> io.BufferedReader:
    """The content of a file of that packing, of one of none itself."""
    if packing == ".gz":
        return cast(io.BufferedReader, gzip.open(file))  # as far as it is used
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
    if hasattr(file, "peek"):
        return cast(io.BufferedReader, file)
    return io.BufferedReader(cast(io.RawIOBase, file), 1 << 18)
