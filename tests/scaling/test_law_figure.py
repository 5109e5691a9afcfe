"""scaling/fit.py's figure draws the points, the laws and the gaps that it is given."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp

from scaling.groups import Group, fit_group, fit_points
from scaling.law_figure import AXES, draw, smooth
from scaling.law_lines import LawLine, lines_of
from scaling.laws import Fit, Points, minima_of
from scaling.paired.gaps import Pair
from scaling.pairing import pair_runs
from scaling.records import read_runs
from tests.helpers.law_points import law, points_at
from tests.helpers.scaling_runs import (
    edit,
    errorbars,
    legend,
    surface,
    write_branches,
    write_ladder,
    write_run,
)
from tests.law_trials import bent_valleys

SIZES, RATIOS = (53e6, 124e6, 257e6, 360e6), (5, 10, 20, 40)
LARGE = (1.54e9, 30.8e9)
ANYWHERE = np.array([1.0])  # a grid for lines that do not depend on it


@dataclass(frozen=True)
class Study:
    """What fit.py hands to draw."""

    groups: list[Group]
    pairs: list[Pair]

    def draw(self) -> Figure:
        return draw(self.groups, self.pairs, "loss_bf16")


def study(folder: Path, runs: Iterable[dict[str, Any]] = (), **declared: Any) -> Study:
    """Of the runs under a folder, here after writing `runs`."""
    for i, run in enumerate(runs):
        write_run(folder / str(i), **run)
    edit(folder / "study.json", **declared)
    records, _ = read_runs([folder])
    recipes = sorted(
        {record.recipe for record in records}, key=lambda recipe: (recipe != "bf16", recipe)
    )
    groups = [
        fit_group([record for record in records if record.recipe == recipe], resamples=0)
        for recipe in recipes
    ]
    return Study(groups, pair_runs(records)[0])


def table(points: Points, name: str = "points.csv", axes: str = "NDC") -> Study:
    return Study([fit_points(points, name, axes, resamples=0)], [])


def with_gap(recipe: str, gap: float, **run: Any) -> dict[str, Any]:
    """A run whose gap is that of its recipe: none of BF16."""
    return {"recipe": recipe, "gap": 0.0 if recipe == "bf16" else gap, **run}


def caption(figure: Figure) -> str:
    return figure._supxlabel.get_text().replace("\n", " ")


# ------------------------------------------------------------------------------------ every study

ARMS = (
    "bf16",
    "tensorwise",
    "tensorwise+kernels+delayed+head",
    "rowwise_with_gw_hp+first_bf16=2+skip=attn.out",
    "cscale",
)
RAY, FEW = np.geomspace(5e7, 2e9, 9), np.geomspace(1e7, 1e9, 5)
NOISE = np.random.default_rng(0).normal(size=240)
CLOUD = 10 ** np.random.default_rng(1).uniform([[7.5], [9]], [[10], [11.5]], (2, 240))
LONG_NAME = "a_table_of_published_losses_with_a_name_that_is_far_too_long_for_one_line.csv"


def five_recipes(folder: Path) -> Study:
    cells = itertools.product(ARMS, (38_912, 184_320))
    return study(folder, [with_gap(recipe, 0.004, params=params) for recipe, params in cells])


def one_size(folder: Path) -> Study:
    cells = itertools.product(range(3), ARMS[:2])
    runs = [with_gap(recipe, -0.002, seed=seed, loss=2.5 + 0.003 * seed) for seed, recipe in cells]
    return study(folder, runs)


def two_ratios(folder: Path) -> Study:
    """Off one ray, too few points for L(N, D)."""
    cells = ((40_000, 10), (40_000, 20), (110_000, 20))
    return study(folder, [{"params": N, "tokens": N * r} for N, r in cells], params="nonembed")


def long_ray(_: Path) -> Study:
    compute = 120 * RAY**2
    deviation = 1 + 1e-3 * NOISE[:9]
    loss = 1.7 + 20 * compute**-0.07 * deviation
    return table(points_at(RAY, 20 * RAY, loss), LONG_NAME)


def cloud(_: Path) -> Study:
    N, D = CLOUD
    loss = law(N, D) * np.exp(0.01 * NOISE)
    return table(points_at(N, D, loss))


def sizes_alone(_: Path) -> Study:
    return table(points_at(FEW, FEW, 2 + 300 * FEW**-0.35), axes="N")


BUILDERS: tuple[Callable[[Path], Study], ...] = (
    five_recipes,
    one_size,
    two_ratios,
    long_ray,
    cloud,
    sizes_alone,
)


@dataclass(frozen=True)
class Drawn:
    """A study with its figure."""

    study: Study
    figure: Figure
    axes: list[str]
    name: str  # of its builder

    @property
    def lowest_row(self) -> list[Axes]:
        return self.figure.axes[-len(self.axes) :]


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda builder: builder.__name__)
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    made = request.param(tmp_path_factory.mktemp("study"))
    axes = [axis for axis in "CDN" if axis in made.groups[0].x]
    return Drawn(made, made.draw(), axes, request.param.__name__)


def test_each_panel_has_its_axis_and_each_study_its_rows(drawn: Drawn):
    names = dict(AXES)
    if drawn.name == "two_ratios":
        names["N"] = "non-embedding\nparameters N"
    labels = [panel.get_xlabel() for panel in drawn.lowest_row]
    assert labels == [names[axis] for axis in drawn.axes]
    rows = 2 if drawn.study.pairs else 1
    assert len(drawn.figure.axes) == rows * len(drawn.axes)


def test_the_page_says_how_many_points_and_holds_its_words(drawn: Drawn):
    key = drawn.figure.legends[0]
    assert f"n = {len(drawn.study.groups[0].loss)}" in key.get_title().get_text()
    assert key.get_window_extent().x1 <= drawn.figure.bbox.x1
    assert drawn.figure._supxlabel.get_text().count("\n") < 2


def test_ticks_can_be_read(drawn: Drawn):
    for panel in drawn.lowest_row:
        labels = [label for label in panel.get_xticklabels() if label.get_text()]
        ends = [label.get_window_extent().intervalx for label in labels]
        assert ends
        for (_, end), (begin, _) in itertools.pairwise(ends):
            assert end < begin


def test_every_point_is_drawn_inside_its_panel(drawn: Drawn):
    for panel, axis in zip(drawn.figure.axes, drawn.axes, strict=False):
        offsets = [np.asarray(marks.get_offsets()) for marks in panel.collections]
        for group in drawn.study.groups:
            points = np.column_stack([group.x[axis], group.loss])
            assert any(same(points, marks) for marks in offsets)
            first, last = zip(panel.get_xlim(), panel.get_ylim(), strict=True)
            assert (points > first).all() and (points < last).all()


def same(points: np.ndarray, marks: np.ndarray) -> bool:
    return points.shape == marks.shape and np.allclose(points, marks)


def test_hundreds_of_points_stay_readable(tmp_path: Path):
    for panel in cloud(tmp_path).draw().axes:
        assert panel.collections[-1].get_sizes().max() < 12


def test_of_one_ray_the_ray_law_is_drawn_over_each_axis(tmp_path: Path):
    (group,) = long_ray(tmp_path).groups
    assert [line.form for line in group.lines.values()] == ["ray"] * 3


# ------------------------------------------------------------------------------------------ IsoFLOP


@pytest.fixture(scope="module")
def isoflop() -> Drawn:
    made = table(bent_valleys(), "isoflop.csv")
    return Drawn(made, made.draw(), [*"CDN"], "isoflop")


def isoflop_law(drawn: Drawn) -> Fit:
    return drawn.study.groups[0].laws["isoflop"]


def test_isoflop_panels_show_each_minimum(isoflop: Drawn):
    minima = minima_of(isoflop_law(isoflop))
    assert legend(isoflop.figure)[-1] == "minimum of a budget"
    assert "valley of each budget" in caption(isoflop.figure)
    for panel, x in zip(isoflop.figure.axes[:3], (minima.C, minima.D, minima.N), strict=True):
        (marks,) = (line.get_xydata() for line in panel.lines if line.get_marker() == "P")
        assert np.allclose(marks, np.column_stack([x, minima.loss]))


@pytest.mark.parametrize("axis", ["N", "D"])
def test_a_valley_is_lowest_at_its_minimum(isoflop: Drawn, axis: str):
    minima = minima_of(isoflop_law(isoflop))
    lines = lines_of(isoflop.study.groups[0], axis, ANYWHERE)
    assert [line.label for line in lines] == pytest.approx(minima.C)
    for line, place, loss in zip(lines, getattr(minima, axis), minima.loss, strict=True):
        assert line.loss.min() == pytest.approx(loss, rel=1e-3)
        assert line.x[line.loss.argmin()] == pytest.approx(place, rel=0.1)


def test_isoflop_panels_show_best_size_tokens_and_their_ratio_over_compute(isoflop: Drawn):
    C, N, D, _ = minima_of(isoflop_law(isoflop))
    k_n, a, k_d, b = (isoflop_law(isoflop).values[name] for name in ("k_n", "a", "k_d", "b"))
    panels = isoflop.figure.axes[3:]
    assert [panel.get_ylabel().split(" [")[0] for panel in panels] == ["N*", "D*", "D* / N*"]
    laws = ((N, k_n, a), (D, k_d, b), (D / N, k_d / k_n, b - a))
    for panel, (minima, factor, exponent) in zip(panels, laws, strict=True):
        line, marks = panel.lines
        assert np.allclose(marks.get_xydata(), np.column_stack([C, minima]))
        x, y = line.get_xydata().T
        assert np.allclose(y, factor * x**exponent) and x[-1] == pytest.approx(10 * C.max())
        assert panel.get_xlabel() == "compute C [FLOPs]"


def test_the_exponent_stands_with_its_interval(isoflop: Drawn):
    fit = isoflop_law(isoflop)
    low, high = (fit.ci95 or {})["a"]
    (words,) = isoflop.figure.axes[3].get_legend().get_texts()
    assert words.get_text() == f"N* ~ C^{fit.values['a']:.3f}\n{low:.3f} to {high:.3f}"


# ---------------------------------------------------------------------------------- a ladder's laws


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    made = study(write_ladder(tmp_path_factory.mktemp("ladder")))
    return Drawn(made, made.draw(), [*"CDN"], "ladder")


def test_panels_of_tokens_and_parameters_end_at_their_points(ladder: Drawn):
    """Laws are extrapolated over compute alone, so the other panels are not half empty."""
    compute, *panels = ladder.figure.axes[:3]
    loss = ladder.study.groups[0].loss
    for panel in panels:
        low, high = panel.get_ylim()
        share = np.log(loss.max() / loss.min()) / np.log(high / low)
        assert low < loss.min() and share > 0.7
    assert compute.get_ylim()[0] < panels[0].get_ylim()[0]


def test_the_scale_is_written_where_it_begins(ladder: Drawn):
    of_tokens, of_parameters = (
        [text.get_visible() for text in panel.get_yticklabels()]
        for panel in ladder.figure.axes[1:3]
    )
    assert any(of_tokens) and not any(of_parameters)


def bands_of(panel: Axes, is_hatched: bool) -> list[np.ndarray]:
    """The outlines (2, n) of the bands, those of the model forms where hatched."""
    outlines = [band for band in panel.collections if len(band.get_paths()[0].vertices) > 100]
    return [
        band.get_paths()[0].vertices.T for band in outlines if bool(band.get_hatch()) == is_hatched
    ]


def test_the_hatched_band_holds_the_forms(ladder: Drawn):
    forms = ladder.study.groups[0].bands["C"]
    (x, y), _ = bands_of(ladder.figure.axes[0], is_hatched=True)  # of BF16, of FP8
    losses = np.array([form.predict(x) for form in forms])
    assert (np.isclose(y, losses.min(axis=0)) | np.isclose(y, losses.max(axis=0))).all()
    assert "All at 20 tokens per parameter" in caption(ladder.figure)


def test_the_plain_band_is_the_laws_interval(ladder: Drawn):
    (x, y), _ = bands_of(ladder.figure.axes[0], is_hatched=False)
    interval = ladder.study.groups[0].lines["C"].interval_at(x)
    assert interval is not None
    assert (np.isclose(y, interval.low) | np.isclose(y, interval.high)).all()


def test_a_recipe_of_fewer_sizes_is_named_not_drawn(ladder: Drawn, tmp_path: Path):
    small = study(tmp_path, [{"recipe": "rowwise", "params": 38_912, "gap": 0.004}])
    groups = [*ladder.study.groups, *small.groups]
    figure = Study(groups, ladder.study.pairs).draw()
    assert "Not drawn, fewer sizes or no such law: FP8 rowwise" in caption(figure)
    assert "FP8 rowwise" not in legend(figure)


# --------------------------------------------------------------------------------------------- gaps

GAPS, LOSSES = (0.010, 0.014, 0.006), (2.20, 2.21, 2.18)  # of three seeds


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """Three pairs of one size, one pair of another."""
    runs = []
    for recipe in ("bf16", "tensorwise"):
        for seed, (gap, loss) in enumerate(zip(GAPS, LOSSES, strict=True)):
            runs.append(with_gap(recipe, gap, seed=seed, loss=loss))
        runs.append(with_gap(recipe, 0.004, params=184_320))
    made = study(tmp_path_factory.mktemp("seeds"), runs)
    return Drawn(made, made.draw(), [*"CDN"], "seeds")


def test_gaps_of_seeds_are_one_mean_with_their_interval(seeds: Drawn):
    percent = 100 * np.divide(GAPS, LOSSES)
    low, high = ttest_1samp(percent, 0).confidence_interval()
    mean, _ = errorbars(seeds.figure.axes[5])
    assert mean == pytest.approx((38_912, percent.mean(), low, high))


def test_a_single_pair_has_the_noise_of_its_evaluation(seeds: Drawn):
    pair = next(pair for pair in seeds.study.pairs if pair.fp8.N == 184_320)
    half = 1.96 * 100 * pair.gap["bf16"].se / pair.bf16.loss_bf16
    gap = pair.gap["bf16"].percent
    _, single = errorbars(seeds.figure.axes[5])
    assert single == pytest.approx((184_320, gap, gap - half, gap + half))


def test_a_single_pair_is_hollow_with_a_thin_bar(seeds: Drawn):
    mean, single = seeds.figure.axes[5].containers
    faces = [bar.lines[0].get_markerfacecolor() for bar in (mean, single)]
    widths = [bar.lines[2][0].get_linewidth()[0] for bar in (mean, single)]
    assert faces == ["#D55E00", "white"] and widths[1] < widths[0]
    words = ["mean of pairs, 95 % interval", "single pair, evaluation noise"]
    assert legend(seeds.figure)[-2:] == words


# ---------------------------------------------------------------------------------------- a surface


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    folder = tmp_path_factory.mktemp("branches")
    write_branches(folder, [*map(int, SIZES)], seeds=(1,), noise=2e-4, curve=True)
    made = study(folder)
    return Drawn(made, made.draw(), [*"CDN"], "branches")


def test_words_of_a_surface(branches: Drawn):
    formula = branches.study.groups[0].law.formula()
    assert branches.figure.axes[0].get_ylabel() == "validation loss\n[nats/token]"
    assert caption(branches.figure).startswith(f"BF16: {formula}.")
    assert legend(branches.figure) == [
        "BF16",
        "FP8 tensorwise",
        "training loss",
        "law, 95 % interval",
        "single pair, evaluation noise",
    ]


def test_each_pair_of_a_surface_is_drawn(branches: Drawn):
    expected = []
    for pair in branches.study.pairs:
        gap = pair.gap["bf16"].percent
        half = 1.96 * 100 * pair.gap["bf16"].se / pair.bf16.loss_bf16
        expected.append((pair.fp8.params_total, gap, gap - half, gap + half))
    assert np.allclose(sorted(errorbars(branches.figure.axes[5])), sorted(expected))


@pytest.mark.parametrize(
    ("place", "axis", "names"), [(1, "D", "53M 124M 257M 360M"), (2, "N", "5 10 20 40")]
)
def test_the_key_of_a_panel_names_its_lines(branches: Drawn, place: int, axis: str, names: str):
    panel = branches.figure.axes[place]
    key = panel.get_legend()
    assert [text.get_text() for text in key.get_texts()] == names.split()
    lines = lines_of(branches.study.groups[0], axis, np.array([5e8]))
    for handle, line in zip(key.get_lines(), lines, strict=True):
        x, y = np.log(curve_of(panel, handle.get_color()))
        loss = np.exp(np.interp(np.log(line.x[0]), x, y))
        assert loss == pytest.approx(line.loss[0], rel=1e-3)


def curve_of(panel: Axes, colour: str) -> np.ndarray:
    """(2, 240) the law that is drawn in this colour."""
    for line in panel.lines:
        if line.get_color() == colour and len(line.get_xdata()) == 240:
            return line.get_xydata().T
    raise AssertionError(f"no line in {colour}")


def test_the_line_over_compute_is_the_lowest_loss(branches: Drawn):
    """Of 2,000 sizes at each compute, counted in the runs' own FLOPs, which hold attention."""
    group, grid = branches.study.groups[0], np.geomspace(1e17, 1e21, 50)
    (line,) = lines_of(group, "C", grid)
    sizes, first = np.unique(group.x["N"], return_index=True)
    N = np.geomspace(SIZES[0], SIZES[3], 2000)
    log_flops = np.log(group.x["C"] / group.x["D"])[first]
    per_token = np.exp(np.interp(np.log(N), np.log(sizes), log_flops))
    losses = group.law.predict(N[:, None] + 0 * grid, grid / per_token[:, None])
    is_inside = np.isin(losses.argmin(axis=0), range(100, 1900))
    assert is_inside.sum() > 5
    assert np.allclose(line.loss[is_inside], losses.min(axis=0)[is_inside], rtol=2e-4)


