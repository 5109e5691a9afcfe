"""Make the token shards of the study, the same bytes on every machine, or refuse.

    python studies/cpu/corpus.py FOLDER               FOLDER: prose.jsonl.xz and latex.jsonl.xz
    python studies/cpu/corpus.py FOLDER out=data/cpu  where the shards go

Both files hold a JSON object a line.
Python and C come from the installed packages that requirements.txt pins, whose versions are
checked: Python from wheels, C from the headers of torch. Files that a build writes, and those for
other devices, are left out. The order is that of the hashes of the paths. data.json beside this
file holds the SHA-256 of every shard that the study was trained on; where a shard differs, nothing
is trained.

`--record` writes data.json anew: for another study, never for one that has runs.
"""

import importlib.metadata
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import prepare_data
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import write_atomically, write_json
from lib.machine import ROOT
from prepare.harvest import NOT_READ
from runtime.shards import read_index

HERE = Path(__file__).resolve().parent
RECORD = HERE / "data.json"
VAL_SHARE = 0.03
LICENSES = {
    "prose": "CC BY 4.0 or CC BY-NC-SA 4.0, by book (OpenStax)",
    "latex": (
        "GFDL 1.2 (Stacks project), CC BY-SA 4.0 (Napkin), CC BY-SA 3.0 (HoTT), CC BY 4.0 (Open"
        " Logic)"
    ),
    "python": "Apache-2.0, BSD-3-Clause, PSF, MIT, by package",
    "c": "BSD-3-Clause (PyTorch)",
}
PYTHON_PACKAGES = (
    "accelerate",
    "datasets",
    "datatrove",
    "huggingface_hub",
    "lm_eval",
    "matplotlib",
    "numpy",
    "scipy",
    "torch",
    "torchao",
    "transformers",
)
C_FOLDERS = ("c10", "ATen/core", "ATen/native", "ATen/cpu", "torch/csrc")
# more than the largest run reads, so that no text is seen twice
PYTHON_BYTES, C_BYTES = 24_000_000, 9_000_000
# Written by a build, so that they differ between machines; and what only one device's build of
# torch holds.
NOT_OF_SOURCE = re.compile(
    r"(^|/)(_?version|__config__|_?_?build_?info)\.py$"
    r"|(^|/)(cuda|hip|mps|xpu|vulkan|mtia|_inductor)(/|$)"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    folder: str  # holds prose.jsonl.xz and latex.jsonl.xz
    out: str = "data/cpu"  # receives a folder of shards for each source
    record: bool = False  # write data.json from what was made


@command(__doc__, Options, "folder")
def main(options: Options) -> None:
    out = Path(options.out)
    check_versions()
    make_shards(Path(options.folder), out)
    if options.record:
        write_json(RECORD, describe(out))
    check_shards(out)
    print(f"{out} holds the shards of data.json")


def check_versions() -> None:
    """Raise UserError where an installed package is not what requirements.txt pins: its text would
    be another."""
    pins = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M)
    pins += re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements-dev.txt").read_text(), re.M)
    pinned = {name.replace("-", "_").lower(): version for name, version in pins}
    for package in PYTHON_PACKAGES:
        installed = importlib.metadata.version(package).partition("+")[0]
        if installed != pinned[package]:
            raise UserError(
                f"{package} {installed} is installed, but the study's text is that of"
                f" {pinned[package]}: run make setup with the requirements.txt of this repository"
            )


def make_shards(texts: Path, out: Path) -> None:
    """Prepare each source below `out` that is not there yet. Raises UserError where a file is
    missing."""
    out.mkdir(parents=True, exist_ok=True)
    for name, license in LICENSES.items():
        if (out / name / "index.json").exists():
            continue
        if name in ("prose", "latex"):
            file = texts / f"{name}.jsonl.xz"
            if not file.is_file():
                raise UserError(f"there is no {file}: docs/study.md says where its text comes from")
        else:
            file = out / f"{name}.jsonl"
            write_lines(file, harvest(name))
        code = prepare_data.main(
            [
                "local",
                str(file),
                f"name={name}",
                f"out={out}",
                "tokenizer=byte",
                "processes=1",
                f"val_share={VAL_SHARE}",
                f"license={license}",
            ]
        )
        if code:
            raise UserError(f"{name} could not be prepared: see above")


def harvest(name: str) -> Iterator[dict[str, str]]:
    """The documents of "python" or "c", in a fixed order, until there are bytes enough."""
    packages = Path(sysconfig.get_path("purelib"))
    if name == "python":
        roots, pattern, most = (
            [packages / package for package in PYTHON_PACKAGES],
            "*.py",
            PYTHON_BYTES,
        )
    else:
        roots, pattern, most = (
            [packages / "torch/include" / folder for folder in C_FOLDERS],
            "*.h",
            C_BYTES,
        )
    paths = [
        path.relative_to(packages).as_posix()
        for root in roots
        for path in root.rglob(pattern)
        if path.is_file()
    ]
    taken = 0
    for path in sorted(filter(is_source, paths), key=lambda path: blake2b(path.encode()).digest()):
        if taken >= most:
            return
        content = (packages / path).read_bytes()
        taken += len(content)
        yield {"text": content.decode("utf-8", errors="replace"), "source": path}


def is_source(path: str) -> bool:
    """Whether the file of this path within the installed packages is text that people wrote, equal
    on all machines."""
    return NOT_READ.isdisjoint(
        path.removeprefix("site-packages/").split("/")
    ) and not NOT_OF_SOURCE.search(path)


def write_lines(path: Path, documents: Iterator[dict[str, str]]) -> None:
    write_atomically(path, "".join(json.dumps(document) + "\n" for document in documents))


def describe(out: Path) -> dict:
    """Of each source below `out`: tokens, documents and the SHA-256 of every shard."""
    sources = {}
    for name in LICENSES:
        index = read_index(out / name)
        sources[name] = {
            "license": index.license,
            "splits": {
                split: {
                    "documents": part.documents,
                    "tokens": part.tokens,
                    "sha256": [shard.sha256 for shard in part.shards],
                }
                for split, part in index.splits.items()
            },
        }
    return {"format_version": 1, "tokenizer": "byte", "val_share": VAL_SHARE, "sources": sources}


def check_shards(out: Path) -> None:
    """Raise UserError where a shard below `out` is not the one that data.json names."""
    recorded, made = json.loads(RECORD.read_text())["sources"], describe(out)["sources"]
    for name, source in recorded.items():
        for split, part in source["splits"].items():
            if made[name]["splits"][split]["sha256"] != part["sha256"]:
                raise UserError(
                    f"{out / name} holds other {split} tokens than the study was trained on"
                    f" ({RECORD.name}): delete it and make it again from the same files and package"
                    " versions"
                )


if __name__ == "__main__":
    sys.exit(run_command(main))
