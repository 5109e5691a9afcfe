"""Run a study: print its grid with costs and states, run what is missing, or print one Slurm array script.

    python scaling/sweep.py configs/study_chinchilla.py                     the grid; starts nothing, writes nothing
    python scaling/sweep.py configs/study_chinchilla.py --run gpus=8        what is missing, each run on 8 GPUs of this machine
    python scaling/sweep.py configs/study_demo.py --run jobs=2              two runs side by side
    python scaling/sweep.py configs/study_chinchilla.py --slurm gpus=8      an array task for each trunk with its branches

Runs lie in out/<study>/<run>/, what each printed in out/<study>/<run>.log. One that is held out runs by its own name or a pattern
that matches nothing else, once its prediction is frozen (fit.py --predict). A branch whose trunk is done but whose checkpoint
is gone (copied runs come without) is trained from scratch.

Ctrl-C or SIGTERM has the runs save and leave, a second one has them leave at once. The next --run tries again what failed.
Exit code: 0 all is done, 1 a run failed, 2 a mistake in the command, 3 not all is done (stopped, or left to another sweep).
"""

import fcntl
import fnmatch
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, ClassVar

if __name__ == "__main__":
    BEGAN = time.monotonic()    # torch's import is part of the command, and of its limit

import torch

from runtime.checkpoint import latest, step_of
from runtime.cli import UserError, command, duration, grid, nearest, run_command, si
from runtime.config import load_config, positive
from runtime.data import open_data
from runtime.log import pair_id, peak_flops
from runtime.machine import metrics_rows, read_rows
from runtime.plan import ASSUMED_MFU
from runtime.roofline import modelled_ratio
from runtime.tokenizer import load_tokenizer, tokenizer_of
from scaling.predict import is_at, load
from scaling.records import LAW_FOLDER
from scaling.study import (
    ENDED,
    ROOT,
    Row,
    can_lock,
    checkpoint_of,
    declare,
    expand,
    load_study,
    placed,
    state_of,
    summary_of,
    tokens_left,
    write_declaration,
)

CPUS = 8            # a process, asked of Slurm: its own threads beside the GPU's, and those that read its data
UNSEEN_S = 5.0      # assumed, for no summary tells: imports and the GPU's context before a run's clock begins, and its end
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
POLL_S = 0.2
# Assumed of a run that is asked to leave: it ends its step, then writes and hashes 12 bytes a parameter.
LEAVE_S, SAVE_BYTES_PER_S = 5.0, 200e6
LOG_S = 60.0        # between two lines about the runs under way


@dataclass(frozen=True, kw_only=True)
class Options:
    study: str                  # a file such as configs/study_demo.py
    run: bool = False           # what is missing, on this machine
    slurm: bool = False         # print an array script in its place
    only: str | None = None     # names and patterns of runs (gpt50m_*), with the trunks they branch off from
    gpus: int = 1               # processes per run, by torchrun above 1
    jobs: int = 1               # runs at a time
    limit: float | None = None  # seconds from the command's start: runs save and leave in time; none is begun only to start
    out: str = "out"            # holds <study>/<run>/
    gpu: str = "h100"           # times are estimated with its peak where no run of that size and recipe is done
    mfu: float = ASSUMED_MFU    # share of that peak
    start: float = 60.0         # seconds assumed there for imports, compilation, evaluation and saving

    POSITIONAL: ClassVar = ("study",)

    def __post_init__(self):
        if problems := positive(self, "gpus", "jobs", "limit", "mfu", "start"):
            raise UserError(problems[0])
        if peak_flops(self.gpu) is None:
            raise UserError(f"gpu={self.gpu}: the peak of that GPU is not in runtime/log.py; try h100, h200, b200 or a100")
        if self.slurm and (self.run or self.limit or self.jobs > 1):
            raise UserError("--slurm: a task has one job, for as long as the script says; --run, jobs= and limit= go without it")


def main(arguments: list[str], began: float | None = None) -> int:
    """The exit code. `began`: when the command was started, by time.monotonic(); none = now."""
    began = time.monotonic() if began is None else began
    return command(__doc__, Options, arguments, lambda options: sweep(options, began))


