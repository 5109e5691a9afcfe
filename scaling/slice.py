"""Go on with a study for so many seconds, by the commands of the README, each printed before it runs:

    python scaling/slice.py configs/study_h100.py limit=540 results=results/study_h100      a slice; again: the next one

The finished runs in RESULTS are copied into out/<study>, so that a machine which has nothing but the repository goes on where
another one ended; what has finished since is copied back at the end, whatever ended the slice. In between, what is missing:
all runs but those held out; the predictions of those, where the slice ends, for only a commit shows that a prediction is older
than its run; the held-out runs; then samples of them, laws, score, paired gaps, figures and RESULTS/README.md. A study of
learning rates ends in learning_rate.py instead.

    results=DIR         what is kept of the study (publish.py); a row in DIR/slices.jsonl tells of each slice
    limit=SECONDS       of the whole command (default: none)
    jobs=1 start=60     as in sweep.py: runs at a time; seconds assumed of a run's start
    skip=NAME,PATTERN   runs that are given up, such as one that diverges each time, a trunk with its branches: the rest does
                        not wait for them, and the slice's row names them
    commit=HASH         where there is no git: the commit that this code and RESULTS are; without it no held-out run begins there
    out=out             runs lie in out/<study>/<run>/

Ctrl-C or SIGTERM has the runs save and leave, a second one at once; what has finished is copied all the same.
What a run that failed told last lies in RESULTS/failed/ until it has finished.
Exit code: 0 all is done, 1 something failed, 2 a mistake in the command or refused files, 3 not all is done.
"""

import fnmatch
import math
import os
import signal
import sys
import time
from pathlib import Path

from runtime.checkpoint import latest
from runtime.cli import UserError, read_options
from runtime.config import load_config
from scaling import command
from scaling.calls import END_S, Ended, Slice, call, do, is_finished, shown
from scaling.provenance import is_ignored, now, read_lines, slices, uncommitted, write_row, write_sources
from scaling.records import LAW_FOLDER
from scaling.study import ROOT, Row, expand, load_study
from scaling.sweep import Options

