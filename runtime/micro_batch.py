"""Find the fastest micro-batch that fits, for data.micro_batch=auto.

Before the run each candidate is tried in a process of its own, on rank 0's device: whatever it allocates, compiles or
breaks ends with it. A trial may take 94 % of the memory that is free (the allocator refuses the rest), trains a few
micro-batches as the run will, then passes one through the model as the evaluation in BF16 does, uncompiled and hence the
hungrier of the two at large micro-batches. What a trial compiled the run finds in the compiler's cache.

A run of several ranks is searched for with the model whole on one GPU, which needs more memory than its share.
"""

import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from runtime import fp8, parallel
from runtime.build import build
from runtime.checkpoint import on_main
from runtime.config import Config, ConfigError, config_from_dict, read_config
from runtime.data import open_data
from runtime.folder import is_finished, tokenizer_of
from runtime.machine import MachineError, out_of_memory
from runtime.parallel import World
from runtime.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
SHARE = 0.94            # of the free memory that a trial may take; fragments of a long run and NCCL's buffers need the rest
FIRST_TOKENS = 8192     # of the first trial: fewer tokens at a time leave a GPU idle, and are tried only where these do not fit
GAIN = 1.01             # a larger micro-batch must be faster by this: less is noise, and memory is not for nothing
MEASURED_S = 0.5        # least duration of what is timed, of which the best of three counts


@dataclass(frozen=True)
class Trial:
    """How one micro-batch did: its speed and peak memory, or why there is none."""
    tok_per_s: float = 0.0
    peak_gib: float = 0.0
    failure: str | None = None      # in words
    is_memory: bool = False         # it failed for want of memory: a smaller one may do


def resolve(config: Config, world: World) -> Config:
    """`config` with a number in data.micro_batch, the same on all ranks: all of them call this together, before train().

    A run that was begun keeps the number in its config.json as long as the ranks can share a step by it. Raises ConfigError
    where no candidate fits or the run would be refused anyway, MachineError where a trial breaks for another reason."""
    if config.data.micro_batch != "auto":
        return config
    return _with_number(config, on_main(world, lambda: _decide(config, world)))


def candidates(config: Config, size: int) -> list[int]:
    """Powers of two and three times them by which `size` ranks can share a step, ascending. Raises ConfigError for none."""
    most = config.accumulation(size)        # sequences per rank
    numbers = sorted({odd * 2**k for odd in (1, 3) for k in range(most.bit_length())})
    numbers = [n for n in numbers if n <= most and _is_possible(config, n, size)]
    if not numbers:
        raise ConfigError(f"data.micro_batch=auto finds none by which {size} ranks could share data.tokens_per_step="
                          f"{config.data.tokens_per_step} with fp8.recipe={config.fp8.recipe}: make it a multiple of "
                          f"{32 * config.model.n_ctx * size}")
    return numbers


def search(numbers: list[int], first: int, attempt: Callable[[int], Trial], say: Callable[[str], None] = print) -> int | None:
    """The fastest of `numbers` that fits, the smaller one where two differ by less than GAIN; None where none fits.

    Upwards from numbers[first], until one fails or two in a row bring nothing; where not even that one fits, downwards from
    there. Raises MachineError where the first trial fails for another reason than memory."""
    tried: dict[int, Trial] = {}

    def fits(n: int) -> bool:
        trial = attempt(n)
        say(f"data.micro_batch=auto: {n:4d} sequences: " + (trial.failure or f"{trial.tok_per_s:,.0f} tokens/s, "
                                                            f"{trial.peak_gib:.2f} GiB"))
        if trial.failure is None:
            tried[n] = trial
        elif not tried and not trial.is_memory:
            raise MachineError(f"data.micro_batch=auto cannot be found, {trial.failure}: give a number, such as "
                               f"data.micro_batch={n}")
        return trial.failure is None

    best, in_vain = 0.0, 0
    for n in numbers[first:]:
        if not fits(n):
            break
        in_vain = in_vain + 1 if tried[n].tok_per_s < best * GAIN else 0
        best = max(best, tried[n].tok_per_s)
        if in_vain == 2:
            break
    if not tried:
        next((n for n in reversed(numbers[:first]) if fits(n)), None)
    best = max((trial.tok_per_s for trial in tried.values()), default=0.0)
    return min((n for n, trial in tried.items() if trial.tok_per_s * GAIN > best), default=None)


