"""scaling/precision_result.py: the analysis of a study, and what it says of the best recipe."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from scaling.paired.cost import EPOCH
from scaling.pairing import pair_runs
from scaling.precision_result import PairResult, PrecisionResult, SizeGap, analyse
from scaling.reason_words import sentence_of
from scaling.records import read_runs
from tests.helpers.scaling_runs import edit, strict, write_branches, write_run

# parameters without the vocabulary -> all
SHAPES = {3_150_000: 16_000_000, 6_490_000: 25_800_000, 12_600_000: 38_300_000}


def analysed(folder: Path, convention: str | None = None) -> PrecisionResult:
    records = read_runs([folder], convention)[0]
    return analyse(records, pair_runs(records)[0], "bf16", None)


# ---------------------------------------------------------------------- which parameters N counts


@pytest.fixture(scope="module")
def nonembed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sizes at 5, 10 and 20 tokens per parameter without the vocabulary, losses from a known
    law of those."""
    folder = tmp_path_factory.mktemp("nonembed")
    for path in write_branches(folder, SHAPES, (5, 10, 20), noise=1e-4).glob("*/summary.json"):
        N = strict(path)["params_total"]
        edit(path, params_nonembed=N, params_total=SHAPES[N])
    edit(folder / "study.json", params="nonembed")
    return folder


@pytest.fixture(scope="module")
def smallest(nonembed: Path) -> SizeGap:
    return analysed(nonembed).sizes[0]


def test_a_place_has_both_counts_of_parameters(smallest: SizeGap) -> None:
    assert (smallest.N, smallest.params_total) == (3_150_000, 16_000_000)
    assert smallest.tokens_per_param == 5


def test_our_own_law_is_applied_to_our_count(smallest: SizeGap) -> None:
    own, nats = smallest.costs[0], smallest.nats.mean
    term = 40.0 * 3_150_000**-0.35  # of the known law
    expected = (1 + nats / term) ** (-1 / 0.35)
    assert own.law == "own" and own.effective_parameters == pytest.approx(expected, rel=0.02)


def test_epochs_law_is_applied_to_all_parameters(smallest: SizeGap) -> None:
    epoch = smallest.costs[1]
    expected = EPOCH.effective_parameters(smallest.nats.mean, 16e6)
    assert epoch.law == "Epoch" and epoch.effective_parameters == pytest.approx(expected)


def log_count(pair: PairResult, count: str) -> float:
    return math.log10(getattr(pair, count))


@pytest.mark.parametrize(
    "convention, count", [(None, "params_nonembed"), ("total", "params_total")]
)
def test_the_trend_over_sizes_is_over_the_studys_count(
    nonembed: Path, convention: str | None, count: str
) -> None:
    result = analysed(nonembed, convention)
    x = [log_count(pair, count) for pair in result.pairs]
    log_percents = [100 * math.log1p(pair.gap_bf16.percent / 100) for pair in result.pairs]
    slope, _ = np.polyfit(x, log_percents, 1)
    trend = result.common["tensorwise"].over_sizes
    assert trend is not None and trend.mean == pytest.approx(slope, rel=1e-6)


# ------------------------------------------------------------------------------- the best, in words


def write_seeds(folder: Path, recipe: str, gaps: list[float], **changes: object) -> None:
    """A BF16 run and its FP8 partner for each seed; gaps in nats."""
    for seed, gap in enumerate(gaps, 1):
        if not (folder / f"bf16_{seed}").exists():
            write_run(folder / f"bf16_{seed}", loss=2.2, seed=seed, device="NVIDIA H100")
        changes = {"device": "NVIDIA H100", **changes}
        name = f"{recipe}_{seed}"
        write_run(folder / name, recipe=recipe, loss=2.2, gap=gap, seed=seed, **changes)


def test_the_fastest_of_those_that_tie_is_called_the_best(tmp_path: Path) -> None:
    write_seeds(tmp_path, "rowwise", [0.01, 0.012], tok_per_s_median=9000.0)
    write_seeds(tmp_path, "tensorwise", [0.012, 0.011], tok_per_s_median=13200.0)
    ranking = analysed(tmp_path).ranking
    assert ranking.best == "tensorwise"
    assert "not told apart from it: tensorwise" in ranking.reason
    assert "Of these tensorwise is the fastest, 1.100 of BF16's" in ranking.reason


def test_a_best_that_nothing_ties_with_needs_no_speed(tmp_path: Path) -> None:
    write_seeds(tmp_path, "rowwise", [0.01, 0.0101])
    write_seeds(tmp_path, "tensorwise", [0.1, 0.1002])
    assert "no other ranked recipe's lies within chance" in analysed(tmp_path).ranking.reason


def test_a_cpus_speed_decides_nothing(tmp_path: Path) -> None:
    write_seeds(tmp_path, "rowwise", [0.01, 0.012], device="cpu EPYC")
    write_seeds(tmp_path, "tensorwise", [0.012, 0.011], device="cpu EPYC")
    ranking = analysed(tmp_path).ranking
    assert ranking.best == "rowwise"
    assert "Speed cannot decide (a CPU has no FP8 units" in ranking.reason


def test_a_recipe_that_alone_is_ranked_is_no_best(tmp_path: Path) -> None:
    """tensorwise lacks a seed: said was that no other's gap lies within chance of rowwise's."""
    write_seeds(tmp_path, "rowwise", [0.01, 0.02, 0.03])
    write_seeds(tmp_path, "tensorwise", [0.011, 0.019])
    write_seeds(tmp_path, "cscale", [0.01, 0.02, 0.03])
    shutil.rmtree(tmp_path / "cscale_2")
    ranking = analysed(tmp_path).ranking
    assert [ranked.recipe for ranked in ranking.recipes] == ["rowwise"]
    assert ranking.best is None and "compared with nothing" in ranking.reason


def test_what_was_compared_is_said(tmp_path: Path) -> None:
    write_seeds(tmp_path, "rowwise", [0.01])
    reason = analysed(tmp_path).ranking.reason
    assert "over 1 pairs at the largest common budget of 38.9k" in reason


def test_a_recipe_that_is_left_out_is_told_with_its_run(tmp_path: Path) -> None:
    write_seeds(tmp_path, "rowwise", [0.01, 0.02])
    idle = {"recipe": "auto", "compile": False, "layers_converted": []}
    write_seeds(tmp_path, "auto", [0.01, 0.02], precision=idle)
    (left_out,) = analysed(tmp_path).ranking.left_out
    assert sentence_of(left_out.reason) == (
        "converts no Linear in auto_1 and 1 more: it is BF16 there"
    )


def test_a_recipe_that_lacks_a_pair_is_told_with_its_place(tmp_path: Path) -> None:
    write_seeds(tmp_path, "rowwise", [0.01, 0.02])
    write_seeds(tmp_path, "tensorwise", [0.01, 0.02])
    write_seeds(tmp_path, "cscale", [0.01])
    (left_out,) = analysed(tmp_path).ranking.left_out
    assert sentence_of(left_out.reason) == "no finished pair at 38.9k seed 2"
