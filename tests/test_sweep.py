"""A study is run to its end whatever interrupts it, by one writer a run, and its table says what is true."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import train
from runtime.metrics import read_rows
from scaling import command, sweep
from scaling.frozen import digest
from scaling.grid import ENDED, state_of, table
from scaling.study import expand
from tests.conftest import ROOT, write_config

TRAIN = """
import json, os, sys, time
from pathlib import Path
given = dict(argument.split("=", 1) for argument in sys.argv[2:])
run, folder = given["run"], Path(given["out"]) / given["run"]
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
began = time.time()
def checkpoint(step):
    (folder / f"checkpoints/step_{int(step):08d}").mkdir(exist_ok=True)
    (folder / f"checkpoints/step_{int(step):08d}/DONE").touch()
def finish(**more):
    for step in given.get("checkpoint.at", "").split(","):
        checkpoint(step or 9)
    (folder / "summary.json").write_text(json.dumps({"status": "ok", "loss_bf16": 2.0, "tok_per_s_median": 1000.0, "n_gpu": 2,
        "device": "fake", "began": began, "ended": time.time(), "given": given, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ.get("OMP_NUM_THREADS"), **more}))
"""


def tiny_study(tiny, folder, budgets=(10, 20), seeds=(1,), recipes=("bf16",), held_out=False, sizes=(64, 128)):
    """A study file of tiny sizes, each given by its n_ffn: 64 and 128 have 22.6k and 28.8k parameters."""
    lines = []
    for name, n_ffn in zip("ab", sizes, strict=False):
        model = replace(tiny.model, n_layer=1, n_ffn=n_ffn)
        config = replace(tiny, run=f"{name}_bf16", steps=None, tokens_per_param=20, model=model,
                         data=replace(tiny.data, max_epochs=100), checkpoint=replace(tiny.checkpoint, every=None, keep=1),
                         optim=replace(tiny.optim, warmup_share=0.05), log=replace(tiny.log, every=100))
        path = write_config(config, folder / f"{name}_bf16.py")
        lines.append(f"Size(config={str(path)!r}, seeds={seeds}, held_out={held_out and name == 'b'})")
    file = folder / "study_tiny.py"
    file.write_text("from scaling.study import Size, Study\n"
                    f"study = Study(name='tiny', sizes=({', '.join(lines)},), tokens_per_param={budgets}, recipes={recipes}, "
                    "margin_percent=1.0)\n")
    return file


@pytest.fixture(autouse=True)
def handlers():
    """What sweep.main() changes in this process."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def fake(tiny, tmp_path, monkeypatch, capsys):
    """sweep.main() on a tiny study whose train.py is the given text; returns its exit code and what it printed."""
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    monkeypatch.setattr(sweep, "POLL_S", 0.02)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def call(body, *arguments, **study):
        (tmp_path / "train.py").write_text(TRAIN + body)
        code = sweep.main([str(tiny_study(tiny, tmp_path, **study)), "--run", f"out={tmp_path}/out", *arguments])
        done = capsys.readouterr()
        return code, done.out + done.err

    return call


