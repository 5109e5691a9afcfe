"""Expand a study, which sizes to train how long in which precision from which seeds, into the exact list of its runs.

A study is a file that binds `study = Study(...)`, such as configs/study_chinchilla.py. Its runs follow the
warm-up-stable-decay schedule (2404.06395): for each size, recipe and seed one run, the trunk, is trained to the largest
budget; every smaller budget is a branch that starts from the trunk's checkpoint where its own decay begins, so it costs
decay_share of its length and still ends, bit for bit, in the weights of the whole run. Warm-up is that of the size's
config file at its own budget, the same number of steps for every budget. A null run is a BF16 run once more, with the same
seed and the same tokens, which differs in rounding alone: what a difference of precision is held against.
"""

import difflib
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
from runtime.cli import UserError
from runtime.config import Config, FP8Config, load_config

ROOT = Path(__file__).resolve().parents[1]
FORMAT_VERSION = 1
RECIPES = ("bf16", *(recipe for recipe in get_args(get_type_hints(FP8Config)["recipe"]) if recipe != "off"))


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
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", str(self.name)):
            yield f"name={self.name!r} must be one folder name, of letters, digits, '_', '-' and '.'"
        if not (isinstance(self.sizes, tuple) and self.sizes and all(isinstance(size, Size) for size in self.sizes)):
            yield f"sizes={self.sizes!r} must be a tuple of at least one Size(config=...)"
            return
        for name, values in (("tokens_per_param", self.tokens_per_param), ("recipes", self.recipes), *(
                (f"{key} of {size.config}", getattr(size, key)) for size in self.sizes
                for key in ("tokens_per_param", "seeds", "recipes", "lr") if getattr(size, key) is not None)):
            if not isinstance(values, tuple) or not values or len(set(values)) < len(values):
                yield f"{name}={values!r} must be a tuple of at least one value, each once"
            elif name.startswith("tokens") and not all(_is_number(v) and 0 < v < 1e6 for v in values):
                yield f"{name}={values!r}: every budget must be a number of tokens per parameter above 0"
            elif name.startswith("seeds") and not all(isinstance(v, int) for v in values):
                yield f"{name}={values!r}: every seed must be a whole number"
            elif name.startswith("lr") and not all(_is_number(v) and 0 < v < math.inf for v in values):
                yield f"{name}={values!r}: every peak learning rate must be a number above 0"
            elif name.startswith("recipes") and (wrong := [v for v in values if v not in RECIPES]):
                yield f"{name}={values!r}: {wrong[0]!r} is none of {', '.join(RECIPES)}"
        if self.params not in ("total", "nonembed"):
            yield f"params={self.params!r} must be 'total' or 'nonembed': which parameters tokens_per_param counts"
        if not isinstance(self.null, tuple) or not all(isinstance(one, str) and "=" in one for one in self.null):
            yield f"null={self.null!r} must be a tuple of overrides, such as ('parallel.compile=false',)"
        for size in self.sizes:
            if size.null_seeds and not (self.null and isinstance(size.null_seeds, tuple) and isinstance(size.seeds, tuple)
                                        and set(size.null_seeds) <= set(size.seeds) and "bf16" in (size.recipes or self.recipes)):
                yield (f"null_seeds={size.null_seeds!r} of {size.config} must be seeds of its own BF16 runs, and null= must say "
                       f"what differs in them")
        for name in ("margin_percent", "decay_share"):
            value, below = getattr(self, name), 100 if name == "margin_percent" else 1
            if not _is_number(value) or not 0 < value < below:
                yield f"{name}={value!r} must be a number above 0 and below {below}"


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
    wanted = ("params_total", "params_nonembed", "params_matmul", "flops_per_token")
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
            steps=steps, tokens_per_step=config.data.tokens_per_step, **{key: counts[key] for key in wanted}, lr=lr,
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
        old = json.loads(path.read_text())
        before, now = ({row["run"]: row for row in value["runs"]} for value in (old, new))
        old = {"params": "total", **old}        # of studies declared before the budgets could count others
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
    tmp = folder / f".study.json.{os.getpid()}"
    tmp.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(tmp, folder / "study.json")


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
    if "study" not in bound:
        raise UserError(f"{path} must bind study = Study(...), but it binds no study" + (
            ": it is a config, which train.py trains" if "config" in bound else ""))
    if not isinstance(bound["study"], Study):
        raise UserError(f"{path} must bind study = Study(...), but study is {type(bound['study']).__name__}")
    return bound["study"]


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
