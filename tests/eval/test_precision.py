"""eval/precision.py, FP8 in eval/sample.py and eval/harness.py, on two real runs, one trained in
each precision."""

import math
import os
import shutil
import types
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch

import train
from eval import harness, inference, precision, sample
from fp8.probe import statistics
from fp8.recipes import RECIPES
from lib.errors import UserError
from lib.files import read_rows
from model import KVCache
from runtime.checkpoint import load_model
from runtime.config import FP8Config, LogConfig, OptimConfig, read_config
from runtime.data import Data
from runtime.tokenizer import load_tokenizer
from tests.conftest import tiny_config, write_config
from tests.fp8.test_linears import NATIVE, OPERANDS, quantised
from tests.helpers.eval_runs import call, greedy_text, refused
from tests.helpers.scaling_runs import edit
from tests.helpers.scaling_runs import strict as read_json

EIGHT = [
    f"layers.{i}.{name}"
    for i in range(2)
    for name in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
]


@pytest.fixture(scope="module")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """A BF16 run and an FP8 run with a choice of Linears of its own, as train.py leaves them."""
    folder = tmp_path_factory.mktemp("inference")
    config = replace(
        tiny_config(data_dir, folder / "out"),
        run="bf16",
        steps=8,
        optim=OptimConfig(lr=3e-2),
        log=LogConfig(every=100),
    )
    own = FP8Config(recipe="tensorwise", skip=("attn.out",), head=True)
    for each in (config, replace(config, run="fp8", fp8=own)):
        assert train.main([str(write_config(each, folder / f"{each.run}.py"))]) == 0
    return folder / "out"


@pytest.fixture
def runs(trained, tmp_path: Path):
    with mock.patch.dict(os.environ):  # which the harness changes
        yield shutil.copytree(trained, tmp_path / "out")


def by_hand(run: Path, recipe: str, names):
    """The run's plain model, the named Linears replaced by a matmul in fp64, both operands
    quantised without any code of ours."""
    model, _ = load_model(run)
    for name in names:

        def forward(self, x: torch.Tensor):
            (of_x, of_weight, *_), rows = OPERANDS[recipe], x.reshape(-1, x.size(-1))
            y = quantised(rows, of_x, 1)[0] @ quantised(self.weight, of_weight, 1)[0].T
            return y.view(*x.shape[:-1], -1).to(x.dtype)

        module = model.get_submodule(name)
        module.forward = types.MethodType(forward, module)
    return model


def load(run: Path, recipe: str = "off"):
    return inference.load_for_inference(str(run), "cpu", "bfloat16", recipe)


def logits_with_cache(model, ids):
    """(B, T, V): two tokens at once, then one at a time from the cache."""
    cache = KVCache()
    return torch.cat(
        [model(part, cache=cache) for part in (ids[:, :2], *ids[:, 2:].split(1, 1))], 1
    ).double()


@pytest.mark.parametrize("recipe", NATIVE)
@torch.no_grad()
def test_logits_are_those_of_explicit_quantisation_with_and_without_cache(runs, recipe):
    loaded = load(runs / "bf16", recipe)
    assert [layer.name for layer in loaded.layers if layer.recipe] == EIGHT
    ids = torch.randint(80, (3, 12), generator=torch.Generator().manual_seed(0))
    plain, reference = load_model(runs / "bf16")[0], by_hand(runs / "bf16", recipe, EIGHT)
    for run_model in (
        lambda m: m(ids).double(),
        lambda m: logits_with_cache(m, ids),
        lambda m: logits_with_cache(m, ids[:1]),
    ):
        got, want, unquantised = (run_model(m) for m in (loaded.model, reference, plain))
        wrong, effect = (got - want).norm() / want.norm(), (unquantised - want).norm() / want.norm()
        assert wrong < 0.25 * effect, (
            f"{wrong:.1e} from explicit quantisation, whose whole effect is {effect:.1e}"
        )

    # What a Linear quantises (tests/fp8/test_linears.py) is its fp32 weight, not a BF16 copy, as in
    # training.
    weight = plain.layers[1].mlp.down.weight
    assert weight.dtype == torch.float32 and torch.equal(
        loaded.model.layers[1].mlp.down.weight, weight
    )


