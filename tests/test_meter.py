"""The meter tells what NVML tells, and nothing at all rather than an error."""

import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from runtime.log import Meter

CUDA = torch.device("cuda", 0)


class FakeNvml(ModuleType):
    """The five calls that are used, of one GPU."""

    def __init__(self, uuid="GPU-8f2c"):
        super().__init__("pynvml")
        self.uuid, self.asked, self.power = uuid, [], 612_345

    def nvmlInit(self):
        self.asked.append("init")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != self.uuid:
            raise RuntimeError("NVMLError_NotFound")
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=60 * 2**30, total=80 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self.power


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="8f2c"))
    return fake


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def meters():
    return [thread for thread in threading.enumerate() if thread.name == "meter"]


def test_the_three_fields_in_percent_and_watts(nvml):
    meter = Meter(CUDA, period=0.01)
    wait_for(meter.read)
    assert meter.read() == {"gpu_mem_pct": 75.0, "gpu_util_pct": 97.0, "gpu_power_w": 612.345}
    nvml.power = 300_000        # it goes on
    wait_for(lambda: meter.read()["gpu_power_w"] == 300.0)
    meter.read()["gpu_power_w"] = 0     # a row's own copy
    assert meter.read()["gpu_power_w"] == 300.0
    meter.close()
    wait_for(lambda: not meters())
    assert nvml.asked == ["init"]


@pytest.mark.parametrize("call, field", [
    ("nvmlDeviceGetMemoryInfo", "gpu_mem_pct"), ("nvmlDeviceGetUtilizationRates", "gpu_util_pct"),
    ("nvmlDeviceGetPowerUsage", "gpu_power_w")])
def test_what_a_gpu_does_not_tell_is_missing(nvml, monkeypatch, call, field):
    def refuse(handle):
        raise RuntimeError("NVMLError_NotSupported")
    monkeypatch.setattr(nvml, call, refuse)
    meter = Meter(CUDA, period=0.01)
    wait_for(meter.read)
    assert {"gpu_mem_pct", "gpu_util_pct", "gpu_power_w"} - set(meter.read()) == {field}
    meter.close()


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_nvml_there_is_nothing_to_tell(nvml, monkeypatch, call):
    def refuse(*arguments):
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")
    monkeypatch.setattr(nvml, call, refuse)
    meter = Meter(CUDA, period=0.01)
    wait_for(lambda: not meters())
    assert meter.read() == {}


def test_without_the_package_there_is_nothing_to_tell(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = Meter(CUDA, period=0.01)
    wait_for(lambda: not meters())
    assert meter.read() == {}


def test_another_gpu_is_not_taken_for_ours(nvml):
    nvml.uuid = "GPU-0000"
    meter = Meter(CUDA, period=0.01)
    wait_for(lambda: not meters())
    assert meter.read() == {}


@pytest.mark.parametrize("properties", [SimpleNamespace(), SimpleNamespace(uuid=None)])
def test_a_torch_that_tells_no_uuid(nvml, monkeypatch, properties):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert Meter(CUDA).read() == {} and not meters()


def test_on_a_cpu_nothing_is_started():
    meter = Meter(torch.device("cpu"))
    assert meter.read() == {} and not meters()
    meter.close()


def test_a_driver_that_hangs_holds_nobody_up(nvml, monkeypatch):
    hanging = threading.Event()
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda handle: hanging.wait())
    meter = Meter(CUDA, period=0.01)
    assert meter.read() == {}       # at once; a hang here would never end
    assert all(thread.daemon for thread in meters())
    meter.close()
    hanging.set()
    wait_for(lambda: not meters())
