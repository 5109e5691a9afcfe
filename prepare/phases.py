"""Take sources through both phases: input files to pieces of tokens, pieces to shards and index.json.

Phase one may be shared by any number of workers, each with files of its own; phase two belongs to whoever finishes
last. Both may be cut off at any moment: pieces and shards appear by rename, and what is there already is kept.
"""

import fcntl
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
from prepare.pool import Pool
from prepare.progress import Progress
from prepare.source import BadFile, Piece, Source
from runtime.annotations import ConfigError
from runtime.shards import Index, read_index, write_index
from runtime.tokenizer import Tokenizer

HASH_STEPS = 10_000             # the share of validation documents is kept in steps of 1 / this
SLACK = 1.002                   # more than is asked for, at first: a few documents always turn out to be copies


@dataclass(frozen=True)
class Job:
    """What is common to all sources of a command."""
    out: Path
    tokenizer: Tokenizer
    backend: str
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
        return {"tokenizer": self.tokenizer.name, "tokenizer_sha256": self.tokenizer.sha256,
                "split_rule": f"val where int.from_bytes(blake2b(text, digest_size=8).digest(), 'little') % {HASH_STEPS} "
                              f"< {self.val_per_10k}, else train",
                "decontaminated_against": self.grams.files if self.grams else []}


class Unfinished(Exception):
    """Input files could not be read; the sentence names them. What was prepared waits for the next try."""


# ------------------------------------------------------------------------------------------------------------ preparing

def prepare(sources: list[Source], job: Job) -> None:
    """Makes out/<source>/ for each source that is not complete yet; with other workers, a share of it.

    Raises ConfigError: bad input, or a folder that holds something else. Unfinished: files that could not be read.
    """
    begun = []
    for source in sources:
        with _alone(job.out):       # nobody finishes a source or begins one meanwhile
            parts = Parts(job.out / source.name / "parts", _identity(source, job))
            if _is_complete(source, job):
                parts.remove()      # of a run that was killed between its index and its end
            else:
                parts.open(source.files(parts.known()))
                begun.append((source, parts))
    if not begun:
        return
    _check_room(begun, job)
    with Pool(job.tokenizer.name, job.processes, job.backend, job.grams) as pool:
        for source, parts in begun:
            parts.forgive()
            if Assembly.resume(job.out / source.name) is None:      # else its shards are being written
                budget = job.budgets.get(source.name)
                tokenise(source, parts, pool, job, budget and SLACK * budget / (1 - job.val_per_10k / HASH_STEPS))
        for source, parts in begun:
            while (target := assemble(source, parts, pool, job)) is not None:   # copies dropped, it falls short
                if not tokenise(source, parts, pool, job, target):
                    print(f"{source.name}: the rest is with other workers; the last one to finish makes the shards")
                    return
            if not (job.out / source.name / "index.json").exists():
                return              # whoever finishes this one does the others too: copies are dropped in order


def tokenise(source: Source, parts: Parts, pool: Pool, job: Job, target: float | None) -> bool:
    """Phase one: one input file after another until the pieces on disk hold `target` tokens. False: none was taken."""
    expected = source.tokens and source.tokens / max(1, len(parts.files))
    who = f"[{job.worker}/{job.workers}] {source.name}" if job.workers > 1 else source.name
    progress, is_taken = Progress(who, not job.is_quiet), False
    while (number := parts.next_file(target, expected, job.worker, job.workers)) is not None:
        is_taken = True
        try:
            _tokenise_file(parts, number, pool, target, progress)
        except BadFile as error:
            parts.fail(number, str(error))
            progress.clear()
            print(f"{who}: {parts.files[number].name} is left out: {error}", file=sys.stderr)
        finally:
            progress.clear()
            parts.release(number)
    return is_taken


def _tokenise_file(parts: Parts, number: int, pool: Pool, target: float | None, progress: Progress) -> None:
    writer, is_whole = parts.writer(number), True
    room = None if target is None else target - parts.before(number)
    encoded = pool.encode(parts.files[number].read(writer.rows))
    try:
        for batch in encoded:
            writer.add(batch)
            progress.show(lambda read=batch.read: _how_far(parts, number, read, target))
            if room is not None and writer.tokens >= room:
                is_whole = False
                break
        writer.close(is_last=is_whole)
    except BaseException:
        writer.abandon()
        raise
    finally:
        encoded.close()


