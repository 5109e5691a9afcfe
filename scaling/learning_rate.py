"""Find the best peak learning rate of a sweep; say which rates other sizes get by the stated rule.

    python scaling/learning_rate.py out/h100_lr                             table, optimum, law/learning_rate.json and its figure
    python scaling/learning_rate.py out/h100_lr at=6.49M,12.8M,25.4M        rates for those non-embedding parameters

The runs may differ in the peak rate, the seed and the size alone; runs of one size and number of tokens are one sweep. A
parabola in ln(rate) goes through the lowest loss and its two neighbours, a wider one through up to two on each side: where
they differ the optimum is known no better than that. The loss is that of validation in BF16, averaged over the seeds that every
rate has. A rate that diverged is shown, not fitted. An optimum at an end of the sweep is refused: exit code 3, with the rates
to add. 0: done, 2: a mistake in the runs or the command.

The rule is rate ~ N^-1/2 at a fixed number of tokens per parameter and a fixed batch. With both fixed, the 1,911 dense runs of
Step Law (2503.04715), refitted as here, give exponents of -0.48 to -0.81 at their ten batches, -0.55 follows from 2409.19913
(N^-0.23 D^-0.32), and -0.5 from muP's 1/width at a fixed depth (2203.03466). Where the batch grows with the model the rate may
fall more slowly: DeepSeek LLM (2401.02954) has C^-0.125, so N^-0.25, with a batch of C^0.327; 2406.19146 has N^-0.36 with a
batch of N^0.70.
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
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from runtime.cli import UserError, read_options, run_command
from runtime.progress import si
from scaling.figures import RC, write_with
from scaling.records import LARGEST, LAW_FOLDER, SCHEMA_VERSION, read_json

RULES = {"fixed batch (the rule)": -0.5, "growing batch (DeepSeek LLM)": -0.25}
NEAR = 0.03         # a wider parabola takes losses within 3 % of the lowest: farther off the curve is none
FLAT = 0.001        # rates that cost less than 0.1 % of the loss, by the parabola, count as equally good
TOP = 8.0           # losses farther than 8 % above the lowest of their size leave the panel, marked at its edge
SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9}
# Of summary.json: equal in every run, and equal in the runs of one size. Warm-up is counted in steps, so it is of the size.
SAME = ("val_sha256", "data_sha256", "tokenizer_sha256", "tokens_per_step", "optimizer", "beta1", "beta2", "eps", "weight_decay",
        "clip", "schedule")
SAME_SIZE = ("params_total", "n_layer", "n_embd", "n_head", "n_ffn", "n_ctx", "steps", "warmup_steps")
LEAST = {"params_nonembed": 1, "tokens": 1, "seed": 0, "skipped_steps": 0, "rollbacks": 0}     # whole numbers of summary.json
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"), ("#E69F00", "v"))     # Okabe-Ito


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: str                   # the folder of the sweep's runs, such as out/h100_lr
    at: tuple[str, ...] = ()    # non-embedding parameters to give rates for; none = 2, 4 and 8 times the smallest size's
    out: str | None = None      # folder that receives learning_rate.json, .png and .svg; none = law beside the runs

    POSITIONAL: ClassVar = ("runs",)


def main(arguments=None) -> int:
    """Run the command; 0 where there is an optimum, 3 where rates are missing, 2 with a sentence on stderr for a mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        options = read_options(Options, arguments)
        folder, sizes = Path(options.runs), [_size(word) for word in options.at]
        trials, notes = read_trials(folder)
        found = analyse(trials, sizes)
        out = Path(options.out or folder / LAW_FOLDER)
        write_with(draw(found, folder.resolve().name), out, "learning_rate", found, "learning_rate.json")
    except UserError as error:
        print(f"scaling/learning_rate.py: {error}", file=sys.stderr)
        return 2
    wrote = f"wrote {out / 'learning_rate.json'}, .png, .svg"
    print("\n\n".join(part for part in ("\n".join(notes), tables(found), wrote) if part))
    return 0 if found["base"] else 3


def _size(word: str) -> float:
    try:
        size = float(word.rstrip("kMB")) * SUFFIXES.get(word[-1:], 1)
    except ValueError:
        size = math.nan
    if not 1 <= size < 1e15:
        raise UserError(f"at={word!r} is no number of parameters; give such as at=6491520,12.8M")
    return size


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
    loss: float | None          # nats per validation token, evaluated in BF16; none unless status is "ok"
    skipped_steps: int = 0
    rollbacks: int = 0


