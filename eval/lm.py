"""Answer lm-eval's requests with our own model."""

import importlib.metadata
import sys
import time

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows

from eval.sample import stream
from model import GPT
from runtime.tokenizer import Tokenizer

HEAD_ROWS = 4096        # logits kept at a time, in tokens: 4096 x 50304 x 4 bytes = 0.8 GB


class CheckpointLM(TemplateLM):
    """lm-eval's view of a model: log-likelihoods of token sequences, and greedy continuations.

    n_truncated counts the requests that did not fit the context and lost their beginning.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, micro_batch: int, device: torch.device):
        super().__init__()
        self.model, self.tokenizer_ours, self.micro_batch, self._device = model, tokenizer, micro_batch, device
        self.n_ctx = model.config.n_ctx
        self.n_truncated = 0
        self.version = importlib.metadata.version("lm_eval")

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer_ours.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return self.tokenizer_ours.encode(string).tolist()

    # ------------------------------------------------------------------------------------------------- log-likelihood

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = True, **kwargs) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding would say it) of each continuation after its context."""
        return self._score([self._windows(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood in nats of each whole text, its first token after end-of-text, as documents are trained on."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [total for total, _ in self._score([self._windows([self.eot_token_id], text) for text in texts])]

    def _windows(self, context: list[int], continuation: list[int]) -> list[tuple[list[int], int]]:
        """Token sequences of at most n_ctx + 1 and how many of the last are scored; together the whole continuation."""
        if len(continuation) <= self.n_ctx:
            self.n_truncated += len(context) + len(continuation) > self.n_ctx + 1
            return [((context + continuation)[-(self.n_ctx + 1):], len(continuation))] if continuation else []
        windows = get_rolling_token_windows(continuation, context[-1], max_seq_len=self.n_ctx, context_len=1)
        return [(inputs + scored[-1:], len(scored)) for inputs, scored in windows]

    @torch.no_grad()        # see eval/sample.py's stream()
    def _score(self, requests: list[list[tuple[list[int], int]]]) -> list[tuple[float, bool]]:
        """Sum over each request's windows; the longest go first: little padding, and memory runs out at once or never."""
        windows = [(tokens, n, i) for i, request in enumerate(requests) for tokens, n in request]
        windows.sort(key=lambda w: (-len(w[0]), w[0]))
        totals, is_greedy = [0.0] * len(requests), [True] * len(requests)
        progress = Progress(len(windows))
        for start in range(0, len(windows), self.micro_batch):
            batch = windows[start:start + self.micro_batch]
            for (_, _, i), (total, greedy) in zip(batch, self._score_batch(batch), strict=True):
                totals[i] += total
                is_greedy[i] &= greedy
            progress.show(start + len(batch))
        progress.close()
        return list(zip(totals, is_greedy, strict=True))

    def _score_batch(self, batch: list[tuple[list[int], int, int]]) -> list[tuple[float, bool]]:
        T = len(batch[0][0]) - 1
        x = torch.zeros(len(batch), T, dtype=torch.int64)      # padded on the right: causal attention never looks there
        rows, places, targets = [], [], []
        for row, (tokens, n, _) in enumerate(batch):
            x[row, :len(tokens) - 1] = torch.tensor(tokens[:-1])
            rows += [row] * n
            places += range(len(tokens) - 1 - n, len(tokens) - 1)
            targets += tokens[-n:]
        h = self.model.hidden(x.to(self._device))       # (B, T, C)
        h = h[rows, places]                             # (scored tokens, C): the head sees no other position
        targets = torch.tensor(targets, device=self._device)
        losses, greedy = [], []
        for h_part, t_part in zip(h.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
            logits = self.model.head(h_part).float()    # (scored tokens, V)
            losses.append(torch.nn.functional.cross_entropy(logits, t_part, reduction="none"))
            greedy.append(logits[:, :self.model.config.vocab_size].argmax(dim=-1) == t_part)
        sizes = [n for _, n, _ in batch]
        losses, greedy = torch.cat(losses).double().cpu().split(sizes), torch.cat(greedy).cpu().split(sizes)
        return [(-float(loss.sum()), bool(same.all())) for loss, same in zip(losses, greedy, strict=True)]

    # ----------------------------------------------------------------------------------------------------- generation

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations up to a stop string, end-of-text, max_gen_toks or the end of the context.

        A prompt that leaves no room loses its beginning: at most half of the context is freed for the answer.
        """
        jobs = []
        for i, request in enumerate(requests):
            prompt, settings = request.args
            until = settings.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            ids = self.tok_encode(prompt) or [self.eot_token_id]
            n_new = min(int(settings.get("max_gen_toks", 256)), max(self.n_ctx - len(ids), self.n_ctx // 2, 1))
            kept = ids[-max(1, self.n_ctx - n_new):]
            self.n_truncated += len(kept) < len(ids)
            jobs.append((kept, n_new, until, i))
        jobs.sort(key=lambda job: -len(job[0]))
        answers, progress = [""] * len(requests), Progress(len(jobs))
        while jobs:     # rows of a batch have equal lengths: the cache knows no padding
            length = len(jobs[0][0])
            batch = [job for job in jobs[:self.micro_batch] if len(job[0]) == length]
            jobs = jobs[len(batch):]
            for (_, _, _, i), answer in zip(batch, self._answer(batch), strict=True):
                answers[i] = answer
            progress.show(len(answers) - len(jobs))
        progress.close()
        return answers

    def _answer(self, batch: list[tuple[list[int], int, list[str], int]]) -> list[str]:
        ids = torch.tensor([job[0] for job in batch], device=self._device)
        new: list[list[int]] = [[] for _ in batch]
        done = [False] * len(batch)
        for tokens in stream(self.model, ids, max(job[1] for job in batch), 0.0, None):
            for row, (token, (_, n_new, until, _)) in enumerate(zip(tokens.tolist(), batch, strict=True)):
                if not done[row] and token != self.eot_token_id:
                    new[row].append(token)
                    text = self.tokenizer_ours.decode(new[row]) if until else ""
                    done[row] = len(new[row]) == n_new or any(stop in text for stop in until)
                else:
                    done[row] = True
            if all(done):
                break
        return [_cut_at(self.tokenizer_ours.decode(row), job[2]) for row, job in zip(new, batch, strict=True)]


def _cut_at(text: str, until: list[str]) -> str:
    for stop in until:
        text = text.split(stop)[0] if stop else text
    return text


class Progress:
    """One live line on a terminal, nothing elsewhere."""

    def __init__(self, n: int):
        self.n, self.start, self.shown = n, time.perf_counter(), 0.0

    def show(self, done: int) -> None:
        now = time.perf_counter()
        if sys.stderr.isatty() and (now - self.shown > 0.5 or done == self.n):
            left = (now - self.start) / done * (self.n - done)
            print(f"\r{done:,} of {self.n:,} sequences scored, {left:.0f} s left ", end="", file=sys.stderr, flush=True)
            self.shown = now

    def close(self) -> None:
        if sys.stderr.isatty():
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
