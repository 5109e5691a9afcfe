"""Draw what FP8 did to the tensors of one run: scales, underflow, outliers.

`draw_run` reads out/RUN/probe.jsonl, the inference probes in out/RUN/eval/ and, for the gap, the neighbours of RUN;
scaling/figures.py --fp8 is the command.
"""


import itertools
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from runtime.cli import UserError
from runtime.rows import write_atomically as write
from scaling.figures import RC, page, render, steps_axis
from scaling.pairs import human
from scaling.records import LARGEST, read_text

OPERANDS = {"weight": "weights", "activation": "activations", "gradient": "gradients"}
SCALES, SHARES = ("scale_min", "scale", "scale_max"), ("underflow", "saturated")
OUTLIERS = ("attention_logit_max", "swiglu_amax", "swiglu_rms")
KINDS = ("qkv", "out", "gate_up", "down", "head")
LAYER = re.compile(r"(?:layers\.(\d{1,6})\.)?[\w.]{1,80}", re.ASCII)


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

    Where only its .gz is there, that is read. Raises UserError naming the line where a row is not what a probe writes, or
    where there is no row at all."""
    linear, block, recipes, torn = {}, {}, {}, []
    for n, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            torn.append(n)              # a run that was killed leaves half a line; its resume writes the step again
            continue
        at = f"{path}, line {n}"
        kind = row.get("kind") if isinstance(row, dict) else None
        if kind not in ("linear", "block"):
            raise UserError(f"{at}: kind is {_shown(kind)}; expected a row of kind linear or block")
        step = _whole(at, row, "step")
        if kind == "block":
            block[_whole(at, row, "block"), step] = [_measured(at, row, key, -LARGEST) for key in OUTLIERS]
            continue
        layer = row.get("layer")
        if not isinstance(layer, str) or not LAYER.fullmatch(layer):
            raise UserError(f"{at}: layer is {_shown(layer)}; expected a Linear's name such as layers.0.attn.qkv")
        if not isinstance(row.get("recipe"), str):
            raise UserError(f"{at}: recipe is {_shown(row.get('recipe'))}; expected a recipe's name")
        recipes[layer] = row["recipe"]
        linear[layer, step] = [number for operand in OPERANDS for number in _operand(at, row, operand)]
    if not linear and not block:
        raise UserError(f"{path} holds no row: the run was stopped before its first probe; lower probe.every")
    layers, steps, values = _grid(linear, lambda layer: (*place(layer), layer))
    blocks, block_steps, outliers = _grid(block, lambda block: block)
    count = [sum((layer, step) in linear for layer in layers) for step in steps.tolist()]
    last = max(i for i, n in enumerate(count) if n == max(count)) if layers else 0
    fields = itertools.product(OPERANDS, (*SCALES, *SHARES, "error"))
    notes = [f"{path}: skipped what is no JSON (cut off while written): line {', '.join(map(str, torn))}"] if torn else []
    return Probe("+".join(sorted(set(recipes.values()))), layers, steps, last, dict(zip(fields, values, strict=False)),
                 blocks, block_steps, dict(zip(OUTLIERS, outliers, strict=False))), notes


def _operand(at: str, row: dict, name: str) -> list[float]:
    """The fields of one operand; all NaN for the gradient of an inference row."""
    if row.get(name) is None and name == "gradient":
        return [math.nan] * (len(SCALES) + len(SHARES) + 1)
    if not isinstance(row.get(name), dict):
        raise UserError(f"{at}: {name} is {_shown(row.get(name))}; expected an object with amax, scale, underflow, ...")
    at = f"{at}: {name}"
    _measured(at, row[name], "amax")
    return ([_measured(at, row[name], key) for key in SCALES] + [_measured(at, row[name], key, high=1) for key in SHARES]
            + [_measured(at, row[name], "error")])


def _measured(at: str, holder: dict, key: str, low: float = 0, high: float = LARGEST) -> float:
    value = holder.get(key, "missing")
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high * (1 + 1e-6):
        wanted = "a number" if low < 0 else "a share from 0 to 1" if high == 1 else "a number, at least 0"
        raise UserError(f"{at}: {key} is {_shown(value)}; expected {wanted}, or null where it is not finite")
    return float(value)


def _whole(at: str, row: dict, key: str) -> int:
    value = row.get(key, "missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise UserError(f"{at}: {key} is {_shown(value)}; expected a whole number, at least 0")
    return value


def _shown(value) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."


def _grid(rows: dict, order) -> tuple[list, np.ndarray, np.ndarray]:
    """{(key, step): numbers} as keys in order, steps, and one (keys, steps) array for each number."""
    keys, steps = sorted({key for key, _ in rows}, key=order), sorted({step for _, step in rows})
    values = np.full((len(next(iter(rows.values()), ())), len(keys), len(steps)), math.nan)
    row_of, column_of = ({key: i for i, key in enumerate(names)} for names in (keys, steps))
    for (key, step), numbers in rows.items():
        values[:, row_of[key], column_of[step]] = numbers
    return keys, np.array(steps), values


def place(layer: str) -> tuple[float, int, str]:
    """Block index (infinite outside the blocks), rank of the kind within the block, kind."""
    block, kind = LAYER.fullmatch(layer)[1], layer.rsplit(".", 1)[-1]
    return int(block) if block else math.inf, KINDS.index(kind) if kind in KINDS else len(KINDS), kind


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


TWINS = ("params_total", "tokens", "tokens_per_step", "lr_peak", "val_sha256")  # equal in runs that make a null band
WINDOW = 40         # losses are smoothed over a fortieth of the steps
STEADY = 4          # the band's width over four times as many: one difference crosses zero where it means nothing


def draw_gap(run: Path) -> tuple[Figure | None, list[str]]:
    """Loss of `run` minus loss of its BF16 partner over steps, or None; plus lines saying what is missing and why."""
    own = _summary(run)
    if own is None:
        return None, [f"fp8_gap is not drawn: {run} has no readable summary.json, so it is unfinished"]
    others = {folder: summary for folder in sorted(run.resolve().parent.iterdir())
              if folder != run.resolve() and (summary := _summary(folder)) and summary["precision"]["recipe"] == "bf16"}
    same = [folder for folder, summary in others.items() if summary["pair_id"] == own["pair_id"]]
    repeats = [folder for folder in same if others[folder].get("repeat")]
    partners = [folder for folder in same if folder not in repeats]
    if not partners:
        return None, [f"fp8_gap is not drawn: beside {run} there is no BF16 run with its pair_id {own['pair_id']}"]
    partner = partners[0]
    notes = [f"fp8_gap: several BF16 runs have pair_id {own['pair_id']}; {partner.name} is taken"] if partners[1:] else []
    train, val = (_difference(run, partner, kind) for kind in ("train", "val"))
    if not len(train[0]):
        return None, [*notes, f"fp8_gap is not drawn: {run} and {partner.name} have no logged training step in common"]
    twins = [folder for folder, summary in others.items() if not summary.get("repeat")
             and all(summary.get(key) is not None and summary.get(key) == own.get(key) for key in TWINS)]
    nulls = [pair for pair in itertools.combinations(twins, 2) if others[pair[0]].get("seed") != others[pair[1]].get("seed")]
    caption = (f"Above zero: FP8 is worse. Line: mean over {window_of(train[0])} steps of training; faint: single steps. "
               "Diamonds: validation, each run as it was trained. ")
    if nulls:
        caption += (f"Grey: null band, mean |difference| of BF16 runs that differ in the seed alone (n = {len(nulls)} "
                    f"pair{'s' * (len(nulls) > 1)}; smoothed alike, then over {STEADY} times as many steps); bars: the same "
                    "in validation. Another seed also draws other batches. ")
    else:
        missing = "no two BF16 runs beside it are equal but for the seed, so there is no null band"
        caption += f"{missing[0].upper()}{missing[1:]}: noise between seeds is not shown. "
        notes.append(f"fp8_gap: {missing}")
    rounding = [gap for repeat in repeats if len((gap := _difference(repeat, partner, "train"))[0])]
    if rounding:
        is_equal = not any(gap.any() for _, gap in rounding)
        caption += "The BF16 run once more, same seed and data, only rounded otherwise, " + (
            "has equal losses at each step. " if is_equal else "minus the first: dashed. ")
    figure, panels = page(3.3, 1, 1, f"Loss of {run.resolve().name} ({own['precision']['recipe']}) minus loss of {partner.name} "
                           f"(BF16), n = 1 pair", caption + "The first 5 % of the steps may leave the axis.", top=0.3, left=0.1)
    panel = panels[0, 0]
    smooth, late, reach = running_mean(train[1]), train[0] >= 0.05 * train[0][-1], [1e-6]
    band, bars = ([_difference(*pair, kind) for pair in nulls] for kind in ("train", "val"))
    if band := [(steps, running_mean(abs(running_mean(gap)), STEADY)) for steps, gap in band if len(steps)]:
        # Between the steps of the shorter run nothing is made up: beyond its end there is no band.
        band = np.array([np.interp(train[0], *pair, left=math.nan, right=math.nan) for pair in band])
        band = np.fmax.reduce(band, axis=0)
        panel.fill_between(train[0], -band, band, color="#BBBBBB", alpha=0.6, linewidth=0)
        reach.append(np.fmax.reduce(band[late]))
    for steps, gap in bars:
        panel.vlines(steps, -abs(gap), abs(gap), color="#777777", linewidth=2.2, alpha=0.6)
        reach += abs(gap).tolist()
    panel.axhline(0, color="#444444", linewidth=0.8)
    panel.plot(*train, color="#D55E00", alpha=0.25, linewidth=0.5)
    panel.plot(train[0], smooth, color="#D55E00", linewidth=1.5)
    for steps, gap in rounding if rounding and not is_equal else ():
        panel.plot(steps, again := running_mean(gap), color="#000000", linewidth=1, linestyle=(0, (4, 2)))
        reach += abs(again[steps >= 0.05 * steps[-1]]).tolist()
    panel.plot(*val, "D", color="#0072B2", markersize=4)
    limit = 1.25 * np.fmax.reduce([*reach, *abs(smooth[late]), *abs(val[1])])
    panel.set(ylim=(-limit, limit), ylabel="FP8 minus BF16 [nats/token]")
    steps_axis(panel)
    return figure, notes


def _summary(folder: Path) -> dict | None:
    """summary.json of a finished run with a pair_id and a recipe; None for anything else."""
    try:
        summary = json.loads((folder / "summary.json").read_bytes())
        return summary if isinstance(summary["pair_id"], str) and isinstance(summary["precision"]["recipe"], str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _difference(first: Path, second: Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps that both runs logged, loss of the first minus loss of the second there."""
    one, other = _losses_of(first, kind), _losses_of(second, kind)
    steps = sorted(one.keys() & other.keys())
    return np.array(steps), np.array([one[step] - other[step] for step in steps])


