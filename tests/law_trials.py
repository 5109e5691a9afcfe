"""Simulate studies of known laws and count how often scaling/fit.py tells the truth about them
(docs/scaling.md has the counts).

    python tests/law_trials.py outliers --draws 60   # right law kept, outliers named, nothing else?
    python tests/law_trials.py faults --draws 300    # shared faults noticed, intervals that cover?
    python tests/law_trials.py isoflop --draws 100   # bias and coverage of N*'s exponent
    python tests/law_trials.py forecasts --draws 20  # do predictions hold surfaces that bend?
    python tests/law_trials.py gap --draws 400       # coverage of the gap's law, false trends

Every trial draws tables from a law that is known, so a rule of scaling/laws can be judged, or
changed, without a published table."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # tiny fits are ten times slower on threaded BLAS
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from scaling.laws import (
    Fit,
    Forecast,
    Points,
    fit_form,
    fit_isoflop,
    forecast,
    lack_of_fit,
    shared_fault,
    with_bootstrap,
)
from scaling.paired.gap_law import CannotFitGap, GapFit, GapPoints, fit_gap, power_axes

Law = dict[str, float]  # E, A, B, alpha, beta
LossSurface = Callable[[np.ndarray, np.ndarray], np.ndarray]  # N, D -> nats per token

# Besiroglu et al. 2024
TRUTH = {"E": 1.817218, "A": 477.826, "B": 2143.417, "alpha": 0.34731, "beta": 0.367172}


def loss_of(N: np.ndarray, D: np.ndarray, truth: Law = TRUTH) -> np.ndarray:
    """Nats per token of L(N, D) = E + A / N^alpha + B / D^beta."""
    return truth["E"] + truth["A"] * N ** -truth["alpha"] + truth["B"] * D ** -truth["beta"]


def independent(N: np.ndarray, D: np.ndarray, loss: np.ndarray) -> Points:
    """Points of C = 6 N D, each a trajectory of its own."""
    return Points(N, D, 6 * N * D, loss, np.arange(len(N)))


# ---------------------------------------------------------------------------------------- outliers


@dataclass(frozen=True)
class OutlierTrial:
    """What one table with outliers led to."""

    is_kept: bool  # L(N, D) is identified and fits, so it is headlined
    missed: int  # outliers that are not named
    false_names: int  # sound points that are named, as outliers or as too early
    covers: bool  # the interval of alpha holds the truth


def table_with_outliers(
    seed: int, outliers: int, sizes: int = 6, ratios: int = 6, noise: float = 2e-3
) -> tuple[Points, np.ndarray]:
    """(points, indices of the outliers): a grid with normal noise, some losses of which are 2 to 8
    % too high or too low."""
    rng = np.random.default_rng(seed)
    N = np.repeat(np.geomspace(3e7, 1e9, sizes), ratios)
    D = N * np.tile(np.geomspace(5, 160, ratios), sizes)
    loss = loss_of(N, D) * np.exp(rng.normal(0, noise, len(N)))
    wrong = rng.choice(len(N), outliers, replace=False)
    loss[wrong] *= 1 + rng.uniform(0.02, 0.08, outliers) * rng.choice([-1, 1], outliers)
    return independent(N, D, loss), wrong


def outlier_trial(seed: int, outliers: int, resamples: int = 0, **design: float) -> OutlierTrial:
    points, wrong = table_with_outliers(seed, outliers, **design)
    fit = with_bootstrap(fit_form("chinchilla", points), points, resamples)
    lack = lack_of_fit(fit, points) if fit.identified else None
    named = {index for index, _ in fit.outliers}
    blamed = set(named)
    if lack is not None and lack.mended is not None:
        blamed |= set(lack.mended.left_out)
    return OutlierTrial(
        is_kept=fit.identified and lack is None,
        missed=len(set(wrong) - named),
        false_names=len(blamed - set(wrong)),
        covers=covers(fit),
    )


def covers(fit: Fit, truth: Law = TRUTH, name: str = "alpha") -> bool:
    if fit.ci95 is None:
        return False
    low, high = fit.ci95[name]
    return low < truth[name] < high


def report_outliers(draws: int) -> None:
    designs = [
        ("36 points", 0, {}),
        ("36 points", 1, {}),
        ("36 points", 2, {}),
        ("36 points, noise of .5 %", 0, {"noise": 5e-3}),
        ("16 points", 0, {"sizes": 4, "ratios": 4}),
        ("16 points", 1, {"sizes": 4, "ratios": 4}),
        ("144 points", 0, {"sizes": 12, "ratios": 12}),
        ("144 points", 8, {"sizes": 12, "ratios": 12}),
    ]
    for name, outliers, design in designs:
        trials = [outlier_trial(seed, outliers, **design) for seed in range(draws)]
        print(
            f"{name}, {outliers} outliers: law kept {sum(trial.is_kept for trial in trials)} of"
            f" {draws}, {sum(trial.missed for trial in trials)} of {draws * outliers} not named,"
            f" tables with a false name {sum(trial.false_names > 0 for trial in trials)}, alpha"
            f" inside {sum(trial.covers for trial in trials)}",
            flush=True,
        )


# -------------------------------------------------------------------------- faults that runs share


def table_of_sizes(
    seed: int,
    tuning: float = 0.0,
    trunk: float = 0.0,
    seeds: int = 1,
    sizes: int = 6,
    ratios: int = 6,
    noise: float = 1e-3,
) -> tuple[Points, np.ndarray]:
    """(points that pass for independent, the run of each): sizes, and the runs of each, are off the
    law by normal shares."""
    rng = np.random.default_rng(seed)
    run_sizes = np.repeat(np.geomspace(3e7, 1e9, sizes), seeds)
    run = np.repeat(np.arange(sizes * seeds), ratios)
    N = run_sizes[run]
    D = N * np.tile(np.geomspace(5, 160, ratios), sizes * seeds)
    of_size = np.repeat(rng.normal(0, tuning, sizes), seeds)
    of_run = rng.normal(0, trunk, sizes * seeds)
    deviation = of_size[run] + of_run[run]
    loss = loss_of(N, D) * np.exp(deviation + rng.normal(0, noise, len(N)))
    return independent(N, D, loss), run


@dataclass(frozen=True)
class FaultTrial:
    """What one table whose runs may share a fault led to."""

    by: str | None  # what shares it
    covers: bool  # the interval of alpha, of the groups that share it, holds the truth
    covers_as_independent: bool  # so does the one of independent points


def fault_trial(seed: int, **design: float) -> FaultTrial:
    points, run = table_of_sizes(seed, **design)
    fit = fit_form("chinchilla", points)
    fault = shared_fault(fit, points, {"run": run} if design.get("trunk") else {})
    if fault is None:
        return FaultTrial(None, covers(fit), covers(fit))
    clustered = replace(points, cluster=fault.labels)
    return FaultTrial(fault.by, covers(with_bootstrap(fit, clustered, 100)), covers(fit))


def report_faults(draws: int) -> None:
    designs = [
        ("36 points, no fault", {}),
        ("16 points, no fault", {"sizes": 4, "ratios": 4}),
        ("sizes off by .3 %", {"tuning": 3e-3}),
        ("8 sizes of 4 points off by .3 %", {"tuning": 3e-3, "sizes": 8, "ratios": 4}),
        (
            "runs off by .2 %, 3 a size, in a column",
            {"trunk": 2e-3, "noise": 5e-4, "seeds": 3, "sizes": 5, "ratios": 4},
        ),
    ]
    for name, design in designs:
        trials = [fault_trial(seed, **design) for seed in range(draws)]
        noticed = sum(trial.by is not None for trial in trials)
        inside = sum(trial.covers for trial in trials)
        plain = sum(trial.covers_as_independent for trial in trials)
        print(
            f"{name}: a fault named in {noticed} of {draws}, alpha inside in {inside}, by intervals"
            f" of independent points in {plain}",
            flush=True,
        )


# --------------------------------------------------------------------------------- IsoFLOP designs

LAWS = (
    TRUTH,
    {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28},
    {"E": 1.8, "A": 400, "B": 1500, "alpha": 0.5, "beta": 0.25},
    {"E": 1.8, "A": 480, "B": 2000, "alpha": 0.25, "beta": 0.5},
)
ISOFLOP_DESIGNS = (
    "centred",
    "wide",
    "offset",
    "narrow",
    "few",
    "unbalanced",
    "global",
    "drifting",
    "heavy tails",
    "outliers",
)


def best_size(compute: float, truth: Law) -> float:
    total = truth["alpha"] + truth["beta"]
    factor = truth["alpha"] * truth["A"] / (truth["beta"] * truth["B"])
    return factor ** (1 / total) * (compute / 6) ** (truth["beta"] / total)


def sizes_of_design(design: str, best: float, place: float) -> np.ndarray:
    """The sizes of one budget whose best size is known; place: 0 at the smallest budget, 1 at the
    largest."""
    if design == "wide":
        return best * np.geomspace(1 / 30, 30, 13)
    if design == "offset":
        return 2 * best * np.geomspace(1 / 6, 6, 9)
    if design == "narrow":
        return best * np.geomspace(1 / 2.2, 2.2, 9)
    if design == "few":
        return best * np.geomspace(1 / 5, 5, 6)
    if design == "unbalanced":
        return best * np.concatenate([np.geomspace(1 / 3, 0.8, 3), np.geomspace(1, 16, 6)])
    if design == "global":
        sizes = np.geomspace(1e4, 1e12, 54)
        return sizes[(sizes > best / 9) & (sizes < 9 * best)]
    if design == "drifting":
        return best * 3 ** (2 * place - 1) * np.geomspace(1 / 9, 9, 11)
    return best * np.geomspace(1 / 5, 5, 9)


def isoflop_table(seed: int, design: str, truth: Law, noise: float = 2e-3) -> Points:
    rng = np.random.default_rng(seed)
    computes = np.geomspace(1e18, 1e21, 4 if design == "few" else 7)
    rows = []
    for i, compute in enumerate(computes):
        N = sizes_of_design(design, best_size(compute, truth), i / (len(computes) - 1))
        if design == "heavy tails":
            deviation = rng.standard_t(3, len(N)) / np.sqrt(3)
        else:
            deviation = rng.normal(0, 1, len(N))
        loss = loss_of(N, compute / 6 / N, truth) * np.exp(noise * deviation)
        if design == "outliers":
            is_wrong = rng.random(len(N)) < 0.05
            shift = rng.uniform(0.02, 0.06, len(N)) * rng.choice([-1, 1], len(N))
            loss *= np.where(is_wrong, 1 + shift, 1)
        rows.append((N, compute / 6 / N, np.full(len(N), compute), loss))
    N, D, C, loss = np.hstack(rows)
    return Points(N, D, C, loss, np.arange(len(N)))


def bent_valleys(seed: int = 0, noise: float = 1.5e-3) -> Points:
    """IsoFLOP budgets whose losses rise beside the minimum as no L(N, D) does; minima and lowest
    losses are those of TRUTH."""
    rng = np.random.default_rng(seed)
    N, D, loss = [], [], []
    for compute in np.geomspace(1e18, 1e21, 7):
        best = best_size(compute, TRUTH)
        away = np.log(np.geomspace(1 / 6, 6, 9))
        rise = 0.05 * away**2 + 0.03 * np.maximum(away, 0) ** 3
        N.append(best * np.exp(away))
        D.append(compute / 6 / N[-1])
        lowest = loss_of(best, compute / 6 / best)
        loss.append(lowest * (1 + rise) * np.exp(rng.normal(0, noise, len(away))))
    return independent(np.concatenate(N), np.concatenate(D), np.concatenate(loss))


def isoflop_trials(design: str, draws: int, truth: Law) -> tuple[np.ndarray, np.ndarray]:
    """(errors of a, whether its interval holds the truth) of the tables whose exponent is
    identified."""
    exponent = truth["beta"] / (truth["alpha"] + truth["beta"])
    errors, inside = [], []
    # else the laws' tables share their noise and count for one
    noise_of_law = 10_000 * LAWS.index(truth)
    for seed in range(draws):
        fit = fit_isoflop(isoflop_table(noise_of_law + seed, design, truth))
        if fit.identified:
            low, high = fit.ci95["a"]
            errors.append(fit.parameters["a"] - exponent)
            inside.append(low < exponent < high)
    return np.array(errors), np.array(inside)


def report_isoflop(draws: int) -> None:
    for design in ISOFLOP_DESIGNS:
        trials = [isoflop_trials(design, draws, truth) for truth in LAWS]
        errors, inside = (np.concatenate(parts) for parts in zip(*trials, strict=True))
        print(
            f"{design:12} bias of a {errors.mean():+.4f} +-"
            f" {errors.std() / np.sqrt(len(errors)):.4f}, its interval holds the truth"
            f" {inside.mean():.3f}, of {len(inside)} tables",
            flush=True,
        )


# --------------------------------------------------------------------------------------- forecasts


def third_term(N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """A slow third term: in sight of the points it passes for an irreducible loss, far out it falls
    on."""
    return loss_of(N, D, TRUTH | {"E": 1.0}) + 6 * (N * D) ** -0.05


def mixed_term(N: np.ndarray, D: np.ndarray) -> np.ndarray:
    return loss_of(N, D, TRUTH | {"E": 1.4}) + 100 * (N * D) ** -0.1


def saturating(N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Exponents that fall by .02 a decade."""
    alpha, beta = 0.347 - 0.02 * np.log10(N / 1e8), 0.367 - 0.02 * np.log10(D / 2e9)
    return 1.6 + 477 * N**-alpha + 2143 * D**-beta


