"""The result tables of docs/study.md, from the study's finished runs and scored predictions.

    python studies/cpu/tables.py out/cpu

The folder is what `python scaling/ledger.py configs/study_cpu.py --restore` writes. The tables:

1. Gap of each arm to BF16 by size, as scaling/precision.py measures it: 100 ln(L_FP8 / L_BF16),
   both evaluated in BF16, the mean over a seed's budgets, ± half a 95 % t-interval over seeds.
2. The same at each budget, of tensorwise and of the control.
3. How much the gap changes when the tokens are doubled.
4. One arm's gap minus another's, over the BF16 runs that both stand beside.
5. The runs in which the guard skipped steps or went back to a checkpoint.
6. The gap of pairs whose runs skipped equally many steps, and of others.
7. How far BF16 runs of one seed lie apart whose loss is summed in other parts.
8. The runs of the largest size against the predictions that were frozen before them, with the
   scores of fit.py and precision.py that lie in studies/cpu/law.
9. The gap at sizes far beyond, extrapolated by each form of its law; frozen in the same folder."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.command import command, run_command
from lib.errors import UserError
from lib.machine import ROOT
from lib.text import grid, si
from lib.values import FilePath
from scaling import gap_predictions, predictions
from scaling.paired.differences import pairs_between
from scaling.paired.estimates import Estimate
from scaling.paired.gaps import FinishedRun, Pair, mean_gap, slope_over_tokens
from scaling.pairing import pair_runs
from scaling.records import Record, read_json, read_runs, usable
from scaling.typed_json import from_json

LAW = ROOT / "studies/cpu/law"  # frozen predictions and their scores
SIZES = ("30k", "101k", "212k", "529k", "1m")
RUN = re.compile(rf"cpu_(?P<size>{'|'.join(SIZES)})_\w+_t(?P<budget>\d+)_s\d+")
CONTROL = "nvfp4"
ARMS = (
    "tensorwise",
    "rowwise",
    "mxfp8",
    "mxfp8_e5m2",
    "tensorwise_gi_hp",
    "mxfp8_norms",
    CONTROL,
)
COMPARED = (  # an arm, and the one whose gap is subtracted from its own
    ("mxfp8_e5m2", "mxfp8"),
    ("mxfp8", "tensorwise"),
    ("tensorwise_gi_hp", "tensorwise"),
    ("rowwise", "tensorwise"),
    ("mxfp8_norms", "mxfp8"),
)
BY_BUDGET = ("tensorwise", CONTROL)  # the arms whose gap is shown at each budget

Table = list[list[str]]  # rows of cells, the header first


@dataclass(frozen=True, kw_only=True)
class Options:
    folder: FilePath  # of the study's runs, such as out/cpu


@command(__doc__, Options, "folder")
def main(options: Options) -> str:
    all_records, skipped = read_runs([options.folder])
    records, left_out = usable(all_records)
    pairs_and_nulls, unpaired = pair_runs(records)
    pairs = [pair for pair in pairs_and_nulls if not pair.fp8.is_baseline]
    nulls = [pair for pair in pairs_and_nulls if pair.fp8.is_baseline]
    tables = [
        gap_table(pairs),
        budget_table(pairs),
        growth_table(pairs),
        difference_table(pairs),
        guard_table(records),
        skip_table(pairs),
        null_table(nulls),
        prediction_table(LAW),
        extrapolation_table(LAW),
    ]
    return "\n\n".join([*map(grid, tables), *skipped, *left_out, *unpaired])


# -------------------------------------------------------------------------------- measured tables


def gap_table(pairs: Sequence[Pair]) -> Table:
    table = [["arm (seeds)", *SIZES, "all sizes"]]
    for arm, of_arm in _by_arm(pairs):
        counts = [str(_seed_count(of_size)) for of_size in _by_size(of_arm)]
        table.append([f"{arm} ({', '.join(counts)})", *_cells(of_arm, _gap)])
    return table


def budget_table(pairs: Sequence[Pair]) -> Table:
    budgets = _budgets(pairs)
    table = [["arm", "tokens per parameter", *SIZES]]
    for arm, of_arm in _by_arm(pairs):
        if arm not in BY_BUDGET:
            continue
        for budget in budgets:
            at_budget = [pair for pair in of_arm if _budget(pair) == budget]
            table.append([arm, str(budget), *map(_gap, _by_size(at_budget))])
    return table


def growth_table(pairs: Sequence[Pair]) -> Table:
    table = [["change per doubling", *SIZES, "all sizes"]]
    for arm, of_arm in _by_arm(pairs):
        table.append([arm, *_cells(of_arm, _growth)])
    return table


def difference_table(pairs: Sequence[Pair]) -> Table:
    table = [["difference", *SIZES, "all sizes"]]
    for arm, minus in COMPARED:
        table.append([f"{arm} minus {minus}", *_cells(pairs_between(pairs, arm, minus), _gap)])
    return table


def guard_table(records: Sequence[Record]) -> Table:
    """Of the study's runs alone: others, which stand in no pair, are named below the tables."""
    of_study: list[Record] = []
    by_size: dict[str, list[Record]] = {size: [] for size in SIZES}
    for record in records:
        match = RUN.fullmatch(record.run_id)
        if match is not None:
            of_study.append(record)
            by_size[match["size"]].append(record)
    header = ["the guard's skipped steps", "runs", "with skipped steps", "most in a run"]
    table = [[*header, "rolled back"]]
    for size, of_size in by_size.items():
        if of_size:
            table.append([size, *_guard_counts(of_size)])
    table.append(["all sizes", *_guard_counts(of_study)])
    return table


