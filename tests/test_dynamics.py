"""scaling/dynamics.py: the figures of one run show what its rows say, for whole, cut, running and damaged files."""

import json
import math
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from scaling_runs import write_run

from runtime.cli import UserError
from runtime.log import Log
from scaling import figures
from scaling.dynamics import (
    BLUE,
    FIELDS,
    GREY,
    MARKS,
    draw,
    draw_gap,
    draw_outliers,
    draw_pair,
    draw_scales,
    draw_underflow,
    read_history,
    read_probe,
    table,
)
from scaling.pairs import pairs
from scaling.records import read_runs
from tests.conftest import ROOT

LINEARS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(panel):
    return [line.get_xydata() for line in panel.get_lines()]


# ------------------------------------------------------------------------------------------------------- a run's training


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


def write(folder, rows):
    return write_rows(folder / "metrics.jsonl", rows).parent


def drawn(run):
    with matplotlib.rc_context(figures.RC):
        return draw(read_history(run), run.name)


def points(panel, shape, color):
    found = [line for line in panel.get_lines() if line.get_marker() == shape and to_hex(line.get_color()) == to_hex(color)]
    return sorted((float(x), float(y)) for line in found for x, y in line.get_xydata())


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_row_is_where_it_belongs(tmp_path):
    history = read_history(write(tmp_path / "run", eventful()))
    assert list(history.train["step"]) == list(range(1, 41)) and set(FIELDS) < set(history.train)
    assert math.isnan(history.train["loss"][8]) and history.train["loss"][29] == 60
    assert [list(columns["step"]) for columns in history.undone] == [[21, 22, 23, 24]]
    assert history.val.tolist() == [[s, 2.5 + 4 / s] for s in (10, 20, 30, 40)] and history.undone_val.tolist() == [[24, 3.3]]
    assert {name: [r["step"] for r in rows] for name, rows in history.marks.items()} == {
        "SKIP": [5, 9, 23], "SPIKE": [30], "ROLLBACK": [24, 24], "resume": [10, 15], "save failed": [12]}
    history = read_history(write(tmp_path / "again", [row(1), row(2, loss=9.0), row(3), row(2), row(3, loss=8.0)]))
    assert list(history.train["loss"]) == [6.0, 4.0, 8.0] and history.notes == []     # a repeated step counts as done last
    history = read_history(write(tmp_path / "two", [
        row(1), row(2, "undone"), event("rollback", 2, to=1), row(2, "undone"), row(3, "undone"), event("rollback", 3, to=1)]))
    assert [list(columns["step"]) for columns in history.undone] == [[2], [2, 3]]


def test_what_the_log_writes_is_what_the_figure_reads(tiny):
    tiny.run_dir.mkdir(parents=True)
    log = Log(tiny, 0, 6)
    for step in range(1, 5):
        changes = {"verdict": "SKIP", "loss": float("nan")} if step == 2 else {}
        log.step({k: v for k, v in row(step, **changes).items() if k != "kind"})
    log.event({"event": "save_failed", "step": 4})
    log.roll_back(3, {"event": "rollback", "step": 4, "to": 3})
    log.close()
    history = read_history(tiny.run_dir)
    assert list(history.train["step"]) == [1, 2, 3] and list(history.undone[0]["step"]) == [4]
    assert sorted(history.marks) == ["ROLLBACK", "SKIP", "save failed"]


def test_all_verdicts_and_events_are_marked_and_told_apart(tmp_path):
    figure = drawn(write(tmp_path / "run", eventful()))
    loss, norm = figure.axes[:2]
    low, high = loss.get_ylim()
    assert legend(figure) == ["training", "validation", "undone", "SKIP (3)", "SPIKE (1)", "ROLLBACK (1)", "resume (2)",
                              "save failed (1)"]
    assert len({shape for shape, _ in MARKS.values()}) == len(MARKS)       # told apart without colour
    for name, expected in {"SKIP": [(5, 2.8), (9, high), (23, high)], "SPIKE": [(30, high)], "save failed": [(12, low)],
                           "resume": [(10, low), (15, low)], "ROLLBACK": [(24, low), (24, high)]}.items():
        assert np.array(points(loss, *MARKS[name])) == pytest.approx(np.array(sorted(expected))), name
    assert points(norm, *MARKS["SKIP"])[:2] == [(5, norm.get_ylim()[1]), (9, norm.get_ylim()[1])]
    for panel in figure.axes:       # each event is a line through all; an undone stretch is grey
        assert sorted(float(line.get_xdata()[0]) for line in panel.get_lines() if line.is_dashed()) == [10, 12, 15, 24]
        assert [list(line.get_xdata()) for line in panel.get_lines()
                if to_hex(line.get_color()) == GREY and len(line.get_xdata()) > 1] == [[21, 22, 23, 24]]
    assert [panel.get_ylabel().replace("\n", " ") for panel in figure.axes] == [
        "loss [nats/token]", "gradient norm", "learning rate", "speed [tokens/s]"]
    assert figure.axes[3].get_xlabel() == "step"
    assert figure.legends[0].get_title().get_text() == "Training of run (n = 1 run, steps 1 to 40)"


