"""Whether a tensor or a model is sharded, asked without importing what shards.

torch.distributed.tensor and torch.distributed.fsdp import 800 modules more than torch does, sympy
among them: a third of the CPU time of a start. A process that trains alone needs neither. What is
not imported has made no object yet, so the answer is exact."""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a part of one that lies on several ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp_module(model: Any) -> "TypeGuard[FSDPModule]":
    """Whether `model` was given to FSDP2's fully_shard()."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(model, module.FSDPModule)
