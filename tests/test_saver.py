"""Saving: in the background, agreed by all ranks, and never at the cost of what is there already."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from bench import checkpoint as bench
from runtime import checkpoint
from runtime import checkpoint as saver
from runtime.checkpoint import Saver, checkpoints, kept, latest, read_manifest, restore
from runtime.cli import MachineError
from runtime.config import CheckpointConfig, config_from_dict  # noqa: F401 - config_from_dict is used by the killed process
from runtime.optim import OptimConfig
from tests.conftest import ROOT
from tests.test_checkpoint import ALONE, empty, names, read_back, same, save, tensors


def begin(config, losses=(), **policy):
    return Saver(config.run_dir, CheckpointConfig(**{"every": 1, "keep": 9, **policy}), ALONE, dict(losses))


def full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.fixture
def gate(monkeypatch):
    """Saves stop before they hash until the gate is set."""
    gate, real = threading.Event(), saver.sha256_of

    def slow(path):
        assert gate.wait(60)
        return real(path)

    monkeypatch.setattr(saver, "sha256_of", slow)
    yield gate
    gate.set()


# ---------------------------------------------------------------------------------------------------- in the background

def test_saving_happens_in_the_background(tiny, gate):
    saver, live = begin(tiny), tensors(1)
    saver.save(1, live, {}, tiny)       # would wait for ever if it hashed here
    saver.staged()
    for t in live.values():             # what an optimizer's step does next
        t.fill_(0)
    assert latest(tiny.run_dir) is None
    gate.set()
    saver.finish()
    assert same(read_back(latest(tiny.run_dir)), 1)


def test_the_tensors_are_not_touched_before_they_are_copied(tiny, monkeypatch):
    copying, real, order = threading.Event(), saver._host_buffer, []

    def slow(live):
        assert copying.wait(60)
        order.append("copied")
        return real(live)

    monkeypatch.setattr(saver, "_host_buffer", slow)
    it, live = begin(tiny), tensors(1)
    it.save(1, live, {}, tiny)          # returns though nothing is copied
    assert order == []
    threading.Timer(0.2, copying.set).start()
    it.staged()
    order.append("stepped")
    for t in live.values():
        t.fill_(0)
    it.staged()                         # again: at once
    it.finish()
    assert order == ["copied"] * 3 + ["stepped"]
    assert same(read_back(latest(tiny.run_dir)), 1)


def test_the_state_is_that_of_the_call(tiny, gate):
    saver, state = begin(tiny), {"guard": {"window": [1.0, 2.5]}}
    saver.save(1, tensors(1), state, tiny)
    state["guard"]["window"].append(3.0)
    gate.set()
    saver.finish()
    assert read_manifest(latest(tiny.run_dir))["state"] == {"guard": {"window": [1.0, 2.5]}, "moved_on": 0}


def test_buffers_made_ahead_are_those_of_the_first_save(tiny, monkeypatch):
    """A run's first save comes long after its start, and must not make the loop wait for fresh pages."""
    made, real = [], saver._host_buffer
    monkeypatch.setattr(saver, "_host_buffer", lambda live: made.append(1) or real(live))
    live, keeper = tensors(1), begin(tiny)
    keeper.prepare(live)
    keeper._thread.submit(int).result()     # what was asked for before is done
    assert len(made) == len(live)
    keeper.save(3, live, {}, tiny)
    keeper.finish()
    assert len(made) == len(live)
    assert same(read_back(latest(tiny.run_dir)), 1)


def test_the_host_buffers_are_used_again(tiny):
    saver = save(tiny, 1)
    before = {name: t.data_ptr() for name, t in saver._copies.items()}
    saver.save(2, tensors(2), {}, tiny)
    saver.finish()
    assert {name: t.data_ptr() for name, t in saver._copies.items()} == before
    assert same(read_back(latest(tiny.run_dir)), 2)


def test_a_step_that_is_there_is_not_written_again(tiny):
    saver = save(tiny, 1)
    saver.save(1, tensors(5), {}, tiny)
    saver.finish()
    assert same(read_back(latest(tiny.run_dir)), 1)
    assert saver.failures == []


