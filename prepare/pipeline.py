"""Take sources from text to shards: one task per input file, run by processes of this machine, or
by datatrove as a Slurm array or on Ray; then one process makes the shards of what the tasks left.

A task reads, drops what evaluation files hold, tokenises, and leaves a piece in out/NAME/parts/. A
piece appears by rename, so a command may be killed at any moment: finished tasks are skipped, an
unfinished one begins its file again. The pieces stay until index.json is there: where writing the
shards is cut off, all of it is done again.

The pieces' tables alone decide what becomes of a document: it is left out if its text came before,
in this source or in an earlier one; its hash says to which split it belongs; the source ends with
the document that fills the budget of training tokens. So the result depends on the order of the
documents alone. A document's name is the blake2b-64 of its text: among 30 million, some pair of
different texts shares one, and loses one of the two, with odds of 2e-5."""

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from array import array
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

from lib.errors import MachineError, UserError
from lib.files import alone, new_file, read_bytes, write_json
from lib.machine import ROOT, end_with_parent
from lib.progress import progress_line
from lib.text import grid, si
from lib.values import FilePath
from prepare.chat import ChatTemplate, OddConversation, Rendered
from prepare.decontaminate import found_in, read_grams
from prepare.sources import (
    ENCODING_REMEDY,
    PAIR,
    TXT_CHARS,
    BadFile,
    InputFile,
    Reading,
    Row,
    Source,
    is_text_file,
)
from runtime import shards
from runtime.shards import (
    LOSS_MASK_BIT,
    Index,
    damage,
    file_sha256,
    read_index,
    remove_shards,
    write_index,
)
from runtime.tokenizer import END_OF_TEXT, Tokenizer, clean, load_tokenizer

