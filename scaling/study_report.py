"""The page and report.json of a study: its finished runs, and what the other commands found.

StudyReport is the schema of the file; docs/schemas.md is made of its fields and comments."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from lib.errors import UserError
from lib.text import listed, si
from scaling.declaration import Declaration, read_declaration
from scaling.gap_words import EVALUATION_WORDS
from scaling.law_file import read_law_file
from scaling.laws.forms import CHINCHILLA
from scaling.learning_rate import format_result
from scaling.pages import format_fixed, format_table
from scaling.precision_result import read_precision
from scaling.precision_tables import format_tables
from scaling.predictions import held_out, load
from scaling.rate_sweep import read_result
from scaling.records import (
    LAW_FOLDER,
    Record,
    from_scratch,
    mixed_weight_casts,
    read_json,
    read_runs,
    usable,
    without_repeats,
)
from scaling.training_report import CPU_NOTE

SCHEMA_VERSION = 1
MARK = "<!-- Written by scaling/report.py from the files beside it: edit those, not this page. -->"
EXPONENTS = ("alpha", "beta", "a", "b", "gamma")  # of laws, in the table of them


@dataclass(frozen=True)
class StudyRun:
    """The runs of one size, recipe, budget, learning rate and machine; null runs apart."""

    N: int  # parameters by the study's convention
    recipe: str  # " null" behind it where they are repeats
    tokens: int  # trained on
    tokens_per_param: float  # tokens over N
    lr_peak: float | None  # peak learning rate; null in older summaries
    runs: list[str]  # their names
    seeds: list[int]  # of the runs
    device: str  # name of the GPU, or of the CPU
    n_gpu: int  # ranks
    loss_bf16: float  # mean over the seeds, nats per token
    tok_per_s_median: float  # median over the runs
    loss_as_trained: float  # mean over the seeds
    speed_against_bf16: float | None  # tokens per second over those of BF16; null without BF16 runs


@dataclass(frozen=True)
class StudyReport:
    """What report.json of a study holds."""

    schema_version: int  # of this list of keys
    study: str | None  # its name
    declared: str | None  # UTC time, ISO 8601
    missing: list[str]  # declared runs that are not finished
    N: str  # key of summary.json that counts the parameters
    runs: list[StudyRun]  # a row for each group of runs
    inputs: dict[str, str]  # run -> sha256 of its summary.json


@dataclass(frozen=True)
class StudyPage:
    report: StudyReport
    text: str  # Markdown


def report_study_folder(folder: Path) -> StudyPage:
    """The page of a study whose runs lie in `folder`. Raises UserError where a file that another
    command left is damaged or of another version."""
    records, notes = read_runs([folder])
    records.sort(key=_order)
    declaration = read_declaration(folder)
    report = _report(records, declaration)
    is_sweep = _is_sweep(report.runs)
    notes += [
        f"{record.run_id}: its status is {record.status!r}"
        for record in records
        if record.status != "ok"
    ]
    notes += mixed_weight_casts(records)
    try:
        notes += _stale_notes(folder, records)
        sections = _sections(folder, records, report, declaration, is_sweep)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise UserError(
            f"{folder / LAW_FOLDER}: a file is damaged or of another version"
            f" ({type(error).__name__}: {error}): make it again by scaling/fit.py or precision.py"
        ) from error
    sections["Notes"] = "\n".join(f"- {note}" for note in notes)
    parts = [
        f"# The study {report.study or folder.resolve().name}",
        (
            f"{_format_state(records, report, declaration)}. This page: `python scaling/report.py"
            f" --study {folder}`."
        ),
    ]
    parts += [f"## {title}\n\n{section}" for title, section in sections.items() if section]
    return StudyPage(report, "\n\n".join(parts))


def _order(record: Record) -> tuple:
    return (
        record.N,
        not record.is_baseline,
        record.recipe,
        record.repeat,
        record.tokens,
        record.seed,
    )


def _report(records: Sequence[Record], declaration: Declaration | None) -> StudyReport:
    declared_runs = set(declaration.run_names) if declaration else set()
    missing = sorted(declared_runs - {record.run_id for record in records})
    return StudyReport(
        schema_version=SCHEMA_VERSION,
        study=declaration.study if declaration else None,
        declared=declaration.declared if declaration else None,
        missing=missing,
        N=f"params_{records[0].convention}",
        runs=study_runs(records),
        inputs={record.run_id: record.summary_sha256 for record in records},
    )


def _is_sweep(runs: Sequence[StudyRun]) -> bool:
    """Whether some size, recipe and budget has several learning rates."""
    trials = {(run.N, run.recipe, run.tokens, run.lr_peak) for run in runs}
    return len({trial[:3] for trial in trials}) < len(trials)


def _format_state(
    records: Sequence[Record], report: StudyReport, declaration: Declaration | None
) -> str:
    text = f"{len(records)} finished runs"
    if declaration is not None:
        text += f" of {len(declaration.runs)} declared on {declaration.declared}"
    if report.missing:
        text += f"; missing: {listed(report.missing)}"
    if declaration is not None and declaration.held_out:
        text += f"; held out: {listed(declaration.held_out)}"
    return text


def _sections(
    folder: Path,
    records: Sequence[Record],
    report: StudyReport,
    declaration: Declaration | None,
    is_sweep: bool,
) -> dict[str, str]:
    """Title -> text; empty where a section has nothing to say."""
    predictions = load(folder / LAW_FOLDER)
    has_held_out = declaration is not None and bool(declaration.held_out)
    has_arms = len({record.recipe for record in records}) > 1
    return {
        "Runs": f"{_format_runs(report.runs, is_sweep)} N: {report.N}.",
        "Laws": _format_file(folder, "law", not is_sweep, format_laws),
        "Predictions": (
            _format_predictions(predictions, folder) if predictions or has_held_out else ""
        ),
        "FP8 against BF16": _format_file(folder, "precision", has_arms, _format_precision),
        "Learning rate": _format_file(folder, "learning_rate", is_sweep, _format_learning_rate),
    }


def _format_precision(path: Path) -> str:
    """Its tables, and the second figure of precision.py where it has drawn one."""
    blocks = format_tables(read_precision(path))
    if path.with_name("budgets.png").is_file():
        blocks.append(f"![budgets]({LAW_FOLDER}/budgets.png)")
    return "\n\n".join(blocks)


def _format_learning_rate(path: Path) -> str:
    return format_result(read_result(path))


def _format_file(
    folder: Path, name: str, is_wanted: bool, format_content: Callable[[Path], str]
) -> str:
    """What another command found, with its figure; where that is missing, and wanted, the
    command."""
    path = folder / LAW_FOLDER / f"{name}.json"
    if not path.exists():
        if not is_wanted:
            return ""
        command = "fit" if name == "law" else name
        return f"**Missing:** {LAW_FOLDER}/{name}.json (`python scaling/{command}.py {folder}`)."
    figure = "figure" if name == "law" else name
    picture = f"{LAW_FOLDER}/{figure}.png"
    text = format_content(path)
    return f"![{name}]({picture})\n\n{text}" if (folder / picture).is_file() else text


def _stale_notes(folder: Path, records: Sequence[Record]) -> list[str]:
    """A line for each file that was made from other runs than those that are here now."""
    finished = usable(records)[0]
    points = from_scratch(without_repeats(finished)[0])[0]
    unfitted = held_out(points, load(folder / LAW_FOLDER))
    fitted = [record for record in points if record not in unfitted]
    notes = []
    for name, expected in (("law.json", fitted), ("precision.json", finished)):
        path = folder / LAW_FOLDER / name
        if path.exists() and _inputs_of(path) != _as_inputs(expected):
            notes.append(
                f"{LAW_FOLDER}/{name} was made from other runs than those that are here now: make"
                " it again"
            )
    return notes


def _inputs_of(path: Path) -> set[tuple[str, str]]:
    inputs = read_json(path)["inputs"]
    return {(run["run_id"], run["summary_sha256"]) for run in inputs}


def _as_inputs(records: Sequence[Record]) -> set[tuple[str, str]]:
    return {(record.run_id, record.summary_sha256) for record in records}


# -------------------------------------------------------------------------------------------- runs


def study_runs(records: Sequence[Record]) -> list[StudyRun]:
    """A row per size, recipe, budget, learning rate, machine, null or not."""
    groups: dict[tuple, list[Record]] = {}
    baselines: dict[tuple, list[Record]] = {}
    for record in records:
        setting = _setting(record)
        groups.setdefault((setting, record.recipe, record.repeat), []).append(record)
        if record.is_baseline and not record.repeat:
            baselines.setdefault(setting, []).append(record)
    return [_study_run(members, baselines) for members in groups.values()]


def _setting(record: Record) -> tuple:
    """What runs share that stand beside each other, whatever their precision."""
    machine = (record.device, record.n_gpu, record.is_compiled)
    return (record.N, record.tokens, record.lr_peak, *machine)


def _study_run(records: Sequence[Record], baselines: dict[tuple, list[Record]]) -> StudyRun:
    first = records[0]
    tok_per_s = median(record.tok_per_s_median for record in records)
    speed = None
    baseline = baselines.get(_setting(first))
    if baseline and not first.is_baseline:
        speed = tok_per_s / median(record.tok_per_s_median for record in baseline)
    return StudyRun(
        N=first.N,
        recipe=_arm_of(first),
        tokens=first.tokens,
        tokens_per_param=first.tokens / first.N,
        lr_peak=first.lr_peak,
        runs=[record.run_id for record in records],
        seeds=sorted({record.seed for record in records}),
        device=first.device,
        n_gpu=first.n_gpu,
        loss_bf16=mean(record.loss_bf16 for record in records),
        tok_per_s_median=tok_per_s,
        loss_as_trained=mean(record.loss_as_trained for record in records),
        speed_against_bf16=speed,
    )


def _arm_of(record: Record) -> str:
    """A run's precision, for people; null runs apart."""
    return f"{record.recipe} null" if record.repeat else record.recipe


