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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from fp8.recipes import written_settings
from fp8.trained_precision import ARROW
from lib.errors import UserError
from lib.machine import ROOT
from lib.text import nearest
from lib.values import expand_home, type_problems
from model import GPT
from runtime.config import Config, FP8Config, OptimConfig, apply_overrides, load_config
from runtime.config_file import run_file
from runtime.log import pair_id

# of GPT.counts(), in a Row
COUNTS = ("params_total", "params_nonembed", "params_matmul", "flops_per_token")


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model size; what is not explained is as in Study."""

    config: str  # its BF16 config file, beside the study or from the repository's root
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

    def __post_init__(self) -> None:
        problems = list(type_problems("", self))
        for size in self.sizes:
            problems += type_problems(f"{size.config}: ", size)
        if problems:
            raise UserError(problems[0])
        parts: list[Study | Size] = [self, *self.sizes]
        for part in parts:
            for switch in part.switch or ():
                trunk, _, decay = switch.partition(ARROW)
                if trunk not in (part.recipes or self.recipes) or not decay or ARROW in decay:
                    raise UserError(
                        f"switch={switch!r} must be written trunk>decay, such as tensorwise>bf16,"
                        " its trunk among recipes="
                    )


@dataclass(frozen=True)
class Row:
    """One run of a study: its exact counts, what it starts from, the arguments of train.py that
    make it."""

    run: str  # its name
    size: str  # name of its size
    # its arm, for tables and files: text of its precision, "trunk>decay" where its decay switches;
    # its overrides are what it is trained by
    recipe: str
    seed: int  # of initialisation and order of data
    tokens_per_param: float  # its budget, as the study counts parameters
    tokens: int  # trained on when it ends, its trunk's included
    steps: int  # optimizer steps when it ends, its trunk's included
    tokens_per_step: int  # training tokens of a step
    params_total: int  # all parameters
    params_nonembed: int  # without embedding and head
    params_matmul: int  # of every Linear
    flops_per_token: int  # 6 params_matmul + attention
    lr: float | None  # peak learning rate where the study tries several; none = the config's
    repeat: int  # 1: a null run
    parent: str | None  # run that it branches off from; none = from scratch
    parent_step: int | None  # step of its trunk that it starts from
    config: str  # its config file
    overrides: tuple[str, ...]  # all but out= and start_from=, which depend on where the study lies
    held_out: bool  # trained only by name, once its prediction is frozen
    # of its config: tells a change of the config file, whose settings are not in overrides
    pair_id: str
    # arm of its trunk, where its own decay is in another precision; none = the trunk's
    switched_from: str | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether all of it is trained in BF16."""
        words = [word for word in self.overrides if word.startswith("fp8.recipe=")]
        return self.switched_from is None and words[-1:] in ([], ["fp8.recipe=off"])

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
        """The checkpoint that a branch starts from."""
        assert self.parent is not None
        return folder / self.parent / "checkpoints" / f"step_{self.parent_step:08d}"


def load_study(path: str | Path) -> Study:
    """The Study that the file at `path` binds. A size's config is the file of its name beside the
    study, where the study lies outside the repository's configs/ and there is one. Raises
    UserError."""
    path = Path(path)
    if not path.is_file():
        names = [file.stem for file in path.parent.glob("study_*.py")]
        raise UserError(f"there is no study file {path}{nearest(path.stem, names)}")
    try:
        study, _ = run_file(path, "study")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} could not be run: {type(error).__name__}: {error}") from error
    if not isinstance(study, Study):
        raise UserError(f"{path} must bind study = Study(...), but study is {type(study).__name__}")
    sizes = [replace(size, config=_config_beside(path, size.config)) for size in study.sizes]
    return replace(study, sizes=tuple(sizes))


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
        family = _read_size(study, size)
        for seed, lr, recipe in itertools.product(
            size.seeds, size.lr or (None,), size.recipes or study.recipes
        ):
            fp8 = _precision_of(recipe, family.base)
            has_null = not fp8.is_on and seed in size.null_seeds
            for repeat in range(2 if has_null else 1):
                rows += replace(family, fp8=fp8, seed=seed, lr=lr, repeat=repeat).rows()
    return rows