def test_weights_outside_the_converted_linears_are_stored_in_bf16(runs):
    config = read_json(path := runs / "fp8" / "config.json")
    edit(path, fp8=config["fp8"] | {"all_gather": True})  # which one process need not do
    model, _, _, layers, _ = load(runs / "fp8", "tensorwise")
    converted = {layer.name for layer in layers if layer.recipe}
    assert converted == {
        f"layers.{i}.{m}" for i in range(2) for m in ("attn.qkv", "mlp.gate_up", "mlp.down")
    } | {"head"}
    assert model.head.weight is model.wte.weight  # tied, hence the embedding is fp32 too
    kept = {
        name.removesuffix(".weight")
        for name, p in model.named_parameters()
        if p.dtype == torch.float32
    }
    assert kept == converted - {"head"} | {"wte"} and {p.dtype for p in model.parameters()} == {
        torch.float32,
        torch.bfloat16,
    }
    plain, cast_at_use = (
        load(runs / "bf16").model,
        load_model(runs / "bf16", compute_dtype=torch.bfloat16)[0],
    )
    assert {p.dtype for p in plain.parameters()} == {
        torch.bfloat16
    } and plain.cos.dtype == torch.float32
    assert torch.equal(plain(torch.arange(20)[None]), cast_at_use(torch.arange(20)[None]))


def test_losses_are_those_that_training_reported_and_the_gap_is_paired(
    runs, capsys: pytest.CaptureFixture[str]
):
    call(precision, runs / "fp8", "recipes=tensorwise,rowwise")
    out = capsys.readouterr().out
    record, summary = (
        read_json(runs / "fp8" / name) for name in ("eval/precision.json", "summary.json")
    )
    tensorwise = record["fp8"]["tensorwise"]
    assert (
        record["bf16"]["loss"] == summary["loss_bf16"]
        and record["bf16"]["loss_se"] == summary["loss_bf16_se_seq"]
    )
    assert tensorwise["loss"] == summary["loss_as_trained"] != summary["loss_bf16"]
    # attn.out skipped
    assert set(tensorwise["layers"]) == set(summary["precision"]["layers_converted"])
    # another recipe: its defaults, without the head
    assert len(record["fp8"]["rowwise"]["layers"]) == 8
    with np.load(runs / "fp8" / "val_losses.npz") as losses:  # sources in sorted order: code, web
        gap = [(losses["as_trained"] - losses["bf16"])[losses["source"] == s] / 32 for s in (0, 1)]
    mean = 0.25 * gap[0].mean() + 0.75 * gap[1].mean()
    error = math.hypot(
        *(w * g.std(ddof=1) / math.sqrt(len(g)) for w, g in zip((0.25, 0.75), gap, strict=True))
    )
    found = [tensorwise[f"difference{end}"] for end in ("", "_se", "_percent")]
    assert found == pytest.approx([mean, error, 100 * mean / summary["loss_bf16"]], rel=1e-6)
    assert (
        error < record["bf16"]["loss_se"] / 5
        and f"{mean:+.5f} ± {error:.5f} |" in out
        and "fp8: emulated on this CPU" in out
    )


def test_a_bf16_run_and_the_probe_of_each_recipe(runs, capsys: pytest.CaptureFixture[str]):
    recipes = ["tensorwise", "cscale", "mxfp8", "auto"]
    call(precision, runs / "bf16", f"recipes={','.join(recipes)}", "micro_batch=5")
    record, out = read_json(runs / "bf16/eval/precision.json"), capsys.readouterr().out
    assert (
        record["step"] == 8
        and record["micro_batch"] == 5
        and record["sequences"] == {"code": 10, "web": 10}
    )
    # no timings of a CPU
    assert record["fp8"]["auto"]["difference"] == 0 and "THIS RUN IS BF16" in out
    model, _ = load_model(runs / "bf16")
    for recipe in recipes[:3]:  # what a row's numbers are: tests/fp8/test_probe.py
        rows = read_rows(runs / "bf16" / "eval" / f"probe_{recipe}.jsonl")
        assert [row.get("layer", row.get("block")) for row in rows] == [*EIGHT, 0, 1] and {
            row["step"] for row in rows
        } == {8}
        for row in rows[:8]:  # nothing of gradients
            assert (
                row.keys()
                == {"schema_version", "kind", "step", "layer", "recipe", "evaluated_in"}
                | {"weight", "activation", "output_sqnr"}
                and row["recipe"] == row["evaluated_in"] == recipe
            )
            assert (
                row["weight"]["amax"] == model.get_submodule(row["layer"]).weight.abs().max()
                and row["activation"]["amax"]
            )
    val, seen = Data(read_config(runs / "bf16"), load_tokenizer("byte").sha256).val, []
    quantised_model = load(runs / "bf16", "mxfp8").model
    quantised_model.layers[0].attn.qkv.register_forward_pre_hook(
        lambda module, x: seen.append(statistics(x[0], RECIPES["mxfp8"].input).tolist())
    )
    quantised_model(
        torch.cat(
            [val[source].batch(i, i + 1)[0] for i in range(3) for source in ("code", "web")][:5]
        )
    )
    assert [*rows[0]["activation"].values()] == seen[0], "the sources take turns in what is probed"


