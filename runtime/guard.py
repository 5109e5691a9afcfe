"""Decide whether a step's loss and gradient norm are sane.

What is not finite is never applied, whatever guard.mode says. What is finite is held against the last guard.window
accepted steps: a spike is a loss or a gradient norm more than guard.threshold robust standard deviations above the
median, both on logarithms, upward only. In mode act the ladder is

    SKIP        leave weights and moments alone, go on with the next data
    ROLLBACK    after guard.skips in a row: back to a checkpoint from before them, data moved on, guard.rollbacks times
    STOP        when that is used up, or there is no such checkpoint

A level that lasts would be skipped for ever, so a row of guard.skips finite spikes is taken for the new level, and the
window begun anew, where the weights cannot be what is wrong:
  - the losses among them are normal, only the gradients are large: clipping holds those, and the loss goes on being judged
  - the row begins right at a rollback, losses within a factor LEVEL of each other: those weights have passed as sane on the
    data of before, and see every batch of the new data high, so the data have changed
A divergence is neither: its loss is high with the weights of now and normal again with those of the checkpoint.

Modes log and off never go back: there a row of guard.skips steps that are not finite is a STOP.
"""

import enum
import math
from collections import deque
from collections.abc import Callable
from statistics import median

from runtime.sections import GuardConfig

# Robust standard deviations of a logarithm are taken to be at least and at most: a quiet window must not make a spike of
# nothing (at threshold 10: +22 % of loss, 2.7 x the norm), nor a steep start hide one (at 10: 4.5 x the loss, 20 x the norm
# always are). In 131,000 steps of our demo runs no loss was 1.5 x its median, no norm 11 x.
LOSS_SD = (0.02, 0.15)
NORM_SD = (0.1, 0.3)
# Where a step is few tokens, single documents move the norm up to 9 x and do no harm, and how much the loss scatters tells
# where. Without this the demo runs (1,024 tokens a step) had 6 alarms in 10,000 steps; with it 0.5, and none in `make demo`.
NORM_SD_PER_LOSS_SD = 3.0
LEVEL = 2.0         # highest over lowest loss of a row of batches that count as one level
MAD_TO_SD = 1.4826  # of a normal distribution
TINY = 1e-30        # a gradient of zero has no logarithm


class Verdict(enum.Enum):
    OK = "OK"               # apply the update
    SPIKE = "SPIKE"         # apply the update, and note it: mode log, or a new level
    SKIP = "SKIP"           # leave weights and moments alone: an update multiplied by zero would still spread a NaN
    ROLLBACK = "ROLLBACK"   # skip, and go back to a checkpoint of less than `suspect_since` steps
    STOP = "STOP"           # skip, and end the run with a diagnosis


class GuardError(RuntimeError):
    """Training cannot go on; the message says since when and what was seen."""