def test_writing_does_not_wait_for_a_gpu(tiny, monkeypatch):
    """What is written lies in host memory; torch's loader for tensors of a GPU would wait for the stream that trains."""
    real = saver.dcp.save

    def beside_a_gpu(*args, **others):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            loader = "torch.distributed.checkpoint.filesystem._OverlappingCpuLoader"    # private; without it nothing waits
            patch.setattr(loader, full, raising=False)
            return real(*args, **others)

    monkeypatch.setattr(saver.dcp, "save", beside_a_gpu)
    assert save(tiny, 1).failures == []
    assert same(read_back(latest(tiny.run_dir)), 1)


# ------------------------------------------------------------------------------------------------------- what fails

@pytest.mark.parametrize("where, what", [(checkpoint, "_write_synced"), (saver, "sha256_of"), (saver.dcp, "save"),
                                         (saver, "_host_buffer"), (saver.shutil, "disk_usage"), (saver.os, "rename"),
                                         (saver, "sync_folder")])
def test_a_save_that_fails_is_noted_and_tried_again(tiny, monkeypatch, where, what):
    save(tiny, 1)
    it = begin(tiny)
    with monkeypatch.context() as patch:
        patch.setattr(where, what, full)
        it.save(2, tensors(2), {}, tiny)
        it.wait()
    committed = what == "sync_folder"       # that one comes after the rename
    assert names(tiny) == ["step_00000001"] + ["step_00000002"] * committed
    assert len(it.failures) == 1
    assert it.failures[0].startswith(f"checkpoint step_00000002 could not be written under {tiny.run_dir}/checkpoints (OSError: ")
    assert "No space left on device" in it.failures[0]
    with pytest.raises(MachineError, match="No space left .* free some disk space or correct the folder's rights, then run"):
        it.finish()
    it.save(3, tensors(3), {}, tiny)
    it.finish()     # the last one was good
    assert same(read_back(latest(tiny.run_dir)), 3)
    assert len(it.failures) == 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA error: out of memory\nCompile with"),
                                   RuntimeError("CUDA error: OS call failed or operation not supported on this OS")])
def test_too_little_host_memory_is_told_with_a_remedy_of_its_own(tiny, monkeypatch, error):
    def none_left(live):
        raise error

    it = begin(tiny)
    with monkeypatch.context() as patch:
        patch.setattr(saver, "_host_buffer", none_left)
        it.save(2, tensors(2), {}, tiny)
        it.wait()
    assert "its copies need 4.83e-06 GiB of host memory on this rank, and there is not enough: " in it.failures[0]
    assert it.failures[0].endswith(str(error).splitlines()[0] + ")" if str(error) else "MemoryError: )")
    with pytest.raises(MachineError, match="end other programs on that machine, .* the same command to resume") as told:
        it.finish()
    assert "disk" not in str(told.value)
    it.save(3, tensors(3), {}, tiny)        # memory may be there again
    it.finish()
    assert same(read_back(latest(tiny.run_dir)), 3)


def test_host_memory_is_counted_as_torch_pins_it():
    sizes = {"a": 4096, "b": 4097, "c": 1, "d": 0, "e": 3 * 2**20}
    live = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert saver._host_need(live, pinned=False) == sum(sizes.values())
    assert saver._host_need(live, pinned=True) == 4096 + 8192 + 1 + 0 + 4 * 2**20


def test_a_rank_that_is_gone_is_no_matter_of_disk_space(tiny, monkeypatch):
    def closed(*_):
        raise RuntimeError("Connection closed by peer")

    it = begin(tiny)
    monkeypatch.setattr(saver, "gather", closed)
    it.save(1, tensors(1), {}, tiny)
    with pytest.raises(MachineError, match="RuntimeError: Connection closed by peer.: run the same command to resume"):
        it.finish()


def test_three_failures_in_a_row_end_the_run(tiny, monkeypatch):
    it = begin(tiny)
    for step in range(1, 8):
        with monkeypatch.context() as patch:
            if step != 3:       # one good one counts the others out
                patch.setattr(checkpoint, "_write_synced", full)
            if step == 7:
                with pytest.raises(MachineError, match="3 saves in a row have failed, the last: .*step_00000006 .*No space"):
                    it.save(step, tensors(step), {}, tiny)
            else:
                it.save(step, tensors(step), {}, tiny)
                it.wait()
    assert len(it.failures) == 5
    assert names(tiny) == ["step_00000003"]


