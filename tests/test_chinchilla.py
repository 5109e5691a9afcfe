"""Chinchilla's law is recovered, its intervals cover, and designs that cannot identify it are refused in a sentence."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from runtime.cli import UserError
from scaling.laws import ONE_RAY, fit_chinchilla, frontier

TRUE = {"E": 1.817218, "A": 477.826, "B": 2143.417, "alpha": 0.34731, "beta": 0.367172}    # Besiroglu et al. 2024's data
SIZES, RATIOS = (50e6, 125e6, 250e6, 350e6), (5, 10, 20, 40)


def law(N, D, p=TRUE):
    return p["E"] + p["A"] * N ** -p["alpha"] + p["B"] * D ** -p["beta"]


def ladder(sizes=SIZES, ratios=RATIOS):
    """(N, D, trajectory) of sizes x tokens per parameter; the ratios of one size are branches of one run."""
    N = np.repeat(sizes, len(ratios)).astype(float)
    return N, N * np.tile(ratios, len(sizes)), np.repeat(np.arange(len(sizes)), len(ratios))


def noisy(N, D, sd, seed=0):
    return law(N, D) * np.exp(np.random.default_rng(seed).normal(0, sd, len(N)))


def test_known_law_is_recovered_with_its_frontier():
    N, D, _ = ladder()
    fit = fit_chinchilla(N, D, law(N, D))
    a, b, gamma = 0.367172 / 0.714482, 0.34731 / 0.714482, 0.34731 * 0.367172 / 0.714482
    assert fit.parameters == pytest.approx(TRUE | {"a": a, "b": b, "gamma": gamma}, rel=1e-6)
    assert fit.identified and fit.starts == fit.starts_at_best == 27 and fit.gradient_norm < 1e-9 and fit.nfev > 27
    assert len(fit.singular_values) == 5 and fit.interval == "t"


@pytest.mark.parametrize("truth", [  # Hoffmann's, and a surface with unequal exponents
    {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28},
    {"E": 2.1, "A": 60.0, "B": 8e4, "alpha": 0.22, "beta": 0.55}])
def test_other_laws_are_recovered(truth):
    N, D, _ = ladder()
    assert fit_chinchilla(N, D, law(N, D, truth)).parameters == pytest.approx(truth | fit_derived(truth), rel=1e-5)


def fit_derived(p):
    total = p["alpha"] + p["beta"]
    return {"a": p["beta"] / total, "b": p["alpha"] / total, "gamma": p["alpha"] * p["beta"] / total}


def test_frontier_is_the_minimum():
    N, D, _ = ladder()
    fit = fit_chinchilla(N, D, law(N, D))
    C = np.array([1e18, 1e21, 1e24])
    found = frontier(fit, C)
    for budget, n, d, loss in zip(C, *found, strict=True):
        best = minimize_scalar(lambda x, C=budget: law(np.exp(x), C / 6 / np.exp(x)), (15, 30), options={"xtol": 1e-12})
        assert [np.log(n), loss] == pytest.approx([best.x, best.fun], rel=1e-6) and 6 * n * d == pytest.approx(budget)
    slope = np.diff(np.log(found[0])) / np.diff(np.log(C))
    assert np.allclose(slope, fit.parameters["a"])
    assert np.allclose(np.diff(np.log(found[2] - fit.parameters["E"])) / np.diff(np.log(C)), -fit.parameters["gamma"])


def test_units_do_not_matter():
    N, D, _ = ladder()
    L = noisy(N, D, 2e-3)
    fits = [fit_chinchilla(N * n, D * d, L) for n, d in ((1, 1), (1e-6, 1e-9), (1e3, 1))]
    for fit in fits:
        assert [fit.parameters[name] for name in ("alpha", "beta", "E")] == pytest.approx(
            [fits[0].parameters[name] for name in ("alpha", "beta", "E")], rel=1e-4)
        assert fit.starts_at_best == fit.starts


def test_tied_exponents_and_plain_squares():
    N, D, _ = ladder()
    truth = {"E": 1.9, "A": 166.0, "B": 287.0, "alpha": 0.2728, "beta": 0.2728}
    for options in ({}, {"raw": True}, {"delta": None}):
        fit = fit_chinchilla(N, D, law(N, D, truth), tied=True, **options)
        assert fit.form == "chinchilla_tied" and fit.identified
        assert fit.parameters == pytest.approx(truth | {"a": 0.5, "b": 0.5, "gamma": 0.1364}, rel=1e-5)
    assert {"a", "b"}.isdisjoint(fit.se) and fit.se["alpha"] == fit.se["beta"]      # a is 1/2 by construction
    log, raw = (fit_chinchilla(N, D, noisy(N, D, 3e-3), raw=raw, delta=None) for raw in (False, True))
    assert log.parameters["alpha"] != pytest.approx(raw.parameters["alpha"], rel=1e-6)
    assert log.se["alpha"] == pytest.approx(raw.se["alpha"], rel=0.3)               # both of ln loss


def test_one_size_larger_noise_wider_interval():
    N, D, _ = ladder()
    low, high = (fit_chinchilla(N, D, noisy(N, D, sd), seed_sd=floor) for sd, floor in ((1e-4, 0.0), (1e-4, 2e-3)))
    assert high.parameters == low.parameters and high.se["alpha"] > 10 * low.se["alpha"]
    _, bottom, top = low.interval_at(1.5e9, 3e10)
    assert np.log(top / bottom) < 0.2 * np.log(np.divide(*high.interval_at(1.5e9, 3e10)[:0:-1]))


# ---------------------------------------------------------------------------------------------- what is not identified


@pytest.mark.parametrize("sd", [0, 1e-3, 5e-3])
@pytest.mark.parametrize("jitter", [0, 0.01, 0.049])
def test_one_ray_is_never_identified(sd, jitter):
    rng = np.random.default_rng(3)
    for n in (6, 12, 40):
        N = np.geomspace(5e7, 2e9, n)
        ratio = 20 * rng.uniform(1, 1 + jitter, n)
        assert ratio.max() / ratio.min() <= ONE_RAY
        fit = fit_chinchilla(N, N * ratio, noisy(N, N * ratio, sd, seed=n))
        assert not fit.identified and fit.se is None and fit.ci95 is None
        assert fit.reason.startswith("all points lie on one ray of 20")
        assert fit.reason.endswith("are one curve: alpha and beta need runs at other ratios")


def test_nearly_one_ray_with_noise_is_not_identified():
    """Between one ray and ratios 2x apart intervals hold alpha and beta only three times in four."""
    rng, N = np.random.default_rng(4), np.geomspace(5e7, 4e8, 12)
    for wide, seed in ((1.08, 0), (1.3, 1), (1.9, 2)):
        D = 20 * N * rng.permutation(np.geomspace(1, wide, 12))
        fit = fit_chinchilla(N, D, noisy(N, D, 1e-3, seed))
        assert not fit.identified and "nearly one ray" in fit.reason and fit.ci95 is None
    D = np.ceil(np.tile([10, 20], 6) * N / 1e6) * 1e6       # budgets rounded up to whole steps
    assert fit_chinchilla(N, D, noisy(N, D, 1e-5, 3)).identified


@pytest.mark.parametrize(("N", "D", "reason"), [
    (np.full(8, 1e8), np.geomspace(1e9, 1e10, 8), "the points hold 1 distinct N"),
    (np.geomspace(1e8, 1e9, 8), np.full(8, 1e10), "the points hold 1 distinct D"),
    (np.repeat([1e8, 3e8], 5), np.tile(np.geomspace(1e9, 1e10, 5), 2), "the points hold 2 distinct N"),
    ([5e7, 1e8, 2e8, 4e8, 1e8], [1e9, 2e9, 4e9, 1e9, 8e9], "5 distinct points are too few for five parameters: 9 at least"),
])
def test_designs_that_cannot_tell(N, D, reason):
    N, D = np.asarray(N), np.asarray(D)
    for sd in (0, 1e-3):
        fit = fit_chinchilla(N, D, noisy(N, D, sd))
        assert not fit.identified and fit.reason.startswith(reason) and fit.ci95 is None


def test_losses_that_cannot_tell():
    N, D, _ = ladder()
    for L, reason in ((1e3 * N**-0.3 + 1e3 * D**-0.3, "E runs to zero"), (1.8 + 400 * N**-0.34 + 0 * D, "beta is not above zero"),
                      (2 + 1e-3 * N**0.1 + 0 * D, "is not above zero"), (2 + 0 * N, "is not above zero")):
        fit = fit_chinchilla(N, D, L)
        assert not fit.identified and reason in fit.reason and fit.ci95 is None
    vague = fit_chinchilla(N, D, noisy(N, D, 0.03))
    assert not vague.identified and ("contains 0" in vague.reason or "zero" in vague.reason)


@pytest.mark.parametrize(("N", "D", "L", "sentence"), [
    ([1e8] * 6, [1e9] * 6, [2.0] * 6, "1 distinct point(s); this law needs at least 5"),
    ([], [], [], "0 distinct point(s); this law needs at least 5"),
    ([1e8], [1e9], [3.0], "1 distinct point(s)"),
    ([1e8, -1e8], [1e9, 1e9], [3.0, 3.0], "point 1 is -100000000.0"),
    ([1e8, 1e8], [1e9, np.inf], [3.0, 3.0], "point 1 is inf"),
    ([1e8, 1e8], [1e9, 1e9], [3.0, np.nan], "loss 1 is nan"),
    ([1e8, 1e8], [1e9], [3.0, 3.0], "a law needs as many losses as points; found shapes (1,) against (2,)"),
])
def test_hostile_points(N, D, L, sentence):
    with pytest.raises(UserError) as error:
        fit_chinchilla(N, D, L)
    assert str(error.value).startswith(sentence)


def test_many_points_and_repeated_points():
    N, D, _ = ladder(np.geomspace(1e7, 1e9, 100), np.geomspace(1, 100, 100))       # 10,000, seconds
    fit = fit_chinchilla(N, D, noisy(N, D, 2e-3))
    assert fit.identified and fit.parameters["alpha"] == pytest.approx(TRUE["alpha"], abs=4 * fit.se["alpha"])
    N, D, _ = ladder()
    L = noisy(N, D, 1e-3)
    once, thrice = fit_chinchilla(N, D, L), fit_chinchilla(*(np.tile(x, 3) for x in (N, D, L)))
    assert thrice.parameters["alpha"] == pytest.approx(once.parameters["alpha"], rel=1e-4)
    assert thrice.objective == pytest.approx(3 * once.objective, rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- coverage


@pytest.mark.parametrize("sd", [1e-3, 5e-3])
def test_intervals_cover(sd):
    """Nominal 95 % covers at least 90 % over 200 ladders with honest noise, prediction at 1.5B included."""
    (N, D, _), covered, told = ladder(), {}, 0
    for seed in range(200):
        fit = fit_chinchilla(N, D, noisy(N, D, sd, seed))
        told += fit.identified
        if (at := fit.interval_at(1.5e9, 30e9)) is not None:
            covered.setdefault("1.5B", []).append(at[1] < law(1.5e9, 30e9) < at[2])
        if fit.identified:
            for name, value in TRUE.items():
                covered.setdefault(name, []).append(fit.ci95[name][0] < value < fit.ci95[name][1])
    assert len(covered["1.5B"]) >= 195 and told >= (195 if sd < 2e-3 else 120)
    shares = {name: np.mean(hits) for name, hits in covered.items()}
    # At 0.5 % a fifth of the ladders is refused; what the others say of E holds under that selection.
    assert all(share >= (0.9 if name != "E" or sd < 2e-3 else 0.85) for name, share in shares.items()), shares
