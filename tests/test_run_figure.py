"""The figure of one run shows its rows where they belong, for whole, cut, running and hostile files."""

import gzip
import json
import math
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex

from runtime.log import Log
from scaling import figures
from scaling.dynamics import FIELDS, MARKS, TRAIN, UNDONE, draw, read_history
from scaling.figures import RC
from tests.conftest import ROOT


def row(step, kind="train", **changes):
    return {"kind": kind, "step": step, "tokens": step * 512, "loss": 2 + 4 / step, "lr": 1e-3, "tok_per_s": 5000.0 + step,
            "grad_norm": 1.0 + 0.1 * (step % 3), "step_s": 0.1, "verdict": "OK", **changes}


def event(name, step, **more):
    return {"kind": "event", "event": name, "step": step, **more}


def eventful(n=40):
    """Steps 1 to 40: a skip, a NaN, a spike that was noted, two resumes, a failed save, 21 to 24 undone and done again."""
    rows = []
    for step in range(1, n + 1):
        changes = {5: {"verdict": "SKIP", "grad_norm": 50.0}, 9: {"verdict": "SKIP", "loss": None, "grad_norm": None},
                   30: {"verdict": "SPIKE", "loss": 60.0}}.get(step, {})
        rows.append(row(step, **changes))
        if step % 10 == 0:
            rows.append({"kind": "val", "step": step, "tokens": 1, "loss": 2.5 + 4 / step, "sources": {}})
        if step in (10, 15):
            rows.append(event("resume", step))
        if step == 12:
            rows.append(event("save_failed", step, reason="No space left on device"))
        if step == 20:
            rows += [row(s, "undone", loss=float(s), verdict="ROLLBACK" if s == 24 else "SKIP" if s == 23 else "OK")
                     for s in range(21, 25)]
            rows.append({"kind": "undone_val", "step": 24, "tokens": 1, "loss": 3.3, "sources": {}})
            rows.append(event("rollback", 24, to=20))
    return rows


def write(folder, rows, end="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + end)
    return folder


def drawn(run):
    with matplotlib.rc_context(RC):
        return draw(read_history(run), run.name)


def lines(panel, color=None, marker=None):
    return [line for line in panel.get_lines() if (color is None or to_hex(line.get_color()) == to_hex(color))
            and (marker is None or line.get_marker() == marker)]


def points(found):
    return sorted((float(x), float(y)) for line in found for x, y in zip(*line.get_data(), strict=True))


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_row_is_where_it_belongs(tmp_path):
    history = read_history(write(tmp_path / "run", eventful()))
    assert list(history.train["step"]) == list(range(1, 41))
    assert math.isnan(history.train["loss"][8]) and history.train["loss"][29] == 60
    assert [list(columns["step"]) for columns in history.undone] == [[21, 22, 23, 24]]
    assert history.val.tolist() == [[s, 2.5 + 4 / s] for s in (10, 20, 30, 40)]
    assert history.undone_val.tolist() == [[24, 3.3]]
    assert {name: [r["step"] for r in rows] for name, rows in history.marks.items()} == {
        "SKIP": [5, 9, 23], "SPIKE": [30], "ROLLBACK": [24, 24], "resume": [10, 15], "save failed": [12]}
    assert history.notes == []


def test_all_verdicts_and_events_are_marked_and_told_apart(tmp_path):
    figure = drawn(write(tmp_path / "run", eventful()))
    loss, norm = figure.axes[:2]
    low, high = loss.get_ylim()
    assert legend(figure) == ["training", "validation", "undone", "SKIP (3)", "SPIKE (1)", "ROLLBACK (1)", "resume (2)",
                              "save failed (1)"]
    shapes = [tuple(MARKS[name]) for name in MARKS]
    assert len({shape for shape, _ in shapes}) == len(shapes)       # told apart without colour
    for name, expected in {"SKIP": [(5, 2.8), (9, high), (23, high)], "SPIKE": [(30, high)], "save failed": [(12, low)],
                           "resume": [(10, low), (15, low)], "ROLLBACK": [(24, low), (24, high)]}.items():
        found = points(lines(loss, *reversed(MARKS[name])))
        assert np.array(found) == pytest.approx(np.array(sorted(expected))), name
    assert points(lines(norm, *reversed(MARKS["SKIP"])))[:2] == [(5, norm.get_ylim()[1]), (9, norm.get_ylim()[1])]
    for panel in figure.axes:       # each event is a line through all
        dashed = [float(line.get_xdata()[0]) for line in panel.get_lines() if line.is_dashed()]
        assert sorted(dashed) == [10, 12, 15, 24]


def test_packed_rows_are_read_like_plain_ones(tmp_path):
    plain = write(tmp_path / "plain", eventful())
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "metrics.jsonl.gz").write_bytes(gzip.compress((plain / "metrics.jsonl").read_bytes()))
    one, other = read_history(plain), read_history(packed)
    assert len(one.train["step"]) == 40 and one.marks == other.marks
    assert all(np.array_equal(one.train[key], other.train[key], equal_nan=True) for key in one.train)


