"""law.json: what scaling/fit.py leaves of its laws, as dataclasses, with its one writer and reader.

The parameters of a law stand beside its other keys, as laws.chinchilla.alpha; so do those of a row
of robustness. docs/schemas.md has every key."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.schema import schema_section
from lib.text import si
from scaling.groups import FormDoubt, Group, Headline, NamedOutlier
from scaling.law_words import refusal_words
from scaling.laws import DELTA, Fit, LackOfFit, Refit, SharedFault, WindowExponent
from scaling.laws.fits import BudgetMinimum
from scaling.records import Record, read_json
from scaling.table_points import Columns, LinesLeftOut, TableFile, TableSource

SCHEMA_VERSION = 3  # 2 was called format_version


@dataclass(frozen=True)
class BudgetEntry:
    """One compute budget of the IsoFLOP law."""

    C: float  # FLOPs, geometric mean of its points
    sizes: int  # distinct N
    N: float | None  # parameters where the loss is lowest; null without a minimum
    D: float | None  # tokens there
    loss: float | None  # nats per token there
    reason: str | None  # why there is no minimum


@dataclass(frozen=True)
class LawEntry:
    """One law. Beside these keys stand its parameters by name, each a number or null: E, A, B, K,
    alpha, beta, gamma, or a, b, k_n, k_d; of chinchilla also a, b and gamma of its frontier."""

    form: str  # "chinchilla", "ray", "power_n", "power_d", "power_c" or "isoflop"
    n: int  # points
    identified: bool  # whether the points determine the parameters
    reason: str | None  # what is lacking; null where identified
    # summed Huber loss of the residuals of ln loss; isoflop: half the squares of ln N*'s; null
    # where not fitted
    objective: float | None
    starts: int | None  # of the solver
    starts_at_best: int | None  # starts that end at the best objective
    gradient_norm: float | None  # of the objective at the optimum
    residual_rms: float | None  # of ln loss, over n less the parameters; isoflop: of ln N*
    scatter: float | None  # the same of the law without its outliers, over the other points
    # parameters of the law without its outliers; null where there are none
    without_outliers: dict[str, float] | None
    se: dict[str, float] | None  # parameter -> standard error
    ci95: dict[str, tuple[float, float]] | None  # parameter -> ends of its 95 % interval
    # how se and ci95 were made: "t", "bootstrap" or "cluster" (jackknife over trajectories)
    interval: str | None
    clusters: int | None  # independent trajectories, where intervals count them
    resamples: int | None  # drawn by the bootstrap
    failed: int | None  # resamples that did not converge
    budgets: list[BudgetEntry] | None  # of isoflop
    windows: list[WindowExponent] | None  # of isoflop; the first one is used
    parameters: dict[str, float | None]  # not a key: its items stand beside the others
    formula: str  # the law in plain text; "" where not fitted


@dataclass(frozen=True)
class SharedFaultEntry:
    """What points share that lie off the law together; intervals then count its groups."""

    by: str  # "size", or the column of a table
    chance: float  # of so large a difference between groups if every point were independent
    groups: int  # how many there are


@dataclass(frozen=True)
class LackOfFitEntry:
    """How L(N, D) misses its points."""

    residual_rms: float  # of ln loss
    scatter: float  # the same without outliers
    noise: float  # standard deviation of one run's ln loss
    noise_of: str  # what it was taken from: "seeds", "repeats" or "neighbours"
    # tokens per parameter below which points are left out so that the law fits the others; null
    # where no share of early points is to blame
    below: float | None
    left_out: list[str]  # these points, by run or line
    outliers: list[NamedOutlier]  # of the law of the others
    without: LawEntry | None  # that law


@dataclass(frozen=True)
class RefitEntry:
    """The headlined law under another choice. Beside these keys stand its parameters by name."""

    # "declared", "drop highest", "delta", "count N as", "count C as" or "leave out N"
    variant: str
    value: str  # which one, such as "5", "MSE" or "30M to 100M"
    n: int  # points
    parameters: dict[str, float | None]  # not a key: its items stand beside the others
    objective: float | None  # as of a law
    starts: int | None  # as of a law
    starts_at_best: int | None  # as of a law
    identified: bool  # as of a law
    reason: str | None  # as of a law
    # absent unless a size is left out: mean error of predicting its losses, in per cent
    error_percent: float | None
    largest_error_percent: float | None  # absent likewise: the error farthest from 0


@dataclass(frozen=True)
class GroupEntry:
    """The laws of one recipe, or of a table."""

    runs: list[str]  # names, smallest compute first; [] of a table
    n: int  # runs or points
    headline: Headline  # the form that answers, and why
    outliers: list[NamedOutlier]  # points off the law of the others, farthest first
    frontier: LawEntry | None  # L*(C) through the budgets' minima, where those are headlined
    shared_fault: SharedFaultEntry | None  # null where points are independent
    lack_of_fit: LackOfFitEntry | None  # null where L(N, D) fits, or is not identified
    laws: dict[str, LawEntry]  # form -> the law
    band: dict[str, list[LawEntry]]  # axis -> forms whose spread is the model-form band
    form_doubt: FormDoubt | None  # beside L(N, D): what other forms say far out
    robustness: list[RefitEntry]  # the headlined law under other choices


@dataclass(frozen=True)
class LawConventions:
    """What the columns of the inputs are."""

    N: str  # "params_total" or "params_nonembed"
    D: str  # "tokens"
    C: str  # "flops_per_token * tokens"
    loss: str  # "loss_bf16" or "loss_as_trained"
    loss_unit: str  # "nats per token"
    chinchilla_frontier: str  # how FLOPs count along it: "C = 6 N D"


@dataclass(frozen=True)
class SeedNoise:
    """What seeds do to ln loss."""

    estimate: float | None  # standard deviation; null where no two runs differ in the seed alone
    degrees_of_freedom: int  # of the estimate
    used: float  # the floor of the residuals in intervals: the estimate, or seed_sd=


@dataclass(frozen=True)
class InputRun:
    """One run that entered a fit."""

    run_id: str  # its name
    pair_id: str  # equal in runs that differ in precision alone
    recipe: str  # its precision
    trunk: str  # the run that it shares its training with: its trajectory
    seed: int  # of initialisation and data order
    N: int  # parameters as the convention counts them
    params_total: int  # all parameters
    params_nonembed: int  # without embedding and head
    D: int  # training tokens
    C: float  # training FLOPs
    loss: float  # nats per token
    summary_sha256: str  # of its summary.json


@dataclass(frozen=True)
class LawsOfRuns:
    """law.json of finished runs."""

    schema_version: int  # of this list of keys
    delta: float  # Huber's threshold on ln loss
    conventions: LawConventions  # what is counted how
    seed_noise: SeedNoise  # of all groups
    notes: list[str]  # what was skipped or left out, and why
    inputs: list[InputRun]  # of all groups
    groups: dict[str, GroupEntry]  # recipe -> its laws
    laws: dict[str, LawEntry] | None  # those of the one group; absent with several


@dataclass(frozen=True)
class TableHead:
    """law.json of a table: these keys, then those of its one group."""

    schema_version: int  # of this list of keys
    delta: float  # Huber's threshold on ln loss
    source: TableSource  # where the points come from
    notes: list[str]  # what was left out, and doubts of units


# ---------------------------------------------------------------------------------------- writing


def laws_of_runs(
    groups: list[Group],
    loss_key: str,
    seed_noise: SeedNoise,
    notes: list[str],
) -> dict[str, Any]:
    """law.json of the groups of finished runs, as plain JSON."""
    entries = {group.recipe: group_entry(group) for group in groups}
    convention = groups[0].records[0].convention
    content = LawsOfRuns(
        schema_version=SCHEMA_VERSION,
        delta=DELTA,
        conventions=LawConventions(
            N=f"params_{convention}",
            D="tokens",
            C="flops_per_token * tokens",
            loss=loss_key,
            loss_unit="nats per token",
            chinchilla_frontier="C = 6 N D",
        ),
        seed_noise=seed_noise,
        notes=notes,
        inputs=[_input(record, loss_key) for group in groups for record in group.records],
        groups=entries,
        laws=entries[groups[0].recipe].laws if len(groups) == 1 else None,
    )
    law = plain(content)
    if content.laws is None:
        del law["laws"]
    return law


def laws_of_table(group: Group, source: TableSource, notes: list[str]) -> dict[str, Any]:
    """law.json of a table's points, as plain JSON."""
    return plain(TableHead(SCHEMA_VERSION, DELTA, source, notes)) | plain(group_entry(group))


