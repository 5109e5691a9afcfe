"""lib/machine.py: what a process keeps of the memory that it frees."""

import subprocess
import sys

import pytest

from lib import machine

# A thread, whose heap glibc gives back as soon as it is free, allocates 100 arrays of 1.5 MB and
# frees them, 20 times: the page faults of the last ten times.
FAULTS = """
import resource, sys, threading
import torch
from lib import machine

if "keep" in sys.argv:
    machine.keep_freed_memory()
faults = []

def work():
    for _ in range(20):
        arrays = [torch.zeros(375_000) for _ in range(100)]
        arrays.clear()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(faults[-1] - faults[9])
"""
PAGES = 10 * 100 * 1_500_000 // 4096  # that these arrays have


def faults(*words: str) -> int:
    result = subprocess.run(
        [sys.executable, "-c", FAULTS, *words], capture_output=True, text=True, check=True
    )
    return int(result.stdout)


def test_memory_that_is_freed_and_asked_for_again_is_not_touched_anew() -> None:
    assert faults("keep") < PAGES / 100


def test_without_it_each_array_is_touched_anew() -> None:
    """The promise above is not glibc's own."""
    assert faults() > PAGES / 10


def test_a_system_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())
    machine.keep_freed_memory()
