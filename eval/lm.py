"""Answer lm-eval's requests with our own model: in batches that compute a shared beginning once, on
all ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import chunks as batched
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows
from torch.nn.utils.rnn import pad_sequence

from eval.batching import Batch, chunks, make_batches
from eval.generation import read_generation
from eval.inference import stream
from eval.tasks import empty_answer
from lib.progress import progress_line
from model import GPT, KVCache
from runtime.checkpoint import gather
from runtime.parallel import World
from runtime.tokenizer import Tokenizer

# Logits kept at a time, in tokens. A matmul of 128 rows by 50304 hardly uses a CPU's second core
# (310 us a row), one of 512 does (201), whose logits lie beyond its cache: softmax goes over a few
# rows at a time. A GPU wants all large; 2,048 are 0.4 GB.
HEAD_ROWS = {"cpu": 512, "gpu": 2048}
SOFTMAX_ROWS = {"cpu": 64, "gpu": 2048}
# A context beyond this counts as this long in a forward pass's budget: 16 x 131,072 tokens would
# fit into no memory.
LONG_ROW = 2048
BATCHES_OF_ROUND = 8  # batches that each rank computes between two exchanges of answers
CPU_TOKENS = 4096  # the budget's limit on a CPU, which larger batches make slower


A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Window:
    """Tokens for one forward pass, at most n_ctx + 1: the last predicts nothing."""

    tokens: list[int]
    n_scored: int  # how many of the last are scored


@dataclass(frozen=True)
class Continuation:
    """The scored tokens of a window."""

    scored: list[int]
    request: int  # whose window it is


@dataclass(frozen=True)
class InputRow:
    """What the model reads, once for all continuations that follow the same tokens."""

    inputs: tuple[int, ...]
    continuations: list[Continuation]

    @property
    def first_scored(self) -> int:
        """Place of the first state that a continuation needs."""
        longest = max(len(continuation.scored) for continuation in self.continuations)
        return len(self.inputs) - longest


@dataclass(frozen=True)
class Answer:
    """The score of one continuation."""

    request: int
    log_likelihood: float  # nats
    is_greedy: bool  # whether greedy decoding would say it


@dataclass(frozen=True)
class GenerationJob:
    """A text to be generated."""

    prompt: list[int]
    n_new: int  # tokens at most, as far as the context allows
    n_asked: int  # tokens at most, as the task asks
    until: list[str]  # texts that end the answer
    request: int


@dataclass(frozen=True)
class GeneratedText:
    request: int
    text: str
    has_ended: bool  # by itself, before its length was reached


class HiddenStates:
    """Last hidden states of a batch, kept by owner: ("group", its number) for a shared beginning,
    ("row", its number) for what follows; in the end one tensor."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._offsets: dict[tuple[str, int], int] = {}  # owner -> index of its place 0
        self._count = 0

    def add(self, owner: tuple[str, int], begin: int, states: torch.Tensor) -> None:
        """states (n, C): those of the places from `begin` on."""
        self._offsets[owner] = self._count - begin
        self._parts.append(states)
        self._count += len(states)

    def indices(self, owner: tuple[str, int], begin: int, end: int) -> list[int]:
        """Rows of concatenated() that hold the owner's places from `begin` to before `end`."""
        if begin >= end:
            return []
        offset = self._offsets[owner]
        return list(range(offset + begin, offset + end))

    def concatenated(self) -> torch.Tensor:
        """(n, C)"""
        return torch.cat(self._parts)


class NoTokens(Exception):
    """The request at `place` asks for the log-likelihood of nothing."""

    def __init__(self, place: int):
        super().__init__(f"request {place} has no token to score")
        self.place = place