def steepening(N: np.ndarray, D: np.ndarray) -> np.ndarray:
    alpha, beta = 0.24 + 0.01 * np.log10(N / 1e8), 0.24 + 0.01 * np.log10(D / 2e9)
    return 1.6 + 60 * N**-alpha + 100 * D**-beta


BENT = (third_term, mixed_term, saturating, steepening, loss_of)
OFF_THE_RAY = {
    "6 sizes": (np.geomspace(2e7, 4e8, 6), (5, 10, 40, 80), 1.5e9),
    "10 sizes": (np.geomspace(2e7, 1e9, 10), (2, 8, 40, 160), 7e9),
    "a ladder": (np.geomspace(1.1e8, 2.7e9, 5), (20,), 1.3e10),
}


@dataclass(frozen=True)
class ForecastTrial:
    """A forecast of a surface that is known."""

    forecast: Forecast
    truth: float  # the surface's loss at the target

    @property
    def is_inside(self) -> bool:
        return self.forecast.low <= self.truth <= self.forecast.high

    @property
    def error_percent(self) -> float:
        return 100 * (self.forecast.loss / self.truth - 1)

    @property
    def width_percent(self) -> float:
        return 100 * (self.forecast.high / self.forecast.low - 1)


def forecast_trial(seed: int, surface: LossSurface, design: str) -> ForecastTrial:
    """A forecast at 20 tokens per parameter, with .1 % of noise."""
    sizes, ratios, target = OFF_THE_RAY[design]
    N = np.repeat(sizes, len(ratios))
    D = N * np.tile(ratios, len(sizes))
    noise = np.random.default_rng(seed).normal(0, 1e-3, len(N))
    points = independent(N, D, surface(N, D) * np.exp(noise))
    prediction = forecast(points, (target, 20 * target, 120 * target**2))
    return ForecastTrial(prediction, float(surface(target, 20 * target)))


