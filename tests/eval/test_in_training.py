"""Tests of eval/in_training.py and eval/exchange.py: scores of a run while it trains are the
harness's own, on one rank and two; a failed or stopped scoring does not end the run."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import train
from eval import demo_questions, harness, in_training, results, tasks
from eval.exchange import RankFailed, RankStopped, work_together
from lib.errors import UserError
from model import GPT
from runtime import parallel
from runtime.config import Config
from tests.conftest import ALONE, changed, tiny_config, write_shards
from tests.helpers import eval_runs
from tests.helpers.faults import back_to, on_ranks, record, rows, saved_steps, train_as_rank

WORDS = (
    "run=scored eval.tasks=demo eval.tasks_every=3 eval.tasks_limit=12 checkpoint.at=3"
    " model.n_ctx=128 data.micro_batch=2"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Six steps on documents of which the demo's two tasks can be made."""
    folder = tmp_path_factory.mktemp("scored")
    rng = np.random.default_rng(0)
    for name in ("web", "code"):
        splits = {}
        for split, count in ("train", 120), ("val", 40):
            words = [rng.integers(97, 123, 400).astype("<u2") for _ in range(count)]
            for text in words:
                text[0], text[5::7] = 256, 32  # end of text; blanks
            splits[split] = [np.concatenate(words)]
        write_shards(folder / "data" / name, splits)
    return changed(tiny_config(folder / "data", folder / "out"), WORDS)


@pytest.fixture(scope="module")
def scored(base: Config) -> Config:
    """The same, finished."""
    with mock.patch.object(demo_questions, "QUESTIONS", 20):
        train.train(base, ALONE)
    return base


def harness_scores(config: Config, step: int) -> dict[str, float]:
    """task/metric -> what eval.harness says of the checkpoint of that step."""
    options = harness.Options(
        run=str(config.run_dir), tasks=("demo",), limit=12, device="cpu", step=step
    )
    with mock.patch.object(demo_questions, "QUESTIONS", 20):
        scores = harness.score(options, ALONE)
    return {
        f"{task}/{name}": metric.value
        for task, of_task in scores.tasks.items()
        for name, metric in of_task.metrics.items()
    }


def scores_by_step(config: Config) -> dict[int, dict[str, float]]:
    return {row["step"]: row["scores"] for row in rows(config, "tasks")}


# --------------------------------------------------------------------------------------- the scores


def test_scores_are_due_every_so_many_steps_and_at_the_end(scored: Config) -> None:
    longer = changed(scored, "run=uneven eval.tasks_every=4")
    with mock.patch.object(demo_questions, "QUESTIONS", 20):
        train.train(longer, ALONE)
    assert [*scores_by_step(scored)] == [3, 6]
    assert [*scores_by_step(longer)] == [4, 6]


@pytest.mark.parametrize("step", [3, 6])
def test_scores_are_the_harness_own_of_the_checkpoint_of_that_step(
    step: int, scored: Config
) -> None:
    expected = harness_scores(scored, step)
    assert scores_by_step(scored)[step] == expected
    assert {"val_cloze/acc", "val_ppl/bits_per_byte"} <= set(expected)


def test_a_row_says_what_it_was_measured_on(scored: Config) -> None:
    row = rows(scored, "tasks")[0]
    assert (row["step"], row["tokens"], row["limit"]) == (3, 3 * 512, 12)
    assert row["se"]["val_cloze/acc"] == pytest.approx(
        (row["scores"]["val_cloze/acc"] * (1 - row["scores"]["val_cloze/acc"]) / 11) ** 0.5
    )
    assert row["wall_s"] > 0


def test_a_row_counts_the_tokens_of_smaller_steps(base: Config) -> None:
    """Of six full steps two in quarters, one in halves: step 13 ends them all."""
    config = changed(base, "run=ramped data.ramp=0.3:0.25,0.5:0.5 data.micro_batch=1")
    with mock.patch.object(demo_questions, "QUESTIONS", 20):
        train.train(config, ALONE)
    last = rows(config, "tasks")[-1]
    assert (last["step"], last["tokens"]) == (13, 6 * 512)
    assert last["tokens"] == rows(config, "val")[-1]["tokens"]


def test_scoring_changes_no_bit_of_the_training(scored: Config) -> None:
    plain = changed(scored, "run=plain eval.tasks= eval.tasks_every=none eval.tasks_limit=none")
    train.train(plain, ALONE)
    assert record(plain) == record(scored)


@pytest.mark.parametrize(
    "words", ["fp8.recipe=tensorwise fp8.kernels=true fp8.scaling=delayed", "optim.kind=muon"]
)
def test_scores_do_not_depend_on_how_the_run_computes(words: str, base: Config) -> None:
    config = changed(base, f"run=other_{words[:5]} steps=3 {words}")
    with mock.patch.object(demo_questions, "QUESTIONS", 20):
        train.train(config, ALONE)
    assert scores_by_step(config)[3] == harness_scores(config, 3)


