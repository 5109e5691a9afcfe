"""Whatever ends a slice, what has finished is kept, and nothing goes on behind its back."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scaling import calls as process_room
from scaling import provenance
from scaling import slice as room
from tests.conftest import ROOT
from tests.slice_cases import calls, fake_slice, rows
from tests.study_cases import tiny_study


@pytest.fixture
def fake(tiny, tmp_path, monkeypatch, capfd):
    with fake_slice(tiny, tmp_path, monkeypatch, capfd) as call:
        yield call


def test_of_a_mistake_no_row_is_kept(fake, tmp_path):
    assert fake(body="if name == 'sweep': sys.exit(2)")[0] == 2
    assert not (tmp_path / "kept/slices.jsonl").exists()
    assert fake(body="if name == 'sweep': sys.exit(1)")[0] == 1
    assert [row["exit"] for row in rows(tmp_path)] == [1]


def test_what_a_failed_run_told_is_kept_until_it_has_finished(fake, tmp_path):
    body = """
if name == 'sweep':
    (folder / f'{runs[0]}.log').write_text('train.py: step 7: loss nan\\nsweep.py: exit code 1\\n')
    sys.exit(1)"""
    assert fake(body=body)[0] == 1
    log = tmp_path / "kept/failed/a_bf16_t20_s1.log"
    assert log.read_text() == "train.py: step 7: loss nan\nsweep.py: exit code 1\n"
    shutil.rmtree(tmp_path / "out")
    assert fake(body="if name == 'sweep': sys.exit(3)")[0] == 3 and log.exists()
    assert fake()[0] == 3 and not log.exists()


def test_a_full_disk_gets_a_sentence(fake, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(provenance, "write_atomically", full)
    code, told = fake()
    assert (code, told.splitlines()[-1]) == (1, "slice.py: kept/slices.jsonl: No space left on device"), told


def test_a_killed_slice_leaves_no_command_behind(tmp_path):
    """Of a tool that ends it: its runs must not go on in a GPU that the next slice takes for free."""
    (tmp_path / "scaling").mkdir()
    (tmp_path / "scaling/sweep.py").write_text("import os, time\nopen('pid.new', 'w').write(str(os.getpid()))\n"
                                               "os.rename('pid.new', 'pid')\ntime.sleep(120)\n")
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; from scaling import calls; "
            "calls.ROOT = Path('.').resolve(); calls.call(calls.Slice('', [], Path(), Path()), 'scaling/sweep.py')")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    try:
        wait_for((tmp_path / "pid").exists)
        child = int((tmp_path / "pid").read_text())
        process.kill()
        process.wait()
        wait_for(lambda: not is_alive(child))
    finally:
        process.kill()
        with contextlib.suppress(UnboundLocalError, ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def is_alive(pid):
    """Neither gone nor waiting to be buried by whoever has inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(is_so, seconds=60):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_signal_is_passed_on_once_and_what_finished_is_kept(fake, tmp_path):
    body = """
if name == 'sweep':
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    finish(runs[0])
    ask(signal.SIGTERM)
    end = time.time() + 30
    while not asked and time.time() < end: time.sleep(0.01)
    time.sleep(0.3)
    finish(runs[1])
    sys.exit(3 if len(asked) == 1 else 1)"""
    code, told = fake(body=body)
    assert (code, calls(tmp_path)) == (3, ["sweep --run", "publish"]), told
    assert rows(tmp_path)[0]["runs"] == ["a_bf16_t20_s1", "a_bf16_t10_s1"]
    assert (tmp_path / "kept/a_bf16_t10_s1/summary.json").exists()
    code, told = fake(body="if name == 'precision': ask(signal.SIGINT); time.sleep(30)")
    assert (code, calls(tmp_path)) == (3, ["publish", "precision", "publish"]), told


def test_a_command_that_outlasts_the_limit_is_ended_and_what_finished_is_kept(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "END_S", 0.4)
    monkeypatch.setattr(process_room, "END_S", 0.4)
    monkeypatch.setattr(process_room, "KILL_S", 0.2)
    began = time.monotonic()
    code, told = fake("limit=4", body="""
if name == 'sweep':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finish(runs[0])
    time.sleep(120)""")
    assert (code, calls(tmp_path), time.monotonic() - began < 60) == (3, ["sweep --run", "publish"], True), told
    assert rows(tmp_path)[0]["runs"] == ["a_bf16_t20_s1"]
    code, told = fake("limit=0.4001")       # nothing is begun that has no time left, but what keeps
    assert (code, calls(tmp_path)) == (3, ["publish"]), told


@pytest.mark.parametrize("body, code", [
    ("if name == 'sweep': finish(runs[0]); sys.exit(1)", 1), ("if name == 'sweep': finish(runs[0]); sys.exit(2)", 2),
    ("if name == 'sweep': finish(runs[0]); os.kill(os.getpid(), signal.SIGKILL)", 1),
])
def test_a_failure_ends_the_slice_and_what_finished_is_kept(fake, tmp_path, body, code):
    assert fake(body=body)[0] == code
    assert calls(tmp_path) == ["sweep --run", "publish"]
    assert (rows(tmp_path)[0]["exit"], rows(tmp_path)[0]["runs"]) == (code, ["a_bf16_t20_s1"])


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
    code, told = fake("commit=abc", body="if name == 'figures' or '--score' in words: sys.exit(2)")
    assert code == 2, told
    assert calls(tmp_path)[-5:] == ["fit --score", "precision", "figures --fp8", "publish", "results"]
    assert fake(body="if name == 'results': sys.exit(1)")[0] == 1
    code, told = fake(body="if '--score' in words: ask(signal.SIGTERM); time.sleep(30)")
    assert (code, calls(tmp_path)) == (3, ["publish", "fit --score", "publish"]), told
    assert fake()[0] == 0       # again: everything is computed anew, nothing is trained
    assert calls(tmp_path)[:2] == ["publish", "fit --score"]


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
