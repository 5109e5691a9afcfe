"""Keep a study's finished runs in the repository, a row each, and go on with it on any machine.

    python scaling/ledger.py configs/study_cpu.py                   what is done, hours that remain
    python scaling/ledger.py configs/study_cpu.py --run limit=7000  train what is missing, in order
    python scaling/ledger.py configs/study_cpu.py --restore         write the rows as run folders
    python scaling/ledger.py configs/study_cpu.py --repeat RUN      train a run again and compare it

The rows lie in studies/<study>/runs.jsonl: what summary.json says, the validation losses in blocks,
the machine's kind, CPU seconds. They are all that lasts: --run begins by writing them back, so a
run with a row is never trained again, also on another machine. Checkpoints stay below out/<study>/
until a trunk has all of its branches; on a machine without them a branch is trained from scratch,
to the same weights. Each run has one thread, so that the order of its sums is fixed, and is
computed as on the CPU of its pair's BF16 run where that had AVX2 alone (scaling/cpu_kind.py).
Several commands may train one study side by side, each with an out= of its own.

studies/<study>/study.json is what was declared before the first run; predictions that were frozen
before their runs (prediction_*.json, gap_prediction_*.json) are kept in studies/<study>/law: --run
copies them there, and all commands back to out/<study>/law, where those of held-out runs must be.

Exit code: 0 all is done or equal, 1 a run failed or its repeat differs, 2 a mistake in the command,
3 not all is done."""

import json
import math
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from fp8.trained_precision import read_precision
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import write_json
from lib.machine import ROOT
from lib.text import grid, nearest
from lib.values import FilePath
from runtime.config import Config, apply_overrides, load_config, positive
from scaling import sweep
from scaling.cpu_kind import Instructions, Kind, computing_as, kind_for, kind_of
from scaling.declaration import write_declaration
from scaling.records import LAW_FOLDER, read_json
from scaling.run_states import arm_label, from_scratch
from scaling.study import Row, Study, expand, load_study

SCHEMA_VERSION = 1
BLOCK_KEYS = ("n_tokens", "as_trained", "bf16")  # of Entry.val_blocks, and of val_losses.npz
BLOCKS = 8  # of each source's validation sequences: sequence i belongs to block i mod 8
# Relative difference of a validation loss that is allowed on another kind of machine. Of 56 runs
# the median was .0012 and the largest .0098 (studies/cpu/elsewhere.py).
ELSEWHERE = 1e-2
# Assumed where no run of its kind is done: CPU seconds to start and end, a forward pass's share of
# a step's time.
START_S, FORWARD_SHARE = 10.0, 0.35
NOT_KEPT = ("layers_recipes", "layers_kernels", "layers_skipped")  # of summary.json's precision


