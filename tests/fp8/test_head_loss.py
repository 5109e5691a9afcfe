"""The head's cross-entropy in one with its FP8 matmuls, against fp64; a model's loss is the same
whether its head fuses it or not. Models whose loss is another one are refused:
fp8/test_recipes.py."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from fp8 import head_loss as head_loss_module
from fp8.head_loss import FP8HeadLoss, cross_entropy_grad
from fp8.kernels import NO_TENSORS
from fp8.recipes import E5M2, RECIPES, Recipe
from fp8.rounding import fake_quantise, scale_of
from model import beside_z
from tests.fp8.test_kernels import float8_matmuls, matmuls  # noqa: F401 - a fixture
from tests.helpers.fp8_models import build, distance, tokens

Tensors = tuple[torch.Tensor, ...]


def head_loss(
    h: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    factors: torch.Tensor,
    recipe: Recipe = RECIPES["tensorwise"],
) -> Tensors:
    """Losses, gradients of h and w; factors are the losses' gradients."""
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    losses = FP8HeadLoss.apply(h, w, targets, recipe, False, *NO_TENSORS)
    losses.backward(factors)
    return losses.detach(), h.grad, w.grad


def head_case(masked: bool = False) -> Tensors:
    """h (48, 64), w (272, 64), targets (48,), factors (48,); masked: a third has no target, and
    factors differ."""
    torch.manual_seed(0)
    h, w = torch.randn(48, 64).bfloat16(), 0.2 * torch.randn(272, 64)
    targets, factors = torch.randint(272, (48,)), torch.full((48,), 2.0**-17)
    if masked:
        targets[::3] = -100
        factors *= 400 * torch.rand(48)
    return h, w, targets, factors


@dataclass
class Computed:
    """By the fused head, and in fp64 from explicitly quantised operands."""

    targets: torch.Tensor
    factors: torch.Tensor
    losses: torch.Tensor
    grad_h: torch.Tensor
    grad_w: torch.Tensor
    scale: torch.Tensor  # of the logits' gradient
    expected_losses: torch.Tensor
    expected_grad: torch.Tensor  # of the logits, not rounded
    qh: torch.Tensor
    qw: torch.Tensor


@pytest.fixture(params=[("tensorwise", True), ("tensorwise", False), ("amax", True)], ids=str)
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Computed:
    name, masked = request.param
    recipe = replace(RECIPES[name], fast_backward=not masked)
    scales = []

    def noted(*arguments: object):
        scales.append(arguments[-1].double())
        return cross_entropy_grad(*arguments)

    monkeypatch.setattr(head_loss_module, "cross_entropy_grad", noted)
    h, w, targets, factors = head_case(masked)
    losses, grad_h, grad_w = head_loss(h, w, targets, factors, recipe)
    qh = fake_quantise(h, recipe.input).double()
    qw = fake_quantise(w, recipe.weight).double()
    logits = (qh @ qw.T).bfloat16().double()
    expected_losses = F.cross_entropy(logits, targets, reduction="none")
    is_target = F.one_hot(targets.clamp(min=0), 272)
    has_target = (targets >= 0)[:, None]
    expected_grad = (logits.softmax(-1) - is_target) * factors[:, None] * has_target
    (scale,) = scales
    return Computed(
        targets, factors, losses, grad_h, grad_w, scale, expected_losses, expected_grad, qh, qw
    )


def test_losses_are_those_of_fp64(computed: Computed):
    torch.testing.assert_close(
        computed.losses.double(), computed.expected_losses, rtol=1e-6, atol=1e-6
    )


def test_gradients_are_those_of_fp64(computed: Computed):
    scale = computed.scale
    grad = (computed.expected_grad.float() * scale.float()).to(E5M2).double() / scale
    assert distance(computed.grad_h, grad @ computed.qw) < 4e-3
    assert distance(computed.grad_w, grad.T @ computed.qh) < 1e-4


def test_the_gradients_bound_holds_and_wastes_no_range(computed: Computed):
    assert (computed.expected_grad * computed.scale).abs().max() <= 57344
    assert computed.scale * computed.factors.max() > 28000