def _decide(config: Config, world: World) -> int:
    finished = is_finished(config)      # a folder that is another run's is told of now, not after minutes
    if (config.run_dir / "config.json").exists():
        n = read_config(config.run_dir).data.micro_batch
        if finished or _is_possible(config, n, world.size):
            print(f"data.micro_batch=auto: {n}, which {config.run_dir} was begun with", flush=True)
            return n
    try:
        open_data(config, load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer)).sha256)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    numbers, end = candidates(config, world.size), time.monotonic() + config.parallel.start_timeout
    first = next((i for i, n in enumerate(numbers) if n * config.model.n_ctx >= FIRST_TOKENS), 0)

    def say(line: str) -> None:
        print(line, flush=True)

    n = search(numbers, first, lambda n: try_one(_alone(_with_number(config, n)), world.device, end), say)
    if n is None:
        remedy = ("with parallel.recompute=true or model.loss_chunk=1024" if world.size == 1 else
                  f"all the same, for it was tried with the model whole on one GPU, which {world.size} ranks may share")
        raise ConfigError(f"data.micro_batch=auto found none that fits into the memory of {world.device}, not even {numbers[0]}: "
                          f"give data.micro_batch={numbers[0]} {remedy}")
    say(f"data.micro_batch=auto: {n} it is. A BF16/FP8 pair needs one number for both: give the other run data.micro_batch={n}")
    return n


def _with_number(config: Config, n: int) -> Config:
    return replace(config, data=replace(config.data, micro_batch=n))


def _is_possible(config: Config, n: int, size: int) -> bool:
    try:
        return _with_number(config, n).accumulation(size) > 0
    except ConfigError:     # it does not divide a step, or FP8 has no tiles for it
        return False


def _alone(config: Config) -> Config:
    """The same computation in one process."""
    return replace(config, parallel=replace(config.parallel, replicate=1, shard=None), fp8=replace(config.fp8, all_gather=False))


# ------------------------------------------------------------------------------------------------------------ one trial

def try_one(config: Config, device: torch.device, end: float) -> Trial:
    """Measure `config` in a process of its own, which ends with this one and by time.monotonic() `end` at the latest.

    Raises ConfigError where the run would be refused whatever its micro-batch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    job = json.dumps({"config": config.to_dict(), "device": str(device)})
    theirs, ours = os.pipe()        # the child waits for the end of this pipe, which comes when this process is no more
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen([sys.executable, "-P", "-m", "runtime.micro_batch", job], stdin=theirs, stdout=subprocess.PIPE,
                                 stderr=errors, env=environment)
        try:
            os.close(theirs)
            out, _ = child.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Trial(failure="no answer before parallel.start_timeout was over")
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
            os.close(ours)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    answer = next((json.loads(line) for line in reversed(out.splitlines()) if line.startswith(b"{")), None)
    if answer is None:
        is_killed = child.returncode == -9      # by the kernel, for memory: nobody else would
        return Trial(failure="does not fit" if is_killed else f"the trial ended with exit code {child.returncode} "
                     f"({said[-1][:300] if said else 'it said nothing'})", is_memory=is_killed)
    if "mistake" in answer:
        raise ConfigError(answer["mistake"])
    return Trial(**answer)


def measure(config: Config, device: torch.device) -> Trial:
    """Train a few micro-batches of random tokens as the run will; tokens/s of forward and backward, peak memory.

    The optimizer's part of a step is the same for any micro-batch: it runs once, for its memory, untimed."""
    _limit_memory(device)
    world = World(0, 0, 1, device)
    built = build(config, world)
    model, m, n = built.model, config.model, config.data.micro_batch
    with torch.no_grad():       # of the right size and no zeros, which a GPU multiplies faster; the run draws its own on the CPU
        for p in model.parameters():
            p.normal_(0.0, math.sqrt(0.4 / m.n_embd)) if p.ndim > 1 else p.fill_(1.0)
    model.init_buffers()
    fp8.weights_changed(model)
    x, y = torch.randint(m.vocab_size, (2, n, m.n_ctx), device=device)

    def seconds(micro_steps: int) -> float:
        started = time.perf_counter()
        for _ in range(micro_steps):
            (model(x, y).sum() * built.loss_scale).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    seconds(2)      # compiled, and once with gradients to add to
    parallel.clip_gradients(model, config.optim.clip)
    built.optimizer.step()
    built.optimizer.zero_grad()
    fp8.weights_changed(model)
    repeats = max(2, math.ceil(MEASURED_S / seconds(1)))
    best = min(seconds(repeats) for _ in range(3)) / repeats
    built.optimizer.zero_grad()
    with torch.no_grad(), fp8.in_bf16(model):
        model(x, y).tolist()
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)      # Linux counts in KiB
    return Trial(n * m.n_ctx / best, peak / GIB)


def _limit_memory(device: torch.device) -> None:
    """Have the allocator refuse what would leave too little; on a CPU the kernel, to which this process offers itself first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(SHARE * free / total, device)
        return
    with suppress(OSError):     # no such file: not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")
        free = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [limit for limit in (int(SHARE * free), soft) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def main(argument: str) -> int:
    """The child: a job as JSON in, one line of JSON out, on what was standard output before others could write to it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()     # the parent is gone
    job = json.loads(argument)
    config, device = config_from_dict(job["config"]), torch.device(job["device"])
    try:
        answer = asdict(measure(config, device))
    except ConfigError as error:
        answer = {"mistake": str(error)}
    except (RuntimeError, MemoryError, OSError) as error:
        if out_of_memory(error, config, World(0, 0, 1, device)) is None:
            raise
        answer = asdict(Trial(failure="does not fit", is_memory=True))
    print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
