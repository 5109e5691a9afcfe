"""Match finished FP8 runs with their BF16 runs and read the losses of both."""

import zipfile

import numpy as np

from lib.errors import UserError
from scaling.paired.gaps import Pair, gap_of
from scaling.records import Record, check_comparable

LOSS_TOLERANCE = 1e-4  # of val_losses.npz against summary.json: float32 sums on a GPU, no more


def pairs(records) -> tuple[list[Pair], list[str]]:
    """Match each FP8 run, and each repeat of a BF16 run, a null in FP8's place, with the BF16 run
    of its pair_id, smallest model first; plus a line for each run left alone. Raises UserError for
    two BF16 runs of a pair, partners of other sequences."""
    partners, found, paired = {}, [], set()
    for record in records:
        if (
            record.recipe == "bf16"
            and not record.repeat
            and partners.setdefault(record.pair_id, record) is not record
        ):
            raise UserError(
                f"{partners[record.pair_id].run_id} and {record.run_id} are both the BF16 run of"
                f" pair {record.pair_id}: leave one out"
            )
    for run in sorted(records, key=lambda run: (run.N, run.tokens, run.recipe, run.seed)):
        base = partners.get(run.pair_id)
        # an FP8 run's repeat is no null
        if base and base is not run and (run.recipe == "bf16" or not run.repeat):
            found.append(_pair(base, run))
            paired |= {run.folder} | ({base.folder} if run.recipe != "bf16" else set())
    return found, [
        f"unpaired {run.run_id}: no partner with its pair_id {run.pair_id}"
        for run in records
        if run.folder not in paired
    ]


def _pair(bf16: Record, fp8: Record) -> Pair:
    check_comparable([bf16, fp8])
    base, other = map(load_val_losses, (bf16, fp8))
    for name in ("source", "n_tokens"):
        if not np.array_equal(base[name], other[name]):
            raise UserError(
                f"{bf16.folder}/val_losses.npz and {fp8.folder}/val_losses.npz differ in {name!r}:"
                " a paired gap needs the same validation sequences in the same order"
            )
    gaps = {arm: gap_of(other[arm] - base[arm], base, bf16, arm) for arm in ("bf16", "as_trained")}
    alike = all(
        getattr(fp8, key) == getattr(bf16, key) for key in ("device", "n_gpu", "is_compiled")
    )
    converted = fp8.summary["precision"]["layers_converted"]
    return Pair(
        bf16,
        fp8,
        gaps,
        fp8.tok_per_s_median / bf16.tok_per_s_median if alike else None,
        len(converted),
    )


def load_val_losses(record: Record) -> dict[str, np.ndarray]:
    """A run's val_losses.npz: as_trained and bf16 (nats per sequence), source, n_tokens; each of
    shape (sequences,)."""
    path, names = record.folder / "val_losses.npz", ("as_trained", "bf16", "source", "n_tokens")
    try:
        with (
            np.load(path, allow_pickle=False) as file,
            np.errstate(divide="ignore", invalid="ignore"),
        ):
            losses = {name: file[name] for name in names}
            said = {arm: gap_of(losses[arm], losses, record, arm).nats for arm in names[:2]}
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}): leave the run out, copy the file from"
            " where it was trained, or write it again: delete summary.json and repeat the run's"
            " command"
        ) from None
    for arm, loss in said.items():
        if (
            not abs(loss - (expected := getattr(record, f"loss_{arm}")))
            <= LOSS_TOLERANCE * expected
        ):
            raise UserError(
                f"{path}: {arm!r} gives a loss of {loss:.6f}, summary.json says"
                f" loss_{arm}={expected:.6f}; the two files are not from one evaluation, or one is"
                " damaged"
            )
    return losses
