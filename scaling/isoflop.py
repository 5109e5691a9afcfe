"""Find the best size per compute budget (Hoffmann et al. 2022, approaches 1 and 2).

Approach 2 takes each budget's minimum from a cubic in ln N, fitted to ln L: a parabola's vertex is biased where the curve
is not one, and curves through every point (Akima, splines) follow the noise. Approach 1 is `envelope`.
"""

from dataclasses import replace

import numpy as np
from scipy.stats import t as student

from scaling.forms import Fit
from scaling.laws import Points, unfitted

SAME_BUDGET = 1.1           # largest over smallest compute that counts as one budget: published points scatter by per cents
SIZES = 5                   # distinct sizes that a budget needs
BUDGETS = 3                 # usable budgets that a slope with an interval needs


def fit_isoflop(points: Points) -> Fit:
    """N* = k_n C^a and D* = k_d C^b over budgets of equal compute, by least squares on logarithms.

    `budgets` lists each budget's C, sizes and its N*, D*, loss, or the reason why it has no interior minimum. Intervals
    are Student's t over budgets, or over trajectories (each left out once) where one trajectory serves several budgets,
    whose minima then share its luck. D* is read off the points' own D at N*, so C may follow any convention."""
    labels = np.unique(points.cluster)
    fit = _fit(points)
    if fit.ci95 is None or len(labels) == len(points.loss):
        return fit
    without = [_fit(points.take(points.cluster != label)) for label in labels]
    if failed := [label for label, one in zip(labels, without, strict=True) if one.ci95 is None]:
        return replace(fit, identified=False, se=None, ci95=None, interval=None, clusters=len(labels), reason=(
            f"the minima rest on single trajectories: without {failed[0]} fewer than {BUDGETS} budgets have one"))
    quantile, se, ci95 = student.ppf(0.975, len(labels) - 1), {}, {}
    for name, value in fit.parameters.items():
        is_factor = name.startswith("k_")
        values = np.array([one.parameters[name] for one in without])
        values = np.log(values) if is_factor else values
        width = float(np.sqrt((len(labels) - 1) / len(labels) * np.sum((values - values.mean()) ** 2)))
        se[name] = width * value if is_factor else width
        ci95[name] = tuple(float(value * np.exp(side * quantile * width)) if is_factor else float(value + side * quantile * width)
                           for side in (-1, 1))
    return _judged(replace(fit, se=se, ci95=ci95, interval="cluster", clusters=len(labels)))


def _fit(points: Points) -> Fit:
    budgets = tuple(_minimum(points.take(index)) for index in _groups(points.C))
    good = [one for one in budgets if one["reason"] is None]
    if len(good) < BUDGETS:
        reason = (f"{len(good)} of {len(budgets)} compute budgets have an interior minimum over at least {SIZES} sizes; "
                  f"the exponents need {BUDGETS}")
        return replace(unfitted("isoflop", len(points.loss), reason), budgets=budgets)
    logs = {name: np.log([one[name] for one in good]) for name in ("C", "N", "D")}
    centre = logs["C"].mean()
    x = logs["C"] - centre
    design = np.column_stack([np.ones_like(x), x])
    parameters, se, ci95, squares = {}, {}, {}, 0.0
    quantile = student.ppf(0.975, len(x) - 2)
    for exponent, factor, name in (("a", "k_n", "N"), ("b", "k_d", "D")):
        solution = np.linalg.lstsq(design, logs[name], rcond=None)[0]
        left = logs[name] - design @ solution
        covariance = left @ left / (len(x) - 2) * np.linalg.inv(design.T @ design)
        squares = float(left @ left) if name == "N" else squares
        parameters |= {exponent: float(solution[1]), factor: float(np.exp(solution[0] - solution[1] * centre))}
        gradient = np.array([1.0, -centre])
        widths = {exponent: np.sqrt(covariance[1, 1]), factor: np.sqrt(gradient @ covariance @ gradient)}
        se |= {exponent: float(widths[exponent]), factor: float(widths[factor] * parameters[factor])}
        ci95[exponent] = tuple(float(solution[1] + side * quantile * widths[exponent]) for side in (-1, 1))
        ci95[factor] = tuple(float(parameters[factor] * np.exp(side * quantile * widths[factor])) for side in (-1, 1))
    return _judged(Fit("isoflop", parameters, len(points.loss), True, None, objective=squares / 2, starts=1, starts_at_best=1,
                       residual_rms=float(np.sqrt(squares / (len(x) - 2))), se=se, ci95=ci95, interval="t", budgets=budgets))