def test_tasks_are_scored_through_fp8_matmuls(runs, capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["fp8=rowwise"], ["fp8=rowwise", "limit=3"]):
        call(harness, runs / "bf16", "tasks=val_ppl", *arguments)
    out = capsys.readouterr().out
    assert out.count("8 of 9 Linears") == 2 and "layers.*.mlp.down" in out and "-> rowwise" in out
    plain, rowwise = (
        read_json(runs / "bf16" / "eval" / f"val_ppl{end}.json") for end in ("", "_fp8_rowwise")
    )
    assert (
        (plain["fp8"], rowwise["fp8"]) == ("off", "rowwise")
        and plain["layers_fp8"] == []
        and len(rowwise["layers_fp8"]) == 8
    )
    a, b = (record["tasks"]["val_ppl"]["bits_per_byte"] for record in (plain, rowwise))
    assert a != b == pytest.approx(a, rel=0.02) and plain["step"] == 8


def test_a_sample_in_fp8_is_the_converted_models(runs, capsys: pytest.CaptureFixture[str]):
    call(sample, runs / "bf16", "ab", "tokens=12", "temperature=0", "fp8=rowwise")
    out, err = capsys.readouterr()
    reference = by_hand(runs / "bf16", "rowwise", EIGHT)
    assert out == "ab" + greedy_text(reference.eval(), b"ab", 12) + "\n"
    assert "8 of 9 Linears" in err and "slower than BF16" in err and len(err.splitlines()) == 2


def test_all_arms_are_of_one_checkpoint_though_the_run_writes_another(
    runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It is null in JSON and nan in the table."""

    def broken(run: Path, *arguments: object):
        loaded = inference.load_for_inference(run, *arguments)
        if arguments[2] != "off":
            loaded.model.layers[0].mlp.down.weight.data.fill_(math.nan)
        shutil.copytree(
            f"{run}/checkpoints/step_00000008",
            f"{run}/checkpoints/step_00000009",
            dirs_exist_ok=True,
        )
        return loaded

    monkeypatch.setattr(precision, "load_for_inference", broken)
    (runs / "bf16" / "summary.json").unlink()  # a run that is not finished has none
    call(precision, runs / "bf16", "recipes=rowwise")
    arm = (record := read_json(runs / "bf16/eval/precision.json"))["fp8"]["rowwise"]
    assert (
        arm["loss"] is None and arm["difference_se"] is None and "| nan " in capsys.readouterr().out
    )
    assert [record["step"], arm["step"], load(runs / "bf16").step] == [8, 8, 9]


@pytest.mark.parametrize(
    "entry, argument",
    [(harness, "fp8=rowwise"), (sample, "fp8=rowwise"), (precision, "recipes=rowwise")],
)
def test_what_cannot_run_is_refused_before_the_checkpoint_is_read(
    runs,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    entry: ModuleType,
    argument: str,
):
    monkeypatch.setattr(
        inference, "load_model", lambda *a, **k: pytest.fail("the checkpoint was read")
    )
    arguments = [runs / "bf16", argument, *["tasks=demo"] * (entry is harness)]
    config = read_json(path := runs / "bf16" / "config.json")
    with monkeypatch.context() as patch:
        patch.setattr(
            "fp8.selection.check_hardware",
            mock.Mock(side_effect=UserError("rowwise not on this device")),
        )
        assert "rowwise not on this device" in refused(capsys, entry, *arguments)
    edit(path.parent / "summary.json", val_sha256="0")
    assert entry is not precision or "holds other validation tokens" in refused(
        capsys, entry, *arguments
    )
    edit(path, model=config["model"] | {"n_ffn": 72})
    assert "fp8.recipe=rowwise cannot convert layers.*.mlp.down of 72 x 32" in refused(
        capsys, entry, *arguments
    )
