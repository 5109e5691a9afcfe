"""Draw one run: its loss, norm and speed with all that went wrong, what FP8 did inside it, its gap to a BF16 run over training.

`draw_run` and `draw_fp8` are the command scaling/figures.py; `draw_pair` is one figure of scaling/precision.py. They read
metrics.jsonl and probe.jsonl of a finished run as well as of one that is still going or was cut short.
"""

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from runtime.cli import UserError
from scaling.figures import RC, render, settle, sheet, steps_axis, write_files
from scaling.pairs import human
from scaling.records import LARGEST, read_curve, read_text

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"     # Okabe-Ito; BF16 is blue in every figure of this project
# A shape of its own for each name; a name that is not here gets one of OTHERS.
MARKS = {"SKIP": ("v", "#E69F00"), "SPIKE": ("^", "#CC79A7"), "ROLLBACK": ("X", ORANGE), "STOP": ("P", "#000000"),
         "resume": (">", "#009E73"), "save failed": ("s", "#56B4E9"), "bad checkpoint": ("D", "#8B5A00"),
         "stopped": ("h", "#000000"), "branch": ("<", "#444444")}
OTHERS = (("*", "#444444"), ("p", "#777777"), ("d", "#999999"))
GPU = ("gpu_util_pct", "gpu_mem_pct", "gpu_power_w")
FIELDS = ("loss", "grad_norm", "lr", "tok_per_s", *GPU, "step_s", "since_start")
LABELS = {"loss": "loss\n[nats/token]", "grad_norm": "gradient\nnorm", "lr": "learning\nrate", "tok_per_s": "speed\n[tokens/s]",
          "gpu_util_pct": "GPU\n[%]"}
OPERANDS = {"weight": "weights", "activation": "activations", "gradient": "gradients"}
SCALES, SHARES = ("scale_min", "scale", "scale_max"), ("underflow", "saturated")
OUTLIERS = ("attention_logit_max", "swiglu_amax", "swiglu_rms")
KINDS = ("qkv", "out", "gate_up", "down", "head")
STYLES = ((BLUE, "o"), (ORANGE, "s"), ("#009E73", "D"), ("#CC79A7", "^"), ("#000000", "P"), ("#E69F00", "v"), ("#56B4E9", "<"))
TWINS = ("params_total", "tokens", "tokens_per_step", "lr_peak", "val_sha256")  # equal in runs that make a null band
WINDOW = 40         # losses are smoothed over a fortieth of the steps
STEADY = 4          # the null band's width over four times as many: one difference crosses zero where it means nothing


