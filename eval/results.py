"""Turn what lm-eval returns into the records that lie beside a run."""

import contextlib
import functools
import gzip
import io
import json
import math
import sys
from hashlib import sha256
from pathlib import Path

from tqdm import tqdm

from eval.task_data import replacing
from runtime.cli import UserError


def evaluate(lm, loaded: dict, limit: int | None) -> tuple[dict[str, dict], dict[str, list[dict]]]:
    """Scores {task: {metric: value, metric_se: .., chance: .., n: .., num_fewshot: .., version: .., docs_sha256: ..}} and
    lm-eval's log of each task's documents. A group's row also names its `subtasks`, the tasks at its leaves."""
    from lm_eval import evaluator
    from lm_eval.api import task as lm_eval_task

    lm_eval_task.tqdm = functools.partial(tqdm, disable=True)       # "0/125": the building of requests, done in no time
    with contextlib.redirect_stdout(io.StringIO()):     # "bootstrapping for stddev"
        results = evaluator.evaluate(lm, loaded, limit=limit, bootstrap_iters=1000)
    out: dict[str, dict] = {}
    for name, metrics in results["results"].items():
        samples = results["samples"].get(name, [])
        row = out[name] = {}
        for key, value in metrics.items():
            metric, _, which = key.partition(",")       # "acc,none", "acc_stderr,none", "exact_match,strict-match"
            if not which or not isinstance(value, (int, float)) or metric.endswith("_stderr"):
                continue
            label = metric if which == "none" else f"{metric}.{which}"
            error = metrics.get(f"{metric}_stderr,{which}")
            if not isinstance(error, (int, float)):
                error = _ratio_error(metric, value, [s[metric] for s in samples if metric in s])
            row[label], row[f"{label}_se"] = float(value), None if error is None else float(error)
        row["version"] = results["versions"].get(name)
        if task := loaded["tasks"].get(name):
            row |= {"n": len({s["doc_id"] for s in samples}), "num_fewshot": task.config.num_fewshot or 0,
                    "chance": _chance(task, samples), "docs_sha256": _hash(s["doc_hash"] for s in samples)}
    for name, group in loaded["groups"].items():
        if name in out:
            out[name] |= _group_row([(task.task_name, out[task.task_name]) for task in group.get_all_tasks()])
    return out, results["samples"]


def _group_row(leaves: list[tuple[str, dict]]) -> dict:
    """What a group's row takes from the tasks at its leaves, which are weighted by their questions."""
    n = sum(row["n"] for _, row in leaves)
    chances, shots = [row["chance"] for _, row in leaves], {row["num_fewshot"] for _, row in leaves}
    mean = sum(row["chance"] * row["n"] for _, row in leaves) / n if n and None not in chances else None
    return {"n": n, "num_fewshot": shots.pop() if len(shots) == 1 else None, "chance": mean,
            "docs_sha256": _hash(row["docs_sha256"] for _, row in leaves), "subtasks": [name for name, _ in leaves]}


def _ratio_error(metric: str, value: float, pairs: list) -> float | None:
    """Standard error of a perplexity metric, a ratio of sums over documents; lm-eval gives none. None where unknown.

    Ratio estimator R = sum(ll) / sum(size): variance n / (n - 1) * sum((ll - R size)^2) / sum(size)^2 (Cochran,
    Sampling Techniques, chapter 6), carried through exp() for a perplexity by its derivative.
    """
    n = len(pairs)
    if metric not in ("bits_per_byte", "byte_perplexity", "word_perplexity") or n < 2:
        return None
    size = sum(s for _, s in pairs)
    ratio = sum(ll for ll, _ in pairs) / size
    error = math.sqrt(n / (n - 1) * sum((ll - ratio * s) ** 2 for ll, s in pairs)) / size      # nats per unit
    return error / math.log(2) if metric == "bits_per_byte" else error * value


def _chance(task, samples: list[dict]) -> float | None:
    """Accuracy of guessing, for multiple choice with one right answer; None elsewhere."""
    if task.OUTPUT_TYPE != "multiple_choice" or not samples:
        return None
    choices = [len(task.doc_to_choice(s["doc"])) for s in samples]
    return sum(1 / n for n in choices) / len(choices)


