"""eval/lm.py and eval/harness.py on tiny models and made-up text, against log-likelihoods taken one token at a time."""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_runs import BYTES, TINY, build, build_lm, build_run, bytes_of, directly, expected_pair, request, rolled, words

from eval import harness, held_out, results, sample, task_list
from runtime.cli import UserError

ROOT = Path(__file__).parent.parent
LOAD_MODEL = sample.load_model


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "latest", lambda run_dir: Path(run_dir) / "checkpoints" / "step_00000001")
    return build_run(tmp_path, monkeypatch)


# -------------------------------------------------------------------------------------------------------- log-likelihood

PAIRS = [("ab", "cd"), ("the quick brown fox", " jumps"), ("x", "y"), ("", "starts a document"), ("trailing  ", "blank"),
         ("long context " * 9, "tail"), ("0123456789" * 4, "the end"), ("é", "ü€𝄞"), ("q", "z" * 31), ("q", "w" * 32)]


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_loglikelihood_is_the_models_own_token_by_token(micro_batch):
    model = build()
    got = build_lm(model, micro_batch).loglikelihood([request(*pair) for pair in PAIRS])
    for (total, greedy), pair in zip(got, PAIRS, strict=True):
        expected, expected_greedy = expected_pair(model, *pair)
        assert total == pytest.approx(expected, abs=2e-4, rel=1e-5), pair
        assert greedy == expected_greedy
    assert np.std([total for total, _ in got]) > 10


def test_order_and_batch_size_do_not_matter():
    model = build()
    forth = build_lm(model, 3).loglikelihood([request(*pair) for pair in PAIRS])
    back = build_lm(model, 5).loglikelihood([request(*pair) for pair in reversed(PAIRS)])[::-1]
    np.testing.assert_allclose([t for t, _ in forth], [t for t, _ in back], atol=1e-4)


def test_the_head_sees_scored_positions_alone_and_few_at_a_time(monkeypatch):
    model, rows = build(), []
    model.head.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    build_lm(model).loglikelihood([request("a" * 20, "bc"), request("a" * 5, "d"), request("", "xyz")])
    assert rows == [2 + 1 + 3]
    monkeypatch.setattr("eval.lm.HEAD_ROWS", {"cpu": 4})
    rows.clear()
    pairs = [request("a" * 20, "bc"), request("a" * 5, "d"), request("", "xyz")]
    assert build_lm(model).loglikelihood(pairs) == build_lm(build()).loglikelihood(pairs)
    assert rows == [4, 2]


def test_a_long_context_loses_its_beginning_and_is_counted():
    model = build()
    lm = build_lm(model)
    (long, _), (short, _) = lm.loglikelihood([request("X" * 50 + "abcdefgh" * 4, "yz"),
                                              request("Q" * 9 + "abcdefgh" * 4, "yz")])
    assert long == short and lm.n_truncated == 2
    lm.loglikelihood([request("a" * 31, "yz")])     # 33 tokens: the last needs no place in the context of 32
    assert lm.n_truncated == 2


def test_a_continuation_longer_than_the_context_is_scored_whole():
    model, text = build(), words(random.Random(3), 30)
    lm = build_lm(model)
    (total, _), = lm.loglikelihood([request("ctx", text)])
    assert total == pytest.approx(rolled(model, list(b"ctx")[-1:], list(text.encode())), rel=1e-5)
    assert lm.n_truncated == 1      # all but the last token of its context
    lm.loglikelihood([request("c", text), request("", text)])
    lm.loglikelihood_rolling([request(text)])
    assert lm.n_truncated == 1


def test_a_context_of_blanks_alone_is_part_of_the_continuation():
    model = build()
    pairs = [("\n", "one shared beginning, A1"), ("\n", "one shared beginning, B22"), (" ", "a question?"), (" ", "z" * 40),
             ("other", "xy")]
    for (total, greedy), pair in zip(build_lm(model).loglikelihood([request(*pair) for pair in pairs]), pairs, strict=True):
        whole = list("".join(pair).encode())
        expected = expected_pair(model, *pair) if len(whole) < 32 else (rolled(model, [256], whole), False)
        assert total == pytest.approx(expected[0], abs=2e-4, rel=1e-5) and greedy == expected[1], pair
    with pytest.raises(UserError, match="has an empty context and the continuation '', in which there is no token to score"):
        build_lm(model).loglikelihood([request("a", "b"), request("", "")])


