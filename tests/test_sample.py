"""eval/sample.py: what is generated, printed and refused."""

import io
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from eval_runs import BYTES, TINY, build, build_lm, build_run, bytes_of, request

from eval import run_tokenizer, sample
from eval.streaming import Growing, Piece, pieces
from runtime.checkpoint import DamagedError
from runtime.cli import UserError, read_options
from runtime.tokenizer import load_tokenizer


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


def grown(tokenizer, ids):
    """The pieces of `ids` one by one, the last of them what rest() gives."""
    growing = Growing(tokenizer)
    return [growing.add(i) for i in ids] + [growing.rest()]


def test_streamed_pieces_are_whole_characters():
    ids = list("naïve €5 𝄞 end".encode()) + [0xff, 0xe2, 0x82] + list(b"x")
    told = grown(BYTES, ids)
    assert "".join(told) == BYTES.decode(ids) == "naïve €5 𝄞 end\ufffd\ufffdx"
    assert told[2:4] == ["", "ï"] and "\ufffd" not in "".join(told[:-2])
    assert grown(BYTES, list("a€".encode())[:2]) == ["a", "", "\ufffd"]
    assert grown(BYTES, []) == [""]


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


def test_a_long_text_costs_no_more_a_token_than_a_short_one():
    lengths = []
    counting = SimpleNamespace(decode=lambda ids: lengths.append(len(ids)) or BYTES.decode(ids))
    assert "".join(grown(counting, list(b"abc " * 500))) == "abc " * 500
    assert max(lengths) <= 4


def test_continuations_are_printed_in_order_the_next_one_as_it_grows():
    out, seen = io.StringIO(), []

    def steps():
        for step in ([(0, "a", None), (1, "x", None), (2, "k", "document")], [(0, "b", "document"), (1, "y", None)],
                     [(1, "z", "limit")]):
            yield [Piece(*piece) for piece in step]
            seen.append(out.getvalue())
    sample.show(steps(), sample.Request(prompt="P ", n=3), out)
    assert seen[0] == "-" * 32 + " 1 of 3\nP a" and seen[1] == f"{seen[0]}b\n{'-' * 32} 2 of 3\nP xy"
    assert seen[2] == f"{seen[1]}z\n{'-' * 32} 3 of 3\nP k\n"


def test_rows_end_with_their_document_or_at_a_limit():
    def end_at(h):      # row 0 ends its document at once, row 1 never
        logits = torch.zeros(len(h), 384)
        logits[0, 256], logits[1, 65] = 1e4, 1e4
        return logits
    ready = sample.Inference(rigged(end_at), BYTES, torch.device("cpu"), [])
    steps = list(sample.continuations(ready, sample.Request(prompt="p", n=2, tokens=3)))
    assert steps == [[(0, "", "document"), (1, "A", None)], [(1, "A", None)], [(1, "A", None)], [(1, "", "limit")]]
    tokens = iter(torch.tensor([[0xe2, 0xe2], [256, 0x82]]))       # each ends within a character
    assert list(pieces(tokens, BYTES, 2)) == [[(0, "", None), (1, "", None)], [(0, "\ufffd", "document"), (1, "", None)],
                                              [(1, "\ufffd", "limit")]]


def test_a_prompt_is_read_after_the_begin_of_text_where_there_is_one():
    with_bos = replace(BYTES, prefix=(256, 3))
    assert [sample.prompt_ids(BYTES, prompt) for prompt in ("ab", "")] == [[97, 98], [256]]
    assert [sample.prompt_ids(with_bos, prompt) for prompt in ("ab", "")] == [[97, 98], [3]]      # its own rules add none
    with_bos = replace(with_bos, adds_start=True)
    assert [sample.prompt_ids(with_bos, prompt) for prompt in ("ab", "")] == [[3, 97, 98], [3]]


def test_no_id_comes_out_that_the_tokenizer_does_not_have():
    model = rigged(lambda h: torch.arange(384.0).expand(*h.shape[:-1], 384))
    ids = torch.zeros(1, 1, dtype=torch.int64)
    assert sample.generate(model, ids, 1).item() == 256
    assert sample.generate(model, ids, 1, n_ids=200).item() == 199
    assert sample.generate(model, ids, 1, n_ids=9999).item() == 256
    ready = sample.Inference(model, replace(BYTES, vocab_size=100, prefix=(7,)), torch.device("cpu"), [])
    steps = list(sample.continuations(ready, sample.Request(prompt="P", temperature=0.0, tokens=2)))
    assert [piece.text for step in steps for piece in step] == ["c", "c", ""]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_that_has_diverged_gets_a_sentence(run, capsys, monkeypatch, temperature, value):
    model = rigged(lambda h: torch.zeros(len(h), 384).index_fill(1, torch.tensor([5]), value))
    monkeypatch.setattr(sample, "load_model", lambda run_dir, **more: (model, None))
    assert sample.main([str(run), "hi", f"temperature={temperature}"]) == 2
    assert "the model's logits are not finite numbers" in capsys.readouterr().err


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(run, capsys, monkeypatch):
    monkeypatch.setattr(run_tokenizer, "load_tokenizer", lambda name: replace(BYTES, vocab_size=300))
    assert sample.main([str(run), "hi"]) == 2
    assert f"the tokenizer of {run} has 300 ids, its model 257: they are no pair" in capsys.readouterr().err


@pytest.mark.parametrize("device, told", [
    ("cud", "there is no device='cud': give auto, cpu or cuda"), ("cuda:x", "there is no device='cuda:x': give"),
    ("mps", "device='mps' is not usable here ("), ("hpu", "device='hpu' is not usable here (")])
def test_a_device_that_is_not_there_gets_a_short_sentence(run, capsys, device, told):
    assert sample.main([str(run), "hi", f"device={device}"]) == 2
    said = capsys.readouterr().err
    assert told in said and len(said) < 200 and said.count("\n") == 1


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


@pytest.mark.parametrize("error, code, words", [
    (KeyboardInterrupt(), 130, ""),
    (PermissionError(13, "Permission denied"), 1, "PermissionError: [Errno 13] Permission denied"),
    (torch.OutOfMemoryError("CUDA out of memory.\nTried"), 1, "OutOfMemoryError: CUDA out of memory."),
])
def test_what_is_nobodys_mistake_needs_no_traceback(run, capsys, monkeypatch, error, code, words):
    def fail(*args):
        raise error
    monkeypatch.setattr(sample, "load_for_inference", fail)
    assert sample.main([str(run), "hi"]) == code
    assert capsys.readouterr().err == (words and words + "\n")


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
    (["hi", "temperature=nan"], "temperature=nan is not a number"),
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
    with pytest.raises(UserError, match="run is missing"):
        read_options(sample.Options, ["n=2"])
