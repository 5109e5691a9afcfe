"""Known laws are recovered, optima are real optima, few points are not oversold, hostile points get a sentence."""

import json
import time

import numpy as np
import pytest
from scipy.optimize import minimize

from runtime.cli import UserError
from scaling import laws as solver
from scaling.laws import DELTA, GAMMAS, Points, fit_band, fit_power, fit_ray, log_law, natural, terms, unfitted

C = np.array([1e15, 6e15, 3e16, 2e17, 9e17, 5e18])
TRUE = {"E": 1.69, "K": 412.0, "gamma": 0.155}
L = TRUE["E"] + TRUE["K"] * C ** -TRUE["gamma"]
NOISY = L * np.exp(np.random.default_rng(1).normal(0, 2e-3, len(C)))     # beyond DELTA, so Huber's linear part is used


def objective(predicted, observed):
    """Hoffmann's objective written out again: Huber of log residuals, summed."""
    r = np.abs(np.log(predicted) - np.log(observed))
    return float(np.sum(np.where(r <= DELTA, r**2 / 2, DELTA * (r - DELTA / 2))))


@pytest.mark.parametrize("n", [3, 5, 6])
def test_ray_law_is_recovered(n):
    fit = fit_ray(C[:n], L[:n])
    assert fit.parameters == pytest.approx(TRUE, rel=1e-6)
    assert fit.n == n and fit.objective < 1e-20 and fit.starts == fit.starts_at_best == 15
    assert fit.gradient_norm < 1e-9 and len(fit.singular_values) == 3
    assert np.allclose(fit.predict(C), L, rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e12])
def test_ray_law_does_not_depend_on_the_unit_of_compute(scale):
    fit = fit_ray(C * scale, NOISY)
    assert fit.parameters["gamma"] == pytest.approx(fit_ray(C, NOISY).parameters["gamma"], rel=1e-5)
    assert fit.starts_at_best == fit.starts


def test_power_law_is_exact_with_three_points():
    x = np.array([4e4, 1.1e5, 1.8e5])
    fit = fit_power(x, 21.0 * x**-0.21)
    assert fit.parameters == pytest.approx({"K": 21.0, "gamma": 0.21, "C_c": 21.0 ** (1 / 0.21)}, rel=1e-9)
    assert fit.identified and fit.starts == fit.starts_at_best
    assert fit_power(x[:2], 21.0 * x[:2] ** -0.21).reason == "2 points for 2 parameters leave 0 degrees of freedom"


def test_noisy_optimum_is_the_optimum_of_the_objective_written_out():
    fit = fit_ray(C, NOISY)
    assert fit.objective == pytest.approx(objective(fit.predict(C), NOISY), rel=1e-12)
    assert fit.starts_at_best == fit.starts and fit.gradient_norm < 1e-9
    assert np.abs(np.log(fit.predict(C) / NOISY)).max() > DELTA

    # Another solver in another parametrisation, E, K / 1e3, gamma as they are, from the truth and from far away.
    def by_hand(p):
        predicted = p[0] + 1e3 * p[1] * C ** -p[2]
        return objective(predicted, NOISY) * 1e6 if (predicted > 0).all() else 1e9

    options = {"maxiter": 20000, "maxfev": 20000, "xatol": 1e-12, "fatol": 1e-14}
    best = min((minimize(by_hand, start, method="Nelder-Mead", options=options)
                for start in ([1.69, 0.412, 0.155], [1.2, 0.2, 0.12], [1.8, 1.0, 0.2])), key=lambda found: found.fun)
    assert fit.objective * 1e6 <= best.fun * (1 + 1e-9)
    assert best.fun == pytest.approx(fit.objective * 1e6, rel=1e-4)
    assert [fit.parameters["E"], fit.parameters["gamma"]] == pytest.approx([best.x[0], best.x[2]], rel=1e-3)


