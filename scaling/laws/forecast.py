"""What the points say of a run to come: the union of the forms that they do not refute.

Few points fit many laws, and how the laws part beyond the points is most of what is not known
there: on real ladders three sizes' laws differ by 6 % of the loss at the fourth, where seeds differ
by 0.02 to 0.2 %."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from scipy.special import fdtri, stdtrit

from scaling.laws import rivals
from scaling.laws.fits import Fit, inefficiency, known
from scaling.laws.forms import CHINCHILLA, DELTA, GAMMAS
from scaling.laws.intervals import with_bootstrap
from scaling.laws.isoflop import frontier_of
from scaling.laws.lack_of_fit import MISSES, lack_of_fit
from scaling.laws.law import COLLAPSED, LEVELS, SPREAD, fit_law
from scaling.laws.points import ONE_RAY, ONE_SIZE, Points
from scaling.laws.refusals import (
    CannotFit,
    DoesNotFit,
    FewComputes,
    FewForFreeRay,
    MissesPoints,
    NegativeFloor,
    NoInterval,
    NoLawReaches,
    Refusal,
    Refuted,
)
from scaling.laws.shared_fault import SIZE_TERMS

# least noise of ln(loss) that an interval assumes: seeds measured elsewhere give .0002 to .002
FLOOR = 1e-3
FREE_RAY = 5  # points that the ray law with free gamma needs to enter the interval
COMPUTES = 3  # different computes that a law over compute needs
# points for a rival surface, evenly over compute: its doubt is of the form, not of noise
ENOUGH = 400
# times more or fewer tokens per parameter than on the frontier, within which a target is near it
NEAR_FRONTIER = 2
REFUTED = 0.01  # chance of refuting a true form
RESAMPLES = 200  # for the covariance of Chinchilla's law where it is bootstrapped
# Speaks where the points cannot choose a form: between the power law, which is too low on laws with
# an irreducible loss, and the steepest rays, which are too high on laws that saturate late (OLMo's
# ladder has .10, Hoffmann's law .15, Epoch's .18).
HEADLINE = "ray gamma=0.12"
PREFERRED = (
    CHINCHILLA,
    "ray",
    HEADLINE,
    f"frontier {HEADLINE}",
    HEADLINE.replace("ray", "surface"),
)


@dataclass(frozen=True)
class FormForecast:
    """What one form says of a new run at the target."""

    form: str  # such as "chinchilla", "ray gamma=0.12", "frontier power_c", "power surface"
    loss: float  # nats per token
    own_low: float  # end of the form's own 95 % interval, of its own residuals, nats per token
    own_high: float  # the other end
    n: int  # points that it was fitted to
    dof: int  # degrees of freedom of its residuals
    residual_rms: float  # of ln loss
    sigma: float  # noise of one run's ln loss that low and high assume
    parameters: dict[str, float]  # by their usual names
    low: float  # end of the 95 % interval for that noise, nats per token
    high: float  # the other end

    def with_sigma(self, sigma: float) -> "FormForecast":
        """The same for another noise, to which its own interval is proportional."""
        width = math.log(self.own_high / self.loss) * sigma / self.sigma
        low, high = self.loss * math.exp(-width), self.loss * math.exp(width)
        return replace(self, low=low, high=high, sigma=sigma)


@dataclass(frozen=True)
class Parts:
    """What the interval consists of."""

    model_form: tuple[float, float]  # lowest and highest loss of the forms, nats per token
    all_forms: tuple[float, float]  # the union of intervals before any form was refuted
    seed_sd: float  # of ln loss between seeds


@dataclass(frozen=True)
class Counts:
    """How many points there were."""

    all: int  # that there are
    at_this_ratio: int  # within 5 % of the target's tokens per parameter


@dataclass(frozen=True)
class Forecast:
    """What the points say of one new run."""

    loss: float  # of the headlined form, nats per token
    low: float  # end of the 95 % interval: the union over forms
    high: float  # the other end
    headline: str  # the form that gives the loss
    forms: tuple[FormForecast, ...]
    left_out: dict[str, Refusal]  # form -> why it may not speak
    parts: Parts
    points: Counts
    extrapolation: float  # compute of the target over the largest of the points


@dataclass
class Forms:
    """The forms that speak of a target, and why the others do not."""

    rows: dict[str, FormForecast] = field(default_factory=dict)
    left_out: dict[str, Refusal] = field(default_factory=dict)

    def ask(self, form: str, fit: Callable[[], Fit], place: tuple[float, ...]) -> None:
        """Add what the fit says at a place, its abscissae, or why it may not be made."""
        try:
            self.rows[form] = _row(form, fit(), place)
        except CannotFit as error:
            self.left_out[form] = error.refusal

    def leave_out(self, form: str, refusal: Refusal) -> None:
        self.left_out[form] = refusal
        del self.rows[form]

    def set_sigma(self, sigma: float) -> None:
        self.rows = {form: row.with_sigma(sigma) for form, row in self.rows.items()}

    @property
    def best_rms(self) -> float:
        return min((row.residual_rms for row in self.rows.values()), default=0.0)

    @property
    def interval(self) -> tuple[float, float]:
        rows = self.rows.values()
        return min(row.low for row in rows), max(row.high for row in rows)

    @property
    def losses(self) -> tuple[float, float]:
        losses = [row.loss for row in self.rows.values()]
        return min(losses), max(losses)


def forecast(points: Points, target: tuple[float, float, float], seed_sd: float = 0.0) -> Forecast:
    """What the points say of one new run at target = (N, D, C): loss, 95 % interval and its parts.

    The union of t-intervals over forms. On the points of the target's ratio: the power law, rays
    with gamma in GAMMAS, from FREE_RAY points the ray with free gamma. Where those cannot speak:
    the same laws through the lowest loss for each compute, if those are of several sizes and
    numbers of tokens and the target is near that frontier, and rival surfaces (rivals.py). Beside
    either, Chinchilla's law where all points, by their trajectories, identify it and it fits them.
    On the ray that law refutes forms that miss the points while it meets them, by an F-test with
    the freedom of sizes, not of runs: seeds and branches of a badly tuned size agree wrongly. Noise
    is the largest of seed_sd, FLOOR and the residuals, on the ray those of the best form: one that
    misses the points does not make the runs noisier. Raises CannotFit where no form has an
    interval."""
    N, D, C = (float(value) for value in target)
    floor = max(seed_sd, FLOOR)
    ray = _at_ratio(points, D / N)
    forms = _laws_of_compute(ray, C, floor)
    forms.set_sigma(max(floor, forms.best_rms))
    is_on_ray = bool(forms.rows)
    if not is_on_ray:
        forms = _rivals(points, (N, D, C), floor)
    forms.ask(CHINCHILLA, partial(_chinchilla, points, floor), (N, D))
    if CHINCHILLA in forms.rows:
        row = forms.rows[CHINCHILLA]
        forms.rows[CHINCHILLA] = row.with_sigma(row.sigma)
    if not forms.rows:
        why = forms.left_out[CHINCHILLA]
        raise CannotFit(NoLawReaches(N, D, len(ray), len(points), why))
    all_forms = forms.interval
    if is_on_ray and CHINCHILLA in forms.rows:
        _refute(forms, len(np.unique(points.N)) - SIZE_TERMS)
    headline = next(form for form in (*PREFERRED, *forms.rows) if form in forms.rows)
    low, high = forms.interval
    return Forecast(
        loss=forms.rows[headline].loss,
        low=low,
        high=high,
        headline=headline,
        forms=tuple(forms.rows.values()),
        left_out=forms.left_out,
        parts=Parts(forms.losses, all_forms, seed_sd),
        points=Counts(len(points), len(ray)),
        extrapolation=C / float(points.C.max()),
    )


def _at_ratio(points: Points, ratio: float) -> Points:
    """The points within 5 % of so many tokens per parameter."""
    relative = points.D / points.N / ratio
    return points.take((relative <= ONE_RAY) & (relative >= 1 / ONE_RAY))


def _refute(forms: Forms, freedom: int) -> None:
    """Leave out what misses the points while Chinchilla's law meets them with so much freedom of
    the sizes."""
    if freedom < 1:
        return
    sigma = forms.rows[CHINCHILLA].sigma
    for form, row in list(forms.rows.items()):
        largest = fdtri(row.dof, freedom, 1 - REFUTED)
        if form != CHINCHILLA and (row.residual_rms / sigma) ** 2 > largest:
            forms.leave_out(form, Refuted(row.residual_rms, sigma))


def _row(form: str, fit: Fit, place: tuple[float, ...]) -> FormForecast:
    interval = fit.interval_at(*place, new_run=True)
    assert interval is not None
    loss, low, high = map(float, interval)
    return FormForecast(
        form=form,
        loss=loss,
        own_low=low,
        own_high=high,
        n=fit.n,
        dof=fit.solution.dof,
        residual_rms=known(fit.residual_rms),
        sigma=known(fit.solution.sigma),
        parameters=fit.values,
        low=low,
        high=high,
    )


# ----------------------------------------------------------------------------- forms that may speak


def _laws_of_compute(points: Points, C: float, floor: float, name: str = "") -> Forms:
    """The power law and the ray laws over compute at C; name: put before a form's."""
    forms = Forms()
    forms.ask(f"{name}power_c", partial(_over_compute, "power_c", points, floor), (C,))
    for gamma in GAMMAS:
        fit = partial(_over_compute, "ray", points, floor, gamma)
        forms.ask(f"{name}ray gamma={gamma:.2f}", fit, (C,))
    forms.ask(f"{name}ray", partial(_over_compute, "ray", points, floor), (C,))
    return forms


