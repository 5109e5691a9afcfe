import json
import sys
from dataclasses import replace

import pytest
import torch

from runtime import log as metrics
from runtime.cli import UserError
from runtime.config import FP8Config, LogConfig


def row(step, **changes):
    return {"step": step, "tokens": step * 512, "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tok_per_s": 5120.0, "step_s": 0.1,
            "verdict": "OK", **changes}


def log(config, resume=0):
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return metrics.Log(config, resume, config.total_steps)


def read(config):
    return metrics.read_rows(config.run_dir / "metrics.jsonl")


def val(step, loss=1.5):
    return {"step": step, "tokens": step * 512, "loss": loss, "sources": {}}


def of(rows, *keys):
    return [tuple(r.get(k) for k in keys) for r in rows]


def rolled_back(config, resume=0):
    """Steps 1 to 6, validated after 2, 4 and 6, gone back from 6 to 4, then 5 and 6 again."""
    one = log(config, resume)
    for step in range(1, 7):
        one.step(row(step))
        if step % 2 == 0:
            one.validation(val(step))
    one.roll_back(4, {"event": "rollback", "step": 6, "to": 4})
    for step in (5, 6):
        one.step(row(step, loss=9.0))
    return one


def test_a_row_a_step_in_strict_json(tiny):
    one = log(tiny)
    one.step(row(1))
    one.step(row(2, loss=float("nan"), grad_norm=float("inf"), verdict="SKIP"))
    one.validation({"step": 2, "tokens": 1024, "loss": 1.5, "sources": {"web": 1.5}})
    one.close()
    lines = (tiny.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is no JSON")) for line in lines]
    assert [r["kind"] for r in rows] == ["train", "train", "val"]
    assert (rows[1]["loss"], rows[1]["grad_norm"], rows[1]["verdict"]) == (None, None, "SKIP")


def test_a_resume_drops_the_rows_that_will_happen_again_and_a_half_line(tiny):
    first = log(tiny)
    for step in range(1, 6):
        first.step(row(step))
    first.close()
    with open(tiny.run_dir / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 6, "lo')
    again = log(tiny, resume=3)
    again.step(row(4, loss=9.0))
    again.close()
    assert [(r["step"], r["loss"]) for r in read(tiny)] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 9.0)]


def test_progress_tells_step_loss_speed_share_and_time_left(tiny, capsys):
    one = log(replace(tiny, steps=100, log=LogConfig(every=50)))
    for step in range(1, 51):
        one.step(row(step))
    one.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["tiny  step 1/100    1%  loss 2.0000  5.1k tok/s  0m10s left",
                     "tiny  step 50/100   50%  loss 2.0000  5.1k tok/s  0m05s left"]


def test_on_a_terminal_one_line_lives(tiny, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    one = log(tiny)
    one.step(row(1))
    one.step(row(2, verdict="SKIP"))
    one.say("done")
    one.close()
    out = capsys.readouterr().out
    assert out.count("\n") == 2
    assert out.count("\r") == 2
    assert out.endswith("SKIP\ndone\n")


def test_throughput_by_hand():
    rows = [{"kind": "train", "since_start": i, "step_s": s} for i, s in
            enumerate([9.0, 1.0, 1.0, 0.1, 0.2, 0.3, 0.4, 0.5], start=1)]
    got = metrics.throughput([*rows, {"kind": "val"}], tokens_per_step=1000, flops_per_token=10**9, peak_bf16=1e13)
    assert got["step_s_median"] == 0.3      # the three warm-up steps do not count
    assert got["tok_per_s_median"] == pytest.approx(1000 / 0.3)
    assert got["tok_per_s_p10"] == pytest.approx(1000 / 0.5)
    assert got["tok_per_s_p90"] == pytest.approx(1000 / 0.1)
    assert got["tflops_median"] == pytest.approx(1e12 / 0.3 / 1e12)
    assert got["mfu_bf16"] == pytest.approx(1e12 / 0.3 / 1e13)
    assert got["compile_s"] == pytest.approx(8.7)
    assert metrics.throughput(rows[:1], 1000, 10**9, None)["mfu_bf16"] is None
    short = [{"kind": "train", "since_start": i, "step_s": s} for i, s in enumerate([9.0, 1.0, 2.0], start=1)]
    assert metrics.throughput(short, 1000, 10**9, None)["step_s_median"] == 2.0


@pytest.mark.parametrize("name, bf16", [
    ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989.4e12), ("NVIDIA GB200", 2500e12),
    ("NVIDIA GH200 480GB", 989.4e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("h100", 989.4e12), ("NVIDIA T4", None)])
def test_peaks_by_name(name, bf16):
    peak = metrics.peak_flops(name)
    assert (peak[0] if peak else None) == bf16


def test_pairs_share_everything_but_precision_and_bookkeeping(tiny):
    same = [replace(tiny, run="other"), replace(tiny, fp8=FP8Config(recipe="rowwise")),
            replace(tiny, checkpoint=replace(tiny.checkpoint, every=1)), replace(tiny, out="elsewhere")]
    other = [replace(tiny, seed=1), replace(tiny, steps=7), replace(tiny, optim=replace(tiny.optim, lr=1e-4)),
             replace(tiny, model=replace(tiny.model, n_layer=1)), replace(tiny, data=replace(tiny.data, mixture={"web": 1.0}))]
    assert {metrics.pair_id(c) for c in same} == {metrics.pair_id(tiny)}
    assert metrics.pair_id(tiny) not in {metrics.pair_id(c) for c in other}


def test_a_write_that_dies_leaves_what_was_there(tmp_path):
    path = tmp_path / "summary.json"
    metrics.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        metrics.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


ALLOWED = {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", "TORCH_LOGS": "+dynamo",
           "TORCHELASTIC_RESTART_COUNT": "2", "SLURM_JOB_ID": "17", "WANDB_MODE": "offline"}
FORBIDDEN = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "NCCL_AUTH", "TORCH_HUB_TOKEN", "NCCL_MY_key",
             "TORCH_PASSWORD", "TORCHINDUCTOR_REMOTE_CREDENTIALS", "XNCCL_DEBUG", "nccl_debug", "SLURM_JOB_NAME", "HTTPS_PROXY",
             "MASTER_ADDR", "HOME_OF_MINE", "CUDA_VISIBLE_DEVICES_OF_MINE", "WANDB_MODES")


def test_env_json_tells_the_allowed_variables_and_leaks_no_other(tiny, monkeypatch):
    for name, value in ALLOWED.items():
        monkeypatch.setenv(name, value)
    for name in FORBIDDEN:
        monkeypatch.setenv(name, "secret-of-mine")
    tiny.run_dir.mkdir(parents=True)
    metrics.write_environment(tiny.run_dir / "env.json", torch.device("cpu"), tiny.run_dir)
    text = (tiny.run_dir / "env.json").read_text()
    assert "secret-of-mine" not in text
    told = json.loads(text)
    assert told["torch"].startswith("2.")
    assert {name: told["variables"][name] for name in ALLOWED} == ALLOWED
    assert not set(FORBIDDEN) & set(told["variables"])


def test_a_logger_that_is_not_installed_gets_a_sentence(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="log.to=wandb needs the package wandb: pip install wandb, or leave it out"):
        metrics.check_mirrors(replace(tiny, log=LogConfig(to=("wandb",))))
