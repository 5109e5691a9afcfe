"""runtime/validation.py against torch's cross-entropy, its standard error by simulation;
eval/lm.py: log-likelihoods and greedy texts against the model taken one token at a time; batches,
shared contexts, ranks, stop requests."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from eval import lm as eval_lm
from eval.lm import CheckpointLM
from lib.errors import UserError
from model import GPTConfig
from runtime.parallel import World
from runtime.validation import ValLoss, bits_per_byte, evaluate
from tests.helpers import eval_runs
from tests.helpers.eval_runs import (
    BYTES,
    CPU,
    TINY,
    build,
    build_lm,
    expected_pair,
    generate,
    greedy_text,
    request,
    rigged,
    rolled,
    words,
)

# ------------------------------------------------------------------------------------------ losses


class Fixed(torch.utils.data.TensorDataset):
    """n validation sequences of random tokens; one has no targets, one a few."""

    def __init__(self, n, seed):
        ids = torch.randint(257, (n, 17), generator=torch.Generator().manual_seed(seed))
        self.x, self.y = ids[:, :-1], ids[:, 1:].clone()
        self.y[0], self.y[1, :9] = -100, -100
        self.targets = (self.y >= 0).sum(1).numpy()
        super().__init__(self.x, self.y)

    def batch(self, start, stop):
        return self[start:stop]


SETS, WEIGHTS = {"a": Fixed(7, 0), "b": Fixed(3, 1)}, {"a": 0.25, "b": 0.75}


@pytest.fixture
def gpt():
    """A model that notes the shape of each batch."""
    gpt = build(GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=16, vocab_size=257))
    gpt.shapes = []
    gpt.register_forward_pre_hook(lambda module, args: gpt.shapes.append(tuple(args[0].shape)))
    return gpt


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_ranks_and_batch_give_torchs_cross_entropy_by_sequence(
    gpt, micro_batch: int, size: int
):
    left = {"a": [], "b": []}
    # one after the other; the gather of the last hands out what the earlier ones left
    for rank in range(size):
        sources = iter(SETS)

        def gather(t, sources=sources):
            left[source := next(sources)].append(t)
            return torch.stack((left[source] + [t] * size)[:size])

        gpt.shapes.clear()
        got = evaluate(gpt, SETS, WEIGHTS, micro_batch, CPU, rank, size, gather)
        assert len(gpt.shapes) == sum(-(-len(v) // (micro_batch * size)) for v in SETS.values()), (
            "as many on each rank"
        )
        assert set(gpt.shapes) == {(micro_batch, 16)}, "one shape to compile"
    for name, val in SETS.items():
        want = [
            F.cross_entropy(gpt(x[None])[0], y, reduction="sum").item()
            for x, y in zip(val.x, val.y, strict=True)
        ]
        assert got.sequences[name] == pytest.approx(want, rel=1e-6) and got.targets[name].tolist()[
            :3
        ] == [0, 7, 16]
        assert got.source_loss(name) == pytest.approx(
            F.cross_entropy(gpt(val.x).flatten(0, 1), val.y.flatten()).item()
        )
    assert got.loss == pytest.approx(0.25 * got.source_loss("a") + 0.75 * got.source_loss("b"))


@pytest.mark.parametrize("answers, n", [([False, True], 16), ([False] * 10, 80)])
def test_an_evaluation_stops_when_asked_to_and_not_before(gpt, answers: list[bool], n: int):
    """A validation of minutes must not outlast the half minute that a stop request is given."""
    asked = iter(answers)
    found = evaluate(
        gpt,
        {"a": Fixed(40, 0), "b": Fixed(40, 1)},
        WEIGHTS,
        1,
        CPU,
        is_stopping=lambda: next(asked),
    )
    assert len(gpt.shapes) == n and (found is None) == (n == 16)


def test_standard_error_by_simulation():
    """Nats follow the targets, some sequences have none: the loss is a mean over targets, its error
    that of a ratio."""
    rng = np.random.default_rng(0)

    def draw():
        targets = {"a": rng.integers(0, 200, 60), "b": np.full(20, 16)}
        nats = {
            "a": 3.0 * targets["a"] + rng.normal(0, 40, 60) * (targets["a"] > 0),
            "b": rng.normal(48, 8, 20),
        }
        return ValLoss(nats, WEIGHTS, targets)

    spread = np.std([draw().loss for _ in range(4000)])
    assert np.mean([draw().standard_error for _ in range(200)]) == pytest.approx(spread, rel=0.03)
    assert ValLoss({"a": np.ones(1)}, {"a": 1.0}, {"a": np.full(1, 16)}).standard_error is None
    assert bits_per_byte(
        2 * math.log(2), SimpleNamespace(tokens=100, text_bytes=400)
    ) == pytest.approx(0.5)


# --------------------------------------------------------------------------------- log-likelihoods

PAIRS = [
    ("ab", "cd"),
    ("the quick brown fox", " jumps"),
    ("x", "y"),
    ("", "starts a document"),
    ("trailing  ", "blank"),
    ("long context " * 9, "tail"),
    ("0123456789" * 4, "the end"),
    ("é", "ü€𝄞"),
    ("q", "z" * 31),
    ("q", "w" * 32),
    ("\n", "one shared beginning, A1"),
    ("\n", "one shared beginning, B22"),
]


def check(got, model, pairs):
    """That log-likelihoods and greediness are those of the model taken one token at a time."""
    np.testing.assert_allclose(
        got, [expected_pair(model, *pair) for pair in pairs], atol=2e-4, rtol=1e-5
    )


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_loglikelihood_is_the_models_own_token_by_token(micro_batch: int):
    lm = build_lm(model := build(), micro_batch)
    got = lm.loglikelihood([request(*pair) for pair in PAIRS])
    check(got, model, PAIRS)
    assert np.std([total for total, _ in got]) > 10
    assert lm.n_truncated == 2  # 33 tokens are not: the last needs no place in the context of 32
    assert build_lm(model).loglikelihood([]) == [] and build_lm(model).loglikelihood_rolling(
        [request("")]
    ) == [0.0]


def test_an_answer_without_a_token_is_refused_as_lm_evals_own_model_does():
    """The text of the token that stands before every text: lm-eval takes it for the context."""
    asked = request("", "<|endoftext|>")
    asked.task_name, asked.doc_id, asked.idx = "mine", 7, 1
    with pytest.raises(
        UserError, match="'mine' has an empty answer in its document 7 .*answer 2 of"
    ):
        build_lm(build()).loglikelihood([request("a", "b"), asked])


def test_the_longest_leads_so_that_memory_runs_out_at_once_or_never():
    model, lengths = build(), []
    model.wte.register_forward_hook(lambda module, args, out: lengths.append(args[0].size(1)))
    build_lm(model, 1).loglikelihood(
        [request("", "xyz"), request("a" * 20, "bc"), request("a" * 5, "d"), request("b" * 30, "c")]
    )
    assert lengths == [30, 21, 5, 3]


def test_a_continuation_beyond_the_context_is_scored_whole():
    text, lm = words(random.Random(3), 30), build_lm(model := build())
    (total, _), *_ = lm.loglikelihood([request("ctx", text), request("c", text), request("", text)])
    assert total == pytest.approx(rolled(model, [*b"x"], [*text.encode()]), rel=1e-5)
    assert lm.n_truncated == 1  # all but the last token of the first one's context


def test_rolling_loglikelihood_is_the_direct_sum_and_the_training_loss():
    model, text, wide = build(), words(random.Random(0), 60)[:150], build(replace(TINY, n_ctx=256))
    texts = [text[:n] for n in (1, 32, 33, 65, 150)]
    got = build_lm(model).loglikelihood_rolling([*map(request, texts)])
    assert got == pytest.approx(
        [rolled(model, [256], list(text.encode())) for text in texts], rel=1e-5
    )
    ids = torch.tensor([[256, *text.encode()]])
    loss = wide(ids[:, :-1], ids[:, 1:]).item()  # over the padded vocabulary of 384
    assert build_lm(wide).loglikelihood_rolling([request(text)])[0] == pytest.approx(
        -loss, rel=1e-5
    )


def test_is_greedy_says_whether_greedy_decoding_gives_the_continuation():
    model = build()
    for prompt in ([*b"prompt", i] for i in range(8)):
        text = generate(model, torch.tensor([prompt]), 8)[0].tolist()
        requests = [
            (None, prompt, text),
            (None, prompt, [*text[:7], (text[7] + 1) % 256]),
            (None, prompt, text[:3]),
        ]
        assert [greedy for _, greedy in build_lm(model)._loglikelihood_tokens(requests)] == [
            True,
            False,
            True,
        ]
    padded = rigged(
        lambda h: torch.cat(
            (torch.zeros(*h.shape[:-1], 257), torch.full((*h.shape[:-1], 127), 9.0)), -1
        )
    )
    # rows that pad the vocabulary do not count
    assert build_lm(padded).loglikelihood([request("a", "\x00")])[0][1]


def test_a_tokenizer_that_begins_texts_does_so_as_in_hflm():
    """HFLM 0.4.13: the beginning before a context, in place of an empty one, and rolling twice,
    where it is scored too."""
    model, seen = build(), []
    lm = build_lm(model, tokenizer=replace(BYTES, prefix=(256, 255), adds_start=True))
    model.wte.register_forward_hook(lambda module, args, out: seen.append(args[0].tolist()))
    lm.loglikelihood([request("ab", "c")])
    lm.loglikelihood([request("", "cd")])
    lm.loglikelihood_rolling([request("xyz")])
    assert seen == [[[255, *b"ab"]], [[255, *b"c"]], [[255, 255, *b"xy"]]]
    # has such a token, adds none
    names = build_lm(model, tokenizer=replace(BYTES, prefix=(256, 255)))
    assert names.tok_encode("ab") == list(b"ab") and names.prefix_token_id == 255


def test_generate_until_is_greedy_and_stops_where_asked():
    model, calls = build(), []

    def answers(lm, prompts, until=(), n: int = 12):
        return lm.generate_until(
            [request(prompt, {"until": until, "max_gen_toks": n}) for prompt in prompts]
        )

    prompts, lm = (
        ["one", "two", "a longer prompt", "abcdefgh" * 4, "0123456789" * 8],
        build_lm(model, micro_batch=2),
    )
    got = answers(lm, prompts)
    assert all(got) and lm.n_truncated == 2  # 32 + 12 and 80 + 12 tokens do not fit 32
    assert got == [greedy_text(model, prompt.encode()[-20:], 12) for prompt in prompts]
    # half is freed
    assert answers(build_lm(model), prompts[-1:], n=99) == [
        greedy_text(model, prompts[-1].encode()[-16:], 16)
    ]

    def end_third(h):  # "A", "A", end-of-text, "A", ..
        calls.append(1)
        return torch.nn.functional.one_hot(
            torch.full((len(h),), 256 if len(calls) == 3 else 65), 384
        ).float()

    assert answers(build_lm(rigged(end_third)), ["p"], ["\n"], 9) == ["AA"] and len(calls) == 3
    stop = got[2][3:5]
    assert answers(build_lm(model), prompts[2:3], ["never there", stop]) == [
        got[2][: got[2].index(stop)]
    ]


@pytest.mark.parametrize("micro_batch, n_shots", [(1, 12), (50, 12), (1, 0), (50, 0)])
def test_shared_contexts_score_as_each_alone_for_half_of_the_tokens(
    micro_batch: int, n_shots: int, monkeypatch: pytest.MonkeyPatch
):
    """No forward pass is longer than micro_batch contexts, and of a long context as much as
    LONG_ROW counts. The head sees scored positions alone, a few at a time; lm-eval moves a
    context's blank to the continuation."""
    monkeypatch.setattr(eval_lm, "LONG_ROW", 80)
    monkeypatch.setattr(eval_lm, "HEAD_ROWS", {"cpu": 4})
    rng, seen, rows, model = random.Random(5), [], [], build(replace(TINY, n_ctx=128))
    model.head.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    shots = words(rng, n_shots)
    pairs = [
        (f"{shots} {question}", f" {choice}")
        for question in (words(rng, 4) for _ in range(6))
        # one continuation within another, one twice
        for choice in ("yes", "yes indeed", "no", "n", "n")
    ]
    pairs += [
        (shots or "nothing", " alone"),
        ("", "starts"),
        ("q", " " + words(rng, 15)),
        (words(rng, 40), " beyond"),
    ]
    model.wte.register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    got = build_lm(model, micro_batch).loglikelihood([request(*pair) for pair in pairs])
    assert sum(seen) < sum(min(len(a + b), 128) for a, b in pairs) * 0.6 and max(seen) <= max(
        128, 80 * micro_batch
    )
    assert max(rows) <= 4 and sum(rows) <= sum(len(b) for _, b in pairs)
    check(got, model, pairs)
    seen.clear()
    build_lm(model, 3).generate_until([request("a" * 90, {"until": [], "max_gen_toks": 1})] * 9)
    assert max(seen) == 2 * 90


def test_ranks_share_the_batches_and_answer_as_one_bit_for_bit(monkeypatch: pytest.MonkeyPatch):
    """Ranks that are threads here; processes, by the command: tests/eval/test_harness.py."""
    rng, batches = random.Random(3), {}
    requests = [request(words(rng, 3), " " + words(rng, 1)) for _ in range(20)]
    requests += [request("the same context", f" {i}") for i in range(5)]
    greedy = [request(r.args[0], {"until": ["e"], "max_gen_toks": 4}) for r in requests]

    def answer(world):
        lm = CheckpointLM(build(), BYTES, 1, world.device, world)
        done, score_batch = batches.setdefault((world.size, world.rank), []), lm._score_batch
        lm._score_batch = lambda batch, *rest: done.append(batch) or score_batch(batch, *rest)
        return lm.loglikelihood(requests), lm.generate_until(greedy)

    alone = answer(World(0, 0, 1, CPU))
    assert eval_runs.on_two_ranks(monkeypatch, eval_lm, answer) == [alone, alone]
    assert [batches[2, 0], batches[2, 1]] == [batches[1, 0][0::2], batches[1, 0][1::2]] and len(
        batches[1, 0]
    ) > 2
