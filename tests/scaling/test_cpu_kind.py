"""scaling/cpu_kind.py: a CPU with newer instructions can stand in for one with AVX2 alone."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from scaling import cpu_kind
from scaling.cpu_kind import AVX2_ALONE, Kind, computing_as, kind_for, machine_kind

OLD = Kind(vendor="AuthenticAMD", model="old", capability="AVX2", flags=("avx2",))
NEW = Kind(
    vendor="AuthenticAMD",
    model="new",
    capability="AVX512",
    flags=("avx2", "avx512f", "avx512_bf16"),
)
ARM = Kind(vendor="aarch64", model="", capability="DEFAULT", flags=())


@pytest.fixture
def on_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kind, "machine_kind", lambda: NEW)


def capability_of_a_child() -> str:
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_child_computes_with_avx2_alone() -> None:
    if "avx2" not in machine_kind().flags:
        return
    with computing_as(machine_kind().with_avx2_alone()):
        assert capability_of_a_child() == "AVX2"


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError), computing_as(OLD):
        assert os.environ["ATEN_CPU_CAPABILITY"] == "avx2"
        raise ZeroDivisionError
    assert dict(os.environ) == before


def test_newer_kinds_change_nothing() -> None:
    before = dict(os.environ)
    with computing_as(NEW):
        assert dict(os.environ) == before


def test_a_told_process_knows_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = machine_kind().with_avx2_alone()
    for name, value in AVX2_ALONE.items():
        monkeypatch.setenv(name, value)
    assert machine_kind() == narrow


def test_half_told_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = machine_kind().flags
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine_kind().flags == flags


def test_a_cpu_with_newer_instructions_is_like_an_old_one_when_told() -> None:
    assert NEW.with_avx2_alone().is_like(OLD) and not NEW.is_like(OLD)


def test_a_cpu_without_avx2_stays_what_it_is() -> None:
    assert ARM.with_avx2_alone() == ARM


@pytest.mark.parametrize(
    "instructions, partner, flags",
    [
        ("pair", None, NEW.flags),
        ("pair", OLD, OLD.flags),
        ("pair", NEW, NEW.flags),
        ("pair", replace(OLD, vendor="GenuineIntel"), NEW.flags),
        ("avx2", None, OLD.flags),
        ("avx2", NEW, OLD.flags),
        ("native", OLD, NEW.flags),
    ],
)
def test_a_run_follows_its_pair_or_the_option(
    instructions: cpu_kind.Instructions, partner: Kind | None, flags: tuple[str, ...], on_new: None
) -> None:
    assert kind_for(instructions, partner).flags == flags


def test_a_kind_is_told_by_what_decides_the_bits() -> None:
    assert [str(OLD), str(NEW)] == ["AuthenticAMD AVX2", "AuthenticAMD AVX512 avx512_bf16"]
