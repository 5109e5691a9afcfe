"""The mean of the weights of a run's last checkpoints: validated at its end (checkpoint.average),
exported and scored (average=), the same after a stop and on other numbers of ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval import harness
from eval.export import main as export
from lib.errors import UserError
from model import GPT
from runtime.checkpoint import (
    DamagedError,
    load_model,
    steps_to_average,
    whole_points_to_average,
)
from runtime.config import Config
from runtime.data import Data
from runtime.tokenizer import load_tokenizer
from runtime.validation import evaluate
from tests.conftest import asked, changed
from tests.helpers.faults import Run, checkpoint_folder, flip_bit, rows, summary

MEAN = "checkpoint.every=2 checkpoint.average=3 checkpoint.keep=1 checkpoint.best=false steps=7"


@pytest.fixture
def trained(tiny: Config, run: Callable[..., str]) -> Config:
    """Seven steps; the mean is of the checkpoints of steps 4, 6 and 7."""
    config = changed(tiny, MEAN)
    assert "of the mean of steps 4, 6, 7;" in run(config)
    return config


def mean_in_fp64(config: Config, steps: list[int]) -> dict[str, torch.Tensor]:
    """Of the weights of the checkpoints of these steps, each read by itself."""
    states = [load_model(config.run_dir, step=step)[0].state_dict() for step in steps]
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]
    }


def loss_of(weights: dict[str, torch.Tensor], config: Config) -> float:
    """Validation loss in BF16 of a plain model with these weights."""
    model = GPT(config.model)
    model.load_state_dict({name: t.float() for name, t in weights.items()})
    model.init_buffers()
    data = Data(config, *load_tokenizer("byte").hashes)
    cpu = torch.device("cpu")
    return evaluate(model, data.val, data.weights, config.micro_batch, cpu).loss


def test_a_summary_has_the_loss_of_the_mean_and_of_the_last_weights(trained: Config):
    of_run = summary(trained)
    assert of_run["averaged_steps"] == [4, 6, 7]
    assert of_run["loss_bf16_average"] == loss_of(mean_in_fp64(trained, [4, 6, 7]), trained)
    assert of_run["loss_bf16"] == loss_of(mean_in_fp64(trained, [7]), trained)
    assert of_run["loss_bf16_average"] != of_run["loss_bf16"]


def test_the_mean_changes_nothing_of_the_run(
    trained: Config, tiny: Config, run: Callable[..., str]
):
    without = changed(tiny, "run=without steps=7")
    run(without)
    of_run, of_other = summary(trained), summary(without)
    assert (of_other["loss_bf16_average"], of_other["averaged_steps"]) == (None, [])
    for key in ("loss_as_trained", "loss_bf16", "pair_id"):
        assert of_run[key] == of_other[key]
    last, other = (load_model(config.run_dir)[0] for config in (trained, without))
    for p, q in zip(last.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_run_resumed_after_a_stop_between_checkpoints_has_the_same_mean(
    trained: Config, tiny: Config, run: Callable[..., str]
):
    """The stop saves step 5, which belongs to no mean."""
    stopped = changed(tiny, f"run=stopped {MEAN}")
    start = Run(stopped, faults=["signal_in_step:5:0:10"])
    assert start.wait() == [0]
    assert "stopped on request at step 5" in start.output
    run(stopped)
    for key in ("loss_bf16_average", "averaged_steps", "loss_bf16"):
        assert summary(stopped)[key] == summary(trained)[key]


def test_a_run_stopped_while_the_mean_is_validated_ends_with_it_later(
    trained: Config, run: Callable[..., str]
):
    whole = summary(trained)
    (trained.run_dir / "summary.json").unlink()
    run(trained)
    assert summary(trained)["loss_bf16_average"] == whole["loss_bf16_average"]
    assert summary(trained)["loss_bf16"] == whole["loss_bf16"]


def test_a_damaged_checkpoint_is_left_out_of_the_mean(trained: Config, run: Callable[..., str]):
    flip_bit(next(checkpoint_folder(trained, 4).glob("*.distcp")), 5000)
    (trained.run_dir / "summary.json").unlink()
    out = run(trained)
    assert "step_00000004 is damaged, set aside as bad_step_00000004" in out
    of_run = summary(trained)
    assert of_run["averaged_steps"] == [6, 7]
    assert of_run["loss_bf16_average"] == loss_of(mean_in_fp64(trained, [6, 7]), trained)
    assert [row["event"] for row in rows(trained, "event")].count("bad_checkpoint") == 1


def test_a_damaged_newest_checkpoint_is_left_to_the_next_start(trained: Config):
    """Which trains its steps again: without it the run would have no last weights."""
    flip_bit(next(checkpoint_folder(trained, 7).glob("*.distcp")), 5000)
    with pytest.raises(DamagedError, match="step_00000007"):
        whole_points_to_average(trained.run_dir, 2, 3, print)
    assert checkpoint_folder(trained, 7).exists()


@pytest.mark.parametrize("words", ["parallel.shard=2", "parallel.shard=1 fp8.recipe=tensorwise"])
def test_two_ranks_validate_the_mean_of_their_checkpoints(trained: Config, words: str):
    together = changed(trained, f"run=together {words}")
    assert Run(together, ranks=2).wait() == [0, 0]
    expected = loss_of(mean_in_fp64(together, [4, 6, 7]), together)
    assert summary(together)["loss_bf16_average"] == pytest.approx(expected, rel=1e-6)


def test_a_loaded_mean_is_that_of_fp64_rounded_once(trained: Config):
    for name, t in load_model(trained.run_dir, average=3)[0].state_dict().items():
        assert torch.equal(t, mean_in_fp64(trained, [4, 6, 7])[name].float())


def test_a_step_and_a_mean_end_with_that_step(trained: Config):
    weights = load_model(trained.run_dir, step=6, average=2)[0].state_dict()
    expected = mean_in_fp64(trained, [4, 6])
    assert all(torch.equal(t, expected[name].float()) for name, t in weights.items())


@pytest.mark.parametrize(
    "average, sentence",
    [
        (5, r"average=5: of the checkpoints of every 2 steps .* has 3 up to step_00000007"),
        (0, "=0"),
    ],
)
def test_more_checkpoints_than_there_are_cannot_be_averaged(
    trained: Config, average: int, sentence: str
):
    with pytest.raises(UserError, match=sentence):
        load_model(trained.run_dir, average=average)


@pytest.mark.parametrize(
    "words, n_saved",
    [("checkpoint.every=4", 2), ("checkpoint.every=none", 0), ("checkpoint.every=9", 1)],
)
def test_a_mean_of_more_checkpoints_than_are_saved_is_refused(
    tiny: Config, words: str, n_saved: int
):
    with pytest.raises(
        UserError, match=f"average=3 needs as many .* saves {n_saved} in steps 1 to"
    ):
        changed(tiny, f"{MEAN} {words}")


def test_a_branch_counts_its_own_checkpoints(tiny: Config):
    start = "start_from=out/trunk/checkpoints/step_00000004"
    with pytest.raises(UserError, match="saves 2 in steps 5 to 7"):
        changed(tiny, f"{MEAN} run=branch {start}")


def test_steps_of_a_mean_by_hand():
    assert steps_to_average([2, 3, 4, 6, 7], 2, 3) == [4, 6, 7]
    assert steps_to_average([2, 3, 4, 5, 6], 2, 2) == [4, 6]
    assert steps_to_average([5, 9], None, 2) == [9]


# ----------------------------------------------------------------------------- export and scores


def test_an_export_holds_the_mean_and_says_so(
    trained: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = (trained.run_dir, tmp_path / "hf", "dtype=fp32", "average=3")
    assert "the mean of the last 3 checkpoints" in asked(capsys, export, *words)
    weights = load_file(tmp_path / "hf/model.safetensors")
    expected = mean_in_fp64(trained, [4, 6, 7])["norm.weight"].float()
    assert torch.equal(weights["model.norm.weight"], expected)
    assert "mean of the last 3 checkpoints" in (tmp_path / "hf/README.md").read_text()


def test_scores_are_of_the_mean_and_lie_apart(trained: Config, capsys: pytest.CaptureFixture[str]):
    scores = {}
    for average in (1, 3):
        asked(capsys, harness.main, trained.run_dir, "tasks=val_ppl", f"average={average}")
    for name in ("val_ppl.json", "val_ppl_average3.json"):
        record = json.loads((trained.run_dir / "eval" / name).read_text())
        scores[record["average"]] = record["tasks"]["val_ppl"]["bits_per_byte"]
    nats = {1: summary(trained)["loss_bf16"], 3: summary(trained)["loss_bf16_average"]}
    assert scores[3] / scores[1] == pytest.approx(nats[3] / nats[1], rel=0.02)
    assert scores[3] != scores[1]


def test_means_of_public_models_are_refused(capsys: pytest.CaptureFixture[str]):
    words = ("hf:gpt2", "tasks=piqa", "average=2")
    assert "average= and the demo tasks" in asked(capsys, harness.main, *words, code=2)
