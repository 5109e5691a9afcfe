"""Is the scoring itself unbiased: a random model at chance, who knows the answers at one, his opposite at nought."""

import re
from dataclasses import replace

import pytest
import torch
from eval_runs import BYTES, TINY, build, build_run
from lm_eval.api.model import LM
from task_layouts import LAYOUTS, write

from eval import harness, task_list
from eval.sample import Inference
from eval.scores import Column, Score, read_samples

TASKS = tuple(LAYOUTS)
METRICS = ("acc", "acc_norm")


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def run(tmp_path_factory, monkeypatch_module):
    for task in TASKS:
        if task.startswith("mmlu_"):        # subjects of their own, found without reading lm-eval's whole index
            monkeypatch_module.setitem(task_list.FOLDERS, task, task_list.FOLDERS["mmlu"])
    return build_run(tmp_path_factory.mktemp("chance"), monkeypatch_module)


def score(run, folder, lm=None, patch=None):
    """Scores of all layouts by the harness; `lm` answers instead of the tiny random model."""
    model = build(replace(TINY, n_ctx=2048))
    if lm is not None:
        patch.setattr("eval.lm.CheckpointLM", lambda *_: lm)
    options = harness.Options(run=str(run), tasks=TASKS, offline=str(folder), dtype="float32", device="cpu")
    return harness.score(options, Inference(model, BYTES, torch.device("cpu"), []))["tasks"]


class Oracle(LM):
    """Gives the right answer `right` nats, the others `wrong`; it finds them by the question's id in the prompt."""

    def __init__(self, truth, right, wrong):
        super().__init__()
        self.truth, self.right, self.wrong = truth, right, wrong
        self.n_truncated, self.version, self.asked = 0, "0", set()

    def loglikelihood(self, requests, **_):
        return [(self.right if self.is_right(*request.args, request.task_name) else self.wrong, False) for request in requests]

    def is_right(self, context, continuation, task):
        *_, name = re.findall(r"q\d+x", context)        # the last: examples stand before the question
        says = self.truth[task][name]
        self.asked.add((task, name))
        return context.endswith(says) if task == "winogrande" else continuation.strip() == says

    def loglikelihood_rolling(self, requests, **_):
        raise AssertionError("no such task here")

    generate_until = loglikelihood_rolling


@pytest.fixture(scope="module")
def balanced(run, tmp_path_factory):
    """{task: (scores, logged samples)} of a tiny random model on six questions, each with every answer as the right one."""
    folder = tmp_path_factory.mktemp("balanced")
    write(folder, 6, balanced=True)
    scores = score(run, folder)
    return {task: (row, read_samples(Column(task, "acc", row["docs_sha256"], None, 0, ""),
                                     Score(row["acc"], None, None, 0, (run / "eval" / row["samples"],))))
            for task, row in scores.items()}


@pytest.mark.parametrize("task", TASKS)
def test_a_random_model_scores_chance(balanced, task):
    """To the last digit, where two standard errors would do: whatever the model prefers, one copy of each question agrees.

    Any look at the label, or an answer that is read at another place than its neighbours, would show."""
    row, _ = balanced[task]
    metrics = [metric for metric in METRICS if metric in row]
    assert metrics
    for metric in metrics:
        assert row[metric] == pytest.approx(row["chance"], abs=1e-12)
        assert abs(row[metric] - row["chance"]) <= 2 * row[f"{metric}_se"]


@pytest.mark.parametrize("right, wrong, expected", [(0.0, -5.0, 1.0), (-5.0, 0.0, 0.0)])
def test_who_knows_the_answers_scores_one_and_his_opposite_nought(run, tmp_path, monkeypatch, right, wrong, expected):
    oracle = Oracle(write(tmp_path, 12, balanced=False), right, wrong)
    scores = score(run, tmp_path, oracle, monkeypatch)
    assert oracle.asked == {(task, name) for task in TASKS for name in oracle.truth[task]}      # each question was asked
    for task in TASKS:
        assert {metric: scores[task][metric] for metric in METRICS if metric in scores[task]} == {
            metric: expected for metric in METRICS if metric in scores[task]}, task


@pytest.mark.parametrize("task", ["hellaswag", "piqa", "mmlu_anatomy"])
def test_the_model_prefers_answers_at_several_places(balanced, task):
    """Else the tests above would hold for a model that sees nothing."""
    row, samples = balanced[task]
    preferred = [max(range(len(s["filtered_resps"])), key=lambda c, s=s: float(s["filtered_resps"][c][0])) for s in samples]
    assert len(samples) == row["n"] and len(set(preferred)) > 1
