"""Fit scaling laws to finished runs, one precision recipe at a time, or to a table of published points.

    python scaling/fit.py out/study                     # every finished run under it -> out/study/law/
    python scaling/fit.py out/a_bf16 out/a_fp8 --out report loss=as_trained seed_sd=0.0005
    python scaling/fit.py out/study --predict gpt1p5b_fp8       # freezes a prediction before that run is started
    python scaling/fit.py out/study --score                     # compares it once the run is there
    python scaling/fit.py out/study n=total --out report        # counts all parameters, whatever the study's budgets count
    python scaling/fit.py --points points.csv --n "Model Size" --c "Training FLOP" --loss loss --drop-highest 5 --out DIR
    python scaling/fit.py --points points.csv --n N --d tokens --loss val --where dataset=c4 dataset=rw --where lr=0.003 --out DIR

Prints the headline first, then every law with its certificate, the counting conventions and what other choices would have
given; writes figure.png, figure.svg, then law.json. A table is comma-, tab-, semicolon- or |-separated text with a header;
its losses are taken as nats per token, its counts as they stand, and nothing is converted or guessed.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # Before numpy reads it: thousands of tiny fits are ten times slower when BLAS splits each over threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from dataclasses import asdict

import numpy as np

from runtime.cli import UserError
from scaling import predict, robustness, tables
from scaling.command import read_words, run
from scaling.figures import draw, write_with
from scaling.groups import COUNTS, allocation, fit_group, fit_points, on_one_ray, ray_of, seed_noise
from scaling.laws import DELTA
from scaling.points import read_points
from scaling.precision import pairs
from scaling.records import (
    CONVENTIONS,
    LAW_FOLDER,
    check_comparable,
    counted_as,
    from_scratch,
    read_runs,
    usable,
    without_repeats,
)

RUNS = {
    "out": f"DIR that receives law.json, figure.png and figure.svg (default for one folder of runs: its {LAW_FOLDER}/)",
    "n": "total or nonembed: which parameters N counts (default: what study.json says beside the runs, else total)",
    "loss": "bf16 (default: weights evaluated through BF16 matmuls) or as_trained",
    "seed_sd": "standard deviation of ln(loss) between seeds, a floor under the residuals in the intervals (default: estimated "
               "from runs that differ in the seed alone)",
    "predict": "NAME of a run to come: freezes its prediction in DIR",
    "commit": "HASH of this code, which the prediction names where there is no git",
    "score": "no value: compares the predictions in DIR with the runs that have come",
}
TABLE = {
    "points": "FILE with one header line and a line for each point, instead of runs",
    "n": "its column of parameter counts (required)",
    "loss": "its column of losses in nats per token (required); rows where it is empty or not finite are left out",
    "d": "its column of training tokens: C = 6 N D",
    "c": "its column of training FLOPs: D = C / (6 N). Not both; with neither only the power law in N is fitted",
    "where": "COLUMN=VALUE ... keeps rows with that value; two values for one column keep either. Numbers compare as numbers",
    "drop_highest": "how many of the highest losses to leave out (default 0)",
    "cluster": "its column that names the training run: points of one run are not independent, so intervals count runs",
    "out": "DIR that receives law.json, figure.png and figure.svg (required)",
}
FLAGS = {"score"}


def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the data or the arguments."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        for title, options in (("Options for runs", RUNS), ("Options for a table", TABLE)):
            print(f"{title}, as name=value or --name value:")
            print("\n".join(f"    {name.replace('_', '-'):12} {meaning}" for name, meaning in options.items()))
        return 0
    try:
        paths, options = _parse(arguments)
        # On its way a search may try powers that overflow; the certificate judges where it ends, not numpy's warnings.
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            if "points" in options:
                _fit_table(options)
            else:
                _fit_runs(paths, options)
    except UserError as error:
        print(f"scaling/fit.py: {error}", file=sys.stderr)
        return 2
    return 0


# --------------------------------------------------------------------------------------------------- the command line


def _parse(words) -> tuple[list[str], dict]:
    """Paths and {option: value}; `where` is a list, flags are True."""
    is_table = any(word.removeprefix("--").split("=")[0] == "points" for word in words)
    meanings = RUNS | TABLE if is_table else RUNS | TABLE | RUNS    # n, loss and out mean something in both
    paths, options = read_words(words, meanings, flags=FLAGS, lists=("where",))
    _check(paths, options)
    return paths, options


def _check(paths, options) -> None:
    """Refuse what does not go together, and fill in defaults; numbers become numbers."""
    is_table = "points" in options
    for key in options:
        if key not in (TABLE if is_table else RUNS):
            raise UserError(f"{key.replace('_', '-')} is for {'runs' if is_table else 'a table of points (--points FILE)'}: "
                              f"{(RUNS | TABLE)[key]}")
    if is_table:
        if paths:
            raise UserError(f"{paths[0]!r} stands beside --points: give runs or one table, not both; conditions and names "
                              "with spaces want quotes")
        for key in ("n", "loss"):
            if not options.get(key):
                raise UserError(f"{key}=COLUMN is missing: {TABLE[key]}")
        named = [options[key] for key in ("n", "loss", "d", "c") if key in options]
        if twice := next((name for name in named if named.count(name) > 1), None):
            raise UserError(f"column {twice!r} is given for two things: N, tokens or compute, loss are a column each")
        if "d" in options and "c" in options:
            raise UserError("d and c are both given; choose one: with d, C = 6 N D; with c, D = C / (6 N)")
        options["drop_highest"] = _number(options, "drop_highest", "0", int, TABLE)
    else:
        if not paths:
            raise UserError("no runs given: name run folders such as out/<run>, a folder that holds them, or a table with "
                              "--points FILE")
        for path in paths:
            if Path(path).is_file():
                raise UserError(f"{path} is a file: a table of points is given as --points {path} --n COL --loss COL, runs as "
                                  "their folders")
        if "n" in options and options["n"] not in CONVENTIONS:
            raise UserError(f"n={options['n']!r} must be total or nonembed; as a column it wants its table, --points FILE")
        if "commit" in options and "predict" not in options:
            raise UserError(f"commit={options['commit']} wants --predict NAME: only a prediction names its commit")
        options.setdefault("loss", "bf16")
        if options["loss"] not in ("bf16", "as_trained"):
            raise UserError(f"loss={options['loss']!r} must be bf16 or as_trained")
        if "seed_sd" in options:
            options["seed_sd"] = _number(options, "seed_sd", "0", float, RUNS)
        if "out" not in options and len(paths) == 1 and not (Path(paths[0]) / "summary.json").exists():
            options["out"] = str(Path(paths[0]) / LAW_FOLDER)
    if not options.get("out"):
        raise UserError("out=DIR is missing: name the folder that receives law.json and the figure")
    if Path(options["out"]).exists() and not Path(options["out"]).is_dir():
        raise UserError(f"out={options['out']} is a file: name a folder")


def _number(options, key, default, kind, meanings):
    text = options.get(key, default)
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise UserError(f"{key}={text!r} must be a {'whole ' if kind is int else ''}number, at least 0: {meanings[key]}")
    return value


# ------------------------------------------------------------------------------------------------------- the two inputs


def _fit_table(options) -> None:
    chosen = read_points(options["points"], options["n"], options["loss"], options.get("d"), options.get("c"),
                         options.get("where", ()), options["drop_highest"], options.get("cluster"))
    group, folder = fit_points(chosen.points, Path(options["points"]).name, chosen.axes), Path(options["out"])
    if all(fit.objective is None for fit in group.laws.values()):
        raise UserError(f"{options['points']}: {len(group.loss)} point{'s' * (len(group.loss) > 1)} carry no law "
                          f"({group.laws['power_n'].reason}): give points of several sizes")
    rows = _variants(group)
    ray = ray_of(group.points) if "D" in group.x else None
    law = {"format_version": 2, "source": chosen.source, "conventions": chosen.source["conventions"], "notes": chosen.notes,
           **_ray_json(ray), **_group_json(group, rows)}
    figure = draw([group], [], "loss", ray if on_one_ray(ray) else None)
    write_with(figure, folder, "figure", law, "law.json")
    _print(["\n".join(chosen.notes)], [group], {group.recipe: rows}, [_wrote(folder)])


def _fit_runs(paths, options) -> None:
    folder, loss_key = Path(options["out"]), f"loss_{options['loss']}"
    records, notes = read_runs(paths)
    records, left_out = usable(records)
    records, continued = from_scratch(records)
    records, repeats = without_repeats(records)
    records = counted_as(records, options.get("n"))
    check_comparable(records)
    roots = {Path(path) for path in paths} | {record.folder.parent for record in records}
    predictions, named = predict.load(folder), predict.named_held_out(roots)
    everything, records = records, [r for r in records if not predict.is_held(r, predictions, named)]
    notes += left_out + continued + repeats
    notes += [f"held out of every fit: {r.run_id}" for r in everything if r not in records]
    print("".join(note + "\n" for note in notes), end="")
    if not records:
        raise UserError("no run is left to fit")
    seed_sd, degrees = seed_noise(records, loss_key)
    noise = {"estimate": seed_sd, "degrees_of_freedom": degrees, "used": options.get("seed_sd", seed_sd or 0.0)}
    recipes = sorted({record.recipe for record in records}, key=lambda recipe: (recipe != "bf16", recipe))
    groups = [fit_group([r for r in records if r.recipe == recipe], loss_key, noise["used"],
                        predict.held_of(recipe, everything, predictions, named, loss_key)) for recipe in recipes]
    try:
        found, alone = pairs(records)
    except UserError as error:        # the laws do not need the losses of single sequences
        found, alone = [], [f"no paired gap: {error}"]
    variants = {group.recipe: _variants(group) for group in groups}
    ratios = [record.tokens / record.N for record in records]
    ray = (min(ratios), max(ratios))
    law = {"format_version": 2,
           "conventions": {"N": f"params_{records[0].convention}", "D": "tokens", "C": "flops_per_token * tokens",
                           "loss": loss_key, "loss_unit": "nats per token", "chinchilla_frontier": "C = 6 N D"},
           "seed_noise": noise, **_ray_json(ray), "notes": notes + alone,
           "inputs": [{"run_id": r.run_id, "pair_id": r.pair_id, "recipe": r.recipe, "trunk": r.trunk, "seed": r.seed,
                       "N": r.N, "params_total": r.params_total, "params_nonembed": r.params_nonembed, "D": r.tokens,
                       "C": r.flops_per_token * r.tokens, "loss": getattr(r, loss_key), "summary_sha256": r.summary_sha256}
                      for group in groups for r in group.records],
           "groups": {group.recipe: _group_json(group, variants[group.recipe]) for group in groups},
           **({"laws": {form: fit.plain() for form, fit in groups[0].laws.items()}} if len(groups) == 1 else {}),
           "pairs": [{"pair_id": pair.bf16.pair_id, "bf16": pair.bf16.run_id, "fp8": pair.fp8.run_id,
                      "gap_as_trained": asdict(pair.as_trained), "gap_bf16": asdict(pair.in_bf16),
                      "tok_per_s_ratio": pair.tok_per_s_ratio} for pair in found]}
    figure = draw(groups, found, loss_key, ray if on_one_ray(ray) else None)
    more = [tables.seeds(noise), tables.pairs(found), _wrote(folder)]
    if "predict" in options:
        frozen = predict.freeze(options["predict"], groups, folder, loss_key, roots=roots, commit=options.get("commit"))
        more.append("\n".join(predict.describe(frozen)))
    if "score" in options:
        more.append("\n".join(predict.score(folder, everything)))
    write_with(figure, folder, "figure", law, "law.json")
    shown = alone if len(alone) <= tables.PAIRS else [f"{len(alone)} runs without a partner of the other precision (law.json)"]
    _print(["\n".join(shown)], groups, variants, more)


def _variants(group) -> list[dict]:
    """The robustness table of the headlined law; over the counts of the runs, where there are runs."""
    names = COUNTS["C"] if group.headline in ("ray", "power_c") else tuple(group.by_convention)
    return robustness.rows(group.points, group.headline, {name: group.counts[name] for name in names[1:] if name in group.counts})


# ----------------------------------------------------------------------------------------------------- what comes out


def _print(before, groups, variants, after) -> None:
    parts = [*before, *(tables.headline(group) for group in groups), tables.laws(groups), tables.conventions(groups),
             tables.variants(groups, variants), *after]
    print("\n\n".join(part for part in parts if part))


def _wrote(folder: Path) -> str:
    return f"wrote {folder / 'law.json'}, figure.png, figure.svg"


def _ray_json(ray) -> dict:
    return {"delta": DELTA, "tokens_per_param": None if ray is None else list(ray), "one_ray": on_one_ray(ray)}


def _group_json(group, rows) -> dict:
    return {"runs": list(group.names), "n": len(group.loss),
            "headline": {"form": group.headline, "reason": group.headline_reason},
            "laws": {form: fit.plain() for form, fit in group.laws.items()},
            "band": {axis: [fit.plain() for fit in forms] for axis, forms in group.bands.items()},
            "gammas_left_out": group.gammas_left_out, "form_doubt": group.form_doubt, "slopes": group.slopes,
            "allocation": allocation(group),
            "by_convention": {name: fit.plain() for name, fit in group.by_convention.items()}, "robustness": rows}


if __name__ == "__main__":
    sys.exit(run(main))
