"""What the probe reports, against fp64 arithmetic written anew; that training does not notice it,
on two ranks and through recomputation: tests/runtime/test_two_ranks.py."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from fp8 import probe, selection
from fp8.copies import refresh_weight_copies
from fp8.head_loss import FP8HeadLoss
from fp8.linears import set_position
from fp8.noise import noise_at
from fp8.probe import Probe, sequences, statistics
from fp8.probe_rows import BlockRow, read_probe_rows
from fp8.recipes import Operand
from lib.errors import UserError
from runtime.checkpoint import checkpoints, seal
from runtime.config import Config
from tests.conftest import changed
from tests.fp8.test_linears import E4M3, E5M2, LARGEST, OPERANDS, quantised
from tests.helpers.faults import summary
from tests.helpers.fp8_models import NAMES, NATIVE, tokens
from tests.helpers.fp8_models import build as build_model
from tests.test_model import reference_logits

SATURATED, ERROR = probe.STATISTICS.index("saturated"), probe.STATISTICS.index("error")
SCALE = 1 / 2048  # of the loss, as in a run with steps of 2,048 tokens


def build(
    recipe: str = "off", dtype=torch.bfloat16, seed: int = 0, head: bool = False, **changes: object
):
    """A model, its recipes by layer, and a batch; weights of a size that makes attention and SwiGLU
    do something."""
    model, layers = build_model(
        recipe, head=head, dtype=dtype, loss_scale=SCALE, seed=seed, **changes
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "qkv" in name or "gate_up" in name:
                p.mul_(4)
            elif name.endswith("_norm.weight"):
                p.mul_(torch.linspace(0.5, 2.0, p.numel()))
    refresh_weight_copies(model)
    return model, selection.recipes(layers, SCALE), *tokens(seed)


def probed(tmp_path: Path, model, recipes, x: torch.Tensor, y: torch.Tensor, n_tokens: int = 4096):
    """All rows of the file after one more probe, read as strict JSON."""
    path = tmp_path / "probe.jsonl"
    Probe(path, model, recipes, n_tokens)(7, x, y, SCALE)
    return read(path)


def read(path: Path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def reference(x: torch.Tensor, operand, noise=None):
    """By the independent rounding of fp8/test_linears.py; scales sorted, the lower median of
    them."""
    x = x.detach().double().flatten(0, -2)
    q, scale = quantised(x, operand, 1, noise)
    ordered, largest = scale.flatten().sort().values, LARGEST[operand[0]]
    over = (
        x.unflatten(-1, (-1, x.shape[1] // scale.shape[1])) * scale[..., None]
    ).abs() > largest * (1 + 1e-6)
    return {
        "amax": x.abs().max(),
        "scale_min": ordered[0],
        "scale": ordered[(len(ordered) - 1) // 2],
        "scale_max": ordered[-1],
        "underflow": ((x != 0) & (q == 0)).double().mean(),
        "saturated": over.double().mean(),
        "error": (q - x).norm() / x.norm(),
        "kurtosis": (x**4).mean() / (x**2).mean() ** 2,
    }


class Operands:
    """What each Linear was given in its first pass: weight, activation, gradient, by its name; the
    probe's own passes are not looked at."""

    def __init__(self, model, names):
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name in names:
            model.get_submodule(name).register_forward_hook(partial(self._note, name))

    def _note(self, name: str, module: torch.nn.Module, inputs, output):
        first = {"weight": module.weight, "activation": inputs[0]}
        first = self.tensors.setdefault(name, first)
        output.register_hook(lambda g: first.update({"gradient": g.clone()} | first))


RECIPES_PROBED = [*NATIVE, "nvfp4_nearest", "nvfp4"]


@dataclass
class Probed:
    """Rows of a probe by the Linear's name, and what they are of."""

    recipe: str
    model: torch.nn.Module
    recipes: dict
    operands: dict[str, dict[str, torch.Tensor]]
    rows: dict[str, dict]

    def expected(self, name: str, operand: str) -> dict[str, float]:
        """The statistics by reference()."""
        tensor, linear = self.operands[name][operand], self.model.get_submodule(name)
        how = dict(zip(("activation", "weight", "gradient"), OPERANDS[self.recipe], strict=False))
        if self.recipe == "cscale":  # its constant undoes the loss scale
            how["gradient"] = E5M2, 8 - round(math.log2(SCALE))
        noise = None
        # rounded as the matmul's operand is
        if operand == "gradient" and self.recipes[name].grad.is_stochastic:
            noise = noise_at(tensor.flatten(0, -2).shape, linear.position, linear.salt)
        statistics_of = reference(tensor, how[operand], noise)
        return {key: float(value) for key, value in statistics_of.items()}


