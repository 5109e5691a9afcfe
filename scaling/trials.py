"""Read the runs of a learning-rate sweep: equal in everything but the peak learning rate, the seed, the size.

Runs of one size and number of tokens are one sweep. What else differs is refused, for it would move the optimum.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from runtime.cli import UserError
from scaling.records import LARGEST, SCHEMA_VERSION, read_json

# Of summary.json: equal in every run, and equal in the runs of one size. Warm-up is counted in steps, so it is of the size.
SAME = ("val_sha256", "data_sha256", "tokenizer_sha256", "tokens_per_step", "optimizer", "beta1", "beta2", "eps", "weight_decay",
        "clip", "schedule")
SAME_SIZE = ("params_total", "n_layer", "n_embd", "n_head", "n_ffn", "n_ctx", "steps", "warmup_steps")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""
    run: str
    N: int                      # params_nonembed
    tokens: int
    lr: float                   # peak learning rate
    seed: int
    status: str                 # "ok", "diverged" or "unfinished"
    loss: float | None          # nats per validation token, evaluated in BF16; none unless status is "ok"
    skipped_steps: int = 0
    rollbacks: int = 0


def read_trials(folder: Path) -> tuple[list[Trial], list[str]]:
    """The sweep's runs under `folder`, by size, tokens, rate and seed; plus a line for each folder left out.

    A run without a summary.json counts as diverged if it stopped itself (diagnosis.json), else as unfinished; its rate is that
    of study.json. Raises UserError: no such folder, no finished run, a damaged file, runs that differ in more than the rate."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give the one that holds the sweep's runs, such as out/h100_lr")
    trials, notes, first, declared = [], [], {}, _declared(folder)
    for run in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if (run / "summary.json").is_file():
            summary = read_json(run / "summary.json")
            if summary.get("repeat"):
                notes.append(f"left out {run.name}: it repeats another run of the same seed")
                continue
            trial = _trial(run, summary)
            _check(run, summary, first, SAME, ())
            _check(run, summary, first, SAME_SIZE, (trial.N, trial.tokens))
            trials.append(trial)
        elif row := declared.pop(run.name, None):
            trials.append(Trial(run.name, *row, "diverged" if (run / "diagnosis.json").exists() else "unfinished", None))
        elif (run / "config.json").exists():
            notes.append(f"left out {run.name}: it has not finished (no summary.json), nor is it in study.json")
    if not any(trial.status != "unfinished" for trial in trials):
        raise UserError("\n".join([f"no finished run in {folder}: train the sweep first, "
                                     "python scaling/sweep.py STUDY --run", *notes]))
    trials += [Trial(name, *row, "unfinished", None) for name, row in declared.items() if not (folder / name).exists()]
    trials.sort(key=lambda trial: (trial.N, trial.tokens, trial.lr, trial.seed))
    for one, other in pairwise(trials):
        if (one.N, one.tokens, one.lr, one.seed) == (other.N, other.tokens, other.lr, other.seed):
            raise UserError(f"{folder}: {one.run} and {other.run} have the same size, tokens, lr_peak and seed: leave one out")
    return trials, notes


def _declared(folder: Path) -> dict[str, tuple[int, int, float, int]]:
    """(N, tokens, lr, seed) of the runs that study.json declares with a rate; {} without one."""
    path = folder / "study.json"
    rows = read_json(path).get("runs", []) if path.is_file() else []
    try:
        return {row["run"]: (row["params_nonembed"], row["tokens"], row["lr"], row["seed"]) for row in rows
                if row.get("lr") and not row.get("repeat")}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); write it anew: scaling/sweep.py") from None


def _trial(run: Path, summary: dict) -> Trial:
    path = run / "summary.json"
    if summary.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version is {summary.get('schema_version')!r}; expected {SCHEMA_VERSION}")

    def value(key: str, good, expected: str):
        found = summary.get(key)
        if isinstance(found, bool) or not isinstance(found, int | float | str) or not good(found):
            raise UserError(f"{path}: {key} is {found!r}; expected {expected}")
        return found

    def count(key: str, least: int) -> int:
        return value(key, lambda found: isinstance(found, int) and least <= found < 2**63, f"a whole number, at least {least}")

    def number(key: str) -> float:
        return value(key, lambda found: not isinstance(found, str) and 0 < found < LARGEST, "a finite number above zero")

    status = value("status", lambda found: isinstance(found, str) and found, "a text that is not empty")
    return Trial(run.name, count("params_nonembed", 1), count("tokens", 1), number("lr_peak"), count("seed", 0), status,
                 number("loss_bf16") if status == "ok" else None, count("skipped_steps", 0), count("rollbacks", 0))


def _check(run: Path, summary: dict, first: dict, keys: tuple[str, ...], group: tuple) -> None:
    """Raise UserError where a run differs from the first one of its `group` in one of `keys`."""
    mine = {key: summary.get(key) for key in keys}
    mine |= {"precision": _told(summary, "recipe", "compile"), "sources": _weights(summary)} if not group else {}
    name, its = first.setdefault(group, (run.name, mine))
    for key in mine:
        if mine[key] != its[key]:
            raise UserError(f"{name} and {run.name} differ in {key} ({its[key]} against {mine[key]}): the runs of a sweep may "
                              "differ in the learning rate, the seed and the size alone; leave one out")


def _told(summary: dict, *keys: str) -> dict:
    holder = summary.get("precision")
    return {key: holder.get(key) for key in keys} if isinstance(holder, dict) else {}


def _weights(summary: dict) -> dict:
    sources = summary.get("sources")
    sources = sources if isinstance(sources, dict) else {}
    return {name: one.get("weight") for name, one in sources.items() if isinstance(one, dict)}
