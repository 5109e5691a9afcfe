"""Find the text that a Python installation already contains.

Four sources for a demo that needs no download: the standard library (python), the C and C++ headers
of the interpreter, NumPy and torch (c), the long docstrings of scientific packages (science),
documentation (prose). Packages are read as files, never imported. The order is a pure function of
the installed files; other versions hold other text, hence revision()."""

import ast
import fnmatch
import importlib.metadata
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from prepare.sources import InputFile, Reading, Source, SourceRow

# packages whose docstrings are read, where they are installed
SCIENCE = ("numpy", "scipy", "sympy", "sklearn")
SCIENCE_CHARS = 4_000_000  # as much as the other sources hold, so that none drowns them
TORCH_CHARS = 3_000_000  # of 37 MB of headers
DOCSTRING_CHARS = 400  # shorter docstrings are mostly one-liners without a full sentence
# pydoc_data is prose
NOT_READ = {"test", "tests", "idlelib", "site-packages", "dist-packages", "pydoc_data"}
LICENSES = {
    "python": "PSF-2.0",
    "c": "PSF-2.0 (CPython), BSD-3-Clause (NumPy, PyTorch)",
    "science": "BSD-3-Clause",
    "prose": "PSF-2.0 (CPython); each package's own for its description",
}


def demo_sources() -> list[Source]:
    """What is installed; every machine has other versions, so an older harvest serves as well."""
    return [
        Source(
            name=name,
            dataset="installed",
            revision=revision(name),
            license=license,
            may_age=True,
            local_files=(InputFile(name, None, None, partial(_read, name)),),
        )
        for name, license in LICENSES.items()
    ]


def _read(source: str, reading: Reading) -> Iterator[SourceRow]:
    for text in documents(source):
        reading.rows += 1
        reading.characters += len(text)
        yield SourceRow((text,), 0.0)


def revision(source: str) -> str:
    """The versions that decide what documents(source) yields."""
    versions = {d.name: d.version for d in _distributions()}
    names = {
        "python": [],
        "c": ["numpy", "torch"],
        "science": ["numpy", "scipy", "sympy", "scikit-learn"],
    }.get(source, versions)
    packages = [f"{name} {versions[name]}" for name in names if name in versions]
    return ", ".join([f"CPython {platform.python_version()}", *packages])


def documents(source: str) -> Iterator[str]:
    """The documents of "python", "c", "science" or "prose", in a fixed order."""
    return {"python": _python, "c": _headers, "science": _science, "prose": _prose}[source]()


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _python() -> Iterator[str]:
    return read_files(_stdlib(), "*.py")


def _headers() -> Iterator[str]:
    yield from read_files(Path(sysconfig.get_path("include")), "*.h")
    yield from read_files(_package("numpy"), "*.h")
    torch = _package("torch")
    if torch:
        yield from _at_most(TORCH_CHARS, read_files(torch / "include", "*.h", mixed=True))


def _science() -> Iterator[str]:
    for name in SCIENCE:
        files = read_files(_package(name), "*.py", mixed=True)
        yield from _at_most(SCIENCE_CHARS // len(SCIENCE), _docstrings_of(files))


def _prose() -> Iterator[str]:
    yield from _docstrings_of(read_files(_stdlib(), "*.py"))
    from pydoc_data.topics import topics  # the language reference, as help() shows it

    for name in sorted(topics):
        yield topics[name]
    for distribution in _distributions():
        description = distribution.metadata["Description"]
        if description:
            yield description


def _docstrings_of(files: Iterator[str]) -> Iterator[str]:
    for code in files:
        yield from docstrings(code)


def _package(name: str) -> Path | None:
    """Folder of an installed package, which is not imported."""
    spec = find_spec(name)
    return (
        Path(spec.submodule_search_locations[0])
        if spec and spec.submodule_search_locations
        else None
    )


def _distributions() -> list[importlib.metadata.Distribution]:
    """Installed packages by name; the first on the path wins, as it does for import."""
    by_name = {}
    for distribution in reversed(list(importlib.metadata.distributions())):
        if distribution.name:  # half removed: no name
            by_name[distribution.name.lower()] = distribution
    return [by_name[name] for name in sorted(by_name)]


def read_files(root: Path | None, pattern: str, mixed: bool = False) -> Iterator[str]:
    """The text of the files below `root`, if there is one: by path or, where the reader will stop
    early, by the hash of the path, a fair sample of all folders."""
    if root is None:
        return
    for name in sorted(_names(root, pattern), key=_hash_of_name if mixed else None):
        path = root / name
        if path.is_file():
            yield path.read_bytes().decode("utf-8", errors="replace")


def _names(root: Path, pattern: str) -> Iterator[str]:
    """Paths below `root`, relative to it, of what has a name of the pattern; folders of NOT_READ
    are not even looked into."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_READ]
        for name in fnmatch.filter(names, pattern):
            yield (Path(folder) / name).relative_to(root).as_posix()


def _hash_of_name(name: str) -> bytes:
    return blake2b(name.encode("utf-8", "surrogateescape")).digest()


def _at_most(chars: int, texts: Iterator[str]) -> Iterator[str]:
    """Whole texts until `chars` characters have gone by."""
    for text in texts:
        if chars <= 0:
            return
        chars -= len(text)
        yield text


def docstrings(source: str) -> list[str]:
    """The long docstrings in Python source, in order, without their indentation; none where the
    source does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(source)
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
        return [
            text
            for node in nodes
            if (text := ast.get_docstring(node)) and len(text) >= DOCSTRING_CHARS
        ]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
