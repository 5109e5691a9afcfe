"""Take sources from text to shards: one task per input file, run by processes of this machine, or by datatrove as a Slurm array
or on Ray.

A task reads, drops what evaluation files hold, tokenises, and leaves a piece (prepare.assemble.Piece) in out/NAME/parts/. A
piece appears by rename, so a command may be killed at any moment: finished tasks are skipped, an unfinished one begins its
file again. When the pieces hold what is asked for, one process makes the shards.
"""

import fcntl
import json
import math
import multiprocessing
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from prepare.assemble import HASH_STEPS, Piece, begun, lay_out, read_piece, show, write_shards
from prepare.decontaminate import Grams
from prepare.sources import BadFile, Source
from runtime.cli import MachineError, UserError
from runtime.machine import new_file, write_json
from runtime.shards import DTYPES, LOSS_MASK_BIT, file_sha256, read_index, write_index
from runtime.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
ROW = struct.Struct("<QII")     # prepare.assemble.DOCUMENT
BORDER = b"\0"                  # between prompt and response where the two are hashed as one
TELL_S = 0.5                    # between two words of a task about its progress
TOKENS_A_BYTE = 0.4             # a guess where nobody says how many tokens a file has
SLACK = 1.002                   # more than is asked for, at first: a few documents always turn out to be copies


@dataclass(frozen=True)
class Job:
    """What is common to all sources of a command."""
    out: Path
    tokenizer: Tokenizer
    val_per_10k: int
    processes: int
    grams: Grams | None     # of evaluation files; documents that share one are dropped
    skip_bad: bool
    on: str                 # local, slurm or ray
    partition: str          # of Slurm
    time: str               # of Slurm, for one input file
    dry_run: bool
    budgets: dict[str, int] = field(default_factory=dict)       # source -> training tokens; a source not in it: all there are

    def identity(self, source: Source) -> dict:
        """What the shards of a source depend on, as index.json says it."""
        rule = f"val where int.from_bytes(blake2b(text, digest_size=8).digest(), 'little') % {HASH_STEPS} < {self.val_per_10k}"
        return {"tokenizer": self.tokenizer.kind, "tokenizer_sha256": self.tokenizer.sha256, "split_rule": f"{rule}, else train",
                "decontaminated_against": self.grams.files if self.grams else [], "dataset": source.dataset,
                "revision": source.revision, "selection": source.selection}

    def dtype(self, source: Source) -> str:
        """Of a source's tokens, as index.json calls it: a mark for context needs room beside the id."""
        return "uint32" if source.is_masked or self.tokenizer.dtype == DTYPES["uint32"] else "uint16"

    def first_target(self, source: Source) -> float:
        """Tokens of pieces to begin with, those of validation among them."""
        return SLACK * self.budgets.get(source.name, math.inf) / (1 - self.val_per_10k / HASH_STEPS)


# ----------------------------------------------------------------------------------------------------------------- tasks

@dataclass(frozen=True)
class Task:
    """A step of datatrove's: input file `rank` to its piece, with `most` tokens or, if it ends before, fewer."""
    files: dict[int, object]        # prepare.sources
    folder: Path
    tokenizer: str
    most: float
    grams: Path | None

    def __call__(self, data, rank: int, world_size: int) -> Iterator[None]:
        """Yields now and then."""
        if (piece := read_piece(self.folder, rank)) and piece.serves(self.most):
            return
        stem, sums, told, tokenizer = self.folder / f"{rank:05d}", [0, 0, 0], 0.0, cached_tokenizer(self.tokenizer)
        file = self.files[rank]
        prefix, grams = np.array(tokenizer.prefix, tokenizer.dtype), _read_grams(self.grams)
        try:
            with new_file(stem.with_suffix(".bin")) as ids, new_file(stem.with_suffix(".docs")) as table:
                for texts, share in file.read():
                    raw, tokens, size, digest = [text.encode() for text in texts], 0, 0, 0
                    if texts[-1] and not texts[-1].isspace():
                        digest, size = int.from_bytes(blake2b(BORDER.join(raw), digest_size=8).digest(), "little"), len(raw[-1])
                        if not (grams and grams.found_in(" ".join(texts))):
                            for part in _masked(tokenizer, texts) if len(texts) > 1 else (prefix, tokenizer.encode(texts[0])):
                                ids.write(part)
                                tokens += len(part)
                    table.write(ROW.pack(digest, tokens, size))
                    sums = [sums[0] + 1, sums[1] + tokens, sums[2] + size]
                    if sums[1] >= self.most:
                        break
                    if time.monotonic() - told > TELL_S:
                        told = time.monotonic()
                        stem.with_suffix(".now").write_text(json.dumps([*sums, share]))
                        yield
            facts = dict(zip(("documents", "tokens", "bytes"), sums, strict=True)) | {"is_whole": sums[1] < self.most}
            stem.with_suffix(".now").write_text(json.dumps([*sums, 1.0]))
        except BadFile as error:
            facts = {"failed": str(error)}
        write_json(stem.with_suffix(".json"), {"input": _input(file), **facts})


