"""Measure now and then what a running model's values and matmuls lose to FP8, and how large
attention logits and SwiGLU outputs are.

Every probe.every steps one extra forward and backward pass, eager, over a few of the step's own
sequences, with hooks that are removed afterwards. Training is not affected: the compiled step has
no hooks, and losses and weights are the same bits with and without. out/<run>/probe.jsonl gets a
row per converted Linear and one per block: fp8/probe_rows.py.

The weight and the activation are the operands of y = x w', the gradient that of the input gradient,
each scaled over the dimension that its matmul sums over. The signal-to-noise ratio of a matmul is
that of the recipe's reference (fp8/linears.py, scales of the tensors at hand), before its result is
rounded to BF16. A later row of a step replaces an earlier one (a resumed run repeats steps); null
stands for NaN and infinity. Growing logits and SwiGLU outliers precede divergence in FP8
(2409.12517, 2405.18710), so does the kurtosis of activations (2505.20524)."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from fp8.copies import zero_gradients
from fp8.linears import EmulatedMatmul, noise_of
from fp8.probe_rows import (
    MATMULS,
    OPERANDS,
    STATISTICS,
    BlockRow,
    LinearRow,
    Statistics,
    content_of,
)
from fp8.recipes import Operand, Recipe
from fp8.rounding import FORMATS, fake_quantise, scale_of
from fp8.sharded import is_wrapped, unwrap
from lib.files import to_line
from model import GPT, Attention, rotate

# what was measured -> the numbers in its tensor
NAMES = {
    **dict.fromkeys(OPERANDS, STATISTICS),
    **{matmul: (matmul,) for matmul in MATMULS},
    "attention": ("attention_logit_max",),
    "swiglu": ("swiglu_amax", "swiglu_rms"),
}
LOGITS_AT_ONCE = 2**24  # elements of the attention matrix that exist at a time: 64 MiB

# (module, what was measured) -> values in the order of NAMES, on the device
Seen = dict[tuple[str, str], torch.Tensor]


class Probe:
    """Measures `model` on request. All ranks call it together; those with a path measure and write.

    recipes: of each converted Linear by module name; without any, only blocks are measured."""

    def __init__(self, path: Path | None, model: GPT, recipes: dict[str, Recipe], tokens: int):
        self.path, self.model, self.recipes, self.tokens = path, model, recipes, tokens
        if path is not None and path.exists():
            # a line that a kill cut short would spoil the next
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def __call__(self, step: int, x: torch.Tensor, y: torch.Tensor, loss_scale: float) -> None:
        """Probe on the first sequences of a micro-batch, x and y (B, T); gradients must be zero or
        None, and are so again.

        loss_scale: what training multiplies its summed loss by, so that gradients are of
        training's size."""
        multiple = max([32, *(recipe.multiple for recipe in self.recipes.values())])
        n, seen = sequences(x.size(0), x.size(1), self.tokens, multiple), {}
        for layer, recipe in self.recipes.items():
            weight: Any = self.model.get_submodule(layer).weight
            if is_wrapped(weight):  # the forward pass will only see its float8 copy
                weight = unwrap(weight)
                # all ranks gather it
                seen[layer, "weight"] = statistics(weight.detach().full_tensor(), recipe.weight)
        hooks = nullcontext() if self.path is None else watching(self.model, self.recipes, seen)
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                hooks,
                torch.set_grad_enabled(bool(self.recipes)),
            ):
                loss = self.model(x[:n], y[:n]).sum() * loss_scale
                if self.recipes:  # block rows need no backward pass
                    loss.backward()
        finally:
            zero_gradients(self.model)
        if self.path is not None:
            try:
                # one write: a kill leaves all rows, or a last line cut short
                with open(self.path, "ab") as file:
                    file.write(b"".join(map(to_line, rows(step, seen, self.recipes))))
            except OSError as error:  # a full disk ends no run
                print(
                    f"{self.path}: {error.strerror}; the probe of step {step} is lost, training"
                    " goes on",
                    flush=True,
                )


