"""Scaling laws as pure statistics: arrays in, dataclasses out; no sentence, no table, no figure.

Read in this order: forms.py (the laws), points.py (what is fitted), solver.py (the optimum),
fits.py (what a fitted law is), law.py (one law), intervals.py (what is known of it), outliers.py,
shared_fault.py and lack_of_fit.py (where a law and its points part), valleys.py and isoflop.py
(minima at equal compute), choices.py (a form by its name, and under other choices), rivals.py and
forecast.py (a run to come), refusals.py (why points do not tell).

A new form is an entry of NAMES and POWERS in forms.py (each power its own factor and exponent, in
the same order in both), its factors in FACTORS, a new axis a property of Points, starts in law.py's
STARTS unless it is one power law, and what its design needs in law.py's _lacking(). Hold it against
a table of known constants: exponents swapped in NAMES still give a certified law.

fit.py prints the forms in FORMS of scaling/groups.py; choose_headline() there says which of them is
the headline. The figure draws L(N, D) and laws over one axis: for another surface add a branch to
lines_of() in scaling/law_lines.py and to _captioned_law() in law_figure.py, else it shows the power
law over C. Forecasts have a list of forms of their own (forecast.py). An exponent can be held fixed
in the ray law alone (fit_law's gamma); rivals.py has the surfaces of fixed exponents. A shared
fault is judged by Chinchilla's residuals, so intervals may count sizes. The commands fit.py and
predict.py read, call and print."""

from scaling.laws.choices import MOST_SIZES, Refit, fit_form, robustness
from scaling.laws.fits import (
    BudgetMinimum,
    Fit,
    Outlier,
    Solution,
    WindowExponent,
    unfitted,
    unidentified,
)
from scaling.laws.forecast import Forecast, FormForecast, forecast
from scaling.laws.forms import DELTA, EXPONENTS, FACTORS, GAMMAS, NAMES, POWERS
from scaling.laws.intervals import bootstrap, jackknife, with_bootstrap
from scaling.laws.isoflop import SAME_BUDGET, fit_frontier, fit_isoflop, frontier_of, minima_of
from scaling.laws.lack_of_fit import LackOfFit, lack_of_fit, meets, near_zero
from scaling.laws.law import LEVELS, fit_band, fit_law
from scaling.laws.outliers import HAS_OUTLIERS
from scaling.laws.points import ONE_RAY, Points, on_one_ray, sizes_of
from scaling.laws.refusals import CannotFit, Refusal
from scaling.laws.shared_fault import SharedFault, shared_fault

__all__ = [
    "DELTA",
    "EXPONENTS",
    "FACTORS",
    "GAMMAS",
    "HAS_OUTLIERS",
    "LEVELS",
    "MOST_SIZES",
    "NAMES",
    "ONE_RAY",
    "POWERS",
    "SAME_BUDGET",
    "BudgetMinimum",
    "CannotFit",
    "Fit",
    "Forecast",
    "FormForecast",
    "LackOfFit",
    "Solution",
    "Outlier",
    "Points",
    "Refit",
    "Refusal",
    "SharedFault",
    "WindowExponent",
    "bootstrap",
    "fit_band",
    "fit_form",
    "fit_frontier",
    "fit_isoflop",
    "fit_law",
    "forecast",
    "frontier_of",
    "jackknife",
    "lack_of_fit",
    "meets",
    "minima_of",
    "near_zero",
    "on_one_ray",
    "robustness",
    "shared_fault",
    "sizes_of",
    "unfitted",
    "unidentified",
    "with_bootstrap",
]
