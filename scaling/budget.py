"""Find the model that a compute budget trains best, under a law of our own runs or a published one."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar

from runtime.cli import UserError
from scaling.intervals import with_bootstrap
from scaling.laws import Fit, Points, fit_chinchilla
from scaling.pairs import EPOCH, Surface, human
from scaling.records import read_json

# Smallest and largest 6 N D (FLOPs), and tokens per parameter, of the 240 points of Epoch's law.
EPOCH_COMPUTE, EPOCH_RATIO = (1.397e18, 1.296e22), (0.456, 341.0)
FAR_COMPUTE, FAR_RATIO = 100, 3         # times beyond a law's points from where on its prediction is called an extrapolation


@dataclass(frozen=True)
class Law:
    """L(N, D) with where it comes from, and the BF16 runs that are done; fit is None where the law brings no interval."""

    surface: Surface
    note: str
    fit: Fit | None
    N: np.ndarray               # of the runs that are done; (0,) where none is known
    D: np.ndarray
    trunks: tuple[str, ...]     # the trajectory that each belongs to
    names: tuple[str, ...]
    compute: tuple[float, float] | None     # smallest and largest 6 N D of the law's points; None where they are not known
    ratio: tuple[float, float] | None       # their tokens per parameter

    def beyond(self, N: float, D: float) -> str:
        """How far N, D lie beyond the law's points, "" where they do not."""
        if self.compute is None:
            return ""
        said, is_far = [], False
        times, share = 6 * N * D / self.compute[1], 6 * N * D / self.compute[0]
        if times > 1.5:
            said, is_far = [f"{times:.3g} times the law's largest compute"], times > FAR_COMPUTE
        elif share * FAR_COMPUTE < 1:
            said, is_far = [f"{share:.2g} of the law's smallest compute"], True
        if not self.ratio[0] / FAR_RATIO <= D / N <= self.ratio[1] * FAR_RATIO:
            said, is_far = [*said, f"{D / N:{',.0f' if D > N else '.2g'}} tokens per parameter, the law's points have "
                                   f"{self.ratio[0]:.3g} to {self.ratio[1]:.3g}"], True
        return "extrapolation: " * is_far + "; ".join(said)


@dataclass(frozen=True)
class Size:
    """One of the repository's sizes, with what a token costs there; speeds are of one GPU."""

    name: str
    N: int
    flops_per_token: float
    mfu: float                  # of the BF16 peak
    speedup: float | None       # FP8 tokens per second over BF16's; None where the GPU has no FP8 matmuls


def tokens(N, sizes, flops: float, in_fp8: bool):
    """Training tokens of an N-parameter model for `flops` at the BF16 peak; between the sizes by interpolation in ln N.

    Beyond the smallest and the largest, MFU and speed-up stay, and attention's share of a token's FLOPs falls as N^-1/3,
    as it does when depth grows with width."""
    N, at = np.asarray(N, dtype=float), np.log([size.N for size in sizes])

    def along(values):
        return np.exp(np.interp(np.log(N), at, np.log(values)))

    within = np.clip(N, sizes[0].N, sizes[-1].N)
    per_token = N * (6 + (along([size.flops_per_token / size.N for size in sizes]) - 6) * (N / within) ** (-1 / 3))
    speed = along([size.speedup for size in sizes]) if in_fp8 else 1.0
    return flops * along([size.mfu for size in sizes]) * speed / per_token


def optimum(surface: Surface, sizes, flops: float, in_fp8: bool) -> tuple[float, float]:
    """(N*, D*): the size whose loss is lowest when it trains on as many tokens as the budget buys it.

    A relative gap that is the same for every size moves the loss, not the optimum."""
    def loss(log_n):
        return surface.loss(np.exp(log_n), tokens(np.exp(log_n), sizes, flops, in_fp8))

    grid = np.linspace(math.log(1e5), math.log(1e14), 2000)     # kinks of the interpolation could trap a local search
    centre, step = grid[int(np.argmin(loss(grid)))], grid[1] - grid[0]
    N = math.exp(minimize_scalar(loss, bounds=(centre - step, centre + step), method="bounded", options={"xatol": 1e-10}).x)
    return N, float(tokens(N, sizes, flops, in_fp8))


def break_even(surface: Surface, N: float, D: float, speedup: float) -> float:
    """The relative loss gap at which FP8 on `speedup` times the tokens ends where BF16 does, at one size."""
    return surface.loss(N, D) / surface.loss(N, speedup * D) - 1


