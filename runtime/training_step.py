"""The parts of a training step that train.py, the trials of data.micro_batch=auto and bench/ share;
train.py's loop has them in their order."""

import torch
import torch.nn as nn

from fp8.precision import Precision
from runtime import optim, parallel

Optimizer = torch.optim.AdamW | optim.MuonAdamW


def forward_backward(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss_scale: float, z_weight: float = 0.0
) -> torch.Tensor:
    """Add the gradients of a micro-batch, x and y (B, T), of the loss times `loss_scale`; returns
    its summed loss, (1,), nats. With a `z_weight` the loss that is trained on has a z-loss more,
    and its sum, weighted, is returned beside the other, which is without it: (2,)."""
    if not z_weight:
        micro_loss = model(x, y).sum()
        (micro_loss * loss_scale).backward()
        return micro_loss.detach()[None]
    cross_entropy, squares = model(x, y, with_z=True).sum(dim=0)
    z_loss = z_weight * squares
    ((cross_entropy + z_loss) * loss_scale).backward()
    return torch.stack((cross_entropy, z_loss)).detach()


def update_weights(optimizer: Optimizer, precision: Precision) -> None:
    """One update, and the weights' copies after it."""
    optimizer.step()
    precision.after_update()


def end_unjudged_step(
    model: nn.Module, optimizer: Optimizer, precision: Precision, max_norm: float
) -> None:
    """What follows a step's passes where no guard judges them: clip, update, free gradients."""
    parallel.clip_gradients(model, max_norm)
    precision.after_passes()
    update_weights(optimizer, precision)
    precision.zero_gradients()