def _losses_of(folder: Path, kind: str) -> dict[int, float]:
    """Step -> loss of one kind of row in metrics.jsonl; lines that cannot be read are left out."""
    losses = {}
    for line in read_text(folder / "metrics.jsonl").split("\n"):
        try:
            row = json.loads(line)
            if row["kind"] == kind and 0 < row["loss"] < LARGEST and type(row["step"]) is int:
                losses[row["step"]] = float(row["loss"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return losses


def window_of(values) -> int:
    return max(1, len(values) // WINDOW)


def running_mean(values: np.ndarray, times: int = 1) -> np.ndarray:
    """Running mean over so many times window_of values; the window is cut where it would leave the ends."""
    kernel = np.ones(min(times * window_of(values), len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


# Okabe-Ito, one style for each of KINDS, then two for what else there may be.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"), ("#000000", "P"), ("#E69F00", "v"),
          ("#56B4E9", "<"))
HOLLOW = ("s", "D", "o", "^", "v", "<", ">")    # one marker for each inference recipe


def draw_run(run: Path, folder: Path | None = None) -> None:
    """Write the figures of one run into `folder` (run/figures by default), print the table and what was left out.

    Raises UserError where the run has no probe rows, where they are damaged, or where `folder` cannot be written."""
    folder = folder or run / "figures"
    if not any((run / name).is_file() for name in ("probe.jsonl", "probe.jsonl.gz")):
        what = "has no probe.jsonl" if run.is_dir() else "is no folder"
        raise UserError(f"{run} {what}: expected the folder of a run trained with probe.every=STEPS, such as "
                          "probe.every=100, which writes probe.jsonl")
    probe, notes = read_probe(run / "probe.jsonl")
    figures = {}
    with matplotlib.rc_context(RC):
        if probe.layers:
            inference = {}
            for path in sorted(run.glob("eval/probe_*.jsonl")):
                inference[path.stem.removeprefix("probe_")], more = read_probe(path)
                notes += more
            figures["fp8_scales"] = draw_scales(probe, inference, run.resolve().name)
            figures["fp8_underflow"] = draw_underflow(probe, run.resolve().name)
            figures["fp8_gap"], more = draw_gap(run)
            notes += more
        else:
            notes.append(f"{run} has probed no FP8 Linear (a BF16 run?): only fp8_outliers is drawn")
        figures["fp8_outliers"] = draw_outliers(probe, run.resolve().name) if probe.blocks else None
        if not probe.blocks:
            notes.append(f"{run}/probe.jsonl has no block row: fp8_outliers is not drawn")
        files = {f"{name}.{form}": render(figure, form) for name, figure in figures.items() if figure
                 for form in ("png", "svg")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write(folder / name, content)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None
    print("\n".join([*notes, *(["", table(probe), ""] if probe.layers else []),
                     f"wrote {folder}/: {', '.join(files)}"]))


def draw_scales(probe: Probe, inference: dict[str, Probe], name: str) -> Figure:
    """Scales over depth at the last probed step (top), over training (bottom), one column for each operand."""
    caption = (f"Top: every Linear at step {probe.steps[probe.last]}; whiskers from the smallest to the largest scale of a "
               "tensor that has several. Bottom: median over Linears, dark band 10 to 90 %, pale band smallest to largest. "
               "A tensor is multiplied by its scale before it is rounded to FP8.")
    if inference:
        caption += " Hollow: the same run's inference, at its checkpoint's step."
    figure, panels = page(4.7, 2, 3, f"Scales of FP8 tensors in {name} ({probe.recipe}; n = {len(probe.layers)} Linears, "
                           f"{len(probe.steps)} probed steps)", caption, top=0.62, hspace=0.42, sharey="col")
    sources = [("", "", probe), *((f"inference, {recipe}", marker, rows) for (recipe, rows), marker
                                  in zip(inference.items(), itertools.cycle(HOLLOW), strict=False))]
    layers = list(dict.fromkeys(layer for *_, source in sources for layer in source.layers))
    kinds, blocks = list(kinds_of(layers)), {place(layer)[0] for layer in layers}
    style = dict(zip(kinds, itertools.cycle(STYLES), strict=False))
    style |= {kind: STYLES[KINDS.index(kind)] for kind in kinds if kind in KINDS}
    end = max(blocks - {math.inf}, default=-1) + 1      # where the head is drawn
    handles = {}
    for operand, top, bottom in zip(OPERANDS, *panels, strict=True):
        for label, marker, source in sources:
            hollow = {"markersize": 4.4, "markerfacecolor": "none", "markeredgewidth": 0.6}
            low, middle, high = (_log2(source.linear[operand, field][:, source.last]) for field in SCALES)
            for kind, rows in kinds_of(source.layers).items():
                shift = 0.14 * (kinds.index(kind) - (len(kinds) - 1) / 2)   # whiskers beside each other
                x = [block + shift if (block := place(source.layers[i])[0]) < math.inf else end for i in rows]
                colour, filled = style[kind]
                if label:
                    top.plot(x, middle[rows], marker, color=colour, **hollow)
                    continue
                top.vlines(x, low[rows], high[rows], color=colour, linewidth=0.7, alpha=0.7)
                handles[kind] = top.plot(x, middle[rows], f"{filled}-", color=colour, markersize=2.4, linewidth=0.8)[0]
            if label:
                handles[label] = bottom.plot(source.steps[[source.last]], quantiles(middle[:, None], 50)[0], marker,
                                             color="#444444", **hollow)[0]
        _over_training(bottom, probe.steps, *(_log2(probe.linear[operand, field]) for field in SCALES))
        if not np.isfinite(probe.linear[operand, "scale"]).any():
            top.text(0.5, 0.5, "no scale: these stay in BF16", transform=top.transAxes, ha="center")
        top.set(title=OPERANDS[operand], xlabel="block", xlim=(-0.6, end - 0.4 + (math.inf in blocks)))
        each = max(1, round(end / 5))
        ticks = [block for block in range(0, end, each) if math.inf not in blocks or end - block > 0.8 * each]
        top.set_xticks(ticks + [end] * (math.inf in blocks), list(map(str, ticks)) + ["head"] * (math.inf in blocks))
    for panel in panels[:, 0]:
        panel.set_ylabel("log$_2$ of the scale")
    figure.legend(handles.values(), handles, loc="upper left", bbox_to_anchor=(0.07, 1 - 0.22 / figure.get_figheight()),
                  ncols=8, frameon=False, columnspacing=1.4, handlelength=1.6, borderpad=0, borderaxespad=0)
    return figure


def _over_training(panel, steps, low, middle, high):
    """Median over Linears (rows) at each step, a dark band from 10 to 90 %, a pale one over everything."""
    for band, alpha in (((quantiles(low, 0)[0], quantiles(high, 100)[0]), 0.13), (quantiles(middle, 10, 90), 0.3)):
        panel.fill_between(steps, *band, color="#444444", alpha=alpha, linewidth=0)
    panel.plot(steps, quantiles(middle, 50)[0], ".-", color="#000000", markersize=2.5, linewidth=1)
    steps_axis(panel)
    if np.ptp(panel.get_ylim()) < 2:        # constant scales
        panel.set_ylim(np.mean(panel.get_ylim()) + np.array([-1, 1]))
    panel.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def draw_underflow(probe: Probe, name: str) -> Figure:
    """Share of values that FP8 loses at either end: heat maps, Linears in order of depth by step."""
    n, blocks = len(probe.layers), [place(layer)[0] for layer in probe.layers]
    height = min(max(0.052 * n, 1.3), 3.4)      # inches of one panel
    kinds = ", ".join(kinds_of([layer for layer, block in zip(probe.layers, blocks, strict=True) if block < math.inf]))
    title = f"Values that FP8 loses in {name} ({probe.recipe}; n = {n} Linears, {len(probe.steps)} probed steps)"
    caption = (f"One row per Linear, block 0 on top; within a block from the top: {kinds}. Underflow: not zero, rounded to "
               "zero. Saturated: beyond the format's largest value. Light grey: none at all. White: not measured.")
    figure, panels = page(2 * height + 1.5, 2, 3, title, caption, right=0.875, hspace=0.42 / height, sharex="all", sharey="all")
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
            panel.pcolormesh(x, np.arange(n + 1), np.ma.masked_where(~(v == 0), v), cmap=ListedColormap(["#DDDDDD"]), **mesh)
            panel.pcolormesh(x, np.arange(n + 1), np.ma.masked_where(~(v > 0), v), cmap="viridis", norm=norm, **mesh)
            for row in range(1, n):
                if blocks[row] != blocks[row - 1]:
                    panel.axhline(row, color="white", linewidth=0.5)
            if not np.isfinite(v).any():
                panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
            panel.set(title=f"{OPERANDS[operand]}: {share}")
        box = [panel.get_position() for panel in line]
        bar = figure.colorbar(ScalarMappable(norm, "viridis"), cax=figure.add_axes((0.89, box[0].y0, 0.014, box[0].height)))
        bar.set_label(f"{share} [% of values]")
        line[0].set_ylabel("block")
    first = {block: blocks.index(block) for block in blocks}
    each = math.ceil(len(first) * 0.125 / height)   # a label needs an eighth of an inch
    panels[0, 0].set_yticks([(start + start + blocks.count(block)) / 2 for block, start in first.items()],
                            ["head" if block == math.inf else f"{block}" if i % each == 0 else ""
                             for i, block in enumerate(first)])
    panels[0, 0].set_ylim(n, 0)
    for panel in panels.flat:
        panel.tick_params(axis="y", length=0)
    for panel in panels[1]:
        steps_axis(panel)
    return figure


def draw_outliers(probe: Probe, name: str) -> Figure:
    """Largest attention logit and SwiGLU outliers over training, a line for each block."""
    title = f"Outliers in {name} (n = {len(probe.blocks)} blocks, {len(probe.block_steps)} probed steps)"
    caption = ("A line per block, from dark (first) to light (last). Labelled: the first, the last, the one that ends "
               "highest. SwiGLU: the product that enters mlp.down.")
    figure, panels = page(3.1, 1, 2, title, caption, top=0.3, right=0.91, wspace=0.5)
    ratio = probe.block["swiglu_amax"] / np.where(probe.block["swiglu_rms"] > 0, probe.block["swiglu_rms"], math.nan)
    colours = [matplotlib.colormaps["viridis"](0.82 * i / max(len(probe.blocks) - 1, 1)) for i in range(len(probe.blocks))]
    for panel, values, label in zip(panels[0], (probe.block["attention_logit_max"], ratio), (
            "largest attention logit", "largest / rms of SwiGLU product"), strict=True):
        for line, colour in zip(values, colours, strict=True):
            panel.plot(probe.block_steps, line, ".-", color=colour, linewidth=0.9, markersize=2)
        known = values[np.isfinite(values)]
        if len(known) and known.min() > 0 and known.max() / known.min() > 20:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if known.max() < 1e3 * known.min() else (1,)))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human(y)))
            panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_ylabel(label)
        steps_axis(panel)
        panel.autoscale_view()      # transData is of no use before
        ends = {i: line[np.isfinite(line)][-1] for i, line in enumerate(values) if np.isfinite(line).any()}
        labelled = sorted({min(ends), max(ends), max(ends, key=ends.get)} if ends else (), key=ends.get)
        heights = [panel.transAxes.inverted().transform(panel.transData.transform((probe.block_steps[-1], ends[i])))[1]
                   for i in labelled]
        for j in range(1, len(heights)):        # labels must not lie on each other
            heights[j] = max(heights[j], heights[j - 1] + 0.08)
        over = max(0, *heights, 1) - 1
        for i, y in zip(labelled, heights, strict=True):
            panel.text(1.02, y - over, f"block {probe.blocks[i]}", color=colours[i], transform=panel.transAxes, va="center",
                       fontsize=7)
    return figure


def _log2(values: np.ndarray) -> np.ndarray:
    return np.log2(np.where(values > 0, values, math.nan))


# Okabe-Ito, a shape of its own for each name; a name that is not here gets one of OTHERS.
MARKS = {"SKIP": ("v", "#E69F00"), "SPIKE": ("^", "#CC79A7"), "ROLLBACK": ("X", "#D55E00"), "STOP": ("P", "#000000"),
         "resume": (">", "#009E73"), "save failed": ("s", "#56B4E9"), "bad checkpoint": ("D", "#8B5A00"),
         "stopped": ("h", "#000000"), "branch": ("<", "#444444")}
OTHERS = (("*", "#444444"), ("p", "#777777"), ("d", "#999999"))
TRAIN, UNDONE = "#0072B2", "#999999"
GPU = ("gpu_util_pct", "gpu_mem_pct", "gpu_power_w")
FIELDS = ("loss", "grad_norm", "lr", "tok_per_s", *GPU, "step_s", "since_start")
LABELS = {"loss": "loss\n[nats/token]", "grad_norm": "gradient\nnorm", "lr": "learning\nrate", "tok_per_s": "speed\n[tokens/s]",
          "gpu_util_pct": "GPU\n[%]"}
HEIGHTS = {"loss": 2.3}     # inches, of the others 0.85
COLUMNS = 5                 # of the legend


@dataclass
class History:
    """A run's rows as arrays; NaN is what was not finite, or not told."""
    train: dict[str, np.ndarray]                                        # "step", "ok", FIELDS -> a value per step that counts
    undone: list[dict[str, np.ndarray]]                                 # the same of each stretch that a rollback took back
    val: np.ndarray                                                     # (n, 2): step, loss
    undone_val: np.ndarray
    marks: dict[str, list[dict]] = field(default_factory=dict)          # name -> rows: a verdict that is not OK, an event
    notes: list[str] = field(default_factory=list)


def draw_history(run: Path, folder: Path | None = None) -> None:
    """Write run.png into `folder` (run/figures by default), say where and what was left out.

    Raises UserError where the run has no step to draw, or where `folder` cannot be written."""
    folder = folder or run / "figures"
    history = read_history(run)
    with matplotlib.rc_context(RC):
        content = render(draw(history, run.resolve().name), "png")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "run.png", content)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None
    print("\n".join([*history.notes, f"wrote {folder}/: run.png"]))


