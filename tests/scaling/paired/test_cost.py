"""scaling/paired/cost.py: what a gap costs, against other solvers, Monte Carlo and published
tables."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq, curve_fit
from scipy.stats import t as student

from scaling.laws.refusals import NarrowRatios, SeveralRatios
from scaling.paired.cost import (
    EPOCH,
    Cost,
    Surface,
    Throughput,
    cost_of_gap,
    local_surface,
    own_surface,
    surfaces,
    throughput,
)
from scaling.paired.estimates import estimate
from scaling.paired.reasons import Reason
from scaling.records import read_runs
from tests.helpers.paired_runs import fake_pair
from tests.helpers.scaling_runs import write_branches

N, D = 3e8, 6e9


@pytest.mark.parametrize(
    "ratio, expected",
    [
        (1.10, [1.076, 1.041, 0.985]),
        (1.17, [1.145, 1.108, 1.047]),
        (1.28, [1.252, 1.212, 1.146]),
    ],
)
def test_speedups_are_those_of_the_published_table(ratio: float, expected: list[float]) -> None:
    loss = EPOCH.loss(1.5e9, 30e9)
    speedups = [
        EPOCH.speedup(30e9, share * loss, None, ratio)[0] for share in (0.001, 0.0025, 0.005)
    ]
    assert np.round(speedups, 3).tolist() == expected


@pytest.mark.parametrize("gap", [-0.01, 0.004, 0.03])
def test_extra_tokens_solve_the_law(gap: float) -> None:
    def missing(r: float) -> float:
        return EPOCH.loss(N, r * D) + gap - EPOCH.loss(N, D)

    expected = brentq(missing, 0.1, 50, xtol=1e-14)
    assert EPOCH.extra_tokens(gap, D) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("gap", [-0.01, 0.004, 0.03])
def test_effective_parameters_solve_the_law(gap: float) -> None:
    def missing(phi: float) -> float:
        return EPOCH.loss(phi * N, D) - gap - EPOCH.loss(N, D)

    expected = brentq(missing, 0.1, 50, xtol=1e-14)
    assert EPOCH.effective_parameters(gap, N) == pytest.approx(expected, rel=1e-9)


def test_the_slope_is_what_an_e_fold_of_tokens_gains() -> None:
    step = 1e-5
    less, more = EPOCH.loss(N, D * math.exp(-step)), EPOCH.loss(N, D * math.exp(step))
    assert EPOCH.slope(D) == pytest.approx((less - more) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("beta", [1e-17, 1e-5, 1e-3, EPOCH.beta])
@pytest.mark.parametrize("gap", [-0.5, 0.0, 1.9])
def test_an_almost_flat_law_gives_positive_numbers_or_none(beta: float, gap: float) -> None:
    """Runs of one size whose losses fall by nothing: powers of it overflow."""
    law = Surface("flat", "", E=0.0, A=0.0, B=2.0, alpha=1.0, beta=beta)
    nats = estimate([gap - 0.01, gap + 0.02])
    cost = cost_of_gap(law, 5e7, 1e9, nats, Throughput(1.2, 0.01, None))
    ends = [*cost.extra_tokens_ci95, *cost.speedup_ci95]
    for number in (cost.extra_tokens, cost.speedup, *ends):
        assert number is None or (math.isfinite(number) and number > 0)
    assert cost.speedup is not None or code_of(cost.reason) == "gap_beyond_data"


def code_of(reason: Reason | str | None) -> str:
    assert isinstance(reason, Reason)
    return reason.code


def test_a_law_without_a_term_of_size_has_no_effective_parameters() -> None:
    law = Surface("flat", "", E=0.0, A=0.0, B=2.0, alpha=1.0, beta=0.3)
    assert law.effective_parameters(1.0, 5e7) is None


def test_a_gain_that_no_size_gives_has_no_effective_parameters() -> None:
    most = EPOCH.A * 1e8**-EPOCH.alpha
    assert EPOCH.effective_parameters(-1.01 * most, 1e8) is None


class TestErrorOfTheSpeedUp:
    """Gap, throughput and the law's (ln B, beta) drawn with small errors; the delta method must
    give their spread."""

    gap, gap_se, ratio, ratio_se = 0.006, 0.0006, 1.17, 0.004
    covariance = np.array([[0.25, 0.0123], [0.0123, 0.00061]]) / 50
    law = replace(EPOCH, covariance=covariance)

    def drawn_law(self) -> tuple[np.ndarray, np.ndarray]:
        """B and beta, 200,000 each."""
        shift = np.random.default_rng(0).multivariate_normal([0, 0], self.covariance, 200_000)
        return EPOCH.B * np.exp(shift[:, 0]), EPOCH.beta + shift[:, 1]

    def drawn_logs(self) -> np.ndarray:
        rng = np.random.default_rng(1)
        B, beta = self.drawn_law()
        gaps = rng.normal(self.gap, self.gap_se, len(B))
        log_ratios = math.log(self.ratio) + rng.normal(0, self.ratio_se, len(B))
        return log_ratios + np.log(1 - gaps / (B * D**-beta)) / beta

    def test_is_that_of_a_monte_carlo(self) -> None:
        _, se_log = self.law.speedup(D, self.gap, self.gap_se, self.ratio, self.ratio_se)
        # s, not r's exact derivative, is in the formula: a first-order one in gap / (B D^-beta),
        # here 3 %
        assert se_log == pytest.approx(self.drawn_logs().std(), rel=0.05)

    def test_its_value_is_the_mean_of_the_monte_carlo(self) -> None:
        value, _ = self.law.speedup(D, self.gap, self.gap_se, self.ratio, self.ratio_se)
        drawn = self.drawn_logs()
        assert value is not None
        assert math.log(value) == pytest.approx(drawn.mean(), abs=0.1 * drawn.std())

    def test_the_slope_has_the_spread_of_the_law(self) -> None:
        _, se_log = self.law.speedup(D, self.gap, 0.0, self.ratio)
        B, beta = self.drawn_law()
        assert se_log is not None
        slope_se = se_log * self.law.slope(D) ** 2 / self.gap
        assert slope_se == pytest.approx((beta * B * D**-beta).std(), rel=0.03)


class TestErrorOfTheLaw:
    """Its factor and exponent drawn with small errors at a gap that is exact; the delta method must
    give the spread of what the gap costs."""

    gap = 0.03
    covariance = TestErrorOfTheSpeedUp.covariance
    law = replace(EPOCH, covariance=covariance, size_covariance=covariance, law_dof=7)

    def drawn(self, factor: float, exponent: float) -> tuple[np.ndarray, np.ndarray]:
        """200,000 of each."""
        shift = np.random.default_rng(0).multivariate_normal([0, 0], self.covariance, 200_000)
        return factor * np.exp(shift[:, 0]), exponent + shift[:, 1]

    def test_of_extra_tokens_is_that_of_a_monte_carlo(self) -> None:
        B, beta = self.drawn(EPOCH.B, EPOCH.beta)
        logs = -np.log(1 - self.gap / (B * D**-beta)) / beta
        error = self.law.error_of_extra_tokens(self.gap, D)
        assert error == pytest.approx(logs.std(), rel=0.05)

    def test_of_effective_parameters_is_that_of_a_monte_carlo(self) -> None:
        A, alpha = self.drawn(EPOCH.A, EPOCH.alpha)
        logs = -np.log(1 + self.gap / (A * N**-alpha)) / alpha
        error = self.law.error_of_effective_parameters(self.gap, N)
        assert error == pytest.approx(logs.std(), rel=0.05)

    @pytest.mark.parametrize("what", ["extra_tokens", "effective_parameters"])
    def test_widens_the_interval_of_the_gap(self, what: str) -> None:
        """As two independent errors of the logarithm add."""
        gaps = estimate([0.029, 0.031, 0.03])
        costs = [
            cost_of_gap(law, N, D, gaps, Throughput(None, None, None)) for law in (EPOCH, self.law)
        ]
        value = getattr(costs[0], what)
        alone, both = (np.log(getattr(cost, f"{what}_ci95")) - np.log(value) for cost in costs)
        place = D if what == "extra_tokens" else N
        of_law = student.ppf(0.975, 7) * getattr(self.law, f"error_of_{what}")(0.03, place)
        assert both == pytest.approx(np.sign(alone) * np.hypot(alone, of_law))

    def test_beyond_all_numbers_gives_an_interval_no_end(self) -> None:
        """Where hardly any number of tokens makes up the gap. It ended in an OverflowError."""
        most = EPOCH.B * D**-EPOCH.beta
        gaps = estimate(np.array([0.99998, 0.99999, 0.999985]) * most)
        cost = cost_of_gap(self.law, N, D, gaps, Throughput(None, None, None))
        assert cost.extra_tokens is not None and cost.extra_tokens_ci95 == [None, None]


NATS = estimate([0.004, 0.006, 0.005])


def cost_with(se_log: float | None) -> Cost:
    return cost_of_gap(EPOCH, N, D, NATS, Throughput(1.2, se_log, None))


def test_the_interval_of_a_speed_up_counts_the_pairs() -> None:
    value, se_log = EPOCH.speedup(D, 0.005, NATS.se, 1.2, 0.002)
    assert value is not None and se_log is not None
    half = student.ppf(0.975, 2) * se_log
    expected = [math.log(value) - half, math.log(value) + half]
    assert np.log(cost_with(0.002).speedup_ci95) == pytest.approx(expected)


def test_the_interval_of_the_extra_tokens_is_that_of_the_gap() -> None:
    ends = [EPOCH.extra_tokens(gap, D) for gap in (NATS.low, NATS.high)]
    assert cost_with(0.002).extra_tokens_ci95 == ends


def test_one_ratio_of_throughputs_has_an_unknown_error_not_none() -> None:
    assert cost_with(None).speedup_ci95 == [None, None]


def test_our_own_law_has_the_slope_and_error_of_a_second_solver() -> None:
    sizes, tokens = np.meshgrid([5e7, 1.25e8, 2.5e8, 3.5e8], [1e9, 2e9, 4e9, 8e9])
    n, d = sizes.ravel(), tokens.ravel()
    loss = EPOCH.loss(n, d) * np.exp(np.random.default_rng(1).normal(0, 2e-4, len(n)))

    # natural parameters, plain squares: noise is well below Huber's delta
    def log_law(_: np.ndarray, e: float, a: float, b: float, alpha: float, beta: float):
        return np.log(np.exp(e) + np.exp(a) * n**-alpha + np.exp(b) * d**-beta)

    start = [math.log(EPOCH.E), math.log(EPOCH.A), math.log(EPOCH.B), EPOCH.alpha, EPOCH.beta]
    best, covariance = curve_fit(log_law, n, np.log(loss), start)
    slope = best[4] * math.exp(best[2]) * 6e9 ** -best[4]
    gradient = np.array([0, 0, slope, 0, slope * (1 / best[4] - math.log(6e9))])
    own, reason = own_surface(n, d, loss, np.arange(len(n)))
    assert own is not None and reason is None
    assert own.size_covariance == pytest.approx(covariance[np.ix_((1, 3), (1, 3))], rel=0.05)
    assert own.slope(6e9) == pytest.approx(slope, rel=2e-3)
    _, se_log = own.speedup(6e9, 0.01, 0.0, 1.0)
    assert se_log is not None
    error = se_log * slope**2 / 0.01
    assert error == pytest.approx(math.sqrt(gradient @ covariance @ gradient), rel=0.05)


def test_runs_on_one_ray_give_no_law_and_the_reason() -> None:
    sizes = np.geomspace(1e8, 1e9, 6)
    own, reason = own_surface(sizes, 20 * sizes, EPOCH.loss(sizes, 20 * sizes), sizes)
    assert own is None and isinstance(reason, NarrowRatios | SeveralRatios)


def test_a_loss_that_rises_gives_no_law_of_one_size() -> None:
    assert local_surface(np.array([1e6, 2e6]), np.array([2.0, 2.1])) is None


def test_our_own_law_comes_before_epochs(tmp_path: Path) -> None:
    large = (50_000_000, 200_000_000, 800_000_000)  # 6 N D does not fit 64 bits
    runs, _ = read_runs([write_branches(tmp_path, sizes=large, recipes=("bf16",))])
    laws = surfaces(runs, "bf16")
    own, epoch = laws.of_size[50_000_000]
    assert laws.no_own_law is None and laws.own == own and epoch == EPOCH
    assert own.beta == pytest.approx(0.3, abs=0.05)


def throughput_of(*ratios: float | None) -> Throughput:
    return throughput([fake_pair(0, speed=ratio) for ratio in ratios])


def test_throughput_is_a_geometric_mean() -> None:
    speed = throughput_of(1.1, 1.3, None)
    expected = math.sqrt(1.1 * 1.3), math.log(1.3 / 1.1) / 2
    assert (speed.ratio, speed.se_log) == pytest.approx(expected)


def test_a_single_throughput_has_no_error() -> None:
    assert throughput_of(1.2).se_log is None


@pytest.mark.parametrize(
    "device, code",
    [("GPU", "other_devices"), ("cpu EPYC", "cpu_has_no_fp8"), ("", "no_speed_in_table")],
)
def test_no_throughput_has_its_reason(device: str, code: str) -> None:
    speed = throughput([fake_pair(0, speed=None, device=device)])
    assert speed.ratio is None and code_of(speed.reason) == code
