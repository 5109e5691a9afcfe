"""Read finished runs into checked, comparable records.

A record is the part of a run's summary.json that scaling/ uses. Whatever makes two losses
incomparable (another tokenizer, validation set or vocabulary, other source weights) is refused
here, before anything is fitted."""

import json
import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.files import file_sha256, read_rows
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
    # precision.recipe: "bf16", "tensorwise", ..., "trunk>decay" where a branch switched
    recipe: str
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
    convention: str = "total"  # or "nonembed": what the study beside the run counts its budgets by

    @property
    def N(self) -> int:
        """Parameters as the convention counts them: those of laws, ratios and labels."""
        return getattr(self, f"params_{self.convention}")

    @property
    def is_baseline(self) -> bool:
        """Whether it was trained in BF16, which the other recipes stand against."""
        return self.recipe == "bf16"


def read_runs(paths, convention: str | None = None) -> tuple[list[Record], list[str]]:
    """The records of run folders, or of folders whose sub-folders are runs, plus a line for each
    skipped. Never empty."""
    records, notes, folders = [], [], {}
    # by sweep.py: a shell's pattern has both
    for path in (path for path in map(Path, paths) if path.suffix != ".log"):
        if not path.is_dir():
            raise UserError(
                f"{path} does not exist or is a file: give a run's folder such as out/<run>, or one"
                " that holds such"
            )
        is_run = (path / "config.json").exists() or (path / "summary.json").exists()
        for folder in (
            [path]
            if is_run
            else sorted(one for one in path.iterdir() if one.is_dir() and one.name[0] != ".")
        ):
            folders.setdefault(folder.resolve(), folder)
    for folder in folders.values():
        if (folder / "summary.json").exists():
            records.append(read_record(folder, convention))
        elif folder.name != LAW_FOLDER:
            notes.append(f"skipped {folder}: no finished run (it has no summary.json)")
    if not records:
        raise UserError(
            "\n".join(
                [
                    (
                        f"no finished run in {', '.join(map(str, paths))}: expected folders with a"
                        " summary.json"
                    ),
                    *notes,
                ]
            )
        )
    return records, notes


