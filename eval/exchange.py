"""Let ranks work together such that none waits for one that has failed.

Ranks that work side by side meet in exchanges. A rank that fails between two of them, wherever that
is, sends its failure in the place of its next value; all ranks then leave at that exchange. So a
failure of one rank, which its foreign code and data may have for itself, is met by all alike."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from runtime.checkpoint import gather
from runtime.parallel import World

T = TypeVar("T")


class RankFailed(Exception):
    """A rank failed; its text says why. Raised on all ranks."""


class RankStopped(Exception):
    """A rank is asked to stop. Raised on all ranks."""


class _Message(NamedTuple):
    value: Any
    failure: str | None
    is_stopping: bool


class Exchange:
    """Called with a value, the values of all ranks, by rank, on every rank. Raises RankFailed and
    RankStopped, after which no rank calls it again."""

    def __init__(self, world: World, is_stopping: Callable[[], bool]):
        """is_stopping: whether this rank is asked to stop, asked at each exchange."""
        self._world = world
        self._is_stopping = is_stopping

    def __call__(self, value: Any) -> list:
        return self._send(_Message(value, None, self._is_stopping()))

    def fail(self, failure: str) -> None:
        """Tell the others; raises RankFailed."""
        self._send(_Message(None, failure, False))

    def _send(self, message: _Message) -> list:
        messages: list[_Message] = gather(message, self._world)
        failures = [m.failure for m in messages if m.failure is not None]
        if failures:
            raise RankFailed(failures[0])
        if any(m.is_stopping for m in messages):
            raise RankStopped
        return [m.value for m in messages]


def work_together(
    work: Callable[[Exchange], T], world: World, is_stopping: Callable[[], bool]
) -> T:
    """What work(exchange) returns on this rank, once it has returned on all. Raises RankFailed on
    all ranks where it raises on one, RankStopped where one is asked to stop."""
    exchange = Exchange(world, is_stopping)
    try:
        result = work(exchange)
    except (RankFailed, RankStopped):
        raise
    except (Exception, SystemExit) as error:  # of foreign code: whatever it raises
        reason = (str(error).strip().splitlines() or [""])[0]
        exchange.fail(f"{type(error).__name__}: {reason}"[:500])
        raise AssertionError("an exchange with a failure raises") from error
    exchange(None)
    return result
