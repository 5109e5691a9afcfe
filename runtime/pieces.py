"""Encode text by pieces whose ids are known from before: the ids of the package `tokenizers` in a
third of its time.

A byte-level tokenizer with a rule of splitting, as Llama 3, Qwen and GPT-2 have it, cuts a text
into pieces, mostly words, and looks up each piece's ids by itself. The package spends most of its
time on the cutting. Here the module `regex` cuts, and a table holds the ids of the pieces that were
seen.

Both must cut alike. The pattern is taken only where it is made of parts that mean the same to both,
and a character only once both have cut texts around it alike, as their tables of characters may be
of different years. Whatever is not known to be equal is left to the package."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain, islice

import numpy as np

from runtime.letters import BYTE_LETTERS

GPT2_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What a pattern may be made of: classes of characters, letters, groups, a look ahead, repetitions.
ATOM = r"\\p\{[A-Z][a-z]?\}|\\[sSrnt]|[A-Za-z' /]"
SAFE_PATTERN = re.compile(
    rf"(?:{ATOM}|\[\^?(?:{ATOM})+\]|\(\?i:|\(\?:|\(\?!|\(|\)|\||[?*+]|\{{\d+(?:,\d*)?\}}(?![?+]))+"
)
PROBE = (
    "a{0}a {0}{0} 1{0}1!{0}! {0}a\n{0}\n '{0}a 'r{0} 'v{0} 'l{0} '{0}e '{0}l  {0}  \t{0}A{0}\r\n"
)
BLOCK = 1 << 16  # pieces at a time
LONGEST = 2048  # characters of a piece; the package is better with longer ones
KEPT_CHARS = 64  # of a piece in the table
KEPT_PIECES = 400_000  # in the table: 100 MB


def build_encoder(
    fast, whole: Callable[[str], list[int]]
) -> Callable[[str], np.ndarray | list[int]]:
    """An encoder with the ids of `whole`, which is taken as it is where the tokenizer's rules are
    others.

    fast: tokenizers.Tokenizer; whole: what encodes a text by it, special tokens as text.
    """
    pattern = _pattern(_state(fast.pre_tokenizer))
    normalizer = _state(fast.normalizer)
    spelled = [token for token in fast.get_added_tokens_decoder().values() if not token.special]
    is_normal = not any(token.normalized for token in spelled)
    if (
        pattern is None
        or normalizer not in (None, {"type": "NFC"})
        or getattr(fast.model, "dropout", None)
    ):
        return whole
    # They are looked for in the text before it is cut.
    if len(spelled) > 64 or not is_normal or not SAFE_PATTERN.fullmatch(pattern):
        return whole
    import regex  # here: a GPU lent bare, which trains on random tokens, has none

    contents = [token.content for token in spelled]
    encoder = _PieceEncoder(fast, whole, regex.compile(pattern), contents, normalizer is not None)
    return encoder if encoder.knows(set(map(chr, range(128)))) else whole


def _state(part) -> dict | None:
    """A part of a tokenizer as tokenizer.json has it, with all defaults."""
    return None if part is None else json.loads(part.__getstate__())


def _pattern(pre_tokenizer: dict | None) -> str | None:
    """The pattern whose matches are the pieces, None where there is more to it."""
    parts = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    *splits, last = parts
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not splits:
        return GPT2_PIECES if last["use_regex"] else None
    if len(splits) > 1 or last["use_regex"]:
        return None
    return _pattern_of_split(splits[0])


def _pattern_of_split(split: dict) -> str | None:
    if split.get("type") != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return None
    return split["pattern"].get("Regex")


class _PieceEncoder:
    def __init__(self, fast, whole: Callable, pattern, spelled: list[str], is_nfc: bool):
        self._fast, self._whole, self._pattern, self._spelled, self._is_nfc = (
            fast,
            whole,
            pattern,
            spelled,
            is_nfc,
        )
        self._known: set[str] = set()  # characters around which both cut alike
        self._strange: set[str] = set()  # characters around which they do not
        self._ids = _IdsOfPieces(fast.model)

    def __call__(self, text: str) -> np.ndarray | list[int]:
        """The ids of a text without lone surrogates."""
        normal = text
        if self._is_nfc and not text.isascii():
            normal = self._fast.normalizer.normalize_str(text)
        if any(token in text for token in self._spelled) or not self._is_known(normal):
            return self._whole(text)
        blocks, length = [np.empty(0, np.uint32)], 0
        for pieces in self._pieces(normal):
            lengths = list(map(len, pieces))
            if max(lengths) > LONGEST:
                return self._whole(text)
            length += sum(lengths)
            blocks.append(
                np.fromiter(chain.from_iterable(map(self._ids.__getitem__, pieces)), np.uint32)
            )
        if length != len(normal):  # the pattern leaves something between its matches
            return self._whole(text)
        if len(self._ids) > KEPT_PIECES:
            self._ids.clear()
        return np.concatenate(blocks)

    def _pieces(self, text: str) -> Iterator[list[str]]:
        matches = self._pattern.finditer(text)
        while block := [match.group() for match in islice(matches, BLOCK)]:
            yield block

    def _is_known(self, text: str) -> bool:
        if text.isascii():
            return True
        characters = set(text) - self._known
        return characters.isdisjoint(self._strange) and self.knows(characters)

    def knows(self, characters: set[str]) -> bool:
        """Whether both cut alike around each of the characters, which are then known."""
        if self._cuts_alike(sorted(characters)):
            self._known |= characters
            return True
        alike = {character for character in characters if self._cuts_alike([character])}
        self._known |= alike
        self._strange |= characters - alike
        return alike == characters

    def _cuts_alike(self, characters: list[str]) -> bool:
        text = "".join(map(PROBE.format, characters))
        pieces_of_package = [
            text[first:last] for _, (first, last) in self._fast.pre_tokenizer.pre_tokenize_str(text)
        ]
        return self._pattern.findall(text) == pieces_of_package


class _IdsOfPieces(dict):
    """Piece -> its ids, by the tokenizer's model where it was not seen before."""

    def __init__(self, model):
        self._model = model

    def __missing__(self, piece: str) -> tuple[int, ...]:
        letters = "".join([BYTE_LETTERS[byte] for byte in piece.encode()])
        ids = tuple(token.id for token in self._model.tokenize(letters))
        if len(piece) <= KEPT_CHARS:
            self[piece] = ids
        return ids
