"""eval/harness.py: scores against the models' own log-likelihoods, chance, what is written where, public models, mistakes."""

import json
import math
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import datasets
import numpy as np
import pytest
import torch
from eval_runs import BYTES, TINY, build, build_run, directly, expected_pair, make_task, request, rolled, words
from safetensors.torch import load_file
from tiny_llama import make_llama

from eval import harness, held_out, precision, sample, tasks
from eval.sample import Inference
from eval.table import Column, Score, read_samples
from runtime.cli import UserError
from tests.conftest import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(held_out, "QUESTIONS", 20)
    return build_run(tmp_path, monkeypatch)


def test_demo_scores_are_the_models_own_and_are_kept(run, capsys):
    before = datetime.now(UTC).replace(microsecond=0)
    assert harness.main([str(run), "--tasks", "demo", "limit=12", "micro_batch=8", "dtype=float32", "--device=cpu"]) == 0
    out = capsys.readouterr().out
    record = json.loads((run / "eval" / "demo_float32_limit12.json").read_text())
    assert record["step"] == 1 and before <= datetime.fromisoformat(record["time"]) <= datetime.now(UTC)
    assert not list(run.rglob("*.tmp"))

    model = build()
    rows = [row["text"] for row in list(held_out.documents(str(run))["validation"])[:12]]
    nats = np.array([-rolled(model, [256], list(text.encode())) for text in rows])
    sizes = np.array([len(text.encode()) for text in rows])
    ppl = record["tasks"]["val_ppl"]
    assert ppl["bits_per_byte"] == pytest.approx(nats.sum() / sizes.sum() / math.log(2), rel=1e-5)
    draws = np.random.default_rng(0).integers(12, size=(20_000, 12))
    bootstrap = (nats[draws].sum(1) / sizes[draws].sum(1) / math.log(2)).std()
    assert ppl["bits_per_byte_se"] == pytest.approx(bootstrap * math.sqrt(12 / 11), rel=0.05)

    questions = list(held_out.questions(str(run))["validation"])[:12]
    right = [int(np.argmax([expected_pair(model, q["context"], c)[0] for c in q["choices"]]) == q["label"]) for q in questions]
    cloze = record["tasks"]["val_cloze"]
    assert cloze["acc"] == pytest.approx(np.mean(right)) and cloze["chance"] == 0.25 and cloze["n"] == 12
    assert cloze["acc_se"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(12))
    assert len(cloze["docs_sha256"]) == 64 and cloze["docs_sha256"] != ppl["docs_sha256"]
    assert harness.main([str(run), "--tasks", "val_ppl", "limit=1", "step=1"]) == 0
    assert {path.name for path in (run / "eval").glob("*step*")} == {
        "val_ppl_limit1_step1.json", "samples_val_ppl_limit1_step1.jsonl.gz"}
    assert "val_cloze" in out and f"{cloze['acc']:.4f}" in out and "0.25" in out and "limit=12" in out
    assert record["truncated_requests"] == 48       # a context of 32 bytes holds no question whole, and it says so
    assert "48 requests were longer than the context" in out


def test_tasks_of_the_users_own(run, tmp_path):
    rows = [{"q": f"{a} + {b} =", "answers": [str(a + b), str(a + b + 1)], "gold": 0} for a in range(3) for b in range(3)]
    folder = make_task(tmp_path / "mine", rows)
    text = (folder / "sums.yaml").read_text()
    (folder / "echo.yaml").write_text(
        text.replace("task: sums", "task: echo").replace("multiple_choice", "generate_until")
        .replace("doc_to_choice: answers\n", "").replace("doc_to_target: gold", 'doc_to_target: "{{answers[0]}}"')
        .replace("metric: acc", "metric: exact_match")
        + "generation_kwargs: {until: [\"\\n\"], max_gen_toks: 5, do_sample: false}\n")
    assert harness.main([str(run), "tasks=sums,echo", f"include={folder}", "dtype=float32"]) == 0
    record = json.loads((run / "eval" / "sums+echo_float32.json").read_text())
    model = build()
    right = [directly(model, list(row["q"].encode()), list(b" " + row["answers"][0].encode()))[0]
             > directly(model, list(row["q"].encode()), list(b" " + row["answers"][1].encode()))[0] for row in rows]
    assert record["tasks"]["sums"]["acc"] == pytest.approx(np.mean(right)) and record["tasks"]["sums"]["chance"] == 0.5
    assert record["tasks"]["echo"]["exact_match"] == 0.0 and record["tasks"]["echo"]["chance"] is None


