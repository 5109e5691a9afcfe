"""Fit scaling laws to finished runs, one precision recipe at a time, or to a table of published
points.

    python scaling/fit.py out/study  # every finished run under it -> out/study/law/
    python scaling/fit.py out/a_bf16 out/a_fp8 --out report loss=as_trained seed_sd=0.0005
    python scaling/fit.py out/study --predict gpt1p5b_tensorwise_t20_s1337  # freezes a prediction before that run is started
    python scaling/fit.py out/study --score                     # compares it once the run is there
    python scaling/fit.py --points points.csv --n "Model Size" --c "Training FLOP" --loss loss --drop-highest 5 --out DIR
    python scaling/fit.py --points points.csv --n N --d tokens --loss val --where dataset=c4,dataset=rw,lr=0.003 --out DIR

Prints the headline after its warnings; with --all every law with its certificate and what other
choices would have given. Writes figure.png, figure.svg, then law.json. A table is text with a
header, separated by commas, tabs, semicolons or spaces, or a chart exported from W&B (a column for
each run, of which the last value counts; --runs TABLE gives their N and D). Losses are taken as
nats per token, counts as they stand, and nothing is converted."""

import os
from pathlib import Path

if __name__ == "__main__":
    # Before numpy reads it: thousands of tiny fits are ten times slower when BLAS splits each over
    # threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import itertools
import json
import math
import textwrap
from collections import namedtuple
from dataclasses import dataclass, field, replace
from functools import cached_property

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from lib.command import command, run_command
from lib.errors import UserError
from lib.files import file_sha256
from lib.plots import RC, STYLES, counts_axis, name_recipe, settle, sheet, styles, write_with
from lib.text import listed, nearest, si
from lib.values import FilePath
from scaling import predict, records
from scaling.gap_figure import DrawnGap, draw_gaps, gap_at, gap_handles
from scaling.gap_words import EVALUATION_WORDS, KIND
from scaling.laws import (
    DELTA,
    HAS_OUTLIERS,
    ONE_RAY,
    SAME_BUDGET,
    Fit,
    Points,
    SharedFault,
    fit_band,
    fit_form,
    fit_frontier,
    fit_law,
    lack_of_fit,
    meets,
    minima_of,
    near_zero,
    on_one_ray,
    robustness,
    shared_fault,
    unfitted,
    with_bootstrap,
)
from scaling.pages import LINES, format_table
from scaling.paired.estimates import grouped
from scaling.paired.gaps import Pair, mean_gaps
from scaling.pairing import pair_runs
from scaling.tables import joined, read_table, unit_doubts

