"""Documents, the files that hold them, token shards: material for the tests of the data path."""

import gzip
import hashlib
import io
import json
import lzma
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from runtime.shards import new_file, write_index

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
    # Imported here: most tests of the rooms do not need the command.
    import prepare_data

    capsys.readouterr()
    assert prepare_data.main([str(a) for a in arguments]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.strip()
    if out is not None:
        assert not list(out.rglob("*.bin*")) and not list(out.rglob("index.json*"))
    return said


def write_source(folder, windows, offset, val_windows=5, format_version=1):
    """Shards of consecutive token ids: a window's first id names it. Each shard ends in a part of a window. Format 2 is
    sealed by its own hash, as prepare_data.py leaves it; format 1 is not, as the first versions left it."""
    folder.mkdir(parents=True)
    splits, value = {}, offset
    for split, shards in ("train", windows), ("val", (val_windows,)):
        entries = []
        for i, count in enumerate(shards):
            tokens = np.arange(value, value + count * N_CTX + 1 + i % N_CTX, dtype="<u2")
            value += len(tokens)
            tokens.tofile(folder / f"{split}_{i:05d}.bin")
            sha256 = f"{split}{i}{offset}" if format_version == 1 else hashlib.sha256(tokens.tobytes()).hexdigest()
            entries.append({"file": f"{split}_{i:05d}.bin", "tokens": len(tokens), "sha256": sha256})
        total = sum(entry["tokens"] for entry in entries)
        splits[split] = {"documents": 3, "text_bytes": 4 * total, "tokens": total, "shards": entries}
    index = {"source": folder.name, "tokenizer": "byte", "tokenizer_sha256": SHA, "vocab_size": VOCAB, "dataset": "d",
             "revision": "r", "license": "l", "split_rule": "s", "splits": splits}
    if format_version == 1:
        index |= {"format_version": 1, "dtype": "uint16", "duplicates": 0}
        (folder / "index.json").write_text(json.dumps(index))
        return
    with new_file(folder / "hashes.npy") as file:
        np.save(file, np.arange(6, dtype="<u8"))
    hashes_sha256 = hashlib.sha256((folder / "hashes.npy").read_bytes()).hexdigest()
    write_index(folder, index | {
        "duplicates": {folder.name: 2, "other": 1}, "empty": 1, "contaminated": 4, "is_whole": False, "budget": 150,
        "decontaminated_against": [{"file": "e.jsonl", "sha256": "0"}], "skipped": [{"file": "x.gz", "reason": "cut short"}],
        "files": ["y.gz"], "selection": {"column": "text"}, "hashes_sha256": hashes_sha256})


def write_tokenizer(folder, roles=None, vocab=400, spare=0, **more):
    """A folder as Hugging Face keeps a tokenizer: byte-level BPE, <|begin|> is 0, <|end|> is 1, merges learned from
    DOCUMENTS; with `spare` tokens that no text becomes. `roles`: of tokenizer_config.json. `more`: keys of tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(DOCUMENTS, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|begin|>", "<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    raw = json.loads(made.to_str()) | more
    size = len(raw["model"]["vocab"])
    raw["added_tokens"] += [{"id": size + i, "content": f"<|spare_{i}|>", "single_word": False, "lstrip": False, "rstrip": False,
                             "normalized": False, "special": True} for i in range(spare)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    roles = {"bos_token": "<|begin|>", "eos_token": "<|end|>"} if roles is None else roles
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder
