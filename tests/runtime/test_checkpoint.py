"""Checkpoints: what is saved comes back, whatever dies; nothing damaged, foreign or hostile is
loaded. Branches, and all of this through train.py: tests/runtime/test_faults.py."""

import contextlib
import hashlib
import json
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lib.errors import MachineError, UserError
from lib.files import write_json
from runtime import checkpoint
from runtime.checkpoint import (
    DamagedError,
    Saver,
    checkpoints,
    latest,
    load,
    read_manifest,
    read_saved,
    restore,
    seal,
    steps_to_keep,
)
from runtime.config import CheckpointConfig, Config
from tests.conftest import ALONE
from tests.helpers.faults import flip_bit, saved_steps

FILES = ["__0_0.distcp", ".metadata", "manifest.json", "DONE"]


def tensors(step: int = 0):
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(*shape, generator=generator)
        for name, shape in {
            "model.a": (40, 16),
            "optim.a.exp_avg": (40, 16),
            "model.norm": (16,),
        }.items()
    }


def saver_of(config: Config, losses=None, **policy: object):
    return Saver(
        config.run_dir,
        CheckpointConfig(**{"every": 1, "keep": 9, **policy}),
        ALONE,
        lambda: losses or {},
    )


def save(config: Config, *steps: object):
    saver = saver_of(config)
    for step in steps:
        saver.save(step, tensors(step), {"updates": step}, config)
    saver.finish()


def fill(config: Config, say=pytest.fail, tensors_to_fill=None):
    """The step of the checkpoint that restore() takes, whose tensors it must hold where all are
    wanted."""
    filled = tensors_to_fill or tensors()
    restored = restore(config.run_dir, filled, ALONE, say)
    assert tensors_to_fill or same(filled, restored.step)
    return restored.step


def same(filled, step: int):
    return all(torch.equal(filled[name], t) for name, t in tensors(step).items())


def holds(path: Path, step: int):
    filled = tensors()
    load(path, read_manifest(path), filled)
    return same(filled, step)


def test_what_was_saved_comes_back(tiny: Config):
    save(tiny, 3)
    path = latest(tiny.run_dir)
    assert path.name == "step_00000003" and holds(path, 3)
    manifest = read_manifest(path)
    assert (manifest["format_version"], manifest["step"]) == (3, 3)
    assert manifest["state"] == {"updates": 3}


def test_a_checkpoint_of_python_3_13_is_read(tiny: Config):
    """Whose pickles name another module for paths."""
    save(tiny, 3)
    path = latest(tiny.run_dir)
    older = (path / ".metadata").read_bytes()
    newer = older.replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")
    frame = b"\x95" + (len(newer) - 11).to_bytes(8, "little")
    forge(path, ".metadata", newer.replace(newer[2:11], frame, 1))
    assert b"pathlib._local" in (path / ".metadata").read_bytes() and holds(path, 3)


STATE_2 = {
    "updates": 3,
    "moved_on": 4,
    "train_s": 2.5,
    "probe_s": 0.5,
    "guard": {"train_s": 1},
}
STATE_3 = {
    "updates": 3,
    "data_offset": 4,
    "seconds": 2.5,
    "probe_seconds": 0.5,
    "guard": {"train_s": 1},
}


def test_a_checkpoint_of_format_2_is_read_with_todays_names(tiny: Config):
    save(tiny, 3)
    path = latest(tiny.run_dir)
    seal(path, read_manifest(path) | {"format_version": 2, "state": STATE_2})
    assert holds(path, 3) and read_manifest(path)["state"] == STATE_3


