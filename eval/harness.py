"""Score a trained model on lm-eval tasks, directly from its checkpoint.

    python -m eval.harness out/RUN --tasks demo
    python -m eval.harness out/RUN --tasks core
    torchrun --nproc_per_node=8 -m eval.harness out/RUN --tasks core
    python -m eval.harness hf:gpt2 --tasks core                         a public model, scored by the same command
    python -m eval.harness --table out/*                                all that was scored, as a table and a figure
    python -m eval.harness --fetch DIR tasks=core                       saves the tasks' data; then --offline DIR needs no network

    tasks         names of lm-eval's tasks, groups and tags, comma-separated, and three groups of ours:
                  demo    val_ppl, val_cloze: made from the run's own validation shards (eval/held_out.py), no network
                  core    wikitext, lambada_openai, hellaswag, piqa, arc_easy, arc_challenge, openbookqa, boolq, sciq,
                          winogrande, without examples shown
                  full    core, mmlu with five examples and commonsense_qa, at chance below a billion parameters
    offline       folder that --fetch filled
    include       folder with task YAMLs of your own; their data_files are looked up beside them
    limit         documents per task at most; none = all. For trying things out: such scores are marked
    micro_batch   sequences of a full context per forward pass; of shorter ones as many as have no more tokens. A context
                  beyond 2,048 tokens counts as 2,048; longer sequences go one at a time. On a CPU no pass has more than 4,096
    device        auto (a GPU where there is one), cpu, cuda
    dtype         bfloat16 (as trained; an FP8 run is scored with plain BF16 matmuls) or float32
    fp8           off, or any fp8.recipe of training (tensorwise, rowwise, ..): the Linears it converts multiply in FP8,
                  whatever trained the run

Prints a table; writes out/RUN/eval/TASKS.json, lm-eval's log of every document beside it (samples_TASK.jsonl.gz) and, but
for limit= and dtype=float32, the scores into the out/RUN/summary.json of a finished run under "eval" (with fp8=RECIPE:
TASKS_fp8_RECIPE.json, "eval_fp8"). A run that is still training is scored at its newest checkpoint. Recipes with one
activation scale a tensor (tensorwise, amax) share it between all that shares a forward pass: their scores depend a little
on micro_batch. Needs neither transformers nor a conversion. Probabilities are normalised over the padded vocabulary, as in
training: with the tokenizers gpt2 and byte a perplexity here is the training loss of each document by itself. Where an
imported tokenizer puts a token before every text, that token is scored too, as lm-eval does for transformers' models. What
would be generated (is_greedy, generate_until) is looked for among the tokenizer's own ids.
"""

import contextlib
import ctypes
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Literal

from eval import task_list
from eval.ranks import Ranks, is_first, joined, leave
from eval.results import evaluate, table, write
from eval.sample import Inference, Recipe, fp8_lines, load_for_inference, pick_device
from eval.task_data import save_tasks
from runtime.checkpoint import latest, step_of
from runtime.cli import UserError, read_options
from runtime.config import read_config
from runtime.machine import memory_error


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str
    tasks: tuple[str, ...]
    offline: str | None = None
    include: str | None = None
    limit: int | None = None
    micro_batch: int = 16
    device: str = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    fp8: Recipe = "off"

    POSITIONAL: ClassVar = ("run",)

    def __post_init__(self):
        for name in ("limit", "micro_batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1")
        check_tasks(self.tasks, self.include)
        if self.public and self.fp8 != "off":
            raise UserError(f"fp8={self.fp8} converts runs of ours, and {self.run} is none: drop it")

    @property
    def task_names(self) -> list[str]:
        return task_list.expand(self.tasks)

    @property
    def public(self) -> str | None:
        """Name of the public model where the run is one: hf:NAME."""
        return self.run.removeprefix("hf:") if self.run.startswith("hf:") else None


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    fetch: str                              # the folder
    tasks: tuple[str, ...]
    include: str | None = None

    POSITIONAL: ClassVar = ()

    def __post_init__(self):
        check_tasks(self.tasks, self.include)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    paths: tuple[str, ...]                  # runs, or folders of runs
    table: bool = True
    out: str = "out/table"

    POSITIONAL: ClassVar = ("paths",)


def check_tasks(tasks: tuple[str, ...], include: str | None) -> None:
    if include is not None and not Path(include).is_dir():
        raise UserError(f"include={include!r} is no folder: give one that holds task YAMLs")
    if not task_list.expand(tasks):
        raise UserError("tasks= names no task: give tasks=demo or a list such as tasks=hellaswag,piqa")


# ---------------------------------------------------------------------------------------------------------------- score

