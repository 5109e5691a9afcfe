"""Judge each training step by its loss and gradient norm, and diagnose a run that has to stop.

A step whose loss or gradient norm is not finite is never applied, whatever guard.mode says. A
finite step is compared with the last guard.window accepted steps: it is a spike if its loss or
gradient norm lies more than guard.threshold robust standard deviations above their median, both on
logarithms; with guard.layers the gradient norm of each layer is judged alike, by its own past. In
mode act a spike is skipped; after guard.skips in a row the run goes back to a checkpoint
from before them and on with new data, guard.rollbacks times at most, and then stops.

A step without targets (of a source of prompts and responses, where all that the ranks have read is
prompt) has no loss to judge: it is neither applied nor entered into the window, and counted by
itself. The mean over fewer than FEW_TARGETS tokens scatters too widely to tell a spike: such a step
is applied where it is finite, and not entered into the window either.

A permanent change of level must not be skipped for ever: guard.skips finite spikes in a row are
accepted as the new level, and the window begins anew, where the weights cannot be the cause:
  - their losses are normal, only the gradient norms are high: clipping bounds those, and the loss
  is still judged - the row begins right after a rollback, its losses within a factor LEVEL of each
  other: the weights were sane on the data of
    before and every batch of the new data is high, so the data have changed
A divergence is neither: its loss is high with the current weights and normal again with those of
the checkpoint. Modes log and off never roll back: there, guard.skips steps in a row that are not
finite are a STOP."""

import enum
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from lib.files import write_json
from lib.sharding import is_dtensor
from runtime.config import GuardConfig

# Bounds of the robust standard deviation of a logarithm, so that a quiet window does not turn noise
# into a spike (at threshold 10: +22 % of loss, 2.7 x the norm), nor a steep start hide one (at 10:
# 4.5 x the loss, 20 x the norm are always one).
LOSS_SD = (0.02, 0.15)
NORM_SD = (0.1, 0.3)
# With few tokens a step, single documents raise the norm up to 9 x without harm, and the scatter of
# the loss tells where: of 10,000 steps of the demo's runs 6 were false alarms without this, 0.5
# with it. For the norms of layers it was 10, and none with it (3,000 steps of demo_s_bf16).
NORM_SD_PER_LOSS_SD = 3.0
# Simulated with easy and hard tokens, of 4,000 steps of 4 targets in the mean 1,900 were false
# alarms, of 16 targets 140, of 32 26; where steps of fewer than this are not judged, none.
FEW_TARGETS = 32
LEVEL = 2.0  # highest over lowest loss of a row of batches that count as one level
MAD_TO_SD = 1.4826  # of a normal distribution
NO_LAYERS: Mapping[str, float] = {}
TINY = 1e-30  # a gradient of zero has no logarithm


class Verdict(enum.Enum):
    OK = "OK"  # apply the update
    SPIKE = "SPIKE"  # apply the update, and log it: mode log, or a new level
    # leave weights and moments alone: an update multiplied by zero would still spread a NaN
    SKIP = "SKIP"
    # skip, and go back to a checkpoint of less than `suspect_since` steps, or STOP where there is
    # none
    ROLLBACK = "ROLLBACK"
    STOP = "STOP"  # skip, and end the run with a diagnosis
    # leave weights and moments alone: nothing was to be learned, weight decay alone would move them
    NO_TARGET = "NO_TARGET"


