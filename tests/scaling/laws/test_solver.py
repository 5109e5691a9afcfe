"""The optimum of a law against the objective written out, other solvers and finite differences."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import OptimizeResult, minimize
from scipy.special import logsumexp

from scaling.laws import DELTA, FACTORS, Fit, fit_law, solver
from scaling.laws.fits import known
from scaling.laws.forms import Terms, centred, log_law, natural, terms
from scaling.laws.intervals import with_covariance
from scaling.laws.refusals import NotConverged

C = np.array([1e15, 6e15, 3e16, 2e17, 9e17, 5e18])
LOSS = 1.69 + 412.0 * C**-0.155
# beyond DELTA, so Huber's linear part is used
NOISY = LOSS * np.exp(np.random.default_rng(1).normal(0, 2e-3, len(C)))
STEP = 1e-6  # of finite differences


def objective(predicted: np.ndarray) -> float:
    """Hoffmann et al.'s: Huber of log residuals, summed."""
    distance = np.abs(np.log(predicted) - np.log(NOISY))
    inside, outside = distance**2 / 2, DELTA * (distance - DELTA / 2)
    return float(np.sum(np.where(distance <= DELTA, inside, outside)))


@pytest.fixture(scope="module")
def noisy_fit() -> Fit:
    return fit_law("ray", C, NOISY)


@pytest.fixture(scope="module")
def second_solver() -> OptimizeResult:
    """Nelder and Mead in another parametrisation: E, K / 1e3, gamma as they are."""
    return minimize(
        lambda p: 1e6 * objective(p[0] + 1e3 * p[1] * C ** -p[2]),
        [1.69, 0.412, 0.155],
        method="Nelder-Mead",
        options={"maxiter": 20000, "maxfev": 20000, "xatol": 1e-12, "fatol": 1e-14},
    )


def test_the_objective_is_the_sum_of_huber_losses(noisy_fit: Fit):
    predicted = noisy_fit.predict(C)
    assert np.abs(np.log(predicted / NOISY)).max() > DELTA
    assert noisy_fit.objective == pytest.approx(objective(predicted), rel=1e-12)


def test_the_certificate_of_a_good_optimum(noisy_fit: Fit):
    assert noisy_fit.starts_at_best == noisy_fit.starts
    assert known(noisy_fit.gradient_norm) < 1e-9


def test_a_second_solver_finds_no_lower_objective(noisy_fit: Fit, second_solver: OptimizeResult):
    ours = 1e6 * known(noisy_fit.objective)
    assert ours <= second_solver.fun * (1 + 1e-9)
    assert second_solver.fun == pytest.approx(ours, rel=1e-4)


def test_a_second_solver_finds_the_same_law(noisy_fit: Fit, second_solver: OptimizeResult):
    E, _, gamma = second_solver.x
    assert noisy_fit.values["E"] == pytest.approx(E, rel=1e-3)
    assert noisy_fit.values["gamma"] == pytest.approx(gamma, rel=1e-3)


def test_unconverged_fits_are_flagged(monkeypatch: pytest.MonkeyPatch):
    scipy_solver = solver.least_squares

    def one_step(*arguments: object, **options: object) -> OptimizeResult:
        return scipy_solver(*arguments, **{**options, "max_nfev": 1})

    monkeypatch.setattr(solver, "least_squares", one_step)
    monkeypatch.setattr(solver.descend, "__defaults__", (3,))
    fit = fit_law("ray", C, NOISY)
    assert fit.reason == NotConverged(known(fit.starts)) and not fit.identified
    assert known(fit.starts_at_best) < known(fit.starts)


# --------------------------------------------------------------------------- gradients of the forms


FORMS = (
    ("ray", [0.5, 0.3, 0.15], None),
    ("ray", [0.5, 0.3], 0.18),
    ("power_n", [1.2, 0.1], None),
    ("chinchilla", [0.6, -0.2, 0.1, 0.34, 0.36], None),
)


def axes_of(form: str) -> tuple[np.ndarray, ...]:
    """Twelve random places."""
    count = 2 if form == "chinchilla" else 1
    return tuple(np.exp(np.random.default_rng(0).normal(20, 2, (count, 12))))


def parts_of(form: str, gamma: float | None) -> Terms:
    axes = axes_of(form)
    return terms(form, centred(axes, [20.0 for _ in axes]), gamma)


@pytest.mark.parametrize(("form", "theta", "gamma"), FORMS)
def test_the_log_law_is_a_log_sum_exp(form: str, theta: list[float], gamma: float | None):
    slopes, offsets = parts_of(form, gamma)
    for place in (np.array(theta), np.zeros(len(theta))):  # also where terms are equal
        expected = logsumexp(slopes @ place + offsets, axis=1)
        assert (log_law(slopes, offsets, place)[0] == expected).all()


@pytest.mark.parametrize(("form", "theta", "gamma"), FORMS)
def test_gradients_against_finite_differences(form: str, theta: list[float], gamma: float | None):
    parts = parts_of(form, gamma)
    numeric = []
    for step in STEP * np.eye(len(theta)):
        above, below = (log_law(*parts, theta + side * step)[0] for side in (1, -1))
        numeric.append((above - below) / (2 * STEP))
    assert np.allclose(log_law(*parts, np.array(theta))[1], np.transpose(numeric), atol=1e-8)


@pytest.mark.parametrize(("form", "theta", "gamma"), FORMS)
def test_standard_errors_are_the_delta_method(form: str, theta: list[float], gamma: float | None):
    """Derivatives of the usual parameters, which turn a covariance of theta into standard
    errors."""
    log_loss, _ = log_law(*parts_of(form, gamma), np.array(theta))
    noise = np.random.default_rng(1).normal(0, 1e-5, 12)
    fit = fit_law(form, *axes_of(form), np.exp(log_loss + noise), gamma=gamma)
    best = fit.solution
    covariance = np.asarray(best.covariance)
    steps = STEP * np.eye(len(theta))
    above, below = (
        natural(form, best.theta + side * steps, best.centres, gamma) for side in (1, -1)
    )
    errors = with_covariance(replace(fit, identified=True), covariance, 9, "t").se or {}
    assert errors
    for name, error in errors.items():
        slope = (above[name] - below[name]) / (2 * STEP)
        scale = fit.values[name] if name in FACTORS else 1
        expected = scale * math.sqrt(slope @ covariance @ slope)
        assert error == pytest.approx(expected, rel=1e-6), name