def window_of(values) -> int:
    return max(1, len(values) // WINDOW)


def running_mean(values: np.ndarray, times: int = 1) -> np.ndarray:
    """Running mean over so many times window_of values; the window is cut where it would leave the ends."""
    kernel = np.ones(min(times * window_of(values), len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


# ------------------------------------------------------------------------------------------------------- a run's training


@dataclass
class History:
    """A run's rows as arrays; NaN is what was not finite, or not told."""
    train: dict[str, np.ndarray]                                        # "step", "ok", FIELDS -> a value per step that counts
    undone: list[dict[str, np.ndarray]]                                 # the same of each stretch that a rollback took back
    val: np.ndarray                                                     # (n, 2): step, loss
    undone_val: np.ndarray
    marks: dict[str, list[dict]] = field(default_factory=dict)          # name -> rows: a verdict that is not OK, an event
    notes: list[str] = field(default_factory=list)


def draw_run(run: Path, folder: Path) -> None:
    """Write run.png into `folder`, say where and what was left out.

    Raises UserError where the run has no step to draw, or where `folder` cannot be written."""
    history = read_history(run)
    with matplotlib.rc_context(RC):
        write_files(folder, {"run.png": render(draw(history, run.resolve().name), "png")})
    print("\n".join([*history.notes, f"wrote {folder}/: run.png"]))


def read_history(run: Path) -> History:
    """What metrics.jsonl tells, the last of a repeated step. Raises UserError where there is no such file or no step in it."""
    path = run / "metrics.jsonl"
    rows, torn = _rows(run, path.name, "the folder of a run, such as out/demo_s_fp8")
    good = [row for row in rows if isinstance(row.get("kind"), str) and type(row.get("step")) is int and 0 <= row["step"] < 2**53]
    history = History(_columns({row["step"]: row for row in good if row["kind"] == "train"}), [],
                      *(_validations(good, kind) for kind in ("val", "undone_val")))
    for is_undone, stretch in itertools.groupby(good, key=lambda row: row["kind"] in ("undone", "undone_val")):
        steps = {row["step"]: row for row in stretch if row["kind"] == "undone"}
        if is_undone and steps:
            history.undone.append(_columns(steps))
    for row in good:
        name = row.get("event" if row["kind"] == "event" else "verdict")
        if row["kind"] in ("event", "train", "undone") and isinstance(name, str) and name != "OK":
            name = "ROLLBACK" if name == "rollback" else name.replace("_", " ")[:14]
            history.marks.setdefault(name, []).append(row)      # of a rollback both, the step judged and the event
    if not len(history.train["step"]) and not history.undone:
        raise UserError(f'{path} has no step to draw yet: expected a line like {{"kind": "train", "step": 1, "loss": 5.8, ...}}')
    if left_out := torn + len(rows) - len(good):
        history.notes.append(f"{path}: left out {left_out} line{'s' * (left_out > 1)} that cannot be read")
    return history


def _rows(run: Path, name: str, expected: str) -> tuple[list[dict], int]:
    """The objects of a file of JSON lines (or of its .gz), and how many lines are none; a cut last one is not counted."""
    path = run / name
    if not any(one.is_file() for one in (path, run / f"{name}.gz")):
        raise UserError(f"{run} {f'has no {name}' if run.is_dir() else 'is no folder'}: expected {expected}")
    lines, rows, last = read_text(path).split("\n"), [], 0
    torn = 0
    for line in filter(str.strip, lines):
        try:
            last = json.loads(line)
        except (ValueError, RecursionError):
            last = None
        torn += not isinstance(last, dict)
        rows += [last] if isinstance(last, dict) else []
    return rows, torn - (last is None)


def _columns(rows: dict[int, dict]) -> dict[str, np.ndarray]:
    ordered = [rows[step] for step in sorted(rows)]
    return {"step": np.array([row["step"] for row in ordered], dtype=float),
            "ok": np.array([row.get("verdict", "OK") == "OK" for row in ordered], dtype=float),
            **{key: np.array([_number(row.get(key)) for row in ordered], dtype=float) for key in FIELDS}}


def _validations(rows: list[dict], kind: str) -> np.ndarray:
    found = {row["step"]: _number(row.get("loss")) for row in rows if row["kind"] == kind}
    return np.array([pair for pair in sorted(found.items()) if math.isfinite(pair[1])], dtype=float).reshape(-1, 2)


def _number(value) -> float:
    """A row's value, NaN where it is no number that can be drawn."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 else math.nan


def draw(history: History, name: str) -> Figure:
    """The page of one run, called `name`; panels for what the rows hold."""
    has_gpu = any(np.isfinite(history.train[key]).any() for key in GPU)
    keys = [key for key in LABELS if key != "gpu_util_pct" or has_gpu]
    heights = [2.3 if key == "loss" else 0.85 for key in keys]
    steps = [int(step) for columns in (history.train, *history.undone) for step in columns["step"]]
    window = window_of(history.train["step"])
    caption = (f"Line: mean over {window} OK steps; faint: single steps." if window > 1 else "Line: every step that was OK.") + (
        " Grey: steps that a rollback took back and did again on other data." * bool(history.undone)) + (
        " Marks: verdicts at their value or at the edge, events at the foot; in brackets: how many." * bool(history.marks))
    marks = _styled(history.marks)
    handles = [Line2D([], [], color=BLUE, linewidth=1.4, label="training")]
    if len(history.val):
        handles.append(Line2D([], [], color="#000000", marker="D", markersize=3.4, markerfacecolor="white", linestyle="",
                              label="validation"))
    if history.undone:
        handles.append(Line2D([], [], color=GREY, linewidth=1, label="undone"))
    for mark, rows, style in marks:
        events = sum(row["kind"] == "event" for row in rows)
        handles.append(Line2D([], [], label=f"{mark} ({max(events, len(rows) - events):,})", **style))
    title = f"Training of {name} (n = 1 run, steps {min(steps):,} to {max(steps):,})"
    figure, grid = sheet((7.4, sum(heights) + 0.9 + 0.17 * (len(handles) // 5)), len(keys), 1, title, caption, handles, 5,
                         sharex=True, height_ratios=heights)
    panels = dict(zip(keys, grid[:, 0], strict=True))
    for key, panel in panels.items():
        panel.set_ylabel(LABELS[key])
        if key == "gpu_util_pct":
            _draw_gpu(panel, history.train)
            continue
        for columns in history.undone:
            panel.plot(columns["step"], columns[key], color=GREY, linewidth=0.7, alpha=0.8, zorder=1.5)
        _draw_line(panel, history.train, key)
    panels["loss"].plot(*history.undone_val.T, "D", color=GREY, markersize=3.4, markerfacecolor="none", zorder=3)
    panels["loss"].plot(*history.val.T, "D", color="#000000", markersize=3.4, markerfacecolor="white", zorder=3)
    room = max(0.6, 0.01 * np.ptp(steps))
    panels["loss"].set_xlim(min(steps) - room, max(steps) + room)
    _set_limits(panels, history)
    for _, rows, style in marks:
        _draw_marks(panels, rows, style)
    steps_axis(grid[-1, 0])
    figure.align_ylabels()
    return settle(figure)


def _draw_line(panel, columns, key) -> None:
    """Single steps, faint; over them the running mean of those that were OK."""
    if key != "lr":
        known = np.isfinite(columns[key])
        panel.plot(columns["step"][known], columns[key][known], color=BLUE, linewidth=0.5, alpha=0.35, zorder=2)
    steps, values = _accepted(columns, key)
    if len(values):
        panel.plot(steps, running_mean(values) if key != "lr" else values, "." if len(values) == 1 else "-", color=BLUE,
                   linewidth=1.3, zorder=2.5)


def _accepted(columns, key) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of what was finite in the steps that were OK."""
    known = np.isfinite(columns[key]) & (columns["ok"] > 0)
    return columns["step"][known], columns[key][known]


def _draw_gpu(panel, columns) -> None:
    """Percentages on the left axis, watts on the right."""
    right = panel.twinx()
    right.spines["right"].set_visible(True)
    for axis, key, color, dash, label in ((panel, "gpu_util_pct", BLUE, "-", "busy"),
                                          (panel, "gpu_mem_pct", "#000000", (0, (4, 2)), "memory"),
                                          (right, "gpu_power_w", ORANGE, (0, (1, 1)), "power")):
        known = np.isfinite(columns[key])
        if known.any():
            axis.plot(columns["step"][known], running_mean(columns[key][known]), color=color, linestyle=dash, linewidth=1.3,
                      label=label)
    panel.set_ylim(0, 109)
    right.set_ylim(0, 1.4 * max(np.nanmax([*columns["gpu_power_w"], 1]), 1))     # below the percentages
    right.set_ylabel("power [W]")
    panel.legend(handles=[line for axis in (panel, right) for line in axis.get_lines() if line.get_label()[0] != "_"],
                 loc="lower right", ncols=3, framealpha=0.8, edgecolor="none", borderpad=0.2)


def _styled(marks: dict[str, list[dict]]) -> list[tuple[str, list[dict], dict]]:
    """(name, rows, style of its mark), known names first."""
    others = itertools.cycle(OTHERS)
    ordered = sorted(marks, key=lambda name: (list(MARKS).index(name) if name in MARKS else len(MARKS), name))
    looks = [(name, MARKS.get(name) or next(others)) for name in ordered]
    return [(name, marks[name], {"color": color, "marker": shape, "linestyle": "", "markersize": 5.5, "markeredgecolor": "white",
                                 "markeredgewidth": 0.5, "clip_on": False, "in_layout": False, "zorder": 5})
            for name, (shape, color) in looks]


def _draw_marks(panels, rows, style) -> None:
    """Verdicts at their loss and gradient norm, events at the foot of the loss with a line through all."""
    events = [row["step"] for row in rows if row["kind"] == "event"]
    for key, panel in panels.items():
        low, high = panel.get_ylim()
        for step in events:
            panel.axvline(step, color=style["color"], linewidth=0.7, linestyle=(0, (4, 2)), alpha=0.8, zorder=1.2)
        if key in ("loss", "grad_norm"):
            verdicts = [row for row in rows if row["kind"] != "event"]
            values = [_number(row.get(key)) for row in verdicts]
            panel.plot([row["step"] for row in verdicts], [high if math.isnan(v) else min(max(v, low), high) for v in values],
                       **style)
        if key == "loss":
            panel.plot(events, [low] * len(events), **style)


def _set_limits(panels, history: History) -> None:
    """Limits that one spike does not govern: what lies beyond them is cut, its mark stands at the edge."""
    loss, norm = (_accepted(history.train, key)[1] for key in ("loss", "grad_norm"))
    if len(loss):
        low, high = np.quantile(loss, (0.002, 0.98))
        ends = [low, high, running_mean(loss)[0], *history.val[:, 1]]
        room = max(0.06 * np.ptp(ends), 0.01 * abs(high), 1e-6)
        panels["loss"].set_ylim(min(ends) - room, max(ends) + room)
    if len(norm) and np.quantile(norm, 0.002) > 0:
        panels["grad_norm"].set_yscale("log")
        panels["grad_norm"].set_ylim(np.quantile(norm, 0.002) / 1.3, 2 * np.quantile(norm, 0.98))
        _few_log_ticks(panels["grad_norm"])
    speed = _accepted(history.train, "tok_per_s")[1]
    panels["tok_per_s"].set_ylim(0, 1.15 * max(np.quantile(speed, 0.99), 1e-6) if len(speed) else 1)
    panels["tok_per_s"].yaxis.set_major_locator(MaxNLocator(3))
    panels["tok_per_s"].yaxis.set_major_formatter(FuncFormatter(lambda y, _: human(y) if y else "0"))
    panels["lr"].set_ylim(0, 1.12 * max(_accepted(history.train, "lr")[1].max(initial=0), 1e-12))
    panels["lr"].yaxis.set_major_locator(MaxNLocator(3))
    panels["lr"].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _few_log_ticks(panel) -> None:
    """A few values in words on a log axis, whose range may be less than a decade."""
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(MaxNLocator(3) if high < 4 * low else LogLocator(subs=(1, 3), numticks=5))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human(y)))
    panel.yaxis.set_minor_formatter(NullFormatter())


# ------------------------------------------------------------------------------------------------------- what FP8 did inside


@dataclass(frozen=True)
class Probe:
    """The rows of one probe file as arrays, NaN where no number was written."""

    recipe: str                                 # of the Linears; several joined by "+"
    layers: list[str]                           # in order of depth, the head last
    steps: np.ndarray                           # (steps,) at which Linears were probed
    last: int                                   # index of the last step that has every layer; of a cut-off file, too
    linear: dict[tuple[str, str], np.ndarray]   # (operand, field) -> (layers, steps)
    blocks: list[int]
    block_steps: np.ndarray
    block: dict[str, np.ndarray]                # field -> (blocks, steps)


def read_probe(path: Path) -> tuple[Probe, list[str]]:
    """One probe file, plus a line if some of its lines are no JSON; of a step that is there twice the last one counts.

    Raises UserError where there is no row, or where one is not what a probe writes."""
    rows, torn = _rows(path.parent, path.name, "the folder of a run trained with probe.every=STEPS, such as probe.every=100, "
                                               "which writes probe.jsonl")
    linear, block, recipes, fields = {}, {}, {}, (*SCALES, *SHARES, "error")
    for row in rows:
        try:
            if row["kind"] == "block":
                block[int(row["block"]), int(row["step"])] = [_number(row[key]) for key in OUTLIERS]
            elif row["kind"] == "linear":
                recipes[row["layer"]] = row["recipe"]
                numbers = row["weight"], row["activation"], row.get("gradient") or dict.fromkeys(fields)     # none at inference
                linear[row["layer"], int(row["step"])] = [_number(one[key]) for one in numbers for key in fields]
            else:
                raise ValueError("an unknown kind")
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: {json.dumps(row)[:80]} is no row of a probe ({type(error).__name__}: {error}): the file is "
                            "damaged or from other code; restore it, or leave it out") from None
    if not linear and not block:
        raise UserError(f"{path} holds no row: the run was stopped before its first probe; lower probe.every")
    layers, steps, values = _grid(linear, lambda layer: (*place(layer), layer))
    blocks, block_steps, outliers = _grid(block, lambda block: block)
    count = [sum((layer, step) in linear for layer in layers) for step in steps.tolist()]
    last = max(i for i, n in enumerate(count) if n == max(count)) if layers else 0
    notes = [f"{path}: left out {torn} line{'s' * (torn > 1)} that cannot be read"] if torn else []
    return Probe("+".join(sorted(set(recipes.values()))), layers, steps, last,
                 dict(zip(itertools.product(OPERANDS, fields), values, strict=False)), blocks, block_steps,
                 dict(zip(OUTLIERS, outliers, strict=False))), notes


