"""What the probe reports, against fp64 arithmetic written anew; that training does not notice it,
on two ranks and through recomputation: tests/runtime/test_parallel.py."""

import json
import math

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from fp8 import probe, selection
from fp8.copies import refresh_weight_copies
from fp8.head_loss import FP8HeadLoss
from fp8.linears import set_position
from fp8.probe import Probe, sequences, statistics
from fp8.recipes import Operand
from fp8.rounding import noise_at
from runtime.checkpoint import checkpoints, seal
from tests.conftest import changed
from tests.fp8.test_linears import E4M3, E5M2, LARGEST, OPERANDS, quantised
from tests.helpers.faults import summary
from tests.helpers.fp8_models import NAMES, NATIVE, tokens
from tests.helpers.fp8_models import build as build_model
from tests.test_model import reference_logits

SATURATED, ERROR = probe.STATISTICS.index("saturated"), probe.STATISTICS.index("error")
SCALE = 1 / 2048  # of the loss, as in a run with steps of 2,048 tokens


def build(recipe="off", dtype=torch.bfloat16, seed=0, head=False, **changes):
    """A model, its recipes by layer, and a batch; weights of a size that makes attention and SwiGLU
    do something."""
    model, layers = build_model(
        recipe, head=head, dtype=dtype, loss_scale=SCALE, seed=seed, **changes
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "qkv" in name or "gate_up" in name:
                p.mul_(4)
            elif name.endswith("_norm.weight"):
                p.mul_(torch.linspace(0.5, 2.0, p.numel()))
    refresh_weight_copies(model)
    return model, selection.recipes(layers, SCALE), *tokens(seed)


def probed(tmp_path, model, recipes, x, y, n_tokens=4096):
    """All rows of the file after one more probe, read as strict JSON."""
    path = tmp_path / "probe.jsonl"
    Probe(path, model, recipes, n_tokens)(7, x, y, SCALE)
    return read(path)


def read(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def reference(x, operand, noise=None):
    """By the independent rounding of fp8/test_linears.py; scales sorted, the lower median of them."""
    x = x.detach().double().flatten(0, -2)
    q, scale = quantised(x, operand, 1, noise)
    ordered, largest = scale.flatten().sort().values, LARGEST[operand[0]]
    over = (
        x.unflatten(-1, (-1, x.shape[1] // scale.shape[1])) * scale[..., None]
    ).abs() > largest * (1 + 1e-6)
    return {
        "amax": x.abs().max(),
        "scale_min": ordered[0],
        "scale": ordered[(len(ordered) - 1) // 2],
        "scale_max": ordered[-1],
        "underflow": ((x != 0) & (q == 0)).double().mean(),
        "saturated": over.double().mean(),
        "error": (q - x).norm() / x.norm(),
        "kurtosis": (x**4).mean() / (x**2).mean() ** 2,
    }


@pytest.mark.parametrize("recipe", [*NATIVE, "nvfp4_nearest", "nvfp4"])
def test_statistics_are_those_of_an_independent_rounding_and_read_at_once(
    recipe, tmp_path, monkeypatch
):
    model, recipes, x, y = build(recipe)
    set_position(model, 2**20, seed=3)
    seen, lists = {}, []
    for name in recipes:
        # once: the probe's own passes are not looked at
        def note(module, inputs, output, name=name):
            first = seen.setdefault(name, {"weight": module.weight, "activation": inputs[0]})
            output.register_hook(lambda g: first.update({"gradient": g.clone()} | first))

        model.get_submodule(name).register_forward_hook(note)
    (model(x, y).sum() * SCALE).backward()
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda t, tolist=torch.Tensor.tolist: lists.append(t) or tolist(t)
    )
    linears = {
        row["layer"]: row
        for row in probed(tmp_path, model, recipes, x, y)
        if row["kind"] == "linear"
    }
    assert len(lists) == 1, "the host waits for the device once"
    assert set(linears) == {f"layers.{i}.{n}" for i in (0, 1) for n in NAMES}
    how = dict(zip(("activation", "weight", "gradient"), OPERANDS[recipe], strict=False))
    if recipe == "cscale":  # its constant undoes the loss scale
        how["gradient"] = E5M2, 8 - round(math.log2(SCALE))
    for name, row in linears.items():
        assert (row["step"], row["recipe"]) == (7, recipe)
        linear = model.get_submodule(name)
        for operand, tensor in seen[name].items():
            noise = None
            # rounded as the matmul's operand is
            if operand == "gradient" and recipes[name].grad.is_stochastic:
                noise = noise_at(tensor.flatten(0, -2).shape, linear.position, linear.salt)
            want = {
                key: float(value) for key, value in reference(tensor, how[operand], noise).items()
            }
            for key in "underflow", "saturated":
                assert row[operand].pop(key) == pytest.approx(
                    want.pop(key), abs=2 / tensor.numel()
                ), (name, operand, key)
            assert row[operand] == pytest.approx(want, rel=1e-4), (name, operand)


def test_statistics_of_zeros_of_the_smallest_values_and_of_a_largest_that_its_scale_lifts():
    for sharing in "tensor", "row", "block", "constant":
        amax, *scales, underflow, saturated, error, kurtosis = statistics(
            torch.zeros(32, 64), Operand(E4M3, sharing)
        ).tolist()
        assert (amax, underflow, saturated, error, kurtosis) == (0, 0, 0, 0, 0) and all(
            0 < s < math.inf for s in scales
        )
    # In fp32 the squares of the smallest gradients would vanish, and those lost altogether would
    # show no error.
    g = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    big, small = (
        statistics(g * s, Operand(E4M3, "row", power_of_2=True))[ERROR].item()
        for s in (1.0, 2.0**-36)
    )
    assert small == pytest.approx(big, rel=1e-6) and 0.01 < big < 0.05
    # 448 / amax rounds up as often as down; the largest value times it is then slightly above 448.
    assert all(
        statistics(a * torch.ones(1, 32), Operand(E4M3))[SATURATED] == 0
        for a in torch.linspace(0.01, 3, 500).bfloat16()
    )


@pytest.mark.parametrize(
    "label, pieces", [("rowwise", 0), ("tensorwise+kernels", 1), ("tensorwise_gw_hp+kernels", 0)]
)
def test_a_head_is_measured_once_in_chunks_or_one_piece_and_only_by_ranks_that_write(
    label, pieces, tmp_path, monkeypatch
):
    """Its first chunk, and not again when the backward pass recomputes it. An FP8 head on our
    kernels computes its loss in one piece, which has no output to watch: not with BF16 weight
    gradients, and not while a probe watches."""
    calls, whole, forward = [], [], FP8HeadLoss.forward
    monkeypatch.setattr(
        probe,
        "statistics",
        lambda x, operand, *noise: calls.append(operand) or statistics(x, operand, *noise),
    )
    # targets
    monkeypatch.setattr(
        FP8HeadLoss, "forward", staticmethod(lambda *a: whole.append(a[3]) or forward(*a))
    )
    model, recipes, x, y = build(label, head=True, loss_chunk=32 if label == "rowwise" else None)
    model(x, y)
    assert len(whole) == pieces
    Probe(None, model, recipes, 4096)(1, x, y, SCALE)
    assert not calls
    whole.clear()
    [row] = [row for row in probed(tmp_path, model, recipes, x, y) if row.get("layer") == "head"]
    assert len(calls) == 3 * len(recipes) == 27, "three operands of each Linear"
    hidden = model.hidden(x)
    assert (
        row["activation"]["amax"]
        == (hidden[0] if label == "rowwise" else hidden).abs().max().item()
    )
    assert row["gradient"]["amax"] > 0 and not whole


@pytest.mark.parametrize(
    "at_once, seed, ahead, changes",
    [
        (2**24, 4, 1, {}),
        (100, 30, 1, {"n_head": 4, "n_kv_head": 2}),
        (100, 12, 0, {"n_head": 4, "n_kv_head": 1, "qk_norm": True}),
        (100, 18, 1, {"n_head": 2, "n_kv_head": 1, "head_size": 40}),
    ],
)
def test_block_rows_against_a_naive_computation(
    changes, at_once, seed, ahead, tmp_path, monkeypatch
):
    """Each case must show a mask that lets the next token through (ahead 1), or hides the token
    itself (0)."""
    monkeypatch.setattr(probe, "LOGITS_AT_ONCE", at_once)
    model, recipes, x, y = build(dtype=torch.float32, seed=seed, **changes)
    rows, blocks, shown = probed(tmp_path, model, recipes, x, y), [], 0
    reference_logits(model, x, blocks)
    assert [(row["kind"], row["step"], row["block"]) for row in rows] == [
        ("block", 7, 0),
        ("block", 7, 1),
    ]
    # attention's of the first sequence
    for row, (logits, swiglu) in zip(rows, blocks, strict=True):
        shown += (
            np.diagonal(logits[0], ahead, 1, 2).max() > 1.001 * np.tril(logits[0], ahead - 1).max()
        )
        assert row["attention_logit_max"] == pytest.approx(np.tril(logits[0]).max(), rel=1e-4)
        assert row["swiglu_amax"] == pytest.approx(np.abs(swiglu).max(), rel=1e-4)
        assert row["swiglu_rms"] == pytest.approx(np.sqrt(np.square(swiglu).mean()), rel=1e-4)
    assert shown


def test_few_sequences_a_torn_last_line_and_a_full_disk_and_a_pass_that_fails_leaves_no_hook_and_no_row(
    tmp_path, capsys
):
    """A probe of half the tokens equals a probe of half the batch; a last line cut short by a kill
    is removed first; NaN becomes null."""
    model, recipes, x, y = build("tensorwise")
    half = probed(tmp_path, model, recipes, x, y, n_tokens=95)
    with open(tmp_path / "probe.jsonl", "a") as file:
        file.write('{"kind": "block", "st')
    assert probed(tmp_path, model, recipes, x[:2], y[:2]) == half * 2
    probe = Probe(tmp_path / "probe.jsonl", model, recipes, 64)
    probe.path = "/dev/full"  # ends no run
    probe(0, x, y, 1.0)
    assert "No space left on device" in capsys.readouterr().out
    for B, T, n, want in (
        (8, 2048, 4096, 2),
        (8, 4096, 100, 1),
        (8, 1000, 2500, 4),
        (6, 8, 16, 4),
        (3, 48, 1, 2),
        (3, 5, 1, 3),
    ):
        assert sequences(B, T, n) == want, (B, T, n)
    with pytest.raises(IndexError):
        probed(tmp_path, model, recipes, x + 10_000, y)
    model.layers[0].mlp.register_forward_hook(
        lambda m, i, out: out.register_hook(lambda g: 1 / 0) and None
    )
    with pytest.raises(ZeroDivisionError):  # in the backward pass
        probed(tmp_path, model, recipes, x, y)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 1
    assert (
        all(p.grad is None for p in model.parameters())
        and len(read(tmp_path / "probe.jsonl")) == 20
    )
    model, recipes, x, y = build("mxfp8")
    model.layers[1].attn.qkv.weight.data[3, 5] = math.nan
    rows = {
        row.get("layer", row.get("block")): row
        for row in probed(tmp_path, model, recipes, x, y)[20:]
    }
    assert (
        rows["layers.1.attn.qkv"]["weight"]["amax"]
        is rows["layers.1.attn.qkv"]["weight"]["error"]
        is None
    )
    assert rows["layers.0.attn.qkv"]["weight"]["amax"] > 0
    assert rows[1]["attention_logit_max"] is None and rows[0]["attention_logit_max"] > 0


def test_a_compiled_model_is_not_compiled_again(tmp_path):
    torch._dynamo.reset()
    counters.clear()
    model, recipes, x, y = build("tensorwise", n_layer=1)
    model.compile(dynamic=False, fullgraph=True, backend="eager")

    def step():
        loss = model(x, y).sum() * SCALE
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    with torch._dynamo.config.patch(error_on_recompile=True):
        before = step()
        # four Linears and a block
        assert len(probed(tmp_path, model, recipes, x, y, n_tokens=64)) == 5
        assert all(map(torch.equal, before, step()))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_run_is_probed_at_trainings_own_scale_and_its_summary_has_the_time_a_resumed_ones_too(
    tiny, run, monkeypatch
):
    """Four micro-batches a step. That training is the same bits with and without:
    tests/runtime/test_parallel.py."""
    scales = []
    monkeypatch.setattr(
        Probe,
        "__call__",
        lambda self, *args, real=Probe.__call__: scales.append(args[-1]) or real(self, *args),
    )
    looked = changed(tiny, "run=looked fp8.recipe=cscale probe.every=2 probe.tokens=64")
    run(looked)
    assert scales == [1 / 512] * 3, "training's own"
    rows, kinds = read(looked.run_dir / "probe.jsonl"), ["linear"] * 8 + ["block"] * 2
    assert [(row["step"], row["kind"]) for row in rows] == [
        (step, kind) for step in (2, 4, 6) for kind in kinds
    ]
    told = summary(looked)
    assert (
        told["probe_share"] == pytest.approx(told["probe_s"] / told["wall_s"])
        and 0 < told["probe_share"] < 1
    )
    assert told["precision"]["layers_recipes"] == {
        row["layer"]: "cscale" for row in rows if row["kind"] == "linear"
    }
    (looked.run_dir / "summary.json").unlink()
    checkpoint = checkpoints(looked.run_dir)[-1]
    content = json.loads((checkpoint / "manifest.json").read_text())
    state = content["state"]
    seal(checkpoint, content | {"state": state | {"data": state["data"] | {"fp8": "0" * 64}}})
    assert "Linears in FP8 than fp8.recipe=auto chooses" in run(looked, code=2)
    seal(checkpoint, content | {"state": state | {"probe_seconds": 1000.0}})
    run(looked)
    assert read(looked.run_dir / "probe.jsonl") == rows and summary(looked)["probe_s"] == 1000
