"""Say what is wrong with a run that the guard has stopped.

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

import json
import math
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

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