def sweep(options: Options, began: float) -> int | str:
    study = load_study(options.study)
    rows, folder = expand(study), Path(options.out) / study.name
    chosen, declaration = choose(rows, options), declare(study, rows, folder)
    if options.run or options.slurm:
        check_predicted(chosen, folder)
    if options.slurm or not options.run:
        return slurm_script(chosen, options) if options.slurm else "\n".join(table(chosen, folder, options))
    gpus = visible_gpus(options)
    for line in check_data(rows, folder) if any(not summary_of(row, folder) for row in chosen) else []:
        print(line, flush=True)
    write_declaration(folder, declaration)
    return run(rows, chosen, folder, options, gpus, began)


def choose(rows: list[Row], options: Options) -> list[Row]:
    """The rows that only= names and the trunks they need; without it all that are not held out. A pattern that matches other runs
    too leaves out those held out: a broad one must not start the study's largest runs."""
    if options.only is None:
        return [row for row in rows if not (row.held_out and (options.run or options.slurm))]
    names = set()
    for pattern in options.only.split(","):
        if not (found := [row for row in rows if fnmatch.fnmatchcase(row.run, pattern)]):
            raise UserError(f"only={pattern!r} matches no run of {options.study}{nearest(pattern, [row.run for row in rows])}")
        found = [row for row in found if not row.held_out] or found
        names |= {row.run for row in found} | {row.parent for row in found}
    return [row for row in rows if row.run in names]


def check_predicted(rows: list[Row], folder: Path) -> None:
    """Raises UserError where a held-out run would begin before its prediction is frozen: it could never be scored."""
    waiting = [row for row in rows if row.held_out and not summary_of(row, folder)]
    goals = {one.target: one.content["target"] for one in load(folder / LAW_FOLDER)} if waiting else {}
    if missing := [row.run for row in waiting if row.run not in goals or not is_at(row, goals[row.run])]:
        raise UserError(f"{missing[0]} is held out and {folder / LAW_FOLDER} holds no prediction of it: run the others, freeze "
                        f"it (python scaling/fit.py {folder} --predict {missing[0]}), then start it")


def visible_gpus(options) -> list[str]:
    """Names of this machine's GPUs for CUDA_VISIBLE_DEVICES; none on a CPU. Raises UserError where they are too few."""
    there = torch.cuda.device_count()
    if there and options.gpus * options.jobs > there:
        raise UserError(f"gpus={options.gpus} for each of jobs={options.jobs} is more than the {there} GPUs of this machine")
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(",")[:there]


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
        f"#SBATCH --cpus-per-task={CPUS * options.gpus}",
        "# Five minutes before its time is over the run saves, and the task is requeued.",
        "#SBATCH --time=24:00:00 --signal=B:TERM@300",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 2",
        "families=(", *(f"  {shlex.quote(','.join(names))}" for names in families.values()), ")",
        f"{shlex.join(sweep)} only=\"${{families[$SLURM_ARRAY_TASK_ID]}}\" &",
        "sweep=$!",
        "trap 'kill -TERM $sweep' TERM",
        "wait $sweep; code=$?",
        "if [ $code -gt 128 ]; then wait $sweep; code=$?; fi    # the trap ended the first wait",
        "if [ $code -eq 3 ]; then scontrol requeue $SLURM_JOB_ID; fi",
        "exit $code"])


# -------------------------------------------------------------------------------------------------- what each run costs

@dataclass(frozen=True)
class Cost:
    """What runs of one size and precision take on each GPU."""
    tok_per_s: float            # in steady steps
    start_s: float              # before the first steady step (imports, compilation) and after the last (evaluation, saving)
    device: str | None          # where the speed was measured; None = assumed
    is_start_measured: bool
    is_modelled: bool = False   # FP8's assumed speed has the ratio to BF16's that runtime/roofline.py models

    def seconds(self, tokens: int, gpus: int) -> float:
        """GPU-seconds of a run that is started once and trains on so many tokens."""
        return self.start_s * gpus + tokens / self.tok_per_s


