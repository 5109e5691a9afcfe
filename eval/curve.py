"""Draw a run's loss curve as SVG, for a page that loads nothing."""

import math
from html import escape
from pathlib import Path

from runtime.rows import metrics_rows, read_rows

WIDTH, HEIGHT = 460, 300                            # units of the drawing, scaled to whatever room there is
LEFT, RIGHT, TOP, BOTTOM = 52, 448, 26, 252         # of the frame
POINTS = 240                                        # drawn at most of the training loss: the means of as many stretches
START_UP = 0.02                                     # share of the steps whose steep fall may leave the frame at its top
TRAIN, VALIDATION = "#0072B2", "#D55E00"            # Okabe-Ito


def read_losses(run_dir: str | Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(step, loss) of training and of validation, in nats per token; without what a rollback undid or was not finite, nor a
    loss of 0: that of a step without targets."""
    losses = {"train": {}, "val": {}}
    for row in metrics_rows(read_rows(Path(run_dir) / "metrics.jsonl")):
        loss = row.get("loss")
        if row["kind"] in losses and isinstance(loss, float) and 0 < abs(loss) < 1e6 and 0 <= row["step"] < 2**53:
            losses[row["kind"]][row["step"]] = loss
    return sorted(losses["train"].items()), sorted(losses["val"].items())


def loss_svg(name: str, train: list[tuple[int, float]], val: list[tuple[int, float]]) -> str:
    """An <svg> element of the two curves, or a sentence where there are none; `name` is the run's."""
    if not train and not val:
        return "<p>No step of this run is recorded.</p>"
    size = max(1, -(-len(train) // POINTS))
    means = [_mean(train[i:i + size]) for i in range(0, len(train), size)]
    last = max(step for step, _ in means + val)
    settled = [loss for step, loss in means + val if step >= START_UP * last]
    low, high = min(settled), max(settled)
    margin = max(0.06 * (high - low), 1e-3)
    low, high = low - margin, high + margin

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / max(last, 1)

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - low) / (high - low)

    def line(points, color: str) -> str:
        places = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.6" clip-path="url(#frame)"/>'

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_in_words(name, train, val))}" '
           f'font-size="12" fill="currentColor">',
           f'<clipPath id="frame"><rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT + 4}" height="{BOTTOM - TOP}"/></clipPath>']
    for loss in _ticks(low, high):
        out += [f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="currentColor" opacity="0.15"/>',
                f'<text x="{LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>']
    for step in _ticks(0, max(last, 1)):
        out.append(f'<text x="{x(step):.1f}" y="{BOTTOM + 16}" text-anchor="middle">{_human(step)}</text>')
    out += [f'<path d="M{LEFT},{TOP} V{BOTTOM} H{RIGHT}" fill="none" stroke="currentColor"/>',
            f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">optimizer step</text>',
            f'<text transform="translate(13 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle">loss [nats/token]</text>',
            line(means, TRAIN), line(val, VALIDATION)]
    out += [f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3.2" fill="{VALIDATION}" clip-path="url(#frame)"/>'
            for step, loss in val]
    stretch = f", mean of {size} steps" if size > 1 else ""
    out += [f'<path d="M{LEFT + 12},14 h18" stroke="{TRAIN}" stroke-width="2"/>',
            f'<text x="{LEFT + 35}" y="18">training{stretch}</text>',
            f'<path d="M{LEFT + 232},14 h18" stroke="{VALIDATION}" stroke-width="2"/>',
            f'<circle cx="{LEFT + 241}" cy="14" r="3.2" fill="{VALIDATION}"/>',
            f'<text x="{LEFT + 255}" y="18">validation</text>', "</svg>"]
    return "\n".join(out)


def _mean(points: list[tuple[int, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(loss for _, loss in points) / len(points)


def _in_words(name: str, train, val) -> str:
    ends = [f"{kind} loss {points[0][1]:.3f} at step {points[0][0]}, {points[-1][1]:.3f} at step {points[-1][0]}"
            for kind, points in (("training", train), ("validation", val)) if points]
    return f"{name}: {'; '.join(ends)}"


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers between the two."""
    unit = 10 ** math.floor(math.log10(high - low))
    step = next(unit * part for part in (2, 1, 0.5, 0.2, 0.1) if (high - low) / (unit * part) >= 4)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _human(step: float) -> str:
    return next((f"{step / size:g}{unit}" for size, unit in ((1e6, "M"), (1e3, "k")) if step >= size), f"{step:g}")
