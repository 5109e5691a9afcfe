"""fp8.scaling=delayed: scales simulated in fp64 from the amaxes of past steps, what leaves them
alone, resumes. A NaN on one rank: fp8/test_sharded.py; compiled: fp8/test_compiled.py."""

import json
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fp8 import delayed, sharded
from fp8.delayed import BoundedScales, DelayedScales
from fp8.kernels import KernelLinear
from fp8.recipes import E4M3, E5M2
from model import GPT
from runtime.config import Config, FP8Config
from tests.helpers import faults
from tests.helpers.fp8_models import build, tokens

DELAYED = FP8Config(recipe="tensorwise", kernels=True, scaling="delayed")
REACH = {"x": 448.0 / 2, "g": 57344.0 / 16}  # the largest value over the margin
LARGEST = {"x": torch.finfo(E4M3).max, "g": torch.finfo(E5M2).max}
QKV = "layers.0.attn.qkv.x"
Batch = tuple[torch.Tensor, torch.Tensor]


def made(label: str = "tensorwise+kernels+delayed", **changes: object) -> tuple[GPT, DelayedScales]:
    """A model of one block, and its scales."""
    model = build(label, n_layer=1, **changes)[0]
    return model, DelayedScales(model)


def delayed_step(model: GPT, scales: DelayedScales, loss_scale: float, *batches: Batch) -> int:
    """The number of saturated tensors of one step, its micro-batches given as (x, y)."""
    model.zero_grad()
    scales.begin(loss_scale)
    for batch in batches:
        (model(*batch).sum() * loss_scale).backward()
    return int(scales.end(loss_scale).item())


def buffers(model: GPT, kind: str) -> dict[str, float]:
    """LINEAR.x or LINEAR.g -> scale or amax, of the tensors that have delayed scales."""
    values = {}
    for name, module in model.named_modules():
        if not isinstance(module, KernelLinear):
            continue
        for side in "xg":
            value = getattr(module, f"{side}_{kind}")
            if value is not None:
                values[f"{name}.{side}"] = value.item()
    return values


# ------------------------------------------------------------------------------------ a simulation


class Amaxes(defaultdict):
    """Of each step, the largest magnitude of each tensor, by hooks."""

    def __init__(self, model: GPT):
        super().__init__(float)
        for name, module in model.named_modules():
            if isinstance(module, KernelLinear) and not module.has_fused_loss:
                module.register_forward_hook(partial(self._hook, name))

    def _hook(self, name, module, inputs, output) -> None:
        self._note(f"{name}.x", inputs[0])
        output.register_hook(partial(self._note, f"{name}.g"))

    def _note(self, key: str, tensor: torch.Tensor) -> None:
        self[key] = max(self[key], tensor.detach().double().abs().max().item())


@dataclass
class Simulated:
    """The scale of one tensor, in fp64."""

    side: str  # x or g
    is_power_of_2: bool
    past: deque = field(default_factory=lambda: deque(maxlen=4))  # amaxes of a loss scale of 1
    wide_for: int = 0  # steps for which the margin stays eight times as wide

    def scale(self, loss_scale: float) -> float:
        """For the next step."""
        unit = self.unit(loss_scale)
        if not self.past:
            scale = 1.0 if self.side == "x" else 2.0 ** (8 - round(math.log2(loss_scale)))
        else:
            widening = 8 if self.wide_for else 1
            scale = REACH[self.side] / (max(self.past) * unit * widening)
        return 2.0 ** math.floor(math.log2(scale)) if self.is_power_of_2 else scale

    def unit(self, loss_scale: float) -> float:
        return loss_scale if self.side == "g" else 1.0

    def end(self, amax: float, loss_scale: float, is_saturated: bool) -> None:
        self.wide_for = 16 if is_saturated else max(0, self.wide_for - 1)
        self.past.append(amax / self.unit(loss_scale))


SPIKE = 5  # the step from which values are 40 times as large, so beyond either margin


@dataclass
class Seen:
    """One step of a model and of the simulation."""

    scales: dict[str, float]
    simulated: dict[str, float]
    saturated: set[str]
    simulated_saturated: set[str]
    count: int  # of saturated tensors


@pytest.fixture(scope="module", params=["tensorwise", "tensorwise_gw_hp", "amax"])
def steps(request: pytest.FixtureRequest) -> list[Seen]:
    """Nine steps of two micro-batches; loss scales differ, as numbers of targets do."""
    recipe = request.param
    model, scales = made(f"{recipe}+kernels+delayed", head=recipe != "amax")
    amaxes, tensors, seen = Amaxes(model), {}, []
    for number in range(9):
        if number == SPIKE:
            model.layers[0].norm2.weight.data.mul_(40)
        loss_scale = (1 / 64, 1 / 100)[number % 2]
        amaxes.clear()
        batches = tokens(2 * number), tokens(2 * number + 1)
        count = delayed_step(model, scales, loss_scale, *batches)
        simulated, saturated = {}, set()
        for key, amax in amaxes.items():
            tensor = tensors.setdefault(key, Simulated(key[-1], recipe == "amax"))
            simulated[key] = tensor.scale(loss_scale)
            is_saturated = amax * simulated[key] > LARGEST[tensor.side] * (1 + 1e-6)
            tensor.end(amax, loss_scale, is_saturated)
            if is_saturated:
                saturated.add(key)
        # the fused head's input is not seen by the hooks
        named = set(scales.saturated()) - {"head.x"}
        seen.append(Seen(buffers(model, "scale"), simulated, named, saturated, count))
    return seen


@pytest.mark.parametrize("number", range(9))
def test_scales_follow_the_amaxes_of_four_steps_times_a_margin(steps: list[Seen], number: int):
    seen = steps[number]
    expected = pytest.approx(seen.simulated, rel=1e-6)
    assert {key: seen.scales[key] for key in seen.simulated} == expected


@pytest.mark.parametrize("number", range(9))
def test_saturated_tensors_are_named_and_counted(steps: list[Seen], number: int):
    seen = steps[number]
    assert seen.saturated == seen.simulated_saturated
    assert seen.count >= len(seen.saturated)
    if number > 0:
        assert ("layers.0.mlp.gate_up.x" in seen.saturated) == (number == SPIKE)


def test_of_a_head_with_a_fused_loss_the_input_alone_has_a_scale(steps: list[Seen]):
    """Its gradient has a bound."""
    for seen in steps:
        assert set(seen.scales) - set(seen.simulated) <= {"head.x"}


# ----------------------------------------------------------------------------- what leaves no trace


@pytest.mark.parametrize("bad", [float("nan"), 0.0, float("inf")])
def test_a_tensor_without_finite_values_leaves_no_trace(bad: float):
    """Infinity in one channel of many: the tensor is saturated."""
    model, scales = made()
    for seed in range(2):
        delayed_step(model, scales, 1 / 128, tokens(seed))
    history = scales.state()[QKV][:4]
    weight = model.layers[0].norm1.weight
    weight.data[: 1 if math.isinf(bad) else None] = bad
    delayed_step(model, scales, 1 / 128, tokens(3))
    assert (QKV in scales.saturated()) == math.isinf(bad)
    assert scales.state()[QKV][0] == max(history)
    assert all(torch.tensor(row).isfinite().all() for row in scales.state().values())


def test_an_evaluation_changes_no_scale():
    model, scales = made()
    delayed_step(model, scales, 1 / 128, tokens())
    # with a wide margin for seven steps
    state = {name: [*row[:4], 7.0] for name, row in scales.state().items()}
    scales.load(state)
    scales.begin(1 / 128)
    with torch.no_grad():
        model(*tokens(9))
    assert scales.state() == state
    assert set(buffers(model, "amax").values()) == {0.0}


def test_the_largest_of_all_ranks_counts(monkeypatch: pytest.MonkeyPatch):
    (model, alone), other_amaxes = made(), torch.rand(8) * 1e4
    scales = DelayedScales(model, ranks=2)
    # by the other rank, none of whose values is NaN
    sent = torch.stack((other_amaxes, torch.zeros(8)))

    def all_reduce(tensor, operation):
        if "MAX" in str(operation):
            tensor.copy_(torch.maximum(tensor, sent))

    monkeypatch.setattr(sharded.dist, "all_reduce", all_reduce)
    count = delayed_step(model, scales, 1.0, tokens())
    amaxes = buffers(model, "amax")
    own_amaxes = torch.tensor([amaxes[name] for name in scales.state()])
    expected = torch.maximum(own_amaxes, other_amaxes).tolist()
    assert expected != own_amaxes.tolist()
    assert [row[0] for row in scales.state().values()] == expected
    assert count > 0 == alone.end(1.0)


