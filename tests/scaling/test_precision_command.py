"""scaling/precision.py: the command's files, tables and page say what the gaps are, in words that
follow the numbers."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from scaling import precision
from scaling.paired.cost import EPOCH
from tests.conftest import asked
from tests.helpers.scaling_runs import cells, edit, strict, write_branches, write_run

BF16 = 2.20, 2.21, 2.18  # nats, of seeds 1, 2, 3
GAPS = (0.004, 0.010, 0.007)  # nats
PERCENTS = 100 * np.divide(GAPS, BF16)
Capsys = pytest.CaptureFixture[str]


def write_seeds(
    folder: Path,
    gaps: tuple[float, ...],
    recipe: str = "tensorwise",
    params: int = 38_912,
    **changes: object,
) -> Path:
    """A BF16 run and its FP8 partner for each seed; gaps in nats."""
    for seed, gap in enumerate(gaps, 1):
        shared = {"loss": BF16[seed - 1], "seed": seed, "params": params, **changes}
        for name, fp8_gap in (("bf16", 0.0), (recipe, gap)):
            path = folder / f"{name}_{params}_{seed}"
            if not path.exists():
                write_run(path, recipe=name, gap=fp8_gap, **shared)
    return folder


def declare(folder: Path, percent: float = 0.25, declared: str = "2026-11-19T00:00:00Z") -> Path:
    """A study.json from before write_run's runs began (20 November)."""
    edit(folder / "study.json", margin_percent=percent, declared=declared)
    return folder


def run(capsys: Capsys, folder: Path, *arguments: str) -> tuple[str, dict]:
    """(page, precision.json)."""
    page = asked(capsys, precision.main, folder, *arguments, "--all")
    return page, strict(folder / "law/precision.json")


def row(page: str, name: str, first: str = "N") -> list[str]:
    """Cells of the line that holds `name`, in the table whose first column is `first`."""
    table = re.split(rf"^\| {first} ", page, maxsplit=1, flags=re.M)[1].split("\n\n")[0]
    return next(line for line in cells(table) if name in line)


# ---------------------------------------------------------------------------- gaps and their tables


def test_a_sizes_gap_is_the_t_interval_of_its_seeds(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    page, _ = run(capsys, write_seeds(tmp_path, GAPS))
    interval = ttest_1samp(PERCENTS, 0).confidence_interval()
    mean, half = (interval.low + interval.high) / 2, (interval.high - interval.low) / 2
    assert row(page, "tensorwise")[3:5] == ["3", f"{mean:+.3f} ± {half:.3f}"]


def test_the_gap_over_all_sizes_is_of_logarithms(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    _, result = run(capsys, write_seeds(tmp_path, GAPS))
    mean = result["common"]["tensorwise"]["bf16"]["mean"]
    assert mean == pytest.approx(np.mean(100 * np.log1p(PERCENTS / 100)), rel=1e-9)


def test_the_null_of_other_seeds_stands_beside_the_gap(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    page, _ = run(capsys, write_seeds(tmp_path, GAPS))
    spread = f"SD {100 * math.sqrt(2) * np.log(BF16).std(ddof=1):.3f}"
    assert row(page, "bf16, two seeds")[3:6] == ["3 runs", spread, spread]


def test_a_single_pair_has_no_interval_and_no_null(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    page, result = run(capsys, declare(write_seeds(tmp_path, (0.01,), "amax")))
    assert row(page, "amax")[-1] == "no interval (n = 1)" and "two seeds" not in page
    assert result["null"]["pooled"] is result["null"]["same_seed"]["pooled"] is None


def test_a_cpu_has_no_speed_up(tmp_path: Path, capsys: Capsys, no_figures: None) -> None:
    page, result = run(capsys, write_seeds(tmp_path, GAPS))
    assert "a CPU has no FP8 units" in page
    assert all(cost["speedup"] is None for cost in result["sizes"][0]["costs"])


def test_a_speed_up_of_a_gpu_is_net_of_the_extra_tokens(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    gpu = {"device": "NVIDIA H100", "params": 1_500_000_000, "tok_per_s_median": 1.0}
    _, result = run(capsys, write_seeds(tmp_path, GAPS, **gpu))
    (cost,) = [cost for cost in result["sizes"][0]["costs"] if cost["law"] == "Epoch"]
    # equal throughput
    assert cost["speedup"] == pytest.approx(1 / EPOCH.extra_tokens(0.007, 30e9))


@pytest.mark.parametrize("cut_off", ["none", "*_tensorwise_1_*", "*_d5"])
class TestBranches:
    """Branches of one trunk count once, also where they were trained from scratch without their
    trunk's checkpoint: they share its seed, data and schedule."""

    def analyse(self, folder: Path, capsys: Capsys, cut_off: str) -> tuple[str, dict]:
        write_branches(folder, sizes=(30_000, 60_000, 120_000))
        for path in folder.glob(f"{cut_off}/summary.json"):
            edit(path, parent_run=None, parent_step=None)
        return run(capsys, folder)

    def test_in_the_gap(
        self, tmp_path: Path, capsys: Capsys, no_figures: None, cut_off: str
    ) -> None:
        page, result = self.analyse(tmp_path, capsys, cut_off)
        assert row(page, "tensorwise", "recipe")[3] == "6 of 24" and "own" in result["laws"]
        assert all(size["bf16"]["n"] == 2 for size in result["sizes"])
        assert len(result["sizes"]) == 12

    def test_in_the_null(
        self, tmp_path: Path, capsys: Capsys, no_figures: None, cut_off: str
    ) -> None:
        _, result = self.analyse(tmp_path, capsys, cut_off)
        pooled = result["null"]["pooled"]
        # two seeds at each of three sizes
        assert (pooled["runs"], pooled["dof"]) == (24, 3)


def test_the_console_gets_forty_lines_and_all_of_them_with_all(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    write_branches(tmp_path, sizes=(30_000, 60_000, 120_000))
    for i in range(12):
        write_run(tmp_path / f"alone_{i}", params=50_000 + i, recipe="amax")
    whole, _ = run(capsys, tmp_path)
    short = asked(capsys, precision.main, tmp_path)
    assert whole.count("\n") > 55 and whole.count("WARNING: unpaired alone") == 12
    assert short.count("\n") <= 40 and "--all" in short
    assert "tensorwise" in short.splitlines()[2]


def test_a_recipe_that_converts_nothing_is_called_bf16(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    write_seeds(tmp_path, (0.010, 0.011, 0.012))
    write_seeds(tmp_path, (0.020, 0.021, 0.025), "cscale")
    idle = {"recipe": "auto", "compile": False, "layers_converted": []}
    write_seeds(tmp_path, (1e-5, 2e-5, 3e-5), "auto", precision=idle)
    page, result = run(capsys, tmp_path)
    assert row(page, "auto", "recipe")[2].startswith("BF16 again") and len(result["pairs"]) == 9
    assert "Best: tensorwise has the lowest gap" in page and "Not ranked: auto" in page


def test_without_a_law_the_runs_of_one_size_say_what_tokens_gain(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    for ratio, loss, params in ((10, 2.2, 30_000), (20, 2.0, 30_000), (20, 1.9, 60_000)):
        shared = {"params": params, "tokens": ratio * params, "loss": loss}
        write_run(tmp_path / f"bf16_{params}_{ratio}", **shared)
        name = f"tensorwise_{params}_{ratio}"
        write_run(tmp_path / name, recipe="tensorwise", gap=0.01, **shared)
    _, result = run(capsys, tmp_path)
    own, epoch = result["sizes"][1]["costs"]
    beta = math.log(2.2 / 2.0) / math.log(2)
    assert (own["law"], epoch["law"]) == ("own, at this N", "Epoch")
    assert own["extra_tokens"] == pytest.approx((1 - 0.01 / 2.0) ** (-1 / beta))
    # one token count at that size
    assert [cost["law"] for cost in result["sizes"][2]["costs"]] == ["Epoch"]


# -------------------------------------------------------------------------------------- the margin


SMALL_GAPS = (0.0002, -0.0003, 0.0002)


def test_without_a_declared_margin_there_is_no_test_of_equivalence(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    page, result = run(capsys, write_seeds(tmp_path, SMALL_GAPS))
    assert "No margin was declared" in page and result["margin"] is None


def test_a_margin_declared_before_the_runs_makes_a_test_of_equivalence(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    page, result = run(capsys, declare(write_seeds(tmp_path, SMALL_GAPS)))
    words = row(page, "tensorwise", "recipe")
    assert re.fullmatch(r"equivalent within ±0\.25 % \(TOST, p=[\d.e-]+\)", words[2])
    assert result["margin"]["is_declared"]
    assert words[-1] == f"{result['common']['tensorwise']['smallest_seen']:.4g}"


def test_a_given_margin_is_after_the_fact(tmp_path: Path, capsys: Capsys, no_figures: None) -> None:
    page, result = run(capsys, declare(write_seeds(tmp_path, SMALL_GAPS)), "margin=0.5")
    assert "margin after the fact" in page and "±0.5 %" in page
    assert not result["margin"]["is_declared"]


def test_of_two_studies_with_one_margin_the_late_declaration_counts(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    declare(write_seeds(tmp_path, SMALL_GAPS), declared="2026-11-20T09:00:01Z")
    declare(write_seeds(tmp_path / "other", (0.0002,), params=60_000))
    words = [tmp_path, tmp_path / "other", f"out={tmp_path}/law"]
    page = asked(capsys, precision.main, *words)
    assert "margin after the fact" in page and f"{tmp_path}/study.json" in page
    assert "after 6 of 6 runs had begun" in page


def test_a_margin_is_not_declared_where_nobody_knows_when_the_runs_began(
    tmp_path: Path, capsys: Capsys, no_figures: None
) -> None:
    declare(write_seeds(tmp_path, (0.0002,), t_start=...))
    assert not run(capsys, tmp_path)[1]["margin"]["is_declared"]


def test_two_margins_are_refused(tmp_path: Path, capsys: Capsys, no_figures: None) -> None:
    declare(write_seeds(tmp_path / "a", SMALL_GAPS))
    declare(write_seeds(tmp_path / "b", (0.0002,), params=50_000), 0.5)
    words = [tmp_path / "a", tmp_path / "b", f"out={tmp_path}/c"]
    assert "0.25, 0.5" in asked(capsys, precision.main, *words, code=2)


# ----------------------------------------------------------------------- differences of two recipes

OTHER_GAPS = (0.006, 0.009, 0.011)  # nats


@pytest.fixture
def two_recipes(tmp_path: Path, no_figures: None) -> Path:
    """Three seeds at a size, and of the second recipe two at another."""
    write_seeds(tmp_path, GAPS, "mxfp8")
    write_seeds(tmp_path, OTHER_GAPS, "mxfp8_e5m2")
    write_seeds(tmp_path, GAPS[:2], "mxfp8", params=90_000)
    write_seeds(tmp_path, OTHER_GAPS[1:], "mxfp8_e5m2", params=90_000)
    return tmp_path


def test_a_difference_is_the_paired_t_test_of_two_recipes_losses(
    two_recipes: Path, capsys: Capsys
) -> None:
    page, _ = run(capsys, two_recipes, "compare=mxfp8_e5m2:mxfp8")
    first, second = np.add(BF16, OTHER_GAPS), np.add(BF16, GAPS)
    interval = ttest_1samp(100 * (first - second) / second, 0).confidence_interval()
    mean, half = (interval.low + interval.high) / 2, (interval.high - interval.low) / 2
    cells_of_size = row(page, "38.9k", "difference")
    assert cells_of_size[:4] == [
        "mxfp8_e5m2 minus mxfp8",
        "38.9k",
        "3 of 3",
        f"{mean:+.3f} ± {half:.3f}",
    ]
    assert cells_of_size[-1].startswith("undecided")


def test_a_difference_over_all_sizes_is_of_logarithms(two_recipes: Path, capsys: Capsys) -> None:
    _, result = run(capsys, two_recipes, "compare=mxfp8_e5m2:mxfp8")
    (difference,) = result["differences"]
    first, second = np.add(BF16, OTHER_GAPS), np.add(BF16, GAPS)
    logs = [
        *np.log(first / second),
        np.log((BF16[0] + OTHER_GAPS[1]) / (BF16[0] + GAPS[0])),
        np.log((BF16[1] + OTHER_GAPS[2]) / (BF16[1] + GAPS[1])),
    ]
    assert difference["gap"]["bf16"]["mean"] == pytest.approx(100 * np.mean(logs), rel=1e-6)
    assert difference["gap"]["bf16"]["n"] == difference["gap"]["pairs"] == 5


def test_a_difference_of_pooled_budgets_is_not_tested_for_equivalence(
    two_recipes: Path, capsys: Capsys
) -> None:
    page, _ = run(capsys, two_recipes, "compare=mxfp8_e5m2:mxfp8", "margin=99")
    assert "equivalent" in row(page, "all", "difference")[-1]
    assert "equivalent" not in row(page, "38.9k", "difference")[-1]


def test_without_compare_there_is_no_difference(two_recipes: Path, capsys: Capsys) -> None:
    page, result = run(capsys, two_recipes)
    assert "| difference" not in page
    assert result["differences"] == []


@pytest.mark.parametrize(
    "compare, sentence",
    [
        ("mxfp8", "must be two different recipes"),
        ("mxfp8:", "must be two different recipes"),
        ("mxfp8:mxfp8", "must be two different recipes"),
        ("mxfp8:nvfp4", "no pair has nvfp4; there are mxfp8, mxfp8_e5m2, rowwise"),
        ("nvpf4:bf16", "no pair has nvpf4 or bf16"),
        ("bf16:bf16", "must be two different recipes"),
        ("mxfp8:bf16", "bf16 is what every gap is to"),
        ("mxfp8:rowwise", "mxfp8 and rowwise share no bf16 run"),
    ],
)
def test_recipes_that_cannot_be_compared_are_a_sentence(
    two_recipes: Path, capsys: Capsys, compare: str, sentence: str
) -> None:
    write_seeds(two_recipes, GAPS[:1], "rowwise", params=150_000)
    arguments = (f"compare={compare}", "at=8e8:20")  # which would freeze a prediction
    page = asked(capsys, precision.main, two_recipes, *arguments, code=2)
    assert sentence in page
    assert not (two_recipes / "law").exists()


def test_a_margin_that_cannot_be_is_refused_before_a_prediction_is_frozen(
    two_recipes: Path, capsys: Capsys
) -> None:
    asked(capsys, precision.main, two_recipes, "margin=200", "at=8e8:20", code=2)
    assert not (two_recipes / "law").exists()


def test_a_difference_asked_for_twice_is_given_once(two_recipes: Path, capsys: Capsys) -> None:
    _, result = run(capsys, two_recipes, "compare=mxfp8_e5m2:mxfp8,mxfp8_e5m2:mxfp8")
    assert len(result["differences"]) == 1


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("{runs}/nowhere", "does not exist"),
        ("{runs} loss=fp8", "loss='fp8'"),
        ("{runs} margin=0", "margin: 0"),
        ("{runs}/bf16_38912_1", "out=DIR is missing"),
        ("{runs}/bf16_38912_1 out=x", "no BF16/FP8 pair among these runs"),
    ],
)
def test_mistakes_are_a_sentence(
    tmp_path: Path, capsys: Capsys, arguments: str, sentence: str
) -> None:
    write_seeds(tmp_path, (0.004,))
    files = sorted(tmp_path.rglob("*"))
    words = arguments.format(runs=tmp_path).split()
    assert sentence in asked(capsys, precision.main, *words, code=2)
    assert sorted(tmp_path.rglob("*")) == files


LOSSES = Path("bf16_38912_2/val_losses.npz")


def change_losses(runs: Path, shift: int = 0, **arrays: np.ndarray) -> None:
    """Roll the validation losses of a run, or replace columns of them."""
    with np.load(runs / LOSSES) as file:
        whole = {name: np.roll(array, shift) for name, array in file.items()}
    np.savez(runs / LOSSES, **whole | arrays)


def write_fewer_sequences(runs: Path) -> None:
    """A pair whose BF16 run was validated on other sequences."""
    write_run(runs / "tensorwise", recipe="tensorwise", loss=2.2, seed=9)
    write_run(runs / "bf16", loss=2.2, seed=9, per_source=5)


def leave_a_diverged_run(runs: Path) -> None:
    for path in runs.glob("*/summary.json"):
        path.unlink()
    write_run(runs / "x", status="diverged")


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (
            lambda runs: (runs / "study.json").write_text('{"margin_percent": 1}'),
            "study.json cannot be read",
        ),
        (lambda runs: declare(runs, percent=0), "margin"),
        (lambda runs: declare(runs, declared="yesterday"), "margin"),
        (
            lambda runs: write_run(runs / "d", seed=9, pair_id="pair38912_778240_1"),
            "d are both the BF16 run of pair",
        ),
        (lambda runs: (runs / LOSSES).unlink(), "val_losses.npz cannot be read"),
        (lambda runs: (runs / LOSSES).write_bytes(b"PK"), "val_losses.npz cannot be read"),
        (lambda runs: change_losses(runs, bf16=np.full(35, 9.9)), "val_losses.npz cannot be read"),
        (lambda runs: change_losses(runs, bf16=np.full(36, math.nan)), "not from one evaluation"),
        # a source without a target
        (
            lambda runs: change_losses(runs, n_tokens=np.arange(36) // 12 * 9),
            "not from one evaluation",
        ),
        (lambda runs: change_losses(runs, bf16=np.full(36, 9.9)), "not from one evaluation"),
        (lambda runs: change_losses(runs, shift=5), "same validation sequences in the same order"),
        (write_fewer_sequences, "same validation sequences"),
        (lambda runs: write_run(runs / "other", params=50_000, val_sha256="w" * 64), "val_sha256"),
        (leave_a_diverged_run, "no run is left to compare"),
    ],
)
def test_damaged_runs_are_a_sentence_and_nothing_is_written(
    tmp_path: Path, capsys: Capsys, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(declare(write_seeds(tmp_path, GAPS)))
    assert sentence in asked(capsys, precision.main, tmp_path, code=2)
    assert not (tmp_path / "law").exists()


def test_a_recipe_that_mixes_operands_is_a_warning(tmp_path: Path, capsys: Capsys):
    folder = write_seeds(tmp_path / "out", GAPS)
    sharded = folder / "tensorwise_38912_2/summary.json"
    precision = strict(sharded)["precision"]
    edit(sharded, precision=precision | {"weights_cast_from": "bf16"})
    page, result = run(capsys, folder)
    assert "WARNING: tensorwise mixes operands" in page
    assert any("tensorwise mixes operands" in note for note in result["notes"])
