"""Blocks whose producers write FP8 (fp8.scaling=bounded), against the same blocks' own modules; the
bound of a norm's output. The kernels: fp8/test_producer_kernels.py."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor

from fp8 import producers
from fp8.convert import convert
from fp8.copies import refresh_weight_copies
from fp8.delayed import DelayedScales
from fp8.kernels import FP8KernelLinear
from fp8.precision import in_bf16
from fp8.producers import ProducerBlock, Residual
from fp8.recipes import E4M3, from_label
from lib.errors import UserError
from model import GPT, MLP, Attention, Block, GPTConfig, Linear, RMSNorm
from runtime import parallel
from runtime.config import Config, FP8Config
from tests.conftest import ALONE
from tests.helpers import faults
from tests.helpers.fp8_models import SIZE, build, distance, tokens

LABEL = "tensorwise+kernels+bounded"
BOUNDED = FP8Config(recipe="tensorwise", kernels=True, scaling="bounded")
LOSS_SCALE = 1 / 128


@dataclass
class Taken:
    """What a step has computed."""

    loss: float
    gradients: dict[str, torch.Tensor]
    history: dict[str, list[float]]  # of the delayed scales


def take(model: GPT, scales: DelayedScales, seed: int = 0) -> Taken:
    x, y = tokens(seed)
    model.zero_grad()
    scales.begin(LOSS_SCALE)
    loss = model(x, y).sum() * LOSS_SCALE
    loss.backward()
    scales.end(LOSS_SCALE)
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return Taken(loss.item(), gradients, scales.state())


def through_its_modules(model: GPT) -> GPT:
    """The same model, whose blocks run their own modules."""
    for block in model.blocks():
        block.is_fused = lambda: False
    return model


def fused(model: GPT) -> list[bool]:
    return [isinstance(block, ProducerBlock) for block in model.blocks()]


def assert_equal(taken: Taken, expected: Taken) -> None:
    assert taken.loss == expected.loss
    for name, gradient in expected.gradients.items():
        assert torch.equal(taken.gradients[name], gradient), name
    assert taken.history == expected.history


# ------------------------------------------------------------ the numerics are those of the modules


def test_a_mask_reaches_attention_as_it_does_the_modules():
    models = [build(LABEL)[0] for _ in range(2)]
    x, y = tokens(0)
    earlier = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
    same_half = torch.arange(x.size(1)) // (x.size(1) // 2)
    mask = earlier & (same_half[:, None] == same_half)
    losses = []
    for model in models[0], through_its_modules(models[1]):
        DelayedScales(model).begin(LOSS_SCALE)
        losses.append(model(x, y, mask=mask))
    assert torch.equal(*losses)
    assert not torch.equal(losses[0], models[0](x, y))


@pytest.mark.parametrize(
    "label, sizes",
    [
        (LABEL, {}),
        (LABEL, {"n_kv_head": 1}),
        (LABEL, {"head_size": 64, "n_kv_head": 1}),
        (LABEL, {"n_layer": 1}),
        ("amax+kernels+bounded", {}),
        (f"{LABEL}+head", {}),
    ],
)
def test_every_bit_is_that_of_the_blocks_modules(label: str, sizes: dict[str, int]):
    """Over several steps: delayed scales too are the same."""
    has_head = label.endswith("+head")
    models = [build(label.removesuffix("+head"), head=has_head, **sizes)[0] for _ in range(2)]
    assert all(fused(models[0]))
    model, plain = models[0], through_its_modules(models[1])
    scales, plain_scales = DelayedScales(model), DelayedScales(plain)
    for seed in range(3):
        assert_equal(take(model, scales, seed), take(plain, plain_scales, seed))


@pytest.mark.parametrize("skipped", ["layers.0.*", "layers.1.attn.out", "layers.2.mlp.down"])
def test_a_block_with_a_linear_in_bf16_stays_as_it_is_among_others(skipped: str):
    models = []
    for _ in range(2):
        model = GPT.on_meta(GPTConfig(**{**SIZE, "n_layer": 3}))
        convert(model, replace(BOUNDED, skip=(skipped,)))
        model.to_empty(device="cpu")
        model.init_weights(0)
        refresh_weight_copies(model)
        models.append(model)
    number = int(skipped.split(".")[1])
    assert fused(models[0]) == [n != number for n in range(3)]
    model, plain = models[0], through_its_modules(models[1])
    assert_equal(take(model, DelayedScales(model)), take(plain, DelayedScales(plain)))


def test_a_model_with_qk_norm_has_no_producers():
    """It stands between the QKV matmul and RoPE."""
    model, _ = build(LABEL, qk_norm=True)
    assert not any(fused(model))
    assert math.isfinite(take(model, DelayedScales(model)).loss)


def test_all_blocks_but_the_last_leave_the_residual_sum_to_the_next_norm():
    """Its kernel adds it up in the same pass."""
    model, _ = build(LABEL, n_layer=3)
    x = torch.zeros(2, 32, 64, dtype=torch.bfloat16)
    DelayedScales(model).begin(LOSS_SCALE)
    kinds = []
    for block in model.blocks():
        x = block(x, model.cos, model.sin)
        kinds.append(type(x))
    assert kinds == [Residual, Residual, torch.Tensor]


@pytest.mark.parametrize(
    "changes, line",
    [
        ({}, "fp8: 2 of 2 blocks write FP8 themselves"),
        ({"qk_norm": True}, "fp8: 0 of 2 blocks write FP8 themselves; not those with QK-norm"),
    ],
)
def test_the_start_says_how_many_blocks_write_fp8(
    tiny: Config, changes: dict[str, bool], line: str
):
    config = replace(tiny, model=GPTConfig(**{**SIZE, **changes}), fp8=BOUNDED)
    assert any(flag.startswith(line) for flag in parallel.build(config, ALONE).flags)


def test_names_of_weights_stay():
    (plain, _), (model, _) = build(), build(LABEL)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_other_scalings_have_no_producers():
    assert not any(fused(build("tensorwise+kernels+delayed")[0]))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that producers compute."""
    names = []
    for name in ("QKVPass", "OutPass", "MLPPass"):
        function = getattr(producers, name)
        apply = function.apply

        def noted(*arguments: object, name=name, apply=apply):
            names.append(name)
            return apply(*arguments)

        monkeypatch.setattr(function, "apply", noted)
    return names


