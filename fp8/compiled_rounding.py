"""Round matrices to float8 within compiled code on a CPU: the values of
cpu_rounding.round_by_bits(), in a third to a half of its time where there are a million or more.

Inductor compiles two loops over a matrix: one finds the largest magnitudes that share a scale, the
other rounds. An operator runs them, apart from the code around it. In one graph with that, Inductor
would compute a matrix again in each loop that reads it, and make a single loop of both, which takes
three times as long."""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from fp8.cpu_rounding import BITS, CONSTANTS, are_ordinary, least_normal
from fp8.recipes import Format, Operand
from fp8.rounding import FORMATS, fake_quantise

# Dynamo compiles for a state of autograd, which is not the same in a forward pass, compiled or not,
# and a backward pass. Without gradients and this key it always is.
IN_PLACE = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
LEAST_POWER = -126  # of two that is a normal number in BF16 and fp32


@torch.library.custom_op("nanofp8::rounded_in_graph", mutates_args=())
def rounded_in_graph(
    x: torch.Tensor,
    format: torch.dtype,
    scaling: str,
    tile: Sequence[int],
    dims: Sequence[int],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """fake_quantise(x, operand, dim, dtype=dtype) for each of `dims`, of x (M, N) and an operand
    for which cpu_rounding.can_round(). Raises RuntimeError where a dimension that is summed over is
    not a multiple of a tile."""
    # every scale that can_round() allows is a power of two
    tiles: Any = tuple(tile)
    how: Any = scaling  # one of Operand's words
    operand = Operand(format, how, power_of_2=True, tile=tiles)
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(IN_PLACE):
        rounded = round_in_loops(x, operand, dims, dtype)
    if rounded is None:
        # contiguous, as the compiled code was promised by the function below
        return [fake_quantise(x, operand, dim, dtype=dtype).contiguous() for dim in dims]
    return rounded


@rounded_in_graph.register_fake
def _(x, format, scaling, tile, dims, dtype):  # type: ignore[no-untyped-def]
    return [torch.empty(x.shape, dtype=dtype, device=x.device) for _ in dims]


def round_in_loops(
    x: torch.Tensor, operand: Operand, dims: Sequence[int], dtype: torch.dtype
) -> list[torch.Tensor] | None:
    """What rounded_in_graph() returns; None unless the largest magnitudes are_ordinary()."""
    bits = BITS[x.dtype]
    summed_dims = [dim % 2 for dim in dims]
    shared = tuple(_dims_sharing_a_scale(operand, dim) for dim in summed_dims)
    tiles = _of_any_size(_tiles(x.contiguous(), operand, summed_dims), operand)
    are_single = tuple(size == 1 for size in tiles.shape)  # Dynamo takes 1 for a constant
    loops = _loops(operand, shared, are_single, x.dtype, dtype)
    amaxes = [amax.view(bits.ints) for amax in loops.largest_magnitudes(tiles, shared)]
    if not all(are_ordinary(amax, operand, bits) for amax in amaxes):
        return None
    constants = CONSTANTS[operand.format, x.dtype]
    least_normals = []
    for amax in amaxes:
        # of zeros alone it may be any number; a positive one leaves no -0
        least = least_normal(operand, constants, amax).clamp_(min=bits.power(LEAST_POWER))
        least_normals.append(_of_any_size(least.view(x.dtype), operand))
    values = loops.round_tiles(tiles, least_normals, operand.format, dtype)
    return [layout.view(x.shape) for layout in values]


def _tiles(x: torch.Tensor, operand: Operand, summed_dims: Sequence[int]) -> torch.Tensor:
    """x (M, N), contiguous, as (tiles, rows of a tile, tiles, columns of a tile); without tiles all
    of it is one. summed_dims: those that matmuls sum over, along which alone tiles extend."""
    rows, columns = x.shape
    if operand.scaling != "block":
        return x.view(1, rows, 1, columns)
    size = operand.tile[1]
    tile_rows = size if 0 in summed_dims else 1
    tile_columns = size if 1 in summed_dims else 1
    return x.unflatten(1, (-1, tile_columns)).unflatten(0, (-1, tile_rows))


def _dims_sharing_a_scale(operand: Operand, dim: int) -> tuple[int, ...]:
    """The dimensions of _tiles() along which values share a scale, for a matmul that sums over
    x's dimension `dim`, 0 or 1."""
    rows_of_tile, columns_of_tile = 1, 3
    if operand.scaling == "tensor":
        return rows_of_tile, columns_of_tile
    return (columns_of_tile,) if dim == 1 else (rows_of_tile,)


def _of_any_size(tiles: torch.Tensor, operand: Operand) -> torch.Tensor:
    """The same tensor, marked so that loops are compiled once for all sizes of a matrix, but for
    one size of a tile."""
    dims = (0, 2) if operand.scaling == "block" else (1, 3)
    torch._dynamo.maybe_mark_dynamic(tiles, dims)
    return tiles


class Loops(NamedTuple):
    largest_magnitudes: Callable[..., list[torch.Tensor]]
    round_tiles: Callable[..., list[torch.Tensor]]


@functools.cache
def _loops(*key: object) -> Loops:
    """The functions below, which their first calls compile, for one value of all that is not a
    tensor: Dynamo gives up a function that it compiled eight times, and tells them by their
    code."""
    return Loops(
        torch.compile(_with_own_code(largest_magnitudes)),
        torch.compile(_with_own_code(round_tiles)),
    )


def _with_own_code(function: Callable) -> Callable:
    code = function.__code__.replace()  # a copy
    return FunctionType(code, function.__globals__, function.__name__)


def largest_magnitudes(
    tiles: torch.Tensor, shared: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """The largest magnitude along each of the tuples of dimensions, which stay with size 1."""
    magnitude = tiles.abs()
    return [magnitude.amax(dims, keepdim=True) for dims in shared]


def round_tiles(
    tiles: torch.Tensor, least_normals: Sequence[torch.Tensor], format: Format, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The tiles in `dtype`, rounded to nearest, ties to even, once for each of least_normals: the
    format's least normal value over the scale, which broadcasts to the tiles.

    Of magnitudes above it the format keeps the leading bits, by Dekker's split of an fp32 number
    (1971, doi:10.1007/BF01397083): no power of two has to be taken from the bits, which Inductor
    reads one number at a time. Below it values have one step, by the sum that cpu_rounding.py
    explains."""
    eps = FORMATS[format][2]
    split = 2.0**23 * eps + 1.0
    steps = 1.5 * 2.0**23 * eps  # of a format, times the least normal value
    x = tiles.float()
    magnitude = x.abs()
    high = x * split
    leading_bits = high - (high - x)
    layouts = []
    for least in least_normals:
        offset = least.float() * steps
        subnormal = (x + offset) - offset
        is_subnormal = magnitude < least
        layouts.append(torch.where(is_subnormal, subnormal, leading_bits).to(dtype))
    return layouts
