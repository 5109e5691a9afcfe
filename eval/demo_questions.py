"""The demo's two tasks, made of a run's validation shards, which need no download: the same for
every run on the same shards."""

import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from lib.errors import UserError
from runtime.config import read_config
from runtime.shards import LOSS_MASK_BIT, read_index
from runtime.tokenizer import Tokenizer, load_tokenizer, tokenizer_of

DOCUMENTS = 32  # per source, val_ppl
CHARACTERS = 4096  # of each document, val_ppl
QUESTIONS = 100  # per source, val_cloze
CONTEXT, CHOICE = 96, 32  # characters: both fit a context of 128 bytes
N_CHOICES = 4


def documents(run_dir: str, **_) -> dict:
    """val_ppl, {"validation": a dataset of `source`, `text`}: documents, cut to CHARACTERS, for
    their bits per byte."""
    rows = [
        {"source": source, "text": text}
        for source, *texts in _sources(run_dir)
        for text in _pick(*texts, DOCUMENTS, f"val_ppl/{source}", lambda text: text[:CHARACTERS])
    ]
    return _dataset(rows, run_dir)


def questions(run_dir: str, **_) -> dict:
    """val_cloze, {"validation": a dataset of `source`, `context`, `choices`, `label`}: a piece of a
    document, and four that may follow: its own, three of other documents of the same source, cut
    from them by the same rule. Only the context tells them apart, so a model that ignores it scores
    25 %, whatever it has learned about the language."""
    rows = []
    for source, *texts in _sources(run_dir):
        usable = _pick(
            *texts,
            QUESTIONS,
            f"val_cloze/{source}",
            lambda text: (places := _places(text)) and (text, places),
        )
        rng = random.Random(f"val_cloze/{source}/cuts")
        # in turn: few documents serve several times
        for q in range(QUESTIONS if len(usable) >= N_CHOICES else 0):
            asked = q % len(usable)
            context, answer = _cut(usable[asked], rng)
            choices = [answer]
            for other in rng.sample(range(len(usable)), len(usable)):
                if (
                    other != asked
                    and len(choices) < N_CHOICES
                    and (piece := _cut(usable[other], rng)[1]) not in choices
                ):
                    choices.append(piece)
            if len(choices) == N_CHOICES:
                rng.shuffle(choices)
                rows.append(
                    {
                        "source": source,
                        "context": context,
                        "choices": choices,
                        "label": choices.index(answer),
                    }
                )
    return _dataset(rows, run_dir)


def _places(text: str) -> list[int]:
    """Where a text may be cut: before a blank, where tokenizers that merge letters part too, with
    enough on either side."""
    ends = (m.end() for m in re.finditer(r"\S(?=\s)", text))
    return [
        i for i in ends if CONTEXT <= i <= len(text) - CHOICE and not text[i : i + CHOICE].isspace()
    ]


def _cut(usable: tuple[str, list[int]], rng: random.Random) -> tuple[str, str]:
    """A context and what follows it."""
    text, places = usable
    i = rng.choice(places)
    return text[i - CONTEXT : i], text[i : i + CHOICE]


def _dataset(rows: list[dict], run_dir: str) -> dict:
    import datasets  # here, because it takes a second that only an evaluation should pay

    if not rows:
        raise UserError(
            f"no source of {run_dir} has {N_CHOICES} validation documents of"
            f" {CONTEXT + CHOICE} characters"
        )
    return {"validation": datasets.Dataset.from_list(rows)}


def _sources(run_dir: str) -> Iterator[tuple[str, list[np.ndarray], Tokenizer]]:
    """Each source, the ids of its validation documents, prompts included, and what decodes them."""
    data = read_config(run_dir).data
    tokenizer = load_tokenizer(tokenizer_of(Path(run_dir), data.tokenizer))
    for source in sorted(data.mixture):
        folder, documents, skip = Path(data.dir) / source, [], len(tokenizer.prefix)
        index = read_index(folder)
        if (
            index.tokenizer != tokenizer.kind
            or not tokenizer.goes_by(index.tokenizer_sha256)
            and tokenizer.kind == "folder"
        ):
            raise UserError(
                f"{folder} was made with another tokenizer than {run_dir}: prepare the data with"
                f" {tokenizer.name}"
            )
        for path in (shard.path for shard in index.splits["val"].shards if shard.tokens):
            ids = np.memmap(path, dtype=index.dtype, mode="r")
            is_chat = "messages" in index.selection.get("instruct", ())
            # nothing is learned of it there
            border = LOSS_MASK_BIT | np.uint32(tokenizer.eot) if is_chat else tokenizer.eot
            # a document's tail in the next shard is left out
            starts = np.flatnonzero(ids == border)
            documents += [
                ids[a + skip : b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)
            ]
        yield source, documents, tokenizer


def _pick(documents: list[np.ndarray], tokenizer: Tokenizer, n: int, seed: str, transform) -> list:
    """transform(text) of n documents drawn without replacement, passing over those it returns
    nothing for."""
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    found = (transform(tokenizer.decode((documents[i] & ~LOSS_MASK_BIT).tolist())) for i in order)
    return list(islice(filter(None, found), n))
