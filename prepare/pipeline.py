"""Take sources from text to shards: datatrove runs one task per input file, on this machine, as a Slurm array or on Ray.

The steps of a task are Read, Decontaminate, Tokenise, WritePieces: any of datatrove's filters may stand behind Read. What a
task made lies in out/NAME/parts/ in pieces (prepare.assemble.Piece) that appear by rename, so a command may be killed at
any moment: finished tasks are skipped, by datatrove's markers, and an unfinished one goes on behind its last piece. When the
pieces hold what is asked for, one process makes the shards.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from loguru import logger

from prepare.assemble import HASH_STEPS, Piece, commit, lay_out, read_layout, write_bytes, write_shards
from prepare.decontaminate import Grams
from prepare.sources import BadFile, Source
from runtime.cli import MachineError, UserError
from runtime.progress import ProgressLine, si
from runtime.shards import DTYPES, LOSS_MASK_BIT, Index, file_sha256, read_index, write_index
from runtime.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PIECE_TOKENS = 20_000_000       # 40 MB or 80, seconds to minutes of work: that much a kill loses
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
    command: tuple[str, ...]        # the words that a Slurm job repeats to make the shards
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


# ---------------------------------------------------------------------------------------------------------------- steps

@dataclass(frozen=True)
class Read:
    """The documents of input file `rank` after those that lie in pieces."""
    files: list
    folder: Path

    def __call__(self, data, rank: int, world_size: int) -> Iterator[Document]:
        pieces = read_pieces(self.folder, rank)
        yield from self.files[rank].read(pieces[-1].rows if pieces else 0)


@dataclass(frozen=True)
class Decontaminate:
    """Marks documents that share 13 words in a row with evaluation texts."""
    grams: Path

    def __call__(self, data, rank: int, world_size: int) -> Iterator[Document]:
        grams = _grams(self.grams)
        for document in data:
            prompt = document.metadata.get("prompt")
            text = document.text if prompt is None else f"{prompt} {document.text}"
            document.metadata["contaminated"] = grams.found_in(text)
            yield document


@dataclass(frozen=True)
class Tokenise:
    """Documents to (document, ids in parts, hash, bytes of text); no parts where it is left out.

    A document of prompt and response becomes prefix, prompt, response; LOSS_MASK_BIT marks what is no target: all but the
    prefix's first token, with which the document before ends, and the response. The two are encoded by themselves, so no
    token reaches over the border."""
    tokenizer: str

    def __call__(self, data, rank: int, world_size: int) -> Iterator[tuple[Document, list[np.ndarray], int, int]]:
        tokenizer = cached_tokenizer(self.tokenizer)
        prefix = np.array(tokenizer.prefix, tokenizer.dtype)
        for document in data:
            text, prompt = document.text, document.metadata.get("prompt")
            if not text or text.isspace():
                yield document, [], 0, 0
                continue
            raw = text.encode()
            whole = raw if prompt is None else prompt.encode() + BORDER + raw
            digest = int.from_bytes(blake2b(whole, digest_size=8).digest(), "little")
            if document.metadata.get("contaminated"):
                parts = []
            elif prompt is None:
                parts = [prefix, tokenizer.encode(text)]
            else:
                context = np.concatenate([prefix[1:], tokenizer.encode(prompt)])
                parts = [prefix[:1].astype("<u4"), LOSS_MASK_BIT | context.astype("<u4"), tokenizer.encode(text).astype("<u4")]
            yield document, parts, digest, len(raw)


@dataclass(frozen=True)
class WritePieces:
    """Appends to the pieces of input file `rank` until it ends or has `most` tokens; yields now and then."""
    folder: Path
    token_bytes: int
    most: float

    def __call__(self, data, rank: int, world_size: int) -> Iterator[None]:
        try:
            yield from self._write(data, rank)
        except BadFile as error:
            write_bytes(self.folder / f"{rank:05d}.failed", json.dumps({"reason": str(error)}).encode())

    def _write(self, data, rank: int) -> Iterator[None]:
        pieces, told = read_pieces(self.folder, rank), 0.0
        rows = pieces[-1].rows if pieces else 0
        sums = [sum(getattr(piece, key) for piece in pieces) for key in ("documents", "tokens", "bytes")]
        ids, table, size = bytearray(), bytearray(), 0
        if sums[1] >= self.most:
            return

        def save(is_last: bool) -> None:
            stem = self.folder / f"{rank:05d}_{len(pieces):04d}"
            piece = Piece(stem, rank, rows, len(table) // ROW.size, len(ids) // self.token_bytes, size, is_last)
            facts = {key: value for key, value in vars(piece).items() if key != "stem"}
            for suffix, content in (".bin", ids), (".docs", table), (".json", json.dumps(facts).encode()):
                write_bytes(Path(f"{stem}{suffix}"), content)
            pieces.append(piece)

        for document, parts, digest, text_bytes in data:
            tokens = sum(map(len, parts))
            for part in parts:
                ids += part.tobytes()
            table += ROW.pack(digest, tokens, text_bytes)
            rows, size = document.metadata["row"], size + text_bytes
            sums = [sums[0] + 1, sums[1] + tokens, sums[2] + text_bytes]
            if len(ids) >= PIECE_TOKENS * self.token_bytes:
                save(is_last=False)
                ids, table, size = bytearray(), bytearray(), 0
            if sums[1] >= self.most:
                break
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                (self.folder / f"{rank:05d}.now").write_text(json.dumps([*sums, document.metadata["read"]]))
                yield
        else:
            save(is_last=True)
            (self.folder / f"{rank:05d}.now").write_text(json.dumps([*sums, 1.0]))
            return
        if table:
            save(is_last=False)


cached_tokenizer = cache(load_tokenizer)


@cache
def _grams(path: Path) -> Grams:
    return Grams([], np.load(path))


def read_pieces(folder: Path, file: int) -> list[Piece]:
    """The finished pieces of an input file, in order."""
    pieces = []
    while (path := folder / f"{file:05d}_{len(pieces):04d}.json").exists():
        pieces.append(Piece(path.with_suffix(""), **json.loads(path.read_bytes())))
    return pieces


# ------------------------------------------------------------------------------------------------------------ executors

class LocalExecutor(LocalPipelineExecutor):
    """datatrove's for this machine, with processes of our own: its pool waits for ever for a worker that was killed, for want of
    memory mostly, and leaves workers behind that write on when it is killed itself. `tick` is called twice a second."""

    def __init__(self, *args, tick=lambda: None, **options):
        super().__init__(*args, **options)
        self.tick = tick

    def __getstate__(self) -> dict:
        return self.__dict__ | {"tick": None}

    def run(self) -> None:
        ranks = self.get_incomplete_ranks()
        logger.disable("datatrove")
        if self.workers == 1 or len(ranks) == 1:
            self.pipeline = [*self.pipeline, lambda data, rank, world_size: (self.tick() for _ in data)]
            for rank in ranks:
                self._run_for_rank(rank)
            return
        context = multiprocessing.get_context("spawn")
        faults, number = context.SimpleQueue(), context.Value("i", 0)
        workers = [context.Process(target=self._work, args=(ranks, number, faults), daemon=True)
                   for _ in range(min(self.workers, len(ranks)))]
        try:
            for worker in workers:
                worker.start()
            while running := [worker.sentinel for worker in workers if worker.is_alive()]:
                wait(running, TELL_S)
                self.tick()
                if not faults.empty():
                    raise faults.get()
                if dead := [worker for worker in workers if worker.exitcode]:
                    raise MachineError(f"process {dead[0].pid} ended with exit code {dead[0].exitcode}" +
                                       (" (killed, mostly for want of memory: fewer processes= need less)"
                                        if dead[0].exitcode == -signal.SIGKILL else "") +
                                       "; what was prepared stays, and the same command goes on")
            if not faults.empty():
                raise faults.get()
        finally:
            for worker in workers:
                if worker.pid:
                    worker.kill()       # it holds nothing that is not on disk
                    worker.join()

    def _work(self, ranks: list[int], number, faults) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is the parent's to answer
        threading.Thread(target=_end_with_parent, daemon=True).start()
        logger.disable("datatrove")
        pipeline = self.pipeline
        try:
            while True:
                with number:
                    mine, number.value = number.value, number.value + 1
                if mine >= len(ranks):
                    return
                self.pipeline = pipeline
                self._run_for_rank(ranks[mine], local_rank=1)
        except (UserError, OSError) as error:
            faults.put(error)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _slurm(job: Job, name: str, pipeline: list, **options):
    """An executor that submits an array; with dry_run it prints it."""
    from datatrove.executor import slurm

    def show(content: str, *_) -> str:
        print(content)
        return "DRY_RUN"
    if job.dry_run:
        slurm.launch_slurm_job = show
    executor = slurm.SlurmPipelineExecutor(
        pipeline, time=job.time, partition=job.partition, job_name=f"prepare_{name}", qos="", mem_per_cpu_gb=4,
        env_command=f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}:$PYTHONPATH", **options)
    executor.launch_merge_stats = int       # no job that merges datatrove's statistics
    return executor


@dataclass(frozen=True)
class Finish:
    """The step of the Slurm job that follows the arrays: the command itself, here, which finds all tasks done."""
    command: tuple[str, ...]
    folder: Path

    def __call__(self, data, rank: int, world_size: int) -> None:
        subprocess.run([sys.executable, ROOT / "prepare_data.py", *self.command, "on=local"], cwd=self.folder, check=True)


# ---------------------------------------------------------------------------------------------------------------- parts

class Parts:
    """What the tasks of one source wrote, in `folder`: begun.json (what the tokens depend on, the input files), pieces,
    <file>.failed and .now (its progress), and datatrove's folders. `identity` is JSON: what they depend on besides files."""

    def __init__(self, folder: Path, identity: dict):
        self.folder, self._identity, self.files = folder, json.loads(json.dumps(identity)), []

    def known(self) -> list[tuple[str, int | None]] | None:
        """Names and sizes of the input files of what was begun here under this identity."""
        found = begun(self.folder)
        return [(name, size) for name, size, _ in found["files"]] if found and found["identity"] == self._identity else None

    def open(self, files: list) -> None:
        """Go on in the folder, or begin. Of an input file that changed the pieces are removed, and a line says so; failed
        files are tried again. Raises UserError: it was begun with other options or files."""
        self.files, found = files, begun(self.folder) if any(self.folder.glob("*_0000.json")) else None
        plan = {"identity": self._identity, "files": [[file.name, file.bytes, file.stamp] for file in files]}
        if found and found != plan:
            was, now = found["identity"], self._identity
            changes = [f"{key} was {was.get(key)!r:.80}, now {now.get(key)!r:.80}" for key in {**was, **now}
                       if was.get(key) != now.get(key)]
            if [name for name, *_ in found["files"]] != [file.name for file in files]:
                changes.append("other input files, or in another order")
            changed = {old[0] for old, new in zip(found["files"], plan["files"], strict=False) if old != new}
            if changes or read_layout(self.folder.parent):
                raise UserError(f"{self.folder} was begun otherwise ({'; '.join(changes) or f'{min(changed)} was another'}): "
                                f"give the same options and files again, or delete {self.folder}")
            print(f"{self.folder}: what was made of {', '.join(sorted(changed))} is removed: changed since", file=sys.stderr)
            for number, file in enumerate(files):
                if file.name in changed:
                    for path in sorted(self.folder.glob(f"{number:05d}[_.]*"), key=lambda path: path.suffix != ".json"):
                        path.unlink()
        elif not found:
            shutil.rmtree(self.folder, ignore_errors=True)      # of an older version, or nothing to lose
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.failed"):
            path.unlink()
        write_bytes(self.folder / "begun.json", json.dumps(plan).encode())

    def failures(self) -> dict[str, str]:
        """Name -> reason, in the order of the input files."""
        found = {}
        for path in sorted(self.folder.glob("*.failed")):
            found.setdefault(self.files[int(path.stem)].name, json.loads(path.read_text())["reason"])
        return found

    def prefix(self, skip_failed: bool) -> tuple[list[Piece], bool]:
        """The pieces from the first input file on without a gap: of every file that is complete, then of the first that is not.
        Failed files are left out where `skip_failed`. And whether that is all there is."""
        failed, found = self.failures() if skip_failed else {}, []
        for number, file in enumerate(self.files):
            if file.name not in failed:
                pieces = read_pieces(self.folder, number)
                found += pieces
                if not pieces or not pieces[-1].is_last:
                    return found, False
        return found, True

    def wanted(self, target: float | None, source_tokens: float | None) -> int:
        """How many of the first input files hold `target` tokens (None: all), by what the finished ones have, or by what is
        known of the source, or by their size; the markers by which datatrove skips finished ones are set."""
        done, tokens = [], []
        for number in range(len(self.files)):
            pieces = read_pieces(self.folder, number)
            tokens.append(sum(piece.tokens for piece in pieces))
            done.append(bool(pieces) and pieces[-1].is_last)
        whole = [count for count, is_done in zip(tokens, done, strict=True) if is_done]
        mean = sum(whole) / len(whole) if whole else source_tokens and source_tokens / max(1, len(self.files))
        wanted, held = 0, 0.0
        (self.folder / "completions").mkdir(exist_ok=True)
        for number, file in enumerate(self.files):
            marker = self.folder / "completions" / f"{number:05d}"
            marker.touch() if done[number] else marker.unlink(missing_ok=True)
            if target is None or held < target:
                wanted = number + 1
            guess = mean if mean is not None else TOKENS_A_BYTE * (file.bytes or 0) / file.parts
            held += tokens[number] if done[number] else max(tokens[number], guess)
        return wanted

    def progress(self) -> tuple[int, int, int, float]:
        """Documents, tokens, bytes of text and share of the input read, by all tasks so far."""
        sums, read = [0, 0, 0], 0.0
        sizes = [(file.bytes or 1) / file.parts for file in self.files]
        for path in self.folder.glob("*.now"):
            with suppress(ValueError, OSError):         # it is being written
                *found, share = json.loads(path.read_bytes())
                sums, read = [a + b for a, b in zip(sums, found, strict=True)], read + share * sizes[int(path.stem)]
        return *sums, read / max(1, sum(sizes))


