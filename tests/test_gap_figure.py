"""scaling/gap_figure.py: what is drawn is what was computed, legible, the same bytes each time."""

import json

import matplotlib.colors
import numpy as np
import pytest
from scaling_runs import write_branches, write_run
from scipy.stats import t as student

from scaling.figures import render, styles
from scaling.pairs import Margin, kumar_gap, pairs, sun_gap
from scaling.precision import ASIDE, FP8_COLOR, analyse, draw_pair, draw_precision
from scaling.records import read_runs

MARGIN = Margin(0.25, "study.json", True)


def analysed(folder, arm="bf16", margin=MARGIN):
    records, _ = read_runs([folder])
    return analyse(records, pairs(records)[0], arm, margin)


def write_pairs(folder, params, gaps, recipe="tensorwise", **changes):
    for seed, gap in enumerate(gaps):
        if not (folder / f"bf16_{params}_{seed}").exists():
            write_run(folder / f"bf16_{params}_{seed}", params=params, loss=2 + seed / 100, seed=seed, curve=False, **changes)
        write_run(folder / f"{recipe}_{params}_{seed}", params=params, recipe=recipe, loss=2 + seed / 100, gap=gap, seed=seed,
                  curve=False, **changes)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gaps")
    write_pairs(folder, 40_000, [0.010, 0.012, 0.015])
    write_pairs(folder, 40_000, [-0.004, -0.006, -0.009], "rowwise")
    write_pairs(folder, 90_000, [0.008, 0.020])
    write_pairs(folder, 300_000, [0.004])
    return folder


def texts(figure):
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def bars(panel, label):
    """label -> (x, mean, low, high) of each errorbar."""
    container = next(one for one in panel.containers if one.get_label() == label)
    x, y = container.lines[0].get_data()
    ends = [segment[:, 1] for segment in container.lines[2][0].get_segments()]
    return [(a, b, *end) for a, b, end in zip(x, y, ends, strict=True)]


def test_bars_are_the_t_intervals_of_the_seeds(folder):
    figure = draw_precision(analysed(folder))
    left = figure.axes[0]
    percent = 100 * np.array([0.010, 0.012, 0.015]) / [2, 2.01, 2.02]
    half = student.ppf(0.975, 2) * percent.std(ddof=1) / np.sqrt(3)
    drawn = bars(left, "FP8 tensorwise")
    assert drawn[0][1:] == pytest.approx((percent.mean(), percent.mean() - half, percent.mean() + half), rel=1e-6)
    assert drawn[2][1:] == pytest.approx((0.2, 0.2, 0.2), rel=1e-6)         # one pair: no bar
    assert [round(x / N, 6) for x, N in zip([one[0] for one in drawn][1:], (90_000, 300_000), strict=True)] == [1, 1]
    (other,) = bars(left, "FP8 rowwise")
    assert other[0] < 40_000 < drawn[0][0] and other[1] < 0                 # two recipes of one size stand side by side


def test_null_band_and_margin_are_where_they_belong(folder):
    result = analysed(folder)
    left = draw_precision(result).axes[0]
    band = next(patch for patch in left.patches if patch.get_label().startswith("null"))
    reach = result["null"]["pooled"]["band"]
    assert reach == pytest.approx(student.ppf(0.975, 3) * result["null"]["pooled"]["sd_percent"])
    assert band.get_label() == f"null, ±{reach:.2g} %" and left.get_ylim()[1] > reach
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((-reach, reach))
    common = next(patch for patch in left.patches if patch.get_facecolor()[:3] == matplotlib.colors.to_rgb(FP8_COLOR))
    found = result["common"]["tensorwise"]["bf16"]
    assert (common.get_y(), common.get_y() + common.get_height()) == pytest.approx((found.low, found.high))
    heights = {tuple(line.get_ydata())[0] for line in left.lines if line.get_linestyle() == "--"}
    assert {-0.25, 0.25} <= heights
    words = texts(draw_precision(result))
    assert "n = 9 pairs" in words and "n = 5 runs, 3 degrees of freedom" in words and "N = params_total" in words
    assert "Margin declared before the runs" in words
    words = texts(draw_precision(analysed(folder, margin=Margin(0.25, "", False))))
    assert "Margin not declared before the runs" in words


