"""eval/harness.py with eval/tasks.py: scores against the models' own log-likelihoods, chance, what
is written where, questions of validation shards, data without network, public models, mistakes."""

import gzip
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

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
from lib.errors import UserError
from runtime import checkpoint
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
finished = pytest.fixture(build_run)
run = pytest.fixture(
    lambda finished, monkeypatch: monkeypatch.setattr(demo_questions, "QUESTIONS", 20) or finished
)
public = pytest.fixture(
    lambda tmp_path_factory: make_llama(tmp_path_factory.mktemp("hub") / "tiny-llama"),
    scope="module",
)


def record_of(run: Path, name: str):
    return json.loads((run / "eval" / f"{name}.json").read_text())


def make_task(folder: Path, rows: list[dict], name: str = "sums", **changes: object):
    """A folder for include=: a task over `rows` of q, answers, gold; multiple choice but for other
    keys of its YAML."""
    folder.mkdir(exist_ok=True)
    (data := folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(
        json.dumps(
            {  # JSON is YAML
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
            | changes
        )
    )
    return folder


def test_demo_scores_are_the_models_own_and_are_kept(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    call(
        harness,
        run,
        "--tasks",
        "demo",
        "limit=12",
        "micro_batch=8",
        "dtype=float32",
        "--device=cpu",
    )
    out, record, model = capsys.readouterr().out, record_of(run, "demo_float32_limit12"), build()
    assert (
        record["step"] == 1
        and not list(run.rglob("*.tmp"))
        and os.environ["HF_DATASETS_OFFLINE"] == "1"
    ), "asks no network"
    rows = [row["text"] for row in list(demo_questions.documents(str(run))["validation"])[:12]]
    nats = np.array([-rolled(model, [256], list(text.encode())) for text in rows])
    sizes = np.array([len(text.encode()) for text in rows])
    ppl, cloze = record["tasks"]["val_ppl"], record["tasks"]["val_cloze"]
    assert ppl["bits_per_byte"] == pytest.approx(nats.sum() / sizes.sum() / math.log(2), rel=1e-5)
    draws = np.random.default_rng(0).integers(12, size=(20_000, 12))
    bootstrap = (nats[draws].sum(1) / sizes[draws].sum(1) / math.log(2)).std()
    assert ppl["bits_per_byte_se"] == pytest.approx(bootstrap * math.sqrt(12 / 11), rel=0.05)

    questions = list(demo_questions.questions(str(run))["validation"])[:12]
    right = [
        int(
            np.argmax([expected_pair(model, q["context"], c)[0] for c in q["choices"]])
            == q["label"]
        )
        for q in questions
    ]
    assert (
        cloze["acc"] == pytest.approx(np.mean(right))
        and cloze["chance"] == 0.25
        and cloze["n"] == 12
    )
    assert cloze["acc_se"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(12))
    assert (
        "val_cloze" in out and f"{cloze['acc']:.4f}" in out and "0.25" in out and "limit=12" in out
    )
    # a context of 32 bytes holds no question whole, and it says so
    assert record["truncated_requests"] == 48
    assert "48 requests were longer than the context" in out
    call(harness, run, "--tasks", "val_ppl", "limit=1", "step=1")
    assert {path.name for path in (run / "eval").glob("*step*")} == {
        "val_ppl_limit1_step1.json",
        "samples_val_ppl_limit1_step1.jsonl.gz",
    }


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


def scores_and_logs(run: Path) -> tuple[dict, dict[str, bytes]]:
    """What a scoring has left, and removes it."""
    logs = {path.name: path.read_bytes() for path in (run / "eval").glob("*.gz")}
    scores = record_of(run, "demo_float32_limit12")["tasks"]
    shutil.rmtree(run / "eval")
    return scores, logs


def test_two_processes_write_what_one_writes_without_network(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished
    arguments = [run, "tasks=demo", "limit=12", "dtype=float32", "device=cpu"]
    (tmp_path / "closed.py").write_text(CLOSED)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = process(*torchrun, tmp_path / "closed.py", *arguments, cwd=run.parent.parent)
    assert done.returncode == 0, done.stderr
    by_two = scores_and_logs(run)
    call(harness, *arguments)
    by_one = capsys.readouterr()
    assert by_two == scores_and_logs(run)
    assert len(by_two[1]) == 2
    assert (done.stdout, by_one.err) == (by_one.out, "")


def test_the_mistake_of_one_rank_is_raised_by_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "_prepare", lambda options, world: 1 % (1 - world.rank))
    options = harness.Options(run="hf:none", tasks=("piqa",))
    errors = eval_runs.on_two_ranks(
        monkeypatch, checkpoint, lambda world: harness.score(options, world)
    )
    assert [*map(type, errors)] == [ZeroDivisionError] * 2


# Data set: a task of each kind, the answers of its questions, a row of the data set. Of the real
# ones of ARC some have 3 or 5 answers, and a part is numbered.
LAYOUTS = {
    "allenai/ai2_arc": (
        "arc_easy",
        (5, 4, 3, 5, 5, 4),
        lambda stem, choices, label: {
            "id": stem,
            "question": f"{stem}?",
            "answerKey": (marks := "ABCDE" if len(stem) % 3 else "12345")[label],
            "choices": {"text": choices, "label": list(marks[: len(choices)])},
        },
    ),
    "allenai/winogrande": (
        "winogrande",
        (2,) * 6,
        lambda stem, choices, label: {
            "sentence": f"{stem} _ {stem[::-1]}.",
            "option1": choices[0],
            "option2": choices[1],
            "answer": str(label + 1),
        },
    ),
    "cais/mmlu": (
        "mmlu_anatomy",
        (4,) * 6,
        lambda stem, choices, label: {
            "question": stem,
            "subject": "made up",
            "choices": choices,
            "answer": label,
        },
    ),
}


def load_questions(path: str, **_: object):
    """datasets.load_dataset() of made-up questions, each once with each answer as the right one:
    whoever looks at the texts alone, however he decides, is right exactly once per question."""
    task, sizes, row = LAYOUTS[path]
    rng, rows = random.Random(task), []
    for i, n in enumerate(sizes):
        stem, *choices = (
            eval_runs.words(rng, rng.randint(1, 8)) + f" {c}{i}" for c in range(1 + n)
        )
        rows += [row(stem, choices, label) for label in range(n)]
    rng.shuffle(rows)
    return dict.fromkeys(("train", "dev", "validation", "test"), datasets.Dataset.from_list(rows))


def test_a_random_model_scores_chance(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    """To the last digit, where two standard errors would do: whatever the model prefers, one copy
    of each question agrees.

    Any look at the label, or an answer that is read at another place than its neighbours, would
    show."""
    # a subject alone, without lm-eval's whole index
    monkeypatch.setitem(tasks.FOLDERS, "mmlu_anatomy", "mmlu/default")
    monkeypatch.setattr(tasks, "FULL", (*tasks.FULL, "mmlu_anatomy"))
    monkeypatch.setattr(datasets, "load_dataset", load_questions)
    model = build(replace(TINY, n_ctx=2048), 2)
    monkeypatch.setattr(
        harness,
        "load_for_inference",
        lambda *_: Inference(model, eval_runs.BYTES, eval_runs.CPU, [], 1),
    )
    names = tuple(task for task, *_ in LAYOUTS.values())
    scores = harness.score(
        harness.Options(run=str(run), tasks=names, dtype="float32"), harness.join()
    ).tasks
    assert scores.keys() == set(names)
    for task, row in scores.items():
        accuracies = [metric.value for metric in row.metrics.values()]
        assert accuracies == pytest.approx([row.chance] * len(accuracies), abs=1e-12), task
        samples = [
            *map(
                json.loads,
                gzip.decompress((run / "eval" / row.samples).read_bytes()).splitlines(),
            )
        ]
        preferred = {
            int(np.argmax([float(answer[0]) for answer in s["filtered_resps"]])) for s in samples
        }
        # and the model sees something, else this would hold as well
        assert len(samples) == row.n
        assert len(preferred) > 1 or task == "winogrande"
    assert (
        scores["mmlu_anatomy"].num_fewshot == 5
        and str(samples[0]["arguments"]).count("Answer:") == 4 * 6
    )


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
def test_mistakes_on_the_command_line_get_a_sentence(
    run: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    entry: ModuleType,
    arguments: str,
    sentence: str,
):
    assert (
        sentence in refused(capsys, entry, *arguments.replace("RUN", str(run)).split(" "))
        and not (run / "eval").exists()
    )


def test_an_unknown_task_names_the_nearest_and_local_names_do_not_wait(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Names that are not ours are not looked for in a folder called like them: a group may name
    tasks of other folders."""
    asked = []

    # lm-eval's own index takes ten seconds to build
    def small(include_defaults, make=lm_eval.tasks.TaskManager, **settings: object):
        asked.append(include_defaults)
        assert settings["include_path"] == [tasks.DEMO_TASKS]
        return make(include_defaults=False, **settings)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", small)
    for name, near in [("demo,val_close", "val_cloze"), ("dmeo", "demo")]:
        assert f"near: {near}" in refused(capsys, harness, run, f"tasks={name}")
    call(harness, run, "tasks=demo", "limit=2")
    assert asked == [False, True, False, True, False]


def test_a_public_models_log_likelihoods_in_bf16_are_its_own(public):
    tokenizer, model = (
        AutoTokenizer.from_pretrained(public),
        AutoModelForCausalLM.from_pretrained(public, dtype=torch.bfloat16),
    )
    pairs = [("The cat", " sat on the mat"), ("A", " dog"), ("One two", " three four")]
    got = public_models.public_lm(str(public), "cpu", "bfloat16", 1).loglikelihood(
        [request(*pair) for pair in pairs], True
    )
    for (total, _), (context, continuation) in zip(got, pairs, strict=True):
        first, ids = (tokenizer(text).input_ids for text in (context, context + continuation))
        logp = model(torch.tensor([ids])).logits.float().log_softmax(-1)[0]
        assert total == pytest.approx(
            sum(logp[t - 1, ids[t]].item() for t in range(len(first), len(ids))), abs=1e-4
        )


def test_lm_evals_own_model_scores_an_import_of_it_alike(
    public, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Where documents end alike too: their last windows are the same tokens, of which more are
    scored in one than in another."""
    monkeypatch.chdir(tmp_path)
    rng, found, end = random.Random(0), [], " the cat sat on the mat and the dog ran away." * 8
    rows = [
        {
            "q": eval_runs.words(rng, 6) + end * (i > 9),
            "answers": [eval_runs.words(rng, n) for n in (1, 2, 3, 2)],
            "gold": i % 4,
        }
        for i in range(24)
    ]
    said = {
        "doc_to_text": "",
        "doc_to_target": "q",
        "doc_to_choice": None,
        "output_type": "loglikelihood_rolling",
    }
    make_task(
        make_task(tmp_path / "mine", rows),
        rows,
        "rolled",
        **said,
        metric_list=[{"metric": "word_perplexity"}],
    )
    call(export, "--from-hf", public, "out/ours")
    for run, folder in (("out/ours", "ours"), (f"hf:{public}", "hf_*_tiny-llama")):
        call(harness, run, "tasks=sums,rolled", "include=mine", "dtype=float32", "device=cpu")
        (record,) = (
            json.loads(path.read_text())
            for path in (tmp_path / "out").glob(f"{folder}/eval/*.json")
        )
        assert record["run"] == run
        found.append(record["tasks"])
    ours, theirs = found
    assert all(
        ours["sums"][key] == theirs["sums"][key] for key in ("acc", "acc_se", "n", "docs_sha256")
    )
    assert ours["rolled"]["word_perplexity"] == pytest.approx(
        theirs["rolled"]["word_perplexity"], rel=1e-5
    )
    call(harness, "--table", "out", "out=table")
    assert "| tiny-llama, float32" in capsys.readouterr().out


def test_a_public_model_is_scored_by_the_rules_of_its_tokenizer_json(
    public, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(public, tmp_path / "split")
    public_models.public_lm(str(folder), "cpu", "float32", 1)
    assert "scored with" not in capsys.readouterr().err, "both agree"
    roles = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "Qwen2Tokenizer"}
    write_tokenizer(folder, roles, pre_tokenizer=DIGITS_APART)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lm = public_models.public_lm(str(folder), "cpu", "float32", 1)
    assert (
        "Qwen2Tokenizer makes other tokens than the model's tokenizer.json"
        in capsys.readouterr().err
    )
    for text in public_models.PROBE_TEXTS:
        assert lm.tok_encode(text) == reference.encode(text, add_special_tokens=False).ids


SPARE = "<|spare_7|>"


@pytest.fixture
def exported_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(our model, lm-eval's own) of one export in fp32, whose vocabulary has twenty special
    tokens."""
    monkeypatch.chdir(tmp_path)
    folder = make_llama(tmp_path / "made", vocab_size=346, bos_token_id=0, eos_token_id=1)
    write_tokenizer(folder, spare=20, post_processor=BEGINS)
    call(export, "--from-hf", folder, "out/ours")
    call(export, "out/ours", "exported", "dtype=fp32")
    loaded = inference.load_for_inference("out/ours", "cpu", "float32")
    return build_lm(loaded.model, tokenizer=loaded.tokenizer), public_models.public_lm(
        "exported", "cpu", "float32", 1
    )


def answers(lm, requests):
    return lm.generate_until(requests, True)


def test_forty_answers_are_those_of_lm_evals_own_model(exported_pair):
    """With every name of the length, stop texts that are special tokens, prompts that spell them,
    special tokens in answers."""
    rng, requests, (ours, theirs) = random.Random(0), [], exported_pair
    for i in range(40):
        parts = [
            eval_runs.words(rng, rng.randint(1, 4)),
            "<|spare_3|>" * (i % 4 == 1),
            eval_runs.words(rng, i % 3),
        ]
        prompt = "<|begin|>" * (i % 5 == 0) + " ".join(parts)
        until = rng.sample(["\n", " a", SPARE], i % 4)
        length = ("max_new_tokens", "max_gen_toks", "max_tokens")[i % 3]
        requests.append(
            request(prompt, {length: rng.choice([4, 8, 20]), "until": until, "temperature": 0.0})
        )
    assert answers(ours, requests) == answers(theirs, requests)
    ours.tokenizer_ours = replace(ours.tokenizer_ours, special_ids=frozenset())
    assert sum("<|spare" in text for text in answers(ours, requests)) > 5, (
        "special tokens do come out"
    )


def test_texts_that_spell_special_tokens_score_as_in_lm_evals_own_model(
    exported_pair,
):
    rng, pairs = random.Random(1), []
    for i in range(12):
        context = "<|begin|>" * (i % 2) + eval_runs.words(rng, 3) + "<|spare_3|>" * (i % 3)
        pairs.append(request(context, " " + eval_runs.words(rng, 2) + SPARE * (i % 2)))
    found, wanted = (lm.loglikelihood(pairs, True) for lm in exported_pair)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    found, wanted = (
        lm.loglikelihood_rolling([request(pair.args[0]) for pair in pairs], True)
        for lm in exported_pair
    )
    np.testing.assert_allclose(found, wanted, atol=2e-4)


def test_an_answer_ends_at_any_of_several_ends_as_in_lm_evals_own_model(exported_pair):
    ours, theirs = exported_pair
    requests = [
        request(f"{word} and", {"max_gen_toks": 20, "until": []})
        for word in ("one", "two", "three", "four")
    ]
    before = answers(ours, requests)
    likely = ours.tokenizer_ours.encode(before[0])[1]
    ours.ends = (1, int(likely))
    theirs.model.generation_config.eos_token_id = list(ours.ends)
    spelled = ours.tokenizer_ours.decode([likely])  # there too: it is no special token
    assert (
        before
        != answers(ours, requests)
        == [text.removesuffix(spelled) for text in answers(theirs, requests)]
    )


@pytest.mark.parametrize("length", ["max_gen_toks", "max_new_tokens"])
def test_a_task_gets_answers_of_the_length_that_it_asks_for(
    run: Callable[..., str], tmp_path: Path, length: str
):
    said = [
        {"q": q, "gold": eval_runs.greedy_text(build(), q.encode(), 6)}
        for q in ("one", "two", "three")
    ]
    folder = make_task(
        tmp_path / "mine",
        said,
        "short",
        output_type="generate_until",
        doc_to_choice=None,
        metric_list=[{"metric": "exact_match", "aggregation": "mean"}],
        generation_kwargs={length: 6, "until": ["never there"], "do_sample": False},
    )
    call(harness, run, "tasks=short", f"include={folder}", "dtype=float32")
    assert record_of(run, "short_float32")["tasks"]["short"]["exact_match"] == 1


@pytest.mark.parametrize(
    "answers, more",
    [
        (["2", "3"], {}),
        (["2", ""], {}),
        (["2", ""], {"target_delimiter": ""}),
        (
            ["2", ""],
            {
                "output_type": "loglikelihood",
                "doc_to_choice": None,
                "doc_to_target": "{{answers[1]}}",
            },
        ),
    ],
)
def test_an_empty_answer_is_refused_with_its_task_and_document(
    run: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answers: list[str],
    more: dict[str, Any],
):
    """It would score 0.0, above every other answer, and win."""
    folder = make_task(tmp_path / "mine", [SUM, SUM, SUM | {"answers": answers}], **more)
    if all(answers):
        call(harness, run, "tasks=sums", f"include={folder}")
        return
    monkeypatch.setattr(
        eval_runs.CheckpointLM, "_score", lambda *_: pytest.fail("scored for nothing")
    )
    said = refused(capsys, harness, run, "tasks=sums", f"include={folder}")
    assert "the task 'sums' has an empty answer in its document 2" in said and not list(
        (run / "eval").iterdir()
    )


def test_answers_that_the_context_cuts_are_counted_and_said(
    run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Of 16 tokens where a context of 32 has room for 16 of the 40 that the task asks for."""
    rows = [{"q": "0123456789" * 4, "gold": "x"}, {"q": "0123456789" * 5, "gold": "x"}]
    folder = make_task(
        tmp_path / "mine",
        rows,
        "long",
        output_type="generate_until",
        doc_to_choice=None,
        metric_list=[{"metric": "exact_match", "aggregation": "mean"}],
        generation_kwargs={"max_gen_toks": 40, "until": ["never there"]},
    )
    call(harness, run, "tasks=long", f"include={folder}", "dtype=float32")
    cut = [len(eval_runs.greedy_text(build(), row["q"].encode()[-16:], 16)) for row in rows]
    assert min(cut) > 0 and record_of(run, "long_float32")["shortened_answers"] == 2
    assert "2 answers were cut by the end of the context" in capsys.readouterr().out


def test_a_metric_that_is_not_computed_is_named(
    run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (folder := tmp_path / "mine").mkdir()
    (folder / "own.py").write_text(
        "import numpy as np\n"
        "def mean(values): return np.float32(np.mean(values))\n"
        "def matrix(values): return [[1, 0], [0, 1]]\n"
        "def score(doc, results): return {'half': 0.5, 'confusion': 1}\n"
    )
    make_task(
        folder,
        [SUM, SUM],
        metric_list=[{"metric": "acc"}, {"metric": "f1"}, {"metric": "perplexity"}],
    )
    text = json.dumps({"metric": "half", "aggregation": "MEAN", "higher_is_better": True})
    other = json.dumps({"metric": "confusion", "aggregation": "MATRIX", "higher_is_better": True})
    make_task(
        folder,
        [SUM, SUM],
        "own",
        process_results="SCORE",
        metric_list=[json.loads(text), json.loads(other)],
    )
    own = (folder / "own.yaml").read_text()
    for word in ("MEAN", "MATRIX", "SCORE"):
        own = own.replace(f'"{word}"', f"!function own.{word.lower()}")
    (folder / "own.yaml").write_text(own)
    call(harness, run, "tasks=sums,own", f"include={folder}", "dtype=float32")
    found, said = record_of(run, "sums+own_float32")["tasks"], capsys.readouterr().out
    assert (found["sums"]["not_scored"], found["own"]["not_scored"]) == (
        ["perplexity"],
        ["confusion"],
    )
    assert found["own"]["half"] == 0.5 and "f1" in found["sums"]
    assert (
        "sums: no number was computed for perplexity" in said
        and "own: no number was computed for confusion" in said
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, ""),
        ({"num_fewshot": 1}, "num_fewshot > 0 but fewshot_split is None"),
        ({"task": "piqa"}, "Task 'piqa' from "),
    ],
)
def test_what_lm_eval_warns_of_is_said_once(
    run: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    said: str,
):
    folder = make_task(
        tmp_path / "mine", [SUM, SUM | {"q": "2 + 0 ="}, SUM | {"q": "4 - 2 ="}], **changes
    )
    call(harness, run, f"tasks={changes.get('task', 'sums')}", f"include={folder}", "dtype=float32")
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("scored")]
    assert len(err) == bool(said) and all(
        line.startswith("lm-eval: ") and said in line for line in err
    )


def test_an_include_that_lm_eval_would_pass_over_gets_a_sentence(
    run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (folder := tmp_path / "mine").mkdir()

    def what_is_said():
        return refused(capsys, harness, run, "tasks=sums", f"include={folder}")

    assert "holds no file called *.yaml" in what_is_said()
    (folder / "sums.yaml").write_text("task: sums\n  doc_to_text: q\n")
    assert (
        f"{folder / 'sums.yaml'} cannot be read as a task of lm-eval (ScannerError: "
        in what_is_said()
    )
    shutil.rmtree(folder)
    assert f"include={folder} is no folder" in what_is_said()


def test_more_examples_than_documents_get_a_sentence(
    run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = make_task(tmp_path / "mine", [SUM, SUM], num_fewshot=9, fewshot_split="validation")
    said = refused(capsys, harness, run, "tasks=sums", f"include={folder}")
    assert "the questions of the task 'sums' could not be made (ValueError: " in said


@pytest.mark.parametrize(
    "changes, words",
    [({"doc_to_image": "q"}, "shows images"), ({"unsafe_code": True}, "runs code")],
)
def test_a_task_that_lm_eval_stops_at_is_refused_before_the_model_is_read(
    run: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: str,
):
    monkeypatch.setattr(harness, "load_for_inference", lambda *_: pytest.fail("read for nothing"))
    folder = make_task(
        tmp_path / "mine", [SUM], output_type="generate_until", doc_to_choice=None, **changes
    )
    assert f"the task 'sums' {words}" in refused(
        capsys, harness, run, "tasks=sums", f"include={folder}"
    )


def test_folders_that_hold_no_safe_model_get_a_sentence_and_run_no_code(
    public, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def cannot_load(name: str, words):
        with pytest.raises(UserError, match=f"could not be loaded .*{words}"):
            public_models.public_lm(str(name), "cpu", "float32", 1)

    pickled, own = (shutil.copytree(public, tmp_path / name) for name in ("pickled", "own"))
    # whole, and a pickle
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    edit(
        own / "config.json",
        model_type="strange",
        auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Model"},
    )
    (own / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nEvil = Model = None\n")
    cannot_load(pickled, "and safetensors")
    cannot_load(own, "without code of their own")
    assert not (tmp_path / "ran").exists()
    monkeypatch.setitem(sys.modules, "transformers", None)
    cannot_load(public, "pip install transformers accelerate")


def test_a_group_without_a_score_shows_its_tasks_and_their_chance(
    run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = make_task(tmp_path / "mine", [SUM, SUM])
    make_task(folder, [{"q": "2 + 2 =", "answers": ["1", "2", "3", "4"], "gold": 3}], "four")
    make_task(
        folder,
        [SUM],
        "echo",
        output_type="generate_until",
        doc_to_choice=None,
        doc_to_target="gold",
        metric_list=[{"metric": "exact_match", "aggregation": "mean"}],
        generation_kwargs={"max_gen_toks": 5},
    )
    for name, more in (("plain", {}), ("scored", {"aggregate_metric_list": [{"metric": "acc"}]})):
        (folder / f"{name}.yaml").write_text(
            json.dumps({"group": name, "task": ["sums", "four"], **more})
        )
        call(harness, run, f"tasks={name},echo", f"include={folder}")
    echo = record_of(run, "scored+echo")["tasks"]["echo"]
    assert echo["exact_match"] == 0 and echo["chance"] is None
    call(harness, "--table", run, f"out={tmp_path / 'table'}")
    out, group = capsys.readouterr().out, record_of(run, "scored+echo")["tasks"]["scored"]
    assert (
        out.count("| sums | acc ") == 1
        and "| scored | acc " in out
        and "sums<br>acc [%]" in out
        and "scored<br>acc" in out
    )
    assert (group["n"], group["chance"]) == (3, pytest.approx((2 / 2 + 1 / 4) / 3)) and group[
        "num_fewshot"
    ] == 0


def test_what_cannot_be_scored_or_kept_is_told_before_the_scoring(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A folder that cannot be written, data of another tokenizer, a run without a checkpoint."""
    monkeypatch.setattr(harness, "evaluate", lambda *_: pytest.fail("scored for nothing"))
    (run / "eval").symlink_to("/proc/self")  # not even root may write there
    assert (
        harness.main([str(run), "tasks=demo"]) == 1 and f"{run / 'eval'}" in capsys.readouterr().err
    )
    shutil.rmtree(run / "checkpoints")
    assert "has no finished checkpoint yet" in refused(capsys, harness, run, "tasks=demo")
    write_index(Path("data/code"), tokenizer="gpt2")
    assert "was made with another tokenizer" in refused(capsys, harness, run, "--tasks", "demo")


def test_questions_and_documents_are_true_and_the_same_each_time(finished):
    rows, documents = (
        list(f(str(finished))["validation"])
        for f in (demo_questions.questions, demo_questions.documents)
    )
    assert [rows, documents] == [
        list(f(str(finished))["validation"])
        for f in (demo_questions.questions, demo_questions.documents)
    ]
    assert len(rows) == 200 and {row["source"] for row in rows} == {"prose", "code"}
    texts = {
        source: [tok.decode(ids.tolist()) for ids in found]
        for source, found, tok in demo_questions._sources(str(finished))
    }
    assert sum(map(len, texts.values())) == 500 and len(documents) == 64
    assert all(row["text"] in texts[row["source"]] for row in documents)
    assert np.bincount([row["label"] for row in rows], minlength=4).min() > 30
    for row in rows:
        right, *wrong = sorted(
            row["choices"], key=lambda choice: choice != row["choices"][row["label"]]
        )
        (home,) = (text for text in texts[row["source"]] if row["context"] + right in text)
        assert len(row["context"]) == 96 and len(set(row["choices"])) == 4
        assert all(len(choice) == 32 and choice[0].isspace() for choice in row["choices"])
        assert all(
            choice not in home and any(choice in text for text in texts[row["source"]])
            for choice in wrong
        )


def test_who_knows_nothing_scores_chance(finished):
    """Random models, and whoever ignores the context but knows how frequent each letter is: within
    two standard errors of one model's score; over twelve made-up corpora it was 25.5 +- 0.9 % and
    25.5 +- 0.5 %."""
    rows = list(demo_questions.questions(str(finished))["validation"])
    pairs = [request(row["context"], choice) for row in rows for choice in row["choices"]]
    judges = [build_lm(build(replace(TINY, n_ctx=192), seed), 32) for seed in range(4)]
    by_frequency = [
        -sum(3.0 if letter == " " else 1 + "abcdefghij".find(letter) / 9 for letter in r.args[1])
        for r in pairs
    ]
    for told in (
        [[total for total, _ in lm.loglikelihood(pairs)] for lm in judges],
        [by_frequency],
    ):
        right = np.array(told).reshape(-1, len(rows), 4).argmax(2) == [row["label"] for row in rows]
        assert abs(right.mean() - 0.25) < 2 * math.sqrt(0.25 * 0.75 / len(rows))


def test_what_was_fetched_is_scored_without_network(tmp_path: Path):
    """With an empty cache elsewhere, as on another machine. What was not fetched:
    test_what_cannot_be_scored_as_asked_..()."""
    eval_runs.write_run(tmp_path / "run")
    rows = [
        {"goal": f"goal {i} is", "sol1": f"one {i}", "sol2": f"another {i}", "label": i % 2}
        for i in range(7)
    ]
    write_repository(
        tmp_path / "hub",
        "baber/piqa",
        {
            f"data/{split}-00000-of-00001.parquet": rows[:n]
            for split, n in (("train", 3), ("validation", 7))
        },
    )

    def command(*arguments: object, home, url: str = "http://127.0.0.1:1"):
        return process(
            "-m", "eval.harness", *arguments, HF_ENDPOINT=url, HF_HOME=f"{tmp_path / home}"
        )

    with HubServer(tmp_path / "hub") as server:
        done = command("--fetch", tmp_path / "saved", "tasks=piqa,demo", home="a", url=server.url)
    assert (done.returncode, done.stdout) == (0, "piqa: 7 documents\n"), done.stderr
    done = command(
        tmp_path / "run", f"offline={tmp_path / 'saved'}", "tasks=piqa", "dtype=float32", home="b"
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = record_of(tmp_path / "run", "piqa_float32")["tasks"]["piqa"]
    assert (found["n"], found["chance"]) == (7, 0.5)


def test_the_groups_are_lm_evals_own_tasks():
    folders = {
        Path(lm_eval.__file__).parent / "tasks" / tasks.FOLDERS.get(name, name)
        for name in tasks.FULL
    }
    assert set(tasks.FULL) <= set(
        lm_eval.tasks.TaskManager(include_path=[*folders], include_defaults=False).all_tasks
    )
    assert set(tasks.FOLDERS) < set(tasks.FULL) and len(tasks.FULL) == 12
    assert tasks.expand(("core", "piqa", "full")) == list(tasks.FULL)


def test_what_cannot_be_scored_as_asked_is_refused_by_name(tmp_path: Path):
    mine = make_task(tmp_path / "mine", [SUM] * 3)
    for name, keys in (("drawn", {"do_sample": True}), ("beams", {"num_beams": 4})):
        make_task(
            mine,
            [SUM],
            name,
            output_type="generate_until",
            doc_to_choice=None,
            generation_kwargs=keys,
        )
    (mine / "group.yaml").write_text(
        "group: five\ntask: [{task: sums, num_fewshot: 2, fewshot_split: validation}]\n"
    )
    assert tasks.load(["five"], str(mine))["tasks"]["sums"].config.num_fewshot == 2
    assert len(tasks.load(["sums"], str(mine))["tasks"]["sums"].eval_docs) == 3
    for names, words in (
        (["sums", "five"], "five shows 2 examples to 'sums', other tasks= another number"),
        (["drawn"], "'drawn' asks for sampled answers"),
        (["beams"], "'beams' asks for .*: num_beams=4"),
    ):
        with pytest.raises(UserError, match=words):
            tasks.load(names, str(mine))
    (mine / "sums.jsonl").unlink()
    with pytest.raises(
        UserError,
        match=(
            "the task 'sums' could not be loaded .FileNotFoundError: .*: its data come from where"
        ),
    ):
        tasks.load(["sums"], str(mine))