def test_events_of_one_step_stand_on_each_other(tmp_path):
    figure = drawn(write(tmp_path / "run", eventful() + [event("bad_checkpoint", 15), event("resume", 15), event("stopped", 33)]))
    low, high = figure.axes[0].get_ylim()
    heights = {name: [y for _, y in points(lines(figure.axes[0], *reversed(MARKS[name])))] for name in MARKS}
    assert heights["resume"] == [low, low, low]        # the same mark twice is one mark
    assert heights["bad checkpoint"] == pytest.approx([low + 0.07 * (high - low)]) and heights["stopped"] == [low]


def test_undone_stretches_are_faint_and_behind(tmp_path):
    figure = drawn(write(tmp_path / "run", eventful()))
    loss = figure.axes[0]
    stretch, = (line for line in lines(loss, UNDONE) if line.get_linestyle() == "-")
    assert points([stretch]) == [(s, float(s)) for s in range(21, 25)]
    solid = [line for line in lines(loss, TRAIN) if len(line.get_xdata()) > 1]
    assert solid and all(line.get_zorder() > stretch.get_zorder() for line in solid)
    assert max(line.get_linewidth() for line in solid) > stretch.get_linewidth()
    for panel in figure.axes[1:4]:
        assert [list(line.get_xdata()) for line in lines(panel, UNDONE)] == [[21, 22, 23, 24]]


def test_the_mean_is_of_the_steps_that_were_ok(tmp_path):
    rows = [row(step, loss=3.0, grad_norm=1.0) for step in range(1, 401)]
    rows[200] |= {"loss": 1000.0, "grad_norm": 1e6, "verdict": "SKIP"}
    loss, norm = drawn(write(tmp_path / "run", rows)).axes[:2]
    for panel, value in ((loss, 3.0), (norm, 1.0)):
        mean = max(lines(panel, TRAIN), key=lambda line: line.get_linewidth())
        assert np.asarray(mean.get_ydata()) == pytest.approx(np.full(399, value))
    assert loss.get_ylim()[1] < 4       # one spike does not govern the axis


def test_panels_hold_their_values_and_units(tmp_path):
    figure = drawn(write(tmp_path / "run", eventful()))
    assert [panel.get_ylabel().replace("\n", " ") for panel in figure.axes] == [
        "loss [nats/token]", "gradient norm", "learning rate", "speed [tokens/s]"]
    assert figure.axes[3].get_xlabel() == "step"
    assert figure._suptitle.get_text() == "Training of run (n = 1 run, steps 1 to 40)"
    rate = lines(figure.axes[2], TRAIN)[0]
    assert set(rate.get_ydata()) == {1e-3}


def test_a_gpus_row_has_percent_and_watts(tmp_path):
    rows = [row(step, gpu_mem_pct=70.0, gpu_util_pct=95.0, gpu_power_w=600.0) for step in range(1, 9)]
    rows[3] = row(4)    # a step without a sample
    figure = drawn(write(tmp_path / "run", rows))
    left, right = figure.axes[4:]
    assert (left.get_ylabel(), right.get_ylabel()) == ("GPU\n[%]", "power [W]")
    assert [np.unique(np.round(line.get_ydata(), 9)) for line in left.get_lines()] == [95.0, 70.0]
    assert right.get_lines()[0].get_ydata() == pytest.approx(np.full(7, 600.0))
    partly = drawn(write(tmp_path / "partly", [row(step, gpu_mem_pct=70.0) for step in range(1, 9)]))      # all this GPU tells
    assert [text.get_text() for text in partly.axes[4].get_legend().get_texts()] == ["memory"]


