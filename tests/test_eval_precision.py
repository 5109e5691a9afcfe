"""eval/precision.py, FP8 in eval/sample.py and eval/harness.py, on two real runs, one trained in each precision."""

import json
import math
import shutil
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import call_train, tiny_config
from eval_runs import generate, protect_environment

from eval import harness, precision, sample
from model import KVCache, Linear
from runtime.checkpoint import load_model
from runtime.cli import UserError
from runtime.config import FP8Config, LogConfig, OptimConfig, read_config

RECIPES = ["tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp", "amax", "cscale", "mxfp8"]


@pytest.fixture(scope="module")
def trained(data_dir, tmp_path_factory):
    """A BF16 run and an FP8 run with a choice of Linears of its own, as train.py leaves them."""
    folder = tmp_path_factory.mktemp("inference")
    config = replace(tiny_config(data_dir, folder / "out"), run="bf16", steps=8, optim=OptimConfig(lr=3e-2),
                     log=LogConfig(every=100))
    own = FP8Config(recipe="tensorwise", skip=("attn.out",), head=True)
    for each in (config, replace(config, run="fp8", fp8=own)):
        assert call_train(types.SimpleNamespace(readouterr=lambda: ("", "")), each, folder).returncode == 0
    return folder / "out"


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "out")
    protect_environment(monkeypatch)
    return tmp_path / "out"


def read_json(path):
    """JSON as the standard has it: no NaN."""
    return json.loads(Path(path).read_text(), parse_constant=lambda word: pytest.fail(f"{path} holds {word}"))


def rounded(x, recipe, constant):
    """x (rows, K) as the recipe's E4M3 holds it, in fp64, written out without any code of ours."""
    x, largest = x.double(), 448.0
    if recipe.startswith("rowwise"):
        scale = 2.0 ** (largest / x.abs().amax(1, keepdim=True)).log2().floor()
    elif recipe == "mxfp8":
        amax = x.abs().view(len(x), -1, 32).amax(2).repeat_interleave(32, 1)
        scale = 2.0 ** -(amax / largest).log2().ceil()
    elif recipe == "cscale":
        scale = torch.tensor(2.0 ** constant).double()
    else:
        scale = (largest / x.abs().max()).float().double()
        scale = 2.0 ** scale.log2().floor() if recipe == "amax" else scale
    return (x * scale).clamp(-largest, largest).float().to(torch.float8_e4m3fn).double() / scale


def by_hand(run, recipe, names):
    """The run's plain model, the named Linears replaced by explicit quantisation and an fp64 matmul."""
    model, _ = load_model(run)
    for name in names:
        def forward(self, x):
            y = rounded(x.reshape(-1, x.size(-1)), recipe, 0) @ rounded(self.weight, recipe, 6).T
            return y.to(x.dtype).view(*x.shape[:-1], -1)
        module = model.get_submodule(name)
        module.forward = types.MethodType(forward, module)
    return model


def logits_with_cache(model, ids):
    """(B, T, V): two tokens at once, then one at a time from the cache."""
    cache = KVCache()
    parts = [model(ids[:, :2], cache=cache)] + [model(ids[:, t:t + 1], cache=cache) for t in range(2, ids.size(1))]
    return torch.cat(parts, 1).double()


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_logits_are_those_of_explicit_quantisation_with_and_without_cache(runs, recipe):
    inference = sample.load_for_inference(runs / "bf16", "cpu", "bfloat16", recipe)
    names = [layer.name for layer in inference.layers if layer.reason is None]
    assert len(names) == 8 and "head" not in names
    ids = torch.randint(80, (3, 12), generator=torch.Generator().manual_seed(0))
    plain, reference = load_model(runs / "bf16")[0], by_hand(runs / "bf16", recipe, names)
    for run_model in (lambda m: m(ids).double(), lambda m: logits_with_cache(m, ids), lambda m: logits_with_cache(m, ids[:1])):
        got, want, unquantised = (run_model(m) for m in (inference.model, reference, plain))
        wrong, effect = (got - want).norm() / want.norm(), (unquantised - want).norm() / want.norm()
        assert wrong < 0.25 * effect, f"{wrong:.1e} from explicit quantisation, whose whole effect is {effect:.1e}"

    # One Linear, its input given: of the fp32 weight, not of its BF16 copy, as in training.
    weight, module = load_model(runs / "bf16")[0].layers[1].mlp.down.weight, inference.model.layers[1].mlp.down
    assert torch.equal(module.weight, weight) and weight.dtype == torch.float32
    for rows in (1, 7, 32):     # a cached token, no multiple of 16, a full batch
        x = (torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) * 4).bfloat16()
        want = rounded(x, recipe, 0) @ rounded(weight, recipe, 6).T
        assert (module(x).double() - want).norm() / want.norm() < 4e-3      # BF16 rounding of the result


@torch.no_grad()
def test_only_a_scale_per_tensor_makes_a_sequence_depend_on_its_batch(runs):
    ids = torch.randint(80, (4, 32), generator=torch.Generator().manual_seed(1))
    for recipe in ("tensorwise", "rowwise"):
        model = sample.load_for_inference(runs / "bf16", "cpu", "bfloat16", recipe).model
        assert torch.equal(model(ids)[:1], model(ids[:1])) != (recipe == "tensorwise")


