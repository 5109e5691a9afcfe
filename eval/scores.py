"""Read the scores that harness runs left beside their models, checked, with the questions behind them.

A score is compared with another only where both answered the same documents: a column is a task, a metric, a hash of the
documents, the number of examples in the prompt, the task's version and the limit, if any.
"""

import gzip
import json
import math
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.cli import UserError

RATIOS = {"word_perplexity": "exp", "byte_perplexity": "exp", "perplexity": "exp", "bits_per_byte": "bits"}
SETTINGS = ("bfloat16", "off")      # the usual dtype and fp8 of a scoring
OTHERS = ("precision.json",)        # what other commands leave among the records


class Column(NamedTuple):
    task: str
    metric: str
    docs_sha256: str
    limit: int | None
    shots: int | None
    version: str


@dataclass(frozen=True)
class Score:
    value: float
    se: float | None        # one standard error; None = not known
    chance: float | None
    n: int
    logs: tuple[Path, ...]  # one per task, of a group one per sub-task


@dataclass
class Row:
    """One model as it was scored: a run at one step, or a public model, with its dtype and FP8 recipe of inference."""
    folder: Path
    name: str
    dtype: str
    fp8: str
    step: int | None = None         # of the weights; None = those at the end of the training, or not known
    is_public: bool = False
    recipe: str | None = None       # of training; None = not known
    pair_id: str | None = None
    params: int | None = None
    tokens: int | None = None
    scores: dict[Column, Score] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------- records