def _grid(rows: dict, order) -> tuple[list, np.ndarray, np.ndarray]:
    """{(key, step): numbers} as keys in order, steps, and one (keys, steps) array for each number."""
    keys, steps = sorted({key for key, _ in rows}, key=order), sorted({step for _, step in rows})
    values = np.full((len(next(iter(rows.values()), ())), len(keys), len(steps)), math.nan)
    for (key, step), numbers in rows.items():
        values[:, keys.index(key), steps.index(step)] = numbers
    return keys, np.array(steps), values


def place(layer: str) -> tuple[float, int, str]:
    """Block index of "layers.0.attn.qkv" (infinite outside the blocks), rank of the kind within the block, kind."""
    parts = layer.split(".")
    kind = parts[-1]
    block = int(parts[1]) if parts[0] == "layers" and parts[1:2] and parts[1].isdigit() else math.inf
    return block, KINDS.index(kind) if kind in KINDS else len(KINDS), kind


def kinds_of(layers) -> dict[str, np.ndarray]:
    """Kind of Linear -> indices of its layers."""
    kinds = [place(layer)[1:] for layer in layers]
    return {name: np.array([i for i, kind in enumerate(kinds) if kind == (rank, name)]) for rank, name in sorted(set(kinds))}


def table(probe: Probe) -> str:
    """Markdown table of the worst underflow and saturation (any layer, any step) of each kind and operand."""
    lines = [f"| Linear | operand | worst underflow % | worst saturated % | median error % at step {probe.steps[probe.last]} |",
             "|---" * 5 + "|"]
    for (kind, rows), operand in itertools.product(kinds_of(probe.layers).items(), OPERANDS):
        shares = [probe.linear[operand, field][rows] for field in SHARES]
        errors = quantiles(probe.linear[operand, "error"][rows][:, [probe.last]], 50)[0]
        cells = [100 * v for v in (*(np.fmax.reduce(share, axis=None) for share in shares), errors[0])]
        lines.append(f"| {kind} | {operand} | " + " | ".join("-" if math.isnan(v) else f"{v:.3g}" for v in cells) + " |")
    return "\n".join(lines)


