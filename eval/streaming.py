"""Turn the tokens of continuations into text while they come."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from runtime.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"      # what an incomplete UTF-8 sequence decodes to


class Growing:
    """The text of tokens that come one by one: never a character that a later token may still complete.

    Only the last few tokens are decoded again: a decoder may treat the first token of all in its own way, so those told
    last stay before the new ones, and a long text costs no more a token than a short one. `prompt` is told already."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self.tokenizer, self.ids = tokenizer, list(prompt)
        self.start, self.told = 0, len(self.ids)        # ids[start:told] are told whole and decoded again, those before never
        self.shown = len(tokenizer.decode(self.ids)) if self.ids else 0     # characters of ids[start:] that are told

    def add(self, token: int) -> str:
        """What can be told of the text that has not been told."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids[self.start:])
        whole = text.rstrip(REPLACEMENT)
        new = whole[self.shown:]
        if new and whole == text:
            self.start, self.told = self.told, len(self.ids)
            self.shown = len(self.tokenizer.decode(self.ids[self.start:]))
        else:
            self.shown = max(self.shown, len(whole))
        return new

    def rest(self) -> str:
        """What is left when no token follows: bytes that no character came of."""
        return self.tokenizer.decode(self.ids[self.start:])[self.shown:]


class Piece(NamedTuple):
    """What one of a request's n continuations has grown by."""
    row: int
    text: str
    end: str | None     # why nothing follows: "document" (the model ended it) or "limit" (tokens or the context are used up)


def pieces(steps: Iterator[torch.Tensor], tokenizer: Tokenizer, n: int, prompt: Sequence[int] = ()) -> Iterator[list[Piece]]:
    """`steps` are the next token of each of n rows; yields the pieces of one step, and last those that no step ended.

    They go on from `prompt`, which is no part of them: a decoder may say the first token of all without its blank."""
    rows = {row: Growing(tokenizer, prompt) for row in range(n)}
    for tokens in steps:
        tokens, new = tokens.tolist(), []
        for row, growing in list(rows.items()):
            is_over = tokens[row] == tokenizer.eot
            new.append(Piece(row, growing.rest(), "document") if is_over else Piece(row, growing.add(tokens[row]), None))
            if is_over:
                del rows[row]
        yield new
    yield [Piece(row, growing.rest(), "limit") for row, growing in rows.items()]
