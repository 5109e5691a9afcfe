"""Write a comparison of precisions, the result of report.analyse, as Markdown tables."""

from scaling.report_figure import begin_of, unit_of

LOSS = ("max", "min", "mean", "final", "standard deviation")
NOT_TOLD = "not told"


def tables(result: dict) -> str:
    """Training loss, validation loss, then what they cost; each with what its columns mean below it."""
    rows = result["runs"]
    losses = [table("Training loss [nats/token]", [*LOSS, "steps"], {row["label"]: _loss(row["train_loss"]) for row in rows}),
              table("Validation loss, as trained [nats/token]", [*LOSS, "validations", "gap as trained [%]", "gap in BF16 [%]"],
                    {row["label"]: [*_loss(row["val_loss"]), _gap(row, "as_trained"), _gap(row, "bf16")] for row in rows})]
    unit, name = unit_of(max((row["step_time_s"]["with_compile"] for row in rows if row["step_time_s"]), default=0))
    begin, beginning = begin_of(row["is_compiled"] for row in rows)
    cost = table("Time, memory, speed", ["speed against BF16", "tokens/s", f"steps [{name}]", f"without {begin} [{name}]",
                                         f"{begin} [{name}]", f"whole run [{name}]", "memory allocated, mean [%]",
                                         "memory, peak [GiB]", "GPU utilisation, mean [%]"],
                 {row["label"]: _cost(row, unit) for row in rows})
    words = [f"Speed and tokens/s: of the median step, the first three after each start left out. Steps: the sum of their times. "
             f"{beginning} Whole run: start and validations as well. Memory and utilisation: the first rank's GPU, mean over the "
             "steps after the first; peak: PyTorch's own."]
    if any(row["device"].startswith("cpu") for row in rows):
        words.append("A CPU has no FP8 units: speeds there say nothing about a GPU.")
    if any(row["memory_percent"] is None or row["utilisation_percent"] is None for row in rows):
        words.append(f"{NOT_TOLD.capitalize()}: the run's rows hold no such value; it takes a GPU, its driver and nvidia-ml-py.")
    return "\n\n".join([
        *losses, "Loss of all steps that count. Standard deviation (n - 1): of the single values around their mean, so mostly "
        "the way down. Gap: final loss minus the BF16 run's on the same sequences, ± one standard error of the evaluation, not "
        "of the run.", cost, " ".join(words)])


def table(title: str, columns, rows: dict[str, list[str]]) -> str:
    lines = [f"| {' | '.join(map(one_line, [label, *cells]))} |" for label, cells in rows.items()]
    return "\n".join([f"**{title}**", "", f"| recipe | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", *lines])


def one_line(text: str) -> str:
    """Names come from files: none may end a row or a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _loss(one: dict | None) -> list[str]:
    if one is None:
        return [NOT_TOLD] * len(LOSS) + ["0"]
    return [_fixed(one[key], 4) for key in ("max", "min", "mean", "final", "sd")] + [f"{one['n']:,}"]


def _gap(row: dict, arm: str) -> str:
    if row["gap"] is None:
        return "" if row["recipe"] == "bf16" else "no BF16 run"
    gap = row["gap"][arm]
    return f"{gap['percent']:+.3f}" + ("" if gap["se_percent"] is None else f" ± {gap['se_percent']:.3f}")


def _cost(row: dict, unit: float) -> list[str]:
    times = row["step_time_s"] or {}
    seconds = [*(times.get(key) for key in ("with_compile", "without_compile", "compile")), row["wall_s"]]
    memory, busy = (one and one["mean"] for one in (row["memory_percent"], row["utilisation_percent"]))
    return [_speed(row), f"{row['tok_per_s_median']:,.0f}", *(_fixed(one if one is None else one / unit, 2) for one in seconds),
            _fixed(memory, 1), _fixed(row["mem_peak_gib"], 2), _fixed(busy, 1)]


def _speed(row: dict) -> str:
    if row["gap"] is None:
        return "1" if row["recipe"] == "bf16" else "no BF16 run"
    if row["speed_against_bf16"] is None:
        return "not alike"      # another machine, or only one of them compiled
    return f"{row['speed_against_bf16']:.3f}" + " (CPU)" * row["device"].startswith("cpu")


def _fixed(value: float | None, digits: int) -> str:
    return NOT_TOLD if value is None else f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"
