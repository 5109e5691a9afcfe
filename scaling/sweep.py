"""Run a study: print its grid with costs and states, run what is missing, or print one Slurm array
script.

    python scaling/sweep.py configs/study_chinchilla.py                 the grid; starts nothing, writes nothing
    python scaling/sweep.py configs/study_chinchilla.py --run gpus=8    what is missing, each run on 8 GPUs of this machine
    python scaling/sweep.py configs/study_demo.py --run jobs=2          two runs side by side
    python scaling/sweep.py configs/study_chinchilla.py --slurm gpus=8  an array task for each trunk with its branches

Runs lie in out/<study>/<run>/, what each printed in out/<study>/<run>.log. One that is held out
runs by its own name or a pattern that matches nothing else, once its prediction is frozen (fit.py
--predict). A branch whose trunk is done but whose checkpoint is gone (copied runs come without) is
trained from scratch. FLOPs and time of a branch are those of its own steps.

Ctrl-C or SIGTERM has the runs save and leave, a second one has them leave at once. The next --run
tries again what failed. Exit code: 0 all is done, 1 a run failed, 2 a mistake in the command, 3 not
all is done (stopped, or left to another sweep)."""

import fcntl
import fnmatch
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO

if __name__ == "__main__":
    BEGAN = time.monotonic()  # torch's import is part of the command, and of its limit

import torch

from lib.command import command, run_command
from lib.errors import UserError
from lib.files import read_rows, write_json
from lib.machine import ROOT
from lib.text import duration, grid, listed, nearest, si
from lib.values import FilePath
from runtime.checkpoint import latest, step_of
from runtime.config import load_config, positive, read_config
from runtime.data import Data
from runtime.log import peak_flops
from runtime.metrics_file import metrics_rows
from runtime.plan import ASSUMED_MFU
from runtime.roofline import modelled_ratio
from runtime.tokenizer import load_tokenizer, tokenizer_of
from scaling.records import LAW_FOLDER, read_json, read_study
from scaling.study import Row, Study, expand, load_study

# a process, asked of Slurm: its own threads beside the GPU's, and those that read its data
CPUS = 8
# assumed, for no summary tells: imports and the GPU's context before a run's clock begins, and its
# end
UNSEEN_S = 5.0
POLL_S = 0.2
# Assumed of a run that is asked to leave: it ends its step, then writes and hashes 12 bytes a
# parameter.
LEAVE_S, SAVE_BYTES_PER_S = 5.0, 200e6
LOG_S = 60.0  # between two lines about the runs under way
ENDED = "sweep.py: exit code "  # begins the last line of a log whose run has ended


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

    def __post_init__(self):
        if problems := positive(self, "gpus", "jobs", "limit", "mfu", "start"):
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


def main(arguments: list[str], began: float | None = None) -> int:
    """The exit code. `began`: when the command was started, by time.monotonic(); none = now."""
    return command(__doc__, Options, "study")(
        lambda options: sweep(options, began or time.monotonic())
    )(arguments)


