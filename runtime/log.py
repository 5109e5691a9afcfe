"""Mirror a run's rows on W&B or TensorBoard.

Each dashboard has open(config, resume_step), write(row), roll_back(to_step), close(); any of them may raise what its package
raises, and whoever calls them decides what that costs.


meter: Sample how full, how busy, how hungry this process's GPU is.

profiler: Trace a few training steps of every rank for Perfetto and TensorBoard.

`profile=10:15` writes, for each rank r of the run, to out/<run>/profile/:

    trace_rank<r>.pt.trace.json.gz      of ui.perfetto.dev; of `tensorboard --logdir out/<run>/profile` with torch-tb-profiler
    memory_rank<r>.pickle               GPU only: every allocation, of pytorch.org/memory_viz

Tracing changes no number that training computes; the traced steps are slower, the first of them most.


metrics: Record what a run did: a row a step, a line for people.

metrics.jsonl is the ground truth (its rows: runtime/rows.py); the console, W&B and TensorBoard mirror it. Nothing here
parses a log again.

"""

import gzip
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from runtime.cli import UserError
from runtime.config import Config
from runtime.rows import kept, metrics_rows, parse, read_bytes, read_rows, to_line, undone, write_atomically, write_json

# ----------------------------------------------------------------------------------------------------------- dashboards

def numbers(row: dict) -> dict[str, float]:
    """What a dashboard draws of a row: its numbers under its kind, a 1 for an event and for a verdict that is not OK."""
    if row["kind"] == "event":
        return {f"event/{row['event']}": 1}
    marks = {f"event/{row['verdict']}": 1} if row.get("verdict", "OK") != "OK" else {}
    return {f"{row['kind']}/{k}": v for k, v in row.items() if isinstance(v, (int, float)) and k != "step"} | marks


class Wandb:
    def open(self, config, resume_step: int) -> None:
        self.run = import_module("wandb").init(project="nanofp8", name=config.run, id=config.run, resume="allow",
                                          dir=str(config.run_dir), config=config.to_dict())
        self.run.define_metric("step")
        for kind in ("train", "val", "event"):      # W&B's own step refuses to go back, ours does
            self.run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, row: dict) -> None:
        self.run.log({**numbers(row), "step": row["step"]})

    def roll_back(self, to_step: int) -> None:
        """What was sent stays: the curve goes back and begins again at to_step."""

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    def open(self, config, resume_step: int) -> None:
        import_module("tensorboard")
        self.folder = str(config.run_dir / "tensorboard")
        self._begin(resume_step)

    def _begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(self.folder, purge_step=step + 1)       # hides what came later before

    def write(self, row: dict) -> None:
        for key, value in numbers(row).items():
            self.writer.add_scalar(key, value, row["step"])

    def roll_back(self, to_step: int) -> None:
        self.writer.close()
        self._begin(to_step)

    def close(self) -> None:
        self.writer.close()


DASHBOARDS = {"wandb": Wandb, "tensorboard": TensorBoard}      # name of the package -> what writes to it


# ---------------------------------------------------------------------------------------------------------------- meter

PERIOD = 1.0        # seconds between samples; NVML's own utilisation averages over 1/6 to 1 s


