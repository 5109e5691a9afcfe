"""The design advice: bounds against published numbers, the whole covariance matrix and simulated noise."""

from dataclasses import replace

import numpy as np
import pytest

from scaling.design import PRIOR_SD, RHO, Candidate, bound, gradient, rank, with_all
from scaling.laws import fit_chinchilla
from scaling.pairs import EPOCH
from scaling.study import expand, load_study
from tests.conftest import ROOT
from tests.plan_cases import correlated, ladder


@pytest.mark.parametrize("sizes, ratios, alpha, beta, a, prediction", [
    ((125e6, 250e6, 350e6), (10, 20), .120, .033, .096, 1.24),
    ((125e6, 250e6, 350e6), (5, 10, 20), .097, .013, .072, 1.04),
    ((125e6, 250e6, 350e6), (5, 10, 20, 40), .081, .008, .059, .88),
    ((60e6, 125e6, 250e6, 350e6), (5, 10, 20, 40), .022, .005, .017, .33),
    ((125e6, 250e6, 350e6, 1.5e9), (5, 10, 20), .018, .008, .017, .08),
])
def test_cramer_rao_bounds_as_computed_elsewhere(sizes, ratios, alpha, beta, a, prediction):
    found = bound(EPOCH, *ladder(sizes, ratios), (1.5e9, 30e9))
    for mine, theirs, rounding in ((found.alpha, alpha, 6e-4), (found.beta, beta, 1e-3), (found.a, a, 6e-4),
                                   (100 * found.prediction, prediction, 6e-3)):
        assert mine == pytest.approx(theirs, abs=rounding)


def test_one_ray_identifies_nothing():
    assert bound(EPOCH, *ladder((60e6, 125e6, 250e6, 350e6, 1e9), (20,)), (1.5e9, 30e9)) is None
    assert bound(EPOCH, [], [], (1.5e9, 30e9)) is None


def test_the_gradient_is_that_of_the_law():
    """Central differences of ln L in each parameter, the factors' held at the target."""
    N, D, target, h = *ladder((6e7, 3.5e8), (5, 40)), (1.5e9, 3e10), 1e-6
    for i, name in enumerate(("E", "A", "B", "alpha", "beta")):
        def moved(step, name=name):
            law = replace(EPOCH, **{name: getattr(EPOCH, name) * np.exp(step) if name in "EAB" else getattr(EPOCH, name) + step})
            if name == "alpha":
                law = replace(law, A=law.A * target[0]**step)
            if name == "beta":
                law = replace(law, B=law.B * target[1]**step)
            return np.log(law.loss(N, D))
        assert gradient(EPOCH, N, D, target)[:, i] == pytest.approx((moved(h) - moved(-h)) / (2 * h), rel=1e-6, abs=1e-9)


def test_the_bound_is_the_spread_of_real_fits():
    """Fits of noisy ladders scatter as the bound says (Huber's loss costs a little more than least squares)."""
    N, D = ladder((50e6, 125e6, 350e6, 1e9), (5, 20, 80))
    target, rng = (3e9, 6e10), np.random.default_rng(0)
    found = [float(np.log(fit_chinchilla(N, D, EPOCH.loss(N, D) * np.exp(rng.normal(0, 1e-3, len(N)))).predict(*target)))
             for _ in range(40)]
    assert 0.7 < np.std(found) / bound(EPOCH, N, D, target).prediction < 1.6


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9])
def test_points_of_one_trunk_share_their_noise(rho):
    N, D = ladder((60e6, 125e6, 250e6, 350e6), (5, 10, 20, 40))
    clusters, target = np.array([*np.repeat(list("abc"), 4), "d", "d", "e", "f"]), (1.5e9, 30e9)
    found = bound(EPOCH, N, D, target, clusters=clusters, rho=rho)
    assert found.prediction == pytest.approx(correlated(EPOCH, N, D, clusters, target, rho), rel=1e-6)
    alone = bound(EPOCH, N, D, target)
    assert bound(EPOCH, N, D, target, clusters=range(16), rho=rho).prediction == pytest.approx(alone.prediction, rel=1e-9)
    if rho:
        assert found.prediction > 1.1 * alone.prediction


