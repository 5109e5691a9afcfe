"""Find the best peak learning rate of a sweep; say which rates other sizes get by the stated rule.

    python scaling/learning_rate.py out/h100_lr                             table, optimum, law/learning_rate.json and its figure
    python scaling/learning_rate.py out/h100_lr at=6.49e6,12.8e6,25.4e6     rates for those non-embedding parameters

The runs may differ in the peak rate, the seed and the size alone; runs of one size and number of tokens are one sweep. A
parabola in ln(rate) goes through the lowest loss and its two neighbours, a wider one through up to two on each side: where
they differ the optimum is known no better than that. The loss is that of validation in BF16, averaged over the seeds that every
rate has. Exit code 3: the lowest loss is at an end of the sweep; the rates to add are printed.

The rule is rate ~ N^-1/2 at a fixed number of tokens per parameter and a fixed batch. The 1,911 dense runs of Step Law
(2503.04715), refitted as here, give exponents of -0.48 to -0.81 at their ten batches, 2409.19913 -0.55 and muP's 1/width at a
fixed depth -0.5 (2203.03466). Where the batch grows with the model, DeepSeek LLM (2401.02954) has N^-0.25.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from runtime.cli import UserError, command, grid, run_command, si
from scaling.figures import RC, STYLES, as_json, counts_axis, sheet, write_with
from scaling.records import LAW_FOLDER, read_json, read_runs, read_study, without_repeats

RULES = {"fixed batch (the rule)": -0.5, "growing batch (DeepSeek LLM)": -0.25}
NEAR = 0.03         # a wider parabola takes losses within 3 % of the lowest: farther off the curve is none
FLAT = 0.001        # rates that cost less than 0.1 % of the loss, by the parabola, count as equally good
TOP = 8.0           # losses farther than 8 % above the lowest of their size leave the panel, marked at its edge
# Of summary.json: equal in every run, and equal in the runs of one size. Warm-up is counted in steps, so it is of the size.
SAME = ("val_sha256", "data_sha256", "tokenizer_sha256", "tokens_per_step", "optimizer", "beta1", "beta2", "eps", "weight_decay",
        "clip", "schedule")
SAME_SIZE = ("params_total", "n_layer", "n_embd", "n_head", "n_ffn", "n_ctx", "steps", "warmup_steps")


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: str                   # the folder of the sweep's runs, such as out/h100_lr
    at: tuple[float, ...] = ()  # non-embedding parameters to give rates for; none = 2, 4 and 8 times the smallest size's
    out: str | None = None      # folder that receives learning_rate.json, .png and .svg; none = law beside the runs

    POSITIONAL: ClassVar = ("runs",)

    def __post_init__(self):
        if wrong := [N for N in self.at if N <= 0]:
            raise UserError(f"at={wrong[0]:g} is no number of parameters: give positive ones, such as at=6.49e6,12.8e6")


def main(arguments: list[str]) -> int:
    """Run the command line; the exit code, 3 where rates are missing."""
    return command(__doc__, Options, arguments, _run)


def _run(options: Options) -> int:
    folder = Path(options.runs)
    trials, notes = read_trials(folder)
    found = analyse(trials, options.at)
    wrote = write_with(Path(options.out or folder / LAW_FOLDER), "learning_rate", draw(found, folder.resolve().name),
                       {"learning_rate.json": as_json(found)})
    print("\n".join([*notes, tables(found), "", wrote]))
    return 0 if found["base"] else 3


# -------------------------------------------------------------------------------------------------------------- the runs

@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""
    run: str
    N: int                      # params_nonembed
    tokens: int
    lr: float                   # peak learning rate
    seed: int
    status: str                 # "ok", "diverged" or "unfinished"
    loss: float | None = None   # nats per validation token, evaluated in BF16; none unless status is "ok"
    skipped_steps: int = 0
    rollbacks: int = 0


def read_trials(folder: Path) -> tuple[list[Trial], list[str]]:
    """The sweep's runs by size, tokens, rate and seed; plus a line for each left out. A run of study.json without a summary.json
    is unfinished, or diverged where it left a diagnosis.json. Raises UserError: no finished run, a damaged file, runs that
    differ in more than the rate, the seed and the size."""
    records, notes = read_runs([folder])
    records, repeats = without_repeats(records)
    trials, first = [], {}
    for record in records:
        summary = read_json(record.folder / "summary.json")
        shared = {key: summary.get(key) for key in SAME} | {"recipe": record.recipe, "compile": record.is_compiled,
                                                            "weights of the sources": record.weights}
        size = record.params_nonembed, record.tokens
        for group, mine in (((), shared), (size, {key: summary.get(key) for key in SAME_SIZE})):
            name, its = first.setdefault(group, (record.run_id, mine))
            if unlike := [key for key in mine if mine[key] != its[key]]:
                raise UserError(f"{name} and {record.run_id} differ in {unlike[0]} ({its[unlike[0]]}, {mine[unlike[0]]}): "
                                "the runs of a sweep may differ in the learning rate, the seed and the size alone; leave one out")
        trials.append(Trial(record.folder.name, *size, summary["lr_peak"], record.seed, record.status,
                            record.loss_bf16 if record.status == "ok" else None, summary["skipped_steps"], summary["rollbacks"]))
    finished = {trial.run for trial in trials}
    for row in read_study(folder).get("runs", []):
        if row["lr"] and not row["repeat"] and row["run"] not in finished:
            status = "diverged" if (folder / row["run"] / "diagnosis.json").exists() else "unfinished"
            trials.append(Trial(row["run"], row["params_nonembed"], row["tokens"], row["lr"], row["seed"], status))
    trials.sort(key=lambda trial: (trial.N, trial.tokens, trial.lr, trial.seed))
    if len({(trial.N, trial.tokens, trial.lr, trial.seed) for trial in trials}) < len(trials):
        raise UserError(f"{folder}: two runs have the same size, tokens, lr_peak and seed: leave one out")
    return trials, notes + repeats


# ----------------------------------------------------------------------------------------------------------- the optimum

def analyse(trials: list[Trial], sizes=()) -> dict:
    """What learning_rate.json holds: each size's sweep, the base of the rule, rates for `sizes` (non-embedding parameters)."""
    groups = {}
    for trial in trials:
        groups.setdefault((trial.N, trial.tokens), []).append(trial)
    sweeps = [judge(group) for group in groups.values()]
    # Of each size the longest runs count: the rate of a trunk serves all of its branches.
    longest = {sweep["N"]: sweep for sweep in sweeps}
    base = longest[min(longest)]
    found = {"format_version": 1, "N": "params_nonembed", "loss": "loss_bf16", "rules": RULES, "sweeps": sweeps, "base": None,
             "rates": [], "checks": []}
    if base["optimum"]:
        lr, N = base["optimum"]["lr"], base["N"]

        def ruled(size):
            return {name: lr * (size / N) ** power for name, power in RULES.items()}

        found["base"] = {"N": N, "tokens": base["tokens"], "lr": lr}
        found["rates"] = [{"N": size, **ruled(size)} for size in [N, *(sizes or (2 * N, 4 * N, 8 * N))]]
        found["checks"] = [{"N": other["N"], "lr": other["optimum"]["lr"], **ruled(other["N"]),
                            "exponent": math.log(other["optimum"]["lr"] / lr) / math.log(other["N"] / N)}
                           for other in longest.values() if other["optimum"] and other["N"] != N]
    return found


