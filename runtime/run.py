"""The life of a run around train.py's steps: open its folder, resume, validate, save, roll back,
finish, summarise."""

import fcntl
import gc
import json
import math
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from fp8 import selection
from fp8.probe import Probe
from fp8.sharded import unwrap
from lib.errors import MachineError, UserError
from lib.files import digest, read_rows, write_json
from lib.machine import ROOT, device_name
from runtime import optim, parallel
from runtime.checkpoint import Saver, branch, note_saved, read_saved, restore, run_on_rank0, step_of
from runtime.config import Config, config_from_dict, read_config
from runtime.config_file import shown
from runtime.data import Data, shares
from runtime.guard import Guard, Verdict, diagnose
from runtime.log import (
    WARM_UP_STEPS,
    Log,
    Meter,
    Profiler,
    environment,
    lineage,
    pair_id,
    peak_flops,
    throughput,
)
from runtime.memory import out_of_memory
from runtime.metrics_file import metrics_rows
from runtime.parallel import World, build
from runtime.tokenizer import keep_tokenizer, load_tokenizer, tokenizer_of
from runtime.validation import ValLoss, bits_per_byte, evaluate
from runtime.watchdog import Watchdog


@dataclass
class Progress:
    """How far a run has come, as its checkpoints store it."""

    step: int = 0  # training steps that count: done, and not undone by a rollback
    updates: int = 0  # of the weights; fewer than steps where some were skipped
    data_offset: int = 0  # steps' worth of data that rollbacks have left out
    seconds: float = 0.0  # of wall time, when last saved
    probe_seconds: float = 0.0  # of these, spent in probes


