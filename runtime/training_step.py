"""The parts of a training step that train.py, the trials of data.micro_batch=auto and bench/ share;
train.py's loop has them in their order."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from fp8.precision import Precision
from runtime import optim, parallel
from runtime.parallel import World


def forward_backward(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    loss_scale: float,
    z_weight: float = 0.0,
    mask: Any = None,
) -> torch.Tensor:
    """Forward and backward pass of a micro-batch, x and y (B, T): adds the gradients of the loss
    times `loss_scale`, and returns the summed cross-entropy, (1,), nats. With a `z_weight` the
    z-loss is added to the loss, and its weighted sum is returned beside the cross-entropy: (2,).
    mask: made by runtime/documents.py; None for plain causal attention."""
    masked = {} if mask is None else {"mask": mask}
    if not z_weight:
        micro_loss = model(x, y, **masked).sum()
        (micro_loss * loss_scale).backward()
        return micro_loss.detach()[None]
    cross_entropy, squares = model(x, y, with_z=True, **masked).sum(dim=0)
    z_loss = z_weight * squares
    ((cross_entropy + z_loss) * loss_scale).backward()
    return torch.stack((cross_entropy, z_loss)).detach()


class LayerGradients:
    """Gradient norms by layer, for a guard that judges them: each block, the embedding, the last
    norm, and the head where it is not tied. No layer unless `is_on`."""

    def __init__(self, model: nn.Module, world: World, is_on: bool):
        self._weights = list(model.parameters()) if is_on else []
        layer_of = [_layer_of(name) for name, _ in model.named_parameters()] if is_on else []
        self.names = list(dict.fromkeys(layer_of))
        belongs = [[layer == name for layer in layer_of] for name in self.names]
        self._belongs = torch.tensor(belongs, device=world.device)  # (layers, weights)
        self._device = world.device
        # the number of ranks that hold the same gradient
        self._copies = world.mesh["replicate"].size() if world.mesh is not None else 1

    @torch.no_grad()
    def squares(self) -> torch.Tensor:
        """This rank's part of the squared gradient norm of each layer, (layers,) fp32: their sum
        over all ranks is the squared norm."""
        if not self._weights:
            return torch.zeros(0, device=self._device)
        norms = torch._foreach_norm([optim.local(p.grad) for p in self._weights])
        squares = torch.stack(norms).square() / self._copies  # (weights,)
        return torch.where(self._belongs, squares, 0.0).sum(dim=1)

    def named(self, norms: list[float]) -> dict[str, float]:
        """Layer -> its norm."""
        return dict(zip(self.names, norms, strict=True))


def _layer_of(name: str) -> str:
    """The layer of a weight: layers.3 for layers.3.mlp.down.weight, wte for wte.weight."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "layers" else 1])


@dataclass(frozen=True)
class StepNumbers:
    """What the host reads of a step, equal on all ranks."""

    loss: float  # mean over the targets of all ranks, nats per token; NaN where there is none
    z_loss: float | None  # weighted, mean over the same targets; None without optim.z_loss
    grad_norm: float  # global L2 norm, before clipping
    layer_norms: list[float]  # the same of each layer; empty without guard.layers
    n_saturated: int  # tensors beyond their delayed FP8 scale
    is_stopping: bool  # a rank was asked to stop


def read_numbers(
    loss_sums: torch.Tensor,
    targets: int,
    is_stopping: bool,
    squares: torch.Tensor,
    grad_norm: torch.Tensor,
    n_saturated: torch.Tensor,
    world: World,
) -> StepNumbers:
    """Sum over the ranks what each of them has counted, and wait once for the device.

    loss_sums (1,) or (2,) as forward_backward() returns them, `squares` (layers,) of this rank;
    `targets` of all ranks; grad_norm () and n_saturated (), which all ranks share."""
    stops = torch.full_like(loss_sums[:1], is_stopping)
    sums = parallel.all_sum(torch.cat((loss_sums, stops, squares)), world)
    *numbers, norm, saturated = torch.cat((sums, torch.stack((grad_norm, n_saturated)))).tolist()
    n_losses = len(loss_sums)
    means = [loss / targets if targets else math.nan for loss in numbers[:n_losses]]
    return StepNumbers(
        loss=means[0],
        z_loss=means[1] if n_losses == 2 else None,
        grad_norm=norm,
        layer_norms=[math.sqrt(square) for square in numbers[n_losses + 1 :]],
        n_saturated=int(saturated),
        is_stopping=numbers[n_losses] > 0,
    )


def update_weights(optimizer: optim.Optimizer, precision: Precision) -> None:
    """One update, and the weights' copies after it."""
    optimizer.step()
    precision.after_update()


def end_unjudged_step(
    model: nn.Module, optimizer: optim.Optimizer, precision: Precision, max_norm: float
) -> None:
    """What follows a step's passes where no guard judges them: clip, update, free gradients."""
    parallel.clip_gradients(model, max_norm)
    precision.after_passes()
    update_weights(optimizer, precision)
    precision.zero_gradients()
