"""What lm-eval's results say of each task: values, standard errors, chance, the documents' hash."""

import contextlib
import functools
import io
import math
import numbers
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eval import core22, tasks
from eval.results import Metric, TaskScores, hash_of

# Metrics that are a function of sum(nats) / sum(size): exp() of it, or it in bits.
RATIOS = {
    "word_perplexity": "exp",
    "byte_perplexity": "exp",
    "perplexity": "exp",
    "bits_per_byte": "bits",
}


def evaluate(
    lm: Any, loaded: dict, limit: int | None
) -> tuple[dict[str, TaskScores], dict[str, list[dict]]]:
    """Scores of each task and group of `loaded`, lm-eval's TaskDict, and lm-eval's log of each
    task's documents."""
    from lm_eval import evaluator
    from lm_eval.api import task as lm_eval_task

    for task in loaded["tasks"].values():
        tasks.watch_requests(task)
    # "0/125": the building of requests
    lm_eval_task.tqdm = functools.partial(lm_eval_task.tqdm, disable=True)
    with contextlib.redirect_stdout(io.StringIO()):  # "bootstrapping for stddev"
        results = evaluator.evaluate(lm, loaded, limit=limit, bootstrap_iters=1000)
    samples = results["samples"]
    scores: dict[str, TaskScores] = {}
    for name, values in results["results"].items():
        metrics = read_metrics(values, samples.get(name, []))
        version = results["versions"].get(name)
        task = loaded["tasks"].get(name)
        scores[name] = _task_scores(metrics, version, task, samples.get(name, []))
    for name, group in loaded["groups"].items():
        if name in scores:
            subtasks = [task.task_name for task in group.get_all_tasks()]
            scores[name] = _group_scores(scores[name], scores, subtasks)
    core22.add_centered(scores, loaded.get("missing", ()))
    return scores, samples


@dataclass
class ReadMetrics:
    """The metrics of lm-eval's result of a task."""

    scored: dict[str, Metric] = field(default_factory=dict)  # label -> its number
    names: set[str] = field(default_factory=set)  # of those, without the filter
    unscored: set[str] = field(default_factory=set)  # names of what is no number


def read_metrics(values: dict[str, Any], samples: list[dict]) -> ReadMetrics:
    """values: lm-eval's, with keys such as "acc,none" and "acc_stderr,none"; the part behind the
    comma is the filter."""
    metrics = ReadMetrics()
    for key, value in values.items():
        name, _, filter_name = key.partition(",")
        if not filter_name or name.endswith("_stderr"):
            continue
        number = to_number(value)
        if number is None:
            metrics.unscored.add(name)
            continue
        metrics.names.add(name)
        label = name if filter_name == "none" else f"{name}.{filter_name}"
        error = values.get(f"{name}_stderr,{filter_name}")
        metrics.scored[label] = Metric(number, _standard_error(name, error, samples))
    return metrics


def _standard_error(name: str, error: object, samples: list[dict]) -> float | None:
    """lm-eval's, or where it gives none, as for a perplexity, that of the ratio."""
    if isinstance(error, (int, float)):
        return float(error)
    if name not in RATIOS:
        return None
    _, influences = influence(name, [sample[name] for sample in samples if name in sample])
    return spread(influences) if len(influences) else None


def _task_scores(metrics: ReadMetrics, version: Any, task: Any, samples: list[dict]) -> TaskScores:
    """task: lm-eval's, None for a group."""
    unscored = metrics.unscored
    if task is None:
        return TaskScores(metrics=metrics.scored, version=version, not_scored=sorted(unscored))
    unscored = unscored | (metrics_asked(task) - metrics.names)
    return TaskScores(
        metrics=metrics.scored,
        version=version,
        not_scored=sorted(unscored),
        n=len({sample["doc_id"] for sample in samples}),
        num_fewshot=task.config.num_fewshot or 0,
        chance=_chance(task, samples),
        docs_sha256=hash_of(sample["doc_hash"] for sample in samples),
    )


def _chance(task: Any, samples: list[dict]) -> float | None:
    """Accuracy of guessing, where one of several answers is right."""
    if task.OUTPUT_TYPE != "multiple_choice" or not samples:
        return None
    guesses = [1 / len(task.doc_to_choice(sample["doc"])) for sample in samples]
    return sum(guesses) / len(guesses)


def _group_scores(
    group: TaskScores, scores: dict[str, TaskScores], subtasks: list[str]
) -> TaskScores:
    """The tasks at a group's leaves weigh by their questions."""
    leaves = [scores[task] for task in subtasks]
    shots = {leaf.num_fewshot for leaf in leaves}
    common_shots = shots.pop() if len(shots) == 1 else None
    return TaskScores(
        metrics=group.metrics,
        version=group.version,
        not_scored=group.not_scored,
        n=sum(leaf.n or 0 for leaf in leaves),
        num_fewshot=common_shots,
        chance=_mean_chance(leaves),
        docs_sha256=hash_of(leaf.docs_sha256 or "" for leaf in leaves),
        subtasks=subtasks,
    )


def _mean_chance(leaves: list[TaskScores]) -> float | None:
    """Weighted by the questions of each; None where it is not known of all."""
    n = 0
    total = 0.0
    for leaf in leaves:
        if leaf.chance is None or leaf.n is None:
            return None
        n += leaf.n
        total += leaf.chance * leaf.n
    return total / n if n else None


def to_number(value: Any) -> float | None:
    """A metric's value; of NumPy's and torch's numbers too. None where it is none, as a matrix of
    confusions."""
    if hasattr(value, "item") and getattr(value, "size", 1) in (1, torch.Size([])):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None


def metrics_asked(task: Any) -> set[str]:
    """The names in a task's metric_list under which lm-eval must have a value."""
    if task.OUTPUT_TYPE == "generate_until" and not callable(task.config.process_results):
        # lm-eval computes each; one function may give values of other names, as rouge gives rouge1
        return set()
    metrics = [entry["metric"] for entry in task.config.metric_list or []]
    names = {metric if isinstance(metric, str) else metric.__name__ for metric in metrics}
    return names - {"bypass"}


def influence(metric: str, values: list) -> tuple[float | None, np.ndarray]:
    """A metric over documents, and how much each of them moves it, (n,) to first order: what the
    delta method needs. (None, (0,)) where documents or values lack.

    A mean of x, or a function of the ratio sum(nats) / sum(size): exp() of it, or it in bits
    (Cochran 1977, 6.3)."""
    # (n,) or (n, 2): nats' minus, size
    table = np.array(values, dtype=float) if None not in values else np.empty(0)
    if len(table) < 2 or not np.isfinite(table).all():
        return None, np.empty(0)
    if metric not in RATIOS:
        return float(table.mean()), (table - table.mean()) / len(table)
    if table.ndim == 1:
        nats, size = -table, np.ones(len(table))
    else:
        nats, size = -table[:, 0], table[:, 1]
    ratio = nats.sum() / size.sum()
    if RATIOS[metric] == "exp":
        value = slope = np.exp(ratio)
    else:
        value, slope = ratio / math.log(2), 1 / math.log(2)
    return float(value), slope * (nats - ratio * size) / size.sum()


def spread(influences: np.ndarray) -> float:
    """The standard error that documents of these influences, (n,), give."""
    n = len(influences)
    return float(np.sqrt(n / (n - 1) * np.sum(influences**2)))
