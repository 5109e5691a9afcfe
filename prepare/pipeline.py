"""Take sources from text to shards: one task per input file, run by processes of this machine, or by datatrove as a Slurm array
or on Ray; then one process makes the shards of what the tasks left.

A task reads, drops what evaluation files hold, tokenises, and leaves a piece in out/NAME/parts/. A piece appears by rename, so
a command may be killed at any moment: finished tasks are skipped, an unfinished one begins its file again. The pieces stay
until index.json is there: where writing the shards is cut off, all of it is done again.

The pieces' tables alone decide what becomes of a document: it is left out if its text came before, in this source or in an
earlier one; its hash says to which split it belongs; the source ends with the document that fills the budget of training
tokens. So the result depends on the order of the documents alone. A document's name is the blake2b-64 of its text: among 30
million, some pair of different texts shares one, and loses one of the two, with odds of 2e-5.
"""

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cache, partial
from hashlib import blake2b, sha256
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np

from prepare.chat import ChatTemplate, Rendered
from prepare.decontaminate import found_in, read_grams
from prepare.sources import PAIR, BadFile, InputFile, Source
from runtime import shards
from runtime.cli import MachineError, UserError, grid, progress_line, si
from runtime.machine import ROOT, alone, end_with_parent, new_file, read_bytes, write_json
from runtime.shards import LOSS_MASK_BIT, Index, damage, file_sha256, read_index, remove_shards, write_index
from runtime.tokenizer import Tokenizer, clean, load_tokenizer

