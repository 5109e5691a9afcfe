"""What fp8.kernels comes to: whose casts a run has, and why."""

import pytest

from fp8.convert import convert
from fp8.head_loss import FP8Head
from fp8.kernels import FP8KernelLinear
from fp8.linears import EmulatedLinear
from fp8.recipes import FP8Config
from fp8.selection import casting, select, verdict_lines
from model import GPT, GPTConfig

SIZE = GPTConfig(n_layer=1, n_head=2, n_embd=64, n_ffn=96, n_ctx=32, vocab_size=257)
QKV = "layers.0.attn.qkv"


@pytest.mark.parametrize(
    "settings, device, has_whole_weights, is_ours, why",
    [
        ({}, "cuda", True, True, "each rank holds whole weights"),
        ({"recipe": "tensorwise_gw_hp"}, "cuda", True, True, "each rank holds whole weights"),
        ({"recipe": "amax"}, "cuda", True, True, "each rank holds whole weights"),
        ({"recipe": "auto"}, "cuda", True, True, "each rank holds whole weights"),
        ({}, "cuda", False, False, "weights are sharded"),
        ({}, "cpu", True, False, "a CPU emulates FP8"),
        ({"recipe": "rowwise"}, "cuda", True, False, "fp8.recipe=rowwise has none"),
        ({"all_gather": True}, "cuda", False, False, "fp8.all_gather=true"),
        ({"scaling": "delayed"}, "cpu", True, True, "fp8.scaling=delayed needs them"),
        ({"scaling": "bounded"}, "cuda", False, True, "fp8.scaling=bounded needs them"),
        ({"kernels": True}, "cuda", False, True, "fp8.kernels=true"),
        ({"kernels": True}, "cpu", True, True, "fp8.kernels=true"),
        ({"kernels": False}, "cuda", True, False, "fp8.kernels=false"),
    ],
)
def test_who_casts_and_why(
    settings: dict, device: str, has_whole_weights: bool, is_ours: bool, why: str
) -> None:
    config = FP8Config(**({"recipe": "tensorwise"} | settings))
    assert not list(config.problems())
    cast_by = casting(config, device, has_whole_weights)
    assert (cast_by.is_ours, cast_by.why.startswith(why)) == (is_ours, True), cast_by


def test_without_a_recipe_one_sentence_names_all_that_is_set() -> None:
    (problem,) = FP8Config(kernels=True, all_gather=False, fast_backward=True).problems()
    assert "fp8.recipe=off converts nothing, yet fp8.kernels, fp8.fast_backward is set" in problem


def test_the_start_says_who_casts_and_why() -> None:
    config = FP8Config(recipe="tensorwise")
    cast_by = casting(config, "cuda", has_whole_weights=False)
    layers = select(GPT.on_meta(SIZE), config, has_kernels=cast_by.is_ours)
    lines = verdict_lines(layers, "tensorwise", "cuda", cast_by)
    assert (
        "fp8: our kernels do not cast: weights are sharded, and would be cast in every micro-batch"
        in lines
    )


@pytest.mark.parametrize(
    "kernels, has_kernels, block, head",
    [
        ("auto", True, FP8KernelLinear, FP8KernelLinear),
        (True, True, FP8KernelLinear, FP8Head),
        ("auto", False, EmulatedLinear, EmulatedLinear),
    ],
)
def test_a_heads_loss_is_within_its_matmul_only_with_kernels(
    kernels: bool | str, has_kernels: bool, block: type, head: type
) -> None:
    """The scale of its gradient is then a bound's, not torchao's: another arm."""
    model = GPT.on_meta(SIZE)
    config = FP8Config(recipe="tensorwise", head=True, kernels=kernels)  # type: ignore[arg-type]
    convert(model, config, has_kernels=has_kernels)
    assert type(model.get_submodule(QKV)) is block
    assert type(model.head) is head
