"""scaling/figures.py: the figures of one run show what its rows say, for whole, cut, running and
damaged files."""

import io
import itertools
import json
import math
import re
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lib.plots import BLUE, GREY
from scaling import figures
from scaling.histories import read_history
from scaling.probe_figures import draw_matmuls, draw_outliers, draw_scales, draw_underflow
from scaling.probes import MATMULS, OPERANDS, SHARES, ProbeRecord, format_worst, read_probe
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


def row(step: int, kind: str = "train", **changes: object):
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


def event(name: str, step: int, **more: object):
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


def test_a_repeated_step_counts_as_done_last(tmp_path: Path) -> None:
    rows = [row(1), row(2, loss=9.0), row(3), row(2), row(3, loss=8.0)]
    assert list(read_history(write(tmp_path, rows)).train["loss"]) == [6.0, 4.0, 8.0]


def test_each_rollback_has_its_stretch_of_undone_steps(tmp_path: Path) -> None:
    first = [row(2, "undone"), event("rollback", 2, to=1)]
    second = [row(2, "undone"), row(3, "undone"), event("rollback", 3, to=1)]
    history = read_history(write(tmp_path, [row(1), *first, *second]))
    assert [list(columns["step"]) for columns in history.undone] == [[2], [2, 3]]


def scored(step: int, kind: str = "tasks", **scores: float) -> dict:
    named = {name.replace("__", "/"): value for name, value in scores.items()}
    return {"kind": kind, "step": step, "tokens": 1, "scores": named, "se": {}, "limit": None}


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    """A run with two tasks and a perplexity, a scoring that was undone and one that was
    repeated."""
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
    return drawn(write(tmp_path_factory.mktemp("scored"), rows))


def accuracies(figure: Figure) -> list[list[list[float]]]:
    """The lines of the panel of accuracies, each as points."""
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    return [line.get_xydata().tolist() for line in panels["task\naccuracy"].get_lines()]


def test_each_tasks_accuracy_has_a_curve_in_a_panel_of_its_own(scored_run: Figure) -> None:
    """A step that was scored twice has its last."""
    lines = accuracies(scored_run)
    assert [[4.0, 0.4]] in lines
    assert [[2.0, 0.5], [4.0, 0.7]] in lines


@pytest.mark.parametrize("value", [7.0, 0.9, 0.1], ids=["perplexity", "undone", "second accuracy"])
def test_no_other_score_is_drawn(value: float, scored_run: Figure) -> None:
    assert not any(y == value for line in accuracies(scored_run) for _, y in line)


def test_a_figures_legend_names_its_tasks(scored_run: Figure) -> None:
    labels = {text.get_text() for legend in scored_run.legends for text in legend.get_texts()}
    assert {"boolq", "piqa"} <= labels
    assert "val_ppl" not in labels


def test_a_run_without_scores_has_no_panel_for_them(tmp_path: Path) -> None:
    figure = drawn(write(tmp_path / "plain", [row(1), row(2)]))
    assert "task\naccuracy" not in [axes.get_ylabel() for axes in figure.axes]


