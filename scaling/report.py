"""Lay finished runs beside each other: one training in several precisions, or a whole study on one page.

    python scaling/report.py out/A out/B [out=DIR]      # report.md, report.json, report_loss.png and .svg; out=law beside them
    python scaling/report.py --study out/STUDY          # README.md and report.json in that folder

One training: per recipe the max, min, mean, final value, standard deviation of training and validation loss; time with the
first steps apart; GPU memory and utilisation; speed against BF16. The runs must agree in all that their weights depend on but
the precision; what else differs, and can touch their times, is said.

A study: its finished runs, and what other commands found in them: the laws of fit.py, the frozen predictions with their scores,
the gaps of precision.py, the rates of learning_rate.py. What is missing is named with the command that makes it.
"""

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from runtime.cli import UserError, command, grid, run_command, si
from scaling import learning_rate
from scaling.dynamics import History, read_history, running_mean, window_of
from scaling.figures import EVALUATED, RC, STYLES, as_json, settle, sheet, steps_axis, styles, write_files, write_with
from scaling.pairs import Estimate, Gap, Pair, pairs
from scaling.predict import is_held, load
from scaling.records import (
    LAW_FOLDER,
    Record,
    from_scratch,
    listed,
    read_json,
    read_runs,
    read_study,
    usable,
    without_repeats,
)

MARK = "<!-- Written by scaling/report.py from the files beside it: edit those, not this page. -->"
SAME = {"val_sha256": "validation set", "tokenizer_sha256": "tokenizer", "data_sha256": "training data"}
# Keys of config.json that change neither weights nor times, or that the report is about.
FREE = ("run", "out", "data.dir", "fp8.recipe", "log.", "profile")
WEIGHTS = ("model.", "data.", "optim.", "seed", "steps", "tokens_per_param", "start_from")     # what pair_id is made of
LOSS = ("max", "min", "mean", "final", "sd")
CALM = 3        # a difference is smoothed over so many times as many steps as a loss: it is noise about little
CPU = "A CPU has no FP8 units: its speeds say nothing about a GPU."


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: tuple[str, ...] = ()      # of one training in several precisions
    study: str | None = None        # a folder of runs in their place
    out: str | None = None          # folder that receives the report; none = law beside the first run

    POSITIONAL: ClassVar = ("runs",)

    def __post_init__(self):
        if bool(self.runs) == bool(self.study) or self.study and self.out:
            raise UserError("no runs given: name those of one training, as out/a_bf16 out/a_fp8 [out=DIR], or --study out/STUDY"
                            if not self.study else "name runs of one training, or --study out/STUDY alone, whose page lies there")


def main(arguments: list[str]) -> int:
    """Run the command line; the exit code."""
    return command(__doc__, Options, arguments, lambda options: (
        report_study(Path(options.study)) if options.study else report_training(options.runs, options.out)))


# --------------------------------------------------------------------------------------------- one training: its runs

@dataclass(frozen=True)
class Arm:
    """One run of the comparison."""
    record: Record
    label: str                      # its recipe; with its name where several have that recipe
    history: History                # steps without a target, which are logged as a loss of 0, have NaN
    summary: dict
    settings: dict                  # config.json, flat, with what of the machine and the code can touch times


def report_training(paths, out: str | None) -> str:
    """Write the report on runs of one training; returns what the console shows."""
    arms, notes = read_arms(paths)
    folder, result, figure = Path(out or arms[0].record.folder.parent / LAW_FOLDER), analyse(arms), draw_losses(arms)
    text = "\n\n".join([f"# {len(arms)} runs of one training: {', '.join(arm.label for arm in arms)}", tables(result),
                        *["\n".join(f"- {note}" for note in notes)] * bool(notes)])
    return f"{text}\n\n" + write_with(folder, "report_loss", figure, {
        "report.md": f"{text}\n\n![loss](report_loss.png)\n",
        "report.json": as_json({"format_version": 1, **result, "notes": notes})})