@dataclass
class Guard:
    """Judges each step before the optimizer is touched. Every rank passes the same two numbers, so
    all ranks agree. Guard(settings, **state) goes on where state() was taken."""

    settings: GuardConfig
    consecutive: int = 0  # skips since the last accepted step
    skipped: int = 0  # steps since the run began, those undone by a rollback included
    # steps since the run began that had none, those undone by a rollback included
    without_targets: int = 0
    rollbacks: int = 0  # since the run began
    is_back: bool = False  # no step has been accepted since the last rollback
    # steps done before the first skip in a row, or before a bad validation
    suspect_since: int | None = None
    # [loss, norm] of the window's steps; behind them, with guard.layers, the norm of each layer
    accepted: list[list[float]] = field(default_factory=list)
    # the same for the finite spikes in a row up to now
    spikes: list[list[float]] = field(default_factory=list)
    reason: str = ""  # of the last verdict that was not OK

    def state(self) -> dict:
        """What a checkpoint stores, as JSON can hold it."""
        return {
            key: value for key, value in vars(self).items() if key not in ("settings", "reason")
        }

    def rolled_back(self, state: dict) -> None:
        """Go on from a checkpoint that holds `state`: with its window, but the current counts,
        which nothing undoes."""
        vars(self).update(
            state,
            skipped=self.skipped,
            without_targets=self.without_targets,
            rollbacks=self.rollbacks + 1,
            is_back=True,
        )

    def note_no_checkpoint(self) -> None:
        """Add to the reason that a rollback has nowhere to go back to."""
        step = self.suspect_since or 0
        self.reason += f", and there is no checkpoint from before step {step} to go back to"

    def judge(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        targets: int | None = None,
        layer_norms: Mapping[str, float] = NO_LAYERS,
    ) -> Verdict:
        """The verdict on a step that comes after `step` others; `targets` of all ranks, None where
        they are many; layer_norms: layer -> norm of its gradient, of the layers to be judged."""
        if targets == 0:
            self.without_targets += 1
            self.reason = "no target in this step: all its tokens are prompts"
            return Verdict.NO_TARGET
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.spikes = []
            return self._skip(step, f"loss {loss:.6g}, gradient norm {grad_norm:.6g}")
        if targets is not None and targets < FEW_TARGETS:
            # a row of spikes is ended by a step that was compared with the window alone
            if not self.spikes:
                self._accept([])
            return Verdict.OK
        row = [loss, grad_norm, *layer_norms.values()]
        spike = self._describe_spikes(loss, grad_norm, layer_norms)
        if spike is None:
            self._accept([row])
            return Verdict.OK
        self.spikes = [*self.spikes, row]
        is_new_level = len(self.spikes) >= self.settings.skips and self._is_new_level()
        if self.settings.mode == "act" and not is_new_level:
            return self._skip(step, spike)
        self.reason, self.consecutive, self.suspect_since = spike, 0, None
        if is_new_level:
            self.reason += f"; the last of {len(self.spikes)} in a row, taken for the new level"
            self.accepted = []
            self._accept(self.spikes)
        return Verdict.SPIKE

    def reject_validation(self, step: int, what: str) -> Verdict:
        """ROLLBACK or STOP for weights whose validation after `step` steps was not finite."""
        self.suspect_since, self.reason = step, what
        return self._escalate()

    def _accept(self, steps: list[list[float]]) -> None:
        self.accepted = (self.accepted + steps)[-self.settings.window :]
        self.spikes, self.consecutive, self.suspect_since, self.is_back = [], 0, None, False

    def _skip(self, step: int, what: str) -> Verdict:
        if self.consecutive == 0:
            self.suspect_since = step
        self.consecutive += 1
        self.skipped += 1
        self.reason = f"{what}; {self.consecutive} skipped in a row"
        return Verdict.SKIP if self.consecutive < self.settings.skips else self._escalate()

    def _escalate(self) -> Verdict:
        s = self.settings
        if s.mode == "act" and self.rollbacks < s.rollbacks:
            return Verdict.ROLLBACK
        self.reason += f"; no rollback is left (guard.mode={s.mode}, guard.rollbacks={s.rollbacks})"
        return Verdict.STOP

    def _is_new_level(self) -> bool:
        losses = [row[0] for row in self.spikes]
        middle, sd = self._usual()
        is_usual = (math.log(max(*losses, TINY)) - middle[0]) / sd[0] <= self.settings.threshold
        return (
            self.settings.mode == "log"
            or is_usual
            or self.is_back
            and max(losses) <= LEVEL * min(losses)
        )

    def _describe_spikes(
        self, loss: float, grad_norm: float, layer_norms: Mapping[str, float]
    ) -> str | None:
        """Which numbers of a finite step are spikes, in words; None where none is, or none is
        judged."""
        if self.settings.mode == "off":
            return None
        return self._describe_spike(loss, grad_norm) or self._describe_layers(layer_norms)

    def _describe_spike(self, loss: float, grad_norm: float) -> str | None:
        """Which of the two is a spike, and how large; None where neither is, or the window is not
        yet half full."""
        if 2 * len(self.accepted) < self.settings.window:
            return None
        spikes = []
        for name, value, middle, sd in zip(
            ("loss", "gradient norm"), (loss, grad_norm), *self._usual(), strict=True
        ):
            if (height := (math.log(max(value, TINY)) - middle) / sd) > self.settings.threshold:
                spikes.append(
                    f"{name} {value:.6g} is {value / math.exp(middle):.3g} x its median"
                    f" {math.exp(middle):.6g} ({height:.1f} robust standard deviations)"
                )
        if not spikes:
            return None
        return f"{' and '.join(spikes)} of the last {len(self.accepted)} accepted steps"

    def _describe_layers(self, layer_norms: Mapping[str, float]) -> str | None:
        """Which layers' gradient norms are spikes, the highest first; None where none is, or fewer
        steps than half a window have the norms of these layers."""
        pasts = [row[2:] for row in self.accepted if len(row) == 2 + len(layer_norms)]
        if not layer_norms or 2 * len(pasts) < self.settings.window:
            return None
        logs = np.log(np.maximum(np.array(pasts), TINY))  # (steps, layers)
        middle = np.median(logs, axis=0)
        spread = MAD_TO_SD * np.median(abs(logs - middle), axis=0)
        _, (loss_sd, _) = self._usual()
        sd = np.clip(np.maximum(spread, NORM_SD_PER_LOSS_SD * loss_sd), *NORM_SD)
        values = np.array(list(layer_norms.values()))
        heights = (np.log(np.maximum(values, TINY)) - middle) / sd
        ratios = values / np.exp(middle)
        names = list(layer_norms)
        spikes = []
        for i in np.argsort(-heights).tolist():
            if heights[i] > self.settings.threshold:
                spikes.append(
                    f"gradient norm of {names[i]} {values[i]:.6g} is {ratios[i]:.3g} x its median"
                    f" ({heights[i]:.1f} robust standard deviations)"
                )
        if not spikes:
            return None
        named = ", ".join(spikes[:3])
        if len(spikes) > 3:
            named += f" and {len(spikes) - 3} more"
        return f"{named} of the last {len(pasts)} accepted steps"

    def _usual(self) -> tuple[np.ndarray, tuple[float, float]]:
        """Of the window's losses and of its gradient norms: median and robust standard deviation of
        the logarithm."""
        pairs = [row[:2] for row in self.accepted]
        logs = np.log(np.maximum(np.array(pairs), TINY))  # (steps, 2)
        middle = np.median(logs, axis=0)
        sd = MAD_TO_SD * np.median(abs(logs - middle), axis=0)
        loss_sd = min(max(sd[0], LOSS_SD[0]), LOSS_SD[1])
        return middle, (
            loss_sd,
            min(max(sd[1], NORM_SD[0], NORM_SD_PER_LOSS_SD * loss_sd), NORM_SD[1]),
        )


