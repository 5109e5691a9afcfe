"""Triton kernels that cast to FP8 in both layouts from one read of their input.

An FP8 matmul on Hopper needs both operands contiguous along the dimension that it sums over. The
three matmuls of a Linear sum over different dimensions of the same tensors, so each tensor is
needed both row by row and transposed. A program reads one tile once, scales, saturates, rounds to
nearest even, and writes it both ways: bench/kernels.py times it against a copy.

TRITON_INTERPRET=1, set before the import, runs the kernels on CPU tensors, but Triton's interpreter
rounds to FP8 wrongly (the tests repair it).

Grid, head and stores of these kernels are those of fp8/producer_kernels.py too."""

from typing import Any

import torch
import triton
import triton.language as tl

import model

NO_TARGET = tl.constexpr(model.NO_TARGET)
LOG2_E = tl.constexpr(1.4426950408889634)
FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}

# What one program casts, chosen by the code compiled for sm_90. 128 rows are one cache line of the
# transposed copy.
ROWS, CAST_COLUMNS, GRAD_COLUMNS, WARPS = 128, 128, 64, 8
# consecutive programs that write neighbouring lines of the transposed copy: DRAM favours long runs
GROUP = 8
# a product and a sum as one fused instruction: Triton's default until 3.9, not from 3.10 on
# (triton#11270), and a default may not decide which bits a run has
FUSED = {"enable_fp_fusion": True}


