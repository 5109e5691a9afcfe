"""The folder of a run: who may write in it, which run it holds, and how far that run has come."""

import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

from lib.errors import MachineError, UserError
from lib.files import read_rows
from runtime.checkpoint import checkpoints, is_due, read_saved, run_on_rank0
from runtime.config import Config, changed_keys, read_config
from runtime.data import shares
from runtime.metrics_file import metrics_rows
from runtime.parallel import World

LOCK = ".lock"
# a run that was told to stop and one that is started right after it may overlap for a moment
LOCK_TIMEOUT_S = 3.0


def claim(config: Config, world: World, cleanup: ExitStack) -> bool:
    """Lock the folder of a run, on rank 0 and until `cleanup` ends; False where that run is
    finished already. All ranks call it together. Raises UserError as is_finished() and
    lock_folder() do."""

    def claim_on_rank0() -> bool:
        if is_finished(config):
            return False
        cleanup.enter_context(lock_folder(config.run_dir))
        return not is_finished(config)  # perhaps since this start waited for the lock

    # other machines may see an older state of a network file system
    return run_on_rank0(world, claim_on_rank0)


# ------------------------------------------------------------------------------------------- lock


@contextmanager
def lock_folder(run_dir: Path) -> Iterator[None]:
    """Make a run's folder where there is none, and lock it until the block ends or this process
    dies. A folder in which nothing was written is removed again. Raises UserError where none can be
    made or written, or another process has it.

    By fcntl.lockf: the kernel drops the lock with the process, and no child inherits it, as
    forgotten workers do with flock. Its trap: a process loses it by closing ANY descriptor of the
    file, so nothing in a run may open LOCK again."""
    with _open_lock(run_dir) as file:
        _wait_for_lock(file, run_dir)
        was_removed = os.fstat(file.fileno()).st_nlink == 0
        if was_removed:  # by the run that had it, and wrote nothing
            with lock_folder(run_dir):
                yield
            return
        file.truncate(0)
        try:
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on host {socket.gethostname()!r}, started {started}")
            file.flush()
            yield
        finally:
            with suppress(OSError):  # a symbolic link; NFS, which keeps open files
                _remove_unused(run_dir)


def _open_lock(run_dir: Path) -> TextIO:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return open(run_dir / LOCK, "a+")
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; choose another out= or run=, or correct the"
            " rights"
        ) from error


def _wait_for_lock(file: TextIO, run_dir: Path) -> None:
    """Raises UserError, with who has it, after LOCK_TIMEOUT_S."""
    end = time.monotonic() + LOCK_TIMEOUT_S
    while _is_locked_by_another(file):
        if time.monotonic() > end:
            file.seek(0)
            raise UserError(
                f"{run_dir} is being written by {file.read(200)}: wait for it, stop it, or"
                " choose another run="
            )
        time.sleep(0.1)


def _is_locked_by_another(file: TextIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES
        return True
    except OSError as error:
        print(
            f"{file.name}: this file system has no locks ({error.strerror}), so nothing keeps a"
            " second run from writing here"
        )
    return False


def _remove_unused(run_dir: Path) -> None:
    """Remove the folder where it holds nothing but the lock; the lock where there is no run."""
    names = os.listdir(run_dir)
    if names == [LOCK]:
        shutil.rmtree(run_dir)
    elif not _holds_a_run(names):  # the user's log alone
        (run_dir / LOCK).unlink()


# ----------------------------------------------------------------------------- which run is it of?

# What `train.py ... | tee out/RUN/log.txt`, nohup, Slurm and torchrun write: a user's log may be
# there before the run is.
LOGS = re.compile(r".*\.(log|txt|out|err)|nohup\.out|slurm-.*", re.I)


def _holds_a_run(names: list[str]) -> bool:
    return any(_is_of_a_run(name) for name in names)


def _is_of_a_run(name: str) -> bool:
    """Whether a file of this name in a run's folder may be a run's, or anything else that a new run
    must not be mixed with. Not so: logs, and what a run that is killed before it has a config.json
    may leave."""
    return name not in (LOCK, ".config.json.tmp") and not LOGS.fullmatch(name)


def is_finished(config: Config) -> bool:
    """Whether this very run is already done. Raises UserError where its folder belongs to another
    run."""
    run_dir = config.run_dir
    names = [path.name for path in run_dir.iterdir()] if run_dir.is_dir() else []
    if not _holds_a_run(names):
        return False
    if "config.json" not in names:
        raise UserError(
            f"{run_dir} is not empty and holds no run (no config.json): choose another run= or out="
        )
    refuse_another_run(config, read_config(run_dir))
    return "summary.json" in names


def refuse_another_run(config: Config, stored: Config) -> None:
    """Raises UserError where the run of `config` would not be that of `stored`, its config.json."""
    if changes := changes_of_run(config, stored):
        raise UserError(
            f"{config.run_dir} holds another run: {'; '.join(changes)}; choose another run=, or"
            " give the same settings"
        )


def changes_of_run(config: Config, stored: Config) -> list[str]:
    """How the run of `config` differs from that of `stored`, a phrase for each key; none where they
    are the same run."""
    stored_identity = stored.identity()
    identity = config.identity()
    # prose:2 is prose:1; Run keeps what it was begun with
    if shares(stored_identity["data.mixture"]) == shares(identity["data.mixture"]):
        identity["data.mixture"] = stored_identity["data.mixture"]
    return changed_keys(stored_identity, identity)


def as_begun(config: Config, world: World) -> Config:
    """`config` with the weights of the mixture that the run in its folder was begun with: prose:1
    where prose:2 is asked for, which is the same order, but would be another pair_id than that of
    the run's partner. All ranks call it together."""

    def read_mixture() -> dict[str, float]:
        is_begun = (config.run_dir / "config.json").exists()
        return (read_config(config.run_dir) if is_begun else config).data.mixture

    return replace(config, data=replace(config.data, mixture=run_on_rank0(world, read_mixture)))


# -------------------------------------------------------------------------- what it has behind it


def read_first_start(run_dir: Path) -> dict[str, str]:
    """{"t_start": when the run in this folder was started first}, {} before its first start. Raises
    UserError where env.json does not tell it: with a later time a prediction that was frozen
    meanwhile would count as older than the run."""
    path = run_dir / "env.json"
    if not path.exists():
        return {}
    try:
        t_start = json.loads(path.read_bytes())["t_start"]
        datetime.fromisoformat(t_start)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}): it tells when this run was first"
            " started, which frozen predictions are held against; restore it, or delete it: then"
            " the run counts as started now"
        ) from error
    return {"t_start": t_start}