def summaries(tmp_path):
    return {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "out/tiny").glob("*/summary.json")}


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
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    seen = []
    popen = subprocess.Popen
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda command, **more: (seen.append(command), popen(
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
    assert "failed: a_bf16_t20_s1; correct the cause" in told
    assert "2 of 4 runs are not done, a_bf16_t20_s1 the first" in told
    rows = expand(sweep.load_study(tmp_path / "study_tiny.py"))
    log = tmp_path / "out/tiny/a_bf16_t20_s1.log"
    assert state_of(rows[0], tmp_path / "out/tiny") == f"failed, exit code 1: train.py: the disk is full ({log})"
    assert state_of(rows[1], tmp_path / "out/tiny") == "missing"
    code, told = fake("finish()")       # what failed is tried again
    assert (code, len(summaries(tmp_path))) == (0, 4), told
    assert state_of(rows[0], tmp_path / "out/tiny") == "done"


def test_a_branch_starts_as_soon_as_its_trunk_has_passed_its_step(fake, tmp_path):
    code, told = fake("if 't20' in run: checkpoint(given['checkpoint.at']); time.sleep(1)\nfinish()", "jobs=2", "only=a_*")
    assert code == 0, told
    ran = summaries(tmp_path)
    assert ran["a_bf16_t10_s1"]["began"] < ran["a_bf16_t20_s1"]["ended"]
    assert len(ran) == 2


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
    code, told = fake(body, "limit=1", "only=a_bf16_t20_s1")
    assert (code, time.monotonic() - began < 15) == (3, True), told
    assert "a_bf16_t20_s1 at step 7" in told
    code, told = fake(body, "limit=20", "only=a_bf16_t20_s1")
    assert (code, list(summaries(tmp_path))) == (0, ["a_bf16_t20_s1"])


def test_held_out_runs_wait_to_be_named(fake, tmp_path):
    code, told = fake("finish()", held_out=True)
    assert code == 0, told
    assert summaries(tmp_path).keys() == {"a_bf16_t20_s1", "a_bf16_t10_s1"}
    assert json.loads((tmp_path / "out/tiny/study.json").read_text())["held_out"] == ["b_bf16_t20_s1", "b_bf16_t10_s1"]
    lines = table(expand(sweep.load_study(tmp_path / "study_tiny.py")), tmp_path / "out/tiny", "h100")
    assert [line.rsplit("  ", 1)[1] for line in lines[1:5]] == ["done", "done", "held out", "held out"]
    code, told = fake("finish()", "only=*_t20_*", held_out=True)       # a broad pattern does not start the largest runs
    assert (code, "0 of 1 runs to do" in told, "left out, for what is held out is run by its own name: b_bf16_t20_s1\n" in told
            ) == (0, True, True), told
    for only in ("b_bf16_t10_s1", "b_*", "*,b_bf16_t20_s1"):
        code, told = fake("finish()", f"only={only}", held_out=True)
        assert (code, len(summaries(tmp_path))) == (2, 2), told
        assert f"(python scaling/fit.py {tmp_path}/out/tiny --predict b_bf16_t20_s1" in told
    rows = expand(sweep.load_study(tmp_path / "study_tiny.py"))
    predict(rows[2], tmp_path / "out/tiny/law", tokens=1)       # of another run by that name
    predict(rows[3], tmp_path / "out/tiny/law")
    code, told = fake("finish()", "only=b_bf16_t10_s1", held_out=True)
    assert (code, "b_bf16_t20_s1 is held out, and" in told, "--predict b_bf16_t10_s1" in told) == (2, True, False), told
    predict(rows[2], tmp_path / "out/tiny/law")
    code, told = fake("finish()", "only=b_bf16_t10_s1", held_out=True)     # with the trunk it needs
    assert (code, len(summaries(tmp_path))) == (0, 4), told
    (tmp_path / "out/tiny/law/prediction_b_bf16_t20_s1.json").unlink()
    code, told = fake("finish()", "only=b_bf16_t20_s1", held_out=True)     # what is done may be named
    assert (code, "0 of 1 runs to do" in told) == (0, True), told


def predict(row, folder, **changes):
    """A frozen prediction of a run, as far as scaling/frozen.py reads one."""
    goal = {key: getattr(row, key) for key in ("recipe", "params_total", "tokens", "flops_per_token")}
    content = {"target": goal | {"name": row.run} | changes, "date": "2026-01-01T00:00:00Z", "loss_key": "loss_bf16", "loss": 2.0,
               "low": 1.9, "high": 2.1, "headline": "ray", "forms": []}
    folder.mkdir(exist_ok=True)
    (folder / f"prediction_{row.run}.json").write_text(json.dumps(content | {"sha256": digest(content)}))


def test_a_changed_margin_is_refused_once_a_run_has_finished(fake, tmp_path, capsys):
    assert fake("finish()", "only=a_bf16_t20_s1")[0] == 0
    file = tmp_path / "study_tiny.py"
    file.write_text(file.read_text().replace("margin_percent=1.0", "margin_percent=2.0"))
    assert sweep.main([str(file), "--out", f"{tmp_path}/out"]) == 2
    assert capsys.readouterr().err.startswith(
        f"sweep.py: {tmp_path}/out/tiny/study.json was declared before runs that have finished since: margin_percent was 1.0, "
        "now 2.0; runs may be added")


def test_the_table_by_hand(tiny, tmp_path):
    rows = expand(sweep.load_study(tiny_study(tiny, tmp_path)))
    lines = table(rows, tmp_path / "none", "h100")
    trunk, branch = rows[:2]
    assert (trunk.steps, branch.steps, branch.parent_step) == (884, 442, 354)
    assert lines[2].split() == ["a_bf16_t10_s1", "22.6k", "10", "226k", "354", f"{88 * 512 * trunk.flops_per_token:.2e}",
                                "~<0.001", "missing"]
    assert " FLOPs, <0.001 device-hours; left: 4 runs, " in lines[6]
    assert not (tmp_path / "none").exists()
    own, apart = (sum(getattr(row, key) for row in rows) for key in ("own_flops", "flops"))
    assert f"as 4 separate runs {apart:.3g} FLOPs: branches save {1 - own / apart:.0%}" in lines
    assert lines[-1].startswith("~ assumed: 45% of the 989 BF16 TFLOP/s of one h100")
    for i, (speed, gpus) in enumerate(((3000.0, 2), (1000.0, 1))):      # two finished runs of the size: 1,500 and 1,000 on each
        folder = tmp_path / f"out/{rows[i].run}"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"status": "ok" if i else "diverged", "tok_per_s_median": speed,
                                                         "n_gpu": gpus, "device": "X", "loss_bf16": 2.0}))
    lines = table(rows, tmp_path / "out", "h100")
    assert lines[1].split()[-2:] == [f"{884 * 512 / 1250 / 3600:.3g}", "diverged"]
    assert lines[2].split()[-2:] == [f"{88 * 512 / 1250 / 3600:.3g}", "done"]
    assert "measured: a bf16 1.25k tokens/s on each X" in lines
    assert "left: 2 runs" in lines[6]


