"""Lay finished runs beside each other: one training in several precisions, or a whole study on one
page.

    python scaling/report.py out/A out/B [out=DIR]  # report.md, report.json, report_loss.png and .svg; out=law beside them
    python scaling/report.py --study out/STUDY      # README.md and report.json in that folder

One training: losses, time with the first steps apart, GPU memory and utilisation, speed against
BF16; the runs must differ in the precision alone. A study: its finished runs, and what fit.py,
precision.py, learning_rate.py found in them; what is missing is named with the command that makes
it."""

import json
import math
from collections import namedtuple
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lib.command import command, run_command
from lib.errors import UserError
from lib.plots import STYLES, settle, sheet, steps_axis, styled, styles, write_files, write_with
from lib.text import listed, si
from lib.values import FilePath
from scaling import figures, learning_rate, precision
from scaling.figures import finite, running_mean
from scaling.gap_words import ARMS
from scaling.law_file import read_law_file
from scaling.pairs import Pair, pairs
from scaling.precision import fixed, table
from scaling.predictions import held_out, load
from scaling.records import (
    LAW_FOLDER,
    Record,
    from_scratch,
    read_json,
    read_runs,
    read_study,
    usable,
    without_repeats,
)

MARK = "<!-- Written by scaling/report.py from the files beside it: edit those, not this page. -->"
LOSS = ("max", "min", "mean", "final", "sd")
# a difference is smoothed over so many times as many steps as a loss: it is noise about little
CALM = 3
CPU = " A CPU has no FP8 units: its speeds say nothing about a GPU."


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: tuple[FilePath, ...] = ()  # of one training in several precisions
    study: FilePath | None = None  # a folder of runs in their place
    out: FilePath | None = None  # folder that receives the report; none = law beside the first run

    def __post_init__(self):
        if bool(self.runs) == bool(self.study) or self.study and self.out:
            raise UserError(
                "name the runs of one training, as out/a_bf16 out/a_fp8 [out=DIR], or --study"
                " out/STUDY alone"
            )


@command(__doc__, Options, "runs")
def main(options: Options) -> str:
    return (
        report_study(Path(options.study))
        if options.study
        else report_training(options.runs, options.out)
    )


# ------------------------------------------------------------------------------------ one training

# label: the run's recipe, with its name where several have that one; history: the loss of a step
# without a target, 0, is NaN.
Arm = namedtuple("Arm", "record label history")


def report_training(paths, out: str | None) -> str:
    arms, notes = read_arms(paths)
    found = {pair.fp8.folder: pair for pair in pairs([arm.record for arm in arms])[0]}
    rows = [_row(arm, found.get(arm.record.folder)) for arm in arms]
    text = "\n\n".join(
        [
            f"# {len(arms)} runs of one training: {', '.join(arm.label for arm in arms)}",
            tables(rows),
            *["\n".join(f"- {note}" for note in notes)] * bool(notes),
        ]
    )
    return f"{text}\n\n" + write_with(
        Path(out or arms[0].record.folder.parent / LAW_FOLDER),
        "report_loss",
        draw_losses(arms),
        {
            "report.md": f"{text}\n\n![loss](report_loss.png)\n",
            "report.json": {
                "format_version": 1,
                "pair_id": arms[0].record.pair_id,
                "runs": rows,
                "notes": notes,
            },
        },
    )


def read_arms(paths) -> tuple[list[Arm], list[str]]:
    """Finished runs, BF16 and its repeats first; plus a line for each thing left out or worth
    knowing."""
    records, notes = read_runs(paths)
    records.sort(key=lambda record: (record.recipe != "bf16", record.repeat))
    recipes, names = [record.recipe for record in records], [record.run_id for record in records]
    arms: list[Arm] = []
    for record in records:
        for key in ("pair_id", "val_sha256", "tokenizer_sha256", "data_sha256"):
            if record.summary.get(key) != records[0].summary.get(key):
                raise UserError(
                    f"{records[0].folder} and {record.folder} differ in more than the precision"
                    f" ({key}): give the runs of one training, alike in seed, data and settings"
                )
        name = record.run_id if names.count(record.run_id) == 1 else record.folder
        label = record.recipe if recipes.count(record.recipe) == 1 else f"{record.recipe} ({name})"
        history, steps = (
            figures.read_history(record.folder),
            record.summary.get("steps", 0) - (record.parent_step or 0),
        )
        train = history.train
        if not len(train["step"]):
            raise UserError(
                f"{record.folder / 'metrics.jsonl'} holds no step that counts: restore it, or leave"
                " the run out"
            )
        train["loss"][train["loss"] == 0] = math.nan
        told = (
            (
                max(0, steps - len(train["step"])),
                f"of {steps} steps have no row in metrics.jsonl: time is too short",
            ),
            (
                int(np.isnan(train["loss"]).sum()),
                "steps had no target or no finite loss: left out of the statistics",
            ),
            (len(history.undone), "times it went back: that time is counted, those losses are not"),
        )
        notes += [f"{label}: {n} {what}" for n, what in told if n]
        notes += [f"{label}: its status is {record.status!r}"] * (record.status != "ok")
        arms.append(Arm(record, label, history))
    return arms, notes


