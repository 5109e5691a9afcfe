"""Laws, their optima, intervals, misfits and choices against known laws, second solvers, simulation
and published numbers."""

import csv
import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import least_squares, minimize, minimize_scalar
from scipy.special import logsumexp

from lib.errors import UserError
from scaling import laws as solver
from scaling.fit import read_points
from scaling.laws import (
    DELTA,
    GAMMAS,
    Points,
    fit_band,
    fit_form,
    fit_frontier,
    fit_isoflop,
    fit_law,
    intervals,
    lack_of_fit,
    minima_of,
    near_zero,
    robustness,
    shared_fault,
    with_bootstrap,
)
from scaling.laws import solver as searches
from scaling.laws.valleys import Valley, fit_valleys, lowest_part
from tests.conftest import ROOT
from tests.law_trials import (
    ISOFLOP_DESIGNS,
    LAWS,
    fault_trial,
    isoflop_table,
    isoflop_trials,
    loss_of,
    outlier_trial,
    table_of_sizes,
    table_with_outliers,
)

C = np.array([1e15, 6e15, 3e16, 2e17, 9e17, 5e18])
TRUE = {"E": 1.69, "K": 412.0, "gamma": 0.155}
L = TRUE["E"] + TRUE["K"] * C ** -TRUE["gamma"]
# beyond DELTA, so Huber's linear part is used
NOISY = L * np.exp(np.random.default_rng(1).normal(0, 2e-3, len(C)))
# Besiroglu et al. 2024's data
EPOCH = {"E": 1.817218, "A": 477.826, "B": 2143.417, "alpha": 0.34731, "beta": 0.367172}
HOFFMANN = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
UNEQUAL = {"E": 2.1, "A": 60.0, "B": 8e4, "alpha": 0.22, "beta": 0.55}
BUDGETS = np.geomspace(1e18, 1e21, 7)
SIZES = (50e6, 125e6, 250e6, 350e6)
FAR = (1.5e9, 30e9)
ROUND = {"E": 1.8, "A": 400, "B": 1500, "alpha": 0.34, "beta": 0.36}
FOLDER = ROOT.parent / "shared" / "reference"
published = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"published points are not at {FOLDER}")


def chinchilla_points(drop_highest=0):
    path = FOLDER / "chinchilla_points.csv"
    return read_points(
        path, "Model Size", "loss", c="Training FLOP", drop_highest=drop_highest
    ).points


def test_noisy_optimum_is_the_optimum_of_the_objective_written_out():
    fit = fit_law("ray", C, NOISY)

    def objective(predicted):  # Hoffmann's: Huber of log residuals, summed
        r = np.abs(np.log(predicted) - np.log(NOISY))
        return float(np.sum(np.where(r <= DELTA, r**2 / 2, DELTA * (r - DELTA / 2))))

    assert fit.objective == pytest.approx(objective(fit.predict(C)), rel=1e-12)
    assert fit.starts_at_best == fit.starts and fit.gradient_norm < 1e-9
    assert np.abs(np.log(fit.predict(C) / NOISY)).max() > DELTA
    # Another solver in another parametrisation: E, K / 1e3, gamma as they are.
    best = minimize(
        lambda p: 1e6 * objective(p[0] + 1e3 * p[1] * C ** -p[2]),
        [1.69, 0.412, 0.155],
        method="Nelder-Mead",
        options={"maxiter": 20000, "maxfev": 20000, "xatol": 1e-12, "fatol": 1e-14},
    )
    assert fit.objective * 1e6 <= best.fun * (1 + 1e-9) and best.fun == pytest.approx(
        fit.objective * 1e6, rel=1e-4
    )
    assert [fit.parameters["E"], fit.parameters["gamma"]] == pytest.approx(
        [best.x[0], best.x[2]], rel=1e-3
    )


@pytest.mark.parametrize(
    ("form", "theta", "gamma"),
    [
        ("ray", [0.5, 0.3, 0.15], None),
        ("ray", [0.5, 0.3], 0.18),
        ("power_n", [1.2, 0.1], None),
        ("chinchilla", [0.6, -0.2, 0.1, 0.34, 0.36], None),
    ],
)
def test_gradients_against_finite_differences(form, theta, gamma):
    """Of the law, and of its usual parameters, which turn a covariance of theta into standard
    errors."""
    theta, h, rng = np.array(theta), 1e-6, np.random.default_rng(0)
    steps, axes = (
        h * np.eye(len(theta)),
        np.exp(rng.normal(20, 2, (2 if form.startswith("chin") else 1, 12))),
    )
    logs = solver.centred(axes, (20.0, 20.0)[: len(axes)])
    parts = solver.terms(form, logs, gamma)
    for at in (theta, 0 * theta):  # also where terms are equal
        assert (solver.log_law(*parts, at)[0] == logsumexp(parts[0] @ at + parts[1], axis=1)).all()
    numeric = [
        (solver.log_law(*parts, theta + step)[0] - solver.log_law(*parts, theta - step)[0])
        / (2 * h)
        for step in steps
    ]
    assert np.allclose(solver.log_law(*parts, theta)[1], np.transpose(numeric), atol=1e-8)
    fit = fit_law(
        form, *axes, np.exp(solver.log_law(*parts, theta)[0] + rng.normal(0, 1e-5, 12)), gamma=gamma
    )
    best = replace(fit, identified=True).optimum
    above, below = (
        solver.natural(form, best.theta + side * steps, best.centres, gamma) for side in (1, -1)
    )
    for name, se in solver.with_covariance(
        replace(fit, identified=True), best.covariance, 9, "t"
    ).se.items():
        slope = (above[name] - below[name]) / (2 * h)
        scale = fit.parameters[name] if name in solver.FACTORS else 1
        assert se == pytest.approx(scale * math.sqrt(slope @ best.covariance @ slope), rel=1e-6), (
            name
        )