def test_without_gradients_the_modules_compute(calls: list[str]):
    model, _ = build(LABEL)
    DelayedScales(model).begin(LOSS_SCALE)
    with torch.no_grad():
        model(*tokens())
    assert calls == []
    model(*tokens())
    assert calls == 2 * ["QKVPass", "OutPass", "MLPPass"]


def test_where_a_module_has_a_hook_it_runs(calls: list[str]):
    """A probe's, which sees each Linear's input."""
    model, _ = build(LABEL)
    DelayedScales(model).begin(LOSS_SCALE)
    seen = []
    linear = model.layers[0].mlp.down
    linear.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    model(*tokens())
    assert seen == [(4, 32, 96)]
    assert calls == ["QKVPass", "OutPass", "MLPPass"], "of the other block"


def test_a_block_that_runs_its_modules_gives_the_one_before_it_the_same_gradients():
    """With a hook: no kernel of its norm writes the gradient of the branch before."""
    models = [build(LABEL)[0] for _ in range(2)]
    model, plain = models[0], through_its_modules(models[1])
    model.layers[1].mlp.down.register_forward_pre_hook(lambda module, inputs: None)
    assert_equal(take(model, DelayedScales(model)), take(plain, DelayedScales(plain)))


def test_of_the_branches_gradients_only_the_last_is_read_once_more(monkeypatch):
    """Norms write the others. Beside it attention's output is read again, in each block."""
    calls = Counter()
    for name in ("norm_grad", "copy_both"):
        operator = getattr(producers, name)

        def noted(*arguments, name=name, operator=operator):
            calls[name] += 1
            return operator(*arguments)

        monkeypatch.setattr(producers, name, noted)
    model, _ = build(LABEL, n_layer=3)
    take(model, DelayedScales(model))
    assert calls == {"norm_grad": 5, "copy_both": 3 + 1}


def test_in_bf16_with_gradients_it_is_the_plain_model():
    (plain, _), (model, _) = build(), build(LABEL)
    with in_bf16(model):
        assert torch.equal(model(*tokens()), plain(*tokens()))


