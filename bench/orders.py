"""Time one model on request: the orders that a cell of the benchmark obeys.

Between two orders a cell holds its weights alone: gradients, moments and the allocator's cache are given back, for the
other cells on the GPU. Which orders there are and what they answer: bench/cell.py.
"""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import compiled
from bench.buckets import ProfilerError, bucket_of, sums, trace
from bench.subject import Spec, Subject, build_ours, config_of, gradient_norms, tokens_like_text
from runtime import fp8
from runtime.cli import UserError

WARM_UP = 3             # micro-steps after the one that compiles
UPDATES = 5             # timed by the order "optimizer"
BATCHES = 4             # different ones that a turn goes through
PROFILED = 2            # micro-steps
KERNELS = 40            # the longest, named in a profile
# Of the config's peak rate, that sanity rises to. At the whole of it 20 updates learn so small a batch by heart, so fast that
# FP8's rounding alone is 0.05 to 0.12 nats behind (2 x 128 and 4 x 256 wide, on a CPU); at a tenth it is 0.01. That depends on
# the batch: 6 x 384 wide learn 512 tokens by heart even so, and healthy FP8 is 0.18 behind, as far as BF16 without the weight
# gradient of qkv; with 3,072 tokens it is 0.07. The GPU's cells have 8,192 and more. What such losses show is a broken pass (2
# nats and more); one Linear's lost or wrong gradient shows in the norms of the first gradients.
SANITY_RATE = 0.1
PAUSE_S = 4.0           # before another try where memory was out