def test_too_little_space_is_told_before_anything_is_written(tiny, monkeypatch):
    save(tiny, 1)
    it = begin(tiny)
    big = {"model.a": torch.zeros(1, dtype=torch.float32).expand(2**28)}       # 1 GiB
    monkeypatch.setattr(saver, "_host_buffer", lambda live: torch.zeros(1).expand(2**28))
    monkeypatch.setattr(saver, "_local", lambda t: torch.zeros(1))
    monkeypatch.setattr(saver.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    monkeypatch.setattr(saver.dcp, "save", lambda *_, **__: pytest.fail("written"))
    it.save(2, big, {}, tiny)
    it.wait()
    assert "it needs 1 GiB, and 0.5 GiB are free" in it.failures[0]
    assert names(tiny) == ["step_00000001"]


def test_the_estimate_of_a_save_is_enough(tiny):
    save(tiny, 1)
    path = latest(tiny.run_dir)
    written = sum(f.stat().st_size for f in path.iterdir())
    need = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver.shutil, "disk_usage", lambda p: SimpleNamespace(free=0))
        patch.setattr(saver, "_gib", lambda size: need.append(size) or str(size))
        it = begin(tiny)
        it.save(2, tensors(2), {}, tiny)
        it.wait()
    assert written <= need[0] <= written + 40_000


def test_a_disk_that_fills_in_mid_file_leaves_nothing_behind(tiny):
    """A real write that fails, as on a full disk, in a process that may write no file beyond 3 KB."""
    code = f"""
import json, resource, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.test_saver import begin, config_from_dict, names, save, tensors
config = config_from_dict(json.loads(sys.argv[1]))
save(config, 1)
it = begin(config)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
it.save(2, tensors(2), {{}}, config)
it.wait()
print(it.failures[0]); print(names(config))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
it.save(3, tensors(3), {{}}, config)
it.finish()
print(names(config))
"""
    done = subprocess.run([sys.executable, "-c", code, json.dumps(tiny.to_dict())], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, then, at_last = done.stdout.splitlines()
    assert "step_00000002 could not be written" in told and " GiB are free)" in told
    assert then == "['step_00000001']"
    assert at_last == "['step_00000001', 'step_00000003']"


def test_what_cannot_be_pruned_fails_no_save(tiny, monkeypatch):
    it = begin(tiny, keep=1)
    for step in (1, 2):
        it.save(step, tensors(step), {}, tiny)
    it.wait()
    for step, what in ((3, "remove"), (4, "checkpoints")):
        monkeypatch.setattr(saver, what, full)
        it.save(step, tensors(step), {}, tiny)
        it.finish()
    assert it.failures == ["an old checkpoint could not be removed: [Errno 28] No space left on device"] * 2
    assert names(tiny) == [f"step_0000000{step}" for step in (1, 2, 3, 4)]


def test_waiting_raises_nothing_whatever_went_wrong(tiny, monkeypatch):
    """What ends a run waits for the save under way; by then a GPU may refuse every call."""
    it = begin(tiny)
    it._copied = SimpleNamespace()      # as after a copy from a GPU
    monkeypatch.setattr(torch.cuda, "current_stream", full)
    monkeypatch.setattr(saver, "_host_buffer", full)
    it._copied.synchronize = full
    it.save(1, tensors(1), {}, tiny)
    it.wait()
    it.wait()
    assert len(it.failures) == 1


# ------------------------------------------------------------------------------------------------------------- kills

def test_what_a_kill_left_half_written_is_no_checkpoint_and_goes(tiny):
    save(tiny, 1)
    folder = tiny.run_dir / "checkpoints"
    (folder / ".tmp_step_00000002").mkdir()
    shutil.copytree(folder / "step_00000001", folder / "step_00000002")
    (folder / "step_00000002/DONE").unlink()
    assert latest(tiny.run_dir).name == "step_00000001"
    save(tiny, 2)
    assert names(tiny) == ["step_00000001", "step_00000002"]
    assert same(read_back(folder / "step_00000002"), 2)


KILLS = {       # the process dies there, at once and without a word
    "copying": "s._host_buffer = die",
    "writing": "s.dcp.save = die",
    "hashing": "s.sha256_of = die",
    "manifest": "def half(p, t):\n    p.write_text(t[:len(t) // 2]); os._exit(9)\nc._write_synced = half",
    "done": "real = c._write_synced\ndef half(p, t):\n    real(p, t[:9]) if p.name == 'DONE' else real(p, t)\n"
            "    p.name == 'DONE' and os._exit(9)\nc._write_synced = half",
    "before rename": "s.os.rename = die",
    "after rename": "s.sync_folder = die",
    "pruning": "def half(path, **_):\n    if os.path.exists(path):\n        os.remove(f'{path}/.metadata'); os._exit(9)\n"
               "c.shutil.rmtree = half",
}


def test_killed_at_any_moment_of_a_save_a_whole_checkpoint_remains(tiny):
    """One process forks for each moment: what is imported is imported once."""
    save(tiny, 1, 2)
    start = tiny.run_dir.with_name("start")
    shutil.copytree(tiny.run_dir, start)
    code = f"""
import json, os, shutil, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
import runtime.checkpoint as c, runtime.checkpoint as s
from tests.test_saver import begin, config_from_dict, tensors
torch.set_num_threads(1)
config = config_from_dict(json.loads(sys.argv[1]))
def die(*_, **__): os._exit(9)
for moment, fault in json.loads(sys.argv[2]).items():
    config_there = config_from_dict(json.loads(sys.argv[1]) | {{"run": moment}})
    shutil.copytree({str(start)!r}, config_there.run_dir)
    if not os.fork():
        exec(fault)
        saver = begin(config_there, keep=1)
        saver.save(3, tensors(3), {{}}, config_there)
        saver.finish()
        os._exit(0)
    print(moment, os.waitstatus_to_exitcode(os.wait()[1]))
"""
    kills = {moment.replace(" ", "_"): fault for moment, fault in KILLS.items()}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(tiny.to_dict()), json.dumps(kills)],
                          capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{moment} 9" for moment in kills], done.stderr
    for moment in kills:
        config = config_from_dict(tiny.to_dict() | {"run": moment})
        filled = empty()
        path, manifest = restore(config.run_dir, filled, ALONE, pytest.fail)
        assert manifest["step"] == (3 if moment in ("after_rename", "pruning") else 2), moment
        assert same(filled, manifest["step"]), moment
        for path in checkpoints(config.run_dir):        # half a deletion is no checkpoint
            read_manifest(path)
        save(config, 4, keep=1)
        assert names(config) == [path.name, "step_00000004"], moment


