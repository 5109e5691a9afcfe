"""IsoFLOP: N*, D* and the lowest loss over compute (Hoffmann et al. 2022, approaches 1 and 2)."""

import math
from dataclasses import dataclass, replace

import numpy as np

from scaling.laws.fits import Fit, unfitted
from scaling.laws.forms import NAMES, back
from scaling.laws.intervals import _with_widths
from scaling.laws.law import fit_law
from scaling.laws.points import Points
from scaling.laws.valleys import Minima, Valley, fit_valleys, lowest_part, without_spikes

# largest over smallest compute that counts as one budget: published points scatter by per cents
SAME_BUDGET = 1.1
SIZES = 5  # distinct sizes that a budget needs
BUDGETS = 3  # usable budgets that a slope with an interval needs
# isoflop fits sizes within this share of a budget's lowest loss; the first counts
WINDOWS = (0.1, 0.2)
# of how a differs over them: with all of it intervals of an offset grid hold 99 in 100
WINDOW_DOUBT = 0.5
ALLOCATION = ("a", "k_n", "b", "k_d")


def fit_isoflop(points: Points) -> Fit:
    """N* = k_n C^a and D* = k_d C^b over budgets of equal compute, by least squares on logarithms
    of the budgets' minima.

    The minima are those of scaling.laws.valleys: each budget's valley has factors of its own, all share
    their exponents. A window holds the sizes whose loss is within a share of the budget's lowest,
    SIZES at least: sizes that are hopeless at a budget say little of its minimum, and which these
    are the loss knows, not the size. How a differs over WINDOWS widens its interval: Student's t
    over budgets, or over trajectories (each left out once) where one serves several. D* is the
    points' own D at N*: C may follow any convention."""
    n, labels = len(points.loss), np.unique(points.cluster)
    budgets = _budgets(points)
    found = [_allocation(points, budgets, window) for window in WINDOWS]
    best = found[0]
    about = {
        "budgets": best.rows,
        "windows": tuple(
            {"window": one.window, "a": None if one.line is None else float(one.line[0])}
            for one in found
        ),
    }
    if best.line is None:
        good = sum(row["reason"] is None for row in best.rows)
        return replace(
            unfitted(
                "isoflop",
                n,
                f"{good} of {len(best.rows)} compute budgets have an interior minimum over "
                f"at least {SIZES} sizes; the exponents need {BUDGETS}",
            ),
            **about,
        )
    values, width, dof, interval = best.line, best.width, best.dof, "t"
    named = dict(zip(ALLOCATION, values.tolist(), strict=True))
    fit = Fit(
        "isoflop",
        {name: float(back(name, value)) for name, value in named.items()},
        n,
        True,
        None,
        starts=1,
        starts_at_best=1,
        objective=best.squares / 2,
        residual_rms=math.sqrt(best.squares / best.dof),
        valleys=best.minima,
        **about,
    )
    if len(labels) < n:
        without = []
        for label in labels:
            rest = points.take(np.flatnonzero(points.cluster != label))
            without.append(_allocation(rest, _budgets(rest), WINDOWS[0], best.minima).line)
        fit, dof, interval = replace(fit, clusters=len(labels)), len(labels) - 1, "cluster"
        if any(line is None for line in without):
            return replace(
                fit,
                identified=False,
                reason=(
                    "the minima rest on single trajectories: without one of them fewer than"
                    f" {BUDGETS} budgets have one"
                ),
            )
        width = np.sqrt(
            dof / len(labels) * np.sum((np.array(without) - np.mean(without, axis=0)) ** 2, axis=0)
        )
    others = np.array([one.line for one in found if one.line is not None])
    width = np.hypot(width, WINDOW_DOUBT * np.sqrt(np.mean((others - values) ** 2, axis=0)))
    return _with_widths(
        fit, named, dict(zip(ALLOCATION, width.tolist(), strict=True)), dof, interval
    )


def minima_of(fit: Fit) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(C, N*, D*, L*) of an isoflop fit's budgets that have a minimum, each of shape (budgets,)."""
    good = [row for row in fit.budgets or () if row["reason"] is None]
    C, N, D, loss = (
        np.array([row[key] for row in good], dtype=float) for key in ("C", "N", "D", "loss")
    )
    return C, N, D, loss


