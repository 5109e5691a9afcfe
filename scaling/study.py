"""A study: which sizes are trained how long, in which precision, from which seeds; and the runs
that this makes.

A study is a file that binds `study = Study(...)`, such as configs/study_chinchilla.py. Its runs
follow the warm-up-stable-decay schedule (2404.06395): for each size, recipe and seed one run, the
trunk, is trained to the largest budget; every smaller budget is a branch that starts from the
trunk's checkpoint where its own decay begins, so it costs decay_share of its length and still ends,
bit for bit, in the weights of the whole run. Warm-up is that of the size's config file at its own
budget, the same number of steps for every budget. A null run is a BF16 run once more, with the same
seed and the same tokens, which differs in rounding alone: what a difference of precision is held
against."""

import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fp8.recipes import fp8_overrides
from lib.errors import UserError
from lib.machine import ROOT
from lib.text import nearest
from lib.values import expand_home, type_problems
from model import GPT
from runtime.config import Config, FP8Config, apply_overrides, load_config
from runtime.config_file import run_file
from runtime.log import pair_id


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model size. `config` is its BF16 config file, beside the study or from the repository's
    root; the rest as in Study."""

    config: str
    seeds: tuple[int, ...] = (1337,)
    tokens_per_param: tuple[float, ...] | None = None  # none = the study's
    recipes: tuple[str, ...] | None = None  # none = the study's
    # peak learning rates, a run for each; none = the config's alone
    lr: tuple[float, ...] | None = None
    switch: tuple[str, ...] | None = None  # none = the study's
    # of `seeds`, those whose BF16 runs are repeated as Study.null says
    null_seeds: tuple[int, ...] = ()
    held_out: bool = False  # trained only by name, once its prediction is frozen


@dataclass(frozen=True, kw_only=True)
class Study:
    name: str  # runs lie in out/<name>/<run>/
    sizes: tuple[Size, ...]
    tokens_per_param: tuple[float, ...]  # budgets, in training tokens per parameter
    margin_percent: float  # FP8 within this share of BF16's loss is called equivalent
    params: Literal["total", "nonembed"] = "total"  # which parameters the budgets count
    # arms: "bf16", fp8.recipe= and more (FP8Config.label): "rowwise+head"
    recipes: tuple[str, ...] = ("bf16", "tensorwise")
    # "tensorwise>bf16": each decay in another precision than its trunk
    switch: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()  # of every run, such as model.qk_norm=true
    null: tuple[str, ...] = ()  # overrides of null runs that change their rounding alone
    decay_share: float = 0.2  # share of every run's steps spent decaying

    def __post_init__(self):
        if problems := type_problems("", self) or [
            p for size in self.sizes for p in type_problems(f"{size.config}: ", size)
        ]:
            raise UserError(problems[0])
        if wrong := [
            one
            for part in (self, *self.sizes)
            for one in part.switch or ()
            if one.count(">") != 1 or one.partition(">")[0] not in (part.recipes or self.recipes)
        ]:
            raise UserError(
                f"switch={wrong[0]!r} must be written trunk>decay, such as tensorwise>bf16, its"
                " trunk among recipes="
            )


@dataclass(frozen=True)
class Row:
    """One run of a study: its exact counts, what it starts from, the arguments of train.py that
    make it."""

    run: str
    size: str
    recipe: str
    seed: int
    tokens_per_param: float
    tokens: int  # trained on when it ends, its trunk's included
    steps: int
    tokens_per_step: int
    params_total: int
    params_nonembed: int
    params_matmul: int
    flops_per_token: int  # 6 params_matmul + attention
    lr: float | None  # peak learning rate where the study tries several; none = the config's
    repeat: int  # 1: a null run
    parent: str | None  # run that it branches off from; none = from scratch
    parent_step: int | None
    config: str
    overrides: tuple[str, ...]  # all but out= and start_from=, which depend on where the study lies
    held_out: bool
    # of its config: tells a change of the config file, whose settings are not in overrides
    pair_id: str

    @property
    def own_tokens(self) -> int:
        """Trained on by this run itself: of a branch, without what its trunk had seen."""
        return self.tokens - (self.parent_step or 0) * self.tokens_per_step

    def arguments(self, folder: Path) -> list[str]:
        """Of train.py, for a study whose runs lie in `folder`."""
        start = [f"start_from={self.branch_point(folder)}"] if self.parent else []
        words = [*self.overrides, f"out={folder}", *start]
        # a study's overrides may name a key again
        last_of_each = {word.partition("=")[0]: word for word in words}
        return [str(ROOT / self.config), *last_of_each.values()]

    def branch_point(self, folder: Path) -> Path:
        return folder / self.parent / "checkpoints" / f"step_{self.parent_step:08d}"


def load_study(path: str | Path) -> Study:
    """The Study that the file at `path` binds. A size's config is the file of its name beside the
    study, where the study lies outside the repository's configs/ and there is one. Raises
    UserError."""
    path = Path(path)
    if not path.is_file():
        raise UserError(
            "there is no study file"
            f" {path}{nearest(path.stem, [o.stem for o in path.parent.glob('study_*.py')])}"
        )
    try:
        study, _ = run_file(path, "study")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} could not be run: {type(error).__name__}: {error}") from error
    if not isinstance(study, Study):
        raise UserError(f"{path} must bind study = Study(...), but study is {type(study).__name__}")
    return replace(
        study,
        sizes=tuple(
            replace(size, config=_config_beside(path, size.config)) for size in study.sizes
        ),
    )


def _config_beside(study_file: Path, config: str) -> str:
    """As a copied config's imports: the file beside it comes before the repository's."""
    config = expand_home(config)
    folder = study_file.absolute().parent
    beside = folder / Path(config).name
    if folder == ROOT / "configs" or Path(config).is_absolute() or not beside.is_file():
        return config
    return str(beside)


def expand(study: Study) -> list[Row]:
    """All runs: by size, seed and recipe, a trunk before its branches. Raises UserError for what
    cannot be trained."""
    rows = []
    for size in study.sizes:
        file_config = load_config(ROOT / size.config)
        base = apply_overrides(file_config, study.overrides)
        if not set(size.null_seeds) <= set(size.seeds if study.null else ()):
            raise UserError(
                f"{size.config}: null_seeds={size.null_seeds} must be among its seeds, and null="
                " must not be empty"
            )
        if base.fp8 != FP8Config() or base.data.micro_batch == "auto":
            raise UserError(
                f"{size.config} must be in BF16 and give data.micro_batch as a number: all arms"
                " share it"
            )
        every = GPT.on_meta(base.model).counts()
        counts = {
            key: every[key]
            for key in ("params_total", "params_nonembed", "params_matmul", "flops_per_token")
        }
        for seed, lr, recipe in itertools.product(
            size.seeds, size.lr or (None,), size.recipes or study.recipes
        ):
            for repeat in range(2 if recipe == "bf16" and seed in size.null_seeds else 1):
                rows += _family(study, size, file_config, base, counts, seed, recipe, lr, repeat)
    return rows


def file_word(label: str) -> str:
    """A precision's label as a part of file names."""
    return re.sub(r"[^\w.]+", "-", label)


