"""Run a study: print its grid with costs and states, run what is missing, or print one Slurm array script.

    python scaling/sweep.py configs/study_chinchilla.py                     the grid; starts nothing, writes nothing
    python scaling/sweep.py configs/study_chinchilla.py --run gpus=8        what is missing, each run on 8 GPUs of this machine
    python scaling/sweep.py configs/study_demo.py --run jobs=2              two runs side by side
    python scaling/sweep.py configs/study_chinchilla.py --slurm gpus=8      an array task for each trunk with its branches

    only=NAME,PATTERN   runs so named (gpt50m_*), with the trunks they branch off from; one that is held out by its own name or
                        a pattern that matches nothing else, and only once its prediction is frozen (fit.py --predict)
    gpus=1 jobs=1       processes per run (torchrun above 1), runs at a time
    limit=SECONDS       from the start of the command: the runs save and leave in time, none is begun that would only start.
                        The same command goes on
    out=out             runs lie in out/<study>/<run>/, what each printed in out/<study>/<run>.log
    gpu=h100 mfu=0.45   whose peak, and which share of it, times are estimated with where no run of that size and recipe is done
    start=60            seconds assumed there for the start and the end of a run: imports, compilation, evaluation, saving

A branch whose trunk is done but whose checkpoint is gone (copied runs come without) is trained from scratch.

Ctrl-C or SIGTERM has the runs save and leave, a second one has them leave at once. The next --run tries again what failed.
Exit code: 0 all is done, 1 a run failed, 2 a mistake in the command, 3 not all is done (stopped, or left to another sweep).
"""

import difflib
import fcntl
import fnmatch
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, ClassVar

if __name__ == "__main__":
    BEGAN = time.monotonic()    # torch's import is part of the command, and of its limit

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from runtime.checkpoint import latest, step_of
from runtime.cli import UserError, read_options, run_command
from runtime.config import Config, load_config, positive, read_config
from runtime.data import open_data
from runtime.log import pair_id, peak_flops
from runtime.plan import ASSUMED_MFU
from runtime.progress import duration, si
from runtime.roofline import modelled_ratio
from runtime.rows import metrics_rows, parse
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
    has_unsaved,
    load_study,
    placed,
    state_of,
    summary_of,
    tokens_left,
    write_declaration,
)

