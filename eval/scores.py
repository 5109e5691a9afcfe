"""What lm-eval's results say of each task: values, standard errors, chance, the documents' hash."""

import contextlib
import functools
import io
import math
import numbers
from hashlib import sha256

import numpy as np
import torch

from eval import tasks

RATIOS = {
    "word_perplexity": "exp",
    "byte_perplexity": "exp",
    "perplexity": "exp",
    "bits_per_byte": "bits",
}


def evaluate(lm, loaded: dict, limit: int | None) -> tuple[dict[str, dict], dict[str, list[dict]]]:
    """Scores {task: {metric: value, metric_se: .., chance: .., n: .., num_fewshot: .., version: ..,
    docs_sha256: ..}} and lm-eval's log of each task's documents. A group's row also names its
    `subtasks`, the tasks at its leaves."""
    from lm_eval import evaluator
    from lm_eval.api import task as lm_eval_task

    for task in loaded["tasks"].values():
        tasks.watch_requests(task)
    # "0/125": the building of requests
    lm_eval_task.tqdm = functools.partial(lm_eval_task.tqdm, disable=True)
    with contextlib.redirect_stdout(io.StringIO()):  # "bootstrapping for stddev"
        results = evaluator.evaluate(lm, loaded, limit=limit, bootstrap_iters=1000)
    out: dict[str, dict] = {}
    for name, metrics in results["results"].items():
        samples = results["samples"].get(name, [])
        row = out[name] = {}
        scored: set[str] = set()
        unscored: set[str] = set()
        for key, value in metrics.items():
            # "acc,none", "acc_stderr,none", "exact_match,strict-match"
            metric, _, which = key.partition(",")
            if not which or metric.endswith("_stderr"):
                continue
            number = to_number(value)
            if number is None:
                unscored.add(metric)
                continue
            scored.add(metric)
            label = metric if which == "none" else f"{metric}.{which}"
            error = metrics.get(f"{metric}_stderr,{which}")
            if not isinstance(error, (int, float)):
                influences = (
                    influence(metric, [s[metric] for s in samples if metric in s])[1]
                    if metric in RATIOS
                    else ()
                )
                # lm-eval gives a perplexity none
                error = spread(influences) if len(influences) else None
            row[label], row[f"{label}_se"] = number, None if error is None else float(error)
        row["version"] = results["versions"].get(name)
        task = loaded["tasks"].get(name)
        if task:
            unscored |= metrics_asked(task) - scored
        if unscored:
            row["not_scored"] = sorted(unscored)
        if task:  # chance: of guessing, where one of several answers is right
            guesses = [
                1 / len(task.doc_to_choice(s["doc"]))
                for s in samples
                if task.OUTPUT_TYPE == "multiple_choice"
            ]
            row |= {
                "n": len({s["doc_id"] for s in samples}),
                "num_fewshot": task.config.num_fewshot or 0,
                "chance": sum(guesses) / len(guesses) if guesses else None,
                "docs_sha256": hash_of(s["doc_hash"] for s in samples),
            }
    for name, group in loaded["groups"].items():
        if name in out:  # the tasks at its leaves weigh by their questions
            subtasks = [task.task_name for task in group.get_all_tasks()]
            leaves = [out[task] for task in subtasks]
            n, chances = sum(row["n"] for row in leaves), [row["chance"] for row in leaves]
            shots = {row["num_fewshot"] for row in leaves}
            out[name] |= {
                "n": n,
                "num_fewshot": shots.pop() if len(shots) == 1 else None,
                "chance": (
                    sum(row["chance"] * row["n"] for row in leaves) / n
                    if n and None not in chances
                    else None
                ),
                "docs_sha256": hash_of(row["docs_sha256"] for row in leaves),
                "subtasks": subtasks,
            }
    return out, results["samples"]


def to_number(value) -> float | None:
    """A metric's value; of NumPy's and torch's numbers too. None where it is none, as a matrix of
    confusions."""
    if hasattr(value, "item") and getattr(value, "size", 1) in (1, torch.Size([])):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None


def metrics_asked(task) -> set[str]:
    """The names in a task's metric_list under which lm-eval must have a value."""
    if task.OUTPUT_TYPE == "generate_until" and not callable(task.config.process_results):
        # lm-eval computes each; one function may give values of other names, as rouge gives rouge1
        return set()
    metrics = [entry["metric"] for entry in task.config.metric_list or []]
    names = {metric if isinstance(metric, str) else metric.__name__ for metric in metrics}
    return names - {"bypass"}


def influence(metric: str, values: list) -> tuple[float | None, np.ndarray]:
    """A metric over documents, and how much each of them moves it, to first order: what the delta
    method needs.

    A mean of x, or a function of the ratio sum(nats) / sum(size): exp() of it, or it in bits
    (Cochran 1977, 6.3)."""
    # (n,) or (n, 2): nats' minus, size
    table = np.array(values, dtype=float) if None not in values else np.empty(0)
    if len(table) < 2 or not np.isfinite(table).all():
        return None, np.empty(0)
    if metric not in RATIOS:
        return float(table.mean()), (table - table.mean()) / len(table)
    nats, size = (-table, np.ones(len(table))) if table.ndim == 1 else (-table[:, 0], table[:, 1])
    ratio = nats.sum() / size.sum()
    value, slope = (
        (np.exp(ratio),) * 2 if RATIOS[metric] == "exp" else (ratio / math.log(2), 1 / math.log(2))
    )
    return float(value), slope * (nats - ratio * size) / size.sum()


def spread(influences: np.ndarray) -> float:
    """The standard error that documents of these influences give."""
    n = len(influences)
    return float(np.sqrt(n / (n - 1) * np.sum(influences**2)))


def hash_of(hashes) -> str:
    """Of the documents scored, in order: equal for two runs whose scores may be compared."""
    return sha256("".join(hashes).encode()).hexdigest()


def stands_for(row: dict) -> list[str]:
    """The tasks that a group's row tells of; none where the group, as openllm, has no score of its
    own."""
    return row.get("subtasks", []) if any(key.endswith("_se") for key in row) else []
