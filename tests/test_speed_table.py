"""The tables and checks of the speed benchmark, from invented rows."""

import copy
import math
import random

import pytest

from bench.speed_rows import PEERS, against, newest, tflops, valid
from bench.speed_table import TARGETS, compare, table
from tests.speed_cases import H100, board, cell, run_row


def text(rows):
    return "\n".join(table(rows))


def line_of(rows, *words):
    """The values of the only row of a table that holds all these words."""
    found = [line for line in table(rows) if line.startswith("| ") and all(f"| {word} |" in line for word in words)]
    assert len(found) == 1, found
    return found[0].strip("| ").split(" | ")


# ---------------------------------------------------------------------------------------------------------------- the table

def test_nothing_measured_is_one_sentence():
    for rows in ([], [run_row()], [{"kind": "strange"}]):
        assert table(rows)[0] == "Nothing has been measured: there is no valid cell in these rows."
        assert "|" not in text(rows)


def test_a_cell_is_a_row_with_its_numbers():
    values = line_of([run_row(), cell(), cell(label="tensorwise+kernels", speed=1.25)], "tensorwise+kernels", "64")
    assert values == ["tensorwise+kernels", "64", "600,000", "873.8", "108.13, 109.23, 110.32", "510.0", "51.5%", "40.0%",
                      "1.250 x bf16 (1.240 to 1.260)", "40.0", "26.0", "-", "0.0030"]
    page = text([run_row(), cell()])
    assert "NVIDIA H100 80GB HBM3" in page and "commit 0123456789:" in page and "torch 2.11.0+cu130" in page
    assert "uncommitted" not in page and "uncommitted" in text([run_row(dirty=True), cell()])
    assert "524,288 tokens per optimizer step" in page and "Graph breaks: none" in page
    assert "rehearsal" in text([run_row(gpu=None), cell(mfu_bf16=None, tcu=None, clocks=None)])


def test_sizes_stand_in_order_ours_before_the_peers():
    headings = [line.split()[1].rstrip(",") for line in table(board()) if line.startswith("### ") and "GFLOP" in line]
    assert headings[:4] == ["125m", "350m", "760m", "1p5b"]
    assert set(headings[4:]) == {size for _, size, _, _, _, _ in PEERS}


def test_what_is_invalid_stands_apart_with_its_reason_and_in_no_ratio():
    bad = cell(label="rowwise", speed=1.5, valid=False, invalid_because="loss off by 0.2")
    page = text([run_row(), cell(), bad])
    assert "- INVALID: 125m rowwise, micro-batch 64, run one: loss off by 0.2" in page and "1.500" not in page
    assert "not measured" in " ".join(line_of([run_row(), cell(), bad], "125m FP8 / BF16"))
    page = text([run_row(), {"kind": "failed", "run": "one", "size": "1p5b", "label": "bf16", "error": "no room", "oom": True}])
    assert "- out of memory: 1p5b bf16, run one: no room" in page


def test_second_tries_and_ceilings_say_what_they_are():
    rows = [run_row(), cell(micro_batch=32, planned_micro_batch=64), cell(label="amax", speed=0.5, planned_micro_batch=64),
            {"kind": "failed", "run": "one", "label": "matmul fp8 1p5b qkv forward", "ceiling": [1], "error": "no kernel"}]
    assert line_of(rows, "bf16", "32 (64 out of memory)") and line_of(rows, "amax", "64")
    assert "- failed: matmul fp8 1p5b qkv forward, run one: no kernel" in text(rows)


def test_a_ratio_over_an_invalid_baseline_is_none():
    fast = cell(label="tensorwise", speed=1.3)
    assert valid([run_row(), cell(), fast])[1]["ratio"]["median"] == 1.3
    assert valid([run_row(), fast])[0]["ratio"]["median"] == 1.3, "the baseline's own row comes last, a cut may have cost it"
    rows = [run_row(), cell(valid=False), fast]
    assert valid(rows)[0]["ratio"] is None and "1.300" not in text(rows)
    rows = [run_row(), run_row("two"), cell(valid=False, run="two"), fast]
    assert valid(rows)[0]["ratio"]["median"] == 1.3, "another run's baseline is none of its business"