def judge(trials: list[Trial]) -> dict:
    """One size's sweep: a row for each rate, the optimum, or in its place the sentence that says which rates to add."""
    of = {}
    for trial in trials:        # in rising order of the rate
        of.setdefault(trial.lr, []).append(trial)
    losses = {lr: {trial.seed: trial.loss for trial in tried if trial.status == "ok"} for lr, tried in of.items()
              if not {trial.status for trial in tried} - {"ok", "unfinished"}}
    sound = [lr for lr, of_seed in losses.items() if of_seed]
    seeds = sorted(set.intersection(*(set(losses[lr]) for lr in sound))) if sound else []
    mean = {lr: math.exp(sum(math.log(losses[lr][seed]) for seed in seeds) / len(seeds)) for lr in sound} if seeds else {}
    best = min(mean, key=mean.get, default=None)
    rows = [{"lr": lr, "runs": [trial.run for trial in tried], "seeds": [trial.seed for trial in tried],
             "status": next((trial.status for trial in tried if trial.status != "ok"), "ok"), "loss": mean.get(lr),
             "percent": 100 * (mean[lr] / mean[best] - 1) if lr in mean else None,
             "skipped_steps": sum(trial.skipped_steps for trial in tried), "rollbacks": sum(trial.rollbacks for trial in tried)}
            for lr, tried in of.items()]
    reason = None
    if not sound:
        reason = f"no rate has a loss, all diverged or are unfinished: add {rows[0]['lr'] / 4:.2g} and {rows[0]['lr'] / 2:.2g}"
    elif not seeds:
        reason = "no seed has finished at every rate, so losses of different seeds would be compared: finish the sweep"
    elif best in (sound[0], sound[-1]):
        reason = f"the loss is lowest at {best:g}, at an end of the rates that have one: {_remedy(rows, sound, best)}"
    return {"N": trials[0].N, "tokens": trials[0].tokens, "seeds": seeds, "rows": rows,
            "optimum": None if reason else _optimum(mean, losses, seeds), "reason": reason}


