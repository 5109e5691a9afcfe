"""Fit the relative gap of a recipe to size and tokens: gap = k (N / N0)^-a (D/N / r0)^b, in per
cent of the loss.

Gaps of single pairs may be negative by noise alone, so the law is fitted to the signed gaps, never
to their logarithm; every interval counts trajectories. An exponent is told only where the gap
itself is told from zero. Read first gap_cells.py (weights), sandwich.py (uncertainty), gap_power.py
(the fit) and gap_effective.py (the rival form)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from scaling.laws import LEVELS, ONE_RAY
from scaling.paired.cost import Surface
from scaling.paired.estimates import ALPHA, POWER, grouped, told_together
from scaling.paired.gap_cells import CannotFitGap, Cells, GapPoints, PairNoise, cells_of
from scaling.paired.gap_effective import EffectiveFit, fit_effective
from scaling.paired.gap_power import LIMIT, PowerFit, fit_power, power_axes
from scaling.paired.gaps import Pair, is_idle, trajectories
from scaling.paired.reasons import Reason, reason
from scaling.paired.sandwich import SandwichVariance

AXES = {"a": "N", "b": "D/N"}  # exponent -> what it is the exponent of
MIN_TRAJECTORIES = 6  # three sizes of two seeds
REFUTED = 0.01  # chance of refuting a true form, as for predictions of the loss
MEANINGLESS = 100.0  # per cent of the loss: no interval that reaches so far is a prediction


@dataclass(frozen=True)
class Exponent:
    """An exponent of the law with its 95 % interval; a: gap falls as N^-a, b: grows as (D/N)^b."""

    name: str  # "a" or "b"
    value: float  # the exponent
    low: float  # -LIMIT or LIMIT: the interval has no end within them
    high: float  # upper end
    # the larger of two tests that it is zero: by the scatter of trajectories, by the pooled noise
    p: float
    exponent_dof: float  # degrees of freedom of the first, and of the interval
    is_told: bool  # from zero, both exponents tested together at 5 % (Holm)
    # the smallest exponent that this design tells from zero with 80 %; None: no finite one
    could_show: float | None


@dataclass(frozen=True)
class NestedForm:
    """A form held against the means of all cells (a size at a budget)."""

    form: str  # zero, constant, a, b, both, effective
    parameter_count: int  # of the form
    squares: float  # weighted squares beyond the scatter within cells
    # of so large squares if the form were true; None: no cell has a second pair, or none is spare
    p_of_fit: float | None


@dataclass(frozen=True)
class EffectiveParameters:
    """The gap as a loss of parameters: L(f N, D) under the BF16 law, which is taken as exact."""

    law: str  # which BF16 law
    f: float  # effective share of the parameters
    f_low: float | None  # 95 % interval; None: no number gives so large a gap
    f_high: float | None  # upper end
    f_p_of_fit: float | None  # as in NestedForm


@dataclass(frozen=True)
class GapLaw:
    """What one recipe's pairs say of its gap over size and tokens; k to b are None where there is
    no fit."""

    N0: float  # reference size: k is the gap there
    ratio0: float  # reference tokens per parameter
    pair_count: int  # pairs
    trajectory_count: int  # independent trajectories among them
    size_count: int  # sizes
    ratio_count: int  # ratios of tokens to parameters
    # names of the exponents that are told from zero; None: no trend can be told
    trend: list[str] | None
    reason: Reason | str | None  # why no trend can be told; in a file its sentence
    # the gap in per cent if it were the same everywhere, with its 95 % interval; None: no spread
    constant: float
    constant_low: float | None = None  # lower end of the interval
    constant_high: float | None = None  # upper end
    k: float | None = None  # per cent at N0 and ratio0
    k_low: float | None = None  # lower end of its 95 % interval
    k_high: float | None = None  # upper end
    a: Exponent | None = None  # None: the pairs have fewer than three sizes
    b: Exponent | None = None  # None: fewer than three ratios of tokens to parameters
    noise: PairNoise | None = None  # what one pair's gap scatters by
    forms: list[NestedForm] | None = None  # from the simplest on
    starts: int | None = None  # of the solver
    starts_at_best: int | None = None  # that end at the best objective
    # largest over smallest singular value of the scaled Jacobian
    condition: float | None = None
    effective: EffectiveParameters | None = None  # the gap as a loss of parameters
    # why the effective form was not fitted; in a file its sentence
    no_effective: Reason | str | None = None
    # "power law", "effective parameters", or None: the pairs do not tell which fits better
    better_form: str | None = None

    def gap_at(self, N: float, D: np.ndarray) -> np.ndarray:
        """The power law's gap at N parameters and D tokens, in per cent as it was fitted, 100
        ln(L_FP8 / L_BF16); an exponent that was not fitted is 0."""
        assert self.k is not None
        a = 0.0 if self.a is None else self.a.value
        b = 0.0 if self.b is None else self.b.value
        return self.k * (N / self.N0) ** -a * (D / N / self.ratio0) ** b


@dataclass(frozen=True)
class GapFormForecast:
    """One form's gap in per cent at a point, with its own 95 % interval."""

    form: str  # power law, constant, effective parameters
    gap: float  # per cent
    gap_low: float  # lower end of its 95 % interval
    gap_high: float  # upper end
    # why it is not in the union; in a file its sentence
    refuted_because: Reason | str | None


