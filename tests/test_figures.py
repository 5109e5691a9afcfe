"""The figure carries its labels without collisions, for every shape of study that fit.py can hand to it."""

import itertools

import numpy as np
import pytest
from scaling_runs import write_ladder, write_run

from scaling import fit as cli
from scaling.figures import _nice_ticks, _smooth, draw, human, render
from scaling.precision import pairs
from scaling.records import read_runs


def figure_of(folder, ray=(20.0, 20.0)):
    records, _ = read_runs([folder])
    recipes = sorted({record.recipe for record in records}, key=lambda recipe: (recipe != "bf16", recipe))
    groups = [cli.fit_group([r for r in records if r.recipe == recipe], "loss_bf16", ray) for recipe in recipes]
    return draw(groups, pairs(records)[0], "loss_bf16", ray), groups


def test_human():
    assert [human(n) for n in (950, 38_912, 999_900, 124_400_000, 1_540_000_000, 2e12)] == [
        "950", "38.9k", "1M", "124M", "1.54B", "2T"]


def test_smoothing_keeps_a_straight_line_and_the_mean():
    x = np.arange(1.0, 2001.0)
    smooth_x, smooth_y = _smooth(x, 3 * x)
    assert np.allclose(smooth_y, 3 * smooth_x) and len(smooth_x) <= 80
    assert [len(values) for values in _smooth(np.array([]), np.array([]))] == [0, 0]
    assert [values.tolist() for values in _smooth(np.array([5.0]), np.array([2.0]))] == [[5.0], [2.0]]


@pytest.mark.parametrize(("low", "high"), [(1.6, 2.4), (2.31, 2.36), (1.0, 11.0), (0.9, 1.3)])
def test_loss_axis_has_round_labels(low, high):
    from matplotlib.figure import Figure
    axis = Figure().subplots().yaxis
    _nice_ticks(axis, low, high)
    ticks, labels = axis.get_major_locator()(), axis.get_major_formatter().seq
    assert 2 <= len(ticks) <= 8 and len(set(labels)) == len(labels)
    assert np.allclose([float(label) for label in labels], ticks)
    assert ticks[0] >= low - 1e-9 and ticks[-1] <= high + 1e-9


@pytest.mark.parametrize("study", ["three", "six", "tiny_gaps", "three_recipes", "bf16_alone", "one_run"])
def test_no_label_collides_or_leaves_the_page(tmp_path, study):
    if study == "bf16_alone":
        for i, params in enumerate((40_000, 110_000, 190_000)):
            write_run(tmp_path / str(i), params=params, curve=False)
    elif study == "one_run":
        write_run(tmp_path / "a")
    else:
        changes = {"six": {"sizes": (39_000, 60_000, 107_000, 184_000, 400_000, 900_000)}, "tiny_gaps": {"gap": -0.005}}
        write_ladder(tmp_path, **changes.get(study, {}))     # a small negative gap has the widest tick labels
    if study == "three_recipes":
        for letter, params in zip("xyz", (38_912, 106_624, 184_320), strict=True):
            write_run(tmp_path / letter, recipe="rowwise", params=params, gap=0.004)
    figure, groups = figure_of(tmp_path)
    renderer = figure.canvas.renderer
    page = figure.bbox
    panels = figure.axes
    assert len(panels) == (3 if study in ("bf16_alone", "one_run") else 6)
    texts = [*figure.texts, figure._suptitle, *figure.legends[0].get_texts()]
    for panel in panels:
        texts += [panel.xaxis.label, panel.yaxis.label]
        for axis in (panel.xaxis, panel.yaxis):     # ticks beyond the view have labels too, which are not drawn
            low, high = axis.get_view_interval()
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in dict.fromkeys(texts)
             if text.get_visible() and text.get_text()]
    for text, box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text
    for (one, box), (other, its) in itertools.combinations(boxes, 2):
        assert not box.overlaps(its) or box.x1 - its.x0 < 0.5 or its.x1 - box.x0 < 0.5, (one, other)
    labels = [panel.get_xlabel() for panel in panels]
    assert labels[-3:] == ["compute C [FLOPs]", "training tokens D", "parameters N"]
    assert panels[0].get_ylabel() == "validation loss [nats/token]"
    assert all(panel.get_xscale() == "log" and panel.get_yscale() == "log" for panel in panels[:3])
    assert len({text.get_text() for text in figure.legends[0].get_texts()}) == len(groups)


def test_caption_and_title(tmp_path):
    write_ladder(tmp_path)
    figure, _ = figure_of(tmp_path)
    caption = figure.texts[-1].get_text().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")
    assert caption.startswith("One ray = one curve: at 20 tokens per parameter in every run")
    assert "N = params_total, C = flops_per_token × D." in caption and "Faint: training loss." in caption
    assert figure._suptitle.get_text() == "Loss after training in BF16 or FP8 tensorwise, evaluated in BF16 (n = 3 each)"
    records, _ = read_runs([tmp_path])
    groups = [cli.fit_group(records[::2], "loss_bf16", (10, 40))]
    caption = draw(groups, [], "loss_bf16", None).texts[-1].get_text()
    assert "One ray" not in caption and "Lower row" not in caption


def test_panels_show_the_runs_and_their_law(tmp_path):
    write_ladder(tmp_path)
    figure, groups = figure_of(tmp_path)
    for panel, axis in zip(figure.axes[:3], "CDN", strict=True):
        drawn = [line.get_xydata() for line in panel.get_lines()]
        for group in groups:
            points = np.column_stack([group.x[axis], group.loss])
            assert any(data.shape == points.shape and np.allclose(data, points) for data in drawn)
            line = next(data for data in drawn if len(data) == 200)
            low, high = panel.get_ylim()
            assert low < line[:, 1].min() and line[:, 1].max() < high
    faint = [line for line in figure.axes[0].get_lines() if line.get_alpha() == 0.35]
    assert len(faint) == 6


def test_drawing_is_deterministic_and_leaves_no_settings(tmp_path):
    import matplotlib
    before = dict(matplotlib.rcParams)
    write_ladder(tmp_path)
    figure, groups = figure_of(tmp_path)
    again = draw(groups, pairs(read_runs([tmp_path])[0])[0], "loss_bf16", (20.0, 20.0))
    for form in ("png", "svg"):
        assert render(figure, form) == render(again, form)
    assert dict(matplotlib.rcParams) == before
