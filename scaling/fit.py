"""Fit scaling laws to finished runs, one precision recipe at a time, or to a table of published
points.

    python scaling/fit.py out/study                     # every finished run under it, to its law/
    python scaling/fit.py out/a_bf16 out/a_fp8 --out report loss=as_trained seed_sd=0.0005
    python scaling/fit.py out/study --predict gpt1p5b_tensorwise_t20_s1337  # before it is started
    python scaling/fit.py out/study --score             # compares it once the run is there
    python scaling/fit.py --points p.csv --n "Model Size" --c FLOP --loss loss --out DIR
    python scaling/fit.py --points p.csv --n N --d D --loss val --drop-highest 5 --out DIR
    python scaling/fit.py --points p.csv --n N --d D --loss val --where data=c4,data=rw --out DIR

Prints the headline after its warnings; with --all every law with its certificate and what other
choices would have given. Writes figure.png, figure.svg, then law.json. A table is text with a
header, separated by commas, tabs, semicolons or spaces, or a chart exported from W&B (a column for
each run, of which the last value counts; --runs TABLE gives their N and D). Losses are taken as
nats per token, counts as they stand, and nothing is converted."""

import os
from pathlib import Path

if __name__ == "__main__":
    # Before numpy reads it: thousands of tiny fits are ten times slower when BLAS splits each over
    # threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.command import command, run_command
from lib.errors import UserError
from lib.plots import write_with
from lib.values import FilePath
from scaling import predict, records
from scaling.groups import Group, fit_group, fit_points, seed_noise
from scaling.law_figure import draw
from scaling.law_file import SeedNoise, laws_of_runs, laws_of_table
from scaling.law_page import page
from scaling.law_words import refusal_words
from scaling.paired.gaps import Pair
from scaling.pairing import pair_runs
from scaling.predictions import held_of, held_out, load
from scaling.records import Record
from scaling.table_points import read_points

FOR_RUNS = ("seed_sd", "predict", "score")  # of Options
FOR_A_TABLE = ("d", "c", "cluster", "drop_highest", "where", "runs")


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[FilePath, ...] = ()  # run folders such as out/RUN, or folders that hold them
    out: FilePath = ""  # folder for law.json, figure.png, figure.svg (one folder of runs: its law/)
    # runs: total or nonembed, which parameters N counts (as the study does). Table: N's column
    n: str = ""
    # runs: bf16 (through BF16 matmuls; the default) or as_trained. Table: the column of losses
    loss: str = ""
    # runs: SD of ln(loss) between seeds, a floor in the intervals (estimated from seeds)
    seed_sd: float | None = None
    predict: str = ""  # runs: a run to come, whose prediction is frozen in out
    score: bool = False  # runs: compare the predictions in out with the runs that have come
    points: FilePath = ""  # a table with a header line, instead of runs
    d: str = ""  # table: column of training tokens; without c, C = 6 N D
    # table: column of training FLOPs; without d, D = C / (6 N). Neither: the power law in N alone
    c: str = ""
    # table: a second table, a row for each run that the first's column "run" names
    runs: FilePath = ""
    cluster: str = ""  # table: column that names the training run; its points are not independent
    drop_highest: int = 0  # table: how many of the highest losses to leave out
    # table: COL=VALUE,..: keep rows with these; two values of one column keep either
    where: tuple[str, ...] = ()
    insist: bool = False  # headline L(N, D) even where it does not fit
    all: bool = False  # print everything

    def __post_init__(self) -> None:
        if bool(self.points) == bool(self.paths):
            raise UserError(
                "give either run folders such as out/RUN, a folder that holds them, or a table with"
                " --points FILE"
            )
        misplaced = [
            name for name in (FOR_RUNS if self.points else FOR_A_TABLE) if getattr(self, name)
        ]
        if misplaced:
            place = "runs" if self.points else "a table of points=FILE"
            raise UserError(f"{' and '.join(misplaced)}: only for {place}")
        self._check_word("n", self.n, ("total", "nonembed"))
        self._check_word("loss", self.loss, ("bf16", "as_trained"))

    def _check_word(self, name: str, value: str, words: tuple[str, ...]) -> None:
        """n= and loss= name columns of a table, and take these words for runs."""
        if self.points and not value:
            raise UserError(f"{name}= is missing: it names a column of the table")
        if not self.points and value not in ("", *words):
            raise UserError(f"{name}={value!r} must be {' or '.join(words)} for runs")


@command(__doc__, Options, "paths")
# On its way a search may try powers that overflow; the certificate judges where it ends, not
# numpy's warnings.
@np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
def main(options: Options) -> None:
    folder = records.law_folder(options.paths, options.out)
    if options.paths:
        _fit_runs(options, folder)
    else:
        _fit_table(options, folder)


