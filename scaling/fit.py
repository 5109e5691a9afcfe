"""Fit scaling laws to finished runs, one precision recipe at a time, or to a table of published points.

    python scaling/fit.py out/study                     # every finished run under it -> out/study/law/
    python scaling/fit.py out/a_bf16 out/a_fp8 --out report loss=as_trained seed_sd=0.0005
    python scaling/fit.py out/study --predict gpt1p5b_tensorwise_t20_s1337       # freezes a prediction before that run is started
    python scaling/fit.py out/study --score                     # compares it once the run is there
    python scaling/fit.py --points points.csv --n "Model Size" --c "Training FLOP" --loss loss --drop-highest 5 --out DIR
    python scaling/fit.py --points points.csv --n N --d tokens --loss val --where dataset=c4,dataset=rw,lr=0.003 --out DIR

Prints the headline after its warnings; with --all every law with its certificate and what other choices would have given. Writes
figure.png, figure.svg, then law.json. A table is comma-, tab- or semicolon-separated text with a header; its losses are taken as
nats per token, its counts as they stand, and nothing is converted.
"""

import os
from pathlib import Path

if __name__ == "__main__":
    # Before numpy reads it: thousands of tiny fits are ten times slower when BLAS splits each over threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import json
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from runtime.cli import UserError, command, run_command, si
from scaling import predict
from scaling.figures import draw, write_with
from scaling.laws import DELTA, ONE_RAY, Fit, Points, fit_band, fit_form, fit_law, lack_of_fit, on_one_ray, robustness, unfitted
from scaling.pairs import KIND, pairs
from scaling.points import read_points
from scaling.precision import LINES, table
from scaling.records import check_comparable, counted_as, from_scratch, law_folder, read_curve, read_runs, usable, without_repeats

SHOWN = 8                   # points that a warning names
RESAMPLED = 2_000_000       # points drawn by one bootstrap at most, in 200 resamples or more: a table of thousands need not wait
FORMS = ("chinchilla", "ray", "power_n", "power_d", "power_c", "isoflop")
INTERVALS = {"t": "t-intervals of the residuals, at least of the seeds' SD", "cluster": "t-intervals over {} trajectories",
             "bootstrap": "{1} bootstrap resamples of {0} trajectories (in a table --cluster COL names them)"}
FOR_RUNS, FOR_A_TABLE = ("seed_sd", "predict", "score"), ("d", "c", "cluster", "drop_highest", "where")    # of Options


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[str, ...] = ()     # run folders such as out/RUN, or folders that hold them
    out: str = ""                   # folder for law.json, figure.png, figure.svg (one folder of runs: its law/)
    n: str = ""                     # runs: total or nonembed, which parameters N counts (as the study does). Table: N's column
    loss: str = ""                  # runs: bf16 (through BF16 matmuls; the default) or as_trained. Table: the column of losses
    seed_sd: float | None = None    # runs: SD of ln(loss) between seeds, a floor in the intervals (estimated from seeds)
    predict: str = ""               # runs: a run to come, whose prediction is frozen in out
    score: bool = False             # runs: compare the predictions in out with the runs that have come
    points: str = ""                # a table with a header line, instead of runs
    d: str = ""                     # table: column of training tokens; C = 6 N D
    c: str = ""                     # table: column of training FLOPs; D = C / (6 N). Neither d nor c: the power law in N alone
    cluster: str = ""               # table: column that names the training run; its points are not independent
    drop_highest: int = 0           # table: how many of the highest losses to leave out
    where: tuple[str, ...] = ()     # table: COL=VALUE,..: keep rows with these; two values of one column keep either
    insist: bool = False            # headline L(N, D) even where it does not fit
    all: bool = False               # print everything

    POSITIONAL: ClassVar = ("paths",)

    def __post_init__(self):
        if bool(self.points) == bool(self.paths):
            raise UserError("give either run folders such as out/RUN, a folder that holds them, or a table with --points FILE")
        if strange := [name for name in (FOR_RUNS if self.points else FOR_A_TABLE) if getattr(self, name)]:
            raise UserError(f"{' and '.join(strange)}: only for {'runs' if self.points else 'a table of points=FILE'}")
        for name, value, words in (("n", self.n, ("total", "nonembed")), ("loss", self.loss, ("bf16", "as_trained"))):
            if self.points and not value:
                raise UserError(f"{name}= is missing: it names a column of the table")
            if not self.points and value not in ("", *words):
                raise UserError(f"{name}={value!r} must be {' or '.join(words)} for runs")


