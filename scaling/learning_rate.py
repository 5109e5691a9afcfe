"""Find the best peak learning rate of a sweep; say which rates other sizes get by the stated rule.

    python scaling/learning_rate.py out/h100_lr                             table, optimum, law/learning_rate.json and its figure
    python scaling/learning_rate.py out/h100_lr at=6.49M,12.8M,25.4M        rates for those non-embedding parameters

A parabola in ln(rate) goes through the lowest loss and its two neighbours, a wider one through up to two on each side: where
they differ the optimum is known no better than that. The loss is that of validation in BF16, averaged over the seeds that every
rate has. A rate that diverged is shown, not fitted. An optimum at an end of the sweep is refused: exit code 3, with the rates
to add. 0: done, 2: a mistake in the runs or the command.

The rule is rate ~ N^-1/2 at a fixed number of tokens per parameter and a fixed batch. With both fixed, the 1,911 dense runs of
Step Law (2503.04715), refitted as here, give exponents of -0.48 to -0.81 at their ten batches, -0.55 follows from 2409.19913
(N^-0.23 D^-0.32), and -0.5 from muP's 1/width at a fixed depth (2203.03466). Where the batch grows with the model the rate may
fall more slowly: DeepSeek LLM (2401.02954) has C^-0.125, so N^-0.25, with a batch of C^0.327; 2406.19146 has N^-0.36 with a
batch of N^0.70.
"""

import math
import sys
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from scaling.command import read_words, run
from scaling.figures import write_with
from scaling.pairs import human
from scaling.rate_figure import draw_rates
from scaling.records import LAW_FOLDER
from scaling.trials import Trial, read_trials

OPTIONS = {
    "out": "DIR that receives learning_rate.json, .png and .svg (default: PATH/law)",
    "at": "non-embedding parameters to give rates for, such as 6.49M,12.8M (default: 2, 4 and 8 times the smallest size's)",
}
RULES = {"fixed batch (the rule)": -0.5, "growing batch (DeepSeek LLM)": -0.25}
NEAR = 0.03         # a wider parabola takes losses within 3 % of the lowest: farther off the curve is none
FLAT = 0.001        # rates that cost less than 0.1 % of the loss, by the parabola, count as equally good
SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9}


def analyse(trials: list[Trial], sizes: list[float] | None = None) -> dict:
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
        found["base"] = {"N": N, "tokens": base["tokens"], "lr": lr}
        found["rates"] = [{"N": size, **{name: lr * (size / N) ** power for name, power in RULES.items()}}
                          for size in [N, *(sizes or (2 * N, 4 * N, 8 * N))]]
        found["checks"] = [{"N": other["N"], "lr": other["optimum"]["lr"],
                            **{name: lr * (other["N"] / N) ** power for name, power in RULES.items()},
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
    sweep = {"N": trials[0].N, "tokens": trials[0].tokens, "seeds": seeds, "rows": rows, "optimum": None}
    sweep["reason"] = _unfound(of, sound, seeds, best)
    if sweep["reason"] is None:
        sweep["optimum"] = _optimum(list(mean), mean, losses, seeds)
    return sweep


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
        if not is_end:
            continue
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


# --------------------------------------------------------------------------------------------------------------- as text


def tables(found: dict) -> str:
    """Markdown of what `analyse` found, or of learning_rate.json."""
    blocks = [_sweep(sweep) for sweep in found["sweeps"]]
    names = list(found["rules"])
    if found["base"]:
        power = " and ".join(f"N^{value:g} for a {name}" for name, value in found["rules"].items())
        lines = [f"| N | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
        lines += [f"| {human(row['N'])} | {' | '.join(f'{row[name]:.3g}' for name in names)} |" for row in found["rates"]]
        blocks.append("\n".join([*lines, "", f"Peak rates from {found['base']['lr']:.3g} at N = {found['base']['N']:,} "
                                 f"non-embedding parameters, at the same tokens per parameter: {power}."]))
    blocks += [f"At N = {human(one['N'])} the sweep's own optimum is {one['lr']:.3g}, an exponent of {one['exponent']:+.2f}; "
               + ", ".join(f"the {name} says {one[name]:.3g}" for name in names) + "." for one in found["checks"]]
    return "\n\n".join(blocks)


def _sweep(sweep: dict) -> str:
    lines = [f"N = {sweep['N']:,} non-embedding parameters, {human(sweep['tokens'])} tokens, "
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


# ---------------------------------------------------------------------------------------------------------- the command


def main(arguments=None) -> int:
    """Run the command; 0 where there is an optimum, 3 where rates are missing, 2 with a sentence on stderr for a mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        paths, options = read_words(arguments, OPTIONS)
        if len(paths) != 1:
            raise UserError(f"{len(paths)} folders are given: give the one folder of the sweep's runs, such as out/h100_lr")
        folder = Path(paths[0])
        sizes = _sizes(options["at"]) if "at" in options else None
        trials, notes = read_trials(folder)
        found = analyse(trials, sizes)
        out = Path(options.get("out", folder / LAW_FOLDER))
        write_with(draw_rates(found, folder.resolve().name), out, "learning_rate", found, "learning_rate.json")
    except UserError as error:
        print(f"scaling/learning_rate.py: {error}", file=sys.stderr)
        return 2
    wrote = f"wrote {out / 'learning_rate.json'}, .png, .svg"
    print("\n\n".join(part for part in ("\n".join(notes), tables(found), wrote) if part))
    return 0 if found["base"] else 3


def _sizes(text: str) -> list[float]:
    sizes = []
    for word in text.split(","):
        try:
            sizes.append(float(word.rstrip("kMB")) * SUFFIXES.get(word[-1:], 1))
        except ValueError:
            sizes.append(math.nan)
        if not 1 <= sizes[-1] < 1e15:
            raise UserError(f"at={text!r}: {word!r} is no number of parameters; give such as at=6491520,12.8M")
    return sizes


if __name__ == "__main__":
    sys.exit(run(main))