CPUS = 8            # a process, asked of Slurm: its own threads beside the GPU's, and those that read its data
# Assumed, for no summary tells: the interpreter, torch and the GPU's context before a run's clock begins, and its end; 2 to 4 s
# on a CPU.
UNSEEN_S = 5.0
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
POLL_S = 0.2
# Assumed of a run that is asked to leave: it ends its step, then writes and hashes 12 bytes a parameter.
LEAVE_S = 5.0
SAVE_BYTES_PER_S = 200e6
PATIENCE_S = 3.0                # until what has been asked to leave and has nothing to save is told again
LIVE_S, LOG_S = 0.5, 60.0       # between two looks at the runs under way
TAIL_BYTES, TAIL_ROWS = 16_384, 20


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
        declaration = declare(study, rows, folder)
        if options.run or options.slurm:
            check_predicted(chosen, folder)
        if options.slurm:
            print(slurm_script(chosen, options))
        elif options.run:
            gpus = visible_gpus(options)
            lines = check_data(rows, folder) if any(not summary_of(row, folder) for row in chosen) else []
            write_declaration(folder, declaration)
            print("\n".join(lines), end="\n" * bool(lines), flush=True)
            return run(rows, chosen, folder, options, gpus, began)
        else:
            print("\n".join(table(chosen, folder, options)))
    except UserError as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise       # run_command's: nobody reads
    except OSError as error:
        print(f"sweep.py: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def choose(rows: list[Row], options: Options) -> list[Row]:
    """The rows that only= names and the trunks they need; without it all, except that nothing held out is run.

    A pattern that matches other runs too leaves out those held out: a broad one must not start the study's largest runs."""
    if options.only is None:
        return [row for row in rows if not (row.held_out and (options.run or options.slurm))]
    names, spared, every = set(), set(), [row.run for row in rows]
    for pattern in options.only.split(","):
        if not (found := [row for row in rows if fnmatch.fnmatchcase(row.run, pattern)]):
            begun = [name for name in every if name.startswith(pattern)]
            raise UserError(f"only={pattern!r} matches no run of {options.study}; " + (
                f"write {pattern}{'_' * begun[0].startswith(pattern + '_')}* for the {len(begun)} that begin so" if begun else
                f"the nearest are {', '.join(difflib.get_close_matches(pattern, every, 6, cutoff=0))}"))
        if not all(row.held_out for row in found):
            spared |= {row.run for row in found if row.held_out}
            found = [row for row in found if not row.held_out]
        names |= {row.run for row in found} | {row.parent for row in found}
    if spared - names:
        print(f"left out, for what is held out is run by its own name: {', '.join(sorted(spared - names))}", file=sys.stderr)
    return [row for row in rows if row.run in names]


def check_predicted(rows: list[Row], folder: Path) -> None:
    """Raises UserError where a held-out run would begin before its prediction is frozen: it could never be scored."""
    waiting = [row for row in rows if row.held_out and not summary_of(row, folder)]
    goals = {one.target: one.content["target"] for one in load(folder / LAW_FOLDER)} if waiting else {}
    if missing := [row.run for row in waiting if row.run not in goals or not is_at(row, goals[row.run])]:
        commands = " && ".join(f"python scaling/fit.py {folder} --predict {run}" for run in missing)
        raise UserError(f"{missing[0]} is held out, and {folder / LAW_FOLDER} holds no prediction_{missing[0]}.json of it: run "
                        f"the other runs, freeze the prediction ({commands}), then start it")


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
    width = max(len(row.run) for row in rows)
    lines = [f"{'run':{width}}  {'N':>7} {'tok/N':>5} {'tokens':>7} {'from step':>9} {'FLOPs':>8} {unit:>9}  state"]
    for row, seconds in zip(whole, spent, strict=True):
        about = "" if costs[kind_of(row)].device else "~"
        lines.append(f"{row.run:{width}}  {si(row.params_total):>7} {row.tokens_per_param:>5g} {si(row.tokens):>7} "
                     f"{row.parent_step or '-':>9} {row.own_flops:>8.2e} {about + _time(seconds / scale):>9}  "
                     f"{state_of(row, folder)}")
    own, apart = sum(row.own_flops for row in whole), sum(row.flops for row in rows)
    flops_left = sum(n * row.flops_per_token for row, n in zip(rows, tokens, strict=True))
    lines += ["", f"{len(rows)} runs: {own:.3g} FLOPs, {_time(sum(spent) / scale)} device-{unit}; left: {len(left)} runs, "
                  f"{flops_left:.3g} FLOPs, {_time(sum(left) / scale)} device-{unit}",
              f"as {len(rows)} separate runs {apart:.3g} FLOPs: branches save {1 - own / apart:.0%}",
              f"A branch's FLOPs and {unit} are those of its own steps; FLOPs are 6 per matmul parameter plus attention; {unit} "
              f"include what a run takes to start and end."]
    if alone := [row.run for row, before in zip(whole, rows, strict=True) if row.parent != before.parent
                 and not summary_of(row, folder)]:
        lines.append(f"from scratch, for the checkpoints of their trunks are gone: {', '.join(alone)}")
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
    """A line for each set of data that the runs which are not done see: how often the largest of them sees each source.

    `rows` are all of the study: the held-out runs are the largest and come last, and too little data for them is to be known
    before the others have taken their hours. Raises UserError, by open_data: what is missing, damaged, of another tokenizer,
    or would be seen more than data.max_epochs times; or data or a config that are not those of a run that is done."""
    largest, done, lines = {}, {}, []
    for row in sorted(rows, key=lambda row: row.tokens):
        config = load_config(ROOT / row.config, [*row.overrides, f"out={folder}"])
        free = ("micro_batch", "tokens_per_step", "max_epochs")     # the other settings say which tokens are seen
        data = {name: value for name, value in asdict(config.data).items() if name not in free}
        key = json.dumps([data, config.model.n_ctx, config.model.vocab_size, config.eval.tokens], sort_keys=True)
        if summary := summary_of(row, folder):
            _check_config(config, row, summary, folder)
            done.setdefault(key, []).append((row, summary))
        else:
            largest[key, config.data.max_epochs] = row, config
    for (key, _), (row, config) in largest.items():
        tokenizer = load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer))
        try:
            data = open_data(config, tokenizer.sha256)
        except UserError as error:
            raise UserError(f"{row.run}: {error}") from error
        for other, summary in done.get(key, ()):
            for name, here, what in (("data_sha256", data.train_sha256, "trained"), ("val_sha256", data.val_sha256, "validated")):
                if (its := summary.get(name)) and its != here:
                    raise UserError(f"{config.data.dir} holds other tokens than {other.run} was {what} on ({name} is "
                                    f"{here[:9]}... here, {its[:9]}... in {folder / other.run}/summary.json): no law goes "
                                    f"through both; put the shards of that run there, or give the study another name=")
        lines.append(f"data: {config.data.dir}: epochs of the largest run to do ({row.run}, {row.tokens:,} tokens): "
                     + ", ".join(f"{source} {epochs:.2f}" for source, epochs in data.epochs.items())
                     + f"; allowed {config.data.max_epochs:g}")
    return lines


