"""What is published is whole, equal to what was there, and a folder of runs that the other commands read."""

import gzip
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from scaling_runs import write_run

from scaling import publish as room
from scaling.grid import ENDED
from scaling.publish import main, publish
from scaling.records import read_curve, read_runs
from tests.conftest import ROOT

PUBLISHED = {"config.json", "metrics.jsonl.gz", "probe.jsonl.gz", "samples.txt", "summary.json", "val_losses.npz"}


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def declaration(*runs, **changes):
    return {"format_version": 1, "study": "x", "declared": "2026-11-20T08:00:00Z", "margin_percent": 1.0, "held_out": [],
            "runs": [{"run": run, "tokens": 1} for run in runs], **changes}


@pytest.fixture
def out(tmp_path):
    """A folder as sweep.py leaves it: two finished runs, one that goes on, laws, logs, checkpoints."""
    folder = tmp_path / "out"
    for seed, name in enumerate(("a_bf16", "a_fp8")):
        write_run(folder / name, recipe=name[2:].replace("fp8", "tensorwise"), seed=1, noise_seed=seed)
        (folder / name / "probe.jsonl").write_text('{"kind": "block"}\n')
        (folder / name / "samples.txt").write_text("Once\n")
        (folder / name / "env.json").write_text('{"host": "secret"}')
        (folder / name / "checkpoints/step_00000009").mkdir(parents=True)
        (folder / name / "checkpoints/step_00000009/DONE").touch()
        (folder / f"{name}.log").write_text("told\n")
    (folder / "a_fp8/figures").mkdir()
    (folder / "a_fp8/figures/fp8_gap.png").write_bytes(b"old")
    (folder / "b_bf16").mkdir()
    (folder / "b_bf16/config.json").write_text("{}")
    (folder / "b_bf16/metrics.jsonl").write_text("{}\n")
    (folder / "law").mkdir()
    for name in ("law.json", "prediction_b.json", "figure.png", "figure.svg"):
        (folder / "law" / name).write_text(f"first {name}")
    (folder / "data.json").write_text("{}")
    (folder / "study.json").write_text(json.dumps(declaration("a_bf16", "a_fp8", "b_bf16")))
    return folder


def test_what_is_copied_and_what_is_not(out, tmp_path, capsys):
    target = tmp_path / "results/x"
    assert main([str(out), str(target)]) == 0
    assert capsys.readouterr().out == f"published 2 runs from {out} into {target}: a_bf16, a_fp8\n"
    got = files(target)
    want = {f"{run}/{name}" for run in ("a_bf16", "a_fp8") for name in PUBLISHED}
    assert got.keys() == want | {"study.json", "data.json", "law/law.json", "law/prediction_b.json", "law/figure.png",
                                 "a_fp8/figures/fp8_gap.png"}
    for name, content in got.items():
        plain = gzip.decompress(content) if name.endswith(".gz") else content
        assert plain == (out / name.removesuffix(".gz")).read_bytes()
    assert not list(target.rglob(".*"))


def test_the_same_bytes_again_there_and_back(out, tmp_path, capsys):
    assert publish(out, tmp_path / "one")[1] == publish(out, tmp_path / "two")[1] == []
    os.utime(out / "a_fp8/metrics.jsonl", (1, 1))
    assert publish(out, tmp_path / "three")[1] == []
    assert files(tmp_path / "one") == files(tmp_path / "two") == files(tmp_path / "three")
    assert (tmp_path / "one/a_fp8/metrics.jsonl.gz").read_bytes()[4:8] == bytes(4)      # no time in it
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*") if path.is_file()}
    told, refused = publish(out, tmp_path / "one")
    assert (told, refused) == ([f"published 0 runs from {out} into {tmp_path}/one; 2 are there already"], [])
    assert all(path.stat().st_mtime_ns == then for path, then in before.items() if path.name != "study.json")
    assert publish(tmp_path / "one", out)[1] == []                  # back to where checkpoints and plain logs are
    assert (out / "a_fp8/metrics.jsonl").exists() and not (out / "a_fp8/metrics.jsonl.gz").exists()
    assert publish(tmp_path / "one", tmp_path / "fresh")[1] == []   # and to a bare machine
    assert files(tmp_path / "fresh") == files(tmp_path / "one")
    records, notes = read_runs([tmp_path / "fresh"])
    assert [record.run_id for record in records] == ["a_bf16", "a_fp8"] and not notes
    for one, other in zip(records, read_runs([out])[0], strict=True):
        assert one.summary_sha256 == other.summary_sha256
        assert np.array_equal(read_curve(one), read_curve(other)) and len(read_curve(one)[0])


def test_a_log_packed_elsewhere_is_copied_as_it_is(out, tmp_path):
    """Another zlib makes other bytes of the same log."""
    publish(out, tmp_path / "one")
    path = tmp_path / "one/a_fp8/metrics.jsonl.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1, mtime=5))
    assert publish(tmp_path / "one", tmp_path / "two")[1] == []
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert publish(out, tmp_path / "two")[1] == []
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.parametrize("name", ["summary.json", "config.json", "val_losses.npz", "metrics.jsonl.gz", "samples.txt",
                                  "../law/prediction_b.json"])