@pytest.fixture(scope="module")
def eventful_run(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    return drawn(write(tmp_path_factory.mktemp("eventful") / "run", eventful()))


def test_losses_of_validation_are_where_the_rows_are(eventful_run: Figure) -> None:
    expected = [(10, 2.9), (20, 2.7), (30, 2.5 + 4 / 30), (40, 2.6)]
    assert points(eventful_run.axes[0], "D", "#000000") == expected


def test_losses_of_single_steps_are_where_the_rows_are(eventful_run: Figure) -> None:
    """Step 9 has none."""
    lines = eventful_run.axes[0].get_lines()
    singles = next(line.get_xydata() for line in lines if line.get_alpha() == 0.35)
    steps = [step for step in range(1, 41) if step != 9]
    assert singles.tolist() == [[step, 60.0 if step == 30 else 2 + 4 / step] for step in steps]


def test_a_legend_counts_verdicts_and_events(eventful_run: Figure) -> None:
    assert legend(eventful_run) == [
        "training",
        "validation",
        "undone",
        "SKIP (3)",
        "SPIKE (1)",
        "ROLLBACK (1)",
        "save failed (1)",
        "resume (2)",
    ]


LOW, HIGH = "low", "high"  # the ends of the axis of losses


@pytest.mark.parametrize(
    "name, expected",
    [
        ("SKIP", [(5, 2.8), (9, HIGH), (23, HIGH)]),
        ("SPIKE", [(30, HIGH)]),
        ("save failed", [(12, LOW)]),
        ("resume", [(10, LOW), (15, LOW)]),
        ("ROLLBACK", [(24, LOW), (24, HIGH)]),
    ],
)
def test_marks_stand_at_their_step_and_loss(
    name: str, expected: list[tuple[int, float | str]], eventful_run: Figure
) -> None:
    loss = eventful_run.axes[0]
    ends = dict(zip((LOW, HIGH), loss.get_ylim(), strict=True))
    places = [(step, ends.get(y, y)) for step, y in expected]
    assert np.array(points(loss, *MARKS[name])) == pytest.approx(np.array(sorted(places)))


def test_a_norm_beyond_its_axis_is_marked_at_the_end(eventful_run: Figure) -> None:
    norm = eventful_run.axes[1]
    top = norm.get_ylim()[1]
    assert points(norm, *MARKS["SKIP"])[:2] == [(5, top), (9, top)]


def test_an_event_is_a_line_through_all_panels(eventful_run: Figure) -> None:
    for panel in eventful_run.axes:
        dashed = [line for line in panel.get_lines() if line.is_dashed()]
        assert sorted(float(line.get_xdata()[0]) for line in dashed) == [10, 12, 15, 24]


def test_a_resume_where_a_run_had_stopped_hides_no_mark(tmp_path: Path) -> None:
    """Every run that was stopped on request resumes at the step of its stop."""
    rows = [row(step) for step in range(1, 21)]
    rows[10:10] = [event("stopped", 10), event("resume", 10)]
    loss = drawn(write(tmp_path / "stopped", rows)).axes[0]
    marks = {line.get_marker(): line for line in loss.get_lines() if len(line.get_xdata())}
    stopped, resume = marks[MARKS["stopped"][0]], marks[MARKS["resume"][0]]
    lines = list(loss.get_lines())
    assert lines.index(stopped) < lines.index(resume)
    assert stopped.get_markersize() > 1.5 * resume.get_markersize()


def test_an_undone_stretch_is_grey_in_all_panels(eventful_run: Figure) -> None:
    for panel in eventful_run.axes:
        lines = [line for line in panel.get_lines() if to_hex(line.get_color()) == GREY]
        stretches = [list(line.get_xdata()) for line in lines if len(line.get_xdata()) > 1]
        assert stretches == [[21, 22, 23, 24]]


def test_a_title_names_the_run_and_its_steps(eventful_run: Figure) -> None:
    title = eventful_run.legends[0].get_title().get_text()
    assert title == "Training of run (n = 1 run, steps 1 to 40)"


@pytest.fixture(scope="module")
def spike(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    """400 steps alike, of which one was skipped for its loss and norm."""
    rows = [row(step, loss=3.0, grad_norm=1.0, gpu_util_pct=95.0) for step in range(1, 401)]
    rows[200] |= {"loss": 1000.0, "grad_norm": 1e6, "verdict": "SKIP"}
    return drawn(write(tmp_path_factory.mktemp("spike"), rows))


@pytest.mark.parametrize("number, value", [(0, 3.0), (1, 1.0), (-1, 95.0)])
def test_the_mean_is_of_the_steps_that_were_ok(number: int, value: float, spike: Figure) -> None:
    """Of losses, of norms, of the GPU's utilisation."""
    lines = [line for line in spike.axes[number].get_lines() if line.get_color() == BLUE]
    mean = max(lines, key=lambda line: line.get_linewidth())
    assert np.asarray(mean.get_ydata()) == pytest.approx(np.full(399, value))


def test_a_spike_governs_no_axis(spike: Figure) -> None:
    loss, norm, *_ = spike.axes
    assert loss.get_ylim()[1] < 4
    assert norm.get_ylim()[1] < 4


ODD_RUNS = {
    "one step": ([row(1)], "log"),
    "all undone": ([row(1, "undone"), row(2, "undone"), event("rollback", 2, to=0)], "linear"),
    "no loss": (
        [row(step, loss=None, grad_norm=None, verdict="SKIP") for step in (1, 2, 3)],
        "linear",
    ),
    "all zero": (
        [row(step, loss=2.0, grad_norm=0.0, lr=0.0, tok_per_s=0.0) for step in (1, 2, 3)],
        "linear",
    ),
    "odd names": (
        [*eventful(), *(event(f"odd {number} $x_$ \\frac$", 20) for number in range(12))],
        "log",
    ),
}


@pytest.mark.parametrize("rows, scale_of_norm", ODD_RUNS.values(), ids=ODD_RUNS)
def test_odd_runs_are_drawn(rows: list[dict], scale_of_norm: str, tmp_path: Path) -> None:
    figure = drawn(write(tmp_path / "a $\\run$ x", rows))
    assert figure.axes[1].get_yscale() == scale_of_norm


@dataclass
class Twice:
    """A run that is still going, or was cut within a line, drawn twice."""

    folders: list[Path]
    pages: list[str]
    settings: list[dict[str, Any]]  # matplotlib's, before and after


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Twice:
    folder = tmp_path_factory.mktemp("cut")
    run = write(folder / "run", eventful())
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    folders, pages = [folder / "first", folder / "second"], []
    settings = [dict(matplotlib.rcParams)]
    for out in folders:
        page = io.StringIO()
        with redirect_stdout(page):
            assert figures.main([str(run), f"out={out}"]) == 0
        pages.append(page.getvalue())
    return Twice(folders, pages, [*settings, dict(matplotlib.rcParams)])


def test_a_cut_run_is_drawn_and_said_to_be(twice: Twice) -> None:
    for folder, page in zip(twice.folders, twice.pages, strict=True):
        assert page == f"wrote {folder}/: run.png, run.svg\n"


def test_a_run_is_drawn_with_the_same_bytes_each_time(twice: Twice) -> None:
    first, second = ((folder / "run.png").read_bytes() for folder in twice.folders)
    assert first == second


def test_drawing_leaves_matplotlibs_settings_alone(twice: Twice) -> None:
    assert twice.settings[0] == twice.settings[1]


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


def linear_row(step: int, block: int, kind: str, **changes: object):
    return {
        "kind": "linear",
        "step": step,
        "layer": f"layers.{block}.{LINEARS[kind]}",
        "recipe": "tensorwise",
        **{name: operand(name, block, kind, step) for name in OPERANDS},
        **changes,
    }


def block_row(step: int, block: int, **changes: object):
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


@pytest.fixture(scope="module")
def probe_with_gaps(tmp_path_factory: pytest.TempPathFactory) -> ProbeRecord:
    """12 blocks, block 1 without an amax at step 200, a Linear without a scale, a row that was done
    again, a torn line at the end."""
    rows = [block_row(step, block) for step in STEPS for block in range(12)]
    rows[13]["swiglu_amax"] = None  # of step 200, block 1
    unscaled = linear_row(300, 0, 0)
    unscaled["weight"] |= {"scale": None, "error": None}
    repeated = block_row(200, 5, swiglu_rms=9)
    folder = tmp_path_factory.mktemp("gaps")
    path = write(folder, [repeated, *rows, unscaled], "probe.jsonl") / "probe.jsonl"
    path.write_text(path.read_text() + '{"kind": "linear", "ste')
    return read_probe(path)


def test_a_linear_without_scales_is_said_to_stay_in_bf16(probe_with_gaps: ProbeRecord) -> None:
    assert np.isnan(probe_with_gaps.linear["weight", "scale"]).all()
    texts = draw_scales(probe_with_gaps, {}, "run").axes[0].texts
    assert "no scale: these stay in BF16" in [text.get_text() for text in texts]


def test_an_error_that_is_null_is_a_dash_in_the_table(probe_with_gaps: ProbeRecord) -> None:
    assert any(line[-1] == "-" for line in cells(format_worst(probe_with_gaps)))


@pytest.fixture(scope="module")
def outliers(probe_with_gaps: ProbeRecord) -> Figure:
    return draw_outliers(probe_with_gaps, "run")


def test_logits_of_attention_are_those_of_the_rows(outliers: Figure) -> None:
    panel = outliers.axes[0]
    expected = [
        [block_row(step, block)["attention_logit_max"] for step in STEPS] for block in range(12)
    ]
    assert np.allclose([line[:, 1] for line in lines_of(panel)], expected)


def test_a_value_that_is_null_is_a_gap_and_the_last_row_counts(outliers: Figure) -> None:
    panel = outliers.axes[1]
    ratios = np.array([line[:, 1] for line in lines_of(panel)])
    assert np.isnan(ratios[1]).tolist() == [False, True, False]
    assert math.isclose(ratios[5][2], (8 + 2.0**5) / 0.5)


PLACES = [*itertools.product(range(3), range(4))]  # (block, kind)


@dataclass
class Scales:
    """The probe of a run and the figure of its scales; a row of it was done again, and its file was
    cut within the rows of step 400. With the probe of its inference in a second recipe."""

    probe: ProbeRecord
    figure: Figure

    def panels(self, name: str) -> tuple[Axes, Axes]:
        """Of an operand: scales over blocks, and over steps."""
        column = list(OPERANDS).index(name)
        return self.figure.axes[column], self.figure.axes[3 + column]


@pytest.fixture(scope="module")
def scales(tmp_path_factory: pytest.TempPathFactory) -> Scales:
    folder = tmp_path_factory.mktemp("scales")
    wrong = linear_row(300, 1, 2) | {"weight": {**operand("weight", 1, 2, 300), "scale": 1.0}}
    cut = [linear_row(400, block, 0) for block in range(3)]
    probe = probe_of(folder, [wrong, *rows_of()[::-1], *cut])
    in_eval = [linear_row(300, block, kind, gradient=None) for block, kind in PLACES]
    inference = probe_of(folder / "eval", in_eval)
    return Scales(probe, draw_scales(probe, {"rowwise": inference}, "run"))


def test_the_last_step_is_the_last_that_has_every_layer(scales: Scales) -> None:
    assert scales.probe.steps[scales.probe.last] == 300


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("name", OPERANDS)
def test_scales_of_the_last_step_are_drawn_over_blocks(
    name: str, kind: int, scales: Scales
) -> None:
    """Of training, and of inference where it has the operand; the last of a repeated row counts."""
    top, _ = scales.panels(name)
    expected = [math.log2(operand(name, block, kind, 300)["scale"]) for block in range(3)]
    lines = [line for line in lines_of(top) if np.allclose(line[:, 1], expected)]
    assert len(lines) == (1 if name == "gradient" else 2)
    assert np.allclose(np.round(lines[0][:, 0]), [0, 1, 2])


@pytest.mark.parametrize("name", OPERANDS)
def test_whiskers_span_the_scales_of_a_linear(name: str, scales: Scales) -> None:
    """Two octaves either way."""
    top, _ = scales.panels(name)
    segments = [segment for group in top.collections for segment in group.get_segments()]
    ends = np.concatenate(segments)
    assert np.allclose(sorted(ends[1::2, 1] - ends[::2, 1]), 4)


@pytest.mark.parametrize("name", OPERANDS)
def test_the_median_of_scales_is_drawn_over_steps(name: str, scales: Scales) -> None:
    _, bottom = scales.panels(name)
    medians = [
        np.median([math.log2(operand(name, *place, step)["scale"]) for place in PLACES])
        for step in STEPS
    ]
    expected = np.column_stack([STEPS, medians])
    assert any(np.allclose(line[:3], expected) for line in lines_of(bottom))


@pytest.fixture(scope="module")
def heat_maps(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    """Of 12 blocks and the head."""
    head = [linear_row(step, 0, 0, layer="head") for step in STEPS]
    folder = tmp_path_factory.mktemp("heat_maps")
    return draw_underflow(probe_of(folder, [*head, *rows_of(12)]), "run")


PANELS = [*enumerate(itertools.product(SHARES, OPERANDS))]


@pytest.mark.parametrize("number, panel", PANELS)
def test_heat_maps_hold_the_shares_and_leave_zero_out(
    number: int, panel: tuple[str, str], heat_maps: Figure
) -> None:
    share, name = panel
    places = [*itertools.product(range(12), range(4)), (0, 0)]  # the head last
    expected = np.array(
        [[operand(name, *place, step)[share] for step in STEPS] for place in places]
    )
    cells_drawn = heat_maps.axes[number].collections[0].get_array().reshape(expected.shape)
    assert np.allclose(cells_drawn.filled(0), 100 * expected)
    assert (np.ma.getmaskarray(cells_drawn) == (expected == 0)).all()


def test_heat_maps_name_the_blocks_and_the_head(heat_maps: Figure) -> None:
    labels = [label.get_text() for label in heat_maps.axes[0].get_yticklabels()]
    assert labels == [*map(str, range(12)), "head"]


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
    figures_of: str,
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
