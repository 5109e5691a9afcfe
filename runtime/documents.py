"""Let a token attend to its own document alone: data.document_mask=true.

A window of training tokens holds the end of one document, whole documents, and the beginning of
another. The number of each token's document comes with the batch; a mask made of these numbers
replaces the causal mask, in the training step alone. Validation, probes and evaluation read windows
whole, as without the mask, so that losses stay comparable between runs. Positions are counted
through the whole window: RoPE sees distances only.

Compiled on a GPU, attention is FlexAttention, which skips blocks of 128 x 128 that no document
reaches. Its shapes do not depend on the documents, so nothing is compiled again and nothing waits
for the GPU. torch's varlen attention takes a list of documents, whose length differs from batch to
batch. Elsewhere
the mask is a tensor of (B, 1, T, T)."""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from model import Attention
from runtime.config import Config


def number_documents(tokens: np.ndarray, border: np.uint32) -> np.ndarray:
    """The number of each token's document within its window, from 0, (T,) int32, of tokens (T,) as
    they lie in a shard. A `border`, Index.border(), begins a document and belongs to it."""
    return np.cumsum(tokens == border, dtype=np.int32)


def uses_flex(config: Config, device: torch.device) -> bool:
    """Whether a run's masks are FlexAttention's. Not without compilation: eager FlexAttention holds
    all scores in memory."""
    is_compiled = bool(config.parallel.compile)
    return config.data.document_mask and is_compiled and device.type == "cuda"


def attention_mask(documents: torch.Tensor, is_flex: bool) -> Any:
    """What each token attends to: the tokens of its own document up to itself. documents (B, T)
    int32 -> FlexAttention's BlockMask, or (B, 1, T, T) bool."""
    B, T = documents.shape
    if not is_flex:
        is_same = documents[:, None, :, None] == documents[:, None, None, :]  # (B, 1, T, T)
        return is_same.tril()

    def is_visible(
        b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (query >= key) & (documents[b, query] == documents[b, key])

    make = _compiled_block_mask() if documents.is_cuda else _block_mask()
    return make(is_visible, B, None, T, T, device=documents.device)


def _block_mask() -> Any:
    # imported where it is used: it takes a second
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask


@cache
def _compiled_block_mask() -> Any:
    """create_block_mask(), compiled: eager, it would write (B, T, T) at each call."""
    return torch.compile(_block_mask(), dynamic=False)


class FlexAttention(Attention):
    """Takes the place of an Attention, with its Linears and norms. Runs FlexAttention where the
    mask is a BlockMask."""

    def __init__(self, attention: Attention):
        nn.Module.__init__(self)  # Attention's would make new ones
        vars(self).update(vars(attention))  # a variant's own too

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        mask = options["attn_mask"]
        if not isinstance(mask, BlockMask):
            return super().attend(q, k, v, **options)
        y = flex_attention(q, k, v, block_mask=mask, enable_gqa=options["enable_gqa"])
        assert isinstance(y, torch.Tensor)  # it returns more where more is asked for
        return y


def use_flex(model: nn.Module) -> None:
    """Replace every Attention; weights and names stay."""
    for name, module in list(model.named_modules()):
        if type(module) is Attention:
            model.set_submodule(name, FlexAttention(module))
