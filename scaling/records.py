"""Read finished runs into checked, comparable records.

A record is the part of a run's summary.json that scaling/ uses. Whatever makes two losses
incomparable (another tokenizer, validation set or vocabulary, other source weights) is refused
here, before anything is fitted."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fp8.trained_precision import TrainedPrecision, read_precision
from lib.errors import UserError
from lib.files import file_sha256, read_rows
from lib.text import listed
from lib.values import type_problems
from runtime.metrics_file import metrics_rows

SCHEMA_VERSION = 1
LAW_FOLDER = "law"  # beside the runs: where fit.py leaves its law.json


@dataclass(frozen=True)
class Record:
    """One finished run: what its summary.json says, counts under every convention, losses in nats
    per token."""

    folder: Path
    summary: dict  # all of the file
    summary_sha256: str  # of the file's bytes; law.json names its inputs by it
    run_id: str
    pair_id: str  # equal in runs that differ in precision alone
    precision: TrainedPrecision
    status: str
    is_annealed: bool  # the learning rate had come down to its last value
    seed: int
    device: str
    n_gpu: int
    is_compiled: bool
    val_sha256: str
    tokenizer_sha256: str
    vocab_size: int
    vocab_padded: int
    params_total: int
    params_nonembed: int
    params_matmul: int
    flops_per_token: float  # 6 params_matmul + 12 n_layer n_head head_dim n_ctx
    flops_per_token_causal: float  # the same with half the attention
    flops_per_token_6n_total: float
    flops_per_token_6n_nonembed: float
    flops_per_token_6n_matmul: float
    tokens: int  # trained on
    loss_as_trained: float
    loss_bf16: float  # the same weights through plain BF16 matmuls
    tok_per_s_median: float
    weights: dict[str, float]  # source -> its share of the loss; they add to 1
    trunk: str  # the run that it shares its training with; branches of branches have the same
    # optimizer step of the checkpoint that it branched off; None from scratch
    parent_step: int | None = None
    # the same, also of a branch trained from scratch as its trunk's checkpoint was gone
    decays_from: int | None = None
    # imported model whose training it goes on with: its own tokens are not all
    continued_from: str | None = None
    t_start: str | None = None  # UTC time of the first start, ISO; None in older summaries
    lr_peak: float | None = None  # peak learning rate; None in older summaries
    repeat: int = 0  # above 0: the same run once more, only rounded otherwise; a null, in no fit
    # precision.weights_cast_from: "fp32" or "bf16"; None for runs in BF16, and where an older
    # summary does not tell
    weights_cast_from: str | None = None
    convention: str = "total"  # or "nonembed": what the study beside the run counts its budgets by

    @property
    def N(self) -> int:
        """Parameters as the convention counts them: those of laws, ratios and labels."""
        return getattr(self, f"params_{self.convention}")

    @property
    def recipe(self) -> str:
        """The label of its precision: runs of one recipe are fitted and compared together."""
        return self.precision.label

    @property
    def is_baseline(self) -> bool:
        """Whether it was trained in BF16, which the other recipes stand against."""
        return self.precision.is_bf16


def read_runs(
    paths: Iterable[str | Path], convention: str | None = None
) -> tuple[list[Record], list[str]]:
    """The records of run folders, or of folders whose sub-folders are runs, plus a line for each
    skipped. Never empty."""
    names = [str(path) for path in paths]
    folders: dict[Path, Path] = {}  # a run that two paths name counts once
    for name in names:
        if name.endswith(".log"):  # by sweep.py: a shell's pattern has both
            continue
        for folder in _folders_of_runs(Path(name)):
            folders.setdefault(folder.resolve(), folder)
    records, notes = [], []
    for folder in folders.values():
        if (folder / "summary.json").exists():
            records.append(read_record(folder, convention))
        elif folder.name != LAW_FOLDER:
            notes.append(f"skipped {folder}: no finished run (it has no summary.json)")
    if not records:
        sentence = f"no finished run in {', '.join(names)}: expected folders with a summary.json"
        raise UserError("\n".join([sentence, *notes]))
    return records, notes


def _folders_of_runs(path: Path) -> list[Path]:
    """The folder itself where it is a run's, else its sub-folders."""
    if not path.is_dir():
        raise UserError(
            f"{path} does not exist or is a file: give a run's folder such as out/<run>, or one"
            " that holds such"
        )
    if (path / "config.json").exists() or (path / "summary.json").exists():
        return [path]
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and folder.name[0] != ".")