OPTIONS = {
    "results": "DIR that keeps what has finished",
    "limit": "seconds, of the whole command",
    "jobs": "runs at a time",
    "start": "seconds assumed of a run's start, as in sweep.py",
    "skip": "NAMES or patterns of runs that are given up",
    "commit": "HASH of the code",
    "out": "folder of the folders of runs",
}
SAMPLE = ("n=4", "tokens=150", "seed=1")


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        this = read_slice(arguments)
    except UserError as error:
        print(f"slice.py: {error}", file=sys.stderr)
        return 2

    def ask(number, frame):
        this.asked += 1

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    try:
        return go_on(this)
    except BrokenPipeError:
        raise       # command.run's: nobody reads
    except OSError as error:
        print(f"slice.py: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1


def read_slice(arguments: list[str]) -> Slice:
    """The Slice that the words describe. Raises UserError or UserError."""
    paths, options = command.read_words(arguments, OPTIONS)
    if len(paths) != 1:
        raise UserError(f"{len(paths)} study files are given: give one such as configs/study_h100.py")
    if "results" not in options:
        raise UserError("results=DIR is missing: name the folder that keeps what has finished, such as results/study_h100")
    results = Path(options["results"])
    if results.exists() and not results.is_dir():
        raise UserError(f"results={results} is a file: name a folder")
    try:
        limit = float(options.get("limit", "inf"))
    except ValueError:
        limit = 0.0
    if not limit > END_S:
        raise UserError(f"limit={options['limit']!r} must be a number of seconds above {END_S:g}, which copying what has "
                          "finished may take")
    more = [f"{key}={options[key]}" for key in ("jobs", "start", "out") if key in options]
    read_options(Options, [paths[0], "--run", *more])     # refuses now what sweep.py would refuse then
    study = load_study(paths[0])
    rows = expand(study)
    given_up = set()
    for pattern in filter(None, options.get("skip", "").split(",")):
        if not (found := fnmatch.filter([row.run for row in rows], pattern)):
            raise UserError(f"skip={pattern!r} matches no run of {paths[0]}: sweep.py {paths[0]} lists them")
        given_up |= set(found)
    given_up |= {row.run for row in rows if row.parent in given_up}     # sweep.py would run the trunk for them
    if not (left := [row for row in rows if row.run not in given_up]):
        raise UserError(f"skip={options['skip']!r} gives up every run of {paths[0]}: nothing is left")
    return Slice(paths[0], left, Path(options.get("out", "out")) / study.name, results, limit, more, sorted(given_up),
                 commit=options.get("commit"))


def go_on(this: Slice) -> int:
    """One slice, from what is kept to what is kept; returns the exit code."""
    start, code, is_analysed = now(), 1, False
    # All others are named by this slice's row: also those that a killed slice, or sweep.py by hand, has finished here.
    named = {run for row in slices(read_lines(this.folder)) for run in row.get("runs") or [] if is_finished(this.folder, run)}
    named |= {row.run for row in this.rows if is_finished(this.results, row.run)}
    try:
        if this.results.is_dir():
            do(this, "scaling/publish.py", this.results, this.folder)
        write_sources(this.folder, load_config(ROOT / this.rows[0].config).data)
        if any(row.lr for row in this.rows):
            code = judge_rates(this)
        else:
            train(this)
            code, is_analysed = analyse(this), True
    except Ended as end:
        code = end.code
    finally:    # whatever ended it
        kept = call(this, "scaling/publish.py", this.folder, this.results, is_last=True) if this.folder.is_dir() else 0
        code = kept or code
        new = [run for run in this.finished() if run not in named]
        if new or this.predicted or code != 2:      # of a mistake in the command nothing needs to be kept
            write_row(this.results, this.folder, start, time.monotonic() - this.began, this.commit, runs=new,
                      predicted=this.predicted, exit=code,
                      skipped=[run for run in this.skipped if not is_finished(this.folder, run)])
    if is_analysed:
        page = call(this, "scaling/results.py", this.results, is_last=True)
        code = code or page
    print(f"slice.py: {time.monotonic() - this.began:.0f} s, {len(new)} runs finished in them, "
          f"{len(this.rows) - len(this.finished())} of {len(this.rows)} are left, "
          + f"{len(this.skipped)} given up, " * bool(this.skipped) + f"exit code {code}", flush=True)
    return code


# --------------------------------------------------------------------------------------------------------------- stages

def train(this: Slice) -> None:
    """All runs that are missing, those held out once their predictions are frozen and committed. Raises Ended."""
    stage(this, [row.run for row in this.rows if not row.held_out])
    held = [row for row in this.rows if row.held_out and row.run not in this.finished()]
    files = {row.run: f"{LAW_FOLDER}/prediction_{row.run}.json" for row in held}
    if missing := [run for run in files if not (this.folder / files[run]).exists()]:
        do(this, "scaling/precision.py", this.folder)
        for run in missing:
            do(this, "scaling/fit.py", this.folder, *([f"commit={this.commit}"] if this.commit else []), "--predict", run)
            this.predicted.append(run)
        missing = [files[run] for run in missing]
    else:
        missing = uncommitted(this.results, list(files.values()), this.commit)
    if missing:
        print(f"slice.py: commit {', '.join(f'{this.results}/{name}' for name in missing)}: only a commit shows that a "
              f"prediction is older than its run. The same command then goes on with {held[0].run}; where there is no git, "
              "with commit=HASH of that commit", flush=True)
        raise Ended(3)
    if is_ignored(this.results, list(files.values())):
        print(f"slice.py: git ignores {this.results}: nothing but the files' own dates shows that the predictions are older than "
              "their runs", flush=True)
    for is_trunk in (True, False):      # trunks first: they are what samples are taken of
        stage(this, [row.run for row in held if (row.parent is None) == is_trunk], by_name=True)


def stage(this: Slice, runs: list[str], by_name: bool = False) -> None:
    """What sweep() does, then samples at once: a later slice may have a machine without the checkpoints. Raises Ended."""
    code = sweep(this, runs, by_name)
    samples(this)
    if code:
        raise Ended(code)


def sweep(this: Slice, runs: list[str], by_name: bool = False) -> int:
    """Have sweep.py run those of `runs` that are missing; its exit code."""
    if not (missing := [run for run in runs if run not in this.finished()]):
        return 0
    if this.left() < 1:
        return 3
    only = [f"only={','.join(missing)}"] if by_name or this.skipped else []
    limit = [f"limit={int(this.left())}"] if math.isfinite(this.limit) else []
    return call(this, "scaling/sweep.py", this.study, "--run", *this.more, *only, *limit)


def judge_rates(this: Slice) -> int:
    """A sweep of learning rates: the one that fails, for it diverged, keeps the others from nothing. Raises Ended."""
    if (code := sweep(this, [row.run for row in this.rows])) not in (0, 1):
        raise Ended(code)
    return call(this, "scaling/learning_rate.py", this.folder) or code


def analyse(this: Slice) -> int:
    """Everything that the finished runs have to tell; the first exit code that is not 0. Raises Ended for lack of time."""
    codes = samples(this)
    if silent := [row.run for row in _speakers(this) if latest(this.folder / row.run) is None]:
        print(f"slice.py: no sample of {', '.join(silent)}: the checkpoints are not on this machine", flush=True)
    score = ["--score"] if list((this.folder / LAW_FOLDER).glob("prediction_*.json")) else []
    codes += [call(this, "scaling/fit.py", this.folder, *score), call(this, "scaling/precision.py", this.folder)]
    probed = {row.recipe: row.run for row in sorted(this.rows, key=lambda row: row.params_total) if row.parent is None
              and not row.repeat and any((this.folder / row.run / f"probe.jsonl{end}").exists() for end in ("", ".gz"))}
    codes += [call(this, "scaling/figures.py", "--fp8", this.folder / run) for run in probed.values()]
    if 3 in codes:      # one of them was cut, or not begun
        raise Ended(3)
    return next((code for code in codes if code), 0)


def samples(this: Slice) -> list[int]:
    """What the largest models have to say, into samples.txt of each run, where its checkpoint is still there; exit codes."""
    return [sample(this, row) for row in _speakers(this) if latest(this.folder / row.run) is not None]


def _speakers(this: Slice) -> list[Row]:
    largest = max(row.params_total for row in this.rows)
    return [row for row in this.rows if row.parent is None and row.params_total == largest
            and row.run in this.finished() and not (this.folder / row.run / "samples.txt").exists()]


def sample(this: Slice, row: Row) -> int:
    folder = this.folder / row.run
    temporary, words = folder / ".samples.txt", ["-m", "eval.sample", folder, *SAMPLE]
    with open(temporary, "w") as file:
        print(f"$ {shown(words)}\n", file=file, flush=True)
        code = call(this, *words, stdout=file)
    if code == 0:
        os.replace(temporary, folder / "samples.txt")
    return code


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