def arc(stem, choices, label):
    start = "A" if len(stem) % 3 else "1"       # a part of the real questions is numbered, some have 3 or 5 answers
    marks = [chr(ord(start) + i) for i in range(len(choices))]
    return {"id": stem, "question": f"{stem}?", "choices": {"text": choices, "label": marks}, "answerKey": marks[label]}


def hellaswag(stem, choices, label):
    return {"ind": 0, "activity_label": "doing", "ctx_a": stem, "ctx_b": "then", "ctx": f"{stem} then", "endings": choices,
            "source_id": "", "split": "val", "split_type": "indomain", "label": str(label)}


def boolq(stem, choices, label):
    return {"question": choices[0], "passage": stem, "idx": 0, "label": label}


def winogrande(stem, choices, label):
    return {"sentence": f"{stem} _ {stem[::-1]}.", "option1": choices[0], "option2": choices[1], "answer": str(label + 1)}


def mmlu(stem, choices, label):
    return {"question": stem, "subject": "made up", "choices": choices, "answer": label}


# (data set, its configuration): a task of each kind, its split, its rows, the number of answers of the i-th question
LAYOUTS = {
    ("Rowan/hellaswag", None): ("hellaswag", "validation", hellaswag, lambda i: 4),
    ("allenai/ai2_arc", "ARC-Easy"): ("arc_easy", "test", arc, lambda i: (5, 4, 3, 5)[i % 4]),
    ("aps/super_glue", "boolq"): ("boolq", "validation", boolq, lambda i: 2),
    ("allenai/winogrande", "winogrande_xl"): ("winogrande", "validation", winogrande, lambda i: 2),
    ("cais/mmlu", "anatomy"): ("mmlu_anatomy", "test", mmlu, lambda i: 4),
}


def load_questions(path, name, **_):
    """datasets.load_dataset() of made-up questions, each once with each answer as the right one: whoever looks at the texts
    alone, however he decides, is right exactly once per question."""
    task, split, row, n_choices = LAYOUTS[path, name]
    rng, rows = random.Random(task), []
    for i in range(6):
        stem, choices = words(rng, rng.randint(4, 12)), [f"{words(rng, rng.randint(1, 6))} {c}{i}" for c in range(n_choices(i))]
        rows += [row(stem, choices, label) for label in range(len(choices))]
    rng.shuffle(rows)
    made = datasets.Dataset.from_list(rows)
    return dict.fromkeys(("train", "validation", "test"), made.select([])) | {split: made, "dev": made.select(range(5))}


def test_a_random_model_scores_chance(run, monkeypatch):
    """To the last digit, where two standard errors would do: whatever the model prefers, one copy of each question agrees.

    Any look at the label, or an answer that is read at another place than its neighbours, would show."""
    monkeypatch.setitem(tasks.FOLDERS, "mmlu_anatomy", "mmlu/default")      # a subject alone, without lm-eval's whole index
    monkeypatch.setattr(datasets, "load_dataset", load_questions)
    model = build(replace(TINY, n_ctx=2048), 2)
    monkeypatch.setattr(harness, "load_for_inference", lambda *_: Inference(model, BYTES, CPU, [], 1))
    names = tuple(task for task, *_ in LAYOUTS.values())
    scores = harness.score(harness.Options(run=str(run), tasks=names, dtype="float32"), harness.join())["tasks"]
    assert scores.keys() == set(names)
    for task, row in scores.items():
        assert row["acc"] == pytest.approx(row["chance"], abs=1e-12) and row.get("acc_norm", row["acc"]) == pytest.approx(
            row["chance"], abs=1e-12), task
        samples = read_samples(Column(task, "acc", row["docs_sha256"], None, 0, ""),
                               Score(row["acc"], None, None, [run / "eval" / row["samples"]]))
        preferred = {int(np.argmax([float(answer[0]) for answer in s["filtered_resps"]])) for s in samples}
        assert len(samples) == row["n"]     # and the model sees something, else this would hold as well
        assert len(preferred) > 1 or task in ("boolq", "winogrande")
    assert scores["mmlu_anatomy"]["num_fewshot"] == 5 and str(samples[0]["arguments"]).count("Answer:") == 4 * 6


