"""Turn the validation shards of a run into two evaluation tasks that need no download.

val_ppl     the documents themselves, cut to CHARACTERS: bits per byte
val_cloze   128 characters of a document and four pieces of 32: its own next one, three from other documents of the same
            source, cut from them by the same rule. Only the context tells them apart, so a model that ignores it scores
            25 %, whatever it has learned about the language.

Both are a function of the shards alone, hence the same for every run on the same validation set.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from runtime.config import ConfigError, read_config
from runtime.tokenizer import load_tokenizer

DOCUMENTS = 32          # per source, val_ppl
CHARACTERS = 4096       # of each document, val_ppl
QUESTIONS = 100         # per source, val_cloze
CONTEXT, CHOICE = 128, 32       # characters
N_CHOICES = 4


def documents(run_dir: str, **_) -> dict:
    """val_ppl: {"validation": a dataset of `source`, `text`}. Raises ConfigError where the shards cannot be read."""
    rows = [{"source": source, "text": text} for source, texts in _sources(run_dir)
            for text in _pick(texts, DOCUMENTS, f"val_ppl/{source}", lambda text: text[:CHARACTERS])]
    return {"validation": _dataset(rows, run_dir, "val_ppl", "a document that is not empty")}


def questions(run_dir: str, **_) -> dict:
    """val_cloze: {"validation": a dataset of `source`, `context`, `choices`, `label`}. Raises ConfigError likewise."""
    rows = []
    for source, texts in _sources(run_dir):
        # Twice as many documents as questions: the distractors come from others than the one asked about.
        cuts = _pick(texts, 2 * QUESTIONS, f"val_cloze/{source}", _cut)
        rng = random.Random(f"val_cloze/{source}/distractors")
        for i, (context, answer) in enumerate(cuts[:QUESTIONS]):
            others = [choice for j, (_, choice) in enumerate(cuts) if j != i]
            # A frequent phrase stays as frequent among the wrong answers as among the right ones; only repeats go.
            distinct = list(dict.fromkeys([answer, *rng.sample(others, len(others))]))
            if len(distinct) < N_CHOICES:
                break
            choices, label = distinct[1:N_CHOICES], rng.randrange(N_CHOICES)
            choices.insert(label, answer)
            rows.append({"source": source, "context": context, "choices": choices, "label": label})
    needed = f"{N_CHOICES} different documents of {CONTEXT + CHOICE} characters"
    return {"validation": _dataset(rows, run_dir, "val_cloze", needed)}


def _pick(texts: "Texts", n: int, seed: str, transform) -> list:
    """transform(text) of n documents drawn without replacement, passing over those it returns nothing for."""
    rng, out = random.Random(seed), []
    for i in rng.sample(range(len(texts)), len(texts)):
        if len(out) < n and (value := transform(texts[i])):
            out.append(value)
    return out


def _cut(text: str) -> tuple[str, str] | None:
    """A context and what follows it, parted before a blank, where tokenizers that merge letters part too."""
    rng = random.Random(text)
    places = [m.end() for m in re.finditer(r"\S(?=\s)", text) if CONTEXT <= m.end() <= len(text) - CHOICE]
    places = [i for i in places if not text[i:i + CHOICE].isspace()]
    if not places:
        return None
    i = rng.choice(places)
    return text[i - CONTEXT:i], text[i:i + CHOICE]


def _dataset(rows: list[dict], run_dir: str, task: str, needed: str):
    import datasets  # here, because it takes a second that only an evaluation should pay

    if not rows:
        raise ConfigError(f"{task}: no source of {run_dir} has {needed} in its validation shards: prepare more data")
    return datasets.Dataset.from_list(rows)


# --------------------------------------------------------------------------------------------------------------- shards

class Texts:
    """The validation documents of one source, decoded when asked for."""

    def __init__(self, folder: Path, tokenizer):
        self.tokenizer, self.documents = tokenizer, []
        for shard in _shards(folder, tokenizer.name):
            starts = np.flatnonzero(shard == tokenizer.eot)     # a document's tail in the next shard is left out
            self.documents += [shard[a + 1:b] for a, b in zip(starts, [*starts[1:], len(shard)], strict=True)]

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, i: int) -> str:
        return self.tokenizer.decode(self.documents[i].tolist())


def _sources(run_dir: str) -> Iterator[tuple[str, Texts]]:
    data = read_config(run_dir).data
    tokenizer = load_tokenizer(data.tokenizer)
    for source in sorted(data.mixture):
        yield source, Texts(Path(data.dir) / source, tokenizer)


def _shards(folder: Path, tokenizer: str) -> list[np.ndarray]:
    path = folder / "index.json"
    try:
        index = json.loads(path.read_text())
        found, listed = index["tokenizer"], [(s["file"], s["tokens"]) for s in index["splits"]["val"]["shards"]]
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}: prepare the run's data with prepare_data.py") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}): run prepare_data.py again") from error
    if found != tokenizer:
        raise ConfigError(f"{path} was made with the tokenizer {found!r}, the run was trained with {tokenizer!r}: "
                          f"prepare the data with data.tokenizer={tokenizer}")
    out = []
    for name, tokens in listed:
        size = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if size != 2 * tokens:
            raise ConfigError(f"{folder / name} has {size} bytes, but {path} promises {2 * tokens}: "
                              f"run prepare_data.py again")
        out += [np.memmap(folder / name, dtype="<u2", mode="r")] if tokens else []
    return out
