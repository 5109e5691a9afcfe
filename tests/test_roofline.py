"""The model of a step on one GPU: its bytes against Inductor's plans, its seconds against published runs."""

import json
import re
from dataclasses import replace

import pytest
import torch

from bench import roofline, step_model
from bench.step_model import ABSOLUTE_ERROR, BUCKETS, CASTS, GPUS, RATIO_ERROR, Shape, linears, matmul_seconds, matmuls, step
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

D12, D24, D26 = (Shape(d, 64 * d, 256 * d, d // 2, 1664, 32768, gated=False, tied=False) for d in (12, 24, 26))
# nanochat: T = 2,048, yet three layers of four look back 1,024 tokens only: 832 in the mean over a row, as T = 1,664 has
LLAMA_1B8 = Shape(24, 2048, 7168, 16, 8192, 128256, kv_heads=8, tied=False)     # fms-fsdp, llama3_1.8b
LLAMA_8B = Shape(32, 4096, 14336, 32, 8192, 128256, kv_heads=8, tied=False)
XL = Shape(48, 1600, 6400, 25, 1024, 50304, gated=False)
SMALL = Shape(12, 768, 3072, 12, 1024, 50304, gated=False)


@pytest.mark.parametrize("shape, micro_batch, tokens, shard, least, most", [
    (D24, 20, 66_560, 8, 99_980, 99_980),       # nanochat, Run 1
    (D26, 20, 66_560, 8, 78_750, 78_750),       # nanochat, LOG 2026-02-02
    (XL, 12, 2**20 // 8, 8, 46_500, 47_800),    # llm.c, PyTorch (ao#1297)
    (SMALL, 64, 65_536, 1, 468_100, 468_100),   # llm.c, 8 GPUs
])
def test_published_speed_in_bf16(shape, micro_batch, tokens, shard, least, most):
    s = step(H100, shape, "bf16", micro_batch, tokens, shard=shard)
    assert least * (1 - ABSOLUTE_ERROR) < s.tok_per_s < most * (1 + ABSOLUTE_ERROR)


@pytest.mark.parametrize("shape, micro_batch, tokens, label, least, most", [
    (D12, 40, 66_560, "tensorwise+head", 0.90, 1.00),       # "d12 was still slower": below 1, a bound on one side
    (D24, 20, 66_560, "tensorwise+head", 1.07, 1.19),
    (D26, 20, 66_560, "tensorwise+head", 1.17, 1.17),       # what `transposed` was fitted to
    (D26, 20, 66_560, "rowwise+head", 0.90, 0.90),          # what rowwise's rate was fitted to, with the next but one
    (LLAMA_1B8, 2, 2 * 8192, "tensorwise", 1.18, 1.18),     # 128 GPUs
    (LLAMA_8B, 1, 8192, "rowwise", 1.10, 1.10),             # torchao, 8 GPUs
    (LLAMA_8B, 1, 8192, "tensorwise", 1.25, 1.25),
])
def test_published_ratios(shape, micro_batch, tokens, label, least, most):
    bf16, fp8 = (step(H100, shape, name, micro_batch, tokens, shard=128 if shape is LLAMA_1B8 else 8) for name in ("bf16", label))
    assert least - RATIO_ERROR < bf16.seconds / fp8.seconds < most + RATIO_ERROR


def test_one_linear_of_nanochat():
    """65536 x 1664 -> 6656 forward: 2.00 ms in BF16, 1.45 ms in FP8 with the casts of its input and weight."""
    linear = step_model.Linear("gate_up", 1664, 6656, 1)
    assert matmul_seconds(H100, "bf16", 65_536, 1664, 6656) == pytest.approx(2.00e-3, rel=0.07)
    casts = (5 * 65_536 * linear.K + 9 * linear.K * linear.N) / H100.bandwidth
    assert matmul_seconds(H100, "fp8", 65_536, 1664, 6656) + casts == pytest.approx(1.45e-3, rel=0.07)


# ----------------------------------------------------------------------------------------------- one GPU: what must hold

@pytest.mark.parametrize("size", roofline.MICRO_BATCH)
def test_ceilings_are_above_and_auto_is_never_slower(size):
    shape, micro_batch = roofline.case(size, 1024)
    times = {label: step(H100, shape, label, micro_batch, 2**19).seconds for label in roofline.LABELS}
    free = step(H100, shape, "tensorwise", micro_batch, 2**19, casts=step_model.FREE).seconds
    assert free < min(t for label, t in times.items() if not label.endswith("+head"))
    for auto, others in (("auto", ("bf16", "tensorwise", "rowwise")), ("auto+kernels", ("auto", "tensorwise+kernels"))):
        assert all(times[auto] <= times[other] * (1 + 1e-9) for other in others)


def test_matmuls_are_between_half_a_wave_and_the_rate():
    for format, rate in H100.flops.items():
        for linear in linears(BIG):
            for M, K, N in matmuls(linear, 16_384).values():
                achieved = 2 * M * K * N / matmul_seconds(H100, format, M, K, N)
                assert 0.5 * rate < achieved < rate, (format, M, K, N)
    small = 2 * 128 * 128 * 128 / matmul_seconds(H100, "bf16", 128, 128, 128)
    assert small < 0.05 * H100.flops["bf16"], "one tile cannot fill 132 SMs"


def test_an_unknown_label_is_a_key_error():
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
                              "ms": 1e3 * matmul_seconds(truth, f, m, k, n)} for f in truth.flops]
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
    c = step_model.with_measured(H100, measured_rows(OTHER))
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
    c = step_model.with_measured(H100, rows)
    key = (rows[0]["M"], rows[0]["K"], rows[0]["N"])
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


@pytest.mark.parametrize("arguments, told", [
    (["gpu=h10"], "gpu='h10' has no ceilings here"), (["sizes=2b"], "sizes='2b' is none of 125m"),
    (["context=1000"], "context=1000 must be a power of two"), (["--results", "no.jsonl"], "no.jsonl is not there: give"),
    (["result=x"], "there is no key 'result'"), (["results=README.md"], "holds neither ceilings nor cells")])
def test_mistakes_are_told(arguments, told, capsys):
    assert roofline.main(arguments) == 2
    assert told in capsys.readouterr().err
