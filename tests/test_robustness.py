"""The table of other choices shows what published refits of one data set show, and predicts what it leaves out."""

import json

import numpy as np
import pytest
from scipy.optimize import minimize

from scaling import intervals as robustness
from scaling.fit import _variant_cells
from scaling.laws import Points
from scaling.points import read_points
from tests.conftest import ROOT


def law(N, D):
    return 1.8 + 400 * N**-0.34 + 1500 * D**-0.36


def made(sizes=(3e7, 1e8, 3e8, 1e9), ratios=(5, 20, 80, 320), noise=0.0):
    N, ratio = (a.ravel() for a in np.meshgrid(sizes, ratios, indexing="ij"))
    D = N * ratio
    loss = law(N, D) * np.exp(np.random.default_rng(0).normal(0, noise, len(N)))
    return Points(N, D, 6 * N * D, loss, np.arange(len(N)))


def chosen(rows, variant):
    return [row for row in rows if row["variant"] == variant]


def test_exact_points_give_one_law_whatever_the_choice():
    rows = robustness.robustness(made(), "chinchilla")
    assert [row["variant"] for row in rows] == ["declared", *["drop highest"] * 3, *["delta"] * 3, *["leave out N"] * 4]
    assert [row["n"] for row in rows] == [16, 15, 13, 11, 16, 16, 16, 12, 12, 12, 12]
    for row in rows:
        assert [row["E"], row["alpha"], row["beta"]] == pytest.approx([1.8, 0.34, 0.36], rel=1e-3), row
    for row in chosen(rows, "leave out N"):
        assert abs(row["error_percent"]) < 1e-3 and abs(row["largest_error_percent"]) < 1e-3
    assert [row["value"] for row in chosen(rows, "leave out N")] == ["3e+07", "1e+08", "3e+08", "1e+09"]
    json.dumps(rows, allow_nan=False)


def test_the_highest_are_dropped_and_the_rest_is_fitted():
    points = made(noise=2e-3)
    rows = robustness.robustness(points, "chinchilla")
    keep = points.loss < np.sort(points.loss)[-3]       # all but the three highest
    alone = robustness.robustness(points.take(keep), "chinchilla")[0]
    dropped = next(row for row in chosen(rows, "drop highest") if row["value"] == "3")
    assert [dropped[key] for key in ("n", "E", "alpha", "objective")] == pytest.approx(
        [alone[key] for key in ("n", "E", "alpha", "objective")], rel=1e-6)


def test_the_error_on_a_size_left_out_by_hand():
    points = made(noise=2e-3)
    row = chosen(robustness.robustness(points, "chinchilla"), "leave out N")[-1]
    rest = points.N == 1e9
    predicted = row["E"] + row["A"] / points.N[rest] ** row["alpha"] + row["B"] / points.D[rest] ** row["beta"]
    errors = 100 * (predicted / points.loss[rest] - 1)
    assert row["error_percent"] == pytest.approx(errors.mean(), rel=1e-9) and row["n"] == 12
    assert row["largest_error_percent"] == pytest.approx(errors[np.argmax(np.abs(errors))], rel=1e-9)


def test_plain_squares_against_another_solver():
    points = made(noise=5e-3)
    row = next(row for row in robustness.robustness(points, "chinchilla") if row["value"] == "MSE")

    def squares(p):
        return 1e4 * np.sum((np.log(p[0] + np.exp(p[1]) / points.N ** p[3] + np.exp(p[2]) / points.D ** p[4])
                             - np.log(points.loss)) ** 2)

    best = minimize(squares, [1.8, np.log(400), np.log(1500), 0.34, 0.36], method="Nelder-Mead",
                    options={"maxiter": 40000, "maxfev": 40000, "xatol": 1e-10, "fatol": 1e-13, "adaptive": True})
    assert 2e4 * row["objective"] <= best.fun * (1 + 1e-9)
    assert [row["E"], row["alpha"], row["beta"]] == pytest.approx([best.x[0], best.x[3], best.x[4]], rel=2e-2)


