"""Score a trained model on lm-eval tasks, directly from its checkpoint.

    python -m eval.harness out/RUN --tasks demo
    torchrun --nproc_per_node=8 -m eval.harness out/RUN --tasks core
    python -m eval.harness hf:gpt2 --tasks core    a public model, scored by the same command
    python -m eval.harness --table out/*           all that was scored, as a table and a figure
    python -m eval.harness --fetch DIR tasks=core  saves the tasks' data; then --offline DIR needs no network

tasks= takes names of lm-eval's tasks, groups and tags, comma-separated, and three groups of ours:
demo (val_ppl and val_cloze, made from the run's own validation shards; no network),
core (wikitext, lambada_openai, hellaswag, piqa, arc_easy, arc_challenge, openbookqa, boolq, sciq,
winogrande, without examples shown) and full (core, mmlu with five examples and commonsense_qa, at
chance below a billion parameters). A forward pass has as many tokens as micro_batch= full contexts,
one beyond 2,048 tokens counted as 2,048, and on a CPU at most 4,096; longer sequences go one at a
time.

Prints a table; writes out/RUN/eval/TASKS.json (with fp8=RECIPE: TASKS_fp8_RECIPE.json) and
lm-eval's log of every document beside it (samples_TASK.jsonl.gz). A run is scored at its newest
checkpoint, or at step=N. Recipes with one activation scale a tensor (tensorwise, amax) share it
between all that shares a forward pass: their scores depend a little on micro_batch. Probabilities
are normalised over the padded vocabulary, as in training; what would be generated (is_greedy,
generate_until) is looked for among the tokenizer's own ids. A public model (hf:NAME, or
hf:/a/folder in Hugging Face's format) is read by transformers, needed here alone, from safetensors,
without running code of its own; its scores lie in out/hf_NAME."""

import contextlib
import ctypes
import gzip
import importlib.metadata
import json
import os
import re
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from eval import tasks
from eval.inference import Recipe, load_for_inference, pick_device
from eval.public_models import public_lm
from eval.scores import evaluate, stands_for
from fp8 import selection
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import write_atomically
from lib.text import grid
from lib.values import FilePath
from runtime.checkpoint import gather, together
from runtime.config import read_config
from runtime.parallel import World, finish, own_store, read_launch

# the ranks meet when each has done its part, which may take that long
PATIENCE = timedelta(hours=24)


@dataclass(frozen=True, kw_only=True)
class Options:
    run: FilePath  # folder of a run, hf:NAME or hf:/a/folder
    tasks: tuple[str, ...]  # demo, core, full, or names of lm-eval's
    # folder that --fetch filled, a cache of Hugging Face's datasets
    offline: FilePath | None = None
    include: FilePath | None = None  # folder with task YAMLs of your own
    # documents per task at most; none = all. For trying things out: such scores are marked
    limit: int | None = None
    micro_batch: int = 16  # sequences of a full context per forward pass; of shorter ones more
    device: str = "auto"  # auto (a GPU where there is one), cpu, cuda
    # as trained (an FP8 run: plain BF16 matmuls), or float32
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    # the Linears that this recipe converts multiply in FP8, whatever trained the run
    fp8: Recipe = "off"
    step: int | None = None  # of a checkpoint that was kept; none = the newest

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit={self.limit} must be at least 1")
        names = tasks.expand(self.tasks)
        if not names:
            raise UserError(
                "tasks= names no task: give tasks=demo or a list such as tasks=hellaswag,piqa"
            )
        if self.public and (
            self.fp8 != "off" or self.step is not None or set(tasks.DEMO) & set(names)
        ):
            raise UserError(
                f"fp8=, step= and the demo tasks are for runs of ours, and {self.run} is none: drop"
                " them"
            )

    @property
    def public(self) -> str | None:
        """Name of the public model where the run is one: hf:NAME."""
        return self.run.removeprefix("hf:") if self.run.startswith("hf:") else None

    @property
    def folder(self) -> Path:
        """Where the scores lie: of hf:NAME in out/hf_<name>, what no file name should hold
        replaced."""
        if self.public is None:
            return Path(self.run)
        return Path("out", "hf_" + re.sub(r"[^\w.-]+", "_", self.public).strip("_")[-150:])


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    fetch: FilePath  # the folder
    tasks: tuple[str, ...]
    include: FilePath | None = None


def score(options: Options, world: World) -> dict:
    """Run the tasks, write the scores, return {"tasks": {name: {metric: value}}, ..}.

    The ranks of a `world` share the work, each returns the record, and the first writes. What one
    rank raises is raised on all."""
    start = time.perf_counter()
    if options.public is None:
        read_config(options.run)  # before the seconds that lm-eval takes to start
    done: list = []  # by this rank: a model does not travel
    together(lambda: done.append(_prepare(options, world)), world)
    lm, loaded, layers, step = done[0]
    if len(set(gather(step, world))) > 1:
        raise UserError(
            f"{options.run} wrote a checkpoint while the processes read it, each another one: start"
            " again"
        )
    together(lambda: done.append(evaluate(lm, loaded, options.limit)), world)
    scores, samples = done[1]
    record = {
        "run": str(options.run),
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "tasks": scores,
        "limit": options.limit,
        "dtype": options.dtype,
        "fp8": options.fp8,
        "layers_fp8": [layer.name for layer in layers if layer.recipe],
        "micro_batch": options.micro_batch,
        "device": str(lm.device),
        "lm_eval": importlib.metadata.version("lm_eval"),
        "truncated_requests": getattr(lm, "n_truncated", None),
        "shortened_answers": getattr(lm, "n_shortened", None),
        "wall_s": round(time.perf_counter() - start, 1),
    }
    if world.is_main:
        write(options, record, samples)
    return record


