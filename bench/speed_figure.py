"""Draw the rows of bench/throughput.py: speed by size and label, where a step's time goes, when compiling has paid.

Which rows count is bench/speed_rows.py's. Colours are Okabe-Ito's, BF16 blue as in every figure of this project; every bar
has its name beside it, every line a dash of its own, for print in grey.
"""

import io
import math
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.speed_rows import BASELINE, EAGER, PEER_LABELS, PEERS, in_order, is_fp8, is_number, newest, of_kind, tflops, valid
from runtime.rows import write_atomically
from scaling.figures import RC, page, steps_axis
from scaling.pairs import human

# Kind of a cell -> its words in the legend, its colour.
KINDS = {"eager": ("BF16, not compiled", "#999999"), "bf16": ("BF16, compiled", "#0072B2"),
         "fp8": ("FP8, torchao's casts", "#E69F00"), "kernels": ("FP8, our kernels", "#D55E00"), "peer": ("peers", "#CC79A7")}
BUCKETS = {"matmul": "#0072B2", "cast": "#D55E00", "attention": "#009E73", "pointwise": "#56B4E9", "loss": "#E69F00",
           "optimizer": "#CC79A7", "other": "#999999", "idle": "#E0E0E0"}
DASHES = {"eager": (0, (1.2, 1.2)), "bf16": "-", "fp8": (0, (4, 1.5)), "kernels": (0, (6, 1.5, 1.2, 1.5))}
BAR = 0.165             # inches a bar
NAMED = 0.025           # share of the panel's width from which a part's per cent are written in it
MOST_STEPS = 5_000      # of the time axis: a break-even beyond is told in words
DPI = 160


def figures(rows: list, folder: Path) -> list[Path]:
    """Draw what was measured on the GPU of the newest valid cell into `folder`, made if need be; the files drawn, which bear
    the suite's name."""
    cells, drawn = valid(rows), []
    if cells:
        folder.mkdir(parents=True, exist_ok=True)
    suites = {str(run.get("run")): run.get("suite") for run in of_kind(rows, "run")}
    here = [cell for cell in cells if cell["gpu"] == cells[-1]["gpu"]]
    with matplotlib.rc_context(RC):
        for name, draw in (("speed.png", _speed), ("step_time.png", _step_time), ("start_up.png", _start_up)):
            if figure := draw(here):
                png = io.BytesIO()
                figure.savefig(png, format="png", dpi=DPI)
                drawn.append(folder / f"{Path(str(suites.get(here[-1]['run']))).name}_{name}")
                write_atomically(drawn[-1], png.getvalue())
    return drawn


def _speed(cells: list[dict]) -> Figure | None:
    """tokens/s and TFLOP/s with MFU: a row of panels a size, a bar a label."""
    sizes = _by_size(_fastest(cells))
    if not sizes:
        return None
    shown = [cell for group in sizes.values() for cell in group]
    peaks = {round(tflops(cell) / cell["mfu_bf16"], 1) for cell in shown if is_number(cell.get("mfu_bf16")) and cell["mfu_bf16"]}
    title = f"Training speed on {_gpu(cells)}: {len(shown)} cells of {_runs(shown)}"
    caption = ("Model FLOPs: 6 a matmul parameter + 12 L H D T per token, no recomputation. 1.00x: speed over compiled BF16, "
               "measured in turns within one run. Bars of one size may come from several runs. Peers' models are not ours: "
               "look at TFLOP/s.")
    figure, panels = _sheet(sizes, 2, title, caption, [KINDS[kind] for kind in KINDS if kind in map(_kind, shown)],
                            top=1.0 if len(peaks) == 1 else 0.72)
    most = max(map(tflops, shown))
    for group, (left, right) in zip(sizes.values(), panels, strict=True):
        for y, cell in enumerate(group):
            bar = {"color": KINDS[_kind(cell)][1], "height": 0.78}
            left.barh(y, cell["tok_per_s"], **bar)
            right.barh(y, tflops(cell), **bar)
            has_ratio = cell["ratio"] and cell.get("baseline") == BASELINE and is_fp8(cell)
            left.text(cell["tok_per_s"], y, f" {human(cell['tok_per_s'])}"
                      + (f"  {cell['ratio']['median']:.2f}x" if has_ratio else ""), va="center", fontsize=7)
            mfu = f" ({cell['mfu_bf16']:.0%})" if is_number(cell.get("mfu_bf16")) else ""
            right.text(tflops(cell), y, f" {tflops(cell):.3g}{mfu}", va="center", fontsize=7)
        left.set_xlim(0, 1.3 * max(cell["tok_per_s"] for cell in group))
        left.xaxis.set_major_locator(MaxNLocator(4))
        left.xaxis.set_major_formatter(lambda x, _: human(x) if x else "0")
        right.set_xlim(0, 1.3 * most)
    panels[-1, 0].set_xlabel("tokens/s")
    panels[-1, 1].set_xlabel("model TFLOP/s")
    if len(peaks) == 1:
        peak = peaks.pop()
        top = panels[0, 1].secondary_xaxis("top", functions=(lambda x: 100 * x / peak, lambda x: x * peak / 100))
        top.set_xlabel(f"mfu_bf16 [% of {peak:.1f} TFLOP/s]")
    return figure