def sweep(options: Options, began: float) -> int | str:
    study = load_study(options.study)
    rows, folder = expand(study), Path(options.out) / study.name
    chosen, declaration = choose(rows, options), declare(study, rows, folder)
    rows, chosen = ([placed(row, folder) for row in some] for some in (rows, chosen))
    if not (options.run or options.slurm):
        return table(chosen, folder, options)
    check_predicted(chosen, folder)
    if options.slurm:
        return slurm_script(chosen, options)
    there, n = torch.cuda.device_count(), options.gpus
    if there and n * options.jobs > there:
        raise UserError(
            f"gpus={n} for each of jobs={options.jobs} is more than the {there} GPUs of this"
            " machine"
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(",")[
        :there
    ]
    # the GPUs of each job; none on a CPU
    slots = [names[i * n : (i + 1) * n] for i in range(options.jobs)]
    if any(not summary_of(row, folder) for row in chosen):
        check_data(rows, folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f".study.json.{os.getpid()}"  # several sweeps of one study may all be the first
    write_json(own, declaration)
    os.replace(own, folder / "study.json")
    return run(rows, chosen, folder, options, slots, began + (options.limit or math.inf))


def choose(rows: list[Row], options: Options) -> list[Row]:
    """The rows that only= names and the trunks they need; without it all that are not held out. A
    pattern that matches other runs too leaves out those held out: a broad one must not start the
    study's largest runs."""
    if options.only is None:
        return [row for row in rows if not (row.held_out and (options.run or options.slurm))]
    names = set()
    for pattern in options.only.split(","):
        if not (found := [row for row in rows if fnmatch.fnmatchcase(row.run, pattern)]):
            raise UserError(
                f"only={pattern!r} matches no run of"
                f" {options.study}{nearest(pattern, [row.run for row in rows])}"
            )
        found = [row for row in found if not row.held_out] or found
        names |= {row.run for row in found} | {row.parent for row in found}
    return [row for row in rows if row.run in names]


def declare(study: Study, rows: list[Row], folder: Path) -> dict:
    """What `folder`/study.json is to say before the first run: the margin, what is held out, every
    run. Raises UserError where it says otherwise and one of its runs has finished: only additions
    are left then."""
    new = {
        "format_version": 1,
        "study": study.name,
        "declared": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "margin_percent": study.margin_percent,
        "params": study.params,
        "held_out": [row.run for row in rows if row.held_out],
        "runs": [{**asdict(row), "overrides": list(row.overrides)} for row in rows],
    }
    old, now = read_study(folder) or new, {row["run"]: row for row in new["runs"]}
    changes = [key for key in ("study", "margin_percent", "params") if old.get(key) != new[key]]
    changes += [
        f"{key} of {row['run']}"
        for row in old["runs"]
        for key in row
        if row[key] != now.get(row["run"], {}).get(key)
    ]
    if changes and any((folder / row["run"] / "summary.json").exists() for row in old["runs"]):
        raise UserError(
            f"{folder}/study.json was declared before runs that have finished since, but"
            f" {changes[0]} is another now: runs may be added, but nothing may change; give the"
            " changed study another name="
        )
    return new if changes else {**new, "declared": old["declared"]}


def check_predicted(rows: list[Row], folder: Path) -> None:
    """Raises UserError where a held-out run would begin before its prediction is frozen: it could
    never be scored."""
    if not (waiting := [row for row in rows if row.held_out and not summary_of(row, folder)]):
        return
    # here: matplotlib and scipy.stats would be a second of every start
    from scaling.predictions import is_at, load

    goals = {one.target: one.content["target"] for one in load(folder / LAW_FOLDER)}
    if missing := [
        row.run for row in waiting if row.run not in goals or not is_at(row, goals[row.run])
    ]:
        raise UserError(
            f"{missing[0]} is held out and {folder / LAW_FOLDER} holds no prediction of it: run the"
            f" others, freeze it (python scaling/fit.py {folder} --predict {missing[0]}), then"
            " start it"
        )


def check_data(rows: list[Row], folder: Path) -> None:
    """Raises UserError where the data are not those of a run that is done, or will not do for the
    study's largest run to do."""
    row = max((row for row in rows if not summary_of(row, folder)), key=lambda row: row.tokens)
    config = load_config(ROOT / row.config, [*row.overrides, f"out={folder}"])
    try:
        data = Data(
            config, *load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer)).hashes
        )
    except UserError as error:
        raise UserError(f"{row.run}: {error}") from error
    for other in rows:
        if (summary_of(other, folder) or {}).get(
            "data_sha256", data.train_sha256
        ) != data.train_sha256:
            raise UserError(
                f"{config.data.dir} holds other tokens than {other.run}, which is done, has seen:"
                " put those back"
            )


