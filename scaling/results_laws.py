"""Lay out what a study's other commands found: laws, prediction, gap, learning rate, all of it in short."""

import html
from pathlib import Path

from runtime.cli import UserError
from scaling import gap_tables, results_tables
from scaling.laws import NAMES, Fit
from scaling.learning_rate import tables
from scaling.predict import describe
from scaling.records import LAW_FOLDER, read_json
from scaling.report_tables import one_line
from scaling.results_runs import fenced
from scaling.results_tables import Results, missing, shown, table, told

COUNTS = {"params_total": "all parameters", "params_nonembed": "non-embedding parameters"}


def short(results: Results) -> str:
    """The answers in a line each; "" where nothing was found yet."""
    lines = []
    for recipe, group in results.law.get("groups", {}).items():
        fit = group["laws"][group["headline"]["form"]]
        formula, runs, ends, residuals = _law(fit)
        ends = f" ({ends}, 95 %)" if ends else ""
        lines.append(f"Law of {recipe}: {formula}{ends}; {runs} run{'s' * (runs != '1')}, "
                     + (f"residuals {residuals} %, " if residuals else "") + f"N counts {_counted(results)}"
                     + (f"; not identified: {fit['reason']}." if not fit["identified"] else "." if fit["form"] == "chinchilla"
                        else "; in place of L(N, D), for the reason given under Laws."))
    for one in results.predictions:
        score = results.scores.get(one.target, {"runs": []})
        for ran in score["runs"]:
            lines.append(f"Predicted before it was run, {one.target}: {score['predicted']:.4f} ({score['low']:.4f} to "
                         f"{score['high']:.4f}) nats per token; measured {ran['loss']:.4f} in {ran['run_id']}, "
                         f"{'inside' if ran['inside'] else '**outside**'} the interval, error {ran['error_percent']:+.2f} %.")
    lines += [_verdict(results)] if _verdict(results) else []
    null = results.precision.get("null", {})
    for what, pooled in (("another seed", null.get("pooled")), ("the same seed, only rounded otherwise,",
                                                                null.get("same_seed", {}).get("pooled"))):
        if pooled:
            lines.append(f"The null: BF16 once more with {what} differs by {pooled['sd_percent']:.3f} % (SD of the difference, "
                         f"{gap_tables.freedom(pooled['dof'])}).")
    for recipe, one in results.precision.get("common", {}).items():
        found = one[results.precision["loss"]]
        lines.append(f"Gap of {recipe} to BF16: {found.mean:+.3f}" + (f" ± {found.half:.3f}" if found.half is not None else "")
                     + f" % of the loss over {found.n} independent pair{'s' * (found.n != 1)}; {one['verdict']}.")
    ranking = results.precision.get("ranking") or {}
    lines += [f"Recipes ranked: {ranking['reason']}"] if ranking.get("reason") else []
    return "\n".join(f"- {one_line(line)}" for line in lines)


def laws(results: Results) -> str:
    """Each recipe's headlined law, then L(N, D) under both counts of parameters, as law.json has them."""
    if not results.law:
        return missing("law/law.json", f"python scaling/fit.py {results.folder.as_posix()}")
    said, groups, rows, reasons = results.law["conventions"], results.law["groups"], [], {}
    for recipe, group in groups.items():
        headline = group["headline"]["form"]
        chosen = [("headline", said["N"], group["laws"][headline]), *(
            ("", count, group["by_convention"][count]) for count in COUNTS if (count, "chinchilla") != (said["N"], headline))]
        reasons.setdefault(f"{headline} is headlined: {group['headline']['reason']}", []).append(recipe)
        for mark, count, fit in chosen:
            rows.append([recipe, COUNTS.get(count, count), *_law(fit), "yes" if fit["identified"] else "no", mark])
            if not fit["identified"]:
                name = f"{recipe} {fit['form']} ({COUNTS.get(count, count)})"
                reasons.setdefault(f"not identified: {fit['reason']}", []).append(name)
    slopes = [[name, *(shown(told(group["slopes"], name), ".4f") for group in groups.values())]
              for name in next(iter(groups.values()))["slopes"]]
    noise = told(results.law, "seed_noise", "estimate")
    seeds = "unknown, no two runs differ in the seed alone" if noise is None else (
        f"SD {100 * noise:.3f} % of the loss, {gap_tables.freedom(results.law['seed_noise']['degrees_of_freedom'])}")
    return "\n\n".join([
        _figure(results, "figure"),
        table(["recipe", "N counts", "law", "runs", "exponents, 95 %", "residuals [%]", "identified", ""], rows),
        "\n".join(f"- {', '.join(dict.fromkeys(names))}: {one_line(why)}" for why, names in reasons.items()),
        table(["power law's slope -dlnL/dlnx, x counted as", *groups], slopes),
        "Slope: of a power law in this count alone (FLOPs: times the tokens), through all the runs at once: it mixes size and "
        "data, belongs to this grid, and is here to show what the counting changes.",
        " ".join([f"The study counts {_counted(results)}; {said['loss']}, nats per token. Noise of seeds: {seeds}.",
                  *_stale(results, results.law, "law.json")])])