class Run:
    """One run of `config` on the ranks of `world`, from open() to the end of its `with` block. All
    ranks call it together."""

    @classmethod
    @contextmanager
    def open(
        cls, config: Config, world: World, config_files: Sequence[Path] = ()
    ) -> Iterator["Run"]:
        """Lock the folder, read the data's index, build the model, resume | branch | initialise;
        close all of it at the end. Raises UserError, MachineError: also for torch's errors of a
        known cause, no memory or a lost rank."""
        with (
            Watchdog(world, config.run_dir, config.parallel.start_timeout) as watchdog,
            # closes the log however the run ends: an error begins on a line of its own
            ExitStack() as cleanup,
        ):
            try:
                yield cls(config, world, watchdog, cleanup, config_files)
            except (RuntimeError, MemoryError) as error:
                if message := out_of_memory(error, config, world) or watchdog.explain(error):
                    fault = MachineError(message)
                    fault.add_note(f"on rank {world.rank}")  # the others may have another story
                    raise fault from error
                raise

    def __init__(
        self,
        config: Config,
        world: World,
        watchdog: Watchdog,
        cleanup: ExitStack,
        config_files: Sequence[Path] = (),
    ):
        self.config, self.world, self.watchdog = config, world, watchdog
        # the one that was named, then those that it imports
        self._config_files = [shown(file) for file in config_files]
        self._began = time.perf_counter()
        self.log: Log | None = None  # rank 0's
        self.progress, self.guard = Progress(), Guard(config.guard)
        self.tokenizer = load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer))
        selection.check_hardware(config.fp8, world.device)
        if not is_finished(config):
            run_on_rank0(world, lambda: cleanup.enter_context(lock_folder(config.run_dir)))
        self.is_finished = is_finished(config)  # perhaps since this start waited for the lock
        if self.is_finished:
            if world.is_main:
                print(
                    f"{config.run}: finished, all {config.total_steps} steps; nothing to do"
                    f" ({config.run_dir}/summary.json)"
                )
            return
        self.config = config = as_begun(config, world)
        self._first_start = run_on_rank0(world, lambda: read_first_start(config.run_dir))
        self.data = Data(config, *self.tokenizer.hashes)
        self.data.verify(*world.share_of_machine)  # each machine may have a copy of its own
        self._built = built = build(config, world)
        self.model, self.optimizer, self.loss_scale, self.precision = (
            built.model,
            built.optimizer,
            built.loss_scale,
            built.precision,
        )
        self._identity = {
            "train": self.data.train_sha256,
            "val": self.data.val_sha256,
            "fp8": digest({layer.name: layer.recipe for layer in built.layers if layer.recipe}),
        }
        self._tensors = {
            f"model.{name}": unwrap(p.detach()) for name, p in self.model.named_parameters()
        }
        self._tensors |= {
            f"optim.{name}": t
            for name, t in optim.state_tensors(self.optimizer, self.model).items()
        }
        damaged: list[str] = []  # lines about checkpoints
        restored = self._restore(damaged)
        self.precision.after_update()
        if world.is_main:
            self._open_log(cleanup, restored, damaged)
        self.saver = Saver(
            config.run_dir, config.checkpoint, world, lambda: self.log.validated if self.log else {}
        )
        self._probe = Probe(
            config.run_dir / "probe.jsonl" if world.is_main else None,
            self.model,
            selection.recipes(built.layers, self.loss_scale),
            config.probe.tokens,
        )
        self._profiler = cleanup.enter_context(
            closing(Profiler(config, world, self.log.say if self.log else print))
        )
        self.stop = StopRequest(world)
        self._stream()
        self._is_save_due = self._is_stopping = self._is_frozen = False
        # None: there is none, or it was looked at already
        self._shutdown_timeout_s = parallel.shutdown_timeout(world)
        self._steps_since_start = 0
        step = self.progress.step  # a kill may have come between its save and its validation
        is_unknown = self._is_resumed and run_on_rank0(
            world, lambda: not (self.log and step in self.log.validated)
        )
        self._is_to_validate = (
            is_unknown and is_due(step, config.eval.every) or step == config.total_steps
        )

    def _restore(self, damaged: list[str]) -> tuple[Path, dict] | None:
        """Resume from the run's own newest whole checkpoint, else branch off start_from, else
        initialise; the checkpoint's folder and manifest. `damaged` gets lines about own ones."""
        config, world, is_switch = self.config, self.world, False
        found = restore(config.run_dir, self._tensors, world, damaged.append)
        self._is_resumed = found is not None
        if not found:
            run_on_rank0(world, lambda: refuse_to_start_over(config))
            if config.start_from:
                found = branch(config, self.tokenizer.hashes, self._tensors, world)
        # The model that the weights go back to, and the precision of the trunk, where a branch has
        # another one.
        self._origin = self._switched_from = None
        if not found:
            self.model.init_weights(config.seed, self._built.assign)
            return None
        self.model.init_buffers()
        manifest, state = found[1], found[1]["state"]
        self._origin, self._switched_from = (
            state.get("imported") or state.get("origin"),
            state.get("switched_from"),
        )
        if "imported" not in state:
            self.progress = Progress(
                manifest["step"], **{f.name: state[f.name] for f in fields(Progress)[1:]}
            )
            if not self._is_resumed:
                # the parent's hours are its own
                self.progress.seconds = self.progress.probe_seconds = 0.0
                theirs = config_from_dict(manifest["config"]).fp8.label
                if is_switch := theirs != config.fp8.label:
                    self._switched_from = ">".join(filter(None, (self._switched_from, theirs)))
            self._began -= self.progress.seconds
            optim.set_updates(self.optimizer, self.progress.updates)
            self.guard = Guard(config.guard, **state["guard"])
            self.precision.load(state.get("fp8_scales"))  # a trunk of another precision has none
        # an imported model was begun with none
        for key, what in (
            ("train", "training tokens than data.dir holds"),
            ("val", "validation windows than eval.tokens and data.dir give"),
            ("fp8", "Linears in FP8 than fp8.recipe=auto chooses here"),
        ):
            if state.get("data", self._identity).get(key) != self._identity[key] and not (
                key == "fp8" and is_switch
            ):
                raise UserError(
                    f"{found[0].parent.parent} was begun with other {what}: restore those, or"
                    " choose another run="
                )
        return found

    def _open_log(
        self, cleanup: ExitStack, restored: tuple[Path, dict] | None, damaged: list[str]
    ) -> None:
        config, world, step, total = (
            self.config,
            self.world,
            self.progress.step,
            self.config.model.params_total,
        )
        # first: it marks the folder as a run
        write_json(config.run_dir / "config.json", asdict(config))
        keep_tokenizer(config.run_dir, config.data.tokenizer)
        note_saved(config.run_dir, step_of(restored[0]) if restored and self._is_resumed else None)
        lost = (
            0
            if self._is_resumed
            else len(metrics_rows(read_rows(config.run_dir / "metrics.jsonl")))
        )
        self._meter = cleanup.enter_context(closing(Meter(world.device)))
        # The time of the run's first start stays: a prediction counts only if it is older.
        self.env = (
            environment(world.device, ROOT)
            | {"config_files": self._config_files}
            | self._first_start
        )
        write_json(config.run_dir / "env.json", self.env)
        self.log = cleanup.enter_context(closing(Log(config, step)))
        begins = "resuming" if self._is_resumed else "branching off" if step else "on from"
        self.log.say(
            "\n".join(
                [
                    *_told_files(self._config_files),
                    (
                        f"{config.run}: {total:,} parameters, {config.total_steps:,} steps of"
                        f" {config.data.tokens_per_step:,} tokens = {config.total_tokens:,} tokens"
                        f" ({config.total_tokens / total:.1f} per parameter)"
                    ),
                    (
                        f"device: {world.size} x {device_name(world.device)};"
                        f" {config.accumulation(world.size)} micro-batches of"
                        f" {config.data.micro_batch} x {config.model.n_ctx} tokens per rank and"
                        " step"
                    ),
                    *self._built.flags,
                    *self.data.describe(),
                    *selection.table(self._built.layers, config.fp8.recipe, world.device.type),
                    (f"{begins} {restored[0]}" if restored else "starting at step 0")
                    + (
                        f"; trained in {self._switched_from} before its branch point"
                        if self._switched_from
                        else ""
                    )
                    + (
                        f"; the {lost} rows of an earlier start, which had not completed a"
                        " checkpoint, are dropped"
                        if lost
                        else ""
                    ),
                ]
            )
        )
        if self._is_resumed and not self._first_start:
            self.log.say(
                f"{config.run_dir}/env.json was gone: this start counts as the run's first, also"
                " where predictions are scored"
            )
        if self._is_resumed and "wandb" in config.log.to:
            self.log.say(
                f"log.to=wandb: W&B keeps the rows that it was sent for steps after {step} and"
                " shows these steps twice; metrics.jsonl has each once"
            )
        if restored:
            self.log.event({"event": "resume" if self._is_resumed else "branch", "step": step})
        for line in damaged:
            self._log_event("bad_checkpoint", line)

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
        where the loss is not finite."""
        if self._is_to_validate and not self._is_stopping:
            self._is_to_validate = False
            val, step = self._evaluate(), self.progress.step
            if val and not math.isfinite(val.loss):
                x, y = self.data.val[self.data.sources[0]].batch(0, self.config.micro_batch)
                self._batch = x.to(self.world.device), y.to(self.world.device)  # for a diagnosis
                self._act_on(self.guard.reject_validation(step, f"validation loss {val.loss}"))
            elif val:
                if self.log:
                    self.log.validation(
                        {
                            "step": step,
                            "tokens": step * self.config.data.tokens_per_step,
                            "loss": val.loss,
                            "sources": {name: val.source_loss(name) for name in val.sequences},
                        }
                    )
                if step == self.config.total_steps and self._finish(val):
                    return None
        if self._is_stopping:
            self._save()
            self.saver.finish()
            step, reason = self.progress.step, self.stop.reason or "a request to another rank"
            self._log_event(
                "stopped",
                f"stopped on request at step {step}; saved. To go on: run the same command again"
                f" (it was stopped by {reason})",
            )
            return None
        self._step_began = time.perf_counter()
        self._profiler.begin(self.progress.step + 1)
        return self.progress.step

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of the next micro-batch, (B, T) each, on the device."""
        self.at("reading a micro-batch")
        self._batch = next(self._batches)
        # of stochastic rounding
        self.precision.set_position(next(self._positions))
        self.at("forward and backward")
        return self._batch

    def end_step(
        self,
        verdict: Verdict,
        loss: float,
        grad_norm: float,
        lr: float,
        loss_scale: float,
        is_stopping: bool,
        n_saturated: int,
    ) -> None:
        """Log the step, then what is due after it: probe, save; a rollback or the end of the run
        where the guard says so."""
        config, progress = self.config, self.progress
        progress.step += 1
        step, step_s = progress.step, time.perf_counter() - self._step_began
        # to write a trace
        self.watchdog.at(
            "after the step", step, config.parallel.start_timeout if config.profile else None
        )
        self._profiler.end(step)
        if self.log:
            self.log.step(
                {
                    "step": step,
                    "tokens": step * config.data.tokens_per_step,
                    "loss": loss,
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "tok_per_s": config.data.tokens_per_step / step_s,
                    "step_s": step_s,
                    "verdict": verdict.value,
                    **({} if verdict is Verdict.OK else {"reason": self.guard.reason}),
                    **self._meter.latest,
                }
            )
            if n_saturated:
                self.log.event(
                    {"event": "fp8_saturated", "step": step, "tensors": self.precision.saturated()}
                )
        self.watchdog.patience = config.parallel.timeout  # compilation and loading are over
        # compiled now: a full collection of what stays would take half a second in some step
        if not self._is_frozen:
            gc.collect()
            gc.freeze()
            self._is_frozen = True
        if verdict in (Verdict.ROLLBACK, Verdict.STOP):
            self._act_on(verdict)
            return
        self._compare_with_shutdown_timeout(step_s)
        if is_due(step, config.probe.every):
            began = time.perf_counter()
            self._probe(step, *self._batch, loss_scale)
            progress.probe_seconds += time.perf_counter() - began
        self._is_save_due |= is_due(step, config.checkpoint.every, config.checkpoint.rolling)
        # In a row of skips the weights may be what is wrong, no checkpoint to go back to: what is
        # due waits for its end.
        if (
            self._is_save_due
            and not self.guard.consecutive
            or step in (*config.checkpoint.at, config.total_steps)
        ):
            self._save()  # before the evaluation: a fault there must not cost the steps
            self._is_save_due = False
        self._is_stopping = is_stopping and step < config.total_steps
        self._is_to_validate = is_due(step, config.eval.every) or step == config.total_steps

    def _compare_with_shutdown_timeout(self, step_s: float) -> None:
        """Say, once, where torchrun would kill its workers before they have finished a step and
        saved."""
        self._steps_since_start += 1
        timeout_s, save_s = self._shutdown_timeout_s, self.saver.seconds
        if timeout_s is None or save_s is None or self._steps_since_start <= WARM_UP_STEPS:
            return
        self._shutdown_timeout_s = None  # what is known has been compared
        needed_s = step_s + save_s
        if self.log and needed_s > timeout_s:
            enough_s = math.ceil(needed_s / 30) * 60  # twice as long
            self.log.say(
                f"a step takes {step_s:.1f} s and a save {save_s:.1f} s, but torchrun kills its"
                f" workers {timeout_s:g} s after it was told to stop: the steps since the last save"
                f" would be lost; start it with --shutdown-timeout={enough_s} (or"
                f" TORCH_ELASTIC_SHUTDOWN_TIMEOUT={enough_s})"
            )

    def _evaluate(self) -> ValLoss | None:
        """The validation loss; None, and the run is stopping, where that was requested
        meanwhile."""
        config, world = self.config, self.world
        # a run that was resumed here has set no scales yet
        self.precision.before_step(self.loss_scale)
        self.at("validating", is_slow=True)  # may be compiled first

        def any_rank_stops() -> bool:
            self.watchdog.at("validating", self.progress.step)
            return bool(
                parallel.all_sum(
                    torch.tensor(float(self.stop.is_set()), device=world.device), world
                )
            )

        found = evaluate(
            self.model,
            self.data.val,
            self.data.weights,
            config.micro_batch,
            world.device,
            world.rank,
            world.size,
            lambda t: parallel.all_concatenate(t, world),
            any_rank_stops,
        )
        self._is_stopping |= found is None
        return found

    def _save(self) -> None:
        self.at("saving a checkpoint", is_slow=True)
        self.progress.seconds = time.perf_counter() - self._began
        state = asdict(self.progress) | {
            "guard": self.guard.state(),
            "data": self._identity,
            "tokenizer_sha256": self.data.tokenizer_sha256,
            "origin": self._origin,
            "switched_from": self._switched_from,
        }
        if scales := self.precision.state():
            state["fp8_scales"] = scales
        self.data.verified()  # no checkpoint holds what a damaged shard has taught
        # the step is the manifest's own
        self.saver.save(state.pop("step"), self._tensors, state, self.config)
        if self.saver.failures:  # the save before: training goes on, and this one tries again
            self._log_event("save_failed", self.saver.failures[-1])

    def _act_on(self, verdict: Verdict) -> None:
        """ROLLBACK: back to the newest checkpoint from before the skipped steps, whose weights were
        sane, on with new data. STOP, or no such checkpoint: raises MachineError with what is
        wrong."""
        config, bad, progress, guard, found = (
            self.config,
            self.progress.step,
            self.progress,
            self.guard,
            None,
        )
        self.at("going back to a checkpoint, or looking for the cause", is_slow=True)
        self.saver.wait()  # what it has to save is the newest there will be
        if verdict is Verdict.ROLLBACK:
            before = guard.suspect_since or 0
            found = restore(
                config.run_dir,
                self._tensors,
                self.world,
                partial(self._log_event, "bad_checkpoint"),
                before,
            )
            if found is None and config.parent and 0 < config.parent[1] < before:
                with suppress(UserError):  # the trunk may be gone by now
                    found = branch(config, self.tokenizer.hashes, self._tensors, self.world)
            if found is None:
                guard.reason += (
                    f", and there is no checkpoint from before step {before} to go back to"
                )
        if found is None:
            raise MachineError(
                f"step {bad}: "
                + diagnose(
                    self.model,
                    self._tensors,
                    *self._batch,
                    bad,
                    guard.reason,
                    config.run_dir,
                    self.world.is_main,
                )
            )
        self._is_save_due = False
        to, state = found[1]["step"], found[1]["state"]
        self.saver.roll_back(to)
        self.precision.zero_gradients()
        self.precision.reshard()
        optim.set_updates(self.optimizer, state["updates"])
        self.precision.after_update()
        self.precision.load(state.get("fp8_scales"))
        guard.rolled_back(state["guard"])
        progress.step, progress.updates, progress.data_offset = (
            to,
            state["updates"],
            progress.data_offset + bad - to,
        )
        self._batches.close()
        self._stream()
        if self.log:
            self.log.roll_back(
                to,
                {
                    "event": "rollback",
                    "step": bad,
                    "to": to,
                    "reason": guard.reason,
                    "data_offset": progress.data_offset,
                },
            )
            self.log.say(
                f"step {bad}: {guard.reason}; back to step {to}, on with data not seen yet "
                f"({guard.rollbacks} of {config.guard.rollbacks} times)"
            )

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
        self.data.verified()
        self.progress.seconds = time.perf_counter() - self._began
        if self.log:
            summary, sequences = (
                summarise(self, as_trained, loss_in_bf16),
                [*as_trained.sequences.values()],
            )
            # for paired comparisons
            np.savez(
                self.config.run_dir / "val_losses.npz",
                as_trained=np.concatenate(sequences),
                bf16=np.concatenate([*loss_in_bf16.sequences.values()]),
                source=np.repeat(np.arange(len(sequences)), [*map(len, sequences)]),
                n_tokens=np.concatenate([*as_trained.targets.values()]),
            )
            write_json(self.config.run_dir / "summary.json", summary)
            probes = f", {summary['probe_share']:.1%} of it probes" if summary["probe_s"] else ""
            self.log.say(
                f"{self.config.run}: done. validation loss {summary['loss_as_trained']:.4f} as"
                f" trained, {summary['loss_bf16']:.4f} in BF16;"
                f" {summary['tok_per_s_median']:,.0f} tok/s;"
                f" {summary['wall_s']:.0f} s{probes}{_describe_skips(self.guard)} ->"
                f" {self.config.run_dir}/summary.json"
            )
        return True

    def _stream(self) -> None:
        """The micro-batches from here on; rollbacks have moved the data on by whole steps."""
        config, world, offset = self.config, self.world, self.progress.data_offset
        first, end, tokens = (
            self.progress.step + offset,
            config.total_steps + offset,
            config.micro_batch * config.model.n_ctx,
        )
        # in the order
        self._positions = count(
            first * config.data.tokens_per_step + world.rank * tokens, world.size * tokens
        )
        self._batches = self.data.stream(first, end, world.rank, world.size, world.device)

    def _log_event(self, event: str, reason: str) -> None:
        if self.log:
            self.log.event({"event": event, "step": self.progress.step, "reason": reason})
            self.log.say(reason)