# --------------------------------------------------------------------------------------- whole runs


def state(config: Config, step: int = 6) -> dict[str, list[float]]:
    """The histories and margins that the checkpoint of a step holds."""
    manifest = faults.checkpoint_folder(config, step) / "manifest.json"
    return json.loads(manifest.read_text())["state"]["fp8_scales"]


@pytest.fixture
def whole(tiny: Config, run: Callable[..., str]) -> Config:
    """A finished run with delayed scales."""
    config = replace(tiny, run="whole", fp8=DELAYED, eval=replace(tiny.eval, every=3))
    run(config)
    return config


def test_a_checkpoint_holds_the_history_of_each_tensor(whole: Config):
    histories = [row[:4] for row in state(whole).values()]
    assert len(histories) == 16
    assert all(0 < min(history) < 1e4 for history in histories)


def test_a_resume_is_bit_exact(whole: Config, run: Callable[..., str]):
    expected = faults.record(whole), state(whole)
    faults.back_to(whole, 3)
    run(whole)
    assert (faults.record(whole), state(whole)) == expected


def test_two_ranks_have_the_scales_of_one_and_one_goes_on_from_them(
    whole: Config, run: Callable[..., str]
):
    two = replace(whole, run="two", data=replace(whole.data, micro_batch=2))
    started = faults.Run(two, ranks=2)
    assert set(started.wait()) == {0}, started.output
    # the first of three steps: of the same weights
    scales_of_one, scales_of_two = state(whole, 3), state(two, 3)
    assert scales_of_two.keys() == scales_of_one.keys()
    for name, (_, _, first, before_it, wide_for) in scales_of_one.items():
        assert before_it == wide_for == 0, name
        rounding = 0 if name == QKV else 0.3  # of FSDP2's: none lies before the first
        assert scales_of_two[name][2] == pytest.approx(first, rel=rounding), name
    faults.back_to(two, 3)
    run(two)
    assert state(two).keys() == state(whole).keys()


def test_a_spike_is_a_row_and_the_loss_stays_finite(
    tiny: Config, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    delayed, original, begun = replace(tiny, fp8=DELAYED), DelayedScales.begin, []

    def begin(self, loss_scale):
        original(self, loss_scale)
        begun.append(loss_scale)
        if len(begun) == 6:  # of the constructor, then of the steps: the fifth
            self._scales[0].mul_(1e3)

    monkeypatch.setattr(DelayedScales, "begin", begin)
    run(delayed)
    events = faults.rows(delayed, "event")
    saturated = [(row["step"], row["tensors"]) for row in events if row["event"] == "fp8_saturated"]
    assert saturated == [(5, [QKV])]
    margins = {name: row[4] for name, row in state(delayed).items()}
    assert margins[QKV] == 15 and margins["layers.1.attn.qkv.x"] == 0
    assert all(row["loss"] < 10 for row in faults.rows(delayed))


def test_a_rank_without_a_row_of_a_norm_takes_the_bounds_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As FSDP2 leaves it on more ranks than rows: an empty shard."""
    model = build("tensorwise+kernels+bounded", n_layer=1)[0]
    whole = BoundedScales(model)
    whole.begin()
    expected = [scale.item() for scale in whole._scales]
    of_others = torch.stack([weight.abs().max() for weight in whole._weights])
    rank = BoundedScales(model)
    rank._weights = [SimpleNamespace(to_local=lambda: torch.empty(0)) for _ in whole._weights]
    monkeypatch.setattr(delayed, "is_dtensor", lambda weight: isinstance(weight, SimpleNamespace))
    monkeypatch.setattr(delayed, "max_over_ranks", lambda own: torch.maximum(own, of_others))
    rank.begin()
    assert [scale.item() for scale in rank._scales] == expected
