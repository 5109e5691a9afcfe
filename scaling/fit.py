"""Fit scaling laws to finished runs, one precision recipe at a time, or to a table of published points.

    python scaling/fit.py out/study                     # every finished run under it -> out/study/law/
    python scaling/fit.py out/a_bf16 out/a_fp8 --out report loss=as_trained seed_sd=0.0005
    python scaling/fit.py out/study --predict gpt1p5b_fp8       # freezes a prediction before that run is started
    python scaling/fit.py out/study --score                     # compares it once the run is there
    python scaling/fit.py out/study n=total --out report        # counts all parameters, whatever the study's budgets count
    python scaling/fit.py --points points.csv --n "Model Size" --c "Training FLOP" --loss loss --drop-highest 5 --out DIR
    python scaling/fit.py --points points.csv --n N --d tokens --loss val --where dataset=c4 dataset=rw --where lr=0.003 --out DIR

Prints the headline and what to beware of; with --all every law with its certificate, the counting conventions, what other
choices would have given, the pairs. Writes figure.png, figure.svg, then law.json. A table is comma-, tab-, semicolon- or
|-separated text with a header; its losses are taken as nats per token, its counts as they stand, and nothing is converted.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # Before numpy reads it: thousands of tiny fits are ten times slower when BLAS splits each over threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import ClassVar

import numpy as np

from runtime.cli import UserError, field_lines, grid, read_options, run_command
from scaling import predict
from scaling.figures import draw, write_with
from scaling.intervals import lack_of_fit, robustness, with_bootstrap
from scaling.laws import DELTA, ONE_RAY, Fit, Points, fit_band, fit_form, fit_ray, on_one_ray, ray_of, unfitted
from scaling.pairs import KIND, human, pairs
from scaling.points import read_points
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

LINES = 40                  # of text, without --all
PAIRS = 6                   # more of them than these fill the screen; precision.py is the command for them
RESAMPLED = 2_000_000       # points drawn by one bootstrap at most, in 200 resamples or more: a table of thousands need not wait
FORMS = ("chinchilla", "ray", "power_n", "power_d", "power_c", "isoflop")
# Ways to count. N is fitted as the records' convention says, C as the first says; the others are in the tables of conventions.
COUNTS = {
    "N": ("params_total", "params_nonembed", "params_matmul"),
    "C": ("flops_per_token", "flops_per_token_causal", "flops_per_token_6n_total", "flops_per_token_6n_nonembed",
          "flops_per_token_6n_matmul"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[str, ...] = ()     # run folders such as out/RUN, or folders that hold them
    out: str = ""                   # folder for law.json, figure.png, figure.svg (one folder of runs: its law/)
    n: str = ""                     # runs: total or nonembed, which parameters N counts (as the study does). Table: N's column
    loss: str = ""                  # runs: bf16 (through BF16 matmuls; the default) or as_trained. Table: the column of losses
    seed_sd: float | None = None    # runs: SD of ln(loss) between seeds, a floor in the intervals (estimated from seeds)
    predict: str = ""               # runs: a run to come, whose prediction is frozen in out
    commit: str = ""                # runs: of this code, which the prediction names where there is no git
    score: bool = False             # runs: compare the predictions in out with the runs that have come
    points: str = ""                # a table with a header line, instead of runs
    d: str = ""                     # table: column of training tokens; C = 6 N D
    c: str = ""                     # table: column of training FLOPs; D = C / (6 N). Neither d nor c: the power law in N alone
    cluster: str = ""               # table: column that names the training run; its points are not independent
    drop_highest: int = 0           # table: how many of the highest losses to leave out
    insist: bool = False            # headline L(N, D) even where it does not fit
    all: bool = False               # print everything

    POSITIONAL: ClassVar = ("paths",)


def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the data or the arguments."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        print(__doc__, "Options, as name=value or --name value:", *field_lines("", Options),
              f"  {'where':24} {'COLUMN=VALUE ...':39}  table: keep rows with it; two values of one column keep either", sep="\n")
        return 0
    try:
        words, where = _conditions(arguments)
        options = read_options(Options, words)
        _check(options, where)
        # On its way a search may try powers that overflow; the certificate judges where it ends, not numpy's warnings.
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            _fit_table(options, where) if options.points else _fit_runs(options)
    except UserError as error:
        print(f"scaling/fit.py: {error}", file=sys.stderr)
        return 2
    return 0


def _conditions(words) -> tuple[list[str], list[str]]:
    """(the other words, the conditions): after --where as many COLUMN=VALUE as come, until an option's own name."""
    names, rest, where, is_open = Options.__dataclass_fields__, [], [], False
    for word in words:
        if word == "--where":
            is_open = True
        elif word.startswith(("--where=", "where=")):
            is_open = True
            where.append(word.split("=", 1)[1])
        elif is_open and "=" in word and not word.startswith("--") and word.split("=")[0] not in names:
            where.append(word)
        else:
            is_open = False
            rest.append(word)
    return rest, where


