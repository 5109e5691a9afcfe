"""A line on stderr that says how far a long piece of work is."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lib.text import duration, si

LIVE_S, LOG_S = 0.5, 60.0  # seconds between two lines of progress, live and in a log


@contextmanager
def progress_line(
    name: str, unit: str, state: Callable[[], tuple], is_shown: bool = True
) -> Iterator[Callable[[], None]]:
    """A function that tells, when a line is due, the progress of `name` in `unit`, such as
    "tokens", on stderr. Work that takes less than an interval shows nothing. state(): units so far,
    share of the work that is done, 0 to 1, and words to add."""
    is_live = sys.stderr.isatty()
    start_s = time.monotonic()
    units_at_start, share_at_start, *_ = state()
    clear, interval = ("\r\x1b[2K", LIVE_S) if is_live else ("", LOG_S)
    due = start_s + interval if is_shown else math.inf

    def show() -> None:
        nonlocal due
        time_s = time.monotonic()
        if time_s < due:
            return
        due = time_s + interval
        units, share, *words = state()
        # what was there at the start says nothing of the speed
        seconds = time_s - start_s
        gained = share - share_at_start
        speed = (units - units_at_start) / seconds
        parts = [f"{si(units)} {unit}", f"{si(speed)}/s", *words]
        if gained > 0:
            parts.append(f"{duration(seconds * (1 - share) / gained)} left")
        print(
            f"{clear}{name}: {share:.0%}, {', '.join(parts)}",
            end="" if is_live else "\n",
            file=sys.stderr,
            flush=True,
        )

    try:
        yield show
    finally:
        print(end=clear if is_shown else "", file=sys.stderr, flush=True)
