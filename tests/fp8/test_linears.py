"""Which Linears run in FP8, what auto chooses, and that each recipe computes what fp64 arithmetic,
torchao and torch's own matmul say. On our own kernels: tests/fp8/test_kernels.py; on several ranks:
tests/runtime/test_parallel.py."""

import contextlib
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F

from fp8 import linears, selection
from fp8.convert import convert
from fp8.copies import refresh_weight_copies
from fp8.delayed import DelayedScales
from fp8.head_loss import FP8Head
from fp8.linears import set_position, torchao_blockwise, torchao_mx
from fp8.precision import in_bf16
from fp8.recipes import RECIPES, Operand, by_name, multiple_of
from fp8.rounding import fake_quantise, noise_at, rotated
from lib.errors import UserError
from model import GPT, GPTConfig, Linear, RMSNorm
from runtime import parallel
from runtime.config import FP8Config

# what a GPU multiplies itself, here or on Blackwell
NATIVE = [
    recipe.name
    for recipe in RECIPES.values()
    if recipe.on_gpu in ("torchao", "matmul") or recipe.name == "mxfp8"
]
KERNELS = [f"{recipe.name}+kernels" for recipe in RECIPES.values() if recipe.has_kernels]
SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_ffn": 96, "n_ctx": 32, "vocab_size": 257}
E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, "e2m1"
LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}
NAMES = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
KINDS = ["random", "opposed", "heavy", "zero", "outlier"]
GPU = "NVIDIA H100 80GB HBM3"


def build(
    label="off",
    device_type="cpu",
    head=False,
    dtype=torch.bfloat16,
    loss_scale=1.0,
    seed=0,
    **changes,
):
    """A GPT on the CPU, converted to a recipe, with "+kernels" on our kernels; (model,
    verdicts)."""
    model = GPT.on_meta(GPTConfig(**{**SIZE, **changes}), dtype)
    layers = convert(model, replace(by_name(label), head=head), loss_scale, device_type)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    refresh_weight_copies(model)
    return model, layers


def tokens(seed=0, B=4, T=32):
    ids = torch.randint(257, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:].contiguous()


def linear(w, label, device_type="cpu", loss_scale=1.0):
    """A Linear with weight w, converted; the Sequential that holds it."""
    module = Linear(w.shape[1], w.shape[0])
    module.weight.data.copy_(w)
    holder = torch.nn.Sequential(module)
    convert(holder, by_name(label), loss_scale, device_type)
    refresh_weight_copies(holder)
    return holder


def passes(holder, x, g):
    """Output, input gradient, weight gradient."""
    leaf = x.clone().requires_grad_()
    y = holder(leaf)
    y.backward(g)
    return y.detach(), leaf.grad, holder[0].weight.grad


def distance(a, b):
    """||a - b|| / ||b||, 0 for equal zeros."""
    size = b.double().norm()
    return ((a.double() - b.double()).norm() / (size if size else 1)).item()


def operands(kind, M=32, K=64, N=96):
    torch.manual_seed(0)
    x, g, w = torch.randn(M, K), torch.randn(M, N), 0.05 * torch.randn(N, K)
    # what is small in one operand is large in the other: a scale along the wrong dimension shows
    if kind == "opposed":
        rows, columns = torch.logspace(-3, 3, M)[:, None], torch.logspace(-3, 3, N)
        x, w, g = x * rows, w * columns[:, None], g / rows / columns
    elif kind == "heavy":  # Cauchy: a few values hold most of the norm
        x, g = (torch.tan(1.5 * torch.rand(t.shape) * torch.sign(t)) for t in (x, g))
    elif kind == "zero":
        x, g = torch.zeros_like(x), torch.zeros_like(g)
    elif kind == "outlier":  # beyond E4M3's range without a scale
        x[3, 5], g[7, 11], w[2, 9] = 3e4, 5e3, 20.0
    return x.bfloat16(), w, g.bfloat16()


