"""eval/harness.py with eval/tasks.py: scores against the models' own log-likelihoods, chance, what
is written where, questions of validation shards, data without network, public models, mistakes."""

import contextlib
import gzip
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import datasets
import lm_eval.tasks
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval import (
    demo_questions,
    export,
    harness,
    inference,
    precision,
    public_models,
    sample,
    tasks,
)
from eval.inference import Inference
from eval.results import TaskScores
from lib.errors import UserError
from model import GPT
from runtime import checkpoint
from runtime.parallel import World
from tests.conftest import process, write_index
from tests.helpers import eval_runs
from tests.helpers.eval_runs import (
    TINY,
    build,
    build_lm,
    build_run,
    call,
    expected_pair,
    make_llama,
    refused,
    request,
    rolled,
)
from tests.helpers.hub_server import HubServer, write_repository
from tests.helpers.scaling_runs import edit
from tests.helpers.text_files import BEGINS, DIGITS_APART, write_tokenizer

SUM = {"q": "1 + 1 =", "answers": ["2", "3"], "gold": 0}
# keys of a task's YAML
GENERATES = {"output_type": "generate_until", "doc_to_choice": None}
EXACT_MATCH = [{"metric": "exact_match", "aggregation": "mean"}]

finished = pytest.fixture(build_run)  # a finished run of a tiny model and its data


