"""Turn text into token ids that fit 16 bits.

Two tokenizers, both offline: `gpt2` is GPT-2's byte-pair encoding run by tiktoken on merges that lie beside this file,
`byte` is the 256 byte values. In both the last id is the end-of-text token, which stands before every document.
"""

import base64
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path

import numpy as np

VOCAB_SIZE = {"gpt2": 50257, "byte": 257}

# The 50,000 merges of GPT-2 (OpenAI 2019, modified MIT licence) as pairs of token ids: four byte planes, deflated
# (all low bytes of the left ids, their high bytes, then the same of the right ids).
MERGES_FILE = Path(__file__).with_name("gpt2_merges.bin")
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"   # OpenAI's vocab.bpe
END_OF_TEXT = "<|endoftext|>"

# Radford et al. 2019; the possessive quantifiers of tiktoken's own copy find the same pieces without backtracking.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# tiktoken's engine keeps a note per character of a run of white space that text follows, and gives up at a million (0.14).
LONG_RUN = 500_000
WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"     # its \s; Python's holds four more


@dataclass(frozen=True)
class Tokenizer:
    """Built by load_tokenizer()."""
    name: str
    sha256: str                                     # identity of the rules; the shards' index.json carries it
    _encode: Callable[[str], np.ndarray]            # text without lone surrogates -> uint16 ids
    _decode: Callable[[list[int]], bytes]

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE[self.name]

    @property
    def eot(self) -> int:
        """Id of the end-of-text token."""
        return self.vocab_size - 1

    def encode(self, text: str) -> np.ndarray:
        """The uint16 ids of text alone; text that spells <|endoftext|> stays text. Input is cleaned by clean()."""
        return self._encode(clean(text))

    def encode_document(self, text: str) -> np.ndarray:
        """The uint16 ids of one document as it lies in a shard: end-of-text first, then the text."""
        return np.concatenate([np.array([self.eot], np.uint16), self.encode(text)])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD, the end-of-text token its usual spelling.

        Raises ValueError for an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"{self.name} has ids 0 to {self.vocab_size - 1}, but was given {min(ids)} to {max(ids)}")
        return self._decode(ids).decode("utf-8", errors="replace")


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: "gpt2" or "byte". Raises ValueError: unknown name, a damaged merges file."""
    if name == "byte":
        rules = b"one id per byte, then 256 for end of text"
        return Tokenizer(name, sha256(rules).hexdigest(), _encode_bytes, _decode_bytes)
    if name != "gpt2":
        raise ValueError(f"there is no tokenizer {name!r}; there are: {', '.join(VOCAB_SIZE)}")
    import tiktoken
    digest = sha256(vocab_bpe()).hexdigest()
    if digest != VOCAB_BPE_SHA256:
        raise ValueError(f"{MERGES_FILE} is damaged: it holds other merges than GPT-2's; "
                         f"restore it with `git checkout {MERGES_FILE.name}` in its folder")
    ranks = {token: rank for rank, token in enumerate(token_bytes())}
    gpt2 = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256},
                             explicit_n_vocab=VOCAB_SIZE["gpt2"])

    def encode(text: str) -> np.ndarray:
        return np.concatenate([gpt2.encode_to_numpy(part, disallowed_special=()) for part in _cut(text)]).astype(np.uint16)

    return Tokenizer(name, digest, encode, gpt2.decode_bytes)


def _cut(text: str) -> list[str]:
    """The text in parts that give the ids of the whole: cut before the last character of a run of white space that is too
    long for the pattern's engine, where the pattern itself begins a new piece."""
    if len(text) < LONG_RUN:
        return [text]
    runs = (match.span() for match in re.finditer(f"[{WHITE_SPACE}]{{2,}}", text))
    cuts = [0, *(end - 1 for start, end in runs if end - start >= LONG_RUN and end < len(text)), len(text)]
    return [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]


def load_gigatoken() -> Callable[[str], np.ndarray]:
    """gpt2's ids of a text that has a UTF-8 form, uint32, by the optional package gigatoken, which is several times quicker
    than tiktoken. It is young, so what it says must be held against load_tokenizer("gpt2"). Raises ImportError."""
    import gigatoken
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.ranks"
        path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(token_bytes())))
        # With the special tokens that it knows by itself, text that spells <|endoftext|> would become the token.
        return gigatoken.Tokenizer.from_tiktoken(str(path), pretokenizer="gpt2", special_tokens={}).encode


def clean(text: str) -> str:
    """The text as it is hashed, counted and tokenised: all of it has a UTF-8 form.

    Python strings may hold halves of UTF-16 pairs (JSON's \\ud83d); a pair becomes its character, a lone half U+FFFD.
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# ------------------------------------------------------------------------------------------------------- GPT-2's merges

def vocab_bpe() -> bytes:
    """OpenAI's vocab.bpe, byte for byte: one merge a line, bytes written as printable characters."""
    letters = _byte_letters()
    tokens = ["".join(map(letters.__getitem__, token)) for token in token_bytes()]
    lines = [f"{tokens[left]} {tokens[right]}" for left, right in _merges().tolist()]
    return "\n".join(["#version: 0.2", *lines, ""]).encode()


def token_bytes() -> list[bytes]:
    """The bytes of gpt2's ids 0 to 50255: single bytes in GPT-2's order, then each merge's two parts joined."""
    tokens = [bytes([b]) for b in _byte_letters()]
    for left, right in _merges().tolist():
        tokens.append(tokens[left] + tokens[right])
    return tokens


def _merges() -> np.ndarray:
    """(50000, 2) int: ids of the left and right part of each merge, in order of rank."""
    try:
        planes = np.frombuffer(zlib.decompress(MERGES_FILE.read_bytes()), np.uint8).reshape(4, -1).astype(int)
        merges = np.stack([planes[0] + 256 * planes[1], planes[2] + 256 * planes[3]], axis=1)
    except (OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{MERGES_FILE} cannot be read ({error}): "
                         f"restore it with `git checkout {MERGES_FILE.name}` in its folder") from error
    if (merges >= 256 + np.arange(len(merges))[:, None]).any():
        raise ValueError(f"{MERGES_FILE} is damaged: a merge names a later token; "
                         f"restore it with `git checkout {MERGES_FILE.name}` in its folder")
    return merges


def _byte_letters() -> dict[int, str]:
    """Each byte's letter in vocab.bpe, in the order of GPT-2's ids 0 to 255.

    Printable Latin-1 bytes stand for themselves and come first; the others borrow the letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(letter) for b, letter in chain(zip(printable, printable, strict=True),
                                                  zip(others, range(256, 256 + len(others)), strict=True))}


# ---------------------------------------------------------------------------------------------------------------- bytes

def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)


def _decode_bytes(ids: list[int]) -> bytes:
    return b"".join(END_OF_TEXT.encode() if i == 256 else bytes([i]) for i in ids)
