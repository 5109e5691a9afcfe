"""Convert a gap into compute under a law L(N, D), our own or a published one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy.special import stdtrit

from scaling.laws import Points, fit_form
from scaling.laws.forms import CHINCHILLA
from scaling.laws.refusals import Refusal
from scaling.paired.estimates import Estimate
from scaling.paired.gaps import FinishedRun, Pair, loss_of
from scaling.paired.reasons import Reason, reason

BEYOND = math.log(1e100)  # e-folds; what lies beyond is no number to print
SMALLEST = 57e6  # parameters of the smallest model in the points behind EPOCH
Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True)
class Surface:
    """L(N, D) = E + A N^-alpha + B D^-beta in nats per token, D in tokens."""

    name: str  # own, Epoch, Hoffmann
    source: str  # where it comes from, for people
    E: float  # nats
    A: float  # nats, at one parameter
    B: float  # nats, at one token
    alpha: float  # exponent of N
    beta: float  # exponent of D
    # of (ln B, beta); null: the constants are taken as exact
    covariance: np.ndarray | None = None
    counts: str = "total"  # which parameters N is: params_total, params_nonembed
    # of (ln A, alpha); null: the constants are taken as exact
    size_covariance: np.ndarray | None = None
    law_dof: int | None = None  # degrees of freedom of both covariances; null: many

    def loss(self, N: Number, D: Number) -> Number:
        """Nats per token; N, D: numbers or arrays of one shape."""
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta

    def slope(self, D: float) -> float:
        """s = -dL/d ln D in nats: what one e-fold of tokens gains."""
        return self.beta * self.B * D**-self.beta

    def extra_tokens(self, gap: float, D: float) -> float | None:
        """r: how many times the tokens make up `gap` nats at D, L(N, r D) + gap = L(N, D); None
        where no number does."""
        return _power(1 - gap / (self.B * D**-self.beta), -1 / self.beta)

    def effective_parameters(self, gap: float, N: float) -> float | None:
        """phi = N_eff / N, L(phi N, D) = L(N, D) + gap; None where a negative gap is more than any
        size gains, or A is 0."""
        if not self.A:
            return None
        return _power(1 + gap / (self.A * N**-self.alpha), -1 / self.alpha)

    def error_of_extra_tokens(self, gap: float, D: float) -> float:
        """Standard error of ln extra_tokens by the law's own, at a gap that is exact."""
        if self.covariance is None:
            return 0.0
        return _error_of_power(gap / (self.B * D**-self.beta), self.beta, D, self.covariance)

    def error_of_effective_parameters(self, gap: float, N: float) -> float:
        """Standard error of ln effective_parameters by the law's own, at a gap that is exact."""
        if self.size_covariance is None:
            return 0.0
        share = -gap / (self.A * N**-self.alpha)
        return _error_of_power(share, self.alpha, N, self.size_covariance)

    def speedup(
        self,
        D: float,
        gap: float,
        gap_se: float | None,
        ratio: float,
        ratio_se_log: float = 0.0,
    ) -> tuple[float | None, float | None]:
        """(S, standard error of ln S) of S = ratio / r, how much sooner FP8 reaches BF16's loss for
        a throughput `ratio` and a gap in nats at D tokens. None where no number of tokens makes up
        the gap; no error without gap_se. SE(ln S)^2 = SE(ln ratio)^2 + (gap_se / s)^2 + (gap SE_s /
        s^2)^2 with SE_s of the slope s from the covariance."""
        r, s = self.extra_tokens(gap, D), self.slope(D)
        if r is None:
            return None, None
        if gap_se is None:
            return ratio / r, None
        variance = ratio_se_log**2 + (gap_se / s) ** 2
        if self.covariance is not None:
            gradient = s * np.array([1.0, 1 / self.beta - math.log(D)])  # of s by ln B, by beta
            slope_variance = max(float(gradient @ self.covariance @ gradient), 0.0)
            variance += gap**2 * slope_variance / s**4
        return ratio / r, math.sqrt(variance)


def _power(base: float, exponent: float) -> float | None:
    """base^exponent; None for a base that is not above 0, or a result beyond 10^100 either way."""
    log = exponent * math.log(base) if base > 0 else math.inf
    return base**exponent if abs(log) < BEYOND else None


def _error_of_power(share: float, exponent: float, x: float, covariance: np.ndarray) -> float:
    """Standard error of ln (1 - share) / exponent, share: a gap over factor x^-exponent;
    covariance: of (ln factor, exponent). By the delta method."""
    of_factor = share / (1 - share) / exponent
    of_exponent = -math.log1p(-share) / exponent**2 - of_factor * math.log(x)
    gradient = np.array([of_factor, of_exponent])
    return math.sqrt(max(float(gradient @ covariance @ gradient), 0.0))


