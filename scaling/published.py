"""Convert a loss gap into compute under a law L(N, D), ours or published; give what published laws say FP8 costs.

A Surface is Chinchilla's form with one set of constants, ours or published. The precision laws of Kumar et al. and Sun
et al. disagree by a factor of 10 to 85 at 125M to 1.5B parameters, and in whether the gap falls or rises with size: they
are drawn beside measured points, never used in place of them. N of a published law is the total parameter count, N of our
own the one that the study counts, D the training tokens. It matters where embeddings are a large share: with N without them
Kumar's gap is a fifth larger at 125M, and 2.2 times as large at 16M of which 13M are vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from runtime.cli import UserError
from scaling.intervals import with_bootstrap
from scaling.laws import ONE_RAY, Points, fit_chinchilla

BEYOND = math.log(1e100)        # e-folds; what lies beyond is no number to print


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
    covariance: np.ndarray | None = None    # of (ln B, beta); None: the constants are taken as exact
    counts: str = "total"                   # which parameters N is, one of records.CONVENTIONS

    def N_of(self, record) -> int:
        """A run's (records.Record) parameters as this law counts them."""
        return getattr(record, f"params_{self.counts}")

    def loss(self, N, D):
        """Nats per token at N parameters, D tokens (numbers or arrays of one shape)."""
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta

    def slope(self, D) -> float:
        """s = -dL/d ln D in nats: what one e-fold of tokens gains."""
        return self.beta * self.B * D**-self.beta

    def slope_se(self, D) -> float:
        """Standard error of slope(D) from the fit's covariance; 0 where the constants are taken as exact."""
        if self.covariance is None:
            return 0.0
        gradient = self.slope(D) * np.array([1.0, 1 / self.beta - math.log(D)])     # by ln B, by beta
        return float(math.sqrt(max(gradient @ self.covariance @ gradient, 0.0)))

    def extra_tokens(self, gap: float, D) -> float | None:
        """r: how many times the tokens a model needs to make up `gap` nats at D; below 1 for a negative gap.

        L(N, r D) + gap = L(N, D). None where the gap exceeds B D^-beta: no number of tokens makes it up; or where the law is
        so flat that r is beyond measure."""
        return _power(1 - gap / (self.B * D**-self.beta), -1 / self.beta)

    def effective_parameters(self, gap: float, N) -> float | None:
        """phi = N_eff / N: the share of the parameters with which the law reaches a loss `gap` nats higher.

        L(phi N, D) = L(N, D) + gap. None where a negative gap exceeds A N^-alpha: no size gains that much; or where the law
        knows no N."""
        if self.A == 0:                 # a law of one size
            return None
        return _power(1 + gap / (self.A * N**-self.alpha), -1 / self.alpha)


def _power(base: float, exponent: float) -> float | None:
    """base^exponent; None for a base that is not above 0, or a result beyond 10^100 either way."""
    log = exponent * math.log(base) if base > 0 else math.inf
    return base**exponent if abs(log) < BEYOND else None


# The minimum of the summed Huber(1e-3) on Epoch AI's 240 points; the constants printed in their paper (482.01, 2085.43,
# 1.8172, .3478, .3658) are the least-absolute-deviation fit of the same points.
EPOCH = Surface("Epoch", "Besiroglu et al. 2024, arXiv:2404.10102 (Huber optimum of its 240 points)",
                E=1.817218, A=477.826, B=2143.417, alpha=0.347310, beta=0.367172)
LOCAL = "own, at this N"
SMALLEST = 57e6                 # parameters of the smallest model in those points
# As printed, rounded: Besiroglu et al. show that these do not minimise their own objective.
HOFFMANN = Surface("Hoffmann", "Hoffmann et al. 2022, arXiv:2203.15556, approach 3, as printed",
                   E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)