def test_intervals_against_simulation():
    """Standard errors are the spread over repeated noise, of a prediction too; a new run's interval
    holds its own noise."""
    rng, x, far = np.random.default_rng(0), np.geomspace(1e15, 1e20, 12), 1e22
    truth = 1.69 + 412 * x**-0.155
    fits = [fit_law("ray", x, truth * np.exp(rng.normal(0, 3e-4, 12))) for _ in range(60)]
    for name in ("E", "K", "gamma"):
        spread = np.std([fit.parameters[name] for fit in fits])
        assert np.median([fit.se[name] for fit in fits]) == pytest.approx(spread, rel=0.35)
    assert np.mean([fit.ci95["gamma"][0] < 0.155 < fit.ci95["gamma"][1] for fit in fits]) > 0.85
    # t, 9 dof
    widths = [
        np.log(high / low) / 2 / 2.262157 for _, low, high in (fit.interval_at(far) for fit in fits)
    ]
    assert np.median(widths) == pytest.approx(
        np.std([np.log(fit.predict(far)) for fit in fits]), rel=0.3
    )
    _, low, high = fits[0].interval_at(np.array([[x[0], far]]))
    assert low.shape == (1, 2)
    _, new_low, new_high = fits[0].interval_at(far, new_run=True)
    assert np.log(new_high / new_low) ** 2 == pytest.approx(
        np.log(high / low)[0, 1] ** 2 + (2 * 2.262157 * fits[0].residual_rms) ** 2, rel=1e-5
    )
    # Huber's own loss of efficiency beside it
    wide, wider = (fit_law("ray", x, truth, seed_sd=sd) for sd in (1e-3, 2e-3))
    assert (wider.se["gamma"] / wide.se["gamma"]) ** 2 == pytest.approx(
        4 * wider.optimum.inefficiency / wide.optimum.inefficiency, rel=1e-6
    )
    normal = (
        stats.norm.expect(lambda z: np.clip(z, -0.5, 0.5) ** 2)
        / (1 - 2 * stats.norm.cdf(-0.5)) ** 2
    )
    assert wider.optimum.inefficiency == pytest.approx(normal, rel=1e-6)


def test_what_points_cannot_say_is_said():
    three = fit_law("ray", C[:3], NOISY[:3], seed_sd=1e-3)
    assert (
        three.se is three.ci95 is three.residual_rms is three.interval_at(1e22) is None
        and not three.identified
    )
    few = L[-4:] * np.exp(np.random.default_rng(5).normal(0, 2e-3, 6))[-4:]
    above = fit_law("ray", C[-4:], few)  # ln E is uncertain, yet E lies below each loss
    assert above.identified and above.ci95["E"][1] == pytest.approx(few.min(), rel=1e-12)
    x, noise = np.geomspace(1e15, 1e20, 30), np.random.default_rng(2).normal(0, 0.01, 30)
    for loss in (0 * x + 3, 3 * np.exp(noise), 3 * (x / 1e17) ** 0.05):  # no loss that falls
        assert not fit_law("ray", x, loss).identified and not fit_law("power_c", x, loss).identified
    for x, found in (([5, 5, 5, 5], 1), ([], 0)):
        with pytest.raises(
            UserError, match=rf"{found} distinct point\(s\); this law needs at least 3"
        ):
            fit_law("ray", x, [2, 2.1, 2.2, 2.3][: len(x)])


def test_unconverged_fits_are_flagged(monkeypatch):
    least_squares = searches.least_squares
    monkeypatch.setattr(solver.descend, "__defaults__", (3,))
    monkeypatch.setattr(
        searches, "least_squares", lambda *a, **k: least_squares(*a, **{**k, "max_nfev": 1})
    )
    fit = fit_law("ray", C, NOISY)
    assert (
        not fit.identified and "did not converge" in fit.reason and fit.starts_at_best < fit.starts
    )


def test_band_spans_the_forms_and_leaves_out_what_needs_negative_E():
    far = [float(form.predict(1e21)) for form in fit_band(C[:3], L[:3])]
    # the power law is lowest, the largest gamma highest
    assert len(far) == 1 + len(GAMMAS) and far == sorted(far)
    assert far[0] < TRUE["E"] + TRUE["K"] * 1e21 ** -TRUE["gamma"] < far[-1]
    assert [form.parameters["gamma"] for form in fit_band(C, 30 * C**-0.13)[1:]] == list(GAMMAS[2:])
    assert len(fit_band(C, 1e9 * C**-0.5)) == 1


def law(N, D, p=EPOCH):
    return p["E"] + p["A"] * N ** -p["alpha"] + p["B"] * D ** -p["beta"]


def ladder(sizes=SIZES, ratios=(5, 10, 20, 40)):
    """(N, D, trajectory) of sizes x tokens per parameter; the ratios of one size are branches of
    one run."""
    N = np.repeat(sizes, len(ratios)).astype(float)
    return N, N * np.tile(ratios, len(sizes)), np.repeat(np.arange(len(sizes)), len(ratios))


def noisy(N, D, sd, seed=0, p=EPOCH):
    return law(N, D, p) * np.exp(np.random.default_rng(seed).normal(0, sd, len(N)))


def points_at(N, D, loss, cluster=None):
    """Points of C = 6 N D, every one a trajectory of its own unless said otherwise."""
    return Points(N, D, 6 * N * D, loss, np.arange(len(N)) if cluster is None else cluster)


