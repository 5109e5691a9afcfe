"""Published points give the published numbers; skipped where ../shared/reference is absent."""

import csv
import time

import numpy as np
import pytest

from scaling.intervals import bootstrap, with_bootstrap
from scaling.laws import Points, fit_chinchilla
from tests.conftest import ROOT

FOLDER = ROOT.parent / "shared" / "reference"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"published points are not at {FOLDER}")


def rows(name):
    with (FOLDER / name).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def hoffmann():
    """(N, D, L) of Besiroglu et al. 2024, read off Hoffmann et al.'s figure 4, highest loss first."""
    points = rows("chinchilla_points.csv")
    N, C, L = (np.array([float(row[name]) for row in points]) for name in ("Model Size", "Training FLOP", "loss"))
    order = np.argsort(-L, kind="stable")
    return N[order], (C / (6 * N))[order], L[order]


@pytest.fixture(scope="module")
def fit(hoffmann):
    return fit_chinchilla(*(x[5:] for x in hoffmann))


def test_chinchilla_optimum(fit):
    assert fit.n == 240 and fit.identified
    golden = {"A": 477.826, "B": 2143.417, "E": 1.817218, "alpha": 0.347310, "beta": 0.367172}
    assert {name: fit.parameters[name] for name in golden} == pytest.approx(golden, rel=1e-5)
    assert fit.objective == pytest.approx(0.0010182740178006, rel=1e-9)
    assert fit.starts == 27 and fit.starts_at_best == 27 and fit.gradient_norm < 1e-8
    assert fit.parameters["a"] == pytest.approx(0.5139, abs=1e-4) and fit.residual_rms == pytest.approx(0.0076, abs=1e-4)


@pytest.mark.parametrize(("delta", "golden"), [
    (1e-2, {"alpha": 0.3544, "beta": 0.3815}),
    (1e-4, {"alpha": 0.34741, "beta": 0.36539}),
    (None, {"A": 593.32, "B": 4875.64, "E": 1.86455, "alpha": 0.36025, "beta": 0.40588}),
    (1e-8, {"A": 482.01, "B": 2085.43, "E": 1.81686, "alpha": 0.34781, "beta": 0.36585}),      # least absolute deviations
])
def test_other_thresholds(hoffmann, delta, golden):
    fit = fit_chinchilla(*(x[5:] for x in hoffmann), delta=delta)
    assert fit.identified and fit.starts_at_best == fit.starts
    for name, value in golden.items():
        places = {"A": 2, "B": 2, "E": 5}.get(name, 4 if delta == 1e-2 else 5)
        assert fit.parameters[name] == pytest.approx(value, abs=1.2 * 10**-places), name


@pytest.mark.parametrize(("dropped", "beta"), [(0, 0.453), (1, 0.412), (3, 0.382), (10, 0.358)])
def test_dropping_the_highest_losses(hoffmann, dropped, beta):
    fit = fit_chinchilla(*(x[dropped:] for x in hoffmann))
    assert fit.parameters["beta"] == pytest.approx(beta, abs=6e-4)
    if dropped == 0:
        assert [fit.parameters["E"], fit.parameters["B"]] == pytest.approx([1.891, 12846], rel=3e-4)


def test_bootstrap_of_240_points(fit):
    """Besiroglu et al.'s own draws, 4,000 of them in the time that 1,000 may take."""
    # The draws are indices into the file's order.
    points = rows("chinchilla_points.csv")
    loss = np.array([float(row["loss"]) for row in points])
    inside = loss < np.sort(loss)[-5]
    N, C = (np.array([float(row[name]) for row in points])[inside] for name in ("Model Size", "Training FLOP"))
    points = Points(N, C / (6 * N), C, loss[inside], np.arange(240))
    began = time.process_time()
    drawn = bootstrap(fit, points, 4000, seed=42)
    spent = time.process_time() - began         # of all threads, so that a busy machine does not count
    assert spent < 20, f"4,000 resamples took {spent:.1f} CPU seconds; 1,000 have 10 seconds on two cores"
    assert drawn.failed == 0 and drawn.clusters == 240
    golden = {"A": 124.494, "B": 1293.169, "E": 0.02566, "alpha": 0.01540, "beta": 0.02059, "a": 0.01997}
    assert {name: drawn.se[name] for name in golden} == pytest.approx(golden, rel=5e-4)
    published = {"A": (285.214, 743.626), "B": (1042.357, 5810.344), "E": (1.769, 1.871), "alpha": (0.317, 0.373),
                 "beta": (0.331, 0.415)}
    for name, ends in published.items():
        assert drawn.ci95[name] == pytest.approx(ends, rel=4e-3), name
    final = with_bootstrap(fit, points, 200)
    assert final.interval == "bootstrap" and final.identified and final.clusters == 240
    assert (final.resamples, final.failed) == (200, 0) and final.se["A"] == pytest.approx(124.5, rel=0.2)


def test_bootstrap_over_sizes(hoffmann, fit):
    """Points of one size are not independent: with 42 sizes as clusters A, alpha and E are less certain (facts 1.3)."""
    N, D, L = (x[5:] for x in hoffmann)
    clusters = np.unique(np.round(np.log(N), 2), return_inverse=True)[1]
    drawn = bootstrap(fit, Points(N, D, 6 * N * D, L, clusters), 1000)
    assert 35 <= drawn.clusters <= 50 and drawn.se["A"] > 135 and drawn.se["alpha"] > 0.0165


def test_gadre_hold_outs():
    """Five runs predict 1.4B at M = 640 within 0.7103 % and 6.9B at M = 20 within 0.7320 %: tied exponents, squares of L."""
    runs = {(round(float(row["N"]) / 1e6), float(row["mult"])): row
            for row in rows("gadre2024_104runs.csv") if row["train_set"] == "rpj"}      # mult 1 is 20 tokens per parameter
    five = [runs[key] for key in ((11, 1), (79, 1), (154, 1), (412, 1), (11, 16))]
    N, D, L = (np.array([float(row[name]) for row in five]) for name in ("N", "D", "loss_c4_val"))
    fit = fit_chinchilla(N, D, L, tied=True, raw=True)
    assert {name: fit.parameters[name] for name in ("A", "E", "alpha")} == pytest.approx(
        {"A": 166.211, "E": 1.83665, "alpha": 0.272851}, rel=1e-5)
    assert fit.parameters["B"] == pytest.approx(366.687 * 6 ** (-0.272851 / 2), rel=1e-5)
    assert fit.starts_at_best == fit.starts
    for key, printed in (((1440, 32), "0.7103"), ((6889, 1), "0.7320"), ((1440, 1), "0.1098")):
        row = runs[key]
        loss = float(row["loss_c4_val"])
        error = 100 * abs(fit.predict(float(row["N"]), float(row["D"])) - loss) / loss
        assert f"{error:.4f}" == printed
