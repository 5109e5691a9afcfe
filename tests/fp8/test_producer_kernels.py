"""The kernels of a block's producers in Triton's interpreter, against model.py's modules and
autograd; and compiled for an H100, without a GPU."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton

from bench.machine_code import check_kernel
from bench.producer_launches import producer_launches
from fp8.recipes import E4M3, E5M2
from model import GPTConfig, RMSNorm, rotate
from tests.helpers.triton_kernels import (
    compiled_for_an_h100,
    interpreter_repaired,
    load,
    outputs,
    quantised,
    same,
    values_of_every_size,
)


def load_kernels(monkeypatch: pytest.MonkeyPatch):
    load("triton_kernels", monkeypatch).GROUP = 2
    return load("producer_kernels", monkeypatch)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """fp8/producer_kernels.py, interpreted."""
    with interpreter_repaired(monkeypatch):
        yield load_kernels(monkeypatch)


# Tiles so small that even small tensors have many; or those in use.
SMALL = {"ROWS": 32, "COLUMNS": 16, "NORM_ROWS": 16, "NORM_COLUMNS": 32, "NORM_GRAD_COLUMNS": 32}
TILES = pytest.mark.parametrize("tile", [SMALL, {}], ids=["small tiles", "those in use"])
SCALE = torch.tensor(0.37)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    return x.float().abs().max()


def equal_or_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(a.isnan() and b.isnan())


class Written:
    """Both layouts and the amax that a kernel has written, from what stood there before."""

    def __init__(self, M: int, K: int, format: torch.dtype, before: float = 1e-3):
        self.q, self.qt = outputs(M, K, format)
        self.amax = torch.tensor(before)

    def holds(self, x: torch.Tensor) -> None:
        """Assert that all is written as x (M, K) in BF16 says."""
        expected = quantised(x, SCALE, self.q.dtype)
        assert same(self.q, expected)
        assert same(self.qt, expected.t().contiguous())
        assert equal_or_nan(self.amax, largest_magnitude(x))


def moderate(M: int, K: int, seed: int = 0) -> torch.Tensor:
    """(M, K) in BF16, of the sizes that activations have."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(M, K, generator=generator)).bfloat16()


# ------------------------------------------------------------------------------------ whole tensors


@TILES
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_a_copy_has_torchs_values_in_both_layouts(
    kernels, tile: dict[str, int], format: torch.dtype
):
    vars(kernels).update(tile)
    x = values_of_every_size(176, 112).nan_to_num(nan=5.0).bfloat16()
    written = Written(176, 112, format)
    kernels.launch(kernels.copy, (x, SCALE, written.amax), written.q, written.qt, 112)
    written.holds(x)


@pytest.mark.parametrize("row", [36, 37])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -100.0])
def test_a_single_value_reaches_the_amax(kernels, value: float, row: int):
    """Negative, or not finite, in an even or an odd row."""
    x = moderate(64, 64)
    x[row, 5] = value
    written = Written(64, 64, E5M2)
    kernels.launch(kernels.copy, (x, SCALE, written.amax), written.q, written.qt, 64)
    written.holds(x)


def test_an_amax_is_only_raised(kernels):
    """By later micro-batches of a step."""
    x = moderate(64, 64)
    written = Written(64, 64, E4M3, before=1e4)
    kernels.launch(kernels.copy, (x, SCALE, written.amax), written.q, written.qt, 64)
    assert written.amax == 1e4


@TILES
def test_swiglu_is_model_pys(kernels, tile: dict[str, int]):
    vars(kernels).update(tile)
    gate_up = moderate(176, 2 * 112)
    written = Written(176, 112, E4M3)
    inputs = gate_up, SCALE, written.amax
    kernels.launch(kernels.swiglu, inputs, written.q, written.qt, 112)
    gate, up = gate_up.chunk(2, dim=-1)
    written.holds(F.silu(gate) * up)


def test_swiglu_of_values_of_every_size(kernels):
    gate_up = values_of_every_size(48, 2 * 80).bfloat16()
    written = Written(48, 80, E4M3)
    inputs = gate_up, SCALE, written.amax
    kernels.launch(kernels.swiglu, inputs, written.q, written.qt, 80)
    gate, up = gate_up.chunk(2, dim=-1)
    written.holds(F.silu(gate) * up)


@TILES
def test_swiglus_gradient_is_autograds(kernels, tile: dict[str, int]):
    vars(kernels).update(tile)
    gate_up, grad = moderate(176, 2 * 112).requires_grad_(), moderate(176, 112, seed=1)
    gate, up = gate_up.chunk(2, dim=-1)
    (F.silu(gate) * up).backward(grad)
    written = Written(176, 224, E5M2)
    inputs = grad, gate_up.detach(), SCALE, written.amax
    kernels.launch(kernels.swiglu_grad, inputs, written.q, written.qt, 112)
    written.holds(gate_up.grad)


# ----------------------------------------------------------------------------------- heads and rows