# ------------------------------------------------------------------------ one Linear, against fp64


def rounded(x, format, noise=None):
    """From the formats' definition, not by torch's casts: mantissa bits, least exponent, largest
    value."""
    (bits, lowest), largest = {E4M3: (3, -6), E5M2: (2, -14), E2M1: (1, 0)}[format], LARGEST[format]
    x = x.clamp(-largest, largest)
    step = 2.0 ** (torch.floor(torch.log2(x.abs().clamp(min=1e-300))).clamp(min=lowest) - bits)
    if noise is not None:  # up with the probability that makes the mean exact
        return (torch.floor(x / step) + (noise < x / step - torch.floor(x / step))) * step
    # torch.round: half to even, as the formats do
    return (torch.round(x / step) * step).clamp(-largest, largest)


def quantised(x, operand, dim, noise=None):
    """x (M, N) rounded as (format, scaling) says and dequantised, in fp64, and its scales; `dim` is
    what the matmul sums over.

    scaling: "tensor" for one scale, "power" for one that is a power of two, "row" for one each, a
    tile (along the dimension that stays, that is summed over), a number: the exponent of a constant
    scale. torchao rounds rows' scales down to powers of two."""
    format, scaling = operand
    if format is None:
        return x.double(), None
    if isinstance(scaling, tuple):
        if dim == 0:
            q, scale = quantised(x.t(), operand, 1, noise if noise is None else noise.t())
            return q.t(), scale
        tiles = x.float().unflatten(1, (-1, scaling[1])).unflatten(0, (-1, scaling[0]))
        amax = tiles.abs().amax((1, 3), keepdim=True).double()
        if scaling == (1, 32):  # MX: powers of two by which nothing saturates
            scale = 2.0 ** -torch.ceil(torch.log2(amax / LARGEST[format])).clamp(min=-127)
        elif format is E2M1:
            # NVFP4: tiles' scales are E4M3 numbers, for which the tensor has an fp32 scale
            whole = (448 / (amax.max() / 6).clamp(min=1e-12)).float()
            scale = (
                whole / rounded((amax.float() / 6 * whole).double(), E4M3).clamp(min=2**-9).float()
            )
        else:
            scale = LARGEST[format] / amax.clamp(min=1e-12)
        scale = scale.float().expand_as(tiles).reshape(x.shape)
        return (
            rounded((x.float() * scale).double(), format, noise) / scale.double(),
            scale[:, :: scaling[1]].double(),
        )
    if isinstance(scaling, int):
        scale = torch.tensor([[2.0**scaling]])
    else:
        amax = (
            x.double().abs().amax(dim, keepdim=True)
            if scaling == "row"
            else x.double().abs().max().view(1, 1)
        )
        scale = (LARGEST[format] / amax.clamp(min=1e-12)).float()
        scale = scale if scaling == "tensor" else 2.0 ** scale.log2().floor()
    return rounded((x.float() * scale).double(), format) / scale.double(), scale.double()