def group_entry(group: Group) -> GroupEntry:
    return GroupEntry(
        runs=[record.run_id for record in group.records],
        n=len(group.loss),
        headline=Headline(group.headline, group.headline_reason),
        outliers=group.outliers,
        frontier=law_entry(group.frontier) if group.frontier else None,
        shared_fault=_shared_fault_entry(group.shared_fault),
        lack_of_fit=_lack_of_fit_entry(group, group.lack_of_fit),
        laws={form: law_entry(fit) for form, fit in group.laws.items()},
        band={axis: [law_entry(fit) for fit in fits] for axis, fits in group.bands.items()},
        form_doubt=group.form_doubt,
        robustness=[refit_entry(refit) for refit in group.robustness],
    )


def _budget_entry(budget: BudgetMinimum) -> BudgetEntry:
    reason = refusal_words(budget.reason)
    return BudgetEntry(budget.C, budget.sizes, budget.N, budget.D, budget.loss, reason)


def law_entry(fit: Fit) -> LawEntry:
    budgets = windows = None
    if fit.budgets is not None:
        budgets = [_budget_entry(budget) for budget in fit.budgets]
    if fit.windows is not None:
        windows = list(fit.windows)
    return LawEntry(
        form=fit.form,
        n=fit.n,
        identified=fit.identified,
        reason=refusal_words(fit.reason),
        objective=fit.objective,
        starts=fit.starts,
        starts_at_best=fit.starts_at_best,
        gradient_norm=fit.gradient_norm,
        residual_rms=fit.residual_rms,
        scatter=fit.scatter,
        without_outliers=fit.without_outliers,
        se=fit.se,
        ci95=fit.ci95,
        interval=fit.interval,
        clusters=fit.clusters,
        resamples=fit.resamples,
        failed=fit.failed,
        budgets=budgets,
        windows=windows,
        parameters=fit.parameters,
        formula=fit.formula(),
    )


