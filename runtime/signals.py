"""Hear the requests to stop: signals, and the end of the launcher."""

import os
import signal
import threading
import time
from contextlib import suppress

from runtime.parallel import World

# SIGUSR1 is Slurm's warning; SIGHUP comes from a terminal that is closed, as by an ssh connection
# that is lost.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ONE_REQUEST_S = 1.0  # torchrun and Slurm may both pass one request on


class StopRequest(threading.Event):
    """Set by the first of SIGNALS, and by the end of the launcher; the loop reads it once a step. A
    later signal of the same kind ends the process at once: a thread counts them as they arrive,
    where Python's own handlers wait for a collective or the device to come back."""

    def __init__(self, world: World):
        super().__init__()
        self.reason = ""  # what set it on this rank
        self._is_to_tell = world.local_rank == 0
        # signal -> when it came first, in seconds of time.monotonic()
        self._first: dict[int, float] = {}
        self._arriving, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # by nohup: the run is to outlive its terminal
            signal.signal(number, lambda *_: None)  # so that it is written to the pipe
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        if world.launcher is not None:
            world.launcher.on_end = self._request

    def _listen(self) -> None:
        while numbers := os.read(self._arriving, 64):
            for number in numbers:
                self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if number not in SIGNALS:
            return
        name = signal.Signals(number).name
        self._request(name)
        if time.monotonic() - self._first.setdefault(number, time.monotonic()) > ONE_REQUEST_S:
            self._tell(
                f"a second {name}: left at once; what was saved stays, and the same command goes on"
                " from there"
            )
            os._exit(128 + number)

    def _request(self, reason: str) -> None:
        if self.is_set():
            return
        self.reason = reason
        self.set()
        if self._is_to_tell:
            self._tell(f"{reason}: the run finishes its step, saves and leaves")

    def _tell(self, sentence: str) -> None:
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\ntrain.py: {sentence}\n".encode())