def _told_files(config_files: list[str]) -> list[str]:
    """A line that names the files that a config was made from; none where it was made by a
    program."""
    if not config_files:
        return []
    named, *imported = config_files
    return [f"config: {named}" + (f", which imports {', '.join(imported)}" if imported else "")]


def is_due(step: int, *periods: int | None) -> bool:
    return any(step % every == 0 for every in periods if every)


# -------------------------------------------------------------------------------- the run's folder

LOCK = ".lock"
# a run that was told to stop and one that is started right after it may overlap for a moment
LOCK_TIMEOUT_S = 3.0


@contextmanager
def lock_folder(run_dir: Path) -> Iterator[None]:
    """Make a run's folder where there is none, and lock it until the block ends or this process
    dies. A folder in which nothing was written is removed again. Raises UserError where none can be
    made or written, or another process has it.

    By fcntl.lockf: the kernel drops the lock with the process, and no child inherits it, as
    forgotten workers do with flock. Its trap: a process loses it by closing ANY descriptor of the
    file, so nothing in a run may open LOCK again."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / LOCK, "a+")  # noqa: SIM115 - closed below
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; choose another out= or run=, or correct the"
            " rights"
        ) from error
    with file:
        end = time.monotonic() + LOCK_TIMEOUT_S
        while _is_locked_by_another(file):
            if time.monotonic() > end:
                file.seek(0)
                raise UserError(
                    f"{run_dir} is being written by {file.read(200)}: wait for it, stop it, or"
                    " choose another run="
                )
            time.sleep(0.1)
        # the run that had it wrote nothing and has removed the folder
        if not os.fstat(file.fileno()).st_nlink:
            with lock_folder(run_dir):
                yield
            return
        file.truncate(0)
        try:
            file.write(
                f"process {os.getpid()} on host {socket.gethostname()!r}, started"
                f" {time.strftime('%Y-%m-%d %H:%M:%S')}"
            )
            file.flush()
            yield
        finally:
            with suppress(OSError):  # a symbolic link; NFS, which keeps open files
                names = os.listdir(run_dir)
                if names == [LOCK]:
                    shutil.rmtree(run_dir)
                elif not any(map(_is_of_a_run, names)):  # the user's log alone
                    (run_dir / LOCK).unlink()


def _is_locked_by_another(file: TextIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES
        return True
    except OSError as error:
        print(
            f"{file.name}: this file system has no locks ({error.strerror}), so nothing keeps a"
            " second run from writing here"
        )
    return False


# What `train.py ... | tee out/RUN/log.txt`, nohup, Slurm and torchrun write: a user's log may be
# there before the run is.
LOGS = re.compile(r".*\.(log|txt|out|err)|nohup\.out|slurm-.*", re.I)


def _is_of_a_run(name: str) -> bool:
    """Whether a file of this name in a run's folder may be a run's, or anything else that a new run
    must not be mixed with. Not so: logs, and what a run that is killed before it has a config.json
    may leave."""
    return name not in (LOCK, ".config.json.tmp") and not LOGS.fullmatch(name)


def is_finished(config: Config) -> bool:
    """Whether this very run is already done. Raises UserError where its folder belongs to another
    run."""
    run_dir = config.run_dir
    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    if not any(map(_is_of_a_run, names)):
        return False
    if "config.json" not in names:
        raise UserError(
            f"{run_dir} is not empty and holds no run (no config.json): choose another run= or out="
        )
    before, now = read_config(run_dir).identity(), config.identity()
    # prose:2 is prose:1; Run keeps what it was begun with
    if shares(before["data.mixture"]) == shares(now["data.mixture"]):
        now["data.mixture"] = before["data.mixture"]
    if changes := [
        f"{key} was {before.get(key)}, now {now.get(key)}"
        for key in {**now, **before}
        if before.get(key) != now.get(key)
    ]:
        raise UserError(
            f"{run_dir} holds another run: {'; '.join(changes)}; choose another run=, or give the"
            " same settings"
        )
    return "summary.json" in names


def as_begun(config: Config, world: World) -> Config:
    """`config` with the weights of the mixture that the run in its folder was begun with: prose:1
    where prose:2 is asked for, which is the same order, but would be another pair_id than that of
    the run's partner. All ranks call it together."""

    def read_mixture() -> dict[str, float]:
        is_begun = (config.run_dir / "config.json").exists()
        return (read_config(config.run_dir) if is_begun else config).data.mixture

    return replace(config, data=replace(config.data, mixture=run_on_rank0(world, read_mixture)))


