"""Token shards that are like text in their frequencies and need no text: for speed, memory and a
loss that falls."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from lib.files import digest, file_sha256, write_json
from runtime.shards import FORMAT_VERSION, Index
from runtime.tokenizer import VOCAB_SIZE, load_tokenizer

SOURCE = "noise"
# of a run on it: its data, and rows for GPT-2's whole vocabulary
SETTINGS = (
    f"data.mixture={SOURCE}:1",
    "data.tokenizer=byte",
    "model.vocab_size=257",
    "model.vocab_multiple=50304",
)
DOCUMENT = 512  # tokens of a document, its end-of-text token included


def write_noise(folder: Path, tokens: int, val_tokens: int = 2**16, seed: int = 0) -> None:
    """Write the data folder `folder` of one source, `noise`, with so many tokens to train and
    validate on, or leave one that is there and as large.

    Bytes, the k-th as frequent as 1 / (k + 2.7) (Mandelbrot's form of Zipf's law): ids that need no
    package. SETTINGS gives a model a vocabulary as wide as GPT-2's all the same. Raises OSError."""
    source = folder / SOURCE
    if (source / "index.json").is_file() and _size(source / "train_00000.bin") >= 2 * tokens:
        return
    source.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    splits = {}
    for split, n_tokens in (("train", tokens), ("val", val_tokens)):
        splits[split] = _write_split(source, split, n_tokens, rng)
    np.save(source / "hashes.npy", np.arange(6, dtype="<u8"))
    index = Index(
        source=SOURCE,
        tokenizer="byte",
        tokenizer_sha256=load_tokenizer("byte").sha256,
        vocab_size=VOCAB_SIZE["byte"],
        dtype="uint16",
        dataset="drawn, no text",
        revision=str(seed),
        license="CC0-1.0",
        split_rule="drawn apart",
        duplicates={},
        empty=0,
        contaminated=0,
        decontaminated_against=[],
        skipped=[],
        files=[],
        selection={},
        is_whole=True,
        budget=None,
        hashes_sha256=file_sha256(source / "hashes.npy"),
        splits={},
    )
    content = asdict(index) | {"splits": splits, "format_version": FORMAT_VERSION}
    write_json(source / "index.json", content | {"sha256": digest(content)})


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _write_split(source: Path, split: str, tokens: int, rng: np.random.Generator) -> dict:
    """One shard of `tokens` ids; what index.json says of the split."""
    vocab_size = VOCAB_SIZE["byte"]
    end_of_text = vocab_size - 1
    frequencies = 1.0 / (np.arange(end_of_text) + 2.7)
    cumulative = np.cumsum(frequencies) / frequencies.sum()
    ids = np.searchsorted(cumulative, rng.random(tokens)).astype("<u2")
    ids[::DOCUMENT] = end_of_text
    path = source / f"{split}_00000.bin"
    ids.tofile(path)
    n_documents = len(range(0, tokens, DOCUMENT))
    return {
        "documents": n_documents,
        "text_bytes": tokens - n_documents,
        "tokens": tokens,
        "shards": [{"file": path.name, "tokens": tokens, "sha256": file_sha256(path)}],
    }