def _guard_counts(records: Sequence[Record]) -> list[str]:
    skipped = [record.summary["skipped_steps"] for record in records]
    n_rolled_back = sum(record.summary["rollbacks"] > 0 for record in records)
    n_with_skips = sum(n > 0 for n in skipped)
    counts = (len(records), n_with_skips, max(skipped, default=0), n_rolled_back)
    return [str(count) for count in counts]


def skip_table(pairs: Sequence[Pair]) -> Table:
    """Without the control, whose gap is ten times as large."""
    of_fp8 = [pair for pair in pairs if pair.fp8.recipe != CONTROL]
    equal = [pair for pair in of_fp8 if _skipped(pair.fp8) == _skipped(pair.bf16)]
    unequal = [pair for pair in of_fp8 if _skipped(pair.fp8) != _skipped(pair.bf16)]
    table = [["FP8 and BF16 run of a pair", "pairs", "gap"]]
    for label, group in (("skipped equally many steps", equal), ("did not", unequal)):
        table.append([label, str(len(group)), _gap(group)])
    return table


def null_table(nulls: Sequence[Pair]) -> Table:
    """The root mean square of 100 ln(L / L), by tokens per parameter."""
    table = [["null, at tokens per parameter", "pairs", "root mean square"]]
    for budget in _budgets(nulls):
        at_budget = [null for null in nulls if _budget(null) == budget]
        table.append([str(budget), str(len(at_budget)), _root_mean_square(at_budget)])
    if nulls:
        table.append(["all", str(len(nulls)), _root_mean_square(nulls)])
    return table


def _root_mean_square(pairs: Sequence[Pair]) -> str:
    squares = [pair.gap["bf16"].log_percent ** 2 for pair in pairs]
    return f"{math.sqrt(sum(squares) / len(squares)):.2f}"


def _by_arm(pairs: Sequence[Pair]) -> list[tuple[str, list[Pair]]]:
    """The pairs of each arm that has some, in the order of ARMS. Raises UserError for another."""
    by_arm: dict[str, list[Pair]] = {arm: [] for arm in ARMS}
    for pair in pairs:
        if pair.fp8.recipe not in by_arm:
            raise UserError(f"{pair.fp8.run_id} is of no arm of configs/study_cpu.py")
        by_arm[pair.fp8.recipe].append(pair)
    return [(arm, of_arm) for arm, of_arm in by_arm.items() if of_arm]


