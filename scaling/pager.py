"""How much of a page a command prints without --all."""

LINES = 40  # of a page


def shortened(lines: list[str], room: int) -> list[str]:
    """The lines, or as many as there is room for, the last of which says how many are missing."""
    room = max(1, room)
    if len(lines) <= room:
        return lines
    first_lines = lines[: room - 1]
    return [*first_lines, f"... {len(lines) - len(first_lines)} more lines with --all"]