class Cell:
    """A Subject, compiled and warm when the constructor returns; `started` is the first answer."""

    def __init__(self, spec: Spec):
        began, import_s = time.perf_counter(), _age_s()
        if spec.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device=cuda: torch sees no GPU here; give device=cpu to rehearse")
        self.spec, self.device = spec, torch.device("cuda", 0) if spec.device == "cuda" else torch.device(spec.device)
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        self.subject = self._load()
        self.accumulation = max(1, spec.tokens_per_step // (spec.micro_batch * spec.T))
        self.batches = self._batches(BATCHES)
        self._wait()
        build_s = time.perf_counter() - began
        first_s = self._compile()
        self._release()
        if self.on_gpu:     # the compiler's own trials are no part of a step
            torch.cuda.reset_peak_memory_stats(self.device)
        warm_s = self._patiently(lambda: self._seconds(self._next, WARM_UP), tries=6)
        peak, held = self._peaks()
        first_update_s, update_s, optimizer_bytes = self._patiently(lambda: self._updates(1), tries=6)
        compile_s = max(0.0, first_s - sorted(warm_s)[WARM_UP // 2]) + max(0.0, first_update_s - update_s[0])
        seen = self._patiently(lambda: self._trace(self._next), tries=6) if self.on_gpu else {"kernels": []}
        compiled.shut_workers()
        self._release()
        gc.freeze()         # as train.py: no collection of hundreds of ms among the micro-steps
        self.graphs = compiled.graphs()
        self.started = {
            "compile_s": compile_s, "first_step_s": first_s, "build_s": build_s, "import_s": import_s, **self.subject.counts,
            "converted": self.subject.converted, "of": self.subject.of,
            "graph_breaks": compiled.graph_breaks(), "graphs": self.graphs, **compiled.cache_counts(),
            "peak_bytes": peak + optimizer_bytes if self.on_gpu else None, "optimizer_bytes": optimizer_bytes,
            "reserved_bytes": held, "idle_bytes": torch.cuda.memory_reserved(self.device) if self.on_gpu else None,
            "attention_kernel": _attention(seen.pop("kernels")), "describe": self.subject.describe,
            **{key: value for key, value in seen.items() if key == "profile_error"}}

    def _load(self) -> Subject:
        spec = self.spec
        if spec.peer is None:
            return build_ours(config_of(spec), self.device)
        from bench import peers  # only where others' code is asked for

        return peers.load(spec.peer["name"], spec.peer["dir"], spec.size, spec.micro_batch, spec.T, self.device,
                          tokens_per_step=spec.tokens_per_step, seed=spec.seed, overrides=spec.model or {})

    # ------------------------------------------------------------------------------------------------------- orders

    def obey(self, order: dict) -> dict:
        """The answer to an order other than close. Raises UserError for one that does not exist."""
        began = time.perf_counter()
        acts = {"turn": self.turn, "optimizer": self.optimizer, "sanity": self.sanity, "profile": self.profile}
        if order.get("do") not in acts:
            raise UserError(f"do={order.get('do')!r} is no order: there are {', '.join(acts)} and close")
        answer = acts[order["do"]](**{key: value for key, value in order.items() if key != "do"})
        self._release()
        return {**answer, "wall_s": time.perf_counter() - began, "recompiles": compiled.graphs() - self.graphs}

    def turn(self, micro_steps: int) -> dict:
        """Seconds of each of `micro_steps`, the GPU's own; one before them is not timed, in which memory comes back."""
        self._next()
        return {"seconds": self._seconds(self._next, micro_steps)}

    def optimizer(self) -> dict:
        """Seconds of updates with a learning rate of 0: the weights stay, the work is the same."""
        self._next()
        return {"seconds": self._updates(UPDATES)[1]}

    def sanity(self, steps: int = 20, sequences: int | None = None) -> dict:
        """Loss before each of `steps` updates on one batch of `sequences` (a multiple of the micro-batch, default one), at a
        rising rate; gradients count as if every micro-batch of a step were one of these. The first gradients' norms by kind."""
        parts, rest = divmod(sequences or self.spec.micro_batch, self.spec.micro_batch)
        if rest or not parts:
            raise UserError(f"sequences={sequences} is no multiple of micro_batch={self.spec.micro_batch}")
        losses, norms = self._patiently(lambda: self._learn(steps, self._batches(parts)), tries=3)
        return {"losses": losses, "gradient_norms": norms}

    def profile(self) -> dict:
        """Buckets, kernels and span of one optimizer step: `accumulation` micro-steps as two were seen, then an update.
        What no kernel fills is idle. All null, with profile_error, where the profiler does not work."""
        self._next()
        micro = self._trace(lambda: [self._next() for _ in range(PROFILED)])
        optimizers, again = self._updater()
        again()
        update = self._trace(again)
        _forget(optimizers)
        if error := micro.get("profile_error") or update.get("profile_error"):
            return dict.fromkeys(("buckets", "kernels", "step_s", "attention_kernel")) | {"profile_error": error}
        times = self.accumulation / PROFILED
        buckets = {name: s * times for name, s in sums(micro["kernels"]).items()}
        for name, s in sums(update["kernels"], update=True).items():
            buckets[name] += s
        kernels = [[name, s * times, n * times] for name, s, n in micro["kernels"]] + [list(row) for row in update["kernels"]]
        return {"buckets": buckets, "kernels": sorted(kernels, key=lambda row: -row[1])[:KERNELS],
                "step_s": micro["span_s"] * times + update["span_s"], "attention_kernel": _attention(micro["kernels"])}

    # ------------------------------------------------------------------------------------------------------ the parts

    def _batches(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The first `count` micro-batches of this seed: (x, y), each (B, T)."""
        x, y = tokens_like_text(count * self.spec.micro_batch, self.spec.T, self.subject.vocab, self.spec.seed, self.device)
        return list(zip(x.split(self.spec.micro_batch), y.split(self.spec.micro_batch), strict=True))

    def _next(self) -> None:
        """A micro-step on the next batch."""
        self.batches.append(self.batches.pop(0))
        self.subject.micro_step(*self.batches[-1])

    def _seconds(self, act: Callable[[], None], times: int) -> list[float]:
        """Seconds of each call. On a GPU between events in its queue, so that it never waits for Python to look."""
        if not self.on_gpu:
            marks = [time.perf_counter()]
            for _ in range(times):
                act()
                marks.append(time.perf_counter())
            return [after - before for before, after in zip(marks, marks[1:], strict=False)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            act()
            mark.record()
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in zip(marks, marks[1:], strict=False)]

    def _updater(self) -> tuple[list, Callable[[], None]]:
        """Optimizers at a rate of 0 and a call that updates, keeping the gradients. There must be some."""
        optimizers = self.subject.make_optimizers()
        _scale_rates(optimizers, _rates(optimizers), 0.0)
        gradients = [(p, p.grad) for p in self.subject.model.parameters()]

        def again():
            self.subject.update(optimizers)
            for p, gradient in gradients:
                p.grad = gradient

        return optimizers, again

    def _updates(self, times: int) -> tuple[float, list[float], int]:
        """Seconds of a first update, of `times` more, and the bytes of the optimizers' state."""
        optimizers, again = self._updater()
        first = self._seconds(again, 1)[0]
        seconds = self._seconds(again, times)
        size = sum(t.numel() * t.element_size() for o in optimizers for state in o.state.values() for t in state.values()
                   if isinstance(t, torch.Tensor) and t.device.type == self.device.type)
        _forget(optimizers)
        return first, seconds, size

    def _learn(self, steps: int, batches: list) -> tuple[list[float], dict[str, float]]:
        """The loss of `batches` before each update, and the norms of the first one's gradients; the weights are put back."""
        subject = self.subject
        kept = [p.detach().to("cpu", copy=True) for p in subject.model.parameters()]
        try:
            optimizers, losses = subject.make_optimizers(), []
            rates = _rates(optimizers)
            for i in range(steps):
                _scale_rates(optimizers, rates, SANITY_RATE * (i + 1) / steps)
                losses.append(sum(subject.micro_step(*batch) for batch in batches) / len(batches))
                if i == 0:
                    norms = gradient_norms(subject.model)
                torch._foreach_mul_([p.grad for p in subject.model.parameters() if p.grad is not None],
                                    self.accumulation / len(batches))
                subject.update(optimizers)
            _forget(optimizers)
            return torch.stack(losses).tolist(), norms
        finally:
            with torch.no_grad():
                for p, value in zip(subject.model.parameters(), kept, strict=True):
                    p.copy_(value)
            if self.spec.peer is None:
                fp8.refresh_fp8_weights(subject.model)

    def _compile(self) -> float:
        """Seconds of the first micro-step, without the pauses where others held the memory that it needs."""
        spent = []

        def first():
            began = time.perf_counter()
            try:
                self._next()
                self._wait()
            finally:
                spent.append(time.perf_counter() - began)

        self._patiently(first, tries=6)
        return sum(spent)

    def _patiently(self, act: Callable, tries: int):
        """act(), again after a pause where memory is out: another cell may be in its own first steps."""
        for _ in range(tries - 1):
            try:
                return act()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._release()     # not within the except: the error would hold what is to be freed
            time.sleep(PAUSE_S)
        return act()

    def _trace(self, act: Callable[[], object]) -> dict:
        """buckets.trace() as {"kernels", "span_s"}; with a "profile_error" where the profiler does not work here."""
        try:
            kernels, span_s = trace(act, self.device)
        except ProfilerError as error:
            return {"kernels": [], "profile_error": one_line(error)}
        return {"kernels": kernels, "span_s": span_s}

    def _peaks(self) -> tuple[int | None, int | None]:
        """Most bytes that tensors, and that the allocator, held since the last reset."""
        if not self.on_gpu:
            return None, None
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def _release(self) -> None:
        """Give back what an idle cell does not need, for the others on the GPU."""
        for p in self.subject.model.parameters():
            p.grad = None
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'without a word'}"[:400]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Of the GPU or the CPU; cuBLAS and a compiled graph wrap it in errors of their own."""
    while error is not None:
        said = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in said or "alloc_failed" in said:
            return True
        error = error.__cause__ or error.__context__
    return False


def _attention(kernels: list[tuple[str, float, float]]) -> str | None:
    """The name of the attention kernel that takes longest."""
    return next((name for name, *_ in kernels if bucket_of(name) == "attention"), None)


def _forget(optimizers: list) -> None:
    for optimizer in optimizers:
        optimizer.state.clear()


def _rates(optimizers: list) -> list[list[float]]:
    return [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]


def _scale_rates(optimizers: list, rates: list[list[float]], factor: float) -> None:
    for optimizer, row in zip(optimizers, rates, strict=True):
        for group, lr in zip(optimizer.param_groups, row, strict=True):
            group["lr"] = lr * factor


def _age_s() -> float:
    """Seconds since this process began, imports and all."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
