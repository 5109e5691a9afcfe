"""Model what FSDP2 and HSDP send per training step, against the time that each GPU computes.

The bytes are counted from what runtime/parallel.py asks of FSDP2, collective by collective, and are held against real
ranks by tests/test_fleet_model.py, those of FSDP2's own copies too. Seconds are modelled: nobody has measured them here.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.step_model import CASTS, Ceilings, Moved, Shape, linears, step

FLEETS = (8, 64, 512)
FLEET_TOKENS = 1_048_576        # per step: configs/gpt1p5b_bf16.py
WEAK_TOKENS = 65_536            # per GPU and step, however many GPUs


@dataclass(frozen=True)
class Network:
    """Assumed: eight GPUs a machine, all in one NVSwitch; a 400 Gbit/s adapter for each."""
    nvlink: float = 350e9       # bytes/s that a GPU takes in during a collective; 450 nominal
    adapter: float = 42e9       # bytes/s through one adapter; 50 nominal
    hop_s: float = 4e-6         # latency of one step of a ring within a machine
    far_hop_s: float = 12e-6    # and between machines
    machine: int = 8            # GPUs


class Sent(NamedTuple):
    """One kind of collective of a step: `times` over tensors of `size` bytes, whole, among `ranks`."""
    kind: str       # all_gather, reduce_scatter, all_reduce
    group: str      # block or root
    size: int
    ranks: int
    times: int

    @property
    def from_each(self) -> float:
        """Bytes that each rank puts on the wire in a step, by a ring."""
        return self.times * self.size * (self.ranks - 1) / self.ranks * (2 if self.kind == "all_reduce" else 1)


def collectives(shape: Shape, shard: int, replicate: int = 1, accumulation: int = 1, reshard: bool = True,
                all_gather_fp8: bool = False) -> list[Sent]:
    """What FSDP2 sends per optimizer step, as parallel.shard() sets it up; `all_gather_fp8`: fp8.all_gather=true.

    Blocks are gathered in BF16 (float8: their Linears' weights in one byte), embedding, head and last norm in fp32: once a
    step, with `reshard` once per micro-batch, and blocks again in its backward pass. Gradients are summed in fp32, in the
    last micro-batch only, over the shards and then, already cut, over the replicas. Rows are padded to whole shards.
    """
    per_layer = [(linear.N, linear.K) for linear in linears(shape) if linear.name != "head"]
    norms, table = shape.n_embd, (shape.vocab, shape.n_embd)
    block = {"weights": sum(_padded(*w, shard) for w in per_layer), "norms": 2 * _padded(norms, 1, shard)}
    root = (1 if shape.tied else 2) * _padded(*table, shard) + _padded(norms, 1, shard)
    gathered = {"block": (1 if all_gather_fp8 else 2) * block["weights"] + 2 * block["norms"], "root": 4 * root}
    summed = {"block": 4 * sum(block.values()), "root": 4 * root}
    number = {"block": shape.n_layer, "root": 1}
    sent = []
    for group in ("block", "root"):
        gathers = accumulation * (2 if group == "block" else 1) if reshard else 1
        sent += [Sent("all_gather", group, gathered[group], shard, gathers * number[group]),
                 Sent("reduce_scatter", group, summed[group], shard, number[group]),
                 Sent("all_reduce", group, summed[group] // shard, replicate, number[group])]
    return [s for s in sent if s.ranks > 1]


def copied_bytes(sent: list[Sent], accumulation: int) -> float:
    """What FSDP2's own kernels read and write on each GPU per optimizer step, around the collectives `sent`.

    Each rank's part goes into the buffer of a gather and the whole out of it, gradients into the buffer of a sum: fp32, but for
    those of blocks that no earlier micro-batch has left in fp32 (2 bytes read, 4 written).
    """
    total = 0.0
    for s in sent:
        if s.kind == "all_gather":
            total += s.times * 2 * s.size * (1 + 1 / s.ranks)
        elif s.kind == "reduce_scatter":
            total += s.times * s.size * (1.5 if s.group == "block" and accumulation == 1 else 2)
    return total


# What casts move per element of a gathered weight and micro-batch, over a single GPU's step: no cast of all weights from fp32.
_GATHERED = {"bf16": Moved(spared=6), "fp8": Moved(2, 3, 3, spared=6), "float8 gathered": Moved(transposed=2, spared=6),
             "kernels": Moved(2, ours=4, spared=6)}     # not kept from step to step


def _padded(rows: int, columns: int, shard: int) -> int:
    return math.ceil(rows / shard) * shard * columns


def seconds(network: Network, sent: Sent, shard: int) -> float:
    """One such collective, by rings: the slower of the links within machines and between them, plus the hops."""
    n, size = sent.ranks, sent.size
    if sent.kind == "all_reduce":       # among GPUs of the same place in their shard: each uses its own adapter
        is_far = n * shard > network.machine
        link, hop = (network.adapter, network.far_hop_s) if is_far else (network.nvlink, network.hop_s)
        return 2 * (size * (n - 1) / n / link + (n - 1) * hop)
    machines = max(1, n // network.machine)
    near = size * (n - 1) / n / network.nvlink
    far = size * (machines - 1) / machines / (network.adapter * network.machine)
    return max(near, far) + (min(n, network.machine) - 1) * network.hop_s + (machines - 1) * network.far_hop_s


@dataclass(frozen=True)
class FleetStep:
    """A modelled optimizer step on many GPUs, seconds of each of them."""
    gpus: int
    shard: int
    micro_batch: int
    accumulation: int
    tokens: int             # per step, all GPUs
    sent_bytes: float       # by each GPU
    compute_s: float
    sending_s: float        # all collectives, one after the other
    exposed_s: float        # of them, what no computation hides

    @property
    def tok_per_s_gpu(self) -> float:
        return self.tokens / self.gpus / (self.compute_s + self.exposed_s)

    @property
    def without_overlap(self) -> float:
        """Tokens/s of a GPU if nothing were hidden."""
        return self.tokens / self.gpus / (self.compute_s + self.sending_s)


def fleet_step(c: Ceilings, network: Network, shape: Shape, label: str, gpus: int, shard: int, micro_batch: int,
               tokens: int, all_gather_fp8: bool = False, reshard: bool = True) -> FleetStep:
    """`tokens` per step on `gpus`, each weight cut into `shard` parts; the micro-batch shrinks to what a GPU's part holds."""
    own = tokens // gpus
    micro_batch = max(1, min(micro_batch, own // shape.n_ctx))
    accumulation = max(1, own // (micro_batch * shape.n_ctx))
    weight = _GATHERED["kernels" if "kernels" in label else "float8 gathered" if all_gather_fp8 else
                       "bf16" if label == "bf16" else "fp8"]
    if accumulation == 1:       # gradients become fp32 on their way into FSDP2's buffer
        weight = weight._replace(spared=weight.spared + 6)
    casts = replace(CASTS[label.removesuffix("+head")], w=weight, w_step=Moved())
    micro = step(c, shape, label, micro_batch, own, casts=casts, shard=shard)
    sent = collectives(shape, shard, gpus // shard, accumulation, reshard, all_gather_fp8)
    # Each rank casts its part of the blocks: 4 bytes read and 2 written for 2 to gather; float8: 8 read, 1 written, for 1.
    moved = copied_bytes(sent, accumulation) + sum(s.times * s.size / s.ranks * (9 if all_gather_fp8 else 3) for s in sent
                                                   if (s.kind, s.group) == ("all_gather", "block"))
    each = {(s.kind, s.group): seconds(network, s, shard) for s in sent}

    def one(kind: str, group: str) -> float:
        return each.get((kind, group), 0.0)

    # FSDP2 gathers the next block while one computes. Nothing hides the root's weights and the first block's, nor the
    # gradients of what the backward pass ends with: the first block and the embedding.
    forward, backward = micro.seconds / 3 / shape.n_layer, micro.seconds * 2 / 3 / shape.n_layer
    gather, reduce = one("all_gather", "block"), one("reduce_scatter", "block") + one("all_reduce", "block")
    again = gather if reshard else 0.0      # in each backward pass
    exposed = (accumulation if reshard else 1) * (one("all_gather", "root") + gather
                                                  + (shape.n_layer - 1) * max(0.0, gather - forward))
    exposed += (accumulation - 1) * shape.n_layer * max(0.0, again - backward)
    exposed += shape.n_layer * max(0.0, again + reduce - backward)
    exposed += reduce + one("reduce_scatter", "root") + one("all_reduce", "root")
    sending = sum(s.times * seconds(network, s, shard) for s in sent)
    compute = accumulation * micro.seconds + moved / c.bandwidth
    return FleetStep(gpus, shard, micro_batch, accumulation, gpus * micro_batch * shape.n_ctx * accumulation,
                     sum(s.from_each for s in sent), compute, sending, min(exposed, sending))


def fleet_lines(c: Ceilings, shape: Shape, micro_batch: int) -> list[str]:
    """1.5B on many GPUs: strong scaling (tokens per step fixed), weak scaling (tokens per GPU fixed)."""
    network = Network()
    lines = [f"1p5b on many GPUs, MODELLED: NVLink {network.nvlink / 1e9:.0f} GB/s, {network.adapter / 1e9:.0f} GB/s per "
             f"adapter, {network.machine} of each a machine; hops {network.hop_s * 1e6:.0f} and {network.far_hop_s * 1e6:.0f} us",
             f"  {'':10} {'GPUs':>5} {'shard':>6} {'label':28} {'micro x n':>10} {'GB sent':>8} {'compute ms':>11} "
             f"{'sending ms':>11} {'exposed':>8} {'tok/s GPU':>10} {'efficiency':>11} {'no overlap':>11}"]
    for regime, tokens in (("strong", lambda n: FLEET_TOKENS), ("weak", lambda n: WEAK_TOKENS * n)):
        for label, is_fp8, reshard in (("bf16", False, True), ("bf16", False, False), ("tensorwise", False, True),
                                       ("tensorwise", True, True), ("tensorwise+kernels", False, False)):
            alone = step(c, shape, label, micro_batch, FLEET_TOKENS).tok_per_s
            for gpus in FLEETS:
                for shard in sorted({8, gpus}):
                    s = fleet_step(c, network, shape, label, gpus, shard, micro_batch, tokens(gpus), is_fp8, reshard)
                    name = label + (", float8 gathered" if is_fp8 else "") + ("" if reshard else ", kept")
                    lines.append(f"  {regime:10} {gpus:5d} {shard:6d} {name:28} {s.micro_batch:6d} x {s.accumulation:<2d}"
                                 f"{s.sent_bytes / 1e9:9.1f} {s.compute_s * 1e3:11.1f} {s.sending_s * 1e3:11.1f} "
                                 f"{s.exposed_s / (s.compute_s + s.exposed_s):8.1%} {s.tok_per_s_gpu:10,.0f} "
                                 f"{s.tok_per_s_gpu / alone:11.1%} {s.without_overlap / alone:11.1%}")
    return [*lines, "  efficiency: tokens/s of a GPU over one GPU alone with the same label. Above 100 % because each rank",
            "  updates and casts its part alone, and because one micro-batch a step adds no gradients up.",
            "  FSDP2's copies are in compute. shard < GPUs is HSDP; kept is parallel.reshard=false, which gathers once a",
            "  step. All by rings: NCCL's trees are quicker in small pieces."]
