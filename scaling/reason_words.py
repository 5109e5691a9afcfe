"""Sentences for the reasons that the statistics give in place of a number."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from lib.text import counted, listed, si
from scaling.law_words import refusal_words
from scaling.laws.refusals import Refusal
from scaling.paired.reasons import Reason

AXIS_WORDS = {"N": "sizes", "D/N": "ratios of tokens to parameters"}


def sentence_of(reason: Reason | Refusal | str | None) -> str | None:
    """The reason in words; one that is a sentence already, as those of a file are, stays."""
    if isinstance(reason, Refusal):
        return refusal_words(reason)
    if not isinstance(reason, Reason):
        return reason
    return SENTENCES[reason.code](**reason.values)


def worded(value: Any) -> Any:
    """A result as JSON has it: dataclasses as objects, reasons as their sentences."""
    if isinstance(value, Reason | Refusal):
        return sentence_of(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: worded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: worded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [worded(item) for item in value]
    return value


def _no_pair_at(cells: Sequence[tuple]) -> str:
    places = [f"{si(N)} seed {seed}" for N, _, seed in cells]
    return f"no finished pair at {listed(places) or 'what most recipes share'}"


# Code of a Reason -> its sentence, without a full stop.
SENTENCES: dict[str, Callable[..., str]] = {
    "converts_no_linear": lambda runs: f"converts no Linear in {listed(runs, 1)}: it is BF16 there",
    "no_pair_at": _no_pair_at,
    "gap_beyond_data": lambda nats, law, most: (
        f"no number of tokens makes up {nats:.4f} nats under {law}, by which more data gains at"
        f" most {most:.4f}, or next to nothing"
    ),
    "no_speed_in_table": lambda: "the table gives no speed",
    "cpu_has_no_fp8": lambda: "a CPU has no FP8 units: its throughput means nothing",
    "other_devices": lambda: (
        "the arms ran on different devices, numbers of GPUs or compile settings"
    ),
    "no_freedom_for_noise": lambda: "no degree of freedom is left for the noise of seeds",
    "equal_gaps": lambda: "equal gaps are copies, not a sample without noise",
    "no_law": lambda: "no law was fitted",
    "every_form_refuted": lambda why: f"every form is refuted: {sentence_of(why)}",
    "meaningless_interval": lambda low, high: (
        f"its 95 % interval there, {low:.3g} to {high:.3g} %, says nothing: train more seeds, or"
        " sizes nearer to it"
    ),
    "trend_refutes": lambda exponents: f"the trend in {' and '.join(exponents)} refutes it",
    "power_law_fits_better": lambda: "the power law fits better by a likelihood of 100 to 1",
    "too_few_levels": lambda sizes, ratios, needed: (
        f"{counted(sizes, 'size')} and {counted(ratios, 'ratio')} of tokens to parameters; an"
        f" exponent needs {needed}"
    ),
    "too_few_pairs": lambda independent, needed: (
        f"{counted(independent, 'independent pair')}; a law needs {needed}, such as two seeds at"
        " three sizes"
    ),
    "no_power_law_fits": lambda why: f"no power law fits: {sentence_of(why)}",
    "gap_not_told": lambda: "the gap itself is not told from zero",
    "exponent_at_limit": lambda axis, limit: (
        f"the exponent of {axis} runs to {limit:g}, the largest that is sought"
    ),
    "no_exponent_told": lambda: "neither exponent is told from zero",
    "exponent_not_told": lambda axis: f"the exponent of {axis} is not told from zero",
    "misses_means": lambda p: f"it misses the cells' means (p={p:.2g})",
    "axis_not_varied": lambda axis, needed: (
        f"the pairs have fewer than {needed} {AXIS_WORDS[axis]}, and none such as this"
    ),
}