def read_history(run: Path) -> History:
    """What metrics.jsonl tells, the last of a repeated step. Raises UserError where there is no such file or no step in it."""
    path = run / "metrics.jsonl"
    if not any((run / name).is_file() for name in (path.name, f"{path.name}.gz")):
        raise UserError(f"{run} {'has no metrics.jsonl' if run.is_dir() else 'is no folder'}: expected the folder of a run, "
                          f"such as out/demo_s_fp8")
    lines = read_text(path).split("\n")
    rows = [row for row in map(_row, lines) if row]
    torn = [i for i, line in enumerate(lines, 1) if line and not _row(line)]
    history = History(_columns({row["step"]: row for row in rows if row["kind"] == "train"}), [],
                      *(_losses(rows, kind) for kind in ("val", "undone_val")))
    stretch = {}
    for row in [*rows, {"kind": "end"}]:
        if stretch and row["kind"] not in ("undone", "undone_val"):
            history.undone.append(_columns(stretch))
            stretch = {}
        if row["kind"] == "undone":
            stretch[row["step"]] = row
    for row in rows:
        name = row.get("event" if row["kind"] == "event" else "verdict")
        if row["kind"] in ("event", "train", "undone") and isinstance(name, str) and name != "OK":
            name = "ROLLBACK" if name == "rollback" else name.replace("_", " ")[:14]
            history.marks.setdefault(name, []).append(row)      # of a rollback both, the step judged and the event
    if not len(history.train["step"]) and not history.undone:
        raise UserError(f"{path} has no step to draw yet: expected a line like "
                          f'{{"kind": "train", "step": 1, "loss": 5.8, ...}}')
    if torn and torn[-1] == len(lines):
        torn.pop()      # the run is being written, or was cut there
    if torn:
        history.notes.append(f"{path}: left out {len(torn)} line{'s' * (len(torn) > 1)} that cannot be read, "
                             f"the first is line {torn[0]}")
    return history


