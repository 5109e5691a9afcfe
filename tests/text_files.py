"""Documents, the files that hold them, token shards: material for the tests of the data path."""

import gzip
import io
import json
import lzma
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

import prepare_data

SHA, N_CTX, VOCAB = "0123abcd", 8, 60_000
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def some_documents(n=40, seed=0):
    rng = random.Random(seed)
    words = ["the", "naïve", "<|endoftext|>", "日本", "x = 1\n", "  ", "\t", "🙂", "def f():", "0.5", "\u2028"]
    return ["".join(rng.choice(words) + " " for _ in range(rng.randrange(1, 60))) + str(i) for i in range(n)]


DOCUMENTS = some_documents()


def jsonl(documents, column="text"):
    return "".join(json.dumps({"id": i, column: d}) + "\n" for i, d in enumerate(documents)).encode()


def parquet(documents, column="text", type=None):
    file = io.BytesIO()
    table = pyarrow.table({"id": list(range(len(documents))), column: pyarrow.array(documents, type)})
    pyarrow.parquet.write_table(table, file, row_group_size=7)
    return file.getvalue()


def refused(capsys, *arguments, out=None):
    """The sentence of a command that must fail with exit code 2 and leave nothing in `out`."""
    capsys.readouterr()
    assert prepare_data.main([str(a) for a in arguments]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.strip()
    if out is not None:
        assert not list(out.rglob("*.bin*")) and not list(out.rglob("index.json*"))
    return said


def write_source(folder, windows, offset, val_windows=5):
    """Shards of consecutive token ids: a window's first id names it. Each shard ends in a part of a window."""
    folder.mkdir(parents=True)
    splits, value = {}, offset
    for split, shards in ("train", windows), ("val", (val_windows,)):
        entries = []
        for i, count in enumerate(shards):
            tokens = np.arange(value, value + count * N_CTX + 1 + i % N_CTX, dtype="<u2")
            value += len(tokens)
            tokens.tofile(folder / f"{split}_{i:05d}.bin")
            entries.append({"file": f"{split}_{i:05d}.bin", "tokens": len(tokens), "sha256": f"{split}{i}{offset}"})
        total = sum(entry["tokens"] for entry in entries)
        splits[split] = {"documents": 3, "text_bytes": 4 * total, "tokens": total, "shards": entries}
    index = {"format_version": 1, "source": folder.name, "tokenizer": "byte", "tokenizer_sha256": SHA,
             "vocab_size": VOCAB, "dtype": "uint16", "dataset": "d", "revision": "r", "license": "l", "split_rule": "s",
             "duplicates": 0, "splits": splits}
    (folder / "index.json").write_text(json.dumps(index))
