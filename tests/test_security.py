"""Through the real train.py: nothing hostile in a run's folder is executed, nothing secret gets into it."""

import hashlib
import io
import json
import os
import pickle
import secrets
import shutil
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from runtime.checkpoint import checkpoints
from tests.conftest import call_train

SECRETS = ["WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN",
           "DATABASE_URL", "MY_PASSWORD", "NCCL_SECRET_TOKEN", "TORCH_API_KEY", "HTTPS_PROXY", "SLURM_JWT"]


@pytest.fixture(scope="module")
def finished(data_dir, tmp_path_factory):
    """A run of six steps and its process's words, made once; tests copy it and undo its last steps."""
    return {}


@pytest.fixture
def run(tiny, tmp_path, capsys, finished, monkeypatch):
    """A run that was cut off after step 3 of 6: the same command goes on from what lies in its folder."""
    if not finished:
        finished["secrets"] = {key: secrets.token_hex(16) for key in SECRETS}
        for key, value in finished["secrets"].items():
            monkeypatch.setenv(key, f"https://user:{value}@host")
        done = call_train(capsys, tiny, tmp_path)
        assert done.returncode == 0, done.stderr
        finished["folder"], finished["words"] = tmp_path / "kept", done.stdout + done.stderr
        shutil.copytree(tiny.run_dir, finished["folder"])
    config = replace(tiny, run="victim")
    shutil.copytree(finished["folder"], config.run_dir)
    shutil.rmtree(config.run_dir / "checkpoints/step_00000006")
    (config.run_dir / "summary.json").unlink()
    stored = json.loads((config.run_dir / "config.json").read_text())
    (config.run_dir / "config.json").write_text(json.dumps(stored | {"run": "victim"}))
    return config


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def reseal(path):
    """The manifest and DONE say again what the files are: whoever can write one file can write all."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(path, manifest)


def write_manifest(path, manifest):
    text = json.dumps(manifest)
    (path / "manifest.json").write_text(text)
    (path / "DONE").write_text(hashlib.sha256(text.encode()).hexdigest())


def bomb_in_metadata(path, canary):
    (path / ".metadata").write_bytes(pickle.dumps(Bomb(canary)))


def bomb_beside_the_metadata(path, canary):
    """The true metadata, and one more attribute that explodes while it is read."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = Bomb(canary)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def bomb_as_item(path, canary):
    """One of the tensors that are asked for calls itself an item of bytes, which DCP would unpickle."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.startswith("model."))
    info = metadata.storage_data.pop(index)
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    shard = path / info.relative_path
    file = io.BytesIO()
    torch.save(Bomb(canary), file)
    metadata.storage_data[MetadataIndex(index.fqn)] = type(info)(info.relative_path, shard.stat().st_size, len(file.getvalue()))
    with open(shard, "ab") as out:
        out.write(file.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("plant", [bomb_in_metadata, bomb_beside_the_metadata, bomb_as_item])
def test_a_hostile_checkpoint_runs_nothing(run, tmp_path, capsys, plant):
    canary, path = tmp_path / "canary", checkpoints(run.run_dir)[-1]
    plant(path, canary)
    reseal(path)
    done = call_train(capsys, run, tmp_path)
    assert not canary.exists()
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert str(run.run_dir) in done.stderr and not (run.run_dir / "summary.json").exists()
    assert "bad_step_00000003" in done.stderr, "set aside as damaged, not taken up and not taken for a fresh start"


def test_the_bombs_go_off_where_nobody_looks(run, tmp_path):
    """Or the test above would prove nothing."""
    for i, plant in enumerate((bomb_in_metadata, bomb_beside_the_metadata)):
        path = tmp_path / f"copy{i}"
        shutil.copytree(checkpoints(run.run_dir)[-1], path)
        plant(path, tmp_path / f"canary{i}")
        with open(path / ".metadata", "rb") as file:
            pickle.load(file)
        assert (tmp_path / f"canary{i}").exists()


@pytest.mark.parametrize("name", ["../../../../outside", "/etc/hostname", "link", "sub/file"])
def test_a_manifest_reads_no_file_of_another_folder(run, tmp_path, capsys, name):
    (run.run_dir.parent / "outside").write_text("private")
    path = checkpoints(run.run_dir)[-1]
    (path / "link").symlink_to(run.run_dir.parent / "outside")
    (path / "sub").mkdir()
    (path / "sub/file").write_text("private")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 7, "sha256": hashlib.sha256(b"private").hexdigest()}
    write_manifest(path, manifest)
    done = call_train(capsys, run, tmp_path)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stdout
    assert not (run.run_dir / "summary.json").exists()


def test_a_shard_that_is_a_link_to_another_file_is_refused(run, tmp_path, capsys):
    path = checkpoints(run.run_dir)[-1]
    shard = next(path.glob("*.distcp"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    done = call_train(capsys, run, tmp_path)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr


def test_no_secret_of_the_environment_is_written_anywhere(run, tmp_path, finished):
    files = [path for path in finished["folder"].rglob("*") if path.is_file()]
    assert {"env.json", "config.json", "metrics.jsonl", "summary.json", "manifest.json"} <= {path.name for path in files}
    for text in [finished["words"].encode(), *(path.read_bytes() for path in files)]:
        assert not [key for key, value in finished["secrets"].items() if value.encode() in text]
    environment = json.loads((finished["folder"] / "env.json").read_text())
    environment.pop("git_diff")     # may hold this file's own text
    assert not [key for key in SECRETS if key in json.dumps(environment)]


def test_rows_that_somebody_else_wrote_are_data(run, tmp_path, capsys):
    """Lines of metrics.jsonl that are no rows of ours are dropped or refused; the run's own rows are whole afterwards."""
    with open(run.run_dir / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "step": "__import__(\'os\').abort()"}\n[1]\n\xff\xfe\nnull\n"x"\n{"kind": 3}\n')
    done = call_train(capsys, run, tmp_path)
    assert "Traceback" not in done.stderr and done.returncode in (0, 1, 2)
    if done.returncode == 0:
        rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("override", ["run=../up", "run=a/b", "run=..", "run=.", "run=-rf", "run=", "data.mixture=../x:1",
                                      "data.mixture=/etc:1", "data.mixture=a/b:1", "data.mixture=..:1", "start_from=../../etc"])
def test_names_never_become_paths(tiny, tmp_path, capsys, override):
    refused = call_train(capsys, tiny, tmp_path, override)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.py"]
