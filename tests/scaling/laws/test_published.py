"""Gadre et al. 2024's hold-outs by their own method, which forecasts are held against."""

import csv
import math
from functools import cache

import numpy as np
import pytest
from scipy.optimize import least_squares

from tests.helpers.law_points import FOLDER, published

FIVE_RUNS = ((11, 1), (79, 1), (154, 1), (412, 1), (11, 16))  # millions of N, D / N over 20
Table = tuple[np.ndarray, np.ndarray, np.ndarray]  # N, D, loss


def table(*runs: tuple[int, int]) -> Table:
    """The runs on rpj by size and ratio."""
    with (FOLDER / "gadre2024_104runs.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train_set"] == "rpj"]
    by_run = {(round(float(row["N"]) / 1e6), float(row["mult"])): row for row in rows}
    N, D, loss = (
        np.array([float(by_run[run][name]) for run in runs]) for name in ("N", "D", "loss_c4_val")
    )
    return N, D, loss


def tied(p: np.ndarray, N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """E, ln factors at 1e8 and 1e9, the common exponent."""
    E, log_a, log_b, slope = p
    of_size = np.exp(log_a - slope * np.log(N / 1e8))
    return E + of_size + np.exp(log_b - slope * np.log(D / 1e9))


@cache
def law_of_five_runs() -> np.ndarray:
    """Tied exponents, squares of L."""
    N, D, loss = table(*FIVE_RUNS)
    return least_squares(
        lambda p: tied(p, N, D) - loss,
        [1.5, 0, 0, 0.3],
        x_scale="jac",
        ftol=1e-15,
        xtol=1e-15,
        gtol=1e-15,
    ).x


@published
def test_gadres_law_of_five_runs():
    E, log_a, log_b, slope = law_of_five_runs()
    A, B = np.exp(log_a + slope * math.log(1e8)), np.exp(log_b + slope * math.log(1e9))
    expected = [166.211, 366.687 * 6 ** (-0.272851 / 2), 1.83665, 0.272851]
    assert [A, B, E, slope] == pytest.approx(expected, rel=1e-5)


@published
@pytest.mark.parametrize(
    ("run", "percent"), [((1440, 32), "0.7103"), ((6889, 1), "0.7320"), ((1440, 1), "0.1098")]
)
def test_gadres_hold_outs(run: tuple[int, int], percent: str):
    """1.4B at 640 tokens per parameter, 6.9B and 1.4B at 20."""
    N, D, loss = table(run)
    error = tied(law_of_five_runs(), N, D)[0] / loss[0] - 1
    assert f"{100 * abs(error):.4f}" == percent