def launch(
    kernel: triton.runtime.JITFunction,
    inputs: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    qt: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write what fp8's function of the same name as `kernel`, cast_both or cross_entropy_grad,
    returns of its tensors `inputs` to q (M, K) and qt (K, M), in their format; returns both.

    x and logits (M, K) BF16 or fp32, all contiguous; M and K multiples of 16. cast_both's values
    are those of torchao's casts, bit for bit: NaN stays NaN, an infinity becomes the format's
    largest value."""
    x = inputs[0]
    assert x.shape == q.shape, (x.shape, q.shape)
    columns = CAST_COLUMNS if kernel is cast_both else GRAD_COLUMNS
    launch_tiles(kernel, inputs, q, qt, q.shape[1], ROWS, columns)
    return q, qt


def launch_tiles(
    kernel: triton.runtime.JITFunction,
    inputs: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    qt: torch.Tensor,
    n_columns: int,
    rows: int,
    columns: int,
) -> None:
    """Launch `kernel`, each program of which computes a tile of rows x columns, of `n_columns`
    columns in all, to q (M, K) and qt (K, M)."""
    check(q, qt, inputs)
    M = q.shape[0]
    kernel[grid(M, rows, triton.cdiv(n_columns, columns))](
        *inputs,
        *as_bytes(q, qt),
        M,
        n_columns,
        **rounding(q.dtype),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=WARPS,
        **FUSED,
    )


def check(q: torch.Tensor, qt: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    """Check shapes: a kernel that is given wrong ones overwrites other tensors."""
    M, K = q.shape
    assert q.is_contiguous() and qt.is_contiguous(), (q.stride(), qt.stride())
    assert M % 16 == K % 16 == 0 and qt.shape == (K, M), (q.shape, qt.shape)
    assert all(tensor.is_contiguous() for tensor in inputs), [x.stride() for x in inputs]


def grid(M: int, rows: int, n_across: int) -> tuple[int, int, int]:
    """Programs for tiles of `rows` of M rows, n_across side by side: corner() has the tile of each.

    They start in the order of the first index, then the second: a group of rows at a time, column
    by column."""
    tiles = triton.cdiv(M, rows)
    group = min(GROUP, tiles)
    return group, n_across, triton.cdiv(tiles, group)


def as_bytes(q: torch.Tensor, qt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q (M, K) as bytes, qt (K, M / 2) as pairs of them: what store_both() writes to."""
    return q.view(torch.uint8), qt.view(torch.int16)


def rounding(format: torch.dtype) -> dict[str, Any]:
    """What store_both() must know of a format."""
    return {"FORMAT": FORMATS[format], "LARGEST": torch.finfo(format).max}


# ----------------------------------------------------------------------------------- on the device
#
# Even and odd rows of a tile are two tensors, so that a thread holds two values which are
# neighbours in the transposed copy. Pairs of 16 bits are transposed in shared memory by ldmatrix;
# single bytes are not, and the compiler would compute every value twice.


@triton.jit
def cast_both(
    x: tl.tensor,
    scale: tl.tensor,
    q: tl.tensor,
    qt: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    s = tl.load(scale)  # first, so that its latency overlaps with the tile's loads
    m0, k0 = corner(ROWS, COLUMNS)
    m, k, inside = even_rows(m0, k0, M, K, ROWS, COLUMNS)
    x += m0.to(tl.int64) * K + k0  # 65,536 tokens' logits are more than 2^31 values
    even = tl.load(x + (m * K + k), mask=inside).to(tl.float32) * s
    odd = tl.load(x + (m * K + K + k), mask=inside).to(tl.float32) * s
    store_both(even, odd, q, qt, m0, k0, M, K, K - k0, FORMAT, LARGEST, ROWS, COLUMNS)


@triton.jit
def cross_entropy_grad(
    logits: tl.tensor,
    lse: tl.tensor,
    targets: tl.tensor,
    grad: tl.tensor,
    scale: tl.tensor,
    q: tl.tensor,
    qt: tl.tensor,
    M: tl.tensor,
    V: tl.tensor,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    s = tl.load(scale)
    m0, v0 = corner(ROWS, COLUMNS)
    m = m0 + 2 * tl.arange(0, ROWS // 2)
    logits += m0.to(tl.int64) * V + v0
    even = _grad_of_rows(logits, lse, targets, grad, s, m, m0, v0, M, V, COLUMNS)
    odd = _grad_of_rows(logits, lse, targets, grad, s, m + 1, m0, v0, M, V, COLUMNS)
    store_both(even, odd, q, qt, m0, v0, M, V, V - v0, FORMAT, LARGEST, ROWS, COLUMNS)


@triton.jit
def _grad_of_rows(
    logits: tl.tensor,
    lse: tl.tensor,
    targets: tl.tensor,
    grad: tl.tensor,
    s: tl.tensor,
    m: tl.tensor,
    m0: tl.tensor,
    v0: tl.tensor,
    M: tl.tensor,
    V: tl.tensor,
    COLUMNS: tl.constexpr,
):
    """The gradient in rows m and COLUMNS columns from v0; logits points to (m0, v0)."""
    target = tl.load(targets + m, mask=m < M, other=NO_TARGET)
    total = tl.load(lse + m, mask=m < M, other=0.0) * LOG2_E
    factor = tl.load(grad + m, mask=m < M, other=0.0) * s
    v = tl.arange(0, COLUMNS)[None, :]
    logit = tl.load(
        logits + ((m - m0)[:, None] * V + v), mask=(m[:, None] < M) & (v < V - v0), other=0.0
    )
    p = tl.exp2(logit.to(tl.float32) * LOG2_E - total[:, None])
    hot = (target.to(tl.int32) - v0)[:, None] == v
    value = tl.where(hot, p - 1, p) * factor[:, None]
    return tl.where(target[:, None] == NO_TARGET, 0.0, value)  # no factor 0: 0 * NaN is NaN


@triton.jit
def corner(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first row and the first column of a program's tile, in a grid()."""
    m0 = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * ROWS
    return m0, tl.program_id(1) * COLUMNS


@triton.jit
def even_rows(
    m0: tl.tensor,
    k0: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Even rows and the columns of a tile, counted from its corner, and which of them lie inside
    (M, K). M is even: the odd row is inside too."""
    m, k = 2 * tl.arange(0, ROWS // 2)[:, None], tl.arange(0, COLUMNS)[None, :]
    return m, k, (m < M - m0) & (k < K - k0)


@triton.jit
def store_both(
    even: tl.tensor,
    odd: tl.tensor,
    q: tl.tensor,
    qt: tl.tensor,
    m0: tl.tensor,
    k0: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    n_columns: tl.tensor,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Round the fp32 rows m0, m0 + 2 .. (even) and m0 + 1, m0 + 3 .. (odd) of the columns from k0
    on, then store the first `n_columns` of them, or all, to q and qt."""
    even, odd = _rounded(even, FORMAT, LARGEST), _rounded(odd, FORMAT, LARGEST)
    m, k = 2 * tl.arange(0, ROWS // 2)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (m < M - m0) & (k < n_columns)
    q += m0.to(tl.int64) * K + k0
    tl.store(q + (m * K + k), even, mask=inside)
    tl.store(q + (m * K + K + k), odd, mask=inside)
    # little-endian: the even row comes first
    pairs = tl.trans(even.to(tl.int16) | (odd.to(tl.int16) << 8))
    half = M // 2
    m, k = tl.arange(0, ROWS // 2)[None, :], tl.arange(0, COLUMNS)[:, None]
    qt += half.to(tl.int64) * k0 + m0 // 2
    tl.store(qt + (k * half + m), pairs, mask=(m < half - m0 // 2) & (k < n_columns))


@triton.jit
def _rounded(value: tl.tensor, FORMAT: tl.constexpr, LARGEST: tl.constexpr):
    # Not tl.clamp: beside its min and max ptxas 12.8 and 12.9 (Triton 3.6 to 3.8) round a value
    # that is stored twice a second time, and that instruction leaves half of a word to a register:
    # it took the stack pointer's (seen on an H200; triton#11111). The move keeps it from the same.
    value = tl.where(value > LARGEST, LARGEST, value)
    value = tl.where(value < -LARGEST, -LARGEST, value)
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r",
        [value.to(FORMAT).to(tl.uint8, bitcast=True)],
        tl.uint8,
        is_pure=True,
        pack=4,
    )