def test_a_long_context_does_not_make_a_forward_pass_long(monkeypatch):
    model, seen = build(), []
    model.wte.register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    monkeypatch.setattr("eval.lm.LONG_ROW", 8)
    requests = [request(f"{i} and so on", " with it") for i in range(9)]
    got, whole = build_lm(model, 4).loglikelihood(requests), build_lm(build(), 99).loglikelihood(requests)
    assert max(seen) <= 4 * 8 and [total for total, _ in got] == pytest.approx([total for total, _ in whole], rel=1e-5)
    seen.clear()
    build_lm(model, 4).generate_until([request("ab" * 5, {"until": [], "max_gen_toks": 1})] * 9)
    assert max(seen) == 3 * 10


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 65, 150])
def test_rolling_loglikelihood_is_the_direct_sum(n):
    model, text = build(), words(random.Random(n), 60)[:n]
    got = build_lm(model).loglikelihood_rolling([request(text), request("other text of another length")])
    assert got[0] == pytest.approx(rolled(model, [256], list(text.encode())), rel=1e-5)


def test_rolling_loglikelihood_is_minus_the_training_loss():
    model, text = build(replace(TINY, n_ctx=64)), "exactly the loss that training would report for this document."
    ids = torch.from_numpy(BYTES.encode_document(text).astype(np.int64))[None]
    loss = model(ids[:, :-1], ids[:, 1:]).item()        # over the padded vocabulary of 384
    assert build_lm(model).loglikelihood_rolling([request(text)])[0] == pytest.approx(-loss, rel=1e-6)


def test_is_greedy_says_whether_greedy_decoding_gives_the_continuation():
    model = build()
    prompts = (list(f"prompt {i}".encode()) for i in range(256))
    texts = ((prompt, bytes_of(sample.generate(model, torch.tensor([prompt]), 60)[0])) for prompt in prompts)
    prompt, text = next(pair for pair in texts if pair[1][0] < 128)    # an ASCII beginning survives the way through str
    k = next(k for k in range(8, 0, -1) if max(text[:k]) < 128)
    good = text[:k].decode()
    flags = [greedy for _, greedy in build_lm(model)._loglikelihood_tokens(
        [(None, prompt, list(text[:8])), (None, prompt, [*text[:7], (text[7] + 1) % 256]), (None, prompt, list(good.encode()))])]
    assert flags == [True, False, True]


def test_empty_requests_are_no_error():
    lm = build_lm(build())
    assert lm.loglikelihood([]) == [] and lm.loglikelihood_rolling([request("")]) == [0.0]


# ----------------------------------------------------------------------------------------------------------- the harness