# The minimum of the summed Huber(1e-3) on Epoch AI's 240 points; the constants printed in their
# paper (482.01, 2085.43, 1.8172, .3478, .3658) are the least-absolute-deviation fit of the same
# points.
EPOCH = Surface(
    "Epoch",
    "Besiroglu et al. 2024, arXiv:2404.10102 (Huber optimum of its 240 points)",
    E=1.817218,
    A=477.826,
    B=2143.417,
    alpha=0.347310,
    beta=0.367172,
)
# As printed, rounded: Besiroglu et al. show that these do not minimise their own objective.
HOFFMANN = Surface(
    "Hoffmann",
    "Hoffmann et al. 2022, arXiv:2203.15556, approach 3, as printed",
    E=1.69,
    A=406.4,
    B=410.7,
    alpha=0.34,
    beta=0.28,
)


# ------------------------------------------------------------------------- laws of our own runs


def own_surface(
    N: np.ndarray,
    D: np.ndarray,
    L: np.ndarray,
    trunks: np.ndarray,
    counts: str = "total",
    source: str = "",
) -> tuple[Surface | None, Refusal | None]:
    """Chinchilla's law of our BF16 runs, arrays of shape (runs,), trunks naming their trajectories;
    or None, and why. counts: which parameters N is, source: the Surface's."""
    fit = fit_form(CHINCHILLA, Points(N, D, 6 * N * D, L, trunks), resamples=1000)
    if not fit.identified:
        return None, fit.reason
    optimum = fit.optimum
    assert optimum is not None and optimum.covariance is not None
    # theta is ln E, ln A, ln B, alpha, beta
    size_covariance = _natural_covariance(optimum.covariance, (1, 3), optimum.centres[0])
    covariance = _natural_covariance(optimum.covariance, (2, 4), optimum.centres[1])
    values = [fit.parameters[key] for key in ("E", "A", "B", "alpha", "beta")]
    E, A, B, alpha, beta = [value for value in values if value is not None]
    surface = Surface(
        "own",
        source,
        E,
        A,
        B,
        alpha,
        beta,
        covariance,
        counts,
        size_covariance=size_covariance,
        law_dof=optimum.dof,
    )
    return surface, None


def _natural_covariance(covariance: np.ndarray, rows: tuple[int, int], centre: float) -> np.ndarray:
    """(2, 2) of (ln factor, exponent) from that of the solver's parameters, whose factor stands at
    the centre of ln x: ln factor = theta + exponent * centre."""
    to_natural = np.array([[1.0, centre], [0.0, 1.0]])
    return to_natural @ covariance[np.ix_(rows, rows)] @ to_natural.T


def local_surface(D: np.ndarray, L: np.ndarray, source: str = "") -> Surface | None:
    """L = B D^-beta through the BF16 runs of one size, D and L of shape (runs,): what more tokens
    gain around these D; None unless the loss falls."""
    if len(np.unique(D)) < 2:
        return None
    slope, height = np.polyfit(np.log(D), np.log(L), 1)
    if slope >= 0:
        return None
    B, beta = math.exp(height), -float(slope)
    return Surface("own, at this N", source, E=0.0, A=0.0, B=B, alpha=1.0, beta=beta)


@dataclass(frozen=True)
class Surfaces:
    """The laws under which gaps cost compute."""

    of_size: dict[int, list[Surface]]  # N of the BF16 runs -> ours where there is one, published
    no_own_law: Refusal | None  # why the runs give no law over all sizes

    @property
    def own(self) -> Surface | None:
        """Chinchilla's law of the study's BF16 runs."""
        for surface in next(iter(self.of_size.values()), []):
            if surface.name == "own":
                return surface
        return None


def surfaces(
    runs: Sequence[FinishedRun], evaluation: str, own_source: str = "", local_source: str = ""
) -> Surfaces:
    """Of each size of the BF16 `runs` its laws: our own, else its size's, with Epoch's; else two
    published ones. The sources are those of our own laws."""
    # floats: N D overflows no int64
    N = np.array([run.N for run in runs], dtype=float)
    D = np.array([run.tokens for run in runs], dtype=float)
    L = np.array([loss_of(run, evaluation) for run in runs])
    trunks = np.array([run.trunk for run in runs])
    counts = runs[0].convention if runs else "total"
    own_law, no_own_law = own_surface(N, D, L, trunks, counts, own_source)
    laws = {
        int(size): own_law or local_surface(D[size == N], L[size == N], local_source)
        for size in np.unique(N)
    }
    published = [EPOCH] if any(laws.values()) else [EPOCH, HOFFMANN]
    of_size = {size: [law, *published] if law else published for size, law in laws.items()}
    return Surfaces(of_size, no_own_law)