def test_a_copy_of_the_weights_takes_two_bytes_a_parameter(base: Config) -> None:
    """And its RoPE tables, which BF16 would blur, are the model's own."""
    model = GPT(base.model)
    model.init_weights(1)
    exchange = in_training.Exchange(ALONE, lambda: False)
    copy = in_training._whole_copy(model, ALONE.device, exchange)
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}
    assert copy.head.weight is copy.wte.weight
    assert torch.equal(copy.cos, model.cos) and torch.equal(copy.sin, model.sin)
    for p, original in zip(copy.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, original.to(torch.bfloat16))


# ------------------------------------------------------------------------------- resume, two ranks


def test_a_run_killed_between_save_and_scores_is_scored_after_its_resume(scored: Config) -> None:
    killed = changed(scored, "run=killed")
    with mock.patch.object(demo_questions, "QUESTIONS", 20):
        train.train(killed, ALONE)
        back_to(killed, 3)
        path = killed.run_dir / "metrics.jsonl"
        lines = [line for line in path.read_text().splitlines() if '"tasks"' not in line]
        path.write_text("\n".join(lines) + "\n")
        train.train(killed, ALONE)
    assert scores_by_step(killed) == scores_by_step(scored)
    assert record(killed) == record(scored)


def test_a_resume_keeps_the_scores_there_are(scored: Config) -> None:
    resumed = changed(scored, "run=resumed")
    with mock.patch.object(demo_questions, "QUESTIONS", 20):
        train.train(resumed, ALONE)
        back_to(resumed, 3)
        train.train(resumed, ALONE)
    assert [row["step"] for row in rows(resumed, "tasks")] == [3, 6]


@dataclass
class Scoring:
    """What each of two ranks is told."""

    config: Config
    broken_rank: int | None = None  # which cannot build its questions, for whatever reason


def train_and_score(job: Scoring) -> None:
    demo_questions.QUESTIONS = 20
    if int(os.environ["RANK"]) == job.broken_rank:
        tasks.watch_requests = mock.Mock(side_effect=ValueError("this rank's copy is damaged"))
    train_as_rank([job.config])


@pytest.mark.parametrize("words", ["parallel.shard=2", "parallel.shard=1"])
def test_two_ranks_share_the_scoring(words: str, scored: Config, tmp_path: Path) -> None:
    """Of a sharded model too, whose weights no rank has whole."""
    two = changed(scored, f"run=two_{words[-1]} {words}")
    on_ranks(2, train_and_score, Scoring(two), tmp_path / "log")
    assert scores_by_step(two)[6] == harness_scores(two, 6)
    assert [*scores_by_step(two)] == [3, 6]


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_the_failure_of_one_rank_is_said_and_both_train_on(
    broken_rank: int, scored: Config, tmp_path: Path
) -> None:
    config = changed(scored, f"run=broken_{broken_rank} parallel.shard=2")
    on_ranks(2, train_and_score, Scoring(config, broken_rank), tmp_path / "log")
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4, 5, 6]
    assert (config.run_dir / "summary.json").exists() and not rows(config, "tasks")
    failures = [row for row in rows(config, "event") if row["event"] == "tasks_failed"]
    assert [row["step"] for row in failures] == [3, 6]
    assert all("ValueError: this rank's copy is damaged" in row["reason"] for row in failures)


# ------------------------------------------------------------------------------- failures and stops