BORDER = b"\0"                  # between prompt and response where the two are hashed as one
TELL_S = 1.0                    # between two words of a task about its progress
TOKENS_A_BYTE = 0.4             # a guess where nobody says how many tokens a file has
SLACK = 1.002                   # more than is asked for, at first: a few documents always turn out to be copies
# A row per document of a piece: blake2b-64 of the text, tokens (end-of-text included), UTF-8 bytes, those of a prompt left
# out. A document that was left out has a row too, with no tokens: an empty one no bytes either, a contaminated one its bytes.
DOCUMENT = np.dtype([("hash", "<u8"), ("tokens", "<u4"), ("bytes", "<u4")])
HASH_STEPS = 10_000             # the share of validation documents is kept in steps of 1 / this
SORTED_AT_ONCE = 8_000_000      # documents: memory stays below 0.5 GB and 16 bytes a document
BLOCK = 1 << 24                 # bytes of a piece in memory at once
# Where a document goes, or why it is left out. COPY + 1 + i: the first is in the i-th of the earlier sources.
TRAIN, VAL, EMPTY, CONTAMINATED, COPY = range(5)
HOMES = {"train": TRAIN, "val": VAL}
COUNTS = ("documents", "text_bytes", "tokens")      # of a split


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options that all sources of a command share; prepare_data.py says what they mean."""
    out: str = "data"
    tokenizer: str = "gpt2"
    val_share: float = 0.005
    processes: int | None = None
    on: Literal["local", "slurm", "ray"] = "local"
    partition: str | None = None
    time: str = "20:00:00"
    dry_run: bool = False
    decontaminate: tuple[str, ...] = ()
    skip_bad: bool = False
    control_tokens: Literal["ids", "text"] = "ids"      # what plain text becomes where it spells one

    @property
    def workers(self) -> int:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.processes or (cores if self.on == "local" else 100)


def prepare(sources: Iterable[Source], job: Job) -> None:
    """Makes out/<source>/ for each source that is not complete yet. `sources` are looked for after the job's files were read.
    Raises UserError: bad input, or a folder that holds something else. MachineError: files that could not be read."""
    tokenizer, grams = cached_tokenizer(job.tokenizer, job.control_tokens), read_grams(job.decontaminate)
    with ExitStack() as locks:
        works = []
        for work in [Work(source, job, tokenizer, *grams) for source in sources]:
            locks.enter_context(alone(work.folder, f"another process prepares {work.folder}: wait until it ends"))
            if work.begin():
                works.append(work)
        _tell_of_control_tokens(works, tokenizer, job)
        if works and job.on == "slurm":
            locks.close()       # the jobs take them
            _submit(works, job)
            return
        for work in works:
            work.tokenise()
            while not work.assemble():      # the pieces fell short, copies dropped
                work.tokenise()


def _tell_of_control_tokens(works: list["Work"], tokenizer: Tokenizer, job: Job) -> None:
    """Say which spellings in plain text become tokens for control."""
    is_plain = any(not work.source.is_masked for work in works)
    if is_plain and tokenizer.control_tokens and job.control_tokens == "ids":
        names = textwrap.shorten(", ".join(tokenizer.control_tokens), 100, placeholder=" ...")
        print(f"{job.tokenizer}: where plain text spells one of its {len(tokenizer.control_tokens)} control tokens ({names}) "
              f"it becomes that token, as tokenizer.json does not call them special; control_tokens=text keeps it text",
              file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------------- tasks

@dataclass
class Piece:
    """What the task of an input file wrote: <stem>.bin (ids as in the shards), .docs (DOCUMENT rows) and .json (the rest), which
    tells of the progress and, once the other two are there, of the end."""
    stem: Path
    input: list | None = None   # name, bytes and stamp of the file (prepare.sources)
    documents: int = 0
    tokens: int = 0
    bytes: int = 0              # of text
    share: float = 0.0          # of the input file that was read
    end: str = ""               # "whole": read to its end; "enough": until there were tokens enough; "failed"; "": not yet
    reason: str = ""            # why it failed
    homes: np.ndarray | None = None     # uint16 (documents in use,): where each goes; None before Work._lay_out()

    def save(self) -> None:
        write_json(self.stem.with_suffix(".json"), {**vars(self), "stem": self.stem.name})

    def serves(self, tokens: float) -> bool:
        """Whether the task of the file is done, where `tokens` are wanted of it."""
        return self.end in ("whole", "failed") or (self.end == "enough" and self.tokens >= tokens)

    def table(self) -> np.ndarray:
        """DOCUMENT (documents,)"""
        return np.fromfile(f"{self.stem}.docs", DOCUMENT)


def read_piece(stem: Path) -> Piece:
    return Piece(**json.loads(read_bytes(stem.with_suffix(".json")) or "{}") | {"stem": stem})


def read_pieces(parts: Path) -> list[Piece]:
    """Of each input file, by its number; none where nothing was begun."""
    return [read_piece(parts / f"{number:05d}") for number in range(begun(parts.parent).get("files", 0))]


def begun(folder: Path) -> dict:
    """What was begun in a source's folder: what its tokens depend on, and the number of input `files`; {} where nothing was."""
    return json.loads(read_bytes(folder / "parts" / "begun.json") or "{}")


