"""Which Linears run in FP8, what auto chooses, what is printed of it, and what is refused."""

import contextlib
from dataclasses import fields

import pytest
import torch

from fp8 import selection
from fp8.recipes import from_label
from fp8.selection import Layer
from lib.errors import UserError
from model import GPT, GPTConfig
from runtime.config import FP8Config
from tests.helpers.fp8_models import NAMES, SIZE, build, tokens

GPU = "NVIDIA H100 80GB HBM3"


def verdicts(label: str, gpu: str | None = None, **changes: object) -> list[Layer]:
    """On each Linear of a model of two blocks."""
    return selection.select(GPT.on_meta(GPTConfig(**{**SIZE, **changes})), from_label(label), gpu)


def blocks(*numbers: int) -> set[str]:
    """The names of all Linears in these blocks."""
    return {f"layers.{number}.{name}" for number in numbers for name in NAMES}


@pytest.mark.parametrize(
    "label, in_bf16",
    [
        ("tensorwise", {"head"}),
        ("tensorwise+head", set()),
        ("tensorwise+skip=layers.0.*", {"head", *blocks(0)}),
        ("tensorwise+skip=attn.out", {"head", "layers.0.attn.out", "layers.1.attn.out"}),
        ("tensorwise+head+skip=layers.1.mlp.down,head", {"head", "layers.1.mlp.down"}),
        (
            "tensorwise+include=layers.1.mlp.*+skip=mlp.down",
            {"head", *blocks(0, 1)} - {"layers.1.mlp.gate_up"},
        ),
        ("rowwise+first_bf16=1", {"head", *blocks(0)}),
        ("rowwise+head+last_bf16=1", blocks(1)),
        ("rowwise+head+last_bf16=5", blocks(0, 1)),
    ],
)
def test_layers_are_selected_by_name(label: str, in_bf16: set):
    assert {layer.name for layer in verdicts(label) if layer.recipe is None} == in_bf16


