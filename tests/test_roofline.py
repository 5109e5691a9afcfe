"""The model of a step on one GPU: its bytes against Inductor's plans, its seconds against published runs; who uses its ratio."""

from dataclasses import replace

import pytest
import torch

from model import GPT
from runtime import roofline
from runtime.config import load_config
from runtime.roofline import CASTS, FREE, GPUS, LABELS, MICRO_BATCH, Moved, Shape, anchors, case, linears, modelled_ratio, step
from tests.conftest import ROOT

H100 = GPUS["h100"]
BIG = Shape(28, 2048, 5632, 16, 1024, 50304)
FP8_RUN = load_config(ROOT / "configs/gpt1p5b_fp8.py")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", MICRO_BATCH)
def test_flops_and_parameters_are_the_models_own(size, tied):
    config = replace(load_config(ROOT / f"configs/gpt{size}_bf16.py").model, tied=tied)
    with torch.device("meta"):
        counts = GPT(config).counts()
    shape = roofline.shape_of(config)
    assert (shape.params_matmul, shape.flops_per_token) == (counts["params_matmul"], counts["flops_per_token"])


# GB over BF16 that Inductor plans for 28 blocks of 1.5B and 16 x 1024 tokens: `python -m dev.compiler_plan` (torch 2.13.0,
# "written" and "called"); gw_hp and rows from plans of 4 and 2 blocks (torch 2.11.0). Those plans were read when BF16 cast its
# weights and gradients in every micro-batch, 12 bytes a weight; the second one again afterwards: 66.7.
CAST_THEN = 12 * 28 * (4 * 2048**2 + 3 * 2048 * 5632) / 1e9
PLANNED = {name: over + CAST_THEN for name, over in {
    "tensorwise": 107.2, "tensorwise+kernels": 49.4, "tensorwise_gw_hp": 28 * 3.0386, "rowwise_with_gw_hp": 28 * 2.3620,
    "rowwise": 28 * 5.4053}.items()}


def total(moved: Moved) -> float:
    return sum(moved[:4]) - moved.spared


def over_bf16(casts, names) -> float:
    """GB that the casts of the Linears `names` move in one micro-batch."""
    M = 16_384
    return sum(count * (M * (total(casts.x[name]) * K + total(casts.g[name]) * N) + total(casts.w) * K * N)
               for name, K, N, count in linears(BIG) if name in names) / 1e9


@pytest.mark.parametrize("recipe", PLANNED)
def test_bytes_of_the_casts_are_those_of_inductors_plan(recipe):
    assert over_bf16(CASTS[recipe], ("qkv", "out", "gate_up", "down")) == pytest.approx(PLANNED[recipe], rel=0.01)


def test_bytes_of_bf16_are_those_of_inductors_plan():
    buckets = step(H100, BIG, "bf16", 16, 16_384).buckets
    moved = sum(buckets[name] for name in ("pointwise", "cast", "loss")) * H100.bandwidth
    embedding = 14 * BIG.vocab * BIG.n_embd + 20 * 16_384 * BIG.n_embd      # gradients, which the plan leaves out
    once_a_step = 6 * BIG.params_matmul     # the weights' copies, which the plan leaves out
    assert (moved - embedding - once_a_step) / 1e9 == pytest.approx(63.44 + 41.73, rel=0.01)


# tokens/s, ratios, ms: constants that move one of them change what the module's docstring says
MODELLED = (104_142, 85_124, 46_192, 505_404, 0.972, 1.113, 1.140, 0.938, 1.119, 1.061, 1.226, 2.102, 1.487)


def test_published_runs_come_out_as_the_documents_say():
    for (name, _, published, got), modelled in zip(anchors(H100), MODELLED, strict=True):
        assert got == pytest.approx(modelled, rel=0.002), name
        slack = (0.97, 1.082) if got > 1000 else (0.945, 1.055)
        assert published[0] * slack[0] < got < published[-1] * slack[1], name


@pytest.mark.parametrize("size", MICRO_BATCH)
def test_ceilings_are_above_and_auto_is_never_slower(size):
    shape, micro_batch = case(size, 1024)
    times = {label: step(H100, shape, label, micro_batch, 2**19).seconds for label in LABELS}
    free = step(H100, shape, "tensorwise", micro_batch, 2**19, casts=FREE).seconds
    assert free < min(t for label, t in times.items() if not label.endswith("+head"))
    for auto, other in (*(("auto", n) for n in ("bf16", "tensorwise", "rowwise")), ("auto+kernels", "tensorwise+kernels")):
        assert times[auto] <= times[other] * (1 + 1e-9)


def test_the_ratio_of_a_run_and_where_no_model_tells():
    run = replace(FP8_RUN, model=replace(FP8_RUN.model, n_ctx=1024),
                  data=replace(FP8_RUN.data, micro_batch=16, tokens_per_step=2**19))
    want = step(H100, BIG, "bf16", 16, 2**19).seconds / step(H100, BIG, "tensorwise", 16, 2**19).seconds
    for name in ("h100", "NVIDIA H100 80GB HBM3"):
        assert modelled_ratio(run, name) == want
    eight = replace(run, parallel=replace(run.parallel, shard=8))
    assert modelled_ratio(eight, "h100", 8) == (step(H100, BIG, "bf16", 16, 2**16, shard=8).seconds
                                                / step(H100, BIG, "tensorwise", 16, 2**16, shard=8).seconds)
    head = modelled_ratio(replace(run, fp8=replace(run.fp8, head=True, kernels=True)), "h100")
    assert head == step(H100, BIG, "bf16", 16, 2**19).seconds / step(H100, BIG, "tensorwise+kernels+head", 16, 2**19).seconds
    with pytest.raises(KeyError):
        step(H100, BIG, "mxfp8", 16, 2**19)
    for gpu in ("b200", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "a100"):
        assert modelled_ratio(run, gpu) is None
    for change in ({"recipe": "auto"}, {"recipe": "cscale"}, {"skip": ("mlp.down",)}, {"first_bf16": 1}):
        assert modelled_ratio(replace(run, fp8=replace(run.fp8, **change)), "h100") is None, change
    for change in ({"compile": False}, {"recompute": True}):
        assert modelled_ratio(replace(run, parallel=replace(run.parallel, **change)), "h100") is None, change


def test_the_command_says_that_nothing_is_measured(capsys):
    assert roofline.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("MODELLED step times on H100") and "nothing here is measured" in out
    assert "nan" not in out.split() and out.count("zero casts, head too") == 4
    assert roofline.main(["gpu=h200", "sizes=1p5b", "context=2048"]) == 0
    assert "1p5b, T=2048, micro-batch 8" in capsys.readouterr().out
    for words in (["gpu=h10"], ["sizes=2b"], ["result=x"]):
        assert roofline.main(words) == 2 and capsys.readouterr().err.count("\n") == 1
