"""Read the margin of equivalence, and put the verdict on a gap into words."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lib.errors import UserError
from lib.text import listed, si
from scaling.declaration import Declaration, read_declaration
from scaling.paired.equivalence import Equivalence, Part
from scaling.paired.estimates import ALPHA, Estimate, grouped
from scaling.records import Record


@dataclass(frozen=True)
class Margin:
    """What a gap may lie within and be called equivalent."""

    percent: float  # of the loss
    source: str  # who declared it, when
    is_declared: bool  # before any of the runs began


def read_margin(records: Sequence[Record], percent: float | None = None) -> Margin | None:
    """The margin of the study.json beside the records' folders, or `percent` on the command line;
    None without either."""
    margins = []
    if percent is not None:
        margins.append(Margin(percent, "given on the command line, after the fact", False))
    else:
        for folder, members in grouped(records, lambda record: record.folder.parent):
            declaration = read_declaration(folder)
            if declaration is not None:
                margins.append(_declared_margin(declaration, folder, members))
    percents = sorted({margin.percent for margin in margins})
    if len(percents) > 1 or any(not 0 < percent < 100 for percent in percents):
        raise UserError(
            f"margin: {', '.join(map(str, percents))}; expected one number of per cent of the loss,"
            " above 0 and below 100: correct it, analyse one study at a time, or give"
            " margin=PERCENT"
        )
    # the late one, where there is one
    return min(margins, key=lambda margin: margin.is_declared, default=None)


def _declared_margin(declaration: Declaration, folder: Path, records: Sequence[Record]) -> Margin:
    try:
        declared = declaration.declared_at
        percent = float(declaration.margin_percent)  # type: ignore[arg-type]
        late = sum(
            not record.t_start or datetime.fromisoformat(record.t_start) < declared
            for record in records
        )
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{folder}/study.json cannot be read ({type(error).__name__}): give margin=PERCENT"
        ) from None
    when = f"after {late} of {len(records)} runs had begun" if late else "before the runs"
    source = f"{folder}/study.json, declared {declaration.declared}, {when}"
    return Margin(percent, source, not late)


def format_verdict(
    gap: Estimate, margin: Margin | None, p: float | None, is_idle: bool = False
) -> str:
    """A sentence's end for a gap in per cent with the p of its test against the margin; never "no
    loss". is_idle: no Linear was in FP8."""
    if is_idle:
        return "BF16 again: no Linear converted"
    if gap.low is None or gap.high is None:
        return f"no interval (n = {gap.n})"
    within = _format_within(margin, p)
    if gap.low > 0 or gap.high < 0:
        verb = "costs" if gap.mean > 0 else "gains"
        cost = f"{verb} {abs(gap.mean):.3g} %"
        return f"{cost}, {within}" if within else cost
    if within:
        return f"equivalent {within}"
    return f"undecided: interval {gap.low:+.2g} to {gap.high:+.2g}"


def _format_within(margin: Margin | None, p: float | None) -> str:
    """That the gap is within the margin; "" where the test does not show it."""
    if margin is None or p is None:
        return ""
    if p < ALPHA:
        after_the_fact = "" if margin.is_declared else ", margin after the fact"
        return f"within ±{margin.percent:g} % (TOST, p={p:.2g}{after_the_fact})"
    return ""


# ---------------------------------------------------------------------------- equivalence in words


def format_equivalence(equivalence: Equivalence, margin: Margin | None) -> str:
    """What the intersection-union test of one recipe says, where it fails, and what its design
    could have shown."""
    could_show = f"this design cannot show equivalence: {_no_spread(equivalence)}"
    if equivalence.could_show is not None:
        could_show = (
            f"this design could have shown equivalence within ±{equivalence.could_show:.2g} % (80 %"
            " power)"
        )
    if margin is None:
        return could_show
    failing = [part for part in equivalence.parts if part.p is None or part.p >= ALPHA]
    if failing:
        places = listed([_format_part(part) for part in failing], 3)
        return f"not shown to lie within ±{margin.percent:g} % at {places}; {could_show}"
    sizes = sum(part.kind == "size" for part in equivalence.parts)
    place = "at its size's" if sizes == 1 else f"at each of {sizes} sizes'"
    return f"within ±{margin.percent:g} % {place} largest budget; {could_show}"


def _no_spread(equivalence: Equivalence) -> str:
    """Why the gaps of a recipe show no spread."""
    if any(part.independent_pairs > 1 for part in equivalence.parts):
        return "the pairs of a size have equal gaps, which are copies, not a sample without noise"
    return "no size has a second pair and fewer than four sizes give a trend"


def _format_part(part: Part) -> str:
    """A part of the test that did not pass, such as "131k (+0.85 % of 1 pair, p=0.3)"."""
    pairs = "1 pair" if part.independent_pairs == 1 else f"{part.independent_pairs} pairs"
    gap = f"{part.mean:+.2g} % of {pairs}"
    size = si(part.N) if part.N > 1 else "the table's pairs"  # a table may give no N
    if part.p is None:
        return f"{size} ({gap}, no spread known)"
    if part.kind == "trend":
        return f"{si(part.N)} by the trend over sizes ({part.mean:+.2g} %, p={part.p:.2g})"
    borrowed = " with the other sizes' spread" if part.is_borrowed else ""
    return f"{size} ({gap}{borrowed}, p={part.p:.2g})"
