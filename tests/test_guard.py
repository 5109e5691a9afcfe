import math
from dataclasses import replace

import pytest
import torch

import train
from runtime.guard import MAX_CONSECUTIVE, Guard, GuardError, Verdict


@pytest.mark.parametrize("loss, norm, verdict", [
    (2.0, 1.0, "OK"), (2.0, 1e30, "OK"), (math.nan, 1.0, "SKIP"), (math.inf, 1.0, "SKIP"), (2.0, math.nan, "SKIP"),
    (2.0, math.inf, "SKIP")])
def test_non_finite_steps_are_skipped(loss, norm, verdict):
    assert Guard().judge(0, loss, norm) is Verdict(verdict)


def test_too_many_in_a_row_stop_the_run_and_a_good_one_forgives():
    guard = Guard()
    for _ in range(MAX_CONSECUTIVE - 1):
        guard.judge(0, math.nan, 1.0)
    guard.judge(0, 1.0, 1.0)
    assert guard.state() == {"consecutive": 0, "skipped": MAX_CONSECUTIVE - 1}
    guard = Guard(**guard.state())
    for _ in range(MAX_CONSECUTIVE - 1):
        guard.judge(0, math.nan, 1.0)
    with pytest.raises(GuardError, match=r"^step 42: loss nan, gradient norm 1.0; not one finite step in the last 10"):
        guard.judge(41, math.nan, 1.0)


def poison(monkeypatch, steps):
    """NaN in one gradient element at these steps (0-based), injected behind the backward pass."""
    real, calls = train.parallel.clip_gradients, iter(range(10**6))

    def clip(model, max_norm):
        if next(calls) in steps:
            next(model.parameters()).grad.view(-1)[0] = math.nan
        return real(model, max_norm)

    monkeypatch.setattr(train.parallel, "clip_gradients", clip)


def run(config, monkeypatch, poisoned=()):
    """Weights and moments after each step of a run in this process."""
    states = []
    real = train.optim.set_learning_rate

    def spy(optimizer, lr):
        states.append([p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
                      + [s[k].clone() for s in optimizer.state.values() for k in s])
        real(optimizer, lr)

    with monkeypatch.context() as patch:
        patch.setattr(train.optim, "set_learning_rate", spy)
        poison(patch, poisoned)
        world = train.parallel.start(config)
        train.train(config, world)
    return states


def test_a_poisoned_step_changes_nothing_and_training_goes_on(tiny, monkeypatch):
    states = run(tiny, monkeypatch, poisoned={2, 3})
    assert all(torch.equal(a, b) for a, b in zip(states[2], states[3], strict=True)), "weights, moments, step counts"
    assert all(torch.equal(a, b) for a, b in zip(states[3], states[4], strict=True))
    assert all(t.isfinite().all() for t in states[5])
    assert not all(torch.equal(a, b) for a, b in zip(states[4], states[5], strict=True))
    rows = train.metrics.read_rows(tiny.run_dir / "metrics.jsonl")
    assert [r["verdict"] for r in rows if r["kind"] == "train"] == ["OK", "OK", "SKIP", "SKIP", "OK", "OK"]
    assert rows[2]["grad_norm"] is None
    assert '"skipped_steps": 2' in (tiny.run_dir / "summary.json").read_text()


def test_nothing_but_nan_ends_with_exit_code_1(tiny, monkeypatch, tmp_path, capsys):
    from tests.conftest import write_config
    poison(monkeypatch, set(range(100)))
    config = replace(tiny, steps=12)
    assert train.main([str(write_config(config, tmp_path / "c.py"))]) == 1
    assert "not one finite step in the last 10: lower optim.lr" in capsys.readouterr().err
    assert not (config.run_dir / "summary.json").exists()
