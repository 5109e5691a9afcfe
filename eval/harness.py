"""Score a trained model on lm-eval tasks, directly from its checkpoint.

    python -m eval.harness out/RUN --tasks demo
    python -m eval.harness out/RUN --tasks lambada_openai,hellaswag,piqa,arc_easy limit=500

    tasks         names of lm-eval's tasks, groups and tags, comma-separated; `demo` = val_ppl,val_cloze, which are made
                  from the run's own validation shards and work without internet (eval/held_out.py)
    include       folder with task YAMLs of your own
    limit         documents per task at most; none = all. For trying things out: such scores are marked
    micro_batch   sequences per forward pass
    device        auto (a GPU where there is one), cpu, cuda
    dtype         bfloat16 (as trained; an FP8 run is scored with plain BF16 matmuls) or float32
    fp8           off, or any fp8.recipe of training (tensorwise, rowwise, ..): the Linears it converts multiply in FP8,
                  whatever trained the run

Prints a table; writes out/RUN/eval/TASKS.json and the scores into out/RUN/summary.json under "eval" (with fp8=RECIPE:
TASKS_fp8_RECIPE.json, "eval_fp8"). Recipes with one activation scale a tensor (tensorwise, amax) share it between all
that shares a forward pass: their scores depend a little on micro_batch. Needs neither transformers nor a conversion.
Probabilities are normalised over the padded vocabulary, as in training, so that a perplexity here is the training loss;
what would be generated (is_greedy, generate_until) is looked for among the tokenizer's own ids.
"""

import contextlib
import functools
import io
import json
import logging
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tqdm import tqdm

from eval.options import read_options
from eval.sample import Inference, Recipe, fp8_lines, load_for_inference
from runtime.config import ConfigError, read_config

TASKS = Path(__file__).parent / "tasks"
DEMO = ("val_ppl", "val_cloze")


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str
    tasks: tuple[str, ...]
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
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.include is not None and not Path(self.include).is_dir():
            raise ConfigError(f"include={self.include!r} is no folder: give one that holds task YAMLs")
        if not self.task_names:
            raise ConfigError("tasks= names no task: give tasks=demo or a list such as tasks=hellaswag,piqa")

    @property
    def task_names(self) -> list[str]:
        names = [name.strip() for word in self.tasks for name in (DEMO if word.strip() == "demo" else (word,))]
        return list(dict.fromkeys(name for name in names if name))


def score(options: Options, inference: Inference | None = None) -> dict:
    """Run the tasks, write the scores, return {"tasks": {name: {metric: value}}, ..}.

    `inference`: the model that the options mean, where it is loaded already. Raises ConfigError: no such run or task, a
    damaged checkpoint, data that cannot be had, an FP8 recipe that cannot run.
    """
    start = time.perf_counter()
    read_config(options.run)        # before the seconds that lm-eval takes to start
    local = set(DEMO) | _local_tasks(options.include)
    _quiet(offline=local.issuperset(options.task_names))
    from eval.lm import CheckpointLM  # after _quiet(): lm-eval and datasets read their settings on import

    loaded = _load_tasks(options, local)
    if inference is None:
        inference = load_for_inference(options.run, options.device, options.dtype, options.fp8)
        print("".join(f"{line}\n" for line in fp8_lines(inference.layers, options.fp8, inference.device)), end="", flush=True)
    lm = CheckpointLM(inference.model, inference.tokenizer, options.micro_batch, inference.device)
    scores = _evaluate(lm, loaded, options.limit)
    record = {"run": str(options.run), "tasks": scores, "limit": options.limit, "dtype": options.dtype, "fp8": options.fp8,
              "layers_fp8": [layer.name for layer in inference.layers if layer.reason is None],
              "micro_batch": options.micro_batch, "device": str(inference.device), "lm_eval": lm.version,
              "truncated_requests": lm.n_truncated, "wall_s": round(time.perf_counter() - start, 1)}
    _write(Path(options.run), options, record)
    return record