def test_a_checkpoint_of_a_later_format_is_refused_and_stays(tiny: Config):
    save(tiny, 3)
    path = latest(tiny.run_dir)
    seal(path, read_manifest(path) | {"format_version": 7})
    with pytest.raises(UserError, match="checkpoint format 7, this version reads 2 and 3"):
        fill(tiny)
    assert saved_steps(tiny) == [3]


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("model.b", torch.zeros(3)),
        ("model.a", torch.zeros(40, 17)),
        ("model.a", torch.zeros(40, 16, dtype=torch.bfloat16)),
    ],
    ids=["name", "shape", "dtype"],
)
def test_a_checkpoint_of_another_model_is_refused_and_stays(
    tiny: Config, name: str, tensor: torch.Tensor
):
    save(tiny, 3)
    with pytest.raises(UserError, match="the configuration does not fit"):
        fill(tiny, tensors_to_fill={name: tensor})
    assert saved_steps(tiny) == [3]


def test_steps_may_have_more_than_eight_digits(tiny: Config):
    save(tiny, 99_999_999, 100_000_000)
    assert saved_steps(tiny) == [99_999_999, 100_000_000]
    assert latest(tiny.run_dir).name == "step_100000000"


@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_noticed(tiny: Config, name: str):
    """A bit in a dozen places; half of it, none of it, a byte more."""
    save(tiny, 3)
    newest = latest(tiny.run_dir)
    file = newest / name
    whole = file.read_bytes()
    damaged = [whole[: len(whole) // 2], b"", whole + b"\0"]
    for position in [*range(0, len(whole), max(1, len(whole) // 12)), len(whole) - 1]:
        flip_bit(file, position)
        damaged.append(file.read_bytes())
        file.write_bytes(whole)
    named = name if name in FILES[:2] else FILES[2]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(DamagedError, match=f"{named} differs"):
            read_manifest(newest)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(tiny: Config, name: str):
    save(tiny, 2, 3)
    flip_bit(latest(tiny.run_dir) / name, 0)
    sentences = []
    assert fill(tiny, sentences.append) == 2
    (sentence,) = sentences
    assert "step_00000003 is damaged, set aside as bad_step_00000003: " in sentence


@pytest.mark.parametrize("name", FILES[:-1])
def test_a_second_damaged_checkpoint_of_a_step_is_set_aside_too(tiny: Config, name: str):
    """The step is trained again, and its file is lost."""
    save(tiny, 2, 3)
    newest = latest(tiny.run_dir)
    flip_bit(newest / name, 0)
    sentences = []
    fill(tiny, sentences.append)
    save(tiny, 3)
    (newest / name).unlink()
    assert fill(tiny, sentences.append) == 2
    assert "is missing" in sentences[1]
    folders = ["bad_step_00000003", "bad_step_00000003_again", "step_00000002"]
    assert sorted(os.listdir(newest.parent)) == folders


def test_what_has_no_done_never_was_a_checkpoint_and_is_saved_over(tiny: Config):
    save(tiny, 2, 3)
    newest = latest(tiny.run_dir)
    (newest / "DONE").unlink()
    assert fill(tiny) == 2
    save(tiny, 3)
    assert holds(newest, 3)


def forge(path: Path, name: str, content):
    """As an attacker would: the file, the manifest's hash of it, and DONE."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    seal(path, manifest)


@pytest.mark.parametrize("is_tensor, named", [(False, "mkdir"), (True, "BytesStorageMetadata")])
def test_a_hostile_checkpoint_runs_nothing(
    tiny: Config, tmp_path: Path, is_tensor: bool, named: str
):
    """A pickle that makes a folder: as the metadata, and as a tensor, since DCP unpickles an item
    of bytes though a tensor was asked for under its name."""
    save(tiny, 1)
    path, canary, filled = (
        latest(tiny.run_dir),
        tmp_path / "canary",
        {"model.norm": torch.zeros(16)},
    )
    attack = content = f"cos\nmkdir\n(V{canary}\ntR.".encode()
    if is_tensor:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        place = metadata.storage_data.pop(
            next(i for i in metadata.storage_data if i.fqn == "model.norm")
        )
        metadata.state_dict_metadata["model.norm"] = BytesStorageMetadata()
        place.offset, place.length = 0, len(attack)
        metadata.storage_data[MetadataIndex("model.norm")] = place
        forge(path, place.relative_path, attack)
        content = pickle.dumps(metadata)
    forge(path, ".metadata", content)
    with contextlib.suppress(BaseException):
        dcp.load(filled, no_dist=True, storage_reader=dcp.FileSystemReader(path))
    assert canary.exists(), "the attack is a real one: DCP's own reader runs it"
    canary.rmdir()
    with pytest.raises(MachineError, match=f"names .*{named}"):
        fill(tiny, tensors_to_fill=filled)
    assert not canary.exists()


def test_a_save_holds_what_was_at_the_call_and_returns_before_the_disk(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
):
    hashing, file_sha256 = threading.Event(), checkpoint.file_sha256
    monkeypatch.setattr(
        checkpoint, "file_sha256", lambda path: hashing.wait(60) and file_sha256(path)
    )
    saver, live, state = saver_of(tiny), tensors(1), {"guard": {"window": [1.0, 2.5]}}
    saver.save(1, live, state, tiny)
    state["guard"]["window"].append(3.0)
    saver.staged()
    for t in live.values():  # what optimizer.step() does next
        t.fill_(0)
    assert latest(tiny.run_dir) is None
    hashing.set()
    saver.save(2, tensors(2), {}, tiny)
    saver.save(2, tensors(3), {}, tiny)  # of a step that was saved already: not written again
    saver.finish()
    first, second = checkpoints(tiny.run_dir)
    assert holds(first, 1) and holds(second, 2)
    assert read_manifest(first)["state"] == {"guard": {"window": [1.0, 2.5]}}


def test_all_is_synced_before_the_rename_and_the_rename_after_it(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
):
    """What a power cut needs and a kill does not test: each file is synced, then its folder, then
    the folder of the rename."""
    done, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd)
    )
    monkeypatch.setattr(os, "rename", lambda a, b: done.append(f"rename {b}") or rename(a, b))
    save(tiny, 1)
    folder = (tiny.run_dir / "checkpoints").resolve()
    tmp, final = folder / ".tmp_step_00000001", folder / "step_00000001"
    # Some files are written under another name first: .metadata.tmp, .DONE.tmp.
    synced = [
        re.sub(r"/\.((?!metadata)[^/]+)\.tmp$", r"/\1", event).removesuffix(".tmp")
        for event in done
    ]
    position = synced.index(f"rename {final}")
    assert {str(tmp / path.name) for path in final.iterdir()} | {str(tmp)} <= set(synced[:position])
    assert synced[position - 2 : position + 2] == [
        str(tmp / "DONE"),
        str(tmp),
        f"rename {final}",
        str(folder),
    ]


ALL = {"every": 10, "keep": 1, "best": True, "forever": 40, "rolling": 4, "at": (33,)}


MEAN = {"every": 10, "keep": 1, "best": False, "average": 3}


@pytest.mark.parametrize(
    "policy, steps, losses, expected",
    [
        (
            ALL | {"keep": 9},
            [4, 8, 10, 12, 16, 20, 24],
            {},
            [10, 20, 24],
        ),  # one rolling, the newest
        # and the two newest of all
        (ALL | {"keep": 2}, [10, 996, 998, 1000, 1004, 1008], {}, [10, 1000, 1004, 1008]),
        (ALL, [10, 20, 30, 33, 40, 50, 60, 70], {}, [33, 40, 60, 70]),  # at and forever
        (ALL, [10, 20, 30, 40, 50, 60, 70], {10: 3.0, 20: 2.0, 30: 2.5, 50: 2.1}, [20, 40, 60, 70]),
        # the newer of two equals
        (ALL, [10, 20, 30, 50, 60], {10: 3.0, 20: 2.0, 30: 2.0}, [30, 50, 60]),
        (ALL, [10, 20, 30, 50, 60], {10: float("nan"), 20: float("inf"), 30: 7.0}, [30, 50, 60]),
        # on a signal, or late: as a rolling one; outlives regular ones
        (ALL, [10, 13, 20, 27, 30, 50, 60], {}, [27, 50, 60]),
        # without rolling: as a regular one
        ({"every": 10, "keep": 2, "best": False}, [10, 20, 27, 30], {10: 1.0}, [27, 30]),
        ({"every": None, "keep": 1, "at": (5,)}, [5, 7, 8, 9], {}, [5, 8, 9]),
        # for a mean of three of every 10, whatever a stop has saved between them
        (MEAN, [10, 20, 30, 33, 40, 44], {}, [30, 40, 44]),
        (MEAN, [10, 20, 23, 30, 34], {}, [20, 30, 34]),
    ],
)
def test_the_keep_policy_by_hand(
    policy: dict[str, Any], steps: list[int], losses: dict[int, float], expected: list[int]
):
    """`steps` saved one after the other, each followed by its validation."""
    steps_on_disk = []
    for step in steps:
        stay = steps_to_keep(
            [*steps_on_disk, step],
            CheckpointConfig(**policy),
            {s: loss for s, loss in losses.items() if s < step},
        )
        steps_on_disk = [s for s in [*steps_on_disk, step] if s in stay]
    assert steps_on_disk == expected


def test_the_policy_holds_on_disk_across_a_resume_and_a_rollback(tiny: Config):
    saver = saver_of(tiny, losses := {1: 2.0}, keep=1, forever=3)
    for step, loss in enumerate((2.0, 5.0, 5.0, 4.0, 3.0, 6.0), 1):
        saver.save(step, tensors(step), {}, tiny)
        saver.wait()
        losses[step] = loss
    assert saved_steps(tiny) == [1, 3, 5, 6]
    saver = saver_of(tiny, losses := {1: 2.0, 6: 1.0}, keep=1)  # a resume with other wishes
    saver.save(7, tensors(7), {}, tiny)
    saver.wait()
    losses[7] = 0.5
    assert saved_steps(tiny) == [6, 7]
    saver.roll_back(6)
    del losses[7]  # as the log does
    assert saved_steps(tiny) == [6]
    # step 7 with other weights
    for step, consecutive, expected in (
        (7, 0, [6, 7]),
        (8, 0, [6, 7, 8]),
        (9, 0, [6, 8, 9]),
        # the weights may be what is wrong
        (10, 1, [6, 8, 9, 10]),
        (11, 0, [6, 10, 11]),
    ):
        saver.save(step, tensors(step + 1), {"guard": {"consecutive": consecutive}}, tiny)
        saver.finish()
        assert saved_steps(tiny) == expected and holds(latest(tiny.run_dir), step + 1)


@pytest.mark.parametrize("is_made_room", [True, False])
def test_a_branch_goes_back_to_its_trunk_on_a_full_disk_too(
    tiny: Config, monkeypatch: pytest.MonkeyPatch, is_made_room: bool
):
    """saved.json cannot be written: at all, or until the checkpoints are removed."""
    save(tiny, 7, 8)

    def write(path: Path, value: dict) -> None:
        if not is_made_room or saved_steps(tiny):
            raise OSError(28, "No space left on device")
        write_json(path, value)

    monkeypatch.setattr("runtime.checkpoint.write_json", write)
    saver = saver_of(tiny)
    saver.roll_back(6)
    assert saved_steps(tiny) == []
    saved = read_saved(tiny.run_dir)
    assert saved is not None and saved.first_checkpoint == (None if is_made_room else 7)


def test_a_run_that_goes_back_to_a_checkpoint_of_its_own_has_had_one(tiny: Config):
    """Else its next start would begin anew in silence where its checkpoints are lost."""
    save(tiny, 7, 8)
    saver_of(tiny).roll_back(7)
    assert saved_steps(tiny) == [7]
    saved = read_saved(tiny.run_dir)
    assert saved is not None and saved.first_checkpoint == 7