# How y = x w' rounds its input and weight, the input gradient g w its gradient and weight, the
# weight gradient g' x both.
TENSOR, POWER, ROW, MX, BF16 = (
    (E4M3, "tensor"),
    (E4M3, "power"),
    (E4M3, "row"),
    (E4M3, (1, 32)),
    (None, None),
)
MX_GRAD = (E5M2, (1, 32))
ROW_128, SQUARE_128, ROW_128_GRAD = (E4M3, (1, 128)), (E4M3, (128, 128)), (E5M2, (1, 128))
ROW_16, SQUARE_16 = (E2M1, (1, 16)), (E2M1, (16, 16))
OPERANDS = {
    "tensorwise": (TENSOR, TENSOR, (E5M2, "tensor"), TENSOR, (E5M2, "tensor"), TENSOR),
    "tensorwise_gw_hp": (TENSOR, TENSOR, (E5M2, "tensor"), TENSOR, BF16, BF16),
    "tensorwise_gi_hp": (TENSOR, TENSOR, BF16, BF16, (E5M2, "tensor"), TENSOR),
    "rowwise": (ROW,) * 6,
    "rowwise_with_gw_hp": (ROW, ROW, ROW, POWER, BF16, BF16),
    "amax": (POWER, POWER, (E5M2, "power"), POWER, (E5M2, "power"), POWER),
    "cscale": ((E4M3, 0), (E4M3, 6), (E5M2, 8), (E4M3, 6), (E5M2, 8), (E4M3, 0)),
    "mxfp8": (MX,) * 6,
    "mxfp8_e5m2": (MX, MX, MX_GRAD, MX, MX_GRAD, MX),
    "blockwise": (ROW_128, SQUARE_128, ROW_128, SQUARE_128, ROW_128, ROW_128),
    "blockwise_e5m2": (ROW_128, SQUARE_128, ROW_128_GRAD, SQUARE_128, ROW_128_GRAD, ROW_128),
    **dict.fromkeys(
        ("nvfp4", "nvfp4_nearest", "nvfp4_hadamard"),
        (ROW_16, SQUARE_16, ROW_16, SQUARE_16, ROW_16, ROW_16),
    ),
}


def reference(recipe, x, w, g, noise=(None, None), turned=lambda t: t):
    """Output, input gradient, weight gradient of y = x w' in fp64 from explicitly quantised x (M,
    K), w (N, K), g (M, N).

    noise: of g's roundings for the two gradients; turned: what the operands of the weight gradient
    go through before."""
    (x_, w_, g_, w_again, g_again, x_again), q = OPERANDS[recipe], lambda *of: quantised(*of)[0]
    return (
        q(x, x_, 1) @ q(w, w_, 1).T,
        q(g, g_, 1, noise[0]) @ q(w, w_again, 0),
        q(turned(g), g_again, 0, noise[1]).T @ q(turned(x), x_again, 0),
    )


@pytest.mark.parametrize("label", [*RECIPES, *KERNELS])
def test_the_three_matmuls_are_those_of_explicit_quantisation(label):
    """Up to the rounding of the result: to BF16, or fp32 for FP8 weight gradients of our kernels. A
    mean loss over 2**12 tokens has gradients 2**12 smaller, of the same float8 values.
    fake_quantise, which probes measure with, rounds alike."""
    recipe, loss_scale = by_name(label).recipe, 2.0**-12
    r, q = RECIPES[recipe], fake_quantise
    x_again, g_again = 2 * [Operand(None)] if r.has_bf16_weight_grad else (r.input, r.grad)
    g_first, w_again = (
        2 * [Operand(None)] if r.has_bf16_input_grad else (r.grad, r.weight_again or r.weight)
    )
    turned = rotated if r.is_rotated else lambda t: t
    for kind in KINDS:
        x, w, g = operands(kind, *((256, 384, 128) if multiple_of(recipe) == 128 else ()))
        holder, noise = linear(w, label, loss_scale=loss_scale), (None, None)
        set_position(holder, 1000)
        if r.grad.is_stochastic:
            noise = [
                noise_at(g.shape, torch.tensor(1000), holder[0].salt + more) for more in (0, 2**60)
            ]
        want, (y, *grads) = (
            reference(recipe, x, w, g, noise, turned),
            passes(holder, x, g * loss_scale),
        )
        got = y, *(grad / loss_scale for grad in grads)
        assert all(d < 4e-3 for d in map(distance, got, want)), kind  # not max(): it can lose a NaN
        if label in ("tensorwise+kernels", "amax+kernels"):
            assert distance(got[2], want[2]) < 1e-5, kind
        fake = (
            q(x, r.input).double() @ q(w, r.weight).double().T,
            q(g, g_first, noise=noise[0]).double() @ q(w, w_again, 0).double(),
            q(turned(g), g_again, 0, noise[1]).double().T @ q(turned(x), x_again, 0).double(),
        )
        assert all(d < 1e-6 for d in map(distance, fake, want)), kind


