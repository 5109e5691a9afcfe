"""Tests of eval/float8.py: torchao's inference loads the weights that the run's own FP8 matmuls saw."""

import json
import logging

import pytest
import torch
from export_runs import write_run
from model_reference import tokens
from safetensors import safe_open
from test_export import auto_model

from eval import export
from eval.sample import load_for_inference
from runtime.config import FP8Config

SCALED = {"tensorwise": "TENSORWISE", "rowwise": "AXISWISE"}


def independently(weight, recipe):
    """The float8 values that torchao's training makes of the whole matrix, and what it divides them by."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    cast = hp_tensor_to_float8_dynamic(
        weight, torch.float8_e4m3fn, LinearMMConfig(), scaling_granularity=ScalingGranularity[SCALED[recipe]],
        axiswise_dim=-1, round_scales_to_power_of_2=recipe == "rowwise")
    return cast._data, cast._scale.reciprocal()


def near(a, b):
    """Size of the difference, relative."""
    return ((a - b).float().norm() / b.float().norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("recipe, several", [("tensorwise", False), ("rowwise", True)])
def test_transformers_and_torchao_load_what_the_matmuls_saw(tmp_path, monkeypatch, recipe, several, emulated_scaled_mm):
    monkeypatch.setattr(export, "FILE_BYTES", 60_000 if several else 10**9)
    fp8 = FP8Config(recipe=recipe, skip=("layers.1.attn.out",))
    config, ours = write_run(tmp_path / "run", fp8=fp8, n_kv_head=2, n_layer=2)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "f8"), f"float8={recipe}"]) == 0
    assert len(list((tmp_path / "f8").glob("*.safetensors"))) == (3 if several else 1)
    theirs = auto_model(tmp_path / "f8")
    from torchao.quantization import Float8Tensor
    block, other = ours.layers[0], theirs.model.layers[0]
    for fused, parts in ((block.attn.qkv, [other.self_attn.q_proj, other.self_attn.k_proj, other.self_attn.v_proj]),
                         (block.mlp.gate_up, [other.mlp.gate_proj, other.mlp.up_proj]),
                         (block.attn.out, [other.self_attn.o_proj]), (block.mlp.down, [other.mlp.down_proj])):
        assert all(type(part.weight.data) is Float8Tensor and part.weight.qdata.dtype is torch.float8_e4m3fn for part in parts)
        values, scale = independently(fused.weight, recipe)
        assert torch.equal(torch.cat([part.weight.qdata for part in parts]).float(), values.float())
        assert torch.equal(torch.cat([part.weight.scale.expand(len(part.weight), 1) for part in parts]),
                           scale.expand(len(values), 1))
        assert 0.01 < near(torch.cat([part.weight.dequantize() for part in parts]), fused.weight) < 0.04    # 3 bits of mantissa
    # What the run kept in BF16 stays so, with the head, embedding, norms.
    kept = theirs.model.layers[1].self_attn.o_proj.weight
    assert type(kept.data) is torch.Tensor and torch.equal(kept, ours.layers[1].attn.out.weight.bfloat16())
    assert torch.equal(theirs.lm_head.weight, ours.wte.weight.bfloat16())

    # The matmuls run on this CPU too. Per tensor, activations are scaled as in the run; per row, the run rounds scales to
    # powers of two and torchao's inference does not, so that the two round apart. From BF16 both are equally far.
    run = str(tmp_path / "run")
    own, bf16 = (load_for_inference(run, "cpu", "bfloat16", name).model for name in (recipe, "off"))
    h = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.cat([part(h) for part in (other.self_attn.q_proj, other.self_attn.k_proj, other.self_attn.v_proj)], -1)
    assert near(y, own.layers[0].attn.qkv(h)) < (0.02 if recipe == "tensorwise" else 0.05)
    x = tokens(config.model, 4, 24)
    assert 0.5 < near(theirs(x).logits, bf16(x)) / near(own(x), bf16(x)) < 1.5
    assert theirs.generate(x[:1, :5], max_new_tokens=4, do_sample=False).shape == (1, 9)


@torch.no_grad()
def test_a_bf16_run_gets_the_recipe_s_own_choice(tmp_path, capsys):
    write_run(tmp_path / "run", tied=False)
    write_run(tmp_path / "head", tied=False, fp8=FP8Config(recipe="rowwise_with_gw_hp", head=True))
    for name, folder in (("head", "f8_head"), ("run", "f8")):
        assert export.main([str(tmp_path / name), str(tmp_path / folder), "float8=rowwise_with_gw_hp"]) == 0
        assert "8 Linears in float8 (rowwise_with_gw_hp), the head and the rest bf16" in capsys.readouterr().out
    assert len({(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("f8", "f8_head")}) == 1
    about = json.loads((tmp_path / "f8" / "config.json").read_text())["quantization_config"]
    assert about["modules_to_not_convert"] == ["lm_head"]
    with safe_open(tmp_path / "f8" / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
        dtypes = {name: file.get_tensor(name).dtype for name in names}
    assert dtypes["model.layers.1.mlp.up_proj._weight_qdata"] == torch.float8_e4m3fn
    assert dtypes["model.layers.1.mlp.up_proj._weight_scale"] == torch.float32
    assert dtypes["lm_head.weight"] == dtypes["model.embed_tokens.weight"] == torch.bfloat16
    assert len(names) == 2 * 7 * 2 + 2 * 2 + 1 + 2      # weight and scale of each Linear; norms; embedding and head
    assert logging.getLogger("torchao").level != logging.ERROR


@pytest.mark.parametrize("recipe, sizes, told", [
    ("mxfp8", {}, "has no counterpart"), ("cscale", {}, "has no counterpart"), ("auto", {}, "has no counterpart"),
    ("rowwise", {"n_head": 8, "n_kv_head": 1}, "cannot store model.layers.0.self_attn.k_proj.weight of 8 x 64"),
    ("tensorwise", {"n_ffn": 36}, "cannot convert layers.0.mlp.gate_up of 64 x 72")])
def test_what_cannot_be_loaded_is_refused(tmp_path, capsys, recipe, sizes, told):
    write_run(tmp_path / "run", **sizes)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "f8"), f"float8={recipe}"]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and not (tmp_path / "f8").exists()
