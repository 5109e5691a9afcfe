"""Sample how full, how busy, how hungry this process's GPU is."""

import threading
from importlib import import_module

import torch

PERIOD = 1.0        # seconds between samples; NVML's own utilisation averages over 1/6 to 1 s


class Meter:
    """Reads NVML in a thread of its own, so that a slow driver never holds up a step; without NVML it has nothing to tell.

    NVML comes with the driver, its Python side from `pip install nvidia-ml-py`."""

    def __init__(self, device: torch.device, period: float = PERIOD):
        self._latest: dict[str, float] = {}
        self._closed = threading.Event()
        if device.type == "cuda":
            # NVML counts all GPUs of the machine, CUDA_VISIBLE_DEVICES those of this process: the uuid means the same to both.
            uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
            if uuid is not None:
                threading.Thread(target=self._sample, args=(f"GPU-{uuid}".replace("GPU-GPU-", "GPU-"), period), name="meter",
                                 daemon=True).start()

    def read(self) -> dict[str, float]:
        """The latest sample: gpu_mem_pct and gpu_util_pct in percent, gpu_power_w in watts; what this GPU does not tell is
        missing, and {} means nothing to tell."""
        return dict(self._latest)

    def close(self) -> None:
        self._closed.set()

    def _sample(self, uuid: str, period: float) -> None:
        try:
            nvml = import_module("pynvml")
            nvml.nvmlInit()
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:       # no such package, no driver, a container without NVML, a slice of a GPU: no row, no error
            return
        while not self._closed.is_set():
            sample = {}
            for name, read in (("gpu_mem_pct", lambda: _memory_percent(nvml.nvmlDeviceGetMemoryInfo(gpu))),
                               ("gpu_util_pct", lambda: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
                               ("gpu_power_w", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000)):     # NVML says milliwatts
                try:
                    sample[name] = read()
                except Exception:       # noqa: S112 - not supported by this GPU, or lost for a moment
                    continue
            self._latest = sample
            self._closed.wait(period)


def _memory_percent(memory) -> float:
    return round(100 * memory.used / memory.total, 2)
