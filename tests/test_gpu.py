"""What only a GPU can show; run with `pytest -m gpu` on an H100-class machine."""

import json
from dataclasses import replace

import pytest
import torch

from model import GPT, GPTConfig
from runtime import fp8
from runtime.checkpoint import load_model
from runtime.config import FP8Config
from tests.conftest import run_train, with_recipe

pytestmark = pytest.mark.gpu
RECIPES = ["tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp", "amax", "cscale", "mxfp8"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_recipe_is_near_bf16_and_not_equal(recipe):
    def losses(config):
        with torch.device("meta"):
            model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=256, n_ffn=512, n_ctx=128))
        fp8.convert(model, config)
        model.compile(dynamic=False, fullgraph=True)
        model.to_empty(device="cuda")
        model.init_weights(0)
        ids = torch.randint(50257, (4, 129), generator=torch.Generator().manual_seed(0)).cuda()
        loss = model(ids[:, :-1], ids[:, 1:]).sum() / (4 * 128)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        return loss.item()

    bf16, quantised = losses(FP8Config()), losses(FP8Config(recipe=recipe))
    assert bf16 != quantised
    assert abs(quantised - bf16) / bf16 < 2.5e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_on_a_gpu_resumes_and_its_checkpoint_loads_on_a_cpu(tiny, tmp_path, recipe):
    config = with_recipe(tiny, recipe, parallel=replace(tiny.parallel, compile=True))
    assert run_train(config, tmp_path, "steps=3").returncode == 0
    (config.run_dir / "summary.json").unlink()
    done = run_train(config, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stdout
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["mem_peak_gib"] > 0
    model, _ = load_model(config.run_dir, device="cpu")
    assert all(p.isfinite().all() for p in model.parameters())
