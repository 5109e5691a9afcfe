"""Tell how far a source has come, live on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Callable


class Progress:
    """One live line on a terminal; elsewhere a line every ten seconds, after two minutes one a minute."""

    def __init__(self, name: str, is_shown: bool = True):
        self._name, self._is_shown, self._is_live = name, is_shown, sys.stderr.isatty()
        self._start = self._shown = time.monotonic()
        self._first: tuple[int, float] | None = None

    def show(self, state: Callable[[], tuple[int, float]]) -> None:
        """`state` gives tokens so far and the share of the work that is done, 0 to 1; asked only when a line is due."""
        now = time.monotonic()
        wall_s = now - self._start
        if not self._is_shown or (self._first and now - self._shown < self._interval_s(wall_s)):
            return
        tokens, share = state()
        if self._first is None:     # what lay there at the start is no speed of this run
            self._first, self._start, self._shown = (tokens, share), now, now
            return
        self._shown = now
        line = f"{self._name}: {tokens / 1e6:,.1f}M tokens, {(tokens - self._first[0]) / wall_s / 1e6:,.2f}M tok/s"
        if share > self._first[1]:
            line += f", {share:.1%}, {_duration(wall_s * (1 - share) / (share - self._first[1]))} left"
        print(f"\r{line:<79}" if self._is_live else line, end="" if self._is_live else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_live and self._is_shown:
            print(f"\r{'':79}\r", end="", file=sys.stderr, flush=True)

    def _interval_s(self, wall_s: float) -> float:
        return 0.5 if self._is_live else 10 if wall_s < 120 else 60


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {s:02d} s" if minutes else f"{s} s"
