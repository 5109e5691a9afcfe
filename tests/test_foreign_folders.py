"""eval/from_hf.py on damaged, unsafe or foreign folders, on machines that fail: told in one sentence, nothing left."""

import json
import os
import shutil
import struct
from types import SimpleNamespace

import pytest
from tiny_llama import make_llama

from eval import from_hf
from eval.from_hf import import_checkpoint
from runtime.checkpoint import checkpoints, read_manifest
from runtime.cli import UserError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("hub") / "llama", shard_size="100KB")


@pytest.fixture
def source(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "source")


def refused(source, tmp_path, target="out/run"):
    with pytest.raises(UserError) as caught:
        import_checkpoint(str(source), str(tmp_path / target))
    said = str(caught.value)
    assert "\n" not in said and not list(tmp_path.glob("out/*")) and not list(tmp_path.glob("out/.*")), said
    return said


def parts(source):
    return sorted(path.name for path in source.glob("model-*.safetensors"))


def remove(folder, *names):
    for name in names:
        (folder / name).unlink()


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flip_header(path, edit):
    """Write a safetensors file's header anew."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])


def no_weights(source):
    remove(source, *parts(source), "model.safetensors.index.json")


def pickled(name):
    def harm(source):
        no_weights(source)
        (source / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    return harm


def widen(header):
    name = next(name for name in header if name != "__metadata__")
    header[name]["data_offsets"][1] += 10**9


def rename(header):
    header["x.weight"] = header.pop(sorted(header)[-1])


def says(**changes):
    return lambda source: edit_json(source / "config.json", lambda config: config.update(changes))


def maps(changes, says_all=False):
    """The index, with other files for some tensors, without those of None, or with nothing else."""
    def change(index):
        index["weight_map"] = {} if says_all else index["weight_map"]
        index["weight_map"] |= changes
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    return lambda source: edit_json(source / "model.safetensors.index.json", change)


HARM = {
    "no config": (lambda s: remove(s, "config.json"), "has no config.json"),
    "config of half a file": (lambda s: (s / "config.json").write_text('{"architectures": ['), "config.json is not JSON"),
    "config no table": (lambda s: (s / "config.json").write_text("[1]"), "holds no table"),
    "config too deep": (lambda s: (s / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
    "config not text": (lambda s: (s / "config.json").write_bytes(b"\xff\xfe{"), "config.json is not JSON"),
    "another architecture": (says(architectures=["GPT2LMHeadModel"]), "GPT2"),
    "nothing": (no_weights, "has neither model.safetensors nor"),
    "pickle": (pickled("pytorch_model.bin"), "pytorch_model.bin: pickles can run code"),
    "another pickle": (pickled("consolidated.00.pth"), "consolidated.00.pth: pickles can run code"),
    "gguf": (pickled("llama.gguf"), "GGUF is no training format"),
    "a part missing": (lambda s: remove(s, parts(s)[1]), "the download is incomplete"),
    "a part cut": (lambda s: os.truncate(s / parts(s)[0], 5000), "no whole safetensors file"),
    "a part empty": (lambda s: os.truncate(s / parts(s)[0], 0), "no whole safetensors file"),
    "a header that lies": (lambda s: flip_header(s / parts(s)[0], widen), "no whole safetensors file"),
    "a tensor renamed": (lambda s: flip_header(s / parts(s)[0], rename), "lacks "),
    "an index out of the folder": (maps({"model.norm.weight": "../llama/model.safetensors"}), "it is not opened"),
    "an index of pickles": (maps({"model.norm.weight": "pytorch_model.bin"}), "it is not opened"),
    "an index of nothing": (maps({}, says_all=True), "weight_map"),
    "an index of numbers": (maps({"a": 1}, says_all=True), "weight_map"),
    "an index that lacks one": (maps({"model.norm.weight": None}), "lacks model.norm.weight"),
    "no tokenizer": (lambda s: remove(s, "tokenizer.json"), "has no tokenizer.json"),
    "a slow tokenizer": (lambda s: os.rename(s / "tokenizer.json", s / "tokenizer.model"), "tokenizer.model"),
    "no roles": (lambda s: remove(s, "tokenizer_config.json"), "tokenizer_config.json"),
    "another model's tokenizer": (says(vocab_size=300), "its tokenizer has 368 ids, but"),
    "other sizes": (says(vocab_size=421), "by config.json it should have (421, 64)"),
}


@pytest.mark.parametrize("name", HARM)
def test_a_damaged_or_unsafe_folder_is_refused_and_nothing_is_left(name, source, tmp_path):
    harm, words = HARM[name]
    harm(source)
    assert words in refused(source, tmp_path)


def test_names_that_cannot_be_are_refused(source, tmp_path):
    assert "is no folder" in refused(tmp_path / "nowhere", tmp_path)
    assert "is no folder" in refused(source / "config.json", tmp_path)
    assert "one folder name" in refused(source, tmp_path, "out/a b")


def test_what_is_there_stays(source, tmp_path):
    for make in (lambda path: path.mkdir(), lambda path: path.write_text("mine"), lambda path: path.symlink_to("nowhere")):
        make(path := tmp_path / f"there{len(list(tmp_path.iterdir()))}")
        with pytest.raises(UserError, match="exists: choose another"):
            import_checkpoint(str(source), str(path))
        assert os.path.lexists(path)


def test_a_fault_leaves_nothing_and_what_a_kill_left_is_in_nobodys_way(source, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(from_hf.dcp, "save", full)
        with pytest.raises(OSError, match="No space"):
            import_checkpoint(str(source), str(tmp_path / "out/run"))
    assert not list((tmp_path / "out").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(from_hf.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(OSError, match="the model takes 0.4 MiB as fp32 in .* 0.0 MiB are free"):
            import_checkpoint(str(source), str(tmp_path / "out/run"))
    with monkeypatch.context() as patch:    # as a kill would: nothing is cleaned up
        patch.setattr(from_hf.shutil, "rmtree", lambda *args, **kwargs: None)
        patch.setattr(from_hf, "seal", full)
        with pytest.raises(OSError, match="No space"):
            import_checkpoint(str(source), str(tmp_path / "out/run"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".tmp_run"]
    import_checkpoint(str(source), str(tmp_path / "out/run"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run"]
    read_manifest(checkpoints(tmp_path / "out/run")[0])


def test_memory_that_is_not_there_is_told(source, tmp_path, monkeypatch):
    def greedy(*args):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 32 bytes")
    monkeypatch.setattr(from_hf, "from_hf", greedy)
    with pytest.raises(MemoryError, match="GB as fp32"):
        import_checkpoint(str(source), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