@pytest.mark.parametrize("recipe", [r.name for r in RECIPES.values() if r.on_gpu == "torchao"])
@pytest.mark.parametrize("is_fast", [False, True])
def test_the_emulation_on_a_cpu_is_what_torchao_computes_on_a_gpu_where_backward_matmuls_accumulate_fast_if_asked(
    recipe, is_fast, emulated_scaled_mm, monkeypatch
):
    """Same scales, same float8 values, same roundings of the result; only sums may be taken in
    another order."""
    label, fast, multiply = recipe + "+fast_backward" * is_fast, [], torch._scaled_mm
    monkeypatch.setattr(
        torch,
        "_scaled_mm",
        lambda *a, **how: fast.append(how["use_fast_accum"]) or multiply(*a, **how),
    )
    for kind in KINDS:
        x, w, g = operands(kind)
        ours, theirs = linear(w, label), linear(w, label, "cuda")
        assert [type(holder[0]).__name__ for holder in (ours, theirs)] == [
            "EmulatedLinear",
            "Float8Linear",
        ]
        for mine, their in zip(passes(ours, x, g), passes(theirs, x, g), strict=True):
            # another order of sums may tip a rounding to BF16
            assert (mine != their).float().mean() < 0.01 and distance(mine, their) <= 1e-3, kind
    assert fast == len(KINDS) * [True, *[is_fast] * (1 if recipe.endswith("gw_hp") else 2)]


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test_the_emulation_is_what_torchaos_prototypes_compute(recipe, monkeypatch):
    """mxfp8, of weights in BF16, by torchao's own emulation; blockwise with its references in the
    place of its GPU kernels."""
    from torchao.prototype.blockwise_fp8_training import kernels
    from torchao.prototype.blockwise_fp8_training import linear as blockwise
    from torchao.prototype.moe_training import mxfp8_linear as mx

    rows, squares = (
        kernels.torch_blockwise_scale_act_quant_lhs,
        kernels.torch_blockwise_scale_weight_quant,
    )
    in_mx, prototype = (
        mx._to_mxfp8_then_scaled_mm,
        {"mxfp8": torchao_mx, "blockwise": torchao_blockwise}[recipe],
    )

    def multiply(mat_a, mat_b, scale_a, scale_b, out_dtype, triton_scale_b=None, **_):
        a, b = (
            q.float() * F.interpolate(scale[None, None], q.shape)[0, 0]
            for q, scale in (
                (mat_a, scale_a),
                (mat_b, scale_b if triton_scale_b is None else triton_scale_b),
            )
        )
        return (a @ b).to(out_dtype)

    for name, quantise in {
        "act_quant_lhs": rows,
        "act_quant_rhs": kernels.torch_blockwise_scale_act_quant_rhs,
        "act_quant_transposed_lhs": lambda x, _: rows(x.t().contiguous()),
        "weight_quant_rhs": lambda w, block_size: squares(w),
        "weight_quant_transposed_rhs": lambda w, block_size: [t.t() for t in squares(w)],
    }.items():
        monkeypatch.setattr(blockwise, f"triton_fp8_blockwise_{name}", quantise)
    monkeypatch.setattr(blockwise, "_run_blockwise_mm", multiply)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(
        mx,
        "_to_mxfp8_then_scaled_mm",
        lambda x, w, _, mode: in_mx(x, w, mx.KernelPreference.EMULATED, mode),
    )
    for kind in KINDS:
        x, w, g = operands(kind, 256, 384, 128)
        ours, theirs = linear(w.bfloat16() if recipe == "mxfp8" else w, recipe), linear(w, recipe)
        theirs[0].forward = partial(prototype, w=theirs[0].weight)
        # sums in another order
        assert all(d < 1e-3 for d in map(distance, passes(ours, x, g), passes(theirs, x, g))), kind


