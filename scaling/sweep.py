"""Run a study: print its grid with costs and states, run what is missing, or print one Slurm array script.

    python scaling/sweep.py configs/study_chinchilla.py                     the grid; starts nothing, writes nothing
    python scaling/sweep.py configs/study_chinchilla.py --run gpus=8        what is missing, each run on 8 GPUs of this machine
    python scaling/sweep.py configs/study_demo.py --run jobs=2              two runs side by side
    python scaling/sweep.py configs/study_chinchilla.py --slurm gpus=8      an array task for each trunk with its branches

    only=NAME,PATTERN   runs so named (gpt50m_*), with the trunks they branch off from; one that is held out by its own name or
                        a pattern that matches nothing else, and only once its prediction is frozen (fit.py --predict)
    gpus=1 jobs=1       processes per run (torchrun above 1), runs at a time
    limit=SECONDS       from the start of the command: the runs save and leave in time, none is begun that would only start;
                        one that has done its steps is still evaluated, for as long as a start takes. The same command goes
                        on. In the table: how many such slices are left
    out=out             runs lie in out/<study>/<run>/, what each printed in out/<study>/<run>.log
    gpu=h100 mfu=0.45   whose peak, and which share of it, times are estimated with where no run of that size and recipe is done
    start=60            seconds assumed there for the start and the end of a run: imports, compilation, evaluation, saving

A branch whose trunk is done but whose checkpoint is gone (published runs come without) is trained from scratch.

Ctrl-C or SIGTERM has the runs save and leave, a second one has them leave at once. The next --run tries again what failed.
Exit code: 0 all is done, 1 a run failed, 2 a mistake in the command, 3 not all is done (stopped, or left to another sweep).
"""

import difflib
import fnmatch
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

if __name__ == "__main__":
    BEGAN = time.monotonic()    # torch's import is part of the command, and of its limit

from runtime.cli import UserError, read_options
from runtime.config import positive
from runtime.log import peak_flops
from runtime.plan import ASSUMED_MFU
from scaling import command
from scaling.costs import table
from scaling.data_check import check_data
from scaling.grid import summary_of
from scaling.predict import is_at, load
from scaling.records import LAW_FOLDER
from scaling.runner import run, visible_gpus
from scaling.study import Row, declare, expand, load_study, write_declaration

CPUS = 8            # a process, asked of Slurm: its own threads beside the GPU's, and those that read its data


@dataclass(frozen=True, kw_only=True)
class Options:
    study: str                  # a file such as configs/study_demo.py
    run: bool = False
    slurm: bool = False
    only: str | None = None
    gpus: int = 1
    jobs: int = 1
    limit: float | None = None
    out: str = "out"
    gpu: str = "h100"
    mfu: float = ASSUMED_MFU
    start: float = 60.0

    POSITIONAL: ClassVar = ("study",)

    def __post_init__(self):
        if self.run and self.slurm:
            raise UserError("--run and --slurm: give one of the two; the script that --slurm prints runs the study with --run")
        if problems := list(positive(self, "", "gpus", "jobs", "limit", "mfu", "start")):
            raise UserError(problems[0])
        if self.mfu > 1:
            raise UserError(f"mfu={self.mfu:g} must be a share of the GPU's peak, such as 0.45")
        if peak_flops(self.gpu) is None:
            raise UserError(f"gpu={self.gpu}: the peak of that GPU is not in runtime/log.py; try h100, h200, b200 or a100")