def _format_runs(runs: Sequence[StudyRun], is_sweep: bool) -> str:
    rows = []
    for run in runs:
        count = f"{run.n_gpu} x " if run.n_gpu > 1 else ""
        rate = f"{run.lr_peak:g}" if is_sweep and run.lr_peak else None
        rows.append(
            {
                "N": si(run.N),
                "recipe": run.recipe,
                "tokens": si(run.tokens),
                "tokens/N": f"{run.tokens_per_param:.3g}",
                "peak rate": rate,
                "seeds": ", ".join(map(str, run.seeds)),
                "loss in BF16 [nats/token]": f"{run.loss_bf16:.4f}",
                "as trained": f"{run.loss_as_trained:.4f}",
                "tokens/s": format_fixed(run.tok_per_s_median, 0),
                "speed against BF16": format_fixed(run.speed_against_bf16, 3),
                "device": count + run.device,
            }
        )
    note = CPU_NOTE if any(run.device.startswith("cpu") for run in runs) else ""
    return (
        f"{format_table(rows)}\n\nLosses: means over the seeds; gaps of single pairs are below."
        f" Speed: of the median step.{note}"
    )


# -------------------------------------------------------------------------------------------- laws


def format_laws(path: Path) -> str:
    """Each recipe's headlined law, L(N, D) beside it where that is another, and why."""
    law = read_law_file(path)
    rows, reasons = [], []
    for recipe, group in law["groups"].items():
        form = group["headline"]["form"]
        rows.append(_law_row(recipe, f"{form} (headline)", group["laws"][form]))
        frontier = group.get("frontier")  # none in a law.json of older code
        if frontier:
            name = f"{frontier['form']} through the minima (frontier)"
            rows.append(_law_row(recipe, name, frontier))
        if form != CHINCHILLA:
            rows.append(_law_row(recipe, CHINCHILLA, group["laws"][CHINCHILLA]))
        reasons.append(f"- {recipe}: {group['headline']['reason']}")
    evaluation = law["conventions"]["loss"].removeprefix("loss_")
    return "\n\n".join(
        [
            format_table(rows),
            "\n".join(reasons),
            f"N: {law['conventions']['N']}. Losses: evaluated {EVALUATION_WORDS[evaluation]}.",
        ]
    )