class Guard:
    """Judges each step before the optimizer is touched; every rank sees the same two numbers, so all agree.

    `state` is what state() of an earlier Guard returned; unknown to it, or missing, is what a young run has.
    """

    def __init__(self, settings: GuardConfig, state: dict | None = None):
        state = state or {}
        self.settings = settings
        self.reason: str | None = None                      # of the last verdict that was not OK
        self.skipped: int = state.get("skipped", 0)         # steps since the run began, those undone by a rollback included
        self.rollbacks: int = state.get("rollbacks", 0)     # since the run began
        self._is_back: bool = state.get("is_back", False)   # no step has been accepted since the last rollback
        self._recall(state)

    def _recall(self, state: dict) -> None:
        self.consecutive: int = state.get("consecutive", 0)                     # skips since the last accepted step
        self.suspect_since: int | None = state.get("suspect_since")             # steps done before the first of these
        self._accepted = deque(state.get("accepted", ()), self.settings.window)     # [loss, norm] of the window's steps
        self._spikes: list[list[float]] = list(state.get("spikes", ()))         # [loss, norm] of the finite spikes in a row
        self._known: tuple[tuple[float, float], tuple[float, float]] | None = None  # _usual() of this window, once asked for

    def judge(self, step: int, loss: float, grad_norm: float, can_roll_back: Callable[[int], bool]) -> Verdict:
        """The verdict on a step that comes after `step` others. can_roll_back(before): whether there is a checkpoint of fewer
        than `before` steps; asked only where a row of skips is at its end."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._spikes.clear()
            return self._skip(step, f"loss {loss:.6g}, gradient norm {grad_norm:.6g}", can_roll_back)
        spike = self._describe_spike(loss, grad_norm) if self.settings.mode != "off" else None
        if spike is None:
            self._accept([[loss, grad_norm]])
            return Verdict.OK
        self._spikes.append([loss, grad_norm])
        if len(self._spikes) >= self.settings.skips and self._is_new_level():
            row = len(self._spikes)
            self._accepted.clear()
            self._accept(list(self._spikes))
            self.reason = f"{spike}; the last of {row} in a row, taken for the new level"
            return Verdict.SPIKE
        if self.settings.mode == "log":
            self.consecutive, self.suspect_since = 0, None
            self.reason = spike
            return Verdict.SPIKE
        return self._skip(step, spike, can_roll_back)

    def prepare(self) -> None:
        """Work out what the next step will be held against. judge() would, at 0.1 to 0.2 ms between the step's host read and its
        update, in which a GPU has nothing to do; called after the update it costs nothing."""
        if self.settings.mode != "off" and self._accepted:
            self._usual()

    def distrust(self, step: int, what: str, can_roll_back: Callable[[int], bool]) -> Verdict:
        """ROLLBACK or STOP for weights that made no sense when they were validated after `step` steps; can_roll_back as in
        judge()."""
        self.suspect_since, self.reason = step, what
        return self._give_up(can_roll_back)

    def rolled_back(self, state: dict) -> None:
        """Go on from a checkpoint that holds `state`: its window, and the counts of now, which nothing undoes."""
        self._recall(state)
        self.rollbacks += 1
        self._is_back = True

    def state(self) -> dict:
        """What a checkpoint keeps, as JSON can hold it."""
        return {"consecutive": self.consecutive, "skipped": self.skipped, "rollbacks": self.rollbacks,
                "is_back": self._is_back, "suspect_since": self.suspect_since,
                "accepted": list(self._accepted), "spikes": list(self._spikes)}

    def _accept(self, steps: list[list[float]]) -> None:
        self._accepted.extend(steps)
        self._known = None
        self._spikes.clear()
        self.consecutive, self.suspect_since, self._is_back = 0, None, False

    def _skip(self, step: int, what: str, can_roll_back: Callable[[int], bool]) -> Verdict:
        s = self.settings
        if self.consecutive == 0:
            self.suspect_since = step
        self.consecutive += 1
        self.skipped += 1
        self.reason = f"{what}; {self.consecutive} skipped in a row"
        return Verdict.SKIP if self.consecutive < s.skips else self._give_up(can_roll_back)

    def _give_up(self, can_roll_back: Callable[[int], bool]) -> Verdict:
        s = self.settings
        if s.mode != "act":
            self.reason += f", and guard.mode={s.mode} never goes back"
        elif self.rollbacks >= s.rollbacks:
            self.reason += f", and all guard.rollbacks={s.rollbacks} are used up"
        elif not can_roll_back(self.suspect_since):
            self.reason += f", and there is no checkpoint from before step {self.suspect_since} to go back to"
        else:
            return Verdict.ROLLBACK
        return Verdict.STOP

    def _is_new_level(self) -> bool:
        losses = [loss for loss, _ in self._spikes]
        usual, sd = self._usual()[0]
        if self.settings.mode == "log" or (_log(max(losses)) - usual) / sd <= self.settings.threshold:
            return True
        return self._is_back and max(losses) <= LEVEL * min(losses)

    def _describe_spike(self, loss: float, grad_norm: float) -> str | None:
        """What of the two is a spike and how much of one; None where neither is, or too few steps are known to tell."""
        if 2 * len(self._accepted) < self.settings.window:
            return None
        said = []
        for name, value, (usual, sd) in zip(("loss", "gradient norm"), (loss, grad_norm), self._usual(), strict=True):
            if (height := (_log(value) - usual) / sd) > self.settings.threshold:
                said.append(f"{name} {value:.6g} is {value / math.exp(usual):.3g} x its median {math.exp(usual):.6g} "
                            f"({height:.1f} robust standard deviations)")
        return f"{' and '.join(said)} of the last {len(self._accepted)} accepted steps" if said else None

    def _usual(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Median and standard deviation of the logarithm: of the window's losses, of its gradient norms."""
        if self._known is None:
            losses, norms = ([_log(value) for value in column] for column in zip(*self._accepted, strict=True))
            loss_sd = min(max(_robust_sd(losses), LOSS_SD[0]), LOSS_SD[1])
            norm_sd = min(max(_robust_sd(norms), NORM_SD[0], NORM_SD_PER_LOSS_SD * loss_sd), NORM_SD[1])
            self._known = (median(losses), loss_sd), (median(norms), norm_sd)
        return self._known


def _log(value: float) -> float:
    return math.log(max(value, TINY))


def _robust_sd(values: list[float]) -> float:
    middle = median(values)
    return MAD_TO_SD * median(abs(value - middle) for value in values)