def main(arguments: list[str], began: float | None = None) -> int:
    """Returns the exit code. `began`: when the command was started, by time.monotonic(); none = now."""
    began = time.monotonic() if began is None else began
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        options = read_options(Options, arguments)
        study = load_study(options.study)
        rows = expand(study)
        folder = Path(options.out) / study.name
        if files := [part for part in (folder, *folder.parents) if part.is_file()]:
            raise UserError(f"{files[0]} is a file: name a folder with out=FOLDER")
        chosen = choose(rows, options)
        checked = declare(study, rows, folder)
        if options.run or options.slurm:
            check_predicted(chosen, folder)
        if options.slurm:
            print(slurm_script(chosen, options))
        elif options.run:
            gpus = visible_gpus(options)
            lines = check_data(rows, folder) if any(not summary_of(row, folder) for row in chosen) else []
            write_declaration(folder, checked)
            print("\n".join(lines), end="\n" * bool(lines), flush=True)
            return run(rows, chosen, folder, options, gpus, began)
        else:
            print("\n".join(table(chosen, folder, options)))
    except UserError as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise       # command.run's: nobody reads
    except OSError as error:
        print(f"sweep.py: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def choose(rows: list[Row], options: Options) -> list[Row]:
    """The rows that only= names and the trunks they need; without it all, except that nothing held out is run.

    A pattern that matches other runs too leaves out those held out: a broad one must not start the study's largest runs."""
    if options.only is None:
        return [row for row in rows if not (row.held_out and (options.run or options.slurm))]
    names, spared = set(), set()
    for pattern in options.only.split(","):
        if not (found := [row for row in rows if fnmatch.fnmatchcase(row.run, pattern)]):
            raise UserError(f"only={pattern!r} matches no run of {options.study}{_instead(pattern, [row.run for row in rows])}")
        if not all(row.held_out for row in found):
            spared |= {row.run for row in found if row.held_out}
            found = [row for row in found if not row.held_out]
        names |= {row.run for row in found} | {row.parent for row in found}
    if spared - names:
        print(f"left out, for what is held out is run by its own name: {', '.join(sorted(spared - names))}", file=sys.stderr)
    return [row for row in rows if row.run in names]


def _instead(pattern: str, names: list[str]) -> str:
    if begun := [name for name in names if name.startswith(pattern)]:
        return f"; write {pattern}{'_' * begun[0].startswith(pattern + '_')}* for the {len(begun)} that begin so"
    return f"; the nearest are {', '.join(difflib.get_close_matches(pattern, names, 6, cutoff=0))}"


def check_predicted(rows: list[Row], folder: Path) -> None:
    """Raises UserError where a held-out run would begin before its prediction is frozen: it could never be scored."""
    waiting = [row for row in rows if row.held_out and not summary_of(row, folder)]
    goals = {one.target: one.content["target"] for one in load(folder / LAW_FOLDER)} if waiting else {}
    if missing := [row.run for row in waiting if row.run not in goals or not is_at(row, goals[row.run])]:
        commands = " && ".join(f"python scaling/fit.py {folder} --predict {run}" for run in missing)
        raise UserError(f"{missing[0]} is held out, and {folder / LAW_FOLDER} holds no prediction_{missing[0]}.json of it: run "
                          f"the other runs, freeze the prediction ({commands}), then start it")


# ---------------------------------------------------------------------------------------------------------------- slurm

def slurm_script(rows: list[Row], options: Options) -> str:
    """One array task for each trunk, which runs it with its branches; requeued until they are done."""
    families = {}
    for row in rows:
        families.setdefault(row.parent or row.run, []).append(row.run)
    sweep = [sys.executable, str(Path(__file__).resolve()), options.study, "--run", f"gpus={options.gpus}", f"out={options.out}"]
    return "\n".join([
        "#!/bin/bash",
        f"#SBATCH --array=0-{len(families) - 1}",
        f"#SBATCH --nodes=1 --ntasks=1 --gpus-per-node={options.gpus} --requeue --open-mode=append",
        f"# {CPUS} CPUs for each process; a node with fewer wants fewer.",
        f"#SBATCH --cpus-per-task={CPUS * options.gpus}",
        "# Five minutes before its time is over the run saves, and the task is requeued.",
        "#SBATCH --time=24:00:00 --signal=B:TERM@300",
        "# Where this script was printed: the study, out= and the data are found from there.",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 2",
        "families=(", *(f"  {shlex.quote(','.join(names))}" for names in families.values()), ")",
        f"{shlex.join(sweep)} only=\"${{families[$SLURM_ARRAY_TASK_ID]}}\" &",
        "sweep=$!",
        "trap 'kill -TERM $sweep' TERM",
        "wait $sweep; code=$?",
        "if [ $code -gt 128 ]; then wait $sweep; code=$?; fi    # the trap ended the first wait",
        "if [ $code -eq 3 ]; then scontrol requeue $SLURM_JOB_ID; fi",
        "exit $code"])


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:], BEGAN))
