"""fp8/bf16_in_fp32.py: fp32 matmuls of BF16 values are BF16 matmuls; runs that use them train
and are evaluated by them."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fp8 import bf16_in_fp32
from lib.errors import UserError
from model import Attention, GPTConfig, Linear
from runtime import parallel
from runtime.config import Config
from tests.conftest import ALONE, changed
from tests.helpers.faults import Run, rows

SIZE = GPTConfig(n_layer=2, n_head=2, n_embd=64, n_ffn=96, n_ctx=32, vocab_size=257)


def swapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module alone, converted."""
    holder = torch.nn.Sequential(module)
    bf16_in_fp32.convert(holder)
    return holder[0]


def passes(call, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """The call's output and each leaf's gradient, for one fixed gradient of the output in BF16
    values."""
    own_leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    y = call(*own_leaves)
    y.backward(
        torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(y.dtype)
    )
    return [y.detach(), *(leaf.grad for leaf in own_leaves)]


def test_a_linears_three_matmuls_are_fp64s_rounded_once_to_bf16():
    torch.manual_seed(0)
    x, w = torch.randn(40, 64).bfloat16(), torch.randn(96, 64) / 8
    linear = swapped(Linear(64, 96))
    linear.weight.data.copy_(w)
    ours = [*passes(linear, x), linear.weight.grad]
    exact = passes(F.linear, x.double(), w.bfloat16().double())
    for got, true in zip(ours, exact, strict=True):
        ideal = true.bfloat16().double()
        # the order of sums in fp32 tips a rounding here and there
        assert (got.double() != ideal).double().mean() < 2e-3
        assert (got.double() - true).norm() < 1.001 * (ideal - true).norm()


def test_attention_is_nearer_to_fp64_than_torchs_own_in_bf16():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 32, 32).bfloat16()
    plain, ours = Attention(SIZE), swapped(Attention(SIZE))
    exact = passes(
        lambda *qkv: plain.attend(*qkv, is_causal=True), q.double(), k.double(), v.double()
    )
    by_torch = passes(lambda *qkv: plain.attend(*qkv, is_causal=True), q, k, v)
    by_ours = passes(lambda *qkv: ours.attend(*qkv, is_causal=True), q, k, v)
    for got, torchs, true in zip(by_ours, by_torch, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - true).norm() <= (torchs.double() - true).norm()


@pytest.mark.parametrize("recipe", ["off", "mxfp8"])
def test_a_run_trains_as_one_with_the_cpus_own_matmuls(
    recipe: str, tiny: Config, run: Callable[..., str]
):
    losses = {}
    for name, choice in ("own", "false"), ("fp32", "true"):
        config = changed(replace(tiny, run=name), f"fp8.recipe={recipe} parallel.cpu_fp32={choice}")
        run(config)
        losses[name] = json.loads((config.run_dir / "summary.json").read_text())
    assert losses["fp32"]["loss_bf16"] == pytest.approx(losses["own"]["loss_bf16"], rel=1e-3)
    if recipe == "off":
        assert losses["fp32"]["loss_bf16"] == losses["fp32"]["loss_as_trained"]


@pytest.mark.parametrize("recipe", ["off", "mxfp8"])
@pytest.mark.parametrize("shard", [1, 2])
def test_two_ranks_train_what_one_process_trains(
    recipe: str, shard: int, tiny: Config, run: Callable[..., str]
):
    alone = changed(tiny, f"fp8.recipe={recipe} parallel.cpu_fp32=true")
    run(alone)
    together = changed(alone, f"run=together parallel.shard={shard}")
    assert Run(together, ranks=2).wait() == [0, 0]
    # Sharded weights are rounded to FP8 from BF16, not from fp32.
    tolerance = 2e-3 if shard == 2 and recipe != "off" else 1e-4
    losses = [row["loss"] for row in rows(alone)]
    assert [row["loss"] for row in rows(together)] == pytest.approx(losses, rel=tolerance)


@pytest.mark.parametrize(
    "choice, has_units, device, is_in_fp32",
    [
        ("auto", False, "cpu", True),
        ("auto", True, "cpu", False),
        ("auto", False, "cuda", False),
        ("true", True, "cpu", True),
        ("false", False, "cpu", False),
    ],
)
def test_auto_is_for_cpus_without_bf16_units(
    choice: str,
    has_units: bool,
    device: str,
    is_in_fp32: bool,
    tiny: Config,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(parallel, "has_bf16_units", lambda: has_units)
    config = changed(tiny, f"parallel.cpu_fp32={choice}")
    parallel.check_world(config, 1, torch.device(device))
    assert parallel.multiplies_in_fp32(config, torch.device(device)) == is_in_fp32


@pytest.mark.parametrize("has_units", [True, False])
def test_a_start_says_what_auto_has_found(
    has_units: bool, tiny: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parallel, "has_bf16_units", lambda: has_units)
    built = parallel.build(changed(tiny, "parallel.cpu_fp32=auto"), ALONE)
    types = {type(module) for module in built.model.modules()}
    assert (bf16_in_fp32.LinearInFp32 in types) == (not has_units)
    assert any("no BF16 units" in flag for flag in built.flags) == (not has_units)


def test_a_gpu_is_refused(tiny: Config):
    config = changed(tiny, "parallel.cpu_fp32=true")
    with pytest.raises(
        UserError, match="parallel.cpu_fp32=true is for CPUs, not for cuda: drop it"
    ):
        parallel.check_world(config, 1, torch.device("cuda"))


def test_an_attention_keeps_what_a_variant_of_model_py_has_added():
    attention = Attention(SIZE)
    attention.is_parallel = True
    assert bf16_in_fp32.AttentionInFp32(attention).is_parallel