def read_arms(paths) -> tuple[list[Arm], list[str]]:
    """Finished runs, BF16 and its repeats first; plus a line for each thing left out or worth knowing. Raises UserError where no
    run is finished, a file is damaged, or runs differ in more than the precision."""
    records, notes = read_runs(paths)
    records.sort(key=lambda record: (record.recipe != "bf16", record.repeat))
    recipes, names, arms = [record.recipe for record in records], [record.run_id for record in records], []
    for record in records:
        summary, config = (read_json(record.folder / name) for name in ("summary.json", "config.json"))
        settings = {f"{key}.{name}" if name else key: item for key, value in config.items()
                    for name, item in (value.items() if isinstance(value, dict) else [("", value)])}
        settings |= {key: summary.get(key) for key in ("device", "n_gpu", "torch", "torchao", "git_commit")}
        settings["start_from"] = record.parent_step or config.get("start_from")     # each branch leaves the trunk of its recipe
        name = record.run_id if names.count(record.run_id) == 1 else record.folder
        label = record.recipe if recipes.count(record.recipe) == 1 else f"{record.recipe} ({name})"
        history = read_history(record.folder)
        if not len(history.train["step"]):
            raise UserError(f"{record.folder / 'metrics.jsonl'} holds no step that counts: restore it, or leave the run out")
        notes += [f"{label}: {one}" for one in _oddities(record, history, summary)]
        history.train["loss"][history.train["loss"] == 0] = math.nan
        arms.append(Arm(record, label, history, summary, settings))
    first = arms[0]
    for arm in arms[1:]:
        unlike = [f"{key} {first.settings.get(key)!r} against {arm.settings.get(key)!r}" for key in first.settings | arm.settings
                  if first.settings.get(key) != arm.settings.get(key) and not key.startswith(FREE)]
        _check_one_training(first, arm, [one for one in unlike if one.startswith(WEIGHTS)])
        if unlike:
            notes.append(f"{arm.label} differs from {first.label} beside the recipe: {listed(unlike)}. The training is the "
                         "same; times and validations may not be alike")
    if first.record.recipe != "bf16":
        notes.append("no BF16 run among these: nothing to compare speed and loss with")
    return arms, notes


def _check_one_training(first: Arm, arm: Arm, unlike: list[str]) -> None:
    """Raise UserError where two runs differ in more than the precision: the sentence says in what."""
    both = f"{first.record.folder} ({first.label}) and {arm.record.folder} ({arm.label})"
    if arm.record.pair_id != first.record.pair_id:
        raise UserError(f"{both} differ in more than the precision: {listed(unlike) or 'their pair_id'}; give the runs of one "
                        "training, alike in seed, data order and settings")
    for key, what in SAME.items():
        if (mine := first.summary.get(key)) != (its := arm.summary.get(key)):
            raise UserError(f"{both} have another {what} each ({key} {mine} against {its}): their losses cannot stand beside "
                            "each other")


def _oddities(record: Record, history: History, summary: dict) -> list[str]:
    """What of one run's history a reader of its numbers should know."""
    train, steps = history.train, summary.get("steps", 0) - (record.parent_step or 0)
    told = ((max(0, steps - len(train["step"])), f"of {steps} steps have no row in metrics.jsonl: time is too short"),
            (int((train["loss"] == 0).sum()), "steps had a training loss of exactly 0, so no target: left out of the statistics"),
            (int((~np.isfinite(train["loss"])).sum()), "training losses are not finite: left out of the statistics"),
            (int((train["ok"] == 0).sum()), "steps were judged as other than OK by the guard: their losses are counted"),
            (len(history.undone), "times it went back: that time is counted, those losses are not; its data order differs since"))
    return [f"{count} {what}" for count, what in told if count] + [f"its status is {record.status!r}"] * (record.status != "ok")


