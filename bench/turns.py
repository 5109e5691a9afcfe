"""Time two functions in turns, so that what drifts cancels in their ratio.

On a GPU the time of a turn lies between two CUDA events, behind a pause long enough for the launches to be queued: it
is the GPU's time, not Python's. On a CPU it is perf_counter's.
"""

import math
import time
from collections.abc import Callable

import numpy as np
import torch

TURN_S = 0.01           # seconds of work per turn, so that the clock's own resolution does not count
MOST_CALLS = 32         # per turn: the launches of one turn must fit the GPU's queue of about 1,000
GPU_HZ = 2e9            # cycles per second, at least any GPU's clock: turns a pause into cycles


def in_turns(a: Callable, b: Callable, repeats: int, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """Seconds per call of A and B over the turns A B A B .. A: (repeats + 1), (repeats). Both must be warm."""
    (launch_a, whole_a), (launch_b, _) = _pace(a, device), _pace(b, device)
    calls = min(MOST_CALLS, math.ceil(TURN_S / whole_a))
    pause = 1.5 * calls * max(launch_a, launch_b)       # half as much again: Python's pace varies
    a_s, b_s = [_turn(a, calls, pause, device)], []
    for _ in range(repeats):
        b_s.append(_turn(b, calls, pause, device))
        a_s.append(_turn(a, calls, pause, device))
    return np.array(a_s), np.array(b_s)


def ratios(a_s: np.ndarray, b_s: np.ndarray) -> np.ndarray:
    """A / B of each turn of B (n) against the mean of its two neighbours among A's (n + 1): a linear drift cancels."""
    return (a_s[:-1] + a_s[1:]) / 2 / b_s


def _pace(step: Callable, device: torch.device) -> tuple[float, float]:
    """Seconds that Python needs to launch a call, and seconds until the call is done."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(3):
        step()
    launched = (time.perf_counter() - began) / 3
    _wait(device)
    return launched, (time.perf_counter() - began) / 3


def _turn(step: Callable, calls: int, pause: float, device: torch.device) -> float:
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - began) / calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(pause * GPU_HZ))      # the GPU idles while Python queues the launches
    first.record()
    for _ in range(calls):
        step()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
