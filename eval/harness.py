"""Score a trained model on lm-eval tasks, directly from its checkpoint.

    python -m eval.harness out/RUN --tasks demo
    torchrun --nproc_per_node=8 -m eval.harness out/RUN --tasks core
    python -m eval.harness hf:gpt2 --tasks core    a public model, scored by the same command
    python -m eval.harness --table out/*           all that was scored, as a table and a figure
    python -m eval.harness --fetch DIR tasks=core  their data; then --offline DIR needs no network

tasks= takes names of lm-eval's tasks, groups and tags, comma-separated, and four groups of ours:
demo (val_ppl and val_cloze, made from the run's own validation shards; no network),
core (wikitext, lambada_openai, hellaswag, piqa, arc_easy, arc_challenge, openbookqa, boolq, sciq,
winogrande, without examples shown), full (core, mmlu with five examples and commonsense_qa, at
chance below a billion parameters) and core22 (DCLM's CORE: the mean of 22 centered accuracies, of
which lm-eval has 20; those that it lacks are named). A forward pass has as many tokens as
micro_batch= full contexts, one beyond 2,048 tokens counted as 2,048, and on a CPU at most 4,096;
longer sequences go one at a time.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from eval import core22, tasks
from eval.inference import Recipe, load_for_inference, pick_device
from eval.public_models import public_lm
from eval.results import Metric, ScoreRecord, TaskScores, write_scores
from eval.scores import evaluate
from fp8 import selection
from fp8.selection import Layer
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
    tasks: tuple[str, ...]  # demo, core, full, core22, or names of lm-eval's
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
    # mean of the weights of so many checkpoints of checkpoint.every, that one the last of them
    average: int = 1

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit={self.limit} must be at least 1")
        names = tasks.expand(self.tasks)
        if not names:
            raise UserError(
                "tasks= names no task: give tasks=demo or a list such as tasks=hellaswag,piqa"
            )
        asks_for_weights = self.step is not None or self.average > 1
        needs_a_run = self.fp8 != "off" or asks_for_weights or set(tasks.DEMO) & set(names)
        if self.public and needs_a_run:
            raise UserError(
                f"fp8=, step=, average= and the demo tasks are for runs of ours, and {self.run} is"
                " none: drop them"
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


@dataclass(frozen=True)
class Prepared:
    """What scoring needs, on each rank."""

    lm: Any  # answers the requests: lm-eval's LM
    loaded: dict  # the tasks that make them, lm-eval's TaskDict
    layers: list[Layer]  # the verdict on every Linear
    step: int | None  # of the checkpoint; None for a public model


def score(options: Options, world: World) -> ScoreRecord:
    """Run the tasks, write the scores, return them.

    The ranks of a `world` share the work, each returns the record, and the first writes. What one
    rank raises is raised on all."""
    start = time.perf_counter()
    if options.public is None:
        read_config(options.run)  # before the seconds that lm-eval takes to start
    prepared: Prepared = _on_all_ranks(lambda: _prepare(options, world), world)
    if len(set(gather(prepared.step, world))) > 1:
        raise UserError(
            f"{options.run} wrote a checkpoint while the processes read it, each another one: start"
            " again"
        )
    lm = prepared.lm
    scores, samples = _on_all_ranks(lambda: evaluate(lm, prepared.loaded, options.limit), world)
    kind = _kind(options)
    for task in samples:
        scores[task] = replace(scores[task], samples=f"samples_{task}{kind}.jsonl.gz")
    record = ScoreRecord(
        run=str(options.run),
        step=prepared.step,
        average=options.average,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        tasks=scores,
        limit=options.limit,
        dtype=options.dtype,
        fp8=options.fp8,
        layers_fp8=[layer.name for layer in prepared.layers if layer.recipe],
        micro_batch=options.micro_batch,
        device=str(lm.device),
        lm_eval=importlib.metadata.version("lm_eval"),
        truncated_requests=getattr(lm, "n_truncated", None),
        shortened_answers=getattr(lm, "n_shortened", None),
        wall_s=round(time.perf_counter() - start, 1),
    )
    if world.is_main:
        write(options, record, samples)
    return record


def _on_all_ranks(work: Callable[[], Any], world: World) -> Any:
    """What work() returns on this rank: a model does not travel. What one rank raises is raised on
    all."""
    results: list = []
    together(lambda: results.append(work()), world)
    return results[0]


def _prepare(options: Options, world: World) -> Prepared:
    """Raises OSError where nothing can be written, as into a run of others: hours of scoring would
    be lost."""
    loaded = tasks.load(tasks.expand(options.tasks), options.include, options.run, options.offline)
    device_name = options.device
    if world.size > 1 and device_name in ("auto", "cuda") and torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)
        device_name = f"cuda:{world.local_rank}"
    if options.public is None:
        prepared = _prepare_run(options, world, device_name, loaded)
    elif world.size == 1:
        device = pick_device(device_name)
        lm = public_lm(options.public, device, options.dtype, options.micro_batch)
        prepared = Prepared(lm, loaded, [], None)
    else:
        raise UserError(f"{options.run} is scored by one process: start it without torchrun")
    (options.folder / "eval").mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.folder / "eval").close()
    return prepared


def _prepare_run(options: Options, world: World, device_name: str, loaded: dict) -> Prepared:
    from eval.lm import CheckpointLM  # after tasks.load(), which sets what lm-eval reads

    model, tokenizer, device, layers, step = load_for_inference(
        options.run, device_name, options.dtype, options.fp8, options.step, options.average
    )
    if world.is_main and options.fp8 != "off":
        print("\n".join(selection.verdict_lines(layers, options.fp8, device.type)), flush=True)
    lm = CheckpointLM(model, tokenizer, options.micro_batch, device, world)
    return Prepared(lm, loaded, layers, step)


def join() -> World:
    """This process among those that torchrun started; they exchange objects, not tensors."""
    size, rank, local_rank = read_launch(os.environ)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group(
            "gloo", store=own_store(), rank=rank, world_size=size, timeout=PATIENCE
        )
    return World(rank, local_rank, size, torch.device("cpu"))


def _kind(options: Options) -> str:
    """What the file names tell because it may not be compared: FP8, another dtype, a part of the
    documents, the step or the average that was asked for."""
    parts = []
    if options.fp8 != "off":
        parts.append(f"_fp8_{options.fp8}")
    if options.dtype != "bfloat16":
        parts.append(f"_{options.dtype}")
    if options.limit:
        parts.append(f"_limit{options.limit}")
    if options.step is not None:
        parts.append(f"_step{options.step}")
    if options.average > 1:
        parts.append(f"_average{options.average}")
    return "".join(parts)


def write(options: Options, record: ScoreRecord, samples: dict[str, list[dict]]) -> None:
    """Put record and logs into the run's eval/. A log is named in its task's row."""
    folder = options.folder / "eval"
    for task, rows in samples.items():
        log_name = record.tasks[task].samples
        assert log_name is not None
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        content = lines.encode(errors="backslashreplace")
        write_atomically(folder / log_name, gzip.compress(content, compresslevel=5, mtime=0))
    names = "+".join(dict.fromkeys(word.strip() for word in options.tasks))
    if len(names) > 100:  # file names end at 255 bytes
        names = f"{names[:90]}_{sha256(names.encode()).hexdigest()[:9]}"
    write_scores(folder / f"{names}{_kind(options)}.json", record)


def scores_page(record: ScoreRecord) -> str:
    """The scores as Markdown; of a group's tasks the group's row alone, of core22's their centered
    accuracies too. Notes below say what was left out."""
    lines = [["task", "metric", "score", "± se", "chance", "n"]]
    hidden = {task for scores in record.tasks.values() for task in scores.covers}
    for task, scores in record.tasks.items():
        if task in hidden and task not in core22.TASKS:
            continue
        for name, metric in scores.metrics.items():
            if task not in hidden or name == core22.CENTERED:
                lines.append(_row(task, name, metric, scores))
    return "\n".join([grid(lines), *_notes(record)])


def _row(task: str, name: str, metric: Metric, scores: TaskScores) -> list[str]:
    error = "-" if metric.se is None else f"{metric.se:.4f}"
    has_chance = name.startswith("acc") and scores.chance is not None
    chance = f"{scores.chance:.2f}" if has_chance else "-"
    return [task, name, f"{metric.value:.4f}", error, chance, str(scores.n or "-")]


def _notes(record: ScoreRecord) -> list[str]:
    notes = []
    if record.limit:
        notes.append(
            f"limit={record.limit}: a part of each task, not to be compared with published scores"
        )
    if record.truncated_requests:
        notes.append(
            f"{record.truncated_requests} requests were longer than the context and lost their"
            " beginning"
        )
    if record.shortened_answers:
        notes.append(
            f"{record.shortened_answers} answers were cut by the end of the context, before the"
            " length that their task asks for"
        )
    for task, scores in record.tasks.items():
        if scores.not_scored:
            notes.append(
                f"{task}: no number was computed for {', '.join(scores.not_scored)}, which its YAML"
                " asks for"
            )
        if scores.missing:
            notes.append(
                f"{task}: a mean of {len(scores.subtasks)} of CORE's {len(core22.TASKS)} tasks,"
                f" without {', '.join(scores.missing)}, and by lm-eval's prompts: not to be"
                " compared with nanochat's CORE"
            )
    return notes


def main(arguments: list[str]) -> int:
    is_shown = os.environ.get("RANK", "0") == "0"
    if "--table" in arguments:
        from eval import table

        return table.main([word for word in arguments if word != "--table"])
    if any(word.partition("=")[0].removeprefix("--") == "fetch" for word in arguments):
        fetch = command(__doc__, FetchOptions, is_shown=is_shown)
        return fetch(lambda o: tasks.fetch(o.fetch, o.tasks, o.include))(arguments)
    scoring = command(__doc__, Options, "run", is_shown=is_shown)
    return scoring(lambda options: scores_page(score(options, join())))(arguments)


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
