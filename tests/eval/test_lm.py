"""runtime/validation.py against torch's cross-entropy, its standard error by simulation;
eval/lm.py: log-likelihoods and greedy texts against the model taken one token at a time; batches,
shared contexts, ranks, stop requests."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from eval import lm as eval_lm
from eval.lm import CheckpointLM
from lib.errors import UserError
from model import GPT, GPTConfig
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
    """n validation sequences of random tokens; the first has no targets, the second seven."""

    def __init__(self, n: int, seed: int):
        ids = torch.randint(257, (n, 17), generator=torch.Generator().manual_seed(seed))
        self.x, self.y = ids[:, :-1], ids[:, 1:].clone()
        self.y[0] = -100
        self.y[1, :9] = -100
        self.targets = (self.y >= 0).sum(1).numpy()
        super().__init__(self.x, self.y)

    def batch(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self[start:stop]


SETS = {"a": Fixed(7, 0), "b": Fixed(3, 1)}
WEIGHTS = {"a": 0.25, "b": 0.75}


def build_counted() -> tuple[GPT, list[tuple[int, ...]]]:
    """A model, and the shape of each batch that it has read."""
    gpt = build(GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=16, vocab_size=257))
    shapes = []
    gpt.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    return gpt, shapes


def gather_of_rank(gathered: dict[str, list[torch.Tensor]], size: int) -> Callable:
    """The gather of one of `size` ranks that run one after the other, once for each source: hands
    out what the earlier ranks left in `gathered`, and for the later ones the rank's own tensor."""
    sources = iter(SETS)

    def gather(own: torch.Tensor) -> torch.Tensor:
        tensors = gathered[next(sources)]
        tensors.append(own)
        n_later = size - len(tensors)
        return torch.stack(tensors + [own] * n_later)

    return gather


@dataclass(frozen=True)
class Evaluation:
    """SETS evaluated by some ranks."""

    micro_batch: int
    size: int  # ranks
    shapes: list[list[tuple[int, ...]]]  # of each rank, those of its batches
    loss: ValLoss  # what the last rank returned, which had the tensors of all


@pytest.fixture(scope="module", params=[(m, size) for size in (1, 2, 3) for m in (1, 2, 4, 16)])
def evaluation(request: pytest.FixtureRequest) -> Evaluation:
    micro_batch, size = request.param
    gathered = {source: [] for source in SETS}
    shapes_by_rank = []
    for rank in range(size):
        gpt, shapes = build_counted()
        gather = gather_of_rank(gathered, size)
        loss = evaluate(gpt, SETS, WEIGHTS, micro_batch, CPU, rank, size, gather)
        shapes_by_rank.append(shapes)
    return Evaluation(micro_batch, size, shapes_by_rank, loss)


def test_each_rank_evaluates_equally_many_batches(evaluation: Evaluation) -> None:
    sequences_at_once = evaluation.micro_batch * evaluation.size
    n_batches = sum(math.ceil(len(val) / sequences_at_once) for val in SETS.values())
    assert [len(shapes) for shapes in evaluation.shapes] == [n_batches] * evaluation.size


def test_all_batches_have_one_shape_to_compile(evaluation: Evaluation) -> None:
    for shapes in evaluation.shapes:
        assert set(shapes) == {(evaluation.micro_batch, 16)}


@pytest.mark.parametrize("source", SETS)
def test_any_ranks_and_batch_give_torchs_cross_entropy_of_each_sequence(
    source: str, evaluation: Evaluation
) -> None:
    gpt, _ = build_counted()
    val = SETS[source]
    expected = [
        F.cross_entropy(gpt(x[None])[0], y, reduction="sum").item()
        for x, y in zip(val.x, val.y, strict=True)
    ]
    assert evaluation.loss.sequences[source] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("source", SETS)
def test_the_targets_of_each_sequence_are_counted(source: str, evaluation: Evaluation) -> None:
    assert evaluation.loss.targets[source].tolist()[:3] == [0, 7, 16]


