"""Where a run begins: its own newest checkpoint, a branch point of another run, another model's
weights, or step 0. Start holds the answer, and all that later steps need of it."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from fp8.recipes import from_label
from fp8.trained_precision import ARROW
from lib.errors import UserError
from runtime.checkpoint import BranchPoint, Restored, branch, restore, run_on_rank0
from runtime.config import Config, FP8Config, config_from_dict, section_from_json
from runtime.parallel import World
from runtime.run_folder import changes_of_run, refuse_to_start_over, refuse_without_rows


@dataclass
class Progress:
    """How far a run has come, as its checkpoints store it."""

    step: int = 0  # training steps that count: done, and not undone by a rollback
    updates: int = 0  # of the weights; fewer than steps where some were skipped
    data_offset: int = 0  # full steps' worth of data that rollbacks have left out
    seconds: float = 0.0  # of wall time, when last saved
    probe_seconds: float = 0.0  # of these, spent in probes

    @classmethod
    def of(cls, step: int, state: dict) -> "Progress":
        """That of a checkpoint of `step`, whose state holds the other fields."""
        return cls(step, **{f.name: state[f.name] for f in fields(cls)[1:]})


class StartKind(enum.Enum):
    """The way in which a run begins."""

    SCRATCH = "scratch"
    RESUME = "resume"  # from its own newest whole checkpoint
    BRANCH = "branch"  # a step of another run, with its moments and order of data
    SWITCHED_BRANCH = "switched branch"  # the same, and on in another precision
    WEIGHTS = "weights"  # the weights alone of an imported model, or of a finished run


# how the log's line about it begins
STARTING = {
    StartKind.RESUME: "resuming",
    StartKind.BRANCH: "branching off",
    StartKind.SWITCHED_BRANCH: "branching off",
    StartKind.WEIGHTS: "on from",
}


@dataclass(frozen=True)
class Start:
    """Where a run begins, and what its checkpoint carries over."""

    kind: StartKind
    progress: Progress
    checkpoint: Path | None = None  # the folder that the tensors were filled from
    # of the whole state of a run: what its checkpoint says of guard, scales and data; None with
    # weights alone
    state: dict | None = None
    # the model that the weights go back to, where another run or an import began them:
    # {"folder", "run", "step", "tokenizer_sha256"}
    origin: dict | None = None
    # of the trunk before the branch point, where a branch has another; of several, oldest first
    trunk_precisions: tuple[FP8Config, ...] = ()
    # with weights alone: sources that the run they are of has read in this run's order
    sources_read_again: tuple[str, ...] = ()

    @property
    def switched_from(self) -> str | None:
        """The labels of trunk_precisions, such as "a>b"; None without a switch."""
        return switch_label(self.trunk_precisions)

    @property
    def is_resumed(self) -> bool:
        return self.kind is StartKind.RESUME

    def describe(self) -> str:
        """What the log says of it."""
        if self.checkpoint is None:
            return "starting at step 0"
        line = f"{STARTING[self.kind]} {self.checkpoint}"
        if self.sources_read_again:
            line += (
                f"; the run before has read {', '.join(self.sources_read_again)} with the same"
                " seed: this one reads the same tokens first, another seed= takes another order"
            )
        if self.switched_from is None:
            return line
        return f"{line}; trained in {self.switched_from} before its branch point"


def find_start(
    config: Config,
    tokenizer_hashes: tuple[str, ...],
    tensors: dict[str, torch.Tensor],
    world: World,
    tell_damaged: Callable[[str], None],
) -> Start:
    """Fill `tensors` in place from the run's own newest whole checkpoint, else from
    config.start_from; from neither they are left as they are. All ranks call it together.
    `tell_damaged` gets, on rank 0, a line about each of the run's own that is damaged. Raises
    UserError as restore(), branch(), refuse_to_start_over() and refuse_without_rows() do."""
    newest = restore(config.run_dir, tensors, world, tell_damaged)
    if newest is not None:
        step = newest.step
        run_on_rank0(world, lambda: refuse_without_rows(config, step))
        return _resume(newest)
    run_on_rank0(world, lambda: refuse_to_start_over(config))
    if not config.start_from:
        return Start(StartKind.SCRATCH, Progress())
    point = branch(config, tokenizer_hashes, tensors, world)
    if point.origin is not None:
        return Start(
            StartKind.WEIGHTS,
            Progress(),
            point.path,
            origin=point.origin,
            sources_read_again=_sources_read_again(point, config),
        )
    return _branch_off(point, config)


def _resume(newest: Restored) -> Start:
    state = newest.state
    return Start(
        StartKind.RESUME,
        Progress.of(newest.step, state),
        newest.path,
        state,
        state.get("origin"),
        trunk_precisions(state),
    )


def _sources_read_again(point: BranchPoint, config: Config) -> tuple[str, ...]:
    """The sources whose windows the run of the weights has read in the order in which this one
    will; an imported model has read none."""
    if point.manifest["state"].get("imported"):
        return ()
    before = config_from_dict(point.manifest["config"])
    has_same_order = (
        before.seed == config.seed
        and before.model.n_ctx == config.model.n_ctx
        and before.data.dir == config.data.dir
    )
    if not has_same_order:
        return ()
    return tuple(sorted({*before.data.mixture} & {*config.data.mixture}))


def _branch_off(point: BranchPoint, config: Config) -> Start:
    """A branch has its trunk's steps behind it, but not its hours."""
    state = point.state
    progress = Progress.of(point.step, state)
    progress.seconds = progress.probe_seconds = 0.0
    trunk_fp8 = config_from_dict(point.manifest["config"]).fp8
    kind = StartKind.BRANCH
    precisions = trunk_precisions(state)
    if trunk_fp8.label != config.fp8.label:
        kind = StartKind.SWITCHED_BRANCH
        precisions = (*precisions, trunk_fp8)
    return Start(kind, progress, point.path, state, state.get("origin"), precisions)


