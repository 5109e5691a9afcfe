"""scaling/learning_rate.py: the optimum of a sweep with a known one, refused where the rates do not
hold it."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from configs import h100_3m_bf16 as h100
from runtime.config import Config
from scaling import learning_rate
from scaling.learning_rate import check_settings, format_result, main
from scaling.rate_sweep import Trial, analyse, read_result
from scaling.records import read_record
from tests.conftest import asked
from tests.helpers.scaling_runs import cells, edit, write_run

RATES = (0.002, 0.004, 0.008, 0.016, 0.032)


def known(lr: float, best: float = 0.0061):
    """A loss of which ln is a parabola in ln lr."""
    return 3.2 * math.exp(0.01 * math.log(lr / best) ** 2)


def trials(
    rates: Sequence[float] = RATES,
    loss: Callable[[float], float] = known,
    diverged: Sequence[float] = (),
    seed: int = 1337,
    N: int = 1000,
    tokens: int = 20_000,
):
    ok = [Trial(f"lr{lr:g}_s{seed}", N, tokens, lr, seed, "ok", loss(lr)) for lr in rates]
    bad = [Trial(f"lr{lr:g}", N, tokens, lr, seed, "diverged") for lr in diverged]
    return ok + bad


@pytest.mark.parametrize("best", [0.0031, 0.008, 0.0158])
def test_a_known_optimum_is_found_with_its_loss_and_its_curvature(best: float) -> None:
    found = analyse(trials(loss=lambda lr: known(lr, best), diverged=(0.064,)))
    one = found.sweeps[0].optimum
    assert one.lr == pytest.approx(best, rel=1e-9) == found.base.lr
    assert one.loss == pytest.approx(3.2, rel=1e-12)
    assert one.curvature == pytest.approx(0.01)
    low, high = one.flat  # by the definition: there the loss is 0.1 % higher
    assert (
        known(low, best) / 3.2 == pytest.approx(math.exp(0.001)) == known(high, best) / 3.2
        and low < best < high
    )
    assert f"Optimum {best:.3g}" in format_result(found) and ["0.064", "diverged"] in [
        row[::3] for row in cells(format_result(found))
    ]


def test_the_lowest_rate_and_its_neighbours_alone_are_fitted() -> None:
    # no parabola
    runs = trials(
        loss=lambda lr: known(lr, 0.007) + 0.003 * math.log(lr / 0.007) ** 3 * (lr > 0.007)
    )
    before, lowest, after = (math.log(one.loss) for one in runs[1:4])
    # in steps of ln 2 from the middle one of three
    vertex = 0.5 * (before - after) / (before - 2 * lowest + after)
    assert analyse(runs).base.lr == pytest.approx(0.008 * 2**vertex)
    runs = (
        trials(RATES[:4], seed=1)
        + trials(RATES[:4], seed=2)
        + trials((0.032,), lambda lr: 3.0, (0.032,), seed=1)
    )
    found = analyse(runs)  # at 0.032 one seed diverged: shown, not fitted
    assert found.base.lr == pytest.approx(0.0061) and found.sweeps[0].rows[-1].status == "diverged"
    # uneven rates count where they are
    found = analyse(trials((0.001, 0.005, 0.0066, 0.03))).sweeps[0].optimum
    assert found.lr == pytest.approx(0.0061)


def test_seeds_that_every_rate_has_are_averaged() -> None:
    runs = trials((0.016,), loss=lambda lr: 2.0, seed=3)  # averaged in, it would move the optimum
    for seed, best in ((1, 0.005), (2, 0.0075)):
        runs += trials(loss=lambda lr, best=best: known(lr, best), seed=seed)
    found = analyse(runs).sweeps[0]
    # equal curvature
    assert found.seeds == [1, 2] and found.optimum.lr == pytest.approx(math.sqrt(0.005 * 0.0075))
    assert found.optimum.loss == pytest.approx(
        3.2 * math.exp(0.01 * math.log(0.0075 / 0.005) ** 2 / 4)
    )


@pytest.mark.parametrize(
    "runs, told",
    [
        (trials(RATES[:3], lambda lr: known(lr, 0.02)), "at 0.008, at an end"),
        (trials((0.01,)), "at 0.01, at an end"),
        (trials(RATES[:3], lambda lr: known(lr, 0.001)), "at 0.002, at an end"),
        (trials((), diverged=(0.1, 0.2)), "add lower rates"),
        (trials(RATES[:3], lambda lr: known(lr, 0.011), diverged=(0.016,)), "at 0.008, at an end"),
        (
            [one for seed, lr in enumerate(RATES) for one in trials((lr,), seed=seed)],
            "no seed has a loss at every rate",
        ),
    ],
)
def test_an_optimum_at_an_end_is_refused(runs: list[Trial], told: str) -> None:
    found = analyse(runs)
    assert told in found.sweeps[0].reason and found.sweeps[0].reason in format_result(found)
    assert found.base is None and found.rates == [] and found.sweeps[0].optimum is None


def test_other_sizes_get_the_rates_of_the_rule_and_are_held_against_it() -> None:
    # of the smallest size, whose rate is no trunk's
    short = trials(loss=lambda lr: known(lr, 0.009), tokens=9000)
    found = analyse(
        short + trials() + trials(loss=lambda lr: known(lr, 0.0042), N=4000), (1e6, 9e6)
    )
    assert (found.base.N, found.base.tokens) == (1000, 20_000)
    assert found.base.lr == pytest.approx(0.0061)
    assert [[*one.values()] for one in found.rates] == [
        pytest.approx([N, 0.0061 * (1000 / N) ** 0.5, 0.0061 * (1000 / N) ** 0.25])
        for N in (1000, 1e6, 9e6)
    ]
    # configs/h100_3m_bf16.py takes its rates from the smallest size's so
    for N in (h100.NONEMBED, 25_402_240):
        rate = h100.build(run="one", n_layer=4, n_embd=256, n_ffn=704, nonembed=N).optim.lr
        assert rate == pytest.approx(h100.LR * (h100.NONEMBED / N) ** 0.5, abs=1e-6)
    (check,) = found.checks
    assert check["lr"] == pytest.approx(0.0042) and check["exponent"] == pytest.approx(
        math.log(0.0042 / 0.0061) / math.log(4)
    )


def write_sweep(folder: Path, rates: Sequence[float] = RATES, best: float = 0.0061, **changes):
    for lr in rates:
        write_run(folder / f"lr{lr:g}", **{"loss": known(lr, best), "lr_peak": lr} | changes)
    return folder


def test_what_was_declared_and_has_not_finished_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    write_sweep(tmp_path, RATES[:3], best=0.02)
    write_sweep(tmp_path, (0.0005,), loss=1.0, repeat=1)
    rows = [
        {
            "run": f"lr{lr:g}",
            "lr": lr,
            "seed": 1337,
            "repeat": 0,
            "tokens": 20 * 38_912,
            "params_nonembed": 38_912 - 257 * 56,
        }
        for lr in RATES
    ]
    edit(tmp_path / "study.json", runs=[*rows, rows[0] | {"repeat": 1, "run": "another"}])
    output = asked(capsys, main, tmp_path, f"out={tmp_path / 'elsewhere'}", code=3)
    assert (
        "left out lr0.0005" in output
        and [row[-1] for row in cells(output)[-2:]] == ["unfinished"] * 2
    )
    # its rollbacks used up, train.py leaves that and no summary
    edit(tmp_path / "lr0.016/diagnosis.json")
    assert [row[-1] for row in cells(asked(capsys, main, tmp_path, code=3))[-2:]] == [
        "diverged",
        "unfinished",
    ]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"weight_decay": 0.2}, "differ in weight_decay"),
        ({"val_sha256": "w" * 64}, "differ in val_sha256"),
        ({"precision": {"recipe": "rowwise", "compile": False}}, "differ in recipe"),
        ({"loss_bf16": math.nan}, "loss_bf16=nan is"),
        (
            {"name": "again", "lr_peak": 0.004},
            "have the same size, tokens, lr_peak and seed: leave one out",
        ),
    ],
)
def test_runs_that_are_no_sweep_are_refused_with_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict, said: str
) -> None:
    write_sweep(write_sweep(tmp_path, RATES[:3]), (0.016,), **change)
    assert said in asked(capsys, main, tmp_path, code=2) and not (tmp_path / "law").exists()
    assert "at=0 is no number of parameters" in asked(capsys, main, tmp_path, "at=0", code=2)


def test_every_rate_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "a", RATES[:4])
    write_sweep(tmp_path / "a", (0.032,), loss=7.9)
    write_sweep(tmp_path / "a", (0.064,), status="diverged")
    asked(capsys, main, tmp_path / "a", "at=1e6")
    found = read_result(tmp_path / "a/law/learning_rate.json")
    (panel,) = learning_rate.draw(found, "a").axes
    points = [xy for line in panel.get_lines() for xy in line.get_xydata().tolist()]
    assert all([row.lr, row.percent] in points for row in found.sweeps[0].rows[:4])
    assert panel.get_ylim()[1] < 10 and {0.032, 0.064} <= {x for x, _ in points}
    asked(capsys, main, write_sweep(tmp_path / "b", RATES[:2]), code=3)
    assert (tmp_path / "b/law/learning_rate.png").read_bytes()[:4] == b"\x89PNG"


def test_runs_whose_configs_differ_in_any_setting_are_refused_with_the_key(
    tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in one that summary.json does not have."""
    for lr in RATES[:3]:
        path = write_sweep(tmp_path, (lr,)) / f"lr{lr:g}/config.json"
        config = replace(tiny, run=f"lr{lr:g}", optim=replace(tiny.optim, lr=lr))
        if lr == RATES[2]:
            config = replace(config, model=replace(config.model, rope_theta=5e5))
        path.write_text(json.dumps(asdict(config)))
    assert "differ in model.rope_theta" in asked(capsys, main, tmp_path, code=2)


def test_sizes_and_seeds_may_differ_in_their_configs(tiny: Config, tmp_path: Path) -> None:
    first, second = tiny, replace(tiny, seed=7, model=replace(tiny.model, n_layer=3, n_ffn=64))
    records = []
    for lr, config in ((0.001, first), (0.002, second)):
        write_sweep(tmp_path, (lr,))
        folder = tmp_path / f"lr{lr:g}"
        (folder / "config.json").write_text(json.dumps(asdict(config)))
        records.append(read_record(folder))
    check_settings(records)