@pytest.mark.parametrize("build", [eventful, lambda: eventful(8), lambda: [row(1)], lambda: [row(400), row(401)],
                                   lambda: [row(s, "undone") for s in (1, 2)] + [event("rollback", 2, to=0)],
                                   lambda: [row(s, loss=None, grad_norm=None, verdict="SKIP") for s in (1, 2, 3)],
                                   lambda: [row(s, loss=2.0, grad_norm=0.0, lr=0.0, tok_per_s=0.0) for s in (1, 2, 3)],
                                   lambda: eventful() + [event(f"odd {i} $x_$ \\frac", 20) for i in range(12)]])
def test_words_stay_on_the_page_and_off_each_other(tmp_path, build):
    figure = drawn(write(tmp_path / "a_run_of_a_long_name", build()))
    renderer = figure.canvas.get_renderer()
    page = figure.bbox
    texts = [*figure.texts, figure.legends[0], *(panel.yaxis.label for panel in figure.axes)]
    boxes = [text.get_window_extent(renderer) for text in texts]
    boxes += [label.get_window_extent(renderer) for panel in figure.axes for label in panel.get_yticklabels()
              if label.get_text() and panel.get_window_extent().y0 - 2 <= label.get_window_extent().y0 + 5
              <= panel.get_window_extent().y1 + 5]
    for i, box in enumerate(boxes):
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, i
        for j, other in enumerate(boxes[:i]):
            assert not box.overlaps(other), (i, j)
    top = figure.axes[0].get_window_extent()
    assert figure.legends[0].get_window_extent(renderer).y0 >= top.y1 - 1


def test_a_run_that_is_still_going_or_was_cut_is_drawn(tmp_path, capsys):
    run = write(tmp_path / "run", eventful())
    whole = (run / "metrics.jsonl").read_bytes()
    for cut in (len(whole) - 30, 300):
        (run / "metrics.jsonl").write_bytes(whole[:cut])
        assert figures.main([str(run)]) == 0
        assert capsys.readouterr() == (f"wrote {run}/figures/: run.png\n", "")      # a cut last line is no damage
    (run / "metrics.jsonl").write_bytes(whole[:700] + b"\xff" + whole[701:])
    assert figures.main([str(run)]) == 0
    assert "left out 1 line that cannot be read, the first is line " in capsys.readouterr().out


HOSTILE = [
    '{"kind": "train", "step": 41, "loss": "3"}', '{"kind": "train", "step": 41, "loss": true, "lr": {}}',
    '{"kind": "train", "step": 41, "loss": 1e999, "grad_norm": -1e308}', '{"kind": "event", "event": {}, "step": 41}',
    '{"kind": "train", "step": 41, "loss": [1], "verdict": 3}', '{"kind": "event", "event": "a\\nb\\u0000", "step": 3}',
    '{"kind": "train", "step": 41, "verdict": "$\\\\frac{$"}', '{"kind": "val", "step": 41, "loss": null}',
    '{"kind": "event", "step": 41}', '{"kind": "new", "step": 41}', '{"kind": "train", "step": 41, "loss": NaN}',
    '{"kind": "train", "step": 41, "loss": %s}' % ("9" * 400)]


def test_hostile_rows_draw_or_are_left_out(tmp_path, recwarn):
    run = write(tmp_path / "run", eventful())
    with open(run / "metrics.jsonl", "a") as file:
        for step, junk in enumerate(HOSTILE, 41):
            file.write(junk.replace("41", str(step)) + "\n")
    assert not np.isfinite(read_history(run).train["loss"][40:]).any()
    figure = drawn(run)
    assert max(figure.axes[0].get_xlim()) < 41 + len(HOSTILE) + 2
    assert {"3 (1)", "$\\frac{$ (1)"} & set(legend(figure)) == {"$\\frac{$ (1)"}
    assert not [w for w in recwarn if "Glyph" not in str(w.message)]