@pytest.mark.parametrize("source", SETS)
def test_the_loss_of_a_source_is_torchs_mean_over_its_targets(
    source: str, evaluation: Evaluation
) -> None:
    gpt, _ = build_counted()
    val = SETS[source]
    expected = F.cross_entropy(gpt(val.x).flatten(0, 1), val.y.flatten()).item()
    assert evaluation.loss.source_loss(source) == pytest.approx(expected)


def test_the_loss_weighs_the_sources(evaluation: Evaluation) -> None:
    loss = evaluation.loss
    expected = 0.25 * loss.source_loss("a") + 0.75 * loss.source_loss("b")
    assert loss.loss == pytest.approx(expected)


def evaluate_until(answers: list[bool]) -> tuple[ValLoss | None, int]:
    """The loss on twice 40 sequences, and how many were read; `answers` say whether to stop."""
    gpt, shapes = build_counted()
    sets = {"a": Fixed(40, 0), "b": Fixed(40, 1)}
    answer = iter(answers)
    loss = evaluate(gpt, sets, WEIGHTS, 1, CPU, is_stopping=lambda: next(answer))
    return loss, len(shapes)


def test_an_evaluation_stops_when_asked_to() -> None:
    """A validation of minutes must not outlast the half minute that a stop request is given."""
    loss, n_sequences = evaluate_until([False, True])
    assert loss is None
    assert n_sequences == 16


def test_an_evaluation_that_is_not_asked_to_stop_reads_every_sequence() -> None:
    loss, n_sequences = evaluate_until([False] * 10)
    assert loss is not None
    assert n_sequences == 80


def test_standard_error_by_simulation() -> None:
    """Nats follow the targets, some sequences have none: the loss is a mean over targets, its error
    that of a ratio."""
    rng = np.random.default_rng(0)

    def draw() -> ValLoss:
        targets = {"a": rng.integers(0, 200, 60), "b": np.full(20, 16)}
        noise = rng.normal(0, 40, 60) * (targets["a"] > 0)
        nats = {"a": 3.0 * targets["a"] + noise, "b": rng.normal(48, 8, 20)}
        return ValLoss(nats, WEIGHTS, targets)

    spread = np.std([draw().loss for _ in range(4000)])
    standard_error = np.mean([draw().standard_error for _ in range(200)])
    assert standard_error == pytest.approx(spread, rel=0.03)


def test_one_sequence_has_no_standard_error() -> None:
    loss = ValLoss({"a": np.ones(1)}, {"a": 1.0}, {"a": np.full(1, 16)})
    assert loss.standard_error is None


def test_two_bits_per_token_of_four_bytes_are_half_a_bit_per_byte() -> None:
    val = SimpleNamespace(tokens=100, text_bytes=400)
    assert bits_per_byte(2 * math.log(2), val) == pytest.approx(0.5)


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


