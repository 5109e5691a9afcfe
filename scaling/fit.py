"""Fit scaling laws to finished runs, one precision recipe at a time.

    python scaling/fit.py out out=out/demo              # every finished run under out/
    python scaling/fit.py out/a_bf16 out/a_fp8 --out report loss=as_trained seed_sd=0.0005

Prints the laws beside the BF16-against-FP8 table; writes DIR/figure.png, figure.svg, then law.json.
"""

import difflib
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    # `python scaling/fit.py` puts scaling/ on sys.path, tests put the repository root there. Adding the root for the
    # script alone lets both import the siblings under one name; two names would mean two RecordError classes.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling.figures import draw, human, render, write
from scaling.laws import DELTA, Fit, fit_band, fit_power, fit_ray, unfitted
from scaling.precision import pairs
from scaling.records import RecordError, check_comparable, read_curve, read_runs, usable

OPTIONS = {
    "out": "DIR that receives law.json, figure.png and figure.svg (required)",
    "loss": "bf16 (default: weights evaluated through BF16 matmuls) or as_trained",
    "seed_sd": "standard deviation of ln(loss) between seeds, a floor under the residuals in the intervals (default 0)",
}
ONE_RAY = 1.05              # tokens-per-parameter ratios within 5 % count as one
# The first convention of each is the one that is fitted; the others are in the table of slopes.
CONVENTIONS = {
    "N": ("params_total", "params_nonembed", "params_matmul"),
    "C": ("flops_per_token", "flops_per_token_causal", "flops_per_token_6n_total", "flops_per_token_6n_nonembed",
          "flops_per_token_6n_matmul"),
}


@dataclass(frozen=True)
class Group:
    """The runs of one precision recipe, smallest compute first, with their laws; arrays have shape (runs,)."""

    recipe: str
    records: tuple
    x: dict[str, np.ndarray]            # "C" training FLOPs, "N" parameters, "D" training tokens
    loss: np.ndarray                    # nats per token
    laws: dict[str, Fit]                # ray, power_n, power_d, power_c
    lines: dict[str, Fit]               # axis -> the law to draw: a ray law where identified, else the power law
    bands: dict[str, list[Fit]]         # axis -> forms whose spread is the model-form band
    gammas_left_out: list[float]        # members of the band that would need E below zero
    slopes: dict[str, float | None]     # convention -> -d ln L / d ln x of the power law
    curves: list                        # (tokens, loss) of each run's training