@pytest.mark.parametrize(
    ("form", "truth", "starts"),
    [
        ("ray", TRUE, 15),
        ("power_n", {"A": 11.4, "alpha": 0.076}, 9),
        ("power_d", {"B": 8.8, "beta": 0.095}, 9),
        ("power_c", {"K": 30.0, "gamma": 0.06}, 9),
        ("chinchilla", EPOCH, 27),
        ("chinchilla", HOFFMANN, 27),
        ("chinchilla", UNEQUAL, 27),
    ],
)
def test_laws_are_recovered_in_any_unit(form, truth, starts):
    N, D, _ = ladder()
    axes = (N, D) if form.startswith("chin") else ({"n": N, "d": D}.get(form[-1], 6 * N * D),)
    exponents = [truth[name] for name in ("alpha", "beta", "gamma") if name in truth]
    loss = truth.get("E", 0) + sum(
        truth[factor] * x**-exponent
        for factor, x, exponent in zip(
            [name for name in ("A", "B", "K") if name in truth], axes, exponents, strict=True
        )
    )
    # N* ~ C^a, and L* - E ~ C^-gamma, as a search finds the cheapest models of two budgets
    if len(axes) == 2:
        cheapest = [
            minimize_scalar(lambda x, C=C: law(np.exp(x), C / 6 / np.exp(x), truth), (15, 30))
            for C in (1e18, 1e21)
        ]
        a, fall = (
            math.log(p / q) / math.log(1e3)
            for p, q in (
                [
                    np.exp([one.x for one in cheapest[::-1]]),
                    [one.fun - truth["E"] for one in cheapest],
                ]
            )
        )
        truth = truth | {"a": a, "b": 1 - a, "gamma": fall}
    fit = fit_law(form, *axes, loss)
    assert fit.parameters == pytest.approx(truth, rel=1e-5) and np.allclose(
        fit.predict(*axes), loss, rtol=1e-8
    )
    assert (
        fit.identified
        and fit.starts == fit.starts_at_best == starts
        and fit.gradient_norm < 1e-9
        and fit.interval == "t"
    )
    other = fit_law(form, *(x * 1e-8 for x in axes), loss)
    for name in truth.keys() - {"A", "B", "K"}:
        assert other.parameters[name] == pytest.approx(truth[name], rel=1e-4), name


@pytest.mark.parametrize(
    ("N", "D", "lost", "reason"),
    [
        (np.geomspace(1e8, 1e9, 8), np.full(8, 1e10), None, "the points hold 1 distinct D"),
        (
            np.repeat([1e8, 3e8], 5),
            np.tile(np.geomspace(1e9, 1e10, 5), 2),
            None,
            "the points hold 2 distinct N",
        ),
        (
            np.repeat([1e8, 1.04e8, 3e8], 5),
            np.tile(np.geomspace(1e9, 1e10, 5), 3),
            None,
            "the points hold 2 distinct N",
        ),
        (
            np.array([5e7, 1e8, 2e8, 4e8, 1e8]),
            np.array([1e9, 2e9, 4e9, 1e9, 8e9]),
            None,
            "5 distinct points are too few for five",
        ),
        (*ladder()[:2], lambda N, D: 1e3 * N**-0.3 + 1e3 * D**-0.3, "E runs to zero"),
        (*ladder()[:2], lambda N, D: 1.8 + 400 * N**-0.34 + 0 * D, "beta is not above zero"),
        (*ladder()[:2], lambda N, D: 2 + 0 * N, "is not above zero"),
        (*ladder()[:2], lambda N, D: noisy(N, D, 0.03), "contains 0|zero"),
    ],
)
def test_designs_and_losses_that_cannot_tell(N, D, lost, reason):
    for loss in [noisy(N, D, sd) for sd in (0, 1e-3)] if lost is None else [lost(N, D)]:
        fit = fit_law("chinchilla", N, D, loss)
        assert (
            not fit.identified
            and re.search(reason, fit.reason)
            and fit.ci95 is None
            and "--" not in fit.formula()
        )


@pytest.mark.parametrize("wide", [1, 1.049, 1.3, 1.9])
def test_one_ray_or_nearly_one_is_never_identified(wide):
    """Between one ray and ratios 2x apart intervals hold alpha and beta only three times in
    four."""
    for n, sd in itertools.product((6, 40), (0, 1e-3, 5e-3)):
        N = np.geomspace(5e7, 2e9, n)
        D = 20 * N * np.random.default_rng(3).permutation(np.geomspace(1, wide, n))
        fit = fit_law("chinchilla", N, D, noisy(N, D, sd, seed=n))
        assert not fit.identified and fit.se is None and fit.ci95 is None
        assert fit.reason.startswith("the points lie at 20 to") and fit.reason.endswith(
            "need ratios at least 2x apart"
        )
    N = np.geomspace(5e7, 4e8, 12)
    # 2x, budgets rounded up to whole steps: enough
    D = np.ceil(np.tile([10, 20], 6) * N / 1e6) * 1e6
    assert fit_law("chinchilla", N, D, noisy(N, D, 1e-5, 3)).identified


@pytest.mark.parametrize("sd", [1e-3, 5e-3])
def test_intervals_of_chinchillas_law_cover(sd):
    """Nominal 95 % covers at least 90 % over 200 ladders with honest noise, prediction at 1.5B
    included."""
    (N, D, _), covered, told = ladder(), {}, 0
    for seed in range(200):
        fit = fit_law("chinchilla", N, D, noisy(N, D, sd, seed))
        told += fit.identified
        if (at := fit.interval_at(1.5e9, 30e9)) is not None:
            covered.setdefault("1.5B", []).append(at[1] < law(1.5e9, 30e9) < at[2])
        if fit.identified:
            for name, value in EPOCH.items():
                covered.setdefault(name, []).append(fit.ci95[name][0] < value < fit.ci95[name][1])
    assert len(covered["1.5B"]) >= 195 and told >= (195 if sd < 2e-3 else 120)
    shares = {name: np.mean(hits) for name, hits in covered.items()}
    # At 0.5 % a fifth of the ladders is refused; what the others say of E holds under that
    # selection.
    assert all(
        share >= (0.9 if name != "E" or sd < 2e-3 else 0.85) for name, share in shares.items()
    ), shares


def best(p, C):
    """(N*, exponent a) of a law in closed form."""
    total = p["alpha"] + p["beta"]
    return (p["alpha"] * p["A"] / (p["beta"] * p["B"])) ** (1 / total) * (C / 6) ** (
        p["beta"] / total
    ), p["beta"] / total