def assemble(source: Source, parts: Parts, pool: Pool, job: Job) -> float | None:
    """Phase two: pieces -> shards and index.json. Returns None, or how many tokens of pieces it takes.

    Leaves it to others while they are at work. Raises Unfinished: a file needed could not be read."""
    folder = job.out / source.name
    with _alone(job.out):
        if (folder / "index.json").exists():        # another worker was quicker
            return None
        assembly = Assembly.resume(folder)
        if assembly is not None:
            _check_same(assembly, folder, job, source)
        else:
            if others := parts.others():
                print(f"{source.name}: {len(others)} files are with other workers; the last one to finish makes the shards")
                return None
            pieces, is_exhausted = parts.prefix(job.skip_bad), parts.is_exhausted(job.skip_bad)
            assembly = Assembly(folder, pieces, _earlier(source, job), job.val_per_10k, job.budgets.get(source.name))
            assembly.layout()
            if not assembly.is_full and not is_exhausted:
                _raise_failures(source, parts)
                return _next_target(pieces, assembly)
            _check_splits(source, assembly)
            assembly.commit(_facts(source, parts, assembly, job))
        write_index(folder, {**assembly.facts, "splits": assembly.write(pool.map)})
        parts.remove()
    dropped = ", ".join([f"{count} in {name}" for name, count in assembly.duplicates.items()])
    print(f"{folder}: {sum(assembly.duplicates.values())} documents dropped that came before"
          f"{f' ({dropped})' if set(assembly.duplicates) - {source.name} else ''}, {assembly.empty} empty ones"
          f"{f', {assembly.contaminated} contaminated ones' if job.grams else ''}")
    inventory.print_rows(_read(folder))
    return None


def _next_target(pieces: list[Piece], assembly: Assembly) -> float:
    """How many tokens of pieces should hold the budget, by the share of training tokens in those there are."""
    there = sum(piece.tokens for piece in pieces)
    lacking = (assembly.budget - assembly.train_tokens) * there / max(1, assembly.train_tokens)
    return there + SLACK * lacking + 1


def _facts(source: Source, parts: Parts, assembly: Assembly, job: Job) -> dict:
    """index.json without its splits."""
    read = parts.files[:assembly.last_file + 1] if assembly.is_full else parts.files
    names, failures = [file.name for file in read], parts.failures()
    return {"source": source.name, **job.common, "vocab_size": job.tokenizer.vocab_size, "dataset": source.dataset,
            "revision": source.revision, "license": source.license, "selection": source.selection,
            "duplicates": assembly.duplicates, "empty": assembly.empty, "contaminated": assembly.contaminated,
            "files": [name for name in names if name not in failures],
            "skipped": [{"file": name, "reason": failures[name]} for name in names if name in failures],
            "budget": assembly.budget, "is_whole": not assembly.is_full}


def _raise_failures(source: Source, parts: Parts) -> None:
    if failures := parts.failures():
        listed = "".join(f"\n  {name}: {reason}" for name, reason in sorted(failures.items()))
        raise Unfinished(f"{source.name} is not finished: {len(failures)} of {len(parts.files)} input files could not be "
                         f"read; run the same command again to try them again, or add skip_bad=true to leave them out:"
                         f"{listed}")


def _check_same(assembly: Assembly, folder: Path, job: Job, source: Source) -> None:
    """A layout that is on disk already is final: raises ConfigError where this command asks for another one."""
    changes = [f"{key} was {was!r}, now {now!r}" for key, was, now in (
        ("tokens", assembly.budget, job.budgets.get(source.name)),
        ("split_rule", assembly.facts["split_rule"], job.common["split_rule"])) if was != now]
    if changes:
        raise ConfigError(f"{folder} is being finished otherwise ({'; '.join(changes)}): give the same options again, or delete "
                          f"it and begin anew")


def _check_splits(source: Source, assembly: Assembly) -> None:
    documents, total = assembly.documents, sum(assembly.documents.values())
    if not total:
        dropped = [f"{count} copies of documents in {name}" for name, count in assembly.duplicates.items()]
        dropped += [f"{n} {word} ones" for n, word in ((assembly.empty, "empty"), (assembly.contaminated, "contaminated")) if n]
        raise ConfigError(f"{source.name} has no documents: {source.dataset} holds " +
                          (f"{', '.join(dropped)} alone; give other files, or another out=" if dropped else "no text"))
    for name, count in documents.items():
        if not count:
            raise ConfigError(f"none of the {total} documents of {source.name} fell to the {name} split: give more "
                              f"documents, or another share, such as val_share={min(0.5, max(0.01, 5 / total)):.2g}")


# ---------------------------------------------------------------------------------------------------- what is there already

def _check_room(begun: list[tuple[Source, Parts]], job: Job) -> None:
    """Raises ConfigError where the disk cannot hold what was asked for; two bytes a token, pieces turn into shards."""
    wanted = {source.name: job.budgets.get(source.name) or source.tokens or 0 for source, _ in begun}
    lacking = sum(max(0, 2 * wanted[source.name] - 2 * parts.tokens()) for source, parts in begun)
    if lacking > (free := shutil.disk_usage(job.out).free):
        raise ConfigError(f"{job.out} has {free / 1e9:,.0f} GB free, but {sum(wanted.values()) / 1e9:,.1f}B tokens need "
                          f"{lacking / 1e9:,.0f} GB more: free some, ask for fewer tokens=, or give another out=")


def _how_far(parts: Parts, number: int, read: float, target: float | None) -> tuple[int, float]:
    """Tokens of the source on disk, by whomever, and the share of the work done: by tokens or by bytes of the input."""
    tokens, files = parts.tokens(), parts.files
    if target is not None:
        return tokens, min(1.0, tokens / target)
    sizes = [file.bytes or 1 for file in files]
    return tokens, (sum(sizes[:number]) + read * sizes[number]) / max(1, sum(sizes))


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Waits until no other process begins or finishes a source in this folder. Where there are no locks it goes on."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as file:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _identity(source: Source, job: Job) -> dict:
    """What the tokens of a source depend on, beside its files' content."""
    return {"dataset": source.dataset, "revision": source.revision, "selection": source.selection,
            "tokenizer_sha256": job.tokenizer.sha256, "decontaminated_against": job.common["decontaminated_against"]}


def _is_complete(source: Source, job: Job) -> bool:
    folder = job.out / source.name
    if not (folder / "index.json").exists():
        return False
    index, budget = _read(folder), job.budgets.get(source.name)
    wanted = {"dataset": source.dataset, **job.common, "selection": source.selection, "revision": source.revision}
    for key, value in wanted.items():
        found = getattr(index, key)
        if found == value:
            continue
        if key == "revision" and source.may_age:
            print(f"{folder} was made from {found}; delete it to harvest what is installed now", file=sys.stderr)
        elif key == "revision":
            raise ConfigError(f"{folder} was made when {source.dataset} held something else: delete it, or give another name=")
        else:
            raise ConfigError(f"{folder} holds shards of {key}={found!r}, not {value!r}: delete it, or give another out=")
    there = index.splits["train"].tokens
    if not index.is_whole and (budget is None or there < budget):
        asked = "all there are" if budget is None else f"the {budget:,} asked for"
        raise ConfigError(f"{folder} holds {there:,} training tokens, not {asked}: delete it, or give another out=")
    print(f"{folder} is complete" + (f", without {len(index.skipped)} files that could not be read: delete it to try them again"
                                     if index.skipped else ""))
    inventory.print_rows(index)
    return True


def _earlier(source: Source, job: Job) -> dict[str, Path]:
    """The document hashes of the other sources in the folder: no document comes twice, so none lies in both splits."""
    found = {}
    for path in sorted(job.out.glob("*/hashes.npy")):
        is_other = (path.parent / "index.json").exists() and _read(path.parent).tokenizer != job.tokenizer.name
        if path.parent.name != source.name and not is_other:    # the same text by another tokenizer is no copy
            found[path.parent.name] = path
    return found


def _read(folder: Path) -> Index:
    try:
        return read_index(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error
