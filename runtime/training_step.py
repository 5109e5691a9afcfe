"""The parts of a training step that train.py, the trials of data.micro_batch=auto and bench/ share;
train.py's loop has them in their order."""

from typing import Any

import torch
import torch.nn as nn

from fp8.precision import Precision
from runtime import optim, parallel

Optimizer = torch.optim.AdamW | optim.MuonAdamW


def forward_backward(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss_scale: float, mask: Any = None
) -> torch.Tensor:
    """Add the gradients of a micro-batch, x and y (B, T), of the loss times `loss_scale`; returns
    its summed loss, (), nats. mask: of runtime/documents.py, None for plain causal attention."""
    masked = {} if mask is None else {"mask": mask}
    micro_loss = model(x, y, **masked).sum()
    (micro_loss * loss_scale).backward()
    return micro_loss.detach()


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