@pytest.fixture(scope="module", params=RECIPES_PROBED)
def probed_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Probed:
    model, recipes, x, y = build(request.param)
    set_position(model, 2**20, seed=3)
    operands = Operands(model, recipes)
    (model(x, y).sum() * SCALE).backward()
    rows = probed(tmp_path_factory.mktemp("probe"), model, recipes, x, y)
    linears = {row["layer"]: row for row in rows if row["kind"] == "linear"}
    return Probed(request.param, model, recipes, operands.tensors, linears)


def test_every_linear_of_a_block_has_a_row(probed_model: Probed):
    assert set(probed_model.rows) == {f"layers.{i}.{name}" for i in (0, 1) for name in NAMES}
    for row in probed_model.rows.values():
        assert (row["step"], row["recipe"]) == (7, probed_model.recipe)


@pytest.mark.parametrize("operand", ["weight", "activation", "gradient"])
def test_statistics_are_those_of_an_independent_rounding(probed_model: Probed, operand: str):
    for name, row in probed_model.rows.items():
        expected, computed = probed_model.expected(name, operand), dict(row[operand])
        one_value = 2 / probed_model.operands[name][operand].numel()
        for key in "underflow", "saturated":
            assert computed.pop(key) == pytest.approx(expected.pop(key), abs=one_value), (name, key)
        assert computed == pytest.approx(expected, rel=1e-4), name


def test_the_host_waits_for_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, recipes, x, y = build("tensorwise")
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: lists.append(t) or tolist(t))
    probed(tmp_path, model, recipes, x, y)
    assert len(lists) == 1


@pytest.mark.parametrize("sharing", ["tensor", "row", "block", "constant"])
def test_statistics_of_zeros_are_finite(sharing: str):
    values = statistics(torch.zeros(32, 64), Operand(E4M3, sharing)).tolist()
    amax, *scales, underflow, saturated, error, kurtosis = values
    assert (amax, underflow, saturated, error, kurtosis) == (0, 0, 0, 0, 0)
    assert all(0 < scale < math.inf for scale in scales)


def test_the_error_of_the_smallest_gradients_is_that_of_large_ones():
    """In fp32 their squares would vanish, and those lost altogether would show no error."""
    g = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    operand = Operand(E4M3, "row", power_of_2=True)
    large, small = (statistics(g * size, operand)[ERROR].item() for size in (1.0, 2.0**-36))
    assert small == pytest.approx(large, rel=1e-6) and 0.01 < large < 0.05


def test_a_largest_value_that_its_scale_lifts_is_not_saturated():
    """448 / amax rounds up as often as down; the largest value times it is then slightly above
    448."""
    for amax in torch.linspace(0.01, 3, 500).bfloat16():
        assert statistics(amax * torch.ones(1, 32), Operand(E4M3))[SATURATED] == 0, amax


HEADS = pytest.mark.parametrize(
    "label, n_pieces",
    [("rowwise", 0), ("tensorwise+kernels", 1), ("tensorwise_gw_hp+kernels", 0)],
)


def build_with_head(label: str):
    return build(label, head=True, loss_chunk=32 if label == "rowwise" else None)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The targets of each loss that an FP8 head has computed in one piece."""
    calls, forward = [], FP8HeadLoss.forward
    monkeypatch.setattr(
        FP8HeadLoss, "forward", staticmethod(lambda *a: calls.append(a[3]) or forward(*a))
    )
    return calls


@HEADS
def test_a_head_computes_its_loss_in_one_piece_unless_a_probe_watches(
    label: str, n_pieces: int, pieces: list[torch.Tensor], tmp_path: Path
):
    """In which there is no output to watch; nor with BF16 weight gradients."""
    model, recipes, x, y = build_with_head(label)
    model(x, y)
    assert len(pieces) == n_pieces
    pieces.clear()
    probed(tmp_path, model, recipes, x, y)
    assert not pieces


@HEADS
def test_a_head_is_measured_once_or_by_its_first_chunk(label: str, n_pieces: int, tmp_path: Path):
    """Not again when the backward pass recomputes the chunk."""
    model, recipes, x, y = build_with_head(label)
    rows = probed(tmp_path, model, recipes, x, y)
    (row,) = [row for row in rows if row.get("layer") == "head"]
    hidden = model.hidden(x)[0] if label == "rowwise" else model.hidden(x)
    assert row["activation"]["amax"] == hidden.abs().max().item()
    assert row["gradient"]["amax"] > 0


@pytest.mark.parametrize("is_writing", [False, True])
@HEADS
def test_only_a_rank_that_writes_measures(
    label: str, n_pieces: int, is_writing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Three operands of each Linear."""
    calls = []
    monkeypatch.setattr(probe, "statistics", lambda *a: calls.append(a) or statistics(*a))
    model, recipes, x, y = build_with_head(label)
    path = tmp_path / "probe.jsonl" if is_writing else None
    Probe(path, model, recipes, 4096)(1, x, y, SCALE)
    assert len(recipes) == 9 and len(calls) == (27 if is_writing else 0)