def report_forecasts(draws: int) -> None:
    for surface in BENT:
        for design in OFF_THE_RAY:
            trials = [forecast_trial(seed, surface, design) for seed in range(draws)]
            inside = sum(trial.is_inside for trial in trials)
            error = np.mean([trial.error_percent for trial in trials])
            width = np.mean([trial.width_percent for trial in trials])
            print(
                f"{surface.__name__:12} {design:9} inside {inside} of {draws}, error"
                f" {error:+.2f} %, interval {width:.1f} % wide",
                flush=True,
            )


# ------------------------------------------------------------------------------- the law of the gap


@dataclass(frozen=True)
class GapTruth:
    """gap = k (N / 2e5)^-a (D/N / 20)^b in per cent of the loss."""

    k: float
    a: float
    b: float

    def at(self, N: np.ndarray, D: np.ndarray) -> np.ndarray:
        return self.k * (N / 2e5) ** -self.a * (D / N / 20) ** self.b


@dataclass(frozen=True)
class GapDesign:
    seeds: tuple[int, ...]  # of each size, smallest first; sizes are 30k to 1M parameters
    ratios: tuple[float, ...]  # tokens per parameter
    noise: float  # per cent: SD of one pair's gap, half of its variance the trunk's
    grows: float = 0.0  # the noise grows as N to this power


