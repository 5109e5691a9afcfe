"""Text for people: the nearest name, tables, durations, counts."""

import difflib
from collections.abc import Sequence


def nearest(word: str, choices: list[str]) -> str:
    """How an error sentence goes on: the likely meaning of `word`, or else all the choices.

    Among section.key the key decides, then the section: an equal section alone must not bring
    optim.xyz near to optim.eps."""
    has_sections = any("." in choice for choice in choices)
    names = {
        choice: (choice.rpartition(".")[2] if has_sections else choice).lower()
        for choice in (*choices, word)
    }
    likeness = 0.65 if has_sections else 0.5
    close_names = difflib.get_close_matches(
        names[word], [names[choice] for choice in choices], 1, likeness
    )
    candidates = [choice for choice in choices if names[choice] in close_names]
    closest = difflib.get_close_matches(word, candidates, 1, cutoff=0)
    if closest:
        return f"; did you mean {closest[0]!r}?"
    if len(choices) > 20:
        return "; --help lists all"
    return f"; there are: {', '.join(choices) or 'none'}"


def grid(lines: list[list[str]]) -> str:
    """Cells as a Markdown table whose columns are aligned, so that it reads in a terminal too;
    empty columns go. A | in a cell is escaped: it would begin another cell."""
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    columns = [
        column for column in zip(*escaped, strict=True) if any(column[1:]) or len(lines) == 1
    ]
    widths = [max(map(len, column)) for column in columns]
    rows = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in zip(*columns, strict=True)
    ]
    return "\n".join(
        [rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]]
    )


def duration(seconds: float) -> str:
    """ "45 s", "3 min 20 s", "5 h 07 min"."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {s:02d} s"
    return f"{s} s"


def si(value: float) -> str:
    """Three digits and k, M, B or T: "51.2k"."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:  # 999.7k is 1M in three digits
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 table", "2 tables"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(items: Sequence[object], most: int = 6) -> str:
    """Items in a sentence, the first `most` of them and how many more."""
    text = ", ".join(map(str, items[:most]))
    if len(items) <= most:
        return text
    return f"{text} and {len(items) - most} more"
