"""Triton kernels of a block that compute a tensor and leave it as FP8 in both layouts.

The operands of a Linear come from a norm or from SwiGLU, in the backward pass from SwiGLU and RoPE.
A kernel here computes such a tensor, scales and rounds it and writes rows and columns, so that no
other kernel reads the tensor again; the scale is known before. Values are those of model.py in
BF16, which rounds after every operation. fp8/producers.py has the same operations in plain torch,
as the reference.

Even and odd rows of a tile are two tensors, as in fp8/triton_kernels.py, whose grid, head and
stores are used.
Tile sizes were chosen by the registers of the code compiled for sm_90; none has been timed."""

import torch
import triton
import triton.language as tl

from fp8.triton_kernels import (
    FUSED,
    as_bytes,
    check,
    corner,
    even_rows,
    grid,
    launch_tiles,
    rounding,
    store_both,
)

# Rows and columns of a program's tile, and its warps. 64 rows are half a cache line of the
# transposed copy: the other half is written by the next program.
ROWS, COLUMNS, WARPS = 64, 64, 8
# A norm reads whole rows, 32 of them, and a second time: 32 warps fill an SM, so that few enough
# programs run at a time for the L2 cache to still hold them.
NORM_ROWS, NORM_COLUMNS, NORM_WARPS = 32, 512, 32
# Its gradient keeps twice as many values for each element: with 512 columns Triton 3.6 and 3.9 put
# some of them on the stack, since 32 warps leave 64 registers for a thread.
NORM_GRAD_COLUMNS = 256


def launch(
    kernel: triton.runtime.JITFunction,
    inputs: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    qt: torch.Tensor,
    n_columns: int,
) -> None:
    """Write what fp8.producers says of `kernel`, swiglu, swiglu_grad or copy, to q (M, K) and qt
    (K, M). inputs: as the kernel names them, contiguous, the last one () the amax to raise;
    n_columns: of which a program takes COLUMNS."""
    *tensors, amax = inputs
    launch_tiles(kernel, (*tensors, amax.view(torch.int32)), q, qt, n_columns, ROWS, COLUMNS)


def launch_rope_grad(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    scale: torch.Tensor,
    amax: torch.Tensor,
    q: torch.Tensor,
    qt: torch.Tensor,
) -> None:
    """The gradients of rotated q and k (B, T, heads, D) and of v, side by side, to q (M, N) and qt;
    tables: cosines and sines (T, D/2), fp32."""
    check(q, qt, (*gradients, *tables))
    _, T, H, D = gradients[0].shape
    K = gradients[1].shape[2]
    M, half = q.shape[0], D // 2
    rope_grad[grid(M, ROWS, H + 2 * K)](
        *gradients,
        *tables,
        scale,
        amax.view(torch.int32),
        *as_bytes(q, qt),
        M,
        T,
        H,
        K,
        half,
        **rounding(q.dtype),
        ROWS=ROWS,
        COLUMNS=triton.next_power_of_2(half),
        num_warps=WARPS,
        **FUSED,
    )


def launch_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    total: torch.Tensor,
    rstd: torch.Tensor,
    q: torch.Tensor,
    qt: torch.Tensor,
) -> None:
    """What fp8.producers.norm() returns, to total (M, C), rstd (M,), q and qt."""
    inputs = (x, weight) if branch is None else (x, branch, weight, total)
    check(q, qt, inputs)
    M, C = q.shape
    norm[(triton.cdiv(M, NORM_ROWS),)](
        x,
        branch,
        weight,
        scale,
        total,
        rstd,
        *as_bytes(q, qt),
        M,
        C,
        eps,
        HAS_BRANCH=branch is not None,
        **rounding(q.dtype),
        ROWS=NORM_ROWS,
        COLUMNS=min(NORM_COLUMNS, triton.next_power_of_2(C)),
        num_warps=NORM_WARPS,
        **FUSED,
    )


