"""Fit scaling laws to finished runs, one precision recipe at a time, or to a table of published points.

    python scaling/fit.py out/study                     # every finished run under it -> out/study/law/
    python scaling/fit.py out/a_bf16 out/a_fp8 --out report loss=as_trained seed_sd=0.0005
    python scaling/fit.py out/study --predict gpt1p5b_fp8       # freezes a prediction before that run is started
    python scaling/fit.py out/study --score                     # compares it once the run is there
    python scaling/fit.py out/study n=total --out report        # counts all parameters, whatever the study's budgets count
    python scaling/fit.py --points points.csv --n "Model Size" --c "Training FLOP" --loss loss --drop-highest 5 --out DIR
    python scaling/fit.py --points points.csv --n N --d tokens --loss val --where dataset=c4 dataset=rw --where lr=0.003 --out DIR

Prints the headline first, then every law with its certificate, the counting conventions and what other choices would have
given; writes figure.png, figure.svg, then law.json. A table is comma-, tab-, semicolon- or |-separated text with a header;
its losses are taken as nats per token, its counts as they stand, and nothing is converted or guessed.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # Before numpy reads it: thousands of tiny fits are ten times slower when BLAS splits each over threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from runtime.cli import UserError, grid
from scaling import predict
from scaling.command import read_words, run
from scaling.figures import KIND, draw, write_with
from scaling.intervals import robustness, with_bootstrap
from scaling.laws import DELTA, ONE_RAY, Fit, Points, fit_band, fit_form, fit_ray, on_one_ray, ray_of, unfitted
from scaling.pairs import freedom, human, pairs
from scaling.points import read_points
from scaling.predict import forecast
from scaling.records import (
    CONVENTIONS,
    LAW_FOLDER,
    check_comparable,
    counted_as,
    from_scratch,
    read_curve,
    read_runs,
    usable,
    without_repeats,
)

RUNS = {
    "out": f"DIR that receives law.json, figure.png and figure.svg (default for one folder of runs: its {LAW_FOLDER}/)",
    "n": "total or nonembed: which parameters N counts (default: what study.json says beside the runs, else total)",
    "loss": "bf16 (default: weights evaluated through BF16 matmuls) or as_trained",
    "seed_sd": "standard deviation of ln(loss) between seeds, a floor under the residuals in the intervals (default: estimated "
               "from runs that differ in the seed alone)",
    "predict": "NAME of a run to come: freezes its prediction in DIR",
    "commit": "HASH of this code, which the prediction names where there is no git",
    "score": "no value: compares the predictions in DIR with the runs that have come",
}
TABLE = {
    "points": "FILE with one header line and a line for each point, instead of runs",
    "n": "its column of parameter counts (required)",
    "loss": "its column of losses in nats per token (required); rows where it is empty or not finite are left out",
    "d": "its column of training tokens: C = 6 N D",
    "c": "its column of training FLOPs: D = C / (6 N). Not both; with neither only the power law in N is fitted",
    "where": "COLUMN=VALUE ... keeps rows with that value; two values for one column keep either. Numbers compare as numbers",
    "drop_highest": "how many of the highest losses to leave out (default 0)",
    "cluster": "its column that names the training run: points of one run are not independent, so intervals count runs",
    "out": "DIR that receives law.json, figure.png and figure.svg (required)",
}
FLAGS = {"score"}


def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the data or the arguments."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        for title, options in (("Options for runs", RUNS), ("Options for a table", TABLE)):
            print(f"{title}, as name=value or --name value:")
            print("\n".join(f"    {name.replace('_', '-'):12} {meaning}" for name, meaning in options.items()))
        return 0
    try:
        paths, options = _parse(arguments)
        # On its way a search may try powers that overflow; the certificate judges where it ends, not numpy's warnings.
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            if "points" in options:
                _fit_table(options)
            else:
                _fit_runs(paths, options)
    except UserError as error:
        print(f"scaling/fit.py: {error}", file=sys.stderr)
        return 2
    return 0


# --------------------------------------------------------------------------------------------------- the command line


def _parse(words) -> tuple[list[str], dict]:
    """Paths and {option: value}; `where` is a list, flags are True."""
    is_table = any(word.removeprefix("--").split("=")[0] == "points" for word in words)
    meanings = RUNS | TABLE if is_table else RUNS | TABLE | RUNS    # n, loss and out mean something in both
    paths, options = read_words(words, meanings, flags=FLAGS, lists=("where",))
    _check(paths, options)
    return paths, options


def _check(paths, options) -> None:
    """Refuse what does not go together, and fill in defaults; numbers become numbers."""
    is_table = "points" in options
    for key in options:
        if key not in (TABLE if is_table else RUNS):
            raise UserError(f"{key.replace('_', '-')} is for {'runs' if is_table else 'a table of points (--points FILE)'}: "
                              f"{(RUNS | TABLE)[key]}")
    if is_table:
        if paths:
            raise UserError(f"{paths[0]!r} stands beside --points: give runs or one table, not both; conditions and names "
                              "with spaces want quotes")
        for key in ("n", "loss"):
            if not options.get(key):
                raise UserError(f"{key}=COLUMN is missing: {TABLE[key]}")
        named = [options[key] for key in ("n", "loss", "d", "c") if key in options]
        if twice := next((name for name in named if named.count(name) > 1), None):
            raise UserError(f"column {twice!r} is given for two things: N, tokens or compute, loss are a column each")
        if "d" in options and "c" in options:
            raise UserError("d and c are both given; choose one: with d, C = 6 N D; with c, D = C / (6 N)")
        options["drop_highest"] = _number(options, "drop_highest", "0", int, TABLE)
    else:
        if not paths:
            raise UserError("no runs given: name run folders such as out/<run>, a folder that holds them, or a table with "
                              "--points FILE")
        for path in paths:
            if Path(path).is_file():
                raise UserError(f"{path} is a file: a table of points is given as --points {path} --n COL --loss COL, runs as "
                                  "their folders")
        if "n" in options and options["n"] not in CONVENTIONS:
            raise UserError(f"n={options['n']!r} must be total or nonembed; as a column it wants its table, --points FILE")
        if "commit" in options and "predict" not in options:
            raise UserError(f"commit={options['commit']} wants --predict NAME: only a prediction names its commit")
        options.setdefault("loss", "bf16")
        if options["loss"] not in ("bf16", "as_trained"):
            raise UserError(f"loss={options['loss']!r} must be bf16 or as_trained")
        if "seed_sd" in options:
            options["seed_sd"] = _number(options, "seed_sd", "0", float, RUNS)
        if "out" not in options and len(paths) == 1 and not (Path(paths[0]) / "summary.json").exists():
            options["out"] = str(Path(paths[0]) / LAW_FOLDER)
    if not options.get("out"):
        raise UserError("out=DIR is missing: name the folder that receives law.json and the figure")
    if Path(options["out"]).exists() and not Path(options["out"]).is_dir():
        raise UserError(f"out={options['out']} is a file: name a folder")


def _number(options, key, default, kind, meanings):
    text = options.get(key, default)
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise UserError(f"{key}={text!r} must be a {'whole ' if kind is int else ''}number, at least 0: {meanings[key]}")
    return value


# ------------------------------------------------------------------------------------------------------- the two inputs


def _fit_table(options) -> None:
    chosen = read_points(options["points"], options["n"], options["loss"], options.get("d"), options.get("c"),
                         options.get("where", ()), options["drop_highest"], options.get("cluster"))
    group, folder = fit_points(chosen.points, Path(options["points"]).name, chosen.axes), Path(options["out"])
    if all(fit.objective is None for fit in group.laws.values()):
        raise UserError(f"{options['points']}: {len(group.loss)} point{'s' * (len(group.loss) > 1)} carry no law "
                          f"({group.laws['power_n'].reason}): give points of several sizes")
    rows = _variants(group)
    ray = ray_of(group.points) if "D" in group.x else None
    law = {"format_version": 2, "source": chosen.source, "conventions": chosen.source["conventions"], "notes": chosen.notes,
           **_ray_json(ray), **_group_json(group, rows)}
    figure = draw([group], [], "loss", ray if on_one_ray(ray) else None)
    write_with(figure, folder, "figure", law, "law.json")
    _print(["\n".join(chosen.notes)], [group], {group.recipe: rows}, [_wrote(folder)])


def _fit_runs(paths, options) -> None:
    folder, loss_key = Path(options["out"]), f"loss_{options['loss']}"
    records, notes = read_runs(paths)
    records, left_out = usable(records)
    records, continued = from_scratch(records)
    records, repeats = without_repeats(records)
    records = counted_as(records, options.get("n"))
    check_comparable(records)
    roots = {Path(path) for path in paths} | {record.folder.parent for record in records}
    predictions, named = predict.load(folder), predict.named_held_out(roots)
    everything, records = records, [r for r in records if not predict.is_held(r, predictions, named)]
    notes += left_out + continued + repeats
    notes += [f"held out of every fit: {r.run_id}" for r in everything if r not in records]
    print("".join(note + "\n" for note in notes), end="")
    if not records:
        raise UserError("no run is left to fit")
    seed_sd, degrees = seed_noise(records, loss_key)
    noise = {"estimate": seed_sd, "degrees_of_freedom": degrees, "used": options.get("seed_sd", seed_sd or 0.0)}
    recipes = sorted({record.recipe for record in records}, key=lambda recipe: (recipe != "bf16", recipe))
    groups = [fit_group([r for r in records if r.recipe == recipe], loss_key, noise["used"],
                        predict.held_of(recipe, everything, predictions, named, loss_key)) for recipe in recipes]
    try:
        found, alone = pairs(records)
    except UserError as error:        # the laws do not need the losses of single sequences
        found, alone = [], [f"no paired gap: {error}"]
    variants = {group.recipe: _variants(group) for group in groups}
    ratios = [record.tokens / record.N for record in records]
    ray = (min(ratios), max(ratios))
    law = {"format_version": 2,
           "conventions": {"N": f"params_{records[0].convention}", "D": "tokens", "C": "flops_per_token * tokens",
                           "loss": loss_key, "loss_unit": "nats per token", "chinchilla_frontier": "C = 6 N D"},
           "seed_noise": noise, **_ray_json(ray), "notes": notes + alone,
           "inputs": [{"run_id": r.run_id, "pair_id": r.pair_id, "recipe": r.recipe, "trunk": r.trunk, "seed": r.seed,
                       "N": r.N, "params_total": r.params_total, "params_nonembed": r.params_nonembed, "D": r.tokens,
                       "C": r.flops_per_token * r.tokens, "loss": getattr(r, loss_key), "summary_sha256": r.summary_sha256}
                      for group in groups for r in group.records],
           "groups": {group.recipe: _group_json(group, variants[group.recipe]) for group in groups},
           **({"laws": {form: fit.plain() for form, fit in groups[0].laws.items()}} if len(groups) == 1 else {}),
           "pairs": [{"pair_id": pair.bf16.pair_id, "bf16": pair.bf16.run_id, "fp8": pair.fp8.run_id,
                      "gap_as_trained": asdict(pair.as_trained), "gap_bf16": asdict(pair.in_bf16),
                      "tok_per_s_ratio": pair.tok_per_s_ratio} for pair in found]}
    figure = draw(groups, found, loss_key, ray if on_one_ray(ray) else None)
    more = [seeds_line(noise), pairs_table(found), _wrote(folder)]
    if "predict" in options:
        frozen = predict.freeze(options["predict"], groups, folder, loss_key, roots=roots, commit=options.get("commit"))
        more.append("\n".join(predict.describe(frozen)))
    if "score" in options:
        more.append("\n".join(predict.score(folder, everything)))
    write_with(figure, folder, "figure", law, "law.json")
    shown = alone if len(alone) <= PAIRS else [f"{len(alone)} runs without a partner of the other precision (law.json)"]
    _print(["\n".join(shown)], groups, variants, more)


def _variants(group) -> list[dict]:
    """The robustness table of the headlined law; over the counts of the runs, where there are runs."""
    names = COUNTS["C"] if group.headline in ("ray", "power_c") else tuple(group.by_convention)
    counts = {name: group.counts[name] for name in names[1:] if name in group.counts}
    return robustness(group.points, group.headline, counts, human)


# ----------------------------------------------------------------------------------------------------- what comes out


def _print(before, groups, variants, after) -> None:
    parts = [*before, *(headline_lines(group) for group in groups), laws_table(groups), conventions_table(groups),
             variants_table(groups, variants), *after]
    print("\n\n".join(part for part in parts if part))


def _wrote(folder: Path) -> str:
    return f"wrote {folder / 'law.json'}, figure.png, figure.svg"


def _ray_json(ray) -> dict:
    return {"delta": DELTA, "tokens_per_param": None if ray is None else list(ray), "one_ray": on_one_ray(ray)}


def _group_json(group, rows) -> dict:
    return {"runs": list(group.names), "n": len(group.loss),
            "headline": {"form": group.headline, "reason": group.headline_reason},
            "laws": {form: fit.plain() for form, fit in group.laws.items()},
            "band": {axis: [fit.plain() for fit in forms] for axis, forms in group.bands.items()},
            "gammas_left_out": group.gammas_left_out, "form_doubt": group.form_doubt, "slopes": group.slopes,
            "allocation": allocation(group),
            "by_convention": {name: fit.plain() for name, fit in group.by_convention.items()}, "robustness": rows}

# ------------------------------------------------------------------------------------- one group of points and its laws


RESAMPLED = 2_000_000       # points drawn by one bootstrap at most, in 200 resamples or more: a table of thousands need not wait
FORMS = ("chinchilla", "ray", "power_n", "power_d", "power_c", "isoflop")
# Ways to count. N is fitted as the records' convention says, C as the first says; the others are in the tables of conventions.
COUNTS = {
    "N": ("params_total", "params_nonembed", "params_matmul"),
    "C": ("flops_per_token", "flops_per_token_causal", "flops_per_token_6n_total", "flops_per_token_6n_nonembed",
          "flops_per_token_6n_matmul"),
}


@dataclass(frozen=True)
class Group:
    """One recipe's runs, smallest compute first, or one table's points, with their laws; arrays have shape (n,)."""

    recipe: str                         # a table's file name where there are no runs
    records: tuple                      # of Record; () for a table
    names: tuple[str, ...]              # of the runs; () for a table
    points: Points
    x: dict[str, np.ndarray]            # "C" training FLOPs, "N" parameters, "D" tokens; a table may give N alone
    loss: np.ndarray                    # nats per token
    laws: dict[str, Fit]                # one of each of FORMS
    headline: str                       # the form that answers for this group
    headline_reason: str
    lines: dict[str, Fit]               # axis -> the law to draw over it
    bands: dict[str, list[Fit]]         # axis -> forms whose spread is the model-form band
    gammas_left_out: list[float]        # members of the band that would need E below zero
    counts: dict[str, np.ndarray]       # convention -> N or training FLOPs so counted; {} for a table
    slopes: dict[str, float | None]     # convention -> -d ln L / d ln x of the power law
    by_convention: dict[str, Fit]       # convention of N, the fitted one first -> Chinchilla's law
    curves: list                        # (tokens, loss) of each run's training
    flops_per_token: np.ndarray | None  # None for a table
    seed_sd: float                      # of ln loss, the floor under the residuals in intervals
    held_out: tuple = ()                # of predict.Held: in no fit
    form_doubt: dict | None = None      # beside Chinchilla's law: what other forms say far out

    @property
    def convention(self) -> str | None:
        """Which parameters N counts, "total" or "nonembed"; None for a table, which does not say."""
        return self.records[0].convention if self.records else None


def fit_group(records, loss_key: str = "loss_bf16", seed_sd: float | None = None, held=(), resamples: int = 1000) -> Group:
    """Fit every law to the runs of one recipe; a law that the runs cannot carry is there with the reason.

    seed_sd: standard deviation of ln(loss) between seeds; None estimates it from runs that differ in the seed alone.
    held: held-out runs (predict.Held), carried along for the figure. resamples: of the bootstrap over trunks, where
    there are enough of them; 0 leaves t-intervals that take every run for an independent one."""
    records = sorted(records, key=lambda record: record.flops_per_token * record.tokens)
    if seed_sd is None:
        seed_sd = seed_noise(records, loss_key)[0] or 0.0
    points = Points(N=_axis(records, "N"), D=_axis(records, "tokens"), C=_axis(records, "flops_per_token"),
                    loss=np.array([getattr(record, loss_key) for record in records]),
                    cluster=np.array([record.trunk for record in records]))
    group = fit_points(points, records[0].recipe, "NDC", seed_sd, resamples)
    counts = {name: _axis(records, name) for name in COUNTS["N"] + COUNTS["C"]}
    slopes = {name: fit_form("power_c", replace(points, C=values)).parameters["gamma"] for name, values in counts.items()}
    own = f"params_{records[0].convention}"
    by_convention = {own: group.laws["chinchilla"]}
    by_convention |= {name: _fitted("chinchilla", replace(points, N=counts[name]), seed_sd, resamples)
                      for name in COUNTS["N"] if name != own}
    return replace(group, records=tuple(records), names=tuple(record.run_id for record in records), counts=counts, slopes=slopes,
                   by_convention=by_convention, curves=[read_curve(record) for record in records],
                   flops_per_token=np.array([record.flops_per_token for record in records]), held_out=tuple(held))


def fit_points(points: Points, name: str, axes: str = "NDC", seed_sd: float = 0.0, resamples: int = 1000) -> Group:
    """Fit every law to points of any origin. axes="N" where tokens and compute are unknown: only the power law in N is
    fitted then, and D and C of the points are not looked at."""
    x = {axis: getattr(points, axis) for axis in axes}
    laws = {form: _fitted(form, points, seed_sd, resamples) if form == "power_n" or len(axes) > 1 else unfitted(
        form, len(points.loss), "the table gives neither tokens (--d) nor compute (--c)") for form in FORMS}
    ray = ray_of(points) if "D" in x else None
    headline, reason = _headline(laws, ray)
    lines, bands, left_out = _lines(laws, headline, x, points, seed_sd, ray)
    return Group(name, (), (), points, x, points.loss, laws, headline, reason, lines, bands, left_out, {}, {}, {}, [], None,
                 seed_sd, form_doubt=_form_doubt(points, seed_sd) if headline == "chinchilla" else None)


def _fitted(form: str, points: Points, seed_sd: float, resamples: int) -> Fit:
    """The form with the intervals that the points' trajectories allow."""
    fit = fit_form(form, points, seed_sd)
    return with_bootstrap(fit, points, min(resamples, max(200, RESAMPLED // len(points.loss)))) if resamples else fit


def _form_doubt(points: Points, seed_sd: float) -> dict | None:
    """What the forms that the points do not refute say at ten times the largest compute, at the tokens per parameter that
    most points have: {N, D, C, low, high, forms}; None where no other form reaches there."""
    ratios = points.D / points.N
    near = [int(np.sum((ratios <= ratio * ONE_RAY) & (ratios >= ratio / ONE_RAY))) for ratio in ratios]
    at = max(range(len(ratios)), key=lambda i: (near[i], points.C[i]))
    grow = math.sqrt(10 * points.C.max() / points.C[at])
    target = (points.N[at] * grow, points.D[at] * grow, 10 * points.C.max())
    try:
        said = forecast(points, target, seed_sd)
    except UserError:
        return None
    low, high = said["parts"]["model_form"]
    return {**dict(zip("NDC", map(float, target), strict=True)), "low": low, "high": high,
            "forms": [one["form"] for one in said["forms"]]} if len(said["forms"]) > 1 else None


def allocation(group: Group) -> dict[str, float]:
    """Convention of C -> the exponent a of N* ~ C^a so counted; {} without runs or an identified L(N, D).

    FLOPs per token grow as N^k with k below 1, attention and head being less than proportional: minimising L(N, D) at constant
    N^k D gives a = beta / (alpha + k beta); k = 1 is C = 6 N D."""
    law = group.laws["chinchilla"]
    if not group.counts or not law.identified:
        return {}
    p, log_n = law.parameters, np.log(group.points.N)
    powers = {name: float(np.polyfit(log_n, np.log(group.counts[name] / group.points.D), 1)[0]) for name in COUNTS["C"]}
    return {name: p["beta"] / (p["alpha"] + k * p["beta"]) for name, k in powers.items()}


def seed_noise(records, loss_key: str = "loss_bf16") -> tuple[float | None, int]:
    """Pooled standard deviation of ln(loss) among runs that differ in the seed alone, with its degrees of freedom.

    Recipes and branches of one size and seed share their data and most of their training: they add no freedom."""
    alike, seeds = {}, {}
    for record in records:
        key = (record.recipe, record.params_total, record.params_matmul, record.tokens, record.decays_from)
        alike.setdefault(key, []).append(math.log(getattr(record, loss_key)))
        seeds.setdefault(record.params_total, set()).add(record.seed)
    squares = sum(float(np.sum((np.array(some) - np.mean(some)) ** 2)) for some in alike.values())
    differences = sum(len(some) - 1 for some in alike.values())
    freedom = min(differences, sum(len(some) - 1 for some in seeds.values()))
    return (math.sqrt(squares / differences) if differences else None), freedom


def _axis(records, name: str) -> np.ndarray:
    """(runs,) the named count; FLOPs per token times tokens where it is one of FLOPs."""
    return np.array([getattr(r, name) * (r.tokens if name in COUNTS["C"] else 1) for r in records], dtype=float)


def _headline(laws, ray) -> tuple[str, str]:
    if ray is None:
        return "power_n", "the table gives N alone, so only the power law in N can be fitted"
    if laws["chinchilla"].identified:
        return "chinchilla", "the points identify L(N, D)"
    why = "one tokens-per-parameter ray does not determine alpha and beta" if on_one_ray(ray) else laws["chinchilla"].reason
    reason = f"L(N, D) is not identified ({why})"
    if laws["ray"].identified:
        return "ray", f"{reason}: ray law instead"
    if on_one_ray(ray):
        return "power_c", f"{reason}, nor is the ray law ({laws['ray'].reason}): power law in C instead"
    return "power_c", f"{reason}: power law in C instead, which mixes the effects of size and of data"


def _lines(laws, headline, x, points, seed_sd, ray):
    """What the figure draws: a law per axis, the forms of its band, the gammas that the band had to leave out.

    Nothing where L(N, D) is headlined: over one axis alone it is no curve."""
    lines, bands, left_out = {}, {}, []
    for axis in x if headline != "chinchilla" else ():
        power = laws[f"power_{axis.lower()}"]
        if power.objective is None:
            continue
        lines[axis] = power
        if axis == "C" or on_one_ray(ray):
            if laws["ray"].identified:
                lines[axis] = laws["ray"] if axis == "C" else fit_ray(x[axis], points.loss, seed_sd=seed_sd)
            # On a ray C is a power of N or D (about 2; attention bends it), so exponents there are as much larger.
            factor = float(np.polyfit(np.log(x[axis]), np.log(x["C"]), 1)[0])
            bands[axis], left_out = fit_band(x[axis], points.loss, axis.lower(), factor)
    return lines, bands, left_out

# -------------------------------------------------------------------------------------------------- text for a terminal


SHOWN = ("E", "A", "B", "K", "alpha", "beta", "gamma", "a")
SCALES = ("N_c", "D_c", "C_c")      # Kaplan's way to write the factor of a power law: in law.json, twice here
PAIRS = 6                           # more of them than these fill the screen; precision.py is the command for them
MEANINGS = {"a": "N* ~ C^a, C = 6 N D", "b": "D* ~ C^b, C = 6 N D"}


def headline_lines(group) -> str:
    """A group's headlined law with its intervals, what it rests on, and why it is this form; several lines."""
    fit = group.laws[group.headline]
    n, clusters = len(group.loss), len(set(group.points.cluster))
    what = f"{group.recipe}: {n} {'runs' if group.records else 'points'}"
    what += f" of {clusters} trajectories" if clusters < n else ""
    kind = KIND[group.convention]
    what += f", {kind}N {_span(group.x['N'].min(), group.x['N'].max(), human)}"
    if "D" in group.x:
        what += f", {_span(*ray_of(group.points), '{:.3g}'.format)} tokens per {kind}parameter"
        what += " (one ratio: L(N), L(D), L(C) are one curve)" if on_one_ray(ray_of(group.points)) else ""
    law = fit.formula(group.headline[-1].upper() if "power" in group.headline else "C") if fit.objective is not None else ""
    lines = [what, f"  {group.headline}: {law}" + ("" if fit.identified else f" (not identified: {fit.reason})" if law
                                                   else f"not fitted: {fit.reason}")]
    for name, (low, high) in (fit.ci95 or {}).items():
        if name in SCALES:
            continue
        lines.append(f"    {name:6} {fit.parameters[name]:<10.5g} 95 % {low:.4g} to {high:.4g}   "
                     f"(standard error {fit.se[name]:.3g})" + (f"   {MEANINGS[name]}" if name in MEANINGS else ""))
    if fit.ci95:
        made = {"t": "t-intervals of the residuals" + f" or of the seeds' SD {100 * group.seed_sd:.3f} %" * (group.seed_sd > 0),
                "cluster": f"cluster-robust t-intervals over {fit.clusters} trajectories",
                "bootstrap": f"{fit.resamples} bootstrap resamples of {fit.clusters} " + (
                    "points, each taken for a run of its own (--cluster COL says which run a point is of)"
                    if fit.clusters == n and not group.records else "trajectories")}
        lines.append(f"    intervals: {made[fit.interval]}; they hold the points' noise, not the doubt in the form")
    lines.append(f"  why this law: {group.headline_reason}")
    if doubt := group.form_doubt:
        lines.append(f"  doubt in the form ({len(doubt['forms'])} forms that the sizes do not refute): at ten times the "
                     f"largest compute, {doubt['D'] / doubt['N']:.3g} tokens per {kind}parameter, {doubt['low']:.4g} to "
                     f"{doubt['high']:.4g}")
    if forms := group.bands.get("C"):
        far = 10 * group.x["C"].max()
        values = sorted(float(form.predict(far)) for form in forms)
        kept = [form.parameters["gamma"] for form in forms[1:]]
        lines.append("  doubt in the form (power law" + (
            f", rays with gamma {min(kept):.2f} to {max(kept):.2f}" if kept else "") + (
            f"; gamma {', '.join(f'{g:.2f}' for g in group.gammas_left_out)} would need E below 0"
            if group.gammas_left_out else "") +
            f"): at ten times the largest compute {values[0]:.4g} to {values[-1]:.4g} nats per token")
    return "\n".join(lines)


def laws_table(groups) -> str:
    """Markdown table of every law of every group with its certificate; under it what is not identified, and why."""
    lines = [["points", "law", "n", "fitted", "exponents, 95 %", "rms %", "starts at best", "gradient", "singular values"]]
    lacking = {}
    for group in groups:
        for form, fit in group.laws.items():
            if not fit.identified:
                name = f"{group.recipe} {form}" if len(groups) > 1 else form
                lacking.setdefault(f"not {'fitted' if fit.objective is None else 'identified'}: {fit.reason}", []).append(name)
            if fit.objective is None and form != "isoflop" or fit.parameters.get("a", 0) is None:
                continue
            exponents = [f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in (fit.ci95 or {}).items()
                         if name in ("alpha", "beta", "gamma") or form == "isoflop" and name in "ab"]
            if form == "isoflop":       # its residuals are of ln N*, and a straight line has no starts
                good = sum(budget["reason"] is None for budget in fit.budgets)
                lines.append([group.recipe if len(groups) > 1 else "", form, str(fit.n),
                              f"{fit.formula()} ({good} of {len(fit.budgets)} budgets)", ", ".join(exponents), *[""] * 4])
                continue
            lines.append([
                group.recipe if len(groups) > 1 else "", form + ("" if fit.identified else " *"), str(fit.n),
                fit.formula("C" if form == "ray" else form[-1].upper()), ", ".join(exponents),
                "" if fit.residual_rms is None else f"{100 * fit.residual_rms:.3f}",
                "" if fit.starts is None else f"{fit.starts_at_best} of {fit.starts}",
                "" if fit.gradient_norm is None else f"{fit.gradient_norm:.0e}",
                " ".join(f"{value:.2g}" for value in fit.singular_values or ())])
    notes = [f"{', '.join(names)} {reason}" for reason, names in lacking.items()]
    if any("D" in group.x and not on_one_ray(ray_of(group.points)) for group in groups):
        notes.append("with several ratios of tokens per parameter a power law in N, D or C alone mixes the effects of size "
                     "and of data: its exponent belongs to this design")
    shown = grid(lines) if len(lines) > 1 else "no law could be fitted"
    return "\n".join([shown, *([""] if notes else []), *(f"* {note}" for note in notes)])


def conventions_table(groups) -> str:
    """Markdown table of the exponents under each way of counting parameters and FLOPs, the fitted one first; "" without runs."""
    groups = [group for group in groups if group.slopes]
    if not groups:
        return ""
    lines = [["counted as", *(f"{group.recipe}: {what}" for group in groups for what in ("slope", "alpha, beta, a"))]]
    for name in (*groups[0].by_convention, *COUNTS["C"]):
        cells = []
        for group in groups:
            fit, shares = group.by_convention.get(name), allocation(group)
            joint = f"a {shares[name]:.4f}" if name in shares else "" if fit is None or not fit.identified else ", ".join(
                f"{fit.parameters[key]:.4f}" for key in ("alpha", "beta", "a"))
            cells += ["" if group.slopes[name] is None else f"{group.slopes[name]:.4f}", joint]
        lines.append([name + " * tokens" * (name in COUNTS["C"]), *cells])
    return grid(lines) + ("\nslope: -dlnL/dlnx of the power law. alpha, beta, a: L(N, D) and N* ~ C^a, where identified, with "
                          "C = 6 N D beside a count of N, else with the law of the first line and C as counted. "
                          "Compare exponents only within one convention.")


def variants_table(groups, rows) -> str:
    """Markdown table of robustness (by recipe) for the first group; the others' are in law.json."""
    first, *others = groups
    if first.laws[first.headline].objective is None:
        return ""
    lines = [f"{first.recipe}, {first.headline} under other choices (* not identified)" + "".join(
        f"; {group.recipe}: in law.json" for group in others) + ":", grid(_variant_cells(rows[first.recipe]))]
    return "\n".join(lines)


def seeds_line(noise) -> str:
    """What is known of the noise between seeds: estimated and how well, or given."""
    estimate, degrees, used = noise["estimate"], noise["degrees_of_freedom"], noise["used"]
    said = "unknown, no two runs differ in the seed alone" if estimate is None else (
        f"SD {100 * estimate:.3f} % of the loss, from runs that differ in the seed alone ({freedom(degrees)})")
    return f"Seed noise: {said}; intervals rest on " + (
        f"at least {100 * used:.3f} %." if used else "the residuals alone (seed_sd=0.001 would set a floor of 0.1 %).")


def pairs_table(found) -> str:
    """Markdown table of BF16 against FP8, a line per pair, with what the standard error does and does not hold; of many
    pairs a sentence."""
    if not found:
        return "No BF16/FP8 pair among these runs."
    if len(found) > PAIRS:
        gaps = sorted(pair.in_bf16.percent for pair in found)
        return (f"{len(found)} BF16/FP8 pairs, single gaps from {gaps[0]:+.3f} to {gaps[-1]:+.3f} % evaluated in BF16; what they "
                "say together, beside the null, is for scaling/precision.py")
    lines = [["FP8 run", "N", "tokens", "loss BF16 arm", "loss FP8 arm as trained", "loss FP8 arm in BF16",
              "gap as trained [nats]", "[%]", "gap in BF16 [nats]", "[%]", "tok/s FP8/BF16"]]
    for pair in found:
        gaps = [text for gap in (pair.as_trained, pair.in_bf16) for text in
                (f"{gap.nats:+.5f}" + ("" if gap.se is None else f" ± {gap.se:.5f}"), f"{gap.percent:+.3f}")]
        ratio = "other machine" if pair.tok_per_s_ratio is None else f"{pair.tok_per_s_ratio:.2f}"
        lines.append([f"{pair.fp8.run_id} ({pair.fp8.recipe})", human(pair.fp8.N), human(pair.fp8.tokens),
                      f"{pair.bf16.loss_bf16:.5f}", f"{pair.fp8.loss_as_trained:.5f}", f"{pair.fp8.loss_bf16:.5f}", *gaps,
                      ratio])
    return grid(lines) + ("\nGap: FP8 minus BF16. ± is one standard error over the validation sequences: evaluation noise "
                          "only, not run-to-run noise, which needs several seeds.")


def _span(low, high, shown) -> str:
    return shown(low) if shown(low) == shown(high) else f"{shown(low)} to {shown(high)}"


def _variant_cells(found: list[dict]) -> list[list[str]]:
    """The rows as cells of text under a heading; parameters are those that the law has."""
    names = [name for name in SHOWN if name in found[0]]
    lines = [["variant", "n", *names, "error on what is left out: mean, largest [%]"]]
    for row in found:
        lacking = "" if row["objective"] is not None else f"not fitted: {row['reason']}"
        error = "" if "error_percent" not in row else f"{row['error_percent']:+.2f}, {row['largest_error_percent']:+.2f}"
        lines.append([f"{row['variant']} {row['value']}".strip() + ("" if row["identified"] else " *"), str(row["n"]),
                      *(_short(row.get(name)) for name in names), lacking or error])
    return lines


def _short(value) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(run(main))
