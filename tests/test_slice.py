"""A study goes on slice by slice from what was kept alone, and what has finished is kept whatever ends a slice."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from scaling import provenance
from scaling import slice as room
from scaling.study import expand, load_study
from tests.conftest import ROOT
from tests.test_sweep import tiny_study

# Stands for each command of the repository: notes its words, does what the command would leave, or what the test says.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path
name, words = Path(sys.argv[0]).stem, sys.argv[1:]
here = Path(os.environ["HERE"])
with open(here / "calls", "a") as file:
    print(name, *words, file=file)
folder = here / "out/tiny"
def finish(run):
    (folder / run).mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "metrics.jsonl", "probe.jsonl"):
        (folder / run / file).write_text("{}")
    (folder / run / "summary.json").write_text(json.dumps({"run_id": run}))
def freeze(run):
    (folder / "law").mkdir(exist_ok=True)
    (folder / f"law/prediction_{run}.json").write_text(f"frozen {time.time()}")
def done(run):
    return (folder / run / "summary.json").exists()
runs = [run for word in words if word.startswith("only=") for run in word[5:].split(",")] or json.loads(os.environ["OPEN"])
exec((here / "body").read_text())
if name == "sweep":
    for run in runs:
        finish(run)
if name == "fit" and "--predict" in words:
    freeze(words[-1])
if name == "sample":
    print("said by", words[0])
sys.exit(0)
"""
SENTENCE = "only a commit shows that a prediction is older than its run"


@pytest.fixture
def fake(tiny, tmp_path, monkeypatch, capfd):
    """slice.main() on a tiny study, size b held out; its commands are FAKE, all but publish.py; gives code and what was told."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    file = tiny_study(tiny, tmp_path, held_out=True)
    names = [row.run for row in expand(load_study(file)) if not row.held_out]
    for path in (*(f"scaling/{name}.py" for name in ("sweep", "fit", "precision", "figures", "results", "learning_rate")),
                 "eval/sample.py"):
        (tmp_path / "code" / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "code" / path).write_text(FAKE)
    (tmp_path / "code/scaling/publish.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom scaling.publish import main\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(f'publish {{sys.argv[1]}} {{sys.argv[2]}}\\n')\nsys.exit(main())\n")
    monkeypatch.setattr(room, "ROOT", tmp_path / "code")
    monkeypatch.setattr(room, "POLL_S", 0.01)
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("OPEN", json.dumps(names))
    monkeypatch.chdir(tmp_path)

    def call(*words, body=""):
        (tmp_path / "body").write_text(body)
        (tmp_path / "calls").write_text("")
        code = room.main([str(file), "results=kept", *words])
        done = capfd.readouterr()
        return code, done.out + done.err

    yield call
    for number, handler in before:
        signal.signal(number, handler)


def calls(tmp_path):
    """Names of the commands in the order in which they were begun, with what matters of their words."""
    return [" ".join([line.split()[0], *(word for word in line.split()[1:] if word.startswith(("only=", "--")))])
            for line in (tmp_path / "calls").read_text().splitlines()]


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "kept/slices.jsonl").read_text().splitlines()]


def test_slices_go_on_from_what_was_kept_alone_until_all_is_done(fake, tmp_path):
    code, told = fake("limit=1000", "jobs=2", "start=3", body="if name == 'sweep': finish(runs[0]); sys.exit(3)")
    assert code == 3, told
    assert calls(tmp_path) == ["sweep --run", "publish"]
    sweep = (tmp_path / "calls").read_text().splitlines()[0].split()
    assert sweep[1:5] == [str(tmp_path / "study_tiny.py"), "--run", "jobs=2", "start=3"]
    assert 900 < int(sweep[5].removeprefix("limit=")) <= 1000 - room.END_S
    assert f"$ python scaling/sweep.py {tmp_path}/study_tiny.py --run jobs=2 start=3 limit=" in told
    shutil.rmtree(tmp_path / "out")         # a bare machine
    code, told = fake()
    assert code == 3 and SENTENCE in told and "kept/law/prediction_b_bf16_t20_s1.json" in told
    assert calls(tmp_path) == ["publish", "sweep --run", "precision", "fit --predict", "fit --predict", "publish"]
    frozen = (tmp_path / "kept/law/prediction_b_bf16_t20_s1.json").read_text()
    shutil.rmtree(tmp_path / "out")
    code, told = fake("commit=abc")
    assert code == 0, told
    assert calls(tmp_path) == ["publish", "sweep --run only=b_bf16_t20_s1,b_bf16_t10_s1", "fit --score", "precision",
                               "figures --fp8", "publish", "results"]
    assert (tmp_path / "kept/law/prediction_b_bf16_t20_s1.json").read_text() == frozen
    assert "no sample of b_bf16_t20_s1: its checkpoints are not on this machine" in told
    first, second, third = rows(tmp_path)
    assert [row["runs"] for row in (first, second, third)] == [["a_bf16_t20_s1"], ["a_bf16_t10_s1"],
                                                              ["b_bf16_t20_s1", "b_bf16_t10_s1"]]
    assert [row["exit"] for row in (first, second, third)] == [3, 3, 0]
    assert third["commit"] == "abc" and third["start"] <= third["end"] and third["seconds"] > 0
    assert third["torch"] and third["python"] and third["device"].startswith("cpu")
    assert gzip.decompress((tmp_path / "kept/b_bf16_t20_s1/probe.jsonl.gz").read_bytes()) == b"{}"


def test_a_prediction_waits_for_its_commit_where_git_can_tell(fake, tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path / "kept", check=True, timeout=60)

    fake()
    shutil.rmtree(tmp_path / "kept/law")        # not kept yet: nothing to commit
    code, told = fake()
    assert code == 3 and SENTENCE in told and (tmp_path / "kept/law").exists()
    git("init", "-q")
    code, told = fake()     # again without a commit: not a step farther
    assert code == 3 and SENTENCE in told and calls(tmp_path) == ["publish", "publish"]
    git("add", "law")
    assert fake()[0] == 3
    git("commit", "-qm", "frozen")
    assert fake()[0] == 0
    assert "fit --score" in calls(tmp_path)


def test_a_signal_is_passed_on_once_and_what_finished_is_kept(fake, tmp_path):
    body = """
