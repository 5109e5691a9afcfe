"""The guard: what it lets pass, what it stops, and that neither a divergence nor a change of the data gets past the rules."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from runtime.cli import UserError
from runtime.config import GuardConfig
from runtime.guard import Guard, Verdict
from tests.conftest import call_train

DEMO = Path(__file__).parent / "fixtures/guard_demo_l_fp8.csv"      # loss and gradient norm of each step of demo_l_fp8
SMALL = GuardConfig(window=16, skips=4, rollbacks=2)


def demo_steps():
    return [tuple(map(float, line.split(","))) for line in DEMO.read_text().splitlines()]


def quiet(rng, loss=3.0, norm=1.0):
    return loss * math.exp(rng.gauss(0, 0.01)), norm * math.exp(rng.gauss(0, 0.05))


def always(before):
    """There is a checkpoint of fewer steps."""
    return True


def never(before):
    return False


def filled(settings=SMALL, steps=64, seed=0):
    """A guard that has seen a quiet run of so many steps."""
    guard, rng = Guard(settings), random.Random(seed)
    for step in range(steps):
        assert guard.judge(step, *quiet(rng), always) is Verdict.OK
    return guard


def run(settings, steps, values, every=8):
    """A run as train.py has it: `values(sick, data_step, rng)` gives loss and norm; weights turn sick by the update of the
    data steps in values.sickening. Returns its verdicts, which data each surviving step saw, and how it ended."""
    guard, rng, step, moved_on, sick = Guard(settings), random.Random(0), 0, 0, False
    saved, verdicts, data = {}, [], {}

    def is_saved(before):
        return any(s < before for s in saved)

    while step < steps:
        verdict = guard.judge(step, *values(sick, step + moved_on, rng), is_saved)
        verdicts.append(verdict)
        data[step] = step + moved_on
        if verdict in (Verdict.OK, Verdict.SPIKE):
            sick = sick or step + moved_on in getattr(values, "sickening", ())
        step += 1
        if verdict is Verdict.STOP:
            break
        if verdict is Verdict.ROLLBACK:
            to = max(s for s in saved if s < guard.suspect_since)
            sick, state = saved[to]
            guard.rolled_back(json.loads(state))
            saved = {s: kept for s, kept in saved.items() if s <= to}
            moved_on, step = moved_on + step - to, to
        elif step % every == 0:
            saved[step] = sick, json.dumps(guard.state(), allow_nan=False)
    return SimpleNamespace(verdicts=verdicts, data=data, guard=guard, sick=sick,
                           count={v: verdicts.count(v) for v in Verdict})


# ------------------------------------------------------------------------------------------------------- not finite

@pytest.mark.parametrize("mode", ["off", "log", "act"])
@pytest.mark.parametrize("loss, norm, verdict", [
    (2.0, 1.0, "OK"), (2.0, 0.0, "OK"), (0.0, 1.0, "OK"), (2.0, 1e30, "OK"), (math.nan, 1.0, "SKIP"), (math.inf, 1.0, "SKIP"),
    (2.0, math.nan, "SKIP"), (2.0, math.inf, "SKIP"), (-math.inf, 1.0, "SKIP")])
def test_what_is_not_finite_is_skipped_in_every_mode(mode, loss, norm, verdict):
    assert Guard(GuardConfig(mode=mode)).judge(0, loss, norm, always) is Verdict(verdict)


def test_the_ladder_skip_rollback_stop():
    guard = filled()
    for _ in range(2):
        kept = guard.state()
        verdicts = [guard.judge(64, math.nan, 1.0, always) for _ in range(4)]
        assert verdicts == [Verdict.SKIP] * 3 + [Verdict.ROLLBACK]
        assert guard.suspect_since == 64
        guard.rolled_back(kept)
        assert guard.suspect_since is None and guard.consecutive == 0
    assert [guard.judge(64, math.nan, 1.0, always) for _ in range(4)] == [Verdict.SKIP] * 3 + [Verdict.STOP]
    assert guard.reason == "loss nan, gradient norm 1; 4 skipped in a row, and all guard.rollbacks=2 are used up"
    assert (guard.skipped, guard.rollbacks, guard.consecutive) == (12, 2, 4)


def test_no_checkpoint_to_go_back_to_is_a_stop():
    guard = Guard(SMALL)
    assert [guard.judge(7 + i, 1.0, math.inf, never) for i in range(4)] == [Verdict.SKIP] * 3 + [Verdict.STOP]
    assert guard.reason.endswith("and there is no checkpoint from before step 7 to go back to")


def test_checkpoints_are_asked_for_only_at_the_end_of_the_ladder():
    """The answer waits for a save under way and for all ranks."""
    guard, asked = filled(), []

    def is_there(before):
        asked.append(before)
        return True

    for _ in range(2):
        assert [guard.judge(70 + i, math.nan, 1.0, is_there) for i in range(3)] == [Verdict.SKIP] * 3
        guard.judge(73, 3.0, 1.0, is_there)
    guard.judge(74, 300.0, 1.0, is_there)
    assert asked == []
    assert [guard.judge(75 + i, math.nan, 1.0, is_there) for i in range(3)] == [Verdict.SKIP] * 2 + [Verdict.ROLLBACK]
    assert asked == [74], "of fewer steps than the row began after"
    guard.rolled_back(guard.state())
    guard.reject_validation(80, "validation loss nan", is_there)
    assert asked == [74, 80]
    guard.rolled_back(guard.state())
    assert guard.reject_validation(90, "validation loss nan", is_there) is Verdict.STOP
    assert asked == [74, 80], "all rollbacks are used up, whatever there is"


@pytest.mark.parametrize("mode", ["off", "log"])
def test_modes_that_do_not_act_never_go_back(mode):
    guard = Guard(replace(SMALL, mode=mode))
    assert [guard.judge(0, math.nan, 1.0, always) for _ in range(4)] == [Verdict.SKIP] * 3 + [Verdict.STOP]
    assert f"guard.mode={mode} never goes back" in guard.reason


def test_a_good_step_forgives():
    guard = Guard(SMALL)
    for step in range(30):
        verdict = guard.judge(step, math.nan if step % 4 else 2.0, 1.0, always)
        assert verdict is (Verdict.SKIP if step % 4 else Verdict.OK)


# ------------------------------------------------------------------------------------------------------------ spikes

@pytest.mark.parametrize("loss, norm, named", [(30.0, 1.0, "loss 30 is"), (3.0, 3.0, "gradient norm 3 is"),
                                               (3.0, 100.0, "gradient norm 100 is"), (4.0, 1.0, "loss 4 is")])
def test_spikes_are_skipped_noted_or_ignored(loss, norm, named):
    for mode, verdict in (("act", Verdict.SKIP), ("log", Verdict.SPIKE), ("off", Verdict.OK)):
        guard = filled(replace(SMALL, mode=mode))
        assert guard.judge(64, loss, norm, always) is verdict
        assert mode == "off" or named in guard.reason and "of the last 16 accepted steps" in guard.reason
        assert guard.judge(65, 3.0, 1.0, always) is Verdict.OK


def test_only_upward():
    guard = filled()
    assert guard.judge(64, 0.03, 1e-9, always) is Verdict.OK
    assert guard.judge(65, 0.0, 0.0, always) is Verdict.OK


def test_a_quiet_window_makes_no_spike_of_nothing():
    guard = Guard(SMALL)
    for step in range(64):
        guard.judge(step, 3.0, 1.0, always)
    assert guard.judge(64, 3.0 * 1.2, 2.5, always) is Verdict.OK
    assert guard.judge(65, 3.0 * 1.3, 1.0, always) is Verdict.SKIP
    assert guard.judge(65, 3.0, 2.9, always) is Verdict.SKIP


def test_a_steep_start_hides_no_tenfold_loss():
    guard = Guard(GuardConfig())
    for step in range(100):     # from 10.8 to 3.2 nats
        assert guard.judge(step, 3.0 + 7.8 * math.exp(-step / 30), 5 * math.exp(-step / 20) + 0.5, always) is Verdict.OK
    assert guard.judge(100, 32.0, 0.5, always) is Verdict.SKIP


def test_no_spike_before_half_the_window_is_known():
    guard = Guard(SMALL)
    for step in range(7):
        guard.judge(step, 3.0, 1.0, always)
    assert guard.judge(7, 300.0, 100.0, always) is Verdict.OK
    guard.judge(8, 3.0, 1.0, always)
    assert guard.judge(9, 300.0, 100.0, always) is Verdict.SKIP


def test_spikes_stay_out_of_the_window():
    guard = filled()
    before = guard.state()["accepted"]
    for _ in range(3):
        guard.judge(64, 30.0, 1.0, always)
        guard.judge(64, 3.0, math.nan, always)
        assert guard.state()["accepted"] == before
        guard.judge(64, 3.0, 1.0, always)
        before = guard.state()["accepted"]
    noting = filled(replace(SMALL, mode="log"))
    before = noting.state()["accepted"]
    noting.judge(64, 30.0, 1.0, always)
    assert noting.state()["accepted"] == before, "applied, and no measure of what is usual"


def test_no_false_alarm_on_the_demo_whose_norms_have_outliers():
    """demo_l_fp8: 1,024 tokens a step, single documents move the norm to 4.8 x its median, at a normal loss."""
    steps, guard = demo_steps(), Guard(GuardConfig())
    outliers = 0
    for i, (loss, norm) in enumerate(steps):
        window = sorted(math.log(n) for _, n in steps[max(0, i - 128):i])
        if len(window) == 128:
            middle = window[64]
            outliers += math.log(norm) - middle > 14.8 * sorted(abs(n - middle) for n in window)[64]
        assert guard.judge(i, loss, norm, always) is Verdict.OK, guard.reason
    assert len(steps) == 2567 and outliers >= 3, "what 10 robust standard deviations of the norm alone would have skipped"


@pytest.mark.parametrize("loss, norm, caught", [(10, 1, 1.0), (1, 30, 0.98), (1, 100, 1.0)])
def test_spikes_are_caught_in_the_demo(loss, norm, caught):
    steps, guard, rng, hit, at = demo_steps(), Guard(GuardConfig()), random.Random(1), 0, set()
    at = set(rng.sample(range(64, len(steps)), 100))
    for i, (usual_loss, usual_norm) in enumerate(steps):
        factors = (loss, norm) if i in at else (1, 1)
        verdict = guard.judge(i, usual_loss * factors[0], usual_norm * factors[1], always)
        hit += i in at and verdict is Verdict.SKIP
    assert hit >= 100 * caught


def test_false_alarms_and_hits_on_synthetic_norms():
    """Norms as log-AR(1) with t4 noise, 8,000 steps, 60 spikes of 3 to 100 x."""
    rng, guard, x, hit, false = random.Random(3), Guard(GuardConfig()), 0.0, 0, 0
    at = set(rng.sample(range(200, 8_000), 60))
    for step in range(8_000):
        t4 = rng.gauss(0, 1) / math.sqrt(rng.gammavariate(2, 2) / 4)
        x = 0.5 * x + 0.04 * t4
        norm = math.exp(x + (rng.uniform(math.log(3), math.log(100)) if step in at else 0))
        is_spike = guard.judge(step, 3 * math.exp(rng.gauss(0, 0.02)), norm, always) is Verdict.SKIP
        hit += is_spike and step in at
        false += is_spike and step not in at
    assert hit >= 59 and false <= 2, (hit, false)


# ------------------------------------------------------------------------------------- what lasts: divergence or a shift

def test_a_divergence_is_rolled_back_and_the_run_goes_on():
    def values(sick, data_step, rng):
        return quiet(rng, 3.0 * (2.5 if sick else 1), 8.0 if sick else 1.0)
    values.sickening = {59}
    done = run(SMALL, 200, values)
    assert done.verdicts[60:64] == [Verdict.SKIP] * 3 + [Verdict.ROLLBACK]
    assert done.verdicts[:60] + done.verdicts[64:] == [Verdict.OK] * 204
    assert not done.sick
    assert [done.data[s] for s in (55, 56, 57)] == [55, 64, 65], "back to 56; 56 to 63 are passed over"


def test_a_checkpoint_of_sick_weights_is_not_gone_back_to():
    def values(sick, data_step, rng):
        return quiet(rng, 3.0 * (2.5 if sick else 1))
    values.sickening = {63}     # the update before the save of step 64
    done = run(SMALL, 200, values)
    assert done.count[Verdict.ROLLBACK] == 1 and not done.sick
    assert done.data[56] == 56 + 68 - 56


def test_a_divergence_that_comes_back_ends_the_run():
    def values(sick, data_step, rng):
        return quiet(rng, 3.0 * (2.5 if sick else 1))
    values.sickening = set(range(50, 1000, 7))
    done = run(SMALL, 400, values)
    assert done.verdicts[-1] is Verdict.STOP and done.count[Verdict.ROLLBACK] == 2 and done.count[Verdict.SPIKE] == 0


@pytest.mark.parametrize("factor", [1.5, 2.0, 10.0])
def test_a_shift_of_the_data_is_accepted_after_one_rollback(factor):
    def values(sick, data_step, rng):
        return quiet(rng, 3.0 * (factor if data_step >= 60 else 1))
    done = run(SMALL, 300, values)
    assert done.count[Verdict.STOP] == 0 and done.count[Verdict.ROLLBACK] == 1 and done.count[Verdict.SPIKE] == 1
    assert done.count[Verdict.SKIP] == 2 * 3
    assert done.verdicts[-200:] == [Verdict.OK] * 200
    assert done.guard.judge(300, 3.0 * factor * 10, 1.0, always) is Verdict.SKIP, "and the new level is guarded"


def test_large_gradients_at_a_normal_loss_are_accepted_without_going_back():
    def values(sick, data_step, rng):
        return quiet(rng, 3.0, 9.0 if data_step >= 60 else 1.0)
    done = run(SMALL, 200, values, every=1000)
    assert done.count == {Verdict.OK: 196, Verdict.SPIKE: 1, Verdict.SKIP: 3, Verdict.ROLLBACK: 0, Verdict.STOP: 0}


def test_garbage_that_is_not_level_is_no_shift():
    def values(sick, data_step, rng):
        return quiet(rng, 3.0 * (rng.choice((4, 40, 400)) if data_step >= 60 else 1))
    done = run(SMALL, 300, values)
    assert done.verdicts[-1] is Verdict.STOP and done.count[Verdict.ROLLBACK] == 2 and done.count[Verdict.SPIKE] == 0


def test_a_slow_rise_is_followed():
    guard = Guard(GuardConfig())
    for step in range(2000):
        assert guard.judge(step, 2.0 * 1.001 ** step, 1.002 ** step, always) is Verdict.OK


def test_log_mode_notes_a_shift_and_follows_it():
    guard = filled(replace(SMALL, mode="log"))
    verdicts = [guard.judge(64 + i, 6.0, 1.0, always) for i in range(20)]
    assert verdicts == [Verdict.SPIKE] * 4 + [Verdict.OK] * 16
    assert guard.skipped == 0 and guard.consecutive == 0


# ------------------------------------------------------------------------------------------------------------- state

def test_resumed_at_any_step_it_judges_as_if_never_stopped():
    rng = random.Random(5)
    series = []
    for step in range(120):
        loss, norm = quiet(rng)
        series.append((loss * (5 if step in (40, 70, 71, 72, 73, 90, 91) else 1), math.nan if step in (50, 51, 92) else norm))
    whole, verdicts = Guard(SMALL), []
    for step, (loss, norm) in enumerate(series):
        verdicts.append(whole.judge(step, loss, norm, never))
        if verdicts[-1] is Verdict.STOP:
            break
    assert {Verdict.SKIP, Verdict.STOP, Verdict.OK} <= set(verdicts)
    for stop in range(len(verdicts)):
        guard = Guard(SMALL)
        for step, (loss, norm) in enumerate(series[:len(verdicts)]):
            if step == stop:
                guard = Guard(SMALL, json.loads(json.dumps(guard.state(), allow_nan=False)))
            assert guard.judge(step, loss, norm, never) is verdicts[step], (stop, step)
        assert guard.state() == whole.state()


@pytest.mark.parametrize("mode", ["off", "log", "act"])
def test_preparing_changes_no_verdict_and_no_state(mode):
    rng, settings, kept = random.Random(7), replace(SMALL, mode=mode), None
    prepared, plain = Guard(settings), Guard(settings)
    prepared.prepare()      # of a run that has seen nothing yet
    for step in range(400):
        loss, norm = quiet(rng, 3.0 * (4 if step % 90 > 80 else 1), 9.0 if step % 37 == 0 else 1.0)
        loss = math.nan if step % 53 == 0 else loss
        verdict = plain.judge(step, loss, norm, always)
        assert prepared.judge(step, loss, norm, always) is verdict
        assert prepared.state() == plain.state() and prepared.reason == plain.reason
        if verdict is Verdict.ROLLBACK:
            prepared.rolled_back(kept)
            plain.rolled_back(kept)
        elif verdict is Verdict.STOP:
            break
        prepared.prepare()
        kept = plain.state() if step % 50 == 20 else kept
    assert mode != "act" or plain.rollbacks


@pytest.mark.parametrize("mode", ["log", "act"])
def test_a_row_of_spikes_is_counted_on_across_a_resume_and_broken_by_a_nan(mode):
    guard = filled(replace(SMALL, mode=mode))
    for step in range(64, 67):
        guard.judge(step, 3.0, 9.0, always)
    resumed = Guard(guard.settings, json.loads(json.dumps(guard.state())))
    assert resumed.judge(67, 3.0, 9.0, always) is Verdict.SPIKE and "the last of 4 in a row" in resumed.reason
    if mode == "log":
        guard.judge(67, math.nan, 1.0, always)
        assert guard.judge(68, 3.0, 9.0, always) is Verdict.SPIKE and "in a row" not in guard.reason


def test_a_rollback_brings_back_the_window_but_not_the_counts():
    guard = filled()
    kept = guard.state()
    for step in range(64, 80):
        guard.judge(step, 4.0 - 0.01 * step, 1.0, always)
    guard.judge(80, math.nan, 1.0, always)
    skipped = guard.skipped
    guard.rolled_back(kept)
    assert guard.state() == {**kept, "skipped": skipped, "rollbacks": 1, "is_back": True}


def test_states_of_other_versions_and_windows_are_read():
    guard = Guard(SMALL, {"consecutive": 3, "skipped": 5})      # of format 1
    assert (guard.consecutive, guard.skipped, guard.rollbacks) == (3, 5, 0)
    assert guard.judge(9, math.nan, 1.0, never) is Verdict.STOP
    wide = filled(replace(SMALL, window=64))
    narrow = Guard(SMALL, wide.state())
    assert narrow.state()["accepted"] == wide.state()["accepted"][-16:]


def test_a_state_is_a_copy():
    guard = filled()
    kept = guard.state()
    text = json.dumps(kept)
    guard.judge(64, 30.0, 1.0, always)
    guard.judge(65, 3.0, 1.0, always)
    assert json.dumps(kept) == text


@pytest.mark.parametrize("mode, can_roll_back, verdict, said", [
    ("act", True, "ROLLBACK", ""), ("act", False, "STOP", ", and there is no checkpoint from before step 80 to go back to"),
    ("log", True, "STOP", ", and guard.mode=log never goes back")])
def test_weights_that_fail_a_validation_are_gone_back_from(mode, can_roll_back, verdict, said):
    guard = filled(replace(SMALL, mode=mode))
    kept = guard.state()
    assert guard.reject_validation(80, "validation loss nan", always if can_roll_back else never) is Verdict(verdict)
    assert guard.suspect_since == 80 and guard.reason == f"validation loss nan{said}"
    assert (guard.skipped, guard.consecutive) == (0, 0), "no step was skipped"
    guard.rolled_back(kept)
    assert guard.suspect_since is None and guard.rollbacks == 1


@pytest.mark.parametrize("wrong", [{"window": 0}, {"threshold": -1.0}, {"skips": 0}, {"rollbacks": -1}])
def test_settings_are_checked(tiny, wrong):
    with pytest.raises(UserError, match=f"guard.{next(iter(wrong))}="):
        replace(tiny, guard=GuardConfig(**wrong))


# ---------------------------------------------------------------------------------------------------------- train.py

def poison(monkeypatch, steps):
    """NaN in one gradient element at these steps (0-based, as the process counts them), injected behind the backward pass."""
    real, calls = train.parallel.clip_gradients, iter(range(10**6))

    def clip(model, max_norm):
        if next(calls) in steps:
            next(model.parameters()).grad.view(-1)[0] = math.nan
        return real(model, max_norm)

    monkeypatch.setattr(train.parallel, "clip_gradients", clip)


def states_of(config, monkeypatch, poisoned=()):
    """Weights and moments before each step of a run in this process."""
    states = []
    real = train.optim.set_learning_rate

    def spy(optimizer, lr):
        states.append([p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
                      + [s[k].clone() for s in optimizer.state.values() for k in s])
        real(optimizer, lr)

    with monkeypatch.context() as patch:
        patch.setattr(train.optim, "set_learning_rate", spy)
        poison(patch, poisoned)
        train.train(config, train.parallel.start(config))
    return states


def test_a_poisoned_step_changes_nothing_and_training_goes_on(tiny, monkeypatch):
    states = states_of(tiny, monkeypatch, poisoned={2, 3})
    assert all(torch.equal(a, b) for a, b in zip(states[2], states[3], strict=True)), "weights, moments, step counts"
    assert all(torch.equal(a, b) for a, b in zip(states[3], states[4], strict=True))
    assert all(t.isfinite().all() for t in states[5])
    assert not all(torch.equal(a, b) for a, b in zip(states[4], states[5], strict=True))
    rows = [r for r in train.metrics.read_rows(tiny.run_dir / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["verdict"] for r in rows] == ["OK", "OK", "SKIP", "SKIP", "OK", "OK"]
    assert rows[2]["grad_norm"] is None and rows[3]["reason"].endswith("2 skipped in a row")
    assert '"skipped_steps": 2' in (tiny.run_dir / "summary.json").read_text()


def test_nothing_but_nan_ends_with_a_diagnosis_and_exit_code_1(tiny, monkeypatch, tmp_path, capsys):
    poison(monkeypatch, set(range(100)))
    config = replace(tiny, steps=12, guard=GuardConfig(skips=4))
    done = call_train(capsys, config, tmp_path)
    assert done.returncode == 1
    assert re.search(r"step 4: loss [\d.]+, gradient norm nan; 4 skipped in a row, and there is no checkpoint from before step 0 "
                     r"to go back to: lower optim.lr", done.stderr)
    assert "not finite: all gradients" in done.stderr and "diagnosis.json" in done.stderr
    assert json.loads((config.run_dir / "diagnosis.json").read_text())["step"] == 4
    assert not (config.run_dir / "summary.json").exists()
