"""Judge each training step by its loss and gradient norm, and diagnose a run that has to stop.

A step whose loss or gradient norm is not finite is never applied, whatever guard.mode says. A finite step is compared with the
last guard.window accepted steps: it is a spike if its loss or gradient norm lies more than guard.threshold robust standard
deviations above their median, both on logarithms. In mode act the guard escalates:

    SKIP        leave weights and moments alone, go on with the next data
    ROLLBACK    after guard.skips in a row: back to a checkpoint from before them, on with new data; guard.rollbacks times at most
    STOP        when those are used up, or there is no such checkpoint

A permanent change of level must not be skipped for ever: guard.skips finite spikes in a row are accepted as the new level, and
the window begins anew, where the weights cannot be the cause:
  - their losses are normal, only the gradient norms are high: clipping bounds those, and the loss is still judged
  - the row begins right after a rollback, its losses within a factor LEVEL of each other: the weights were sane on the data of
    before and every batch of the new data is high, so the data have changed
A divergence is neither: its loss is high with the current weights and normal again with those of the checkpoint.

Modes log and off never roll back: there, guard.skips steps in a row that are not finite are a STOP.
"""

import enum
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from runtime.config import GuardConfig
from runtime.rows import write_json

# Bounds of the robust standard deviation of a logarithm, so that a quiet window does not turn noise into a spike (at threshold
# 10: +22 % of loss, 2.7 x the norm), nor a steep start hide one (at 10: 4.5 x the loss, 20 x the norm are always one). In
# 131,000 steps of our demo runs no loss was 1.5 x its median, no norm 11 x.
LOSS_SD = (0.02, 0.15)
NORM_SD = (0.1, 0.3)
# With few tokens a step, single documents raise the norm up to 9 x without harm, and the scatter of the loss tells where. Without
# this the demo runs (1,024 tokens a step) had 6 false alarms in 10,000 steps; with it 0.5, and none in `make demo`.
NORM_SD_PER_LOSS_SD = 3.0
LEVEL = 2.0         # highest over lowest loss of a row of batches that count as one level
MAD_TO_SD = 1.4826  # of a normal distribution
TINY = 1e-30        # a gradient of zero has no logarithm
AGREEMENT = timedelta(seconds=60)       # in which all ranks end a diagnosis' pass, one that has failed included


class Verdict(enum.Enum):
    OK = "OK"               # apply the update
    SPIKE = "SPIKE"         # apply the update, and log it: mode log, or a new level
    SKIP = "SKIP"           # leave weights and moments alone: an update multiplied by zero would still spread a NaN
    ROLLBACK = "ROLLBACK"   # skip, and go back to a checkpoint of less than `suspect_since` steps
    STOP = "STOP"           # skip, and end the run with a diagnosis