def _step_time(cells: list[dict]) -> Figure | None:
    """Where the GPU's time goes, per token: a panel a size, a stacked bar a label."""
    sizes = _by_size([cell for cell in _fastest(cells) if _buckets(cell)])
    if not sizes:
        return None
    shown = [cell for group in sizes.values() for cell in group]
    names = [name for name in BUCKETS if any(_buckets(cell)[name] for cell in shown)]
    title = f"Where an optimizer step's time goes on {_gpu(cells)}: {len(shown)} profiles of {_runs(shown)}"
    caption = ("Sums over a profile's kernels by their names, in per cent of the bar; idle is what is left of the step as timed "
               "without the profiler. A cast that the compiler fused into a norm or SwiGLU is pointwise: casts cost their own "
               "bucket and what pointwise has more than in BF16.")
    figure, panels = _sheet(sizes, 1, title, caption, [(name, BUCKETS[name]) for name in names], top=0.72)
    for group, panel in zip(sizes.values(), panels[:, 0], strict=True):
        longest = max(sum(_buckets(cell).values()) for cell in group)
        for y, cell in enumerate(group):
            buckets, begin = _buckets(cell), 0.0
            total = sum(buckets.values())
            for name in names:
                width = buckets[name]
                panel.barh(y, width, left=begin, color=BUCKETS[name], edgecolor="white", linewidth=0.5, height=0.78)
                if width >= NAMED * longest:
                    panel.text(begin + width / 2, y, f"{100 * width / total:.0f}", ha="center", va="center", fontsize=6.5,
                               color="black" if name == "idle" else "white")
                begin += width
            panel.text(begin, y, f" {total:.3g}", va="center", fontsize=7)
        panel.set_xlim(0, 1.08 * longest)
    panels[-1, 0].set_xlabel("time of an optimizer step [µs per token]")
    return figure


def _start_up(cells: list[dict]) -> Figure | None:
    """Cumulative time over steps, compilation included: a panel a size, cells of one run alone."""
    sizes = {title: arms for title, group in _by_size(cells).items() if (arms := _arms(group))}
    if not sizes:
        return None
    columns = min(2, len(sizes))
    deep = -(-len(sizes) // columns)
    shown = [arm for arms in sizes.values() for arm in arms]
    handles = [matplotlib.lines.Line2D([], [], color=KINDS[kind][1], linestyle=DASHES[kind], label=KINDS[kind][0])
               for kind in DASHES if kind in map(_kind, shown)]
    title = f"When compiling has paid on {_gpu(cells)}: {len(shown)} cells of {_runs(shown)}"
    caption = ("Compilation with empty caches + steps x step time, of the fastest cell of its kind. A dot: from there on "
               "ahead, FP8 of compiled BF16, that of BF16 not compiled.")
    figure, panels = page(2.2 * deep + 0.9, deep, columns, title, caption, top=0.75, wspace=0.2, hspace=0.42)
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.065, 1 - 0.24 / figure.get_figheight()), ncols=4,
                  frameon=False, borderpad=0, handlelength=3.4)
    for (title, arms), panel in zip(sizes.items(), panels.flat, strict=False):
        base = next((cell for cell in arms if cell["label"] == BASELINE), arms[0])
        pairs = [(arms[0], base), *((base, cell) for cell in arms if is_fp8(cell))]
        pairs = [(before, after, break_even(before, after)) for before, after in pairs if before is not after]
        last = min(MOST_STEPS, max([20, *(1.6 * step for _, _, step in pairs if step is not None)]))
        for cell in arms:
            color = KINDS[_kind(cell)][1]
            panel.plot([0, last], [_at(cell, 0), _at(cell, last)], color=color, linestyle=DASHES[_kind(cell)], linewidth=1.4)
        words = []
        for before, after, step in pairs:
            words.append(f"{after['label']}: " + (f"never ahead of {before['label']}" if step is None else
                                                 f"ahead of {before['label']} from step {step:,}"))
            if step is not None and step <= last:
                panel.plot(step, _at(after, step), "o", color=KINDS[_kind(after)][1], markersize=4.5, zorder=3)
        panel.text(0.02, 0.98, "\n".join(words), transform=panel.transAxes, va="top", fontsize=6.5, parse_math=False)
        panel.set_title(title, loc="left")
        panel.set_xlim(0, last)
        panel.set_ylim(0, 1.35 * max(_at(cell, last) for cell in arms))
        steps_axis(panel)
        panel.set_ylabel("time since start [s]")
        panel.grid(True, color="#EEEEEE", linewidth=0.5)
    for panel in panels.flat[len(sizes):]:
        panel.remove()
    return figure