def _check(o: Options, where) -> None:
    """Refuse what does not go together."""
    is_table, given = bool(o.points), [one.name for one in fields(Options) if getattr(o, one.name) != one.default]
    for names, of_table in ((("seed_sd", "predict", "commit", "score"), False), (("d", "c", "cluster", "drop_highest"), True)):
        if wrong := next((name for name in names if name in given and is_table != of_table), None):
            raise UserError(f"{wrong} is for {'a table of points (--points FILE)' if of_table else 'runs'}, not for the other")
    if where and not is_table:
        raise UserError("where is for a table of points (--points FILE), not for runs")
    if is_table:
        if o.paths:
            raise UserError(f"{o.paths[0]!r} stands beside --points: give runs or one table, not both; conditions and names "
                            "with spaces want quotes")
        if missing := next((name for name in ("n", "loss") if name not in given), None):
            raise UserError(f"{missing}=COLUMN is missing: a table wants its columns of N and of losses")
        named = [name for name in (o.n, o.loss, o.d, o.c) if name]
        if twice := next((name for name in named if named.count(name) > 1), None):
            raise UserError(f"column {twice!r} is given for two things: N, tokens or compute, loss are a column each")
        if o.drop_highest < 0:
            raise UserError(f"drop_highest={o.drop_highest} must be at least 0")
    else:
        if not o.paths:
            raise UserError("no runs given: name run folders such as out/<run>, a folder that holds them, or a table with "
                            "--points FILE")
        if table := next((path for path in o.paths if Path(path).is_file()), None):
            raise UserError(f"{table} is a file: a table of points is given as --points {table} --n COL --loss COL, runs as "
                            "their folders")
        if o.n not in ("", *CONVENTIONS):
            raise UserError(f"n={o.n!r} must be total or nonembed; as a column it wants its table, --points FILE")
        if o.commit and not o.predict:
            raise UserError(f"commit={o.commit} wants --predict NAME: only a prediction names its commit")
        if o.loss not in ("", "bf16", "as_trained"):
            raise UserError(f"loss={o.loss!r} must be bf16 or as_trained")
        if o.seed_sd is not None and not 0 <= o.seed_sd < math.inf:
            raise UserError(f"seed_sd={o.seed_sd} must be a number, at least 0")
    if not _folder(o):
        raise UserError("out=DIR is missing: name the folder that receives law.json and the figure")
    if Path(_folder(o)).is_file():
        raise UserError(f"out={o.out} is a file: name a folder")


def _folder(options: Options) -> str:
    """Where law.json goes; "" where that is not said."""
    alone = len(options.paths) == 1 and not (Path(options.paths[0]) / "summary.json").exists()
    return options.out or (str(Path(options.paths[0]) / LAW_FOLDER) if alone else "")


# ------------------------------------------------------------------------------------------------------- the two inputs


def _fit_table(o: Options, where) -> None:
    chosen = read_points(o.points, o.n, o.loss, o.d or None, o.c or None, where, o.drop_highest, o.cluster or None)
    group, folder = fit_points(chosen.points, Path(o.points).name, chosen.axes, insist=o.insist), Path(o.out)
    if all(fit.objective is None for fit in group.laws.values()):
        raise UserError(f"{o.points}: {len(group.loss)} point{'s' * (len(group.loss) > 1)} carry no law "
                        f"({group.laws['power_n'].reason}): give points of several sizes")
    rows = _variants(group)
    ray = ray_of(group.points) if "D" in group.x else None
    law = {"format_version": 2, "source": chosen.source, "conventions": chosen.source["conventions"], "notes": chosen.notes,
           **_ray_json(ray), **_group_json(group, rows)}
    write_with(draw([group], [], "loss", ray if on_one_ray(ray) else None), folder, "figure", law, "law.json")
    _print([group], chosen.notes, [], {group.recipe: rows}, folder, o.all)