@pytest.mark.parametrize(
    "label, changes, sentence",
    [
        ("tensorwise+skip=output", {}, r"fp8.skip='output' .*layers\.\*\.attn\.qkv"),
        ("rowwise", {"n_ffn": 100}, r"layers\.\*\.mlp\.gate_up of 64 x 200 .* multiples of 16"),
        ("mxfp8", {"n_ffn": 112}, r"layers\.\*\.mlp\.down of 112 x 64 .* multiples of 32"),
        ("rowwise", {"head_size": 20}, r"layers\.\*\.attn\.qkv of 64 x 120 .* multiples of 16"),
        ("tensorwise+skip=layers.*", {}, "nothing to convert"),
        ("rowwise+kernels", {}, "fp8.kernels=true .* fp8.recipe=rowwise"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused(
    label: str, changes: dict[str, int], sentence: str
):
    with pytest.raises(UserError, match=sentence):
        verdicts(label, **changes)


@pytest.mark.parametrize(
    "field", [f.name for f in fields(FP8Config) if f.name not in ("recipe", "all_gather")]
)
def test_a_label_names_every_setting_that_numbers_depend_on(field: str):
    values = {bool: True, int: 2, tuple: ("attn.out", "layers.[01].*"), str: "delayed"}
    value = True if field == "kernels" else values[type(getattr(FP8Config(), field))]
    config, plain = FP8Config(recipe="tensorwise", **{field: value}), from_label("tensorwise")
    assert plain == FP8Config(recipe="tensorwise")
    assert from_label(config.label) == config != plain


# --------------------------------------------------------------------------------------------- auto

# What auto finds measured: recipe, K, N, speed over BF16's.
MEASURED = (
    ("tensorwise", 64, 192, 1.2),
    ("tensorwise+kernels", 64, 192, 1.3),
    ("rowwise", 64, 192, 1.1),
    ("tensorwise", 64, 64, 0.8),
    ("rowwise_with_gw_hp", 96, 64, 1.3),
    ("tensorwise+kernels", 96, 64, 1.1),
    ("amax+kernels", 64, 64, 2.0),  # amax was not made for speed
)


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 whose matmuls were measured."""
    timings = [dict(zip(("recipe", "K", "N", "ratio"), row, strict=True)) for row in MEASURED]
    table = {"measured": {"sm_90": [{"gpu": GPU, "rows": timings}]}}
    monkeypatch.setattr(selection, "load_table", lambda: table)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)


@pytest.mark.parametrize("kernels", [False, True])
def test_auto_takes_of_each_layer_what_was_measured_to_be_fastest(h100: None, kernels: bool):
    layers = verdicts("auto+kernels" if kernels else "auto", GPU)
    by_auto = {layer.name.split(".", 2)[-1]: (layer.recipe, layer.kernels) for layer in layers}
    assert by_auto == {
        "attn.qkv": ("tensorwise", kernels),
        "mlp.gate_up": ("tensorwise", kernels),
        "attn.out": (None, False),
        "mlp.down": ("rowwise_with_gw_hp", False),
        "head": (None, False),
    }
    first_line = selection.verdict_lines(layers, "auto", "cuda")[0]
    assert ("(kernels, measured 1.30x at 64 x 192)" in first_line) is kernels


def test_a_model_whose_layers_auto_gave_different_recipes_trains(
    h100: None, emulated_scaled_mm: None
):
    model, layers = build("auto", "cuda")
    recipes = {layer.recipe for layer in layers if layer.recipe}
    assert recipes == {"tensorwise", "rowwise_with_gw_hp"}
    model(*tokens()).sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("gpu", [None, "NVIDIA A100-SXM4-80GB"])
def test_where_nothing_was_measured_auto_says_that_the_run_is_bf16(gpu: str | None):
    layers = verdicts("auto", gpu)
    assert not any(layer.recipe for layer in layers)
    assert "THIS RUN IS BF16" in selection.verdict_lines(layers, "auto", "cpu")[-1]


# ---------------------------------------------------------------------------------------- the table


def test_the_printed_table_counts_what_the_modules_hold():
    model, layers = build("tensorwise")
    lines = selection.verdict_lines(layers, "tensorwise", "cpu")
    named = dict(model.named_parameters())
    in_fp8 = sum(p.numel() for name, p in named.items() if "layers" in name and p.ndim == 2)
    share = in_fp8 / (in_fp8 + model.head.weight.numel())
    assert lines[0] == "fp8: layers.*.attn.qkv        64 x 192    x2   -> tensorwise"
    assert "kept BF16: head" in lines[4]
    assert f"8 of 9 Linears, {share:.1%} of" in lines[5]
    assert "emulated" in lines[6]


@pytest.mark.parametrize("recipe, is_said", [("mxfp8_norms", True), ("mxfp8", False)])
def test_the_start_says_that_a_recipe_rounds_norms(recipe: str, is_said: bool) -> None:
    lines = selection.verdict_lines(verdicts(recipe, None), recipe, "cpu")
    sentence = f"fp8: {recipe} rounds the weights of the norms before these Linears too"
    assert (sentence in lines) == is_said


# ------------------------------------------------------------------------------------- the hardware


@pytest.mark.parametrize(
    "label, capability, sentence",
    [
        ("tensorwise", (8, 9), None),
        ("rowwise_with_gw_hp", (10, 0), None),
        ("mxfp8", (8, 0), None),
        ("auto", (8, 0), None),
        ("tensorwise", (8, 0), "fp8.recipe=tensorwise .*8.9.* has 8.0"),
        ("rowwise", (8, 9), "fp8.recipe=rowwise .*9.0.* has 8.9"),
    ],
)
def test_hardware_that_cannot_run_the_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, label: str, capability: tuple[int, int], sentence: str | None
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    is_refused = pytest.raises(UserError, match=sentence) if sentence else contextlib.nullcontext()
    selection.check_hardware(from_label(label), torch.device("cpu"))
    with is_refused:
        selection.check_hardware(from_label(label), torch.device("cuda"))
