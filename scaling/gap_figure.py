"""Draw paired gaps with the noise that is known of them.

Two noises are told apart. Seed noise: other seeds would give another gap. Its bar is the 95 %
t-interval over independent pairs. Evaluation noise: other validation sequences would give another
gap. It is the smaller of the two and says nothing of seeds. A single pair knows its evaluation
noise alone, so its marker is hollow and its bar thin."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from scaling.paired.estimates import Estimate

NORMAL_95 = 1.96  # standard errors in half a 95 % interval of many values


@dataclass(frozen=True)
class DrawnGap:
    """One marker: the mean gap of the pairs at one size, budget and recipe, in the panel's unit."""

    x: float
    mean: float
    n: int  # independent pairs
    seed_half: float | None  # half the 95 % interval over the pairs; None where they show no spread
    evaluation_half: float | None  # half the 95 % interval over validation sequences, where known

    @property
    def is_single(self) -> bool:
        return self.seed_half is None

    @property
    def half(self) -> float:
        """Half the length of the bar; 0 where no noise is known."""
        half = self.evaluation_half if self.seed_half is None else self.seed_half
        return half or 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """What the axis holds: the bar, but of two pairs the mean alone, since their interval is
        12.7 standard errors long."""
        half = 0.0 if self.n == 2 else self.half
        return self.mean - half, self.mean + half


def gap_at(x: float, gap: Estimate, evaluation_se: float | None) -> DrawnGap:
    """The marker of an estimated gap; evaluation_se: of a single pair, in the unit of the gap."""
    evaluation_half = None if evaluation_se is None else NORMAL_95 * evaluation_se
    return DrawnGap(x, gap.mean, gap.n, gap.half, evaluation_half)


def draw_gaps(
    panel: Axes, gaps: Iterable[DrawnGap], style: dict, floor: float | None = None
) -> None:
    """Draw the markers: filled with the interval over pairs, hollow with a thin bar; floor: the
    lower end of a logarithmic axis, at which a longer bar ends in an arrow."""
    gaps = list(gaps)
    for is_single in (False, True):
        alike = [gap for gap in gaps if gap.is_single is is_single]
        if not alike:
            continue
        panel.errorbar(
            [gap.x for gap in alike],
            [gap.mean for gap in alike],
            [_lower_halves(alike, floor), [gap.half for gap in alike]],
            **style,
            linestyle="none",
            markerfacecolor="white" if is_single else style["color"],
            markeredgewidth=1.1,
            capsize=0 if is_single else 2.5,
            elinewidth=0.6 if is_single else 1.3,
            zorder=3,
        )
    if floor is not None:
        _draw_arrows(panel, gaps, style["color"], floor)


def _draw_arrows(panel: Axes, gaps: Sequence[DrawnGap], color: str, floor: float) -> None:
    """An arrow for each bar that ends below the floor."""
    below = [gap for gap in gaps if gap.mean - gap.half < floor]
    if below:
        panel.plot(
            [gap.x for gap in below],
            [floor for _ in below],
            color=color,
            marker="v",
            markersize=4,
            linestyle="none",
            clip_on=False,
            zorder=3,
        )


def _lower_halves(gaps: Sequence[DrawnGap], floor: float | None) -> list[float]:
    """How far each bar goes down."""
    if floor is None:
        return [gap.half for gap in gaps]
    return [min(gap.half, gap.mean - floor) for gap in gaps]


def gap_handles(gaps: Iterable[DrawnGap]) -> list[Line2D]:
    """The legend of the markers that are drawn, in grey: which is a mean over pairs, which one
    pair."""
    gaps = list(gaps)
    grey: dict[str, Any] = {
        "color": "#666666",
        "marker": "o",
        "markersize": 4.5,
        "linestyle": "none",
    }
    handles = []
    if any(not gap.is_single for gap in gaps):
        handles.append(Line2D([], [], **grey, label="mean of pairs, 95 % interval"))
    if any(gap.is_single for gap in gaps):
        has_noise = any(gap.is_single and gap.evaluation_half for gap in gaps)
        label = "single pair, evaluation noise" if has_noise else "single pair, noise unknown"
        handles.append(Line2D([], [], **grey, markerfacecolor="white", label=label))
    return handles
