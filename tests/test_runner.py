"""A study is run to its end whatever interrupts it, by one writer a run, within its limit."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import train
from runtime.rows import read_rows
from scaling import progress, runner, sweep
from scaling.grid import ENDED, state_of
from scaling.study import expand
from tests.conftest import ROOT
from tests.study_cases import fake_sweep, restored_signals, summaries, tiny_study


@pytest.fixture(autouse=True)
def handlers():
    with restored_signals():
        yield


@pytest.fixture
def fake(tiny, tmp_path, monkeypatch, capsys):
    with fake_sweep(tiny, tmp_path, monkeypatch, capsys) as call:
        yield call


def test_trunks_come_before_branches_and_one_at_a_time(fake, tmp_path):
    code, told = fake("time.sleep(0.05); finish()", recipes=("bf16", "tensorwise"))
    assert code == 0, told
    ran = sorted(summaries(tmp_path).items(), key=lambda item: item[1]["began"])
    assert [run for run, _ in ran] == ["a_bf16_t20_s1", "a_bf16_t10_s1", "a_tensorwise_t20_s1", "a_tensorwise_t10_s1",
                                       "b_bf16_t20_s1", "b_bf16_t10_s1", "b_tensorwise_t20_s1", "b_tensorwise_t10_s1"]
    assert all(a["ended"] <= b["began"] for (_, a), (_, b) in zip(ran, ran[1:], strict=False))
    branch = summaries(tmp_path)["a_tensorwise_t10_s1"]
    trunk = summaries(tmp_path)["a_tensorwise_t20_s1"]["given"]
    step = int(trunk["checkpoint.at"])
    assert branch["given"]["start_from"] == f"{tmp_path}/out/tiny/a_tensorwise_t20_s1/checkpoints/step_{step:08d}"
    assert "start_from" not in trunk
    assert branch["threads"] is None
    assert json.loads((tmp_path / "out/tiny/study.json").read_text())["margin_percent"] == 1.0
    code, told = fake("sys.exit('not again')", recipes=("bf16", "tensorwise"))
    assert (code, "0 of 8 runs to do" in told) == (0, True)


def test_two_jobs_run_side_by_side_each_with_its_share_of_the_machine(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    code, told = fake("time.sleep(0.4); finish()", "jobs=2", budgets=(20,), seeds=(1, 2))
    assert code == 0, told
    ran = list(summaries(tmp_path).values())
    overlaps = [sum(other["began"] < run["began"] < other["ended"] for other in ran) for run in ran]
    assert max(overlaps) == 1       # never three at once, and not one after the other
    assert {run["threads"] for run in ran} == {"4"}


def test_every_job_has_gpus_of_its_own(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    seen = []
    popen = subprocess.Popen
    monkeypatch.setattr(runner.subprocess, "Popen", lambda command, **more: (seen.append(command), popen(
        [command[0], *command[command.index(str(tmp_path / "train.py")):]], **more))[1])
    code, told = fake("time.sleep(0.2); finish()", "jobs=2", "gpus=2", budgets=(20,))
    assert code == 0, told
    assert {run["gpus"] for run in summaries(tmp_path).values()} == {"3,5", "6,7"}
    assert seen[0][1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    code, told = fake("", "jobs=3", "gpus=2", budgets=(20,))
    assert (code, "gpus=2 for each of jobs=3 is more than the 4 GPUs of this machine" in told) == (2, True)


def test_a_failed_run_is_named_and_does_not_stop_the_others(fake, tmp_path):
    body = "if run == 'a_bf16_t20_s1': print('train.py: the disk is full', file=sys.stderr); sys.exit(1)\nfinish()"
    code, told = fake(body)
    assert code == 1
    assert summaries(tmp_path).keys() == {"b_bf16_t20_s1", "b_bf16_t10_s1"}     # its branch could not start
    assert "failed: a_bf16_t20_s1; correct the cause and run the same command again" in told
    assert "2 of 4 runs are not done, a_bf16_t20_s1 the first" in told
    rows = expand(sweep.load_study(tmp_path / "study_tiny.py"))
    log = tmp_path / "out/tiny/a_bf16_t20_s1.log"
    assert state_of(rows[0], tmp_path / "out/tiny") == f"failed, exit code 1: train.py: the disk is full ({log})"
    assert state_of(rows[1], tmp_path / "out/tiny") == "missing"
    (tmp_path / "out/tiny/b_bf16_t10_s1/summary.json").unlink()
    code, told = fake("finish()")       # what failed is tried again, after what may succeed
    assert (code, len(summaries(tmp_path))) == (0, 4), told
    assert summaries(tmp_path)["b_bf16_t10_s1"]["began"] < summaries(tmp_path)["a_bf16_t20_s1"]["began"]
    assert state_of(rows[0], tmp_path / "out/tiny") == "done"


def test_a_branch_starts_as_soon_as_its_trunk_has_passed_its_step(fake, tmp_path):
    code, told = fake("if 't20' in run: checkpoint(given['checkpoint.at']); time.sleep(1)\nfinish()", "jobs=2", "only=a_*")
    assert code == 0, told
    ran = summaries(tmp_path)
    assert ran["a_bf16_t10_s1"]["began"] < ran["a_bf16_t20_s1"]["ended"]
    assert len(ran) == 2


UNDER_WAY = """
for step in range(1, 9):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", "step": step, "loss": 4 - step / 8, "tok_per_s": 5000.0}) + "\\n")
    time.sleep(0.05)