def _load_tasks(options: Options, local: set[str]) -> dict:
    """lm-eval's TaskDict. Its index of 14,000 YAMLs takes seconds, so it is read only where a name is not local."""
    from lm_eval.tasks import TaskManager

    folders = [TASKS] + ([options.include] if options.include else [])
    manager = TaskManager(include_path=folders, include_defaults=not local.issuperset(options.task_names),
                          metadata={"run_dir": str(options.run)} if set(DEMO) & set(options.task_names) else None)
    for name in options.task_names:
        if name not in manager.all_tasks:
            raise ConfigError(f"there is no task {name!r}{_nearest_tasks(name, ['demo', *manager.all_tasks])}")
    loaded: dict = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in options.task_names:
        try:
            part = manager.load([name])
        except ConfigError:
            raise
        except Exception as error:      # a task is foreign code and foreign data: whatever it raises, name the task
            raise ConfigError(f"the task {name!r} could not be loaded ({type(error).__name__}: {_first_line(error)}): "
                              f"if its data come from the Hugging Face Hub, they must be cached or the Hub in reach") from error
        for key in loaded:
            loaded[key] |= part[key]
    for name, task in loaded["tasks"].items():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)        # lm-eval's own default, for equal few-shot examples
        if (task.get_config("generation_kwargs") or {}).get("do_sample"):
            raise ConfigError(f"the task {name!r} asks for sampled answers, but only greedy ones are generated here: "
                              f"leave it out")
    return loaded


def _evaluate(lm, loaded: dict, limit: int | None) -> dict[str, dict]:
    """{task: {metric: value, metric_se: .., chance: .., n: .., docs_sha256: ..}}"""
    from lm_eval import evaluator
    from lm_eval.api import task as lm_eval_task

    lm_eval_task.tqdm = functools.partial(tqdm, disable=True)       # "0/125": the building of requests, done in no time
    with contextlib.redirect_stdout(io.StringIO()):     # "bootstrapping for stddev"
        results = evaluator.evaluate(lm, loaded, limit=limit, bootstrap_iters=1000)
    out = {}
    for name, metrics in results["results"].items():
        samples = results["samples"].get(name, [])
        row = out[name] = {}
        for key, value in metrics.items():
            metric, _, which = key.partition(",")       # "acc,none", "acc_stderr,none", "exact_match,strict-match"
            if not which or not isinstance(value, (int, float)) or metric.endswith("_stderr"):
                continue
            label = metric if which == "none" else f"{metric}.{which}"
            error = metrics.get(f"{metric}_stderr,{which}")
            if not isinstance(error, (int, float)):
                error = _ratio_error(metric, value, [s[metric] for s in samples if metric in s])
            row[label], row[f"{label}_se"] = float(value), None if error is None else float(error)
        row["n"] = len({s["doc_id"] for s in samples})
        if task := loaded["tasks"].get(name):
            row["chance"] = _chance(task, samples)
            row["docs_sha256"] = _identity(samples)
    return out


def _ratio_error(metric: str, value: float, pairs: list) -> float | None:
    """Standard error of a perplexity metric, a ratio of sums over documents; lm-eval gives none. None where unknown.

    Ratio estimator R = sum(ll) / sum(size): variance n / (n - 1) * sum((ll - R size)^2) / sum(size)^2 (Cochran,
    Sampling Techniques, chapter 6), carried through exp() for a perplexity by its derivative.
    """
    n = len(pairs)
    if metric not in ("bits_per_byte", "byte_perplexity", "word_perplexity") or n < 2:
        return None
    size = sum(s for _, s in pairs)
    ratio = sum(ll for ll, _ in pairs) / size
    error = math.sqrt(n / (n - 1) * sum((ll - ratio * s) ** 2 for ll, s in pairs)) / size      # nats per unit
    return error / math.log(2) if metric == "bits_per_byte" else error * value


def _chance(task, samples: list[dict]) -> float | None:
    """Accuracy of guessing, for multiple choice with one right answer; None elsewhere."""
    if task.OUTPUT_TYPE != "multiple_choice" or not samples:
        return None
    choices = [len(task.doc_to_choice(s["doc"])) for s in samples]
    return sum(1 / n for n in choices) / len(choices)


