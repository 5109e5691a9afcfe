"""scaling/pairing.py: which runs are pairs, nulls and left alone."""

from pathlib import Path

import pytest

from lib.errors import UserError
from scaling.paired.gaps import Pair
from scaling.pairing import pair_runs
from scaling.records import Record, read_runs
from tests.helpers.scaling_runs import write_run

# nats, of two seeds: the BF16 run's loss, what its repeat differs by, what FP8 differs by
LOSS, NULL, GAP = {1: 2.20, 2: 2.21}, {1: 0.002, 2: -0.004}, {1: 0.010, 2: 0.014}


@pytest.fixture
def runs(tmp_path: Path) -> list[Record]:
    """Of each seed a BF16 run with its repeat, and an FP8 run with its repeat."""
    for seed, loss in LOSS.items():
        shared = {"seed": seed, "recipe": "bf16"}
        write_run(tmp_path / f"bf16_{seed}", loss=loss, **shared)
        write_run(tmp_path / f"null_{seed}", loss=loss + NULL[seed], repeat=1, **shared)
        fp8 = {"seed": seed, "recipe": "tensorwise", "loss": loss, "gap": GAP[seed]}
        write_run(tmp_path / f"fp8_{seed}", **fp8)
        write_run(tmp_path / f"fp8_again_{seed}", repeat=1, **fp8)
    return read_runs([tmp_path])[0]


def names(pairs: list[Pair]) -> list[tuple[str, str]]:
    return sorted((pair.bf16.run_id, pair.fp8.run_id) for pair in pairs)


def alone(notes: list[str]) -> set[str]:
    return {note.split(":")[0].removeprefix("unpaired ") for note in notes}


@pytest.mark.parametrize("step", [1, -1])
def test_fp8_runs_and_repeats_of_bf16_have_the_bf16_run_of_their_seed(
    runs: list[Record], step: int
) -> None:
    pairs, _ = pair_runs(runs[::step])
    assert names(pairs) == [
        ("bf16_1", "fp8_1"),
        ("bf16_1", "null_1"),
        ("bf16_2", "fp8_2"),
        ("bf16_2", "null_2"),
    ]


def test_a_gap_is_the_difference_of_the_losses(runs: list[Record]) -> None:
    pairs, _ = pair_runs(runs)
    gaps = {pair.fp8.run_id: pair.gap["bf16"].nats for pair in pairs}
    assert gaps == pytest.approx(
        {
            "fp8_1": GAP[1],
            "fp8_2": GAP[2],
            "null_1": NULL[1],
            "null_2": NULL[2],
        }
    )


def test_a_repeat_in_fp8_is_no_null(runs: list[Record]) -> None:
    assert alone(pair_runs(runs)[1]) == {"fp8_again_1", "fp8_again_2"}


def test_runs_without_a_partner_are_told(runs: list[Record]) -> None:
    pairs, notes = pair_runs([run for run in runs if run.run_id not in ("bf16_1", "fp8_2")])
    assert names(pairs) == [("bf16_2", "null_2")]
    # a null alone does not make its BF16 run part of a pair
    assert {"bf16_2", "fp8_1", "null_1"} <= alone(notes)


def test_two_bf16_runs_of_a_pair_are_refused(runs: list[Record], tmp_path: Path) -> None:
    write_run(tmp_path / "twin", loss=2.3, seed=1)
    records, _ = read_runs([tmp_path])
    with pytest.raises(UserError, match="are both the BF16 run of pair"):
        pair_runs(records)


COMPILED = {"recipe": "tensorwise", "compile": True, "layers_converted": ["head"]}


@pytest.mark.parametrize(
    ("changes", "ratio"),
    [
        ({}, 1.25),
        ({"device": "another"}, None),
        ({"n_gpu": 8}, None),
        ({"precision": COMPILED}, None),
    ],
    ids=["alike", "device", "ranks", "compiled"],
)
def test_speeds_are_compared_where_the_precision_alone_differs(
    tmp_path: Path, changes: dict, ratio: float | None
) -> None:
    write_run(tmp_path / "bf16", tok_per_s_median=1000.0)
    write_run(tmp_path / "fp8", recipe="tensorwise", tok_per_s_median=1250.0, **changes)
    (pair,), _ = pair_runs(read_runs([tmp_path])[0])
    assert pair.tok_per_s_ratio == ratio


def test_a_decay_in_another_precision_is_switched(tmp_path: Path) -> None:
    """It converts no Linear itself: its trunk did."""
    write_run(tmp_path / "bf16")
    switched = {"recipe": "bf16", "switched_from": "tensorwise", "compile": False}
    write_run(tmp_path / "fp8", precision={**switched, "layers_converted": []}, gap=0.01)
    records, _ = read_runs([tmp_path])
    (pair,), _ = pair_runs(records)
    assert pair.n_converted == 0
    assert pair.is_switched