@pytest.mark.parametrize("content, words", [
    (None, "has no metrics.jsonl: expected the folder of a run, such as out/demo_s_fp8"),
    ("", "has no step to draw yet"), ('{"kind": "tr', "has no step to draw yet"),
    (json.dumps(event("resume", 3)) + "\n", "has no step to draw yet"),
    ('[1]\n7\nnull\n{"step": -1, "kind": "train"}\n{"step": 1.5, "kind": "train"}\n' + '{"kind": "train", "step": %s}\n' % 2**60,
     "has no step to draw yet")])
def test_a_folder_without_a_step_gets_a_sentence(tmp_path, capsys, content, words):
    run = tmp_path / "run"
    run.mkdir()
    if content is not None:
        (run / "metrics.jsonl").write_text(content)
    assert figures.main([str(run)]) == 2
    out, err = capsys.readouterr()
    assert words in err and err.startswith("scaling/figures.py: ") and err.count("\n") == 1 and out == ""
    assert not (run / "figures").exists()


@pytest.mark.parametrize("arguments, words", [
    (["out/nothing"], "out/nothing is no folder: expected the folder of a run"), (["a", "b"], "'b' is one word too many"),
    (["--fp8"], "run is missing"), (["--speed", "a"], "there is no key 'speed'"), (["x=1"], "there is no key 'x'"),
    (["a", "--fp8", "b"], "'b' is one word too many"), ([], "run is missing: give run=VALUE, folder of a run, such as out/RUN")])
def test_mistakes_get_a_sentence(capsys, arguments, words):
    assert figures.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_gets_a_sentence(tmp_path, capsys):
    run = write(tmp_path / "run", eventful())
    (tmp_path / "file").write_text("")
    assert figures.main([str(run), f"out={tmp_path}/file/figures"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_same_bytes_each_time_and_no_setting_left_behind(tmp_path):
    run, before = write(tmp_path / "run", eventful()), dict(matplotlib.rcParams)
    for name in ("one", "two"):
        assert figures.main([str(run), f"out={tmp_path / name}"]) == 0
    assert (tmp_path / "one" / "run.png").read_bytes() == (tmp_path / "two" / "run.png").read_bytes()
    assert dict(matplotlib.rcParams) == before


def test_a_repeated_step_counts_as_done_last(tmp_path):
    history = read_history(write(tmp_path / "run", [row(1), row(2), row(3), row(2, loss=9.0), row(3, loss=8.0)]))
    assert list(history.train["loss"]) == [6.0, 9.0, 8.0]


def test_two_rollbacks_leave_two_stretches(tmp_path):
    rows = [row(1), row(2, "undone"), event("rollback", 2, to=1),
            row(2, "undone"), row(3, "undone"), event("rollback", 3, to=1), row(2)]
    history = read_history(write(tmp_path / "run", rows))
    assert [list(columns["step"]) for columns in history.undone] == [[2], [2, 3]]
    assert "ROLLBACK (2)" in legend(drawn(tmp_path / "run"))


def test_what_the_log_writes_is_what_the_figure_reads(tiny):
    tiny.run_dir.mkdir(parents=True)
    log = Log(tiny, 0, 6)
    for step in range(1, 5):
        changes = {"verdict": "SKIP", "loss": float("nan")} if step == 2 else {}
        log.step({k: v for k, v in row(step, **changes).items() if k != "kind"})
    log.validation({"step": 4, "tokens": 1, "loss": 2.0, "sources": {}})
    log.event({"event": "save_failed", "step": 4})
    log.roll_back(3, {"event": "rollback", "step": 4, "to": 3})
    log.close()
    history = read_history(tiny.run_dir)
    assert list(history.train["step"]) == [1, 2, 3] and list(history.undone[0]["step"]) == [4]
    assert sorted(history.marks) == ["ROLLBACK", "SKIP", "save failed"]
    assert set(FIELDS) < set(history.train)


def test_it_reads_without_torch():
    code = "import sys, scaling.dynamics; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