@pytest.mark.parametrize(
    "words, reason",
    [
        ("eval.tasks=no_such_task", "there is no task 'no_such_task'"),
        ("eval.tasks=piqa eval.tasks_offline=/nowhere", "the task 'piqa' could not be loaded"),
    ],
)
def test_tasks_that_cannot_be_loaded_cost_the_scores_alone(
    words: str,
    reason: str,
    base: Config,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A run sets this before it imports the libraries, which this process has done long ago: they
    # would ask the network eight times, with pauses of 23 s.
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = changed(base, f"run=failing_{words[11:14]} {words} eval.tasks_every=none")
    train.train(config, ALONE)
    (event,) = [row for row in rows(config, "event") if row["event"] == "tasks_failed"]
    assert event["step"] == 6 and reason in event["reason"]
    assert reason in capsys.readouterr().out
    assert (config.run_dir / "summary.json").exists()


def test_a_download_that_hangs_is_left_behind_once(base: Config, tmp_path: Path) -> None:
    import threading

    config = changed(base, f"run=hanging out={tmp_path} parallel.start_timeout=2")
    gate = threading.Event()
    with mock.patch.object(tasks, "load", lambda *_: gate.wait(60)) as _:
        train.train(config, ALONE)
    gate.set()
    reasons = [row["reason"] for row in rows(config, "event") if row["event"] == "tasks_failed"]
    assert len(reasons) == 2
    assert "did not load within 1 s" in reasons[0] and "not tried again" in reasons[1]


def test_a_stop_while_scoring_is_heard_and_the_resume_scores(
    scored: Config,
) -> None:
    stopped = changed(scored, "run=stopped")
    genuine = train.Run._note_scoring

    def stop_at_step_3(run: train.Run) -> bool:
        if run.progress.step == 3:
            run.stop.set()
        return genuine(run)

    with mock.patch.object(demo_questions, "QUESTIONS", 20):
        with mock.patch.object(train.Run, "_note_scoring", stop_at_step_3):
            train.train(stopped, ALONE)
        assert saved_steps(stopped)[-1] == 3 and not rows(stopped, "tasks")
        train.train(stopped, ALONE)
    assert scores_by_step(stopped) == scores_by_step(scored)
    assert record(stopped) == record(scored)


@pytest.mark.parametrize("done_before", [0, 1, 2])
def test_what_one_rank_raises_between_exchanges_is_met_by_both(
    done_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails after so many of two exchanges; rank 0 is on its way to the next, or has done
    all of its work."""

    def work(world: parallel.World) -> object:
        def two_exchanges(exchange: in_training.Exchange) -> list:
            seen = []
            for number in range(2):
                if world.rank and number == done_before:
                    raise KeyError("gone")
                seen.append(exchange(number))
            if world.rank and done_before == 2:
                raise KeyError("gone")
            return seen

        return work_together(two_exchanges, world, lambda: False)

    for error in eval_runs.on_two_ranks(monkeypatch, checkpoint_gather(), work):
        assert isinstance(error, RankFailed) and str(error) == "KeyError: 'gone'"


def test_a_task_that_ends_its_process_fails_as_any_other() -> None:
    """Its rank alone would be gone, and the others would wait for it."""
    with pytest.raises(RankFailed, match="SystemExit: no data"):
        work_together(lambda exchange: sys.exit("no data"), ALONE, lambda: False)


def test_a_rank_that_fails_tells_the_watchdog_as_often_as_the_others() -> None:
    """Or it would be one behind for good, and blamed for a hang of another."""
    asked: list[bool] = []

    def fails(exchange: in_training.Exchange) -> None:
        exchange(1)
        raise KeyError("gone")

    with pytest.raises(RankFailed):
        work_together(fails, ALONE, lambda: bool(asked.append(True)))
    assert len(asked) == 2


def test_a_stop_of_one_rank_is_met_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(world: parallel.World) -> object:
        return work_together(lambda exchange: exchange(1), world, lambda: world.rank == 1)

    errors = eval_runs.on_two_ranks(monkeypatch, checkpoint_gather(), work)
    assert [type(error) for error in errors] == [RankStopped] * 2


def checkpoint_gather() -> object:
    """The module whose gather() is replaced."""
    from eval import exchange

    return exchange


def test_the_key_sets_the_batch_and_is_named_where_memory_does_not_hold_it(
    base: Config, tmp_path: Path
) -> None:
    config = changed(base, f"run=full out={tmp_path} eval.tasks_micro_batch=3")
    batches = []

    def evaluate(lm, *_: object) -> None:
        batches.append(lm.micro_batch)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with mock.patch("eval.scores.evaluate", evaluate):
        train.train(config, ALONE)
    assert batches == [3, 3]
    (reason, _) = [row["reason"] for row in rows(config, "event") if row["event"] == "tasks_failed"]
    assert "out of memory with eval.tasks_micro_batch=3: give a smaller one" in reason


def test_tasks_of_ones_own_are_scored(base: Config, tmp_path: Path) -> None:
    included = []

    def load(names: list[str], include: str | None, *_: object) -> dict:
        included.append(include)
        raise UserError("seen")

    words = f"run=own out={tmp_path} eval.tasks_include={tmp_path} eval.tasks_every=none"
    with mock.patch.object(tasks, "load", load):
        train.train(changed(base, words), ALONE)
    assert included == [str(tmp_path)]


def test_a_row_names_the_tasks_that_a_group_is_without(base: Config, tmp_path: Path) -> None:
    group = results.TaskScores(metrics={}, missing=["jeopardy", "squad"])
    config = changed(base, f"run=lacking out={tmp_path} eval.tasks_every=none")
    with mock.patch("eval.scores.evaluate", lambda *_: ({"core22": group}, None)):
        train.train(config, ALONE)
    assert rows(config, "tasks")[0]["missing"] == ["jeopardy", "squad"]


def test_settings_of_tasks_without_tasks_are_refused(base: Config) -> None:
    with pytest.raises(UserError, match="need eval.tasks, such as"):
        changed(base, "eval.tasks=")