def test_all_is_on_the_disk_itself_before_the_rename_and_the_rename_after_it(tiny, monkeypatch):
    """What a power cut needs and a kill does not test: each file is synced, then its folder, then the folder of the rename."""
    done, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(os, "rename", lambda a, b: done.append(f"rename {b}") or rename(a, b))
    save(tiny, 1)
    folder = (tiny.run_dir / "checkpoints").resolve()
    tmp, final = folder / ".tmp_step_00000001", folder / "step_00000001"
    synced = [event.removesuffix(".tmp") for event in done]     # DCP writes .metadata under another name first
    at = synced.index(f"rename {final}")
    assert {str(tmp / path.name) for path in final.iterdir()} | {str(tmp)} <= set(synced[:at])
    assert synced[at - 2:] == [str(tmp / "DONE"), str(tmp), f"rename {final}", str(folder)]


# ------------------------------------------------------------------------------------------------------- keep policy

def by_hand(steps, keep, losses):
    """What stays of `steps`, saved one after the other, each followed by its validation."""
    policy = CheckpointConfig(every=10, keep=keep, best=True, forever=40, rolling=4, at=(33,))
    there = []
    for step in steps:
        there.append(step)
        seen = {s: loss for s, loss in losses.items() if s < step}
        there = [s for s in there if s in kept(there, policy, seen)]
    return there