def read_record(folder: str | Path, convention: str | None = None) -> Record:
    """Read and check one run's summary.json; convention: another than its study's. Raises UserError
    naming the file, the key and what was expected."""
    folder = Path(folder)
    path, study = folder / "summary.json", read_study(folder.absolute().parent)
    summary = read_json(path)
    try:
        record = _record(folder, summary, study, convention)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UserError(
            f"{path} is damaged or of another version ({type(error).__name__}: {error}): leave"
            " it out"
        ) from None
    wrong = type_problems("", record) or _not_above_zero(record)
    if wrong:
        raise UserError(f"{path}: {wrong[0]}")
    return record


def _record(folder: Path, summary: dict, study: dict, convention: str | None) -> Record:
    """The record of a summary; raises what a damaged one leads to."""
    if summary["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version {summary['schema_version']}, not {SCHEMA_VERSION}")
    precision = read_precision(summary)
    plan = _plan_of(summary["run_id"], study)
    root = folder.absolute().parent
    trunk = _root(root, summary.get("parent_run")) or plan.get("parent") or summary["run_id"]
    values: dict[str, Any] = {
        "folder": folder,
        "summary": summary,
        "summary_sha256": file_sha256(folder / "summary.json"),
        "precision": precision,
        "is_compiled": summary["precision"]["compile"],
        "weights_cast_from": _weights_cast_from(summary, precision),
        "convention": convention or study.get("params", "total"),
        "weights": _weights(summary["sources"]),
        "trunk": trunk,
        "decays_from": summary.get("parent_step") or plan.get("parent_step"),
    }
    for f in fields(Record):
        is_optional = f.default is not MISSING
        if f.name in values or (is_optional and summary.get(f.name) is None):
            continue
        values[f.name] = summary[f.name]
    return Record(**values)


# of which an older summary does not say whether torchao's prototype, which rounds weights to BF16
# first, or an emulation cast them
CAST_BY_A_PROTOTYPE = ("mxfp8",)


def _weights_cast_from(summary: dict, precision: TrainedPrecision) -> str | None:
    """Record.weights_cast_from of a run. Summaries without the key: a single rank cast whole fp32
    weights, where no prototype may have."""
    if "weights_cast_from" in summary["precision"]:
        return summary["precision"]["weights_cast_from"]
    settings = precision.settings[-1]
    if settings is None or summary["n_gpu"] > 1:
        return None
    is_on_cpu = summary["device"].startswith("cpu")
    is_known = is_on_cpu or settings["recipe"] not in CAST_BY_A_PROTOTYPE
    return "fp32" if is_known else None


def _weights(sources: dict[str, dict]) -> dict[str, float]:
    """Source -> its share, in the order in which val_losses.npz numbers them."""
    weights = {name: sources[name]["weight"] for name in sorted(sources)}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _plan_of(run_id: str, study: dict) -> dict[str, Any]:
    """What the study.json beside a run says of it; {} where it says nothing."""
    return next((run for run in study.get("runs", []) if run["run"] == run_id), {})


def _not_above_zero(record: Record) -> list[str]:
    """A line for each number that must be above zero and is not."""
    values = vars(record) | record.weights
    return [
        f"{key}={value} is not above zero"
        for key, value in values.items()
        if type(value) in (int, float) and key not in ("seed", "repeat") and value <= 0
    ]


def _root(folder: Path, run: str | None) -> str | None:
    """The run at the start of the line of branches that `run` stands in, as far as their summaries
    lie in `folder`."""
    line: set[str] = set()  # a run may have branched off another folder's run of its own name
    while run and run not in line:
        path = folder / run / "summary.json"
        parent = read_json(path).get("parent_run") if path.exists() else None
        if not parent:
            break
        line.add(run)
        run = parent
    return run


# ------------------------------------------------------------------------------- what enters a fit