def draw(history: History, name: str) -> Figure:
    """The page of one run, called `name`; panels for what the rows hold."""
    has_gpu = any(np.isfinite(history.train[key]).any() for key in GPU)
    keys = [key for key in LABELS if key != "gpu_util_pct" or has_gpu]
    heights = [HEIGHTS.get(key, 0.85) for key in keys]
    title = f"Training of {name} (n = 1 run, steps {min(_steps(history)):,} to {max(_steps(history)):,})"
    lines = -(-(3 + len(history.marks)) // COLUMNS)     # of the legend
    figure, panels = page(sum(heights) + 1.2 + 0.16 * lines, len(keys), 1, title, _caption(history), top=0.3 + 0.16 * lines,
                          left=0.115, right=0.925 if has_gpu else 0.985, hspace=0.2, sharex=True,
                          gridspec_kw={"height_ratios": heights})
    panels = dict(zip(keys, panels[:, 0], strict=True))
    for key, panel in panels.items():
        for columns in history.undone if key != "gpu_util_pct" else ():
            panel.plot(columns["step"], columns[key], color=UNDONE, linewidth=0.7, alpha=0.8, zorder=1.5)
        if key != "gpu_util_pct":
            _draw_line(panel, history.train, key)
        panel.set_ylabel(LABELS[key])
        panel.grid(True, color="#EEEEEE", linewidth=0.5)
        panel.set_axisbelow(True)
    panels["loss"].plot(*history.undone_val.T, "D", color=UNDONE, markersize=3.4, markerfacecolor="none", zorder=3)
    panels["loss"].plot(*history.val.T, "D", color="#000000", markersize=3.4, markerfacecolor="white", zorder=3)
    _set_axes(panels, history)
    if has_gpu:
        _draw_gpu(panels["gpu_util_pct"], history.train)
    handles = [Line2D([], [], color=TRAIN, linewidth=1.4, label="training"),
               *([Line2D([], [], color="#000000", marker="D", markersize=3.4, markerfacecolor="white", linestyle="",
                         label="validation")] if len(history.val) else []),
               *([Line2D([], [], color=UNDONE, linewidth=1, label="undone")] if history.undone else []),
               *_draw_marks(panels, history)]
    legend = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.115, 1 - 0.24 / figure.get_figheight()),
                           ncols=COLUMNS, frameon=False, columnspacing=1.3, handlelength=1.5, borderpad=0, borderaxespad=0)
    for text in legend.get_texts():
        text.set_parse_math(False)      # an event's name is data
    figure.align_ylabels()
    FigureCanvasAgg(figure).draw()
    return figure