def read_first_start(run_dir: Path) -> dict[str, str]:
    """{"t_start": when the run in this folder was started first}, {} before its first start. Raises
    UserError where env.json does not tell it: with a later time a prediction that was frozen
    meanwhile would count as older than the run."""
    path = run_dir / "env.json"
    if not path.exists():
        return {}
    try:
        t_start = json.loads(path.read_bytes())["t_start"]
        datetime.fromisoformat(t_start)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}): it tells when this run was first"
            " started, which frozen predictions are held against; restore it, or delete it: then"
            " the run counts as started now"
        ) from error
    return {"t_start": t_start}


def refuse_to_start_over(config: Config) -> None:
    """Raises UserError where the run has had a checkpoint, yet none is there any more; MachineError
    where only damaged ones are.

    A run that was killed during its first save, or whose saves failed for a full disk, has had
    none: it begins at step 0."""
    damaged = ", ".join(sorted(path.name for path in config.run_dir.glob("checkpoints/bad_step_*")))
    steps = {
        row["step"]
        for row in metrics_rows(read_rows(config.run_dir / "metrics.jsonl"))
        if row["kind"] == "train"
    }
    if not damaged and not _has_had_a_checkpoint(config, steps):
        return
    error = MachineError if damaged else UserError
    but_damaged = f" but damaged {damaged}" if damaged else ""
    raise error(
        f"{config.run_dir} has come to step {max(steps, default=0)}, yet no checkpoint of it is"
        f" left{but_damaged}: put its checkpoints/ back, or delete the folder to start the run anew"
    )