def usable(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """The records that may enter a fit, plus a line for each left out: failed, or stopped before
    annealing."""
    return _without(records, _unusable)


def _unusable(record: Record) -> str | None:
    if record.status != "ok":
        return f"its status is {record.status!r}, not 'ok'"
    if not record.is_annealed:
        return "its learning rate had not annealed, so its loss is no point of the law"
    return None


def from_scratch(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """The records whose tokens are all that their weights have seen, plus a line for each one left
    out of a law."""
    return _without(records, _continued)


def _continued(record: Record) -> str | None:
    if not record.continued_from:
        return None
    return (
        f"it goes on with {record.continued_from}, so its tokens are not all that its weights saw"
    )


def without_repeats(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """The records that are no null runs, plus a line for each that is."""
    return _without(records, _repeated)


def _repeated(record: Record) -> str | None:
    if not record.repeat:
        return None
    return (
        "a repeat of the same seed and data is a null for scaling/precision.py, no point of its own"
    )


def _without(
    records: Iterable[Record], reason_of: Callable[[Record], str | None]
) -> tuple[list[Record], list[str]]:
    """The records without a reason, a line for each of the others."""
    usable_records, notes = [], []
    for record in records:
        reason = reason_of(record)
        if reason is None:
            usable_records.append(record)
        else:
            notes.append(f"left out {record.run_id}: {reason}")
    return usable_records, notes


def check_comparable(records: Sequence[Record]) -> None:
    """Raise UserError, naming two runs, where losses cannot stand in one fit or one point would
    count twice."""
    for record in records[1:]:
        _check_same_kind(records[0], record)
    for keys in (("run_id",), ("recipe", "params_total", "tokens", "seed", "repeat")):
        first_of: dict[tuple, Record] = {}
        for record in records:
            twin = first_of.setdefault(tuple(getattr(record, key) for key in keys), record)
            if twin is not record:
                raise UserError(
                    f"{twin.folder} and {record.folder} are one point given twice (same"
                    f" {', '.join(keys)}): leave one out"
                )


def _check_same_kind(first: Record, second: Record) -> None:
    """Raise UserError where two runs count, tokenise or are validated differently."""
    first_kind, second_kind = _kind(first), _kind(second)
    for key, value in first_kind.items():
        if value == second_kind[key]:
            continue
        remedy = "fit them apart"
        if key == "convention":
            remedy += ", or with n=total"
        raise UserError(
            f"{first.run_id} and {second.run_id} differ in {key} ({value} against"
            f" {second_kind[key]}): their losses cannot enter one fit; {remedy}"
        )


def _kind(record: Record) -> dict[str, Any]:
    """What runs of one fit have in common."""
    keys = ("convention", "tokenizer_sha256", "val_sha256", "vocab_size", "vocab_padded")
    weights = {name: round(weight, 9) for name, weight in record.weights.items()}
    return {key: getattr(record, key) for key in keys} | {"weights": weights}


def mixed_weight_casts(records: Iterable[Record]) -> list[str]:
    """A sentence for each recipe some of whose runs round weights to FP8 from fp32 and others from
    BF16: one label, two kinds of operands."""
    runs: dict[str, dict[str, list[str]]] = {}
    for record in records:
        if record.weights_cast_from is not None:
            casts = runs.setdefault(record.recipe, {})
            casts.setdefault(record.weights_cast_from, []).append(record.run_id)
    sentences = []
    for recipe, casts in runs.items():
        if len(casts) > 1:
            sentences.append(
                f"{recipe} mixes operands: weights were rounded to FP8 from fp32 in"
                f" {listed(casts['fp32'], 2)}, but from BF16, in which FSDP2 gathers them, in"
                f" {listed(casts['bf16'], 2)}; name one parallel.shard for all of its runs"
            )
    return sentences


def read_curve(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and training loss (nats per token) of each step in metrics.jsonl, as done last; empty
    arrays if it is absent."""
    by_step = {}
    for row in metrics_rows(read_rows(record.folder / "metrics.jsonl")):
        if row["kind"] == "train" and _is_loss(row.get("loss")):
            by_step[row["step"]] = row["tokens"], row["loss"]
    points = np.array(sorted(by_step.values()), dtype=float).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def _is_loss(value: object) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def read_json(path: Path) -> dict:
    """The object that a JSON file holds. Raises UserError naming the file where it cannot be read
    or holds none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(
            f"{path} is not valid JSON ({error}): it is cut off or edited; restore it or leave"
            " it out"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def law_folder(paths: Sequence[str], out: str | None) -> Path:
    """Where a command leaves what it found in the runs at `paths`: out, else law/ in the one folder
    that holds them."""
    if not out and (len(paths) != 1 or (Path(paths[0]) / "summary.json").exists()):
        raise UserError("out=DIR is missing: name the folder that receives the JSON and the figure")
    return Path(out or Path(paths[0]) / LAW_FOLDER)


def read_study(root: Path) -> dict:
    """The study.json of a folder of runs, as scaling/sweep.py writes it; {} where there is none."""
    path = root / "study.json"
    return read_json(path) if path.is_file() else {}