@dataclass(frozen=True)
class GapForecast:
    """The gap in per cent at a size and a number of tokens, the union of the forms that the pairs
    do not refute."""

    N: float  # parameters, as the study counts them
    D: float  # training tokens
    headline: str  # the form that gives `gap`
    gap: float  # per cent
    low: float  # 95 % interval of the law: parameters and doubt in the form
    high: float  # upper end
    one_pair_low: float  # the same for a single pair to come, whose seeds scatter
    one_pair_high: float  # upper end
    pair_sd: float  # per cent: that scatter
    pair_sd_dof: int  # degrees of freedom of pair_sd
    beyond_sizes: float  # N over the largest size; below the smallest: N over that; else 1
    beyond_ratios: float  # the same of tokens per parameter
    forecasts: list[GapFormForecast]  # each form's own


@dataclass(frozen=True, eq=False)
class GapFit:
    """What a prediction needs, beside the law that is written to disk."""

    law: GapLaw
    points: GapPoints
    power: PowerFit | None = None
    constant: PowerFit | None = None
    effective: EffectiveFit | None = None

    def forecast(self, N: float, D: float) -> GapForecast:
        """The gap at N parameters and D tokens. Raises CannotFitGap where the pairs carry no law,
        where the point differs from them along an axis that they do not vary, where every form is
        refuted, and where the interval is too wide to say anything."""
        if self.power is None or self.constant is None:
            raise CannotFitGap(self.law.reason or reason("no_law"))
        _check_axes(self, N, D)
        forecasts = [self._power_forecast(N, D), self._constant_forecast()]
        if self.effective is not None:
            forecasts.append(self._effective_forecast(N, D))
        allowed = [form for form in forecasts if form.refuted_because is None]
        if not allowed:
            raise CannotFitGap(reason("every_form_refuted", why=forecasts[0].refuted_because))
        headline = _headline(self.law, allowed)
        low = min(form.gap_low for form in allowed)
        high = max(form.gap_high for form in allowed)
        if max(abs(low), abs(high)) > MEANINGLESS:
            raise CannotFitGap(reason("meaningless_interval", low=low, high=high))
        noise = self.power.cells.noise
        scatter = float(stats.t.ppf(1 - ALPHA / 2, noise.noise_dof)) * noise.pair_sd
        return GapForecast(
            N=N,
            D=D,
            headline=headline.form,
            gap=headline.gap,
            low=low,
            high=high,
            one_pair_low=headline.gap - math.hypot(headline.gap - low, scatter),
            one_pair_high=headline.gap + math.hypot(high - headline.gap, scatter),
            pair_sd=noise.pair_sd,
            pair_sd_dof=noise.noise_dof,
            beyond_sizes=_beyond(self.points.N, N),
            beyond_ratios=_beyond(self.points.D / self.points.N, D / N),
            forecasts=forecasts,
        )

    def _power_forecast(self, N: float, D: float) -> GapFormForecast:
        assert self.power is not None
        axes = power_axes(N, D, self.power.N0, self.power.ratio0)
        low, high = self.power.interval_at(axes)
        gap = self.power.gap_at(axes)
        full_form = " and ".join(self.power.free)
        return GapFormForecast("power law", gap, low, high, misfit(self.law, full_form))

    def _constant_forecast(self) -> GapFormForecast:
        law = self.law
        assert law.constant_low is not None and law.constant_high is not None
        exponents = _exponents(law)
        refuted = misfit(law, "constant")
        if min(exponent.p for exponent in exponents) * len(exponents) < REFUTED and law.trend:
            refuted = reason("trend_refutes", exponents=law.trend)
        return GapFormForecast(
            "constant", law.constant, law.constant_low, law.constant_high, refuted
        )

    def _effective_forecast(self, N: float, D: float) -> GapFormForecast:
        fit = self.effective
        assert fit is not None
        gap, low, high = (fit.gap_at(N, D, phi) for phi in (fit.phi, *fit.phi_interval))
        refuted = misfit(self.law, "effective")
        if self.law.better_form == "power law":
            refuted = refuted or reason("power_law_fits_better")
        return GapFormForecast("effective parameters", gap, low, high, refuted)


