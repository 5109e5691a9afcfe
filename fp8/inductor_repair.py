"""A repair of torch.compile's GPU code from torch 2.14 on, where it rounds to float8.

There Inductor writes a clamp as tl.maximum(.., PropagateNan.ALL), and the assembler of Triton 3.6
to 3.8 turns that, beside a transposed float8 store, into code that stores other bytes
(triton#11111): a quarter of runs turned NaN. A clamp written as tl.where in the form below has the
same values and is assembled correctly; by the comparisons the other way round (value > largest) it
is not (tests/bench/test_machine_code.py). torchao repairs it where torchao converts a Linear; ours
do not go that way."""

from typing import Any

import torch

FIRST_BROKEN = (2, 14)  # of torch


def needs_repair() -> bool:
    """Whether this torch writes such clamps; 2.13 calls helpers that use tl.where."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= FIRST_BROKEN


def minimum(a: str, b: str) -> str:
    """Triton's code for the smaller of two values; NaN where either is."""
    return f"tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})"


def maximum(a: str, b: str) -> str:
    """Triton's code for the larger of two values; NaN where either is."""
    return f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})"


def repair_clamps() -> bool:
    """Let Inductor write clamps as tl.where, for this whole process; whether that was due."""
    if not needs_repair():
        return False
    from torch._inductor.codegen import triton

    overrides: Any = triton.TritonOverrides
    overrides.minimum = staticmethod(minimum)
    overrides.maximum = staticmethod(maximum)
    return True
