"""What scaling/fit.py prints of a group's laws: warnings, the headline, every law in tables."""

from collections.abc import Iterable

from lib.text import si
from scaling.gap_words import KIND
from scaling.groups import FAR, Group
from scaling.law_file import refit_entry, refit_row
from scaling.law_words import refusal_words
from scaling.laws import Fit, near_zero
from scaling.laws.fits import known
from scaling.laws.lack_of_fit import WithoutEarly
from scaling.pages import LINES, format_table, shortened

SHOWN = 8  # points that a warning names
FEW_GROUPS = 2  # up to so many, each headline is printed whole
SHORT_HEADLINE = 3  # lines of each where there are more
INTERVALS = {
    "t": "t-intervals of the residuals, at least of the seeds' SD",
    "cluster": "t-intervals over {clusters} trajectories",
    "bootstrap": (
        "{resamples} bootstrap resamples of {clusters} trajectories (in a table --cluster COL names"
        " them)"
    ),
}


def page(groups: list[Group], notes: list[str], closing: list[str], is_all: bool) -> list[str]:
    """Warnings, headlines and notes, with is_all every table, else at most LINES lines; `closing`,
    such as a score, stays whole."""
    lines = [note for note in notes if note.startswith("WARNING")]
    for group in groups:
        lines += warnings(group)
    for group in groups:
        headline = headline_lines(group)
        is_short = not is_all and len(groups) > FEW_GROUPS
        lines += ["", *(headline[:SHORT_HEADLINE] if is_short else headline)]
    if is_all:
        for group in groups:
            lines += tables(group)
    lines += ["", *(note for note in notes if not note.startswith("WARNING"))]
    lines = "\n".join(lines).strip("\n").split("\n")
    if not is_all:
        lines = shortened(lines, LINES - 2 - len(closing))
    return [*lines, *closing]


# ---------------------------------------------------------------------------------------- warnings


def warnings(group: Group) -> list[str]:
    """What is wrong with the headlined law or with its points."""
    lines = []
    if not group.law.identified:
        lines.append(
            f"WARNING: {group.recipe}: the headlined law is not identified:"
            f" {refusal_words(group.law.reason)}"
        )
    lines += _outlier_lines(group)
    lines += _shared_fault_lines(group)
    lines += _lack_of_fit_lines(group)
    return lines


def _outlier_lines(group: Group) -> list[str]:
    """The points that lie off a law that the others follow, and what that law is."""
    outliers = group.outliers
    if not outliers:
        return []
    farthest = outliers[0]
    side = "above" if farthest.percent > 0 else "below"
    sentence = f"{farthest.point} lies {abs(farthest.percent):.2g} % {side} the law"
    if len(outliers) > 1:
        names = [f"{outlier.point} by {outlier.percent:+.2g} %" for outlier in outliers[:SHOWN]]
        sentence = f"{len(outliers)} points lie off the law: {', '.join(names)}"
    if len(outliers) > SHOWN:
        sentence += ", ... (law.json names all)"
    lines = [f"WARNING: {group.recipe}: {sentence}; look at what happened there"]
    fit = group.law
    if fit.without_outliers:
        percent = f"{100 * known(fit.scatter):.2g} %"
        lines.append(
            f"  without what lies off, residuals are {percent} and the law is"
            f" {fit.formula(fit.without_outliers)}"
        )
    return lines


def _shared_fault_lines(group: Group) -> list[str]:
    """What the intervals count where points are not independent although nobody said so."""
    fault = group.shared_fault
    if fault is None:
        return []
    what = "points of one size" if fault.by == "size" else f"points of one {fault.by!r}"
    return [
        f"WARNING: {group.recipe}: {what} lie off the law together (F-test: chance"
        f" {fault.chance:.1g} if each point were independent), so intervals count {fault.groups} of"
        f" them, not {len(group.loss)} points"
    ]


def _lack_of_fit_lines(group: Group) -> list[str]:
    """How L(N, D) misses the points, and what mends it."""
    lack = group.lack_of_fit
    if lack is None:
        return []
    noise = f"{100 * lack.noise.sd:.2g} % (of {lack.noise.source})"
    line = (
        f"WARNING: {group.recipe}: L(N, D) does not fit: residuals of"
        f" {100 * lack.scatter:.2g} %, noise of {noise}"
    )
    if lack.mended is None:
        return [
            line,
            "  leaving out early points, up to half of all, does not mend it: another form is"
            " needed",
        ]
    return [line, _mended_line(group, lack.mended)]


