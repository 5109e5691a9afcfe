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


diagnosis: Say what is wrong with a run that the guard has stopped.

All ranks call diagnose() together; rank 0 writes out/<run>/diagnosis.json and everybody gets the sentence that ends the run.

    step, reason            the step that was judged last, and what the guard said
    weights, moments        by name: values, not_finite (how many are NaN or infinite), largest and norm of the finite ones
    gradients               the same, as clipping left them: a norm that is NaN has made all of them NaN
    modules                 in the order in which they finish: outputs of an eager forward pass over the last micro-batch
    gradients_anew          of a pass over the last micro-batch alone, where its forward pass was finite
    loss_anew               the loss of that micro-batch, in nats a token, mean over the ranks; null where not finite
    probe                   the rows of probe.jsonl of the step that was probed last
    problems                what of this could not be found out, and why

null is no finite number, or nothing known.

"""

import enum
import json
import math
import os
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from runtime.config import GuardConfig

# ---------------------------------------------------------------------------------------------------------------- guard

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

    def reject_validation(self, step: int, what: str, can_roll_back: Callable[[int], bool]) -> Verdict:
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


# ------------------------------------------------------------------------------------------------------------ diagnosis

AT_ONCE = 2**24         # values that are looked at together: some 300 MiB of memory, and no more of a large tensor
NAMED = 3               # names in a sentence; the file has all
PROBE_TAIL = 2**22      # bytes at the end of probe.jsonl that are read: the last probe of 2,000 Linears
PATIENCE = 60           # seconds that a rank waits for the others' word on a pass; between ranks in step it is milliseconds
COUNTS = ("values", "not_finite", "norm", "largest")

Census = dict[str, dict[str, float | None]]


def diagnose(model: nn.Module, tensors: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, step: int, reason: str,
             run_dir: Path, is_main: bool, backward_scale: float) -> str:
    """The end of an error sentence, of one to three lines: `reason`, what was found, where to read more.

    tensors: weights (model.*) and moments (optim.*); x, y: the last micro-batch (B, T). Leaves no gradients behind. Never
    raises, for a diagnosis must not hide the fault; what it could not do is among the problems in diagnosis.json.
    """
    found = {"step": step, "reason": reason, "weights": {}, "moments": {}, "gradients": {}, "modules": {}, "gradients_anew": {},
             "loss_anew": None, "probe": [], "problems": []}
    path = run_dir / "diagnosis.json"
    try:
        found["weights"] = _census(_under(tensors, "model."), found)
        found["moments"] = _census(_under(tensors, "optim."), found)
        found["gradients"] = _census(_gradients(model), found)
        if is_main:
            found["probe"] = _last_probe(run_dir / "probe.jsonl")
            _write(path, found)     # once before the pass: whatever becomes of it, this is known
        _pass_again(model, x, y, backward_scale, found)
    except Exception as error:
        found["problems"].append(_line(error))
    try:
        if is_main:
            _write(path, found)
        return f"{reason}: {_remedy(found)}\n{_findings(found)}\nmore in {path}"
    except Exception as error:
        return f"{reason}: lower optim.lr, or go on from an older checkpoint\n(and the diagnosis failed: {_line(error)})"


# ------------------------------------------------------------------------------------------------------------- measuring

@torch.no_grad()
def _census(tensors: dict[str, torch.Tensor], found: dict) -> Census:
    """Each tensor's COUNTS over all of its shards. Collective: a rank that cannot count its own takes part all the same."""
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device
    table = torch.zeros(len(tensors), len(COUNTS), dtype=torch.float64, device=device)
    try:
        for row, tensor in zip(table, tensors.values(), strict=True):
            _count(tensor.to_local() if isinstance(tensor, DTensor) else tensor, row)
    except Exception as error:      # out of memory, for one
        found["problems"].append(f"not everything was counted: {_line(error)}")
    return {name: _named(row, tensor.numel()) for (name, tensor), row in zip(tensors.items(), _reduce(table), strict=True)}


def _count(tensor: torch.Tensor, row: torch.Tensor) -> None:
    """Add the COUNTS of a tensor to `row` (4,), the norm as its square."""
    for part in tensor.detach().reshape(-1).split(AT_ONCE):
        if part.numel():
            is_finite = part.isfinite()
            finite = part.where(is_finite, 0).double()      # fp64: squares of small gradients vanish in fp32
            row[0] += part.numel()
            row[1] += (~is_finite).sum()
            row[2] += finite.square().sum()
            row[3] = torch.maximum(row[3], finite.abs().amax())