@command(__doc__, Options)
# On its way a search may try powers that overflow; the certificate judges where it ends, not numpy's warnings.
@np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
def main(o: Options) -> None:
    folder = law_folder(o.paths, o.out)
    if o.paths:
        _fit_runs(o, folder)
    else:
        chosen = read_points(o.points, o.n, o.loss, o.d or None, o.c or None, o.where, o.drop_highest, o.cluster or None)
        group = fit_points(chosen.points, Path(o.points).name, chosen.axes, insist=o.insist)
        if all(fit.objective is None for fit in group.laws.values()):
            raise UserError(f"{o.points}: no law can be fitted ({group.laws['power_n'].reason}): give points of several sizes")
        _finish([group], [], "loss", {"source": chosen.source, "notes": chosen.notes, **group.plain()}, folder, [], o.all)


def _fit_runs(o: Options, folder: Path) -> None:
    loss_key = f"loss_{o.loss or 'bf16'}"
    finished, notes = read_runs(o.paths)
    every = counted_as(finished, o.n or None)
    for sieve in (usable, from_scratch, without_repeats):
        every, left_out = sieve(every)
        notes += left_out
    predictions = predict.load(folder)
    held = predict.held_out(every, predictions)
    records = [one for one in every if one not in held]
    notes += [f"held out of every fit: {one.run_id}" for one in held]
    if not records:
        raise UserError("\n".join(["no run is left to fit", *notes]))
    check_comparable(every)
    estimate, degrees = seed_noise(records, loss_key)
    seed_sd = (estimate or 0.0) if o.seed_sd is None else o.seed_sd
    groups = [fit_group([one for one in records if one.recipe == recipe], loss_key, seed_sd, insist=o.insist,
                        held=predict.held_of(recipe, held, predictions, loss_key, records[0].convention))
              for recipe in sorted({one.recipe for one in records}, key=lambda recipe: (recipe != "bf16", recipe))]
    try:
        found, alone = pairs(records)
    except UserError as error:        # the laws do not need the losses of single sequences
        found, alone = [], [f"no paired gap: {error}"]
    notes += alone
    gaps = [pair.in_bf16.percent for pair in found]
    said = [f"Seed noise: {'unknown' if estimate is None else f'SD {100 * estimate:.3f} % of the loss'} from {degrees} degrees "
            f"of freedom; intervals rest on at least {100 * seed_sd:.3f} % (seed_sd=)",
            f"{len(gaps)} BF16/FP8 pairs, gaps of {min(gaps):+.3f} to {max(gaps):+.3f} % in BF16; scaling/precision.py judges "
            "them" if gaps else "No BF16/FP8 pair among these runs."]
    if o.predict:
        said += predict.describe(predict.freeze(o.predict, groups, finished, folder, loss_key))
    if o.score:
        said += predict.score(folder, every)
    law = {"conventions": {"N": f"params_{records[0].convention}", "D": "tokens", "C": "flops_per_token * tokens",
                           "loss": loss_key, "loss_unit": "nats per token", "chinchilla_frontier": "C = 6 N D"},
           "seed_noise": {"estimate": estimate, "degrees_of_freedom": degrees, "used": seed_sd}, "notes": notes,
           "inputs": [{"run_id": r.run_id, "pair_id": r.pair_id, "recipe": r.recipe, "trunk": r.trunk, "seed": r.seed,
                       "N": r.N, "params_total": r.params_total, "params_nonembed": r.params_nonembed, "D": r.tokens,
                       "C": r.flops_per_token * r.tokens, "loss": getattr(r, loss_key), "summary_sha256": r.summary_sha256}
                      for group in groups for r in group.records],
           "groups": {group.recipe: group.plain() for group in groups}}
    if len(groups) == 1:
        law["laws"] = law["groups"][groups[0].recipe]["laws"]
    _finish(groups, found, loss_key, law, folder, said, o.all)


