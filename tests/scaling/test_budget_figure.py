"""scaling/budget_figure.py: gaps stand at their tokens per parameter, with the law of the gap."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from scaling import precision, study_report
from scaling.budget_figure import draw_budgets
from scaling.paired.gap_law import fit_gap
from scaling.pairing import pair_runs
from scaling.precision_result import GapConventions, PrecisionResult, analyse
from scaling.records import read_runs
from scaling.verdicts import Margin
from tests.conftest import asked
from tests.helpers.scaling_runs import errorbars, legend, write_run
from tests.law_trials import STEEP, GapDesign, gap_points
from tests.scaling.test_precision_command import BF16

SIZES, RATIOS = (20_000, 80_000), (5, 10, 20)
BLUE, ORANGE = "#0072B2", "#D55E00"  # of the smaller size, of the larger
GREY = "#999999"


def nats(seed: int, ratio: float) -> float:
    """tensorwise's gap: 0.4 % at 20 tokens per parameter, growing as the square root of them."""
    return BF16[seed] * 0.004 * (ratio / 20) ** 0.5 * (1 + 0.02 * (seed - 1))


ROWWISE = (0.004, -0.003, 0.001)  # nats, by seed, at every size and ratio


def write_study(folder: Path, ratios: tuple[int, ...] = RATIOS) -> Path:
    for ratio, params, seed in itertools.product(ratios, SIZES, range(3)):
        gaps = {"bf16": 0.0, "tensorwise": nats(seed, ratio), "rowwise": ROWWISE[seed]}
        for recipe, gap in gaps.items():
            write_run(
                folder / f"{recipe}_{params}_t{ratio}_s{seed}",
                recipe=recipe,
                gap=gap,
                loss=BF16[seed],
                seed=seed,
                params=params,
                tokens=ratio * params,
            )
    return folder


def analysed(folder: Path) -> PrecisionResult:
    records, _ = read_runs([folder])
    return analyse(records, pair_runs(records)[0], "bf16", Margin(0.25, "study.json", True))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> PrecisionResult:
    return analysed(write_study(tmp_path_factory.mktemp("budgets")))


@pytest.fixture(scope="module")
def panels(result: PrecisionResult) -> dict[str, Axes]:
    """Recipe -> its panel."""
    return {panel.get_title(loc="left"): panel for panel in figure_of(result).axes}


def figure_of(result: PrecisionResult) -> Figure:
    figure = draw_budgets(result)
    assert figure is not None
    return figure


def result_of(folder: Path, gaps: dict[tuple[int, int], float]) -> PrecisionResult:
    """Of three seeds of tensorwise: (parameters, tokens) -> gap in nats."""
    for (params, tokens), gap in gaps.items():
        for seed, recipe in itertools.product(range(3), ("bf16", "tensorwise")):
            write_run(
                folder / f"{recipe}_{params}_{tokens}_{seed}",
                recipe=recipe,
                gap=gap * (1 + 0.01 * seed) if recipe != "bf16" else 0.0,
                loss=BF16[seed],
                seed=seed,
                params=params,
                tokens=tokens,
            )
    return analysed(folder)


def dotted(panel: Axes, colour: str) -> list[np.ndarray]:
    """Points (n, 2) of the dotted lines of one colour."""
    lines = [line for line in panel.lines if to_hex(line.get_color()).upper() == colour]
    return [line.get_xydata() for line in lines if len(line.get_xydata()) > len(RATIOS)]


def test_each_recipe_has_a_panel(panels: dict[str, Axes]) -> None:
    assert list(panels) == ["rowwise", "tensorwise"]


def test_each_mean_stands_at_its_ratio_the_smaller_size_to_the_left(
    panels: dict[str, Axes], result: PrecisionResult
) -> None:
    for colour, N, is_left in ((BLUE, SIZES[0], True), (ORANGE, SIZES[1], False)):
        bars = errorbars(panels["tensorwise"], colour)
        expected = [row for row in result.sizes if row.recipe == "tensorwise" and row.N == N]
        assert [bar[1] for bar in bars] == pytest.approx([row.bf16.mean for row in expected])
        for bar, ratio in zip(bars, RATIOS, strict=True):
            assert 0.9 < bar[0] / ratio < 1.1 and (bar[0] < ratio) == is_left


