"""Laws and ladders that the planner's tests share."""

import json

import numpy as np

from scaling.design import PRIOR_SD, gradient
from scaling.pairs import EPOCH

BUDGET = ["gpus=8", "hours=24", "gpu=h100"]


def ladder(sizes, ratios):
    N = np.repeat(np.array(sizes, dtype=float), len(ratios))
    return N, N * np.tile(ratios, len(sizes))


def correlated(law, N, D, clusters, target, rho, sigma=1e-3, prior=False):
    """The bound's prediction by the whole covariance matrix, in other terms than design.py's: values, not logarithms."""
    V = sigma**2 * np.where(np.equal.outer(clusters, clusters), np.where(np.eye(len(N)), 1.0, rho), 0.0)
    jacobian = gradient(law, N, D, target)
    information = jacobian.T @ np.linalg.solve(V, jacobian) + (np.diag(PRIOR_SD**-2) if prior else 0)
    here = gradient(law, *target, target)[0]
    return float(np.sqrt(here @ np.linalg.solve(information, here)))


def write_law(folder, identified=True, runs=True, sizes=(50e6, 125e6, 250e6, 350e6), trunks=None, **changes):
    N, D = ladder(sizes, (5, 10, 20, 40))
    loss = EPOCH.loss(N, D) * np.exp(np.random.default_rng(1).normal(0, 5e-4, len(N)))
    said = {"identified": identified, "reason": None if identified else "all points lie on one ray", "n": len(N),
            **{key: getattr(EPOCH, key) for key in ("E", "A", "B", "alpha", "beta")}}
    trunks = trunks or [f"run{i}" for i in range(len(N))]
    inputs = [{"recipe": "bf16", "run_id": f"run{i}", "trunk": trunk, "N": n, "D": d, "loss": one}
              for i, (trunk, n, d, one) in enumerate(zip(trunks, N, D, loss, strict=True))]
    content = {"groups": {"bf16": {"laws": {"chinchilla": said}}}, "inputs": inputs} if runs else {"laws": {"chinchilla": said}}
    path = folder / "law.json"
    path.write_text(json.dumps(content | changes))
    return path