def test_the_keep_policy():
    assert by_hand([10, 20, 30], 2, {}) == [20, 30]
    assert by_hand([10, 20, 30], 1, {}) == [20, 30]                                 # two always
    assert by_hand([4, 8, 10, 12, 16, 20, 24], 9, {}) == [10, 20, 24]               # one rolling, the newest
    assert by_hand([10, 996, 998, 1000, 1004, 1008], 2, {}) == [10, 1000, 1004, 1008]       # and the two newest of all
    assert by_hand([10, 12, 20, 30, 50], 1, {}) == [12, 30, 50]                     # which outlives newer regular ones
    assert by_hand([10, 20, 30, 33, 40, 50, 60, 70], 1, {}) == [33, 40, 60, 70]     # at and forever
    assert by_hand([10, 20, 30, 40, 50, 60, 70], 1, {10: 3.0, 20: 2.0, 30: 2.5, 50: 2.1}) == [20, 40, 60, 70]
    assert by_hand([10, 20, 30, 50, 60], 1, {10: 3.0, 20: 2.0, 30: 2.0}) == [30, 50, 60]    # the newer of two equals
    assert by_hand([10, 20, 30, 50, 60], 1, {10: float("nan"), 20: float("inf"), 30: 7.0}) == [30, 50, 60]
    assert by_hand([10, 13, 20, 27, 30, 50], 2, {}) == [27, 30, 50]                 # on a signal, or late: as a rolling one
    without = CheckpointConfig(every=10, keep=2, best=False)
    assert kept([10, 20, 27, 30], without, {}) == {27, 30}                          # without rolling: as a regular one
    assert kept([10, 13, 27, 30], CheckpointConfig(every=None, keep=3, best=False), {}) == {13, 27, 30}
    assert kept([], CheckpointConfig(), {}) == set()
    assert kept([10, 20, 30], CheckpointConfig(every=10, keep=1, best=False), {10: 1.0, 20: 2.0}) == {20, 30}
    assert kept([5, 7, 8, 9], CheckpointConfig(every=None, keep=1, best=False, at=(5,)), {}) == {5, 8, 9}


def test_the_newest_and_the_best_of_a_random_history_are_always_there():
    rng = random.Random(3)
    for _ in range(200):
        policy = CheckpointConfig(every=rng.choice([None, 5, 10]), keep=rng.randint(1, 3), rolling=rng.choice([None, 2, 3]))
        there, losses = [], {}
        for step in sorted(rng.sample(range(1, 60), 20)):
            there.append(step)
            judged = {s: losses[s] for s in there if s in losses}
            stay = kept(there, policy, losses)
            assert set(there[-2:]) <= stay
            assert not judged or min(judged.values()) in {losses.get(s) for s in stay}
            there = [s for s in there if s in stay]
            assert len(there) <= policy.keep + 3        # plus best, a rolling one and the newest
            if rng.random() < 0.5:
                losses[step] = rng.random()


def test_the_policy_is_applied_on_disk(tiny):
    it = begin(tiny, {1: 2.0}, keep=1, forever=3)
    for step, loss in enumerate((2.0, 5.0, 5.0, 4.0, 3.0, 6.0), 1):
        it.save(step, tensors(step), {}, tiny)
        it.wait()
        it.validated(step, loss)
    assert names(tiny) == [f"step_0000000{s}" for s in (1, 3, 5, 6)]
    again = begin(tiny, {1: 2.0, 3: 5.0}, keep=1)           # a resume with other wishes
    again.save(7, tensors(7), {}, tiny)
    again.finish()
    assert names(tiny) == [f"step_0000000{s}" for s in (1, 6, 7)]


def test_a_suspect_save_pushes_nothing_out(tiny):
    """In a row of skips the weights may be what is wrong."""
    it = begin(tiny, keep=1)
    for step, consecutive in ((2, 0), (4, 0), (6, 1), (8, 2), (10, 3)):
        it.save(step, tensors(step), {"guard": {"consecutive": consecutive}}, tiny)
    it.finish()
    suspect = tiny.to_dict() | {"run": "suspect"}
    shutil.copytree(tiny.run_dir, config_from_dict(suspect).run_dir)
    assert names(tiny) == [f"step_{step:08d}" for step in (2, 4, 6, 8, 10)]
    it.save(12, tensors(12), {"guard": {"consecutive": 0}}, tiny)      # a good save prunes
    it.finish()
    assert names(tiny) == ["step_00000010", "step_00000012"]
    config = config_from_dict(suspect)
    it = begin(config, keep=1)
    it.roll_back(4)                         # and a rollback deletes the suspects
    assert names(config) == ["step_00000002", "step_00000004"]