def _input(file) -> list:
    """By which a piece tells whether its input file has changed."""
    return [file.name, file.bytes, file.stamp]


def _masked(tokenizer: Tokenizer, texts: tuple[str, str]) -> list[np.ndarray]:
    """Prefix, prompt, response; LOSS_MASK_BIT marks what is no target: all but the prefix's first token, with which the document
    before ends, and the response. The two are encoded by themselves, so no token reaches over the border."""
    context, response = (tokenizer.encode(text).astype("<u4") for text in texts)
    start = np.array(tokenizer.prefix, "<u4")
    return [start[:1], LOSS_MASK_BIT | start[1:], LOSS_MASK_BIT | context, response]


cached_tokenizer = cache(load_tokenizer)


@cache
def _read_grams(path: Path | None) -> Grams | None:
    return path and Grams([], np.load(path))


def run_here(task: Task, ranks: list[int], processes: int, tick: Callable[[], None]) -> None:
    """By processes of our own rather than datatrove's pool, which waits for ever for a worker that was killed, for want of memory
    mostly, and leaves workers behind that write on when it is killed itself. `tick` is called twice a second."""
    if (workers := min(processes, len(ranks))) <= 1:
        for rank in ranks:
            _run_whole(task, rank, tick)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker) as pool:
        try:
            left = {pool.submit(_run_whole, replace(task, files={rank: task.files[rank]}), rank) for rank in ranks}
            while left:
                done, left = wait(left, TELL_S, FIRST_COMPLETED)
                for future in done:
                    future.result()
                tick()
        except BrokenProcessPool as error:
            raise MachineError("a process was killed, mostly for want of memory: fewer processes= need less; what was prepared "
                               "stays, and the same command goes on") from error
        finally:
            for worker in multiprocessing.active_children():
                worker.kill()       # it holds nothing that is not on disk


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is the parent's to answer

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=end_with_parent, daemon=True).start()


def _run_whole(task: Task, rank: int, tick: Callable[[], object] = int) -> None:
    for _ in task(None, rank, 1):
        tick()


# ----------------------------------------------------------------------------------------------------------------- parts

