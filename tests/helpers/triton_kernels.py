"""Triton kernels without a GPU: run in Triton's interpreter, or compiled for an H100."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import fp8
from bench.machine_code import compiled_for_hopper
from fp8.recipes import E4M3, E5M2
from tests.conftest import ROOT


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of fp8/ anew, in the place of the one imported before: whether kernels are
    interpreted is decided at the import."""
    spec = importlib.util.spec_from_file_location(f"fp8.{name}", ROOT / f"fp8/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, f"fp8.{name}", module)
    monkeypatch.setattr(fp8, name, module, raising=False)
    return module


@contextmanager
def interpreter_repaired(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, kernels of modules that load() loads are interpreted, with the
    interpreter's rounding to FP8 and BF16 repaired and every address checked.

    The interpreter (3.6 to 3.9) truncates FP8's subnormals, rounds ties away from zero, loses NaN
    and some carries; BF16 it truncates. Hardware rounds as torch does, which tests/test_gpu.py
    asserts by value. All else is the interpreter's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from triton import language as tl
    from triton.runtime import interpreter

    convert, launch = interpreter._convert_float, interpreter.GridExecutor.__call__
    spans: list[tuple[int, int]] = []  # addresses of the tensors of a launch

    def rounded(data, source, target, rounding):
        formats = {"fp8e4nv": E4M3, "fp8e5": E5M2, "bf16": torch.bfloat16}
        format = formats.get(target.name)
        if format is None or source != tl.float32:
            return convert(data, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(data)).to(format)
        return values.view(torch.uint8 if format.itemsize == 1 else torch.uint16).numpy()

    def launched(self, *args: object, **options: object):
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        spans[:] = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        return launch(self, *args, **options)

    def checked(access, mask):
        def wrapper(self, pointers, *arguments: object):
            inside = arguments[mask].data
            shape = np.broadcast_shapes(pointers.data.shape, inside.shape)
            addresses = np.broadcast_to(pointers.data, shape)[inside]
            in_span = [((first <= addresses) & (addresses < end)).sum() for first, end in spans]
            assert sum(in_span) == addresses.size, "outside the tensors"
            return access(self, pointers, *arguments)

        return wrapper

    def reduced_by_halves(self, inputs):
        """tl.reduce by a function of our own, over an axis or over all. The interpreter calls the
        function for each element: a minute of a test's hundred seconds."""
        assert not self.keep_dims
        arrays = [tensor.handle.data for tensor in inputs]
        axis = self.axis
        if axis is None:
            arrays, axis = [array.reshape(-1) for array in arrays], 0
        while arrays[0].shape[axis] > 1:
            halves = [np.split(array, 2, axis) for array in arrays]
            operands = [
                self.to_tensor(pair[side], tensor.dtype)
                for side in (0, 1)
                for pair, tensor in zip(halves, inputs, strict=True)
            ]
            combined = self.combine_fn.fn(*operands)
            results = combined if isinstance(combined, tuple) else (combined,)
            arrays = [result.handle.data for result in results]
        return [
            self.to_tensor(array.squeeze(axis)[()], tensor.dtype)
            for array, tensor in zip(arrays, inputs, strict=True)
        ]

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", _call_device_function)
    semantic = type(interpreter.interpreter_semantic)
    monkeypatch.setattr(semantic, "binary_op_sanitize_overflow_impl", _check_overflow)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduced_by_halves)
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
        yield


def _call_device_function(self, *args: object, **options: object):
    """InterpretedFunction.__call__() within a launch. The interpreter's own first replaces the
    builtins of triton.language, a quarter of these tests' time, though the launch has done so."""
    return self.rewrite()(*args, **options)


def _check_overflow(self, a, b, operation) -> None:
    """Assert that integers do not overflow in an operation, by numpy. The interpreter's own check,
    of eight interpreted operations, takes a quarter of these tests' time."""
    integers = a.type.scalar
    if integers.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
    values = exact(a.handle.data.astype(np.int64), b.handle.data.astype(np.int64))
    smallest, largest = integers.get_int_min_value(), integers.get_int_max_value()
    is_inside = (smallest <= values) & (values <= largest)
    assert is_inside.all(), f"int{integers.int_bitwidth} overflow"


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


SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf")]
SPECIAL += [448.0, -448.0, 449.0, 464.0, 480.0, 57344.0, 61440.0, 65536.0, 3e38, -3e38]
SPECIAL += [2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-16, 2.0**-17, 1e-30, 1e-40]


def values_of_every_size(M: int, K: int) -> torch.Tensor:
    """(M, K), each of SPECIAL somewhere; never symmetric under transposition."""
    torch.manual_seed(M * 1000 + K)
    x = torch.randn(M, K) * torch.exp2(torch.randint(-24, 12, (M, K)))
    x.view(-1)[torch.randperm(M * K)[: len(SPECIAL)]] = torch.tensor(SPECIAL)
    return x


@contextmanager
def compiled_for_an_h100(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[list]:
    """The binaries: within the block each launch of a kernel of a module that load() loads is
    compiled for sm_90, as on an H100, instead of run. folder: for Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with compiled_for_hopper() as binaries:
        yield binaries
