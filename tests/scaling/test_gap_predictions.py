"""scaling/gap_predictions.py: predictions of gaps are frozen once and scored."""

import io
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from lib.errors import UserError
from scaling import gap_predictions, precision
from scaling.gap_prediction_words import format_gap
from scaling.paired.gap_cells import GapPoints
from scaling.paired.gap_law import GapLaw, fit_gap
from scaling.precision_result import read_precision
from tests.conftest import asked, figures_off
from tests.helpers.paired_runs import FakeRun
from tests.helpers.scaling_runs import edit, strict, surface, write_run
from tests.law_trials import (
    STEEP,
    GapDesign,
    GapTruth,
    gap_points,
)

NOISY = GapDesign((4, 3, 3), (5, 10, 20), 0.15)

# --------------------------------------------------------------------- a study, frozen and scored

SIZES, RATIOS, HELD = (30_000, 100_000, 300_000), (5, 10, 20), 1_000_000
HELD_NAME = f"s{HELD}_tensorwise_t20_s1"  # the run that is held out and predicted


def write_pairs(
    folder: Path,
    sizes: Sequence[int],
    seeds: Sequence[int] = (1, 2, 3),
    truth: GapTruth = STEEP,
    noise: float = 0.05,
    recipe: str = "tensorwise",
    **changes: object,
):
    """A BF16 and an FP8 trunk of each size and seed, their shorter budgets as branches."""
    for N in sizes:
        for seed in seeds:
            rng = np.random.default_rng(N + seed)
            shared = rng.normal()
            for ratio in RATIOS:
                loss = surface(N, ratio * N) * math.exp(5e-4 * rng.normal())
                percent = truth.at(N, ratio * N) + noise * math.sqrt(0.5) * (shared + rng.normal())
                for arm, gap in (("bf16", 0.0), (recipe, loss * math.expm1(percent / 100))):
                    name, trunk = (
                        f"s{N}_{arm}_t{ratio}_s{seed}",
                        f"s{N}_{arm}_t{RATIOS[-1]}_s{seed}",
                    )
                    lineage = {}
                    if name != trunk:
                        lineage = {"parent_run": trunk, "parent_step": 8 * ratio}
                    if (folder / name).exists():
                        continue
                    write_run(
                        folder / name,
                        recipe=arm,
                        params=N,
                        tokens=ratio * N,
                        loss=loss,
                        gap=gap,
                        seed=seed,
                        **lineage | changes,
                    )
    return folder


def plan_of(name: str, recipe: str = "tensorwise", N: int = HELD, ratio: int = 20):
    counts = dict.fromkeys(("params_total", "params_nonembed", "params_matmul"), N)
    return {"run": name, "recipe": recipe, "tokens": ratio * N, "flops_per_token": 6 * N, **counts}


def write_study(folder: Path, **changes: object):
    edit(
        folder / "study.json",
        margin_percent=0.25,
        declared="2026-11-19T00:00:00Z",
        held_out=[HELD_NAME],
        runs=[plan_of(HELD_NAME)],
    )
    write_pairs(folder, SIZES, **changes)
    return HELD_NAME


def printed(*words: object) -> str:
    """What scaling/precision.py prints, without its figures."""
    page = io.StringIO()
    with figures_off(), redirect_stdout(page):
        assert precision.main([str(word) for word in words]) == 0
    return page.getvalue()


@pytest.fixture(scope="module")
def two_recipes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The page and the folder of a study whose gap grows in one recipe and is none in the other."""
    folder = tmp_path_factory.mktemp("two_recipes")
    write_study(folder)
    write_pairs(folder, SIZES, truth=GapTruth(0, 0, 0), recipe="rowwise")
    return printed(folder), folder


def test_a_study_shows_a_law_of_each_recipe(two_recipes: tuple[str, Path]) -> None:
    page, _ = two_recipes
    assert "tensorwise: gap = " in page
    assert "rowwise: no trend of the gap can be told" in page


def test_a_study_shows_the_gap_as_effective_parameters(two_recipes: tuple[str, Path]) -> None:
    page, folder = two_recipes
    assert "As effective parameters f = " in page
    content = strict(folder / "law/precision.json")["gap_laws"]["tensorwise"]
    assert content["effective"]["law"] == "own"


def test_a_law_of_the_gap_is_stored_typed(two_recipes: tuple[str, Path]) -> None:
    _, folder = two_recipes
    law = typed_law(folder)
    assert law.a.low < 0.2 < law.a.high
    assert law.trajectory_count == 9


@dataclass
class Frozen:
    """A study with a prediction of its held-out run: its folder, that run, the page, the file."""

    folder: Path
    name: str
    page: str
    prediction: gap_predictions.GapPrediction


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """No test may change it."""
    folder = tmp_path_factory.mktemp("frozen")
    name = write_study(folder)
    page = printed(folder, f"predict={name}")
    path = folder / f"law/gap_prediction_{name}.json"
    return Frozen(folder, name, page, gap_predictions.read_prediction(path))


@pytest.fixture
def own_frozen(frozen: Frozen, tmp_path: Path) -> Frozen:
    """A copy, which a test may change."""
    shutil.copytree(frozen.folder, tmp_path, dirs_exist_ok=True)
    return replace(frozen, folder=tmp_path)


def test_a_prediction_says_how_far_it_extrapolates(frozen: Frozen) -> None:
    assert "extrapolated 3.33-fold beyond the sizes of the pairs" in frozen.page


@pytest.mark.parametrize(
    ("percent", "words"),
    [(1.528, "+1.53"), (-0.0131, "-0.0131"), (0.00252, "+0.00252"), (6.52e-9, "+0.000")],
)
def test_a_gap_below_a_thousandth_of_a_per_cent_has_no_exponent(percent: float, words: str) -> None:
    assert format_gap(percent) == words


def test_the_true_gap_is_within_the_predicted_interval(frozen: Frozen) -> None:
    forecast = frozen.prediction.forecast
    assert forecast.low < STEEP.at(HELD, 20 * HELD) < forecast.high


def test_a_prediction_holds_its_pairs_and_the_law_of_bf16(frozen: Frozen) -> None:
    assert len(frozen.prediction.inputs) == 27
    assert frozen.prediction.bf16_law.name == "own"


def test_a_prediction_is_not_made_anew(
    frozen: Frozen, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = (frozen.folder, f"predict={frozen.name}")
    assert "is not made anew" in asked(capsys, precision.main, *words, code=2)


def test_a_prediction_whose_pairs_have_not_come_is_named(own_frozen: Frozen) -> None:
    assert "not there yet" in printed(own_frozen.folder, "--score")


@dataclass
class Scored:
    """The same, scored when pairs of two seeds have come: the page, the file, the law."""

    page: str
    score: dict[str, Any]
    law: GapLaw


@pytest.fixture(scope="module")
def scored(frozen: Frozen, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    folder = tmp_path_factory.mktemp("scored")
    shutil.copytree(frozen.folder, folder, dirs_exist_ok=True)
    write_pairs(folder, (HELD,), seeds=(1, 2), t_start="2100-01-01T00:00:00Z")
    page = printed(folder, "--score")
    score = strict(folder / f"law/gap_score_{frozen.name}.json")
    return Scored(page, score, typed_law(folder))


def test_a_prediction_is_scored_by_the_pairs_that_have_come(frozen: Frozen, scored: Scored) -> None:
    assert "of 2 independent pairs" in scored.page
    assert ": inside the interval" in scored.page
    assert scored.score["is_inside"]
    assert scored.score["prediction_sha256"] == frozen.prediction.sha256


def test_the_noise_of_the_pairs_widens_the_interval_of_a_score(
    frozen: Frozen, scored: Scored
) -> None:
    """Two pairs, whose noise is estimated with 6 degrees of freedom."""
    forecast = frozen.prediction.forecast
    of_two = t.ppf(0.975, 6) * frozen.prediction.law.noise.pair_sd / math.sqrt(2)
    half_width = scored.score["predicted_high"] - scored.score["predicted"]
    assert half_width == pytest.approx(math.hypot(forecast.high - forecast.gap, of_two))


def test_a_scores_z_is_in_units_of_the_interval(scored: Scored) -> None:
    score = scored.score
    shift = score["measured"] - score["predicted"]
    end = score["predicted_high"] if shift > 0 else score["predicted_low"]
    z = 1.959964 * shift / abs(end - score["predicted"])
    assert score["z"] == pytest.approx(z, rel=1e-6)


def test_only_the_budgets_that_nobody_predicted_enter_the_law(
    frozen: Frozen, scored: Scored
) -> None:
    assert typed_law(frozen.folder).pair_count == 27
    assert scored.law.pair_count == 27 + 4


def typed_law(folder: Path):
    return read_precision(folder / "law/precision.json").gap_laws["tensorwise"]


PLACE = "law/gap_prediction_tensorwise_n1.5e+09_r20.json"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The page and the folder of a study with a prediction at a place, which no run is at."""
    folder = tmp_path_factory.mktemp("place")
    write_study(folder)
    return printed(folder, "at=1.5e9:20"), folder


def test_a_place_is_frozen_for_every_recipe(place: tuple[str, Path]) -> None:
    page, folder = place
    assert "extrapolated 5,000-fold beyond the sizes" in page
    assert (folder / PLACE).exists()


@pytest.mark.parametrize(
    "recipe, N, D, is_of",
    [
        ("tensorwise", 1.53e9, 30.9e9, True),
        ("rowwise", 1.5e9, 30e9, False),
        ("tensorwise", 1.5e9, 33e9, False),
        ("tensorwise", 1.6e9, 32e9, False),
    ],
)
def test_a_place_is_scored_within_five_per_cent(
    recipe: str, N: float, D: float, is_of: bool, place: tuple[str, Path]
) -> None:
    _, folder = place
    target = gap_predictions.read_prediction(folder / PLACE).target
    assert target.is_of(recipe, N, D) == is_of


def test_a_place_within_five_per_cent_of_a_frozen_one_is_not_frozen_again(
    place: tuple[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_figures: None,
) -> None:
    """Both would be scored by the same pairs, and the better one could be shown."""
    shutil.copytree(place[1], tmp_path, dirs_exist_ok=True)
    output = asked(capsys, precision.main, tmp_path, "at=1.53e9:20", code=2)
    assert "gap_prediction_tensorwise_n1.5e+09_r20.json predicts the same pairs" in output
    asked(capsys, precision.main, tmp_path, "at=1.7e9:20")


@pytest.fixture
def unpredicted(place: tuple[str, Path], tmp_path: Path) -> Path:
    """A study without predictions, which a test may change."""
    ignore = shutil.ignore_patterns("law")
    return shutil.copytree(place[1], tmp_path / "study", ignore=ignore)


@pytest.mark.parametrize(
    "file, changes, words, message",
    [
        (None, {}, "at=300000:20", "has begun or is finished"),
        (
            f"{HELD_NAME}/metrics.jsonl",
            {},
            f"predict={HELD_NAME}",
            f"{HELD_NAME} has begun or is finished",
        ),
        (
            "study.json",
            {"runs": [plan_of("twin", recipe="bf16")]},
            "predict=twin",
            "has no gap",
        ),
    ],
    ids=["finished", "begun", "in BF16"],
)
def test_what_has_begun_or_has_no_gap_is_not_predicted(
    file: str | None,
    changes: dict[str, Any],
    words: str,
    message: str,
    unpredicted: Path,
    capsys: pytest.CaptureFixture[str],
    no_figures: None,
) -> None:
    if file:
        edit(unpredicted / file, **changes)
    assert message in asked(capsys, precision.main, unpredicted, words, code=2)
    assert not list((unpredicted / "law").glob("gap_*"))


def test_an_edited_prediction_is_not_scored(
    own_frozen: Frozen, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    path = own_frozen.folder / f"law/gap_prediction_{own_frozen.name}.json"
    content = json.loads(path.read_text())
    content["forecast"]["high"] *= 2
    path.write_text(json.dumps(content))
    output = asked(capsys, precision.main, own_frozen.folder, "--score", code=2)
    assert "was edited" in output


def test_a_prediction_that_is_younger_than_its_run_is_not_scored(
    own_frozen: Frozen, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    write_pairs(own_frozen.folder, (HELD,), seeds=(1,))
    output = asked(capsys, precision.main, own_frozen.folder, "--score", code=2)
    assert "is not older than its run" in output


def test_a_prediction_is_not_scored_by_runs_with_another_tokenizer(
    own_frozen: Frozen, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    write_pairs(own_frozen.folder, (HELD,), seeds=(1,))
    for summary in own_frozen.folder.glob("*/summary.json"):
        edit(summary, tokenizer_sha256="u" * 64)
    output = asked(capsys, precision.main, own_frozen.folder, "--score", code=2)
    assert "has another tokenizer" in output


@pytest.mark.parametrize(
    "words, message",
    [
        ("at=1.5e9", "such as at=1.5e9:20"),
        ("at=-1:20", "such as at=1.5e9:20"),
        ("at=1e308:1e308", "such as at=1.5e9:20"),
        ("predict=nothing", "there is no run 'nothing'"),
        ("--score", "holds no gap_prediction_"),
    ],
)
def test_mistakes_get_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None, words: str, message: str
) -> None:
    write_pairs(tmp_path, SIZES[:1], seeds=(1,))
    assert message in asked(capsys, precision.main, tmp_path, words, code=2)


def test_a_recipe_without_pairs_is_not_predicted(tmp_path: Path) -> None:
    targets = gap_predictions.targets_at("1e9:20", ["mxfp8"])
    run = FakeRun()
    with pytest.raises(UserError, match="train smaller sizes in its recipe first"):
        gap_predictions.freeze(targets, {}, [], [run], tmp_path, "bf16", None)


def write_table(path: Path, points: GapPoints) -> list[str]:
    """The pairs as a table; the words that name it."""
    lines = ["precision,seed,loss,N,D"]
    columns = (points.N, points.D, points.percent, points.trajectory)
    for N, D, percent, label in zip(*columns, strict=True):
        lines.append(f"bf16,{label},2.0,{N:.0f},{D:.0f}")
        lines.append(f"fp8,{label},{2 * math.exp(percent / 100):.9f},{N:.0f},{D:.0f}")
    path.write_text("\n".join(lines))
    out = f"out={path.parent / 'report'}"
    return [f"points={path}", "arm=precision", "pair=seed", "loss=loss", "n=N", "d=D", out]


def test_a_table_with_sizes_and_tokens_has_a_law_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    points = gap_points(0, NOISY, STEEP)
    words = write_table(tmp_path / "losses.csv", points)
    assert "fp8: gap = " in asked(capsys, precision.main, *words)
    typed = read_precision(tmp_path / "report/precision.json").gap_laws["fp8"]
    expected = fit_gap(points, None).law
    assert typed.a.value == pytest.approx(expected.a.value, abs=1e-3)


def test_a_gap_of_a_tables_arm_is_frozen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = write_table(tmp_path / "losses.csv", gap_points(0, NOISY, STEEP))
    output = asked(capsys, precision.main, *words, "at=1e7:20")
    assert "predicted gap of fp8" in output and "commit it" in output
    frozen = gap_predictions.read_prediction(tmp_path / "report/gap_prediction_fp8_n1e+07_r20.json")
    assert frozen.forecast.low < STEEP.at(1e7, 2e8) < frozen.forecast.high
    assert frozen.inputs[0].fp8 == "losses.csv line 3"


def test_the_rows_of_a_later_table_are_scored_and_enter_no_law(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    points = gap_points(0, NOISY, STEEP)
    words = write_table(tmp_path / "losses.csv", points)
    asked(capsys, precision.main, *words, "at=1e7:20")
    come = GapPoints(
        np.append(points.N, 1e7),
        np.append(points.D, 2e8),
        np.append(points.percent, STEEP.at(1e7, 2e8)),
        np.append(points.trajectory, 99),
    )
    write_table(tmp_path / "losses.csv", come)
    output = asked(capsys, precision.main, *words, "--score")
    assert "of 1 independent pair" in output and ": inside the interval" in output
    law = read_precision(tmp_path / "report/precision.json").gap_laws["fp8"]
    assert law.pair_count == len(points.N)


@pytest.mark.parametrize(
    "words, message",
    [
        (["predict=x", "n=N", "d=D"], "for a table give at=N:RATIO"),
        (["at=1e9:20"], "need the table's columns n= and d="),
        (["score=true"], "need the table's columns n= and d="),
    ],
)
def test_what_a_table_cannot_predict_gets_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    table = write_table(tmp_path / "losses.csv", gap_points(0, NOISY, STEEP))
    named = [word for word in table if not word.startswith(("n=", "d="))]
    assert message in asked(capsys, precision.main, *named, *words, code=2)


def test_what_is_held_out_is_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    write_study(tmp_path)
    asked(capsys, precision.main, tmp_path, "at=300000:40")
    write_pairs(tmp_path, SIZES, seeds=(9,), t_start="2100-01-01T00:00:00Z")
    edit(tmp_path / "study.json", held_out=[f"s{SIZES[0]}_tensorwise_t20_s9"])
    output = asked(capsys, precision.main, tmp_path)
    assert f"\nheld out of the law of the gap: s{SIZES[0]}_tensorwise_t20_s9" in output
    assert "WARNING" not in output