def test_the_line_over_compute_has_its_interval(branches: Drawn):
    (line,) = lines_of(branches.study.groups[0], "C", np.geomspace(1e17, 1e21, 50))
    assert line.low is not None and line.high is not None
    assert (line.low < line.loss).all() and (line.loss < line.high).all()


GRID = np.geomspace(1e8, 1e10, 20)


def test_lines_of_a_size_are_the_law_at_it(branches: Drawn):
    """Of a held-out run too."""
    group = branches.study.groups[0]
    lines = lines_of(replace(group, held_out=held_out()), "D", GRID)
    assert np.allclose([line.label for line in lines], [*SIZES, LARGE[0]])
    for line in lines:
        assert np.allclose(line.loss, group.law.predict(np.full(20, line.label), GRID))


def test_lines_of_a_ratio_are_the_law_at_it(branches: Drawn):
    group = branches.study.groups[0]
    lines = lines_of(group, "N", GRID)
    assert np.allclose([line.label for line in lines], RATIOS)
    for line in lines:
        assert np.allclose(line.loss, group.law.predict(GRID, line.label * GRID))


# --------------------------------------------------------------------------------- the held-out run


def held_out(
    gap: float = 0.0, is_there: bool = False, width: float = 0.02
) -> tuple[SimpleNamespace]:
    """A large run whose prediction is so wide."""
    N, D = LARGE
    loss = surface(N, D) + gap
    prediction = SimpleNamespace(loss=loss, low=(1 - width) * loss, high=(1 + width) * loss)
    measured = 1.004 * loss if is_there else None
    return (SimpleNamespace(N=N, D=D, C=6.6 * N * D, loss=measured, prediction=prediction),)


