"""Run a config or study file: imports find the files beside it first, then the repository's own
configs."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from lib.machine import ROOT

CONFIGS = "configs"  # the package whose modules a copied config names; ROOT / CONFIGS holds ours
# Top-level names that always mean the repository's own modules: a second copy of a class would not
# be equal to the first.
OWN_NAMES = frozenset(
    (
        "model",
        "train",
        "prepare_data",
        "runtime",
        "docs",
        "eval",
        "scaling",
        "prepare",
        "bench",
        "dev",
        "tests",
        "fp8",
        "lib",
    )
)


def run_file(path: str | Path, name: str) -> tuple[Any, list[Path]]:
    """What the Python file at `path` binds to `name`, None where nothing, and the files it was made
    from, itself first.

    `from base import ..` and `from configs.base import ..` both take base.py beside the file where
    there is one. What was imported so is forgotten afterwards: the next file may have another
    base.py beside it. Raises what the file raises."""
    file = Path(path).absolute()
    finder = _BesideFinder(file)
    with _importing_by(finder):
        bound = runpy.run_path(str(path))
    return bound.get(name), list(dict.fromkeys(finder.executed))


def shown(file: Path) -> str:
    """A file as messages and records name it: from the repository's root where it lies in there."""
    return str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)


class _BesideFinder(MetaPathFinder):
    """Finds top-level modules and those of `configs` beside `file`, whose run it serves."""

    def __init__(self, file: Path):
        self.folder = file.parent
        self.executed = [file]  # in the order in which they begin
        self.running = [
            file
        ]  # begun and not ended: a file that imports its own name means the next one of it
        self.served: set[str] = set()  # top-level names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target=None
    ) -> ModuleSpec | None:
        if name == CONFIGS:
            return self._configs_package()
        for folder in self._folders(name, path):
            loader: Any = partial(_SourceLoader, self)
            spec = FileFinder(folder, (loader, [".py"])).find_spec(name)
            if spec is None or (spec.origin and Path(spec.origin) in self.running):
                continue
            is_bare_folder = spec.loader is None
            if is_bare_folder and "." not in name and PathFinder.find_spec(name):
                continue  # a folder without __init__.py comes after every package, as on sys.path
            self.served.add(name.partition(".")[0])
            return spec
        return None

    def _configs_package(self) -> ModuleSpec:
        spec = ModuleSpec(CONFIGS, None, is_package=True)
        spec.submodule_search_locations = [str(self.folder / CONFIGS), str(ROOT / CONFIGS)]
        self.served.add(CONFIGS)
        return spec

    def _folders(self, name: str, path: Sequence[str] | None) -> list[str]:
        """Where the module may lie; [] where other finders look for it."""
        package = name.rpartition(".")[0]
        if package == CONFIGS:
            return [str(self.folder), *(path or ())]
        if package:
            return list(path or ()) if name.partition(".")[0] in self.served else []
        if name in OWN_NAMES or name in sys.stdlib_module_names:
            return []
        return [str(self.folder)]


class _SourceLoader(SourceFileLoader):
    """Loads from source, never from __pycache__, whose check by size and second misses a quick edit
    of a number."""

    def __init__(self, finder: _BesideFinder, name: str, path: str):
        super().__init__(name, path)
        self.finder = finder

    def get_code(self, fullname: str):
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module) -> None:
        file = Path(self.path)
        name = module.__name__
        ours = ROOT / CONFIGS / file.name
        may_import_ours = name == f"{CONFIGS}.{file.stem}" and file != ours and ours.exists()
        if (
            may_import_ours
        ):  # configs/base.py beside the config may derive from ours of the same name
            del sys.modules[name]
        self.finder.executed.append(file)
        self.finder.running.append(file)
        try:
            super().exec_module(module)
        finally:
            self.finder.running.remove(file)
            if may_import_ours:
                sys.modules[name] = module


@contextmanager
def _importing_by(finder: _BesideFinder) -> Iterator[None]:
    """Let `finder` be asked first; afterwards sys.modules holds none of the modules that it
    served."""
    set_aside = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == CONFIGS
    }
    for name in set_aside:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in list(sys.modules):
            if name.partition(".")[0] in finder.served:
                del sys.modules[name]
        sys.modules.update(set_aside)
