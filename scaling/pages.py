"""Lay the commands' results out for people: tables in Markdown, numbers, at most so many lines."""

from collections.abc import Mapping, Sequence

from lib.text import counted, grid

LINES = 40  # that the console gets without --all


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows in Markdown, with a column for each key that some row has; floats have four digits, None
    is an empty cell."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_format_cell(row.get(name)) for name in names] for row in rows]
    return grid([names, *lines])


def _format_cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_fixed(value: float | None, digits: int) -> str | None:
    """With so many decimals and a comma between thousands; None stays."""
    return None if value is None else f"{value:,.{digits}f}"


def shortened(lines: list[str], room: int) -> list[str]:
    """The lines, or as many as there is room for, the last of which says how many are missing."""
    room = max(1, room)
    if len(lines) <= room:
        return lines
    first_lines = lines[: room - 1]
    return [*first_lines, f"... {len(lines) - len(first_lines)} more lines with --all"]


def format_page(
    head: Sequence[str], blocks: Sequence[str], foot: str, is_all: bool, most_lines: int = LINES
) -> str:
    """The parts of `head`, then as many of the `blocks` as most_lines hold (all where everything is
    wanted), how many more there are, and the foot."""
    parts = [part for part in head if part]
    count = 0
    for block in blocks:
        # 5: what stands between the parts, and the foot
        if not is_all and "\n\n".join([*parts, block]).count("\n") + 5 > most_lines:
            break
        parts.append(block)
        count += 1
    if count < len(blocks):
        parts.append(f"{counted(len(blocks) - count, 'more table')}: --all")
    return "\n\n".join([*parts, foot])
