"""Put the loss figure's content into words: its title, its caption, names of groups, round counts."""

from scaling.curves import floor_of, is_cut, is_spread, is_surface, rest_of
from scaling.laws import NAMES

AXES = {"C": "compute C [FLOPs]", "D": "training tokens D", "N": "parameters N"}
KIND = {"total": "", "nonembed": "non-embedding ", None: ""}      # group.convention -> what stands before "parameters"
GREEK = {"alpha": "α", "beta": "β", "gamma": "γ"}
SUPERSCRIPT = str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹")
SURFACE = "L = E + A/N^α + B/D^β. "
GLUE = "\N{NO-BREAK SPACE}"
EVALUATED = {"loss_bf16": "evaluated in BF16", "loss_as_trained": "evaluated as trained"}


def title(groups, loss_key: str) -> str:
    """What is drawn, of which arms, and of how many."""
    counts = [len(group.loss) for group in groups]
    n = f"n = {counts[0]}{' each' if len(counts) > 1 else ''}" if len(set(counts)) == 1 else f"n = {', '.join(map(str, counts))}"
    if not groups[0].records:
        return f"Loss in {groups[0].recipe} ({n} points)"
    arms = " or ".join(name_of(group) for group in groups)
    return f"Loss after training in {arms}, {EVALUATED[loss_key]} ({n})"


def caption(groups, pairs, loss_key: str, ray: tuple[float, float] | None, others=()) -> str:
    """What the panels are, n and law of each group, the convention, then what each mark means; others: not drawn."""
    has_runs, surface, kind = bool(groups[0].records), any(map(is_surface, groups)), KIND[groups[0].convention]
    held = sorted({one.name for group in groups for one in group.held_out})
    parts, laws = [], [_law(group) for group in groups]
    if ray:
        low, high = (f"{ratio:.3g}" for ratio in ray)
        parts.append(f"One ray = one curve: at {low if low == high else f'{low} to {high}'} tokens per {kind}parameter in every "
                     f"{'run' if has_runs else 'point'}, the panels are one curve under three labels.")
    parts.append(SURFACE * surface + "With 95 % intervals, " * any("[" in law for law in laws) + "; ".join(laws) + ".")
    if any(law is not None and law.interval == "bootstrap" for law in map(_drawn, groups)):
        parts.append("In brackets: percentiles of a bootstrap; drawn bands: from its covariance.")
    parts += _reasons(groups)
    if others:
        parts.append("Not drawn, because their points are of fewer sizes or identify no such law: "
                     f"{', '.join(map(_count, others))}.")
    counted = f"params_{groups[0].convention}" + f" ({kind}parameters)" * bool(kind)
    parts.append(f"N = {counted}, D = tokens, C = flops_per_token × D.".replace(" = ", f"{GLUE}={GLUE}") if has_runs else
                 "N, D, C as the table counts them, C as 6 N D where it lacks one of the two.")
    if any(is_spread(group) and not is_surface(group) for group in groups):
        parts.append("Over tokens and parameters, lines join the points of one size, of one number of tokens per "
                     f"{kind}parameter (×).")
    if surface:
        flops = "by the runs' own FLOPs" if has_runs else f"C{GLUE}={GLUE}6{GLUE}N{GLUE}D"
        parts.append(f"Lines: lowest loss for a compute ({flops}), loss of one size, loss at one number of tokens per "
                     f"{kind}parameter (×).")
    if any(len(tokens) for group in groups for tokens, _ in group.curves):
        parts.append("Training loss is smoothed; thick: the lowest reached by each compute, from size (pale: small) to size.")
    if any(group.bands for group in groups):
        parts.append("Hatched: power law and rays with gamma fixed in 0.10 to 0.22.")
    if held:
        parts.append(f"Star: {' and '.join(held)}, in no fit (hollow: still to come)" + "; tick and bar: prediction frozen "
                     "before, 95 %" * any(one.prediction for group in groups for one in group.held_out)
                     + ("; arrow heads: the bar goes on beyond the axis." if is_cut(groups) else "."))
    if any(map(floor_of, groups)):
        parts.append("Reducible: what the law's term in that variable leaves of each loss; straight if the law holds.")
        if hidden := sum(int((~rest_of(group, axis)[1]).sum()) for group in groups if floor_of(group) for axis in group.x):
            parts.append(f"Left out of that row, too low for a log axis: {hidden}.")
    if pairs:
        parts.append("Gap: FP8 minus BF16 of paired runs; bars: one standard error of the evaluation, not of the run.")
    return " ".join(parts).replace(" × ", f"{GLUE}×{GLUE}").replace(" %", f"{GLUE}%")


def _reasons(groups) -> list[str]:
    """Why a group is headed by a power law, with the groups' names unless all have that reason."""
    names = {}
    for group in groups:
        if group.headline not in ("chinchilla", "ray"):
            names.setdefault(group.headline_reason, []).append(name_of(group))
    return [f"{reason[0].upper()}{reason[1:]}." if len(some) == len(groups) else f"{' and '.join(some)}: {reason}."
            for reason, some in names.items()]


def _drawn(group):
    """The law behind the line over compute, or over parameters where there is no compute; None where none is fitted."""
    return group.laws["chinchilla"] if is_surface(group) else group.lines.get("C" if "C" in group.x else "N")


def _law(group) -> str:
    """n of the group and the law that is drawn, with its intervals; spaces that must not be broken are GLUE."""
    count, law = f"{_count(group)}: ", _drawn(group)
    if law is None:
        return count + "no law can be fitted"
    p, ends = law.parameters, law.ci95 or {}
    shape = ""
    if not is_surface(group):
        factor, exponent = NAMES[law.form][-2:]
        shape = "L = " + (f"{number(p['E'])} + " if "E" in p else "") + (
            f"{number(p[factor])} {'C' if 'C' in group.x else 'N'}^{number(-p[exponent])}")
    named = [f"{GREEK.get(name, name)}{GLUE}" + (f"{number(p[name])}{GLUE}" if is_surface(group) else "")
             + f"[{number(ends[name][0])},{GLUE}{number(ends[name][1])}]" for name in NAMES[law.form] if name in ends]
    return count + ", ".join([shape.replace(" ", GLUE)] * bool(shape) + named)


def _count(group) -> str:
    n, own = len(group.loss), len(set(group.points.cluster.tolist()))
    return f"{name_of(group)} (n{GLUE}={GLUE}{n}" + (f" on {own} trajectories" if own < n and group.records else "") + ")"


def number(value: float) -> str:
    """Three digits without an e: 0.0291, 97.7, 2120, 3.28·10⁵."""
    mantissa, e, power = f"{value:.3g}".partition("e")
    if not e or -5 < int(power) < 5:
        return f"{float(f'{value:.3g}'):.6g}".replace("-", "−")
    return (mantissa + "·10" + str(int(power)).translate(SUPERSCRIPT)).replace("-", "−")


def name_of(group) -> str:
    """The recipe as the reader knows it, or the table's name."""
    if not group.records:
        return group.recipe if len(group.recipe) < 30 else f"{group.recipe[:14]}…{group.recipe[-14:]}"
    return "BF16" if group.recipe == "bf16" else f"FP8 {group.recipe}"


def human(count: float) -> str:
    """A count with three digits and a letter: 39.2k, 125M, 1.54B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"
