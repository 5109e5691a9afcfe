"""From torch 2.14 on Inductor's clamps are written as tl.where for our Linears too."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.codegen.triton import TritonOverrides

from fp8 import inductor_repair
from runtime import parallel
from runtime.config import Config
from tests.conftest import changed

VALUES = (-math.inf, -1.5, 0.0, 2.0, math.inf, math.nan)
GPU = parallel.World(0, 0, 1, torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def overrides_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts into Inductor is taken out again; before, it writes code that nobody has
    repaired, as torchao may have done for this process."""
    for name in ("minimum", "maximum"):
        monkeypatch.setattr(TritonOverrides, name, staticmethod(lambda a, b: "not repaired"))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_the_code_has_torchs_values(name: str) -> None:
    tl = SimpleNamespace(where=lambda condition, yes, no: yes if condition else no)
    code = getattr(inductor_repair, name)("a", "b")
    assert "PropagateNan" not in code
    for a, b in itertools.product(VALUES, VALUES):
        expected = getattr(torch, name)(torch.tensor(a), torch.tensor(b)).item()
        computed = eval(code, {"tl": tl, "a": a, "b": b})
        assert computed == expected or (math.isnan(computed) and math.isnan(expected))


@pytest.mark.parametrize(
    "version, recipe, compile, is_due",
    [
        ("2.13.0+cu130", "tensorwise", "model", False),
        ("2.14.1+cu130", "tensorwise", "model", True),
        ("2.15.0", "cscale", "model", True),
        ("2.15.0", "tensorwise", "off", False),
        ("2.15.0", "off", "model", False),
    ],
)
def test_a_compiled_fp8_run_on_a_gpu_is_repaired_where_torch_needs_it(
    version: str,
    recipe: str,
    compile: str,
    is_due: bool,
    tiny: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    recipes = [] if recipe == "off" else [recipe]
    lines = parallel.set_torch_flags(changed(tiny, f"parallel.compile={compile}"), GPU, recipes)
    assert any("triton#11111" in line for line in lines) == is_due
    assert (TritonOverrides.maximum("a", "b") == inductor_repair.maximum("a", "b")) == is_due
