"""The model of a step on one GPU: its bytes against Inductor's plans, its seconds against published runs."""

import json
import os
import re
import sys
from dataclasses import replace

import pytest
import torch

from bench import evidence, roofline, step_model
from bench.evidence import ANCHORS, D26, with_measured
from bench.step_model import BUCKETS, CASTS, GPUS, Shape, linears, matmul_seconds, matmuls, step
from model import GPT
from runtime.config import load_config
from tests.conftest import ROOT

H100 = GPUS["h100"]
BIG = Shape(28, 2048, 5632, 16, 1024, 50304)


# ------------------------------------------------------------------------------------------------- one GPU: what is counted

@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", roofline.MICRO_BATCH)
def test_flops_and_parameters_are_the_models_own(size, tied):
    config = replace(load_config(ROOT / f"configs/gpt{size}_bf16.py").model, tied=tied)
    with torch.device("meta"):
        counts = GPT(config).counts()
    shape = step_model.shape_of(config)
    assert shape.params_matmul == counts["params_matmul"]
    assert shape.flops_per_token == counts["flops_per_token"]
    norms = (2 * config.n_layer + 1) * config.n_embd
    assert shape.params == counts["params_total"] - norms


# GB over BF16 that Inductor plans for 28 blocks of 1.5B and 16 x 1024 tokens: `python bench/inductor.py recipe=R [kernels=true]`
# (torch 2.13.0, "written" and "called"); the last two from its plans of 4 and 2 blocks (torch 2.11.0).
PLANNED = {"tensorwise": 107.2, "tensorwise+kernels": 49.4, "tensorwise_gw_hp": 28 * 3.0386, "rowwise_with_gw_hp": 28 * 2.3620,
           "rowwise": 28 * 5.4053}


def over_bf16(casts, names) -> float:
    """GB that the casts of the Linears `names` move in one micro-batch."""
    M = 16_384
    return sum(count * (M * (casts.x[name].total * K + casts.g[name].total * N) + casts.w.total * K * N)
               for name, K, N, count in linears(BIG) if name in names) / 1e9


@pytest.mark.parametrize("recipe", PLANNED)
def test_bytes_of_the_casts_are_those_of_inductors_plan(recipe):
    assert over_bf16(CASTS[recipe], ("qkv", "out", "gate_up", "down")) == pytest.approx(PLANNED[recipe], rel=0.01)


def test_bytes_of_the_head_and_of_bf16_are_those_of_inductors_plan():
    ours = CASTS["tensorwise+kernels"]
    assert over_bf16(ours, ("head",)) == pytest.approx(171.96 - 173.06, abs=0.2)       # kernels=true with head=true, and without
    bf16 = step_model.pointwise_bytes(BIG) * 16_384 + step_model.conversion_bytes(BIG) + 6 * 16_384 * BIG.vocab
    assert bf16 / 1e9 == pytest.approx(123.67, rel=0.01)


def test_weights_are_cast_once_a_step_with_our_kernels():
    """Per micro-batch torchao moves 14 bytes a weight for FP8; ours 10 in all, shared by the micro-batches."""
    assert CASTS["tensorwise"].w.total + 6 == 14
    free = dict.fromkeys(CASTS["tensorwise"].x, step_model.Moved())
    only_weights = replace(CASTS["tensorwise+kernels"], x=free, g=free, w=step_model.Moved())
    linear = linears(BIG)[0]
    once, often = (step_model.linear_seconds(H100, linear, only_weights, 1024, n)[1] for n in (1, 32))
    assert once == pytest.approx((4 + 6 / H100.ours) * linear.K * linear.N / H100.bandwidth)
    assert once == pytest.approx(32 * often)


# --------------------------------------------------------------------------------------------- one GPU: published runs

MODELLED = (104_142, 85_124, 46_192, 505_404, 0.972, 1.113, 1.140, 0.938, 1.119, 1.061, 1.226)


@pytest.mark.parametrize("anchor, modelled", list(zip(ANCHORS, MODELLED, strict=True)))
def test_published_runs_come_out_as_the_documents_say(anchor, modelled):
    """What is printed and told in evidence.py and roofline.py: a constant that moves one of them must change their sentences."""
    got, is_speed = anchor.modelled(H100), anchor.label == "bf16"
    assert got == pytest.approx(modelled, rel=0.002) if is_speed else got == pytest.approx(modelled, abs=0.002)
    assert anchor.least * (0.97 if is_speed else 1) - 0.062 < got < anchor.most * (1.082 if is_speed else 1) + 0.04