def launch_norm_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    grad_total: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    grad_x: torch.Tensor,
    sums: torch.Tensor,
    q: torch.Tensor,
    qt: torch.Tensor,
) -> None:
    """What fp8.producers.norm_grad() returns, to grad_x (M, C), sums (programs, C), q and qt."""
    check(q, qt, (grad, x, rstd, weight, grad_total, grad_x, sums))
    M, C = q.shape
    programs = sums.shape[0]
    n_tiles = triton.cdiv(triton.cdiv(M, NORM_ROWS), programs)
    norm_grad[(programs,)](
        grad,
        x,
        rstd,
        weight,
        grad_total,
        scale,
        amax.view(torch.int32),
        grad_x,
        sums,
        *as_bytes(q, qt),
        M,
        C,
        n_tiles,
        **rounding(q.dtype),
        ROWS=NORM_ROWS,
        COLUMNS=min(NORM_GRAD_COLUMNS, triton.next_power_of_2(C)),
        num_warps=NORM_WARPS,
        **FUSED,
    )


# ------------------------------------------------------------------------------------ whole tensors


@triton.jit
def copy(
    x: tl.tensor,
    scale: tl.tensor,
    amax: tl.tensor,
    q: tl.tensor,
    qt: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast x (M, K), without computing anything."""
    s = tl.load(scale)
    m0, k0 = corner(ROWS, COLUMNS)
    m, k, inside = even_rows(m0, k0, M, K, ROWS, COLUMNS)
    x += m0.to(tl.int64) * K + k0
    even = tl.load(x + (m * K + k), mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x + (m * K + K + k), mask=inside, other=0.0).to(tl.float32)
    _raise_amax(amax, even, odd)
    store_both(even * s, odd * s, q, qt, m0, k0, M, K, K - k0, FORMAT, LARGEST, ROWS, COLUMNS)


@triton.jit
def swiglu(
    gate_up: tl.tensor,
    scale: tl.tensor,
    amax: tl.tensor,
    q: tl.tensor,
    qt: tl.tensor,
    M: tl.tensor,
    F: tl.tensor,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """silu(gate) * up of gate_up (M, 2 F), gate and up side by side."""
    s = tl.load(scale)
    m0, k0 = corner(ROWS, COLUMNS)
    m, k, inside = even_rows(m0, k0, M, F, ROWS, COLUMNS)
    gate_up += m0.to(tl.int64) * (2 * F) + k0
    even = _product(gate_up + (m * (2 * F) + k), F, inside)
    odd = _product(gate_up + (m * (2 * F) + 2 * F + k), F, inside)
    _raise_amax(amax, even, odd)
    store_both(even * s, odd * s, q, qt, m0, k0, M, F, F - k0, FORMAT, LARGEST, ROWS, COLUMNS)


@triton.jit
def _product(gate_at: tl.tensor, F: tl.tensor, inside: tl.tensor):
    gate = tl.load(gate_at, mask=inside, other=0.0)
    up = tl.load(gate_at + F, mask=inside, other=0.0)
    gate32 = gate.to(tl.float32)
    silu = (gate32 / (1 + tl.exp(-gate32))).to(gate.dtype)
    return _rounded_to(silu.to(tl.float32) * up.to(tl.float32), gate.dtype)


@triton.jit
def swiglu_grad(
    grad: tl.tensor,
    gate_up: tl.tensor,
    scale: tl.tensor,
    amax: tl.tensor,
    q: tl.tensor,
    qt: tl.tensor,
    M: tl.tensor,
    F: tl.tensor,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of gate and up (M, 2 F), side by side; grad (M, F) is that of their product."""
    s = tl.load(scale)
    m0, k0 = corner(ROWS, COLUMNS)
    m, k, inside = even_rows(m0, k0, M, F, ROWS, COLUMNS)
    grad += m0.to(tl.int64) * F + k0
    gate_up += m0.to(tl.int64) * (2 * F) + k0
    gate_even, up_even = _product_grad(grad + (m * F + k), gate_up + (m * (2 * F) + k), F, inside)
    gate_odd, up_odd = _product_grad(
        grad + (m * F + F + k), gate_up + (m * (2 * F) + 2 * F + k), F, inside
    )
    _raise_amax(amax, gate_even, gate_odd)
    _raise_amax(amax, up_even, up_odd)
    n_columns = F - k0
    store_both(
        gate_even * s,
        gate_odd * s,
        q,
        qt,
        m0,
        k0,
        M,
        2 * F,
        n_columns,
        FORMAT,
        LARGEST,
        ROWS,
        COLUMNS,
    )
    store_both(
        up_even * s,
        up_odd * s,
        q,
        qt,
        m0,
        F + k0,
        M,
        2 * F,
        n_columns,
        FORMAT,
        LARGEST,
        ROWS,
        COLUMNS,
    )


@triton.jit
def _product_grad(grad_at: tl.tensor, gate_at: tl.tensor, F: tl.tensor, inside: tl.tensor):
    """Gradients of gate and up, rounded as autograd rounds them: behind each operation."""
    grad = tl.load(grad_at, mask=inside, other=0.0)
    gate = tl.load(gate_at, mask=inside, other=0.0)
    up = tl.load(gate_at + F, mask=inside, other=0.0)
    grad32, gate32 = grad.to(tl.float32), gate.to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate32))
    silu = _rounded_to(gate32 / (1 + tl.exp(-gate32)), gate.dtype)
    grad_silu = _rounded_to(grad32 * up.to(tl.float32), gate.dtype)
    grad_gate = grad_silu * sigmoid * (1 + gate32 * (1 - sigmoid))
    return _rounded_to(grad_gate, gate.dtype), _rounded_to(grad32 * silu, gate.dtype)


