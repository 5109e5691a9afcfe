"""torch.compile of the FP8 Linears and the head's loss: one graph, the numbers of eager, nothing
compiled again. Whole models: runtime/test_compiled.py; by blocks: runtime/test_two_ranks.py."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch._inductor.config as inductor

from fp8 import linears
from fp8.copies import refresh_weight_copies
from fp8.delayed import DelayedScales
from fp8.head_loss import FP8Head
from fp8.linears import set_position
from fp8.noise import noise_at
from fp8.precision import in_bf16
from fp8.recipes import RECIPES
from model import GPT, RMSNorm
from runtime import parallel
from runtime.config import Config, FP8Config
from tests.helpers.fp8_models import distance, linear, operands, passes

LABELS = ("cscale", "rowwise_with_gw_hp", "mxfp8", "tensorwise+kernels+delayed")
# before, Inductor adds a norm's gradients in another order
MOST = 2e-3 if torch.__version__ >= "2.13" else 4e-3


class Piece(torch.nn.Module):
    """A norm, Linears with all kinds of scaling, the head's loss: what compilation fuses, for less
    compilation than a GPT."""

    token_losses = GPT.token_losses
    loss_of_logits = staticmethod(GPT.loss_of_logits)

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(64, 1e-5)
        torch.nn.init.ones_(self.norm.weight)
        _, w, _ = operands("random")
        self.linears = torch.nn.ModuleList(linear(w, label) for label in LABELS)
        self.kernels = linear(w[:64], "tensorwise+kernels")
        (plain,) = linear(4 * w, "off")
        self.head = FP8Head(plain, RECIPES["tensorwise"], is_delayed=True)
        self.scales = DelayedScales(self)

    def forward(self, x: torch.Tensor):
        x = self.norm(x)
        losses = self.token_losses(self.kernels(x), torch.arange(len(x)))
        return *(holder(x) for holder in self.linears), losses


@dataclass
class Step:
    """A step of a Piece."""

    factor: float  # by which a weight changes before
    loss_scale: float
    stance: str  # of torch.compile


# Weights and delayed scales change, which must compile nothing anew.
STEPS = [Step(1.0, 1 / 128, "default"), Step(-1.5, 1 / 100, "fail_on_recompile")]


@dataclass
class Taken:
    """What a step has computed."""

    numbers: list[torch.Tensor]  # saturated tensors, outputs, gradients; the norm's last but one
    scales: dict[str, list[float]]  # the delayed ones' history


def take(model: Piece, how: Step) -> Taken:
    x, _, g = operands("opposed")
    with torch.no_grad():
        model.kernels[0].weight.mul_(how.factor)
    refresh_weight_copies(model)
    model.zero_grad()
    model.scales.begin(how.loss_scale)
    leaf = x.clone().requires_grad_()
    # Not monkeypatch, whose undoing hides the switch for good.
    with inductor.patch(emulate_precision_casts=True), torch.compiler.set_stance(how.stance):
        outputs = model(leaf)
        gradients = [g] * len(LABELS) + [torch.full((len(x),), 1 / 48)]
        torch.autograd.backward(outputs, gradients)
    saturated = model.scales.end(how.loss_scale)
    weights = [weight.grad for weight in model.parameters()]
    return Taken([saturated, *outputs, leaf.grad, *weights], model.scales.state())


@pytest.fixture(scope="module", autouse=True)
def emulated_in_fp32() -> Iterator[None]:
    """Behind BF16 matmuls Inductor adds the norm's gradients in another order; on BF16 units:
    fp8/test_emulation.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linears, "has_bf16_units", lambda: False)
        yield


@pytest.fixture(scope="module")
def compiled() -> Piece:
    model = Piece()
    parallel.compile_model(model, is_whole=True)
    return model


