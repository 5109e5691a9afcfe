"""Decide whether a step's loss and gradient norm are sane."""

import enum
import math

MAX_CONSECUTIVE = 10    # skipped steps in a row after which training is not recovering by itself


class Verdict(enum.Enum):
    OK = "OK"           # apply the update
    SKIP = "SKIP"       # leave weights and moments alone: an update multiplied by zero would still spread a NaN


class GuardError(RuntimeError):
    """Training cannot go on; the message says since when and what was seen."""


class Guard:
    """Judges each step before the optimizer is touched; every rank sees the same two numbers, so all agree."""

    def __init__(self, consecutive: int = 0, skipped: int = 0):
        self.consecutive = consecutive      # skips since the last accepted step
        self.skipped = skipped              # skips since the run began

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """The verdict on a step. Raises GuardError after MAX_CONSECUTIVE skips in a row."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.consecutive = 0
            return Verdict.OK
        self.consecutive += 1
        self.skipped += 1
        if self.consecutive >= MAX_CONSECUTIVE:
            raise GuardError(f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; not one finite step in the last "
                             f"{self.consecutive}: lower optim.lr, or resume from an older checkpoint")
        return Verdict.SKIP

    def state(self) -> dict[str, int]:
        return {"consecutive": self.consecutive, "skipped": self.skipped}
