"""Documents, the files that hold them: material for the tests of the data path."""

import gzip
import json
import lzma
import random
from pathlib import Path


def _zstandard(content: bytes) -> bytes:
    import zstandard  # here: a test on a GPU reads this file, its machine may lack it

    return zstandard.ZstdCompressor().compress(content)


PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": _zstandard,
}


def some_documents(n: int = 40, seed: int = 0):
    rng = random.Random(seed)
    words = [
        "the",
        "naïve",
        "<|endoftext|>",
        "日本",
        "x = 1\n",
        "  ",
        "\t",
        "🙂",
        "def f():",
        "0.5",
        "\u2028",
    ]
    return [
        "".join(rng.choice(words) + " " for _ in range(rng.randrange(1, 60))) + str(i)
        for i in range(n)
    ]


DOCUMENTS = some_documents()


def write_rows(path: Path, rows: list[dict]):
    """As the name says: .parquet, or a line of JSON a row, which may be packed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow.parquet  # as above

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_bytes(
            PACK.get(path.suffix, bytes)("".join(json.dumps(row) + "\n" for row in rows).encode())
        )
    return path


def write(path: Path, documents: list[str]):
    return write_rows(path, [{"id": i, "text": document} for i, document in enumerate(documents)])


# Each text begins with <|begin|>, as Llama's rules have it.
BEGINS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}},
}


def write_tokenizer(folder: Path, roles=None, vocab: int = 400, spare: int = 0, **more: object):
    """A folder as Hugging Face keeps a tokenizer: byte-level BPE, <|begin|> is 0, <|end|> is 1,
    merges learned from DOCUMENTS; with `spare` tokens that no text becomes. `roles`: of
    tokenizer_config.json. `more`: keys of tokenizer.json."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(
        DOCUMENTS, vocab, special_tokens=["<|begin|>", "<|end|>"], show_progress=False
    )
    made.add_special_tokens([f"<|spare_{i}|>" for i in range(spare)])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(made.to_str()) | more))
    roles = {"bos_token": "<|begin|>", "eos_token": "<|end|>"} if roles is None else roles
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


# Each digit is a piece of its own; what GPT-2's pattern cuts, it cuts here too.
DIGITS_APART = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def write_sentencepiece(folder: Path, vocab: int = 600, **roles: object):
    """A folder with a tokenizer of SentencePiece's kind: BPE over the text with "▁" for each blank
    and one more before the first word, bytes for unknown letters; <s> is 1, </s> is 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for document in DOCUMENTS for word in document.split(" ")]
    made.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, show_progress=False)
    )
    content = json.loads(made.to_str())
    # The bytes are tokens like others; only the first three are special.
    content["added_tokens"] = content["added_tokens"][:3]
    # As Mistral's file has it: each text gets a blank before it, one that begins with blanks too.
    content["pre_tokenizer"] = None
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    made = Tokenizer.from_str(json.dumps(content))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | roles
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder
