"""scaling/gap_predictions.py: predictions of gaps are frozen once and scored."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t

from lib.errors import UserError
from scaling import gap_predictions, precision
from scaling.paired.gap_cells import GapPoints
from scaling.paired.gap_law import fit_gap
from scaling.precision_result import read_precision
from tests.conftest import asked
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
    name = f"s{HELD}_tensorwise_t20_s1"
    edit(
        folder / "study.json",
        margin_percent=0.25,
        declared="2026-11-19T00:00:00Z",
        held_out=[name],
        runs=[plan_of(name)],
    )
    write_pairs(folder, SIZES, **changes)
    return name


def test_a_study_shows_a_law_of_each_recipe_and_stores_it_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    write_study(tmp_path)
    write_pairs(tmp_path, SIZES, truth=GapTruth(0, 0, 0), recipe="rowwise")
    output = asked(capsys, precision.main, tmp_path)
    assert "tensorwise: gap = " in output and "rowwise: no trend of the gap can be told" in output
    assert "As effective parameters f = " in output
    typed = read_precision(tmp_path / "law/precision.json").gap_laws["tensorwise"]
    assert typed.a.low < 0.2 < typed.a.high and typed.trajectory_count == 9
    content = strict(tmp_path / "law/precision.json")["gap_laws"]["tensorwise"]
    assert content["effective"]["law"] == "own"


def test_a_prediction_is_frozen_once_and_scored_when_its_pairs_have_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    name = write_study(tmp_path)
    output = asked(capsys, precision.main, tmp_path, f"predict={name}")
    assert "extrapolated 3.33-fold beyond the sizes of the pairs" in output
    path = tmp_path / f"law/gap_prediction_{name}.json"
    frozen = gap_predictions.read_prediction(path)
    assert frozen.forecast.low < STEEP.at(HELD, 20 * HELD) < frozen.forecast.high
    assert len(frozen.inputs) == 27 and frozen.bf16_law.name == "own"
    output = asked(capsys, precision.main, tmp_path, f"predict={name}", code=2)
    assert "is not made anew" in output
    assert "not there yet" in asked(capsys, precision.main, tmp_path, "--score")
    before = typed_law(tmp_path)
    write_pairs(tmp_path, (HELD,), seeds=(1, 2), t_start="2100-01-01T00:00:00Z")
    output = asked(capsys, precision.main, tmp_path, "--score")
    assert "of 2 independent pairs" in output and ": inside the interval" in output
    scored = strict(tmp_path / f"law/gap_score_{name}.json")
    assert scored["is_inside"] and scored["prediction_sha256"] == frozen.sha256
    law_half = frozen.forecast.high - frozen.forecast.gap
    of_two = t.ppf(0.975, 6) * frozen.law.noise.pair_sd / math.sqrt(2)
    assert scored["predicted_high"] - scored["predicted"] == pytest.approx(
        math.hypot(law_half, of_two)
    )
    shift = scored["measured"] - scored["predicted"]
    end = scored["predicted_high"] if shift > 0 else scored["predicted_low"]
    assert scored["z"] == pytest.approx(1.959964 * shift / abs(end - scored["predicted"]), rel=1e-6)
    # only the budgets that nobody predicted enter the law
    after = typed_law(tmp_path)
    assert (before.pair_count, after.pair_count) == (27, 27 + 4)


def typed_law(folder: Path):
    return read_precision(folder / "law/precision.json").gap_laws["tensorwise"]


def test_a_place_is_frozen_for_every_recipe_and_scored_within_five_per_cent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    write_study(tmp_path)
    output = asked(capsys, precision.main, tmp_path, "at=1.5e9:20")
    assert "extrapolated 5e+03-fold beyond the sizes" in output
    path = tmp_path / "law/gap_prediction_tensorwise_n1.5e+09_r20.json"
    target = gap_predictions.read_prediction(path).target
    assert target.is_of("tensorwise", 1.53e9, 30.9e9) and not target.is_of("rowwise", 1.5e9, 30e9)
    assert not target.is_of("tensorwise", 1.5e9, 33e9) and not target.is_of(
        "tensorwise", 1.6e9, 32e9
    )


def test_a_place_within_five_per_cent_of_a_frozen_one_is_not_frozen_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    """Both would be scored by the same pairs, and the better one could be shown."""
    write_study(tmp_path)
    asked(capsys, precision.main, tmp_path, "at=1.5e9:20")
    output = asked(capsys, precision.main, tmp_path, "at=1.53e9:20", code=2)
    assert "gap_prediction_tensorwise_n1.5e+09_r20.json predicts the same pairs" in output
    asked(capsys, precision.main, tmp_path, "at=1.7e9:20")


def test_what_has_begun_is_not_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    name = write_study(tmp_path)
    output = asked(capsys, precision.main, tmp_path, "at=300000:20", code=2)
    assert "has begun or is finished" in output
    edit(tmp_path / name / "metrics.jsonl")
    output = asked(capsys, precision.main, tmp_path, f"predict={name}", code=2)
    assert f"{name} has begun or is finished" in output
    edit(tmp_path / "study.json", runs=[plan_of("twin", recipe="bf16")])
    assert "has no gap" in asked(capsys, precision.main, tmp_path, "predict=twin", code=2)
    assert not list((tmp_path / "law").glob("gap_*"))


def test_an_edited_prediction_and_one_younger_than_its_run_are_not_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    name = write_study(tmp_path)
    asked(capsys, precision.main, tmp_path, f"predict={name}")
    path = tmp_path / f"law/gap_prediction_{name}.json"
    original = path.read_text()
    content = json.loads(original)
    content["forecast"]["high"] *= 2
    path.write_text(json.dumps(content))
    assert "was edited" in asked(capsys, precision.main, tmp_path, "--score", code=2)
    path.write_text(original)
    write_pairs(tmp_path, (HELD,), seeds=(1,))
    assert "is not older than its run" in asked(capsys, precision.main, tmp_path, "--score", code=2)
    for summary in tmp_path.glob("*/summary.json"):
        edit(summary, tokenizer_sha256="u" * 64)
    assert "has another tokenizer" in asked(capsys, precision.main, tmp_path, "--score", code=2)


def test_a_table_with_sizes_and_tokens_has_a_law_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    points = gap_points(0, NOISY, STEEP)
    lines = ["precision,seed,loss,N,D"]
    for N, D, percent, label in zip(
        points.N, points.D, points.percent, points.trajectory, strict=True
    ):
        lines += [f"bf16,{label},2.0,{N:.0f},{D:.0f}"]
        lines += [f"fp8,{label},{2 * math.exp(percent / 100):.9f},{N:.0f},{D:.0f}"]
    (tmp_path / "losses.csv").write_text("\n".join(lines))
    columns = ["arm=precision", "pair=seed", "loss=loss", "n=N", "d=D"]
    words = [f"points={tmp_path / 'losses.csv'}", *columns]
    out = f"out={tmp_path / 'report'}"
    assert "fp8: gap = " in asked(capsys, precision.main, *words, out)
    typed = read_precision(tmp_path / "report/precision.json").gap_laws["fp8"]
    expected = fit_gap(points, None).law
    assert typed.a.value == pytest.approx(expected.a.value, abs=1e-3)


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
