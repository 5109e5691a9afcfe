"""Whether what lies in a source's folder is what is asked for, so that a command may go on with
it."""

import json
import re
import sys
import textwrap
from array import array
from pathlib import Path

import numpy as np

from lib.errors import UserError
from prepare.encoding import NO_DOCUMENT, borders_of, cached_template, clean_row
from prepare.formats import is_text_file
from prepare.hub import list_files
from prepare.job import HASH_STEPS, Job
from prepare.pieces import READER, Piece, begun
from prepare.sources import PAIR, BadFile, InputFile, Reading, Source
from runtime.shards import Index
from runtime.tokenizer import Tokenizer

LOCAL_DATASET = re.compile("local: (?P<files>.*); column (?P<column>.*)", re.DOTALL)
FILES_LISTED = 100  # characters of a list of files that differ


def identity_of(source: Source, job: Job, tokenizer: Tokenizer, gram_files: list[dict]) -> dict:
    """What the shards depend on, as index.json and begun.json say it. gram_files: by read_grams().
    Raises UserError for options that do not go together."""
    rule = (
        "val where int.from_bytes(blake2b(text, digest_size=8).digest(), 'little') %"
        f" {HASH_STEPS} < {job.val_per_10k}"
    )
    identity = {
        "tokenizer": tokenizer.kind,
        "tokenizer_sha256": tokenizer.sha256,
        "split_rule": f"{rule}, else train",
        "decontaminated_against": gram_files,
        "dataset": source.dataset,
        "revision": source.revision,
        "selection": _selection(source, job, tokenizer),
    }
    return json.loads(json.dumps(identity))  # JSON has no tuples


def _selection(source: Source, job: Job, tokenizer: Tokenizer) -> dict:
    """What is taken of each row, and by which rules it becomes ids where they are not the usual
    ones."""
    if source.is_masked and job.control_tokens == "text":
        raise UserError(
            "control_tokens=text is for plain text: in instructions each spelled token is that"
            " token"
        )
    if source.is_chat and tokenizer.kind != "folder":
        raise UserError(
            "rows of messages need a tokenizer with a chat template, which"
            f" {tokenizer.name} has not: give tokenizer=FOLDER"
        )
    selection = source.selection
    if source.is_masked:
        selection = selection | {"special_tokens": "parsed"}
    if source.is_chat:
        selection = selection | {"chat_template_sha256": cached_template(tokenizer.name).sha256}
    if job.control_tokens == "text":
        selection = selection | {"control_tokens": "text"}
    return selection


def refuse_other_content(
    folder: Path, index: Index | None, source: Source, tokenizer: Tokenizer, identity: dict
) -> None:
    """Raises UserError where what is in the folder, finished (`index`) or begun, was made of
    something else than `identity`."""
    held = _held_identity(folder, index, source, tokenizer, identity)
    for key, value in identity.items():
        if held.get(key) == value:
            continue
        is_touched = key == "revision" and index is not None and bool(source.local_files)
        if is_touched and index and _holds_the_documents(folder, index, source, tokenizer):
            continue
        if key == "split_rule":
            _refuse_split(folder, held.get(key) or "")
        if key == "dataset":
            _refuse_files(folder, held.get(key) or "", value)
        meaning = ""
        if is_touched:
            meaning = (
                ", which comes of the names, sizes and times of the input files, and these "
                "hold other documents than it does"
            )
        raise UserError(
            f"{folder} is of {key}={held.get(key)!r}, not {value!r}{meaning}: "
            "give the same options and files again, delete it, or give another out="
        )


def _held_identity(
    folder: Path, index: Index | None, source: Source, tokenizer: Tokenizer, identity: dict
) -> dict:
    """What the folder's index, or its pieces, depend on; what makes no difference is as in
    `identity`."""
    held = vars(index) if index else begun(folder)
    # maybe by the hash of an older version
    if tokenizer.goes_by(held.get("tokenizer_sha256")):
        held = held | {"tokenizer_sha256": tokenizer.sha256}
    if index and source.is_masked and held.get("selection") == {"instruct": list(PAIR)}:
        # It was made when special tokens in instructions stayed text; nothing is added to it.
        held = held | {"selection": identity["selection"]}
    if source.may_age or not index:  # of pieces, the stamps of their files tell
        held = held | {"revision": source.revision}
    if not index:  # pieces do not depend on it
        held = held | {"split_rule": identity["split_rule"]}
    return held


def _refuse_split(folder: Path, held_rule: str) -> None:
    """Raises UserError where a finished folder's rule names the share of its validation."""
    share = re.search(r" % (\d+) < (\d+)", held_rule)
    if share:
        raise UserError(
            f"{folder} is finished with val_share={int(share[2]) / int(share[1]):g}, and a"
            " finished folder keeps its split: give that share, delete the folder, or give"
            " another out="
        )