if name == 'sweep':
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    finish(runs[0])
    os.kill(os.getppid(), signal.SIGTERM)
    end = time.time() + 30
    while not asked and time.time() < end: time.sleep(0.01)
    time.sleep(0.3)
    finish(runs[1])
    sys.exit(3 if len(asked) == 1 else 1)"""
    code, told = fake(body=body)
    assert (code, calls(tmp_path)) == (3, ["sweep --run", "publish"]), told
    assert rows(tmp_path)[0]["runs"] == ["a_bf16_t20_s1", "a_bf16_t10_s1"]
    assert (tmp_path / "kept/a_bf16_t10_s1/summary.json").exists()
    code, told = fake(body="if name == 'precision': os.kill(os.getppid(), signal.SIGINT); time.sleep(30)")
    assert (code, calls(tmp_path)) == (3, ["publish", "precision", "publish"]), told


def test_a_command_that_outlasts_the_limit_is_ended_and_what_finished_is_kept(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "END_S", 0.4)
    monkeypatch.setattr(room, "KILL_S", 0.2)
    began = time.monotonic()
    code, told = fake("limit=2", body="""
if name == 'sweep':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finish(runs[0])
    time.sleep(60)""")
    assert (code, calls(tmp_path), time.monotonic() - began < 30) == (3, ["sweep --run", "publish"], True), told
    assert rows(tmp_path)[0]["runs"] == ["a_bf16_t20_s1"]
    code, told = fake("limit=0.4001")       # nothing is begun that has no time left, but what keeps
    assert (code, calls(tmp_path)) == (3, ["publish"]), told


def test_a_study_of_learning_rates_is_judged_though_one_of_them_failed(fake, tmp_path):
    file = tmp_path / "study_tiny.py"
    file.write_text(file.read_text().replace("seeds=(1,), held_out=False", "lr=(0.1, 0.2)").replace("held_out=True", ""))
    run = "a_bf16_lr0.1_t20_s1"
    for body, want in ((f"if name == 'sweep': finish('{run}'); sys.exit(1)", 1), (
            f"if name == 'sweep': finish('{run}'); sys.exit(1)\nif name == 'learning_rate': sys.exit(3)", 3)):
        code, told = fake(body=body)
        assert (code, calls(tmp_path)[-3:]) == (want, ["sweep --run", "learning_rate", "publish"]), told
    assert fake(body="if name == 'sweep': sys.exit(3)")[0] == 3 and "learning_rate" not in calls(tmp_path)


@pytest.mark.parametrize("body, code", [
    ("if name == 'sweep': finish(runs[0]); sys.exit(1)", 1), ("if name == 'sweep': finish(runs[0]); sys.exit(2)", 2),
    ("if name == 'sweep': finish(runs[0]); os.kill(os.getpid(), signal.SIGKILL)", 1),
])
def test_a_failure_ends_the_slice_and_what_finished_is_kept(fake, tmp_path, body, code):
    assert fake(body=body)[0] == code
    assert calls(tmp_path) == ["sweep --run", "publish"]
    assert (rows(tmp_path)[0]["exit"], rows(tmp_path)[0]["runs"]) == (code, ["a_bf16_t20_s1"])


def test_what_is_given_up_keeps_the_rest_from_nothing(fake, tmp_path):
    """A run that fails each time: without skip= the held-out size would wait for it for good."""
    assert fake(body="if name == 'sweep': finish(runs[0]); sys.exit(1)")[0] == 1
    code, told = fake("skip=a_bf16_t10_*")
    assert (code, calls(tmp_path)[1:4]) == (3, ["precision", "fit --predict", "fit --predict"]), told
    code, told = fake("skip=a_bf16_t10_*,b_bf16_t10_s1")
    assert (code, calls(tmp_path)[1:3]) == (0, ["sweep --run only=b_bf16_t20_s1", "fit --score"]), told
    code, told = fake("skip=a_bf16_t10_*,c_*")
    assert code == 2 and "skip='c_*' matches no run of" in told


def test_the_largest_speaks_while_its_checkpoint_is_there_though_its_branches_wait(fake, tmp_path):
    fake()
    body = """
