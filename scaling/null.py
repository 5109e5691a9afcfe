"""Measure how far two BF16 runs differ: what a difference of precision is held against.

Runs with other seeds see other data and begin elsewhere. Runs of one seed that are rounded differently (repeats, such as with
the loss in other chunks) differ by what any rounding does to a training: FP8 can be blamed for what lies beyond that alone.
"""

import math
from dataclasses import asdict
from itertools import combinations

import numpy as np
from scipy.stats import t as student

from scaling.equivalence import clusters
from scaling.pairs import gap_of, gaps, load_val_losses, percents


def measure(records, repeated, arm: str) -> dict:
    """The null of other seeds per size and tokens ("sizes", "pooled"), and that of the same seed ("same_seed").

    records: Records; repeated: their pairs.null_pairs; arm: the evaluation that is judged. All in per cent of the loss."""
    return {**_two_seeds([run for run in records if not run.repeat], arm), "same_seed": _same_seed(repeated, arm)}


def at(record) -> dict:
    """Where a run stands, in a row of results: its counts of parameters, tokens, their ratio by the study's convention."""
    return {"N": record.N, "params_total": record.params_total, "params_nonembed": record.params_nonembed,
            "tokens": record.tokens, "tokens_per_param": record.tokens / record.N}


def _two_seeds(records, arm: str) -> dict:
    """BF16 against BF16 of another seed: per size and tokens, then pooled in per cent.

    k runs give k (k - 1) / 2 differences but k - 1 degrees of freedom; each difference has variance 2 SD^2. Pooled,
    branches of one trunk add none."""
    rows, freedom = [], {}
    for N, D in sorted({(r.N, r.tokens) for r in records}):
        alike = {r.trunk: r for r in records if (r.N, r.tokens, r.recipe) == (N, D, "bf16")}
        runs = list(alike.values())
        if len(runs) < 2:
            continue
        losses = [load_val_losses(run) for run in runs]
        differences = [{"first": runs[i].run_id, "second": runs[j].run_id, **asdict(
            gaps(runs[i], runs[j], losses[i], losses[j])[arm])} for i, j in combinations(range(len(runs)), 2)]
        sd = 100 * math.sqrt(2) * float(np.std(np.log([getattr(run, f"loss_{arm}") for run in runs]), ddof=1))
        rows.append({**at(runs[0]), "runs": len(runs), "dof": len(runs) - 1, "sd_percent": sd, "differences": differences})
        trunks, total = freedom.get(N, (set(), 0))
        freedom[N] = (trunks | set(alike), total + len(runs) - 1)
    dof = sum(min(total, len(trunks) - 1) for trunks, total in freedom.values())
    if not rows:
        return {"sizes": [], "pooled": None}
    sd = math.sqrt(sum(row["dof"] * row["sd_percent"]**2 for row in rows) / sum(row["dof"] for row in rows))
    return {"sizes": rows, "pooled": {"runs": sum(row["runs"] for row in rows), "dof": dof, "sd_percent": sd,
                                      "band": band(sd, dof)}}


def _same_seed(repeated, arm: str) -> dict:
    """BF16 against BF16 of the same seed: per size and tokens, then pooled as the root mean square around 0.

    Which of the two came first is arbitrary, so 0 is the mean of their differences and each trunk a degree of freedom.
    Pairs that are equal to the last bit were not rounded differently: they are counted, and no null."""
    rows = []
    for N, D in sorted({(p.bf16.N, p.bf16.tokens) for p in repeated}):
        chosen = [p for p in repeated if (p.bf16.N, p.bf16.tokens) == (N, D)]
        rows.append({**at(chosen[0].bf16), "pairs": len(chosen), **percents(chosen),
                     "differences": [{"first": p.bf16.run_id, "second": p.fp8.run_id, **asdict(gap_of(p, arm))} for p in chosen]})
    unlike = [p for p in repeated if not p.in_bf16.nats == p.as_trained.nats == 0]
    found = {"sizes": rows, "equal": len(repeated) - len(unlike), "pooled": None}
    if unlike:
        sd = math.sqrt(np.mean([gap_of(p, arm).percent**2 for p in unlike]))
        dof = len(clusters([{p.bf16.trunk, p.fp8.trunk} for p in unlike]))
        found["pooled"] = {"pairs": len(unlike), "dof": dof, "sd_percent": sd, "band": band(sd, dof)}
    return found


def band(sd: float, dof: int) -> float:
    """Half of what holds 95 % of differences whose SD is known from so many degrees of freedom."""
    return float(student.ppf(0.975, dof)) * sd
