"""Evaluation in BF16."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fp8.bf16_in_fp32 import LinearInFp32
from fp8.sharded import is_wrapped, reshard, unwrap
from model import Linear


@contextlib.contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Within the block, every Linear of `model` multiplies in BF16, from the same weights,
    uncompiled: a gap between two arms measured so is one between their weights. Classes are
    swapped: names, Parameters, sharding and hooks stay."""
    classes: dict[Any, type] = {
        module: type(module) for module in model.modules() if isinstance(module, nn.Linear)
    }
    reshard(model)  # gathered weights have lost their fp32 shards
    plain = LinearInFp32 if getattr(model, "is_in_fp32", False) else Linear
    for module in classes:
        module.__class__ = plain
        if is_wrapped(module.weight):  # FSDP2 would gather float8
            module.forward = partial(
                lambda shard, x: F.linear(x, shard.to(x.dtype).full_tensor()), unwrap(module.weight)
            )
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
            vars(module).pop("forward", None)
