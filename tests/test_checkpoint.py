import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from runtime import checkpoint
from runtime.checkpoint import Checkpointer, CheckpointError, checkpoints, latest, load, load_model, read_manifest
from runtime.config import ConfigError, config_from_dict  # noqa: F401 - config_from_dict is used by the killed process
from tests.conftest import ROOT

ALONE = SimpleNamespace(rank=0, size=1, is_main=True, checkpoint_group=None)


def tensors(step=0):
    generator = torch.Generator().manual_seed(step)
    return {"model.a": torch.randn(40, 16, generator=generator), "optim.a.exp_avg": torch.randn(40, 16, generator=generator),
            "model.norm": torch.randn(16, generator=generator)}


def save(config, *steps, keep=3):
    saver = Checkpointer(config.run_dir, keep, ALONE)
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


def test_what_was_saved_comes_back(tiny):
    save(tiny, 3)
    path = latest(tiny.run_dir)
    assert path.name == "step_00000003"
    assert all(torch.equal(read_back(path)[k], t) for k, t in tensors(3).items())
    assert read_manifest(path)["state"] == {"updates": 3}


def test_later_changes_of_the_tensors_do_not_leak_into_a_save_under_way(tiny):
    saver, live = Checkpointer(tiny.run_dir, 3, ALONE), tensors(1)
    saver.save(1, live, {}, tiny)
    for t in live.values():
        t.fill_(0)
    saver.finish()
    assert torch.equal(read_back(latest(tiny.run_dir))["model.a"], tensors(1)["model.a"])


def test_the_newest_few_are_kept(tiny):
    save(tiny, 1, 2, 3, 4, 5, keep=2)
    assert [p.name for p in checkpoints(tiny.run_dir)] == ["step_00000004", "step_00000005"]
    assert sorted(p.name for p in (tiny.run_dir / "checkpoints").iterdir()) == ["step_00000004", "step_00000005"]


def test_what_a_kill_left_half_written_is_no_checkpoint_and_goes(tiny):
    save(tiny, 1)
    folder = tiny.run_dir / "checkpoints"
    (folder / ".tmp_step_00000002").mkdir()
    shutil.copytree(folder / "step_00000001", folder / "step_00000002")
    (folder / "step_00000002/DONE").unlink()
    assert latest(tiny.run_dir).name == "step_00000001"
    save(tiny, 2)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000001", "step_00000002"]
    assert torch.equal(read_back(folder / "step_00000002")["model.a"], tensors(2)["model.a"])


FAULTS = {
    "hashing": "import runtime.checkpoint as c; real = c._sha256\ndef die(p): os._exit(9)\nc._sha256 = die",
    "manifest": "import runtime.checkpoint as c; real = c._write_synced\n"
                "def die(p, t):\n    p.write_text(t[:len(t) // 2]); os._exit(9)\nc._write_synced = die",
    "rename": "import runtime.checkpoint as c\nc._sync_folder = lambda p: os._exit(9)",
    "pruning": "import runtime.checkpoint as c\nc.shutil = type('S', (), {'rmtree': staticmethod(lambda p: os._exit(9))})",
}


@pytest.mark.parametrize("moment", FAULTS)
def test_killed_at_any_moment_of_a_save_a_whole_checkpoint_remains(tiny, moment):
    save(tiny, 1)
    code = (f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n{FAULTS[moment]}\n"
            "from tests.test_checkpoint import save, config_from_dict\nimport json\n"
            "save(config_from_dict(json.loads(sys.argv[1])), 2, keep=1)")
    done = subprocess.run([sys.executable, "-c", code, json.dumps(tiny.to_dict())], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    path = latest(tiny.run_dir)
    step = read_manifest(path)["step"]
    assert step == (2 if moment == "pruning" else 1)
    assert torch.equal(read_back(path)["model.a"], tensors(step)["model.a"])
    save(tiny, 3, keep=1)
    assert [p.name for p in (tiny.run_dir / "checkpoints").iterdir()] == ["step_00000003"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_every_flipped_bit_and_every_cut_is_noticed(tiny, name):
    save(tiny, 1)
    file = latest(tiny.run_dir) / name
    whole = file.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1:])
        with pytest.raises(ConfigError, match=f"{name} differs from what was written"):
            read_manifest(file.parent)
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="is missing or not"):
        read_manifest(file.parent)
    file.unlink()
    with pytest.raises(ConfigError, match="is missing or not"):
        read_manifest(file.parent)