def kind_of(row: Row) -> tuple[str, str]:
    """Runs of one kind cost alike: size and precision; the null runs, rounded otherwise, are a kind of their own."""
    return row.size, row.recipe + " null" * row.repeat


def costs_of(rows: list[Row], folder: Path, options) -> dict[tuple[str, str], Cost]:
    """kind -> its Cost: medians over its finished runs, else options.mfu of the peak of options.gpu (FP8's times the modelled
    ratio, where there is one) and options.start."""
    speeds, starts, devices, costs = {}, {}, {}, {}
    for row in rows:
        if summary := summary_of(row, folder):
            kind, devices[kind] = kind_of(row), summary["device"]
            speeds.setdefault(kind, []).append(summary["tok_per_s_median"] / summary["n_gpu"])
            if summary.get("wall_s"):
                steady = placed(row, folder).own_tokens / summary["tok_per_s_median"]
                starts.setdefault(kind, []).append(UNSEEN_S + max(0.0, summary["wall_s"] - steady))
    for row in rows:
        kind, assumed, ratio = kind_of(row), peak_flops(options.gpu)[0] * options.mfu / row.flops_per_token, None
        if kind in costs:
            continue
        if kind not in speeds and row.recipe != "bf16":
            ratio = modelled_ratio(load_config(ROOT / row.config, list(row.overrides)), options.gpu, options.gpus)
        costs[kind] = Cost(statistics.median(speeds.get(kind, [assumed * (ratio or 1.0)])),
                           statistics.median(starts.get(kind, [options.start])), devices.get(kind), kind in starts,
                           ratio is not None)
    return costs


def table(rows: list[Row], folder: Path, options) -> list[str]:
    """A line per run: size, budget, where it branches off, FLOPs of its own steps, GPU time with its start, state; then sums."""
    costs = costs_of(rows, folder, options)
    whole = [placed(row, folder) for row in rows]
    spent = [costs[kind_of(row)].seconds(row.own_tokens, options.gpus) for row in whole]
    tokens = [tokens_left(row, folder) for row in whole]
    left = [costs[kind_of(row)].seconds(own, options.gpus) for row, own in zip(rows, tokens, strict=True)
            if not summary_of(row, folder)]
    scale, unit = next((one for one in UNITS if max(spent) >= one[0]), UNITS[-1])
    cells = [["run", "N", "tokens/N", "tokens", "from step", "FLOPs", unit, "state"]]
    for row, seconds in zip(whole, spent, strict=True):
        about = "" if costs[kind_of(row)].device else "~"
        cells.append([row.run, si(row.params_total), f"{row.tokens_per_param:g}", si(row.tokens), str(row.parent_step or "-"),
                      f"{row.own_flops:.2e}", about + _time(seconds / scale), state_of(row, folder)])
    own, apart = sum(row.own_flops for row in whole), sum(row.flops for row in rows)
    flops_left = sum(n * row.flops_per_token for row, n in zip(rows, tokens, strict=True))
    lines = [grid(cells), "", f"{len(rows)} runs: {own:.3g} FLOPs, {_time(sum(spent) / scale)} device-{unit}; left: "
             f"{len(left)} runs, {flops_left:.3g} FLOPs, {_time(sum(left) / scale)} device-{unit}",
             f"as {len(rows)} separate runs {apart:.3g} FLOPs: branches save {1 - own / apart:.0%}",
             f"A branch's FLOPs and {unit} are those of its own steps, and {unit} include what a run takes to start and end."]
    assumed = []
    if any(cost.device is None for cost in costs.values()):
        peak = peak_flops(options.gpu)[0]
        fp8 = "FP8 at the ratios that runtime.roofline models, else as fast" if any(
            cost.is_modelled for cost in costs.values()) else "FP8 as fast"
        assumed.append(f"{100 * options.mfu:.3g}% of the {peak / 1e12:.0f} BF16 TFLOP/s of one {options.gpu} (mfu=), {fp8}")
    if not all(cost.is_start_measured for cost in costs.values()):
        assumed.append(f"{options.start:g} s to start and end a run (start=)")
    return [*lines, *([f"~ assumed: {', '.join(assumed)}"] if assumed else []), *(
        f"measured: {' '.join(kind)} {si(cost.tok_per_s)} tokens/s on each {cost.device}"
        + (f", {cost.start_s:.3g} s to start and end ({UNSEEN_S:g} of them assumed)" if cost.is_start_measured else "")
        for kind, cost in costs.items() if cost.device)]