def grid(p, budgets, wide, sizes=7, centre=1.0, sd=0.0, scatter=0.0, seed=0):
    rng, rows = np.random.default_rng(seed), []
    for C in budgets:
        N = centre * best(p, C)[0] * np.geomspace(1 / wide, wide, sizes)
        c = C * np.exp(rng.uniform(-scatter, scatter, sizes))
        rows.append(
            np.array([N, c / 6 / N, c, law(N, c / 6 / N, p) * np.exp(rng.normal(0, sd, sizes))])
        )
    return Points(*np.hstack(rows), np.arange(sizes * len(budgets)))


def joined(*parts):
    return Points(
        *(
            np.concatenate([getattr(one, name) for one in parts])
            for name in ("N", "D", "C", "loss", "cluster")
        )
    )


@pytest.mark.parametrize(
    ("p", "published"), [(EPOCH, (-0.1, -0.5, -1.1, -2.0)), (HOFFMANN, (0.4, 1.5, 3.4, 6.2))]
)
def test_bias_is_much_smaller_than_the_parabolas(p, published):
    for wide, parabola in zip((2, 4, 8, 16), published, strict=True):
        points = grid(p, [2.7e20], wide)
        x = np.log(points.N)
        bend, slope, _ = np.polyfit(x - x.mean(), points.loss, 2)
        truth = np.log(best(p, 2.7e20)[0])
        biased = 100 * np.expm1(x.mean() - slope / 2 / bend - truth)
        assert biased == pytest.approx(parabola, abs=0.06)  # the published bias of the usual method
        ours = 100 * np.expm1(np.log(fit_isoflop(points).budgets[0]["N"]) - truth)
        assert abs(ours) < max(0.1 * abs(biased), 0.01), (wide, ours, biased)


def test_exponents_are_recovered_from_scattered_budgets():
    fit = fit_isoflop(grid(EPOCH, BUDGETS, 8, sizes=9, centre=1.3, scatter=0.02))
    a, p = best(EPOCH, 1.0)[1], fit.parameters
    assert (
        fit.identified
        and fit.clusters is None
        and [p["a"], p["b"]] == pytest.approx([a, 1 - a], abs=4e-3)
    )
    sizes = [p["k_n"] * 1e20 ** p["a"], 1e20 / 6 / p["k_d"] / 1e20 ** p["b"]]
    assert sizes == pytest.approx([best(EPOCH, 1e20)[0]] * 2, rel=0.02)
    for row, C in zip(fit.budgets, BUDGETS, strict=True):  # the scatter of C is noise in L
        assert (row["sizes"], row["reason"]) == (9, None) and row["N"] == pytest.approx(
            best(EPOCH, C)[0], rel=0.05
        )
    x, y = np.log([[row["C"], row["N"]] for row in fit.budgets]).T
    line, of_windows = stats.linregress(x, y), [one["a"] for one in fit.windows]
    # of the window; beside that of the budgets
    doubt = 0.5 * math.sqrt(np.mean((np.array(of_windows) - line.slope) ** 2))
    assert (
        fit.se["a"] == pytest.approx(math.hypot(line.stderr, doubt))
        and len(of_windows) > 1
        and doubt > 0
    )
    assert fit.ci95["a"][1] - line.slope == pytest.approx(stats.t.ppf(0.975, 5) * fit.se["a"])
    assert fit.residual_rms == pytest.approx(np.std(y - line.slope * x) * math.sqrt(7 / 5))
    # A grid whose centre drifts from 1x to 3x over the budgets: a parabola gives .5227 for .5139.
    drift = fit_isoflop(
        joined(
            *(
                grid(EPOCH, [C], 4, centre=c)
                for C, c in zip(BUDGETS, np.geomspace(1, 3, 7), strict=True)
            )
        )
    )
    # half of the parabola's shift
    assert drift.identified and drift.parameters["a"] == pytest.approx(0.5139, abs=0.0044)
    assert [one["window"] for one in fit.windows] == [0.1, 0.2] and fit.windows[0][
        "a"
    ] == fit.parameters["a"]


@pytest.mark.parametrize("trunk", [2e-3, 5e-3])
def test_interval_covers_where_one_trajectory_serves_every_budget(trunk):
    """Ten sizes that pass six budgets each: the budgets' minima share the sizes' luck, so
    trajectories count, not budgets."""
    N, C = np.repeat(np.geomspace(3e7, 3e9, 10), 6), np.tile(np.geomspace(3e19, 6e20, 6), 10)
    D, label, a, hits = C / 6 / N, np.repeat(np.arange(10), 6), best(EPOCH, 1.0)[1], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        loss = law(N, D) * np.exp(rng.normal(0, trunk, 10)[label] + rng.normal(0, trunk / 10, 60))
        fit = fit_isoflop(points_at(N, D, loss, label))
        if fit.ci95:
            assert fit.interval == "cluster" and fit.clusters == 10
            hits.append(fit.ci95["a"][0] < a < fit.ci95["a"][1])
    assert len(hits) >= 30 and np.mean(hits) >= 0.9


def test_budgets_without_a_minimum_are_named():
    good = grid(EPOCH, BUDGETS[:3], 8)
    for shape, reason in (
        ({"wide": 4, "sizes": 4}, "4 sizes"),
        ({"wide": 2, "centre": 20}, "no interior minimum"),
        ({"wide": 2, "centre": 0.05}, "no interior minimum"),
    ):
        fit = fit_isoflop(joined(good, grid(EPOCH, [1e23], **shape)))
        assert [row["reason"] for row in fit.budgets[:3]] == [None] * 3 and fit.budgets[3][
            "N"
        ] is None
        assert (
            reason in fit.budgets[3]["reason"]
            and fit.parameters["a"] == fit_isoflop(good).parameters["a"]
        )
    assert not fit_isoflop(replace(good, loss=6 - good.loss)).identified
    fits = [
        fit_isoflop(grid(EPOCH, BUDGETS[:3], 8, sizes=9, sd=1e-2, seed=seed)) for seed in range(12)
    ]
    wide = [fit for fit in fits if fit.ci95 and min(fit.ci95["a"][0], fit.ci95["b"][0]) <= 0]
    assert wide and all(not fit.identified and "contains 0" in fit.reason for fit in wide)
    two = fit_isoflop(grid(EPOCH, BUDGETS[:2], 8))
    assert (
        two.parameters == {"a": None, "b": None}
        and "2 of 2 compute budgets have an interior minimum" in two.reason
    )