def fit_gaps(
    pairs: Sequence[Pair], surface: Surface | None, no_surface: Reason | str, evaluation: str
) -> dict[str, GapFit]:
    """Recipe -> GapFit of its pairs under one evaluation; recipes that convert no Linear have none.
    surface: the BF16 law L(N, D), else no_surface says why there is none."""
    return {
        recipe: fit_gap(points_of(members, evaluation), surface, no_surface)
        for recipe, members in grouped(pairs, lambda pair: pair.fp8.recipe)
        if not is_idle(members)
    }


def points_of(pairs: Sequence[Pair], evaluation: str) -> GapPoints:
    """The pairs of one recipe as arrays."""
    trajectory = np.empty(len(pairs), dtype=int)
    for label, members in enumerate(trajectories(pairs)):
        trajectory[members] = label
    runs = [pair.fp8 for pair in pairs]
    percents = [pair.gap[evaluation].log_percent for pair in pairs]
    return GapPoints(
        N=np.array([float(run.N) for run in runs]),
        D=np.array([float(run.tokens) for run in runs]),
        percent=np.array(percents),
        trajectory=trajectory,
    )


def fit_gap(points: GapPoints, surface: Surface | None, no_surface: Reason | str = "") -> GapFit:
    """The law of one recipe's pairs; surface: the BF16 law L(N, D), else no_surface says why there
    is none. Never raises: where no law or no trend can be told, the law says why."""
    ratios = points.D / points.N
    counts = _Counts(
        N0=_reference(points.N),
        ratio0=_reference(ratios),
        pair_count=len(points.percent),
        trajectory_count=len(np.unique(points.trajectory)),
        size_count=len(levels(points.N)),
        ratio_count=len(levels(ratios)),
    )
    try:
        cells = cells_of(points)
    except CannotFitGap as error:
        mean = float(points.percent.mean())
        why = error.reason
        law = GapLaw(**vars(counts), trend=None, reason=why, constant=mean, no_effective=why)
        return GapFit(law, points)
    constant = fit_power(cells, counts.N0, counts.ratio0, ())
    low, high = constant.interval_at(np.zeros(2))
    law = GapLaw(
        **vars(counts),
        trend=None,
        reason=_too_few(counts),
        constant=constant.k,
        constant_low=low,
        constant_high=high,
        noise=cells.noise,
    )
    if law.reason is not None:
        return GapFit(replace(law, no_effective=law.reason), points)
    effective = None if surface is None else fit_effective(cells, surface)
    fit = GapFit(law, points, None, constant, effective)
    return _fitted(fit, cells, counts.free, no_surface)


@dataclass(frozen=True)
class _Counts:
    """The first fields of GapLaw."""

    N0: float
    ratio0: float
    pair_count: int
    trajectory_count: int
    size_count: int
    ratio_count: int

    @property
    def free(self) -> tuple[str, ...]:
        levels = {"a": self.size_count, "b": self.ratio_count}
        return tuple(name for name, count in levels.items() if count >= LEVELS)


def _too_few(counts: _Counts) -> Reason | None:
    if not counts.free:
        levels = {"sizes": counts.size_count, "ratios": counts.ratio_count}
        return reason("too_few_levels", **levels, needed=LEVELS)
    if counts.trajectory_count < MIN_TRAJECTORIES:
        return reason("too_few_pairs", independent=counts.trajectory_count, needed=MIN_TRAJECTORIES)
    return None


