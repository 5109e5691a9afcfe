"""Note that a run was asked to stop, for the loop to see."""

import os
import signal
import socket
import sys
import threading
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)      # the last is Slurm's warning
ONE_REQUEST_S = 1.0     # torchrun and Slurm may both pass one request on


class StopRequest:
    """Set by the first of SIGNALS; the loop reads it once a step. A second one of the same kind ends the process at once,
    whatever it is doing: a thread counts them, because Python's own handlers wait for a collective to come back."""

    def __init__(self):
        self.requested = False
        self._numbers, written = socket.socketpair()
        written.setblocking(False)
        self._written = written         # open as long as signals are written to it
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._count, name="signals", daemon=True).start()

    def _on_signal(self, number, frame):
        self.requested = True

    def _count(self):
        first: dict[int, float] = {}
        while numbers := self._numbers.recv(64):
            for number in filter(SIGNALS.__contains__, numbers):
                if time.monotonic() - first.setdefault(number, time.monotonic()) > ONE_REQUEST_S:
                    print(f"\ntrain.py: a second {signal.Signals(number).name}: left at once; what was saved stays, and the same "
                          f"command goes on from there", file=sys.stderr, flush=True)
                    os._exit(128 + number)
