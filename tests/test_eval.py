"""eval/harness.py, eval/lm.py, eval/held_out.py and eval/sample.py, on tiny models and made-up text; no network."""

import io
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval import harness, held_out, sample
from eval.lm import CheckpointLM
from eval.options import read_options
from model import GPT, GPTConfig
from runtime.config import Config, ConfigError, DataConfig, OptimConfig
from runtime.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ffn=64, n_ctx=32, vocab_size=257)
BYTES = load_tokenizer("byte")
LOAD_MODEL = sample.load_model


def build(config=TINY, seed=1, compute_dtype=torch.float32):
    """A model that has opinions: fresh weights, five times as large, on whose logits the order of tokens shows."""
    model = GPT(config, compute_dtype=compute_dtype)
    model.init_weights(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(1 if "norm" in name else 10 if "wte" in name else 5)
    return model.requires_grad_(False).eval()


def build_lm(model, micro_batch=4):
    return CheckpointLM(model, BYTES, micro_batch, torch.device("cpu"))


def request(*args):
    return SimpleNamespace(args=args)


def directly(model, context, continuation):
    """Log-likelihood and greediness one token at a time, each from a forward pass over at most n_ctx tokens of past.

    The past is what a left-truncated whole has: nothing earlier than n_ctx + 1 tokens before the end.
    """
    ids = (context + continuation)[-(model.config.n_ctx + 1):]
    total, greedy = 0.0, True
    for t in range(len(ids) - len(continuation), len(ids)):
        logits = model(torch.tensor([ids[:t]]))[0, -1].double()
        total += (logits - logits.logsumexp(0))[ids[t]].item()
        greedy &= int(logits[:257].argmax()) == ids[t]
    return total, greedy


def words(rng, n):
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(n))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder like a finished run's, with its data; the checkpoint is a model that load_model is made to return."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    for source in ("prose", "code"):
        write_shards(tmp_path / "data" / source, [words(rng, 80) for _ in range(250)])
    config = Config(run="tiny", model=TINY, optim=OptimConfig(lr=1e-3), steps=1,
                    data=DataConfig(dir="data", mixture={"prose": 0.5, "code": 0.5}, tokenizer="byte",
                                    tokens_per_step=32, micro_batch=1))
    folder = tmp_path / "out" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "summary.json").write_text(json.dumps({"run_id": "tiny", "steps": 1, "eval": {"old": {"acc": 0.5}}}))

    def load_model(run_dir, device="cpu", compute_dtype=torch.bfloat16):
        return build(compute_dtype=compute_dtype).to(device), config
    monkeypatch.setattr(sample, "load_model", load_model)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE", "TQDM_DISABLE",
                 "DISABLE_MULTIPROC"):
        monkeypatch.setenv(name, "1")       # what the harness sets; so that it is undone after the test
    return folder


