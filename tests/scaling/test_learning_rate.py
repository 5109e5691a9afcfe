"""scaling/learning_rate.py and rate_sweep.py: the optimum of a sweep with a known one, refused
where the rates do not hold it."""

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
from scaling.rate_sweep import Optimum, RateResult, Sweep, Trial, analyse, read_result
from scaling.records import read_record
from tests.conftest import asked
from tests.helpers.scaling_runs import cells, edit, write_run

RATES = (0.002, 0.004, 0.008, 0.016, 0.032)
BEST = 0.0061
Capsys = pytest.CaptureFixture[str]


def known(lr: float, best: float = BEST) -> float:
    """A loss of which ln is a parabola in ln lr."""
    return 3.2 * math.exp(0.01 * math.log(lr / best) ** 2)


def with_best(best: float) -> Callable[[float], float]:
    return lambda lr: known(lr, best)


def trials(
    rates: Sequence[float] = RATES,
    loss: Callable[[float], float] = known,
    diverged: Sequence[float] = (),
    seed: int = 1337,
    N: int = 1000,
    tokens: int = 20_000,
) -> list[Trial]:
    finished = [Trial(f"lr{lr:g}_s{seed}", N, tokens, lr, seed, "ok", loss(lr)) for lr in rates]
    return finished + [Trial(f"lr{lr:g}", N, tokens, lr, seed, "diverged") for lr in diverged]


def sweep_of(runs: list[Trial]) -> Sweep:
    return analyse(runs).sweeps[0]


def optimum_of(runs: list[Trial]) -> Optimum:
    optimum = sweep_of(runs).optimum
    assert optimum is not None
    return optimum


# ------------------------------------------------------------------------------------- the optimum


@pytest.mark.parametrize("best", [0.0031, 0.008, 0.0158])
def test_a_known_optimum_is_found_with_its_loss_and_curvature(best: float) -> None:
    optimum = optimum_of(trials(loss=with_best(best), diverged=(0.064,)))
    assert optimum.lr == pytest.approx(best, rel=1e-9)
    assert optimum.loss == pytest.approx(3.2, rel=1e-12)
    assert optimum.curvature == pytest.approx(0.01)


def test_between_the_flat_ends_the_loss_is_within_a_thousandth() -> None:
    low, high = optimum_of(trials()).flat
    assert low < BEST < high
    assert [known(low) / 3.2, known(high) / 3.2] == pytest.approx([math.exp(0.001)] * 2)


def test_a_flat_parabola_promises_nothing_beyond_its_rates() -> None:
    """.032 costs 2 %; the parabola through three equal losses would call it as good as the best."""
    losses = dict(zip(RATES, (3.3, 3.20001, 3.2, 3.20001, 3.264), strict=True))
    assert optimum_of(trials(loss=lambda lr: losses[lr])).flat == [0.004, 0.016]


def test_the_lowest_rate_and_its_neighbours_alone_are_fitted() -> None:
    def no_parabola(lr: float) -> float:
        cubic = 0.003 * math.log(lr / 0.007) ** 3
        return known(lr, 0.007) + max(0.0, cubic)

    runs = trials(loss=no_parabola)
    below, lowest, above = (math.log(trial.loss or 0) for trial in runs[1:4])
    # in steps of ln 2 from the middle one of three
    vertex = 0.5 * (below - above) / (below - 2 * lowest + above)
    assert optimum_of(runs).lr == pytest.approx(0.008 * 2**vertex)


def test_a_rate_at_which_one_seed_diverged_is_shown_and_not_fitted() -> None:
    runs = trials(RATES[:4], seed=1) + trials(RATES[:4], seed=2)
    sweep = sweep_of(runs + trials((0.032,), lambda lr: 3.0, (0.032,), seed=1))
    assert sweep.optimum is not None and sweep.optimum.lr == pytest.approx(BEST)
    assert sweep.rows[-1].status == "diverged"


def test_uneven_rates_count_where_they_are() -> None:
    assert optimum_of(trials((0.001, 0.005, 0.0066, 0.03))).lr == pytest.approx(BEST)


def sweep_of_two_seeds() -> Sweep:
    """Seeds with optima of their own, and a third at one rate, which would move the optimum."""
    third = trials((0.016,), loss=lambda lr: 2.0, seed=3)
    first, second = (trials(loss=with_best(best), seed=seed) for seed, best in OPTIMA.items())
    return sweep_of(third + first + second)


