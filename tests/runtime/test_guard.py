"""The guard: its thresholds against ones computed by hand, escalation, state; the diagnosis against
planted faults.

A diagnosis of several ranks: tests/runtime/test_faults.py."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from runtime.config import GuardConfig
from runtime.guard import Guard, Verdict, diagnose
from tests.helpers.fp8_models import build, tokens

SMALL = GuardConfig(window=16, skips=4, rollbacks=2)
OK, SPIKE, SKIP, ROLLBACK, STOP, NO_TARGET = Verdict


def quiet(rng, loss=3.0, norm=1.0):
    return loss * math.exp(rng.gauss(0, 0.01)), norm * math.exp(rng.gauss(0, 0.05))


def filled(settings=SMALL, steps=64):
    """A guard that has seen a quiet run of so many steps."""
    guard, rng = Guard(settings), random.Random(0)
    assert all(guard.judge(step, *quiet(rng)) is OK for step in range(steps))
    return guard


def run(settings, steps, values, sickening=(), every=8, is_resumed=False):
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
            saved = {s: kept for s, kept in saved.items() if s <= to}
            moved_on, step = moved_on + step - to, to
        elif step % every == 0:
            saved[step] = sick, json.dumps(guard.state(), allow_nan=False)
    return verdicts, guard


@pytest.mark.parametrize("loss_scatter", [0.0, 0.04, 0.08, 0.9])
@pytest.mark.parametrize("norm_scatter", [0.0, 0.2, 2.0])
def test_a_spike_begins_ten_robust_standard_deviations_above_the_median(loss_scatter, norm_scatter):
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


@pytest.mark.parametrize(
    "mode, rollbacks, verdict, said",
    [
        ("act", 2, ROLLBACK, ""),
        ("act", 0, STOP, "guard.rollbacks=0"),
        ("log", 2, STOP, "guard.mode=log"),
        ("off", 2, STOP, "guard.mode=off"),
    ],
)
def test_what_is_not_finite_is_skipped_in_every_mode_and_rolled_back_where_that_is_left(
    mode, rollbacks, verdict, said
):
    settings = replace(SMALL, mode=mode, rollbacks=rollbacks)
    guard, not_finite = (
        filled(settings),
        [
            (math.nan, 1.0),
            (-math.inf, 1.0),
            (2.0, math.nan),
            (1.0, math.inf),
        ],
    )
    assert [guard.judge(80 + i, *not_finite[i]) for i in range(4)] == [SKIP] * 3 + [verdict]
    assert "gradient norm inf" in guard.reason and said in guard.reason
    assert (guard.skipped, guard.consecutive, guard.suspect_since) == (4, 4, 80)
    guard = filled(settings)
    assert guard.judge(79, 0.0, 0.0) is OK
    assert guard.reject_validation(80, "validation loss nan") is verdict
    assert (
        guard.suspect_since == 80
        and guard.reason.startswith("validation loss nan")
        and said in guard.reason
    )
    assert (guard.skipped, guard.consecutive) == (0, 0), "no step was skipped"


@pytest.mark.parametrize(
    "values, sickening, counts",
    [  # how many SPIKE, SKIP, ROLLBACK, STOP
        # a divergence that comes back
        (lambda sick, step: (2.5 if sick else 1, 1), set(range(50, 1000, 7)), None),
        # no level at all
        (
            lambda sick, step: (random.Random(step).choice((4, 40, 400)) if step >= 60 else 1, 1),
            (),
            None,
        ),
        *(
            (lambda sick, step, factor=factor: (factor if step >= 60 else 1, 1), (), (1, 6, 1, 0))
            for factor in (1.5, 2, 10)
        ),
        # large gradients at a normal loss
        (lambda sick, step: (1, 9.0 if step >= 60 else 1), (), (1, 3, 0, 0)),
        (lambda sick, step: (1.001**step, 1.002**step), (), (0, 0, 0, 0)),
    ],
)  # a slow rise
def test_a_shift_of_the_data_is_accepted_and_what_a_rollback_does_not_cure_ends_the_run(
    values, sickening, counts
):
    verdicts, guard = run(SMALL, 300, values, sickening)
    if counts is None:
        assert verdicts[-1] is STOP and verdicts.count(ROLLBACK) == 2 and verdicts.count(SPIKE) == 0
    else:
        assert (
            tuple(map(verdicts.count, (SPIKE, SKIP, ROLLBACK, STOP))) == counts
            and verdicts[-200:] == [OK] * 200
        )
        assert guard.judge(300, 3000.0, 1000.0) is SKIP, "and the new level is guarded"


def test_the_first_steps_are_no_spike_and_log_mode_follows_a_shift():
    only_noted = filled(replace(SMALL, mode="log"))
    verdicts = [only_noted.judge(64 + i, math.nan if i == 3 else 6.0, 1.0) for i in range(20)]
    assert verdicts == [
        *[SPIKE] * 3,
        SKIP,
        *[SPIKE] * 4,
        *[OK] * 12,
    ], "a row of spikes ends at what is not finite"
    assert (
        only_noted.skipped,
        only_noted.consecutive,
        only_noted.spikes,
        len(only_noted.accepted),
    ) == (1, 0, [], 16)
    assert filled(steps=7).judge(7, 300.0, 100.0) is OK, "less than half the window is known"
    assert filled(steps=8).judge(8, 300.0, 100.0) is SKIP


@pytest.mark.parametrize(
    "mode, seen",
    [("off", {OK, SKIP}), ("log", {OK, SKIP, SPIKE}), ("act", set(Verdict) - {NO_TARGET})],
)
def test_a_resume_at_any_step_changes_no_verdict_and_no_rollback_undoes_a_count(mode, seen):
    def values(sick, step):
        loss = math.nan if step % 53 == 0 else 4 if step % 90 > 80 or step % 41 == 0 else 1
        return loss, 9.0 if step % 37 < 3 else 1.0

    verdicts, guard = run(replace(SMALL, mode=mode), 400, values)
    resumed_verdicts, resumed = run(replace(SMALL, mode=mode), 400, values, is_resumed=True)
    assert (
        resumed_verdicts == verdicts and resumed.state() == guard.state() and set(verdicts) == seen
    )
    assert guard.skipped == sum(verdict not in (OK, SPIKE) for verdict in verdicts)


@pytest.mark.parametrize("mode", ["act", "log", "off"])
def test_a_step_without_targets_is_not_judged_and_leaves_no_trace_but_its_count(mode):
    guard = filled(replace(SMALL, mode=mode))
    before = guard.state()
    assert [guard.judge(64 + i, math.nan, 0.0, targets=0) for i in range(50)] == [NO_TARGET] * 50
    assert guard.state() == before | {"without_targets": 50} and "prompts" in guard.reason


def test_a_step_without_targets_neither_ends_nor_lengthens_a_row_of_skips():
    guard = filled()
    assert [
        guard.judge(64 + i, loss, 1.0, targets)
        for i, (loss, targets) in enumerate(
            [(300.0, 500), (math.nan, 0), (300.0, 500), (math.nan, 0), (300.0, 500), (300.0, 500)]
        )
    ] == [SKIP, NO_TARGET, SKIP, NO_TARGET, SKIP, ROLLBACK]
    assert (guard.skipped, guard.suspect_since) == (4, 64)
    guard.judge(70, math.nan, 0.0, targets=0)
    state = json.loads(json.dumps(guard.state()))
    guard.rolled_back(filled().state())
    assert (guard.without_targets, state["without_targets"]) == (
        3,
        3,
    ), "no rollback undoes the count"


def test_steps_of_few_targets_are_no_spikes_and_only_what_is_not_finite_is_skipped():
    """Means over 1 to 8 tokens, of which most are easy and some hard: nearly half of them would be
    spikes."""
    guard, rng = Guard(GuardConfig()), np.random.default_rng(0)
    for step in range(1000):
        targets = int(rng.integers(1, 9))
        is_easy = rng.random(targets) < 0.8
        loss = float(
            np.where(is_easy, rng.exponential(0.03, targets), rng.exponential(3.0, targets)).mean()
        )
        assert guard.judge(step, loss, 2 * loss, targets) is OK
    assert guard.accepted == [], "nor are they what a larger step is compared with"
    for step in range(3):
        assert guard.judge(1000 + step, math.nan, 1.0, 4) is SKIP
        assert guard.judge(1000 + step, 1.0, 1.0, 4) is OK and guard.consecutive == 0, (
            "which ends a row"
        )


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


# first: output, and how many of its values, if known
@pytest.mark.parametrize(
    "recipe, changes, fault, bad, first",
    [
        ("off", {}, None, {}, None),
        ("tensorwise", {}, None, {}, None),
        ("off", {"loss_chunk": 16}, None, {}, None),
        ("off", {}, overflow, {}, ("layers.0.attn.out", None)),
        ("off", {}, spoil, SPOILT, ("layers.1.mlp.gate_up", 4 * 32)),
        # where one NaN spoils all
        ("tensorwise", {}, spoil, SPOILT, ("layers.1.mlp.gate_up", 4 * 32 * 192)),
    ],
)
def test_the_diagnosis_names_what_is_not_finite_and_nothing_else(
    tmp_path, recipe, changes, fault, bad, first
):
    model, (x, y) = build(recipe, **changes)[0], tokens()
    model(x, y).sum().backward()
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {
        f"optim.{name}.exp_avg": torch.zeros_like(p) for name, p in model.named_parameters()
    }
    with torch.no_grad():
        if fault:
            fault(model, tensors)
    text = diagnose(model, tensors, x, y, 41, "loss nan", tmp_path, True)
    assert text.startswith("loss nan: ") and str(tmp_path / "diagnosis.json") in text
    found = json.loads((tmp_path / "diagnosis.json").read_text(), parse_constant=pytest.fail)
    seen = {
        kind: {name: c["not_finite"] for name, c in named.items() if c["not_finite"]}
        for kind, named in found.items()
        if isinstance(named, dict)
    }
    outputs = seen.pop("modules")
    assert (found["step"], found["reason"], found["problem"]) == (41, "loss nan", "")
    assert seen == {"weights": {}, "moments": {}, "gradients": {}} | bad
    name, values = first or (None, None)
    assert next(iter(outputs), None) == name and (
        not name or f"modules are not finite ({name}: " in text
    )
    assert values in (None, outputs.get(name))
    assert (
        "1 of 14 weights are not finite (layers.1.mlp.gate_up.weight: 1 of 12,288 values)" in text
    ) is bool(bad)
    assert {name: c["values"] for name, c in found["weights"].items()} == {
        name: p.numel() for name, p in model.named_parameters()
    }
    assert (
        list(found["modules"])[:2] == ["wte", "layers.0.norm1"]
        and list(found["modules"])[-1] == "head"
    )
    assert found["modules"]["head"]["values"] == 4 * 32 * 384


def test_what_fails_in_the_diagnosis_is_told_and_never_raised(tmp_path):
    for folder, is_written in (tmp_path, True), (tmp_path / "gone", False):
        text = diagnose(
            build()[0],
            {"model.x": torch.zeros(3), "optim.x": None},
            *tokens(),
            3,
            "loss inf",
            folder,
            True,
        )
        assert text.startswith("loss inf: ") and "AttributeError" in text
        assert (folder / "diagnosis.json").exists() is is_written
