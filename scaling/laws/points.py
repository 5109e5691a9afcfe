"""The measured points that a law is fitted to."""

from dataclasses import dataclass, fields

import numpy as np

from scaling.laws.forms import POWERS

ONE_RAY = 1.05  # tokens-per-parameter ratios within 5 % count as one


@dataclass(frozen=True, eq=False)
class Points:
    """n measured points: parameters N, tokens D, FLOPs C, loss in nats per token; points of one
    trajectory share a label."""

    N: np.ndarray
    D: np.ndarray
    C: np.ndarray
    loss: np.ndarray
    cluster: np.ndarray

    def axes(self, form: str) -> tuple[np.ndarray, ...]:
        """The abscissae that a form's predict takes: (N, D) for chinchilla, else one of C, N, D."""
        return tuple(getattr(self, axis) for _, axis, _ in POWERS[form])

    @property
    def ray(self) -> tuple[float, float]:
        """Smallest and largest tokens per parameter."""
        ratios = self.D / self.N
        return float(ratios.min()), float(ratios.max())

    def take(self, index) -> "Points":
        """The points at `index`, which numpy must accept as one."""
        return Points(*(getattr(self, one.name)[index] for one in fields(self)))


def on_one_ray(ray: tuple[float, float] | None) -> bool:
    """Whether these smallest and largest tokens per parameter count as one ratio."""
    return ray is not None and ray[1] / ray[0] <= ONE_RAY


def sizes_of(N) -> np.ndarray:
    """(n,) which size each N is, 0 the smallest; within 1 % they are one, as counts read off a
    figure vary."""
    ascending = np.sort(N)
    smallest = ascending[np.r_[True, np.diff(np.log(ascending)) > 0.01]]
    return np.searchsorted(smallest, N, "right") - 1
