"""scaling/fit.py: its page of three panels draws the points, the laws and the gaps that it is
given."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp

from lib import plots
from lib.plots import STYLES, styles, write_with
from scaling import law_figure
from scaling.groups import fit_group, fit_points
from scaling.law_figure import draw
from scaling.law_lines import lines_of
from scaling.laws import Points, minima_of
from scaling.pairs import pairs
from scaling.records import read_runs
from tests.helpers.law_points import law
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


def held_out(gap=0.0, is_there=False, width=0.02):
    N, D = LARGE
    loss = surface(N, D) + gap
    prediction = SimpleNamespace(loss=loss, low=(1 - width) * loss, high=(1 + width) * loss)
    return (
        SimpleNamespace(
            N=N, D=D, C=6.6 * N * D, loss=1.004 * loss if is_there else None, prediction=prediction
        ),
    )


def study(folder, runs=(), **declared):
    """(groups, pairs, loss_key) of the runs under a folder, here after writing `runs`: what fit.py
    hands to draw."""
    for i, run in enumerate(runs):
        write_run(folder / str(i), **run)
    edit(folder / "study.json", **declared)
    records, _ = read_runs([folder])
    recipes = sorted(
        {record.recipe for record in records}, key=lambda recipe: (recipe != "bf16", recipe)
    )
    groups = [
        fit_group([r for r in records if r.recipe == recipe], "loss_bf16", resamples=0)
        for recipe in recipes
    ]
    return groups, pairs(records)[0], "loss_bf16"


def table(N, D, loss, name="points.csv", axes="NDC"):
    """What fit.py hands to draw for a table of points."""
    return (
        [fit_points(Points(N, D, 6 * N * D, loss, np.arange(len(N))), name, axes, resamples=0)],
        [],
        "loss_bf16",
    )


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
BUILDERS = {
    "five recipes": lambda folder: study(
        folder,
        [
            {"recipe": recipe, "params": params, "gap": 0.004 * (recipe != "bf16")}
            for recipe, params in itertools.product(ARMS, (38_912, 184_320))
        ],
    ),
    "one size": lambda folder: study(
        folder,
        [
            {
                "seed": seed,
                "loss": 2.5 + 0.003 * seed,
                "recipe": recipe,
                "gap": -0.002 * (recipe != "bf16"),
            }
            for seed, recipe in itertools.product(range(3), ARMS[:2])
        ],
    ),
    "two ratios": lambda folder: study(
        folder,
        [  # off one ray, too few points for L(N, D)
            {"params": N, "tokens": N * ratio}
            for N, ratio in ((40_000, 10), (40_000, 20), (110_000, 20))
        ],
        params="nonembed",
    ),
    "long ray": lambda _: table(
        RAY,
        20 * RAY,
        1.7 + 20 * (120 * RAY**2) ** -0.07 * (1 + 1e-3 * NOISE[:9]),
        "a_table_of_published_losses_with_a_name_that_is_far_too_long_for_one_line_of_a_title.csv",
    ),
    "cloud": lambda _: table(*CLOUD, law(*CLOUD) * np.exp(0.01 * NOISE)),
    "sizes alone": lambda _: table(FEW, FEW, 2 + 300 * FEW**-0.35, axes="N"),
}


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    return study(write_ladder(tmp_path_factory.mktemp("ladder")))


@pytest.fixture(scope="module")
def branches(tmp_path_factory):
    return study(
        write_branches(
            tmp_path_factory.mktemp("branches"),
            [*map(int, SIZES)],
            seeds=(1,),
            noise=2e-4,
            curve=True,
        )
    )


def caption(figure):
    return figure._supxlabel.get_text().replace("\n", " ")


@pytest.mark.parametrize("name", BUILDERS)
def test_every_study_shows_all_its_points_and_can_be_read(tmp_path, name):
    groups, found, loss_key = BUILDERS[name](tmp_path)
    figure, axes = draw(groups, found, loss_key), [axis for axis in "CDN" if axis in groups[0].x]
    names = law_figure.AXES | ({"N": "non-embedding\nparameters N"} if name == "two ratios" else {})
    assert [panel.get_xlabel() for panel in figure.axes[-len(axes) :]] == [
        names[axis] for axis in axes
    ]
    assert (
        len(figure.axes) == len(axes) * (2 if found else 1)
        and figure._supxlabel.get_text().count("\n") < 2
    )
    assert f"n = {len(groups[0].loss)}" in figure.legends[0].get_title().get_text()
    assert figure.legends[0].get_window_extent().x1 <= figure.bbox.x1
    for panel in figure.axes[-len(axes) :]:
        ends = [
            label.get_window_extent().intervalx
            for label in panel.get_xticklabels()
            if label.get_text()
        ]
        assert ends and all(left[1] < right[0] for left, right in itertools.pairwise(ends)), (
            "ticks can be read"
        )
    for panel, axis in zip(figure.axes, axes, strict=False):
        for group in groups:
            points = np.column_stack([group.x[axis], group.loss])
            (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
            assert (points > (left, low)).all() and (points < (right, high)).all()
            offsets = [np.asarray(marks.get_offsets()) for marks in panel.collections]
            assert any(
                found.shape == points.shape and np.allclose(found, points) for found in offsets
            )
        # hundreds of points stay readable
        assert name != "cloud" or panel.collections[-1].get_sizes().max() < 12
    assert name != "long ray" or [line.form for line in groups[0].lines.values()] == ["ray"] * 3


def test_isoflop_panels_show_each_valley_and_its_minimum():
    points = bent_valleys()
    groups = [fit_points(points, "isoflop.csv", resamples=0)]
    figure = draw(groups, [], "loss")
    C, N, D, lowest = minima_of(groups[0].laws["isoflop"])
    assert legend(figure)[-1] == "minimum of a budget" and "valley of each budget" in caption(
        figure
    )
    for panel, x in zip(figure.axes[:3], (C, D, N), strict=True):
        marks = [line.get_xydata() for line in panel.lines if line.get_marker() == "P"]
        assert len(marks) == 1 and np.allclose(marks[0], np.column_stack([x, lowest]))
    for axis, sizes in (("N", N), ("D", D)):
        lines = lines_of(groups[0], axis, None)
        assert [line.label for line in lines] == pytest.approx(C)
        for line, at, loss in zip(lines, sizes, lowest, strict=True):
            assert line.loss.min() == pytest.approx(loss, rel=1e-3)
            assert line.x[line.loss.argmin()] == pytest.approx(at, rel=0.1)


def test_isoflop_panels_show_best_size_tokens_and_their_ratio_over_compute():
    groups = [fit_points(bent_valleys(), "isoflop.csv", resamples=0)]
    law = groups[0].laws["isoflop"]
    C, N, D, _ = minima_of(law)
    panels = draw(groups, [], "loss").axes[3:]
    assert [panel.get_ylabel().split(" [")[0] for panel in panels] == ["N*", "D*", "D* / N*"]
    k_n, a, k_d, b = (law.parameters[name] for name in ("k_n", "a", "k_d", "b"))
    laws = (lambda c: k_n * c**a, lambda c: k_d * c**b, lambda c: k_d / k_n * c ** (b - a))
    for panel, minima, formula in zip(panels, (N, D, D / N), laws, strict=True):
        line, marks = panel.lines
        assert np.allclose(marks.get_xydata(), np.column_stack([C, minima]))
        x, y = line.get_xydata().T
        assert np.allclose(y, formula(x)) and x[-1] == pytest.approx(10 * C.max())
        assert panel.get_xlabel() == "compute C [FLOPs]"
    low, high = law.ci95["a"]
    (words,) = panels[0].get_legend().get_texts()
    assert words.get_text() == f"N* ~ C^{a:.3f}\n{low:.3f} to {high:.3f}"


def test_panels_of_tokens_and_parameters_end_at_their_points(ladder):
    """Laws are extrapolated over compute alone, so the other panels are not half empty."""
    compute, *others = draw(*ladder).axes[:3]
    lowest, highest = (end(ladder[0][0].loss) for end in (np.min, np.max))
    for panel in others:
        low, high = panel.get_ylim()
        share = np.log(highest / lowest) / np.log(high / low)
        assert low < lowest and share > 0.7
    assert compute.get_ylim()[0] < others[0].get_ylim()[0]
    labels = [[text.get_visible() for text in panel.get_yticklabels()] for panel in others]
    assert any(labels[0]) and not any(labels[1]), "the scale is written where it begins"


def test_gaps_of_seeds_are_one_mean_with_their_interval_and_single_pairs_are_hollow(tmp_path):
    gaps = (0.010, 0.014, 0.006)
    losses = (2.20, 2.21, 2.18)
    runs = [
        {"recipe": recipe, "seed": seed, "loss": losses[seed], "gap": gap * (recipe != "bf16")}
        for recipe, (seed, gap) in itertools.product(("bf16", "tensorwise"), enumerate(gaps))
    ]
    runs += [
        {"recipe": recipe, "params": 184_320, "gap": 0.004 * (recipe != "bf16")}
        for recipe in ("bf16", "tensorwise")
    ]
    groups, found, loss_key = study(tmp_path, runs)
    figure = draw(groups, found, loss_key)
    percent = 100 * np.divide(gaps, losses)
    interval = ttest_1samp(percent, 0).confidence_interval()
    mean, single = errorbars(figure.axes[5])
    assert mean == pytest.approx((38_912, percent.mean(), interval.low, interval.high))
    pair = next(pair for pair in found if pair.fp8.N == 184_320)
    half = 1.96 * 100 * pair.gap["bf16"].se / pair.bf16.loss_bf16
    gap = pair.gap["bf16"].percent
    assert single == pytest.approx((184_320, gap, gap - half, gap + half))
    faces = [bar.lines[0].get_markerfacecolor() for bar in figure.axes[5].containers]
    widths = [bar.lines[2][0].get_linewidth()[0] for bar in figure.axes[5].containers]
    assert faces == ["#D55E00", "white"] and widths[1] < widths[0]
    assert legend(figure)[-2:] == ["mean of pairs, 95 % interval", "single pair, evaluation noise"]


def test_pairs_laws_and_words_of_a_surface(branches):
    groups, found, _ = branches
    figure = draw(*branches)
    assert figure.axes[0].get_ylabel() == "validation loss\n[nats/token]"
    assert caption(figure).startswith(f"BF16: {groups[0].laws['chinchilla'].formula()}.")
    assert legend(figure) == [
        "BF16",
        "FP8 tensorwise",
        "training loss",
        "law, 95 % interval",
        "single pair, evaluation noise",
    ]
    wanted = [
        (
            one.fp8.params_total,
            one.gap["bf16"].percent,
            100 * one.gap["bf16"].se / one.bf16.loss_bf16,
        )
        for one in found
    ]
    assert np.allclose(
        sorted(errorbars(figure.axes[5])),
        sorted((N, gap, gap - 1.96 * se, gap + 1.96 * se) for N, gap, se in wanted),
    )
    for panel, axis, names in zip(
        figure.axes[1:], "DN", ("53M 124M 257M 360M", "5 10 20 40"), strict=False
    ):
        key = panel.get_legend()
        assert [text.get_text() for text in key.get_texts()] == names.split()
        for handle, line in zip(
            key.get_lines(), lines_of(groups[0], axis, np.array([5e8])), strict=True
        ):
            like = next(
                one
                for one in panel.lines
                if one.get_color() == handle.get_color() and len(one.get_xdata()) == 240
            )
            x, y = like.get_xydata().T
            assert np.exp(np.interp(np.log(line.x[0]), np.log(x), np.log(y))) == pytest.approx(
                line.loss[0], rel=1e-3
            )


def test_lines_of_a_surface_are_the_law(branches):
    group = branches[0][0]
    law, grid = group.laws["chinchilla"], np.geomspace(1e17, 1e21, 50)
    (line,) = lines_of(group, "C", grid)
    assert (line.low < line.loss).all() and (line.loss < line.high).all()
    # The lowest loss of 2,000 sizes at each compute, counted in the runs' own FLOPs, which hold
    # attention.
    sizes, index = np.unique(group.x["N"], return_index=True)
    N = np.geomspace(*SIZES[::3], 2000)
    per_token = np.exp(
        np.interp(np.log(N), np.log(sizes), np.log(group.x["C"] / group.x["D"])[index])
    )
    losses = law.predict(N[:, None] + 0 * grid, grid / per_token[:, None])
    inside = np.isin(losses.argmin(axis=0), range(100, 1900))
    assert inside.sum() > 5 and np.allclose(
        line.loss[inside], losses.min(axis=0)[inside], rtol=2e-4
    )
    grid = np.geomspace(1e8, 1e10, 20)
    by_size, by_ratio = (
        lines_of(replace(group, held_out=held_out()), "D", grid),
        lines_of(group, "N", grid),
    )
    assert np.allclose([line.label for line in by_size + by_ratio], [*SIZES, LARGE[0], *RATIOS])
    assert all(
        np.allclose(line.loss, law.predict(np.full(20, line.label), grid)) for line in by_size
    )
    assert all(np.allclose(line.loss, law.predict(grid, line.label * grid)) for line in by_ratio)


def test_bands_hold_the_law_and_the_forms(ladder):
    group, figure = ladder[0][0], draw(*ladder)
    assert "All at 20 tokens per parameter" in caption(figure)
    bands = [band for band in figure.axes[0].collections if len(band.get_paths()[0].vertices) > 100]
    for is_hatched, ends in (
        (True, lambda x: np.sort([form.predict(x) for form in group.bands["C"]], axis=0)),
        (False, lambda x: group.lines["C"].interval_at(x)[1:]),
    ):
        # of BF16, of FP8
        band, _ = (band for band in bands if bool(band.get_hatch()) == is_hatched)
        x, y = band.get_paths()[0].vertices.T
        low, *_, high = ends(x)
        assert (np.isclose(y, low) | np.isclose(y, high)).all()


@pytest.mark.parametrize("is_there, width", [(False, 0.02), (True, 0.7)])
def test_the_held_out_run_is_a_star_with_its_frozen_prediction(branches, is_there, width):
    groups, _, loss_key = branches
    held = [held_out(gap, is_there, width) for gap in (0.0, 0.002)]
    figure = draw(
        [replace(group, held_out=one) for group, one in zip(groups, held, strict=True)],
        [],
        loss_key,
    )
    assert legend(figure)[-2:] == [
        "held-out run" if is_there else "held-out run to come",
        "its prediction, 95 %",
    ]
    for panel, axis in zip(figure.axes, "CDN", strict=True):
        stars = [line for line in panel.lines if line.get_marker() == "*"]
        assert [star.get_markerfacecolor() == "white" for star in stars] == [not is_there] * 2
        low, high = panel.get_ylim()
        # a wide interval leaves the panel instead of squeezing the data
        assert np.log(high / low) < 1.1
        for star, bar, (one,) in zip(stars, errorbars(panel), held, strict=True):
            ((x, y),) = star.get_xydata()
            assert (
                np.allclose([x, y], [getattr(one, axis), one.loss or one.prediction.loss])
                and low < y < high
            )
            assert np.allclose(bar[2:], (one.prediction.low, one.prediction.high))


def test_a_recipe_of_fewer_sizes_is_named_not_drawn(ladder, tmp_path):
    groups, found, loss_key = ladder
    small, *_ = study(tmp_path, [{"recipe": "rowwise", "params": 38_912, "gap": 0.004}])
    figure = draw([*groups, *small], found, loss_key)
    assert "Not drawn, fewer sizes or no such law: FP8 rowwise" in caption(
        figure
    ) and "FP8 rowwise" not in legend(figure)


def test_a_recipe_has_one_style_in_every_figure_told_apart_without_colour_too():
    assert (
        len({style["marker"] for style in STYLES})
        == len({str(style["linestyle"]) for style in STYLES})
        == len(STYLES)
    )
    for names in (
        ["tensorwise", "own", "bf16"],
        ["bf16", "mxfp8", "nvfp4", "nvfp4_hadamard", "nvfp4_nearest", "tensorwise"],
    ):
        looks = dict(zip(names, styles(names), strict=True))
        assert looks["bf16"]["color"] == "#0072B2" and looks["tensorwise"] is STYLES[1]
        assert len({(style["color"], style["marker"]) for style in looks.values()}) == len(names)


def test_more_recipes_than_colours_are_told_apart_by_marker_and_dash():
    names = ["bf16", "tensorwise", *(f"recipe{i}" for i in range(12))]
    looks = styles(names)
    assert len({(look["color"], look["marker"]) for look in looks}) == len(names)
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == len(names)


def test_the_json_is_written_last(tmp_path, monkeypatch):
    """Whoever finds law.json finds all of it, old or new."""
    written = []
    monkeypatch.setattr(plots, "write_atomically", lambda path, content: written.append(path.name))
    write_with(tmp_path, "figure", Figure(), {"law.json": "{}"})
    assert written == ["figure.png", "figure.svg", "law.json"]
    with pytest.raises(ValueError, match="Out of range float"):
        write_with(tmp_path, "figure", None, {"law.json": {"loss": np.nan}})


def test_smoothing_keeps_a_line():
    x = np.arange(1.0, 2001.0)
    smooth_x, smooth_y = law_figure.smooth(x, 3 * x)
    assert np.allclose(smooth_y, 3 * smooth_x) and 40 < len(smooth_x) <= 80 and smooth_x[-1] > 1900


def test_without_a_law_of_both_points_of_one_size_and_of_one_ratio_are_joined():
    """Two sizes at two ratios, two seeds each; then of many sizes some."""
    N, ratio, seed = (a.ravel() for a in np.meshgrid([1e6, 4e6], [5.0, 20.0], [0.0, 0.1]))
    (group,), *_ = table(N, N * ratio, 3 - np.log10(N * ratio) / 10 + seed)
    by_size, by_ratio = lines_of(group, "D", None), lines_of(group, "N", None)
    assert [(line.label, *line.x) for line in by_size] == [(1e6, 5e6, 20e6), (4e6, 20e6, 80e6)]
    assert [(line.label, *line.x) for line in by_ratio] == [(5, 1e6, 4e6), (20, 1e6, 4e6)]
    assert all(np.allclose(line.loss, 3.05 - np.log10(line.x) / 10) for line in by_size)
    assert all(
        np.allclose(line.loss, 3.05 - np.log10(line.label * line.x) / 10) for line in by_ratio
    )
    N = np.repeat(sizes := np.geomspace(1e6, 1e9, 9), 2)
    (group,), *_ = table(N, N * np.tile([5.0, 20.0], 9), 2 + N / 1e9)
    assert [line.label for line in lines_of(group, "D", None)] == pytest.approx(
        sizes[[0, 2, 3, 5, 6, 8]]
    )
