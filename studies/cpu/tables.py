"""The result tables of docs/study.md, from the study's finished runs.

    python scaling/ledger.py configs/study_cpu.py --restore     # the rows as run folders -> out/cpu
    python studies/cpu/tables.py out/cpu

The first table has each arm's gap to BF16 by size, as scaling/precision.py measures it:
100 ln(L_FP8 / L_BF16), both evaluated in BF16, the mean over a seed's budgets, ± half a 95 %
t-interval over seeds. The second has one arm's gap minus another's, over the BF16 runs that both
stand beside. The third has the runs of the largest size against the predictions that were frozen
before them; intervals of gaps are for the mean of as many pairs as were measured."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.command import command, run_command
from lib.errors import UserError
from lib.text import grid
from lib.values import FilePath
from scaling import gap_predictions, predictions
from scaling.paired.differences import pairs_between
from scaling.paired.estimates import Estimate
from scaling.paired.gaps import Pair, mean_gap, slope_over_tokens
from scaling.pairing import pair_runs
from scaling.records import LAW_FOLDER, Record, read_runs, usable

SIZES = ("30k", "101k", "212k", "529k", "1m")
ARMS = (
    "tensorwise",
    "rowwise",
    "mxfp8",
    "mxfp8_e5m2",
    "tensorwise_gi_hp",
    "mxfp8_norms",
    "nvfp4",
)
COMPARED = (  # an arm, and the one whose gap is subtracted from its own
    ("mxfp8_e5m2", "mxfp8"),
    ("mxfp8", "tensorwise"),
    ("tensorwise_gi_hp", "tensorwise"),
    ("rowwise", "tensorwise"),
    ("mxfp8_norms", "mxfp8"),
)
RUN = re.compile(r"cpu_(?P<size>[0-9a-z]+)_\w+_t\d+_s\d+")


@dataclass(frozen=True, kw_only=True)
class Options:
    folder: FilePath  # of the study's runs, such as out/cpu


@command(__doc__, Options, "folder")
def main(options: Options) -> str:
    records, _ = usable(read_runs([options.folder])[0])
    pairs = [pair for pair in pair_runs(records)[0] if not pair.fp8.is_baseline]
    tables = [gap_table(pairs), difference_table(pairs)]
    tables.append(prediction_table(records, pairs, Path(options.folder) / LAW_FOLDER))
    return "\n\n".join(map(grid, tables))


def gap_table(pairs: Sequence[Pair]) -> list[list[str]]:
    """A row for each arm: its gap at each size, over all, its change per doubling of tokens."""
    table = [["arm (seeds)", *SIZES, "all sizes", "change per doubling of tokens"]]
    for arm in ARMS:
        of_arm = [pair for pair in pairs if pair.fp8.recipe == arm]
        if of_arm:
            slope = slope_over_tokens(of_arm, "bf16")
            table.append([f"{arm} ({_seeds(of_arm)})", *_by_size(of_arm), _percent(slope)])
    return table


def _seeds(pairs: Sequence[Pair]) -> str:
    """How many an arm has at each of SIZES: "18, 16, 6, 3, 2"."""
    counts = []
    for size in SIZES:
        of_size = [pair for pair in pairs if size_of(pair.fp8.run_id) == size]
        counts.append(len({pair.fp8.seed for pair in of_size}))
    return ", ".join(map(str, counts))


def difference_table(pairs: Sequence[Pair]) -> list[list[str]]:
    """A row for each two arms: the mean difference of their gaps at each size, over all."""
    table = [["difference", *SIZES, "all sizes"]]
    for arm, minus in COMPARED:
        between = pairs_between(pairs, arm, minus)
        if between:
            table.append([f"{arm} minus {minus}", *_by_size(between)])
    return table


def _by_size(pairs: Sequence[Pair]) -> list[str]:
    """The mean gap at each of SIZES, "" where no pair is, then over all of them."""
    cells = []
    for size in SIZES:
        of_size = [pair for pair in pairs if size_of(pair.fp8.run_id) == size]
        cells.append(_percent(mean_gap(of_size, "bf16", "log_percent")) if of_size else "")
    return [*cells, _percent(mean_gap(pairs, "bf16", "log_percent"))]


def prediction_table(
    records: Sequence[Record], pairs: Sequence[Pair], folder: Path
) -> list[list[str]]:
    """A row for each arm and budget whose runs were predicted: the loss of each seed and the mean
    gap, beside what the frozen predictions in `folder` say."""
    table = [["arm", "tokens per parameter", "loss", "predicted", "gap [%]", "predicted gap [%]"]]
    gaps = gap_predictions.load(folder)
    rows: dict[tuple[str, int], list[str]] = {}
    for prediction in predictions.load(folder):
        target = prediction.file.target
        runs = [record for record in records if prediction.is_of(record)]
        gap_cells = ["", ""]
        for gap in gaps:
            if gap.target.is_of(target.recipe, target.params_total, target.tokens):
                gap_cells = _gap_cells(gap, pairs)
        row = [
            target.recipe,
            f"{target.tokens / target.params_total:.0f}",
            ", ".join(format_loss(run.loss_bf16, prediction) for run in runs),
            f"{prediction.loss:.3f} ({prediction.low:.3f} to {prediction.high:.3f})",
            *gap_cells,
        ]
        # the seeds of a run were predicted each, from the same runs: all say the same
        rows[target.recipe, target.tokens] = row
    arms = ["bf16", *ARMS]
    places = sorted(rows, key=lambda place: (arms.index(place[0]), place[1]))
    return table + [rows[place] for place in places]


def format_loss(loss: float, prediction: predictions.Prediction) -> str:
    is_inside = prediction.low <= loss <= prediction.high
    return f"{loss:.3f}" if is_inside else f"{loss:.3f} (outside)"


def _gap_cells(prediction: gap_predictions.GapPrediction, pairs: Sequence[Pair]) -> list[str]:
    """The mean gap that was measured, "" where no pair has come, and the one that was predicted,
    with its interval for the mean of so many pairs."""
    forecast = prediction.forecast
    arrived = [
        pair
        for pair in pairs
        if prediction.target.is_of(pair.fp8.recipe, pair.fp8.N, pair.fp8.tokens)
    ]
    if not arrived:
        return ["", f"{forecast.gap:+.2f} ({forecast.low:+.2f} to {forecast.high:+.2f})"]
    score = gap_predictions.score_of(prediction, arrived)
    interval = f"{score.predicted_low:+.2f} to {score.predicted_high:+.2f}"
    measured = f"{score.measured:+.2f}" if score.is_inside else f"{score.measured:+.2f} (outside)"
    return [measured, f"{score.predicted:+.2f} ({interval})"]


def _percent(mean: Estimate | None) -> str:
    """A mean and half its 95 % interval; a single value has none."""
    if mean is None:
        return ""
    if mean.low is None or mean.high is None:
        return f"{mean.mean:+.3f}"
    return f"{mean.mean:+.3f} ± {(mean.high - mean.low) / 2:.3f}"


def size_of(run: str) -> str:
    """The size in a run's name, such as 30k."""
    match = RUN.fullmatch(run)
    if match is None:
        raise UserError(f"{run} is no run of configs/study_cpu.py, whose tables these are")
    return match["size"]


if __name__ == "__main__":
    sys.exit(run_command(main))