def _finish(groups, found, loss_key: str, law: dict, folder: Path, said: list[str], everything: bool) -> None:
    """Write the figure, then law.json. Print warnings and headlines, the notes of `law`, then what else is `said`, such as a
    score; all tables where everything is wanted, else at most LINES: what is said stays whole."""
    content = json.loads(json.dumps({"format_version": 2, "delta": DELTA} | law), parse_constant=lambda _: None)    # NaN: null
    write_with(folder, "figure", draw(groups, found, loss_key), {"law.json": content})
    lines = [line for group in groups for line in _warnings(group)]
    for group in groups:
        lines += ["", *_headline_lines(group)[:None if everything or len(groups) <= 2 else 3]]
    for group in groups if everything else ():
        lines += ["", f"{group.recipe}: every law", table([
            {"law": form, "n": fit.n, "fitted": fit.formula(), "95 %": _intervals(fit), "rms": fit.residual_rms,
             "starts at best": fit.starts and f"{fit.starts_at_best} of {fit.starts}", "gradient": fit.gradient_norm,
             "not identified because": fit.reason} for form, fit in group.laws.items()])]
        lines += ["", f"{group.recipe}: {group.headline} under other choices", table(group.robustness)]
    lines, room = "\n".join([*lines, "", *law["notes"]]).strip("\n").split("\n"), max(1, LINES - 2 - len(said))
    if len(lines) > room and not everything:
        lines = [*lines[:room - 1], f"... {len(lines) - room + 1} more lines with --all"]
    print("\n".join([*lines, *said]), "", f"wrote {folder / 'law.json'}, figure.png, figure.svg"
          + "; --all prints every law and table" * (not everything), sep="\n")


@dataclass(frozen=True)
class Group:
    """One recipe's runs, smallest compute first, or one table's points, with their laws; arrays have shape (n,)."""

    recipe: str                         # a table's file name where there are no runs
    records: tuple                      # of Record; () for a table
    points: Points
    x: dict[str, np.ndarray]            # "C" training FLOPs, "N" parameters, "D" tokens; a table may give N alone
    laws: dict[str, Fit]                # one of each of FORMS
    headline: str                       # the form that answers for this group
    headline_reason: str
    seed_sd: float                      # of ln loss, the floor under the residuals in intervals
    form_doubt: dict | None = None      # beside Chinchilla's law: what other forms say far out
    lack_of_fit: dict | None = None     # of Chinchilla's law, identified or not the headline
    counts: dict = field(default_factory=dict)          # of runs: "N" or "C" -> {another convention: values so counted}
    curves: tuple = ()                  # (tokens, loss) of each run's training
    held_out: tuple = ()                # of predict.Held: in no fit

    @property
    def loss(self) -> np.ndarray:
        return self.points.loss

    @property
    def convention(self) -> str | None:
        """Of Record; None for a table, which does not say what its N counts."""
        return self.records[0].convention if self.records else None

    @property
    def ray(self) -> tuple[float, float] | None:
        """Smallest and largest tokens per parameter; None for a table that gives N alone."""
        return self.points.ray if "D" in self.x else None

    @cached_property
    def lines(self) -> dict[str, Fit]:
        """Axis -> the law that the figure draws over it; none where L(N, D) is headlined, which is no curve."""
        powers = {axis: self.laws[f"power_{axis.lower()}"] for axis in self.x if self.headline != "chinchilla"}
        found = {axis: law for axis, law in powers.items() if law.objective is not None}
        if self.laws["ray"].identified:
            found |= {axis: fit_law("ray", self.x[axis], self.loss, seed_sd=self.seed_sd) for axis in found if axis != "C"}
            found["C"] = self.laws["ray"]
        return found

    @cached_property
    def bands(self) -> dict[str, list[Fit]]:
        """Axis -> forms whose spread is the model-form band: over C, on one ray over N and D too."""
        found = {}
        for axis in [axis for axis in self.lines if axis == "C" or on_one_ray(self.ray)]:
            # On a ray C is a power of N or D (about 2; attention bends it), so exponents there are as much larger.
            factor = float(np.polyfit(np.log(self.x[axis]), np.log(self.x["C"]), 1)[0])
            found[axis] = fit_band(self.x[axis], self.loss, axis.lower(), factor)
        return found

    @cached_property
    def robustness(self) -> list[dict]:
        """The headlined law under other choices; under the other counts too, where there are runs."""
        axis = "C" if self.headline in ("ray", "power_c") else "N"
        return robustness(self.points, self.headline, self.counts.get(axis, {}), self.seed_sd)

    def names_of(self, index) -> list[str]:
        """Points by their runs, or by what tells a table's rows apart (the line, where no column names runs)."""
        return [self.records[i].run_id if self.records else str(self.points.cluster[i]) for i in index]

    def plain(self) -> dict:
        lack = self.lack_of_fit
        return {"runs": [record.run_id for record in self.records], "n": len(self.loss),
                "headline": {"form": self.headline, "reason": self.headline_reason},
                "lack_of_fit": lack and lack | {"left_out": self.names_of(lack["left_out"]),
                                                "without": lack["without"] and lack["without"].plain()},
                "laws": {form: fit.plain() for form, fit in self.laws.items()},
                "band": {axis: [fit.plain() for fit in forms] for axis, forms in self.bands.items()},
                "form_doubt": self.form_doubt, "robustness": self.robustness}


