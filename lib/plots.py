"""The one style of all figures, and how figures and the files beside them are written."""

import io
import itertools
import json
import math
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import (
    FuncFormatter,
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

from lib.errors import UserError
from lib.files import write_atomically
from lib.text import si

RC: dict[Any, Any] = {
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
    {  # no colour of Okabe and Ito: their yellow is lost on white
        "color": "#882255",
        "shades": "Purples",
        "marker": "h",
        "markersize": 4.0,
        "linestyle": (0, (4, 1, 1, 1, 1, 1)),
        "linewidth": 1.0,
    },
)


# of the first STYLES, in their order
RECIPES = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "auto")


# Okabe-Ito; BF16 is blue in every figure of this project
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"


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
    """A style per recipe: each of RECIPES has its own in every figure, others take what is left.
    Where those repeat, a colour comes back with another marker and dash."""
    unused = [
        style for style, name in itertools.zip_longest(STYLES, RECIPES) if name not in recipes
    ]
    looks: list[dict] = []
    n_without_own = 0
    for name in recipes:
        if name in RECIPES:
            looks.append(STYLES[RECIPES.index(name)])
            continue
        turn, index = divmod(n_without_own, len(unused))
        looks.append(_turned(unused[index], turn))
        n_without_own += 1
    return looks


def _turned(style: dict, turn: int) -> dict:
    """The style's colour with the marker and dash of the style so many places on."""
    if turn == 0:
        return style
    shape = STYLES[(STYLES.index(style) + turn) % len(STYLES)]
    return style | {name: shape[name] for name in ("marker", "linestyle")}


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