def _check_config(config: Config, row: Row, summary: dict, folder: Path) -> None:
    """Row's overrides are declared; what else a run depends on, its learning rate say, stands in the config file alone."""
    if (its := summary.get("pair_id")) in (None, pair_id(config)):
        return
    try:
        before, now = ({**one.identity(), "data.micro_batch": one.data.micro_batch} for one in (
            read_config(folder / row.run), config))
        changes = [f"{key} was {before[key]!r}, now {now[key]!r}" for key in now if before[key] != now[key]
                   and not key.startswith("fp8.") and key != "start_from"]      # what pair_id does not count
    except UserError:
        changes = [f"its pair_id was {its}, now {pair_id(config)}"]
    if changes:     # else an older version of this code counted pair_id otherwise
        raise UserError(f"{row.config} no longer says what {row.run}, which is done, was trained with: {', '.join(changes)}; no "
                        f"law goes through both: undo that change, or give the changed study another name=")


# ------------------------------------------------------------------------------------------------------- running the runs

@dataclass
class Running:
    """A run that this sweep has started."""
    process: subprocess.Popen
    log: IO
    slot: int
    since: float                    # by time.monotonic()
    busy: float = 0.0               # when it was last seen with steps to save, or had just been asked to leave
    is_urged: bool = False          # told a second time


def run(rows: list[Row], chosen: list[Row], folder: Path, options, gpus: list[str], began: float) -> int:
    """Run what of `chosen` is not done, a branch as soon as its trunk has passed its step; returns the exit code.

    `rows` are all of the study, whose finished runs tell how long a start takes; `began` is when the limit began to count, by
    time.monotonic()."""
    asked: list[int] = []           # signals, and the limit: requests to leave
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    waiting, running, failed, late, passed_on = [row for row in chosen if not summary_of(row, folder)], {}, [], [], 0
    waiting.sort(key=lambda row: state_of(row, folder).startswith("failed"))    # what may fail again comes last
    say(f"{len(waiting)} of {len(chosen)} runs to do in {folder}" + (
        f"; {began + options.limit - time.monotonic():.1f} s are left of limit={options.limit:g}" if options.limit else ""))

    with Progress(rows, chosen, folder, options) as progress:
        while running or (waiting and not asked):
            while not asked and len(running) < options.jobs and (row := next((r for r in waiting if is_ready(r, folder)), None)):
                waiting.remove(row)
                if options.limit and (reason := lacks_time(row, rows, folder, options, began)):
                    say(reason) if not late else None
                    late.append(row.run)
                    continue
                now, slot = placed(row, folder), min(set(range(options.jobs)) - {one.slot for one in running.values()})
                if started := start(now, folder, options, slot, gpus):
                    running[row] = started
                    say(f"{row.run} {_beginning(row, now, folder)}")
                else:
                    say(f"{row.run} is being run by another sweep: left to it")
            if not running:
                break
            progress.show(list(running))
            time.sleep(POLL_S)
            if options.limit and not asked and time.monotonic() > began + options.limit - max(map(leave_s, running)):
                asked.append(0)
            if len(asked) > passed_on:
                passed_on = len(asked)
                say("asking the runs to save and leave")
                for one in running.values():
                    one.busy = time.monotonic()
                    one.process.terminate()
            if asked and options.gpus == 1:     # torchrun has a patience of its own; told twice, it leaves its workers behind
                urge(running, folder)
            for row, one in list(running.items()):
                if one.process.poll() is not None:
                    # One asked to leave before it could save has not failed.
                    print(f"{ENDED}{0 if asked else one.process.returncode}", file=one.log, flush=True)
                    one.log.close()
                    del running[row]
                    progress.run_ended()
                    state, summary = state_of(row, folder), summary_of(row, folder)
                    failed += [row.run] if state.startswith("failed") else []
                    loss = f", validation loss {summary['loss_bf16']:.4f}" if summary else ""
                    say(f"{row.run} {state}{loss} after {time.monotonic() - one.since:.0f} s")
    if late[1:]:
        say(f"nor are begun, for the same reason: {', '.join(late[1:])}")
    todo = [row.run for row in chosen if not summary_of(row, folder)]
    if failed:
        say(f"failed: {', '.join(failed)}; correct the cause and run the same command again")
    if todo:
        say(f"{len(todo)} of {len(chosen)} runs are not done, {todo[0]} the first; the same command goes on")
    return 1 if failed else 3 if todo else 0


