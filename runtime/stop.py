"""Note that a run was asked to stop, for the loop to see."""

import signal


class StopRequest:
    """Set by SIGINT, SIGTERM or SIGUSR1 (Slurm's warning); the loop reads it once a step. A second one takes its usual
    effect, at once."""

    def __init__(self):
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, frame):
        self.requested = True
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
