"""Refit a law under other choices than the declared ones, to show how much of it is choice.

Rows: the k highest losses left out, Huber's threshold, each size left out in turn (with the error of predicting it), and
another way of counting parameters. Whoever wants the exponent that pleases finds it in such a table, so all is printed.
"""

from dataclasses import replace

import numpy as np

from scaling.bootstrap import with_bootstrap
from scaling.figures import human
from scaling.forms import Fit
from scaling.groups import fit_form
from scaling.laws import Points

DROPS = (1, 3, 5, 10)
DELTAS = (1e-4, 1e-2, None)         # beside the declared 1e-3; None is plain squares of ln L
SIZES = 10                          # more sizes than these are left out in as many groups of neighbours
RESAMPLES = 100                     # enough to tell whether an exponent's interval holds 0
MANY = 2000                         # points: a quarter of the resamples must do
SHOWN = ("E", "A", "B", "K", "alpha", "beta", "gamma", "a")


def rows(points: Points, form: str, counts: dict[str, np.ndarray] | None = None) -> list[dict]:
    """The declared fit and every variant of it; strict JSON, a variant that cannot be fitted has its reason.

    counts: convention -> N of shape (n,), for laws in N; or C for laws in C."""
    found = [_row("declared", "", points, fit_form(form, points))]
    order = np.argsort(-points.loss, kind="stable")
    for k in DROPS:
        if k <= len(order) // 2:            # fewer than half left is another experiment
            some = points.take(np.sort(order[k:]))
            found.append(_row("drop highest", str(k), some, fit_form(form, some)))
    for delta in DELTAS:
        found.append(_row("delta", "MSE" if delta is None else f"{delta:g}", points, fit_form(form, points, delta=delta)))
    axis = "C" if form in ("ray", "power_c") else "N"
    for name, values in (counts or {}).items():
        some = replace(points, **{axis: values})
        found.append(_row(f"count {axis} as", name, some, fit_form(form, some)))
    for label, left_out in sizes(points.N):
        some, rest = points.take(~left_out), points.take(left_out)
        fit = fit_form(form, some)
        row = _row("leave out N", label, some, fit)
        if fit.objective is not None:
            errors = 100 * (fit.predict(*rest.axes(form)) / rest.loss - 1)
            row |= {"error_percent": float(errors.mean()), "largest_error_percent": float(errors[np.abs(errors).argmax()])}
        found.append(row)
    return found


def sizes(N) -> list[tuple[str, np.ndarray]]:
    """(label, mask of shape (n,)) of each size, or of SIZES groups of neighbours where there are more; none of one size.

    Sizes within 1 % count as one: counts read off a figure are not exact."""
    order = np.argsort(N, kind="stable")
    steps = np.r_[False, np.diff(np.log(N[order])) > 0.01]
    index = np.empty(len(N), dtype=int)
    index[order] = np.cumsum(steps)
    found = int(index.max()) + 1
    if found < 2:
        return []
    if found > SIZES:
        index = index * SIZES // found
    return [(_label(N[index == i]), index == i) for i in range(index.max() + 1)]


def table(found: list[dict]) -> list[list[str]]:
    """The rows as cells of text under a heading; parameters are those that the law has."""
    names = [name for name in SHOWN if name in found[0]]
    lines = [["variant", "n", *names, "error on what is left out: mean, largest [%]"]]
    for row in found:
        lacking = "" if row["objective"] is not None else f"not fitted: {row['reason']}"
        error = "" if "error_percent" not in row else f"{row['error_percent']:+.2f}, {row['largest_error_percent']:+.2f}"
        lines.append([f"{row['variant']} {row['value']}".strip() + ("" if row["identified"] else " *"), str(row["n"]),
                      *(_short(row.get(name)) for name in names), lacking or error])
    return lines


def _row(variant: str, value: str, points: Points, fit: Fit) -> dict:
    plain = with_bootstrap(fit, points, RESAMPLES if len(points.loss) < MANY else RESAMPLES // 4).plain()
    kept = {key: plain[key] for key in (*fit.parameters, "objective", "starts", "starts_at_best", "identified", "reason")}
    return {"variant": variant, "value": value, "n": len(points.loss)} | kept


def _label(N) -> str:
    low, high = float(N.min()), float(N.max())
    return human(low) if high / low < 1.01 else f"{human(low)} to {human(high)}"


def _short(value) -> str:
    return "" if value is None else f"{value:.4g}"
