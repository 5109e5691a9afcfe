"""What is asked for, held against what is there already.

A source of the folder is complete (index.json), or its layout is final and shards are being written (parts/layout.json),
or it has pieces, or nothing yet.
"""

import fcntl
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from prepare import inventory
from prepare.assemble import Assembly
from prepare.contamination import Grams
from prepare.parts import Parts
from prepare.source import Source
from runtime.cli import UserError
from runtime.shards import DTYPES, file_sha256, read_index
from runtime.tokenizer import Tokenizer

HASH_STEPS = 10_000             # the share of validation documents is kept in steps of 1 / this


@dataclass(frozen=True)
class Job:
    """What is common to all sources of a command."""
    out: Path
    tokenizer: Tokenizer
    val_per_10k: int
    processes: int
    worker: int             # from 1
    workers: int
    grams: Grams | None     # of evaluation files; documents that share one are dropped
    skip_bad: bool
    is_quiet: bool          # another worker's progress lines tell of this one too
    budgets: dict[str, int] = field(default_factory=dict)       # source -> training tokens; a source not in it: all there are

    @property
    def common(self) -> dict:
        """What index.json says of every source of this command."""
        return {"tokenizer": self.tokenizer.kind, "tokenizer_sha256": self.tokenizer.sha256,
                "split_rule": f"val where int.from_bytes(blake2b(text, digest_size=8).digest(), 'little') % {HASH_STEPS} "
                              f"< {self.val_per_10k}, else train",
                "decontaminated_against": self.grams.files if self.grams else []}

    def dtype(self, source: Source) -> str:
        """Of a source's tokens, as index.json calls it: a mark for context needs room beside the id."""
        return "uint32" if source.is_masked or self.tokenizer.dtype == DTYPES["uint32"] else "uint16"

    def token_bytes(self, source: Source) -> int:
        return 4 if self.dtype(source) == "uint32" else 2


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Waits until no other process begins or finishes a source in this folder. Where there are no locks it goes on."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as file:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def identity(source: Source, job: Job) -> dict:
    """What the tokens of a source depend on, beside its files' content."""
    return {"dataset": source.dataset, "revision": None if source.has_stamps else source.revision, "selection": source.selection,
            "tokenizer_sha256": job.tokenizer.sha256, "decontaminated_against": job.common["decontaminated_against"]}


def is_complete(source: Source, job: Job) -> bool:
    folder = job.out / source.name
    if not (folder / "index.json").exists():
        return False
    index, budget = read_index(folder), job.budgets.get(source.name)
    wanted = {"dataset": source.dataset, **job.common, "selection": source.selection, "revision": source.revision}
    for key, value in wanted.items():
        found = getattr(index, key)
        if found == value:
            continue
        if key == "revision" and source.may_age:
            print(f"{folder} was made from {found}; delete it to harvest what is installed now", file=sys.stderr)
        elif key == "revision":
            raise UserError(f"{folder} was made when {source.dataset} held something else: delete it, or give another name=")
        else:
            raise UserError(f"{folder} holds shards of {key}={found!r}, not {value!r}: delete it, or give another out=")
    there = index.splits["train"].tokens
    if not index.is_whole and (budget is None or there < budget):
        asked = "all there are" if budget is None else f"the {budget:,} asked for"
        raise UserError(f"{folder} holds {there:,} training tokens, not {asked}: delete it, or give another out=")
    print(f"{folder} is complete" + (f", without {len(index.skipped)} files that could not be read: delete it to try them again"
                                     if index.skipped else ""))
    inventory.print_rows(index)
    return True


def is_committed(folder: Path) -> bool:
    return (folder / "parts" / "layout.json").exists()


def check_same(assembly: Assembly, folder: Path, job: Job, source: Source) -> None:
    """A layout that is on disk already is final: raises UserError where this command asks for another one."""
    changes = [f"{key} was {was!r}, now {now!r}" for key, was, now in (
        ("tokens", assembly.budget, job.budgets.get(source.name)),
        ("split_rule", assembly.facts["split_rule"], job.common["split_rule"])) if was != now]
    if changes:
        raise UserError(f"{folder} is being finished otherwise ({'; '.join(changes)}): give the same options again, or delete "
                          f"it and begin anew")


def earlier(source: Source, job: Job) -> dict[str, Path]:
    """The document hashes of the other sources in the folder: no document comes twice, so none lies in both splits.

    Raises UserError where a finished source has lost them."""
    found = {}
    for folder in sorted(path for path in job.out.iterdir() if path.is_dir() and path.name != source.name):
        hashes = folder / "hashes.npy"
        if not (folder / "index.json").exists():
            if is_committed(folder):       # what an unfinished one holds is not known before
                found[folder.name] = hashes
            continue
        index = read_index(folder)
        its_sha256 = index.tokenizer_sha256 if index.tokenizer == "folder" else job.tokenizer.sha256
        if (index.tokenizer, its_sha256) != (job.tokenizer.kind, job.tokenizer.sha256):    # the same text by another is no copy
            continue
        if not hashes.exists() or file_sha256(hashes) != index.hashes_sha256:
            raise UserError(f"{hashes} is not what was written, so copies cannot be found: restore it, or delete {folder} and "
                              f"prepare it again")
        found[folder.name] = hashes
    return found


def check_room(begun: list[tuple[Source, Parts]], job: Job) -> None:
    """Raises UserError where the disk cannot hold what was asked for; pieces turn into shards."""
    lacking = 0.0
    for source, parts in begun:
        if not is_committed(job.out / source.name):        # else the shards take the room that their pieces give back
            wanted = min(job.budgets.get(source.name) or math.inf, source.tokens or math.inf)
            lacking += max(0.0, job.token_bytes(source) * ((0 if wanted == math.inf else wanted) - parts.tokens()))
    if lacking > (free := shutil.disk_usage(job.out).free):
        raise UserError(f"{job.out} has {free / 1e9:,.3f} GB free, but what is asked for needs {lacking / 1e9:,.3f} GB more: "
                          f"free some, ask for fewer tokens=, or give another out=")
