"""Our Triton kernels in Triton's interpreter and compiled for an H100, without a GPU. On a GPU:
test_gpu.py."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bench.machine_code import check_kernel
from fp8.recipes import E4M3, E5M2
from tests.helpers.triton_kernels import (
    compiled_for_an_h100,
    interpreter_repaired,
    is_near,
    load,
    outputs,
    quantised,
    same,
    values_of_every_size,
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """fp8/triton_kernels.py, interpreted."""
    with interpreter_repaired(monkeypatch):
        yield load("triton_kernels", monkeypatch)


# Tiles so small that even small tensors have many; or those in use.
SMALL, IN_USE = {"ROWS": 32, "CAST_COLUMNS": 16, "GRAD_COLUMNS": 16, "GROUP": 2}, {}


# ---------------------------------------------------------------------------- kernels, interpreted


@pytest.mark.parametrize("operation, a, b", [("add", 2**31 - 1, 1), ("mul", 2**16, 2**15)])
def test_integers_of_a_kernel_that_overflow_are_seen(kernels, operation: str, a: int, b: int):
    """Such as an offset that is not computed in 64 bits."""
    from triton.runtime import interpreter

    operate = getattr(interpreter.interpreter_semantic, operation)
    operands = [interpreter._implicit_cvt(value) for value in (a, b)]
    with pytest.raises(AssertionError, match="int32 overflow"):
        operate(*operands, True)
    smaller = interpreter._implicit_cvt(b - 1)
    assert operate(operands[0], smaller, True).handle.data.item() < 2**31


@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize(
    "M, K, format, dtype, tile",
    [
        (16, 112, E4M3, torch.bfloat16, SMALL),
        (48, 80, E5M2, torch.bfloat16, SMALL),
        (112, 16, E5M2, torch.float32, SMALL),
        (176, 48, E4M3, torch.float32, SMALL | {"GROUP": 4}),  # 6 tiles of rows
        (144, 272, E4M3, torch.bfloat16, IN_USE),  # no multiples of it
    ],
)
def test_both_layouts_hold_torchs_values(
    kernels,
    M: int,
    K: int,
    format: torch.dtype,
    dtype: torch.dtype,
    tile: dict[str, int],
    factor: float,
):
    vars(kernels).update(tile)
    x, scale = values_of_every_size(M, K).to(dtype), torch.tensor(factor)
    q, qt = outputs(M, K, format)
    kernels.launch(kernels.cast_both, (x, scale), q, qt)
    expected = quantised(x, scale, format)
    assert same(q, expected)
    assert same(qt, expected.t().contiguous())


Entropy = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def entropy_case(M: int = 48, V: int = 80) -> Entropy:
    """What cross_entropy_grad() takes: logits, their log-sum-exp, targets of which two are none,
    each token's factor, scale."""
    torch.manual_seed(V)
    logits = (torch.randn(M, V) * 3).bfloat16()
    targets, grad = torch.randint(0, V, (M,)), torch.rand(M) / 500
    targets[0], targets[1], targets[3], targets[15], grad[5] = 0, V - 1, -100, -100, 0.0
    return logits, torch.logsumexp(logits.float(), 1), targets, grad, torch.tensor(2.0**17)


def entropy_grad(
    logits: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    grad: torch.Tensor,
    scale: torch.Tensor,
    format: torch.dtype = E5M2,
) -> torch.Tensor:
    """By definition, in fp64, then rounded as torch rounds."""
    p = (logits.double() - lse.double()[:, None]).exp()
    is_target = torch.arange(logits.shape[1])[None, :] == targets[:, None]
    value = (p - is_target.double()) * (grad * scale).double()[:, None]
    return quantised(torch.where(targets[:, None] == -100, 0.0, value).float(), 1.0, format)


@dataclass
class EntropyGradient:
    """The kernel's gradient of broken logits, in both layouts, and its definition's."""

    q: torch.Tensor
    qt: torch.Tensor
    expected: torch.Tensor


