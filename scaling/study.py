"""A study: which sizes are trained how long, in which precision, from which seeds; its runs, and how far each is.

A study is a file that binds `study = Study(...)`, such as configs/study_chinchilla.py. Its runs follow the
warm-up-stable-decay schedule (2404.06395): for each size, recipe and seed one run, the trunk, is trained to the largest
budget; every smaller budget is a branch that starts from the trunk's checkpoint where its own decay begins, so it costs
decay_share of its length and still ends, bit for bit, in the weights of the whole run. Warm-up is that of the size's
config file at its own budget, the same number of steps for every budget. A null run is a BF16 run once more, with the same
seed and the same tokens, which differs in rounding alone: what a difference of precision is held against.
"""

import difflib
import fcntl
import json
import math
import os
import re
import runpy
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import torch

from model import GPT, GPTConfig
from runtime.checkpoint import latest, step_of
from runtime.cli import UserError, type_problems
from runtime.config import Config, FP8Config, load_config, read_config
from runtime.rows import metrics_rows, read_rows, write_json

ROOT = Path(__file__).resolve().parents[1]
FORMAT_VERSION = 1
RECIPES = ("bf16", *(recipe for recipe in get_args(get_type_hints(FP8Config)["recipe"]) if recipe != "off"))
COUNTS = ("params_total", "params_nonembed", "params_matmul", "flops_per_token")
ENDED = "sweep.py: exit code "      # begins the last line of a log whose run has ended


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model size. `config` is its BF16 config file, from the repository's root; the rest as in Study."""
    config: str
    seeds: tuple[int, ...] = (1337,)
    tokens_per_param: tuple[float, ...] | None = None   # none = the study's
    recipes: tuple[str, ...] | None = None              # none = the study's
    lr: tuple[float, ...] | None = None                 # peak learning rates, a run for each; none = the config's alone
    null_seeds: tuple[int, ...] = ()                    # of `seeds`, those whose BF16 runs are repeated as Study.null says
    held_out: bool = False                              # trained only by name, once its prediction is frozen


@dataclass(frozen=True, kw_only=True)
class Study:
    name: str                                           # runs lie in out/<name>/<run>/
    sizes: tuple[Size, ...]
    tokens_per_param: tuple[float, ...]                 # budgets, in training tokens per parameter
    margin_percent: float                               # FP8 within this share of BF16's loss is called equivalent
    params: Literal["total", "nonembed"] = "total"      # which parameters the budgets count
    recipes: tuple[str, ...] = ("bf16", "tensorwise")   # "bf16", or values of fp8.recipe
    null: tuple[str, ...] = ()                          # overrides of null runs that change their rounding alone
    decay_share: float = 0.2                            # share of every run's steps spent decaying

    def __post_init__(self):
        if problems := list(self._problems()):
            raise UserError("\n".join(problems))

    def _problems(self):
        if problems := type_problems("", self) or [p for size in self.sizes for p in type_problems(f"{size.config}: ", size)]:
            yield from problems     # what follows relies on the types
            return
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            yield f"name={self.name!r} must be one folder name, of letters, digits, '_', '-' and '.'"
        for whose, one in (("", self), *((f"{size.config}: ", size) for size in self.sizes)):
            for key in ("sizes", "seeds", "tokens_per_param", "lr", "recipes"):
                values = getattr(one, key, None)
                if values is not None and (not values or len(set(values)) < len(values)):
                    yield f"{whose}{key}={values!r} must hold at least one value, each once"
                elif key in ("tokens_per_param", "lr") and not all(0 < value < math.inf for value in values or ()):
                    yield f"{whose}{key}={values!r} must be numbers above 0"
                elif key == "recipes" and (wrong := [value for value in values or () if value not in RECIPES]):
                    yield f"{whose}recipes={values!r}: {wrong[0]!r} is none of {', '.join(RECIPES)}"
        for size in self.sizes:
            if size.null_seeds and not (self.null and set(size.null_seeds) <= set(size.seeds)
                                        and "bf16" in (size.recipes or self.recipes)):
                yield (f"{size.config}: null_seeds={size.null_seeds!r} must be seeds of its own BF16 runs, and null= must say "
                       f"what differs in them")
        for name, below in (("margin_percent", 100), ("decay_share", 1)):
            if not 0 < getattr(self, name) < below:
                yield f"{name}={getattr(self, name)!r} must be a number above 0 and below {below}"


