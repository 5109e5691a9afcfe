"""A Triton kernel that rounds to float8 and uses each value twice, as a cast to both layouts does:
ptxas 12.8 and 12.9 assemble it wrongly for sm_90."""

import triton
import triton.language as tl


@triton.jit
def both_layouts(x, q, pairs, SIZE: tl.constexpr, HAS_MOVE: tl.constexpr):
    """x (2 SIZE, SIZE) fp32 -> q, the same in float8, and pairs of rows (SIZE, SIZE), transposed.
    HAS_MOVE: with the move of fp8/triton_kernels.py, which hides from ptxas what it repeats."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    even = tl.load(x + (2 * row * SIZE + column)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    odd = tl.load(x + (2 * row * SIZE + SIZE + column)).to(tl.float8e4nv)
    odd = odd.to(tl.uint8, bitcast=True)
    if HAS_MOVE:
        even = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [even], tl.uint8, True, pack=4)
        odd = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [odd], tl.uint8, True, pack=4)
    tl.store(q + (2 * row * SIZE + column), even)
    tl.store(q + (2 * row * SIZE + SIZE + column), odd)
    both = tl.trans(even.to(tl.int16) | (odd.to(tl.int16) << 8))
    tl.store(pairs + (row * SIZE + column), both)
