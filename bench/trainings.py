"""Whole trainings by train.py, as a user starts them, on noise: losses, speed, memory against what
--plan says.

    python -m bench.trainings configs/gpt350m_bf16.py configs/gpt350m_fp8.py steps=60 out=out/try
    python -m bench.trainings configs/gpt125m_fp8.py steps=60 set=data.micro_batch=32

One training after the other, each a process, none of its settings but the data, the number of
steps and what `set` says, and each compiles anew, in a cache of its own. A line a training goes to
OUT/trainings.jsonl when it ends; it is not repeated unless it failed or had no time for a step, for
which the exit code is 1. Checkpoints are removed at its end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.noise import SETTINGS, write_noise
from bench.peak_memory import KEY
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import append_line, read_rows, to_line
from lib.machine import ROOT, killed_with_parent
from lib.values import FilePath
from model import GPT
from runtime.config import Config, load_config, positive
from runtime.log import peak_flops, throughput
from runtime.plan import plan

ROWS = "trainings.jsonl"
SUMMARY = "summary.json"  # of a run that has ended
TRAIN = "from bench.peak_memory import main; main()"  # a file for memory, then train.py's words
STOPPED = "stopped: its time was up"  # failure of a run that has the steps it had time for
SCHEMA_VERSION = 1  # rows without one are older and have the same keys


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """A line of trainings.jsonl."""

    schema_version: int = SCHEMA_VERSION  # of this list of keys
    name: str  # of the run
    config: str  # its file, as it was named
    overrides: list[str]  # section.key=value, beside the data's and the number of steps
    label: str  # bf16, or the recipe with what is set of it
    steps: int  # that were trained, fewer than asked for where time ran out
    tokens_per_step: int
    context: int  # T, tokens
    micro_batch: int | None  # sequences; null where the run chose and did not end
    is_compiled: bool
    losses: list[float] = field(default_factory=list)  # nats a token, of each step
    seconds: list[float] = field(default_factory=list)  # of each step
    tok_per_s: float | None = None  # median, without the first steps; null of a single step
    # the first step over the median of the others; null of a single step
    compile_s: float | None = None
    tflops: float | None = None  # 10^12 FLOPs of the model a second
    mfu_bf16: float | None = None  # of the dense BF16 peak; null on a CPU
    mem_gib: float | None = None  # most memory of tensors
    planned_gib: float | None = None  # what --plan said
    wall_s: float = 0.0  # of the whole process
    device: str | None = None
    failure: str | None = None  # why there are no numbers, or fewer steps

    @property
    def is_sound(self) -> bool:
        """Whether it trained as long as it was to, or had time to."""
        return self.steps > 0 and self.failure in (None, STOPPED)

    @property
    def trained_s(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds)

    @property
    def compiled_s(self) -> float | None:
        """Seconds of all steps without compilation; None of a single step, which is most of it."""
        return None if self.compile_s is None else self.trained_s - self.compile_s

    def seconds_of(self, steps: int) -> float | None:
        """Of so many steps at the median's pace, without compilation: what was stopped after fewer
        steps is compared by it."""
        return None if self.tok_per_s is None else steps * self.tokens_per_step / self.tok_per_s


def read_trainings(folder: Path) -> list[TrainingRow]:
    """The row of each training of a folder, of its last try. Raises UserError for one of another
    version."""
    rows = [training_from(values) for values in read_rows(folder / ROWS)]
    return list({row.name: row for row in rows}.values())


def training_from(values: Mapping[str, Any]) -> TrainingRow:
    """A line of trainings.jsonl. Raises UserError for one of another version."""
    version = values.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise UserError(
            f"a training of schema_version={version!r}, and this code reads {SCHEMA_VERSION}: read"
            " it with the code that wrote it, or give another out="
        )
    return TrainingRow(**values)


@dataclass(frozen=True, kw_only=True)
class Options:
    configs: tuple[FilePath, ...] = ()  # config files, the first words
    steps: int = 60
    set: tuple[str, ...] = ()  # section.key=value of all of them
    seconds: float = 600.0  # in all: each has its share, after which it is stopped as it is
    out: FilePath = "out/trainings"  # folder that receives the data, the runs and the rows
    gpu: str = "h200"  # whose memory --plan is asked for


@command(__doc__, Options, "configs")
def main(options: Options) -> int:
    """Returns the exit code: 1 where a training failed or had no time for a step."""
    problems = positive(options, "steps", "seconds")
    if problems:
        raise UserError(problems[0])
    if not options.configs:
        raise UserError("name a config file at least, such as configs/gpt350m_fp8.py")
    end = time.monotonic() + options.seconds
    rows = []
    for number, config in enumerate(options.configs):
        share_s = (end - time.monotonic()) / (len(options.configs) - number)
        row = train_on_noise(
            Path(config),
            list(options.set),
            steps=options.steps,
            folder=Path(options.out),
            limit_s=max(0.0, share_s),
            gpu=options.gpu,
        )
        print(training_text(row), flush=True)
        rows.append(row)
    return 0 if all(row.is_sound for row in rows) else 1


def train_on_noise(
    file: Path,
    overrides: Sequence[str],
    *,
    steps: int,
    folder: Path,
    limit_s: float,
    gpu: str = "h200",
    name: str | None = None,
) -> TrainingRow:
    """The row of one training of `steps` steps at most, from `folder` where it is there already.

    name: of the run; the config's own by default. Raises UserError for a config that cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {word.partition("=")[0] for word in overrides}
    settings = [word for word in SETTINGS if word.partition("=")[0] not in keys]
    words = [*settings, *overrides, f"steps={steps}"]
    words += [f"data.dir={folder}/data", f"out={folder}/runs", "log.every=1"]
    words += ["checkpoint.every=none", "eval.every=none"]
    words += [] if name is None else [f"run={name}"]
    config = load_config(file, words)
    for row in read_trainings(folder):
        if row.name == config.run and row.is_sound:
            return row
    # what a try that failed has left would be gone on with, or refused
    shutil.rmtree(config.run_dir, ignore_errors=True)
    write_noise(folder / "data", (steps + 2) * config.data.tokens_per_step)
    start = time.monotonic()
    memory_file = folder / f"{config.run}.memory.jsonl"
    memory_file.unlink(missing_ok=True)  # of an earlier try
    cache = folder / "compiled" / config.run
    output, is_cut = _train(file, words, memory_file, cache, limit_s)
    wall_s = time.monotonic() - start
    micro_batch = config.data.micro_batch
    row = TrainingRow(
        name=config.run,
        config=str(file),
        overrides=list(overrides),
        label=config.fp8.label,
        steps=0,
        tokens_per_step=config.data.tokens_per_step,
        context=config.model.n_ctx,
        micro_batch=None if micro_batch == "auto" else micro_batch,
        is_compiled=bool(config.parallel.compile),
        planned_gib=_planned_gib(plan(config, gpu)),
        wall_s=wall_s,
    )
    row = _with_results(row, config, memory_file)
    if not (config.run_dir / SUMMARY).is_file():
        last_lines = " ".join(output.split("\n")[-3:]).strip()
        failure = STOPPED if is_cut else last_lines[-400:]
        row = replace(row, failure=failure)
    append_line(folder / ROWS, to_line(asdict(row)))
    # nothing goes on from it, and those of five trainings at 1.5B would take 90 GB
    shutil.rmtree(config.run_dir / "checkpoints", ignore_errors=True)
    # of a training that was stopped it may hold a library that is half written
    shutil.rmtree(cache, ignore_errors=True)
    return row