@pytest.fixture
def run(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished run, for which the demo makes a fifth of the questions."""
    monkeypatch.setattr(demo_questions, "QUESTIONS", 20)
    return finished


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Hugging Face's format."""
    return make_llama(tmp_path_factory.mktemp("hub") / "tiny-llama")


@contextlib.contextmanager
def temporary_run(folder: Path) -> Iterator[Path]:
    """The finished run for a fixture of the whole module: working directory and environment are
    restored when the fixture has what it needs, not at the end of the module."""
    with pytest.MonkeyPatch.context() as patch:
        yield from build_run(folder, patch)


class Printed(NamedTuple):
    out: str
    err: str


def printed_by(entry: ModuleType, *arguments: object) -> Printed:
    """What a command that must succeed prints, for fixtures of the whole module, which cannot use
    capsys."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        call(entry, *arguments)
    return Printed(out.getvalue(), err.getvalue())


def record_of(run: Path, name: str) -> dict:
    return json.loads((run / "eval" / f"{name}.json").read_text())


def make_task(folder: Path, rows: list[dict], name: str = "sums", **changes: object) -> Path:
    """A folder for include=: a task over `rows` of q, answers, gold; multiple choice but for other
    keys of its YAML."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "task": name,
        "dataset_path": "json",
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "dataset_kwargs": {
            "data_files": {"validation": str(data)},
            "cache_dir": str(folder / "cache"),
        },
        "doc_to_text": "q",
        "doc_to_choice": "answers",
        "doc_to_target": "gold",
        "metadata": {"version": 1.0},
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{name}.yaml").write_text(json.dumps(settings | changes))  # JSON is YAML
    return folder


# ------------------------------------------------------------------------------- scores of the demo


@dataclass(frozen=True)
class DemoScoring:
    """Twelve documents of val_ppl and twelve questions of val_cloze, scored."""

    run: Path
    record: dict
    page: str  # what the command printed
    environment: dict[str, str]  # as the command left it
    model: GPT  # with the weights of the run
    texts: list[str]  # of val_ppl
    questions: list[dict]  # of val_cloze


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoScoring:
    words = ["--tasks", "demo", "limit=12", "micro_batch=8", "dtype=float32", "--device=cpu"]
    with (
        temporary_run(tmp_path_factory.mktemp("demo")) as run,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(demo_questions, "QUESTIONS", 20)
        page = printed_by(harness, run, *words).out
        documents = demo_questions.documents(str(run))["validation"]
        questions = demo_questions.questions(str(run))["validation"]
        return DemoScoring(
            run=run,
            record=record_of(run, "demo_float32_limit12"),
            page=page,
            environment=dict(os.environ),
            model=build(),
            texts=[document["text"] for document in list(documents)[:12]],
            questions=list(questions)[:12],
        )


@pytest.fixture(scope="module")
def nats(demo: DemoScoring) -> np.ndarray:
    """Of each text, token by token."""
    return np.array([-rolled(demo.model, [256], list(text.encode())) for text in demo.texts])


@pytest.fixture(scope="module")
def is_right(demo: DemoScoring) -> list[int]:
    """Of each question 1 where the model prefers its answer, token by token, else 0."""
    verdicts = []
    for question in demo.questions:
        context = question["context"]
        totals = [expected_pair(demo.model, context, c)[0] for c in question["choices"]]
        verdicts.append(int(np.argmax(totals) == question["label"]))
    return verdicts


def test_bits_per_byte_are_the_models_own(demo: DemoScoring, nats: np.ndarray) -> None:
    text_bytes = sum(len(text.encode()) for text in demo.texts)
    bits_per_byte = demo.record["tasks"]["val_ppl"]["bits_per_byte"]
    assert bits_per_byte == pytest.approx(nats.sum() / text_bytes / math.log(2), rel=1e-5)


def test_the_error_of_bits_per_byte_is_that_of_a_bootstrap_over_documents(
    demo: DemoScoring, nats: np.ndarray
) -> None:
    sizes = np.array([len(text.encode()) for text in demo.texts])
    draws = np.random.default_rng(0).integers(12, size=(20_000, 12))
    bootstrap = (nats[draws].sum(1) / sizes[draws].sum(1) / math.log(2)).std()
    error = demo.record["tasks"]["val_ppl"]["bits_per_byte_se"]
    assert error == pytest.approx(bootstrap * math.sqrt(12 / 11), rel=0.05)


def test_the_accuracy_of_cloze_questions_is_the_models_own(
    demo: DemoScoring, is_right: list[int]
) -> None:
    cloze = demo.record["tasks"]["val_cloze"]
    assert cloze["n"] == 12
    assert cloze["acc"] == pytest.approx(np.mean(is_right))


def test_the_error_of_an_accuracy_is_that_of_a_mean(demo: DemoScoring, is_right: list[int]) -> None:
    error = demo.record["tasks"]["val_cloze"]["acc_se"]
    assert error == pytest.approx(np.std(is_right, ddof=1) / math.sqrt(12))


def test_the_chance_of_cloze_questions_is_a_quarter(demo: DemoScoring) -> None:
    assert demo.record["tasks"]["val_cloze"]["chance"] == 0.25


def test_a_record_names_the_step_of_the_checkpoint(demo: DemoScoring) -> None:
    assert demo.record["step"] == 1


def test_no_temporary_file_is_left(demo: DemoScoring) -> None:
    assert not list(demo.run.rglob("*.tmp"))


def test_the_demo_keeps_datasets_off_the_network(demo: DemoScoring) -> None:
    assert demo.environment["HF_DATASETS_OFFLINE"] == "1"


def test_the_page_shows_a_score_with_its_chance(demo: DemoScoring) -> None:
    assert "val_cloze" in demo.page
    assert f"{demo.record['tasks']['val_cloze']['acc']:.4f}" in demo.page
    assert "0.25" in demo.page


def test_the_page_marks_scores_of_a_part_of_the_documents(demo: DemoScoring) -> None:
    assert "limit=12" in demo.page


def test_requests_beyond_the_context_are_counted_and_reported(demo: DemoScoring) -> None:
    """A context of 32 bytes holds none of the 12 questions of 4 choices whole."""
    assert demo.record["truncated_requests"] == 48
    assert "48 requests were longer than the context" in demo.page


def test_file_names_tell_the_step_that_was_asked_for(run: Path) -> None:
    call(harness, run, "--tasks", "val_ppl", "limit=1", "step=1")
    assert {path.name for path in (run / "eval").glob("*step*")} == {
        "val_ppl_limit1_step1.json",
        "samples_val_ppl_limit1_step1.jsonl.gz",
    }


# ------------------------------------------------------------------------------------ two processes

# The command where importing transformers or accelerate, or opening a socket in Python, is an
# error.
CLOSED = """import runpy, socket, sys
class Block:
    def find_spec(name, *_):
        if name in ('transformers', 'accelerate'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block)
socket.socket.connect = socket.create_connection = socket.getaddrinfo = None
runpy.run_module('eval.harness', run_name='__main__')"""


@dataclass(frozen=True)
class Scoring:
    scores: dict  # task -> its row
    logs: dict[str, bytes]  # file name -> content
    printed: Printed


def take_scoring(run: Path, printed: Printed) -> Scoring:
    """What a scoring of the demo has written, removed from the run."""
    logs = {path.name: path.read_bytes() for path in (run / "eval").glob("*.gz")}
    scores = record_of(run, "demo_float32_limit12")["tasks"]
    shutil.rmtree(run / "eval")
    return Scoring(scores, logs, printed)


@dataclass(frozen=True)
class Launches:
    """The demo scored by two processes without network, and by this process alone."""

    torchrun: Scoring
    alone: Scoring


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("launches")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    (folder / "closed.py").write_text(CLOSED)
    with temporary_run(folder) as run:
        arguments = [run, "tasks=demo", "limit=12", "dtype=float32", "device=cpu"]
        ended = process(*launcher, folder / "closed.py", *arguments, cwd=folder)
        assert ended.returncode == 0, ended.stderr
        torchrun = take_scoring(run, Printed(ended.stdout, ended.stderr))
        alone = take_scoring(run, printed_by(harness, *arguments))
    return Launches(torchrun, alone)


def test_two_processes_without_network_write_the_scores_of_one(launches: Launches) -> None:
    assert launches.torchrun.scores == launches.alone.scores


def test_two_processes_write_the_logs_of_one_to_the_byte(launches: Launches) -> None:
    assert len(launches.torchrun.logs) == 2
    assert launches.torchrun.logs == launches.alone.logs


def test_two_processes_print_the_page_of_one(launches: Launches) -> None:
    assert launches.torchrun.printed.out == launches.alone.printed.out


def test_a_scoring_without_warnings_leaves_stderr_empty(launches: Launches) -> None:
    assert launches.alone.printed.err == ""


def test_the_mistake_of_one_rank_is_raised_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(options: harness.Options, world: World) -> None:
        if world.rank == 1:
            raise ZeroDivisionError

    monkeypatch.setattr(harness, "_prepare", prepare)
    options = harness.Options(run="hf:none", tasks=("piqa",))
    errors = eval_runs.on_two_ranks(
        monkeypatch, checkpoint, lambda world: harness.score(options, world)
    )
    assert [type(error) for error in errors] == [ZeroDivisionError, ZeroDivisionError]


# ------------------------------------------------------------------------------------------- chance


def arc_row(stem: str, choices: list[str], label: int) -> dict:
    marks = "ABCDE" if len(stem) % 3 else "12345"  # both occur in ARC
    return {
        "id": stem,
        "question": f"{stem}?",
        "answerKey": marks[label],
        "choices": {"text": choices, "label": list(marks[: len(choices)])},
    }


def winogrande_row(stem: str, choices: list[str], label: int) -> dict:
    return {
        "sentence": f"{stem} _ {stem[::-1]}.",
        "option1": choices[0],
        "option2": choices[1],
        "answer": str(label + 1),
    }


def mmlu_row(stem: str, choices: list[str], label: int) -> dict:
    return {"question": stem, "subject": "made up", "choices": choices, "answer": label}


class Layout(NamedTuple):
    task: str
    n_choices: tuple[int, ...]  # of each question
    row: Callable[[str, list[str], int], dict]  # of the data set


# Data set: a task of each kind. Questions of ARC have 3 to 5 answers.
LAYOUTS = {
    "allenai/ai2_arc": Layout("arc_easy", (5, 4, 3, 5, 5, 4), arc_row),
    "allenai/winogrande": Layout("winogrande", (2, 2, 2, 2, 2, 2), winogrande_row),
    "cais/mmlu": Layout("mmlu_anatomy", (4, 4, 4, 4, 4, 4), mmlu_row),
}
CHANCE_TASKS = tuple(layout.task for layout in LAYOUTS.values())


def load_questions(path: str, **_: object) -> dict[str, datasets.Dataset]:
    """datasets.load_dataset() of made-up questions, each once with each answer as the right one:
    whoever looks at the texts alone, however he decides, is right exactly once per question."""
    layout = LAYOUTS[path]
    rng = random.Random(layout.task)
    rows = []
    for number, n_choices in enumerate(layout.n_choices):
        texts = []
        for part in range(1 + n_choices):
            texts.append(eval_runs.words(rng, rng.randint(1, 8)) + f" {part}{number}")
        stem, *choices = texts
        rows += [layout.row(stem, choices, label) for label in range(n_choices)]
    rng.shuffle(rows)
    return dict.fromkeys(("train", "dev", "validation", "test"), datasets.Dataset.from_list(rows))


def read_log(path: Path) -> list[dict]:
    """The rows of a samples_TASK.jsonl.gz."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@dataclass(frozen=True)
class RandomScoring:
    """The tasks of LAYOUTS, scored by a random model."""

    scores: dict[str, TaskScores]
    samples: dict[str, list[dict]]  # task -> the rows of its log


@pytest.fixture(scope="module")
def random_scoring(tmp_path_factory: pytest.TempPathFactory) -> RandomScoring:
    model = build(replace(TINY, n_ctx=2048), 2)
    loaded = Inference(model, eval_runs.BYTES, eval_runs.CPU, [], 1)
    with (
        temporary_run(tmp_path_factory.mktemp("random")) as run,
        pytest.MonkeyPatch.context() as patch,
    ):
        # a subject alone, without lm-eval's whole index
        patch.setitem(tasks.FOLDERS, "mmlu_anatomy", "mmlu/default")
        patch.setattr(tasks, "FULL", (*tasks.FULL, "mmlu_anatomy"))
        patch.setattr(datasets, "load_dataset", load_questions)
        patch.setattr(harness, "load_for_inference", lambda *_: loaded)
        options = harness.Options(run=str(run), tasks=CHANCE_TASKS, dtype="float32")
        scores = harness.score(options, harness.join()).tasks
        samples = {task: read_log(run / "eval" / row.samples) for task, row in scores.items()}
    return RandomScoring(scores, samples)


def test_the_tasks_that_were_asked_for_are_scored(random_scoring: RandomScoring) -> None:
    assert random_scoring.scores.keys() == set(CHANCE_TASKS)


@pytest.mark.parametrize("task", CHANCE_TASKS)
def test_a_random_model_scores_chance(task: str, random_scoring: RandomScoring) -> None:
    """To the last digit, where two standard errors would do: whatever the model prefers, one copy
    of each question agrees.

    Any look at the label, or an answer that is read at another place than its neighbours, would
    show."""
    scores = random_scoring.scores[task]
    accuracies = [metric.value for metric in scores.metrics.values()]
    assert accuracies == pytest.approx([scores.chance] * len(accuracies), abs=1e-12)


@pytest.mark.parametrize("task", ["arc_easy", "mmlu_anatomy"])
def test_a_random_model_does_not_always_prefer_the_same_place(
    task: str, random_scoring: RandomScoring
) -> None:
    """Else it could score chance without reading the answers. Winogrande is left out: its six
    questions of two answers are too few."""
    preferred = set()
    for row in random_scoring.samples[task]:
        log_likelihoods = [float(response[0]) for response in row["filtered_resps"]]
        preferred.add(int(np.argmax(log_likelihoods)))
    assert len(preferred) > 1


@pytest.mark.parametrize("task", CHANCE_TASKS)
def test_a_log_has_a_row_for_each_document(task: str, random_scoring: RandomScoring) -> None:
    assert len(random_scoring.samples[task]) == random_scoring.scores[task].n


def test_a_question_of_mmlu_follows_five_examples(random_scoring: RandomScoring) -> None:
    assert random_scoring.scores["mmlu_anatomy"].num_fewshot == 5
    first_row = random_scoring.samples["mmlu_anatomy"][0]
    # in each of the four requests of a document, the question's own after those of the examples
    assert str(first_row["arguments"]).count("Answer:") == 4 * 6


# ----------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "entry, arguments, sentence",
    [
        (harness, "RUN tasks=,", "tasks= names no task: give tasks=demo or"),
        (harness, "RUN tasks=demo limit=0", "limit=0 must be at least 1"),
        (harness, "RUN tasks=demo device=cuda:9", "device='cuda:9' is not usable here"),
        (
            harness,
            "RUN tasks=demo fp8=rowwise dtype=float32",
            "fp8=rowwise multiplies FP8 into BF16, so dtype=float32",
        ),
        (harness, "RUN tasks=demo step=3", "has no such checkpoint, but those of steps 1"),
        (harness, "hf:gpt2 tasks=demo", "demo tasks are for runs of ours, and hf:gpt2 is none"),
        (harness, "hf:gpt2 tasks=piqa fp8=rowwise", "fp8=, step="),
        (harness, "hf:gpt2 tasks=piqa step=3", "fp8=, step="),
        (harness, "nowhere tasks=demo", "is no run"),
        (sample, "nowhere", "is no run"),
        (precision, "nowhere", "is no run"),
        (sample, f"RUN {'x' * 33}", "the prompt has 33 tokens, but the context of"),
        (sample, "RUN hi n=0", "n=0 must be at least 1"),
        (sample, "RUN hi temperature=-1", "must be at least 0"),
        (precision, "RUN recipes=tensorwise,rowise", "did you mean 'rowwise'?"),
    ],
)
def test_a_mistake_on_the_command_line_gets_a_sentence_and_writes_nothing(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    entry: ModuleType,
    arguments: str,
    sentence: str,
) -> None:
    words = arguments.replace("RUN", str(run)).split(" ")
    assert sentence in refused(capsys, entry, *words)
    assert not (run / "eval").exists()


class TaskIndex(NamedTuple):
    """What lm-eval was asked to index."""

    is_whole: bool  # all of its own tasks, which takes ten seconds
    folders: list[Path]


# Ours alone: a name that is not ours is not looked for in a folder called like it, as a group may
# name tasks of other folders.
OUR_INDEX = TaskIndex(is_whole=False, folders=[tasks.DEMO_TASKS])
WHOLE_INDEX = TaskIndex(is_whole=True, folders=[tasks.DEMO_TASKS])


@pytest.fixture
def indexes(monkeypatch: pytest.MonkeyPatch) -> list[TaskIndex]:
    """What is asked of lm-eval's TaskManager, which here never reads the whole of its index."""
    asked_for = []
    make_manager = lm_eval.tasks.TaskManager

    def make_small_manager(
        include_path: list[Path], include_defaults: bool, **settings: object
    ) -> lm_eval.tasks.TaskManager:
        asked_for.append(TaskIndex(include_defaults, include_path))
        return make_manager(include_path=include_path, include_defaults=False, **settings)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", make_small_manager)
    return asked_for


@pytest.mark.parametrize("names, nearest", [("demo,val_close", "val_cloze"), ("dmeo", "demo")])
def test_an_unknown_task_is_sought_in_lm_evals_whole_index_and_names_the_nearest(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    indexes: list[TaskIndex],
    names: str,
    nearest: str,
) -> None:
    assert f"near: {nearest}" in refused(capsys, harness, run, f"tasks={names}")
    assert indexes == [OUR_INDEX, WHOLE_INDEX]


def test_our_tasks_do_not_wait_for_lm_evals_whole_index(
    run: Path, indexes: list[TaskIndex]
) -> None:
    call(harness, run, "tasks=demo", "limit=2")
    assert indexes == [OUR_INDEX]


# ------------------------------------------------------------------------------------ public models


def test_a_public_models_log_likelihoods_in_bf16_are_its_own(public: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(public)
    model = AutoModelForCausalLM.from_pretrained(public, dtype=torch.bfloat16)
    pairs = [("The cat", " sat on the mat"), ("A", " dog"), ("One two", " three four")]
    lm = public_models.public_lm(str(public), "cpu", "bfloat16", 1)
    pairs_scored = lm.loglikelihood([request(*pair) for pair in pairs], True)
    expected = []
    for context, continuation in pairs:
        n_context = len(tokenizer(context).input_ids)
        ids = tokenizer(context + continuation).input_ids
        log_probabilities = model(torch.tensor([ids])).logits.float().log_softmax(-1)[0]
        positions = range(n_context, len(ids))
        expected.append(sum(log_probabilities[t - 1, ids[t]].item() for t in positions))
    assert [total for total, _ in pairs_scored] == pytest.approx(expected, abs=1e-4)


@dataclass(frozen=True)
class ImportScoring:
    """A public model scored by lm-eval's own model, and imported by ours."""

    public: Path
    ours: dict  # record
    theirs: dict
    table: str  # that --table prints of both


def rows_for_choice_and_rolling() -> list[dict]:
    """Where documents end alike too: their last windows are the same tokens, of which more are
    scored in one than in another."""
    rng = random.Random(0)
    ending = " the cat sat on the mat and the dog ran away." * 8
    rows = []
    for number in range(24):
        question = eval_runs.words(rng, 6)
        if number > 9:
            question += ending
        choices = [eval_runs.words(rng, n) for n in (1, 2, 3, 2)]
        rows.append({"q": question, "answers": choices, "gold": number % 4})
    return rows


def only_record(pattern: str) -> dict:
    (path,) = Path("out").glob(f"{pattern}/eval/*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def import_scoring(public: Path, tmp_path_factory: pytest.TempPathFactory) -> ImportScoring:
    folder = tmp_path_factory.mktemp("import")
    rows = rows_for_choice_and_rolling()
    make_task(folder / "mine", rows)
    make_task(
        folder / "mine",
        rows,
        "rolled",
        doc_to_text="",
        doc_to_target="q",
        doc_to_choice=None,
        output_type="loglikelihood_rolling",
        metric_list=[{"metric": "word_perplexity"}],
    )
    words = ["tasks=sums,rolled", "include=mine", "dtype=float32", "device=cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        printed_by(export, "--from-hf", public, "out/ours")
        printed_by(harness, "out/ours", *words)
        printed_by(harness, f"hf:{public}", *words)
        table = printed_by(harness, "--table", "out", "out=table").out
        return ImportScoring(public, only_record("ours"), only_record("hf_*_tiny-llama"), table)


def test_a_record_names_its_model(import_scoring: ImportScoring) -> None:
    assert import_scoring.ours["run"] == "out/ours"
    assert import_scoring.theirs["run"] == f"hf:{import_scoring.public}"


@pytest.mark.parametrize("key", ["acc", "acc_se", "n", "docs_sha256"])
def test_an_import_is_right_where_lm_evals_own_model_is(
    key: str, import_scoring: ImportScoring
) -> None:
    ours = import_scoring.ours["tasks"]["sums"]
    assert ours[key] == import_scoring.theirs["tasks"]["sums"][key]


def test_an_import_has_the_perplexity_of_lm_evals_own_model(import_scoring: ImportScoring) -> None:
    theirs = import_scoring.theirs["tasks"]["rolled"]["word_perplexity"]
    ours = import_scoring.ours["tasks"]["rolled"]["word_perplexity"]
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_table_has_a_row_of_a_public_model(import_scoring: ImportScoring) -> None:
    assert "| tiny-llama, float32" in import_scoring.table


def test_a_public_tokenizer_that_agrees_with_its_tokenizer_json_gets_no_warning(
    public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public_models.public_lm(str(public), "cpu", "float32", 1)
    assert "scored with" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def digits_apart(public: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The public model with a tokenizer whose tokenizer.json splits digits, as the class that it
    names does not."""
    folder = shutil.copytree(public, tmp_path_factory.mktemp("digits") / "split")
    roles = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "Qwen2Tokenizer"}
    return write_tokenizer(folder, roles, pre_tokenizer=DIGITS_APART)


def test_a_public_tokenizer_that_differs_from_its_tokenizer_json_gets_a_warning(
    digits_apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public_models.public_lm(str(digits_apart), "cpu", "float32", 1)
    warning = "Qwen2Tokenizer makes other tokens than the model's tokenizer.json"
    assert warning in capsys.readouterr().err


def test_a_public_model_is_scored_by_the_rules_of_its_tokenizer_json(digits_apart: Path) -> None:
    file = Tokenizer.from_file(str(digits_apart / "tokenizer.json"))
    expected = [
        file.encode(text, add_special_tokens=False).ids for text in public_models.PROBE_TEXTS
    ]
    lm = public_models.public_lm(str(digits_apart), "cpu", "float32", 1)
    assert [lm.tok_encode(text) for text in public_models.PROBE_TEXTS] == expected


@pytest.fixture(scope="module")
def penalised(public: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The public model with a generation_config.json that asks for a repetition penalty."""
    folder = shutil.copytree(public, tmp_path_factory.mktemp("penalised") / "model")
    settings = {"eos_token_id": 1, "repetition_penalty": 5.0, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_a_public_models_answers_are_greedy_whatever_its_generation_config(
    penalised: Path,
) -> None:
    lm = public_models.public_lm(str(penalised), "cpu", "float32", 1)
    ids = lm.tokenizer("The cat sat", return_tensors="pt").input_ids
    n_prompt = ids.shape[1]
    for _ in range(40):
        best = lm.model(ids).logits[:, -1:].argmax(-1)
        if best.item() == lm.tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, best], dim=1)
    expected = lm.tokenizer.decode(ids[0, n_prompt:])
    settings = {"until": [], "max_gen_toks": 40}
    assert lm.generate_until([request("The cat sat", settings)], True) == [expected]


def test_a_penalty_that_a_public_model_asks_for_is_named(
    penalised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public_models.public_lm(str(penalised), "cpu", "float32", 1)
    warning = "answers are greedy, without repetition_penalty=5.0 of generation_config.json"
    assert warning in capsys.readouterr().err


SPARE = "<|spare_7|>"


class ExportedPair(NamedTuple):
    ours: Any  # our LM of an export in fp32
    theirs: Any  # lm-eval's own of it


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with out/ours, a run whose vocabulary has twenty special tokens, and its export in
    fp32."""
    folder = tmp_path_factory.mktemp("exported")
    original = make_llama(folder / "original", vocab_size=346, bos_token_id=0, eos_token_id=1)
    write_tokenizer(original, spare=20, post_processor=BEGINS)
    printed_by(export, "--from-hf", original, folder / "out/ours")
    printed_by(export, folder / "out/ours", folder / "exported", "dtype=fp32")
    return folder


@pytest.fixture
def exported_pair(exported: Path) -> ExportedPair:
    loaded = inference.load_for_inference(str(exported / "out/ours"), "cpu", "float32")
    ours = build_lm(loaded.model, tokenizer=loaded.tokenizer)
    theirs = public_models.public_lm(str(exported / "exported"), "cpu", "float32", 1)
    return ExportedPair(ours, theirs)


def answers(lm: Any, requests: list) -> list[str]:
    return lm.generate_until(requests, True)


def forty_requests() -> list:
    """With every name of the length, stop texts that are special tokens, prompts that spell
    them."""
    rng = random.Random(0)
    requests = []
    for i in range(40):
        beginning = "<|begin|>" if i % 5 == 0 else ""
        special = "<|spare_3|>" if i % 4 == 1 else ""
        first_words = eval_runs.words(rng, rng.randint(1, 4))
        last_words = eval_runs.words(rng, i % 3)
        prompt = f"{beginning}{first_words} {special} {last_words}"
        until = rng.sample(["\n", " a", SPARE], i % 4)
        length_name = ("max_new_tokens", "max_gen_toks", "max_tokens")[i % 3]
        length = rng.choice([4, 8, 20])
        requests.append(request(prompt, {length_name: length, "until": until, "temperature": 0.0}))
    return requests


def test_forty_answers_are_those_of_lm_evals_own_model(exported_pair: ExportedPair) -> None:
    requests = forty_requests()
    assert answers(exported_pair.ours, requests) == answers(exported_pair.theirs, requests)


def test_some_of_the_forty_answers_hold_special_tokens(exported_pair: ExportedPair) -> None:
    """Else their equality would say nothing of special tokens, which texts are cleared of."""
    ours = exported_pair.ours
    ours.tokenizer_ours = replace(ours.tokenizer_ours, special_ids=frozenset())
    texts = answers(ours, forty_requests())
    assert sum("<|spare" in text for text in texts) > 5


def pairs_that_spell_special_tokens() -> list:
    rng = random.Random(1)
    pairs = []
    for i in range(12):
        context = "<|begin|>" * (i % 2) + eval_runs.words(rng, 3) + "<|spare_3|>" * (i % 3)
        continuation = " " + eval_runs.words(rng, 2) + SPARE * (i % 2)
        pairs.append(request(context, continuation))
    return pairs


def test_answers_that_spell_special_tokens_score_as_in_lm_evals_own_model(
    exported_pair: ExportedPair,
) -> None:
    pairs = pairs_that_spell_special_tokens()
    ours = exported_pair.ours.loglikelihood(pairs, True)
    theirs = exported_pair.theirs.loglikelihood(pairs, True)
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_whole_texts_that_spell_special_tokens_score_as_in_lm_evals_own_model(
    exported_pair: ExportedPair,
) -> None:
    contexts = [request(pair.args[0]) for pair in pairs_that_spell_special_tokens()]
    ours = exported_pair.ours.loglikelihood_rolling(contexts, True)
    theirs = exported_pair.theirs.loglikelihood_rolling(contexts, True)
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_an_answer_ends_at_any_of_several_ends_as_in_lm_evals_own_model(
    exported_pair: ExportedPair,
) -> None:
    ours, theirs = exported_pair
    requests = [
        request(f"{word} and", {"max_gen_toks": 20, "until": []})
        for word in ("one", "two", "three", "four")
    ]
    answers_before = answers(ours, requests)
    second_end = int(ours.tokenizer_ours.encode(answers_before[0])[1])
    ours.ends = (1, second_end)
    theirs.model.generation_config.eos_token_id = list(ours.ends)
    # lm-eval leaves the end in its text, where it is no special token
    end_text = ours.tokenizer_ours.decode([second_end])
    expected = [text.removesuffix(end_text) for text in answers(theirs, requests)]
    answers_after = answers(ours, requests)
    assert answers_after == expected
    assert answers_after != answers_before


# -------------------------------------------------------------------------------- tasks of include=


@pytest.mark.parametrize("length", ["max_gen_toks", "max_new_tokens"])
def test_a_task_gets_answers_of_the_length_that_it_asks_for(
    run: Path, tmp_path: Path, length: str
) -> None:
    model = build()
    rows = []
    for question in ("one", "two", "three"):
        rows.append({"q": question, "gold": eval_runs.greedy_text(model, question.encode(), 6)})
    folder = make_task(
        tmp_path / "mine",
        rows,
        "short",
        **GENERATES,
        metric_list=EXACT_MATCH,
        generation_kwargs={length: 6, "until": ["never there"], "do_sample": False},
    )
    call(harness, run, "tasks=short", f"include={folder}", "dtype=float32")
    assert record_of(run, "short_float32")["tasks"]["short"]["exact_match"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_delimiter": ""},
        {
            "output_type": "loglikelihood",
            "doc_to_choice": None,
            "doc_to_target": "{{answers[1]}}",
        },
    ],
)
def test_an_empty_answer_is_refused_with_its_task_and_document(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    """It would score 0.0, above every other answer, and win."""
    monkeypatch.setattr(
        eval_runs.CheckpointLM, "_score", lambda *_: pytest.fail("scored for nothing")
    )
    rows = [SUM, SUM, SUM | {"answers": ["2", ""]}]
    folder = make_task(tmp_path / "mine", rows, **changes)
    message = refused(capsys, harness, run, "tasks=sums", f"include={folder}")
    assert "the task 'sums' has an empty answer in its document 2" in message
    assert not list((run / "eval").iterdir())


def test_a_task_without_an_empty_answer_is_scored(run: Path, tmp_path: Path) -> None:
    folder = make_task(tmp_path / "mine", [SUM, SUM, SUM])
    call(harness, run, "tasks=sums", f"include={folder}")
    assert record_of(run, "sums")["tasks"]["sums"]["n"] == 3


def test_answers_that_the_context_cuts_are_counted_and_reported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 16 tokens: that is what a context of 32 has room for of the 40 that the task asks for."""
    model = build()
    questions = ["0123456789" * 4, "0123456789" * 5]
    folder = make_task(
        tmp_path / "mine",
        [{"q": question, "gold": "x"} for question in questions],
        "long",
        **GENERATES,
        metric_list=EXACT_MATCH,
        generation_kwargs={"max_gen_toks": 40, "until": ["never there"]},
    )
    call(harness, run, "tasks=long", f"include={folder}", "dtype=float32")
    cut_answers = [eval_runs.greedy_text(model, text.encode()[-16:], 16) for text in questions]
    assert all(cut_answers)  # not ended by the model itself
    assert record_of(run, "long_float32")["shortened_answers"] == 2
    assert "2 answers were cut by the end of the context" in capsys.readouterr().out


OWN_METRICS = """import numpy as np
def mean(values): return np.float32(np.mean(values))
def matrix(values): return [[1, 0], [0, 1]]
def score(doc, results): return {'half': 0.5, 'confusion': 1}
"""


@dataclass(frozen=True)
class MetricScoring:
    """Two tasks with metrics that give no number: perplexity, which is not for multiple choice, and
    confusion, whose aggregate is a matrix."""

    sums: dict
    own: dict
    page: str


def write_tasks_with_odd_metrics(folder: Path) -> None:
    folder.mkdir()
    (folder / "own.py").write_text(OWN_METRICS)
    names = ("acc", "f1", "perplexity")
    make_task(folder, [SUM, SUM], metric_list=[{"metric": name} for name in names])
    make_task(
        folder,
        [SUM, SUM],
        "own",
        process_results="SCORE",
        metric_list=[
            {"metric": "half", "aggregation": "MEAN", "higher_is_better": True},
            {"metric": "confusion", "aggregation": "MATRIX", "higher_is_better": True},
        ],
    )
    settings = (folder / "own.yaml").read_text()
    for name in ("mean", "matrix", "score"):
        settings = settings.replace(f'"{name.upper()}"', f"!function own.{name}")
    (folder / "own.yaml").write_text(settings)


@pytest.fixture(scope="module")
def metric_scoring(tmp_path_factory: pytest.TempPathFactory) -> MetricScoring:
    folder = tmp_path_factory.mktemp("metrics")
    write_tasks_with_odd_metrics(folder / "mine")
    with temporary_run(folder) as run:
        words = ["tasks=sums,own", f"include={folder / 'mine'}", "dtype=float32"]
        page = printed_by(harness, run, *words).out
        scores = record_of(run, "sums+own_float32")["tasks"]
    return MetricScoring(scores["sums"], scores["own"], page)


def test_a_record_lists_the_metrics_that_are_not_computed(metric_scoring: MetricScoring) -> None:
    assert metric_scoring.sums["not_scored"] == ["perplexity"]
    assert metric_scoring.own["not_scored"] == ["confusion"]


@pytest.mark.parametrize("task, metric", [("sums", "perplexity"), ("own", "confusion")])
def test_the_page_names_a_metric_that_is_not_computed(
    task: str, metric: str, metric_scoring: MetricScoring
) -> None:
    assert f"{task}: no number was computed for {metric}" in metric_scoring.page


def test_the_other_metrics_of_a_task_are_computed(metric_scoring: MetricScoring) -> None:
    assert "f1" in metric_scoring.sums
    assert metric_scoring.own["half"] == 0.5


@pytest.fixture
def warnings_of(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """warnings_of(task, **changes): lines on stderr while a task with these keys in its YAML is
    scored, but for the progress."""

    def score_task(task: str = "sums", **changes: object) -> list[str]:
        rows = [SUM, SUM | {"q": "2 + 0 ="}, SUM | {"q": "4 - 2 ="}]
        folder = make_task(tmp_path / "mine", rows, task=task, **changes)
        call(harness, run, f"tasks={task}", f"include={folder}", "dtype=float32")
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if not line.startswith("scored")]

    return score_task


@pytest.mark.parametrize(
    "changes, warning",
    [
        ({"num_fewshot": 1}, "num_fewshot > 0 but fewshot_split is None"),
        ({"task": "piqa"}, "Task 'piqa' from "),
    ],
)
def test_a_warning_of_lm_eval_is_printed_once(
    warnings_of: Callable[..., list[str]], changes: dict[str, Any], warning: str
) -> None:
    (line,) = warnings_of(**changes)
    assert line.startswith("lm-eval: ")
    assert warning in line


def test_an_ordinary_task_is_scored_without_a_warning(
    warnings_of: Callable[..., list[str]],
) -> None:
    assert warnings_of() == []


def test_an_include_without_yaml_gets_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    message = refused(capsys, harness, run, "tasks=sums", f"include={folder}")
    assert "holds no file called *.yaml" in message


def test_an_include_with_a_broken_yaml_gets_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """lm-eval would pass over it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    path = folder / "sums.yaml"
    path.write_text("task: sums\n  doc_to_text: q\n")
    message = refused(capsys, harness, run, "tasks=sums", f"include={folder}")
    assert f"{path} cannot be read as a task of lm-eval (ScannerError: " in message


def test_an_include_that_is_no_folder_gets_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    message = refused(capsys, harness, run, "tasks=sums", f"include={folder}")
    assert f"include={folder} is no folder" in message


def test_more_examples_than_documents_get_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_task(tmp_path / "mine", [SUM, SUM], num_fewshot=9, fewshot_split="validation")
    message = refused(capsys, harness, run, "tasks=sums", f"include={folder}")
    assert "the questions of the task 'sums' could not be made (ValueError: " in message


@pytest.mark.parametrize(
    "changes, reason",
    [({"doc_to_image": "q"}, "shows images"), ({"unsafe_code": True}, "runs code")],
)
def test_a_task_that_lm_eval_stops_at_is_refused_before_the_model_is_read(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(harness, "load_for_inference", lambda *_: pytest.fail("read for nothing"))
    folder = make_task(tmp_path / "mine", [SUM], **GENERATES, **changes)
    message = refused(capsys, harness, run, "tasks=sums", f"include={folder}")
    assert f"the task 'sums' {reason}" in message


# ------------------------------------------------------------------------- unsafe folders of models


def check_is_refused(folder: Path, reason: str) -> None:
    with pytest.raises(UserError, match=f"could not be loaded .*{reason}"):
        public_models.public_lm(str(folder), "cpu", "float32", 1)


def test_a_pickled_public_model_is_refused(public: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(public, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    check_is_refused(folder, "and safetensors")


def test_a_public_model_with_code_of_its_own_is_refused_and_the_code_not_run(
    public: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(public, tmp_path / "own")
    trace = tmp_path / "ran"
    edit(
        folder / "config.json",
        model_type="strange",
        auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Model"},
    )
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nEvil = Model = None\n")
    check_is_refused(folder, "without code of their own")
    assert not trace.exists()


def test_a_public_model_without_transformers_gets_what_to_install(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    check_is_refused(public, "pip install transformers accelerate")


# ------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class GroupScoring:
    """Two multiple-choice tasks, `sums` of two documents and `four` of one, in a group `plain`
    without a score of its own and in a group `scored` with one; beside each a task `echo` that
    generates."""

    record: dict  # of scored and echo
    plain_page: str
    scored_page: str
    table: str


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> GroupScoring:
    root = tmp_path_factory.mktemp("groups")
    folder = make_task(root / "mine", [SUM, SUM])
    make_task(folder, [{"q": "2 + 2 =", "answers": ["1", "2", "3", "4"], "gold": 3}], "four")
    make_task(
        folder,
        [SUM],
        "echo",
        **GENERATES,
        doc_to_target="gold",
        metric_list=EXACT_MATCH,
        generation_kwargs={"max_gen_toks": 5},
    )
    plain = {"group": "plain", "task": ["sums", "four"]}
    scored = plain | {"group": "scored", "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "plain.yaml").write_text(json.dumps(plain))
    (folder / "scored.yaml").write_text(json.dumps(scored))
    with temporary_run(root) as run:
        return GroupScoring(
            plain_page=printed_by(harness, run, "tasks=plain,echo", f"include={folder}").out,
            scored_page=printed_by(harness, run, "tasks=scored,echo", f"include={folder}").out,
            table=printed_by(harness, "--table", run, f"out={root / 'table'}").out,
            record=record_of(run, "scored+echo"),
        )


def test_a_group_without_a_score_shows_its_tasks(groups: GroupScoring) -> None:
    assert groups.plain_page.count("| sums | acc ") == 1


def test_a_group_with_a_score_shows_it_instead_of_its_tasks(groups: GroupScoring) -> None:
    assert "| scored | acc " in groups.scored_page
    assert "| sums | acc " not in groups.scored_page


def test_the_table_has_a_column_for_the_tasks_of_a_group_without_a_score(
    groups: GroupScoring,
) -> None:
    assert "sums<br>acc [%]" in groups.table
    assert "| sums | acc " not in groups.table


def test_the_table_has_a_column_for_the_score_of_a_group(groups: GroupScoring) -> None:
    assert "scored<br>acc" in groups.table


def test_a_group_counts_the_documents_of_its_tasks(groups: GroupScoring) -> None:
    assert groups.record["tasks"]["scored"]["n"] == 3


def test_the_chance_of_a_group_is_the_mean_over_its_documents(groups: GroupScoring) -> None:
    chance = groups.record["tasks"]["scored"]["chance"]
    assert chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)


def test_a_group_has_the_number_of_examples_of_its_tasks(groups: GroupScoring) -> None:
    assert groups.record["tasks"]["scored"]["num_fewshot"] == 0


def test_a_task_that_generates_has_a_score_and_no_chance(groups: GroupScoring) -> None:
    echo = groups.record["tasks"]["echo"]
    assert echo["exact_match"] == 0
    assert echo["chance"] is None


# ------------------------------------------------------------------ refused before hours of scoring


@pytest.fixture
def no_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "evaluate", lambda *_: pytest.fail("scored for nothing"))


@pytest.mark.usefixtures("no_scoring")
def test_a_folder_that_cannot_be_written_is_named_before_the_scoring(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "eval").symlink_to("/proc/self")  # not even root may write there
    assert harness.main([str(run), "tasks=demo"]) == 1
    assert f"{run / 'eval'}" in capsys.readouterr().err


@pytest.mark.usefixtures("no_scoring")
def test_a_run_without_a_checkpoint_is_refused_before_the_scoring(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    sentence = refused(capsys, harness, run, "tasks=demo")
    assert "has no finished checkpoint yet" in sentence
    assert f"by the command in {run / 'env.json'}" in sentence


@pytest.mark.usefixtures("no_scoring")
def test_data_of_another_tokenizer_are_refused_before_the_scoring(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_index(Path("data/code"), tokenizer="gpt2")
    assert "was made with another tokenizer" in refused(capsys, harness, run, "--tasks", "demo")


# --------------------------------------------------------------- questions of the validation shards


@dataclass(frozen=True)
class DemoData:
    """All questions and documents that the demo makes of the finished run, made twice."""

    questions: list[dict]
    documents: list[dict]
    questions_again: list[dict]
    documents_again: list[dict]
    texts: dict[str, list[str]]  # source -> its whole validation documents


@pytest.fixture(scope="module")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    with temporary_run(tmp_path_factory.mktemp("questions")) as run:
        texts = {}
        for source in demo_questions._sources(str(run)):
            decode = source.tokenizer.decode
            texts[source.name] = [decode(ids.tolist()) for ids in source.documents]
        return DemoData(
            questions=list(demo_questions.questions(str(run))["validation"]),
            documents=list(demo_questions.documents(str(run))["validation"]),
            questions_again=list(demo_questions.questions(str(run))["validation"]),
            documents_again=list(demo_questions.documents(str(run))["validation"]),
            texts=texts,
        )


def test_questions_are_the_same_each_time(demo_data: DemoData) -> None:
    assert demo_data.questions == demo_data.questions_again


def test_documents_are_the_same_each_time(demo_data: DemoData) -> None:
    assert demo_data.documents == demo_data.documents_again


def test_there_are_two_hundred_questions_of_two_sources(demo_data: DemoData) -> None:
    assert len(demo_data.questions) == 200
    assert {question["source"] for question in demo_data.questions} == {"prose", "code"}


def test_all_validation_documents_are_read(demo_data: DemoData) -> None:
    assert sum(len(texts) for texts in demo_data.texts.values()) == 500


def test_documents_are_validation_documents_of_their_source(demo_data: DemoData) -> None:
    assert len(demo_data.documents) == 64
    for document in demo_data.documents:
        assert document["text"] in demo_data.texts[document["source"]]


def test_each_place_holds_the_answer_of_many_questions(demo_data: DemoData) -> None:
    labels = [question["label"] for question in demo_data.questions]
    assert np.bincount(labels, minlength=4).min() > 30


def test_contexts_have_96_characters(demo_data: DemoData) -> None:
    assert {len(question["context"]) for question in demo_data.questions} == {96}


def test_a_question_has_four_different_choices(demo_data: DemoData) -> None:
    for question in demo_data.questions:
        assert len(question["choices"]) == 4
        assert len(set(question["choices"])) == 4


def test_choices_have_32_characters_and_begin_with_a_blank(demo_data: DemoData) -> None:
    for question in demo_data.questions:
        for choice in question["choices"]:
            assert len(choice) == 32
            assert choice[0].isspace()


def test_too_few_documents_for_questions_are_answered_with_a_remedy(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [source._replace(documents=source.documents[:1]) for source in demo_sources(run)]
    monkeypatch.setattr(demo_questions, "_sources", lambda _: iter(sources))
    assert demo_questions.documents(str(run))["validation"].num_rows == len(sources)
    with pytest.raises(UserError, match=r"tasks=val_ppl, .* larger val_share="):
        demo_questions.questions(str(run))


def demo_sources(run: Path) -> list[demo_questions._Source]:
    return list(demo_questions._sources(str(run)))


def homes_of(question: dict, demo_data: DemoData) -> list[str]:
    """The documents in which the answer follows the context."""
    whole = question["context"] + question["choices"][question["label"]]
    return [text for text in demo_data.texts[question["source"]] if whole in text]


def wrong_choices(question: dict) -> list[str]:
    answer = question["choices"][question["label"]]
    return [choice for choice in question["choices"] if choice != answer]


def test_an_answer_follows_its_context_in_one_document(demo_data: DemoData) -> None:
    for question in demo_data.questions:
        assert len(homes_of(question, demo_data)) == 1


def test_a_wrong_choice_is_not_of_the_document_of_the_question(demo_data: DemoData) -> None:
    for question in demo_data.questions:
        (home,) = homes_of(question, demo_data)
        for choice in wrong_choices(question):
            assert choice not in home


def test_a_wrong_choice_is_cut_from_a_document_of_the_same_source(demo_data: DemoData) -> None:
    for question in demo_data.questions:
        for choice in wrong_choices(question):
            assert any(choice in text for text in demo_data.texts[question["source"]])


def choice_requests(questions: list[dict]) -> list:
    requests = []
    for question in questions:
        requests += [request(question["context"], choice) for choice in question["choices"]]
    return requests


def distance_from_chance(totals: list, questions: list[dict]) -> float:
    """Of the accuracy of judges, in standard errors of one judge's. totals: of each judge the
    log-likelihoods of choice_requests()."""
    labels = [question["label"] for question in questions]
    preferred = np.array(totals).reshape(-1, len(questions), 4).argmax(2)
    accuracy = (preferred == labels).mean()
    return abs(accuracy - 0.25) / math.sqrt(0.25 * 0.75 / len(questions))


def test_random_models_score_chance(demo_data: DemoData) -> None:
    """Over twelve made-up corpora it was 25.5 +- 0.9 %."""
    requests = choice_requests(demo_data.questions)
    totals = []
    for seed in range(4):
        lm = build_lm(build(replace(TINY, n_ctx=192), seed), 32)
        totals.append([total for total, _ in lm.loglikelihood(requests)])
    assert distance_from_chance(totals, demo_data.questions) < 2


def frequency_nats(text: str) -> float:
    """Of a judge who knows how frequent each letter is, and no more."""
    nats = 0.0
    for letter in text:
        nats += 3.0 if letter == " " else 1 + "abcdefghij".find(letter) / 9
    return nats


def test_a_judge_who_ignores_the_context_scores_chance(demo_data: DemoData) -> None:
    """Over twelve made-up corpora it was 25.5 +- 0.5 %."""
    requests = choice_requests(demo_data.questions)
    totals = [-frequency_nats(request.args[1]) for request in requests]
    assert distance_from_chance([totals], demo_data.questions) < 2


# ----------------------------------------------------------------------------- data without network


@dataclass(frozen=True)
class Fetched:
    """Data fetched from a Hub, then scored without network and with an empty cache elsewhere, as on
    another machine. Data that were not fetched: test_a_task_without_its_data_is_refused_by_name."""

    run: Path
    fetch: subprocess.CompletedProcess[str]
    scoring: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Fetched:
    folder = tmp_path_factory.mktemp("fetched")
    eval_runs.write_run(folder / "run")
    rows = [
        {"goal": f"goal {i} is", "sol1": f"one {i}", "sol2": f"another {i}", "label": i % 2}
        for i in range(7)
    ]
    files = {
        "data/train-00000-of-00001.parquet": rows[:3],
        "data/validation-00000-of-00001.parquet": rows,
    }
    write_repository(folder / "hub", "baber/piqa", files)
    saved = folder / "saved"
    harness_command = ["-m", "eval.harness"]
    with HubServer(folder / "hub") as server:
        fetch = process(
            *harness_command,
            "--fetch",
            saved,
            "tasks=piqa,demo",
            HF_ENDPOINT=server.url,
            HF_HOME=str(folder / "home"),
        )
    scoring = process(
        *harness_command,
        folder / "run",
        f"offline={saved}",
        "tasks=piqa",
        "dtype=float32",
        HF_ENDPOINT="http://127.0.0.1:1",
        HF_HOME=str(folder / "other_home"),
    )
    return Fetched(folder / "run", fetch, scoring)


def test_a_fetch_prints_the_number_of_documents(fetched: Fetched) -> None:
    assert fetched.fetch.returncode == 0, fetched.fetch.stderr
    assert fetched.fetch.stdout == "piqa: 7 documents\n"


def test_fetched_data_are_scored_without_network(fetched: Fetched) -> None:
    assert fetched.scoring.stderr == ""
    assert fetched.scoring.returncode == 0


def test_the_scores_of_fetched_data_are_of_all_their_documents(fetched: Fetched) -> None:
    piqa = record_of(fetched.run, "piqa_float32")["tasks"]["piqa"]
    assert piqa["n"] == 7
    assert piqa["chance"] == 0.5


# ----------------------------------------------------------------------------------- names of tasks


def test_the_tasks_of_full_are_in_lm_evals_folders_of_ours() -> None:
    their_folder = Path(lm_eval.__file__).parent / "tasks"
    folders = {their_folder / tasks.FOLDERS.get(name, name) for name in tasks.FULL}
    manager = lm_eval.tasks.TaskManager(include_path=[*folders], include_defaults=False)
    assert set(tasks.FULL) <= set(manager.all_tasks)


def test_full_has_twelve_tasks() -> None:
    assert len(tasks.FULL) == 12


def test_folders_are_named_of_tasks_of_full_alone() -> None:
    assert set(tasks.FOLDERS) < set(tasks.FULL)


def test_a_task_of_several_groups_is_named_once() -> None:
    assert tasks.expand(("core", "piqa", "full")) == list(tasks.FULL)


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for include=: a task `sums` of three documents, a group `five` with two examples of
    it, tasks with answers that are not greedy."""
    folder = make_task(tmp_path_factory.mktemp("include") / "mine", [SUM] * 3)
    make_task(folder, [SUM], "drawn", **GENERATES, generation_kwargs={"do_sample": True})
    make_task(folder, [SUM], "beams", **GENERATES, generation_kwargs={"num_beams": 4})
    (folder / "group.yaml").write_text(
        "group: five\ntask: [{task: sums, num_fewshot: 2, fewshot_split: validation}]\n"
    )
    return str(folder)


def test_a_group_may_show_examples_to_a_task(include: str) -> None:
    assert tasks.load(["five"], include)["tasks"]["sums"].config.num_fewshot == 2


def test_a_task_has_all_its_documents(include: str) -> None:
    assert len(tasks.load(["sums"], include)["tasks"]["sums"].eval_docs) == 3


@pytest.mark.parametrize(
    "names, reason",
    [
        (["sums", "five"], "five shows 2 examples to 'sums', other tasks= another number"),
        (["drawn"], "'drawn' asks for sampled answers"),
        (["beams"], "'beams' asks for .*: num_beams=4"),
    ],
)
def test_a_task_that_cannot_be_scored_as_asked_is_refused_by_name(
    include: str, names: list[str], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        tasks.load(names, include)


def test_a_task_without_its_data_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "mine", [SUM] * 3)
    tasks.load(["sums"], str(folder))  # a copy in datasets' cache does not help
    (folder / "sums.jsonl").unlink()
    reason = "the task 'sums' could not be loaded .FileNotFoundError: .*: its data come from where"
    with pytest.raises(UserError, match=reason):
        tasks.load(["sums"], str(folder))
