"""Build what a run trains: model, optimizer, by one order that train.py and everything that measures it share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model import GPT
from runtime import fp8, optim, parallel
from runtime.config import Config
from runtime.parallel import World

COMPUTE_DTYPE = torch.bfloat16      # of activations in both arms; weights, gradients and moments are fp32


@dataclass
class Built:
    """A model in memory whose weights and buffers hold nothing yet: model.init_weights(seed, assign) or a checkpoint fills them,
    then fp8.weights_changed(model) is due."""
    model: GPT
    optimizer: torch.optim.AdamW
    assign: Callable[[torch.Tensor, torch.Tensor], None]    # gives a parameter, sharded or not, its full value
    layers: list[fp8.Layer]         # the verdict on every Linear
    counts: dict[str, int]          # GPT.counts()
    loss_scale: float               # what a micro-batch's summed loss is multiplied by before its backward pass
    flags: list[str]                # lines for people: the global switches that were set


def build(config: Config, world: World) -> Built:
    """Meta device first, so that no rank ever holds the whole model unsharded: swap the Linears, shard, compile, then memory.

    Raises ConfigError where fp8 or parallel cannot be had on this model or machine."""
    with torch.device("meta"):
        model = GPT(config.model, COMPUTE_DTYPE)
    loss_scale = world.size / config.data.tokens_per_step   # mean over the step's tokens; FSDP averages over ranks, so x size
    layers = fp8.convert(model, config.fp8, loss_scale, world.device.type)
    counts = model.counts()
    flags = parallel.set_torch_flags(config, world, fp8.by_layer(layers).values())
    if config.parallel.recompute:
        parallel.recompute(model)
    parallel.shard(model, world, COMPUTE_DTYPE, config.parallel.reshard)
    if config.parallel.compile:
        parallel.compile_model(model, world)
    assign = parallel.materialise(model, world)
    optimizer = optim.build_optimizer(model, config.optim)
    optim.fill_state(optimizer)
    return Built(model, optimizer, assign, layers, counts, loss_scale, flags)