BORDER = b"\0"  # between prompt and response where the two are hashed as one
TELL_S = 1.0  # between two words of a task about its progress
TOKENS_A_BYTE = 0.4  # a guess where nobody says how many tokens a file has
SLACK = 1.002  # more than is asked for, at first: a few documents always turn out to be copies
# A row per document of a piece: blake2b-64 of the text, tokens (end-of-text included), UTF-8 bytes,
# those of a prompt left out. A document that was left out has a row too, with no tokens: an empty
# one no bytes either, a contaminated one its bytes.
DOCUMENT = np.dtype([("hash", "<u8"), ("tokens", "<u4"), ("bytes", "<u4")])
HASH_STEPS = 10_000  # the share of validation documents is kept in steps of 1 / this
SORTED_AT_ONCE = 8_000_000  # documents: memory stays below 0.5 GB and 16 bytes a document
BLOCK = 1 << 24  # bytes of a piece in memory at once
# Where a document goes, or why it is left out. COPY + 1 + i: the first is in the i-th of the
# earlier sources.
TRAIN, VAL, EMPTY, CONTAMINATED, COPY = range(5)
HOMES = {"train": TRAIN, "val": VAL}
COUNTS = ("documents", "text_bytes", "tokens")  # of a split
# pieces of text files by an earlier one know no borders, and split each piece by itself
READER = 2
VAL_PERCENTS = (1, 2, 5, 10, 20, 50)  # of which a message proposes one
VAL_DOCUMENTS = 5  # that a proposed share should keep
NO_DOCUMENT = 0  # in place of the hash of an empty row
# share of a file's characters that may stand for bytes that are not UTF-8
REPLACED_MOST = 0.01


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options that all sources of a command share; prepare_data.py says what they mean."""

    out: FilePath = "data"
    tokenizer: FilePath = "gpt2"
    val_share: float = 0.005
    processes: int | None = None
    on: Literal["local", "slurm", "ray"] = "local"
    partition: str | None = None
    time: str = "20:00:00"
    dry_run: bool = False
    decontaminate: tuple[FilePath, ...] = ()
    skip_bad: bool = False
    control_tokens: Literal["ids", "text"] = "ids"  # what plain text becomes where it spells one

    @property
    def workers(self) -> int:
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        return self.processes or (cores if self.on == "local" else 100)


def prepare(sources: Iterable[Source], job: Job) -> None:
    """Makes out/<source>/ for each source that is not complete yet. `sources` are looked for after
    the job's files were read. Raises UserError: bad input, or a folder that holds something else.
    MachineError: files that could not be read."""
    tokenizer, grams = (
        cached_tokenizer(job.tokenizer, job.control_tokens),
        read_grams(job.decontaminate),
    )
    with ExitStack() as locks:
        works = []
        for work in [Work(source, job, tokenizer, *grams) for source in sources]:
            locks.enter_context(
                alone(work.folder, f"another process prepares {work.folder}: wait until it ends")
            )
            if work.begin():
                works.append(work)
        _tell_of_control_tokens(works, tokenizer, job)
        if works and job.on == "slurm":
            locks.close()  # the jobs take them
            _submit(works, job)
            return
        for work in works:
            work.tokenise()
            while not work.assemble():  # the pieces fell short, copies dropped
                work.tokenise()


def _tell_of_control_tokens(works: list["Work"], tokenizer: Tokenizer, job: Job) -> None:
    """Say which spellings in plain text become tokens for control."""
    is_plain = any(not work.source.is_masked for work in works)
    if is_plain and tokenizer.control_tokens and job.control_tokens == "ids":
        names = textwrap.shorten(", ".join(tokenizer.control_tokens), 100, placeholder=" ...")
        print(
            f"{job.tokenizer}: where plain text spells one of its"
            f" {len(tokenizer.control_tokens)} control tokens ({names}) it becomes that token, as"
            " tokenizer.json does not call them special; control_tokens=text keeps it text",
            file=sys.stderr,
        )


# ------------------------------------------------------------------------------------------- tasks


@dataclass
class Piece:
    """What the task of an input file wrote: <stem>.bin (ids as in the shards), .docs (DOCUMENT
    rows), .cuts where documents were cut (int64: the rows that go on with the document of the
    row before) and .json (the rest), which tells of the progress and, once the others are there,
    of the end."""

    stem: Path
    input: list | None = None  # name, bytes and stamp of the file (prepare.sources)
    documents: int = 0
    tokens: int = 0
    bytes: int = 0  # of text
    share: float = 0.0  # of the input file that was read
    # "whole": read to its end; "enough": until there were tokens enough; "failed"; "": not yet
    end: str = ""
    reason: str = ""  # why it failed
    reader: int = 1  # READER of the code that wrote it
    inner_borders: int = 0  # lines of a .txt that hold an end-of-text token within other text
    replaced: int = 0  # characters, U+FFFD in place of bytes that are not UTF-8
    joined_lists: int = 0  # texts that were lists of strings
    odd_rows: int = 0  # left out by skip_bad=true
    first_odd_row: str = ""  # where it is and why
    # uint16 (documents in use,): where each goes; None before Work._lay_out()
    homes: np.ndarray | None = None

    def save(self) -> None:
        write_json(self.stem.with_suffix(".json"), {**vars(self), "stem": self.stem.name})

    def serves(self, tokens: float) -> bool:
        """Whether the task of the file is done, where `tokens` are wanted of it."""
        return self.end in ("whole", "failed") or (self.end == "enough" and self.tokens >= tokens)

    def table(self) -> np.ndarray:
        """DOCUMENT (documents,)"""
        return np.fromfile(f"{self.stem}.docs", DOCUMENT)

    @property
    def has_cuts(self) -> bool:
        return self.stem.with_suffix(".cuts").exists()

    def document_of_rows(self) -> np.ndarray:
        """int64 (documents,): for each row of the table the first row of its document, which is
        itself where it was not cut."""
        first = np.arange(self.documents)
        if self.has_cuts:
            first[np.fromfile(self.stem.with_suffix(".cuts"), np.int64)] = 0
        return np.maximum.accumulate(first)

    def split_residues(self, is_by_document: bool) -> np.ndarray:
        """uint64: what val_share is compared with, of each document that goes to a split, or of
        each of its pieces."""
        table, rows = self.table(), np.flatnonzero(self.homes <= VAL)
        if is_by_document:
            rows = np.unique(self.document_of_rows()[rows])
        return table["hash"][rows] % np.uint64(HASH_STEPS)


def _named_reason(piece: Piece) -> str:
    """Why a file could not be read, with its name once."""
    name = piece.input[0]
    is_named = name in re.split(r"[ :,]", piece.reason, maxsplit=1)[0]
    return piece.reason if is_named else f"{name}: {piece.reason}"


def read_piece(stem: Path) -> Piece:
    return Piece(**json.loads(read_bytes(stem.with_suffix(".json")) or "{}") | {"stem": stem})


def read_pieces(parts: Path) -> list[Piece]:
    """Of each input file, by its number; none where nothing was begun."""
    return [
        read_piece(parts / f"{number:05d}") for number in range(begun(parts.parent).get("files", 0))
    ]


def begun(folder: Path) -> dict:
    """What was begun in a source's folder: what its tokens depend on, and the number of input
    `files`; {} where nothing was."""
    return json.loads(read_bytes(folder / "parts" / "begun.json") or "{}")


def make_piece(
    file: InputFile,
    stem: Path,
    tokenizer_name: str,
    most: float,
    tick: Callable[[], object] = int,
    *,
    skip_bad: bool = False,
    control_tokens: str = "ids",
) -> None:
    """An input file to its piece, with `most` tokens or, if it ends before, fewer. `tick` is
    called about once a second. Raises UserError: a column or a row that cannot be used."""
    if read_piece(stem).serves(most):
        return
    piece = Piece(stem, [file.name, file.bytes, file.stamp], reader=READER)
    tokenizer = cached_tokenizer(tokenizer_name, control_tokens)
    reading = Reading(borders=_borders(tokenizer), skips_odd_rows=skip_bad)
    encoder = Encoder(tokenizer, _cached_grams(stem.parent), reading)
    # a kill must not leave the old end beside new documents
    stem.with_suffix(".json").unlink(missing_ok=True)
    if piece.has_cuts:  # those of an earlier reading
        stem.with_suffix(".cuts").unlink()
    try:
        _write_documents(piece, file.read(reading), encoder, most, tick)
        _check_encoding(file.name, reading)
        piece.inner_borders = reading.inner_borders
        piece.replaced = reading.replaced
        piece.joined_lists = reading.joined_lists
        piece.odd_rows = reading.odd_rows
        piece.first_odd_row = reading.first_odd_row
        piece.share = 1.0
        piece.end = "whole" if piece.tokens < most else "enough"
    except BadFile as error:
        piece = Piece(stem, piece.input, share=1.0, end="failed", reason=str(error))
    piece.save()


def _write_documents(
    piece: Piece,
    rows: Iterator[Row],
    encoder: "Encoder",
    most: float,
    tick: Callable[[], object],
) -> None:
    """Write the piece's ids, table and cuts, until it has `most` tokens; counts them in `piece`."""
    cuts = array("q")  # rows that continue a document
    has_begun = False  # whether the document of the row before has a row with text
    last_tick = time.monotonic()
    with (
        new_file(piece.stem.with_suffix(".bin")) as ids,
        new_file(piece.stem.with_suffix(".docs")) as table,
    ):
        for row in rows:
            piece.share = row.share
            document = encoder.encode(row)
            if document is None:
                continue
            for part in document.ids:
                ids.write(part)
            tokens = sum(map(len, document.ids))
            table.write(np.array((document.hash, tokens, document.bytes), DOCUMENT))
            is_continuation = row.is_continued and has_begun
            if is_continuation:
                cuts.append(piece.documents)
            has_begun = is_continuation or document.bytes > 0
            piece.documents += 1
            piece.tokens += tokens
            piece.bytes += document.bytes
            if piece.tokens >= most:
                break
            if time.monotonic() - last_tick > TELL_S:
                last_tick = time.monotonic()
                piece.save()
                tick()
    if cuts:
        with new_file(piece.stem.with_suffix(".cuts")) as file:
            file.write(cuts.tobytes())


@dataclass(frozen=True)
class Document:
    """A row of an input file as its piece holds it."""

    hash: int  # of the text; NO_DOCUMENT where there is none
    bytes: int  # of its UTF-8, those of a prompt left out
    ids: list[np.ndarray]  # its tokens, in parts; none where it is empty or contaminated