@dataclass(frozen=True, kw_only=True)
class Options:
    study: FilePath  # a file such as configs/study_cpu.py
    run: bool = False  # train what is missing
    restore: bool = False  # write the rows as run folders below out/<study>
    repeat: str | None = None  # name of a run to train again
    only: str | None = None  # names and patterns of runs, with the trunks they branch off from
    # seconds from the command's start: the run under way saves and leaves in time
    limit: float | None = None
    out: FilePath = "out"  # holds <study>/<run>/
    rows: FilePath | None = None  # folder of runs.jsonl and study.json; none = studies/<study>
    # of the CPU's vector instructions: "pair" those that trained the BF16 run of the same size and
    # seed, where this CPU has them, "avx2" AVX2 alone, "native" all that it has
    instructions: Instructions = "pair"

    def __post_init__(self) -> None:
        problems = positive(self, "limit")
        if problems:
            raise UserError(problems[0])
        if self.run + self.restore + (self.repeat is not None) > 1:
            raise UserError("--run, --restore and --repeat are three commands: give one of them")
        if self.repeat is not None and self.instructions != "pair":
            raise UserError("--repeat computes as its row was: leave instructions= out")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of runs.jsonl: one finished run."""

    schema_version: int  # of this list of keys
    run: str  # its name
    machine: Kind  # that trained it
    python: str  # version
    numpy: str  # version
    # CPU seconds of its process: start, steps, evaluation; of its last start where it was resumed
    cpu_s: float
    # summary.json without the layers' recipes, kernels and reasons; its git_commit and torch are
    # those that trained it
    summary: dict
    # source -> n_tokens, as_trained, bf16 -> the sum over each block of validation sequences, in
    # tokens or nats
    val_blocks: dict[str, dict[str, list[float]]]


def main(arguments: list[str], started_at: float | None = None) -> int:
    """The exit code. `started_at`: when the command was started, by time.monotonic(); none =
    now."""
    return command(__doc__, Options, "study")(
        lambda options: ledger(options, started_at or time.monotonic())
    )(arguments)


def ledger(options: Options, started_at: float) -> int | str:
    study = load_study(options.study)
    rows = expand(study)
    folder = Path(options.out) / study.name
    home = Path(options.rows or ROOT / "studies" / study.name)
    entries = read_entries(home / "runs.jsonl")
    check_known(entries, rows, home)
    if options.repeat is not None:
        return repeat(options.repeat, rows, entries, options)
    if options.restore:
        restore(entries, home, folder)
        return f"{len(entries)} runs -> {folder}"
    if options.run:
        return run_missing(study, rows, entries, home, folder, options, started_at)
    return status(rows, entries, home)


# -------------------------------------------------------------------------------------------- rows


def read_entries(path: Path) -> dict[str, Entry]:
    """Name of a run -> its row; none where there is no file. Raises UserError naming the line that
    cannot be read."""
    entries: dict[str, Entry] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            entry = entry_of(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}:{number} is no row of a finished run ({type(error).__name__}: {error}):"
                " restore the file from the repository's history"
            ) from None
        if entry.run in entries:
            raise UserError(
                f"{path}:{number}: {entry.run} has a row already: keep the first of the two"
            )
        entries[entry.run] = entry
    return entries


def entry_of(content: dict) -> Entry:
    if content["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version {content['schema_version']}, not {SCHEMA_VERSION}")
    return Entry(**{**content, "machine": kind_of(content["machine"])})


def append(entry: Entry, path: Path) -> None:
    """Add a row: one write, so that a kill leaves it whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(entry), allow_nan=False, separators=(",", ":")) + "\n"
    with open(path, "a") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def check_known(entries: dict[str, Entry], rows: list[Row], home: Path) -> None:
    """Raise UserError where a row's run is no longer in the study, or is another one by now."""
    pairs = {row.run: row.pair_id for row in rows}
    for name, entry in entries.items():
        if pairs.get(name) != entry.summary["pair_id"]:
            raise UserError(
                f"{home / 'runs.jsonl'} has {name}, which the study no longer has as it was"
                " trained: runs may be added to a study, but nothing may change; give the changed"
                " study another name="
            )


def entry_from(run_dir: Path, cpu_s: float, kind: Kind) -> Entry:
    """The row of a finished run. kind: as which this machine computed it."""
    summary = read_json(run_dir / "summary.json")
    summary["precision"] = {
        key: value for key, value in summary["precision"].items() if key not in NOT_KEPT
    }
    return Entry(
        schema_version=SCHEMA_VERSION,
        run=run_dir.name,
        machine=kind,
        python=platform.python_version(),
        numpy=np.__version__,
        cpu_s=round(cpu_s, 1),
        summary=summary,
        val_blocks=blocks_of(run_dir / "val_losses.npz", sorted(summary["sources"])),
    )


def blocks_of(path: Path, sources: list[str]) -> dict[str, dict[str, list[float]]]:
    """Entry.val_blocks of a val_losses.npz, whose sources are numbered in alphabetical order."""
    blocks: dict[str, dict[str, list[float]]] = {}
    with np.load(path, allow_pickle=False) as file:
        columns = {key: file[key] for key in ("source", *BLOCK_KEYS)}
    for number, name in enumerate(sources):
        is_of_source = columns["source"] == number
        block = np.arange(is_of_source.sum()) % BLOCKS
        blocks[name] = {}
        for key in BLOCK_KEYS:
            sums = np.bincount(block, columns[key][is_of_source].astype(float))
            blocks[name][key] = [round(value, 4) for value in sums.tolist()]
    return blocks