def read_law(path: str | None) -> Law:
    """The BF16 runs' own Chinchilla law from a law.json, fitted anew to its inputs for the interval; else Epoch's, saying so.

    Raises UserError for a file that is not there or cannot be read."""
    published = f"{EPOCH.source}: another corpus and tokenizer, so compare its losses with each other alone"
    if path is None:
        return Law(EPOCH, published, None, *(np.array([]),) * 2, (), (), EPOCH_COMPUTE, EPOCH_RATIO)
    if not Path(path).is_file():
        inside = next((one for one in (Path(path) / "law.json", Path(path) / "law" / "law.json") if one.is_file()), None)
        raise UserError(f"law={path} is {'a folder' if Path(path).is_dir() else 'not there'}: give "
                          f"{inside or 'the law.json that python scaling/fit.py writes, such as out/chinchilla/law/law.json'}")
    content = read_json(Path(path))
    try:
        if content.get("conventions", {}).get("N") == "params_nonembed":
            raise UserError(f"{path} counts non-embedding parameters, and a budget is planned in all of them: fit the same "
                              "runs by all of them (python scaling/fit.py RUNS n=total out=DIR) and give that law.json")
        groups = content.get("groups", {})
        recipe = "bf16" if "bf16" in groups else next(iter(groups), None)
        runs = [one for one in content.get("inputs", []) if one["recipe"] == recipe]
        N, D, loss = (np.array([float(run[key]) for run in runs]) for key in ("N", "D", "loss"))
        done = (N, D, *(tuple(str(run[key]) for run in runs) for key in ("trunk", "run_id")))
        said = (groups[recipe] if recipe else content)["laws"]["chinchilla"]
        if not said["identified"]:
            note = f"{path} identifies no L(N, D) ({said['reason']}), so"
            return Law(EPOCH, f"{note} {published}", None, *done, EPOCH_COMPUTE, EPOCH_RATIO)
        surface = Surface(str(path), str(path), **{key: float(said[key]) for key in ("E", "A", "B", "alpha", "beta")})
        if not runs:
            note = f"{path}, {said['n']} points; without the points themselves it has neither an interval nor a known range"
            return Law(surface, note, None, *done, None, None)
        fit = with_bootstrap(fit_chinchilla(N, D, loss, seed_sd=float(content.get("seed_noise", {}).get("used") or 0.0)),
                             Points(N, D, 6 * N * D, loss, np.array(done[2])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is no law.json of this version ({type(error).__name__}: {error}): make it with "
                          "python scaling/fit.py") from None
    where = f"{path}, {len(runs)} runs of {len(set(done[2]))} trajectories in {recipe}; "
    note = (f"no interval, because {fit.reason}" if not fit.identified else
            "intervals are this law's for one run, without the doubt in its form (fit.py --predict has both)")
    return Law(surface, where + note, fit if fit.identified else None, *done, _ends(6 * N * D), _ends(D / N))


def _ends(values) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def read_gap(law: str | None, recipe: str, given: float | None = None,
             within: tuple[float, float] = (0.0, math.inf)) -> tuple[tuple[float, float, float], str]:
    """FP8's relative loss gap as (mean, low, high) and where it comes from: as given in per cent, else the precision.json
    beside law.json if it has a size with a parameter count in `within`, else 0.

    Raises UserError for a file that cannot be read."""
    none = (0.0, 0.0, 0.0)
    if given is not None:
        return (given / 100,) * 3, f"{given:g} %, as given"
    path = Path(law).parent / "precision.json" if law else None
    if path is not None and path.is_file():
        try:
            content = read_json(path)
            said = content["common"].get(recipe)
            at = [row["params_total"] for row in content["sizes"] if row["recipe"] == recipe]
            if said and not any(within[0] <= N <= within[1] for N in at):
                return none, (f"{path} has one at {human(min(at))} to {human(max(at))} parameters alone, which says little of "
                              f"the sizes here: FP8's losses count none; give one with gap=")
            if said:
                ends = [said["bf16"][key] for key in ("mean", "low", "high")]
                values = tuple((ends[0] if value is None else value) / 100 for value in ends)
                text = "one pair, no interval" if ends[1] is None else f"{ends[1]:+.3f} to {ends[2]:+.3f} %"
                return values, f"{ends[0]:+.3f} % for {recipe} ({text}), from {path}"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is no precision.json of this version ({type(error).__name__}: {error}): make it with "
                              "python scaling/precision.py") from None
    return none, f"not measured for {recipe}, so FP8's losses count none: hold its true gap against the break-even gap"
