"""Record a run: a row per step in metrics.jsonl (format: runtime/metrics_file.py), mirrored on the
console, W&B, trackio and TensorBoard; env.json, samples of the GPU, traces of some steps, speed
and MFU, the id that a BF16 and an FP8 run share."""

import gzip
import json
import os
import re
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median_high, median_low

import torch
from torch.profiler import ProfilerAction, profile

from lib.command import drop_output
from lib.errors import UserError
from lib.files import digest, read_bytes, read_rows, to_line, write_atomically
from lib.text import duration, si
from runtime.config import Config
from runtime.metrics_file import metrics_rows
from runtime.parallel import World

WARM_UP_STEPS = 3  # after each start, left out of every speed: compilation, cold caches
UNDONE = {
    "train": "undone",
    "val": "undone_val",
    "tasks": "undone_tasks",
}  # kind of a row -> its kind after a rollback


class Log:
    """Write one run's rows; only rank 0 has one. Starting it at `resume_step` drops the rows of
    later steps.

    On a full disk rows wait in memory and training goes on; a dashboard that raises is dropped.
    Raises OSError where a start, which writes the file anew, finds no room."""

    def __init__(self, config: Config, resume_step: int, meter: "Meter | None" = None):
        """meter: samples of the GPU for each step's row."""
        self.config = config
        self.path = config.run_dir / "metrics.jsonl"
        self._meter = meter
        self._steps = 0  # since this start
        # per full step, of the latest steps after the warm-up
        self._seconds: deque[float] = deque(maxlen=50)
        self._is_waiting = False
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed with the log
        self._rewrite(rows_up_to(metrics_rows(read_rows(self.path)), resume_step))
        self._dashboards: dict = {
            name: {"wandb": Wandb, "trackio": Trackio, "tensorboard": TensorBoard}[name]()
            for name in config.log.to
        }
        self._show("open", config, resume_step)

    def step(self, row: dict) -> None:
        """A training step: its row, and every log.every steps a line on the console."""
        self._steps += 1
        sample = self._meter.latest if self._meter else {}
        self._append({"kind": "train", **row, **sample, "since_start": self._steps})
        if self._steps > WARM_UP_STEPS:
            self._seconds.append(self._seconds_per_full_step(row))
        step = row["step"]
        is_last = step == self.config.total_steps
        if is_last or step % self.config.log.every == 0 or self._steps == 1:
            self.say(self._describe_step(row))

    def _describe_step(self, row: dict) -> str:
        """The console's line: how far, loss, speed and time left by the latest steps."""
        step, total = row["step"], self.config.total_steps
        seconds = self._seconds or [self._seconds_per_full_step(row)]
        step_s = sum(seconds) / len(seconds)
        steps_left = self.config.ramp.full_steps_between(step, total)
        loss = "none" if row["verdict"] == "NO_TARGET" else f"{row['loss']:.4f}"
        line = (
            f"{self.config.run}  step {step}/{total}  {step / total:4.0%}  loss {loss} "
            f" {si(self.config.data.tokens_per_step / step_s)} tok/s "
            f" {duration(steps_left * step_s)} left"
        )
        if row["verdict"] != "OK":
            line += f"  {row['verdict']}"
        return line

    def _seconds_per_full_step(self, row: dict) -> float:
        """Of a step that data.ramp cuts: what all parts of its full step take."""
        return row["step_s"] * self.config.ramp.place(row["step"] - 1).parts

    def validation(self, row: dict) -> None:
        """A validation. A step keeps its first row: the last step is validated again where a kill
        came before summary.json."""
        if row["step"] not in self.validated:
            self._append({"kind": "val", **row})
            self.validated[row["step"]] = row["loss"]
        by_source = "  ".join(f"{name} {loss:.4f}" for name, loss in row["sources"].items())
        self.say(f"step {row['step']}: validation loss {row['loss']:.4f}   ({by_source})")

    def tasks(self, row: dict) -> None:
        """Scores on eval.tasks."""
        self._append({"kind": "tasks", **row})
        self.scored.add(row["step"])
        scores = "  ".join(f"{name} {value:.4f}" for name, value in row["scores"].items())
        self.say(f"step {row['step']}: {scores}   ({duration(row['wall_s'])})")

    def event(self, row: dict) -> None:
        """Anything else: {"event": name, "step": step, ...}."""
        self._append({"kind": "event", **row})

    def roll_back(self, to_step: int, event: dict) -> None:
        """Relabel the rows after `to_step` as undone and add the event, in one atomic change of the
        file. On a full disk the file is cut behind the rows that stand, which needs no room, and
        the others wait."""
        rows = metrics_rows(read_rows(self.path, self._unwritten))
        rows = [
            row if row["step"] <= to_step else row | {"kind": UNDONE.get(row["kind"], row["kind"])}
            for row in rows
        ]
        rows.append({"kind": "event", **event})
        try:
            self._rewrite(rows)
        except OSError:
            self._cut(rows)
            self._flush()
        self._show("write", {"kind": "event", **event})

    def say(self, text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `| head` has ended, the run has not
            drop_output()
        except OSError:  # a terminal that is gone, a full disk under the log
            pass

    def close(self) -> None:
        self._flush()
        if self._unwritten:
            self.say(f"{self.path}: the last rows are lost, there was no room for them")
        self._file.close()
        self._show("close")

    def _append(self, row: dict) -> None:
        self._unwritten += to_line(row)
        self._flush()
        self._show("write", row)

    def _rewrite(self, rows: list[dict]) -> None:
        """Let the file hold `rows` alone."""
        write_atomically(self.path, b"".join(map(to_line, rows)))
        self._reopen()
        self._unwritten = b""
        self._note_results(rows)

    def _cut(self, rows: list[dict]) -> None:
        """Let the file hold those of the first of `rows` that it has already; the others wait."""
        lines = list(map(to_line, rows))
        n_kept = 0
        for line, line_on_disk in zip(lines, read_bytes(self.path).splitlines(True), strict=False):
            if line != line_on_disk:
                break
            n_kept += 1
        self._reopen()
        self._file.truncate(sum(map(len, lines[:n_kept])))
        self._unwritten = b"".join(lines[n_kept:])
        self._note_results(rows)

    def _reopen(self) -> None:
        self._file.close()
        # Stays open: on NFS each close sends the row to the server while the GPUs wait.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed with the log

    def _note_results(self, rows: list[dict]) -> None:
        # validation losses by step
        self.validated = {
            row["step"]: float(row["loss"] or "nan") for row in rows if row["kind"] == "val"
        }
        # steps with scores on eval.tasks
        self.scored = {row["step"] for row in rows if row["kind"] == "tasks"}

    def _flush(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._is_waiting = False
        except OSError as error:
            if not self._is_waiting:
                self.say(f"{self.path}: {error.strerror}; rows wait for room, training goes on")
            self._is_waiting = True

    def _show(self, verb: str, *arguments) -> None:
        for name, dashboard in list(self._dashboards.items()):
            try:
                getattr(dashboard, verb)(*arguments)
            except Exception as error:  # whatever its package raises
                del self._dashboards[name]
                self.say(
                    f"log.to={name}: {type(error).__name__}: {error}; from here on only"
                    " metrics.jsonl is written"
                )


class SilentLog:
    """The log of every rank but 0: it writes and says nothing."""

    validated: dict[int, float] = {}
    scored: set[int] = set()

    def step(self, row: dict) -> None:
        pass

    def validation(self, row: dict) -> None:
        pass

    def tasks(self, row: dict) -> None:
        pass

    def event(self, row: dict) -> None:
        pass

    def roll_back(self, to_step: int, event: dict) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def rows_up_to(rows: list[dict], step: int) -> list[dict]:
    """The rows to keep when a run resumes from `step`: up to the train row of that step, and the
    rows of other kinds directly behind it. The steps of train rows ascend: a rollback relabels
    them."""
    end = 0
    for i, row in enumerate(rows, 1):
        if row["kind"] == "train" and row["step"] <= step:
            end = i
    kinds = ("val", "tasks", "event")
    while end < len(rows) and rows[end]["kind"] in kinds and rows[end]["step"] == step:
        end += 1
    return rows[:end]


class Wandb:
    def open(self, config: Config, resume_step: int) -> None:
        # begun anew under its name it is another run
        begun = json.loads((config.run_dir / "env.json").read_text())["t_start"]
        self.run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "nanofp8"),
            name=config.run,
            resume="allow",
            id=f"{config.run}-{re.sub('[^0-9]', '', begun)}",
            dir=str(config.run_dir),
            config=asdict(config),
        )
        self.close = self.run.finish
        # W&B's own step refuses to go back, ours does
        self.run.define_metric("*", step_metric="step")

    # after a rollback the curve goes back and begins again: what was sent stays
    def write(self, row: dict) -> None:
        self.run.log({**numbers(row), "step": row["step"]})


