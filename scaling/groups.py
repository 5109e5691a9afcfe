"""Fit every law to the runs of one precision recipe, or to the points of a table, and choose the
one that answers for them."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from scaling import records
from scaling.law_words import refusal_words
from scaling.laws import (
    HAS_OUTLIERS,
    ONE_RAY,
    CannotFit,
    Fit,
    LackOfFit,
    Points,
    Refit,
    SharedFault,
    fit_band,
    fit_form,
    fit_frontier,
    fit_law,
    forecast,
    lack_of_fit,
    meets,
    minima_of,
    on_one_ray,
    robustness,
    shared_fault,
    unfitted,
    with_bootstrap,
)
from scaling.laws.forms import CHINCHILLA
from scaling.laws.refusals import UnknownAxis
from scaling.predictions import Held
from scaling.records import Record

# points drawn by one bootstrap at most, in 200 resamples or more: a table of thousands need not
# wait
RESAMPLED = 2_000_000
FEWEST_RESAMPLES = 200
FORMS = (CHINCHILLA, "ray", "power_n", "power_d", "power_c", "isoflop")
# exponents of N or D alone over those of C on a ray: gamma = alpha beta / (alpha + beta)
ALONG_ONE_AXIS = 2
ALONE = {
    "D": "one of the tokens alone: all points are of one size",
    "N": "one of the size alone: all points have one number of tokens",
}
FAR = 10  # times the largest compute: where the doubt in the form is told


@dataclass(frozen=True)
class Headline:
    """The form that answers for a group, and why."""

    form: str  # of FORMS
    reason: str  # why this one


@dataclass(frozen=True)
class FormDoubt:
    """What the forms that the points do not refute say far out."""

    N: float  # parameters of the place: at the tokens per parameter that most points have
    D: float  # tokens of the place
    C: float  # FLOPs of the place: ten times the largest compute
    low: float  # lowest loss of the forms there, nats per token
    high: float  # highest loss of the forms
    forms: list[str]  # their names


@dataclass(frozen=True)
class NamedOutlier:
    """A point that lies off the law of the others."""

    point: str  # its run, or its line in the table
    percent: float  # its distance from the law, in per cent of the loss


@dataclass(frozen=True)
class Group:
    """One recipe's runs, smallest compute first, or one table's points, with their laws; arrays
    have shape (n,)."""

    recipe: str  # a table's file name where there are no runs
    records: tuple[Record, ...]  # () for a table
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
    form_doubt: FormDoubt | None = None  # beside Chinchilla's law; None where no other form reaches
    lack_of_fit: LackOfFit | None = None  # of Chinchilla's law, identified or not the headline
    frontier: Fit | None = None  # L*(C) through the budgets' minima, where those are headlined
    shared_fault: SharedFault | None = None  # then a trajectory in `points` is what it names
    labels: tuple = ()  # of each point: the trajectory that the runs or the table name
    # of a table: where each point stands in its file, such as "line 20"
    places: tuple[str, ...] = ()
    # of runs: "N" or "C" -> {another convention: values so counted}
    counts: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    curves: tuple[tuple[np.ndarray, np.ndarray], ...] = ()  # (tokens, loss) of each run's training
    held_out: tuple[Held, ...] = ()  # in no fit

    @property
    def law(self) -> Fit:
        """The headlined law."""
        return self.laws[self.headline]

    @property
    def n_sizes(self) -> int:
        """How many distinct N there are."""
        return len(np.unique(self.x["N"]))

    @property
    def is_surface(self) -> bool:
        """Whether an identified L(N, D) heads the group, so that no single curve over one axis is
        its law."""
        return self.headline == CHINCHILLA

    @property
    def is_spread(self) -> bool:
        """Whether the points lie at several tokens-per-parameter ratios: then loss over N or D
        alone is no one curve."""
        return self.ray is not None and not on_one_ray(self.ray)

    @cached_property
    def lines(self) -> dict[str, Fit]:
        """Axis -> the law that the figure draws over it; none where L(N, D) is headlined, which is
        no curve."""
        if self.frontier is not None:
            return {"C": self.frontier}
        lines = {}
        for axis, x in self.x.items():
            power = self.laws[f"power_{axis.lower()}"]
            if self.is_surface or not power.is_fitted:
                continue
            lines[axis] = power
            if self.laws["ray"].identified and axis != "C":
                lines[axis] = fit_law("ray", x, self.loss, seed_sd=self.seed_sd)
        if self.laws["ray"].identified:
            lines["C"] = self.laws["ray"]
        return lines

    @cached_property
    def bands(self) -> dict[str, list[Fit]]:
        """Axis -> forms whose spread is the model-form band: over C, on one ray over N and D
        too."""
        if self.frontier is not None:
            minima = minima_of(self.laws["isoflop"])
            return {"C": fit_band(minima.C, minima.loss)}
        bands = {}
        for axis in self.lines:
            if axis != "C" and not on_one_ray(self.ray):
                continue
            # On a ray C is a power of N or D (about 2; attention bends it), so exponents there are
            # as much larger.
            log_x, log_c = np.log(self.x[axis]), np.log(self.x["C"])
            factor = float(np.polyfit(log_x, log_c, 1)[0])
            if self.points.only_axis is not None:
                factor *= ALONG_ONE_AXIS
            bands[axis] = fit_band(self.x[axis], self.loss, axis.lower(), factor)
        return bands

    @cached_property
    def robustness(self) -> list[Refit]:
        """The headlined law under other choices; under the other counts too, where there are
        runs."""
        return robustness(self.points, self.headline, self.counts, self.seed_sd)

    def names_of(self, indices: Sequence[int]) -> list[str]:
        """Points by their runs, or by what tells a table's rows apart (the line, where no column
        names runs)."""
        if self.records:
            return [self.records[i].run_id for i in indices]
        return [str(self.labels[i]) for i in indices]

    def name_of(self, index: int) -> str:
        """One point by its run or its line in the table; where neither is known, by what names its
        trajectory."""
        return self.places[index] if self.places else self.names_of([index])[0]

    @property
    def outliers(self) -> list[NamedOutlier]:
        """The points off the law of the others, farthest first."""
        form = self.headline if self.headline in HAS_OUTLIERS else CHINCHILLA
        outliers = self.laws[form].outliers
        if self.lack_of_fit is not None and form == CHINCHILLA:
            # of the law that fits, not of one that does not
            mended = self.lack_of_fit.mended
            outliers = mended.outliers if mended else ()
        return [
            NamedOutlier(self.name_of(outlier.point), 100 * outlier.distance)
            for outlier in outliers
        ]


def fit_group(
    runs: Sequence[Record],
    loss_key: str = "loss_bf16",
    seed_sd: float | None = None,
    held: tuple[Held, ...] = (),
    resamples: int = 1000,
    insist: bool = False,
) -> Group:
    """Fit every law to the runs of one recipe; a law that the runs cannot carry is there with the
    reason. seed_sd: of ln(loss) between seeds; None estimates it. held: for the figure. resamples:
    0 takes every run for independent."""
    runs = sorted(runs, key=lambda record: record.flops_per_token * record.tokens)
    if seed_sd is None:
        seed_sd = seed_noise(runs, loss_key)[0] or 0.0
    counts = _counts(runs)
    tokens = np.array([float(record.tokens) for record in runs])
    losses = np.array([getattr(record, loss_key) for record in runs])
    trunks = np.array([record.trunk for record in runs])
    N = counts["N"].pop(f"params_{runs[0].convention}")
    points = Points(N, tokens, counts["C"].pop("flops_per_token"), losses, trunks)
    group = fit_points(points, runs[0].recipe, "NDC", seed_sd, resamples, insist)
    return replace(
        group,
        records=tuple(runs),
        convention=runs[0].convention,
        counts=counts,
        curves=tuple(records.read_curve(record) for record in runs),
        held_out=held,
    )


def _counts(runs: Sequence[Record]) -> dict[str, dict[str, np.ndarray]]:
    """Axis -> {convention: (n,) values so counted}."""
    names = vars(runs[0])
    parameters = [name for name in names if name.startswith("params_")]
    flops = [name for name in names if name.startswith("flops_per_token")]
    counts: dict[str, dict[str, np.ndarray]] = {"N": {}, "C": {}}
    for name in parameters:
        counts["N"][name] = np.array([getattr(record, name) for record in runs], dtype=float)
    for name in flops:
        # FLOPs are whole numbers of FLOPs per token times tokens, rounded to a float once.
        values = [getattr(record, name) * record.tokens for record in runs]
        counts["C"][name] = np.array(values, dtype=float)
    return counts


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
    has_tokens = "D" in axes
    ray = points.ray if has_tokens else None
    resamples = min(resamples, max(FEWEST_RESAMPLES, RESAMPLED // len(points)))
    labels = tuple(points.cluster)
    first: Fit | None = None
    fault: SharedFault | None = None
    if has_tokens:
        first = fit_form("ray" if on_one_ray(ray) else CHINCHILLA, points, seed_sd)
        fault = _fault(first, points, seed_sd, columns) if resamples else None
    if fault is not None:
        points = replace(points, cluster=fault.labels)
    laws = {form: _fit(form, points, axes, first, seed_sd, resamples) for form in FORMS}
    surface = laws[CHINCHILLA]
    lack = lack_of_fit(surface, points, seed_sd) if surface.identified else None
    is_misfit = lack is not None and not insist
    headline = choose_headline(laws, ray, is_misfit, points.only_axis if has_tokens else None)
    is_isoflop, is_surface = headline.form == "isoflop", headline.form == CHINCHILLA
    return Group(
        recipe=name,
        records=(),
        points=points,
        x={axis: getattr(points, axis) for axis in axes},
        loss=points.loss,
        ray=ray,
        laws=laws,
        headline=headline.form,
        headline_reason=headline.reason,
        seed_sd=seed_sd,
        form_doubt=_form_doubt(points, seed_sd) if is_surface else None,
        lack_of_fit=lack,
        frontier=fit_frontier(laws["isoflop"], seed_sd) if is_isoflop else None,
        shared_fault=fault,
        labels=labels,
    )


def _fault(
    fit: Fit, points: Points, seed_sd: float, columns: dict[str, np.ndarray] | None
) -> SharedFault | None:
    """What sizes or runs share; None also where the law itself is at fault."""
    if not meets(fit, points, seed_sd):
        return None
    return shared_fault(fit, points, columns)


def _fit(
    form: str, points: Points, axes: str, first: Fit | None, seed_sd: float, resamples: int
) -> Fit:
    """One law of a group; `first`: the one that is fitted already, but for its intervals."""
    if form != "power_n" and "D" not in axes:
        return unfitted(form, len(points), UnknownAxis())
    if first is not None and form == first.form:
        return with_bootstrap(first, points, resamples)
    return fit_form(form, points, seed_sd, resamples=resamples)


def choose_headline(
    laws: dict[str, Fit],
    ray: tuple[float, float] | None,
    is_misfit: bool,
    only_axis: str | None = None,
) -> Headline:
    """The strongest law that the points identify and that fits them; only_axis: of Points."""
    if ray is None:
        return Headline(
            "power_n", "the table gives N alone, so only the power law in N can be fitted"
        )
    if laws[CHINCHILLA].identified and not is_misfit:
        return Headline(CHINCHILLA, "the points identify L(N, D)")
    if is_misfit:
        why = "L(N, D) does not fit the points (--insist headlines it all the same)"
    else:
        why = f"L(N, D) is not identified ({refusal_words(laws['chinchilla'].reason)})"
    if laws["isoflop"].identified:
        budgets = len(minima_of(laws["isoflop"]).C)
        return Headline("isoflop", f"{why}: the minima of {budgets} compute budgets instead")
    if laws["ray"].identified:
        return Headline("ray", f"{why}: ray law instead")
    why = f"{why}: power law in C instead"
    if only_axis is not None:
        why += f", which here is {ALONE[only_axis]}"
    elif not on_one_ray(ray):
        why += ", which mixes the effects of size and of data"
    return Headline("power_c", why)


def _form_doubt(points: Points, seed_sd: float) -> FormDoubt | None:
    """What the forms that the points do not refute say at FAR times the largest compute; None where
    no other form reaches there."""
    ratios = points.D / points.N
    neighbours = [
        int(np.sum((ratios <= ratio * ONE_RAY) & (ratios >= ratio / ONE_RAY))) for ratio in ratios
    ]
    place = max(range(len(ratios)), key=lambda i: (neighbours[i], points.C[i]))
    C = FAR * float(points.C.max())
    scale = math.sqrt(C / points.C[place])
    N, D = float(points.N[place] * scale), float(points.D[place] * scale)
    try:
        prediction = forecast(points, (N, D, C), seed_sd)
    except CannotFit:
        return None
    if len(prediction.forms) == 1:
        return None
    low, high = prediction.parts.model_form
    return FormDoubt(N, D, C, low, high, [row.form for row in prediction.forms])


def seed_noise(runs: Sequence[Record], loss_key: str = "loss_bf16") -> tuple[float | None, int]:
    """Pooled standard deviation of ln(loss) among runs that differ in the seed alone, with its
    degrees of freedom: recipes and branches of one size and seed share their data and most of their
    training, so they add none."""
    alike = defaultdict(list)
    for run in runs:
        key = (run.recipe, run.params_total, run.params_matmul, run.tokens, run.decays_from)
        alike[key].append(math.log(getattr(run, loss_key)))
    differences = len(runs) - len(alike)
    sizes_and_seeds = {(run.params_total, run.seed) for run in runs}
    sizes = {size for size, _ in sizes_and_seeds}
    freedom = min(differences, len(sizes_and_seeds) - len(sizes))
    if not differences:
        return None, freedom
    squares = sum(float(np.sum((np.array(logs) - np.mean(logs)) ** 2)) for logs in alike.values())
    return math.sqrt(squares / differences), freedom
