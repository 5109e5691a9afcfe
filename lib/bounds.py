"""Bounds of a number, declared beside its field: `lr: float = above_zero()  # learning rate`."""

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """The smallest and the largest value that a number may have."""

    low: float
    high: float
    is_open: bool = False  # whether low and high themselves are outside

    def problem(self, key: str, value: float) -> str | None:
        """The sentence for a value outside; None for one inside."""
        if self.is_open:
            if self.low < value < self.high:
                return None
            return f"{key}={value} must be a positive, finite number"
        if self.low <= value <= self.high:
            return None
        return f"{key}={value} must lie between {self.low} and {self.high}"


METADATA_KEY = "bounds"


def above_zero(default: Any = MISSING) -> Any:
    """A field of the dataclass whose number is positive and finite."""
    return _bounded(Bounds(0, math.inf, is_open=True), default)


def within(low: float, high: float, default: Any = MISSING) -> Any:
    """A field whose number lies between `low` and `high`, both included."""
    return _bounded(Bounds(low, high), default)


def any_number(default: Any = MISSING) -> Any:
    """A field whose number has no bounds, by choice."""
    return _bounded(Bounds(-math.inf, math.inf), default)


def _bounded(bounds: Bounds, default: Any) -> Any:
    return field(default=default, metadata={METADATA_KEY: bounds})


def bound_problems(prefix: str, value: Any) -> Iterator[str]:
    """A sentence for each number of the dataclass `value` outside its bounds. A word in a number's
    place, such as auto or none, has none."""
    for f in fields(value):
        number = getattr(value, f.name)
        if METADATA_KEY not in f.metadata or not isinstance(number, int | float):
            continue
        problem = f.metadata[METADATA_KEY].problem(prefix + f.name, number)
        if problem is not None:
            yield problem