if name == 'sweep':
    finish('b_bf16_t20_s1')
    (folder / 'b_bf16_t20_s1/checkpoints/step_00000009').mkdir(parents=True, exist_ok=True)
    (folder / 'b_bf16_t20_s1/checkpoints/step_00000009/DONE').touch()
    sys.exit(3)"""
    assert fake(body=body)[0] == 3
    assert fake(body=body)[0] == 3 and calls(tmp_path)[1:3] == ["sample", "sweep --run only=b_bf16_t10_s1"]
    assert (tmp_path / "kept/b_bf16_t20_s1/samples.txt").exists()


def test_a_mistake_of_ours_ends_the_slice_and_what_finished_is_kept(fake, tmp_path, monkeypatch):
    def fall(this):
        (this.folder / "a_bf16_t20_s1").mkdir(parents=True)
        (this.folder / "a_bf16_t20_s1/summary.json").write_text('{"run_id": "a_bf16_t20_s1"}')
        raise ZeroDivisionError

    monkeypatch.setattr(room, "train", fall)
    with pytest.raises(ZeroDivisionError):
        fake()
    assert (rows(tmp_path)[0]["exit"], rows(tmp_path)[0]["runs"]) == (1, ["a_bf16_t20_s1"])
    assert (tmp_path / "kept/a_bf16_t20_s1/summary.json").exists()


def test_one_analysis_that_fails_keeps_no_other_from_being_made(fake, tmp_path):
    fake()
    code, told = fake(body="if name == 'figures' or '--score' in words: sys.exit(2)")
    assert code == 2, told
    assert calls(tmp_path)[-5:] == ["fit --score", "precision", "figures --fp8", "publish", "results"]
    assert fake(body="if name == 'results': sys.exit(1)")[0] == 1
    code, told = fake(body="if '--score' in words: os.kill(os.getppid(), signal.SIGTERM); time.sleep(30)")
    assert (code, calls(tmp_path)) == (3, ["publish", "fit --score", "publish"]), told
    assert fake()[0] == 0       # again: everything is computed anew, nothing is trained
    assert calls(tmp_path)[:2] == ["publish", "fit --score"]


def test_samples_are_taken_while_the_checkpoint_is_there(fake, tmp_path):
    fake()
    body = """
if name == 'sweep':
    (folder / runs[0] / 'checkpoints/step_00000009').mkdir(parents=True)
    (folder / runs[0] / 'checkpoints/step_00000009/DONE').touch()
