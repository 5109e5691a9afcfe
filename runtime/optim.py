"""AdamW for pretraining: which parameters decay, the learning rate of each step, which runs may branch off another."""

import math

import torch
import torch.nn as nn

from runtime.cli import UserError
from runtime.config import Config, OptimConfig

# Keys in which a branch may differ from its parent, provided that their learning rates agree up to the branch point.
BRANCH_FREE = {"steps", "start_from", "optim.schedule", "optim.warmup_share", "optim.decay_share", "optim.min_lr_ratio"}


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW (1711.05101) with weight decay on matrices only, not on the norms' weights."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    # FP8 copies of weights are stale when Tensor._version has changed, which the fused update does not increment itself.
    optimizer.register_step_post_hook(lambda optimizer, *_: torch.autograd.graph.increment_version(
        [p for group in optimizer.param_groups for p in group["params"]]))
    return optimizer


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of update `step` (0-based) of `steps`.

    cosine  linear warm-up, then half a cosine from the peak down to min_lr_ratio of it (1608.03983)
    wsd     linear warm-up, stable at the peak, linear down to min_lr_ratio over the last decay_share (2404.06395)
    """
    warmup = config.warmup_steps(steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "cosine":
        down = 0.5 - 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
    else:
        decay = config.decay_steps(steps)
        down = max(0.0, (step + 1 - (steps - decay)) / decay)
    return config.lr * (1 - (1 - config.min_lr_ratio) * down)


def check_branch(config: Config, parent: Config, step: int) -> None:
    """Raise UserError unless `config`, trained from scratch, would reach the state of `parent` after `step` updates: the same
    model, data, seed, optimizer and FP8 recipe, and the same learning rate at every step before."""
    if step != config.parent[1]:
        raise UserError(f"start_from={config.start_from} holds step {step}: give the folder the name it was written under")
    before, now = parent.identity(), config.identity()
    if changes := [f"{key} was {before[key]}, now {now[key]}" for key in now
                   if key not in BRANCH_FREE and before[key] != now[key]]:
        raise UserError(f"start_from={config.start_from} is of another run: {'; '.join(changes)}; a branch differs from its "
                        f"parent in run, out, budget and decay alone")
    for k in range(step):
        old, new = (learning_rate(k, c.total_steps, c.optim) for c in (parent, config))
        if old == new:
            continue
        warmup, stable = parent.optim.warmup_steps(parent.total_steps), min(
            c.total_steps - c.optim.decay_steps(c.total_steps) for c in (config, parent))
        remedy = f"the decay has begun there; take a checkpoint of step {stable} or before"
        if {config.optim.schedule, parent.optim.schedule} != {"wsd"}:
            remedy = "branches need optim.schedule=wsd in both runs"
        elif warmup != config.optim.warmup_steps(config.total_steps):
            remedy = f"give it the same {warmup} steps of warm-up, optim.warmup_share={warmup / config.total_steps!r}"
        raise UserError(f"start_from={config.start_from}: step {k + 1} of {parent.run} had the learning rate {old:g}, in this "
                        f"run it would have {new:g}: {remedy}")


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, config: OptimConfig) -> float:
    """Set the learning rate of update `step` of `steps`, and return it."""
    lr = learning_rate(step, steps, config)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def fill_state(optimizer: torch.optim.AdamW) -> None:
    """Create the state that AdamW would create at its first step, for a checkpoint to be loaded into."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device),
                              "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def state_tensors(optimizer: torch.optim.AdamW, model: nn.Module) -> dict[str, torch.Tensor]:
    """Both moments by parameter name; the number of updates is the same for all and is saved as JSON."""
    return {f"{name}.{key}": optimizer.state[p][key]
            for name, p in model.named_parameters() for key in ("exp_avg", "exp_avg_sq")}


def set_updates(optimizer: torch.optim.AdamW, updates: int) -> None:
    """Set the number of updates behind the moments, which AdamW's bias correction depends on."""
    for state in optimizer.state.values():
        state["step"].fill_(updates)
