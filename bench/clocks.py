"""Sample the GPU's clock, power and temperature beside a measurement, by nvidia-smi.

Without nvidia-smi, or where this GPU does not tell something, that is null: a measurement never fails for want of it.
"""

import os
import subprocess
import threading
import time
from contextlib import suppress
from datetime import datetime

import numpy as np

PERIOD_MS = 200
FIELDS = ("timestamp", "clocks.sm", "power.draw", "temperature.gpu")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")     # the second is the older drivers' name
# Bits of that field (NVML's nvmlClocksEventReasons). Idle (1) and a clock that somebody set (2, 256) are no throttling.
THROTTLE = {0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "software thermal", 0x40: "hardware thermal",
            0x80: "power brake"}


def describe_gpu() -> dict:
    """{"gpu", "driver", "power_limit_w", "memory_gib"} of the GPU that CUDA calls number 0; None for what is not told."""
    values = _query(("name", "driver_version", "power.limit", "memory.total"))
    name, driver, limit, mib = values or [None] * 4
    limit, mib = _number(limit), _number(mib)
    return {"gpu": name, "driver": driver, "power_limit_w": limit, "memory_gib": mib and round(mib / 1024, 2)}


class Clocks:
    """Samples from its making until close(), where `is_on`; summary() tells of stretches of that time."""

    def __init__(self, is_on: bool = True):
        self._samples: list[tuple] = []     # (seconds since the epoch, MHz, W, °C, bits)
        self._process = None
        if not is_on:
            return
        reasons = next((name for name in REASONS if _query((name,)) is not None), None)
        if reasons is None and _query(FIELDS) is None:
            return
        command = _command((*FIELDS, *([reasons] if reasons else [])))
        with suppress(OSError):
            self._process = subprocess.Popen([*command, "-lms", str(PERIOD_MS)], stdin=subprocess.DEVNULL,
                                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, name="clocks", daemon=True).start()

    def summary(self, stretches: list[tuple[float, float]]) -> dict | None:
        """Over the samples in the stretches (begin, end), each in time.time()'s seconds; None where there are none.

        {"sm_mhz": {"p10", "median"}, "power_w": {"p10", "median"}, "temperature_c": highest, "throttled": [reasons]}"""
        rows = [row for row in list(self._samples) if any(begin <= row[0] <= end for begin, end in stretches)]
        if not rows:
            return None
        heat = [row[3] for row in rows if row[3] is not None]
        bits = {bit for row in rows for bit in THROTTLE if row[4] and row[4] & bit}
        return {"sm_mhz": _quantiles([row[1] for row in rows]), "power_w": _quantiles([row[2] for row in rows]),
                "temperature_c": max(heat) if heat else None, "throttled": [THROTTLE[bit] for bit in sorted(bits)]}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout:
            if (row := parse_sample(line)) is not None:
                self._samples.append(row)


def parse_sample(line: str) -> tuple | None:
    """(seconds since the epoch, MHz, W, °C, bits) of a line of nvidia-smi; None for a line that is no sample."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < len(FIELDS):
        return None
    try:        # its own clock, not the line's arrival: pipes may hold lines back
        when = datetime.strptime(parts[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
    except ValueError:
        when = time.time()
    bits = None
    if len(parts) > len(FIELDS):
        with suppress(ValueError):
            bits = int(parts[4], 16)
    sample = (when, *map(_number, parts[1:4]), bits)
    return sample if any(value is not None for value in sample[1:]) else None


def _quantiles(values: list) -> dict | None:
    values = [value for value in values if value is not None]
    if not values:
        return None
    p10, median = np.quantile(values, (0.1, 0.5)).tolist()
    return {"p10": p10, "median": median}


def _query(fields: tuple[str, ...]) -> list[str] | None:
    """The fields of the GPU, or None where nvidia-smi is missing or refuses."""
    try:
        done = subprocess.run(_command(fields), capture_output=True, text=True, check=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    parts = [part.strip() for part in (done.stdout.splitlines() or [""])[0].split(",")]
    return parts if len(parts) == len(fields) and all(parts) else None


def _command(fields: tuple[str, ...]) -> list[str]:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", gpu]


def _number(text: str | None) -> float | None:
    """[N/A], [Not Supported] and the like are None."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
