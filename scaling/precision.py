"""Measure what FP8 costs against BF16, run beside paired run on the same validation sequences.

    python scaling/precision.py out/study        # every finished run under it; writes out/study/law/precision.*
    python scaling/precision.py out/a_bf16 out/a_fp8 out=report loss=as_trained margin=0.25
    python scaling/precision.py out/study --all  # prints every table, else as many as 40 lines hold
    python scaling/precision.py out/study at=1.5e9:20                  # freezes each recipe's gap at N:RATIO, extrapolated
    python scaling/precision.py out/study predict=cpu_1m_mxfp8_t5_s1   # freezes the gap of a run before it is started
    python scaling/precision.py out/study --score                      # compares both once the runs are there
    python scaling/precision.py --points losses.csv --arm precision --pair seed --loss val_loss --n N --d tokens --out report

Prints each recipe's gap over all sizes with its verdict, which recipe is the best (rank says
by which rule), the gap per size beside the null (BF16 against BF16 with another seed, and with the
same one rounded differently), what the gap costs in compute under two laws. Intervals are over
independent pairs and hold for this validation set."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from lib.command import command, run_command
from lib.errors import UserError
from lib.plots import write_with
from lib.text import grid, listed, si
from lib.values import FilePath
from scaling import gap_predictions
from scaling.gap_figure import draw_precision
from scaling.gap_words import TableColumns, Words, words_of
from scaling.paired.cost import NO_SPEED, SMALLEST, costs, surfaces, throughput
from scaling.paired.equivalence import Equivalence, Part, judge_equivalence
from scaling.paired.estimates import ALPHA, Estimate, grouped, tost
from scaling.paired.gaps import Gap, at, over, over_sizes, over_tokens
from scaling.paired.nulls import measure
from scaling.paired.ranking import rank
from scaling.pairing import pairs
from scaling.records import check_comparable, law_folder, read_runs, usable
from scaling.table_pairs import read_table_pairs
from scaling.verdicts import Margin, judged, read_margin

LINES = 40  # that the console gets without --all
SHOWN = 5  # warnings among them
LARGE_GAP = 5.0  # per cent: from here on 100 ln(1 + x) is visibly less than 100 x


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[FilePath, ...] = ()  # a folder of runs such as out/study, or run folders
    # folder for precision.json, precision.png, precision.svg (default: PATH/law)
    out: FilePath | None = None
    # runs: bf16 (both arms through BF16 matmuls; the default) or as_trained. Table: its column
    loss: str = ""
    # per cent of the loss that counts as equivalent (default: the study's; here: after the fact)
    margin: float | None = None
    # runs: total or nonembed, which parameters N counts (as the study does). Table: N's column
    n: str = ""
    points: FilePath = ""  # a table of paired losses with a header line, instead of runs
    arm: str = ""  # table: column that names the precision
    # table: column whose equal text makes a pair, such as the seed or the run's name
    pair: str = ""
    # table: the baseline's text in the column of arms (default: bf16, bfloat16, baseline)
    base: str = ""
    d: str = ""  # table: column of training tokens
    predict: str = ""  # runs: an FP8 run to come, whose gap's prediction is frozen in out
    # runs: N:RATIO such as 1.5e9:20, parameters and tokens for each; freezes each recipe's gap there
    at: str = ""
    score: bool = False  # runs: compare the frozen gaps in out with the pairs that have come
    all: bool = False  # print every table

    def __post_init__(self):
        if bool(self.points) == bool(self.paths):
            raise UserError(
                "give either run folders such as out/study, or a table with --points FILE"
            )
        if self.points:
            if missing := [name for name in ("arm", "pair", "loss") if not getattr(self, name)]:
                raise UserError(f"{missing[0]}= is missing: it names a column of the table")
            for_runs = [name for name in ("predict", "at", "score") if getattr(self, name)]
            if for_runs:
                raise UserError(f"{' and '.join(for_runs)}: only for runs, not for a table")
            return
        if strange := [name for name in ("arm", "pair", "base", "d") if getattr(self, name)]:
            raise UserError(f"{' and '.join(strange)}: only for a table of points=FILE")
        for name, value, words in (
            ("n", self.n, ("total", "nonembed")),
            ("loss", self.loss, ("bf16", "as_trained")),
        ):
            if value not in ("", *words):
                raise UserError(f"{name}={value!r} must be {' or '.join(words)} for runs")


def analyse(
    records,
    found,
    arm: str,
    margin,
    *,
    baseline: str = "BF16",
    held: frozenset = frozenset(),
) -> dict:
    """What precision.json holds but notes and inputs, gaps in per cent of the BF16 loss; `arm`:
    which is judged; baseline: what its arm is called; held: run_ids of FP8 runs that enter no law
    of the gap."""
    laws, reason = surfaces(
        [run for run in records if run.is_baseline and not run.repeat], f"loss_{arm}", baseline
    )
    nulls, found = ([p for p in found if p.fp8.is_baseline is is_null] for is_null in (True, False))
    sizes, common = [], {}
    for (N, D, recipe), chosen in grouped(found, lambda p: (p.fp8.N, p.fp8.tokens, p.fp8.recipe)):
        nats, gaps, speed = (
            over(chosen, "nats")[arm],
            over(chosen, "percent"),
            throughput(chosen),
        )
        run = chosen[0].fp8
        price = [
            costs(law, getattr(run, f"params_{law.counts}"), D, nats, **speed) for law in laws[N]
        ]
        sizes.append(
            {
                **at(run),
                "recipe": recipe,
                "runs": [p.fp8.run_id for p in chosen],
                **gaps,
                "nats": nats,
                "throughput": speed,
                "costs": price,
                **judged(chosen, gaps[arm], margin, margin and tost(gaps[arm], margin.percent)),
            }
        )
    # over all sizes: 100 ln(L_FP8 / L_BF16)
    for recipe, chosen in grouped(found, lambda p: p.fp8.recipe):
        logs = over(chosen, "log_percent")
        equivalence = judge_equivalence(chosen, arm, margin.percent if margin else None)
        common[recipe] = {
            **logs,
            "pairs": len(chosen),
            "sizes": len({p.fp8.N for p in chosen}),
            "over_sizes": over_sizes(chosen, arm),
            "over_tokens": over_tokens(chosen, arm),
            "equivalence": equivalence,
            **judged(chosen, logs[arm], margin, equivalence.p),
        }
    gap_fits = gap_predictions.fit_gaps(
        [pair for pair in found if pair.fp8.run_id not in held],
        gap_predictions.own_law(laws),
        reason or "",
        arm,
    )
    return {
        "conventions": {"N": f"params_{records[0].convention}"},
        "loss": arm,
        "margin": margin,
        "null": measure(records, nulls, arm),
        "common": common,
        "ranking": rank(found, arm),
        "gap_laws": {recipe: fit.law for recipe, fit in gap_fits.items()},
        "sizes": sizes,
        "laws": {law.name: law.source for some in laws.values() for law in some},
        "no_own_law": reason,
        "pairs": [
            {
                "pair_id": p.bf16.pair_id,
                "bf16": p.bf16.run_id,
                "fp8": p.fp8.run_id,
                "recipe": p.fp8.recipe,
                **at(p.fp8),
                **{f"gap_{name}": gap for name, gap in p.gap.items()},
                "tok_per_s_ratio": p.tok_per_s_ratio,
                "device": p.fp8.device,
            }
            for p in found
        ],
    }


def load(path: Path) -> dict:
    """A precision.json with its dataclasses, as analyse gave it."""
    kinds = gap_predictions.KINDS | {
        frozenset(kind.__dataclass_fields__): kind
        for kind in (Estimate, Margin, Gap, Equivalence, Part, TableColumns)
    }
    return json.loads(
        path.read_text(), object_hook=lambda one: kinds.get(frozenset(one), dict)(**one)
    )


def table(rows: list[dict]) -> str:
    """Rows in Markdown, with a column for each key that some row has; floats have four digits, None
    is an empty cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    written = [
        [
            (
                ""
                if (cell := row.get(name)) is None
                else f"{cell:.4g}"
                if isinstance(cell, float)
                else str(cell)
            )
            for name in names
        ]
        for row in rows
    ]
    return grid([names, *written]) if rows else ""


