"""eval/sample.py: what is generated, printed and refused, with which tokenizer."""

import io
import json
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from eval_runs import BYTES, TINY, build, build_run, bytes_of, generate, rigged

from eval import export, sample
from eval.sample import Growing
from runtime.checkpoint import DamagedError
from runtime.config import read_config
from runtime.tokenizer import load_tokenizer


@pytest.fixture
def run(tmp_path, monkeypatch):
    return build_run(tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------------------ generation

@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=False, n_kv_head=1, qk_norm=True)])
def test_greedy_generation_is_the_argmax_of_full_forward_passes(config):
    model, prompts = build(config), torch.tensor([list(b"abcdef"), list(b"uvwxyz")])
    got = generate(model, prompts, 100)
    assert got.shape == (2, 32 - 6 + 1)         # until the context is full
    ids = prompts
    for t in range(got.shape[1]):
        token = model(ids)[:, -1, :257].argmax(-1)
        assert torch.equal(token, got[:, t])
        ids = torch.cat((ids, token[:, None]), 1)
    assert len(set(got.flatten().tolist())) > 5 and not torch.equal(got[0], got[1])


def test_no_id_comes_out_that_the_tokenizer_does_not_have():
    model = rigged(lambda h: torch.arange(384.0).expand(*h.shape[:-1], 384))
    ids = torch.zeros(8, 1, dtype=torch.int64)
    for n_ids, most in ((None, 256), (200, 199), (9999, 256)):
        assert (generate(model, ids, 1, n_ids=n_ids) == most).all()
        assert generate(model, ids, 20, 50.0, None, torch.Generator().manual_seed(0), n_ids=n_ids).max() <= most


def test_sampling_follows_the_models_distribution_and_top_k():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    model = rigged(lambda h: torch.cat((p.log().expand(*h.shape[:-1], 4), torch.full((*h.shape[:-1], 380), -99.0)), -1))
    ids = torch.zeros(4000, 1, dtype=torch.int64)
    for temperature, top_k, k in [(1.0, None, 4), (0.5, None, 4), (2.0, 3, 3), (1.0, 1, 1), (1.0, 9999, 4)]:
        drawn = generate(model, ids, 1, temperature, top_k, torch.Generator().manual_seed(0))
        weights = p ** (1 / temperature)
        weights[k:] = 0
        shares = torch.bincount(drawn.flatten(), minlength=4)[:4] / 4000
        torch.testing.assert_close(shares, weights / weights.sum(), atol=0.03, rtol=0)


def test_rows_that_ended_stay_ended_and_generation_stops():
    calls = []

    def end_at(h):      # row 0 emits end-of-text first, row 1 third
        calls.append(1)
        logits = torch.zeros(len(h), 384)
        logits[0, 256 if len(calls) == 1 else 65] = 1
        logits[1, 256 if len(calls) == 3 else 66] = 1
        return logits
    got = generate(rigged(end_at), torch.zeros(2, 1, dtype=torch.int64), 20, eot=256)
    assert got.tolist() == [[256, 256, 256], [66, 66, 256]] and len(calls) == 3


# ------------------------------------------------------------------------------------------------------------- streaming

def grown(tokenizer, ids):
    """The pieces of `ids` one by one, the last of them what rest() gives."""
    growing = Growing(tokenizer)
    return [growing.add(i) for i in ids] + [growing.rest()]


def test_streamed_pieces_are_whole_characters():
    ids = list("naïve €5 𝄞 end".encode()) + [0xff, 0xe2, 0x82] + list(b"x")
    told = grown(BYTES, ids)
    assert "".join(told) == BYTES.decode(ids) == "naïve €5 𝄞 end\ufffd\ufffdx"
    assert told[2:4] == ["", "ï"] and "\ufffd" not in "".join(told[:-2])
    assert grown(BYTES, list("a€".encode())[:2]) == ["a", "", "\ufffd"] and grown(BYTES, []) == [""]
    lengths = []        # a long text costs no more a token than a short one
    counting = SimpleNamespace(decode=lambda ids: lengths.append(len(ids)) or BYTES.decode(ids))
    assert "".join(grown(counting, list(b"abc " * 500))) == "abc " * 500 and max(lengths) <= 4