def break_even(before: dict, after: dict) -> int | None:
    """The first step at whose end `after` has taken no more time, compilation included; None where its steps are no faster."""
    gain = before["step_s"] - after["step_s"]
    if gain <= 0:
        return None
    return max(1, math.ceil((_compile_s(after) - _compile_s(before)) / gain))


def _arms(group: list[dict]) -> list[dict]:
    """Of one size the fastest cell of each kind, slowest kind first, from the run that holds most kinds (then the newest)."""
    best: list[dict] = []
    for run in dict.fromkeys(cell["run"] for cell in group):
        fastest = {}
        for cell in sorted((cell for cell in group if cell["run"] == run), key=tflops):
            if _kind(cell) in DASHES and _compile_s(cell) is not None:
                fastest[_kind(cell)] = cell
        arms = [fastest[kind] for kind in DASHES if kind in fastest]
        if len(arms) >= max(2, len(best)):
            best = arms
    return best


def _compile_s(cell: dict) -> float | None:
    return 0.0 if cell["label"] == EAGER else cell["cold_s"]


def _at(cell: dict, step: float) -> float:
    return _compile_s(cell) + step * cell["step_s"]


def _kind(cell: dict) -> str:
    if cell["label"] in PEER_LABELS:
        return "peer"
    return {EAGER: "eager", BASELINE: "bf16"}.get(cell["label"]) or ("kernels" if "+kernels" in cell["label"] else "fp8")


def _fastest(cells: list[dict]) -> list[dict]:
    """Of the newest cells the fastest micro-batch of each size, label and T."""
    return list({(cell["size"], cell["label"], cell["T"]): cell for cell in sorted(newest(cells), key=tflops)}.values())


def _by_size(cells: list[dict]) -> dict[str, list[dict]]:
    """Title of a panel -> its cells, in order; a peer stands beside our size that it is compared with."""
    beside = {size: own for _, size, _, own, _, _ in reversed(PEERS)}       # of several the first
    groups: dict[str, list[dict]] = {}
    for cell in in_order(cells):
        groups.setdefault(f"{beside.get(cell['size'], cell['size'])}, T={cell['T']}", []).append(cell)
    return groups


def _buckets(cell: dict) -> dict[str, float] | None:
    """Microseconds per token by bucket, of a whole optimizer step, where the cell has a profile that can be read."""
    found = cell.get("buckets")
    if not isinstance(found, dict) or not all(is_number(v) and v >= 0 for v in found.values()) or not sum(found.values()):
        return None
    seconds = {name: found.get(name, 0.0) for name in BUCKETS}
    seconds["other"] += sum(v for name, v in found.items() if name not in BUCKETS)
    seconds["idle"] = max(0.0, cell["step_s"] - sum(found.values()))
    return {name: value / (cell["tok_per_s"] * cell["step_s"]) * 1e6 for name, value in seconds.items()}


def _sheet(sizes: dict, columns: int, title: str, caption: str, legend: list[tuple], top: float):
    """A page with a row of panels a size, as high as it has bars, and a legend of (words, colour)."""
    heights = [BAR * len(group) + 0.12 for group in sizes.values()]
    gap = 0.46
    names = {key: [_name(cell) for cell in group] for key, group in sizes.items()}
    longest = max(len(name) for group in names.values() for name in group)
    figure, panels = page(sum(heights) + gap * (len(heights) - 1) + top + 0.6, len(sizes), columns, title, caption, top=top,
                          left=0.02, wspace=0.08, hspace=gap * len(heights) / sum(heights), sharey="row",
                          gridspec_kw={"height_ratios": heights})
    figure.subplots_adjust(left=0.025 + 0.0079 * longest)
    figure.legend(handles=[Patch(color=color, label=words) for words, color in legend], loc="upper left", ncols=8, frameon=False,
                  bbox_to_anchor=(0.02, 1 - 0.24 / figure.get_figheight()), borderpad=0, borderaxespad=0, handlelength=1.6,
                  columnspacing=1.3)
    for panel, key in zip(panels[:, 0], sizes, strict=True):
        panel.set_ylim(len(names[key]) - 0.4, -0.6)
        panel.set_yticks(range(len(names[key])), names[key])
        panel.set_title(key, loc="left", weight="bold")
    for panel in panels.flat:
        panel.tick_params(axis="y", length=0)
        panel.grid(True, axis="x", color="#EEEEEE", linewidth=0.5)
        panel.set_axisbelow(True)
    return figure, panels


def _name(cell: dict) -> str:
    """A bar's name: the label, of a peer its size with what the label adds."""
    return cell["label"] if _kind(cell) != "peer" else " ".join([cell["size"], *cell["label"].split("_")[1:]])


def _gpu(cells: list[dict]) -> str:
    return cells[0]["gpu"] or "no GPU (a rehearsal)"


def _runs(cells: list[dict]) -> str:
    count = len({cell["run"] for cell in cells})
    return f"{count} run{'s' * (count > 1)}"