def score(options: Options, inference: Inference | None = None, ranks: Ranks | None = None) -> dict:
    """Run the tasks, write the scores, return {"tasks": {name: {metric: value}}, ..}.

    `inference`: the model that the options mean, where it is loaded already. With `ranks` they share the work, each returns
    the record, and the first writes. Raises UserError: no such run or task, a damaged checkpoint, data that cannot be
    had, an FP8 recipe that cannot run; for the mistakes of any rank on all. Raises OSError where memory is too small.
    """
    start, ranks = time.perf_counter(), ranks or Ranks()
    names = options.task_names
    if options.public is None:
        read_config(options.run)        # before the seconds that lm-eval takes to start
    elif set(task_list.DEMO) & set(names):
        raise UserError(f"the demo tasks are made from a run's own validation shards, which {options.run} has not")
    task_list.quiet(options.offline is not None or options.public is None and task_list.is_local(names, options.include))
    with _enough_memory("take a device with more, or dtype=bfloat16"):
        lm, loaded, inference, step = ranks.together(lambda: _prepare(options, inference, ranks))
    if len(set(ranks.gather(step))) > 1:
        raise UserError(f"{options.run} wrote a checkpoint while the processes read it, each another one: start again")
    with _enough_memory(f"give a smaller one than micro_batch={options.micro_batch}"):
        scores, samples = ranks.together(lambda: evaluate(lm, loaded, options.limit))
    record = {"run": str(options.run), "step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), "tasks": scores,
              "limit": options.limit, "dtype": options.dtype, "fp8": options.fp8,
              "layers_fp8": [layer.name for layer in inference.layers if layer.reason is None] if inference else [],
              "micro_batch": options.micro_batch, "device": str(lm.device), "lm_eval": lm.version,
              "truncated_requests": lm.n_truncated, "wall_s": round(time.perf_counter() - start, 1)}
    if ranks.is_main:
        write(_folder(options), "+".join(dict.fromkeys(word.strip() for word in options.tasks)), record, samples,
              has_summary=options.public is None)
    return record


@contextlib.contextmanager
def _enough_memory(advice: str) -> Iterator[None]:
    """Turn what memory says when it is full, in as many ways as there are allocators, into an OSError with a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:      # an OSError is what another rank met, see Ranks.together
        text = str(error)
        if memory_error(error) is None:
            raise
        raise OSError(f"the memory is full ({(text.splitlines() or ['no more to be had'])[0][:200]}): {advice}") from error


def _prepare(options: Options, inference: Inference | None, ranks: Ranks) -> tuple:
    """What answers the requests, the tasks that make them, the model where it is one of ours, and its checkpoint's step."""
    loaded = task_list.load(options.task_names, options.include, options.run, options.offline)
    device = ranks.device(options.device)
    if options.public is not None:
        if ranks.size > 1:
            raise UserError(f"{options.run} is scored by one process: start it without torchrun")
        from eval.public import public_lm
        return public_lm(options.public, pick_device(device), options.dtype, options.micro_batch), loaded, None, None
    from eval.lm import CheckpointLM  # after quiet(): lm-eval and datasets read their settings on import
    step = _step(options.run)
    if inference is None:
        inference = load_for_inference(options.run, device, options.dtype, options.fp8)
        while step != (newest := _step(options.run)):       # the run is training: which of the two was read?
            step, inference = newest, load_for_inference(options.run, device, options.dtype, options.fp8)
        if ranks.is_main:
            for line in fp8_lines(inference.layers, options.fp8, inference.device):
                print(line, flush=True)
    lm = CheckpointLM(inference.model, inference.tokenizer, options.micro_batch, inference.device, ranks)
    return lm, loaded, inference, step


def _step(run_dir: str) -> int | None:
    newest = latest(Path(run_dir))
    return None if newest is None else step_of(newest)


def _folder(options: Options) -> Path:
    if options.public is None:
        return Path(options.run)
    from eval.public import public_dir
    return public_dir(options.public)


# ---------------------------------------------------------------------------------------------------------- entry point

def fetch(options: FetchOptions) -> list[str]:
    """Save the data of the tasks; a line for each. Raises UserError, OSError."""
    task_list.quiet(offline=False)
    names = task_list.expand(options.tasks)
    made = [name for name in names if name in task_list.DEMO]
    lines = [f"{name}: nothing to save, it is made from a run's own validation shards" for name in made]
    if names := [name for name in names if name not in made]:
        lines += save_tasks(Path(options.fetch), task_list.load(names, options.include)["tasks"])
    if not (Path(options.fetch) / "manifest.json").is_file():
        lines.append(f"{options.fetch} was not made: score these tasks without offline=")
    return lines


def _main(arguments: list[str], ranks: Ranks) -> list[str]:
    """Do what the arguments ask for; lines for the console."""
    if any(word.partition("=")[0].removeprefix("--") == "fetch" for word in arguments):
        return fetch(read_options(FetchOptions, arguments))
    return table(score(read_options(Options, arguments), ranks=ranks))


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments) or not arguments:
        print(__doc__)
        return 0 if arguments else 2
    code = 0
    try:
        if "--table" in arguments:
            from eval import table as results_table
            options = read_options(TableOptions, arguments)
            return results_table.main(list(options.paths), options.out)
        with joined() as ranks:
            lines = _main(arguments, ranks)
    except UserError as error:
        lines, code = [str(error)], 2
    except OSError as error:        # the machine's fault: a full disk, a process that is gone
        lines, code = [f"{error.filename}: {error.strerror or error}" if error.filename else str(error)], 1
    except KeyboardInterrupt:
        lines, code = [""], 130
    if is_first():
        print("\n".join(lines), file=sys.stderr if code else sys.stdout)
    return code


def keep_memory() -> None:
    """Let glibc keep what tensors give back: fresh pages for each piece of logits cost a CPU a fifth of a whole scoring."""
    with contextlib.suppress(OSError, AttributeError):      # another C library has no such switch
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)             # M_MMAP_MAX: nothing from mmap, which goes back to the system when freed
        libc.mallopt(-1, 2**31 - 1)     # M_TRIM_THRESHOLD: nor is the heap's end given back


if __name__ == "__main__":
    keep_memory()
    leave(main(sys.argv[1:]))