OPTIMA = {1: 0.005, 2: 0.0075}


def test_seeds_that_every_rate_has_are_averaged() -> None:
    sweep = sweep_of_two_seeds()
    assert sweep.seeds == [1, 2] and sweep.optimum is not None
    # both seeds' parabolas are equally curved, so the optimum is the geometric mean
    assert sweep.optimum.lr == pytest.approx(math.sqrt(0.005 * 0.0075))


def test_their_losses_are_averaged_as_logarithms() -> None:
    sweep = sweep_of_two_seeds()
    distance = math.log(0.0075 / 0.005) / 2
    assert sweep.optimum is not None
    assert sweep.optimum.loss == pytest.approx(3.2 * math.exp(0.01 * distance**2))


@pytest.mark.parametrize(
    "runs, reason",
    [
        (trials(RATES[:3], with_best(0.02)), "at 0.008, at an end"),
        (trials((0.01,)), "at 0.01, at an end"),
        (trials(RATES[:3], with_best(0.001)), "at 0.002, at an end"),
        (trials((), diverged=(0.1, 0.2)), "add lower rates"),
        (trials(RATES[:3], with_best(0.011), diverged=(0.016,)), "at 0.008, at an end"),
        (
            [trial for seed, lr in enumerate(RATES) for trial in trials((lr,), seed=seed)],
            "no seed has a loss at every rate",
        ),
    ],
)
def test_an_optimum_at_an_end_is_refused(runs: list[Trial], reason: str) -> None:
    result = analyse(runs)
    assert result.base is None and result.rates == [] and result.sweeps[0].optimum is None
    assert reason in str(result.sweeps[0].reason)


def test_the_page_shows_the_optimum_and_what_diverged() -> None:
    page = format_result(analyse(trials(diverged=(0.064,))))
    assert f"Optimum {BEST:.3g}" in page
    assert ["0.064", "diverged"] in [row[::3] for row in cells(page)]


def test_the_page_says_why_there_is_no_optimum() -> None:
    result = analyse(trials((0.01,)))
    assert f"No optimum: {result.sweeps[0].reason}." in format_result(result)


# ---------------------------------------------------------------------------------------- the rule


@pytest.fixture
def two_sizes() -> RateResult:
    """Of the smallest size a branch too, whose optimum is no trunk's."""
    branch = trials(loss=with_best(0.009), tokens=9000)
    return analyse(branch + trials() + trials(loss=with_best(0.0042), N=4000), (1e6, 9e6))


def test_the_rule_starts_from_the_longest_runs_of_the_smallest_size(two_sizes: RateResult) -> None:
    base = two_sizes.base
    assert base is not None and (base.N, base.tokens) == (1000, 20_000)
    assert base.lr == pytest.approx(BEST)


def test_other_sizes_get_the_rates_of_the_rule(two_sizes: RateResult) -> None:
    rates = [list(rate.values()) for rate in two_sizes.rates]
    for (size, fixed_batch, growing_batch), N in zip(rates, (1000, 1e6, 9e6), strict=True):
        assert size == N
        assert fixed_batch == pytest.approx(BEST * (1000 / N) ** 0.5)
        assert growing_batch == pytest.approx(BEST * (1000 / N) ** 0.25)


def test_a_larger_sizes_own_optimum_is_held_against_the_rule(two_sizes: RateResult) -> None:
    (check,) = two_sizes.checks
    assert check["lr"] == pytest.approx(0.0042)
    assert check["exponent"] == pytest.approx(math.log(0.0042 / BEST) / math.log(4))


@pytest.mark.parametrize("N", [h100.NONEMBED, 25_402_240])
def test_the_h100_configs_take_their_rates_from_the_smallest_size(N: int) -> None:
    config = h100.build(run="one", n_layer=4, n_embd=256, n_ffn=704, nonembed=N)
    assert config.optim.lr == pytest.approx(h100.LR * (h100.NONEMBED / N) ** 0.5, abs=1e-6)


# ------------------------------------------------------------------------------------- the command


def write_sweep(
    folder: Path, rates: Sequence[float] = RATES, best: float = BEST, **changes: object
) -> Path:
    for lr in rates:
        write_run(folder / f"lr{lr:g}", **{"loss": known(lr, best), "lr_peak": lr, **changes})
    return folder