def _remedy(rows: list[dict], sound: list[float], best: float) -> str:
    """The runs to finish or the rates to add beyond an end: half-way to one that diverged, else on with the sweep's ratio."""
    ratio, rates = max(2.0, sound[1] / sound[0]) if len(sound) > 1 else 2.0, []
    below, above = ([row for row in rows if row["lr"] < best][::-1], [row for row in rows if row["lr"] > best])
    for is_end, step, beyond in ((best == sound[0], 1 / ratio, below), (best == sound[-1], ratio, above)):
        if is_end and beyond and beyond[0]["status"] == "unfinished":
            return f"finish {beyond[0]['runs'][0]}"
        if is_end:
            rates += [math.sqrt(best * beyond[0]["lr"])] if beyond else [best * step, best * step**2]
    return f"add {' and '.join(f'{lr:.2g}' for lr in sorted(rates))}"


def _optimum(mean: dict, losses: dict, seeds: list[int]) -> dict:
    """The vertex with what supports it; rates in rising order, the lowest loss at none of the ends."""
    rates = list(mean)
    i = min(range(len(rates)), key=lambda j: mean[rates[j]])
    narrow = rates[i - 1:i + 2]
    wide = [lr for lr in rates[max(0, i - 2):i + 3] if mean[lr] < (1 + NEAR) * mean[rates[i]]]
    lr, loss, curvature = _vertex(narrow, [mean[rate] for rate in narrow])
    others = {}
    if len(wide) > 3 and (vertex := _vertex(wide, [mean[rate] for rate in wide])):
        others[f"{len(wide)} rates"] = vertex[0]
    for seed in seeds if len(seeds) > 1 else ():
        own = [losses[rate][seed] for rate in narrow]
        others[f"seed {seed} alone"] = _vertex(narrow, own)[0] if own[1] < min(own[0], own[2]) else None
    reach = math.exp(math.sqrt(FLAT / curvature))
    return {"lr": lr, "loss": loss, "bracket": [narrow[0], narrow[2]], "curvature": curvature, "rates": narrow, "others": others,
            "flat": [lr / reach, lr * reach], "factor_2_percent": 100 * math.expm1(curvature * math.log(2) ** 2)}


