"""What the page and the figure of scaling/precision.py call the arms and the loss: our own words
for runs, a table's own names for a table."""

from dataclasses import dataclass

from scaling.paired.estimates import Estimate

# Record.convention -> what stands before "parameters"
KIND = {"total": "", "nonembed": "non-embedding ", None: ""}
# Which of a run's two evaluations -> its words.
EVALUATION_WORDS = {"bf16": "in BF16", "as_trained": "as trained"}


@dataclass(frozen=True)
class TableColumns:
    """Which columns of a table of paired losses were analysed, in precision.json."""

    arm_column: str  # names the precision
    pair_column: str  # equal text makes a pair
    loss_column: str  # nats per token
    n_column: str  # parameters; "" where the table gives none
    d_column: str  # training tokens; "" where the table gives none
    baseline: str  # the baseline's text in the column of arms


@dataclass(frozen=True)
class Words:
    """The words of one page."""

    baseline: str  # the arm that the others stand against
    arms: str  # the others, at the start of a sentence
    recipe: str  # heading of the arms' names
    loss: str  # which loss
    evaluated: str  # which loss, in a title
    gap_columns: dict[str, str]  # evaluation -> heading of its column in the table of sizes
    seed: str  # what two BF16 runs of a null differ by
    seeds: str  # its plural
    two_seeds: str  # the same in the table of sizes
    null: str  # which two runs a null compares
    dependent: str  # what counts once in an interval
    N: str  # heading of the parameters
    tokens: str  # heading of the tokens
    no_own_law: str  # how a sentence begins that says why there is no law of the baseline
    has_sizes: bool  # whether N and D are known
    has_speed: bool  # whether throughputs are known


def words_of(columns: TableColumns | None, evaluation: str) -> Words:
    """The words of a page; columns: of a table, None for runs."""
    if columns is None:
        return _words_of_runs(evaluation)
    return _words_of_table(columns, evaluation)


def _words_of_runs(evaluation: str) -> Words:
    return Words(
        baseline="BF16",
        arms="FP8",
        recipe="recipe",
        loss=EVALUATION_WORDS[evaluation],
        evaluated=f"evaluated {EVALUATION_WORDS[evaluation]}",
        gap_columns={name: f"gap {words} [%]" for name, words in EVALUATION_WORDS.items()},
        seed="seed",
        seeds="seeds",
        two_seeds="bf16, two seeds",
        null="of other seeds or of one seed rounded otherwise",
        dependent="branches of one trunk",
        N="N",
        tokens="tokens",
        no_own_law="No law of our own",
        has_sizes=True,
        has_speed=True,
    )


def _words_of_table(columns: TableColumns, evaluation: str) -> Words:
    return Words(
        baseline=columns.baseline,
        arms=f"Each {columns.arm_column}",
        recipe=columns.arm_column,
        loss=f"column {columns.loss_column}",
        evaluated=f"column {columns.loss_column}",
        gap_columns={evaluation: f"gap in {columns.loss_column} [%]"},
        seed=columns.pair_column,
        seeds=columns.pair_column,
        two_seeds=f"{columns.baseline}, two of {columns.pair_column}",
        null=f"of other {columns.pair_column}",
        dependent="points of one curve",
        N=columns.n_column or "N",
        tokens=columns.d_column or "tokens",
        no_own_law=f"No law of the {columns.baseline} runs",
        has_sizes=bool(columns.n_column),
        has_speed=False,
    )


def format_estimate(estimate: Estimate | None) -> str | None:
    """Mean ± half the 95 % interval, where there is one; None stays."""
    if estimate is None:
        return None
    if estimate.half is None:
        return f"{estimate.mean:+.3f}"
    return f"{estimate.mean:+.3f} ± {estimate.half:.3f}"
