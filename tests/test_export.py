"""Tests of eval/export.py: what transformers loads computes the same logits, bit by bit, and makes the same tokens."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from export_runs import documents, write_run
from model_reference import tokens

from eval import export, sample, weights
from eval.from_hf import import_checkpoint
from eval.weights import newest_weights
from runtime.tokenizer import END_OF_TEXT, load_tokenizer
from tests.conftest import ROOT

LLAMA3 = {"rope_theta": 500.0, "rope_factor": 8.0, "rope_original_ctx": 16}
VARIANTS = {
    "plain": {},
    "gpt2_gqa": {"tokenizer": "gpt2", "n_kv_head": 2},
    "untied_llama3": {"tied": False, "n_kv_head": 1, **LLAMA3},
    "qwen3": {"qk_norm": True, "n_kv_head": 2},
    "everything": {"tied": False, "qk_norm": True, "norm_eps": 1e-3, **LLAMA3},
}


def auto_model(folder):
    from transformers import AutoModelForCausalLM
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def auto_tokenizer(folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder)


def weights_of(run_dir):
    return newest_weights(run_dir, "test")[1]


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_computes_the_same_bits(tmp_path, name):
    config, ours = write_run(tmp_path / "run", **VARIANTS[name])
    folder, back, again = (tmp_path / part for part in ("hf", "back", "again"))
    assert export.main([str(tmp_path / "run"), str(folder), "dtype=fp32"]) == 0
    theirs = auto_model(folder)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if config.model.qk_norm else "LlamaForCausalLM")
    assert theirs.dtype == torch.float32
    for shape in ((1, 1), (1, 2), (1, 7), (3, 24)):
        x = tokens(config.model, *shape)
        assert torch.equal(theirs(x).logits, ours(x)), shape

    # Greedy text is the same, token by token, up to the first end of text; rows that pad the vocabulary never come out.
    prompt, eot = tokens(config.model, 2, 5), load_tokenizer(config.data.tokenizer).eot
    texts = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=15, pad_token_id=eot)
    assert torch.equal(texts[:, 5:], sample.generate(ours, prompt, 15, eot=eot))

    # And back: the weights' bits, the tokenizer's files; the second export is the first one.
    import_checkpoint(str(folder), str(back))
    found, wanted = weights_of(back), weights_of(tmp_path / "run")
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)
    assert export.main([str(back), str(again), "dtype=fp32"]) == 0
    for file in folder.iterdir():
        if file.name not in ("README.md", "training.png"):
            assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_padding_would_come_out_if_it_were_not_suppressed(tmp_path):
    """The test above sees it: the rough models' padded rows are as likely as any."""
    config, ours = write_run(tmp_path / "run")
    x = tokens(config.model, 16, 24)
    assert (ours(x).argmax(-1) >= 257).float().mean() > 0.1


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_the_tokens_of_300_documents(tmp_path, name):
    write_run(tmp_path / "run", tokenizer=name)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    ours, theirs, file = load_tokenizer(name), auto_tokenizer(tmp_path / "hf"), load_tokenizer(str(tmp_path / "hf"))
    texts = documents()
    spelled = [END_OF_TEXT in text for text in texts]
    assert len(texts) == 300 and 5 < sum(spelled) < 150
    for text, is_spelled in zip(texts, spelled, strict=True):
        ids = ours.encode(text).tolist()
        assert theirs.encode(text, split_special_tokens=True) == ids
        assert file.encode(text).tolist() == ids        # tokenizer.json alone; of gpt2 transformers reads the other files
        assert (theirs.encode(text) == ids) != is_spelled     # Hugging Face reads the token where the text spells it
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert (file.prefix, file.vocab_size) == (ours.prefix, ours.vocab_size)
    assert (len(theirs), theirs.eos_token_id, theirs.bos_token_id) == (ours.vocab_size, ours.eot, ours.eot)
    assert theirs.decode([ours.eot]) == ours.decode([ours.eot]) == END_OF_TEXT
    assert theirs.decode(range(128, 160)) == ours.decode(range(128, 160))       # bytes that are no text
    assert theirs.model_max_length == 24
    assert set(theirs("a")) == {"input_ids", "attention_mask"} == set(theirs.model_input_names)
    # Versions of transformers differ in what a tokenizer gives where its file does not say it.
    about = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert about["tokenizer_class"] == "GPT2Tokenizer" or about["model_input_names"] == ["input_ids", "attention_mask"]


