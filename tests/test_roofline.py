"""The model of a step on one GPU: its bytes against Inductor's plans, its seconds against published runs; who uses its ratio."""

import math
from dataclasses import replace

import pytest
import torch

from model import GPT
from runtime import roofline
from runtime.config import load_config
from runtime.roofline import (
    CASTS,
    FREE,
    GPUS,
    LABELS,
    MICRO_BATCH,
    Moved,
    Shape,
    anchors,
    case,
    linears,
    matmul_seconds,
    modelled_ratio,
    step,
)
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


def test_bytes_of_the_head_and_of_bf16_are_those_of_inductors_plan():
    ours = CASTS["tensorwise+kernels"]
    assert over_bf16(ours, ("head",)) == pytest.approx(171.96 - (173.96 - 2.13), abs=0.2)   # kernels with the head; without, and
                                                                                        # without the BF16 head's weight gradient
    buckets = step(H100, BIG, "bf16", 16, 16_384).buckets
    moved = sum(buckets[name] for name in ("pointwise", "cast", "loss")) * H100.bandwidth
    embedding = 14 * BIG.vocab * BIG.n_embd + 20 * 16_384 * BIG.n_embd      # gradients, which the plan leaves out
    once_a_step = 6 * BIG.params_matmul     # the weights' copies, which the plan leaves out
    assert (moved - embedding - once_a_step) / 1e9 == pytest.approx(55.93 + 41.74, rel=0.01)


def test_weights_are_cast_once_a_step_with_our_kernels():
    """Per micro-batch torchao moves 14 bytes a weight for FP8; ours 10 in all, shared by the micro-batches."""
    assert total(CASTS["tensorwise"].w) - 6 == 14
    free = dict.fromkeys(roofline.NAMES, Moved())
    only_weights = replace(CASTS["tensorwise+kernels"], x=free, g=free, w=Moved())
    once, often = (roofline.linear_seconds(H100, "qkv", 2048, 6144, only_weights, 1024, n)[1] for n in (1, 32))
    assert once == pytest.approx((4 + 6 / H100.ours) * 2048 * 6144 / H100.bandwidth) and once == pytest.approx(32 * often)


# tokens/s, ratios, ms: constants that move one of them change what the module's docstring says
MODELLED = (104_142, 85_124, 46_192, 505_404, 0.972, 1.113, 1.140, 0.938, 1.119, 1.061, 1.226, 2.102, 1.487)


def test_published_runs_come_out_as_the_documents_say():
    for (name, _, published, got), modelled in zip(anchors(H100), MODELLED, strict=True):
        assert got == pytest.approx(modelled, rel=0.002), name
        slack = (0.97, 1.082) if got > 1000 else (0.945, 1.055)
        assert published[0] * slack[0] < got < published[-1] * slack[1], name
    assert dict.fromkeys(row[0] for row in anchors(replace(H100, transposed=1.0)) if row[3] == pytest.approx(1.174, abs=0.001))


def test_the_zero_cast_ceilings_of_1p5b():
    base = step(H100, BIG, "bf16", 16, 2**19).seconds
    for head, ratio in (("", 1.456), ("+head", 1.504)):
        assert base / step(H100, BIG, "tensorwise" + head, 16, 2**19, casts=FREE).seconds == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("recipe, formats", [("rowwise", ("fp8_rowwise", "fp8", "fp8")),
                                             ("rowwise_with_gw_hp", ("fp8_rowwise", "fp8", "bf16"))])
def test_row_scales_reach_the_matmul_forward_alone(recipe, formats, monkeypatch):
    """torchao's own calls, counted: with one scale a row and fast accumulation forward, with one of all backward."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    seen = []

    def scaled_mm(a, b, scale_a, scale_b, **options):
        seen.append(("fp8_rowwise" if scale_a.numel() > 1 else "fp8", options["use_fast_accum"]))
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    model(torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert seen == [(f, f == "fp8_rowwise") for f in formats if f != "bf16"]
    assert CASTS[recipe].formats == formats


@pytest.mark.parametrize("size", MICRO_BATCH)
def test_ceilings_are_above_and_auto_is_never_slower(size):
    shape, micro_batch = case(size, 1024)
    times = {label: step(H100, shape, label, micro_batch, 2**19).seconds for label in LABELS}
    free = step(H100, shape, "tensorwise", micro_batch, 2**19, casts=FREE).seconds
    assert free < min(t for label, t in times.items() if not label.endswith("+head"))
    for auto, other in (*(("auto", n) for n in ("bf16", "tensorwise", "rowwise")), ("auto+kernels", "tensorwise+kernels")):
        assert times[auto] <= times[other] * (1 + 1e-9)


def test_matmuls_are_between_half_a_wave_and_the_rate():
    for format, rate in H100.flops.items():
        for _, K, N, _ in linears(BIG):
            for sizes in ((16_384, K, N), (16_384, N, K), (N, 16_384, K)):
                assert 0.5 * rate < 2 * math.prod(sizes) / matmul_seconds(H100, format, *sizes) < rate, (format, sizes)
    assert 2 * 128**3 / matmul_seconds(H100, "bf16", 128, 128, 128) < 0.05 * H100.flops["bf16"], "one tile cannot fill 132 SMs"
    with pytest.raises(KeyError):
        step(H100, BIG, "mxfp8", 16, 2**19)


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
    assert "nan" not in out.split() and "-0.0%" not in out and out.count("zero casts, head too") == 4
    assert "  nanochat d26, LOG 2026-02-02          tensorwise+head              1.170     1.140" in out
    assert roofline.main(["gpu=h200", "sizes=1p5b", "context=2048"]) == 0
    assert "1p5b, T=2048, micro-batch 8" in capsys.readouterr().out
    for words in (["gpu=h10"], ["sizes=2b"], ["result=x"]):
        assert roofline.main(words) == 2 and capsys.readouterr().err.count("\n") == 1
