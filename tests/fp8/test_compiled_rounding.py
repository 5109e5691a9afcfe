"""fp8/compiled_rounding.py: to the same bits as fake_quantise(), in loops compiled once for all
sizes."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from fp8 import compiled_rounding
from fp8.compiled_rounding import Loops, round_in_loops, rounded_in_graph
from fp8.linears import EmulatedLinear
from fp8.recipes import E4M3, E5M2, RECIPES, Format, Operand
from fp8.rounding import fake_quantise
from model import Linear
from tests.helpers.rounding import (
    BLOCK_OPERANDS,
    ROUNDED_BY_BITS,
    assert_same_bits,
    matrices,
    with_tiny_rows,
)

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops as torch runs them, since compiling takes seconds for each operand and dtype."""
    loops = Loops(compiled_rounding.largest_magnitudes, compiled_rounding.round_tiles)
    monkeypatch.setattr(compiled_rounding, "_loops", lambda *_: loops)


def arguments_of(
    x: torch.Tensor, operand: Operand, dims: list[int], dtype: torch.dtype
) -> tuple[object, ...]:
    return x, operand.format, operand.scaling, list(operand.tile), dims, dtype


def assert_computes_fake_quantise(x: torch.Tensor, operand: Operand, dtype: torch.dtype) -> None:
    layouts = rounded_in_graph(*arguments_of(x, operand, [-1, 0], dtype))
    for dim, computed in zip((-1, 0), layouts, strict=True):
        assert_same_bits(computed, fake_quantise(x, operand, dim, dtype=dtype))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("result_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operand", ROUNDED_BY_BITS.values(), ids=ROUNDED_BY_BITS)
def test_each_layout_has_the_bits_of_fake_quantise(
    operand: Operand, dtype: torch.dtype, result_dtype: torch.dtype
) -> None:
    for x in matrices(dtype):
        assert_computes_fake_quantise(x, operand, result_dtype)


@pytest.mark.parametrize(
    "name, dtype, result_dtype",
    [
        ("mxfp8", torch.bfloat16, torch.bfloat16),
        ("mxfp8", torch.bfloat16, torch.float32),
        ("rowwise", torch.bfloat16, torch.float32),
        ("rowwise", torch.float32, torch.float32),
        ("amax", torch.bfloat16, torch.float32),
    ],
)
def test_compiled_loops_have_the_bits_of_fake_quantise(
    name: str, dtype: torch.dtype, result_dtype: torch.dtype
) -> None:
    for x in matrices(dtype):
        assert_computes_fake_quantise(x, RECIPES[name].input, result_dtype)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operand", BLOCK_OPERANDS.values(), ids=BLOCK_OPERANDS)
def test_blocks_of_tiny_values_have_the_bits_of_fake_quantise(
    operand: Operand, dtype: torch.dtype
) -> None:
    x = with_tiny_rows(dtype)
    assert round_in_loops(x, operand, [-1, 0], dtype) is not None
    assert_computes_fake_quantise(x, operand, dtype)


def test_compiled_loops_round_blocks_of_tiny_values() -> None:
    x = with_tiny_rows(torch.bfloat16)
    assert_computes_fake_quantise(x, RECIPES["mxfp8"].input, torch.bfloat16)


@pytest.mark.parametrize("format, kept_bits", [(E4M3, 3), (E5M2, 2)])
def test_every_mantissa_is_rounded_to_nearest_ties_to_even(format: Format, kept_bits: int) -> None:
    """Held against fp64, which has a step's multiples and rounds a quotient to nearest even."""
    first, last = (torch.tensor(x).view(torch.int32).item() for x in (1.0, 2.0))
    x = torch.arange(first, last, dtype=torch.int32).view(torch.float32)
    least_normal = torch.tensor([2.0**-14])
    (computed,) = compiled_rounding.round_tiles(x, [least_normal], format, torch.float32)
    step = 2.0**-kept_bits
    assert torch.equal(computed.double(), (x.double() / step).round() * step)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("operand", ROUNDED_BY_BITS.values(), ids=ROUNDED_BY_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0**70, 2.0**-50, 2.0**-120])
def test_values_that_no_training_has_are_those_of_fake_quantise(
    operand: Operand, dtype: torch.dtype, value: float
) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 32:64] = 0.0
    x[3, 35] = value
    layouts = rounded_in_graph(*arguments_of(x, operand, [-1, 0], dtype))
    for dim, computed in zip((-1, 0), layouts, strict=True):
        expected = fake_quantise(x, operand, dim, dtype=dtype)
        torch.testing.assert_close(computed, expected, rtol=0, atol=0, equal_nan=True)