@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_rounding_is_torchs_cast(format):
    """All of BF16, all midpoints of the format's values, random bits: the same as a cast to float8
    and back, bit for bit."""
    grid = torch.arange(256, dtype=torch.uint8).view(format).float()
    values = torch.cat(
        (
            torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float(),
            ((grid[:, None] + grid) / 2).flatten(),
            torch.randint(-(2**31), 2**31, (10**6,)).int().view(torch.float32),
            torch.randn(10**6) * torch.logspace(-9, 6, 10**6),
        )
    )
    largest = torch.finfo(format).max
    want, got = (
        values.clamp(-largest, largest).to(format).float(),
        fake_quantise(values, Operand(format, "constant")),
    )
    assert torch.equal(want.isnan(), got.isnan()) and torch.equal(
        want[~want.isnan()], got[~want.isnan()]
    )


@pytest.mark.parametrize(
    "field", [f.name for f in fields(FP8Config) if f.name not in ("recipe", "all_gather")]
)
def test_a_label_tells_every_setting_that_numbers_depend_on(field):
    values = {bool: True, int: 2, tuple: ("attn.out", "layers.[01].*"), str: "delayed"}
    value = True if field == "kernels" else values[type(getattr(FP8Config(), field))]
    config = FP8Config(recipe="tensorwise", **{field: value})
    assert (
        by_name(config.label) == config != FP8Config(recipe="tensorwise") == by_name("tensorwise")
    )


# -------------------------------------------------------------------------- what nvfp4 has besides


def test_the_rotation_is_orthogonal_and_so_keeps_products_and_spreads_outliers():
    torch.manual_seed(1)
    g = torch.randn(64, 8)
    g[20] = 1000.0
    mix = rotated(torch.eye(64)).double()
    assert torch.allclose(mix @ mix.t(), torch.eye(64).double(), atol=1e-6)
    assert torch.allclose(rotated(g).double(), mix @ g.double(), rtol=1e-5, atol=1e-4)
    assert rotated(torch.ones(64, 1)).abs().max() < 3, "random signs: no constant becomes one value"
    assert rotated(g).abs().max() < 260, "one token of 1,000 is 16 of 250"


def test_the_noise_of_stochastic_rounding_is_uniform_and_of_each_token_layer_and_seed():
    noise = noise_at((4096, 64), torch.tensor(0), 5)
    exact = fake_quantise(
        torch.tensor([[6.0, 3, 1, 0.5, -6, -3, 0, 2] * 2]),
        RECIPES["nvfp4"].grad,
        noise=torch.full((1, 16), 1 - 2**-24),
    )
    assert exact.tolist() == [[6.0, 3, 1, 0.5, -6, -3, 0, 2] * 2], (
        "what the format holds stays, whatever the noise"
    )
    assert (
        noise.min() >= 0
        and noise.max() < 1
        and abs(noise.std() - 12**-0.5) < 2e-3
        and abs(noise.mean() - 0.5) < 2e-3
    )
    assert abs(np.corrcoef(noise[1:].flatten(), noise[:-1].flatten())[0, 1]) < 0.01
    assert torch.equal(noise[100:200], noise_at((100, 64), torch.tensor(100), 5)), (
        "a token keeps its noise in any batch"
    )
    assert not torch.equal(noise[:100], noise_at((100, 64), torch.tensor(0), 6)), (
        "each salt has its own"
    )
    models = [build("nvfp4")[0] for _ in range(2)]
    for seed, model in enumerate(models):
        set_position(model, 0, seed)
    assert (
        len({m.salt.item() for model in models for m in model.modules() if hasattr(m, "salt")})
        == 16
    ), "of layer and seed"