def quantiles(values: np.ndarray, *percents: float) -> np.ndarray:
    """(percents, columns) over the finite rows of each column; NaN where a column has none."""
    return np.array([np.percentile(v, percents) if len(v := column[np.isfinite(column)]) else [math.nan] * len(percents)
                     for column in values.T]).T


def draw_fp8(run: Path, folder: Path) -> None:
    """Write the figures of a run's probes into `folder`, print the table and what was left out.

    Inference probes are read from run/eval/probe_*.jsonl, for the gap the neighbours of `run`. Raises UserError where the run
    has no probe rows, where they are damaged, or where `folder` cannot be written."""
    probe, notes = read_probe(run / "probe.jsonl")
    figures, name = {}, run.resolve().name
    with matplotlib.rc_context(RC):
        if probe.layers:
            inference = {path.stem.removeprefix("probe_"): read_probe(path)[0] for path in sorted(run.glob("eval/probe_*.jsonl"))}
            figures["fp8_scales"] = draw_scales(probe, inference, name)
            figures["fp8_underflow"] = draw_underflow(probe, name)
            figures["fp8_gap"], more = draw_gap(run)
            notes += more
        else:
            notes.append(f"{run} has probed no FP8 Linear (a BF16 run?): only fp8_outliers is drawn")
        figures["fp8_outliers"] = draw_outliers(probe, name) if probe.blocks else None
        if not probe.blocks:
            notes.append(f"{run}/probe.jsonl has no block row: fp8_outliers is not drawn")
        files = {f"{name}.{form}": render(figure, form) for name, figure in figures.items() if figure
                 for form in ("png", "svg")}
    write_files(folder, files)
    print("\n".join([*notes, *(["", table(probe), ""] if probe.layers else []), f"wrote {folder}/: {', '.join(files)}"]))


