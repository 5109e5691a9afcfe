"""The law under other choices: what is left out, how residuals count, what N counts."""

import numpy as np
import pytest

from scaling.law_file import RefitEntry, refit_entry
from scaling.laws import MOST_SIZES, fit_form, robustness
from scaling.laws.fits import known
from tests.helpers.law_points import (
    ROUND,
    chinchilla_points,
    law,
    made,
    points_at,
    published,
)


def entries(*arguments: object, **options: float) -> list[RefitEntry]:
    """The rows of law.json."""
    return [refit_entry(refit) for refit in robustness(*arguments, **options)]


@pytest.fixture(scope="module")
def grid() -> list[RefitEntry]:
    """Of five sizes, two of which are within a per cent: one size."""
    points = made(sizes=(3e7, 1e8, 3e8, 3.02e8, 1e9))
    return entries(points, "chinchilla", {})


def test_the_choices(grid: list[RefitEntry]):
    variants = ["declared", *["drop highest"] * 4, *["delta"] * 3, *["leave out N"] * 4]
    assert [row.variant for row in grid] == variants
    assert [row.n for row in grid] == [20, 19, 17, 15, 10, 20, 20, 20, 16, 16, 12, 16]
    assert [row.value for row in grid[-4:]] == ["30M", "100M", "300M to 302M", "1B"]


def test_each_choice_gives_the_law(grid: list[RefitEntry]):
    for row in grid:
        values = {name: row.parameters[name] for name in ROUND}
        assert values == pytest.approx(ROUND, rel=1e-2), row


def test_the_error_on_a_size_left_out():
    points = made(noise=2e-3)
    row = entries(points, "chinchilla", {})[-1]
    largest = points.take(points.N == 1e9)
    predicted = law(largest.N, largest.D, row.parameters)
    errors = 100 * (predicted / largest.loss - 1)
    farthest = errors[np.argmax(np.abs(errors))]
    assert row.n == 12
    assert row.error_percent == pytest.approx(errors.mean(), rel=1e-9)
    assert row.largest_error_percent == pytest.approx(farthest, rel=1e-9)


def test_seeds_are_a_floor_in_each_variant():
    N = np.geomspace(3e7, 1e10, 12)
    points = points_at(N, 20 * N, 1.7 + 412 * (120 * N**2) ** -0.155)
    assert not any(row.identified for row in entries(points, "ray", {}, seed_sd=0.3))


def test_fewer_than_half_left_is_another_experiment():
    rows = entries(made(sizes=(3e7, 1e8), ratios=(5, 20, 80)), "chinchilla", {})
    assert [row.value for row in rows if row.variant == "drop highest"] == ["1", "3"]


def test_a_choice_that_cannot_be_fitted_says_why():
    rows = entries(made(sizes=(3e7, 1e8), ratios=(5, 20, 80)), "chinchilla", {})
    for row in rows[-2:]:
        assert row.variant == "leave out N" and row.parameters["E"] is None
        assert str(row.reason).startswith("3 distinct point(s)")


def test_of_one_size_none_is_left_out():
    rows = entries(made(sizes=(1e8,)), "power_d", {})
    assert "leave out N" not in [row.variant for row in rows]


# ----------------------------------------------------------------------------- published choices
# Recomputed from Besiroglu et al. 2024's points with another program; least absolute deviations.


@published
def test_published_least_absolute_deviations():
    fit = fit_form("chinchilla", chinchilla_points(5), delta=1e-8)
    assert fit.identified and fit.starts_at_best == fit.starts
    p = fit.values
    assert [p["A"], p["B"]] == pytest.approx([482.01, 2085.43], abs=0.012)
    expected = [1.81686, 0.34781, 0.36585]
    assert [p["E"], p["alpha"], p["beta"]] == pytest.approx(expected, abs=1.2e-5)


@published
def test_published_laws_without_the_highest_losses():
    rows = {
        (row.variant, row.value): row.parameters
        for row in entries(chinchilla_points(), "chinchilla", {})
    }
    declared = rows["declared", ""]
    assert round(known(declared["beta"]), 3) == 0.453 and round(known(declared["E"]), 3) == 1.891
    assert declared["B"] == pytest.approx(12846, rel=1e-4)
    betas = [round(known(rows["drop highest", k]["beta"]), 3) for k in ("1", "3", "5", "10")]
    assert betas == [0.412, 0.382, 0.367, 0.358]


@published
def test_published_laws_of_other_deltas_and_without_each_size():
    rows = entries(chinchilla_points(5), "chinchilla", {})
    by_delta = {row.value: row.parameters for row in rows if row.variant == "delta"}
    for value, alpha, beta, within in (
        ("MSE", 0.36025, 0.40588, 1.2e-5),
        ("0.01", 0.35440, 0.38150, 6e-5),
        ("0.0001", 0.34741, 0.36539, 1.2e-5),
    ):
        exponents = [by_delta[value]["alpha"], by_delta[value]["beta"]]
        assert exponents == pytest.approx([alpha, beta], abs=within), value
    squares = by_delta["MSE"]
    factors = [squares["A"], squares["B"], squares["E"]]
    assert factors == pytest.approx([593.32, 4875.64, 1.86455], rel=1e-5)
    errors = [known(row.error_percent) for row in rows if row.variant == "leave out N"]
    assert len(errors) == MOST_SIZES and max(map(abs, errors)) < 2