def _reduce(table: torch.Tensor) -> list[list[float]]:
    """(n, 4) of this rank -> of all ranks, on the host."""
    if dist.is_available() and dist.is_initialized():
        largest = table[:, 3].contiguous()
        dist.all_reduce(table)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        table[:, 3] = largest
    return table.tolist()


def _named(row: list[float], values: int | None = None) -> dict[str, float | None]:
    """COUNTS by name. values: of the whole tensor where `row` may count it several times, once for each replica."""
    copies = row[0] / values if values and row[0] else 1.0
    return {"values": round(row[0] / copies), "not_finite": round(row[1] / copies), "norm": math.sqrt(row[2] / copies),
            "largest": row[3]}


def _pass_again(model: nn.Module, x: torch.Tensor, y: torch.Tensor, backward_scale: float, found: dict) -> None:
    """An eager pass over the micro-batch with a look at every module's output, then one for the gradients.

    A rank whose pass breaks off, for want of memory above all, leaves the others waiting in a collective. So after each
    pass the ranks tell each other over the host how it went, before anyone waits for the device, and where it failed
    on one they all leave it at that: nothing here may touch the device any more.
    """
    device, names = x.device, [name for name, _ in model.named_modules() if name]
    table = torch.zeros(len(names) + 1, len(COUNTS), dtype=torch.float64, device=device)     # the last row is the loss
    order: dict[int, None] = {}     # of finishing; the same on all ranks
    group = _host_group()
    _forget_gradients(model)    # now: after a forward pass FSDP2 shows the root's gathered weights, which have no gradients

    def forward() -> None:
        handles = [model.get_submodule(name).register_forward_hook(_watcher(table, order, i))
                   for i, name in enumerate(names)]
        try:
            with torch.no_grad():   # keeps no activations: fits wherever training did
                loss = model(x, y).double().mean() / y.size(1)
                table[-1, 0], table[-1, 2] = 1, loss
        finally:
            for handle in handles:
                handle.remove()

    with torch.compiler.set_stance("force_eager"):
        if not _succeeds("forward", forward, group, found):
            return
        rows = _reduce(table)
        found["modules"] = {names[i]: _named(rows[i]) for i in order if rows[i][0]}
        found["loss_anew"] = rows[-1][2] / rows[-1][0] if math.isfinite(rows[-1][2]) else None
        if found["loss_anew"] is None:
            return                  # the gradients would all be NaN and tell nothing
        if _succeeds("backward", lambda: (model(x, y).sum() * backward_scale).backward(), group, found):
            found["gradients_anew"] = _census(_gradients(model), found)
    _forget_gradients(model)


def _host_group() -> dist.ProcessGroup | None:
    """For a word between the ranks' hosts while their devices are busy, or stuck; None where there is but one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # A new one: the run's own gloo group may be in the middle of a save, and waits for as long as a slow disk may take.
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))


def _succeeds(name: str, act: Callable[[], None], group: dist.ProcessGroup | None, found: dict) -> bool:
    """Whether a pass went through on every rank; the problems of all ranks are noted on each. No rank waits longer than
    PATIENCE for the word of one that is still in a collective: once this one has left, that one is freed."""
    problem = None
    try:
        act()
    except Exception as error:
        problem = f"the {name} pass failed: {_line(error)}"
    said = [problem]
    if group is not None:
        said = [problem] * group.size()
        try:
            dist.all_gather_object(said, problem and f"rank {dist.get_rank()}: {problem}", group=group)
        except Exception as error:
            said = [problem, f"the ranks could not tell each other how the {name} pass went: {_line(error)}"]
    found["problems"] += [problem for problem in said if problem]
    return not any(said)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _forget_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def _watcher(table: torch.Tensor, order: dict[int, None], index: int) -> Callable:
    def watch(module: nn.Module, inputs: tuple, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            order[index] = None
            _count(output, table[index])    # a head in chunks is called often and adds up
    return watch


def _last_probe(path: Path) -> list[dict]:
    """The rows of the step that was probed last; none where there is no probe."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - PROBE_TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line, parse_constant=lambda word: None)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
        except (ValueError, RecursionError):    # cut short, by a kill or by where reading began, or no row of ours
            continue
    return [row for row in rows if row["step"] == rows[-1]["step"]]


