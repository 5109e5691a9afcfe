"""AdamW, or Muon for the blocks' matrices beside it; the learning rate of each step; which runs may
branch off another."""

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from lib.errors import UserError
from lib.sharding import is_dtensor
from model import GPT
from runtime.config import Config, OptimConfig, changed_keys

# Keys in which a branch may differ from its parent, provided that their learning rates agree up to
# the branch point.
BRANCH_FREE = {
    "steps",
    "start_from",
    "optim.schedule",
    "optim.warmup_share",
    "optim.decay_share",
    "optim.min_lr_ratio",
    "data.ramp",
}

# optim.kind -> its name in summary.json
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
}


def build_optimizer(model: GPT, config: OptimConfig, n_replicas: int = 1) -> "Optimizer":
    """The optimizer of optim.kind, with the state of its first step already, for a checkpoint to be
    loaded into. n_replicas: ranks of which each holds the whole model."""
    # here, not in summary.py alone, which would fail after the last step
    if config.kind not in NAMES:
        raise NotImplementedError(f"optim.kind={config.kind} has no entry in NAMES")
    if config.kind == "adamw":
        return _adamw(list(model.parameters()), config)
    if config.kind == "muon":
        return MuonAdamW(model, config, n_replicas)
    raise NotImplementedError(f"optim.kind={config.kind}")


