"""Tests of eval/core22.py: centered accuracies and their mean against published ones, the list
against DCLM's table, a whole scoring on made-up data in the layouts of the data sets."""

import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import datasets
import lm_eval.tasks
import pytest
import transformers.data

from eval import core22, harness, tasks
from eval.inference import Inference
from eval.results import Metric, ScoreRecord, TaskScores, read_scores
from lib.errors import UserError
from tests.helpers import eval_runs
from tests.helpers.eval_runs import TINY, build, build_run

# A public evaluation of a 20-layer nanochat model: task, accuracy, centered; its CORE is 0.119520.
PUBLISHED = """
hellaswag_zeroshot 0.304023 0.072031
jeopardy 0.009920 0.009920
bigbench_qa_wikidata 0.320407 0.320407
arc_easy 0.510522 0.347363
arc_challenge 0.258532 0.011377
copa 0.600000 0.200000
commonsense_qa 0.285012 0.106265
piqa 0.620239 0.240479
openbook_qa 0.296000 0.061333
lambada_openai 0.252086 0.252086
hellaswag 0.304621 0.072827
winograd 0.553114 0.106227
winogrande 0.516180 0.032360
bigbench_dyck_languages 0.143000 0.143000
agi_eval_lsat_ar 0.269565 0.086956
bigbench_cs_algorithms 0.368939 0.368939
bigbench_operators 0.109524 0.109524
bigbench_repeat_copy_logic 0.000000 0.000000
squad 0.035478 0.035478
coqa 0.078542 0.078542
boolq 0.542813 -0.203123
bigbench_language_identification 0.252300 0.177448
"""
ROWS = [line.split() for line in PUBLISHED.split("\n") if line]
# examples in the prompt, by DCLM's eval/eval_meta_data_v1.csv
SHOTS = {
    0: "hellaswag_zeroshot copa openbook_qa lambada_openai winograd winogrande coqa",
    3: "agi_eval_lsat_ar",
    10: (
        "jeopardy bigbench_qa_wikidata arc_easy arc_challenge commonsense_qa piqa hellaswag"
        " bigbench_dyck_languages bigbench_cs_algorithms bigbench_operators"
        " bigbench_repeat_copy_logic squad boolq bigbench_language_identification"
    ),
}
LACKING = ["jeopardy", "squad"]


def scores_of(rows: list[list[str]], se: float | None = 0.01) -> dict[str, TaskScores]:
    """As lm-eval would give these accuracies."""
    return {
        f"core22_{name}": TaskScores(
            metrics={core22.CORE[name].metric: Metric(float(accuracy), se)}, n=100, docs_sha256="a"
        )
        for name, accuracy, _ in rows
    }


# -------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("name, accuracy, centered", ROWS, ids=[row[0] for row in ROWS])
def test_a_centered_accuracy_is_the_published_one(name: str, accuracy: str, centered: str) -> None:
    scores = scores_of([[name, accuracy, centered]])
    core22.add_centered(scores)
    value = scores[f"core22_{name}"].metrics["centered"].value
    assert value == pytest.approx(float(centered), abs=2e-6)


def test_core_is_the_published_mean_of_all_22() -> None:
    scores = scores_of(ROWS)
    core22.add_centered(scores)
    assert scores["core22"].metrics["centered"].value == pytest.approx(0.119520, abs=1e-6)
    assert (scores["core22"].missing, len(scores["core22"].subtasks)) == ([], 22)
    assert scores["core22"].n == 2200


def test_the_standard_error_is_that_of_a_mean_of_scaled_independent_scores() -> None:
    scores = scores_of(ROWS)
    core22.add_centered(scores)
    guessing = [0.25] * 5 + [0.5] * 4 + [0.2] * 2 + [0.62, 0.091] + [0.0] * 9
    expected = sum((0.01 / (1 - g)) ** 2 for g in guessing) ** 0.5 / 22
    assert scores["core22"].metrics["centered"].se == pytest.approx(expected)


def test_a_standard_error_that_is_not_known_makes_that_of_the_mean_unknown() -> None:
    scores = scores_of(ROWS[:-1]) | scores_of(ROWS[-1:], se=None)
    core22.add_centered(scores)
    assert scores["core22"].metrics["centered"].se is None


def test_what_has_no_number_is_named_and_left_out_of_the_mean() -> None:
    rows = [row for row in ROWS if row[0] not in LACKING]
    scores = scores_of(rows)
    core22.add_centered(scores, missing=[f"core22_{name}" for name in LACKING])
    assert scores["core22"].missing == LACKING
    mean = sum(float(row[2]) for row in rows) / 20
    assert scores["core22"].metrics["centered"].value == pytest.approx(mean, abs=1e-6)


def test_a_part_of_the_tasks_has_no_mean() -> None:
    scores = scores_of(ROWS[3:])
    core22.add_centered(scores)
    assert "core22" not in scores and "centered" in scores["core22_piqa"].metrics


# ----------------------------------------------------------------------------------------- the list


