"""fp8/recipes.py holds every fact of a recipe, and what a stranger adds to it cannot be computed as
something else without a word: it is refused, or a test here is red."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from fp8 import linears, recipes, selection
from fp8.casts import Casts
from fp8.convert import convert
from fp8.head_loss import check_is_cross_entropy
from fp8.linears import EmulatedLinear, emulation_dtype
from fp8.recipes import E4M3, E5M2, RECIPES, FP8Config, Operand, Recipe, for_loss_scale, from_label
from fp8.rounding import fake_quantise
from lib.errors import UserError
from model import GPT, GPTConfig
from runtime import parallel, plan, run
from runtime.config import Config
from tests.conftest import ROOT, changed
from tests.fp8.test_linears import OPERANDS
from tests.helpers.fp8_models import KERNELS, SIZE

WIDE = Operand(E5M2)
STRANGER = Recipe(name="stranger", input=WIDE, weight=WIDE, grad=WIDE)  # E5M2 for all operands


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch):
    """Adds a recipe to the table, for one test."""

    def add_recipe(**facts: object):
        monkeypatch.setitem(RECIPES, "stranger", replace(STRANGER, **facts))

    return add_recipe


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """What fp8 asks of a GPU, answered as on a H100; the device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return torch.device("cuda", 0)


def model():
    return GPT.on_meta(GPTConfig(**SIZE))


@pytest.mark.parametrize("scaling", ["tensor", "row", "tile", "constant"])
def test_an_operand_that_saturates_is_scaled_by_blocks(scaling: Any) -> None:
    with pytest.raises(ValueError, match=f"needs scaling='block', not '{scaling}'"):
        Operand(E4M3, scaling, saturates=True)


# --------------------------------------------------------------------- who computes it, and whether


def test_a_recipe_that_nothing_computes_on_a_gpu_is_refused_there(add, hopper):
    add()
    config = FP8Config(recipe="stranger")
    for attempt in (
        lambda: selection.check_hardware(config, hopper),
        lambda: convert(model(), config, device_type="cuda"),
    ):
        with pytest.raises(UserError, match="fp8.recipe=stranger has no implementation on a GPU"):
            attempt()


@pytest.mark.parametrize("words, is_refused", [("", False), ("fp8.kernels=false", True)])
def test_a_run_is_refused_by_who_will_cast_not_by_the_word_auto(
    words: str, is_refused: bool, hopper, tiny: Config, monkeypatch: pytest.MonkeyPatch
):
    """Were `amax` a recipe that our kernels alone compute on a GPU; the run goes no further."""
    ours_alone = replace(RECIPES["amax"], on_gpu=None, torchao_name="")
    monkeypatch.setitem(RECIPES, "amax", ours_alone)
    monkeypatch.setattr(run, "claim", lambda *_: False)
    config = changed(tiny, f"fp8.recipe=amax {words}")
    sentence = "amax has no implementation on a GPU"
    expected = pytest.raises(UserError, match=sentence) if is_refused else nullcontext()
    with expected, run.Run.open(config, parallel.World(0, 0, 1, hopper)) as opened:
        assert opened is None


def test_on_a_cpu_it_is_emulated(add):
    add()
    gpt = model()
    convert(gpt, FP8Config(recipe="stranger"))
    assert type(gpt.layers[0].attn.qkv) is EmulatedLinear


def test_a_plan_says_that_it_is_refused(add, monkeypatch: pytest.MonkeyPatch):
    add()
    config = SimpleNamespace(
        fp8=FP8Config(recipe="stranger"), parallel=SimpleNamespace(recompute=False)
    )
    costs = SimpleNamespace(
        counts={"flops_per_token": 10**9}, tokens=10**9, params_fp8=10**8, n_gpus=1
    )
    lines = plan._hours(config, costs, "h100")
    assert "fp8.recipe=stranger has no implementation on a GPU" in lines[-1]


def test_torchao_is_not_asked_for_a_recipe_that_it_rounds_otherwise(add):
    """The mistake that computed E5M2 for all operands as tensorwise."""
    add(on_gpu="torchao", torchao_name="tensorwise")
    with pytest.raises(UserError, match="stranger cannot be computed by torchao's 'tensorwise'"):
        convert(model(), FP8Config(recipe="stranger"), device_type="cuda")


@pytest.mark.parametrize("name", [r.name for r in RECIPES.values() if r.on_gpu == "torchao"])
@pytest.mark.parametrize("side", ["input", "weight", "grad"])
def test_each_operand_of_torchaos_recipes_is_compared(name: str, side: str):
    """A recipe with one operand in another format is refused."""
    linear = torch.nn.Linear(16, 16, bias=False)
    recipe = for_loss_scale(RECIPES[name], 2.0**-7)
    linears.torchao_linear(linear, recipe, FP8Config(), is_emulated=True)
    operand = getattr(recipe, side)
    other_operand = replace(operand, format=E4M3 if operand.format == E5M2 else E5M2)
    wrong = replace(recipe, **{side: other_operand})
    with pytest.raises(UserError, match="cannot be computed by torchao"):
        linears.torchao_linear(linear, wrong, FP8Config(), is_emulated=True)


def test_every_prototype_is_there():
    prototypes = {recipe.name for recipe in RECIPES.values() if recipe.on_gpu == "prototype"}
    assert prototypes == set(linears.PROTOTYPES)


@pytest.mark.parametrize(
    "facts",
    [
        {"on_gpu": "torchao"},
        {"torchao_name": "tensorwise"},
        {"on_gpu": "prototype"},
        {"native_on": (9,), "on_gpu": "emulated"},
        {"input": Operand(E4M3, "row"), "has_kernels": True},
    ],
)
def test_facts_that_contradict_each_other_are_refused(facts: dict[str, Any]):
    with pytest.raises(ValueError, match="recipe stranger: "):
        replace(STRANGER, **facts)