def own_surface(N, D, L, trunks, counts: str = "total") -> tuple[Surface | None, str | None]:
    """Chinchilla's law of our BF16 runs, arrays of shape (runs,); or None with the reason why they do not give one.

    trunks: a label for each run; runs that share one are branches of one trajectory, for the slope's error. counts: what N
    counts."""
    ratio = np.asarray(D) / np.asarray(N)
    if len(ratio) and ratio.max() <= ONE_RAY * ratio.min():     # as fit_chinchilla would find, seconds later
        return None, f"one ray of {ratio.mean():.3g} tokens per parameter does not separate N from D"
    try:
        fit = with_bootstrap(fit_chinchilla(N, D, L), Points(N, D, 6 * N * D, L, trunks))
    except UserError as error:
        return None, str(error)
    if not fit.identified:
        return None, fit.reason
    # The solver's B is the factor at the centre of ln D: ln B = b + beta * centre.
    to_natural = np.array([[1.0, fit.optimum.centres[1]], [0.0, 1.0]])
    return Surface("own", f"Chinchilla's form fitted to these {fit.n} BF16 runs",
                   *(fit.parameters[key] for key in ("E", "A", "B", "alpha", "beta")),
                   to_natural @ fit.optimum.covariance[np.ix_((2, 4), (2, 4))] @ to_natural.T, counts), None


def local_surface(D, L) -> Surface | None:
    """L = B D^-beta through the BF16 runs of one size; None unless loss falls over two token counts or more.

    It says what more tokens gain around these D, where our runs do not give a law of N and D; nothing about N."""
    if len(set(D.tolist())) < 2:
        return None
    slope, height = np.polyfit(np.log(D), np.log(L), 1)
    return Surface(LOCAL, "power law over tokens through our BF16 runs of each size", E=0.0, A=0.0, B=math.exp(height),
                   alpha=1.0, beta=-float(slope)) if slope < 0 else None


def surfaces(runs, loss_key: str) -> tuple[dict[int, list[Surface]], dict[str, str], str | None]:
    """Two laws or more for each N of the BF16 `runs` (Records), the source of each law by name, why own_surface is none."""
    N, D, L, trunks = (np.array([getattr(run, key) for run in runs]) for key in ("N", "tokens", loss_key, "trunk"))
    own, reason = own_surface(N, D, L, trunks, runs[0].convention if runs else "total")
    local = {} if own else {int(size): law for size in set(N.tolist()) if (law := local_surface(D[size == N], L[size == N]))}
    used = {int(size): [law for law in (own or local.get(size),) if law] + [EPOCH] + [HOFFMANN] * (not own and not local)
            for size in set(N.tolist())}
    return used, {law.name: law.source for laws in (*([one] for one in local.values()), *used.values()) for law in laws}, reason


# ------------------------------------------------------------------------------------------------------ speed-up at equal loss


@dataclass(frozen=True)
class Speedup:
    """How much sooner FP8 reaches BF16's loss: throughput ratio over extra tokens, with its error; values may be None."""

    value: float | None
    se_log: float | None                # standard error of ln value
    reason: str | None                  # why value is None


def matched_speedup(surface: Surface, D, gap: float, gap_se: float | None, ratio: float, ratio_se_log: float = 0.0) -> Speedup:
    """S = ratio / r for a throughput `ratio` FP8 over BF16 and a loss gap in nats at D tokens.

    SE(ln S)^2 = SE(ln ratio)^2 + (gap_se / s)^2 + (gap SE_s / s^2)^2 with s = -dL/d ln D; None where gap_se is None."""
    r = surface.extra_tokens(gap, D)
    if r is None:
        return Speedup(None, None, beyond(surface, gap, D))
    if gap_se is None:
        return Speedup(ratio / r, None, None)
    s, s_se = surface.slope(D), surface.slope_se(D)
    return Speedup(ratio / r, math.sqrt(ratio_se_log**2 + (gap_se / s)**2 + (gap * s_se / s**2)**2), None)


