"""The sweep's command starts what it is asked to start, and refuses the rest in a sentence."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from runtime.cli import UserError
from runtime.config import load_config
from runtime.log import pair_id
from scaling import command, sweep
from scaling.data_check import check_data
from scaling.grid import state_of
from scaling.predict import digest
from scaling.study import expand
from tests.conftest import ROOT
from tests.study_cases import fake_sweep, summaries, tiny_study


@pytest.fixture
def fake(tiny, tmp_path, monkeypatch, capsys):
    with fake_sweep(tiny, tmp_path, monkeypatch, capsys) as call:
        yield call


def test_data_that_will_not_do_are_refused_before_anything_starts(fake, tmp_path, data_dir):
    for limit in (2, 10):       # 10: too little for b alone, which is held out and waits for a prediction of it
        code, told = fake("finish()", "only=a_*", max_epochs=limit, held_out=True)
        assert (code, (tmp_path / "out").exists()) == (2, False)
        assert told.startswith("sweep.py: b_bf16_t20_s1: this run plans ") and f"data.max_epochs={limit};" in told
    code, told = fake("finish()", "only=a_*", max_epochs=20)
    assert code == 0, told
    # 1124 steps of 16 sequences of 32 tokens; of web's 40,000 training tokens there are 1,249 windows with a target each
    assert re.findall(r"epochs of the largest run to do \((\w+), ([\d,]+) tokens\): code ([\d.]+), web ([\d.]+); allowed 20\n",
                      told) == [("b_bf16_t20_s1", "575,488", f"{1124 * 4 / 1249:.2f}", f"{1124 * 12 / 1249:.2f}")]
    assert "epochs" not in fake("", "only=a_*", max_epochs=20)[1]       # nothing begins, nothing is looked at


def test_runs_on_other_data_than_those_that_are_done_are_refused(fake, tmp_path):
    sound = "finish(data_sha256=DATA, val_sha256=VAL)"
    for train_sha256, val_sha256, what in (("0" * 64, None, "trained"), (None, "1" * 64, "validated")):
        assert fake(sound.replace("DATA", repr(train_sha256)).replace("VAL", repr(val_sha256)), "only=a_bf16_t20_s1")[0] == 0
        code, told = fake("finish()")
        assert code == 2
        assert re.match(rf"sweep.py: .*/data\d* holds other tokens than a_bf16_t20_s1 was {what} on", told), told
        rows = [replace(row, overrides=(*row.overrides, "data.max_epochs=99")) if row.size == "b" else row
                for row in expand(sweep.load_study(tmp_path / "study_tiny.py"))]
        with pytest.raises(UserError, match=f"than a_bf16_t20_s1 was {what} on"):     # more epochs are of the same tokens
            check_data([row for row in rows if row.size == "b" or row.parent is None], tmp_path / "out/tiny")
        shutil.rmtree(tmp_path / "out/tiny/a_bf16_t20_s1")
    assert fake("finish()", "only=a_*")[0] == 0


def test_a_config_that_has_changed_since_a_run_was_done_is_refused(tiny, tmp_path, monkeypatch, capsys):
    """The learning rate stands in the config file: no override of a declared run tells of it."""
    def call(config, body, *more):
        with fake_sweep(config, tmp_path, monkeypatch, capsys) as fake:
            return fake(body, *more)

    for row in expand(sweep.load_study(tiny_study(tiny, tmp_path)))[:2]:
        config = load_config(row.config, row.overrides)
        folder = tmp_path / "out/tiny" / row.run
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        ids = f"{{'{row.run}': '{pair_id(config)}'}}.get(run)"
        assert call(tiny, f"finish(pair_id={ids})", f"only={row.run}")[0] == 0
    other = replace(tiny, optim=replace(tiny.optim, lr=7e-3, weight_decay=0.3))
    code, told = call(other, "finish()", "only=b_bf16_t20_s1")
    assert (code, len(summaries(tmp_path))) == (2, 2), told
    assert re.match(r"sweep.py: \S+/a_bf16.py no longer says what a_bf16_t10_s1, which is done, was trained with: "
                    rf"optim.lr was {tiny.optim.lr}, now 0.007, optim.weight_decay was {tiny.optim.weight_decay}, now 0.3; ",
                    told), told
    (folder / "config.json").unlink()
    assert ", was trained with: its pair_id was " in call(other, "finish()")[1].replace("which is done, ", "")
    assert call(other, "", "only=a_*")[0] == 0        # nothing begins
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"pair_id": "of older code"}))
    moved = replace(tiny, data=replace(tiny.data, max_epochs=77), log=replace(tiny.log, every=7))
    code, told = call(moved, "finish()")        # what the weights do not depend on may change
    assert (code, len(summaries(tmp_path))) == (0, 4), told


def test_held_out_runs_wait_to_be_named(fake, tmp_path):
    code, told = fake("finish()", held_out=True)
    assert code == 0, told
    assert summaries(tmp_path).keys() == {"a_bf16_t20_s1", "a_bf16_t10_s1"}
    assert json.loads((tmp_path / "out/tiny/study.json").read_text())["held_out"] == ["b_bf16_t20_s1", "b_bf16_t10_s1"]
    rows = expand(sweep.load_study(tmp_path / "study_tiny.py"))
    assert [state_of(row, tmp_path / "out/tiny") for row in rows] == ["done", "done", "held out", "held out"]
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
    (["--rum"], "there is no key 'rum'; did you mean 'run'?"), (["jobs=0"], "jobs=0 must be a positive, finite number"),
    (["jobs=x"], "jobs='x' is not a whole number"), (["limit=-1"], "limit=-1.0 must be"),
    (["mfu=1.5"], "mfu=1.5 must be a share of the GPU's peak"), (["start=0"], "start=0.0 must be a positive, finite number"),
    (["gpu=tpu"], "gpu=tpu: the peak of that GPU is not in"), (["jobs=1", "jobs=2"], "jobs is given twice: '1' and '2'"),
    (["--run", "--slurm"], "--run and --slurm: give one of the two"), (["only=c_*"], "only='c_*' matches no run of"),
    (["other.py"], "'other.py' is one word too many"), (["--gpus", "--run"], "--gpus needs a value: write gpus=VALUE"),
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
    assert "study is missing: give study=VALUE, a file such as configs/study_demo.py" in capsys.readouterr().err
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
