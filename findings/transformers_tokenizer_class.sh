#!/usr/bin/env bash
# transformers 5.23.0 ignores the split rule of tokenizer.json where tokenizer_config.json names one of the
# library's own classes.
#
# The script makes a byte-level tokenizer whose tokenizer.json cuts each digit off, and loads the folder by
# AutoTokenizer under three values of tokenizer_class. PreTrainedTokenizerFast gives the ids of the file.
# GPT2Tokenizer and Qwen2Tokenizer take vocabulary and merges from it and cut by the pattern of the class:
# the first keeps "12" together, the second cuts the blank off "1".
# The file's ids are those of the package tokenizers 0.23.3, which reads tokenizer.json itself.
#
# Output seen with transformers 5.23.0, tokenizers 0.23.3:
#   tokenizer.json itself      ['x', '1', '2', 'Ġ1', '2']
#   PreTrainedTokenizerFast    ['x', '1', '2', 'Ġ1', '2']  as the file
#   GPT2Tokenizer              ['x', '12', 'Ġ12']  NOT as the file
#   Qwen2Tokenizer             ['x', '1', '2', 'Ġ', '1', '2']  NOT as the file
#
# Ends with 1 if this changes, such as when a class follows the file.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6

cd "$work"
export HF_HUB_OFFLINE=1
"$work/venv/bin/python" - <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocab = {letter: i for i, letter in enumerate(letters)}
for token in ("12", "Ġ1", "Ġ12", "<end>"):
    vocab[token] = len(vocab)
file = Tokenizer(models.BPE(vocab, [("1", "2"), ("Ġ", "12"), ("Ġ", "1")]))
file.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(r" ?\d"), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
])
folder = Path("tokenizer")
folder.mkdir()
file.add_special_tokens(["<end>"])
file.save(str(folder / "tokenizer.json"))

text = "x12 12"
wanted = file.encode(text, add_special_tokens=False).tokens
print(f"{'tokenizer.json itself':26} {wanted}")
follows = {}
for name in ("PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"):
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "eos_token": "<end>"}))
    tokens = AutoTokenizer.from_pretrained(folder).tokenize(text)
    follows[name] = tokens == wanted
    print(f"{name:26} {tokens}  {'as the file' if follows[name] else 'NOT as the file'}")
expected = {"PreTrainedTokenizerFast": True, "GPT2Tokenizer": False, "Qwen2Tokenizer": False}
sys.exit(0 if follows == expected else 1)
PY
