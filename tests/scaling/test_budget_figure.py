"""scaling/budget_figure.py: gaps stand at their tokens per parameter, with the law of the gap."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from scaling import precision
from scaling.budget_figure import draw_budgets
from scaling.paired.gap_law import fit_gap
from scaling.pairing import pair_runs
from scaling.precision_result import PrecisionResult, analyse
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
    assert set(line[:, 1]) == {law.constant}


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
    assert large[:, 1] / small[:, 1] == pytest.approx((SIZES[1] / SIZES[0]) ** -0.5)
