"""Tests of eval/weights.py: the copy holds the model's numbers, is whole or not there, comes from a sound checkpoint."""

import json
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from eval import weights
from eval.weights import write_safetensors
from runtime.checkpoint import checkpoints, load_model
from tests.conftest import ROOT, call_train

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}


@pytest.fixture
def run(tiny, tmp_path, capsys):
    done = call_train(capsys, tiny, tmp_path)
    assert done.returncode == 0, done.stderr
    return tiny


def read(path):
    """By the format's description, every byte accounted for: header length, header, tensors one after the other."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:8 + n]), data[8 + n:]
    assert (8 + n) % 64 == 0
    metadata, tensors, at = header.pop("__metadata__"), {}, 0
    assert all(isinstance(v, str) for v in metadata.values())
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == at
        tensors[name] = torch.frombuffer(bytearray(body[begin:end]), dtype=TORCH[entry["dtype"]]).reshape(entry["shape"])
        at = end
    assert at == len(body)
    return metadata, tensors


def test_the_copy_holds_the_newest_weights_and_nothing_of_the_optimizer(run, tmp_path, capsys):
    wanted = dict(load_model(run.run_dir)[0].named_parameters())
    assert weights.main([str(run.run_dir)]) == 0
    path = run.run_dir / "weights_00000006.safetensors"
    assert capsys.readouterr().out.endswith(f"MiB -> {path}\n")
    metadata, found = read(path)
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)
    assert (metadata["run"], metadata["step"]) == ("tiny", "6")
    assert json.loads(metadata["config"])["model"]["n_embd"] == 32
    small = tmp_path / "small.safetensors"
    small.write_bytes(b"an older file")
    assert weights.main([str(run.run_dir), str(small), "dtype=bf16"]) == 0
    found = read(small)[1]
    assert all(torch.equal(found[k], wanted[k].bfloat16()) for k in wanted)

    # A damaged checkpoint is told and left where it lies; the one before it serves.
    newest = checkpoints(run.run_dir)[-1]
    shard = next(newest.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert weights.main([str(run.run_dir)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].startswith("step 3:") and f"{shard} differs from what was written" in said.err
    assert newest in checkpoints(run.run_dir)
    shutil.rmtree(checkpoints(run.run_dir)[0])
    assert weights.main([str(run.run_dir)]) == 2
    assert "none of its 1 checkpoints is sound" in capsys.readouterr().err

    # A disk that is full: the older file stays, nothing half-written beside it.
    before = small.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", "import signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nimport torch\n"
         "from pathlib import Path\nfrom eval.weights import write_safetensors\n"
         "write_safetensors(Path(sys.argv[1]), {'w': torch.ones(100_000)}, {})", str(small)],
        cwd=ROOT, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2))
    assert done.returncode == 1 and "File too large" in done.stderr
    assert small.read_bytes() == before and not list(tmp_path.glob(".tmp_*"))


def test_the_package_reads_the_file_and_the_weights_begin_at_cache_lines(tmp_path):
    tensors = {"odd": torch.arange(3.0), "bf16": torch.randn(5, 32).bfloat16(), "view": torch.randn(64, 16)[16:48],
               "f8": torch.randn(16, 16).to(torch.float8_e4m3fn), "across": torch.randn(16, 32).t(), "scale": torch.ones(1, 1)}
    write_safetensors(tmp_path / "x.safetensors", tensors, {"a": "é"})
    read(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"a": "é"} and set(file.keys()) == set(tensors)
        for name, wanted in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == wanted.dtype and torch.equal(found.float(), wanted.float())
            assert name in ("odd", "scale") or found.data_ptr() % 64 == 0


@pytest.mark.parametrize("arguments, told", [
    (["{tmp}/nowhere"], "has no sound checkpoint"), (["{tmp}", "x.bin"], "must end in .safetensors"),
    (["{tmp}", "dtype=fp8"], "dtype='fp8' is not one of fp32, bf16"), (["{tmp}", "step=3"], "there is no key 'step'")])
def test_mistakes_get_a_sentence(tmp_path, capsys, arguments, told):
    assert weights.main([a.format(tmp=tmp_path) for a in arguments]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