@TILES
@pytest.mark.parametrize("H, K, D", [(2, 2, 16), (4, 2, 8), (2, 1, 48)])
def test_ropes_gradient_is_autograds(kernels, tile: dict[str, int], H: int, K: int, D: int):
    """q's, k's and v's side by side, with fewer heads of k and v, and half a head no power of
    two."""
    vars(kernels).update(tile)
    B, T, width = 3, 48, (H + 2 * K) * D
    qkv = torch.zeros(B, T, H + 2 * K, D, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.rand(T, D // 2) * 6.0
    tables = angles.cos(), angles.sin()
    gradients = [moderate(B * T, heads * D, seed=heads).view(B, T, heads, D) for heads in (H, K, K)]
    q, k, v = qkv.split((H, K, K), dim=2)
    rotated = rotate(q, *tables), rotate(k, *tables), v
    torch.autograd.backward(rotated, gradients)
    written = Written(B * T, width, E5M2)
    kernels.launch_rope_grad(tuple(gradients), tables, SCALE, written.amax, written.q, written.qt)
    written.holds(qkv.grad.view(B * T, width))


@TILES
@pytest.mark.parametrize("has_branch", [True, False])
@pytest.mark.parametrize("M, C", [(176, 112), (48, 80)])
def test_a_norm_is_model_pys(kernels, tile: dict[str, int], has_branch: bool, M: int, C: int):
    vars(kernels).update(tile)
    x, branch = moderate(M, C), moderate(M, C, seed=1)
    module = RMSNorm(C, 1e-5)
    module.weight.data = 1 + torch.rand(C)
    whole = x + branch if has_branch else x
    q, qt = outputs(M, C, E4M3)
    total, rstd = torch.full_like(x, 7.0), torch.empty(M)
    given = branch if has_branch else None
    kernels.launch_norm(x, given, module.weight.data, 1e-5, SCALE, total, rstd, q, qt)
    expected = quantised(module(whole).detach(), SCALE, E4M3)
    assert same(q, expected)
    assert same(qt, expected.t().contiguous())
    assert torch.equal(total, whole if has_branch else torch.full_like(x, 7.0))
    exact = whole.double().square().mean(1).add(1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-6, atol=0.0)


@TILES
@pytest.mark.parametrize("programs", [1, 2, 8])
@pytest.mark.parametrize("M, C", [(176, 112), (48, 80)])
def test_a_norms_gradient_is_autograds(kernels, tile, programs, M, C):
    """That of the residual stream is added; of a program's tiles some are empty. Sums of values of
    few bits are exact in any order."""
    vars(kernels).update(tile)
    x, grad, grad_total = (moderate(M, C, seed).mul(4).round() / 4 for seed in range(3))
    grad_total[M - programs, 3] = 1024.0  # the largest, in an odd row or an even one
    module = RMSNorm(C, 1e-5)
    module.weight.data = 2.0 ** (torch.arange(C) % 3 - 1)
    module(x.requires_grad_()).backward(grad)
    x.requires_grad_(False)
    rstd = x.float().square().mean(1).add(1e-5).rsqrt()
    written = Written(M, C, E5M2)
    grad_x, sums = torch.full_like(x, 7.0), torch.full((programs, C), 7.0)
    inputs = grad, x, rstd, module.weight.data, grad_total, SCALE, written.amax
    kernels.launch_norm_grad(*inputs, grad_x, sums, written.q, written.qt)
    expected = grad_total + x.grad
    assert torch.equal(grad_x, expected)
    written.holds(expected)
    torch.testing.assert_close(sums.sum(0), module.weight.grad, rtol=2**-8, atol=1e-3)


def test_a_kernel_refuses_layouts_of_other_shapes(kernels):
    x, amax = moderate(64, 48), torch.tensor(0.0)
    q, qt = outputs(64, 48, E4M3)
    with pytest.raises(AssertionError):
        kernels.launch(kernels.copy, (x, SCALE, amax), q, q, 48)
    with pytest.raises(AssertionError):
        kernels.launch(kernels.copy, (x.t(), SCALE, amax), q, qt, 48)


# -------------------------------------------------------------------- what is compiled for an H100


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """(module, binaries), see compiled_for_an_h100()."""
    with compiled_for_an_h100(monkeypatch, tmp_path) as binaries:
        yield load_kernels(monkeypatch), binaries


WIDE = GPTConfig(n_layer=1, n_head=16, n_embd=2048, n_ffn=5632)  # as 1.5B is


@pytest.mark.parametrize("name", producer_launches(WIDE))
def test_kernels_compile_for_an_h100_without_spills(name: str, launched, tmp_path: Path):
    """At most 128 registers; every value is rounded once, by the hardware's saturating
    instruction."""
    from triton import knobs

    module, binaries = launched
    producer_launches(WIDE)[name](module)
    (binary,) = binaries
    ptx = binary.asm["ptx"]
    conversions = re.findall(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32", ptx)
    assert conversions
    assert not re.search(r"(min|max)\.(NaN\.)?f32", ptx), "clamped by selection"
    proof = check_kernel(binary, ("q", "qt"))
    assert proof.problems == [] and proof.n_bytes > 0
    (tmp_path / "cubin").write_bytes(binary.asm["cubin"])
    cuobjdump = knobs.nvidia.cuobjdump.path
    sass = subprocess.check_output([cuobjdump, "--dump-sass", tmp_path / "cubin"], text=True)
    assert sass.count("F2FP.SATFINITE") == len(conversions)
    usage = subprocess.check_output([cuobjdump, "-res-usage", tmp_path / "cubin"], text=True)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    assert registers <= 128
    assert "STACK:0 " in usage, "spills"


@pytest.mark.parametrize("name", producer_launches(WIDE))
def test_kernels_fuse_products_and_sums_whatever_tritons_default(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    options = []
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda kernel, *_, **named: options.append(named)
    )
    producer_launches(WIDE)[name](load_kernels(monkeypatch))
    assert [launch["enable_fp_fusion"] for launch in options] == [True]