def slurm_script(rows: list[Row], options: Options) -> str:
    """One array task for each trunk, which runs it with its branches; requeued until they are
    done."""
    families = {}
    for row in rows:
        families.setdefault(row.parent or row.run, []).append(row.run)
    sweep = [
        sys.executable,
        str(Path(__file__).resolve()),
        options.study,
        "--run",
        f"gpus={options.gpus}",
        f"out={options.out}",
    ]
    return "\n".join(
        [
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
            *(f"  {shlex.quote(','.join(names))}" for names in families.values()),
            ")",
            f'{shlex.join(sweep)} only="${{families[$SLURM_ARRAY_TASK_ID]}}" &',
            "sweep=$!",
            "trap 'kill -TERM $sweep' TERM",
            "wait $sweep; code=$?",
            (
                "if [ $code -gt 128 ]; then wait $sweep; code=$?; fi    # the trap ended the first"
                " wait"
            ),
            "if [ $code -eq 3 ]; then scontrol requeue $SLURM_JOB_ID; fi",
            "exit $code",
        ]
    )


# -------------------------------------------------------------- how far each run is, what it costs


def summary_of(row: Row, folder: Path) -> dict | None:
    """summary.json of a finished run of the study in `folder`, else None."""
    path = folder / row.run / "summary.json"
    return read_json(path) if path.exists() else None


def state_of(row: Row, folder: Path) -> str:
    """How far a run is: done, diverged, running, failed and why, at step 400, held out or
    missing."""
    if summary := summary_of(row, folder):
        return "done" if summary["status"] == "ok" else summary["status"]
    if (log := folder / f"{row.run}.log").exists():
        with open(log, errors="replace") as file:
            if not can_lock(file, fcntl.LOCK_SH):
                return "running"
            text = file.read()
        if failed := re.search(rf"{ENDED}(-?[1-9]\d*)\n\Z", text):
            told = text[: failed.start()].rpartition(ENDED)[2].strip().splitlines() or [""]
            sentence = next((line for line in told if line.startswith("train.py: ")), told[-1])
            return f"failed, exit code {failed[1]}: {sentence} ({log})"
    if checkpoint := latest(folder / row.run):
        return f"at step {step_of(checkpoint)}"
    return "held out" if row.held_out else "missing"


def can_lock(file, kind: int) -> bool:
    """Lock an open log, shared or exclusively; False where the other has it: a run that lives holds
    its log exclusively."""
    for _ in range(5):  # another's look at the table is over at once
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def placed(row: Row, folder: Path) -> Row:
    """The row as it is to be run, or was begun: a branch from scratch where its trunk is done but
    its checkpoint is gone."""
    if row.parent is None or ">" in row.recipe:  # a switched decay has no run from scratch
        return row
    if summary := summary_of(row, folder):
        is_branch = summary.get("parent_step") is not None
    elif latest(folder / row.run):
        is_branch = read_config(folder / row.run).start_from is not None
    else:
        is_branch = (row.branch_point(folder) / "DONE").exists() or not (
            folder / row.parent / "summary.json"
        ).exists()
    return row if is_branch else replace(row, parent=None, parent_step=None)


def tokens_left(row: Row, folder: Path) -> int:
    saved = latest(folder / row.run)
    return (row.steps - step_of(saved)) * row.tokens_per_step if saved else row.own_tokens


def cost_of(row: Row, rows: list[Row], folder: Path, options) -> tuple[float, float, str | None]:
    """Tokens/s of a GPU in steady steps; seconds before these (imports, compilation) and after
    (evaluation, saving); the device. Medians over the finished ones of `rows` of its size and
    precision, null runs apart; else (device None) as assumed."""
    done = [
        (one, summary)
        for one in rows
        if (one.size, one.recipe, one.repeat) == (row.size, row.recipe, row.repeat)
        and (summary := summary_of(one, folder))
    ]
    if not done:
        ratio = row.recipe != "bf16" and modelled_ratio(
            load_config(ROOT / row.config, row.overrides), options.gpu, options.gpus
        )
        return (
            peak_flops(options.gpu)[0] * options.mfu / row.flops_per_token * (ratio or 1.0),
            options.start,
            None,
        )
    apart = [
        max(0.0, summary["wall_s"] - one.own_tokens / summary["tok_per_s_median"])
        for one, summary in done
    ]
    speeds = [summary["tok_per_s_median"] / summary["n_gpu"] for _, summary in done]
    return median(speeds), UNSEEN_S + median(apart), done[-1][1]["device"]