def _mended_line(group: Group, mended: WithoutEarly) -> str:
    names = group.names_of(mended.left_out)
    listing = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        listing += ", ..."
    return (
        f"  without the {len(names)} points below {mended.below:.3g} tokens per"
        f" {KIND[group.convention]}parameter ({listing}): {mended.fit.formula()}, residuals of"
        f" {100 * known(mended.fit.residual_rms):.2g} %"
    )


# ------------------------------------------------------------------------------------ the headline


def headline_lines(group: Group) -> list[str]:
    """A group's headlined law with its intervals, what it rests on, and why it is this form."""
    fit = group.law
    formula = fit.formula() or f"not fitted: {refusal_words(fit.reason)}"
    lines = [_points_line(group), f"  {group.headline}: {formula}"]
    if fit.ci95:
        lines += [
            f"    95 %: {intervals(fit)}",
            f"    from {_source_of_intervals(group)}: the points' noise alone",
        ]
    if group.frontier is not None:
        lines.append(_frontier_line(group.frontier))
    at_the_edge = near_zero(fit)
    if at_the_edge:
        lines.append(
            f"    {' and '.join(at_the_edge)} within three standard errors of zero: estimates so"
            " near the edge lean steep, as flatter ones are refused"
        )
    return [*lines, f"  why this law: {group.headline_reason}", *_doubt_lines(group)]


def _points_line(group: Group) -> str:
    kind, N = KIND[group.convention], group.x["N"]
    points = f"{len(group.loss)} {'runs' if group.records else 'points'}"
    trajectories = len(set(group.points.cluster))
    line = (
        f"{group.recipe}: {points} of {trajectories} trajectories, {kind}N {si(N.min())} to"
        f" {si(N.max())}"
    )
    if group.ray is None:
        return line
    low, high = group.ray
    return f"{line}, {low:.3g} to {high:.3g} tokens per {kind}parameter"


def _source_of_intervals(group: Group) -> str:
    fit = group.law
    if group.frontier is not None and fit.interval == "t":
        return "t-intervals over the budgets"
    return INTERVALS[fit.interval or "t"].format(clusters=fit.clusters, resamples=fit.resamples)


def _frontier_line(frontier: Fit) -> str:
    line = f"    lowest loss for a compute: {frontier.formula().replace('L =', 'L* =')}"
    return f"{line}, 95 %: {intervals(frontier)}" if frontier.ci95 else line


def _doubt_lines(group: Group) -> list[str]:
    """What the forms say at FAR times the largest compute."""
    place = ""
    if group.form_doubt:
        doubt = group.form_doubt
        low, high = doubt.low, doubt.high
        place = f" (N {si(doubt.N)}, D {si(doubt.D)})"
    else:
        losses = [float(form.predict(FAR * group.x["C"].max())) for form in _forms_over_c(group)]
        if not losses and group.is_surface:
            return ["  doubt in the form: no other form reaches ten times the largest compute"]
        if not losses:
            return []
        low, high = min(losses), max(losses)
    return [
        f"  doubt in the form: at ten times the largest compute{place} {low:.4g} to {high:.4g} nats"
        " per token"
    ]


def _forms_over_c(group: Group) -> Iterable[Fit]:
    return group.bands.get("C", ())


def intervals(fit: Fit) -> str:
    """Such as "alpha 0.31 to 0.37, beta 0.33 to 0.41"; "" without any."""
    ci95 = fit.ci95 or {}
    return ", ".join(f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in ci95.items())


# --------------------------------------------------------------------------------------- every law


def tables(group: Group) -> list[str]:
    """Every law with its certificate, and the headlined one under other choices."""
    laws = [_law_row(form, fit) for form, fit in group.laws.items()]
    refits = [refit_row(refit_entry(refit)) for refit in group.robustness]
    return [
        "",
        f"{group.recipe}: every law",
        format_table(laws),
        "",
        f"{group.recipe}: {group.headline} under other choices",
        format_table(refits),
    ]


def _law_row(form: str, fit: Fit) -> dict[str, object]:
    starts = f"{fit.starts_at_best} of {fit.starts}" if fit.starts else None
    return {
        "law": form,
        "n": fit.n,
        "fitted": fit.formula(),
        "95 %": intervals(fit),
        "rms": fit.residual_rms,
        "starts at best": starts,
        "gradient": fit.gradient_norm,
        "not identified because": refusal_words(fit.reason),
    }
