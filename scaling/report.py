"""Lay finished runs of one training in several precisions beside each other: their losses, time, memory, speed.

    python scaling/precision.py --report out/A out/B [out=DIR]      # report.md, report.json, report_*.png and .svg

Per recipe: max, min, mean, final value, standard deviation of training and validation loss; time with compilation apart;
GPU memory and utilisation; speed against BF16. DIR is `law` beside the first run by default. The runs must agree in all that
their weights depend on but the precision; what else differs, and can touch their times, is said.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.rows import write_atomically as write
from scaling.command import read_words
from scaling.dynamics import History, read_history
from scaling.figures import render
from scaling.pairs import Gap, Pair, null_pairs, pairs
from scaling.records import LAW_FOLDER, Record, read_runs
from scaling.report_figure import draw_gpu, draw_losses, draw_time
from scaling.report_tables import one_line, tables

OPTIONS = {"out": "DIR that receives report.md, report.json and the figures (default: law beside the first run)"}
DRAWINGS = {"report_loss": draw_losses, "report_gpu": draw_gpu, "report_time": draw_time}
SAME = {"val_sha256": "validation set", "tokenizer_sha256": "tokenizer", "data_sha256": "training data"}
# Keys of config.json that change neither weights nor times, or that the report is about.
FREE = {"run", "out", "data.dir", "fp8.recipe"}
WEIGHTS = ("model.", "data.", "optim.", "seed", "steps", "tokens_per_param", "start_from")     # what pair_id is made of
SHOWN = 6       # differences that a sentence lists


@dataclass(frozen=True)
class Arm:
    """One run of the comparison."""
    record: Record
    label: str                      # its recipe; its name where several have that recipe
    history: History
    summary: dict
    settings: dict                  # config.json, flat, with what of the machine and the code can touch times
    clock: np.ndarray | None        # (2, steps that count): seconds since the start with and without compilation
    n_untargeted: int               # steps whose tokens were all context only; they have no loss in `history`


# ------------------------------------------------------------------------------------------------------------- reading

def read_arms(paths) -> tuple[list[Arm], list[str]]:
    """Finished runs, BF16 and its repeats first, else in the order given; plus a line for each thing left out or worth knowing.

    Raises UserError where no run is finished, a file is damaged, or runs differ in more than the precision."""
    records, notes = read_runs(paths)
    records.sort(key=lambda record: (record.recipe != "bf16", record.repeat))
    recipes = [record.recipe for record in records]
    arms = []
    for record in records:
        summary, config = (_read_json(record.folder / name) for name in ("summary.json", "config.json"))
        settings = {**_flat(config), **{key: summary.get(key) for key in ("device", "n_gpu", "torch", "torchao", "git_commit")}}
        label = record.recipe if recipes.count(record.recipe) == 1 else f"{record.recipe} ({record.run_id})"
        history = read_history(record.folder)
        if not len(history.train["step"]):
            raise UserError(f"{record.folder / 'metrics.jsonl'} holds no step that counts: restore it, or leave the run out")
        loss = history.train["loss"]
        is_untargeted = loss == 0       # masked data: the mean over no targets is logged as exactly nought
        history.train["loss"] = np.where(is_untargeted, math.nan, loss)
        arms.append(Arm(record, label, history, summary, settings, clock(history), int(is_untargeted.sum())))
        notes += history.notes
    _check_one_training(arms)
    return arms, [*notes, *(note for arm in arms for note in _oddities(arm)), *_differences(arms)]


def clock(history: History) -> np.ndarray | None:
    """Seconds at the end of each step that counts, (2, steps): as they passed, then without what compilation added.

    Steps that a rollback took back are time too. The first step after a start (since_start 1) compiles: without that it
    counts as long as the median step. A step whose time is not told counts as the median; None where none is told."""
    train = history.train
    seconds = np.where(train["step_s"] >= 0, train["step_s"], math.nan)
    is_first = train["since_start"] == 1
    known = seconds[~is_first & np.isfinite(seconds)]
    known = known if len(known) else seconds[np.isfinite(seconds)]
    if not len(known):
        return None
    median = float(np.median(known))
    seconds = np.where(np.isfinite(seconds), seconds, median)
    both = np.array([seconds, np.where(is_first, np.minimum(seconds, median), seconds)])
    for lost in history.undone:
        first = min(int(np.searchsorted(train["step"], lost["step"][0])), len(seconds) - 1)
        both[:, first] += np.sum(lost["step_s"][lost["step_s"] >= 0])
    return np.cumsum(both, axis=1)


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): the report needs it to say what differs") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): restore it, or leave the run out") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}; expected an object: restore it, or leave the run out")
    return value


def _flat(config: dict) -> dict:
    return {f"{key}.{name}" if name else key: item for key, value in config.items()
            for name, item in (value.items() if isinstance(value, dict) else [("", value)])}


# ------------------------------------------------------------------------------------------------------------ checking

def _check_one_training(arms: list[Arm]) -> None:
    """Raise UserError where two runs are one, or differ in more than the precision: the sentence says in what."""
    first = arms[0]
    for arm in arms[1:]:
        both = f"{first.record.folder} ({first.label}) and {arm.record.folder} ({arm.label})"
        if arm.record.pair_id != first.record.pair_id:
            unlike = _listed([one for one in _unlike(first, arm) if one.startswith(WEIGHTS)])
            raise UserError(f"{both} differ in more than the precision: {unlike or 'their pair_id'}; give the runs of one "
                              "training, alike in seed, data order and settings")
        for key, what in SAME.items():
            mine, its = first.summary.get(key), arm.summary.get(key)
            if mine != its:
                raise UserError(f"{both} have another {what} each ({key} {mine} against {its}): their losses cannot stand "
                                  "beside each other")
    seen = {}
    for arm in arms:
        twin = seen.setdefault(arm.record.run_id, arm)
        if twin is not arm:
            raise UserError(f"{twin.record.folder} and {arm.record.folder} have one run_id: leave one out")


def _unlike(first: Arm, other: Arm) -> list[str]:
    keys = [key for key in [*first.settings, *other.settings] if key not in FREE and not key.startswith(("log.", "profile"))]
    return [f"{key} {_told(first.settings, key)} against {_told(other.settings, key)}" for key in dict.fromkeys(keys)
            if first.settings.get(key) != other.settings.get(key)]


def _told(settings: dict, key: str) -> str:
    text = json.dumps(settings[key]) if key in settings else "not there"
    return text if len(text) < 60 else text[:57] + "..."


def _listed(items: list[str]) -> str:
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


def _differences(arms: list[Arm]) -> list[str]:
    return [f"{arm.label} differs from {arms[0].label} beside the recipe: {_listed(unlike)}. The training is the same; "
            "times and validations may not be alike" for arm in arms[1:] if (unlike := _unlike(arms[0], arm))]


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
    elif lacking := int((~(train["step_s"] >= 0)).sum()):
        found.append(f"{lacking:,} rows tell no time: counted as the median step")
    if arm.record.status != "ok":
        found.append(f"its status is {arm.record.status!r}")
    for key in ("gpu_mem_pct", "gpu_util_pct"):
        if odd := int((np.isfinite(train[key]) & ~((train[key] >= 0) & (train[key] <= 100))).sum()):
            found.append(f"{odd:,} values of {key} are no percentage: left out")
    return [f"{arm.label}: {one}" for one in found]


# ------------------------------------------------------------------------------------------------------------ analysis

def analyse(arms: list[Arm]) -> dict:
    """What report.json holds but notes: a row per arm. Losses in nats per token, times in seconds, gaps against BF16."""
    records = [arm.record for arm in arms]
    found = {pair.fp8.run_id: pair for pair in pairs(records)[0] + null_pairs(records)[0]}
    return {"pair_id": arms[0].record.pair_id, "runs": [_row(arm, found.get(arm.record.run_id)) for arm in arms]}


def _row(arm: Arm, pair: Pair | None) -> dict:
    train, record = arm.history.train, arm.record
    times = None
    if arm.clock is not None:
        whole, bare = arm.clock[:, -1].tolist()
        times = {"with_compile": whole, "without_compile": bare, "compile": whole - bare}
    return {
        "run_id": record.run_id, "recipe": record.recipe, "label": arm.label, "status": record.status, "device": record.device,
        "n_gpu": record.n_gpu, "is_compiled": record.is_compiled, "steps": len(train["step"]), "tokens": record.tokens,
        "summary_sha256": record.summary_sha256,
        "train_loss": spread(train["loss"]), "val_loss": spread(arm.history.val[:, 1]),
        "loss_as_trained": record.loss_as_trained, "loss_bf16": record.loss_bf16,
        "gap": pair and {"as_trained": _gap(pair.as_trained, pair.bf16.loss_as_trained),
                         "bf16": _gap(pair.in_bf16, pair.bf16.loss_bf16)},
        "tok_per_s_median": record.tok_per_s_median, "speed_against_bf16": pair and pair.tok_per_s_ratio,
        "step_time_s": times, "wall_s": _number(arm.summary.get("wall_s")),
        "memory_percent": _percent(train, "gpu_mem_pct"), "utilisation_percent": _percent(train, "gpu_util_pct"),
        "mem_peak_gib": _number(arm.summary.get("mem_peak_gib")),
    }


def _gap(gap: Gap, reference: float) -> dict:
    return {**asdict(gap), "se_percent": None if gap.se is None else 100 * gap.se / reference}


def spread(values) -> dict | None:
    """max, min, mean, final, sd (n - 1; None for one value) and n of the finite ones in their order; None without any."""
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return {"max": float(values.max()), "min": float(values.min()), "mean": float(values.mean()), "final": float(values[-1]),
            "sd": float(values.std(ddof=1)) if len(values) > 1 else None, "n": len(values)}


def _percent(train: dict, key: str) -> dict | None:
    """spread() of a GPU's percentage over the steps after those that compiled; of all steps where there are no others."""
    values = np.where((train[key] >= 0) & (train[key] <= 100), train[key], math.nan)
    return spread(values[train["since_start"] != 1]) or spread(values)