def test_compiling_counts_with_empty_caches_and_a_second_start_apart():
    """The baseline is started again in each call: its newest start finds in the caches what the first one left."""
    rows = [run_row(), cell(compile_s=80.0), cell(compile_s=20.0, cache_hits=2, cache_misses=0),
            cell(compile_s=50.0, cache_hits=1, cache_misses=1), cell(compile_s=1.0, cache_hits=None)]
    assert line_of(rows, "bf16", "64")[-3:-1] == ["80.0", "20.0"]
    assert line_of([*rows, cell(compile_s=90.0)], "bf16", "64")[-3:-1] == ["90.0", "20.0"]
    assert line_of([run_row(), rows[2], cell(compile_s=80.0, micro_batch=32)], "bf16", "64")[-3:-1] == ["-", "20.0"]
    rows = [run_row(), cell(attention_kernel="cudnn"), cell(label="auto", profile_error="no CUPTI")]
    assert "attention: cudnn, of some not known, the profiler failed" in text(rows)


def test_the_newest_valid_row_counts():
    old, new = cell(tok_per_s=100e3), cell(tok_per_s=200e3, run="two")
    broken = cell(tok_per_s=300e3, run="three", valid=False)
    rows = [run_row(), run_row("two"), run_row("three"), old, new, broken]
    assert [c["tok_per_s"] for c in newest(valid(rows))] == [200e3]
    rows.append(cell(tok_per_s=50e3, run="three", micro_batch=32))
    assert len(newest(valid(rows))) == 2, "another micro-batch is another cell"


def test_targets_are_reached_or_not_or_not_measured():
    rows = [run_row(), cell(speed=1.1), cell(label="tensorwise", speed=1.04), cell(label="auto", speed=0.99)]
    assert line_of(rows, "125m BF16 compiled, tok/s") == ["125m BF16 compiled, tok/s", "500,000", "528,000", "bf16", "reached"]
    assert line_of(rows, "125m FP8 / BF16") == ["125m FP8 / BF16", "1.050", "1.040", "tensorwise", "NOT reached"]
    assert line_of(rows, "125m auto / BF16")[2:] == ["0.990", "auto", "NOT reached"]
    assert line_of(rows, "350m FP8 / BF16")[2:] == ["-", "-", "not measured"]
    other = [row | {"T": 2048} if row["kind"] == "cell" else row for row in rows]
    assert line_of(other, "125m FP8 / BF16")[4] == "not measured", "the targets are for T=1024"
    for gpu in ("NVIDIA H100 PCIe", "NVIDIA H200", None):
        assert "target" not in text([run_row(gpu=gpu), cell()])
    assert sum(len(ratios) for _, ratios in TARGETS.values()) == 5


def test_the_best_fp8_is_of_the_newest_rows_alone():
    """A lucky old row must not stand for a recipe that was measured again since."""
    rows = [run_row(), run_row("two"), cell(label="tensorwise", speed=1.3), cell(label="tensorwise", speed=1.0, run="two")]
    assert line_of(rows, "125m FP8 / BF16")[2] == "1.000"


def test_peers_are_compared_per_flop_within_one_run():
    ours = cell(flops_per_token=1e9, tok_per_s=500e3)
    theirs = cell("nanogpt_124m", "nanogpt", flops_per_token=0.8e9, tok_per_s=400e3)
    rows = [run_row(), ours, theirs]
    ratio = (500e3 * 1e9) / (400e3 * 0.8e9)     # by hand: TFLOP/s over TFLOP/s
    assert line_of(rows, "nanoGPT 124M")[-1] == f"{ratio:.3f}" == "1.562"
    assert "scaled by FLOPs per token" in text(rows)
    rows = [run_row(), run_row("two"), ours | {"run": "two"}, theirs]
    assert "no run holds our 125m (bf16) beside it" in text(rows) and "1.562" not in text(rows)
    rows = [run_row(), ours | {"T": 2048}, theirs]
    assert "no run holds" in text(rows)