def test_demo_scores_are_the_models_own_and_are_kept(run, capsys):
    assert harness.main([str(run), "--tasks", "demo", "limit=12", "micro_batch=8", "dtype=float32", "--device=cpu"]) == 0
    out = capsys.readouterr().out
    record = json.loads((run / "eval" / "demo_float32_limit12.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["run_id"] == "tiny" and summary["eval"]["old"] == {"acc": 0.5}      # nothing of the record is lost
    assert set(summary) == {"run_id", "steps", "eval"} and set(summary["eval"]) == {"old"}     # a trial, and no BF16
    assert not list(run.rglob("*.tmp"))

    model = build()
    rows = [row["text"] for row in list(held_out.documents(str(run))["validation"])[:12]]
    nats = np.array([-rolled(model, [256], list(text.encode())) for text in rows])
    sizes = np.array([len(text.encode()) for text in rows])
    ppl = record["tasks"]["val_ppl"]
    assert ppl["bits_per_byte"] == pytest.approx(nats.sum() / sizes.sum() / math.log(2), rel=1e-5)
    rng = np.random.default_rng(0)
    draws = rng.integers(12, size=(20_000, 12))
    bootstrap = (nats[draws].sum(1) / sizes[draws].sum(1) / math.log(2)).std()
    assert ppl["bits_per_byte_se"] == pytest.approx(bootstrap * math.sqrt(12 / 11), rel=0.05)

    questions = list(held_out.questions(str(run))["validation"])[:12]
    right = [int(np.argmax([expected_pair(model, q["context"], c)[0] for c in q["choices"]]) == q["label"]) for q in questions]
    cloze = record["tasks"]["val_cloze"]
    assert cloze["acc"] == pytest.approx(np.mean(right)) and cloze["chance"] == 0.25 and cloze["n"] == 12
    assert cloze["acc_se"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(12))
    assert len(cloze["docs_sha256"]) == 64 and cloze["docs_sha256"] != ppl["docs_sha256"]
    assert "val_cloze" in out and f"{cloze['acc']:.4f}" in out and "0.25" in out and "limit=12" in out
    assert record["truncated_requests"] == 48       # a context of 32 bytes holds no question whole, and it says so
    assert "48 requests were longer than the context" in out


def test_bf16_is_the_default_and_stores_the_weights_once(run):
    model, tokenizer, device, _ = sample.load_for_inference(str(run), "cpu", "bfloat16")
    x = torch.arange(20)[None]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.cos.dtype == torch.float32
    assert model.head.weight is model.wte.weight
    assert torch.equal(model(x), build(compute_dtype=torch.bfloat16)(x))     # bit for bit what casting at each use gives
    assert tokenizer.name == "byte" and device == torch.device("cpu")


def test_an_unfinished_run_keeps_its_scores_beside(run, capsys):
    (run / "summary.json").unlink()
    assert harness.main([str(run), "tasks=val_cloze"]) == 0
    assert "not finished" in capsys.readouterr().err
    assert (run / "eval" / "val_cloze.json").exists() and not (run / "summary.json").exists()


def test_the_record_says_which_checkpoint_was_scored_and_when(run, monkeypatch):
    newest, loaded, real = [500], [], sample.load_model
    monkeypatch.setattr(harness, "latest", lambda run_dir: Path(run_dir) / "checkpoints" / f"step_{newest[-1]:08d}")

    def load_while_it_trains(run_dir, **settings):
        loaded.append(newest[-1])
        newest.append(750)
        return real(run_dir, **settings)
    monkeypatch.setattr(sample, "load_model", load_while_it_trains)
    before = datetime.now(UTC).replace(microsecond=0)
    assert harness.main([str(run), "tasks=val_cloze", "limit=4"]) == 0
    record = json.loads((run / "eval" / "val_cloze_limit4.json").read_text())
    assert (record["step"], loaded) == (750, [500, 750]) and before <= datetime.fromisoformat(record["time"]) <= datetime.now(UTC)


def test_only_whole_tasks_in_bf16_enter_the_summary_and_stay(run, monkeypatch, capsys):
    assert harness.main([str(run), "tasks=val_cloze"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval"]["val_cloze"] == json.loads((run / "eval" / "val_cloze.json").read_text())["tasks"]["val_cloze"]
    for trial in (["limit=4"], ["dtype=float32"]):
        assert harness.main([str(run), "tasks=val_cloze", *trial]) == 0
        assert json.loads((run / "summary.json").read_text()) == summary
    monkeypatch.setattr(harness, "latest", lambda run_dir: Path("step_00000007"))       # beside a summary of step 1
    assert harness.main([str(run), "tasks=val_ppl"]) == 0
    assert json.loads((run / "summary.json").read_text()) == summary
    assert "is of step 1, the checkpoint that was scored of step 7: the scores are in " in capsys.readouterr().err


def test_lists_of_tasks_that_begin_alike_have_files_of_their_own(tmp_path):
    record = {"tasks": {}, "fp8": "off", "dtype": "bfloat16", "limit": None}
    names = ["+".join(["mmlu_abstract_algebra"] * 9 + [last]) for last in ("piqa", "sciq")]
    for name in names:
        results.write(tmp_path, name, record | {"name": name}, {}, has_summary=False)
    files = list((tmp_path / "eval").glob("*.json"))
    assert {json.loads(file.read_text())["name"] for file in files} == set(names) and all(len(f.name) < 110 for f in files)


@pytest.mark.parametrize("raised, code, sentence", [
    (KeyboardInterrupt(), 130, "\n"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"), 1,
     "the memory is full (CUDA out of memory. Tried to allocate 2.00 GiB): give a smaller one than micro_batch=16\n"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), 1, "the memory is full ([enforce fail] DefaultCPU"),
    (MemoryError(), 1, "the memory is full (no more to be had): give a smaller one than micro_batch=16\n")])
def test_a_scoring_that_cannot_go_on_ends_with_a_sentence(run, monkeypatch, capsys, raised, code, sentence):
    def fail(*_):
        raise raised
    monkeypatch.setattr(harness, "evaluate", fail)
    assert harness.main([str(run), "tasks=demo"]) == code
    said = capsys.readouterr().err
    assert sentence in said and len(said.splitlines()) == 1 and not (run / "eval").exists()


@pytest.mark.parametrize("raised, code, said", [
    (KeyboardInterrupt(), 130, "\n"), (OSError(28, "No space left on device", "x.json"), 1, "x.json: No space left on device\n")])
def test_the_bench_too_ends_without_a_traceback(monkeypatch, capsys, raised, code, said):
    def fail(*_):
        raise raised
    monkeypatch.setattr("bench.harness.bench", fail)
    from bench import harness as bench
    assert bench.main(["tasks=piqa", "offline=saved"]) == code and capsys.readouterr().err == said


def test_a_full_disk_is_told_with_the_files_name(run, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("os.fsync", full)
    assert harness.main([str(run), "tasks=val_cloze", "limit=4"]) == 1
    assert capsys.readouterr().err == f"{run}/eval/samples_val_cloze_limit4.jsonl.gz: No space left on device\n"
    assert not list((run / "eval").iterdir())


def test_a_damaged_summary_is_not_overwritten(run, capsys):
    (run / "summary.json").write_text('{"run_id": ')
    assert harness.main([str(run), "tasks=val_cloze"]) == 2
    assert "summary.json is damaged" in capsys.readouterr().err
    assert (run / "summary.json").read_text() == '{"run_id": '


def test_tasks_of_the_users_own(run, capsys, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    rows = [{"q": f"{a} + {b} =", "answers": [str(a + b), str(a + b + 1)], "gold": 0} for a in range(3) for b in range(3)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs: {{data_files: {{validation: {folder / 'sums.jsonl'}}},"
        f" cache_dir: {tmp_path / 'cache'}}}\noutput_type: multiple_choice\nvalidation_split: validation\n"
        "doc_to_text: q\ndoc_to_choice: answers\ndoc_to_target: gold\nmetric_list:\n"
        "  - {metric: acc, aggregation: mean, higher_is_better: true}\nmetadata: {version: 1.0}\n")
    (folder / "echo.yaml").write_text(
        (folder / "sums.yaml").read_text().replace("task: sums", "task: echo").replace("multiple_choice", "generate_until")
        .replace("doc_to_choice: answers\n", "").replace("doc_to_target: gold", 'doc_to_target: "{{answers[0]}}"')
        .replace("metric: acc", "metric: exact_match")
        + "generation_kwargs: {until: [\"\\n\"], max_gen_toks: 5, do_sample: false}\n")
    assert task_list.local_tasks(str(folder)) == {"sums", "echo"}
    assert harness.main([str(run), "tasks=sums,echo", f"include={folder}", "dtype=float32"]) == 0
    record = json.loads((run / "eval" / "sums+echo_float32.json").read_text())
    model = build()
    right = [directly(model, list(row["q"].encode()), list(b" " + row["answers"][0].encode()))[0]
             > directly(model, list(row["q"].encode()), list(b" " + row["answers"][1].encode()))[0] for row in rows]
    assert record["tasks"]["sums"]["acc"] == pytest.approx(np.mean(right)) and record["tasks"]["sums"]["chance"] == 0.5
    assert record["tasks"]["echo"]["exact_match"] == 0.0 and record["tasks"]["echo"]["chance"] is None
    (folder / "sums.jsonl").unlink()
    assert harness.main([str(run), "tasks=sums", f"include={folder}"]) == 2
    said = capsys.readouterr().err
    assert "the task 'sums' could not be loaded (FileNotFoundError" in said
    assert "its data lie in files that its YAML names: check that they are there, and whole" in said and "Hub" not in said


@pytest.mark.parametrize("arguments, sentence", [
    ([], "tasks is missing: give tasks=VALUE"),
    (["tasks=,"], "tasks= names no task: give tasks=demo or a list such as tasks=hellaswag,piqa"),
    (["task=demo"], "there is no key 'task'; did you mean 'tasks'?"),
    (["tasks=demo", "limit=0"], "limit=0 must be at least 1"),
    (["tasks=demo", "limit=ten"], "limit='ten' is not a whole number"),
    (["tasks=demo", "micro-batch=-1"], "micro_batch=-1 must be at least 1"),
    (["tasks=demo", "dtype=fp8"], "dtype='fp8' is not one of bfloat16, float32; there are: bfloat16, float32"),
    (["tasks=demo", "device=cuda:9"], "device='cuda:9' is not usable here"),
    (["tasks=demo", "include=nowhere"], "include='nowhere' is no folder: give one that holds task YAMLs"),
    (["tasks=demo", "--limit"], "--limit needs a value: write limit=VALUE"),
    (["tasks=demo", "tasks=demo"], "tasks is given twice"),
    (["tasks=demo", "stray"], "'stray' is one word too many"),
])
def test_mistakes_on_the_command_line_get_a_sentence(run, capsys, arguments, sentence):
    assert harness.main([str(run), *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.out == "" and not (run / "eval").exists()


def test_unknown_task_names_the_nearest(run, capsys, monkeypatch):
    import lm_eval.tasks
    asked = []

    class SmallManager(lm_eval.tasks.TaskManager):      # lm-eval's own index takes ten seconds to build
        def __init__(self, include_defaults, **settings):
            asked.append(include_defaults)
            super().__init__(include_defaults=False, **settings)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", SmallManager)
    for tasks, start in [("demo,val_close", "there is no task 'val_close'; did you mean val_cloze"),
                         ("val_pp", "there is no task 'val_pp'; did you mean val_ppl"),
                         ("dmeo", "there is no task 'dmeo'; did you mean demo"),
                         ("qqqq", "there is no task 'qqqq'; `lm-eval ls tasks` lists them all")]:
        assert harness.main([str(run), f"tasks={tasks}"]) == 2
        assert capsys.readouterr().err.startswith(start)
    assert asked == [True] * 4 and not (run / "eval").exists()
    assert harness.main([str(run), "tasks=demo", "limit=2"]) == 0
    assert asked[-1] is False       # local names alone never wait for it


@pytest.mark.parametrize("entry, extra", [(harness, "tasks=demo"), (sample, "hello")])
def test_a_folder_that_is_no_run_gets_a_sentence(run, capsys, monkeypatch, entry, extra):
    monkeypatch.setattr(sample, "load_model", LOAD_MODEL)       # the real one
    config = (run / "config.json").read_text()
    for content, sentence in [(None, "is no run"), ('{"run": ', "is not JSON"), ("[]", "config"),
                              (config, "has no finished checkpoint yet")]:
        (run / "config.json").unlink(missing_ok=True)
        if content is not None:
            (run / "config.json").write_text(content)
        assert entry.main([str(run), extra]) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err and captured.out == "", content
    assert entry.main(["out/absent", extra]) == 2
    assert "out/absent is no run" in capsys.readouterr().err


def test_the_process_itself_ends_with_code_2(tmp_path):
    done = subprocess.run([sys.executable, "-m", "eval.harness", str(tmp_path), "--tasks", "demo"], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "is no run" in done.stderr, done.stderr


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
import torch
from eval import harness, sample
from runtime.config import read_config
from model import GPT
def load_model(run_dir, device, compute_dtype):
    config = read_config(run_dir)
    model = GPT(config.model, compute_dtype)
    model.init_weights(1)
    return model, config
sample.load_model = load_model
code = harness.main([{str(run)!r}, "tasks=demo", "limit=3"])
sys.exit(code if "transformers" not in sys.modules else 3)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=run.parent.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and len(done.stdout.splitlines()) == 5, (done.stdout, done.stderr)