def _counted(results: Results) -> str:
    return COUNTS.get(results.law["conventions"]["N"], "parameters as law.json says")


def _law(fit: dict) -> list[str]:
    """A law of law.json as cells: formula, runs, exponents with their intervals, residuals."""
    names = NAMES.get(fit["form"], ())
    if told(fit, "objective") is None or any(told(fit, name) is None for name in names):
        return ["not fitted", f"{fit['n']}", "", ""]
    shape = Fit(fit["form"], {name: fit[name] for name in names}, fit["n"], fit["identified"], fit["reason"])
    ends = [f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in (fit["ci95"] or {}).items()
            if name in ("alpha", "beta", "a") or name == "gamma" and name in names]
    rms = told(fit, "residual_rms")
    return [shape.formula(fit["form"][-1].upper() if "power" in fit["form"] else "C"), f"{fit['n']}", ", ".join(ends),
            "" if rms is None else f"{100 * rms:.3f}"]


def prediction(results: Results) -> str:
    """The frozen predictions, what came of each, and each as it was frozen."""
    folder = results.folder.as_posix()
    if not results.predictions:
        return missing("a frozen prediction", f"python scaling/fit.py {folder} --predict RUN")
    frozen, rows, details = [], [], []
    for one in results.predictions:
        low, high = (100 * (end / one.loss - 1) for end in (one.low, one.high))
        around = f"{one.low:.4f} to {one.high:.4f} ({low:+.1f} to {high:+.1f} %)"
        frozen.append([one.target, one.date, _frozen_at(results, one), f"`{one.sha256[:12]}`", f"{len(one.content['inputs'])}",
                       shown(told(one.content, "extrapolation"), ".3g"), f"{one.loss:.4f}", around, one.headline])
        rows += _scored(results, one)
        lines = "\n".join(line for line in describe(one) if not line.startswith("wrote "))
        summary = f"<summary>{html.escape(one.target)}, as it was frozen</summary>"
        details.append(f"<details>{summary}\n\n{fenced(lines)}\n\n</details>")
    lacking = [one.target for one in results.predictions if one.target not in results.scores]
    return "\n\n".join(part for part in [
        table(["run", "frozen (UTC)", "at commit", "sha256", "from runs", "compute, largest of them is 1",
               "predicted [nats]", "95 % interval", "by"], frozen),
        "Dates are of the machines' own clocks: that a prediction is older than its run is shown by a commit that holds the "
        "file and not the run, and by nothing on this page.",
        table(["run", "began (UTC)", "its commit", "measured [nats]", "predicted", "95 % interval",
               "error, predicted minus measured [nats]", "[%]", "interval", "forms whose interval holds it"], rows),
        _verdict(results),
        missing(f"the score of {', '.join(lacking)}", f"python scaling/fit.py {folder} --score") if lacking else "",
        *details] if part)


