"""eval/sample.py and eval/options.py: what is generated, printed and refused."""

import io
from dataclasses import replace

import pytest
import torch
from eval_runs import BYTES, TINY, build, build_lm, build_run, bytes_of, request

from eval import sample
from eval.options import read_options
from runtime.config import ConfigError


@pytest.fixture
def run(tmp_path, monkeypatch):
    return build_run(tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------------------ generation

@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=False, n_kv_head=1, qk_norm=True)])
def test_greedy_generation_is_the_argmax_of_full_forward_passes(config):
    model, prompts = build(config), torch.tensor([list(b"abcdef"), list(b"uvwxyz")])
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
    calls = []

    def end_third(h):       # "A", "A", end-of-text, "A", ..
        calls.append(1)
        return torch.nn.functional.one_hot(torch.full((len(h),), 256 if len(calls) == 3 else 65), 384).float()
    assert build_lm(rigged(end_third)).generate_until([request("p", {"until": ["\n"], "max_gen_toks": 9})]) == ["AA"]
    assert len(calls) == 3
    text = got[2]
    stop = text[3:5]
    cut, = build_lm(model).generate_until([request(prompts[2], {"until": ["never there", stop], "max_gen_toks": 12})])
    assert cut == text[:text.index(stop)] and stop not in cut


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
        assert not text.endswith("\ufffd")
        assert text.startswith(shown)       # what is on the screen is never taken back
        shown = text
    assert shown == BYTES.decode(ids) == "naïve €5 𝄞 end\ufffd\ufffdx"
    assert sample.stable_text(BYTES, list("a€".encode())[:2]) == "a"


def test_the_seed_decides_what_is_sampled(run, capsys):
    texts = []
    for seed in (1, 2, 1):
        assert sample.main([str(run), "hello", "tokens=20", "temperature=1", f"seed={seed}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[2] != texts[1]


def test_empty_prompt_starts_a_document(run, monkeypatch):
    seen = []
    real = sample.stream
    monkeypatch.setattr(sample, "stream", lambda model, ids, *more: seen.append(ids.tolist()) or real(model, ids, *more))
    sample.sample(sample.Options(run=str(run), tokens=3), io.StringIO())
    assert seen == [[[256]]]


@pytest.mark.parametrize("arguments, sentence", [
    (["x" * 33], "the prompt has 33 tokens, but the context of"),
    (["hi", "n=0"], "n=0 must be between 1 and 1024"),
    (["hi", "temperature=-1"], "temperature=-1.0 must be 0 (the likeliest token) or between 0.01 and 100"),
    (["hi", "temperature=nan"], "temperature=nan must be 0"),
    (["hi", "temprature=1"], "there is no key 'temprature'; did you mean 'temperature'?"),
    (["hi", "top_k=0"], "top_k=0 must be between 1 and"),
    (["hi", "temperature=1e-40"], "temperature=1e-40 must be 0"),
    (["hi", "n=1000000000000000"], "n=1000000000000000 must be between"),
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