def _fit_runs(o: Options) -> None:
    folder, loss_key = Path(_folder(o)), f"loss_{o.loss or 'bf16'}"
    records, notes = read_runs(o.paths)
    for sieve in (usable, from_scratch, without_repeats):
        records, left_out = sieve(records)
        notes += left_out
    records = counted_as(records, o.n or None)
    check_comparable(records)
    roots = {Path(path) for path in o.paths} | {record.folder.parent for record in records}
    predictions, named = predict.load(folder), predict.named_held_out(roots)
    everything, records = records, [r for r in records if not predict.is_held(r, predictions, named)]
    notes += [f"held out of every fit: {r.run_id}" for r in everything if r not in records]
    if not records:
        raise UserError("\n".join(["no run is left to fit", *notes]))
    seed_sd, degrees = seed_noise(records, loss_key)
    noise = {"estimate": seed_sd, "degrees_of_freedom": degrees, "used": (seed_sd or 0.0) if o.seed_sd is None else o.seed_sd}
    recipes = sorted({record.recipe for record in records}, key=lambda recipe: (recipe != "bf16", recipe))
    groups = [fit_group([r for r in records if r.recipe == recipe], loss_key, noise["used"],
                        predict.held_of(recipe, everything, predictions, named, loss_key), insist=o.insist) for recipe in recipes]
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
    said = [_seeds(noise), _pairs(found, o.all)]
    if o.predict:
        frozen = predict.freeze(o.predict, groups, folder, loss_key, roots=roots, commit=o.commit or None)
        lines = predict.describe(frozen)
        said.append("\n".join(lines if o.all else [*lines[:2], lines[-1]]))
    if o.score:
        said.append("\n".join(predict.score(folder, everything)))
    write_with(figure, folder, "figure", law, "law.json")
    alone = alone if len(alone) <= PAIRS else [f"{len(alone)} runs without a partner of the other precision (law.json)"]
    _print(groups, notes + alone, said, variants, folder, o.all)


def _variants(group) -> list[dict]:
    """The robustness table of the headlined law; over the counts of the runs, where there are runs."""
    names = COUNTS["C"] if group.headline in ("ray", "power_c") else tuple(group.by_convention)
    counts = {name: group.counts[name] for name in names[1:] if name in group.counts}
    return robustness(group.points, group.headline, counts, human)


def _ray_json(ray) -> dict:
    return {"delta": DELTA, "tokens_per_param": None if ray is None else list(ray), "one_ray": on_one_ray(ray)}


def _group_json(group, rows) -> dict:
    lack = group.lack_of_fit and group.lack_of_fit | {
        "left_out": [_name(group, i) for i in group.lack_of_fit["left_out"]],
        "without": group.lack_of_fit["without"] and group.lack_of_fit["without"].plain()}
    return {"runs": [record.run_id for record in group.records], "n": len(group.loss),
            "headline": {"form": group.headline, "reason": group.headline_reason}, "lack_of_fit": lack,
            "laws": {form: fit.plain() for form, fit in group.laws.items()},
            "band": {axis: [fit.plain() for fit in forms] for axis, forms in group.bands.items()},
            "gammas_left_out": group.gammas_left_out, "form_doubt": group.form_doubt, "slopes": group.slopes,
            "allocation": allocation(group),
            "by_convention": {name: fit.plain() for name, fit in group.by_convention.items()}, "robustness": rows}


def _name(group, i: int) -> str:
    """A point in words: its run, or what tells the table's rows apart (its line, where no column names runs)."""
    return group.records[i].run_id if group.records else str(group.points.cluster[i])


# --------------------------------------------------------------------------------------- one group of points, its laws


