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
import os
import re
import shutil
import sys
import textwrap
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np

from lib.errors import MachineError, UserError
from lib.files import alone, write_json
from lib.progress import progress_line
from lib.text import si
from prepare.decontaminate import read_grams
from prepare.encoding import (
    NO_DOCUMENT,
    borders_of,
    cached_template,
    cached_tokenizer,
    chat_texts,
    document_hash,
    render_row,
)
from prepare.executors import run_here, run_on_ray, submit_to_slurm
from prepare.formats import is_text_file
from prepare.hub import list_files
from prepare.job import Job
from prepare.layout import COUNTS, HOMES, Layout, find_copies
from prepare.pieces import (
    CONTAMINATED,
    COPY,
    EMPTY,
    HASH_STEPS,
    READER,
    TRAIN,
    VAL,
    Piece,
    begun,
    make_piece,
    named_reason,
    read_pieces,
)
from prepare.show import show
from prepare.sources import PAIR, BadFile, InputFile, Reading, Source
from prepare.writing import write_shards
from runtime.shards import Index, file_sha256, read_index, write_index
from runtime.tokenizer import END_OF_TEXT, Tokenizer, clean

TOKENS_A_BYTE = 0.4  # a guess where nobody says how many tokens a file has
SLACK = 1.002  # more than is asked for, at first: a few documents always turn out to be copies
VAL_PERCENTS = (1, 2, 5, 10, 20, 50)  # of which a message proposes one
VAL_DOCUMENTS = 5  # that a proposed share should keep


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


def _submit(works: list["Work"], job: Job) -> None:
    """Leave the tasks to Slurm, and behind them the job that makes the shards."""
    tasks = [task for work in works for task in work.tasks()]
    # prepare_data.py's own options end here
    values = {option.name: getattr(job, option.name) for option in fields(Job)}
    here = Job(**values | {"on": "local", "processes": None})
    # which the job's paths are relative to
    sources, folder = [work.source for work in works], Path.cwd()

    def finish() -> None:
        """The job behind the array, which finds all tasks done."""
        os.chdir(folder)
        prepare(sources, here)

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
        self.files = list_files(self.source)
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
        names = np.concatenate([self._document_hashes(file) for file in list_files(self.source)])
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
            reading = Reading(borders=borders_of(self.tokenizer), skips_odd_rows=True)
            for row in file.read(reading):
                texts = [clean(text) for text in row.texts]
                if row.conversation is not None:
                    chat = render_row(self.tokenizer, row, reading)
                    if chat is None:
                        continue
                    texts = chat_texts(chat)
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
            run_on_ray(tasks, self.job.workers, self.parts.resolve())
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
                    listed = "".join(f"\n  {named_reason(piece)}" for piece in failed)
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
                    left_out += f" ({'; '.join(map(named_reason, failed))})"
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
        copies = find_copies(pieces, list(earlier.values()))
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
        """Sets the `homes` of the pieces. copies: by find_copies() against that many earlier
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
