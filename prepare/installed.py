"""Find the source code that a machine's own installation holds.

    python      *.py of the standard library and of every installed package
    c           C and C++: the interpreter's headers, the packages' and the system's, CUDA's

Files are read, never imported. Their order is by the hash of their path below its root, so that a part is a fair sample of
all folders; the same files in the same folders give the same documents in the same order, on any machine.
"""

import os
import platform
import re
import site
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from stat import S_ISREG

from prepare.source import Batch, Source, batches
from runtime.tokenizer import clean

SUFFIXES = {"python": (".py",),
            "c": (".h", ".hh", ".hpp", ".hxx", ".cuh", ".inl", ".ipp", ".tcc", ".c", ".cc", ".cpp", ".cxx", ".cu")}
LICENSES = {"python": "PSF-2.0 (CPython); each package's own", "c": "each package's own"}
LARGE = 1_000_000       # bytes
HEAD = 1_000            # bytes at its beginning in which a file says that a program wrote it
LINE = 120              # bytes a line on average
LETTERS = 0.5           # of the characters that are not blank
DISTINCT = 0.25         # of the lines that are not blank
# What is left out, by the word under which it is counted. Nearly the same text twice would help no model, and might lie in
# both splits; tests repeat themselves and what they test.
LEFT_OUT = {
    "shadowed": "of a package that an earlier folder of packages has, as import takes the first",
    "vendored": "below a folder vendor, vendored, _vendor or _vendored",
    "tests": "below a folder test or tests, or test_*, *_test.*, conftest.py",
    "large": f"above {LARGE:,} bytes",
    "generated": f"says in its first {HEAD:,} bytes that it was generated, or is not to be edited",
    "minified": f"more than {LINE} bytes a line",
    "tables": f"blanks aside, fewer than {LETTERS:.0%} of its characters are letters, or {DISTINCT:.0%} of its lines distinct",
}
_VENDORED = re.compile(r"(.*/)?_?vendor(ed)?/.*")
_TEST = re.compile(r"(.*/)?(tests?/.*|test_[^/]*|[^/]*_test\.[^/]*|conftest\.py)")
_GENERATED = re.compile(rb"(?i)@generated|auto-?generated|automatically generated|\bgenerated (by|from)\b|do not (edit|modify)")
_BLANKS = b" \t\r\n\f\v"
_NO_LETTERS = bytes(b for b in range(256) if not (chr(b).isascii() and chr(b).isalpha()))
_AHEAD = 64             # files that are being read at once: a slow disk answers many as soon as one


def installed_sources() -> list[Source]:
    """"python" and "c", each of one input file: the processes of a pool share the batches of a file, not files."""
    return [_source(kind) for kind in SUFFIXES]


def _source(kind: str) -> Source:
    code = InstalledCode(kind, *_listing(kind))
    about = f"{len(code.paths):,} files, {code.bytes:,} bytes, listing {code.stamp:016x}"
    return Source(kind, lambda known: [code], "installed source code", f"CPython {platform.python_version()}, {about}",
                  LICENSES[kind], {"files": [f"*{suffix}" for suffix in SUFFIXES[kind]], "left_out": LEFT_OUT},
                  may_age=True, has_stamps=True)


