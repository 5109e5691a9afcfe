"""Operators and Linears built on our kernels, against torchao and against themselves without
lasting copies. The kernels: fp8/test_triton_kernels.py; compiled: fp8/test_compiled.py; sharded:
runtime/test_two_ranks.py."""

from dataclasses import replace

import pytest
import torch

from fp8 import kernels as kernels_module
from fp8.copies import refresh_weight_copies, zero_gradients
from fp8.kernels import KernelLinear
from fp8.matmul import scaled_mm
from fp8.recipes import E4M3, E5M2, from_label
from model import GPT, GPTConfig
from runtime import parallel
from runtime.config import Config
from tests.conftest import ALONE
from tests.helpers.fp8_models import (
    KERNELS,
    KINDS,
    SIZE,
    build,
    linear,
    operands,
    passes,
    tokens,
)

NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


def without_copies(model: torch.nn.Module) -> torch.nn.Module:
    """The same model, in which weights are quantised at each use, as under FSDP2."""
    for module in model.modules():
        if isinstance(module, KernelLinear):
            module.q = module.qt = module.scale = None
    return model


# dtypes of the operands, whether the sum is fast, dtype of the result
Matmul = tuple[torch.dtype, torch.dtype, bool, torch.dtype]


@pytest.fixture
def matmuls(monkeypatch: pytest.MonkeyPatch) -> list[Matmul]:
    """The float8 matmuls of our kernels. A CPU takes any layout; a GPU needs the second operand
    column-major, and fast accumulation changes only its numbers."""
    calls: list[Matmul] = []

    def spy(a, a_inverse, b, b_inverse, dtype, fast: bool = False):
        assert a.is_contiguous() and b.t().is_contiguous()
        assert all(n % 16 == 0 for n in b.shape)
        calls.append((a.dtype, b.dtype, fast, dtype))
        return scaled_mm(a, a_inverse, b, b_inverse, dtype, fast)

    monkeypatch.setattr(kernels_module, "scaled_mm", spy)
    return calls


def float8_matmuls(is_fast: bool, has_bf16_weight_grad: bool = False) -> list[Matmul]:
    """The float8 matmuls of a Linear: output, input's gradient, weight's gradient."""
    matmuls = [
        (E4M3, E4M3, True, torch.bfloat16),
        (E5M2, E4M3, is_fast, torch.bfloat16),
        (E5M2, E4M3, is_fast, torch.float32),
    ]
    return matmuls[:2] if has_bf16_weight_grad else matmuls


def torchao_label(label: str) -> str:
    return label.replace("+kernels", "")