def draw_scales(probe: Probe, inference: dict[str, Probe], name: str) -> Figure:
    """Scales over depth at the last probed step (top), over training (bottom), one column for each operand."""
    caption = (f"Top: every Linear at step {probe.steps[probe.last]}, whiskers from its smallest to its largest scale. Bottom: "
               "median over Linears, bands 10 to 90 % and smallest to largest. A tensor is multiplied by its scale before FP8.")
    sources = [("", "", probe), *((f"inference, {recipe}", marker, rows) for (recipe, rows), marker
                                  in zip(inference.items(), itertools.cycle("sDo^v<>"), strict=False))]
    layers = list(dict.fromkeys(layer for *_, source in sources for layer in source.layers))
    kinds, blocks = list(kinds_of(layers)), {place(layer)[0] for layer in layers}
    style = dict(zip(kinds, itertools.cycle(STYLES), strict=False))
    style |= {kind: STYLES[KINDS.index(kind)] for kind in kinds if kind in KINDS}
    end = max(blocks - {math.inf}, default=-1) + 1      # where the head is drawn
    hollow = {"markersize": 4.4, "markerfacecolor": "none", "markeredgewidth": 0.6, "linestyle": "none"}
    handles = [Line2D([], [], color=style[kind][0], marker=style[kind][1], markersize=2.4, label=kind) for kind in kinds]
    handles += [Line2D([], [], color="#444444", marker=marker, label=label, **hollow) for label, marker, _ in sources[1:]]
    title = f"Scales of FP8 tensors in {name} ({probe.recipe}; n = {len(probe.layers)} Linears, {len(probe.steps)} probed steps)"
    figure, panels = sheet((7.4, 4.9), 2, 3, title, caption, handles, 8, sharey="col")
    for operand, top, bottom in zip(OPERANDS, *panels, strict=True):
        for label, marker, source in sources:
            low, middle, high = (_log2(source.linear[operand, field][:, source.last]) for field in SCALES)
            for kind, rows in kinds_of(source.layers).items():
                shift = 0.14 * (kinds.index(kind) - (len(kinds) - 1) / 2)   # whiskers beside each other
                x = [block + shift if (block := place(source.layers[i])[0]) < math.inf else end for i in rows]
                colour, filled = style[kind]
                if label:
                    top.plot(x, middle[rows], marker=marker, color=colour, **hollow)
                    continue
                top.vlines(x, low[rows], high[rows], color=colour, linewidth=0.7, alpha=0.7)
                top.plot(x, middle[rows], f"{filled}-", color=colour, markersize=2.4, linewidth=0.8)
            if label:
                bottom.plot(source.steps[[source.last]], quantiles(middle[:, None], 50)[0], marker=marker, color="#444444",
                            **hollow)
        low, middle, high = (_log2(probe.linear[operand, field]) for field in SCALES)
        for band, alpha in (((quantiles(low, 0)[0], quantiles(high, 100)[0]), 0.13), (quantiles(middle, 10, 90), 0.3)):
            bottom.fill_between(probe.steps, *band, color="#444444", alpha=alpha, linewidth=0)
        bottom.plot(probe.steps, quantiles(middle, 50)[0], ".-", color="#000000", markersize=2.5, linewidth=1)
        steps_axis(bottom)
        if np.ptp(bottom.get_ylim()) < 2:        # constant scales
            bottom.set_ylim(np.mean(bottom.get_ylim()) + np.array([-1, 1]))
        bottom.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        if not np.isfinite(probe.linear[operand, "scale"]).any():
            top.text(0.5, 0.5, "no scale: these stay in BF16", transform=top.transAxes, ha="center")
        top.set(title=OPERANDS[operand], xlabel="block", xlim=(-0.6, end - 0.4 + (math.inf in blocks)))
        each = max(1, round(end / 5))
        ticks = [block for block in range(0, end, each) if math.inf not in blocks or end - block > 0.8 * each]
        top.set_xticks(ticks + [end] * (math.inf in blocks), list(map(str, ticks)) + ["head"] * (math.inf in blocks))
    for panel in panels[:, 0]:
        panel.set_ylabel("log$_2$ of the scale")
    return settle(figure)


