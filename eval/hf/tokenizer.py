"""The tokenizer's files as transformers reads them."""

import json
import shutil
from pathlib import Path
from typing import Any

from eval.hf.files import as_json
from runtime import tokenizer as gpt2
from runtime.tokenizer import (
    END_OF_TEXT,
    FOLDER_FILES,
    GENERATION_FILE,
    Tokenizer,
    end_ids,
    read_roles,
    with_ends,
)

FILE_CLASS = "PreTrainedTokenizerFast"  # transformers' class that applies tokenizer.json as it is


def write_tokenizer(tokenizer: Tokenizer, n_ctx: int, vocab_padded: int, folder: Path) -> dict:
    """Put the tokenizer's files and generation_config.json into `folder`; returns the roles that
    config.json repeats.

    A built-in tokenizer becomes tokenizer.json (for the package tokenizers), vocab.json and
    merges.txt (for readers of GPT-2's own format) and the tokens' roles; an imported one is copied,
    but for the name of its class. The ids of every text are those of runtime/tokenizer.py but
    for one thing: a text that spells a special token is text here, and the token there (unless
    split_special_tokens=True is set). vocab_padded: rows of the embedding; the ids behind the
    tokenizer's own are never generated, there as in eval/inference.py."""
    if tokenizer.kind == "folder":
        for path in filter(Path.is_file, [Path(tokenizer.name) / name for name in FOLDER_FILES]):
            shutil.copyfile(path, folder / path.name)
        _let_the_file_decide(folder / "tokenizer_config.json")
    else:
        for name, content in _tokenizer_files(tokenizer, n_ctx).items():
            (folder / name).write_text(content, encoding="utf-8")
    path = folder / GENERATION_FILE
    ends = with_ends(end_ids(path), tokenizer.ends)
    roles: dict[str, Any] = {"bos_token_id": tokenizer.start, "eos_token_id": ends}
    # transformers' generate() stops at what this file names alone, whatever config.json says.
    generation = (
        json.loads(path.read_bytes()) | {"eos_token_id": ends} if path.is_file() else dict(roles)
    )
    unused = set(range(tokenizer.vocab_size, vocab_padded))
    if unused:
        suppressed = set(generation.get("suppress_tokens") or [])
        generation["suppress_tokens"] = sorted(unused | suppressed)
    path.write_text(as_json(generation))
    return roles


def _let_the_file_decide(path: Path) -> None:
    """Change a copied tokenizer_config.json so that transformers makes the ids of tokenizer.json.

    By the name of one of its own classes (LlamaTokenizer, Qwen2Tokenizer, GPT2Tokenizer)
    transformers 5 takes vocabulary and merges alone from tokenizer.json and splits text by the
    rules of the class: not the ids that the model was trained on. An auto_map names code, which no
    export has. The class of that name also leaves to tokenizer.json what is put around a text,
    whatever add_bos_token says."""
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    # Beside some keys of this file transformers does not read special_tokens_map.json.
    roles = read_roles(path.parent)
    missing = {}
    for role in ("bos_token", "eos_token"):
        token = roles.get(role)
        if token is not None and settings.get(role) is None:
            missing[role] = token["content"] if isinstance(token, dict) else token
    changed = {key: value for key, value in (settings | missing).items() if key != "auto_map"}
    changed["tokenizer_class"] = FILE_CLASS
    if changed != settings:
        path.write_text(as_json(changed), encoding="utf-8")


def _tokenizer_files(tokenizer: Tokenizer, n_ctx: int) -> dict[str, str]:
    """Name of each file -> its content, for gpt2 and byte."""
    letters, roles = gpt2.BYTE_LETTERS, {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    if tokenizer.kind == "gpt2":
        merges = gpt2.vocab_bpe().decode()
        tokens = ["".join(letters[b] for b in token) for token in gpt2.token_bytes()]
    else:
        merges, tokens = "#version: 0.2\n", [letters[b] for b in range(256)]
    vocab = {token: i for i, token in enumerate([*tokens, END_OF_TEXT])}
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {
        "id": tokenizer.eot,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    rules = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        # Bytes need no pieces: nothing is ever merged.
        "pre_tokenizer": {**pieces, "use_regex": tokenizer.kind == "gpt2"},
        "post_processor": {**pieces, "trim_offsets": False, "use_regex": True},
        "decoder": {**pieces, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges.splitlines()[1:],
        },
    }
    kind = (
        {"tokenizer_class": "GPT2Tokenizer", "unk_token": END_OF_TEXT}
        if tokenizer.kind == "gpt2"
        else {
            # Else transformers 4 gives token_type_ids too, which generate() refuses.
            "tokenizer_class": FILE_CLASS,
            "model_input_names": ["input_ids", "attention_mask"],
        }
    )
    settings = {
        **kind,
        **roles,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": n_ctx,
        "added_tokens_decoder": {
            str(tokenizer.eot): {k: v for k, v in special.items() if k != "id"}
        },
    }
    return {
        "tokenizer.json": json.dumps(rules, ensure_ascii=False),
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": merges,
        "tokenizer_config.json": as_json(settings),
        "special_tokens_map.json": as_json(roles),
    }