class Parts:
    """What the tasks of one source wrote, in `folder`: begun.json (what the tokens depend on), pieces and <file>.now, the
    progress of each."""

    def __init__(self, source: Source, job: Job):
        """Go on in the folder, or begin: failed files are tried again, and changed ones. Raises UserError: begun otherwise."""
        self.folder, identity = job.out / source.name / "parts", job.identity(source)
        there = begun(self.folder.parent) or {"files": 0}
        if any((piece := read_piece(self.folder, number)) and not piece.failed for number in range(there["files"])):
            check_same(self.folder, there, {key: value for key, value in identity.items() if key != "revision"})    # the stamps'
        self.files = source.files()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "begun.json", {**identity, "files": len(self.files)})
        for number, (file, piece) in enumerate(zip(self.files, self.pieces(), strict=True)):
            if piece and (piece.failed or piece.input != _input(file)):
                print(f"{self.folder}: {file.name} changed or could not be read: it is read again", file=sys.stderr)
                (self.folder / f"{number:05d}.json").unlink()

    def pieces(self) -> list[Piece | None]:
        """Of each input file."""
        return [read_piece(self.folder, number) for number in range(len(self.files))]

    def ranks(self, target: float, source_tokens: float | None) -> list[int]:
        """The tasks to run: those that lack among the first input files that hold `target` tokens, which is known of the finished
        ones, and guessed by their mean, by the source's size or by the file's."""
        pieces, found, held = self.pieces(), [], 0.0
        whole = [piece.tokens for piece in pieces if piece and piece.is_whole]
        mean = sum(whole) / len(whole) if whole else source_tokens and source_tokens / max(1, len(self.files))
        for rank, (file, piece) in enumerate(zip(self.files, pieces, strict=True)):
            if held >= target:
                break
            if piece and piece.serves(target):
                held += piece.tokens
            else:
                found.append(rank)
                held += mean if mean is not None else TOKENS_A_BYTE * (file.bytes or 0)
        return found

    def progress(self) -> tuple[int, int, int, float]:
        """Documents, tokens, bytes of text and share of the input read, by all tasks so far."""
        sums, read, sizes = [0, 0, 0], 0.0, [file.bytes or 1 for file in self.files]
        for path in self.folder.glob("*.now"):
            with suppress(ValueError, OSError):         # it is being written
                *found, share = json.loads(path.read_bytes())
                sums, read = [a + b for a, b in zip(sums, found, strict=True)], read + share * sizes[int(path.stem)]
        return *sums, read / max(1, sum(sizes))


