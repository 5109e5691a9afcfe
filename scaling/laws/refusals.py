"""Why points do not determine a law: what is lacking, as numbers. scaling/law_words.py has the
sentences."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why a law is not fitted or not identified."""


class CannotFit(ValueError):
    """A law cannot be fitted at all; `refusal` says why."""

    def __init__(self, refusal: Refusal):
        super().__init__(repr(refusal))
        self.refusal = refusal


@dataclass(frozen=True)
class FewPoints(Refusal):
    """Fewer distinct points than parameters."""

    points: int
    needed: int


@dataclass(frozen=True)
class UnknownAxis(Refusal):
    """Neither tokens nor compute are known, and the law is one of them."""


@dataclass(frozen=True)
class SeveralRatios(Refusal):
    """A ray law, but the points lie at more than one ratio of tokens to parameters."""

    lowest: float
    highest: float


@dataclass(frozen=True)
class NarrowRatios(Refusal):
    """Ratios of tokens to parameters so near each other that alpha and beta trade places."""

    lowest: float
    highest: float
    needed: float  # largest over smallest


@dataclass(frozen=True)
class FewLevels(Refusal):
    """So few distinct N, or D, that its term passes for E."""

    axis: str
    levels: int
    needed: int


@dataclass(frozen=True)
class FewForSurface(Refusal):
    """Too few distinct points for Chinchilla's five parameters."""

    points: int
    needed: int


@dataclass(frozen=True)
class NoFreedom(Refusal):
    """No more points than parameters."""

    points: int
    parameters: int


@dataclass(frozen=True)
class NoFloor(Refusal):
    """E runs to zero."""


@dataclass(frozen=True)
class NotFalling(Refusal):
    """An exponent is not above zero."""

    exponent: str


@dataclass(frozen=True)
class NotConverged(Refusal):
    """The best of the starts has not reached an optimum."""

    starts: int


@dataclass(frozen=True)
class Inseparable(Refusal):
    """The Jacobian is singular: some parameters can be exchanged for others."""


@dataclass(frozen=True)
class FlatExponent(Refusal):
    """The 95 % interval of an exponent holds 0: its term is then a constant, as E is."""

    exponent: str


@dataclass(frozen=True)
class SingleTrajectories(Refusal):
    """Without one of the trajectories the points do not determine the law."""

    trajectories: int


@dataclass(frozen=True)
class FewMinima(Refusal):
    """Too few compute budgets have an interior minimum."""

    minima: int
    budgets: int
    needed: int
    sizes: int  # that a budget needs


@dataclass(frozen=True)
class SharedMinima(Refusal):
    """Without one of the trajectories too few budgets have a minimum."""

    needed: int


@dataclass(frozen=True)
class FewSizes(Refusal):
    """A budget has too few sizes for a minimum."""

    sizes: int
    needed: int


@dataclass(frozen=True)
class NoInteriorMinimum(Refusal):
    """A budget's smallest or largest size has the lowest loss."""


@dataclass(frozen=True)
class NoValley(Refusal):
    """The valley through a budget's losses has no minimum between its sizes."""


# ---------------------------------------------------------------- why a form forecasts nothing


@dataclass(frozen=True)
class FewComputes(Refusal):
    """Points of too few different computes; seeds add none."""

    computes: int
    needed: int


@dataclass(frozen=True)
class FewForFreeRay(Refusal):
    """Too few points for a ray law whose exponent is free."""

    points: int
    needed: int


@dataclass(frozen=True)
class NegativeFloor(Refusal):
    """The form would need E below zero."""


@dataclass(frozen=True)
class DoesNotFit(Refusal):
    """Chinchilla's law misses its points."""

    scatter: float  # of ln L


@dataclass(frozen=True)
class NoInterval(Refusal):
    """No degree of freedom is left for an interval."""


@dataclass(frozen=True)
class MissesPoints(Refusal):
    """Farther from the points than the best form that speaks."""

    residual_rms: float  # of ln L


@dataclass(frozen=True)
class Refuted(Refusal):
    """Chinchilla's law meets the points, and this form misses them by more than chance allows."""

    residual_rms: float  # of ln L
    chinchilla_sigma: float  # of ln L


@dataclass(frozen=True)
class NoLawReaches(Refusal):
    """No form says anything at the target."""

    N: float
    D: float
    at_this_ratio: int  # points
    points: int
    chinchilla: Refusal  # why that law is out