def test_each_task_shows_as_many_examples_as_in_dclm() -> None:
    by_shots: dict[int, list[str]] = {0: [], 3: [], 10: []}
    for name, task in core22.CORE.items():
        by_shots[task.shots].append(name)
    assert {shots: " ".join(names) for shots, names in by_shots.items()} == SHOTS


def test_lm_eval_has_all_tasks_but_those_named_as_lacking() -> None:
    root = Path(lm_eval.tasks.__file__).parent
    folders = [root / folder for folder in tasks._folders([*core22.TASKS])]
    manager = lm_eval.tasks.TaskManager(include_path=[*folders], include_defaults=False)
    named = {task.lm_eval for task in core22.CORE.values()}
    assert named - {None} <= set(manager.all_tasks)
    assert [name for name, task in core22.CORE.items() if task.lm_eval is None] == LACKING


# --------------------------------------------------------------------------------- a whole scoring


def choices_of(number: int, count: int) -> list[str]:
    rng = random.Random(f"{number}/{count}")
    return [eval_runs.words(rng, 2) + f" {letter}" for letter in "abcde"[:count]]


def labelled(number: int, count: int) -> dict:
    return {"text": choices_of(number, count), "label": [*"ABCDE"[:count]]}


# data set, and its part -> row number i
LAYOUTS: dict[tuple[str, str | None], Callable[[int], dict]] = {
    ("Rowan/hellaswag", None): lambda i: {
        "activity_label": f"act {i}",
        "ctx_a": "one goes",
        "ctx_b": "then",
        "endings": choices_of(i, 4),
        "label": str(i % 4),
    },
    ("allenai/ai2_arc", "ARC-Easy"): lambda i: {
        "question": f"why {i}?",
        "choices": labelled(i, 4),
        "answerKey": "ABCD"[i % 4],
    },
    ("allenai/ai2_arc", "ARC-Challenge"): lambda i: {
        "question": f"how {i}?",
        "choices": labelled(i, 4),
        "answerKey": "ABCD"[i % 4],
    },
    ("aps/super_glue", "copa"): lambda i: {
        "premise": f"It rained {i}.",
        "question": ("cause", "effect")[i % 2],
        "choice1": choices_of(i, 2)[0],
        "choice2": choices_of(i, 2)[1],
        "label": i % 2,
    },
    ("tau/commonsense_qa", None): lambda i: {
        "question": f"where {i}?",
        "choices": labelled(i, 5),
        "answerKey": "ABCDE"[i % 5],
    },
    ("baber/piqa", None): lambda i: {
        "goal": f"to do {i}",
        "sol1": choices_of(i, 2)[0],
        "sol2": choices_of(i, 2)[1],
        "label": i % 2,
    },
    ("allenai/openbookqa", "main"): lambda i: {
        "question_stem": f"stem {i}",
        "choices": labelled(i, 4),
        "answerKey": "ABCD"[i % 4],
    },
    ("EleutherAI/lambada_openai", "default"): lambda i: {"text": f"a tale of {i} words"},
    ("lighteval/winograd_wsc", "wsc273"): lambda i: {
        "text": f"A man saw a dog because it was {i} miles away.",
        "pronoun": "it",
        "pronoun_loc": 25,
        "options": ["A man", "a dog"],
        "label": i % 2,
    },
    ("allenai/winogrande", "winogrande_xl"): lambda i: {
        "sentence": f"The cup fell on the desk so _ broke {i}.",
        "option1": "cup",
        "option2": "desk",
        "answer": str(1 + i % 2),
    },
    ("hails/agieval-lsat-ar", None): lambda i: {
        "query": f"Q: {i}?",
        "choices": choices_of(i, 5),
        "gold": [i % 5],
    },
    ("EleutherAI/coqa", None): lambda i: {
        "story": f"story {i}",
        "questions": {"input_text": ["who?", "when?"]},
        "answers": {"input_text": ["he", "now"]},
        "additional_answers": None,
    },
    ("aps/super_glue", "boolq"): lambda i: {
        "passage": f"passage {i}",
        "question": "is it",
        "label": i % 2,
    },
    ("hails/bigbench", "language_identification_zero_shot"): lambda i: {
        "inputs": f"Sentence: {i}",
        "targets": [choices_of(i, 4)[i % 4]],
        "multiple_choice_targets": choices_of(i, 4),
        "multiple_choice_scores": [int(k == i % 4) for k in range(4)],
    },
}
BRACKETS = ["] )", "> }"]  # answers that differ in punctuation alone


def load_made_up(path: str, name: str | None = None, **_: object) -> dict:
    """datasets.load_dataset() of 13 rows."""
    row = LAYOUTS.get((path, name))
    if row is None:
        assert path == "hails/bigbench", (path, name)
        rows = [{"inputs": f"complete {i}:", "targets": [BRACKETS[i % 2]]} for i in range(13)]
    else:
        rows = [row(i) for i in range(13)]
    data = datasets.Dataset.from_list(rows)
    return dict.fromkeys(("train", "validation", "test", "default"), data)


def make_squad_metrics() -> ModuleType:
    """What lm-eval's coqa takes from transformers, which has dropped it in version 5."""
    module = ModuleType("transformers.data.metrics.squad_metrics")
    module.compute_exact = lambda gold, answer: int(gold == answer)  # type: ignore[attr-defined]
    module.compute_f1 = module.compute_exact  # type: ignore[attr-defined]
    return module