def test_what_is_told_of_the_zero_cast_ceiling():
    """Both ceilings of 1.5B, those at the earlier rates, and d26's ratio at these."""
    def ceilings(c):
        base = step(c, BIG, "bf16", 16, 2**19).seconds
        return [base / step(c, BIG, "tensorwise" + head, 16, 2**19, casts=step_model.FREE).seconds for head in ("", "+head")]
    earlier = replace(H100, flops={**H100.flops, "fp8": 1180e12}, half_k={**H100.half_k, "fp8": 300})
    assert ceilings(H100) == pytest.approx([1.48, 1.53], abs=0.005)
    assert ceilings(earlier) == pytest.approx([1.38, 1.41], abs=0.005)
    d26 = next(a for a in ANCHORS if a.shape is D26 and a.label == "tensorwise+head")
    assert d26.modelled(earlier) == pytest.approx(1.07, abs=0.005)
    assert d26.modelled(replace(H100, transposed=1.0)) == pytest.approx(1.174, abs=0.001)


def test_one_linear_of_nanochat():
    for format, modelled, published in evidence.narrow_linear(H100):
        assert modelled == pytest.approx(published, rel=0.055), format


@pytest.mark.parametrize("recipe, formats", [("rowwise", ("fp8_rowwise", "fp8", "fp8")),
                                             ("rowwise_with_gw_hp", ("fp8_rowwise", "fp8", "bf16"))])
