"""eval/from_hf.py: a Llama that transformers made comes in bit for bit, learns, goes out again; what is refused, by name."""

import json
import os
import random
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from eval_runs import call, make_llama, read_llama

import prepare_data
from configs.continue_llama import config as LLAMA_8B
from eval import export
from eval import from_hf as module
from eval.export import hf_config, to_hf
from eval.from_hf import from_hf, gpt_config, import_checkpoint
from runtime.checkpoint import branch, checkpoints, is_weights_only, load_model, read_manifest
from runtime.cli import UserError
from runtime.config import CheckpointConfig, EvalConfig, FP8Config, ParallelConfig, read_config
from runtime.data import open_data
from runtime.machine import read_rows
from runtime.tokenizer import load_tokenizer
from tests.conftest import call_train
from tests.scaling_runs import edit
from tests.test_model import TINY, build_rough

# Sizes and position encoding as the published files state them.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256}
OURS_31_8B = replace(LLAMA_8B.model, n_ctx=131072, loss_chunk=None)
LLAMA_1_7B = {       # what is not said has Llama's own default
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048,
    "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936}


def test_published_configurations_are_read_as_they_are_meant():
    assert gpt_config(LLAMA_31_8B) == OURS_31_8B and OURS_31_8B.params_total == 8_030_261_248
    seven, qwen = gpt_config(LLAMA_1_7B), gpt_config(QWEN3)
    assert (seven.rope_theta, seven.rope_factor, seven.kv_heads, seven.norm_eps) == (10_000.0, None, 32, 1e-6) and not seven.tied
    assert seven.params_total == 6_738_415_616
    for gone in ({}, {"rope_theta": None, "rope_scaling": None}, {"rope_parameters": None}):     # transformers 5 reads one
        assert gpt_config(hf_config(OURS_31_8B, "bf16") | gone) == OURS_31_8B
    assert qwen.qk_norm and qwen.rope_theta == 1e6 and qwen.params_total == 8_190_735_360
    assert gpt_config({key: QWEN3[key] for key in QWEN3.keys() - {"head_dim"}}).head_size == 128      # its own default
    assert gpt_config({**LLAMA_31_8B, "vocab_size": 32001}).vocab_padded == 32001      # padded by no row that it does not have


@pytest.mark.parametrize("base, change, words", [
    *((LLAMA_31_8B, {key: value}, f"{key}={value!r}") for key, value in {
        "architectures": ["MistralForCausalLM"], "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "head_dim": 64,
        "pretraining_tp": 2, "sliding_window": 4096, "layer_types": ["sliding_attention"], "partial_rotary_factor": 0.5,
        "quantization_config": {"quant_method": "fp8"}, "auto_map": {"x": "y"}}.items()),
    (LLAMA_31_8B, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
    (LLAMA_31_8B, {"rope_scaling": {"full_attention": {"rope_type": "llama3"}}}, "rope_keys=['full_attention']"),
    (LLAMA_31_8B, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_low_freq=None"),
    (LLAMA_31_8B, {"hidden_size": None}, "lacks hidden_size"), (LLAMA_31_8B, {"num_key_value_heads": 7}, "not divisible"),
    (LLAMA_31_8B, {"num_attention_heads": 0}, "lacks num_attention_heads"),
    (QWEN3, {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"),
    (QWEN3, {"hidden_size": 1024, "num_attention_heads": 16}, "head_dim=128")])      # Qwen3-0.6B: heads wider than their share
def test_what_cannot_be_held_exactly_is_refused_in_a_sentence(base, change, words):
    with pytest.raises(UserError, match=rf"^config.json .*{re.escape(words)}.*$"):
        gpt_config(base | change)


@pytest.mark.parametrize("changes, words", [
    ({"model.layers.1.self_attn.q_proj.weight": None, "model.norm.weight": None}, "q_proj.weight, model.norm.weight"),
    ({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}, "model.layers.0.self_attn.q_proj.bias has no place"),
    ({"model.norm.weight": torch.ones(49)}, "of (49,), but must be (48,)"),
    ({"model.norm.weight": torch.ones(48, dtype=torch.float64)}, "is torch.float64 of"),
    ({"model.norm.weight": torch.ones(48).to(torch.float8_e4m3fn)}, "is torch.float8_e4m3fn of"),
    ({"lm_head.weight": torch.ones(256, 48)}, "lm_head.weight is not the embedding"), ({}, None)])
def test_half_precision_becomes_fp32_exactly_what_says_nothing_new_is_left_out_and_foreign_tensors_are_named(changes, words):
    for dtype in (torch.bfloat16, torch.float16):
        ours = {name: p.detach().to(dtype) for name, p in build_rough(TINY).named_parameters()}
        known = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6), "lm_head.weight": ours["wte.weight"]}
        theirs = {name: t for name, t in (to_hf(TINY, ours) | known | changes).items() if t is not None}
        with pytest.raises(UserError, match=rf"^.*{re.escape(words)}.*$") if words else nullcontext():
            found = dict(from_hf(TINY, theirs, theirs.__getitem__))
            assert found.keys() == ours.keys()
            assert all(found[k].dtype == torch.float32 and torch.equal(found[k], ours[k].float()) for k in ours)


@pytest.mark.parametrize("made", [
    {"max_position_embeddings": 5000},      # GQA, llama3 RoPE, untied, an odd vocabulary
    {"architecture": "Qwen3", "tie_word_embeddings": True, "vocab_size": 512, "shard_size": "100KB"},
    {"rope": {"rope_type": "default", "rope_theta": 10000.0}, "num_key_value_heads": 4, "dtype": torch.float16}])
def test_logits_are_transformers_bit_for_bit_and_the_run_is_whole(made, tmp_path):
    real, source, run_dir = make_llama(tmp_path / "hub", **made), tmp_path / "0a1b", tmp_path / "out/run"
    # Links, as the Hub's own client keeps its downloads.
    shutil.copytree(real, source, copy_function=lambda path, link: os.symlink(path, link))
    assert import_checkpoint(str(source), str(run_dir)) == run_dir / "checkpoints/step_00000000"
    (ours, _), theirs = load_model(run_dir, compute_dtype=torch.float32), read_llama(source)
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(len(ours.cos))[None])       # far beyond the texts below
    assert torch.equal(ours.cos.repeat(1, 2), cos[0]) and torch.equal(ours.sin.repeat(1, 2), sin[0])
    for B, T in ((1, 1), (1, 2), (4, 1), (3, 64), (1, 63)):
        x = torch.randint(400, (B, T), generator=torch.Generator().manual_seed(T))
        with torch.no_grad():
            expected = theirs(x).logits
            assert torch.equal(ours(x), expected) and expected.std() > 0.5, (B, T)
    config, raw = read_config(run_dir), json.loads((source / "config.json").read_text())
    assert config.model.vocab_padded == raw["vocab_size"] and config.data.tokenizer == str(run_dir / "tokenizer")
    for file in (run_dir / "tokenizer").iterdir():
        assert file.read_bytes() == (source / file.name).read_bytes()
    manifest = read_manifest(checkpoints(run_dir)[0])
    assert is_weights_only(manifest)
    facts = manifest["state"]["imported"]
    assert (facts["folder"], facts["architecture"]) == (source.name, raw["architectures"][0])
    assert not any(path.is_symlink() for path in run_dir.rglob("*"))


@pytest.fixture
def source(tmp_path):
    return make_llama(tmp_path / "source", shard_size="100KB")


def parts(source):
    return sorted(source.glob("model-*.safetensors"))


@pytest.mark.parametrize("harm, words", [
    (lambda s: edit(s / "config.json", vocab_size=300), "its tokenizer has 382 ids"),
    (lambda s: (s / "config.json").write_text('{"architectures": ['), "its config.json cannot be read"),
    (lambda s: [part.rename(part.with_suffix(".bin")) for part in parts(s)], "pickles (.bin, .pth) can run code"),
    (lambda s: parts(s)[1].unlink(), "the files lack"), (lambda s: os.truncate(parts(s)[0], 5000), "no whole safetensors file"),
    (lambda s: shutil.copy(parts(s)[1], s / "old.safetensors"), "keep those of one download"),
    (lambda s: (s / "tokenizer.json").unlink(), "has no tokenizer.json")])
def test_a_damaged_or_unsafe_folder_is_refused_and_nothing_is_left(harm, words, source, tmp_path):
    harm(source)
    with pytest.raises(UserError, match=rf"^.*{re.escape(words)}.*$"):
        import_checkpoint(str(source), str(tmp_path / "out/run"))
    assert not list(tmp_path.glob("out/*"))


def test_a_fault_leaves_nothing_and_what_a_kill_left_is_in_nobodys_way(source, tmp_path, monkeypatch):
    out, left = tmp_path / "out", tmp_path / "out/.tmp_run/checkpoints/step_00000000"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(module, "seal", Mock(side_effect=OSError(28, "No space left on device")))
        import_checkpoint(str(source), str(out / "run"))
    assert not list(out.iterdir())
    left.mkdir(parents=True)
    import_checkpoint(str(source), str(out / "run"))
    assert [path.name for path in out.iterdir()] == ["run"]
    with pytest.raises(UserError, match="exists: choose another"):
        import_checkpoint(str(source), str(out / "run"))


def test_an_imported_llama_learns_its_responses_and_goes_back(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    call(export, "--from-hf", source, "out/llama")
    rng, words = random.Random(0), ["cat", "sat", "mat", "dog", "one", "two", "three", "four", "five", "six", "seven"]
    said = [" ".join(rng.choices(words, k=rng.randint(2, 6))) for _ in range(300)]
    Path("chat.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i}: say {each}\n", "response": f"{each}."}) + "\n" for i, each in enumerate(said)))
    call(prepare_data, "local", "chat.jsonl", "name=chat", "instruct=true", "tokenizer=out/llama/tokenizer", "out=data",
         "val_share=0.1", "processes=1")
    config = replace(
        LLAMA_8B, run="bf16", steps=8, model=replace(read_config("out/llama").model, n_ctx=32, loss_chunk=48),
        parallel=ParallelConfig(compile=False, recompute=True), optim=replace(LLAMA_8B.optim, lr=5e-3),
        start_from="out/llama/checkpoints/step_00000000",
        data=replace(LLAMA_8B.data, tokenizer="out/llama/tokenizer", tokens_per_step=512, micro_batch=8, max_epochs=9),
        eval=EvalConfig(every=None, tokens=640), checkpoint=CheckpointConfig(every=None))
    with pytest.raises(UserError, match="data.tokenizer is out/llama/tokenizer there, "):
        branch(config, "0" * 64, {}, None)
    data, theirs = open_data(config, load_tokenizer("out/llama/tokenizer").sha256), read_llama(source)
    x, y = (torch.cat(both) for both in zip(*(data.batch(0, micro, 0, 1) for micro in range(2)), strict=True))
    assert (n := int((y >= 0).sum())) == data.targets(0) and 0.2 < n / 512 < 0.8
    expected = F.cross_entropy(theirs(x).logits[y >= 0], y[y >= 0])     # of the responses' tokens alone
    expected.backward()
    expected_norm = torch.cat([p.grad.flatten() for p in theirs.parameters()]).norm().item()
    capsys.readouterr()
    for recipe, rel in (("off", 0.02), ("tensorwise", 0.05)):
        arm = replace(config, run=f"arm_{recipe}", fp8=FP8Config(recipe=recipe))
        done = call_train(capsys, arm, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        first, *_, last = (row for row in read_rows(arm.run_dir / "metrics.jsonl") if row.get("kind") == "train")
        # Against fp32 on weights that are large; with the prompts the mean would be another by far more.
        assert first["loss"] == pytest.approx(expected.item(), rel=rel)
        assert first["grad_norm"] == pytest.approx(expected_norm, rel=5 * rel) and last["loss"] < first["loss"] - 1.5
        assert (arm.run_dir / "tokenizer/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    call(export, config.run_dir.parent / "arm_tensorwise", "back", "dtype=fp32")
    ours, theirs = load_model("out/arm_tensorwise", compute_dtype=torch.float32)[0], read_llama(tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(ours(x[:8]), theirs(x[:8]).logits)
