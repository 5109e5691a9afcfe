"""Convert a gap into compute under a law L(N, D), our own or a published one."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scaling.laws import Points, fit_form
from scaling.paired.estimates import Estimate

NO_SPEED = "the table gives no speed"

BEYOND = math.log(1e100)  # e-folds; what lies beyond is no number to print


@dataclass(frozen=True)
class Surface:
    """L(N, D) = E + A N^-alpha + B D^-beta in nats per token, D in tokens."""

    name: str
    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float
    covariance: np.ndarray | None = None  # of (ln B, beta); None: the constants are taken as exact
    counts: str = "total"  # which parameters N is: params_total, params_nonembed

    def loss(self, N, D):
        """Nats per token; N, D: numbers or arrays of one shape."""
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta

    def slope(self, D) -> float:
        """s = -dL/d ln D in nats: what one e-fold of tokens gains."""
        return self.beta * self.B * D**-self.beta

    def extra_tokens(self, gap: float, D) -> float | None:
        """r: how many times the tokens make up `gap` nats at D, L(N, r D) + gap = L(N, D); None
        where no number does."""
        return _power(1 - gap / (self.B * D**-self.beta), -1 / self.beta)

    def effective_parameters(self, gap: float, N) -> float | None:
        """phi = N_eff / N, L(phi N, D) = L(N, D) + gap; None where a negative gap is more than any
        size gains, or A is 0."""
        return _power(1 + gap / (self.A * N**-self.alpha), -1 / self.alpha) if self.A else None

    def speedup(
        self, D, gap: float, gap_se: float | None, ratio: float, ratio_se_log=0.0
    ) -> tuple[float | None, float | None]:
        """(S, standard error of ln S) of S = ratio / r, how much sooner FP8 reaches BF16's loss for
        a throughput `ratio` and a gap in nats at D tokens. None where no number of tokens makes up
        the gap; no error without gap_se. SE(ln S)^2 = SE(ln ratio)^2 + (gap_se / s)^2 + (gap SE_s /
        s^2)^2 with SE_s of the slope s from the covariance."""
        r, s = self.extra_tokens(gap, D), self.slope(D)
        if r is None or gap_se is None:
            return r and ratio / r, None
        gradient = s * np.array([1.0, 1 / self.beta - math.log(D)])  # of s by ln B, by beta
        variance = (
            0.0
            if self.covariance is None
            else max(float(gradient @ self.covariance @ gradient), 0.0)
        )
        return ratio / r, math.sqrt(ratio_se_log**2 + (gap_se / s) ** 2 + gap**2 * variance / s**4)


def _power(base: float, exponent: float) -> float | None:
    """base^exponent; None for a base that is not above 0, or a result beyond 10^100 either way."""
    log = exponent * math.log(base) if base > 0 else math.inf
    return base**exponent if abs(log) < BEYOND else None


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

SMALLEST = 57e6  # parameters of the smallest model in those points


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


def own_surface(
    N, D, L, trunks, counts: str = "total", baseline: str = "BF16"
) -> tuple[Surface | None, str | None]:
    """Chinchilla's law of our BF16 runs, arrays of shape (runs,), trunks naming their trajectories;
    or None, and why. baseline: what their arm is called."""
    fit = fit_form("chinchilla", Points(N, D, 6 * N * D, L, trunks), resamples=1000)
    if not fit.identified:
        return None, fit.reason
    # The solver's B is the factor at the centre of ln D: ln B = b + beta * centre.
    to_natural = np.array([[1.0, fit.optimum.centres[1]], [0.0, 1.0]])
    return (
        Surface(
            "own",
            f"Chinchilla's form fitted to these {fit.n} {baseline} runs",
            *(fit.parameters[key] for key in ("E", "A", "B", "alpha", "beta")),
            to_natural @ fit.optimum.covariance[np.ix_((2, 4), (2, 4))] @ to_natural.T,
            counts,
        ),
        None,
    )


def local_surface(D, L, baseline: str = "BF16") -> Surface | None:
    """L = B D^-beta through the BF16 runs of one size: what more tokens gain around these D; None
    unless the loss falls."""
    slope, height = np.polyfit(np.log(D), np.log(L), 1) if len(np.unique(D)) > 1 else (0.0, 0.0)
    return (
        Surface(
            "own, at this N",
            f"power law over tokens through the {baseline} runs of each size",
            E=0.0,
            A=0.0,
            B=math.exp(height),
            alpha=1.0,
            beta=-float(slope),
        )
        if slope < 0
        else None
    )


def surfaces(
    runs, loss_key: str, baseline: str = "BF16"
) -> tuple[dict[int, list[Surface]], str | None]:
    """N of the BF16 `runs` -> its laws: our own, else its size's, with Epoch's; else two published
    ones; why not ours. baseline: what their arm is called."""
    # N D: no int64
    N, D, L = (
        np.array([getattr(run, key) for run in runs], dtype=float)
        for key in ("N", "tokens", loss_key)
    )
    own, reason = own_surface(
        N,
        D,
        L,
        np.array([run.trunk for run in runs]),
        runs[0].convention if runs else "total",
        baseline,
    )
    ours = {
        int(size): own or local_surface(D[size == N], L[size == N], baseline)
        for size in np.unique(N)
    }
    published = [EPOCH] if any(ours.values()) else [EPOCH, HOFFMANN]
    return {size: [law, *published] if law else published for size, law in ours.items()}, reason


def costs(surface: Surface, N, D, nats: Estimate, ratio, se_log, reason) -> dict:
    """What an estimated gap in nats costs at N, D, with 95 % intervals; None, with a reason.
    extra_tokens: r, also the extra compute at fixed size. effective_parameters: phi. speedup:
    throughput `ratio` over r. reason: why there is no ratio."""
    tokens, parameters = (
        [None if gap is None else law(gap, at) for gap in (nats.mean, nats.low, nats.high)]
        for law, at in ((surface.extra_tokens, D), (surface.effective_parameters, N))
    )
    speedup, ends = None, [None, None]
    if tokens[0] is None:
        reason = (
            f"no number of tokens makes up {nats.mean:.4f} nats under {surface.name}, by which more"
            f" data gains at most {surface.B * D**-surface.beta:.4f}, or next to nothing"
        )
    elif ratio is not None:
        speedup, error = surface.speedup(D, nats.mean, nats.se, ratio, se_log or 0.0)
        if (
            None not in (error, se_log)
            and (spread := float(stdtrit(nats.n - 1, 0.975)) * error) < BEYOND
        ):
            # one ratio of throughputs has no error to pass on
            ends = [speedup * math.exp(-spread), speedup * math.exp(spread)]
    return {
        "law": surface.name,
        "extra_tokens": tokens[0],
        "extra_tokens_ci95": tokens[1:],
        "effective_parameters": parameters[0],
        "effective_parameters_ci95": parameters[:0:-1],
        "speedup": speedup,
        "speedup_ci95": ends,
        "reason": None if speedup else reason,
    }


def throughput(chosen) -> dict:
    """Geometric mean of FP8's tokens per second over BF16's, its logarithm's standard error, or why
    there is none."""
    ratios = np.log([p.tok_per_s_ratio for p in chosen if p.tok_per_s_ratio])
    devices = [p.fp8.device for p in chosen]
    if "" in devices:
        return {"ratio": None, "se_log": None, "reason": NO_SPEED}
    if any(device.startswith("cpu") for device in devices):
        reason = "a CPU has no FP8 units: its throughput means nothing"
        return {"ratio": None, "se_log": None, "reason": reason}
    if not len(ratios):
        reason = "the arms ran on different devices, numbers of GPUs or compile settings"
        return {"ratio": None, "se_log": None, "reason": reason}
    se = float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
    return {"ratio": float(np.exp(ratios.mean())), "se_log": se, "reason": None}