@dataclass(frozen=True)
class Group:
    """One recipe's runs, smallest compute first, or one table's points, with their laws; arrays have shape (n,).

    Its headline is Chinchilla's L(N, D) where the points identify it and it fits them, else the ray law where they lie on
    one ray and identify that, else a power law."""

    recipe: str                         # a table's file name where there are no runs
    records: tuple                      # of Record; () for a table
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
    seed_sd: float                      # of ln loss, the floor under the residuals in intervals
    held_out: tuple = ()                # of predict.Held: in no fit
    form_doubt: dict | None = None      # beside Chinchilla's law: what other forms say far out
    lack_of_fit: dict | None = None     # of Chinchilla's law, identified or not the headline

    @property
    def convention(self) -> str | None:
        """Which parameters N counts, "total" or "nonembed"; None for a table, which does not say."""
        return self.records[0].convention if self.records else None


def fit_group(records, loss_key: str = "loss_bf16", seed_sd: float | None = None, held=(), resamples: int = 1000,
              insist: bool = False) -> Group:
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
    group = fit_points(points, records[0].recipe, "NDC", seed_sd, resamples, tuple(records), insist)
    counts = {name: _axis(records, name) for name in COUNTS["N"] + COUNTS["C"]}
    slopes = {name: fit_form("power_c", replace(points, C=values)).parameters["gamma"] for name, values in counts.items()}
    own = f"params_{records[0].convention}"
    by_convention = {own: group.laws["chinchilla"]}
    by_convention |= {name: _fitted("chinchilla", replace(points, N=counts[name]), seed_sd, resamples)
                      for name in COUNTS["N"] if name != own}
    return replace(group, counts=counts, slopes=slopes, by_convention=by_convention,
                   curves=[read_curve(record) for record in records], held_out=tuple(held))


def fit_points(points: Points, name: str, axes: str = "NDC", seed_sd: float = 0.0, resamples: int = 1000, records=(),
               insist: bool = False) -> Group:
    """Fit every law to points of any origin. axes="N" where tokens and compute are unknown: only the power law in N is
    fitted then, and D and C of the points are not looked at. insist: headline L(N, D) even where it does not fit."""
    x = {axis: getattr(points, axis) for axis in axes}
    laws = {form: _fitted(form, points, seed_sd, resamples) if form == "power_n" or len(axes) > 1 else unfitted(
        form, len(points.loss), "the table gives neither tokens (--d) nor compute (--c)") for form in FORMS}
    ray = ray_of(points) if "D" in x else None
    lack = lack_of_fit(laws["chinchilla"], points, seed_sd) if laws["chinchilla"].identified else None
    headline, reason = _headline(laws, ray, lack and not insist)
    lines, bands, left_out = _lines(laws, headline, x, points, seed_sd, ray)
    return Group(name, records, points, x, points.loss, laws, headline, reason, lines, bands, left_out, {}, {}, {}, [], seed_sd,
                 form_doubt=_form_doubt(points, seed_sd) if headline == "chinchilla" else None, lack_of_fit=lack)


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
        said = predict.forecast(points, target, seed_sd)
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


def _headline(laws, ray, is_misfit) -> tuple[str, str]:
    if ray is None:
        return "power_n", "the table gives N alone, so only the power law in N can be fitted"
    if laws["chinchilla"].identified and not is_misfit:
        return "chinchilla", "the points identify L(N, D)"
    why = "one tokens-per-parameter ray does not determine alpha and beta" if on_one_ray(ray) else laws["chinchilla"].reason
    reason = "L(N, D) does not fit the points (--insist headlines it all the same)" if is_misfit else (
        f"L(N, D) is not identified ({why})")
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


# --------------------------------------------------------------------------------------------------- text for a terminal


def _print(groups, notes, said, variants, folder: Path, everything: bool) -> None:
    """Headlines with their warnings, notes, what else is `said`, the tables where everything is wanted; else at most LINES."""
    parts = [_warnings(group) for group in groups] + [_headlined(group, len(groups) <= 2 or everything) for group in groups]
    wrote = f"wrote {folder / 'law.json'}, figure.png, figure.svg" + "; --all prints every law and table" * (not everything)
    if everything:
        parts += [_laws(groups), _conventions(groups), _choices(groups, variants)]
    elif len(notes) > 4:
        notes = [*notes[:3], f"... and {len(notes) - 3} more such notes in law.json"]
    lines = "\n\n".join(part for part in [*parts, "\n".join(notes), *said] if part).split("\n")
    if not everything and len(lines) > LINES - 2:
        lines = [*lines[:LINES - 3], f"... {len(lines) - LINES + 3} more lines with --all"]
    print("\n".join([*lines, "", wrote]))