@pytest.mark.parametrize("entry, arguments, sentence", [
    (harness, ["tasks=,"], "tasks= names no task: give tasks=demo or"),
    (harness, ["tasks=demo", "limit=0"], "limit=0 must be at least 1"),
    (harness, ["tasks=demo", "device=cuda:9"], "device='cuda:9' is not usable here"),
    (harness, ["tasks=demo", "fp8=rowwise", "dtype=float32"], "fp8=rowwise multiplies FP8 into BF16, so dtype=float32"),
    (harness, ["tasks=demo", "step=3"], "has no such checkpoint, but those of steps 1"),
    (sample, ["x" * 33], "the prompt has 33 tokens, but the context of"),
    (sample, ["hi", "n=0"], "n=0 must be at least 1"), (sample, ["hi", "device=cud"], "device='cud' is not usable here"),
    (precision, ["recipes=tensorwise,rowise"], "did you mean 'rowwise'?")])
def test_mistakes_on_the_command_line_get_a_sentence(run, capsys, entry, arguments, sentence):
    assert entry.main([str(run), *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == "" and not (run / "eval").exists()


def test_unknown_task_names_the_nearest_and_local_names_never_wait_for_the_index(run, capsys, monkeypatch):
    import lm_eval.tasks
    asked = []

    class SmallManager(lm_eval.tasks.TaskManager):      # lm-eval's own index takes ten seconds to build
        def __init__(self, include_defaults, **settings):
            asked.append(include_defaults)
            super().__init__(include_defaults=False, **settings)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", SmallManager)
    for name, near in [("demo,val_close", "val_cloze"), ("dmeo", "demo")]:
        assert harness.main([str(run), f"tasks={name}"]) == 2
        assert f"near: {near}" in capsys.readouterr().err
    assert harness.main([str(run), "tasks=demo", "limit=2"]) == 0
    assert asked == [False, True, False, True, False]


@pytest.mark.parametrize("entry, extra", [(harness, "tasks=demo"), (sample, "hello")])
def test_a_folder_that_is_no_run_gets_a_sentence(run, capsys, entry, extra):
    config = (run / "config.json").read_text()
    for content, sentence in [(None, "is no run"), ('{"run": ', "is not JSON"), (config, "has no finished checkpoint yet")]:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        (run / "config.json").unlink(missing_ok=True)
        if content is not None:
            (run / "config.json").write_text(content)
        assert entry.main([str(run), extra]) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err and captured.out == "", content


def test_no_transformers_and_no_network(run):
    """In a fresh process in which importing transformers or accelerate, or opening a socket, is an error."""
    code = f"""
import importlib.abc, socket, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "accelerate"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
def refuse(*args, **kwargs):
    raise AssertionError("network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
sys.path.insert(0, {str(ROOT)!r})
from eval import harness
code = harness.main([{str(run)!r}, "tasks=demo", "limit=3"])
sys.exit(code if "transformers" not in sys.modules else 3)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=run.parent.parent, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) == 6, (done.stdout, done.stderr)


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("hub") / "tiny-llama")


@pytest.mark.parametrize("dtype, micro_batch", [("float32", 4), ("bfloat16", 1)])
def test_a_public_models_log_likelihoods_are_its_own(public, dtype, micro_batch):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(public)
    model = AutoModelForCausalLM.from_pretrained(public, dtype=getattr(torch, dtype))
    lm = harness.public_lm(str(public), CPU, dtype, micro_batch)     # of BF16 logits the softmax is taken in fp32, as of ours
    pairs = [("The cat", " sat on the mat"), ("A", " dog"), ("One two", " three four")]
    got = lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (total, _), (context, continuation) in zip(got, pairs, strict=True):
        first, ids = (tokenizer(text).input_ids for text in (context, context + continuation))
        logp = model(torch.tensor([ids])).logits.float().log_softmax(-1)[0]
        assert total == pytest.approx(sum(logp[t - 1, ids[t]].item() for t in range(len(first), len(ids))), abs=1e-4)


def test_the_command_scores_it_beside_our_runs(public, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_task(tmp_path / "mine", [{"q": "the cat", "answers": ["sat on the mat", "ran"], "gold": i % 2} for i in range(6)])
    assert harness.main([f"hf:{public}", "tasks=sums", "include=mine", "dtype=float32", "device=cpu"]) == 0
    record, = (json.loads(path.read_text()) for path in (tmp_path / "out").glob("hf_*_tiny-llama/eval/*.json"))
    assert record["run"] == f"hf:{public}" and record["tasks"]["sums"]["acc"] == 0.5     # each answer is right three times
    capsys.readouterr()
    assert harness.main(["--table", "out", "out=table"]) == 0
    assert "| tiny-llama, float32" in capsys.readouterr().out


def test_folders_that_hold_no_safe_model_get_a_sentence_and_run_no_code(public, tmp_path, monkeypatch):
    def refused(name, words):
        with pytest.raises(UserError, match=words):
            harness.public_lm(str(name), CPU, "float32", 1)
    refused("no such name", "could not be loaded")
    folder = shutil.copytree(public, tmp_path / "own")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")      # whole, and a pickle
    (folder / "model.safetensors").unlink()
    refused(folder, "it takes .* and safetensors")
    shutil.copy(public / "model.safetensors", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nEvil = Model = None\n")
    refused(folder, "could not be loaded .* without code of their own")
    assert not (tmp_path / "ran").exists()
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(public, "pip install transformers accelerate")


def test_the_tasks_of_a_group_without_a_score_of_its_own_are_shown(run, tmp_path, capsys):
    folder = make_task(tmp_path / "mine", [{"q": "1 + 1 =", "answers": ["2", "3"], "gold": 0}] * 2)
    (folder / "group.yaml").write_text("group: arithmetic\ntask: [sums]\n")
    assert harness.main([str(run), "tasks=arithmetic", f"include={folder}"]) == 0
    assert harness.main(["--table", str(run), f"out={tmp_path / 'table'}"]) == 0
    assert "| sums | acc " in (out := capsys.readouterr().out) and "sums<br>acc [%]" in out


def test_a_groups_chance_weighs_its_tasks_by_their_questions(run, tmp_path):
    folder = make_task(tmp_path / "mine", [{"q": "1 + 1 =", "answers": ["2", "3"], "gold": 0}] * 2)
    (folder / "four.jsonl").write_text(json.dumps({"q": "2 + 2 =", "answers": ["1", "2", "3", "4"], "gold": 3}) + "\n")
    (folder / "four.yaml").write_text((folder / "sums.yaml").read_text().replace("task: sums", "task: four").replace(
        "sums.jsonl", "four.jsonl"))
    (folder / "group.yaml").write_text("group: arithmetic\ntask: [sums, four]\naggregate_metric_list: [{metric: acc}]\n")
    assert harness.main([str(run), "tasks=arithmetic", f"include={folder}"]) == 0
    group = json.loads((run / "eval" / "arithmetic.json").read_text())["tasks"]["arithmetic"]
    assert (group["n"], group["chance"]) == (3, pytest.approx((2 / 2 + 1 / 4) / 3)) and group["num_fewshot"] == 0


@pytest.mark.parametrize("arguments, told", [
    (["tasks=demo"], "demo tasks are for runs of ours, and hf:gpt2 is none"), (["tasks=piqa", "fp8=rowwise"], "fp8=, step="),
    (["tasks=piqa", "step=3"], "fp8=, step=")])
def test_what_runs_of_ours_alone_have_is_refused_of_a_public_model(capsys, arguments, told):
    assert harness.main(["hf:gpt2", *arguments]) == 2 and told in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told_before_the_scoring(run, monkeypatch, capsys):
    monkeypatch.setattr(harness, "evaluate", lambda *_: pytest.fail("scored for nothing"))
    (run / "eval").symlink_to("/proc/self")     # not even root may write there
    assert harness.main([str(run), "tasks=demo"]) == 1
    assert f"{run / 'eval'}" in capsys.readouterr().err


def test_a_public_models_score_of_a_document_does_not_depend_on_others_that_end_alike(public):
    """Their last windows are the same tokens, of which more are scored in one document than in the other."""
    lm, end = harness.public_lm(str(public), CPU, "float32", 64), "the cat sat on the mat and the dog ran away. " * 8
    texts = [request("One two three. " * n + end) for n in (1, 2, 3)]
    alone = [lm.loglikelihood_rolling([text], disable_tqdm=True)[0] for text in texts]
    assert lm.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(alone, abs=1e-3)
