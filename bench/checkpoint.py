"""Measure what saving a checkpoint costs the training beside it.

    python bench/checkpoint.py params=124e6                     about GPT-2's size: 1.5 GB a save, weights and both moments
    python bench/checkpoint.py params=124e6 tokens=1024         longer steps
    python bench/checkpoint.py params=1e6 repeats=1       a rehearsal

Steps without and with a save beside them take turns, so that what drifts cancels in their ratio. Of each save:

    save        from the call until the checkpoint is whole: copied, written, synced, hashed, renamed
    blocked     what the loop waited, in save() and before its next optimizer.step(); the goal is below 5 % of save. Before the
                step it is a GPU that waits, by its own events: the host only queues the wait and goes on
    copy        of the tensors to host memory: what the loop would wait if it did not go on beside it
    cpu         seconds of a core that the save took, which other users of the machine do not change
    beside      steps that a save ran beside, without what they waited, against steps alone

All in one process on one device; the folder under `out` is made and removed. The first save makes the host buffers and is
told apart.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from model import GPT, GPTConfig
from runtime import optim
from runtime.checkpoint import Saver, latest, load, read_manifest
from runtime.cli import MachineError, UserError, read_options
from runtime.config import CheckpointConfig, Config, DataConfig
from runtime.parallel import World

HEAD = 64                       # channels a head; a model of width d has d / 64 blocks, as the ladder's have
COMPUTE_DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Options:
    POSITIONAL: ClassVar[tuple[str, ...]] = ()
    params: float = 124e6           # parameters, about; a save holds 12 bytes of each
    tokens: int = 64                # tokens of a step, one sequence
    repeats: int = 3                # saves that are timed
    out: str = "out/bench_checkpoint"       # on the disk to be measured; must not exist yet


class TimedSaver(Saver):
    """Notes how many seconds each save took, of the clock and of a core, and its copying of the tensors."""
    save_s, cpu_s, copy_s = 0.0, 0.0, 0.0

    def _write(self, *arguments):
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            return super()._write(*arguments)
        finally:
            self.save_s, self.cpu_s = time.perf_counter() - began, time.thread_time() - cpu

    def _stage(self, *arguments):
        began = time.perf_counter()
        try:
            return super()._stage(*arguments)
        finally:
            self.copy_s = time.perf_counter() - began

    def is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()


class Training:
    """A model, its optimizer and a step: forward, backward, update."""

    def __init__(self, config: Config, device: torch.device):
        self.model = GPT(config.model, COMPUTE_DTYPE).to(device)
        self.model.init_buffers()
        self.model.init_weights(config.seed, lambda p, full: p.data.copy_(full))
        self.optimizer = optim.build_optimizer(self.model, config.optim)
        optim.fill_state(self.optimizer)
        self.tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        self.tensors |= {f"optim.{name}": t for name, t in optim.state_tensors(self.optimizer, self.model).items()}
        self.x, self.y = torch.randint(config.model.vocab_size, (2, 1, config.model.n_ctx), device=device)
        self.device = device

    def step(self, saver: Saver) -> tuple[float, float]:
        """Seconds of the step, and how many of them it waited for the saver."""
        began = time.perf_counter()
        self.model(self.x, self.y).mean().backward()
        waited_s = timed(saver.staged, self.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, waited_s()


def timed(work: Callable[[], None], device: torch.device) -> Callable[[], float]:
    """Do `work`; returns what tells the seconds that it held up the host or, once a GPU is done with all, the GPU's stream."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        waited_s = time.perf_counter() - began
        return lambda: waited_s
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    return lambda: before.elapsed_time(after) / 1000    # from ms


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 1 the machine failed us, 2 the user's mistake."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options = read_options(Options, arguments)
        if not (1e5 <= options.params <= 1e12 and options.tokens >= 1 and options.repeats >= 1):
            raise UserError("params must lie between 1e5 and 1e12, tokens and repeats must be 1 or more")
        try:
            Path(options.out).mkdir(parents=True)
        except FileExistsError as error:
            raise UserError(f"out={options.out} exists already: name a folder that can be made and removed") from error
        except OSError as error:
            raise UserError(f"out={options.out} cannot be made ({error.strerror}): name a folder on the disk to be measured, "
                              f"which can be made and removed") from error
        try:
            bench(options)
        finally:
            shutil.rmtree(options.out, ignore_errors=True)
    except UserError as error:
        print(f"bench/checkpoint.py: {error}", file=sys.stderr)
        return 2
    except (MachineError, OSError) as error:
        print(f"bench/checkpoint.py: {error}", file=sys.stderr)
        return 1
    return 0


