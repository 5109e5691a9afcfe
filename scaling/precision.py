"""Measure what FP8 costs against BF16, run beside paired run on the same validation sequences.

    python scaling/precision.py out/study        # every finished run under it, into out/study/law
    python scaling/precision.py out/a_bf16 out/a_fp8 out=report loss=as_trained margin=0.25
    python scaling/precision.py out/study --all  # every table, else as many as 40 lines hold
    python scaling/precision.py out/study compare=mxfp8_e5m2:mxfp8    # one recipe minus another
    python scaling/precision.py out/study at=1.5e9:20           # freezes each gap at N:RATIO
    python scaling/precision.py out/study predict=cpu_1m_mxfp8_t5_s1   # that of a run to come
    python scaling/precision.py out/study --score               # holds the runs against it
    python scaling/precision.py --points losses.csv --arm precision --pair seed --loss val_loss

Writes the figures precision and, with three budgets at a size, budgets (gaps against tokens per
parameter). Prints each recipe's gap over all sizes with its verdict, which recipe is the best
(scaling/paired/ranking.py says by which rule), the gap per size beside the null (BF16 against BF16
with another seed, and with the same one rounded differently), what the gap costs in compute under
two laws. Intervals are over independent pairs and hold for this validation set.

A table of paired losses has --n and --d where it gives parameters and tokens; its folder for what
is written is --out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lib.command import command, run_command
from lib.errors import UserError
from lib.plots import write_with
from lib.text import listed
from lib.values import FilePath
from scaling import gap_predictions
from scaling.budget_figure import draw_budgets
from scaling.pages import format_page
from scaling.paired.differences import pairs_between
from scaling.paired.gap_law import fit_gaps
from scaling.paired.gaps import FinishedRun, Pair
from scaling.pairing import pair_runs
from scaling.precision_figure import draw_precision
from scaling.precision_result import PrecisionResult, analyse, baseline_laws, without_sizes
from scaling.precision_tables import format_tables
from scaling.reason_words import sentence_of, worded
from scaling.records import (
    Record,
    check_comparable,
    law_folder,
    mixed_weight_casts,
    read_runs,
    usable,
)
from scaling.table_pairs import TablePairs, read_table_pairs
from scaling.verdicts import read_margin

SHOWN = 5  # notes that the console gets without --all
FOR_TABLES = ("arm", "pair", "base", "d")  # options


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[FilePath, ...] = ()  # a folder of runs such as out/study, or run folders
    # folder for precision.json and the figures precision and budgets (default: PATH/law)
    out: FilePath | None = None
    # runs: bf16 (both arms through BF16 matmuls; the default) or as_trained. Table: its column
    loss: str = ""
    # per cent of the loss that counts as equivalent (default: the study's; here: after the fact)
    margin: float | None = None
    # runs: total or nonembed, which parameters N counts (as the study does). Table: N's column
    n: str = ""
    points: FilePath = ""  # a table of paired losses with a header line, instead of runs
    arm: str = ""  # table: column that names the precision
    # table: column whose equal text makes a pair, such as the seed or the run's name
    pair: str = ""
    # table: the baseline's text in the column of arms (default: bf16, bfloat16, baseline)
    base: str = ""
    d: str = ""  # table: column of training tokens
    predict: str = ""  # runs: an FP8 run to come, whose gap's prediction is frozen in out
    # N:RATIO such as 1.5e9:20, parameters and tokens for each; freezes each arm's gap there
    at: str = ""
    score: bool = False  # compare the frozen gaps in out with the pairs that have come
    # RECIPE:OTHER, two recipes (arms) whose paired difference is wanted, such as mxfp8_e5m2:mxfp8
    compare: tuple[str, ...] = ()
    all: bool = False  # print every table

    def __post_init__(self) -> None:
        if bool(self.points) == bool(self.paths):
            raise UserError(
                "give either run folders such as out/study, or a table with --points FILE"
            )
        if self.points:
            self._check_table()
        else:
            self._check_runs()

    def _check_table(self) -> None:
        for name in ("arm", "pair", "loss"):
            if not getattr(self, name):
                raise UserError(f"{name}= is missing: it names a column of the table")
        if bool(self.n) != bool(self.d):
            raise UserError("give n= and d= both, or neither: a gap stands at a size and a budget")
        if self.predict:
            raise UserError("predict= names a run of a study: for a table give at=N:RATIO")
        if (self.at or self.score) and not self.n:
            raise UserError("at= and score need the table's columns n= and d=")

    def _check_runs(self) -> None:
        strange = [name for name in FOR_TABLES if getattr(self, name)]
        if strange:
            raise UserError(f"{' and '.join(strange)}: only for a table of points=FILE")
        for name, value, words in (
            ("n", self.n, ("total", "nonembed")),
            ("loss", self.loss, ("bf16", "as_trained")),
        ):
            if value and value not in words:
                raise UserError(f"{name}={value!r} must be {' or '.join(words)} for runs")


@dataclass(frozen=True)
class Notes:
    """What was left out or is worth knowing, a sentence each."""

    warnings: list[str]  # what may make the result another than was meant
    remarks: list[str]

    def format(self, is_all: bool) -> str:
        lines = [f"WARNING: {warning}" for warning in self.warnings] + self.remarks
        if len(lines) > SHOWN and not is_all:
            lines = [*lines[:SHOWN], f"{len(lines) - SHOWN} more in precision.json"]
        return "\n".join(lines)


@command(__doc__, Options, "paths")
def main(options: Options) -> str:
    folder = law_folder(options.paths, options.out)
    if options.points:
        return _analyse_table(options, folder)
    return _analyse_runs(options, folder)


def _analyse_runs(options: Options, folder: Path) -> str:
    evaluation = options.loss or "bf16"
    all_records, skipped = read_runs(options.paths, options.n or None)
    records, left_out = usable(all_records)
    if not records:
        raise UserError("\n".join(["no run is left to compare", *left_out]))
    check_comparable(records)
    pairs, unpaired = pair_runs(records)
    fp8_pairs = [pair for pair in pairs if not pair.fp8.is_baseline]
    warnings = left_out + unpaired + mixed_weight_casts(records)
    if not fp8_pairs:
        reasons = [*skipped, *warnings]
        raise UserError(
            "\n".join(["no BF16/FP8 pair among these runs: there is no gap to report", *reasons])
        )
    frozen = gap_predictions.load(folder)
    allowed, held_out = gap_predictions.without_held_out(fp8_pairs, frozen)
    held_runs = [pair.fp8.run_id for pair in held_out]
    remarks = list(skipped)
    if held_runs:
        remarks.append(f"held out of the law of the gap: {listed(held_runs)}")
    # before anything is written
    margin = read_margin(records, options.margin)
    compared = _recipes_compared(options.compare, fp8_pairs, "bf16")
    lines = _freeze(options, records, allowed, folder, evaluation)
    if options.score:
        lines += gap_predictions.score(folder, fp8_pairs)
    result = analyse(records, pairs, evaluation, margin, held_out=held_runs, compared=compared)
    inputs = [
        {"run_id": run.run_id, "recipe": run.recipe, "summary_sha256": run.summary_sha256}
        for run in records
    ]
    notes = [*skipped, *warnings, *remarks[len(skipped) :]]
    result = replace(result, notes=notes, inputs=inputs)
    return _write(result, Notes(warnings, remarks), folder, lines, options.all)


def _analyse_table(options: Options, folder: Path) -> str:
    """The same analysis of a table's pairs; without N and D what needs neither: gap over all pairs,
    its test, ranking."""
    path = Path(options.points)
    table_pairs = read_table_pairs(
        path, options.arm, options.pair, options.loss, options.n, options.d, options.base
    )
    frozen = gap_predictions.load(folder) if options.n else []
    allowed, held_out = gap_predictions.without_held_out(table_pairs.pairs, frozen)
    held_runs = [pair.fp8.run_id for pair in held_out]
    # before anything is written
    margin = read_margin([], options.margin)
    baseline = table_pairs.columns.baseline
    compared = _recipes_compared(options.compare, table_pairs.pairs, baseline)
    lines = _freeze(options, table_pairs.runs, allowed, folder, "bf16")
    if options.score:
        lines += gap_predictions.score(folder, table_pairs.pairs)
    result = analyse(
        table_pairs.runs,
        table_pairs.pairs,
        "bf16",
        margin,
        columns=table_pairs.columns,
        held_out=held_runs,
        compared=compared,
    )
    remarks = _table_remarks(table_pairs, held_runs, bool(options.n))
    if not options.n:
        result = replace(result, **without_sizes())
    inputs = [{"file": path.name, "sha256": table_pairs.sha256}]
    result = replace(result, notes=[*table_pairs.doubts, *remarks], inputs=inputs)
    return _write(result, Notes(table_pairs.doubts, remarks), folder, lines, options.all)


def _table_remarks(table_pairs: TablePairs, held_runs: list[str], has_sizes: bool) -> list[str]:
    remarks = list(table_pairs.notes)
    if held_runs:
        remarks.append(f"held out of the law of the gap: {listed(held_runs)}")
    if not has_sizes:
        remarks.append(
            "without n= and d= there are no sizes: no null of other seeds, no cost in compute, no"
            " figure"
        )
    return remarks


def _recipes_compared(
    texts: Sequence[str], pairs: Sequence[Pair], baseline: str
) -> list[tuple[str, str]]:
    """The two recipes of each text of compare=, as the runs call them; baseline: the arm that all
    gaps are to. Raises UserError where one has no pair, or the two share none."""
    recipes = sorted({pair.fp8.recipe for pair in pairs})
    compared = []
    for text in dict.fromkeys(texts):
        recipe, minus = _two_recipes(text, recipes, baseline)
        if not pairs_between(pairs, recipe, minus):
            raise UserError(
                f"compare={text}: {recipe} and {minus} share no {baseline} run, so nothing is"
                " paired; train both at one size, budget and seed"
            )
        compared.append((recipe, minus))
    return compared


def _two_recipes(text: str, recipes: Sequence[str], baseline: str) -> tuple[str, str]:
    """Those at both sides of a colon; names may hold colons themselves."""
    splits = [(text[:i], text[i + 1 :]) for i, letter in enumerate(text) if letter == ":"]
    different = [names for names in splits if all(names) and names[0] != names[1]]
    with_pairs = [names for names in different if set(names) <= set(recipes)]
    if len(with_pairs) == 1:
        return with_pairs[0]
    if with_pairs:
        readings = listed([f"{recipe} and {minus}" for recipe, minus in with_pairs])
        raise UserError(
            f"compare={text} can be read as {readings}: give one of the arms a name without a colon"
        )
    raise UserError(_why_not_compared(text, different, recipes, baseline))


def _why_not_compared(
    text: str, different: Sequence[tuple[str, str]], recipes: Sequence[str], baseline: str
) -> str:
    """Of a text without two recipes that have pairs; different: its readings as two names."""
    for names in different:
        if baseline in names and set(names) <= {baseline, *recipes}:
            return (
                f"compare={text}: {baseline} is what every gap is to, so the other's gap is the"
                " difference already; compare two of the others"
            )
    if len(different) == 1:
        absent = [name for name in different[0] if name not in recipes]
        return f"compare={text}: no pair has {' or '.join(absent)}; there are {listed(recipes)}"
    return (
        f"compare={text} must be two different recipes with a colon between them, such as"
        f" mxfp8_e5m2:mxfp8; there are {listed(recipes)}"
    )


def _freeze(
    options: Options,
    records: Sequence[FinishedRun],
    allowed: Sequence[Pair],
    folder: Path,
    evaluation: str,
) -> list[str]:
    """Freeze the gaps that predict= and at= ask for; lines to print."""
    if not options.predict and not options.at:
        return []
    paired = {pair.bf16.run_id for pair in allowed}
    laws = baseline_laws([run for run in records if run.run_id in paired], evaluation)
    fits = fit_gaps(allowed, laws.own, sentence_of(laws.no_own_law) or "", evaluation)
    targets = []
    if options.predict:
        runs = [record for record in records if isinstance(record, Record)]
        targets.append(gap_predictions.target_of_run(options.predict, runs))
    if options.at:
        targets += gap_predictions.targets_at(options.at, list(fits))
    return gap_predictions.freeze(targets, fits, allowed, records, folder, evaluation, laws.own)


def _write(
    result: PrecisionResult, notes: Notes, folder: Path, lines: list[str], is_all: bool
) -> str:
    """Write the figures and precision.json; the page. lines: what is said of predictions."""
    figure = draw_precision(result) if result.sizes else None
    wrote = [write_with(folder, "precision", figure, {"precision.json": worded(result)})]
    budgets = draw_budgets(result)
    if budgets is not None:
        wrote.append(write_with(folder, "budgets", budgets, {}))
    else:  # one of other pairs would stand beside the new precision.json
        for form in ("png", "svg"):
            (folder / f"budgets.{form}").unlink(missing_ok=True)
    headline, *blocks = format_tables(result)
    return format_page(
        [headline, notes.format(is_all)], blocks, "\n".join([*lines, *wrote]), is_all
    )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