def refuse_to_start_over(config: Config) -> None:
    """Raises UserError where the run has had a checkpoint, yet none is there any more; MachineError
    where only damaged ones are.

    A run that was killed during its first save, or whose saves failed for a full disk, has had
    none: it begins at step 0."""
    damaged = sorted(path.name for path in config.run_dir.glob("checkpoints/bad_step_*"))
    steps = _trained_steps(config.run_dir)
    if not damaged and not _has_had_a_checkpoint(config, steps):
        return
    saved = read_saved(config.run_dir)
    first_checkpoint = None if saved is None else saved.first_checkpoint
    step = max([*steps, first_checkpoint or 0])  # the rows may be lost, too
    error = MachineError if damaged else UserError
    but_damaged = f" but damaged {', '.join(damaged)}" if damaged else ""
    raise error(
        f"{config.run_dir} has come to step {step}, yet no checkpoint of it is"
        f" left{but_damaged}: put its checkpoints/ back, or delete the folder to start the run anew"
    )


def refuse_without_rows(config: Config, step: int) -> None:
    """Raises UserError where the run resumes at its last step, `step`, and metrics.jsonl has no row
    of a training step, of which summary.json takes the speed."""
    if step < config.total_steps or _trained_steps(config.run_dir):
        return
    remedy = "delete the folder to start the run anew"
    *earlier, newest = checkpoints(config.run_dir)
    if earlier:
        remedy = f"move {newest} away, so that the last steps are trained again"
    raise UserError(
        f"{config.run_dir}/metrics.jsonl has no row of a training step, of which summary.json takes"
        f" the speed: put the file back, or {remedy}"
    )


def describe_lost_rows(config: Config, step: int) -> str | None:
    """A sentence on the steps up to `step` that metrics.jsonl has no row of, as where the file was
    removed, or the disk was full and the run killed; None where it has all."""
    first = config.parent[1] if config.parent else 0
    steps = _trained_steps(config.run_dir)
    lost = [s for s in range(first + 1, step + 1) if s not in steps]
    if not lost:
        return None
    return (
        f"{config.run_dir}/metrics.jsonl lacks the rows of {len(lost):,} of the"
        f" {step - first:,} steps that the run has behind it: the weights have them, its curves and"
        " speeds are of the others"
    )


def _trained_steps(run_dir: Path) -> set[int]:
    """The steps that metrics.jsonl has a training row of."""
    rows = metrics_rows(read_rows(run_dir / "metrics.jsonl"))
    return {row["step"] for row in rows if row["kind"] == "train"}


def _has_had_a_checkpoint(config: Config, steps: set[int]) -> bool:
    """By saved.json. A run of a version that wrote none: where two saves were due by its rows (a
    branch has rows of its own alone) and by the policy of the config that trained them, as the
    first may have been cut short, but the second has waited for it."""
    saved = read_saved(config.run_dir)
    if saved is not None:
        return saved.first_checkpoint is not None
    is_begun = (config.run_dir / "config.json").exists()
    policy = (read_config(config.run_dir) if is_begun else config).checkpoint
    saved_steps = [
        step for step in steps if step in policy.at or is_due(step, policy.every, policy.rolling)
    ]
    return len(saved_steps) > 1