def test_bars_are_intervals_over_seeds(panels: dict[str, Axes], result: PrecisionResult) -> None:
    rows = [row for row in result.sizes if row.recipe == "rowwise" and SIZES[0] == row.N]
    ends = [(row.bf16.low, row.bf16.high) for row in rows]
    assert [bar[2:] for bar in errorbars(panels["rowwise"], BLUE)] == [
        pytest.approx(end, rel=1e-6) for end in ends
    ]


def test_the_axis_has_the_ratios_and_no_others(panels: dict[str, Axes]) -> None:
    panel = panels["tensorwise"]
    assert list(panel.get_xticks()) == list(RATIOS)
    assert [label.get_text() for label in panel.get_xticklabels()] == ["5", "10", "20"]


def test_a_trend_that_is_told_is_drawn_as_its_law(
    panels: dict[str, Axes], result: PrecisionResult
) -> None:
    assert result.gap_laws["tensorwise"].trend == ["b"]
    ((first, *_, last),) = dotted(panels["tensorwise"], GREY)
    assert (first[0], last[0]) == pytest.approx((5, 20))
    assert last[1] / first[1] == pytest.approx(2.0, rel=0.01)  # (20 / 5)^0.5
    assert last[1] == pytest.approx(0.4, rel=0.03)


def test_without_a_trend_the_gap_is_the_same_everywhere(
    panels: dict[str, Axes], result: PrecisionResult
) -> None:
    law = result.gap_laws["rowwise"]
    assert not law.trend
    (line,) = dotted(panels["rowwise"], GREY)
    assert set(line[:, 1]) == {100 * np.expm1(law.constant / 100)}


def test_the_legend_names_sizes_and_margin(result: PrecisionResult) -> None:
    names = ["20k parameters", "80k parameters", "margin, ±0.25 %", "mean of pairs, 95 % interval"]
    assert legend(figure_of(result)) == names


def test_a_law_of_size_and_ratio_is_that_of_the_prediction() -> None:
    """gap_at() against the forecast, which goes by the fit."""
    points = gap_points(0, GapDesign((3, 3, 3, 3), (5, 10, 20, 40), 1e-3), STEEP)
    fit = fit_gap(points, None)
    N, D = 3e5, 4.5e6
    (power, *_) = fit.forecast(N, D).forecasts
    assert fit.law.gap_at(N, np.array(D)) == pytest.approx(power.gap, rel=1e-9)


def test_two_ratios_draw_no_figure(tmp_path: Path) -> None:
    assert draw_budgets(analysed(write_study(tmp_path, (5, 20)))) is None


def test_ratios_that_differ_by_rounding_are_one(tmp_path: Path) -> None:
    """Two budgets of whole steps; the third differs from the second by 3 in 1,000."""
    gaps = {(20_000, tokens): 0.01 for tokens in (100_000, 400_000, 401_200)}
    assert draw_budgets(result_of(tmp_path, gaps)) is None


def test_the_law_of_a_large_gap_goes_through_its_markers(tmp_path: Path) -> None:
    """The law is fitted to 100 ln(L8 / L16), markers are 100 (L8 / L16 - 1): at 30 % they are 26.2
    and 30."""
    gaps = {(20_000, 20_000 * ratio): 0.03 * ratio for ratio in RATIOS}
    (panel,) = figure_of(result_of(tmp_path, gaps)).axes
    ((*_, last),) = dotted(panel, GREY)
    (*_, bar) = errorbars(panel, BLUE)
    assert bar[1] > 25
    assert last[1] == pytest.approx(bar[1], rel=0.02)


def test_few_tokens_per_parameter_have_a_figure_too(tmp_path: Path) -> None:
    gaps = {(1_000_000, tokens): 0.01 for tokens in (10_000, 20_000, 40_000)}
    (panel,) = figure_of(result_of(tmp_path, gaps)).axes
    assert list(panel.get_xticks()) == pytest.approx([0.01, 0.02, 0.04])


def test_a_size_that_is_alone_at_its_ratio_stands_there(tmp_path: Path) -> None:
    gaps = {(20_000, 20_000 * ratio): 0.01 for ratio in RATIOS}
    gaps[80_000, 80_000 * 14] = 0.01
    (panel,) = figure_of(result_of(tmp_path, gaps)).axes
    assert errorbars(panel, ORANGE)[0][0] == pytest.approx(14)


