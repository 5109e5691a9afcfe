"""runtime/ramp.py and data.ramp in a run: the same tokens in the same order, cut into other steps;
rates by tokens, resume, ranks, branches, rollbacks, plan."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from fp8.precision import Precision
from lib.errors import UserError
from runtime.config import Config
from runtime.data import Data
from runtime.optim import check_branch, learning_rate
from runtime.plan import plan
from runtime.ramp import Place, ramp_of
from runtime.tokenizer import load_tokenizer
from scaling.study import expand, load_study
from tests.conftest import ROOT, changed
from tests.helpers.faults import Run, back_to, record, rows, summary

# of six full steps two in quarters, one in halves
RAMP = "data.ramp=0.3:0.25,0.5:0.5 data.micro_batch=2"
TOKENS = 8 * [128] + 2 * [256] + 3 * [512]


def test_places_are_those_counted_by_hand():
    ramp = ramp_of("0.25:0.25,0.5:.5", 4)
    quarters = [Place(0, part, 4) for part in range(4)]
    halves = [Place(1, 0, 2), Place(1, 1, 2)]
    whole = [Place(2, 0, 1), Place(3, 0, 1), Place(4, 0, 1)]  # the last one beyond the run
    assert [ramp.place(step) for step in range(9)] == quarters + halves + whole
    assert (ramp.steps, ramp.small_steps) == (8, 6)


def test_without_a_ramp_every_step_is_a_full_one():
    ramp = ramp_of(None, 7)
    assert [ramp.place(step) for step in range(9)] == [Place(step, 0, 1) for step in range(9)]
    assert (ramp.steps, ramp.small_steps, ramp.describe(512)) == (7, 0, [])


def test_a_stage_too_short_for_a_full_step_is_left_out():
    assert [ramp_of("0.01:0.25,0.5:0.5", 4).place(step).parts for step in range(5)] == [2] * 4 + [1]


def test_a_third_may_be_written_with_two_digits():
    assert ramp_of("0.5:0.33", 2).place(2) == Place(0, 2, 3)


@pytest.mark.parametrize(
    "text",
    ["0.1", "0.1:0.25:3", "a:b", "0.5:0.25,0.3:0.5", "0.1:0.5,0.3:0.5", "0.1:0.5,0.3:0.25"]
    + ["1:0.5", "0:0.5", "0.5:1", "0.5:0.75", "0.5:0", "-0.1:0.5", "0.1:0.5,"],
)
def test_what_is_no_ramp_is_refused(tiny: Config, text: str):
    with pytest.raises(UserError, match=r"data.ramp='.*' must be written share of the run's tok"):
        changed(tiny, f"data.ramp={text}")


@pytest.mark.parametrize("words, ranks", [("data.micro_batch=8", 1), ("data.micro_batch=4", 2)])
def test_each_size_of_step_must_divide_into_micro_batches(tiny: Config, words: str, ranks: int):
    with pytest.raises(UserError, match=r"=512, cut into 4 by data.ramp, cannot be shared by \d"):
        changed(tiny, f"{RAMP} {words}").accumulation(ranks)


def test_constant_scales_are_refused(tiny: Config):
    with pytest.raises(UserError, match=r"fp8.recipe=cscale has constant scales"):
        changed(tiny, f"{RAMP} fp8.recipe=cscale")


# ------------------------------------------------------------------------------------------- data


def sequences(config: Config, ranks: int) -> list[np.ndarray]:
    """The inputs of each step, (sequences, T), as `ranks` ranks read them."""
    data = Data(config, *load_tokenizer("byte").hashes)
    steps = []
    for step in range(config.total_steps):
        n_micro = config.accumulation(ranks, config.ramp.place(step).parts)
        batches = [
            data.batch(step, micro, rank, ranks)[0]
            for micro in range(n_micro)
            for rank in range(ranks)
        ]
        steps.append(np.concatenate(batches))
    return steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_and_their_order_are_those_without_a_ramp(tiny: Config, ranks: int):
    ramped = sequences(changed(tiny, RAMP), ranks)
    assert [step.size for step in ramped] == TOKENS
    assert np.array_equal(np.concatenate(ramped), np.concatenate(sequences(tiny, 1)))


def test_a_loader_gives_the_steps_in_their_sizes(tiny: Config):
    config = changed(tiny, RAMP)
    data = Data(config, *load_tokenizer("byte").hashes)
    streamed = [x.numpy() for x, _ in data.stream(7, 13, 0, 1, "cpu")]
    expected = np.concatenate(sequences(config, 1)[7:])
    assert np.array_equal(np.concatenate(streamed), expected)


def test_targets_are_those_of_the_step(tiny: Config):
    data = Data(changed(tiny, RAMP), *load_tokenizer("byte").hashes)
    assert [data.targets(step) for step in range(13)] == TOKENS


def test_a_rollback_reads_no_token_twice_and_skips_less_than_a_full_step():
    """From any step back to any earlier one, also between stages of different sizes."""
    ramp = ramp_of("0.3:0.25,0.5:0.5", 6)
    position = {step: ramp.place(step).position for step in range(ramp.steps + 1)}
    for last in range(1, ramp.steps + 1):
        for first in range(last):
            offset = ramp.full_steps_between(first, last)
            left_out = position[first] + offset - position[last]
            assert 0 <= left_out < 1


# ---------------------------------------------------------------------------------- in a whole run


@pytest.fixture
def trained(tiny: Config, run: Callable[..., str]) -> Config:
    config = changed(tiny, f"{RAMP} eval.every=4 checkpoint.keep=9")
    run(config)
    return config


def test_rows_count_tokens_and_the_summary_has_all_of_them(trained: Config):
    tokens = [row["tokens"] for row in rows(trained)]
    assert tokens == np.cumsum(TOKENS).tolist()
    validations = [(row["step"], row["tokens"]) for row in rows(trained, "val")]
    assert validations == [(4, 512), (8, 1024), (12, 2560), (13, 3072)]
    of_run = summary(trained)
    assert (of_run["steps"], of_run["tokens"], of_run["tokens_per_step"]) == (13, 3072, 512)


def test_the_speed_is_that_of_full_steps(trained: Config):
    full = [row for row in rows(trained)[10:] if row["since_start"] > 3]
    assert summary(trained)["step_s_median"] == sorted(row["step_s"] for row in full)[1]
    small = rows(trained)[5]
    assert small["tok_per_s"] == pytest.approx(128 / small["step_s"])


def test_the_learning_rate_is_that_of_the_full_step(trained: Config):
    full_steps = 4 * [0] + 4 * [1] + 2 * [2] + [3, 4, 5]
    expected = [learning_rate(step, 6, trained.optim) for step in full_steps]
    assert [row["lr"] for row in rows(trained)] == expected


def test_small_steps_train_what_a_run_of_small_steps_trains(tiny: Config, run: Callable[..., str]):
    """Bit for bit, at a rate that stays."""
    still = "optim.schedule=wsd optim.warmup_share=0 optim.decay_share=0.1"
    ramped = changed(tiny, f"run=ramped {RAMP} {still}")
    small = changed(tiny, f"run=small {still} data.tokens_per_step=128 data.micro_batch=2 steps=24")
    run(ramped)
    run(small)
    keys = ("tokens", "loss", "grad_norm", "lr")
    seen, expected = ([[row[k] for k in keys] for row in rows(c)] for c in (ramped, small))
    assert seen[:8] == expected[:8]
    assert seen[8] != expected[8]


@pytest.mark.parametrize("step", [3, 9])
def test_killed_within_a_full_step_and_resumed_a_run_ends_in_the_same_bits(
    trained: Config, run: Callable[..., str], step: int
):
    whole = record(trained)
    back_to(trained, step)
    run(trained)
    assert record(trained) == whole


def test_two_ranks_train_what_one_process_trains(trained: Config):
    together = changed(trained, "run=together")
    assert Run(together, ranks=2).wait() == [0, 0]
    losses = [row["loss"] for row in rows(trained)]
    assert [row["loss"] for row in rows(together)] == pytest.approx(losses, rel=2e-3)
    assert [row["tokens"] for row in rows(together)] == np.cumsum(TOKENS).tolist()


def test_a_run_goes_on_only_with_its_ramp(trained: Config, run: Callable[..., str]):
    back_to(trained, 3)
    assert "data.ramp was 0.3:0.25,0.5:0.5, now None" in run(trained, "data.ramp=none", code=2)


def test_the_start_and_the_plan_say_how_large_steps_are(tiny: Config, run: Callable[..., str]):
    config = changed(tiny, RAMP)
    line = (
        "8 steps of 128 tokens, then 2 steps of 256 tokens, then 3 steps of 512 tokens: 13 in all"
    )
    assert f"data.ramp: {line}" in run(config)
    page = "\n".join(plan(config, ""))
    assert line in page and "3,072" in page
    assert re.search(r"^  steps +6  +of 512 tokens", page, re.M), "of full size, or tokens disagree"


# ------------------------------------------------------------------------------------------ branch


def branch(trunk: Config, ramp: str, step: int = 9) -> Config:
    """A shorter branch off a step of the trunk, the ninth within its second stage."""
    words = "optim.schedule=wsd optim.decay_share=0.2 optim.warmup_share=0"
    start = f"start_from={trunk.run_dir}/checkpoints/step_{step:08d}"
    return changed(trunk, f"run=branch steps=6 data.ramp={ramp} {words} {start}")


@pytest.fixture
def trunk(tiny: Config) -> Config:
    words = "optim.schedule=wsd optim.decay_share=0.1 optim.warmup_share=0 steps=10"
    return changed(tiny, f"data.micro_batch=2 data.ramp=0.2:0.25,0.3:0.5 {words}")


def test_a_branch_says_which_ramp_has_its_parents_steps_and_takes_it(trunk: Config):
    with pytest.raises(UserError) as refusal:
        check_branch(branch(trunk, "0.2:0.25,0.3:0.5"), trunk, 9)
    sentence = str(refusal.value)
    assert "step 5 of tiny had 128 tokens, here" in sentence
    remedy = sentence.rpartition("data.ramp=")[2]
    assert remedy == "0.3333333333333333:0.25,0.5:0.5"
    check_branch(branch(trunk, remedy), trunk, 9)


def test_a_branch_without_its_parents_ramp_is_refused(trunk: Config):
    with pytest.raises(UserError, match="set data.ramp=0.3333333333333333:0.25"):
        check_branch(branch(trunk, "none", step=4), trunk, 4)


def test_steps_of_a_stage_are_as_many_as_the_tokens_ask_for():
    ramp = ramp_of("0.1:0.25,0.3:0.5", 1000)
    assert Counter(ramp.place(step).parts for step in range(ramp.steps)) == {4: 400, 2: 400, 1: 700}


def test_positions_of_stochastic_rounding_count_the_tokens_of_the_run(
    tiny: Config, run: Callable[..., str]
):
    with mock.patch.object(Precision, "set_position", autospec=True) as placed:
        run(changed(tiny, RAMP))
    assert [call.args[1] for call in placed.call_args_list] == list(range(0, 3072, 64))


def test_a_study_refuses_a_ramp():
    """A share of each budget: its branches would not have the first steps of their trunk."""
    study = load_study(ROOT / "configs/study_demo.py")
    with pytest.raises(UserError, match="data.ramp=0.5:0.5 of .* is a share of each budget"):
        expand(replace(study, overrides=("data.ramp=0.5:0.5", "data.micro_batch=4")))