def _warnings(group) -> str:
    """What is wrong with the headline or with L(N, D), in sentences that look like warnings; "" where nothing is."""
    fit, lack, lines = group.laws[group.headline], group.lack_of_fit, []
    if not fit.identified:
        lines.append(f"WARNING: {group.recipe}: the headlined law is not identified: {fit.reason}")
    if lack:
        worst = max(lack["by_ratio"], key=lambda one: abs(one["mean_percent"]))
        lines.append(
            f"WARNING: {group.recipe}: L(N, D) does not fit: residuals of {100 * lack['residual_rms']:.2g} % against noise of "
            f"{100 * lack['noise']:.2g} % (of {lack['noise_of']}); the losses at {worst['low']:.3g} to {worst['high']:.3g} "
            f"tokens per parameter lie {worst['mean_percent']:+.2g} % off it" + ("" if group.headline != "chinchilla" else
                                                                      "; headlined all the same, because of --insist"))
        if less := lack["without"]:
            names, what = [_name(group, i) for i in lack["left_out"]], "runs" if group.records else "points"
            lines += [f"  without the {len(names)} {what} below {lack['below']:.3g} tokens per parameter ({', '.join(names[:8])}"
                      f"{', ...' * (len(names) > 8)}): {less.formula()}, residuals {100 * less.residual_rms:.2g} %, " + ", ".join(
                          f"{name} {less.parameters[name]:.3g} ({less.ci95[name][0]:.3g} to {less.ci95[name][1]:.3g})"
                          for name in ("alpha", "beta", "a") if name in (less.ci95 or {}))]
        else:
            lines.append("  and leaving out early points, up to half of all, does not mend it: another form is needed")
    return "\n".join(lines)


def _headlined(group, is_full: bool) -> str:
    """A group's headlined law with its intervals, what it rests on, and why it is this form; several lines."""
    fit = group.laws[group.headline]
    n, clusters = len(group.loss), len(set(group.points.cluster))
    kind = KIND[group.convention]
    what = f"{group.recipe}: {n} {'runs' if group.records else 'points'}" + f" of {clusters} trajectories" * (clusters < n)
    what += f", {kind}N {_span(group.x['N'].min(), group.x['N'].max(), human)}"
    if "D" in group.x:
        what += f", {_span(*ray_of(group.points), '{:.3g}'.format)} tokens per {kind}parameter"
        what += " (one ratio: L(N), L(D), L(C) are one curve)" if on_one_ray(ray_of(group.points)) else ""
    law = fit.formula(group.headline[-1].upper() if "power" in group.headline else "C") if fit.objective is not None else ""
    lines = [what, f"  {group.headline}: {law}" + ("" if fit.identified else f" (not identified: {fit.reason})" if law
                                                   else f"not fitted: {fit.reason}")]
    shown = {name: ends for name, ends in (fit.ci95 or {}).items() if not name.endswith("_c")}      # Kaplan's scales: the factor
    if not is_full:
        return "\n".join([*lines, "    " + ", ".join(f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in shown.items())])
    for name, (low, high) in shown.items():
        lines.append(f"    {name:6} {fit.parameters[name]:<10.5g} 95 % {low:.4g} to {high:.4g}   "
                     f"(standard error {fit.se[name]:.3g})" + {
                         "a": "   N* ~ C^a, C = 6 N D", "b": "   D* ~ C^b, C = 6 N D"}.get(name, ""))
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
        values = sorted(float(form.predict(10 * group.x["C"].max())) for form in forms)
        kept = [form.parameters["gamma"] for form in forms[1:]]
        lines.append("  doubt in the form (power law" + (
            f", rays with gamma {min(kept):.2f} to {max(kept):.2f}" if kept else "") + (
            f"; gamma {', '.join(f'{g:.2f}' for g in group.gammas_left_out)} would need E below 0"
            if group.gammas_left_out else "") +
            f"): at ten times the largest compute {values[0]:.4g} to {values[-1]:.4g} nats per token")
    return "\n".join(lines)