def _fit_table(options: Options, folder: Path) -> None:
    selection = read_points(
        options.points,
        options.n,
        options.loss,
        options.d,
        options.c,
        options.where,
        options.drop_highest,
        options.cluster,
        options.runs,
    )
    group = fit_points(
        selection.points,
        Path(options.points).name,
        selection.axes,
        insist=options.insist,
        columns=selection.run_columns,
    )
    group = replace(group, places=tuple(f"line {line}" for line in selection.lines))
    if not any(fit.is_fitted for fit in group.laws.values()):
        raise UserError(
            f"{options.points}: no law can be fitted"
            f" ({refusal_words(group.laws['power_n'].reason)}): give points of several sizes"
        )
    law = laws_of_table(group, selection.source, selection.notes)
    write_with(folder, "figure", draw([group], [], "loss"), {"law.json": law})
    _print([group], selection.notes, [], folder, options.all)


# -------------------------------------------------------------------------------------- of runs


@dataclass(frozen=True)
class Runs:
    """The runs at hand, and which of them enter a fit."""

    finished: list[Record]  # all that have ended
    usable: list[Record]  # fitted ones and those held out
    fitted: list[Record]
    held: list[Record]  # held out of every fit
    notes: list[str]  # why the others are in none


def _fit_runs(options: Options, folder: Path) -> None:
    loss_key = f"loss_{options.loss or 'bf16'}"
    predictions = load(folder)
    runs = _read_runs(options, predictions)
    estimate, degrees = seed_noise(runs.fitted, loss_key)
    seed_sd = (estimate or 0.0) if options.seed_sd is None else options.seed_sd
    noise = SeedNoise(estimate, degrees, seed_sd)
    convention = runs.fitted[0].convention
    groups = [
        fit_group(
            [run for run in runs.fitted if run.recipe == recipe],
            loss_key,
            seed_sd,
            insist=options.insist,
            held=held_of(recipe, runs.held, predictions, loss_key, convention),
        )
        for recipe in _recipes(runs.fitted)
    ]
    run_pairs, pair_notes = _pairs(runs.fitted)
    notes = runs.notes + pair_notes
    closing = [_noise_line(noise), _gaps_line(run_pairs)]
    if options.predict:
        frozen = predict.freeze(options.predict, groups, runs.finished, folder, loss_key)
        closing += predict.describe(frozen)
    if options.score:
        closing += predict.score(folder, runs.usable)
    law = laws_of_runs(groups, loss_key, noise, notes)
    write_with(folder, "figure", draw(groups, run_pairs, loss_key), {"law.json": law})
    _print(groups, notes, closing, folder, options.all)


def _read_runs(options: Options, predictions: Sequence[predict.Prediction]) -> Runs:
    """The runs that may be compared. Raises UserError where none is left."""
    finished, notes = records.read_runs(options.paths, options.n)
    usable = finished
    for sieve in (records.usable, records.from_scratch, records.without_repeats):
        usable, reasons = sieve(usable)
        notes += reasons
    held = held_out(usable, predictions)
    fitted = [run for run in usable if run not in held]
    notes += [f"held out of every fit: {run.run_id}" for run in held]
    if not fitted:
        raise UserError("\n".join(["no run is left to fit", *notes]))
    records.check_comparable(usable)
    notes += records.mixed_weight_casts(usable)
    return Runs(finished, usable, fitted, held, notes)


def _recipes(runs: Sequence[Record]) -> list[str]:
    """The recipes of the runs, BF16 first."""
    recipes = {run.recipe for run in runs}
    baselines = {run.recipe for run in runs if run.is_baseline}
    return sorted(recipes, key=lambda recipe: (recipe not in baselines, recipe))


def _pairs(runs: Sequence[Record]) -> tuple[list[Pair], list[str]]:
    """(the BF16/FP8 pairs, notes on those that cannot be compared)."""
    try:
        return pair_runs(runs)
    except UserError as error:  # the laws do not need the losses of single sequences
        return [], [f"no paired gap: {error}"]


def _noise_line(noise: SeedNoise) -> str:
    sd = "unknown"
    if noise.estimate is not None:
        sd = f"SD {100 * noise.estimate:.3f} % of the loss"
    return (
        f"Seed noise: {sd} from {noise.degrees_of_freedom} degrees of freedom; intervals rest on at"
        f" least {100 * noise.used:.3f} % (seed_sd=)"
    )


def _gaps_line(run_pairs: Sequence[Pair]) -> str:
    gaps = [pair.gap["bf16"].percent for pair in run_pairs]
    if not gaps:
        return "No BF16/FP8 pair among these runs."
    return (
        f"{len(gaps)} BF16/FP8 pairs, gaps of {min(gaps):+.3f} to {max(gaps):+.3f} % in BF16;"
        " scaling/precision.py judges them"
    )


def _print(
    groups: list[Group], notes: list[str], closing: list[str], folder: Path, is_all: bool
) -> None:
    wrote = f"wrote {folder / 'law.json'}, figure.png, figure.svg"
    if not is_all:
        wrote += "; --all prints every law and table"
    print("\n".join(page(groups, notes, closing, is_all)), "", wrote, sep="\n")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
