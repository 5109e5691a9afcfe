"""FP8 under FSDP2: weights that are gathered as float8, and maxima over ranks."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from lib.sharding import is_dtensor, is_fsdp_module


def is_wrapped(weight: torch.Tensor) -> bool:
    """Whether `weight`, sharded or not yet, will be gathered as float8."""
    local = weight._local_tensor if is_dtensor(weight) else weight
    # by name: a BF16 run must not import torchao
    return type(local).__name__ == "WeightWithDynamicFloat8CastTensor"


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded wrapped weight as a DTensor of plain fp32 on the same memory; any other tensor
    unchanged."""
    if not (is_dtensor(tensor) and is_wrapped(tensor)):
        return tensor
    from torch.distributed.tensor import DTensor

    wrapper: Any = tensor._local_tensor
    return DTensor.from_local(
        wrapper._tensor.detach(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 holds gathered, as a forward pass alone leaves the root's and
    with parallel.reshard=false every block's: before shards are changed, or the next forward pass
    would use the old weights."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()


def max_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The largest of all ranks, of each of `values` (n,); NaN where it is NaN on any rank, as on
    one process. On the device.

    gloo's own MAX compares, and a NaN compares as false: it is lost or kept by its rank, and can
    hide the maximum beside it."""
    is_nan = values.isnan()
    values_and_flags = torch.stack(
        (values.masked_fill(is_nan, -math.inf), is_nan.to(values.dtype))
    )  # (2, n)
    dist.all_reduce(values_and_flags, dist.ReduceOp.MAX)
    largest, has_nan = values_and_flags
    return largest.masked_fill(has_nan > 0, math.nan)