def fit_group(records, loss_key: str = "loss_bf16", seed_sd: float | None = None, held=(), resamples: int = 1000,
              insist: bool = False) -> Group:
    """Fit every law to the runs of one recipe; a law that the runs cannot carry is there with the reason. seed_sd: of ln(loss)
    between seeds; None estimates it. held: of predict.Held, for the figure. resamples: 0 takes every run for independent."""
    records = sorted(records, key=lambda record: record.flops_per_token * record.tokens)
    seed_sd = (seed_noise(records, loss_key)[0] or 0.0) if seed_sd is None else seed_sd

    # FLOPs are whole numbers of FLOPs per token times tokens, rounded to a float once.
    counts = {axis: {name: np.array([getattr(one, name) * (one.tokens if axis == "C" else 1) for one in records], dtype=float)
                     for name in vars(records[0]) if name.startswith(start)}
              for axis, start in (("N", "params_"), ("C", "flops_per_token"))}
    points = Points(counts["N"].pop(f"params_{records[0].convention}"), np.array([float(one.tokens) for one in records]),
                    counts["C"].pop("flops_per_token"), np.array([getattr(one, loss_key) for one in records]),
                    np.array([one.trunk for one in records]))
    return replace(fit_points(points, records[0].recipe, "NDC", seed_sd, resamples, insist), records=tuple(records),
                   counts=counts, curves=tuple(map(read_curve, records)), held_out=tuple(held))


