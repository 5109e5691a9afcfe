"""core22: DCLM's CORE, the mean of 22 centered accuracies that nanochat reports, from lm-eval's
tasks.

Tasks, numbers of examples and accuracies of guessing: DataComp-LM (2406.11794), its repository's
eval/eval_meta_data_v1.csv and nanochat's core.yaml, which agree. Centered: (accuracy - guessing) /
(1 - guessing), 0 for a model that guesses. CORE's data and prompts are MosaicML's Eval Gauntlet's;
those here are lm-eval's own, which differ: docs/evaluate.md says how. The number is the mean over
the tasks that lm-eval has, and names the others; do not compare it with nanochat's."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eval.results import Metric, TaskScores, hash_of

GROUP = "core22"
CENTERED = "centered"  # core22 adds this metric to each of its tasks, and is its mean
# lm-eval's BIG-bench tasks ignore punctuation, so that only the number of closing brackets would
# count (dyck_languages). CORE compares every token.
EXACT: dict[str, Any] = {
    "metric_list": [
        {
            "metric": "exact_match",
            "aggregation": "mean",
            "higher_is_better": True,
            "ignore_punctuation": False,
        }
    ]
}


@dataclass(frozen=True)
class CoreTask:
    """A task of CORE, as lm-eval has it."""

    lm_eval: str | None  # lm-eval's name; None where it has no such task
    shots: int  # examples in the prompt
    guessing: float = 0.0  # CORE's accuracy of guessing
    metric: str = "acc_norm"  # whose value is centered
    folder: str | None = None  # below lm-eval's tasks/, where it is not called like the task
    changes: Mapping[str, Any] = field(default_factory=dict)  # keys of its YAML to replace


def _generated(name: str) -> CoreTask:
    """A task of BIG-bench whose answer is generated."""
    return CoreTask(
        f"bigbench_{name}_generate_until",
        10,
        metric="exact_match",
        folder="bigbench/generate_until",
        changes=EXACT,
    )


# CORE's name -> what computes it, in CORE's order
CORE: dict[str, CoreTask] = {
    "hellaswag_zeroshot": CoreTask("hellaswag", 0, 0.25),
    "jeopardy": CoreTask(None, 10, metric="exact_match"),
    "bigbench_qa_wikidata": _generated("qa_wikidata"),
    "arc_easy": CoreTask("arc_easy", 10, 0.25, folder="arc"),
    "arc_challenge": CoreTask("arc_challenge", 10, 0.25, folder="arc"),
    "copa": CoreTask("copa", 0, 0.5, "acc", folder="super_glue/copa"),
    "commonsense_qa": CoreTask("commonsense_qa", 10, 0.2, "acc"),
    "piqa": CoreTask("piqa", 10, 0.5),
    "openbook_qa": CoreTask("openbookqa", 0, 0.25),
    "lambada_openai": CoreTask("lambada_openai", 0, metric="acc", folder="lambada"),
    "hellaswag": CoreTask("hellaswag", 10, 0.25),
    "winograd": CoreTask("wsc273", 0, 0.5, "acc"),
    "winogrande": CoreTask("winogrande", 0, 0.5, "acc"),
    "bigbench_dyck_languages": _generated("dyck_languages"),
    # its answer is a list of one number, which lm-eval 0.4.13 cannot show as an example
    "agi_eval_lsat_ar": CoreTask(
        "agieval_lsat_ar",
        3,
        0.2,
        folder="agieval",
        changes={"doc_to_target": "{{gold[0] if gold is iterable else gold}}"},
    ),
    "bigbench_cs_algorithms": _generated("cs_algorithms"),
    "bigbench_operators": _generated("operators"),
    "bigbench_repeat_copy_logic": _generated("repeat_copy_logic"),
    "squad": CoreTask(None, 10, metric="exact_match"),
    "coqa": CoreTask("coqa", 0, metric="em"),
    "boolq": CoreTask("boolq", 10, 0.62, "acc", folder="super_glue/boolq"),
    "bigbench_language_identification": CoreTask(
        "bigbench_language_identification_multiple_choice",
        10,
        0.091,
        "acc",
        folder="bigbench/multiple_choice",
    ),
}
# as tasks= names them: piqa shows ten examples here and none in core
TASKS: dict[str, CoreTask] = {f"{GROUP}_{name}": task for name, task in CORE.items()}


def names_in_lm_eval(names: list[str]) -> list[str]:
    """The names that lm-eval must know to score `names`, without those of CORE that it lacks."""
    needed = []
    for name in names:
        known_as = TASKS[name].lm_eval if name in TASKS else name
        if known_as is not None:
            needed.append(known_as)
    return needed


class Missing(Exception):
    """A task of TASKS cannot be loaded; the text says why."""


def load(manager: Any, name: str) -> dict:
    """lm-eval's TaskDict of a task of TASKS, under that name. A YAML with that name in include=
    takes precedence. Raises Missing where lm-eval has no such task, or needs a package that is not
    installed."""
    core_task = TASKS[name]
    if name in manager.all_tasks:
        loaded = manager.load([name])
    elif core_task.lm_eval is None:
        raise Missing("lm-eval has no such task")
    else:
        # a group of one, by which lm-eval changes a task's YAML
        member = {"task": core_task.lm_eval, **core_task.changes}
        try:
            loaded = manager.load([{"group": f"{name}_alone", "task": [member]}])
        except ImportError as error:
            raise Missing(
                f"lm-eval's {core_task.lm_eval} needs what is not there: {error}"
            ) from error
    (task,) = loaded["tasks"].values()
    task.set_config(key="num_fewshot", value=core_task.shots)
    task.config.task = name
    return {"tasks": {name: task}, "groups": {}, "group_map": {}}


def add_centered(scores: dict[str, TaskScores], missing: Collection[str] = ()) -> None:
    """Add to each of TASKS its centered accuracy; where all were asked for, the group's row too:
    their mean, and the names of those without a number. missing: tasks that could not be loaded."""
    centered: dict[str, Metric] = {}
    for name, task in TASKS.items():
        metric = scores[name].metrics.get(task.metric) if name in scores else None
        if metric is None:
            continue
        centered[name] = _center(metric, task.guessing)
        metrics = {**scores[name].metrics, CENTERED: centered[name]}
        scores[name] = replace(scores[name], metrics=metrics)
    if not centered or any(name not in scores and name not in missing for name in TASKS):
        return
    scores[GROUP] = _group_scores(scores, centered)


def _group_scores(scores: dict[str, TaskScores], centered: dict[str, Metric]) -> TaskScores:
    """The group's row, by the tasks that have a centered accuracy."""
    scored = [scores[name] for name in centered]
    unscored = [name for name in TASKS if name not in centered]
    return TaskScores(
        metrics={CENTERED: _mean([*centered.values()])},
        n=sum(task_scores.n or 0 for task_scores in scored),
        docs_sha256=hash_of(task_scores.docs_sha256 or "" for task_scores in scored),
        subtasks=[*centered],
        missing=[name.removeprefix(f"{GROUP}_") for name in unscored],
    )


def _center(metric: Metric, guessing: float) -> Metric:
    scale = 1 - guessing
    se = None if metric.se is None else metric.se / scale
    return Metric((metric.value - guessing) / scale, se)


def _mean(metrics: list[Metric]) -> Metric:
    """The mean over tasks. They share no documents, so the squares of standard errors add up."""
    value = sum(metric.value for metric in metrics) / len(metrics)
    squares = [metric.se**2 for metric in metrics if metric.se is not None]
    se = math.sqrt(sum(squares)) / len(metrics) if len(squares) == len(metrics) else None
    return Metric(value, se)
