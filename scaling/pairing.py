"""Match finished FP8 runs with their BF16 runs and read the losses of both."""

import zipfile
from collections.abc import Sequence

import numpy as np

from lib.errors import UserError
from scaling.paired.gaps import EVALUATIONS, Pair, loss_of, sequence_gap
from scaling.records import Record, check_comparable

LOSS_TOLERANCE = 1e-4  # of val_losses.npz against summary.json: float32 sums on a GPU, no more
COLUMNS = ("as_trained", "bf16", "source", "n_tokens")  # of val_losses.npz


def pair_runs(records: Sequence[Record]) -> tuple[list[Pair], list[str]]:
    """Match each FP8 run, and each repeat of a BF16 run, a null in FP8's place, with the BF16 run
    of its pair_id, smallest model first; plus a line for each run left alone. Raises UserError for
    two BF16 runs of a pair, partners of other sequences."""
    baselines = _baselines(records)
    pairs = []
    paired_folders = set()
    for run in sorted(records, key=lambda run: (run.N, run.tokens, run.recipe, run.seed)):
        baseline = baselines.get(run.pair_id)
        is_fp8_repeat = not run.is_baseline and run.repeat  # which is no null
        if baseline is None or baseline is run or is_fp8_repeat:
            continue
        pairs.append(pair_of(baseline, run))
        paired_folders.add(run.folder)
        if not run.is_baseline:
            paired_folders.add(baseline.folder)
    alone = [
        f"unpaired {run.run_id}: no partner with its pair_id {run.pair_id}"
        for run in records
        if run.folder not in paired_folders
    ]
    return pairs, alone


def _baselines(records: Sequence[Record]) -> dict[str, Record]:
    """pair_id -> its BF16 run."""
    baselines: dict[str, Record] = {}
    for record in records:
        if not record.is_baseline or record.repeat:
            continue
        first = baselines.setdefault(record.pair_id, record)
        if first is not record:
            raise UserError(
                f"{first.run_id} and {record.run_id} are both the BF16 run of pair"
                f" {record.pair_id}: leave one out"
            )
    return baselines


def pair_of(bf16: Record, fp8: Record) -> Pair:
    """The pair of two runs. Raises UserError where their losses are not of the same sequences."""
    check_comparable([bf16, fp8])
    base, compared = load_val_losses(bf16), load_val_losses(fp8)
    for name in ("source", "n_tokens"):
        if not np.array_equal(base[name], compared[name]):
            raise UserError(
                f"{bf16.folder}/val_losses.npz and {fp8.folder}/val_losses.npz differ in {name!r}:"
                " a paired gap needs the same validation sequences in the same order"
            )
    weights = list(bf16.weights.values())
    gaps = {
        name: sequence_gap(compared[name] - base[name], base, weights, loss_of(bf16, name))
        for name in ("bf16", "as_trained")
    }
    machine_keys = ("device", "n_gpu", "is_compiled")
    is_same_machine = all(getattr(fp8, key) == getattr(bf16, key) for key in machine_keys)
    ratio = fp8.tok_per_s_median / bf16.tok_per_s_median if is_same_machine else None
    n_converted = len(fp8.summary["precision"]["layers_converted"])
    return Pair(bf16, fp8, gaps, ratio, n_converted, fp8.precision.is_switched)


def load_val_losses(record: Record) -> dict[str, np.ndarray]:
    """A run's val_losses.npz: as_trained and bf16 (nats per sequence), source, n_tokens; each of
    shape (sequences,). Raises UserError where it is damaged or of another evaluation."""
    path = record.folder / "val_losses.npz"
    try:
        with (
            np.load(path, allow_pickle=False) as file,
            np.errstate(divide="ignore", invalid="ignore"),
        ):
            losses = {name: file[name] for name in COLUMNS}
            sums = {name: _weighted_loss(losses, record, name) for name in EVALUATIONS}
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}): leave the run out, copy the file from"
            " where it was trained, or write it again: delete summary.json and repeat the run's"
            " command"
        ) from None
    for name in ("as_trained", "bf16"):
        loss, expected = sums[name], loss_of(record, name)
        if not abs(loss - expected) <= LOSS_TOLERANCE * expected:
            raise UserError(
                f"{path}: {name!r} gives a loss of {loss:.6f}, summary.json says"
                f" loss_{name}={expected:.6f}; the two files are not from one evaluation, or one is"
                " damaged"
            )
    return losses


def _weighted_loss(losses: dict[str, np.ndarray], record: Record, evaluation: str) -> float:
    """Nats per token of the whole validation set."""
    weights = list(record.weights.values())
    return sequence_gap(losses[evaluation], losses, weights, loss_of(record, evaluation)).nats