def test_an_edited_file_is_refused_and_named_and_the_rest_is_copied(out, tmp_path, capsys, name):
    target = tmp_path / "results"
    publish(out, target)
    path = (target / "a_bf16" / name).resolve()
    edited = path.read_bytes()
    edited = gzip.compress(gzip.decompress(edited) + b"{}\n") if path.suffix == ".gz" else edited + b" "
    path.write_bytes(edited)
    write_run(out / "c_bf16", params=50_000)
    for one, other in ((out, target), (target, out)):
        assert main([str(one), str(other)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and str(path) in told and "differs from" in told and "restore" in told
    assert path.read_bytes() == edited and (target / "c_bf16/summary.json").exists()


@pytest.mark.parametrize("break_it, told", [
    (lambda run: (run / "summary.json").write_text('{"run'), "summary.json is not valid JSON"),
    (lambda run: (run / "summary.json").write_text("[]"), "holds a list"),
    (lambda run: (run / "summary.json").write_text('{"run_id": "other"}'), "its run_id is another"),
    (lambda run: (run / "metrics.jsonl").rename(run / "metrics.jsonl.gz"), "cannot be unpacked"),
])
def test_a_damaged_run_is_refused_and_keeps_no_other_from_being_copied(out, tmp_path, capsys, break_it, told):
    break_it(out / "a_bf16")
    assert main([str(out), str(tmp_path / "to")]) == 2
    assert told in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert [path.parent.name for path in (tmp_path / "to").glob("*/summary.json")] == ["a_fp8"]
    assert not (tmp_path / "to/a_bf16").exists() and not list((tmp_path / "to").glob(".*"))


def test_what_was_not_there_at_first_is_added(out, tmp_path):
    target = tmp_path / "to"
    for name in ("samples.txt", "figures/fp8_gap.png"):
        (out / "a_fp8" / name).rename(tmp_path / name.split("/")[-1])
    publish(out, target)
    assert not (target / "a_fp8/samples.txt").exists()
    (tmp_path / "samples.txt").rename(out / "a_fp8/samples.txt")
    (out / "a_fp8/figures/fp8_gap.png").write_bytes(b"new")
    (out / "law/law.json").write_text("second")
    assert publish(out, target)[1] == []
    assert (target / "a_fp8/samples.txt").read_text() == "Once\n"
    assert (target / "a_fp8/figures/fp8_gap.png").read_bytes() == b"new"
    assert (target / "law/law.json").read_text() == "second"        # computed anew from the runs
    (out / "a_fp8/samples.txt").unlink()
    assert publish(out, target)[1] == [] and (target / "a_fp8/samples.txt").exists()


def test_a_run_that_lacks_a_file_is_copied_and_told(out, tmp_path):
    (out / "a_fp8/val_losses.npz").unlink()
    (out / "a_fp8/probe.jsonl").unlink()
    told, refused = publish(out, tmp_path / "to")
    assert told[1:] == [f"{out}/a_fp8 has no val_losses.npz"] and not refused


def test_a_run_that_has_begun_where_it_should_go_is_refused(out, tmp_path):
    target = tmp_path / "to"
    (target / "a_fp8/checkpoints").mkdir(parents=True)
    assert publish(out, target)[1] == [
        f"{target}/a_fp8 has begun, and {out}/a_fp8 is the same run, finished: remove {target}/a_fp8 to use what is finished"]
    assert not (target / "a_fp8/figures").exists()


@pytest.mark.parametrize("old, new, left", [
    (declaration("a"), declaration("a", "b"), "new"), (declaration("a", "b"), declaration("a"), "old"),
    (declaration("a"), declaration("a", held_out=["b"]), "new"), (declaration("a"), declaration("b"), None),
    (declaration("a"), declaration("a", margin_percent=2.0), None), (declaration("a"), declaration("a", declared="now"), None),
    (declaration("a"), declaration("a", runs=[{"run": "a", "tokens": 2}]), None), (declaration("a"), {"runs": 1}, None),
])
def test_a_declaration_may_grow_and_nothing_else(out, tmp_path, old, new, left):
    target = tmp_path / "to"
    (out / "study.json").write_text(json.dumps(old))
    publish(out, target)
    (out / "study.json").write_text(json.dumps(new))
    refused = publish(out, target)[1]
    assert json.loads((target / "study.json").read_text()) == (new if left == "new" else old)
    assert bool(refused) == (left is None)
    if refused:
        assert f"{out}/study.json and {target}/study.json declare one study differently" in refused[0]
        for name in ("a_bf16", "a_fp8"):
            (target / name / "summary.json").unlink()
        publish(out, target)        # of which no run has finished there
        assert json.loads((target / "study.json").read_text()) == new


@pytest.mark.parametrize("last", [8, 13])       # files written: in the midst of a run, and all of it but for the rename
def test_killed_in_the_middle_it_leaves_no_run_that_is_not_whole(out, tmp_path, monkeypatch, last):
    class Killed(BaseException):
        pass

    written = []

    def kill(path, content, write=room.write):
        write(path, content)
        written.append(path.name)
        if len(written) == last:
            raise Killed

    target = tmp_path / "to"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(room, "write", kill)
        publish(out, target)
    assert written[-1] == ("config.json" if last == 8 else "summary.json")
    told, refused = publish(target, tmp_path / "elsewhere")
    assert "published 1 runs" in told[0] and not refused
    there = [path for path in target.iterdir() if path.is_dir()]
    assert sorted(path.name for path in there) == [".a_fp8.partial", "a_bf16"]
    assert {path.name for path in (target / "a_bf16").iterdir()} == PUBLISHED
    assert [record.run_id for record in read_runs([target])[0]] == ["a_bf16"]
    assert publish(out, target)[1] == []
    publish(out, tmp_path / "unbroken")
    assert files(target) == files(tmp_path / "unbroken")


@pytest.mark.parametrize("words, told", [
    (["{here}/none", "{here}/to"], "none does not exist: name a folder of runs"), (["{here}"], "give two folders"),
    (["{here}/a_file", "{here}/to"], "a_file is a file: name a folder of runs"), (["--to", "{here}"], "give two folders"),
    (["{here}", "{here}/a_file"], "a_file is a file: name a folder"), (["{here}", "{here}/."], "cannot be published into itself"),
])
def test_mistakes_get_a_sentence(tmp_path, capsys, words, told):
    (tmp_path / "a_file").touch()
    assert main([word.format(here=tmp_path) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("scaling/publish.py: ") and told in error and error.count("\n") == 1


def test_a_full_disk_is_the_machines_fault(out, tmp_path, capsys, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(room, "write", full)
    assert main([str(out), str(tmp_path / "to")]) == 1
    assert capsys.readouterr().err == f"scaling/publish.py: {tmp_path}/to/study.json: No space left on device\n"


def test_it_runs_as_a_script_without_torch_or_matplotlib(out, tmp_path):
    code = ("import sys; sys.argv = ['publish.py', *sys.argv[1:]]; from scaling.publish import main; code = main(); "
            "sys.exit(code or bool({'torch', 'matplotlib'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code, str(out), str(tmp_path / "to")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "scaling/publish.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "python scaling/publish.py out/h100 results/study_h100" in done.stdout) == (0, True)


def test_what_a_failed_run_told_is_kept_without_the_machines_names(out, tmp_path, monkeypatch):
    """Its diagnosis and the end of its log, for both go with the machine; until it has finished all the same."""
    assert room.ENDED == ENDED
    monkeypatch.setattr(room.platform, "node", lambda: "box7")
    (out / "b_bf16.log").write_text(
        f"first try\n{ENDED}-9\nstarting, 8.1k tok/s, see https://a.org/b/c\n"
        f"  File \"/opt/py/site-packages/torch/nn/x.py\", line 1\n  File \"{ROOT}/train.py\", line 2\n"
        f"train.py: loss nan on box7:1\nmore in /home/me/out/b_bf16/diagnosis.json\n{ENDED}1\n")
    (out / "b_bf16/diagnosis.json").write_text('{"problems": ["/home/me/a: boxes"], "step": 7}\n')
    (out / "c_bf16.log").write_text(f"one failure\n{ENDED}1\ngoes on\n")       # it is running
    (out / "d_bf16.log").write_text(f"asked to leave\n{ENDED}0\n")
    (out / "a_bf16.log").write_text(f"one failure\n{ENDED}1\n")                 # it has finished
    target = tmp_path / "to"
    told, refused = publish(out, target)
    assert told[1:] == [f"what b_bf16 told of its failure is in {target}/failed"] and not refused
    got = files(target / "failed")
    assert got.keys() == {"b_bf16.log", "b_bf16.diagnosis.json"}
    assert got["b_bf16.log"].decode() == (
        "starting, 8.1k tok/s, see https://a.org/b/c\n  File \".../site-packages/torch/nn/x.py\", line 1\n"
        f"  File \"train.py\", line 2\ntrain.py: loss nan on HOST:1\nmore in .../diagnosis.json\n{ENDED}1\n")
    assert json.loads(got["b_bf16.diagnosis.json"]) == {"problems": [".../a: boxes"], "step": 7}
    assert publish(out, target)[1] == publish(target, tmp_path / "bare")[1] == [] and files(target / "failed") == got
    assert not (tmp_path / "bare/failed").exists()
    (out / "b_bf16.log").write_text("x" * 10**6 + f"\n{ENDED}1\n")
    publish(out, target)
    assert 60_000 < len(files(target / "failed")["b_bf16.log"]) < 70_000
    shutil.rmtree(out / "b_bf16")
    write_run(out / "b_bf16", params=50_000)
    assert len(publish(out, target)[0]) == 1 and not files(target / "failed")