def _has_had_a_checkpoint(config: Config, steps: set[int]) -> bool:
    """By saved.json. A run of a version that wrote none: where two saves were due by its rows (a
    branch has rows of its own alone) and by the policy of the config that trained them, as the
    first may have been cut short, but the second has waited for it."""
    saved = read_saved(config.run_dir)
    if saved is not None:
        return saved.first_checkpoint is not None
    is_run = (config.run_dir / "config.json").exists()
    policy = read_config(config.run_dir).checkpoint if is_run else config.checkpoint
    due = [
        step for step in steps if step in policy.at or is_due(step, policy.every, policy.rolling)
    ]
    return len(due) > 1


# SIGUSR1 is Slurm's warning; SIGHUP comes from a terminal that is closed, as by an ssh connection
# that is lost.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ONE_REQUEST_S = 1.0  # torchrun and Slurm may both pass one request on


class StopRequest(threading.Event):
    """Set by the first of SIGNALS, and by the end of the launcher; the loop reads it once a step. A
    later signal of the same kind ends the process at once: a thread counts them as they arrive,
    where Python's own handlers wait for a collective or the device to come back."""

    def __init__(self, world: World):
        super().__init__()
        self.reason = ""  # what set it on this rank
        self._is_to_tell = world.local_rank == 0
        # signal -> when it came first, in seconds of time.monotonic()
        self._first: dict[int, float] = {}
        self._arriving, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # by nohup: the run is to outlive its terminal
            signal.signal(number, lambda *_: None)  # so that it is written to the pipe
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        if world.launcher is not None:
            world.launcher.on_end = self._request

    def _listen(self) -> None:
        while numbers := os.read(self._arriving, 64):
            for number in numbers:
                self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if number not in SIGNALS:
            return
        name = signal.Signals(number).name
        self._request(name)
        if time.monotonic() - self._first.setdefault(number, time.monotonic()) > ONE_REQUEST_S:
            self._tell(
                f"a second {name}: left at once; what was saved stays, and the same command goes on"
                " from there"
            )
            os._exit(128 + number)

    def _request(self, reason: str) -> None:
        if self.is_set():
            return
        self.reason = reason
        self.set()
        if self._is_to_tell:
            self._tell(f"{reason}: the run finishes its step, saves and leaves")

    def _tell(self, sentence: str) -> None:
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\ntrain.py: {sentence}\n".encode())


