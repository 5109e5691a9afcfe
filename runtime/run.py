"""The life of a run around train.py's steps: open its folder, build, start, validate, save, roll
back, finish.

In order of reading: Run.open() and the steps of Run.__init__(); next_step(), next_batch() and
end_step(), which train.py's loop calls; then what is due between two steps. The folder and its lock
are run_folder.py's, where it begins run_start.py's, its record summary.py's, requests to stop
signals.py's."""

import gc
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fp8 import selection
from fp8.probe import Probe
from fp8.sharded import unwrap
from lib.errors import MachineError, UserError
from lib.files import digest, read_rows, write_json
from lib.machine import ROOT, device_name
from model import GPT
from runtime import optim, parallel
from runtime.checkpoint import (
    Restored,
    Saver,
    branch,
    is_due,
    latest,
    load_mean,
    note_saved,
    restore,
    run_on_rank0,
    together,
    whole_points_to_average,
)
from runtime.checkpoint import step_of as checkpoint_step
from runtime.config import Config
from runtime.config_file import shown
from runtime.data import Data
from runtime.documents import attention_mask, uses_flex
from runtime.environment import environment
from runtime.guard import Guard, Verdict, diagnose
from runtime.log import WARM_UP_STEPS, Log, Meter, Profiler, SilentLog
from runtime.memory import out_of_memory
from runtime.metrics_file import TasksRow, TrainRow, ValidationRow, metrics_rows
from runtime.parallel import World, build
from runtime.remote import CheckpointCopies, is_url, open_store
from runtime.replicas import check_replicas
from runtime.run_folder import as_begun, claim, describe_lost_rows, read_first_start
from runtime.run_start import (
    DataOfRank,
    Progress,
    Start,
    StartKind,
    find_start,
    refuse_other_data,
    refuse_to_replace_copies,
    refuse_unequal_data,
)
from runtime.signals import StopRequest
from runtime.summary import Average, Finished, Summary, summarise, write_val_losses
from runtime.tokenizer import Tokenizer, keep_tokenizer, load_tokenizer, tokenizer_of
from runtime.training_step import LayerGradients, StepNumbers
from runtime.validation import ValLoss, evaluate
from runtime.watchdog import Watchdog


@dataclass(frozen=True)
class StepResult:
    """What train.py knows of a training step at its end, equal on all ranks."""

    verdict: Verdict
    numbers: StepNumbers
    lr: float  # learning rate of the update
    loss_scale: float  # what each micro-batch's summed loss was multiplied by


@dataclass(frozen=True)
class TaskScores:
    """What a scoring on eval.tasks has come to, equal on all ranks."""

    scores: dict[str, float]  # as TasksRow has them
    se: dict[str, float]
    missing: Sequence[str] = ()
    failure: str | None = None  # why there are no scores
    is_stopped: bool = False  # left undone: a rank was asked to stop


# Scores a run's weights on eval.tasks: (model, tokenizer, world, whether this rank is asked to
# stop, which is asked now and then by all ranks alike). It raises nothing: training goes on.
TaskScorer = Callable[[GPT, Tokenizer, World, Callable[[], bool]], TaskScores]


