"""Rows of metrics.jsonl through resumes, rollbacks, kills, full disks: what counts stays, in order, whole."""

import json
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from runtime import log as metrics
from tests.conftest import ROOT
from tests.test_metrics import log, of, read, rolled_back, row, val


def test_a_rollback_relabels_what_it_undid(tiny, capsys):
    one = rolled_back(tiny)
    one.validation(val(6, loss=2.5))
    assert [one.has_validation(step) for step in (2, 3, 4, 6)] == [True, False, True, True]
    one.close()
    assert of(read(tiny), "kind", "step", "loss") == [
        ("train", 1, 2.0), ("train", 2, 2.0), ("val", 2, 1.5), ("train", 3, 2.0), ("train", 4, 2.0), ("val", 4, 1.5),
        ("undone", 5, 2.0), ("undone", 6, 2.0), ("undone_val", 6, 1.5), ("event", 6, None), ("train", 5, 9.0), ("train", 6, 9.0),
        ("val", 6, 2.5)]
    assert metrics.validation_losses(tiny.run_dir / "metrics.jsonl") == {2: 1.5, 4: 1.5, 6: 2.5}
    assert "rollback" not in capsys.readouterr().out        # an event is for machines


def test_after_a_rollback_a_validation_is_due_again(tiny):
    one = rolled_back(tiny)
    assert not one.has_validation(6)
    one.roll_back(3, {"event": "rollback", "step": 6, "to": 3})
    assert [one.has_validation(step) for step in (2, 4)] == [True, False]
    one.close()
    assert [r["step"] for r in read(tiny) if r["kind"] == "train"] == [1, 2, 3]
    assert [r["step"] for r in read(tiny) if r["kind"] == "undone"] == [4, 5, 6, 5, 6]


@pytest.mark.parametrize("step, kinds", [
    (6, "train train val train train val undone undone undone_val event train train"),
    (5, "train train val train train val undone undone undone_val event train"),
    (4, "train train val train train val"),     # a checkpoint of before the rollback: it will happen again
    (3, "train train val train"), (2, "train train val"), (0, "")])
def test_a_resume_keeps_the_rows_in_file_order(tiny, step, kinds):
    rolled_back(tiny).close()
    again = log(tiny, step)
    assert again.has_validation(2) == (step >= 2)
    again.close()
    assert " ".join(r["kind"] for r in read(tiny)) == kinds


def test_what_happened_right_after_the_resumed_step_stays(tiny):
    one = log(tiny)
    one.step(row(1))
    one.event({"event": "save_failed", "step": 1, "reason": "disk"})
    one.validation(val(1))
    one.event({"event": "save_failed", "step": 2})
    one.step(row(2))
    one.close()
    log(tiny, resume=1).close()
    assert of(read(tiny), "kind", "event", "step") == [("train", None, 1), ("event", "save_failed", 1), ("val", None, 1)]


def test_a_lost_tail_costs_the_rows_that_are_lost_alone(tiny):
    one = log(tiny)
    for step in (1, 2, 3):
        one.step(row(step))
    one.event({"event": "save_failed", "step": 1})      # told late
    one.close()
    log(tiny, resume=5).close()
    assert of(read(tiny), "kind", "step") == [("train", 1), ("train", 2), ("train", 3)]
    one = log(tiny, resume=3)
    one.event({"event": "save_failed", "step": 1})
    one.close()
    log(tiny, resume=2).close()
    assert of(read(tiny), "kind", "step") == [("train", 1), ("train", 2)]


def test_a_branch_keeps_its_own_rows_alone(tiny):
    one = log(tiny, resume=4)       # its parent's step; no row of it is here
    one.step(row(5))
    assert read(tiny)[0]["since_start"] == 1
    one.close()
    log(tiny, resume=4).close()
    assert read(tiny) == []


def test_steps_since_the_start_are_counted_not_subtracted(tiny):
    one = log(tiny, resume=4)
    one.step(row(5))
    one.roll_back(2, {"event": "rollback", "step": 5, "to": 2})
    one.step(row(3))
    one.close()
    assert of(read(tiny), "kind", "since_start") == [("undone", 1), ("event", None), ("train", 2)]


# ------------------------------------------------------------------------------------------------------ kills and faults