if "t20" in run: time.sleep(0.5)
finish()"""


def test_a_study_tells_how_far_it_is_a_line_a_minute(fake, monkeypatch):
    monkeypatch.setattr(progress, "LOG_S", 0.3)
    code, told = fake(UNDER_WAY, "jobs=2", "only=a_*,b_bf16_t20*")
    assert code == 0, told
    lines = [line for line in told.splitlines() if "runs done" in line]
    assert len(lines) >= 2 and "0 of 3 runs done" in lines[0]
    last = next(line for line in lines if "8 / " in line)
    assert re.search(r"\d of 3 runs done, \d+ \w+.* left, until \d\d:\d\d; "
                     r"a_bf16_t\d0_s1 8 / \d+, loss 3.000, 5k tokens/s, \d+ \w.* left", last), last


def test_on_a_terminal_the_runs_under_way_are_a_table_below_the_lines(fake, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")      # what a terminal says of itself
    monkeypatch.setattr(progress, "LIVE_S", 0.1)
    code, told = fake(UNDER_WAY, "only=a_*")
    assert code == 0, told
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told)
    assert re.search(r"run +step +loss +tokens/s +left", shown)
    assert re.search(r"a_bf16_t20_s1 +8 / \d+ +3\.000 +5k +\d+ \w", shown)
    assert "1 of 2 runs done" in shown and "a_bf16_t10_s1 starts from step" in shown


def test_what_is_left_counts_every_run_at_the_speed_of_its_kind(tiny, tmp_path):
    """Two of four runs are left, one under way: its own speed; the other's from the FLOPs of the kind that is nearest."""
    rows = expand(sweep.load_study(tiny_study(tiny, tmp_path, budgets=(20,), recipes=("bf16", "tensorwise"))))
    folder = tmp_path / "out"
    by_name = {row.run: row for row in rows}
    for run in ("a_bf16_t20_s1", "a_tensorwise_t20_s1"):
        (folder / run).mkdir(parents=True)
        (folder / run / "summary.json").write_text(json.dumps({
            "status": "ok", "loss_bf16": 2.0, "tok_per_s_median": 1000.0, "n_gpu": 1, "device": "d",
            "wall_s": 7 + by_name[run].tokens / 1000}))        # 7 s to start and end, and 5 that no summary tells
    row, other = by_name["b_bf16_t20_s1"], by_name["b_tensorwise_t20_s1"]
    (folder / row.run).mkdir()
    (folder / row.run / "metrics.jsonl").write_text("".join(
        json.dumps({"kind": "train", "step": step, "loss": 2.0, "tok_per_s": 500.0}) + "\n" for step in range(1, 11)) + '{"cut')
    options = sweep.Options(study="s", jobs=1)
    with progress.StudyProgress(rows, rows, folder, options) as shown:
        left, share = shown._left({row.run: progress._State(row, folder)})
    here = (row.steps - 10) * row.tokens_per_step
    speed = 1000 * by_name["a_tensorwise_t20_s1"].flops_per_token / other.flops_per_token
    assert left == pytest.approx(here / 500 + 12 + other.tokens / speed)
    flops = sum(r.flops for r in rows)
    assert share == pytest.approx(1 - (here * row.flops_per_token + other.flops) / flops)


def test_a_limit_has_the_runs_save_and_leave(fake, tmp_path):
    body = """
import signal
def leave(*_):
    checkpoint(7)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
if not list((folder / "checkpoints").glob("step_00000007")): time.sleep(30)
finish()"""
    began = time.monotonic()
    code, told = fake(body, "limit=2", "start=0.1", "only=a_bf16_t20_s1")
    assert (code, time.monotonic() - began < 15) == (3, True), told
    assert "a_bf16_t20_s1 at step 7" in told
    code, told = fake(body, "limit=20", "start=0.1", "only=a_bf16_t20_s1")
    assert (code, list(summaries(tmp_path))) == (0, ["a_bf16_t20_s1"])
    assert "a_bf16_t20_s1 goes on from step 7" in told


