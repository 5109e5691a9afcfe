"""report.json of one training in several precisions: losses, time, memory, speed, gaps.

TrainingReport is the schema of the file; docs/schemas.md is made of its fields and comments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from lib.errors import UserError
from scaling.histories import History, read_history
from scaling.pages import format_fixed, format_table
from scaling.paired.gaps import Gap, Pair, loss_of
from scaling.records import Record, read_runs
from scaling.typed_json import read_typed

SCHEMA_VERSION = 1
STATISTICS = ("max", "min", "mean", "final", "sd")  # of a loss, in its table
CPU_NOTE = " A CPU has no FP8 units: its speeds say nothing about a GPU."


@dataclass(frozen=True)
class TrainingRun:
    """One run of the training."""

    record: Record
    label: str  # its recipe, with the run's name where several have that recipe
    history: History  # the loss of a step without a target, 0, is NaN


@dataclass(frozen=True)
class Spread:
    """The finite values of a series, in their order."""

    max: float  # largest value
    min: float  # smallest value
    mean: float  # of the values
    final: float  # the last one
    sd: float | None  # with n - 1; null for one value
    n: int  # values


@dataclass(frozen=True)
class EvaluatedGap:
    """The gap to the BF16 run under one evaluation."""

    nats: float  # per token
    percent: float  # of the BF16 run's loss
    se: float | None  # standard error of nats over validation sequences
    se_percent: float | None  # the same in per cent of the BF16 run's loss


@dataclass(frozen=True)
class StepTime:
    """Seconds of all steps as they passed, undone ones too."""

    with_compile: float  # all of it
    without_compile: float  # less what compilation took
    compile: float  # what the first step after each start took beyond the median of the others


@dataclass(frozen=True)
class RunReport:
    """One run of the training."""

    run_id: str  # its name
    label: str  # its recipe, with the run's name where several have that recipe
    recipe: str  # label of its precision
    status: str  # ok or diverged
    device: str  # name of the GPU, or of the CPU
    n_gpu: int  # ranks
    is_compiled: bool  # whether torch.compile was used
    tokens: int  # trained on
    steps: int  # with a row in metrics.jsonl
    summary_sha256: str  # of its summary.json
    loss_as_trained: float  # nats per token
    loss_bf16: float  # the same weights through BF16 matmuls
    train_loss: Spread | None  # nats per token
    val_loss: Spread | None  # as trained, nats per token
    gap: dict[str, EvaluatedGap] | None  # evaluation -> gap; null: no BF16 run
    tok_per_s_median: float  # tokens per second, median over steps
    speed_against_bf16: float | None  # tokens per second over those of the BF16 run
    step_time_s: StepTime  # time of its steps
    memory_percent: Spread | None  # allocated of the first rank's GPU, after the first step
    utilisation_percent: Spread | None  # of the first rank's GPU
    wall_s: float | None  # of the whole run
    mem_peak_gib: float | None  # largest memory allocated; null on a CPU


@dataclass(frozen=True)
class TrainingReport:
    """What report.json of one training holds."""

    schema_version: int  # of this list of keys
    pair_id: str  # equal in runs that differ in precision alone
    runs: list[RunReport]  # BF16 and its repeats first
    notes: list[str]  # what was left out, or is worth knowing


def read_training_report(path: Path) -> TrainingReport:
    """A report.json of one training, also of older code. Raises UserError as read_typed()."""
    return read_typed(TrainingReport, path, SCHEMA_VERSION, "report")


def report_training_runs(
    runs: Sequence[TrainingRun], pairs: Sequence[Pair], notes: list[str]
) -> TrainingReport:
    """pairs: those among the runs."""
    by_folder = {pair.fp8.folder: pair for pair in pairs if isinstance(pair.fp8, Record)}
    reports = [_report_run(run, by_folder.get(run.record.folder)) for run in runs]
    return TrainingReport(SCHEMA_VERSION, runs[0].record.pair_id, reports, notes)


# ------------------------------------------------------------------------------------------ reading


def read_training_runs(paths: Sequence[str | Path]) -> tuple[list[TrainingRun], list[str]]:
    """Finished runs, BF16 and its repeats first; plus a line for each thing left out or worth
    knowing. Raises UserError where they are not of one training."""
    records, notes = read_runs(paths)
    records.sort(key=lambda record: (not record.is_baseline, record.repeat))
    runs: list[TrainingRun] = []
    for record in records:
        _check_same_training(records[0], record)
        run = TrainingRun(record, _label(record, records), _read_history(record))
        notes += _notes_on(run)
        runs.append(run)
    return runs, notes


def _check_same_training(first: Record, record: Record) -> None:
    for key in ("pair_id", "val_sha256", "tokenizer_sha256", "data_sha256"):
        if record.summary.get(key) != first.summary.get(key):
            raise UserError(
                f"{first.folder} and {record.folder} differ in more than the precision"
                f" ({key}): give the runs of one training, alike in seed, data and settings"
            )


def _label(record: Record, records: Sequence[Record]) -> str:
    if sum(run.recipe == record.recipe for run in records) == 1:
        return record.recipe
    is_named_once = sum(run.run_id == record.run_id for run in records) == 1
    return f"{record.recipe} ({record.run_id if is_named_once else record.folder})"


def _read_history(record: Record) -> History:
    history = read_history(record.folder)
    train = history.train
    if not len(train["step"]):
        raise UserError(
            f"{record.folder / 'metrics.jsonl'} holds no step that counts: restore it, or leave"
            " the run out"
        )
    train["loss"][train["loss"] == 0] = math.nan
    return history


def _notes_on(run: TrainingRun) -> list[str]:
    """What is missing in the rows of a run, or went wrong."""
    record, train = run.record, run.history.train
    steps = record.summary.get("steps", 0) - (record.parent_step or 0)
    missing = max(0, steps - len(train["step"]))
    without_loss = int(np.isnan(train["loss"]).sum())
    rollbacks = len(run.history.undone)
    notes = []
    if missing:
        notes.append(f"{missing} of {steps} steps have no row in metrics.jsonl: time is too short")
    if without_loss:
        notes.append(
            f"{without_loss} steps had no target or no finite loss: left out of the statistics"
        )
    if rollbacks:
        notes.append(f"{rollbacks} times it went back: that time is counted, those losses are not")
    if record.status != "ok":
        notes.append(f"its status is {record.status!r}")
    return [f"{run.label}: {note}" for note in notes]


# --------------------------------------------------------------------------------------- one run


def _report_run(run: TrainingRun, pair: Pair | None) -> RunReport:
    record, history = run.record, run.history
    train = history.train
    is_first = train["since_start"] == 1
    return RunReport(
        run_id=record.run_id,
        label=run.label,
        recipe=record.recipe,
        status=record.status,
        device=record.device,
        n_gpu=record.n_gpu,
        is_compiled=record.is_compiled,
        tokens=record.tokens,
        steps=len(train["step"]),
        summary_sha256=record.summary_sha256,
        loss_as_trained=record.loss_as_trained,
        loss_bf16=record.loss_bf16,
        train_loss=spread(train["loss"]),
        val_loss=spread(history.val["loss"]),
        gap=None if pair is None else _evaluated_gaps(pair),
        tok_per_s_median=record.tok_per_s_median,
        speed_against_bf16=None if pair is None else pair.tok_per_s_ratio,
        step_time_s=_step_time(history),
        memory_percent=spread(train["gpu_mem_pct"][~is_first]),
        utilisation_percent=spread(train["gpu_util_pct"][~is_first]),
        wall_s=record.summary.get("wall_s"),
        mem_peak_gib=record.summary.get("mem_peak_gib"),
    )


def _evaluated_gaps(pair: Pair) -> dict[str, EvaluatedGap]:
    return {name: _evaluated(pair, name, pair.gap[name]) for name in ("as_trained", "bf16")}


def _evaluated(pair: Pair, evaluation: str, gap: Gap) -> EvaluatedGap:
    se_percent = gap.se
    if gap.se:
        se_percent = 100 * gap.se / loss_of(pair.bf16, evaluation)
    return EvaluatedGap(gap.nats, gap.percent, gap.se, se_percent)


def _step_time(history: History) -> StepTime:
    """Of a run all of whose steps are first ones nothing is counted as compilation."""
    train = history.train
    is_first = train["since_start"] == 1
    usual = math.inf if is_first.all() else float(np.nanmedian(train["step_s"][~is_first]))
    undone = sum(np.nansum(stretch["step_s"]) for stretch in history.undone)
    whole = float(np.nansum(train["step_s"]) + undone)
    compiling = float(np.nansum(np.maximum(train["step_s"][is_first] - usual, 0)))
    return StepTime(whole, whole - compiling, compiling)


def spread(series: ArrayLike) -> Spread | None:
    """The Spread of the finite values of a `series`, shape (n,); None without any."""
    values = np.asarray(series, dtype=float)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return Spread(
        max=float(values.max()),
        min=float(values.min()),
        mean=float(values.mean()),
        final=float(values[-1]),
        sd=float(values.std(ddof=1)) if len(values) > 1 else None,
        n=len(values),
    )


# ----------------------------------------------------------------------------------------- tables


def format_training(rows: Sequence[RunReport]) -> str:
    """Training loss, validation loss, what they cost; each with what its columns mean below."""
    is_cpu = any(row.device.startswith("cpu") for row in rows)
    cost_note = (
        "Speed and tokens/s: of the median step. Compilation: what the first step after each"
        " start took beyond it. Whole run: with start and validations. Memory and utilisation:"
        " of the first rank's GPU after the first step; peak: PyTorch's own."
    )
    training = [_training_cells(row) for row in rows]
    validation = [_validation_cells(row) for row in rows]
    costs = [_cost_cells(row) for row in rows]
    return "\n\n".join(
        [
            "**Training loss [nats/token]**",
            format_table(training),
            "**Validation loss, as trained [nats/token]**",
            format_table(validation),
            (
                "Loss of all steps that count; sd (n - 1): of the single values around their mean,"
                " so mostly the way down. Gap: final loss minus the BF16 run's on the same"
                " sequences, ± one standard error of the evaluation, not of the run."
            ),
            "**Time, memory, speed**",
            format_table(costs),
            cost_note + (CPU_NOTE if is_cpu else ""),
        ]
    )


def _loss_cells(loss: Spread | None) -> dict[str, object]:
    return {
        name: None if loss is None else format_fixed(getattr(loss, name), 4) for name in STATISTICS
    }


def _training_cells(row: RunReport) -> dict[str, object]:
    steps = 0 if row.train_loss is None else row.train_loss.n
    return {"recipe": row.label, **_loss_cells(row.train_loss), "steps": steps}


def _validation_cells(row: RunReport) -> dict[str, object]:
    validations = 0 if row.val_loss is None else row.val_loss.n
    cells = {"recipe": row.label, **_loss_cells(row.val_loss), "validations": validations}
    for evaluation, gap in (row.gap or {}).items():
        words = "in BF16" if evaluation == "bf16" else "as trained"
        text = f"{gap.percent:+.3f}"
        if gap.se:
            text += f" ± {format_fixed(gap.se_percent, 3)}"
        cells[f"gap {words} [%]"] = text
    return cells


def _cost_cells(row: RunReport) -> dict[str, object]:
    memory = None if row.memory_percent is None else row.memory_percent.mean
    utilisation = None if row.utilisation_percent is None else row.utilisation_percent.mean
    return {
        "recipe": row.label,
        "speed against BF16": format_fixed(row.speed_against_bf16, 3),
        "tokens/s": format_fixed(row.tok_per_s_median, 0),
        "steps [s]": format_fixed(row.step_time_s.with_compile, 2),
        "without compilation [s]": format_fixed(row.step_time_s.without_compile, 2),
        "compilation [s]": format_fixed(row.step_time_s.compile, 2),
        "whole run [s]": format_fixed(row.wall_s, 2),
        "memory allocated, mean [%]": format_fixed(memory, 1),
        "memory, peak [GiB]": format_fixed(row.mem_peak_gib, 2),
        "GPU utilisation, mean [%]": format_fixed(utilisation, 1),
    }
