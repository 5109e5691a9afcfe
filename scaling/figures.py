"""Draw one run, whole, going or cut short; hold the plot style of the repository.

    python scaling/figures.py out/RUN [out=DIR]        # its training, from metrics.jsonl; DIR is out/RUN/figures
    python scaling/figures.py --fp8 out/RUN [out=DIR]  # what FP8 did inside it, from probe.jsonl

A training: loss, norm and speed with all that went wrong. It uses matplotlib's objects without
pyplot, so no window system is asked for, no global state is left behind. Several runs of one
training are drawn by scaling/report.py."""

import io
import itertools
import json
import math
import textwrap
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import (
    FuncFormatter,
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

from runtime.cli import FilePath, UserError, command, grid, run_command, si
from runtime.machine import metrics_rows, read_rows, write_atomically

RC = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "svg.hashsalt": "scaling",
    "font.family": "DejaVu Sans",
}
styled = matplotlib.rc_context(RC)  # decorates what draws a figure
# Okabe-Ito colours, told apart by colour-blind readers; marker and dash differ too, for grey
# prints.
STYLES = (
    {
        "color": "#0072B2",
        "shades": "Blues",
        "marker": "o",
        "markersize": 5.8,
        "linestyle": "-",
        "linewidth": 2.0,
        "hollow": True,
    },
    {
        "color": "#D55E00",
        "shades": "Oranges",
        "marker": "s",
        "markersize": 3.2,
        "linestyle": (0, (2.4, 1.8)),
        "linewidth": 1.0,
    },
    {
        "color": "#009E73",
        "shades": "Greens",
        "marker": "D",
        "markersize": 3.2,
        "linestyle": (0, (5, 1, 1, 1)),
        "linewidth": 1.0,
    },
    {
        "color": "#CC79A7",
        "shades": "RdPu",
        "marker": "^",
        "markersize": 4.0,
        "linestyle": (0, (1, 1.2)),
        "linewidth": 1.2,
    },
    {
        "color": "#000000",
        "shades": "Greys",
        "marker": "v",
        "markersize": 4.0,
        "linestyle": (0, (3, 3)),
        "linewidth": 1.0,
    },
    {
        "color": "#E69F00",
        "shades": "YlOrBr",
        "marker": "P",
        "markersize": 4.0,
        "linestyle": (0, (6, 2)),
        "linewidth": 1.0,
    },
    {
        "color": "#56B4E9",
        "shades": "GnBu",
        "marker": "X",
        "markersize": 4.0,
        "linestyle": (0, (2, 4)),
        "linewidth": 1.0,
    },
)
# of the first STYLES, in their order
RECIPES = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "auto")
# Okabe-Ito; BF16 is blue in every figure of this project
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
# A shape of its own for each name; any other name gets OTHER.
MARKS = {
    "SKIP": ("v", "#E69F00"),
    "SPIKE": ("^", "#CC79A7"),
    "ROLLBACK": ("X", ORANGE),
    "STOP": ("P", "#000000"),
    "resume": (">", "#009E73"),
    "save failed": ("s", "#56B4E9"),
    "bad checkpoint": ("D", "#8B5A00"),
    "stopped": ("h", "#000000"),
    "branch": ("<", "#444444"),
}
OTHER = ("*", "#444444")
FIELDS = (
    "loss",
    "grad_norm",
    "lr",
    "tok_per_s",
    "gpu_util_pct",
    "gpu_mem_pct",
    "step_s",
    "since_start",
)
LABELS = {
    "loss": "loss\n[nats/token]",
    "grad_norm": "gradient\nnorm",
    "lr": "learning\nrate",
    "tok_per_s": "speed\n[tokens/s]",
    "gpu_util_pct": "GPU busy\n[%]",
}
OPERANDS = {"weight": "weights", "activation": "activations", "gradient": "gradients"}
SCALES, SHARES = ("scale_min", "scale", "scale_max"), ("underflow", "saturated")
PROBED = (*SCALES, *SHARES, "error")
OUTLIERS = ("attention_logit_max", "swiglu_amax", "swiglu_rms")
KINDS = ("qkv", "out", "gate_up", "down", "head")
WINDOW = 40  # losses are smoothed over a fortieth of the steps
NOTHING = (
    "{} does not exist, holds no row or has no step to draw yet: give a run's folder, for --fp8"
    " with probe.every=STEPS"
)