def _time(value: float) -> str:
    return "<0.001" if 0 < value < 1e-3 else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


# ------------------------------------------------------------------------------------------------- the data, before it all

def check_data(rows: list[Row], folder: Path) -> list[str]:
    """A line for each set of data that the runs to do see: how often the largest of them sees each source. `rows` are all of the
    study: too little data for held-out runs is to be known first. Raises UserError for data that will not do, by open_data, and
    for data or a config that are not those of a run that is done."""
    largest, done, lines = {}, {}, []
    for row in sorted(rows, key=lambda row: row.tokens):
        config = load_config(ROOT / row.config, [*row.overrides, f"out={folder}"])
        which = replace(config.data, micro_batch=1, tokens_per_step=1)      # the other settings say which tokens are seen
        key = repr((which, config.model.n_ctx, config.model.vocab_size, config.eval.tokens))
        if summary := summary_of(row, folder):
            done.setdefault(key, []).append((row, summary))
            # Its overrides are declared; what else a run depends on, its learning rate say, stands in the config file alone.
            if summary.get("pair_id") not in (None, pair_id(config)):
                raise UserError(f"{row.config} has changed since {row.run} was trained with it ({folder / row.run}/config.json): "
                                f"undo that change, or give the changed study another name=")
        else:
            largest[key] = row, config
    for key, (row, config) in largest.items():
        try:
            data = open_data(config, load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer)).sha256)
        except UserError as error:
            raise UserError(f"{row.run}: {error}") from error
        for other, summary in done.get(key, ()):
            here = {"data_sha256": data.train_sha256, "val_sha256": data.val_sha256}
            if changed := [name for name, value in here.items() if summary.get(name) not in (None, value)]:
                raise UserError(f"{config.data.dir} holds other tokens than {other.run}, which is done, has seen ({changed[0]} "
                                f"differs from its summary.json): put those back, or give the study another name=")
        lines.append(f"data: {config.data.dir}: epochs of the largest run to do ({row.run}, {row.tokens:,} tokens): "
                     + ", ".join(f"{source} {epochs:.2f}" for source, epochs in data.epochs.items())
                     + f"; allowed {config.data.max_epochs:g}")
    return lines


# ------------------------------------------------------------------------------------------------------- running the runs

def run(rows: list[Row], chosen: list[Row], folder: Path, options, gpus: list[str], began: float) -> int:
    """Run what of `chosen` is not done, a branch as soon as its trunk has passed its step; returns the exit code. `rows` are
    all of the study, whose finished runs tell how long a start takes; `began`: time.monotonic() when the limit began to count."""
    asked: list[int] = []           # signals, and the limit: requests to leave
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    waiting = [row for row in chosen if not summary_of(row, folder)]
    waiting.sort(key=lambda row: state_of(row, folder).startswith("failed"))    # what may fail again comes last
    say(f"{len(waiting)} of {len(chosen)} runs to do in {folder}" + (
        f"; {began + options.limit - time.monotonic():.1f} s are left of limit={options.limit:g}" if options.limit else ""))
    running, failed, late, passed_on, looked = {}, [], [], 0, time.monotonic()
    while running or (waiting and not asked):
        while not asked and len(running) < options.jobs and (row := next((r for r in waiting if is_ready(r, folder)), None)):
            waiting.remove(row)
            start_s = costs_of(rows, folder, options)[kind_of(row)].start_s
            if options.limit and time.monotonic() + start_s + leave_s(row) > began + options.limit:
                late.append(f"{row.run}, which takes {start_s:.0f} s to start and end")
                continue
            slot = min(set(range(options.jobs)) - {slot for *_, slot in running.values()})
            if started := start(placed(row, folder), folder, options, slot, gpus):
                running[row] = *started, slot
        if not running:
            break
        if time.monotonic() > looked + LOG_S:
            looked = time.monotonic()
            say(progress(chosen, running, folder))
        time.sleep(POLL_S)
        if options.limit and not asked and time.monotonic() > began + options.limit - max(map(leave_s, running)):
            asked.append(0)
        if len(asked) > passed_on:
            passed_on = len(asked)
            say("asking the runs to save and leave")
            for process, *_ in running.values():
                process.terminate()
        for row, (process, log, _) in list(running.items()):
            if process.poll() is not None:
                # One asked to leave before it could save has not failed.
                print(f"{ENDED}{0 if asked else process.returncode}", file=log, flush=True)
                log.close()
                del running[row]
                state, summary = state_of(row, folder), summary_of(row, folder)
                failed += [row.run] if state.startswith("failed") else []
                loss = f", validation loss {summary['loss_bf16']:.4f}" if summary else ""
                say(f"{row.run} {state}{loss}")
    if late:
        say(f"limit={options.limit:g} leaves no time to begin {len(late)} more: {late[0]}")
    if failed:
        say(f"failed: {', '.join(failed)}; correct the cause and run the same command again")
    if todo := [row.run for row in chosen if not summary_of(row, folder)]:
        say(f"{len(todo)} of {len(chosen)} runs are not done, {todo[0]} the first; the same command goes on")
    return 1 if failed else 3 if todo else 0