def _row(arm: Arm, pair: Pair | None) -> dict:
    """One run in report.json: losses in nats per token, times in seconds, the gap against BF16.
    Times are those of all steps as they passed, undone ones too; compilation is what the first step
    after each start took beyond the median of the others."""
    train, is_first = arm.history.train, arm.history.train["since_start"] == 1
    usual = math.inf if is_first.all() else float(np.nanmedian(train["step_s"][~is_first]))
    whole = float(
        np.nansum(train["step_s"]) + sum(np.nansum(lost["step_s"]) for lost in arm.history.undone)
    )
    compiling = float(np.nansum(np.maximum(train["step_s"][is_first] - usual, 0)))
    gaps = pair and {
        name: (
            asdict(gap)
            | {"se_percent": gap.se and 100 * gap.se / getattr(pair.bf16, f"loss_{name}")}
        )
        for name, gap in reversed(pair.gap.items())
    }
    return {
        **{
            key: getattr(arm.record, key)
            for key in (
                "run_id",
                "recipe",
                "status",
                "device",
                "n_gpu",
                "is_compiled",
                "tokens",
                "summary_sha256",
                "loss_as_trained",
                "loss_bf16",
                "tok_per_s_median",
            )
        },
        "label": arm.label,
        "steps": len(train["step"]),
        "train_loss": spread(train["loss"]),
        "val_loss": spread(arm.history.val["loss"]),
        "gap": gaps,
        "speed_against_bf16": pair and pair.tok_per_s_ratio,
        "step_time_s": {
            "with_compile": whole,
            "without_compile": whole - compiling,
            "compile": compiling,
        },
        "memory_percent": spread(train["gpu_mem_pct"][~is_first]),
        "utilisation_percent": spread(train["gpu_util_pct"][~is_first]),
        **{key: arm.record.summary.get(key) for key in ("wall_s", "mem_peak_gib")},
    }


def spread(values) -> dict | None:
    """max, min, mean, final, sd (n - 1; None for one value) and n of the finite ones in their
    order; None without any."""
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return {
        "max": float(values.max()),
        "min": float(values.min()),
        "mean": float(values.mean()),
        "final": float(values[-1]),
        "sd": float(values.std(ddof=1)) if len(values) > 1 else None,
        "n": len(values),
    }


def tables(rows: list[dict]) -> str:
    """Markdown of report.json's runs: training loss, validation loss, what they cost; each with
    what its columns mean below."""
    training, validation, costs = [], [], []
    for row in rows:
        name, times = {"recipe": row["label"]}, row["step_time_s"]
        train, val, memory, busy = (
            row[key] or {}
            for key in ("train_loss", "val_loss", "memory_percent", "utilisation_percent")
        )
        gaps = {
            f"gap {'in BF16' if arm == 'bf16' else 'as trained'} [%]": (
                f"{gap['percent']:+.3f}" + (f" ± {fixed(gap['se_percent'], 3)}" * bool(gap["se"]))
            )
            for arm, gap in (row["gap"] or {}).items()
        }
        training.append(
            name | {key: fixed(train.get(key), 4) for key in LOSS} | {"steps": train.get("n", 0)}
        )
        validation.append(
            name
            | {key: fixed(val.get(key), 4) for key in LOSS}
            | {"validations": val.get("n", 0)}
            | gaps
        )
        costs.append(
            name
            | {
                title: fixed(value, digits)
                for title, value, digits in (
                    ("speed against BF16", row["speed_against_bf16"], 3),
                    ("tokens/s", row["tok_per_s_median"], 0),
                    ("steps [s]", times["with_compile"], 2),
                    ("without compilation [s]", times["without_compile"], 2),
                    ("compilation [s]", times["compile"], 2),
                    ("whole run [s]", row["wall_s"], 2),
                    ("memory allocated, mean [%]", memory.get("mean"), 1),
                    ("memory, peak [GiB]", row["mem_peak_gib"], 2),
                    ("GPU utilisation, mean [%]", busy.get("mean"), 1),
                )
            }
        )
    return "\n\n".join(
        [
            "**Training loss [nats/token]**",
            table(training),
            "**Validation loss, as trained [nats/token]**",
            table(validation),
            (
                "Loss of all steps that count; sd (n - 1): of the single values around their mean,"
                " so mostly the way down. Gap: final loss minus the BF16 run's on the same"
                " sequences, ± one standard error of the evaluation, not of the run."
            ),
            "**Time, memory, speed**",
            table(costs),
            "Speed and tokens/s: of the median step. Compilation: what the first step after each"
            " start took beyond it. Whole run: with start and validations. Memory and utilisation:"
            " of the first rank's GPU after the first step; peak: PyTorch's own."
            + CPU
            * any(row["device"].startswith("cpu") for row in rows),
        ]
    )


