"""Read the margin of equivalence, and put the verdict on a gap into words."""

from dataclasses import dataclass
from datetime import datetime

from lib.errors import UserError
from scaling.paired.estimates import ALPHA, Estimate, grouped, smallest_seen
from scaling.paired.gaps import is_idle
from scaling.records import read_study


@dataclass(frozen=True)
class Margin:
    """What a gap may lie within and be called equivalent: per cent of the loss; `source` says who
    declared it, when."""

    percent: float
    source: str
    is_declared: bool  # before any of the runs began


def read_margin(records, given: float | None = None) -> Margin | None:
    """The margin of the study.json beside the records' folders, or `given` on the command line;
    None without either."""
    found = (
        [] if given is None else [Margin(given, "given on the command line, after the fact", False)]
    )
    for folder, some in (
        grouped(records, lambda record: record.folder.parent) if given is None else ()
    ):
        if study := read_study(folder):
            try:
                declared = datetime.fromisoformat(study["declared"])
                late = sum(
                    not one.t_start or datetime.fromisoformat(one.t_start) < declared
                    for one in some
                )
                when = f"after {late} of {len(some)} runs had begun" if late else "before the runs"
                found.append(
                    Margin(
                        float(study["margin_percent"]),
                        f"{folder}/study.json, declared {study['declared']}, {when}",
                        not late,
                    )
                )
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{folder}/study.json cannot be read ({type(error).__name__}): give"
                    " margin=PERCENT"
                ) from None
    percents = sorted({margin.percent for margin in found})
    if len(percents) > 1 or any(not 0 < percent < 100 for percent in percents):
        raise UserError(
            f"margin: {', '.join(map(str, percents))}; expected one number of per cent of the loss,"
            " above 0 and below 100: correct it, analyse one study at a time, or give"
            " margin=PERCENT"
        )
    # the late one, where there is one
    return min(found, key=lambda margin: margin.is_declared, default=None)


def verdict(found: Estimate, margin: Margin | None, p: float | None) -> str:
    """A sentence's end for a gap in per cent with the p of its test against the margin; never "no
    loss"."""
    if found.se is None:
        return f"no interval (n = {found.n})"
    within = ""
    if margin and p is not None and p < ALPHA:
        within = (
            f"within ±{margin.percent:g} % (TOST,"
            f" p={p:.2g}{'' if margin.is_declared else ', margin after the fact'})"
        )
    if found.low > 0 or found.high < 0:
        return f"{'costs' if found.mean > 0 else 'gains'} {abs(found.mean):.3g} %" + (
            f", {within}" if within else ""
        )
    return (
        f"equivalent {within}"
        if within
        else f"undecided: interval {found.low:+.2g} to {found.high:+.2g}"
    )


def judged(chosen, found: Estimate, margin: Margin | None, p: float | None) -> dict:
    """Of one recipe's pairs with their gap in per cent and the p of its equivalence: verdict,
    tost_p, smallest_seen [%]; None where unknown."""
    return {
        "verdict": (
            "BF16 again: no Linear converted" if is_idle(chosen) else verdict(found, margin, p)
        ),
        "tost_p": p,
        "smallest_seen": found.se and smallest_seen(found.sd, found.n),
    }
