"""The kind of a machine: what decides a run's bits on a CPU, beside the packages and the seed.

Libraries choose their kernels by the CPU's vector instructions, and kernels of another width sum in
another order. A CPU with AVX-512 can be told to compute as one with AVX2 alone does; the losses of
a run are then those of such a CPU to the bit (torch 2.13 on AMD: docs/study.md). So a study that
was begun there can be continued here, and a run of it repeated."""

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lib.errors import UserError

# Instructions that decide by which kernels a CPU multiplies, and so in which order it sums.
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")
# Environment variables that keep a process to AVX2. Each library reads its own, when it is loaded.
AVX2_ALONE = {
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's own kernels: softmax, attention
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # oneDNN: matmuls in BF16
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # MKL: matmuls in fp32, where the CPU is Intel's
}
CPUINFO = Path("/proc/cpuinfo")

Instructions = Literal["pair", "native", "avx2"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The kind of a machine: runs of one kind are equal to the bit."""

    vendor: str  # the CPU's, such as AuthenticAMD; libraries choose their kernels by it too
    model: str  # the CPU's name; not compared
    capability: str  # instructions that torch's own kernels use, such as AVX2
    flags: tuple[str, ...]  # those of CPU_FLAGS that a run may use
    # those that the CPU has where it was told to use fewer; else none. Not compared
    cpu_flags: tuple[str, ...] = ()

    def is_like(self, kind: "Kind") -> bool:
        """Whether both are equal in all that decides a run's bits."""
        keys = ("vendor", "capability", "flags")
        return all(getattr(self, key) == getattr(kind, key) for key in keys)

    @property
    def is_avx2_alone(self) -> bool:
        return self.flags == ("avx2",)

    def with_avx2_alone(self) -> "Kind":
        """As which this CPU can compute; a CPU without AVX2 stays what it is."""
        if "avx2" not in self.flags or self.is_avx2_alone:
            return self
        return replace(self, capability="AVX2", flags=("avx2",), cpu_flags=self.flags)

    def __str__(self) -> str:
        """What decides a run's bits."""
        newer = [flag for flag in self.flags if flag.startswith(("avx512_", "amx"))]
        return " ".join([self.vendor, self.capability, *newer])


def kind_of(content: dict[str, Any]) -> Kind:
    """The Kind that asdict() and JSON made `content` of. Raises TypeError or KeyError where it is
    none."""
    flags, cpu_flags = content["flags"], content.get("cpu_flags", ())
    return Kind(**{**content, "flags": tuple(flags), "cpu_flags": tuple(cpu_flags)})


def machine_kind() -> Kind:
    """Of this machine, as the environment lets it compute; on another system than Linux what
    `platform` tells. Raises UserError as _is_told()."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    present = facts.get("flags", "").split()
    kind = Kind(
        vendor=facts.get("vendor_id", platform.machine()),
        model=facts.get("model name", platform.processor()),
        capability=torch.backends.cpu.get_cpu_capability(),
        flags=tuple(flag for flag in CPU_FLAGS if flag in present),
    )
    return kind.with_avx2_alone() if _is_told() else kind


def _is_told() -> bool:
    """Whether the environment keeps this process to AVX2. Raises UserError where it is another
    choice of instructions: no row could name the kind that comes of it."""
    settings = {name: os.environ[name] for name in AVX2_ALONE if name in os.environ}
    if settings and settings != AVX2_ALONE:
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        all_words = " ".join(f"{name}={value}" for name, value in AVX2_ALONE.items())
        raise UserError(
            f"the environment has {words}: unset that, so that a row can name the instructions"
            f" that computed it, or set all of {all_words}"
        )
    return bool(settings)


def kind_for(instructions: Instructions, partner: Kind | None) -> Kind:
    """As which this machine trains a run. `partner`: the kind to be like, of its pair's BF16 run,
    if there is one; "pair" follows it where this CPU can. Raises UserError as machine_kind(), and
    for "avx2" on a CPU that has none."""
    whole = machine_kind()
    narrow = whole.with_avx2_alone()
    if instructions == "avx2":
        if not narrow.is_avx2_alone:
            raise UserError(f"instructions=avx2: this CPU ({whole}) has no AVX2; leave it out")
        return narrow
    if instructions == "pair" and partner is not None and partner.is_like(narrow):
        return narrow
    return whole


@contextlib.contextmanager
def computing_as(kind: Kind) -> Iterator[None]:
    """Processes that are started within it compute as `kind` does, one of kind_for."""
    environment = dict(os.environ)
    if kind.is_avx2_alone:
        os.environ.update(AVX2_ALONE)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