# ------------------------------------------------------------------------------------------ costs


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of FP8 over those of BF16, over pairs."""

    ratio: float | None  # geometric mean
    se_log: float | None  # standard error of its logarithm; null with one pair
    reason: Reason | str | None  # why there is no ratio; in a file its sentence


@dataclass(frozen=True)
class Cost:
    """What a gap costs under one law; an interval's end that no number gives is null."""

    law: str  # name of the law
    extra_tokens: float | None  # r, how many times the tokens; also the extra compute at fixed size
    extra_tokens_ci95: list[float | None]  # low, high
    effective_parameters: float | None  # phi, the share of the parameters that are worth as much
    effective_parameters_ci95: list[float | None]  # low, high
    speedup: float | None  # throughput over r
    speedup_ci95: list[float | None]  # low, high
    reason: Reason | str | None  # why there is no speed-up; in a file its sentence


def cost_of_gap(surface: Surface, N: float, D: float, nats: Estimate, speed: Throughput) -> Cost:
    """What an estimated gap in nats costs at N, D, with 95 % intervals."""
    tokens, tokens_low, tokens_high = (
        _mapped(lambda gap: surface.extra_tokens(gap, D), gap)
        for gap in (nats.mean, nats.low, nats.high)
    )
    # more loss is worth fewer parameters: the ends change places
    parameters, parameters_high, parameters_low = (
        _mapped(lambda gap: surface.effective_parameters(gap, N), gap)
        for gap in (nats.mean, nats.low, nats.high)
    )
    speedup, ends = _speedup(surface, D, nats, speed)
    why = speed.reason
    if tokens is not None:
        half = _t_of_law(surface) * surface.error_of_extra_tokens(nats.mean, D)
        tokens_low, tokens_high = (_widened(tokens, end, half) for end in (tokens_low, tokens_high))
    if parameters is not None:
        half = _t_of_law(surface) * surface.error_of_effective_parameters(nats.mean, N)
        ends_of_parameters = (parameters_low, parameters_high)
        parameters_low, parameters_high = (
            _widened(parameters, end, half) for end in ends_of_parameters
        )
    if tokens is None:
        most = surface.B * D**-surface.beta
        why = reason("gap_beyond_data", nats=nats.mean, law=surface.name, most=most)
    return Cost(
        law=surface.name,
        extra_tokens=tokens,
        extra_tokens_ci95=[tokens_low, tokens_high],
        effective_parameters=parameters,
        effective_parameters_ci95=[parameters_low, parameters_high],
        speedup=speedup,
        speedup_ci95=ends,
        reason=None if speedup else why,
    )


def _t_of_law(surface: Surface) -> float:
    """Standard errors of the law to an end of its 95 % interval."""
    return float(stdtrit(surface.law_dof or math.inf, 0.975))


def _widened(value: float, end: float | None, half: float) -> float | None:
    """An interval's end by the gap alone, moved out by the law's error `half` in the logarithm,
    which is independent of the gap's. None beyond BEYOND."""
    if end is None or not half:
        return end
    distance = math.log(end / value)
    widened = math.hypot(distance, half)
    if widened >= BEYOND:
        return None
    return value * math.exp(math.copysign(widened, distance))


def _mapped(law, gap: float | None) -> float | None:
    return None if gap is None else law(gap)


def _speedup(
    surface: Surface, D: float, nats: Estimate, speed: Throughput
) -> tuple[float | None, list[float | None]]:
    """(speed-up, its 95 % interval)."""
    if speed.ratio is None or surface.extra_tokens(nats.mean, D) is None:
        return None, [None, None]
    speedup, error = surface.speedup(D, nats.mean, nats.se, speed.ratio, speed.se_log or 0.0)
    # one ratio of throughputs has no error to pass on
    if speedup is None or error is None or speed.se_log is None:
        return speedup, [None, None]
    half = float(stdtrit(nats.n - 1, 0.975)) * error
    if half >= BEYOND:
        return speedup, [None, None]
    return speedup, [speedup * math.exp(-half), speedup * math.exp(half)]


def throughput(pairs: Sequence[Pair]) -> Throughput:
    """Geometric mean of FP8's tokens per second over BF16's, or why there is none."""
    ratios = np.log([pair.tok_per_s_ratio for pair in pairs if pair.tok_per_s_ratio])
    devices = [pair.fp8.device for pair in pairs]
    if "" in devices:
        return Throughput(None, None, reason("no_speed_in_table"))
    if any(device.startswith("cpu") for device in devices):
        return Throughput(None, None, reason("cpu_has_no_fp8"))
    if not len(ratios):
        return Throughput(None, None, reason("other_devices"))
    se = None
    if len(ratios) > 1:
        se = float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios))
    return Throughput(float(np.exp(ratios.mean())), se, None)
