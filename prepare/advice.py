"""What to do where a split has no documents."""

import numpy as np

from prepare.job import HASH_STEPS
from prepare.layout import Layout
from prepare.pieces import Piece
from runtime.tokenizer import END_OF_TEXT

VAL_PERCENTS = (1, 2, 5, 10, 20, 50)  # of which a message proposes one
VAL_DOCUMENTS = 5  # that a proposed share should keep


def split_advice(pieces: list[Piece], layout: Layout, val_per_10k: int) -> str:
    """Why a split of the pieces, which lay_out() has seen, is empty, and the remedies."""
    was_cut = layout.cut_documents > 0
    is_by_document = was_cut and layout.split_by == "document"
    parts = [piece.split_residues(is_by_document) for piece in pieces]
    residues = np.concatenate([np.empty(0, np.uint64), *parts])
    count = len(residues)
    remedies = _border_remedies(pieces)
    if count < 2:
        return (
            f"each split needs a document, and there is {count or 'none'} beside those: "
            f"{', or '.join([*remedies, 'give more documents'])}"
        )
    remedies += _share_remedies(residues)
    if is_by_document:
        remedies.append(f"end documents within a text file by lines of {END_OF_TEXT}")
    remedies.append("give more documents")
    is_by_piece = was_cut and not is_by_document
    noun = "pieces of its only document" if is_by_piece else "documents"
    share = f"val_share={val_per_10k / HASH_STEPS:g}"
    return (
        f"there are {count:,} {noun}, and {share} leaves one split without any:"
        f" {', or '.join(remedies)}"
    )


def _border_remedies(pieces: list[Piece]) -> list[str]:
    return [
        f"put each end-of-text token of {piece.input_name} alone on its line, where it ends a"
        f" document ({piece.inner_borders:,} lines hold one beside other text)"
        for piece in pieces
        if piece.inner_borders
    ]


def _share_remedies(residues: np.ndarray) -> list[str]:
    """A share by which both splits get documents, if one of VAL_PERCENTS is such a share.

    residues: uint64 (documents,), what a share is compared with."""
    count = len(residues)
    val_documents = {}  # by percent
    for percent in VAL_PERCENTS:
        documents = int((residues < percent * HASH_STEPS // 100).sum())
        if 0 < documents < count:
            val_documents[percent] = documents
    if not val_documents:
        return []
    # Of a small source the least share that gives more than a document or two.
    enough = min(VAL_DOCUMENTS, count // 2)
    sufficient = [percent for percent, documents in val_documents.items() if documents >= enough]
    percent = sufficient[0] if sufficient else max(val_documents)
    return [f"give val_share={percent / 100:g}, which keeps {val_documents[percent]:,} of them"]