@pytest.mark.parametrize("design", ISOFLOP_DESIGNS)
def test_exponents_of_ten_designs_are_unbiased_and_their_intervals_hold_them(design):
    """Four laws of 12 tables each; law_trials.py isoflop draws more. A cubic through all sizes is
    off by .005 to .03 on some."""
    trials = [isoflop_trials(design, 12, truth) for truth in LAWS]
    errors, inside = (np.concatenate(parts) for parts in zip(*trials, strict=True))
    assert abs(errors.mean()) < 0.002 + 2.5 * errors.std() / math.sqrt(len(errors))
    # 93 % of 48, less two and a half standard deviations
    assert len(inside) >= 44 and inside.mean() >= 0.83


def test_the_frontier_runs_through_the_minima_and_below_the_points():
    """L*(C) of the law in closed form: E + K C^-gamma, where a law through all sizes lies above
    it."""
    points = isoflop_table(0, "centred", LAWS[0], noise=2e-4)
    fit = fit_isoflop(points)
    C, N, _, lowest = minima_of(fit)
    assert lowest == pytest.approx(
        [loss_of(size, compute / 6 / size) for compute, size in zip(C, N, strict=True)], rel=5e-4
    )
    frontier = fit_frontier(fit)
    truth = EPOCH["alpha"] * EPOCH["beta"] / (EPOCH["alpha"] + EPOCH["beta"])
    assert frontier.form == "ray" and frontier.parameters["gamma"] == pytest.approx(truth, abs=0.01)
    at = 1e22
    size = best(EPOCH, at)[0]
    assert frontier.predict(at) == pytest.approx(loss_of(size, at / 6 / size), rel=5e-3)
    assert fit_form("power_c", points).predict(1e20) > 1.01 * frontier.predict(1e20)


def test_valleys_are_recovered_to_the_last_digits():
    """Factors of their own, shared exponents, sizes of any number and place; one point far off
    moves nothing."""
    truth = {"alpha": 0.3, "beta": 0.45}
    sizes = [np.linspace(15, 19, 7), np.linspace(17, 22, 11)]
    factors = [(2.0, 30.0, 1e-4), (1.9, 40.0, 2e-5)]
    lowest = [math.log(truth["alpha"] * u / (truth["beta"] * v)) / 0.75 for _, u, v in factors]
    losses = [
        e + u * np.exp(-0.3 * x) + v * np.exp(0.45 * x)
        for x, (e, u, v) in zip(sizes, factors, strict=True)
    ]
    valleys = [Valley(x, loss) for x, loss in zip(sizes, losses, strict=True)]
    found = fit_valleys(valleys)
    assert found.log_size == pytest.approx(lowest, abs=2e-3)
    assert found.loss_at(1, sizes[1]) == pytest.approx(losses[1], rel=1e-4)
    losses[1][8] *= 1.05
    assert fit_valleys(valleys).log_size == pytest.approx(lowest, abs=0.06)
    assert lowest_part(
        Valley(np.arange(9.0), np.abs(np.arange(9.0) - 3) / 10 + 1), 0.15, 5
    ).log_size.tolist() == [1, 2, 3, 4, 5]


@published
def test_gadre_hold_outs():
    """Five runs predict 1.4B at M = 640 within 0.7103 % and 6.9B at M = 20 within 0.7320 %: tied
    exponents, squares of L."""
    with (FOLDER / "gadre2024_104runs.csv").open() as file:
        runs = {
            (round(float(row["N"]) / 1e6), float(row["mult"])): row
            # mult 1 is 20 tokens per parameter
            for row in csv.DictReader(file)
            if row["train_set"] == "rpj"
        }

    def columns(*keys):
        return (
            np.array([float(runs[key][name]) for key in keys]) for name in ("N", "D", "loss_c4_val")
        )

    N, D, loss = columns((11, 1), (79, 1), (154, 1), (412, 1), (11, 16))

    def tied(p, N, D):  # E, ln factors at 1e8 and 1e9, the common exponent
        return p[0] + np.exp(p[1] - p[3] * np.log(N / 1e8)) + np.exp(p[2] - p[3] * np.log(D / 1e9))

    p = least_squares(
        lambda p: tied(p, N, D) - loss,
        [1.5, 0, 0, 0.3],
        x_scale="jac",
        ftol=1e-15,
        xtol=1e-15,
        gtol=1e-15,
    ).x
    A, B = np.exp(p[1] + p[3] * math.log(1e8)), np.exp(p[2] + p[3] * math.log(1e9))
    assert [A, B, p[0], p[3]] == pytest.approx(
        [166.211, 366.687 * 6 ** (-0.272851 / 2), 1.83665, 0.272851], rel=1e-5
    )
    N, D, loss = columns((1440, 32), (6889, 1), (1440, 1))
    assert [f"{error:.4f}" for error in 100 * abs(tied(p, N, D) - loss) / loss] == [
        "0.7103",
        "0.7320",
        "0.1098",
    ]


def measured(seeds, common, own, seed):
    """Points of a WSD ladder: one trunk per size and seed, whose deviation all its branches
    share."""
    N, D, trunk = ladder(np.repeat(SIZES, seeds))
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, common, trunk.max() + 1)[trunk] + rng.normal(0, own, len(N))
    return points_at(N, D, law(N, D) * np.exp(noise), trunk)


def made(sizes=(3e7, 1e8, 3e8, 1e9), ratios=(5, 20, 80, 320), noise=0.0, seed=0):
    N, D, _ = ladder(sizes, ratios)
    return points_at(N, D, noisy(N, D, noise, seed, ROUND))


def fitted(points):
    return fit_form("chinchilla", points)


