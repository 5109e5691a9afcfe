import warnings

import pytest
import torch

from model import GPT, GPTConfig, Linear
from runtime import fp8
from runtime.config import ConfigError, FP8Config

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_ffn": 96, "n_ctx": 32, "vocab_size": 257}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def build(recipe="off", seed=0, **changes):
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**SIZE, **changes}))
    layers = fp8.convert(model, FP8Config(recipe=recipe))
    model.to_empty(device="cpu")
    model.init_weights(seed)
    return model, layers


def tokens(seed=0, B=4, T=32):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(257, (B, T + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_names_shapes_dtypes_and_initial_values_are_those_of_the_bf16_model(recipe):
    plain, converted = build()[0], build(recipe)[0]
    a, b = plain.state_dict(), converted.state_dict()
    assert list(a) == list(b)
    assert all(a[k].dtype == b[k].dtype == torch.float32 and torch.equal(a[k], b[k]) for k in a)
    plain.load_state_dict(b)        # and back: any checkpoint fits the plain model
    assert converted.head.weight is converted.wte.weight


def quantise(x, dtype, dim=None, power_of_2=False):
    """x rounded to float8 under one scale (dim None) or one a row along `dim`, back in fp64: an independent reference."""
    x = x.double()
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / amax.clamp(min=1e-12)).float().double()
    if dim is not None or power_of_2:       # torchao rounds the rowwise recipes' scales down to powers of two
        scale = 2.0 ** scale.log2().floor()
    return (x * scale).float().to(dtype).double() / scale


def reference(recipe, x, w, g):
    """Output, input gradient, weight gradient of y = x w' in fp64 from explicitly quantised operands.

    x (M, K), w (N, K), g (M, N). Which operand is scaled along which axis: the axis that its matmul sums over.
    """
    if recipe == "tensorwise":
        qx, qw, qg = quantise(x, E4M3), quantise(w, E4M3), quantise(g, E5M2)
        return qx @ qw.T, qg @ qw, qg.T @ qx
    y, qg = quantise(x, E4M3, 1) @ quantise(w, E4M3, 1).T, quantise(g, E4M3, 1)
    if recipe == "rowwise":
        return y, qg @ quantise(w, E4M3, 0), quantise(g.T, E4M3, 1) @ quantise(x, E4M3, 0)
    return y, qg @ quantise(w, E4M3, power_of_2=True), g.double().T @ x.double()    # the weight there has one scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_matmuls_are_those_of_explicit_quantisation(recipe):
    torch.manual_seed(0)
    linear = Linear(64, 96)
    torch.nn.init.normal_(linear.weight, std=0.05)
    holder = torch.nn.Sequential(linear)
    fp8.convert(holder, FP8Config(recipe=recipe))
    x = (torch.randn(32, 64) * torch.logspace(-2, 1, 32)[:, None]).bfloat16().requires_grad_()
    g = (torch.randn(32, 96) * torch.logspace(1, -2, 96)).bfloat16()
    y = holder(x)
    y.backward(g)
    for got, want in zip((y, x.grad, linear.weight.grad), reference(recipe, x.detach(), linear.weight.detach(), g), strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error < 4e-3, f"relative error {error:.2e}: only BF16 rounding of the result is allowed"


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_near_bf16_and_not_equal(recipe):
    x, y = tokens()
    bf16, quantised = (build(r)[0](x, y).sum() / y.numel() for r in ("off", recipe))
    assert bf16 != quantised, "training in BF16 under an FP8 name"
    assert abs(bf16 - quantised) / bf16 < 2.5e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_parameter_gets_a_finite_fp32_gradient(recipe):
    model, _ = build(recipe)
    model(*tokens()).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 0, name


def test_compiled_equals_eager(monkeypatch):
    """The un-emulated CPU float8 path through Inductor; one recipe, because compiling is the slow part of the suite.

    Fused kernels keep fp32 where eager ones round to BF16 in between, and a value at the edge of a float8 step then falls
    to the other side: 10 % of a gradient at this size, as much as FP8 differs from BF16. With those roundings kept, both
    must agree closely.
    """
    monkeypatch.setattr("torch._inductor.config.emulate_precision_casts", True)
    eager, compiled = build("tensorwise", n_layer=1)[0], build("tensorwise", n_layer=1)[0]
    compiled.compile(dynamic=False, fullgraph=True)
    x, y = tokens()
    losses = [m(x, y).sum() for m in (eager, compiled)]
    for loss in losses:
        (loss / y.numel()).backward()
    assert abs(losses[0] - losses[1]) / losses[0] < 1e-6
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert (a.grad - b.grad).norm() / a.grad.norm() < 2e-3, name
    with fp8.in_bf16(compiled), torch.no_grad():
        plain, _ = build(n_layer=1)
        assert torch.equal(compiled(x, y), plain(x, y)), "in_bf16 must leave the compiled FP8 graph"


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_bf16_is_exactly_the_plain_model_and_ends(recipe):
    model, (x, y) = build(recipe)[0], tokens()
    with torch.no_grad():
        before = model(x, y)
        with fp8.in_bf16(model):
            assert torch.equal(model(x, y), build()[0](x, y))
        assert torch.equal(model(x, y), before)
    with pytest.raises(RuntimeError, match="inside"), fp8.in_bf16(model):
        raise RuntimeError("inside")
    assert sum(fp8._is_float8_linear(m) for m in model.modules()) == 8


def verdicts(config, **changes):
    with torch.device("meta"):
        return fp8.select(GPT(GPTConfig(**{**SIZE, **changes})), config)


@pytest.mark.parametrize("config, kept", [
    (FP8Config(recipe="tensorwise"), {"head"}),
    (FP8Config(recipe="tensorwise", head=True), set()),
    (FP8Config(recipe="tensorwise", skip=("layers.0.*",)),
     {"head", "layers.0.attn.qkv", "layers.0.attn.out", "layers.0.mlp.gate_up", "layers.0.mlp.down"}),
    (FP8Config(recipe="tensorwise", skip=("attn.out",)), {"head", "layers.0.attn.out", "layers.1.attn.out"}),
    (FP8Config(recipe="tensorwise", skip=("layers.1.mlp.down", "head"), head=True), {"head", "layers.1.mlp.down"}),
])
def test_selection_by_name(config, kept):
    assert {layer.name for layer in verdicts(config) if layer.reason is not None} == kept


def test_a_converted_tied_head_stays_tied():
    with torch.device("meta"):
        model = GPT(GPTConfig(**SIZE))
    fp8.convert(model, FP8Config(recipe="tensorwise", head=True))
    model.to_empty(device="cpu")
    model.init_weights(0)
    assert fp8._is_float8_linear(model.head)
    assert model.head.weight is model.wte.weight
    model(*tokens()).sum().backward()


@pytest.mark.parametrize("config, changes, sentence", [
    (FP8Config(recipe="tensorwise", skip=("output",)), {},
     "fp8.skip='output' matches no Linear; there are: layers.*.attn.qkv, layers.*.attn.out, layers.*.mlp.gate_up, "
     "layers.*.mlp.down, head"),
    (FP8Config(recipe="rowwise"), {"n_ffn": 100},
     "fp8.recipe=rowwise cannot convert layers.0.mlp.gate_up of 64 x 200: FP8 matmuls need multiples of 16; change the "
     "model's width or add fp8.skip=layers.0.mlp.gate_up"),
    (FP8Config(recipe="tensorwise", skip=("layers.*",)), {},
     "fp8.recipe=tensorwise is left with nothing to convert: fp8.skip takes every Linear; skip fewer or set fp8.recipe=off"),
])
def test_refusals(config, changes, sentence):
    with pytest.raises(ConfigError) as error:
        verdicts(config, **changes)
    assert str(error.value) == sentence


@pytest.mark.parametrize("recipe, capability, gpu, runs", [
    ("tensorwise", (9, 0), "NVIDIA H100 80GB HBM3", True), ("tensorwise", (8, 9), "NVIDIA L40S", True),
    ("tensorwise", (8, 0), "NVIDIA A100-SXM4-80GB", False), ("rowwise", (8, 9), "NVIDIA L40S", False),
    ("rowwise_with_gw_hp", (10, 0), "NVIDIA B200", True)])
def test_hardware_without_fp8_is_refused(recipe, capability, gpu, runs):
    if runs:
        return fp8.refuse_below(recipe, capability, gpu)
    with pytest.raises(ConfigError, match=f"fp8.recipe={recipe} needs a GPU of compute capability .*, but {gpu} has "):
        fp8.refuse_below(recipe, capability, gpu)
    return None


def test_the_table_counts_what_the_modules_hold():
    model, layers = build("tensorwise")
    lines = fp8.table(layers, "tensorwise", "cpu")
    assert lines[0] == "fp8: layers.*.attn.qkv        64 x 192    x2   -> tensorwise"
    assert "head" in lines[4] and lines[4].endswith("kept BF16: head (fp8.head=false)")
    blocks = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.ndim == 2)
    share = blocks / (blocks + model.head.weight.numel())
    assert lines[5] == f"fp8: 8 of 9 Linears, {share:.1%} of the matmul parameters, in FP8"
    assert "slower than BF16" in lines[6]


def test_bf16_runs_never_import_torchao():
    import subprocess
    import sys
    code = ("import sys, torch; from model import GPT, GPTConfig; from runtime import fp8; from runtime.config import FP8Config\n"
            f"fp8.convert(GPT(GPTConfig(**{SIZE})), FP8Config()); assert 'torchao' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nan_input_spreads_and_zero_input_does_not():
    """Why the guard looks before the update: one NaN in a tensorwise operand makes every output NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = build("tensorwise")
    x, y = tokens()
    with torch.no_grad():
        model.wte.weight.zero_()
        assert model(x, y).isfinite().all()
        model.wte.weight[x[0, 0]] = float("nan")
        assert model(x, y).isnan().all()