def fit_points(points: Points, name: str, axes: str = "NDC", seed_sd: float = 0.0, resamples: int = 1000,
               insist: bool = False) -> Group:
    """Fit every law to points of any origin. axes="N" where tokens and compute are unknown: only the power law in N is
    fitted then, and D and C of the points are not looked at. insist: headline L(N, D) even where it does not fit."""
    x, n = {axis: getattr(points, axis) for axis in axes}, len(points.loss)
    resamples = min(resamples, max(200, RESAMPLED // n))
    laws = {form: fit_form(form, points, seed_sd, resamples=resamples) if form == "power_n" or "D" in x else
            unfitted(form, n, "the table gives neither tokens (--d) nor compute (--c)") for form in FORMS}
    lack = lack_of_fit(laws["chinchilla"], points, seed_sd) if laws["chinchilla"].identified else None
    headline, reason = _headline(laws, points.ray if "D" in x else None, lack and not insist)
    return Group(name, (), points, x, laws, headline, reason, seed_sd,
                 _form_doubt(points, seed_sd) if headline == "chinchilla" else None, lack)


def _form_doubt(points: Points, seed_sd: float) -> dict | None:
    """What the forms that the points do not refute say at ten times the largest compute, at the tokens per parameter that
    most points have: {N, D, C, low, high, forms}; None where no other form reaches there."""
    ratios = points.D / points.N
    near = [int(np.sum((ratios <= ratio * ONE_RAY) & (ratios >= ratio / ONE_RAY))) for ratio in ratios]
    at = max(range(len(ratios)), key=lambda i: (near[i], points.C[i]))
    C = 10 * float(points.C.max())
    N, D = (float(x[at] * math.sqrt(C / points.C[at])) for x in (points.N, points.D))
    try:
        said = predict.forecast(points, (N, D, C), seed_sd)
    except UserError:
        return None
    (low, high), forms = said["parts"]["model_form"], [one["form"] for one in said["forms"]]
    return {"N": N, "D": D, "C": C, "low": low, "high": high, "forms": forms} if len(forms) > 1 else None


def seed_noise(records, loss_key: str = "loss_bf16") -> tuple[float | None, int]:
    """Pooled standard deviation of ln(loss) among runs that differ in the seed alone, with its degrees of freedom: recipes and
    branches of one size and seed share their data and most of their training, so they add none."""
    alike, seeds = {}, {}
    for record in records:
        key = (record.recipe, record.params_total, record.params_matmul, record.tokens, record.decays_from)
        alike.setdefault(key, []).append(math.log(getattr(record, loss_key)))
        seeds.setdefault(record.params_total, set()).add(record.seed)
    squares = sum(float(np.sum((np.array(some) - np.mean(some)) ** 2)) for some in alike.values())
    differences = sum(len(some) - 1 for some in alike.values())
    freedom = min(differences, sum(len(some) - 1 for some in seeds.values()))
    return (math.sqrt(squares / differences) if differences else None), freedom


def _headline(laws, ray, is_misfit) -> tuple[str, str]:
    if ray is None:
        return "power_n", "the table gives N alone, so only the power law in N can be fitted"
    if laws["chinchilla"].identified and not is_misfit:
        return "chinchilla", "the points identify L(N, D)"
    why = "L(N, D) does not fit the points (--insist headlines it all the same)" if is_misfit else (
        f"L(N, D) is not identified ({laws['chinchilla'].reason})")
    if laws["ray"].identified:
        return "ray", f"{why}: ray law instead"
    return "power_c", f"{why}: power law in C instead" + ", which mixes the effects of size and of data" * (not on_one_ray(ray))


def _warnings(group) -> list[str]:
    fit, lack, lines = group.laws[group.headline], group.lack_of_fit, []
    if not fit.identified:
        lines.append(f"WARNING: {group.recipe}: the headlined law is not identified: {fit.reason}")
    if lack:
        lines.append(f"WARNING: {group.recipe}: L(N, D) does not fit: residuals of {100 * lack['residual_rms']:.2g} %, noise of "
                     f"{100 * lack['noise']:.2g} % (of {lack['noise_of']})")
        if less := lack["without"]:
            names = group.names_of(lack["left_out"])
            lines.append(f"  without the {len(names)} points below {lack['below']:.3g} tokens per "
                         f"{KIND[group.convention]}parameter ({', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)}): "
                         f"{less.formula()}, residuals of {100 * less.residual_rms:.2g} %")
        else:
            lines.append("  leaving out early points, up to half of all, does not mend it: another form is needed")
    return lines


def _headline_lines(group) -> list[str]:
    """A group's headlined law with its intervals, what it rests on, and why it is this form."""
    fit, kind, N = group.laws[group.headline], KIND[group.convention], group.x["N"]
    what = (f"{group.recipe}: {len(group.loss)} {'runs' if group.records else 'points'} of {len(set(group.points.cluster))} "
            f"trajectories, {kind}N {si(N.min())} to {si(N.max())}")
    if group.ray:
        low, high = group.ray
        what += f", {low:.3g} to {high:.3g} tokens per {kind}parameter"
    lines = [what, f"  {group.headline}: {fit.formula() or f'not fitted: {fit.reason}'}"]
    if fit.ci95:
        lines += [f"    95 %: {_intervals(fit)}",
                  f"    from {INTERVALS[fit.interval].format(fit.clusters, fit.resamples)}: the points' noise alone"]
    lines.append(f"  why this law: {group.headline_reason}")
    far = [group.form_doubt["low"], group.form_doubt["high"]] if group.form_doubt else [
        float(form.predict(10 * group.x["C"].max())) for form in group.bands.get("C", ())]
    if far:
        lines.append(f"  doubt in the form: at ten times the largest compute {min(far):.4g} to {max(far):.4g} nats per token")
    return lines


def _intervals(fit) -> str:
    return ", ".join(f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in (fit.ci95 or {}).items())


if __name__ == "__main__":
    raise SystemExit(run_command(main))
