"""Pair each FP8 run with the BF16 run that shares everything else, on the same validation sequences.

A null pair is two BF16 runs of one seed that are rounded differently: what a difference of precision is held against.
"""

import math
import zipfile
from dataclasses import dataclass

import numpy as np

from runtime.cli import UserError
from scaling.equivalence import Estimate, clusters, estimate
from scaling.records import Record, check_comparable, read_json

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

    Repeats are no partners: null_pairs. Raises UserError where the partners' validation losses do not belong to the same
    sequences."""
    partners, found, notes = _plain(records), [], []
    paired = set()
    for fp8 in sorted(records, key=lambda r: (r.N, r.tokens, r.recipe)):
        if fp8.recipe == "bf16":
            continue
        if fp8.repeat:
            notes.append(f"unpaired {fp8.run_id}: it repeats an FP8 run, and only BF16 runs are repeated for a null")
        elif bf16 := partners.get(fp8.pair_id):
            found.append(_pair(bf16, fp8))
            paired.add(fp8.pair_id)
        else:
            notes.append(f"unpaired {fp8.run_id}: no BF16 run with its pair_id {fp8.pair_id}")
    notes += [f"unpaired {bf16.run_id}: no FP8 run with its pair_id {pair_id}"
              for pair_id, bf16 in partners.items() if pair_id not in paired]
    return found, notes


def null_pairs(records) -> tuple[list[Pair], list[str]]:
    """Match each repeat of a BF16 run, which takes FP8's place, with the run that it repeats; plus a line for each alone."""
    partners, found, notes = _plain(records), [], []
    for again in sorted(records, key=lambda r: (r.N, r.tokens, r.seed)):
        if again.recipe == "bf16" and again.repeat:
            if bf16 := partners.get(again.pair_id):
                found.append(_pair(bf16, again))
            else:
                notes.append(f"unpaired {again.run_id}: the BF16 run that it repeats is not there (pair_id {again.pair_id})")
    return found, notes


def gap_of(pair: Pair, arm: str) -> Gap:
    """The gap under one evaluation, "bf16" or "as_trained"."""
    return pair.in_bf16 if arm == "bf16" else pair.as_trained


def over(chosen, value) -> Estimate:
    """Estimate over pairs; those that share a trunk, such as branches of one long run, count once, with their mean."""
    values = np.array([value(pair) for pair in chosen])
    return estimate([values[own].mean() for own in clusters([{p.bf16.trunk, p.fp8.trunk} for p in chosen])])


def percents(chosen) -> dict[str, Estimate]:
    """The gap in per cent of BF16's loss under both evaluations."""
    return {arm: over(chosen, lambda pair, arm=arm: gap_of(pair, arm).percent) for arm in ("bf16", "as_trained")}


def n_converted(chosen) -> list[int]:
    """Fewest and most Linears that the pairs' FP8 runs trained in FP8; a recipe such as auto may find that none pays.

    Raises UserError where a summary.json does not list them."""
    counts = []
    for pair in chosen:
        path = pair.fp8.folder / "summary.json"
        names = read_json(path)["precision"].get("layers_converted")
        if not isinstance(names, list):
            raise UserError(f"{path}: precision.layers_converted is {names!r}; expected a list of the Linears that are FP8")
        counts.append(len(names))
    return [min(counts), max(counts)]


def _plain(records) -> dict[str, Record]:
    """pair_id -> its BF16 run."""
    partners = {}
    for record in records:
        if record.recipe == "bf16" and not record.repeat and partners.setdefault(record.pair_id, record) is not record:
            raise UserError(f"{partners[record.pair_id].run_id} and {record.run_id} are both the BF16 run of pair "
                              f"{record.pair_id}: leave one out")
    return partners


def _pair(bf16: Record, fp8: Record) -> Pair:
    check_comparable([bf16, fp8])
    found = gaps(bf16, fp8, *map(load_val_losses, (bf16, fp8)))
    alike = all(getattr(fp8, key) == getattr(bf16, key) for key in ("device", "n_gpu", "is_compiled"))
    ratio = fp8.tok_per_s_median / bf16.tok_per_s_median if alike else None
    return Pair(bf16, fp8, found["as_trained"], found["bf16"], ratio)


def gaps(base: Record, other: Record, base_losses, other_losses) -> dict[str, Gap]:
    """other minus base under both evaluations. Raises UserError where they are not of the same sequences."""
    for name in ("source", "n_tokens"):
        if not np.array_equal(base_losses[name], other_losses[name]):
            raise UserError(f"{base.folder / 'val_losses.npz'} and {other.folder / 'val_losses.npz'} differ in "
                              f"{name!r}: a paired gap needs the same validation sequences in the same order")
    return {arm: _gap(other_losses[arm] - base_losses[arm], base_losses, list(base.weights.values()),
                      getattr(base, f"loss_{arm}")) for arm in ("as_trained", "bf16")}


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

    Raises UserError where arrays are missing, damaged, or do not give the losses of summary.json."""
    path = record.folder / "val_losses.npz"
    names = ("as_trained", "bf16", "source", "n_tokens")
    try:
        with np.load(path, allow_pickle=False) as file:
            losses = {name: file[name] for name in names}
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the paired gap needs it beside summary.json; copy it from where the run was "
                          "trained, or have train.py write it again: delete summary.json and repeat the run's command") from None
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read ({error}); expected the arrays {', '.join(names)}") from None
    if any(a.dtype.kind not in "iuf" or a.shape != losses["source"].shape or a.ndim != 1 for a in losses.values()):
        raise UserError(f"{path}: expected {', '.join(names)} as number arrays of one length; found "
                          + ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in losses.items()))
    if not all(np.isfinite(a).all() for a in losses.values()) or (losses["n_tokens"] < 0).any():
        raise UserError(f"{path} holds a value that is not finite, or fewer tokens than none")
    if set(np.unique(losses["source"]).tolist()) != set(range(len(record.weights))):
        raise UserError(f"{path}: 'source' must name each of the {len(record.weights)} sources 0 to "
                          f"{len(record.weights) - 1} ({', '.join(record.weights)}) at least once")
    if not all(losses["n_tokens"][losses["source"] == i].any() for i in range(len(record.weights))):
        raise UserError(f"{path}: a source has no sequence with a token to predict")
    for arm, said in (("as_trained", record.loss_as_trained), ("bf16", record.loss_bf16)):
        loss = _gap(losses[arm], losses, record.weights.values(), said).nats
        if abs(loss - said) > LOSS_TOLERANCE * said:
            raise UserError(f"{path}: {arm!r} gives a loss of {loss:.6f}, summary.json says loss_{arm}={said:.6f}; "
                              "the two files are not from one evaluation")
    return losses