def draw_held(branches: Drawn, is_there: bool, width: float) -> tuple[Figure, list[Any]]:
    """(the figure with a held-out run of each recipe, these)."""
    held = [held_out(gap, is_there, width) for gap in (0.0, 0.002)]
    groups = [
        replace(group, held_out=runs)
        for group, runs in zip(branches.study.groups, held, strict=True)
    ]
    return Study(groups, []).draw(), [run for (run,) in held]


def stars(panel: Axes) -> list[Any]:
    return [line for line in panel.lines if line.get_marker() == "*"]


@pytest.mark.parametrize(
    ("is_there", "words"), [(False, "held-out run to come"), (True, "held-out run")]
)
def test_the_held_out_run_is_a_star_which_is_hollow_while_it_is_to_come(
    branches: Drawn, is_there: bool, words: str
):
    figure, held = draw_held(branches, is_there, width=0.02)
    assert legend(figure)[-2:] == [words, "its prediction, 95 %"]
    for panel, axis in zip(figure.axes, "CDN", strict=True):
        for star, run in zip(stars(panel), held, strict=True):
            assert (star.get_markerfacecolor() == "white") == (not is_there)
            expected = [getattr(run, axis), run.loss or run.prediction.loss]
            assert np.allclose(star.get_xydata()[0], expected)


