"""The demo's two tasks, made of a run's validation shards, which need no download: the same for
every run on the same shards."""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from lib.errors import UserError
from runtime.config import read_config
from runtime.shards import LOSS_MASK_BIT, Index, read_index
from runtime.tokenizer import Tokenizer, load_tokenizer, tokenizer_of

T = TypeVar("T")

DOCUMENTS = 32  # per source, val_ppl
CHARACTERS = 4096  # of each document, val_ppl
QUESTIONS = 100  # per source, val_cloze
CONTEXT, CHOICE = 96, 32  # characters: both fit a context of 128 bytes
N_CHOICES = 4


def documents(run_dir: str, **_: object) -> dict:
    """val_ppl, {"validation": a dataset of `source`, `text`}: documents, cut to CHARACTERS, for
    their bits per byte."""
    rows = []
    for source in _sources(run_dir):
        for text in _pick(source, DOCUMENTS, f"val_ppl/{source.name}", _beginning):
            rows.append({"source": source.name, "text": text})
    if not rows:
        raise UserError(f"no source of {run_dir} has a validation document with text")
    return _dataset(rows)


def _beginning(text: str) -> str:
    return text[:CHARACTERS]


def questions(run_dir: str, **_: object) -> dict:
    """val_cloze, {"validation": a dataset of `source`, `context`, `choices`, `label`}: a piece of a
    document, and four that may follow: its own, three of other documents of the same source, cut
    from them by the same rule. Only the context tells them apart, so a model that ignores it scores
    25 %, whatever it has learned about the language."""
    rows = []
    for source in _sources(run_dir):
        texts = _pick(source, QUESTIONS, f"val_cloze/{source.name}", _cuttable)
        rng = random.Random(f"val_cloze/{source.name}/cuts")
        if len(texts) < N_CHOICES:
            continue
        for q in range(QUESTIONS):  # in turn: few documents serve several times
            question = _question(texts, q % len(texts), rng)
            if question is not None:
                rows.append({"source": source.name, **question})
    if not rows:
        raise UserError(
            f"no source of {run_dir} has {N_CHOICES} validation documents of"
            f" {CONTEXT + CHOICE} characters for val_cloze: give tasks=val_ppl, which needs one, or"
            " train on text prepared with a larger val_share="
        )
    return _dataset(rows)


class _Cuttable(NamedTuple):
    """A text and the places where it may be cut."""

    text: str
    places: list[int]


def _cuttable(text: str) -> _Cuttable | None:
    places = _places(text)
    return _Cuttable(text, places) if places else None


def _question(texts: list[_Cuttable], asked: int, rng: random.Random) -> dict | None:
    """A question about the document `asked`; None where the others are too much alike."""
    context, answer = _cut(texts[asked], rng)
    choices = [answer]
    for number in rng.sample(range(len(texts)), len(texts)):
        if number == asked or len(choices) == N_CHOICES:
            continue
        _, piece = _cut(texts[number], rng)
        if piece not in choices:
            choices.append(piece)
    if len(choices) < N_CHOICES:
        return None
    rng.shuffle(choices)
    return {"context": context, "choices": choices, "label": choices.index(answer)}


def _places(text: str) -> list[int]:
    """Where a text may be cut: before a blank, where tokenizers that merge letters part too, with
    enough on either side."""
    ends = (m.end() for m in re.finditer(r"\S(?=\s)", text))
    return [
        i for i in ends if CONTEXT <= i <= len(text) - CHOICE and not text[i : i + CHOICE].isspace()
    ]


def _cut(cuttable: _Cuttable, rng: random.Random) -> tuple[str, str]:
    """A context and what follows it."""
    place = rng.choice(cuttable.places)
    text = cuttable.text
    return text[place - CONTEXT : place], text[place : place + CHOICE]


def _dataset(rows: list[dict]) -> dict:
    import datasets  # here, because it takes a second that only an evaluation should pay

    return {"validation": datasets.Dataset.from_list(rows)}


class _Source(NamedTuple):
    """The validation documents of one source."""

    name: str
    documents: list[np.ndarray]  # ids, prompts included
    tokenizer: Tokenizer  # what decodes them


def _sources(run_dir: str) -> Iterator[_Source]:
    """Raises UserError where a source was made with another tokenizer than the run."""
    data = read_config(run_dir).data
    tokenizer = load_tokenizer(tokenizer_of(Path(run_dir), data.tokenizer))
    for name in sorted(data.mixture):
        folder = Path(data.dir) / name
        index = read_index(folder)
        is_same_folder = tokenizer.kind != "folder" or tokenizer.goes_by(index.tokenizer_sha256)
        if index.tokenizer != tokenizer.kind or not is_same_folder:
            raise UserError(
                f"{folder} was made with another tokenizer than {run_dir}: prepare the data with"
                f" {tokenizer.name}"
            )
        yield _Source(name, _validation_documents(index, tokenizer), tokenizer)


def _validation_documents(index: Index, tokenizer: Tokenizer) -> list[np.ndarray]:
    """The ids of each document, without its prefix; a document's tail in the next shard is left
    out."""
    border = index.border(tokenizer.eot)
    prefix = len(tokenizer.prefix)
    documents = []
    for shard in index.splits["val"].shards:
        if not shard.tokens:
            continue
        ids = np.memmap(shard.path, dtype=index.dtype, mode="r")
        starts = np.flatnonzero(ids == border)
        ends = [*starts[1:], len(ids)]
        documents += [ids[start + prefix : end] for start, end in zip(starts, ends, strict=True)]
    return documents


def _pick(source: _Source, n: int, seed: str, transform: Callable[[str], T | None]) -> list[T]:
    """transform(text) of n documents drawn without replacement, passing over those it returns
    nothing for."""
    count = len(source.documents)
    picked: list[T] = []
    for number in random.Random(seed).sample(range(count), count):
        if len(picked) == n:
            break
        ids = (source.documents[number] & ~LOSS_MASK_BIT).tolist()
        value = transform(source.tokenizer.decode(ids))
        if value:
            picked.append(value)
    return picked