def test_streamed_pieces_add_up_to_the_whole_text_whatever_the_decoder():
    """GPT-2's tokens cut characters; SentencePiece's decoder eats the very first blank and spells unknown bytes one by one."""
    text, rng = "Ça va? 日本語, 🤖🤖 emoji   and\n\nlines — naïve ﬁ", random.Random(0)
    gpt2 = load_tokenizer("gpt2")
    words = ["▁the", "▁cat", "s", "▁", "▁sat", *(f"<0x{b:02X}>" for b in range(256))]
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    pieces.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0)])
    llama = SimpleNamespace(decode=lambda ids: pieces.decode(ids, skip_special_tokens=False))
    known = [0, 1, 2, *(5 + b for b in "é日🤖".encode()), 4, 0, 3, 4, *(5 + b for b in "日".encode()), 1]
    assert llama.decode(known) == "the catsé日🤖 sat the  sat日 cat"
    for tokenizer, ids in [(gpt2, gpt2.encode(text * 3).tolist()), (llama, known), (llama, known[::-1] + known)]:
        assert "".join(grown(tokenizer, ids)) == tokenizer.decode(ids)
    for _ in range(50):
        ids = [rng.randrange(50257) for _ in range(60)]
        assert "".join(grown(gpt2, ids)) == gpt2.decode(ids)


def test_continuations_are_printed_in_order_the_next_one_as_it_grows():
    out, seen = io.StringIO(), []

    def steps():
        for step in ([*b"axk"], [*b"by", 256], [256, *b"zq"], [*b"?w?"]):      # row 2 ends first, then row 0; row 1 at a limit
            yield step
            seen.append(out.getvalue())
    sample.show(steps(), BYTES, "P ", 3, out)
    heads = [f"{'-' * 32} {i} of 3\nP " for i in (1, 2, 3)]
    assert seen == [heads[0] + "a", heads[0] + "ab", f"{heads[0]}ab\n{heads[1]}xyz", f"{heads[0]}ab\n{heads[1]}xyzw"]
    assert out.getvalue() == f"{heads[0]}ab\n{heads[1]}xyzw\n{heads[2]}k\n"
    out = io.StringIO()
    sample.show(iter([[0xe2], [256]]), BYTES, "", 1, out)      # ends within a character
    assert out.getvalue() == "\ufffd\n"


# ------------------------------------------------------------------------------------------------------------ the command

def test_sample_prints_prompt_and_continuation(run, capsys):
    settings = [str(run), "hello", "tokens=20", "temperature=0", "dtype=float32", "device=cpu"]
    text = "hello" + bytes_of(generate(build(), torch.tensor([list(b"hello")]), 20, eot=256)[0]).decode(errors="replace")
    for more in ([], ["n=3"]):
        assert sample.main([*settings, *more]) == 0
        out = capsys.readouterr().out
        assert out == text + "\n" if not more else out.count(text) == 3 and "2 of 3" in out
    texts = []
    for seed in (1, 2, 1):
        assert sample.main([str(run), "hello", "tokens=200", "temperature=1", f"seed={seed}"]) == 0
        out, err = capsys.readouterr()
        assert "the context of 32 tokens allows 28 new ones, not tokens=200" in err
        texts.append(out)
    assert texts[0] == texts[2] != texts[1]


def test_bf16_is_the_default_and_stores_the_weights_once(run):
    model, tokenizer, device, _ = sample.load_for_inference(str(run), "cpu", "bfloat16")
    x = torch.arange(20)[None]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.cos.dtype == torch.float32
    assert model.head.weight is model.wte.weight
    assert torch.equal(model(x), build(compute_dtype=torch.bfloat16)(x))     # bit for bit what casting at each use gives