def test_a_damaged_manifest_or_another_version_gets_a_sentence(tiny):
    save(tiny, 1)
    file = latest(tiny.run_dir) / "manifest.json"
    text = file.read_text()
    for bad in ("", "[]", "{}", text[:-40], "\x00", '{"format_version": 1, "files": []}', '{"format_version": 1, "files": {}}',
                '{"format_version": 1, "files": {".metadata": 3}}', text.replace('"state"', '"estate"')):
        file.write_text(bad)
        with pytest.raises(ConfigError, match=r"manifest.json cannot be read .* move .* away"):
            read_manifest(file.parent)
    file.write_text(text.replace('"format_version": 1', '"format_version": 7'))
    with pytest.raises(ConfigError, match="has checkpoint format 7, this version reads 1"):
        read_manifest(file.parent)


def test_what_does_not_fit_is_refused_rather_than_dropped_or_cast(tiny):
    save(tiny, 1)
    path = latest(tiny.run_dir)
    manifest = read_manifest(path)
    for wrong in ({"model.b": torch.zeros(3)}, {"model.a": torch.zeros(40, 17)},
                  {"model.a": torch.zeros(40, 16, dtype=torch.bfloat16)}):
        with pytest.raises(ConfigError, match="the configuration does not fit"):
            load(path, manifest, wrong)


def test_a_pickle_in_the_metadata_is_not_run(tiny, tmp_path):
    """The file is hashed, so an attacker rewrites the manifest too; the reader itself must refuse."""
    save(tiny, 1)
    path, canary = latest(tiny.run_dir), tmp_path / "canary"

    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    (path / ".metadata").write_bytes(pickle.dumps(Attack()))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][".metadata"] = {"bytes": (path / ".metadata").stat().st_size,
                                      "sha256": checkpoint._sha256(path / ".metadata")}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"names posix.system, which no checkpoint of ours contains"):
        load(path, read_manifest(path), empty())
    assert not canary.exists()


def test_the_unpickler_allows_nothing_but_metadata():
    for harmless_looking in (eval, getattr, torch.load, io.open):
        with pytest.raises(ConfigError, match="refused because loading it could run code"):
            checkpoint._Unpickler(io.BytesIO(pickle.dumps(harmless_looking))).load()


def test_file_names_in_a_manifest_never_become_paths(tiny, tmp_path):
    save(tiny, 1)
    path = latest(tiny.run_dir)
    (tmp_path / "outside").write_text("x")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../../../outside"] = {"bytes": 1, "sha256": checkpoint._sha256(tmp_path / "outside")}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="outside is missing"):
        read_manifest(path)


def test_an_unwritable_folder_is_told_at_the_next_meeting_and_the_old_checkpoint_stays(tiny, monkeypatch):
    saver = save(tiny, 1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_synced", full)
    saver.save(2, tensors(2), {}, tiny)
    with pytest.raises(CheckpointError, match="could not be written .*No space left on device.*run the same command to resume"):
        saver.finish()
    assert latest(tiny.run_dir).name == "step_00000001"


def test_saving_happens_in_the_background(tiny, monkeypatch):
    gate, real = threading.Event(), checkpoint._sha256

    def slow(path):
        assert gate.wait(30)
        return real(path)

    monkeypatch.setattr(checkpoint, "_sha256", slow)
    saver = Checkpointer(tiny.run_dir, 3, ALONE)
    saver.save(1, tensors(1), {}, tiny)     # would wait for ever if it hashed here
    assert latest(tiny.run_dir) is None
    gate.set()
    saver.finish()
    assert latest(tiny.run_dir).name == "step_00000001"


def test_load_model_explains_what_is_missing(tiny, tmp_path):
    with pytest.raises(ConfigError, match="is no run: it has no config.json"):
        load_model(tmp_path / "nothing")
    tiny.run_dir.mkdir(parents=True)
    (tiny.run_dir / "config.json").write_text(json.dumps(tiny.to_dict()))
    with pytest.raises(ConfigError, match="has no finished checkpoint yet"):
        load_model(tiny.run_dir)