def test_a_token_without_target_has_no_loss_and_no_gradient(computed: Computed):
    has_target = computed.targets != -100
    assert torch.equal(computed.losses != 0, has_target)
    assert torch.equal(computed.grad_h.any(1), has_target)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_through_the_log_sum_exp_are_those_of_fp64(masked: bool):
    """Of 0.02 lse^2 beside the loss, by autograd from explicitly quantised operands; the logits'
    gradient is rounded once, with the scale of the bound."""
    recipe = RECIPES["tensorwise"]
    h, w, targets, factors = head_case(masked)
    h, w = h.requires_grad_(), w.requires_grad_()
    losses, lse = FP8HeadLoss.apply(h, w, targets, recipe, True, *NO_TENSORS)
    both = beside_z(losses, lse, targets)
    (both @ torch.tensor([1.0, 0.02])).backward(factors)
    qh = fake_quantise(h.detach(), recipe.input).double()
    qw = fake_quantise(w.detach(), recipe.weight).double()
    logits = (qh @ qw.T).bfloat16().double().requires_grad_()
    has_target = targets != -100
    squares = 0.02 * logits.exp().sum(-1).log().square() * has_target
    objective = F.cross_entropy(logits, targets, reduction="none") + squares
    objective.backward(factors.double())
    torch.testing.assert_close(both[:, 1].double() * 0.02, squares, rtol=1e-5, atol=1e-6)
    largest = (factors * (1 + 2 * 0.02 * lse.detach() * has_target)).max()
    scale = scale_of(largest, recipe.grad)
    assert (logits.grad.abs() * scale).max() <= 57344
    grad = (logits.grad.float() * scale).to(E5M2).double() / scale
    assert distance(h.grad, grad @ qw) < 4e-3
    assert distance(w.grad, grad.T @ qh) < 1e-4


@pytest.mark.parametrize("is_fast", [False, True])
def test_the_heads_backward_matmuls_accumulate_fast_where_asked(is_fast: bool, matmuls):  # noqa: F811
    head_loss(*head_case(), replace(RECIPES["tensorwise"], fast_backward=is_fast))
    assert matmuls == float8_matmuls(is_fast)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("operand", ["h", "w", "factor"])
def test_what_is_not_finite_reaches_the_loss_or_its_gradient(operand: str, bad: float):
    h, w, targets, factors = head_case()
    {"h": h, "w": w, "factor": factors[None]}[operand][0, 3] = bad
    losses, *gradients = head_loss(h, w, targets, factors)
    assert not any(gradient.isfinite().all() for gradient in gradients)
    assert operand == "factor" or not losses.isfinite().all()


@dataclass
class Loss:
    """Of a model: each sequence's, and the gradients of a mean over tokens."""

    losses: torch.Tensor
    gradients: list[torch.Tensor]


def loss_of(model, with_z: bool = False) -> Loss:
    losses = model(*tokens(), with_z=with_z)
    objective = losses @ torch.tensor([1.0, 0.01]) if with_z else losses
    (objective.sum() / 128).backward()
    return Loss(losses.detach(), [weight.grad for weight in model.parameters()])


def test_a_head_in_chunks_has_the_losses_and_gradients_of_one_in_one_piece():
    """Up to FP8's rounding; recomputed chunk by chunk in the backward pass."""
    whole, chunked = (
        loss_of(build("tensorwise+kernels", head=True, loss_chunk=chunk)[0]) for chunk in (None, 64)
    )
    # the head's input has a scale a chunk
    torch.testing.assert_close(chunked.losses, whole.losses, rtol=5e-3, atol=0)
    distances = list(map(distance, chunked.gradients, whole.gradients))
    assert all(d < 0.2 for d in distances), distances


@pytest.mark.parametrize("with_z", [False, True])
@pytest.mark.parametrize("label", ["tensorwise+kernels", "amax+kernels"])
def test_a_models_loss_is_the_same_whether_its_head_fuses_it_or_not(label: str, with_z: bool):
    """Whatever GPT.token_losses() adds to the loss of logits, the fused head must add too; a head
    with hooks does not fuse."""
    fused, plain = (build(label, head=True)[0] for _ in range(2))
    plain.head.register_forward_hook(lambda *_: None)
    assert fused.head.fuses_loss() and not plain.head.fuses_loss()
    fused_loss, plain_loss = loss_of(fused, with_z), loss_of(plain, with_z)
    torch.testing.assert_close(fused_loss.losses, plain_loss.losses, rtol=1e-6, atol=1e-5)
    distances = list(map(distance, fused_loss.gradients, plain_loss.gradients))
    assert all(d < 0.2 for d in distances), distances  # the logits' gradient has another scale
