"""Simulate studies of known laws and count how often scaling/fit.py tells the truth about them (docs/scaling.md has the counts).

    python tests/law_trials.py outliers --draws 60      # is the right law kept, are the outliers named, and nothing else?
    python tests/law_trials.py faults --draws 300       # are faults that runs share noticed, and do intervals hold the truth?

Every trial draws tables from a law that is known, so a rule of laws.py can be judged, or changed, without a published table.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # tiny fits are ten times slower on threaded BLAS
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
from dataclasses import dataclass, replace

import numpy as np

from scaling.laws import Fit, Points, fit_form, lack_of_fit, shared_fault, with_bootstrap

TRUTH = {"E": 1.817218, "A": 477.826, "B": 2143.417, "alpha": 0.34731, "beta": 0.367172}     # Besiroglu et al. 2024


def loss_of(N, D, truth: dict = TRUTH):
    """Nats per token of L(N, D) = E + A / N^alpha + B / D^beta."""
    return truth["E"] + truth["A"] * N ** -truth["alpha"] + truth["B"] * D ** -truth["beta"]


def independent(N, D, loss) -> Points:
    """Points of C = 6 N D, each a trajectory of its own."""
    return Points(N, D, 6 * N * D, loss, np.arange(len(N)))


# ----------------------------------------------------------------------------------------------------------- outliers

@dataclass(frozen=True)
class OutlierTrial:
    """What one table with outliers led to."""

    is_kept: bool                   # L(N, D) is identified and fits, so it is headlined
    missed: int                     # outliers that are not named
    false_names: int                # sound points that are named, as outliers or as too early
    covers: bool                    # the interval of alpha holds the truth


def table_with_outliers(seed: int, outliers: int, sizes: int = 6, ratios: int = 6, noise: float = 2e-3):
    """(points, indices of the outliers): a grid with normal noise, some losses of which are 2 to 8 % too high or too low."""
    rng = np.random.default_rng(seed)
    N = np.repeat(np.geomspace(3e7, 1e9, sizes), ratios)
    D = N * np.tile(np.geomspace(5, 160, ratios), sizes)
    loss = loss_of(N, D) * np.exp(rng.normal(0, noise, len(N)))
    wrong = rng.choice(len(N), outliers, replace=False)
    loss[wrong] *= 1 + rng.uniform(0.02, 0.08, outliers) * rng.choice([-1, 1], outliers)
    return independent(N, D, loss), wrong


def outlier_trial(seed: int, outliers: int, resamples: int = 0, **design) -> OutlierTrial:
    points, wrong = table_with_outliers(seed, outliers, **design)
    fit = with_bootstrap(fit_form("chinchilla", points), points, resamples)
    lack = lack_of_fit(fit, points) if fit.identified else None
    named = {index for index, _ in fit.outliers}
    blamed = named if lack is None else named | set(lack["left_out"])
    return OutlierTrial(fit.identified and lack is None, len(set(wrong) - named), len(blamed - set(wrong)), covers(fit))


def covers(fit: Fit, truth: dict = TRUTH, name: str = "alpha") -> bool:
    if fit.ci95 is None:
        return False
    low, high = fit.ci95[name]
    return low < truth[name] < high


def report_outliers(draws: int) -> None:
    designs = [("36 points", 0, {}), ("36 points", 1, {}), ("36 points", 2, {}), ("36 points, noise of .5 %", 0, {"noise": 5e-3}),
               ("16 points", 0, {"sizes": 4, "ratios": 4}), ("16 points", 1, {"sizes": 4, "ratios": 4}),
               ("144 points", 0, {"sizes": 12, "ratios": 12}), ("144 points", 8, {"sizes": 12, "ratios": 12})]
    for name, outliers, design in designs:
        trials = [outlier_trial(seed, outliers, **design) for seed in range(draws)]
        print(f"{name}, {outliers} outliers: law kept {sum(trial.is_kept for trial in trials)} of {draws}, "
              f"{sum(trial.missed for trial in trials)} of {draws * outliers} not named, "
              f"tables with a false name {sum(trial.false_names > 0 for trial in trials)}, "
              f"alpha inside {sum(trial.covers for trial in trials)}", flush=True)


# ------------------------------------------------------------------------------------------------ faults that runs share

def table_of_sizes(seed: int, tuning: float = 0.0, trunk: float = 0.0, seeds: int = 1, sizes: int = 6, ratios: int = 6,
                   noise: float = 1e-3) -> tuple[Points, np.ndarray]:
    """(points that pass for independent, the run of each): sizes, and the runs of each, are off the law by normal shares."""
    rng = np.random.default_rng(seed)
    run_sizes = np.repeat(np.geomspace(3e7, 1e9, sizes), seeds)
    run = np.repeat(np.arange(sizes * seeds), ratios)
    N = run_sizes[run]
    D = N * np.tile(np.geomspace(5, 160, ratios), sizes * seeds)
    off = np.repeat(rng.normal(0, tuning, sizes), seeds)[run] + rng.normal(0, trunk, sizes * seeds)[run]
    loss = loss_of(N, D) * np.exp(off + rng.normal(0, noise, len(N)))
    return independent(N, D, loss), run


def fault_trial(seed: int, **design) -> tuple[str | None, bool, bool]:
    """(what shares a fault, whether the interval of alpha holds the truth, whether the one of independent points does)."""
    points, run = table_of_sizes(seed, **design)
    fit = fit_form("chinchilla", points)
    fault = shared_fault(fit, points, {"run": run} if design.get("trunk") else {})
    if fault is None:
        return None, covers(fit), covers(fit)
    clustered = replace(points, cluster=fault.labels)
    return fault.by, covers(with_bootstrap(fit, clustered, 100)), covers(fit)


def report_faults(draws: int) -> None:
    designs = [("36 points, no fault", {}), ("16 points, no fault", {"sizes": 4, "ratios": 4}),
               ("sizes off by .3 %", {"tuning": 3e-3}), ("sizes off by .3 %, 8 of 4 points", {"tuning": 3e-3, "sizes": 8, "ratios": 4}),
               ("runs off by .2 %, 3 a size, in a column", {"trunk": 2e-3, "noise": 5e-4, "seeds": 3, "sizes": 5, "ratios": 4})]
    for name, design in designs:
        trials = [fault_trial(seed, **design) for seed in range(draws)]
        print(f"{name}: a fault named {sum(by is not None for by, _, _ in trials)} of {draws}, alpha inside "
              f"{sum(inside for _, inside, _ in trials)}, of independent points {sum(plain for _, _, plain in trials)}", flush=True)


REPORTS = {"outliers": report_outliers, "faults": report_faults}


@np.errstate(all="ignore")
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=REPORTS)
    parser.add_argument("--draws", type=int, default=60)
    options = parser.parse_args()
    REPORTS[options.trial](options.draws)


if __name__ == "__main__":
    main()