def fixed(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def tables(result: dict) -> list[str]:
    """Markdown of analyse's result, the headline first: common gap, ranking, gap per size beside
    the nulls, its cost. A table without N and D has neither of the last two."""
    words = words_of(result)
    blocks = [_headline(result, words)]
    if len(result["common"]) > 1:
        blocks.append(_ranking(result["ranking"], words))
    if words.has_sizes:
        blocks += [_sizes(result, words), _costs(result, words)]
    return blocks


def _headline(result: dict, words: Words) -> str:
    """A row per recipe with its verdict and what the design can see; the best recipe, the nulls,
    the margin."""
    arm, margin, common, null = (result[key] for key in ("loss", "margin", "common", "null"))
    rows = []
    for recipe, gap in common.items():
        row = {
            words.recipe: recipe,
            "gap [%]": gap[arm],
            "verdict": gap["verdict"],
            "independent pairs": f"{gap[arm].n} of {gap['pairs']}",
        }
        if words.has_sizes:
            row |= {
                "sizes": gap["sizes"],
                "per decade of N [%]": gap["over_sizes"],
                "per doubling of D [%]": gap["over_tokens"],
            }
        rows.append(row | {"sees from [%]": gap["smallest_seen"]})
    where = "over all sizes" if words.has_sizes else "over all pairs"
    changes = (
        " Per decade of N, per doubling of D at a size: its change." if words.has_sizes else ""
    )
    text = [
        f"{words.arms} minus {words.baseline}, {words.loss}, in per cent of the loss, {where}, ± half"
        f" a 95 % t-interval over independent pairs ({words.dependent} count once).{changes} Seen:"
        " with a probability of 80 %."
    ]
    farthest = max((gap[arm].mean for gap in common.values()), key=abs)
    if abs(farthest) > LARGE_GAP:
        text.append(
            f"Over all sizes a gap is 100 ln(loss / loss of {words.baseline}): {farthest:+.3g} % here"
            f" is a loss that differs by {100 * math.expm1(farthest / 100):+.3g} %."
        )
    if len(common) > 1:
        text.append(f"Best: {result['ranking']['reason']}")
    pooled_nulls = {
        f"other {words.seeds}": null["pooled"],
        "same seed": null["same_seed"]["pooled"],
    }
    for name, pooled in pooled_nulls.items():
        if pooled:
            text.append(
                f"Null, {name}: 95 % of the differences of two {words.baseline} runs lie within"
                f" ±{pooled['band']:.2g} % (SD {pooled['sd_percent']:.3f} %, degrees of freedom:"
                f" {pooled['dof']})."
            )
    text.append(
        f"Margin ±{margin.percent:g} %: {margin.source}."
        if margin
        else "No margin was declared: no equivalence test."
    )
    for recipe, row in common.items():
        if equivalence := row.get("equivalence"):  # none in a precision.json of older code
            text.append(f"{recipe}: {_equivalence_words(equivalence, margin)}.")
    # none in a precision.json of older code
    for recipe, law in result.get("gap_laws", {}).items():
        text.append(gap_predictions.law_words(recipe, law))
    return "\n".join([table(rows), "", *text])


def _equivalence_words(equivalence: Equivalence, margin: Margin | None) -> str:
    """What the intersection-union test of one recipe says, where it fails, and what its design
    could have shown."""
    sizes = sum(part.kind == "size" for part in equivalence.parts)
    could_show = f"this design cannot show equivalence: {_no_spread(equivalence)}"
    if equivalence.could_show is not None:
        could_show = (
            f"this design could have shown equivalence within ±{equivalence.could_show:.2g} % (80 %"
            " power)"
        )
    if margin is None:
        return could_show
    failing = [part for part in equivalence.parts if part.p is None or part.p >= ALPHA]
    if not failing:
        where = "at its size's" if sizes == 1 else f"at each of {sizes} sizes'"
        return f"within ±{margin.percent:g} % {where} largest budget; {could_show}"
    said = [_part_words(part) for part in failing]
    return f"not shown to lie within ±{margin.percent:g} % at {listed(said, 3)}; {could_show}"


def _no_spread(equivalence: Equivalence) -> str:
    """Why the gaps of a recipe show no spread."""
    if any(part.independent_pairs > 1 for part in equivalence.parts):
        return "the pairs of a size have equal gaps, which are copies, not a sample without noise"
    return "no size has a second pair and fewer than four sizes give a trend"


def _part_words(part: Part) -> str:
    """A part of the test that did not pass, such as "131k (+0.85 % of 1 pair, p=0.3)"."""
    pair_count = f"{part.independent_pairs} pair" + ("s" if part.independent_pairs > 1 else "")
    gap = f"{part.mean:+.2g} % of {pair_count}"
    size = si(part.N) if part.N > 1 else "the table's pairs"  # a table may give no N
    if part.p is None:
        return f"{size} ({gap}, no spread known)"
    if part.kind == "trend":
        return f"{si(part.N)} by the trend over sizes ({part.mean:+.2g} %, p={part.p:.2g})"
    borrowed = " with the other sizes' spread" if part.is_borrowed else ""
    return f"{size} ({gap}{borrowed}, p={part.p:.2g})"


def _ranking(ranking: dict, words: Words) -> str:
    rows = []
    for ranked in ranking["recipes"]:
        row = {
            f"{words.recipe}, lowest gap first": ranked["recipe"],
            "gap [%]": ranked["gap"],
            "above the first [%]": ranked["difference"],
            "ties with it": "yes" if ranked["ties"] else "no",
        }
        if words.has_speed:
            row["tok/s FP8/BF16"] = ranked["throughput"]["ratio"]
        rows.append(row)
    compared = "The same pairs for all;"
    if words.has_sizes:
        compared = (
            "Pairs at the largest common budget of each size, the same sizes and"
            f" {words.seeds} for all;"
        )
    left_out = [f"Not ranked: {row['recipe']} ({row['reason']})." for row in ranking["left_out"]]
    tie = "a tie: the interval of the difference holds 0, or there is none."
    return "\n".join([table(rows), "", f"{compared} {tie}", *left_out])


def _sizes(result: dict, words: Words) -> str:
    """A row per size, tokens and recipe with its verdict, below both nulls of that size."""
    other, same = result["null"]["sizes"], result["null"]["same_seed"]
    columns = words.gap_columns
    rows = []
    for row in other:
        spread = f"SD {row['sd_percent']:.3f}"
        rows.append((row, words.two_seeds, f"{row['runs']} runs", *[spread] * len(columns), "null"))
    for row in same["sizes"]:
        gaps = [row[arm] for arm in columns]
        rows.append((row, "bf16, same seed", row["pairs"], *gaps, "null: rounded otherwise"))
    for row in result["sizes"]:
        gaps = [row[arm] for arm in columns]
        rows.append((row, row["recipe"], gaps[0].n, *gaps, row["verdict"]))
    lines = [[words.N, words.tokens, words.recipe, "pairs", *columns.values(), "verdict"]]
    for place, *cells in sorted(rows, key=lambda row: (row[0]["N"], row[0]["tokens"])):
        lines.append([f"{place['N']:,}", f"{place['tokens']:,}", *map(str, cells)])
    text = [
        f"N: {result['conventions']['N']}. Null: SD of the difference of two {words.baseline} runs,"
        f" {words.null}."
    ]
    if same["equal"]:
        text.append(f"Repeats equal to the last bit, no null: {same['equal']}.")
    return "\n".join([grid(lines), "", *text])


def _costs(result: dict, words: Words) -> str:
    """A row per size, tokens, recipe and law: what the gap costs in compute and size."""
    costs = [(size, cost) for size in result["sizes"] for cost in size["costs"]]
    lines = []
    for row, cost in costs:
        extra, share, speed = (
            [cost[key], *cost[f"{key}_ci95"]]
            for key in ("extra_tokens", "effective_parameters", "speedup")
        )
        line = {
            words.N: si(row["N"]),
            words.tokens: si(row["tokens"]),
            words.recipe: row["recipe"],
            "law": cost["law"],
            "extra compute [%]": _ends([r and 100 * (r - 1) for r in extra], "+.2f"),
            "N_eff/N": _ends(share, ".3f"),
        }
        if words.has_speed:
            line["speed-up"] = _ends(speed, ".3f")
        lines.append(line)
    speed_up = " Speed-up: throughput ratio net of them." if words.has_speed else ""
    laws = "; ".join(f"{name}: {source}" for name, source in result["laws"].items())
    text = [
        f"Extra compute: by more tokens at this N.{speed_up} In brackets: 95 % interval.",
        f"{laws}. Below {si(SMALLEST)} parameters a published law can be wrong by a factor of"
        " ten and more.",
    ]
    if result["no_own_law"]:
        text.append(f"{words.no_own_law}: {result['no_own_law']}.")
    reasons = dict.fromkeys(cost["reason"] for _, cost in costs if cost["reason"])
    if not words.has_speed:
        reasons.pop(NO_SPEED, None)
    text += [f"No number: {reason}." for reason in reasons]
    return "\n".join([table(lines), "", *text])


def _ends(values, form: str) -> str:
    """Value [low to high]; "?" for an end that the law cannot give."""
    value, *ends = ["?" if one is None else format(one, form) for one in values]
    return (
        "none"
        if value == "?"
        else value
        if ends == ["?", "?"]
        else f"{value} [{ends[0]} to {ends[1]}]"
    )


@command(__doc__, Options, "paths")
def main(options: Options) -> None:
    folder = law_folder(options.paths, options.out)
    if options.points:
        print(_of_a_table(options, folder))
        return
    arm = options.loss or "bf16"
    records, notes = read_runs(options.paths, options.n or None)
    records, left_out = usable(records)
    if not records:
        raise UserError("\n".join(["no run is left to compare", *left_out]))
    check_comparable(records)
    found, alone = pairs(records)
    notes += left_out + alone
    if all(pair.fp8.is_baseline for pair in found):
        raise UserError(
            "\n".join(["no BF16/FP8 pair among these runs: there is no gap to report", *notes])
        )
    frozen = gap_predictions.load(folder)
    fp8_pairs = [pair for pair in found if not pair.fp8.is_baseline]
    allowed, held = gap_predictions.without_held_out(fp8_pairs, frozen)
    held_runs = [pair.fp8.run_id for pair in held]
    if held_runs:
        notes.append(f"held out of the law of the gap: {listed(held_runs)}")
    gap_lines = []
    if options.predict or options.at:
        gap_lines = _freeze(options, records, allowed, folder, arm)
    if options.score:
        gap_lines += gap_predictions.score(folder, fp8_pairs)
    result = analyse(
        records,
        found,
        arm,
        read_margin(records, options.margin),
        held=frozenset(held_runs),
    )
    inputs = [
        {"run_id": r.run_id, "recipe": r.recipe, "summary_sha256": r.summary_sha256}
        for r in records
    ]
    wrote = write_with(
        folder,
        "precision",
        draw_precision(result),
        {"precision.json": {"format_version": 1, **result, "notes": notes, "inputs": inputs}},
    )
    print(_page(tables(result), notes, "\n".join([*gap_lines, wrote]), options.all))


def _freeze(options: Options, records, allowed, folder: Path, arm: str) -> list[str]:
    """Freeze the gaps that predict= and at= ask for; lines to print."""
    used = {pair.bf16.run_id for pair in allowed}
    bf16_runs = [run for run in records if run.run_id in used]
    laws, no_law = surfaces(bf16_runs, f"loss_{arm}")
    bf16_law = gap_predictions.own_law(laws)
    fits = gap_predictions.fit_gaps(allowed, bf16_law, no_law or "", arm)
    targets = []
    if options.predict:
        targets.append(gap_predictions.target_of_run(options.predict, records))
    if options.at:
        targets += gap_predictions.targets_at(options.at, list(fits))
    return gap_predictions.freeze(targets, fits, allowed, records, folder, arm, bf16_law)


def _of_a_table(options: Options, folder: Path) -> str:
    """The same analysis of a table's pairs; without N and D what needs neither: gap over all pairs,
    its test, ranking."""
    path = Path(options.points)
    if bool(options.n) != bool(options.d):
        raise UserError("give n= and d= both, or neither: a gap stands at a size and a budget")
    table_pairs = read_table_pairs(
        path, options.arm, options.pair, options.loss, options.n, options.d, options.base
    )
    result = analyse(
        table_pairs.runs,
        table_pairs.pairs,
        "bf16",
        read_margin([], options.margin),
        baseline=table_pairs.columns.baseline,
    )
    result |= {"table": table_pairs.columns, "conventions": {"N": f"column {options.n or 'none'}"}}
    notes = list(table_pairs.notes)
    figure = None
    if options.n:
        figure = draw_precision(result)
    else:
        notes.append(
            "without n= and d= there are no sizes: no null of other seeds, no cost in compute, no"
            " figure"
        )
        result |= {
            "null": measure([], [], "bf16"),
            "gap_laws": {},
            "sizes": [],
            "laws": {},
            "no_own_law": None,
        }
    content = {
        "format_version": 1,
        **result,
        "notes": notes,
        "inputs": [{"file": path.name, "sha256": table_pairs.sha256}],
    }
    wrote = write_with(folder, "precision", figure, {"precision.json": content})
    return _page(tables(result), notes, wrote, options.all)


def _page(blocks: list[str], notes: list[str], wrote: str, is_all: bool) -> str:
    lines = [f"WARNING: {note}" for note in notes]
    if len(lines) > SHOWN and not is_all:
        lines[SHOWN:] = [f"{len(lines) - SHOWN} more in precision.json"]
    headline, *blocks = blocks
    parts = [headline, *["\n".join(lines)] * bool(lines)]
    while blocks and (is_all or "\n\n".join([*parts, blocks[0]]).count("\n") + 5 <= LINES):
        parts.append(blocks.pop(0))
    return "\n\n".join([*parts, *[f"{len(blocks)} more tables: --all"] * bool(blocks), wrote])


if __name__ == "__main__":
    raise SystemExit(run_command(main))