def _prepare(options: Options, world: World) -> tuple:
    """What answers the requests, the tasks that make them, the verdict on every Linear, and the
    checkpoint's step. Raises OSError where nothing can be written, as into a run of others: hours
    of scoring would be lost."""
    loaded = tasks.load(tasks.expand(options.tasks), options.include, options.run, options.offline)
    device, layers, step = options.device, [], None
    if world.size > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)
        device = f"cuda:{world.local_rank}"
    if options.public is None:
        from eval.lm import CheckpointLM

        model, tokenizer, where, layers, step = load_for_inference(
            options.run, device, options.dtype, options.fp8, options.step
        )
        lm = CheckpointLM(model, tokenizer, options.micro_batch, where, world)
    elif world.size == 1:
        lm = public_lm(options.public, pick_device(device), options.dtype, options.micro_batch)
    else:
        raise UserError(f"{options.run} is scored by one process: start it without torchrun")
    if world.is_main and options.fp8 != "off":
        print("\n".join(selection.table(layers, options.fp8, where.type)), flush=True)
    (options.folder / "eval").mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.folder / "eval").close()
    return lm, loaded, layers, step


def join() -> World:
    """This process among those that torchrun started; they exchange objects, not tensors."""
    size, rank, local_rank = read_launch(os.environ)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group(
            "gloo", store=own_store(), rank=rank, world_size=size, timeout=PATIENCE
        )
    return World(rank, local_rank, size, torch.device("cpu"))


def write(options: Options, record: dict, samples: dict[str, list[dict]]) -> None:
    """Put record and logs into the run's eval/. The file names tell what may not be compared: FP8,
    another dtype, a part of the documents, the step that was asked for. A log is named in its
    task's row."""
    kind = "" if record["fp8"] == "off" else f"_fp8_{record['fp8']}"
    kind += "" if record["dtype"] == "bfloat16" else f"_{record['dtype']}"
    kind += f"_limit{record['limit']}" if record["limit"] else ""
    kind += "" if options.step is None else f"_step{options.step}"
    folder, names = (
        options.folder / "eval",
        "+".join(dict.fromkeys(word.strip() for word in options.tasks)),
    )
    for task, rows in samples.items():
        name = record["tasks"][task]["samples"] = f"samples_{task}{kind}.jsonl.gz"
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_atomically(
            folder / name,
            gzip.compress(lines.encode(errors="backslashreplace"), compresslevel=5, mtime=0),
        )
    if len(names) > 100:  # file names end at 255 bytes
        names = f"{names[:90]}_{sha256(names.encode()).hexdigest()[:9]}"
    write_atomically(folder / f"{names}{kind}.json", json.dumps(record, indent=1) + "\n")


def table(record: dict) -> str:
    """The scores as Markdown; of a group's tasks the group's row alone."""
    lines = [["task", "metric", "score", "± se", "chance", "n"]]
    hidden = {name for row in record["tasks"].values() for name in stands_for(row)}
    for name, row in record["tasks"].items():
        for metric in (key for key in row if f"{key}_se" in row and name not in hidden):
            error, chance = (
                row[f"{metric}_se"],
                (row.get("chance") if metric.startswith("acc") else None),
            )
            error, chance = (
                "-" if error is None else f"{error:.4f}",
                ("-" if chance is None else f"{chance:.2f}"),
            )
            lines.append([name, metric, f"{row[metric]:.4f}", error, chance, str(row["n"] or "-")])
    notes = [
        f"limit={record['limit']}: a part of each task, not to be compared with published scores"
    ] * bool(record["limit"])
    if record["truncated_requests"]:
        notes.append(
            f"{record['truncated_requests']} requests were longer than the context and lost their"
            " beginning"
        )
    if record["shortened_answers"]:
        notes.append(
            f"{record['shortened_answers']} answers were cut by the end of the context, before the"
            " length that their task asks for"
        )
    for name, row in record["tasks"].items():
        if row.get("not_scored"):
            notes.append(
                f"{name}: no number was computed for {', '.join(row['not_scored'])}, which its YAML"
                " asks for"
            )
    return "\n".join([grid(lines), *notes])


def main(arguments: list[str]) -> int:
    if "--table" in arguments:
        from eval import table as scores_table

        return scores_table.main([word for word in arguments if word != "--table"])
    cls, work = (Options, "run"), lambda options: table(score(options, join()))
    if any(word.partition("=")[0].removeprefix("--") == "fetch" for word in arguments):
        cls, work = (FetchOptions,), lambda o: tasks.fetch(o.fetch, o.tasks, o.include)
    return command(__doc__, *cls, is_shown=os.environ.get("RANK", "0") == "0")(work)(arguments)


if __name__ == "__main__":
    # Let glibc keep what tensors give back: fresh pages for each piece of logits cost a CPU a fifth
    # of a whole scoring.
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such switch
        libc = ctypes.CDLL(None)
        # M_MMAP_MAX: nothing from mmap, which goes back to the system when freed
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nor is the heap's end given back
    code = run_command(main)
    finish(World(0, 0, int(os.environ.get("WORLD_SIZE", 1)), torch.device("cpu")), code)