def test_the_mean_is_of_the_steps_that_were_ok_and_a_gpu_has_percent_and_watts(tmp_path):
    rows = [row(step, loss=3.0, grad_norm=1.0, gpu_mem_pct=70.0, gpu_util_pct=95.0, gpu_power_w=600.0) for step in range(1, 401)]
    rows[200] |= {"loss": 1000.0, "grad_norm": 1e6, "verdict": "SKIP", "gpu_power_w": None}
    loss, norm, *_, left, right = drawn(write(tmp_path / "run", rows)).axes
    for panel, value in ((loss, 3.0), (norm, 1.0)):
        mean = max((line for line in panel.get_lines() if line.get_color() == BLUE), key=lambda line: line.get_linewidth())
        assert np.asarray(mean.get_ydata()) == pytest.approx(np.full(399, value))
    assert loss.get_ylim()[1] < 4       # one spike does not govern the axis
    assert (left.get_ylabel(), right.get_ylabel()) == ("GPU\n[%]", "power [W]")
    assert [np.unique(np.round(line.get_ydata(), 9)) for line in left.get_lines()] == [95.0, 70.0]
    assert right.get_lines()[0].get_ydata() == pytest.approx(np.full(399, 600.0))


@pytest.mark.parametrize("rows", [
    [row(1)], [row(400), row(401)], [row(s, "undone") for s in (1, 2)] + [event("rollback", 2, to=0)],
    [row(s, loss=None, grad_norm=None, verdict="SKIP") for s in (1, 2, 3)],
    [row(s, loss=2.0, grad_norm=0.0, lr=0.0, tok_per_s=0.0) for s in (1, 2, 3)],
    eventful() + [event(f"odd {i} $x_$ \\frac", 20) for i in range(12)]])
def test_odd_runs_are_drawn(tmp_path, rows):
    assert drawn(write(tmp_path / "a_run_$of_a_long_name", rows)).axes


def test_a_run_that_is_still_going_cut_or_damaged_is_drawn(tmp_path, capsys):
    run, before = write(tmp_path / "run", eventful()), dict(matplotlib.rcParams)
    whole = (run / "metrics.jsonl").read_bytes()
    damage = b'\xff{"kind": "tr\n[1]\n{"kind": "train", "step": -1}\n'
    left_out = f"{run}/metrics.jsonl: left out 3 lines that cannot be read\n"
    for content, note in ((whole[:-30], ""), (whole[:300], ""), (damage + whole, left_out)):    # a cut last line is no damage
        (run / "metrics.jsonl").write_bytes(content)
        assert figures.main([str(run)]) == 0
        assert capsys.readouterr() == (f"{note}wrote {run}/figures/: run.png\n", "")
    first = (run / "figures/run.png").read_bytes()
    assert figures.main([str(run), f"out={tmp_path}/two"]) == 0
    assert (tmp_path / "two/run.png").read_bytes() == first and dict(matplotlib.rcParams) == before


HOSTILE = ['{"kind": "train", "step": 41, "loss": "3", "lr": {}}', '{"kind": "train", "step": 41, "loss": 1e999}',
           '{"kind": "train", "step": 41, "verdict": "$\\\\frac{$"}', '{"kind": "train", "step": 41, "loss": %s}' % ("9" * 400)]


def test_values_that_are_no_losses_are_left_out(tmp_path):
    run = write(tmp_path / "run", eventful())
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(junk.replace("41", str(step)) + "\n" for step, junk in enumerate(HOSTILE, 41))
    assert not np.isfinite(read_history(run).train["loss"][40:]).any() and "$\\frac{$ (1)" in legend(drawn(run))


# ------------------------------------------------------------------------------------------------------- what FP8 did inside