def draw_underflow(probe: Probe, name: str) -> Figure:
    """Share of values that FP8 loses at either end: heat maps, Linears in order of depth by step."""
    n, blocks = len(probe.layers), [place(layer)[0] for layer in probe.layers]
    kinds = ", ".join(kinds_of([layer for layer, block in zip(probe.layers, blocks, strict=True) if block < math.inf]))
    title = f"Values that FP8 loses in {name} ({probe.recipe}; n = {n} Linears, {len(probe.steps)} probed steps)"
    caption = (f"A row per Linear; within a block from the top: {kinds}. Underflow: not zero, rounded to zero. Saturated: beyond "
               "the largest value. Light grey: none at all. White: not measured.")
    figure, panels = sheet((7.4, 2 * min(max(0.052 * n, 1.3), 3.4) + 1.3), 2, 3, title, caption, sharex=True, sharey=True)
    edges = (probe.steps[1:] + probe.steps[:-1]) / 2
    x = (np.concatenate([[2 * probe.steps[0] - edges[0]], edges, [2 * probe.steps[-1] - edges[-1]]]) if len(edges)
         else probe.steps[0] + np.array([-0.5, 0.5]))
    for share, line in zip(SHARES, panels, strict=True):
        values = {operand: 100 * probe.linear[operand, share] for operand in OPERANDS}
        found = np.concatenate([v[v > 0] for v in values.values()] or [[]])
        high = math.ceil(math.log10(found.max())) if len(found) else 0
        low = min(max(math.floor(math.log10(found.min())), high - 6), high - 1) if len(found) else -3
        norm = LogNorm(10.0**low, 10.0**high, clip=True)
        for panel, (operand, v) in zip(line, values.items(), strict=True):
            mesh = {"edgecolors": "none", "rasterized": True}
            panel.grid(False)
            panel.pcolormesh(x, np.arange(n + 1), np.ma.masked_where(~(v == 0), v), cmap=ListedColormap(["#DDDDDD"]), **mesh)
            panel.pcolormesh(x, np.arange(n + 1), np.ma.masked_where(~(v > 0), v), cmap="viridis", norm=norm, **mesh)
            panel.hlines(np.flatnonzero(np.array(blocks)[1:] != blocks[:-1]) + 1, x[0], x[-1], color="white", linewidth=0.5)
            if not np.isfinite(v).any():
                panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
            panel.set(title=f"{OPERANDS[operand]}: {share}")
            panel.tick_params(axis="y", length=0)
        figure.colorbar(ScalarMappable(norm, "viridis"), ax=line, label=f"{share} [% of values]", pad=0.01, aspect=30)
        line[0].set_ylabel("block")
    shown = list(dict.fromkeys(blocks))
    shown = shown[::math.ceil(len(shown) / 16)]
    panels[0, 0].set_yticks([blocks.index(block) + blocks.count(block) / 2 for block in shown],
                            ["head" if block == math.inf else f"{block}" for block in shown])
    panels[0, 0].set_ylim(n, 0)
    for panel in panels[1]:
        steps_axis(panel)
    return settle(figure)


def draw_outliers(probe: Probe, name: str) -> Figure:
    """Largest attention logit and SwiGLU outliers over training, a line for each block."""
    title = f"Outliers in {name} (n = {len(probe.blocks)} blocks, {len(probe.block_steps)} probed steps)"
    caption = "A line per block, its number by colour. SwiGLU: the product that enters mlp.down."
    figure, panels = sheet((7.4, 3.1), 1, 2, title, caption)
    ratio = probe.block["swiglu_amax"] / np.where(probe.block["swiglu_rms"] > 0, probe.block["swiglu_rms"], math.nan)
    norm = matplotlib.colors.Normalize(min(probe.blocks), max(max(probe.blocks), min(probe.blocks) + 1) / 0.82)
    for panel, values, label in zip(panels[0], (probe.block["attention_logit_max"], ratio), (
            "largest attention logit", "largest / rms of SwiGLU product"), strict=True):
        for line, block in zip(values, probe.blocks, strict=True):
            panel.plot(probe.block_steps, line, ".-", color=matplotlib.colormaps["viridis"](norm(block)), linewidth=0.9,
                       markersize=2)
        known = values[np.isfinite(values)]
        if len(known) and known.min() > 0 and known.max() / known.min() > 20:
            panel.set_yscale("log")
            _few_log_ticks(panel)
        panel.set_ylabel(label)
        steps_axis(panel)
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=panels, label="block", pad=0.01,
                    boundaries=np.arange(min(probe.blocks), max(probe.blocks) + 2) - 0.5, ticks=MaxNLocator(6, integer=True))
    return settle(figure)


