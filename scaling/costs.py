"""Tell what each run of a study costs, how far it is, what branches save: the table that scaling/sweep.py prints."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from runtime.log import peak_flops
from runtime.progress import si
from scaling.grid import placed, state_of, summary_of, tokens_left
from scaling.study import Row

# Assumed, for no summary tells: the interpreter, torch and the GPU's context before a run's clock begins, and its end; 2 to 4 s
# on a CPU.
UNSEEN_S = 5.0
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


@dataclass(frozen=True)
class Cost:
    """What runs of one size and precision take on each GPU."""
    tok_per_s: float            # in steady steps
    start_s: float              # before the first steady step (imports, compilation) and after the last (evaluation, saving)
    device: str | None          # where the speed was measured; None = assumed
    is_start_measured: bool

    def seconds(self, tokens: int, gpus: int) -> float:
        """GPU-seconds of a run that is started once and trains on so many tokens."""
        return self.start_s * gpus + tokens / self.tok_per_s


def kind_of(row: Row) -> tuple[str, str]:
    """Runs of one kind cost alike: size and precision; the null runs, rounded otherwise, are a kind of their own."""
    return row.size, row.recipe + " null" * row.repeat


def costs_of(rows: list[Row], folder: Path, options) -> dict[tuple[str, str], Cost]:
    """kind -> its Cost: medians over its finished runs, else options.mfu of the peak of options.gpu and options.start."""
    peak, costs = peak_flops(options.gpu)[0], {}
    done = [(row, summary) for row in rows if (summary := summary_of(row, folder))]
    for row in rows:
        if kind_of(row) in costs:
            continue
        speeds, starts, device = [], [], None
        for twin, summary in done:
            if kind_of(twin) == kind_of(row):
                device = summary["device"]
                speeds.append(summary["tok_per_s_median"] / summary["n_gpu"])
                if summary.get("wall_s"):
                    steady = placed(twin, folder).own_tokens / summary["tok_per_s_median"]
                    starts.append(UNSEEN_S + max(0.0, summary["wall_s"] - steady))
        speed = statistics.median(speeds) if speeds else peak * options.mfu / row.flops_per_token
        costs[kind_of(row)] = Cost(speed, statistics.median(starts) if starts else options.start, device, bool(starts))
    return costs


def table(rows: list[Row], folder: Path, options) -> list[str]:
    """A line per run: size, budget, where it branches off, FLOPs of its own steps, GPU time with its start, state; then sums."""
    costs = costs_of(rows, folder, options)
    whole = [placed(row, folder) for row in rows]
    spent = [costs[kind_of(row)].seconds(row.own_tokens, options.gpus) for row in whole]
    tokens = [tokens_left(row, folder) for row in whole]
    is_left = [summary_of(row, folder) is None for row in rows]
    left = [costs[kind_of(row)].seconds(t, options.gpus) for row, t, wanted in zip(rows, tokens, is_left, strict=True) if wanted]
    scale, unit = next((one for one in UNITS if max(spent) >= one[0]), UNITS[-1])
    width = max(len(row.run) for row in rows)
    lines = [f"{'run':{width}}  {'N':>7} {'tok/N':>5} {'tokens':>7} {'from step':>9} {'FLOPs':>8} {unit:>9}  state"]
    for row, seconds in zip(whole, spent, strict=True):
        about = "" if costs[kind_of(row)].device else "~"
        lines.append(f"{row.run:{width}}  {si(row.params_total):>7} {row.tokens_per_param:>5g} {si(row.tokens):>7} "
                     f"{row.parent_step or '-':>9} {row.own_flops:>8.2e} {about + _time(seconds / scale):>9}  "
                     f"{state_of(row, folder)}")
    own, apart = sum(row.own_flops for row in whole), sum(row.flops for row in rows)
    flops_left = sum(t * row.flops_per_token for row, t in zip(rows, tokens, strict=True))
    lines += ["", f"{len(rows)} runs: {own:.3g} FLOPs, {_time(sum(spent) / scale)} device-{unit}; left: {sum(is_left)} runs, "
                  f"{flops_left:.3g} FLOPs, {_time(sum(left) / scale)} device-{unit}",
              f"as {len(rows)} separate runs {apart:.3g} FLOPs: branches save {1 - own / apart:.0%}",
              f"A branch's FLOPs and {unit} are those of its own steps; FLOPs are 6 per matmul parameter plus attention; {unit} "
              f"include what a run takes to start and end."]
    if options.limit and left:
        lines.append(_slices(sum(left) / options.gpus / options.jobs, max(cost.start_s for cost in costs.values()), options))
    if alone := [row.run for row, before in zip(whole, rows, strict=True) if row.parent != before.parent
                 and not summary_of(row, folder)]:
        lines.append(f"from scratch, for the checkpoints of their trunks are gone: {', '.join(alone)}")
    return lines + _sources(costs, options)


def _slices(seconds: float, start: float, options) -> str:
    """How many calls with limit= the rest takes, each of which begins some run once more."""
    usable = options.limit - start
    if usable <= 0:
        return f"limit={options.limit:g} is no more than the {start:.0f} s that a run takes to start and end: give more"
    return (f"left: {max(1, math.ceil((seconds - start) / usable))} slices of {options.limit:g} s, where each has to start a run "
            f"once more; on a machine that has no checkpoints of a cut run, more")


def _sources(costs: dict[tuple[str, str], Cost], options) -> list[str]:
    """Where the times come from: a line of what is assumed, one for each kind that was measured."""
    assumed = []
    if any(cost.device is None for cost in costs.values()):
        peak = peak_flops(options.gpu)[0]
        assumed.append(f"{100 * options.mfu:.3g}% of the {peak / 1e12:.0f} BF16 TFLOP/s of one {options.gpu} (mfu=), FP8 as fast")
    if not all(cost.is_start_measured for cost in costs.values()):
        assumed.append(f"{options.start:g} s to start and end a run (start=)")
    return [*([f"~ assumed: {', '.join(assumed)}"] if assumed else []), *(
        f"measured: {' '.join(kind)} {si(cost.tok_per_s)} tokens/s on each {cost.device}"
        + (f", {cost.start_s:.3g} s to start and end ({UNSEEN_S:g} of them assumed)" if cost.is_start_measured else "")
        for kind, cost in costs.items() if cost.device)]


def _time(value: float) -> str:
    return "<0.001" if 0 < value < 1e-3 else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
