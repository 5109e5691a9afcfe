"""Scaling laws as pure statistics: arrays in, dataclasses out; no file, no table, no figure.

Read in this order: points.py (what is fitted), forms.py (the laws), solver.py (the optimum), fits.py
(what a fitted law is), law.py (one law), intervals.py (what is known of it), outliers.py,
shared_fault.py and lack_of_fit.py (where a law and its points part), valleys.py and isoflop.py
(minima at equal compute), choices.py (the same law under other choices), rivals.py (other surfaces).

A new form is an entry of NAMES and POWERS in forms.py, and of STARTS in law.py if its search needs
starts of its own. The commands scaling/fit.py and scaling/predict.py read, call and print."""

from scaling.laws.choices import MOST_SIZES, fit_form, robustness
from scaling.laws.fits import Fit, Optimum, inefficiency, unfitted, unidentified
from scaling.laws.forms import (
    DELTA,
    EXPONENTS,
    FACTORS,
    GAMMAS,
    NAMES,
    POWERS,
    centred,
    log_law,
    natural,
    terms,
)
from scaling.laws.intervals import bootstrap, jackknife, with_bootstrap, with_covariance
from scaling.laws.isoflop import SAME_BUDGET, fit_frontier, fit_isoflop, minima_of
from scaling.laws.lack_of_fit import MISSES, lack_of_fit, meets, near_zero
from scaling.laws.law import COLLAPSED, LEVELS, SPREAD, fit_band, fit_law
from scaling.laws.outliers import HAS_OUTLIERS
from scaling.laws.points import ONE_RAY, Points, on_one_ray, sizes_of
from scaling.laws.shared_fault import SIZE_TERMS, SharedFault, shared_fault
from scaling.laws.solver import descend

__all__ = [
    "COLLAPSED",
    "DELTA",
    "EXPONENTS",
    "FACTORS",
    "GAMMAS",
    "HAS_OUTLIERS",
    "LEVELS",
    "MISSES",
    "MOST_SIZES",
    "NAMES",
    "ONE_RAY",
    "POWERS",
    "SAME_BUDGET",
    "SIZE_TERMS",
    "SPREAD",
    "Fit",
    "Optimum",
    "Points",
    "SharedFault",
    "bootstrap",
    "centred",
    "descend",
    "fit_band",
    "fit_form",
    "fit_frontier",
    "fit_isoflop",
    "fit_law",
    "inefficiency",
    "jackknife",
    "lack_of_fit",
    "log_law",
    "meets",
    "minima_of",
    "natural",
    "near_zero",
    "on_one_ray",
    "robustness",
    "shared_fault",
    "sizes_of",
    "terms",
    "unfitted",
    "unidentified",
    "with_bootstrap",
    "with_covariance",
]
