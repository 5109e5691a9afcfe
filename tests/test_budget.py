"""What a budget buys: the optimum against closed forms and brute force, break-even gaps, laws that cannot be read."""

import csv

import numpy as np
import pytest

from runtime.cli import UserError
from scaling import plan
from scaling.budget import EPOCH_COMPUTE, EPOCH_RATIO, Size, break_even, optimum, read_gap, read_law, tokens
from scaling.pairs import EPOCH, HOFFMANN
from tests.conftest import ROOT
from tests.plan_cases import BUDGET, write_law

PLAIN = [Size(str(N), int(N), 6 * N, 0.5, 1.25) for N in (1e8, 1e9, 1e10)]      # 6 N a token, one speed for all sizes


@pytest.mark.parametrize("law", [EPOCH, HOFFMANN], ids=lambda law: law.name)
@pytest.mark.parametrize("flops", [1e19, 1e21, 1e23])
def test_the_optimum_is_chinchillas_where_a_token_costs_6n(law, flops):
    N, D = optimum(law, PLAIN, flops, in_fp8=False)
    a = law.beta / (law.alpha + law.beta)           # Hoffmann et al. 2022, section 3.3
    G = (law.alpha * law.A / (law.beta * law.B)) ** (1 / (law.alpha + law.beta))
    assert pytest.approx(G * (0.5 * flops / 6) ** a, rel=1e-4) == N
    assert pytest.approx(0.5 * flops / (6 * N), rel=1e-6) == D


@pytest.mark.parametrize("in_fp8", [False, True])
def test_the_optimum_is_the_best_of_a_fine_grid_with_real_sizes(in_fp8):
    sizes, _ = plan.read_sizes(plan._parse(BUDGET))
    flops = 8 * 989.4e12 * 24 * 3600
    N, D = optimum(EPOCH, sizes, flops, in_fp8)
    grid = np.exp(np.linspace(np.log(1e8), np.log(2e10), 200_001))
    losses = EPOCH.loss(grid, tokens(grid, sizes, flops, in_fp8))
    assert EPOCH.loss(N, D) <= losses.min() + 1e-9
    assert pytest.approx(grid[losses.argmin()], rel=1e-3) == N


def test_fp8_is_a_larger_budget_where_its_speedup_is_the_same_for_all_sizes():
    assert optimum(EPOCH, PLAIN, 1e21, in_fp8=True) == pytest.approx(optimum(EPOCH, PLAIN, 1.25e21, in_fp8=False), rel=1e-6)


def test_tokens_at_a_size_are_flops_over_its_own_count():
    sizes = [Size("a", 10**8, 8.5e8, 0.3, 1.1), Size("b", 10**9, 7e9, 0.5, 1.3)]
    assert tokens(1e8, sizes, 1e20, False) == pytest.approx(1e20 * 0.3 / 8.5e8)
    assert tokens(1e9, sizes, 1e20, True) == pytest.approx(1e20 * 0.5 * 1.3 / 7e9)
    assert tokens(8e9, sizes, 1e20, False) == pytest.approx(1e20 * 0.5 / (8e9 * 6.5))       # attention 1 -> 1 / 8^(1/3)


@pytest.mark.parametrize("speedup, gap", [(1.10, 0.43), (1.17, 0.70), (1.28, 1.09)])
def test_break_even_gaps_at_the_target(speedup, gap):
    N = 1_541_785_600
    found = break_even(EPOCH, N, 20 * N, speedup)
    assert round(100 * found, 2) == gap
    # the other way round: at that gap, FP8 needs all of its extra tokens to make it up
    nats = found * EPOCH.loss(N, 20 * N * speedup)
    assert EPOCH.extra_tokens(nats, 20 * N) == pytest.approx(speedup, rel=1e-6)


def test_a_table_of_points_brings_no_interval(tmp_path):
    law = read_law(str(write_law(tmp_path, runs=False)))
    assert law.fit is None and law.surface.alpha == EPOCH.alpha and "neither an interval" in law.note
    assert law.beyond(1e12, 1e9) == ""


def test_the_published_range_is_that_of_the_points():
    path = ROOT.parent / "shared" / "reference" / "chinchilla_points.csv"
    if not path.exists():
        pytest.skip(f"{path} is absent: the range of the published law's points cannot be checked")
    rows = [tuple(float(row[key]) for key in ("loss", "Model Size", "Training FLOP"))
            for row in csv.DictReader(path.read_text().splitlines())]
    kept = [row for row in rows if row[0] < sorted(one[0] for one in rows)[-5]]
    ratios = [C / (6 * N**2) for _, N, C in kept]
    assert len(kept) == 240 and (min(ratios), max(ratios)) == pytest.approx(EPOCH_RATIO, rel=1e-3)
    assert (min(row[2] for row in kept), max(row[2] for row in kept)) == pytest.approx(EPOCH_COMPUTE, rel=1e-3)


@pytest.mark.parametrize("text", ["", "[1]", '{"groups": {"bf16": {}}}', '{"laws": {"chinchilla": {"identified": true, "n": 3}}}',
                                  '{"groups": [], "inputs": 3}', '{"laws": {"chinchilla": {"identified"'])
def test_a_damaged_law_is_refused(tmp_path, text):
    path = tmp_path / "law.json"
    path.write_text(text)
    with pytest.raises(UserError, match="law.json"):
        read_law(str(path))


def test_a_damaged_precision_json_is_refused(tmp_path):
    (tmp_path / "precision.json").write_text('{"common": {"tensorwise": {"bf16": {}}}}')
    with pytest.raises(UserError, match="precision.json"):
        read_gap(str(tmp_path / "law.json"), "tensorwise")
