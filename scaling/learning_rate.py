"""Find the best peak learning rate of a sweep; say which rates other sizes get by the stated rule.

    python scaling/learning_rate.py out/h100_lr                          table, optimum, law/learning_rate.json and its figure
    python scaling/learning_rate.py out/h100_lr at=6.49e6,12.8e6,25.4e6  rates for those non-embedding parameters

The runs may differ in the peak rate, the seed and the size alone; runs of one size and number of
tokens are one sweep. A parabola in ln(rate) goes through the lowest loss and its two neighbours.
The loss is that of validation in BF16, averaged over the seeds that every rate has. Exit code 3:
there is no optimum, as the lowest loss is at an end of the sweep.

The rule is rate ~ N^-1/2 at a fixed number of tokens per parameter and a fixed batch. The 1,911
dense runs of Step Law (2503.04715), refitted as here, give exponents of -0.48 to -0.81 at their ten
batches, 2409.19913 -0.55 and muP's 1/width at a fixed depth -0.5 (2203.03466). Where the batch
grows with the model, DeepSeek LLM (2401.02954) has N^-0.25."""

import itertools
import math
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lib.command import command, run_command
from lib.errors import UserError
from lib.plots import STYLES, counts_axis, sheet, styled, write_with
from lib.text import si
from lib.values import FilePath
from scaling.paired.estimates import grouped
from scaling.precision import fixed, table
from scaling.records import LAW_FOLDER, read_runs, read_study, without_repeats

RULES = {"fixed batch (the rule)": -0.5, "growing batch (DeepSeek LLM)": -0.25}
FLAT = 0.001  # rates that cost less than 0.1 % of the loss, by the parabola, count as equally good
TOP = 8.0  # losses farther than 8 % above the lowest of their size leave the panel
SAME = (
    "val_sha256",
    "data_sha256",
    "tokenizer_sha256",
    "n_ctx",
    "tokens_per_step",
    "optimizer",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "clip",
    "schedule",
)  # of summary.json


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: FilePath  # the folder of the sweep's runs, such as out/h100_lr
    # non-embedding parameters to give rates for; none = 2, 4 and 8 times the smallest size's
    at: tuple[float, ...] = ()
    # folder that receives learning_rate.json, .png and .svg; none = law beside the runs
    out: FilePath | None = None

    def __post_init__(self):
        if wrong := [n for n in self.at if not n > 0]:
            raise UserError(
                f"at={wrong[0]:g} is no number of parameters: give positive ones, such as"
                " at=6.49e6,12.8e6"
            )


@command(__doc__, Options, "runs")
def main(options: Options) -> int:
    folder = Path(options.runs)
    trials, notes = read_trials(folder)
    found = analyse(trials, options.at)
    wrote = write_with(
        Path(options.out or folder / LAW_FOLDER),
        "learning_rate",
        draw(found, folder.resolve().name),
        {"learning_rate.json": found},
    )
    print("\n".join([*notes, tables(found), "", wrote]))
    return 0 if found["base"] else 3


# N: params_nonembed; lr: peak rate; status: "ok", "diverged" or "unfinished"; loss: nats per
# validation token in BF16, if "ok".
Trial = namedtuple("Trial", "run N tokens lr seed status loss", defaults=(None,))


