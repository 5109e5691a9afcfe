"""Time single Linears in BF16 against FP8 on the GPU at hand, for fp8.recipe=auto to go by.

    python bench/linears.py                                     every Linear shape of configs/gpt*_bf16.py, auto's recipes
    python bench/linears.py budget=540 out=out/speed.json       as many as fit; the same command again goes on
    python bench/linears.py shapes=2048x11264 recipes=tensorwise,tensorwise+kernels
    python bench/linears.py out=out/cpu.json shapes=64x64 tokens=64 compile=false       a rehearsal without a GPU

What is timed: RMSNorm -> Linear -> sigmoid on `tokens` rows of random BF16, forward and backward (gradients of the input,
the weight and the norm's weight), compiled in one graph. The norm before and the pointwise function after stand for
the model's own, so that the casts to FP8 can fuse with them as they do in training; being in both arms, they pull the
ratio towards 1, as in training. Not timed: gradient accumulation, optimizer, attention; of recipes with +kernels
(fp8.kernels=true) neither what they do once an optimizer step, quantising the weight.

Each recipe runs in turns with BF16 (A/B/A/B/../A), and each repeat compares FP8 with the mean of the BF16 turns before and
after it: clocks and temperature drift, a ratio of neighbours does not.

The table gets the median ratio BF16 / FP8, its 10th and 90th percentile, the GPU, the versions and the commits. While it
runs, every finished row is in OUT with the ending .jsonl, where a cut run goes on. What the table has is not timed again.
"""

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args, get_type_hints

import numpy as np
import torch
import torch.nn as nn

from bench.turns import in_turns, ratios
from model import GPT, Linear, RMSNorm
from runtime import fp8, speed
from runtime.cli import UserError, field_lines, nearest, read_options
from runtime.config import FP8Config, load_config
from runtime.log import environment
from runtime.rows import read_rows, write_atomically

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Options:
    out: str = str(speed.SHIPPED.relative_to(ROOT))     # table that receives the rows
    shapes: tuple[str, ...] = ()    # Linears to time, inputs x outputs, as 2048x11264,2048x2048; () = those of the six sizes
    recipes: tuple[str, ...] = ()   # recipes to time; () = those that auto chooses from
    tokens: int = 16384             # M, rows of the input: the tokens of a micro-batch
    repeats: int = 25               # FP8 turns per row, each between two BF16 turns
    budget: float | None = None     # seconds after which no further row is begun; none = all rows
    compile: bool = True            # false only to rehearse on a CPU

    POSITIONAL: ClassVar = ()

    def __post_init__(self):
        for name, value, low in (("tokens", self.tokens, 16), ("repeats", self.repeats, 1), ("budget", self.budget, 1)):
            if value is not None and not low <= value <= 2**24:
                raise UserError(f"{name}={value} must be between {low} and {2**24}")
        if self.tokens % 16:
            raise UserError(f"tokens={self.tokens} must be a multiple of 16: FP8 matmuls need it for the weight gradient")


@dataclass(frozen=True)
class Cell:     # one row to be
    recipe: str
    K: int
    N: int
    M: int


class Piece(nn.Module):
    """What is timed; the Linear lies in a Sequential so that runtime.fp8 can swap it."""

    def __init__(self, K: int, N: int):
        super().__init__()
        self.norm = RMSNorm(K, 1e-5)
        self.linear = nn.Sequential(Linear(K, N))

    def forward(self, x):
        return torch.sigmoid(self.linear(self.norm(x)))


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done or out of budget, 1 a row failed or the machine, 2 the user's mistake, 130 interrupted."""
    if {"-h", "--help"} & set(arguments):
        print("\n".join([__doc__, *field_lines("", Options)]))
        return 0
    try:
        return bench(read_options(Options, arguments), shlex.join(["python", "bench/linears.py", *arguments]))
    except (UserError, speed.UserError) as error:
        print(f"bench/linears.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench/linears.py: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbench/linears.py: interrupted; the rows so far stay, the same command goes on from there", file=sys.stderr)
        return 130