def _vertex(rates, losses) -> tuple[float, float, float] | None:
    """(rate, loss, curvature) at the minimum of a parabola of ln loss over ln rate, by least squares; None without one inside."""
    x, y = np.log(rates), np.log(losses)
    c, b, a = np.polyfit(x - x[len(x) // 2], y, 2)
    if not c > 0 or not x[0] < (at := x[len(x) // 2] - b / (2 * c)) < x[-1]:
        return None
    return math.exp(at), math.exp(a - b * b / (4 * c)), float(c)


# ------------------------------------------------------------------------------------------------- as text and as a figure

def tables(found: dict) -> str:
    """Markdown of what `analyse` found, or of learning_rate.json."""
    blocks, names = [], list(found["rules"])
    for sweep in found["sweeps"]:
        cells = [["peak rate", "loss", "above the lowest [%]", "skipped steps", "rollbacks", "status"]]
        for row in sweep["rows"]:
            loss = ["", ""] if row["loss"] is None else [f"{row['loss']:.4f}", f"{row['percent']:.2f}"]
            cells.append([f"{row['lr']:g}", *loss, str(row["skipped_steps"]), str(row["rollbacks"]), row["status"]])
        blocks += [f"N = {sweep['N']:,} non-embedding, {si(sweep['tokens'])} tokens, seeds {sweep['seeds']}", grid(cells)]
        if best := sweep["optimum"]:
            others = "".join(f"; {name}: {lr:.3g}" if lr else f"; {name}: not bracketed" for name, lr in best["others"].items())
            low, high = best["flat"]
            blocks.append(f"Optimum {best['lr']:.3g}, loss {best['loss']:.4f}, between {best['bracket'][0]:g} and "
                          f"{best['bracket'][1]:g} (parabola through 3 rates{others}). Within 0.1 % of it: {low:.2g} to "
                          f"{high:.2g}; a rate off by a factor of 2 costs {best['factor_2_percent']:.2g} %.")
        else:
            blocks.append(f"No optimum: {sweep['reason']}.")
    if found["base"]:
        rows = [[si(row["N"]), *(f"{row[name]:.3g}" for name in names)] for row in found["rates"]]
        blocks += ["Peak rates by the rule, at the same tokens per parameter", grid([["N", *names], *rows])]
    blocks += [f"At N = {si(one['N'])} the sweep's own optimum is {one['lr']:.3g}, an exponent of {one['exponent']:+.2f}; "
               + ", ".join(f"the {name} says {one[name]:.3g}" for name in names) + "." for one in found["checks"]]
    return "\n\n".join(blocks)


def draw(found: dict, name: str) -> Figure:
    """Loss against the peak rate for each size, beside the rates that the rule gives where there is an optimum."""
    sweeps, base = found["sweeps"], found["base"]
    rows = [row for sweep in sweeps for row in sweep["rows"]]
    top = max([0.5, *(row["percent"] for row in rows if row["loss"] and row["percent"] < TOP)])
    with matplotlib.rc_context(RC):
        figure, panels = sheet((7.4, 3.4), 1, 2 if base else 1,
                               f"Peak learning rate, {name} (n = {sum(len(row['runs']) for row in rows)} runs)",
                               "Band: within 0.1 % of the optimum. Cross: diverged or unfinished. Bar: the rates beside it.")
        panel, *rule = panels[0]
        panel.set(xscale="log", xlabel="peak learning rate", ylabel="loss above the lowest [%]", ylim=(-0.06 * top, 1.2 * top))
        for right in rule:
            right.set(xscale="log", yscale="log", xlabel="non-embedding parameters N", ylabel="peak learning rate")
            sizes = np.array(sorted({one["N"] for one in found["rates"] + sweeps}), dtype=float)
            for (label, power), dash in zip(found["rules"].items(), ("-", "--"), strict=True):
                rates = base["lr"] * (sizes / base["N"]) ** power
                right.plot(sizes, rates, dash, color="#444444", label=f"$N^{{{power:g}}}$, {label}")
        for sweep, style in zip(sweeps, itertools.cycle(STYLES), strict=False):
            color, marker, best = style["color"], style["marker"], sweep["optimum"]
            for row in sweep["rows"]:       # what diverged, or lies beyond the axis, stands at its upper edge
                panel.plot(row["lr"], 1.1 * top if row["loss"] is None else min(row["percent"], 1.1 * top), color=color,
                           marker="x" if row["loss"] is None else marker)
            panel.plot([], [], marker, color=color, label=f"N = {si(sweep['N'])}, {si(sweep['tokens'])} tokens")
            if best:
                lowest = min(row["loss"] for row in sweep["rows"] if row["loss"])
                x = np.geomspace(best["rates"][0] / 1.2, best["rates"][-1] * 1.2, 100)
                loss = best["loss"] * np.exp(best["curvature"] * np.log(x / best["lr"]) ** 2)
                panel.plot(x, 100 * (loss / lowest - 1), color=color)
                panel.axvspan(*best["flat"], color=color, alpha=0.12, linewidth=0)
            for right in rule if best else ():
                reach = [[best["lr"] - best["bracket"][0]], [best["bracket"][1] - best["lr"]]]
                right.errorbar(sweep["N"], best["lr"], yerr=reach, color=color, marker=marker, capsize=2.5)
        for one in panels[0]:
            for axis in (one.xaxis, one.yaxis)[:1 + (one is not panel)]:
                counts_axis(axis)
            one.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