def test_a_kill_after_any_byte_leaves_whole_rows(tiny):
    rolled_back(tiny).close()
    path = tiny.run_dir / "metrics.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(True)
    ends = [i for i, byte in enumerate(whole) if byte == 10]
    cuts = {end + near for end in ends for near in (-40, -2, -1, 0, 1, 2, 15)}     # an end of a row, and inside it
    for cut in sorted(cut for cut in cuts if ends[0] <= cut <= len(whole)):
        complete = whole[:cut].count(b"\n") + (whole[cut:cut + 1] == b"\n")        # whole but for its line end is whole
        last = max(i for i, line in enumerate(lines[:complete]) if b'"train"' in line)
        path.write_bytes(whole[:cut])
        log(tiny, resume=json.loads(lines[last])["step"]).close()
        kept = path.read_bytes().splitlines(True)
        assert kept == lines[:len(kept)] and last < len(kept) <= complete


@pytest.mark.parametrize("dies_in", ["fsync", "replace"])
def test_a_rollback_that_dies_leaves_the_file_as_it_was(tiny, monkeypatch, dies_in):
    one = log(tiny)
    for step in range(1, 4):
        one.step(row(step))
    before = one.path.read_bytes()

    def die(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"runtime.rows.os.{dies_in}", die)
    with pytest.raises(KeyboardInterrupt):
        one.roll_back(1, {"event": "rollback", "step": 3, "to": 1})
    assert one.path.read_bytes() == before and [p.name for p in tiny.run_dir.iterdir()] == ["metrics.jsonl"]


