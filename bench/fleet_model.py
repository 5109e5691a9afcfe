"""Model what FSDP2 and HSDP send per training step, against the time that each GPU computes.

The bytes are counted from what runtime/parallel.py asks of FSDP2, collective by collective, and are held against real
ranks by tests/test_roofline.py. Seconds are modelled: nobody has measured them here.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.step_model import CASTS, Ceilings, Moved, Shape, linears, step


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
    casts = None
    if "kernels" in label:      # gathered weights are not kept from step to step: cast in each forward pass, from BF16
        casts = replace(CASTS[label.removesuffix("+head")], w=Moved(2, ours=4, spared=6), w_step=Moved())
    micro = step(c, shape, label, micro_batch, own, casts=casts, shard=shard)
    sent = collectives(shape, shard, gpus // shard, accumulation, reshard, all_gather_fp8)
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
    return FleetStep(gpus, shard, micro_batch, accumulation, gpus * micro_batch * shape.n_ctx * accumulation,
                     sum(s.from_each for s in sent), accumulation * micro.seconds, sending, min(exposed, sending))