def operand(name, block, kind, step, last, rows=1):
    """A known function: scales are powers of two that fall with depth, underflow grows with the step."""
    base = {"weight": 12, "activation": 6, "gradient": 20}[name] + kind - 0.25 * block + 2 * step / last
    share = {"weight": 1e-5, "activation": 1e-4, "gradient": 1e-2}[name] * (1 + block) * step / last
    return {"amax": 448 / 2**base, "scale_min": 2**(base - rows + 1), "scale": 2.0**base, "scale_max": 2**(base + rows - 1),
            "underflow": share, "saturated": 1e-6 * kind * share, "error": 0.02 + 0.001 * kind}


def linear_row(step, block, kind, last, rows=1, **changes):
    operands = {name: operand(name, block, kind, step, last, rows) for name in ("weight", "activation", "gradient")}
    return {"kind": "linear", "step": step, "layer": f"layers.{block}.{LINEARS[kind]}", "recipe": "tensorwise", **operands,
            **changes}


def block_row(step, block, last, **changes):
    return {"kind": "block", "step": step, "block": block, "attention_logit_max": 5 + 20 * block * step / last,
            "swiglu_amax": 8.0 + 2.0**(block * step / last), "swiglu_rms": 0.5, **changes}


def rows_of(blocks=3, steps=(100, 200, 300), linear=True, rows=1):
    return [row for step in steps for block in range(blocks) for row in [
        *(linear_row(step, block, kind, steps[-1], rows) for kind in range(4) if linear), block_row(step, block, steps[-1])]]


def probe_of(folder, rows):
    return read_probe(write_rows(folder / "probe.jsonl", rows))


def test_rows_become_arrays_and_the_last_of_a_repeated_step_counts(tmp_path):
    wrong = linear_row(200, 1, 2, 300)
    wrong["weight"] = {**wrong["weight"], "scale": 1.0}
    probe, notes = probe_of(tmp_path, [wrong, block_row(200, 1, 300, swiglu_rms=9), *rows_of()[::-1], linear_row(400, 0, 0, 300)])
    assert notes == [] and probe.recipe == "tensorwise" and probe.blocks == [0, 1, 2]
    assert probe.steps.tolist() == [100, 200, 300, 400] and probe.last == 2        # the last one that has every layer
    assert probe.layers == [f"layers.{block}.{name}" for block in range(3) for name in LINEARS]
    for name in ("weight", "activation", "gradient"):
        for field in ("scale_min", "scale", "scale_max", "underflow", "saturated", "error"):
            want = [[operand(name, block, kind, step, 300)[field] for step in (100, 200, 300)]
                    for block in range(3) for kind in range(4)]
            np.testing.assert_array_equal(probe.linear[name, field][:, :3], want)
    assert probe.block["swiglu_rms"].tolist() == [[0.5] * 3] * 3
    probe, _ = probe_of(tmp_path, [linear_row(1, 10, 0, 1), linear_row(1, 2, 0, 1), linear_row(1, 0, 0, 1, layer="head")])
    assert probe.layers == ["layers.2.attn.qkv", "layers.10.attn.qkv", "head"]     # by number, the head last


def test_null_is_a_gap_and_a_torn_line_is_left_out(tmp_path):
    row = linear_row(100, 0, 0, 100)
    row["weight"] |= {"scale": None, "error": None}
    row["activation"] |= dict.fromkeys(("scale_min", "scale", "scale_max"))
    path = write_rows(tmp_path / "probe.jsonl", [row, block_row(100, 0, 100, attention_logit_max=None)])
    path.write_text('{"kind": "li{"kind": "block"}\n' + path.read_text() + '{"kind": "linear", "ste')
    probe, notes = read_probe(path)
    assert notes == [f"{path}: left out 1 line that cannot be read"]
    assert np.isnan(probe.linear["weight", "scale"]).all() and np.isnan(probe.block["attention_logit_max"]).all()
    assert "no scale: these stay in BF16" in [text.get_text() for text in draw_scales(probe, {}, "run").axes[1].texts]
    assert "| qkv | weight | 0.001 | 0 | - |" in table(probe)


@pytest.mark.parametrize("change", [{"kind": "other"}, {"step": None}, {"weight": 3}, {"weight": {"amax": 1}}])
def test_rows_of_other_code_are_refused(tmp_path, change):
    with pytest.raises(UserError, match="no row of a probe"):
        probe_of(tmp_path, [linear_row(100, 0, 0, 100), linear_row(100, 0, 0, 100) | change])


