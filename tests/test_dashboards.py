"""W&B and TensorBoard get the rows, through rollbacks and resumes too; what they cannot take costs no step."""

import sys
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest

from runtime.config import LogConfig
from tests.test_metrics import log, read, rolled_back, row, val


class FakeWandb(types.ModuleType):
    """What the real one insists on: a step of its own that never goes back; what is logged below it is dropped."""

    def __init__(self):
        super().__init__("wandb")
        self.options, self.axes, self.rows, self.step, self.is_finished = {}, {}, [], -1, False

    def init(self, **options):
        self.options = options
        return self

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values, step=None):
        self.step = self.step + 1 if step is None else step
        if not self.rows or self.step > self.rows[-1][0]:
            self.rows.append((self.step, values))

    def finish(self):
        self.is_finished = True


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_same_rows(tiny, wandb):
    one = log(replace(tiny, log=LogConfig(to=("wandb",))))
    one.step(row(1))
    one.validation(val(1))
    one.close()
    assert (wandb.options["name"], wandb.options["id"], wandb.options["resume"]) == ("tiny", "tiny", "allow")
    assert "mode" not in wandb.options      # WANDB_MODE=offline decides
    expected = {f"train/{k}": v for k, v in {**row(1), "since_start": 1}.items() if k not in ("step", "verdict")}
    assert [values for _, values in wandb.rows] == [{**expected, "step": 1}, {"val/tokens": 512, "val/loss": 1.5, "step": 1}]
    assert wandb.is_finished


def test_wandb_sees_a_rollback_and_what_follows(tiny, wandb):
    one = rolled_back(replace(tiny, log=LogConfig(to=("wandb",))))
    one.step(row(7, verdict="SKIP"))
    one.close()
    assert wandb.axes == {"step": None, "train/*": "step", "val/*": "step", "event/*": "step"}
    sent = [values for _, values in wandb.rows]
    assert [v["step"] for v in sent if "train/loss" in v] == [1, 2, 3, 4, 5, 6, 5, 6, 7]    # nothing was dropped
    assert [v for v in sent if any(key.startswith("event/rollback") for key in v)] == [{"event/rollback": 1, "step": 6}]
    assert sent[-1]["event/SKIP"] == 1


class FakeTensorBoard:
    """SummaryWriter's contract: a writer with purge_step hides what was written before at that step or later."""
    shown: list

    def __init__(self, folder, purge_step=None):
        FakeTensorBoard.shown = [(s, k, v) for s, k, v in FakeTensorBoard.shown if s < purge_step]
        self.is_open = True

    def add_scalar(self, key, value, step):
        assert self.is_open
        FakeTensorBoard.shown.append((step, key, value))

    def close(self):
        self.is_open = False


@pytest.fixture
def tensorboard(monkeypatch):
    FakeTensorBoard.shown = []
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=FakeTensorBoard))


def test_tensorboard_shows_neither_undone_nor_repeated_steps(tiny, tensorboard):
    config = replace(tiny, log=LogConfig(to=("tensorboard",)))
    rolled_back(config).close()
    again = log(config, resume=5)
    again.step(row(6, loss=7.0))
    again.close()
    assert [(s, v) for s, k, v in FakeTensorBoard.shown if k == "train/loss"] == [
        (1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, 9.0), (6, 7.0)]
    assert [s for s, k, _ in FakeTensorBoard.shown if k == "val/loss"] == [2, 4]


@pytest.mark.parametrize("verb", ["init", "define_metric", "log", "finish"])
def test_a_dashboard_that_is_down_costs_no_step(tiny, wandb, capsys, monkeypatch, verb):
    def down(*arguments, **options):
        raise RuntimeError("CommError: no route to host")
    monkeypatch.setattr(wandb, verb, down)
    one = rolled_back(replace(tiny, log=LogConfig(to=("wandb",))))
    one.close()
    assert len(read(tiny)) == 12
    said = [line for line in capsys.readouterr().out.splitlines() if "log.to=wandb" in line]
    assert len(said) == 1 and "no route to host; from here on only metrics.jsonl is written" in said[0]