def _over_compute(form: str, points: Points, floor: float, gamma: float | None = None) -> Fit:
    """A law over compute. Raises CannotFit with the reason why it may not speak."""
    fit = fit_law(form, points.C, points.loss, seed_sd=floor, gamma=gamma)
    computes = len(np.unique(points.C))
    if computes < COMPUTES:
        raise CannotFit(FewComputes(computes, COMPUTES))
    if form == "ray" and gamma is None:
        if fit.n < FREE_RAY:
            raise CannotFit(FewForFreeRay(fit.n, FREE_RAY))
        _check_identified(fit)
    if form == "ray" and fit.parameters["E"] < COLLAPSED * points.loss.min():
        raise CannotFit(NegativeFloor())
    _check_covariance(fit)
    return fit


def _chinchilla(points: Points, floor: float) -> Fit:
    """L(N, D). Raises CannotFit with the reason why it may not speak."""
    fit = fit_law(CHINCHILLA, points.N, points.D, points.loss, seed_sd=floor)
    fit = with_bootstrap(fit, points, RESAMPLES)
    _check_identified(fit)
    seed_sd = floor if floor > FLOOR else 0.0
    if lack_of_fit(fit, points, seed_sd) is not None:
        raise CannotFit(DoesNotFit(known(fit.scatter)))
    _check_covariance(fit)
    return fit