def test_batched_descents_end_at_optima_of_the_objective_written_out():
    x = np.log(C) - np.log(C).mean()
    slopes, offsets = terms("ray", [x])
    starts = np.array([[np.log(e), h, g] for e in (0.3, 1.0, 1.7) for h in (0, 1) for g in (0.05, 0.15, 0.4)])
    weights = np.ones((len(starts), len(C)))
    ends, costs, steps, converged = solver.descend(starts, slopes, offsets, np.log(NOISY), DELTA, weights)
    assert converged.all() and (steps > 1).all()
    for theta, cost in zip(ends, costs, strict=True):
        shifts = 1e-4 * np.vstack([np.zeros(3), np.eye(3), -np.eye(3)])
        at = [objective(np.exp(log_law("ray", theta + shift, [x])[0]), NOISY) for shift in shifts]
        assert cost * DELTA**2 == pytest.approx(at[0], rel=1e-9) and at[0] <= min(at[1:])


def test_power_law_against_a_grid():
    x = C / 1e15
    fit = fit_power(x, NOISY)
    a, s = np.log(fit.parameters["K"]), fit.parameters["gamma"]
    around = [objective(np.exp(a + da) * x ** -(s + ds), NOISY)
              for da in np.linspace(-0.02, 0.02, 81) for ds in np.linspace(-0.005, 0.005, 81)]
    assert fit.objective <= min(around) + 1e-15


def test_one_outlier_hardly_moves_the_fit():
    bent = L.copy()
    bent[2] *= 1.05
    assert fit_ray(C, bent).parameters["gamma"] == pytest.approx(0.155, abs=0.01)
    squares = minimize(lambda p: np.sum(np.log((p[0] + 1e3 * p[1] * C ** -p[2]) / bent) ** 2), [1.69, 0.412, 0.155],
                       method="Nelder-Mead")
    assert abs(squares.x[2] - 0.155) > 0.01


@pytest.mark.parametrize(("form", "theta", "gamma"), [
    ("ray", [0.5, 0.3, 0.15], None), ("ray", [0.5, 0.3], 0.18), ("power_n", [1.2, 0.1], None),
    ("chinchilla", [0.6, -0.2, 0.1, 0.34, 0.36], None), ("chinchilla_tied", [0.6, -0.2, 0.1, 0.34], None)])
def test_gradients_against_finite_differences(form, theta, gamma):
    rng, theta, h = np.random.default_rng(0), np.array(theta), 1e-6
    logs, centres = rng.normal(0, 2, (2, 7)), (20.0, 23.0)
    if not form.startswith("chinchilla"):
        logs, centres = logs[:1], centres[:1]
    value, gradient = log_law(form, theta, logs, gamma)
    numeric = np.column_stack([(log_law(form, theta + h * unit, logs, gamma)[0] - log_law(form, theta - h * unit, logs, gamma)[0])
                               / (2 * h) for unit in np.eye(len(theta))])
    assert np.allclose(gradient, numeric, atol=1e-8)
    for name, (_, slope) in natural(form, theta, centres, gamma).items():
        ends = [[natural(form, theta + side * h * unit, centres, gamma)[name][0] for side in (1, -1)]
                for unit in np.eye(len(theta))]
        assert np.allclose(slope, [(up - down) / (2 * h) for up, down in ends], rtol=1e-5, atol=1e-6), name


def test_intervals_against_simulation():
    """Standard error of gamma = spread over repeated noise, where residuals are small enough to count squared."""
    rng = np.random.default_rng(0)
    noise = 3e-4
    x = np.geomspace(1e15, 1e20, 12)
    truth = 1.69 + 412 * x**-0.155
    fits = [fit_ray(x, truth * np.exp(rng.normal(0, noise, len(x)))) for _ in range(40)]
    for name in ("E", "K", "gamma"):
        spread = np.std([fit.parameters[name] for fit in fits])
        assert np.median([fit.se[name] for fit in fits]) == pytest.approx(spread, rel=0.35)
    covered = [fit.ci95["gamma"][0] < 0.155 < fit.ci95["gamma"][1] for fit in fits]
    assert np.mean(covered) > 0.85
    wide, wider = (fit_ray(x, truth, seed_sd=sd) for sd in (1e-3, 2e-3))
    assert (wider.se["gamma"] / wide.se["gamma"]) ** 2 == pytest.approx(
        4 * solver.inefficiency(2e-3, DELTA) / solver.inefficiency(1e-3, DELTA), rel=1e-6)