def check(scores: list[tuple[float, bool]], model: GPT, pairs: list[tuple[str, str]]) -> None:
    """That log-likelihoods and greediness are those of the model taken one token at a time."""
    expected = [expected_pair(model, *pair) for pair in pairs]
    np.testing.assert_allclose(scores, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_loglikelihood_is_the_models_own_token_by_token(micro_batch: int) -> None:
    model = build()
    scores = build_lm(model, micro_batch).loglikelihood([request(*pair) for pair in PAIRS])
    check(scores, model, PAIRS)
    assert np.std([total for total, _ in scores]) > 10  # the tolerance is far below


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_requests_beyond_the_context_are_counted(micro_batch: int) -> None:
    """33 tokens are not beyond it: the last needs no place in the context of 32."""
    lm = build_lm(build(), micro_batch)
    lm.loglikelihood([request(*pair) for pair in PAIRS])
    assert lm.n_truncated == 2


def test_no_request_gets_no_log_likelihood() -> None:
    assert build_lm(build()).loglikelihood([]) == []


def test_the_log_likelihood_of_an_empty_text_is_0() -> None:
    assert build_lm(build()).loglikelihood_rolling([request("")]) == [0.0]


def test_an_answer_without_a_token_is_refused_as_lm_evals_own_model_does() -> None:
    """The text of the token that stands before every text: lm-eval takes it for the context."""
    empty = request("", "<|endoftext|>")
    empty.task_name, empty.doc_id, empty.idx = "mine", 7, 1
    reason = "'mine' has an empty answer in its document 7 .*answer 2 of"
    with pytest.raises(UserError, match=reason):
        build_lm(build()).loglikelihood([request("a", "b"), empty])


def test_the_longest_leads_so_that_memory_runs_out_at_once_or_never() -> None:
    model = build()
    lengths = []
    model.wte.register_forward_hook(lambda module, inputs, _: lengths.append(inputs[0].size(1)))
    build_lm(model, 1).loglikelihood(
        [request("", "xyz"), request("a" * 20, "bc"), request("a" * 5, "d"), request("b" * 30, "c")]
    )
    assert lengths == [30, 21, 5, 3]


def test_a_continuation_beyond_the_context_is_scored_whole() -> None:
    model = build()
    lm = build_lm(model)
    text = words(random.Random(3), 30)
    scores = lm.loglikelihood([request("ctx", text), request("c", text), request("", text)])
    total = scores[0][0]
    assert total == pytest.approx(rolled(model, [*b"x"], [*text.encode()]), rel=1e-5)
    # all but the last token of the first one's context is lost
    assert lm.n_truncated == 1


def test_rolling_loglikelihood_is_the_direct_sum() -> None:
    model = build()
    text = words(random.Random(0), 60)[:150]
    texts = [text[:n] for n in (1, 32, 33, 65, 150)]
    expected = [rolled(model, [256], list(text.encode())) for text in texts]
    totals = build_lm(model).loglikelihood_rolling([request(text) for text in texts])
    assert totals == pytest.approx(expected, rel=1e-5)


def test_rolling_loglikelihood_is_the_training_loss() -> None:
    """Over the padded vocabulary of 384."""
    model = build(replace(TINY, n_ctx=256))
    text = words(random.Random(0), 60)[:150]
    ids = torch.tensor([[256, *text.encode()]])
    loss = model(ids[:, :-1], ids[:, 1:]).item()
    (total,) = build_lm(model).loglikelihood_rolling([request(text)])
    assert total == pytest.approx(-loss, rel=1e-5)


@pytest.mark.parametrize("last_byte", range(8))
def test_is_greedy_says_whether_greedy_decoding_gives_the_continuation(last_byte: int) -> None:
    model = build()
    prompt = [*b"prompt", last_byte]
    greedy = generate(model, torch.tensor([prompt]), 8)[0].tolist()
    other_end = [*greedy[:7], (greedy[7] + 1) % 256]
    requests = [(None, prompt, ids) for ids in (greedy, other_end, greedy[:3])]
    scores = build_lm(model)._loglikelihood_tokens(requests)
    assert [is_greedy for _, is_greedy in scores] == [True, False, True]


def test_rows_that_pad_the_vocabulary_do_not_count_as_likelier() -> None:
    def favour_padding(h: torch.Tensor) -> torch.Tensor:
        own_rows = torch.zeros(*h.shape[:-1], 257)
        padding = torch.full((*h.shape[:-1], 127), 9.0)
        return torch.cat((own_rows, padding), -1)

    _, is_greedy = build_lm(rigged(favour_padding)).loglikelihood([request("a", "\x00")])[0]
    assert is_greedy


def test_a_tokenizer_that_begins_texts_does_so_as_in_hflm() -> None:
    """HFLM 0.4.13: the beginning before a context, in place of an empty one, and rolling twice,
    where it is scored too."""
    model = build()
    inputs_read = []
    lm = build_lm(model, tokenizer=replace(BYTES, prefix=(256, 255), adds_start=True))
    model.wte.register_forward_hook(lambda _, inputs, __: inputs_read.append(inputs[0].tolist()))
    lm.loglikelihood([request("ab", "c")])
    lm.loglikelihood([request("", "cd")])
    lm.loglikelihood_rolling([request("xyz")])
    assert inputs_read == [[[255, *b"ab"]], [[255, *b"c"]], [[255, 255, *b"xy"]]]


def test_a_tokenizer_that_has_a_beginning_but_adds_none() -> None:
    lm = build_lm(build(), tokenizer=replace(BYTES, prefix=(256, 255)))
    assert lm.tok_encode("ab") == list(b"ab")
    assert lm.prefix_token_id == 255


# -------------------------------------------------------------------------------------- generation

# with 12 new tokens, the last two do not fit the context of 32
PROMPTS = ["one", "two", "a longer prompt", "abcdefgh" * 4, "0123456789" * 8]


def answers(
    lm: CheckpointLM, prompts: list[str], until: Sequence[str] = (), n: int = 12
) -> list[str]:
    return lm.generate_until(
        [request(prompt, {"until": until, "max_gen_toks": n}) for prompt in prompts]
    )


def test_generate_until_is_greedy() -> None:
    model = build()
    texts = answers(build_lm(model, micro_batch=2), PROMPTS)
    assert all(texts)
    # a prompt loses its beginning where the answer needs the room
    assert texts == [greedy_text(model, prompt.encode()[-20:], 12) for prompt in PROMPTS]


def test_prompts_that_lose_their_beginning_are_counted() -> None:
    lm = build_lm(build(), micro_batch=2)
    answers(lm, PROMPTS)
    assert lm.n_truncated == 2


def test_at_most_half_of_the_context_is_freed_for_an_answer() -> None:
    model = build()
    expected = greedy_text(model, PROMPTS[-1].encode()[-16:], 16)
    assert answers(build_lm(model), PROMPTS[-1:], n=99) == [expected]


def test_an_answer_ends_at_end_of_text_and_nothing_follows_is_computed() -> None:
    calls = []

    def end_third(h: torch.Tensor) -> torch.Tensor:  # "A", "A", end-of-text, "A", ..
        calls.append(1)
        token = 256 if len(calls) == 3 else 65
        return F.one_hot(torch.full((len(h),), token), 384).float()

    assert answers(build_lm(rigged(end_third)), ["p"], until=["\n"], n=9) == ["AA"]
    assert len(calls) == 3


def test_an_answer_ends_before_a_stop_text() -> None:
    model = build()
    (text,) = answers(build_lm(model), PROMPTS[2:3])
    stop = text[3:5]
    texts = answers(build_lm(model), PROMPTS[2:3], until=["never there", stop])
    assert texts == [text[: text.index(stop)]]


# --------------------------------------------------------------------------------- shared contexts


def limit_batches(patch: pytest.MonkeyPatch) -> None:
    """Small enough limits for a tiny model to meet them."""
    patch.setattr(eval_lm, "LONG_ROW", 80)
    patch.setattr(eval_lm, "HEAD_ROWS", {"cpu": 4})


def count_tokens(model: GPT) -> list[int]:
    """Of each of the model's forward passes from now on."""
    tokens = []
    model.wte.register_forward_hook(lambda module, inputs, _: tokens.append(inputs[0].numel()))
    return tokens


@dataclass(frozen=True)
class SharedScoring:
    """Questions that share examples, each with five choices, scored by a context of 128."""

    micro_batch: int
    model: GPT
    pairs: list[tuple[str, str]]
    scores: list[tuple[float, bool]]
    tokens: list[int]  # of each forward pass
    head_rows: list[int]  # of each call of the head


def pairs_with_shared_contexts(n_shots: int) -> list[tuple[str, str]]:
    rng = random.Random(5)
    shots = words(rng, n_shots)
    pairs = []
    for _ in range(6):
        question = words(rng, 4)
        # one continuation within another, one twice
        for choice in ("yes", "yes indeed", "no", "n", "n"):
            pairs.append((f"{shots} {question}", f" {choice}"))
    pairs.append((shots or "nothing", " alone"))
    pairs.append(("", "starts"))
    pairs.append(("q", " " + words(rng, 15)))
    pairs.append((words(rng, 40), " beyond"))
    return pairs


@pytest.fixture(scope="module", params=[(1, 12), (50, 12), (1, 0), (50, 0)])
def shared(request: pytest.FixtureRequest) -> SharedScoring:
    micro_batch, n_shots = request.param
    model = build(replace(TINY, n_ctx=128))
    pairs = pairs_with_shared_contexts(n_shots)
    tokens = count_tokens(model)
    head_rows = []
    hook = model.head.register_forward_hook(lambda module, _, out: head_rows.append(len(out)))
    with pytest.MonkeyPatch.context() as patch:
        limit_batches(patch)
        lm = build_lm(model, micro_batch)
        scores = lm.loglikelihood([eval_runs.request(*pair) for pair in pairs])
    hook.remove()
    return SharedScoring(micro_batch, model, pairs, scores, list(tokens), head_rows)


def test_shared_contexts_score_as_each_alone(shared: SharedScoring) -> None:
    """lm-eval moves a context's blank to the continuation."""
    check(shared.scores, shared.model, shared.pairs)


def test_shared_contexts_take_little_more_than_half_of_the_tokens(shared: SharedScoring) -> None:
    tokens_alone = sum(min(len(a + b), 128) for a, b in shared.pairs)
    assert sum(shared.tokens) < tokens_alone * 0.6


def test_no_forward_pass_is_longer_than_its_budget(shared: SharedScoring) -> None:
    """micro_batch contexts, and of a long context as much as LONG_ROW counts."""
    assert max(shared.tokens) <= max(128, 80 * shared.micro_batch)


def test_the_head_sees_a_few_positions_at_a_time(shared: SharedScoring) -> None:
    assert max(shared.head_rows) <= 4


def test_the_head_sees_scored_positions_alone(shared: SharedScoring) -> None:
    assert sum(shared.head_rows) <= sum(len(continuation) for _, continuation in shared.pairs)


def test_equal_prompts_are_answered_in_passes_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_batches(monkeypatch)
    model = build(replace(TINY, n_ctx=128))
    tokens = count_tokens(model)
    answers(build_lm(model, 3), ["a" * 90] * 9, until=[], n=1)
    assert max(tokens) == 2 * 90  # of the budget of 3 * 80


# ------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class RankedAnswers:
    """The answers of one rank alone and of each of two, with the batches that each has scored."""

    alone: tuple
    of_two: list[tuple]
    batches_alone: list
    batches_of_two: list[list]


class CountedLM(CheckpointLM):
    """Keeps the batches that it has scored."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.batches = []

    def _score_batch(self, batch: Any, rows: list) -> list:
        self.batches.append(batch)
        return super()._score_batch(batch, rows)


@pytest.fixture(scope="module")
def ranked() -> RankedAnswers:
    """Ranks that are threads here; processes, by the command: tests/eval/test_harness.py."""
    rng = random.Random(3)
    requests = [request(words(rng, 3), " " + words(rng, 1)) for _ in range(20)]
    requests += [request("the same context", f" {i}") for i in range(5)]
    keys = {"until": ["e"], "max_gen_toks": 4}
    to_generate = [request(pair.args[0], keys) for pair in requests]
    batches = {}

    def answer(world: World) -> tuple:
        lm = CountedLM(build(), BYTES, 1, world.device, world)
        scores = lm.loglikelihood(requests)
        batches[world.size, world.rank] = lm.batches
        return scores, lm.generate_until(to_generate)

    alone = answer(World(0, 0, 1, CPU))
    with pytest.MonkeyPatch.context() as patch:
        of_two = eval_runs.on_two_ranks(patch, eval_lm, answer)
    return RankedAnswers(alone, of_two, batches[1, 0], [batches[2, 0], batches[2, 1]])


def test_each_rank_answers_as_one_alone_bit_for_bit(ranked: RankedAnswers) -> None:
    assert ranked.of_two == [ranked.alone, ranked.alone]


def test_ranks_take_the_batches_in_turn(ranked: RankedAnswers) -> None:
    assert len(ranked.batches_alone) > 2
    assert ranked.batches_of_two == [ranked.batches_alone[0::2], ranked.batches_alone[1::2]]