def _by_size(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The pairs at each of SIZES."""
    return [
        [pair for pair in pairs if _read_name(pair.fp8.run_id)["size"] == size] for size in SIZES
    ]


def _budgets(pairs: Sequence[Pair]) -> list[int]:
    return sorted({_budget(pair) for pair in pairs})


def _budget(pair: Pair) -> int:
    """Tokens per parameter."""
    return int(_read_name(pair.fp8.run_id)["budget"])


def _read_name(run_id: str) -> re.Match[str]:
    match = RUN.fullmatch(run_id)
    if match is None:
        raise UserError(f"{run_id} is no run of configs/study_cpu.py, whose tables these are")
    return match


def _cells(pairs: Sequence[Pair], write: Callable[[Sequence[Pair]], str]) -> list[str]:
    """What is written of the pairs at each of SIZES, and of all of them."""
    return [*map(write, _by_size(pairs)), write(pairs)]


def _gap(pairs: Sequence[Pair]) -> str:
    """ "" where there is no pair."""
    return format_estimate(mean_gap(pairs, "bf16", "log_percent")) if pairs else ""


def _growth(pairs: Sequence[Pair]) -> str:
    """ "" where no seed has two budgets."""
    slope = slope_over_tokens(pairs, "bf16") if pairs else None
    return "" if slope is None else format_estimate(slope)


def format_estimate(estimate: Estimate) -> str:
    """The mean and half its 95 % interval; a single value has none."""
    if estimate.half is None:
        return f"{estimate.mean:+.3f}"
    return f"{estimate.mean:+.3f} ± {estimate.half:.3f}"


def _seed_count(pairs: Sequence[Pair]) -> int:
    return len({pair.fp8.seed for pair in pairs})


def _skipped(run: FinishedRun) -> int:
    """Steps that the guard skipped."""
    assert isinstance(run, Record)
    return run.summary["skipped_steps"]


# ---------------------------------------------------------------------------- scored predictions


def prediction_table(folder: Path) -> Table:
    """A row for each arm and budget that was predicted; the second seed of a run has the same
    prediction, and is in the score of the first."""
    gaps = gap_predictions.load(folder)
    rows: dict[tuple[str, int], list[str]] = {}
    for prediction in predictions.load(folder):
        target = prediction.file.target
        row = [
            target.recipe,
            f"{target.tokens / target.params_total:.0f}",
            f"{prediction.loss:.3f} ({prediction.low:.3f} to {prediction.high:.3f})",
            _losses(folder / f"score_{prediction.target}.json"),
        ]
        of_gap = [
            _gap_cells(gap, folder / f"gap_score_{gap.target.name}.json")
            for gap in gaps
            if gap.target.is_of(target.recipe, target.params_total, target.tokens)
        ]
        row += of_gap[0] if of_gap else ["", ""]  # BF16 has no gap
        rows.setdefault((target.recipe, target.tokens), row)
    header = ["arm", "tokens per parameter", "loss, predicted", "seeds 1, 2"]
    header += ["gap, predicted", "measured"]
    arms = ["bf16", *ARMS]
    places = sorted(rows, key=lambda place: (arms.index(place[0]), place[1]))
    return [header, *(rows[place] for place in places)]


def _losses(path: Path) -> str:
    """The measured losses of a score, by seed; "" while there is none."""
    if not path.exists():
        return ""
    runs = from_json(predictions.ScoreFile, read_json(path)).runs
    return ", ".join(f"{run.loss:.3f}{_outside(run.inside)}" for run in runs)


def _gap_cells(prediction: gap_predictions.GapPrediction, path: Path) -> list[str]:
    """The predicted gap, with the interval of the mean of so many pairs as were measured, and the
    measured one."""
    forecast = prediction.forecast
    if not path.exists():
        return [f"{forecast.gap:+.2f}", ""]
    score = from_json(gap_predictions.GapScore, read_json(path))
    interval = f"{score.predicted_low:+.2f} to {score.predicted_high:+.2f}"
    measured = f"{score.measured:+.2f}{_outside(score.is_inside)}"
    return [f"{score.predicted:+.2f} ({interval})", measured]


def extrapolation_table(folder: Path) -> Table:
    """A row for each arm and size whose gap was frozen by precision.py at=N:RATIO."""
    forms = ("constant", "power law", "effective parameters")
    table = [["arm", "parameters, extrapolated", *forms, "all, 95 % interval"]]
    places = [
        prediction
        for prediction in gap_predictions.load(folder)
        if RUN.fullmatch(prediction.target.name) is None
    ]
    places.sort(key=lambda place: (ARMS.index(place.target.recipe), place.target.N))
    for place in places:
        forecast = place.forecast
        gap_by_form = {by_form.form: by_form.gap for by_form in forecast.forecasts}
        table.append(
            [
                place.target.recipe,
                f"{si(forecast.N)}, {forecast.beyond_sizes:,.0f}-fold",
                *(f"{gap_by_form[form]:+.2f}" for form in forms),
                f"{forecast.low:.2f} to {forecast.high:.2f}",
            ]
        )
    return table


def _outside(is_inside: bool) -> str:
    return "" if is_inside else " (outside)"


if __name__ == "__main__":
    sys.exit(run_command(main))
