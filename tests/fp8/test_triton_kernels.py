"""Our Triton kernels in Triton's interpreter and compiled for an H100, without a GPU. On a GPU:
test_gpu.py."""

import importlib.util
import re
import subprocess
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from bench.machine_code import check_kernel, compiled_for_hopper
from fp8.recipes import E4M3, E5M2
from tests.conftest import ROOT


def load() -> ModuleType:
    """fp8/triton_kernels.py anew, under a name of its own: whether kernels are interpreted is
    decided at the import."""
    spec = importlib.util.spec_from_file_location(
        "fp8_kernels_under_test", ROOT / "fp8/triton_kernels.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernels(monkeypatch):
    """The module, interpreted, with the interpreter's rounding to FP8 repaired and every address
    checked.

    The interpreter (3.6 to 3.9) truncates subnormals, rounds ties away from zero, loses NaN and
    some carries. Hardware rounds as torch does, which tests/test_gpu.py asserts by value. All else
    is the interpreter's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from triton import language as tl
    from triton.runtime import interpreter

    convert, launch = interpreter._convert_float, interpreter.GridExecutor.__call__
    spans: list[tuple[int, int]] = []  # addresses of the tensors of a launch

    def rounded(data, source, target, rounding):
        format = {"fp8e4nv": E4M3, "fp8e5": E5M2}.get(target.name)
        if format is None or source != tl.float32:
            return convert(data, source, target, rounding)
        return torch.from_numpy(np.ascontiguousarray(data)).to(format).view(torch.uint8).numpy()

    def launched(self, *args, **options):
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        spans[:] = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        return launch(self, *args, **options)

    def checked(access, mask):
        def wrapper(self, pointers, *arguments):
            inside = arguments[mask].data
            shape = np.broadcast_shapes(pointers.data.shape, inside.shape)
            addresses = np.broadcast_to(pointers.data, shape)[inside]
            in_span = [((first <= addresses) & (addresses < end)).sum() for first, end in spans]
            assert sum(in_span) == addresses.size, "outside the tensors"
            return access(self, pointers, *arguments)

        return wrapper

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_inline_asm",  # a move
        lambda self, asm, constraints, values, *_: SimpleNamespace(get_result=values.__getitem__),
    )
    for name, mask in (("create_masked_load", 0), ("create_masked_store", 1)):
        builder = interpreter.InterpreterBuilder
        monkeypatch.setattr(builder, name, checked(getattr(builder, name), mask))
    with np.errstate(over="ignore", invalid="ignore"):
        yield load()


def quantised(x: torch.Tensor, scale: torch.Tensor | float, format: torch.dtype) -> torch.Tensor:
    """x * scale, saturated, as torch casts it."""
    largest = torch.finfo(format).max
    return (x.float() * scale).clamp(-largest, largest).to(format)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but for the sign of NaN, which torch keeps while Hopper's instruction drops
    it."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    is_nan, is_equal = a.float().isnan(), a.view(torch.uint8) == b.view(torch.uint8)
    return torch.equal(is_nan, b.float().isnan()) and bool((is_nan | is_equal).all())


def outputs(M: int, K: int, format: torch.dtype) -> list[torch.Tensor]:
    """Both layouts, (M, K) and (K, M), not written yet."""
    shapes = (M, K), (K, M)
    return [torch.full(shape, 0x55, dtype=torch.uint8).view(format) for shape in shapes]


# Tiles so small that even small tensors have many; or those in use.
SMALL, IN_USE = {"ROWS": 32, "CAST_COLUMNS": 16, "GRAD_COLUMNS": 16, "GROUP": 2}, {}


# ---------------------------------------------------------------------------- kernels, interpreted


SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf")]
SPECIAL += [448.0, -448.0, 449.0, 464.0, 480.0, 57344.0, 61440.0, 65536.0, 3e38, -3e38]
SPECIAL += [2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-16, 2.0**-17, 1e-30, 1e-40]


def values_of_every_size(M: int, K: int) -> torch.Tensor:
    """(M, K), each of SPECIAL somewhere; never symmetric under transposition."""
    torch.manual_seed(M * 1000 + K)
    x = torch.randn(M, K) * torch.exp2(torch.randint(-24, 12, (M, K)))
    x.view(-1)[torch.randperm(M * K)[: len(SPECIAL)]] = torch.tensor(SPECIAL)
    return x


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
def test_both_layouts_hold_torchs_values(kernels, M, K, format, dtype, tile, factor):
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


def order(x: torch.Tensor) -> torch.Tensor:
    """Numbers of float8 values in ascending order: the bits of one sign are in order."""
    bits = x.view(torch.uint8).int()
    return torch.where(bits > 127, 128 - bits, bits)


def is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN in the same places, else rarely one step of the format apart: fp32 against fp64, a tie
    may fall the other way."""
    is_nan = a.float().isnan()
    apart = (order(a) - order(b)).abs().masked_fill(is_nan, 0)
    is_rare = apart.max() <= 1 and (apart > 0).float().mean() < 1e-3
    return torch.equal(is_nan, b.float().isnan()) and bool(is_rare)


@dataclass
class EntropyGradient:
    """The kernel's gradient of broken logits, in both layouts, and its definition's."""

    q: torch.Tensor
    qt: torch.Tensor
    expected: torch.Tensor


@pytest.fixture(params=[(48, 80, SMALL), (144, 208, IN_USE)], ids=["small tiles", "those in use"])
def gradient(kernels, request) -> EntropyGradient:
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


def test_the_cross_entropys_gradient_is_that_of_its_definition(gradient):
    """An infinity saturates, as torchao's casts do."""
    assert is_near(gradient.q, gradient.expected)
    assert same(gradient.qt, gradient.q.t().contiguous())


def test_what_is_broken_stays_broken_but_in_ignored_rows(gradient):
    rows_with_nan = gradient.q.float().isnan().any(1).nonzero().flatten()
    assert rows_with_nan.tolist() == [2, 4]


def test_a_token_without_target_or_factor_has_no_gradient(gradient):
    assert not gradient.q[[3, 5, 15]].float().any()


# -------------------------------------------------------------------- what is compiled for an H100


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """(module, binaries): each launch of the module's kernels is compiled for sm_90, as on an H100,
    instead of run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with compiled_for_hopper() as binaries:
        yield load(), binaries


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
def test_kernels_compile_for_an_h100(source, format, is_loss, launched, tmp_path):
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
    assert re.search(r"(min|max)\.NaN", ptx), "the clamp must let NaN through"
    (tmp_path / "cubin").write_bytes(binary.asm["cubin"])
    disassemble = [knobs.nvidia.cuobjdump.path, "--dump-sass", tmp_path / "cubin"]
    sass = subprocess.check_output(disassemble, text=True)
    assert sass.count("F2FP.SATFINITE") == ptx.count(ROUNDING[format])
    proof = check_kernel(binary, ("q", "qt"))
    assert proof.problems == [] and proof.n_bytes == bytes_of_a_thread(module, is_loss)
    # where a tile begins: 65,536 tokens of logits are more than 2^31 values
    offsets = re.findall(r"tt\.addptr .* : !tt\.ptr<\w+>, (i\d+)", binary.asm["ttir"])
    assert offsets == 3 * ["i64"], "counted in 64 bits"
