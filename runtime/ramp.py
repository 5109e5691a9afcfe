"""A batch ramp: which tokens each step of a run trains on, where the first steps are smaller.

A run is counted in full steps of data.tokens_per_step tokens. data.ramp cuts the first full steps
into equal parts, and each part is one step of the optimizer; without a ramp every full step has one
part. Number and order of the tokens, and the learning rate of each full step, are those of the run
without a ramp."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

PAIR = re.compile(r"(\d*\.?\d+):(\d*\.?\d+)", re.ASCII)
FORM = (
    "share of the run's tokens:share of data.tokens_per_step,... such as 0.1:0.25,0.3:0.5, both"
    " ascending and below 1, the second 1/2, 1/3, 1/4 .."
)


@dataclass(frozen=True)
class Stage:
    """A stretch of a run in which all steps have the same size."""

    full_steps: int
    parts: int  # steps that each of its full steps is cut into

    @property
    def steps(self) -> int:
        return self.full_steps * self.parts


@dataclass(frozen=True)
class Place:
    """What a step trains on: part number `part`, from 0, of `parts` equal ones of a full step."""

    full_step: int
    part: int
    parts: int

    @property
    def position(self) -> Fraction:
        """How many full steps of the run come before it."""
        return self.full_step + Fraction(self.part, self.parts)


@dataclass(frozen=True)
class Ramp:
    """The stages of a run; the last one has full steps."""

    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return sum(stage.steps for stage in self.stages)

    @property
    def small_steps(self) -> int:
        """Number of steps before the first one of full size."""
        return self.steps - self.stages[-1].steps

    def place(self, step: int) -> Place:
        """The place of a step, counted from 0. Steps beyond the run's last one are full."""
        start = 0  # full steps before the stage
        for stage in self.stages[:-1]:
            if step < stage.steps:
                whole, part = divmod(step, stage.parts)
                return Place(start + whole, part, stage.parts)
            step -= stage.steps
            start += stage.full_steps
        return Place(start + step, 0, 1)

    def full_steps_between(self, first: int, last: int) -> int:
        """How many full steps hold the tokens of steps `first` to `last` (exclusive), rounded
        up."""
        return math.ceil(self.place(last).position - self.place(first).position)

    def describe(self, tokens_per_step: int) -> list[str]:
        """A line on the sizes of steps; none where all are full."""
        if len(self.stages) == 1:
            return []
        sizes = [
            f"{stage.steps:,} steps of {tokens_per_step // stage.parts:,} tokens"
            for stage in self.stages
        ]
        return [f"data.ramp: {', then '.join(sizes)}: {self.steps:,} in all"]


@lru_cache(maxsize=64)
def ramp_of(text: str | None, full_steps: int) -> Ramp:
    """The ramp that data.ramp spells, in a run of so many full steps. Raises ValueError where the
    text is no ramp."""
    pairs = [] if text is None else [_read_pair(pair.strip()) for pair in text.split(",")]
    for (share, parts), (next_share, next_parts) in pairwise(pairs):
        if share >= next_share or parts <= next_parts:
            raise ValueError(text)
    stages = []
    start = 0
    for share, parts in [*pairs, (1.0, 1)]:
        end = round(share * full_steps)
        stages.append(Stage(end - start, parts))
        start = end
    return Ramp(tuple(stages))


def _read_pair(text: str) -> tuple[float, int]:
    """The share of the run's tokens at which a stage ends, and into how many parts it cuts each
    full step."""
    match = PAIR.fullmatch(text)
    if match is None:
        raise ValueError(text)
    share, size = float(match[1]), float(match[2])
    if not 0 < share < 1 or not 0 < size < 1:
        raise ValueError(text)
    parts = round(1 / size)
    if parts < 2 or abs(size * parts - 1) > 0.015:  # 0.33 is a third
        raise ValueError(text)
    return share, parts