def _draw_line(panel, columns, key) -> None:
    """Single steps, faint; over them the running mean of those that were OK."""
    if key != "lr":
        known = np.isfinite(columns[key])
        panel.plot(columns["step"][known], columns[key][known], color=TRAIN, linewidth=0.5, alpha=0.35, zorder=2)
    steps, values = _accepted(columns, key)
    if len(values):
        panel.plot(steps, running_mean(values) if key != "lr" else values, "." if len(values) == 1 else "-", color=TRAIN,
                   linewidth=1.3, zorder=2.5)


def _draw_gpu(panel, columns) -> None:
    """Percentages on the left axis, watts on the right."""
    right = panel.twinx()
    right.spines["right"].set_visible(True)
    for axis, key, color, dash, label in ((panel, "gpu_util_pct", TRAIN, "-", "busy"),
                                          (panel, "gpu_mem_pct", "#000000", (0, (4, 2)), "memory"),
                                          (right, "gpu_power_w", "#D55E00", (0, (1, 1)), "power")):
        known = np.isfinite(columns[key])
        if known.any():
            axis.plot(columns["step"][known], running_mean(columns[key][known]), color=color, linestyle=dash, linewidth=1.3,
                      label=label)
    panel.set_ylim(0, 109)
    right.set_ylim(0, 1.4 * max(np.nanmax([*columns["gpu_power_w"], 1]), 1))     # below the percentages
    right.set_ylabel("power [W]")
    panel.legend(handles=[line for axis in (panel, right) for line in axis.get_lines() if line.get_label()[0] != "_"],
                 loc="lower right", ncols=3, framealpha=0.8, edgecolor="none", borderpad=0.2)