@dataclass(frozen=True)
class Row:
    """One run of a study: its exact counts, what it starts from, the arguments of train.py that make it."""
    run: str
    size: str
    recipe: str
    seed: int
    tokens_per_param: float
    tokens: int                     # trained on when it ends, its trunk's included
    steps: int
    tokens_per_step: int
    params_total: int
    params_nonembed: int
    params_matmul: int
    flops_per_token: int            # 6 params_matmul + attention
    lr: float | None                # peak learning rate where the study tries several; none = the config's
    repeat: int                     # 1: a null run
    parent: str | None              # run that it branches off from; none = from scratch
    parent_step: int | None
    config: str
    overrides: tuple[str, ...]      # all but out= and start_from=, which depend on where the study lies
    held_out: bool

    @property
    def flops(self) -> float:
        """Of the whole run from scratch."""
        return self.flops_per_token * self.tokens

    @property
    def own_tokens(self) -> int:
        """Trained on by this run itself: of a branch, without what its trunk had seen."""
        return self.tokens - (self.parent_step or 0) * self.tokens_per_step

    @property
    def own_flops(self) -> float:
        return self.flops_per_token * self.own_tokens

    def arguments(self, folder: Path) -> list[str]:
        """Of train.py, for a study whose runs lie in `folder`."""
        start = [f"start_from={checkpoint_of(self, folder)}"] if self.parent else []
        return [str(ROOT / self.config), *self.overrides, f"out={folder}", *start]


def checkpoint_of(row: Row, folder: Path) -> Path:
    """Where a branch leaves its trunk."""
    return folder / row.parent / "checkpoints" / f"step_{row.parent_step:08d}"


# ------------------------------------------------------------------------------------------------------ the list of runs

def load_study(path: str | Path) -> Study:
    """The Study that the file at `path` binds. Raises UserError: no such file, no `study` in it, an impossible one."""
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("study_*.py")], 1)
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"there is no study file {path}{where}" + (f"; did you mean {path.parent / near[0]}?" if near else ""))
    try:
        bound = runpy.run_path(str(path))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:
        raise UserError(f"{path} could not be run: {type(error).__name__}: {error}") from error
    if not isinstance(bound.get("study"), Study):
        raise UserError(f"{path} must bind study = Study(...), but " + (
            f"study is {type(bound['study']).__name__}" if "study" in bound else "it binds no study"
            + ": it is a config, which train.py trains" * ("config" in bound)))
    return bound["study"]


