"""Launch each kernel of fp8/producer_kernels.py at the widths of a model, to have it compiled."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from fp8.kernels import empty_layouts
from fp8.producers import NORM_GRAD_PROGRAMS
from fp8.recipes import E4M3, E5M2
from model import GPTConfig

TOKENS = 128  # the compiled code does not depend on their number


def producer_launches(model: GPTConfig) -> dict[str, Callable[[ModuleType], None]]:
    """Name of a kernel and its variant -> a function that launches it from the given module, on
    uninitialised CPU tensors."""
    return {
        "copy of an input": partial(_copy, model, E4M3),
        "copy of a gradient": partial(_copy, model, E5M2),
        "swiglu": partial(_swiglu, model),
        "swiglu_grad": partial(_swiglu_grad, model),
        "rope_grad": partial(_rope_grad, model),
        "norm": partial(_norm, model, False),
        "norm with a branch": partial(_norm, model, True),
        "norm_grad": partial(_norm_grad, model),
    }


def _rows(width: int) -> torch.Tensor:
    return torch.empty(TOKENS, width, dtype=torch.bfloat16)


def _copy(model: GPTConfig, format: torch.dtype, kernels: ModuleType) -> None:
    x = _rows(model.n_embd)
    kernels.launch(kernels.copy, (x, *_scale_and_amax()), *empty_layouts(x, format), model.n_embd)


def _swiglu(model: GPTConfig, kernels: ModuleType) -> None:
    layouts = empty_layouts(_rows(model.n_ffn), E4M3)
    inputs = _rows(2 * model.n_ffn), *_scale_and_amax()
    kernels.launch(kernels.swiglu, inputs, *layouts, model.n_ffn)


def _swiglu_grad(model: GPTConfig, kernels: ModuleType) -> None:
    gate_up = _rows(2 * model.n_ffn)
    inputs = _rows(model.n_ffn), gate_up, *_scale_and_amax()
    kernels.launch(kernels.swiglu_grad, inputs, *empty_layouts(gate_up, E5M2), model.n_ffn)


def _rope_grad(model: GPTConfig, kernels: ModuleType) -> None:
    H, K, D = model.n_head, model.kv_heads, model.head_dim
    gradients = [_rows(heads * D).view(1, TOKENS, heads, D) for heads in (H, K, K)]
    tables = torch.empty(TOKENS, D // 2), torch.empty(TOKENS, D // 2)
    layouts = empty_layouts(_rows((H + 2 * K) * D), E5M2)
    kernels.launch_rope_grad(gradients, tables, *_scale_and_amax(), *layouts)


def _norm(model: GPTConfig, has_branch: bool, kernels: ModuleType) -> None:
    x, weight, rstd = _rows(model.n_embd), torch.empty(model.n_embd), torch.empty(TOKENS)
    branch = torch.empty_like(x) if has_branch else None
    scale, _ = _scale_and_amax()
    outputs = torch.empty_like(x), rstd, *empty_layouts(x, E4M3)
    kernels.launch_norm(x, branch, weight, model.norm_eps, scale, *outputs)


def _norm_grad(model: GPTConfig, kernels: ModuleType) -> None:
    grad, x, grad_total, grad_x = (_rows(model.n_embd) for _ in range(4))
    weight, rstd = torch.empty(model.n_embd), torch.empty(TOKENS)
    sums = torch.empty(NORM_GRAD_PROGRAMS, model.n_embd)
    inputs = grad, x, rstd, weight, grad_total, *_scale_and_amax()
    kernels.launch_norm_grad(*inputs, grad_x, sums, *empty_layouts(x, E5M2))


def _scale_and_amax() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(()), torch.zeros(())