@dataclass(frozen=True)
class InstalledCode:
    """A prepare.source.InputFile of many files; reading prints what was left out to stderr."""
    name: str
    paths: list[str]        # of what is read, in order
    passed: Counter         # what was left out unread: reason -> files
    bytes: int              # of `paths`
    stamp: int              # a hash of the paths below their roots with sizes; no times: a copy of a file is the same file

    def read(self, skip_rows: int) -> Iterator[Batch]:
        sizes = []      # of what was read so far
        return batches(map(clean, self._texts(sizes)), skip_rows, lambda: min(1.0, sum(sizes) / max(1, self.bytes)))

    def _texts(self, sizes: list[int]) -> Iterator[str]:
        counts, kept, paths = self.passed.copy(), 0, iter(self.paths)
        try:
            with ThreadPoolExecutor(16, "installed") as pool:
                ahead = deque(pool.submit(_read, path) for path in islice(paths, _AHEAD))
                while ahead:
                    data, reason = ahead.popleft().result()
                    ahead.extend(pool.submit(_read, path) for path in islice(paths, 1))
                    sizes.append(len(data))
                    if reason:
                        counts[reason] += 1
                        continue
                    kept += 1
                    yield data.decode("utf-8", errors="replace")
        finally:
            found = ", ".join(f"{counts[reason]:,} {reason}" for reason in [*LEFT_OUT, "unreadable"] if counts[reason])
            print(f"{self.name}: {kept:,} installed files read; left out: {found or 'none'}", file=sys.stderr)


def _read(path: str) -> tuple[bytes, str | None]:
    """The content of a file, and the word for why it is left out, if it is."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        print(f"{path} is left out: {error.strerror}", file=sys.stderr)
        return b"", "unreadable"
    if _GENERATED.search(data, 0, HEAD):
        return data, "generated"
    if len(data) > LINE * (data.count(b"\n") + 1):
        return data, "minified"
    lines = [line for line in map(bytes.strip, data.split(b"\n")) if line]
    is_table = (len(data.translate(None, _NO_LETTERS)) < LETTERS * len(data.translate(None, _BLANKS)) or
                len(set(lines)) < DISTINCT * len(lines))
    return data, "tables" if is_table else None


# -------------------------------------------------------------------------------------------------------------- finding

def _listing(kind: str) -> tuple[list[str], Counter, int, int]:
    """The fields of InstalledCode after its name."""
    found, passed, seen, packages = [], Counter(), set(), {}
    for number, (root, has_packages) in enumerate(_roots(kind).items()):
        for name, path in _below(root, SUFFIXES[kind]):
            if path in seen:        # a root may lie in another one
                continue
            seen.add(path)
            if has_packages and packages.setdefault(name.partition("/")[0], number) != number:
                passed["shadowed"] += 1
                continue
            size = _size(path)
            reason = ("vendored" if _VENDORED.fullmatch(name) else "tests" if _TEST.fullmatch(name) else
                      "unreadable" if size is None else "large" if size > LARGE else None)
            if reason:
                passed[reason] += 1
                continue
            key = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
            found.append((key, number, path, size))
    found.sort()
    stamp = blake2b(digest_size=8)
    for key, _, _, size in found:
        stamp.update(key + size.to_bytes(8, "little"))
    return [path for _, _, path, _ in found], passed, sum(size for *_, size in found), int.from_bytes(stamp.digest(), "little")


def _size(path: str) -> int | None:
    """None for what is no file: a link to nowhere, a pipe."""
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_size if S_ISREG(about.st_mode) else None


def _below(root: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(path below the root, whole path) of each file; folders of packages within the root are roots of their own."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages", "__pycache__")]
        for name in names:
            if name.endswith(suffixes):
                path = os.path.join(folder, name)
                yield path[len(str(root)) + 1:], path


def _roots(kind: str) -> dict[Path, bool]:
    """The folders that this interpreter, and the machine's C compilers, read, and whether each holds installed packages."""
    packages = [*site.getsitepackages(), *site.getsitepackages([sys.base_prefix]), "/usr/lib/python3/dist-packages",
                *(path for path in map(str, sys.path) if path.rstrip("/").endswith(("/site-packages", "/dist-packages")))]
    if kind == "python":
        others = [sysconfig.get_path("stdlib")]
    else:
        others = [sysconfig.get_path("include"), "/usr/include", "/usr/local/include", "/usr/local/cuda/include"]
    roots = {Path(root).resolve(): False for root in others} | {Path(root).resolve(): True for root in packages}
    return {root: has_packages for root, has_packages in roots.items() if root.is_dir()}