def test_scales_are_drawn_where_the_rows_put_them(tmp_path):
    probe, _ = probe_of(tmp_path, rows_of(rows=3))
    inference, _ = probe_of(tmp_path / "eval", [linear_row(300, block, kind, 300, gradient=None)
                                                for block in range(3) for kind in range(4)])
    figure = draw_scales(probe, {"rowwise": inference}, "run")
    for column, name in enumerate(("weight", "activation", "gradient")):
        top, bottom = figure.axes[column], figure.axes[3 + column]
        for kind in range(4):
            want = [math.log2(operand(name, block, kind, 300, 300)["scale"]) for block in range(3)]
            found = [line for line in lines_of(top) if np.allclose(line[:, 1], want)]
            assert len(found) == (1 if name == "gradient" else 2)       # training, and inference where it has the operand
            assert np.allclose(np.round(found[0][:, 0]), [0, 1, 2])
        whiskers = np.concatenate([segment for group in top.collections for segment in group.get_segments()])
        assert np.allclose(sorted(whiskers[1::2, 1] - whiskers[::2, 1]), 4)     # two octaves either way
        medians = [np.median([math.log2(operand(name, b, k, step, 300)["scale"]) for b in range(3) for k in range(4)])
                   for step in (100, 200, 300)]
        assert any(len(line) == 3 and np.allclose(line, np.column_stack([(100, 200, 300), medians])) for line in lines_of(bottom))
    assert legend(figure) == ["qkv", "out", "gate_up", "down", "inference, rowwise"]


def test_heat_maps_hold_the_shares_and_show_zero_apart(tmp_path):
    figure = draw_underflow(probe_of(tmp_path, rows_of())[0], "run")
    for row, share in enumerate(("underflow", "saturated")):
        for column, name in enumerate(("weight", "activation", "gradient")):
            zero, positive = figure.axes[3 * row + column].collections[:2]
            want = np.array([[operand(name, block, kind, step, 300)[share] for step in (100, 200, 300)]
                             for block in range(3) for kind in range(4)])
            found = positive.get_array().reshape(want.shape)
            assert np.allclose(found.filled(0), 100 * want) and (np.ma.getmaskarray(found) == (want == 0)).all()
            assert (~np.ma.getmaskarray(zero.get_array().reshape(want.shape)) == (want == 0)).all()
    assert [axes.get_ylabel() for axes in figure.axes[6:]] == ["underflow [% of values]", "saturated [% of values]"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "1", "2"]


def test_outliers_are_drawn_with_gaps(tmp_path):
    rows = [block_row(step, block, 300, **({"swiglu_amax": None} if (step, block) == (200, 1) else {}))
            for step in (100, 200, 300) for block in range(12)]
    logit, ratio = draw_outliers(probe_of(tmp_path, rows)[0], "run").axes[:2]
    want = [[5 + 20 * block * step / 300 for step in (100, 200, 300)] for block in range(12)]
    assert np.allclose([line[:, 1] for line in lines_of(logit)], want)
    shown = np.array([line[:, 1] for line in lines_of(ratio)])
    assert np.isnan(shown[1]).tolist() == [False, True, False] and math.isclose(shown[5][2], (8 + 2.0**5) / 0.5)


# ----------------------------------------------------------------------------------------------------- a gap over training