def _family(
    study: Study,
    size: Size,
    file_config: Config,
    base: Config,
    counts: dict,
    seed: int,
    recipe: str,
    lr: float | None,
    repeat: int,
) -> list[Row]:
    size_name, switch = (
        base.run.removesuffix("_bf16"),
        (study.switch if size.switch is None else size.switch),
    )
    switches = (
        []
        if repeat
        else [after for before, after in (s.split(">") for s in switch) if before == recipe]
    )
    # in names of runs
    arm, *others = (file_word(label) for label in (recipe, *switches))
    name = (
        f"{size_name}_{arm}"
        + "_null" * repeat
        + (f"_lr{lr:g}" if lr else "")
        + "_t{:g}"
        + f"_s{seed}"
    )
    largest, *smaller = sorted(size.tokens_per_param or study.tokens_per_param, reverse=True)
    rows, switched, warmup = [], [], base.optim.warmup_steps(base.total_steps)
    for budget in (*smaller, largest):
        steps = math.ceil(budget * counts[f"params_{study.params}"] / base.data.tokens_per_step)
        optim = replace(
            base.optim,
            schedule="wsd",
            decay_share=study.decay_share,
            warmup_share=min(1.0, warmup / steps),
        )
        leaves, is_branch = steps - optim.decay_steps(steps), budget != largest
        if warmup > leaves:
            raise UserError(
                f"{size_name} at {budget:g} tokens per parameter decays from step {leaves} on, in"
                " its warm-up"
            )
        length = (
            [f"tokens_per_param={budget!r}"]
            if study.params == "total"
            else ["tokens_per_param=none", f"steps={steps}"]
        )
        overrides = [
            f"run={name.format(budget)}",
            f"seed={seed}",
            *study.overrides,
            *length,
            "optim.schedule=wsd",
            f"optim.decay_share={optim.decay_share!r}",
            f"optim.warmup_share={optim.warmup_share!r}",
            *[f"optim.lr={lr!r}"] * bool(lr),
            # one GPU and eight run the same graph
            *["parallel.compile=block"] * bool(base.parallel.compile),
            *fp8_overrides(recipe),
            *["repeat=1", *study.null] * repeat,
        ]
        kept = [] if is_branch else [row.parent_step for row in rows] + [leaves] * bool(switches)
        overrides += ["checkpoint.at=" + ",".join(map(str, kept))] * bool(kept)
        # judges recipe and dimensions now, not in a week
        config = apply_overrides(file_config, overrides)
        if (config.run, config.seed) != (name.format(budget), seed):
            raise UserError(
                "overrides= sets run or seed, which the study gives to each of its runs: drop them,"
                " and write seeds="
            )
        if config.fp8.label != recipe:
            raise UserError(
                f"recipes= names {recipe!r}: write it {config.fp8.label!r}, as its runs are called"
                " in every table"
            )
        rows.insert(
            0,
            Row(
                run=config.run,
                size=size_name,
                recipe=recipe,
                seed=seed,
                tokens_per_param=budget,
                tokens=config.total_tokens,
                steps=steps,
                tokens_per_step=config.data.tokens_per_step,
                **counts,
                lr=lr,
                repeat=repeat,
                parent=name.format(largest) if is_branch else None,
                parent_step=leaves if is_branch else None,
                config=size.config,
                overrides=tuple(overrides),
                held_out=size.held_out,
                pair_id=pair_id(config),
            ),
        )
        for after, other in zip(switches, others, strict=True):
            run = config.run.replace(f"_{arm}_", f"_{arm}-{other}_")
            rest = [o for o in overrides if not o.startswith(("run=", "fp8.", "checkpoint.at="))]
            switched.append(
                replace(
                    rows[0],
                    run=run,
                    recipe=f"{recipe}>{after}",
                    parent=name.format(largest),
                    parent_step=leaves,
                    overrides=(f"run={run}", *fp8_overrides(after), *rest),
                )
            )
    return rows + switched
