"""Time the first and the second start of a run: with empty compiler caches, then with what the first left in them.

    python bench/start_up.py                                            125M: BF16, tensorwise by torchao and by our kernels
    python bench/start_up.py size=1p5b micro_batch=16 out=out/start_up.json
    python bench/start_up.py size=toy_s                                 a rehearsal without a GPU; says nothing about one

A start is what bench/cell.py does before it is warm, which is what train.py does: imports, build, initial weights, the first
micro-step with its compilation. Both starts of a label share a folder of caches of their own, so neither what the machine
compiled before nor another label helps. Seconds are this machine's; the ratio of the second start to the first is the result.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from bench import suites
from bench.children import Child, ChildError
from runtime.cli import UserError, field_lines, nearest, read_options
from runtime.log import environment
from runtime.rows import write_json

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("import_s", "build_s", "first_step_s")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True, kw_only=True)
class Options:
    size: str = "125m"              # 125m, 350m, 760m, 1p5b; toy_s, toy_m: on a CPU
    labels: tuple[str, ...] = ("bf16", "tensorwise", "tensorwise+kernels")      # as bench/cell.py names them
    micro_batch: int | None = None  # sequences; none = the suite's
    limit: float = 600.0            # seconds after which a start is given up
    out: str | None = None          # a JSON file that receives the numbers

    POSITIONAL: ClassVar = ()

    def __post_init__(self):
        if self.size not in (*suites.MICRO_BATCH, *suites.TOY):
            raise UserError(f"size={self.size} is no size{nearest(self.size, [*suites.MICRO_BATCH, *suites.TOY])}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise UserError(f"micro_batch={self.micro_batch} must be at least 1")
        if not self.labels or not self.limit > 0:
            raise UserError("labels must name at least one label, limit must be positive")


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 1 a start failed, 2 the user's mistake, 130 interrupted."""
    if {"-h", "--help"} & set(arguments):
        print("\n".join([__doc__, *field_lines("", Options)]))
        return 0
    try:
        options = read_options(Options, arguments)
        if options.size in suites.MICRO_BATCH and not torch.cuda.is_available():
            raise UserError(f"size={options.size} needs a GPU, torch sees none here: size=toy_s rehearses on a CPU")
    except UserError as error:
        print(f"bench/start_up.py: {error}", file=sys.stderr)
        return 2
    try:
        return measure(options)
    except ChildError as error:
        print("\n".join([*error.tail, f"bench/start_up.py: a start failed: {error}"]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def measure(options: Options) -> int:
    """Prints a line a start and the ratio a label; raises ChildError."""
    device = torch.device("cpu" if options.size in suites.TOY else "cuda")
    rows = []
    for label in options.labels:
        with tempfile.TemporaryDirectory() as folder:
            first, second = (start(options, label, device, Path(folder), which) for which in ("first", "second"))
        ratio = second["first_step_s"] / first["first_step_s"]
        whole = sum(second[key] for key in PARTS) / sum(first[key] for key in PARTS)
        print(f"{label:26} second / first: {ratio:.2f} of the first step, {whole:.2f} of the whole start", flush=True)
        rows.append({"label": label, "first": first, "second": second, "ratio_first_step": ratio, "ratio_start": whole})
    if options.out:
        env = environment(device, ROOT)
        kept = ("command", "t_start", "git_commit", "git_dirty", "device", "torch", "torchao", "triton", "cuda")
        write_json(Path(options.out), {**{key: env[key] for key in kept}, "size": options.size, "rows": rows})
    return 0


def start(options: Options, label: str, device: torch.device, caches: Path, which: str) -> dict:
    """The answer of one start; its process has ended."""
    cell = cell_of(options, label, device)
    env = {name: str(caches / name.lower()) for name in CACHES} | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    child = Child(f"{options.size} {label}", [sys.executable, str(ROOT / "bench" / "cell.py"), json.dumps(cell.spec())],
                  caches / "log", ROOT, env)
    try:
        answer = child.read(options.limit)
        child.close()
    finally:
        child.kill()
    print(f"{label:26} {which:6} " + "  ".join(f"{key[:-2].replace('_', ' ')} {answer[key]:6.1f} s" for key in PARTS)
          + f"   caches: {answer['cache_hits']}", flush=True)
    return {key: answer[key] for key in (*PARTS, "compile_s", "cache_hits", "cache_misses")}


def cell_of(options: Options, label: str, device: torch.device) -> suites.Cell:
    if options.size in suites.TOY:
        return suites.Cell(options.size, label, options.micro_batch or 4, T=64, tokens_per_step=1024, device="cpu",
                           model=suites.TOY[options.size])
    return suites.Cell(options.size, label, options.micro_batch or suites.MICRO_BATCH[options.size], device=device.type)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