def test_row_scales_reach_the_matmul_forward_alone(recipe, formats):
    """torchao's own calls, counted: with one scale a row and fast accumulation forward, with one of all backward."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    seen, real = [], torch._scaled_mm

    def scaled_mm(a, b, scale_a, scale_b, **options):
        seen.append(("fp8_rowwise" if scale_a.numel() > 1 else "fp8", options["use_fast_accum"]))
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    torch._scaled_mm = scaled_mm
    try:
        model(torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    finally:
        torch._scaled_mm = real
    assert seen == [(f, f == "fp8_rowwise") for f in formats if f != "bf16"]
    assert CASTS[recipe].formats == formats


# ----------------------------------------------------------------------------------------------- one GPU: what must hold

@pytest.mark.parametrize("size", roofline.MICRO_BATCH)
def test_ceilings_are_above_and_auto_is_never_slower(size):
    shape, micro_batch = roofline.case(size, 1024)
    times = {label: step(H100, shape, label, micro_batch, 2**19).seconds for label in roofline.LABELS}
    free = step(H100, shape, "tensorwise", micro_batch, 2**19, casts=step_model.FREE).seconds
    assert free < min(t for label, t in times.items() if not label.endswith("+head"))
    for auto, other in (*(("auto", n) for n in ("bf16", "tensorwise", "rowwise")), ("auto+kernels", "tensorwise+kernels")):
        assert times[auto] <= times[other] * (1 + 1e-9)


def test_matmuls_are_between_half_a_wave_and_the_rate():
    for format, rate in H100.flops.items():
        for linear in linears(BIG):
            for M, K, N in matmuls(linear, 16_384).values():
                achieved = 2 * M * K * N / matmul_seconds(H100, format, M, K, N)
                assert 0.5 * rate < achieved < rate, (format, M, K, N)
    assert 2 * 128**3 / matmul_seconds(H100, "bf16", 128, 128, 128) < 0.05 * H100.flops["bf16"], "one tile cannot fill 132 SMs"
    with pytest.raises(KeyError):
        step(H100, BIG, "mxfp8", 16, 2**19)


# ------------------------------------------------------------------------------------------------------- what was measured

def measured_rows(truth, sizes=("1p5b", "125m")) -> list[dict]:
    """What bench/throughput.py would write on a machine that behaves as the model says, with `truth` for ceilings."""
    rows = [{"kind": "run", "run": "a", "gpu": "NVIDIA H100 80GB HBM3"},
            {"kind": "copy", "gb_per_s": truth.bandwidth / 0.92 / 1e9, "bytes": 2**30}]
    for size in sizes:
        shape, micro_batch = roofline.case(size, 1024)
        M = micro_batch * 1024
        if size == "1p5b":
            for linear in linears(shape):
                for name, (m, k, n) in matmuls(linear, M).items():
                    rows += [{"kind": "matmul", "dtype": f, "linear": linear.name, "pass": name, "M": m, "K": k, "N": n,
                              "ms": 1e3 * matmul_seconds(truth, f, m, k, n)} for f in truth.flops
                             if {"fp8_rowwise": "forward", "fp8_fp32": "weight_grad"}.get(f, name) == name]
        both = step_model.attention_seconds(truth, shape, M) / shape.n_layer
        rows.append({"kind": "attention", "size": size, "B": micro_batch, "H": shape.n_head, "T": 1024, "D": shape.head_size,
                     "backend": "cudnn", "both_ms": 1e3 * both})
        base = step(truth, shape, "bf16", micro_batch, 2**19)
        for label in ("bf16", "tensorwise", "tensorwise+kernels"):
            s = step(truth, shape, label, micro_batch, 2**19)
            times = 2**19 / s.tokens
            rows.append({"kind": "cell", "size": size, "label": label, "T": 1024, "micro_batch": micro_batch, "valid": True,
                         "tokens_per_step": 2**19, "tok_per_s": s.tok_per_s, "step_s": s.seconds * times,
                         "ratio": {"median": base.seconds / s.seconds} if label != "bf16" else None,
                         "profiled_step_s": s.seconds * times,
                         "buckets": {b: v * times for b, v in s.buckets.items() if b != "other"}})
    return rows


OTHER = replace(H100, bandwidth=2.2e12, attention=400e12, flops={name: 0.8 * rate for name, rate in H100.flops.items()})


def test_measured_ceilings_replace_the_assumed_ones():
    c = with_measured(H100, measured_rows(OTHER))
    assert c.bandwidth == pytest.approx(OTHER.bandwidth)
    assert c.attention == pytest.approx(OTHER.attention)
    assert c.corrected == pytest.approx(dict.fromkeys(H100.flops, 1.25), rel=0.05)
    for size in ("1p5b", "350m"):       # timed shapes, and shapes that only the correction knows
        shape, micro_batch = roofline.case(size, 1024)
        for label in ("bf16", "tensorwise+kernels"):
            truth = step(OTHER, shape, label, micro_batch, 2**19).seconds
            assert step(c, shape, label, micro_batch, 2**19).seconds == pytest.approx(truth, rel=0.02)
            assert step(H100, shape, label, micro_batch, 2**19).seconds < 0.9 * truth


def test_a_timed_matmul_counts_as_it_was_timed():
    """One shape far off the others: its own time, not the median's correction."""
    rows = [row for row in measured_rows(H100) if row["kind"] == "matmul"]
    rows[0]["ms"] *= 3
    c, key = with_measured(H100, rows), (rows[0]["M"], rows[0]["K"], rows[0]["N"])
    assert matmul_seconds(c, rows[0]["dtype"], *key) == pytest.approx(3 * matmul_seconds(H100, rows[0]["dtype"], *key))
    assert c.corrected == pytest.approx(dict.fromkeys(H100.flops, 1.0))


