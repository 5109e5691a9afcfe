"""Read finished runs into checked, comparable records.

A record is the part of a run's summary.json that scaling/ uses. Whatever makes two losses incomparable (another
tokenizer, validation set or vocabulary, other source weights) is refused here, before anything is fitted.
"""

import hashlib
import json
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

import numpy as np

from runtime.cli import UserError, type_problems
from runtime.machine import metrics_rows, read_rows

SCHEMA_VERSION = 1
LAW_FOLDER = "law"          # beside the runs: where fit.py leaves its law.json
LARGEST = 1e300             # JSON knows whole numbers of any length; sums of what lies above do not fit a float
CONVENTIONS = ("total", "nonembed")     # which parameters are N: params_total, or params_nonembed


@dataclass(frozen=True)
class Record:
    """One finished run: what its summary.json says, counts under every convention, losses in nats per token."""

    folder: Path
    summary_sha256: str                 # of the file's bytes; law.json names its inputs by it
    run_id: str
    pair_id: str                        # equal in runs that differ in precision alone
    recipe: str                         # precision.recipe: "bf16", "tensorwise", ..., "trunk>decay" where a branch switched
    status: str
    is_annealed: bool                   # the learning rate had come down to its last value
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
    flops_per_token: float              # 6 params_matmul + 12 n_layer n_head head_size n_ctx
    flops_per_token_causal: float       # the same with half the attention
    flops_per_token_6n_total: float
    flops_per_token_6n_nonembed: float
    flops_per_token_6n_matmul: float
    tokens: int                         # trained on
    loss_as_trained: float
    loss_bf16: float                    # the same weights through plain BF16 matmuls
    tok_per_s_median: float
    weights: dict[str, float]           # source -> its share of the loss; they add to 1
    parent_run: str | None = None       # run whose checkpoint this one branched off; None from scratch
    parent_step: int | None = None      # optimizer step of that checkpoint
    continued_from: str | None = None   # imported model whose training it goes on with: its own tokens are not all
    t_start: str | None = None          # UTC time of the first start, ISO; None in older summaries
    lr_peak: float | None = None        # peak learning rate; None in older summaries
    repeat: int = 0                     # above 0: the same run once more, only rounded otherwise; a null, in no fit
    convention: str = "total"           # of CONVENTIONS: what the study beside the run counts its budgets by
    planned: tuple | None = None        # trunk and step that the study beside the run has it branch off
    root: str | None = None             # of a branch: the run that its line of branches began with

    @property
    def N(self) -> int:
        """Parameters as the convention counts them: those of laws, ratios and labels."""
        return getattr(self, f"params_{self.convention}")

    @property
    def trunk(self) -> str:
        """The run that this one shares its training with: branches of one trunk are one cluster, and so are those of a branch. A
        branch trained from scratch, where its trunk's checkpoint was gone, has its trunk's seed, data and schedule."""
        return self.root or (self.planned[0] if self.planned else self.run_id)

    @property
    def decays_from(self) -> int | None:
        """Step of the trunk's checkpoint that this run left, or would have left; None for a trunk."""
        return self.parent_step or (self.planned[1] if self.planned else None)


