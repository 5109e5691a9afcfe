"""The lines that a figure draws of a group's laws: a law over one axis, sections of L(N, D),
valleys of compute budgets, and points of one size or ratio joined."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaling.groups import Group
from scaling.laws import ONE_RAY, SAME_BUDGET, Fit, Points
from scaling.laws.forms import CHINCHILLA

FEW = 6  # at most so many lines of one size, or of one ratio, in a panel
MANY = 60  # points: from so many on, no lines join them
STRONG = (CHINCHILLA, "isoflop", "ray")  # laws with an irreducible loss
VALLEY_POINTS = 60  # of a drawn valley
HIGHEST = 1e9  # times the loss: where an interval is cut off


@dataclass(frozen=True)
class LawLine:
    """A line of a law, arrays of one shape."""

    x: np.ndarray
    loss: np.ndarray  # nats per token
    low: np.ndarray | None = None  # ends of the law's 95 % interval; None without one
    high: np.ndarray | None = None
    # its size, its tokens per parameter or its compute; None for a line of all points
    label: float | None = None


def shown_groups(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """The groups that the figure shows; those that it only names, because their law says nothing
    beside the others' frontier: of fewer sizes than another, or without an irreducible loss that
    their points identify where some law has one."""
    most_sizes = max(group.n_sizes for group in groups)
    drawn = [group for group in groups if group.n_sizes == most_sizes]
    strong = [group for group in drawn if _is_strong(group)]
    if strong:
        drawn = strong
    names = {group.recipe for group in drawn}
    unshown = [group for group in groups if group.recipe not in names]
    return drawn, unshown


def _is_strong(group: Group) -> bool:
    """Whether its headlined law has an irreducible loss that the points identify."""
    return group.headline in STRONG and group.law.identified


def lines_of(group: Group, axis: str, grid: np.ndarray) -> list[LawLine]:
    """The lines of the group over `grid`. Where an identified L(N, D) heads it: its frontier over
    compute, a line per size over tokens, per ratio over parameters. Else its law over one axis;
    where its points lie at several ratios, over D or N lines that join the few points of one size
    or one ratio, means over seeds: the eye takes a cloud of two dimensions for noise."""
    if group.is_surface:
        return _sections(group, axis, grid)
    if group.frontier is not None and axis != "C":
        return _valleys(group, axis)
    if axis == "C" or not group.is_spread:
        return [_line(group.lines[axis], grid, (grid,))] if axis in group.lines else []
    if len(group.loss) >= MANY:
        return []
    return _joined(group, axis)


def _sections(group: Group, axis: str, grid: np.ndarray) -> list[LawLine]:
    """L(N, D) along its frontier, at each size, or at each ratio of tokens to parameters."""
    law, points = group.laws[CHINCHILLA], group.points
    if axis == "C":
        cheapest = _cheapest(group, grid)
        return [_line(law, grid, cheapest)]
    if axis == "N":
        lines = []
        for ratio in few_values(points.D / points.N):
            tokens = ratio * grid
            lines.append(_line(law, grid, (grid, tokens), ratio))
        return lines
    sizes = set(few_values(points.N))
    for held in group.held_out:
        sizes.add(float(held.N))
    lines = []
    for N in sorted(sizes):
        parameters = np.full(len(grid), N)
        lines.append(_line(law, grid, (parameters, grid), N))
    return lines


def _joined(group: Group, axis: str) -> list[LawLine]:
    """Points of one size over tokens, of one ratio over parameters."""
    points = group.points
    values = points.N if axis == "D" else points.D / points.N
    lines = []
    for value in few_values(values):
        distance = np.abs(np.log(values / value))
        is_alike = distance < np.log(ONE_RAY)
        places = group.x[axis][is_alike]
        losses = group.loss[is_alike]
        x = np.unique(places)
        if len(x) < 2:
            continue
        means = [losses[places == place].mean() for place in x]
        lines.append(LawLine(x, np.array(means), label=value))
    return lines


def _valleys(group: Group, axis: str) -> list[LawLine]:
    """The fitted valley of each budget that has a minimum, over parameters or tokens; labelled by
    its compute."""
    fit = group.laws["isoflop"]
    assert fit.valleys is not None
    lines = []
    for budget in fit.budgets or ():
        if budget.N is None:
            continue
        log_sizes, log_tokens = _sizes_at(group.points, budget.C)
        log_x = np.linspace(log_sizes[0], log_sizes[-1], VALLEY_POINTS)
        distance = np.abs(fit.valleys.log_size - math.log(budget.N))
        valley = int(np.nanargmin(distance))
        loss = fit.valleys.loss_at(valley, log_x)
        if axis == "D":
            log_x = np.interp(log_x, log_sizes, log_tokens)
        x = np.exp(log_x)
        lines.append(LawLine(x, loss, label=budget.C))
    return lines


def _sizes_at(points: Points, compute: float) -> tuple[np.ndarray, np.ndarray]:
    """(ln N, ln D) of the sizes of one compute budget, ascending."""
    distance = np.abs(np.log(points.C / compute))
    of_budget = points.take(distance < math.log(SAME_BUDGET))
    log_sizes, first = np.unique(np.log(of_budget.N), return_index=True)
    return log_sizes, np.log(of_budget.D)[first]


def _line(
    law: Fit, x: np.ndarray, place: tuple[np.ndarray, ...], label: float | None = None
) -> LawLine:
    """The law at `place`, the abscissae of its form, over x."""
    interval = None
    with np.errstate(over="ignore"):
        if law.identified:
            interval = law.interval_at(*place)
    if interval is None:
        return LawLine(x, law.predict(*place), label=label)
    high = np.minimum(interval.high, HIGHEST * interval.loss)
    return LawLine(x, interval.loss, interval.low, high, label)


def _cheapest(group: Group, compute: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, D), of the shape of `compute`: where the law's loss is lowest for so many FLOPs, counted
    as the group's points are: FLOPs per token go as N^k, k below 1 as the share of the vocabulary
    and of attention falls with size."""
    law, points = group.laws[CHINCHILLA].values, group.points
    alpha, beta = law["alpha"], law["beta"]
    log_flops_per_token = np.log(group.x["C"] / points.D)
    k, height = np.polyfit(np.log(points.N), log_flops_per_token, 1)
    D_at_1 = compute / np.exp(height)  # tokens of a model of one parameter
    size_term = alpha * law["A"] * D_at_1**beta
    balance = size_term / (k * beta * law["B"])
    N = balance ** (1 / (alpha + k * beta))
    return N, D_at_1 / N**k


def few_values(values: np.ndarray) -> list[float]:
    """The medians of values that lie within 5 %, ascending, FEW of them at most."""
    values = np.sort(values)
    steps = np.flatnonzero(np.diff(np.log(values)) > np.log(ONE_RAY))
    clusters = np.split(values, 1 + steps)
    chosen_ranks = np.linspace(0, len(clusters) - 1, min(len(clusters), FEW))
    return [float(np.median(clusters[round(rank)])) for rank in chosen_ranks]