def test_many_sizes_at_one_ratio_keep_apart_from_the_next(tmp_path: Path) -> None:
    sizes = [20_000 + 5_000 * number for number in range(12)]
    gaps = {(N, N * ratio): 0.01 for N, ratio in itertools.product(sizes, RATIOS)}
    (panel,) = figure_of(result_of(tmp_path, gaps)).axes
    places = sorted(bar[0] for bar in errorbars(panel))
    assert places[11] < places[12] / 1.3 and places[23] < places[24] / 1.3


def test_a_constant_that_the_pairs_refute_is_not_drawn(tmp_path: Path) -> None:
    gaps = {(20_000, 20_000 * ratio): gap for ratio, gap in ((5, 0.02), (10, -0.03), (20, 0.02))}
    (panel,) = figure_of(result_of(tmp_path, gaps)).axes
    assert dotted(panel, GREY) == []


def test_the_law_ends_at_the_recipes_own_ratios(result: PrecisionResult) -> None:
    longer = [size for size in result.sizes if size.recipe == "rowwise"]
    shorter = [
        size for size in result.sizes if size.recipe == "tensorwise" and size.tokens < 15 * size.N
    ]
    (_, panel) = figure_of(replace(result, sizes=[*longer, *shorter])).axes
    ((first, *_, last),) = dotted(panel, GREY)
    assert (first[0], last[0]) == pytest.approx((5, 10))


def test_the_axes_hold_every_marker_and_the_margin(panels: dict[str, Axes]) -> None:
    for panel in panels.values():
        left, right = panel.get_xlim()
        low, high = panel.get_ylim()
        bars = errorbars(panel)
        assert all(left < bar[0] < right and low < bar[2] and bar[3] < high for bar in bars)
        assert low < -0.25 and high > 0.25


def test_the_margin_is_dashed_in_each_panel(panels: dict[str, Axes]) -> None:
    for panel in panels.values():
        heights = [line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == "--"]
        assert sorted(heights)[:1] + sorted(heights)[-1:] == [-0.25, 0.25]


def test_axes_are_named_by_what_n_counts(result: PrecisionResult) -> None:
    counted = replace(result, conventions=GapConventions("params_nonembed"))
    figure = figure_of(counted)
    assert figure.axes[0].get_ylabel() == "gap [%]"
    assert {panel.get_xlabel() for panel in figure.axes} == {"tokens per non-embedding parameter"}
    assert legend(figure)[0] == "20k non-embedding parameters"


def test_a_margin_after_the_fact_is_called_so(result: PrecisionResult) -> None:
    figure = figure_of(replace(result, margin=Margin(0.5, "margin=0.5", False)))
    assert "margin, ±0.5 %, after the fact" in legend(figure)


def test_the_figure_of_other_pairs_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a third of the runs gone two ratios are left."""
    asked(capsys, precision.main, write_study(tmp_path))
    for run in tmp_path.glob("*_t10_*"):
        shutil.rmtree(run)
    asked(capsys, precision.main, tmp_path)
    assert {path.name for path in (tmp_path / "law").iterdir()} == {
        "precision.json",
        "precision.png",
        "precision.svg",
    }


def test_a_page_of_the_study_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(capsys, precision.main, write_study(tmp_path))
    result = tmp_path / "law/precision.json"
    assert "![budgets](law/budgets.png)" in study_report._format_precision(result)
    (tmp_path / "law/budgets.png").unlink()
    assert "budgets" not in study_report._format_precision(result)


def test_the_command_writes_it_beside_the_other_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = asked(capsys, precision.main, write_study(tmp_path))
    assert "budgets.png, budgets.svg" in page
    assert (tmp_path / "law/budgets.png").read_bytes().startswith(b"\x89PNG")


def test_a_law_that_changes_with_size_has_a_line_for_each_in_its_colour(
    result: PrecisionResult,
) -> None:
    law = result.gap_laws["tensorwise"]
    assert law.b is not None
    by_size = replace(law, a=replace(law.b, name="a", value=0.5), trend=["a", "b"])
    drawn = figure_of(replace(result, gap_laws={**result.gap_laws, "tensorwise": by_size}))
    (small,), (large,) = (dotted(drawn.axes[1], colour) for colour in (BLUE, ORANGE))
    expected = (SIZES[1] / SIZES[0]) ** -0.5
    assert large[:, 1] / small[:, 1] == pytest.approx(
        expected, rel=5e-3
    )  # in per cent, not in logs
