"""Reach the fp32 shards of weights that FSDP2 gathers as float8.

With fp8.all_gather=true torchao wraps each converted weight in a tensor of its own kind, and FSDP2 asks that one what to
send: the shard as float8, half the bytes of BF16. Everything but the gathering is about the shard itself, found here:
a checkpoint (the wrapper would need torchao to be read), a statistic of the weight, an evaluation in BF16.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def is_wrapped(weight: torch.Tensor) -> bool:
    """Whether `weight`, sharded or not yet, will be gathered as float8."""
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    # By name: a BF16 run must not import torchao to find out that it wraps nothing.
    return type(local).__name__ == "WeightWithDynamicFloat8CastTensor"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a DTensor of an ordinary tensor; what is not wrapped, or not sharded, comes back as it is."""
    if not (isinstance(tensor, DTensor) and is_wrapped(tensor)):
        return tensor
    return DTensor.from_local(tensor._local_tensor._tensor.detach(), tensor.device_mesh, tensor.placements, run_check=False,
                              shape=tensor.shape, stride=tensor.stride())


def precompute_scales(model: nn.Module) -> None:
    """The scales of all wrapped weights, by one all-reduce; due whenever weights have changed, between two passes.

    Without them each gathering starts with an all-reduce of its own; with those of other weights it sends nonsense."""
    if any(is_wrapped(p) for p in model.parameters()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
        precompute_float8_dynamic_scale_for_fsdp(model)


@torch.no_grad()
def full_weight(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The whole of a wrapped weight in `dtype`, cast before it is sent; all ranks must call this together."""
    return plain(module.weight).to(dtype).full_tensor()


def reshard(model: nn.Module) -> None:
    """Drop what FSDP2 holds gathered. A forward pass without a backward one leaves the root's weights gathered, and with
    parallel.reshard=false every block's: whoever changes the shards between two passes must call this, or the next forward
    pass runs with the weights of before."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_shards(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Note at each of `modules` of `model` with a wrapped weight where its own fp32 shard is; returns these modules."""
    reshard(model)      # only shards lead to the fp32 values
    wrapped = [module for module in modules if is_wrapped(module.weight)]
    for module in wrapped:
        module.shard = plain(module.weight)
    return wrapped


class GatheredLinear(nn.Linear):
    """A Linear without bias that gathers `shard` in the dtype of its input, for evaluation in BF16: FSDP2 gathers float8."""
    shard: DTensor

    def forward(self, x):
        return F.linear(x, self.shard.to(x.dtype).full_tensor())