class Guard:
    """Judges each step before the optimizer is touched. Every rank passes the same two numbers, so all ranks agree.

    `state` is what state() of an earlier Guard returned, None for a new run.
    """

    def __init__(self, settings: GuardConfig, state: dict | None = None):
        state = state or {}
        self.settings = settings
        self.reason = ""                                    # of the last verdict that was not OK
        self.skipped: int = state.get("skipped", 0)         # steps since the run began, those undone by a rollback included
        self.rollbacks: int = state.get("rollbacks", 0)     # since the run began
        self._is_back: bool = state.get("is_back", False)   # no step has been accepted since the last rollback
        self._load_window(state)

    def _load_window(self, state: dict) -> None:
        self.consecutive: int = state.get("consecutive", 0)                     # skips since the last accepted step
        self.suspect_since: int | None = state.get("suspect_since")             # steps done before the first of these
        self._accepted = deque(state.get("accepted", ()), self.settings.window)     # [loss, norm] of the window's steps
        self._spikes: list[list[float]] = list(state.get("spikes", ()))         # [loss, norm] of the finite spikes in a row

    def judge(self, step: int, loss: float, grad_norm: float, can_roll_back: Callable[[int], bool]) -> Verdict:
        """The verdict on a step that comes after `step` others.

        can_roll_back(before): whether there is a checkpoint of fewer than `before` steps. It waits for a save under way and for
        all ranks, so it is asked only at the end of a row of skips.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._spikes.clear()
            return self._skip(step, f"loss {loss:.6g}, gradient norm {grad_norm:.6g}", can_roll_back)
        spike = self._describe_spike(loss, grad_norm) if self.settings.mode != "off" else None
        if spike is None:
            self._accept([[loss, grad_norm]])
            return Verdict.OK
        self._spikes.append([loss, grad_norm])
        if len(self._spikes) >= self.settings.skips and self._is_new_level():
            self.reason = f"{spike}; the last of {len(self._spikes)} in a row, taken for the new level"
            self._accepted.clear()
            self._accept(self._spikes)
            return Verdict.SPIKE
        if self.settings.mode == "log":
            self.consecutive, self.suspect_since = 0, None
            self.reason = spike
            return Verdict.SPIKE
        return self._skip(step, spike, can_roll_back)

    def reject_validation(self, step: int, what: str, can_roll_back: Callable[[int], bool]) -> Verdict:
        """ROLLBACK or STOP for weights whose validation after `step` steps was not finite; can_roll_back as in judge()."""
        self.suspect_since, self.reason = step, what
        return self._give_up(can_roll_back)

    def rolled_back(self, state: dict) -> None:
        """Go on from a checkpoint that holds `state`: with its window, but the current counts, which nothing undoes."""
        self._load_window(state)
        self.rollbacks += 1
        self._is_back = True

    def state(self) -> dict:
        """What a checkpoint stores, as JSON can hold it."""
        return {"consecutive": self.consecutive, "skipped": self.skipped, "rollbacks": self.rollbacks,
                "is_back": self._is_back, "suspect_since": self.suspect_since,
                "accepted": list(self._accepted), "spikes": list(self._spikes)}

    def _accept(self, steps: list[list[float]]) -> None:
        self._accepted.extend(steps)
        self._spikes = []
        self.consecutive, self.suspect_since, self._is_back = 0, None, False

    def _skip(self, step: int, what: str, can_roll_back: Callable[[int], bool]) -> Verdict:
        if self.consecutive == 0:
            self.suspect_since = step
        self.consecutive += 1
        self.skipped += 1
        self.reason = f"{what}; {self.consecutive} skipped in a row"
        return Verdict.SKIP if self.consecutive < self.settings.skips else self._give_up(can_roll_back)

    def _give_up(self, can_roll_back: Callable[[int], bool]) -> Verdict:
        s = self.settings
        if s.mode != "act":
            self.reason += f", and guard.mode={s.mode} never goes back"
        elif self.rollbacks >= s.rollbacks:
            self.reason += f", and all guard.rollbacks={s.rollbacks} are used up"
        elif not can_roll_back(self.suspect_since or 0):
            self.reason += f", and there is no checkpoint from before step {self.suspect_since} to go back to"
        else:
            return Verdict.ROLLBACK
        return Verdict.STOP

    def _is_new_level(self) -> bool:
        losses = [loss for loss, _ in self._spikes]
        middle, sd = self._usual()
        if self.settings.mode == "log" or (_log(max(losses)) - middle[0]) / sd[0] <= self.settings.threshold:
            return True
        return self._is_back and max(losses) <= LEVEL * min(losses)

    def _describe_spike(self, loss: float, grad_norm: float) -> str | None:
        """Which of the two is a spike, and how large; None where neither is, or the window is not yet half full."""
        if 2 * len(self._accepted) < self.settings.window:
            return None
        said = []
        for name, value, middle, sd in zip(("loss", "gradient norm"), (loss, grad_norm), *self._usual(), strict=True):
            if (height := (_log(value) - middle) / sd) > self.settings.threshold:
                said.append(f"{name} {value:.6g} is {value / math.exp(middle):.3g} x its median {math.exp(middle):.6g} "
                            f"({height:.1f} robust standard deviations)")
        return f"{' and '.join(said)} of the last {len(self._accepted)} accepted steps" if said else None

    def _usual(self) -> tuple[np.ndarray, tuple[float, float]]:
        """Of the window's losses and of its gradient norms: median and robust standard deviation of the logarithm."""
        logs = np.log(np.maximum(np.array(self._accepted), TINY))       # (steps, 2)
        middle = np.median(logs, axis=0)
        sd = MAD_TO_SD * np.median(abs(logs - middle), axis=0)
        loss_sd = min(max(sd[0], LOSS_SD[0]), LOSS_SD[1])
        return middle, (loss_sd, min(max(sd[1], NORM_SD[0], NORM_SD_PER_LOSS_SD * loss_sd), NORM_SD[1]))


def _log(value: float) -> float:
    return math.log(max(value, TINY))


# ------------------------------------------------------------------------------------------------------------ diagnosis