def table(rows: list[Row], folder: Path, options) -> str:
    """A line per run: size, budget, where it branches off, FLOPs of its own steps, GPU time with
    its start, state; then sums."""
    costs = {row: cost_of(row, rows, folder, options) for row in rows}
    whole = {row: row.own_tokens for row in rows}
    left = {row: tokens_left(row, folder) for row in rows if not summary_of(row, folder)}

    def seconds(row: Row, tokens: int) -> float:
        tok_per_s, start_s, _ = costs[row]
        return start_s * options.gpus + tokens / tok_per_s

    cells = [
        ["run", "N", "tokens/N", "tokens", "from step", "FLOPs", "GPU time", "state"],
        *(
            [
                row.run,
                si(row.params_total),
                f"{row.tokens_per_param:g}",
                si(row.tokens),
                str(row.parent_step or "-"),
                f"{row.flops_per_token * row.own_tokens:.2e}",
                "~" * (costs[row][-1] is None) + duration(seconds(row, row.own_tokens)),
                state_of(row, folder),
            ]
            for row in rows
        ),
    ]
    lines = [
        f"{what}{len(some)} runs:"
        f" {sum(n * row.flops_per_token for row, n in some.items()):.3g} FLOPs,"
        f" {duration(sum(map(seconds, some, some.values())))} of a GPU"
        for what, some in (("", whole), ("left: ", left))
    ]
    if any(device is None for *_, device in costs.values()):
        lines.append(
            f"~ assumed: {100 * options.mfu:.3g}% of the"
            f" {peak_flops(options.gpu)[0] / 1e12:.0f} BF16 TFLOP/s of one {options.gpu} (mfu=),"
            f" FP8 as runtime.roofline models it, {options.start:g} s to start and end (start=)"
        )
    measured = {
        f"{row.size} {row.recipe}" + " null" * row.repeat: cost
        for row, cost in costs.items()
        if cost[-1]
    }
    lines += [
        f"measured: {kind} {si(speed)} tokens/s on each {device}, {start_s:.3g} s to start and end"
        for kind, (speed, start_s, device) in measured.items()
    ]
    return "\n".join([grid(cells), "", *lines])


# -------------------------------------------------------------------------------- running the runs


def run(
    rows: list[Row],
    chosen: list[Row],
    folder: Path,
    options,
    slots: list[list[str]],
    deadline: float,
) -> int:
    """Run what of `chosen` is not done, a branch as soon as its trunk has passed its step; returns
    the exit code. `rows`: all of the study, whose finished runs tell how long a start takes;
    `deadline`: the time.monotonic() of limit=."""
    asked: list[int] = []  # signals, and the limit: requests to leave
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    waiting = [row for row in chosen if not summary_of(row, folder)]
    # what may fail again comes last
    waiting.sort(key=lambda row: state_of(row, folder).startswith("failed"))
    say(
        f"{len(waiting)} of {len(chosen)} runs to do in {folder}"
        + (
            f"; {deadline - time.monotonic():.1f} s are left of limit={options.limit:g}"
            if options.limit
            else ""
        )
    )
    running, failed, late, passed_on, looked = {}, [], [], 0, time.monotonic()
    while running or (waiting and not asked):
        while (
            not asked and slots and (row := next((r for r in waiting if is_ready(r, folder)), None))
        ):
            waiting.remove(row)
            start_s = cost_of(row, rows, folder, options)[1]
            if time.monotonic() + start_s + leave_s(row) > deadline:
                late.append(f"{row.run}, which takes {start_s:.0f} s to start and end")
            elif started := start(row, folder, options, slots[0]):
                running[row] = *started, slots.pop(0)
        if not running:
            break
        if time.monotonic() > looked + LOG_S:
            looked = time.monotonic()
            say(progress(chosen, running, folder))
        time.sleep(POLL_S)
        if not asked and time.monotonic() > deadline - max(map(leave_s, running)):
            asked.append(0)
        if len(asked) > passed_on:
            passed_on = len(asked)
            say("asking the runs to save and leave")
            for process, *_ in running.values():
                process.terminate()
        for row, (process, log, slot) in list(running.items()):
            if process.poll() is not None:
                # asked to leave is no failure
                print(f"{ENDED}{0 if asked else process.returncode}", file=log, flush=True)
                log.close()
                del running[row]
                slots.append(slot)
                state, summary = state_of(row, folder), summary_of(row, folder)
                failed += [row.run] * state.startswith("failed")
                say(
                    f"{row.run} {state}"
                    + (f", validation loss {summary['loss_bf16']:.4f}" if summary else "")
                )
    todo = [row.run for row in chosen if not summary_of(row, folder)]
    for told, runs in (
        ("no time is left to begin", late),
        ("failed", failed),
        ("not done, the same command goes on", todo),
    ):
        if runs:
            say(f"{told}: {listed(runs)}")
    return 1 if failed else 3 if todo else 0