def expand(study: Study) -> list[Row]:
    """All runs: by size, seed and recipe, a trunk before its branches.

    Raises UserError for a config file that is missing, wrong, in FP8, or a branch that would leave during warm-up."""
    rows = []
    for size in study.sizes:
        base = load_config(ROOT / size.config)
        if base.fp8 != FP8Config():
            raise UserError(f"{size.config} has fp8.recipe={base.fp8.recipe}: give its BF16 config; recipes= adds the others")
        if base.data.micro_batch == "auto":
            raise UserError(f"{size.config} has data.micro_batch=auto: give a number, for runs are compared and branch "
                            f"off from one another at the same one")
        for seed in size.seeds:
            for lr in size.lr or (None,):
                for recipe in size.recipes or study.recipes:
                    rows += _family(study, size, base, seed, recipe, lr)
                    if recipe == "bf16" and seed in size.null_seeds:
                        rows += _family(study, size, base, seed, recipe, lr, repeat=1)
    names = [row.run for row in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{study.name} names the run {min(twice)} twice: give each size once, with all its seeds and budgets")
    return rows


def _family(study: Study, size: Size, base: Config, seed: int, recipe: str, lr: float | None, repeat: int = 0) -> list[Row]:
    """A trunk with its branches."""
    size_name, counts = base.run.removesuffix("_bf16"), _counts(base.model)
    name = f"{size_name}_{recipe}" + "_null" * repeat + (f"_lr{lr:g}" if lr else "")
    largest, *smaller = sorted(size.tokens_per_param or study.tokens_per_param, reverse=True)
    rows, warmup = [], base.optim.warmup_steps(base.total_steps)
    for budget in (*smaller, largest):
        steps = math.ceil(budget * counts[f"params_{study.params}"] / base.data.tokens_per_step)
        optim = replace(base.optim, schedule="wsd", decay_share=study.decay_share, warmup_share=min(1.0, warmup / steps))
        leaves = steps - optim.decay_steps(steps)
        if warmup > leaves:
            raise UserError(f"{size_name} at {budget:g} tokens per parameter: its {steps} steps hold no {warmup} steps of "
                            f"warm-up (optim.warmup_share of {size.config}) before the decay begins at step {leaves}: drop "
                            f"that budget")
        run, is_branch = f"{name}_t{budget:g}_s{seed}", budget != largest
        length = ([f"tokens_per_param={budget!r}"] if study.params == "total" else ["tokens_per_param=none", f"steps={steps}"])
        overrides = [f"run={run}", f"seed={seed}", *length, "optim.schedule=wsd",
                     f"optim.decay_share={optim.decay_share!r}", f"optim.warmup_share={optim.warmup_share!r}"]
        overrides += [f"optim.lr={lr!r}"] if lr else []
        overrides += [f"fp8.recipe={recipe}"] if recipe != "bf16" else []
        overrides += ["repeat=1", *study.null] if repeat else []
        if not is_branch and smaller:
            overrides.append("checkpoint.at=" + ",".join(str(row.parent_step) for row in rows))
        config = load_config(ROOT / size.config, overrides)     # judges recipe and dimensions now, not in a week
        if repeat:
            plain = load_config(ROOT / size.config, [one for one in overrides if one not in study.null])
            if (config.identity(), config.data.micro_batch) != (plain.identity(), plain.data.micro_batch):     # pair_id has both
                raise UserError(f"null={study.null!r} changes what {size_name} is trained on or by: a null run may differ in "
                                f"its rounding alone, as with model.loss_chunk")
        rows.insert(0, Row(
            run=run, size=size_name, recipe=recipe, seed=seed, tokens_per_param=budget, tokens=config.total_tokens,
            steps=steps, tokens_per_step=config.data.tokens_per_step, **{key: counts[key] for key in COUNTS}, lr=lr,
            repeat=repeat, parent=f"{name}_t{largest:g}_s{seed}" if is_branch else None,
            parent_step=leaves if is_branch else None, config=size.config, overrides=tuple(overrides), held_out=size.held_out))
    return rows


@lru_cache
def _counts(model: GPTConfig) -> dict[str, int]:
    with torch.device("meta"):
        return GPT(model).counts()


def declare(study: Study, rows: list[Row], folder: Path) -> dict:
    """What `folder`/study.json is to say before the first run: the margin, what is held out, every run.

    Raises UserError where that file says otherwise and one of its runs has finished: only additions are left then."""
    new = {"format_version": FORMAT_VERSION, "study": study.name,
           "declared": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "margin_percent": study.margin_percent,
           "params": study.params, "held_out": [row.run for row in rows if row.held_out],
           "runs": [{**asdict(row), "overrides": list(row.overrides)} for row in rows]}
    path = folder / "study.json"
    if not path.exists():
        return new
    try:
        old = {"params": "total", **json.loads(path.read_text())}       # older studies counted by all parameters
        before, now = ({row["run"]: row for row in value["runs"]} for value in (old, new))
        changes = [f"{key} was {old[key]}, now {new[key]}" for key in ("format_version", "study", "margin_percent", "params")
                   if old[key] != new[key]]
        declared = old["declared"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): it holds what was declared before the first "
                        f"run; restore it, or give the study another name") from error
    for run, row in before.items():
        changes += ([f"{run}: {key} was {value}, now {now[run].get(key)}" for key, value in row.items()
                     if now[run].get(key) != value] if run in now else [f"{run} is gone"])
    if changes and any((folder / run / "summary.json").exists() for run in before):
        raise UserError(f"{path} was declared before runs that have finished since: {changes[0]}"
                        f"{f' (and {len(changes) - 1} more)' * (len(changes) > 1)}; runs may be added, but nothing that is "
                        f"there may change: give the changed study another name=")
    return new if changes else {**new, "declared": declared}


