"""Measure what FP8 costs against BF16, run beside paired run on the same validation sequences.

    python scaling/precision.py out/study               # every finished run under it; writes out/study/law/precision.*
    python scaling/precision.py out/a_bf16 out/a_fp8 out=report loss=as_trained margin=0.25
    python scaling/precision.py --report out/a_bf16 out/a_fp8   # of one training: losses, time, memory, speed (report.py)

Prints the common gap, the gap per size beside the null (BF16 against BF16 with another seed), what the gap costs in
compute under two laws, then each pair. A single pair's standard error is over validation sequences: evaluation noise
alone. Intervals are over independent pairs and hold for this validation set.
"""

import json
import math
import sys
import zipfile
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.stats import t as student

if __name__ == "__main__":      # as in fit.py: siblings under one name, from a script as from a test
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling.command import read_words, run
from scaling.equivalence import Estimate, clusters, estimate, fit_trend, judged, read_margin
from scaling.figures import render, write
from scaling.gap_figure import draw_pair, draw_precision
from scaling.gap_tables import tables
from scaling.published import costs, surfaces, throughput
from scaling.records import LAW_FOLDER, Record, RecordError, check_comparable, read_runs, usable

OPTIONS = {
    "out": "DIR that receives precision.json, precision.png, pair.png and their .svg (default: PATH/law of the one PATH)",
    "loss": "bf16 (default: both arms evaluated through BF16 matmuls) or as_trained; the one that is judged",
    "margin": "per cent of the loss within which FP8 counts as equivalent; default: the one declared in the study.json "
              "beside the runs. Given here it counts as declared after the fact",
}
# How far the loss recomputed from val_losses.npz may lie from summary.json's: float32 sums on a GPU, no more.
LOSS_TOLERANCE = 1e-4
FIGURES = [f"{name}.{form}" for name in ("precision", "pair") for form in ("png", "svg")]


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
    gaps = _gaps(bf16, fp8, *map(load_val_losses, (bf16, fp8)))
    alike = all(getattr(fp8, key) == getattr(bf16, key) for key in ("device", "n_gpu", "is_compiled"))
    ratio = fp8.tok_per_s_median / bf16.tok_per_s_median if alike else None
    return Pair(bf16, fp8, gaps["as_trained"], gaps["bf16"], ratio)