def write_shards(folder, texts, shards=2):
    folder.mkdir(parents=True)
    listed, share = [], -(-len(texts) // shards)
    for i in range(shards):
        ids = np.concatenate([BYTES.encode_document(text) for text in texts[i * share:(i + 1) * share]])
        ids.astype("<u2").tofile(folder / f"val_{i:05d}.bin")
        listed.append({"file": f"val_{i:05d}.bin", "tokens": len(ids), "sha256": ""})
    (folder / "index.json").write_text(json.dumps({"tokenizer": "byte", "splits": {"val": {"shards": listed}}}))


# -------------------------------------------------------------------------------------------------------- log-likelihood

PAIRS = [("ab", "cd"), ("the quick brown fox", " jumps"), ("x", "y"), ("", "starts a document"), ("trailing  ", "blank"),
         ("long context " * 9, "tail"), ("0123456789" * 4, "the end"), ("é", "ü€𝄞"), ("q", "z" * 31), ("q", "w" * 32)]


def expected_pair(model, context, continuation):
    stripped = context.rstrip()     # lm-eval's rule: blanks at the end of a context belong to the continuation
    continuation = context[len(stripped):] + continuation
    return directly(model, list(stripped.encode()) or [256], list(continuation.encode()))


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
    monkeypatch.setattr("eval.lm.HEAD_ROWS", 4)
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
    (total, _), = build_lm(model).loglikelihood([request("ctx", text)])
    assert total == pytest.approx(rolled(model, list(b"ctx")[-1:], list(text.encode())), rel=1e-5)


def rolled(model, prefix, ids):
    """Sum over disjoint windows of n_ctx tokens, the last one with as much past as fits: the definition, spelled out."""
    n, total = model.config.n_ctx, 0.0
    for start in range(0, len(ids), n):
        piece = ids[start:start + n]
        past = prefix if start == 0 else ids[max(0, start + len(piece) - n - 1):start]
        total += directly(model, past, piece)[0]
    return total


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
    prompt = list(b"some prompt")
    text = bytes_of(sample.generate(model, torch.tensor([prompt]), 60)[0])
    k = next(k for k in range(1, 8) if max(text[:k]) < 128)    # an ASCII beginning survives the way through str
    good = text[:k].decode()
    flags = [greedy for _, greedy in build_lm(model)._loglikelihood_tokens(
        [(None, prompt, list(text[:8])), (None, prompt, [*text[:7], (text[7] + 1) % 256]), (None, prompt, list(good.encode()))])]
    assert flags == [True, False, True]


def bytes_of(ids):
    ids = ids.tolist()
    return bytes(ids[:ids.index(256)] if 256 in ids else ids)


def test_empty_requests_are_no_error():
    lm = build_lm(build())
    assert lm.loglikelihood([]) == [] and lm.loglikelihood_rolling([request("")]) == [0.0]


# ------------------------------------------------------------------------------------------------------------ generation

@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=False, n_kv_head=1, qk_norm=True)])
def test_greedy_generation_is_the_argmax_of_full_forward_passes(config):
    model, prompts = build(config, seed=4), torch.tensor([list(b"abcdef"), list(b"uvwxyz")])
    got = sample.generate(model, prompts, 100)
    assert got.shape == (2, 32 - 6 + 1)         # until the context is full
    ids = prompts
    for t in range(got.shape[1]):
        token = model(ids)[:, -1, :257].argmax(-1)
        assert torch.equal(token, got[:, t])
        ids = torch.cat((ids, token[:, None]), 1)
    assert len(set(got.flatten().tolist())) > 5 and not torch.equal(got[0], got[1])


def rigged(logits_of):
    """A model whose head is replaced by a function of the last hidden state's shape."""
    model = build()
    model.head.forward = lambda h: logits_of(h)
    return model


def test_padding_rows_are_never_generated():
    def prefer_padding(h):
        logits = torch.zeros(*h.shape[:-1], 384)
        logits[..., 257:] = 100.0
        return logits
    ids = torch.zeros(8, 2, dtype=torch.int64)
    for temperature in (0.0, 1.0, 50.0):
        generator = torch.Generator().manual_seed(0)
        assert sample.generate(rigged(prefer_padding), ids, 20, temperature, None, generator).max() < 257
    (_, greedy), = build_lm(rigged(prefer_padding)).loglikelihood([request("a", "\x00")])
    assert greedy


def test_sampling_follows_the_models_distribution_and_top_k():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    model = rigged(lambda h: torch.cat((p.log().expand(*h.shape[:-1], 4), torch.full((*h.shape[:-1], 380), -99.0)), -1))
    ids = torch.zeros(4000, 1, dtype=torch.int64)

    def shares(temperature, top_k):
        drawn = sample.generate(model, ids, 1, temperature, top_k, torch.Generator().manual_seed(0))
        return torch.bincount(drawn.flatten(), minlength=4)[:4] / 4000

    def expected(temperature, k):
        weights = p ** (1 / temperature)
        weights[k:] = 0
        return weights / weights.sum()

    for temperature, top_k, k in [(1.0, None, 4), (0.5, None, 4), (2.0, 3, 3), (1.0, 1, 1), (1.0, 9999, 4)]:
        torch.testing.assert_close(shares(temperature, top_k), expected(temperature, k), atol=0.03, rtol=0)


def test_rows_that_ended_stay_ended_and_generation_stops():
    calls = []

    def end_at(h):      # row 0 emits end-of-text first, row 1 third
        calls.append(1)
        logits = torch.zeros(len(h), 384)
        logits[0, 256 if len(calls) == 1 else 65] = 1
        logits[1, 256 if len(calls) == 3 else 66] = 1
        return logits
    got = sample.generate(rigged(end_at), torch.zeros(2, 1, dtype=torch.int64), 20, eot=256)
    assert got.tolist() == [[256, 256, 256], [66, 66, 256]] and len(calls) == 3