def write_declaration(folder: Path, value: dict) -> None:
    """By a temporary name of this process's own: several sweeps of one study may all be the first."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f".study.json.{os.getpid()}"
    write_json(own, value)
    os.replace(own, folder / "study.json")


# ---------------------------------------------------------------------------------------------------- how far each run is

USED = {"status": str, "loss_bf16": int | float, "tok_per_s_median": int | float, "n_gpu": int, "device": str}    # of a summary
MAY_LACK = {"wall_s": int | float, "parent_step": int, "data_sha256": str, "val_sha256": str, "pair_id": str}   # or hold null


def summary_of(row: Row, folder: Path) -> dict | None:
    """summary.json of a finished run of the study in `folder`, else None. Raises UserError for a damaged one."""
    path = folder / row.run / "summary.json"
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text())
        given = USED | {key: kind for key, kind in MAY_LACK.items() if summary.get(key) is not None}
        wrong = [f"{key} is {summary.get(key)!r}" for key, kind in given.items() if not _fits(summary.get(key), kind)]
    except (ValueError, AttributeError) as error:       # no JSON, or no object
        wrong = [error]
    if wrong:
        raise UserError(f"{path} is damaged ({wrong[0]}): delete it, and --run evaluates the last checkpoint again")
    return summary


def _fits(value, kind) -> bool:
    return isinstance(value, kind) and (kind is str or not isinstance(value, bool) and 0 < value < math.inf)


def state_of(row: Row, folder: Path) -> str:
    """How far a run is: done, diverged, running, failed and why, at step 400, held out or missing."""
    if summary := summary_of(row, folder):
        return "done" if summary["status"] == "ok" else summary["status"]
    if (log := folder / f"{row.run}.log").exists():
        with open(log, errors="replace") as file:
            if not can_lock(file, fcntl.LOCK_SH):
                return "running"
            *attempts, code = file.read().split(ENDED)
        if attempts and code.strip() != "0" and code.strip().lstrip("-").isdigit():
            told = [line for line in attempts[-1].splitlines() if line.strip()] or ["nothing was printed"]
            sentence = next((line for line in told if line.startswith("train.py: ")), told[-1])
            return f"failed, exit code {code.strip()}: {sentence} ({log})"
    if checkpoint := latest(folder / row.run):
        return f"at step {step_of(checkpoint)}"
    return "held out" if row.held_out else "missing"


def can_lock(file, kind: int) -> bool:
    """Lock an open log, shared or exclusively; False where the other has it: a run that lives holds its log exclusively."""
    for _ in range(5):      # another's look at the table is over at once
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def placed(row: Row, folder: Path) -> Row:
    """The row as it is to be run, or was: a branch begins from scratch where its trunk is done but its checkpoint is gone.

    So it is with runs that were copied without their checkpoints, which are large. A branch that has begun goes on as it was
    begun."""
    if row.parent is None:
        return row
    if summary := summary_of(row, folder):
        is_branch = summary.get("parent_step") is not None
    elif latest(folder / row.run):
        try:
            is_branch = read_config(folder / row.run).start_from is not None
        except UserError:     # train.py has the sentence for it
            is_branch = True
    else:
        is_branch = (checkpoint_of(row, folder) / "DONE").exists() or not (folder / row.parent / "summary.json").exists()
    return row if is_branch else replace(row, parent=None, parent_step=None)


def tokens_left(row: Row, folder: Path) -> int:
    """Tokens that a run, placed() or not, has yet to train on: none of a finished one."""
    if summary_of(row, folder):
        return 0
    saved = latest(folder / row.run)
    return (row.steps - step_of(saved)) * row.tokens_per_step if saved else row.own_tokens


def has_unsaved(row: Row, folder: Path) -> bool:
    """Whether a run has done a step that no checkpoint of it holds: one that still compiles, or evaluates, has not."""
    saved = latest(folder / row.run)
    rows = metrics_rows(read_rows(folder / row.run / "metrics.jsonl"))
    return max((line["step"] for line in rows if line["kind"] == "train"), default=0) > (step_of(saved) if saved else 0)