class Meter:
    """Reads NVML in a thread of its own, so that a slow driver never holds up a step; without NVML it has nothing to tell.

    NVML comes with the driver, its Python side from `pip install nvidia-ml-py`."""

    def __init__(self, device: torch.device, period: float = PERIOD):
        self._latest: dict[str, float] = {}
        self._closed = threading.Event()
        if device.type == "cuda":
            # NVML counts all GPUs of the machine, CUDA_VISIBLE_DEVICES those of this process: the uuid means the same to both.
            uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
            if uuid is not None:
                threading.Thread(target=self._sample, args=(f"GPU-{uuid}".replace("GPU-GPU-", "GPU-"), period), name="meter",
                                 daemon=True).start()

    def read(self) -> dict[str, float]:
        """The latest sample: gpu_mem_pct and gpu_util_pct in percent, gpu_power_w in watts; what this GPU does not tell is
        missing, and {} means nothing to tell."""
        return dict(self._latest)

    def close(self) -> None:
        self._closed.set()

    def _sample(self, uuid: str, period: float) -> None:
        try:
            nvml = import_module("pynvml")
            nvml.nvmlInit()
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:       # no such package, no driver, a container without NVML, a slice of a GPU: no row, no error
            return
        while not self._closed.is_set():
            sample = {}
            for name, read in (("gpu_mem_pct", lambda: _memory_percent(nvml.nvmlDeviceGetMemoryInfo(gpu))),
                               ("gpu_util_pct", lambda: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
                               ("gpu_power_w", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000)):     # NVML says milliwatts
                try:
                    sample[name] = read()
                except Exception:       # noqa: S112 - not supported by this GPU, or lost for a moment
                    continue
            self._latest = sample
            self._closed.wait(period)


def _memory_percent(memory) -> float:
    return round(100 * memory.used / memory.total, 2)


# ------------------------------------------------------------------------------------------------------------- profiler

MEMORY_EVENTS = 100_000     # of the allocator that a snapshot holds at most: about 100 MB


class Profiler:
    """Traces steps first to last (counted from 1, as rows are), once; every rank its own. None of its faults ends a run.

    A run resumed in between traces the rest; one that ends in between writes what there is by close()."""

    def __init__(self, steps: tuple[int, int] | None, run_dir: Path, world, say: Callable[[str], None] = print):
        self.first, self.last = steps or (0, -1)
        self.folder, self.rank, self.is_main, self.say = run_dir / "profile", world.rank, world.is_main, say
        self.on_gpu = world.device.type == "cuda"
        self._trace = self._range = None
        self._begun = self._step = 0        # the first step that was traced, and the latest

    def begin(self, step: int) -> None:
        """Before the step."""
        if self._trace is None and not self._begun and self.first <= step <= self.last:
            self._begun = step
            self._guarded(self._start)
        if self._trace is not None:
            self._step = step
            self._range = record_function(f"ProfilerStep#{step}")       # the name by which TensorBoard tells steps apart
            self._range.__enter__()

    def end(self, step: int) -> None:
        """After the step; after the last one the files are written, which takes seconds for a large model."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._trace is not None and step >= self.last:
            self._guarded(self._write, step)

    def close(self) -> None:
        """Write what there is of a trace that the run's end cuts short."""
        self.last = min(self.last, self._step)
        self.end(self._step)

    def _start(self) -> None:
        if self.on_gpu and hasattr(torch.cuda.memory, "_record_memory_history"):    # private, yet the documented way
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        trace = profile(activities=activities, record_shapes=True)
        trace.start()
        self._trace = trace

    def _write(self, step: int) -> None:
        trace, self._trace = self._trace, None
        trace.stop()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.on_gpu and hasattr(torch.cuda.memory, "_dump_snapshot"):
                torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_rank{self.rank}.pickle"))
        finally:
            if self.on_gpu and hasattr(torch.cuda.memory, "_record_memory_history"):
                torch.cuda.memory._record_memory_history(enabled=None)
        path = self.folder / f"trace_rank{self.rank}.pt.trace.json.gz"      # the end by which TensorBoard finds it
        plain, packed = (self.folder / f".trace_rank{self.rank}.{end}" for end in ("json", "gz"))
        try:
            trace.export_chrome_trace(str(plain))
            with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target)
            os.replace(packed, path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        if self.is_main:
            self.say(f"profile: steps {self._begun} to {step} -> {self.folder}/ (open in ui.perfetto.dev)")

    def _guarded(self, act: Callable, *arguments) -> None:
        try:
            act(*arguments)
        except Exception as error:      # a full disk, a second profiler, a driver without CUPTI: no reason to end a run
            self._trace = None
            self.say(f"profile: rank {self.rank} wrote no trace: {type(error).__name__}: {error}")


# -------------------------------------------------------------------------------------------------------------- metrics

# Dense BF16 and FP8 peaks, FLOP/s, by a part of the name that the driver reports; the first match counts, so the
# slower variants of a name stand before it. NVIDIA data sheets.
PEAK_FLOPS = {
    "H100 PCIe": (756e12, 1513e12), "H100 NVL": (835e12, 1671e12), "H200 NVL": (836e12, 1671e12),
    "H100": (989.4e12, 1978.9e12), "H200": (989.4e12, 1978.9e12), "GH200": (989.4e12, 1978.9e12),
    "GB200": (2500e12, 5000e12), "B200": (2250e12, 4500e12),
    "A100": (312e12, None), "L40S": (362e12, 733e12), "RTX 4090": (165.2e12, 330.3e12),
}
WARM_UP_STEPS = 3       # after each start: compilation and cold caches, not the speed of training
# What env.json tells of the environment: these names, and the prefixes' own unless a name sounds like a secret.
VARIABLES = {"CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG",
             "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "WORLD_SIZE",
             "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "GLOO_SOCKET_IFNAME",
             "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT", "PYTHONHASHSEED", "WANDB_MODE"}
PREFIXES = ("NCCL_", "TORCH_", "TORCHINDUCTOR_")
SECRET = re.compile("key|token|secret|pass|auth|cred", re.IGNORECASE)


def peak_flops(device_name: str) -> tuple[float, float | None] | None:
    """(BF16, FP8) peak FLOP/s of a GPU by its name, or None for one that the table does not know."""
    names = sorted(PEAK_FLOPS, key=len, reverse=True)       # "GH200" before "H200"
    return next((PEAK_FLOPS[name] for name in names if name.lower() in device_name.lower()), None)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = next((line.partition(":")[2].strip() for line in read_bytes("/proc/cpuinfo").decode(errors="replace").splitlines()
                  if line.startswith("model name")),
                 platform.processor() or platform.machine())
    return f"cpu {model}, {torch.get_num_threads()} threads"


def environment(device: torch.device, root: Path) -> dict:
    """Where a run happened, for env.json: commit, uncommitted changes, versions, hardware, command."""
    return {
        "command": shlex.join(sys.argv).replace(f"{root}/", ""),    # the same wherever the repository lies
        "t_start": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_dirty": bool(_git(root, "status", "--porcelain")), "git_diff": _git(root, "diff", "HEAD"),
        "python": platform.python_version(), "platform": platform.platform(), "device": device_name(device),
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        **{name: _version(name) for name in ("torch", "torchao", "numpy", "triton")},
        "variables": {name: value for name, value in sorted(os.environ.items())
                      if name in VARIABLES or name.startswith(PREFIXES) and not SECRET.search(name)},
    }


def write_environment(path: Path, device: torch.device, root: Path) -> None:
    """env.json: where the run goes on now, yet t_start stays that of its very first start.

    A prediction counts only if it is older than that. Raises UserError where the file no longer tells it."""
    first = {}
    if path.exists():
        try:
            first = {"t_start": json.loads(path.read_text())["t_start"]}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}), so it no longer tells when the run was "
                              f"begun: restore it, or choose another run=") from error
    write_json(path, environment(device, root) | first)