def bench(options: Options) -> None:
    """Print the table. Raises MachineError where a save fails."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = Path(options.out)
    config = Config(run=path.name, out=str(path.parent), steps=1, model=model_of(options.params, options.tokens),
                    data=DataConfig(dir="none", mixture={"none": 1.0}, tokenizer="gpt2", tokens_per_step=options.tokens,
                                    micro_batch=1), optim=optim.OptimConfig(lr=1e-4))
    training, world = Training(config, device), World(0, 0, 1, device)
    saver = TimedSaver(path, CheckpointConfig(every=1, keep=1, best=False), world, {})
    gib = sum(t.numel() * t.element_size() for t in training.tensors.values()) / 2**30
    print(f"{config.model.params_total:,} parameters, {gib:.2f} GiB a save, steps of {options.tokens} tokens on {device}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    saver.prepare(training.tensors)     # as train.py does: a run's first save is many steps away
    for _ in range(5):
        training.step(saver)
    print("            save s  blocked s   of save   copy s    cpu s   step alone s  beside s   ratio")
    rows = [one_save(training, saver, config, number) for number in range(options.repeats + 1)]
    for name, row in zip(["first", *map(str, range(1, options.repeats + 1))], rows, strict=True):
        print(line(name, row))
    print(line("median", [statistics.median(column) for column in zip(*rows[1:], strict=True)]))

    began = time.perf_counter()
    found = latest(path), read_manifest(latest(path))
    verified = time.perf_counter()
    load(*found, training.tensors, world)
    print(f"restore: {verified - began:.2f} s to verify ({gib / (verified - began):.2f} GiB/s), "
          f"{time.perf_counter() - verified:.2f} s to load")


def one_save(training: Training, saver: TimedSaver, config: Config, number: int) -> tuple[float, ...]:
    """Steps alone, then steps beside a save until it is whole: the columns of the table."""
    alone = [training.step(saver)[0] for _ in range(3)]
    began = time.perf_counter()
    saver.save(number + 1, training.tensors, {}, config)
    blocked, beside = time.perf_counter() - began, []
    while saver.is_busy() or not beside:
        step_s, waited = training.step(saver)
        blocked += waited
        beside.append(step_s - waited)
    saver.finish()
    beside = beside[:-1] or beside      # the last one had company in part of it alone
    alone += [training.step(saver)[0] for _ in range(3)]
    alone_s, beside_s = statistics.median(alone), statistics.median(beside)
    return saver.save_s, blocked, blocked / saver.save_s, saver.copy_s, saver.cpu_s, alone_s, beside_s, beside_s / alone_s


def line(name: str, row: tuple[float, ...]) -> str:
    save_s, blocked, share, copy_s, cpu_s, alone, beside, ratio = row
    return (f"{name:>8} {save_s:9.2f} {blocked:10.4f} {share:9.2%} {copy_s:8.2f} {cpu_s:8.2f} {alone:14.3f} {beside:9.3f} "
            f"{ratio:7.3f}")


def model_of(params: float, tokens: int) -> GPTConfig:
    """The model whose width is a multiple of a head and whose size is nearest to `params`."""
    sizes = [GPTConfig(n_layer=n, n_head=n, n_embd=n * HEAD, n_ffn=n * HEAD * 8 // 3 // 16 * 16, n_ctx=tokens)
             for n in range(1, 129)]
    return min(sizes, key=lambda c: abs(c.params_total - params))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
