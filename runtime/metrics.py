"""Record what a run did: a row a step, a line for people, a summary at the end.

metrics.jsonl is the ground truth; the console, W&B and TensorBoard mirror it. Nothing here parses a log again.
"""

import hashlib
import importlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from runtime.config import Config, ConfigError

# Dense BF16 and FP8 peaks, FLOP/s, by a part of the name that the driver reports; the first match counts, so the
# slower variants of a name stand before it. NVIDIA data sheets.
PEAK_FLOPS = {
    "H100 PCIe": (756e12, 1513e12), "H100 NVL": (835e12, 1671e12), "H200 NVL": (836e12, 1671e12),
    "H100": (989.4e12, 1978.9e12), "H200": (989.4e12, 1978.9e12), "GH200": (989.4e12, 1978.9e12),
    "GB200": (2500e12, 5000e12), "B200": (2250e12, 4500e12),
    "A100": (312e12, None), "L40S": (362e12, 733e12), "RTX 4090": (165.2e12, 330.3e12),
}
WARM_UP_STEPS = 3       # after each start: compilation and cold caches, not the speed of training


def peak_flops(device_name: str) -> tuple[float, float | None] | None:
    """(BF16, FP8) peak FLOP/s of a GPU by its name, or None for one that the table does not know."""
    names = sorted(PEAK_FLOPS, key=len, reverse=True)       # "GH200" before "H200"
    return next((PEAK_FLOPS[name] for name in names if name.lower() in device_name.lower()), None)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
                 platform.processor() or platform.machine())
    return f"cpu {model}, {torch.get_num_threads()} threads"


def environment(device: torch.device, root: Path) -> dict:
    """Where a run happened, for env.json: commit, uncommitted changes, versions, hardware, command."""
    return {
        "command": shlex.join(sys.argv), "t_start": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_dirty": bool(_git(root, "status", "--porcelain")), "git_diff": _git(root, "diff", "HEAD"),
        "python": platform.python_version(), "platform": platform.platform(), "device": device_name(device),
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        **{name: _version(name) for name in ("torch", "torchao", "numpy", "triton")},
    }


def write_environment(path: Path, device: torch.device, root: Path) -> None:
    """env.json: where the run goes on now, yet t_start stays that of its very first start.

    A prediction counts only if it is older than that. Raises ConfigError where the file no longer tells it."""
    first = {}
    if path.exists():
        try:
            first = {"t_start": json.loads(path.read_text())["t_start"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}), so it no longer tells when the run was "
                              f"begun: restore it, or choose another run=") from error
    write_json(path, environment(device, root) | first)


class Log:
    """Writes one run's rows. Only the main process has one.

    A branch's begin after its first step; the rows before are its parent's (parent_run in summary.json)."""

    def __init__(self, config: Config, resume_step: int, total_steps: int):
        self.config, self.total_steps, self.first_step = config, total_steps, resume_step
        self.path = config.run_dir / "metrics.jsonl"
        rows = [row for row in read_rows(self.path) if row["step"] <= resume_step]      # later ones will happen again
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = open(self.path, "a", buffering=1)      # noqa: SIM115 - open as long as the run; close() ends it
        self._mirrors = [_MIRRORS[name](config) for name in config.log.to]
        self._live = sys.stdout.isatty()
        self._open_line = False
        self._seconds: list[float] = []     # of the steps since this start, warm-up left out

    def step(self, row: dict) -> None:
        """One optimizer step: a row for machines, now and then a line for people."""
        self._write({"kind": "train", **row, "since_start": row["step"] - self.first_step})
        if row["step"] - self.first_step > WARM_UP_STEPS:
            self._seconds.append(row["step_s"])
        self._progress(row)

    def validation(self, row: dict) -> None:
        self._write({"kind": "val", **row})
        by_source = "  ".join(f"{name} {loss:.4f}" for name, loss in row["sources"].items())
        self.say(f"step {row['step']}: validation loss {row['loss']:.4f}   ({by_source})")

    def say(self, text: str) -> None:
        """A line for people that stays."""
        print(("\n" if self._open_line else "") + text, flush=True)
        self._open_line = False

    def close(self) -> None:
        if self._open_line:
            print(flush=True)
        self._file.close()
        for mirror in self._mirrors:
            mirror.close()

    def _write(self, row: dict) -> None:
        self._file.write(json.dumps(_strict(row)) + "\n")
        for mirror in self._mirrors:
            mirror.write(row)

    def _progress(self, row: dict) -> None:
        step, last = row["step"], row["step"] == self.total_steps
        if not self._live and not last and step % self.config.log.every and step - self.first_step != 1:
            return
        recent = self._seconds[-50:] or [row["step_s"]]
        left = (self.total_steps - step) * sum(recent) / len(recent)
        tok_per_s = self.config.data.tokens_per_step * len(recent) / sum(recent)
        line = (f"{self.config.run}  step {step}/{self.total_steps}  {step / self.total_steps:4.0%}  loss {row['loss']:.4f}  "
                f"{_si(tok_per_s)} tok/s  {_duration(left)} left" + ("" if row["verdict"] == "OK" else f"  {row['verdict']}"))
        print(f"\r\x1b[2K{line}" if self._live else line, end="" if self._live else "\n", flush=True)
        self._open_line = self._live


class _Wandb:
    def __init__(self, config: Config):
        wandb = _package("wandb")
        self.run = wandb.init(project="nanofp8", name=config.run, id=config.run, resume="allow", dir=str(config.run_dir),
                              config=config.to_dict())

    def write(self, row: dict) -> None:
        self.run.log({f"{row['kind']}/{k}": v for k, v in _numbers(row)}, step=row["step"])

    def close(self) -> None:
        self.run.finish()


class _TensorBoard:
    def __init__(self, config: Config):
        _package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(config.run_dir / "tensorboard"))

    def write(self, row: dict) -> None:
        for key, value in _numbers(row):
            self.writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])

    def close(self) -> None:
        self.writer.close()


_MIRRORS = {"wandb": _Wandb, "tensorboard": _TensorBoard}


def check_mirrors(config: Config) -> None:
    """Raise ConfigError where a logger in log.to is not installed, before anything is written."""
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

    A branch ends in the weights of the same run from scratch, so where it starts from is no part of it."""
    shared = {k: v for k, v in config.identity().items() if not k.startswith("fp8.") and k != "start_from"}
    return digest({**shared, "data.micro_batch": config.data.micro_batch})[:16]


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    for line in _lines(path):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_atomically(path: Path, text: str) -> None:
    """All of `text` at `path` or what was there before, never half of it."""
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_text(text)
    os.replace(tmp, path)


def write_json(path: Path, value: dict) -> None:
    """Strict JSON: a NaN in it is our mistake, not the reader's."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def _strict(value):
    """NaN and infinities as null, at any depth: JSON has no words for them."""
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _package(name: str):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"log.to={name} needs the package {name}: pip install {name}, or leave it out "
                          f"(metrics.jsonl is written anyway)") from error


def _numbers(row: dict):
    return [(k, v) for k, v in row.items() if isinstance(v, (int, float)) and k != "step"]


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []


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