@styled
def draw_losses(arms: list[Arm]) -> Figure:
    """Training loss, validation loss, and the difference to the BF16 arm where there is one, over
    steps."""
    train, val = (
        {arm.label: finite(getattr(arm.history, key), "loss") for arm in arms}
        for key in ("train", "val")
    )
    panels = {
        "training loss\n[nats/token]": {
            label: (x, running_mean(y)) for label, (x, y) in train.items()
        },
        "validation loss\n[nats/token]": val,
    }
    first, window = arms[0], figures.window_of(arms[0].history.train["step"])
    has_base = first.record.recipe == "bf16"
    caption = f"Training: mean over {window} steps. Validation: each run as it was trained."
    if has_base and len(arms) > 1:
        gaps = panels["training loss\nminus BF16 [%]"] = {}
        for label, (x, loss) in train.items():
            both, mine, its = np.intersect1d(train[first.label][0], x, return_indices=True)
            base = train[first.label][1][mine]
            gaps[label] = (
                both,
                100 * running_mean(loss[its] - base, CALM) / running_mean(base, CALM),
            )
        caption += f" Minus BF16: mean over {CALM * window} steps; above zero: worse than BF16."
    names = ["bf16", *(arm.label for arm in arms[has_base:])]  # blue is BF16's alone
    looks = {
        arm.label: {
            "color": style["color"],
            "marker": style["marker"],
            "linewidth": 2.2 if style is STYLES[0] else 1.2,
            "markersize": 3.6,
        }
        for arm, style in zip(arms, styles(names)[not has_base :], strict=True)
    }
    title = (
        f"Loss: {si(first.record.params_total)} parameters, {si(first.record.tokens)} tokens (n = 1"
        " run each)"
    )
    figure, axes = sheet(
        (7.4, 1.1 + 1.8 * len(panels)),
        len(panels),
        1,
        title,
        caption,
        [Line2D([], [], label=label, **look) for label, look in looks.items()],
        sharex=True,
    )
    for panel, (name, lines) in zip(axes[:, 0], panels.items(), strict=True):
        ends = []  # of each line but its first tenth: the first steps govern no axis
        for offset, (label, (x, y)) in enumerate(lines.items()):
            # markers at places of their own, so that lines on each other stay told apart
            every = max(1, len(x) // 9)
            panel.plot(x, y, **looks[label], markevery=((offset * every) // 5 % every, every))
            ends += [np.quantile(y[len(y) // 10 :], (0.01, 0.99))] if len(y) else []
        if ends:
            low, high = np.min(ends), np.max(ends)
            if not name.endswith("[%]"):  # nor does one run that diverged
                high = min(high, 1.5 * min(end[1] for end in ends))
            panel.set_ylim(low - 0.1 * (high - low) - 1e-6, high + 0.1 * (high - low) + 1e-6)
        panel.set_ylabel(name)
    steps_axis(axes[-1, 0])
    return settle(figure)


# ----------------------------------------------------------------------------------------- a study


def report_study(folder: Path) -> str:
    records, notes = read_runs([folder])
    records.sort(
        key=lambda one: (one.N, one.recipe != "bf16", one.recipe, one.repeat, one.tokens, one.seed)
    )
    page, law_folder, study = folder / "README.md", folder / LAW_FOLDER, read_study(folder)
    if page.exists() and not page.read_text(errors="replace").startswith(MARK):
        raise UserError(
            f"{page} was not written by this command, and it is not written over: move it away"
        )
    predictions, runs, held = load(law_folder), study_runs(records), study.get("held_out", [])
    lacking = sorted(
        {row["run"] for row in study.get("runs", [])} - {record.run_id for record in records}
    )
    trials = {(row["N"], row["recipe"], row["tokens"], row["lr_peak"]) for row in runs}
    is_sweep = len({trial[:3] for trial in trials}) < len(trials)  # of learning rates
    told = (
        f"{len(records)} finished runs"
        + f" of {len(study.get('runs', []))} declared on {study.get('declared')}" * bool(study)
    )
    told += f"; missing: {listed(lacking)}" * bool(lacking) + f"; held out: {listed(held)}" * bool(
        held
    )
    notes += [
        f"{one.run_id}: its status is {one.status!r}" for one in records if one.status != "ok"
    ]
    whole = usable(records)[0]
    points = from_scratch(without_repeats(whole)[0])[0]
    unfitted = held_out(points, predictions)
    try:
        notes += _stale(law_folder / "law.json", [one for one in points if one not in unfitted])
        notes += _stale(law_folder / "precision.json", whole)
        sections = {
            "Runs": f"{_runs(runs, is_sweep)} N: params_{records[0].convention}.",
            "Laws": _found(folder, "law", not is_sweep, _laws),
            "Predictions": _predictions(predictions, folder) if predictions or held else "",
            "FP8 against BF16": _found(
                folder,
                "precision",
                len({record.recipe for record in records}) > 1,
                lambda path: "\n\n".join(precision.tables(precision.load(path))),
            ),
            "Learning rate": _found(
                folder,
                "learning_rate",
                is_sweep,
                lambda path: learning_rate.tables(read_json(path)),
            ),
            "Notes": "\n".join(f"- {note}" for note in notes),
        }
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise UserError(
            f"{law_folder}: a file is damaged or of another version ({type(error).__name__}:"
            f" {error}): make it again by scaling/fit.py or precision.py"
        ) from error
    text = "\n\n".join(
        [
            f"# The study {study.get('study', folder.resolve().name)}",
            f"{told}. This page: `python scaling/report.py --study {folder}`.",
            *(f"## {title}\n\n{section}" for title, section in sections.items() if section),
        ]
    )
    content = {
        "format_version": 1,
        "study": study.get("study"),
        "declared": study.get("declared"),
        "missing": lacking,
        "N": f"params_{records[0].convention}",
        "runs": runs,
        "inputs": {record.run_id: record.summary_sha256 for record in records},
    }
    write_files(folder, {"report.json": content, page.name: f"{MARK}\n{text}\n"})
    return f"{text}\n\nwrote {page}, report.json"


def study_runs(records: list[Record]) -> list[dict]:
    """A row per size, recipe, budget, learning rate, machine, null or not: means over its seeds,
    medians of the speed."""
    groups, rows = {}, []
    for one in records:
        machine = one.device, one.n_gpu, one.is_compiled
        groups.setdefault(
            (one.N, one.recipe, one.repeat, one.tokens, one.lr_peak, *machine), []
        ).append(one)
    for (N, recipe, repeat, tokens, lr, *machine), some in groups.items():
        base = groups.get((N, "bf16", 0, tokens, lr, *machine)) if recipe != "bf16" else None
        rate = median(one.tok_per_s_median for one in some)
        rows.append(
            {
                "N": N,
                "recipe": recipe + " null" * bool(repeat),
                "tokens": tokens,
                "tokens_per_param": tokens / N,
                "lr_peak": lr,
                "runs": [one.run_id for one in some],
                "seeds": sorted({one.seed for one in some}),
                "device": machine[0],
                "n_gpu": machine[1],
                "loss_bf16": mean(one.loss_bf16 for one in some),
                "tok_per_s_median": rate,
                "loss_as_trained": mean(one.loss_as_trained for one in some),
                "speed_against_bf16": (
                    rate / median(one.tok_per_s_median for one in base) if base else None
                ),
            }
        )
    return rows


def _runs(rows: list[dict], is_sweep: bool) -> str:
    lines = [
        {
            "N": si(row["N"]),
            "recipe": row["recipe"],
            "tokens": si(row["tokens"]),
            "tokens/N": f"{row['tokens_per_param']:.3g}",
            "peak rate": f"{row['lr_peak']:g}" if is_sweep and row["lr_peak"] else None,
            "seeds": ", ".join(map(str, row["seeds"])),
            "loss in BF16 [nats/token]": f"{row['loss_bf16']:.4f}",
            "as trained": f"{row['loss_as_trained']:.4f}",
            "tokens/s": fixed(row["tok_per_s_median"], 0),
            "speed against BF16": fixed(row["speed_against_bf16"], 3),
            "device": f"{row['n_gpu']} x " * (row["n_gpu"] > 1) + row["device"],
        }
        for row in rows
    ]
    return (
        f"{table(lines)}\n\nLosses: means over the seeds; gaps of single pairs are below. Speed: of"
        " the median step." + CPU * any(row["device"].startswith("cpu") for row in rows)
    )


def _laws(path: Path) -> str:
    """Each recipe's headlined law, L(N, D) beside it where that is another, and why."""
    law, lines = read_law_file(path), []
    for recipe, group in law["groups"].items():
        head = group["headline"]["form"]
        lines.append(_law_row(recipe, f"{head} (headline)", group["laws"][head]))
        frontier = group.get("frontier")  # none in a law.json of older code
        if frontier:
            name = f"{frontier['form']} through the minima (frontier)"
            lines.append(_law_row(recipe, name, frontier))
        if head != "chinchilla":
            lines.append(_law_row(recipe, "chinchilla", group["laws"]["chinchilla"]))
    return "\n\n".join(
        [
            table(lines),
            "\n".join(
                f"- {recipe}: {group['headline']['reason']}"
                for recipe, group in law["groups"].items()
            ),
            (
                f"N: {law['conventions']['N']}. Losses: evaluated"
                f" {ARMS[law['conventions']['loss'].removeprefix('loss_')]}."
            ),
        ]
    )


def _law_row(recipe: str, name: str, fit: dict) -> dict:
    """A line of the table of laws: one Fit.plain() of law.json."""
    exponents = ("alpha", "beta", "a", "b", "gamma")
    ends = [
        f"{parameter} {low:.3g} to {high:.3g}"
        for parameter, (low, high) in (fit["ci95"] or {}).items()
        if parameter in exponents
    ]
    return {
        "recipe": recipe,
        "law": name,
        "formula": fit["formula"] or "not fitted",
        "exponents, 95 %": ", ".join(ends),
        "residuals [%]": fit["residual_rms"] and f"{100 * fit['residual_rms']:.3f}",
        "runs": fit["n"],
        "identified": "yes" if fit["identified"] else f"no: {fit['reason']}",
    }


def _found(folder: Path, name: str, is_wanted: bool, shown) -> str:
    """What another command found, with its figure; where that is missing, and wanted, the command.
    shown: its file in words."""
    made_by, figure = ("fit", "figure") if name == "law" else (name, name)
    path, picture = folder / LAW_FOLDER / f"{name}.json", f"{LAW_FOLDER}/{figure}.png"
    if not path.exists():
        return (
            f"**Missing:** {LAW_FOLDER}/{name}.json (`python scaling/{made_by}.py {folder}`)."
            if is_wanted
            else ""
        )
    return f"![{name}]({picture})\n\n" * (folder / picture).is_file() + shown(path)


def _stale(path: Path, records: list[Record]) -> list[str]:
    made = (
        {(one["run_id"], one["summary_sha256"]) for one in read_json(path)["inputs"]}
        if path.exists()
        else None
    )
    return (
        []
        if made in (None, {(one.run_id, one.summary_sha256) for one in records})
        else [
            f"{LAW_FOLDER}/{path.name} was made from other runs than those that are here now: make"
            " it again"
        ]
    )


def _predictions(predictions, folder: Path) -> str:
    """What was frozen, and what came of it; a score of another prediction counts as none."""
    lines, lacking = (
        [],
        (
            []
            if predictions
            else [f"a frozen prediction (`python scaling/fit.py {folder} --predict RUN`)"]
        ),
    )
    for one in predictions:
        path = folder / LAW_FOLDER / f"score_{one.target}.json"
        score = read_json(path) if path.exists() else {}
        runs = score["runs"] if score.get("prediction_sha256") == one.sha256 else []
        lacking += [f"the score of {one.target} (`python scaling/fit.py {folder} --score`)"] * (
            not runs
        )
        lines += [
            {
                "target": one.target,
                "frozen (UTC)": one.date,
                "sha256": f"`{one.sha256[:12]}`",
                "predicted [nats]": f"{one.loss:.4f}",
                "95 % interval": f"{one.low:.4f} to {one.high:.4f}",
                "by": one.headline,
                "run": run.get("run_id"),
                "measured [nats]": fixed(run.get("loss"), 4),
                "error [%]": run and f"{run['error_percent']:+.2f}",
                "interval": run and ("inside" if run["inside"] else "**outside**"),
            }
            for run in runs or [{}]
        ]
    return "\n\n".join(
        [
            *[table(lines)] * bool(lines),
            *(f"**Missing:** {one}." for one in lacking),
            "Only a commit that holds a prediction and not its run shows that it is older.",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