def test_the_newest_run_with_both_counts_and_in_it_the_newest_rows():
    def pair(run, speed):
        return [run_row(run), cell(run=run, speed=speed), cell("nanogpt_124m", "nanogpt", run=run)]

    rows = [*pair("one", 2.0), *pair("two", 1.5), cell(run="two", speed=1.0), run_row("three"), cell(run="three", speed=3.0)]
    assert line_of(rows, "nanoGPT 124M")[-4:-1] == ["64", "480,000", "408.0"]


def test_turns_with_one_baseline_outweigh_two_medians():
    """nanoGPT beside our BF16: 0.8 of its speed in turns, whatever the medians of a cooler minute say."""
    ours = cell(flops_per_token=1e9, tok_per_s=500e3)
    ratio = {"median": 0.8, "p10": 0.79, "p90": 0.81}
    theirs = cell("nanogpt_124m", "nanogpt", flops_per_token=0.5e9, tok_per_s=450e3, ratio=ratio, baseline_size="125m")
    rows = [run_row(), ours, theirs]
    assert line_of(rows, "nanoGPT 124M")[-1] == f"{1 / (0.8 * 0.5):.3f}" == "2.500"
    assert "0.800 x 125m bf16 (0.790 to 0.810)" in text(rows)
    fp8 = cell("ours_d12", "tensorwise", ratio={"median": 1.2, "p10": 1.2, "p90": 1.2}, baseline_size="ours_d12",
               flops_per_token=1e9)
    theirs = cell("nanochat_d12", "nanochat_fp8", ratio={"median": 1.1, "p10": 1.1, "p90": 1.1}, baseline_size="ours_d12",
                  flops_per_token=0.9e9)
    assert line_of([run_row(), fp8, theirs], "nanochat d12 in its FP8", "ours_d12 tensorwise")[-1] == f"{1.2 / (1.1 * 0.9):.3f}"


def test_the_faster_of_their_precisions_is_the_one_to_beat():
    rows = [run_row(), cell(), cell(label="tensorwise", speed=1.1), cell("nanochat_d12", "nanochat_bf16"),
            cell("nanochat_d12", "nanochat_fp8", speed=1.2)]
    theirs, ours = against(valid(rows), "nanochat_d12", ("nanochat_bf16", "nanochat_fp8"), "125m", "any")
    assert theirs["label"] == "nanochat_fp8" and ours["label"] == "tensorwise"
    assert line_of(rows, "nanochat d12, its faster precision")[-1] == f"{tflops(ours) / tflops(theirs):.3f}"


def test_ceilings_never_mix_runs():
    rows = board()
    assert line_of(rows, "gate_up")[-1] == "1.70" and "Copy on NVIDIA H100 80GB HBM3: 2,900 GB/s" in text(rows)
    assert "cudnn_sdpa_sm90" in text(rows)
    apart = [row | {"run": "two"} if row.get("dtype") == "fp8" else row for row in rows]
    assert line_of([run_row("two"), *apart], "gate_up")[-1] == "-"


