"""Bytes that the casts of a recipe move, for the model of speed in runtime/roofline.py.

Counted from the kernels that Inductor plans for model.py on an H100 (bench/compiler_plan.py),
beside what BF16's kernels move. A recipe without a table here has no modelled speed: `--plan` then
gives an upper bound.

    x input   g gradient of the output   w weight   all in bytes an element of that tensor
"""

from dataclasses import dataclass

# of the bandwidth, where Inductor writes a transposed copy (pytorch#130015); assumed
TRANSPOSED = 0.8
OURS = 0.85  # of the bandwidth, for fp8/triton_kernels.py; assumed


@dataclass(frozen=True)
class Moved:
    """Bytes that casts move per element of a tensor, beside what every recipe moves."""

    amax: float = 0.0  # read to find the largest magnitude, by a kernel of its own
    cast: float = 0.0  # read and written as it lies
    # by a kernel of Inductor's that writes a transposed copy, alone or besides
    transposed: float = 0.0
    ours: float = 0.0  # by our kernel, which writes both copies
    spared: float = 0.0  # written and read in BF16's graph, but not in this one

    def seconds(self, elements: float, bandwidth: float) -> float:
        """Time for a tensor of so many elements, at `bandwidth` in bytes/s."""
        straight = self.amax + self.cast - self.spared
        return elements * (straight + self.transposed / TRANSPOSED + self.ours / OURS) / bandwidth


@dataclass(frozen=True)
class PerLinear:
    """One Moved for each kind of Linear in a block, and the head."""

    qkv: Moved = Moved()
    out: Moved = Moved()
    gate_up: Moved = Moved()
    down: Moved = Moved()
    head: Moved = Moved()

    def of(self, linear: str) -> Moved:
        moved = getattr(self, linear)
        assert isinstance(moved, Moved)
        return moved


@dataclass(frozen=True)
class Casts:
    """What a recipe does to the tensors of every Linear."""

    formats: tuple[str, str, str]  # of the matmuls: forward, input's gradient, weight's gradient
    x: PerLinear = PerLinear()
    g: PerLinear = PerLinear()
    w: Moved = Moved()  # in every micro-batch
    w_step: Moved = Moved()  # once a step
    # weight gradients are added up within their matmul, but the head's (keep_gradients)
    adds: bool = False


def by_origin(norm: Moved, attention: Moved, product: Moved) -> PerLinear:
    """By what a Linear's input comes from: a norm (qkv, gate_up, head), attention (out), SwiGLU's
    product (down)."""
    return PerLinear(qkv=norm, out=attention, gate_up=norm, down=product, head=norm)


FP8 = ("fp8", "fp8", "fp8")
FP8_BF16_WEIGHT_GRAD = ("fp8", "fp8", "bf16")
KERNELS = ("fp8", "fp8", "fp8_fp32")  # the weight gradient leaves the matmul in fp32
# Row scales reach the matmul in the forward pass alone: backward, without fast accumulation,
# torchao multiplies by one scale of 1 and applies those of the rows afterwards (float8_ops.py).
ROWWISE = ("fp8_rowwise", "fp8", "fp8")
ROWWISE_BF16_WEIGHT_GRAD = ("fp8_rowwise", "fp8", "bf16")

# torchao casts weights in every micro-batch, and gradients behind the matmul (2 read, 4 written).
TORCHAO_WEIGHT = Moved(amax=4, cast=11, transposed=5)
TORCHAO_ROW_WEIGHT = Moved(cast=11, transposed=5)
# The weight in both layouts, once a step: 4 for the amax, 4 + 2 for the copies.
KERNELS_WEIGHT = Moved(amax=4, ours=6)

# The weight is cast once a step (4 read, 2 written), its gradient leaves the matmul in fp32.
BF16_CASTS = Casts(("bf16", "bf16", "bf16"), w_step=Moved(cast=6), adds=True)
ZERO_CASTS = Casts(FP8)  # the ceiling