def test_a_recipe_has_one_colour_in_both_figures_and_bands_never_cover_each_other(folder, tmp_path):
    """Also where one figure leaves a recipe out, as a law does that its points do not identify."""
    for recipe, *gaps in (("rowwise", 0.004, 0.005), ("tensorwise", 0.002, 0.003), ("auto", 0.001, 0.002), ("own", 0.003, 0.001)):
        write_pairs(tmp_path, 40_000, gaps, recipe)
    figure = draw_precision(analysed(tmp_path))
    drawn = {one.get_label().removeprefix("FP8 "): one.lines[0].get_color() for one in figure.axes[0].containers}
    for names in (["bf16", *drawn], ["bf16", "tensorwise"], ["bf16", "auto", "tensorwise"]):
        looks = {name: style["color"] for name, style in zip(names, styles(names), strict=True)}
        assert looks == {name: drawn.get(name, "#0072B2") for name in names}
    assert len({*drawn.values(), "#0072B2"}) == 5
    greys = {patch.get_facecolor()[:3] for patch in figure.axes[0].patches}
    assert all(red == green == blue for red, green, blue in greys) and "Coloured bands" not in texts(figure)
    assert "Coloured bands" in texts(draw_precision(analysed(folder)))      # two recipes


def test_a_null_band_far_beyond_the_gaps_does_not_flatten_them(tmp_path):
    result = analysed(write_pairs(tmp_path, 40_000, [0.0010, 0.0012]), margin=None)
    left = draw_precision(result).axes[0]
    assert left.get_ylim()[1] < 0.1
    assert {patch.get_facecolor()[:3] for patch in left.patches} == {matplotlib.colors.to_rgb(FP8_COLOR)}    # no grey panel
    figure = draw_precision(result)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert f"null, ±{result['null']['pooled']['band']:.2g} % (beyond the axis)" in names
    assert "Not drawn, beyond the axis: null, 95 %" in texts(figure) and "Grey" not in texts(figure)


def test_published_laws_are_drawn_as_published_and_dotted_outside_their_range(folder):
    right = draw_precision(analysed(folder)).axes[1]
    assert right.get_yscale() == "log" and right.get_xlim()[1] > 1.5e9
    lines = {line.get_label(): line for line in right.lines}
    N, nats = lines["Kumar INT8"].get_data()
    assert nats == pytest.approx(kumar_gap(N)) and N.min() >= 30e6 and N.max() <= 220e6
    N, nats = lines["Sun E4M3, block 128"].get_data()
    assert nats == pytest.approx(sun_gap(N, 20 * N)) and N.min() >= 41e6
    assert lines["Kumar INT8, no offsets"].get_ydata().min() > lines["Kumar INT8"].get_ydata().max() * 0.5
    points = [line for line in right.lines if line.get_marker() in ("s", "D")]
    assert any(line.get_ydata()[0] == pytest.approx((0.010 + 0.012 + 0.015) / 3, rel=1e-6) for line in points)
    low, high = right.get_ylim()
    assert all(low < line.get_ydata()[0] < high for line in points)


@pytest.mark.parametrize("gaps, arm", [([0.01], "bf16"), ([-0.01], "as_trained"), ([0.01, 0.02], "bf16"), ([1e-7, 2e-7], "bf16"),
                                       ([2.0, 2.5], "bf16")])
def test_few_or_extreme_pairs_are_drawn(tmp_path, gaps, arm):
    result = analysed(write_pairs(tmp_path, 50_000, gaps), arm, None)
    figure = draw_precision(result)
    assert "No margin" in texts(figure) and len(render(figure, "png")) > 10_000
    if len(gaps) == 1:
        assert "No null band" in texts(figure) and "n = 1 pair)" in texts(figure)


def overlapping(figure):
    """Pairs of tick labels of one axis, or texts of the figure, that overlap, and texts that leave the page."""
    figure.canvas.draw()
    groups = [[label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()
               and axis.get_view_interval()[0] <= label.get_position()[i] <= axis.get_view_interval()[1]]
              for panel in figure.axes for i, axis in enumerate((panel.xaxis, panel.yaxis))]
    groups += [[*figure.texts, *(panel.xaxis.label for panel in figure.axes)], [panel.yaxis.label for panel in figure.axes]]
    bad = []
    for group in groups:
        boxes = [(text.get_text()[:30], text.get_window_extent()) for text in group if text.get_text()]
        bad += [(a, b) for i, (a, one) in enumerate(boxes) for b, other in boxes[:i] if one.overlaps(other)]
        bad += [(a, "page") for a, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1]
    return bad


