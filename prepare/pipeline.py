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

import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np

from lib.errors import MachineError, UserError
from lib.files import alone, write_json
from lib.progress import progress_line
from lib.text import si
from prepare.advice import split_advice
from prepare.decontaminate import read_grams
from prepare.encoding import cached_tokenizer
from prepare.executors import run_here, run_on_ray, submit_to_slurm
from prepare.hub import list_files
from prepare.job import HASH_STEPS, Job
from prepare.layout import Layout, Rules, earlier_hashes, lay_out
from prepare.pieces import Piece, make_piece, named_reason, read_pieces
from prepare.resume import forget_outdated, identity_of, refuse_other_content, refuse_small
from prepare.show import count_copies, show
from prepare.sources import InputFile, Source
from prepare.writing import write_shards
from runtime.shards import PARTS, Index, read_index, write_index
from runtime.tokenizer import Tokenizer

TOKENS_A_BYTE = 0.4  # a guess where nobody says how many tokens a file has
SLACK = 1.002  # more than is asked for, at first: a few documents always turn out to be copies


def prepare(sources: Iterable[Source], job: Job) -> None:
    """Make out/<source>/ for each source that is not complete yet. `sources` are looked for after
    the job's files were read. Raises UserError: bad input, or a folder that holds something else.
    MachineError: files that could not be read."""
    tokenizer = cached_tokenizer(job.tokenizer, job.control_tokens)
    gram_files, grams = read_grams(job.decontaminate)
    with ExitStack() as locks:
        works = []
        for work in [Work(source, job, tokenizer, gram_files, grams) for source in sources]:
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
        try:
            for work in works:
                work.tokenise()
                while not work.assemble():  # the pieces fell short, copies dropped
                    work.tokenise()
        except UserError:
            for work in works:
                work.leave_nothing_empty()
            raise