def fit_frontier(fit: Fit, seed_sd: float = 0.0) -> Fit:
    """L*(C), the lowest loss for a compute, through the minima of an identified isoflop fit: the
    ray law where they identify it, else the power law. A law through all sizes lies above it."""
    C, _, _, loss = minima_of(fit)
    power = fit_law("power_c", C, loss, seed_sd=seed_sd)
    if len(C) < len(NAMES["ray"]):
        return power
    ray = fit_law("ray", C, loss, seed_sd=seed_sd)
    return ray if ray.identified else power


@dataclass(frozen=True, eq=False)
class Budget:
    """The points of about one compute, a size once: seeds of a size are averaged, so are D and C,
    which scatter with the counting."""

    C: float  # FLOPs, geometric mean
    log_d: np.ndarray  # (sizes,) mean ln D
    valley: Valley
    reason: str | None  # why it can have no minimum


@dataclass(frozen=True, eq=False)
class Allocation:
    """Straight lines through the budgets' minima over one window; line, width: of (a, ln k_n, b, ln
    k_d), None where too few budgets have a minimum."""

    window: float  # share of the lowest loss
    rows: tuple[dict, ...]  # C, sizes, N, D, loss or reason, per budget
    minima: Minima | None
    line: np.ndarray | None = None
    width: np.ndarray | None = None
    dof: int = 0
    squares: float = 0.0  # of ln N* around its line


def _budgets(points: Points) -> list[Budget]:
    """Budgets in order of compute; one ends where C exceeds its smallest by SAME_BUDGET."""
    budgets, order = [], np.argsort(points.C, kind="stable")
    while len(order):
        end = int(np.searchsorted(points.C[order], SAME_BUDGET * points.C[order[0]], side="right"))
        budgets.append(_budget(points.take(order[:end])))
        order = order[end:]
    return budgets


def _budget(points: Points) -> Budget:
    N, member = np.unique(points.N, return_inverse=True)
    count = np.bincount(member)
    loss, log_d = (
        np.bincount(member, values) / count for values in (points.loss, np.log(points.D))
    )
    reason = None
    if len(N) < SIZES:
        reason = f"{len(N)} sizes; a minimum needs {SIZES}"
    elif {loss.argmin(), without_spikes(loss).argmin()} <= {0, len(N) - 1}:
        reason = "the smallest or the largest size has the lowest loss: no interior minimum"
    return Budget(float(np.exp(np.log(points.C).mean())), log_d, Valley(np.log(N), loss), reason)


def _allocation(
    points: Points, budgets: list[Budget], window: float, near: Minima | None = None
) -> Allocation:
    usable = [budget for budget in budgets if budget.reason is None]
    minima = None
    if usable:
        minima = fit_valleys([lowest_part(budget.valley, window, SIZES) for budget in usable], near)
    rows, at = [], 0
    for budget in budgets:
        row = {
            "C": budget.C,
            "sizes": len(budget.valley.loss),
            "N": None,
            "D": None,
            "loss": None,
            "reason": budget.reason,
        }
        if budget.reason is None:
            log_size, loss = minima.log_size[at], minima.loss[at]
            at += 1
            if np.isfinite(log_size):
                tokens = np.exp(np.interp(log_size, budget.valley.log_size, budget.log_d))
                row |= {"N": float(np.exp(log_size)), "D": float(tokens), "loss": float(loss)}
            else:
                row["reason"] = "the valley through the losses has no minimum between its sizes"
        rows.append(row)
    good = [row for row in rows if row["reason"] is None]
    if len(good) < BUDGETS:
        return Allocation(window, tuple(rows), minima)
    x, y = np.log([row["C"] for row in good]), np.log([[row["N"], row["D"]] for row in good])
    line, covariance = np.polyfit(x, y, 1, cov=True)  # (slope and height, of N and D)
    return Allocation(
        window,
        tuple(rows),
        minima,
        line.T.ravel(),
        np.sqrt(np.einsum("iik->ki", covariance)).ravel(),
        len(x) - 2,
        float(np.sum((y[:, 0] - np.polyval(line[:, 0], x)) ** 2)),
    )