def trunk_precisions(state: dict) -> tuple[FP8Config, ...]:
    """Start.trunk_precisions, of what a checkpoint says."""
    stored = state.get("switched_from_fp8")
    if stored is not None:
        return tuple(section_from_json("fp8", settings) for settings in stored)
    # a checkpoint of older code has labels alone
    label = state.get("switched_from")
    return tuple(from_label(part) for part in label.split(ARROW)) if label else ()


def switch_label(precisions: Sequence[FP8Config]) -> str | None:
    """Labels of precisions that followed each other; None for none."""
    return ARROW.join(fp8.label for fp8 in precisions) or None


# What a run must share with the state that it goes on from: key of its identity -> how the error
# calls it.
SHARED = {
    "train": "training tokens than data.dir holds",
    "val": "validation windows than eval.tokens and data.dir give",
    "fp8": "Linears in FP8 than fp8.recipe=auto chooses here",
}


def refuse_other_data(start: Start, identity: dict[str, str]) -> None:
    """Raises UserError where the state that `start` goes on from saw other data, or other Linears
    in FP8, than `identity` (a hash for each key of SHARED) names. Weights alone saw none."""
    if start.state is None or start.checkpoint is None:
        return
    stored = start.state.get("data", identity)
    for key, description in SHARED.items():
        if key == "fp8" and start.kind is StartKind.SWITCHED_BRANCH:
            continue
        if stored.get(key) != identity[key]:
            raise UserError(
                f"{start.checkpoint.parent.parent} was begun with other {description}: restore"
                " those, or choose another run="
            )


@dataclass(frozen=True)
class DataOfRank:
    """Which data a rank has found in data.dir."""

    host: str
    train_sha256: str  # Data's
    val_sha256: str


def refuse_unequal_data(of_ranks: Sequence[DataOfRank]) -> None:
    """Raises UserError where a rank has other data than rank 0: the order of the data is computed
    from the shards, so each would train on windows of an order of its own. `of_ranks`: by rank."""
    first = of_ranks[0]
    for rank, data in enumerate(of_ranks):
        differing = []
        if data.train_sha256 != first.train_sha256:
            differing.append("training tokens")
        if data.val_sha256 != first.val_sha256:
            differing.append("validation tokens")
        if differing:
            raise UserError(
                f"rank {rank} (host {data.host}) has other {' and '.join(differing)} in data.dir"
                f" than rank 0 (host {first.host}): copy the shards of one machine to all"
            )


def refuse_to_replace_copies(config: Config, start: Start, manifest: dict) -> None:
    """Raises UserError where copies in config.checkpoint.copy_to, of whose newest this is the
    manifest, are another run's; or this run's, which would begin anew over them: they may be all
    that is left of it."""
    url = (config.checkpoint.copy_to or "").rstrip("/")
    stored = config_from_dict(manifest["config"])
    is_brought_back = _is_copy_of_its_own(config)
    if is_brought_back:  # of one run, those from before and after its folder was lost
        stored = replace(stored, start_from=config.start_from)
    if changes := changes_of_run(config, stored):
        raise UserError(
            f"checkpoint.copy_to={url} holds checkpoints of another run {config.run}"
            f" ({'; '.join(changes)}): choose another run= or checkpoint.copy_to=, or give the same"
            " settings"
        )
    is_going_on = start.is_resumed or (is_brought_back and start.state is not None)
    if is_going_on:
        return
    step = manifest["step"]
    anew = f"or delete {url}/{config.run} to start the run anew"
    if step == config.total_steps:  # from which nothing is left to train
        raise UserError(
            f"checkpoint.copy_to={url} holds checkpoints of this run up to step {step}, its last,"
            f" but {config.run_dir} has none: train its end again from an earlier one with"
            f" start_from={url}/{config.run}/checkpoints/step_N, take the weights alone in another"
            f" run= by start_from={url}/{config.run}, {anew}"
        )
    newest = f"{url}/{config.run}/checkpoints/step_{step:08d}"
    raise UserError(
        f"checkpoint.copy_to={url} holds checkpoints of this run up to step {step}, but"
        f" {config.run_dir} has none: go on from them with start_from={newest}, choose another"
        f" run=, {anew}"
    )


def _is_copy_of_its_own(config: Config) -> bool:
    """Whether start_from names a copy that a run of this name has left in checkpoint.copy_to."""
    folder, _, _ = (config.start_from or "").rpartition("/checkpoints/")
    url = (config.checkpoint.copy_to or "").rstrip("/")
    return folder == f"{url}/{config.run}"
