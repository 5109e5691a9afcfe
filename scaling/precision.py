"""Measure what FP8 costs against BF16, run beside paired run on the same validation sequences.

    python scaling/precision.py out/study               # every finished run under it; writes out/study/law/precision.*
    python scaling/precision.py out/a_bf16 out/a_fp8 out=report loss=as_trained margin=0.25
    python scaling/precision.py --report out/a_bf16 out/a_fp8   # of one training: losses, time, memory, speed (report.py)

Prints the common gap, which recipe is the best by the declared rule (ranking.py), the gap per size beside the null (BF16
against BF16 with another seed, and with the same one rounded differently), what the gap costs in compute under two laws, then
each pair. A single pair's standard error is over validation sequences: evaluation noise alone. Intervals are over independent
pairs and hold for this validation set.
"""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from scaling.command import read_words, run
from scaling.equivalence import clusters, fit_trend, judged, read_margin
from scaling.figures import render, write
from scaling.gap_figure import draw_pair, draw_precision
from scaling.gap_tables import tables
from scaling.null import at, measure
from scaling.pairs import Gap, Pair, gap_of, n_converted, null_pairs, over, pairs, percents
from scaling.published import costs, surfaces, throughput
from scaling.ranking import rank
from scaling.records import CONVENTIONS, LAW_FOLDER, check_comparable, counted_as, read_runs, usable

__all__ = ["Gap", "Pair", "analyse", "main", "pairs"]

OPTIONS = {
    "out": "DIR that receives precision.json, precision.png, pair.png and their .svg (default: PATH/law of the one PATH)",
    "loss": "bf16 (default: both arms evaluated through BF16 matmuls) or as_trained; the one that is judged",
    "margin": "per cent of the loss within which FP8 counts as equivalent; default: the one declared in the study.json "
              "beside the runs. Given here it counts as declared after the fact",
    "n": "total or nonembed: which parameters N counts (default: what the study.json beside the runs says, else total)",
}
FIGURES = [f"{name}.{form}" for name in ("precision", "pair") for form in ("png", "svg")]


# ------------------------------------------------------------------------------------------------------------ analysis

def analyse(records, found, arm: str, margin) -> dict:
    """Everything that precision.json holds but notes and inputs, Estimates as they are; gaps in per cent of the BF16 loss.

    found: Pairs of `records`; arm: "bf16" or "as_trained", the evaluation that is judged; margin: a Margin or None."""
    laws, sources, reason = surfaces([run for run in records if run.recipe == "bf16" and not run.repeat], f"loss_{arm}")
    sizes, common, first = [], {}, lambda pair: (pair.fp8.N, pair.fp8.tokens, pair.fp8.recipe)
    for N, D, recipe in sorted({first(p) for p in found}):
        chosen = [p for p in found if first(p) == (N, D, recipe)]
        nats, tput, run = over(chosen, lambda p: gap_of(p, arm).nats), throughput(chosen), chosen[0].fp8
        sizes.append({**at(run), "recipe": recipe, "runs": [p.fp8.run_id for p in chosen], **percents(chosen), "nats": nats,
                      "throughput": tput, "costs": [costs(law, law.N_of(run), D, nats, **tput) for law in laws[N]]})
        sizes[-1] |= _judged(chosen, sizes[-1][arm], margin)
    for recipe in sorted({p.fp8.recipe for p in found}):
        common[recipe] = _common([p for p in found if p.fp8.recipe == recipe], arm, margin)
    repeated, _ = null_pairs(records)
    return {"conventions": {"N": f"params_{records[0].convention}"}, "loss": arm, "margin": margin,
            "null": measure(records, repeated, arm), "common": common, "ranking": rank(found, arm), "sizes": sizes,
            "laws": sources, "no_own_law": reason,
            "pairs": [{"pair_id": p.bf16.pair_id, "bf16": p.bf16.run_id, "fp8": p.fp8.run_id, "recipe": p.fp8.recipe,
                       **at(p.fp8), "gap_bf16": p.in_bf16, "gap_as_trained": p.as_trained,
                       "tok_per_s_ratio": p.tok_per_s_ratio, "device": p.fp8.device,
                       "extra_tokens": {law.name: law.extra_tokens(gap_of(p, arm).nats, p.fp8.tokens) for law in laws[p.fp8.N]}}
                      for p in found]}


def _common(chosen, arm: str, margin) -> dict:
    """One recipe's gap over all sizes: 100 delta of ln L_FP8 = ln L_BF16 + delta, its trend over size, its verdict."""
    logs = {name: over(chosen, lambda p, name=name: 100 * math.log1p(gap_of(p, name).percent / 100))
            for name in ("bf16", "as_trained")}
    grouped = clusters([{p.bf16.trunk, p.fp8.trunk} for p in chosen])
    effect = logs[arm].mean if logs[arm].se and abs(logs[arm].mean) > logs[arm].half else margin and margin.percent
    trend = fit_trend([np.exp(np.mean([math.log(chosen[i].fp8.N) for i in own])) for own in grouped],
                      [np.mean([gap_of(chosen[i], arm).percent for i in own]) for own in grouped], effect and abs(effect))
    return {**logs, "pairs": len(chosen), "sizes": len({p.fp8.N for p in chosen}), "trend": trend,
            **_judged(chosen, logs[arm], margin)}


def _judged(chosen, found, margin) -> dict:
    """equivalence.judged, but no verdict on FP8 where nothing was FP8."""
    said = judged(found, margin) | {"converted": n_converted(chosen)}
    return said | {"verdict": "BF16 again: no Linear converted"} if said["converted"] == [0, 0] else said


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
    except UserError as error:
        print(f"scaling/precision.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(words) -> tuple[list[str], dict]:
    paths, options = read_words(words, OPTIONS)
    options = {"out": None, "loss": "bf16", "margin": None, "n": None} | options
    if not paths:
        raise UserError("no runs given: name a folder of runs such as out/study, or run folders")
    if options["loss"] not in ("bf16", "as_trained"):
        raise UserError(f"loss={options['loss']!r} must be bf16 or as_trained")
    if options["n"] not in (None, *CONVENTIONS):
        raise UserError(f"n={options['n']!r} must be {' or '.join(CONVENTIONS)}: which parameters N counts")
    if options["out"] is None and (len(paths) > 1 or (Path(paths[0]) / "summary.json").exists()):
        raise UserError("out=DIR is missing: where several paths or a single run are given, name the folder that receives "
                          "precision.json and the figures")
    folder = Path(options["out"] or Path(paths[0]) / LAW_FOLDER)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder with out=DIR")
    return paths, {"folder": folder, "arm": options["loss"], "margin": options["margin"], "convention": options["n"]}


def _run(paths, folder: Path, arm: str, margin: str | None, convention: str | None) -> None:
    records, notes = read_runs(paths)
    records, left_out = usable(counted_as(records, convention))
    if not records:
        raise UserError("\n".join(["no run is left to compare", *left_out]))
    check_comparable(records)
    found, alone = pairs(records)
    notes += left_out + alone + null_pairs(records)[1]
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
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None
    notes += [f"removed {', '.join(old)} of an earlier call from {folder}"] if old else []
    wrote = ", ".join([f"{folder}/precision.json", *files])
    print("\n".join([tables(result), "", *notes, *[""] * bool(notes), f"wrote {wrote}"]))


if __name__ == "__main__":
    sys.exit(run(main))
