"""Measure what FP8 costs against BF16, run beside paired run on the same validation sequences.

    python scaling/precision.py out/recipes             # every finished run under it

prints, per size and recipe, the mean gap over paired seeds with its 95 % t-interval, and beside it the null: how far
BF16 runs lie apart that differ in nothing but their seed. A single gap's standard error is over validation sequences:
evaluation noise alone, which says nothing of another seed.
"""

import math
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import t as student

if __name__ == "__main__":      # as in fit.py: siblings under one name, from a script as from a test
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling.records import Record, RecordError, check_comparable, read_runs, usable

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


# ------------------------------------------------------------------------------------------------- several seeds a size

def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the runs or the arguments."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else 2
    try:
        records, notes = read_runs(arguments)
        records, left_out = usable(records)
        found, alone = pairs(records)
    except RecordError as error:
        print(f"scaling/precision.py: {error}", file=sys.stderr)
        return 2
    print("".join(note + "\n" for note in [*notes, *left_out, *alone]), end="")
    print(seed_table(records, found))
    return 0


def interval(values) -> tuple[float, float | None]:
    """Mean of `values` and the half-width of its 95 % t-interval; None with fewer than two."""
    n = len(values)
    half = student.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n) if n > 1 else None
    return float(np.mean(values)), None if half is None else float(half)


def seed_table(records, found) -> str:
    """Markdown: a line per size and recipe over its paired seeds, a line per size for BF16 against BF16."""
    lines = ["| N | tokens | recipe | pairs | gap in BF16 [%] | gap as trained [%] | reading |", "|---" * 7 + "|"]
    for size in sorted({(r.params_total, r.tokens) for r in records}):
        alike = [r for r in records if (r.params_total, r.tokens) == size]
        losses = np.array([r.loss_bf16 for r in alike if r.recipe == "bf16"])
        head = f"| {size[0]:,} | {size[1]:,} |"
        if len(losses) > 1:
            # Every difference of two seeds has variance 2 SD^2: the null of an unpaired comparison of two runs.
            null = 100 * math.sqrt(2) * np.std(losses, ddof=1) / losses.mean()
            lines.append(f"{head} bf16, two seeds | {len(losses)} runs | SD {null:.3f} | SD {null:.3f} | null |")
        else:
            lines.append(f"{head} bf16 | {len(losses)} run | | | no null: one BF16 seed |")
        chosen = [pair for pair in found if (pair.fp8.params_total, pair.fp8.tokens) == size]
        for recipe in sorted({pair.fp8.recipe for pair in chosen}):
            arms = [(pair.in_bf16.percent, pair.as_trained.percent) for pair in chosen if pair.fp8.recipe == recipe]
            bf16, trained = (interval([arm[i] for arm in arms]) for i in (0, 1))
            lines.append(f"{head} {recipe} | {len(arms)} | {_shown(bf16)} | {_shown(trained)} | {_reading(*bf16)} |")
    return "\n".join([*lines, "", "gap: FP8 minus BF16 of runs that share seed and data order, mean ± half a 95 % "
                      "t-interval over pairs. null: SD of the difference of two BF16 runs with other seeds."])


def _shown(mean_half) -> str:
    mean, half = mean_half
    return f"{mean:+.3f}" + ("" if half is None else f" ± {half:.3f}")


def _reading(mean: float, half: float | None) -> str:
    """Never "no loss": an interval that holds 0 says only how large a loss it could have missed."""
    if half is None:
        return "one pair: no interval"
    if abs(mean) > half:
        return "costs" if mean > 0 else "gains"
    return f"undecided: {mean - half:+.2f} to {mean + half:+.2f}"


if __name__ == "__main__":
    sys.exit(main())