def bench(options: Options, command: str) -> int:
    """Time what the table lacks, then write it; returns the exit code. Raises UserError or UserError."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = ROOT / options.out        # an absolute one stays as it is
    _check_place(options, out, device)
    cells = [Cell(recipe, K, N, options.tokens) for recipe in _recipes(options, device) for K, N in _shapes(options)]
    env = environment(device, ROOT)
    gpu, today = env["device"], env["t_start"][:10]
    setup = {"torch": env["torch"], "torchao": env["torchao"], "driver": _driver(device), "timer": _timer(options, device)}
    table = _raw_table(out)
    old = table["gpus"].get(gpu)
    if old and (differs := [key for key in setup if old[key] != setup[key]]):
        key = differs[0]
        raise UserError(f"{options.out} holds rows of this GPU with {key} {old[key]}, here it is {setup[key]}: rows of two "
                          f"setups do not mix; give out=ANOTHER.json, or take gpus[{gpu!r}] out of the file to time anew")

    journal = out.with_suffix(".jsonl")
    origin = {"gpu": gpu, **setup}
    resumed = _resume(journal, origin)
    there = [*(old["rows"] if old else []), *(line["row"] for line in resumed)]
    rows = {Cell(*(row[key] for key in ("recipe", "K", "N", "M"))): row for row in there}
    todo = [cell for cell in cells if cell not in rows]
    print(f"{gpu}: {len(todo)} of {len(cells)} rows to time, {len(cells) - len(todo)} are there", flush=True)
    failed, left = _time_all(todo, options, device, journal, {"setup": origin, "commit": env["git_commit"]}, rows)

    if len(rows) > (len(old["rows"]) if old else 0):
        commits = [old and old["commit"], *(line.get("commit") for line in resumed), env["git_commit"]]
        commits = ", ".join(dict.fromkeys(c for text in commits if text for c in text.split(", "))) or None
        table["gpus"][gpu] = {"measured": today, **setup, "commit": commits, "command": command, "rows": list(rows.values())}
        write_atomically(out, speed.to_text(table))
    print(f"{options.out}: {len(rows)} rows of this GPU" + (f"; {left} are left, the same command goes on" if left else ""))
    journal.unlink(missing_ok=True)
    return 1 if failed else 0


def _time_all(todo: list[Cell], options: Options, device, journal: Path, origin: dict, rows: dict) -> tuple[int, int]:
    """Time each cell into `rows` and the journal; returns how many failed and how many the budget left."""
    began, longest, failed = time.perf_counter(), 0.0, 0
    for i, cell in enumerate(todo):
        now = time.perf_counter()
        if options.budget is not None and i and now - began + longest > options.budget:
            return failed, len(todo) - i
        name = f"{cell.recipe:20} {cell.K:6d} x {cell.N:<6d}"
        try:
            row, ms = time_cell(cell, options, device)
        except Exception as error:      # one recipe's missing kernel or memory must not cost the other rows
            failed += 1
            print(f"{name} FAILED: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}",
                  flush=True)
            continue
        rows[cell] = row
        with open(journal, "a") as file:
            file.write(json.dumps({**origin, "row": row}) + "\n")
        longest = max(longest, time.perf_counter() - now)
        print(f"{name} {row['ratio']:.3f}x ({row['ratio_p10']:.3f} to {row['ratio_p90']:.3f})  BF16 {ms:.3f} ms", flush=True)
    return failed, 0


# ------------------------------------------------------------------------------------------------------------ one row

def time_cell(cell: Cell, options: Options, device: torch.device) -> tuple[dict, float]:
    """The row of one cell, plus BF16's median milliseconds. Raises RuntimeError where FP8 computes no finite numbers."""
    import torch._inductor.config as inductor

    torch.compiler.reset()      # each cell compiles the same code for other shapes: dynamo's limit of variants is 8
    torch.manual_seed(0)        # never zeros: a GPU multiplies them with less power, hence faster (894 against 788 TF, H200)
    x = torch.randn(cell.M, cell.K, device=device, dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(cell.M, cell.N, device=device, dtype=torch.bfloat16)
    bf16 = _step(cell, "off", options, x, g)
    quantised = _step(cell, cell.recipe, options, x, g)
    for _ in range(3):          # compiles, too
        bf16()
    with inductor.patch(emulate_precision_casts=cell.recipe.startswith("rowwise")):     # as parallel.set_torch_flags does
        for _ in range(3):
            gradients = quantised()
    if not all(gradient.isfinite().all() for gradient in gradients):
        raise RuntimeError("a gradient is not finite: the time of such a Linear means nothing")
    bf16_s, fp8_s = in_turns(bf16, quantised, options.repeats, device)
    p10, median, p90 = np.quantile(ratios(bf16_s, fp8_s), (0.1, 0.5, 0.9)).tolist()
    row = {"recipe": cell.recipe, "K": cell.K, "N": cell.N, "M": cell.M,
           "ratio": round(median, 4), "ratio_p10": round(p10, 4), "ratio_p90": round(p90, 4)}
    return row, float(np.median(bf16_s)) * 1e3


def _step(cell: Cell, recipe: str, options: Options, x: torch.Tensor, g: torch.Tensor):
    """One forward and backward pass of a Piece under `recipe`, as a function that returns the gradients."""
    with torch.device(x.device):
        piece = Piece(cell.K, cell.N)
    nn.init.ones_(piece.norm.weight)
    nn.init.normal_(piece.linear[0].weight, std=cell.K ** -0.5)
    if recipe != "off":
        fp8.convert(piece.linear, fp8.by_name(recipe), device_type=x.device.type)
        fp8.refresh_fp8_weights(piece)      # once, as in a step of many micro-batches
    if options.compile:
        piece.compile(dynamic=False, fullgraph=True)
    inputs = (x, *piece.parameters())
    return lambda: torch.autograd.grad(piece(x), inputs, g)


# -------------------------------------------------------------------------------------------------------- what to time

def shapes_of_configs(folder: Path = ROOT / "configs") -> list[tuple[int, int]]:
    """(inputs K, outputs N) of every Linear of the gpt*_bf16 configs, head included, each once, smallest first."""
    shapes = set()
    for path in folder.glob("gpt*_bf16.py"):
        with torch.device("meta"):
            model = GPT(load_config(path).model)
        shapes |= {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, Linear)}
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def _shapes(options: Options) -> list[tuple[int, int]]:
    shapes = []
    for text in options.shapes:
        pair = re.fullmatch(r"([1-9]\d{0,7})x([1-9]\d{0,7})", text)
        if not pair or any(int(n) % 16 for n in pair.groups()):
            raise UserError(f"shapes={text!r} is no shape: write inputs x outputs, both multiples of 16, as 2048x11264")
        shapes.append((int(pair[1]), int(pair[2])))
    return list(dict.fromkeys(shapes)) or shapes_of_configs()