SHOWN = 8  # points that a warning names
# points drawn by one bootstrap at most, in 200 resamples or more: a table of thousands need not
# wait
RESAMPLED = 2_000_000
FORMS = ("chinchilla", "ray", "power_n", "power_d", "power_c", "isoflop")
INTERVALS = {
    "t": "t-intervals of the residuals, at least of the seeds' SD",
    "cluster": "t-intervals over {} trajectories",
    "bootstrap": (
        "{1} bootstrap resamples of {0} trajectories (in a table --cluster COL names them)"
    ),
}
# of the loss figure
LARGE = RC | {
    "font.size": 10.5,
    "axes.labelsize": 10.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
}
AXES = {"C": "compute C [FLOPs]", "D": "training tokens D", "N": "parameters N"}
MANY = 60  # from this many points on, they are drawn small and translucent
BEYOND = 10  # without a held-out run the laws are drawn to this many times the largest compute
GAP_ROOM = 0.12  # of what the gaps span, above and below them
AROUND = 1.6  # the axes of D and N end at so many times the points' ends
BINS = 24  # per decade of compute, to smooth training curves
FEW = 6  # at most so many lines of one size, or of one ratio, in a panel
# the spread of model forms
HATCH = {"facecolor": "none", "edgecolor": "#777777", "hatch": "//////", "linewidth": 0.4}
NAMES_OF_RUNS = {
    "run",
    "run_id",
    "run_name",
    "runid",
    "name",
    "id",
    "model",
    "model_name",
    "trial",
    "experiment",
    "trajectory",
}
# of a loss
MISSING = {"", "nan", "na", "n/a", "null", "none", "inf", "+inf", "-inf", "infinity", "-infinity"}
# of Options
FOR_RUNS, FOR_A_TABLE = (
    ("seed_sd", "predict", "score"),
    (
        "d",
        "c",
        "cluster",
        "drop_highest",
        "where",
        "runs",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[FilePath, ...] = ()  # run folders such as out/RUN, or folders that hold them
    out: FilePath = ""  # folder for law.json, figure.png, figure.svg (one folder of runs: its law/)
    # runs: total or nonembed, which parameters N counts (as the study does). Table: N's column
    n: str = ""
    # runs: bf16 (through BF16 matmuls; the default) or as_trained. Table: the column of losses
    loss: str = ""
    # runs: SD of ln(loss) between seeds, a floor in the intervals (estimated from seeds)
    seed_sd: float | None = None
    predict: str = ""  # runs: a run to come, whose prediction is frozen in out
    score: bool = False  # runs: compare the predictions in out with the runs that have come
    points: FilePath = ""  # a table with a header line, instead of runs
    d: str = ""  # table: column of training tokens; without c, C = 6 N D
    # table: column of training FLOPs; without d, D = C / (6 N). Neither: the power law in N alone
    c: str = ""
    # table: a second table, a row for each run that the first's column "run" names
    runs: FilePath = ""
    cluster: str = ""  # table: column that names the training run; its points are not independent
    drop_highest: int = 0  # table: how many of the highest losses to leave out
    # table: COL=VALUE,..: keep rows with these; two values of one column keep either
    where: tuple[str, ...] = ()
    insist: bool = False  # headline L(N, D) even where it does not fit
    all: bool = False  # print everything

    def __post_init__(self):
        if bool(self.points) == bool(self.paths):
            raise UserError(
                "give either run folders such as out/RUN, a folder that holds them, or a table with"
                " --points FILE"
            )
        if strange := [
            name for name in (FOR_RUNS if self.points else FOR_A_TABLE) if getattr(self, name)
        ]:
            raise UserError(
                f"{' and '.join(strange)}: only for"
                f" {'runs' if self.points else 'a table of points=FILE'}"
            )
        for name, value, words in (
            ("n", self.n, ("total", "nonembed")),
            ("loss", self.loss, ("bf16", "as_trained")),
        ):
            if self.points and not value:
                raise UserError(f"{name}= is missing: it names a column of the table")
            if not self.points and value not in ("", *words):
                raise UserError(f"{name}={value!r} must be {' or '.join(words)} for runs")


@command(__doc__, Options, "paths")
# On its way a search may try powers that overflow; the certificate judges where it ends, not
# numpy's warnings.
@np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
def main(o: Options) -> None:
    folder = records.law_folder(o.paths, o.out)
    if o.paths:
        _fit_runs(o, folder)
    else:
        chosen = read_points(
            o.points, o.n, o.loss, o.d, o.c, o.where, o.drop_highest, o.cluster, o.runs
        )
        group = fit_points(
            chosen.points,
            Path(o.points).name,
            chosen.axes,
            insist=o.insist,
            columns=chosen.run_columns,
        )
        group = replace(group, places=tuple(f"line {line}" for line in chosen.lines))
        if all(fit.objective is None for fit in group.laws.values()):
            raise UserError(
                f"{o.points}: no law can be fitted ({group.laws['power_n'].reason}): give points of"
                " several sizes"
            )
        _finish(
            [group],
            [],
            "loss",
            {"source": chosen.source, "notes": chosen.notes, **group.plain()},
            folder,
            [],
            o.all,
        )


def _fit_runs(o: Options, folder: Path) -> None:
    loss_key = f"loss_{o.loss or 'bf16'}"
    finished, notes = records.read_runs(o.paths, o.n)
    every = finished
    for sieve in (records.usable, records.from_scratch, records.without_repeats):
        every, left_out = sieve(every)
        notes += left_out
    predictions = predict.load(folder)
    held = predict.held_out(every, predictions)
    runs = [one for one in every if one not in held]
    notes += [f"held out of every fit: {one.run_id}" for one in held]
    if not runs:
        raise UserError("\n".join(["no run is left to fit", *notes]))
    records.check_comparable(every)
    estimate, degrees = seed_noise(runs, loss_key)
    seed_sd = (estimate or 0.0) if o.seed_sd is None else o.seed_sd
    groups = [
        fit_group(
            [one for one in runs if one.recipe == recipe],
            loss_key,
            seed_sd,
            insist=o.insist,
            held=predict.held_of(recipe, held, predictions, loss_key, runs[0].convention),
        )
        for recipe in sorted(
            {one.recipe for one in runs}, key=lambda recipe: (recipe != "bf16", recipe)
        )
    ]
    try:
        found, alone = pair_runs(runs)
    except UserError as error:  # the laws do not need the losses of single sequences
        found, alone = [], [f"no paired gap: {error}"]
    notes += alone
    gaps = [pair.gap["bf16"].percent for pair in found]
    said = [
        (
            "Seed noise:"
            f" {'unknown' if estimate is None else f'SD {100 * estimate:.3f} % of the loss'} from"
            f" {degrees} degrees of freedom; intervals rest on at least {100 * seed_sd:.3f} %"
            " (seed_sd=)"
        ),
        (
            f"{len(gaps)} BF16/FP8 pairs, gaps of {min(gaps):+.3f} to {max(gaps):+.3f} % in BF16;"
            " scaling/precision.py judges them"
            if gaps
            else "No BF16/FP8 pair among these runs."
        ),
    ]
    if o.predict:
        said += predict.describe(predict.freeze(o.predict, groups, finished, folder, loss_key))
    if o.score:
        said += predict.score(folder, every)
    law = {
        "conventions": {
            "N": f"params_{runs[0].convention}",
            "D": "tokens",
            "C": "flops_per_token * tokens",
            "loss": loss_key,
            "loss_unit": "nats per token",
            "chinchilla_frontier": "C = 6 N D",
        },
        "seed_noise": {"estimate": estimate, "degrees_of_freedom": degrees, "used": seed_sd},
        "notes": notes,
        "inputs": [
            {
                "run_id": r.run_id,
                "pair_id": r.pair_id,
                "recipe": r.recipe,
                "trunk": r.trunk,
                "seed": r.seed,
                "N": r.N,
                "params_total": r.params_total,
                "params_nonembed": r.params_nonembed,
                "D": r.tokens,
                "C": r.flops_per_token * r.tokens,
                "loss": getattr(r, loss_key),
                "summary_sha256": r.summary_sha256,
            }
            for group in groups
            for r in group.records
        ],
        "groups": {group.recipe: group.plain() for group in groups},
    }
    if len(groups) == 1:
        law["laws"] = law["groups"][groups[0].recipe]["laws"]
    _finish(groups, found, loss_key, law, folder, said, o.all)


def _finish(
    groups, found, loss_key: str, law: dict, folder: Path, said: list[str], everything: bool
) -> None:
    """Write the figure, then law.json. Print warnings and headlines, the notes of `law`, then what
    else is `said`, such as a score; all tables where everything is wanted, else at most LINES: what
    is said stays whole."""
    # NaN: null
    content = json.loads(
        json.dumps({"format_version": 2, "delta": DELTA} | law), parse_constant=lambda _: None
    )
    write_with(folder, "figure", draw(groups, found, loss_key), {"law.json": content})
    lines = [note for note in law["notes"] if note.startswith("WARNING")]
    lines += [line for group in groups for line in _warnings(group)]
    for group in groups:
        lines += ["", *_headline_lines(group)[: None if everything or len(groups) <= 2 else 3]]
    for group in groups if everything else ():
        lines += [
            "",
            f"{group.recipe}: every law",
            format_table(
                [
                    {
                        "law": form,
                        "n": fit.n,
                        "fitted": fit.formula(),
                        "95 %": _intervals(fit),
                        "rms": fit.residual_rms,
                        "starts at best": fit.starts and f"{fit.starts_at_best} of {fit.starts}",
                        "gradient": fit.gradient_norm,
                        "not identified because": fit.reason,
                    }
                    for form, fit in group.laws.items()
                ]
            ),
        ]
        lines += [
            "",
            f"{group.recipe}: {group.headline} under other choices",
            format_table(group.robustness),
        ]
    notes = [note for note in law["notes"] if not note.startswith("WARNING")]
    lines, room = (
        "\n".join([*lines, "", *notes]).strip("\n").split("\n"),
        max(1, LINES - 2 - len(said)),
    )
    if len(lines) > room and not everything:
        lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines with --all"]
    print(
        "\n".join([*lines, *said]),
        "",
        f"wrote {folder / 'law.json'}, figure.png, figure.svg"
        + "; --all prints every law and table" * (not everything),
        sep="\n",
    )


@dataclass(frozen=True)
class Group:
    """One recipe's runs, smallest compute first, or one table's points, with their laws; arrays
    have shape (n,)."""

    recipe: str  # a table's file name where there are no runs
    records: tuple  # of Record; () for a table
    points: Points
    # "C" training FLOPs, "N" parameters, "D" tokens; a table may give N alone
    x: dict[str, np.ndarray]
    loss: np.ndarray  # nats per token
    # smallest and largest tokens per parameter; None where a table gives N alone
    ray: tuple[float, float] | None
    laws: dict[str, Fit]  # one of each of FORMS
    headline: str  # the form that answers for this group
    headline_reason: str
    seed_sd: float  # of ln loss, the floor under the residuals in intervals
    # of Record; None for a table, which does not say what its N counts
    convention: str | None = None
    form_doubt: dict | None = None  # beside Chinchilla's law: what other forms say far out
    lack_of_fit: dict | None = None  # of Chinchilla's law, identified or not the headline
    frontier: Fit | None = None  # L*(C) through the budgets' minima, where those are headlined
    shared_fault: SharedFault | None = None  # then a trajectory in `points` is what it names
    labels: tuple = ()  # of each point: the trajectory that the runs or the table name
    # of a table: where each point stands in its file, such as "line 20"
    places: tuple[str, ...] = ()
    # of runs: "N" or "C" -> {another convention: values so counted}
    counts: dict = field(default_factory=dict)
    curves: tuple = ()  # (tokens, loss) of each run's training
    held_out: tuple = ()  # of predict.Held: in no fit

    @cached_property
    def lines(self) -> dict[str, Fit]:
        """Axis -> the law that the figure draws over it; none where L(N, D) is headlined, which is
        no curve."""
        if self.frontier is not None:
            return {"C": self.frontier}
        powers = {
            axis: self.laws[f"power_{axis.lower()}"]
            for axis in self.x
            if self.headline != "chinchilla"
        }
        found = {axis: law for axis, law in powers.items() if law.objective is not None}
        if self.laws["ray"].identified:
            found |= {
                axis: fit_law("ray", self.x[axis], self.loss, seed_sd=self.seed_sd)
                for axis in found
                if axis != "C"
            }
            found["C"] = self.laws["ray"]
        return found

    @cached_property
    def bands(self) -> dict[str, list[Fit]]:
        """Axis -> forms whose spread is the model-form band: over C, on one ray over N and D
        too."""
        if self.frontier is not None:
            C, _, _, loss = minima_of(self.laws["isoflop"])
            return {"C": fit_band(C, loss)}
        found = {}
        for axis in [axis for axis in self.lines if axis == "C" or on_one_ray(self.ray)]:
            # On a ray C is a power of N or D (about 2; attention bends it), so exponents there are
            # as much larger.
            factor = float(np.polyfit(np.log(self.x[axis]), np.log(self.x["C"]), 1)[0])
            found[axis] = fit_band(self.x[axis], self.loss, axis.lower(), factor)
        return found

    @cached_property
    def robustness(self) -> list[dict]:
        """The headlined law under other choices; under the other counts too, where there are
        runs."""
        return robustness(self.points, self.headline, self.counts, self.seed_sd)

    def names_of(self, index) -> list[str]:
        """Points by their runs, or by what tells a table's rows apart (the line, where no column
        names runs)."""
        return [self.records[i].run_id if self.records else str(self.labels[i]) for i in index]

    def place_of(self, index: int) -> str:
        """One point by its run or its line in the table; where neither is known, by what names its
        trajectory."""
        return self.places[index] if self.places else self.names_of([index])[0]

    @property
    def outliers(self) -> list[tuple[str, float]]:
        """(run or line, distance from the law of the other points in per cent of the loss),
        farthest first."""
        law = self.headline if self.headline in HAS_OUTLIERS else "chinchilla"
        outliers = self.laws[law].outliers
        lack = self.lack_of_fit
        if lack is not None and law == "chinchilla":
            outliers = lack["outliers"]  # of the law that fits, not of one that does not
        return [(self.place_of(index), 100 * distance) for index, distance in outliers]

    def plain(self) -> dict:
        lack = self.lack_of_fit
        fault = self.shared_fault
        outliers = [{"point": place, "percent": percent} for place, percent in self.outliers]
        return {
            "runs": [record.run_id for record in self.records],
            "n": len(self.loss),
            "headline": {"form": self.headline, "reason": self.headline_reason},
            "outliers": outliers,
            "frontier": self.frontier and self.frontier.plain(),
            "shared_fault": (
                fault and {"by": fault.by, "chance": fault.chance, "groups": len(set(fault.labels))}
            ),
            "lack_of_fit": (
                lack
                and lack
                | {
                    "left_out": self.names_of(lack["left_out"]),
                    "outliers": outliers,
                    "without": lack["without"] and lack["without"].plain(),
                }
            ),
            "laws": {form: fit.plain() for form, fit in self.laws.items()},
            "band": {axis: [fit.plain() for fit in forms] for axis, forms in self.bands.items()},
            "form_doubt": self.form_doubt,
            "robustness": self.robustness,
        }


def fit_group(
    runs,
    loss_key: str = "loss_bf16",
    seed_sd: float | None = None,
    held=(),
    resamples: int = 1000,
    insist: bool = False,
) -> Group:
    """Fit every law to the runs of one recipe; a law that the runs cannot carry is there with the
    reason. seed_sd: of ln(loss) between seeds; None estimates it. held: of predict.Held, for the
    figure. resamples: 0 takes every run for independent."""
    runs = sorted(runs, key=lambda record: record.flops_per_token * record.tokens)
    seed_sd = (seed_noise(runs, loss_key)[0] or 0.0) if seed_sd is None else seed_sd

    # FLOPs are whole numbers of FLOPs per token times tokens, rounded to a float once.
    counts = {
        axis: {
            name: np.array(
                [getattr(one, name) * (one.tokens if axis == "C" else 1) for one in runs],
                dtype=float,
            )
            for name in vars(runs[0])
            if name.startswith(start)
        }
        for axis, start in (("N", "params_"), ("C", "flops_per_token"))
    }
    points = Points(
        counts["N"].pop(f"params_{runs[0].convention}"),
        np.array([float(one.tokens) for one in runs]),
        counts["C"].pop("flops_per_token"),
        np.array([getattr(one, loss_key) for one in runs]),
        np.array([one.trunk for one in runs]),
    )
    return replace(
        fit_points(points, runs[0].recipe, "NDC", seed_sd, resamples, insist),
        records=tuple(runs),
        convention=runs[0].convention,
        counts=counts,
        curves=tuple(map(records.read_curve, runs)),
        held_out=held,
    )


def fit_points(
    points: Points,
    name: str,
    axes: str = "NDC",
    seed_sd: float = 0.0,
    resamples: int = 1000,
    insist: bool = False,
    columns: dict[str, np.ndarray] | None = None,
) -> Group:
    """Fit every law to points of any origin. axes="N" where tokens and compute are unknown: only
    the power law in N is fitted then, and D and C of the points are not looked at. insist: headline
    L(N, D) even where it does not fit. columns: name -> label of each point, of what may name runs.
    Where sizes or those share a fault, intervals count them, not points."""
    x, n, ray = (
        {axis: getattr(points, axis) for axis in axes},
        len(points.loss),
        points.ray if "D" in axes else None,
    )
    resamples = min(resamples, max(200, RESAMPLED // n))
    labels = tuple(points.cluster)
    alone = {}
    fault = None
    if "D" in x:
        form = "ray" if on_one_ray(ray) else "chinchilla"
        alone[form] = fit_form(form, points, seed_sd)
        if meets(alone[form], points, seed_sd):
            fault = shared_fault(alone[form], points, columns)
    if fault is not None and resamples:
        points = replace(points, cluster=fault.labels)
    laws = {}
    for form in FORMS:
        if form != "power_n" and "D" not in x:
            laws[form] = unfitted(form, n, "the table gives neither tokens (--d) nor compute (--c)")
        elif form in alone:
            laws[form] = with_bootstrap(alone[form], points, resamples)
        else:
            laws[form] = fit_form(form, points, seed_sd, resamples=resamples)
    lack = (
        lack_of_fit(laws["chinchilla"], points, seed_sd) if laws["chinchilla"].identified else None
    )
    headline, reason = _headline(laws, ray, lack and not insist)
    frontier = fit_frontier(laws["isoflop"], seed_sd) if headline == "isoflop" else None
    doubt = _form_doubt(points, seed_sd) if headline == "chinchilla" else None
    return Group(
        name,
        (),
        points,
        x,
        points.loss,
        ray,
        laws,
        headline,
        reason,
        seed_sd,
        form_doubt=doubt,
        lack_of_fit=lack,
        frontier=frontier,
        shared_fault=fault if resamples else None,
        labels=labels,
    )


def _form_doubt(points: Points, seed_sd: float) -> dict | None:
    """What the forms that the points do not refute say at ten times the largest compute, at the
    tokens per parameter that most points have: {N, D, C, low, high, forms}; None where no other
    form reaches there."""
    ratios = points.D / points.N
    near = [
        int(np.sum((ratios <= ratio * ONE_RAY) & (ratios >= ratio / ONE_RAY))) for ratio in ratios
    ]
    at = max(range(len(ratios)), key=lambda i: (near[i], points.C[i]))
    C = 10 * float(points.C.max())
    N, D = (float(x[at] * math.sqrt(C / points.C[at])) for x in (points.N, points.D))
    try:
        said = predict.forecast(points, (N, D, C), seed_sd)
    except UserError:
        return None
    (low, high), forms = said["parts"]["model_form"], [one["form"] for one in said["forms"]]
    return (
        {"N": N, "D": D, "C": C, "low": low, "high": high, "forms": forms}
        if len(forms) > 1
        else None
    )


def seed_noise(records, loss_key: str = "loss_bf16") -> tuple[float | None, int]:
    """Pooled standard deviation of ln(loss) among runs that differ in the seed alone, with its
    degrees of freedom: recipes and branches of one size and seed share their data and most of their
    training, so they add none."""
    alike, seeds = {}, {(one.params_total, one.seed) for one in records}
    for one in records:
        key = (one.recipe, one.params_total, one.params_matmul, one.tokens, one.decays_from)
        alike.setdefault(key, []).append(math.log(getattr(one, loss_key)))
    squares = sum(float(np.sum((np.array(some) - np.mean(some)) ** 2)) for some in alike.values())
    differences = len(records) - len(alike)
    freedom = min(differences, len(seeds) - len({size for size, _ in seeds}))
    return (math.sqrt(squares / differences) if differences else None), freedom


def _headline(laws, ray, is_misfit) -> tuple[str, str]:
    if ray is None:
        return "power_n", "the table gives N alone, so only the power law in N can be fitted"
    if laws["chinchilla"].identified and not is_misfit:
        return "chinchilla", "the points identify L(N, D)"
    why = (
        "L(N, D) does not fit the points (--insist headlines it all the same)"
        if is_misfit
        else (f"L(N, D) is not identified ({laws['chinchilla'].reason})")
    )
    if laws["isoflop"].identified:
        budgets = sum(row["reason"] is None for row in laws["isoflop"].budgets)
        return "isoflop", f"{why}: the minima of {budgets} compute budgets instead"
    if laws["ray"].identified:
        return "ray", f"{why}: ray law instead"
    return (
        "power_c",
        f"{why}: power law in C instead"
        + ", which mixes the effects of size and of data" * (not on_one_ray(ray)),
    )


def _warnings(group) -> list[str]:
    fit, lack, lines = group.laws[group.headline], group.lack_of_fit, []
    if not fit.identified:
        lines.append(f"WARNING: {group.recipe}: the headlined law is not identified: {fit.reason}")
    lines += _outlier_lines(group)
    lines += _shared_fault_lines(group)
    if lack:
        lines.append(
            f"WARNING: {group.recipe}: L(N, D) does not fit: residuals of"
            f" {100 * lack['scatter']:.2g} %, noise of {100 * lack['noise']:.2g} % (of"
            f" {lack['noise_of']})"
        )
        if less := lack["without"]:
            names = group.names_of(lack["left_out"])
            lines.append(
                f"  without the {len(names)} points below {lack['below']:.3g} tokens per"
                f" {KIND[group.convention]}parameter"
                f" ({', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)}): {less.formula()},"
                f" residuals of {100 * less.residual_rms:.2g} %"
            )
        else:
            lines.append(
                "  leaving out early points, up to half of all, does not mend it: another form is"
                " needed"
            )
    return lines


def _outlier_lines(group) -> list[str]:
    """The points that lie off a law that the others follow, and what that law is."""
    if not group.outliers:
        return []
    (place, percent), *others = group.outliers
    side = "above" if percent > 0 else "below"
    sentence = f"{place} lies {abs(percent):.2g} % {side} the law"
    if others:
        named = [f"{place} by {percent:+.2g} %" for place, percent in group.outliers[:SHOWN]]
        sentence = f"{len(group.outliers)} points lie off the law: {', '.join(named)}"
        sentence += ", ... (law.json names all)" if len(group.outliers) > SHOWN else ""
    lines = [f"WARNING: {group.recipe}: {sentence}; look at what happened there"]
    fit = group.laws[group.headline]
    if fit.without_outliers:
        lines.append(
            f"  without what lies off, residuals are {100 * fit.scatter:.2g} % and the law is"
            f" {fit.formula(fit.without_outliers)}"
        )
    return lines


def _shared_fault_lines(group) -> list[str]:
    """What the intervals count where points are not independent although nobody said so."""
    fault = group.shared_fault
    if fault is None:
        return []
    groups = len(set(fault.labels))
    what = "points of one size" if fault.by == "size" else f"points of one {fault.by!r}"
    return [
        f"WARNING: {group.recipe}: {what} lie off the law together (F-test: chance"
        f" {fault.chance:.1g} if each point were independent), so intervals count {groups} of them,"
        f" not {len(group.loss)} points"
    ]


def _headline_lines(group) -> list[str]:
    """A group's headlined law with its intervals, what it rests on, and why it is this form."""
    fit, kind, N = group.laws[group.headline], KIND[group.convention], group.x["N"]
    what = (
        f"{group.recipe}: {len(group.loss)} {'runs' if group.records else 'points'} of"
        f" {len(set(group.points.cluster))} trajectories, {kind}N {si(N.min())} to {si(N.max())}"
    )
    what += (
        f", {group.ray[0]:.3g} to {group.ray[1]:.3g} tokens per {kind}parameter"
        if group.ray
        else ""
    )
    lines = [what, f"  {group.headline}: {fit.formula() or f'not fitted: {fit.reason}'}"]
    if fit.ci95:
        source = INTERVALS[fit.interval].format(fit.clusters, fit.resamples)
        if group.frontier is not None and fit.interval == "t":
            source = "t-intervals over the budgets"
        lines += [f"    95 %: {_intervals(fit)}", f"    from {source}: the points' noise alone"]
    if group.frontier is not None:
        lines.append(
            f"    lowest loss for a compute: {group.frontier.formula().replace('L =', 'L* =')}"
            + (f", 95 %: {_intervals(group.frontier)}" if group.frontier.ci95 else "")
        )
    if edge := near_zero(fit):
        lines.append(
            f"    {' and '.join(edge)} within three standard errors of zero: estimates so near the"
            " edge lean steep, as flatter ones are refused"
        )
    lines.append(f"  why this law: {group.headline_reason}")
    far = (
        [group.form_doubt["low"], group.form_doubt["high"]]
        if group.form_doubt
        else [float(form.predict(10 * group.x["C"].max())) for form in group.bands.get("C", ())]
    )
    if group.headline == "chinchilla" and not far:
        lines.append("  doubt in the form: no other form reaches ten times the largest compute")
    if far:
        lines.append(
            f"  doubt in the form: at ten times the largest compute {min(far):.4g} to"
            f" {max(far):.4g} nats per token"
        )
    return lines


def _intervals(fit) -> str:
    return ", ".join(
        f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in (fit.ci95 or {}).items()
    )


# --------------------------------------------------------------------- a table of published points
# Nothing in it is guessed: a cell that is no plain number is refused by file, line, column and
# value, and no unit is converted. What is left out (a filter, an empty loss, the highest losses) is
# counted and listed by line.

# What was chosen from a table. axes: "NDC", or "N" where it gives neither tokens nor compute, D and
# C of the points are 1 then; source: for law.json, file, sha256, rows, filters, columns, what was
# derived, lines left out; notes: what a reader should know. lines: of each point, its line in the
# file. run_columns: name -> label of each point, of columns that may name runs though nobody said
# so.
Selection = namedtuple("Selection", "points axes source notes lines run_columns")


def read_points(
    path,
    n: str,
    loss: str,
    d: str = "",
    c: str = "",
    where=(),
    drop_highest: int = 0,
    cluster="",
    runs: str = "",
) -> Selection:
    """Points of a table separated by commas, tabs, semicolons or spaces with one header line
    (UTF-8), or of W&B's chart export. n, loss, d, c, cluster: column names; with c alone, D = C /
    (6 N); with d alone, C = 6 N D; with both, they are taken as they stand; with neither only N is
    known. runs: a second table that describes the runs that the first one names. where: texts
    COLUMN=VALUE; a row must have one of the values given for each column. drop_highest: so many of
    the highest losses are left out. cluster: equal text there is one trajectory, an empty cell a
    row of its own. Raises UserError."""
    path = Path(path)
    filters: dict[str, list[str]] = {}
    for condition in where:
        name, _, value = (part.strip() for part in condition.partition("="))
        filters.setdefault(name, []).append(value)
    counted = [name for name in (n, loss, d, c) if name]
    wanted = [*counted, *filter(None, [cluster]), *filters]
    contents = joined(read_table(path), path, Path(runs)) if runs else read_table(path, wanted)
    for name in wanted:
        if contents.header.count(name) != 1:
            raise UserError(
                f"{path} with {runs} has {contents.header.count(name)} columns called"
                f" {name!r}{nearest(name, contents.header)}"
            )
    rows, sha256 = contents.rows, contents.sha256
    for name, values in filters.items():
        there = {_value(row[name]): row[name] or "(empty)" for row in rows.values()}
        if unknown := [value for value in values if _value(value) not in there]:
            raise UserError(
                f"{path}: no row has {name}={unknown[0]}; values there: {listed([*there.values()])}"
            )
    chosen = [
        line
        for line, row in rows.items()
        if all(_value(row[name]) in map(_value, values) for name, values in filters.items())
    ]
    missing = [line for line in chosen if rows[line][loss].lower() in MISSING]
    kept = [line for line in chosen if line not in missing]
    if not 0 <= drop_highest < len(kept):
        raise UserError(
            f"{path}: no row is left to fit: {len(rows)} rows, {len(chosen)} meet the conditions,"
            f" {len(kept)} of them have a finite {loss!r}, drop_highest={drop_highest}"
        )
    values = {}
    for name, line in itertools.product(counted, kept):
        text = rows[line][name]
        value = values[name, line] = _value(text)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise UserError(
                f"{path} line {line}, column {name!r}: {text!r} is no plain finite number above"
                " zero such as 1.24e8"
            )
    # Stable: of equal losses the one that stands first in the file goes first.
    dropped = sorted(
        sorted(kept, key=lambda line: -values[loss, line])[:drop_highest], key=list(rows).index
    )
    kept = [line for line in kept if line not in dropped]
    N, L = (np.array([values[name, line] for line in kept]) for name in (n, loss))
    D, C = (np.array([values[name, line] for line in kept]) if name else None for name in (d, c))
    if D is None and C is not None:
        D = C / (6 * N)
    elif C is None and D is not None:
        C = 6 * N * D
    elif C is None and D is None:
        C = D = np.ones(len(kept))
    label = np.array([rows[line][cluster] or f"line {line}" if cluster else line for line in kept])
    source = {
        "file": path.name,
        "sha256": sha256,
        "runs": {"file": Path(runs).name, "sha256": file_sha256(Path(runs))} if runs else None,
        "rows": len(rows),
        "filters": filters,
        "columns": {
            "N": n,
            "D": d or None,
            "C": c or None,
            "loss": loss,
            "cluster": cluster or None,
        },
        "derived": None if bool(d) == bool(c) else "C = 6 N D" if d else "D = C / (6 N)",
        "lines_left_out": {"loss_missing": missing, "highest_losses": dropped},
    }
    doubts = unit_doubts(N, D if d or c else None, path.name)
    notes = [*(f"WARNING: {doubt}" for doubt in doubts), *contents.notes]
    if d and c:
        ratio = C / (6 * N * D)
        notes.append(
            f"C and D as they stand: C is {ratio.min():.3g} to {ratio.max():.3g} times 6 N D"
        )
    notes += (
        [
            f"{len(chosen)} of {len(rows)} rows of {path.name} meet "
            + "; ".join(f"{name} = {' or '.join(some)}" for name, some in filters.items())
        ]
        if filters
        else []
    )
    notes += [
        f"left out {len(lines)} of {len(chosen)} rows, {why}: lines {listed(lines)}"
        for why, lines in (
            ("their loss is empty or not finite", missing),
            ("the highest losses", dropped),
        )
        if lines
    ]
    return Selection(
        Points(N, D, C, L, label),
        "NDC" if d or c else "N",
        source,
        notes,
        tuple(kept),
        {} if cluster else _run_columns(rows, kept, N, counted),
    )


def _run_columns(
    rows: dict[int, dict[str, str]], kept: list[int], N, counted: list[str]
) -> dict[str, np.ndarray]:
    """Columns of the kept lines whose name says that they name runs, whose values repeat, and each
    of which has one N."""
    columns = {}
    for name in rows[kept[0]]:
        if name in counted or name.strip().lower().replace(" ", "_") not in NAMES_OF_RUNS:
            continue
        labels = np.array([rows[line][name] or f"line {line}" for line in kept])
        distinct, member = np.unique(labels, return_inverse=True)
        largest = np.array(
            [N[member == i].max() / N[member == i].min() for i in range(len(distinct))]
        )
        if len(distinct) < len(kept) and largest.max() < 1.01:
            columns[name] = labels
    return columns


def _value(cell: str) -> float | str:
    """A number where the cell is one (20 is 20.0), else its text."""
    try:
        return float(cell)
    except ValueError:
        return cell


# ------------------------------------------------------------------------ the page of three panels


@matplotlib.rc_context(LARGE)
def draw(groups, pairs, loss_key: str) -> Figure:
    """The figure of fit.Groups: losses with their laws over C, D and N, then the pairs' gaps where
    there are any."""
    groups, others = drawn(groups)
    pairs = [pair for pair in pairs if pair.fp8.recipe in [group.recipe for group in groups]]
    axes = [axis for axis in AXES if all(axis in group.x for group in groups)]
    optima = next((group for group in groups if group.frontier is not None), None)
    rows = [3.0, 1.0] if pairs else [3.2]
    gap_row = rows.index(1.0) if pairs else None
    if optima is not None:
        rows.append(1.7)
    handles = _legend(groups)
    if pairs:
        handles += gap_handles(
            gap for group in groups for gap in _gaps_of(group, pairs, axes[0], loss_key)
        )
    size = (6.6, sum(rows) + 1.55 + 0.19 * math.ceil(len(handles) / 3))
    figure, panels = sheet(
        size,
        len(rows),
        len(axes),
        _title(groups, loss_key),
        _caption(groups, others),
        handles,
        3,
        height_ratios=rows,
        width_ratios=[1.25, 1, 1][: len(axes)],
    )
    for axis, column in zip(axes, panels.T, strict=True):
        lowest = column[0] if gap_row is None else column[gap_row]
        if lowest is not column[0]:
            lowest.sharex(column[0])
            column[0].tick_params(labelbottom=False)
        _draw_losses(column[0], groups, axis)
        if gap_row is not None:
            _draw_gaps(lowest, groups, axis, pairs, loss_key)
        kind = KIND[groups[0].convention].replace(" ", "\n") if axis == "N" else ""
        lowest.set_xlabel(kind + AXES[axis])
    _set_loss_limits(dict(zip(axes, panels[0], strict=True)), groups)
    panels[0, 0].set_ylabel("validation loss\n[nats/token]")
    if gap_row is not None:
        _set_gap_limits(panels[gap_row], groups, pairs, loss_key)
        panels[gap_row, 0].set_ylabel("gap to\nBF16 [%]")
        for panel in panels[gap_row, 1:]:
            panel.tick_params(labelleft=False)
    if optima is not None:
        style = styles([group.recipe for group in groups])[groups.index(optima)]
        _draw_optima(panels[-1], optima, style)
    figure.align_ylabels(panels[:, 0])
    return settle(figure)


def _set_loss_limits(panels: dict[str, Axes], groups) -> None:
    """Each panel around its points and what is predicted there; training curves and wide intervals
    may leave it. Laws are extrapolated over compute alone, so that panel may reach lower."""
    losses = np.concatenate([group.loss for group in groups])
    held_out = [held for group in groups for held in group.held_out]
    predicted = [held.prediction.loss for held in held_out if held.prediction]
    measured = [held.loss for held in held_out if held.loss]
    shown = min([losses.min(), *predicted, *measured])
    extrapolated = [
        float(form.predict(BEYOND * group.x["C"].max()))
        for group in groups
        for form in group.bands.get("C", ())
    ]
    for axis, panel in panels.items():
        low = min([shown, *extrapolated]) if axis == "C" else shown
        room = max(np.log(losses.max() / low), 0.02)
        panel.set_ylim(low * np.exp(-0.08 * room), losses.max() * np.exp(0.2 * room))
        panel.yaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 2.5, 5, 10)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(NullLocator())
    first, *others = panels.values()
    for i, panel in enumerate(others):
        beside = [first, *others][i]
        if panel.get_ylim() == beside.get_ylim():
            panel.tick_params(labelleft=False)


def _draw_losses(panel, groups, axis: str) -> None:
    """Final losses, laws with their bands, held-out runs with their predictions; over compute every
    training curve too. Darker colours are larger models; over parameters more tokens per parameter,
    where points differ in that."""
    held = [getattr(held, axis) for group in groups for held in group.held_out]
    beyond = AROUND
    if held:
        beyond = 2.0
    elif axis == "C":
        beyond = BEYOND  # where an extrapolation would be read
    low = min(group.x[axis].min() for group in groups)
    high = beyond * max(*held, *(group.x[axis].max() for group in groups), 0)
    grid, is_by_ratio, named = (
        np.geomspace(low / AROUND, high, 240),
        axis == "N" and any(map(is_spread, groups)),
        {},
    )
    is_by_compute = axis != "C" and any(group.frontier for group in groups)
    if is_by_compute:
        is_by_ratio = False
    each = [
        (
            group.x["C"]
            if is_by_compute
            else group.x["D"] / group.x["N"]
            if is_by_ratio
            else group.x["N"]
        )
        for group in groups
    ]
    among = np.concatenate(
        [
            *each,
            [
                held.D / held.N if is_by_ratio else held.N
                for group in groups
                for held in group.held_out
            ],
        ]
    )
    panel.set(xscale="log", yscale="log", xlim=(low / AROUND, high))
    counts_axis(panel.xaxis, in_words=axis != "C")
    for group, style, values in zip(
        groups, styles([group.recipe for group in groups]), each, strict=True
    ):
        is_cloud = len(group.loss) >= MANY
        wide = style.get("hollow") and not is_cloud  # two laws that coincide must both be seen
        look = {
            "linestyle": style["linestyle"],
            "linewidth": style["linewidth"] if wide else 1.0,
            "alpha": 0.6 if wide else 1,
        }
        for record, (tokens, loss) in (
            zip(group.records, group.curves, strict=True) if axis == "C" else ()
        ):
            panel.plot(
                *smooth(tokens * record.flops_per_token, loss),
                color=_shade(style, record.N, among),
                alpha=0.5,
                linewidth=0.7,
                linestyle="-" if wide else style["linestyle"],
                zorder=1,
            )
        if forms := group.bands.get(axis):
            losses = np.array([form.predict(grid) for form in forms])
            panel.fill_between(grid, losses.min(axis=0), losses.max(axis=0), **HATCH, zorder=1.2)
        for line in lines_of(group, axis, grid):
            if line.low is not None:
                panel.fill_between(
                    line.x,
                    line.low,
                    line.high,
                    zorder=1.1,
                    facecolor=(style["color"], 0.12),
                    lw=0.5,
                    edgecolor=(style["color"], 0.4),
                )
            colour = _shade(style, line.each, among) if line.each else style["color"]
            (drawn_line,) = panel.plot(line.x, line.loss, color=colour, **look, zorder=2)
            if line.each:
                figure_of = (
                    f"{line.each:.1e}" if is_by_compute else f"{float(f'{line.each:.2g}'):g}"
                )
                named.setdefault(
                    figure_of if is_by_ratio or is_by_compute else si(line.each), drawn_line
                )
        if group.frontier is not None:
            C, N, D, lowest = minima_of(group.laws["isoflop"])
            at = {"C": C, "N": N, "D": D}[axis]
            panel.plot(at, lowest, **_minimum_look(style["color"]))
        colours = _shade(style, values, among)  # (n, 4)
        panel.scatter(
            group.x[axis],
            group.loss,
            s=9 if is_cloud else style["markersize"] ** 2,
            marker=style["marker"],
            zorder=3,
            alpha=0.7 if is_cloud else 1,
            facecolors="white" if wide else colours,
            edgecolors=colours,
            linewidths=1.4 if wide else 0,
        )
        size = 14 if wide else 8.5
        # a star where it ended, hollow at its prediction while it has not; that as a bar
        for held in group.held_out:
            x, said, colour = getattr(held, axis), held.prediction, style["color"]
            if said is not None:
                panel.errorbar(
                    x,
                    said.loss,
                    yerr=[[said.loss - said.low], [said.high - said.loss]],
                    color=colour,
                    marker="_",
                    markersize=1.5 * size,
                    capsize=0.35 * size,
                    zorder=4,
                )
            y, face, edge, width = (
                (said.loss, "white", colour, 1)
                if held.loss is None
                else (held.loss, colour, "white", 0.4)
            )
            panel.plot(
                x,
                y,
                marker="*",
                linestyle="none",
                markersize=size,
                zorder=6,
                color=colour,
                markerfacecolor=face,
                markeredgecolor=edge,
                markeredgewidth=width,
            )
    if named and not (is_by_compute and axis == "N"):  # the colours of the panel beside it
        title = "C [FLOPs]" if is_by_compute else "D / N" if is_by_ratio else "N"
        panel.legend(
            named.values(),
            named,
            title=title,
            loc="upper right",
            fontsize=8,
            framealpha=0.8,
            title_fontsize=8,
            handlelength=1.2,
            labelspacing=0.15,
            borderpad=0.3,
            edgecolor="none",
        ).set_zorder(9)


def _gaps_of(group: Group, pairs: list[Pair], axis: str, loss_key: str) -> list[DrawnGap]:
    """A marker for each size and budget of the group's recipe: its pairs' gap in per cent."""
    arm = loss_key.removeprefix("loss_")
    at = {record.run_id: x for record, x in zip(group.records, group.x[axis], strict=True)}
    chosen = [pair for pair in pairs if pair.fp8.run_id in at]
    gaps = []
    for _, cell in grouped(chosen, lambda pair: (pair.fp8.params_total, pair.fp8.tokens)):
        single = cell[0].gap[arm].se_percent if len(cell) == 1 else None
        gaps.append(gap_at(at[cell[0].fp8.run_id], mean_gaps(cell, "percent")[arm], single))
    return gaps


def _draw_gaps(panel, groups, axis: str, pairs, loss_key: str) -> None:
    """FP8 minus BF16 in per cent: the mean over seeds with its interval, or a single pair."""
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.4)
    for group, style in zip(groups, styles([group.recipe for group in groups]), strict=True):
        look = {key: style[key] for key in ("color", "marker", "markersize")}
        draw_gaps(panel, _gaps_of(group, pairs, axis, loss_key), look)


def _set_gap_limits(row, groups, pairs, loss_key: str) -> None:
    """One axis for all panels of the row of gaps, around what DrawnGap.ends says and 0."""
    axis = next(iter(groups[0].x))
    gaps = [gap for group in groups for gap in _gaps_of(group, pairs, axis, loss_key)]
    ends = [0.0, *itertools.chain.from_iterable(gap.ends for gap in gaps)]
    room = GAP_ROOM * max(max(ends) - min(ends), 1e-3)
    for panel in row:
        panel.set_ylim(min(ends) - room, max(ends) + room)


def _draw_optima(row, group: Group, style: dict) -> None:
    """N*(C), D*(C) and their ratio: the budgets' minima and the laws through them."""
    fit = group.laws["isoflop"]
    C, N, D, _ = minima_of(fit)
    grid = np.geomspace(C.min() / AROUND, BEYOND * C.max(), 60)
    p = fit.parameters
    N_law, D_law = p["k_n"] * grid ** p["a"], p["k_d"] * grid ** p["b"]
    intervals = fit.ci95 or {}
    panels = (
        ("N* [parameters]", N, N_law, "a"),
        ("D* [tokens]", D, D_law, "b"),
        ("D* / N* [tokens/param.]", D / N, D_law / N_law, None),
    )
    for panel, (label, minima, law, exponent) in zip(row, panels, strict=True):
        name = None
        if exponent is not None:
            letter = "N" if exponent == "a" else "D"
            name = f"{letter}* ~ C^{p[exponent]:.3f}"
            if exponent in intervals:
                name += "\n{:.3f} to {:.3f}".format(*intervals[exponent])
        panel.plot(grid, law, color=style["color"], linewidth=1.4, label=name)
        panel.plot(C, minima, **_minimum_look(style["color"]) | {"markersize": 6})
        panel.set(xscale="log", yscale="log", xlim=(grid[0], grid[-1]), xlabel=AXES["C"])
        panel.set_ylabel(label, fontsize=9)
        shown = np.concatenate([minima, law])
        panel.set_ylim(shown.min() / 1.5, 1.5 * shown.max())
        counts_axis(panel.xaxis, in_words=False)
        panel.xaxis.set_major_locator(LogLocator(numticks=3))
        counts_axis(panel.yaxis)
        if name is not None:
            panel.legend(loc="upper left", fontsize=7.5, frameon=False, handlelength=1)


def _minimum_look(colour: str) -> dict:
    return {
        "marker": "P",
        "linestyle": "none",
        "markersize": 8,
        "zorder": 5,
        "color": colour,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
    }


def _shade(style, value, among):
    """The style's colour for a value (number or array): pale for the smallest of `among`, dark for
    the largest."""
    low, high = np.log(min(among)), np.log(max(among))
    share = (np.log(value) - low) / (high - low) if high > low else 0.6 + 0 * value
    return matplotlib.colormaps[style["shades"]](0.45 + 0.5 * share)


def _legend(groups) -> list:
    """A group's marker and line, then in grey what is alike in all of them."""
    handles, grey, held = [], "#666666", [held for group in groups for held in group.held_out]
    for group, style in zip(groups, styles([group.recipe for group in groups]), strict=True):
        hollow = style.get("hollow") and len(group.loss) < MANY
        look = {
            key: style[key] for key in ("marker", "markersize", "linestyle", "linewidth", "color")
        }
        handles.append(
            Line2D(
                [],
                [],
                **look,
                label=name_of(group),
                markeredgewidth=1.4 if hollow else 0,
                markerfacecolor="white" if hollow else style["color"],
            )
        )
    star = {"color": grey, "markersize": 10, "linestyle": "none"}
    is_there = any(one.loss is not None for one in held)
    alike = (
        (
            any(len(tokens) for group in groups for tokens, _ in group.curves),
            Line2D([], [], color=grey, linewidth=0.8, alpha=0.8, label="training loss"),
        ),
        (
            any(group.lines or is_surface(group) for group in groups),
            Patch(facecolor=grey, alpha=0.3, label="law, 95 % interval"),
        ),
        (any(group.bands for group in groups), Patch(**HATCH, label="other model forms")),
        (
            any(group.frontier for group in groups),
            Line2D(
                [],
                [],
                marker="P",
                color=grey,
                markersize=8,
                linestyle="none",
                label="minimum of a budget",
            ),
        ),
        (
            held,
            Line2D(
                [],
                [],
                marker="*",
                **star,
                markerfacecolor=grey if is_there else "white",
                label="held-out run" + " to come" * (not is_there),
            ),
        ),
        (
            any(one.prediction for one in held),
            Line2D([], [], marker="|", **star, label="its prediction, 95 %"),
        ),
    )
    return handles + [handle for is_drawn, handle in alike if is_drawn]


def _title(groups, loss_key: str) -> str:
    n = ", ".join(dict.fromkeys(str(len(group.loss)) for group in groups))
    if not groups[0].records:
        return f"Loss in {name_of(groups[0])} (n = {n} points)"
    arms = " and ".join(map(name_of, groups)) if len(groups) < 3 else f"{len(groups)} precisions"
    each = " each" * (len(groups) > 1 and "," not in n)
    return (
        f"Validation loss of {arms}, evaluated {EVALUATION_WORDS[loss_key.removeprefix('loss_')]} (n ="
        f" {n}{each})"
    )


def _caption(groups, others) -> str:
    """The first group's law, then what the lines are; law.json has the laws of all with their
    intervals."""
    first, axis, parts = groups[0], "C" if "C" in groups[0].x else "N", []
    if law := first.laws["chinchilla"] if is_surface(first) else first.lines.get(axis):
        parts.append(f"{name_of(first)}: {law.formula()}.")
    if any(map(is_surface, groups)):
        parts.append("Lines: lowest loss for a compute, of one size N, of one ratio D / N.")
    elif first.frontier is not None:
        parts.append(
            "Over C the law through the budgets' minima, over D and N the valley of each budget."
            " Below: where the minima lie, exponents with 95 % intervals."
        )
    elif any(map(is_spread, groups)):
        parts.append("Over D and N, lines join points of one size, of one ratio D / N.")
    elif "D" in first.x:
        parts.append(
            f"All at {np.median(first.x['D'] / first.x['N']):.3g} tokens per"
            f" {KIND[first.convention]}parameter."
        )
    parts += [f"Not drawn, fewer sizes or no such law: {', '.join(map(name_of, others))}."] * bool(
        others
    )
    return " ".join(parts)


def name_of(group) -> str:
    """The recipe as the reader knows it, or the table's name."""
    return (
        name_recipe(group.recipe)
        if group.records
        else textwrap.shorten(group.recipe, 40, placeholder="…")
    )


# ------------------------------------------------------------------------------- lines of the laws

# A line of a law, arrays of one shape; `each`: its size or its tokens per parameter, None for one
# of all points.
Line = namedtuple("Line", "x loss low high each", defaults=(None, None, None))


def is_surface(group) -> bool:
    """Whether an identified L(N, D) heads the group, so that no single curve over one axis is its
    law."""
    return group.headline == "chinchilla"


def is_spread(group) -> bool:
    """Whether the group's points lie at several tokens-per-parameter ratios: then loss over N or D
    alone is no one curve."""
    return bool(group.ray) and not on_one_ray(group.ray)


def drawn(groups) -> tuple[list, list]:
    """The groups that the figure shows; those that it only names, because their law says nothing
    beside the others' frontier: of fewer sizes than another, or without an irreducible loss that
    their points identify where some law has one."""
    sizes = [len(np.unique(group.x["N"])) for group in groups]
    shown = [group for group, size in zip(groups, sizes, strict=True) if size == max(sizes)]
    strong = "chinchilla", "isoflop", "ray"
    shown = [
        one for one in shown if one.headline in strong and one.laws[one.headline].identified
    ] or shown
    return shown, [group for group in groups if not any(group is one for one in shown)]


def lines_of(group, axis: str, grid) -> list[Line]:
    """The lines of the group over `grid`. Where an identified L(N, D) heads it: its frontier over
    compute, a line per size over tokens, per ratio over parameters. Else its law over one axis;
    where its points lie at several ratios, over D or N lines that join the few points of one size
    or one ratio, means over seeds: the eye takes a cloud of two dimensions for noise."""
    law, points = group.laws["chinchilla"], group.points
    if is_surface(group):
        if axis == "C":
            return [_line(law, grid, _cheapest(group, grid))]
        if axis == "N":
            return [
                _line(law, grid, (grid, ratio * grid), ratio) for ratio in _few(points.D / points.N)
            ]
        sizes = sorted({*_few(points.N), *(float(held.N) for held in group.held_out)})
        return [_line(law, grid, (np.full(len(grid), N), grid), N) for N in sizes]
    if group.frontier is not None and axis != "C":
        return _valleys(group, axis)
    if axis == "C" or not is_spread(group):
        return [_line(group.lines[axis], grid, (grid,))] if axis in group.lines else []
    lines, values = [], points.N if axis == "D" else points.D / points.N
    for value in _few(values) if len(group.loss) < MANY else ():
        near = np.abs(np.log(values / value)) < np.log(1.05)
        x = np.unique(group.x[axis][near])
        lines.append(
            Line(
                x,
                np.array([group.loss[near & (group.x[axis] == one)].mean() for one in x]),
                each=value,
            )
        )
    return [line for line in lines if len(line.x) > 1]


def _valleys(group, axis: str) -> list[Line]:
    """The fitted valley of each budget that has a minimum, over parameters or tokens; `each` is its
    compute."""
    fit, points, lines = group.laws["isoflop"], group.points, []
    for row in fit.budgets:
        if row["N"] is None:
            continue
        at = np.abs(np.log(points.C / row["C"])) < math.log(SAME_BUDGET)
        log_sizes, first = np.unique(np.log(points.N[at]), return_index=True)
        log_size = np.linspace(log_sizes[0], log_sizes[-1], 60)
        log_tokens = np.interp(log_size, log_sizes, np.log(points.D[at])[first])
        valley = int(np.nanargmin(np.abs(fit.valleys.log_size - math.log(row["N"]))))
        x = np.exp(log_size if axis == "N" else log_tokens)
        lines.append(Line(x, fit.valleys.loss_at(valley, log_size), each=row["C"]))
    return lines


def _line(law, x, where, each=None) -> Line:
    with np.errstate(over="ignore"):
        interval = law.interval_at(*where) if law.identified else None
    loss, low, high = (law.predict(*where), None, None) if interval is None else interval
    return Line(x, loss, low, None if high is None else np.minimum(high, 1e9 * loss), each)


def _cheapest(group, compute):
    """(N, D), of the shape of `compute`: where the law's loss is lowest for so many FLOPs, counted
    as the group's points are: FLOPs per token go as N^k, k below 1 as the share of the vocabulary
    and of attention falls with size."""
    p, points = group.laws["chinchilla"].parameters, group.points
    k, height = np.polyfit(np.log(points.N), np.log(group.x["C"] / points.D), 1)
    D_at_1 = compute / np.exp(height)  # tokens of a model of one parameter
    N = (p["alpha"] * p["A"] * D_at_1 ** p["beta"] / (k * p["beta"] * p["B"])) ** (
        1 / (p["alpha"] + k * p["beta"])
    )
    return N, D_at_1 / N**k


def _few(values) -> list[float]:
    """The medians of values that lie within 5 %, ascending, FEW of them at most."""
    values = np.sort(values)
    some = np.split(values, 1 + np.flatnonzero(np.diff(np.log(values)) > np.log(1.05)))
    return [
        float(np.median(some[round(i)])) for i in np.linspace(0, len(some) - 1, min(len(some), FEW))
    ]


def smooth(x, loss) -> np.ndarray:
    """Means of x and loss, (2, n), over bins of equal width in log x: even on a log axis, unlike a
    window of so many steps."""
    if len(x) == 0:
        return np.array([x, loss])
    bins = int(np.clip(np.ceil(BINS * np.log10(x[-1] / x[0])), 4, 80))
    edges = np.geomspace(x[0], x[-1] * (1 + 1e-9), bins + 1)
    bin_of = np.searchsorted(edges, x, side="right") - 1
    counts = np.bincount(bin_of, minlength=bins)
    is_filled = counts > 0
    sums = np.array([np.bincount(bin_of, values, minlength=bins) for values in (x, loss)])
    return sums[:, is_filled] / counts[is_filled]


if __name__ == "__main__":
    raise SystemExit(run_command(main))