def test_layers_of_nvfp4_share_a_compiled_graph_though_each_has_noise_of_its_own_at_every_position():
    """Were each compiled anew, for a number of its own, torch would give up at eight blocks. What
    positions a run gives, and goes on with: tests/runtime/test_parallel.py."""
    x, w, g = operands("random")
    eager, compiled = (torch.nn.ModuleList(linear(w, "nvfp4") for _ in range(2)) for _ in range(2))
    for layer in compiled:
        layer.compile(dynamic=False, fullgraph=True)
    gradients = []
    for i, position, stance in (
        (0, 0, "default"),
        (1, 0, "fail_on_recompile"),
        (1, 4096, "fail_on_recompile"),
    ):
        for layers in eager, compiled:
            set_position(layers, position)
            layers.zero_grad()
        with torch.compiler.set_stance(stance), inductor.patch(emulate_precision_casts=True):
            got = passes(compiled[i], x, g)
        assert all(d < 2e-3 for d in map(distance, got, passes(eager[i], x, g)))
        gradients.append(got[1])
    assert not any(map(torch.equal, gradients, gradients[1:]))


# ------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("label", NATIVE + KERNELS)
def test_a_model_trains_near_bf16_in_bf16_it_is_the_plain_model_and_its_checkpoints_are_plain(
    label, monkeypatch
):
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *_, **__: pytest.fail("torch._scaled_mm was called on a CPU")
    )
    (plain, _), (model, layers), (x, y) = build(), build(label, head=True), tokens()
    a, b = plain.state_dict(), model.state_dict()
    assert list(a) == list(b) and all(
        a[k].dtype == b[k].dtype == torch.float32 and torch.equal(a[k], b[k]) for k in a
    )
    assert model.head.weight is model.wte.weight and model.counts() == plain.counts()
    assert [(layer.recipe, layer.kernels) for layer in layers] == [
        (label.removesuffix("+kernels"), label in KERNELS)
    ] * 9
    losses, bf16 = model(x, y), plain(x, y)
    losses.sum().backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.any()
        for p in model.parameters()
    )
    assert bf16.sum() != losses.sum(), "training in BF16 under an FP8 name"
    assert abs(bf16.sum() - losses.sum()) / bf16.sum() < 2.5e-3
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="inside"), in_bf16(model):
            assert torch.equal(model(x, y), bf16)
            raise RuntimeError("inside")
        # with gradients our kernels compute the loss in one piece
        assert torch.allclose(model(x, y), losses, rtol=1e-5)


@pytest.mark.parametrize("label", ["tensorwise", "rowwise", "mxfp8", "tensorwise+kernels"])
def test_heads_wider_than_their_share_are_converted_whole_and_train_near_bf16(label):
    sizes = {"head_size": 64, "n_kv_head": 1}  # 128 channels of attention in a width of 64
    (plain, _), (model, layers), (x, y) = build(**sizes), build(label, **sizes), tokens()
    assert [layer.shape for layer in layers if "attn" in layer.name] == 2 * [(64, 256), (128, 64)]
    assert all(layer.recipe for layer in layers if layer.name != "head")
    bf16, losses = plain(x, y).sum(), model(x, y).sum()
    losses.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    assert 0 < abs(bf16 - losses) / bf16 < 2.5e-3


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
        self.linears = torch.nn.ModuleList(
            linear(w, label)
            for label in ("cscale", "rowwise_with_gw_hp", "mxfp8", "tensorwise+kernels+delayed")
        )
        self.kernels = linear(w[:64], "tensorwise+kernels")
        (plain,) = linear(4 * w, "off")
        self.head = FP8Head(plain, RECIPES["tensorwise"], is_delayed=True)
        self.scales = DelayedScales(self)

    def forward(self, x):
        x = self.norm(x)
        return *(holder(x) for holder in self.linears), self.token_losses(
            self.kernels(x), torch.arange(len(x))
        )