def _shared_fault_entry(fault: SharedFault | None) -> SharedFaultEntry | None:
    return None if fault is None else SharedFaultEntry(fault.by, fault.chance, fault.groups)


def _lack_of_fit_entry(group: Group, lack: LackOfFit | None) -> LackOfFitEntry | None:
    if lack is None:
        return None
    entry = LackOfFitEntry(
        residual_rms=lack.residual_rms,
        scatter=lack.scatter,
        noise=lack.noise.sd,
        noise_of=lack.noise.source,
        below=None,
        left_out=[],
        outliers=group.outliers,
        without=None,
    )
    mended = lack.mended
    if mended is None:
        return entry
    return replace(
        entry,
        below=mended.below,
        left_out=group.names_of(mended.left_out),
        without=law_entry(mended.fit),
    )


def refit_entry(refit: Refit) -> RefitEntry:
    choice, fit, errors = refit.choice, refit.fit, refit.errors
    variant, value = choice.kind, ""
    if choice.drop is not None:
        value = str(choice.drop)
    elif choice.count is not None:
        variant, value = f"count {choice.axis} as", choice.count
    elif choice.left_out is not None:
        sizes = choice.left_out.N
        variant, value = "leave out N", _span(si(sizes.min()), si(sizes.max()))
    elif choice.kind == "delta":
        value = "MSE" if choice.delta is None else f"{choice.delta:g}"
    error_percent = largest_error_percent = None
    if errors is not None:
        error_percent = float((100 * errors).mean())
        largest_error_percent = float(max(100 * errors, key=abs))
    return RefitEntry(
        variant=variant,
        value=value,
        n=len(choice.points),
        parameters=fit.parameters,
        objective=fit.objective,
        starts=fit.starts,
        starts_at_best=fit.starts_at_best,
        identified=fit.identified,
        reason=refusal_words(fit.reason),
        error_percent=error_percent,
        largest_error_percent=largest_error_percent,
    )


