"""Hours of --plan from measured speeds: the rows that count, their scaling, where they come from. The numbers are invented."""

import json
import re
from dataclasses import replace

import pytest
import torch

from model import GPT
from runtime.config import load_config
from runtime.plan import labels
from runtime.plan import plan as train_plan
from tests.conftest import ROOT


def hours_of(lines):
    return {name: float(h) for name, h in re.findall(r"^  (BF16|FP8)(?:, at the very best)? +([\d.]+) h", "\n".join(lines), re.M)}


def speed_rows(config, run="one", gpu="NVIDIA H100 80GB HBM3", T=1024, t="2026-12-01T00:00:00Z", **tok_per_s):
    """A run of bench/throughput.py with a cell of this model at T for each label; the numbers are invented."""
    with torch.device("meta"):
        counts = GPT(replace(config.model, n_ctx=T)).counts()
    keys = ("params_total", "params_matmul", "flops_per_token")
    return [{"kind": "run", "run": run, "t": t, "gpu": gpu, "commit": "0123456789abcdef", "dirty": False},
            *({"kind": "cell", "run": run, "size": "1p5b", "label": label.replace("_plus_", "+"), "T": T, "micro_batch": 16,
               "valid": True, "tok_per_s": speed, **{key: counts[key] for key in keys}} for label, speed in tok_per_s.items())]


def planned(folder, config, rows, gpu="h100"):
    folder.mkdir(exist_ok=True)
    (folder / "h100.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return train_plan(config, gpu, torch.bfloat16, folder)


FP8_RUN = load_config(ROOT / "configs/gpt1p5b_fp8.py")       # T=2048


def test_hours_follow_from_what_was_measured_at_the_same_flops(tmp_path):
    rows = speed_rows(FP8_RUN, bf16=50e3, tensorwise=65e3)
    lines = planned(tmp_path, FP8_RUN, rows)
    matmul, attention = 6 * (28 * 2048 * (6144 + 2048 + 2 * 5632 + 5632) + 50304 * 2048), 12 * 28 * 2048
    here, there = matmul + attention * 2048, matmul + attention * 1024
    assert rows[1]["flops_per_token"] == there
    tokens = FP8_RUN.total_tokens
    for arm, speed in (("BF16", 50e3), ("FP8", 65e3)):
        assert hours_of(lines)[arm] == pytest.approx(tokens / (speed * there / here) / 3600, abs=0.051)
    page = "\n".join(lines)
    assert "measured, 65,000 tok/s as tensorwise at micro-batch 16 on one NVIDIA H100 80GB HBM3" in page
    assert "T=1024 scaled by FLOPs per token" in page and "h100.jsonl, commit 0123456789)" in page
    assert "assumed" not in page and "at the very best" not in page
    same = planned(tmp_path, FP8_RUN, speed_rows(FP8_RUN, T=2048, bf16=50e3))
    assert hours_of(same)["BF16"] == pytest.approx(tokens / 50e3 / 3600, abs=0.051) and "scaled" not in "\n".join(same)
    assert "at the very best" in "\n".join(same), "FP8 was not measured: bounded, from the measured BF16"
    eight = planned(tmp_path, replace(FP8_RUN, parallel=replace(FP8_RUN.parallel, shard=8)), rows)
    assert hours_of(eight) == pytest.approx({arm: h / 8 for arm, h in hours_of(lines).items()}, abs=0.06)
    assert "what GPUs send each other not counted" in "\n".join(eight)


@pytest.mark.parametrize("change", [
    {"valid": False}, {"valid": "yes"}, {"label": "bf16_eager"}, {"params_total": 1}, {"params_matmul": 1}, {"tok_per_s": None},
    {"tok_per_s": 0}, {"tok_per_s": 1e400}, {"flops_per_token": 1e9}, {"run": "another"}, {"T": "x"}, {"kind": "failed"},
    {"micro_batch": None}])
def test_rows_that_say_nothing_of_the_run_leave_the_assumption(tmp_path, change):
    head, cell = speed_rows(FP8_RUN, bf16=50e3)
    assert "assumed" not in "\n".join(planned(tmp_path, FP8_RUN, [head, cell]))
    assert "an assumed mfu_bf16 of 45%" in "\n".join(planned(tmp_path, FP8_RUN, [head, cell | change, 3, None, [], {}]))


def test_only_that_gpu_that_size_and_that_recipe_count(tmp_path):
    rows = speed_rows(FP8_RUN, bf16=50e3, tensorwise=65e3)
    small = load_config(ROOT / "configs/gpt125m_fp8.py")
    assert "assumed" in "\n".join(planned(tmp_path, small, rows))
    for name in ("NVIDIA H100 PCIe", "NVIDIA H200", None, 5):
        assert "assumed" in "\n".join(planned(tmp_path, FP8_RUN, [rows[0] | {"gpu": name}, *rows[1:]]))
    assert "measured" in "\n".join(planned(tmp_path, FP8_RUN, [rows[0] | {"gpu": "NVIDIA H200"}, *rows[1:]], "h200"))
    for fp8 in ({"recipe": "rowwise"}, {"head": True}, {"skip": ("mlp.down",)}, {"kernels": True}):
        other = replace(FP8_RUN, fp8=replace(FP8_RUN.fp8, **fp8))
        assert "at the very best" in "\n".join(planned(tmp_path, other, rows)), fp8
    assert labels(replace(FP8_RUN, fp8=replace(FP8_RUN.fp8, head=True, kernels=True)))[1] == "tensorwise+kernels+head"
    assert "assumed" in "\n".join(planned(tmp_path, replace(FP8_RUN, parallel=replace(FP8_RUN.parallel, compile=False)), rows))
    assert "assumed" in "\n".join(train_plan(FP8_RUN, "h100", torch.bfloat16, tmp_path / "nothing"))


def test_the_newest_row_of_the_closest_micro_batch_counts(tmp_path):
    def with_micro_batch(n, speed, **other):
        head, cell = speed_rows(FP8_RUN, T=2048, bf16=speed, **other)
        return [head, cell | {"micro_batch": n}]

    new = with_micro_batch(8, 41e3, run="new", t="2026-12-02T00:00:00Z")
    rows = [*new, *with_micro_batch(8, 40e3), *with_micro_batch(4, 60e3, run="four"), *with_micro_batch(32, 50e3, run="many")]
    assert "measured, 41,000 tok/s" in "\n".join(planned(tmp_path, FP8_RUN, rows)), "the newer, wherever it stands"
    few = replace(FP8_RUN, data=replace(FP8_RUN.data, micro_batch=2))
    assert "measured, 60,000 tok/s as bf16 at micro-batch 4" in "\n".join(planned(tmp_path, few, rows))
    auto = replace(FP8_RUN, data=replace(FP8_RUN.data, micro_batch="auto"))
    lines = planned(tmp_path, auto, rows)
    assert "measured, 60,000" in "\n".join(lines) and "micro-batch 1 (auto: the start tries larger ones)" in "\n".join(lines)
    again = [*rows, *with_micro_batch(4, 30e3, run="again", t="2026-12-03T00:00:00Z")]
    assert "measured, 50,000" in "\n".join(planned(tmp_path, auto, again)), "what was measured again since counts no more"