GAP_TARGET = 3e7, 6e8  # N, D to which the law is extrapolated: 30 times the largest size
STEEP = GapTruth(0.5, 0.2, 0.4)
GAP_DESIGNS = {
    "3 sizes, 3 budgets, 3 seeds": GapDesign((3,) * 3, (5, 10, 20), 0.15),
    "3 sizes, 4 budgets, 5 seeds": GapDesign((5,) * 3, (5, 10, 20, 40), 0.15),
    "3 sizes, 3 budgets, 10 seeds": GapDesign((10,) * 3, (5, 10, 20), 0.3),
    "4 sizes, 3 budgets, 3 seeds": GapDesign((3,) * 4, (5, 10, 20), 0.15),
    "4 sizes, 4 budgets, 5 seeds": GapDesign((5,) * 4, (5, 10, 20, 40), 0.3),
    "5 sizes, 4 budgets, 3 seeds": GapDesign((3,) * 5, (5, 10, 20, 40), 0.3),
    "5 sizes, 4 budgets, 10 seeds": GapDesign((10,) * 5, (5, 10, 20, 40), 0.3),
    "seeds 18/16/6/3 (study_cpu)": GapDesign((18, 16, 6, 3), (5, 10, 20, 40), 0.32),
    "seeds 10/4/3": GapDesign((10, 4, 3), (5, 10, 20, 40), 0.32),
    "5 sizes, 5 seeds, noise falls": GapDesign((5,) * 5, (5, 10, 20, 40), 0.2, -0.3),
    "5 sizes, 5 seeds, noise grows": GapDesign((5,) * 5, (5, 10, 20, 40), 0.2, 0.3),
}