def _draw_marks(panels, history: History) -> list[Line2D]:
    """Verdicts at their loss and gradient norm, events at the foot of the loss with a line through all; legend handles."""
    others, handles, taken = iter(OTHERS * len(history.marks)), [], {}
    ordered = sorted(history.marks, key=lambda name: (list(MARKS).index(name) if name in MARKS else len(MARKS), name))
    for name in ordered:
        (shape, color), rows = MARKS.get(name) or next(others), history.marks[name]
        style = {"color": color, "marker": shape, "linestyle": "", "markersize": 5.5, "markeredgecolor": "white",
                 "markeredgewidth": 0.5, "clip_on": False, "zorder": 5}
        for key, panel in panels.items():
            verdicts = [row for row in rows if row["kind"] != "event"] if key in ("loss", "grad_norm") else []
            low, high = panel.get_ylim()
            heights = [min(max(value if math.isfinite(value := _number(row.get(key))) else high, low), high) for row in verdicts]
            panel.plot([row["step"] for row in verdicts], heights, **style)
            events = [row["step"] for row in rows if row["kind"] == "event"]
            for step in events:
                panel.axvline(step, color=color, linewidth=0.7, linestyle=(0, (4, 2)), alpha=0.8, zorder=1.2)
            if key == "loss":       # marks that would hide each other stand on each other
                width = max(1, 0.013 * np.ptp(panel.get_xlim()))
                levels = [taken.setdefault((name, step), sum(abs(step - other) < width for _, other in taken)) for step in events]
                panel.plot(events, [low + 0.07 * min(level, 12) * (high - low) for level in levels], **style)
        events = sum(row["kind"] == "event" for row in rows)
        handles.append(Line2D([], [], label=f"{name} ({max(events, len(rows) - events):,})", **style))
    return handles


