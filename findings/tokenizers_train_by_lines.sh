#!/usr/bin/env bash
# Tokenizer.train(files) of the package tokenizers never learns a token that crosses the end of a line.
#
# tokenizers 0.23.3. train() reads files line by line and makes each line a text of its own, its line end included. So
# "\n\n", a line end with the indent behind it and their like, of which code consists, cannot be learnt, whatever the
# pre-tokenizer allows. train_from_iterator() with the file's whole text learns them, from the same bytes.
#
# What is run: a byte-level BPE of 320 tokens on one file of Python code, once by its path and once by its text.
#
# Output seen:
#   by path: 1350 tokens for the text; with a line end: ['\n']
#   by text: 1149 tokens for the text; with a line end: ['\n', '\n\n', '\n  ', '\n   ', '\n       ']
#
# Remedy: train_from_iterator() with whole documents.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tokenizers==0.23.3

cd "$work"
"$work/venv/bin/python" - <<'PY'
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

text = 50 * "def f(x):\n    return x\n\n\nclass A:\n    def g(self):\n        pass\n\n"
Path("code.py").write_text(text)


def trained(by_path: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    if by_path:
        tokenizer.train(["code.py"], trainer)
    else:
        tokenizer.train_from_iterator([text], trainer)
    return tokenizer


counts, crossing = [], []
for name, by_path in (("by path", True), ("by text", False)):
    tokenizer = trained(by_path)
    tokens = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    with_line_end = sorted(token for token in tokens if "\n" in token)
    counts.append(len(tokenizer.encode(text).ids))
    crossing.append(with_line_end)
    print(f"{name}: {counts[-1]} tokens for the text; with a line end: {with_line_end}")
sys.exit(0 if crossing[0] == ["\n"] and len(crossing[1]) > 1 and counts[0] > counts[1] else 1)
PY