def test_what_has_no_time_for_more_than_its_start_is_not_begun(fake, tmp_path):
    code, told = fake("finish()", "limit=50", "only=a_bf16_t20_s1")
    assert (code, summaries(tmp_path)) == (3, {})
    assert re.search(r"a_bf16_t20_s1 is not begun: of limit=50 (49|50) s are left, and to start and end it takes 60 s \(assumed, "
                     r"start=\), to save and leave up to 0 s\n", told), told
    # 452,608 tokens at 1,000 a second; 13 s beside them, and 5 that no summary tells of
    code, told = fake("finish(wall_s=465.608)", "limit=1e4", "only=a_bf16_t20_s1")
    assert code == 0, told
    code, told = fake("finish()", "limit=17", "only=a_*", seeds=(1, 2))
    assert (code, len(summaries(tmp_path))) == (3, 1), told
    assert re.search(r"a_bf16_t10_s1 is not begun: of limit=17 1[67] s are left, and to start and end it takes 18 s \(measured\)",
                     told), told
    assert "nor are begun, for the same reason: a_bf16_t20_s2\n" in told       # and no branch of what was not
    code, told = fake("finish()", "limit=40", "only=a_*", seeds=(1, 2))
    assert (code, len(summaries(tmp_path))) == (0, 4), told


def test_the_limit_counts_from_the_start_of_the_command(fake, tmp_path):
    code, told = fake("finish()", "limit=100", "start=20", began=time.monotonic() - 90)
    assert (code, summaries(tmp_path)) == (3, {})
    assert re.search(r"; (9|10)\.\d s are left of limit=100\n", told), told


SLOW = """
def asked(*_):
    asked.times += 1
    Path(folder / "asked").write_text(str(asked.times))
    if asked.times == 2: os._exit(143)
asked.times = 0
signal.signal(signal.SIGTERM, asked)
(folder / "up").touch()
"""


def test_a_run_that_is_asked_to_leave_while_it_compiles_is_told_twice_and_loses_nothing(fake, tmp_path):
    code, told = fake(SLOW + "while True: time.sleep(0.05)", "limit=2", "start=0.1", "only=a_bf16_t20_s1")
    assert (code, "a_bf16_t20_s1 has nothing to save and is told to leave at once" in told) == (3, True), told
    assert (tmp_path / "out/tiny/a_bf16_t20_s1/asked").read_text() == "2"
    code, told = fake("finish()", "only=a_bf16_t20_s1")
    assert (code, len(summaries(tmp_path))) == (0, 1), told


def test_a_run_with_steps_to_save_has_the_time_it_needs(fake, tmp_path):
    body = SLOW + """
row(8)
while not asked.times: time.sleep(0.02)
time.sleep(1.5)
checkpoint(8)
sys.exit(0)"""
    code, told = fake(body, "limit=2", "start=0.1", "only=a_bf16_t20_s1")
    assert (code, "at once" in told, "a_bf16_t20_s1 at step 8" in told) == (3, False, True), told
    assert (tmp_path / "out/tiny/a_bf16_t20_s1/asked").read_text() == "1"


EVALUATES = SLOW + "steps = {'a': 884, 'b': 1124}[run[0]]\nrow(steps); checkpoint(steps)\n"


@pytest.fixture
def eager(monkeypatch):
    """However little time is left, a run is begun."""
    monkeypatch.setattr(runner, "lacks_time", lambda *_: None)


def test_a_run_that_has_done_its_steps_is_evaluated_though_the_limit_is_reached(fake, tmp_path, eager):
    body = EVALUATES + "time.sleep(3)\nif run[0] == 'b': sys.exit('no memory')\nfinish()"
    code, told = fake(body, "limit=2", "start=30", "jobs=2", "only=*_t20_s1")
    assert "a_bf16_t20_s1 has done its steps and has up to 30 s to be evaluated" in told
    assert (code, summaries(tmp_path).keys()) == (1, {"a_bf16_t20_s1"}), told
    assert "failed: b_bf16_t20_s1" in told      # unlike one that was asked to leave
    assert not (tmp_path / "out/tiny/a_bf16_t20_s1/asked").exists() and "asking" not in told


@pytest.mark.parametrize("body, start", [
    (EVALUATES, "start=1"), (EVALUATES.replace("884", "883"), "start=60"),
    ], ids=["no longer than a start", "not with steps to do"])
def test_but_it_is_not_evaluated_for_ever(fake, tmp_path, eager, body, start):
    began = time.monotonic()
    code, told = fake(body + "time.sleep(60)", "limit=2", start, "only=a_bf16_t20_s1")
    assert (code, time.monotonic() - began < 30) == (3, True), told
    assert ("has done its steps" in told, "asking the runs to save and leave" in told) == ("884" in body, True), told
    assert (tmp_path / "out/tiny/a_bf16_t20_s1/asked").read_text() == "2"


