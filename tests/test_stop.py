"""Signals: the first is noted, the second of its kind ends the process, even one that Python cannot interrupt."""

import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT

SCRIPT = """
import ctypes, sys, time
from runtime.run import StopRequest
stop = StopRequest()
print("ready", flush=True)
if sys.argv[1] == "stuck":              # in a call of C's that no signal ends, as a rank in a collective
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
end = time.monotonic() + 60
while not stop.requested and time.monotonic() < end:
    time.sleep(0.01)
print("requested", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["loop", "stuck"])
def process(request):
    running = subprocess.Popen([sys.executable, "-c", SCRIPT, request.param], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert running.stdout.readline() == "ready\n"
    running.is_stuck = request.param == "stuck"
    yield running
    running.kill()
    running.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_of_the_kind_ends_the_process_at_once(process, number):
    process.send_signal(number)
    if not process.is_stuck:
        assert process.stdout.readline() == "requested\n"
    process.send_signal(number)         # within a second it is the same request, passed on twice
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(timeout=20) == 128 + number
    assert f"a second {number.name}: left at once" in process.stderr.read()


def test_another_kind_of_signal_is_no_second_one(process):
    """Slurm warns by SIGUSR1 and sends SIGTERM minutes later: a save that is still under way has its half minute."""
    process.send_signal(signal.SIGUSR1)
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
