"""A Triton kernel that rounds to float8 and uses each value twice, as a cast to both layouts does:
ptxas 12.8 and 12.9 assemble it wrongly for sm_90, unless the values are clamped in one way, or
moved behind its back."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)


@triton.jit
def both_layouts(x, q, pairs, SIZE: tl.constexpr, FORM: tl.constexpr):
    """x (2 SIZE, SIZE) fp32 -> q, the same in float8, and pairs of rows (SIZE, SIZE), transposed.
    FORM: what is done to each value, see rounded()."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    even = rounded(tl.load(x + (2 * row * SIZE + column)), FORM)
    odd = rounded(tl.load(x + (2 * row * SIZE + SIZE + column)), FORM)
    tl.store(q + (2 * row * SIZE + column), even)
    tl.store(q + (2 * row * SIZE + SIZE + column), odd)
    both = tl.trans(even.to(tl.int16) | (odd.to(tl.int16) << 8))
    tl.store(pairs + (row * SIZE + column), both)


@triton.jit
def rounded(value, FORM: tl.constexpr):
    """The bytes of float8 values: as they are, clamped as Inductor does from torch 2.14 on, as
    fp8/inductor_repair.py has it do, by comparisons the other way round, or moved as
    fp8/triton_kernels.py does."""
    if FORM == "maximum":
        value = tl.maximum(value, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
        value = tl.minimum(value, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    elif FORM == "repaired":
        value = tl.where((value > -LARGEST) | (value != value), value, -LARGEST)
        value = tl.where((value < LARGEST) | (value != value), value, LARGEST)
    elif FORM == "reversed":
        value = tl.where(value < -LARGEST, -LARGEST, value)
        value = tl.where(value > LARGEST, LARGEST, value)
    values = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if FORM == "moved":
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], tl.uint8, is_pure=True, pack=4
        )
    return values