def refit_row(entry: RefitEntry) -> dict[str, Any]:
    """A row of robustness, its parameters beside the other keys."""
    row = _beside(entry)
    if entry.error_percent is None:
        del row["error_percent"], row["largest_error_percent"]
    return row


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _input(record: Record, loss_key: str) -> InputRun:
    return InputRun(
        run_id=record.run_id,
        pair_id=record.pair_id,
        recipe=record.recipe,
        trunk=record.trunk,
        seed=record.seed,
        N=record.N,
        params_total=record.params_total,
        params_nonembed=record.params_nonembed,
        D=record.tokens,
        C=record.flops_per_token * record.tokens,
        loss=getattr(record, loss_key),
        summary_sha256=record.summary_sha256,
    )


def plain(value: Any) -> dict[str, Any]:
    """The dataclass as strict JSON has it: parameters beside the other keys, NaN and infinities as
    null."""
    text = json.dumps(value, default=_object)
    return json.loads(text, parse_constant=lambda _: None)


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, RefitEntry):
        return refit_row(value)
    return _beside(value)


def _beside(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, of which `parameters` gives its items; of a law they stand before
    the formula."""
    row: dict[str, Any] = {}
    for f in fields(value):
        if f.name == "parameters":
            row |= value.parameters
        else:
            row[f.name] = getattr(value, f.name)
    return row


# ---------------------------------------------------------------------------------------- reading


def read_law_file(path: Path) -> dict[str, Any]:
    """The content of a law.json, also of older code, which wrote format_version 2 or no version.
    Raises UserError naming the file where it is damaged or of a version that is not known."""
    content = read_json(path)
    version = content.get("schema_version", content.get("format_version", 2))
    if version not in (2, SCHEMA_VERSION):
        raise UserError(
            f"{path} has schema_version {version}, not {SCHEMA_VERSION}: make it anew with"
            " scaling/fit.py"
        )
    return content


def schema_page() -> str:
    """docs/schemas.md: the keys of law.json."""
    parts = [
        "# What scaling/fit.py leaves in law.json\n\nMade of the comments in"
        " `scaling/law_file.py`; a test compares the two. A table's law.json has the keys of"
        " its\ngroup at the top.\n"
    ]
    for cls, title in (
        (LawsOfRuns, "law.json of runs"),
        (TableHead, "law.json of a table"),
        (LawConventions, "`conventions`"),
        (SeedNoise, "`seed_noise`"),
        (InputRun, "`inputs`, each"),
        (TableSource, "`source`"),
        (TableFile, "`source.runs`"),
        (Columns, "`source.columns`"),
        (LinesLeftOut, "`source.lines_left_out`"),
        (GroupEntry, "`groups`, each"),
        (Headline, "`headline`"),
        (NamedOutlier, "`outliers`, each"),
        (SharedFaultEntry, "`shared_fault`"),
        (LackOfFitEntry, "`lack_of_fit`"),
        (FormDoubt, "`form_doubt`"),
        (LawEntry, "`laws`, each"),
        (BudgetEntry, "`budgets`, each"),
        (WindowExponent, "`windows`, each"),
        (RefitEntry, "`robustness`, each"),
    ):
        parts.append(schema_section(cls, title))
    return "\n".join(parts)