def test_recomputed_blocks_compute_the_same(tiny: Config):
    size = GPTConfig(**SIZE)
    losses = []
    for recompute in (False, True):
        settings = replace(tiny.parallel, recompute=recompute, compile=False)
        config = replace(tiny, model=size, fp8=BOUNDED, parallel=settings)
        model = parallel.build(config, ALONE).model
        model.init_weights(0)
        refresh_weight_copies(model)
        losses.append(take(model, DelayedScales(model)).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("is_whole", [True, False], ids=["model", "block by block"])
def test_a_compiled_model_computes_what_eager_does(is_whole):
    """One graph, or one a block, compiled once. BF16's roundings are kept between operations that
    are fused, or values at the edge of a float8 step would fall to the other side."""
    (eager, _), (compiled, _) = build(LABEL), build(LABEL)
    for module in [compiled] if is_whole else compiled.blocks():
        module.compile(dynamic=False, fullgraph=True)
    scales, eager_scales = DelayedScales(compiled), DelayedScales(eager)
    for seed, stance in ((0, "default"), (1, "fail_on_recompile")):
        # not monkeypatch, whose undoing hides the switch for good
        keeping = inductor.patch(emulate_precision_casts=True)
        with keeping, torch.compiler.set_stance(stance):
            taken = take(compiled, scales, seed)
        expected = take(eager, eager_scales, seed)
        assert taken.loss == pytest.approx(expected.loss, rel=1e-4)
        for name, gradient in expected.gradients.items():
            assert distance(taken.gradients[name], gradient) < 2e-2, name


# -------------------------------------------------------------------------------- scales of a bound


@pytest.mark.parametrize("C", [48, 64, 80])
@pytest.mark.parametrize("is_power_of_2", [False, True])
def test_no_output_of_a_norm_is_saturated(C: int, is_power_of_2: bool):
    """The worst case is a row of one value: sqrt(C) times the largest weight."""
    recipe = "amax" if is_power_of_2 else "tensorwise"
    model, _ = build(f"{recipe}+kernels+bounded", n_embd=C, n_head=1)
    norm, linear = model.layers[0].norm1, model.layers[0].attn.qkv
    for seed in range(20):
        weight = torch.randn(C, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (seed - 10)
        norm.weight.data = weight
        DelayedScales(model).begin(LOSS_SCALE)
        rows = torch.diag(torch.full((C,), 300.0)).bfloat16()
        largest = norm(rows).detach().float().abs().max() * linear.x_scale
        # 448 is the nearest value of E4M3 up to 464
        assert 448 / 2.02 < largest < 464


def test_a_bound_is_that_of_the_norm_before_a_linear():
    model, _ = build(LABEL, head=True)
    for factor, norm in enumerate(module for module in model.modules() if type(module) is RMSNorm):
        norm.weight.data.fill_(2.0**factor)
    DelayedScales(model).begin(LOSS_SCALE)
    expected = {"layers.0.attn.qkv": 1, "layers.0.mlp.gate_up": 2, "layers.1.attn.qkv": 4}
    expected |= {"layers.1.mlp.gate_up": 8, "head": 16}
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FP8KernelLinear) and module.is_bounded
    }
    assert linears.keys() == expected.keys()
    for name, weight in expected.items():
        scale = torch.finfo(E4M3).max / (math.sqrt(64) * weight)
        assert linears[name].x_scale.item() == pytest.approx(scale, rel=1e-6), name
        assert linears[name].x_amax is None, name


def test_of_all_other_tensors_the_scales_are_delayed():
    names = DelayedScales(build(LABEL)[0]).state()
    assert [name for name in names if name.startswith("layers.0.")] == [
        "layers.0.attn.out.x",
        "layers.0.mlp.down.x",
        "layers.0.attn.qkv.g",
        "layers.0.attn.out.g",
        "layers.0.mlp.gate_up.g",
        "layers.0.mlp.down.g",
    ]


# --------------------------------------------------------------------------------------- whole runs


def state(config) -> dict[str, list[float]]:
    manifest = faults.checkpoint_folder(config, 6) / "manifest.json"
    return json.loads(manifest.read_text())["state"]["fp8_scales"]


def test_a_run_resumes_bit_exactly(tiny: Config, run: Callable[..., str]):
    config = replace(tiny, run="bounded", fp8=BOUNDED)
    run(config)
    expected = faults.record(config), state(config)
    faults.back_to(config, 3)
    run(config)
    assert (faults.record(config), state(config)) == expected