def test_one_variable_laws_and_conventions():
    C = np.geomspace(1e17, 1e22, 12)
    N = np.sqrt(C / 120)
    loss = 1.7 + 412 * C**-0.155
    points = Points(N, 20 * N, C, loss, np.arange(12))
    rows = robustness.robustness(points, "ray", {"half": C / 2})
    (half,) = chosen(rows, "count C as")
    assert half["value"] == "half" and half["gamma"] == pytest.approx(0.155, rel=1e-6)
    assert half["K"] == pytest.approx(412 * 0.5**0.155, rel=1e-5)
    assert len(chosen(rows, "leave out N")) == 10       # twelve sizes in ten groups
    power = robustness.robustness(points, "power_n", {"double": 2 * N})
    # A power law through points of a ray law: Huber's valley is flat at its bottom, so the objective is compared.
    assert chosen(power, "count N as")[0]["objective"] == pytest.approx(power[0]["objective"], rel=1e-9)
    assert chosen(power, "count N as")[0]["alpha"] == pytest.approx(power[0]["alpha"], rel=1e-2)
    assert chosen(power, "count N as")[0]["A"] != pytest.approx(power[0]["A"], rel=1e-3)


def test_what_cannot_be_fitted_says_why():
    points = made(sizes=(3e7, 1e8), ratios=(5, 20, 80))
    rows = robustness.robustness(points, "chinchilla")
    assert [row["value"] for row in chosen(rows, "drop highest")] == ["1", "3"]
    for row in chosen(rows, "leave out N"):
        assert row["n"] == 3 and row["E"] is None and not row["identified"] and "error_percent" not in row
        assert row["reason"].startswith("3 distinct point(s)")
    lines = _variant_cells(rows)
    assert len({len(line) for line in lines}) == 1 and lines[-1][-1].startswith("not fitted: 3 distinct point(s)")
    assert lines[-1][0] == "leave out N 1e+08 *"
    assert chosen(robustness.robustness(made(sizes=(1e8,)), "power_d"), "leave out N") == []     # one size: nothing is left


def test_sizes_within_a_percent_are_one_and_many_are_grouped():
    N = np.array([1e8, 3e8, 1.004e8, 3.02e8, 1.008e8])
    assert [mask.tolist() for _, mask in robustness.sizes(N)] == [[True, False, True, False, True],
                                                                  [False, True, False, True, False]]
    many = np.repeat(np.geomspace(1e7, 1e10, 37), 2)
    found = robustness.sizes(many)
    assert len(found) == robustness.MOST_SIZES and np.sum([mask for _, mask in found], axis=0).tolist() == [1] * 74


def test_published_choices_on_the_chinchilla_points():
    """Rows of k and delta, recomputed from Besiroglu et al. 2024's points with another program."""
    path = ROOT.parent / "shared" / "reference" / "chinchilla_points.csv"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    every = read_points(path, "Model Size", "loss", c="Training FLOP").points
    rows = {(row["variant"], row["value"]): row for row in robustness.robustness(every, "chinchilla")}
    assert [round(rows["declared", ""][key], 3) for key in ("beta", "E")] == [0.453, 1.891]
    assert rows["declared", ""]["B"] == pytest.approx(12846, rel=1e-4)
    assert [round(rows["drop highest", k]["beta"], 3) for k in ("1", "3", "5", "10")] == [0.412, 0.382, 0.367, 0.358]
    best = read_points(path, "Model Size", "loss", c="Training FLOP", drop_highest=5).points
    rows = {(row["variant"], row["value"]): row for row in robustness.robustness(best, "chinchilla")}
    for value, alpha, beta in (("MSE", 0.3603, 0.4059), ("0.01", 0.3544, 0.3815), ("0.0001", 0.34741, 0.36539)):
        assert [rows["delta", value][key] for key in ("alpha", "beta")] == pytest.approx([alpha, beta], abs=6e-5), value
    assert [rows["delta", "MSE"][key] for key in ("E", "a")] == pytest.approx([1.8646, 0.530], rel=1e-3)
    errors = [row["error_percent"] for key, row in rows.items() if key[0] == "leave out N"]
    assert len(errors) == robustness.MOST_SIZES and max(map(abs, errors)) < 2