def step_times(history: History) -> dict | None:
    """Seconds of all steps as they passed, undone ones too, without what compilation added, the difference; None where no row
    tells any. The first step after a start (since_start 1) compiles; a step whose time is not told counts as the median."""
    seconds, is_first = history.train["step_s"], history.train["since_start"] == 1
    is_told = np.isfinite(seconds)
    if not is_told.any():
        return None
    usual = float(np.median(seconds[~is_first & is_told] if (~is_first & is_told).any() else seconds[is_told]))
    seconds = np.where(is_told, seconds, usual)
    undone = sum(np.nansum(lost["step_s"]) for lost in history.undone)
    whole, bare = (float(one.sum() + undone) for one in (seconds, np.where(is_first, np.minimum(seconds, usual), seconds)))
    return {"with_compile": whole, "without_compile": bare, "compile": whole - bare}


# ------------------------------------------------------------------------------------------ one training: its numbers

def analyse(arms: list[Arm]) -> dict:
    """What report.json holds but notes: a row per arm. Losses in nats per token, times in seconds, gaps against BF16."""
    records = [arm.record for arm in arms]
    found = {pair.fp8.folder: pair for pair in pairs(records)[0]}
    return {"pair_id": arms[0].record.pair_id, "runs": [_row(arm, found.get(arm.record.folder)) for arm in arms]}


def _row(arm: Arm, pair: Pair | None) -> dict:
    train, record = arm.history.train, arm.record

    def gap(one: Gap, reference: float) -> dict:
        return {**asdict(one), "se_percent": None if one.se is None else 100 * one.se / reference}

    def percent(key: str) -> dict | None:       # over the steps after those that compiled; of all where there are no others
        return spread(train[key][train["since_start"] != 1]) or spread(train[key])

    return {
        **{key: getattr(record, key) for key in (
            "run_id", "recipe", "status", "device", "n_gpu", "is_compiled", "tokens", "summary_sha256", "loss_as_trained",
            "loss_bf16", "tok_per_s_median")},
        "label": arm.label, "steps": len(train["step"]),
        "train_loss": spread(train["loss"]), "val_loss": spread(arm.history.val["loss"]),
        "gap": pair and {"as_trained": gap(pair.as_trained, pair.bf16.loss_as_trained),
                         "bf16": gap(pair.in_bf16, pair.bf16.loss_bf16)},
        "speed_against_bf16": pair and pair.tok_per_s_ratio, "step_time_s": step_times(arm.history),
        "memory_percent": percent("gpu_mem_pct"), "utilisation_percent": percent("gpu_util_pct"),
        "wall_s": arm.summary.get("wall_s"), "mem_peak_gib": arm.summary.get("mem_peak_gib"),
    }


def spread(values) -> dict | None:
    """max, min, mean, final, sd (n - 1; None for one value) and n of the finite ones in their order; None without any."""
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return {"max": float(values.max()), "min": float(values.min()), "mean": float(values.mean()), "final": float(values[-1]),
            "sd": float(values.std(ddof=1)) if len(values) > 1 else None, "n": len(values)}