def _scored(results: Results, one) -> list[list[str]]:
    """A row per run that a prediction was scored against. Raises UserError: it was another prediction, or another run."""
    score = results.scores.get(one.target)
    if score is None:
        return []
    name = f"{results.folder / LAW_FOLDER}/score_{one.target}.json"
    if score.get("prediction_sha256") != one.sha256:
        raise UserError(f"{name} judges another prediction than the one that lies beside it: score again")
    there = {record.run_id: record.summary_sha256 for record in results.records}
    if changed := [ran["run_id"] for ran in score["runs"] if there.get(ran["run_id"]) != ran["summary_sha256"]]:
        raise UserError(f"{name} judges {', '.join(changed)} by another summary.json than the one in this folder: score again")
    ends = f"{score['low']:.4f} to {score['high']:.4f}"
    return [[ran["run_id"], ran["t_start"], results.commit(ran["run_id"]), f"{ran['loss']:.4f}",
             f"{score['predicted']:.4f}", ends, f"{ran['error_nats']:+.4f}", f"{ran['error_percent']:+.2f}",
             "inside" if ran["inside"] else "**outside**",
             ", ".join(row["form"] for row in ran["forms"] if row["inside"]) or "none"] for ran in score["runs"]]


def _verdict(results: Results) -> str:
    """How many of several scored runs lie inside their intervals, and whether all errors point one way; "" for fewer than two."""
    runs = [ran for one in results.predictions for ran in results.scores.get(one.target, {"runs": []})["runs"]]
    if len(runs) < 2:
        return ""
    errors = [ran["error_percent"] for ran in runs]
    way = "low" if max(errors) < 0 else "high" if min(errors) > 0 else None
    return (f"{sum(ran['inside'] for ran in runs)} of {len(runs)} scored runs lie inside their intervals; errors "
            f"{min(errors):+.2f} to {max(errors):+.2f} %"
            + (f", all one way: predicted too {way}" if way else "")
            + ". Runs that share a trunk, or a seed, are not independent tests.")


def _frozen_at(results: Results, one) -> str:
    """The commit that a prediction names, else that of the slice in which it was frozen."""
    if one.content.get("git_commit"):
        return results_tables.commit(one.content)
    return results_tables.commit(next(
        (row for row in results.slices if str(row.get("start")) <= one.date <= str(row.get("end"))), {}))


def precision(results: Results) -> str:
    """What precision.py found, by its own tables."""
    if not results.precision:
        return missing("law/precision.json", f"python scaling/precision.py {results.folder.as_posix()}")
    return "\n\n".join(part for part in [
        _figure(results, "precision"), gap_tables.tables(results.precision), _figure(results, "pair"),
        " ".join(_stale(results, results.precision, "precision.json"))] if part)


def learning_rate(results: Results) -> str:
    """What the sweep of peak learning rates gave, which lies in the folder beside this one."""
    beside = results.folder.resolve().with_name(results.folder.resolve().name + "_lr")
    path = beside / LAW_FOLDER / "learning_rate.json"
    if not path.exists():
        return missing(f"../{beside.name}/{LAW_FOLDER}/{path.name}",
                       f"python scaling/learning_rate.py {results.folder.as_posix()}_lr")
    figure = path.with_suffix(".png")
    drawn = f"![{figure.stem}](../{beside.name}/{LAW_FOLDER}/{figure.name})\n\n" if figure.is_file() else ""
    return drawn + tables(read_json(path))


def _figure(results: Results, name: str) -> str:
    path = Path(LAW_FOLDER) / f"{name}.png"
    return f"![{name}]({path.as_posix()})" if (results.folder / path).is_file() else missing(
        str(path), f"python scaling/{'fit' if name == 'figure' else 'precision'}.py {results.folder.as_posix()}")


def _stale(results: Results, made: dict, name: str) -> list[str]:
    """Sentences where a file was made from other runs than those that are there now."""
    there = {record.run_id: record.summary_sha256 for record in results.records}
    inputs = {one["run_id"]: one["summary_sha256"] for one in made.get("inputs", [])}
    notes = " ".join(map(str, made.get("notes", [])))
    changed = [run_id for run_id, sha256 in inputs.items() if there.get(run_id) != sha256]
    new = [run_id for run_id in there if run_id not in inputs and run_id not in notes]
    return [*([f"**{name} is not of these files:** {', '.join(changed)} went in with other bytes."] if changed else []),
            *([f"**{name} is older than {len(new)} of the runs:** {', '.join(new)}."] if new else [])]