def read_runs(paths) -> tuple[list[Record], list[str]]:
    """Read run folders, or folders whose sub-folders are runs; give the records plus a line for each folder skipped. Raises
    UserError for a path that does not exist, a damaged summary.json, or no finished run at all."""
    records, notes, folders = [], [], {}
    for path in map(Path, paths):
        if path.suffix == ".log" and path.with_suffix("").is_dir():     # sweep.py's of that run: a pattern of the shell has both
            continue
        if not path.is_dir():
            raise UserError(f"{path} {'is a file' if path.exists() else 'does not exist'}: give a run's folder such as "
                            "out/<run>, or a folder that holds such folders")
        is_run = (path / "summary.json").exists() or _is_begun(path)
        for folder in [path] if is_run else sorted(one for one in path.iterdir() if one.is_dir() and one.name[0] != "."):
            folders.setdefault(folder.resolve(), folder)
    for folder in folders.values():
        if (folder / "summary.json").exists():
            records.append(read_record(folder))
        elif _is_begun(folder):
            notes.append(f"skipped {folder}: the run is unfinished (it has no summary.json)")
        elif any(folder.glob("*/summary.json")):
            notes.append(f"skipped {folder}: it is no run but holds runs: give {folder} itself")
        elif not (folder / "law.json").exists() and folder.name != LAW_FOLDER:
            notes.append(f"skipped {folder}: it is no run (neither summary.json nor config.json in it)")
    if not records:
        raise UserError("\n".join([f"no finished run in {', '.join(map(str, paths))}: expected folders with a "
                                   "summary.json, which train.py writes at the end of a run", *notes]))
    return records, notes


def _is_begun(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoints"))


COMPUTED = ("folder", "summary_sha256", "recipe", "is_compiled", "weights", "convention", "planned", "root")
MAY_BE_ZERO = ("seed", "repeat")


def read_record(folder) -> Record:
    """Read and check one run's summary.json. Raises UserError naming the file, the key and what was expected."""
    folder = Path(folder)
    path, study = folder / "summary.json", read_study(folder.absolute().parent)
    summary = read_json(path)
    if summary.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version is {summary.get('schema_version')!r}; expected {SCHEMA_VERSION}, "
                        "so the run comes from another version of train.py")
    try:
        precision, sources = summary["precision"], summary["sources"]
        switched = f"{precision['switched_from']}>" if precision.get("switched_from") else ""
        values = {one.name: summary[one.name] for one in fields(Record) if one.name not in COMPUTED and (
            one.default is MISSING or summary.get(one.name) is not None)}
        planned = next((run for run in study.get("runs", []) if run["run"] == values["run_id"] and run.get("parent")), None)
        record = Record(folder=folder, summary_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                        recipe=switched + precision["recipe"], is_compiled=precision["compile"],
                        weights={name: sources[name]["weight"] for name in sorted(sources)},    # as val_losses.npz numbers them
                        convention=study.get("params", CONVENTIONS[0]),     # studies from before the choice say nothing
                        planned=planned and (planned["parent"], planned["parent_step"]), **values,
                        root=_root(folder.absolute().parent, values.get("parent_run")))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or of another version ({type(error).__name__}: {error}): restore it, or leave the "
                        "run out") from None
    numbers = {**vars(record), **{f"sources.{name}.weight": weight for name, weight in record.weights.items()}}
    wrong = type_problems("", record) or [
        f"{key}={value} is not above zero" for key, value in numbers.items()
        if type(value) in (int, float) and key not in MAY_BE_ZERO and not 0 < value < LARGEST]
    if wrong:
        raise UserError(f"{path}: {wrong[0]}")
    total = sum(record.weights.values())
    return replace(record, weights={name: weight / total for name, weight in record.weights.items()})


def _root(folder: Path, run: str | None) -> str | None:
    """The run that the line of branches which `run` stands in began with, as far as their summaries lie in `folder`."""
    line: list[str] = []
    while run and run not in line:
        line.append(run)
        path = folder / run / "summary.json"
        run = read_json(path).get("parent_run") if path.exists() else None
    return line[-1] if line else None


def usable(records) -> tuple[list[Record], list[str]]:
    """The records that may enter a fit, plus a line for each left out: failed, or stopped before annealing. The schedule's
    horizon must match the tokens (Hoffmann et al. 2022, section 3.1)."""
    return _without(records, lambda record: (
        f"its status is {record.status!r}, not 'ok'" if record.status != "ok" else
        None if record.is_annealed else "its learning rate had not annealed, so its loss is no point of the law"))


def from_scratch(records) -> tuple[list[Record], list[str]]:
    """The records whose tokens are all that their weights have seen, plus a line for each one left out of a law."""
    return _without(records, lambda record: record.continued_from and (
        f"it goes on with {record.continued_from}, so its tokens are not all that its weights saw"))