def _hash(hashes) -> str:
    """Of the documents scored, in order: equal for two runs whose scores may be compared."""
    return sha256("".join(hashes).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------- files

def write(run_dir: Path, tasks: str, record: dict, samples: dict[str, list[dict]], has_summary: bool) -> None:
    """Put record and logs into run_dir/eval/ and, where the run `has_summary`, its scores into summary.json.

    The summary takes whole tasks in bfloat16 of its own step alone: no trial may stand where a score stood. The file names
    tell what may not be compared: FP8, another dtype, a part of the documents. A log is named in its task's row. Raises
    UserError where summary.json is damaged; it stays as it is. Raises OSError, with the file's name.
    """
    kind = "" if record["fp8"] == "off" else f"_fp8_{record['fp8']}"
    kind += "" if record["dtype"] == "bfloat16" else f"_{record['dtype']}"
    kind += f"_limit{record['limit']}" if record["limit"] else ""
    folder = run_dir / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    for task, rows in samples.items():
        name = record["tasks"][task]["samples"] = f"samples_{task}{kind}.jsonl.gz"
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        replace_file(folder / name, gzip.compress(lines.encode(errors="backslashreplace"), compresslevel=5, mtime=0))
    if len(tasks) > 100:        # file names end at 255 bytes
        tasks = f"{tasks[:90]}_{sha256(tasks.encode()).hexdigest()[:9]}"
    path = folder / f"{tasks}{kind}.json"
    replace_file(path, as_json(record))
    if has_summary and record["dtype"] == "bfloat16" and not record["limit"]:
        _summarise(run_dir / "summary.json", path, record)


def _summarise(path: Path, beside: Path, record: dict) -> None:
    if not path.is_file():
        print(f"the run is not finished, so there is no {path}: the scores are in {beside} only", file=sys.stderr)
        return
    new = record["tasks"]
    try:
        summary = json.loads(path.read_text())
        if (last := summary.get("steps")) != record["step"]:
            print(f"{path} is of step {last}, the checkpoint that was scored of step {record['step']}: the scores are in "
                  f"{beside} only", file=sys.stderr)
            return
        if record["fp8"] == "off":
            changed = {"eval": dict(summary.get("eval") or {}) | new}
        else:
            known = dict(summary.get("eval_fp8") or {})
            changed = {"eval_fp8": known | {record["fp8"]: dict(known.get(record["fp8"]) or {}) | new}}
        whole = summary | changed
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}): the scores are in {beside} only") from error
    replace_file(path, as_json(whole))


def as_json(content: dict) -> str:
    return json.dumps(content, indent=1) + "\n"


def replace_file(path: Path, content: str | bytes) -> None:
    """All of `content` at `path` or what was there before: a reader never meets half a file."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


# -------------------------------------------------------------------------------------------------------------- console

def table(record: dict) -> list[str]:
    """The scores as lines for the console; of a group's tasks the group's row alone."""
    lines = [f"{'task':24} {'metric':24} {'score':>9} {'+/- se':>9} {'chance':>7} {'n':>6}"]
    hidden = {name for row in record["tasks"].values() for name in row.get("subtasks", ())}
    for name, row in record["tasks"].items():
        for metric in (key for key in row if f"{key}_se" in row and name not in hidden):
            error, chance = row[f"{metric}_se"], row.get("chance") if metric.startswith("acc") else None
            error, chance = "-" if error is None else f"{error:.4f}", "-" if chance is None else f"{chance:.2f}"
            lines.append(f"{name:24} {metric:24} {row[metric]:9.4f} {error:>9} {chance:>7} {row['n'] or '-':>6}")
    if record["limit"]:
        lines.append(f"limit={record['limit']}: a part of each task, not to be compared with published scores")
    if record["truncated_requests"]:
        lines.append(f"{record['truncated_requests']} requests were longer than the context and lost their beginning")
    return lines
