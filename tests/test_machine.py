"""runtime/machine.py: git, nvidia-smi, GPUs that torch cannot use, errors that mean too little memory."""

import errno
import os
import resource
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime import machine
from runtime.cli import MachineError
from runtime.machine import check_device, git, memory_error, out_of_memory
from tests.conftest import run_train

CPU = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update\nAlternatively, go to"


def test_git_tells_commit_and_changes_and_none_outside_a_repository(tmp_path):
    assert git(tmp_path, "rev-parse", "HEAD") is None
    subprocess.run("git init -q && touch a && git add a && git -c user.name=n -c user.email=e commit -qm a", shell=True,
                   cwd=tmp_path, check=True)
    assert len(git(tmp_path, "rev-parse", "HEAD")) == 40 and git(tmp_path, "status", "--porcelain") == ""


@pytest.mark.parametrize("gpus, cuda, error, visible, told", [      # a made-up machine: GPUs, CUDA of torch, error of its start
    (0, None, None, None, None), (0, "13.0", None, None, None), (2, "13.0", None, None, None), (2, None, None, "", None),
    (2, "13.0", TOO_OLD, "-1", None), (0, None, None, "0", None),
    (8, None, "Torch not compiled with CUDA enabled", None, "shows 8 .*not compiled with CUDA.*install torch's CUDA build"),
    (1, "13.0", TOO_OLD, None, "driver on your system is too old .*update the NVIDIA driver, .*this one wants CUDA 13.0"),
    (4, "13.0", "No CUDA GPUs are available", "7", "correct CUDA_VISIBLE_DEVICES='7'"),
    (0, "13.0", "No CUDA GPUs are available", "0", "shows 0 NVIDIA GPU"), (4, "13.0", "CUDA unknown error", None, "nvidia-smi")])
def test_a_gpu_that_torch_cannot_use_is_refused(monkeypatch, gpus, cuda, error, visible, told):
    def init():
        raise AssertionError(error) if cuda is None else RuntimeError(error)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus and cuda and not error))
    monkeypatch.setattr(torch.cuda, "init", init)
    if told is None:
        check_device()
    else:
        with pytest.raises(MachineError, match=told + ".*or set CUDA_VISIBLE_DEVICES=''") as caught:
            check_device()
        assert torch.__version__ in str(caught.value) and "\n" not in str(caught.value)


def raised(call):
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        return error


@pytest.mark.parametrize("error", [
    raised(lambda: torch.empty(2**50)), raised(lambda: np.empty(2**46)), raised(lambda: bytearray(2**60)),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("std::bad_alloc"), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))], ids=lambda error: type(error).__name__)
def test_errors_that_mean_memory_also_where_they_are_wrapped(tiny, error):
    wrapper, outer = RuntimeError("backend='inductor' raised:"), ValueError("and once more")
    wrapper.__cause__, outer.__context__ = error, wrapper
    assert memory_error(error) is memory_error(outer) is error
    said = out_of_memory(outer, tiny, CPU)
    assert said.startswith("out of memory on rank 0 (cpu): ") and "\n" not in said and str(error)[:20] in said


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("memory"),
                                   OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_other_errors_are_not_taken_for_it(tiny, error):
    error.__cause__ = RuntimeError("b")
    error.__cause__.__context__ = error      # a circle
    assert memory_error(error) is None and out_of_memory(error, tiny, CPU) is None


def test_the_sentence_names_settings_that_the_config_accepts(tiny):
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.")
    said = out_of_memory(error, tiny, CPU)
    assert all(part in said for part in ("you tried to allocate 4294967296 bytes; ", "data.micro_batch=2 (now 4; a step keeps ",
                                         "parallel.recompute=true", "more GPUs (now 1)"))
    assert "loss_chunk" not in said, "128 tokens at a time are a chunk already"
    wide = replace(tiny, data=replace(tiny.data, micro_batch=48, tokens_per_step=48 * 32 * 4),
                   parallel=replace(tiny.parallel, recompute=True))
    said = out_of_memory(error, wide, SimpleNamespace(rank=2, size=3, device=torch.device("cpu")))
    assert said.startswith("out of memory on rank 2 (cpu)") and "data.micro_batch=16 (now 48" in said     # 24 x 3: no divisor
    assert "model.loss_chunk=1024 (now none" in said and "recompute" not in said and "more GPUs (now 3)" in said
    odd = replace(tiny, data=replace(tiny.data, micro_batch=9, tokens_per_step=9 * 32))     # 4: no divisor
    assert "data.micro_batch=3 (now 9" in out_of_memory(error, odd, CPU)


def test_what_a_gpu_tells_of_its_memory(tiny, monkeypatch):
    for name, value in {"max_memory_allocated": 70 * 2**30, "get_device_name": "NVIDIA H100 80GB HBM3",
                        "get_device_properties": SimpleNamespace(total_memory=79 * 2**30)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB. If reserved but unallocated memory")
    said = out_of_memory(error, tiny, SimpleNamespace(rank=3, size=8, device=torch.device("cuda", 3)))
    assert said.startswith("out of memory on rank 3 (cuda:3, NVIDIA H100 80GB HBM3, 70.00 GiB of tensors at the peak, of 79.00 "
                           "GiB): CUDA out of memory. Tried to allocate 512.00 MiB; what was saved stays. Try data.micro")


def test_a_run_limited_in_memory_says_so_before_it_writes_anything(tiny, tmp_path):
    """RLIMIT_AS, as a batch system sets it, and a model that outgrows it."""
    done = run_train(tiny, tmp_path, "model.n_layer=8", "model.n_embd=8192", "model.n_ffn=32768",
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (20 * 2**30,) * 2))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and not tiny.run_dir.exists(), done.stderr
    assert done.stderr.startswith("train.py: out of memory on rank 0 (cpu): ") and "Try data.micro_batch=2 " in done.stderr