def make_piece(file: InputFile, stem: Path, tokenizer_name: str, most: float, tick: Callable[[], object] = int,
               control_tokens: str = "ids") -> None:
    """An input file to its piece, with `most` tokens or, if it ends before, fewer. `tick` is called about once a second."""
    if read_piece(stem).serves(most):
        return
    piece = Piece(stem, [file.name, file.bytes, file.stamp])
    tokenizer, grams, told = cached_tokenizer(tokenizer_name, control_tokens), _cached_grams(stem.parent), time.monotonic()
    stem.with_suffix(".json").unlink(missing_ok=True)      # a kill must not leave the old end beside new documents
    try:
        with new_file(stem.with_suffix(".bin")) as ids, new_file(stem.with_suffix(".docs")) as table:
            for read, piece.share in file.read():
                chat = None
                if isinstance(read[0], dict):
                    chat = _render(tokenizer, read[0], f"{file.name}, conversation {piece.documents + 1}")
                texts = _chat_texts(chat) if chat else [clean(text) for text in read]
                raw, row = [text.encode() for text in texts], [0, 0, 0]
                if texts[-1] and not texts[-1].isspace():
                    row = [int.from_bytes(blake2b(BORDER.join(raw), digest_size=8).digest(), "little"), 0, len(raw[-1])]
                    if not (len(grams) and found_in(grams, " ".join(texts))):
                        for part in _chat_ids(tokenizer, chat) if chat else _ids(tokenizer, texts):
                            ids.write(part)
                            row[1] += len(part)
                table.write(np.array(tuple(row), DOCUMENT))
                piece.documents += 1
                piece.tokens += row[1]
                piece.bytes += row[2]
                if piece.tokens >= most:
                    break
                if time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    piece.save()
                    tick()
        piece.share, piece.end = 1.0, "whole" if piece.tokens < most else "enough"
    except BadFile as error:
        piece = Piece(stem, piece.input, share=1.0, end="failed", reason=str(error))
    piece.save()


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Prefix and text. Of a prompt and a response, LOSS_MASK_BIT marks what is no target: all but the prefix's first token, with
    which the document before ends, and the response. The two are encoded by themselves: no token reaches over the border."""
    start = np.array(tokenizer.prefix, tokenizer.dtype)
    if len(texts) == 1:
        return [start, tokenizer.encode(texts[0])]
    ids = [tokenizer.encode_special(text) for text in texts]        # <|user|> in an instruction is that token
    start, context, response = (part.astype("<u4") for part in (start, *ids))
    return [start[:1], LOSS_MASK_BIT | start[1:], LOSS_MASK_BIT | context, response]


def _render(tokenizer: Tokenizer, row: dict, where: str) -> Rendered:
    """The conversation by the tokenizer folder's chat template, halves of UTF-16 pairs replaced.
    Raises UserError, which says `where`."""
    cleaned = json.loads(clean(json.dumps(row, ensure_ascii=False)))
    try:
        return cached_template(tokenizer.name).render(cleaned)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _chat_texts(chat: Rendered) -> list[str]:
    """A conversation as its hash has it: the whole text, and what the assistant wrote, together."""
    return [chat.text, "".join(chat.text[first:last] for first, last in chat.spans)]


def _chat_ids(tokenizer: Tokenizer, chat: Rendered) -> list[np.ndarray]:
    """The end-of-text token and the conversation's ids. LOSS_MASK_BIT marks all that the assistant did not
    write. The template alone decides on a token that begins a text."""
    ids, is_learned = tokenizer.encode_marked(chat.text, chat.spans)
    marks = np.where(is_learned, np.uint32(0), LOSS_MASK_BIT)
    return [LOSS_MASK_BIT | np.array([tokenizer.eot], "<u4"), marks | ids.astype("<u4")]


cached_tokenizer = cache(load_tokenizer)
cached_template = cache(ChatTemplate)
_cached_grams = cache(lambda parts: np.load(parts / "grams.npy"))


# ------------------------------------------------------------------------------------------------------------- executors

def run_here(tasks: list[Callable], processes: int, tick: Callable[[], None]) -> None:
    """By processes of our own rather than datatrove's pool, which waits for ever for a worker that was killed, for want of memory
    mostly, and leaves workers behind that write on when it is killed itself. `tick` is called once a second."""
    if (workers := min(processes, len(tasks))) <= 1:
        for task in tasks:
            task(tick)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker) as pool:
        try:
            left = {pool.submit(task) for task in tasks}
            while left:
                done, left = wait(left, TELL_S, FIRST_COMPLETED)
                for future in done:
                    future.result()
                tick()
        except BrokenExecutor as error:
            raise MachineError("a process was killed, mostly for want of memory: fewer processes= need less; what was prepared "
                               "stays, and the same command goes on") from error
        finally:
            for worker in multiprocessing.active_children():
                worker.kill()       # it holds nothing that is not on disk


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is the parent's to answer
    end_with_parent()


def _step(tasks: list[Callable]) -> Callable:
    """A step of datatrove's, which writes the repr of a step into the log of each task: a function's holds no list of all."""
    return lambda data, rank, world_size: tasks[rank]()


def _run_on_ray(tasks: list[Callable], workers: int, parts: Path) -> None:
    try:
        import ray
        from datatrove.executor.ray import RayPipelineExecutor
    except ImportError as error:
        raise UserError("on=ray needs the package ray: pip install ray") from error
    ray.init(ignore_reinit_error=True)
    RayPipelineExecutor([_step(tasks)], tasks=len(tasks), workers=workers, skip_completed=False,
                        logging_dir=str(parts / "ray")).run()


def _submit(works: list["Work"], job: Job) -> None:
    """An array of jobs for the tasks, and a job behind them that makes the shards. With dry_run they are printed."""
    from datatrove.executor import slurm

    if job.dry_run:
        slurm.launch_slurm_job = lambda content, *_: print(content) or "DRY_RUN"
    slurm.SlurmPipelineExecutor.launch_merge_stats = int       # no job that merges datatrove's statistics
    tasks = [task for work in works for task in work.tasks()]
    # A folder of its own: the tasks of an earlier command, which read their list there, may not have begun.
    logs = Path(job.out, ".slurm", f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}").resolve()
    here = Job(**{option.name: getattr(job, option.name) for option in fields(Job)} | {"on": "local", "processes": None})
    sources, folder = [work.source for work in works], Path.cwd()       # which the job's paths are relative to

    def finish() -> None:
        """The job behind the array, which finds all tasks done."""
        os.chdir(folder)
        prepare(sources, here)

    executor = partial(slurm.SlurmPipelineExecutor, time=job.time, partition=job.partition, qos="", mem_per_cpu_gb=4,
                       skip_completed=False,
                       env_command=f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}:$PYTHONPATH")
    array = executor([_step(tasks)], len(tasks), job_name="prepare_pieces", logging_dir=str(logs / "pieces"),
                     workers=job.workers) if tasks else None
    try:
        executor([_step([finish])], 1, job_name="prepare_shards", logging_dir=str(logs / "shards"), depends=array,
                 run_on_dependency_fail=True).run()
    except subprocess.CalledProcessError as error:      # it has said why
        raise UserError(f"sbatch refused the job (partition={job.partition} time={job.time}): correct that") from error


# ------------------------------------------------------------------------------------------------------------ one source

class Work:
    """A source on its way to out/NAME/. In `parts` lie begun.json and the pieces. gram_files, grams: by read_grams()."""

    def __init__(self, source: Source, job: Job, tokenizer: Tokenizer, gram_files: list[dict], grams: np.ndarray):
        self.source, self.job, self.tokenizer, self.grams = source, job, tokenizer, grams
        self.folder, self.val_per_10k = Path(job.out) / source.name, round(job.val_share * HASH_STEPS)
        self.parts, self.files = self.folder / "parts", []
        # Tokens of pieces to begin with, those of validation among them.
        self.target = SLACK * (source.budget or math.inf) / (1 - self.val_per_10k / HASH_STEPS)
        rule = f"val where int.from_bytes(blake2b(text, digest_size=8).digest(), 'little') % {HASH_STEPS} < {self.val_per_10k}"
        # What the shards depend on, as index.json and begun.json say it: JSON has no tuples.
        self.identity = json.loads(json.dumps({
            "tokenizer": tokenizer.kind, "tokenizer_sha256": tokenizer.sha256, "split_rule": f"{rule}, else train",
            "decontaminated_against": gram_files, "dataset": source.dataset, "revision": source.revision,
            "selection": self._selection()}))

    def _selection(self) -> dict:
        """What is taken of each row, and by which rules it becomes ids where they are not the usual ones."""
        selection = self.source.selection
        if self.source.is_masked and self.job.control_tokens == "text":
            raise UserError("control_tokens=text is for plain text: in instructions each spelled token is that token")
        if self.source.is_chat and self.tokenizer.kind != "folder":
            raise UserError(f"rows of messages need a tokenizer with a chat template, which {self.tokenizer.name} has not: "
                            f"give tokenizer=FOLDER")
        if self.source.is_masked:
            selection = selection | {"special_tokens": "parsed"}
        if self.source.is_chat:
            selection = selection | {"chat_template_sha256": cached_template(self.tokenizer.name).sha256}
        if self.job.control_tokens == "text":
            selection = selection | {"control_tokens": "text"}
        return selection

    def begin(self) -> bool:
        """Whether it is still to be made; then failed input files are tried again, and changed ones. Raises UserError where the
        folder holds something else."""
        index = read_index(self.folder) if (self.folder / "index.json").exists() else None
        pieces, there = read_pieces(self.parts), vars(index) if index else begun(self.folder)
        if self.tokenizer.goes_by(there.get("tokenizer_sha256")):      # maybe by the hash of an older version
            there = there | {"tokenizer_sha256": self.tokenizer.sha256}
        if index and self.source.is_masked and there.get("selection") == {"instruct": list(PAIR)}:
            # It was made when special tokens in instructions stayed text; nothing is added to it.
            there = there | {"selection": self.identity["selection"]}
        if self.source.may_age or not index:        # of pieces, the stamps of their files tell
            there = there | {"revision": self.source.revision}
        if index or any(piece.end in ("whole", "enough") for piece in pieces):
            for key, value in self.identity.items():
                if there.get(key) != value:
                    raise UserError(f"{self.folder} is of {key}={there.get(key)!r}, not {value!r}: give the same options and "
                                    f"files again, delete it, or give another out=")
        if index:
            if not index.is_whole and index.splits["train"].tokens < (self.source.budget or math.inf):
                raise UserError(f"{self.folder} holds {index.splits['train'].tokens:,} training tokens, fewer than are asked "
                                f"for: delete it, or give another out=")
            shutil.rmtree(self.parts, ignore_errors=True)       # of a run that was killed between its index and its end
            print(f"{self.folder} is complete")
            show(self.folder)
            return False
        self.files = self.source.list_files()
        self.parts.mkdir(parents=True, exist_ok=True)
        write_json(self.parts / "begun.json", {**self.identity, "files": len(self.files)})
        for file, piece in zip(self.files, read_pieces(self.parts), strict=True):
            if piece.end in ("", "failed") or piece.input != [file.name, file.bytes, file.stamp]:
                if piece.end:
                    print(f"{self.parts}: {file.name} changed or could not be read: it is read again", file=sys.stderr)
                piece.stem.with_suffix(".json").unlink(missing_ok=True)
        return True

    def tasks(self) -> list[Callable]:
        """Those that lack of the first input files that hold `target` tokens, which is known of the finished ones, and guessed by
        their mean, by the source's size or by the file's."""
        pieces, found, held = read_pieces(self.parts), [], 0.0
        whole = [piece.tokens for piece in pieces if piece.end == "whole"]
        mean = sum(whole) / len(whole) if whole else self.source.tokens and self.source.tokens / len(self.files)
        tokenizer = self.tokenizer.name if self.tokenizer.kind != "folder" else str(Path(self.tokenizer.name).resolve())
        np.save(self.parts / "grams.npy", self.grams)
        for file, piece in zip(self.files, pieces, strict=True):
            if held >= self.target:
                break
            if piece.serves(self.target):
                held += piece.tokens
            else:
                found.append(partial(make_piece, file, piece.stem.resolve(), tokenizer, self.target,
                                     control_tokens=self.job.control_tokens))
                held += mean if mean is not None else TOKENS_A_BYTE * (file.bytes or 0)
        return found

    def tokenise(self) -> None:
        """Runs the tasks."""
        began, sizes = time.monotonic(), [file.bytes or 1 for file in self.files]
        first = sum(piece.bytes for piece in read_pieces(self.parts))

        def state() -> tuple:
            pieces = read_pieces(self.parts)
            documents, tokens, size = np.sum([(piece.documents, piece.tokens, piece.bytes) for piece in pieces], 0).tolist()
            share = float(np.average([piece.share for piece in pieces], weights=sizes))
            rate = (size - first) / (time.monotonic() - began) / 1e6
            return tokens, max(share, min(1.0, tokens / self.target)), f"{si(documents)} documents", f"{rate:.1f} MB/s"
        if self.job.on == "ray" and (tasks := self.tasks()):
            _run_on_ray(tasks, self.job.workers, self.parts.resolve())
        with progress_line(self.source.name, "tokens", state) as show:      # what ended on Ray with an error tells why here
            run_here(self.tasks(), self.job.workers, show)

    def assemble(self) -> bool:
        """Pieces -> shards and index.json. Returns False where the pieces are too few: `target` says how many tokens it takes.
        Raises MachineError: a file needed could not be read."""
        source, budget, name = self.source, self.source.budget, self.source.name
        with alone(self.folder.parent):      # no other source's shards meanwhile: copies are dropped across sources
            every = read_pieces(self.parts)
            failed = [piece for piece in every if piece.end == "failed"]
            found = [piece for piece in every if piece.end != "failed" or not self.job.skip_bad]
            # Those before the first that lacks, and one that was stopped early, behind which nothing is of use.
            end = next((i for i, piece in enumerate(found) if piece.end != "whole"), len(found))
            pieces = found[:end] + [piece for piece in found[end:end + 1] if piece.end == "enough"]
            splits, layout = self._lay_out(pieces)
            pieces, train = [piece for piece in pieces if piece.homes is not None], splits["train"]["tokens"]
            if layout["is_whole"] and end < len(found):
                if failed:
                    listed = "".join(f"\n  {piece.input[0]}: {piece.reason}" for piece in failed)
                    raise MachineError(f"{name} is not finished: {len(failed)} of {len(self.files)} input files could not be "
                                       f"read; run the command again, or add skip_bad=true to leave them out:{listed}")
                there = sum(piece.tokens for piece in pieces)
                self.target = there + SLACK * (budget - train) * there / max(1, train) + 1 if budget else math.inf
                return False
            if empty := [split for split, counts in splits.items() if not counts["documents"]]:
                raise UserError(f"{name} has no documents for {' and '.join(empty)}; left out are copies "
                                f"{layout['duplicates'] or 0}, empty {layout['empty']}, contaminated {layout['contaminated']}, "
                                f"files {[piece.reason for piece in failed]}: give more documents, or another val_share=")
            print(f"{self.folder}: writing {sum(split['tokens'] for split in splits.values()):,} tokens", file=sys.stderr)
            dtype = np.dtype("<u4" if source.is_masked else self.tokenizer.dtype).name      # a context's mark lies beside the id
            write_index(self.folder, {
                "dtype": dtype, "source": name, **self.identity, "vocab_size": self.tokenizer.vocab_size,
                "license": source.license, **layout, "files": [piece.input[0] for piece in pieces],
                "skipped": [{"file": piece.input[0], "reason": piece.reason} for piece in failed
                            if layout["is_whole"] or piece.stem < pieces[-1].stem],
                "budget": budget, **({"is_masked": True} if source.is_masked else {}),
                **write_shards(self.folder, pieces, splits, dtype)})
            shutil.rmtree(self.parts)
        show(self.folder)
        if budget and layout["is_whole"]:
            print(f"{self.folder}: {train:,} training tokens are all there are, {budget:,} were asked for: a run that needs more "
                  f"sees some of them again (data.max_epochs)", file=sys.stderr)
        return True

    def _lay_out(self, pieces: list[Piece]) -> tuple[dict, dict]:
        """Sets the `homes` of the pieces, which stand in the source's order, up to the one that reaches the budget.

        Returns the splits, {split: {documents, text_bytes, tokens}}, and what else index.json says of them: duplicates {source of
        the first copy: documents}, empty, contaminated, is_whole, False where the budget was reached. Raises UserError where a
        finished source has lost its hashes."""
        earlier = {}        # sorted hashes of the finished sources in the folder: no document comes twice, so none in both splits
        for folder in sorted(path.parent for path in self.folder.parent.glob("*/index.json")):
            index, hashes = read_index(folder), folder / "hashes.npy"
            if self.tokenizer.goes_by(index.tokenizer_sha256):        # the same text by another is no copy
                if not hashes.exists() or file_sha256(hashes) != index.hashes_sha256:
                    raise UserError(f"{hashes} is not what was written: restore it, or delete {folder}")
                earlier[folder.name] = np.load(hashes, mmap_mode="r")
        totals, is_whole = np.zeros((3, COPY + 1 + len(earlier))), True     # COUNTS by home
        for piece, home in zip(pieces, _find_copies(pieces, list(earlier.values())), strict=True):
            table = piece.table()
            home[(home == TRAIN) & (table["hash"] % np.uint64(HASH_STEPS) < self.val_per_10k)] = VAL
            home[table["tokens"] == 0] = CONTAMINATED
            home[(table["tokens"] == 0) & (table["bytes"] == 0)] = EMPTY
            if self.source.budget is not None:
                train = np.cumsum(np.where(home == TRAIN, table["tokens"], 0), dtype=np.int64)
                end = int(np.searchsorted(train, self.source.budget - totals[2, TRAIN])) + 1   # with the one that reaches it
                is_whole = end > len(table)
                table, home = table[:end], home[:end]
            totals += [np.bincount(home, weights, totals.shape[1]) for weights in (None, table["bytes"], table["tokens"])]
            piece.homes = home
            if not is_whole:
                break
        splits = {split: dict(zip(COUNTS, map(int, totals[:, home]), strict=True)) for split, home in HOMES.items()}
        empty, contaminated, *copies = map(int, totals[0, EMPTY:])
        duplicates = {key: n for key, n in zip([self.source.name, *earlier], copies, strict=True) if n}
        return splits, {"duplicates": duplicates, "empty": empty, "contaminated": contaminated, "is_whole": is_whole}


def _find_copies(pieces: list[Piece], earlier: list[np.ndarray]) -> list[np.ndarray]:
    """uint16 (documents,) of each piece: TRAIN for a first document, COPY or more for others. By ranges of hashes, of which each
    holds about SORTED_AT_ONCE."""
    hashes = np.concatenate([np.empty(0, np.uint64), *(piece.table()["hash"].copy() for piece in pieces)])
    homes, count = np.full(len(hashes), TRAIN, np.uint16), -(-len(hashes) // SORTED_AT_ONCE)
    for i in range(count):
        low, high = np.uint64(2**64 * i // count), np.uint64(2**64 * (i + 1) // count - 1)
        places = np.flatnonzero((hashes >= low) & (hashes <= high))
        places = places[np.argsort(hashes[places], kind="stable")]       # of equal ones the first document stays first
        some = hashes[places]
        homes[places[1:][some[1:] == some[:-1]]] = COPY
        for number, those in enumerate(earlier, COPY + 1):      # no two of them share a document
            # Not by np.isin, which sorts both: 3 GB where an earlier source has 100M documents.
            there = np.array(those[np.searchsorted(those, low):np.searchsorted(those, high, "right")])
            if len(there):
                homes[places[there[np.minimum(np.searchsorted(there, some), len(there) - 1)] == some]] = number
    return np.split(homes, np.cumsum([piece.documents for piece in pieces]))[:-1]


def write_shards(folder: Path, pieces: list[Piece], splits: dict, dtype: str) -> dict:
    """Write hashes.npy and the shards, in place of what was there; returns `splits` and `hashes_sha256` of index.json."""
    remove_shards(folder)
    hashes = np.concatenate([piece.table()["hash"][:len(piece.homes)][piece.homes <= VAL] for piece in pieces])
    hashes.sort()
    with new_file(folder / "hashes.npy") as file:    # not by np.save, which on a full disk leaves a short file without a word
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(hashes))
        file.write(hashes)
    size, made = np.dtype(dtype).itemsize, {}
    for split, counts in splits.items():
        found = []
        for number, blocks in groupby(_blocks(pieces, HOMES[split], size * shards.SHARD_TOKENS, size), itemgetter(0)):
            path, digest = folder / f"{split}_{number:05d}.bin", sha256()
            with new_file(path) as file:
                for _, data in blocks:
                    file.write(data)
                    digest.update(data)
                found.append({"file": path.name, "tokens": file.tell() // size, "sha256": digest.hexdigest()})
        made[split] = {**counts, "shards": found}
    return {"hashes_sha256": file_sha256(folder / "hashes.npy"), "splits": made}


def _blocks(pieces: list[Piece], home: int, shard_bytes: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Shard's number and tokens, each of `size` bytes, of the documents of that home, BLOCK bytes at most at a time."""
    at = 0      # bytes so far
    for piece in pieces:
        borders = np.append(0, np.cumsum(piece.table()["tokens"], dtype=np.int64)) * size       # of the documents in the piece
        runs = borders[np.flatnonzero(np.diff(piece.homes == home, prepend=False, append=False))].reshape(-1, 2)   # neighbours
        with open(f"{piece.stem}.bin", "rb") as file:
            for first, last in runs.tolist():
                file.seek(first)
                while left := last - file.tell():
                    if not (data := file.read(min(BLOCK, left, shard_bytes - at % shard_bytes))):
                        raise OSError(f"{piece.stem}.bin is shorter than what was written: delete its folder")
                    yield at // shard_bytes, data
                    at += len(data)