def test_generalised_least_squares_on_shared_luck_scatters_as_the_bound_says():
    """Ladders whose trunks have luck of their own: what GLS of ln L on the law's gradient finds, 4,000 times."""
    N, D = ladder((50e6, 125e6, 350e6, 1e9), (5, 20, 80))
    clusters, target, rng = np.repeat(np.arange(4), 3), (3e9, 6e10), np.random.default_rng(0)
    noise = 1e-3 * (np.sqrt(RHO) * rng.normal(size=(4000, 4))[:, clusters] + np.sqrt(1 - RHO) * rng.normal(size=(4000, 12)))
    jacobian, V = gradient(EPOCH, N, D, target), np.where(np.equal.outer(clusters, clusters), RHO, 0) + (1 - RHO) * np.eye(12)
    weights = np.linalg.solve(jacobian.T @ np.linalg.solve(V, jacobian), jacobian.T @ np.linalg.inv(V))
    spread = np.std(noise @ weights.T @ gradient(EPOCH, *target, target)[0])
    assert bound(EPOCH, N, D, target, clusters=clusters).prediction == pytest.approx(spread, rel=0.04)


def test_ranking_is_by_brute_force_and_the_prior_only_where_needed():
    done, target = ladder((60e6, 125e6, 250e6), (5, 10, 20)), (1.5e9, 30e9)
    trunks = [*"aaabbbccc"]
    candidates = [Candidate("a", 60e6, (60e6 * 40,), 1e18, "a"), Candidate("own", 60e6, (60e6 * 40,), 1e18, "own"),
                  Candidate("d", 350e6, tuple(350e6 * np.array([5.0, 10, 20, 40])), 1e19, "d")]
    now, prior, ranked = rank(EPOCH, *done, trunks, candidates, target)
    assert not prior and now.prediction == pytest.approx(correlated(EPOCH, *done, trunks, target, RHO), rel=1e-6)
    by_hand = {one.name: correlated(EPOCH, np.append(done[0], [one.N] * len(one.D)), np.append(done[1], one.D),
                                    trunks + [one.cluster] * len(one.D), target, RHO) for one in candidates}
    assert [one.name for one, _ in ranked] == sorted(by_hand, key=by_hand.get) and ranked[0][0].name == "d"
    assert by_hand["a"] != pytest.approx(by_hand["own"], rel=1e-3)      # a branch of what is done is no run of its own
    for one, after in ranked:
        assert after.prediction == pytest.approx(by_hand[one.name], rel=1e-6)
        assert after.prediction <= now.prediction
        assert with_all(EPOCH, *done, trunks, candidates, target).prediction <= after.prediction
    empty, prior, after = rank(EPOCH, [], [], [], candidates, target)
    weights = np.array([EPOCH.E, EPOCH.A * target[0]**-EPOCH.alpha, EPOCH.B * target[1]**-EPOCH.beta]) / EPOCH.loss(*target)
    assert prior and empty.prediction == pytest.approx(np.linalg.norm(weights * PRIOR_SD[:3]))
    d = candidates[2]
    assert after[0][1].prediction == pytest.approx(correlated(EPOCH, np.full(4, d.N), np.array(d.D), ["d"] * 4, target, RHO,
                                                              prior=True), rel=1e-6)


def test_the_study_says_what_the_bound_says():
    """The numbers in configs/study_chinchilla.py's docstring."""
    path = ROOT / "configs/study_chinchilla.py"
    rows = [row for row in expand(load_study(path)) if row.recipe == "bf16"]
    target = next((row.params_total, row.tokens) for row in rows if row.held_out)

    def least(keep):
        mine = [row for row in rows if not row.held_out and keep(row)]
        N, D = (np.array([getattr(row, key) for row in mine], dtype=float) for key in ("params_total", "tokens"))
        trunks = [row.parent or row.run for row in mine]
        assert bound(EPOCH, N, D, target, clusters=trunks).prediction == pytest.approx(
            correlated(EPOCH, N, D, trunks, target, RHO), rel=1e-6)
        return f"{100 * bound(EPOCH, N, D, target, clusters=trunks).prediction:.2f} %"
    few = least(lambda row: row.seed == 1337 and row.tokens_per_param in (10, 20) and row.size != "gpt50m")
    text = " ".join(path.read_text().split('"""')[1].split())
    assert f"at least {few} of the loss per 0.1 % of noise" in text
    assert f"that to {least(lambda row: row.seed == 1337)}, the further seeds to {least(lambda row: True)}" in text
