"""Compute what the loss figure draws of a group: its law's lines, its training curves, their envelope, its reducible losses.

Where an identified Chinchilla law heads a group, the law is a frontier over compute, a line per size over tokens, a line per
tokens-per-parameter ratio over parameters; on one ray it is one line over each, group.lines[axis].
"""

import numpy as np

from scaling.laws import ONE_RAY, envelope, frontier

BEYOND = 10             # without a held-out run the laws are drawn to this many times the largest compute
BINS = 24               # per decade of compute, to smooth training curves
FEW = 6                 # at most so many lines of one size, or of one ratio, in a panel


def span(groups, axis: str) -> tuple[float, float]:
    """From the smallest run to beyond the held-out ones or, without those, to where an extrapolation would be read."""
    high = max(group.x[axis].max() for group in groups)
    held = [getattr(held, axis) for group in groups for held in group.held_out]
    has_law = any(axis == "C" or is_surface(group) or not is_spread(group) for group in groups)
    beyond = 2.0 if held else 1.6 if not has_law else BEYOND if axis == "C" else BEYOND**0.5
    return min(group.x[axis].min() for group in groups), beyond * max([*held, high] if held else [high])


def sizes_of(groups) -> list[float]:
    """All sizes, those of held-out runs included."""
    return sorted({float(N) for group in groups for N in [*group.x["N"], *(held.N for held in group.held_out)]})


def is_surface(group) -> bool:
    """Whether an identified L(N, D) heads the group, so that no single curve over one axis is its law."""
    return group.headline == "chinchilla"


def is_spread(group) -> bool:
    """Whether the group's points lie at several tokens-per-parameter ratios: then loss over N or D alone is no one curve."""
    ratios = group.points.D / group.points.N
    return "D" in group.x and bool(ratios.max() > ONE_RAY * ratios.min())


def floor_of(group) -> float | None:
    """The irreducible loss E of the law that heads the group; None where it has none that the points identify."""
    law = group.laws.get(group.headline)
    return law.parameters["E"] if group.headline in ("chinchilla", "ray") and law.identified else None


def drawn(groups) -> tuple[list, list]:
    """The groups that the figure shows, and those that it only names: of fewer sizes than another, or without a floor where
    some law has one.

    A recipe tried at two sizes of four has a power law over its own sizes, which beside the others' frontier says nothing."""
    sizes = {id(group): len(set(group.x["N"].tolist())) for group in groups}
    shown = [group for group in groups if sizes[id(group)] == max(sizes.values())]
    shown = [group for group in shown if floor_of(group) is not None] or shown
    return shown, [group for group in groups if not any(group is one for one in shown)]


def law_lines(group, axis: str, grid) -> list[tuple]:
    """(x, N, D, loss, low, high, each) of each law line over `grid`, arrays of its shape; each: the line's size or ratio.

    N, D and each are None where one line stands for all points; low and high are None without an interval. Spread points
    without an identified L(N, D) have no law over tokens or parameters: there, lines join the points of one size or ratio."""
    if is_spread(group) and not is_surface(group) and axis != "C":
        return _joined(group, axis)
    if not is_surface(group):
        law = group.lines.get(axis)
        return [] if law is None else [_line(law, grid, None, None, None, (grid,))]
    law, points = group.laws["chinchilla"], group.points
    if axis == "C":
        N, D = _cheapest(group, grid)
        return [_line(law, grid, N, D, None, (N, D))]
    if axis == "D":
        return [_line(law, grid, np.full(len(grid), N), grid, N, (np.full(len(grid), N), grid))
                for N in sorted({*_few(points.N), *(float(held.N) for held in group.held_out)})]
    return [_line(law, grid, grid, ratio * grid, ratio, (grid, ratio * grid)) for ratio in _few(points.D / points.N)]


def _joined(group, axis):
    points, lines = group.points, []
    values = points.N if axis == "D" else points.D / points.N
    each = np.array(_few(values))
    alike = np.isclose(values[:, None], each, rtol=0.05)        # (points, lines)
    if not alike.any(axis=1).all():
        return []
    for own, value in zip(alike.T, each, strict=True):
        x = np.unique(group.x[axis][own])       # several seeds are one place
        means = [[some[own & (group.x[axis] == at)].mean() for at in x] for some in (points.N, points.D, group.loss)]
        lines.append((x, *map(np.array, means), None, None, float(value)))
    return lines


