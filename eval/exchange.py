"""Let ranks work together so that none waits for one that has failed.

The ranks gather values in exchanges. A rank that fails between two exchanges sends its failure
instead of its next value, and all ranks leave at that exchange. So a failure that one rank alone
has, in a task's code or data, ends the work on all of them."""

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
    """exchange(value) returns, on every rank, the values of all ranks by rank. Raises RankFailed or
    RankStopped, after which no rank calls it again."""

    def __init__(self, world: World, is_stopping: Callable[[], bool]):
        """is_stopping: whether this rank is asked to stop, asked at each exchange."""
        self._world = world
        self._is_stopping = is_stopping

    def __call__(self, value: Any) -> list:
        return self._send(_Message(value, None, self._is_stopping()))

    def fail(self, failure: str) -> None:
        """Tell the others; raises RankFailed."""
        # asked here too: it tells the watchdog that this rank is as far as the others
        self._send(_Message(None, failure, self._is_stopping()))

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
    except (Exception, SystemExit) as error:  # a task's own code may raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        exchange.fail(f"{type(error).__name__}: {reason}"[:500])
        raise AssertionError("an exchange with a failure raises") from error
    exchange(None)
    return result
