"""scaling/precision.py's command: gaps over seeds beside the null, in words that follow the numbers."""

import math
import re

import numpy as np
import pytest
from scaling_runs import write_run

from scaling import precision
from scaling.records import read_runs

BF16 = {1: 2.20, 2: 2.21, 3: 2.18}


def write_seeds(folder, gaps, recipe="tensorwise"):
    """A BF16 run and its FP8 partner for each seed; gaps in nats."""
    for seed, loss in BF16.items():
        if not (folder / f"bf16_{seed}").exists():
            write_run(folder / f"bf16_{seed}", loss=loss, seed=seed, curve=False)
        write_run(folder / f"{recipe}_{seed}", recipe=recipe, loss=loss, gap=gaps[seed - 1], seed=seed, curve=False)
    return folder


def row(output, name):
    return next([cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if f"| {name} |" in line)


def test_mean_interval_and_null_are_those_of_the_textbook(tmp_path, capsys):
    gaps = [0.004, 0.010, 0.007]
    assert precision.main([str(write_seeds(tmp_path, gaps))]) == 0
    output = capsys.readouterr().out
    percent = [100 * gap / loss for gap, loss in zip(gaps, BF16.values(), strict=True)]
    mean = sum(percent) / 3
    sd = math.sqrt(sum((p - mean) ** 2 for p in percent) / 2)
    half = 4.302652729911275 * sd / math.sqrt(3)        # Student's t, 97.5 %, two degrees of freedom
    cells = row(output, "tensorwise")
    assert cells[3:5] == ["3", f"{mean:+.3f} ± {half:.3f}"]
    losses = np.array(list(BF16.values()))
    null = math.sqrt(2) * losses.std(ddof=1) / losses.mean() * 100
    assert row(output, "bf16, two seeds")[4] == f"SD {null:.3f}"


@pytest.mark.parametrize("gaps, reading", [
    ([0.010, 0.011, 0.012], "costs"), ([-0.010, -0.011, -0.012], "gains"), ([-0.010, 0.011, 0.003],
     r"undecided: -\d\.\d\d to \+\d\.\d\d"),
])
def test_words_follow_numbers(tmp_path, capsys, gaps, reading):
    assert precision.main([str(write_seeds(tmp_path, gaps))]) == 0
    assert re.fullmatch(reading, row(capsys.readouterr().out, "tensorwise")[-1])


def test_one_pair_has_no_interval_and_one_seed_no_null(tmp_path, capsys):
    write_run(tmp_path / "a", seed=1, curve=False)
    write_run(tmp_path / "b", recipe="amax", gap=0.01, seed=1, curve=False)
    assert precision.main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert row(output, "amax")[-1] == "one pair: no interval"
    assert row(output, "bf16")[-1] == "no null: one BF16 seed"


def test_several_recipes_are_lines_of_their_own(tmp_path):
    write_seeds(tmp_path, [0.01] * 3)
    write_seeds(tmp_path, [0.02] * 3, "cscale")
    records, _ = read_runs([tmp_path])
    table = precision.seed_table(records, precision.pairs(records)[0])
    assert row(table, "cscale")[3] == row(table, "tensorwise")[3] == "3"


def test_mistakes_are_a_sentence(tmp_path, capsys):
    assert precision.main([str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