# ----------------------------------------------------------------------------------- heads and rows


@triton.jit
def rope_grad(
    grad_q: tl.tensor,
    grad_k: tl.tensor,
    grad_v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    scale: tl.tensor,
    amax: tl.tensor,
    q: tl.tensor,
    qt: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    H: tl.tensor,
    K: tl.tensor,
    HALF: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program takes both halves of one head of q, k or v, since RoPE mixes them."""
    s = tl.load(scale)
    m0, head = corner(ROWS, 1)
    n_turned = HALF  # columns of each half that RoPE turns: in v none
    if head < H:
        grad, heads, number = grad_q, H, head
    elif head < H + K:
        grad, heads, number = grad_k, K, head - H
    else:
        grad, heads, number, n_turned = grad_v, K, head - H - K, 0
    stride = heads * (2 * HALF)
    grad += m0.to(tl.int64) * stride + number * (2 * HALF)
    first_even, second_even = _turned_back(
        grad, cos, sin, m0, 0, M, T, stride, n_turned, HALF, ROWS, COLUMNS
    )
    first_odd, second_odd = _turned_back(
        grad, cos, sin, m0, 1, M, T, stride, n_turned, HALF, ROWS, COLUMNS
    )
    _raise_amax(amax, first_even, first_odd)
    _raise_amax(amax, second_even, second_odd)
    width = (H + 2 * K) * (2 * HALF)
    k0 = head * (2 * HALF)
    store_both(
        first_even * s, first_odd * s, q, qt, m0, k0, M, width, HALF, FORMAT, LARGEST, ROWS, COLUMNS
    )
    k0 += HALF
    store_both(
        second_even * s,
        second_odd * s,
        q,
        qt,
        m0,
        k0,
        M,
        width,
        HALF,
        FORMAT,
        LARGEST,
        ROWS,
        COLUMNS,
    )


@triton.jit
def _turned_back(
    grad: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    m0: tl.tensor,
    ODD: tl.constexpr,
    M: tl.tensor,
    T: tl.tensor,
    stride: tl.tensor,
    n_turned: tl.tensor,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Both halves of a head in the even or odd rows from m0 on, to which grad points; their first
    n_turned columns turned back. No flag: Triton 3.9's interpreter makes an integer of one, which
    it refuses as a mask."""
    m, k = 2 * tl.arange(0, ROWS // 2)[:, None] + ODD, tl.arange(0, COLUMNS)[None, :]
    inside = (m < M - m0) & (k < HALF)
    angle = (m0 + m) % T * HALF + k
    is_turned = inside & (k < n_turned)
    c = tl.load(cos + angle, mask=is_turned, other=1.0)
    d = tl.load(sin + angle, mask=is_turned, other=0.0)
    first = tl.load(grad + (m * stride + k), mask=inside, other=0.0)
    second = tl.load(grad + (m * stride + HALF + k), mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    return _rounded_to(a * c + b * d, first.dtype), _rounded_to(b * c - a * d, first.dtype)


@triton.jit
def norm(
    x: tl.tensor,
    branch: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    total: tl.tensor,
    rstd: tl.tensor,
    q: tl.tensor,
    qt: tl.tensor,
    M: tl.tensor,
    C: tl.tensor,
    eps: tl.tensor,
    HAS_BRANCH: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """RMSNorm of x + branch (M, C). A program reads its rows twice: to sum their squares, then to
    normalise them."""
    s = tl.load(scale)
    m0 = tl.program_id(0) * ROWS
    start = m0.to(tl.int64) * C
    source = total if HAS_BRANCH else x
    # x and branch are read once: they should not evict the sum, which is read again
    FIRST_LOOK: tl.constexpr = "evict_first" if HAS_BRANCH else "evict_last"
    squares_even = tl.full((ROWS // 2, COLUMNS), 0.0, tl.float32)
    squares_odd = tl.full((ROWS // 2, COLUMNS), 0.0, tl.float32)
    for k0 in range(0, C, COLUMNS):
        m, k, inside = even_rows(m0, k0, M, C, ROWS, COLUMNS)
        offsets = start + (m * C + k0 + k)
        even32 = tl.load(x + offsets, inside, 0.0, eviction_policy=FIRST_LOOK).to(tl.float32)
        odd32 = tl.load(x + offsets + C, inside, 0.0, eviction_policy=FIRST_LOOK).to(tl.float32)
        if HAS_BRANCH:
            even32 = _sum(even32, branch + offsets, inside)
            odd32 = _sum(odd32, branch + offsets + C, inside)
            tl.store(total + offsets, even32.to(total.dtype.element_ty), mask=inside)
            tl.store(total + offsets + C, odd32.to(total.dtype.element_ty), mask=inside)
        squares_even += even32 * even32
        squares_odd += odd32 * odd32
    rstd_even = tl.rsqrt(tl.reduce(squares_even, 1, _plus) / C + eps)
    rstd_odd = tl.rsqrt(tl.reduce(squares_odd, 1, _plus) / C + eps)
    rows = m0 + 2 * tl.arange(0, ROWS // 2)
    tl.store(rstd + rows, rstd_even, mask=rows < M)
    tl.store(rstd + rows + 1, rstd_odd, mask=rows < M)
    tl.debug_barrier()  # below, a thread reads what others have written
    for k0 in range(0, C, COLUMNS):
        m, k, inside = even_rows(m0, k0, M, C, ROWS, COLUMNS)
        offsets = start + (m * C + k0 + k)
        w = tl.load(weight + k0 + k, mask=k < C - k0, other=0.0)
        even = _normalised(tl.load(source + offsets, mask=inside, other=0.0), rstd_even, w)
        odd = _normalised(tl.load(source + offsets + C, mask=inside, other=0.0), rstd_odd, w)
        store_both(even * s, odd * s, q, qt, m0, k0, M, C, C - k0, FORMAT, LARGEST, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["n_tiles"])  # a kernel for any number of rows
def norm_grad(
    grad: tl.tensor,
    x: tl.tensor,
    rstd: tl.tensor,
    weight: tl.tensor,
    grad_total: tl.tensor,
    scale: tl.tensor,
    amax: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    q: tl.tensor,
    qt: tl.tensor,
    M: tl.tensor,
    C: tl.tensor,
    n_tiles: tl.tensor,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of norm's x (M, C), grad_total added. A program takes n_tiles tiles of rows one
    after the other, each twice: for the share of the gradient that lies along x, then to write.
    It adds the gradient of the weight up in its row of sums."""
    s = tl.load(scale)
    program = tl.program_id(0)
    sums += program * C
    for tile in range(n_tiles):
        m0 = (program * n_tiles + tile) * ROWS
        start = m0.to(tl.int64) * C
        rows = m0 + 2 * tl.arange(0, ROWS // 2)
        rstd_even = tl.load(rstd + rows, mask=rows < M, other=0.0)
        rstd_odd = tl.load(rstd + rows + 1, mask=rows < M, other=0.0)
        along_even = tl.full((ROWS // 2, COLUMNS), 0.0, tl.float32)
        along_odd = tl.full((ROWS // 2, COLUMNS), 0.0, tl.float32)
        for k0 in range(0, C, COLUMNS):
            m, k, inside = even_rows(m0, k0, M, C, ROWS, COLUMNS)
            at = start + (m * C + k0 + k)
            w = tl.load(weight + k0 + k, mask=k < C - k0, other=0.0)
            x_even, grad_even, of_w_even = _norm_inputs(grad + at, x + at, rstd_even, w, inside)
            x_odd, grad_odd, of_w_odd = _norm_inputs(grad + at + C, x + at + C, rstd_odd, w, inside)
            along_even += grad_even * x_even
            along_odd += grad_odd * x_odd
            columns = k0 + tl.arange(0, COLUMNS)
            # what the tiles before have left there: written behind the barrier below
            has_sum = (columns < C) & (tile > 0)
            before = tl.load(sums + columns, mask=has_sum, other=0.0)
            of_w = tl.reduce(of_w_even + of_w_odd, 0, _plus)
            tl.store(sums + columns, before + of_w, mask=columns < C)
        cubed_even, cubed_odd = rstd_even * rstd_even * rstd_even, rstd_odd * rstd_odd * rstd_odd
        along_x_even = cubed_even * (tl.reduce(along_even, 1, _plus) / C)
        along_x_odd = cubed_odd * (tl.reduce(along_odd, 1, _plus) / C)
        tl.debug_barrier()  # the next tile reads sums that other threads have written
        largest = tl.full((ROWS // 2, COLUMNS), 0, tl.int32)
        for k0 in range(0, C, COLUMNS):
            m, k, inside = even_rows(m0, k0, M, C, ROWS, COLUMNS)
            at = start + (m * C + k0 + k)
            w = tl.load(weight + k0 + k, mask=k < C - k0, other=0.0)
            x_even, grad_even, _ = _norm_inputs(grad + at, x + at, rstd_even, w, inside)
            x_odd, grad_odd, _ = _norm_inputs(grad + at + C, x + at + C, rstd_odd, w, inside)
            even = grad_even * rstd_even[:, None] - x_even * along_x_even[:, None]
            odd = grad_odd * rstd_odd[:, None] - x_odd * along_x_odd[:, None]
            even = _sum(_rounded_to(even, x.dtype.element_ty), grad_total + at, inside)
            odd = _sum(_rounded_to(odd, x.dtype.element_ty), grad_total + at + C, inside)
            tl.store(grad_x + at, even.to(grad_x.dtype.element_ty), mask=inside)
            tl.store(grad_x + at + C, odd.to(grad_x.dtype.element_ty), mask=inside)
            largest = tl.maximum(largest, _larger_magnitude(even, odd))
            store_both(
                even * s, odd * s, q, qt, m0, k0, M, C, C - k0, FORMAT, LARGEST, ROWS, COLUMNS
            )
        tl.atomic_max(amax, tl.reduce(largest, None, _larger))


@triton.jit
def _norm_inputs(
    grad_at: tl.tensor, x_at: tl.tensor, rstd: tl.tensor, weight: tl.tensor, inside: tl.tensor
):
    """x, the gradient of its normalised value, that of the weight at each element; in fp32."""
    x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_last")
    grad = tl.load(grad_at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    x32 = x.to(tl.float32)
    unit = _rounded_to(x32 * rstd[:, None], x.dtype)
    of_weight = _rounded_to(grad * unit, x.dtype)
    return x32, _rounded_to(grad * _rounded_to(weight, x.dtype), x.dtype), of_weight


@triton.jit
def _sum(x: tl.tensor, branch_at: tl.tensor, inside: tl.tensor):
    branch = tl.load(branch_at, mask=inside, other=0.0, eviction_policy="evict_first")
    return _rounded_to(x + branch.to(tl.float32), branch.dtype)


@triton.jit
def _normalised(x: tl.tensor, rstd: tl.tensor, weight: tl.tensor):
    """model.RMSNorm's operations in their order."""
    unit = _rounded_to(x.to(tl.float32) * rstd[:, None], x.dtype)
    return _rounded_to(_rounded_to(weight, x.dtype) * unit, x.dtype)


# ------------------------------------------------------------------------------------------- shared


@triton.jit
def _rounded_to(value: tl.tensor, dtype: tl.constexpr):
    """fp32 value rounded to dtype, in fp32."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def _raise_amax(amax: tl.tensor, even: tl.tensor, odd: tl.tensor):
    """Raise amax, the bits of an fp32 number, to the largest magnitude of a tile."""
    tl.atomic_max(amax, tl.reduce(_larger_magnitude(even, odd), None, _larger))


@triton.jit
def _larger_magnitude(even: tl.tensor, odd: tl.tensor):
    """Of two fp32 numbers, as bits. Without signs, bits are in the order of their numbers, and
    NaN's are above infinity's: it stays."""
    even_bits = even.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    odd_bits = odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(even_bits, odd_bits)


# Not tl.sum and tl.max: they are kernels themselves, interpreted or not since their import.
@triton.jit
def _plus(a: tl.tensor, b: tl.tensor):
    return a + b


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor):
    return tl.maximum(a, b)