def is_ready(row: Row, folder: Path) -> bool:
    """Whether a run can begin or go on: a branch once its trunk has passed its step."""
    return (row.parent is None or latest(folder / row.run) is not None or (folder / row.parent / "summary.json").exists()
            or (checkpoint_of(row, folder) / "DONE").exists())


def lacks_time(row: Row, rows: list[Row], folder: Path, options, began: float) -> str | None:
    """The sentence where what is left of the limit would go into the run's start alone, else None."""
    cost, left = costs_of(rows, folder, options)[kind_of(row)], began + options.limit - time.monotonic()
    if left >= cost.start_s + leave_s(row):
        return None
    return (f"{row.run} is not begun: of limit={options.limit:g} {max(0.0, left):.0f} s are left, and to start and end it takes "
            f"{cost.start_s:.0f} s ({'measured' if cost.is_start_measured else 'assumed, start='}), to save and leave up to "
            f"{leave_s(row):.0f} s")


def leave_s(row: Row) -> float:
    """Seconds that a run may take from being asked to leave until it has left."""
    return LEAVE_S + 12 * row.params_total / SAVE_BYTES_PER_S


def start(row: Row, folder: Path, options, slot: int, gpus: list[str]) -> Running | None:
    """The run as a process, or None where another sweep has it.

    The log is the lock: the run inherits it open, so it stays locked for as long as the run lives, though the sweep be
    killed."""
    log = open(folder / f"{row.run}.log", "a")      # noqa: SIM115 - open as long as the run
    if not can_lock(log, fcntl.LOCK_EX):
        log.close()
        return None
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.gpus}"] if options.gpus > 1 else []
    env = dict(os.environ)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * options.gpus:(slot + 1) * options.gpus])
    elif (processes := options.gpus * options.jobs) > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    # A session of its own: a terminal's Ctrl-C would reach torchrun and its workers beside our signal, and a second one ends
    # a run unsaved.
    process = subprocess.Popen([sys.executable, *torchrun, str(ROOT / "train.py"), *row.arguments(folder)],
                               stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True)
    return Running(process, log, slot, time.monotonic())


def urge(running: dict[Row, Running], folder: Path) -> None:
    """Tell those a second time to leave, which ends them, who were asked and have nothing to save.

    A run that compiles hears of the first request after its first step, which may be minutes away; nothing of it is lost."""
    for row, one in running.items():
        if has_unsaved(row, folder):
            one.busy = time.monotonic()
        elif not one.is_urged and one.process.poll() is None and time.monotonic() > one.busy + PATIENCE_S:
            one.is_urged = True
            say(f"{row.run} has nothing to save and is told to leave at once")
            one.process.terminate()


def _beginning(row: Row, now: Row, folder: Path) -> str:
    if own := latest(folder / row.run):
        return f"goes on from step {step_of(own)}"
    if now.parent:
        return f"starts from step {now.parent_step} of {now.parent}"
    return "starts" + (f" from scratch: step {row.parent_step} of {row.parent}, which is done, is gone" if row.parent else "")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


# --------------------------------------------------------------------------------------------------- the runs under way