def write_pair(folder, *, seeds=(1337, 7), gap=0.02, steps=400):
    """An FP8 run, its BF16 partner and one more BF16 run per further seed; losses differ by known amounts."""
    rng = np.random.default_rng(0)
    shared = rng.normal(0, 0.05, steps)
    names = [("run_fp8", "tensorwise", seeds[0], gap)] + [(f"run_bf16_{seed}", "bf16", seed, 0.0) for seed in seeds]
    for index, (name, recipe, seed, extra) in enumerate(names):
        write_run(folder / name, recipe=recipe, seed=seed, gap=extra, curve=False, tokens_per_step=1024, lr_peak=1e-3)
        noise = shared if seed == seeds[0] else rng.normal(0, 0.05, steps) + 0.005 * index
        loss = [2 + 3.5 * math.exp(-step / steps * 6) + noise[step - 1] + extra for step in range(1, steps + 1)]
        write(folder / name, [
            *({"kind": "train", "step": step, "tokens": 1024 * step, "loss": loss[step - 1]} for step in range(1, steps + 1)),
            *({"kind": "val", "step": step, "tokens": 1024 * step, "loss": 2 + extra + 0.01 * (seed != seeds[0])}
              for step in range(steps // 4, steps + 1, steps // 4))])
    write_rows(folder / "run_fp8" / "probe.jsonl", rows_of())
    return folder / "run_fp8"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("out"))


def test_the_gap_is_the_difference_within_the_band_of_seeds(run):
    figure, notes = draw_gap(run)
    panel = figure.axes[0]
    raw, smooth, val = lines_of(panel)[1:]
    assert notes == [] and np.allclose(raw[:, 1], 0.02) and np.allclose(smooth[:, 1], 0.02) and len(raw) == 400
    assert val[:, 0].tolist() == [100, 200, 300, 400] and np.allclose(val[:, 1], 0.02)
    one, other = ([json.loads(line)["loss"] for line in (run.parent / f"run_bf16_{seed}" / "metrics.jsonl").open()][:400]
                  for seed in (1337, 7))
    difference = np.subtract(one, other)

    def mean_around(values, i, window=10):      # the window of np.convolve's "same" for an even width
        return np.mean(values[max(0, i - window // 2):i + window // 2])
    smoothed = [abs(mean_around(difference, i)) for i in range(400)]
    band = panel.collections[0].get_paths()[0].vertices[:, 1]
    assert math.isclose(band.max(), max(mean_around(smoothed, i, 40) for i in range(400)), rel_tol=1e-6)
    assert np.allclose([segment[:, 1] for segment in panel.collections[1].get_segments()], [[-0.01, 0.01]] * 4)


def test_a_repeat_is_no_partner_and_no_twin_but_a_line_of_its_own(tmp_path):
    run = write_pair(tmp_path)
    before = draw_gap(run)[0].axes[0]
    for seed, extra in ((1337, 0.003), (7, 0.1)):        # of the partner, then of the other seed: no pair of seeds of its own
        own, null = tmp_path / f"run_bf16_{seed}", tmp_path / f"run_a_null_{seed}"      # before the partner by name
        rows = [json.loads(line) for line in (own / "metrics.jsonl").open()]
        write(null, [row | {"loss": row["loss"] + extra} for row in rows])
        (null / "summary.json").write_text(json.dumps(json.loads((own / "summary.json").read_text()) | {"repeat": 1}))
    figure, notes = draw_gap(run)
    panel, again = figure.axes[0], lines_of(figure.axes[0])[3]
    assert notes == [] and "minus loss of run_bf16_1337" in figure.legends[0].get_title().get_text()
    assert legend(figure)[2:] == ["BF16, other seed (1 pair)", "BF16, same seed, other rounding"]
    assert np.allclose(lines_of(panel)[2], lines_of(before)[2]) and len(again) == 400 and np.allclose(again[:, 1], 0.003)
    assert np.allclose(panel.collections[0].get_paths()[0].vertices, before.collections[0].get_paths()[0].vertices)


def test_the_gap_says_what_is_missing(tmp_path):
    run = write_pair(tmp_path)
    path = tmp_path / "run_bf16_7" / "summary.json"
    summary = json.loads(path.read_text())
    for changes in ({"lr_peak": 2e-3}, {"lr_peak": None}, {"val_sha256": "w" * 64}, {"seed": 1337}):
        path.write_text(json.dumps(summary | changes))      # only runs equal but for the seed make a null band
        assert draw_gap(run)[1] == ["fp8_gap: no two BF16 runs beside it are equal but for the seed, so there is no null band"]
    (tmp_path / "run_bf16_1337" / "metrics.jsonl").write_text("torn")
    assert draw_gap(run)[0] is None and "no logged training step in common" in draw_gap(run)[1][0]
    (tmp_path / "run_bf16_1337" / "summary.json").write_text("[1]")
    assert draw_gap(run)[0] is None and "there is no BF16 run with its pair_id" in draw_gap(run)[1][0]
    (run / "summary.json").unlink()
    assert draw_gap(run)[0] is None and "it is unfinished" in draw_gap(run)[1][0]


def test_a_pairs_overlay_shows_both_arms_and_their_difference(run, tmp_path):
    (pair,) = pairs(read_runs([run, run.parent / "run_bf16_1337"])[0])[0]
    figure, notes = draw_pair(pair)
    top, below = figure.axes
    assert notes == [] and legend(figure) == ["BF16: run_bf16_1337", "FP8: run_fp8"]
    assert top.lines[1].get_ydata() - top.lines[0].get_ydata() == pytest.approx(0.02)
    raw, smooth, *ends = lines_of(below)[1:]
    assert raw[:, 1] == pytest.approx(0.02) and smooth[:, 1] == pytest.approx(0.02) and len(raw) == 400
    assert [end[0][1] for end in ends] == pytest.approx([0.02, 0.03])      # validation in BF16, as trained
    loss = 2 + 3 / np.arange(1, 401)
    for arm, recipe in (("bf16", "bf16"), ("fp8", "tensorwise")):       # a branch continues its trunk's curve
        for name, tokens, first, last in ((f"trunk_{arm}", 40_000, 0, 400), (arm, 30_000, 250, 300)):
            lineage = {} if first == 0 else {"parent_run": f"trunk_{arm}", "parent_step": 250}
            write_run(tmp_path / name, recipe=recipe, tokens=tokens, loss=2.0, curve=False, **lineage)
            write(tmp_path / name, [{"kind": "train", "step": i + 1, "tokens": 100 * (i + 1), "loss": loss[i]}
                                    for i in range(first, last)])
    (pair,) = pairs(read_runs([tmp_path / "bf16", tmp_path / "fp8"])[0])[0]
    x = draw_pair(pair)[0].axes[0].lines[0].get_xdata()
    assert (x[0], x[-1], len(x)) == (100, 30_000, 300)      # 250 steps of the trunk, 50 of its own
    (tmp_path / "fp8/metrics.jsonl").unlink()
    assert draw_pair(pair)[0] is None and "no training step in common" in draw_pair(pair)[1][0]


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_the_same_bytes_each_time(run, tmp_path):
    done = subprocess.run([sys.executable, "scaling/figures.py", "--fp8", str(run), f"out={tmp_path / 'one'}"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    names = ("fp8_scales", "fp8_underflow", "fp8_gap", "fp8_outliers")
    assert {path.name for path in (tmp_path / "one").iterdir()} == {f"{name}.{form}" for name in names for form in ("png", "svg")}
    with matplotlib.rc_context(figures.RC):
        assert (tmp_path / "one/fp8_gap.svg").read_bytes() == figures.render(draw_gap(run)[0], "svg")
    assert "| down | gradient | 3 | 9e-06 | 2.3 |" in done.stdout        # 1e-2 * 3 blocks; 1e-6 * 3 of that; 2 % + 3 * 0.1 %


def test_runs_with_little_to_show_are_drawn(tmp_path, capsys):
    write_rows(tmp_path / "b" / "probe.jsonl", rows_of(linear=False))
    assert figures.main(["--fp8", str(tmp_path / "b")]) == 0 and "has probed no FP8 Linear" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "b" / "figures").iterdir()} == {"fp8_outliers.png", "fp8_outliers.svg"}
    zero = {"amax": 0, "scale_min": 1, "scale": 1, "scale_max": 1, "underflow": 0, "saturated": 0, "error": 0}
    row = {"kind": "linear", "step": 1, "layer": "head", "recipe": "cscale", "weight": zero, "activation": zero}
    write_rows(tmp_path / "z" / "probe.jsonl", [row])
    write_rows(tmp_path / "z" / "eval" / "probe_cscale.jsonl", [row])
    assert figures.main(["--fp8", str(tmp_path / "z")]) == 0
    out = capsys.readouterr().out
    assert "no block row" in out and "| head | gradient | - | - | - |" in out


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "run is missing"), (["--fp8", "{}", "dpi=3"], "there is no key 'dpi'"), (["{}/nowhere"], "nowhere is no folder"),
    (["--fp8", "{}/empty"], "has no probe.jsonl: expected the folder of a run trained with probe.every"),
    (["{}/empty"], "has no metrics.jsonl: expected the folder of a run"), (["--fp8", "{}/none"], "holds no row"),
    (["{}/none"], "has no step to draw yet"), (["{}/run", "out={}/run/metrics.jsonl"], "cannot be written"),
])
def test_mistakes_get_a_sentence(tmp_path, capsys, arguments, words):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "run", [row(1)])
    write(tmp_path / "none", [event("resume", 3)])
    (tmp_path / "none/probe.jsonl").touch()
    assert figures.main([word.format(tmp_path) for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err and err.startswith("scaling/figures.py: ") and out == "" and err.count("\n") == 1
    assert not (tmp_path / "none/figures").exists()