class Trackio:
    def open(self, config: Config, resume_step: int) -> None:
        self.run = import_module("trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", "nanofp8"),
            name=config.run,
            resume="allow",
            config=asdict(config),
        )
        self.close = self.run.finish

    # as with W&B, a row of a step that was undone stays
    def write(self, row: dict) -> None:
        self.run.log(numbers(row), step=row["step"])


class TensorBoard:
    def open(self, config: Config, step: int) -> None:
        self.config, module = config, import_module("torch.utils.tensorboard")
        # hides later ones
        self.writer = module.SummaryWriter(str(config.run_dir / "tensorboard"), purge_step=step + 1)
        self.close = self.writer.close

    def write(self, row: dict) -> None:
        if row.get("event") == "rollback":
            self.close()
            self.open(self.config, row["to"])
        for key, value in numbers(row).items():
            self.writer.add_scalar(key, value, row["step"])


def numbers(row: dict) -> dict[str, float]:
    """What a dashboard plots of a row: kind/key for each number, a 1 for an event and for a verdict
    other than OK."""
    if row["kind"] == "event":
        return {f"event/{row['event']}": 1}
    marks = {f"event/{row['verdict']}": 1} if row.get("verdict", "OK") != "OK" else {}
    values = row | row.get("scores", {})
    return {
        f"{row['kind']}/{k}": v
        for k, v in values.items()
        if isinstance(v, (int, float)) and k != "step"
    } | marks


