"""Run a study: print its grid with costs and states, run what is missing, or print one Slurm array
script.

    python scaling/sweep.py configs/study_chinchilla.py                 the grid; starts nothing
    python scaling/sweep.py configs/study_chinchilla.py --run gpus=8    what is missing, here
    python scaling/sweep.py configs/study_demo.py --run jobs=2          two runs side by side
    python scaling/sweep.py configs/study_chinchilla.py --slurm gpus=8  an array task for each trunk

Runs lie in out/<study>/<run>/, what each printed in out/<study>/<run>.log. One that is held out
runs by its own name or a pattern that matches nothing else, once its prediction is frozen (fit.py
--predict). A branch whose trunk is done but whose checkpoint is gone (copied runs come without) is
trained from scratch. FLOPs and time of a branch are those of its own steps.

Ctrl-C or SIGTERM has the runs save and leave, a second one has them leave at once. The next --run
tries again what failed. Exit code: 0 all is done, 1 a run failed, 2 a mistake in the command, 3 not
all is done (stopped, or left to another sweep)."""

import fnmatch
import math
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    BEGAN = time.monotonic()  # torch's import is part of the command, and of its limit

import torch

from lib.command import command, run_command
from lib.errors import UserError
from lib.machine import ROOT
from lib.text import nearest
from lib.values import FilePath
from runtime.config import load_config, positive
from runtime.data import Data
from runtime.log import peak_flops
from runtime.plan import ASSUMED_MFU
from runtime.tokenizer import load_tokenizer, tokenizer_of
from scaling.declaration import (
    SCHEMA_VERSION,
    Declaration,
    changed_keys,
    read_declaration,
    write_declaration,
)
from scaling.records import LAW_FOLDER
from scaling.run_states import format_grid, not_done, placed, summary_of
from scaling.scheduler import run
from scaling.study import Row, Study, expand, load_study

# a process, asked of Slurm: its own threads beside the GPU's, and those that read its data
CPUS = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    study: FilePath  # a file such as configs/study_demo.py
    run: bool = False  # what is missing, on this machine
    slurm: bool = False  # print an array script in its place
    # names and patterns of runs (gpt50m_*), with the trunks they branch off from
    only: str | None = None
    gpus: int = 1  # processes per run, by torchrun above 1
    jobs: int = 1  # runs at a time
    # seconds from the command's start: runs save and leave in time; none is begun only to start
    limit: float | None = None
    out: FilePath = "out"  # holds <study>/<run>/
    # times are estimated with its peak where no run of that size and recipe is done
    gpu: str = "h100"
    mfu: float = ASSUMED_MFU  # share of that peak
    start: float = 60.0  # seconds assumed there for imports, compilation, evaluation and saving

    def __post_init__(self) -> None:
        problems = positive(self, "gpus", "jobs", "limit", "mfu", "start")
        if problems:
            raise UserError(problems[0])
        if peak_flops(self.gpu) is None:
            raise UserError(
                f"gpu={self.gpu}: the peak of that GPU is not in runtime/log.py; try h100, h200,"
                " b200 or a100"
            )
        if self.slurm and (self.run or self.limit or self.jobs > 1):
            raise UserError(
                "--slurm: a task has one job, for as long as the script says; --run, jobs= and"
                " limit= go without it"
            )


def main(arguments: list[str], started_at: float | None = None) -> int:
    """The exit code. `started_at`: when the command was started, by time.monotonic(); none =
    now."""
    return command(__doc__, Options, "study")(
        lambda options: sweep(options, started_at or time.monotonic())
    )(arguments)


def sweep(options: Options, started_at: float) -> int | str:
    study = load_study(options.study)
    rows = expand(study)
    folder = Path(options.out) / study.name
    selected = choose(rows, options)
    declaration = declare(study, rows, folder)
    rows = [placed(row, folder) for row in rows]
    selected = [placed(row, folder) for row in selected]
    if not (options.run or options.slurm):
        return format_grid(selected, folder, options)
    check_predicted(selected, folder)
    if options.slurm:
        return format_slurm_script(selected, options)
    slots = slots_of(options)
    if not_done(selected, folder):
        check_data(rows, folder)
    write_declaration(declaration, folder)
    return run(rows, selected, folder, options, slots, started_at + (options.limit or math.inf))


def slots_of(options: Options) -> list[list[str]]:
    """The GPUs of each job, by name; none on a CPU. Raises UserError where the machine has too
    few."""
    gpu_count = torch.cuda.device_count()
    per_job = options.gpus
    if gpu_count and per_job * options.jobs > gpu_count:
        raise UserError(
            f"gpus={per_job} for each of jobs={options.jobs} is more than the {gpu_count} GPUs of"
            " this machine"
        )
    numbers = ",".join(map(str, range(gpu_count)))
    names = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")[:gpu_count]
    return [names[job * per_job : (job + 1) * per_job] for job in range(options.jobs)]