def test_what_points_cannot_say_is_said():
    three = fit_ray(C[:3], NOISY[:3], seed_sd=1e-3)
    assert not three.identified and three.se is None and three.ci95 is None and three.residual_rms is None
    assert three.reason == "3 points for 3 parameters leave 0 degrees of freedom"
    pure = fit_ray(C, 30 * C**-0.06)
    assert not pure.identified
    assert pure.reason == "E runs to zero: the points fall at least as fast as a pure power law"
    rising = fit_ray(C, 2 + 1e-4 * C**0.1)
    assert not rising.identified and rising.reason
    vague = fit_ray(C[:4], L[:4] * np.array([1.002, 0.998, 1.003, 0.999]))
    assert not vague.identified or vague.ci95["gamma"][0] > 0


def test_unconverged_fits_are_flagged(monkeypatch):
    least_squares = solver.least_squares
    monkeypatch.setattr(solver, "STEPS", 3)
    monkeypatch.setattr(solver.descend, "__defaults__", (3,))
    monkeypatch.setattr(solver, "least_squares", lambda *a, **k: least_squares(*a, **{**k, "max_nfev": 1}))
    fit = fit_ray(C, NOISY)
    assert not fit.identified and fit.reason == "the best of 15 starts did not converge"
    assert fit.starts_at_best < fit.starts


def test_a_fit_that_returns_its_start_is_flagged(monkeypatch):
    """Porian et al. 2024 store fits that are nodes of their grid of starts."""
    monkeypatch.setattr(solver, "descend", lambda starts, *_, **__: (
        starts, np.ones(len(starts)), np.ones(len(starts), int), np.ones(len(starts), bool)))
    monkeypatch.setattr(solver, "least_squares", lambda residual, start, jac, **_: type(
        "Stuck", (), {"x": start, "cost": 1.0, "grad": 0 * start, "nfev": 1}))
    fit = fit_ray(C, NOISY)
    assert not fit.identified and fit.se is None
    assert fit.reason == "the best of 15 starts is a start itself: the solver did not move"


@pytest.mark.parametrize(("x", "y", "sentence"), [
    ([1, 2, np.nan, 4], [2, 2, 2, 2], "point 2 is nan; a law needs finite values above zero"),
    ([1, 2, 3, 4], [2, 2, np.nan, 2], "loss 2 is nan; a law needs finite values above zero"),
    ([1, 2, 3, 4], [2, 0, 2, 2], "loss 1 is 0.0; a law needs finite values above zero"),
    ([1, 2, 3, np.inf], [2, 2, 2, 2], "point 3 is inf; a law needs finite values above zero"),
    ([5, 5, 5, 5], [2, 2.1, 2.2, 2.3], "1 distinct point(s); this law needs at least "),
    ([], [], "0 distinct point(s); this law needs at least "),
    ([1, 2], [1, 2, 3], "a law needs as many losses as points; found shapes (2,) against (3,)"),
])
@pytest.mark.parametrize("fit", [fit_ray, fit_power])
def test_hostile_points(fit, x, y, sentence):
    with pytest.raises(UserError) as error:
        fit(x, y)
    assert str(error.value).startswith(sentence)


def test_band_spans_the_forms_and_leaves_out_what_needs_negative_E():
    forms, left_out = fit_band(C[:3], L[:3])
    assert left_out == [] and len(forms) == 1 + len(GAMMAS)
    far = [float(form.predict(1e21)) for form in forms]
    truth = TRUE["E"] + TRUE["K"] * 1e21 ** -TRUE["gamma"]
    assert far == sorted(far) and far[0] < truth < far[-1]      # the power law is lowest, the largest gamma highest
    _, left_out = fit_band(C, 30 * C**-0.13)
    assert left_out == [0.10, 0.12]
    assert len(fit_band(C, 1e9 * C**-0.5)[0]) == 1


def test_power_laws_by_axis_with_kaplans_scale():
    x = np.geomspace(1e8, 1e10, 6)
    for axis, names in (("n", ["A", "alpha", "N_c"]), ("d", ["B", "beta", "D_c"]), ("c", ["K", "gamma", "C_c"])):
        fit = fit_power(x, (8.8e13 / x) ** 0.076, axis)
        assert fit.form == f"power_{axis}" and list(fit.parameters) == names
        assert list(fit.parameters.values()) == pytest.approx([8.8e13**0.076, 0.076, 8.8e13], rel=1e-6)
    assert "C_c" not in fit_power(x, 2 + 0.1 * np.log(x / x[0])).parameters         # a rising loss has no such scale