class CheckpointLM(TemplateLM):
    """lm-eval's view of a model: log-likelihoods of token sequences, and greedy continuations.

    n_truncated counts the requests that did not fit the context and lost their beginning,
    n_shortened the generated answers that the end of the context cut before the length that was
    asked for. micro_batch is in sequences of a full context. In a `world` of several ranks they
    share the batches: each is asked everything, and answers the same."""

    eot_token_id = prefix_token_id = -1  # properties of TemplateLM, set here for each model

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        micro_batch: int,
        device: torch.device,
        world: World,
        exchange: Callable[[Any], list] | None = None,
    ):
        """exchange: gathers the values of all ranks, by rank, on every rank; by default a gather in
        which all wait for each other. With an exchange, no progress is shown."""
        super().__init__()
        self._exchange = exchange
        self.model = model
        self.tokenizer_ours = tokenizer
        self.micro_batch = micro_batch
        self._device = device
        self.world = world
        self.n_ctx = model.config.n_ctx
        self.n_truncated = self.n_shortened = 0
        self.eot_token_id, self.prefix_token_id = tokenizer.eot, tokenizer.start
        self.ends = tokenizer.ends
        self.start_text, self.end_text = (
            tokenizer.decode([i]) for i in (tokenizer.start, tokenizer.eot)
        )
        tokens = micro_batch * min(self.n_ctx, LONG_ROW)
        # of a forward pass; longer rows go alone
        self.budget = min(tokens, CPU_TOKENS) if device.type == "cpu" else tokens

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """A text's ids as lm-eval's HFLM has them: text that spells a special token is that token,
        and first comes the token that begins a text, where the tokenizer itself adds it and the
        text does not spell it."""
        ids = self.tokenizer_ours.encode_special(string).tolist()
        if not self.tokenizer_ours.adds_start or add_special_tokens is False:
            return ids
        is_spelled = add_special_tokens is None and string.startswith(self.start_text)
        return ids if is_spelled else [self.prefix_token_id, *ids]

    # ------------------------------------------------------------------------------ log-likelihood

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding would say it) of each request's answer.
        Raises UserError where one has no token, as the text of a token that begins every text."""
        try:
            # ours shows its progress, lm-eval need not
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        except NoTokens as error:
            raise empty_answer(requests[error.place]) from None

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = True, **kwargs: object
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding would say it) of each continuation after
        its context."""
        for place, (_, _, continuation) in enumerate(requests):
            if not continuation:
                raise NoTokens(place)
        return self._score(
            [self._windows(context, continuation) for _, context, continuation in requests]
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood in nats of each whole text, its first token after what stands before a
        document in training.

        Where the tokenizer itself begins a text with that token, it is there twice and scored once,
        as HFLM does."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        scores = self._score([self._windows([self.prefix_token_id], text) for text in texts])
        return [log_likelihood for log_likelihood, _ in scores]

    def _windows(self, context: list[int], continuation: list[int]) -> list[Window]:
        """What to compute for a continuation; together the whole of it."""
        if not continuation:
            return []
        # lm-eval moves a context's last blanks, here all, to the continuation
        context = context or [self.prefix_token_id]
        if len(continuation) <= self.n_ctx:
            tokens = context + continuation
            self.n_truncated += len(tokens) > self.n_ctx + 1
            return [Window(tokens[-(self.n_ctx + 1) :], len(continuation))]
        self.n_truncated += len(context) > 1
        windows = get_rolling_token_windows(
            continuation, context[-1], max_seq_len=self.n_ctx, context_len=1
        )
        return [Window(inputs + scored[-1:], len(scored)) for inputs, scored in windows]

    def _score(self, requests: list[list[Window]]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy) of each request, over all its windows. Windows that
        differ in their last token alone are one row for the model."""
        continuations: dict[tuple[int, ...], list[Continuation]] = {}  # inputs -> what follows
        for i, windows in enumerate(requests):
            for window in windows:
                inputs = tuple(window.tokens[:-1])
                scored = window.tokens[-window.n_scored :]
                continuations.setdefault(inputs, []).append(Continuation(scored, i))
        rows = [InputRow(inputs, follow) for inputs, follow in continuations.items()]
        batches = make_batches([row.inputs for row in rows], self.budget)
        totals = [0.0 for _ in requests]
        is_greedy = [True for _ in requests]
        sizes = [batch.n_rows for batch in batches]
        for answer in self._work_by_all(batches, lambda b: self._score_batch(b, rows), sizes):
            totals[answer.request] += answer.log_likelihood
            is_greedy[answer.request] &= answer.is_greedy
        return list(zip(totals, is_greedy, strict=True))

    def _work_by_all(
        self, batches: list[B], work: Callable[[B], list[A]], sizes: list[int]
    ) -> list[A]:
        """What work(batch) lists for each batch, in order, each done by one rank: no batch depends
        on the number of ranks. sizes: sequences of each. The ranks exchange answers after each
        round of some batches, so that none works on for long after another has failed."""
        n_done = 0
        total = sum(sizes) or 1

        def state() -> tuple[int, float]:
            return n_done, n_done / total

        answers_of_all: dict[int, list[A]] = {}
        round_length = BATCHES_OF_ROUND * self.world.size
        is_shown = self.world.is_main and self._exchange is None
        with progress_line("scored", "sequences", state, is_shown) as show:
            for first in range(0, len(batches), round_length):
                end = min(first + round_length, len(batches))
                answers: dict[int, list[A]] = {}
                for place in range(first + self.world.rank, end, self.world.size):
                    answers[place] = work(batches[place])
                for answers_of_rank in self._gather(answers):
                    answers_of_all |= answers_of_rank
                n_done = sum(sizes[:end])
                show()
        return [answer for place in range(len(batches)) for answer in answers_of_all[place]]

    def _gather(self, value: dict[int, list[A]]) -> list[dict[int, list[A]]]:
        if self._exchange is None:
            return gather(value, self.world)
        return self._exchange(value)

    @torch.no_grad()  # see stream()
    def _score_batch(self, batch: Batch, rows: list[InputRow]) -> list[Answer]:
        """Of every continuation of the batch's rows."""
        states = HiddenStates()
        cache = self._run_shared(batch, rows, states)
        self._run_rest(batch, rows, cache, states)
        places: list[int] = []
        targets: list[int] = []
        continuations: list[Continuation] = []
        for g, group in enumerate(batch.groups):
            for row in group:
                end = len(rows[row].inputs)
                for continuation in rows[row].continuations:
                    begin = end - len(continuation.scored)
                    places += states.indices(("group", g), begin, min(end, batch.shared))
                    places += states.indices(("row", row), max(begin, batch.shared), end)
                    targets += continuation.scored
                    continuations.append(continuation)
        losses, is_likeliest = self._head(
            states.concatenated(), torch.tensor(places), torch.tensor(targets)
        )
        sizes = [len(continuation.scored) for continuation in continuations]
        parts = zip(continuations, losses.split(sizes), is_likeliest.split(sizes), strict=True)
        return [
            Answer(continuation.request, -float(loss.sum()), bool(flags.all()))
            for continuation, loss, flags in parts
        ]

    def _run_shared(
        self, batch: Batch, rows: list[InputRow], states: HiddenStates
    ) -> KVCache | None:
        """One pass over the beginnings that the rows of each group share; its cache."""
        if not batch.shared:
            return None
        cache = KVCache()
        beginnings = [rows[group[0]].inputs[: batch.shared] for group in batch.groups]
        hidden = self.model.hidden(torch.tensor(beginnings, device=self._device), cache)
        for g, h in enumerate(hidden):
            first_scored = [rows[row].first_scored for row in batch.groups[g]]
            begin = min(batch.shared, *first_scored)
            states.add(("group", g), begin, h[begin:].clone())  # a view would keep all of h
        return cache

    def _run_rest(
        self, batch: Batch, rows: list[InputRow], cache: KVCache | None, states: HiddenStates
    ) -> None:
        """Passes over what follows the shared beginnings, padded: causal, it sees no padding."""
        past = batch.shared
        longer = [
            (row, g)
            for g, group in enumerate(batch.groups)
            for row in group
            if len(rows[row].inputs) > past
        ]
        lengths = [len(rows[row].inputs) - past for row, _ in longer]
        for chunk in chunks(lengths, past, self.budget):
            chosen_rows = [longer[place][0] for place in chunk]
            endings = [torch.tensor(rows[row].inputs[past:]) for row in chosen_rows]
            x = pad_sequence(endings, batch_first=True).to(self._device)
            cache_of_rows = None
            if cache is not None:
                groups = torch.tensor([longer[place][1] for place in chunk], device=self._device)
                cache_of_rows = cache.rows(groups)
            for row, h in zip(chosen_rows, self.model.hidden(x, cache_of_rows), strict=True):
                begin = max(rows[row].first_scored, past)
                end = len(rows[row].inputs)
                states.add(("row", row), begin, h[begin - past : end - past].clone())

    def _head(
        self, h: torch.Tensor, places: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h (n, C); for the pairs of places in h and targets, (m,) each on the CPU: cross-entropy
        (m,) fp64 in nats, and whether the target is the likeliest token."""
        losses = torch.empty(len(places), dtype=torch.float64)
        is_likeliest = torch.zeros(len(places), dtype=torch.bool)
        start = 0
        for logits in self._logits(h):  # (rows, V)
            end = start + len(logits)
            pairs = ((places >= start) & (places < end)).nonzero()[:, 0]
            rows = (places[pairs] - start).to(self._device)
            target = targets[pairs].to(self._device)
            losses[pairs] = -logits.log_softmax(dim=-1)[rows, target].double().cpu()
            emitted = logits[:, : self.tokenizer_ours.vocab_size]
            # BF16 logits tie: then argmax decides, which costs several times amax
            is_highest = logits[rows, target] == emitted.amax(dim=-1)[rows]
            highest = is_highest.nonzero()[:, 0]
            is_first = emitted[rows[highest]].argmax(dim=-1) == target[highest]
            is_likeliest[pairs[highest.cpu()]] = is_first.cpu()
            start = end
        return losses, is_likeliest

    def _logits(self, h: torch.Tensor) -> Iterator[torch.Tensor]:
        """fp32 logits (rows, V) of h (n, C), some rows at a time."""
        kind = "cpu" if self._device.type == "cpu" else "gpu"
        for rows in h.split(HEAD_ROWS[kind]):
            yield from self.model.head(rows).float().split(SOFTMAX_ROWS[kind])

    # ---------------------------------------------------------------------------------- generation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations up to a stop string, end-of-text, max_gen_toks or the end of the
        context.

        A prompt that leaves no room loses its beginning: at most half of the context is freed for
        the answer."""
        jobs = [self._job(request, i) for i, request in enumerate(requests)]
        batches: list[list[GenerationJob]] = []
        longest_first = sorted(jobs, key=lambda job: -len(job.prompt))
        for length, equally_long in groupby(longest_first, key=lambda job: len(job.prompt)):
            # the cache knows no padding
            size = max(1, min(self.micro_batch, self.budget // length))
            batches += batched(equally_long, size)
        texts = self._work_by_all(batches, self._answer, list(map(len, batches)))
        texts.sort(key=lambda text: text.request)
        for job, text in zip(jobs, texts, strict=True):
            self.n_shortened += not text.has_ended and job.n_new < job.n_asked
        return [text.text for text in texts]

    def _job(self, request: Any, i: int) -> GenerationJob:
        prompt, keys = request.args
        generation = read_generation(keys, getattr(request, "task_name", None) or "of this request")
        # spelled in letters it ends an answer too
        until = handle_stop_sequences(list(generation.until), self.end_text)
        ids = self.tok_encode(prompt) or [self.eot_token_id]
        n_new = min(generation.n_new, max(self.n_ctx - len(ids), self.n_ctx // 2, 1))
        prompt_ids = ids[-max(1, self.n_ctx - n_new) :]
        self.n_truncated += len(prompt_ids) < len(ids)
        return GenerationJob(prompt_ids, n_new, generation.n_new, until, i)

    def _answer(self, batch: list[GenerationJob]) -> list[GeneratedText]:
        """The text of each job; all prompts have one length."""
        rows = [_GrowingText(job, self.tokenizer_ours, self.ends) for job in batch]
        ids = torch.tensor([job.prompt for job in batch], device=self._device)
        most = max(job.n_new for job in batch)
        n_ids = self.tokenizer_ours.vocab_size
        for tokens in stream(self.model, ids, most, 0.0, None, n_ids=n_ids):
            for row, token in zip(rows, tokens.tolist(), strict=True):
                row.add(token)
            if all(row.is_done for row in rows):
                break
        return [row.finished() for row in rows]


class _GrowingText:
    """The text of a job while it is generated."""

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer, ends: tuple[int, ...]):
        self._job = job
        self._tokenizer = tokenizer
        self._ends = ends
        self._tokens: list[int] = []
        self._has_ended = False  # by itself: at an end of text or a stop string
        self.is_done = False

    def add(self, token: int) -> None:
        if self.is_done:
            return
        if token in self._ends:
            self.is_done = self._has_ended = True
            return
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        self._has_ended = any(stop in text for stop in self._job.until)
        self.is_done = self._has_ended or len(self._tokens) == self._job.n_new

    def finished(self) -> GeneratedText:
        text = self._tokenizer.decode(self._tokens, skip_special=True)
        text = postprocess_generated_text(text, self._job.until, None)
        return GeneratedText(self._job.request, text, self._has_ended)
