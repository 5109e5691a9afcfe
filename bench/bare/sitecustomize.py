"""In a rehearsal this folder comes first on Python's path: what a bare machine lacks cannot be
imported, so that a part which would need it fails here and not there.

Hidden are the packages of requirements.txt but torch, torchao and numpy, what they bring, and
pytest-xdist."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LACKING = (
    "datasets",
    "datatrove",
    "httpx2",
    "huggingface_hub",
    "lm_eval",
    "matplotlib",
    "pyarrow",
    "regex",
    "safetensors",
    "scipy",
    "tiktoken",
    "tokenizers",
    "transformers",
    "wandb",
    "xdist",
    "zstandard",
)


class BareFinder(PathFinder):
    """The finder of sys.path, which does not see what is LACKING."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in LACKING:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = BareFinder
