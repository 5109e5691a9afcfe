"""The measured points that a law is fitted to."""

from dataclasses import dataclass

import numpy as np

from scaling.laws.forms import POWERS

ONE_RAY = 1.05  # tokens-per-parameter ratios within 5 % count as one
ONE_SIZE = 0.01  # ln N: sizes nearer than this are one, as counts read off a figure vary


@dataclass(frozen=True, eq=False)
class Points:
    """n measured points: parameters N, tokens D, FLOPs C, loss in nats per token; points of one
    trajectory share a label."""

    N: np.ndarray
    D: np.ndarray
    C: np.ndarray
    loss: np.ndarray
    cluster: np.ndarray

    def __len__(self) -> int:
        return len(self.loss)

    def axes(self, form: str) -> tuple[np.ndarray, ...]:
        """The abscissae that a form's predict takes: (N, D) for chinchilla, else one of C, N, D."""
        return tuple(getattr(self, power.axis) for power in POWERS[form])

    @property
    def ray(self) -> tuple[float, float]:
        """Smallest and largest tokens per parameter."""
        ratios = self.D / self.N
        return float(ratios.min()), float(ratios.max())

    @property
    def only_axis(self) -> str | None:
        """Along which the points differ where it is one alone: "D" at one size, "N" at one number
        of tokens."""
        is_one_size, is_one_budget = (np.ptp(np.log(x)) < ONE_SIZE for x in (self.N, self.D))
        if is_one_size == is_one_budget:
            return None
        return "D" if is_one_size else "N"

    def take(self, index: np.ndarray) -> "Points":
        """The points at `index`: positions, or a mask of shape (n,)."""
        return Points(
            self.N[index], self.D[index], self.C[index], self.loss[index], self.cluster[index]
        )


def on_one_ray(ray: tuple[float, float] | None) -> bool:
    """Whether these smallest and largest tokens per parameter count as one ratio."""
    return ray is not None and ray[1] / ray[0] <= ONE_RAY


def sizes_of(N: np.ndarray) -> np.ndarray:
    """(n,) which size each N is, 0 the smallest; within 1 % they are one."""
    ascending = np.sort(N)
    is_new = np.r_[True, np.diff(np.log(ascending)) > ONE_SIZE]
    return np.searchsorted(ascending[is_new], N, "right") - 1