def _gaps(base: Record, other: Record, base_losses, other_losses) -> dict[str, Gap]:
    """other minus base under both evaluations. Raises RecordError where they are not of the same sequences."""
    for name in ("source", "n_tokens"):
        if not np.array_equal(base_losses[name], other_losses[name]):
            raise RecordError(f"{base.folder / 'val_losses.npz'} and {other.folder / 'val_losses.npz'} differ in "
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

    Raises RecordError where arrays are missing, damaged, or do not give the losses of summary.json."""
    path = record.folder / "val_losses.npz"
    names = ("as_trained", "bf16", "source", "n_tokens")
    try:
        with np.load(path, allow_pickle=False) as file:
            losses = {name: file[name] for name in names}
    except FileNotFoundError:
        raise RecordError(f"{path} is missing: the paired gap needs it beside summary.json; copy it from where the run was "
                          "trained, or have train.py write it again: delete summary.json and repeat the run's command") from None
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise RecordError(f"{path} cannot be read ({error}); expected the arrays {', '.join(names)}") from None
    if any(a.dtype.kind not in "iuf" or a.shape != losses["source"].shape or a.ndim != 1 for a in losses.values()):
        raise RecordError(f"{path}: expected {', '.join(names)} as number arrays of one length; found "
                          + ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in losses.items()))
    if not all(np.isfinite(a).all() for a in losses.values()) or (losses["n_tokens"] < 0).any():
        raise RecordError(f"{path} holds a value that is not finite, or fewer tokens than none")
    if set(np.unique(losses["source"]).tolist()) != set(range(len(record.weights))):
        raise RecordError(f"{path}: 'source' must name each of the {len(record.weights)} sources 0 to "
                          f"{len(record.weights) - 1} ({', '.join(record.weights)}) at least once")
    if not all(losses["n_tokens"][losses["source"] == i].any() for i in range(len(record.weights))):
        raise RecordError(f"{path}: a source has no sequence with a token to predict")
    for arm, said in (("as_trained", record.loss_as_trained), ("bf16", record.loss_bf16)):
        loss = _gap(losses[arm], losses, record.weights.values(), said).nats
        if abs(loss - said) > LOSS_TOLERANCE * said:
            raise RecordError(f"{path}: {arm!r} gives a loss of {loss:.6f}, summary.json says loss_{arm}={said:.6f}; "
                              "the two files are not from one evaluation")
    return losses


# ------------------------------------------------------------------------------------------------------------ analysis

def analyse(records, found, arm: str, margin) -> dict:
    """Everything that precision.json holds but notes and inputs, Estimates as they are; gaps in per cent of the BF16 loss.

    found: Pairs of `records`; arm: "bf16" or "as_trained", the evaluation that is judged; margin: a Margin or None."""
    laws, sources, reason = surfaces([run for run in records if run.recipe == "bf16"], f"loss_{arm}")
    sizes, common = [], {}
    for N, D, recipe in sorted({(p.fp8.params_total, p.fp8.tokens, p.fp8.recipe) for p in found}):
        chosen = [p for p in found if (p.fp8.params_total, p.fp8.tokens, p.fp8.recipe) == (N, D, recipe)]
        nats, tput = _over(chosen, lambda p: _arm(p, arm).nats), throughput(chosen)
        sizes.append({"params_total": N, "tokens": D, "recipe": recipe, "runs": [p.fp8.run_id for p in chosen],
                      **{name: _over(chosen, lambda p, name=name: _arm(p, name).percent) for name in ("bf16", "as_trained")},
                      "nats": nats, "throughput": tput, "costs": [costs(one, N, D, nats, **tput) for one in laws[N]]})
        sizes[-1] |= judged(sizes[-1][arm], margin)
    for recipe in sorted({p.fp8.recipe for p in found}):
        chosen = [p for p in found if p.fp8.recipe == recipe]
        logs = {name: _over(chosen, lambda p, name=name: 100 * math.log1p(_arm(p, name).percent / 100))
                for name in ("bf16", "as_trained")}
        grouped = clusters([{p.bf16.trunk, p.fp8.trunk} for p in chosen])
        effect = logs[arm].mean if logs[arm].se and abs(logs[arm].mean) > logs[arm].half else margin and margin.percent
        trend = fit_trend([np.exp(np.mean([math.log(chosen[i].fp8.params_total) for i in own])) for own in grouped],
                          [np.mean([_arm(chosen[i], arm).percent for i in own]) for own in grouped], effect and abs(effect))
        common[recipe] = {**logs, "pairs": len(chosen), "sizes": len({p.fp8.params_total for p in chosen}),
                          "trend": trend, **judged(logs[arm], margin)}
    return {"loss": arm, "margin": margin, "null": _null(records, arm), "common": common, "sizes": sizes,
            "laws": sources, "no_own_law": reason,
            "pairs": [{"pair_id": p.bf16.pair_id, "bf16": p.bf16.run_id, "fp8": p.fp8.run_id, "recipe": p.fp8.recipe,
                       "params_total": p.fp8.params_total, "tokens": p.fp8.tokens, "gap_bf16": p.in_bf16,
                       "gap_as_trained": p.as_trained, "tok_per_s_ratio": p.tok_per_s_ratio, "device": p.fp8.device,
                       "extra_tokens": {one.name: one.extra_tokens(_arm(p, arm).nats, p.fp8.tokens)
                                        for one in laws[p.fp8.params_total]}} for p in found]}


def _arm(pair: Pair, arm: str) -> Gap:
    return pair.in_bf16 if arm == "bf16" else pair.as_trained


def _over(chosen, value) -> Estimate:
    """Estimate over pairs; those that share a trunk, such as branches of one long run, count once, with their mean."""
    values = np.array([value(pair) for pair in chosen])
    return estimate([values[own].mean() for own in clusters([{p.bf16.trunk, p.fp8.trunk} for p in chosen])])


def _null(records, arm: str) -> dict:
    """BF16 against BF16 of another seed: per size and tokens, then pooled in per cent.

    k runs give k (k - 1) / 2 differences but k - 1 degrees of freedom; each difference has variance 2 SD^2. Pooled,
    branches of one trunk add none."""
    rows, freedom = [], {}
    for N, D in sorted({(r.params_total, r.tokens) for r in records}):
        alike = {r.trunk: r for r in records if (r.params_total, r.tokens, r.recipe) == (N, D, "bf16")}
        runs = list(alike.values())
        if len(runs) < 2:
            continue
        losses = [load_val_losses(run) for run in runs]
        differences = [{"first": runs[i].run_id, "second": runs[j].run_id, **asdict(
            _gaps(runs[i], runs[j], losses[i], losses[j])[arm])} for i, j in combinations(range(len(runs)), 2)]
        sd = 100 * math.sqrt(2) * float(np.std(np.log([getattr(run, f"loss_{arm}") for run in runs]), ddof=1))
        rows.append({"params_total": N, "tokens": D, "runs": len(runs), "dof": len(runs) - 1, "sd_percent": sd,
                     "differences": differences})
        trunks, total = freedom.get(N, (set(), 0))
        freedom[N] = (trunks | set(alike), total + len(runs) - 1)
    dof = sum(min(total, len(trunks) - 1) for trunks, total in freedom.values())
    if not rows:
        return {"sizes": [], "pooled": None}
    sd = math.sqrt(sum(row["dof"] * row["sd_percent"]**2 for row in rows) / sum(row["dof"] for row in rows))
    return {"sizes": rows, "pooled": {"runs": sum(row["runs"] for row in rows), "dof": dof, "sd_percent": sd,
                                      "band": float(student.ppf(0.975, dof)) * sd}}


# ------------------------------------------------------------------------------------------------------------- command

def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the runs or the arguments."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__ + "\nOptions, as name=value or --name value:")
        print("\n".join(f"    {name:8} {meaning}" for name, meaning in OPTIONS.items()))
        return 0 if arguments else 2
    try:
        if "--report" in arguments:
            from scaling import report  # here, because it imports this module
            report.main([word for word in arguments if word != "--report"])
        else:
            paths, options = _parse(arguments)
            _run(paths, **options)
    except RecordError as error:
        print(f"scaling/precision.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(words) -> tuple[list[str], dict]:
    paths, options = read_words(words, OPTIONS)
    options = {"out": None, "loss": "bf16", "margin": None} | options
    if not paths:
        raise RecordError("no runs given: name a folder of runs such as out/study, or run folders")
    if options["loss"] not in ("bf16", "as_trained"):
        raise RecordError(f"loss={options['loss']!r} must be bf16 or as_trained")
    if options["out"] is None and (len(paths) > 1 or (Path(paths[0]) / "summary.json").exists()):
        raise RecordError("out=DIR is missing: where several paths or a single run are given, name the folder that receives "
                          "precision.json and the figures")
    folder = Path(options["out"] or Path(paths[0]) / LAW_FOLDER)
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"{folder} is a file: name a folder with out=DIR")
    return paths, {"folder": folder, "arm": options["loss"], "margin": options["margin"]}


def _run(paths, folder: Path, arm: str, margin: str | None) -> None:
    records, notes = read_runs(paths)
    records, left_out = usable(records)
    if not records:
        raise RecordError("\n".join(["no run is left to compare", *left_out]))
    check_comparable(records)
    found, alone = pairs(records)
    notes += left_out + alone
    result = analyse(records, found, arm, read_margin(records, margin))
    figures = {}
    if found:
        figures["precision"] = draw_precision(result)
        figures["pair"], more = draw_pair(max(found, key=lambda pair: pair.fp8.flops_per_token * pair.fp8.tokens))
        notes += more
    inputs = [{"run_id": r.run_id, "recipe": r.recipe, "summary_sha256": r.summary_sha256} for r in records]
    content = json.dumps({"format_version": 1, **result, "notes": notes, "inputs": inputs}, indent=1, allow_nan=False,
                         default=asdict)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{name}.{form}": render(figure, form) for name, figure in figures.items() if figure for form in ("png", "svg")}
        old = [name for name in FIGURES if name not in files and (folder / name).exists()]
        for name in old:
            (folder / name).unlink()    # beside the new precision.json it would pass for its own
        for name, data in {**files, "precision.json": (content + "\n").encode()}.items():
            write(folder / name, data)
    except OSError as error:
        raise RecordError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None
    notes += [f"removed {', '.join(old)} of an earlier call from {folder}"] if old else []
    wrote = ", ".join([f"{folder}/precision.json", *files])
    print("\n".join([tables(result), "", *notes, *[""] * bool(notes), f"wrote {wrote}"]))


if __name__ == "__main__":
    sys.exit(run(main))
