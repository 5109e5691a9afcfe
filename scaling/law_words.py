"""Why points do not determine a law, in words."""

from scaling.laws import refusals as r

# Each refusal's clause, with its fields by name; X_percent is 100 X.
WORDS: dict[type[r.Refusal], str] = {
    r.FewPoints: "{points} distinct point(s); this law needs at least {needed}",
    r.UnknownAxis: "the table gives neither tokens (--d) nor compute (--c)",
    r.SeveralRatios: (
        "the points lie at {lowest:.3g} to {highest:.3g} tokens per parameter; the ray law needs"
        " one ratio"
    ),
    r.NarrowRatios: (
        "the points lie at {lowest:.3g} to {highest:.3g} tokens per parameter: alpha and beta need"
        " ratios at least {needed}x apart"
    ),
    r.FewLevels: (
        "the points hold {levels} distinct {axis}: its term needs {needed} to be told from E"
    ),
    r.FewForSurface: "{points} distinct points are too few for five parameters: {needed} at least",
    r.NoFreedom: "{points} points for {parameters} parameters leave 0 degrees of freedom",
    r.NoFloor: "E runs to zero: the points fall at least as fast as a pure power law",
    r.NotFalling: "{exponent} is not above zero: the loss does not fall",
    r.NotConverged: "the best of {starts} starts did not converge",
    r.Inseparable: "the points do not separate the parameters (singular Jacobian)",
    r.FlatExponent: (
        "the 95 % interval of {exponent} contains 0, so the points do not determine it"
    ),
    r.SingleTrajectories: (
        "the law rests on single trajectories: without one of the {trajectories} the points do not"
        " determine it"
    ),
    # compute budgets
    r.FewMinima: (
        "{minima} of {budgets} compute budgets have an interior minimum over at least {sizes}"
        " sizes; the exponents need {needed}"
    ),
    r.SharedMinima: (
        "the minima rest on single trajectories: without one of them fewer than {needed} budgets"
        " have one"
    ),
    r.FewSizes: "{sizes} sizes; a minimum needs {needed}",
    r.NoInteriorMinimum: (
        "the smallest or the largest size has the lowest loss: no interior minimum"
    ),
    r.NoValley: "the valley through the losses has no minimum between its sizes",
    # runs to come
    r.FewComputes: "{computes} different computes; it needs {needed}",
    r.FewForFreeRay: "{points} points; it needs {needed}",
    r.NegativeFloor: "it would need E below 0",
    r.DoesNotFit: "it does not fit the points: residuals of {scatter_percent:.2g} %",
    r.NoInterval: "no degree of freedom",
    r.MissesPoints: "it misses the points by {residual_rms_percent:.2g} %",
    r.Refuted: (
        "the points refute it: it misses them by {residual_rms_percent:.2f} %, Chinchilla's law by"
        " {chinchilla_sigma_percent:.2f} %"
    ),
    r.NoLawReaches: (
        "no law reaches N={N:.4g}, D={D:.4g}: {at_this_ratio} of {points} points lie at its ratio"
        " (3 of different compute are needed); L(N, D) is out: {chinchilla}"
    ),
}


def refusal_words(refusal: r.Refusal | None) -> str | None:
    """A clause such as "alpha is not above zero: the loss does not fall"; None for None."""
    if refusal is None:
        return None
    values = dict(vars(refusal))
    for name, value in vars(refusal).items():
        if isinstance(value, r.Refusal):
            values[name] = refusal_words(value)
        if isinstance(value, float):
            values[f"{name}_percent"] = 100 * value
    return WORDS[type(refusal)].format(**values)