def test_a_prediction_is_a_bar(branches: Drawn):
    figure, held = draw_held(branches, is_there=True, width=0.02)
    for panel in figure.axes:
        for bar, run in zip(errorbars(panel), held, strict=True):
            assert np.allclose(bar[2:], (run.prediction.low, run.prediction.high))


def test_a_wide_prediction_leaves_the_panel_instead_of_squeezing_the_data(branches: Drawn):
    figure, _ = draw_held(branches, is_there=True, width=0.7)
    for panel in figure.axes:
        low, high = panel.get_ylim()
        assert np.log(high / low) < 1.1
        for star in stars(panel):
            assert low < star.get_ydata()[0] < high


# ------------------------------------------------------------------------- lines without such a law


def places(lines: Sequence[LawLine]) -> list[tuple[float, ...]]:
    return [(line.label or math.nan, *line.x) for line in lines]


@pytest.fixture(scope="module")
def four_cells() -> Group:
    """Two sizes at two ratios, two seeds each, .1 apart."""
    grid = np.meshgrid([1e6, 4e6], [5.0, 20.0], [0.0, 0.1])
    N, ratio, seed = (values.ravel() for values in grid)
    D = N * ratio
    loss = 3 - np.log10(D) / 10 + seed
    return table(points_at(N, D, loss)).groups[0]