def choose(rows: list[Row], options: Options) -> list[Row]:
    """The rows that only= names and the trunks they need; without it all that are not held out. A
    pattern that matches other runs too leaves out those held out: a broad one must not start the
    study's largest runs."""
    if options.only is None:
        is_running = options.run or options.slurm
        return [row for row in rows if not (row.held_out and is_running)]
    names: set[str | None] = set()
    for pattern in options.only.split(","):
        for row in _matching(rows, pattern, options.study):
            names |= {row.run, row.parent}
    return [row for row in rows if row.run in names]


def _matching(rows: list[Row], pattern: str, study: str) -> list[Row]:
    """The rows that one name or pattern stands for."""
    matching = [row for row in rows if fnmatch.fnmatchcase(row.run, pattern)]
    if not matching:
        names = [row.run for row in rows]
        raise UserError(f"only={pattern!r} matches no run of {study}{nearest(pattern, names)}")
    return [row for row in matching if not row.held_out] or matching


# ----------------------------------------------------------------------------- before the first run


def declare(study: Study, rows: list[Row], folder: Path) -> Declaration:
    """What `folder`/study.json is to say before the first run: the margin, what is held out, every
    run. Raises UserError where it says otherwise and one of its runs has finished: only additions
    are left then."""
    runs = [{**asdict(row), "overrides": list(row.overrides)} for row in rows]
    new = Declaration(
        schema_version=SCHEMA_VERSION,
        study=study.name,
        declared=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        margin_percent=study.margin_percent,
        params=study.params,
        held_out=[row.run for row in rows if row.held_out],
        runs=runs,
    )
    old = read_declaration(folder)
    if old is None:
        return new
    changes = changed_keys(old, new)
    if not changes:
        return replace(new, declared=old.declared)
    if any((folder / row["run"] / "summary.json").exists() for row in old.runs):
        raise UserError(
            f"{folder}/study.json was declared before runs that have finished since, but"
            f" {changes[0]} is another now: runs may be added, but nothing may change; give the"
            " changed study another name="
        )
    return new


def check_predicted(rows: list[Row], folder: Path) -> None:
    """Raises UserError where a held-out run would begin before its prediction is frozen: it could
    never be scored."""
    waiting = [row for row in not_done(rows, folder) if row.held_out]
    if not waiting:
        return
    # imported here: at the top, matplotlib and scipy.stats would add a second to every start
    from scaling.predictions import is_at, load

    goals = {frozen.target: frozen.content["target"] for frozen in load(folder / LAW_FOLDER)}
    for row in waiting:
        if row.run not in goals or not is_at(row, goals[row.run]):
            raise UserError(
                f"{row.run} is held out and {folder / LAW_FOLDER} holds no prediction of it: run"
                f" the others, freeze it (python scaling/fit.py {folder} --predict {row.run}),"
                " then start it"
            )


def check_data(rows: list[Row], folder: Path) -> None:
    """Raises UserError where the data are not those of a run that is done, or will not do for the
    study's largest run to do."""
    row = max(not_done(rows, folder), key=lambda row: row.tokens)
    config = load_config(ROOT / row.config, [*row.overrides, f"out={folder}"])
    try:
        tokenizer = load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer))
        data = Data(config, *tokenizer.hashes)
    except UserError as error:
        raise UserError(f"{row.run}: {error}") from error
    for done in rows:
        summary = summary_of(done, folder) or {}
        if summary.get("data_sha256", data.train_sha256) != data.train_sha256:
            raise UserError(
                f"{config.data.dir} holds other tokens than {done.run}, which is done, has seen:"
                " put those back"
            )


# ------------------------------------------------------------------------------------------- Slurm


def format_slurm_script(rows: list[Row], options: Options) -> str:
    """One array task for each trunk, which runs it with its branches; requeued until they are
    done."""
    families: dict[str, list[str]] = {}
    for row in rows:
        families.setdefault(row.parent or row.run, []).append(row.run)
    sweep_file = str(Path(__file__).resolve())
    words = ["--run", f"gpus={options.gpus}", f"out={options.out}"]
    command_line = shlex.join([sys.executable, sweep_file, options.study, *words])
    lines = [
        "#!/bin/bash",
        f"#SBATCH --array=0-{len(families) - 1}",
        (
            f"#SBATCH --nodes=1 --ntasks=1 --gpus-per-node={options.gpus} --requeue"
            " --open-mode=append"
        ),
        f"#SBATCH --cpus-per-task={CPUS * options.gpus}",
        "# Five minutes before its time is over the run saves, and the task is requeued.",
        "#SBATCH --time=24:00:00 --signal=B:TERM@300",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 2",
        "families=(",
    ]
    lines += [f"  {shlex.quote(','.join(names))}" for names in families.values()]
    lines += [
        ")",
        f'{command_line} only="${{families[$SLURM_ARRAY_TASK_ID]}}" &',
        "sweep=$!",
        "trap 'kill -TERM $sweep' TERM",
        "wait $sweep; code=$?",
        "if [ $code -gt 128 ]; then wait $sweep; code=$?; fi    # the trap ended the first wait",
        "if [ $code -eq 3 ]; then scontrol requeue $SLURM_JOB_ID; fi",
        "exit $code",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(run_command(main, BEGAN))