@pytest.fixture
def results(tmp_path):
    file = tmp_path / "h100.jsonl"
    rows = [*measured_rows(OTHER), {"kind": "cell", "size": "nanogpt_xl", "label": "nanogpt", "T": 1024, "micro_batch": 8,
                                    "valid": True, "tok_per_s": 1.0}, {"kind": "cell", "size": "1p5b", "label": "rowwise",
                                    "T": 1024, "micro_batch": 16, "valid": False, "tok_per_s": 1.0}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "cell", "si')
    return file


def test_predicted_stands_beside_measured(results, capsys):
    assert roofline.main([f"results={results}", "sizes=1p5b"]) == 0
    lines = capsys.readouterr().out.split("predicted / measured")[1].splitlines()
    cells = [line for line in lines if line.strip().startswith(("1p5b", "125m"))]
    assert len(cells) == 6, "the cell that is not valid is left out"
    assert any("nanogpt_xl" in line and "not modelled" in line for line in lines)
    for line in cells:
        predicted, measured, share, *pairs = map(float, re.findall(r"(?<![\w.])\d+\.\d+", line))
        assert predicted / measured == pytest.approx(share, abs=0.01)
        assert 0.97 < share < 1.03, line
        assert len(pairs) == 2 * (len(BUCKETS) + (" bf16 " not in line)), line
        assert all(a == pytest.approx(b, rel=0.03, abs=0.15) for a, b in zip(pairs[::2], pairs[1::2], strict=True)), line


def test_attention_counts_as_it_was_timed_for_each_size():
    """760m's is slow in this file: no other size's step hears of it, and the shapes not timed take the rate in the middle."""
    rows = [row for row in measured_rows(H100, ("125m", "350m", "760m")) if row["kind"] == "attention"]
    rows[2]["both_ms"] *= 3
    c = with_measured(H100, rows)
    for size, factor in (("125m", 1), ("350m", 1), ("760m", 3)):
        shape, micro_batch = roofline.case(size, 1024)
        truth = step_model.attention_seconds(H100, shape, micro_batch * 1024)
        assert step_model.attention_seconds(c, shape, micro_batch * 1024) == pytest.approx(factor * truth)
    assert c.attention == pytest.approx(H100.attention)


def test_ten_per_cent_are_ten_per_cent_of_what_was_timed():
    c = with_measured(H100, measured_rows(OTHER))
    faster = roofline._with_fp8_at(c, 1.1)
    for format in c.flops:
        for shape in ((6144, 16_384, 2048), (6144, 16_384, 8192)):      # one timed, one only corrected
            ratio = matmul_seconds(c, format, *shape) / matmul_seconds(faster, format, *shape)
            assert ratio == pytest.approx(1.0 if format == "bf16" else 1.1, rel=0.01), (format, shape)


@pytest.mark.parametrize("name, gpu", [("NVIDIA H100 PCIe", "h100"), ("NVIDIA GH200 480GB", "h200"), ("NVIDIA H200", "h100")])
def test_a_gpu_of_a_similar_name_is_another(name, gpu, results, capsys):
    results.write_text(results.read_text().replace("NVIDIA H100 80GB HBM3", name))
    assert roofline.main([f"results={results}", f"gpu={gpu}"]) == 2
    assert f"was measured on {name}, not gpu={gpu}" in capsys.readouterr().err


def test_results_are_looked_for_in_the_working_folder_first(results, monkeypatch, capsys):
    monkeypatch.chdir(results.parent)
    results.rename("README.md")         # which the checkout has, too
    assert roofline.main(["--results", "README.md", "sizes=1p5b"]) == 0
    assert "predicted / measured" in capsys.readouterr().out


def test_a_reader_that_has_read_enough_is_no_mistake(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert roofline.main(["sizes=1p5b"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments, told", [(["gpu=h200"], "was measured on NVIDIA H100 80GB HBM3, not gpu=h200"),
                                             ([], "was measured on a CPU, not gpu=h100")])
def test_another_machines_results_are_refused(arguments, told, results, capsys):
    if not arguments:
        results.write_text('{"kind": "run", "gpu": null}\n{"kind": "copy", "gb_per_s": 9.0}\n')
    assert roofline.main([f"results={results}", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_without_results_it_says_that_nothing_is_measured(capsys):
    assert roofline.main([]) == 0
    out = capsys.readouterr().out
    assert "nothing here is measured" in out
    assert "MODELLED" in out
    assert "predicted / measured" not in out
    assert "nan" not in out.split()
    assert "-0.0%" not in out
    for line in evidence.anchor_lines():
        assert line in out.splitlines()


@pytest.mark.parametrize("arguments, told", [
    (["gpu=h10"], "gpu='h10' has no ceilings here"), (["sizes=2b"], "sizes='2b' is none of 125m"),
    (["context=1000"], "context=1000 must be a power of two"), (["--results", "no.jsonl"], "there is no no.jsonl: give"),
    (["result=x"], "there is no key 'result'"), (["results=README.md"], "holds neither ceilings nor cells")])
def test_mistakes_are_told(arguments, told, capsys):
    assert roofline.main(arguments) == 2
    assert told in capsys.readouterr().err
