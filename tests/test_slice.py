"""A study goes on slice by slice from what was kept alone: what is run, in which order, and what waits for what."""

import gzip
import json
import shutil
import subprocess

import pytest

from scaling import slice as room
from tests.slice_cases import SENTENCE, calls, fake_slice, rows


@pytest.fixture
def fake(tiny, tmp_path, monkeypatch, capfd):
    with fake_slice(tiny, tmp_path, monkeypatch, capfd) as call:
        yield call


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
    assert calls(tmp_path) == ["publish", "sweep --run only=b_bf16_t20_s1", "sweep --run only=b_bf16_t10_s1", "fit --score",
                               "precision", "figures --fp8", "publish", "results"]
    assert (tmp_path / "kept/law/prediction_b_bf16_t20_s1.json").read_text() == frozen
    assert "no sample of b_bf16_t20_s1: the checkpoints are not on this machine" in told
    first, second, third = rows(tmp_path)
    assert [row["runs"] for row in (first, second, third)] == [["a_bf16_t20_s1"], ["a_bf16_t10_s1"],
                                                              ["b_bf16_t20_s1", "b_bf16_t10_s1"]]
    assert [row["exit"] for row in (first, second, third)] == [3, 3, 0]
    assert [row["predicted"] for row in (first, second, third)] == [[], ["b_bf16_t20_s1", "b_bf16_t10_s1"], []]
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


def test_without_git_only_a_named_commit_lets_what_is_held_out_begin(fake, tmp_path):
    assert fake("commit=abc")[0] == 3
    for words in ((), ("commit=abc",)):     # that of the slice that froze the predictions is older than they are
        code, told = fake(*words)
        assert (code, calls(tmp_path)) == (3, ["publish", "publish"]), told
        assert SENTENCE in told and "with commit=HASH of that commit" in told
    assert fake("commit=def")[0] == 0 and "fit --score" in calls(tmp_path)


def test_that_git_ignores_what_is_kept_is_said(fake, tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True, timeout=60)
    (tmp_path / ".gitignore").write_text("kept/\n")
    assert fake()[0] == 3
    code, told = fake()
    assert code == 0 and "git ignores kept: nothing but the files' own dates shows" in told


def test_every_finished_run_is_named_by_one_row(fake, tmp_path):
    """One that a killed slice has finished; and rows are not lost where the folder that is kept was put back."""
    body = "if name == 'sweep': finish(runs[-1]); sys.exit(3)"
    run = tmp_path / "out/tiny/a_bf16_t20_s1"
    run.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (run / name).write_text("{}")
    (run / "summary.json").write_text('{"run_id": "a_bf16_t20_s1"}')
    fake(body="if name == 'sweep': sys.exit(3)")
    shutil.rmtree(tmp_path / "kept")
    fake(body=body)
    fake(body=body)
    assert [row["runs"] for row in rows(tmp_path)] == [["a_bf16_t20_s1"], ["a_bf16_t10_s1"], []]
    shutil.rmtree(tmp_path / "out")
    fake(body=body)
    assert [row["runs"] for row in rows(tmp_path)] == [["a_bf16_t20_s1"], ["a_bf16_t10_s1"], [], []]
    assert (tmp_path / "out/tiny/slices.jsonl").read_bytes() == (tmp_path / "kept/slices.jsonl").read_bytes()


def test_a_study_of_learning_rates_is_judged_though_one_of_them_failed(fake, tmp_path):
    file = tmp_path / "study_tiny.py"
    file.write_text(file.read_text().replace("seeds=(1,), held_out=False", "lr=(0.1, 0.2)").replace("held_out=True", ""))
    run = "a_bf16_lr0.1_t20_s1"
    for body, want in ((f"if name == 'sweep': finish('{run}'); sys.exit(1)", 1), (
            f"if name == 'sweep': finish('{run}'); sys.exit(1)\nif name == 'learning_rate': sys.exit(3)", 3)):
        code, told = fake(body=body)
        assert (code, calls(tmp_path)[-3:]) == (want, ["sweep --run", "learning_rate", "publish"]), told
    assert fake(body="if name == 'sweep': sys.exit(3)")[0] == 3 and "learning_rate" not in calls(tmp_path)