def _laws(groups) -> str:
    """Table of every law of every group with its certificate; under it what is not identified, and why."""
    lines = [["points", "law", "n", "fitted", "exponents, 95 %", "rms %", "starts at best", "gradient", "singular values"]]
    lacking = {}
    for group in groups:
        for form, fit in group.laws.items():
            if not fit.identified:
                name = f"{group.recipe} {form}" if len(groups) > 1 else form
                lacking.setdefault(f"not {'fitted' if fit.objective is None else 'identified'}: {fit.reason}", []).append(name)
            if fit.objective is None:
                continue
            names = "ab" if form == "isoflop" else ("alpha", "beta", "gamma")
            exponents = [f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in (fit.ci95 or {}).items() if name in names]
            cells = [group.recipe if len(groups) > 1 else "", form + " *" * (not fit.identified), str(fit.n),
                     fit.formula("C" if form == "ray" else form[-1].upper()), ", ".join(exponents)]
            if form == "isoflop":       # its residuals are of ln N*, and a straight line has no starts
                good = sum(budget["reason"] is None for budget in fit.budgets)
                used = next((one["window"] for one in fit.windows if one["a"] == fit.parameters["a"]), None)
                cells[3] += f" ({good} of {len(fit.budgets)} budgets, " + (
                    f"sizes within {used}x of each minimum)" if used else "all their sizes)")
                lines.append(cells + [""] * 4)
            else:
                lines.append([*cells, "" if fit.residual_rms is None else f"{100 * fit.residual_rms:.3f}",
                              f"{fit.starts_at_best} of {fit.starts}", f"{fit.gradient_norm:.0e}",
                              " ".join(f"{value:.2g}" for value in fit.singular_values)])
    notes = [f"{', '.join(names)} {reason}" for reason, names in lacking.items()]
    if any("D" in group.x and not on_one_ray(ray_of(group.points)) for group in groups):
        notes.append("with several ratios of tokens per parameter a power law in N, D or C alone mixes the effects of size "
                     "and of data: its exponent belongs to this design")
    return "\n".join([grid(lines), *([""] if notes else []), *(f"* {note}" for note in notes)])


def _conventions(groups) -> str:
    """Table of the exponents under each way of counting parameters and FLOPs, the fitted one first; "" without runs."""
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


def _choices(groups, rows) -> str:
    """Table of the robustness rows (by recipe) of the first group; the others' are in law.json."""
    first, *others = groups
    found = rows[first.recipe]
    if found[0]["objective"] is None:
        return ""
    names = [name for name in ("E", "A", "B", "K", "alpha", "beta", "gamma", "a") if name in found[0]]
    lines = [["variant", "n", *names, "error on what is left out: mean, largest [%]"]]
    for row in found:
        error = "" if "error_percent" not in row else f"{row['error_percent']:+.2f}, {row['largest_error_percent']:+.2f}"
        lines.append([f"{row['variant']} {row['value']}".strip() + " *" * (not row["identified"]), str(row["n"]),
                      *("" if row.get(name) is None else f"{row[name]:.4g}" for name in names),
                      error if row["objective"] is not None else f"not fitted: {row['reason']}"])
    return f"{first.recipe}, {first.headline} under other choices (* not identified)" + "".join(
        f"; {group.recipe}: in law.json" for group in others) + ":\n" + grid(lines)


def _seeds(noise) -> str:
    """What is known of the noise between seeds: estimated and how well, or given."""
    estimate, degrees, used = noise["estimate"], noise["degrees_of_freedom"], noise["used"]
    said = "unknown, no two runs differ in the seed alone" if estimate is None else (
        f"SD {100 * estimate:.3f} % of the loss, from runs that differ in the seed alone ({degrees} "
        f"degree{'s' * (degrees != 1)} of freedom)")
    return f"Seed noise: {said}; intervals rest on " + (
        f"at least {100 * used:.3f} %." if used else "the residuals alone (seed_sd=0.001 would set a floor of 0.1 %).")


def _pairs(found, everything: bool) -> str:
    """BF16 against FP8 in a sentence, or in a table with a line per pair where there are few and everything is wanted."""
    if not found:
        return "No BF16/FP8 pair among these runs."
    if len(found) > PAIRS or not everything:
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


if __name__ == "__main__":
    sys.exit(run_command(main))