def test_compiled_equals_eager_also_when_weights_and_delayed_scales_have_changed_without_compiling_anew(
    monkeypatch,
):
    """One graph, forward and backward, emulated in fp32: behind BF16 matmuls Inductor adds the
    norm's gradients in another order (on BF16 units: tests/fp8/test_emulation.py). Fused kernels
    keep fp32 where eager ones round to BF16 in between, and a value at the edge of a float8 step
    then falls to the other side: with those roundings kept, both must agree closely."""
    monkeypatch.setattr(linears, "has_bf16_units", lambda: False)
    eager, compiled, (x, _, g) = Piece(), Piece(), operands("opposed")
    parallel.compile_model(compiled, is_whole=True)
    for factor, loss_scale, stance in (
        (1.0, 1 / 128, "default"),
        (-1.5, 1 / 100, "fail_on_recompile"),
    ):
        results = []
        for model in (eager, compiled):
            with torch.no_grad():
                model.kernels[0].weight.mul_(factor)
            refresh_weight_copies(model)
            model.zero_grad()
            model.scales.begin(loss_scale)
            leaf = x.clone().requires_grad_()
            # Not monkeypatch, whose undoing hides the switch for good.
            with inductor.patch(emulate_precision_casts=True), torch.compiler.set_stance(stance):
                ys = model(leaf)
                torch.autograd.backward(ys, [g, g, g, g, torch.full((len(x),), 1 / 48)])
            results.append(
                [
                    model.scales.end(loss_scale),
                    *ys,
                    leaf.grad,
                    *(p.grad for p in model.parameters()),
                ]
            )
        distances = list(map(distance, *results))  # 1e-7 where both sum in the same order
        # before, Inductor adds a norm's gradients in another order
        most = 2e-3 if torch.__version__ >= "2.13" else 4e-3
        assert all(d < most for d in distances[:-2]) and all(d < 1e-2 for d in distances[-2:]), (
            distances
        )
        seen, due = compiled.scales.state(), eager.scales.state()
        assert seen.keys() == due.keys() == {"linears.3.0.x", "linears.3.0.g", "head.x"}, (
            "the head's gradient has a bound"
        )
        assert all(
            seen[name] == pytest.approx(due[name], rel=most) and due[name][0] > 0 for name in due
        )
    with in_bf16(compiled), torch.no_grad():
        for y in compiled(x)[:-1]:
            assert torch.equal(y, eager.norm(x) @ operands("random")[1].bfloat16().T), (
                "in_bf16 must leave the compiled graph"
            )


@pytest.mark.parametrize(
    "recipe, chosen, is_set",
    [
        ("rowwise", ["rowwise"], True),
        ("auto", ["tensorwise", "rowwise_with_gw_hp"], True),
        ("auto", ["tensorwise"], False),
    ],
)
def test_rowwise_by_whatever_name_keeps_its_roundings_on_cuda(
    tiny, monkeypatch, recipe, chosen, is_set
):
    """Otherwise a compiled rowwise Linear after an RMSNorm turns NaN (pytorch#150859)."""
    config = replace(
        tiny, fp8=FP8Config(recipe=recipe), parallel=replace(tiny.parallel, compile=True)
    )
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    with inductor.patch(emulate_precision_casts=False):
        lines = parallel.set_torch_flags(
            config, parallel.World(0, 0, 1, torch.device("cuda", 0)), chosen
        )
        assert (
            inductor.emulate_precision_casts
            is is_set
            is any("emulate_precision_casts" in line for line in lines)
        )


# --------------------------------------------------------------------------------------- selection


def verdicts(label, gpu=None, **changes):
    return selection.select(GPT.on_meta(GPTConfig(**{**SIZE, **changes})), by_name(label), gpu)


def blocks(*numbers):
    return {f"layers.{i}.{name}" for i in numbers for name in NAMES}