def _line(law, x, N, D, each, where):
    with np.errstate(over="ignore"):
        interval = law.interval_at(*where) if law.identified else None
    loss, low, high = (law.predict(*where), None, None) if interval is None else interval
    return x, N, D, loss, low, None if high is None else np.minimum(high, 1e9 * loss), each


def _cheapest(group, compute):
    """(N, D), of the shape of `compute`: where the law's loss is lowest for so many FLOPs, counted as the group's points are.

    A vocabulary's share of a token's FLOPs falls with size, so that the best size is larger than 6 N D would have it."""
    law = group.laws["chinchilla"]
    N, D, _ = frontier(law, compute)
    if group.records:
        N = N * np.geomspace(1e-2, 1e2, 2001)[:, None]     # (sizes, compute)
        D = compute / (6 * N * _flops_over_6n(group, N))
        best = law.predict(N, D).argmin(axis=0), np.arange(len(compute))
        N, D = N[best], D[best]
    return N, D


def _flops_over_6n(group, N):
    """FLOPs per token in the group's convention over 6 N, at sizes N; beyond its points as at the last of them."""
    share = np.log(group.x["C"] / (6 * group.x["N"] * group.x["D"]))
    sizes = np.log(group.x["N"])
    slope, height = np.polyfit(sizes, share, 1) if np.ptp(sizes) > 0 else (0.0, share.mean())
    return np.exp(height + slope * np.clip(np.log(N), sizes.min(), sizes.max()))


def _few(values) -> list[float]:
    """The distinct values (within 5 %) where they are few, else three round ones that span them."""
    values = np.sort(values)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(np.log(values)) > np.log(1.05)]))
    if len(starts) <= FEW:
        return [float(np.median(some)) for some in np.split(values, starts[1:])]
    near = np.quantile(values, (0.05, 0.5, 0.95))
    return sorted({float(min((m * 10.0 ** np.floor(np.log10(v)) for m in (1, 2, 5, 10)), key=lambda r: abs(np.log(r / v))))
                   for v in near})


def reducible(group, axis: str, N, D, loss):
    """The part of `loss` that is a power law of this axis, if the law that heads the group holds.

    Off a ray this is L - E over compute, L - E - A N^-alpha over tokens, L - E - B D^-beta over parameters."""
    if not is_surface(group):
        return loss - group.lines[axis].parameters["E"]
    p = group.laws["chinchilla"].parameters
    return loss - p["E"] - {"C": 0.0, "D": p["A"] * N ** -p["alpha"], "N": p["B"] * D ** -p["beta"]}[axis]


def rest_of(group, axis: str) -> tuple:
    """`reducible` of the group's losses, and which of them a log axis can hold: noise leaves some at or below zero."""
    points = group.points
    rest = reducible(group, axis, points.N, points.D, group.loss)
    law = group.laws["chinchilla"].predict(points.N, points.D) if is_surface(group) else group.lines[axis].predict(group.x[axis])
    return rest, rest > 0.3 * reducible(group, axis, points.N, points.D, law).min()


def predictions(groups, axis: str, reduced: bool = False) -> list[tuple]:
    """(index of the group, x, predicted, low, high) of every frozen prediction; `reduced` by what its law's other terms are."""
    found = []
    for i, group in enumerate(groups):
        for held in group.held_out:
            if held.prediction is not None and (not reduced or floor_of(group) is not None):
                off = reducible(group, axis, held.N, held.D, 0.0) if reduced else 0.0
                said = held.prediction
                found.append((i, getattr(held, axis), said.loss + off, said.low + off, said.high + off))
    return found


