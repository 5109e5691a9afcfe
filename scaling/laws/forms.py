"""The laws' forms: a sum of power laws, so ln L is the log-sum-exp of terms that are linear in theta
= (ln factors at the centre of ln x, exponents): one value and one gradient for all forms.

Uncentred, a factor and its exponent are almost one parameter and solvers stall."""

import numpy as np

# form -> its parameters in the solver's order: ln factors first, then exponents
NAMES = {
    "ray": ("E", "K", "gamma"),
    "power_n": ("A", "alpha"),
    "power_d": ("B", "beta"),
    "power_c": ("K", "gamma"),
    "chinchilla": ("E", "A", "B", "alpha", "beta"),
    "isoflop": ("a", "b"),
}
# positive, so solved for and given intervals on the logarithm
FACTORS = {"E", "A", "B", "K", "k_n", "k_d"}
# The others must be above zero for the loss to fall, or for a budget to say how to spend it.
EXPONENTS = {form: [name for name in names if name not in FACTORS] for form, names in NAMES.items()}
# form -> (factor, abscissa, exponent) of each power law in it
SURFACE = ("A", "N", "alpha"), ("B", "D", "beta")
POWERS = {
    "ray": (("K", "C", "gamma"),),
    "power_n": SURFACE[:1],
    "power_d": SURFACE[1:],
    "power_c": (("K", "C", "gamma"),),
    "chinchilla": SURFACE,
}
DELTA = 1e-3  # Huber's threshold on log-loss residuals
# declared range of the compute exponent (published: .15 to .18)
GAMMAS = (0.10, 0.12, 0.14, 0.16, 0.18, 0.20, 0.22)


def centred(axes, centres) -> list[np.ndarray]:
    return [
        np.log(np.asarray(x, dtype=float)) - centre for x, centre in zip(axes, centres, strict=True)
    ]


def terms(form: str, logs, gamma: float | None = None):
    """(slopes (n, terms, p), offsets (n, terms)) with ln L = logsumexp over terms of slopes @ theta
    + offsets."""
    p, floor = len(NAMES[form]), int("E" in NAMES[form])
    # the layout decides how products round
    slopes = np.moveaxis(np.zeros((floor + len(logs), p, len(logs[0]))), 2, 0)
    slopes[:, 0, 0] = 1  # ln E, where the form has it
    for i, log in enumerate(logs):
        slopes[:, floor + i, floor + i] = 1  # ln factor
        slopes[:, floor + i, floor + len(logs) + i] = -log  # exponent
    return (
        (slopes, np.zeros(slopes.shape[:2]))
        if gamma is None
        else (slopes[..., :2], gamma * slopes[..., 2])
    )


def log_law(slopes, offsets, theta):
    """(ln L (n,), its gradient in theta (n, p)) of what `terms` gives."""
    parts = slopes @ theta + offsets
    # scipy.special.logsumexp to the last bit, for a tenth of its time.
    top = parts.max(axis=1, keepdims=True)
    is_top = parts == top
    n_top = is_top.sum(axis=1)
    total = (
        np.log1p(np.exp(np.where(is_top, -np.inf, parts) - top).sum(axis=1) / n_top)
        + np.log(n_top)
        + top[:, 0]
    )
    return total, np.einsum("nt,ntp->np", np.exp(parts - total[:, None]), slopes)


def natural(form: str, theta, centres, gamma: float | None = None) -> dict:
    """name -> values of shape (...) from the solver's theta (..., p): the usual parameters, factors
    as logarithms."""
    values = dict(zip(NAMES[form], np.moveaxis(theta, -1, 0), strict=gamma is None))
    if gamma is not None:
        values["gamma"] = np.full(theta.shape[:-1], gamma)
    for (factor, _, exponent), centre in zip(POWERS[form], centres, strict=True):
        values[factor] = values[factor] + centre * values[exponent]
    if form == "chinchilla":
        alpha, beta = values["alpha"], values["beta"]
        values |= {
            "a": beta / (alpha + beta),
            "b": alpha / (alpha + beta),
            "gamma": alpha * beta / (alpha + beta),
        }
    return values


def back(name: str, values):
    """A factor from its logarithm (infinite where it overflows), an exponent as it is."""
    with np.errstate(over="ignore"):
        return np.exp(values) if name in FACTORS else values
