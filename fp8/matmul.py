"""The matmuls of FP8 and BF16 operands: on a GPU by torch, on a CPU by dequantised values."""

import functools
from typing import Any

import torch
import torch.nn.functional as F


@functools.cache
def has_bf16_units() -> bool:
    """Whether this CPU has instructions that multiply BF16 (avx512_bf16, AMX): two to five times
    as fast as fp32's, and oneDNN may use them (ONEDNN_MAX_CPU_ISA). A float8 value is a BF16
    number, and so is one times a power of two."""
    capabilities = torch.cpu.get_capabilities()
    has_units = any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return has_units and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, without a call where that is its own: torch 2.11 compiles a Function whose
    forward pass returns what such a call returned, x itself, to one with gradients of zero."""
    return x if x.dtype == dtype else x.to(dtype)


@torch.library.custom_op("nanofp8::scaled_mm_of_bf16", mutates_args=())
def scaled_mm_of_bf16(a: torch.Tensor, b: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """(a @ b) * factor of BF16 a (M, K) and b (K, N), factor () fp32, on a CPU's BF16 units: summed
    and scaled in fp32, rounded to BF16 once, since oneDNN scales before it writes. An operator:
    compiled code cannot read a number."""
    unread = a.new_empty(())
    return torch.addmm(unread, a, b, beta=0, alpha=factor.item())


scaled_mm_of_bf16.register_fake(lambda a, b, factor: a.new_empty(a.shape[0], b.shape[1]))


def scaled_mm(
    a: torch.Tensor,
    a_inverse: torch.Tensor,
    b: torch.Tensor,
    b_inverse: torch.Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:
    """(a * a_inverse) @ (b * b_inverse) in `dtype`, (M, N), of float8 a (M, K) and b (K, N),
    column-major; inverses broadcast.

    On a GPU torch's float8 matmul, accumulating `fast` or not. On a CPU the dequantised values in
    fp32: torch's own float8 matmul runs in oneDNN's scalar reference loop on Intel CPUs with AMX,
    hundreds of times slower."""
    if a.device.type == "cpu":
        return in_dtype((a.float() * a_inverse) @ (b.float() * b_inverse), dtype)
    return torch._scaled_mm(
        a, b, scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype, use_fast_accum=fast
    )


def mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a (M, K) @ b (K, N) in `dtype`: on a GPU as the matmul sums it up, on a CPU rounded to a's
    dtype in between."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return in_dtype(a @ b, dtype)


@torch.library.custom_op("nanofp8::add_weight_grad", mutates_args=("total",))
def add_weight_grad(total: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> None:
    """total (N, K) fp32 += g' x of BF16; on a GPU the matmul begins with `total`, whose bytes are
    read and written once."""
    if total.is_cuda:
        torch.addmm(total, g.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += mm(g.t(), x, total.dtype)


add_weight_grad.register_fake(lambda total, g, x: None)


def adds_scaled_products(device: torch.device) -> bool:
    """Whether torch's float8 matmul can begin with a sum there: on GPUs, from torch 2.15 on."""
    return device.type == "cuda" and hasattr(F, "scaled_addmm_")


@torch.library.custom_op("nanofp8::add_weight_grad_fp8", mutates_args=("total",))
def add_scaled_weight_grad(
    total: torch.Tensor,
    g: torch.Tensor,
    g_inverse: torch.Tensor,
    x: torch.Tensor,
    x_inverse: torch.Tensor,
    fast: bool,
) -> None:
    """total (N, K) fp32 += (g * g_inverse) @ (x * x_inverse) of float8 g (N, M) and x (M, K),
    column-major; inverses () fp32. Where adds_scaled_products(), the matmul begins with `total`.

    By the signature of torch's documentation; it has run on no GPU yet."""
    if not adds_scaled_products(total.device):
        total += scaled_mm(g, g_inverse, x, x_inverse, total.dtype, fast)
        return
    torch_functions: Any = F  # older ones lack it
    one_scale = F.ScalingType.TensorWise
    torch_functions.scaled_addmm_(
        total, g, x, g_inverse, one_scale, x_inverse, one_scale, use_fast_accum=fast
    )


add_scaled_weight_grad.register_fake(lambda total, g, g_inverse, x, x_inverse, fast: None)