@dataclass(frozen=True)
class GapTrial:
    """What one simulated study led to."""

    covers: dict[str, bool]  # k, a, b, law (the power law alone, extrapolated), union (all forms)
    is_told: bool  # a trend


def gap_points(seed: int, design: GapDesign, truth: GapTruth) -> GapPoints:
    """Pairs of a study: a trunk of each seed with branches, which share half of the variance."""
    rng = np.random.default_rng(seed)
    sizes = np.repeat(np.geomspace(3e4, 1e6, len(design.seeds)), design.seeds)
    N = np.repeat(sizes, len(design.ratios))
    D = N * np.tile(design.ratios, len(sizes))
    trunk = np.repeat(np.arange(len(sizes)), len(design.ratios))
    deviation = np.sqrt(0.5) * (rng.normal(size=len(sizes))[trunk] + rng.normal(size=len(N)))
    noise = design.noise * (N / 2e5) ** design.grows
    return GapPoints(N, D, truth.at(N, D) + noise * deviation, trunk)


def gap_trial(seed: int, design: GapDesign, truth: GapTruth) -> GapTrial:
    fit = fit_gap(gap_points(seed, design, truth), None)
    return GapTrial(_gap_coverage(fit, truth), fit.law.trend is not None)


def _gap_coverage(fit: GapFit, truth: GapTruth) -> dict[str, bool]:
    law, power = fit.law, fit.power
    at_reference = truth.at(law.N0, law.N0 * law.ratio0)
    at_target = truth.at(*GAP_TARGET)
    low, high = power.interval_at(power_axes(*GAP_TARGET, law.N0, law.ratio0))
    covered = {
        "k": law.k_low <= at_reference <= law.k_high,
        "a": law.a.low <= truth.a <= law.a.high,
        "b": law.b.low <= truth.b <= law.b.high,
        "law": low <= at_target <= high,
    }
    try:
        forecast_of_gap = fit.forecast(*GAP_TARGET)
    except CannotFitGap:  # one table in a hundred refutes its own law
        return covered
    return covered | {"union": forecast_of_gap.low <= at_target <= forecast_of_gap.high}


def told_share(design: GapDesign, truth: GapTruth, draws: int) -> float:
    """Share of studies that tell a trend; seeds that no other count uses."""
    laws = [fit_gap(gap_points(10_000 + seed, design, truth), None).law for seed in range(draws)]
    return sum(law.trend is not None for law in laws) / draws


def report_gap(draws: int) -> None:
    for name, design in GAP_DESIGNS.items():
        trials = [gap_trial(seed, design, STEEP) for seed in range(draws)]
        shares = []
        for key in ("k", "a", "b", "law", "union"):
            covered = [trial.covers[key] for trial in trials if key in trial.covers]
            shares.append(f"{key} {np.mean(covered):.3f}")
        refused = sum("union" not in trial.covers for trial in trials)
        print(
            f"{name:30} truth inside: {', '.join(shares)}; {refused} refused; a trend told in"
            f" {np.mean([trial.is_told for trial in trials]):.2f}, where the gap is constant in"
            f" {told_share(design, GapTruth(0.5, 0, 0), draws):.3f}, where it is 0 in"
            f" {told_share(design, GapTruth(0, 0, 0), draws):.3f}",
            flush=True,
        )


REPORTS = {
    "gap": report_gap,
    "outliers": report_outliers,
    "faults": report_faults,
    "isoflop": report_isoflop,
    "forecasts": report_forecasts,
}


@np.errstate(all="ignore")
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trial", choices=REPORTS)
    parser.add_argument("--draws", type=int, default=60)
    options = parser.parse_args()
    REPORTS[options.trial](options.draws)


if __name__ == "__main__":
    main()