@pytest.fixture(scope="module")
def steps(compiled: Piece) -> list[tuple[Taken, Taken]]:
    """Each of STEPS, compiled and eager. Fused kernels keep fp32 where eager ones round to BF16 in
    between, and a value at the edge of a float8 step then falls to the other side: those roundings
    are kept here, so that both agree closely."""
    eager = Piece()
    return [(take(compiled, how), take(eager, how)) for how in STEPS]


@pytest.mark.parametrize("number", range(len(STEPS)), ids=["first", "after all has changed"])
def test_outputs_and_gradients_are_those_of_eager(steps: list[tuple[Taken, Taken]], number: int):
    computed, eager = steps[number]
    distances = list(map(distance, computed.numbers, eager.numbers))
    assert all(d < MOST for d in distances[:-2]), distances  # 1e-7 where sums are in one order
    assert all(d < 1e-2 for d in distances[-2:]), distances


@pytest.mark.parametrize("number", range(len(STEPS)), ids=["first", "after all has changed"])
def test_delayed_scales_are_those_of_eager(steps: list[tuple[Taken, Taken]], number: int):
    computed, eager = steps[number]
    # the head's gradient has a bound
    assert set(computed.scales) == {"linears.3.0.x", "linears.3.0.g", "head.x"}
    for name, history in eager.scales.items():
        assert history[0] > 0, name
        assert computed.scales[name] == pytest.approx(history, rel=MOST), name


def test_in_bf16_leaves_the_compiled_graph(compiled: Piece):
    (x, _, _), (_, w, _) = operands("opposed"), operands("random")
    expected = compiled.norm(x) @ w.bfloat16().T
    with in_bf16(compiled), torch.no_grad():
        outputs = compiled(x)[:-1]
    assert all(torch.equal(output, expected) for output in outputs)


def test_layers_of_nvfp4_share_a_graph_though_each_has_its_own_noise():
    """Were each compiled anew, for a number of its own, torch would give up at eight blocks."""
    x, w, g = operands("random")
    layers = torch.nn.ModuleList(linear(w, "nvfp4") for _ in range(2))
    for layer in layers:
        layer.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    gradients = []
    for number, position, stance in (
        (0, 0, "default"),
        (1, 0, "fail_on_recompile"),
        (1, 4096, "fail_on_recompile"),
    ):
        set_position(layers, position)
        layers.zero_grad()
        with torch.compiler.set_stance(stance):
            gradients.append(passes(layers[number], x, g)[1])
    assert not torch.equal(gradients[0], gradients[1]), "another layer"
    assert not torch.equal(gradients[1], gradients[2]), "another position"


def test_compiled_noise_of_stochastic_rounding_has_eagers_bits():
    """By integers alone, whose overflow C++ leaves open."""
    compiled = torch.compile(noise_at, dynamic=False, fullgraph=True)
    position = torch.tensor(2**40 + 4096)
    assert torch.equal(compiled((32, 96), position, 5), noise_at((32, 96), position, 5))


@pytest.mark.parametrize(
    "recipe, recipes_chosen, is_set",
    [
        ("rowwise", ["rowwise"], True),
        ("auto", ["tensorwise", "rowwise_with_gw_hp"], True),
        ("auto", ["tensorwise"], False),
    ],
)
def test_rowwise_by_whatever_name_keeps_its_roundings_on_cuda(
    tiny: Config,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    recipes_chosen: list[str],
    is_set: bool,
):
    """Otherwise a compiled rowwise Linear after an RMSNorm turns NaN (pytorch#150859)."""
    compiling = replace(tiny.parallel, compile=True)
    config = replace(tiny, fp8=FP8Config(recipe=recipe), parallel=compiling)
    world = parallel.World(0, 0, 1, torch.device("cuda", 0))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    with inductor.patch(emulate_precision_casts=False):
        lines = parallel.set_torch_flags(config, world, recipes_chosen)
        assert inductor.emulate_precision_casts is is_set
    assert any("emulate_precision_casts" in line for line in lines) is is_set