def test_what_is_given_up_keeps_the_rest_from_nothing(fake, tmp_path):
    """A run that fails each time: without skip= the held-out size would wait for it for good."""
    assert fake(body="if name == 'sweep': finish(runs[0]); sys.exit(1)")[0] == 1
    code, told = fake("skip=a_bf16_t10_*")
    assert (code, calls(tmp_path)[1:4]) == (3, ["precision", "fit --predict", "fit --predict"]), told
    code, told = fake("skip=a_bf16_t10_*,b_bf16_t10_s1", "commit=abc")
    assert (code, calls(tmp_path)[1:3]) == (0, ["sweep --run only=b_bf16_t20_s1", "fit --score"]), told
    assert "0 of 2 are left, 2 given up, exit code 0" in told
    assert [row["skipped"] for row in rows(tmp_path)] == [[], ["a_bf16_t10_s1"], ["a_bf16_t10_s1", "b_bf16_t10_s1"]]
    code, told = fake("skip=a_bf16_t10_*,c_*")
    assert code == 2 and "skip='c_*' matches no run of" in told
    code, told = fake("skip=*")
    assert code == 2 and "skip='*' gives up every run of" in told and len(rows(tmp_path)) == 3


def test_a_trunk_is_given_up_with_its_branches(fake, tmp_path):
    """sweep.py would run the trunk for a branch of it, and fail again."""
    code, told = fake("skip=a_bf16_t20_s1")
    assert (code, calls(tmp_path)[:2]) == (3, ["precision", "fit --predict"]), told
    assert rows(tmp_path)[0]["skipped"] == ["a_bf16_t10_s1", "a_bf16_t20_s1"]


def test_the_largest_speaks_while_its_checkpoint_is_there_though_its_branches_wait(fake, tmp_path):
    fake()
    body = """
if name == 'sweep':
    finish('b_bf16_t20_s1')
    (folder / 'b_bf16_t20_s1/checkpoints/step_00000009').mkdir(parents=True, exist_ok=True)
    (folder / 'b_bf16_t20_s1/checkpoints/step_00000009/DONE').touch()
    sys.exit(3)"""
    assert fake("commit=abc", body=body)[0] == 3    # the limit cut what was to come after the trunk
    assert calls(tmp_path)[1:] == ["sweep --run only=b_bf16_t20_s1", "sample", "publish"]
    assert (tmp_path / "kept/b_bf16_t20_s1/samples.txt").exists()
    (tmp_path / "kept/b_bf16_t20_s1/samples.txt").unlink()
    (tmp_path / "out/tiny/b_bf16_t20_s1/samples.txt").unlink()
    assert fake("commit=abc", body=body)[0] == 3 and calls(tmp_path)[1:3] == ["sample", "sweep --run only=b_bf16_t10_s1"]


def test_samples_are_taken_while_the_checkpoint_is_there(fake, tmp_path):
    fake()
    body = """
if name == 'sweep':
    (folder / runs[0] / 'checkpoints/step_00000009').mkdir(parents=True)
    (folder / runs[0] / 'checkpoints/step_00000009/DONE').touch()
if name == 'sample' and (here / 'mute').exists(): print('half'); sys.exit(1)"""
    (tmp_path / "mute").touch()
    assert fake("commit=abc", body=body)[0] == 1        # the rest is made all the same
    assert calls(tmp_path)[3:7] == ["sweep --run only=b_bf16_t10_s1", "sample", "sample", "fit --score"]
    assert not (tmp_path / "kept/b_bf16_t20_s1/samples.txt").exists()
    (tmp_path / "mute").unlink()
    assert fake(body=body)[0] == 0
    text = (tmp_path / "kept/b_bf16_t20_s1/samples.txt").read_text()
    assert text == ("$ python -m eval.sample out/tiny/b_bf16_t20_s1 n=4 tokens=150 seed=1\n\n"
                    "said by out/tiny/b_bf16_t20_s1\n")
    assert fake()[0] == 0 and "sample" not in calls(tmp_path)


def test_the_sources_of_the_data_are_kept(fake, tmp_path, data_dir):
    fake()
    kept = json.loads((tmp_path / "kept/data.json").read_text())
    assert kept == {source: json.loads((data_dir / source / "index.json").read_text()) for source in ("code", "web")}
