"""Answer lm-eval's requests with our own model: in batches that compute a shared beginning once, on
all ranks."""

from collections.abc import Callable
from itertools import groupby

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import chunks as batched
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows
from torch.nn.utils.rnn import pad_sequence

from eval.batching import Batch, chunks, plan
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
CPU_TOKENS = 4096  # the budget's limit on a CPU, which larger batches make slower


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
        self, model: GPT, tokenizer: Tokenizer, micro_batch: int, device: torch.device, world: World
    ):
        super().__init__()
        self.model, self.tokenizer_ours, self.micro_batch, self._device = (
            model,
            tokenizer,
            micro_batch,
            device,
        )
        self.world, self.n_ctx, self.n_truncated = world, model.config.n_ctx, 0
        self.n_shortened = 0
        self.eot_token_id, self.prefix_token_id = tokenizer.eot, tokenizer.start
        self.ends = tokenizer.ends
        self.start_text, self.end_text = (
            tokenizer.decode([i]) for i in (tokenizer.start, tokenizer.eot)
        )
        tokens = micro_batch * min(self.n_ctx, LONG_ROW)
        # of a forward pass; longer rows go alone
        self.budget = min(tokens, CPU_TOKENS) if device.type == "cpu" else tokens

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
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

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding would say it) of each request's answer.
        Raises UserError where one has no token, as the text of a token that begins every text."""
        try:
            # ours shows its progress, lm-eval need not
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        except NoTokens as error:
            raise empty_answer(requests[error.place]) from None

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = True, **kwargs
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding would say it) of each continuation after
        its context."""
        for place, (_, _, continuation) in enumerate(requests):
            if not continuation:
                raise NoTokens(place)
        return self._score(
            [self._windows(context, continuation) for _, context, continuation in requests]
        )

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood in nats of each whole text, its first token after what stands before a
        document in training.

        Where the tokenizer itself begins a text with that token, it is there twice and scored once,
        as HFLM does."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [
            total
            for total, _ in self._score(
                [self._windows([self.prefix_token_id], text) for text in texts]
            )
        ]

    def _windows(self, context: list[int], continuation: list[int]) -> list[tuple[list[int], int]]:
        """Token sequences of at most n_ctx + 1 and how many of the last are scored; together the
        whole continuation."""
        # lm-eval moves a context's last blanks, here all, to the continuation
        context = context or [self.prefix_token_id]
        if len(continuation) <= self.n_ctx:
            self.n_truncated += len(context) + len(continuation) > self.n_ctx + 1
            return (
                [((context + continuation)[-(self.n_ctx + 1) :], len(continuation))]
                if continuation
                else []
            )
        self.n_truncated += len(context) > 1
        windows = get_rolling_token_windows(
            continuation, context[-1], max_seq_len=self.n_ctx, context_len=1
        )
        return [(inputs + scored[-1:], len(scored)) for inputs, scored in windows]

    def _score(self, requests: list[list[tuple[list[int], int]]]) -> list[tuple[float, bool]]:
        """Sum over each request's windows. Windows that differ in their last token alone are one
        row for the model."""
        # inputs -> (scored tokens, request) of each window
        rows: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}
        for i, request in enumerate(requests):
            for tokens, n in request:
                rows.setdefault(tuple(tokens[:-1]), []).append((tokens[-n:], i))
        inputs, windows = list(rows), list(rows.values())
        batch_list = plan(inputs, self.budget)
        totals, is_greedy = [0.0] * len(requests), [True] * len(requests)
        for i, total, greedy in self._shared_out(
            batch_list,
            lambda batch: self._score_batch(batch, inputs, windows),
            [sum(map(len, groups)) for _, groups in batch_list],
        ):
            totals[i] += total
            is_greedy[i] &= greedy
        return list(zip(totals, is_greedy, strict=True))

    def _shared_out(self, batch_list: list, work: Callable, sizes: list[int]) -> list:
        """What work(batch) lists for each batch, in order, each done by one rank: no batch depends
        on the number of ranks."""
        world, own = self.world, {}
        mine = range(world.rank, len(batch_list), world.size)
        total = sum(sizes[i] for i in mine) or 1  # a rank may have nothing to do
        with progress_line(
            "scored",
            "sequences",
            lambda: ((n := sum(sizes[i] for i in own)), n / total),
            world.is_main,
        ) as show:
            for i in mine:
                own[i] = work(batch_list[i])
                show()
        done = {i: answer for answers in gather(own, world) for i, answer in answers.items()}
        return [answer for i in range(len(batch_list)) for answer in done[i]]

    @torch.no_grad()  # see stream()
    def _score_batch(
        self, batch: Batch, inputs: list[tuple[int, ...]], windows: list
    ) -> list[tuple[int, float, bool]]:
        """(request, log-likelihood, whether greedy) of every window of the batch's rows."""
        (past, groups), device = batch, self._device
        # place of the first scored state
        first = {
            row: len(inputs[row]) - max(len(scored) for scored, _ in windows[row])
            for group in groups
            for row in group
        }
        # of a group or a row: place of the first kept state, states (.., C)
        kept, cache = {}, KVCache() if past else None
        if past:
            x = torch.tensor([inputs[group[0]][:past] for group in groups], device=device)
            for g, h in enumerate(self.model.hidden(x, cache)):
                begin = min(past, *(first[row] for row in groups[g]))
                kept["group", g] = begin, h[begin:].clone()  # a view would keep all of h in memory
        rest = [
            (row, g) for g, group in enumerate(groups) for row in group if len(inputs[row]) > past
        ]
        for chunk in chunks([len(inputs[row]) - past for row, _ in rest], past, self.budget):
            rows = [rest[i][0] for i in chunk]
            # causal: it sees no padding
            x = pad_sequence([torch.tensor(inputs[row][past:]) for row in rows], batch_first=True)
            own = (
                cache.rows(torch.tensor([rest[i][1] for i in chunk], device=device))
                if past
                else None
            )
            for row, h in zip(rows, self.model.hidden(x.to(device), own), strict=True):
                begin = max(first[row], past)
                kept[row] = begin, h[begin - past : len(inputs[row]) - past].clone()
        base, n = {}, 0  # base[key] + place is where a state lies among all that are kept
        for key, (begin, h) in kept.items():
            base[key], n = n - begin, n + len(h)
        places, targets, sizes, whose = [], [], [], []
        for g, group in enumerate(groups):
            for row in group:
                for scored, i in windows[row]:
                    begin, end = len(inputs[row]) - len(scored), len(inputs[row])
                    places += [base["group", g] + place for place in range(begin, min(end, past))]
                    places += [base[row] + place for place in range(max(begin, past), end)]
                    targets += scored
                    sizes.append(len(scored))
                    whose.append(i)
        losses, same = self._head(
            torch.cat([h for _, h in kept.values()]), torch.tensor(places), torch.tensor(targets)
        )
        return [
            (i, -float(loss.sum()), bool(flags.all()))
            for i, loss, flags in zip(whose, losses.split(sizes), same.split(sizes), strict=True)
        ]

    def _head(self, h, places, targets) -> tuple[torch.Tensor, torch.Tensor]:
        """h (n, C); for the pairs of places in h and targets, (m,) each on the CPU: cross-entropy
        (m,) fp64 in nats, and whether the target is the likeliest token."""
        losses, same = (
            torch.empty(len(places), dtype=torch.float64),
            torch.zeros(len(places), dtype=torch.bool),
        )
        kind = "cpu" if self._device.type == "cpu" else "gpu"
        blocks = (
            part
            for rows in h.split(HEAD_ROWS[kind])
            for part in self.model.head(rows).float().split(SOFTMAX_ROWS[kind])
        )
        start, end = 0, 0
        for logits in blocks:  # (rows, V)
            start, end = end, end + len(logits)
            asked = ((places >= start) & (places < end)).nonzero()[:, 0]
            at, target = (places[asked] - start).to(self._device), targets[asked].to(self._device)
            losses[asked] = -logits.log_softmax(dim=-1)[at, target].double().cpu()
            real = logits[:, : self.tokenizer_ours.vocab_size]
            # BF16 logits tie: then argmax decides,
            likely = (logits[at, target] == real.amax(dim=-1)[at]).nonzero()[:, 0]
            # which costs several times amax
            first = real[at[likely]].argmax(dim=-1) == target[likely]
            same[asked[likely.cpu()]] = first.cpu()
        return losses, same

    # ---------------------------------------------------------------------------------- generation

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations up to a stop string, end-of-text, max_gen_toks or the end of the
        context.

        A prompt that leaves no room loses its beginning: at most half of the context is freed for
        the answer."""
        jobs, lengths = [], []
        for i, request in enumerate(requests):
            prompt, keys = request.args
            asked = read_generation(keys, getattr(request, "task_name", None) or "of this request")
            # spelled in letters it ends an answer too
            until = handle_stop_sequences(list(asked.until), self.end_text)
            ids = self.tok_encode(prompt) or [self.eot_token_id]
            n_new = min(asked.n_new, max(self.n_ctx - len(ids), self.n_ctx // 2, 1))
            kept = ids[-max(1, self.n_ctx - n_new) :]
            self.n_truncated += len(kept) < len(ids)
            jobs.append((kept, n_new, until, i))
            lengths.append(asked.n_new)
        batch_list = []
        for length, alike in groupby(
            sorted(jobs, key=lambda job: -len(job[0])), key=lambda job: len(job[0])
        ):
            # the cache knows no padding
            batch_list += batched(alike, max(1, min(self.micro_batch, self.budget // length)))
        found = sorted(self._shared_out(batch_list, self._answer, list(map(len, batch_list))))
        n_allowed = {i: n_new for _, n_new, _, i in jobs}
        self.n_shortened += sum(
            not has_ended and n_allowed[i] < lengths[i] for i, _, has_ended in found
        )
        return [text for _, text, _ in found]

    def _answer(
        self, batch: list[tuple[list[int], int, list[str], int]]
    ) -> list[tuple[int, str, bool]]:
        """(request, text, whether it ended by itself) of each job: prompt, new tokens at most, stop
        strings, request."""
        ids = torch.tensor([job[0] for job in batch], device=self._device)
        new: list[list[int]] = [[] for _ in batch]
        done, has_ended = [False] * len(batch), [False] * len(batch)
        for tokens in stream(
            self.model,
            ids,
            max(job[1] for job in batch),
            0.0,
            None,
            n_ids=self.tokenizer_ours.vocab_size,
        ):
            for row, (token, (_, n_new, until, _)) in enumerate(
                zip(tokens.tolist(), batch, strict=True)
            ):
                if done[row]:
                    continue
                if token in self.ends:
                    done[row] = has_ended[row] = True
                    continue
                new[row].append(token)
                text = self.tokenizer_ours.decode(new[row])
                has_ended[row] = any(stop in text for stop in until)
                done[row] = has_ended[row] or len(new[row]) == n_new
            if all(done):
                break
        texts = [self.tokenizer_ours.decode(row, skip_special=True) for row in new]
        return [
            (i, postprocess_generated_text(text, until, None), is_whole)
            for text, is_whole, (_, _, until, i) in zip(texts, has_ended, batch, strict=True)
        ]
