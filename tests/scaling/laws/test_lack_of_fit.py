"""Laws that do not fit: early points are blamed, noise is not."""

from dataclasses import replace

import numpy as np
import pytest

from scaling.laws import LackOfFit, Points, lack_of_fit, near_zero
from scaling.laws.fits import known
from scaling.laws.lack_of_fit import WithoutEarly
from tests.helpers.law_points import chinchilla_points, early, fitted, joined, made, published


def lack_of(points: Points, seed_sd: float = 0.0) -> LackOfFit:
    lack = lack_of_fit(fitted(points), points, seed_sd)
    assert lack is not None
    return lack


def mended(points: Points) -> WithoutEarly:
    without_early = lack_of(points).mended
    assert without_early is not None
    return without_early


@pytest.mark.parametrize("sd", [1e-3, 5e-3, 2e-2])
def test_noise_of_any_size_is_no_lack_of_fit(sd: float):
    """Neighbours show it."""
    for seed in range(5):
        points = early(0.0, sd, seed)
        assert lack_of_fit(fitted(points), points) is None


def test_early_points_off_the_law_are_left_out_beside_it():
    points = early(0.3)
    without_early = mended(points)
    left_out = list(without_early.left_out)
    ratio = points.D / points.N
    assert set(np.flatnonzero(ratio < 0.5)) <= set(left_out)
    assert max(ratio[left_out]) < without_early.below


def test_the_law_without_early_points_is_the_law():
    fit = mended(early(0.3)).fit
    assert fit.values["alpha"] == pytest.approx(0.34, abs=0.02)
    assert known(fit.residual_rms) < 0.01


def test_the_noise_is_that_of_neighbours():
    lack = lack_of(early(0.3))
    assert lack.noise.source == "neighbours"
    assert lack.noise.sd < 0.02 < lack.residual_rms


def test_the_noise_is_that_of_seeds_where_known():
    assert lack_of(early(0.3), seed_sd=1e-3).noise.sd == 1e-3


def test_the_noise_is_that_of_repeats_where_there_are_any():
    points = early(0.3)
    twice = joined(points, replace(points, loss=points.loss * 1.004))
    noise = lack_of(twice).noise
    assert noise.source == "repeats" and noise.sd == pytest.approx(0.004 / np.sqrt(2), rel=0.01)


def test_early_points_are_blamed_beside_an_outlier():
    """What remains without the outlier still misfits, so the early points are left out; the outlier
    is named of the rest."""
    points = early(0.3)
    ratio = points.D / points.N
    late = int(np.flatnonzero(ratio > 50)[3])
    points.loss[late] *= 1.06
    without_early = mended(points)
    assert set(np.flatnonzero(ratio < 0.5)) <= set(without_early.left_out)
    assert late not in without_early.left_out
    assert [outlier.point for outlier in without_early.outliers] == [late]


def test_exponents_near_zero_are_named():
    fit = fitted(made())
    errors = {"alpha": fit.values["alpha"] / 2.9, "beta": fit.values["beta"] / 3.1}
    assert near_zero(replace(fit, se=errors)) == ["alpha"]
    assert near_zero(replace(fit, se=None)) == []


@published
@pytest.mark.parametrize("drop_highest", [0, 5])
def test_the_law_fits_the_chinchilla_points(drop_highest: int):
    points = chinchilla_points(drop_highest)
    assert lack_of_fit(fitted(points), points) is None
