"""One law: recovered from known points, refused where they cannot tell."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from scaling.law_words import refusal_words
from scaling.laws import GAMMAS, POWERS, CannotFit, Fit, fit_band, fit_law
from scaling.laws.fits import known
from tests.helpers.law_points import EPOCH, HOFFMANN, UNEQUAL, Law, ladder, law, noisy
from tests.scaling.laws.test_solver import LOSS, NOISY, C

TRUE = {"E": 1.69, "K": 412.0, "gamma": 0.155}  # of LOSS
N, D, _ = ladder()
AXES = {
    "ray": (6 * N * D,),
    "power_n": (N,),
    "power_d": (D,),
    "power_c": (6 * N * D,),
    "chinchilla": (N, D),
}
KNOWN_LAWS = (
    ("ray", TRUE, 15),
    ("power_n", {"A": 11.4, "alpha": 0.076}, 9),
    ("power_d", {"B": 8.8, "beta": 0.095}, 9),
    ("power_c", {"K": 30.0, "gamma": 0.06}, 9),
    ("chinchilla", EPOCH, 27),
    ("chinchilla", HOFFMANN, 27),
    ("chinchilla", UNEQUAL, 27),
)


def loss_of(form: str, truth: Law) -> np.ndarray:
    if form == "chinchilla":
        return law(N, D, truth)
    (power,) = POWERS[form]
    (x,) = AXES[form]
    falling = truth[power.factor] * x ** -truth[power.exponent]
    return truth.get("E", 0) + falling


@pytest.mark.parametrize(("form", "truth", "starts"), KNOWN_LAWS)
def test_laws_are_recovered(form: str, truth: Law, starts: int):
    loss = loss_of(form, truth)
    fit = fit_law(form, *AXES[form], loss)
    assert {name: fit.values[name] for name in truth} == pytest.approx(truth, rel=1e-5)
    assert np.allclose(fit.predict(*AXES[form]), loss, rtol=1e-8)
    assert fit.identified and fit.interval == "t"


@pytest.mark.parametrize(("form", "truth", "starts"), KNOWN_LAWS)
def test_each_start_reaches_the_optimum(form: str, truth: Law, starts: int):
    fit = fit_law(form, *AXES[form], loss_of(form, truth))
    assert fit.starts == fit.starts_at_best == starts and known(fit.gradient_norm) < 1e-9


@pytest.mark.parametrize(("form", "truth", "starts"), KNOWN_LAWS)
def test_laws_are_recovered_in_any_unit(form: str, truth: Law, starts: int):
    fit = fit_law(form, *(x * 1e-8 for x in AXES[form]), loss_of(form, truth))
    for name in truth.keys() - {"A", "B", "K"}:
        assert fit.values[name] == pytest.approx(truth[name], rel=1e-4), name


@pytest.mark.parametrize("truth", [EPOCH, HOFFMANN, UNEQUAL])
def test_exponents_of_the_frontier_are_those_of_the_cheapest_models(truth: Law):
    """N* ~ C^a, and L* - E ~ C^-gamma, as a search finds the cheapest models of two budgets."""
    (small, high), (large, low) = (cheapest(compute, truth) for compute in (1e18, 1e21))
    growth = math.log(large / small) / math.log(1e3)
    excess = (high - truth["E"]) / (low - truth["E"])
    fall = math.log(excess) / math.log(1e3)
    fit = fit_law("chinchilla", N, D, law(N, D, truth))
    assert [fit.values["a"], fit.values["b"]] == pytest.approx([growth, 1 - growth], rel=1e-5)
    assert fit.values["gamma"] == pytest.approx(fall, rel=1e-5)


def cheapest(compute: float, truth: Law) -> tuple[float, float]:
    """(N, loss) of the best model for so many FLOPs, by a search."""

    def loss(log_size: float) -> float:
        size = math.exp(log_size)
        return float(law(size, compute / 6 / size, truth))

    best = minimize_scalar(loss, (15, 30))
    return math.exp(best.x), best.fun


# ---------------------------------------------------------------------------- the envelope of forms


def test_the_band_spans_the_forms_from_the_power_law_to_the_steepest_ray():
    losses = [float(form.predict(1e21)) for form in fit_band(C[:3], LOSS[:3])]
    truth = TRUE["E"] + TRUE["K"] * 1e21 ** -TRUE["gamma"]
    assert len(losses) == 1 + len(GAMMAS) and losses == sorted(losses)
    assert losses[0] < truth < losses[-1]


def test_the_band_leaves_out_what_needs_a_negative_E():
    rays = fit_band(C, 30 * C**-0.13)[1:]
    assert [form.values["gamma"] for form in rays] == list(GAMMAS[2:])
    assert len(fit_band(C, 1e9 * C**-0.5)) == 1


# -------------------------------------------------------------------------- what points cannot tell


def lacking(fit: Fit) -> str:
    """Why a law is not identified; it then has no intervals."""
    assert not fit.identified and fit.se is None and fit.ci95 is None
    return str(refusal_words(fit.reason))


def test_three_points_of_a_ray_have_no_interval():
    three = fit_law("ray", C[:3], NOISY[:3], seed_sd=1e-3)
    assert lacking(three) == "3 points for 3 parameters leave 0 degrees of freedom"
    assert three.residual_rms is None and three.interval_at(1e22) is None


@pytest.mark.parametrize("form", ["ray", "power_c"])
@pytest.mark.parametrize("slope", [0.0, 0.05])
def test_a_loss_that_does_not_fall_is_refused(form: str, slope: float):
    x = np.geomspace(1e15, 1e20, 30)
    noise = np.random.default_rng(2).normal(0, 0.01, 30)
    for loss in (3 * (x / 1e17) ** slope, 3 * np.exp(noise)):
        assert not fit_law(form, x, loss).identified


@pytest.mark.parametrize(("x", "distinct"), [([5.0] * 4, 1), ([], 0)])
def test_fewer_distinct_points_than_parameters_cannot_be_fitted(x: list[float], distinct: int):
    with pytest.raises(CannotFit) as error:
        fit_law("ray", np.array(x), np.array([2, 2.1, 2.2, 2.3])[: len(x)])
    assert refusal_words(error.value.refusal) == (
        f"{distinct} distinct point(s); this law needs at least 3"
    )


WIDE = np.geomspace(1e9, 1e10, 5)
DESIGNS = (
    (np.geomspace(1e8, 1e9, 8), np.full(8, 1e10), "the points hold 1 distinct D"),
    (np.repeat([1e8, 3e8], 5), np.tile(WIDE, 2), "the points hold 2 distinct N"),
    (np.repeat([1e8, 1.04e8, 3e8], 5), np.tile(WIDE, 3), "the points hold 2 distinct N"),
    (
        np.array([5e7, 1e8, 2e8, 4e8, 1e8]),
        np.array([1e9, 2e9, 4e9, 1e9, 8e9]),
        "5 distinct points are too few for five",
    ),
)


@pytest.mark.parametrize("sd", [0, 1e-3])
@pytest.mark.parametrize(("sizes", "tokens", "reason"), DESIGNS)
def test_designs_that_cannot_tell(sizes: np.ndarray, tokens: np.ndarray, reason: str, sd: float):
    fit = fit_law("chinchilla", sizes, tokens, noisy(sizes, tokens, sd))
    assert lacking(fit).startswith(reason)


Surface = Callable[[np.ndarray, np.ndarray], np.ndarray]
SURFACES: tuple[tuple[Surface, tuple[str, ...]], ...] = (
    (lambda N, D: 1e3 * N**-0.3 + 1e3 * D**-0.3, ("E runs to zero",)),
    (lambda N, D: 1.8 + 400 * N**-0.34 + 0 * D, ("beta is not above zero",)),
    (lambda N, D: 2 + 0 * N, ("is not above zero",)),
    (lambda N, D: noisy(N, D, 0.03), ("contains 0", "zero")),
)


@pytest.mark.parametrize(("surface", "reasons"), SURFACES)
def test_losses_that_cannot_tell(surface: Surface, reasons: tuple[str, ...]):
    fit = fit_law("chinchilla", N, D, surface(N, D))
    words = lacking(fit)
    assert any(reason in words for reason in reasons)
    assert "--" not in fit.formula()


@pytest.mark.parametrize("spread", [1, 1.049, 1.3, 1.9])
def test_one_ray_or_nearly_one_is_never_identified(spread: float):
    """Between one ray and ratios 2x apart intervals hold alpha and beta only three times in
    four."""
    for n, sd in itertools.product((6, 40), (0, 1e-3, 5e-3)):
        rng = np.random.default_rng(3)
        sizes = np.geomspace(5e7, 2e9, n)
        ratios = rng.permutation(np.geomspace(1, spread, n))
        tokens = 20 * sizes * ratios
        loss = noisy(sizes, tokens, sd, seed=n)
        words = lacking(fit_law("chinchilla", sizes, tokens, loss))
        assert words.startswith("the points lie at 20 to")
        assert words.endswith("need ratios at least 2x apart")


@pytest.mark.parametrize(("lowest", "is_enough"), [(10.05, True), (10.2, False)])
def test_ratios_of_two_are_enough_where_budgets_are_rounded_to_steps(
    lowest: float, is_enough: bool
):
    """Which makes a short one up to a per cent longer."""
    sizes = np.geomspace(5e7, 4e8, 12)
    tokens = np.tile([lowest, 20], 6) * sizes
    fit = fit_law("chinchilla", sizes, tokens, noisy(sizes, tokens, 1e-5, 3))
    assert fit.identified == is_enough