def loss_limits(groups) -> tuple[float, float]:
    """Around the points and what is predicted; training curves may leave it at the top, where they began."""
    losses = np.concatenate([group.loss for group in groups])
    far = [one.loss for group in groups for one in group.held_out if one.loss]
    far += [float(form.predict(BEYOND * group.x["C"].max())) for group in groups for form in group.bands.get("C", ())]
    low, high = _with_bars(min([losses.min(), *far]), losses.max(), predictions(groups, "C"))
    room = max(np.log(high / low), 0.02)
    return low * np.exp(-0.08 * room), high * np.exp(0.3 * room)


def reducible_limits(groups) -> tuple[float, float]:
    """Around all that `reducible` leaves of points, held-out runs and laws, over every axis."""
    values, bars = [], []
    for axis in "CDN":
        low, high = span(groups, axis)
        for group in groups:
            if floor_of(group) is not None:
                rest, shown = rest_of(group, axis)
                _, N, D, loss, *_ = law_lines(group, axis, np.geomspace(low / 1.6, high, 20))[0]
                values += [rest[shown], reducible(group, axis, N, D, loss)]
                values += [[reducible(group, axis, one.N, one.D, one.loss)] for one in group.held_out if one.loss]
        bars += predictions(groups, axis, True)
    values = np.concatenate(values)
    low, high = _with_bars(values[values > 0].min(), values.max(), bars)
    return low * (low / high) ** 0.05, high * (high / low) ** 0.05


def _with_bars(low, high, bars):
    """Limits that hold the bars too, except those wider than all else: they would squeeze the data."""
    room, ends = max(np.log(high / low), 0.02), [low, high]
    for *_, middle, bottom, top in bars:
        ends += [middle] if middle > 0 else []
        ends += [bottom, top] if bottom > 0 and np.log(top / bottom) <= room else []
    return min(ends), max(ends)


def is_cut(groups) -> bool:
    """Whether some prediction's interval leaves its axis."""
    rows = [(False, loss_limits(groups))]
    if any(floor_of(group) is not None for group in groups):
        rows.append((True, reducible_limits(groups)))
    return any(low < ends[0] or high > ends[1] for reduced, ends in rows for axis in groups[0].x
               for *_, low, high in predictions(groups, axis, reduced))


def smooth_curves(group) -> list[tuple]:
    """(FLOPs, loss) of each run, smoothed; a branch begins on its trunk's curve."""
    curves = [_smooth(tokens * record.flops_per_token, loss)
              for record, (tokens, loss) in zip(group.records, group.curves, strict=True)]
    own = {record.run_id: curve for record, curve in zip(group.records, curves, strict=True)}
    joined = []
    for record, (x, loss) in zip(group.records, curves, strict=True):
        trunk = own.get(record.parent_run)
        if trunk is not None and len(x) and len(trunk[0]) and trunk[0][0] < x[0]:
            before = trunk[0][trunk[0] < x[0]][-1:]
            x, loss = np.concatenate([before, x]), np.concatenate([np.interp(before, *trunk), loss])
        joined.append((x, loss))
    return joined


def _smooth(x, loss):
    """Means over bins of equal width in log x: even on a log axis, unlike a window of so many steps."""
    if len(x) == 0:
        return x, loss
    bins = int(np.clip(np.ceil(BINS * np.log10(x[-1] / x[0])), 4, 80))
    edges = np.geomspace(x[0], x[-1] * (1 + 1e-9), bins + 1)
    index = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    filled = count > 0
    return tuple(np.bincount(index, weights=values, minlength=bins)[filled] / count[filled] for values in (x, loss))


def best_so_far(group, curves) -> list[tuple]:
    """(FLOPs, loss, size) pieces of the curves' lower envelope: the lowest loss reached by each compute, and by which size."""
    filled = [i for i, (x, _) in enumerate(curves) if len(x) > 1]
    if not filled:
        return []
    x, loss, index = envelope([curves[i] for i in filled])
    loss = np.minimum.accumulate(loss)      # what was reached with less compute is reached
    size = np.array([group.records[filled[i]].N for i in index])
    starts = np.flatnonzero(np.concatenate([[True], np.diff(size) != 0]))
    return [(x[start:end + 1], loss[start:end + 1], float(size[start]))
            for start, end in zip(starts, [*starts[1:], len(x) - 1], strict=True)]