if name == 'sample' and (here / 'mute').exists(): print('half'); sys.exit(1)"""
    (tmp_path / "mute").touch()
    assert fake(body=body)[0] == 1      # the rest is made all the same
    assert calls(tmp_path)[2:4] == ["sample", "fit --score"]
    assert not (tmp_path / "kept/b_bf16_t20_s1/samples.txt").exists()
    (tmp_path / "mute").unlink()
    assert fake(body=body)[0] == 0
    text = (tmp_path / "kept/b_bf16_t20_s1/samples.txt").read_text()
    assert text == ("$ python -m eval.sample out/tiny/b_bf16_t20_s1 n=4 tokens=150 seed=1\n\n"
                    "said by out/tiny/b_bf16_t20_s1\n")
    assert fake()[0] == 0 and "sample" not in calls(tmp_path)


def test_an_edited_kept_file_is_refused_before_anything_starts(fake, tmp_path):
    fake(body="if name == 'sweep': finish(runs[0]); sys.exit(3)")
    (tmp_path / "kept/a_bf16_t20_s1/config.json").write_text('{"edited": 1}')
    code, told = fake()
    assert (code, calls(tmp_path)) == (2, ["publish", "publish"])
    assert "kept/a_bf16_t20_s1/config.json" in told and "one of them was edited" in told


def test_a_damaged_record_is_named_at_the_end_and_the_others_are_kept(fake, tmp_path):
    code, told = fake(body="""
if name == 'sweep':
    finish(runs[0]), finish(runs[1])
    (folder / runs[1] / 'summary.json').write_text('{')
    sys.exit(3)""")
    assert (code, "a_bf16_t10_s1/summary.json is not valid JSON" in told) == (2, True), told
    assert [path.parent.name for path in (tmp_path / "kept").glob("*/summary.json")] == ["a_bf16_t20_s1"]


def test_the_sources_of_the_data_are_kept(fake, tmp_path, data_dir):
    fake()
    kept = json.loads((tmp_path / "kept/data.json").read_text())
    assert kept == {source: json.loads((data_dir / source / "index.json").read_text()) for source in ("code", "web")}


def test_the_row_tells_of_the_machine_and_of_the_code(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.65.06'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setattr(provenance, "ROOT", code)
    kept = code / "kept"
    provenance.write_row(kept, "then", 1.23, None, ["a"], 0)        # no git
    subprocess.run("git init -q && touch a && git add a && git -c user.name=n -c user.email=e commit -qm a", shell=True, cwd=code,
                   check=True)
    provenance.write_row(kept, "then", 1.23, None, ["a"], 0)        # what is kept itself is not dirt
    (code / "a").write_text("x")
    with open(kept / "slices.jsonl", "a") as file:
        file.write('{"torn')
    provenance.write_row(kept, "then", 1.23, "abc", [], 3)
    lines = (kept / "slices.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, (lines[0], lines[1], lines[3]))
    assert (first["device"], first["driver"]) == ("NVIDIA H100 80GB HBM3", "580.65.06")
    assert [(len(row["commit"] or ""), row["dirty"]) for row in (first, second, third)] == [(0, None), (40, False), (3, True)]
    assert (lines[2], third["seconds"], third["exit"]) == ('{"torn', 1.2, 3)
    tool.write_text("#!/bin/sh\necho none; exit 9\n")
    provenance.write_row(kept, "then", 1, None, [], 0)
    assert json.loads((kept / "slices.jsonl").read_text().splitlines()[-1])["driver"] is None


@pytest.mark.parametrize("words, told", [
    (["results=x"], "0 study files are given"), (["{study}"], "results=DIR is missing"),
    (["{study}", "results={study}"], "is a file: name a folder"), (["{study}", "results=x", "limit=20"], "limit='20' must be"),
    (["{study}", "results=x", "limit=soon"], "limit='soon' must be"), (["{study}", "results=x", "jobs=0"], "jobs=0 must be"),
    (["{study}", "results=x", "limits=9"], "'limits=9' is no option; did you mean limit?"),
    (["none.py", "results=x"], "there is no study file none.py"),
])
def test_mistakes_get_a_sentence(tiny, tmp_path, capsys, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    study = tiny_study(tiny, tmp_path)
    assert room.main([word.format(study=study) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("slice.py: ") and told in error and error.count("\n") == 1
    assert not (tmp_path / "x").exists()
    assert room.main(["--help"]) == 0 and "limit=SECONDS" in capsys.readouterr().out