def _law_row(recipe: str, name: str, fit: dict[str, Any]) -> dict[str, object]:
    """A line of the table of laws: one Fit.plain() of law.json."""
    ends = [
        f"{parameter} {low:.3g} to {high:.3g}"
        for parameter, (low, high) in (fit["ci95"] or {}).items()
        if parameter in EXPONENTS
    ]
    rms = fit["residual_rms"]
    return {
        "recipe": recipe,
        "law": name,
        "formula": fit["formula"] or "not fitted",
        "exponents, 95 %": ", ".join(ends),
        "residuals [%]": rms and f"{100 * rms:.3f}",
        "runs": fit["n"],
        "identified": "yes" if fit["identified"] else f"no: {fit['reason']}",
    }


# ------------------------------------------------------------------------------------- predictions


def _format_predictions(predictions: Sequence[Any], folder: Path) -> str:
    """What was frozen, and what came of it; a score of another prediction counts as none."""
    rows, missing = [], []
    if not predictions:
        missing.append(f"a frozen prediction (`python scaling/fit.py {folder} --predict RUN`)")
    for prediction in predictions:
        scored_runs = _scored_runs(prediction, folder)
        if not scored_runs:
            missing.append(
                f"the score of {prediction.target} (`python scaling/fit.py {folder} --score`)"
            )
        rows += [_prediction_row(prediction, run) for run in scored_runs or [{}]]
    parts = [format_table(rows)] if rows else []
    parts += [f"**Missing:** {what}." for what in missing]
    parts.append("Only a commit that holds a prediction and not its run shows that it is older.")
    return "\n\n".join(parts)


def _scored_runs(prediction: Any, folder: Path) -> list[dict[str, Any]]:
    path = folder / LAW_FOLDER / f"score_{prediction.target}.json"
    if not path.exists():
        return []
    score = read_json(path)
    return score["runs"] if score.get("prediction_sha256") == prediction.sha256 else []


def _prediction_row(prediction: Any, run: dict[str, Any]) -> dict[str, object]:
    """run: its score; empty where it has not come."""
    row: dict[str, object] = {
        "target": prediction.target,
        "frozen (UTC)": prediction.date,
        "sha256": f"`{prediction.sha256[:12]}`",
        "predicted [nats]": f"{prediction.loss:.4f}",
        "95 % interval": f"{prediction.low:.4f} to {prediction.high:.4f}",
        "by": prediction.headline,
    }
    if run:
        row["run"] = run.get("run_id")
        row["measured [nats]"] = format_fixed(run.get("loss"), 4)
        row["error [%]"] = f"{run['error_percent']:+.2f}"
        row["interval"] = "inside" if run["inside"] else "**outside**"
    return row


def page_content(page: StudyPage) -> dict[str, Any]:
    """The files of a page."""
    return {"report.json": asdict(page.report), "README.md": f"{MARK}\n{page.text}\n"}