def test_same_seed_same_text_other_seed_other_text():
    ids = torch.zeros(2, 4, dtype=torch.int64)
    a, b, c = (sample.generate(build(), ids, 20, 1.0, None, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(a[0], a[1])


def test_generate_until_is_greedy_and_stops_where_asked():
    model = build()
    prompts = ["one", "two", "a longer prompt", "x" * 31, "y" * 80]
    free = {p: bytes_of(sample.generate(model, torch.tensor([list(p.encode())[-32:]]), 12, eot=256)[0]) for p in prompts[:3]}
    lm = build_lm(model, micro_batch=2)
    got = lm.generate_until([request(p, {"until": [], "max_gen_toks": 12}) for p in prompts])
    assert got[:3] == [free[p][:12].decode(errors="replace") for p in prompts[:3]]
    assert all(got) and lm.n_truncated == 2     # 31 + 12 and 80 + 12 tokens do not fit 32
    kept = list(b"y" * 80)[-20:]
    assert got[4] == bytes_of(sample.generate(model, torch.tensor([kept]), 12, eot=256)[0]).decode(errors="replace")
    text = got[2]
    stop = text[3:5]
    cut, = build_lm(model).generate_until([request(prompts[2], {"until": ["never there", stop], "max_gen_toks": 12})])
    assert cut == text[:text.index(stop)] and stop not in cut


# -------------------------------------------------------------------------------------------------------- held-out tasks

def test_cloze_questions_are_what_they_claim(run):
    rows = list(held_out.questions(str(run))["validation"])
    assert len(rows) == 200 and {row["source"] for row in rows} == {"prose", "code"}
    texts = {s: [t[i] for t in [texts] for i in range(len(t))] for s, texts in held_out._sources(str(run))}
    labels = np.bincount([row["label"] for row in rows], minlength=4)
    assert labels.sum() == 200 and labels.min() > 30
    for row in rows:
        home = [t for t in texts[row["source"]] if row["context"] + row["choices"][row["label"]] in t]
        assert len(home) == 1 and len(row["context"]) == 128
        assert len(set(row["choices"])) == 4 and all(len(c) == 32 and c[0].isspace() for c in row["choices"])
        wrong = [c for i, c in enumerate(row["choices"]) if i != row["label"]]
        assert all(c not in home[0] and any(c in t for t in texts[row["source"]]) for c in wrong)


def test_held_out_tasks_are_the_same_each_time_and_follow_the_shards(run):
    first = [list(f(str(run))["validation"]) for f in (held_out.documents, held_out.questions)]
    assert first == [list(f(str(run))["validation"]) for f in (held_out.documents, held_out.questions)]
    texts = [t[i] for _, t in held_out._sources(str(run)) for i in range(len(t))]
    assert len(texts) == 500 and len(first[0]) == 64 and all(row["text"] in texts for row in first[0])


def test_a_model_that_knows_nothing_scores_chance(run):
    """Random weights, and a model that ignores the context but knows the letters' frequencies: both near 25 %.

    Within two standard errors of one model's score; over twelve made-up corpora it was 25.5 +- 0.9 % and 25.5 +- 0.5 %.
    """
    rows = list(held_out.questions(str(run))["validation"])
    pairs = [request(row["context"], choice) for row in rows for choice in row["choices"]]
    random_models = [build_lm(build(replace(TINY, n_ctx=192), seed), 32) for seed in range(4)]
    for judges in (random_models, [CountingLM()]):
        right = [np.array([t for t, _ in judge.loglikelihood(pairs)]).reshape(-1, 4).argmax(1)
                 == [row["label"] for row in rows] for judge in judges]
        assert abs(np.mean(right) - 0.25) < 2 * math.sqrt(0.25 * 0.75 / len(rows)), judges


class CountingLM:
    def loglikelihood(self, requests):
        return [(-sum(3.0 if letter == " " else 1.0 + "abcdefghij".find(letter) / 9 for letter in r.args[1]), False)
                for r in requests]


def test_a_model_that_reads_the_context_is_told_apart(run):
    rows = list(held_out.questions(str(run))["validation"])
    texts = [t[i] for _, t in held_out._sources(str(run)) for i in range(len(t))]
    right = sum(any(row["context"] + row["choices"][row["label"]] in t for t in texts) for row in rows)
    assert right == len(rows)       # the document itself answers every question


@pytest.mark.parametrize("damage, sentence", [
    (lambda f: (f / "index.json").unlink(), "there is no data/code/index.json: prepare the run's data with prepare_data.py"),
    (lambda f: (f / "index.json").write_text("{"), "data/code/index.json is damaged (JSONDecodeError"),
    (lambda f: (f / "index.json").write_text('{"tokenizer": "byte", "splits": []}'), "data/code/index.json is damaged"),
    (lambda f: (f / "index.json").write_text((f / "index.json").read_text().replace("byte", "gpt2")),
     "was made with the tokenizer 'gpt2', the run was trained with 'byte'"),
    (lambda f: (f / "val_00001.bin").write_bytes(b"\0\1"), "data/code/val_00001.bin has 2 bytes, but data/code/index.json"),
    (lambda f: (f / "val_00000.bin").unlink(), "data/code/val_00000.bin has 0 bytes"),
])
def test_damaged_shards_get_a_sentence(run, capsys, damage, sentence):
    damage(Path("data/code"))
    assert harness.main([str(run), "--tasks", "demo"]) == 2
    message = capsys.readouterr().err
    assert sentence in message and "Traceback" not in message and not (run / "eval").exists()


def test_shards_without_a_usable_document_get_a_sentence(run, capsys):
    for source in ("prose", "code"):
        for path in Path("data", source).glob("*"):
            path.unlink()
        Path("data", source).rmdir()
        write_shards(Path("data", source), ["short"] * 6)
    assert harness.main([str(run), "tasks=val_cloze"]) == 2
    assert "val_cloze: no source of" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- the harness

def test_demo_scores_are_the_models_own_and_are_kept(run, capsys):
    assert harness.main([str(run), "--tasks", "demo", "limit=12", "micro_batch=8", "dtype=float32", "--device=cpu"]) == 0
    out = capsys.readouterr().out
    record = json.loads((run / "eval" / "demo.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["run_id"] == "tiny" and summary["eval"]["old"] == {"acc": 0.5}      # nothing of the record is lost
    assert summary["eval"]["val_ppl"] == record["tasks"]["val_ppl"] | {"limit": 12}
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
    model, tokenizer, device = sample.load_for_inference(str(run), "cpu", "bfloat16")
    x = torch.arange(20)[None]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.cos.dtype == torch.float32
    assert model.head.weight is model.wte.weight
    assert torch.equal(model(x), build(compute_dtype=torch.bfloat16)(x))     # bit for bit what casting at each use gives
    assert tokenizer.name == "byte" and device == torch.device("cpu")


def test_an_unfinished_run_keeps_its_scores_beside(run, capsys):
    (run / "summary.json").unlink()
    assert harness.main([str(run), "tasks=val_cloze", "limit=4"]) == 0
    assert "not finished" in capsys.readouterr().err
    assert (run / "eval" / "val_cloze.json").exists() and not (run / "summary.json").exists()


def test_a_damaged_summary_is_not_overwritten(run, capsys):
    (run / "summary.json").write_text('{"run_id": ')
    assert harness.main([str(run), "tasks=val_cloze", "limit=4"]) == 2
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
    assert harness._local_tasks(str(folder)) == {"sums", "echo"}
    assert harness.main([str(run), "tasks=sums,echo", f"include={folder}", "dtype=float32"]) == 0
    record = json.loads((run / "eval" / "sums+echo.json").read_text())
    model = build()
    right = [directly(model, list(row["q"].encode()), list(b" " + row["answers"][0].encode()))[0]
             > directly(model, list(row["q"].encode()), list(b" " + row["answers"][1].encode()))[0] for row in rows]
    assert record["tasks"]["sums"]["acc"] == pytest.approx(np.mean(right)) and record["tasks"]["sums"]["chance"] == 0.5
    assert record["tasks"]["echo"]["exact_match"] == 0.0 and record["tasks"]["echo"]["chance"] is None
    (folder / "sums.jsonl").unlink()
    assert harness.main([str(run), "tasks=sums", f"include={folder}"]) == 2
    assert "the task 'sums' could not be loaded (FileNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, sentence", [
    ([], "tasks is missing: give tasks=VALUE"),
    (["tasks="], "tasks= names no task: give tasks=demo or a list such as tasks=hellaswag,piqa"),
    (["task=demo"], "there is no key 'task'; did you mean 'tasks'?"),
    (["tasks=demo", "limit=0"], "limit=0 must be at least 1"),
    (["tasks=demo", "limit=ten"], "limit='ten' is not a whole number"),
    (["tasks=demo", "micro-batch=-1"], "micro_batch=-1 must be at least 1"),
    (["tasks=demo", "dtype=fp8"], "dtype='fp8' is not one of bfloat16, float32; did you mean"),
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


# ------------------------------------------------------------------------------------------------------------ sample.py

def test_sample_prints_prompt_and_continuation_the_same_streamed_or_not(run):
    one, three, again = io.StringIO(), io.StringIO(), io.StringIO()
    settings = {"run": str(run), "prompt": "hello", "tokens": 20, "temperature": 0.0, "dtype": "float32", "device": "cpu"}
    sample.sample(sample.Options(**settings), one)
    sample.sample(sample.Options(**settings, n=3), three)
    sample.sample(sample.Options(**settings), again)
    expected = sample.generate(build(), torch.tensor([list(b"hello")]), 20, eot=256)[0]
    text = "hello" + bytes_of(expected).decode(errors="replace")
    assert one.getvalue() == again.getvalue() == text + "\n"
    assert three.getvalue().count(text) == 3 and "2 of 3" in three.getvalue()


def test_streamed_pieces_are_whole_characters():
    ids = list("naïve €5 𝄞 end".encode()) + [0xff, 0xe2, 0x82] + list(b"x")
    shown = ""
    for i in range(1, len(ids) + 1):
        text = sample.stable_text(BYTES, ids[:i])
        assert text.startswith(shown)       # what is on the screen is never taken back
        shown = text
    assert shown == BYTES.decode(ids) == "naïve €5 𝄞 end\ufffd\ufffdx"
    assert sample.stable_text(BYTES, list("a€".encode())[:2]) == "a"


def test_empty_prompt_starts_a_document(run, monkeypatch):
    seen = []
    real = sample.stream
    monkeypatch.setattr(sample, "stream", lambda model, ids, *more: seen.append(ids.tolist()) or real(model, ids, *more))
    sample.sample(sample.Options(run=str(run), tokens=3), io.StringIO())
    assert seen == [[[256]]]


@pytest.mark.parametrize("arguments, sentence", [
    (["x" * 33], "the prompt has 33 tokens, but the context of"),
    (["hi", "n=0"], "n=0 must be at least 1"),
    (["hi", "temperature=-1"], "temperature=-1.0 must be a number from 0"),
    (["hi", "temperature=nan"], "temperature=nan must be a number from 0"),
    (["hi", "temprature=1"], "there is no key 'temprature'; did you mean 'temperature'?"),
    (["hi", "top_k=0"], "top_k=0 must be at least 1"),
])
def test_sample_mistakes_get_a_sentence(run, capsys, arguments, sentence):
    assert sample.main([str(run), *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.out == ""


def test_sample_says_when_the_context_ends_first(run, capsys):
    assert sample.main([str(run), "hello", "tokens=200", "seed=3"]) == 0
    assert "the context of 32 tokens allows 28 new ones, not tokens=200" in capsys.readouterr().err


def test_options_take_every_spelling():
    options = read_options(sample.Options, ["out/x", "a prompt, n = 3", "--n", "2", "--top-k=none", "temperature=1"])
    assert (options.run, options.prompt, options.n) == ("out/x", "a prompt, n = 3", 2)
    assert options.top_k is None and options.temperature == 1.0
    assert read_options(sample.Options, ["out/x", "prompt=n=3\nk=v"]).prompt == "n=3\nk=v"
    with pytest.raises(ConfigError, match="run is missing"):
        read_options(sample.Options, ["n=2"])
