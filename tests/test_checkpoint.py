"""What is on disk: nothing damaged, foreign or malicious is ever taken for a checkpoint."""

import io
import json
import os
import pickle
import re
import shutil
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from runtime import checkpoint
from runtime import checkpoint as reader
from runtime.checkpoint import (
    FORMAT_VERSION,
    DamagedError,
    Saver,
    checkpoints,
    discard_after,
    latest,
    load,
    load_model,
    newest_good,
    read_manifest,
    restore,
    seal,
)
from runtime.cli import MachineError, UserError
from runtime.config import CheckpointConfig, read_config
from tests.conftest import ROOT, call_train

ALONE = SimpleNamespace(rank=0, size=1, is_main=True, checkpoint_group=None, device=torch.device("cpu"))
FILES = ["__0_0.distcp", ".metadata", "manifest.json", "DONE"]


def tensors(step=0):
    generator = torch.Generator().manual_seed(step)
    return {"model.a": torch.randn(40, 16, generator=generator), "optim.a.exp_avg": torch.randn(40, 16, generator=generator),
            "model.norm": torch.randn(16, generator=generator)}


def save(config, *steps, **policy):
    saver = Saver(config.run_dir, CheckpointConfig(**{"every": 1, "keep": 9, **policy}), ALONE, {})
    for step in steps:
        saver.save(step, tensors(step), {"updates": step}, config)
    saver.finish()
    return saver


def empty():
    return {name: torch.zeros_like(t) for name, t in tensors().items()}


def read_back(path):
    filled = empty()
    load(path, read_manifest(path), filled)
    return filled


def same(filled, step):
    return all(torch.equal(filled[name], t) for name, t in tensors(step).items())