@dataclass(frozen=True)
class Encoder:
    """Turns rows into documents."""

    tokenizer: Tokenizer
    grams: np.ndarray  # of the evaluation files, by read_grams()
    reading: Reading  # of the file; counts what cannot be used

    def encode(self, row: Row) -> Document | None:
        """None for a conversation that cannot be used, where odd rows are skipped. Raises
        UserError and BadFile."""
        chat = None
        texts = [clean(text) for text in row.texts]
        if row.conversation is not None:
            chat = _render(self.tokenizer, row, self.reading)
            if chat is None:
                return None
            texts = _chat_texts(chat)
        raw = [text.encode() for text in texts]
        name = document_hash(texts, raw)
        if name is None:
            return Document(NO_DOCUMENT, 0, [])
        if len(self.grams) and found_in(self.grams, " ".join(texts)):
            return Document(name, len(raw[-1]), [])
        ids = _chat_ids(self.tokenizer, chat) if chat else _ids(self.tokenizer, texts)
        return Document(name, len(raw[-1]), ids)


def document_hash(texts: list[str], raw: list[bytes]) -> int | None:
    """The name of a document, which is its text, or a prompt and a response: blake2b-64 of their
    UTF-8 bytes, `raw`; None where there is no text to be learned."""
    if not texts[-1] or texts[-1].isspace():
        return None
    return int.from_bytes(blake2b(BORDER.join(raw), digest_size=8).digest(), "little")


def _borders(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The lines that end a document in a text file: how the tokenizer spells its end of text,
    and how GPT-2 does."""
    spelled = tokenizer.decode([tokenizer.eot]).strip()
    return tuple(dict.fromkeys(filter(None, [spelled, END_OF_TEXT])))


def _check_encoding(name: str, reading: Reading) -> None:
    """Raises BadFile where the texts that were read are not UTF-8."""
    if reading.replaced > REPLACED_MOST * reading.characters:
        raise BadFile(
            f"{name} is not UTF-8: {reading.replaced:,} of the {reading.characters:,} characters "
            "that were read "
            f"stand for bytes of another encoding: {ENCODING_REMEDY}"
        )


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Prefix and text. Of a prompt and a response, LOSS_MASK_BIT marks what is no target: all but
    the prefix's first token, with which the document before ends, and the response. The two are
    encoded by themselves: no token reaches over the border."""
    start = np.array(tokenizer.prefix, tokenizer.dtype)
    if len(texts) == 1:
        return [start, tokenizer.encode(texts[0])]
    # <|user|> in an instruction is that token
    ids = [tokenizer.encode_special(text) for text in texts]
    first = 0 if len(ids[0]) else 1
    if len(start) > 1 and ids[first][:1].tolist() == [tokenizer.start]:
        ids[first] = ids[first][1:]  # apply_chat_template() wrote the token that begins a text
    start, context, response = (part.astype("<u4") for part in (start, *ids))
    return [start[:1], LOSS_MASK_BIT | start[1:], LOSS_MASK_BIT | context, response]


def _render(tokenizer: Tokenizer, row: Row, reading: Reading) -> Rendered | None:
    """The conversation by the tokenizer folder's chat template, halves of UTF-16 pairs replaced;
    None where it cannot be used and odd rows are skipped. Raises UserError and BadFile."""
    template = cached_template(tokenizer.name)
    cleaned = json.loads(clean(json.dumps(row.conversation, ensure_ascii=False)))
    try:
        rendered = template.render(cleaned)
    except OddConversation as error:
        reading.rows -= 1
        reading.skip_or_refuse(row.place, f": {error.problem}", error.remedy)
        return None
    reading.joined_lists += rendered.joined_parts
    return rendered


def _chat_texts(chat: Rendered) -> list[str]:
    """A conversation as its hash has it: the whole text, and what the assistant wrote, together."""
    return [chat.text, "".join(chat.text[first:last] for first, last in chat.spans)]


def _chat_ids(tokenizer: Tokenizer, chat: Rendered) -> list[np.ndarray]:
    """The end-of-text token and the conversation's ids. LOSS_MASK_BIT marks all that the assistant
    did not write. The template alone decides on a token that begins a text."""
    ids, is_learned = tokenizer.encode_marked(chat.text, chat.spans)
    marks = np.where(is_learned, np.uint32(0), LOSS_MASK_BIT)
    return [LOSS_MASK_BIT | np.array([tokenizer.eot], "<u4"), marks | ids.astype("<u4")]


cached_tokenizer = cache(load_tokenizer)
cached_template = cache(ChatTemplate)
_cached_grams = cache(lambda parts: np.load(parts / "grams.npy"))


# --------------------------------------------------------------------------------------- executors


def run_here(tasks: list[Callable], processes: int, tick: Callable[[], None]) -> None:
    """By processes of our own rather than datatrove's pool, which waits for ever for a worker that
    was killed, for want of memory mostly, and leaves workers behind that write on when it is killed
    itself. `tick` is called once a second."""
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
            raise MachineError(
                "a process was killed, mostly for want of memory: fewer processes= need less; what"
                " was prepared stays, and the same command goes on"
            ) from error
        finally:
            for worker in multiprocessing.active_children():
                worker.kill()  # it holds nothing that is not on disk


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    end_with_parent()


def _step(tasks: list[Callable]) -> Callable:
    """A step of datatrove's, which writes the repr of a step into the log of each task: a
    function's holds no list of all."""
    return lambda data, rank, world_size: tasks[rank]()


def _run_on_ray(tasks: list[Callable], workers: int, parts: Path) -> None:
    try:
        import ray
        from datatrove.executor.ray import RayPipelineExecutor
    except ImportError as error:
        raise UserError("on=ray needs the package ray: pip install ray") from error
    ray.init(ignore_reinit_error=True)
    RayPipelineExecutor(
        [_step(tasks)],
        tasks=len(tasks),
        workers=workers,
        skip_completed=False,
        logging_dir=str(parts / "ray"),
    ).run()


def _submit(works: list["Work"], job: Job) -> None:
    """An array of jobs for the tasks, and a job behind them that makes the shards. With dry_run
    they are printed."""
    from datatrove.executor import slurm

    if job.dry_run:
        slurm.launch_slurm_job = lambda content, *_: print(content) or "DRY_RUN"
    # no job that merges datatrove's statistics
    slurm.SlurmPipelineExecutor.launch_merge_stats = int
    tasks = [task for work in works for task in work.tasks()]
    # A folder of its own: the tasks of an earlier command, which read their list there, may not
    # have begun.
    logs = Path(job.out, ".slurm", f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}").resolve()
    here = Job(
        **{option.name: getattr(job, option.name) for option in fields(Job)}
        | {"on": "local", "processes": None}
    )
    # which the job's paths are relative to
    sources, folder = [work.source for work in works], Path.cwd()

    def finish() -> None:
        """The job behind the array, which finds all tasks done."""
        os.chdir(folder)
        prepare(sources, here)

    executor = partial(
        slurm.SlurmPipelineExecutor,
        time=job.time,
        partition=job.partition,
        qos="",
        mem_per_cpu_gb=4,
        skip_completed=False,
        env_command=(
            f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}:$PYTHONPATH"
        ),
    )
    array = (
        executor(
            [_step(tasks)],
            len(tasks),
            job_name="prepare_pieces",
            logging_dir=str(logs / "pieces"),
            workers=job.workers,
        )
        if tasks
        else None
    )
    try:
        executor(
            [_step([finish])],
            1,
            job_name="prepare_shards",
            logging_dir=str(logs / "shards"),
            depends=array,
            run_on_dependency_fail=True,
        ).run()
    except subprocess.CalledProcessError as error:  # it has said why
        raise UserError(
            f"sbatch refused the job (partition={job.partition} time={job.time}): correct that"
        ) from error


