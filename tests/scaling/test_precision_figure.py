"""scaling/precision_figure.py: gaps, nulls, margin and published laws stand where they belong."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp

from scaling import precision
from scaling.paired.estimates import Estimate
from scaling.paired.gaps import Pair
from scaling.paired.published import kumar_gap, sun_gap
from scaling.pairing import pair_runs
from scaling.precision_figure import NULL_COLOURS, draw_precision
from scaling.precision_result import PrecisionResult, analyse, read_precision
from scaling.records import read_runs
from scaling.verdicts import Margin
from tests.conftest import asked
from tests.helpers.scaling_runs import errorbars, legend, strict, write_run
from tests.scaling.test_precision_command import BF16, write_seeds

MARGIN = Margin(0.25, "study.json", True)
ORANGE, GREEN = "#D55E00", "#009E73"  # of tensorwise and rowwise
TENSORWISE = (0.010, 0.012, 0.015)  # nats
PERCENTS = 100 * np.divide(TENSORWISE, BF16)


class Drawn:
    """A study of two recipes at one size and a single pair at another, and its figure."""

    def __init__(self, folder: Path) -> None:
        write_seeds(folder, TENSORWISE, params=40_000)
        write_seeds(folder, (-0.004, -0.006, -0.009), "rowwise", params=40_000)
        write_seeds(folder, (0.004,), params=300_000)
        write_run(folder / "again", loss=BF16[0] + 1e-3, params=40_000, seed=1, repeat=1)
        records, _ = read_runs([folder])
        self.pairs: list[Pair] = pair_runs(records)[0]
        self.result: PrecisionResult = analyse(records, self.pairs, "bf16", MARGIN)
        self.figure: Figure = draw_precision(self.result)
        self.left, self.right = self.figure.axes

    @property
    def bands(self) -> list[float]:
        """Of the nulls of other seeds and of the same seed."""
        null = self.result.null
        assert null.pooled is not None and null.same_seed.pooled is not None
        return [null.pooled.band, null.same_seed.pooled.band]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return Drawn(tmp_path_factory.mktemp("drawn"))


def null_ends(panel: Axes, marker: str) -> list[float]:
    """Where brackets of nulls end with this marker."""
    lines = [line for line in panel.lines if line.get_color() in NULL_COLOURS]
    return [line.get_ydata()[0] for line in lines if line.get_marker() == marker]


def test_the_bar_of_several_pairs_is_their_t_interval(drawn: Drawn) -> None:
    interval = ttest_1samp(PERCENTS, 0).confidence_interval()
    _, mean, low, high = errorbars(drawn.left, ORANGE)[0]
    expected = (np.mean(PERCENTS), interval.low, interval.high)
    assert (mean, low, high) == pytest.approx(expected, rel=1e-6)


def test_the_bar_of_one_pair_is_the_noise_of_its_evaluation(drawn: Drawn) -> None:
    """Not of its seed, of which it knows nothing."""
    (alone,) = [pair for pair in drawn.pairs if pair.fp8.N == 300_000]
    mean, half = 100 * 0.004 / 2.2, 1.96 * alone.gap["bf16"].se_percent
    expected = (300_000, mean, mean - half, mean + half)
    assert errorbars(drawn.left, ORANGE)[1] == pytest.approx(expected, rel=1e-4)


def test_two_recipes_of_one_size_stand_side_by_side(drawn: Drawn) -> None:
    (rowwise,) = errorbars(drawn.left, GREEN)
    assert rowwise[0] < 40_000 < errorbars(drawn.left, ORANGE)[0][0] and rowwise[1] < 0


def test_gaps_and_margin_scale_the_axis_and_no_null_does(drawn: Drawn) -> None:
    other_seeds, same_seed = drawn.bands
    limit = drawn.left.get_ylim()[1]
    assert 0.25 < limit < 1.2 < other_seeds and same_seed < limit


def test_a_null_that_leaves_the_panel_ends_in_arrows(drawn: Drawn) -> None:
    low, high = drawn.left.get_ylim()
    assert null_ends(drawn.left, "v") == [low] and null_ends(drawn.left, "^") == [high]


def test_a_null_within_the_panel_ends_at_its_band(drawn: Drawn) -> None:
    same_seed = drawn.bands[1]
    assert null_ends(drawn.left, "_") == pytest.approx([-same_seed, same_seed])


def test_each_null_is_named_by_its_band(drawn: Drawn) -> None:
    expected = [f"±{band:.2g} %" for band in drawn.bands]
    assert [text.get_text() for text in drawn.left.texts] == expected


def test_the_margin_is_dashed_on_both_sides(drawn: Drawn) -> None:
    dashed = [line for line in drawn.left.lines if line.get_linestyle() == "--"]
    assert {-0.25, 0.25} <= {line.get_ydata()[0] for line in dashed}


def test_the_legend_names_all_that_is_drawn(drawn: Drawn) -> None:
    other_seeds, same_seed = drawn.bands
    assert legend(drawn.figure) == [
        f"null, other seed, ±{other_seeds:.2g} %",
        f"null, same seed, ±{same_seed:.2g} %",
        "margin, ±0.25 %",
        "rowwise",
        "tensorwise",
        "mean of pairs, 95 % interval",
        "single pair, evaluation noise",
    ]


def published(drawn: Drawn, name: str) -> tuple[np.ndarray, np.ndarray]:
    return {line.get_label(): line.get_data() for line in drawn.right.lines}[name]


def test_kumars_law_is_drawn_over_the_sizes_it_was_fitted_to(drawn: Drawn) -> None:
    N, nats = published(drawn, "Kumar INT8")
    assert nats == pytest.approx(kumar_gap(N)) and N.min() >= 30e6 and N.max() <= 220e6


def test_suns_law_is_drawn_at_the_ratio_of_the_pairs(drawn: Drawn) -> None:
    N, nats = published(drawn, "Sun E4M3, block 128")
    assert nats == pytest.approx(sun_gap(N, 20 * N)) and N.min() >= 41e6
    assert drawn.right.get_xlim()[1] > 1.5e9


def test_gaps_above_nought_are_drawn_in_nats(drawn: Drawn) -> None:
    heights = sorted(nats for _, nats, *_ in errorbars(drawn.right))
    assert heights == pytest.approx([0.004, np.mean(TENSORWISE)], rel=1e-6)


def test_a_single_pair_is_hollow(drawn: Drawn) -> None:
    fills = {line.get_xdata()[0]: line.get_markerfacecolor() for line, *_ in drawn.right.containers}
    assert fills == {40_000: ORANGE, 300_000: "white"}


def test_bars_that_reach_nought_end_in_an_arrow_on_the_logarithmic_panel(tmp_path: Path) -> None:
    write_seeds(tmp_path, (0.010, -0.004, 0.002))
    records, _ = read_runs([tmp_path])
    panel = draw_precision(analyse(records, pair_runs(records)[0], "bf16", None)).axes[1]
    ((_, _, low, high),) = errorbars(panel)
    floor = panel.get_ylim()[0]
    arrows = [line.get_ydata() for line in panel.lines if line.get_marker() == "v"]
    assert low == pytest.approx(floor) and high > 0.01 and arrows == [[floor]]


@pytest.mark.parametrize("gaps", [(-0.01,), (2.0, 2.5)])
def test_few_and_extreme_pairs_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gaps: tuple[float, ...]
) -> None:
    runs, out = write_seeds(tmp_path / "runs", gaps), tmp_path / "out"
    page = asked(capsys, precision.main, runs, "loss=as_trained", "--out", out)
    assert "FP8 minus BF16, as trained" in page
    assert {path.suffix for path in out.iterdir()} == {".json", ".png", ".svg"}
    mean = strict(out / "precision.json")["sizes"][0]["nats"]["mean"]
    assert mean == pytest.approx(1.5 * np.mean(gaps))


def limit_and_mean(folder: Path, gaps: tuple[float, ...]) -> tuple[float, float]:
    """Where the axis of gaps ends, and the gap, both [%]."""
    precision.main([str(write_seeds(folder, gaps)), "loss=as_trained"])
    result = read_precision(folder / "law/precision.json")
    limit = draw_precision(result).axes[0].get_ylim()[1]
    return limit, abs(result.sizes[0].as_trained.mean)


def test_the_bar_of_a_single_pair_fits_the_panel(tmp_path: Path, no_figures: None) -> None:
    limit, mean = limit_and_mean(tmp_path, (-0.01,))
    assert limit > 1.2 * mean


def test_the_bar_of_two_pairs_may_leave_the_panel(tmp_path: Path, no_figures: None) -> None:
    """It is 12.7 standard errors long."""
    limit, mean = limit_and_mean(tmp_path, (2.0, 2.5))
    assert limit == pytest.approx(1.2 * mean)


@pytest.fixture(params=[0.001, 0.3, 1.0, 6.0, 150.0])
def panel(request: pytest.FixtureRequest, tmp_path: Path) -> Axes:
    """The left panel of a study with a gap of so many per cent."""
    write_seeds(tmp_path, tuple(request.param * loss / 100 for loss in BF16), params=40_000)
    records, _ = read_runs([tmp_path])
    return draw_precision(analyse(records, pair_runs(records)[0], "bf16", MARGIN)).axes[0]


def test_the_margin_can_be_read_whatever_the_gaps_are(panel: Axes) -> None:
    """Its lines lie a tenth of the axis away from the edges and from each other."""
    places = panel.transData.transform([(40_000, side * 0.25) for side in (-1, 1)])
    low, high = panel.transAxes.inverted().transform(places)[:, 1]
    assert low > 0.1 and high < 0.9 and high - low > 0.1


def test_the_axis_has_ticks_and_holds_the_gaps_whatever_they_are(panel: Axes) -> None:
    low, high = panel.get_ylim()
    ticks = [tick for tick in panel.get_yticks() if low <= tick <= high]
    assert 0 in ticks and len(ticks) >= 3
    assert all(low < mean < high for _, mean, *_ in errorbars(panel))


def test_a_crowded_figure_shows_the_gaps_with_the_most_tokens(drawn: Drawn) -> None:
    sizes = [
        replace(
            size,
            tokens=budget * size.tokens,
            bf16=Estimate(1, size.bf16.mean + budget),
        )
        for budget in (1, 20, *range(2, 20))
        for size in drawn.result.sizes
    ]
    left, _ = draw_precision(replace(drawn.result, sizes=sizes)).axes
    means = [mean for _, mean, _, _ in errorbars(left, ORANGE)]
    expected = [size.bf16.mean + 20 for size in drawn.result.sizes if size.recipe == "tensorwise"]
    assert means == pytest.approx(expected)


@pytest.mark.parametrize("number, n_shown", [(40, 40), (41, 3)])
def test_forty_gaps_are_all_shown_and_more_are_not(number: int, n_shown: int, drawn: Drawn) -> None:
    sizes = [
        replace(size, tokens=budget * size.tokens)
        for budget in range(1, 15)
        for size in drawn.result.sizes
    ]
    figure = draw_precision(replace(drawn.result, sizes=sizes[:number]))
    left, _ = figure.axes
    assert sum(len(errorbars(left, colour)) for colour in (ORANGE, GREEN)) == n_shown


@pytest.mark.parametrize(
    "number, words",
    [(3, "at each size further right: more tokens"), (41, "each recipe's with its most tokens")],
)
def test_the_caption_says_which_gaps_are_shown(number: int, words: str, drawn: Drawn) -> None:
    sizes = [
        replace(size, tokens=budget * size.tokens)
        for budget in range(1, 15)
        for size in drawn.result.sizes
    ]
    figure = draw_precision(replace(drawn.result, sizes=sizes[:number]))
    assert words in " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
