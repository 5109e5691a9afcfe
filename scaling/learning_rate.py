"""Find the best peak learning rate of a sweep; say which rates other sizes get by the stated rule.

    python scaling/learning_rate.py out/h100_lr                   table, optimum, JSON and figure
    python scaling/learning_rate.py out/h100_lr at=6.49e6,12.8e6  rates for those sizes

The runs may differ in the peak rate, the seed and the size alone; sizes are non-embedding
parameters. The rule is rate ~ N^-1/2 at a fixed batch and number of tokens per parameter
(scaling/rate_sweep.py says where it comes from). Exit code 3: there is no optimum, as the lowest
loss is at an end of the sweep."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.command import command, run_command
from lib.errors import UserError
from lib.plots import write_with
from lib.text import si
from lib.values import FilePath
from scaling.declaration import read_declaration
from scaling.learning_rate_figure import draw
from scaling.pages import format_fixed, format_table
from scaling.rate_sweep import RateResult, Sweep, Trial, analyse
from scaling.reason_words import worded
from scaling.records import LAW_FOLDER, Record, read_json, read_runs, without_repeats

# Keys of summary.json that are equal in a sweep; of a run whose config.json is there, all that its
# identity holds but MAY_DIFFER.
SAME = (
    "val_sha256",
    "data_sha256",
    "tokenizer_sha256",
    "n_ctx",
    "tokens_per_step",
    "optimizer",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "clip",
    "schedule",
)
# Keys of a config's identity that runs of a sweep may differ in: rate, seed, size and length. The
# precision is judged by its label.
MAY_DIFFER = {
    "optim.lr",
    "optim.warmup_share",
    "seed",
    "steps",
    "start_from",
    "model.n_layer",
    "model.n_head",
    "model.n_kv_head",
    "model.n_embd",
    "model.n_ffn",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: FilePath  # the folder of the sweep's runs, such as out/h100_lr
    # non-embedding parameters to give rates for; none = 2, 4 and 8 times the smallest size's
    at: tuple[float, ...] = ()
    # folder that receives learning_rate.json, .png and .svg; none = law beside the runs
    out: FilePath | None = None

    def __post_init__(self) -> None:
        wrong = [N for N in self.at if not N > 0]
        if wrong:
            raise UserError(
                f"at={wrong[0]:g} is no number of parameters: give positive ones, such as"
                " at=6.49e6,12.8e6"
            )


@command(__doc__, Options, "runs")
def main(options: Options) -> int:
    folder = Path(options.runs)
    trials, notes = read_trials(folder)
    result = analyse(trials, options.at)
    wrote = write_with(
        Path(options.out or folder / LAW_FOLDER),
        "learning_rate",
        draw(result, folder.resolve().name),
        {"learning_rate.json": worded(result)},
    )
    print("\n".join([*notes, format_result(result), "", wrote]))
    return 0 if result.base else 3


# ----------------------------------------------------------------------------------------- the runs


def read_trials(folder: Path) -> tuple[list[Trial], list[str]]:
    """The sweep's runs, plus a line for each left out. A run of study.json without a summary.json
    is unfinished, or diverged where it left a diagnosis.json. Raises UserError where runs differ in
    more than the rate, the seed and the size."""
    records, notes = read_runs([folder])
    records, repeats = without_repeats(records)
    check_settings(records)
    trials = [_trial_of(record) for record in records]
    trials += _unfinished(folder, {trial.run for trial in trials})
    places = {(trial.N, trial.tokens, trial.lr, trial.seed) for trial in trials}
    if len(places) < len(trials):
        raise UserError(
            f"{folder}: two runs have the same size, tokens, lr_peak and seed: leave one out"
        )
    return trials, notes + repeats


def _trial_of(record: Record) -> Trial:
    return Trial(
        run=record.folder.name,
        N=record.params_nonembed,
        tokens=record.tokens,
        lr=record.summary["lr_peak"],
        seed=record.seed,
        status=record.status,
        loss=record.loss_bf16 if record.status == "ok" else None,
    )


def _unfinished(folder: Path, finished: set[str]) -> list[Trial]:
    """The declared runs of the sweep that have no summary."""
    declaration = read_declaration(folder)
    trials = []
    for row in declaration.runs if declaration else []:
        if not row["lr"] or row["repeat"] or row["run"] in finished:
            continue
        has_diverged = (folder / row["run"] / "diagnosis.json").exists()
        status = "diverged" if has_diverged else "unfinished"
        counts = row["params_nonembed"], row["tokens"]
        trials.append(Trial(row["run"], *counts, row["lr"], row["seed"], status))
    return trials


def check_settings(records: Sequence[Record]) -> None:
    """Raise UserError where two runs differ in a setting that a sweep shares."""
    _check_equal([(record, _summary_settings(record)) for record in records])
    identities = [(record, _identity(record)) for record in records]
    _check_equal([(record, identity) for record, identity in identities if identity is not None])


def _check_equal(settings: Sequence[tuple[Record, dict[str, Any]]]) -> None:
    """Hold each run's settings against the first one's; a key that is not there is None."""
    for record, values in settings[1:]:
        first_record, first = settings[0]
        for key in sorted(first.keys() | values.keys()):
            if first.get(key) != values.get(key):
                raise UserError(
                    f"{first_record.run_id} and {record.run_id} differ in {key} ({first.get(key)},"
                    f" {values.get(key)}): the runs of a sweep may differ in learning rate, seed"
                    " and size alone; leave one out"
                )


def _summary_settings(record: Record) -> dict[str, Any]:
    settings: dict[str, Any] = {key: record.summary.get(key) for key in SAME}
    return settings | {"recipe": record.recipe, "weights of the sources": record.weights}


def _identity(record: Record) -> dict[str, Any] | None:
    """The settings in the identity of a run's config; None of a run that was restored from a row,
    which has no config."""
    path = record.folder / "config.json"
    if not path.exists() or not read_json(path):
        return None
    from runtime.config import read_config  # not above: it imports torch

    identity = read_config(record.folder).identity()
    # the precision is judged by its label
    return {
        key: value
        for key, value in identity.items()
        if not (key in MAY_DIFFER or key.startswith("fp8."))
    }


# ----------------------------------------------------------------------------------------- the page


def format_result(result: RateResult) -> str:
    """Each sweep with its optimum, the rates by the rule, how larger sizes agree with it."""
    blocks = []
    for sweep in result.sweeps:
        blocks += _format_sweep(sweep)
    names = list(result.rules)
    if result.base:
        rows = [
            {"N": si(rate["N"]), **{name: f"{rate[name]:.3g}" for name in names}}
            for rate in result.rates
        ]
        blocks += ["Peak rates by the rule, at the same tokens per parameter", format_table(rows)]
    for check in result.checks:
        rules = ", ".join(f"the {name} says {check[name]:.3g}" for name in names)
        blocks.append(
            f"At N = {si(check['N'])} the sweep's own optimum is {check['lr']:.3g}, an exponent of"
            f" {check['exponent']:+.2f}; {rules}."
        )
    return "\n\n".join(blocks)


def _format_sweep(sweep: Sweep) -> list[str]:
    rows = [
        {
            "peak rate": f"{row.lr:g}",
            "loss": format_fixed(row.loss, 4),
            "above the lowest [%]": format_fixed(row.percent, 2),
            "status": row.status,
        }
        for row in sweep.rows
    ]
    title = f"N = {sweep.N:,} non-embedding, {si(sweep.tokens)} tokens, seeds {sweep.seeds}"
    return [title, format_table(rows), _format_optimum(sweep)]


def _format_optimum(sweep: Sweep) -> str:
    optimum = sweep.optimum
    if optimum is None:
        return f"No optimum: {sweep.reason}."
    (below, above), (low, high) = optimum.bracket, optimum.flat
    return (
        f"Optimum {optimum.lr:.3g}, loss {optimum.loss:.4f}, between {below:g} and {above:g}"
        f" (parabola through 3 rates). Within 0.1 % of it: {low:.2g} to {high:.2g}."
    )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