def test_nothing_overlaps(folder, tmp_path):
    assert overlapping(draw_precision(analysed(folder))) == []
    branches = analysed(write_branches(tmp_path, seeds=(1, 2, 3), curve=False), margin=None)
    figure = draw_precision(branches)
    assert overlapping(figure) == [] and "more tokens per parameter" in texts(figure)
    assert len({x for x, *_ in bars(figure.axes[0], "FP8 tensorwise")}) == 20
    N = np.array(sorted({row["params_total"] for row in branches["sizes"]}))
    beside = [line.get_xdata()[0] for line in figure.axes[1].lines if line.get_marker() == "s"]
    assert len(set(beside)) == 20 and all(abs(np.log(x / N)).min() <= np.log1p(ASIDE) for x in beside)
    assert "points within 5 % of it" in texts(figure)


def test_the_legend_of_many_recipes_stays_on_the_page_and_off_the_panels(tmp_path):
    for i, recipe in enumerate(("auto", "cscale", "rowwise", "rowwise_with_gw_hp", "tensorwise", "tensorwise_gw_hp")):
        write_pairs(tmp_path, 40_000, [0.001 * (i + 1), 0.0012 * (i + 2)], recipe)
    figure = draw_precision(analysed(tmp_path))
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) >= 7 and box.x1 < figure.bbox.x1
    assert all(panel.get_window_extent().y1 < box.y0 for panel in figure.axes)
    few = draw_precision(analysed(write_pairs(tmp_path / "few", 40_000, [0.01])))
    assert few.axes[0].get_position().height > figure.axes[0].get_position().height


def test_the_same_bytes_each_time(folder):
    result = analysed(folder)
    for form in ("png", "svg"):
        assert render(draw_precision(result), form) == render(draw_precision(result), form)


# ------------------------------------------------------------------------------------------------------------ a pair


def curve(folder, loss, first=1, tokens_per_step=100, **summary):
    rows = [{"kind": "train", "step": first + i, "tokens": (first + i) * tokens_per_step, "loss": float(one)}
            for i, one in enumerate(loss)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def two(tmp_path):
    for name, recipe in (("a", "bf16"), ("b", "tensorwise")):
        write_run(tmp_path / name, recipe=recipe, gap=0.02 * (name == "b"), loss=2.0, curve=False)
    return tmp_path


def found_pair(folder):
    records, _ = read_runs([folder])
    return pairs(records)[0][0]


def test_the_overlay_shows_both_arms_and_their_difference(two):
    loss = 2 + 3 / np.arange(1, 401)
    curve(two / "a", loss)
    curve(two / "b", loss + 0.01)
    figure, notes = draw_pair(found_pair(two))
    top, below = figure.axes
    assert notes == [] and len(top.lines) == 2
    tokens = top.lines[0].get_xdata()
    assert tokens[0] == 100 and tokens[-1] == 40_000
    assert top.lines[1].get_ydata() - top.lines[0].get_ydata() == pytest.approx(0.01)
    raw, smooth = below.lines[1].get_ydata(), below.lines[2].get_ydata()
    assert raw == pytest.approx(0.01) and smooth == pytest.approx(0.01)
    assert [line.get_ydata()[0] for line in below.lines[3:]] == pytest.approx([0.02, 0.03])
    assert overlapping(figure) == [] and "mean over 10 steps" in texts(figure)
    assert render(figure, "png") == render(draw_pair(found_pair(two))[0], "png")


def test_the_overlay_of_a_branch_continues_its_trunk(tmp_path):
    loss = 2 + 3 / np.arange(1, 401)
    for arm, recipe in (("bf16", "bf16"), ("fp8", "tensorwise")):
        write_run(tmp_path / f"trunk_{arm}", recipe=recipe, tokens=40_000, loss=2.0, curve=False)
        curve(tmp_path / f"trunk_{arm}", loss)
        write_run(tmp_path / arm, recipe=recipe, tokens=30_000, loss=1.9, gap=0.01 * (arm == "fp8"), curve=False,
                  parent_run=f"trunk_{arm}", parent_step=250)
        curve(tmp_path / arm, loss[250:300] - 0.1, first=251)
    records, _ = read_runs([tmp_path / "bf16", tmp_path / "fp8"])
    figure, _ = draw_pair(pairs(records)[0][0])
    x = figure.axes[0].lines[0].get_xdata()
    assert (x[0], x[-1], len(x)) == (100, 30_000, 300)      # 250 steps of the trunk, 50 of its own


def test_curves_that_are_missing_or_apart_are_a_note(two):
    figure, notes = draw_pair(found_pair(two))
    assert figure is None and "no training step in common" in notes[0]
    curve(two / "a", [3.0, 2.9])
    curve(two / "b", [3.0, 2.9], tokens_per_step=77)
    assert draw_pair(found_pair(two))[0] is None
    curve(two / "b", [3.0, 2.9])
    assert draw_pair(found_pair(two))[0] is not None        # equal curves: a flat difference