# --------------------------------------------------------------------------------------- diagnosis

Counts = dict[str, int]  # of a tensor over all ranks: its `values`, and how many are `not_finite`


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """diagnosis.json of a run that the guard has stopped. What could not be looked at is absent."""

    step: int  # of the run, at which it stopped
    reason: str  # the guard's
    weights: dict[str, Counts] | None = None  # by parameter: {values, not_finite}
    moments: dict[str, Counts] | None = None  # the optimizer's, alike
    gradients: dict[str, Counts] | None = None  # by parameter, after clipping
    modules: dict[str, Counts] | None = None  # outputs of a new forward pass, in its order
    problem: str  # what kept the diagnosis from being complete; "" where nothing did


def diagnose(
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    step: int,
    reason: str,
    run_dir: Path,
    is_main: bool,
) -> str:
    """Find what is not finite in a run that the guard has stopped; write diagnosis.json; return the
    end of an error sentence.

    tensors: weights (model.*) and moments (optim.*); x, y: the last micro-batch, (B, T). All ranks
    call it together. It raises no error, which would hide the one being diagnosed; if the
    diagnosis is incomplete, `problem` in diagnosis.json says why. Gradients are those after
    clipping, which spreads a NaN; modules the outputs of a new forward pass over x, in order of
    completion."""
    counts: dict[str, dict[str, Counts]] = {}
    path = run_dir / "diagnosis.json"
    problem = ""
    try:
        counts["weights"] = _count_all(tensors, "model.")
        counts["moments"] = _count_all(tensors, "optim.")
        counts["gradients"] = {
            name: _count(p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
        counts["modules"] = _count_outputs(model, x, y)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if is_main:
        diagnosis = Diagnosis(step=step, reason=reason, **counts, problem=problem)
        with suppress(OSError):
            write_json(path, {k: v for k, v in asdict(diagnosis).items() if v is not None})
    findings = [_finding(kind, named) for kind, named in counts.items()]
    return (
        f"{reason}: lower optim.lr, or go on from an older"
        f" checkpoint\n{', '.join(findings)} {problem}\nmore in {path}"
    )


def _finding(kind: str, counts: dict[str, Counts]) -> str:
    """How many tensors of a kind hold values that are not finite, with the first three of them."""
    bad = [
        f"{name}: {count['not_finite']:,} of {count['values']:,} values"
        for name, count in counts.items()
        if count["not_finite"]
    ]
    finding = f"{len(bad)} of {len(counts)} {kind} are not finite"
    if bad:
        finding += f" ({'; '.join(bad[:3])})"
    return finding


def _count_all(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, Counts]:
    """Of the tensors whose name has the prefix, by their name without it."""
    return {
        name.removeprefix(prefix): _count(tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _count(tensor: torch.Tensor) -> Counts:
    """Values, and those not finite, over all ranks; each value of a sharded tensor counts once."""
    bad = (~tensor.isfinite()).sum()
    return {
        "values": tensor.numel(),
        "not_finite": int(bad.full_tensor() if is_dtensor(bad) else bad),
    }


def _count_outputs(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Counts]:
    """Of every module's outputs, over all ranks, in an eager forward pass that keeps no
    activations, as memory is short."""
    seen: dict[str, torch.Tensor] = {}

    def note(name: str, module: nn.Module, inputs: tuple, output: object) -> None:
        # a head in chunks is called several times
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            bad = (~output.isfinite()).sum()
            seen[name] = seen.get(name, 0) + torch.stack(
                (torch.full_like(bad, output.numel()), bad)
            )

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(partial(note, name))  # which stay: the run is over
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        model(x, y)
    sums = torch.stack(list(seen.values()))
    if dist.is_initialized():
        dist.all_reduce(sums)
    return {
        name: {"values": values, "not_finite": bad}
        for name, (values, bad) in zip(seen, sums.tolist(), strict=True)
    }
