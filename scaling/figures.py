"""Draw one run, whole, going or cut short.

    python scaling/figures.py out/RUN [out=DIR]        # its training, into out/RUN/figures
    python scaling/figures.py --fp8 out/RUN [out=DIR]  # what FP8 did inside it, from probe.jsonl

A training: loss, norm and speed with all that went wrong, from metrics.jsonl. It uses matplotlib's
objects without pyplot, so no window system is asked for, no global state is left behind. Several
runs of one training are drawn by scaling/report.py."""

from dataclasses import dataclass
from pathlib import Path

from lib.command import command, run_command
from lib.plots import write_with
from lib.values import FilePath
from scaling.histories import read_history
from scaling.probe_figures import (
    draw_matmuls,
    draw_outliers,
    draw_scales,
    draw_underflow,
    has_matmuls,
)
from scaling.probes import format_worst, read_probe
from scaling.run_figure import draw


@dataclass(frozen=True, kw_only=True)
class Options:
    run: FilePath  # folder of a run, such as out/RUN
    fp8: bool = False  # what FP8 did inside it
    out: FilePath | None = None  # folder that receives the figures


@command(__doc__, Options, "run")
def main(options: Options) -> str:
    run = Path(options.run)
    folder = Path(options.out or run / "figures")
    if options.fp8:
        return draw_fp8(run, folder)
    return write_with(folder, "run", draw(read_history(run), run.resolve().name), {})


def draw_fp8(run: Path, folder: Path) -> str:
    """Draw the probes of a run and of its inference (run/eval/probe_*.jsonl); returns the worst
    losses, what was written."""
    probe = read_probe(run / "probe.jsonl")
    name = run.resolve().name
    figures = {}
    text = f"{run} has probed no FP8 Linear (a BF16 run?): only fp8_outliers is drawn"
    if probe.layers:
        text = format_worst(probe)
        evaluations = [read_probe(path) for path in sorted(run.glob("eval/probe_*.jsonl"))]
        inference = {evaluation.evaluated_in: evaluation for evaluation in evaluations}
        figures["fp8_scales"] = draw_scales(probe, inference, name)
        figures["fp8_underflow"] = draw_underflow(probe, name)
        if has_matmuls(probe):  # older ones have none
            figures["fp8_matmuls"] = draw_matmuls(probe, name)
    if probe.blocks:
        figures["fp8_outliers"] = draw_outliers(probe, name)
    wrote = [write_with(folder, file, figure, {}) for file, figure in figures.items()]
    return "\n".join([text, "", *wrote])


if __name__ == "__main__":
    raise SystemExit(run_command(main))