@pytest.mark.parametrize("label", [LABEL, f"{LABEL}+head"])
def test_a_label_is_read_back(label: str):
    assert from_label(label).label == label


# ----------------------------------------------------------------------------- variants of model.py


def parallel_block(
    self: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache=None, mask=None
) -> torch.Tensor:
    """Attention and MLP side by side, as docs/extending.md has it."""
    after_attention = x + self.attn(self.norm1(x), cos, sin, cache, mask)
    mlp_input = x if self.is_parallel else after_attention
    return after_attention + self.mlp(self.norm2(mlp_input))


def gated_attention(
    self: Attention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache=None, mask=None
) -> torch.Tensor:
    return ATTENTION(self, x, cos, sin, cache, mask) * x.sigmoid()


def gelu(self: MLP, x: torch.Tensor) -> torch.Tensor:
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return self.down(torch.nn.functional.gelu(gate) * up)


def uncentred(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Of weights around zero, as Gemma's."""
    return RMS_NORM(self, x) + torch.nn.functional.rms_norm(x, x.shape[-1:])


ATTENTION, RMS_NORM = Attention.forward, RMSNorm.forward


@pytest.mark.parametrize(
    "module, forward",
    [
        (Block, parallel_block),
        (Attention, gated_attention),
        (MLP, gelu),
        (RMSNorm, uncentred),
    ],
)
def test_a_changed_block_is_refused_in_a_sentence(
    module: type, forward: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """It would be trained as if it were model.py's."""
    monkeypatch.setattr(Block, "is_parallel", True, raising=False)
    monkeypatch.setattr(module, "forward", forward)
    with pytest.raises(UserError, match="fp8.scaling=bounded computes .* block 0 of this model"):
        build(LABEL)


def test_a_block_of_other_shapes_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    """An MLP of ReLU^2 without a gate, whose first Linear is half as wide."""

    def initialise(self: MLP, config: GPTConfig) -> None:
        init(self, config)
        self.gate_up = Linear(config.n_embd, config.n_ffn)

    def relu2(self: MLP, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(x).relu().square())

    init = MLP.__init__
    monkeypatch.setattr(MLP, "__init__", initialise)
    monkeypatch.setattr(MLP, "forward", relu2)
    with pytest.raises(UserError, match="fp8.scaling=bounded computes .* block 0 of this model"):
        producers.check_are_known_blocks(GPT.on_meta(GPTConfig(**SIZE)))


def test_a_changed_block_is_taken_where_blocks_run_their_own_modules(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Block, "is_parallel", True, raising=False)
    monkeypatch.setattr(Block, "forward", parallel_block)
    build("tensorwise+kernels+delayed")
    build(LABEL, qk_norm=True)


def test_a_later_block_of_another_kind_is_refused_too(monkeypatch: pytest.MonkeyPatch):
    def initialise(self: GPT, *arguments: object) -> None:
        init(self, *arguments)
        self.layers[1].is_parallel = True

    init = GPT.__init__
    monkeypatch.setattr(Block, "is_parallel", False, raising=False)
    monkeypatch.setattr(Block, "forward", parallel_block)
    monkeypatch.setattr(GPT, "__init__", initialise)
    with pytest.raises(UserError, match="block 1 of this model"):
        build(LABEL, n_layer=2)


def test_a_variant_that_is_off_keeps_its_attributes(monkeypatch: pytest.MonkeyPatch):
    """Training and evaluation; is_parallel is each block's own."""

    def initialise(self: Block, config: GPTConfig) -> None:
        init(self, config)
        self.is_parallel = False

    expected = take(*model_and_scales())
    init = Block.__init__
    monkeypatch.setattr(Block, "__init__", initialise)
    monkeypatch.setattr(Block, "forward", parallel_block)
    model, scales = model_and_scales()
    assert all(fused(model))
    assert_equal(take(model, scales), expected)
    with torch.no_grad():
        assert model(*tokens(0)).isfinite().all()


def model_and_scales() -> tuple[GPT, DelayedScales]:
    model = build(LABEL)[0]
    return model, DelayedScales(model)


def test_the_check_moves_no_random_number():
    model = GPT.on_meta(GPTConfig(**SIZE))
    before = torch.get_rng_state()
    producers.check_are_known_blocks(model)
    assert torch.equal(torch.get_rng_state(), before)