def tables(result: dict) -> str:
    """Markdown: training loss, validation loss, then what they cost; each with what its columns mean below it."""
    training, validation, costs = [["recipe", *LOSS, "steps"]], [
        ["recipe", *LOSS, "validations", "gap as trained [%]", "gap in BF16 [%]"]], [
        ["recipe", "speed against BF16", "tokens/s", "steps [s]", "without compilation [s]", "compilation [s]", "whole run [s]",
         "memory allocated, mean [%]", "memory, peak [GiB]", "GPU utilisation, mean [%]"]]
    for row in result["runs"]:
        train, val, times = (row[key] or {} for key in ("train_loss", "val_loss", "step_time_s"))
        gaps = [row["gap"][arm] if row["gap"] else None for arm in ("as_trained", "bf16")]
        training.append([row["label"], *(_fixed(train.get(key), 4) for key in LOSS), str(train.get("n", 0))])
        validation.append([row["label"], *(_fixed(val.get(key), 4) for key in LOSS), str(val.get("n", 0)), *(
            gap and f"{gap['percent']:+.3f}" + f" ± {_fixed(gap['se_percent'], 3)}" * bool(gap["se"]) or "" for gap in gaps)])
        memory, busy = (row[key] and row[key]["mean"] for key in ("memory_percent", "utilisation_percent"))
        seconds = *(times.get(key) for key in ("with_compile", "without_compile", "compile")), row["wall_s"]
        costs.append([row["label"], _fixed(row["speed_against_bf16"], 3), f"{row['tok_per_s_median']:,.0f}",
                      *(_fixed(one, 2) for one in seconds), _fixed(memory, 1), _fixed(row["mem_peak_gib"], 2), _fixed(busy, 1)])
    return "\n\n".join([
        "**Training loss [nats/token]**", grid(training), "**Validation loss, as trained [nats/token]**", grid(validation),
        "Loss of all steps that count; sd (n - 1): of the single values around their mean, so mostly the way down. Gap: final "
        "loss minus the BF16 run's on the same sequences, ± one standard error of the evaluation, not of the run.",
        "**Time, memory, speed**", grid(costs),
        "Speed and tokens/s: of the median step; none against BF16 on another machine or compiled otherwise. Steps: the sum of "
        "their times. Compilation: what the first step after each start took beyond the median step. Whole run: start and "
        "validations as well. Memory and utilisation: the first rank's GPU, mean over the steps after the first; peak: PyTorch's "
        "own." + f" {CPU}" * any(row["device"].startswith("cpu") for row in result["runs"])])


