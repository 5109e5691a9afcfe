"""Find the model that a compute budget trains best, under a law of our own runs or a published one."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar

from scaling.chinchilla import fit_chinchilla
from scaling.forms import Fit
from scaling.frozen import read_json
from scaling.published import EPOCH, Surface
from scaling.records import RecordError


@dataclass(frozen=True)
class Law:
    """L(N, D) with where it comes from; fit is None where the law brings no interval."""

    surface: Surface
    note: str
    fit: Fit | None
    N: np.ndarray               # of the BF16 runs that are done; (0,) where none is known
    D: np.ndarray
    largest: float | None       # the largest 6 N D among them


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

    Raises RecordError for a file that cannot be read."""
    nothing = np.array([])
    published = f"{EPOCH.source}: another corpus and tokenizer, so compare its losses with each other alone"
    if path is None:
        return Law(EPOCH, published, None, nothing, nothing, None)
    content = read_json(Path(path))
    try:
        groups = content.get("groups", {})
        recipe = "bf16" if "bf16" in groups else next(iter(groups), None)
        runs = [one for one in content.get("inputs", []) if one["recipe"] == recipe]
        N, D, loss = (np.array([float(run[key]) for run in runs]) for key in ("N", "D", "loss"))
        said = (groups[recipe] if recipe else content)["laws"]["chinchilla"]
        largest = float((6 * N * D).max()) if runs else None
        if not said["identified"]:
            note = f"{path} identifies no L(N, D) ({said['reason']}), so"
            return Law(EPOCH, f"{note} {published}", None, N, D, None)
        surface = Surface(str(path), str(path), **{key: float(said[key]) for key in ("E", "A", "B", "alpha", "beta")})
        if not runs:
            return Law(surface, f"{path}, {said['n']} points; without the points themselves it has no interval", None, N, D, None)
        fit = fit_chinchilla(N, D, loss, seed_sd=float(content.get("seed_noise", {}).get("used") or 0.0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{path} is no law.json of this version ({type(error).__name__}: {error}): make it with "
                          "python scaling/fit.py") from None
    return Law(surface, f"{path}, {len(runs)} runs in {recipe}; intervals are this law's for one run, without the doubt in its "
                        "form (fit.py --predict has both)", fit, N, D, largest)


def read_gap(law: str | None, recipe: str, given: float | None = None) -> tuple[tuple[float, float, float], str]:
    """FP8's relative loss gap as (mean, low, high) and where it comes from: as given in per cent, else the precision.json
    beside law.json, else 0. Raises RecordError for a file that cannot be read."""
    if given is not None:
        return (given / 100,) * 3, f"{given:g} %, as given"
    path = Path(law).parent / "precision.json" if law else None
    if path is not None and path.is_file():
        try:
            said = read_json(path)["common"].get(recipe)
            if said:
                ends = [said["bf16"][key] for key in ("mean", "low", "high")]
                values = tuple((ends[0] if value is None else value) / 100 for value in ends)
                text = "one pair, no interval" if ends[1] is None else f"{ends[1]:+.3f} to {ends[2]:+.3f} %"
                return values, f"{ends[0]:+.3f} % for {recipe} ({text}), from {path}"
        except (KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"{path} is no precision.json of this version ({type(error).__name__}: {error}): make it with "
                              "python scaling/precision.py") from None
    return (0.0, 0.0, 0.0), f"not measured for {recipe}, so FP8's losses count none: hold its true gap against the break-even gap"
