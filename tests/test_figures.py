"""The loss figure carries its labels without collisions and draws what it says, for every shape of study there is."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.markers import CARETDOWN, CARETUP
from scaling_runs import write_ladder, write_run

from scaling import figures as curves
from scaling.figures import STYLES, _log_ticks, _power_of_ten, _value_ticks, caption, draw, main, number, render, title
from scaling.fit import fit_group, fit_points
from scaling.laws import Points, on_one_ray, ray_of
from scaling.pairs import human, pairs
from scaling.points import read_points
from scaling.records import read_runs
from tests.conftest import ROOT

REFERENCE = ROOT.parent / "shared" / "reference"
SIZES, RATIOS = (53e6, 124e6, 257e6, 360e6), (5, 10, 20, 40)
LARGE = (1.54e9, 30.8e9)


def surface(N, D):
    """A known law of parameters and tokens."""
    return 1.82 + 480.0 * N**-0.348 + 2100.0 * D**-0.366


def write_branches(folder, sizes=SIZES, ratios=RATIOS, seeds=(1,), noise=6e-4, steps=1500):
    """Pairs of warm-up-stable-decay runs: a trunk to the largest ratio, a decay branch from it at each smaller one."""
    for N, seed, recipe in itertools.product(map(int, sizes), seeds, ("bf16", "tensorwise")):
        gap = 0.006 * (N / sizes[0])**-0.3 if recipe != "bf16" else 0.0
        tokens = np.arange(1, steps + 1) / steps * ratios[-1] * N
        trunk = 1.025 * surface(N, tokens) + gap + 6 * np.exp(-tokens / (0.004 * tokens[-1]))
        trunk += np.random.default_rng([seed, N]).normal(0, 0.03, steps)
        for ratio in ratios:
            D, is_trunk = int(ratio * N), ratio == ratios[-1]
            start = int(0.85 * D / tokens[-1] * steps)
            name = f"{N}_{recipe}_{seed}"
            luck = 1 + noise * np.random.default_rng([seed, N, ratio]).normal()
            write_run(folder / (name if is_trunk else f"{name}_x{ratio}"), recipe=recipe, params=N, tokens=D, seed=seed, gap=gap,
                      loss=surface(N, D) * luck, curve=False, **({} if is_trunk else {"parent_run": name, "parent_step": start}))
            decay = np.clip((tokens - 0.85 * D) / (0.15 * D), 0, 1)
            rows = [{"kind": "train", "step": i + 1, "tokens": tokens[i], "loss": trunk[i] * (1 - 0.024 * decay[i])}
                    for i in range(0 if is_trunk else start, round(D / tokens[-1] * steps))]
            path = folder / (name if is_trunk else f"{name}_x{ratio}") / "metrics.jsonl"
            path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def held_out(gap=0.0, is_there=False):
    N, D = LARGE
    loss = surface(N, D) + gap
    prediction = SimpleNamespace(loss=loss, low=0.985 * loss, high=1.02 * loss)
    return (SimpleNamespace(name="gpt1p5b", N=N, D=D, C=6.6 * N * D, loss=1.004 * loss if is_there else None,
                            prediction=prediction),)


def study(folder, **held):
    """(groups, pairs, loss_key, ray) of the runs under a folder: what fit.py hands to draw."""
    records, _ = read_runs([folder])
    recipes = sorted({record.recipe for record in records}, key=lambda recipe: (recipe != "bf16", recipe))
    groups = [fit_group([r for r in records if r.recipe == recipe], "loss_bf16", resamples=0,
                        held=held_out(0.002 * (recipe != "bf16"), **held) if held else ()) for recipe in recipes]
    ray = ray_of(groups[0].points)
    return groups, pairs(records)[0], "loss_bf16", ray if on_one_ray(ray) else None


def table(N, D, loss, name="points.csv"):
    """What fit.py hands to draw for a table of points."""
    group = fit_points(Points(N=N, D=D, C=6 * N * D, loss=loss, cluster=np.arange(len(N))), name, resamples=0)
    ray = ray_of(group.points)
    return [group], [], "loss_bf16", ray if on_one_ray(ray) else None


def ladder(folder, **changes):
    write_ladder(folder, **changes)
    return study(folder)


def same_loss(folder):
    write_ladder(folder, gap=0.0, loss=2.5)
    return study(folder)


def bf16_alone(folder):
    for i, params in enumerate((40_000, 110_000, 190_000)):
        write_run(folder / str(i), params=params, curve=False)
    return study(folder)


def one_run(folder):
    write_run(folder / "a")
    return study(folder)


def one_size(folder):
    for seed in range(4):
        write_run(folder / f"b{seed}", seed=seed, loss=2.5 + 0.003 * seed)
        write_run(folder / f"f{seed}", seed=seed, loss=2.5 + 0.003 * seed, recipe="tensorwise", gap=-0.002)
    return study(folder)


def four_recipes(folder):
    write_ladder(folder)
    for recipe in ("rowwise_with_gw_hp", "tensorwise_gw_hp"):
        for letter, params in zip("xyz", (38_912, 106_624, 184_320), strict=True):
            write_run(folder / f"{letter}_{recipe}", recipe=recipe, params=params, gap=0.004)
    return study(folder)


def scaled(factor):
    def build(folder):
        for i, params in enumerate((38_912, 106_624, 184_320)):
            write_run(folder / str(i), params=params, loss=factor * (1 + 1 / (i + 1)), curve=False)
        return study(folder)
    return build


def two_ratios(folder):
    """Off one ray, too few points for L(N, D)."""
    for i, (params, ratio) in enumerate(((40_000, 10), (40_000, 20), (110_000, 20))):
        write_run(folder / str(i), params=params, tokens=params * ratio)
    return study(folder)


def long_ray(folder):
    N = np.geomspace(5e7, 2e9, 9)
    loss = 1.7 + 20 * (120 * N**2) ** -0.07 * (1 + 1e-3 * np.random.default_rng(0).normal(size=9))
    return table(N, 20 * N, loss, "a_table_of_published_losses_with_a_name_that_is_far_too_long_for_one_line_of_a_title.csv")


def cloud(folder):
    rng = np.random.default_rng(1)
    N, D = 10 ** rng.uniform(7.5, 10, 240), 10 ** rng.uniform(9, 11.5, 240)
    return table(N, D, surface(N, D) * np.exp(0.01 * rng.normal(size=240)))


def wide_losses(folder):
    for i, (params, loss) in enumerate(((40_000, 3e10), (110_000, 2.0), (190_000, 1e-2))):
        write_run(folder / str(i), params=params, loss=loss, curve=False)
    return study(folder)


def over_and_under(folder):
    """An identified law whose lines over parameters leave the panel at the top, with many ratios of tokens per parameter."""
    N, ratio = (values.ravel() for values in np.meshgrid(np.geomspace(1e8, 5e9, 6), [0.5, 20.0, 500.0, 1000.0]))
    kept = np.where(ratio < 1, N > 4e8, (ratio < 100) | (N < 1e9))
    N, ratio = N[kept], ratio[kept]
    return table(N, ratio * N, surface(N, ratio * N) * np.exp(0.001 * np.random.default_rng(3).normal(size=len(N))))


def sizes_alone(folder):
    path = folder / "sizes.csv"
    path.write_text("N,loss\n" + "".join(f"{N},{2 + 300 * N**-0.35}\n" for N in (1e7, 3e7, 1e8, 3e8, 1e9)))
    points = read_points(path, n="N", loss="loss")
    return [fit_points(points.points, "sizes.csv", axes="N", resamples=0)], [], "loss_bf16", None


STUDIES = {
    "six sizes": lambda folder: ladder(folder, sizes=(39_000, 60_000, 107_000, 184_000, 400_000, 900_000)),
    "negative gap": lambda folder: ladder(folder, gap=-0.005),
    "same loss": same_loss, "bf16 alone": bf16_alone, "one run": one_run, "one size": one_size, "four recipes": four_recipes,
    "small losses": scaled(1e-3), "large losses": scaled(1e3), "two ratios": two_ratios, "long ray": long_ray, "cloud": cloud,
    "sizes alone": sizes_alone, "a wrong column": scaled(1e12), "tiny losses": scaled(1e-12), "wide losses": wide_losses,
    "over and under": over_and_under,
}


@pytest.fixture(scope="module")
def branches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("branches")
    write_branches(folder)
    return study(folder, is_there=False)


@pytest.fixture(scope="module")
def branch_figure(branches):
    return draw(*branches)


@pytest.fixture(scope="module")
def three_sizes(tmp_path_factory):
    return ladder(tmp_path_factory.mktemp("ladder") / "runs")


def texts_of(figure):
    """Every text that is drawn: of the page, the legend, the panels, their axes and ticks."""
    texts = [*figure.texts, *figure.legends[0].get_texts()]
    for panel in figure.axes:
        texts += [panel.xaxis.label, panel.yaxis.label, *panel.texts]
        for axis in (panel.xaxis, panel.yaxis):     # ticks beyond the view have labels too, which are not drawn
            low, high = axis.get_view_interval()
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in dict.fromkeys(texts) if text.get_visible() and text.get_text()]


def check_page(figure):
    last = [[text.get_window_extent(figure.canvas.renderer) for text in texts_of(figure) if text in panel.get_xticklabels()]
            for panel in figure.axes if panel.get_xlabel()]
    for boxes, following in itertools.pairwise(last):
        assert max(box.x1 for box in boxes) + 4 < min(box.x0 for box in following), "labels of neighbouring panels touch"
    page, boxes = figure.bbox, [(text, text.get_window_extent(figure.canvas.renderer)) for text in texts_of(figure)]
    for text, box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text.get_text()
    for (one, box), (other, its) in itertools.combinations(boxes, 2):
        clear = max(box.x0 - its.x1, its.x0 - box.x1, box.y0 - its.y1, its.y0 - box.y1)
        assert clear > -0.5, (one.get_text(), other.get_text())
    for panel in figure.axes:
        frame = panel.get_window_extent()
        for text in panel.texts:
            box = text.get_window_extent(figure.canvas.renderer)
            assert frame.x0 - 1 <= box.x0 and box.x1 <= frame.x1 + 1 and frame.y0 - 1 <= box.y0 and box.y1 <= frame.y1 + 1, text
    assert min(text.get_fontsize() for text in texts_of(figure)) * 3.4 / figure.get_figwidth() > 4, "too small in a column"


@pytest.mark.parametrize("name", STUDIES)
def test_no_label_collides_or_leaves_the_page(tmp_path, name):
    groups, found, loss_key, ray = STUDIES[name](tmp_path)
    figure = draw(groups, found, loss_key, ray)
    check_page(figure)
    axes = [axis for axis in "CDN" if axis in groups[0].x]
    labels = [panel.get_xlabel() for panel in figure.axes if panel.get_xlabel()]
    assert labels == [{"C": "compute C [FLOPs]", "D": "training tokens D", "N": "parameters N"}[axis] for axis in axes]
    assert figure.axes[0].get_ylabel() == "validation loss\n[nats/token]"
    for panel, axis in zip(figure.axes, axes, strict=False):
        assert panel.get_xscale() == panel.get_yscale() == "log"
        for group in groups:
            (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
            assert left < group.x[axis].min() and group.x[axis].max() < right
            assert low < group.loss.min() and group.loss.max() < high
            points = np.column_stack([group.x[axis], group.loss])
            assert any(np.allclose(marks.get_offsets(), points) for marks in panel.collections
                       if np.shape(marks.get_offsets()) == points.shape)


@pytest.mark.parametrize("build", [cloud, over_and_under])
def test_a_ratio_stands_at_its_line_and_hides_nothing(tmp_path, build):
    groups, *rest = build(tmp_path)
    figure = draw(groups, *rest)
    panel, (group,) = figure.axes[2], groups
    low, high = curves.span(groups, "N")
    grid = np.geomspace(low / 1.6, high, 2000)
    lines = {f"{line[-1]:.{0 if line[-1] >= 10 else 2}{'f' if line[-1] >= 10 else 'g'}}×": panel.transData.transform(
        np.column_stack([line[0], line[3]])) for line in curves.law_lines(group, "N", grid)}
    points = panel.transData.transform(np.column_stack([group.x["N"], group.loss]))
    assert {text.get_text() for text in panel.texts} == set(lines) and len(lines) > 2
    for text in panel.texts:
        box = text.get_window_extent(figure.canvas.renderer)
        for name, path in lines.items():
            away = np.hypot(*np.maximum(0, np.maximum([box.x0, box.y0] - path, path - [box.x1, box.y1])).T).min()
            assert away < 8 if name == text.get_text() else away > 0.5, (text.get_text(), name, away)
        assert not ((points > [box.x0 - 1, box.y0 - 1]) & (points < [box.x1 + 1, box.y1 + 1])).all(axis=1).any()


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    write_branches(folder, seeds=(1, 2, 3, 4), steps=60)
    return study(folder)


def test_many_runs_leave_both_precisions_visible(many_runs):
    figure = draw(*many_runs)
    check_page(figure)
    for panel in figure.axes[:6]:
        below, above = [marks for marks in panel.collections if len(marks.get_offsets()) == 64]
        assert below.get_sizes()[0] > 2 * above.get_sizes()[0] and above.get_alpha() == 1
        assert np.allclose(below.get_facecolors()[:, :3], 1) and not np.allclose(above.get_facecolors()[:, :3], 1)


@pytest.mark.parametrize(("low", "high", "is_cut"), [(0.985, 1.02, False), (0.3, 4.0, True)])
def test_a_prediction_has_its_tick_and_squeezes_nothing(branches, branch_figure, low, high, is_cut):
    groups, *rest = branches
    said = [group.held_out[0].prediction.loss for group in groups]
    held = [replace(group, held_out=(SimpleNamespace(**vars(group.held_out[0]) | {
        "loss": 1.001 * loss, "prediction": SimpleNamespace(loss=loss, low=low * loss, high=high * loss)}),))
        for group, loss in zip(groups, said, strict=True)]
    figure = draw(held, *rest)
    check_page(figure)
    assert "its prediction, 95 %" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert ("arrow heads" in words_of(figure)) == is_cut == curves.is_cut(held)
    for row, column in itertools.product((0, 1), range(3)):
        panel, usual = figure.axes[3 * row + column], branch_figure.axes[3 * row + column]
        assert np.ptp(np.log(panel.get_ylim())) < 1.5 * np.ptp(np.log(usual.get_ylim()))
        ticks = [line for line in panel.lines if line.get_marker() == "_" and line.get_markersize() > 14]
        for tick, (_, x, middle, *_) in zip(ticks, curves.predictions(held, "CDN"[column], bool(row)), strict=True):
            assert np.allclose(tick.get_xydata(), [(x, middle)])
        stars = [line for line in panel.lines if line.get_marker() == "*"]
        assert min(star.get_zorder() for star in stars) > max(artist.get_zorder() for artist in panel.collections)
        assert min(star.get_markersize() for star in stars) > 8 and len(stars) == len(ticks) == 2
        heads = [line for line in panel.lines if line.get_marker() in (CARETDOWN, CARETUP)]
        assert len(heads) == (4 if row == 0 else 2 + 2 * (high > 3)) * is_cut
        bottom, top = panel.get_ylim()
        assert all(bottom <= line.get_ydata()[0] <= top for line in [*heads, *ticks])


def test_no_size_is_written_across_a_prediction(branches):
    groups, *rest = branches
    C = 1.35 * groups[0].x["C"].max()       # the held-out run ends just beyond the largest
    held = [replace(group, held_out=tuple(SimpleNamespace(**vars(one) | {"C": C, "prediction": SimpleNamespace(
        loss=2.55, low=2.3, high=3.2)}) for one in group.held_out)) for group in groups]
    figure = draw(held, *rest)
    check_page(figure)
    panel = figure.axes[0]
    (x, low), (_, high) = panel.transData.transform([(C, 2.3), (C, 3.2)])
    for text in panel.texts:
        box = text.get_window_extent(figure.canvas.renderer)
        assert box.x1 < x - 1 or box.x0 > x + 1 or box.y0 > high or box.y1 < low, text.get_text()


def test_branches_fill_all_three_rows(branch_figure):
    figure = branch_figure
    check_page(figure)
    assert len(figure.axes) == 9
    words = [text.get_text() for text in texts_of(figure)]
    assert all(words.count(size) >= 2 for size in ("53M", "124M", "257M", "360M")) and "1.54B" in words
    assert {"5×", "10×", "20×", "40×"} <= set(words)


@pytest.mark.skipif(not REFERENCE.exists(), reason="shared/reference/ with the published points is not beside this checkout")
def test_chinchillas_points_stay_readable():
    points = read_points(REFERENCE / "chinchilla_points.csv", n="Model Size", c="Training FLOP", loss="loss", drop_highest=5)
    group = fit_points(points.points, "chinchilla_points.csv", resamples=0)
    assert group.headline == "chinchilla"
    figure = draw([group], [], "loss_bf16", None)
    check_page(figure)
    marks = figure.axes[0].collections[-1]
    assert len(marks.get_offsets()) == 240 and marks.get_sizes().max() < 12 and marks.get_alpha() < 1


# ------------------------------------------------------------------------------------------------------- what is drawn


def test_lines_of_a_surface_are_the_law(branches):
    group = branches[0][0]
    law, grid = group.laws["chinchilla"], np.geomspace(1e17, 1e21, 50)
    (x, N, D, loss, low, high, each), = curves.law_lines(group, "C", grid)
    assert np.array_equal(x, grid) and np.allclose(loss, law.predict(N, D)) and each is None
    assert (low < loss).all() and (loss < high).all()

    def per_token(sizes):       # the runs' own FLOPs, which hold attention
        return np.exp(np.interp(np.log(sizes), np.log(group.x["N"]), np.log(group.x["C"] / group.x["D"])))

    inside = (1.2 * SIZES[0] < N) & (SIZES[-1] / 1.2 > N)
    assert inside.sum() > 5 and np.allclose((D * per_token(N) / grid)[inside], 1, rtol=5e-3)
    for shift in (0.85, 0.95, 1.05, 1.15):      # the same compute, other sizes
        other = N[inside] * shift
        assert (loss[inside] < law.predict(other, grid[inside] / per_token(other)) + 1e-9).all()
    lines = curves.law_lines(group, "D", grid := np.geomspace(1e8, 1e11, 20))
    assert [line[-1] for line in lines] == [*SIZES, LARGE[0]]
    assert all(np.allclose(line[3], law.predict(np.full(20, line[-1]), grid)) for line in lines)
    lines = curves.law_lines(group, "N", grid := np.geomspace(1e7, 1e10, 20))
    assert np.allclose([line[-1] for line in lines], RATIOS)
    assert all(np.allclose(line[3], law.predict(grid, line[-1] * grid)) for line in lines)


@pytest.mark.parametrize("axis", "CDN")
def test_reducible_losses_of_an_exact_law_lie_on_one_straight_line(axis):
    N, D = (values.ravel() for values in np.meshgrid(np.geomspace(5e7, 1e9, 5), np.geomspace(1e9, 1e11, 5)))
    (group,), *_ = table(N, D, surface(N, D))
    rest, shown = curves.rest_of(group, axis)
    assert shown.all()
    wanted = {"C": surface(N, D) - 1.82, "D": 2100.0 * D**-0.366, "N": 480.0 * N**-0.348}[axis]
    assert np.allclose(rest, wanted, rtol=1e-3)


def test_a_reducible_loss_at_or_below_zero_is_counted_not_drawn():
    N, D = (values.ravel() for values in np.meshgrid(np.geomspace(5e7, 1e9, 7), np.geomspace(1e9, 1e11, 7)))
    loss = surface(N, D)
    loss[-1] = 1.82 + 0.9 * 480.0 * 1e9**-0.348     # less than E and the term of the parameters together
    figure = draw(*table(N, D, loss))
    assert "Left out of that row, too low for a log axis: 1." in words_of(figure)
    assert [len(panel.collections[-1].get_offsets()) for panel in figure.axes[3:6]] == [49, 48, 49]


def test_a_ray_law_has_a_reducible_row_and_no_surface(tmp_path):
    groups, *rest = long_ray(tmp_path)
    assert groups[0].headline == "ray"
    figure = draw(groups, *rest)
    assert len(figure.axes) == 6 and "L = 1." in words_of(figure)
    for axis in "CDN":
        rest, shown = curves.rest_of(groups[0], axis)
        slope = np.polyfit(np.log(groups[0].x[axis]), np.log(rest), 2)
        assert shown.all() and slope[1] < 0 and abs(slope[0]) < 0.02


def test_the_envelope_is_the_lowest_loss_so_far_and_steps_up_in_size(branches):
    group = branches[0][0]
    smooth = curves.smooth_curves(group)
    pieces = curves.best_so_far(group, smooth)
    x, loss = (np.concatenate([piece[i] for piece in pieces]) for i in (0, 1))
    assert (np.diff(x) >= 0).all() and (np.diff(loss) <= 1e-12).all()
    assert {size for *_, size in pieces} == set(SIZES) and pieces[0][2] == SIZES[0] and pieces[-1][2] == SIZES[-1]
    assert all(one[0][-1] == other[0][0] for one, other in itertools.pairwise(pieces))      # no gap between the steps
    for run_x, run_loss in smooth:          # nowhere above a curve
        inside = (x >= run_x[0]) & (x <= run_x[-1])
        assert (loss[inside] <= np.interp(np.log(x[inside]), np.log(run_x), run_loss) + 0.02).all()


def test_a_branch_begins_on_its_trunk(branches):
    group = branches[0][0]
    smooth = {record.run_id: curve for record, curve in zip(group.records, curves.smooth_curves(group), strict=True)}
    for record in group.records:
        if record.parent_run:
            x, loss = smooth[record.run_id]
            trunk_x, trunk_loss = smooth[record.parent_run]
            assert np.isclose(loss[0], trunk_loss[np.flatnonzero(trunk_x == x[0])[0]])
            assert 0.5 < x[0] / x[-1] < 0.9 and loss[-1] < loss[0]


@pytest.mark.parametrize("is_there", [False, True])
def test_the_held_out_run_is_a_star_with_its_frozen_prediction(branches, branch_figure, is_there):
    groups, _, *rest = branches
    held = [held_out(0.0, is_there), held_out(0.002, is_there)]
    figure = branch_figure if not is_there else draw(
        [replace(group, held_out=one) for group, one in zip(groups, held, strict=True)], [], *rest)
    for column, axis in enumerate("CDN"):
        stars = [line for line in figure.axes[column].lines if line.get_marker() == "*"]
        assert [star.get_markerfacecolor() == "white" for star in stars] == [not is_there] * 2
        for star, (one,) in zip(stars, held, strict=True):
            (x, y), = star.get_xydata()
            assert np.isclose(x, getattr(one, axis)) and np.isclose(y, one.loss or one.prediction.loss)
        bars = [np.sort(bar.get_segments()[0][:, 1]) for bar in figure.axes[column].collections if hasattr(bar, "get_segments")]
        assert np.allclose(bars, [(one.prediction.low, one.prediction.high) for (one,) in held])
        assert [line for line in figure.axes[3 + column].lines if line.get_marker() == "*"]
    assert ("hollow" in words_of(figure)) and "gpt1p5b, in no fit" in words_of(figure)


def test_bands_hold_the_law_and_the_forms(three_sizes):
    groups, figure = three_sizes[0], draw(*three_sizes)
    check_page(figure)
    panel = figure.axes[0]
    hatched = [band for band in panel.collections if band.get_hatch()]
    filled = [band for band in panel.collections if not band.get_hatch() and len(band.get_paths()[0].vertices) > 100]
    assert len(hatched) == len(filled) == 2
    edges = hatched[0].get_paths()[0].vertices
    near = edges[np.abs(np.log(edges[:, 0] / 1e13)).argsort()[:4]]
    forms = np.array([form.predict(near[:, 0]) for form in groups[0].bands["C"]])
    assert (np.isclose(near[:, 1], forms.min(axis=0)) | np.isclose(near[:, 1], forms.max(axis=0))).all()
    edges = filled[0].get_paths()[0].vertices
    _, low, high = groups[0].lines["C"].interval_at(edges[:, 0])
    assert (np.isclose(edges[:, 1], low) | np.isclose(edges[:, 1], high)).all()


# -------------------------------------------------------------------------------------------------------------- in words


def words_of(figure):
    return " ".join(text.get_text().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ") for text in figure.texts)


def words(groups, found, loss_key, ray):
    return f"{title(groups, loss_key)} {caption(groups, found, loss_key, ray)}".replace("\N{NO-BREAK SPACE}", " ")


def test_caption_of_a_ray(three_sizes):
    text = words(*three_sizes)
    assert "Loss after training in BF16 or FP8 tensorwise, evaluated in BF16 (n = 3 each)" in text
    assert "One ray = one curve: at 20 tokens per parameter in every run, the panels are one curve under three labels." in text
    assert "N = params_total, D = tokens, C = flops_per_token × D." in text and "Training loss is smoothed" in text
    assert "BF16 (n = 3): L = " in text and text.count("is not identified") == 1


def test_caption_of_a_surface(branches):
    groups = branches[0]
    text = words(*branches)
    assert "One ray" not in text and "is not identified" not in text and text.count("L = E + A/N^α + B/D^β") == 1
    for group, name in zip(groups, ("BF16", "FP8 tensorwise"), strict=True):
        law = group.laws["chinchilla"]
        low, high = law.ci95["alpha"]
        assert f"{name} (n = 16 on 4 trajectories): E {law.parameters['E']:.3g} [" in text
        assert f"α {law.parameters['alpha']:.3g} [{low:.3g}, {high:.3g}]" in text
    assert "Gap: FP8 minus BF16" in text and "Gap:" not in words(groups, [], "loss_bf16", None)


def test_spread_points_without_a_surface_are_joined(tmp_path):
    drawn = two_ratios(tmp_path)
    (group,), *_ = drawn
    assert group.headline == "power_c" and curves.is_spread(group)
    assert [(line[-1], line[3].tolist()) for line in curves.law_lines(group, "D", None)] == [
        (40_000, [group.loss[0], group.loss[1]]), (110_000, [group.loss[2]])]
    assert [line[0].tolist() for line in curves.law_lines(group, "N", None)] == [[40_000], [40_000, 110_000]]
    text = words(*drawn)
    assert "lines join the points of one size" in text and "mixes the effects of size and of data" in text
    assert "One ray" not in text


def test_caption_of_a_table(tmp_path):
    text = words(*cloud(tmp_path))
    assert "Loss in points.csv (n = 240 points)" in text and "as the table counts them" in text
    assert "params_total" not in text and "Training loss" not in text
    text = words(*sizes_alone(tmp_path))
    assert "L = " in text and "N^−0." in text


def test_a_reason_names_its_precision_unless_all_share_it(tmp_path):
    groups, *rest = study_of_two = ladder(tmp_path)
    assert words(*study_of_two).count("is not identified") == 1 and "BF16: L(N, D)" not in words(*study_of_two)
    apart = [replace(group, headline="power_c", headline_reason=f"L(N, D) is not identified ({why}): power law in C instead")
             for group, why in zip(groups, ("E runs to zero", "alpha is not"), strict=True)]
    text = words(apart, *rest)
    assert "BF16: L(N, D) is not identified (E runs to zero)" in text
    assert "FP8 tensorwise: L(N, D) is not identified (alpha is not)" in text
    alone = [apart[0], replace(groups[1], headline="ray")]
    assert "BF16: L(N, D) is not identified" in words(alone, *rest)


def test_caption_says_how_intervals_and_frontier_are_made(branches):
    groups, *rest = branches
    said = words(groups, *rest)
    assert "lowest loss for a compute (by the runs' own FLOPs)" in said and "bootstrap" not in said
    law = replace(groups[0].laws["chinchilla"], interval="bootstrap")
    group = replace(groups[0], laws=groups[0].laws | {"chinchilla": law})
    assert "In brackets: percentiles of a bootstrap; drawn bands: from its covariance." in words([group], *rest)


def test_the_command_answers_and_refuses(capsys):
    assert main(["--help"]) == 0 and "--fp8" in capsys.readouterr().out
    assert main([]) == 2 and "run is missing" in capsys.readouterr().err


def test_human():
    assert [human(n) for n in (950, 38_912, 999_900, 124_400_000, 1_540_000_000, 2e12)] == [
        "950", "38.9k", "1M", "124M", "1.54B", "2T"]


def test_numbers_have_three_digits_and_no_e():
    assert [number(n) for n in (0.02914, 97.71, 2143.4, 328_000, -0.1546, 1.2e-7, 0.37)] == [
        "0.0291", "97.7", "2140", "3.28·10⁵", "−0.155", "1.2·10⁻⁷", "0.37"]


# ------------------------------------------------------------------------------------------------------------ small parts


def test_smoothing_keeps_a_straight_line_and_the_mean():
    x = np.arange(1.0, 2001.0)
    smooth_x, smooth_y = curves._smooth(x, 3 * x)
    assert np.allclose(smooth_y, 3 * smooth_x) and 40 < len(smooth_x) <= 80
    assert len(curves._smooth(x[1700:], x[1700:])[0]) == 4      # a short branch is smoothed as much as its trunk there
    assert [len(values) for values in curves._smooth(np.array([]), np.array([]))] == [0, 0]
    assert [values.tolist() for values in curves._smooth(np.array([5.0]), np.array([2.0]))] == [[5.0], [2.0]]


def test_few_values_are_kept_and_many_are_rounded():
    assert curves._few(np.array([5.0, 5.01, 20.0, 20.1, 40.0])) == pytest.approx([5.005, 20.05, 40.0])
    assert curves._few(np.geomspace(1.1, 160, 100)) == [1.0, 10.0, 100.0]
    assert curves._few(np.array([7.0])) == [7.0]


@pytest.mark.parametrize(("low", "high"), [(1.6, 2.4), (2.31, 2.36), (1.0, 11.0), (0.9, 1.3), (1e-3, 2e-3), (900.0, 2500.0),
                                           (3e9, 9e9), (1.01e12, 1.02e12), (4e300, 9e300), (2e-12, 3e-12)])
def test_loss_axis_has_round_labels(low, high):
    from matplotlib.figure import Figure
    axis = Figure().subplots().yaxis
    _value_ticks(axis, low, high)
    ticks, labels = axis.get_major_locator()(), axis.get_major_formatter().seq
    assert 2 <= len(ticks) <= 7 and len(set(labels)) == len(labels)
    digits = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    read = [float(label.replace("·10", "e").translate(digits)) for label in labels]
    assert np.allclose(read, ticks, rtol=1e-9, atol=0) and max(map(len, labels)) < 12
    assert ticks[0] >= low * (1 - 1e-9) and ticks[-1] <= high * (1 + 1e-9)


@pytest.mark.parametrize(("low", "high"), [(1e17, 1e21), (3e11, 4e13), (2e4, 5e5), (1.5e7, 2.1e7), (1e18, 1e30)])
def test_log_axis_has_two_to_five_labels(low, high):
    from matplotlib.figure import Figure
    panel = Figure().subplots()
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    _log_ticks(panel.xaxis, _power_of_ten, 4.5)
    ticks = panel.xaxis.get_major_locator()()
    assert 2 <= len(ticks) <= 5 and low <= ticks[0] and ticks[-1] <= high


@pytest.mark.parametrize("matrix", [
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),    # protanopia
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),     # deuteranopia
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),    # tritanopia
])
def test_precisions_stay_apart_for_colour_blind_readers(matrix):
    """Machado et al. 2009, severity 1, in linear RGB; and without any colour, by marker and dash."""
    linear = [np.array(to_rgb(style["color"])) ** 2.2 for style in STYLES]
    seen = [np.clip(np.array(matrix) @ colour, 0, 1) ** (1 / 2.2) for colour in linear]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.1
    assert len({style["marker"] for style in STYLES}) == len({str(style["linestyle"]) for style in STYLES}) == len(STYLES)


def test_drawing_is_deterministic_and_leaves_no_settings(three_sizes):
    import matplotlib
    before = dict(matplotlib.rcParams)
    figure, again = draw(*three_sizes), draw(*three_sizes)
    for form in ("png", "svg"):
        assert render(figure, form) == render(again, form)
    assert dict(matplotlib.rcParams) == before
