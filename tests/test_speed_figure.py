"""The figures of the speed benchmark, from invented rows, drawn into temporary folders alone."""

import copy
import math
import random

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from bench import speed_figure
from bench.speed_rows import valid
from tests.speed_cases import H100, board, cell, run_row


def words(figure):
    figure.canvas.draw()
    return [t.get_text() for t in figure.findobj(Text) if t.get_visible() and t.get_text()]


def test_three_figures_where_there_is_something_to_draw(tmp_path):
    folder = tmp_path / "new"
    assert speed_figure.figures([], folder) == [] and not folder.exists()
    bad = cell(valid=False)
    assert speed_figure.figures([run_row(), bad], folder) == [] and not folder.exists()
    drawn = speed_figure.figures(board(), folder)
    assert [path.name for path in drawn] == ["h100_speed.png", "h100_step_time.png", "h100_start_up.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn) and len(list(folder.iterdir())) == 3
    alone = speed_figure.figures([run_row(gpu=None, suite="toy"), cell(buckets=None, mfu_bf16=None, tcu=None)], tmp_path)
    assert [path.name for path in alone] == ["toy_speed.png"], "no profile, nothing to compare a start with"


def test_the_speed_figure_holds_each_cell_once_with_its_numbers():
    cells = valid([*board(), cell(tok_per_s=100e3, micro_batch=32), cell(label="amax", speed=9.0, valid=False)])
    shown = words(speed_figure._speed(cells))
    assert shown.count("bf16") == 4 and not any("amax" in word for word in shown)
    assert " 576k  1.20x" in shown and " 480k" in shown and " 408 (41%)" in shown and " 100k" not in shown
    assert "nanochat_d26 fp8" in shown and "125m, T=1024" in shown and "mfu_bf16 [% of 989.4 TFLOP/s]" in shown
    assert any("26 cells of 1 run" in word and H100 in word for word in shown)


def test_nothing_on_the_page_overlaps_or_sticks_out():
    for draw in (speed_figure._speed, speed_figure._step_time, speed_figure._start_up):
        with matplotlib.rc_context(speed_figure.RC):
            figure = draw(valid([*board(), cell(label="rowwise_with_gw_hp+kernels+head", speed=1.3)]))
        FigureCanvasAgg(figure).draw()
        beyond = set()      # labels of ticks past an axis' end, which are not drawn
        for panel in [each for outer in figure.axes for each in (outer, *outer.child_axes)]:
            frame = panel.get_window_extent()
            for label in panel.get_xticklabels() + panel.get_yticklabels():
                x, y = label.get_window_extent().get_points().mean(axis=0)
                if not (frame.x0 - 1 < x < frame.x1 + 1 or frame.y0 - 1 < y < frame.y1 + 1):
                    beyond.add(label)
        texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in beyond]
        boxes = [t.get_window_extent() for t in texts]
        for i, box in enumerate(boxes):
            assert box.x0 >= -1 and box.x1 <= figure.bbox.width + 1, texts[i]
            assert box.y0 >= -1 and box.y1 <= figure.bbox.height + 1, texts[i]
            for j in range(i):
                assert not box.shrunk(0.9, 0.8).overlaps(boxes[j].shrunk(0.9, 0.8)), (texts[i], texts[j])


def test_parts_of_a_step_add_up_to_the_step():
    one = valid([run_row(), cell()])[0]
    parts = speed_figure._buckets(one)
    assert sum(parts.values()) == pytest.approx(1e6 / 480e3), "microseconds per token"
    assert parts["idle"] / sum(parts.values()) == pytest.approx(0.02) and "idle" not in one["buckets"]
    assert speed_figure._buckets(one | {"buckets": one["buckets"] | {"new": 0.01}})["other"] > parts["other"]
    for damaged in (None, {}, {"matmul": "x"}, {"matmul": -1.0}, {"matmul": 0.0}, {"matmul": math.nan}):
        assert speed_figure._buckets(one | {"buckets": damaged}) is None


def test_break_even_by_hand():
    slow, fast = ({"label": "x", "cold_s": c, "step_s": s} for c, s in ((10.0, 1.0), (40.0, 0.75)))
    assert speed_figure.break_even(slow, fast) == 120 and 10 + 120 * 1.0 == 40 + 120 * 0.75
    assert speed_figure.break_even(fast, slow) is None and speed_figure.break_even(slow, slow) is None
    assert speed_figure.break_even(slow, fast | {"cold_s": 0.0}) == 1


def test_start_up_compares_cells_of_one_run():
    rows = [run_row(), run_row("two"), cell("125m", "bf16_eager", 0.5), cell(), cell(label="tensorwise", speed=1.2),
            cell(run="two", speed=2.0)]
    arms = speed_figure._arms(valid(rows))
    assert [(arm["label"], arm["run"]) for arm in arms] == [("bf16_eager", "one"), ("bf16", "one"), ("tensorwise", "one")]
    assert any("tensorwise: ahead of bf16 from step 33" in word for word in words(speed_figure._start_up(valid(rows))))
    assert speed_figure._start_up(valid([run_row(), run_row("two"), cell(), cell(label="tensorwise", run="two")])) is None
    never = words(speed_figure._start_up(valid([run_row(), cell(), cell(label="tensorwise", speed=0.9)])))
    assert any("tensorwise: never ahead of bf16" in word for word in never)


def test_damaged_rows_cost_no_figure():
    rng = random.Random(0)
    for _ in range(2):
        broken = copy.deepcopy(board())
        for row in rng.sample(broken, 20):
            row[rng.choice(list(row))] = rng.choice([None, [], {}, "x", -1, 1e400, {"median": None}])
        cells = valid(broken)
        assert speed_figure._speed(cells) and speed_figure._step_time(cells)
        speed_figure._start_up(cells)
