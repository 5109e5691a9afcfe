"""precision.json: what FP8 costs against BF16 in a study or in a table of paired losses.

PrecisionResult is the schema of the file; docs/schemas.md is made of its fields and comments."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lib.text import si
from scaling.gap_words import TableColumns
from scaling.paired.cost import Cost, Surfaces, Throughput, cost_of_gap, surfaces, throughput
from scaling.paired.differences import pairs_between
from scaling.paired.equivalence import Equivalence, judge_equivalence
from scaling.paired.estimates import Estimate, grouped, smallest_seen, tost
from scaling.paired.gap_law import GapLaw, fit_gaps
from scaling.paired.gaps import (
    FinishedRun,
    Gap,
    Pair,
    Place,
    is_idle,
    mean_gap,
    mean_gaps,
    place_of,
    slope_over_sizes,
    slope_over_tokens,
)
from scaling.paired.nulls import Null, SameSeedNull, measure_nulls
from scaling.paired.ranking import LeftOut, Ranked, Ranking, rank
from scaling.reason_words import sentence_of
from scaling.typed_json import read_typed
from scaling.verdicts import Margin, format_verdict

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RecipeGap:
    """The gap of one recipe over all sizes, 100 ln(L_FP8 / L_BF16), per cent; of a difference,
    100 ln(L_recipe / L_minus)."""

    bf16: Estimate  # of both runs evaluated through BF16 matmuls
    as_trained: Estimate  # of each run evaluated in the precision that it was trained in
    pairs: int  # how many
    sizes: int  # how many it has pairs of
    # change of 100 ln(L_FP8 / L_BF16) per decade of N; null below three sizes
    over_sizes: Estimate | None
    # the same per doubling of D at a size; null without two budgets
    over_tokens: Estimate | None
    verdict: str  # in words
    tost_p: float | None  # p of the test that it lies within the margin; null without one
    # the smallest gap [%] that so many pairs see with a probability of 80 %; null: no spread
    smallest_seen: float | None
    equivalence: Equivalence | None = None  # the test at every size; null in older files


@dataclass(frozen=True)
class SizeGap(Place):
    """The gap of one recipe at one size and budget, per cent of the BF16 loss."""

    recipe: str  # of the FP8 runs
    runs: list[str]  # the FP8 runs
    bf16: Estimate  # as in a recipe's gap
    as_trained: Estimate  # of each run as it was trained
    nats: Estimate  # the judged gap in nats per token
    throughput: Throughput  # FP8's against BF16's
    costs: list[Cost]  # under each law
    verdict: str  # in words
    tost_p: float | None  # p of the test that it lies within the margin; null without one
    smallest_seen: float | None  # as in a recipe's gap


@dataclass(frozen=True)
class SizeDifference:
    """The difference of two recipes at one size, over all of its budgets, per cent of the loss of
    the second."""

    N: int  # parameters by the study's convention
    pairs: int  # how many
    bf16: Estimate  # of both runs evaluated through BF16 matmuls
    as_trained: Estimate  # of each run evaluated in the precision that it was trained in
    verdict: str  # in words


@dataclass(frozen=True)
class RecipeDifference:
    """The gap of one recipe minus that of another, over the pairs that both have."""

    recipe: str  # whose gap
    minus: str  # whose gap is subtracted
    gap: RecipeGap  # the difference over all sizes, 100 ln(L_recipe / L_minus), per cent
    sizes: list[SizeDifference]  # the same at each size


@dataclass(frozen=True)
class RankingResult:
    """Which recipe is the best."""

    best: str | None  # null: none is ranked, or one of several alone
    reason: str  # why, in words
    recipes: list[Ranked]  # from the lowest gap on
    left_out: list[LeftOut]  # that are not ranked


@dataclass(frozen=True)
class PairResult(Place):
    """One pair of runs; its place is the FP8 run's."""

    pair_id: str  # equal in runs that differ in precision alone
    bf16: str  # run_id
    fp8: str  # run_id
    recipe: str  # of the FP8 run
    gap_bf16: Gap  # both runs evaluated through BF16 matmuls
    gap_as_trained: Gap  # each run evaluated as it was trained
    tok_per_s_ratio: float | None  # FP8 over BF16; null where not only the precision differs
    device: str  # of the FP8 run; "" where unknown


@dataclass(frozen=True)
class GapConventions:
    N: str  # key of summary.json, or column of the table, that counts the parameters