def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the runs or the arguments."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(__doc__ + "\nOptions, as name=value or --name value:")
        print("\n".join(f"    {name:8} {meaning}" for name, meaning in OPTIONS.items()))
        return 0
    try:
        paths, folder, arm, seed_sd = _parse(arguments)
        _run(paths, folder, f"loss_{arm}", seed_sd)
    except RecordError as error:
        print(f"scaling/fit.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments):
    paths, options, words = [], {"loss": "bf16", "seed_sd": "0"}, list(arguments)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") and (not equals or Path(word).exists()):
            paths.append(word)
            continue
        if key.replace("-", "_") not in OPTIONS:
            near = difflib.get_close_matches(key, OPTIONS, n=1)
            raise RecordError(f"{word!r} is no option; {f'did you mean {near[0]}?' if near else 'there are'} "
                              f"{'' if near else ', '.join(OPTIONS)}".rstrip())
        if not equals and not words:
            raise RecordError(f"{word} lacks its value: {OPTIONS[key.replace('-', '_')]}")
        options[key.replace("-", "_")] = value if equals else words.pop(0)
    if not options.get("out"):
        raise RecordError("out=DIR is missing: name the folder that receives law.json and the figure")
    if Path(options["out"]).exists() and not Path(options["out"]).is_dir():
        raise RecordError(f"out={options['out']} is a file: name a folder")
    if not paths:
        raise RecordError("no runs given: name run folders such as out/<run>, or a folder that holds them")
    if options["loss"] not in ("bf16", "as_trained"):
        raise RecordError(f"loss={options['loss']!r} must be bf16 or as_trained")
    try:
        seed_sd = float(options["seed_sd"])
    except ValueError:
        seed_sd = math.nan
    if not 0 <= seed_sd < math.inf:
        raise RecordError(f"seed_sd={options['seed_sd']!r} must be a number, at least 0: {OPTIONS['seed_sd']}")
    return paths, Path(options["out"]), options["loss"], seed_sd


def _run(paths, folder: Path, loss_key: str, seed_sd: float) -> None:
    records, notes = read_runs(paths)
    records, left_out = usable(records)
    notes += left_out
    print("".join(note + "\n" for note in notes), end="")
    if not records:
        raise RecordError("no run is left to fit")
    check_comparable(records)
    ratios = [record.tokens / record.params_total for record in records]
    ray = (min(ratios), max(ratios))
    recipes = sorted({record.recipe for record in records}, key=lambda recipe: (recipe != "bf16", recipe))
    groups = [fit_group([r for r in records if r.recipe == recipe], loss_key, ray, seed_sd) for recipe in recipes]
    found, alone = pairs(records)
    law = law_json(groups, found, notes + alone, loss_key, ray, seed_sd)
    figure = draw(groups, found, loss_key, ray if _on_one_ray(ray) else None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("png", "svg"):
            write(folder / f"figure.{name}", render(figure, name))
        write(folder / "law.json", (json.dumps(law, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise RecordError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None
    print("\n".join([*alone, "", law_table(groups, ray), "", slope_table(groups), "", pair_table(found)]))
    print(f"\nwrote {folder / 'figure.png'}, figure.svg, law.json")


def fit_group(records, loss_key: str, ray: tuple[float, float], seed_sd: float = 0.0) -> Group:
    """Fit every law to the runs of one recipe; a law that the runs cannot carry is there with the reason.

    ray: smallest and largest tokens per parameter of all runs, which decides whether the ray law makes sense."""
    records = sorted(records, key=lambda record: record.flops_per_token * record.tokens)
    loss = np.array([getattr(record, loss_key) for record in records])
    x = {name: _axis(records, name) for name in ("flops_per_token", "params_total", "tokens")}
    x = dict(zip("CND", x.values(), strict=True))
    laws = {"ray": _fit(fit_ray, "ray", x["C"], loss, seed_sd)}
    if laws["ray"].identified and not _on_one_ray(ray):
        laws["ray"] = replace(laws["ray"], identified=False, se=None, ci95=None, reason=(
            f"the runs lie at {ray[0]:.3g} to {ray[1]:.3g} tokens per parameter; the ray law needs one ratio"))
    for axis in "NDC":
        laws[f"power_{axis.lower()}"] = _fit(fit_power, "power", x[axis], loss, seed_sd)
    lines, bands, left_out = {}, {}, []
    for axis in "NDC":
        power = laws[f"power_{axis.lower()}"]
        if power.objective is None:
            continue
        lines[axis] = power
        if axis == "C" or _on_one_ray(ray):
            if laws["ray"].identified:
                lines[axis] = fit_ray(x[axis], loss)
            # On a ray C is a power of N or D (about 2; attention bends it), so exponents there are as much larger.
            factor = float(np.polyfit(np.log(x[axis]), np.log(x["C"]), 1)[0])
            bands[axis], left_out = fit_band(x[axis], loss, factor)
    slopes = {name: _fit(fit_power, "power", _axis(records, name), loss, 0.0).parameters["exponent"]
              for name in CONVENTIONS["N"] + CONVENTIONS["C"]}
    return Group(records[0].recipe, tuple(records), x, loss, laws, lines, bands, left_out, slopes,
                 [read_curve(record) for record in records])


def _fit(fit, form, x, loss, seed_sd) -> Fit:
    try:
        return fit(x, loss, seed_sd=seed_sd)
    except RecordError as error:
        return unfitted(form, len(loss), str(error))


def _axis(records, name: str) -> np.ndarray:
    """(runs,) the named count; FLOPs per token times tokens where it is one of FLOPs."""
    return np.array([getattr(r, name) * (r.tokens if name in CONVENTIONS["C"] else 1) for r in records], dtype=float)


def _on_one_ray(ray) -> bool:
    return ray[1] / ray[0] <= ONE_RAY


# ------------------------------------------------------------------------------------------- for people, for programs


def law_table(groups, ray) -> str:
    """Markdown table of every law of every recipe, with what the model-form band says beyond the runs."""
    lines = ["| precision | law (N = params_total, D = tokens, C = flops_per_token * tokens) | runs | 95 % interval "
             "| rms % | starts at best |", "|---" * 6 + "|"]
    for group in groups:
        for name, fit in group.laws.items():
            if fit.objective is None:
                lines.append(f"| {group.recipe} | {name}: not fitted | {fit.n} | {fit.reason} | | |")
                continue
            interval = "none: " + fit.reason if not fit.identified else "; ".join(
                f"{key} {low:.4g} to {high:.4g}" for key, (low, high) in fit.ci95.items())
            rms = "" if fit.residual_rms is None else f"{100 * fit.residual_rms:.3f}"
            formula = fit.formula("C" if name == "ray" else name[-1].upper())
            lines.append(f"| {group.recipe} | {name}: {formula} | {fit.n} | {interval} | {rms} "
                         f"| {fit.starts_at_best} of {fit.starts} |")
    lines.append("")
    for group in groups:
        if forms := group.bands.get("C"):
            far = 10 * group.x["C"].max()
            values = sorted(float(form.predict(far)) for form in forms)
            kept = [form.parameters["gamma"] for form in forms[1:]]
            lines.append(f"{group.recipe}, model-form band (power law" + (
                f"; rays with gamma {min(kept):.2f} to {max(kept):.2f}" if kept else "") + (
                f"; gamma {', '.join(f'{g:.2f}' for g in group.gammas_left_out)} would need E below 0"
                if group.gammas_left_out else "") +
                f"): at ten times the largest compute {values[0]:.4g} to {values[-1]:.4g} nats per token.")
    lines.append(f"Tokens per parameter: {ray[0]:.4g} to {ray[1]:.4g}. " + (
        "With one ratio L(N), L(D) and L(C) are one curve under three labels." if _on_one_ray(ray) else
        "With several ratios each of L(N), L(D) and L(C) mixes the effects of size and of data."))
    return "\n".join(lines)


def slope_table(groups) -> str:
    """Markdown table of the power law's slope under each way of counting parameters and FLOPs."""
    lines = ["| -dlnL/dlnx of the power law, x = | " + " | ".join(group.recipe for group in groups) + " |",
             "|---" * (len(groups) + 1) + "|"]
    for name in CONVENTIONS["N"] + CONVENTIONS["C"]:
        cells = ["" if group.slopes[name] is None else f"{group.slopes[name]:.4f}" for group in groups]
        lines.append(f"| {name}{' * tokens' if name in CONVENTIONS['C'] else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pair_table(found) -> str:
    """Markdown table of BF16 against FP8, one line a pair, with what the standard error does and does not hold."""
    if not found:
        return "No BF16/FP8 pair among these runs."
    lines = ["| FP8 run | N | tokens | loss BF16 arm | loss FP8 arm as trained | loss FP8 arm in BF16 | gap as trained "
             "[nats] | [%] | gap in BF16 [nats] | [%] | tok/s FP8/BF16 |", "|---" * 11 + "|"]
    for pair in found:
        gaps = [f"{gap.nats:+.5f}" + ("" if gap.se is None else f" ± {gap.se:.5f}") + f" | {gap.percent:+.3f}"
                for gap in (pair.as_trained, pair.in_bf16)]
        ratio = "other machine" if pair.tok_per_s_ratio is None else f"{pair.tok_per_s_ratio:.2f}"
        lines.append(f"| {pair.fp8.run_id} ({pair.fp8.recipe}) | {human(pair.fp8.params_total)} | "
                     f"{human(pair.fp8.tokens)} | {pair.bf16.loss_bf16:.5f} | {pair.fp8.loss_as_trained:.5f} | "
                     f"{pair.fp8.loss_bf16:.5f} | {gaps[0]} | {gaps[1]} | {ratio} |")
    return "\n".join([*lines, "", "Gap: FP8 minus BF16. ± is one standard error over the validation sequences: "
                      "evaluation noise only, not run-to-run noise, which needs several seeds."])


def law_json(groups, found, notes, loss_key, ray, seed_sd) -> dict:
    """The content of law.json: strict JSON, None where there is no number."""
    return {
        "format_version": 1,
        "conventions": {"N": "params_total", "D": "tokens", "C": "flops_per_token * tokens", "loss": loss_key,
                        "loss_unit": "nats per token"},
        "delta": DELTA, "seed_sd": seed_sd, "tokens_per_param": list(ray), "one_ray": _on_one_ray(ray),
        "notes": notes,
        "inputs": [{"run_id": r.run_id, "pair_id": r.pair_id, "recipe": r.recipe, "summary_sha256": r.summary_sha256}
                   for group in groups for r in group.records],
        "groups": {group.recipe: {
            "runs": [record.run_id for record in group.records],
            "laws": {name: _plain(fit) for name, fit in group.laws.items()},
            "band": {axis: [_plain(fit) for fit in forms] for axis, forms in group.bands.items()},
            "gammas_left_out": group.gammas_left_out,
            "slopes": group.slopes,
        } for group in groups},
        "pairs": [{"pair_id": pair.bf16.pair_id, "bf16": pair.bf16.run_id, "fp8": pair.fp8.run_id,
                   "gap_as_trained": asdict(pair.as_trained), "gap_bf16": asdict(pair.in_bf16),
                   "tok_per_s_ratio": pair.tok_per_s_ratio} for pair in found],
    }


def _plain(fit: Fit) -> dict:
    fields = {name: value for name, value in vars(fit).items() if name != "parameters"} | fit.parameters
    if fit.ci95:                        # K's upper end may overflow: no number, then
        fields["ci95"] = {name: [end if math.isfinite(end) else None for end in ends]
                          for name, ends in fit.ci95.items()}
    return fields


if __name__ == "__main__":
    sys.exit(main())
