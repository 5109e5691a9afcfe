"""scaling/figures.py: the figures of one run show what its rows say, for whole, cut, running and
damaged files."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from lib.plots import BLUE, GREY
from scaling import figures
from scaling.histories import read_history
from scaling.probe_figures import draw_matmuls, draw_outliers, draw_scales, draw_underflow
from scaling.probes import MATMULS, OPERANDS, SHARES, format_worst, read_probe
from scaling.run_figure import MARKS, draw
from tests.conftest import asked
from tests.helpers.scaling_runs import cells, legend

LINEARS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
STEPS = (100, 200, 300)
ZERO = {
    "amax": 0,
    "scale_min": 1,
    "scale": 1,
    "scale_max": 1,
    "underflow": 0,
    "saturated": 0,
    "error": 0,
}


def write(folder: Path, rows: Iterable[dict], name: str = "metrics.jsonl"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lines_of(panel: Axes):
    return [line.get_xydata() for line in panel.get_lines()]


def row(step: int, kind: str = "train", **changes):
    return {
        "kind": kind,
        "step": step,
        "tokens": step * 512,
        "loss": 2 + 4 / step,
        "lr": 1e-3,
        "tok_per_s": 5000.0 + step,
        "grad_norm": 1.0 + 0.1 * (step % 3),
        "step_s": 0.1,
        "since_start": step,
        "verdict": "OK",
        **changes,
    }


def event(name: str, step: int, **more):
    return {"kind": "event", "event": name, "step": step, **more}


def eventful():
    """Steps 1 to 40: a skip, a NaN, a spike that was noted, two resumes, a failed save, 21 to 24
    undone and done again."""
    odd = {
        5: {"verdict": "SKIP", "grad_norm": 50.0},
        9: {"verdict": "SKIP", "loss": None, "grad_norm": None},
        30: {"verdict": "SPIKE", "loss": 60.0},
    }
    rows = [row(step, **odd.get(step, {})) for step in range(1, 41)]
    undone = [
        row(step, "undone", loss=float(step), verdict=verdict)
        for step, verdict in enumerate(("OK", "OK", "SKIP", "ROLLBACK"), 21)
    ]
    after = {
        10: [event("resume", 10)],
        12: [event("save_failed", 12)],
        15: [event("resume", 15)],
        20: [
            *undone,
            {"kind": "undone_val", "step": 24, "loss": 3.3},
            event("rollback", 24, to=20),
        ],
    }
    val = {
        step: [{"kind": "val", "step": step, "tokens": 1, "loss": 2.5 + 4 / step, "sources": {}}]
        for step in (10, 20, 30, 40)
    }
    return [one for r in rows for one in (r, *val.get(r["step"], ()), *after.get(r["step"], ()))]


def drawn(run: Path):
    return draw(read_history(run), run.name)


def points(panel: Axes, shape: str, color: str):
    return sorted(
        (float(x), float(y))
        for line in panel.get_lines()
        for x, y in line.get_xydata()
        if line.get_marker() == shape and to_hex(line.get_color()) == to_hex(color)
    )


def test_a_repeated_step_counts_as_done_last_and_each_rollback_has_its_stretch(
    tmp_path: Path,
) -> None:
    history = read_history(
        write(tmp_path / "again", [row(1), row(2, loss=9.0), row(3), row(2), row(3, loss=8.0)])
    )
    assert list(history.train["loss"]) == [6.0, 4.0, 8.0]
    history = read_history(
        write(
            tmp_path / "two",
            [
                row(1),
                row(2, "undone"),
                event("rollback", 2, to=1),
                row(2, "undone"),
                row(3, "undone"),
                event("rollback", 3, to=1),
            ],
        )
    )
    assert [list(columns["step"]) for columns in history.undone] == [[2], [2, 3]]


def scored(step: int, kind: str = "tasks", **scores: float) -> dict:
    named = {name.replace("__", "/"): value for name, value in scores.items()}
    return {"kind": kind, "step": step, "tokens": 1, "scores": named, "se": {}, "limit": None}


def test_each_tasks_accuracy_has_a_curve_in_a_panel_of_its_own(tmp_path: Path) -> None:
    """Not its perplexity, nor a second accuracy, nor what a rollback took back; a step that was
    scored twice has its last."""
    rows = [
        row(1),
        row(2),
        scored(2, piqa__acc=0.1, piqa__acc_norm=0.5, val_ppl__bits_per_byte=7.0),
        row(3, "undone"),
        scored(3, "undone_tasks", piqa__acc_norm=0.9),
        event("rollback", 3, to=2),
        row(3),
        row(4),
        scored(4, piqa__acc_norm=0.6, boolq__acc=0.4),
        scored(4, piqa__acc_norm=0.7, boolq__acc=0.4),
    ]
    figure = drawn(write(tmp_path / "scored", rows))
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    lines = [line.get_xydata().tolist() for line in panels["task\naccuracy"].get_lines()]
    assert [[4.0, 0.4]] in lines and [[2.0, 0.5], [4.0, 0.7]] in lines
    assert not any(y in (7.0, 0.9, 0.1) for line in lines for _, y in line)
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert {"boolq", "piqa"} <= set(labels) and "val_ppl" not in labels


def test_a_run_without_scores_has_no_panel_for_them(tmp_path: Path) -> None:
    figure = drawn(write(tmp_path / "plain", [row(1), row(2)]))
    assert "task\naccuracy" not in [axes.get_ylabel() for axes in figure.axes]


def test_all_losses_verdicts_and_events_are_where_the_rows_are(tmp_path: Path) -> None:
    figure = drawn(write(tmp_path / "run", eventful()))
    (loss, norm), (low, high) = figure.axes[:2], figure.axes[0].get_ylim()
    # validation
    assert points(loss, "D", "#000000") == [(10, 2.9), (20, 2.7), (30, 2.5 + 4 / 30), (40, 2.6)]
    singles = next(
        line.get_xydata() for line in loss.get_lines() if line.get_alpha() == 0.35
    ).tolist()
    assert singles == [[s, 60.0 if s == 30 else 2 + 4 / s] for s in range(1, 41) if s != 9]
    assert legend(figure) == [
        "training",
        "validation",
        "undone",
        "SKIP (3)",
        "SPIKE (1)",
        "ROLLBACK (1)",
        "resume (2)",
        "save failed (1)",
    ]
    for name, expected in {
        "SKIP": [(5, 2.8), (9, high), (23, high)],
        "SPIKE": [(30, high)],
        "save failed": [(12, low)],
        "resume": [(10, low), (15, low)],
        "ROLLBACK": [(24, low), (24, high)],
    }.items():
        assert np.array(points(loss, *MARKS[name])) == pytest.approx(np.array(sorted(expected))), (
            name
        )
    assert points(norm, *MARKS["SKIP"])[:2] == [
        (5, norm.get_ylim()[1]),
        (9, norm.get_ylim()[1]),
    ]
    for panel in figure.axes:  # each event is a line through all; an undone stretch is grey
        assert sorted(
            float(line.get_xdata()[0]) for line in panel.get_lines() if line.is_dashed()
        ) == [10, 12, 15, 24]
        assert [
            list(line.get_xdata())
            for line in panel.get_lines()
            if to_hex(line.get_color()) == GREY and len(line.get_xdata()) > 1
        ] == [[21, 22, 23, 24]]
    assert figure.legends[0].get_title().get_text() == "Training of run (n = 1 run, steps 1 to 40)"


def test_the_mean_is_of_the_steps_that_were_ok_and_one_spike_governs_no_axis(
    tmp_path: Path,
) -> None:
    rows = [row(step, loss=3.0, grad_norm=1.0, gpu_util_pct=95.0) for step in range(1, 401)]
    rows[200] |= {"loss": 1000.0, "grad_norm": 1e6, "verdict": "SKIP"}
    loss, norm, *_, busy = drawn(write(tmp_path / "run", rows)).axes
    for panel, value in ((loss, 3.0), (norm, 1.0), (busy, 95.0)):
        mean = max(
            panel.get_lines(),
            key=lambda line: line.get_linewidth() * (line.get_color() == BLUE),
        )
        assert np.asarray(mean.get_ydata()) == pytest.approx(np.full(399, value))
    assert loss.get_ylim()[1] < 4 and norm.get_ylim()[1] < 4


def test_odd_runs_are_drawn(tmp_path: Path) -> None:
    figures = [
        drawn(write(tmp_path / f"a $\\run$ {i}", rows))
        for i, rows in enumerate(
            (
                [row(1)],
                [row(s, "undone") for s in (1, 2)] + [event("rollback", 2, to=0)],
                [row(s, loss=None, grad_norm=None, verdict="SKIP") for s in (1, 2, 3)],
                [row(s, loss=2.0, grad_norm=0.0, lr=0.0, tok_per_s=0.0) for s in (1, 2, 3)],
                eventful() + [event(f"odd {i} $x_$ \\frac$", 20) for i in range(12)],
            )
        )
    ]
    assert [figure.axes[1].get_yscale() for figure in figures] == [
        "log",
        "linear",
        "linear",
        "linear",
        "log",
    ], "of the norm"


def test_a_run_that_is_still_going_or_cut_is_drawn_with_the_same_bytes_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, before, images = write(tmp_path / "run", eventful()), dict(matplotlib.rcParams), set()
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:-30])
    for out in (tmp_path / "one", tmp_path / "two"):
        assert asked(capsys, figures.main, run, f"out={out}") == f"wrote {out}/: run.png, run.svg\n"
        images.add((out / "run.png").read_bytes())
    assert len(images) == 1 and dict(matplotlib.rcParams) == before


def operand(name: str, block: int, kind: str, step: int):
    """A known function: scales are powers of two that fall with depth, underflow grows with the
    step."""
    base = (
        {"weight": 12, "activation": 6, "gradient": 20}[name] + kind - 0.25 * block + 2 * step / 300
    )
    share = {"weight": 1e-5, "activation": 1e-4, "gradient": 1e-2}[name] * (1 + block) * step / 300
    return {
        "amax": 448 / 2**base,
        "scale_min": 2 ** (base - 2),
        "scale": 2.0**base,
        "scale_max": 2 ** (base + 2),
        "underflow": share,
        "saturated": 1e-6 * kind * share,
        "error": 0.02 + 0.001 * kind,
    }


def linear_row(step: int, block: int, kind: str, **changes):
    return {
        "kind": "linear",
        "step": step,
        "layer": f"layers.{block}.{LINEARS[kind]}",
        "recipe": "tensorwise",
        **{name: operand(name, block, kind, step) for name in OPERANDS},
        **changes,
    }


def block_row(step: int, block: int, **changes):
    return {
        "kind": "block",
        "step": step,
        "block": block,
        "attention_logit_max": 5 + 20 * block * step / 300,
        "swiglu_amax": 8.0 + 2.0 ** (block * step / 300),
        "swiglu_rms": 0.5,
        **changes,
    }


def rows_of(blocks: int = 3):
    return [
        row
        for step in STEPS
        for block in range(blocks)
        for row in [*(linear_row(step, block, kind) for kind in range(4)), block_row(step, block)]
    ]


def with_matmuls(row: dict) -> dict:
    """A row of a Linear as newer versions write it: kurtosis 3 and more in deeper blocks, SQNRs of
    30, 20 and 10 dB, less in deeper blocks."""
    block = int(row["layer"].split(".")[1])
    operands = {name: row[name] | {"kurtosis": 3.0 + block} for name in OPERANDS}
    sqnrs = {key: 30.0 - 10 * i - block for i, key in enumerate(MATMULS)}
    return row | operands | sqnrs


def newer_rows(blocks: int = 3) -> list[dict]:
    return [with_matmuls(row) if row["kind"] == "linear" else row for row in rows_of(blocks)]


def probe_of(folder: Path, rows: Iterable[dict]):
    return read_probe(write(folder, rows, "probe.jsonl") / "probe.jsonl")


def test_null_is_a_gap_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    rows = [block_row(step, block) for step in STEPS for block in range(12)]
    rows[13]["swiglu_amax"] = None  # of step 200, block 1
    unscaled = linear_row(300, 0, 0)
    unscaled["weight"] |= {"scale": None, "error": None}
    # one done again
    path = (
        write(tmp_path, [block_row(200, 5, swiglu_rms=9), *rows, unscaled], "probe.jsonl")
        / "probe.jsonl"
    )
    path.write_text(path.read_text() + '{"kind": "linear", "ste')
    probe = read_probe(path)
    assert np.isnan(probe.linear["weight", "scale"]).all()
    assert "no scale: these stay in BF16" in [
        text.get_text() for text in draw_scales(probe, {}, "run").axes[0].texts
    ]
    assert any(line[-1] == "-" for line in cells(format_worst(probe)))
    logit, ratio = draw_outliers(probe, "run").axes[:2]
    want = [
        [block_row(step, block)["attention_logit_max"] for step in STEPS] for block in range(12)
    ]
    assert np.allclose([line[:, 1] for line in lines_of(logit)], want)
    shown = np.array([line[:, 1] for line in lines_of(ratio)])
    assert np.isnan(shown[1]).tolist() == [False, True, False] and math.isclose(
        shown[5][2], (8 + 2.0**5) / 0.5
    )


def test_scales_are_drawn_where_the_rows_put_them(tmp_path: Path) -> None:
    """The last of a repeated step counts; the top shows the last step that has every layer, also of
    a cut-off file."""
    wrong = linear_row(300, 1, 2) | {"weight": {**operand("weight", 1, 2, 300), "scale": 1.0}}
    probe = probe_of(
        tmp_path, [wrong, *rows_of()[::-1], *(linear_row(400, block, 0) for block in range(3))]
    )
    assert probe.steps[probe.last] == 300
    every = [*itertools.product(range(3), range(4))]
    inference = probe_of(
        tmp_path / "eval", [linear_row(300, block, kind, gradient=None) for block, kind in every]
    )
    figure = draw_scales(probe, {"rowwise": inference}, "run")
    for column, name in enumerate(OPERANDS):
        top, bottom = figure.axes[column], figure.axes[3 + column]
        for kind in range(4):
            want = [math.log2(operand(name, block, kind, 300)["scale"]) for block in range(3)]
            found = [line for line in lines_of(top) if np.allclose(line[:, 1], want)]
            # training, and inference where it has the operand
            assert len(found) == (1 if name == "gradient" else 2)
            assert np.allclose(np.round(found[0][:, 0]), [0, 1, 2])
        whiskers = np.concatenate(
            [segment for group in top.collections for segment in group.get_segments()]
        )
        # two octaves either way
        assert np.allclose(sorted(whiskers[1::2, 1] - whiskers[::2, 1]), 4)
        medians = [
            np.median([math.log2(operand(name, *where, step)["scale"]) for where in every])
            for step in STEPS
        ]
        assert any(
            np.allclose(line[:3], np.column_stack([STEPS, medians])) for line in lines_of(bottom)
        )


def test_heat_maps_hold_the_shares_and_leave_zero_out(tmp_path: Path) -> None:
    head = [linear_row(step, 0, 0, layer="head") for step in STEPS]
    figure = draw_underflow(probe_of(tmp_path, [*head, *rows_of(12)]), "run")
    places = [*itertools.product(range(12), range(4)), (0, 0)]  # the head last
    for panel, (share, name) in zip(figure.axes, itertools.product(SHARES, OPERANDS), strict=False):
        want = np.array(
            [[operand(name, *where, step)[share] for step in STEPS] for where in places]
        )
        found = panel.collections[0].get_array().reshape(want.shape)
        assert (
            np.allclose(found.filled(0), 100 * want)
            and (np.ma.getmaskarray(found) == (want == 0)).all()
        )
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        *map(str, range(12)),
        "head",
    ]


def test_kurtosis_and_sqnr_are_medians_over_the_linears_of_a_kind(tmp_path: Path) -> None:
    figure = draw_matmuls(probe_of(tmp_path, newer_rows()), "run")
    for panel in figure.axes[:3]:
        kinds = [line for line in lines_of(panel) if len(line) == len(STEPS)]
        assert np.allclose([line[:, 1] for line in kinds], [[4.0] * len(STEPS)] * 4)
    for panel, median in zip(figure.axes[3:], (29, 19, 9), strict=True):
        assert np.allclose([line[:, 1] for line in lines_of(panel)], [[median] * len(STEPS)] * 4)


@pytest.mark.parametrize(
    "rows, figures_of, told",
    [
        # 1e-2 * 3 blocks; 1e-6 * 3 of that; 2 % + 3 * 0.1 %
        (
            rows_of(),
            "outliers scales underflow",
            r"\| down +\| gradient +\| 3 +\| 9e-06 +\| 2.3 +\|",
        ),
        (newer_rows(), "matmuls outliers scales underflow", ""),
        ([block_row(step, 0) for step in STEPS], "outliers", "has probed no FP8 Linear"),
        (
            [linear_row(1, 0, 0, layer="head", weight=ZERO, activation=ZERO, gradient=None)],
            "scales underflow",
            "",
        ),
    ],
)
def test_the_command_writes_figures_and_the_worst_of_each_kind(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: Iterable[dict],
    figures_of: Callable,
    told: str,
) -> None:
    run = write(tmp_path / "run", rows, "probe.jsonl")
    if linears := [row for row in rows if row["kind"] == "linear"]:
        write(run, linears, "eval/probe_rowwise.jsonl")
    assert re.search(told, asked(capsys, figures.main, "--fp8", run))
    assert sorted(path.name for path in (run / "figures").iterdir()) == [
        f"fp8_{name}.{form}" for name in figures_of.split() for form in ("png", "svg")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{0}/nowhere", "nowhere/metrics.jsonl does not exist"),
        ("--fp8 {0}/step", "no row of a probe"),
        ("--fp8 {0}/weight", "no row of a probe"),
        ("--fp8 {0}/run", "probe.jsonl does not exist"),
        ("--fp8 {0}/none", "holds no row"),
        ("{0}/none", "has no step to draw yet"),
        ("{0}/run out={0}/run/metrics.jsonl", "cannot be written"),
    ],
)
def test_mistakes_get_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    write(tmp_path / "run", [row(1)])
    write(tmp_path / "none", [event("resume", 3)])
    (tmp_path / "none/probe.jsonl").touch()
    for key, value in (("step", None), ("weight", 3)):  # rows of other code
        write(
            tmp_path / key,
            [linear_row(100, 0, 0), linear_row(100, 0, 0) | {key: value}],
            "probe.jsonl",
        )
    assert words in asked(capsys, figures.main, *arguments.format(tmp_path).split(), code=2)
    assert not [*tmp_path.rglob("*.png")]