# -------------------------------------------------------------------------------------- one source


class Work:
    """A source on its way to out/NAME/. In `parts` lie begun.json and the pieces. gram_files,
    grams: by read_grams()."""

    def __init__(
        self,
        source: Source,
        job: Job,
        tokenizer: Tokenizer,
        gram_files: list[dict],
        grams: np.ndarray,
    ):
        self.source, self.job, self.tokenizer, self.grams = source, job, tokenizer, grams
        self.folder, self.val_per_10k = (
            Path(job.out) / source.name,
            round(job.val_share * HASH_STEPS),
        )
        self.parts, self.files = self.folder / "parts", []
        # Tokens of pieces to begin with, those of validation among them.
        self.target = SLACK * (source.budget or math.inf) / (1 - self.val_per_10k / HASH_STEPS)
        rule = (
            "val where int.from_bytes(blake2b(text, digest_size=8).digest(), 'little') %"
            f" {HASH_STEPS} < {self.val_per_10k}"
        )
        # What the shards depend on, as index.json and begun.json say it: JSON has no tuples.
        self.identity = json.loads(
            json.dumps(
                {
                    "tokenizer": tokenizer.kind,
                    "tokenizer_sha256": tokenizer.sha256,
                    "split_rule": f"{rule}, else train",
                    "decontaminated_against": gram_files,
                    "dataset": source.dataset,
                    "revision": source.revision,
                    "selection": self._selection(),
                }
            )
        )

    def _selection(self) -> dict:
        """What is taken of each row, and by which rules it becomes ids where they are not the usual
        ones."""
        selection = self.source.selection
        if self.source.is_masked and self.job.control_tokens == "text":
            raise UserError(
                "control_tokens=text is for plain text: in instructions each spelled token is that"
                " token"
            )
        if self.source.is_chat and self.tokenizer.kind != "folder":
            raise UserError(
                "rows of messages need a tokenizer with a chat template, which"
                f" {self.tokenizer.name} has not: give tokenizer=FOLDER"
            )
        if self.source.is_masked:
            selection = selection | {"special_tokens": "parsed"}
        if self.source.is_chat:
            selection = selection | {
                "chat_template_sha256": cached_template(self.tokenizer.name).sha256
            }
        if self.job.control_tokens == "text":
            selection = selection | {"control_tokens": "text"}
        return selection

    def begin(self) -> bool:
        """Whether it is still to be made; then failed input files are tried again, and changed
        ones. Raises UserError where the folder holds something else."""
        index = read_index(self.folder) if (self.folder / "index.json").exists() else None
        has_pieces = any(piece.end in ("whole", "enough") for piece in read_pieces(self.parts))
        if index or has_pieces:
            self._refuse_other_content(index)
        if index:
            self._close_finished(index)
            return False
        self.files = self.source.list_files()
        self.parts.mkdir(parents=True, exist_ok=True)
        write_json(self.parts / "begun.json", {**self.identity, "files": len(self.files)})
        for file, piece in zip(self.files, read_pieces(self.parts), strict=True):
            self._forget_outdated(file, piece)
        return True

    def _held_identity(self, index: Index | None) -> dict:
        """What the folder's index, or its pieces, depend on; what makes no difference is as in
        `identity`."""
        held = vars(index) if index else begun(self.folder)
        # maybe by the hash of an older version
        if self.tokenizer.goes_by(held.get("tokenizer_sha256")):
            held = held | {"tokenizer_sha256": self.tokenizer.sha256}
        if index and self.source.is_masked and held.get("selection") == {"instruct": list(PAIR)}:
            # It was made when special tokens in instructions stayed text; nothing is added to it.
            held = held | {"selection": self.identity["selection"]}
        if self.source.may_age or not index:  # of pieces, the stamps of their files tell
            held = held | {"revision": self.source.revision}
        if not index:  # pieces do not depend on it
            held = held | {"split_rule": self.identity["split_rule"]}
        return held

    def _refuse_other_content(self, index: Index | None) -> None:
        """Raises UserError where what is in the folder was made of something else."""
        held = self._held_identity(index)
        for key, value in self.identity.items():
            if held.get(key) == value:
                continue
            is_touched = key == "revision" and index is not None and bool(self.source.local_files)
            if is_touched and self._holds_the_documents(index):
                continue
            self._refuse_split(key, held.get(key))
            meaning = ""
            if is_touched:
                meaning = (
                    ", which comes of the names, sizes and times of the input files, and these "
                    "hold other documents than it does"
                )
            raise UserError(
                f"{self.folder} is of {key}={held.get(key)!r}, not {value!r}{meaning}: "
                "give the same options and files again, delete it, or give another out="
            )

    def _refuse_split(self, key: str, held_rule: str | None) -> None:
        """Raises UserError where the key is the rule of the split, and the held one names a
        share."""
        if key != "split_rule":
            return
        share = re.search(r" % (\d+) < (\d+)", held_rule or "")
        if share:
            made_with = int(share[2]) / int(share[1])
            raise UserError(
                f"{self.folder} is finished with val_share={made_with:g}, and a finished"
                " folder keeps its split: give that share, delete the folder, or give"
                " another out="
            )

    def _close_finished(self, index: Index) -> None:
        """Say that the source is finished. Raises UserError where it has fewer tokens than are
        asked for."""
        tokens = index.splits["train"].tokens
        if not index.is_whole and tokens < (self.source.budget or math.inf):
            raise UserError(
                f"{self.folder} holds {tokens:,} training tokens, fewer"
                " than are asked for: delete it, or give another out="
            )
        # of a run that was killed between its index and its end
        shutil.rmtree(self.parts, ignore_errors=True)
        print(f"{self.folder} is complete")
        show(self.folder)

    def _forget_outdated(self, file: InputFile, piece: Piece) -> None:
        """Let an input file be read again that failed, changed, or was read by other rules."""
        is_refused = piece.odd_rows > 0 and not self.job.skip_bad
        is_outdated = piece.reader < READER and is_text_file(file.name)
        is_changed = piece.input != [file.name, file.bytes, file.stamp]
        if piece.end in ("whole", "enough") and not (is_refused or is_outdated or is_changed):
            return
        if piece.end:
            reason = "changed or could not be read"
            if is_outdated:
                reason = "was read by an earlier version, which knew no borders of documents"
            print(f"{self.parts}: {file.name} {reason}: it is read again", file=sys.stderr)
        piece.stem.with_suffix(".json").unlink(missing_ok=True)

    def _holds_the_documents(self, index: Index) -> bool:
        """Whether the folder, which is finished, holds what the input files do, though their
        names, sizes or times are others than those it was made of: a copy of them, say. They are
        read, not tokenised; their order is not compared."""
        print(
            f"{self.folder} is of files of other sizes or times: they are read to compare their"
            " documents",
            file=sys.stderr,
        )
        kept = np.load(self.folder / "hashes.npy")
        names = np.concatenate([self._document_hashes(file) for file in self.source.list_files()])
        place = np.minimum(np.searchsorted(kept, names), len(kept) - 1)
        is_kept = (names != NO_DOCUMENT) & (kept[place] == names)
        first_row = np.full(len(kept), -1)  # of each document kept
        rows = np.flatnonzero(is_kept)
        first_row[place[rows[::-1]]] = rows[::-1]
        if (first_row < 0).any():
            return False
        # rows behind the last document that the budget took do not matter
        if not index.is_whole:
            end = int(first_row.max()) + 1
            names, is_kept = names[:end], is_kept[:end]
        copies = index.duplicates.get(self.source.name, 0)
        left_out = sum(index.duplicates.values()) - copies + index.contaminated
        empty = int((names == NO_DOCUMENT).sum())
        counts = int(is_kept.sum()), empty, len(names) - empty - int(is_kept.sum())
        return counts == (len(kept) + copies, index.empty, left_out)

    def _document_hashes(self, file: InputFile) -> np.ndarray:
        """uint64 (rows,) of an input file, NO_DOCUMENT for empty ones; none where the file
        cannot be read."""
        names = array("Q")
        try:
            reading = Reading(borders=_borders(self.tokenizer), skips_odd_rows=True)
            for row in file.read(reading):
                texts = [clean(text) for text in row.texts]
                if row.conversation is not None:
                    chat = _render(self.tokenizer, row, reading)
                    if chat is None:
                        continue
                    texts = _chat_texts(chat)
                names.append(document_hash(texts, [text.encode() for text in texts]) or NO_DOCUMENT)
        except BadFile:
            return np.empty(0, np.uint64)
        return np.frombuffer(names, np.uint64)

    def tasks(self) -> list[Callable]:
        """Those that lack of the first input files that hold `target` tokens, which is known of the
        finished ones, and guessed by their mean, by the source's size or by the file's."""
        pieces, found, held = read_pieces(self.parts), [], 0.0
        whole = [piece.tokens for piece in pieces if piece.end == "whole"]
        mean = (
            sum(whole) / len(whole)
            if whole
            else self.source.tokens and self.source.tokens / len(self.files)
        )
        tokenizer = (
            self.tokenizer.name
            if self.tokenizer.kind != "folder"
            else str(Path(self.tokenizer.name).resolve())
        )
        np.save(self.parts / "grams.npy", self.grams)
        for file, piece in zip(self.files, pieces, strict=True):
            if held >= self.target:
                break
            if piece.serves(self.target):
                held += piece.tokens
            else:
                found.append(
                    partial(
                        make_piece,
                        file,
                        piece.stem.resolve(),
                        tokenizer,
                        self.target,
                        skip_bad=self.job.skip_bad,
                        control_tokens=self.job.control_tokens,
                    )
                )
                held += mean if mean is not None else TOKENS_A_BYTE * (file.bytes or 0)
        return found

    def tokenise(self) -> None:
        """Runs the tasks."""
        began, sizes = time.monotonic(), [file.bytes or 1 for file in self.files]
        first = sum(piece.bytes for piece in read_pieces(self.parts))

        def state() -> tuple:
            pieces = read_pieces(self.parts)
            documents, tokens, size = np.sum(
                [(piece.documents, piece.tokens, piece.bytes) for piece in pieces], 0
            ).tolist()
            share = float(np.average([piece.share for piece in pieces], weights=sizes))
            rate = (size - first) / (time.monotonic() - began) / 1e6
            return (
                tokens,
                max(share, min(1.0, tokens / self.target)),
                f"{si(documents)} documents",
                f"{rate:.1f} MB/s",
            )

        if self.job.on == "ray" and (tasks := self.tasks()):
            _run_on_ray(tasks, self.job.workers, self.parts.resolve())
        # what ended on Ray with an error tells why here
        with progress_line(self.source.name, "tokens", state) as show:
            run_here(self.tasks(), self.job.workers, show)

    def assemble(self) -> bool:
        """Pieces -> shards and index.json. Returns False where the pieces are too few: `target`
        says how many tokens it takes. Raises MachineError: a file needed could not be read."""
        source, budget, name = self.source, self.source.budget, self.source.name
        # no other source's shards meanwhile: copies are dropped across sources
        with alone(self.folder.parent):
            every = read_pieces(self.parts)
            failed = [piece for piece in every if piece.end == "failed"]
            found = [piece for piece in every if piece.end != "failed" or not self.job.skip_bad]
            # Those before the first that lacks, and one that was stopped early, behind which
            # nothing is of use.
            end = next((i for i, piece in enumerate(found) if piece.end != "whole"), len(found))
            pieces = found[:end] + [
                piece for piece in found[end : end + 1] if piece.end == "enough"
            ]
            splits, layout = self._lay_out(pieces)
            pieces, train = (
                [piece for piece in pieces if piece.homes is not None],
                splits["train"]["tokens"],
            )
            if layout["is_whole"] and end < len(found):
                if failed:
                    listed = "".join(f"\n  {_named_reason(piece)}" for piece in failed)
                    raise MachineError(
                        f"{name} is not finished: {len(failed)} of {len(self.files)} input files"
                        " could not be read; mend what is said of each and run the command again,"
                        f" or add skip_bad=true to leave them out:{listed}"
                    )
                there = sum(piece.tokens for piece in pieces)
                self.target = (
                    there + SLACK * (budget - train) * there / max(1, train) + 1
                    if budget
                    else math.inf
                )
                return False
            if empty := [split for split, counts in splits.items() if not counts["documents"]]:
                odd_rows = sum(piece.odd_rows for piece in pieces)
                left_out = (
                    f"copies {sum(layout['duplicates'].values())}, empty {layout['empty']},"
                    f" contaminated {layout['contaminated']}, odd rows {odd_rows}, files"
                    f" {len(failed)}"
                )
                if failed:
                    left_out += f" ({'; '.join(map(_named_reason, failed))})"
                raise UserError(
                    f"{name} has no documents for {' and '.join(empty)}; left out are "
                    f"{left_out}: {self._split_advice(pieces, layout)}"
                )
            print(
                f"{self.folder}: writing"
                f" {sum(split['tokens'] for split in splits.values()):,} tokens",
                file=sys.stderr,
            )
            # a context's mark lies beside the id
            dtype = np.dtype("<u4" if source.is_masked else self.tokenizer.dtype).name
            write_index(
                self.folder,
                {
                    "dtype": dtype,
                    "source": name,
                    **self.identity,
                    "vocab_size": self.tokenizer.vocab_size,
                    "license": source.license,
                    **layout,
                    "files": [piece.input[0] for piece in pieces],
                    "skipped": [
                        {"file": piece.input[0], "reason": piece.reason}
                        for piece in failed
                        if layout["is_whole"] or piece.stem < pieces[-1].stem
                    ],
                    "budget": budget,
                    **({"is_masked": True} if source.is_masked else {}),
                    **_remarks(pieces),
                    **write_shards(self.folder, pieces, splits, dtype),
                },
            )
            shutil.rmtree(self.parts)
        show(self.folder)
        if budget and layout["is_whole"]:
            print(
                f"{self.folder}: {train:,} training tokens are all there are, {budget:,} were asked"
                " for: a run that needs more sees some of them again (data.max_epochs)",
                file=sys.stderr,
            )
        return True

    def _split_advice(self, pieces: list[Piece], layout: dict) -> str:
        """What to do where a split has no documents. layout: as _lay_out() returns it."""
        split_by = layout.get("cut", {}).get("split_by")
        is_by_document = split_by == "document"
        residues = np.concatenate(
            [np.empty(0, np.uint64), *(piece.split_residues(is_by_document) for piece in pieces)]
        )
        count = len(residues)
        remedies = [
            f"put each end-of-text token of {piece.input[0]} alone on its line, where it ends a"
            f" document ({piece.inner_borders:,} lines hold one beside other text)"
            for piece in pieces
            if piece.inner_borders
        ]
        if count < 2:
            return (
                f"each split needs a document, and there is {count or 'none'} beside those: "
                f"{', or '.join([*remedies, 'give more documents'])}"
            )
        kept = {}  # documents of validation, by percent
        for percent in VAL_PERCENTS:
            documents = int((residues < percent * HASH_STEPS // 100).sum())
            if 0 < documents < count:
                kept[percent] = documents
        if kept:
            # Of a small source the least share that gives more than a document or two.
            enough = min(VAL_DOCUMENTS, count // 2)
            percent = next((percent for percent in kept if kept[percent] >= enough), max(kept))
            remedies.append(
                f"give val_share={percent / 100:g}, which keeps {kept[percent]:,} of them"
            )
        if is_by_document:
            remedies.append(f"end documents within a text file by lines of {END_OF_TEXT}")
        remedies.append("give more documents")
        noun = "pieces of its only document" if split_by == "piece" else "documents"
        share = f"val_share={self.val_per_10k / HASH_STEPS:g}"
        return (
            f"there are {count:,} {noun}, and {share} leaves one split without any:"
            f" {', or '.join(remedies)}"
        )

    def _lay_out(self, pieces: list[Piece]) -> tuple[dict, dict]:
        """Sets the `homes` of the pieces, which stand in the source's order, up to the one that
        reaches the budget.

        Returns the splits, {split: {documents, text_bytes, tokens}}, and what else index.json says
        of them: duplicates {source of the first copy: documents}, empty, contaminated, is_whole,
        False where the budget was reached. Raises UserError where a finished source has lost its
        hashes."""
        # sorted hashes of the finished sources in the folder: no document comes twice, so none in
        # both splits
        earlier = {}
        for folder in sorted(path.parent for path in self.folder.parent.glob("*/index.json")):
            index, hashes = read_index(folder), folder / "hashes.npy"
            # the same text by another is no copy
            if self.tokenizer.goes_by(index.tokenizer_sha256):
                if not hashes.exists() or file_sha256(hashes) != index.hashes_sha256:
                    raise UserError(
                        f"{hashes} is not what was written: restore it, or delete {folder}"
                    )
                earlier[folder.name] = np.load(hashes, mmap_mode="r")
        copies = _find_copies(pieces, list(earlier.values()))
        # A document's pieces go where its first one does, but those of an only document must fill
        # both splits.
        layout = self._place(pieces, copies, len(earlier), by_piece=True)
        is_by_document = layout.documents > 1 and any(piece.has_cuts for piece in pieces)
        if is_by_document:
            layout = self._place(pieces, copies, len(earlier), by_piece=False)
        splits = {
            split: dict(zip(COUNTS, map(int, layout.totals[:, home]), strict=True))
            for split, home in HOMES.items()
        }
        empty, contaminated, *copied = map(int, layout.totals[0, EMPTY:])
        duplicates = {
            key: n for key, n in zip([self.source.name, *earlier], copied, strict=True) if n
        }
        told = {
            "duplicates": duplicates,
            "empty": empty,
            "contaminated": contaminated,
            "is_whole": layout.is_whole,
        }
        if layout.cut_documents:
            told["cut"] = {
                "documents": layout.cut_documents,
                "pieces": layout.cut_pieces,
                "split_by": "document" if is_by_document else "piece",
            }
        return splits, told

    def _place(
        self, pieces: list[Piece], copies: list[np.ndarray], earlier: int, by_piece: bool
    ) -> "Layout":
        """Sets the `homes` of the pieces. copies: by _find_copies() against that many earlier
        sources. by_piece: whether the pieces of a document that was cut are split each by
        itself."""
        layout = Layout(np.zeros((3, COPY + 1 + earlier)))
        for piece in pieces:
            piece.homes = None
        for piece, found in zip(pieces, copies, strict=True):
            table, home, key = piece.table(), found.copy(), piece.table()["hash"]
            if piece.has_cuts and not by_piece:
                key = key[piece.document_of_rows()]
            home[(home == TRAIN) & (key % np.uint64(HASH_STEPS) < self.val_per_10k)] = VAL
            home[table["tokens"] == 0] = CONTAMINATED
            home[(table["tokens"] == 0) & (table["bytes"] == 0)] = EMPTY
            if self.source.budget is not None:
                train = np.cumsum(np.where(home == TRAIN, table["tokens"], 0), dtype=np.int64)
                left = self.source.budget - layout.totals[2, TRAIN]
                end = int(np.searchsorted(train, left)) + 1  # with the one that reaches it
                layout.is_whole = end > len(table)
                table, home = table[:end], home[:end]
            weights = (None, table["bytes"], table["tokens"])
            layout.totals += [
                np.bincount(home, weight, layout.totals.shape[1]) for weight in weights
            ]
            layout.count_documents(piece, home)
            piece.homes = home
            if not layout.is_whole:
                break
        return layout


@dataclass
class Layout:
    """Where the documents of a source go."""

    totals: np.ndarray  # (3, homes): COUNTS by home
    is_whole: bool = True  # whether the budget was not reached
    documents: int = 0  # that go to a split, a document that was cut as one
    cut_documents: int = 0  # of them, those of more than one piece
    cut_pieces: int = 0  # of these

    def count_documents(self, piece: Piece, home: np.ndarray) -> None:
        """home: uint16, for the first rows of the piece, where each goes."""
        if not piece.has_cuts:
            self.documents += int((home <= VAL).sum())
            return
        first_rows = piece.document_of_rows()[: len(home)]
        rows_of_each = np.unique(first_rows[home <= VAL], return_counts=True)[1]
        self.documents += len(rows_of_each)
        self.cut_documents += int((rows_of_each > 1).sum())
        self.cut_pieces += int(rows_of_each[rows_of_each > 1].sum())


def _remarks(pieces: list[Piece]) -> dict:
    """Index's fields that say what was replaced, joined and left out in the input files, where
    there is something to say."""
    remarks = {
        "inner_borders": {
            piece.input[0]: piece.inner_borders for piece in pieces if piece.inner_borders
        },
        "replaced": {piece.input[0]: piece.replaced for piece in pieces if piece.replaced},
        "joined_lists": {
            piece.input[0]: piece.joined_lists for piece in pieces if piece.joined_lists
        },
        "odd_rows": [
            {"file": piece.input[0], "rows": piece.odd_rows, "first": piece.first_odd_row}
            for piece in pieces
            if piece.odd_rows
        ],
    }
    return {key: value for key, value in remarks.items() if value}


def _find_copies(pieces: list[Piece], earlier: list[np.ndarray]) -> list[np.ndarray]:
    """uint16 (documents,) of each piece: TRAIN for a first document, COPY or more for others. By
    ranges of hashes, of which each holds about SORTED_AT_ONCE."""
    hashes = np.concatenate(
        [np.empty(0, np.uint64), *(piece.table()["hash"].copy() for piece in pieces)]
    )
    homes, count = np.full(len(hashes), TRAIN, np.uint16), -(-len(hashes) // SORTED_AT_ONCE)
    for i in range(count):
        low, high = np.uint64(2**64 * i // count), np.uint64(2**64 * (i + 1) // count - 1)
        places = np.flatnonzero((hashes >= low) & (hashes <= high))
        # of equal ones the first document stays first
        places = places[np.argsort(hashes[places], kind="stable")]
        some = hashes[places]
        homes[places[1:][some[1:] == some[:-1]]] = COPY
        for number, those in enumerate(earlier, COPY + 1):  # no two of them share a document
            # Not by np.isin, which sorts both: 3 GB where an earlier source has 100M documents.
            there = np.array(
                those[np.searchsorted(those, low) : np.searchsorted(those, high, "right")]
            )
            if len(there):
                homes[
                    places[there[np.minimum(np.searchsorted(there, some), len(there) - 1)] == some]
                ] = number
    return np.split(homes, np.cumsum([piece.documents for piece in pieces]))[:-1]


def write_shards(folder: Path, pieces: list[Piece], splits: dict, dtype: str) -> dict:
    """Write hashes.npy and the shards, in place of what was there; returns `splits` and
    `hashes_sha256` of index.json."""
    remove_shards(folder)
    hashes = np.concatenate(
        [piece.table()["hash"][: len(piece.homes)][piece.homes <= VAL] for piece in pieces]
    )
    hashes.sort()
    # not by np.save, which on a full disk leaves a short file without a word
    with new_file(folder / "hashes.npy") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(hashes))
        file.write(hashes)
    size, made = np.dtype(dtype).itemsize, {}
    for split, counts in splits.items():
        found = []
        for number, blocks in groupby(
            _blocks(pieces, HOMES[split], size * shards.SHARD_TOKENS, size), itemgetter(0)
        ):
            path, digest = folder / f"{split}_{number:05d}.bin", sha256()
            with new_file(path) as file:
                for _, data in blocks:
                    file.write(data)
                    digest.update(data)
                found.append(
                    {"file": path.name, "tokens": file.tell() // size, "sha256": digest.hexdigest()}
                )
        made[split] = {**counts, "shards": found}
    return {"hashes_sha256": file_sha256(folder / "hashes.npy"), "splits": made}


def _blocks(
    pieces: list[Piece], home: int, shard_bytes: int, size: int
) -> Iterator[tuple[int, bytes]]:
    """Shard's number and tokens, each of `size` bytes, of the documents of that home, BLOCK bytes
    at most at a time."""
    at = 0  # bytes so far
    for piece in pieces:
        # of the documents in the piece
        borders = np.append(0, np.cumsum(piece.table()["tokens"], dtype=np.int64)) * size
        # neighbours
        runs = borders[
            np.flatnonzero(np.diff(piece.homes == home, prepend=False, append=False))
        ].reshape(-1, 2)
        with open(f"{piece.stem}.bin", "rb") as file:
            for first, last in runs.tolist():
                file.seek(first)
                while left := last - file.tell():
                    if not (data := file.read(min(BLOCK, left, shard_bytes - at % shard_bytes))):
                        raise OSError(
                            f"{piece.stem}.bin is shorter than what was written: delete its folder"
                        )
                    yield at // shard_bytes, data
                    at += len(data)


# ----------------------------------------------------------------------------- what a folder holds


def show(folder: Path) -> None:
    """Print a table of the sources' splits, then what else there is to say of each source, finished
    or not."""
    rows, told = [["source", "split", "documents", "tokens", "bytes/token", "GB on disk"]], []
    for path in _sources(folder):
        name = path.resolve().name
        try:
            if (path / "index.json").exists():
                index = read_index(path)
                rows += [
                    [
                        name,
                        split,
                        f"{s.documents:,}",
                        f"{s.tokens:,}",
                        f"{s.text_bytes / s.tokens:.2f}",
                        f"{s.tokens * np.dtype(index.dtype).itemsize / 1e9:.3f}",
                    ]
                    for split, s in index.splits.items()
                ]
                lines = [*_story(index)]
            else:
                pieces = read_pieces(path / "parts")
                count = sum(piece.end in ("whole", "enough") for piece in pieces)
                lines = [
                    (
                        f"unfinished: {sum(piece.tokens for piece in pieces):,} tokens so far; of"
                        f" {len(pieces):,} input files {count} are read; the same command goes on"
                        " with it"
                    ),
                    *(
                        f"failed: {piece.input[0]} ({piece.reason})"
                        for piece in pieces
                        if piece.reason
                    ),
                ]
        except UserError as error:
            lines = [f"damaged: {error}"]
        told += [f"{name}: {line}" for line in lines]
    print(grid(rows), *told, sep="\n")


def verify(folders: list[Path]) -> None:
    """Hashes every shard again and prints a line per source. Raises UserError naming all that
    differ or are unfinished."""
    bad = []
    for source in [source for folder in folders for source in _sources(folder)]:
        is_finished = (source / "index.json").exists()
        found = (
            list(damage(source))
            if is_finished
            else [f"{source} is unfinished: the same command goes on with it"]
        )
        print(f"{'BAD' if found else 'OK '} {source}", flush=True)
        bad += found
    if bad:
        raise UserError("\n".join(bad))


def _sources(folder: Path) -> list[Path]:
    """The folders of the sources there, finished or not."""
    finished, unfinished = folder.rglob("index.json"), folder.rglob("parts/begun.json")
    if not (found := {path.parent for path in finished} | {path.parents[1] for path in unfinished}):
        raise UserError(
            f"there is no prepared source in {folder}: `python prepare_data.py` says how to"
            " make one"
        )
    return sorted(found)


def _story(index: Index) -> Iterator[str]:
    """What the index tells beside its splits."""
    yield textwrap.shorten(
        f"from {index.dataset} @ {index.revision}, {index.license}", 300, placeholder=" ..."
    )
    yield (
        f"tokenizer {index.tokenizer} (sha256 {index.tokenizer_sha256[:9]}...,"
        f" {index.vocab_size:,} ids)"
    )
    if index.is_masked:
        if "messages" in index.selection.get("instruct", ()):
            yield (
                "targets are what the assistant wrote; all else is context, and bytes are those of"
                " the assistant"
            )
        else:
            yield (
                "targets are the responses and the ends of documents; prompts are context, and"
                " bytes are those of responses"
            )
        if "special_tokens" not in index.selection:
            yield (
                "special tokens that its rows spell are text, as they were before: prepare it anew"
                " for tokens"
            )
    if "control_tokens" in index.selection:
        yield "control tokens that its text spells are text"
    sources = ", ".join(f"{source} {count:,}" for source, count in index.duplicates.items())
    yield (
        f"dropped: copies {sum(index.duplicates.values()):,}"
        + (f" (first met in {sources})" if sources else "")
        + f", empty {index.empty:,}, contaminated {index.contaminated:,}"
    )
    yield (
        f"read: {len(index.files):,} input files"
        f" {'to the end' if index.is_whole else f'for {index.budget:,} tokens'}"
    )
    yield from (f"skipped: {entry['file']} ({entry['reason']})" for entry in index.skipped)
    if index.cut:
        how = "those of a document in one split"
        if index.cut["split_by"] == "piece":
            how = (
                "which are split one by one, as there is no other document: validation text lies"
                " between training text"
            )
        yield (
            f"cut: {index.cut['documents']:,} documents of text files, longer than {TXT_CHARS:,} "
            f"characters, into {index.cut['pieces']:,} pieces, {how}"
        )
    for file, count in index.inner_borders.items():
        yield (
            f"not borders: {count:,} lines of {file} hold an end-of-text token beside other text,"
            " and it stays text; alone on its line it ends a document"
        )
    for file, count in index.replaced.items():
        yield (
            f"replaced: {count:,} characters of {file} are U+FFFD in place of bytes that are not"
            " UTF-8"
        )
    is_chat = "messages" in index.selection.get("instruct", ())
    for file, count in index.joined_lists.items():
        if is_chat:
            yield (
                f"joined: {count:,} messages of {file} were lists of parts, which became one text"
                " each"
            )
        else:
            yield f"joined: {count:,} texts of {file} were lists of strings, which became lines"
    for entry in index.odd_rows:
        yield f"left out: {entry['rows']:,} rows of {entry['file']}, the first: {entry['first']}"