def check_mirrors(config: Config) -> None:
    """Raises UserError where the package of a dashboard in log.to is not installed; before anything
    is written."""
    missing = [name for name in config.log.to if find_spec(name) is None]
    if missing:
        raise UserError(
            f"log.to={missing[0]} needs its package: pip install {missing[0]}, or drop it:"
            " metrics.jsonl has all"
        )


class Meter:
    """Sample memory, utilisation and power of this process's GPU once a second by NVML (pip install
    nvidia-ml-py), in a thread, so that a slow driver delays no step. `latest`: gpu_mem_pct and
    gpu_util_pct in percent, gpu_power_w in watts, each where the GPU tells it."""

    def __init__(self, device: torch.device, period: float = 1.0):
        self.latest: dict[str, float] = {}
        self._is_closed = threading.Event()
        self.close = self._is_closed.set
        if device.type == "cuda":
            threading.Thread(
                target=self._sample, args=(device, period), name="meter", daemon=True
            ).start()

    def _sample(self, device: torch.device, period: float) -> None:
        total = torch.cuda.get_device_properties(device).total_memory
        reads = {
            "gpu_mem_pct": lambda: round(100 * torch.cuda.device_memory_used(device) / total, 2),
            "gpu_util_pct": lambda: float(torch.cuda.utilization(device)),
            # torch gives milliwatts
            "gpu_power_w": lambda: torch.cuda.power_draw(device) / 1000,
        }
        while not self._is_closed.wait(period):
            sample = {}
            for name, read in reads.items():
                # no package, a container without NVML, a GPU or a moment that does not tell it
                with suppress(Exception):
                    sample[name] = read()
            self.latest = sample


class Profiler:
    """Trace the steps of profile=, counted from 1, or what this start does of them, once on every
    rank, to run_dir/profile/trace_rank<r>.pt.trace.json.gz, for ui.perfetto.dev, or `tensorboard
    --logdir` with torch-tb-profiler."""

    def __init__(self, config: Config, world: World, say: Callable[[str], None]):
        self.folder = config.run_dir / "profile"
        self.world = world
        self.say = say
        self.first, self.last = config.profile_steps or (0, -1)
        self._trace: profile | None = None

    def begin(self, step: int) -> None:
        if self._trace is not None:
            self._trace.step_num = step - 1  # a rollback goes back
            self._trace.step()
        elif self.first <= step <= self.last:
            self._trace = profile(schedule=lambda n: ProfilerAction.RECORD, record_shapes=True)
            # begins a range ProfilerStep#<step>, by which TensorBoard tells steps
            self._trace.step_num = self.first = step
            self._trace.start()

    def end(self, step: int) -> None:
        if step >= self.last:
            self.close()

    def close(self) -> None:
        """Write what has been traced, which takes seconds for a large model."""
        if (trace := self._trace) is None:
            return
        self._trace, self.last = None, -1  # once is enough
        try:
            trace.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_trace(trace, self.folder / f"trace_rank{self.world.rank}.pt.trace.json.gz")
            if self.world.is_main:
                self.say(
                    f"profile: steps {self.first} to {trace.step_num} -> {self.folder}/ (open in"
                    " ui.perfetto.dev)"
                )
        except (OSError, RuntimeError) as error:  # such as a full disk, which ends no run
            self.say(
                f"profile: rank {self.world.rank} wrote no trace: {type(error).__name__}: {error}"
            )