def score_made_up(folder: Path, has_coqa: bool) -> tuple[ScoreRecord, Path]:
    """A scoring on core22 and piqa of a small model that answers every generated question by the
    first of BRACKETS, and its run; has_coqa: whether lm-eval's coqa can be imported."""
    metrics = make_squad_metrics()
    metrics.squad_metrics = metrics  # type: ignore[attr-defined]
    model = build(replace(TINY, n_ctx=256), 2)
    genuine = lm_eval.tasks.TaskManager.load

    def load(manager: lm_eval.tasks.TaskManager, specs: list) -> dict:
        if not has_coqa and "coqa" in str(specs):
            raise ModuleNotFoundError("No module named 'transformers.data.metrics'")
        return genuine(manager, specs)

    with pytest.MonkeyPatch.context() as patch, contextmanager(build_run)(folder, patch) as run:
        for name in ("", ".squad_metrics"):
            patch.setitem(sys.modules, f"transformers.data.metrics{name}", metrics)
        patch.setattr(transformers.data, "metrics", metrics, raising=False)
        patch.setattr(lm_eval.tasks.TaskManager, "load", load)
        patch.setattr(datasets, "load_dataset", load_made_up)
        patch.setattr(
            harness,
            "load_for_inference",
            lambda *_: Inference(model, eval_runs.BYTES, eval_runs.CPU, [], 1),
        )
        patch.setattr(
            "eval.lm.CheckpointLM.generate_until",
            lambda self, requests, **_: [BRACKETS[0]] * len(requests),
        )
        options = harness.Options(run=str(run), tasks=("core22", "piqa"), dtype="float32")
        return harness.score(options, harness.join()), run


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[ScoreRecord, Path]:
    return score_made_up(tmp_path_factory.mktemp("core"), has_coqa=True)


def test_a_scoring_has_all_that_lm_eval_has_and_names_the_rest(
    record: tuple[ScoreRecord, Path],
) -> None:
    scored, run = record
    of_core = [f"core22_{name}" for name in core22.CORE if name not in LACKING]
    assert set(scored.tasks) == {"piqa", "core22", *of_core}
    assert scored.tasks["core22"].missing == LACKING
    for name in of_core:
        assert scored.tasks[name].num_fewshot == core22.TASKS[name].shots, name
    assert (scored.tasks["piqa"].num_fewshot, "centered" in scored.tasks["piqa"].metrics) == (
        0,
        False,
    )
    (path,) = (run / "eval").glob("*.json")
    assert read_scores(path).tasks == scored.tasks


def test_a_task_whose_package_is_not_there_is_named_and_costs_no_other(tmp_path: Path) -> None:
    scored, _ = score_made_up(tmp_path, has_coqa=False)
    assert scored.tasks["core22"].missing == ["jeopardy", "squad", "coqa"]
    assert len(scored.tasks["core22"].subtasks) == 19 and "core22_coqa" not in scored.tasks
    assert "a mean of 19 of CORE's 22 tasks" in harness.scores_page(scored)


def test_the_mean_is_that_of_its_tasks_values(record: tuple[ScoreRecord, Path]) -> None:
    scored, _ = record
    total = 0.0
    for name, task in core22.TASKS.items():
        if task.lm_eval is not None:
            accuracy = scored.tasks[name].metrics[task.metric].value
            total += (accuracy - task.guessing) / (1 - task.guessing)
    assert scored.tasks["core22"].metrics["centered"].value == pytest.approx(total / 20)


def test_brackets_count_as_they_are(record: tuple[ScoreRecord, Path]) -> None:
    """The model's answer is right for 7 of 13 documents; by lm-eval's own YAML, which leaves out
    punctuation, all would be."""
    scored, _ = record
    metrics = scored.tasks["core22_bigbench_dyck_languages"].metrics
    assert metrics["exact_match"].value == pytest.approx(7 / 13)


def test_the_page_shows_each_centered_accuracy_and_what_is_missing(
    record: tuple[ScoreRecord, Path],
) -> None:
    page = harness.scores_page(record[0])
    assert page.count("| centered ") == 21
    assert "core22: a mean of 20 of CORE's 22 tasks, without jeopardy, squad, and by" in page


def test_a_task_that_lm_eval_lacks_is_taken_from_a_yaml_of_ones_own(tmp_path: Path) -> None:
    from tests.eval.test_harness import make_task

    rows = [{"q": f"{i}?", "a": str(i)} for i in range(12)]
    mine = make_task(
        tmp_path / "mine",
        rows,
        "core22_jeopardy",
        output_type="generate_until",
        doc_to_choice=None,
        doc_to_target="a",
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    loaded = tasks.load(["core22_jeopardy"], str(mine))["tasks"]
    assert loaded["core22_jeopardy"].config.num_fewshot == 10
    with pytest.raises(UserError, match="core22_jeopardy: lm-eval has no such task: give a YAML"):
        tasks.load(["core22_jeopardy"], None)