@pytest.mark.parametrize(
    "logits_at_once, seed, ahead, changes",
    [
        (2**24, 4, 1, {}),
        (100, 30, 1, {"n_head": 4, "n_kv_head": 2}),
        (100, 12, 0, {"n_head": 4, "n_kv_head": 1, "qk_norm": True}),
        (100, 18, 1, {"n_head": 2, "n_kv_head": 1, "head_size": 40}),
    ],
)
def test_block_rows_against_a_naive_computation(
    changes: dict[str, Any],
    logits_at_once: int,
    seed: int,
    ahead: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Each case must show a mask that lets the next token through (ahead 1), or hides the token
    itself (0)."""
    monkeypatch.setattr(probe, "LOGITS_AT_ONCE", logits_at_once)
    model, recipes, x, y = build(dtype=torch.float32, seed=seed, **changes)
    rows, blocks, n_shown = probed(tmp_path, model, recipes, x, y), [], 0
    reference_logits(model, x, blocks)
    assert [(row["kind"], row["step"], row["block"]) for row in rows] == [
        ("block", 7, 0),
        ("block", 7, 1),
    ]
    # attention's of the first sequence
    for row, (logits, swiglu) in zip(rows, blocks, strict=True):
        n_shown += (
            np.diagonal(logits[0], ahead, 1, 2).max() > 1.001 * np.tril(logits[0], ahead - 1).max()
        )
        assert row["attention_logit_max"] == pytest.approx(np.tril(logits[0]).max(), rel=1e-4)
        assert row["swiglu_amax"] == pytest.approx(np.abs(swiglu).max(), rel=1e-4)
        assert row["swiglu_rms"] == pytest.approx(np.sqrt(np.square(swiglu).mean()), rel=1e-4)
    assert n_shown


def test_a_probe_of_half_the_tokens_is_one_of_half_the_batch(tmp_path: Path):
    model, recipes, x, y = build("tensorwise")
    half = probed(tmp_path, model, recipes, x, y, n_tokens=95)
    assert probed(tmp_path, model, recipes, x[:2], y[:2]) == half * 2


@pytest.mark.parametrize(
    "B, T, n_tokens, expected",
    [
        (8, 2048, 4096, 2),
        (8, 4096, 100, 1),
        (8, 1000, 2500, 4),
        (6, 8, 16, 4),
        (3, 48, 1, 2),
        (3, 5, 1, 3),
    ],
)
def test_sequences_by_hand(B: int, T: int, n_tokens: int, expected: int):
    assert sequences(B, T, n_tokens) == expected


def test_a_last_line_that_a_kill_cut_short_is_removed(tmp_path: Path):
    model, recipes, x, y = build("tensorwise")
    whole = probed(tmp_path, model, recipes, x, y)
    with open(tmp_path / "probe.jsonl", "a") as file:
        file.write('{"kind": "block", "st')
    assert probed(tmp_path, model, recipes, x, y) == whole * 2


def test_a_full_disk_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, recipes, x, y = build("tensorwise")
    probe = Probe(tmp_path / "probe.jsonl", model, recipes, 64)
    probe.path = "/dev/full"
    probe(0, x, y, 1.0)
    assert "No space left on device" in capsys.readouterr().out


def hooks_of(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def fail_in_forward(model, x: torch.Tensor):
    return IndexError, x + 10_000


def fail_in_backward(model, x: torch.Tensor):
    model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: output.register_hook(lambda g: 1 / 0) and None
    )
    return ZeroDivisionError, x


@pytest.mark.parametrize("spoil", [fail_in_forward, fail_in_backward])
def test_a_pass_that_fails_leaves_no_hook_no_gradient_and_no_row(
    tmp_path: Path, spoil: Callable[..., Any]
):
    model, recipes, x, y = build("tensorwise")
    error, x = spoil(model, x)
    n_hooks = hooks_of(model)
    with pytest.raises(error):
        probed(tmp_path, model, recipes, x, y)
    assert hooks_of(model) == n_hooks
    assert all(weight.grad is None for weight in model.parameters())
    path = tmp_path / "probe.jsonl"
    assert not path.exists() or not read(path)


def test_what_is_not_finite_becomes_null_from_its_layer_on(tmp_path: Path):
    model, recipes, x, y = build("mxfp8")
    model.layers[1].attn.qkv.weight.data[3, 5] = math.nan
    rows = {}
    for row in probed(tmp_path, model, recipes, x, y):
        rows[row.get("layer", row.get("block"))] = row
    spoilt = rows["layers.1.attn.qkv"]["weight"]
    assert spoilt["amax"] is None and spoilt["error"] is None
    assert rows["layers.0.attn.qkv"]["weight"]["amax"] > 0
    assert rows[1]["attention_logit_max"] is None
    assert rows[0]["attention_logit_max"] > 0


def test_a_compiled_model_is_not_compiled_again(tmp_path: Path):
    torch._dynamo.reset()
    counters.clear()
    model, recipes, x, y = build("tensorwise", n_layer=1)
    model.compile(dynamic=False, fullgraph=True, backend="eager")

    def step():
        loss = model(x, y).sum() * SCALE
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    with torch._dynamo.config.patch(error_on_recompile=True):
        first_step = step()
        # four Linears and a block
        assert len(probed(tmp_path, model, recipes, x, y, n_tokens=64)) == 5
        assert all(map(torch.equal, first_step, step()))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.fixture
def probed_run(tiny: Config, run: Callable[..., str]):
    """A finished run of six steps, probed at every second one."""
    config = changed(tiny, "fp8.recipe=cscale probe.every=2 probe.tokens=64")
    run(config)
    return config


def test_a_run_is_probed_at_trainings_own_scale(
    tiny: Config, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    """Of the loss, over four micro-batches a step."""
    scales, call = [], Probe.__call__
    monkeypatch.setattr(Probe, "__call__", lambda self, *a: scales.append(a[-1]) or call(self, *a))
    run(changed(tiny, "fp8.recipe=cscale probe.every=2 probe.tokens=64"))
    assert scales == [1 / 512] * 3


def test_a_probed_run_has_rows_of_all_linears_and_blocks(probed_run):
    """That training is the same bits with and without: runtime/test_two_ranks.py."""
    rows, kinds = read(probed_run.run_dir / "probe.jsonl"), ["linear"] * 8 + ["block"] * 2
    expected = [(step, kind) for step in (2, 4, 6) for kind in kinds]
    assert [(row["step"], row["kind"]) for row in rows] == expected
    recipes = {row["layer"]: "cscale" for row in rows if row["kind"] == "linear"}
    assert summary(probed_run)["precision"]["layers_recipes"] == recipes


def test_a_summary_has_the_time_of_probes(probed_run):
    about = summary(probed_run)
    share = about["probe_s"] / about["wall_s"]
    assert about["probe_share"] == pytest.approx(share) and 0 < share < 1


def reseal(config: Config, **changes: object) -> None:
    """Change the state in the last checkpoint of a run that is to go on from there."""
    (config.run_dir / "summary.json").unlink()
    checkpoint = checkpoints(config.run_dir)[-1]
    content = json.loads((checkpoint / "manifest.json").read_text())
    seal(checkpoint, content | {"state": content["state"] | changes})


def test_a_resumed_run_adds_to_the_time_of_probes_and_to_no_row(
    probed_run, run: Callable[..., str]
):
    rows = read(probed_run.run_dir / "probe.jsonl")
    reseal(probed_run, probe_seconds=1000.0)
    run(probed_run)
    assert summary(probed_run)["probe_s"] == 1000
    assert read(probed_run.run_dir / "probe.jsonl") == rows


def test_a_resume_with_other_linears_in_fp8_is_refused(probed_run, run: Callable[..., str]):
    checkpoint = checkpoints(probed_run.run_dir)[-1]
    data = json.loads((checkpoint / "manifest.json").read_text())["state"]["data"]
    reseal(probed_run, data=data | {"fp8": "0" * 64})
    assert "Linears in FP8 than fp8.recipe=auto chooses" in run(probed_run, code=2)


def test_a_row_of_another_schema_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "probe.jsonl"
    path.write_text('{"kind": "block", "step": 1, "schema_version": 99}\n')
    with pytest.raises(UserError, match=r"probe\.jsonl.*schema_version 99, not 1"):
        read_probe_rows(path)


def test_a_row_of_older_code_has_no_schema_version_and_is_read(tmp_path: Path) -> None:
    path = tmp_path / "probe.jsonl"
    numbers = {"attention_logit_max": 2.5, "swiglu_amax": 3.0, "swiglu_rms": None}
    path.write_text(json.dumps({"kind": "block", "step": 4, "block": 1, **numbers}) + "\n")
    assert read_probe_rows(path) == [BlockRow("block", 4, 1, **numbers)]