@contextmanager
def alone(folder: Path, words: str | None = None) -> Iterator[None]:
    """Holds a lock on `folder`, after whoever has it, or raises UserError(words). Where there are no locks it goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if words else 0))
            except BlockingIOError as error:
                raise UserError(words) from error
        yield
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------ preparing

def prepare(sources: list[Source], job: Job) -> None:
    """Makes out/<source>/ for each source that is not complete yet.

    Raises UserError: bad input, or a folder that holds something else. MachineError: files that could not be read."""
    with ExitStack() as stack:
        opened: list[tuple[Source, Parts]] = []
        for source in sources:
            folder = job.out / source.name
            stack.enter_context(alone(folder, f"another process prepares {folder}: wait until it ends"))
            if is_complete(source, job):
                shutil.rmtree(folder / "parts", ignore_errors=True)     # of a run that was killed between its index and its end
            else:
                opened.append((source, Parts(source, job)))
        _check_room(opened, job)
        if job.on == "slurm" and opened:
            stack.close()       # the jobs take the locks
            _submit(opened, job)
            return
        for source, parts in opened:
            target: float | None = job.first_target(source)
            while target is not None:       # the pieces fell short, copies dropped
                tokenise(source, parts, target, job)
                target = assemble(source, parts, job)


def _task(parts: Parts, target: float, job: Job) -> Task:
    name = str(Path(job.tokenizer.name).resolve()) if job.tokenizer.kind == "folder" else job.tokenizer.name
    folder = parts.folder.resolve()
    if job.grams:
        np.save(folder / "grams.npy", job.grams.hashes)
    return Task(dict(enumerate(parts.files)), folder, name, target, folder / "grams.npy" if job.grams else None)


def tokenise(source: Source, parts: Parts, target: float, job: Job) -> None:
    """Runs the tasks whose pieces hold `target` tokens, as far as they lack."""
    from runtime.cli import ProgressLine, si
    line, began, first = ProgressLine(source.name, "tokens"), time.monotonic(), parts.progress()[2]

    def state() -> tuple:
        documents, tokens, text_bytes, share = parts.progress()
        rate = (text_bytes - first) / (time.monotonic() - began) / 1e6
        return tokens, max(share, min(1.0, tokens / target)), f"{si(documents)} documents", f"{rate:.1f} MB/s"
    task, ranks = _task(parts, target, job), parts.ranks(target, source.tokens)
    if job.on == "ray" and ranks:
        try:
            import ray
            from datatrove.executor.ray import RayPipelineExecutor
        except ImportError as error:
            raise UserError("on=ray needs the package ray: pip install ray") from error
        ray.init(ignore_reinit_error=True)
        RayPipelineExecutor([task], tasks=ranks[-1] + 1, workers=job.processes, skip_completed=False,
                            logging_dir=str(task.folder / "ray")).run()
        ranks = parts.ranks(target, source.tokens)      # what ended there with an error ends so here, and tells why
    try:
        run_here(task, ranks, job.processes, partial(line.show, state))
    finally:
        line.clear()


def _submit(opened: list[tuple[Source, Parts]], job: Job) -> None:
    """An array of jobs for each source, and a job behind them all that makes the shards. With dry_run they are printed."""
    from datatrove.executor import slurm
    arrays = []

    def launch(name: str, step: Callable, **options) -> None:
        executor = slurm.SlurmPipelineExecutor(
            [step], time=job.time, partition=job.partition, job_name=f"prepare_{name}", qos="", mem_per_cpu_gb=4,
            logging_dir=str((job.out / ".slurm" / name).resolve()), skip_completed=False,
            env_command=f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}:$PYTHONPATH", **options)
        executor.launch_merge_stats = int       # no job that merges datatrove's statistics
        try:
            executor.run()
        except subprocess.CalledProcessError as error:      # it has said why
            raise UserError(f"sbatch refused the job (partition={job.partition} time={job.time}): correct that") from error
        arrays.append(executor.job_id)

    if job.dry_run:
        slurm.launch_slurm_job = lambda content, *_: print(content) or "DRY_RUN"
    for source, parts in opened:
        if ranks := parts.ranks(target := job.first_target(source), source.tokens):
            launch(source.name, _task(parts, target, job), tasks=ranks[-1] + 1, workers=job.processes)
    launch("shards", partial(_finish, [source for source, _ in opened], replace(job, out=job.out.resolve())), tasks=1,
           run_on_dependency_fail=True, depends_job_id=":".join(arrays) or None)


def _finish(sources: list[Source], job: Job, data, rank: int, world_size: int) -> None:
    """The step of the Slurm job behind the arrays, which finds all tasks done."""
    prepare(sources, replace(job, on="local", processes=cores()))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def assemble(source: Source, parts: Parts, job: Job) -> float | None:
    """Pieces -> shards and index.json. Returns None, or how many tokens of pieces it takes.

    Raises MachineError: a file needed could not be read."""
    folder, budget = job.out / source.name, job.budgets.get(source.name)
    with alone(job.out):      # no other source's shards meanwhile: copies are dropped across sources
        found = parts.pieces()
        failures = {file.name: piece.failed for file, piece in zip(parts.files, found, strict=True) if piece and piece.failed}
        found = [piece for piece in found if not (job.skip_bad and piece and piece.failed)]
        # Those before the first that lacks, and one that was stopped early, behind which nothing is of use.
        end = next((i for i, piece in enumerate(found) if not (piece and piece.is_whole)), len(found))
        pieces = found[:end] + [piece for piece in found[end:end + 1] if piece and not piece.failed]
        splits, layout, homes = lay_out(source.name, pieces, _earlier(source, job), job.val_per_10k, budget)
        pieces, train = pieces[:len(homes)], splits["train"]["tokens"]
        if layout["is_whole"] and end < len(found):
            if failures:
                listed = "".join(f"\n  {name}: {reason}" for name, reason in failures.items())
                raise MachineError(f"{source.name} is not finished: {len(failures)} of {len(parts.files)} input files could "
                                   f"not be read; run the command again, or add skip_bad=true to leave them out:{listed}")
            there = sum(piece.tokens for piece in pieces)
            return math.inf if budget is None else there + SLACK * (budget - train) * there / max(1, train) + 1
        if empty := [name for name, split in splits.items() if not split["documents"]]:
            raise UserError(f"{source.name} has no documents for {' and '.join(empty)}; left out are copies "
                            f"{layout['duplicates'] or 0}, empty {layout['empty']}, contaminated {layout['contaminated']}, files "
                            f"{list(failures.values())}: give more documents, or another val_share=")
        last = len(parts.files) if layout["is_whole"] else int(pieces[-1].stem.name) + 1
        names, failures = [file.name for file in parts.files[:last]], failures if job.skip_bad else {}
        print(f"{folder}: writing {sum(split['tokens'] for split in splits.values()):,} tokens", file=sys.stderr)
        facts = {
            "dtype": job.dtype(source), "source": source.name, **job.identity(source), "vocab_size": job.tokenizer.vocab_size,
            "license": source.license, **layout, "files": [name for name in names if name not in failures],
            "skipped": [{"file": name, "reason": failures[name]} for name in names if name in failures],
            "budget": budget, **({"is_masked": True} if source.is_masked else {})}
        write_index(folder, facts | write_shards(folder, pieces, homes, splits, facts["dtype"]))
        shutil.rmtree(parts.folder)
    print("\n".join(show(folder)))
    if budget is not None and layout["is_whole"]:
        print(f"{folder}: {train:,} training tokens are all there are, {budget:,} were asked for: a run that "
              f"needs more sees some of them again (data.max_epochs)", file=sys.stderr)
    return None


# ----------------------------------------------------------------------------------------------------- what is there already

def check_same(folder: Path, there: dict, wanted: dict) -> None:
    """Raises UserError where what the shards depend on is not the same."""
    for key, value in wanted.items():
        if there.get(key) != value:
            raise UserError(f"{folder} is of {key}={there.get(key)!r}, not {value!r}: give the same options and files again, "
                            f"delete it, or give another out=")


def is_complete(source: Source, job: Job) -> bool:
    """Raises UserError where the folder holds something else."""
    folder, budget = job.out / source.name, job.budgets.get(source.name)
    if not (folder / "index.json").exists():
        return False
    index, wanted = read_index(folder), job.identity(source)
    if source.may_age and index.revision != wanted.pop("revision"):
        print(f"{folder} was made from {index.revision}; delete it to harvest what is installed now", file=sys.stderr)
    check_same(folder, vars(index), wanted)
    if not index.is_whole and index.splits["train"].tokens < (budget or math.inf):
        raise UserError(f"{folder} holds {index.splits['train'].tokens:,} training tokens, fewer than are asked for: delete it, "
                        f"or give another out=")
    print(f"{folder} is complete" + (f", without {len(index.skipped)} files that could not be read: delete it to try them again"
                                     if index.skipped else ""))
    print("\n".join(show(folder)))
    return True


def _earlier(source: Source, job: Job) -> dict[str, Path]:
    """The document hashes of the finished sources in the folder: no document comes twice, so none lies in both splits.

    Raises UserError where one has lost them."""
    found = {}
    for folder in sorted(path.parent for path in job.out.glob("*/index.json")):
        index, hashes = read_index(folder), folder / "hashes.npy"
        if index.tokenizer_sha256 == job.tokenizer.sha256:        # the same text by another is no copy
            if not hashes.exists() or file_sha256(hashes) != index.hashes_sha256:
                raise UserError(f"{hashes} is not what was written, so copies cannot be found: restore it, or delete {folder}")
            found[folder.name] = hashes
    return found


def _check_room(opened: list[tuple[Source, Parts]], job: Job) -> None:
    """Raises UserError where the disk cannot hold what was asked for: pieces, which turn into shards one source at a time."""
    asked = [(parts, min(job.budgets.get(source.name, math.inf), source.tokens or math.inf) * np.dtype(
        DTYPES[job.dtype(source)]).itemsize) for source, parts in opened]
    needs = [size for _, size in asked if size < math.inf]
    there = sum(path.stat().st_size for parts, size in asked if size < math.inf for path in parts.folder.glob("*.bin"))
    if (lacking := sum(needs) + max(needs, default=0) - there) > (free := shutil.disk_usage(job.out).free):
        raise UserError(f"{job.out} has {free / 1e9:,.3f} GB free, but what is asked for needs {lacking / 1e9:,.3f} GB more: "
                        f"free some, ask for fewer tokens=, or give another out=")