@pytest.fixture
def declared(tmp_path: Path, no_figures: None) -> Path:
    """A sweep of which two rates have not finished, with a repeat."""
    write_sweep(tmp_path, RATES[:3], best=0.02)
    write_sweep(tmp_path, (0.0005,), loss=1.0, repeat=1)
    shared = {"seed": 1337, "tokens": 20 * 38_912, "params_nonembed": 38_912 - 257 * 56}
    runs = [{"run": f"lr{lr:g}", "lr": lr, "repeat": 0, **shared} for lr in RATES]
    edit(tmp_path / "study.json", runs=[*runs, {**runs[0], "repeat": 1, "run": "another"}])
    return tmp_path


def last_states(page: str) -> list[str]:
    return [row[-1] for row in cells(page)[-2:]]


def test_what_was_declared_and_has_not_finished_is_named(declared: Path, capsys: Capsys) -> None:
    page = asked(capsys, main, declared, f"out={declared / 'elsewhere'}", code=3)
    assert last_states(page) == ["unfinished", "unfinished"]


def test_a_run_that_left_a_diagnosis_and_no_summary_has_diverged(
    declared: Path, capsys: Capsys
) -> None:
    edit(declared / "lr0.016/diagnosis.json")
    assert last_states(asked(capsys, main, declared, code=3)) == ["diverged", "unfinished"]


def test_a_repeat_is_left_out(declared: Path, capsys: Capsys) -> None:
    assert "left out lr0.0005" in asked(capsys, main, declared, code=3)


@pytest.mark.parametrize(
    "change, sentence",
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
    tmp_path: Path, capsys: Capsys, change: dict, sentence: str
) -> None:
    write_sweep(write_sweep(tmp_path, RATES[:3]), (0.016,), **change)
    assert sentence in asked(capsys, main, tmp_path, code=2)
    assert not (tmp_path / "law").exists()


def test_no_number_of_parameters_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    write_sweep(tmp_path)
    assert "at=0 is no number of parameters" in asked(capsys, main, tmp_path, "at=0", code=2)


def test_runs_whose_configs_differ_in_any_setting_are_refused_with_the_key(
    tiny: Config, tmp_path: Path, capsys: Capsys
) -> None:
    """Also in one that summary.json does not have."""
    for lr, rope_theta in ((RATES[0], 1e4), (RATES[1], 1e4), (RATES[2], 5e5)):
        write_sweep(tmp_path, (lr,))
        config = replace(
            tiny,
            optim=replace(tiny.optim, lr=lr),
            model=replace(tiny.model, rope_theta=rope_theta),
        )
        (tmp_path / f"lr{lr:g}/config.json").write_text(json.dumps(asdict(config)))
    assert "differ in model.rope_theta" in asked(capsys, main, tmp_path, code=2)


def test_sizes_and_seeds_may_differ_in_their_configs(tiny: Config, tmp_path: Path) -> None:
    larger = replace(tiny, seed=7, model=replace(tiny.model, n_layer=3, n_ffn=64))
    records = []
    for lr, config in ((0.001, tiny), (0.002, larger)):
        folder = write_sweep(tmp_path, (lr,)) / f"lr{lr:g}"
        (folder / "config.json").write_text(json.dumps(asdict(config)))
        records.append(read_record(folder))
    check_settings(records)


def test_every_rate_is_drawn(tmp_path: Path, capsys: Capsys) -> None:
    write_sweep(tmp_path, RATES[:4])
    write_sweep(tmp_path, (0.032,), loss=7.9)
    write_sweep(tmp_path, (0.064,), status="diverged")
    asked(capsys, main, tmp_path, "at=1e6")
    result = read_result(tmp_path / "law/learning_rate.json")
    (panel,) = learning_rate.draw(result, "a").axes
    points = [xy for line in panel.get_lines() for xy in line.get_xydata().tolist()]
    assert all([row.lr, row.percent] in points for row in result.sweeps[0].rows[:4])
    # what is far above the lowest, and what diverged, is marked
    assert panel.get_ylim()[1] < 10 and {0.032, 0.064} <= {x for x, _ in points}


def test_the_figure_is_written_also_without_an_optimum(tmp_path: Path, capsys: Capsys) -> None:
    asked(capsys, main, write_sweep(tmp_path, RATES[:2]), code=3)
    assert (tmp_path / "law/learning_rate.png").read_bytes()[:4] == b"\x89PNG"
