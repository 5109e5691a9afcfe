"""Recipes whose scales belong to tiles, blockwise and nvfp4, against explicit loops; stochastic rounding and its bits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime import fp8, parallel, run
from runtime.cli import UserError
from runtime.config import FP8Config
from runtime.fp8 import RECIPES, fake_quantise, noise_at
from runtime.parallel import World
from runtime.rows import read_rows
from tests.conftest import call_train

GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])      # E2M1's values; those at even places have an even mantissa
TILED = [name for name, recipe in RECIPES.items() if recipe.input.scaling == "tile"]
CPU = World(0, 0, 1, torch.device("cpu"))
CASES = {
    "normal": lambda shape: torch.randn(shape),
    "heavy-tailed": lambda shape: torch.randn(shape) ** 5,
    "zero": torch.zeros,
    "one outlier": lambda shape: torch.randn(shape).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1e4)),
}


def reference(x: np.ndarray, operand, noise: np.ndarray | None = None) -> np.ndarray:
    """x (M, N) in fp64, tile by tile; the last dimension is summed over."""
    rows, columns = operand.tile
    out, whole = np.zeros_like(x), 448 / max(abs(x).max() / 6, 1e-12)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            tile = x[i:i + rows, j:j + columns]
            amax = abs(tile).max()
            if operand.format == "e2m1":
                stored = torch.tensor(amax / 6 * whole).float().to(torch.float8_e4m3fn).item()
                scale = whole / max(stored, 2**-9)
                own = None if noise is None else noise[i:i + rows, j:j + columns]
                q = e2m1(np.clip(tile * scale, -6, 6), own)
            else:
                scale = 448 / max(amax, 1e-12)
                q = torch.tensor(tile * scale).float().to(operand.format).double().numpy()
            out[i:i + rows, j:j + columns] = q / scale
    return out


def e2m1(x: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
    at = np.searchsorted(GRID, abs(x), "right") - 1
    low, high = GRID[at], GRID[np.minimum(at + 1, 7)]
    share = (abs(x) - low) / np.where(high > low, high - low, 1)
    up = share > 0.5 if noise is None else None
    if noise is None:
        up |= (share == 0.5) & (at % 2 == 1)
        return np.sign(x) * np.where(up, high, low)
    low, high = np.where(x < 0, -high, low), np.where(x < 0, -low, high)       # the neighbours below and above x itself
    share = np.where(high > low, (x - low) / np.where(high > low, high - low, 1), 0)
    return np.where(noise < share, high, low)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe, which", [("blockwise", "input"), ("blockwise", "weight"), ("blockwise_e5m2", "grad"),
                                           ("nvfp4", "input"), ("nvfp4", "weight")])
def test_each_tile_is_rounded_as_by_hand(recipe, which, case):
    torch.manual_seed(1)
    operand, x = getattr(RECIPES[recipe], which), CASES[case]((256, 384))
    expected = reference(x.double().numpy(), operand)
    for q in (fake_quantise(x, operand), fake_quantise(x.t().contiguous(), operand, 0).t()):
        near = abs(q.double().numpy() - expected) <= 1e-6 * abs(expected).max()
        assert near.mean() > 0.9999      # fp32 scales may carry a value over the edge between two steps


@pytest.mark.parametrize("recipe", TILED)
def test_the_three_matmuls_are_those_of_the_rounded_operands(recipe):
    torch.manual_seed(2)        # of draws in which no tile's scale lies on the edge between two E4M3 numbers: fp32 may tip it
    r, (x, w, g) = RECIPES[recipe], (torch.randn(256, 384), torch.randn(128, 384) / 20, torch.randn(256, 128) ** 3)
    linear = torch.nn.Linear(384, 128, bias=False)
    linear.__class__, linear.recipe, linear.weight.data = fp8.QuantisedLinear, r, w
    fp8.set_position(linear, 1000)
    salt = None if linear.salt is None else linear.salt.item()
    x.requires_grad_()
    y = linear(x)
    y.backward(g)

    def rounded(t, operand, dim, salt):
        noise = noise_at(t.shape, torch.tensor(1000), salt).double().numpy() if operand.is_stochastic else None
        t = t.detach().double().numpy()
        return reference(t, operand, noise) if dim else reference(t.T, operand, noise if noise is None else noise.T).T

    gw, xw = (fp8._rotated(t.detach()) for t in (g, x)) if r.is_rotated else (g, x)
    expected = {
        "output": (y, rounded(x, r.input, 1, 0) @ rounded(w, r.weight, 1, 0).T),
        "input gradient": (x.grad, rounded(g, r.grad, 1, salt) @ rounded(w, r.weight, 0, 0)),
        "weight gradient": (linear.weight.grad, rounded(gw, r.grad, 0, salt and salt + 2**60).T @ rounded(xw, r.input, 0, 0))}
    for name, (found, by_hand) in expected.items():
        error = np.linalg.norm(found.detach().double().numpy() - by_hand) / np.linalg.norm(by_hand)
        assert error < 2e-3, (name, error)


def test_the_rotation_keeps_products_and_spreads_outliers():
    torch.manual_seed(1)
    g, x = torch.randn(64, 8), torch.randn(64, 4)
    g[20] = 1000.0
    mix = fp8._rotated(torch.eye(64)).double()
    blocks = mix.unflatten(0, (4, 16)).unflatten(2, (4, 16))        # (4, 16, 4, 16)
    assert all((abs(blocks[i, :, j]) == 0.25 * (i == j)).all() for i in range(4) for j in range(4))
    assert torch.allclose(mix @ mix.t(), torch.eye(64).double(), atol=1e-6)
    assert torch.allclose(fp8._rotated(g).double(), mix @ g.double(), rtol=1e-5, atol=1e-4)
    assert torch.allclose(fp8._rotated(g).t() @ fp8._rotated(x), g.t() @ x, rtol=1e-4, atol=1e-3)
    assert fp8._rotated(g).abs().max() < 260, "one token of 1,000 is 16 of 250"


def test_stochastic_rounding_is_right_in_the_mean_where_nearest_is_not():
    g = torch.full((4096, 64), 0.3)
    g[:, ::16] = 1.0
    operand, others = RECIPES["nvfp4"].grad, torch.arange(64) % 16 != 0
    noise = noise_at(g.shape, torch.tensor(0), 5)
    q = fake_quantise(g, operand, noise=noise)[:, others]
    assert abs(q.mean() - 0.3) < 4 * q.std() / math.sqrt(q.numel())
    assert abs(fake_quantise(g, operand)[:, others].mean() - 0.3) > 0.02
    exact = fake_quantise(torch.tensor([[6.0, 3, 1, 0.5, -6, -3, 0, 2] * 2]), operand, noise=torch.full((1, 16), 1 - 2**-24))
    assert exact.tolist() == [[6.0, 3, 1, 0.5, -6, -3, 0, 2] * 2], "what the format holds stays, whatever the noise"
    assert noise.min() >= 0 and noise.max() < 1 and abs(noise.std() - 12**-0.5) < 2e-3
    assert abs(np.corrcoef(noise[1:].flatten(), noise[:-1].flatten())[0, 1]) < 0.01
    assert torch.equal(noise[100:200], noise_at((100, 64), torch.tensor(100), 5)), "a token keeps its noise in any batch"
    assert not torch.equal(noise[:100], noise_at((100, 64), torch.tensor(0), 6)), "each layer has its own"


def test_every_token_of_a_run_has_a_place_of_its_own_also_after_a_resume(tiny, tmp_path, capsys, monkeypatch):
    """And the resumed run ends in the same bits."""
    seen, place = [], fp8.set_position
    monkeypatch.setattr(fp8, "set_position", lambda model, position, seed: seen.append(position) or place(model, position, seed))
    config = replace(tiny, fp8=FP8Config(recipe="nvfp4"), out=str(tmp_path / "whole"))
    assert call_train(capsys, config, tmp_path).returncode == 0
    whole, per_batch = list(seen), config.data.micro_batch * config.model.n_ctx
    assert np.diff(whole).tolist() == [per_batch] * (len(whole) - 1), "one rank: micro-batch by micro-batch"
    assert len(whole) == config.steps * config.accumulation(1)
    seen.clear()
    config = replace(config, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "end_step", stop_after(3, run.Run.end_step))
        assert call_train(capsys, config, tmp_path).returncode == 0
    assert seen == whole[:len(whole) // 2] and not (config.run_dir / "summary.json").exists()
    assert call_train(capsys, config, tmp_path).returncode == 0
    rows = [read_rows(tmp_path / name / config.run / "metrics.jsonl") for name in ("whole", "parts")]
    losses = [[(row["loss"], row["grad_norm"]) for row in some if row["kind"] == "train"] for some in rows]
    assert seen == whole and losses[0] == losses[1]


def stop_after(steps, end_step):
    def end(self, verdict, loss, norm, lr, scale, is_stopping):
        return end_step(self, verdict, loss, norm, lr, scale, is_stopping or self.progress.step + 1 == steps)
    return end


def test_compiled_nvfp4_learns_as_eager_does(tiny):
    """Of ten blocks: were each compiled anew, for a number of its own, torch would give up at eight."""
    tiny = replace(tiny, model=replace(tiny.model, n_layer=10))
    losses = {}
    x = torch.randint(tiny.model.vocab_size, (2, tiny.model.n_ctx), generator=torch.Generator().manual_seed(1))
    for unit in ("off", "block"):
        built = parallel.build(replace(tiny, fp8=FP8Config(recipe="nvfp4"), parallel=replace(tiny.parallel, compile=unit)), CPU)
        built.model.init_weights(1)
        fp8.set_position(built.model, 0)
        losses[unit] = []
        for _ in range(4):
            fp8.refresh_weight_copies(built.model)
            loss = built.model(x, x).sum()
            (loss * built.loss_scale).backward()
            built.optimizer.step()
            built.optimizer.zero_grad()
            losses[unit].append(loss.item())
        fp8.refresh_weight_copies(built.model)
        with torch.no_grad():
            assert built.model(x, x).sum().isfinite()
    assert losses["block"][0] == pytest.approx(losses["off"][0], rel=0.02)
    assert all(some[-1] < some[0] for some in losses.values())


def test_dimensions_that_tiles_do_not_divide_are_refused_by_name(tiny):
    with pytest.raises(UserError, match=r"model.n_embd=32 is no multiple of 128, which fp8.recipe=blockwise needs"):
        replace(tiny, fp8=FP8Config(recipe="blockwise"))
