"""Measure what two BF16 runs differ by: of other seeds, and of one seed rounded differently."""

import math

import numpy as np
from scipy.special import stdtrit

from scaling.paired.estimates import grouped
from scaling.paired.gaps import at, over, trajectories


def measure(records, repeated, arm: str) -> dict:
    """The null of other seeds per size and tokens ("sizes"), then "pooled", and that of the same
    seed ("same_seed"), from the null Pairs `repeated`; in per cent of the loss under `arm`. Other
    seeds: a difference has variance 2 SD^2; branches of one trunk add no freedom. Same seed: root
    mean square around 0, as the order is arbitrary; equal to the last bit: no null."""
    rows, trunks, pooled, same = [], {}, None, None
    for (N, _), some in grouped(
        [r for r in records if r.is_baseline and not r.repeat], lambda r: (r.N, r.tokens)
    ):
        runs = list({r.trunk: r for r in some}.values())
        if len(runs) > 1:
            sd = (
                100
                * math.sqrt(2)
                * float(np.std(np.log([getattr(run, f"loss_{arm}") for run in runs]), ddof=1))
            )
            rows.append({**at(runs[0]), "runs": len(runs), "dof": len(runs) - 1, "sd_percent": sd})
            trunks.setdefault(N, set()).update(run.trunk for run in runs)
    if rows:
        variance = np.average(
            [row["sd_percent"] ** 2 for row in rows], weights=[row["dof"] for row in rows]
        )
        freedom = sum(
            min(len(some) - 1, sum(row["dof"] for row in rows if row["N"] == N))
            for N, some in trunks.items()
        )
        pooled = {"runs": sum(row["runs"] for row in rows), **_null(variance, freedom)}
    again = [p for p in repeated if any(gap.nats for gap in p.gap.values())]
    if again:
        variance = np.mean([p.gap[arm].percent ** 2 for p in again])
        same = {"pairs": len(again), **_null(variance, len(trajectories(again)))}
    sizes = [
        {**at(some[0].bf16), "pairs": len(some), **over(some, "percent")}
        for _, some in grouped(again, lambda p: (p.bf16.N, p.bf16.tokens))
    ]
    return {
        "sizes": rows,
        "pooled": pooled,
        "same_seed": {"sizes": sizes, "equal": len(repeated) - len(again), "pooled": same},
    }


def _null(variance: float, dof: int) -> dict:
    """band: half of what holds 95 % of differences whose variance is known from so many degrees of
    freedom."""
    return {
        "dof": dof,
        "sd_percent": math.sqrt(variance),
        "band": float(stdtrit(dof, 0.975)) * math.sqrt(variance),
    }