def test_a_process_killed_in_rollbacks_leaves_before_or_after(tiny):
    tiny.run_dir.mkdir(parents=True)
    code = f"""if True:
        import sys
        from dataclasses import replace
        from runtime import log as metrics
        from tests.test_metrics import row
        from types import SimpleNamespace as S
        from pathlib import Path
        config = S(run_dir=Path({str(tiny.run_dir)!r}), log=S(to=(), every=10**9), run="x", data=S(tokens_per_step=512))
        one, step = metrics.Log(config, 0, 10**9), 0
        print("begun", flush=True)
        while True:
            one.step(row(step := step + 1))
            if step % 20 == 0:
                one.roll_back(step - 10, {{"event": "rollback", "step": step, "to": step - 10}})
                one.step(row(step))"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"begun\n"
        time.sleep(0.3)
    finally:
        process.kill()
        process.wait()
    text = (tiny.run_dir / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()[:-1]]        # none but the last may be torn
    assert len(rows) > 100
    at = [i for i, r in enumerate(rows) if r["kind"] == "event"]
    assert at and all(rows[i - 1]["kind"] == "undone" and rows[i - 1]["step"] == rows[i]["step"] for i in at)


@pytest.mark.parametrize("junk", [b"[1]\n", b"7\n", b"null\n", b'{"kind": "train"}\n', b'{"step": 2}\n', b"\xff\x00\n",
                                  b'{"kind": "train", "step": "2"}\n', b"[" * 100_000 + b"\n"])
def test_junk_in_the_file_costs_nothing_but_itself(tiny, junk):
    one = log(tiny)
    one.step(row(1))
    one.close()
    path = tiny.run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + junk + b'{"kind": "train", "step": 2, "loss": 3.0}\n')
    assert metrics.validation_losses(path) == {}
    log(tiny, resume=2).close()
    assert of(read(tiny), "step", "loss") == [(1, 2.0), (2, 3.0)]


def test_a_full_disk_makes_rows_wait_and_loses_none(tiny, capsys):
    one = log(tiny)
    one.step(row(1))
    size = (tiny.run_dir / "metrics.jsonl").stat().st_size
    with largest_file(size + 10):       # room for ten bytes of the next row
        for step in (2, 3, 4):
            one.step(row(step))
        one.event({"event": "save_failed", "step": 4})
    assert (tiny.run_dir / "metrics.jsonl").stat().st_size == size + 10
    out = capsys.readouterr().out
    assert out.count("rows wait for room, training goes on") == 1 and "File too large" in out
    one.step(row(5))
    one.close()
    assert of(read(tiny), "kind", "step") == [*[("train", s) for s in (1, 2, 3, 4)], ("event", 4), ("train", 5)]


def test_rows_that_wait_survive_a_rollback_and_a_close_counts_them(tiny, capsys, monkeypatch):
    one = log(tiny)
    one.step(row(1))
    monkeypatch.setattr(one, "_file", SimpleNamespace(write=full_disk, close=lambda: None))
    for step in (2, 3):
        one.step(row(step))
    one.roll_back(2, {"event": "rollback", "step": 3, "to": 2})
    assert of(read(tiny), "kind", "step") == [("train", 1), ("train", 2), ("undone", 3), ("event", 3)]
    monkeypatch.setattr(one, "_file", SimpleNamespace(write=full_disk, close=lambda: None))
    one.step(row(3))
    one.step(row(4))
    one.close()
    assert "the last 2 rows are lost, there was no room for them" in capsys.readouterr().out


@pytest.mark.parametrize("spare", [-10**9, 0, 60, 300])     # bytes by which a file may outgrow what is there
def test_a_rollback_waits_for_room_and_training_goes_on(tiny, capsys, spare):
    one, twin = rolled_back(tiny), rolled_back(replace(tiny, run="twin"))
    before = one.path.read_bytes()
    with largest_file(max(0, len(before) + spare)):
        go_on(one)
        assert one.path.read_bytes() == before or spare == 300      # the old file, whole, while the new one has no room
        assert len(list(tiny.run_dir.iterdir())) == 1
        assert not one.has_validation(6)
    go_on(twin)
    for each in one, twin:
        each.step(row(7))
        each.close()
    assert one.path.read_bytes() == twin.path.read_bytes()          # nothing lost, nothing twice, in order
    assert capsys.readouterr().out.count("rows wait for room, training goes on") == 1


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_rollback_that_never_finds_room_ends_no_run_and_is_told(tiny, capsys, monkeypatch, fails):
    one = rolled_back(tiny)
    before = one.path.read_bytes()
    monkeypatch.setattr(f"runtime.rows.os.{fails}", full_disk)
    go_on(one)
    one.close()
    out = capsys.readouterr().out
    assert one.path.read_bytes() == before
    assert out.count("No space left on device; rows wait for room, training goes on") == 1
    assert "the last 6 rows are lost, there was no room for them; steps that a rollback undid still stand" in out
    monkeypatch.undo()
    log(tiny, resume=4).close()     # a kill leaves the same, and a resume goes on from it
    assert [r["step"] for r in read(tiny)] == [1, 2, 2, 3, 4, 4]


def go_on(one):
    """Back from 6 to 4, 5 and 6 again, back to 5, once more 6: six rows more."""
    one.roll_back(4, {"event": "rollback", "step": 6, "to": 4})
    one.step(row(5, loss=7.0))
    one.step(row(6, loss=7.0))
    one.roll_back(5, {"event": "rollback", "step": 6, "to": 5})
    one.event({"event": "save_failed", "step": 5})
    one.step(row(6, loss=6.0))


def test_a_start_without_room_is_refused_and_keeps_what_was_there(tiny, monkeypatch):
    one = rolled_back(tiny)
    before = one.path.read_bytes()
    with largest_file(100), pytest.raises(OSError, match="File too large"):
        log(tiny, resume=6)
    assert one.path.read_bytes() == before


def test_a_step_validated_again_keeps_its_row(tiny, capsys):
    one = log(tiny)
    one.step(row(1))
    one.validation(val(1))
    one.validation(val(1))
    one.close()
    one = log(tiny, resume=1)       # a kill came before the summary
    one.validation(val(1))
    one.close()
    assert of(read(tiny), "kind", "step") == [("train", 1), ("val", 1)]
    assert capsys.readouterr().out.count("step 1: validation loss 1.5000") == 3


@contextmanager
def largest_file(size):
    """A disk without room, as one process can have it: no file grows beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def full_disk(*arguments, **options):
    raise OSError(28, "No space left on device")


def test_a_console_that_is_gone_does_not_end_a_run(tiny, monkeypatch):
    monkeypatch.setattr("builtins.print", full_disk)
    one = log(tiny)
    one.step(row(1))
    one.say("hello")
    one.close()
    assert len(read(tiny)) == 1


def test_throughput_counts_no_undone_row(tiny):
    rolled_back(tiny).close()
    rows = read(tiny)
    assert metrics.throughput(rows, 512, 1, None) == metrics.throughput([r for r in rows if r["kind"] == "train"], 512, 1, None)