def sequences(B: int, T: int, tokens: int, multiple: int = 32) -> int:
    """How many of B sequences of T tokens to probe: as many as fit into `tokens`, at least one, in
    all a multiple of so many tokens (the weight gradient sums over tokens in blocks), or B where no
    smaller number is such a multiple."""
    unit = multiple // math.gcd(T, multiple)
    return min(B, max(unit, tokens // T // unit * unit))


@contextmanager
def watching(model: GPT, recipes: dict[str, Recipe], seen: Seen) -> Iterator[None]:
    """Within the block, the next forward pass of `model`, and backward pass if there is one, fills
    `seen`.

    Of each Linear the first call alone is measured: a head in chunks is called often, and again to
    recompute."""

    def linear(
        layer: str, recipe: Recipe, module: nn.Linear, inputs: tuple, output: torch.Tensor
    ) -> None:
        if (layer, "activation") in seen:
            return
        seen[layer, "activation"] = statistics(inputs[0], recipe.input)
        # gathered as float8: seen before, and its exact values are gone
        has_exact_weight = (layer, "weight") not in seen
        if has_exact_weight:
            # under FSDP2 still gathered
            seen[layer, "weight"] = statistics(module.weight, recipe.weight)
            sqnr = output_sqnr(inputs[0].detach(), module.weight.detach(), recipe)
            seen[layer, "output_sqnr"] = sqnr[None]
        if output.requires_grad:
            x = inputs[0].detach() if has_exact_weight else None
            output.register_hook(partial(gradient, layer, recipe, module, x))

    def gradient(
        layer: str, recipe: Recipe, module: nn.Linear, x: torch.Tensor | None, g: torch.Tensor
    ) -> None:
        seen[layer, "gradient"] = statistics(g, recipe.grad, noise_of(module, g))
        if x is not None:
            weight = module.weight.detach()
            sqnr_of_input_grad, sqnr_of_weight_grad = gradient_sqnrs(x, weight, g, recipe, module)
            seen[layer, "input_grad_sqnr"] = sqnr_of_input_grad[None]
            seen[layer, "weight_grad_sqnr"] = sqnr_of_weight_grad[None]

    def attention(
        block: str, attn: Attention, module: nn.Module, inputs: tuple, output: torch.Tensor
    ) -> None:
        seen[block, "attention"] = attention_logit_max(
            attn, output.detach()[0], model.cos, model.sin
        )[None]

    @torch.no_grad()
    def swiglu(block: str, module: nn.Module, inputs: tuple) -> None:
        x = inputs[0]
        amax = x.abs().amax().float()
        rms = _norm(x).float() / math.sqrt(x.numel())
        seen[block, "swiglu"] = torch.stack((amax, rms))

    with ExitStack() as hooks:
        for layer, recipe in recipes.items():
            hooks.enter_context(
                model.get_submodule(layer).register_forward_hook(partial(linear, layer, recipe))
            )
        for i, block in enumerate(model.blocks()):
            hooks.enter_context(
                block.attn.qkv.register_forward_hook(partial(attention, f"layers.{i}", block.attn))
            )
            hooks.enter_context(
                block.mlp.down.register_forward_pre_hook(partial(swiglu, f"layers.{i}"))
            )
        yield


def rows(
    step: int, seen: Seen, recipes: dict[str, Recipe], evaluated_in: str | None = None
) -> list[dict]:
    """The rows of what was seen, for to_line(); the only place where the host waits for the
    device. evaluated_in: of LinearRow."""
    flat = iter(torch.cat(list(seen.values())).tolist() if seen else ())
    values = {(module, what): {name: next(flat) for name in NAMES[what]} for module, what in seen}
    rows_of_step: list[LinearRow | BlockRow] = []
    for layer, recipe in recipes.items():
        numbers: dict[str, Any] = {}
        for operand in OPERANDS:
            if (layer, operand) in values:
                numbers[operand] = Statistics(**values[layer, operand])
        for matmul in MATMULS:
            numbers |= values.get((layer, matmul), {})
        row = LinearRow("linear", step, layer, recipe.name, evaluated_in=evaluated_in, **numbers)
        rows_of_step.append(row)
    for module, what in values:
        if what == "attention":
            number = int(module.split(".")[1])
            numbers = values[module, "attention"] | values[module, "swiglu"]
            rows_of_step.append(BlockRow("block", step, number, **numbers))
    return [content_of(row) for row in rows_of_step]


# -------------------------------------------------------------------------------------- statistics


@torch.no_grad()
def statistics(
    x: torch.Tensor, operand: Operand, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """The STATISTICS of x (..., n), quantised as `operand` says for a matmul that sums over n: (8,)
    fp32, on x's device.

    noise: of stochastic rounding, (..., n)."""
    x = x.float()
    scale, q = scale_of(x, operand), fake_quantise(x, operand, noise=noise)
    underflow = ((q == 0) & (x != 0)).float().mean()
    # a rounded scale may lift the amax slightly beyond it
    largest = FORMATS[operand.format][0] * (1 + 2**-20)
    saturated = ((x * scale).abs() > largest).float().mean()
    size = _norm(x)
    error = torch.where(size == 0, 0.0, _norm(q - x) / size).float()
    amax = x.abs().amax()
    spread = (scale.amin(), scale.median(), scale.amax())
    return torch.stack((amax, *spread, underflow, saturated, error, kurtosis(x)))


def kurtosis(x: torch.Tensor) -> torch.Tensor:
    """The mean of x^4 over the square of the mean of x^2, x (any shape): (), fp32; of zeros 0.

    About zero, not the mean: what FP8 rounds are magnitudes."""
    squares = x.double().square()
    mean_square = squares.mean()
    return torch.where(mean_square == 0, 0.0, squares.square().mean() / mean_square**2).float()


@torch.no_grad()
def output_sqnr(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The signal-to-quantisation-noise ratio of x w' by `recipe`, x (..., K), weight (N, K): ()
    fp32, decibels."""
    rows, weight = x.reshape(-1, x.shape[-1]).float(), weight.float()
    return _sqnr(EmulatedMatmul.apply(rows, weight, None, None, recipe, False), rows @ weight.t())


def gradient_sqnrs(
    x: torch.Tensor, weight: torch.Tensor, g: torch.Tensor, recipe: Recipe, linear: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratios of the input gradient g w and of the weight gradient g' x by `recipe`, x (..., K),
    weight (N, K), g (..., N): () fp32 each, decibels. linear: whose position in the run's tokens
    decides stochastic rounding."""
    rows = x.reshape(-1, x.shape[-1]).float().requires_grad_()
    weight = weight.float().requires_grad_()
    g = g.reshape(-1, g.shape[-1]).float()
    position, salt = getattr(linear, "position", None), getattr(linear, "salt", None)
    with torch.enable_grad():
        y = EmulatedMatmul.apply(rows, weight, position, salt, recipe, False)
    grad_x, grad_w = torch.autograd.grad(y, (rows, weight), g)
    with torch.no_grad():
        return _sqnr(grad_x, g @ weight), _sqnr(grad_w, g.t() @ rows)


def _sqnr(quantised: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """() fp32, in decibels; infinite where nothing is lost, NaN of zeros."""
    return (20 * torch.log10(_norm(exact) / _norm(quantised - exact))).float()


def _norm(x: torch.Tensor) -> torch.Tensor:
    # squares of small gradients vanish in fp32
    return torch.linalg.vector_norm(x, dtype=torch.float64)


@torch.no_grad()
def attention_logit_max(
    attention: Attention, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Largest q k / sqrt(D) that the softmax gets in one sequence, over all heads; qkv (T, (H + 2K)
    D), result ().

    q and k are rounded to BF16 as in training; fp32, even as TF32, multiplies BF16 exactly."""
    T, (H, K, D) = qkv.size(0), (attention.H, attention.K, attention.D)
    q, k, _ = qkv.view(1, T, -1, D).split((H, K, K), dim=2)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    # (H or K, T, D)
    q, k = (rotate(part, cos[:T], sin[:T])[0].float().transpose(0, 1) for part in (q, k))
    q = q.reshape(K, H // K, T, D)  # query heads by the key head they share
    positions = torch.arange(T, device=qkv.device)
    largest = []
    for queries in positions.split(max(1, LOGITS_AT_ONCE // (H * T))):
        logits = torch.einsum("kgqd,ksd->kgqs", q[:, :, queries], k)
        is_ahead = positions > queries[:, None]
        largest.append(logits.masked_fill(is_ahead, -math.inf).amax())
    return torch.stack(largest).amax() / math.sqrt(D)
