"""runtime/machine.py: git, nvidia-smi, GPUs that torch cannot use, errors that mean too little memory."""

import errno
import os
import resource
import subprocess
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime import machine
from runtime.cli import MachineError
from runtime.machine import check_device, git, memory_error, nvidia_smi, out_of_memory
from tests.conftest import run_train

CPU = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
TOO_OLD = ("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
           "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx\nAlternatively, go to")


def test_git_tells_commit_and_changes_and_none_outside_a_repository(tmp_path):
    assert git(tmp_path, "rev-parse", "HEAD") is None
    subprocess.run("git init -q && touch a && git add a && git -c user.name=n -c user.email=e commit -qm a", shell=True,
                   cwd=tmp_path, check=True)
    assert len(git(tmp_path, "rev-parse", "HEAD")) == 40 and git(tmp_path, "status", "--porcelain") == ""
    (tmp_path / "a").write_text("x")
    assert git(tmp_path, "status", "--porcelain") == "M a"


def test_nvidia_smi_gives_the_fields_of_a_gpu_or_none(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.65.06'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nvidia_smi("name", "driver_version") == ["NVIDIA H100 80GB HBM3", "580.65.06"]
    tool.write_text("#!/bin/sh\necho none; exit 9\n")
    assert nvidia_smi("name") is None


# --------------------------------------------------------------------------------------------------------------- device

def pc(gpus, built_for, error=None, visible=None):
    """A made-up machine: GPUs that the driver lists, CUDA version of torch, the error of its start, CUDA_VISIBLE_DEVICES."""
    return gpus, built_for, error, visible


def become(monkeypatch, gpus, built_for, error, visible):
    def init():
        raise RuntimeError(error)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus and built_for and not error))
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.parametrize("computer", [
    pc(0, None), pc(0, "13.0"), pc(2, "13.0"), pc(2, None, visible=""), pc(2, "13.0", TOO_OLD, visible="-1")])
def test_machines_that_can_train(monkeypatch, computer):
    become(monkeypatch, *computer)
    check_device()


@pytest.mark.parametrize("computer, told", [
    (pc(8, None), "this machine has 8 NVIDIA GPU(s), but torch {torch} was built for the CPU alone: install"),
    (pc(1, "13.0", TOO_OLD), "shows 1 NVIDIA GPU(s), but torch {torch} cannot use any (The NVIDIA driver on your system is too "
     "old (found version 11040)"),
    (pc(1, "13.0", TOO_OLD), "update the NVIDIA driver, or install a torch built for it (this one wants CUDA 13.0)"),
    (pc(4, "13.0", "No CUDA GPUs are available", visible="7"), "correct CUDA_VISIBLE_DEVICES='7'"),
    (pc(0, "13.0", "No CUDA GPUs are available", visible="0"), "this machine shows 0 NVIDIA GPU(s)"),
    (pc(4, "13.0", "CUDA unknown error"), "see whether `nvidia-smi` finds the GPU")])
def test_a_gpu_that_torch_cannot_use_is_refused(monkeypatch, computer, told):
    become(monkeypatch, *computer)
    with pytest.raises(MachineError) as caught:
        check_device()
    said = str(caught.value)
    assert told.format(torch=torch.__version__) in said and "\n" not in said and "or set CUDA_VISIBLE_DEVICES=''" in said


def test_the_machine_this_runs_on_passes(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_device()


# --------------------------------------------------------------------------------------------------------------- memory

@pytest.mark.parametrize("allocate, is_size_known", [
    (lambda: torch.empty(2**50), True), (lambda: np.empty(2**46), True), (lambda: bytearray(2**60), False)])
def test_what_torch_numpy_and_python_raise_is_recognised(tiny, allocate, is_size_known):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    said = out_of_memory(caught.value, tiny, CPU)
    assert said.startswith("out of memory on rank 0 (cpu): ") and "\n" not in said
    assert ("GiB more were asked for" in said) == is_size_known


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("std::bad_alloc"), MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
                 "allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)")])
def test_errors_that_mean_memory_also_where_they_are_wrapped(error):
    wrapper, outer = RuntimeError("backend='inductor' raised:"), ValueError("and once more")
    wrapper.__cause__, outer.__context__ = error, wrapper
    assert memory_error(error) is memory_error(outer) is error


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of range"),
                                   OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), KeyError("memory")])
def test_other_errors_are_not_taken_for_it(tiny, error):
    error.__cause__ = RuntimeError("b")
    error.__cause__.__context__ = error      # a circle
    assert memory_error(error) is None and out_of_memory(error, tiny, None) is None


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


def test_what_a_gpu_tells_of_its_memory(tiny, monkeypatch):
    for name, value in {"max_memory_allocated": 70 * 2**30, "max_memory_reserved": 77 * 2**30,
                        "get_device_name": "NVIDIA H100 80GB HBM3",
                        "get_device_properties": SimpleNamespace(total_memory=79 * 2**30)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    said = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB."), tiny,
                         SimpleNamespace(rank=3, size=8, device=torch.device("cuda", 3)))
    assert said.startswith("out of memory on rank 3 (cuda:3, NVIDIA H100 80GB HBM3): 70.00 GiB of tensors at the peak, 77.00 "
                           "with the allocator's reserve, of 79.00 GiB, 0.50 GiB more were asked for; what was saved stays. Try ")


def test_a_run_limited_in_memory_says_so_before_it_writes_anything(tiny, tmp_path):
    """RLIMIT_AS, as a batch system sets it, and a model that outgrows it."""
    done = run_train(tiny, tmp_path, "model.n_layer=8", "model.n_embd=8192", "model.n_ffn=32768",
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (20 * 2**30,) * 2))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("train.py: out of memory on rank 0 (cpu): ") and "Traceback" not in done.stderr
    assert "limited to 20.00 GiB of addresses, 1.00 GiB more were asked for" in done.stderr
    assert "Try data.micro_batch=2 (now 4" in done.stderr and done.stderr.count("\n") == 1
    assert not tiny.run_dir.exists()