def test_each_resample_is_a_fit():
    """Weighted descents from the optimum end where fits of the drawn points end."""
    points = made(np.repeat(SIZES, 3), noise=2e-3)
    drawn = solver.bootstrap(fitted(points), points, 12, seed=7)
    rng, n = np.random.RandomState(7), len(points.N)
    fits = [fitted(points.take(rng.choice(n, n))).parameters for _ in range(12)]
    assert drawn.failed == 0
    for name in ("E", "alpha", "beta", "a"):
        values = [one[name] for one in fits]
        assert drawn.se[name] == pytest.approx(np.std(values, ddof=1), rel=1e-3)
        assert drawn.ci95[name] == pytest.approx(np.percentile(values, [2.5, 97.5]), rel=1e-3)
    # Clusters are drawn whole: four copies of each point as one are that point once, the spread
    # does not shrink by half.
    one = made(np.repeat(SIZES, 6), noise=2e-3)
    four = one.take(np.repeat(np.arange(len(one.N)), 4))
    alone = points_at(four.N, four.D, four.loss)
    se = [solver.bootstrap(fitted(one), points, 300).se["alpha"] for points in (one, four, alone)]
    assert se[1] == pytest.approx(se[0], rel=1e-6) and se[2] == pytest.approx(se[0] / 2, rel=0.2)


def test_the_interval_follows_the_number_of_trajectories_and_failed_resamples(monkeypatch):
    few, some, many = (measured(seeds, 0, 1e-3, 0) for seeds in (1, 2, 6))
    alone = made(noise=1e-3)
    for points, interval, clusters, dof in (
        (some, "cluster", 8, 7),
        (many, "bootstrap", 24, 23),
        (alone, "t", 16, 11),
    ):
        result = with_bootstrap(plain := fitted(points), points, 100)
        assert (result.interval, result.clusters, result.optimum.dof) == (interval, clusters, dof)
        assert (result.se == plain.se) == (interval == "t") and (result.failed == 0) == (
            interval == "bootstrap"
        )
    # Seeds that differ by more than the residuals: no resample can show it, and the jackknife has
    # them as a floor.
    assert (
        with_bootstrap(fit_form("chinchilla", many, seed_sd=3e-3), many, 100).interval == "cluster"
    )
    low, high = (fit_form("chinchilla", some, sd, None) for sd in (0.0, 3e-3))
    ratio = np.sqrt(solver.jackknife(high, some)[3, 3] / solver.jackknife(low, some)[3, 3])
    assert ratio == pytest.approx(3e-3 / low.residual_rms)
    N = np.geomspace(5e7, 1e9, 30)
    ray = points_at(N, 20 * N, law(N, 20 * N))
    for unidentified in (fitted(ray), fit_isoflop(ray)):
        assert with_bootstrap(unidentified, ray) is unidentified
    # three sizes: without any of them two are left, which do not determine E, A and alpha
    points = few.take(few.N != 250e6)
    result = with_bootstrap(fitted(points), points)
    assert not result.identified and result.se is None and "without one of the 3" in result.reason
    # more than a twentieth is not believed
    for failed, interval in ((5, "bootstrap"), (6, "cluster")):
        monkeypatch.setattr(
            intervals,
            "bootstrap",
            lambda fit, *_, failed=failed: replace(
                fit, interval="bootstrap", resamples=100, failed=failed
            ),
        )
        result = with_bootstrap(fitted(many), many, 100)
        assert (result.interval, result.failed) == (interval, failed)


def test_an_interval_survives_resamples_whose_E_runs_to_zero():
    """Resamples whose ln E is anything below 0 may not be all of the spread: the interval of the
    law is about Student's."""
    N, D, _ = ladder(np.geomspace(2.1e7, 1.3e9, 8), (5, 20, 80))
    points = points_at(
        N, D, noisy(N, D, 3e-3, 3, {"E": 0, "A": 400, "B": 900, "alpha": 0.25, "beta": 0.27})
    )
    final = with_bootstrap(fit := fitted(points), points)
    assert final.interval == "bootstrap" and final.identified and final.ci95["E"][0] < 1e-3
    widths = [
        np.log(high / low) for _, low, high in (one.interval_at(1e10, 2e11) for one in (fit, final))
    ]
    assert widths[1] == pytest.approx(widths[0], rel=0.5)


@pytest.mark.parametrize(("seeds", "interval"), [(1, "cluster"), (3, "cluster"), (5, "bootstrap")])
def test_intervals_cover_when_branches_share_their_trunks_luck(seeds, interval):
    """Trunks 0.1 % apart, branches 0.02 %: nominal 95 % covers at least 90 %, where the plain
    t-interval covers 40 to 70 %."""
    sims = 100 if interval == "cluster" else 60
    covered, plain = {"1.5B": [], "alpha": []}, []
    for seed in range(sims):
        points = measured(seeds, 1e-3, 2e-4, seed)
        fit = fitted(points)
        result = with_bootstrap(fit, points, 200)
        assert not result.identified or result.interval == interval
        covered["1.5B"].append(np.prod(np.subtract(result.interval_at(*FAR)[1:], law(*FAR))) < 0)
        plain.append(np.prod(np.subtract(fit.interval_at(*FAR)[1:], law(*FAR))) < 0)
        low, high = result.ci95["alpha"]
        covered["alpha"].append(low < EPOCH["alpha"] < high)
    assert all(np.mean(hits) >= 0.9 for hits in covered.values()), {
        name: np.mean(hits) for name, hits in covered.items()
    }
    assert np.mean(plain) < 0.75


def test_the_bootstrap_judges_anew_what_outliers_had_refused():
    """Many wild points swell the residuals' rms and with it Student's interval; Huber's fit and its
    resamples do not mind."""
    N, D, _ = ladder(np.repeat(SIZES, 3))
    points = points_at(N, D, noisy(N, D, 3e-4))
    points.loss[::7] *= 1.25  # more than a tenth: none of them is called an outlier
    final = with_bootstrap(refused := fitted(points), points, 400)
    assert not refused.identified and "contains 0" in refused.reason
    assert final.identified and final.ci95["alpha"][0] < EPOCH["alpha"] < final.ci95["alpha"][1]
    N = np.geomspace(1e7, 1e9, 24)
    points = points_at(
        N, N, noisy(N, N, 0.02, 0, {"E": 0, "A": 3, "B": 0, "alpha": 0.002, "beta": 0})
    )
    final = with_bootstrap(fit_form("power_n", points), points, 200)
    assert final.interval == "bootstrap" and not final.identified and "contains 0" in final.reason


