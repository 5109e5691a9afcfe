"""Say, from a study's own numbers, what runs of this number and size cannot show."""

from scaling.captions import human
from scaling.gap_tables import freedom
from scaling.results_tables import Results, told

OFTEN = 1.0         # epochs; a source that is read more often mixes repetition into the law
FAR = 1e9           # parameters of the models that people train FP8 for


def limits(results: Results) -> str:
    """A list, each line with the number that it rests on."""
    found = [*_reach(results), *_fp8(results), *_gaps(results), *_predicted(results), *_given_up(results), *_text(results),
             *_conditions(results)]
    return "\n".join(f"- {line}" for line in found)


def _reach(results: Results) -> list[str]:
    records = results.records
    small, large = records[0], max(records, key=lambda r: r.N)
    flops = [r.flops_per_token * r.tokens for r in records]
    ratios = [r.tokens / r.N for r in records]
    counted = "non-embedding" if large.convention == "nonembed" else "all"
    lines = [f"**Larger models.** The runs span a factor of {large.N / small.N:.3g} in parameters ({human(small.N)} to "
             f"{human(large.N)}, {counted}), {max(flops) / min(flops):.3g} in compute, {min(ratios):.3g} to {max(ratios):.3g} "
             f"tokens per parameter. " + (f"A model of {human(FAR)} lies a factor of {FAR / large.N:.3g} beyond the largest: no "
                                          f"law of these runs is evidence there." if large.N < FAR else "")]
    shares = [1 - r.params_nonembed / r.params_total for r in (small, large)]
    lines.append(f"**One count of parameters.** The vocabulary holds {shares[0]:.0%} of all parameters at the smallest size and "
                 f"{shares[1]:.0%} at the largest, so exponents depend on whether it is counted: the table of laws has both.")
    rates = {}
    for record in records:
        if (lr := told(results.summaries[record.run_id], "lr_peak")) is not None:
            rates.setdefault(record.N, set()).add(lr)
    if rates and all(len(some) == 1 for some in rates.values()):
        lines.append("**Best learning rates.** Each size was trained at one peak learning rate: a size whose rate suits it less "
                     "bends the law, and nothing here would show it.")
    return lines


def _fp8(results: Results) -> list[str]:
    """How much of the arithmetic FP8 could touch at all."""
    shares = {}
    for record in results.records:
        converted = told(results.summaries[record.run_id], "params_fp8")
        if record.recipe != "bf16" and converted:
            shares.setdefault(record.N, []).append(6 * converted / record.flops_per_token)
    if not shares:
        return []
    ends = [max(shares[N]) for N in (min(shares), max(shares))]
    widths = [told(results.summaries[r.run_id], "n_embd") for r in results.records]
    width = max((w for w in widths if w is not None), default=None)
    return [f"**Speed at sizes where FP8 pays.** The Linears in FP8 do {ends[0]:.0%} of the smallest size's FLOPs and "
            f"{ends[1]:.0%} of the largest's; the rest, above all the head, stays in BF16. Twice as fast at all of them, free of "
            f"casts, would make a step {1 / (1 - ends[1] / 2):.3g} times as fast at best."
            + (f" The widest model has {width:g} channels." if width else "")]


def _gaps(results: Results) -> list[str]:
    lines = []
    for recipe, one in results.precision.get("common", {}).items():
        found, seen = one[results.precision["loss"]], one["smallest_seen"]
        if one["converted"] == [0, 0]:
            lines.append(f"**Anything of {recipe}.** It converted no Linear at these sizes: its runs are BF16 once more.")
            continue
        lines.append(f"**A small gap of {recipe}.** {found.n} independent pair{'s' * (found.n != 1)} over {one['sizes']} "
                     f"size{'s' * (one['sizes'] != 1)} "
                     + (f"would have seen a common gap of {seen:.2g} % four times in five, not a smaller one." if seen is not None
                        else "carry no spread: no interval, and no gap is excluded.")
                     + (f" Whether it grows with size is not known: {one['trend'].reason}." if one["trend"].reason else ""))
    pooled = results.precision.get("null", {}).get("pooled")
    if pooled:
        lines.append(f"**Differences below the noise of seeds.** Two BF16 runs of other seeds differ with an SD of "
                     f"{pooled['sd_percent']:.3f} %, itself known from {freedom(pooled['dof'])} only.")
    elif results.precision:
        lines.append("**The noise of seeds.** No size has two BF16 seeds: there is no null of other seeds.")
    return lines


def _predicted(results: Results) -> list[str]:
    if not results.predictions:
        return []
    factors = [told(one.content, "extrapolation") for one in results.predictions]
    known = [factor for factor in factors if factor is not None]
    ends = f"{min(known):.3g} to {max(known):.3g}" if len(set(known)) > 1 else f"{known[0]:.3g}" if known else "unknown"
    sizes = {one.N for one in results.predictions}
    scored = sum(len(results.scores.get(one.target, {"runs": []})["runs"]) for one in results.predictions)
    runs = len(factors)
    return [f"**How far predictions hold.** {runs} run{'s' * (runs != 1)} of {len(sizes)} size{'s' * (len(sizes) != 1)}, "
            f"predicted at {ends} times the largest compute that was fitted; "
            + (f"{scored} scored: so few, branches of one trunk among them, say little about how often such intervals hold."
               if scored > 1 else "one scored: it says little about how often such intervals hold." if scored
               else "nothing has been scored yet.")]


def _given_up(results: Results) -> list[str]:
    lost = list(results.given_up)
    return [f"**What became of the runs that were given up.** {len(lost)} of {len(results.study.get('runs', [])) or 'the'} runs "
            f"declared are in no law and no gap: what is here speaks of runs that ended."] if lost else []


def _text(results: Results) -> list[str]:
    run = results.largest
    sources = results.summaries[run.run_id]["sources"]
    epochs = {name: told(sources[name], "epochs") for name in run.weights}
    often = {name: value for name, value in epochs.items() if value is not None and value > OFTEN}
    tokens = [told(sources[name], "tokens") for name in run.weights]
    times = ", ".join(f"{name} {value:.2g} times" for name, value in often.items())
    return [*([f"**Fresh text.** `{run.run_id}` reads {times}: what tokens are worth is mixed with what repeated tokens are "
               "worth, more so in longer runs."] if often else []),
            "**Other text, or what a model can do.** All losses are over "
            + ("validation text" if None in tokens else f"{human(sum(tokens))} validation tokens") +
            f" split off the training sources, in this tokenizer ({run.vocab_size:,} ids). No benchmark was run.",
            "**Text that is new.** Validation documents may have near twins in training, which are not counted on this page: "
            "`python prepare_data.py --twins`, where the data are."]


def _conditions(results: Results) -> list[str]:
    context = {told(one, "n_ctx") for one in results.summaries.values()} - {None}
    where = sorted({f"{r.n_gpu} x {r.device}" for r in results.records})
    return [f"**Other conditions.** Everything ran on {', '.join(where)}"
            + (f" with contexts of {', '.join(f'{n:g}' for n in sorted(context))} tokens" if context else "")
            + (": nothing here was sharded over GPUs." if all(r.n_gpu == 1 for r in results.records) else ".")]