def _fitted(fit: GapFit, cells: Cells, free: tuple[str, ...], no_surface: Reason | str) -> GapFit:
    """The fit with its power law, the exponents that are told, the forms beside it."""
    law, constant = fit.law, fit.constant
    assert constant is not None
    nested = {name: fit_power(cells, law.N0, law.ratio0, (name,)) for name in free}
    power = nested[free[0]]
    if len(free) > 1:
        power = fit_power(cells, law.N0, law.ratio0, free)
    forms = _nested_forms(constant, nested, power, fit.effective)
    exponents = _judged_exponents(constant, nested, power, _is_gap_told(law))
    by_name = {exponent.name: exponent for exponent in exponents}
    k_low, k_high = power.interval_at(np.zeros(2))
    law = replace(
        law,
        k=power.k,
        k_low=k_low,
        k_high=k_high,
        a=by_name.get("a"),
        b=by_name.get("b"),
        forms=forms,
        starts=power.starts,
        starts_at_best=power.starts_at_best,
        condition=_condition(power),
        better_form=_better_form(power, fit.effective),
    )
    law = _with_trend(law, " and ".join(free))
    if fit.effective is None:
        law = replace(law, no_effective=no_surface or None)
    else:
        law = replace(law, effective=_effective(fit.effective, forms[-1]))
    return replace(fit, law=law, power=power)


def _with_trend(law: GapLaw, full_form: str) -> GapLaw:
    why = _no_trend(law, full_form)
    if why is not None:
        return replace(law, reason=why)
    return replace(law, trend=[exponent.name for exponent in _exponents(law) if exponent.is_told])


def _nested_forms(
    constant: PowerFit,
    nested: dict[str, PowerFit],
    power: PowerFit,
    effective: EffectiveFit | None,
) -> list[NestedForm]:
    """From the simplest on; the effective parameters last."""
    cells = power.cells
    forms = [
        _nested_form(cells, "zero", 0, float(cells.height @ cells.height)),
        _nested_form(cells, "constant", 1, constant.squares),
    ]
    forms += [_nested_form(cells, name, 2, fit.squares) for name, fit in nested.items()]
    if len(power.free) > 1:
        forms.append(_nested_form(cells, " and ".join(power.free), 3, power.squares))
    if effective is not None:
        forms.append(_nested_form(cells, "effective", 1, effective.squares))
    return forms


def _judged_exponents(
    constant: PowerFit, nested: dict[str, PowerFit], power: PowerFit, is_gap_told: bool
) -> list[Exponent]:
    """Each free exponent; at most 5 % of studies without a trend tell one."""
    without = dict.fromkeys(power.free, constant)
    if len(power.free) > 1:
        without = {"a": nested["b"], "b": nested["a"]}
    exponents = [_exponent(power, name, without[name].squares, is_gap_told) for name in power.free]
    is_told = told_together([exponent.p for exponent in exponents])
    return [
        replace(exponent, is_told=is_one_told)
        for exponent, is_one_told in zip(exponents, is_told, strict=True)
    ]


def _exponent(power: PowerFit, name: str, squares_without: float, is_gap_told: bool) -> Exponent:
    """One exponent before both are judged together; squares_without: of the law where it is 0."""
    index = 1 + power.free.index(name)
    spread = power.sandwich.of(np.eye(1 + len(power.free))[index])
    axis = "ab".index(name)
    profile = power.profile(spread.threshold)
    low, high = profile.exponent_interval(axis, power.squares + spread.threshold)
    # with few trajectories the sandwich alone tells a trend too often, with unequal noise the
    # pooled noise alone does: both must tell it
    pooled = SandwichVariance(spread.assumed, 1.0, power.cells.noise.noise_dof)
    rise = squares_without - power.squares
    smallest = max(_smallest_told(test, len(power.free)) for test in (spread, pooled))
    could_show = smallest if is_gap_told and smallest < LIMIT else None
    return Exponent(
        name=name,
        value=float(power.exponents[axis]),
        low=low,
        high=high,
        p=max(spread.p_of_rise(rise), pooled.p_of_rise(rise)),
        exponent_dof=spread.dof,
        is_told=False,
        could_show=could_show,
    )


def _smallest_told(test: SandwichVariance, exponent_count: int) -> float:
    """The exponent that this test tells from zero with 80 %, as the first of so many."""
    critical = stats.t.ppf(1 - ALPHA / exponent_count / 2, test.dof)
    return float(critical + stats.t.ppf(POWER, test.dof)) * test.se