def _read_size(study: Study, size: Size) -> "Family":
    """The family of a size, of any arm. Raises UserError for a size that cannot be trained."""
    file_config = load_config(ROOT / size.config)
    base = apply_overrides(file_config, study.overrides)
    seeds_with_null = size.seeds if study.null else ()
    if not set(size.null_seeds) <= set(seeds_with_null):
        raise UserError(
            f"{size.config}: null_seeds={size.null_seeds} must be among its seeds, and null="
            " must not be empty"
        )
    if base.fp8 != FP8Config() or base.data.micro_batch == "auto":
        raise UserError(
            f"{size.config} must be in BF16 and give data.micro_batch as a number: all arms"
            " share it"
        )
    counts = GPT.on_meta(base.model).counts()
    return Family(study, size, file_config, base, {key: counts[key] for key in COUNTS})


def _precision_of(arm: str, config: Config) -> FP8Config:
    """The precision that a study names, for a size's config. Raises UserError where there is none
    such, or tables would call it otherwise."""
    fp8 = apply_overrides(config, [f"fp8.{setting}" for setting in written_settings(arm)]).fp8
    if fp8.label != arm:
        raise UserError(
            f"recipes= names {arm!r}: write it {fp8.label!r}, as its runs are called in every table"
        )
    return fp8