@pytest.mark.parametrize("has_copies", [True, False], ids=["copies", "cast at each use"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", KERNELS)
def test_every_bit_is_torchaos(label: str, kind: str, has_copies: bool, emulated_scaled_mm: None):
    """Except that our fp32 weight gradient is not rounded to BF16 in between; rounded, it is
    torchao's."""
    x, w, g = operands(kind)
    ours = linear(w, label) if has_copies else without_copies(linear(w, label))
    y, grad_x, grad_w = passes(ours, x, g)
    expected_y, expected_grad_x, expected_grad_w = passes(
        linear(w, torchao_label(label), "cuda"), x, g
    )
    assert torch.equal(y, expected_y)
    assert torch.equal(grad_x, expected_grad_x)
    assert torch.equal(grad_w.bfloat16().float(), expected_grad_w)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("label", KERNELS)
def test_backward_matmuls_accumulate_fast_where_that_is_asked_for(
    label: str, is_fast: bool, matmuls: list[Matmul]
):
    x, w, g = operands("random")
    passes(linear(w, f"{label}+fast_backward" if is_fast else label), x, g)
    assert matmuls == float8_matmuls(is_fast, "gw_hp" in label)


@pytest.mark.parametrize("n_tokens", [32, 5])
@pytest.mark.parametrize("label", KERNELS)
def test_without_gradients_any_number_of_tokens_is_multiplied(
    label: str, n_tokens: int, emulated_scaled_mm: None
):
    """As sampling has them: nothing is transposed there."""
    x, w, _ = operands("random")
    ours, torchaos = linear(w, label), linear(w, torchao_label(label), "cuda")
    with torch.no_grad():
        assert torch.equal(ours(x[:n_tokens]), torchaos(x[:n_tokens]))


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("operand", range(3), ids=["input", "weight", "gradient"])
@pytest.mark.parametrize("label", KERNELS)
def test_what_is_not_finite_spreads_as_with_torchao(
    label: str, operand: int, bad: float, emulated_scaled_mm: None
):
    tensors = operands("random")
    tensors[operand][5, 7] = bad
    x, w, g = tensors
    ours = passes(linear(w, label), x, g)
    torchaos = passes(linear(w, torchao_label(label), "cuda"), x, g)
    assert not all(tensor.isfinite().all() for tensor in ours)
    for our_tensor, torchaos_tensor in zip(ours, torchaos, strict=True):
        assert torch.equal(our_tensor.isfinite(), torchaos_tensor.isfinite())


@pytest.mark.parametrize(
    "label, nbytes", [("tensorwise", 2), ("tensorwise+kernels", 1), ("tensorwise_gw_hp+kernels", 2)]
)
def test_one_byte_a_value_is_kept_for_the_backward_pass(
    label: str, nbytes: int, emulated_scaled_mm: None
):
    """One Linear, eager: BF16 keeps x, 2 bytes a value, as torchao does; ours the FP8 transpose, 1;
    scales aside."""
    x, w, _ = operands("random")
    holder = linear(w, label, "cuda")
    storages: dict[int, int] = {}  # address -> bytes

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        holder(x.clone().requires_grad_())
    for tensor in (*holder.parameters(), *holder.buffers()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    scales = sum(storages.values()) - nbytes * x.numel()
    assert 0 <= scales <= 16


# ---------------------------------------------------------------------------- copies of the weights


def step(model: GPT, x: torch.Tensor, y: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Loss a token and gradients of one step, from none."""
    zero_gradients(model)
    loss = model(x, y).sum()
    (loss / 128).backward()
    return loss.item() / y.numel(), [p.grad.clone() for p in model.parameters()]


LABELS = ["off", "tensorwise+kernels"]


@pytest.fixture(params=LABELS)
def label(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ours(tiny: Config, label: str) -> GPT:
    """A model of one block on our kernels, its head too, with lasting copies of its weights."""
    config = replace(
        tiny,
        model=GPTConfig(**{**SIZE, "n_layer": 1}),
        fp8=replace(from_label(label), head=label != "off"),
    )
    model = parallel.build(config, ALONE).model
    model.init_weights(0)
    refresh_weight_copies(model)
    return model


@pytest.fixture
def plain(label: str) -> GPT:
    """The same model, which casts at each use."""
    return without_copies(build(label, head=label != "off", n_layer=1)[0])


def update(model: GPT) -> None:
    # a fused AdamW needs runtime/optim.py's hook for the versions of weights
    torch.optim.SGD(model.parameters(), 0.5).step()


def copies(model: GPT) -> list[torch.Tensor]:
    """All buffers that hold a weight's copy or its scale."""
    buffers = []
    for module in model.modules():
        named = module.named_buffers(recurse=False)
        buffers += [tensor for name, tensor in named if name in ("q", "qt", "scale")]
    return buffers


def test_with_lasting_copies_every_bit_stays_over_an_update(ours: GPT, plain: GPT):
    for _ in range(2):
        loss, gradients = step(ours, *tokens())
        expected_loss, expected_gradients = step(plain, *tokens())
        assert loss == expected_loss
        assert all(map(torch.equal, gradients, expected_gradients))
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        update(ours)
        update(plain)
        refresh_weight_copies(ours)


def test_copies_are_renewed_in_place(ours: GPT, label: str):
    """A copy of each of 5 Linears; in FP8 its transpose and scale too."""
    step(ours, *tokens())
    earlier = copies(ours)
    assert len(earlier) == (5 if label == "off" else 15)
    update(ours)
    refresh_weight_copies(ours)
    assert [id(tensor) for tensor in copies(ours)] == [id(tensor) for tensor in earlier]


def test_an_update_without_a_refresh_is_an_error(ours: GPT):
    step(ours, *tokens())
    update(ours)
    with pytest.raises(AssertionError, match="after_update"):
        ours(*tokens())


def test_no_checkpoint_holds_a_copy(ours: GPT, plain: GPT):
    assert ours.state_dict().keys() == plain.state_dict().keys()