@pytest.mark.parametrize(
    "label, kept",
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
def test_selection_by_name(label, kept):
    assert {layer.name for layer in verdicts(label) if layer.recipe is None} == kept


@pytest.mark.parametrize(
    "label, changes, told",
    [
        ("tensorwise+skip=output", {}, r"fp8.skip='output' .*layers\.\*\.attn\.qkv"),
        ("rowwise", {"n_ffn": 100}, r"layers\.\*\.mlp\.gate_up of 64 x 200 .* multiples of 16"),
        ("mxfp8", {"n_ffn": 112}, r"layers\.\*\.mlp\.down of 112 x 64 .* multiples of 32"),
        ("rowwise", {"head_size": 20}, r"layers\.\*\.attn\.qkv of 64 x 120 .* multiples of 16"),
        ("tensorwise+skip=layers.*", {}, "nothing to convert"),
        ("rowwise+kernels", {}, "fp8.kernels=true .* fp8.recipe=rowwise"),
    ],
)
def test_refusals(label, changes, told):
    with pytest.raises(UserError, match=told):
        verdicts(label, **changes)


def test_auto_takes_per_layer_what_the_table_says_is_fastest_and_trains(
    monkeypatch, emulated_scaled_mm
):
    rows = (
        ("tensorwise", 64, 192, 1.2),
        ("tensorwise+kernels", 64, 192, 1.3),
        ("rowwise", 64, 192, 1.1),
        ("tensorwise", 64, 64, 0.8),
        ("rowwise_with_gw_hp", 96, 64, 1.3),
        ("tensorwise+kernels", 96, 64, 1.1),
        ("amax+kernels", 64, 64, 2.0),
    )  # amax was not made for speed
    timings = [{"recipe": recipe, "K": K, "N": N, "ratio": ratio} for recipe, K, N, ratio in rows]
    monkeypatch.setattr(
        selection, "load_table", lambda: {"measured": {"sm_90": [{"gpu": GPU, "rows": timings}]}}
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    for kernels in (False, True):
        layers = verdicts("auto" + "+kernels" * kernels, GPU)
        assert {
            layer.name.split(".", 2)[-1]: (layer.recipe, layer.kernels) for layer in layers
        } == {
            "attn.qkv": ("tensorwise", kernels),
            "mlp.gate_up": ("tensorwise", kernels),
            "attn.out": (None, False),
            "mlp.down": ("rowwise_with_gw_hp", False),
            "head": (None, False),
        }
        assert (
            "(kernels, measured 1.30x at 64 x 192)" in selection.table(layers, "auto", "cuda")[0]
        ) is kernels
    model, layers = build("auto", "cuda")
    assert {layer.recipe for layer in layers if layer.recipe} == {
        "tensorwise",
        "rowwise_with_gw_hp",
    }
    model(*tokens()).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_table_counts_what_the_modules_hold_and_says_where_nothing_is_fp8():
    model, layers = build("tensorwise")
    lines = selection.table(layers, "tensorwise", "cpu")
    assert lines[0] == "fp8: layers.*.attn.qkv        64 x 192    x2   -> tensorwise"
    assert "kept BF16: head" in lines[4] and "emulated" in lines[6]
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if "layers" in name and p.ndim == 2
    )
    assert f"8 of 9 Linears, {matrices / (matrices + model.head.weight.numel()):.1%} of" in lines[5]
    for gpu in (None, "NVIDIA A100-SXM4-80GB"):
        layers = verdicts("auto", gpu)
        assert (
            not any(layer.recipe for layer in layers)
            and "THIS RUN IS BF16" in selection.table(layers, "auto", "cpu")[-1]
        )


@pytest.mark.parametrize(
    "label, capability, needs",
    [
        ("tensorwise", (8, 9), None),
        ("rowwise_with_gw_hp", (10, 0), None),
        ("mxfp8", (8, 0), None),
        ("auto", (8, 0), None),
        ("tensorwise", (8, 0), "fp8.recipe=tensorwise .*8.9.* has 8.0"),
        ("rowwise", (8, 9), "fp8.recipe=rowwise .*9.0.* has 8.9"),
    ],
)
def test_hardware_that_cannot_run_the_recipe_is_refused(monkeypatch, label, capability, needs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    selection.check_hardware(by_name(label), torch.device("cpu"))
    with pytest.raises(UserError, match=needs) if needs else contextlib.nullcontext():
        selection.check_hardware(by_name(label), torch.device("cuda"))