def restore(entries: dict[str, Entry], home: Path, folder: Path) -> None:
    """Write study.json, frozen predictions and every row's summary.json and val_losses.npz below
    `folder`, where they are not there yet. Raises UserError where a prediction there is another.

    A restored run has a block of validation sequences where the run itself had each sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    if (home / "study.json").exists():
        shutil.copyfile(home / "study.json", folder / "study.json")
    _copy_predictions(home / LAW_FOLDER, folder / LAW_FOLDER)
    for name, entry in entries.items():
        run_dir = folder / name
        if (run_dir / "summary.json").exists():
            continue
        run_dir.mkdir(exist_ok=True)
        sources = [entry.val_blocks[source] for source in sorted(entry.val_blocks)]
        columns = {key: np.concatenate([part[key] for part in sources]) for key in BLOCK_KEYS}
        number = np.repeat(np.arange(len(sources)), [len(source["n_tokens"]) for source in sources])
        arrays: dict[str, Any] = {"source": number, **columns}
        np.savez(run_dir / "val_losses.npz", **arrays)
        write_json(run_dir / "summary.json", entry.summary)


def _copy_predictions(source: Path, target: Path) -> None:
    """Copy the frozen predictions in a folder, of losses and of gaps, to where they are not yet.
    Raises UserError where one there is another."""
    for path in sorted(source.glob("*prediction_*.json")):
        copy = target / path.name
        if not copy.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        elif copy.read_bytes() != path.read_bytes():
            raise UserError(
                f"{copy} and {path} are two predictions of one run: keep the one that was frozen"
                " first, and move the other away"
            )


# ---------------------------------------------------------------------------------------- training


def run_missing(
    study: Study,
    rows: list[Row],
    entries: dict[str, Entry],
    home: Path,
    folder: Path,
    options: Options,
    started_at: float,
) -> int:
    """Train the runs without a row, a trunk and then its branches, and add their rows as they
    finish; the exit code."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for the runs: more threads would sum in another order
    home.mkdir(parents=True, exist_ok=True)
    selected = sweep.choose(rows, sweep.Options(study=options.study, run=True, only=options.only))
    restore(entries, home, folder)
    declaration = sweep.declare(study, rows, folder)
    sweep.check_predicted(selected, folder)
    _copy_predictions(folder / LAW_FOLDER, home / LAW_FOLDER)
    if any(row.run not in entries for row in selected):
        sweep.check_data(rows, folder)
    write_declaration(declaration, folder)
    write_declaration(declaration, home)
    deadline = started_at + (options.limit or math.inf)
    has_failure = False
    for family in families(selected):
        outcome = _train_family(family, rows, entries, home, folder, options, deadline)
        if outcome == "done":
            remove_checkpoints(family, folder)
        has_failure |= outcome == "failed"
        if outcome == "stopped":
            break
    if has_failure:
        return 1
    return 3 if any(row.run not in entries for row in selected) else 0


def _train_family(
    family: list[Row],
    rows: list[Row],
    entries: dict[str, Entry],
    home: Path,
    folder: Path,
    options: Options,
    deadline: float,
) -> Literal["done", "failed", "stopped"]:
    """Train a trunk and its branches, and add their rows; up to the first one that does not
    finish. What another command has added to the rows meanwhile is not trained again."""
    for row in family:
        _take_over(entries, home, folder)
        if row.run in entries:
            continue
        kind = _kind_to_train(row, rows, entries, folder, options.instructions)
        with computing_as(kind):
            code, cpu_s = train(row, rows, folder, options, deadline)
        if not sweep.summary_of(row, folder):
            return "failed" if code == 1 else "stopped"
        _take_over(entries, home, folder)
        if row.run not in entries:
            entries[row.run] = entry_from(folder / row.run, cpu_s, kind)
            append(entries[row.run], home / "runs.jsonl")
    return "done"


def _kind_to_train(
    row: Row,
    rows: list[Row],
    entries: dict[str, Entry],
    folder: Path,
    instructions: Instructions,
) -> Kind:
    """As which this machine trains a run, noted beside the run's folder: it goes on, and branches
    off, as it was begun. Raises UserError where `instructions` ask for another kind than that."""
    begun = _begun_kind(folder, row.run)
    if begun is None and row.parent is not None:
        begun = _begun_kind(folder, row.parent)
    partner = _kind_of_partner(row, rows, entries)
    kind = kind_for(instructions, begun or partner)
    if begun is not None and not kind.is_like(begun):
        raise UserError(
            f"{row.run} was begun as on {begun}, here it would go on as on {kind}: go on as it was"
            f" begun (instructions=, that machine), or remove {folder / (row.parent or row.run)}"
        )
    if partner is not None and not kind.is_like(partner):
        print(
            f"{row.run} is computed as on {kind}, its BF16 run was as on {partner}: their gap will"
            " hold rounding too"
        )
    write_json(_kind_file(folder, row.run), asdict(kind))
    return kind


def _kind_file(folder: Path, run: str) -> Path:
    """Beside the run's folder: a run starts in an empty one."""
    return folder / f"{run}.kind.json"


def _begun_kind(folder: Path, run: str) -> Kind | None:
    """As which a run was begun here; None where it was not, or its folder was removed."""
    path = _kind_file(folder, run)
    is_begun = (folder / run / "config.json").exists()
    return kind_of(read_json(path)) if is_begun and path.exists() else None


