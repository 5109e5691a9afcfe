"""The matmuls of FP8 and BF16 operands: on a GPU by torch, on a CPU by dequantised values."""

import torch


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
        return ((a.float() * a_inverse) @ (b.float() * b_inverse)).to(dtype)
    return torch._scaled_mm(
        a, b, scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype, use_fast_accum=fast
    )


def mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a (M, K) @ b (K, N) in `dtype`: on a GPU as the matmul sums it up, on a CPU rounded to a's
    dtype in between."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and a.dtype != dtype else (a @ b).to(dtype)


@torch.library.custom_op("nanofp8::add_weight_grad", mutates_args=("total",))
def add_weight_grad(total: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> None:
    """total (N, K) fp32 += g' x of BF16; on a GPU the matmul begins with `total`, whose bytes are
    read and written once."""
    if total.is_cuda:
        torch.addmm(total, g.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += mm(g.t(), x, total.dtype)


add_weight_grad.register_fake(lambda total, g, x: None)