def test_weights_outside_the_converted_linears_are_stored_in_bf16(runs):
    model, _, _, layers, _ = sample.load_for_inference(runs / "fp8", "cpu", "bfloat16", "tensorwise")
    converted = {layer.name for layer in layers if layer.reason is None}
    assert converted == {f"layers.{i}.{m}" for i in range(2) for m in ("attn.qkv", "mlp.gate_up", "mlp.down")} | {"head"}
    assert model.head.weight is model.wte.weight        # tied, hence the embedding is fp32 too
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if name.removesuffix(".weight") in converted | {"wte"} else torch.bfloat16), name


def test_losses_are_those_that_training_reported_and_the_gap_is_paired(runs, capsys):
    assert precision.main([str(runs / "fp8"), "recipes=tensorwise,rowwise"]) == 0
    out = capsys.readouterr().out
    record, summary = read_json(runs / "fp8" / "eval" / "precision.json"), read_json(runs / "fp8" / "summary.json")
    assert record["bf16"]["loss"] == summary["loss_bf16"] and record["bf16"]["loss_se"] == summary["loss_bf16_se_seq"]
    assert record["fp8"]["tensorwise"]["loss"] == summary["loss_as_trained"] != summary["loss_bf16"]
    assert set(record["fp8"]["tensorwise"]["layers"]) == set(summary["precision"]["layers_converted"])  # attn.out skipped
    assert len(record["fp8"]["rowwise"]["layers"]) == 8         # another recipe: its defaults, without the head

    with np.load(runs / "fp8" / "val_losses.npz") as losses:    # sources in sorted order: code, web
        gap = [(losses["as_trained"] - losses["bf16"])[losses["source"] == s] / 32 for s in (0, 1)]
    mean = sum(w * g.mean() for w, g in zip((0.25, 0.75), gap, strict=True))
    error = math.sqrt(sum(w**2 * g.var(ddof=1) / len(g) for w, g in zip((0.25, 0.75), gap, strict=True)))
    tensorwise = record["fp8"]["tensorwise"]
    assert tensorwise["difference"] == pytest.approx(mean, rel=1e-6)
    assert tensorwise["difference_se"] == pytest.approx(error, rel=1e-6) and error < record["bf16"]["loss_se"] / 5
    assert tensorwise["difference_percent"] == pytest.approx(100 * mean / summary["loss_bf16"])
    assert f"{mean:+.5f} ± {error:.5f} |" in out
    assert "fp8: emulated on this CPU" in out
    assert read_json(runs / "fp8" / "summary.json") == summary


def test_a_bf16_run_and_the_probe_of_each_recipe(runs, capsys):
    recipes = ["tensorwise", "cscale", "mxfp8", "auto"]
    assert precision.main([str(runs / "bf16"), f"recipes={','.join(recipes)}", "micro_batch=5"]) == 0
    record, out = read_json(runs / "bf16" / "eval" / "precision.json"), capsys.readouterr().out
    assert record["step"] == 8 and record["micro_batch"] == 5 and record["sequences"] == {"code": 10, "web": 10}
    assert record["fp8"]["auto"]["difference"] == 0 and "THIS RUN IS BF16" in out      # no timings of a CPU
    weights = {name.removesuffix(".weight"): p for name, p in load_model(runs / "bf16")[0].named_parameters()}
    keys = {"amax", "scale_min", "scale", "scale_max", "underflow", "saturated", "error"}
    for recipe in recipes[:3]:
        rows = [json.loads(line) for line in (runs / "bf16" / "eval" / f"probe_{recipe}.jsonl").read_text().splitlines()]
        linears, blocks = ([row for row in rows if row["kind"] == kind] for kind in ("linear", "block"))
        assert len(linears) == 8 and [row["block"] for row in blocks] == [0, 1] and all(row["step"] == 8 for row in rows)
        for row in linears:
            assert set(row) == {"kind", "step", "layer", "recipe", "weight", "activation"} and row["recipe"] == recipe
            assert set(row["weight"]) == set(row["activation"]) == keys
            amax = weights[row["layer"]].abs().max().item()
            assert row["weight"]["amax"] == pytest.approx(amax)
            if recipe == "tensorwise":
                assert row["weight"]["scale"] == pytest.approx(448 / amax)
                assert row["activation"]["scale"] == pytest.approx(448 / row["activation"]["amax"])
            if recipe == "cscale":
                assert (row["weight"]["scale"], row["activation"]["scale"]) == (64, 1)
                assert 0.02 < row["activation"]["error"] < 0.06