def is_ready(row: Row, folder: Path) -> bool:
    """Whether a run can begin or go on: a branch once its trunk has passed its step."""
    return (row.parent is None or latest(folder / row.run) is not None or (folder / row.parent / "summary.json").exists()
            or (checkpoint_of(row, folder) / "DONE").exists())


def leave_s(row: Row) -> float:
    """Seconds that a run may take from being asked to leave until it has left."""
    return LEAVE_S + 12 * row.params_total / SAVE_BYTES_PER_S


def start(row: Row, folder: Path, options, slot: int, gpus: list[str]) -> tuple[subprocess.Popen, IO] | None:
    """The run as a process with its log, or None where another sweep has it. The log is the lock: the run inherits it open, so it
    stays locked for as long as the run lives, though the sweep be killed."""
    log = open(folder / f"{row.run}.log", "a")      # noqa: SIM115 - open as long as the run
    if not can_lock(log, fcntl.LOCK_EX):
        log.close()
        say(f"{row.run} is being run by another sweep: left to it")
        return None
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.gpus}"] if options.gpus > 1 else []
    env = dict(os.environ)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * options.gpus:(slot + 1) * options.gpus])
    elif (processes := options.gpus * options.jobs) > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    own = latest(folder / row.run)
    say(f"{row.run} " + (f"goes on from step {step_of(own)}" if own else
                         f"starts from step {row.parent_step} of {row.parent}" if row.parent else "starts from scratch"))
    # A session of its own: a terminal's Ctrl-C would reach torchrun and its workers beside our signal, and a second one ends
    # a run unsaved.
    return subprocess.Popen([sys.executable, *torchrun, str(ROOT / "train.py"), *row.arguments(folder)],
                            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True), log


def progress(chosen: list[Row], running, folder: Path) -> str:
    """How far the runs under way are, and how long all take if the others go on at as many FLOPs a second."""
    todo = [placed(row, folder) for row in chosen if not summary_of(row, folder)]
    flops, speed, texts = sum(row.flops_per_token * tokens_left(row, folder) for row in todo), 0.0, []
    for row in running:
        lines = [line for line in metrics_rows(read_rows(folder / row.run / "metrics.jsonl")) if line["kind"] == "train"]
        if lines:
            tok_per_s = statistics.median(line["tok_per_s"] for line in lines[-20:])
            speed += tok_per_s * row.flops_per_token
            step, loss = lines[-1]["step"], lines[-1]["loss"]
            texts.append(f"{row.run} {step:,} / {row.steps:,}, loss {loss and round(loss, 3)}, {si(tok_per_s)} tokens/s")
        else:
            texts.append(f"{row.run} is starting")
    done = f"{len(chosen) - len(todo)} of {len(chosen)} runs done" + (f", about {duration(flops / speed)} left" if speed else "")
    return "; ".join([done, *texts])


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], BEGAN))
