"""Every setting of a run, typed and checked: a config file plus `section.key=value` overrides
become one frozen Config.

A config file is Python that binds `config = Config(...)`; a derived one, as configs/gpt350m_fp8.py,
replaces what differs."""

import difflib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from fp8.recipes import FP8Config, multiple_of
from lib.errors import UserError
from lib.help import field_lines
from lib.machine import ROOT
from lib.text import nearest
from lib.values import FilePath, expand_home, expand_paths, parse, type_problems
from model import GPTConfig
from runtime.config_file import OWN_NAMES, run_file
from runtime.tokenizer import tokenizer_kind

# ---------------------------------------------------------------------------------------- sections


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    dir: FilePath  # folder that holds one sub-folder of token shards per source
    mixture: dict[str, float]  # source -> its share of the training tokens; any positive scale
    tokens_per_step: int  # training tokens per optimizer step, over all ranks
    # sequences per forward pass and rank; auto = the fastest that fits, by trial
    micro_batch: int | Literal["auto"]
    # gpt2, byte, or a folder with tokenizer.json: what the shards were made with
    tokenizer: FilePath = "gpt2"
    max_epochs: float = 1.0  # times that a source may be seen before the run is refused


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float  # peak learning rate
    # muon: the blocks' matrices by Muon, the rest by AdamW
    kind: Literal["adamw", "muon"] = "adamw"
    momentum: float = 0.95  # muon only: decay of its moment
    # share of the peak that the rate falls to; a cosine is there after the last step
    min_lr_ratio: float = 0.1
    warmup_share: float = 0.02  # share of all steps over which the rate climbs linearly
    # after warm-up: cosine, or stable and then linear decay
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_share: float = 0.2  # wsd only: share of all steps spent decaying
    weight_decay: float = 0.1  # on matrices only, never on norms
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the root of the second moment
    clip: float = 1.0  # largest global gradient norm

    def warmup_steps(self, steps: int) -> int:
        return round(self.warmup_share * steps)

    def decay_steps(self, steps: int) -> int:
        """Updates of the wsd schedule's last part: a branch of `steps` leaves its trunk so many
        before its end."""
        return max(1, round(self.decay_share * steps))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    replicate: int = 1  # copies of the sharded model, gradients averaged between them (HSDP)
    # ranks that share one copy of the weights (FSDP2); none = all that remain
    shard: int | None = None
    # several ranks: drop a block's gathered weights between forward and backward
    reshard: bool = True
    # keep each block's input and attention's output, compute the rest twice
    recompute: bool = False
    # block starts sooner, several ranks always do
    compile: bool | Literal["model", "block", "off"] = "model"
    # one CPU process: BF16 matmuls and attention in fp32, each result rounded once
    cpu_fp32: bool = False
    timeout: float = 300.0  # seconds that a step may stand still before the job ends and says where
    # the same until the first step is done (compilation, loading), and for a save
    start_timeout: float = 1800.0

    def __post_init__(self):
        object.__setattr__(
            self, "compile", {True: "model", "off": False}.get(self.compile, self.compile)
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int | None = 1000  # steps between checkpoints; none = only the last
    keep: int = 3  # newest checkpoints that stay on disk; the last two always do
    best: bool = True  # keep that of lowest validation loss too
    # checkpoints of every so many steps stay for good; none = of no step
    forever: int | None = None
    # steps between more saves of which only the newest stays; none = no more
    rolling: int | None = None
    # more steps to save at; these checkpoints stay for good, to branch off from
    at: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int | None = 250  # steps between validations; none = only the last
    # validation tokens per source, always the same ones; all there are if fewer
    tokens: int = 1_048_576


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    # mirrors of metrics.jsonl, which is always written
    to: tuple[Literal["wandb", "tensorboard"], ...] = ()
    every: int = 10  # steps between console lines


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    every: int | None = None  # steps between looks at what FP8 does to each tensor; none = never
    # tokens that a look passes through the model, at most; at least one sequence
    tokens: int = 4096


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    # of spikes: ignored, noted, skipped; what is not finite always is
    mode: Literal["off", "log", "act"] = "act"
    window: int = 128  # accepted steps that a step is compared with
    threshold: float = 10.0  # a spike lies so many robust standard deviations above their median
    skips: int = 10  # skipped steps in a row before the run goes back to a checkpoint
    rollbacks: int = 3  # times that a run may go back before it stops


# ------------------------------------------------------------------------------------------ config


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
    steps: int | None = None  # optimizer steps; give this or tokens_per_param
    # training tokens per parameter (all parameters); give this or steps
    tokens_per_param: float | None = None
    seed: int = 1337  # of initialisation and token order; a BF16/FP8 pair shares it
    repeat: int = 0  # 1 = a null run: the same training once more, to see what rounding alone does
    out: FilePath = "out"  # folder of all runs
    deterministic: bool = False  # the same bits from every run of a GPU too, at some cost in speed
    profile: str | None = None  # steps to trace, first:last such as 10:15; none = no trace
    # a branch: another run's out/<run>/checkpoints/step_<step>; out/<run>: its weights
    start_from: FilePath | None = None

    def __post_init__(self):
        for name in SECTIONS:
            expand_paths(getattr(self, name, self))
        types = [
            p
            for name in SECTIONS
            for p in type_problems(f"{name}.".lstrip("."), getattr(self, name, self))
        ]
        # each relies on those before it
        if problems := types or [*self._value_problems()] or [*self._cross_problems()]:
            raise UserError("\n".join(problems))
        self.accumulation(1)

    def _value_problems(self):
        d, o, c = self.data, self.optim, self.checkpoint
        yield from (
            *positive(self, *POSITIVE.split()),
            *self.model.problems(),
            *self.fp8.problems(),
        )
        for (low, high), keys in BOUNDS.items():
            for key in keys.split():
                if not low <= attrgetter(key)(self) <= high:
                    yield f"{key}={attrgetter(key)(self)} must lie between {low} and {high}"
        for key, name in (
            ("run", self.run),
            *(("data.mixture: the name", name) for name in d.mixture),
        ):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
                yield (
                    f"{key}={name!r} must be one folder name, of letters, digits, '_', '-' and '.'"
                )
        # the order's resolution: data.WEIGHT_STEPS
        if min(d.mixture.values(), default=0) <= 1e-6 * sum(d.mixture.values()):
            yield (
                f"data.mixture={d.mixture} must name a source or more, each with a positive weight,"
                " such as fineweb_edu:1"
            )
        if d.micro_batch == "auto" and self.deterministic:
            yield (
                "data.micro_batch=auto is decided by a clock, which deterministic=true cannot have:"
                " give a number"
            )
        if o.kind == "muon" and self.fp8.all_gather:
            yield "fp8.all_gather=true is not tried with optim.kind=muon: set it to false"
        if o.schedule == "wsd" and o.warmup_share + o.decay_share > 1:
            yield (
                f"optim.warmup_share={o.warmup_share} plus optim.decay_share={o.decay_share} is"
                " more than the whole run"
            )
        if c.forever and (not c.every or c.forever % c.every):
            yield (
                f"checkpoint.forever={c.forever} must be a multiple of checkpoint.every={c.every};"
                " only saved ones are kept"
            )
        if self.start_from is not None and not self.parent:
            yield (
                f"start_from={self.start_from!r} is no checkpoint's folder: write it like "
                "out/<run>/checkpoints/step_00000400, or out/<run> for that run's weights alone"
            )
        if (self.steps is None) == (self.tokens_per_param is None):
            yield (
                f"steps={self.steps} and tokens_per_param={self.tokens_per_param}: give exactly one"
                " of the two"
            )

    def _cross_problems(self):
        m, d, recipe, end = self.model, self.data, self.fp8.recipe, self.total_steps
        if self.parent and self.parent[1] >= end:
            yield (
                f"start_from={self.start_from} lies at step {self.parent[1]}, but this run ends at"
                f" step {end}: take an earlier checkpoint, give more steps, or train on its weights"
                f" alone by start_from=out/{self.parent[0]}"
            )
        first, last = self.profile_steps or (0, 0)
        if self.profile is not None and not 1 <= first <= min(last, end):
            yield (
                f"profile={self.profile!r} must be the first and the last step to trace, such as"
                f" 10:15, of steps 1 to {end}"
            )
        if wrong := [step for step in self.checkpoint.at if not 1 <= step <= end]:
            yield f"checkpoint.at asks for step {wrong[0]}, but this run has steps 1 to {end}"
        chunk = m.loss_chunk if self.fp8.head else None
        tokens = 0 if d.micro_batch == "auto" else d.micro_batch * m.n_ctx
        yield from self.fp8.size_problems(tokens, chunk)
        # Inductor's CPU code leaves parts of a chunk's gradient unwritten (torch 2.13, found by
        # test), without a word.
        if (
            chunk
            and self.fp8.kernels
            and self.parallel.compile
            and m.n_ctx % chunk
            and chunk % m.n_ctx
        ):
            yield (
                f"model.loss_chunk={chunk} must divide model.n_ctx={m.n_ctx} or be a multiple of it"
                " (torch.compile on a CPU, fp8.head, fp8.kernels): take"
                f" {math.lcm(m.n_ctx, multiple_of(recipe))}, or none, or parallel.compile=false"
            )

    @property
    def total_steps(self) -> int:
        """Optimizer steps: as given, or enough for tokens_per_param x all parameters, rounded
        up."""
        if self.steps is not None:
            return self.steps
        assert self.tokens_per_param is not None
        return math.ceil(
            self.tokens_per_param * self.model.params_total / self.data.tokens_per_step
        )

    @property
    def total_tokens(self) -> int:
        return self.total_steps * self.data.tokens_per_step

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

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per rank and step (auto: of one sequence). Raises UserError where ranks do
        not divide a step evenly."""
        micro_batch = 1 if self.data.micro_batch == "auto" else self.data.micro_batch
        per_micro = micro_batch * self.model.n_ctx * world_size
        if self.data.tokens_per_step % per_micro:
            raise UserError(
                f"data.tokens_per_step={self.data.tokens_per_step} cannot be shared by"
                f" {world_size} ranks in micro-batches of {micro_batch} x"
                f" {self.model.n_ctx} tokens: it must be a multiple of {per_micro}; change"
                " data.micro_batch or the number of ranks"
            )
        return self.data.tokens_per_step // per_micro

    def identity(self) -> dict:
        """What makes two configs the same training run, as flat key -> value: all that the weights
        depend on."""
        keys = {
            f"{s}.{k}": v
            for s in ("model", "data", "fp8", "optim")
            for k, v in asdict(getattr(self, s)).items()
        }
        # of a folder the shards know which; it may be moved
        keys["data.tokenizer"] = tokenizer_kind(self.data.tokenizer)
        # A resume may need less memory, find one process, where nothing can be gathered, or do
        # without our kernels.
        free = {
            "data.dir",
            "data.micro_batch",
            "data.max_epochs",
            "model.loss_chunk",
            "fp8.all_gather",
            "fp8.kernels",
        }
        if self.optim.kind == "adamw":
            free.add("optim.momentum")
        # not in older runs
        later = [("optim.kind", "adamw"), ("fp8.fast_backward", False), ("fp8.scaling", "current")]
        # said or left to the default: one model
        if self.model.head_dim * self.model.n_head == self.model.n_embd:
            free.add("model.head_size")
        return {k: v for k, v in keys.items() if k not in free and (k, v) not in later} | {
            "seed": self.seed,
            "steps": self.total_steps,
            # wherever its folder lies
            "start_from": self.parent and "{} at step {}".format(*self.parent),
        }


SECTIONS: dict[str, Any] = {"": Config} | {
    name: cls for name, cls in get_type_hints(Config).items() if is_dataclass(cls)
}
KEYS = [
    f"{section}.{f.name}".lstrip(".")
    for section, cls in SECTIONS.items()
    for f in fields(cls)
    if f.name not in SECTIONS
]
PARENT = re.compile(
    r"(?:^|/)(?!checkpoints|step_)([A-Za-z0-9][A-Za-z0-9_.-]*)(?:/checkpoints/step_(\d{8}))?/?$"
)
POSITIVE = (
    "steps tokens_per_param data.tokens_per_step data.micro_batch data.max_epochs optim.lr"
    " optim.eps optim.clip parallel.replicate parallel.shard parallel.timeout"
    " parallel.start_timeout checkpoint.every checkpoint.keep checkpoint.forever checkpoint.rolling"
    " eval.every eval.tokens log.every probe.every probe.tokens guard.skips"
)
BOUNDS = {  # smallest and largest value of other numbers
    (0, 1): "repeat optim.min_lr_ratio optim.warmup_share optim.decay_share optim.weight_decay",
    (0, math.nextafter(1, 0)): "optim.beta1 optim.beta2 optim.momentum",
    (0, math.inf): "fp8.first_bf16 fp8.last_bf16 guard.rollbacks",
    (8, math.inf): "guard.window",  # steps: the spread of fewer is not known
    (2, math.inf): "guard.threshold",  # below it ordinary steps would count as spikes
}


def positive(section, *names: str) -> list[str]:
    """A sentence for each of the named numbers that is not above zero."""
    return [
        f"{name}={value} must be a positive, finite number"
        for name in names
        if isinstance(value := attrgetter(name)(section), int | float) and not 0 < value < math.inf
    ]


# ----------------------------------------------------------------------------------------- reading

# Our key (and how its unit differs): names of the same in nanoGPT, nanochat, torchtitan, LitGPT and
# transformers.
FOREIGN = {
    "run, whose command resumes it when it is given again": (
        "resume resume_from_checkpoint load_checkpoint auto_resume"
    ),
    "out": "out_dir output_dir dump_folder",
    "start_from, a run's or a checkpoint's folder": (
        "init_from initial_load_path initial_checkpoint_dir"
    ),
    "steps, of the optimizer, not epochs": (
        "max_iters max_steps num_iterations training_steps train_steps total_steps num_steps epochs"
        " num_epochs num_train_epochs"
    ),
    "tokens_per_param, training tokens over parameters": (
        "tokens max_tokens train_tokens target_param_data_ratio"
    ),
    "model.n_layer": "num_layers num_hidden_layers depth",
    "model.n_embd": "hidden_size d_model dim model_dim",
    "model.n_head": "num_heads num_attention_heads",
    "model.n_kv_head": "num_kv_heads num_key_value_heads n_query_groups",
    "model.head_size": "head_dim d_head kv_channels",
    "model.n_ffn": "intermediate_size ffn_dim hidden_dim ffn_hidden_size",
    "model.n_ctx": (
        "block_size seq_len max_seq_len sequence_len seq_length max_seq_length context_length"
        " n_positions"
    ),
    "model.tied": "tie_word_embeddings weight_tying",
    "data.micro_batch, sequences per forward pass and rank": (
        "batch_size device_batch_size micro_batch_size local_batch_size"
    ),
    "data.tokens_per_step, which counts tokens and sets accumulation": (
        "global_batch_size total_batch_size grad_accum_steps gradient_accumulation_steps"
    ),
    "data.mixture, written source:weight,source:weight": "dataset dataset_name",
    "data.dir": "data_dir data_path dataset_path",
    "optim.lr": "learning_rate max_lr peak_lr",
    "optim.min_lr_ratio, a share of optim.lr": "min_lr min_lr_factor final_lr_frac",
    "optim.warmup_share, a share of all steps": (
        "warmup_iters warmup_steps lr_warmup_steps warmup_ratio"
    ),
    "optim.decay_share, a share of all steps": "decay_ratio warmdown_ratio",
    "optim.schedule": "decay_type lr_scheduler_type",
    "optim.eps": "adam_eps adam_epsilon",
    "optim.clip": "grad_clip clip_grad_norm max_norm max_grad_norm gradient_clip_val",
    "fp8.recipe, off for BF16": (
        "dtype bf16 precision mixed_precision mixed_precision_param fp8 float8 recipe_name"
    ),
    "parallel.shard": "data_parallel_shard_degree fsdp",
    "parallel.recompute": "gradient_checkpointing activation_checkpoint activation_checkpointing",
    "checkpoint.every": "save_interval save_steps save_every interval",
    "checkpoint.keep": "save_total_limit keep_latest_k",
    "eval.every": "eval_interval eval_every eval_steps val_interval",
    "eval.tokens, of each source": "eval_iters max_eval_iters eval_tokens",
    "log.every": "log_interval log_freq logging_steps",
    "log.to, wandb or tensorboard": (
        "wandb_log report_to enable_wandb enable_tensorboard wandb_project"
    ),
}


@dataclass(frozen=True)
class CommandLine:
    """What the words of train.py's command line say."""

    file: str  # the config file
    overrides: list[str]  # section.key=value, each key once
    plan_for: str | None  # --plan: the name of a GPU, "" where none is named; none = train


def read_command_line(words: Sequence[str]) -> CommandLine:
    """What the words say: the config file, in any place, `section.key=value`,
    `--section.key=value`, `--section.key value`, `--section.key` of a bool, and --plan. Raises
    UserError for any other word, and for a key that is given twice."""
    bare: list[str] = []
    given: dict[str, str] = {}
    plan_for: str | None = None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if name == "plan" and word.startswith("--"):
            if plan_for is not None:
                raise UserError("--plan is given twice")
            if not equals and rest and _may_name_a_gpu(rest[0]):
                value = rest.pop(0)
            plan_for = value
            continue
        is_bare = not word.startswith("--") and not (name and equals)
        if is_bare or (name not in KEYS and os.path.isfile(word)):
            bare.append(word)
            continue
        if name.rpartition(".")[2].replace("-", "_") in ("config", "config_file", "cfg"):
            raise UserError(
                f"{word!r}: train.py takes the config file as a word of its own: python train.py "
                f"{value or next(iter(rest), 'FILE')} [section.key=value ...]"
            )
        if name not in KEYS:
            raise UserError(f"there is no key {name!r}{_meant(name)}")
        if not equals:
            value = _value_of_a_flag(name, rest)
        if name in given:
            raise UserError(
                f"{name} is given twice, as {given[name]!r} and as {value!r}: give it once"
            )
        given[name] = value
    files = [word for word in bare if word.endswith(".py") or os.path.isfile(word)]
    files = files or [word for word in bare if word not in KEYS][:1]
    if stray := [word for word in bare if word not in files[:1]] or files[1:]:
        raise UserError(
            f"{stray[0]!r} is no override: write section.key=value, such as optim.lr=3e-4, after"
            " one config file"
        )
    if not files:
        raise UserError(
            "no config file is named: python train.py FILE [section.key=value ...], such as"
            " configs/demo_s_bf16.py"
        )
    return CommandLine(files[0], [f"{name}={value}" for name, value in given.items()], plan_for)


def _value_of_a_flag(key: str, rest: list[str]) -> str:
    """The value of `--key`, which is taken from the words that follow; that of a bool may be left
    out."""
    if _hint(key) is bool and rest[:1] not in (["true"], ["false"]):
        return "true"
    if not rest or rest[0].startswith("--"):
        raise UserError(f"--{key} needs a value: write {key}=VALUE")
    return rest.pop(0)


def _may_name_a_gpu(word: str) -> bool:
    return not word.startswith("--") and not word.endswith(".py") and not {"=", "/"} & set(word)


def _hint(key: str):
    """The annotation of a key."""
    section, _, name = key.rpartition(".")
    return get_type_hints(SECTIONS[section], include_extras=True)[name]


def _no_config_file(path: Path) -> str:
    """The sentence for a path that is no file, with the path that was probably meant."""
    if path.is_dir():
        return f"{path} is a folder: name a config file, such as configs/gpt350m_fp8.py"
    shipped = [
        file
        for file in (ROOT / "configs").glob("*.py")
        if not re.match("study_|mixture|sources", file.stem)
    ]
    beside = [file for file in path.parent.glob("*.py") if file.stem not in OWN_NAMES]
    near: list[Path] = []
    for files in (beside, shipped):
        stems = [file.stem for file in files]
        near += [
            file
            for stem in difflib.get_close_matches(path.stem, stems, 1, 0.5)
            for file in files
            if file.stem == stem
        ]
    if not near:
        return (
            f"there is no config file {path}; the repository's own are configs/*.py, such as"
            " configs/gpt350m_fp8.py"
        )
    meant = max(near, key=lambda file: difflib.SequenceMatcher(None, path.stem, file.stem).ratio())
    meant = meant.relative_to(Path.cwd()) if meant.is_relative_to(Path.cwd()) else meant
    return f"there is no config file {path}; did you mean {meant}?"


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
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        told = f"{type(error).__name__}: {error}" + (_meant(unknown[1]) if unknown else "")
        if isinstance(error, ImportError) and "relative import" in str(error):
            told += "; a config is no package: import the file beside it by its name, without a dot"
        raise UserError(f"{path} could not be run: {told}") from error
    if not isinstance(config, Config):
        raise UserError(
            f"{path} must bind config = Config(...), but config is {type(config).__name__}"
        )
    return apply_overrides(config, overrides), files


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """A new Config with each `section.key=value` (a leading -- is accepted) parsed by its field's
    annotation."""
    changes: dict[str, dict] = {}
    for text in overrides:
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals:
            raise UserError(
                f"{text!r} is no override: write section.key=value, such as optim.lr=3e-4"
            )
        if key not in KEYS:
            raise UserError(f"there is no key {key!r}{_meant(key)}")
        if not value and get_origin(_hint(key)) is not tuple:
            raise UserError(f"{key} needs a value: write {key}=VALUE")
        section, _, name = key.rpartition(".")
        changes.setdefault(section, {})[name] = parse(key, value, _hint(key))
    top = changes.pop("", {})
    # the command line's budget replaces the file's
    if len(top.keys() & {"steps", "tokens_per_param"}) == 1:
        top = {"steps": None, "tokens_per_param": None} | top
    return replace(
        config,
        **top,
        **{section: replace(getattr(config, section), **new) for section, new in changes.items()},
    )


def _meant(key: str) -> str:
    """How the sentence about an unknown key goes on: what another code base's name is here, or else
    the nearest key."""
    name = key.lower().replace("-", "_").rpartition(".")[2]
    ours = next((ours for ours, theirs in FOREIGN.items() if name in theirs.split()), None)
    return f"; did you mean {ours}?" if ours else nearest(key, KEYS)


def config_from_dict(data: dict) -> Config:
    """The Config that config.json holds. Raises UserError where its keys are not ours (another
    version's file)."""
    try:
        parts = {
            k: (
                SECTIONS[k](**{n: tuple(v) if isinstance(v, list) else v for n, v in value.items()})
                if k in SECTIONS
                else value
            )
            for k, value in data.items()
        }
        return Config(**parts)
    except (TypeError, AttributeError) as error:
        raise UserError(f"the stored configuration does not fit this version: {error}") from error


def read_config(run_dir: str | Path) -> Config:
    """The Config of a run on disk. Raises UserError where the folder holds none."""
    path = Path(run_dir) / "config.json"
    if not path.exists():
        named = Path("out") / run_dir  # a run's name in the place of its folder
        meant = (
            f"did you mean {named}?"
            if (named / "config.json").exists()
            else "give a folder such as out/gpt350m_fp8"
        )
        raise UserError(f"{run_dir} is no run: it has no config.json; {meant}")
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
    return "\n\n".join(
        "\n".join(field_lines(f"{name}.".lstrip("."), cls).values())
        for name, cls in SECTIONS.items()
    )
