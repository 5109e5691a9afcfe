"""Score a run on eval.tasks while it trains: by eval.harness's own scoring, on all ranks.

Every rank gets a copy of the weights, whole and in BF16, as the harness would read them from a
checkpoint of that step: the scores are the same, however the run is sharded, compiled or converted.
Whatever fails (a download, a task, memory) is a sentence; the run goes on."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from eval import tasks
from eval.exchange import Exchange, RankFailed, RankStopped, work_together
from eval.results import TaskScores as ScoresOfTask
from fp8.sharded import unwrap
from lib.errors import UserError
from lib.sharding import is_dtensor
from model import GPT
from runtime.config import Config
from runtime.parallel import COMPUTE_DTYPE, World
from runtime.run import TaskScorer, TaskScores
from runtime.tokenizer import Tokenizer

T = TypeVar("T")


def task_scorer(config: Config) -> TaskScorer | None:
    """What scores a run of `config` on its eval.tasks; None where it has none."""
    return _Scorer(config) if config.eval.tasks else None


class _Scorer:
    def __init__(self, config: Config):
        self._config = config
        self._world: World | None = None  # with a process group of its own
        self._loaded: dict | None = None  # lm-eval's TaskDict
        self._has_hung = False

    def __call__(
        self, model: GPT, tokenizer: Tokenizer, world: World, is_stopping: Callable[[], bool]
    ) -> TaskScores:
        own_world = self._own_world(world)

        def work(exchange: Exchange) -> dict[str, ScoresOfTask]:
            loaded = self._load()
            weights = _whole_copy(model, own_world.device, exchange)
            return self._scores(weights, tokenizer, own_world, loaded, exchange)

        try:
            scores_of_tasks = work_together(work, own_world, is_stopping)
        except RankStopped:
            return TaskScores({}, {}, is_stopped=True)
        except RankFailed as error:
            return TaskScores({}, {}, failure=str(error))
        return _flat(scores_of_tasks)

    def _own_world(self, world: World) -> World:
        """The world with a process group for scoring alone: a save in the background uses its
        own."""
        if self._world is None:
            self._world = world
            if world.size > 1:
                patience = timedelta(seconds=2 * self._config.parallel.start_timeout)
                group = dist.new_group(backend="gloo", timeout=patience)
                self._world = replace(world, checkpoint_group=group)
        return self._world

    def _load(self) -> dict:
        """The tasks, which may be downloaded; they stay for the next scoring. Raises what loading
        raises, and UserError where it takes so long that the watchdog would end the job."""
        if self._loaded is not None:
            return self._loaded
        if self._has_hung:
            raise UserError("the tasks did not load before, and are not tried again in this start")
        options = self._config.eval
        limit_s = self._config.parallel.start_timeout / 2
        run_dir, offline = str(self._config.run_dir), options.tasks_offline
        names = tasks.expand(options.tasks)
        try:
            self._loaded = _within(
                limit_s, lambda: tasks.load(names, options.tasks_include, run_dir, offline)
            )
        except TimeoutError:
            self._has_hung = True
            raise UserError(
                f"the tasks did not load within {limit_s:g} s, half of parallel.start_timeout:"
                " fetch their data by eval.harness --fetch DIR and give eval.tasks_offline=DIR"
            ) from None
        return self._loaded

    def _scores(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        world: World,
        loaded: dict,
        exchange: Exchange,
    ) -> dict[str, ScoresOfTask]:
        # after tasks.load(), which sets what lm-eval reads
        from eval.lm import CheckpointLM
        from eval.scores import evaluate

        options = self._config.eval
        micro_batch = options.tasks_micro_batch
        lm = CheckpointLM(model, tokenizer, micro_batch, world.device, world, exchange)
        try:
            scores, _ = evaluate(lm, loaded, options.tasks_limit)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory with eval.tasks_micro_batch={micro_batch}: give a smaller"
                " one, which changes no training"
            ) from error
        return scores


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """What work() returns or raises. Raises TimeoutError after `limit_s` seconds, and leaves it
    behind: nothing can end a thread that waits for a network."""
    results: list[T] = []
    errors: list[BaseException] = []

    def keep() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=keep, name="tasks", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]


@torch.no_grad()
def _whole_copy(model: GPT, device: torch.device, exchange: Exchange) -> GPT:
    """A plain model with all of the weights in BF16, as eval.inference.load_for_inference() makes
    it of a checkpoint. Memory is taken before the ranks gather shards: none may fail then."""
    copy = GPT.on_meta(model.config, COMPUTE_DTYPE)
    for p in copy.parameters():
        p.requires_grad_(False)
    copy.to(COMPUTE_DTYPE)
    copy.to_empty(device=device)
    copy.tie()
    for name, table in copy.named_buffers():  # BF16 RoPE tables would blur the positions
        copy.register_buffer(name, table.float(), persistent=False)
    copy.init_buffers()
    sharded = [p for p in model.parameters() if is_dtensor(p)]
    if sharded:
        largest = max(p.numel() for p in sharded)
        torch.empty(2 * largest, dtype=torch.float32, device=device)
    exchange(None)
    stored: dict[str, Any] = dict(copy.named_parameters())
    for name, p in model.named_parameters():
        weight: Any = unwrap(p.detach())
        stored[name].copy_(weight.full_tensor() if is_dtensor(weight) else weight)
    return copy.eval()


def _flat(scores_of_tasks: dict[str, ScoresOfTask]) -> TaskScores:
    """task/metric -> its number; of a group with a score of its own the group alone."""
    covered = {task for scores in scores_of_tasks.values() for task in scores.covers}
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    for task, scores in scores_of_tasks.items():
        if task in covered:
            continue
        for name, metric in scores.metrics.items():
            values[f"{task}/{name}"] = metric.value
            if metric.se is not None:
                errors[f"{task}/{name}"] = metric.se
    missing = [name for scores in scores_of_tasks.values() for name in scores.missing]
    return TaskScores(values, errors, missing)