def read_trials(folder: Path) -> tuple[list[Trial], list[str]]:
    """The sweep's runs, plus a line for each left out. A run of study.json without a summary.json
    is unfinished, or diverged where it left a diagnosis.json. Raises UserError where runs differ in
    more than the rate, the seed and the size."""
    records, notes = read_runs([folder])
    records, repeats = without_repeats(records)
    trials, first = [], {}
    for record in records:
        mine = {key: record.summary.get(key) for key in SAME}
        for key, value in (
            mine | {"recipe": record.recipe, "weights of the sources": record.weights}
        ).items():
            if first.setdefault(key, value) != value:
                raise UserError(
                    f"{records[0].run_id} and {record.run_id} differ in {key} ({first[key]},"
                    f" {value}): the runs of a sweep may differ in learning rate, seed and size"
                    " alone; leave one out"
                )
        trials.append(
            Trial(
                record.folder.name,
                record.params_nonembed,
                record.tokens,
                record.summary["lr_peak"],
                record.seed,
                record.status,
                record.loss_bf16 if record.status == "ok" else None,
            )
        )
    finished = {trial.run for trial in trials}
    for row in read_study(folder).get("runs", []):
        if row["lr"] and not row["repeat"] and row["run"] not in finished:
            status = (
                "diverged" if (folder / row["run"] / "diagnosis.json").exists() else "unfinished"
            )
            trials.append(
                Trial(
                    row["run"],
                    row["params_nonembed"],
                    row["tokens"],
                    row["lr"],
                    row["seed"],
                    status,
                )
            )
    if len({(one.N, one.tokens, one.lr, one.seed) for one in trials}) < len(trials):
        raise UserError(
            f"{folder}: two runs have the same size, tokens, lr_peak and seed: leave one out"
        )
    return trials, notes + repeats


def analyse(trials: list[Trial], sizes=()) -> dict:
    """What learning_rate.json holds: each size's sweep, the base of the rule, rates for `sizes`
    (non-embedding parameters)."""
    sweeps = [judge(some) for _, some in grouped(trials, lambda trial: (trial.N, trial.tokens))]
    # Of each size the longest runs count: the rate of a trunk serves all of its branches.
    smallest, *larger = {sweep["N"]: sweep for sweep in sweeps}.values()
    found = {
        "format_version": 1,
        "N": "params_nonembed",
        "loss": "loss_bf16",
        "rules": RULES,
        "sweeps": sweeps,
        "base": None,
        "rates": [],
        "checks": [],
    }
    if smallest["optimum"]:
        lr, N = smallest["optimum"]["lr"], smallest["N"]

        def ruled(size):
            return {name: lr * (size / N) ** power for name, power in RULES.items()}

        found["base"] = {"N": N, "tokens": smallest["tokens"], "lr": lr}
        found["rates"] = [
            {"N": size, **ruled(size)} for size in [N, *(sizes or (2 * N, 4 * N, 8 * N))]
        ]
        found["checks"] = [
            {
                "N": other["N"],
                "lr": other["optimum"]["lr"],
                **ruled(other["N"]),
                "exponent": math.log(other["optimum"]["lr"] / lr) / math.log(other["N"] / N),
            }
            for other in larger
            if other["optimum"]
        ]
    return found


def judge(trials: list[Trial]) -> dict:
    """One size's sweep: a row for each rate, the optimum, or in its place the sentence that says
    what is missing."""
    # in rising order of the rate
    of = dict(grouped(sorted(trials, key=lambda trial: trial.seed), lambda trial: trial.lr))
    losses = {
        lr: {trial.seed: trial.loss for trial in tried if trial.status == "ok"}
        for lr, tried in of.items()
        # a rate at which one seed diverged is out
        if all(trial.status in ("ok", "unfinished") for trial in tried)
    }
    sound = [lr for lr in losses if losses[lr]]
    seeds = sorted(set.intersection(*(set(losses[lr]) for lr in sound))) if sound else []
    mean = (
        {
            lr: math.exp(sum(math.log(losses[lr][seed]) for seed in seeds) / len(seeds))
            for lr in sound
        }
        if seeds
        else {}
    )
    best = min(mean, key=mean.get, default=None)
    rows = [
        {
            "lr": lr,
            "runs": [trial.run for trial in tried],
            "seeds": [trial.seed for trial in tried],
            "status": next((trial.status for trial in tried if trial.status != "ok"), "ok"),
            "loss": mean.get(lr),
            "percent": 100 * (mean[lr] / mean[best] - 1) if lr in mean else None,
        }
        for lr, tried in of.items()
    ]
    found = {
        "N": trials[0].N,
        "tokens": trials[0].tokens,
        "seeds": seeds,
        "rows": rows,
        "optimum": None,
        "reason": None,
    }
    if not seeds:
        reason = (
            "no seed has a loss at every rate that has one: finish the sweep, or add lower rates if"
            " all have diverged"
        )
        return found | {"reason": reason}
    if best in (sound[0], sound[-1]):
        reason = (
            f"the loss is lowest at {best:g}, at an end of the rates that have one: add rates"
            " around it, finish those begun"
        )
        return found | {"reason": reason}
    # a parabola of ln loss over ln rate goes through them
    three = sound[sound.index(best) - 1 : sound.index(best) + 2]
    curvature, slope, height = np.polyfit(
        np.log(three) - np.log(best), np.log([mean[rate] for rate in three]), 2
    )
    lr, reach = best * math.exp(-slope / (2 * curvature)), math.exp(math.sqrt(FLAT / curvature))
    return found | {
        "optimum": {
            "lr": lr,
            "loss": math.exp(height - slope**2 / (4 * curvature)),
            "bracket": [three[0], three[2]],
            "curvature": float(curvature),
            "rates": three,
            "flat": [lr / reach, lr * reach],
        }
    }