def _submit(works: list["Work"], job: Job) -> None:
    """Leave the tasks to Slurm, and behind them the job that makes the shards."""
    tasks = [task for work in works for task in work.tasks()]
    # prepare_data.py's own options end here
    values = {option.name: getattr(job, option.name) for option in fields(Job)}
    job_of_shards = Job(**values | {"on": "local", "processes": None})
    sources = [work.source for work in works]
    folder = Path.cwd()  # which the job's paths are relative to

    def finish() -> None:
        """The job behind the array, which finds all tasks done."""
        os.chdir(folder)
        prepare(sources, job_of_shards)

    submit_to_slurm(tasks, finish, job)


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
        assert source.name is not None  # which Source may lack until the command knows it
        self.source = source
        self.name = source.name
        self.job = job
        self.tokenizer = tokenizer
        self.grams = grams
        self.folder = Path(job.out) / self.name
        self.parts = self.folder / PARTS
        self.files: list[InputFile] = []
        self.identity = identity_of(source, job, tokenizer, gram_files)
        # Tokens of pieces to begin with, those of validation among them.
        train_share = 1 - job.val_per_10k / HASH_STEPS
        self.target = SLACK * (source.budget or math.inf) / train_share

    def begin(self) -> bool:
        """Whether it is still to be made; then failed input files are tried again, and changed
        ones. Raises UserError where the folder holds something else."""
        index = read_index(self.folder) if (self.folder / "index.json").exists() else None
        has_pieces = any(piece.end in ("whole", "enough") for piece in read_pieces(self.parts))
        if index or has_pieces:
            refuse_other_content(self.folder, index, self.source, self.tokenizer, self.identity)
        if index:
            self._close_finished(index)
            return False
        self.files = list_files(self.source)
        self.parts.mkdir(parents=True, exist_ok=True)
        write_json(self.parts / "begun.json", {**self.identity, "files": len(self.files)})
        for file, piece in zip(self.files, read_pieces(self.parts), strict=True):
            forget_outdated(self.parts, file, piece, self.job.skip_bad)
        return True

    def leave_nothing_empty(self) -> None:
        """Remove the folder of a command that read no file to its end, such as one with a wrong
        column: nothing in it would be gone on with."""
        if any(piece.end for piece in read_pieces(self.parts)):
            return
        shutil.rmtree(self.parts, ignore_errors=True)
        with suppress(OSError):  # it is finished, or holds files of others
            self.folder.rmdir()

    def _close_finished(self, index: Index) -> None:
        refuse_small(self.folder, index, self.source.budget)
        # of a run that was killed between its index and its end
        shutil.rmtree(self.parts, ignore_errors=True)
        print(f"{self.folder} is complete")
        show(self.folder)

    # -------------------------------------------------------------------------------------- tasks

    def tasks(self) -> list[Callable]:
        """The tasks to run: of the first input files that together hold `target` tokens, those that
        are not finished. Tokens of unfinished files are estimated."""
        pieces = read_pieces(self.parts)
        mean = self._mean_tokens(pieces)
        np.save(self.parts / "grams.npy", self.grams)
        tasks: list[Callable] = []
        held = 0.0  # tokens of the files so far
        for file, piece in zip(self.files, pieces, strict=True):
            if held >= self.target:
                break
            if piece.serves(self.target):
                held += piece.tokens
                continue
            tasks.append(self._task(file, piece))
            held += mean if mean is not None else TOKENS_A_BYTE * (file.bytes or 0)
        return tasks

    def _mean_tokens(self, pieces: list[Piece]) -> float | None:
        """Of an input file: of those that were read, or by the source's size; None where nobody
        knows."""
        tokens = [piece.tokens for piece in pieces if piece.end == "whole"]
        if tokens:
            return sum(tokens) / len(tokens)
        if self.source.tokens:
            return self.source.tokens / len(self.files)
        return None

    def _task(self, file: InputFile, piece: Piece) -> Callable:
        tokenizer = self.tokenizer.name
        if self.tokenizer.kind == "folder":  # a job of Slurm's may start elsewhere
            tokenizer = str(Path(tokenizer).resolve())
        return partial(
            make_piece,
            file,
            piece.stem.resolve(),
            tokenizer,
            self.target,
            skip_bad=self.job.skip_bad,
            control_tokens=self.job.control_tokens,
        )

    def tokenise(self) -> None:
        """Run the tasks."""
        if self.job.on == "ray":
            tasks = self.tasks()
            if tasks:
                run_on_ray(tasks, self.job.workers, self.parts.resolve())
        # what ended on Ray with an error tells why here
        with progress_line(self.name, "tokens", self._progress()) as tell:
            run_here(self.tasks(), self.job.workers, tell)

    def _progress(self) -> Callable[[], tuple]:
        """What progress_line() asks for."""
        start_s = time.monotonic()
        bytes_at_start = sum(piece.bytes for piece in read_pieces(self.parts))
        sizes = [file.bytes or 1 for file in self.files]

        def state() -> tuple:
            pieces = read_pieces(self.parts)
            tokens = sum(piece.tokens for piece in pieces)
            documents = sum(piece.documents for piece in pieces)
            gained = sum(piece.bytes for piece in pieces) - bytes_at_start
            share = float(np.average([piece.share for piece in pieces], weights=sizes))
            return (
                tokens,
                max(share, min(1.0, tokens / self.target)),
                f"{si(documents)} documents",
                f"{gained / (time.monotonic() - start_s) / 1e6:.1f} MB/s",
            )

        return state

    # ------------------------------------------------------------------------------------- shards

    def assemble(self) -> bool:
        """Pieces -> shards and index.json. Returns False where the pieces are too few: `target`
        says how many tokens it takes. Raises MachineError: a file needed could not be read."""
        # no other source's shards meanwhile: copies are dropped across sources
        with alone(self.folder.parent):
            all_pieces = read_pieces(self.parts)
            failed = [piece for piece in all_pieces if piece.end == "failed"]
            if self.job.skip_bad:
                all_pieces = [piece for piece in all_pieces if piece.end != "failed"]
            pieces = _leading_pieces(all_pieces)
            is_read_to_its_end = all(piece.end == "whole" for piece in all_pieces)
            rules = Rules(
                self.name,
                self.source.budget,
                self.job.val_per_10k,
                earlier_hashes(self.folder.parent, self.tokenizer),
            )
            layout = lay_out(pieces, rules)
            pieces = [piece for piece in pieces if piece.homes is not None]
            if layout.is_whole and not is_read_to_its_end:
                if failed and not self.job.skip_bad:
                    raise self._unread(failed)
                self._raise_target(pieces, layout)
                return False
            self._refuse_empty_split(pieces, layout, failed)
            self._write(pieces, layout, failed)
        show(self.folder)
        self._tell_of_small_source(layout)
        return True

    def _unread(self, failed: list[Piece]) -> MachineError:
        reasons = "".join(f"\n  {named_reason(piece)}" for piece in failed)
        return MachineError(
            f"{self.name} is not finished: {len(failed)} of {len(self.files)} input files"
            " could not be read; mend what is said of each and run the command again,"
            f" or add skip_bad=true to leave them out:{reasons}"
        )

    def _raise_target(self, pieces: list[Piece], layout: Layout) -> None:
        """By what the budget lacks, where as much of the next pieces goes to training."""
        if not self.source.budget:
            self.target = math.inf
            return
        tokens = sum(piece.tokens for piece in pieces)
        train = layout.splits()["train"]["tokens"]
        missing = self.source.budget - train
        self.target = tokens + SLACK * missing * tokens / max(1, train) + 1

    def _refuse_empty_split(self, pieces: list[Piece], layout: Layout, failed: list[Piece]) -> None:
        splits = layout.splits()
        empty = [split for split, counts in splits.items() if not counts["documents"]]
        if not empty:
            return
        dropped = layout.dropped()
        odd_rows = sum(piece.odd_rows for piece in pieces)
        left_out = (
            f"{count_copies(dropped['duplicates'])}, empty {dropped['empty']},"
            f" contaminated {dropped['contaminated']}, odd rows {odd_rows}, files"
            f" {len(failed)}"
        )
        if failed:
            left_out += f" ({'; '.join(map(named_reason, failed))})"
        advice = split_advice(pieces, layout, self.job.val_per_10k)
        if set(dropped["duplicates"]) - {self.name}:
            advice += ", or give another out=, which keeps copies of other sources"
        raise UserError(
            f"{self.name} has no documents for {' and '.join(empty)}; left out are "
            f"{left_out}: {advice}"
        )

    def _write(self, pieces: list[Piece], layout: Layout, failed: list[Piece]) -> None:
        """The shards, then index.json, which says that they are whole; the pieces go."""
        splits = layout.splits()
        tokens = sum(counts["tokens"] for counts in splits.values())
        print(f"{self.folder}: writing {tokens:,} tokens", file=sys.stderr)
        # a context's mark lies beside the id
        dtype = np.dtype("<u4" if self.source.is_masked else self.tokenizer.dtype).name
        skipped = [
            {"file": piece.input_name, "reason": piece.reason}
            for piece in failed
            if layout.is_whole or piece.stem < pieces[-1].stem
        ]
        index = {
            "dtype": dtype,
            "source": self.name,
            **self.identity,
            "vocab_size": self.tokenizer.vocab_size,
            "license": self.source.license,
            **layout.dropped(),
            "files": [piece.input_name for piece in pieces],
            "skipped": skipped,
            "budget": self.source.budget,
        }
        if self.source.is_masked:
            index["is_masked"] = True
        index |= _remarks(pieces)
        index |= write_shards(self.folder, pieces, splits, dtype)
        write_index(self.folder, index)
        shutil.rmtree(self.parts)

    def _tell_of_small_source(self, layout: Layout) -> None:
        budget = self.source.budget
        if budget and layout.is_whole:
            train = layout.splits()["train"]["tokens"]
            print(
                f"{self.folder}: {train:,} training tokens are all there are, {budget:,} were asked"
                " for: a run that needs more sees some of them again (data.max_epochs)",
                file=sys.stderr,
            )


def _leading_pieces(pieces: list[Piece]) -> list[Piece]:
    """Those before the first that lacks, and one that was stopped early, behind which nothing is of
    use."""
    leading = []
    for piece in pieces:
        if piece.end in ("whole", "enough"):
            leading.append(piece)
        if piece.end != "whole":
            break
    return leading


def _remarks(pieces: list[Piece]) -> dict:
    """Index's fields that say what was replaced, joined and left out in the input files, where
    there is something to say."""
    borders, replaced, unknown, joined_lists, odd_rows = {}, {}, {}, {}, []
    for piece in pieces:
        file = piece.input_name
        if piece.inner_borders:
            borders[file] = piece.inner_borders
        if piece.replaced:
            replaced[file] = piece.replaced
        if piece.unknown:
            unknown[file] = piece.unknown
        if piece.joined_lists:
            joined_lists[file] = piece.joined_lists
        if piece.odd_rows:
            first = piece.first_odd_row
            odd_rows.append({"file": file, "rows": piece.odd_rows, "first": first})
    remarks = {
        "inner_borders": borders,
        "replaced": replaced,
        "unknown": unknown,
        "joined_lists": joined_lists,
        "odd_rows": odd_rows,
    }
    return {key: value for key, value in remarks.items() if value}
