"""The part of docs/schemas.md on what the commands of scaling/ write, made of their dataclasses.

A test compares the page with schema_page()."""

from lib.schema import schema_table
from scaling.cpu_kind import Kind
from scaling.declaration import Declaration
from scaling.gap_predictions import GapPrediction, GapScore, GapTarget, PairInput
from scaling.gap_words import TableColumns
from scaling.ledger import Entry
from scaling.paired.cost import Cost, Surface, Throughput
from scaling.paired.equivalence import Equivalence, Part
from scaling.paired.estimates import Estimate
from scaling.paired.gap_cells import PairNoise
from scaling.paired.gap_law import (
    EffectiveParameters,
    Exponent,
    GapForecast,
    GapFormForecast,
    GapLaw,
    NestedForm,
)
from scaling.paired.gaps import Gap, Place
from scaling.paired.nulls import (
    Null,
    PooledRepeatNull,
    PooledSeedNull,
    RepeatNull,
    SameSeedNull,
    SeedNull,
)
from scaling.paired.ranking import LeftOut, Ranked
from scaling.precision_result import (
    GapConventions,
    PairResult,
    PrecisionResult,
    RankingResult,
    RecipeDifference,
    RecipeGap,
    SizeDifference,
    SizeGap,
)
from scaling.rate_sweep import Base, Optimum, RateResult, RateRow, Sweep
from scaling.study import Row
from scaling.study_report import StudyReport, StudyRun
from scaling.training_report import EvaluatedGap, RunReport, Spread, StepTime, TrainingReport
from scaling.verdicts import Margin

# Title -> the dataclass that describes it, in the page's order.
SECTIONS: dict[str, type] = {
    "study.json": Declaration,
    "study.json: `runs`, each": Row,
    "precision.json": PrecisionResult,
    "precision.json: `conventions`": GapConventions,
    "precision.json: `margin`": Margin,
    "precision.json: an estimate, such as `bf16`": Estimate,
    "precision.json: `null`": Null,
    "precision.json: a place, in rows that stand at a size and budget": Place,
    "precision.json: `null.sizes`, each": SeedNull,
    "precision.json: `null.pooled`": PooledSeedNull,
    "precision.json: `null.same_seed`": SameSeedNull,
    "precision.json: `null.same_seed.sizes`, each": RepeatNull,
    "precision.json: `null.same_seed.pooled`": PooledRepeatNull,
    "precision.json: `common`, each": RecipeGap,
    "precision.json: `equivalence`": Equivalence,
    "precision.json: `equivalence.parts`, each": Part,
    "precision.json: `differences`, each": RecipeDifference,
    "precision.json: `differences.sizes`, each": SizeDifference,
    "precision.json: `ranking`": RankingResult,
    "precision.json: `ranking.recipes`, each": Ranked,
    "precision.json: `ranking.left_out`, each": LeftOut,
    "precision.json: `gap_laws`, each": GapLaw,
    "precision.json: `gap_laws`, `a` and `b`": Exponent,
    "precision.json: `gap_laws`, `noise`": PairNoise,
    "precision.json: `gap_laws`, `forms`, each": NestedForm,
    "precision.json: `gap_laws`, `effective`": EffectiveParameters,
    "precision.json: `sizes`, each": SizeGap,
    "precision.json: `throughput`": Throughput,
    "precision.json: `costs`, each": Cost,
    "precision.json: `pairs`, each": PairResult,
    "precision.json: `gap_bf16` and `gap_as_trained`": Gap,
    "precision.json: `table`": TableColumns,
    "gap_prediction_NAME.json": GapPrediction,
    "gap_prediction_NAME.json: `target`": GapTarget,
    "gap_prediction_NAME.json: `forecast`": GapForecast,
    "gap_prediction_NAME.json: `forecast.forecasts`, each": GapFormForecast,
    "gap_prediction_NAME.json: `bf16_law`": Surface,
    "gap_prediction_NAME.json: `inputs`, each": PairInput,
    "gap_score_NAME.json": GapScore,
    "learning_rate.json": RateResult,
    "learning_rate.json: `sweeps`, each": Sweep,
    "learning_rate.json: `rows`, each": RateRow,
    "learning_rate.json: `optimum`": Optimum,
    "learning_rate.json: `base`": Base,
    "report.json of one training": TrainingReport,
    "report.json of one training: `runs`, each": RunReport,
    "report.json of one training: `train_loss` and other series": Spread,
    "report.json of one training: `gap`, each": EvaluatedGap,
    "report.json of one training: `step_time_s`": StepTime,
    "report.json of a study": StudyReport,
    "report.json of a study: `runs`, each": StudyRun,
    "studies/NAME/runs.jsonl, each line": Entry,
    "studies/NAME/runs.jsonl: `machine`": Kind,
}


def schema_page() -> str:
    """The sections behind those of summary.json."""
    head = (
        "# What the commands of scaling/ leave: pairs and studies\n\nMade of the comments in the"
        " dataclasses that `scaling/schemas.py` names; a test compares the two.\n"
    )
    sections = [f"## {title}\n\n{schema_table(cls)}\n" for title, cls in SECTIONS.items()]
    return "\n".join([head, *sections])
