"""Choose the FP8 recipe that makes a Linear of a given shape fastest, from a table of timings
(fp8.recipe=auto).

speed.json holds ratios of BF16 time to FP8 time of one Linear, forward and backward (above 1:
FP8 is faster), as rows of recipe, K inputs, N outputs, M tokens, ratio, and of a measured one the
10th and 90th percentile of its repeats:

    measured   architecture (compute capability, sm_90) -> what bench/kernels.py measured on each
               GPU of it, with the provenance
    published  the same of other people's timings, each with its source; a GPU whose name contains
               `gpu` is the one

Timings of the very GPU count, else those of another one of its architecture, and the verdict names
that one: it has the same matmuls, other memory. Where we have measured an architecture, published
timings of it are not used.

The bigger an FP8 matmul, the more of its saving is left after the casts: a timed shape is evidence
for all that are at least as large in both K and N, never for a smaller one."""

import json
import re
from contextlib import suppress
from pathlib import Path

import torch

from lib.errors import UserError

FORMAT_VERSION = 2
SHIPPED = Path(__file__).resolve().with_name("speed.json")
# Ratio above which a recipe pays. Repeated timings of one Linear scatter by a per cent or two, and
# FP8 costs accuracy: a gain within the noise is no reason to convert.
PAYS = 1.03

# NVIDIA's
ARCHITECTURES = {
    "sm_80": ("A100",),
    "sm_89": ("L40S", "RTX 4090"),
    "sm_90": ("H100", "H200"),
    "sm_100": ("B200",),
}


def load_table(path: str | Path = SHIPPED) -> dict:
    """The table at `path`, as it is written above. Raises UserError for another file."""
    with suppress(ValueError, TypeError, KeyError):
        table = json.loads(Path(path).read_bytes())
        if table["format_version"] == FORMAT_VERSION:
            return table
    raise UserError(
        f"{path} is no table of timings of format {FORMAT_VERSION}: python -m bench.kernels"
        " makes one"
    )


def to_text(table: dict) -> str:
    """The table as JSON with a row a line, so that a diff of two tables can be read."""
    text = json.dumps(table, indent=1, allow_nan=False)
    return (
        re.sub(
            r'\{\s+("recipe"[^{}]*?)\s+\}',
            lambda row: "{" + re.sub(r"\n\s+", " ", row[1]) + "}",
            text,
        )
        + "\n"
    )


def choose(
    table: dict, gpu: str | None, K: int, N: int, candidates: tuple[str, ...]
) -> tuple[str | None, str]:
    """The fastest recipe among `candidates` for a Linear of K inputs and N outputs on `gpu`, None
    where BF16 stays; and why.

    A recipe pays where the ratio of its _evidence() is above PAYS. `gpu` is None on a CPU, where
    nothing pays."""
    if gpu is None:
        return None, "no GPU: FP8 pays on FP8 units alone"
    kind, rows = _timings(table, gpu)
    if not rows:
        return (
            None,
            "no timings of this GPU or its architecture: python -m bench.kernels makes them",
        )
    best = None
    for recipe in candidates:
        evidence = _evidence([row for row in rows if row["recipe"] == recipe], K, N)
        # of equals the first candidate
        if evidence and (best is None or evidence["ratio"] > best["ratio"]):
            best = evidence
    if best is None:
        return (
            None,
            f"nothing timed at or below {K} x {N}: python -m bench.kernels shapes={K}x{N} does",
        )
    number = f"{kind} {best['ratio']:.2f}x at {best['K']} x {best['N']}"
    if best["ratio"] > PAYS:
        return best["recipe"], number
    if best["ratio"] <= 1:
        return None, f"BF16 is faster: best {number}"
    return None, f"FP8 gains too little: best {number}"


def _timings(table: dict, gpu: str) -> tuple[str, list[dict]]:
    """The rows that count for this GPU, and what the verdict calls them; none where its
    architecture was never timed."""
    architecture = architecture_of(gpu)
    for kind in ("measured", "published"):
        entries = table.get(kind, {}).get(architecture)
        if not entries:
            continue
        of_this_gpu = [entry for entry in entries if _is_of(gpu, entry, kind)]
        if of_this_gpu:
            return kind, _rows(of_this_gpu)
        # rows of two GPUs do not mix
        first_gpu = entries[0]["gpu"]
        of_first = [entry for entry in entries if entry["gpu"] == first_gpu]
        return f"{kind} on {first_gpu}", _rows(of_first)
    return "", []


def _is_of(gpu: str, entry: dict, kind: str) -> bool:
    """Whether an entry was timed on this GPU; people who publish give a short name."""
    return entry["gpu"] == gpu or (kind == "published" and entry["gpu"] in gpu)


def _rows(entries: list[dict]) -> list[dict]:
    return [row for entry in entries for row in entry["rows"]]


def architecture_of(gpu: str) -> str | None:
    """A GPU's compute capability, as sm_90: the one at hand is asked, another one is known by its
    name, or not (None)."""
    if torch.cuda.is_available() and gpu == torch.cuda.get_device_name():
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    for architecture, names in ARCHITECTURES.items():
        if any(name in gpu for name in names):
            return architecture
    return None


def _evidence(rows: list[dict], K: int, N: int) -> dict | None:
    """Of the rows of one recipe that of K x N, else the best of no larger shapes; of several M the
    slowest counts."""
    no_larger = [row for row in rows if row["K"] <= K and row["N"] <= N]
    slowest: dict[tuple[int, int], dict] = {}  # shape -> its slowest row
    for row in no_larger:
        shape = row["K"], row["N"]
        if shape not in slowest or row["ratio"] <= slowest[shape]["ratio"]:
            slowest[shape] = row
    if (K, N) in slowest:
        return slowest[K, N]
    return max(slowest.values(), key=lambda row: (row["ratio"], row["K"], row["N"]), default=None)