def names(config):
    return sorted(p.name for p in (config.run_dir / "checkpoints").iterdir())


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_what_was_saved_comes_back(tiny):
    save(tiny, 3)
    path = latest(tiny.run_dir)
    assert path.name == "step_00000003"
    assert same(read_back(path), 3)
    assert read_manifest(path)["state"] == {"updates": 3, "moved_on": 0}
    assert read_manifest(path)["format_version"] == 2


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_and_every_cut_is_noticed(tiny, name):
    save(tiny, 1)
    file = latest(tiny.run_dir) / name
    whole = file.read_bytes()
    told = f"{name} differs from what was written" if name in FILES[:2] else "manifest.json (differs|cannot be read)"
    for bit in [*range(0, 8 * len(whole), max(1, len(whole) // 12)), 8 * len(whole) - 1]:
        flip(file, bit)
        with pytest.raises(DamagedError, match=told):
            read_manifest(file.parent)
        flip(file, bit)
    assert read_manifest(file.parent)
    for cut in (whole[:-1], whole[:len(whole) // 2], b"", whole + b"\0"):
        file.write_bytes(cut)
        with pytest.raises(DamagedError, match="is missing or not|manifest.json"):
            read_manifest(file.parent)
    file.unlink()
    with pytest.raises(DamagedError, match="is missing or not|No such file"):
        read_manifest(file.parent)


def test_a_damaged_manifest_or_another_version_gets_a_sentence(tiny):
    save(tiny, 1)
    path = latest(tiny.run_dir)
    file = path / "manifest.json"
    text = file.read_text()
    for bad in ("", "[]", "{}", text[:-40], "\x00", "[" * 100_000, '{"format_version": 1, "files": []}',
                '{"format_version": 1, "files": {}}', '{"format_version": 1, "files": {".metadata": 3}}',
                text.replace('"state"', '"estate"')):
        file.write_text(bad)
        with pytest.raises(DamagedError, match=r"manifest.json cannot be read .* move .* away"):
            read_manifest(path)
    seal(path, json.loads(text) | {"format_version": 7})
    with pytest.raises(UserError, match="has checkpoint format 7, this version reads 1 to 2: use the version that wrote it"):
        newest_good(tiny.run_dir, ALONE, pytest.fail)
    assert names(tiny) == ["step_00000001"]     # of another version is not damaged: it stays where it is


# ------------------------------------------------------------------------------------------------------ falling back

@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_bad_checkpoint_is_set_aside_and_the_one_before_it_is_used(tiny, name, harm):
    save(tiny, 1, 2, 3)
    file, told, filled = latest(tiny.run_dir) / name, [], empty()
    if harm == "flip":
        flip(file, 77)
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    path, manifest = restore(tiny.run_dir, filled, ALONE, told.append)
    assert (path.name, manifest["step"]) == ("step_00000002", 2)
    assert same(filled, 2)
    if (name, harm) == ("DONE", "gone"):        # without that one it never was a checkpoint
        assert (told, names(tiny)) == ([], ["step_00000001", "step_00000002", "step_00000003"])
    else:
        assert names(tiny) == ["bad_step_00000003", "step_00000001", "step_00000002"]
        assert len(told) == 1
        assert told[0].startswith("checkpoint step_00000003 is damaged, set aside as bad_step_00000003: ")
        assert re.search("differs|missing|cannot", told[0])
        assert "move" not in told[0]
    save(tiny, 3)       # the step comes again, and damaged again
    flip(tiny.run_dir / "checkpoints/step_00000003/.metadata", 5)
    assert newest_good(tiny.run_dir, ALONE, told.append)[0].name == "step_00000002"
    assert "step_00000003" not in names(tiny)


def test_a_run_never_starts_over_silently(tiny):
    assert restore(tiny.run_dir, empty(), ALONE, pytest.fail) is None       # there never was one
    save(tiny, 1, 2)
    for path in checkpoints(tiny.run_dir):
        flip(path / "__0_0.distcp", 999)
    told = []
    for _ in range(2):      # and not after a restart either, which finds them set aside
        with pytest.raises(MachineError, match="holds no checkpoint that is whole; damaged are bad_step_00000001, "
                                                  "bad_step_00000002: put back a copy of one as step_00000002, or delete"):
            restore(tiny.run_dir, empty(), ALONE, told.append)
    assert len(told) == 2
    assert names(tiny) == ["bad_step_00000001", "bad_step_00000002"]


def test_one_that_fails_while_it_is_loaded_counts_as_damaged(tiny, monkeypatch):
    save(tiny, 1, 2, 3)
    real, told, filled = checkpoint.dcp.load, [], empty()

    def fail(tensors, storage_reader, **kwargs):
        if storage_reader.path.name != "step_00000001":
            raise checkpoint.CheckpointException("reading", {0: (EOFError("short read"), None)})
        real(tensors, storage_reader=storage_reader, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "load", fail)
    assert restore(tiny.run_dir, filled, ALONE, told.append)[0].name == "step_00000001"
    assert same(filled, 1)
    assert names(tiny) == ["bad_step_00000002", "bad_step_00000003", "step_00000001"]
    assert len(told) == 2 and "could not be loaded (EOFError: short read)" in told[0]
    shutil.rmtree(tiny.run_dir / "checkpoints/step_00000001")
    save(tiny, 4)
    with pytest.raises(MachineError, match="no checkpoint that is whole"):       # tensors may be half filled: no way on
        restore(tiny.run_dir, empty(), ALONE, told.append, before=5)


def test_too_little_memory_damages_no_checkpoint(tiny, monkeypatch):
    save(tiny, 1)

    def fail(*_, **__):
        raise checkpoint.CheckpointException("reading", {0: (RuntimeError("DefaultCPUAllocator: can't allocate memory"), None)})

    monkeypatch.setattr(checkpoint.dcp, "load", fail)
    with pytest.raises(MemoryError, match="can't allocate memory"):
        restore(tiny.run_dir, empty(), ALONE, pytest.fail)
    assert names(tiny) == ["step_00000001"]


def test_a_rollback_goes_before_a_step_and_undoes_what_came_after(tiny):
    save(tiny, 2, 4, 6, 8)
    filled = empty()
    path, manifest = restore(tiny.run_dir, filled, ALONE, pytest.fail, before=6)
    assert manifest["step"] == 4 and same(filled, 4)
    assert restore(tiny.run_dir, empty(), ALONE, pytest.fail, before=2) is None
    discard_after(tiny.run_dir, 4, ALONE)
    assert names(tiny) == ["step_00000002", "step_00000004"]


def test_a_folder_that_cannot_be_renamed_stops_the_run(tiny, monkeypatch):
    save(tiny, 1, 2)
    flip(latest(tiny.run_dir) / ".metadata", 5)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint.os, "rename", refuse)
    with pytest.raises(MachineError, match="is damaged .* cannot be renamed .Permission denied.: correct the folder's rights"):
        restore(tiny.run_dir, empty(), ALONE, pytest.fail)


def test_what_may_not_be_read_is_not_damaged(tiny, monkeypatch):
    save(tiny, 1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "sha256_of", refuse)
    with pytest.raises(UserError, match="may not be read: correct its rights"):
        newest_good(tiny.run_dir, ALONE, pytest.fail)
    assert names(tiny) == ["step_00000001"]


def test_only_whole_checkpoints_are_seen(tiny):
    save(tiny, 1, 99_999_999, 100_000_000)
    folder = tiny.run_dir / "checkpoints"
    for odd in ("step_x", "step_12", "bad_step_00000002", ".tmp_step_00000003", "step_00000004"):
        (folder / odd).mkdir()
        if odd != "step_00000004":
            (folder / odd / "DONE").touch()
    assert [p.name for p in checkpoints(tiny.run_dir)] == ["step_00000001", "step_99999999", "step_100000000"]


# ------------------------------------------------------------------------------------------------ misfits and attacks

def test_what_does_not_fit_is_refused_rather_than_dropped_or_cast(tiny):
    save(tiny, 1)
    path = latest(tiny.run_dir)
    manifest = read_manifest(path)
    for wrong in ({"model.b": torch.zeros(3)}, {"model.a": torch.zeros(40, 17)},
                  {"model.a": torch.zeros(40, 16, dtype=torch.bfloat16)}):
        with pytest.raises(UserError, match="the configuration does not fit"):
            load(path, manifest, wrong)
        with pytest.raises(UserError, match="the configuration does not fit"):
            restore(tiny.run_dir, wrong, ALONE, pytest.fail)
    assert names(tiny) == ["step_00000001"]


def forge(path, name, content):
    """As an attacker would: the file, and the manifest's hash of it, and DONE."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": checkpoint.sha256_of(path / name)}
    seal(path, manifest)


class Attack:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def test_a_pickle_in_the_metadata_is_not_run(tiny, tmp_path):
    save(tiny, 1)
    forge(latest(tiny.run_dir), ".metadata", pickle.dumps(Attack(tmp_path / "canary")))
    with pytest.raises(DamagedError, match=r"names posix.system, which no checkpoint of ours contains"):
        read_back(latest(tiny.run_dir))
    assert not (tmp_path / "canary").exists()


def metadata_of(path):
    return reader._Unpickler(io.BytesIO((path / ".metadata").read_bytes())).load()


def test_an_item_that_calls_itself_no_tensor_is_not_unpickled(tiny, tmp_path):
    """DCP loads such an item with weights_only=False, though a tensor was asked for under its name."""
    save(tiny, 1)
    path = latest(tiny.run_dir)
    bomb = io.BytesIO()
    torch.save(Attack(tmp_path / "canary"), bomb)
    metadata = metadata_of(path)
    place = metadata.storage_data.pop(next(i for i in metadata.storage_data if i.fqn == "model.norm"))
    metadata.state_dict_metadata["model.norm"] = BytesStorageMetadata()
    place.offset, place.length = 0, len(bomb.getvalue())
    metadata.storage_data[MetadataIndex("model.norm")] = place
    forge(path, place.relative_path, bomb.getvalue())
    forge(path, ".metadata", pickle.dumps(metadata))
    # The attack is a real one: DCP's own reader runs it.
    torch.distributed.checkpoint.load({"model.norm": torch.zeros(16)}, no_dist=True,
                                      storage_reader=torch.distributed.checkpoint.FileSystemReader(path))
    assert (tmp_path / "canary").exists()
    (tmp_path / "canary").unlink()
    with pytest.raises(DamagedError, match="BytesStorageMetadata, which no checkpoint of ours contains"):
        load(path, read_manifest(path), {"model.norm": torch.zeros(16)})
    assert not (tmp_path / "canary").exists()


def test_metadata_of_something_else_than_a_tensor_is_refused(tiny):
    save(tiny, 1)
    path = latest(tiny.run_dir)
    metadata = metadata_of(path)
    metadata.state_dict_metadata["model.norm"] = torch.Size([16])
    forge(path, ".metadata", pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="holds something else than tensors"):
        read_back(path)


def test_a_place_outside_the_checkpoint_is_not_read(tiny, tmp_path):
    save(tiny, 1)
    path = latest(tiny.run_dir)
    shutil.copy(path / "__0_0.distcp", tmp_path / "secret")
    for name in ("../../../../secret", str(tmp_path / "secret"), "__7_0.distcp"):
        metadata = metadata_of(path)
        for place in metadata.storage_data.values():
            place.relative_path = name
        forge(path, ".metadata", pickle.dumps(metadata))
        with pytest.raises(DamagedError, match="which the manifest does not list"):
            read_back(path)


def test_the_unpickler_allows_nothing_but_metadata():
    for harmless_looking in (eval, getattr, torch.load, io.open):
        with pytest.raises(ValueError, match="refused because loading it could run code"):
            reader._Unpickler(io.BytesIO(pickle.dumps(harmless_looking))).load()
    for nonsense in (3, {}, None):
        with pytest.raises(DamagedError, match="could not be loaded"):
            load_metadata(nonsense)


def load_metadata(value):
    def read_metadata(self, *_, **__):
        return reader._Unpickler(io.BytesIO(pickle.dumps(value))).load().state_dict_metadata
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.TensorReader, "read_metadata", read_metadata)
        load("nowhere", {"tensors": checkpoint.describe(tensors()), "files": {}}, tensors())


def test_file_names_in_a_manifest_never_become_paths(tiny, tmp_path):
    save(tiny, 1)
    path = latest(tiny.run_dir)
    (tmp_path / "outside").write_text("x")
    (path / "outside").write_text("y")      # of the same name and size, in the folder
    (path / "link").symlink_to(tmp_path / "outside")
    whole = json.loads((path / "manifest.json").read_text())
    entry = {"bytes": 1, "sha256": checkpoint.sha256_of(tmp_path / "outside")}
    for name in ("../../../../outside", str(tmp_path / "outside"), "link", ".", ""):
        seal(path, whole | {"files": whole["files"] | {name: entry}})
        with pytest.raises(DamagedError, match="which is no file of this folder's own|is missing or not"):
            read_manifest(path)


# ------------------------------------------------------------------------------------------------- formats and models

@pytest.fixture
def old_run(tmp_path):
    """A run stopped at step 3 of 6 by the version that wrote format 1."""
    with tarfile.open(ROOT / "tests/fixtures/checkpoint_format_1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "golden"


def test_format_1_is_still_read(old_run):
    path, manifest = newest_good(old_run, ALONE, pytest.fail)
    assert (manifest["format_version"], manifest["step"], manifest["state"]["moved_on"]) == (1, 3, 0)
    model, config = load_model(old_run)
    assert (config.run, config.total_steps) == ("golden", 6)
    assert sum(float(p.double().abs().sum()) for p in model.parameters()) == pytest.approx(429.47488334414084, rel=1e-12)
    filled = {name: torch.zeros(shape) for name, (shape, _) in manifest["tensors"].items()}
    assert restore(old_run, filled, ALONE, pytest.fail)[0] == path
    assert all(t.any() for name, t in filled.items() if name.startswith("optim."))
    flip(path / "__0_0.distcp", 4321)
    with pytest.raises(DamagedError):
        load_model(old_run)


def test_a_run_of_format_1_goes_on_as_if_it_had_never_stopped(old_run, data_dir, tmp_path, capsys):
    old = read_config(old_run)
    config = replace(old, out=str(tmp_path), data=replace(old.data, dir=str(data_dir)))
    whole = replace(config, run="whole")
    for each in (config, whole):
        done = call_train(capsys, each, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    a, b = (latest(each.run_dir) for each in (config, whole))
    assert read_manifest(a)["format_version"] == FORMAT_VERSION == 2
    a, b = (read_manifest(path)["files"]["__0_0.distcp"] for path in (a, b))
    assert a == b       # size and hash of weights and moments


def test_load_model_explains_what_is_missing(tiny, tmp_path):
    with pytest.raises(UserError, match="is no run: it has no config.json"):
        load_model(tmp_path / "nothing")
    tiny.run_dir.mkdir(parents=True)
    (tiny.run_dir / "config.json").write_text(json.dumps(tiny.to_dict()))
    with pytest.raises(UserError, match="has no finished checkpoint yet"):
        load_model(tiny.run_dir)