# ----------------------------------------------------------------------- one style for all figures


def sheet(
    size,
    rows: int,
    columns: int,
    title: str,
    caption: str,
    handles=(),
    n_columns: int = 4,
    **shared,
):
    """An empty page of `size` inches: title (which heads the legend, else both overlap), legend,
    panels with a grid, caption; (figure, panels). n_columns: of the legend at most; the page grows
    where long names leave room for fewer."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    big = matplotlib.rcParams["font.size"]
    title = textwrap.fill(title, int(size[0] * 124 / big))
    if handles:
        longest = max(len(handle.get_label()) for handle in handles)
        n = max(1, min(n_columns, int(size[0] * 72 / (big - 1) / (0.55 * longest + 4.2))))
        figure.legend(
            handles=handles,
            loc="outside upper left",
            ncols=n,
            frameon=False,
            title=title,
            alignment="left",
            title_fontsize=big + 1,
            fontsize=big - 1,
            borderaxespad=0.2,
            columnspacing=1.4,
            handlelength=2.2,
        )
        figure.set_figheight(
            size[1] + big / 50 * (math.ceil(len(handles) / n) - math.ceil(len(handles) / n_columns))
        )
    else:
        figure.suptitle(title, x=0.01, ha="left", fontsize=big + 1)
    figure.supxlabel(
        textwrap.fill(caption, int(size[0] * 164 / big)),
        x=0.01,
        ha="left",
        fontsize=big - 2,
        color="#444444",
    )
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of runs, events and tables are data: a $ is a $
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    for panel in panels.flat:
        panel.grid(True, color="#E4E4E4", linewidth=0.5)
        panel.set_axisbelow(True)
    return figure, panels


def styles(recipes) -> list[dict]:
    """A style per recipe: each of RECIPES has its own in every figure, others take what is left and
    then repeat."""
    left = itertools.cycle(
        [style for style, name in itertools.zip_longest(STYLES, RECIPES) if name not in recipes]
    )
    return [STYLES[RECIPES.index(name)] if name in RECIPES else next(left) for name in recipes]


def steps_axis(panel) -> None:
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: si(x) if x >= 0 else ""))


def counts_axis(axis, in_words: bool = True) -> None:
    """A few round values on a log axis whose limits stand: in words, such as 3M, or as 3 x
    10^19."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    axis.set_major_locator(
        MaxNLocator(3)
        if decades < 0.6  # 1, 2, 5 may have a single value there
        else LogLocator(
            subs=(1, 2, 5) if decades < 1 else (1, 3) if decades < 1.8 else (1,), numticks=5
        )
    )
    axis.set_major_formatter(
        FuncFormatter(lambda x, _: si(x))
        if in_words
        else LogFormatterSciNotation(minor_thresholds=(math.inf, math.inf))
    )
    axis.set_minor_formatter(NullFormatter())


def settle(figure: Figure) -> Figure:
    """Lay the figure out once: ticks and labels take the settings of now, not those of the moment
    when it is saved."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # with "none" each savefig would draw twice
    return figure


def render(figure: Figure, form: str) -> bytes:
    """The figure as the bytes of a "png" or "svg" file, the same bytes each time."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(
            buffer, format=form, dpi=200, metadata={"Date": None} if form == "svg" else None
        )
    return buffer.getvalue()


def write_files(folder: Path, files: dict[str, str | bytes | dict]) -> None:
    """Write folder/name for each name, in order; a dict as strict JSON, dataclasses in it as
    objects. Raises UserError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(
                folder / name,
                (
                    content
                    if isinstance(content, str | bytes)
                    else (json.dumps(content, indent=1, allow_nan=False, default=asdict) + "\n")
                ),
            )
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}): choose another out=DIR"
        ) from None


def write_with(folder: Path, name: str, figure: Figure | None, texts: dict[str, str | dict]) -> str:
    """folder/name.png and .svg, then the texts: whoever finds those finds all of it. Returns what
    was written, in words."""
    images = {f"{name}.{form}": render(figure, form) for form in ("png", "svg") if figure}
    write_files(folder, images | texts)
    return f"wrote {folder}/: {', '.join([*texts, *images])}"


def name_recipe(recipe: str) -> str:
    """With its number format: BF16, FP8 rowwise, FP4 nvfp4."""
    return "BF16" if recipe == "bf16" else f"FP{4 if recipe.startswith('nvfp4') else 8} {recipe}"


# -------------------------------------------------------------------------------- a run's training


def window_of(values) -> int:
    return max(1, len(values) // WINDOW)


def running_mean(values: np.ndarray, times: int = 1) -> np.ndarray:
    """Running mean over so many times window_of values; the window is cut where it would leave the
    ends."""
    if not len(values):
        return values
    kernel = np.ones(min(times * window_of(values), len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


@dataclass
class History:
    """A run's rows as arrays; NaN is what was not finite, or not told."""

    train: dict[str, np.ndarray]  # "step", "ok", FIELDS -> a value per step that counts
    val: dict[str, np.ndarray]  # the same of each validation, which has a loss alone
    undone: list[dict[str, np.ndarray]]  # like train: each stretch that a rollback took back
    marks: dict[str, list[dict]]  # name -> rows: a verdict that is not OK, an event