@pytest.fixture(params=[(48, 80, SMALL), (144, 208, IN_USE)], ids=["small tiles", "those in use"])
def gradient(kernels, request: pytest.FixtureRequest) -> EntropyGradient:
    """NaN in the logits of tokens 2 and 3, of which 3 has no target; infinities in those of 4 and
    6, and as the factor of 8."""
    M, V, tile = request.param
    logits, _, targets, grad, scale = entropy_case(M, V)
    logits[2, 7] = logits[3, 7] = float("nan")
    logits[4, 9], logits[6, 1], grad[8] = float("inf"), -float("inf"), float("inf")
    lse = torch.logsumexp(logits.float(), 1)
    vars(kernels).update(tile)
    q, qt = outputs(M, V, E5M2)
    kernels.launch(kernels.cross_entropy_grad, (logits, lse, targets, grad, scale), q, qt)
    return EntropyGradient(q, qt, entropy_grad(logits, lse, targets, grad, scale))


def test_the_cross_entropys_gradient_is_that_of_its_definition(gradient: EntropyGradient):
    """An infinity saturates, as torchao's casts do."""
    assert is_near(gradient.q, gradient.expected)
    assert same(gradient.qt, gradient.q.t().contiguous())


def test_what_is_broken_stays_broken_but_in_ignored_rows(gradient: EntropyGradient):
    rows_with_nan = gradient.q.float().isnan().any(1).nonzero().flatten()
    assert rows_with_nan.tolist() == [2, 4]


def test_a_token_without_target_or_factor_has_no_gradient(gradient: EntropyGradient):
    assert not gradient.q[[3, 5, 15]].float().any()


# -------------------------------------------------------------------- what is compiled for an H100


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """(module, binaries) of the kernels, see compiled_for_an_h100()."""
    with compiled_for_an_h100(monkeypatch, tmp_path) as binaries:
        yield load("triton_kernels", monkeypatch), binaries


ROUNDING = {E4M3: "cvt.rn.satfinite.e4m3x2.f32", E5M2: "cvt.rn.satfinite.e5m2x2.f32"}


def bytes_of_a_thread(module: ModuleType, is_loss: bool) -> int:
    """Bytes that a thread stores in both layouts of its tile."""
    columns = module.GRAD_COLUMNS if is_loss else module.CAST_COLUMNS
    return 2 * module.ROWS * columns // (32 * module.WARPS)


@pytest.mark.parametrize(
    "source, format, is_loss",
    [
        (torch.bfloat16, E4M3, False),
        (torch.float32, E4M3, False),
        (torch.bfloat16, E5M2, False),
        (torch.bfloat16, E5M2, True),
    ],
)
def test_kernels_compile_for_an_h100(
    source: torch.dtype, format: torch.dtype, is_loss: bool, launched, tmp_path: Path
):
    """Rounded once, by the hardware's saturating instruction: ptxas 12.8 rounds a second time,
    wrongly; and every byte that is stored comes from there."""
    from triton import knobs

    module, binaries = launched
    if is_loss:
        kernel, inputs = module.cross_entropy_grad, entropy_case(48, 80)
    else:
        kernel, inputs = module.cast_both, (torch.zeros(48, 80, dtype=source), torch.tensor(1.0))
    module.launch(kernel, inputs, *outputs(48, 80, format))
    (binary,) = binaries
    ptx = binary.asm["ptx"]
    assert ROUNDING[format] in ptx
    assert not re.search(r"(min|max)\.(NaN\.)?f32", ptx), "clamped by selection"
    (tmp_path / "cubin").write_bytes(binary.asm["cubin"])
    disassemble = [knobs.nvidia.cuobjdump.path, "--dump-sass", tmp_path / "cubin"]
    sass = subprocess.check_output(disassemble, text=True)
    assert sass.count("F2FP.SATFINITE") == ptx.count(ROUNDING[format])
    proof = check_kernel(binary, ("q", "qt"))
    assert proof.problems == [] and proof.n_bytes == bytes_of_a_thread(module, is_loss)
    # where a tile begins: 65,536 tokens of logits are more than 2^31 values
    offsets = re.findall(r"tt\.addptr .* : !tt\.ptr<\w+>, (i\d+)", binary.asm["ttir"])
    assert offsets == 3 * ["i64"], "counted in 64 bits"