class Log:
    """Writes one run's rows. Only the main process has one.

    A branch's begin after its first step; the rows before are its parent's (parent_run in summary.json). Neither a disk
    without room nor a dashboard that is down ends a run: rows wait for room, as does the relabelling of a rollback, which
    needs room for a second copy of the file; the dashboard is left out. A start without room raises OSError."""

    def __init__(self, config: Config, resume_step: int, total_steps: int):
        self.config, self.total_steps = config, total_steps
        self.path = config.run_dir / "metrics.jsonl"
        self._live = sys.stdout.isatty()
        self._open_line = False
        self._steps = 0                     # done since this start
        self._seconds: list[float] = []     # of each of them, warm-up left out
        self._is_waiting = False            # for room
        self._rewrite(kept(metrics_rows(read_rows(self.path)), resume_step))
        self._put()
        self._mirrors = {name: DASHBOARDS[name]() for name in config.log.to}
        self._to_mirrors("open", config, resume_step)

    def step(self, row: dict) -> None:
        """One optimizer step: a row for machines, now and then a line for people."""
        self._steps += 1
        self._write({"kind": "train", **row, "since_start": self._steps})
        if self._steps > WARM_UP_STEPS:
            self._seconds.append(row["step_s"])
        self._progress(row)

    def validation(self, row: dict) -> None:
        """A step that has its row keeps that one: the last step is validated again after a kill before the summary."""
        if not self.has_validation(row["step"]):
            self._write({"kind": "val", **row})
            self._validated.add(row["step"])
        by_source = "  ".join(f"{name} {loss:.4f}" for name, loss in row["sources"].items())
        self.say(f"step {row['step']}: validation loss {row['loss']:.4f}   ({by_source})")

    def has_validation(self, step: int) -> bool:
        return step in self._validated

    def event(self, row: dict) -> None:
        """What is neither a step nor a validation: its name under "event", the step, whatever else there is to tell."""
        self._write({"kind": "event", **row})

    def roll_back(self, to_step: int, row: dict) -> None:
        """Relabel what came after `to_step` as undone and note the event `row`; a kill leaves all of it or nothing."""
        row = {"kind": "event", **row}
        file, on_disk = self._file, read_bytes(self.path) if self._file else b""
        self._rewrite([*undone(metrics_rows(parse(on_disk + self._unwritten)), to_step), row])
        self._flush()
        if file:
            with suppress(OSError):     # all that it held is in the new one
                file.close()
        self._to_mirrors("roll_back", to_step)
        self._to_mirrors("write", row)

    def say(self, text: str) -> None:
        """A line for people that stays."""
        self._print(("\n" if self._open_line else "") + text)
        self._open_line = False

    def _print(self, text: str, end: str = "\n") -> None:
        with suppress(OSError):     # a terminal that is gone, or a full disk under its log, must not end a run
            print(text, end=end, flush=True)

    def close(self) -> None:
        if self._open_line:
            self._print("")
        self._flush()
        if self._unwritten:
            on_disk = [] if self._file else metrics_rows(read_rows(self.path))
            self.say(f"{self.path}: the last {self._unwritten.count(10) - len(on_disk)} rows are lost, there was no room for them"
                     + ("" if self._file else "; steps that a rollback undid still stand in it as if they counted"))
        if self._file:
            self._file.close()
        self._to_mirrors("close")

    def _rewrite(self, rows: list[dict]) -> None:
        """Make `rows` what the next _put() has to replace the file by; until it succeeds the old file stays as it is."""
        self._file, self._unwritten = None, b"".join(map(to_line, rows))
        self._validated = {row["step"] for row in rows if row["kind"] == "val"}

    def _write(self, row: dict) -> None:
        self._unwritten += to_line(row)
        self._flush()
        self._to_mirrors("write", row)

    def _put(self) -> None:
        """Put what is unwritten on the disk. Without an open file that is the whole of a new one."""
        if self._file is None:
            write_atomically(self.path, self._unwritten)
            self._file, self._unwritten = open(self.path, "ab", buffering=0), b""   # noqa: SIM115 - close() ends it
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten):]

    def _flush(self) -> None:
        try:
            self._put()
            self._is_waiting = False
        except OSError as error:
            if not self._is_waiting:
                self.say(f"{self.path}: {error.strerror}; rows wait for room, training goes on")
            self._is_waiting = True

    def _to_mirrors(self, verb: str, *arguments) -> None:
        for name, mirror in list(self._mirrors.items()):
            try:
                getattr(mirror, verb)(*arguments)
            except Exception as error:      # whatever a package of someone else's may raise
                del self._mirrors[name]
                self.say(f"log.to={name}: {type(error).__name__}: {error}; from here on only metrics.jsonl is written")

    def _progress(self, row: dict) -> None:
        step, last = row["step"], row["step"] == self.total_steps
        if not self._live and not last and step % self.config.log.every and self._steps != 1:
            return
        recent = self._seconds[-50:] or [row["step_s"]]
        left = (self.total_steps - step) * sum(recent) / len(recent)
        tok_per_s = self.config.data.tokens_per_step * len(recent) / sum(recent)
        line = (f"{self.config.run}  step {step}/{self.total_steps}  {step / self.total_steps:4.0%}  loss {row['loss']:.4f}  "
                f"{_si(tok_per_s)} tok/s  {_duration(left)} left" + ("" if row["verdict"] == "OK" else f"  {row['verdict']}"))
        self._print(f"\r\x1b[2K{line}" if self._live else line, end="" if self._live else "\n")
        self._open_line = self._live