# A norm's output is not written where only its FP8 copy is read (spares 2); SwiGLU's neither
# (spares 6), but each pass over it reads both halves again. The weight gradient's amax is found
# anew, and casts begin at BF16: two passes of each.
TENSORWISE_CASTS = Casts(
    FP8,
    x=by_origin(
        norm=Moved(amax=2, cast=3, transposed=3, spared=2),
        attention=Moved(amax=4, cast=3, transposed=3),
        product=Moved(amax=8, cast=5, transposed=5, spared=6),
    ),
    g=PerLinear(
        qkv=Moved(amax=2, transposed=4, spared=4),
        out=Moved(transposed=4),
        gate_up=Moved(amax=2, transposed=4),
        down=Moved(transposed=4),
        head=Moved(amax=2, transposed=4, spared=4),
    ),
    w=TORCHAO_WEIGHT,
)
TENSORWISE_GW_HP_CASTS = Casts(
    FP8_BF16_WEIGHT_GRAD,
    x=by_origin(norm=Moved(cast=3), attention=Moved(amax=2, cast=3), product=Moved(amax=4, cast=5)),
    g=PerLinear(
        qkv=Moved(amax=2, cast=1),
        out=Moved(cast=3),
        gate_up=Moved(amax=2, cast=3),
        down=Moved(cast=3),
        head=Moved(amax=2, cast=1),
    ),
    w=TORCHAO_WEIGHT,
)
# Rows: one kernel finds the amax and casts; columns once more for the weight gradient. Behind a
# rowwise matmul of the backward pass comes a multiplication by its scales (ao#2184), which keeps
# the norms' backward passes from fusing: 11 or 37 bytes.
ROWWISE_CASTS = Casts(
    ROWWISE,
    x=by_origin(
        norm=Moved(amax=2, cast=1, transposed=3, spared=2),
        attention=Moved(amax=2, cast=7, transposed=3),
        product=Moved(amax=4, cast=5, transposed=5, spared=6),
    ),
    g=PerLinear(
        qkv=Moved(amax=2, transposed=4, spared=4),
        out=Moved(amax=2, cast=31, transposed=4),
        gate_up=Moved(amax=2, transposed=4),
        down=Moved(amax=2, cast=31, transposed=4),
        head=Moved(amax=2, transposed=4, spared=4),
    ),
    w=TORCHAO_ROW_WEIGHT,
)
ROWWISE_WITH_GW_HP_CASTS = Casts(
    ROWWISE_BF16_WEIGHT_GRAD,
    x=by_origin(norm=Moved(cast=1), attention=Moved(cast=7), product=Moved(cast=3)),
    g=PerLinear(
        qkv=Moved(cast=1),
        out=Moved(cast=11),
        gate_up=Moved(cast=3),
        down=Moved(cast=11),
        head=Moved(cast=1),
    ),
    w=TORCHAO_WEIGHT,
)
TENSORWISE_KERNELS_CASTS = Casts(
    KERNELS,
    x=by_origin(norm=Moved(ours=4), attention=Moved(amax=2, ours=4), product=Moved(ours=4)),
    g=PerLinear(
        qkv=Moved(ours=4),
        out=Moved(cast=2, ours=4),
        gate_up=Moved(ours=4),
        down=Moved(cast=2, ours=4),
        head=Moved(ours=4, spared=4),
    ),
    w_step=KERNELS_WEIGHT,
)
# Scales known before: Inductor casts in the kernel that makes x, whose transposed copy it makes
# anew in the backward pass from what that keeps (a norm's input, gate and up), and in the one that
# makes g, which then leaves it in both layouts alone. As bench/compiler_plan.py has it: 7,613 kB a
# token at 1.5B, 1,652 above BF16; these sum up to 1,663.
TENSORWISE_DELAYED_CASTS = Casts(
    KERNELS,
    x=by_origin(
        norm=Moved(cast=1, transposed=3, spared=2),
        attention=Moved(cast=3, transposed=3),
        product=Moved(cast=1, transposed=5, spared=2),
    ),
    g=PerLinear(
        qkv=Moved(transposed=2, spared=2),
        out=Moved(transposed=4),
        gate_up=Moved(transposed=2, spared=2),
        down=Moved(transposed=4),
        head=Moved(ours=4, spared=4),
    ),
    w_step=KERNELS_WEIGHT,
)
# The kernels of norm, SwiGLU and RoPE's backward pass leave FP8 in both layouts, as many bytes as
# BF16 alone; that of the norm's backward pass leaves it beside BF16, which the residual stream
# needs. Attention's output, which comes from a kernel that is not ours, is read again. The head's
# input is cast as with delayed scales. As bench/compiler_plan.py has it: 6,415 kB a token at 1.5B,
# 454 above BF16; these sum up to 459.
PRODUCED = Moved(ours=2, spared=2)
TENSORWISE_BOUNDED_CASTS = Casts(
    KERNELS,
    x=PerLinear(
        qkv=PRODUCED,
        out=Moved(ours=4),
        gate_up=PRODUCED,
        down=PRODUCED,
        head=Moved(cast=1, transposed=3, spared=2),
    ),
    g=PerLinear(
        qkv=PRODUCED,
        out=Moved(ours=2),
        gate_up=PRODUCED,
        down=Moved(ours=2),
        head=Moved(ours=4, spared=4),
    ),
    w_step=KERNELS_WEIGHT,
)
TENSORWISE_GW_HP_KERNELS_CASTS = Casts(
    FP8_BF16_WEIGHT_GRAD,
    x=by_origin(norm=Moved(ours=3), attention=Moved(amax=2, ours=3), product=Moved(ours=3)),
    g=PerLinear(*[Moved(ours=3)] * 5),
    w_step=KERNELS_WEIGHT,
    adds=True,
)
