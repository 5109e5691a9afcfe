"""runtime/log.py, machine.py: rows through resumes, rollbacks, kills and full disks; what mirrors
and measures them."""

import gzip
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from lib.errors import UserError
from lib.files import read_rows, write_json
from lib.text import duration, si
from runtime import log
from runtime.config import Config, LogConfig
from runtime.environment import environment
from tests.conftest import ALONE
from tests.helpers.changes import on_change
from tests.helpers.faults import wait_for

refuse = MagicMock(side_effect=OSError(28, "No space left on device"))


def row(step: int, **changes: object):
    return {
        "step": step,
        "tokens": step * 512,
        "loss": 2.0,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tok_per_s": 5120.0,
        "step_s": 0.1,
        "verdict": "OK",
        **changes,
    }


def val(step: int, loss: float = 1.5):
    return {"step": step, "tokens": step * 512, "loss": loss, "sources": {"web": loss}}


def open_log(config: Config, resume: int = 0):
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return log.Log(config, resume)


def go_back(run_log, to):
    run_log.roll_back(to, {"event": "rollback", "step": 6, "to": to})


def rolled_back(config: Config):
    """Steps 1 to 6, validated after 2, 4 and 6; back from 6 to 4; 5 and 6 again."""
    run_log = open_log(config)
    for step in range(1, 7):
        run_log.step(row(step))
        if step % 2 == 0:
            run_log.validation(val(step))
    go_back(run_log, 4)
    for step in (5, 6):
        run_log.step(row(step, loss=9.0))
    return run_log