def without_repeats(records) -> tuple[list[Record], list[str]]:
    """The records that repeat no other one, plus a line for each one that does."""
    return _without(records, lambda record: record.repeat and (
        "a repeat of the same seed and data is a null for scaling/precision.py, no point of its own"))


def _without(records, reason_of) -> tuple[list[Record], list[str]]:
    reasons = [reason_of(record) for record in records]
    return ([record for record, reason in zip(records, reasons, strict=True) if not reason],
            [f"left out {record.run_id}: {reason}" for record, reason in zip(records, reasons, strict=True) if reason])


def counted_as(records, convention: str | None) -> list[Record]:
    """The records with N counted by one of CONVENTIONS; as they are where that is None."""
    return [record if convention is None else replace(record, convention=convention) for record in records]


def check_comparable(records) -> None:
    """Raise UserError, naming two runs, where losses cannot stand in one fit or one point would count twice."""
    for other in records[1:]:
        first = records[0]
        if other.convention != first.convention:
            raise UserError(f"{first.folder} belongs to a study that counts {first.convention} parameters and "
                            f"{other.folder} to one that counts {other.convention}: say which for both, n=total or n=nonembed")
        for field in ("tokenizer_sha256", "val_sha256", "vocab_size", "vocab_padded", "weights"):
            mine, its = getattr(first, field), getattr(other, field)
            if field == "weights" and mine.keys() == its.keys() and all(abs(mine[name] - its[name]) <= 1e-9 for name in mine):
                continue
            if mine != its:
                raise UserError(f"{first.run_id} and {other.run_id} differ in {field} ({mine} against {its}): their losses "
                                "cannot enter one fit; fit them apart")
    for keys in (("run_id",), ("recipe", "params_total", "tokens", "seed", "repeat")):
        seen = {}
        for record in records:
            twin = seen.setdefault(tuple(getattr(record, key) for key in keys), record)
            if twin is not record:
                raise UserError(f"{twin.folder} and {record.folder} are one point given twice (same {', '.join(keys)}): leave "
                                "one out")


def read_curve(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and training loss (nats per token) of each step in metrics.jsonl, as done last; empty arrays if it is absent."""
    last = {}
    for row in metrics_rows(read_rows(record.folder / "metrics.jsonl")):
        tokens, loss = row.get("tokens", 0), row.get("loss")
        if row["kind"] == "train" and type(loss) in (int, float) and 0 < loss < LARGEST and tokens > 0:
            last[row["step"]] = (tokens, loss)
    points = np.array(sorted(last.values()), dtype=float).reshape(-1, 2)
    return points[:, 0], points[:, 1]


# --------------------------------------------------------------------------------------------------------------- files

def listed(items, most: int = 6) -> str:
    """Items in a sentence, the first `most` of them and how many more."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


def read_json(path: Path) -> dict:
    """The object that a JSON file holds. Raises UserError naming the file where it cannot be read or holds none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:         # not JSON, or not UTF-8
        raise UserError(f"{path} is not valid JSON ({error}): the file is cut off or edited; restore it or leave it out") \
            from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def law_folder(paths, out: str | None) -> Path:
    """Where a command leaves what it found in the runs at `paths`: out, else law/ in the one folder that holds them."""
    if not out and (len(paths) != 1 or (Path(paths[0]) / "summary.json").exists()):
        raise UserError("out=DIR is missing: name the folder that receives the JSON and the figure")
    if out and Path(out).is_file():
        raise UserError(f"out={out} is a file: name a folder")
    return Path(out or Path(paths[0]) / LAW_FOLDER)


def read_study(root: Path) -> dict:
    """The study.json of a folder of runs, as scaling/sweep.py writes it; {} where there is none."""
    path = root / "study.json"
    return read_json(path) if path.is_file() else {}
