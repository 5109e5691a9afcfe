"""fp8.scaling=delayed: the scales against a simulation in fp64, the drift guard, resumes, two ranks, compilation."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from runtime import fp8, parallel
from runtime.config import FP8Config
from tests import faults
from tests.conftest import call_train
from tests.test_fp8 import build, tokens

DELAYED = FP8Config(recipe="tensorwise", kernels=True, scaling="delayed")
LARGEST = {"x": 448.0, "g": 57344.0}
MARGIN = {"x": 2.0, "g": 16.0}


def made(label="tensorwise+kernels+delayed", **changes):
    model = build(label, n_layer=1, **changes)[0]
    return model, fp8.DelayedScales(model)


def step(model, scales, loss_scale, *batches):
    """Losses, number of saturated tensors and the gradients of one step, its micro-batches given as (x, y)."""
    model.zero_grad()
    scales.begin(loss_scale)
    losses = []
    for batch in batches:
        loss = model(*batch).sum()
        (loss * loss_scale).backward()
        losses.append(loss.item())
    return losses, scales.end(loss_scale).item(), [p.grad.clone() for p in model.parameters()]


def buffers(model, kind):
    """LINEAR.x or LINEAR.g -> value, of the tensors that have delayed scales."""
    return {f"{name}.{side}": value.item() for name, m in model.named_modules() if isinstance(m, fp8.KernelLinear)
            for side in "xg" if (value := getattr(m, f"{side}_{kind}")) is not None}


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_gw_hp", "amax"])
def test_scales_follow_the_amaxes_of_four_steps_times_a_margin(recipe):
    """Simulated in fp64 from the amaxes that hooks of an independent kind see; loss scales differ, as numbers of targets do."""
    model, scales = made(f"{recipe}+kernels+delayed", head=recipe == "tensorwise")
    history, wide_for, seen = {}, {}, {}

    def note(key, t):
        seen[key] = max(seen.get(key, 0.0), t.detach().double().abs().max().item())

    def watch(name):
        def hook(_, inputs, output):
            note(f"{name}.x", inputs[0])
            output.register_hook(lambda g: note(f"{name}.g", g))
        return hook

    for name, m in model.named_modules():
        if isinstance(m, fp8.KernelLinear) and name != "head":
            m.register_forward_hook(watch(name))
    weights = dict(model.named_parameters())
    for n in range(9):
        if n == 5:          # a spike: 40 times the values, so beyond either margin
            with torch.no_grad():
                weights["layers.0.norm2.weight"].mul_(40)
        loss_scale, is_over = (1 / 64, 1 / 100)[n % 2], {}
        seen.clear()
        _, count, _ = step(model, scales, loss_scale, tokens(2 * n), tokens(2 * n + 1))
        got = buffers(model, "scale")
        for key, amax in seen.items():
            side, past = key[-1], history.setdefault(key, [])
            unit = loss_scale if side == "g" else 1.0
            margin = MARGIN[side] * (8 if wide_for.get(key, 0) else 1)
            first = 1.0 if side == "x" else 2.0 ** (8 - round(math.log2(loss_scale)))
            want = LARGEST[side] / (max(past) * unit * margin) if past else first
            want = 2.0 ** math.floor(math.log2(want)) if recipe == "amax" else want
            assert got[key] == pytest.approx(want, rel=1e-6), (n, key)
            is_over[key] = amax * got[key] > LARGEST[side] * (1 + 1e-6)
            wide_for[key] = 16 if is_over[key] else max(0, wide_for.get(key, 0) - 1)
            history[key] = [amax / unit, *past][:4]
        named = set(scales.saturated()) - {"head.x"}
        assert named == {key for key, over in is_over.items() if over} and count >= len(named)
        assert (n != 5 or "layers.0.mlp.gate_up.x" in named) and (n in (0, 5) or "layers.0.mlp.gate_up.x" not in named)
    assert set(got) == set(seen) | ({"head.x"} if recipe == "tensorwise" else set()), "the head's gradient has a bound"


def test_a_tensor_without_finite_values_leaves_no_trace_and_evaluation_changes_nothing():
    model, scales = made()
    for n in range(2):
        step(model, scales, 1 / 128, tokens(n))
    before, weight = scales.state(), model.layers[0].norm1.weight      # of ones
    for bad in (float("nan"), 0.0, float("inf")):
        weight.data[:1 if bad == float("inf") else None] = bad
        scales.begin(1 / 128)
        model(*tokens(3)).sum().backward()
        scales.end(1 / 128)
        assert ("layers.0.attn.qkv.x" in scales.saturated()) == (bad == float("inf"))
        assert scales.state()["layers.0.attn.qkv.x"][0] == max(before["layers.0.attn.qkv.x"][:4])
        assert all(torch.tensor(row).isfinite().all() for row in scales.state().values())
    weight.data.fill_(1.0)
    scales.load(before)
    scales.begin(1 / 128)
    with torch.no_grad():
        model(*tokens(9))
    assert scales.state() == before and set(buffers(model, "amax").values()) == {0.0}


def test_the_largest_of_all_ranks_counts(monkeypatch):
    (model, alone), other = made(), torch.rand(8) * 1e4
    scales = fp8.DelayedScales(model, ranks=2)
    largest = fp8.dist.ReduceOp.MAX
    monkeypatch.setattr(fp8.dist, "all_reduce", lambda t, op: t.copy_(torch.maximum(t, other) if op == largest else t))
    _, count, _ = step(model, scales, 1.0, tokens())
    seen = buffers(model, "amax")
    mine = torch.tensor([seen[name] for name in scales.state()])
    assert [row[0] for row in scales.state().values()] == torch.maximum(mine, other).tolist() != mine.tolist()
    assert count > 0 == alone.end(1.0)


def test_compiled_equals_eager_without_compiling_anew_and_only_a_heads_gradient_with_a_bound_has_no_row():
    """By blocks, as FSDP2 has them: the graphs are those of a whole model, in pieces that compile sooner."""
    runs = []
    for is_compiled in (False, True):
        model, scales = made(head=True)
        if is_compiled:
            parallel.compile_model(model, is_whole=False)
        steps = [step(model, scales, 1 / 128, tokens(0), tokens(1))]
        with torch.compiler.set_stance("fail_on_recompile"):
            steps += [step(model, scales, loss_scale, tokens(0), tokens(1)) for loss_scale in (1 / 128, 1 / 100)]
        runs.append((steps, scales.state()))
    (eager, before), (compiled, after) = runs
    for (a, n, _), (b, m, _) in zip(eager, compiled, strict=True):
        assert a == pytest.approx(b, rel=2e-3) and n == m == 0
    assert before.keys() == after.keys() == fp8.DelayedScales(model).state().keys() and "head.g" not in after
    unbounded, scales = made("tensorwise_gw_hp+kernels+delayed", head=True)
    parallel.compile_model(unbounded, is_whole=False)
    assert "head.g" in scales.state().keys() == fp8.DelayedScales(unbounded).state().keys()
    for name in before:     # compiled code rounds fewer values to BF16 in between
        assert after[name] == pytest.approx(before[name], rel=0.15), name


@pytest.fixture
def delayed(tiny):
    return replace(tiny, fp8=DELAYED)


def state(config, step=6):
    return json.loads((config.run_dir / f"checkpoints/step_{step:08d}/manifest.json").read_text())["state"]["fp8_scales"]


def test_a_resume_is_bit_exact_and_so_is_one_or_two_ranks(delayed, tmp_path, capsys):
    whole = replace(delayed, run="whole", eval=replace(delayed.eval, every=3))
    assert call_train(capsys, whole, tmp_path).returncode == 0
    cut = replace(whole, run="cut")
    shutil.copytree(whole.run_dir, cut.run_dir)
    faults.back_to(cut, 3)
    assert call_train(capsys, cut, tmp_path).returncode == 0
    assert faults.digest(cut) == faults.digest(whole) and state(cut) == state(whole)
    assert faults.record(cut) == faults.record(whole)
    assert len(state(whole)) == 16 and all(0 < min(row[:4]) < 1e4 for row in state(whole).values())
    two = replace(whole, run="two", data=replace(whole.data, micro_batch=2))
    done = faults.start(two, ranks=2)
    assert set(done.wait()) == {0}, done.output
    faults.back_to(two, 3)          # from two ranks on to one
    assert call_train(capsys, two, tmp_path).returncode == 0
    assert state(two).keys() == state(whole).keys()
    for name, (*_, first, none, wide_for) in state(whole, 3).items():        # the first of three steps: of the same weights
        exactly = name == "layers.0.attn.qkv.x"         # no rounding of FSDP2's lies before it
        assert state(two, 3)[name][2] == pytest.approx(first, rel=0 if exactly else 0.3) and none == wide_for == 0, name


def test_a_spike_is_a_row_and_the_loss_stays_finite(delayed, tmp_path, capsys, monkeypatch):
    calls, real = [], fp8.DelayedScales.begin

    def begin(self, loss_scale):
        real(self, loss_scale)
        calls.append(1)
        if len(calls) == 6:     # of the constructor, then of the steps: the fifth
            self._scales[0].mul_(1e3)
    monkeypatch.setattr(fp8.DelayedScales, "begin", begin)
    assert call_train(capsys, delayed, tmp_path).returncode == 0
    event, = (row for row in faults.rows(delayed, "event") if row["event"] == "fp8_saturated")
    assert event["step"] == 5 and event["tensors"] == ["layers.0.attn.qkv.x"]
    assert state(delayed)["layers.0.attn.qkv.x"][4] == 15 and state(delayed)["layers.1.attn.qkv.x"][4] == 0
    assert all(row["loss"] < 10 for row in faults.rows(delayed))