@contextmanager
def largest_file(size):
    """A full disk for this process: no file grows beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def steps_of(run_log, kind: str):
    return [row["step"] for row in read_rows(run_log.path) if row["kind"] == kind]


def test_rows_are_strict_json(tiny: Config):
    run_log = open_log(tiny)
    run_log.step(row(5, loss=float("nan"), grad_norm=float("inf"), verdict="SKIP"))
    rows = [json.loads(line, parse_constant=pytest.fail) for line in run_log.path.open()]
    expected = row(5, loss=None, grad_norm=None, verdict="SKIP")
    assert rows == [{"kind": "train", **expected, "since_start": 1}]


def test_a_file_that_cannot_be_json_leaves_the_old_one(tiny: Config):
    run_log = open_log(tiny)
    run_log.step(row(1))
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(run_log.path, {"loss": float("nan")})
    assert steps_of(run_log, "train") == [1]
    assert os.listdir(tiny.run_dir) == [run_log.path.name]


def test_a_rollback_relabels_what_it_undid(tiny: Config):
    run_log = open_log(tiny, resume=4)
    run_log.step(row(5))
    go_back(run_log, 2)
    run_log.step(row(3))
    assert read_rows(run_log.path) == [
        {"kind": "undone", **row(5), "since_start": 1},
        {"kind": "event", "event": "rollback", "step": 6, "to": 2},
        {"kind": "train", **row(3), "since_start": 2},
    ]


def test_validations_that_stand_are_known_after_a_rollback_and_a_resume(tiny: Config):
    run_log = rolled_back(tiny)
    run_log.validation(val(6, loss=2.5))
    assert run_log.validated == open_log(tiny, 6).validated == {2: 1.5, 4: 1.5, 6: 2.5}
    go_back(run_log, 3)
    assert steps_of(run_log, "undone") == [4, 5, 6, 5, 6]
    assert run_log.validated == {2: 1.5}


AFTER_A_ROLLBACK = "train train val train train val undone undone undone_val event train train"


@pytest.mark.parametrize("step, n_rows", [(6, 12), (5, 11), (4, 6), (3, 4), (2, 3), (1, 1)])
def test_a_resume_keeps_the_rows_up_to_its_step_and_what_directly_follows(
    tiny: Config, step: int, n_rows: int
):
    """In file order; at 4 those from before the rollback: it will happen again."""
    run_log = rolled_back(tiny)
    run_log.close()
    assert (2 in open_log(tiny, step).validated) == (step >= 2)
    kinds = [row["kind"] for row in read_rows(run_log.path)]
    assert kinds == AFTER_A_ROLLBACK.split()[:n_rows]


CUTS = {"in a row": lambda line: line[:9], "at its end": lambda line: line[:-1], "after": bytes}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("n_whole", range(12))
def test_a_row_that_a_kill_cut_is_dropped_and_no_training_row_before_it(
    tiny: Config, n_whole: int, cut: str
):
    run_log = rolled_back(tiny)
    run_log.close()
    lines = run_log.path.read_bytes().splitlines(True)
    run_log.path.write_bytes(b"".join(lines[:n_whole]) + CUTS[cut](lines[n_whole]))
    whole = lines[: n_whole + (cut != "in a row")]
    open_log(tiny, resume=6).close()
    lines_left = run_log.path.read_bytes().splitlines(True)
    assert lines_left == whole[: len(lines_left)]
    assert not [line for line in whole[len(lines_left) :] if b'"train"' in line]


def test_damaged_rows_are_dropped(tiny: Config):
    run_log = open_log(tiny)
    run_log.step(row(1))
    run_log.step(row(2))
    sound = run_log.path.read_bytes().splitlines(True)
    damaged = b'[1]\nnull\n{"kind": "train"}\n'
    run_log.path.write_bytes(damaged.join(sound) + b'{"step": 2}\n\xff\x00\n{\n')
    open_log(tiny, resume=2).close()
    assert run_log.path.read_bytes().splitlines(True) == sound


def test_a_start_at_step_0_empties_the_file(tiny: Config):
    run_log = rolled_back(tiny)
    assert not open_log(tiny).validated
    assert run_log.path.read_bytes() == b""


@pytest.mark.parametrize(
    "resume, n_rows", [(9, 7), (2, 5), (1, 3)], ids=["rows were lost", "late event", "validated"]
)
def test_events_behind_a_step_stay_and_its_first_validation_counts(
    tiny: Config, resume: int, n_rows: int
):
    run_log, failed = open_log(tiny), {"event": "save_failed", "step": 1}
    run_log.step(row(1))
    run_log.event(failed)
    run_log.validation(val(1))
    run_log.validation(val(1, loss=7.0))  # again, after a kill that came before the summary
    run_log.event({**failed, "step": 2})
    run_log.step(row(2))
    run_log.event(failed)  # reported late
    run_log.step(row(3))
    rows = read_rows(run_log.path)
    open_log(tiny, resume).close()
    assert read_rows(run_log.path) == rows[:n_rows]
    assert rows[2]["loss"] == 1.5


def test_kill_9_leaves_the_file_before_or_after_a_rollback(tiny: Config):
    def rolled_back_or_killed():
        on_change(
            lambda path: "metrics" in path,
            lambda count, _: count > len(codes) and os.kill(os.getpid(), signal.SIGKILL),
        )
        rolled_back(tiny)

    path, codes = tiny.run_dir / "metrics.jsonl", []
    while 0 not in codes:
        process = multiprocessing.get_context("fork").Process(target=rolled_back_or_killed)
        process.start()
        process.join()
        codes.append(process.exitcode)
        kinds = " ".join(json.loads(line)["kind"] for line in path.open()) if path.exists() else ""
        intact = "train train val train train val train train val"
        assert (
            intact.startswith(kinds) or "event" in kinds and AFTER_A_ROLLBACK.startswith(kinds)
        ), kinds
        path.unlink(missing_ok=True)
    assert set(codes[:-1]) == {-signal.SIGKILL} and len(codes) > 3 and kinds == AFTER_A_ROLLBACK


@pytest.mark.parametrize("spare", [0, 10, 300])  # bytes by which a file may grow; 10: part of a row
def test_on_a_full_disk_rows_wait_for_room_and_training_goes_on(
    tiny: Config, capsys: pytest.CaptureFixture[str], spare: int
):
    run_log, twin = rolled_back(tiny), rolled_back(replace(tiny, run="twin"))
    intact = run_log.path.read_bytes()
    for each_log, size in (run_log, len(intact) + spare), (twin, 10**9):
        with largest_file(size):
            each_log.event({"event": "save_failed", "step": 6})
            each_log.step(row(7))
            each_log.step(row(8))
    assert (
        run_log.path.read_bytes()[: len(intact)] == intact
        and run_log.path.stat().st_size == len(intact) + spare
    )
    for each_log in run_log, twin:
        go_back(each_log, 6)
        each_log.step(row(7))
    assert (
        run_log.path.read_bytes() == twin.path.read_bytes()
        and read_rows(run_log.path)[-1]["step"] == 7
    )
    assert capsys.readouterr().out.count("rows wait for room") == 1
    with largest_file(run_log.path.stat().st_size):
        run_log.step(row(8))
        run_log.close()
    assert (
        run_log.path.read_bytes() == twin.path.read_bytes()
        and "rows are lost" in capsys.readouterr().out
    )


# to 4 it went back before; to 3 a validation is undone
@pytest.mark.parametrize("to", [5, 4, 3])
def test_a_rollback_without_room_leaves_rows_that_stand_and_the_others_wait(
    tiny: Config, capsys: pytest.CaptureFixture[str], to: int
):
    run_log, twin = rolled_back(tiny), rolled_back(replace(tiny, run="twin"))
    with largest_file(10):
        go_back(run_log, to)
        run_log.step(row(to + 1))
    assert max(steps_of(run_log, "train")) == to, "a kill here resumes from rows that stand"
    assert os.listdir(tiny.run_dir) == [run_log.path.name], "what has filled the disk is removed"
    assert capsys.readouterr().out.count("rows wait for room") == 1
    go_back(twin, to)
    twin.step(row(to + 1))
    for each_log in run_log, twin:
        each_log.validation(val(to + 1))
    assert run_log.path.read_bytes() == twin.path.read_bytes()
    assert run_log.validated == twin.validated


def test_a_log_file_gets_a_line_now_and_then(
    tiny: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run_log = open_log(replace(tiny, steps=1000, log=LogConfig(every=50)))
    for step in range(1, 51):
        run_log.step(row(step, step_s=0.2 if step <= log.WARM_UP_STEPS else 0.1))
    assert capsys.readouterr().out.splitlines() == [
        "tiny  step 1/1000    0%  loss 2.0000  2.56k tok/s  3 min 20 s left",
        "tiny  step 50/1000    5%  loss 2.0000  5.12k tok/s  1 min 35 s left",
    ]
    assert [duration(s) for s in (45, 200.4, 3599.7, 18_420)] == [
        "45 s",
        "3 min 20 s",
        "1 h 00 min",
        "5 h 07 min",
    ]
    assert [si(v) for v in (12, 999.4, 999_700, 124e6, 7.1e9, 2e12)] == [
        "12",
        "999",
        "1M",
        "124M",
        "7.1B",
        "2T",
    ]
    monkeypatch.setattr("builtins.print", refuse)
    rolled_back(tiny).close()  # a console that is gone ends no run


@pytest.fixture
def wandb(tiny: Config, monkeypatch: pytest.MonkeyPatch):
    """The package, which keeps its calls; and what W&B names a run after."""
    package = MagicMock()
    package.init.return_value = package
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    tiny.run_dir.mkdir(parents=True)
    # of the very first start
    (tiny.run_dir / "env.json").write_text('{"t_start": "2026-11-24T00:01:02Z"}')
    return package


def mirrored(config: Config):
    """rolled_back(), mirrored to W&B, with a skipped step; closed."""
    run_log = rolled_back(replace(config, log=LogConfig(to=("wandb",))))
    run_log.step(row(7, verdict="SKIP"))
    run_log.close()
    return run_log


def test_wandb_gets_the_rows_through_a_rollback(tiny: Config, wandb):
    mirrored(tiny)
    sent = [call.args[0] for call in wandb.log.call_args_list]
    assert sent[0]["train/loss"] == 2.0
    assert sent[2] == {"val/tokens": 1024, "val/loss": 1.5, "step": 2}
    steps = [values["step"] for values in sent if "train/loss" in values]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert {"event/rollback": 1, "step": 6} in sent
    assert sent[-1]["event/SKIP"] == 1 and wandb.finish.called


def test_wandbs_run_is_named_after_ours_and_its_first_start(tiny: Config, wandb):
    mirrored(tiny)
    options = wandb.init.call_args.kwargs
    assert (options["project"], options["name"]) == ("mine", "tiny")
    assert (options["id"], options["resume"]) == ("tiny-20261124000102", "allow")


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_wandb_that_is_down_is_told_once_and_ends_no_run(
    tiny: Config,
    wandb,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
):
    monkeypatch.setattr(wandb, broken, refuse)
    run_log = mirrored(tiny)
    assert len(read_rows(run_log.path)) == 13
    assert capsys.readouterr().out.count("log.to=wandb") == 1


def test_trackio_gets_the_rows_of_a_run_by_its_name(tiny: Config, monkeypatch: pytest.MonkeyPatch):
    package = MagicMock()
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    run_log = rolled_back(replace(tiny, log=LogConfig(to=("trackio",))))
    run_log.close()
    options = package.init.call_args.kwargs
    assert (options["project"], options["name"], options["resume"]) == ("mine", "tiny", "allow")
    sent = package.init.return_value.log.call_args_list
    assert sent[0].args[0]["train/loss"] == 2.0 and sent[0].kwargs == {"step": 1}
    steps = [call.kwargs["step"] for call in sent if "train/loss" in call.args[0]]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6]
    assert package.init.return_value.finish.called


def test_a_mirror_whose_package_is_missing_is_refused(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        log.check_mirrors(replace(tiny, log=LogConfig(to=("wandb",))))


def test_tensorboard_shows_neither_undone_nor_repeated_steps(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
):
    points = []

    def writer(folder: Path, purge_step):
        # as TensorBoard does when it reads
        points[:] = [event for event in points if event[0] < purge_step]
        return SimpleNamespace(
            add_scalar=lambda key, value, step: points.append((step, key, value)),
            close=lambda: None,
        )

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer)
    )
    config = replace(tiny, log=LogConfig(to=("tensorboard",)))
    rolled_back(config).close()
    open_log(config, resume=5).step(row(6, loss=7.0))
    assert [(s, v) for s, k, v in points if k == "train/loss"] == [
        (1, 2.0),
        (2, 2.0),
        (3, 2.0),
        (4, 2.0),
        (5, 9.0),
        (6, 7.0),
    ]
    assert [s for s, k, _ in points if k == "val/loss"] == [2, 4]


def test_env_json_leaks_no_secret_and_keeps_changes_whatever_a_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def shell(commands, **options: object):
        subprocess.run(commands, shell=True, cwd=tmp_path, check=True, **options)

    allowed = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "TORCH_LOGS": "+dynamo",
        "SLURM_JOB_ID": "17",
    }
    forbidden = [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "NCCL_AUTH",
        "NCCL_MY_key",
        "TORCH_PASSWORD",
        "XNCCL_DEBUG",
        "SLURM_JOB_NAME",
    ]
    for name, value in (allowed | dict.fromkeys(forbidden, "secret-of-mine")).items():
        monkeypatch.setenv(name, value)
    assert environment(torch.device("cpu"), tmp_path).git_commit is None
    (tmp_path / "a.txt").write_bytes(b"plain\n\n\n")
    shell("git init -q && git add . && git -c user.name=n -c user.email=e commit -qm first")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\n\n\n")
    path = tmp_path / "env.json"
    write_json(path, asdict(environment(torch.device("cpu"), tmp_path)))
    env = json.loads(path.read_text())
    assert allowed.items() <= env["variables"].items() and "secret-of-mine" not in path.read_text()
    shell("git checkout -q . && git apply -", input=f"{env['git_diff']}\n".encode())
    assert env["git_dirty"] and (tmp_path / "a.txt").read_text() == "caf\ufffd\n\n\n", (
        "Latin-1, which JSON cannot hold"
    )


def timed_rows(first_step: int, *seconds: float) -> list[dict]:
    return [
        {"kind": "train", "step": first_step + i, "since_start": i + 1, "step_s": step_s}
        for i, step_s in enumerate(seconds)
    ]


def test_the_speed_of_a_branch_is_of_all_its_full_steps():
    """It begins at step 11, beyond the ten smaller steps of its parent."""
    rows = timed_rows(11, 9, 9, 9, 1, 2, 3)
    assert log.throughput(rows, 1000, 1, None, small_steps=10)["step_s_median"] == 2


def test_the_speed_of_a_short_run_is_of_its_full_steps():
    """Of which there are fewer than of the warm-up; smaller steps would look fast."""
    rows = timed_rows(1, 1, 1, 1, 1, 1, 1, 7)
    assert log.throughput(rows, 1000, 1, None, small_steps=6)["step_s_median"] == 7
    late = [row | {"since_start": row["step"] - 6} for row in rows if row["step"] > 6]
    assert log.throughput(rows[:6] + late, 1000, 1, None, small_steps=6)["step_s_median"] == 7


def test_where_all_steps_are_small_ones_the_rows_own_speed_counts():
    """A ramp that ends with the run: a step has fewer tokens than tokens_per_step."""
    rows = [
        {"kind": "train", "step": i, "since_start": i, "step_s": 0.5, "tok_per_s": 1000.0}
        for i in range(1, 9)
    ]
    speed = log.throughput(rows, 1000, 10**9, None, small_steps=8)
    assert speed["tok_per_s_median"] == 1000.0
    assert speed["tflops_median"] == pytest.approx(1.0)


def test_throughput_by_hand():
    rows = [
        {"kind": "train", "step": i, "since_start": i, "step_s": s}
        for i, s in enumerate([9, 1, 1, 0.1, 0.2, 0.3, 0.4, 0.5], start=1)
    ]
    other_rows = [{"kind": "val"}, {"kind": "undone", "since_start": 9, "step_s": 99.0}]
    assert log.throughput(
        [*rows, *other_rows], tokens_per_step=1000, flops_per_token=10**9, peak_bf16=1e13
    ) == pytest.approx(
        {
            "step_s_median": 0.3,  # the three warm-up steps do not count
            "tok_per_s_median": 1000 / 0.3,
            "compile_s": 8.7,
            "tflops_median": 1 / 0.3,
            "mfu_bf16": 0.1 / 0.3,
        }
    )
    assert log.throughput(rows[:3], 1000, 10**9, None)["step_s_median"] == 1.0, (
        "shorter than the warm-up"
    )
    peaks = {
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA GB200": 2500e12,
        "h200": 989.4e12,
        "NVIDIA GH200 480GB": 989.4e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA T4": None,
    }
    assert {name: (log.peak_flops(name) or (None,))[0] for name in peaks} == peaks


def test_the_meter_waits_for_no_driver_and_reads_what_the_gpu_supports(
    monkeypatch: pytest.MonkeyPatch,
):
    hanging = threading.Event()
    for name, read in (
        ("device_memory_used", lambda gpu: hanging.wait() and 60 * 2**30),
        ("utilization", lambda gpu: 97),
        ("get_device_properties", lambda gpu: SimpleNamespace(total_memory=80 * 2**30)),
        ("power_draw", refuse),
    ):
        monkeypatch.setattr(torch.cuda, name, read)
    meter = log.Meter(torch.device("cuda"), period=0.01)
    assert meter.latest == {}
    hanging.set()
    assert wait_for(lambda: meter.latest) == {"gpu_mem_pct": 75.0, "gpu_util_pct": 97.0}
    meter.close()


def traced_steps(run_dir: Path):
    path = run_dir / "profile/trace_rank0.pt.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if path.exists() else []
    return sorted(
        int(event["name"].removeprefix("ProfilerStep#"))
        for event in events
        if event["name"].startswith("ProfilerStep#") and event.get("ph") == "X"
    )


@pytest.mark.parametrize(
    "steps, asked, traced",
    [
        (range(4, 8), "3:5", [4, 5]),  # resumed in between
        (range(6, 8), "3:5", []),  # resumed after them
        (range(1, 5), "3:9", [3, 4]),  # the run ends in between
        ([1, 2, 3, 4, 2, 3, 4], "2:3", [2, 3]),  # a rollback repeats them: once is enough
        ([1, 2, 3, 2, 3, 4, 5], "3:4", [2, 3, 3, 4]),
    ],
)  # a rollback in between
def test_the_steps_asked_for_are_traced(tiny: Config, steps, asked: str, traced: list[int]):
    output = []
    profiler = log.Profiler(replace(tiny, steps=9, profile=asked), ALONE, output.append)
    for step in steps:
        profiler.begin(step)
        torch.ones(4) @ torch.ones(4)
        profiler.end(step)
    profiler.close()
    assert len(output) == bool(traced) and traced_steps(tiny.run_dir) == traced


def test_a_trace_that_cannot_be_written_ends_no_run(tiny: Config):
    output = []
    profiler = log.Profiler(replace(tiny, profile="1:1"), ALONE, output.append)
    (tiny.run_dir / "profile/trace_rank0.pt.trace.json.gz").mkdir(parents=True)
    profiler.begin(1)
    profiler.end(1)
    assert "profile: rank 0 wrote no trace: IsADirectoryError" in output[0]