def test_damaged_rows_are_named_and_cost_nothing_else():
    hostile = [
        None, 3, "x", [], {}, {"kind": 7}, {"kind": "cell"}, cell(tok_per_s=math.nan), cell(step_s=0), cell() | {"size": ["a"]},
        cell(run=None), cell(label="tensorwise", ratio="fast", baseline=["bf16"]),
        cell(label="amax", ratio={"median": math.inf}), {"kind": "failed"}, {"kind": "matmul", "tflops": 1.0, "M": {}},
        {"kind": "copy"}, {"kind": "attention", "kernels": None}, {"kind": "loop", "of_cell": "x"},
        {"kind": "run", "run": [1], "gpu": 5}, cell(label="auto", clocks={"sm_mhz": 3, "throttled": 1}, micro_s=7, drift="x",
                                                   graph_breaks=None, buckets=[1], mfu_bf16="x")]
    page = text([run_row(), *hostile, cell()])
    assert "tok_per_s is nan" in page and "step_s is 0" in page and "6 rows are no objects with a kind" in page
    assert line_of([run_row(), *hostile, cell()], "bf16", "64", "480,000")
    rng, rows = random.Random(0), board()
    for _ in range(60):     # any key lost or of another type
        broken = copy.deepcopy(rows)
        for row in rng.sample(broken, 6):
            row[rng.choice(list(row))] = rng.choice([None, [], {}, "x", -1, 1e400, {"median": None}])
        table(broken), compare(rows, broken), compare(broken, rows)


# --------------------------------------------------------------------------------------------------------------- comparing

def changed(rows, change):
    return [change(dict(row)) if row["kind"] == "cell" else row for row in rows]


def test_equal_rows_have_lost_nothing():
    assert compare(board(), board()) == []


@pytest.mark.parametrize("factor,lost", [(0.98, False), (0.96, True), (1.2, False)])
def test_a_loss_beyond_the_tolerance_is_told(factor, lost):
    def slower(row):
        if row["size"] == "1p5b" and row["label"] == "tensorwise+kernels":
            row["ratio"] = {name: value * factor for name, value in row["ratio"].items()}
        return row

    losses = compare(board(), changed(board(), slower))
    assert [("1p5b" in loss and "tensorwise+kernels" in loss and "-4.0%" in loss) for loss in losses] == [True] * lost
    assert compare(board(), changed(board(), slower), tolerance=0.05) == []


def test_a_peer_that_caught_up_is_a_loss_a_slower_uncompiled_cell_none():
    def caught_up(row):
        return row | {"tok_per_s": row["tok_per_s"] * 1.2} if row["size"] == "nanogpt_124m" else row

    def eager(row):
        return row | {"ratio": {"p10": 0.1, "median": 0.2, "p90": 0.3}} if row["label"] == "bf16_eager" else row

    assert ["nanoGPT 124M" in loss for loss in compare(board(), changed(board(), caught_up))] == [True]
    assert compare(board(), changed(board(), eager)) == []
    slow_loop = [row | {"of_cell": 0.9} if row["kind"] == "loop" else row for row in board()]
    assert ["train.py / cell" in loss for loss in compare(board(), slow_loop)] == [True]


def test_what_was_valid_and_is_no_longer_is_a_loss():
    def broken(row):
        return row | {"valid": False, "invalid_because": "off"} if row["label"] == "rowwise" and row["size"] == "125m" else row

    losses = compare(board(), changed(board(), broken))
    assert losses == [f"{H100}, 125m, rowwise: valid before, now INVALID: off"]
    failed = {"kind": "failed", "run": "one", "size": "125m", "label": "rowwise", "error": "boom", "oom": False}
    without = [row for row in board() if (row.get("size"), row.get("label")) != ("125m", "rowwise")]
    assert compare(board(), [*without, failed]) == [f"{H100}, 125m, rowwise: valid before, now failed: boom"]
    assert compare(board(), without) == [], "not reached within the budget is no loss"
    again = [*board(), failed]
    assert compare(board(), again) == [], "it worked too"


def test_a_check_that_checked_nothing_does_not_pass():
    assert compare([], board()) == compare(board(), []) == ["no ratio is in both: nothing was compared"]
    elsewhere = [run_row(gpu="NVIDIA H200"), *board()[1:]]
    assert compare(board(), elsewhere) == ["no ratio is in both: nothing was compared"]