def _write_trace(trace: profile, path: Path) -> None:
    """torch compresses a trace line by line where it is given the name of a .gz: half of the time
    of a tiny run that is traced."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "trace.json")
        trace.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target, 2**20)


# Dense (BF16, FP8) peaks in FLOP/s by a part of the name that the driver reports, the first that
# fits. NVIDIA data sheets.
PEAK_FLOPS = {
    "H100 PCIe": (756e12, 1513e12),
    "H100 NVL": (835e12, 1671e12),
    "H200 NVL": (836e12, 1671e12),
    "GH200": (989.4e12, 1978.9e12),
    "H200": (989.4e12, 1978.9e12),
    "H100": (989.4e12, 1978.9e12),
    "GB200": (2500e12, 5000e12),
    "B200": (2250e12, 4500e12),
    "A100": (312e12, None),
    "L40S": (362e12, 733e12),
    "RTX 4090": (165.2e12, 330.3e12),
}


def peak_flops(device_name: str) -> tuple[float, float | None] | None:
    """(BF16, FP8) peak FLOP/s of a GPU by its name; None where PEAK_FLOPS lacks it."""
    for name, peaks in PEAK_FLOPS.items():
        if name.lower() in device_name.lower():
            return peaks
    return None


def throughput(
    rows: list[dict],
    tokens_per_step: int,
    flops_per_token: int,
    peak_bf16: float | None,
    small_steps: int = 0,
) -> dict:
    """Speed over the train rows of a run, without the warm-up after each start and the first
    `small_steps`, which have fewer tokens. flops_per_token as
    GPT.counts() defines it. mfu_bf16 divides by `peak_bf16`, the dense BF16 peak of all GPUs
    together, whatever the precision of the matmuls."""
    train = [row for row in rows if row["kind"] == "train"]
    full = [row for row in train if row["step"] > small_steps]  # a branch has no rows of the first
    step_s = _typical_step_s(train, full)
    if full:
        tok_per_s = tokens_per_step / step_s
    else:
        tok_per_s = median_low(row["tok_per_s"] for row in train)
    flops = flops_per_token * tok_per_s
    first = [row["step_s"] for row in train if row["since_start"] == 1]
    return {
        "tok_per_s_median": tok_per_s,
        "step_s_median": step_s,
        "compile_s": max(0.0, sum(first) - step_s * len(first)),
        "tflops_median": flops / 1e12,
        "mfu_bf16": flops / peak_bf16 if peak_bf16 else None,
    }


def _typical_step_s(train: list[dict], full: list[dict]) -> float:
    """The median step. A run too short for steady steps, or without full ones, shows what it has.

    train: rows of all steps; full: those of steps with all their tokens."""
    steady = [row for row in full if row["since_start"] > WARM_UP_STEPS]
    return median_high(row["step_s"] for row in steady or full or train)


def lineage(config: Config, origin: dict | None = None) -> dict:
    """Where the weights began: another run's checkpoint, or (step 0) a model that was imported; all
    None from scratch. origin: the model that a branch's parent had gone on with."""
    if config.parent is None:
        return {"parent_run": None, "parent_step": None, "continued_from": None}
    run, step = config.parent
    if step == 0:  # its weights alone
        return {"parent_run": None, "parent_step": None, "continued_from": run}
    # older checkpoints do not name the run
    continued_from = origin.get("run", origin["folder"]) if origin else None
    return {"parent_run": run, "parent_step": step, "continued_from": continued_from}


def pair_id(config: Config, origin: dict | None = None) -> str:
    """A hash of all that the weights depend on except the fp8 section: a BF16 and an FP8 run are
    compared where it is equal.

    A branch has that of the run as a whole, in whose weights it ends. The run or imported model
    that the first of them took its weights from enters."""
    shared = {
        k: v for k, v in config.identity().items() if not k.startswith("fp8.") and k != "start_from"
    }
    if began_from := lineage(config, origin)["continued_from"]:
        shared["start_from"] = f"{began_from} at step 0"
    return digest({**shared, "data.micro_batch": config.data.micro_batch})[:16]