def _last_train_loss(rows: list[dict]) -> float | None:
    """Of the last step that had targets, nats per token; None where none had."""
    losses = (
        row["loss"]
        for row in reversed(rows)
        if row["kind"] == "train" and row["verdict"] != Verdict.NO_TARGET.value
    )
    return next(losses, None)


def _describe_skips(guard: Guard) -> str:
    """The steps of a run that left its weights alone, as the end of a line; "" where there were
    none."""
    counts = ((guard.skipped, "skipped by the guard"), (guard.without_targets, "had no target"))
    told = [f"{count:,} {what}" for count, what in counts if count]
    return f"; steps that changed no weights: {', '.join(told)}" if told else ""


def summarise(run: Run, as_trained: ValLoss, in_bf16: ValLoss) -> dict:
    """The run's record, for scaling/: losses, precision, speed, identities; each count named by its
    convention."""
    config, world, data, counts, layers, guard = (
        run.config,
        run.world,
        run.data,
        run.model.counts(),
        run._built.layers,
        run.guard,
    )
    m, o, steps, tokens = config.model, config.optim, config.total_steps, config.total_tokens
    rows = read_rows(config.run_dir / "metrics.jsonl")
    name, converted = device_name(world.device), [layer for layer in layers if layer.recipe]
    peak = peak_flops(name)
    arms = ("as_trained", as_trained), ("bf16", in_bf16)
    return {
        "schema_version": 1,
        "run_id": config.run,
        "pair_id": pair_id(config, run._origin),
        **lineage(config, run._origin),
        "status": "ok" if guard.consecutive == 0 else "diverged",
        **{key: run.env[key] for key in ("git_commit", "torch", "torchao", "t_start")},
        "device": name,
        "n_gpu": world.size,
        "seed": config.seed,
        "repeat": config.repeat,
        "data_sha256": data.train_sha256,
        "val_sha256": data.val_sha256,
        "tokenizer_sha256": data.tokenizer_sha256,
        **{
            key: getattr(m, key)
            for key in (
                "vocab_size",
                "vocab_padded",
                "n_layer",
                "n_head",
                "n_embd",
                "n_ffn",
                "n_ctx",
            )
        },
        **counts,
        "params_fp8": sum(layer.params for layer in converted),
        "steps": steps,
        "tokens": tokens,
        "tokens_per_step": config.data.tokens_per_step,
        "optimizer": {"adamw": "AdamW", "muon": "Muon"}[o.kind],
        "lr_peak": o.lr,
        "warmup_steps": o.warmup_steps(steps),
        **{
            key: getattr(o, key)
            for key in ("beta1", "beta2", "eps", "weight_decay", "clip", "schedule")
        },
        # the schedule has ended, or this would not be written
        "is_annealed": optim.learning_rate(steps - 1, steps, o) < o.lr,
        "precision": {
            "recipe": config.fp8.label,
            "switched_from": run._switched_from,
            "compile": bool(config.parallel.compile),
            "layers_converted": [layer.name for layer in converted],
            "layers_recipes": {layer.name: layer.recipe for layer in converted},
            "layers_kernels": [layer.name for layer in converted if layer.kernels],
            "layers_skipped": {layer.name: layer.why for layer in layers if not layer.recipe},
        },
        "loss_as_trained": as_trained.loss,
        "loss_as_trained_se_seq": as_trained.standard_error,
        "loss_bf16": in_bf16.loss,
        "loss_bf16_se_seq": in_bf16.standard_error,
        "sources": {
            source: {
                "weight": data.weights[source],
                "epochs": data.epochs[source],
                **{f"loss_{arm}": val.source_loss(source) for arm, val in arms},
                **{
                    f"bpb_{arm}": bits_per_byte(val.source_loss(source), data.val[source])
                    for arm, val in arms
                },
            }
            for source in data.sources
        },
        "train_loss_last": _last_train_loss(rows),
        "skipped_steps": guard.skipped,
        "steps_without_targets": guard.without_targets,
        "rollbacks": guard.rollbacks,
        **throughput(
            rows,
            config.data.tokens_per_step,
            counts["flops_per_token"],
            peak[0] * world.size if peak else None,
        ),
        "wall_s": run.progress.seconds,
        "probe_s": run.progress.probe_seconds,
        "probe_share": run.progress.probe_seconds / run.progress.seconds,
        "mem_peak_gib": (
            torch.cuda.max_memory_allocated(world.device) / 2**30
            if world.device.type == "cuda"
            else None
        ),
    }