@pytest.mark.parametrize("text, told", [
    ("[1]", "it holds a list"), ("{}", "status is None"), ("null", "it holds a NoneType"), ("{", "Expecting"),
    ("[" * 10**5, "recursion"),
    ('{"status": "ok", "loss_bf16": "2"}', "loss_bf16 is '2'"), ('{"status": "ok", "loss_bf16": NaN}', "loss_bf16 is nan"),
    ('{"status": "ok", "loss_bf16": 2, "tok_per_s_median": 0}', "tok_per_s_median is 0"),
    ('{"status": "ok", "loss_bf16": 2, "tok_per_s_median": 9.0, "n_gpu": true, "device": "X"}', "n_gpu is True"),
])
def test_a_damaged_summary_is_no_finished_run(tiny, tmp_path, capsys, text, told):
    folder = tmp_path / "out/tiny/a_bf16_t20_s1"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(text)
    for more in ([], ["--run"]):
        assert sweep.main([str(tiny_study(tiny, tmp_path)), f"out={tmp_path}/out", *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"sweep.py: {folder}/summary.json is damaged (") and told in error
        assert error.endswith("delete it, and --run evaluates the last checkpoint again\n")


def test_the_grid_is_left_by_ctrl_c_and_by_a_reader_that_goes(tiny, tmp_path, capsys, monkeypatch):
    def leave(error):
        def table(*_):
            raise error
        monkeypatch.setattr(sweep, "table", table)
        return command.run(sweep.main, [str(tiny_study(tiny, tmp_path)), f"out={tmp_path}/out"])

    assert (leave(KeyboardInterrupt()), *capsys.readouterr()) == (130, "", "\ninterrupted\n")
    monkeypatch.setattr(command.os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    assert (leave(BrokenPipeError(32, "Broken pipe")), *capsys.readouterr()) == (1, "", "")
    assert leave(OSError(5, "Input/output error")) == 1
    assert capsys.readouterr().err == "sweep.py: a file: Input/output error\n"


@pytest.mark.parametrize("arguments, told", [
    (["--rum"], "there is no option 'rum'; did you mean 'run'?"), (["jobs=0"], "jobs=0 must be a positive, finite number"),
    (["jobs=x"], "jobs='x' is not a whole number"), (["limit=-1"], "limit=-1.0 must be"),
    (["gpu=tpu"], "gpu=tpu: the peak of that GPU is not in"), (["jobs=1", "jobs=2"], "jobs is given twice: 1 and '2'"),
    (["--run", "--slurm"], "--run and --slurm: give one of the two"), (["only=c_*"], "only='c_*' matches no run of"),
    (["other.py"], "study is given twice"), (["--gpus", "--run"], "--gpus needs a value: write gpus=VALUE"),
    (["--jobs"], "--jobs needs a value"), (["only=a"], "; write a_* for the 2 that begin so"),
    (["only=a_bf16_t1"], "; write a_bf16_t1* for the 1 that begin so"),
    (["only=d_bf16_t10_s1"], "; the nearest are b_bf16_t10_s1, a_bf16_t10_s1, b_bf16_t20_s1, a_bf16_t20_s1"),
    (["out={here}/a_bf16.py"], "/a_bf16.py is a file: name a folder with out=FOLDER"),
    (["out={here}/a_bf16.py/deep", "--run"], "/a_bf16.py is a file: name a folder with out=FOLDER"),
])
def test_mistakes_get_a_sentence(tiny, tmp_path, capsys, arguments, told):
    out = [] if any(word.startswith("out=") for word in arguments) else [f"out={tmp_path}/out"]
    code = sweep.main([str(tiny_study(tiny, tmp_path)), *out, *(word.format(here=tmp_path) for word in arguments)])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert told in error
    assert not (tmp_path / "out").exists()


def test_help_and_no_study(capsys):
    assert sweep.main(["--help"]) == 0
    assert "limit=SECONDS" in capsys.readouterr().out
    assert (sweep.main([]), sweep.main(["--run"])) == (2, 2)
    assert "a study file is missing" in capsys.readouterr().err
    assert sweep.main(["configs/study_demi.py"]) == 2
    assert "did you mean configs/study_demo.py?" in capsys.readouterr().err


def test_the_slurm_script_has_a_task_for_each_trunk_and_requeues_what_is_not_done(tiny, tmp_path, capsys):
    assert sweep.main([str(tiny_study(tiny, tmp_path, seeds=(1, 2))), "--slurm", "gpus=8"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-3\n" in script
    assert "--gpus-per-node=8" in script
    assert "\n#SBATCH --cpus-per-task=64\n" in script
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


def test_interrupted_killed_and_run_again_it_ends_with_the_summaries_of_an_unbroken_study(tiny, tmp_path, capsys, monkeypatch):
    """Real runs. First Ctrl-C, then the sweep alone is killed, while its run lives on and nobody else may write there."""
    file = tiny_study(tiny, tmp_path, budgets=(3, 6), sizes=(64,))
    folder, env = tmp_path / "out/tiny", {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "scaling/sweep.py", str(file), "--run", f"out={tmp_path}/out"]

    def begin(run, steps):
        process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
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