class Run:
    """One run of `config` on the ranks of `world`, from open() to the end of its `with` block. All
    ranks call it together.

    Attributes: config; world; progress; guard; data; layer_gradients; model, trained, optimizer,
    loss_scale, precision and layers as parallel.Built has them; saver; stop, set by a request to
    stop; start, where it began; log, which is silent but on rank 0."""

    @classmethod
    @contextmanager
    def open(
        cls,
        config: Config,
        world: World,
        config_files: Sequence[Path] = (),
        score_tasks: TaskScorer | None = None,
    ) -> Iterator["Run | None"]:
        """Lock the folder, read the data's index, build the model, resume | branch | initialise;
        close all of it at the end. None where the run is finished already, and says so.
        score_tasks: for eval.tasks, given by who may import eval/. Raises
        UserError, MachineError: also for torch's errors of a known cause, no memory or a lost
        rank."""
        with (
            Watchdog(world, config.run_dir, config.parallel.start_timeout) as watchdog,
            # closes the log however the run ends: an error begins on a line of its own
            ExitStack() as cleanup,
            _explaining_errors(config, world, watchdog),
        ):
            started_s = time.perf_counter()
            tokenizer = load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer))
            cast_by = selection.casting(config.fp8, world.device.type, world.has_whole_weights)
            selection.check_hardware(config.fp8, world.device, cast_by.is_ours)
            if claim(config, world, cleanup):
                run = cls(config, world, watchdog, tokenizer, started_s, score_tasks)
                run._prepare([shown(file) for file in config_files], cleanup)
                yield run
                return
            if world.is_main:
                print(
                    f"{config.run}: finished, all {config.total_steps} steps; nothing to do"
                    f" ({config.run_dir}/summary.json)"
                )
                _copy_again(config)
            yield None

    def __init__(
        self,
        config: Config,
        world: World,
        watchdog: Watchdog,
        tokenizer: Tokenizer,
        started_s: float,
        score_tasks: TaskScorer | None = None,
    ):
        """started_s: the start of this process's share of the run, in seconds of
        time.perf_counter()."""
        self.config = as_begun(config, world)
        self.world = world
        self.watchdog = watchdog
        self.tokenizer = tokenizer
        self._started_s = started_s
        self._copies: CheckpointCopies | None = None
        self._score_tasks = score_tasks
        self._is_save_due = False
        self._is_stopping = False
        self._is_frozen = False
        self._steps_since_start = 0

    # --------------------------------------------------------------------------------- before step

    def _prepare(self, config_files: list[str], cleanup: ExitStack) -> None:
        """All that a run needs before its first step; each line needs those before it."""
        self._check_stores()
        first_start = run_on_rank0(self.world, lambda: read_first_start(self.config.run_dir))
        self._load_data()
        self._build()
        damaged = self._begin()
        self._open_copies()
        self.env = self._environment(config_files, first_start)
        self.log = self._open_log(config_files, cleanup)
        self._tell_start(damaged, is_first_start_known=bool(first_start))
        self._open_outputs(cleanup)
        self.stop = StopRequest(self.world)
        self._stream()
        # None: there is none, or it was looked at already
        self._shutdown_timeout_s = parallel.shutdown_timeout(self.world)
        self._is_to_validate = self._is_validation_missing()
        self._is_to_score = self._are_scores_missing()

    def _check_stores(self) -> None:
        """Raises UserError where no package here opens a URL of the config."""
        config = self.config
        urls = {"checkpoint.copy_to": config.checkpoint.copy_to, "start_from": config.start_from}
        for key, url in urls.items():
            if url is not None and is_url(url):
                open_store(key, url)

    def _load_data(self) -> None:
        """Each machine may have a copy of its own. Raises UserError, on all ranks, where one lacks
        the data or holds other data."""
        loaded: list[Data] = []

        def load() -> DataOfRank:
            data = Data(self.config, *self.tokenizer.hashes, eot=self.tokenizer.eot)
            loaded.append(data)
            return DataOfRank(socket.gethostname(), data.train_sha256, data.val_sha256)

        try:
            of_ranks = together(load, self.world)
        except UserError as error:
            if loaded:
                raise UserError(f"on another machine: {error}") from error
            raise
        refuse_unequal_data(of_ranks)
        self.data = loaded[0]
        self.data.verify(*self.world.share_of_machine)

    def _build(self) -> None:
        built = build(self.config, self.world)
        self.model = built.model
        self.trained = built.trained
        self.optimizer = built.optimizer
        self.loss_scale = built.loss_scale
        self.precision = built.precision
        self.layers = built.layers
        self._cast_by = built.cast_by
        self._assign = built.assign
        self._flags = built.flags
        self.layer_gradients = LayerGradients(self.model, self.world, self.config.guard.layers)
        self._identity = {
            "train": self.data.train_sha256,
            "val": self.data.val_sha256,
            "fp8": digest({layer.name: layer.recipe for layer in self.layers if layer.recipe}),
        }
        self._tensors = {
            f"model.{name}": unwrap(p.detach()) for name, p in self.model.named_parameters()
        }
        self._tensors |= {
            f"optim.{name}": t
            for name, t in optim.state_tensors(self.optimizer, self.model).items()
        }

    def _begin(self) -> list[str]:
        """Resume, branch off or initialise; lines about damaged checkpoints of the run's own."""
        damaged: list[str] = []
        start = find_start(
            self.config, self.tokenizer.hashes, self._tensors, self.world, damaged.append
        )
        refuse_other_data(start, self._identity)
        if start.kind is StartKind.SCRATCH:
            self.model.init_weights(self.config.seed, self._assign)
        else:
            self.model.init_buffers()
        self.start = start
        self.progress = start.progress
        self.guard = Guard(self.config.guard)
        self._started_s -= self.progress.seconds
        if start.state is not None:
            optim.set_updates(self.optimizer, self.progress.updates)
            self.guard = Guard(self.config.guard, **start.state["guard"])
            # a trunk of another precision has none
            self.precision.load(start.state.get("fp8_scales"))
        self.precision.after_update()
        return damaged

    def _open_copies(self) -> None:
        """Raises UserError, before the run writes anything, where its copies would replace another
        run's."""
        run_on_rank0(self.world, self._open_copies_of_rank0)

    def _open_copies_of_rank0(self) -> None:
        if self.config.checkpoint.copy_to is not None:
            self._copies = _open_copies(self.config, self.start)

    def _environment(self, config_files: list[str], first_start: dict[str, str]) -> dict:
        """What env.json holds. The time of the run's first start stays: a prediction counts only if
        it is older."""
        facts = asdict(environment(self.world.device, ROOT)) if self.world.is_main else {}
        return facts | {"config_files": config_files} | first_start

    def _open_log(self, config_files: list[str], cleanup: ExitStack) -> Log | SilentLog:
        """The one place that tells rank 0, which writes the run's files, from the others."""
        if not self.world.is_main:
            return SilentLog()
        config = self.config
        # first: it marks the folder as a run
        write_json(config.run_dir / "config.json", asdict(config))
        keep_tokenizer(config.run_dir, config.data.tokenizer)
        note_saved(
            config.run_dir,
            checkpoint_step(self.start.checkpoint)
            if self.start.checkpoint and self.start.is_resumed
            else None,
        )
        n_lost_rows = 0 if self.start.is_resumed else _count_rows(config.run_dir)
        meter = cleanup.enter_context(closing(Meter(self.world.device)))
        write_json(config.run_dir / "env.json", self.env)
        log = cleanup.enter_context(closing(Log(config, self.progress.step, meter)))
        log.say("\n".join(self._describe(config_files, n_lost_rows)))
        return log

    def _describe(self, config_files: list[str], n_lost_rows: int) -> list[str]:
        """The first lines of the log: config, budget, devices, data, precision, start."""
        config = self.config
        parameters = config.model.params_total
        starting = self.start.describe()
        if n_lost_rows:
            starting += (
                f"; the {n_lost_rows} rows of an earlier start, which had not completed a"
                " checkpoint, are dropped"
            )
        budget = (
            f"{config.run}: {parameters:,} parameters, {config.full_steps:,} steps of"
            f" {config.data.tokens_per_step:,} tokens = {config.total_tokens:,} tokens"
            f" ({config.total_tokens / parameters:.1f} per parameter)"
        )
        devices = (
            f"device: {self.world.size} x {device_name(self.world.device)};"
            f" {config.accumulation(self.world.size)} micro-batches of"
            f" {config.data.micro_batch} x {config.model.n_ctx} tokens per rank and step"
        )
        verdicts = selection.verdict_lines(
            self.layers, config.fp8.recipe, self.world.device.type, self._cast_by
        )
        return [
            *_describe_files(config_files),
            budget,
            *config.ramp.describe(config.data.tokens_per_step),
            devices,
            *self.world.describe(),
            *self._flags,
            *self.data.describe(),
            *verdicts,
            starting,
        ]

    def _tell_start(self, damaged: list[str], is_first_start_known: bool) -> None:
        step = self.progress.step
        if self.start.is_resumed and not is_first_start_known:
            self.log.say(
                f"{self.config.run_dir}/env.json was gone: this start counts as the run's first,"
                " also where predictions are scored"
            )
        lost_rows = None
        if self.start.is_resumed and self.world.is_main:
            lost_rows = describe_lost_rows(self.config, step)
        if lost_rows is not None:
            self.log.say(lost_rows)
        if self.start.is_resumed and "wandb" in self.config.log.to:
            self.log.say(
                f"log.to=wandb: W&B keeps the rows that it was sent for steps after {step} and"
                " shows these steps twice; metrics.jsonl has each once"
            )
        if self.start.kind is not StartKind.SCRATCH:
            event = "resume" if self.start.is_resumed else "branch"
            self.log.event({"event": event, "step": step})
        for line in damaged:
            self._log_event("bad_checkpoint", line)

    def _open_outputs(self, cleanup: ExitStack) -> None:
        config, world = self.config, self.world
        if self._copies is not None and self.start.is_resumed and self.start.checkpoint is not None:
            self._copies.copy(self.start.checkpoint)  # the stop may have cut its copy short
        self.saver = Saver(
            config.run_dir, config.checkpoint, world, lambda: self.log.validated, self._copies
        )
        self._probe = Probe(
            config.run_dir / "probe.jsonl" if world.is_main else None,
            self.model,
            selection.recipes(self.layers, self.loss_scale),
            config.probe.tokens,
        )
        # each rank writes a trace of its own, and says where it cannot
        say = self.log.say if world.is_main else print
        self._profiler = cleanup.enter_context(closing(Profiler(config, world, say)))

    def _is_validation_missing(self) -> bool:
        """Whether a validation is due at the step that the run begins with: a kill may have come
        between its save and its validation."""
        step = self.progress.step
        if step == self.config.total_steps:
            return True
        if not self.start.is_resumed:
            return False
        is_missing = run_on_rank0(self.world, lambda: step not in self.log.validated)
        return is_missing and is_due(step, self.config.eval.every)

    def _are_scores_missing(self) -> bool:
        """The same for eval.tasks."""
        step = self.progress.step
        is_due_here = self._is_scoring_due(step) and (
            self.start.is_resumed or step == self.config.total_steps
        )
        return is_due_here and run_on_rank0(self.world, lambda: step not in self.log.scored)

    def _is_scoring_due(self, step: int) -> bool:
        if self._score_tasks is None:
            return False
        return step == self.config.total_steps or is_due(step, self.config.eval.tasks_every)

    # ------------------------------------------------------------------------------------ the step

    def at(self, phase: str, is_slow: bool = False) -> None:
        """Tell the watchdog where this rank is, all ranks alike. is_slow: between two steps, in
        what may take minutes."""
        self.watchdog.at(
            phase,
            self.progress.step + (not is_slow),
            self.config.parallel.start_timeout if is_slow else None,
        )

    def next_step(self) -> int | None:
        """The number of steps done, where another one is due; None where the run has ended,
        finished or asked to stop. Validates first, where that is due, and goes back to a checkpoint
        where the loss is not finite. Scores on eval.tasks before that, where they are due."""
        if self._is_to_score and not self._is_stopping:
            self._is_to_score = False
            self._score()
        if self._is_to_validate and not self._is_stopping:
            self._is_to_validate = False
            is_finished = self._validate()
            if is_finished:
                return None
        if self._is_stopping:
            self._leave()
            return None
        self._step_started_s = time.perf_counter()
        self._profiler.begin(self.progress.step + 1)
        return self.progress.step

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Tokens and targets of the next micro-batch, (B, T) each, on the device, and attention's
        mask, None without data.document_mask."""
        self.at("reading a micro-batch")
        x, y, *documents = next(self._batches)
        self._batch = x, y
        mask = None
        if documents:
            mask = attention_mask(documents[0], uses_flex(self.config, self.world.device))
        # of stochastic rounding
        self.precision.set_position(next(self._positions))
        self.at("forward and backward")
        return x, y, mask

    def end_step(self, result: StepResult) -> None:
        """Log the step, then what is due after it: probe, save; a rollback or the end of the run
        where the guard says so."""
        config, progress = self.config, self.progress
        progress.step += 1
        step = progress.step
        step_s = time.perf_counter() - self._step_started_s
        # to write a trace
        self.watchdog.at(
            "after the step", step, config.parallel.start_timeout if config.profile else None
        )
        self._profiler.end(step)
        self._log_step(result, step_s)
        self.watchdog.patience = config.parallel.timeout  # compilation and loading are over
        self._freeze_once()
        if result.verdict in (Verdict.ROLLBACK, Verdict.STOP):
            self._roll_back_or_give_up(result.verdict)
            return
        self._compare_with_shutdown_timeout(step_s)
        if is_due(step, config.probe.every):
            probe_started_s = time.perf_counter()
            self._probe(step, *self._batch, result.loss_scale)
            progress.probe_seconds += time.perf_counter() - probe_started_s
        self._save_if_due()  # before the evaluation: a fault there must not cost the steps
        self._is_stopping = result.numbers.is_stopping and step < config.total_steps
        self._is_to_validate = is_due(step, config.eval.every) or step == config.total_steps
        self._is_to_score = self._is_scoring_due(step)

    # ----------------------------------------------------------------------------- after each step

    def _log_step(self, result: StepResult, step_s: float) -> None:
        step, numbers = self.progress.step, result.numbers
        tokens = self.config.tokens_at(step)
        row = TrainRow(
            step=step,
            tokens=tokens,
            loss=numbers.loss,
            lr=result.lr,
            grad_norm=numbers.grad_norm,
            tok_per_s=(tokens - self.config.tokens_at(step - 1)) / step_s,
            step_s=step_s,
            verdict=result.verdict.value,
            z_loss=numbers.z_loss,
            reason=None if result.verdict is Verdict.OK else self.guard.reason,
        )
        self.log.step(row.content())
        if numbers.n_saturated:
            self.log.event(
                {"event": "fp8_saturated", "step": step, "tensors": self.precision.saturated()}
            )

    def _freeze_once(self) -> None:
        """After the first step all is compiled: a full collection of what stays would take half a
        second in some later step."""
        if self._is_frozen:
            return
        gc.collect()
        gc.freeze()
        self._is_frozen = True

    def _compare_with_shutdown_timeout(self, step_s: float) -> None:
        """Say, once, where torchrun would kill its workers before they have finished a step and
        saved."""
        self._steps_since_start += 1
        timeout_s = self._shutdown_timeout_s
        save_s = self.saver.seconds
        if timeout_s is None or save_s is None or self._steps_since_start <= WARM_UP_STEPS:
            return
        self._shutdown_timeout_s = None  # what is known has been compared
        needed_s = step_s + save_s
        if needed_s <= timeout_s:
            return
        enough_s = math.ceil(needed_s / 30) * 60  # twice as long
        self.log.say(
            f"a step takes {step_s:.1f} s and a save {save_s:.1f} s, but torchrun kills its"
            f" workers {timeout_s:g} s after it was told to stop: the steps since the last save"
            f" would be lost; start it with --shutdown-timeout={enough_s} (or"
            f" TORCH_ELASTIC_SHUTDOWN_TIMEOUT={enough_s})"
        )

    # ---------------------------------------------------------------------------------------- save

    def _save_if_due(self) -> None:
        """In a row of skips the weights may be what is wrong, no checkpoint to go back to: what is
        due waits for its end."""
        step = self.progress.step
        policy = self.config.checkpoint
        self._is_save_due |= is_due(step, policy.every, policy.rolling)
        may_be_ruined = self.guard.consecutive > 0
        is_demanded = step in policy.at or step == self.config.total_steps
        if is_demanded or (self._is_save_due and not may_be_ruined):
            self._save()
            self._is_save_due = False

    def _save(self) -> None:
        self.at("saving a checkpoint", is_slow=True)
        self._check_replicas()
        self.progress.seconds = time.perf_counter() - self._started_s
        state = asdict(self.progress) | {
            "guard": self.guard.state(),
            "data": self._identity,
            "tokenizer_sha256": self.data.tokenizer_sha256,
            "origin": self.start.origin,
            "switched_from": self.start.switched_from,
            "switched_from_fp8": [asdict(fp8) for fp8 in self.start.trunk_precisions],
        }
        if scales := self.precision.state():
            state["fp8_scales"] = scales
        self.data.verified()  # no checkpoint holds what a damaged shard has taught
        # the step is the manifest's own
        self.saver.save(state.pop("step"), self._tensors, state, self.config)
        if self.saver.failures:  # the save before: training goes on, and this one tries again
            self._log_event("save_failed", self.saver.failures[-1])
        self._report_copies()

    def _report_copies(self) -> None:
        """Note what has become of copies to checkpoint.copy_to since the last time."""
        if self._copies is not None:
            for event, sentence in self._copies.reports():
                self._log_event(event, sentence)

    def _finish_copies(self) -> None:
        """Wait for the copy of the last checkpoint, less long than the watchdog would."""
        if self.config.checkpoint.copy_to is None:
            return
        self.at("copying the last checkpoint", is_slow=True)
        patience_s = 0.8 * self.config.parallel.start_timeout
        copies = self._copies
        run_on_rank0(self.world, lambda: copies.finish(patience_s) if copies else None)
        self._report_copies()

    def _leave(self) -> None:
        """Save and say so, where a stop was requested."""
        self._save()
        self.saver.finish()
        reason = self.stop.reason or "a request to another rank"
        self._log_event(
            "stopped",
            f"stopped on request at step {self.progress.step}; saved. To go on: run the same"
            f" command again (it was stopped by {reason})",
        )

    def _check_replicas(self) -> None:
        """Raises MachineError before weights that replicas do not share are saved, or their
        validation loss is logged."""
        if not self.config.parallel.check_replicas:
            return
        names = [name for name in self._tensors if name.startswith("model.")]
        weights = {name.removeprefix("model."): self._tensors[name] for name in names}
        try:
            check_replicas(weights, self.world, self.progress.step)
        except MachineError:
            self.saver.wait()  # for the save before this one, which the next start goes on from
            raise

    # --------------------------------------------------------------------------------------- scores

    def _score(self) -> None:
        """Log the scores on eval.tasks, or why there are none: no failure costs the run. Left
        undone where a stop is requested meanwhile."""
        assert self._score_tasks is not None
        started_s = time.perf_counter()
        self._note_scoring()
        outcome = self._score_tasks(self.model, self.tokenizer, self.world, self._note_scoring)
        if outcome.is_stopped:
            self._is_stopping = True
            return
        step = self.progress.step
        if outcome.failure is not None:
            self._log_event(
                "tasks_failed", f"step {step}: no scores on eval.tasks: {outcome.failure}"
            )
            return
        row = TasksRow(
            step=step,
            tokens=self.config.tokens_at(step),
            scores=outcome.scores,
            se=outcome.se,
            limit=self.config.eval.tasks_limit,
            missing=[*outcome.missing],
            wall_s=round(time.perf_counter() - started_s, 1),
        )
        self.log.tasks(asdict(row))

    def _note_scoring(self) -> bool:
        """Tell the watchdog that the scoring goes on; whether this rank is asked to stop."""
        self.at("scoring on eval.tasks", is_slow=True)
        return self.stop.is_set()

    # -------------------------------------------------------------------------------- validate, end

    def _validate(self) -> bool:
        """Log the validation loss, or go back to a checkpoint where it is not finite; whether the
        run has been finished by it. Left undone where a stop is requested meanwhile."""
        val = self._evaluate()
        step = self.progress.step
        if val is None:
            return False
        if not math.isfinite(val.loss):
            x, y = self.data.val[self.data.sources[0]].batch(0, self.config.micro_batch)
            self._batch = x.to(self.world.device), y.to(self.world.device)  # for a diagnosis
            verdict = self.guard.reject_validation(step, f"validation loss {val.loss}")
            self._roll_back_or_give_up(verdict)
            return False
        self._check_replicas()
        row = ValidationRow(
            step=step,
            tokens=self.config.tokens_at(step),
            loss=val.loss,
            sources={name: val.source_loss(name) for name in val.sequences},
        )
        self.log.validation(asdict(row))
        return step == self.config.total_steps and self._finish(val)

    def _evaluate(self) -> ValLoss | None:
        """The validation loss; None, and the run is stopping, where that was requested
        meanwhile."""
        config, world = self.config, self.world
        # a run that was resumed here has set no scales yet
        self.precision.before_step(self.loss_scale)
        self.at("validating", is_slow=True)  # may be compiled first
        val = evaluate(
            self.model,
            self.data.val,
            self.data.weights,
            config.micro_batch,
            world.device,
            world.rank,
            world.size,
            lambda t: parallel.all_concatenate(t, world),
            self._any_rank_stops,
        )
        if val is None:
            self._is_stopping = True
        return val

    def _any_rank_stops(self) -> bool:
        self.watchdog.at("validating", self.progress.step)
        is_set = torch.tensor(float(self.stop.is_set()), device=self.world.device)
        return bool(parallel.all_sum(is_set, self.world))

    def _finish(self, as_trained: ValLoss) -> bool:
        """Validate in BF16 too, wait for the last save, write the summary. False where a stop was
        requested meanwhile."""
        self._batches.close()
        with self.precision.in_bf16():
            loss_in_bf16 = self._evaluate()
        if loss_in_bf16 is None:
            return False
        self.at("finishing the last checkpoint", is_slow=True)
        self.saver.finish()
        self._finish_copies()
        self.data.verified()
        average = None
        if self.config.checkpoint.average is not None:
            average = self._evaluate_average(self.config.checkpoint.average)
            if average is None:
                return False
        self.progress.seconds = time.perf_counter() - self._started_s
        if self.world.is_main:
            self._write_results(as_trained, loss_in_bf16, average)
        return True

    def _evaluate_average(self, count: int) -> Average | None:
        """The mean of the weights of the last `count` checkpoints, validated in BF16; None where a
        stop was requested meanwhile. It stays in the model: the run's own weights lie in their
        checkpoint, and a run that is stopped here goes on from it."""
        config = self.config
        self.at("checking the checkpoints to average", is_slow=True)
        tell_damaged = partial(self._log_event, "bad_checkpoint")
        points = run_on_rank0(
            self.world,
            lambda: whole_points_to_average(
                config.run_dir, config.checkpoint.every, count, tell_damaged
            ),
        )
        weights = {name: t for name, t in self._tensors.items() if name.startswith("model.")}
        self.precision.reshard()
        self.at("averaging checkpoints", is_slow=True)
        load_mean(points, weights, self.world)
        self.precision.after_update()
        with self.precision.in_bf16():
            val = self._evaluate()
        return Average([point.step for point in points], val) if val is not None else None

    def _write_results(
        self, as_trained: ValLoss, in_bf16: ValLoss, average: Average | None
    ) -> None:
        run_dir = self.config.run_dir
        summary = summarise(
            Finished(
                config=self.config,
                world=self.world,
                data=self.data,
                counts=self.model.counts(),
                layers=self.layers,
                guard=self.guard,
                progress=self.progress,
                start=self.start,
                environment=self.env,
                rows=read_rows(run_dir / "metrics.jsonl"),
                as_trained=as_trained,
                in_bf16=in_bf16,
                average=average,
            )
        )
        write_val_losses(run_dir / "val_losses.npz", as_trained, in_bf16)
        write_json(run_dir / "summary.json", asdict(summary))
        self.log.say(self._describe_end(summary))

    def _describe_end(self, summary: Summary) -> str:
        probes = f", {summary.probe_share:.1%} of it probes" if summary.probe_s else ""
        return (
            f"{self.config.run}: done. validation loss {summary.loss_as_trained:.4f} as"
            f" trained, {summary.loss_bf16:.4f} in BF16{_describe_average(summary)};"
            f" {summary.tok_per_s_median:,.0f} tok/s;"
            f" {summary.wall_s:.0f} s{probes}{_describe_skips(self.guard)} ->"
            f" {self.config.run_dir}/summary.json"
        )

    # ------------------------------------------------------------------------------------- go back

    def _roll_back_or_give_up(self, verdict: Verdict) -> None:
        """ROLLBACK: back to the newest checkpoint from before the skipped steps, whose weights were
        sane, on with new data. STOP, or no such checkpoint: raises MachineError with what is
        wrong."""
        self.at("going back to a checkpoint, or looking for the cause", is_slow=True)
        self.saver.wait()  # what it has to save is the newest there will be
        if verdict is Verdict.ROLLBACK:
            checkpoint = self._load_sane_checkpoint()
            if checkpoint is not None:
                self._roll_back(checkpoint.step, checkpoint.state)
                return
            self.guard.note_no_checkpoint()
        step = self.progress.step
        diagnosis = diagnose(
            self.model,
            self._tensors,
            *self._batch,
            step,
            self.guard.reason,
            self.config.run_dir,
            self.world.is_main,
        )
        raise MachineError(f"step {step}: {diagnosis}")

    def _load_sane_checkpoint(self) -> Restored | None:
        """Fill the tensors from the newest checkpoint of before the suspect steps: the run's own,
        or its trunk's; None where there is none."""
        first_suspect = self.guard.suspect_since or 0
        tell_damaged = partial(self._log_event, "bad_checkpoint")
        newest = restore(
            self.config.run_dir, self._tensors, self.world, tell_damaged, first_suspect
        )
        if newest is not None:
            return newest
        parent = self.config.parent
        if parent is None or not 0 < parent[1] < first_suspect:
            return None
        with suppress(UserError):  # the trunk may be gone by now
            return branch(self.config, self.tokenizer.hashes, self._tensors, self.world)
        return None

    def _roll_back(self, to_step: int, state: dict) -> None:
        """Go on from a checkpoint of `to_step` with `state`, whose tensors are loaded already."""
        guard, progress = self.guard, self.progress
        from_step = progress.step
        # 1. The folder: no resume may go on from a later step.
        self._is_save_due = False
        self.saver.roll_back(to_step)
        # 2. What was made of the old weights, and the optimizer's count of updates.
        self.precision.zero_gradients()
        self.precision.reshard()
        optim.set_updates(self.optimizer, state["updates"])
        self.precision.after_update()
        self.precision.load(state.get("fp8_scales"))
        # 3. The guard's window, and how far the run has come: the data of the steps that are
        #    undone is left out.
        guard.rolled_back(state["guard"])
        progress.step = to_step
        progress.updates = state["updates"]
        progress.data_offset += self.config.ramp.full_steps_between(to_step, from_step)
        # 4. The order of the data from here on.
        self._batches.close()
        self._stream()
        # 5. The record, last: it holds what has happened.
        event = {
            "event": "rollback",
            "step": from_step,
            "to": to_step,
            "reason": guard.reason,
            "data_offset": progress.data_offset,
        }
        self.log.roll_back(to_step, event)
        self.log.say(
            f"step {from_step}: {guard.reason}; back to step {to_step}, on with data not seen yet "
            f"({guard.rollbacks} of {self.config.guard.rollbacks} times)"
        )

    # ------------------------------------------------------------------------------------- helpers

    def _stream(self) -> None:
        """The micro-batches from here on; rollbacks have moved the data on by whole steps."""
        config, world = self.config, self.world
        step, offset = self.progress.step, self.progress.data_offset
        # the place of each micro-batch's first token in the order of the whole run
        tokens = config.micro_batch * config.model.n_ctx
        first_of_step = config.tokens_at(step) + offset * config.data.tokens_per_step
        self._positions = count(first_of_step + world.rank * tokens, world.size * tokens)
        self._batches = self.data.stream(
            step, config.total_steps, world.rank, world.size, world.device, offset
        )

    def _log_event(self, event: str, reason: str) -> None:
        self.log.event({"event": event, "step": self.progress.step, "reason": reason})
        self.log.say(reason)