@published
def test_bootstrap_of_240_points():
    """Besiroglu et al.'s own draws, which are indices into the file's order; over sizes A and alpha
    are less certain."""
    points = chinchilla_points(5)
    fit = fitted(points)
    drawn = solver.bootstrap(fit, points, 4000, seed=42)
    assert drawn.failed == 0 and drawn.clusters == 240
    golden = {
        "A": (124.494, 285.214, 743.626),
        "B": (1293.169, 1042.357, 5810.344),
        "E": (0.02566, 1.769, 1.871),
        "alpha": (0.01540, 0.317, 0.373),
        "beta": (0.02059, 0.331, 0.415),
    }
    for name, (se, *ends) in golden.items():
        assert drawn.se[name] == pytest.approx(se, rel=5e-4) and drawn.ci95[name] == pytest.approx(
            ends, rel=4e-3
        ), name
    assert drawn.se["a"] == pytest.approx(0.01997, rel=5e-4)
    drawn = solver.bootstrap(fit, replace(points, cluster=np.round(np.log(points.N), 2)), 1000)
    assert 35 <= drawn.clusters <= 50 and drawn.se["A"] > 135 and drawn.se["alpha"] > 0.0165


def early(extra, sd=3e-3, seed=0):
    """Points at .02 to 350 tokens per parameter, the earliest of them above the law by the share
    `extra`."""
    points = made(np.geomspace(5e6, 9e8, 12), np.geomspace(0.02, 350, 10), sd, seed)
    return replace(points, loss=points.loss * (1 + extra * (points.D / points.N < 0.5)))


def test_early_points_off_the_law_are_named_and_left_out_beside_it():
    # noise of any size is no lack of fit: neighbours show it
    for seed, sd in itertools.product(range(5), (1e-3, 5e-3, 2e-2)):
        points = early(0.0, sd, seed)
        assert lack_of_fit(fitted(points), points) is None
    points = early(0.3)
    found = lack_of_fit(fitted(points), points)
    ratio = points.D / points.N
    assert found["noise_of"] == "neighbours" and found["noise"] < 0.02 < found["residual_rms"]
    assert (
        set(np.flatnonzero(ratio < 0.5)) <= set(found["left_out"])
        and max(ratio[found["left_out"]]) < found["below"]
    )
    assert (
        found["without"].parameters["alpha"] == pytest.approx(0.34, abs=0.02)
        and found["without"].residual_rms < 0.01
    )
    assert lack_of_fit(fitted(points), points, seed_sd=1e-3)["noise"] == 1e-3
    twice = joined(points, replace(points, loss=points.loss * 1.004))
    repeats = lack_of_fit(fitted(twice), twice)
    assert repeats["noise_of"] == "repeats" and repeats["noise"] == pytest.approx(
        0.004 / np.sqrt(2), rel=0.01
    )


@pytest.mark.parametrize(
    ("outliers", "design"),
    [
        (0, {}),
        (2, {}),
        (0, {"noise": 5e-3}),
        (1, {"sizes": 4, "ratios": 4}),
        (8, {"sizes": 12, "ratios": 12}),
    ],
)
def test_outliers_are_named_and_the_law_is_kept(outliers, design):
    """Losses of 2 to 8 % too high or too low, up to 6 % of them: in 19 of 20 tables; law_trials.py
    outliers draws more."""
    trials = [outlier_trial(100 + seed, outliers, **design) for seed in range(20)]
    assert sum(trial.is_kept for trial in trials) >= 19
    assert sum(trial.missed for trial in trials) <= 0.05 * 20 * outliers
    assert sum(trial.false_names > 0 for trial in trials) <= 1
    assert sum(trial.covers for trial in trials) >= 17


def test_one_outlier_does_not_widen_the_interval_of_sixteen_points():
    points, _ = table_with_outliers(3, 0, sizes=4, ratios=4)
    spoilt = replace(points, loss=points.loss * (1 + 0.06 * (np.arange(16) == 5)))
    clean, fit = fitted(points), fitted(spoilt)
    assert [index for index, _ in fit.outliers] == [5] and fit.outliers[0][1] == pytest.approx(
        0.06, abs=0.008
    )
    assert fit.identified and fit.se["alpha"] < 2 * clean.se["alpha"]
    assert fit.residual_rms > 0.01 > 2 * fit.scatter
    sound = fit_law(
        "chinchilla", *(np.delete(x, 5) for x in (points.N, points.D, points.loss))
    ).parameters
    assert fit.without_outliers == pytest.approx(sound, rel=1e-4)


def test_early_points_are_blamed_beside_an_outlier():
    """What remains without the outlier still misfits, so the early points are left out; the outlier
    is named of the rest."""
    points = early(0.3)
    late = int(np.flatnonzero(points.D / points.N > 50)[3])
    points.loss[late] *= 1.06
    found = lack_of_fit(fitted(points), points)
    assert (
        set(np.flatnonzero(points.D / points.N < 0.5)) <= set(found["left_out"])
        and late not in found["left_out"]
    )
    assert [index for index, _ in found["outliers"]] == [late]


@pytest.mark.parametrize("design", [{}, {"sizes": 4, "ratios": 4}])
def test_independent_runs_share_no_fault(design):
    """At most 1 in 100; law_trials.py faults draws more."""
    assert sum(fault_trial(seed, **design)[0] is not None for seed in range(60)) <= 1