def _refuse_files(folder: Path, held_dataset: str, dataset: str) -> None:
    """Raises UserError where the two differ in local files alone, and names a few of those that
    differ: a source may have thousands."""
    held, given = LOCAL_DATASET.fullmatch(held_dataset), LOCAL_DATASET.fullmatch(dataset)
    if not held or not given or held["column"] != given["column"]:
        return
    held_names, names = held["files"].split(", "), given["files"].split(", ")
    new_names = sorted(set(names) - set(held_names))
    missing_names = sorted(set(held_names) - set(names))
    differences, remedy = [], ""
    if new_names:
        remedy = ", or prepare the new ones as a source of their own by another name="
        differences.append(f"{len(new_names):,} new: {_listed(new_names)}")
    if missing_names:
        differences.append(f"{len(missing_names):,} missing: {_listed(missing_names)}")
    if not differences:
        differences = ["in another order, or one is named twice"]
    raise UserError(
        f"{folder} is of {len(held_names):,} files, the command names {len(names):,}"
        f" ({'; '.join(differences)}): give the same files again{remedy}, or delete it, or give"
        " another out="
    )


def _listed(names: list[str]) -> str:
    return textwrap.shorten(", ".join(names), FILES_LISTED, placeholder=" ...")


def _holds_the_documents(folder: Path, index: Index, source: Source, tokenizer: Tokenizer) -> bool:
    """Whether the folder, which is finished, holds what the input files do, though their names,
    sizes or times are others than those it was made of: a copy of them, say. They are read, not
    tokenised; their order is not compared."""
    print(
        f"{folder} is of files of other sizes or times: they are read to compare their documents",
        file=sys.stderr,
    )
    hashes = np.load(folder / "hashes.npy")
    names = np.concatenate([_document_hashes(file, tokenizer) for file in list_files(source)])
    place = np.minimum(np.searchsorted(hashes, names), len(hashes) - 1)
    is_kept = (names != NO_DOCUMENT) & (hashes[place] == names)
    first_row = np.full(len(hashes), -1)  # of each document kept
    rows = np.flatnonzero(is_kept)
    first_row[place[rows[::-1]]] = rows[::-1]
    if (first_row < 0).any():
        return False
    # rows behind the last document that the budget took do not matter
    if not index.is_whole:
        end = int(first_row.max()) + 1
        names, is_kept = names[:end], is_kept[:end]
    copies = index.duplicates.get(folder.name, 0)
    n_kept = int(is_kept.sum())
    n_empty = int((names == NO_DOCUMENT).sum())
    if n_kept != len(hashes) + copies or n_empty != index.empty:
        return False
    dropped = sum(index.duplicates.values()) - copies + index.contaminated
    return len(names) - n_empty - n_kept == dropped


def _document_hashes(file: InputFile, tokenizer: Tokenizer) -> np.ndarray:
    """uint64 (rows,) of an input file, NO_DOCUMENT for empty ones; none where the file cannot be
    read."""
    hashes = array("Q")
    try:
        reading = Reading(borders=borders_of(tokenizer), skips_odd_rows=True)
        for row in file.read(reading):
            cleaned = clean_row(tokenizer, row, reading)
            if cleaned is not None:
                hashes.append(cleaned.hash)
    except BadFile:
        return np.empty(0, np.uint64)
    return np.frombuffer(hashes, np.uint64)


def refuse_small(folder: Path, index: Index, budget: int | None) -> None:
    """Raises UserError where a finished folder has fewer training tokens than are asked for."""
    tokens = index.splits["train"].tokens
    if not index.is_whole and (budget is None or tokens < budget):
        raise UserError(
            f"{folder} holds {tokens:,} training tokens, fewer"
            " than are asked for: delete it, or give another out="
        )


def forget_outdated(parts: Path, file: InputFile, piece: Piece, skip_bad: bool) -> None:
    """Let an input file be read again that failed, changed, or was read by other rules."""
    is_refused = piece.odd_rows > 0 and not skip_bad
    is_outdated = piece.reader < READER and is_text_file(file.name)
    is_changed = piece.input != [file.name, file.bytes, file.stamp]
    if piece.end in ("whole", "enough") and not (is_refused or is_outdated or is_changed):
        return
    if piece.end:
        reason = "changed or could not be read"
        if is_outdated:
            reason = "was read by an earlier version, which knew no borders of documents"
        print(f"{parts}: {file.name} {reason}: it is read again", file=sys.stderr)
    piece.stem.with_suffix(".json").unlink(missing_ok=True)