def _no_trend(law: GapLaw, full_form: str) -> Reason | None:
    """Why no exponent is told; None where one is."""
    # first: a gap that changes its sign over the sizes may be 0 on average, and is no noise
    why_refuted = misfit(law, full_form)
    if why_refuted is not None:
        return reason("no_power_law_fits", why=why_refuted)
    if not _is_gap_told(law):
        return reason("gap_not_told")
    exponents = _exponents(law)
    at_limit = [exponent for exponent in exponents if abs(exponent.value) > 0.999 * LIMIT]
    if at_limit:
        return reason("exponent_at_limit", axis=AXES[at_limit[0].name], limit=LIMIT)
    if not any(exponent.is_told for exponent in exponents):
        if len(exponents) == 2:
            return reason("no_exponent_told")
        return reason("exponent_not_told", axis=AXES[exponents[0].name])
    return None


def _is_gap_told(law: GapLaw) -> bool:
    if law.constant_low is None or law.constant_high is None:
        return False
    return law.constant_low > 0 or law.constant_high < 0


def _exponents(law: GapLaw) -> list[Exponent]:
    return [exponent for exponent in (law.a, law.b) if exponent is not None]


def _nested_form(cells: Cells, form: str, parameter_count: int, squares: float) -> NestedForm:
    spare = len(cells.N) - parameter_count
    p_of_fit = None
    if spare > 0 and cells.within_dof > 0:
        p_of_fit = float(stats.f.sf(squares / spare, spare, cells.noise.noise_dof))
    return NestedForm(form, parameter_count, squares, p_of_fit)


def misfit(law: GapLaw, form: str) -> Reason | None:
    """Why the pairs refute a form; None where they do not."""
    for nested in law.forms or []:
        if nested.form == form and nested.p_of_fit is not None and nested.p_of_fit < REFUTED:
            return reason("misses_means", p=nested.p_of_fit)
    return None


def _effective(fit: EffectiveFit, form: NestedForm) -> EffectiveParameters | None:
    f = fit.share(fit.phi)
    if f is None:
        return None
    low, high = fit.phi_interval
    return EffectiveParameters(fit.surface.name, f, fit.share(high), fit.share(low), form.p_of_fit)


def _better_form(power: PowerFit, effective: EffectiveFit | None) -> str | None:
    """By Akaike's criterion where it says so at 100 to 1."""
    if effective is None:
        return None
    of_power = power.squares + 2 * (1 + len(power.free))
    of_effective = effective.squares + 2
    if abs(of_power - of_effective) <= 2 * math.log(1 / REFUTED):
        return None
    return "power law" if of_power < of_effective else "effective parameters"


def _headline(law: GapLaw, allowed: list[GapFormForecast]) -> GapFormForecast:
    """The form that gives the gap: the better one, else the simplest that the pairs do not
    refute."""
    preferred = ["constant", "power law", "effective parameters"]
    if law.trend is not None:
        preferred = ["power law", "effective parameters", "constant"]
    if law.better_form == "effective parameters":
        preferred = ["effective parameters", *preferred]
    by_name = {form.form: form for form in allowed}
    return by_name[min(by_name, key=preferred.index)]


def _condition(power: PowerFit) -> float:
    """Largest over smallest singular value of the Jacobian in units of the noise, its columns of
    length 1."""
    jacobian = power.cells.root @ power.derivatives(power.axes)
    scaled = jacobian / np.maximum(np.linalg.norm(jacobian, axis=0), 1e-12)
    singular = np.linalg.svd(scaled, compute_uv=False)
    return float(singular[0] / max(singular[-1], 1e-12))


def _check_axes(fit: GapFit, N: float, D: float) -> None:
    assert fit.power is not None
    for name, values, value in (
        ("a", fit.points.N, N),
        ("b", fit.points.D / fit.points.N, D / N),
    ):
        is_within = values.min() / ONE_RAY <= value <= values.max() * ONE_RAY
        if name not in fit.power.free and not is_within:
            raise CannotFitGap(reason("axis_not_varied", axis=AXES[name], needed=LEVELS))


def _reference(values: np.ndarray) -> float:
    """The value nearest to the geometric mean, at two significant digits."""
    logs = np.log(values)
    nearest = float(values[np.abs(logs - logs.mean()).argmin()])
    return float(f"{nearest:.1e}")


def levels(values: np.ndarray) -> list[float]:
    """The lowest of each group of values within 5 %, ascending: as a budget is rounded up to whole
    steps, they are one."""
    lowest, remaining = [], np.sort(values)
    while len(remaining):
        lowest.append(float(remaining[0]))
        remaining = remaining[remaining > ONE_RAY * remaining[0]]
    return lowest


def _beyond(values: np.ndarray, value: float) -> float:
    """How many times above the largest or below the smallest of the values; 1 within them."""
    return float(max(value / values.max(), values.min() / value, 1.0))