@pytest.mark.parametrize(
    ("by", "design"),
    [
        ("size", {"tuning": 3e-3}),
        ("run", {"trunk": 2e-3, "noise": 5e-4, "seeds": 3, "sizes": 5, "ratios": 4}),
    ],
)
def test_a_shared_fault_is_noticed_and_its_intervals_hold_the_truth(by, design):
    """Sizes tuned unequally, or branches of one run that pass for runs: intervals of points hold
    the truth half the time."""
    trials = [fault_trial(seed, **design) for seed in range(30)]
    assert sum(found == by for found, _, _ in trials) >= 26
    assert sum(inside for _, inside, _ in trials) >= 26
    assert sum(plain for _, _, plain in trials) <= 22


def test_trajectories_of_one_size_that_agree_are_a_fault_of_the_size():
    """With trajectories named, their means are compared: what a trajectory's branches share is no
    fault of its size."""
    fired = {}
    for tuning in (0.0, 5e-3):
        tables = [
            table_of_sizes(seed, tuning=tuning, trunk=1e-3, seeds=3, ratios=4, noise=2e-4)
            for seed in range(20)
        ]
        named = [replace(points, cluster=run) for points, run in tables]
        fired[tuning] = sum(shared_fault(fitted(points), points) is not None for points in named)
    assert fired[0.0] <= 1 and fired[5e-3] >= 16


def test_exponents_near_zero_are_named():
    fit = fitted(made())
    wide = replace(
        fit, se={"alpha": fit.parameters["alpha"] / 2.9, "beta": fit.parameters["beta"] / 3.1}
    )
    assert near_zero(wide) == ["alpha"] and near_zero(replace(fit, se=None)) == []


def test_a_law_is_refitted_under_each_choice_or_says_why_not():
    # within a percent: one size
    rows = robustness(made(sizes=(3e7, 1e8, 3e8, 3.02e8, 1e9)), "chinchilla", {})
    assert [row["variant"] for row in rows] == [
        "declared",
        *["drop highest"] * 4,
        *["delta"] * 3,
        *["leave out N"] * 4,
    ]
    assert [row["n"] for row in rows] == [20, 19, 17, 15, 10, 20, 20, 20, 16, 16, 12, 16]
    for row in rows:
        assert {name: row[name] for name in ROUND} == pytest.approx(ROUND, rel=1e-2), row
    assert [row["value"] for row in rows[-4:]] == ["30M", "100M", "300M to 302M", "1B"]
    points = made(noise=2e-3)  # the error on a size left out, by hand
    row, rest = robustness(points, "chinchilla", {})[-1], points.N == 1e9
    errors = 100 * (law(points.N[rest], points.D[rest], row) / points.loss[rest] - 1)
    assert row["error_percent"] == pytest.approx(errors.mean(), rel=1e-9) and row["n"] == 12
    assert row["largest_error_percent"] == pytest.approx(
        errors[np.argmax(np.abs(errors))], rel=1e-9
    )
    # Seeds are a floor in each variant; what cannot be fitted says why.
    N = np.geomspace(3e7, 1e10, 12)
    points = points_at(N, 20 * N, 1.7 + 412 * (120 * N**2) ** -0.155)
    assert not any(row["identified"] for row in robustness(points, "ray", {}, seed_sd=0.3))
    rows = robustness(made(sizes=(3e7, 1e8), ratios=(5, 20, 80)), "chinchilla", {})
    assert [row["value"] for row in rows if row["variant"] == "drop highest"] == ["1", "3"]
    for row in rows[-2:]:
        assert (
            row["variant"] == "leave out N"
            and row["E"] is None
            and row["reason"].startswith("3 distinct point(s)")
        )
    rows = robustness(made(sizes=(1e8,)), "power_d", {})
    assert "leave out N" not in [row["variant"] for row in rows]  # one size: nothing is left


@published
def test_published_choices_on_the_chinchilla_points():
    """Rows of k and delta, recomputed from Besiroglu et al. 2024's points with another program;
    least absolute deviations. The five points that they dropped are those farthest off the law."""
    points, kept = chinchilla_points(), chinchilla_points(5)
    off = [index for index, _ in fitted(points).outliers]
    assert sorted(points.cluster[off[:5]]) == [2, 3, 4, 5, 6]  # lines of the file
    assert lack_of_fit(fitted(points), points) is None and lack_of_fit(fitted(kept), kept) is None
    fit = fit_form("chinchilla", kept, delta=1e-8)
    assert fit.identified and fit.starts_at_best == fit.starts
    assert [fit.parameters[name] for name in "AB"] == pytest.approx([482.01, 2085.43], abs=0.012)
    assert [fit.parameters[name] for name in ("E", "alpha", "beta")] == pytest.approx(
        [1.81686, 0.34781, 0.36585], abs=1.2e-5
    )
    rows = {(row["variant"], row["value"]): row for row in robustness(points, "chinchilla", {})}
    assert [round(rows["declared", ""][key], 3) for key in ("beta", "E")] == [0.453, 1.891]
    assert rows["declared", ""]["B"] == pytest.approx(12846, rel=1e-4)
    assert [round(rows["drop highest", k]["beta"], 3) for k in ("1", "3", "5", "10")] == [
        0.412,
        0.382,
        0.367,
        0.358,
    ]
    rows = {(row["variant"], row["value"]): row for row in robustness(kept, "chinchilla", {})}
    for value, alpha, beta in (
        ("MSE", 0.36025, 0.40588),
        ("0.01", 0.35440, 0.38150),
        ("0.0001", 0.34741, 0.36539),
    ):
        within = 6e-5 if value == "0.01" else 1.2e-5
        assert [rows["delta", value][key] for key in ("alpha", "beta")] == pytest.approx(
            [alpha, beta], abs=within
        ), value
    assert [rows["delta", "MSE"][key] for key in ("A", "B", "E")] == pytest.approx(
        [593.32, 4875.64, 1.86455], rel=1e-5
    )
    errors = [row["error_percent"] for key, row in rows.items() if key[0] == "leave out N"]
    assert len(errors) == solver.MOST_SIZES and max(map(abs, errors)) < 2
