"""Fit Chinchilla's law of parameters and tokens, L = E + A/N^alpha + B/D^beta (Hoffmann et al. 2022, approach 3)."""

import numpy as np

from scaling.laws import DELTA, ONE_RAY, Fit, centred_logs, solve

SPREAD = 2                  # largest over smallest tokens per parameter that the law needs: nearer, alpha and beta trade places
FEWEST = 9                  # distinct points that its five parameters need: with six, intervals hold beta 82 times in 100
FLOORS, ALPHAS, BETAS = (0.3, 0.6, 0.9), (0.15, 0.35, 0.7), (0.15, 0.35, 0.7)   # starts: E as a share of the lowest loss


def fit_chinchilla(N, D, L, seed_sd: float = 0.0, delta: float | None = DELTA, tied: bool = False,
                   raw: bool = False) -> Fit:
    """Fit to parameters N, tokens D, loss L (nats per token), each of shape (n,).

    tied: beta = alpha, as in Gadre et al. 2024 and Kumar et al. 2024. raw: squares of L itself instead of Huber's loss of
    ln L, Gadre's objective (scipy's curve_fit); the objective is then in nats squared.

    Adds N* ~ C^a, D* ~ C^b and L* - E ~ C^-gamma of the frontier, C = 6 N D. The exponents share the parameters' names
    with the papers; seed_sd and delta as in fit_ray. Raises UserError for bad points or fewer distinct ones than
    parameters; a design that cannot identify the law is fitted and says so."""
    form = "chinchilla_tied" if tied else "chinchilla"
    logs, y, centres = centred_logs((N, D), L, distinct=4 if tied else 5)
    starts = _starts(logs, np.exp(y), tied)
    return solve(form, logs, y, centres, starts, seed_sd, None if raw else delta, lacking=_design(N, D, tied), raw=raw)


def frontier(fit: Fit, C):
    """(N*, D*, L*) of C's shape: where the law's loss is lowest on C = 6 N D FLOPs."""
    p, C = fit.parameters, np.asarray(C, dtype=float)
    G = (p["alpha"] * p["A"] / (p["beta"] * p["B"])) ** (1 / (p["alpha"] + p["beta"]))
    N = G * (C / 6) ** p["a"]
    D = C / (6 * N)
    return N, D, fit.predict(N, D)


def _starts(logs, L, tied):
    """A grid over E, alpha, beta; A and B such that the reducible loss is right on average, half by either term."""
    starts = []
    for floor in FLOORS:
        e = np.log(floor * L.min())
        height = np.mean(np.log(L - np.exp(e))) - np.log(2)
        for alpha in ALPHAS:
            starts += [[e, height, height, alpha]] if tied else [[e, height, height, alpha, beta] for beta in BETAS]
    return starts


def _design(N, D, tied) -> str | None:
    """Why such N and D cannot separate the law's two terms, or None."""
    ratio = np.asarray(D, dtype=float) / np.asarray(N, dtype=float)
    if ratio.max() <= ONE_RAY * ratio.min():
        return (f"all points lie on one ray of {np.median(ratio):.3g} tokens per parameter, where A/N^alpha and B/D^beta "
                "are one curve: alpha and beta need runs at other ratios")
    if ratio.max() < SPREAD * ratio.min() * 0.99:       # 0.99: a budget is rounded up to whole steps
        return (f"the points lie at {ratio.min():.3g} to {ratio.max():.3g} tokens per parameter, nearly one ray: alpha and beta "
                f"need ratios at least {SPREAD}x apart")
    needed = 2 if tied else 3
    for name, values, factor, exponent in (("N", N, "A", "alpha"), ("D", D, "B", "beta")):
        levels = []
        for value in np.sort(np.asarray(values, dtype=float)):
            if not levels or value > ONE_RAY * levels[-1]:
                levels.append(value)
        if len(levels) < needed:
            return (f"the points hold {len(levels)} distinct {name}: {factor} and {exponent} cannot be told from E with fewer "
                    f"than {needed}")
    points = len({*zip(np.asarray(N).tolist(), np.asarray(D).tolist(), strict=True)})
    if not tied and points < FEWEST:
        return f"{points} distinct points are too few for five parameters: {FEWEST} at least"
    return None