def read_history(run: Path) -> History:
    """What metrics.jsonl tells, the last of a repeated step. Raises UserError where there is no
    step."""
    rows, undone, marks = metrics_rows(read_rows(run / "metrics.jsonl")), [], {}
    for is_undone, stretch in itertools.groupby(
        rows, key=lambda row: row["kind"] in ("undone", "undone_val")
    ):
        if is_undone and (
            steps := {row["step"]: row for row in stretch if row["kind"] == "undone"}
        ):
            undone.append(_columns(steps))
    for row in rows:
        name = row.get("event" if row["kind"] == "event" else "verdict") or "OK"
        if row["kind"] in ("event", "train", "undone") and name != "OK":
            name = "ROLLBACK" if name == "rollback" else name.replace("_", " ")[:14]
            # of a rollback both, the step judged and the event
            marks.setdefault(name, []).append(row)
    train, val = (
        _columns({row["step"]: row for row in rows if row["kind"] == kind})
        for kind in ("train", "val")
    )
    if not len(train["step"]) and not undone:
        raise UserError(NOTHING.format(run / "metrics.jsonl"))
    return History(train, val, undone, marks)


def _columns(rows: dict[int, dict]) -> dict[str, np.ndarray]:
    ordered = [rows[step] for step in sorted(rows)]
    return {
        "step": np.array(sorted(rows), dtype=float),
        "ok": np.array([row.get("verdict", "OK") == "OK" for row in ordered], dtype=float),
        **{
            key: np.array([_number(row.get(key)) for row in ordered], dtype=float) for key in FIELDS
        },
    }


def _number(value) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e30 else math.nan