# ---------------------------------------------------------------------------------------------------------------- saying

def _findings(found: dict) -> str:
    """What was found, for people, on one line."""
    said = []
    for kind in ("weights", "moments", "gradients"):
        census = found[kind]
        bad = {name: c for name, c in census.items() if c["not_finite"]}
        if kind == "gradients" and len(bad) == len(census) > 1:
            said.append("all gradients (clipping by a norm of NaN spreads it)")
        elif bad:
            said.append(f"{len(bad)} of {len(census)} {kind} ({_list(bad)})")
    said = [f"not finite: {', '.join(said)}"] if said else ["weights, moments and gradients are finite"]
    overflowed = [name for name, c in found["modules"].items() if c["not_finite"]]
    blocks = {name: c["largest"] for name, c in found["modules"].items() if name.startswith("layers.") and name.count(".") == 1}
    anew = {name: c for name, c in found["gradients_anew"].items() if c["not_finite"]}
    if overflowed:
        c = found["modules"][overflowed[0]]
        said.append(f"in the last micro-batch the first output that is not finite is that of {overflowed[0]} "
                    f"({c['not_finite']:,} of {c['values']:,} values)")
    elif anew:      # in order of the forward pass: what is nearest to the loss is where the backward pass met it
        said.append(f"the last micro-batch alone gives gradients that are not finite: {len(anew)} of "
                    f"{len(found['gradients_anew'])}, of these {list(anew)[-1]} is nearest to the loss")
    elif found["loss_anew"] is not None:
        said.append(f"the last micro-batch alone, computed anew, is finite: loss {found['loss_anew']:.4g}")
    if blocks:
        block = max(blocks, key=blocks.get)
        said.append(f"the largest finite output of a block is {blocks[block]:.3g} ({block})")
    squares = {name: c["norm"] ** 2 for name, c in found["gradients"].items()}
    if sum(squares.values()) > 0 and not any(c["not_finite"] for c in found["gradients"].values()):
        name = max(squares, key=squares.get)
        said.append(f"{squares[name] / sum(squares.values()):.0%} of the squared gradient norm is {name}'s")
    if probed := _probe_words(found["probe"]):
        said.append(probed)
    return "; ".join(said + found["problems"])


def _remedy(found: dict) -> str:
    if any(c["not_finite"] for kind in ("weights", "moments") for c in found[kind].values()):
        return "what the run holds in memory is damaged, go on from an older checkpoint; if it comes again, lower optim.lr"
    return "lower optim.lr, or go on from an older checkpoint"


def _list(bad: Census) -> str:
    first = [f"{name}: {c['not_finite']:,} of {c['values']:,} values" for name, c in list(bad.items())[:NAMED]]
    return "; ".join(first + ([f"{len(bad) - NAMED} more"] if len(bad) > NAMED else []))


def _probe_words(rows: list[dict]) -> str | None:
    """The extremes of the last probe; None where there was none."""
    said = []
    for key, name in (("attention_logit_max", "attention logits"), ("swiglu_amax", "SwiGLU outputs")):
        known = [(row[key], row.get("block")) for row in rows if isinstance(row.get(key), int | float)]
        if known:
            value, block = max(known)
            said.append(f"{name} up to {value:.3g} (block {block})")
    lost = [(part["underflow"], f"{row.get('layer')}'s {operand}") for row in rows for operand, part in row.items()
            if isinstance(part, dict) and isinstance(part.get("underflow"), int | float)]
    if lost:
        share, where = max(lost)
        said.append(f"{share:.1%} of {where} lost to underflow")
    return f"last probe, of step {rows[-1]['step']}: {', '.join(said)}" if said else None


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"[:300]


def _write(path: Path, found: dict) -> None:
    """Whole or not at all, in strict JSON."""
    try:
        tmp = path.with_name(f".{path.name}.tmp")
        tmp.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
        os.replace(tmp, path)
    except (OSError, ValueError) as error:
        found["problems"].append(f"{path} could not be written: {_line(error)}")