def _copy_again(config: Config) -> None:
    """Copy the last checkpoint of a finished run, where the store lacks it, and print what has
    become of it."""
    last = latest(config.run_dir)
    if config.checkpoint.copy_to is None or last is None:
        return
    start = Start(StartKind.RESUME, Progress(), last)
    copies = _open_copies(config, start)
    copies.copy(last)
    copies.finish(0.8 * config.parallel.start_timeout)
    for _, sentence in copies.reports():
        print(sentence)


def _open_copies(config: Config, start: Start) -> CheckpointCopies:
    """Raises UserError where copies would replace another run's."""
    assert config.checkpoint.copy_to is not None
    refuse_owner = partial(refuse_to_replace_copies, config, start)
    copies = CheckpointCopies(config.checkpoint.copy_to, config.run, config.run_dir, refuse_owner)
    copies.check_owner()
    return copies


@contextmanager
def _explaining_errors(config: Config, world: World, watchdog: Watchdog) -> Iterator[None]:
    """Raises MachineError in the place of torch's errors of a known cause: no memory, a lost
    rank."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = out_of_memory(error, config, world) or watchdog.explain(error)
        if not message:
            raise
        fault = MachineError(message)
        fault.add_note(f"on rank {world.rank}")  # the others may have another story
        raise fault from error


def _describe_files(config_files: list[str]) -> list[str]:
    """A line that names the files that a config was made from; none where it was made by a
    program."""
    if not config_files:
        return []
    named, *imported = config_files
    line = f"config: {named}"
    if imported:
        line += f", which imports {', '.join(imported)}"
    return [line]


def _describe_skips(guard: Guard) -> str:
    """The steps of a run that left its weights alone, as the end of a line; "" where there were
    none."""
    counts = []
    if guard.skipped:
        counts.append(f"{guard.skipped:,} skipped by the guard")
    if guard.without_targets:
        counts.append(f"{guard.without_targets:,} had no target")
    if not counts:
        return ""
    return f"; steps that changed no weights: {', '.join(counts)}"


def _describe_average(summary: Summary) -> str:
    if summary.loss_bf16_average is None:
        return ""
    steps = ", ".join(map(str, summary.averaged_steps))
    return f", {summary.loss_bf16_average:.4f} of the mean of steps {steps}"


def _count_rows(run_dir: Path) -> int:
    """Rows of metrics.jsonl, 0 where there is none."""
    return len(metrics_rows(read_rows(run_dir / "metrics.jsonl")))