def _train(
    file: Path, words: list[str], memory_file: Path, cache: Path, limit_s: float
) -> tuple[str, bool]:
    """What train.py prints, and whether it was stopped because its time was up; `cache`: the folder
    of what it compiles, or what others have compiled before would shorten its first step."""
    folders = [os.environ.get("PYTHONPATH"), str(ROOT)]
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, memory_file, file, *words],
        env={
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # trying a CPU's vectors takes a new cache 7 s
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "TORCHINDUCTOR_CACHE_DIR": str(cache.resolve()),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=killed_with_parent(),
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return output, False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a request to stop would save: minutes at 1.5B
        output, _ = process.communicate()
        return output, True
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise


def _planned_gib(lines: list[str]) -> float | None:
    sums = re.search(r"sum +([\d.]+) GiB", "\n".join(lines))
    return None if sums is None else float(sums[1])


def _with_results(row: TrainingRow, config: Config, memory_file: Path) -> TrainingRow:
    """The row with what the run's folder holds, of a run that was stopped too."""
    metrics = read_rows(config.run_dir / "metrics.jsonl")
    train_rows = [step for step in metrics if step["kind"] == "train"]
    if not train_rows:
        return row
    device = json.loads((config.run_dir / "env.json").read_bytes())["device"]
    row = replace(
        row,
        steps=len(train_rows),
        losses=[step["loss"] for step in train_rows],
        seconds=[step["step_s"] for step in train_rows],
        device=device,
        mem_gib=_most_memory_gib(config.run_dir / SUMMARY, memory_file),
    )
    if len(train_rows) == 1:  # it holds all of compilation
        return row
    peaks = peak_flops(device)
    flops_per_token = GPT.on_meta(config.model).counts()["flops_per_token"]
    peak_bf16 = peaks[0] if peaks else None
    speed = throughput(metrics, row.tokens_per_step, flops_per_token, peak_bf16)
    return replace(
        row,
        tok_per_s=speed["tok_per_s_median"],
        compile_s=speed["compile_s"],
        tflops=speed["tflops_median"],
        mfu_bf16=speed["mfu_bf16"],
    )


def _most_memory_gib(summary: Path, memory_file: Path) -> float | None:
    """Of a run that has ended as its summary says; else what was seen of it; None of a CPU."""
    if summary.is_file():
        return json.loads(summary.read_bytes())["mem_peak_gib"]
    rows = read_rows(memory_file)
    return rows[-1][KEY] if rows else None


def training_text(row: TrainingRow) -> str:
    """A line for people."""
    if not row.losses:
        return f"{row.name}: {row.failure}"
    speed = "" if row.tok_per_s is None else f", {row.tok_per_s:,.0f} tokens/s"
    memory = ""
    if row.mem_gib is not None and row.planned_gib is not None:
        memory = f", {row.mem_gib:.1f} GiB where --plan says {row.planned_gib:.1f}"
    failure = "" if row.failure is None else f"; {row.failure}"
    return (
        f"{row.name}: {row.steps} steps, loss {row.losses[0]:.3f} -> {row.losses[-1]:.3f}"
        f"{speed}{memory}{failure}"
    )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