@dataclass(frozen=True)
class PrecisionResult:
    """What precision.json holds. A file of older code has format_version in place of
    schema_version."""

    schema_version: int  # of this list of keys
    conventions: GapConventions  # how N is counted
    loss: str  # the evaluation that is judged: bf16 or as_trained
    margin: Margin | None  # null: none was declared or given
    null: Null  # what two BF16 runs differ by
    common: dict[str, RecipeGap]  # recipe -> its gap over all sizes
    ranking: RankingResult  # which recipe is the best
    gap_laws: dict[str, GapLaw]  # recipe -> its gap as a law of size and tokens
    sizes: list[SizeGap]  # the gap of each recipe at each size and budget
    laws: dict[str, str]  # name of a law of the loss -> where it comes from
    no_own_law: str | None  # why the BF16 runs give none
    pairs: list[PairResult]  # the pairs behind it, nulls apart
    table: TableColumns | None = None  # null: of runs
    # of two recipes each, where compare= asked for them
    differences: list[RecipeDifference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out, or is worth knowing
    inputs: list[dict[str, str]] = field(default_factory=list)  # runs or the table, with sha256

    @property
    def baseline(self) -> str:
        """What the arm is called that the others stand against."""
        return "BF16" if self.table is None else self.table.baseline


def read_precision(path: Path) -> PrecisionResult:
    """A precision.json, also of older code. Raises UserError as read_typed()."""
    return read_typed(PrecisionResult, path, SCHEMA_VERSION, "precision", gap_laws={})


# ---------------------------------------------------------------------------------------- analysis


def analyse(
    records: Sequence[FinishedRun],
    pairs: Sequence[Pair],
    evaluation: str,
    margin: Margin | None,
    *,
    columns: TableColumns | None = None,
    held_out: Collection[str] = (),
    compared: Sequence[tuple[str, str]] = (),
) -> PrecisionResult:
    """The result but for notes and inputs, gaps in per cent of the BF16 loss; `evaluation`: which
    is judged; columns: of a table, None for runs; held_out: run_ids of FP8 runs that enter no law
    of the gap; compared: recipes whose differences are asked for, which share pairs."""
    repeats = [pair for pair in pairs if pair.fp8.is_baseline]
    fp8_pairs = [pair for pair in pairs if not pair.fp8.is_baseline]
    laws = baseline_laws(records, evaluation, "BF16" if columns is None else columns.baseline)
    fits = fit_gaps(
        [pair for pair in fp8_pairs if pair.fp8.run_id not in held_out],
        laws.own,
        sentence_of(laws.no_own_law) or "",
        evaluation,
    )
    return PrecisionResult(
        schema_version=SCHEMA_VERSION,
        conventions=_conventions(records[0], columns),
        loss=evaluation,
        margin=margin,
        null=measure_nulls(records, repeats, evaluation),
        common=_recipe_gaps(fp8_pairs, evaluation, margin),
        ranking=_ranking_result(rank(fp8_pairs, evaluation)),
        gap_laws={recipe: fit.law for recipe, fit in fits.items()},
        sizes=_size_gaps(fp8_pairs, evaluation, margin, laws),
        laws=_sources(laws),
        no_own_law=sentence_of(laws.no_own_law),
        pairs=[_pair_result(pair) for pair in fp8_pairs],
        table=columns,
        differences=[
            _difference(pairs_between(fp8_pairs, *recipes), *recipes, evaluation, margin)
            for recipes in compared
        ],
    )


def without_sizes() -> dict[str, Any]:
    """The fields that a table without N and D cannot give, empty."""
    return {
        "null": Null([], None, SameSeedNull([], 0, None)),
        "gap_laws": {},
        "sizes": [],
        "laws": {},
        "no_own_law": None,
    }


def baseline_laws(
    records: Sequence[FinishedRun], evaluation: str, baseline: str = "BF16"
) -> Surfaces:
    """The laws under which gaps cost compute; baseline: what the BF16 arm is called."""
    runs = [run for run in records if run.is_baseline and not run.repeat]
    return surfaces(
        runs,
        evaluation,
        f"Chinchilla's form fitted to these {len(runs)} {baseline} runs",
        f"power law over tokens through the {baseline} runs of each size",
    )


def _size_budget_recipe(pair: Pair) -> tuple[int, int, str]:
    return pair.fp8.N, pair.fp8.tokens, pair.fp8.recipe


def _conventions(run: FinishedRun, columns: TableColumns | None) -> GapConventions:
    if columns is not None:
        return GapConventions(f"column {columns.n_column or 'none'}")
    return GapConventions(f"params_{run.convention}")


def _sources(laws: Surfaces) -> dict[str, str]:
    return {law.name: law.source for group in laws.of_size.values() for law in group}


def _recipe_gaps(
    pairs: Sequence[Pair], evaluation: str, margin: Margin | None
) -> dict[str, RecipeGap]:
    recipes = grouped(pairs, lambda pair: pair.fp8.recipe)
    return {recipe: _recipe_gap(members, evaluation, margin) for recipe, members in recipes}


def _size_gaps(
    pairs: Sequence[Pair], evaluation: str, margin: Margin | None, laws: Surfaces
) -> list[SizeGap]:
    groups = grouped(pairs, _size_budget_recipe)
    return [_size_gap(members, evaluation, margin, laws) for _, members in groups]


def _recipe_gap(pairs: Sequence[Pair], evaluation: str, margin: Margin | None) -> RecipeGap:
    gaps = mean_gaps(pairs, "log_percent")
    equivalence = judge_equivalence(pairs, evaluation, margin.percent if margin else None)
    gap = gaps[evaluation]
    return RecipeGap(
        bf16=gaps["bf16"],
        as_trained=gaps["as_trained"],
        pairs=len(pairs),
        sizes=len({pair.fp8.N for pair in pairs}),
        over_sizes=slope_over_sizes(pairs, evaluation),
        over_tokens=slope_over_tokens(pairs, evaluation),
        verdict=format_verdict(gap, margin, equivalence.p, is_idle(pairs)),
        tost_p=equivalence.p,
        smallest_seen=_smallest_seen(gap),
        equivalence=equivalence,
    )


def _difference(
    pairs: Sequence[Pair], recipe: str, minus: str, evaluation: str, margin: Margin | None
) -> RecipeDifference:
    """Of pairs_between()."""
    sizes = []
    # a table may give no N
    with_size = [pair for pair in pairs if pair.fp8.N > 1]
    for N, members in grouped(with_size, lambda pair: pair.fp8.N):
        gaps = mean_gaps(members, "percent")
        # no test of equivalence: budgets are pooled, and a short one would hide a long one's gap
        verdict = format_verdict(gaps[evaluation], None, None, is_idle(members))
        sizes.append(SizeDifference(N, len(members), gaps["bf16"], gaps["as_trained"], verdict))
    return RecipeDifference(recipe, minus, _recipe_gap(pairs, evaluation, margin), sizes)


def _size_gap(
    pairs: Sequence[Pair], evaluation: str, margin: Margin | None, laws: Surfaces
) -> SizeGap:
    run = pairs[0].fp8
    gaps = mean_gaps(pairs, "percent")
    gap, nats = gaps[evaluation], mean_gap(pairs, evaluation, "nats")
    speed = throughput(pairs)
    p = tost(gap, margin.percent) if margin else None
    costs = []
    for law in laws.of_size[run.N]:
        N = run.params_total if law.counts == "total" else run.params_nonembed
        costs.append(cost_of_gap(law, N, run.tokens, nats, speed))
    return SizeGap(
        **asdict(place_of(run)),
        recipe=run.recipe,
        runs=[pair.fp8.run_id for pair in pairs],
        bf16=gaps["bf16"],
        as_trained=gaps["as_trained"],
        nats=nats,
        throughput=speed,
        costs=costs,
        verdict=format_verdict(gap, margin, p, is_idle(pairs)),
        tost_p=p,
        smallest_seen=_smallest_seen(gap),
    )


def _smallest_seen(gap: Estimate) -> float | None:
    return None if gap.sd is None else smallest_seen(gap.sd, gap.n)


def _pair_result(pair: Pair) -> PairResult:
    return PairResult(
        **asdict(place_of(pair.fp8)),
        pair_id=pair.bf16.pair_id,
        bf16=pair.bf16.run_id,
        fp8=pair.fp8.run_id,
        recipe=pair.fp8.recipe,
        gap_bf16=pair.gap["bf16"],
        gap_as_trained=pair.gap["as_trained"],
        tok_per_s_ratio=pair.tok_per_s_ratio,
        device=pair.fp8.device,
    )


# ------------------------------------------------------------------------- the ranking in words


def _ranking_result(ranking: Ranking) -> RankingResult:
    best = ranking.best
    return RankingResult(
        best=None if best is None else best.recipe,
        reason=_format_best(ranking, best),
        recipes=ranking.recipes,
        left_out=ranking.left_out,
    )


def _format_best(ranking: Ranking, best: Ranked | None) -> str:
    if ranking.is_of_one:
        return (
            f"none, as {ranking.recipes[0].recipe} alone is ranked and so compared with nothing;"
            " compare=RECIPE:OTHER sets two side by side over the pairs that both have."
        )
    if best is None:
        return (
            "No recipe that differs from the baseline ran wherever more than half of the others"
            " did: none is ranked."
        )
    first, *tied = [ranked.recipe for ranked in ranking.tied]
    text = f"{first} has the lowest gap, {ranking.recipes[0].gap.mean:+.3f} % {_where(ranking)}; "
    if not tied:
        return f"{text}no other ranked recipe's lies within chance of it: {first} is the best."
    text += f"not told apart from it: {', '.join(tied)}. "
    if ranking.speed_unknown:
        reason = sentence_of(ranking.speed_unknown)
        return f"{text}Speed cannot decide ({reason}), so {first} is the best."
    return (
        f"{text}Of these {best.recipe} is the fastest, {best.throughput.ratio:.3f} of BF16's tokens"
        " per second: it is the best."
    )


def _where(ranking: Ranking) -> str:
    """What was compared."""
    # a table may give no N
    sizes = dict.fromkeys(si(cell.N) for cell in ranking.compared if cell.N > 1)
    text = f"over {len(ranking.compared)} pairs"
    if sizes:
        text += f" at the largest common budget of {' and '.join(sizes)}"
    return text