def is_ready(row: Row, folder: Path) -> bool:
    """Whether a run can begin or go on: a branch once its trunk has passed its step (or is done:
    train.py says what is gone)."""
    return (
        row.parent is None
        or latest(folder / row.run) is not None
        or (
            (row.branch_point(folder) / "DONE").exists()
            or (folder / row.parent / "summary.json").exists()
        )
    )


def leave_s(row: Row) -> float:
    """Seconds that a run may take from being asked to leave until it has left."""
    return LEAVE_S + 12 * row.params_total / SAVE_BYTES_PER_S


def start(row: Row, folder: Path, options, gpus: list[str]) -> tuple[subprocess.Popen, IO] | None:
    """The run as a process with its log, or None where another sweep has it. The log is the lock:
    the run inherits it open, so it stays locked for as long as the run lives, though the sweep be
    killed."""
    log = open(folder / f"{row.run}.log", "a")  # noqa: SIM115 - open as long as the run
    if not can_lock(log, fcntl.LOCK_EX):
        log.close()
        say(f"{row.run} is being run by another sweep: left to it")
        return None
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.gpus}"]
        if options.gpus > 1
        else []
    )
    env = dict(os.environ)
    # Else torchrun kills its workers 30 s after it was told to stop.
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(max(30, math.ceil(leave_s(row)))))
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif (processes := options.gpus * options.jobs) > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    own, trunk = (
        latest(folder / row.run),
        (f"step {row.parent_step} of {row.parent}" if row.parent else "scratch"),
    )
    say(f"{row.run} " + (f"goes on from step {step_of(own)}" if own else f"starts from {trunk}"))
    # A session of its own: a terminal's Ctrl-C would reach it beside our signal, and a second one
    # ends a run unsaved.
    return (
        subprocess.Popen(
            [sys.executable, *torchrun, str(ROOT / "train.py"), *row.arguments(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        ),
        log,
    )


def progress(chosen: list[Row], running, folder: Path) -> str:
    """How far the runs under way are, and how long all take if the others go on at as many FLOPs a
    second."""
    todo, speed, texts = [row for row in chosen if not summary_of(row, folder)], 0.0, []
    flops = sum(row.flops_per_token * tokens_left(row, folder) for row in todo)
    for row in running:
        lines = [
            line
            for line in metrics_rows(read_rows(folder / row.run / "metrics.jsonl"))
            if line["kind"] == "train"
        ]
        if not lines:
            texts.append(f"{row.run} is starting")
            continue
        tok_per_s = median(line["tok_per_s"] for line in lines[-20:])
        speed += tok_per_s * row.flops_per_token
        step, loss = lines[-1]["step"], lines[-1]["loss"] or math.nan
        texts.append(
            f"{row.run} {step:,} / {row.steps:,}, loss {loss:.3f}, {si(tok_per_s)} tokens/s"
        )
    left = f", about {duration(flops / speed)} left" if speed else ""
    return "; ".join([f"{len(chosen) - len(todo)} of {len(chosen)} runs done{left}", *texts])


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(run_command(main, BEGAN))