def test_a_branch_whose_trunk_has_no_checkpoints_any_more_is_trained_from_scratch(fake, tmp_path):
    folder, only = tmp_path / "out/tiny", "only=a_*"
    assert fake("finish()", "only=a_bf16_t20_s1")[0] == 0
    shutil.rmtree(folder / "a_bf16_t20_s1/checkpoints")
    leave = "(folder / 'config.json').write_text(json.dumps(CONFIG))\nrow(5); checkpoint(5); sys.exit('cut')"
    config = json.loads(re.search(r"loads\((.*)\)\)", (tmp_path / "a_bf16.py").read_text())[1])
    code, told = fake(leave.replace("CONFIG", f"json.loads({config!r})"), only)
    assert code == 1
    assert "a_bf16_t10_s1 starts from scratch: step 354 of a_bf16_t20_s1, which is done, is gone" in told, told
    (folder / "a_bf16_t20_s1/checkpoints/step_00000354").mkdir(parents=True)
    (folder / "a_bf16_t20_s1/checkpoints/step_00000354/DONE").touch()
    code, told = fake("finish()", only)     # what was begun from scratch goes on so
    assert (code, "a_bf16_t10_s1 goes on from step 5" in told) == (0, True), told
    assert "start_from" not in summaries(tmp_path)["a_bf16_t10_s1"]["given"]


def test_interrupted_killed_and_run_again_it_ends_with_the_summaries_of_an_unbroken_study(tiny, tmp_path, capsys, monkeypatch):
    """Real runs. First Ctrl-C, then the sweep alone is killed, while its run lives on and nobody else may write there."""
    file = tiny_study(tiny, tmp_path, budgets=(3, 6), sizes=(64,))
    folder, env = tmp_path / "out/tiny", {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "scaling/sweep.py", str(file), "--run", f"out={tmp_path}/out"]

    def begin(run, steps):
        process = subprocess.Popen([*call, "limit=1000"], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env,
                                   start_new_session=True)
        end = time.monotonic() + 90
        while len(read_rows(folder / run / "metrics.jsonl")) < steps:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        return process

    rows = expand(sweep.load_study(file))
    first = begin("a_bf16_t6_s1", 20)
    os.killpg(first.pid, signal.SIGINT)     # as a terminal does, to all it started
    told = first.communicate(timeout=60)[0]
    assert first.returncode == 3, told
    assert "asking the runs to save and leave" in told
    assert 900 < float(re.search(r"; (\S+) s are left of limit=1000\n", told)[1]) < 999.7      # torch's import counts
    at = int(re.fullmatch(r"at step (\d+)", state_of(rows[0], folder))[1])
    assert 20 <= at < rows[0].steps

    second = begin("a_bf16_t6_s1", at + 20)
    second.kill()
    second.communicate()
    assert state_of(rows[0], folder) == "running"
    assert sweep.main([*call[2:], "only=a_bf16_t6_s1"]) == 3
    assert "a_bf16_t6_s1 is being run by another sweep: left to it" in capsys.readouterr().out
    end = time.monotonic() + 60
    while state_of(rows[0], folder) == "running":
        assert time.monotonic() < end
        time.sleep(0.1)
    assert f"resuming {folder}/a_bf16_t6_s1/checkpoints" in (folder / "a_bf16_t6_s1.log").read_text()

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert sweep.main(call[2:]) == 0, capsys.readouterr()
    assert (folder / "a_bf16_t3_s1.log").read_text().endswith(f"{ENDED}0\n")
    torch.set_num_threads(1)        # as the runs of the sweep, or sums would be rounded otherwise
    for row in rows:
        path, *overrides = row.arguments(folder)
        whole = [f"out={tmp_path}/whole" if text.startswith("out=") else text for text in overrides
                 if not text.startswith("start_from=")]
        assert train.main([path, *whole]) == 0, capsys.readouterr().err
        ours, theirs = (json.loads((base / row.run / "summary.json").read_text()) for base in (folder, tmp_path / "whole"))
        assert (ours["parent_run"], ours["parent_step"]) == (row.parent, row.parent_step)
        for key in ("run_id", "pair_id", "loss_bf16", "loss_as_trained", "sources", "train_loss_last", "steps", "tokens",
                    "status", "params_total", "flops_per_token", "is_annealed", "warmup_steps", "lr_last", "val_sha256"):
            assert ours[key] == theirs[key], (row.run, key)
        steps = [r["step"] for r in read_rows(folder / row.run / "metrics.jsonl") if r["kind"] == "train"]
        assert steps == list(range((row.parent_step or 0) + 1, row.steps + 1))