def test_tasks_are_scored_through_fp8_matmuls(runs, capsys):
    run = runs / "bf16"
    for arguments in ([], ["fp8=rowwise"], ["fp8=tensorwise"], ["fp8=rowwise", "limit=3"]):
        assert harness.main([str(run), "tasks=val_ppl", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("8 of 9 Linears") == 3 and "layers.*.mlp.down" in out and "-> rowwise" in out
    plain, rowwise = (read_json(run / "eval" / f"val_ppl{end}.json") for end in ("", "_fp8_rowwise"))
    assert (plain["fp8"], rowwise["fp8"]) == ("off", "rowwise") and plain["layers_fp8"] == [] and len(rowwise["layers_fp8"]) == 8
    a, b = plain["tasks"]["val_ppl"]["bits_per_byte"], rowwise["tasks"]["val_ppl"]["bits_per_byte"]
    assert a != b == pytest.approx(a, rel=0.02)
    assert plain["step"] == 8


def test_a_sample_in_fp8_is_the_converted_models(runs, capsys):
    settings = [str(runs / "bf16"), "ab", "tokens=12", "temperature=0"]
    assert sample.main([*settings, "fp8=rowwise"]) == 0
    captured = capsys.readouterr()
    reference = by_hand(runs / "bf16", "rowwise", [n for n, m in load_model(runs / "bf16")[0].named_modules()
                                                   if isinstance(m, Linear) and n != "head"])
    want = generate(reference.eval(), torch.tensor([list(b"ab")]), 12, eot=256)[0].tolist()
    want = want[:want.index(256)] if 256 in want else want
    assert captured.out == "ab" + bytes(want).decode(errors="replace") + "\n"
    assert "8 of 9 Linears" in captured.err and "slower than BF16" in captured.err and len(captured.err.splitlines()) == 2
    assert sample.main(settings) == 0
    assert capsys.readouterr().err == ""


def test_a_loss_that_is_no_number_is_null_in_json_and_nan_in_the_table(runs, monkeypatch, capsys):
    def broken(*arguments):
        inference = sample.load_for_inference(*arguments)
        if arguments[3] != "off":
            inference.model.layers[0].mlp.down.weight.data.fill_(math.nan)
        return inference
    monkeypatch.setattr(precision, "load_for_inference", broken)
    assert precision.main([str(runs / "bf16"), "recipes=rowwise"]) == 0
    arm = read_json(runs / "bf16" / "eval" / "precision.json")["fp8"]["rowwise"]
    assert arm["loss"] is None and arm["difference_se"] is None and "| nan " in capsys.readouterr().out


def test_what_cannot_run_is_refused_before_the_checkpoint_is_read(runs, capsys, monkeypatch):
    monkeypatch.setattr(sample, "load_model", lambda *a, **k: pytest.fail("the checkpoint was read"))
    path = runs / "bf16" / "config.json"
    whole = path.read_text()
    config = json.loads(whole)
    config["model"]["n_ffn"] = 72
    path.write_text(json.dumps(config))
    for entry, first in ((harness, ["tasks=demo", "fp8=rowwise"]), (sample, ["fp8=rowwise"]), (precision, ["recipes=rowwise"])):
        assert entry.main([str(runs / "bf16"), *first]) == 2
        assert "fp8.recipe=rowwise cannot convert layers.0.mlp.down of 72 x 32" in capsys.readouterr().err
    path.write_text(whole)

    def refuse(settings, device):
        raise UserError(f"{settings.recipe} not on {device}")
    monkeypatch.setattr("runtime.fp8.check_hardware", refuse)
    assert sample.main([str(runs / "bf16"), "fp8=amax"]) == 2
    assert "amax not on cpu" in capsys.readouterr().err


def test_other_validation_data_and_unfinished_runs(runs, capsys):
    path = runs / "bf16" / "summary.json"
    path.write_text(json.dumps(read_json(path) | {"val_sha256": "0" * 64}))
    assert precision.main([str(runs / "bf16")]) == 2
    captured = capsys.readouterr()
    assert "holds other validation tokens" in captured.err and captured.out == ""
    path.unlink()     # a run that is not finished has none
    assert precision.main([str(runs / "bf16"), "recipes=rowwise"]) == 0


def test_a_run_that_gathered_float8_weights_is_loaded_whole(runs):
    config = read_config(runs / "fp8")
    gathered = replace(config, fp8=replace(config.fp8, all_gather=True))
    assert sample.check_recipe(gathered, "tensorwise", torch.device("cpu")) == replace(config.fp8, all_gather=False)
    assert sample.check_recipe(gathered, "rowwise", torch.device("cpu")) == FP8Config(recipe="rowwise")


def test_all_arms_are_of_one_checkpoint_though_the_run_writes_another_meanwhile(runs, monkeypatch):
    def moving(run, *arguments):
        inference = sample.load_for_inference(run, *arguments)
        shutil.copytree(f"{run}/checkpoints/step_00000008", f"{run}/checkpoints/step_00000009", dirs_exist_ok=True)
        return inference
    monkeypatch.setattr(precision, "load_for_inference", moving)
    assert precision.main([str(runs / "bf16"), "recipes=rowwise"]) == 0
    record = read_json(runs / "bf16" / "eval" / "precision.json")
    newest = sample.load_for_inference(runs / "bf16", "cpu", "bfloat16")
    assert [record["step"], record["fp8"]["rowwise"]["step"], newest.step] == [8, 8, 9]