def _set_axes(panels, history: History) -> None:
    """Limits that one spike does not govern: what lies beyond them is cut, its mark stands at the edge."""
    steps = _steps(history)
    room = max(0.6, 0.01 * np.ptp(steps))
    panels["loss"].set_xlim(min(steps) - room, max(steps) + room)
    for key, panel in panels.items():
        values = _accepted(history.train, key)[1]
        if key in ("loss", "grad_norm") and len(values):
            low, high = np.quantile(values, (0.002, 0.98))
            if key == "loss":
                ends = [low, high, running_mean(values)[0], *history.val[:, 1]]
                room = max(0.06 * np.ptp(ends), 0.01 * abs(high), 1e-6)
                panel.set_ylim(min(ends) - room, max(ends) + room)
            elif low > 0:
                panel.set_yscale("log")
                low, high = panel.set_ylim(low / 1.3, high * 2)
                ticks = [m * 10.0**e for e in range(-30, 30) for m in (1, 1.5, 2, 3, 5, 7) if low <= m * 10.0**e <= high]
                while len(ticks) > 4:
                    ticks = ticks[::2]
                panel.yaxis.set_major_locator(FixedLocator(ticks))
                panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human(y)))
                panel.yaxis.set_minor_locator(NullLocator())
        elif key == "tok_per_s":
            panel.set_ylim(0, 1.15 * max(np.quantile(values, 0.99), 1e-6) if len(values) else 1)
            panel.yaxis.set_major_locator(MaxNLocator(3))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human(y) if y else "0"))
        elif key == "lr":
            panel.set_ylim(0, 1.12 * max(values.max(initial=0), 1e-12))
            panel.yaxis.set_major_locator(MaxNLocator(3))
            panel.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    steps_axis(list(panels.values())[-1])


