"""Look up how fast a model trained on a GPU, in the rows of bench/throughput.py.

bench/results/*.jsonl, as bench/results/README.md describes them. Whatever in them cannot be read counts as not measured.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from runtime.config import Config
from runtime.metrics import peak_flops
from runtime.rows import read_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Speed:
    """What one GPU was measured to do."""
    tok_per_s: float        # at the planned run's context
    remark: str             # where it comes from


def labels(config: Config) -> tuple[str, str | None]:
    """What bench/throughput.py calls this run in BF16 and in its FP8, None where it times no such thing."""
    f = config.fp8
    bf16 = "bf16" if config.parallel.compile else "bf16_eager"
    if f.recipe == "off" or f.include or f.skip or f.first_bf16 or f.last_bf16 or not config.parallel.compile:
        return bf16, None
    return bf16, f.recipe + "+kernels" * f.kernels + "+head" * f.head


def measured(config: Config, counts: dict[str, int], label: str, gpu: str, results: Path = RESULTS) -> Speed | None:
    """The speed of this model under this label on one such GPU, None where no valid row tells it.

    A row of another context length counts at the same FLOP/s. Of each micro-batch the newest row counts, of several that whose
    number of tokens is closest to the run's (the fastest where it is auto)."""
    found = []
    for path in sorted(results.glob("*.jsonl")):
        rows = [row for row in read_rows(path) if isinstance(row, dict)]
        runs = {str(row.get("run")): row for row in rows if row.get("kind") == "run" and _is_gpu(row.get("gpu"), gpu)}
        found += [(row, runs[str(row.get("run"))], path) for row in rows
                  if row.get("kind") == "cell" and row.get("valid") is True and row.get("label") == label
                  and str(row.get("run")) in runs and _is_model(row, config, counts)]
    found.sort(key=lambda entry: str(entry[1].get("t")))
    newest = {(row["T"], row["micro_batch"]): (row, run, path) for row, run, path in found}
    if not newest:
        return None

    def fitness(entry):
        row, d = entry[0], config.data
        if d.micro_batch == "auto":
            return row["tok_per_s"] * row["flops_per_token"]
        return -abs(math.log(row["micro_batch"] * row["T"] / (d.micro_batch * config.model.n_ctx)))

    row, run, path = max(newest.values(), key=fitness)
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    origin = f"commit {str(run['commit'])[:10]}" if run.get("commit") else f"code {run.get('code')}"
    changes = " with uncommitted changes" if run.get("dirty") else ""
    scaled = "" if row["T"] == config.model.n_ctx else f"; T={row['T']} scaled by FLOPs per token"
    remark = (f"measured, {row['tok_per_s']:,.0f} tok/s as {label} at micro-batch {row['micro_batch']} on one {run['gpu']}"
              f"{scaled} ({name}, {origin}{changes})")
    return Speed(row["tok_per_s"] * row["flops_per_token"] / counts["flops_per_token"], remark)


def _is_gpu(name, gpu: str) -> bool:
    """Whether a driver's name is of the GPU that --plan calls `gpu`: "h100" is the SXM one, as in the table of peaks."""
    return isinstance(name, str) and gpu.lower() in name.lower() and peak_flops(name) == peak_flops(gpu)


def _is_model(row: dict, config: Config, counts: dict[str, int]) -> bool:
    """Whether a row is of this model, whatever its context: as many parameters, as much attention per token and position."""
    numbers = [row.get(name) for name in ("tok_per_s", "flops_per_token", "params_total", "params_matmul", "T", "micro_batch")]
    if not all(isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in numbers):
        return False
    attention = row["flops_per_token"] - 6 * row["params_matmul"]
    return (row["params_total"] == counts["params_total"] and row["params_matmul"] == counts["params_matmul"]
            and attention * config.model.n_ctx == counts["flops_per_token_attn"] * row["T"])
