"""Muon against its definition in fp64 and against torch's, by parts, over shards, after a resume."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from model import GPT, GPTConfig
from runtime import optim
from runtime.cli import UserError
from runtime.config import FP8Config, OptimConfig, ParallelConfig
from runtime.rows import read_rows
from tests.conftest import ROOT, call_train, write_config

MODEL = GPTConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, n_ctx=8, vocab_size=100)
C = OptimConfig(lr=0.02, kind="muon", momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (32, 32)])
def test_newton_schulz_gives_the_singular_vectors(shape):
    torch.manual_seed(1)
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    matrix = u * torch.linspace(0.1, 1, min(shape), dtype=torch.float64) @ v
    found = u.T @ optim.orthogonalised(matrix.float()).double() @ v.T     # diagonal where the singular vectors are the same
    values = torch.diagonal(found)
    assert ((values > 0.6) & (values < 1.3)).all() and (found - torch.diag(values)).abs().max() < 0.05
    x = matrix if shape[0] <= shape[1] else matrix.T      # the iteration itself, in fp64
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    x = x if shape[0] <= shape[1] else x.T
    assert (optim.orthogonalised(matrix.float()) - x).norm() < 0.05 * x.norm(), "BF16's roundings, 3 %"


def test_each_matrix_is_torchs_muon_by_parts_and_the_rest_is_adamw():
    torch.manual_seed(1)
    model = GPT(MODEL)
    model.init_weights(0)
    optimizer = optim.build_optimizer(model, C)
    optim.fill_state(optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parts = {"qkv": (32, 16, 16), "out": (32,), "gate_up": (48, 48), "down": (32,)}
    theirs = {}
    for name, p in model.named_parameters():
        rows = parts.get(name.split(".")[-2]) if name.startswith("layers") else None
        theirs[name] = [torch.nn.Parameter(part.clone()) for part in (p.detach().split(rows) if rows else [p.detach()])]
    matrices = [name for name in theirs if name.startswith("layers") and "norm" not in name]
    muon = torch.optim.Muon([part for name in matrices for part in theirs[name]], lr=C.lr, momentum=0.9, weight_decay=0.1,
                            adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": theirs["wte.weight"]}, {"params": [p[0] for n, p in theirs.items() if "norm" in n], "weight_decay": 0.0}],
        lr=C.lr, betas=(C.beta1, C.beta2), eps=C.eps, weight_decay=0.1)
    for _ in range(3):
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape)
            for part, grad in zip(theirs[name], p.grad.split([len(part) for part in theirs[name]]), strict=True):
                part.grad = grad
        versions = [p._version for p in model.parameters()]
        for one in (optimizer, muon, adamw):
            one.step()
        assert all(p._version > old for p, old in zip(model.parameters(), versions, strict=True)), "stale copies"
    for name, p in model.named_parameters():
        moved = (p - before[name]).norm()
        assert (p - torch.cat(list(theirs[name]))).norm() < (0.05 if name in matrices else 1e-5) * moved, name
    assert {name.rpartition(".")[2] for name in optim.state_tensors(optimizer, model)} == {"momentum", "exp_avg", "exp_avg_sq"}


def test_a_resumed_run_ends_in_the_same_bits_and_the_loss_falls(tiny, tmp_path, capsys):
    config = replace(tiny, optim=replace(tiny.optim, kind="muon"), steps=6)
    assert call_train(capsys, config, tmp_path).returncode == 0
    whole = rows(config)
    parts = replace(config, run="parts", checkpoint=replace(config.checkpoint, every=3))
    assert call_train(capsys, parts, tmp_path).returncode == 0
    for name in ("step_00000006", "summary.json"):      # back to step 3
        remove(parts.run_dir / "checkpoints" / name) if name.startswith("step") else (parts.run_dir / name).unlink()
    assert call_train(capsys, parts, tmp_path).returncode == 0
    assert rows(parts) == whole and whole[-1][0] < whole[0][0]
    refused = call_train(capsys, replace(config, optim=replace(config.optim, kind="adamw")), tmp_path)
    assert (refused.returncode, "optim.kind was muon" in refused.stderr) == (2, True)
    assert json.loads((config.run_dir / "summary.json").read_text())["optimizer"] == "Muon"


def test_two_ranks_train_what_one_process_trains(tiny, tmp_path, capsys):
    one, two = (replace(tiny, run=run, optim=replace(tiny.optim, kind="muon")) for run in ("one", "two"))
    assert call_train(capsys, one, tmp_path).returncode == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train.py"),
               str(write_config(two, tmp_path / "two.py"))]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (loss, norm), (other, its_norm) in zip(rows(one), rows(two), strict=True):
        assert other == pytest.approx(loss, rel=2e-3) and its_norm == pytest.approx(norm, rel=2e-2)


def rows(config):
    found = read_rows(config.run_dir / "metrics.jsonl")
    return [(row["loss"], row["grad_norm"]) for row in found if row["kind"] == "train"]


def remove(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_float8_all_gather_is_refused(tiny):
    with pytest.raises(UserError, match="not tried with optim.kind=muon"):
        replace(tiny, optim=replace(tiny.optim, kind="muon"), fp8=FP8Config(recipe="tensorwise", all_gather=True),
                parallel=ParallelConfig(compile=False))
