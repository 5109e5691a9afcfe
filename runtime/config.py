"""Every knob of a run, typed: a config file plus `section.key=value` overrides become one frozen Config.

A config file is Python that binds `config = Config(...)`. A derived run imports its parent and replaces what differs:

    from configs.gpt350m_bf16 import config as parent
    config = replace(parent, run="gpt350m_fp8", fp8=FP8Config(recipe="tensorwise"))

Every mistake becomes a ConfigError: key, value, expectation, remedy; all of a file's problems together.
"""

import difflib
import json
import math
import re
import runpy
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import get_type_hints

from model import GPTConfig
from runtime.annotations import ConfigError, field_lines, keyword_sentence, nearest, parse, type_problems
from runtime.sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    FP8Config,
    GuardConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    ProbeConfig,
    positive,
)
from runtime.tokenizer import VOCAB_SIZE, tokenizer_kind


@dataclass(frozen=True, kw_only=True)
class Config:
    run: str                                # name of the run; its files lie in out/<run>/
    model: GPTConfig
    data: DataConfig
    optim: OptimConfig
    fp8: FP8Config = field(default_factory=FP8Config)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    steps: int | None = None                # optimizer steps; give this or tokens_per_param
    tokens_per_param: float | None = None   # training tokens per parameter (all parameters); give this or steps
    seed: int = 1337                        # of initialisation and token order; a BF16/FP8 pair shares it
    repeat: int = 0                         # 1 = a null run: the same training once more, to see what rounding alone does
    out: str = "out"                        # folder of all runs
    deterministic: bool = False             # the same bits from every run of a GPU too, at some cost in speed
    profile: str | None = None              # steps to trace, first:last such as 10:15; none = no trace
    start_from: str | None = None           # branch off another run: its out/<run>/checkpoints/step_<step>

    def __post_init__(self):
        sections = {name: getattr(self, name) for name in SECTIONS}
        problems = [f"{name}={value!r} must be a {SECTIONS[name].__name__}(...)" for name, value in sections.items()
                    if not isinstance(value, SECTIONS[name])]
        # Each stage judges only what the stage before found sound.
        problems = problems or [p for name, value in {"": self, **sections}.items() for p in type_problems(name, value)]
        problems = problems or [p for value in sections.values() for p in value.problems()]
        problems = problems or self._cross_problems()
        if problems:
            raise ConfigError("\n".join(problems))

    def _cross_problems(self) -> list[str]:
        """What no section can see alone: budget, divisibility, tokenizer, FP8 dimensions."""
        m, d, out = self.model, self.data, []
        if (self.steps is None) == (self.tokens_per_param is None):
            out.append(f"steps={self.steps} and tokens_per_param={self.tokens_per_param}: give exactly one of the two")
        out += positive(self, "", "steps", "tokens_per_param")
        if self.repeat not in (0, 1):
            out.append(f"repeat={self.repeat} must be 0, or 1 for a null run")
        if not out and max((self.steps or 0) * d.tokens_per_step, (self.tokens_per_param or 0) * m.params_total) > 2**50:
            out.append(f"steps={self.steps}, tokens_per_param={self.tokens_per_param}: a budget beyond 10^15 tokens is no budget")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.run):
            out.append(f"run={self.run!r} must be one folder name, of letters, digits, '_', '-' and '.'")
        if self.start_from is not None and not PARENT.search(self.start_from):
            out.append(f"start_from={self.start_from!r} is no checkpoint's folder: write it like "
                       f"out/<run>/checkpoints/step_00000400")
        if not out and self.parent and self.parent[1] >= self.total_steps:
            out.append(f"start_from={self.start_from} lies at step {self.parent[1]}, but this run ends at step "
                       f"{self.total_steps}: take an earlier checkpoint, or give more steps")
        if not out and max(self.checkpoint.at, default=0) > self.total_steps:
            out.append(f"checkpoint.at names step {max(self.checkpoint.at)}, but this run ends at step {self.total_steps}")
        if self.profile is not None and not (self.profile_steps and 0 < self.profile_steps[0] <= self.profile_steps[1]):
            out.append(f"profile={self.profile!r} must be the first and the last step to trace, such as profile=10:15")
        elif not out and self.profile and self.profile_steps[0] > self.total_steps:
            out.append(f"profile={self.profile} begins after the last step of this run, {self.total_steps}")
        if d.micro_batch == "auto":
            if d.tokens_per_step % m.n_ctx:
                out.append(f"data.tokens_per_step={d.tokens_per_step} is not a whole number of sequences of {m.n_ctx} tokens "
                           f"(model.n_ctx)")
            if self.deterministic:
                out.append("data.micro_batch=auto is decided by a clock, which deterministic=true cannot have: give a number")
        elif d.tokens_per_step % (m.n_ctx * d.micro_batch):
            out.append(f"data.tokens_per_step={d.tokens_per_step} is not a whole number of micro-batches of "
                       f"{d.micro_batch} x {m.n_ctx} = {d.micro_batch * m.n_ctx} tokens (data.micro_batch x model.n_ctx)")
        if d.tokenizer not in VOCAB_SIZE and "/" not in d.tokenizer:
            out.append(f"data.tokenizer={d.tokenizer!r} is none of {', '.join(VOCAB_SIZE)}; a folder with a tokenizer.json is "
                       f"named by a path with a slash, such as ./{d.tokenizer}")
        elif m.vocab_size != VOCAB_SIZE.get(d.tokenizer, m.vocab_size):     # a folder's is judged when it is read
            out.append(f"model.vocab_size={m.vocab_size} does not fit data.tokenizer={d.tokenizer}, which has "
                       f"{VOCAB_SIZE[d.tokenizer]} tokens: set model.vocab_size={VOCAB_SIZE[d.tokenizer]}")
        if self.fp8.recipe != "off":
            multiple = 32 if self.fp8.recipe == "mxfp8" else 16
            needs = f"is not a multiple of {multiple}, which fp8.recipe={self.fp8.recipe} needs"
            for name, value in (("n_embd", m.n_embd), ("n_ffn", m.n_ffn),
                                ("n_kv_head x head size", m.kv_heads * m.head_size)):
                if value % multiple and self.fp8.recipe != "auto":      # which leaves such Linears in BF16
                    out.append(f"model.{name}={value} {needs}: take {value // multiple * multiple or multiple} or "
                               f"{-(-value // multiple) * multiple}, or fp8.recipe=off")
            if d.micro_batch != "auto" and d.micro_batch * m.n_ctx % multiple:
                out.append(f"data.micro_batch={d.micro_batch} x model.n_ctx={m.n_ctx} tokens {needs} for the weight gradient: "
                           f"change either, or fp8.recipe=off")
            if self.fp8.head and m.loss_chunk is not None:
                out += self._chunk_problems(m.loss_chunk, multiple, needs)
        return out

    def _chunk_problems(self, chunk: int, multiple: int, needs: str) -> list[str]:
        """Why an FP8 head cannot be trained on `chunk` tokens at a time, if so."""
        n_ctx = self.model.n_ctx
        # Inductor's CPU code leaves parts of a chunk's gradient unwritten (torch 2.13, found by test), without a word.
        if self.fp8.kernels and self.parallel.compile and n_ctx % chunk and chunk % n_ctx:
            multiple = math.lcm(n_ctx, multiple)
            why = (f"neither divides model.n_ctx={n_ctx} nor is a multiple of it, which torch.compile gets wrong on a CPU with "
                   "fp8.head and fp8.kernels (part of the gradients unwritten): take {}, or none, or parallel.compile=false")
        elif chunk % multiple:
            why = f"{needs} for the head's weight gradient (fp8.head=true): take {{}}, or none"
        else:
            return []
        return [f"model.loss_chunk={chunk} " + why.format(-(-chunk // multiple) * multiple)]

    # ------------------------------------------------------------------------------------------------ derived values

    @property
    def total_steps(self) -> int:
        """Optimizer steps: as given, or enough for tokens_per_param x all parameters, rounded up."""
        if self.steps is not None:
            return self.steps
        return math.ceil(self.tokens_per_param * self.model.params_total / self.data.tokens_per_step)

    @property
    def total_tokens(self) -> int:
        return self.total_steps * self.data.tokens_per_step

    @property
    def run_dir(self) -> Path:
        return Path(self.out) / self.run

    @property
    def parent(self) -> tuple[str, int] | None:
        """Of a branch: the run it starts from, and after which of that run's steps; None for a run from scratch."""
        if self.start_from is None:
            return None
        run, step = PARENT.search(self.start_from).groups()
        return run, int(step)

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """First and last step to trace, counted from 1 as rows are; None without profile=."""
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.profile or "", re.ASCII)
        return (int(match[1]), int(match[2])) if match else None

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per rank and step, of one sequence each while they are auto. Raises ConfigError where the ranks do not
        divide a step evenly."""
        micro_batch = 1 if self.data.micro_batch == "auto" else self.data.micro_batch
        per_micro = micro_batch * self.model.n_ctx * world_size
        if self.data.tokens_per_step % per_micro:
            raise ConfigError(f"data.tokens_per_step={self.data.tokens_per_step} cannot be shared by {world_size} ranks in "
                              f"micro-batches of {micro_batch} x {self.model.n_ctx} tokens: it must be a multiple "
                              f"of {per_micro}; change data.micro_batch or the number of ranks")
        return self.data.tokens_per_step // per_micro

    def to_dict(self) -> dict:
        return asdict(self)

    def identity(self) -> dict:
        """What makes two configs the same training run, as flat key -> value: all that the weights depend on."""
        # A resume may need less memory, find one process, where nothing can be gathered, or do without our kernels.
        free = {"data.dir", "data.micro_batch", "data.max_epochs", "model.loss_chunk", "fp8.all_gather", "fp8.kernels"}
        keys = {f"{s}.{k}": v for s in ("model", "data", "fp8", "optim") for k, v in asdict(getattr(self, s)).items()}
        keys["data.tokenizer"] = tokenizer_kind(self.data.tokenizer)    # of a folder the shards know which; it may be moved
        return {k: v for k, v in keys.items() if k not in free} | {
            "seed": self.seed, "steps": self.total_steps,
            "start_from": self.parent and "{} at step {}".format(*self.parent)}     # wherever its folder lies


PARENT = re.compile(r"(?:^|/)([A-Za-z0-9][A-Za-z0-9_.-]*)/checkpoints/step_(\d{8})/?$")
SECTIONS = {"model": GPTConfig, "data": DataConfig, "optim": OptimConfig, "fp8": FP8Config, "parallel": ParallelConfig,
            "checkpoint": CheckpointConfig, "eval": EvalConfig, "log": LogConfig, "probe": ProbeConfig,
            "guard": GuardConfig}


# ------------------------------------------------------------------------------------------------------------- reading

def load_config(path: str | Path, overrides: list[str] = ()) -> Config:
    """The Config that the file at `path` binds, with `section.key=value` overrides applied and everything validated.

    Raises ConfigError: no such file, no `config` in it, an unknown key, a wrong type, an impossible value.
    """
    path = Path(path)
    try:
        is_there = path.is_file()
    except OSError:     # a name too long to be one
        is_there = False
    if not is_there:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        raise ConfigError(f"there is no config file {path}" + (f"; did you mean {path.parent / near[0]}?" if near else ""))
    try:
        config = runpy.run_path(str(path)).get("config")
    except TypeError as error:      # the dataclasses' own complaint about a keyword, in our words
        raise ConfigError(f"{path}{keyword_sentence(error, (Config, *SECTIONS.values()))}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} could not be run: {type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"{path} must bind config = Config(...), but config is {type(config).__name__}")
    return apply_overrides(config, overrides)


def apply_overrides(config: Config, overrides: list[str]) -> Config:
    """A new Config with each `section.key=value` (a leading -- is accepted) parsed by its field's annotation."""
    changes: dict[str, dict] = {}
    for text in overrides:
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is no override: write section.key=value, such as optim.lr=3e-4")
        section, _, name = key.rpartition(".")
        cls = SECTIONS.get(section) if section else Config
        if cls is None or name not in get_type_hints(cls) or (not section and name in SECTIONS):
            raise ConfigError(f"there is no key {key!r}{nearest(key, known_keys())}")
        try:
            changes.setdefault(section, {})[name] = parse(key, value, get_type_hints(cls)[name])
        except ValueError as error:
            raise ConfigError(str(error)) from error
    sections = {s: replace(getattr(config, s), **c) for s, c in changes.items() if s}
    top = changes.get("", {})
    if "steps" in top and "tokens_per_param" not in top:        # the command line's budget replaces the file's
        top["tokens_per_param"] = None
    elif "tokens_per_param" in top and "steps" not in top:
        top["steps"] = None
    return replace(config, **sections, **top)


def config_from_dict(data: dict) -> Config:
    """The Config that config.json holds. Raises ConfigError where its keys are not ours (another version's file)."""
    try:
        parts = {k: SECTIONS[k](**{n: tuple(v) if isinstance(v, list) else v for n, v in value.items()})
                 if k in SECTIONS else value for k, value in data.items()}
        return Config(**parts)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"the stored configuration does not fit this version: {error}") from error


def read_config(run_dir: str | Path) -> Config:
    """The Config of a run on disk. Raises ConfigError where the folder holds none."""
    path = Path(run_dir) / "config.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{run_dir} is no run: it has no config.json; give a folder such as out/demo_l_fp8") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): the file is damaged, restore it or start the run anew") from error
    if isinstance(content, dict) and "architectures" in content:
        raise ConfigError(f"{run_dir} is a model in Hugging Face's layout and no run: python -m eval.export --from-hf {run_dir} "
                          f"out/RUN makes one of it; eval.harness scores it as hf:{run_dir} too")
    return config_from_dict(content)


def known_keys() -> list[str]:
    top = [f.name for f in fields(Config) if f.name not in SECTIONS]
    return top + [f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in fields(cls)]


def help_text() -> str:
    """Every key with its type, default and meaning, as `--help` prints it."""
    return "\n".join(line for name, cls in {"": Config, **SECTIONS}.items() for line in field_lines(name, cls))
