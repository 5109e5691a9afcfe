"""Turn batches of documents into tokens, one process's way.

A document of prompt and response becomes prefix, prompt, response; LOSS_MASK_BIT marks what no model is taught to foretell: all
but the prefix's first token, with which the document before ends, and the response. The two are encoded by themselves, so
no token reaches over the border.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

import numpy as np

from prepare.source import DOCUMENT, Batch, Encoded
from runtime.shards import LOSS_MASK_BIT
from runtime.tokenizer import load_tokenizer

BORDER = b"\0"      # between prompt and response where the two are hashed as one


class Grams(Protocol):
    """Texts that no training document may hold a stretch of."""
    def found_in(self, text: str) -> bool: ...


class Encoder:
    """What one process of a pool does: encode a batch, or call a function with an argument.

    Raises UserError: no such tokenizer."""

    def __init__(self, tokenizer: str, grams: Grams | None):
        self._tokenizer, self._grams = load_tokenizer(tokenizer), grams
        self._prefix = np.array(self._tokenizer.prefix, self._tokenizer.dtype)

    def do(self, function: Callable | None, argument):
        return self.encode(argument) if function is None else function(argument)

    def encode(self, batch: Batch) -> Encoded:
        ids, documents, start = [np.empty(0, self._tokenizer.dtype if batch.heads is None else "<u4")], [], 0
        for i, end in enumerate(batch.ends.tolist()):
            data, start = batch.text[start:end], end
            if batch.heads is None:
                parts, row = self._encode_text(data)
            else:
                parts, row = self._encode_pair(data[:batch.heads[i]], data[batch.heads[i]:])
            ids += parts
            documents.append(row)
        return Encoded(np.concatenate(ids), np.array(documents, DOCUMENT), batch.rows, batch.read)

    def _encode_text(self, data: bytes) -> tuple[list[np.ndarray], tuple[int, int, int]]:
        """A document's tokens in parts, none where it is left out, and its row in the table."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode(errors="replace")
            data = text.encode()        # what is hashed is what is tokenised
        digest = _digest(data)
        if row := self._left_out(text, text, digest, len(data)):
            return [], row
        ids = self._tokenizer.encode(text)
        return [self._prefix, ids], (digest, len(self._prefix) + len(ids), len(data))

    def _encode_pair(self, head: bytes, tail: bytes) -> tuple[list[np.ndarray], tuple[int, int, int]]:
        """The same of a prompt and a response; a row without a response teaches nothing, so it counts as empty."""
        prompt, response, digest = head.decode(), tail.decode(), _digest(head + BORDER + tail)
        if row := self._left_out(response, f"{prompt} {response}", digest, len(tail)):
            return [], row
        context = np.concatenate([self._prefix[1:], self._tokenizer.encode(prompt)])
        parts = [self._prefix[:1], LOSS_MASK_BIT | context, self._tokenizer.encode(response)]
        return parts, (digest, sum(map(len, parts)), len(tail))

    def _left_out(self, learned: str, whole: str, digest: int, size: int) -> tuple[int, int, int] | None:
        """The row of an empty document or a contaminated one, None for one that stays."""
        if not learned or learned.isspace():
            return 0, 0, 0
        return (digest, 0, size) if self._grams is not None and self._grams.found_in(whole) else None


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
