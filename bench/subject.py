"""What the benchmark times: one model in memory with its micro-step, its update.

Ours is built, compiled and initialised by runtime/parallel.py as train.py does it, from the config that train.py would be
given; its micro-step and its update are train.py's lines. The peers' are in bench/peers.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn as nn

from runtime import fp8, optim, parallel
from runtime.cli import UserError
from runtime.config import Config, apply_overrides, load_config
from runtime.parallel import World, build

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the process is asked for, by argv."""
    size: str
    label: str
    T: int                      # context, in tokens
    micro_batch: int            # sequences
    tokens_per_step: int        # of an optimizer step: sets the loss's scale and what an update is spread over
    device: str = "cuda"
    seed: int = 0               # of weights and tokens
    model: dict | None = None   # keys of GPTConfig that differ from the size's; for a peer, of its own
    peer: dict | None = None    # {"name", "dir"}: somebody else's model, from a checkout


@dataclass
class Subject:
    """What is timed: ours below, the peers' in bench/peers.py."""
    model: nn.Module            # its parameters are all that is trained; the first micro_step may compile
    vocab: int                  # tokens are drawn from range(vocab)
    # x, y (B, T) int64 on the device -> mean loss per token, (), fp32, detached; gradients add up in .grad; no wait for the GPU
    micro_step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    make_optimizers: Callable[[], list[torch.optim.Optimizer]]      # fresh ones; nothing else keeps them
    update: Callable[[list[torch.optim.Optimizer]], None]           # clip, step, zero_grad, as at a step's end
    counts: dict                # flops_per_token, .._causal, fp8_flops_per_token, params_total, params_matmul
    converted: int = 0          # Linears in FP8
    of: int = 0                 # Linears
    describe: list[str] = field(default_factory=list)       # lines for people


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """L2 norm of the gradients of each kind of parameter: layers.3.attn.qkv.weight is of the kind layers.*.attn.qkv.weight."""
    squares: dict[str, float] = {}
    for name, p in model.named_parameters():
        kind = ".".join("*" if part.isdigit() else part for part in name.split(".") if part != "_orig_mod")
        norm = 0.0 if p.grad is None else torch.linalg.vector_norm(p.grad, dtype=torch.float64).item()
        squares[kind] = squares.get(kind, 0.0) + norm**2
    return {kind: math.sqrt(square) for kind, square in squares.items()}


def config_of(spec: Spec) -> Config:
    """The Config that train.py would be given for a cell of ours. Raises UserError: an unknown size, label or key."""
    base = ROOT / "configs" / f"gpt{spec.size}_bf16.py"
    if not base.is_file():
        if not spec.model:
            raise UserError(f"size={spec.size!r}: there is no {base.relative_to(ROOT)}; take a size that has one, or give "
                              f"the keys of another model")
        base = ROOT / "configs" / "gpt50m_bf16.py"
    changes = {f"model.{key}": value for key, value in (spec.model or {}).items()}
    changes |= {"model.n_ctx": spec.T, "data.micro_batch": spec.micro_batch, "data.tokens_per_step": spec.tokens_per_step,
                "seed": spec.seed, "run": "cell"}
    if "model.vocab_size" in changes:
        changes["data.tokenizer"] = "./synthetic"       # whichever has so many tokens: nothing is read
    recipe, *extras = spec.label.split("+")
    if unknown := set(extras) - {"kernels", "head"}:
        raise UserError(f"label={spec.label!r} ends in +{unknown.pop()}: there are +kernels and +head")
    if recipe == "bf16_eager":
        changes["parallel.compile"] = False
    elif recipe != "bf16":
        changes["fp8.recipe"] = recipe
    changes |= {f"fp8.{extra}": True for extra in extras}
    return apply_overrides(load_config(base), [f"{key}={_word(value)}" for key, value in changes.items()])


def _word(value) -> str:
    """As a command line has it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def build_ours(config: Config, device: torch.device) -> Subject:
    """Our model, built, compiled and initialised as train.py does it; its micro-step and update are train.py's lines."""
    fp8.check_hardware(config.fp8, device)
    built = build(config, World(0, 0, 1, device))
    model, step_scale, tokens = built.model, built.loss_scale, config.data.micro_batch * config.model.n_ctx
    built.optimizer.state.clear()       # other cells need the room
    model.init_weights(config.seed, built.assign)
    fp8.refresh_fp8_weights(model)

    def micro_step(x, y):
        micro_loss = model(x, y).sum()
        (micro_loss * step_scale).backward()
        return micro_loss.detach() / tokens

    def make_optimizers():
        optimizer = optim.build_optimizer(model, config.optim)
        optim.fill_state(optimizer)
        return [optimizer]

    def update(optimizers):
        parallel.clip_gradients(model, config.optim.clip)
        for optimizer in optimizers:
            optimizer.step()
            fp8.refresh_fp8_weights(model)
            optimizer.zero_grad()

    counts = {key: built.counts[key] for key in ("flops_per_token", "flops_per_token_causal", "params_total", "params_matmul")}
    lines = [*built.flags, *fp8.table(built.layers, config.fp8.recipe, device.type)]
    converted = fp8.by_layer(built.layers)
    return Subject(model, config.model.vocab_size, micro_step, make_optimizers, update,
                   counts | {"fp8_flops_per_token": fp8_flops(built.layers)}, len(converted), len(built.layers), lines)


def fp8_flops(layers: list[fp8.Layer]) -> int:
    """FLOPs per token that run in FP8: 2 a weight for each of the three matmuls whose operands both are."""
    recipes, total = fp8.recipes(layers, 1.0), 0
    for layer in layers:
        if r := recipes.get(layer.name):
            pairs = ((r.input, r.weight), (r.grad, r.weight_for_input_grad), (r.grad_for_weight_grad, r.input_for_weight_grad))
            total += sum(2 * layer.params for a, b in pairs if a.format and b.format)
    return total


def tokens_like_text(sequences: int, T: int, vocab: int, seed: int, device: torch.device):
    """x, y (sequences, T) int64: random tokens, the k-th as frequent as 1 / (k + 2.7), as words are in text (Mandelbrot's
    form of Zipf's law): a model has something to learn, and the embedding's gradient meets its tokens as often as it does
    in training."""
    frequencies = 1.0 / (torch.arange(vocab, dtype=torch.float64) + 2.7)
    generator = torch.Generator().manual_seed(seed)
    t = torch.multinomial(frequencies, sequences * (T + 1), replacement=True, generator=generator).view(sequences, T + 1)
    return t[:, :-1].contiguous().to(device), t[:, 1:].contiguous().to(device)