def begun(folder: Path) -> dict | None:
    """What was begun in parts/: identity and [name, size, stamp] of the input files; None without any."""
    with suppress(FileNotFoundError):
        return json.loads((folder / "begun.json").read_bytes())
    return None


@contextmanager
def alone(folder: Path, words: str | None = None) -> Iterator[None]:
    """Holds a lock on `folder`, after whoever has it, or raises UserError(words). Where there are no locks it goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if words else 0))
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(words) from error
    except OSError:
        pass
    try:
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
                continue
            parts = Parts(folder / "parts", {
                "dataset": source.dataset, "revision": None if source.has_stamps else source.revision,
                "selection": source.selection, "tokenizer_sha256": job.tokenizer.sha256,
                "decontaminated_against": job.common["decontaminated_against"]})
            parts.open(source.files(parts.known()))
            opened.append((source, parts))
        _check_room(opened, job)
        targets = {source.name: budget and SLACK * budget / (1 - job.val_per_10k / HASH_STEPS)
                   for source in sources for budget in [job.budgets.get(source.name)]}
        if job.on == "slurm":
            stack.close()       # the jobs take the locks
            _submit(opened, targets, job)
            return
        for source, parts in opened:
            if not read_layout(job.out / source.name):      # else its shards are being written
                tokenise(source, parts, targets[source.name], job)
        for source, parts in opened:
            while (target := assemble(source, parts, job)) is not None:     # it falls short, copies dropped
                tokenise(source, parts, target, job)


def _tasks(source: Source, parts: Parts, target: float | None, job: Job) -> dict:
    """What every executor takes: the first input files that hold `target` tokens."""
    folder, tokenizer = parts.folder.resolve(), job.tokenizer.name
    tokenizer = str(Path(tokenizer).resolve()) if job.tokenizer.kind == "folder" else tokenizer
    steps = [Read(parts.files, folder), Tokenise(tokenizer),
             WritePieces(folder, np.dtype(DTYPES[job.dtype(source)]).itemsize, math.inf if target is None else target)]
    if job.grams:
        np.save(folder / "grams.npy", job.grams.hashes)
        steps.insert(1, Decontaminate(folder / "grams.npy"))
    return {"pipeline": steps, "tasks": parts.wanted(target, source.tokens), "logging_dir": str(folder)}


def tokenise(source: Source, parts: Parts, target: float | None, job: Job) -> None:
    """Runs the tasks whose pieces hold `target` tokens, as far as they lack."""
    line, began, first = ProgressLine(source.name, "tokens"), time.monotonic(), parts.progress()[2]

    def state() -> tuple:
        documents, tokens, text_bytes, share = parts.progress()
        rate = (text_bytes - first) / (time.monotonic() - began) / 1e6
        is_whole = target is None or target == math.inf
        return tokens, share if is_whole else min(1.0, tokens / target), f"{si(documents)} documents", f"{rate:.1f} MB/s"
    tasks = _tasks(source, parts, target, job)
    try:
        if job.on == "ray":
            try:
                import ray
            except ImportError as error:
                raise UserError("on=ray needs the package ray: pip install ray") from error
            from datatrove.executor.ray import RayPipelineExecutor
            ray.init(ignore_reinit_error=True)
            RayPipelineExecutor(**tasks, workers=job.processes).run()
            _tasks(source, parts, target, job)      # what failed there is tried here, and tells why
        LocalExecutor(**tasks, workers=1 if job.on == "ray" else job.processes, tick=partial(line.show, state)).run()
    finally:
        line.clear()


def _submit(opened: list[tuple[Source, Parts]], targets: dict, job: Job) -> None:
    """An array of jobs for each source, and a job behind them all that makes the shards."""
    arrays = []
    for source, parts in opened:
        if not read_layout(job.out / source.name):
            executor = _slurm(job, source.name, workers=job.processes, **_tasks(source, parts, targets[source.name], job))
            executor.run()
            arrays += [executor.job_id] if executor.job_id != -1 else []
    if opened:
        _slurm(job, "shards", [Finish(job.command, Path.cwd())], tasks=1, skip_completed=False, run_on_dependency_fail=True,
               logging_dir=str((job.out / ".slurm").resolve()), depends_job_id=":".join(arrays) or None).run()


def assemble(source: Source, parts: Parts, job: Job) -> float | None:
    """Pieces -> shards and index.json. Returns None, or how many tokens of pieces it takes.

    Raises MachineError: a file needed could not be read."""
    folder, budget = job.out / source.name, job.budgets.get(source.name)
    with alone(job.out):      # no other source's shards meanwhile: copies are dropped across sources
        if layout := read_layout(folder):
            changes = [f"{key} was {was!r}, now {now!r}" for key, was, now in (
                ("tokens", layout["budget"], budget), ("split_rule", layout["facts"]["split_rule"], job.common["split_rule"]))
                if was != now]
            if changes:
                raise UserError(f"{folder} is being finished otherwise ({'; '.join(changes)}): give the same options again, or "
                                f"delete it and begin anew")
        else:
            pieces, is_exhausted = parts.prefix(job.skip_bad)
            layout, kept = lay_out(source.name, pieces, _earlier(source, job), job.val_per_10k, budget)
            if not layout["is_full"] and not is_exhausted:
                if failures := parts.failures():
                    listed = "".join(f"\n  {name}: {reason}" for name, reason in sorted(failures.items()))
                    raise MachineError(f"{source.name} is not finished: {len(failures)} of {len({f.name for f in parts.files})} "
                                       f"input files could not be read; run the same command again to try them again, or add "
                                       f"skip_bad=true to leave them out:{listed}")
                return math.inf if budget is None else _next_target(pieces, layout)
            _check_splits(source, parts, layout)
            layout = commit(folder, pieces, layout, kept, _facts(source, parts, layout, job))
        print(f"{folder}: writing {sum(layout['tokens'].values()):,} tokens", file=sys.stderr)
        write_index(folder, {**layout["facts"], "splits": write_shards(folder, layout)})
        shutil.rmtree(parts.folder)
    dropped = ", ".join(f"{count} in {name}" for name, count in layout["duplicates"].items())
    print(f"{folder}: {sum(layout['duplicates'].values())} documents dropped that came before"
          f"{f' ({dropped})' if set(layout['duplicates']) - {source.name} else ''}, {layout['empty']} empty ones"
          f"{', {} contaminated ones'.format(layout['contaminated']) if job.grams else ''}")
    print_rows(read_index(folder))
    if budget is not None and not layout["is_full"]:
        print(f"{folder}: {layout['tokens']['train']:,} training tokens are all there are, {budget:,} were asked for: a run that "
              f"needs more sees some of them again (data.max_epochs)", file=sys.stderr)
    return None


def _next_target(pieces: list[Piece], layout: dict) -> float:
    """How many tokens of pieces should hold the budget, by the share of training tokens in those there are."""
    there, train = sum(piece.tokens for piece in pieces), layout["tokens"]["train"]
    return there + SLACK * (layout["budget"] - train) * there / max(1, train) + 1


def _facts(source: Source, parts: Parts, layout: dict, job: Job) -> dict:
    """index.json without its splits."""
    read = parts.files[:layout["last_file"] + 1] if layout["is_full"] else parts.files
    names, failures = list(dict.fromkeys(file.name for file in read)), parts.failures() if job.skip_bad else {}
    return {"dtype": job.dtype(source), "source": source.name, **job.common,
            "vocab_size": job.tokenizer.vocab_size, "dataset": source.dataset,
            "revision": source.revision, "license": source.license, "selection": source.selection,
            "duplicates": layout["duplicates"], "empty": layout["empty"], "contaminated": layout["contaminated"],
            "files": [name for name in names if name not in failures],
            "skipped": [{"file": name, "reason": failures[name]} for name in names if name in failures],
            "budget": layout["budget"], "is_whole": not layout["is_full"], **({"is_masked": True} if source.is_masked else {})}


def _check_splits(source: Source, parts: Parts, layout: dict) -> None:
    total, failures = sum(layout["documents"].values()), parts.failures()
    if not total and failures:
        raise MachineError(f"{source.name} has no documents: {len(failures)} input files could not be read, {min(failures)} for "
                           f"one: {failures[min(failures)]}")
    if not total:
        dropped = [f"{count} copies of documents in {name}" for name, count in layout["duplicates"].items()]
        dropped += [f"{layout[word]} {word} ones" for word in ("empty", "contaminated") if layout[word]]
        raise UserError(f"{source.name} has no documents: {source.dataset} holds " +
                        (f"{', '.join(dropped)} alone; give other files, or another out=" if dropped else "no text"))
    for name, count in layout["documents"].items():
        if not count:
            raise UserError(f"none of the {total} documents of {source.name} fell to the {name} split: give more "
                            f"documents, or another share, such as val_share={min(0.5, max(0.01, 5 / total)):.2g}")


# ----------------------------------------------------------------------------------------------------- what is there already

def is_complete(source: Source, job: Job) -> bool:
    """Raises UserError where the folder holds something else."""
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
    print_rows(index)
    return True


def print_rows(index: Index) -> None:
    """A line for each split of one source."""
    for name, s in index.splits.items():
        print(f"  {index.source:12} {name:5} {s.documents:>9,} documents {s.text_bytes / 1e6:>9,.2f} MB "
              f"{s.tokens:>14,} tokens  {index.license}")


def _earlier(source: Source, job: Job) -> dict[str, Path]:
    """The document hashes of the other sources in the folder: no document comes twice, so none lies in both splits.

    Raises UserError where a finished source has lost them."""
    found = {}
    for folder in sorted(path for path in job.out.iterdir() if path.is_dir() and path.name != source.name):
        hashes = folder / "hashes.npy"
        if not (folder / "index.json").exists():
            if read_layout(folder):        # what an unfinished one holds is not known before
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


def _check_room(opened: list[tuple[Source, Parts]], job: Job) -> None:
    """Raises UserError where the disk cannot hold what was asked for; pieces turn into shards."""
    lacking = 0.0
    for source, parts in opened:
        if not read_layout(job.out / source.name):         # else the shards take the room that their pieces give back
            wanted = min(job.budgets.get(source.name) or math.inf, source.tokens or math.inf)
            size = 4 if job.dtype(source) == "uint32" else 2
            lacking += max(0.0, (0 if wanted == math.inf else wanted) * size - sum(
                path.stat().st_size for path in parts.folder.glob("*.bin")))
    if lacking > (free := shutil.disk_usage(job.out).free):
        raise UserError(f"{job.out} has {free / 1e9:,.3f} GB free, but what is asked for needs {lacking / 1e9:,.3f} GB more: "
                        f"free some, ask for fewer tokens=, or give another out=")