@styled
def draw(history: History, name: str) -> Figure:
    """The page of one run, called `name`; panels for what the rows hold."""
    keys = [key for key in LABELS if key != "gpu_util_pct" or np.isfinite(history.train[key]).any()]
    heights = [2.3 if key == "loss" else 0.85 for key in keys]
    steps = [int(step) for columns in (history.train, *history.undone) for step in columns["step"]]
    caption = (
        f"Line: mean over {window_of(history.train['step'])} OK steps; faint: single steps. Marks:"
        " verdicts at their value or at the edge, events at the foot; in brackets: how many."
    )
    hollow = {"marker": "D", "markersize": 3.4, "markerfacecolor": "white", "linestyle": ""}
    handles = [
        Line2D([], [], color=BLUE, linewidth=1.4, label="training"),
        Line2D([], [], color="#000000", **hollow, label="validation"),
    ]
    handles += [Line2D([], [], color=GREY, linewidth=1, label="undone")] * bool(history.undone)
    looks = {}
    for mark in sorted(history.marks, key=lambda name: ([*MARKS, name].index(name), name)):
        rows, (shape, color) = history.marks[mark], MARKS.get(mark, OTHER)
        looks[mark] = {
            "color": color,
            "marker": shape,
            "linestyle": "",
            "markersize": 5.5,
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
            "clip_on": False,
            "in_layout": False,
            "zorder": 5,
        }
        events = sum(row["kind"] == "event" for row in rows)
        handles.append(
            Line2D([], [], label=f"{mark} ({max(events, len(rows) - events):,})", **looks[mark])
        )
    title = f"Training of {name} (n = 1 run, steps {min(steps):,} to {max(steps):,})"
    figure, axes = sheet(
        (7.4, sum(heights) + 0.9 + 0.17 * (len(handles) // 5)),
        len(keys),
        1,
        title,
        caption,
        handles,
        5,
        sharex=True,
        height_ratios=heights,
    )
    panels = dict(zip(keys, axes[:, 0], strict=True))
    # one spike governs no limit: what lies beyond is cut, its mark stands at the edge
    for key, panel in panels.items():
        panel.set_ylabel(LABELS[key])
        for columns in history.undone:
            panel.plot(
                columns["step"], columns[key], color=GREY, linewidth=0.7, alpha=0.8, zorder=1.5
            )
        panel.plot(*finite(history.train, key), color=BLUE, linewidth=0.5, alpha=0.35, zorder=2)
        x, y = finite(history.train, key, is_ok=True)
        panel.plot(x, y if key == "lr" else running_mean(y), color=BLUE, linewidth=1.3, zorder=2.5)
        if key == "loss" and len(y):
            low, high = np.quantile(y, (0.002, 0.98))
            ends = [low, high, running_mean(y)[0], *finite(history.val, "loss")[1]]
            room = max(0.06 * np.ptp(ends), 0.01 * abs(high), 1e-6)
            panel.set_ylim(min(ends) - room, max(ends) + room)
        elif key == "grad_norm" and len(y) and np.quantile(y, 0.002) > 0:
            panel.set_yscale("log")
            panel.set_ylim(np.quantile(y, 0.002) / 1.3, 2 * np.quantile(y, 0.98))
            counts_axis(panel.yaxis)
        elif key in ("tok_per_s", "lr", "gpu_util_pct"):
            panel.yaxis.set_major_locator(MaxNLocator(3))
            panel.margins(y=0.15)
            panel.set_ylim(bottom=0)
    panels["tok_per_s"].yaxis.set_major_formatter(FuncFormatter(lambda y, _: si(y) if y else "0"))
    panels["lr"].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    panels["loss"].plot(
        history.val["step"], history.val["loss"], color="#000000", **hollow, zorder=3
    )
    room = max(0.6, 0.01 * np.ptp(steps))
    panels["loss"].set_xlim(min(steps) - room, max(steps) + room)
    # verdicts at their loss and norm, events at the foot of the loss with a line through all
    for mark, look in looks.items():
        events, verdicts = (
            [row for row in history.marks[mark] if (row["kind"] == "event") == is_it]
            for is_it in (True, False)
        )
        for key in ("loss", "grad_norm"):
            low, high = panels[key].get_ylim()
            values = np.nan_to_num([_number(row.get(key)) for row in verdicts], nan=high)
            panels[key].plot([row["step"] for row in verdicts], np.clip(values, low, high), **look)
        panels["loss"].plot(
            [row["step"] for row in events], [panels["loss"].get_ylim()[0]] * len(events), **look
        )
        for row, panel in itertools.product(events, panels.values()):
            panel.axvline(
                row["step"],
                color=look["color"],
                linewidth=0.7,
                linestyle=(0, (4, 2)),
                alpha=0.8,
                zorder=1.2,
            )
    steps_axis(axes[-1, 0])
    figure.align_ylabels()
    return settle(figure)


def finite(columns: dict, key: str, is_ok: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where the value is finite; is_ok: and the verdict on the step was OK."""
    known = np.isfinite(columns[key]) & ((columns["ok"] > 0) | (not is_ok))
    return columns["step"][known], columns[key][known]


# ----------------------------------------------------------------------------- what FP8 did inside


@dataclass(frozen=True)
class Probe:
    """The rows of one probe file as arrays, NaN where no number was written."""

    recipe: str  # of the Linears; several joined by "+"
    steps: np.ndarray
    layers: list[str]  # in order of depth, the head last
    linear: dict[tuple[str, str], np.ndarray]  # (operand, field of PROBED) -> (layers, steps)
    last: int  # index of the last step that has every layer; of a cut-off file, too
    blocks: list[int]
    block: dict[str, np.ndarray]  # field of OUTLIERS -> (blocks, steps)


def read_probe(path: Path) -> Probe:
    """One probe file; of a step that is there twice the last one counts. Raises UserError where it
    is empty or damaged."""
    linear, block, recipes = {}, {}, set()
    for row in read_rows(path):
        try:
            if row["kind"] == "block":
                block[int(row["block"]), int(row["step"])] = [_number(row[key]) for key in OUTLIERS]
            else:
                numbers = [
                    row[operand] if operand != "gradient" else row.get(operand) or {}
                    for operand in OPERANDS
                ]
                linear[row["layer"], int(row["step"])] = [
                    _number(one.get(key)) for one in numbers for key in PROBED
                ]
                recipes.add(row["recipe"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}: {json.dumps(row)[:80]} is no row of a probe ({type(error).__name__}:"
                f" {error})"
            ) from None
    if not linear and not block:
        raise UserError(NOTHING.format(path))
    layers = sorted({layer for layer, _ in linear}, key=lambda layer: (*place(layer), layer))
    blocks, steps = sorted({one for one, _ in block}), sorted({step for _, step in linear | block})
    count = [sum((layer, step) in linear for layer in layers) for step in steps]
    return Probe(
        "+".join(sorted(recipes)),
        np.array(steps),
        layers,
        _by_step(linear, layers, steps, [*itertools.product(OPERANDS, PROBED)]),
        max(i for i, n in enumerate(count) if n == max(count)),
        blocks,
        _by_step(block, blocks, steps, OUTLIERS),
    )


def _by_step(rows: dict, keys: list, steps: list[int], names) -> dict:
    """{(key, step): a number for each of names} as name -> array of shape (keys, steps)."""
    values = np.full((len(names), len(keys), len(steps)), math.nan)
    for (key, step), numbers in rows.items():
        values[:, keys.index(key), steps.index(step)] = numbers
    return dict(zip(names, values, strict=True))


def place(layer: str) -> tuple[float, int, str]:
    """Block index of "layers.0.attn.qkv" (infinite outside the blocks), rank of the kind within the
    block, kind."""
    parts = layer.split(".")
    kind, block = parts[-1], int(parts[1]) if parts[0] == "layers" else math.inf
    return block, KINDS.index(kind) if kind in KINDS else len(KINDS), kind


def kinds_of(layers) -> dict[str, np.ndarray]:
    kinds = [place(layer)[1:] for layer in layers]
    return {
        kind[1]: np.array([i for i, one in enumerate(kinds) if one == kind])
        for kind in sorted(set(kinds))
    }


def table(probe: Probe) -> str:
    """Markdown table of the worst underflow and saturation (any layer, any step) of each kind and
    operand."""
    lines = [
        [
            "Linear",
            "operand",
            "worst underflow %",
            "worst saturated %",
            f"median error % at step {probe.steps[probe.last]}",
        ]
    ]
    for (kind, rows), operand in itertools.product(kinds_of(probe.layers).items(), OPERANDS):
        shares = [np.fmax.reduce(probe.linear[operand, share][rows], axis=None) for share in SHARES]
        error = quantiles(probe.linear[operand, "error"][rows][:, [probe.last]], 50)[0, 0]
        lines.append(
            [kind, operand, *("-" if math.isnan(v) else f"{100 * v:.3g}" for v in (*shares, error))]
        )
    return grid(lines)


def quantiles(values: np.ndarray, *percents: float) -> np.ndarray:
    """(percents, columns) over the finite rows of each column; NaN where a column has none."""
    with warnings.catch_warnings(action="ignore"):
        return np.nanpercentile(values, percents, axis=0)


@styled
def draw_fp8(run: Path, folder: Path) -> str:
    """Draw the probes of a run and of its inference (run/eval/probe_*.jsonl); returns the worst
    losses, what was written."""
    probe, figures, name = read_probe(run / "probe.jsonl"), {}, run.resolve().name
    told = (
        table(probe)
        if probe.layers
        else f"{run} has probed no FP8 Linear (a BF16 run?): only fp8_outliers is drawn"
    )
    if probe.layers:
        inference = {
            path.stem.removeprefix("probe_"): read_probe(path)
            for path in sorted(run.glob("eval/probe_*.jsonl"))
        }
        figures = {
            "fp8_scales": draw_scales(probe, inference, name),
            "fp8_underflow": draw_underflow(probe, name),
        }
    if probe.blocks:
        figures["fp8_outliers"] = draw_outliers(probe, name)
    return "\n".join([told, "", *(write_with(folder, *figure, {}) for figure in figures.items())])


def draw_scales(probe: Probe, inference: dict[str, Probe], name: str) -> Figure:
    """Scales over depth at the last probed step (top), over training (bottom), one column for each
    operand."""
    caption = (
        f"Top: every Linear at step {probe.steps[probe.last]}, whiskers from its smallest to its"
        " largest scale. Bottom: median over Linears, bands 10 to 90 % and smallest to largest. A"
        " tensor is multiplied by its scale before FP8."
    )
    # marker of inference
    sources = [("", probe), *zip(itertools.cycle("sDo^v<>"), inference.values(), strict=False)]
    layers = list(dict.fromkeys(layer for _, source in sources for layer in source.layers))
    looks = dict(zip(kinds_of(layers), itertools.cycle(STYLES), strict=False))
    blocks = {place(layer)[0] for layer in layers}
    end = max(blocks - {math.inf}, default=-1) + 1  # where the head is drawn
    hollow = {
        "markersize": 4.4,
        "markerfacecolor": "none",
        "markeredgewidth": 0.6,
        "linestyle": "none",
    }
    handles = [
        Line2D([], [], color=look["color"], marker=look["marker"], markersize=2.4, label=kind)
        for kind, look in looks.items()
    ]
    handles += [
        Line2D([], [], color="#444444", marker=marker, label=f"inference, {recipe}", **hollow)
        for recipe, (marker, _) in zip(inference, sources[1:], strict=True)
    ]
    title = (
        f"Scales of FP8 tensors in {name} ({probe.recipe}; n = {len(probe.layers)} Linears,"
        f" {len(probe.steps)} probed steps)"
    )
    figure, panels = sheet((7.4, 4.9), 2, 3, title, caption, handles, 8, sharey="col")
    for operand, top, bottom in zip(OPERANDS, *panels, strict=True):
        for marker, source in sources:
            low, middle, high = (
                _log2(source.linear[operand, key][:, source.last]) for key in SCALES
            )
            for kind, rows in kinds_of(source.layers).items():
                # whiskers beside each other
                shift = 0.14 * (list(looks).index(kind) - (len(looks) - 1) / 2)
                x, colour = (
                    [min(place(source.layers[i])[0] + shift, end) for i in rows],
                    looks[kind]["color"],
                )
                if marker:
                    top.plot(x, middle[rows], marker=marker, color=colour, **hollow)
                else:
                    top.vlines(x, low[rows], high[rows], color=colour, linewidth=0.7, alpha=0.7)
                    top.plot(
                        x,
                        middle[rows],
                        f"{looks[kind]['marker']}-",
                        color=colour,
                        markersize=2.4,
                        linewidth=0.8,
                    )
        low, middle, high = (_log2(probe.linear[operand, key]) for key in SCALES)
        for band, alpha in (
            ((quantiles(low, 0)[0], quantiles(high, 100)[0]), 0.13),
            (quantiles(middle, 10, 90), 0.3),
        ):
            bottom.fill_between(probe.steps, *band, color="#444444", alpha=alpha, linewidth=0)
        bottom.plot(
            probe.steps,
            quantiles(middle, 50)[0],
            ".-",
            color="#000000",
            markersize=2.5,
            linewidth=1,
        )
        steps_axis(bottom)
        if not np.isfinite(middle).any():
            top.text(0.5, 0.5, "no scale: these stay in BF16", transform=top.transAxes, ha="center")
        top.set(
            title=OPERANDS[operand], xlabel="block", xlim=(-0.6, end - 0.4 + (math.inf in blocks))
        )
        ticks = [*range(0, end, max(1, round(end / 5))), *[end] * (math.inf in blocks)]
        top.set_xticks(ticks, ["head" if tick == end else f"{tick}" for tick in ticks])
    for panel in panels[:, 0]:
        panel.set_ylabel("log$_2$ of the scale")
    return settle(figure)


def draw_underflow(probe: Probe, name: str) -> Figure:
    """Share of values that FP8 loses at either end: heat maps, Linears in order of depth by
    step."""
    n, blocks = len(probe.layers), [place(layer)[0] for layer in probe.layers]
    edges = np.flatnonzero(np.diff(blocks, prepend=-1))  # rows at which a block begins
    title = (
        f"Values that FP8 loses in {name} ({probe.recipe}; n = {n} Linears,"
        f" {len(probe.steps)} probed steps)"
    )
    caption = (
        f"A row per Linear; within a block from the top: {', '.join(kinds_of(probe.layers))}."
        " Underflow: not zero, rounded to zero. Saturated: beyond the largest value. Light grey:"
        " none at all, or not measured."
    )
    figure, panels = sheet(
        (7.4, 2 * min(max(0.052 * n, 1.3), 3.4) + 1.3),
        2,
        3,
        title,
        caption,
        sharex=True,
        sharey=True,
    )
    for share, line in zip(SHARES, panels, strict=True):
        values = {operand: 100 * probe.linear[operand, share] for operand in OPERANDS}
        found = np.concatenate([v[v > 0] for v in values.values()])
        high = math.ceil(math.log10(max(found, default=1)))
        low = min(max(math.floor(math.log10(min(found, default=1e-3))), high - 6), high - 1)
        norm = LogNorm(10.0**low, 10.0**high, clip=True)
        for panel, (operand, v) in zip(line, values.items(), strict=True):
            panel.grid(False)
            panel.pcolormesh(
                probe.steps,
                np.arange(n) + 0.5,
                np.ma.masked_where(~(v > 0), v),
                cmap="viridis",
                norm=norm,
                shading="nearest",
                rasterized=True,
            )
            for edge in edges[1:]:
                panel.axhline(edge, color="white", linewidth=0.5)
            panel.set(facecolor="#DDDDDD", title=f"{OPERANDS[operand]}: {share}")
        figure.colorbar(
            ScalarMappable(norm, "viridis"),
            ax=line,
            label=f"{share} [% of values]",
            pad=0.01,
            aspect=30,
        )
        line[0].set_ylabel("block")
    shown = edges[:: math.ceil(len(edges) / 16)]
    panels[0, 0].set_yticks(
        [edge + blocks.count(blocks[edge]) / 2 for edge in shown],
        ["head" if blocks[edge] == math.inf else f"{blocks[edge]}" for edge in shown],
    )
    panels[0, 0].set_ylim(n, 0)
    for panel in panels[1]:
        steps_axis(panel)
    return settle(figure)


def draw_outliers(probe: Probe, name: str) -> Figure:
    """Largest attention logit and SwiGLU outliers over training, a line for each block."""
    title = f"Outliers in {name} (n = {len(probe.blocks)} blocks, {len(probe.steps)} probed steps)"
    figure, panels = sheet(
        (7.4, 3.1), 1, 2, title, "A line per block. SwiGLU: the product that enters mlp.down."
    )
    ratio = probe.block["swiglu_amax"] / np.where(
        probe.block["swiglu_rms"] > 0, probe.block["swiglu_rms"], math.nan
    )
    norm = Normalize(0, (max(probe.blocks) + 1) / 0.82)
    for panel, values, label in zip(
        panels[0],
        (probe.block["attention_logit_max"], ratio),
        ("largest attention logit", "largest / rms of SwiGLU product"),
        strict=True,
    ):
        for line, block in zip(values, probe.blocks, strict=True):
            panel.plot(
                probe.steps,
                line,
                ".-",
                color=matplotlib.colormaps["viridis"](norm(block)),
                linewidth=0.9,
                markersize=2,
            )
        smallest, largest = np.fmin.reduce(values, axis=None), np.fmax.reduce(values, axis=None)
        if smallest > 0 and largest > 20 * smallest:
            panel.set_yscale("log")
            counts_axis(panel.yaxis)
        panel.set_ylabel(label)
        steps_axis(panel)
    figure.colorbar(
        ScalarMappable(norm, "viridis"),
        ax=panels,
        label="block",
        pad=0.01,
        ticks=MaxNLocator(6, integer=True),
        boundaries=np.arange(max(probe.blocks) + 2) - 0.5,
    )
    return settle(figure)


def _log2(values: np.ndarray) -> np.ndarray:
    return np.log2(np.where(values > 0, values, math.nan))


@dataclass(frozen=True, kw_only=True)
class Options:
    run: FilePath  # folder of a run, such as out/RUN
    fp8: bool = False  # what FP8 did inside it
    out: FilePath | None = None  # folder that receives the figures


@command(__doc__, Options, "run")
def main(options: Options) -> str:
    run, folder = Path(options.run), Path(options.out or Path(options.run) / "figures")
    if options.fp8:
        return draw_fp8(run, folder)
    return write_with(folder, "run", draw(read_history(run), run.resolve().name), {})


if __name__ == "__main__":
    raise SystemExit(run_command(main))