def test_a_rollback_forgets_the_losses_it_undid(tiny):
    it = begin(tiny, keep=2)
    for step, loss in ((2, 3.0), (4, 2.0), (6, 1.0)):
        it.save(step, tensors(step), {}, tiny)
        it.wait()
        it.validated(step, loss)
    it.roll_back(4)
    assert names(tiny) == ["step_00000004"]
    it.policy = CheckpointConfig(every=1, keep=1)
    it.save(6, tensors(7), {}, tiny)        # the same step, other weights: their loss is not known yet
    it.finish()
    assert names(tiny) == ["step_00000004", "step_00000006"]
    assert same(read_back(latest(tiny.run_dir)), 7)


# ---------------------------------------------------------------------------------------------------------- two ranks

RANK = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from runtime import checkpoint
from runtime import checkpoint as reader
from runtime import checkpoint as saver
from runtime.config import CheckpointConfig, config_from_dict
from tests.test_checkpoint import flip, tensors
torch.set_num_threads(1)
rank, out = int(sys.argv[3]), {}
config = config_from_dict(json.loads(sys.argv[2]))
dist.init_process_group("gloo", init_method=f"file://{config.out}/store", rank=rank, world_size=2, timeout=timedelta(minutes=5))
mesh = init_device_mesh("cpu", (2,))
world = SimpleNamespace(rank=rank, size=2, is_main=rank == 0, checkpoint_group=dist.new_group(backend="gloo"),
                        device=torch.device("cpu"))

def shards(step):
    return {name: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for name, t in tensors(step).items()}

def there():
    dist.barrier()
    return sorted(p.name for p in (config.run_dir / "checkpoints").iterdir())

def full(*_, **__):
    raise OSError(28, "No space left on device")

it = saver.Saver(config.run_dir, CheckpointConfig(every=1, keep=9), world, {})
live = shards(1)
it.save(1, live, {"updates": 1}, config)
it.staged()
for t in live.values():
    t.to_local().fill_(0)
it.finish()

# One rank alone fails in a stage: both know, nothing is left, and the next save is good.
for number, (where, what, who) in enumerate([(saver, "_host_buffer", 1), (saver.dcp.FileSystemWriter, "write_data", 1),
                                             (saver, "sha256_of", 1), (saver.os, "rename", 0)]):
    real = getattr(where, what)
    it = saver.Saver(config.run_dir, CheckpointConfig(every=1, keep=9), world, {})
    if rank == who:
        setattr(where, what, full)
    it.save(2, shards(2), {}, config)
    it.wait()
    if rank == who:
        setattr(where, what, real)
    out[f"failed {number}"] = it.failures, there()
for step in (2, 3, 4, 5):
    it.save(step, shards(step), {}, config)
it.finish()

# A damaged file: the same choice on both ranks, told by rank 0.
if rank == 0:
    flip(config.run_dir / "checkpoints/step_00000005/__1_0.distcp", 999)
told, filled = [], shards(0)
path, manifest = checkpoint.restore(config.run_dir, filled, world, told.append)
out["flipped"] = path.name, manifest["step"], told, all(torch.equal(filled[k].to_local(), t.to_local())
                                                         for k, t in shards(4).items())

# Two that only rank 1 cannot load, of which DCP tells the other rank or not: both fall back.
real, real_load = reader.TensorReader.read_data, checkpoint.dcp.load
def fail(self, plan, planner):
    if self.path.name == "step_00000004":
        raise EOFError("short read")
    return real(self, plan, planner)
def fail_late(tensors, storage_reader, **others):
    real_load(tensors, storage_reader=storage_reader, **others)
    if storage_reader.path.name == "step_00000003":
        raise EOFError("short read")
if rank == 1:
    reader.TensorReader.read_data = fail
    checkpoint.dcp.load = fail_late
told, filled = [], shards(0)
path, manifest = checkpoint.restore(config.run_dir, filled, world, told.append)
out["unloadable"] = path.name, list(told), all(torch.equal(filled[k].to_local(), t.to_local()) for k, t in shards(2).items())
out["then"] = there()
out["rollback"] = checkpoint.restore(config.run_dir, filled, world, told.append, before=2)[0].name
it.roll_back(1)
out["rolled back"] = there()