def _log2(values: np.ndarray) -> np.ndarray:
    return np.log2(np.where(values > 0, values, math.nan))


# ----------------------------------------------------------------------------------------------------- a gap over training


def draw_gap(run: Path) -> tuple[Figure | None, list[str]]:
    """Loss of `run` minus loss of its BF16 partner over steps, or None; plus lines saying what is missing and why.

    Runs are found among the sibling folders: the partner by its pair_id, the null band's runs by TWINS. A repeat (the
    partner's training once more with other rounding) is no partner; it shows what rounding alone does."""
    own = _summary(run)
    if own is None:
        return None, [f"fp8_gap is not drawn: {run} has no readable summary.json, so it is unfinished"]
    others = {folder: summary for folder in sorted(run.resolve().parent.iterdir())
              if folder != run.resolve() and (summary := _summary(folder)) and summary["precision"]["recipe"] == "bf16"}
    same = [folder for folder, summary in others.items() if summary["pair_id"] == own["pair_id"]]
    repeats = [folder for folder in same if others[folder].get("repeat")]
    partner = next((folder for folder in same if folder not in repeats), None)
    if partner is None:
        return None, [f"fp8_gap is not drawn: beside {run} there is no BF16 run with its pair_id {own['pair_id']}"]
    train, val = (_difference(run, partner, kind) for kind in ("train", "val"))
    if not len(train[0]):
        return None, [f"fp8_gap is not drawn: {run} and {partner.name} have no logged training step in common"]
    twins = [folder for folder, summary in others.items() if not summary.get("repeat")
             and all(summary.get(key) is not None and summary.get(key) == own.get(key) for key in TWINS)]
    nulls = [pair for pair in itertools.combinations(twins, 2) if others[pair[0]].get("seed") != others[pair[1]].get("seed")]
    notes = [] if nulls else ["fp8_gap: no two BF16 runs beside it are equal but for the seed, so there is no null band"]
    handles = [Line2D([], [], color=ORANGE, label=f"training, mean of {window_of(train[0])} steps"),
               Line2D([], [], color=BLUE, marker="D", markersize=4, linestyle="none", label="validation")]
    if nulls:
        handles.append(Line2D([], [], color="#BBBBBB", linewidth=5, label=f"BF16, other seed ({len(nulls)} "
                                                                          f"pair{'s' * (len(nulls) > 1)})"))
    rounding = [gap for repeat in repeats if len((gap := _difference(repeat, partner, "train"))[0])]
    if rounding:
        same_bits = not any(gap.any() for _, gap in rounding)
        handles.append(Line2D([], [], color="#000000", linewidth=1, linestyle=(0, (4, 2)),
                              label="BF16, same seed, other rounding" + " (equal losses)" * same_bits))
    caption = ("Above zero: FP8 is worse. Faint: single steps, of which the first 5 % may leave the axis. Grey: mean absolute "
               "difference of BF16 runs that differ in the seed alone, which also draws other batches." if nulls else
               "Above zero: FP8 is worse. Faint: single steps, of which the first 5 % may leave the axis. Noise between seeds is "
               "not shown: no two BF16 runs beside it differ in the seed alone.")
    figure, panels = sheet((7.4, 3.4), 1, 1, f"Loss of {run.resolve().name} ({own['precision']['recipe']}) minus loss of "
                           f"{partner.name} (BF16), n = 1 pair", caption, handles, 4)
    panel, reach = panels[0, 0], [1e-6]
    band, bars = ([_difference(*pair, kind) for pair in nulls] for kind in ("train", "val"))
    if band := [(steps, running_mean(abs(running_mean(gap)), STEADY)) for steps, gap in band if len(steps)]:
        # Between the steps of the shorter run nothing is made up: beyond its end there is no band.
        band = np.array([np.interp(train[0], *pair, left=math.nan, right=math.nan) for pair in band])
        band = np.fmax.reduce(band, axis=0)
        panel.fill_between(train[0], -band, band, color="#BBBBBB", alpha=0.6, linewidth=0)
        reach.append(np.fmax.reduce(band[_late(train[0])]))
    for steps, gap in bars:
        panel.vlines(steps, -abs(gap), abs(gap), color="#777777", linewidth=2.2, alpha=0.6)
        reach += abs(gap).tolist()
    reach += _draw_difference(panel, *train)
    for steps, gap in rounding:
        panel.plot(steps, again := running_mean(gap), color="#000000", linewidth=1, linestyle=(0, (4, 2)))
        reach += abs(again[_late(steps)]).tolist()
    panel.plot(*val, "D", color=BLUE, markersize=4)
    limit = 1.25 * np.fmax.reduce([*reach, *abs(val[1])])
    panel.set(ylim=(-limit, limit), ylabel="FP8 minus BF16 [nats/token]")
    steps_axis(panel)
    return settle(figure), notes


