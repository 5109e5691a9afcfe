"""scaling/cpu_kind.py: a CPU with newer instructions can stand in for one with AVX2 alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lib.errors import UserError
from scaling import cpu_kind
from scaling.cpu_kind import AVX2_ALONE, Kind, computing_as, kind_for, kind_of, machine_kind
from tests.conftest import ROOT

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


def print_of_a_child(expression: str) -> str:
    code = f"import torch; from fp8.matmul import has_bf16_units; print({expression})"
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return child.stdout.strip()


@pytest.fixture
def told_avx2() -> Iterator[None]:
    with computing_as(OLD):
        yield


def test_a_told_child_has_torchs_kernels_of_avx2(told_avx2: None) -> None:
    capability = print_of_a_child("torch.backends.cpu.get_cpu_capability()")
    assert capability == machine_kind().with_avx2_alone().capability


def test_a_told_child_multiplies_bf16_without_units(told_avx2: None) -> None:
    """As a CPU without them does, also where FP8 is emulated."""
    assert print_of_a_child("has_bf16_units()") == "False"


def test_each_library_is_told() -> None:
    """oneDNN shows above; MKL follows its variable on Intel's CPUs alone."""
    assert {name.partition("_")[0] for name in AVX2_ALONE} == {"ATEN", "ONEDNN", "MKL"}


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


@pytest.mark.parametrize(
    "name, value", [("ONEDNN_MAX_CPU_ISA", "AVX2"), ("ATEN_CPU_CAPABILITY", "default")]
)
def test_another_choice_of_instructions_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"the environment has {name}={value}: unset that"):
        machine_kind()


def test_a_told_kind_says_what_the_cpu_has() -> None:
    assert NEW.with_avx2_alone().cpu_flags == NEW.flags


def test_an_old_cpu_is_not_told_to_be_one() -> None:
    assert OLD.with_avx2_alone() == OLD


def test_a_kind_is_read_back_from_json() -> None:
    kind = NEW.with_avx2_alone()
    assert kind_of(json.loads(json.dumps(asdict(kind)))) == kind


def test_rows_before_a_cpus_own_flags_were_noted_are_read() -> None:
    content = asdict(OLD)
    del content["cpu_flags"]
    assert kind_of(content) == OLD


def test_a_system_without_cpuinfo_has_a_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_kind, "CPUINFO", tmp_path / "none")
    assert machine_kind().flags == ()


def test_avx2_on_a_cpu_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kind, "machine_kind", lambda: ARM)
    with pytest.raises(UserError, match=r"this CPU \(aarch64 DEFAULT\) has no AVX2"):
        kind_for("avx2", None)


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
