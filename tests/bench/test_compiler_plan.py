"""bench.compiler_plan; whole plans against docs/speed.md: tests/soak.py."""

from pathlib import Path

import pytest
import torch

from tests.conftest import process

CHECK = """
from bench.compiler_plan import pretend_h100
from fp8.producers import check_are_known_blocks
from model import GPT, GPTConfig

pretend_h100()
check_are_known_blocks(GPT.on_meta(GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ffn=48, n_ctx=16)))
"""


def test_blocks_of_producers_are_known_where_attention_is_a_stand_in():
    """The plan of fp8.scaling=bounded computes small blocks by value; the rest is never run."""
    pytest.importorskip("triton")
    checked = process("-c", CHECK)
    assert checked.returncode == 0, checked.stderr


def test_kernels_that_spill_are_named_with_their_bytes() -> None:
    pytest.importorskip("triton")
    from bench.compiler_plan import _describe_built

    line = _describe_built({"norm (0)": (80, 0), "norm (1)": (101, 12)})
    assert line.endswith("at most 101 registers a thread; spills: norm (1): 12 bytes")


@pytest.mark.parametrize("maxnreg, has_spills", [(24, True), (128, False)])
def test_spilled_registers_are_counted(
    maxnreg: int, has_spills: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a kernel that is given too few registers, and of one that is given enough."""
    pytest.importorskip("triton")
    from bench.compiler_plan import _resources
    from bench.machine_code import compiled_for_hopper
    from tests.helpers.both_layouts import both_layouts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.zeros(128, 64)
    q, pairs = x.to(torch.uint8), torch.zeros(64, 64, dtype=torch.int16)
    with compiled_for_hopper() as kernels:
        both_layouts[(1,)](x, q, pairs, SIZE=64, FORM="moved", num_warps=4, maxnreg=maxnreg)
    n_registers, spilled_bytes = _resources(kernels[0].asm["cubin"])
    assert n_registers <= maxnreg
    assert bool(spilled_bytes) == has_spills
