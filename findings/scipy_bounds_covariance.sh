#!/usr/bin/env bash
# scipy's curve_fit reports a standard error of zero, and another that is far too small, once bounds are given that no
# parameter touches.
#
# scipy 1.17.1, numpy 2.4.6. Without bounds curve_fit takes MINPACK's covariance. With bounds it inverts the Jacobian's
# singular values and leaves out those below about 1e-15 of the largest, without a warning. Parameters of unlike size
# make a well determined direction that small: its variance then counts as zero, not as unknown, and what the direction
# has in common with other parameters is missing from their variances too. The fitted values are right.
#
# What is run: Kaplan's law (Nc / N)^alpha, Nc = 8.8e13, alpha = 0.076, on twelve sizes with 0.5 % noise: once, and 300
# times to count how often the interval of alpha (Student's t, 95 %) holds the truth. Fitted in log Nc both ways agree.
#
# Output seen:
#   no bounds           Nc 8.50e+13 +- 5.9e+12   alpha 0.07619 +- 0.00031   holds 95 of 100
#   bounds=(0, inf)     Nc 8.50e+13 +- 2.8e-21   alpha 0.07619 +- 0.00005   holds 24 of 100
#   log Nc, no bounds   alpha 0.07619 +- 0.00031
#   log Nc, bounds      alpha 0.07619 +- 0.00031
#
# What follows: fit the logarithms of a law's coefficients, or take intervals from resampling.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet scipy==1.17.1 numpy==2.4.6

cd "$work"
"$work/venv/bin/python" - <<'PY'
import sys
import warnings

import numpy as np
from scipy.optimize import OptimizeWarning, curve_fit
from scipy.stats import t

NC, ALPHA = 8.8e13, 0.076
sizes = np.logspace(5, 9.5, 12)
rng = np.random.default_rng(0)
warnings.simplefilter("error", OptimizeWarning)  # none is given
np.seterr(over="ignore")  # far-off trial steps


def law(n, nc, alpha):
    return (nc / n) ** alpha


def law_of_log(n, log_nc, alpha):
    return np.exp(alpha * (log_nc - np.log(n)))


def fit(function, start, losses, **bounds):
    values, covariance = curve_fit(function, sizes, losses, p0=start, **bounds)
    return values, np.sqrt(np.diag(covariance))


def times_held(tables, **bounds):
    width = t.ppf(0.975, len(sizes) - 2)
    held = 0
    for losses in tables:
        values, errors = fit(law, (5e13, 0.08), losses, **bounds)
        held += abs(values[1] - ALPHA) < width * errors[1]
    return round(100 * held / len(tables))


tables = [law(sizes, NC, ALPHA) * np.exp(rng.normal(0, 0.005, len(sizes))) for _ in range(300)]
errors, held = {}, {}
for name, bounds in {"no bounds": {}, "bounds=(0, inf)": {"bounds": (0, np.inf)}}.items():
    values, errors[name] = fit(law, (5e13, 0.08), tables[0], **bounds)
    held[name] = times_held(tables, **bounds)
    print(
        f"{name:19} Nc {values[0]:.2e} +- {errors[name][0]:.1e}   alpha {values[1]:.5f} +- {errors[name][1]:.5f}"
        f"   holds {held[name]} of 100"
    )
for name, bounds in {"log Nc, no bounds": {}, "log Nc, bounds": {"bounds": (0, np.inf)}}.items():
    values, errors[name] = fit(law_of_log, (np.log(5e13), 0.08), tables[0], **bounds)
    print(f"{name:19} alpha {values[1]:.5f} +- {errors[name][1]:.5f}")

is_zero = errors["bounds=(0, inf)"][0] < 1
is_narrow = errors["bounds=(0, inf)"][1] < errors["no bounds"][1] / 3
misses = held["bounds=(0, inf)"] < 60 and held["no bounds"] > 90
sys.exit(0 if is_zero and is_narrow and misses else 1)
PY