def test_a_prompt_is_read_after_the_begin_of_text_where_there_is_one():
    with_bos = replace(BYTES, prefix=(256, 3))
    assert [sample.prompt_ids(BYTES, prompt) for prompt in ("ab", "")] == [[97, 98], [256]]
    assert [sample.prompt_ids(with_bos, prompt) for prompt in ("ab", "")] == [[97, 98], [3]]      # its own rules add none
    with_bos = replace(with_bos, adds_start=True)
    assert [sample.prompt_ids(with_bos, prompt) for prompt in ("ab", "")] == [[3, 97, 98], [3]]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_that_has_diverged_gets_a_sentence(run, capsys, monkeypatch, temperature, value):
    model = rigged(lambda h: torch.zeros(len(h), 384).index_fill(1, torch.tensor([5]), value))
    monkeypatch.setattr(sample, "load_model", lambda run_dir, **more: (model, None))
    assert sample.main([str(run), "hi", f"temperature={temperature}"]) == 2
    assert "the model's logits are not finite numbers" in capsys.readouterr().err


def test_a_checkpoint_that_gives_way_to_a_newer_one_is_no_damage(run, monkeypatch):
    """A run that still trains deletes its older checkpoints, maybe the one that is being read."""
    load_model, steps = sample.load_model, [1]

    def deleted_meanwhile(run_dir, **more):
        if steps[-1] == 3:
            return load_model(run_dir, **more)
        steps.append(steps[-1] + 1)
        folder = run / f"checkpoints/step_{steps[-1]:08d}"
        folder.mkdir(parents=True)
        (folder / "DONE").touch()
        raise DamagedError("gone")
    monkeypatch.setattr(sample, "load_model", deleted_meanwhile)
    assert sample.load_for_inference(str(run), "cpu", "float32").model.config == TINY and steps == [1, 2, 3]

    def damaged(run_dir, **more):
        raise DamagedError("still the newest")
    monkeypatch.setattr(sample, "load_model", damaged)
    with pytest.raises(DamagedError, match="still the newest"):
        sample.load_for_inference(str(run), "cpu", "float32")


@pytest.mark.parametrize("error, words", [
    (PermissionError(13, "Permission denied", "x"), "PermissionError: [Errno 13] Permission denied: 'x'"),
    (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "the memory is full (CUDA out of memory.): give a smaller"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), "the memory is full ([enforce fail] DefaultCPU")])
def test_what_is_the_machines_fault_needs_no_traceback(run, capsys, monkeypatch, error, words):
    def fail(*args):
        raise error
    monkeypatch.setattr(sample, "load_for_inference", fail)
    assert sample.main([str(run), "hi"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(words) and said.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------- the tokenizer

MANIFEST = "checkpoints/step_00000004/manifest.json"


@pytest.mark.parametrize("name, content", [
    (MANIFEST, {"state": {"tokenizer_sha256": "f" * 64}}), (MANIFEST, {"state": {"imported": {"tokenizer_sha256": "f" * 64}}}),
    ("summary.json", {"tokenizer_sha256": "f" * 64})])
@pytest.mark.parametrize("command", [sample, export])
def test_a_tokenizer_that_the_model_was_not_trained_with_is_refused(run, capsys, command, name, content):
    """As many ids, other text: nothing else would tell. The newest checkpoint decides, before a summary of another time."""
    (path := run / name).parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "DONE").touch()
    path.write_text(json.dumps(content))
    assert command.main([str(run), str(run / "new")]) == 2
    said = capsys.readouterr().err
    assert f"the tokenizer byte is not the one that the model of {run} was trained with (81fbde863..., not fffffffff...)" in said
    assert said.count("\n") == 1 and not (run / "new").exists()
    newer = run / MANIFEST.replace("4", "6")
    newer.parent.mkdir(parents=True)
    (newer.parent / "DONE").touch()
    newer.write_text(json.dumps({"state": {"tokenizer_sha256": BYTES.sha256}}))
    assert sample.read_tokenizer(read_config(run), run).sha256 == BYTES.sha256
    shutil.rmtree(newer.parent)
