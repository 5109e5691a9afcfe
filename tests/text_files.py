"""Documents, the files that hold them: material for the tests of the data path."""

import gzip
import json
import lzma
import random

import pyarrow
import pyarrow.parquet
import zstandard

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def some_documents(n=40, seed=0):
    rng = random.Random(seed)
    words = ["the", "naïve", "<|endoftext|>", "日本", "x = 1\n", "  ", "\t", "🙂", "def f():", "0.5", "\u2028"]
    return ["".join(rng.choice(words) + " " for _ in range(rng.randrange(1, 60))) + str(i) for i in range(n)]


DOCUMENTS = some_documents()


def write_rows(path, rows):
    """As the name says: .parquet, or a line of JSON a row, which may be packed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_bytes(PACK.get(path.suffix, bytes)("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def write(path, documents):
    return write_rows(path, [{"id": i, "text": document} for i, document in enumerate(documents)])


# Each text begins with <|begin|>, as Llama's rules have it.
BEGINS = {"type": "TemplateProcessing",
          "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
          "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
          "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}}}


def write_tokenizer(folder, roles=None, vocab=400, spare=0, **more):
    """A folder as Hugging Face keeps a tokenizer: byte-level BPE, <|begin|> is 0, <|end|> is 1, merges learned from
    DOCUMENTS; with `spare` tokens that no text becomes. `roles`: of tokenizer_config.json. `more`: keys of tokenizer.json."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(DOCUMENTS, vocab, special_tokens=["<|begin|>", "<|end|>"], show_progress=False)
    made.add_special_tokens([f"<|spare_{i}|>" for i in range(spare)])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(made.to_str()) | more))
    roles = {"bos_token": "<|begin|>", "eos_token": "<|end|>"} if roles is None else roles
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder
