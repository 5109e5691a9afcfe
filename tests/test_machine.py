"""Tests of runtime/machine.py: GPUs that torch cannot use, memory that does not suffice, each in a sentence."""

import errno
import resource
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime import machine
from runtime.cli import MachineError
from runtime.machine import check_device, out_of_memory
from tests.conftest import run_train

CPU = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
TOO_OLD = ("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
           "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
           "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver.")


def pc(**parts):
    return parts


@pytest.fixture
def computer(monkeypatch):
    """A made-up machine: how many GPUs the driver shows, which CUDA torch was built for, what its start says."""
    def make(gpus, built_for, error=None, visible=None, archs=("sm_80", "sm_90"), capability=(9, 0)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

        def init():
            if error:
                raise RuntimeError(error)
        monkeypatch.setattr(machine, "_gpus_there", lambda: gpus)
        monkeypatch.setattr(torch.version, "cuda", built_for)
        for name, value in {"is_available": lambda: gpus > 0 and not error, "init": init, "device_count": lambda: gpus,
                            "get_arch_list": lambda: list(archs), "get_device_capability": lambda i: capability,
                            "get_device_name": lambda i: "NVIDIA H100"}.items():
            monkeypatch.setattr(torch.cuda, name, value)
    return make


@pytest.mark.parametrize("arguments", [
    pc(gpus=0, built_for=None), pc(gpus=0, built_for="13.0"), pc(gpus=2, built_for="13.0"),
    pc(gpus=2, built_for=None, visible=""), pc(gpus=2, built_for="13.0", error=TOO_OLD, visible="-1"),
    pc(gpus=1, built_for="13.0", archs=("sm_80",), capability=(8, 6)),
    pc(gpus=1, built_for="13.0", archs=("sm_80", "compute_90"), capability=(12, 0)),
    pc(gpus=1, built_for="13.0", archs=("sm_90a",), capability=(9, 0)), pc(gpus=1, built_for="13.0", archs=())])
def test_machines_that_can_train(computer, arguments):
    computer(**arguments)
    check_device()


@pytest.mark.parametrize("arguments, told", [
    (pc(gpus=8, built_for=None), "this machine has 8 NVIDIA GPUs, but torch {torch} was built for the CPU alone: install"),
    (pc(gpus=1, built_for="13.0", error=TOO_OLD), "shows an NVIDIA GPU, but torch {torch} cannot use any (The NVIDIA driver on "
     "your system is too old (found version 11040)"),
    (pc(gpus=1, built_for="13.0", error=TOO_OLD), "update the NVIDIA driver, or install a torch that was built for it "
     "(this one wants CUDA 13.0)"),
    (pc(gpus=4, built_for="13.0", error="No CUDA GPUs are available", visible="7"), "correct CUDA_VISIBLE_DEVICES='7'"),
    (pc(gpus=0, built_for="13.0", error="No CUDA GPUs are available", visible="0"), "this machine shows no NVIDIA GPU"),
    (pc(gpus=4, built_for="13.0", error="CUDA unknown error"), "see whether `nvidia-smi` finds the GPU"),
    (pc(gpus=1, built_for="13.0", archs=("sm_80", "sm_90"), capability=(7, 0)), "has no kernels for GPU 0, NVIDIA H100 "
     "(sm_70); it was built for sm_80, sm_90"),
    (pc(gpus=1, built_for="13.0", archs=("sm_80", "sm_90"), capability=(12, 0)), "(sm_120)")])
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu_in_silence(computer, arguments, told):
    computer(**arguments)
    with pytest.raises(MachineError) as caught:
        check_device()
    assert told.format(torch=torch.__version__) in str(caught.value) and "\n" not in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value)


def test_the_machine_this_runs_on_passes(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_device()


# --------------------------------------------------------------------------------------------------------------- memory

def raised(action):
    try:
        action()
    except BaseException as error:
        return error


REAL = {        # what this very torch, numpy and Python raise
    "torch": lambda: torch.empty(2**50),
    "numpy": lambda: np.empty(2**46),
    "python": lambda: bytearray(2**60),
}


@pytest.mark.parametrize("kind", REAL)
def test_what_the_libraries_raise_is_recognised(tiny, kind):
    error = raised(REAL[kind])
    said = out_of_memory(error, tiny, CPU)
    assert said.startswith("out of memory on rank 0 (cpu): ") and "\n" not in said
    assert ("GiB more were asked for" in said) == (kind != "python"), said


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("std::bad_alloc"), MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
                 "allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)")])
def test_errors_that_mean_memory_also_where_they_are_wrapped(tiny, error):
    assert out_of_memory(error, tiny, None) is not None
    wrapper = RuntimeError("backend='inductor' raised:")
    wrapper.__cause__ = error
    outer = ValueError("and once more")
    outer.__context__ = wrapper
    said = out_of_memory(outer, tiny, CPU)
    assert said == out_of_memory(error, tiny, CPU) or "peak" in said


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of range"),
                                   OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), KeyError("memory")])
def test_other_errors_are_not_taken_for_it(tiny, error):
    assert out_of_memory(error, tiny, CPU) is None
    circle = RuntimeError("a")
    circle.__cause__ = RuntimeError("b")
    circle.__cause__.__context__ = circle
    assert out_of_memory(circle, tiny, CPU) is None


def test_the_sentence_names_settings_that_the_config_accepts(tiny):
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.")
    said = out_of_memory(error, tiny, CPU)
    assert "4.00 GiB more were asked for" in said and "data.micro_batch=2 (now 4; a step keeps its tokens)" in said
    assert "parallel.recompute=true" in said and "more GPUs (now 1)" in said
    assert "loss_chunk" not in said, "128 tokens at a time are a chunk already"
    wide = replace(tiny, data=replace(tiny.data, micro_batch=48, tokens_per_step=48 * 32 * 6), parallel=replace(
        tiny.parallel, replicate=3, recompute=True))
    said = out_of_memory(error, wide, SimpleNamespace(rank=2, size=3, device=torch.device("cpu")))
    assert said.startswith("out of memory on rank 2 (cpu)")
    assert "data.micro_batch=24 (now 48" in said and "model.loss_chunk=1024 (now none" in said
    assert "parallel.replicate=1 (now 3" in said and "recompute" not in said
    odd = replace(tiny, data=replace(tiny.data, micro_batch=9, tokens_per_step=9 * 32))     # 4 do not divide it
    assert "data.micro_batch=3 (now 9" in out_of_memory(error, odd, CPU)
    for each in (tiny, wide, odd):
        for n in range(1, 50):
            if f"data.micro_batch={n} (" in out_of_memory(error, each, CPU):
                replace(each, data=replace(each.data, micro_batch=n)).accumulation(1)      # raises where it does not divide


def test_what_a_gpu_tells_of_its_memory(tiny, monkeypatch):
    for name, value in {"max_memory_allocated": 70, "max_memory_reserved": 77}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=79 * 2**30))
    said = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB."), tiny,
                         SimpleNamespace(rank=3, size=8, device=torch.device("cuda", 3)))
    assert said.startswith("out of memory on rank 3 (cuda:3, NVIDIA H100 80GB HBM3): 70.00 GiB of tensors at the peak, 77.00 "
                           "with the allocator's reserve, of 79.00 GiB, 0.50 GiB more were asked for; what was saved stays. Try ")


def test_a_real_run_that_may_have_no_more_memory(tiny, tmp_path):
    """RLIMIT_AS, as a batch system sets it, and a model that outgrows it: told before a byte is written."""
    done = run_train(tiny, tmp_path, "model.n_layer=8", "model.n_embd=8192", "model.n_ffn=32768",
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (20 * 2**30,) * 2))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("train.py: out of memory on rank 0 (cpu): ") and "Traceback" not in done.stderr
    assert "limited to 20.00 GiB of addresses, 1.00 GiB more were asked for" in done.stderr
    assert "Try data.micro_batch=2 (now 4" in done.stderr and done.stderr.count("\n") == 1
    assert not tiny.run_dir.exists()