def _kind_of_partner(row: Row, rows: list[Row], entries: dict[str, Entry]) -> Kind | None:
    """That of the BF16 run of the row's pair, else of another budget of its size and seed; none is
    done: None."""
    partners = [
        run
        for run in rows
        if run.is_baseline
        and not run.repeat
        and (run.size, run.seed) == (row.size, row.seed)
        and run.run in entries
    ]
    partners.sort(key=lambda run: run.pair_id != row.pair_id)
    return entries[partners[0].run].machine if partners else None


def _take_over(entries: dict[str, Entry], home: Path, folder: Path) -> None:
    """Add the rows that came since the last look to `entries`, and write them below `folder`."""
    on_disk = read_entries(home / "runs.jsonl")
    if on_disk.keys() != entries.keys():
        entries.update(on_disk)
        restore(entries, home, folder)


def families(rows: list[Row]) -> list[list[Row]]:
    """The rows in groups: a trunk with its branches, in the study's order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.parent or row.run, []).append(row)
    return list(groups.values())


def train(
    row: Row, rows: list[Row], folder: Path, options: Options, deadline: float
) -> tuple[int, float]:
    """Run one row to its end or to the deadline: (exit code as scaling/sweep.py has it, CPU
    seconds)."""
    cpu_s = children_s()
    how = sweep.Options(study=options.study, run=True, out=options.out, limit=options.limit)
    code = sweep.run(rows, [sweep.placed(row, folder)], folder, how, [[]], deadline)
    return code, children_s() - cpu_s


def children_s() -> float:
    """CPU seconds of the processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def remove_checkpoints(family: list[Row], folder: Path) -> None:
    """Of a trunk with all of its branches: their rows are what is left of them."""
    for row in family:
        shutil.rmtree(folder / row.run / "checkpoints", ignore_errors=True)


# --------------------------------------------------------------------------------- repeat, compare


def repeat(name: str, rows: list[Row], entries: dict[str, Entry], options: Options) -> int:
    """Train the run `name` from scratch in a temporary folder and compare it with its row; prints
    both, returns the code."""
    by_name = {row.run: row for row in rows}
    if name not in by_name:
        raise UserError(
            f"repeat={name!r} is no run of {options.study}{nearest(name, list(by_name))}"
        )
    if name not in entries:
        raise UserError(f"{name} has no row yet: nothing to compare a repeat with")
    os.environ["OMP_NUM_THREADS"] = "1"
    row = from_scratch(by_name[name])
    kind = kind_for("pair", entries[name].machine)
    with tempfile.TemporaryDirectory() as temporary, computing_as(kind):
        folder = Path(temporary)
        code, _ = train(row, rows, folder, replace(options, out=temporary), math.inf)
        if not sweep.summary_of(row, folder):
            reason = (
                (folder / f"{name}.log").read_text() if code == 1 else f"{name} was interrupted"
            )
            print(reason, file=sys.stderr)
            return 1
        again = entry_from(folder / name, 0.0, kind)
    comparison = compare(entries[name], again)
    print(comparison.text)
    return 0 if comparison.is_equal else 1


@dataclass(frozen=True)
class Comparison:
    is_equal: bool  # to the bit on the same kind of machine, within ELSEWHERE on another
    text: str  # for people


def compare(entry: Entry, again: Entry) -> Comparison:
    """Hold a repeat against its row."""
    lines = [["", "row", "repeat"]]
    is_same_kind = (
        entry.machine.is_like(again.machine) and entry.summary["torch"] == again.summary["torch"]
    )
    distances = []
    for name in ("loss_bf16", "loss_as_trained", "train_loss_last"):
        old, new = entry.summary[name], again.summary[name]
        lines.append([name, repr(old), repr(new)])
        # the last batch's loss alone is too noisy to be compared but to the bit
        if is_same_kind or name != "train_loss_last":
            distances.append(abs(new / old - 1))
    distance = max(distances)
    has_same_data = entry.summary["data_sha256"] == again.summary["data_sha256"]
    tolerance = 0.0 if is_same_kind else ELSEWHERE
    kind = "the same kind of machine"
    if not is_same_kind:
        kind = f"another kind of machine ({kind_words(again)}, the row's was {kind_words(entry)})"
    verdict = f"the largest relative difference is {distance:.2g}"
    if not is_same_kind:
        verdict += f", of {ELSEWHERE:g} that are allowed there"
    if distance == 0:
        verdict = "equal to the bit"
    if not has_same_data:
        verdict = "the training tokens are others: make the data again (studies/cpu/corpus.py)"
    text = f"{grid(lines)}\n\n{entry.run} on {kind}: {verdict}."
    return Comparison(has_same_data and distance <= tolerance, text)