# All bad, on another run's folder: both ranks stop with the same sentence.
other = Path(config.out) / "other"
if rank == 0:
    import shutil
    shutil.copytree(config.run_dir / "checkpoints/step_00000001", other / "checkpoints/step_00000001")
    flip(other / "checkpoints/step_00000001/.metadata", 77)
dist.barrier()
try:
    checkpoint.restore(other, filled, world, told.append)
except checkpoint.MachineError as error:
    out["all bad"] = str(error)
(Path(config.out) / f"rank{rank}.json").write_text(json.dumps(out))
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_ranks_agree(tiny):
    os.makedirs(tiny.out)
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(ROOT), json.dumps(tiny.to_dict()), str(rank)],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    saw = [json.loads((tiny.run_dir.parent / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for number, (rank, words) in enumerate([(1, "OSError"), (1, "No space"), (1, "No space"), (0, "No space")]):
        for failures, there in (s[f"failed {number}"] for s in saw):
            assert there == ["step_00000001"]
            assert len(failures) == 1 and f"rank {rank}: " in failures[0] and words in failures[0]
    for s, lines in zip(saw, (1, 0), strict=True):
        assert s["flipped"][:2] + s["flipped"][3:] == ["step_00000004", 4, True]
        assert len(s["flipped"][2]) == lines
        assert s["unloadable"][0::2] == ["step_00000002", True]
        assert len(s["unloadable"][1]) == 2 * lines
        bad = ["bad_step_00000003", "bad_step_00000004", "bad_step_00000005"]
        assert s["then"] == [*bad, "step_00000001", "step_00000002"]
        assert s["rollback"] == "step_00000001"
        assert s["rolled back"] == [*bad, "step_00000001"]
        assert "no checkpoint that is whole; damaged are bad_step_00000001" in s["all bad"]
    assert saw[0]["all bad"] == saw[1]["all bad"]
    path = tiny.run_dir / "checkpoints/step_00000001"
    assert {"__0_0.distcp", "__1_0.distcp"} <= read_manifest(path)["files"].keys()
    assert same(read_back(path), 1)         # one process reads what two wrote


# ------------------------------------------------------------------------------------------------------------ its bench

def test_the_bench_measures_what_it_says(tmp_path, capsys):
    out = tmp_path / "bench"
    assert bench.main(["params=1e5", "repeats=1", "tokens=16", f"out={out}"]) == 0
    first, row, median = [line.split() for line in capsys.readouterr().out.splitlines()[2:5]]
    assert (first[0], row[0], median[0]) == ("first", "1", "median") and row[1:] == median[1:]
    save_s, blocked, copy_s = float(row[1]), float(row[2]), float(row[4])
    assert 0 <= copy_s <= save_s and blocked < save_s
    assert not out.exists()
    out.mkdir()
    (tmp_path / "file").touch()
    for arguments, told in [([f"out={out}"], "exists already: name"), (["params=-1"], "params must lie between"),
                            (["out=/proc/x"], "out=/proc/x cannot be made (No such file"),
                            ([f"out={tmp_path}/file/x"], "cannot be made (Not a directory): name a folder on the disk"),
                            (["parms=1e6"], "there is no key 'parms'; did you mean 'params'?")]:
        assert bench.main(arguments) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1
    assert out.exists()     # what was there is not the bench's to remove


def test_the_bench_tells_what_a_gpu_waits_not_the_host(monkeypatch):
    """On a GPU staged() returns at once and the stream waits; its clock is turned by hand here."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = 1000 * clock[0]

        def elapsed_time(self, end):
            assert clock[-1] == "synchronized"
            return end.ms - self.ms

    def staged():
        clock[0] += 2.5

    training = bench.Training(SimpleNamespace(model=bench.model_of(1e5, 16), seed=1, optim=OptimConfig(lr=1e-4)),
                              torch.device("cpu"))
    assert training.step(SimpleNamespace(staged=lambda: time.sleep(0.05)))[1] >= 0.05      # a CPU waits itself
    training.device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: clock.append("synchronized"))
    assert training.step(SimpleNamespace(staged=staged))[1] == 2.5
