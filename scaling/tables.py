"""Lay out fitted laws as text for a terminal or a log, the headline first."""

from scaling import robustness
from scaling.captions import KIND, human
from scaling.gap_tables import freedom
from scaling.groups import COUNTS, allocation, on_one_ray, ray_of

SCALES = ("N_c", "D_c", "C_c")      # Kaplan's way to write the factor of a power law: in law.json, twice here
PAIRS = 6                           # more of them than these fill the screen; precision.py is the command for them
MEANINGS = {"a": "N* ~ C^a, C = 6 N D", "b": "D* ~ C^b, C = 6 N D"}


def headline(group) -> str:
    """A group's headlined law with its intervals, what it rests on, and why it is this form; several lines."""
    fit = group.laws[group.headline]
    n, clusters = len(group.loss), len(set(group.points.cluster))
    what = f"{group.recipe}: {n} {'runs' if group.records else 'points'}"
    what += f" of {clusters} trajectories" if clusters < n else ""
    kind = KIND[group.convention]
    what += f", {kind}N {_span(group.x['N'].min(), group.x['N'].max(), human)}"
    if "D" in group.x:
        what += f", {_span(*ray_of(group.points), '{:.3g}'.format)} tokens per {kind}parameter"
        what += " (one ratio: L(N), L(D), L(C) are one curve)" if on_one_ray(ray_of(group.points)) else ""
    law = fit.formula(group.headline[-1].upper() if "power" in group.headline else "C") if fit.objective is not None else ""
    lines = [what, f"  {group.headline}: {law}" + ("" if fit.identified else f" (not identified: {fit.reason})" if law
                                                   else f"not fitted: {fit.reason}")]
    for name, (low, high) in (fit.ci95 or {}).items():
        if name in SCALES:
            continue
        lines.append(f"    {name:6} {fit.parameters[name]:<10.5g} 95 % {low:.4g} to {high:.4g}   "
                     f"(standard error {fit.se[name]:.3g})" + (f"   {MEANINGS[name]}" if name in MEANINGS else ""))
    if fit.ci95:
        made = {"t": "t-intervals of the residuals" + f" or of the seeds' SD {100 * group.seed_sd:.3f} %" * (group.seed_sd > 0),
                "cluster": f"cluster-robust t-intervals over {fit.clusters} trajectories",
                "bootstrap": f"{fit.resamples} bootstrap resamples of {fit.clusters} " + (
                    "points, each taken for a run of its own (--cluster COL says which run a point is of)"
                    if fit.clusters == n and not group.records else "trajectories")}
        lines.append(f"    intervals: {made[fit.interval]}; they hold the points' noise, not the doubt in the form")
    lines.append(f"  why this law: {group.headline_reason}")
    if doubt := group.form_doubt:
        lines.append(f"  doubt in the form ({len(doubt['forms'])} forms that the sizes do not refute): at ten times the "
                     f"largest compute, {doubt['D'] / doubt['N']:.3g} tokens per {kind}parameter, {doubt['low']:.4g} to "
                     f"{doubt['high']:.4g}")
    if forms := group.bands.get("C"):
        far = 10 * group.x["C"].max()
        values = sorted(float(form.predict(far)) for form in forms)
        kept = [form.parameters["gamma"] for form in forms[1:]]
        lines.append("  doubt in the form (power law" + (
            f", rays with gamma {min(kept):.2f} to {max(kept):.2f}" if kept else "") + (
            f"; gamma {', '.join(f'{g:.2f}' for g in group.gammas_left_out)} would need E below 0"
            if group.gammas_left_out else "") +
            f"): at ten times the largest compute {values[0]:.4g} to {values[-1]:.4g} nats per token")
    return "\n".join(lines)


def laws(groups) -> str:
    """Markdown table of every law of every group with its certificate; under it what is not identified, and why."""
    lines = [["points", "law", "n", "fitted", "exponents, 95 %", "rms %", "starts at best", "gradient", "singular values"]]
    lacking = {}
    for group in groups:
        for form, fit in group.laws.items():
            if not fit.identified:
                name = f"{group.recipe} {form}" if len(groups) > 1 else form
                lacking.setdefault(f"not {'fitted' if fit.objective is None else 'identified'}: {fit.reason}", []).append(name)
            if fit.objective is None and form != "isoflop" or fit.parameters.get("a", 0) is None:
                continue
            exponents = [f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in (fit.ci95 or {}).items()
                         if name in ("alpha", "beta", "gamma") or form == "isoflop" and name in "ab"]
            if form == "isoflop":       # its residuals are of ln N*, and a straight line has no starts
                good = sum(budget["reason"] is None for budget in fit.budgets)
                lines.append([group.recipe if len(groups) > 1 else "", form, str(fit.n),
                              f"{fit.formula()} ({good} of {len(fit.budgets)} budgets)", ", ".join(exponents), *[""] * 4])
                continue
            lines.append([
                group.recipe if len(groups) > 1 else "", form + ("" if fit.identified else " *"), str(fit.n),
                fit.formula("C" if form == "ray" else form[-1].upper()), ", ".join(exponents),
                "" if fit.residual_rms is None else f"{100 * fit.residual_rms:.3f}",
                "" if fit.starts is None else f"{fit.starts_at_best} of {fit.starts}",
                "" if fit.gradient_norm is None else f"{fit.gradient_norm:.0e}",
                " ".join(f"{value:.2g}" for value in fit.singular_values or ())])
    notes = [f"{', '.join(names)} {reason}" for reason, names in lacking.items()]
    if any("D" in group.x and not on_one_ray(ray_of(group.points)) for group in groups):
        notes.append("with several ratios of tokens per parameter a power law in N, D or C alone mixes the effects of size "
                     "and of data: its exponent belongs to this design")
    return "\n".join([grid(lines), *([""] if notes else []), *(f"* {note}" for note in notes)])