def test_intervals_at_a_point():
    """A law's interval is the spread of its predictions over repeated noise, a new run's holds that run's noise too."""
    rng, noise, x = np.random.default_rng(5), 3e-4, np.geomspace(1e15, 1e20, 12)
    truth, far = 1.69 + 412 * x**-0.155, 1e22
    fits = [fit_ray(x, truth * np.exp(rng.normal(0, noise, 12))) for _ in range(60)]
    spread = np.std([np.log(fit.predict(far)) for fit in fits])
    widths = [np.log(high / low) / 2 / 2.262 for _, low, high in (fit.interval_at(far) for fit in fits)]     # t, 9 dof
    assert np.median(widths) == pytest.approx(spread, rel=0.3)
    loss, low, high = fits[0].interval_at(np.array([[x[0], far]]))
    assert loss.shape == low.shape == (1, 2) and np.allclose(loss, fits[0].predict(np.array([[x[0], far]])))
    _, new_low, new_high = fits[0].interval_at(far, new_run=True)
    sigma = max(fits[0].residual_rms, 0)
    assert np.log(new_high / new_low) ** 2 == pytest.approx(
        np.log(high / low)[0, 1] ** 2 + (2 * 2.262157 * sigma) ** 2, rel=1e-5)
    assert fit_ray(C[:3], L[:3]).interval_at(far) is None


def test_huber_costs_what_it_costs():
    """Under normal noise far above delta Huber is least absolute deviations, whose variance is pi/2 of least squares'."""
    assert solver.inefficiency(1e-6, DELTA) == pytest.approx(1, abs=1e-6)
    assert solver.inefficiency(1.0, 1e-4) == pytest.approx(np.pi / 2, rel=1e-3)
    assert solver.inefficiency(1.0, 1.345) == pytest.approx(1 / 0.95, rel=1e-3)     # Huber's own constant


def test_plain_is_strict_json():
    for fit in (fit_ray(C, NOISY), fit_ray(C[:3], L[:3]), fit_power(C, 2 + 0 * C), unfitted("chinchilla", 0, "none"),
                fit_ray(C * 1e200, NOISY)):
        content = json.loads(json.dumps(fit.plain(), allow_nan=False))
        assert content["form"] == fit.form and content["reason"] == fit.reason and "optimum" not in content
        assert set(fit.parameters) < set(content)


def test_ten_thousand_points_and_repeated_points():
    x = np.geomspace(1e15, 1e20, 10_000)
    began = time.process_time()
    fit = fit_ray(x, (1.69 + 412 * x**-0.155) * np.exp(np.random.default_rng(0).normal(0, 1e-3, len(x))))
    assert fit.parameters["gamma"] == pytest.approx(0.155, rel=0.01) and fit.identified
    assert time.process_time() - began < 30
    twice = fit_ray(np.tile(C, 2), np.tile(NOISY, 2))
    once = fit_ray(C, NOISY)
    assert twice.parameters == pytest.approx(once.parameters, rel=1e-5) and twice.objective == pytest.approx(2 * once.objective)


def test_points_are_checked():
    points = Points([1, 2], [3, 4], [5, 6], [2.0, 1.9], ["a", "b"])
    assert points.axes("chinchilla")[1].tolist() == [3, 4] and points.axes("ray")[0].tolist() == [5, 6]
    assert points.take(np.array([1])).cluster.tolist() == ["b"]
    for wrong, sentence in (({"N": [1, np.nan]}, "N 1 is nan"), ({"loss": [0, 1]}, "loss 0 is 0.0"),
                            ({"D": [1]}, "D has 1 values"), ({"cluster": ["a"]}, "cluster has 1"),
                            ({"C": ["x", "y"]}, "C must be numbers"), ({"N": [[1, 2]]}, "N must be a list of numbers")):
        with pytest.raises(UserError, match=sentence):
            Points(**{**vars(points), **wrong})
