"""The guard: its thresholds against ones computed by hand, escalation, state; the diagnosis against
planted faults.

A diagnosis of several ranks: tests/runtime/test_faults.py."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from runtime.config import GuardConfig
from runtime.guard import Guard, Verdict, diagnose
from tests.helpers.fp8_models import build, tokens

SMALL = GuardConfig(window=16, skips=4, rollbacks=2)
OK, SPIKE, SKIP, ROLLBACK, STOP, NO_TARGET = Verdict


def quiet(rng: random.Random, loss: float = 3.0, norm: float = 1.0):
    return loss * math.exp(rng.gauss(0, 0.01)), norm * math.exp(rng.gauss(0, 0.05))


def filled(settings=SMALL, steps: int = 64):
    """A guard that has seen a quiet run of so many steps."""
    guard, rng = Guard(settings), random.Random(0)
    assert all(guard.judge(step, *quiet(rng)) is OK for step in range(steps))
    return guard


def run(settings, steps: int, values, sickening=(), save_every: int = 8, is_resumed: bool = False):
    """A run as train.py has it: `values(sick, data_step)` gives the factors of loss and norm; the
    updates on the data steps `sickening` damage the weights. is_resumed: before each step anew.
    Returns its verdicts and the guard."""
    guard, rng, step, moved_on, sick = Guard(settings), random.Random(0), 0, 0, False
    saved, verdicts = {}, []
    while step < steps and STOP not in verdicts:
        if is_resumed:
            guard = Guard(settings, **json.loads(json.dumps(guard.state(), allow_nan=False)))
        loss, norm = values(sick, step + moved_on)
        verdict = guard.judge(step, *quiet(rng, 3.0 * loss, norm))
        verdicts.append(verdict)
        sick = sick or verdict in (OK, SPIKE) and step + moved_on in sickening
        step += 1
        if verdict is ROLLBACK:
            to = max(s for s in saved if s < guard.suspect_since)
            sick, state = saved[to]
            guard.rolled_back(json.loads(state))
            saved = {s: checkpoint for s, checkpoint in saved.items() if s <= to}
            moved_on, step = moved_on + step - to, to
        elif step % save_every == 0:
            saved[step] = sick, json.dumps(guard.state(), allow_nan=False)
    return verdicts, guard


@pytest.mark.parametrize("loss_scatter", [0.0, 0.04, 0.08, 0.9])
@pytest.mark.parametrize("norm_scatter", [0.0, 0.2, 2.0])
def test_a_spike_begins_ten_robust_standard_deviations_above_the_median(
    loss_scatter: float, norm_scatter: float
):
    """Of 0.02 to 0.15 for the loss; for the norm 0.1 to 0.3, the more the loss scatters the
    larger."""
    logs = np.random.default_rng(0).normal(0, 1, (128, 2)) * (loss_scatter, norm_scatter) + (1, 0)
    robust = scipy.stats.median_abs_deviation(logs, scale=1 / 1.4826)
    loss_sd = np.clip(robust[0], 0.02, 0.15)
    norm_sd = np.clip(max(robust[1], 3 * loss_sd), 0.1, 0.3)
    limits = np.exp(np.median(logs, axis=0) + 10 * np.array((loss_sd, norm_sd)))
    for factors, is_spike in (
        ((1 - 1e-9, 1 - 1e-9), False),
        ((1 + 1e-9, 0), True),
        ((0, 1 + 1e-9), True),
    ):
        for mode, verdict in (("act", SKIP), ("log", SPIKE), ("off", OK)):
            guard = Guard(GuardConfig(mode=mode), accepted=np.exp(logs).tolist())
            assert guard.judge(128, *limits * factors) is (verdict if is_spike else OK), mode


NOT_FINITE = [(math.nan, 1.0), (-math.inf, 1.0), (2.0, math.nan), (1.0, math.inf)]
ESCALATIONS = pytest.mark.parametrize(
    "mode, rollbacks, verdict, sentence",
    [
        ("act", 2, ROLLBACK, ""),
        ("act", 0, STOP, "guard.rollbacks=0"),
        ("log", 2, STOP, "guard.mode=log"),
        ("off", 2, STOP, "guard.mode=off"),
    ],
)


@ESCALATIONS
def test_what_is_not_finite_is_skipped_then_rolled_back_in_every_mode(
    mode: str, rollbacks: int, verdict: Verdict, sentence: str
):
    guard = filled(replace(SMALL, mode=mode, rollbacks=rollbacks))
    verdicts = [guard.judge(80 + i, *values) for i, values in enumerate(NOT_FINITE)]
    assert verdicts == [SKIP, SKIP, SKIP, verdict]
    assert "gradient norm inf" in guard.reason and sentence in guard.reason
    assert (guard.skipped, guard.consecutive, guard.suspect_since) == (4, 4, 80)


@ESCALATIONS
def test_a_validation_that_is_not_finite_is_rolled_back_without_a_skip(
    mode: str, rollbacks: int, verdict: Verdict, sentence: str
):
    guard = filled(replace(SMALL, mode=mode, rollbacks=rollbacks))
    assert guard.judge(79, 0.0, 0.0) is OK
    assert guard.reject_validation(80, "validation loss nan") is verdict
    assert guard.reason.startswith("validation loss nan") and sentence in guard.reason
    assert (guard.skipped, guard.consecutive, guard.suspect_since) == (0, 0, 80)


def no_level(sick, step: int):
    return random.Random(step).choice((4, 40, 400)) if step >= 60 else 1, 1


@pytest.mark.parametrize(
    "values, sickening",
    [
        pytest.param(lambda sick, step: (2.5 if sick else 1, 1), range(50, 1000, 7), id="returns"),
        pytest.param(no_level, (), id="no level at all"),
    ],
)
def test_what_rollbacks_do_not_cure_ends_the_run(values: Callable[..., Any], sickening):
    verdicts, _ = run(SMALL, 300, values, set(sickening))
    assert verdicts[-1] is STOP
    assert verdicts.count(ROLLBACK) == SMALL.rollbacks and verdicts.count(SPIKE) == 0


def loss_times(factor):
    """A level of the loss that begins at step 60."""
    return lambda sick, step: (factor if step >= 60 else 1, 1)


@pytest.mark.parametrize(
    "values, counts",
    [  # how many SPIKE, SKIP, ROLLBACK, STOP
        (loss_times(1.5), (1, 6, 1, 0)),
        (loss_times(2), (1, 6, 1, 0)),
        (loss_times(10), (1, 6, 1, 0)),
        # large gradients at a normal loss
        (lambda sick, step: (1, 9.0 if step >= 60 else 1), (1, 3, 0, 0)),
        # a slow rise
        (lambda sick, step: (1.001**step, 1.002**step), (0, 0, 0, 0)),
    ],
)
def test_a_shift_of_the_data_is_accepted_and_then_guarded(
    values: Callable[..., Any], counts: tuple[int, int, int, int]
):
    verdicts, guard = run(SMALL, 300, values)
    assert tuple(map(verdicts.count, (SPIKE, SKIP, ROLLBACK, STOP))) == counts
    assert verdicts[-200:] == [OK] * 200
    assert guard.judge(300, 3000.0, 1000.0) is SKIP


@pytest.mark.parametrize("steps, verdict", [(7, OK), (8, SKIP)])
def test_no_step_is_a_spike_before_half_the_window_is_known(steps: int, verdict: Verdict):
    assert filled(steps=steps).judge(steps, 300.0, 100.0) is verdict


def test_mode_log_follows_a_shift_and_ends_a_row_at_what_is_not_finite():
    guard = filled(replace(SMALL, mode="log"))
    verdicts = [guard.judge(64 + i, math.nan if i == 3 else 6.0, 1.0) for i in range(20)]
    assert verdicts == [*[SPIKE] * 3, SKIP, *[SPIKE] * 4, *[OK] * 12]
    assert (guard.skipped, guard.consecutive, guard.spikes) == (1, 0, [])
    assert len(guard.accepted) == SMALL.window


@pytest.mark.parametrize(
    "mode, seen",
    [("off", {OK, SKIP}), ("log", {OK, SKIP, SPIKE}), ("act", set(Verdict) - {NO_TARGET})],
)
def test_a_resume_at_any_step_changes_no_verdict_and_no_count(mode: str, seen: set):
    def values(sick, step: int):
        loss = math.nan if step % 53 == 0 else 4 if step % 90 > 80 or step % 41 == 0 else 1
        return loss, 9.0 if step % 37 < 3 else 1.0

    verdicts, guard = run(replace(SMALL, mode=mode), 400, values)
    resumed_verdicts, resumed = run(replace(SMALL, mode=mode), 400, values, is_resumed=True)
    assert (
        resumed_verdicts == verdicts and resumed.state() == guard.state() and set(verdicts) == seen
    )
    assert guard.skipped == sum(verdict not in (OK, SPIKE) for verdict in verdicts)


@pytest.mark.parametrize("mode", ["act", "log", "off"])
def test_a_step_without_targets_leaves_no_trace_but_its_count(mode: str):
    guard = filled(replace(SMALL, mode=mode))
    state_before = guard.state()
    assert [guard.judge(64 + i, math.nan, 0.0, targets=0) for i in range(50)] == [NO_TARGET] * 50
    assert guard.state() == state_before | {"without_targets": 50} and "prompts" in guard.reason


def test_a_step_without_targets_neither_ends_nor_lengthens_a_row_of_skips():
    guard = filled()
    steps = [(300.0, 500), (math.nan, 0), (300.0, 500), (math.nan, 0), (300.0, 500), (300.0, 500)]
    verdicts = [guard.judge(64 + i, loss, 1.0, n) for i, (loss, n) in enumerate(steps)]
    assert verdicts == [SKIP, NO_TARGET, SKIP, NO_TARGET, SKIP, ROLLBACK]
    assert (guard.skipped, guard.suspect_since) == (4, 64)


def test_no_rollback_undoes_the_count_of_steps_without_targets():
    guard = filled()
    for step in range(3):
        guard.judge(64 + step, math.nan, 0.0, targets=0)
    guard.rolled_back(filled().state())
    assert guard.without_targets == 3


def loss_of_few(rng, targets):
    """Their mean, where most tokens are easy and some hard."""
    is_easy = rng.random(targets) < 0.8
    losses = np.where(is_easy, rng.exponential(0.03, targets), rng.exponential(3.0, targets))
    return float(losses.mean())


def test_steps_of_few_targets_are_no_spikes():
    """Means over 1 to 8 tokens: nearly half of them would be."""
    guard, rng = Guard(GuardConfig()), np.random.default_rng(0)
    for step in range(1000):
        targets = int(rng.integers(1, 9))
        loss = loss_of_few(rng, targets)
        assert guard.judge(step, loss, 2 * loss, targets) is OK
    assert guard.accepted == [], "nor are they what a larger step is compared with"


def test_of_steps_of_few_targets_what_is_not_finite_is_skipped():
    """One that is finite ends the row."""
    guard = Guard(GuardConfig())
    for step in range(3):
        assert guard.judge(2 * step, math.nan, 1.0, 4) is SKIP
        assert guard.judge(2 * step + 1, 1.0, 1.0, 4) is OK
        assert guard.consecutive == 0


# ------------------------------------------------------------------------------------ the diagnosis


def overflow(model, moments):
    model.layers[0].attn.out.weight.fill_(3e38)


def spoil(model, moments):
    moments["optim.wte.weight.exp_avg"].view(-1)[:2] = torch.tensor([math.nan, -math.inf])
    model.layers[0].attn.qkv.weight.grad[0, :7] = math.inf
    model.layers[1].mlp.gate_up.weight[3, 5] = math.nan


SPOILT = {
    "weights": {"layers.1.mlp.gate_up.weight": 1},
    "moments": {"wte.weight.exp_avg": 2},
    "gradients": {"layers.0.attn.qkv.weight": 7},
}


HEALTHY = {"weights": {}, "moments": {}, "gradients": {}}


def diagnosis(tmp_path: Path, recipe: str = "off", fault=None, **changes: object):
    """What is printed and what is written of a model with a fault."""
    model, (x, y) = build(recipe, **changes)[0], tokens()
    model(x, y).sum().backward()
    named = {name: weight.detach() for name, weight in model.named_parameters()}
    tensors = {f"model.{name}": weight for name, weight in named.items()}
    tensors |= {f"optim.{name}.exp_avg": torch.zeros_like(named[name]) for name in named}
    if fault:
        with torch.no_grad():
            fault(model, tensors)
    text = diagnose(model, tensors, x, y, 41, "loss nan", tmp_path, True)
    written = (tmp_path / "diagnosis.json").read_text()
    return text, json.loads(written, parse_constant=pytest.fail)


def not_finite(named):
    """Name -> number of values that are not finite, where there are some."""
    return {name: c["not_finite"] for name, c in named.items() if c["not_finite"]}


@pytest.mark.parametrize(
    "recipe, changes, fault, bad",
    [
        ("off", {}, None, {}),
        ("tensorwise", {}, None, {}),
        ("off", {"loss_chunk": 16}, None, {}),
        ("off", {}, overflow, {}),
        ("off", {}, spoil, SPOILT),
        ("tensorwise", {}, spoil, SPOILT),
    ],
)
def test_the_diagnosis_names_what_is_not_finite_and_nothing_else(
    tmp_path: Path,
    recipe: str,
    changes: dict[str, int],
    fault: Callable[..., Any] | None,
    bad: dict[str, Any],
):
    text, written = diagnosis(tmp_path, recipe, fault, **changes)
    assert {kind: not_finite(written[kind]) for kind in HEALTHY} == HEALTHY | bad
    sentence = "1 of 14 weights are not finite (layers.1.mlp.gate_up.weight: 1 of 12,288 values)"
    assert (sentence in text) is bool(bad)


@pytest.mark.parametrize(
    "recipe, fault, module, values",
    [
        ("off", overflow, "layers.0.attn.out", None),
        ("off", spoil, "layers.1.mlp.gate_up", 4 * 32),
        # where one NaN spoils all
        ("tensorwise", spoil, "layers.1.mlp.gate_up", 4 * 32 * 192),
    ],
)
def test_the_diagnosis_names_the_first_output_that_is_not_finite(
    tmp_path: Path, recipe: str, fault: Callable[..., Any], module: str, values: int | None
):
    text, written = diagnosis(tmp_path, recipe, fault)
    first, *_ = not_finite(written["modules"]).items()
    assert first[0] == module and values in (None, first[1])
    assert f"modules are not finite ({module}: " in text


def test_the_diagnosis_of_a_healthy_model_names_no_output(tmp_path: Path):
    assert not not_finite(diagnosis(tmp_path)[1]["modules"])


def test_the_diagnosis_says_when_why_and_where_it_was_written(tmp_path: Path):
    text, written = diagnosis(tmp_path)
    assert text.startswith("loss nan: ") and str(tmp_path / "diagnosis.json") in text
    assert (written["step"], written["reason"], written["problem"]) == (41, "loss nan", "")


def test_the_diagnosis_counts_every_value_in_the_order_of_the_model(tmp_path: Path):
    _, written = diagnosis(tmp_path)
    sizes = {name: weight.numel() for name, weight in build()[0].named_parameters()}
    assert {name: c["values"] for name, c in written["weights"].items()} == sizes
    first, second, *_, last = written["modules"]
    assert (first, second, last) == ("wte", "layers.0.norm1", "head")
    assert written["modules"]["head"]["values"] == 4 * 32 * 384


@pytest.mark.parametrize("exists", [True, False])
def test_what_fails_in_the_diagnosis_is_told_and_never_raised(tmp_path: Path, exists: bool):
    folder = tmp_path if exists else tmp_path / "gone"
    broken = {"model.x": torch.zeros(3), "optim.x": None}
    text = diagnose(build()[0], broken, *tokens(), 3, "loss inf", folder, True)
    assert text.startswith("loss inf: ") and "AttributeError" in text
    assert (folder / "diagnosis.json").exists() is exists


# ------------------------------------------------------------------------------------- guard.layers


def layers_of(rng: random.Random, factor: float = 1.0):
    """Norms of three layers, of which the second is small: `factor` of it hardly shows in all."""
    norms = {"wte": 1.0, "layers.0": 0.01 * factor, "norm": 0.3}
    return {name: norm * math.exp(rng.gauss(0, 0.05)) for name, norm in norms.items()}


def filled_with_layers(settings=SMALL, steps: int = 64):
    guard, rng = Guard(settings), random.Random(0)
    verdicts = {guard.judge(step, *quiet(rng), None, layers_of(rng)) for step in range(steps)}
    assert verdicts == {OK}
    return guard, rng


def test_a_layer_over_its_own_past_is_a_spike_that_the_global_norm_hides():
    guard, rng = filled_with_layers()
    assert guard.judge(64, *quiet(rng), None, layers_of(rng, 20)) is SKIP
    assert guard.reason.startswith("gradient norm of layers.0 0.2")
    assert "wte" not in guard.reason and "of the last 16 accepted steps; 1 skipped" in guard.reason
    assert guard.judge(65, *quiet(rng), None, layers_of(rng)) is OK
    assert filled().judge(64, *quiet(rng)) is OK, "without the norms of layers it passes"


@pytest.mark.parametrize("loss_scatter", [0.0, 0.04, 0.9])
@pytest.mark.parametrize("scatter", [0.0, 0.2, 2.0])
def test_a_layers_spike_begins_ten_robust_deviations_above_its_median(
    scatter: float, loss_scatter: float
):
    """Of 0.1 to 0.3, the more the loss scatters the larger."""
    logs = np.random.default_rng(0).normal(0, 1, (128, 4)) * (loss_scatter, 0.01, scatter, 0.3)
    robust = scipy.stats.median_abs_deviation(logs, scale=1 / 1.4826)
    loss_sd = np.clip(robust[0], 0.02, 0.15)
    sd = np.clip(np.maximum(robust, 3 * loss_sd), 0.1, 0.3)
    limits = np.exp(np.median(logs, axis=0) + 10 * sd)
    for factor, verdict in ((1 - 1e-9, OK), (1 + 1e-9, SKIP)):
        guard = Guard(GuardConfig(), accepted=np.exp(logs).tolist())
        layer_norms = {"a": limits[2] * factor, "b": 1.0}
        assert guard.judge(128, 1.0, 1.0, None, layer_norms) is verdict


def test_layers_whose_norms_stay_high_are_a_new_level():
    guard, rng = filled_with_layers()
    verdicts = [guard.judge(64 + i, *quiet(rng), None, layers_of(rng, 20)) for i in range(4)]
    assert verdicts == [SKIP, SKIP, SKIP, SPIKE]
    assert guard.judge(68, *quiet(rng), None, layers_of(rng, 20)) is OK


def test_layers_are_judged_once_half_a_window_has_their_norms():
    """A run that is resumed with guard.layers=true has a window without them."""
    guard, rng = filled(), random.Random(1)
    assert guard.judge(64, *quiet(rng), None, layers_of(rng, 20)) is OK
    for step in range(65, 72):
        assert guard.judge(step, *quiet(rng), None, layers_of(rng)) is OK
    assert guard.judge(72, *quiet(rng), None, layers_of(rng, 20)) is SKIP


def test_a_window_with_norms_of_layers_serves_a_run_without_them():
    guard, rng = filled_with_layers()
    assert guard.judge(64, *quiet(rng)) is OK
    assert guard.judge(65, *quiet(rng, norm=100.0)) is SKIP


def test_a_state_with_layers_goes_through_json():
    guard, rng = filled_with_layers()
    guard.judge(64, *quiet(rng), None, layers_of(rng, 20))
    again = Guard(SMALL, **json.loads(json.dumps(guard.state(), allow_nan=False)))
    again.reason = guard.reason
    assert again == guard


def test_the_three_highest_layers_are_named():
    norms = dict.fromkeys("abcde", 1.0)
    guard = Guard(SMALL, accepted=[[1.0, 1.0, *norms.values()]] * 16)
    spikes = {name: 10.0 * (i + 1) for i, name in enumerate("abcde")}
    guard.judge(16, 1.0, 1.0, None, spikes)
    assert guard.reason.startswith("gradient norm of e 50 is 50 x its median (39.1 robust")
    assert "of d 40" in guard.reason and "of b" not in guard.reason
    assert "standard deviations) and 2 more of the last 16" in guard.reason