def conventions(groups) -> str:
    """Markdown table of the exponents under each way of counting parameters and FLOPs, the fitted one first; "" without runs."""
    groups = [group for group in groups if group.slopes]
    if not groups:
        return ""
    lines = [["counted as", *(f"{group.recipe}: {what}" for group in groups for what in ("slope", "alpha, beta, a"))]]
    for name in (*groups[0].by_convention, *COUNTS["C"]):
        cells = []
        for group in groups:
            fit, shares = group.by_convention.get(name), allocation(group)
            joint = f"a {shares[name]:.4f}" if name in shares else "" if fit is None or not fit.identified else ", ".join(
                f"{fit.parameters[key]:.4f}" for key in ("alpha", "beta", "a"))
            cells += ["" if group.slopes[name] is None else f"{group.slopes[name]:.4f}", joint]
        lines.append([name + " * tokens" * (name in COUNTS["C"]), *cells])
    return grid(lines) + ("\nslope: -dlnL/dlnx of the power law. alpha, beta, a: L(N, D) and N* ~ C^a, where identified, with "
                          "C = 6 N D beside a count of N, else with the law of the first line and C as counted. "
                          "Compare exponents only within one convention.")


def variants(groups, rows) -> str:
    """Markdown table of robustness.rows (by recipe) for the first group; the others' are in law.json."""
    first, *others = groups
    if first.laws[first.headline].objective is None:
        return ""
    lines = [f"{first.recipe}, {first.headline} under other choices (* not identified)" + "".join(
        f"; {group.recipe}: in law.json" for group in others) + ":", grid(robustness.table(rows[first.recipe]))]
    return "\n".join(lines)


def seeds(noise) -> str:
    """What is known of the noise between seeds: estimated and how well, or given."""
    estimate, degrees, used = noise["estimate"], noise["degrees_of_freedom"], noise["used"]
    said = "unknown, no two runs differ in the seed alone" if estimate is None else (
        f"SD {100 * estimate:.3f} % of the loss, from runs that differ in the seed alone ({freedom(degrees)})")
    return f"Seed noise: {said}; intervals rest on " + (
        f"at least {100 * used:.3f} %." if used else "the residuals alone (seed_sd=0.001 would set a floor of 0.1 %).")


def pairs(found) -> str:
    """Markdown table of BF16 against FP8, a line per pair, with what the standard error does and does not hold; of many
    pairs a sentence."""
    if not found:
        return "No BF16/FP8 pair among these runs."
    if len(found) > PAIRS:
        gaps = sorted(pair.in_bf16.percent for pair in found)
        return (f"{len(found)} BF16/FP8 pairs, single gaps from {gaps[0]:+.3f} to {gaps[-1]:+.3f} % evaluated in BF16; what they "
                "say together, beside the null, is for scaling/precision.py")
    lines = [["FP8 run", "N", "tokens", "loss BF16 arm", "loss FP8 arm as trained", "loss FP8 arm in BF16",
              "gap as trained [nats]", "[%]", "gap in BF16 [nats]", "[%]", "tok/s FP8/BF16"]]
    for pair in found:
        gaps = [text for gap in (pair.as_trained, pair.in_bf16) for text in
                (f"{gap.nats:+.5f}" + ("" if gap.se is None else f" ± {gap.se:.5f}"), f"{gap.percent:+.3f}")]
        ratio = "other machine" if pair.tok_per_s_ratio is None else f"{pair.tok_per_s_ratio:.2f}"
        lines.append([f"{pair.fp8.run_id} ({pair.fp8.recipe})", human(pair.fp8.N), human(pair.fp8.tokens),
                      f"{pair.bf16.loss_bf16:.5f}", f"{pair.fp8.loss_as_trained:.5f}", f"{pair.fp8.loss_bf16:.5f}", *gaps,
                      ratio])
    return grid(lines) + ("\nGap: FP8 minus BF16. ± is one standard error over the validation sequences: evaluation noise "
                          "only, not run-to-run noise, which needs several seeds.")


def _span(low, high, shown) -> str:
    return shown(low) if shown(low) == shown(high) else f"{shown(low)} to {shown(high)}"


def grid(lines: list[list[str]]) -> str:
    """Cells as a Markdown table whose columns are aligned, so that it reads in a terminal too; empty columns go."""
    if len(lines) == 1:
        return "no law could be fitted"
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    rows = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
            for row in zip(*columns, strict=True)]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])