def costs(surface: Surface, N, D, nats, ratio, se_log, reason) -> dict:
    """What an estimated gap (equivalence.Estimate, nats) costs at N, D, each with its 95 % interval; None, with a reason.

    extra_tokens: r, which is also the extra compute at fixed size. effective_parameters: phi. speedup: throughput `ratio`
    over r, its error by matched_speedup with Student's t of the gap's degrees of freedom; one pair has no interval.
    reason: why there is no throughput ratio."""
    ends = {name: [None, None] if nats.se is None else [law(nats.low, at), law(nats.high, at)]
            for name, law, at in (("extra_tokens", surface.extra_tokens, D),
                                  ("effective_parameters", surface.effective_parameters, N))}
    if surface.extra_tokens(nats.mean, D) is None:
        ratio, reason = None, beyond(surface, nats.mean, D)
    found = {"law": surface.name, "extra_tokens": surface.extra_tokens(nats.mean, D), "extra_tokens_ci95": ends["extra_tokens"],
             "effective_parameters": surface.effective_parameters(nats.mean, N),
             "effective_parameters_ci95": ends["effective_parameters"][::-1]}
    if ratio is None:
        return found | {"speedup": None, "speedup_ci95": [None, None], "reason": reason}
    speedup = matched_speedup(surface, D, nats.mean, nats.se, ratio, se_log or 0.0)
    is_known = speedup.se_log is not None and se_log is not None       # one ratio of throughputs has no error to pass on
    spread = float(student.ppf(0.975, nats.n - 1)) * speedup.se_log if is_known else math.inf
    factor = math.exp(spread) if spread < BEYOND else None
    return found | {"speedup": speedup.value, "reason": speedup.reason,
                    "speedup_ci95": [speedup.value / factor, speedup.value * factor] if factor else [None, None]}


def beyond(surface: Surface, gap: float, D) -> str:
    """Why `gap` has no extra_tokens at D."""
    most = surface.B * D**-surface.beta
    return f"no number of tokens makes up {gap:.4f} nats under {surface.name}: " + (
        f"more data gains at most {most:.4f}" if gap >= most else "it says that tokens change almost nothing")


def throughput(chosen) -> dict:
    """Geometric mean of FP8's tokens per second over BF16's in pairs (precision.Pair) of one size, the standard error of its
    logarithm (None for one ratio), or the reason why there is none."""
    ratios = np.log([p.tok_per_s_ratio for p in chosen if p.tok_per_s_ratio])
    if any(p.fp8.device.startswith("cpu") for p in chosen):
        return {"ratio": None, "se_log": None, "reason": "a CPU has no FP8 units: its throughput means nothing"}
    if not len(ratios):
        return {"ratio": None, "se_log": None, "reason": "the arms ran on different devices or compile settings"}
    se = float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
    return {"ratio": float(np.exp(ratios.mean())), "se_log": se, "reason": None}


# ---------------------------------------------------------------------------------------------- what low precision costs


def kumar_gap(N, weight_bits=8, activation_bits=8, offsets=True):
    """Nats that integer weights and activations cost at N parameters, whatever the tokens; of N's shape.

    Kumar et al. 2024, arXiv:2411.04330, Table 2: A N_eff^-alpha - A N^-alpha with N_eff / N the product of
    1 - e^-(P / gamma + n). 465 runs of 30M to 220M parameters, integer fake quantisation in the forward pass alone, one
    scale a channel for weights, a tensor for activations. The main text's formula has no n, their fit has: both are
    given. The authors: the constants are unlikely to be useful elsewhere."""
    share = kumar_share(weight_bits, activation_bits, offsets)
    return 4.299e3 * N**-0.4965 * (share**-0.4965 - 1)


def kumar_share(weight_bits=8, activation_bits=8, offsets=True) -> float:
    """N_eff / N of the same law."""
    share = 1.0
    for bits, gamma, n in ((weight_bits, 2.6745, 0.3037), (activation_bits, 2.2102, 1.4072)):
        share *= 1 - math.exp(-(bits / gamma + n * offsets))
    return share


def sun_gap(N, D, exponent_bits=4, mantissa_bits=3, block=128):
    """Nats that floats of so many bits cost, one scale for `block` values; of the shape of N and D.

    Sun et al. 2025, arXiv:2501.02423 (ICML): D^beta / N^alpha * log2(block) / (gamma (E + .5)^delta (M + .5)^nu). 366
    runs of 41M to 679M parameters, checked at 1.2B. E4M3 is (4, 3), E5M2 (5, 2)."""
    return (D**0.5162 / N**0.2368 * math.log2(block)
            / (11334.5197 * (exponent_bits + 0.5)**3.1926 * (mantissa_bits + 0.5)**2.9543))


# What the figure draws: name, nats(N, D), range of N that the law was fitted to.
PRECISION_LAWS = (
    ("Kumar INT8, no offsets", lambda N, D: kumar_gap(N, offsets=False) + 0 * D, (30e6, 220e6)),
    ("Kumar INT8", lambda N, D: kumar_gap(N) + 0 * D, (30e6, 220e6)),
    ("Sun E4M3, block 128", sun_gap, (41e6, 679e6)),
)
