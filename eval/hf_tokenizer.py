"""Write a run's tokenizer as the files that Hugging Face reads.

A built-in tokenizer becomes tokenizer.json (for the package tokenizers), vocab.json and merges.txt (for readers of GPT-2's
own format) and the tokens' roles; an imported one is copied. The ids of every text are those of runtime/tokenizer.py but for
one thing: a text that spells a special token is text here, and the token there (unless split_special_tokens=True is set).
"""

import json
import shutil
from pathlib import Path

from runtime.cli import UserError
from runtime.tokenizer import END_OF_TEXT, FOLDER_FILES, Tokenizer, byte_letters, token_bytes, vocab_bpe

GENERATION = "generation_config.json"
ROLES = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}


def write_tokenizer(tokenizer: Tokenizer, n_ctx: int, vocab_padded: int, folder: Path) -> dict[str, int]:
    """Put the tokenizer's files and generation_config.json into `folder`; returns the roles that config.json repeats.

    vocab_padded: rows of the embedding. The ids behind the tokenizer's own are never generated, there as in eval/sample.py.
    Raises UserError where an imported tokenizer's generation_config.json cannot be read.
    """
    if tokenizer.kind == "folder":
        for name in FOLDER_FILES:
            if (Path(tokenizer.name) / name).is_file():
                shutil.copyfile(Path(tokenizer.name) / name, folder / name)
    else:
        for name, content in _files(tokenizer, n_ctx).items():
            (folder / name).write_text(content, encoding="utf-8")
    roles = {"bos_token_id": tokenizer.start, "eos_token_id": tokenizer.eot}
    path = folder / GENERATION
    generation = _read_generation(path) if path.is_file() else dict(roles)
    if unused := set(range(tokenizer.vocab_size, vocab_padded)):
        generation["suppress_tokens"] = sorted(unused | set(generation.get("suppress_tokens") or []))
    path.write_text(as_json(generation))
    return roles


def _read_generation(path: Path) -> dict:
    """What came with an imported tokenizer. Raises UserError."""
    try:
        generation = json.loads(path.read_bytes())
        if all(type(i) is int for i in generation.get("suppress_tokens") or []):
            return generation
        reason = "suppress_tokens must be a list of ids"
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        reason = str(error)
    raise UserError(f"{path.name} of the run's tokenizer cannot be read ({reason}): repair it, or remove it")


def as_json(content) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _files(tokenizer: Tokenizer, n_ctx: int) -> dict[str, str]:
    """Name of each file -> its content, for gpt2 and byte."""
    letters = byte_letters()
    if tokenizer.kind == "gpt2":
        merges = vocab_bpe().decode()
        tokens = ["".join(letters[b] for b in token) for token in token_bytes()]
    else:
        merges, tokens = "#version: 0.2\n", [letters[b] for b in range(256)]
    vocab = {token: i for i, token in enumerate([*tokens, END_OF_TEXT])}
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {"id": tokenizer.eot, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}
    rules = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None,
        # Bytes need no pieces: nothing is ever merged.
        "pre_tokenizer": {**pieces, "use_regex": tokenizer.kind == "gpt2"},
        "post_processor": {**pieces, "trim_offsets": False, "use_regex": True}, "decoder": {**pieces, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": merges.splitlines()[1:]},
    }
    kind = {"tokenizer_class": "GPT2Tokenizer", "unk_token": END_OF_TEXT} if tokenizer.kind == "gpt2" else {
        # Else transformers 4 gives token_type_ids too, which generate() refuses.
        "tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    settings = {**kind, **ROLES, "add_prefix_space": False, "clean_up_tokenization_spaces": False, "model_max_length": n_ctx,
                "added_tokens_decoder": {str(tokenizer.eot): {k: v for k, v in special.items() if k != "id"}}}
    return {"tokenizer.json": json.dumps(rules, ensure_ascii=False), "vocab.json": json.dumps(vocab, ensure_ascii=False),
            "merges.txt": merges, "tokenizer_config.json": as_json(settings), "special_tokens_map.json": as_json(ROLES)}