class Progress:
    """Each run's step, loss, speed and time left: a live table on a terminal, one line a minute elsewhere. Use it with `with`.

    rows: all of the study, whose finished runs tell how long the others take. chosen: those that the command is to run."""

    def __init__(self, rows: list[Row], chosen: list[Row], folder: Path, options):
        self._rows, self._chosen, self._folder, self._options = rows, chosen, folder, options
        console = Console()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._looked = time.monotonic()
        self.run_ended()

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_):
        if self._live:
            self._live.stop()

    def run_ended(self) -> None:
        """Read anew what finished runs tell: which are done, what their kind costs."""
        self._todo = [placed(row, self._folder) for row in self._chosen if not summary_of(row, self._folder)]
        self._costs = costs_of(self._rows, self._folder, self._options)
        self._flops = sum(placed(row, self._folder).own_flops for row in self._chosen)

    def show(self, running: list[Row]) -> None:
        """Called often; looks and draws when it is due."""
        if not running or time.monotonic() - self._looked < (LIVE_S if self._live else LOG_S):
            return
        self._looked = time.monotonic()
        states = {row.run: _State(row, self._folder) for row in running}
        left, share = self.left(states)
        told = f"{len(self._chosen) - len(self._todo)} of {len(self._chosen)} runs done"
        if left is not None:
            until = time.strftime("%H:%M" if left < 86_400 else "%a %H:%M", time.localtime(time.time() + left))
            told += f", {duration(left)} left, until {until}"
        if self._live is None:
            say("; ".join([told, *(state.text for state in states.values())]))
            return
        runs, bar = Table(box=None, header_style="dim", pad_edge=False), Table.grid(padding=(0, 1))
        for name in ("run", "step", "loss", "tokens/s", "left"):
            runs.add_column(name, justify="left" if name == "run" else "right")
        for state in states.values():
            runs.add_row(*state.cells)
        bar.add_row(ProgressBar(1.0, share, width=16), f"{told} ({share:.0%} of the FLOPs)")
        self._live.update(Group(runs, bar), refresh=True)

    def left(self, states: dict[str, "_State"]) -> tuple[float | None, float]:
        """Seconds until all is done, None where nothing tells yet; share of the FLOPs that is done."""
        per_token = {kind_of(row): row.flops_per_token for row in self._rows}
        speed = {kind: cost.tok_per_s * self._options.gpus for kind, cost in self._costs.items() if cost.device}
        speed |= {kind_of(state.row): state.tok_per_s for state in states.values() if state.tok_per_s}
        starts = [cost.start_s for cost in self._costs.values() if cost.is_start_measured]
        seconds, flops = [], 0.0
        for row in self._todo:
            kind, state = kind_of(row), states.get(row.run)
            own = (row.own_tokens if state is None else (row.steps - state.step) * row.tokens_per_step) * row.flops_per_token
            flops += own
            if speed:       # of a kind that nothing is known of, as many FLOPs a second as of the one nearest to it
                near = min(speed, key=lambda known: (known != kind, known[1] != kind[1], abs(per_token[known] - per_token[kind])))
                start_s = statistics.median(starts) if starts and state is None else 0.0
                seconds.append(own / (speed[near] * per_token[near]) + start_s)
        return max(sum(seconds) / self._options.jobs, max(seconds)) if seconds else None, 1 - flops / self._flops


class _State:
    """How far a run that is under way has come, by the end of its metrics.jsonl."""

    def __init__(self, row: Row, folder: Path):
        self.row, self.step, self.tok_per_s, loss = row, row.parent_step or 0, None, ""
        if (path := folder / row.run / "metrics.jsonl").exists():
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                rows = [line for line in metrics_rows(parse(file.read())) if line["kind"] == "train" and "tok_per_s" in line]
            if rows:
                self.step, loss = rows[-1]["step"], "" if rows[-1].get("loss") is None else f"{rows[-1]['loss']:.3f}"
                self.tok_per_s = statistics.median(line["tok_per_s"] for line in rows[-TAIL_ROWS:])
        tokens, speed = (row.steps - self.step) * row.tokens_per_step, self.tok_per_s
        left = "starting" if speed is None else duration(tokens / speed) if tokens else "evaluating"
        self.cells = [row.run, f"{self.step:,} / {row.steps:,}", loss, "" if speed is None else si(speed), left]
        self.text = (f"{row.run} {self.cells[1]}" + f", loss {loss}" * bool(loss)
                     + ("" if speed is None else f", {si(speed)} tokens/s") + f", {left}" + " left" * left[0].isdigit())


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], BEGAN))
