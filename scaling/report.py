"""Lay finished runs beside each other: one training in several precisions, or a whole study on one page.

    python scaling/report.py out/A out/B [out=DIR]      # report.md, report.json, report_*.png and .svg; out=law beside them
    python scaling/report.py --study out/STUDY          # README.md and report.json in that folder

One training: per recipe the max, min, mean, final value, standard deviation of training and validation loss; time with the
first steps apart; GPU memory and utilisation; speed against BF16. The runs must agree in all that their weights depend on but
the precision; what else differs, and can touch their times, is said.

A study: its finished runs, and what other commands found in them: the laws of fit.py, the frozen predictions with their scores,
the gaps of precision.py, the rates of learning_rate.py. What is missing is named with the command that makes it.
"""

import itertools
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from runtime.cli import UserError, grid, read_options, run_command
from runtime.progress import si
from runtime.rows import write_atomically
from scaling import learning_rate
from scaling.dynamics import History, read_history, running_mean, window_of
from scaling.figures import RC, render
from scaling.laws import NAMES, Fit
from scaling.pairs import Gap, Pair, null_pairs, pairs
from scaling.predict import load
from scaling.records import LAW_FOLDER, Record, read_json, read_runs, read_study

PAGE = "README.md"
MARK = "<!-- Written by scaling/report.py from the files beside it: edit those, not this page. -->"
SAME = {"val_sha256": "validation set", "tokenizer_sha256": "tokenizer", "data_sha256": "training data"}
# Keys of config.json that change neither weights nor times, or that the report is about.
FREE = {"run", "out", "data.dir", "fp8.recipe"}
WEIGHTS = ("model.", "data.", "optim.", "seed", "steps", "tokens_per_param", "start_from")     # what pair_id is made of
LISTED = 6      # differences, or runs, that a sentence names
LOSS = ("max", "min", "mean", "final", "standard deviation")
NOT_TOLD = "not told"
BF16 = {"color": "#0072B2", "marker": "o", "linewidth": 2.2}
STYLES = tuple({"color": color, "marker": marker, "linewidth": 1.2} for color, marker in zip(     # Okabe-Ito
    ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B5A00"), "sD^vPX*", strict=True))
CALM = 3        # a difference is smoothed over so many times as many steps as a loss: it is noise about little


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: tuple[str, ...] = ()      # of one training in several precisions
    study: str | None = None        # a folder of runs in their place
    out: str | None = None          # folder that receives the report; none = law beside the first run

    POSITIONAL: ClassVar = ("runs",)

    def __post_init__(self):
        if bool(self.runs) == bool(self.study) or self.study and self.out:
            raise UserError("no runs given: name those of one training, as out/a_bf16 out/a_fp8 [out=DIR], or --study out/STUDY")


def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the runs or the arguments."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0
    try:
        options = read_options(Options, arguments)
        print(report_study(Path(options.study)) if options.study else report_training(options.runs, options.out))
    except UserError as error:
        print(f"scaling/report.py: {error}", file=sys.stderr)
        return 2
    return 0


def _write(folder: Path, files: dict[str, bytes], old=()) -> None:
    """Write the files; of `old` names those that are not among them go: beside the new ones they would pass for their own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in set(old) - set(files):
            (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def one_line(text) -> str:
    """Names come from files: none may end a row or a cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head, rows) -> str:
    return grid([list(head), *([one_line(cell) for cell in row] for row in rows)]) if rows else ""


def _listed(items: list[str]) -> str:
    return ", ".join(items[:LISTED]) + (f" and {len(items) - LISTED} more" if len(items) > LISTED else "")


def _number(value) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e30 else None


# --------------------------------------------------------------------------------------------- one training: its runs

@dataclass(frozen=True)
class Arm:
    """One run of the comparison."""
    record: Record
    label: str                      # its recipe; with its name where several have that recipe
    history: History
    summary: dict
    settings: dict                  # config.json, flat, with what of the machine and the code can touch times
    clock: np.ndarray | None        # (2, steps that count): seconds since the start with and without the first steps' extra
    n_untargeted: int               # steps whose tokens were all context only; they have no loss in `history`


def report_training(paths, out: str | None) -> str:
    """Write the report on runs of one training; returns what the console shows."""
    arms, notes = read_arms(paths)
    folder = Path(out or arms[0].record.folder.parent / LAW_FOLDER)
    result = analyse(arms)
    if not any(arm.record.recipe == "bf16" for arm in arms):
        notes.append("no BF16 run among these: nothing to compare speed and loss with")
    figures = {name: figure for name, draw in DRAWINGS.items() if (figure := draw(arms)) is not None}
    files = {f"{name}.{form}": render(figure, form) for name, figure in figures.items() for form in ("png", "svg")}
    text = "\n\n".join(["# " + one_line(f"{len(arms)} runs of one training: {', '.join(arm.label for arm in arms)}"),
                        tables(result), *["\n".join(f"- {one_line(note)}" for note in notes)] * bool(notes)])
    page = "\n\n".join([text, *(f"![{name.removeprefix('report_')}]({name}.png)" for name in figures)])
    files |= {"report.json": _json({"format_version": 1, **result, "notes": notes}), "report.md": (page + "\n").encode()}
    _write(folder, files, [f"{name}.{form}" for name in DRAWINGS for form in ("png", "svg")])
    return f"{text}\n\nwrote {folder}/: {', '.join(files)}"


def read_arms(paths) -> tuple[list[Arm], list[str]]:
    """Finished runs, BF16 and its repeats first, else in the order given; plus a line for each thing left out or worth knowing.

    Raises UserError where no run is finished, a file is damaged, or runs differ in more than the precision."""
    records, notes = read_runs(paths)
    records.sort(key=lambda record: (record.recipe != "bf16", record.repeat))
    recipes, arms = [record.recipe for record in records], []
    for record in records:
        summary, config = (read_json(record.folder / name) for name in ("summary.json", "config.json"))
        settings = {f"{key}.{name}" if name else key: item for key, value in config.items()
                    for name, item in (value.items() if isinstance(value, dict) else [("", value)])}
        settings |= {key: summary.get(key) for key in ("device", "n_gpu", "torch", "torchao", "git_commit")}
        label = record.recipe if recipes.count(record.recipe) == 1 else f"{record.recipe} ({record.run_id})"
        history = read_history(record.folder)
        loss = history.train["loss"]
        if not len(loss):
            raise UserError(f"{record.folder / 'metrics.jsonl'} holds no step that counts: restore it, or leave the run out")
        is_untargeted = loss == 0       # masked data: the mean over no targets is logged as exactly nought
        history.train["loss"] = np.where(is_untargeted, math.nan, loss)
        arms.append(Arm(record, label, history, summary, settings, clock(history), int(is_untargeted.sum())))
        notes += history.notes
    _check_one_training(arms)
    notes += [note for arm in arms for note in _oddities(arm)]
    return arms, notes + [f"{arm.label} differs from {arms[0].label} beside the recipe: {_listed(unlike)}. The training is the "
                          "same; times and validations may not be alike" for arm in arms[1:] if (unlike := _unlike(arms[0], arm))]


def clock(history: History) -> np.ndarray | None:
    """Seconds at the end of each step that counts, (2, steps): as they passed, then without what compilation added.

    Steps that a rollback took back are time too. The first step after a start (since_start 1) compiles: without that it
    counts as long as the median step. A step whose time is not told counts as the median; None where none is told."""
    train = history.train
    seconds = np.where(train["step_s"] >= 0, train["step_s"], math.nan)
    is_first, is_told = train["since_start"] == 1, np.isfinite(seconds)
    known = seconds[~is_first & is_told] if (~is_first & is_told).any() else seconds[is_told]
    if not len(known):
        return None
    median_s = float(np.median(known))
    seconds = np.where(is_told, seconds, median_s)
    both = np.array([seconds, np.where(is_first, np.minimum(seconds, median_s), seconds)])
    for lost in history.undone:
        first = min(int(np.searchsorted(train["step"], lost["step"][0])), len(seconds) - 1)
        both[:, first] += np.sum(lost["step_s"][lost["step_s"] >= 0])
    return np.cumsum(both, axis=1)


def _check_one_training(arms: list[Arm]) -> None:
    """Raise UserError where two runs are one, or differ in more than the precision: the sentence says in what."""
    first, seen = arms[0], {}
    for arm in arms:
        both = f"{first.record.folder} ({first.label}) and {arm.record.folder} ({arm.label})"
        if arm.record.pair_id != first.record.pair_id:
            unlike = _listed([one for one in _unlike(first, arm) if one.startswith(WEIGHTS)])
            raise UserError(f"{both} differ in more than the precision: {unlike or 'their pair_id'}; give the runs of one "
                            "training, alike in seed, data order and settings")
        for key, what in SAME.items():
            if (mine := first.summary.get(key)) != (its := arm.summary.get(key)):
                raise UserError(f"{both} have another {what} each ({key} {mine} against {its}): their losses cannot stand "
                                "beside each other")
        twin = seen.setdefault(arm.record.run_id, arm)
        if twin is not arm:
            raise UserError(f"{twin.record.folder} and {arm.record.folder} have one run_id: leave one out")


def _unlike(first: Arm, other: Arm) -> list[str]:
    def told(settings: dict, key: str) -> str:
        text = json.dumps(settings[key]) if key in settings else "not there"
        return text if len(text) < 60 else text[:57] + "..."

    return [f"{key} {told(first.settings, key)} against {told(other.settings, key)}" for key in first.settings | other.settings
            if first.settings.get(key) != other.settings.get(key) and key not in FREE and not key.startswith(("log.", "profile"))]


def _oddities(arm: Arm) -> list[str]:
    """What of one run's history a reader of its numbers should know."""
    train, summary, found = arm.history.train, arm.summary, []
    steps = (_number(summary.get("steps")) or 0) - (arm.record.parent_step or 0)
    if 0 < len(train["step"]) < steps:
        found.append(f"{steps - len(train['step']):,.0f} of {steps:,.0f} steps have no row in metrics.jsonl: time is too short")
    if arm.n_untargeted:
        found.append(f"{arm.n_untargeted:,} steps had a training loss of exactly 0, so no target: left out of the statistics")
    if bad := int((~np.isfinite(train["loss"])).sum()) - arm.n_untargeted:
        found.append(f"{bad:,} training losses are not finite: left out of the statistics")
    if skipped := int((train["ok"] == 0).sum()):
        found.append(f"the guard judged {skipped:,} steps as other than OK: their losses are counted")
    if arm.history.undone:
        moved = _number(summary.get("moved_on_steps"))
        found.append(f"went back {len(arm.history.undone)} times: that time is counted, those losses are not" + (
            f"; {moved:,.0f} steps' worth of data were left out, so its data order is not the others'" if moved else ""))
    if arm.clock is None:
        found.append("no row tells step_s: no time")
    if arm.record.status != "ok":
        found.append(f"its status is {arm.record.status!r}")
    return [f"{arm.label}: {one}" for one in found]


# ------------------------------------------------------------------------------------------ one training: its numbers

def analyse(arms: list[Arm]) -> dict:
    """What report.json holds but notes: a row per arm. Losses in nats per token, times in seconds, gaps against BF16."""
    records = [arm.record for arm in arms]
    found = {pair.fp8.run_id: pair for pair in pairs(records)[0] + null_pairs(records)[0]}
    return {"pair_id": arms[0].record.pair_id, "runs": [_row(arm, found.get(arm.record.run_id)) for arm in arms]}


def _row(arm: Arm, pair: Pair | None) -> dict:
    train, record, times = arm.history.train, arm.record, None
    if arm.clock is not None:
        whole, bare = arm.clock[:, -1].tolist()
        times = {"with_compile": whole, "without_compile": bare, "compile": whole - bare}

    def gap(one: Gap, reference: float) -> dict:
        return {**asdict(one), "se_percent": None if one.se is None else 100 * one.se / reference}

    def percent(key: str) -> dict | None:       # over the steps after those that compiled; of all where there are no others
        values = np.where((train[key] >= 0) & (train[key] <= 100), train[key], math.nan)
        return spread(values[train["since_start"] != 1]) or spread(values)

    return {
        "run_id": record.run_id, "recipe": record.recipe, "label": arm.label, "status": record.status, "device": record.device,
        "n_gpu": record.n_gpu, "is_compiled": record.is_compiled, "steps": len(train["step"]), "tokens": record.tokens,
        "summary_sha256": record.summary_sha256,
        "train_loss": spread(train["loss"]), "val_loss": spread(arm.history.val["loss"]),
        "loss_as_trained": record.loss_as_trained, "loss_bf16": record.loss_bf16,
        "gap": pair and {"as_trained": gap(pair.as_trained, pair.bf16.loss_as_trained),
                         "bf16": gap(pair.in_bf16, pair.bf16.loss_bf16)},
        "tok_per_s_median": record.tok_per_s_median, "speed_against_bf16": pair and pair.tok_per_s_ratio,
        "step_time_s": times, "wall_s": _number(arm.summary.get("wall_s")),
        "memory_percent": percent("gpu_mem_pct"), "utilisation_percent": percent("gpu_util_pct"),
        "mem_peak_gib": _number(arm.summary.get("mem_peak_gib")),
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
    rows = result["runs"]
    longest = max((row["step_time_s"]["with_compile"] for row in rows if row["step_time_s"]), default=0)
    unit, name = (3600.0, "h") if longest >= 7200 else (60.0, "min") if longest >= 300 else (1.0, "s")
    words = ["Speed and tokens/s: of the median step, the first three after each start left out. Steps: the sum of their times. "
             "Compilation: what the first step after each start took beyond the median step, of an eager run too. Whole run: "
             "start and validations as well. Memory and utilisation: the first rank's GPU, mean over the steps after the first; "
             "peak: PyTorch's own."]
    if any(row["device"].startswith("cpu") for row in rows):
        words.append("A CPU has no FP8 units: speeds there say nothing about a GPU.")
    if any(row["memory_percent"] is None or row["utilisation_percent"] is None for row in rows):
        words.append(f"{NOT_TOLD.capitalize()}: the run's rows hold no such value; it takes a GPU, its driver and nvidia-ml-py.")
    return "\n\n".join([
        "**Training loss [nats/token]**",
        table(["recipe", *LOSS, "steps"], [[row["label"], *_loss(row["train_loss"])] for row in rows]),
        "**Validation loss, as trained [nats/token]**",
        table(["recipe", *LOSS, "validations", "gap as trained [%]", "gap in BF16 [%]"],
              [[row["label"], *_loss(row["val_loss"]), _gap(row, "as_trained"), _gap(row, "bf16")] for row in rows]),
        "Loss of all steps that count. Standard deviation (n - 1): of the single values around their mean, so mostly "
        "the way down. Gap: final loss minus the BF16 run's on the same sequences, ± one standard error of the evaluation, not "
        "of the run.", "**Time, memory, speed**",
        table(["recipe", "speed against BF16", "tokens/s", f"steps [{name}]", f"without compilation [{name}]",
               f"compilation [{name}]", f"whole run [{name}]", "memory allocated, mean [%]", "memory, peak [GiB]",
               "GPU utilisation, mean [%]"], [[row["label"], *_cost(row, unit)] for row in rows]), " ".join(words)])


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
    if row["gap"] is None:
        speed = "1" if row["recipe"] == "bf16" else "no BF16 run"
    elif row["speed_against_bf16"] is None:
        speed = "not alike"      # another machine, or only one of them compiled
    else:
        speed = f"{row['speed_against_bf16']:.3f}" + " (CPU)" * row["device"].startswith("cpu")
    times = row["step_time_s"] or {}
    seconds = [*(times.get(key) for key in ("with_compile", "without_compile", "compile")), row["wall_s"]]
    memory, busy = (one and one["mean"] for one in (row["memory_percent"], row["utilisation_percent"]))
    return [speed, f"{row['tok_per_s_median']:,.0f}", *(_fixed(one if one is None else one / unit, 2) for one in seconds),
            _fixed(memory, 1), _fixed(row["mem_peak_gib"], 2), _fixed(busy, 1)]


def _fixed(value: float | None, digits: int) -> str:
    return NOT_TOLD if value is None else f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"


# ------------------------------------------------------------------------------------------ one training: its figures

def draw_losses(arms: list[Arm]) -> Figure:
    """Training loss, validation loss, and the difference to the BF16 arm where there is one, over steps."""
    losses, vals = ({arm.label: {step: loss for step, loss in rows(arm) if math.isfinite(loss)} for arm in arms} for rows in (
        lambda arm: zip(arm.history.train["step"], arm.history.train["loss"], strict=True), lambda arm: arm.history.val))
    panels = {"training loss\n[nats/token]": {arm.label: (list(losses[arm.label]), smooth([*losses[arm.label].values()]))
                                              for arm in arms},
              "validation loss\n[nats/token]": {arm.label: (list(vals[arm.label]), [*vals[arm.label].values()]) for arm in arms}}
    window = window_of(arms[0].history.train["step"])
    caption = f"Training: {f'mean over {window} steps' if window > 1 else 'each step'}. Validation: each run as it was trained."
    base = next((arm.label for arm in arms if arm.record.recipe == "bf16"), None)
    if base and len(arms) > 1:
        gaps = panels["training loss\nminus BF16 [%]"] = {}
        caption += " Above zero: worse than BF16."
        for label in losses.keys() - {base}:
            both = [step for step in losses[label] if losses[base].get(step, 0) > 0]
            below = smooth([losses[base][step] for step in both], CALM)
            gaps[label] = both, 100 * smooth([losses[label][step] - losses[base][step] for step in both], CALM) / below
    return _draw(arms, "Loss", panels, 1, caption)


def draw_costs(arms: list[Arm]) -> Figure | None:
    """Cumulative time with and without compilation, memory and utilisation of the first rank's GPU, over steps; None where no
    arm's rows tell any of it."""
    panels = {"time with compilation [s]": {}, "time without compilation [s]": {}, "GPU memory allocated [%]": {},
              "GPU utilisation [%]": {}}
    for arm in arms:
        steps = arm.history.train["step"]
        for name, times in zip(panels, arm.clock if arm.clock is not None else (), strict=False):
            panels[name][arm.label] = steps, times
        for name, key in zip([*panels][2:], ("gpu_mem_pct", "gpu_util_pct"), strict=True):
            values = arm.history.train[key]
            if (known := (values >= 0) & (values <= 100)).any():
                panels[name][arm.label] = steps[known], smooth(values[known])
    panels = {name: lines for name, lines in panels.items() if lines}
    return _draw(arms, "Time and GPU", panels, 2, "Time: the sum of all steps, those that a rollback took back included. GPU: "
                 "that of the first rank, mean over a fortieth of the steps.") if panels else None


DRAWINGS = {"report_loss": draw_losses, "report_cost": draw_costs}


def smooth(values, times: int = 1) -> np.ndarray:
    return running_mean(np.array(values, dtype=float), times) if len(values) else np.zeros(0)


def styled(arms: list[Arm]) -> list[tuple[Arm, dict]]:
    """(arm, how its lines look) of each: the same in every figure."""
    styles = itertools.cycle(STYLES)
    return [(arm, BF16 if arm.record.recipe == "bf16" else next(styles)) for arm in arms]


def _draw(arms: list[Arm], what: str, panels: dict[str, dict], columns: int, caption: str) -> Figure:
    """A panel for each name with a line (x, y) for each arm's label. Limits that neither the first steps nor one run that
    diverged govern."""
    record, rows = arms[0].record, -(-len(panels) // columns)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7.4, 1.1 + 1.8 * rows), layout="constrained")
        figure.suptitle(f"{what}: {si(record.params_total)} parameters, {si(record.tokens)} tokens (n = 1 run each)")
        figure.supxlabel(caption, fontsize=7)
        shape = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for panel in shape.flat[len(panels):]:
            panel.remove()
        for panel, (name, lines) in zip(shape.flat, panels.items(), strict=False):
            ends = []
            for offset, (arm, style) in enumerate(styled(arms)):
                x, y = lines.get(arm.label, ((), ()))
                every = max(1, len(x) // 9)     # markers at places of their own, so that lines on each other stay told apart
                panel.plot(x, y, **style, markersize=3.6, markevery=((offset * every) // 5 % every, every), label=arm.label)
                late = np.asarray(y, dtype=float)[len(y) // 10:]
                ends += [np.quantile(late[np.isfinite(late)], (0.01, 0.99))] if np.isfinite(late).any() else []
            if ends and "loss" in name:
                low, high = min(end[0] for end in ends), max(end[1] for end in ends)
                low, high = ((min(low, 0), max(high, 0)) if "BF16" in name else (low, min(high, 1.5 * min(e[1] for e in ends))))
                panel.set_ylim(low - 0.1 * (high - low) - 1e-6, high + 0.1 * (high - low) + 1e-6)
            if "BF16" in name:
                panel.axhline(0, color=BF16["color"], linewidth=1.4, zorder=1)
            panel.set(ylabel=name)
            panel.grid(True, color="#EEEEEE", linewidth=0.5)
        for panel in shape[-1]:
            panel.set_xlabel("step")
        shape.flat[0].legend(frameon=False, ncols=2)
    return figure


# ----------------------------------------------------------------------------------------------------------- a study

def report_study(folder: Path) -> str:
    """Write the page of a study's folder and its JSON; returns what the console shows.

    Raises UserError where there is no finished run, where a file is damaged, or where the page is not ours to replace."""
    records, notes = read_runs([folder])
    records.sort(key=lambda one: (one.N, one.recipe != "bf16", one.recipe, one.repeat, one.tokens, one.seed))
    page, law_folder = folder / PAGE, folder / LAW_FOLDER
    if page.exists() and not page.read_text(errors="replace").startswith(MARK):
        raise UserError(f"{page} was not written by this command, and it is not written over: move it away")
    law, precision, rates = (read_json(path) if (path := law_folder / f"{name}.json").exists() else {}
                             for name in ("law", "precision", "learning_rate"))
    predictions = load(law_folder)
    scores = {path.stem.removeprefix("score_"): read_json(path) for path in sorted(law_folder.glob("score_*.json"))}
    study = read_study(folder)
    lacking = sorted({row["run"] for row in study.get("runs", [])} - {record.run_id for record in records})
    told = f"{len(records)} finished runs" + (f" of {len(study['runs'])} declared on {study.get('declared')}" if study else "")
    told += f"; missing: {_listed(lacking)}" * bool(lacking)
    held = ", held out: " + ", ".join(study.get("held_out", [])) if study.get("held_out") else ""
    runs = study_runs(records)
    try:
        sections = {
            "Runs": _runs(runs),
            "Laws": _laws(law, folder) if not rates else "",
            "Predictions": _predictions(predictions, scores, folder) if predictions or study.get("held_out") else "",
            "FP8 against BF16": _gaps(precision, folder) if len({record.recipe for record in records}) > 1 or precision else "",
            "Learning rate": _figure(folder, "learning_rate") + learning_rate.tables(rates) if rates else "",
            "Notes": "\n".join(f"- {one_line(note)}" for note in [
                *notes, *_provenance(records), *_stale(records, law, "law.json"), *_stale(records, precision, "precision.json"),
                *(f"{one.run_id}: its status is {one.status!r}" for one in records if one.status != "ok")])}
        headlines = _short(law, predictions, scores, precision)
    except (KeyError, TypeError, ValueError, AttributeError) as error:      # law.json and its like, edited or of another version
        if isinstance(error, UserError):
            raise
        raise UserError(f"{law_folder}: a file is damaged or of another version ({type(error).__name__}: {error}); make it "
                        f"again: python scaling/fit.py {folder}, python scaling/precision.py {folder}") from error
    text = "\n\n".join([f"{MARK}\n# The study {study.get('study', folder.resolve().name)}",
                        f"{told}{held}. This page: `python scaling/report.py --study {folder}`.",
                        *["\n".join(f"- {one_line(line)}" for line in headlines)] * bool(headlines),
                        *(f"## {title}\n\n{section}" for title, section in sections.items() if section)])
    content = {"format_version": 1, "study": study.get("study"), "declared": study.get("declared"), "missing": lacking,
               "runs": runs, "laws": {name: {"headline": group["headline"], **group["laws"][group["headline"]["form"]]}
                                      for name, group in law.get("groups", {}).items()},
               "predictions": [{"target": one.target, "date": one.date, "sha256": one.sha256, "loss": one.loss, "low": one.low,
                                "high": one.high, "headline": one.headline, "scored": scores.get(one.target, {}).get("runs", [])}
                               for one in predictions],
               "gaps": precision.get("common", {}), "ranking": precision.get("ranking"), "headlines": headlines,
               "inputs": {record.run_id: record.summary_sha256 for record in records}}
    _write(folder, {"report.json": _json(content), PAGE: (text + "\n").encode()})
    return "\n".join([*headlines, f"wrote {page}, report.json: {told}"])


def study_runs(records: list[Record]) -> list[dict]:
    """A row per size, recipe and budget: means over its seeds, medians of the speed; the null runs are rows of their own."""
    groups = {}
    for record in records:
        groups.setdefault((record.N, record.recipe, record.repeat, record.tokens, record.device), []).append(record)
    rows = []
    for (N, recipe, repeat, tokens, device), some in groups.items():
        base = groups.get((N, "bf16", 0, tokens, device), [])
        rate = median(one.tok_per_s_median for one in some)
        alike = recipe != "bf16" and base and {one.is_compiled for one in base} == {one.is_compiled for one in some}
        rows.append({"N": N, "recipe": recipe + " null" * bool(repeat), "tokens": tokens, "tokens_per_param": tokens / N,
                     "runs": [one.run_id for one in some], "seeds": sorted({one.seed for one in some}), "device": device,
                     "loss_bf16": mean(one.loss_bf16 for one in some), "tok_per_s_median": rate,
                     "loss_as_trained": mean(one.loss_as_trained for one in some),
                     "speed_against_bf16": rate / median(one.tok_per_s_median for one in base) if alike else None})
    return rows


def _runs(rows: list[dict]) -> str:
    devices = {row["device"] for row in rows}
    words = "Losses: means over the seeds; gaps of single pairs are below. Speed: of the median step."
    words += " A CPU has no FP8 units: its speeds say nothing about a GPU." * any(one.startswith("cpu") for one in devices)
    return table(["N", "recipe", "tokens", "tokens/N", "seeds", "loss in BF16 [nats/token]", "as trained", "tokens/s",
                  "speed against BF16", "device"],
                 [[si(row["N"]), row["recipe"], si(row["tokens"]), f"{row['tokens_per_param']:.3g}",
                   ", ".join(map(str, row["seeds"])), f"{row['loss_bf16']:.4f}", f"{row['loss_as_trained']:.4f}",
                   f"{row['tok_per_s_median']:,.0f}",
                   f"{row['speed_against_bf16']:.3f}" if row["speed_against_bf16"] else "", row["device"]]
                  for row in rows]) + f"\n\n{words}"


def _short(law: dict, predictions, scores: dict, precision: dict) -> list[str]:
    """The answers in a line each."""
    lines = []
    for recipe, group in law.get("groups", {}).items():
        fit = group["laws"][group["headline"]["form"]]
        lines.append(f"Law of {recipe}: {', '.join(part for part in _law(fit)[:2] if part)}; {fit['n']} runs"
                     + ("" if fit["identified"] else f"; not identified: {fit['reason']}"))
    for one in predictions:
        for ran in scores.get(one.target, {}).get("runs", []):
            lines.append(f"Predicted before it was run, {one.target}: {one.loss:.4f} ({one.low:.4f} to {one.high:.4f}) nats per "
                         f"token; measured {ran['loss']:.4f} in {ran['run_id']}, {'inside' if ran['inside'] else 'OUTSIDE'} the "
                         f"interval, error {ran['error_percent']:+.2f} %")
    if pooled := precision.get("null", {}).get("pooled"):
        lines.append(f"BF16 with another seed differs by {pooled['sd_percent']:.3f} % (SD of the difference)")
    for recipe, one in precision.get("common", {}).items():
        lines.append(f"Gap of {recipe} to BF16: {_estimate(one[precision['loss']])} % of the loss over "
                     f"{one[precision['loss']]['n']} independent pairs; {one['verdict']}")
    return lines + ([f"Recipes ranked: {precision['ranking']['reason']}"] if precision.get("common") else [])


def _laws(law: dict, folder: Path) -> str:
    """Each recipe's headlined law, L(N, D) beside it where that is another, and why."""
    if not law:
        return _missing("law/law.json", f"fit.py {folder}")
    rows, reasons = [], []
    for recipe, group in law["groups"].items():
        head = group["headline"]["form"]
        reasons.append(f"- {recipe}: {one_line(group['headline']['reason'])}")
        for form in dict.fromkeys((head, "chinchilla")):
            fit = group["laws"][form]
            rows.append([recipe, form + " (headline)" * (form == head), *_law(fit), str(fit["n"]),
                         "yes" if fit["identified"] else f"no: {fit['reason']}"])
    return "\n\n".join([_figure(folder, "figure") + table(
        ["recipe", "law", "formula", "exponents, 95 %", "residuals [%]", "runs", "identified"], rows), "\n".join(reasons)])


def _law(fit: dict) -> list[str]:
    """A law of law.json as cells: formula, exponents with their intervals, residuals."""
    names = NAMES.get(fit["form"], ())
    if fit.get("objective") is None or any(fit.get(name) is None for name in names):
        return ["not fitted", "", ""]
    shape = Fit(fit["form"], {name: fit[name] for name in names}, fit["n"], fit["identified"], fit["reason"])
    ends = [f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in (fit["ci95"] or {}).items()
            if name in ("alpha", "beta", "a") or name == "gamma" and name in names]
    return [shape.formula(fit["form"][-1].upper() if "power" in fit["form"] else "C"), ", ".join(ends),
            f"{100 * fit['residual_rms']:.3f}"]


def _predictions(predictions, scores: dict, folder: Path) -> str:
    """What was frozen, and what came of it. Raises UserError for a score of another prediction."""
    rows = []
    for one in predictions:
        score = scores.get(one.target)
        if score and score["prediction_sha256"] != one.sha256:
            raise UserError(f"{folder / LAW_FOLDER}/score_{one.target}.json judges another prediction than the one that lies "
                            f"beside it: python scaling/fit.py {folder} --score")
        ends = f"{one.low:.4f} to {one.high:.4f}"
        frozen = [one.target, one.date, f"`{one.sha256[:12]}`", f"{one.loss:.4f}", ends, one.headline]
        rows += [[*frozen, ran["run_id"], f"{ran['loss']:.4f}", f"{ran['error_percent']:+.2f}",
                  "inside" if ran["inside"] else "**outside**"] for ran in score["runs"]] if score else [[*frozen, *[""] * 4]]
    lacking = [one.target for one in predictions if one.target not in scores]
    return "\n\n".join(part for part in [
        table(["target", "frozen (UTC)", "sha256", "predicted [nats]", "95 % interval", "by", "run", "measured [nats]",
               "error [%]", "interval"], rows),
        "" if predictions else _missing("a frozen prediction", f"fit.py {folder} --predict RUN"),
        _missing(f"the score of {_listed(lacking)}", f"fit.py {folder} --score") if lacking else "",
        "Only a commit that holds a prediction and not its run shows that it is older." * bool(rows)] if part)


def _gaps(precision: dict, folder: Path) -> str:
    """The gap of each recipe over all sizes, then at each size and budget."""
    if not precision:
        return _missing("law/precision.json", f"precision.py {folder}")
    arm = precision["loss"]
    common = [[recipe, _estimate(one[arm]), str(one[arm]["n"]), one["verdict"]] for recipe, one in precision["common"].items()]
    sizes = [[si(row["N"]), si(row["tokens"]), row["recipe"], _estimate(row[arm]), str(row[arm]["n"]), row["verdict"]]
             for row in precision["sizes"]]
    return "\n\n".join(part for part in [
        _figure(folder, "precision") + table(["recipe", "gap [%]", "independent pairs", "verdict"], common),
        table(["N", "tokens", "recipe", "gap [%]", "pairs", "verdict"], sizes),
        "Gap: FP8 minus BF16 in per cent of the BF16 loss, ± half a 95 % t-interval over independent pairs."] if part)


def _estimate(one: dict) -> str:
    return f"{one['mean']:+.3f}" + ("" if one["high"] is None else f" ± {one['high'] - one['mean']:.3f}")


def _provenance(records: list[Record]) -> list[str]:
    """Which code and machine the runs say that they come from."""
    seen = {}
    for record in records:
        summary = read_json(record.folder / "summary.json")
        code = str(summary.get("git_commit") or "not known")[:9] + ", edited" * bool(summary.get("git_dirty"))
        where = f"{record.n_gpu} x {record.device}, torch {summary.get('torch', NOT_TOLD)}, commit {code}"
        seen.setdefault(where, []).append(record)
    return [f"{len(some)} runs on {where}" for where, some in seen.items()]


def _stale(records: list[Record], made: dict, name: str) -> list[str]:
    """Sentences where a file was made from other runs than those that are there now."""
    there = {record.run_id: record.summary_sha256 for record in records}
    changed = [one["run_id"] for one in made.get("inputs", []) if there.get(one["run_id"]) != one["summary_sha256"]]
    return [f"{name} is not of these files: {_listed(changed)} went in with other bytes"] * bool(changed)


def _figure(folder: Path, name: str) -> str:
    path = Path(LAW_FOLDER) / f"{name}.png"
    return f"![{name}]({path.as_posix()})\n\n" if (folder / path).is_file() else ""


def _missing(what: str, command: str) -> str:
    return f"**Missing:** {what} (`python scaling/{command}`)."


if __name__ == "__main__":
    sys.exit(run_command(main))