def _adamw(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW (1711.05101), with weight decay on matrices only, not on the norms' weights."""
    matrices, vectors = (
        [p for p in parameters if (p.ndim >= 2) == is_matrix] for is_matrix in (True, False)
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    # FP8 copies of weights are stale when Tensor._version has changed, which the fused update does
    # not increment itself.
    optimizer.register_step_post_hook(
        lambda optimizer, *_: torch.autograd.graph.increment_version(
            [p for group in optimizer.param_groups for p in group["params"]]
        )
    )
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


class MuonAdamW:
    """Muon (Jordan 2024) for the matrices of the blocks, AdamW for embedding, head and norms; one
    learning rate for both.

    An update is the orthogonalised momentum, scaled to the root mean square of AdamW's (0.2
    sqrt(max(rows, columns)), 2502.16982), so that rates and weight decay carry over. Q, K, V, gate
    and up are matrices of their own, though stored fused. torch.optim.Muon can neither split a
    fused matrix nor update a sharded one. A sharded matrix is orthogonalised by one rank, its
    owner, to the bits of one process: all ranks send it their shards, it sends back those of the
    result. Among replicas the owner sends the result to all. The momentum (Nesterov) is sharded as
    the weight is, one fp32 value a parameter."""

    def __init__(self, model: GPT, config: OptimConfig, n_replicas: int = 1):
        self.config = config
        parts = muon_parts(model)
        self.is_sharded = is_dtensor(next(iter(parts)))
        self.n_replicas = n_replicas
        ranks = dist.get_world_size() if self.is_sharded else n_replicas
        owners = deal([newton_schulz_flops(p.shape[1], rows) for p, rows in parts.items()], ranks)
        self.owned: list[list[Any]] = [
            [p for p, owner in zip(parts, owners, strict=True) if owner == rank]
            for rank in range(ranks)
        ]
        self.parts: dict[Any, tuple[int, ...]] = {
            p: parts[p] for p in chain.from_iterable(self.owned)
        }
        self.adamw = _adamw([p for p in model.parameters() if p not in parts], config)
        self.muon: dict[str, Any] = {"params": list(self.parts), "lr": config.lr}
        self.param_groups = [*self.adamw.param_groups, self.muon]
        self.state = self.adamw.state
        self.state.update((p, {"momentum": torch.zeros_like(p)}) for p in self.parts)

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        # alone, one at a time is in memory
        lr, momenta = self.muon["lr"], map(self._momentum, self.parts)
        updates: Iterable[torch.Tensor]
        if self.is_sharded:
            updates = self._by_owners(list(momenta))
        elif self.n_replicas > 1:
            updates = self._by_replicas(list(momenta))
        else:
            updates = map(_by_parts, momenta, self.parts.values())
        for (p, rows), update in zip(self.parts.items(), updates, strict=True):
            update = update.float() * (0.2 * math.sqrt(max(p.shape[1], *rows)))
            local(p).mul_(1 - lr * self.config.weight_decay).add_(update, alpha=-lr)

    def _momentum(self, p: torch.Tensor) -> torch.Tensor:
        """Nesterov's, of this rank's shard, after taking in its gradient; in BF16, as the iteration
        begins."""
        grad, momentum, beta = local(p.grad), local(self.state[p]["momentum"]), self.config.momentum
        momentum.lerp_(grad, 1 - beta)
        return grad.lerp(momentum, beta).bfloat16()

    def _by_replicas(self, momenta: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each matrix whole, orthogonalised by its owner, which sends it to all."""
        me = dist.get_rank()
        momentum_of = dict(zip(self.parts, momenta, strict=True))
        for p in self.owned[me]:
            momentum_of[p].copy_(_by_parts(momentum_of[p], self.parts[p]))
        for owner, owned in enumerate(self.owned):
            if not owned:
                continue
            matrices = [momentum_of[p] for p in owned]
            flat = torch.cat([matrix.flatten() for matrix in matrices])
            dist.broadcast(flat, owner)
            sizes = [matrix.numel() for matrix in matrices]
            for matrix, received in zip(matrices, flat.split(sizes), strict=True):
                matrix.copy_(received.view_as(matrix))
        return momenta

    def _by_owners(self, momenta: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of each matrix this rank's shard, orthogonalised by the matrix's owner. momenta: shards
        in the order of self.parts."""
        from runtime.shard_exchange import ShardExchange

        exchange = ShardExchange(self.owned)
        flat = exchange.flatten(momenta)
        gathered = exchange.gather(flat)
        for matrix, shards in exchange.own_shards(gathered):
            whole = exchange.join(shards, matrix)
            exchange.cut(_by_parts(whole, self.parts[matrix]), shards)
        exchange.scatter(gathered, flat)
        return exchange.unflatten(flat, momenta)


Optimizer = torch.optim.Optimizer | MuonAdamW


def muon_parts(model: GPT) -> dict[torch.Tensor, tuple[int, ...]]:
    """The matrices that Muon updates -> rows of each part that is a matrix of its own."""
    parts: dict[torch.Tensor, tuple[int, ...]] = {}
    for block in model.blocks():
        attn, mlp, (C, ffn) = block.attn, block.mlp, block.mlp.down.weight.shape
        parts |= {
            attn.qkv.weight: (attn.H * attn.D, attn.K * attn.D, attn.K * attn.D),
            attn.out.weight: (C,),
            mlp.gate_up.weight: (ffn, ffn),
            mlp.down.weight: (C,),
        }
    return parts


def newton_schulz_flops(columns: int, rows: tuple[int, ...]) -> int:
    """Of orthogonalising parts of so many rows: five times X X', its square, and their sum times
    X."""
    return sum(5 * (4 * min(M, columns) * M * columns + 2 * min(M, columns) ** 3) for M in rows)


def deal(costs: list[int], ranks: int) -> list[int]:
    """The rank of each cost such that the sums are about equal: the largest first, each to the rank
    that has least so far."""
    owners, sums = [0] * len(costs), [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = sums.index(min(sums))
        sums[owners[i]] += costs[i]
    return owners


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard, or the whole tensor where it has no shards."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _by_parts(matrix: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([orthogonalised(part) for part in matrix.split(rows)])


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """About U V' of the singular value decomposition U S V' of a matrix (M, N), BF16: singular
    values between 0.7 and 1.2.

    Five steps of a quintic Newton-Schulz iteration in BF16, coefficients by Jordan (2024)."""
    # the smaller Gram matrix
    x = matrix.bfloat16() if matrix.size(0) <= matrix.size(1) else matrix.bfloat16().t()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.size(0) <= matrix.size(1) else x.t()


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of full step `step` (0-based) of `steps`; with data.ramp, of each of its
    parts.

    cosine  linear warm-up, then half a cosine from the peak down to min_lr_ratio of it (1608.03983)
    wsd     linear warm-up, stable at the peak, linear down to min_lr_ratio over the last
            decay_share (2404.06395)
    """
    warmup = config.warmup_steps(steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "cosine":
        down = 0.5 - 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
    elif config.schedule == "wsd":
        decay = config.decay_steps(steps)
        down = max(0.0, (step + 1 - (steps - decay)) / decay)
    else:
        raise NotImplementedError(f"optim.schedule={config.schedule}")
    return config.lr * (1 - (1 - config.min_lr_ratio) * down)


def check_branch(config: Config, parent: Config, step: int) -> None:
    """Raise UserError unless `config`, trained from scratch, would reach the state of `parent`
    after `step` updates but for its precision: the same model, data, seed and optimizer, and the
    same learning rate at every step before."""
    key = f"start_from={config.start_from}"
    if config.parent is None or step != config.parent[1]:
        raise UserError(f"{key} holds step {step}: give the folder the name it was written under")
    if changes := changed_keys(_fixed_for_branches(parent), _fixed_for_branches(config)):
        raise UserError(
            f"{key} is of another run: {'; '.join(changes)}; a branch differs from its parent in"
            f" run, out, precision, budget and decay alone; start_from=out/{parent.run} takes its"
            " weights"
        )
    _check_ramps(config, parent, step)
    parents_steps, full_steps = parent.full_steps, config.full_steps
    for k in range(parent.ramp.full_steps_between(0, step)):
        old = learning_rate(k, parents_steps, parent.optim)
        new = learning_rate(k, full_steps, config.optim)
        if old != new:
            share = parent.optim.warmup_steps(parents_steps) / full_steps
            raise UserError(
                f"{key}: step {k + 1} of {parent.run} had the learning rate {old:g}, here"
                f" {new:g}: branches need optim.schedule=wsd in both runs,"
                f" optim.warmup_share={share!r} and a checkpoint before the decay"
            )


def _check_ramps(config: Config, parent: Config, step: int) -> None:
    """Raise UserError where data.ramp gives another size to one of the first `step` steps than the
    parent's."""
    ramp, parents_ramp = config.ramp, parent.ramp
    for k in range(step):
        if ramp.place(k) == parents_ramp.place(k):
            continue
        end = 0
        pairs = []
        for stage in parents_ramp.stages[:-1]:
            end += stage.full_steps
            pairs.append(f"{end / config.full_steps!r}:{1 / stage.parts:g}")
        parents_tokens = parent.tokens_at(k + 1) - parent.tokens_at(k)
        tokens = config.tokens_at(k + 1) - config.tokens_at(k)
        raise UserError(
            f"start_from={config.start_from}: step {k + 1} of {parent.run} had"
            f" {parents_tokens:,} tokens, here {tokens:,}: the first steps of a branch are"
            f" its parent's, set data.ramp={','.join(pairs) or 'none'}"
        )


def _fixed_for_branches(config: Config) -> dict[str, object]:
    """The part of a config's identity that a branch shares with its parent."""
    return {
        key: value
        for key, value in config.identity().items()
        if key not in BRANCH_FREE and not key.startswith("fp8.")
    }


def set_learning_rate(optimizer: Optimizer, step: int, steps: int, config: OptimConfig) -> float:
    """Set the learning rate of update `step` of `steps`, and return it."""
    lr = learning_rate(step, steps, config)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def state_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The moments by parameter name; the number of updates is the same for all and is saved as
    JSON."""
    return {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
        if key != "step"
    }


def set_updates(optimizer: Optimizer, updates: int) -> None:
    """Set the number of updates behind the moments, which AdamW's bias correction depends on."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(updates)