def tables(found: dict) -> str:
    blocks, names = [], list(found["rules"])
    for sweep in found["sweeps"]:
        rows = [
            {
                "peak rate": f"{row['lr']:g}",
                "loss": fixed(row["loss"], 4),
                "above the lowest [%]": fixed(row["percent"], 2),
                "status": row["status"],
            }
            for row in sweep["rows"]
        ]
        blocks += [
            (
                f"N = {sweep['N']:,} non-embedding, {si(sweep['tokens'])} tokens, seeds"
                f" {sweep['seeds']}"
            ),
            table(rows),
        ]
        if best := sweep["optimum"]:
            low, high = best["flat"]
            blocks.append(
                f"Optimum {best['lr']:.3g}, loss {best['loss']:.4f}, between"
                f" {best['bracket'][0]:g} and {best['bracket'][1]:g} (parabola through 3 rates)."
                f" Within 0.1 % of it: {low:.2g} to {high:.2g}."
            )
        else:
            blocks.append(f"No optimum: {sweep['reason']}.")
    if found["base"]:
        rows = [
            {"N": si(row["N"]), **{name: f"{row[name]:.3g}" for name in names}}
            for row in found["rates"]
        ]
        blocks += ["Peak rates by the rule, at the same tokens per parameter", table(rows)]
    blocks += [
        f"At N = {si(one['N'])} the sweep's own optimum is {one['lr']:.3g}, an exponent of"
        f" {one['exponent']:+.2f}; "
        + ", ".join(f"the {name} says {one[name]:.3g}" for name in names)
        + "."
        for one in found["checks"]
    ]
    return "\n\n".join(blocks)


@styled
def draw(found: dict, name: str) -> Figure:
    runs = sum(len(row["runs"]) for sweep in found["sweeps"] for row in sweep["rows"])
    figure, ((panel,),) = sheet(
        (7.4, 3.4),
        1,
        1,
        f"Peak learning rate, {name} (n = {runs} runs)",
        "Band: within 0.1 % of the optimum. Cross: diverged or unfinished.",
    )
    panel.set(xscale="log", xlabel="peak learning rate", ylabel="loss above the lowest [%]")
    for sweep, style in zip(found["sweeps"], itertools.cycle(STYLES), strict=False):
        rates, percents = zip(*((row["lr"], row["percent"]) for row in sweep["rows"]), strict=True)
        panel.plot(
            rates,
            np.array(percents, dtype=float),
            color=style["color"],
            marker=style["marker"],
            label=f"N = {si(sweep['N'])}, {si(sweep['tokens'])} tokens",
        )
        lost = [row["lr"] for row in sweep["rows"] if not row["loss"]]
        panel.plot(
            lost,
            [0.95] * len(lost),
            "x",
            color=style["color"],
            transform=panel.get_xaxis_transform(),
        )
        if sweep["optimum"]:
            panel.axvspan(*sweep["optimum"]["flat"], color=style["color"], alpha=0.12, linewidth=0)
    panel.set_ylim(-0.1, min(TOP, panel.get_ylim()[1]))
    counts_axis(panel.xaxis)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    raise SystemExit(run_command(main))