# ------------------------------------------------------------------------------ how it is emulated


@pytest.mark.parametrize("name", RECIPES)
def test_an_emulation_on_a_gpu_multiplies_the_very_values(name: str):
    """Dequantised operands are numbers of the dtype that multiplies them."""
    recipe = RECIPES[name]
    dtype = emulation_dtype(recipe, "cuda", torch.bfloat16)
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 0.37
    for operand in recipe.operands:
        for dim in (0, 1):
            dequantised = fake_quantise(x, operand, dim)
            if operand.format is not None:
                assert torch.equal(dequantised.to(dtype).float(), dequantised), (operand, dim)


def test_one_scale_a_tensor_is_emulated_in_fp32_on_a_gpu():
    assert emulation_dtype(STRANGER, "cuda", torch.bfloat16) == torch.float32


@pytest.mark.parametrize("name", [*RECIPES, "stranger"])
def test_tf32_rounds_no_emulated_matmul(name: str, tiny: Config, monkeypatch: pytest.MonkeyPatch):
    if name == "stranger":
        monkeypatch.setitem(RECIPES, name, replace(STRANGER, on_gpu="emulated"))
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    world = parallel.World(0, 0, 1, torch.device("cuda", 0))
    parallel.set_torch_flags(changed(tiny, "parallel.compile=off"), world, [name])
    dtype = emulation_dtype(RECIPES[name], "cuda", torch.bfloat16)
    is_fp32 = RECIPES[name].is_emulated_on_gpus and dtype == torch.float32
    assert precisions == ["highest" if is_fp32 else "high"]


# ------------------------------------------------------------------------------- the loss of a head


class WithZLoss(GPT):
    @staticmethod
    def loss_of_logits(logits: torch.Tensor, targets: torch.Tensor):
        plain = GPT.loss_of_logits(logits, targets)
        return plain + 1e-4 * logits.logsumexp(-1) ** 2


def test_a_head_that_computes_its_loss_refuses_another_loss():
    with torch.device("meta"):
        gpt = WithZLoss(GPTConfig(**SIZE))
    with pytest.raises(UserError, match="the model's loss is another one"):
        convert(gpt, from_label("tensorwise+kernels+head"))


def added_to_the_gradient_alone(logits: torch.Tensor, targets: torch.Tensor):
    """How a z-loss is kept out of the loss that is shown."""
    z = 1e-2 * logits.logsumexp(1) ** 2
    return GPT.loss_of_logits(logits, targets) + z - z.detach()


@pytest.mark.parametrize(
    "label", ["tensorwise+kernels", "tensorwise+head", "tensorwise_gw_hp+kernels+head"]
)
def test_another_loss_is_fine_where_the_head_computes_none(label: str):
    with torch.device("meta"):
        gpt = WithZLoss(GPTConfig(**SIZE))
    convert(gpt, from_label(label))


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, targets: 2 * GPT.loss_of_logits(logits, targets),
        added_to_the_gradient_alone,
        lambda logits, targets: GPT.loss_of_logits(30 * (logits / 30).tanh(), targets),
        lambda logits, targets: torch.nn.functional.cross_entropy(
            logits, targets, reduction="none", label_smoothing=0.01
        ),
        lambda logits, targets: GPT.loss_of_logits(logits, targets).mean(),
        lambda logits, targets: (
            GPT.loss_of_logits(logits, targets) + 1e-7 * logits.logsumexp(-1) ** 2
        ),
    ],
    ids=["scaled", "gradient alone", "soft-capped", "smoothed", "mean", "small z-loss"],
)
def test_losses_that_are_no_plain_cross_entropy_are_told_from_it(loss: Callable[..., Any]):
    check_is_cross_entropy(GPT.loss_of_logits)
    with pytest.raises(UserError):
        check_is_cross_entropy(loss)


# -------------------------------------------------------------------- made from, or checked against


def test_every_recipe_has_a_reference():
    """tests/fp8/test_linears.py multiplies by each in fp64, from operands that are spelled out
    there."""
    assert set(OPERANDS) == set(RECIPES)
    assert set(KERNELS) == {f"{r.name}+kernels" for r in RECIPES.values() if r.has_kernels}


def test_the_choices_of_a_config_are_the_recipes():
    assert get_args(get_type_hints(FP8Config)["recipe"]) == ("off", "auto", *RECIPES)


@pytest.mark.parametrize("page", recipes.TABLES)
def test_the_tables_of_the_documentation_are_those_of_the_recipes(page: str):
    """Else: python -m fp8.recipes --write."""
    text = (ROOT / page).read_text()
    assert recipes.with_table(text, recipes.TABLES[page]()) == text


def test_a_page_without_a_place_for_its_table_is_told_of():
    with pytest.raises(UserError, match="lacks the lines"):
        recipes.with_table("# FP8\n", "| a |")


CASTS = [(r, settings) for r in RECIPES.values() for settings in r.casts]


@pytest.mark.parametrize("recipe, settings", CASTS, ids=lambda value: getattr(value, "name", value))
def test_modelled_casts_belong_to_a_label_and_have_its_matmuls(recipe: Recipe, settings: str):
    casts: Casts = recipe.casts[settings]
    assert from_label(recipe.name + settings).label == recipe.name + settings
    assert sum(form.startswith("fp8") for form in casts.formats) == recipe.fp8_matmuls


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is_for(name: str):
    assert RECIPES[name].scales and RECIPES[name].use