def _draw_difference(panel, x, gap) -> list[float]:
    """A gap over training: single steps faint, their running mean; returns its size after the first 5 %."""
    smooth = running_mean(gap)
    panel.axhline(0, color="#444444", linewidth=0.8)
    panel.plot(x, gap, color=ORANGE, alpha=0.25, linewidth=0.5)
    panel.plot(x, smooth, color=ORANGE, linewidth=1.5)
    return abs(smooth[_late(x)]).tolist()


def _late(x) -> np.ndarray:
    return x >= 0.05 * x[-1]


def _summary(folder: Path) -> dict | None:
    """summary.json of a finished run with a pair_id and a recipe; None for anything else."""
    try:
        summary = json.loads((folder / "summary.json").read_bytes())
        return summary if isinstance(summary["pair_id"], str) and isinstance(summary["precision"]["recipe"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _difference(first: Path, second: Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps that both runs logged, loss of the first minus loss of the second there."""
    one, other = ({row["step"]: row["loss"] for row in _rows(folder, "metrics.jsonl", "a run")[0]
                   if row.get("kind") == kind and type(row.get("step")) is int and 0 < _number(row.get("loss")) < LARGEST}
                  if any(folder.glob("metrics.jsonl*")) else {} for folder in (first, second))
    steps = sorted(one.keys() & other.keys())
    return np.array(steps), np.array([one[step] - other[step] for step in steps], dtype=float)


def draw_pair(pair) -> tuple[Figure | None, list[str]]:
    """Smoothed training loss of both arms of a pairs.Pair over tokens, their difference below; or None with a note."""
    curves = [dict(zip(*_whole_curve(record), strict=True)) for record in (pair.bf16, pair.fp8)]
    tokens = np.array(sorted(curves[0].keys() & curves[1].keys()))
    if len(tokens) < 2:
        return None, [f"pair.png is not drawn: {pair.fp8.run_id} and {pair.bf16.run_id} have no training step in common in "
                      "metrics.jsonl"]
    loss = [np.array([curve[t] for t in tokens]) for curve in curves]
    window = window_of(tokens)
    caption = (f"Lines: mean over {window} step{'s' * (window > 1)}; faint: single steps. Same data in the same order, so the "
               "batches' own difficulty cancels below. Diamonds: validation at the end, in BF16 (filled), as trained (hollow).")
    looks = ({"color": BLUE, "linewidth": 2.4}, {"color": ORANGE, "linewidth": 1.1, "linestyle": (0, (3.2, 1.6))})
    with matplotlib.rc_context(RC):
        title = f"Training loss of {human(pair.fp8.params_total)} parameters in BF16 and FP8 {pair.fp8.recipe} (n = 1 pair)"
        names = f"BF16: {pair.bf16.run_id}", f"FP8: {pair.fp8.run_id}"
        handles = [Line2D([], [], label=name, **look) for name, look in zip(names, looks, strict=True)]
        figure, panels = sheet((7.4, 3.9), 2, 1, title, caption, handles, 2, sharex=True, height_ratios=(1.5, 1))
        top, below = panels[:, 0]
        for values, look in zip(loss, looks, strict=True):
            top.plot(tokens, running_mean(values), **look)
        ends = [running_mean(values)[_late(tokens)] for values in loss]
        low, high = min(map(np.min, ends)), max(map(np.max, ends))
        top.set(ylim=(low - 0.08 * (high - low), high + 0.08 * (high - low)), ylabel="training loss\n[nats/token]")
        reach = _draw_difference(below, tokens, loss[1] - loss[0])
        for nats, face in ((pair.in_bf16.nats, BLUE), (pair.as_trained.nats, "none")):
            below.plot(tokens[-1], nats, "D", color=BLUE, markerfacecolor=face, markersize=4.5, clip_on=False, zorder=4)
        limit = 1.3 * max([*reach, abs(pair.in_bf16.nats), abs(pair.as_trained.nats), 1e-9])
        below.set(ylim=(-limit, limit), ylabel="FP8 − BF16\n[nats/token]")
        steps_axis(below)
        below.set_xlabel("training tokens")
        figure.align_ylabels()
        return settle(figure), []


def _whole_curve(record):
    """read_curve, before a branch's first step continued by the run that it branched off, where that lies beside it."""
    tokens, loss = read_curve(record)
    if record.parent_run is None or not len(tokens):
        return tokens, loss
    earlier, height = read_curve(replace(record, folder=record.folder.parent / record.parent_run, parent_run=None))
    before = earlier < tokens[0]
    return np.concatenate([earlier[before], tokens]), np.concatenate([height[before], loss])
