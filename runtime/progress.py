"""Show the progress of long work: a live line on a terminal, a line a minute in a log."""

import sys
import time
from collections.abc import Callable

LIVE_S, LOG_S = 0.5, 60.0       # seconds between two lines


class ProgressLine:
    """Progress of `name` in `unit`, such as "tokens", on stderr. Work that takes less than an interval shows nothing."""

    def __init__(self, name: str, unit: str, is_shown: bool = True):
        self._name, self._unit, self._is_shown, self._due = name, unit, is_shown, 0.0
        self._is_live, self._first = sys.stderr.isatty(), (0.0, 0.0, 0.0)       # time, units and share at the first look

    def show(self, state: Callable[[], tuple]) -> None:
        """`state()` gives the units so far, the share of the work that is done, 0 to 1, and words to add; called only when a line
        is due."""
        now = time.monotonic()
        if not self._is_shown or now < self._due:
            return
        is_first, self._due = not self._due, now + (LIVE_S if self._is_live else LOG_S)
        units, share, *words = state()
        if is_first:        # units that were there at the start say nothing of the speed
            self._first = now, units, share
            return
        seconds, gained = now - self._first[0], share - self._first[2]
        told = [f"{si(units)} {self._unit}", f"{si((units - self._first[1]) / seconds)}/s", *words]
        told += [f"{duration(seconds * (1 - share) / gained)} left"] if gained > 0 else []
        self.clear()
        print(f"{self._name}: {share:.0%}, {', '.join(told)}", end="" if self._is_live else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the live line, before something else is printed and at the end."""
        if self._is_live and self._due:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """"45 s", "3 min 20 s", "5 h 07 min"."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {s:02d} s" if minutes else f"{s} s"


def si(value: float) -> str:
    """Three digits and k, M, B or T: "51.2k"."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:     # 999.7k is 1M in three digits
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
