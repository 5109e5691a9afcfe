"""scaling/sweep.py: the table says what is true; runs are started as asked, by one writer each, to their end or to the limit."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import train
from runtime.cli import duration
from runtime.config import load_config
from runtime.log import pair_id
from runtime.machine import read_rows
from runtime.roofline import modelled_ratio
from scaling import report, sweep
from scaling.predict import digest
from scaling.study import ENDED, expand, state_of
from scaling.sweep import Cost, Options, costs_of, kind_of, table
from tests.conftest import ROOT
from tests.scaling_runs import asked, cells
from tests.study_cases import TRAIN, checkpoint, finish, tiny_study

OPTIONS = Options(study="x", start=2.0)


@pytest.fixture
def rows(tiny, tmp_path):
    """a_bf16_t20_s1, its branch t10, the same of b."""
    return expand(sweep.load_study(tiny_study(tiny, tmp_path)))


@pytest.fixture
def fake(tiny, tmp_path, monkeypatch, capsys):
    """sweep.main() on a tiny study whose train.py is the given text; the call returns what it printed as it ended in `code`."""
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    monkeypatch.setattr(sweep, "POLL_S", 0.02)
    monkeypatch.setattr(sweep, "LEAVE_S", 0.3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def call(body, *arguments, code=0, began=None, **study):
        (tmp_path / "train.py").write_text(TRAIN + body)
        ended = sweep.main([str(tiny_study(tiny, tmp_path, **study)), "--run", f"out={tmp_path}/out", *arguments], began)
        told = "".join(capsys.readouterr())
        assert ended == code, told
        return told

    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]     # sweep.main() changes them
    yield call
    for number, handler in before:
        signal.signal(number, handler)


def summaries(tmp_path):
    return {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "out/tiny").glob("*/summary.json")}


# -------------------------------------------------------------------------------------------------------------- the table

def told(rows, folder, options):
    """(rows of the grid as lists of cells, the lines below it)."""
    grid, *below = table(rows, folder, options)
    return cells(grid), below


def test_the_table_by_hand(rows, tmp_path):
    grid, below = told(rows, tmp_path / "none", OPTIONS)
    trunk, branch = rows[:2]
    assert (trunk.steps, branch.steps, branch.parent_step) == (884, 442, 354)
    assert grid[0][-2:] == ["seconds", "state"]
    assert grid[2] == ["a_bf16_t10_s1", "22.6k", "10", "226k", "354", f"{88 * 512 * trunk.flops_per_token:.2e}", "~2", "missing"]
    assert " FLOPs, 8 device-seconds; left: 4 runs, " in below[1] and not (tmp_path / "none").exists()
    own, apart = (sum(getattr(row, key) for row in rows) for key in ("own_flops", "flops"))
    assert f"as 4 separate runs {apart:.3g} FLOPs: branches save {1 - own / apart:.0%}" in below
    assert below[-1] == ("~ assumed: 45% of the 989 BF16 TFLOP/s of one h100 (mfu=), FP8 as fast, "
                         "2 s to start and end a run (start=)")
    options = replace(OPTIONS, mfu=1e-7, start=6.0, gpus=2)
    seconds = 4 * 6 * 2 + own / (989.4e12 * 1e-7)
    assert f"; left: 4 runs, {own:.3g} FLOPs, {seconds / 60:.3g} device-minutes" in told(rows, tmp_path, options)[1][1]
    checkpoint(trunk, tmp_path, 800)      # of a run in progress only the rest is left, with a start
    seconds -= 800 * 512 * trunk.flops_per_token / (989.4e12 * 1e-7)
    assert f" FLOPs, {seconds / 60:.3g} device-minutes" in told(rows, tmp_path, options)[1][1].partition("left")[2]


def test_speed_and_start_are_those_of_the_runs_that_are_done(rows, tmp_path):
    # of the size: 1,500 and 1,000 tokens/s on each GPU; 8.5 and 1.5 seconds beside the steps, and 5 no summary tells of
    finish(rows[0], tmp_path, status="diverged", tok_per_s_median=3000.0, n_gpu=2, wall_s=884 * 512 / 3000 + 8.5)
    finish(rows[1], tmp_path, tok_per_s_median=1000.0, wall_s=88 * 512 / 1000 + 1.5)
    start = 5 + (8.5 + 1.5) / 2
    grid, below = told(rows, tmp_path, OPTIONS)
    assert [row[-2:] for row in grid[:4]] == [
        ["minutes", "state"], [f"{(start + 884 * 512 / 1250) / 60:.3g}", "diverged"],
        [f"{(start + 88 * 512 / 1250) / 60:.3g}", "done"], ["~0.0333", "missing"]]
    assert "measured: a bf16 1.25k tokens/s on each X, 10 s to start and end (5 of them assumed)" in below
    assert "left: 2 runs" in below[1]
    grid, _ = told(rows, tmp_path, replace(OPTIONS, gpus=8))      # a start occupies all of them
    assert grid[2][-2:] == [f"{(8 * start + 88 * 512 / 1250) / 60:.3g}", "done"]


def test_the_cost_of_a_kind_is_measured_or_modelled(tiny, tmp_path):
    """A kind is a size, a recipe and whether it is a null run; FP8 is assumed at the modelled ratio where there is one."""
    tiny = replace(tiny, parallel=replace(tiny.parallel, compile=True))
    rows = expand(sweep.load_study(tiny_study(tiny, tmp_path, null=True, recipes=("bf16", "tensorwise", "cscale"), sizes=(64,))))
    costs = costs_of(rows, tmp_path, OPTIONS)
    row = next(row for row in rows if row.recipe == "tensorwise")
    ratio = modelled_ratio(load_config(row.config, list(row.overrides)), "h100")
    bf16, tensorwise, cscale = (costs["a", recipe].tok_per_s for recipe in ("bf16", "tensorwise", "cscale"))
    assert tensorwise == pytest.approx(bf16 * ratio) and ratio != 1 and cscale == bf16
    assert "FP8 at the ratios that runtime.roofline models" in told(rows, tmp_path, OPTIONS)[1][-1]
    assert costs_of(rows, tmp_path, replace(OPTIONS, gpu="b200"))["a", "tensorwise"].tok_per_s == pytest.approx(
        bf16 * 2250 / 989.4), "no ceilings of that GPU: as fast as BF16"
    finish(rows[0], tmp_path)                                           # without its hours: the start stays assumed
    finish(rows[2], tmp_path, tok_per_s_median=100.0, wall_s=1e4)
    costs = costs_of(rows, tmp_path, OPTIONS)
    assert costs[kind_of(rows[0])] == Cost(1000.0, 2.0, "X", False) and costs["a", "tensorwise"].device is None
    assert costs["a", "bf16 null"] == Cost(100.0, 5 + 1e4 - 884 * 512 / 100, "X", True)
    alone = told(rows, tmp_path, OPTIONS)[0][2]     # the trunk is done, its checkpoint gone: the branch costs its whole length
    assert alone[4:] == ["-", f"{442 * 512 * rows[0].flops_per_token:.2e}", f"{(2 + 442 * 512 / 1000) / 3600:.3g}", "missing"]


# ------------------------------------------------------------------------------------------------------------ before it all

def test_data_that_will_not_do_are_refused_before_anything_starts(fake, tmp_path, data_dir):
    for limit in (2, 10):       # 10: too little for b alone, which is held out and waits for a prediction of it
        told = fake("finish()", "only=a_*", code=2, max_epochs=limit, held_out=True)
        assert not (tmp_path / "out").exists()
        assert "b_bf16_t20_s1: this run plans " in told and f"data.max_epochs={limit};" in told
    told = fake("finish()", "only=a_*", max_epochs=20)
    # 1124 steps of 16 sequences of 32 tokens; of web's 40,000 training tokens there are 1,249 windows with a target each
    assert re.findall(r"epochs of the largest run to do \((\w+), ([\d,]+) tokens\): code ([\d.]+), web ([\d.]+); allowed 20\n",
                      told) == [("b_bf16_t20_s1", "575,488", f"{1124 * 4 / 1249:.2f}", f"{1124 * 12 / 1249:.2f}")]
    assert "epochs" not in fake("", "only=a_*", max_epochs=20)       # nothing begins, nothing is looked at


@pytest.mark.parametrize("key, what", [
    ("data_sha256", "holds other tokens than a_bf16_t20_s1, which is done, has seen (data_sha256 differs"),
    ("val_sha256", "(val_sha256 differs"), ("pair_id", "a_bf16.py has changed since a_bf16_t20_s1 was trained with it")])
def test_other_data_or_settings_than_those_of_a_run_that_is_done_are_refused(fake, tmp_path, key, what):
    fake(f"finish({key}='{'0' * 64}')", "only=a_bf16_t20_s1")
    assert what in fake("finish()", code=2) and len(summaries(tmp_path)) == 1
    row = expand(sweep.load_study(tmp_path / "study_tiny.py"))[0]
    finish(row, tmp_path / "out/tiny", pair_id=pair_id(load_config(row.config, row.overrides)))
    fake("finish()")


def test_held_out_runs_wait_to_be_named(fake, tmp_path):
    fake("finish()", held_out=True)
    assert summaries(tmp_path).keys() == {"a_bf16_t20_s1", "a_bf16_t10_s1"}
    assert json.loads((tmp_path / "out/tiny/study.json").read_text())["held_out"] == ["b_bf16_t20_s1", "b_bf16_t10_s1"]
    rows = expand(sweep.load_study(tmp_path / "study_tiny.py"))
    assert [state_of(row, tmp_path / "out/tiny") for row in rows] == ["done", "done", "held out", "held out"]
    assert "0 of 1 runs to do" in fake("finish()", "only=*_t20_*", held_out=True)       # a broad pattern starts no largest runs
    for only in ("b_*", "*,b_bf16_t20_s1"):
        told = fake("finish()", f"only={only}", code=2, held_out=True)
        assert len(summaries(tmp_path)) == 2 and f"(python scaling/fit.py {tmp_path}/out/tiny --predict b_bf16_t20_s1" in told
    predict(rows[2], tmp_path / "out/tiny/law", tokens=1)       # of another run by that name
    predict(rows[3], tmp_path / "out/tiny/law")
    fake("finish()", "only=b_bf16_t10_s1", code=2, held_out=True)
    predict(rows[2], tmp_path / "out/tiny/law")
    fake("finish()", "only=b_bf16_t10_s1", held_out=True)       # with the trunk it needs
    assert len(summaries(tmp_path)) == 4


def predict(row, folder, **changes):
    """A frozen prediction of a run, as far as scaling/frozen.py reads one."""
    goal = {key: getattr(row, key) for key in ("recipe", "params_total", "tokens", "flops_per_token")}
    content = {"target": goal | {"name": row.run} | changes, "date": "2026-01-01T00:00:00Z", "loss_key": "loss_bf16", "loss": 2.0,
               "low": 1.9, "high": 2.1, "headline": "ray", "forms": []}
    folder.mkdir(exist_ok=True)
    (folder / f"prediction_{row.run}.json").write_text(json.dumps(content | {"sha256": digest(content)}))


@pytest.mark.parametrize("arguments, told", [
    (["--rum"], "there is no key 'rum'; did you mean 'run'?"), (["jobs=0"], "jobs=0 must be a positive, finite number"),
    *((["--slurm", one], "go without it") for one in ("--run", "jobs=2", "limit=3600")),
    (["gpu=tpu"], "gpu=tpu: the peak of that GPU is not in"), (["only=a_bf16_t10_s2"], "did you mean 'a_bf16_t10_s1'?")])
def test_mistakes_get_a_sentence(tiny, tmp_path, capsys, arguments, told):
    assert told in asked(capsys, sweep.main, tiny_study(tiny, tmp_path), f"out={tmp_path}/out", *arguments, code=2)
    assert not (tmp_path / "out").exists()


def test_the_slurm_script_has_a_task_for_each_trunk_and_requeues_what_is_not_done(tiny, tmp_path, capsys):
    script = asked(capsys, sweep.main, tiny_study(tiny, tmp_path, seeds=(1, 2)), "--slurm", "gpus=8")
    assert all(words in script for words in ("#SBATCH --array=0-3\n", "--gpus-per-node=8", "\n#SBATCH --cpus-per-task=64\n"))
    assert not re.search("^[^#\n]+\n(.*\n)*#SBATCH", script, re.M)        # sbatch reads none behind the first command
    assert re.findall(r"^  (\S+)$", script, re.M)[1] == "a_bf16_t20_s2,a_bf16_t10_s2"
    (tmp_path / "stub.py").write_text(
        "import os, signal, sys, time\nprint(sys.argv[1:], os.getcwd(), flush=True)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print('up', flush=True)\ntime.sleep(30)\n")
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho scontrol $*\n")
    (tmp_path / "scontrol").chmod(0o755)
    file = tmp_path / "job.sh"
    assert str(ROOT / "scaling/sweep.py") in script
    file.write_text(script.replace(str(ROOT / "scaling/sweep.py"), str(tmp_path / "stub.py")))
    process = subprocess.Popen(["bash", str(file)], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={
        **os.environ, "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "71", "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert f"'--run', 'gpus=8', 'out=out', 'only=b_bf16_t20_s1,b_bf16_t10_s1'] {os.getcwd()}\n" in process.stdout.readline()
    assert process.stdout.readline() == "up\n"
    process.terminate()     # as --signal=B:TERM does before the time limit
    assert process.communicate(timeout=20)[0] == "scontrol requeue 71\n"
    assert process.returncode == 3


# ------------------------------------------------------------------------------------------------------- running the runs

def test_trunks_come_before_branches_and_one_at_a_time(fake, tmp_path):
    fake("time.sleep(0.05); finish()", recipes=("bf16", "tensorwise"))
    done = summaries(tmp_path)
    ran = sorted(done.items(), key=lambda item: item[1]["began"])
    assert [run for run, _ in ran] == ["a_bf16_t20_s1", "a_bf16_t10_s1", "a_tensorwise_t20_s1", "a_tensorwise_t10_s1",
                                       "b_bf16_t20_s1", "b_bf16_t10_s1", "b_tensorwise_t20_s1", "b_tensorwise_t10_s1"]
    assert all(a["ended"] <= b["began"] for (_, a), (_, b) in zip(ran, ran[1:], strict=False))
    branch, trunk = done["a_tensorwise_t10_s1"], done["a_tensorwise_t20_s1"]["given"]
    left = f"{tmp_path}/out/tiny/a_tensorwise_t20_s1/checkpoints/step_{int(trunk['checkpoint.at']):08d}"
    assert branch["given"]["start_from"] == left and "start_from" not in trunk and branch["threads"] is None
    assert json.loads((tmp_path / "out/tiny/study.json").read_text())["margin_percent"] == 1.0
    assert "0 of 8 runs to do" in fake("sys.exit('not again')", recipes=("bf16", "tensorwise"))


def test_two_jobs_run_side_by_side_each_with_its_share_of_the_machine(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(sweep, "LOG_S", 0.05)
    told = fake("time.sleep(1.5); finish()", "jobs=2", budgets=(20,), seeds=(1, 2))
    assert "0 of 4 runs done; a_bf16_t20_s1 is starting; a_bf16_t20_s2 is starting" in told, told
    ran = list(summaries(tmp_path).values())
    overlaps = [sum(other["began"] < run["began"] < other["ended"] for other in ran) for run in ran]
    assert max(overlaps) == 1       # never three at once, and not one after the other
    assert {run["threads"] for run in ran} == {"4"}


def test_every_job_has_gpus_of_its_own(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    seen, popen = [], subprocess.Popen
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda command, **more: (seen.append(command), popen(
        [command[0], *command[command.index(str(tmp_path / "train.py")):]], **more))[1])
    fake("time.sleep(0.2); finish()", "jobs=2", "gpus=2", budgets=(20,))
    assert {run["gpus"] for run in summaries(tmp_path).values()} == {"3,5", "6,7"}
    assert seen[0][1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert "gpus=2 for each of jobs=3 is more than the 4 GPUs" in fake("", "jobs=3", "gpus=2", code=2, budgets=(20,))


def test_a_failed_run_is_named_and_does_not_stop_the_others(fake, tmp_path):
    body = "if run == 'a_bf16_t20_s1': print('train.py: the disk is full', file=sys.stderr); sys.exit(1)\nfinish()"
    told = fake(body, code=1)
    assert summaries(tmp_path).keys() == {"b_bf16_t20_s1", "b_bf16_t10_s1"}     # its branch could not start
    assert "failed: a_bf16_t20_s1; correct the cause and run the same command again" in told
    assert "2 of 4 runs are not done, a_bf16_t20_s1 the first" in told
    rows = expand(sweep.load_study(tmp_path / "study_tiny.py"))
    log = tmp_path / "out/tiny/a_bf16_t20_s1.log"
    assert state_of(rows[0], tmp_path / "out/tiny") == f"failed, exit code 1: train.py: the disk is full ({log})"
    assert state_of(rows[1], tmp_path / "out/tiny") == "missing"
    for left in ("b_bf16_t10_s1", "b_bf16_t20_s1/checkpoints"):
        shutil.rmtree(tmp_path / "out/tiny" / left)
    assert "b_bf16_t10_s1 starts from scratch" in fake("finish()")      # what failed is tried again, after what may succeed
    assert "start_from" not in summaries(tmp_path)["b_bf16_t10_s1"]["given"]
    assert summaries(tmp_path)["b_bf16_t10_s1"]["began"] < summaries(tmp_path)["a_bf16_t20_s1"]["began"]
    assert state_of(rows[0], tmp_path / "out/tiny") == "done"


def test_a_branch_starts_as_soon_as_its_trunk_has_passed_its_step(fake, tmp_path):
    fake("if 't20' in run: checkpoint(given['checkpoint.at']); time.sleep(1)\nfinish()", "jobs=2", "only=a_*")
    ran = summaries(tmp_path)
    assert ran["a_bf16_t10_s1"]["began"] < ran["a_bf16_t20_s1"]["ended"] and len(ran) == 2


def test_what_is_left_is_told_at_the_speed_of_the_runs_under_way(rows, tmp_path):
    finish(rows[0], tmp_path)
    checkpoint(rows[0], tmp_path, rows[1].parent_step)
    (tmp_path / rows[2].run).mkdir()
    (tmp_path / rows[2].run / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "train", "step": i, "loss": 2.0, "tok_per_s": 500.0}) + "\n" for i in range(1, 11)) + '{"cut')
    checkpoint(rows[2], tmp_path, 8)
    flops = sum(row.own_flops for row in rows[1:]) - 8 * 512 * rows[2].flops_per_token
    left = duration(flops / (500 * rows[2].flops_per_token))
    assert sweep.progress(rows, [rows[2]], tmp_path) == (
        f"1 of 4 runs done, about {left} left; b_bf16_t20_s1 10 / 1,124, loss 2.0, 500 tokens/s")


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
    told = fake(body, "limit=2", "start=0.1", "only=a_bf16_t20_s1", code=3)
    assert time.monotonic() - began < 15 and "a_bf16_t20_s1 at step 7" in told
    told = fake(body, "limit=20", "start=0.1", "only=a_bf16_t20_s1")
    assert list(summaries(tmp_path)) == ["a_bf16_t20_s1"] and "a_bf16_t20_s1 goes on from step 7" in told


def test_what_has_no_time_for_more_than_its_start_is_not_begun(fake, tmp_path):
    told = fake("finish()", "limit=100", "only=a_bf16_t20_s1", code=3, began=time.monotonic() - 45)     # from the command's start
    assert summaries(tmp_path) == {} and re.search(r"; 5[45]\.\d s are left of limit=100\n", told), told
    assert "limit=100 leaves no time to begin 1 more: a_bf16_t20_s1, which takes 60 s" in told
    # 452,608 tokens at 1,000 a second; 13 s beside them, and 5 that no summary tells of
    fake("finish(wall_s=465.608)", "limit=1e4", "only=a_bf16_t20_s1")
    told = fake("finish()", "limit=17", "only=a_*", code=3, seeds=(1, 2))      # and no branch of what was not begun
    assert len(summaries(tmp_path)) == 1 and "leaves no time to begin 2 more: a_bf16_t10_s1, which takes 18 s" in told
    fake("finish()", "limit=40", "only=a_*", seeds=(1, 2))
    assert len(summaries(tmp_path)) == 4


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
    assert report.main(["--study", str(folder)]) == 0
    page = (folder / "README.md").read_text()
    assert "2 finished runs of 2 declared" in page and f"{ours['loss_bf16']:.4f}" in page