def kind_words(entry: Entry) -> str:
    """For people: what decides a run's bits."""
    return f"{entry.machine} torch {entry.summary['torch']}"


# ------------------------------------------------------------------------------------------ status


def status(rows: list[Row], entries: dict[str, Entry], home: Path) -> str:
    """A table of what is done and of the CPU hours that remain, by size and arm."""
    timing = read_json(home / "timing.json") if (home / "timing.json").exists() else {}
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.size, arm_label(row)].append(row)
    lines = [["size", "arm", "runs", "done", "hours done", "hours left"]]
    total_done, total_left, n_unknown = 0.0, 0.0, 0
    for (size, arm), group in groups.items():
        hours = _hours_of(group, rows, entries, timing)
        total_done += hours.done_h
        if math.isnan(hours.left_h):
            n_unknown += len(group) - hours.runs_done
        else:
            total_left += hours.left_h
        counts = [str(len(group)), str(hours.runs_done)]
        hours_left = "unknown" if math.isnan(hours.left_h) else f"{hours.left_h:.2f}"
        lines.append([size, arm, *counts, f"{hours.done_h:.2f}", hours_left])
    done_runs = sum(row.run in entries for row in rows)
    remain = f"{total_left:.1f} h remain"
    if n_unknown:
        remain = f"at least {remain}, unknown for {n_unknown} runs"
    machines = sorted({kind_words(entry) for entry in entries.values()})
    text = [
        grid(lines),
        "",
        (
            f"{done_runs} of {len(rows)} runs are done, {total_done:.1f} h of one core;"
            f" {remain}. Machines: {'; '.join(machines) or 'none yet'}."
        ),
    ]
    mixed = mixed_pairs(entries)
    if mixed:
        text.append(
            "Pairs whose two runs are of different kinds of machines, so that their gap holds"
            f" rounding too: {mixed}."
        )
    return "\n".join(text)


class Hours(NamedTuple):
    """CPU hours of some runs of a study."""

    runs_done: int
    done_h: float  # as measured
    left_h: float  # of the others, estimated; nan: of some of them nothing is known


def _hours_of(group: list[Row], rows: list[Row], entries: dict[str, Entry], timing: dict) -> Hours:
    """Of the runs of a group; rows: all of the study."""
    done_s = [entries[row.run].cpu_s for row in group if row.run in entries]
    unfinished = [row for row in group if row.run not in entries]
    left_s = [seconds_of(row, rows, entries, timing) for row in unfinished]
    return Hours(len(done_s), sum(done_s) / 3600, sum(left_s) / 3600)


def mixed_pairs(entries: dict[str, Entry]) -> int:
    """FP8 runs whose BF16 partner was trained on another kind of machine."""
    kind_of_bf16 = {}
    fp8_entries = []
    for entry in entries.values():
        if not read_precision(entry.summary).is_bf16:
            fp8_entries.append(entry)
        elif not entry.summary["repeat"]:
            kind_of_bf16[entry.summary["pair_id"]] = kind_words(entry)
    count = 0
    for entry in fp8_entries:
        kind = kind_words(entry)
        count += kind_of_bf16.get(entry.summary["pair_id"], kind) != kind
    return count


def seconds_of(row: Row, rows: list[Row], entries: dict[str, Entry], timing: dict) -> float:
    """CPU seconds that a run will take: the median of its like, else by timing.json [microseconds a
    token]; nan: unknown."""
    finished = [candidate for candidate in rows if candidate.run in entries]
    measured = [entries[run.run].cpu_s for run in finished if is_like(row, run)]
    if measured:
        return median(measured)
    micros = timing.get("microseconds_per_token", {}).get(row.size, {}).get(row.recipe, math.nan)
    config = apply_overrides(_file_config(row.config), row.overrides)
    evaluated = 2 * config.eval.tokens * len(config.data.mixture)  # as trained, and in BF16
    return START_S + (row.own_tokens + FORWARD_SHARE * evaluated) * micros * 1e-6


@cache
def _file_config(path: str) -> Config:
    """The config that a file of the repository binds: hundreds of rows come from five files."""
    return load_config(ROOT / path)


def is_like(row: Row, second: Row) -> bool:
    """Whether two runs differ in seed or rate alone."""

    keys = ("size", "recipe", "tokens_per_param", "repeat")
    return all(getattr(row, key) == getattr(second, key) for key in keys)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