def _check_identified(fit: Fit) -> None:
    if fit.reason is not None:
        raise CannotFit(fit.reason)


def _check_covariance(fit: Fit) -> None:
    if fit.solution.covariance is None:
        raise CannotFit(fit.reason or NoInterval())


def _rivals(points: Points, target: tuple[float, float, float], floor: float) -> Forms:
    """Laws through the lowest loss for each compute, near which the target must lie, and rival
    surfaces. None speaks that would not count as fitting: see MISSES."""
    N, D, C = target
    forms = Forms()
    lowest = frontier_of(points)
    low, high = lowest.ray
    is_near = low / NEAR_FRONTIER <= D / N <= high * NEAR_FRONTIER
    if is_near and _grows_along_both(lowest):
        forms = _laws_of_compute(lowest, C, floor, "frontier ")
    for rival in _surfaces(_thinned(points), (N, D)):
        forms.rows[rival.form] = _row_of_rival(rival, max(floor, rival.residual_rms))
    limit = max(MISSES[0], MISSES[1] * forms.best_rms)
    for form, row in list(forms.rows.items()):
        if row.residual_rms > limit:
            forms.leave_out(form, MissesPoints(row.residual_rms))
        else:
            forms.rows[form] = row.with_sigma(row.sigma)
    return forms


def _grows_along_both(lowest: Points) -> bool:
    """Whether the lowest losses are of several sizes and of several numbers of tokens. Those of one
    size fall with tokens alone: over compute they say nothing of another size."""
    spans = [np.ptp(np.log(x)) for x in (lowest.N, lowest.D)]
    return bool(min(spans) >= ONE_SIZE)


def _levels(x: np.ndarray) -> int:
    """How many different values there are, to about a per cent."""
    return len(np.unique(np.round(np.log(x), 2)))


def _thinned(points: Points) -> Points:
    """ENOUGH points at most, evenly over compute."""
    by_compute = np.argsort(points.C, kind="stable")
    ranks = np.linspace(0, len(points) - 1, min(len(points), ENOUGH))
    return points.take(by_compute[ranks.round().astype(int)])


def _surfaces(points: Points, target: tuple[float, float]) -> list[rivals.Rival]:
    """Rival surfaces where sizes and ratios are enough to tell N from D."""
    low, high = points.ray
    levels = min(_levels(points.N), _levels(points.D))
    if high < SPREAD * low * 0.99 or levels < LEVELS:
        return []
    surfaces = [rivals.power_surface(points, target)]
    surfaces += [rivals.surface_with(gamma, points, target) for gamma in GAMMAS]
    return [surface for surface in surfaces if surface is not None]


def _row_of_rival(rival: rivals.Rival, sigma: float) -> FormForecast:
    variance = 1 + inefficiency(DELTA, sigma) * rival.variance
    width = stdtrit(rival.dof, 0.975) * sigma * math.sqrt(variance)
    low, high = rival.loss * math.exp(-width), rival.loss * math.exp(width)
    return FormForecast(
        form=rival.form,
        loss=rival.loss,
        own_low=low,
        own_high=high,
        n=rival.n,
        dof=rival.dof,
        residual_rms=rival.residual_rms,
        sigma=sigma,
        parameters=rival.parameters,
        low=low,
        high=high,
    )