def _recipes(options: Options, device: torch.device) -> list[str]:
    """The recipes asked for. One that this GPU lacks is a mistake where it was named, else a line."""
    known = [name for name in get_args(get_type_hints(FP8Config)["recipe"]) if name not in ("off", "auto")]
    known += [f"{name}{fp8.WITH_KERNELS}" for name in fp8.FP8_KERNELS]
    recipes = []
    for recipe in dict.fromkeys(options.recipes or fp8.CANDIDATES + fp8.KERNEL_CANDIDATES):
        if recipe not in known:
            raise UserError(f"recipes={recipe!r} is no FP8 recipe{nearest(recipe, known)}")
        try:
            fp8.check_hardware(fp8.by_name(recipe), device)
            recipes.append(recipe)
        except UserError as error:
            if options.recipes:
                raise
            print(f"{recipe} left out: {error}")
    return recipes


# ----------------------------------------------------------------------------------------------------------- the table

def _check_place(options: Options, out: Path, device: torch.device) -> None:
    """Raise UserError where the rows must not, or cannot, go to `out`."""
    if device.type == "cpu" and out.resolve() == speed.SHIPPED:
        raise UserError(f"a CPU's timings say nothing about a GPU and stay out of {options.out}: run this on a GPU, or give "
                          f"out=ANOTHER.json to rehearse")
    if device.type == "cuda" and not options.compile:
        raise UserError("compile=false is for rehearsals on a CPU: uncompiled FP8 is several times slower than in training")
    if out.suffix != ".json" or not out.parent.is_dir():
        raise UserError(f"out={options.out} must be a .json file in a folder that exists")


def _raw_table(out: Path) -> dict:
    """The table as JSON, checked, or an empty one."""
    if not out.exists():
        return {"format_version": speed.FORMAT_VERSION, "gpus": {}}
    speed.load_table(out)
    return json.loads(out.read_text(encoding="utf-8"))


def _resume(journal: Path, setup: dict) -> list[dict]:
    """Lines that a cut run of the same setup left. The file is written anew without the line that the cut tore."""
    lines = [line for line in read_rows(journal) if isinstance(line, dict) and isinstance(line.get("row"), dict)]
    ours = [line for line in lines if line.get("setup") == setup]
    if len(lines) > len(ours):
        print(f"{journal.name}: {len(lines) - len(ours)} rows of another setup (GPU or versions) are dropped")
    if journal.exists():
        write_atomically(journal, "".join(json.dumps(line) + "\n" for line in ours))
    return ours


def _timer(options: Options, device: torch.device) -> str:
    if device.type == "cuda":
        return "CUDA events"
    return f"perf_counter, {'compiled' if options.compile else 'uncompiled'}: a rehearsal on a CPU, says nothing about a GPU"


def _driver(device: torch.device) -> str | None:
    """The GPU driver's version, where nvidia-smi tells it."""
    if device.type != "cuda":
        return None
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.split() or [None])[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