def _fixed(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


# ------------------------------------------------------------------------------------------- one training: its figure

def draw_losses(arms: list[Arm]) -> Figure:
    """Training loss, validation loss, and the difference to the BF16 arm where there is one, over steps."""
    train, val = ({arm.label: _finite(getattr(arm.history, key)) for arm in arms} for key in ("train", "val"))
    panels = {"training loss\n[nats/token]": {label: (x, running_mean(y)) for label, (x, y) in train.items()},
              "validation loss\n[nats/token]": val}
    has_base = arms[0].record.recipe == "bf16"
    if has_base and len(arms) > 1:
        gaps = panels["training loss\nminus BF16 [%]"] = {}
        x0, base = train[arms[0].label]
        for arm in arms[1:]:
            x, loss = train[arm.label]
            both, first, second = np.intersect1d(x0, x, return_indices=True)
            gaps[arm.label] = both, 100 * running_mean(loss[second] - base[first], CALM) / running_mean(base[first], CALM)
    window = window_of(arms[0].history.train["step"])
    caption = f"Training: mean over {window} steps. Validation: each run as it was trained."
    caption += f" Minus BF16: mean over {CALM * window} steps; above zero: worse than BF16." * (len(panels) > 2)
    names = ["bf16", *(arm.label for arm in arms[has_base:])]      # blue is BF16's alone
    looks = {arm.label: {"color": style["color"], "marker": style["marker"], "linewidth": 2.2 if style is STYLES[0] else 1.2,
                         "markersize": 3.6} for arm, style in zip(arms, styles(names)[not has_base:], strict=True)}
    handles, record = [Line2D([], [], label=label, **look) for label, look in looks.items()], arms[0].record
    title = f"Loss: {si(record.params_total)} parameters, {si(record.tokens)} tokens (n = 1 run each)"
    with matplotlib.rc_context(RC):
        figure, axes = sheet((7.4, 1.1 + 1.8 * len(panels)), len(panels), 1, title, caption, handles, sharex=True)
        for panel, (name, lines) in zip(axes[:, 0], panels.items(), strict=True):
            ends = []                       # of each line but its first tenth: the first steps govern no axis
            for offset, (label, (x, y)) in enumerate(lines.items()):
                every = max(1, len(x) // 9)     # markers at places of their own, so that lines on each other stay told apart
                panel.plot(x, y, **looks[label], markevery=((offset * every) // 5 % every, every))
                ends += [np.quantile(y[len(y) // 10:], (0.01, 0.99))] if len(y) else []
            if ends and name.endswith("[%]"):
                panel.axhline(0, color=STYLES[0]["color"], linewidth=1.4, zorder=1)
                low, high = min(0, np.min(ends)), max(0, np.max(ends))
            elif ends:                      # nor does one run that diverged
                low, high = np.min(ends), min(np.max(ends), 1.5 * min(end[1] for end in ends))
            if ends:
                panel.set_ylim(low - 0.1 * (high - low) - 1e-6, high + 0.1 * (high - low) + 1e-6)
            panel.set_ylabel(name)
        steps_axis(axes[-1, 0])
        return settle(figure)


def _finite(columns: dict) -> tuple[np.ndarray, np.ndarray]:
    known = np.isfinite(columns["loss"])
    return columns["step"][known], columns["loss"][known]


# ----------------------------------------------------------------------------------------------------------- a study

def report_study(folder: Path) -> str:
    """Write the page of a study's folder and its JSON; returns what the console shows. Raises UserError where there is no
    finished run, where a file is damaged, or where the page is not ours to replace."""
    records, notes = read_runs([folder])
    records.sort(key=lambda one: (one.N, one.recipe != "bf16", one.recipe, one.repeat, one.tokens, one.seed))
    page, law_folder, study = folder / "README.md", folder / LAW_FOLDER, read_study(folder)
    if page.exists() and not page.read_text(errors="replace").startswith(MARK):
        raise UserError(f"{page} was not written by this command, and it is not written over: move it away")
    law, precision, rates = (read_json(path) if (path := law_folder / f"{name}.json").exists() else {}
                             for name in ("law", "precision", "learning_rate"))
    predictions, runs, held = load(law_folder), study_runs(records), study.get("held_out", [])
    scores = {path.stem.removeprefix("score_"): read_json(path) for path in sorted(law_folder.glob("score_*.json"))}
    lacking = sorted({row["run"] for row in study.get("runs", [])} - {record.run_id for record in records})
    trials = {(row["N"], row["recipe"], row["tokens"], row["lr_peak"]) for row in runs}
    is_sweep = len({trial[:3] for trial in trials}) < len(trials)       # of learning rates
    told = f"{len(records)} finished runs" + f" of {len(study.get('runs', []))} declared on {study.get('declared')}" * bool(study)
    told += f"; missing: {listed(lacking)}" * bool(lacking) + f"; held out: {listed(held)}" * bool(held)
    counted, whole = f"params_{records[0].convention}", usable(records)[0]
    points = [one for one in from_scratch(without_repeats(whole)[0])[0] if not is_held(one, predictions, held)]
    notes += _stale(records, points, law, f"fit.py {folder}") + _stale(records, whole, precision, f"precision.py {folder}")
    notes += [f"{one.run_id}: its status is {one.status!r}" for one in records if one.status != "ok"]
    try:
        sections = {
            "Runs": f"{_runs(runs, is_sweep)} N: {counted}.",
            "Laws": _laws(law, folder) if not (rates or is_sweep) else "",
            "Predictions": _predictions(predictions, scores, folder) if predictions or held else "",
            "FP8 against BF16": _gaps(precision, folder) if precision or len({record.recipe for record in records}) > 1 else "",
            "Learning rate": _rates(rates, folder) if rates or is_sweep else "",
            "Notes": "\n".join(f"- {note}" for note in notes)}
    except (KeyError, TypeError) as error:      # law.json and its like, of another version
        raise UserError(f"{law_folder}: a file is damaged or of another version ({type(error).__name__}: {error}); make it "
                        f"again: python scaling/fit.py {folder}, python scaling/precision.py {folder}") from error
    text = "\n\n".join([f"# The study {study.get('study', folder.resolve().name)}",
                        f"{told}. This page: `python scaling/report.py --study {folder}`.",
                        *(f"## {title}\n\n{section}" for title, section in sections.items() if section)])
    content = {"format_version": 1, "study": study.get("study"), "declared": study.get("declared"), "missing": lacking,
               "N": counted, "runs": runs, "inputs": {record.run_id: record.summary_sha256 for record in records}}
    write_files(folder, {"report.json": as_json(content), page.name: f"{MARK}\n{text}\n"})
    return f"{text}\n\nwrote {page}, report.json"


def study_runs(records: list[Record]) -> list[dict]:
    """A row per size, recipe, budget, learning rate and machine: means over its seeds, medians of the speed; the null runs are
    rows of their own."""
    groups, rows = {}, []
    for one in records:
        machine = one.device, one.n_gpu, one.is_compiled
        groups.setdefault((one.N, one.recipe, one.repeat, one.tokens, one.lr_peak, *machine), []).append(one)
    for (N, recipe, repeat, tokens, lr, *machine), some in groups.items():
        base = groups.get((N, "bf16", 0, tokens, lr, *machine)) if recipe != "bf16" else None
        rate = median(one.tok_per_s_median for one in some)
        rows.append({"N": N, "recipe": recipe + " null" * bool(repeat), "tokens": tokens, "tokens_per_param": tokens / N,
                     "lr_peak": lr, "runs": [one.run_id for one in some], "seeds": sorted({one.seed for one in some}),
                     "device": machine[0], "n_gpu": machine[1],
                     "loss_bf16": mean(one.loss_bf16 for one in some), "tok_per_s_median": rate,
                     "loss_as_trained": mean(one.loss_as_trained for one in some),
                     "speed_against_bf16": rate / median(one.tok_per_s_median for one in base) if base else None})
    return rows


def _runs(rows: list[dict], is_sweep: bool) -> str:
    lines = [["N", "recipe", "tokens", "tokens/N", "peak rate", "seeds", "loss in BF16 [nats/token]", "as trained", "tokens/s",
              "speed against BF16", "device"]]
    lines += [[si(row["N"]), row["recipe"], si(row["tokens"]), f"{row['tokens_per_param']:.3g}",
               f"{row['lr_peak']:g}" if is_sweep and row["lr_peak"] else "",
               ", ".join(map(str, row["seeds"])), f"{row['loss_bf16']:.4f}", f"{row['loss_as_trained']:.4f}",
               f"{row['tok_per_s_median']:,.0f}", _fixed(row["speed_against_bf16"], 3),
               f"{row['n_gpu']} x " * (row["n_gpu"] > 1) + row["device"]] for row in rows]
    return grid(lines) + ("\n\nLosses: means over the seeds; gaps of single pairs are below. Speed: of the median step."
                          + f" {CPU}" * any(row["device"].startswith("cpu") for row in rows))


def _laws(law: dict, folder: Path) -> str:
    """Each recipe's headlined law, L(N, D) beside it where that is another, and why."""
    if not law:
        return _missing("law/law.json", f"fit.py {folder}")
    lines, reasons = [["recipe", "law", "formula", "exponents, 95 %", "residuals [%]", "runs", "identified"]], []
    for recipe, group in law["groups"].items():
        head = group["headline"]["form"]
        reasons.append(f"- {recipe}: {group['headline']['reason']}")
        for form in dict.fromkeys((head, "chinchilla")):
            fit, shown = group["laws"][form], ("alpha", "beta", "a", "gamma")[:3 if form == "chinchilla" else 4]
            ends = [f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in (fit["ci95"] or {}).items() if name in shown]
            residuals = "" if fit["residual_rms"] is None else f"{100 * fit['residual_rms']:.3f}"
            lines.append([recipe, form + " (headline)" * (form == head), fit["formula"] or "not fitted", ", ".join(ends),
                          residuals, str(fit["n"]), "yes" if fit["identified"] else f"no: {fit['reason']}"])
    return "\n\n".join([_figure(folder, "figure") + grid(lines), "\n".join(reasons),
                        f"N: {law['conventions']['N']}. Losses: {EVALUATED[law['conventions']['loss']]}."])


def _predictions(predictions, scores: dict, folder: Path) -> str:
    """What was frozen, and what came of it. Raises UserError for a score of another prediction."""
    lines = [["target", "frozen (UTC)", "sha256", "predicted [nats]", "95 % interval", "by", "run", "measured [nats]",
              "error [%]", "interval"]]
    for one in predictions:
        score = scores.get(one.target)
        if score and score["prediction_sha256"] != one.sha256:
            raise UserError(f"{folder / LAW_FOLDER}/score_{one.target}.json judges another prediction than the one that lies "
                            f"beside it: python scaling/fit.py {folder} --score")
        frozen = [one.target, one.date, f"`{one.sha256[:12]}`", f"{one.loss:.4f}", f"{one.low:.4f} to {one.high:.4f}",
                  one.headline]
        ran = [[run["run_id"], f"{run['loss']:.4f}", f"{run['error_percent']:+.2f}", "inside" if run["inside"] else "**outside**"]
               for run in score["runs"]] if score else [[""] * 4]
        lines += [[*frozen, *cells] for cells in ran]
    lacking = [one.target for one in predictions if one.target not in scores]
    return "\n\n".join([
        grid(lines) if predictions else _missing("a frozen prediction", f"fit.py {folder} --predict RUN"),
        *[_missing(f"the score of {listed(lacking)}", f"fit.py {folder} --score")] * bool(lacking),
        "Only a commit that holds a prediction and not its run shows that it is older."])


def _gaps(precision: dict, folder: Path) -> str:
    """The gap of each recipe over all sizes, then at each size and budget; the null; the best recipe."""
    if not precision:
        return _missing("law/precision.json", f"precision.py {folder}")
    arm, pooled = precision["loss"], precision["null"]["pooled"]
    lines = [["N", "tokens", "recipe", "gap [%]", "independent pairs", "verdict"]]
    for N, tokens, recipe, row in [("all", "all", recipe, row) for recipe, row in precision["common"].items()] + [
            (si(row["N"]), si(row["tokens"]), row["recipe"], row) for row in precision["sizes"]]:
        lines.append([N, tokens, recipe, str(Estimate(**row[arm])), str(row[arm]["n"]), row["verdict"]])
    null = f"BF16 with another seed differs by {pooled['sd_percent']:.3f} % (SD of the difference). " if pooled else ""
    return _figure(folder, "precision") + "\n\n".join([
        grid(lines), f"N: {precision['conventions']['N']}. Gap: FP8 minus BF16, {EVALUATED[f'loss_{arm}']}, in per cent of the "
        f"BF16 loss, ± half a 95 % t-interval over independent pairs. {null}{precision['ranking']['reason']}"])


def _rates(rates: dict, folder: Path) -> str:
    return (_figure(folder, "learning_rate") + learning_rate.tables(rates) if rates else
            _missing("law/learning_rate.json", f"learning_rate.py {folder}"))


def _stale(records: list[Record], wanted: list[Record], made: dict, command: str) -> list[str]:
    """Sentences where a file was made from other runs than those that are there now. wanted: those of `records` that it would
    take; command: what makes it, after scaling/."""
    there = {record.run_id: record.summary_sha256 for record in records}
    taken = {one["run_id"]: one["summary_sha256"] for one in made.get("inputs", [])}
    changed = [run for run, digest in taken.items() if there.get(run) != digest]
    new = [record.run_id for record in wanted if taken and record.run_id not in taken]
    return [f"scaling/{command} was run {what}: run it again" for what in (
        *[f"when {listed(changed)} had other files"] * bool(changed), *[f"before {listed(new)} had finished"] * bool(new))]


def _figure(folder: Path, name: str) -> str:
    path = Path(LAW_FOLDER) / f"{name}.png"
    return f"![{name}]({path.as_posix()})\n\n" if (folder / path).is_file() else ""


def _missing(what: str, command: str) -> str:
    return f"**Missing:** {what} (`python scaling/{command}`)."


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