# ----------------------------------------------------------------------------------------------------- what a folder holds

def show(folder: Path) -> None:
    """Print a table of the sources' splits, then what else there is to say of each source, finished or not."""
    rows, told = [["source", "split", "documents", "tokens", "bytes/token", "GB on disk"]], []
    for path in _sources(folder):
        name = path.resolve().name
        try:
            if (path / "index.json").exists():
                index = read_index(path)
                rows += [[name, split, f"{s.documents:,}", f"{s.tokens:,}", f"{s.text_bytes / s.tokens:.2f}",
                          f"{s.tokens * np.dtype(index.dtype).itemsize / 1e9:.3f}"] for split, s in index.splits.items()]
                lines = [*_story(index)]
            else:
                pieces = read_pieces(path / "parts")
                count = sum(piece.end in ("whole", "enough") for piece in pieces)
                lines = [f"unfinished: {sum(piece.tokens for piece in pieces):,} tokens so far; of {len(pieces):,} input files "
                         f"{count} are read; the same command goes on with it",
                         *(f"failed: {piece.input[0]} ({piece.reason})" for piece in pieces if piece.reason)]
        except UserError as error:
            lines = [f"damaged: {error}"]
        told += [f"{name}: {line}" for line in lines]
    print(grid(rows), *told, sep="\n")


