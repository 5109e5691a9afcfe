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
    skip=NAME,PATTERN   runs that are given up, such as one that diverges each time: the rest does not wait for them
    commit=HASH         of the code, where there is no git to tell it
    out=out             runs lie in out/<study>/<run>/

Ctrl-C or SIGTERM has the runs save and leave, a second one at once; what has finished is copied all the same.
Exit code: 0 all is done, 1 something failed, 2 a mistake in the command or refused files, 3 not all is done.
"""

import fnmatch
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":      # as in fit.py: siblings under one name, from a script as from a test
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.checkpoint import latest
from runtime.config import ConfigError, load_config
from scaling import command
from scaling.provenance import now, uncommitted, write_row, write_sources
from scaling.records import LAW_FOLDER, RecordError
from scaling.study import ROOT, Row, expand, load_study
from scaling.sweep import read_options

OPTIONS = {
    "results": "DIR that keeps what has finished",
    "limit": "seconds, of the whole command",
    "jobs": "runs at a time",
    "start": "seconds assumed of a run's start, as in sweep.py",
    "skip": "NAMES or patterns of runs that are given up",
    "commit": "HASH of the code",
    "out": "folder of the folders of runs",
}
END_S = 20.0        # of the limit, for copying what has finished
POLL_S = 0.1
KILL_S = 5.0        # after a command was told to leave for lack of time
SAMPLE = ("n=4", "tokens=150", "seed=1")


class Ended(Exception):
    """The slice ends here with this exit code."""

    def __init__(self, code: int):
        self.code = code


@dataclass
class Slice:
    """One call of the command: what is asked for, the time that is left, how often it was asked to leave."""
    study: str
    rows: list[Row]
    folder: Path                # of the study's runs
    results: Path
    limit: float = math.inf
    more: list[str] = field(default_factory=list)       # options that sweep.py gets as they are
    is_whole: bool = True       # no run of the study is given up
    commit: str | None = None
    began: float = field(default_factory=time.monotonic)
    asked: int = 0

    def left(self) -> float:
        """Seconds until the end has to begin."""
        return self.limit - END_S - (time.monotonic() - self.began)

    def finished(self) -> list[str]:
        return [row.run for row in self.rows if (self.folder / row.run / "summary.json").exists()]


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        this = read_slice(arguments)
    except (ConfigError, RecordError) as error:
        print(f"slice.py: {error}", file=sys.stderr)
        return 2

    def ask(number, frame):
        this.asked += 1

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return go_on(this)


def read_slice(arguments: list[str]) -> Slice:
    """The Slice that the words describe. Raises RecordError or ConfigError."""
    paths, options = command.read_words(arguments, OPTIONS)
    if len(paths) != 1:
        raise RecordError(f"{len(paths)} study files are given: give one such as configs/study_h100.py")
    if "results" not in options:
        raise RecordError("results=DIR is missing: name the folder that keeps what has finished, such as results/study_h100")
    results = Path(options["results"])
    if results.exists() and not results.is_dir():
        raise RecordError(f"results={results} is a file: name a folder")
    try:
        limit = float(options.get("limit", "inf"))
    except ValueError:
        limit = 0.0
    if not limit > END_S:
        raise RecordError(f"limit={options['limit']!r} must be a number of seconds above {END_S:g}, which copying what has "
                          "finished may take")
    more = [f"{key}={options[key]}" for key in ("jobs", "start", "out") if key in options]
    read_options([paths[0], "--run", *more])    # refuses now what sweep.py would refuse then
    study = load_study(paths[0])
    rows = expand(study)
    given_up = set()
    for pattern in filter(None, options.get("skip", "").split(",")):
        if not (found := fnmatch.filter([row.run for row in rows], pattern)):
            raise RecordError(f"skip={pattern!r} matches no run of {paths[0]}: sweep.py {paths[0]} lists them")
        given_up |= set(found)
    return Slice(paths[0], [row for row in rows if row.run not in given_up], Path(options.get("out", "out")) / study.name,
                 results, limit, more, not given_up, options.get("commit"))


def go_on(this: Slice) -> int:
    """One slice, from what is kept to what is kept; returns the exit code."""
    start, before, code, is_analysed = now(), set(), 1, False
    try:
        if this.results.is_dir():
            do(this, "scaling/publish.py", this.results, this.folder)
        before = set(this.finished())
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
        new = [run for run in this.finished() if run not in before]
        write_row(this.results, start, time.monotonic() - this.began, this.commit, new, code)
    if is_analysed:
        page = call(this, "scaling/results.py", this.results, is_last=True)
        code = code or page
    print(f"slice.py: {time.monotonic() - this.began:.0f} s, {len(new)} runs finished in them, "
          f"{len(this.rows) - len(this.finished())} of {len(this.rows)} are left, exit code {code}", flush=True)
    return code


# --------------------------------------------------------------------------------------------------------------- stages

def train(this: Slice) -> None:
    """All runs that are missing, those held out once their predictions are frozen and committed. Raises Ended."""
    if code := sweep(this, [row.run for row in this.rows if not row.held_out]):
        raise Ended(code)
    samples(this)       # of what an earlier slice has finished on this machine, which may be another one by the end
    held = [row.run for row in this.rows if row.held_out and row.run not in this.finished()]
    files = {run: f"{LAW_FOLDER}/prediction_{run}.json" for run in held}
    if missing := [run for run in held if not (this.folder / files[run]).exists()]:
        do(this, "scaling/precision.py", this.folder)
        for run in missing:
            do(this, "scaling/fit.py", this.folder, "--predict", run)
        missing = [files[run] for run in missing]
    else:
        missing = uncommitted(this.results, list(files.values()))
    if missing:
        print(f"slice.py: commit {', '.join(f'{this.results}/{name}' for name in missing)}: only a commit shows that a "
              f"prediction is older than its run. The same command then goes on with {held[0]}", flush=True)
        raise Ended(3)
    if code := sweep(this, held, by_name=True):
        raise Ended(code)


def sweep(this: Slice, runs: list[str], by_name: bool = False) -> int:
    """Have sweep.py run those of `runs` that are missing; its exit code."""
    if not (missing := [run for run in runs if run not in this.finished()]):
        return 0
    if this.left() < 1:
        return 3
    only = [f"only={','.join(missing)}"] if by_name or not this.is_whole else []
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
    largest = max(row.params_total for row in this.rows)
    return [sample(this, row) for row in this.rows if row.parent is None and row.params_total == largest
            and row.run in this.finished() and not (this.folder / row.run / "samples.txt").exists()]


def sample(this: Slice, row: Row) -> int:
    folder = this.folder / row.run
    if latest(folder) is None:
        print(f"slice.py: no sample of {row.run}: its checkpoints are not on this machine", flush=True)
        return 0
    temporary, words = folder / ".samples.txt", ["-m", "eval.sample", folder, *SAMPLE]
    with open(temporary, "w") as file:
        print(f"$ {_shown(words)}\n", file=file, flush=True)
        code = call(this, *words, stdout=file)
    if code == 0:
        os.replace(temporary, folder / "samples.txt")
    return code


# ------------------------------------------------------------------------------------------------------------- commands

def do(this: Slice, *words) -> None:
    """A command of this repository. Raises Ended where it does not end with exit code 0."""
    if code := call(this, *words):
        raise Ended(code)


def call(this: Slice, *words, stdout=None, is_last: bool = False) -> int:
    """Exit code of a command; 3 where it was told to leave, or not begun, for a signal to this process or for lack of time.

    is_last: it belongs to the end, which no signal and no limit may cut."""
    if not is_last and (this.asked or this.left() <= 0):
        return 3
    print(f"$ {_shown(words)}", flush=True)
    is_module = words[0] == "-m"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    # A session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on once.
    process = subprocess.Popen([sys.executable, *([] if is_module else [ROOT / words[0]]), *map(str, words[not is_module:])],
                               stdout=stdout, start_new_session=True, env=env if is_module else None)
    passed_on, is_late = 0, False
    while process.poll() is None:
        time.sleep(POLL_S)
        if is_last:
            continue
        if not is_late and this.left() < -END_S / 2:    # sweep.py has a limit of its own and leaves before
            is_late = True
            process.terminate()
        elif is_late and this.left() < -END_S / 2 - KILL_S:
            process.kill()
        for _ in range(passed_on, passed_on := this.asked):
            process.terminate()
    code = process.returncode if process.returncode in (0, 1, 2, 3) else 1
    is_cut = not is_last and (this.asked or is_late)
    return 3 if is_cut and process.returncode not in (1, 2) else code


def _shown(words) -> str:
    return shlex.join(["python", *map(str, words)])


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
