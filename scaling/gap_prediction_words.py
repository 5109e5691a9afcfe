"""The law of the gap, its predictions and their scores in words."""

from lib.text import si
from scaling.paired.gap_law import EffectiveParameters, Exponent, GapForecast, GapLaw, misfit
from scaling.reason_words import sentence_of


def format_prediction(name: str, recipe: str, forecast: GapForecast) -> list[str]:
    """A frozen prediction: the gap, then what each form says."""
    lines = [
        (
            f"{name}: predicted gap of {recipe} {format_gap(forecast.gap)} % by the"
            f" {forecast.headline}, 95 % interval"
            f" {format_interval(forecast.low, forecast.high)} %; of a single pair"
            f" {format_interval(forecast.one_pair_low, forecast.one_pair_high)} %;"
            f" {_format_distance(forecast)}"
        )
    ]
    for form in forecast.forecasts:
        interval = f"{format_gap(form.gap)} % ({format_interval(form.gap_low, form.gap_high)})"
        reason = ""
        if form.refuted_because:
            reason = f", left out: {sentence_of(form.refuted_because)}"
        lines.append(f"    {form.form:20} {interval}{reason}")
    return lines


def format_gap(percent: float) -> str:
    """Three digits; below a thousandth of a per cent, where a gap means nothing, none."""
    is_tiny = abs(percent) < 0.001
    return f"{percent:+.3f}" if is_tiny else f"{percent:+.3g}"


def format_interval(low: float, high: float) -> str:
    """Of a gap, in per cent."""
    return f"{format_gap(low)} to {format_gap(high)}"


def _format_distance(forecast: GapForecast) -> str:
    """How far the point lies from the pairs."""
    beyond = []
    if forecast.beyond_sizes > 1:
        beyond.append(f"{_fold(forecast.beyond_sizes)} beyond the sizes")
    if forecast.beyond_ratios > 1:
        beyond.append(f"{_fold(forecast.beyond_ratios)} beyond the tokens per parameter")
    place = f"at {si(forecast.N)} parameters and {forecast.D / forecast.N:.3g} tokens for each"
    if not beyond:
        return f"{place}, within the pairs"
    return f"{place}, extrapolated {' and '.join(beyond)} of the pairs"


def _fold(factor: float) -> str:
    return f"{factor:,.0f}-fold" if factor >= 1000 else f"{factor:.3g}-fold"


def format_score(
    target: str,
    measured: float,
    independent_pairs: int,
    predicted: float,
    headline: str,
    is_inside: bool,
    interval: tuple[float, float],
    z: float,
) -> str:
    """The pairs that have come against their prediction; gaps in per cent."""
    pairs = "pair" if independent_pairs == 1 else "pairs"
    inside = "inside" if is_inside else "OUTSIDE"
    return (
        f"{target}: measured gap {format_gap(measured)} % of {independent_pairs} independent"
        f" {pairs}, predicted {format_gap(predicted)} % by the {headline}: {inside} the interval"
        f" {format_interval(*interval)} % of so many pairs, z = {z:+.2f}"
    )


def format_gap_law(recipe: str, law: GapLaw) -> str:
    """What one recipe's law says, in a line."""
    words = f"{recipe}: {_format_trend(law) if law.trend else _format_no_trend(law)}"
    effective = law.effective
    if effective is None or effective.f_low is None or effective.f_high is None:
        return f"{words}."
    return f"{words}. {_format_effective(effective, law.better_form)}"


def _format_effective(effective: EffectiveParameters, better_form: str | None) -> str:
    fits = "which of the two forms fits better cannot be told"
    if better_form is not None:
        fits = f"the {better_form} form fits better"
    return (
        f"As effective parameters f = {effective.f:.4f} ({effective.f_low:.4f} to"
        f" {effective.f_high:.4f}); {fits}."
    )


def _exponents(law: GapLaw) -> list[tuple[str, Exponent]]:
    """(what it is the exponent of, exponent)."""
    by_axis = {"N": law.a, "D/N": law.b}
    return [(axis, exponent) for axis, exponent in by_axis.items() if exponent is not None]


def _format_trend(law: GapLaw) -> str:
    words = f"gap = {law.k:.2g} % [{law.k_low:.2g} to {law.k_high:.2g}] x"
    if law.a is not None:
        interval = f"[{-law.a.high:+.2f} to {-law.a.low:+.2f}]"
        words += f" (N / {si(law.N0)})^{-law.a.value:.2f} {interval}"
    if law.b is not None:
        interval = f"[{law.b.low:+.2f} to {law.b.high:+.2f}]"
        words += f" (D/N / {law.ratio0:g})^{law.b.value:.2f} {interval}"
    untold = [axis for axis, exponent in _exponents(law) if not exponent.is_told]
    clauses = [f"; the exponent of {axis} is not told from 0" for axis in untold]
    return f"{words}, 95 % intervals in brackets{''.join(clauses)}"


def _format_no_trend(law: GapLaw) -> str:
    interval = ""
    if law.constant_low is not None:
        interval = f" ({law.constant_low:+.2g} to {law.constant_high:+.2g})"
    could_show = [
        f"{exponent.could_show:.2g} of {axis}"
        for axis, exponent in _exponents(law)
        if exponent.could_show is not None
    ]
    power = ""
    if could_show:
        power = f"; the design could have shown an exponent of {' or '.join(could_show)}"
    refuted = ", which the pairs refute" if misfit(law, "constant") else ""
    return (
        f"no trend of the gap can be told: {sentence_of(law.reason)}; as a constant"
        f" {law.constant:+.2g} %{interval}{refuted}{power}"
    )