def verify(folders: list[Path]) -> None:
    """Hashes every shard again and prints a line per source. Raises UserError naming all that differ or are unfinished."""
    bad = []
    for source in [source for folder in folders for source in _sources(folder)]:
        is_finished = (source / "index.json").exists()
        found = list(damage(source)) if is_finished else [f"{source} is unfinished: the same command goes on with it"]
        print(f"{'BAD' if found else 'OK '} {source}", flush=True)
        bad += found
    if bad:
        raise UserError("\n".join(bad))


def _sources(folder: Path) -> list[Path]:
    """The folders of the sources there, finished or not."""
    finished, unfinished = folder.rglob("index.json"), folder.rglob("parts/begun.json")
    if not (found := {path.parent for path in finished} | {path.parents[1] for path in unfinished}):
        raise UserError(f"there is no prepared source in {folder}: `python prepare_data.py` says how to make one")
    return sorted(found)


def _story(index: Index) -> Iterator[str]:
    """What the index tells beside its splits."""
    yield textwrap.shorten(f"from {index.dataset} @ {index.revision}, {index.license}", 300, placeholder=" ...")
    yield f"tokenizer {index.tokenizer} (sha256 {index.tokenizer_sha256[:9]}..., {index.vocab_size:,} ids)"
    if index.is_masked:
        if "messages" in index.selection.get("instruct", ()):
            yield "targets are what the assistant wrote; all else is context, and bytes are those of the assistant"
        else:
            yield "targets are the responses and the ends of documents; prompts are context, and bytes are those of responses"
        if "special_tokens" not in index.selection:
            yield "special tokens that its rows spell are text, as they were before: prepare it anew for tokens"
    if "control_tokens" in index.selection:
        yield "control tokens that its text spells are text"
    sources = ", ".join(f"{source} {count:,}" for source, count in index.duplicates.items())
    yield (f"dropped: copies {sum(index.duplicates.values()):,}" + (f" (first met in {sources})" if sources else "") +
           f", empty {index.empty:,}, contaminated {index.contaminated:,}")
    yield f"read: {len(index.files):,} input files {'to the end' if index.is_whole else f'for {index.budget:,} tokens'}"
    yield from (f"skipped: {entry['file']} ({entry['reason']})" for entry in index.skipped)