@dataclass(frozen=True)
class Family:
    """The runs of one size, arm, seed and rate: a trunk, its branches, and their decays in another
    precision."""

    study: Study
    size: Size
    file_config: Config
    base: Config  # with the study's overrides
    counts: dict[str, int]  # COUNTS of its model
    fp8: FP8Config = FP8Config()  # of its trunk
    seed: int = 0
    lr: float | None = None  # none = the config's
    repeat: int = 0  # 1: null runs

    @cached_property
    def size_name(self) -> str:
        return self.base.run.removesuffix("_bf16")

    @cached_property
    def switches(self) -> list[FP8Config]:
        """The precisions that its decays are tried in too; none of null runs."""
        switch = self.study.switch if self.size.switch is None else self.size.switch
        if self.repeat:
            return []
        pairs = [pair.split(ARROW) for pair in switch]
        decays = [decay for trunk, decay in pairs if trunk == self.fp8.label]
        return [_precision_of(decay, self.base) for decay in decays]

    def run_name(self, budget: float, decay: FP8Config | None = None) -> str:
        """decay: the precision of the decay, where it is another."""
        arm = self.fp8.file_label
        if decay is not None:
            arm += f"-{decay.file_label}"
        null = "_null" if self.repeat else ""
        rate = f"_lr{self.lr:g}" if self.lr else ""
        return f"{self.size_name}_{arm}{null}{rate}_t{budget:g}_s{self.seed}"

    def rows(self) -> list[Row]:
        """The trunk, its branches from the smallest budget on, then the switched decays."""
        budgets = sorted(self.size.tokens_per_param or self.study.tokens_per_param)
        branches = [self._row(budget, trunk_budget=budgets[-1]) for budget in budgets[:-1]]
        # the trunk keeps the checkpoints that its branches, and its own switched decays, start from
        steps = [row.parent_step for row in branches]
        trunk = self._row(budgets[-1], kept_steps=steps)
        switched = []
        for row in [*reversed(branches), trunk]:
            switched += [self._switched(row, decay, trunk) for decay in self.switches]
        return [trunk, *branches, *switched]

    def _row(
        self,
        budget: float,
        trunk_budget: float | None = None,
        kept_steps: Sequence[int | None] = (),
    ) -> Row:
        """trunk_budget: of a branch; kept_steps: the trunk's steps that branches start from."""
        steps = self._steps(budget)
        optim = self._optim(steps)
        decays_from = steps - optim.decay_steps(steps)
        self._check_warmup(budget, decays_from)
        is_branch = trunk_budget is not None
        saved_steps = list(kept_steps)
        if self.switches and not is_branch:
            saved_steps.append(decays_from)
        overrides = [*self._overrides(budget, steps, optim)]
        if saved_steps:
            overrides.append("checkpoint.at=" + ",".join(map(str, saved_steps)))
        # judges recipe and dimensions now, not in a week
        config = apply_overrides(self.file_config, overrides)
        self._check_config(config, budget)
        return Row(
            run=config.run,
            size=self.size_name,
            recipe=self.fp8.label,
            seed=self.seed,
            tokens_per_param=budget,
            tokens=config.total_tokens,
            steps=steps,
            tokens_per_step=config.data.tokens_per_step,
            params_total=self.counts["params_total"],
            params_nonembed=self.counts["params_nonembed"],
            params_matmul=self.counts["params_matmul"],
            flops_per_token=self.counts["flops_per_token"],
            lr=self.lr,
            repeat=self.repeat,
            parent=self.run_name(trunk_budget) if trunk_budget is not None else None,
            parent_step=decays_from if is_branch else None,
            config=self.size.config,
            overrides=tuple(overrides),
            held_out=self.size.held_out,
            pair_id=pair_id(config),
        )

    def _steps(self, budget: float) -> int:
        parameters = self.counts[f"params_{self.study.params}"]
        return math.ceil(budget * parameters / self.base.data.tokens_per_step)

    @cached_property
    def _warmup_steps(self) -> int:
        """Those of the size's config file at its own budget, for every budget."""
        return self.base.optim.warmup_steps(self.base.total_steps)

    def _optim(self, steps: int) -> OptimConfig:
        return replace(
            self.base.optim,
            schedule="wsd",
            decay_share=self.study.decay_share,
            warmup_share=min(1.0, self._warmup_steps / steps),
        )

    def _check_warmup(self, budget: float, decays_from: int) -> None:
        if self._warmup_steps > decays_from:
            raise UserError(
                f"{self.size_name} at {budget:g} tokens per parameter decays from step"
                f" {decays_from} on, in its warm-up"
            )

    def _overrides(self, budget: float, steps: int, optim: OptimConfig) -> list[str]:
        """Arguments of train.py, all but which checkpoints are kept."""
        length = [f"tokens_per_param={budget!r}"]
        if self.study.params != "total":
            length = ["tokens_per_param=none", f"steps={steps}"]
        overrides = [
            f"run={self.run_name(budget)}",
            f"seed={self.seed}",
            *self.study.overrides,
            *length,
            "optim.schedule=wsd",
            f"optim.decay_share={optim.decay_share!r}",
            f"optim.warmup_share={optim.warmup_share!r}",
        ]
        if self.lr:
            overrides.append(f"optim.lr={self.lr!r}")
        if self.base.parallel.compile:
            overrides.append("parallel.compile=block")  # one GPU and eight run the same graph
        overrides += self.fp8.overrides
        if self.repeat:
            overrides += ["repeat=1", *self.study.null]
        return overrides

    def _check_config(self, config: Config, budget: float) -> None:
        if config.data.ramp is not None:
            raise UserError(
                f"data.ramp={config.data.ramp} of {self.size.config} or of overrides= is a share of"
                " each budget, so that branches would not share their trunk's first steps: drop it"
            )
        if (config.run, config.seed) != (self.run_name(budget), self.seed):
            raise UserError(
                "overrides= sets run or seed, which the study gives to each of its runs: drop them,"
                " and write seeds="
            )
        if config.fp8.label != self.fp8.label:
            raise UserError(
                f"overrides= sets fp8 ({config.fp8.label!r} in place of {self.fp8.label!r}): drop"
                " it, and write recipes="
            )

    def _switched(self, row: Row, decay: FP8Config, trunk: Row) -> Row:
        """The run that decays in another precision from where `row` decays."""
        run = self.run_name(row.tokens_per_param, decay)
        shared = [
            word
            for word in row.overrides
            if not word.startswith(("run=", "fp8.", "checkpoint.at="))
        ]
        optim = self._optim(row.steps)
        decays_from = row.steps - optim.decay_steps(row.steps)
        return replace(
            row,
            run=run,
            recipe=f"{self.fp8.label}{ARROW}{decay.label}",
            parent=trunk.run,
            parent_step=decays_from,
            overrides=(f"run={run}", *decay.overrides, *shared),
            switched_from=self.fp8.label,
        )