def _identity(samples: list[dict]) -> str:
    """A hash of the documents scored, in order: equal for two runs whose scores may be compared."""
    from hashlib import sha256
    return sha256("".join(s["doc_hash"] for s in samples).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------------------- results

def table(record: dict) -> list[str]:
    """The scores as lines for the console."""
    lines = [f"{'task':24} {'metric':24} {'score':>9} {'+/- se':>9} {'chance':>7} {'n':>6}"]
    for name, row in record["tasks"].items():
        for metric in (key for key in row if f"{key}_se" in row):
            error, chance = row[f"{metric}_se"], row.get("chance") if metric.startswith("acc") else None
            error, chance = "-" if error is None else f"{error:.4f}", "-" if chance is None else f"{chance:.2f}"
            lines.append(f"{name:24} {metric:24} {row[metric]:9.4f} {error:>9} {chance:>7} {row['n'] or '-':>6}")
    if record["limit"]:
        lines.append(f"limit={record['limit']}: a part of each task, not to be compared with published scores")
    if record["truncated_requests"]:
        lines.append(f"{record['truncated_requests']} requests were longer than the context and lost their beginning")
    return lines


def _write(run_dir: Path, options: Options, record: dict) -> None:
    name = "+".join(dict.fromkeys(word.strip() for word in options.tasks))[:100]        # file names end at 255 bytes
    name += "" if options.fp8 == "off" else f"_fp8_{options.fp8}"
    folder = run_dir / "eval"
    folder.mkdir(exist_ok=True)
    replace_file(folder / f"{name}.json", as_json(record))
    path = run_dir / "summary.json"
    if not path.is_file():
        print(f"the run is not finished, so there is no {path}: the scores are in {folder / name}.json only",
              file=sys.stderr)
        return
    marked = {"limit": options.limit} if options.limit else {}
    new = {task: row | marked for task, row in record["tasks"].items()}
    try:
        summary = json.loads(path.read_text())
        if options.fp8 == "off":
            changed = {"eval": dict(summary.get("eval") or {}) | new}
        else:
            known = dict(summary.get("eval_fp8") or {})
            changed = {"eval_fp8": known | {options.fp8: dict(known.get(options.fp8) or {}) | new}}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): the scores are in {folder / name}.json only") from error
    replace_file(path, as_json(summary | changed))


def as_json(content: dict) -> str:
    return json.dumps(content, indent=1) + "\n"


def replace_file(path: Path, text: str) -> None:
    """Write by a temporary name, so that a reader never meets half a file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(text)
    os.replace(part, path)


# ---------------------------------------------------------------------------------------------------------- and lm-eval

def _local_tasks(include: str | None) -> set[str]:
    """Names of the tasks in the user's folder whose data lie in local files."""
    names = set()
    for path in Path(include).rglob("*.yaml") if include else ():
        text = path.read_text(errors="replace")
        name = re.search(r"^task:\s*[\"']?([\w.-]+)[\"']?\s*(?:#.*)?$", text, re.M)
        data = re.search(r"^dataset_path:\s*[\"']?(?:json|parquet|csv|text|arrow)[\"']?\s*(?:#.*)?$", text, re.M)
        if name and data and "://" not in text:
            names.add(name[1])
    return names


def _quiet(offline: bool) -> None:
    """Silence lm-eval's logs; with `offline`, keep every library away from the network."""
    os.environ["DISABLE_MULTIPROC"] = "1"       # lm-eval's bootstrap would fork a process that holds torch's threads
    if offline:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE"):
            os.environ[name] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def _nearest_tasks(name: str, names: list[str]) -> str:
    import difflib
    near = difflib.get_close_matches(name, names, 3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else "; `lm-eval ls tasks` lists them all"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments) or not arguments:
        print(__doc__)
        return 0 if arguments else 2
    try:
        record = score(read_options(Options, arguments))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(table(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
