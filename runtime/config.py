"""Every setting of a run, typed and checked: a config file plus `section.key=value` overrides
become one frozen Config.

A config file is Python that binds `config = Config(...)`; a derived one, as configs/gpt350m_fp8.py,
replaces what differs.

A new key is one field: its bounds, its default, and a comment, which --help prints. Runs from
before it stay the same runs as long as it is at its default (Config.identity()), so its default
must be what the code did before. A rule between keys is a function in VALUE_CHECKS or
CROSS_CHECKS; another code base's name for a key, a word in aliases.py."""

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from fp8.recipes import RECIPES, FP8Config, multiple_of
from lib.bounds import above_zero, any_number, bound_problems, within
from lib.errors import UserError
from lib.help import field_lines
from lib.machine import ROOT
from lib.text import nearest
from lib.values import FilePath, expand_home, expand_paths, parse, type_problems
from model import GPTConfig
from runtime.aliases import our_name
from runtime.config_file import OWN_NAMES, run_file
from runtime.ramp import FORM, Ramp, ramp_of
from runtime.tokenizer import tokenizer_kind

# ---------------------------------------------------------------------------------------- sections

BELOW_ONE = math.nextafter(1, 0)  # the largest number below 1


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    dir: FilePath  # folder that holds one sub-folder of token shards per source
    mixture: dict[str, float]  # source -> its share of the training tokens; any positive scale
    tokens_per_step: int = above_zero()  # training tokens per optimizer step, over all ranks
    # sequences per forward pass and rank; auto = the fastest that fits, by trial
    micro_batch: int | Literal["auto"] = above_zero()
    # gpt2, byte, or a folder with tokenizer.json: what the shards were made with
    tokenizer: FilePath = "gpt2"
    max_epochs: float = above_zero(1.0)  # times that a source may be seen before the run is refused
    # smaller steps at first, written share of the run's tokens:share of tokens_per_step, such as
    # 0.1:0.25,0.3:0.5: a quarter up to 10 % of the tokens, half up to 30 %; none = no ramp
    ramp: str | None = None
    # a token attends to its own document alone, in training; validation reads whole windows
    document_mask: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = above_zero()  # peak learning rate
    # muon: the blocks' matrices by Muon, the rest by AdamW
    kind: Literal["adamw", "muon"] = "adamw"
    momentum: float = within(0, BELOW_ONE, 0.95)  # muon only: decay of its moment
    # share of the peak that the rate falls to; a cosine is there after the last step
    min_lr_ratio: float = within(0, 1, 0.1)
    warmup_share: float = within(
        0, 1, 0.02
    )  # share of all steps over which the rate climbs linearly
    # after warm-up: cosine, or stable and then linear decay
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_share: float = within(0, 1, 0.2)  # wsd only: share of all steps spent decaying
    weight_decay: float = within(0, 1, 0.1)  # on matrices only, never on norms
    beta1: float = within(0, BELOW_ONE, 0.9)  # decay of the first moment
    beta2: float = within(0, BELOW_ONE, 0.95)  # decay of the second moment
    eps: float = above_zero(1e-8)  # added to the root of the second moment
    clip: float = above_zero(1.0)  # largest global gradient norm
    # weight of the squared log-sum-exp of the logits in the loss that is trained on, such as 1e-4;
    # metrics.jsonl has it as z_loss, apart from the loss; 0 = none
    z_loss: float = within(0, 0.01, 0.0)

    def warmup_steps(self, steps: int) -> int:
        return round(self.warmup_share * steps)

    def decay_steps(self, steps: int) -> int:
        """Updates of the wsd schedule's last part: a branch of `steps` leaves its trunk so many
        before its end."""
        return max(1, round(self.decay_share * steps))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    replicate: int = above_zero(
        1
    )  # copies of the sharded model, gradients averaged between them (HSDP)
    # ranks that share one copy of the weights (FSDP2); none = 1, replicas, where the model fits
    # each GPU whole, else all
    shard: int | None = above_zero(None)
    # compare the weights of replicas, bit by bit, before each save and validation; false where GPUs
    # of two kinds share a job and their weights drift apart in the last bits
    check_replicas: bool = True
    # several ranks: drop a block's gathered weights between forward and backward
    reshard: bool = True
    # keep each block's input and attention's output, compute the rest twice
    recompute: bool = False
    # block starts sooner; several ranks always compile block by block
    compile: bool | Literal["model", "block", "off"] = "model"
    # on CPUs: BF16 matmuls and attention in fp32, each result rounded once; auto: where the CPU has
    # no BF16 units
    cpu_fp32: bool | Literal["auto"] = False
    # seconds that a step may stand still before the job ends and says where
    timeout: float = above_zero(300.0)
    # the same until the first step is done (compilation, loading), and for a save
    start_timeout: float = above_zero(1800.0)

    def __post_init__(self):
        object.__setattr__(
            self, "compile", {True: "model", "off": False}.get(self.compile, self.compile)
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int | None = above_zero(1000)  # steps between checkpoints; none = only the last
    keep: int = above_zero(3)  # newest checkpoints that stay on disk; the last two always do
    best: bool = True  # keep that of lowest validation loss too
    # checkpoints of every so many steps stay for good; none = of no step
    forever: int | None = above_zero(None)
    # steps between additional saves, of which only the newest is kept; none = no such saves
    rolling: int | None = above_zero(None)
    # at the end also validate the mean of the weights of the last so many checkpoints (those due by
    # every, and the last step's), which are kept for it; none = no mean
    average: int | None = within(2, math.inf, None)
    # URL that fsspec opens, such as s3://bucket/runs: finished checkpoints are copied there to
    # <run>/ beside the next steps, and verified; start_from= reads them back; none = no copies
    copy_to: FilePath | None = None
    # more steps to save at; these checkpoints stay for good, to branch off from
    at: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int | None = above_zero(250)  # steps between validations; none = only the last
    # validation tokens per source, always the same ones; all there are if fewer
    tokens: int = above_zero(1_048_576)
    # lm-eval's tasks to score the weights on during training and at its end; eval.harness's names
    tasks: tuple[str, ...] = ()
    tasks_every: int | None = above_zero(None)  # steps between scorings; none = only the last
    # documents per task at most; none = all
    tasks_limit: int | None = above_zero(None)
    tasks_offline: FilePath | None = None  # folder that eval.harness --fetch filled
    tasks_include: FilePath | None = None  # folder with task YAMLs of your own
    # sequences of a full context per forward pass of a scoring; of shorter ones more
    tasks_micro_batch: int = above_zero(16)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    # mirrors of metrics.jsonl, which is always written
    to: tuple[Literal["wandb", "trackio", "tensorboard"], ...] = ()
    every: int = above_zero(10)  # steps between console lines


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    # steps between looks at what FP8 does to each tensor; none = never
    every: int | None = above_zero(None)
    # tokens that a look passes through the model, at most; at least one sequence
    tokens: int = above_zero(4096)


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    # of spikes: ignored, noted, skipped; what is not finite always is
    mode: Literal["off", "log", "act"] = "act"
    # accepted steps that a step is compared with; the spread of fewer than 8 is not known
    window: int = within(8, math.inf, 128)
    # a spike lies so many robust standard deviations above their median; 2 or more, or ordinary
    # steps would be spikes
    threshold: float = within(2, math.inf, 10.0)
    # also judge the gradient norm of each layer, against its own past: a small layer hardly changes
    # the global norm
    layers: bool = False
    skips: int = above_zero(10)  # skipped steps in a row before the run goes back to a checkpoint
    rollbacks: int = within(0, math.inf, 3)  # times that a run may go back before it stops


# ------------------------------------------------------------------------------------------ config

MOST_SEQUENCES = 65_536  # of a micro-batch that an error proposes: a larger one is a typing error


@dataclass(frozen=True, kw_only=True)
class Config:
    run: str  # name of the run; its files lie in out/<run>/
    model: GPTConfig
    data: DataConfig
    optim: OptimConfig
    fp8: FP8Config = FP8Config()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    probe: ProbeConfig = ProbeConfig()
    guard: GuardConfig = GuardConfig()
    # optimizer steps of data.tokens_per_step, which data.ramp may cut; this or tokens_per_param
    steps: int | None = above_zero(None)
    # training tokens per parameter (all parameters); give this or steps
    tokens_per_param: float | None = above_zero(None)
    seed: int = any_number(1337)  # of initialisation and token order; a BF16/FP8 pair shares it
    # 1 = a null run: the same training once more, to see what rounding alone does
    repeat: int = within(0, 1, 0)
    out: FilePath = "out"  # folder of all runs
    deterministic: bool = False  # the same bits from every run of a GPU too, at some cost in speed
    profile: str | None = None  # steps to trace, first:last such as 10:15; none = no trace
    # a branch: another run's out/<run>/checkpoints/step_<step>; out/<run>: its weights; or a URL of
    # one that checkpoint.copy_to has written
    start_from: FilePath | None = None

    def __post_init__(self) -> None:
        sections = [("", self), *((f"{name}.", getattr(self, name)) for name in SECTIONS if name)]
        for _, section in sections:
            expand_paths(section)
        type_mistakes: list[str] = []
        bound_mistakes: list[str] = []
        for prefix, section in sections:
            type_mistakes += type_problems(prefix, section)
        # each kind of rule relies on those before it
        refuse(type_mistakes)
        for prefix, section in sections:
            bound_mistakes += bound_problems(prefix, section)
        refuse([*bound_mistakes, *_problems(self, VALUE_CHECKS)])
        refuse(_problems(self, CROSS_CHECKS))
        self.accumulation(1)

    @property
    def full_steps(self) -> int:
        """Steps of data.tokens_per_step: as given, or enough for tokens_per_param x all parameters,
        rounded up."""
        if self.steps is not None:
            return self.steps
        assert self.tokens_per_param is not None
        return math.ceil(
            self.tokens_per_param * self.model.params_total / self.data.tokens_per_step
        )

    @property
    def ramp(self) -> Ramp:
        """Where each step lies among the run's tokens."""
        return ramp_of(self.data.ramp, self.full_steps)

    @property
    def total_steps(self) -> int:
        """Optimizer steps: full_steps, and more where data.ramp cuts some."""
        return self.ramp.steps

    @property
    def total_tokens(self) -> int:
        return self.full_steps * self.data.tokens_per_step

    def tokens_at(self, step: int) -> int:
        """Tokens trained on in the first `step` steps."""
        return int(self.ramp.place(step).position * self.data.tokens_per_step)

    @property
    def micro_batch(self) -> int:
        """data.micro_batch, once auto has become a number."""
        assert isinstance(self.data.micro_batch, int)
        return self.data.micro_batch

    @property
    def run_dir(self) -> Path:
        return Path(self.out) / self.run

    @property
    def parent(self) -> tuple[str, int] | None:
        """The run that a branch starts from, and after which of its steps, 0 for its weights alone;
        None from scratch."""
        match = PARENT.search(self.start_from or "")
        return (match[1], int(match[2] or 0)) if match else None

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """First and last step to trace, counted from 1 as rows are; None without profile=."""
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.profile or "", re.ASCII)
        return (int(match[1]), int(match[2])) if match else None

    def accumulation(self, world_size: int, parts: int = 1) -> int:
        """Micro-batches per rank and step (auto: of one sequence), where full steps are cut into
        `parts`. Raises UserError where ranks do not divide each of the run's steps evenly."""
        micro_batch = 1 if self.data.micro_batch == "auto" else self.data.micro_batch
        per_micro = micro_batch * self.model.n_ctx * world_size
        for stage in self.ramp.stages:
            n = stage.parts
            if self.data.tokens_per_step % (n * per_micro):
                cut = f", cut into {n} by data.ramp," if n > 1 else ""
                fitting = self._largest_micro_batch(micro_batch, world_size)
                remedy = f"set data.micro_batch={fitting}" if fitting else "change it"
                raise UserError(
                    f"data.tokens_per_step={self.data.tokens_per_step}{cut} cannot be shared by"
                    f" {world_size} ranks in micro-batches of {micro_batch} x"
                    f" {self.model.n_ctx} tokens: it must be a multiple of {n * per_micro};"
                    f" {remedy}, or change the number of ranks"
                )
        return self.data.tokens_per_step // (parts * per_micro)

    def _largest_micro_batch(self, most: int, world_size: int) -> int | None:
        """The largest micro-batch, of at most so many sequences, in which ranks share each of the
        run's steps evenly; None where they cannot."""
        sizes = [stage.parts * self.model.n_ctx * world_size for stage in self.ramp.stages]
        if any(self.data.tokens_per_step % size for size in sizes):
            return None
        # sequences of a rank in each stage's step: the micro-batch divides all of them
        shared = math.gcd(*(self.data.tokens_per_step // size for size in sizes))
        for micro_batch in range(min(most, shared, MOST_SEQUENCES), 0, -1):
            if shared % micro_batch == 0:
                return micro_batch
        return None

    def identity(self) -> dict:
        """What makes two configs the same training run, as flat key -> value: all that the weights
        depend on."""
        keys: dict[str, Any] = {}
        for section in ("model", "data", "fp8", "optim"):
            for name, value in asdict(getattr(self, section)).items():
                keys[f"{section}.{name}"] = value
        # of a folder the shards know which; it may be moved
        keys["data.tokenizer"] = tokenizer_kind(self.data.tokenizer)
        named = {key: value for key, value in keys.items() if self._is_in_identity(key, value)}
        parent = self.parent
        # wherever its folder lies
        start_from = f"{parent[0]} at step {parent[1]}" if parent else None
        return named | {"seed": self.seed, "steps": self.total_steps, "start_from": start_from}

    def settings_of_job(self) -> dict[str, Any]:
        """What all ranks of a job must agree on, as flat key -> value: every setting but paths,
        which each machine may have of its own."""
        sections: dict[str, dict[str, Any]] = {
            name: asdict(getattr(self, name)) for name in SECTIONS if name
        }
        keys = {name: getattr(self, name) for name in DEFAULTS if "." not in name}
        for section, values in sections.items():
            for name, value in values.items():
                keys[f"{section}.{name}"] = value
        shared = {key: value for key, value in keys.items() if key not in PATHS_OF_MACHINE}
        return shared | {"start_from": self.identity()["start_from"]}

    def _is_in_identity(self, key: str, value: object) -> bool:
        if key in FREE_KEYS:
            return False
        if key == "optim.momentum" and self.optim.kind == "adamw":
            return False
        is_equal_share = self.model.head_dim * self.model.n_head == self.model.n_embd
        if key == "model.head_size" and is_equal_share:  # given or left to the default: one model
            return False
        return key in FIRST_KEYS or value != DEFAULTS[key]


# Keys that two starts of one run may differ in: a resume may need less memory, find one process,
# where nothing can be gathered, or do without our kernels.
FREE_KEYS = {
    "data.dir",
    "data.micro_batch",
    "data.max_epochs",
    "model.loss_chunk",
    "fp8.all_gather",
    "fp8.kernels",
}
# Folders that machines of one job may have at places of their own.
PATHS_OF_MACHINE = {
    "data.dir",
    "data.tokenizer",
    "eval.tasks_include",
    "eval.tasks_offline",
    "out",
    "start_from",
}
# Keys that the identity of every run holds: those of the first version. Never add one: a key that
# came later is in the identity where it is not at its default, or runs from before it would not
# match.
FIRST_KEYS = frozenset(
    f"{section}.{name}"
    for section, names in {
        "model": (
            "n_layer n_head n_embd n_ffn n_kv_head n_ctx vocab_size vocab_multiple tied qk_norm"
            " norm_eps rope_theta rope_factor rope_low_freq rope_high_freq rope_original_ctx"
        ),
        "data": "mixture tokens_per_step tokenizer",
        "fp8": "recipe head first_bf16 last_bf16 include skip",
        "optim": (
            "lr momentum min_lr_ratio warmup_share schedule decay_share weight_decay beta1 beta2"
            " eps clip"
        ),
    }.items()
    for name in names.split()
)


def changed_keys(stored: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """How the identity that is asked for differs from the stored one, a phrase for each key. A key
    that only one of them has is at its default in the other."""
    changes = []
    for key in asked | stored:
        default = DEFAULTS.get(key)
        stored_value = stored.get(key, default)
        asked_value = asked.get(key, default)
        if stored_value != asked_value:
            changes.append(f"{key} was {stored_value}, now {asked_value}")
    return changes


SECTIONS: dict[str, Any] = {"": Config} | {
    name: cls for name, cls in get_type_hints(Config).items() if is_dataclass(cls)
}
# Every key of a command line, such as "steps" or "optim.lr" -> its default, MISSING without one.
DEFAULTS: dict[str, Any] = {}
for _section, _cls in SECTIONS.items():
    for _field in fields(_cls):
        if _field.name not in SECTIONS:
            DEFAULTS[f"{_section}.{_field.name}".lstrip(".")] = _field.default
KEYS = list(DEFAULTS)
PARENT = re.compile(
    r"(?:^|/)(?!checkpoints|step_)([A-Za-z0-9][A-Za-z0-9_.-]*)(?:/checkpoints/step_(\d{8}))?/?$"
)


def positive(section: object, *names: str) -> list[str]:
    """A sentence for each of the named numbers that is not above zero."""
    problems = []
    for name in names:
        value = getattr(section, name)
        if isinstance(value, int | float) and not 0 < value < math.inf:
            problems.append(f"{name}={value} must be a positive, finite number")
    return problems


def refuse(problems: Sequence[str]) -> None:
    """Raises UserError with a line for each problem, where there is one."""
    if problems:
        raise UserError("\n".join(problems))


# ------------------------------------------------------------------------------ rules across fields

FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_model(config: Config) -> Iterator[str]:
    yield from config.model.problems()


def check_fp8(config: Config) -> Iterator[str]:
    yield from config.fp8.problems()


def check_names(config: Config) -> Iterator[str]:
    """A run's and a source's name are a folder's."""
    names = [("run", config.run)]
    names += [("data.mixture: the name", source) for source in config.data.mixture]
    for key, name in names:
        if not FOLDER_NAME.fullmatch(name):
            yield f"{key}={name!r} must be one folder name, of letters, digits, '_', '-' and '.'"


def check_mixture(config: Config) -> Iterator[str]:
    """Each weight is above the order's resolution, data.WEIGHT_STEPS."""
    weights = config.data.mixture.values()
    if min(weights, default=0) <= 1e-6 * sum(weights):
        yield (
            f"data.mixture={config.data.mixture} must name a source or more, each with a positive"
            " weight that is more than a millionth of their sum, such as fineweb_edu:1"
        )


def check_ramp(config: Config) -> Iterator[str]:
    try:
        ramp_of(config.data.ramp, 1)
    except ValueError:
        yield f"data.ramp={config.data.ramp!r} must be written {FORM}"
    recipe = RECIPES.get(config.fp8.recipe)
    if config.data.ramp and recipe is not None and recipe.grad.scaling == "constant":
        yield (
            f"fp8.recipe={config.fp8.recipe} has constant scales, which fit gradients of one size"
            " of step: choose another recipe, or data.ramp=none"
        )


def check_deterministic(config: Config) -> Iterator[str]:
    if config.data.micro_batch == "auto" and config.deterministic:
        yield (
            "data.micro_batch=auto is decided by a clock, which deterministic=true cannot have:"
            " give a number"
        )


def check_muon(config: Config) -> Iterator[str]:
    if config.optim.kind == "muon" and config.fp8.all_gather:
        yield "fp8.all_gather=true is not tried with optim.kind=muon: set it to false"


def check_schedule(config: Config) -> Iterator[str]:
    o = config.optim
    if o.schedule == "wsd" and o.warmup_share + o.decay_share > 1:
        yield (
            f"optim.warmup_share={o.warmup_share} plus optim.decay_share={o.decay_share} is"
            " more than the whole run"
        )


def check_forever(config: Config) -> Iterator[str]:
    c = config.checkpoint
    if c.forever and (not c.every or c.forever % c.every):
        yield (
            f"checkpoint.forever={c.forever} must be a multiple of checkpoint.every={c.every};"
            " only saved ones are kept"
        )


def check_start_from(config: Config) -> Iterator[str]:
    if config.start_from is not None and not config.parent:
        yield (
            f"start_from={config.start_from!r} is no checkpoint's folder: write it like "
            "out/<run>/checkpoints/step_00000400, or out/<run> for that run's weights alone"
        )


def check_tasks(config: Config) -> Iterator[str]:
    e = config.eval
    are_given = e.tasks_every or e.tasks_limit or e.tasks_offline or e.tasks_include
    if not e.tasks and are_given:
        yield (
            f"eval.tasks_every={e.tasks_every}, eval.tasks_limit={e.tasks_limit},"
            f" eval.tasks_offline={e.tasks_offline} and eval.tasks_include={e.tasks_include} need"
            " eval.tasks, such as eval.tasks=piqa,sciq"
        )


def check_budget(config: Config) -> Iterator[str]:
    if (config.steps is None) == (config.tokens_per_param is None):
        yield (
            f"steps={config.steps} and tokens_per_param={config.tokens_per_param}: give exactly"
            " one of the two"
        )


def check_parent(config: Config) -> Iterator[str]:
    end = config.total_steps
    if config.parent and config.parent[1] >= end:
        yield (
            f"start_from={config.start_from} lies at step {config.parent[1]}, but this run ends at"
            f" step {end}: take an earlier checkpoint, give more steps, or train on its weights"
            f" alone by start_from=out/{config.parent[0]}"
        )


def check_profile(config: Config) -> Iterator[str]:
    end = config.total_steps
    first, last = config.profile_steps or (0, 0)
    if config.profile is not None and not 1 <= first <= min(last, end):
        yield (
            f"profile={config.profile!r} must be the first and the last step to trace, such as"
            f" 10:15, of steps 1 to {end}"
        )


def check_saved_steps(config: Config) -> Iterator[str]:
    end = config.total_steps
    outside = [step for step in config.checkpoint.at if not 1 <= step <= end]
    if outside:
        yield f"checkpoint.at asks for step {outside[0]}, but this run has steps 1 to {end}"


def check_fp8_sizes(config: Config) -> Iterator[str]:
    chunk = config.model.loss_chunk if config.fp8.head else None
    is_known = config.data.micro_batch != "auto"
    tokens = config.micro_batch * config.model.n_ctx if is_known else 0
    yield from config.fp8.size_problems(tokens, chunk)


def check_copies(config: Config) -> Iterator[str]:
    url = config.checkpoint.copy_to
    if url is not None and "://" not in url:
        yield (
            f"checkpoint.copy_to={url!r} is no URL: write it like s3://bucket/runs, or file:// and"
            " a full path"
        )


def check_average(config: Config) -> Iterator[str]:
    c = config.checkpoint
    if c.average is None:
        return
    first_step = config.parent[1] if config.parent else 0
    n_saved = 0
    if c.every is not None:
        n_saved = -(-config.total_steps // c.every) - first_step // c.every
    if n_saved < c.average:
        yield (
            f"checkpoint.average={c.average} needs as many checkpoints, but checkpoint.every="
            f"{c.every or 'none'} saves {n_saved} in steps {first_step + 1} to"
            f" {config.total_steps}: save more often, or average fewer"
        )


def check_compiled_chunks(config: Config) -> Iterator[str]:
    """Inductor's CPU code leaves parts of a chunk's gradient unwritten (torch 2.13, found by test),
    without a word."""
    n_ctx = config.model.n_ctx
    chunk = config.model.loss_chunk
    has_kernels_on_cpu = config.fp8.kernels is True or config.fp8.scaling != "current"
    if chunk is None or not (config.fp8.head and has_kernels_on_cpu and config.parallel.compile):
        return
    if n_ctx % chunk and chunk % n_ctx:
        allowed = math.lcm(n_ctx, multiple_of(config.fp8.recipe))
        yield (
            f"model.loss_chunk={chunk} must divide model.n_ctx={n_ctx} or be a multiple of it"
            f" (torch.compile on a CPU, fp8.head, fp8.kernels): take {allowed}, or none, or"
            " parallel.compile=false"
        )


Check = Callable[[Config], Iterator[str]]

# Rules over values that are of the right type. A new rule: a function above and its name here.
VALUE_CHECKS: list[Check] = [
    check_model,
    check_fp8,
    check_names,
    check_mixture,
    check_ramp,
    check_deterministic,
    check_muon,
    check_schedule,
    check_forever,
    check_start_from,
    check_tasks,
    check_budget,
    check_copies,
]
# Rules over values that are sound by themselves.
CROSS_CHECKS: list[Check] = [
    check_parent,
    check_profile,
    check_saved_steps,
    check_average,
    check_fp8_sizes,
    check_compiled_chunks,
]


def _problems(config: Config, checks: Sequence[Check]) -> list[str]:
    """What the checks say of a config, in their order."""
    sentences: list[str] = []
    for check in checks:
        sentences += check(config)
    return sentences


# ----------------------------------------------------------------------------------------- reading


def annotation(key: str) -> Any:
    """The annotation of a key, such as float for optim.lr."""
    section, _, name = key.rpartition(".")
    return get_type_hints(SECTIONS[section], include_extras=True)[name]


def describe_unknown(key: str) -> str:
    """How the sentence about an unknown key goes on: what another code base's name is here, or else
    the nearest key."""
    ours = our_name(key)
    if ours is not None:
        return f"; did you mean {ours}?"
    return nearest(key, KEYS)


def _no_config_file(path: Path) -> str:
    """The sentence for a path that is no file, with the path that was probably meant."""
    if path.is_dir():
        return f"{path} is a folder: name a config file, such as configs/gpt350m_fp8.py"
    beside = [file for file in path.parent.glob("*.py") if file.stem not in OWN_NAMES]
    shipped = [file for file in (ROOT / "configs").glob("*.py") if not NO_RUN.match(file.stem)]
    candidates = [*_nearest_files(path, beside), *_nearest_files(path, shipped)]
    if not candidates:
        return (
            f"there is no config file {path}; the repository's own are configs/*.py, such as"
            " configs/gpt350m_fp8.py"
        )
    nearest_file = max(candidates, key=lambda file: _similarity(path, file))
    if nearest_file.is_relative_to(Path.cwd()):
        nearest_file = nearest_file.relative_to(Path.cwd())
    return f"there is no config file {path}; did you mean {nearest_file}?"


NO_RUN = re.compile("study_|mixture|sources")  # files of configs/ that are no run's


def _nearest_files(path: Path, files: list[Path]) -> list[Path]:
    """Those of `files` whose name is nearest to that of `path`; none where all are far from it."""
    stems = difflib.get_close_matches(path.stem, [file.stem for file in files], 1, 0.5)
    return [file for file in files if file.stem in stems]


def _similarity(path: Path, file: Path) -> float:
    return difflib.SequenceMatcher(None, path.stem, file.stem).ratio()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The Config that the file at `path` binds, with `section.key=value` overrides applied and
    validated. Raises UserError."""
    return load_config_and_files(path, overrides)[0]


def load_config_and_files(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[Config, list[Path]]:
    """As load_config(), with the files that the config was made from, `path` first. Raises
    UserError."""
    path = Path(expand_home(str(path)))
    if not os.path.isfile(path):
        raise UserError(_no_config_file(path))
    try:
        config, files = run_file(path, "config")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} could not be run: {_describe_fault(error)}") from error
    if not isinstance(config, Config):
        raise UserError(
            f"{path} must bind config = Config(...), but config is {type(config).__name__}"
        )
    return apply_overrides(config, overrides), files


def _describe_fault(error: BaseException) -> str:
    """What a config file raised, and what to do about it where that is known."""
    fault = f"{type(error).__name__}: {error}"
    unknown_key = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown_key:
        return fault + describe_unknown(unknown_key[1])
    if isinstance(error, ImportError) and "relative import" in str(error):
        return (
            f"{fault}; a config is no package: import the file beside it by its name, without a dot"
        )
    return fault


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """A new Config with each `section.key=value` (a leading -- is accepted) parsed by its field's
    annotation."""
    changes: dict[str, dict[str, Any]] = {}  # section -> field -> value
    for text in overrides:
        key, value = _read_override(text)
        section, _, name = key.rpartition(".")
        changes.setdefault(section, {})[name] = value
    top_level = changes.pop("", {})
    # the command line's budget replaces the file's
    if len(top_level.keys() & {"steps", "tokens_per_param"}) == 1:
        top_level = {"steps": None, "tokens_per_param": None} | top_level
    sections = {name: replace(getattr(config, name), **new) for name, new in changes.items()}
    return replace(config, **top_level, **sections)


def _read_override(text: str) -> tuple[str, Any]:
    """Key and value of `section.key=value`. Raises UserError."""
    key, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        raise UserError(f"{text!r} is no override: write section.key=value, such as optim.lr=3e-4")
    if key not in KEYS:
        raise UserError(f"there is no key {key!r}{describe_unknown(key)}")
    if not value and get_origin(annotation(key)) is not tuple:
        raise UserError(f"{key} needs a value: write {key}=VALUE")
    return key, parse(key, value, annotation(key))


def config_from_dict(data: dict[str, Any]) -> Config:
    """The Config that config.json holds. Raises UserError where its keys are not ours (another
    version's file)."""
    try:
        values = {key: section_from_json(key, value) for key, value in data.items()}
        return Config(**values)
    except (TypeError, AttributeError) as error:
        raise UserError(f"the stored configuration does not fit this version: {error}") from error


def section_from_json(key: str, value: Any) -> Any:
    """A value of config.json as Config takes it: JSON has lists for tuples, objects for
    sections."""
    if key not in SECTIONS:
        return value
    members = {
        name: tuple(member) if isinstance(member, list) else member
        for name, member in value.items()
    }
    return SECTIONS[key](**members)


def read_config(run_dir: str | Path) -> Config:
    """The Config of a run on disk. Raises UserError where the folder holds none."""
    path = Path(run_dir) / "config.json"
    if not path.exists():
        named_run = Path("out") / run_dir  # a run's name in the place of its folder
        advice = "give a folder such as out/gpt350m_fp8"
        if (named_run / "config.json").exists():
            advice = f"did you mean {named_run}?"
        raise UserError(f"{run_dir} is no run: it has no config.json; {advice}")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON ({error}): restore it or start the run anew"
        ) from error
    if not isinstance(content, dict):
        raise UserError(
            f"{path} holds {type(content).__name__} where an object, {{...}}, is needed: restore it"
            " or start the run anew"
        )
    if "architectures" in content:
        raise UserError(
            f"{run_dir} is a model of Hugging Face's and no run: python -m eval.export --from-hf"
            f" {run_dir} out/RUN makes one of it; eval.harness scores it as hf:{run_dir} too"
        )
    return config_from_dict(content)


def help_text() -> str:
    """Every key with its type, default and meaning by section, as `--help` prints it."""
    paragraphs = []
    for name, cls in SECTIONS.items():
        prefix = f"{name}." if name else ""
        paragraphs.append("\n".join(field_lines(prefix, cls).values()))
    return "\n\n".join(paragraphs)