def test_compiled_loops_leave_nan_to_fake_quantise() -> None:
    x = torch.ones(64, 96, dtype=torch.bfloat16)
    x[3, 3] = torch.nan
    operand = RECIPES["mxfp8"].input
    (computed,) = rounded_in_graph(*arguments_of(x, operand, [-1], torch.float32))
    expected = fake_quantise(x, operand)
    torch.testing.assert_close(computed, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("n_rows", [1, 33])
def test_any_number_of_rows_is_rounded_along_them(n_rows: int) -> None:
    x = torch.randn(n_rows, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for operand in ROUNDED_BY_BITS.values():
        (computed,) = rounded_in_graph(*arguments_of(x, operand, [-1], torch.float32))
        assert_same_bits(computed, fake_quantise(x, operand))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("n_columns", [1, 48])
def test_any_number_of_columns_is_rounded_across_them(n_columns: int) -> None:
    x = torch.randn(64, n_columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    for operand in ROUNDED_BY_BITS.values():
        (computed,) = rounded_in_graph(*arguments_of(x, operand, [0], torch.float32))
        assert_same_bits(computed, fake_quantise(x, operand, 0))


@pytest.mark.parametrize("dims", [[0], [-1, 0]])
def test_rows_that_fill_no_tile_are_refused_along_columns(dims: list[int]) -> None:
    """As fake_quantise() does; else each value would have a scale of its own."""
    x = torch.ones(33, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="33"):
        rounded_in_graph(*arguments_of(x, RECIPES["mxfp8"].input, dims, torch.float32))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("operand", ROUNDED_BY_BITS.values(), ids=ROUNDED_BY_BITS)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("value", [1.0, torch.nan], ids=["by_loops", "by_formula"])
def test_the_operator_is_what_torch_asks_of_one(
    operand: Operand, is_transposed: bool, value: float
) -> None:
    """Strides among it, which compiled code relies on."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3, 3] = value
    x = x.t() if is_transposed else x
    tests = ("test_schema", "test_faketensor")
    arguments = arguments_of(x, operand, [-1, 0], torch.float32)
    torch.library.opcheck(rounded_in_graph, arguments, test_utils=tests)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loops compiled anew, by a compiler that takes no time."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compiled(f, backend="eager", fullgraph=True))
    compiled_rounding._loops.cache_clear()
    yield
    compiled_rounding._loops.cache_clear()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", ["mxfp8", "rowwise"])
def test_matrices_of_another_size_take_the_same_loops(name: str) -> None:
    operand = RECIPES[name].input
    assert_computes_fake_quantise(torch.randn(64, 96).bfloat16(), operand, torch.float32)
    before = counters["stats"]["unique_graphs"]
    assert_computes_fake_quantise(torch.randn(128, 160).bfloat16(), operand, torch.float32)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.usefixtures("traced")
def test_any_shape_is_rounded_by_compiled_loops() -> None:
    """Dynamo takes a size of 1 for a constant, and would compile a function anew for it."""
    operand = RECIPES["mxfp8"].input
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n_rows in (1, 32, 33, 64):
            for n_columns in (32, 64, 96):
                x = torch.ones(n_rows, n_columns, dtype=torch.bfloat16)
                rounded_in_graph(*arguments_of(x, operand, [-1], torch.float32))


@pytest.mark.usefixtures("traced")
def test_forward_passes_and_backward_passes_take_the_same_loops() -> None:
    """And whatever calls the operator, compiled code or a Function."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    arguments = arguments_of(x, RECIPES["mxfp8"].input, [-1, 0], torch.float32)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        rounded_in_graph(*arguments)
    before = counters["stats"]["unique_graphs"]
    for needs_gradients in (True, False):
        with torch.set_grad_enabled(needs_gradients):
            rounded_in_graph(*arguments)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.usefixtures("traced")
def test_more_loops_are_compiled_than_dynamo_allows_a_function() -> None:
    operand = RECIPES["mxfp8"].input
    keys = list(product(([-1], [0], [-1, 0]), DTYPES, DTYPES))
    assert len(keys) > torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for dims, dtype, result_dtype in keys:
            x = torch.ones(64, 64, dtype=dtype)
            rounded_in_graph(*arguments_of(x, operand, dims, result_dtype))


@pytest.mark.parametrize("name", ["rowwise", "mxfp8"])
def test_compiled_code_rounds_each_operand_once_by_the_operator(name: str) -> None:
    """Of x and w in the forward pass, of g in the backward pass, both layouts each."""
    calls = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> Callable:
        targets = [str(node.target) for node in graph.graph.nodes]
        calls.append(targets.count("nanofp8.rounded_in_graph.default"))
        return make_boxed_func(graph.forward)

    linear = EmulatedLinear(Linear(128, 256), RECIPES[name])
    backend = aot_autograd(fw_compiler=counting)
    compiled = torch.compile(linear, fullgraph=True, dynamic=False, backend=backend)
    compiled(torch.randn(128, 128).bfloat16().requires_grad_()).sum().backward()
    assert calls == [2, 1]


def test_a_compiled_linear_computes_what_an_uncompiled_one_does() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = EmulatedLinear(Linear(128, 256), RECIPES["mxfp8"])
    linear.weight.data.copy_(torch.randn(256, 128, generator=generator) / 16)
    x = torch.randn(384, 128, generator=generator).bfloat16().requires_grad_()
    g = torch.randn(384, 256, generator=generator).bfloat16()
    results = []
    for module in (linear, torch.compile(linear, fullgraph=True, dynamic=False)):
        y = module(x)
        grad_x, grad_w = torch.autograd.grad(y, (x, linear.weight), g)
        # Inductor leaves the weight gradient in fp32
        results.append([y, grad_x, grad_w.bfloat16()])
    assert all(map(torch.equal, *results))