def read_rows(paths) -> tuple[list[Row], list[str]]:
    """Rows of all scored models in `paths` (runs, or folders of runs, two levels deep), and notes on what was passed over.

    Raises UserError: a path that does not exist, a damaged file, nothing scored."""
    rows, notes, seen, unscored = [], [], set(), []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path} does not exist: give folders of runs such as out/*")
        for folder in _run_folders(path, 2):
            if (key := folder.resolve()) in seen:
                continue
            seen.add(key)
            found = _read_run(folder)
            rows += found
            if not found:
                unscored.append(str(folder))
    if not rows:
        raise UserError(f"no scores in {', '.join(map(str, paths)) or 'no folder'}: expected runs that eval.harness has "
                          f"scored, with out/RUN/eval/*.json")
    if unscored:
        notes.append(f"not scored yet, by python -m eval.harness RUN tasks=core: {', '.join(unscored)}")
    folders: dict[str, set] = {}
    for row in rows:
        folders.setdefault(row.name, set()).add(row.folder)
    for row in rows:
        row.name = row.name if len(folders[row.name]) == 1 else str(row.folder)
    return rows, notes


def _run_folders(path: Path, depth: int) -> list[Path]:
    if not path.is_dir():
        return []
    if _records(path) or (path / "config.json").is_file():
        return [path]
    return [run for folder in sorted(path.iterdir()) if depth and not folder.name.startswith(".")
            for run in _run_folders(folder, depth - 1)]


def _records(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "eval").glob("*.json")) if path.name not in OTHERS]


def _read_run(folder: Path) -> list[Row]:
    rows: dict[tuple, Row] = {}
    records = [(path, _load(path)) for path in _records(folder)]
    summary = _load(folder / "summary.json") if records and (folder / "summary.json").is_file() else {}
    last = _optional(summary, "steps", int)
    for path, record in sorted(records, key=lambda pair: _when(*pair)):         # the newest counts
        run, dtype, fp8 = (_field(path, record, key, str) for key in ("run", "dtype", "fp8"))
        limit = _field(path, record, "limit", (int, type(None)))
        tasks = _field(path, record, "tasks", dict)
        is_public = run.startswith("hf:")
        step = _optional(record, "step", int)
        step = None if step in (last, 0) else step      # 0: imported weights
        name = run[3:].rstrip("/").rpartition("/")[2] if is_public else folder.name
        row = rows.setdefault((dtype, fp8, step), Row(folder, name, dtype, fp8, step, is_public))
        groups = {task: set(_names(scores)) for task, scores in tasks.items() if isinstance(scores, dict)}
        inner = {leaf for leaves in groups.values() for leaf in leaves} | {     # and mmlu_stem, a group within mmlu
            task for task, leaves in groups.items() if leaves and any(leaves < others for others in groups.values())}
        for task, scores in tasks.items():
            if not isinstance(scores, dict):
                raise UserError(f"{path}: tasks.{task} is {_shown(scores)}; expected an object with the task's scores")
            if task in inner:
                continue
            for metric in _metrics(scores):
                row.scores[_column(path, task, metric, scores, limit)] = _score(path, task, metric, scores, tasks)
    precision = summary.get("precision")
    for row in rows.values():
        row.recipe = _optional(precision if isinstance(precision, dict) else {}, "recipe", str)
        row.pair_id, row.params = _optional(summary, "pair_id", str), _optional(summary, "params_total", int)
        row.tokens = _optional(summary, "tokens", int)
        if row.step is not None and row.tokens is not None:
            row.tokens = row.tokens * row.step // last if last else None
    return list(rows.values())


def _when(path: Path, record: dict) -> tuple[float, str]:
    """When a record was written, as it says itself; else as the file system says, which a copy changes."""
    try:
        return datetime.fromisoformat(record["time"]).timestamp(), path.name
    except (KeyError, TypeError, ValueError, OverflowError):
        return path.stat().st_mtime, path.name


def _metrics(scores: dict) -> list[str]:
    """At most one accuracy, normalised by length where the task does that, and one likelihood."""
    shown = [next((m for m in kind if m in scores), None) for kind in
             (("acc_norm", "acc", "exact_match"), ("word_perplexity", "perplexity", "bits_per_byte"))]
    return [m for m in shown if m] or [m for m in scores if f"{m}_se" in scores][:1]


def _column(path, task, metric, scores, limit) -> Column:
    docs = _field(path, scores, "docs_sha256", str, f"tasks.{task}.")
    version = scores.get("version")
    return Column(task, metric, docs, limit, _optional(scores, "num_fewshot", int), "" if version is None else str(version)[:20])


def _score(path, task, metric, scores, tasks) -> Score:
    where = f"tasks.{task}."
    value = _number(path, scores, metric, where)
    se, chance = (_number(path, scores, key, where, optional=True) for key in (f"{metric}_se", "chance"))
    n = scores.get("n") if isinstance(scores.get("n"), int) else 0
    named = [tasks.get(leaf) for leaf in _names(scores)] or [scores]
    logs = [one.get("samples") if isinstance(one, dict) else None for one in named]
    is_whole = all(isinstance(log, str) and log and Path(log).name == log for log in logs)
    return Score(value, se, chance if metric.startswith("acc") else None, n,
                 tuple(path.parent / log for log in logs) if is_whole else ())


def _names(scores: dict) -> list[str]:
    names = scores.get("subtasks")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _load(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {str(error)[:100]}): score the run again, or remove the "
                          f"file") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {_shown(content)}; expected an object, as eval.harness writes it")
    return content


def _field(path: Path, holder: dict, key: str, kind, inside: str = ""):
    if key not in holder or not isinstance(holder[key], kind) or isinstance(holder[key], bool):
        raise UserError(f"{path}: {inside}{key} is {_shown(holder.get(key))}; expected what eval.harness writes there: score "
                          f"the run again, or remove the file")
    return holder[key]


def _number(path: Path, holder: dict, key: str, inside: str, optional: bool = False) -> float | None:
    value = holder.get(key)
    if value is None and optional:
        return None
    try:
        return float(_field(path, holder, key, (int, float), inside))
    except OverflowError:
        raise UserError(f"{path}: {inside}{key} is a number of {len(str(value)):,} digits; expected a score") from None


def _optional(holder: dict, key: str, kind):
    value = holder.get(key)
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _shown(value) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."


# ----------------------------------------------------------------------------------------------- what the questions say

def read_samples(column: Column, score: Score) -> list[dict]:
    """The logged samples behind a score, in the order of the documents; [] where they are not there or are others'."""
    tasks = []
    for path in score.logs:
        try:
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
                samples = [json.loads(line) for line in file]
            samples = [s for s in samples if s.get("filter", "none") == "none"]
            tasks.append((samples, sha256("".join(s["doc_hash"] for s in samples).encode()).hexdigest()))
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
    hashes = [docs for _, docs in tasks]
    whole = hashes[0] if len(hashes) == 1 else sha256("".join(hashes).encode()).hexdigest()
    return [s for samples, _ in tasks for s in samples] if tasks and whole == column.docs_sha256 else []


def majority(samples: list[dict]) -> float | None:
    """Share of the most frequent answer, where the possible answers are the same for every document: yes and no, letters.

    None elsewhere: an answer in the document's own words has no place that a model could see and prefer."""
    try:
        choices = {tuple(continuation for _, continuation in s["arguments"]) for s in samples}
        answers = [str(s["target"]) for s in samples]
    except (KeyError, TypeError, ValueError):
        return None
    if len(choices) != 1 or len(*choices) < 2 or any(not isinstance(word, str) for word in next(iter(choices))):
        return None
    return max(answers.count(answer) for answer in set(answers)) / len(answers)


def paired_difference(column: Column, mine: Score, base: Score) -> tuple[float, float | None]:
    """(mine - base, its standard error over the documents that both answered); None where the logs do not tell."""
    parts = []
    for score in (mine, base):
        samples = read_samples(column, score)
        value, influence = _influence(column.metric, [s.get(column.metric) for s in samples])
        if value is None or not math.isclose(value, score.value, rel_tol=1e-5, abs_tol=1e-9):
            return mine.value - base.value, None
        parts.append(influence)
    n = len(parts[0])
    return mine.value - base.value, float(np.sqrt(n / (n - 1) * np.sum((parts[0] - parts[1]) ** 2)))


def _influence(metric: str, values: list) -> tuple[float | None, np.ndarray]:
    """A metric over documents, and how much each of them moves it, to first order: what the delta method needs.

    A mean of x, or a function of the ratio sum(nats) / sum(size): exp() of it, or it in bits."""
    try:
        table = np.array(values, dtype=float)       # (n,) or (n, 2): log-likelihood in nats, size
    except (TypeError, ValueError):
        return None, np.empty(0)
    if len(table) < 2 or not np.isfinite(table).all():
        return None, np.empty(0)
    if metric not in RATIOS:
        return (float(table.mean()), (table - table.mean()) / len(table)) if table.ndim == 1 else (None, table)
    nats, size = (-table, np.ones(len(table))) if table.ndim == 1 else (-table[:, 0], table[:, 1])
    ratio = nats.sum() / size.sum()
    value, slope = (np.exp(ratio),) * 2 if RATIOS[metric] == "exp" else (ratio / math.log(2), 1 / math.log(2))
    return float(value), slope * (nats - ratio * size) / size.sum()