def read_trials(folder: Path) -> tuple[list[Trial], list[str]]:
    """The sweep's runs under `folder`, by size, tokens, rate and seed; plus a line for each folder left out.

    A run without a summary.json counts as diverged if it stopped itself (diagnosis.json), else as unfinished; its rate is that
    of study.json. Raises UserError: no such folder, no finished run, a damaged file, runs that differ in more than the rate."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give the one that holds the sweep's runs, such as out/h100_lr")
    trials, notes, first, declared = [], [], {}, _declared(folder)
    for run in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if (run / "summary.json").is_file():
            summary = read_json(run / "summary.json")
            if summary.get("repeat"):
                notes.append(f"left out {run.name}: it repeats another run of the same seed")
            else:
                trials.append(_trial(run, summary))
                _check_alike(trials[-1], summary, first)
        elif row := declared.pop(run.name, None):
            trials.append(Trial(run.name, *row, "diverged" if (run / "diagnosis.json").exists() else "unfinished", None))
        elif (run / "config.json").exists():
            notes.append(f"left out {run.name}: it has not finished (no summary.json), nor is it in study.json")
    if all(trial.status == "unfinished" for trial in trials):
        raise UserError("\n".join([f"no finished run in {folder}: train the sweep first, scaling/sweep.py STUDY --run", *notes]))
    trials += [Trial(name, *row, "unfinished", None) for name, row in declared.items() if not (folder / name).exists()]
    trials.sort(key=lambda trial: (trial.N, trial.tokens, trial.lr, trial.seed))
    for one, other in itertools.pairwise(trials):
        if (one.N, one.tokens, one.lr, one.seed) == (other.N, other.tokens, other.lr, other.seed):
            raise UserError(f"{folder}: {one.run} and {other.run} have the same size, tokens, lr_peak and seed: leave one out")
    return trials, notes


def _declared(folder: Path) -> dict[str, tuple[int, int, float, int]]:
    """(N, tokens, lr, seed) of the runs that study.json declares with a rate; {} without one."""
    path = folder / "study.json"
    try:
        return {row["run"]: (row["params_nonembed"], row["tokens"], row["lr"], row["seed"])
                for row in (read_json(path)["runs"] if path.is_file() else []) if row.get("lr") and not row.get("repeat")}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); write it anew: scaling/sweep.py") from None


def _trial(run: Path, summary: dict) -> Trial:
    def value(key: str, is_good, expected: str):
        if not is_good(found := summary.get(key)):
            raise UserError(f"{run / 'summary.json'}: {key} is {found!r}; expected {expected}")
        return found

    def number(key: str) -> float:
        return value(key, lambda found: type(found) in (int, float) and 0 < found < LARGEST, "a finite number above zero")

    value("schema_version", lambda found: found == SCHEMA_VERSION, SCHEMA_VERSION)
    N, tokens, seed, *events = (value(key, lambda found, least=least: type(found) is int and found >= least,
                                      f"a whole number, at least {least}") for key, least in LEAST.items())
    status = value("status", lambda found: isinstance(found, str) and found, "a text that is not empty")
    return Trial(run.name, N, tokens, number("lr_peak"), seed, status, number("loss_bf16") if status == "ok" else None, *events)


def _check_alike(trial: Trial, summary: dict, first: dict) -> None:
    """Raise UserError where a run differs from the first one, or from the first one of its size, in what must be equal."""
    precision, sources = (summary.get(key) or {} for key in ("precision", "sources"))
    shared = {key: summary.get(key) for key in SAME} | {
        "precision": {key: precision.get(key) for key in ("recipe", "compile")},
        "sources": {name: source.get("weight") for name, source in sources.items()}}
    for group, mine in (((), shared), ((trial.N, trial.tokens), {key: summary.get(key) for key in SAME_SIZE})):
        name, its = first.setdefault(group, (trial.run, mine))
        for key in mine:
            if mine[key] != its[key]:
                raise UserError(f"{name} and {trial.run} differ in {key} ({its[key]} against {mine[key]}): the runs of a sweep "
                                "may differ in the learning rate, the seed and the size alone; leave one out")


# ----------------------------------------------------------------------------------------------------------- the optimum

def analyse(trials: list[Trial], sizes: list[float] = ()) -> dict:
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
    rates = sorted({trial.lr for trial in trials})
    of = {lr: [trial for trial in trials if trial.lr == lr] for lr in rates}
    losses = {lr: {trial.seed: trial.loss for trial in of[lr] if trial.status == "ok"} for lr in rates
              if not {trial.status for trial in of[lr]} - {"ok", "unfinished"}}
    sound = [lr for lr, of_seed in losses.items() if of_seed]
    seeds = sorted(set.intersection(*(set(losses[lr]) for lr in sound))) if sound else []
    mean = {lr: math.exp(sum(math.log(losses[lr][seed]) for seed in seeds) / len(seeds)) for lr in sound} if seeds else {}
    best = min(mean, key=mean.get, default=None)
    rows = [{"lr": lr, "runs": [trial.run for trial in of[lr]], "seeds": [trial.seed for trial in of[lr]],
             "status": next((trial.status for trial in of[lr] if trial.status != "ok"), "ok"), "loss": mean.get(lr),
             "percent": 100 * (mean[lr] / mean[best] - 1) if lr in mean else None,
             "skipped_steps": sum(trial.skipped_steps for trial in of[lr]), "rollbacks": sum(trial.rollbacks for trial in of[lr])}
            for lr in rates]
    reason = _unfound(of, sound, seeds, best)
    return {"N": trials[0].N, "tokens": trials[0].tokens, "seeds": seeds, "rows": rows,
            "optimum": _optimum(list(mean), mean, losses, seeds) if reason is None else None, "reason": reason}


def _unfound(of: dict, sound: list, seeds: list, best: float | None) -> str | None:
    """Why a sweep has no optimum, with what to do; None where the lowest loss has a sound rate on both sides."""
    rates = list(of)
    if not sound:
        left = [trial.run for trials in of.values() for trial in trials if trial.status == "unfinished"]
        return (f"no run has finished: finish {left[0]}" if left else
                f"every rate diverged: add {rates[0] / 4:.2g} and {rates[0] / 2:.2g}")
    if not seeds:
        return "no seed has finished at every rate, so losses of different seeds would be compared: finish the sweep"
    i = sound.index(best)
    if 0 < i < len(sound) - 1:
        return None
    missing, unfinished, ratio = [], [], max(2.0, sound[1] / sound[0]) if len(sound) > 1 else 2.0
    for is_end, step, beyond in ((i == 0, 1 / ratio, [lr for lr in reversed(rates) if lr < best]),
                                 (i == len(sound) - 1, ratio, [lr for lr in rates if lr > best])):
        if is_end:
            unfinished += [trial.run for lr in beyond[:1] for trial in of[lr] if trial.status == "unfinished"]
            missing += [math.sqrt(best * beyond[0])] if beyond else [best * step, best * step**2]
    where = "only" if len(sound) == 1 else "lowest" if i == 0 else "highest"
    remedy = f"finish {unfinished[0]}" if unfinished else f"add {' and '.join(f'{lr:.2g}' for lr in sorted(missing))}"
    return f"the loss is lowest at {best:g}, the {where} of the rates that have one, so the optimum is not bracketed: {remedy}"


def _optimum(rates: list[float], mean: dict, losses: dict, seeds: list[int]) -> dict:
    """The vertex with what supports it; rates in rising order, the lowest loss at none of the ends."""
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
    blocks = [_sweep(sweep) for sweep in found["sweeps"]]
    names = list(found["rules"])
    if found["base"]:
        power = " and ".join(f"N^{value:g} for a {name}" for name, value in found["rules"].items())
        lines = [f"| N | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
        lines += [f"| {si(row['N'])} | {' | '.join(f'{row[name]:.3g}' for name in names)} |" for row in found["rates"]]
        blocks.append("\n".join([*lines, "", f"Peak rates from {found['base']['lr']:.3g} at N = {found['base']['N']:,} "
                                 f"non-embedding parameters, at the same tokens per parameter: {power}."]))
    blocks += [f"At N = {si(one['N'])} the sweep's own optimum is {one['lr']:.3g}, an exponent of {one['exponent']:+.2f}; "
               + ", ".join(f"the {name} says {one[name]:.3g}" for name in names) + "." for one in found["checks"]]
    return "\n\n".join(blocks)


def _sweep(sweep: dict) -> str:
    lines = [f"N = {sweep['N']:,} non-embedding parameters, {si(sweep['tokens'])} tokens, "
             f"{len(sweep['seeds'])} seed{'s' * (len(sweep['seeds']) != 1)}", "",
             "| peak rate | loss | above the lowest [%] | skipped steps | rollbacks | status |", "|---" * 6 + "|"]
    for row in sweep["rows"]:
        loss, above = ("", "") if row["loss"] is None else (f"{row['loss']:.4f}", f"{row['percent']:.2f}")
        lines.append(f"| {row['lr']:g} | {loss} | {above} | {row['skipped_steps']} | {row['rollbacks']} | {row['status']} |")
    best = sweep["optimum"]
    if not best:
        return "\n".join([*lines, "", f"No optimum: {sweep['reason']}."])
    others = "".join(f"; {name}: {'not bracketed' if lr is None else f'{lr:.3g}'}" for name, lr in best["others"].items())
    return "\n".join([*lines, "", (
        f"Optimum {best['lr']:.3g}, loss {best['loss']:.4f}, between {best['bracket'][0]:g} and {best['bracket'][1]:g} (parabola "
        f"through {len(best['rates'])} rates{others}). Within 0.1 % of it: {best['flat'][0]:.2g} to {best['flat'][1]:.2g}; "
        f"a rate off by a factor of 2 costs {best['factor_2_percent']:.2g} %.")])


def draw(found: dict, name: str) -> Figure:
    """Loss against the peak rate for each size, beside the rates that the rule gives where there is an optimum."""
    styled = [(sweep, *style) for sweep, style in zip(found["sweeps"], itertools.cycle(STYLES), strict=False)]
    shown = [row["percent"] for sweep in found["sweeps"] for row in sweep["rows"] if (row["percent"] or 0) < TOP and row["loss"]]
    top = max([0.5, *shown])
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7.4, 3.2), layout="constrained")
        n = sum(len(row["runs"]) for sweep in found["sweeps"] for row in sweep["rows"])
        figure.suptitle(f"Peak learning rate, {name} (n = {n} runs)")
        panel, *rule = figure.subplots(1, 2 if found["base"] else 1, squeeze=False)[0]
        for sweep, color, marker in styled:
            rows = [row for row in sweep["rows"] if row["loss"] is not None and row["percent"] <= top]
            panel.plot([row["lr"] for row in rows], [row["percent"] for row in rows], linestyle="none", marker=marker,
                       color=color, label=f"N = {si(sweep['N'])}, {si(sweep['tokens'])} tokens")
            for row in sweep["rows"]:       # at the upper edge what has no place on the axis
                if row not in rows:
                    panel.plot(row["lr"], 1.1 * top, marker="x" if row["loss"] is None else "^", color=color)
            if best := sweep["optimum"]:
                lowest = min(row["loss"] for row in rows)
                x = np.geomspace(best["rates"][0] / 1.2, best["rates"][-1] * 1.2, 100)
                y = best["loss"] * np.exp(best["curvature"] * np.log(x / best["lr"]) ** 2)
                panel.plot(x, 100 * (y / lowest - 1), color=color)
                panel.axvspan(*best["flat"], color=color, alpha=0.12, linewidth=0)
        panel.set(xscale="log", xlabel="peak learning rate (band: within 0.1 % of the optimum;\ncross: diverged or unfinished)",
                  ylabel="loss above the lowest [%]", ylim=(-0.06 * top, 1.2 * top))
        panel.legend(frameon=False)
        panel.xaxis.set(**_ticks("{:g}".format))
        for right in rule:
            sizes = np.array(sorted({one["N"] for one in found["rates"] + found["sweeps"]}), dtype=float)
            for (label, power), dash in zip(found["rules"].items(), ("-", "--"), strict=True):
                right.plot(sizes, found["base"]["lr"] * (sizes / found["base"]["N"]) ** power, dash, color="#444444",
                           label=f"$N^{{{power:g}}}$, {label}")
            for sweep, color, marker in styled:
                if best := sweep["optimum"]:
                    reach = [[best["lr"] - best["bracket"][0]], [best["bracket"][1] - best["lr"]]]
                    right.errorbar(sweep["N"], best["lr"], yerr=reach, color=color, marker=marker, capsize=2.5)
            right.set(xscale="log", yscale="log", xlabel="non-embedding parameters N\n(bar: the rates beside the optimum)",
                      ylabel="peak learning rate")
            right.xaxis.set(**_ticks(si))
            right.yaxis.set(**_ticks("{:g}".format))
            right.legend(frameon=False)
    return figure


def _ticks(shown) -> dict:
    """1, 2 and 5 of each decade of a logarithmic axis, as `shown` writes a number."""
    return {"major_locator": LogLocator(subs=(1, 2, 5)), "major_formatter": FuncFormatter(lambda value, _: shown(value)),
            "minor_formatter": NullFormatter()}


if __name__ == "__main__":
    sys.exit(run_command(main))