def read_record(folder, convention: str | None = None) -> Record:
    """Read and check one run's summary.json; convention: another than its study's. Raises UserError
    naming the file, the key and what was expected."""
    folder = Path(folder)
    root = folder.absolute().parent
    path, study = folder / "summary.json", read_study(root)
    summary = read_json(path)
    try:
        if summary["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version {summary['schema_version']}, not {SCHEMA_VERSION}")
        # as val_losses.npz numbers them
        precision, sources = summary["precision"], sorted(summary["sources"].items())
        switched = f"{precision['switched_from']}>" if precision.get("switched_from") else ""
        plan = next((run for run in study.get("runs", []) if run["run"] == summary["run_id"]), {})
        total = sum(source["weight"] for _, source in sources)
        known: dict = {
            "folder": folder,
            "summary": summary,
            "summary_sha256": file_sha256(path),
            "recipe": switched + precision["recipe"],
            "is_compiled": precision["compile"],
            "convention": convention or study.get("params", "total"),
            "weights": {name: source["weight"] / total for name, source in sources},
            "trunk": (
                _root(root, summary.get("parent_run")) or plan.get("parent") or summary["run_id"]
            ),
            "decays_from": summary.get("parent_step") or plan.get("parent_step"),
        }
        record = Record(
            **known,
            **{
                one.name: summary[one.name]
                for one in fields(Record)
                if one.name not in known
                and (one.default is MISSING or summary.get(one.name) is not None)
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UserError(
            f"{path} is damaged or of another version ({type(error).__name__}: {error}): leave"
            " it out"
        ) from None
    wrong = type_problems("", record) or [
        f"{key}={value} is not above zero"
        for key, value in (vars(record) | record.weights).items()
        if type(value) in (int, float) and key not in ("seed", "repeat") and value <= 0
    ]
    if wrong:
        raise UserError(f"{path}: {wrong[0]}")
    return record


def _root(folder: Path, run: str | None) -> str | None:
    """The run at the start of the line of branches that `run` stands in, as far as their summaries
    lie in `folder`."""
    line = set()  # a run may have branched off another folder's run of its own name
    while (
        run
        and run not in line
        and (path := folder / run / "summary.json").exists()
        and (parent := read_json(path).get("parent_run"))
    ):
        line.add(run)
        run = parent
    return run


def usable(records) -> tuple[list[Record], list[str]]:
    """The records that may enter a fit, plus a line for each left out: failed, or stopped before
    annealing."""
    return _without(
        records,
        lambda one: (
            f"its status is {one.status!r}, not 'ok'"
            if one.status != "ok"
            else (
                not one.is_annealed
                and "its learning rate had not annealed, so its loss is no point of the law"
            )
        ),
    )


def from_scratch(records) -> tuple[list[Record], list[str]]:
    """The records whose tokens are all that their weights have seen, plus a line for each one left
    out of a law."""
    return _without(
        records,
        lambda one: (
            one.continued_from
            and (
                f"it goes on with {one.continued_from}, so its tokens are not all that its"
                " weights saw"
            )
        ),
    )


def without_repeats(records) -> tuple[list[Record], list[str]]:
    return _without(
        records,
        lambda one: (
            one.repeat
            and (
                "a repeat of the same seed and data is a null for scaling/precision.py, no point of"
                " its own"
            )
        ),
    )


def _without(records, reason_of) -> tuple[list[Record], list[str]]:
    return (
        [one for one in records if not reason_of(one)],
        [f"left out {one.run_id}: {reason}" for one in records if (reason := reason_of(one))],
    )


def check_comparable(records) -> None:
    """Raise UserError, naming two runs, where losses cannot stand in one fit or one point would
    count twice."""

    def kind(record: Record) -> dict:
        same = ("convention", "tokenizer_sha256", "val_sha256", "vocab_size", "vocab_padded")
        return {key: getattr(record, key) for key in same} | {
            "weights": {name: round(weight, 9) for name, weight in record.weights.items()}
        }

    for other in records[1:]:
        for key, mine in kind(records[0]).items():
            if mine != (its := kind(other)[key]):
                raise UserError(
                    f"{records[0].run_id} and {other.run_id} differ in {key} ({mine} against"
                    f" {its}): their losses cannot enter one fit; fit them apart"
                    + ", or with n=total"
                    * (key == "convention")
                )
    for keys in (("run_id",), ("recipe", "params_total", "tokens", "seed", "repeat")):
        seen = {}
        for record in records:
            twin = seen.setdefault(tuple(getattr(record, key) for key in keys), record)
            if twin is not record:
                raise UserError(
                    f"{twin.folder} and {record.folder} are one point given twice (same"
                    f" {', '.join(keys)}): leave one out"
                )


def read_curve(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and training loss (nats per token) of each step in metrics.jsonl, as done last; empty
    arrays if it is absent."""
    last = {
        row["step"]: (row["tokens"], row["loss"])
        for row in metrics_rows(read_rows(record.folder / "metrics.jsonl"))
        if row["kind"] == "train"
        and isinstance(row.get("loss"), float)
        and 0 < row["loss"] < math.inf
    }
    points = np.array(sorted(last.values()), dtype=float).reshape(-1, 2)
    return points[:, 0], points[:, 1]


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


def law_folder(paths, out: str | None) -> Path:
    """Where a command leaves what it found in the runs at `paths`: out, else law/ in the one folder
    that holds them."""
    if not out and (len(paths) != 1 or (Path(paths[0]) / "summary.json").exists()):
        raise UserError("out=DIR is missing: name the folder that receives the JSON and the figure")
    return Path(out or Path(paths[0]) / LAW_FOLDER)


def read_study(root: Path) -> dict:
    """The study.json of a folder of runs, as scaling/sweep.py writes it; {} where there is none."""
    path = root / "study.json"
    return read_json(path) if path.is_file() else {}