def _accepted(columns, key) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of what was finite in the steps that were OK."""
    known = np.isfinite(columns[key]) & (columns["ok"] > 0)
    return columns["step"][known], columns[key][known]


def _caption(history: History) -> str:
    window = window_of(history.train["step"])
    parts = [f"Line: mean over {window} OK steps; faint: single steps." if window > 1 else "Line: every step that was OK."]
    if len(history.val):
        parts.append("Diamonds: validation.")
    if history.undone:
        parts.append("Grey: steps that a rollback took back; their steps were done again on other data.")
    if history.marks:
        parts.append("Marks: verdicts that were not OK stand at their value, or at the edge where it is beyond the axis or not "
                     "finite; events on the foot of the loss, with a dashed line. In brackets: how many.")
    return " ".join(parts)


def _steps(history: History) -> list[int]:
    return [int(step) for columns in (history.train, *history.undone) for step in columns["step"]]


def _row(line: str) -> dict | None:
    """A line's row, or None where it is none: not JSON, no kind, no step that a run could have."""
    try:
        row = json.loads(line)
        return row if isinstance(row["kind"], str) and type(row["step"]) is int and 0 <= row["step"] < 2**53 else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _columns(rows: dict[int, dict]) -> dict[str, np.ndarray]:
    ordered = [rows[step] for step in sorted(rows)]
    return {"step": np.array([row["step"] for row in ordered], dtype=float),
            "ok": np.array([row.get("verdict", "OK") == "OK" for row in ordered], dtype=float),
            **{key: np.array([_number(row.get(key)) for row in ordered], dtype=float) for key in FIELDS}}


def _losses(rows: list[dict], kind: str) -> np.ndarray:
    found = {row["step"]: _number(row.get("loss")) for row in rows if row["kind"] == kind}
    return np.array([pair for pair in sorted(found.items()) if math.isfinite(pair[1])], dtype=float).reshape(-1, 2)


def _number(value) -> float:
    """A row's value, NaN where it is no number that can be drawn."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 else math.nan