def test_points_of_one_size_are_joined_over_tokens(four_cells: Group):
    lines = lines_of(four_cells, "D", ANYWHERE)
    assert places(lines) == [(1e6, 5e6, 20e6), (4e6, 20e6, 80e6)]
    for line in lines:
        assert np.allclose(line.loss, 3.05 - np.log10(line.x) / 10)


def test_points_of_one_ratio_are_joined_over_parameters(four_cells: Group):
    lines = lines_of(four_cells, "N", ANYWHERE)
    assert places(lines) == [(5, 1e6, 4e6), (20, 1e6, 4e6)]
    for line in lines:
        assert np.allclose(line.loss, 3.05 - np.log10(line.label * line.x) / 10)


def test_of_many_sizes_six_are_joined():
    sizes = np.geomspace(1e6, 1e9, 9)
    N = np.repeat(sizes, 2)
    (group,) = table(points_at(N, N * np.tile([5.0, 20.0], 9), 2 + N / 1e9)).groups
    labels = [line.label for line in lines_of(group, "D", ANYWHERE)]
    assert labels == pytest.approx(sizes[[0, 2, 3, 5, 6, 8]])


def test_smoothing_keeps_a_line():
    x = np.arange(1.0, 2001.0)
    smooth_x, smooth_y = smooth(x, 3 * x)
    assert np.allclose(smooth_y, 3 * smooth_x)
    assert 40 < len(smooth_x) <= 80 and smooth_x[-1] > 1900