def validation_losses(path: Path) -> dict[int, float]:
    """Step -> validation loss of a metrics.jsonl, without what a rollback undid or what was not finite."""
    return {row["step"]: row["loss"] for row in metrics_rows(read_rows(path))
            if row["kind"] == "val" and isinstance(row.get("loss"), float)}


def check_mirrors(config: Config) -> None:
    """Raise UserError where a logger in log.to is not installed, before anything is written."""
    for name in config.log.to:
        _package(name)


def throughput(rows: list[dict], tokens_per_step: int, flops_per_token: int, peak_bf16: float | None) -> dict:
    """Speed over a run's train rows, the warm-up after each start left out; mfu_bf16 is null without a known peak.

    flops_per_token as GPT.counts() defines it; mfu_bf16 divides by the dense BF16 peak of all GPUs together, whatever
    the precision of the matmuls, so that a BF16 and an FP8 run are on one scale.
    """
    train = [row for row in rows if row["kind"] == "train"]
    steady = [row["step_s"] for row in train if row["since_start"] > WARM_UP_STEPS]
    steady = sorted(steady or [row["step_s"] for row in train])     # a run of three steps has nothing else to show

    def quantile(q: float) -> float:
        return steady[min(len(steady) - 1, int(q * len(steady)))]

    median = quantile(0.5)
    flops = flops_per_token * tokens_per_step / median
    first = [row["step_s"] for row in train if row["since_start"] == 1]
    return {
        "tok_per_s_median": tokens_per_step / median, "tok_per_s_p10": tokens_per_step / quantile(0.9),
        "tok_per_s_p90": tokens_per_step / quantile(0.1), "step_s_median": median,
        "compile_s": max(0.0, sum(first) - median * len(first)), "tflops_median": flops / 1e12,
        "mfu_bf16": flops / peak_bf16 if peak_bf16 else None,
    }


def pair_id(config: Config) -> str:
    """What a BF16 and an FP8 run must share to be compared: all that the weights depend on, except the fp8 section.

    A branch ends in the weights of the same run from scratch, so where it starts from is no part of it; the weights that an
    imported model came with are."""
    is_branch = config.parent is None or config.parent[1] > 0
    shared = {k: v for k, v in config.identity().items() if not k.startswith("fp8.") and not (k == "start_from" and is_branch)}
    return digest({**shared, "data.micro_batch": config.data.micro_batch})[:16]


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _package(name: str):
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"log.to={name} needs the package {name}: pip install {name}, or leave it out "
                          f"(metrics.jsonl is written anyway)") from error


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None     # a copy without git: env.json says null
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _si(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    m, s = divmod(round(seconds), 60)
    h, m = divmod(m, 60)
    return f"{h}h{m:02d}m" if h else f"{m}m{s:02d}s"
