"""How a CPU emulates FP8: on its BF16 units or in fp32, each result rounded once; block by block,
to the same bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp8 import bf16_in_fp32, linears, rounding
from fp8.linears import EmulatedLinear, EmulatedMatmul
from fp8.matmul import scaled_mm_of_bf16
from fp8.recipes import RECIPES, Operand
from fp8.rounding import fake_quantise
from model import Linear

M, K, N = 512, 384, 256  # multiples of 128, for every recipe
NEAREST = [name for name, recipe in RECIPES.items() if not recipe.grad.is_stochastic]


@pytest.fixture(params=[True, False], ids=["units", "fp32"])
def has_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU has BF16 units; where it has none, torch computes the same without them."""
    monkeypatch.setattr(linears, "has_bf16_units", lambda: request.param)
    return request.param


def random_operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (M, K) and g (M, N) in BF16, w (N, K) in fp32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator).bfloat16()
    w = torch.randn(N, K, generator=generator) / 16
    g = torch.randn(M, N, generator=generator).bfloat16()
    return x, w, g


def three_matmuls(recipe: str, is_compiled: bool = False) -> list[torch.Tensor]:
    """Output, input gradient and weight gradient of an emulated Linear."""
    x, w, g = random_operands()
    linear = EmulatedLinear(Linear(K, N), RECIPES[recipe])
    linear.weight.data.copy_(w)
    if is_compiled:
        linear.compile(fullgraph=True, dynamic=False)
    x.requires_grad_()
    y = linear(x)
    y.backward(g)
    assert x.grad is not None and linear.weight.grad is not None
    return [y.detach(), x.grad, linear.weight.grad]


def exact_matmuls(name: str) -> list[torch.Tensor]:
    """The same in fp64, from operands that fake_quantise() has rounded."""
    x, w, g = random_operands()
    recipe = RECIPES[name]

    y = rounded(x, recipe.input) @ rounded(w, recipe.weight).T
    if recipe.has_bf16_output:
        y = x.double() @ w.bfloat16().double().T
    if recipe.has_bf16_input_grad:
        grad_x = g.double() @ w.bfloat16().double()
    else:
        grad_x = rounded(g, recipe.grad) @ rounded(w, recipe.weight_again or recipe.weight, 0)
    if recipe.has_bf16_weight_grad:
        grad_w = g.double().T @ x.double()
    else:
        if recipe.is_rotated:
            g, x = rounding.rotated(g), rounding.rotated(x)
        grad_w = rounded(g, recipe.grad, 0).T @ rounded(x, recipe.input, 0)
    return [y, grad_x, grad_w]


def rounded(x: torch.Tensor, operand: Operand, dim: int = -1) -> torch.Tensor:
    """The values that are multiplied, in fp64."""
    return fake_quantise(x, operand, dim).double()


@pytest.mark.parametrize("name", NEAREST)
def test_each_matmul_is_fp64s_rounded_once_to_bf16(name: str, has_units: bool) -> None:
    for computed, exact in zip(three_matmuls(name), exact_matmuls(name), strict=True):
        ideal = exact.bfloat16().double()
        # the order of sums in fp32 tips a rounding here and there
        assert (computed.double() != ideal).double().mean() < 5e-3
        assert (computed.double() - exact).norm() < 1.001 * (ideal - exact).norm()


@pytest.mark.parametrize("name", ["tensorwise", "rowwise_with_gw_hp", "mxfp8", "cscale"])
def test_compiled_or_not_the_units_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to BF16 once more, as Inductor leaves a weight gradient in fp32."""
    monkeypatch.setattr(linears, "has_bf16_units", lambda: True)
    compiled_results = three_matmuls(name, is_compiled=True)
    for compiled, eager in zip(compiled_results, three_matmuls(name), strict=True):
        assert torch.equal(compiled.bfloat16(), eager.bfloat16())


CONTEXT = SimpleNamespace(save_for_backward=lambda *tensors: None)  # of a Function


class ReturnedArguments(TorchFunctionMode):
    """Collects the tensors that torch's functions returned as they were given them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if any(result is argument for argument in args):
            self.tensors.append(result)
        return result


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("units", [True, False], ids=["units", "fp32"])
def test_the_output_is_not_what_a_cast_to_its_own_dtype_returned(name: str, units: bool) -> None:
    """Compiled by torch 2.11, such a Function has gradients of zero
    (findings/compiled_function_noop_cast.sh)."""
    x, w, _ = random_operands()
    with ReturnedArguments() as returned:
        y = EmulatedMatmul.forward(CONTEXT, x, w, None, None, RECIPES[name], units)
    assert all(y is not tensor for tensor in returned.tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_matmul_in_fp32_does_not_return_what_a_cast_to_its_own_dtype_did(
    dtype: torch.dtype,
) -> None:
    x, w, _ = random_operands()
    with ReturnedArguments() as returned:
        y = bf16_in_fp32.MatmulInFp32.forward(CONTEXT, x.to(dtype), w)
    assert all(y is not tensor for tensor in returned.tensors)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dim", [-1, 0])
def test_rounding_in_blocks_changes_no_bit(
    name: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(640, 1024, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-4, 4, 640)[:, None]
    for operand in {operand for operand in RECIPES[name].operands if operand.format}:
        for values in (x, x.bfloat16()):
            monkeypatch.setattr(rounding, "BLOCK", 2**14)
            in_blocks = fake_quantise(values, operand, dim)
            monkeypatch.setattr(rounding, "BLOCK", values.numel())
            assert torch.equal(in_blocks, fake_quantise(values, operand, dim))


def test_cpu_fp32_keeps_fp8_off_the_units(has_units: bool) -> None:
    holder = torch.nn.Sequential(EmulatedLinear(Linear(K, N), RECIPES["mxfp8"]))
    assert holder[0].has_units == has_units
    bf16_in_fp32.convert(holder)
    assert not holder[0].has_units


class DtypesOfMatmuls(TorchDispatchMode):
    """Keeps the dtypes of what torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen |= {args[0].dtype, args[1].dtype}
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", RECIPES)
def test_cpu_fp32_multiplies_nothing_in_bf16(name: str) -> None:
    """A CPU without BF16 units takes five times as long for it."""
    holder = torch.nn.Sequential(EmulatedLinear(Linear(K, N), RECIPES[name]))
    bf16_in_fp32.convert(holder)
    x = torch.randn(M, K).bfloat16().requires_grad_()
    with DtypesOfMatmuls() as dtypes:
        holder(x).sum().backward()
    assert dtypes.seen == {torch.float32}


def test_a_product_is_scaled_before_it_is_rounded() -> None:
    """Two roundings would leave a quarter of the values one step off."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 384, generator=generator).bfloat16()
    b = torch.randn(384, 192, generator=generator).bfloat16()
    factor = torch.tensor(0.0123456789)
    ideal = (a.double() @ b.double() * factor.double()).bfloat16()
    for transposed in (a, a.t().contiguous().t()):
        computed = scaled_mm_of_bf16(transposed, b, factor)
        assert (computed != ideal).double().mean() < 1e-3
