"""Measure what FP8 costs against BF16, run beside paired run on the same validation sequences.

A gap's standard error is over validation sequences: evaluation noise alone. How far two runs of one arm would lie apart
(run-to-run noise) is not in it; that needs several seeds per size.
"""

import math
import zipfile
from dataclasses import dataclass

import numpy as np

from scaling.records import Record, RecordError, check_comparable

# How far the loss recomputed from val_losses.npz may lie from summary.json's: float32 sums on a GPU, no more.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Gap:
    """Loss of the FP8 run minus loss of its BF16 partner on the same validation tokens."""

    nats: float                         # per token
    percent: float                      # of the BF16 run's loss
    se: float | None                    # standard error of nats over validation sequences; none with one in a source


@dataclass(frozen=True)
class Pair:
    """A BF16 run beside the FP8 run that shares its seed, data order and everything else but the precision."""

    bf16: Record
    fp8: Record
    as_trained: Gap                     # each run evaluated in the precision that it was trained in
    in_bf16: Gap                        # both evaluated through BF16 matmuls: what FP8 did to the weights
    tok_per_s_ratio: float | None       # FP8 over BF16; none where not only the precision differs


def pairs(records) -> tuple[list[Pair], list[str]]:
    """Match each FP8 run with the BF16 run of its pair_id, smallest model first; plus a line for each run left alone.

    Raises RecordError where the partners' validation losses do not belong to the same sequences."""
    partners, found, notes = {}, [], []
    for record in records:
        if record.recipe == "bf16" and partners.setdefault(record.pair_id, record) is not record:
            raise RecordError(f"{partners[record.pair_id].run_id} and {record.run_id} are both the BF16 run of pair "
                              f"{record.pair_id}: leave one out")
    paired = set()
    for fp8 in sorted(records, key=lambda r: (r.params_total, r.tokens, r.recipe)):
        if fp8.recipe == "bf16":
            continue
        if bf16 := partners.get(fp8.pair_id):
            found.append(_pair(bf16, fp8))
            paired.add(fp8.pair_id)
        else:
            notes.append(f"unpaired {fp8.run_id}: no BF16 run with its pair_id {fp8.pair_id}")
    notes += [f"unpaired {bf16.run_id}: no FP8 run with its pair_id {pair_id}"
              for pair_id, bf16 in partners.items() if pair_id not in paired]
    return found, notes


def _pair(bf16: Record, fp8: Record) -> Pair:
    check_comparable([bf16, fp8])
    losses = [load_val_losses(record) for record in (bf16, fp8)]
    for name in ("source", "n_tokens"):
        if not np.array_equal(losses[0][name], losses[1][name]):
            raise RecordError(f"{bf16.folder / 'val_losses.npz'} and {fp8.folder / 'val_losses.npz'} differ in "
                              f"{name!r}: a paired gap needs the same validation sequences in the same order")
    gaps = [_gap(losses[1][arm] - losses[0][arm], losses[0], list(bf16.weights.values()), reference)
            for arm, reference in (("as_trained", bf16.loss_as_trained), ("bf16", bf16.loss_bf16))]
    alike = all(getattr(fp8, key) == getattr(bf16, key) for key in ("device", "n_gpu", "is_compiled"))
    ratio = fp8.tok_per_s_median / bf16.tok_per_s_median if alike else None
    return Pair(bf16, fp8, *gaps, ratio)


def _gap(difference, losses, weights, reference: float) -> Gap:
    """Weighted gap of per-sequence differences (nats), with the ratio estimator's standard error per source."""
    nats, variance = 0.0, 0.0
    for i, weight in enumerate(weights):
        chosen = losses["source"] == i
        d, t = difference[chosen], losses["n_tokens"][chosen]
        per_token = d.sum() / t.sum()
        nats += weight * per_token
        n = len(d)
        variance += weight**2 * n / (n - 1) * np.sum((d - per_token * t)**2) / t.sum()**2 if n > 1 else math.nan
    return Gap(float(nats), float(100 * nats / reference), float(math.sqrt(variance)) if variance >= 0 else None)


def load_val_losses(record: Record) -> dict[str, np.ndarray]:
    """A run's val_losses.npz: as_trained and bf16 (nats per sequence), source, n_tokens; each of shape (sequences,).

    Raises RecordError where arrays are missing, damaged, or do not give the losses of summary.json."""
    path = record.folder / "val_losses.npz"
    names = ("as_trained", "bf16", "source", "n_tokens")
    try:
        with np.load(path, allow_pickle=False) as file:
            losses = {name: file[name] for name in names}
    except FileNotFoundError:
        raise RecordError(f"{path} is missing: the paired gap needs it beside summary.json") from None
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise RecordError(f"{path} cannot be read ({error}); expected the arrays {', '.join(names)}") from None
    if any(a.dtype.kind not in "iuf" or a.shape != losses["source"].shape or a.ndim != 1 for a in losses.values()):
        raise RecordError(f"{path}: expected {', '.join(names)} as number arrays of one length; found "
                          + ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in losses.items()))
    if not all(np.isfinite(a).all() for a in losses.values()) or not (losses["n_tokens"] > 0).all():
        raise RecordError(f"{path} holds a value that is not finite, or a sequence without tokens")
    if set(np.unique(losses["source"]).tolist()) != set(range(len(record.weights))):
        raise RecordError(f"{path}: 'source' must name each of the {len(record.weights)} sources 0 to "
                          f"{len(record.weights) - 1} ({', '.join(record.weights)}) at least once")
    for arm, said in (("as_trained", record.loss_as_trained), ("bf16", record.loss_bf16)):
        loss = _gap(losses[arm], losses, record.weights.values(), said).nats
        if abs(loss - said) > LOSS_TOLERANCE * said:
            raise RecordError(f"{path}: {arm!r} gives a loss of {loss:.6f}, summary.json says loss_{arm}={said:.6f}; "
                              "the two files are not from one evaluation")
    return losses