def diagnose(model: nn.Module, tensors: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, step: int, reason: str,
             run_dir: Path, is_main: bool, backward_scale: float, group: dist.ProcessGroup | None = None) -> str:
    """Find what is not finite in a run that the guard has stopped; write diagnosis.json; return the end of an error sentence.

    tensors: weights (model.*) and moments (optim.*); x, y: the last micro-batch, (B, T); group: of all ranks, on the CPU, which
    nobody else uses now. All ranks call it together. It raises nothing, so that it cannot hide the fault itself. In
    diagnosis.json:

        step, reason                    the last step, and the guard's reason
        weights, moments, gradients     by name: how many values, how many not_finite; after clipping, which spreads a NaN
        modules                         the same of outputs in a new eager forward pass over x, in order of completion
        loss_anew, gradients_anew       loss of that pass in nats a token, null if not finite; if finite, its gradients
        problems                        what kept this from being completed
    """
    found: dict[str, Any] = {"step": step, "reason": reason, "weights": {}, "moments": {}, "gradients": {}, "modules": {},
                             "gradients_anew": {}, "loss_anew": None, "problems": []}
    path = run_dir / "diagnosis.json"
    try:
        for kind, prefix in (("weights", "model."), ("moments", "optim.")):
            found[kind] = _count({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
        found["gradients"] = _count_gradients(model)
        if is_main:
            write_json(path, found)     # in case the new passes crash or hang
        _pass_again(model, x, y, backward_scale, found, group)
    except Exception as error:
        found["problems"].append(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        if not is_main:         # rank 0 may wait for this one in a collective
            print(f"the diagnosis failed on this rank: {found['problems'][0]}; {_findings(found)}", flush=True)
    with suppress(OSError):
        if is_main:
            write_json(path, found)
    return f"{reason}: lower optim.lr, or go on from an older checkpoint\n{_findings(found)}\nmore in {path}"


def _count(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, int]]:
    """By name: values, and those not finite, over all ranks; each value of a sharded tensor counts once."""
    local, ranks = {}, dist.get_world_size() if dist.is_initialized() else 1
    for name, tensor in tensors.items():
        replicas = ranks
        if isinstance(tensor, DTensor):
            replicas = math.prod(n for n, p in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if p.is_replicate())
            tensor = tensor.to_local()
        local[name] = tensor.numel() / replicas, (~tensor.isfinite()).sum() / replicas
    return _summed(local)


def _summed(local: dict[str, tuple[float, torch.Tensor]]) -> dict[str, dict[str, int]]:
    """Of each name's values and those not finite on this rank, the sums over all ranks."""
    if not local:
        return {}
    sums = torch.stack([bad.new_tensor([values, bad], dtype=torch.float64) for values, bad in local.values()])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return {name: {"values": round(values), "not_finite": round(bad)}
            for name, (values, bad) in zip(local, sums.tolist(), strict=True)}


def _count_gradients(model: nn.Module) -> dict[str, dict[str, int]]:
    return _count({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def _pass_again(model: nn.Module, x: torch.Tensor, y: torch.Tensor, backward_scale: float, found: dict,
                group: dist.ProcessGroup | None) -> None:
    """Repeat the micro-batch eagerly: a forward pass that looks at every module's output, then one for the gradients."""
    seen: dict[str, tuple[float, torch.Tensor]] = {}      # module -> values of its outputs, those not finite

    def note(name: str, module: nn.Module, inputs: tuple, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            values, bad = seen.get(name, (0, 0))        # adds up: a head that works in chunks is called several times
            seen[name] = values + output.numel(), bad + (~output.isfinite()).sum()

    model.zero_grad()   # before the forward pass, after which FSDP2 shows the root's gathered weights, which have no gradients
    handles = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules() if name]
    with torch.compiler.set_stance("force_eager"):
        try:
            with torch.no_grad():   # keeps no activations: fits wherever training did
                loss = _on_all_ranks(lambda: model(x, y).double().mean() / y.size(1), group)
        finally:
            for handle in handles:
                handle.remove()
        found["modules"] = _summed(seen)
        if dist.is_initialized():
            dist.all_reduce(loss, dist.ReduceOp.SUM)
            loss /= dist.get_world_size()
        if loss.isfinite():     # else the gradients would all be NaN
            found["loss_anew"] = loss.item()
            _on_all_ranks(lambda: (model(x, y).sum() * backward_scale).backward(), group)
            found["gradients_anew"] = _count_gradients(model)


def _on_all_ranks(work: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """What work() returns, or an error on every rank where it fails on one: none waits in the next collective for one that has
    left. Others that stand within work(), in a collective of FSDP2's, wait until the failed one has exited."""
    result = error = None
    try:
        result = work()
    except Exception as problem:
        error = problem
    failed = torch.tensor(float(error is not None))
    try:
        if group is not None:
            dist.all_reduce(failed, group=group, async_op=True).wait(AGREEMENT)
    finally:
        if error is not None:
            raise error
    if failed:
        raise RuntimeError(f"the new pass failed on {failed:.0f} of the other ranks")
    return result


def _findings(found: dict) -> str:
    """One line for people."""
    said = []
    bad = {kind: {name: f"{c['not_finite']:,} of {c['values']:,} values" for name, c in found[kind].items() if c["not_finite"]}
           for kind in ("weights", "moments", "gradients", "modules", "gradients_anew")}
    for kind in ("weights", "moments", "gradients"):
        if bad[kind]:
            said.append(f"{len(bad[kind])} of {len(found[kind])} {kind} ({'; '.join(map(': '.join, [*bad[kind].items()][:3]))})")
    said = [f"not finite: {', '.join(said)}" if said else "weights, moments and gradients are finite"]
    if bad["modules"]:
        name, values = next(iter(bad["modules"].items()))
        said.append(f"in the last micro-batch the first output that is not finite is that of {name} ({values})")
    elif bad["gradients_anew"]:     # the backward pass begins at the last
        said.append(f"the last micro-batch alone gives gradients that are not finite: {len(bad['gradients_anew'])} of "
                    f"{len(found['gradients_anew'])}, of these {list(bad['gradients_anew'])[-1]} is nearest to the loss")
    elif found["loss_anew"] is not None:
        said.append(f"the last micro-batch alone, computed anew, is finite: loss {found['loss_anew']:.4g}")
    return "; ".join(said + found["problems"])