def _number(value) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e30 else None


# ------------------------------------------------------------------------------------------------------------- command

def main(words: list[str]) -> None:
    """The command's words after --report: writes the report, prints it. Raises UserError for a mistake in them."""
    paths, options = read_words(words, OPTIONS)
    if not paths:
        raise UserError("no runs given: name those of one training, as --report out/a_bf16 out/a_fp8")
    arms, notes = read_arms(paths)
    folder = Path(options.get("out") or arms[0].record.folder.parent / LAW_FOLDER)
    result = analyse(arms)
    if not any(arm.record.recipe == "bf16" for arm in arms):
        notes.append("no BF16 run among these: nothing to compare speed and loss with")
    figures = {name: figure for name, draw in DRAWINGS.items() if (figure := draw(arms)) is not None}
    files = {f"{name}.{form}": render(figure, form) for name, figure in figures.items() for form in ("png", "svg")}
    text = "\n\n".join(["# " + one_line(f"{len(arms)} runs of one training: {', '.join(arm.label for arm in arms)}"),
                        tables(result), *["\n".join(f"- {one_line(note)}" for note in notes)] * bool(notes)])
    page = "\n\n".join([text, *(f"![{name.removeprefix('report_')}]({name}.png)" for name in figures)])
    content = json.dumps({"format_version": 1, **result, "notes": notes}, indent=1, allow_nan=False)
    wrote = {**files, "report.json": (content + "\n").encode(), "report.md": (page + "\n").encode()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (f"{name}.{form}" for name in DRAWINGS for form in ("png", "svg")):
            if name not in files:       # of an earlier call: beside the new report.md it would pass for its own
                (folder / name).unlink(missing_ok=True)
        for name, data in wrote.items():
            write(folder / name, data)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None
    print(f"{text}\n\nwrote {folder}/: {', '.join(wrote)}")