def test_bf16_is_the_default_and_large_models_lie_in_several_files(tmp_path, monkeypatch):
    _, ours = write_run(tmp_path / "run", tied=False)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "one")]) == 0
    about = json.loads((tmp_path / "one" / "config.json").read_text())
    assert about["dtype"] == "bfloat16" and about["eos_token_id"] == about["bos_token_id"] == 256
    monkeypatch.setattr(export, "FILE_BYTES", 60_000)       # the embedding takes 49,152, gate and up 12,288 each
    (tmp_path / "many").mkdir()
    assert export.main([str(tmp_path / "run"), str(tmp_path / "many")]) == 0
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert files == sorted(set(index["weight_map"].values())) == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in ours.parameters())
    one, many = auto_model(tmp_path / "one"), auto_model(tmp_path / "many")
    assert one.dtype == torch.bfloat16
    assert torch.equal(one.lm_head.weight, ours.head.weight.bfloat16())
    assert torch.equal(one.model.layers[1].self_attn.k_proj.weight, ours.layers[1].attn.qkv.weight[64:128].bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), many.state_dict().values(), strict=True))


@pytest.mark.parametrize("arguments, told", [
    ("{tmp}/nowhere {tmp}/hf", "is no run: it has no config.json"), ("{tmp}/run", "the folder to write is missing"),
    ("{tmp}/run {tmp}/run", "is there already and not an empty folder"),
    ("{tmp}/run {tmp}/run/config.json", "is there already and not an empty folder"),
    ("{tmp}/run {tmp}/hf dtype=fp32 float8=rowwise", "drop one of the two"),
    ("{tmp}/run {tmp}/hf dtype=fp16", "dtype='fp16' is not one of bf16, fp32"),
    ("{tmp}/run {tmp}/hf float8=mxfp8", "has no counterpart that torchao's inference loads: use one of tensorwise,"),
    ("{tmp}/run {tmp}/hf license=Apache\n2", "is no name that the Hub knows"),
    ("--from-hf {tmp}/run {tmp}/new dtype=bf16 {tmp}/x", "--from-hf takes a folder to read and the run to make"),
    ("--from-hf {tmp}/run", "run is missing"), ("{tmp}/run {tmp}/hf step=3", "there is no key 'step'")])
def test_mistakes_get_a_sentence(tmp_path, capsys, arguments, told):
    write_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert export.main([a.format(tmp=tmp_path) for a in arguments.split(" ")]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tokenizer_of_another_model_is_refused(tmp_path, capsys):
    write_run(tmp_path / "run")
    write_run(tmp_path / "other", tokenizer="gpt2")
    folder, path = tmp_path / "tokenizer", tmp_path / "run" / "config.json"
    assert export.main([str(tmp_path / "other"), str(folder)]) == 0
    path.write_text(path.read_text().replace('"byte"', json.dumps(str(folder))))
    assert export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 2
    assert "has 50257 ids, but its model 384 rows: they do not belong together" in capsys.readouterr().err
    path = tmp_path / "other" / "config.json"
    path.write_text(path.read_text().replace('"gpt2"', json.dumps(str(folder))))
    for content in ("[]", "{", '{"suppress_tokens": 3}', '{"suppress_tokens": ["a"]}'):
        (folder / "generation_config.json").write_text(content)
        assert export.main([str(tmp_path / "other"), str(tmp_path / "hf")]) == 2
        said = capsys.readouterr().err
        assert "generation_config.json of the run's tokenizer cannot be read" in said and said.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "run", "tokenizer"]


def test_a_full_disk_leaves_nothing(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run")

    def write(path, *_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    monkeypatch.setattr(export, "write_safetensors", write)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 1
    said = capsys.readouterr().err
    assert "No space left on device; nothing was written" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("command", [export, weights])
def test_ctrl_c_ends_quietly_and_leaves_nothing(tmp_path, capsys, monkeypatch, command):
    write_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))

    def stopped(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(command, "sync_folder", stopped)
    assert command.main([str(tmp_path / "run"), str(tmp_path / "new.safetensors")]) == 130
    assert capsys.readouterr() == ("", "")
    assert sorted(tmp_path.rglob("*")) == before or command is weights      # there the file is whole, its folder not synced yet


def test_an_import_that_does_not_fit_the_disk_tells_its_size(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run")
    assert export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    for free, told in ((10**5, "and 0.1 MiB are free"), (3 * 2**29, None)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert export.main(["--from-hf", str(tmp_path / "hf"), str(tmp_path / "new")]) == (1 if told else 0)
        said = capsys.readouterr().err
        assert not told or said.startswith("eval.export: the model takes 0.4 MiB as fp32 in ") and told in said, said


def test_a_kill_leaves_no_half_folder_and_nothing_needs_transformers(tmp_path):
    write_run(tmp_path / "run")
    code = ("import os, signal, sys; sys.modules['transformers'] = None\nfrom eval import export\n"
            "export.sync_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"      # all is written, nothing renamed
            "sys.exit(export.main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "hf")], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "hf").exists() and (next(tmp_path.glob(".hf.*.tmp")) / "README.md").is_file()
    assert export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0      # what was left is in nobody's way