def _judged(fit: Fit) -> Fit:
    """The fit, unidentified where the interval of a or b holds 0: such a budget curve says nothing of allocation."""
    for name in "ab":
        if fit.ci95[name][0] <= 0:
            return replace(fit, identified=False, reason=f"the 95 % interval of {name} contains 0")
    return fit


def optimum(fit: Fit, C):
    """(N*, D*) of C's shape by an isoflop fit."""
    p, C = fit.parameters, np.asarray(C, dtype=float)
    return p["k_n"] * C ** p["a"], p["k_d"] * C ** p["b"]


def envelope(curves, bins: int = 1500):
    """(C (bins,), loss (bins,), index (bins,)): the lowest of the training curves at log-spaced compute, and whose it is.

    curves: list of (C, loss) array pairs, C in FLOPs, smoothed by the caller. Bins that no curve spans are left out."""
    curves = [(np.asarray(C, dtype=float), np.asarray(loss, dtype=float)) for C, loss in curves]
    kept = [(C[good], loss[good]) for C, loss in curves
            for good in [np.isfinite(C) & np.isfinite(loss) & (C > 0) & (loss > 0)]]
    spans = [C for C, _ in kept if len(C)]
    if not spans:
        return np.empty(0), np.empty(0), np.empty(0, dtype=int)
    grid = np.geomspace(min(C.min() for C in spans), max(C.max() for C in spans), bins)
    grid[-1] = max(C.max() for C in spans)      # geomspace rounds
    table = np.full((len(kept), bins), np.inf)
    for row, (C, loss) in zip(table, kept, strict=True):
        if len(C):
            order = np.argsort(C, kind="stable")
            row[:] = np.interp(np.log(grid), np.log(C[order]), loss[order], left=np.inf, right=np.inf)
    index = table.argmin(axis=0)
    lowest = table.min(axis=0)
    spanned = np.isfinite(lowest)
    return grid[spanned], lowest[spanned], index[spanned]


def _groups(C):
    """Indices of the points of each budget, smallest first: a group ends where C exceeds its smallest by SAME_BUDGET."""
    groups = []
    for i in np.argsort(C, kind="stable"):
        if groups and C[i] <= SAME_BUDGET * C[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [np.array(group) for group in groups]


def _minimum(points: Points) -> dict:
    """C, sizes, N, D, loss, reason of one budget."""
    N, inverse = np.unique(points.N, return_inverse=True)
    count = np.bincount(inverse)
    # Seeds of one size are averaged; so are D and C, which scatter with the counting.
    y, d = (np.bincount(inverse, weights=np.log(values)) / count for values in (points.loss, points.D))
    row = {"C": float(np.exp(np.log(points.C).mean())), "sizes": len(N), "N": None, "D": None, "loss": None, "reason": None}
    if len(N) < SIZES:
        return row | {"reason": f"{len(N)} sizes; a minimum needs {SIZES}"}
    middle = np.log(N).mean()
    x = np.log(N) - middle
    if y.argmin() in (0, len(x) - 1):
        side = "smallest" if y.argmin() == 0 else "largest"
        return row | {"reason": f"the {side} size has the lowest loss: no interior minimum"}
    cubic = np.polynomial.Polynomial.fit(x, y, 3)
    roots = cubic.deriv().roots()
    roots = roots[np.isreal(roots)].real
    inside = [root for root in roots if x[0] < root < x[-1] and cubic.deriv(2)(root) > 0]
    if not inside or cubic(inside[0]) > min(cubic(x[0]), cubic(x[-1])):
        return row | {"reason": "a cubic through the losses has no interior minimum with upward curvature"}
    return row | {"N": float(np.exp(middle + inside[0])), "D": float(np.exp(np.interp(inside[0], x, d))),
                  "loss": float(np.exp(cubic(inside[0])))}
