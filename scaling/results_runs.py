"""Lay out what a study's runs say one by one: speed, bits per byte, what FP8 did inside, samples, steps that went wrong."""

import re
from pathlib import Path
from statistics import mean, median

import numpy as np

from scaling.captions import human
from scaling.probes import OPERANDS, read_probe
from scaling.records import Record, read_text
from scaling.report_tables import NOT_TOLD
from scaling.results_tables import NULL, Results, missing, shown, table, told

SAMPLE, SAMPLES = 1500, 4           # characters of one sample at most; samples at most


def speed(results: Results) -> str:
    """Throughput, compilation, memory per size and recipe, of the longest runs; BF16 of the same machine is 1."""
    grouped, rows = {}, []
    for key, some in results.groups(record for record in _longest(results) if record.parent_run is None).items():
        for record in some:
            grouped.setdefault((*key, record.device, record.n_gpu, record.is_compiled), []).append(record)
    rates, again = {key: median(record.tok_per_s_median for record in some) for key, some in grouped.items()}, []
    devices = dict.fromkeys(record.device for record in results.records)
    for (size, recipe, *machine), some in grouped.items():
        # A null run may be a BF16 run that was not compiled: its ratio then tells what that costs.
        own = rates.get((size, "bf16", *machine))
        base = own or recipe == NULL and rates.get((size, "bf16", *machine[:2], True))
        middle = [_middle([told(results.summaries[r.run_id], key) for r in some]) for key in (
            "mfu_bf16", "compile_s", "wall_s", "mem_peak_gib")]
        rate, every = rates[size, recipe, *machine], [record.tok_per_s_median for record in some]
        # A null run is another computation, whose speed may be its own.
        if own and recipe not in ("bf16", NULL) and not any(told(results.summaries[r.run_id], "params_fp8") for r in some):
            again.append(rate / own)
        rows.append([size, recipe, *([machine[0]] if len(devices) > 1 else []), "yes" if machine[2] else "no", str(len(some)),
                     f"{rate:,.0f}", f"{min(every):,.0f} to {max(every):,.0f}" if len(some) > 1 else "",
                     "no GPU" if machine[0].startswith("cpu") else f"{rate / base:.3f}" if base else "no BF16 run", *(
                         shown(value, form) for value, form in zip(middle, (".1%", ".1f", ".0f", ".1f"), strict=True))])
    text = table(["size", "recipe", *(["device"] if len(devices) > 1 else []), "compiled", "runs", "tokens/s",
                  "lowest to highest", "against BF16", "MFU (BF16 peak)", "compile [s]", "whole run [s]", "memory, peak [GiB]"],
                 rows)
    words = ["Medians over the longest runs of each size; tokens/s is a run's median step. MFU counts attention, against the "
             "BF16 peak whatever the recipe."]
    if again:
        words.append(f"A recipe that converted no Linear is BF16 again, and ran {min(again):.3f} to {max(again):.3f} times as "
                     "fast: others' ratios are known no better.")
    if any(device.startswith("cpu") for device in devices):
        words.append("A CPU has no FP8 units: its speeds say nothing about a GPU.")
    return f"{text}\n\n{' '.join(words)}"


def _longest(results: Results) -> list[Record]:
    """The runs of each size's largest budget."""
    most = {}
    for record in results.records:
        most[record.N] = max(most.get(record.N, 0), record.tokens)
    return [record for record in results.records if record.tokens == most[record.N]]


def _middle(values) -> float | None:
    values = [value for value in values if value is not None]
    return median(values) if values else None


def bits(results: Results) -> str:
    """Validation bits per byte of each source, of the largest budget of each size, both arms through BF16 matmuls."""
    sources, rows, longest = list(results.largest.weights), [], _longest(results)
    for (size, recipe), some in results.groups(longest).items():
        cells, seeds = [], sorted(record.seed for record in some)
        same = {r.seed: r.loss_bf16 for r in longest if r.recipe == "bf16" and not r.repeat and r.N == some[0].N}
        beside = f"{mean(same[seed] for seed in seeds):.4f}" if set(seeds) <= set(same) else "no BF16 run"
        for name in sources:
            values = [told(results.summaries[r.run_id], "sources", name, "bpb_bf16") for r in some]
            cells.append(NOT_TOLD if None in values else f"{mean(values):.4f}")
        rows.append([size, recipe, human(some[0].tokens), ", ".join(map(str, seeds)),
                     f"{mean(r.loss_bf16 for r in some):.4f}", beside, f"{mean(r.loss_as_trained for r in some):.4f}", *cells])
    return table(["size", "recipe", "tokens", "seeds", "loss in BF16 [nats/token]", "BF16 runs of these seeds", "as trained",
                  *(f"{name} [bits/byte]" for name in sources)], rows) + (
        "\n\nMeans over the seeds named; rows of other seeds differ by the seed's noise too. Bits per byte: weights evaluated "
        "through BF16 matmuls.")


def dynamics(results: Results) -> str:
    """What the probes saw: per recipe the largest run that was probed, its operands at the last probe and at their worst."""
    rows, blocks, notes, figures, unprobed = [], [], [], [], []
    for recipe in sorted({r.recipe for r in results.records}, key=lambda name: (name != "bf16", name)):
        probed = [r for r in results.records if r.recipe == recipe and not r.repeat and any(
            (r.folder / name).is_file() for name in ("probe.jsonl", "probe.jsonl.gz"))]
        if not probed:
            unprobed.append(recipe)
            continue
        record = max(probed, key=lambda r: (r.N, r.tokens, -r.seed))
        probe, more = read_probe(record.folder / "probe.jsonl")
        notes += more
        for operand, name in OPERANDS.items() if probe.layers else ():
            field = {key: probe.linear[operand, key] for key in ("scale", "underflow", "saturated", "error")}
            last = {key: values[:, probe.last] for key, values in field.items()}
            rows.append([recipe, results.size(record), name, f"{len(probe.layers)}, {len(probe.steps)} times",
                         _range(last["scale"]), _share(np.median, last["underflow"]), _share(np.max, field["underflow"]),
                         _share(np.max, field["saturated"]), _share(np.median, last["error"])])
        drawn = [path.relative_to(results.folder).as_posix() for path in sorted(record.folder.glob("figures/fp8_*.png"))]
        links = [f"[{Path(path).stem}]({path})" for path in drawn]
        if links and recipe == ((results.precision.get("ranking") or {}).get("best") or recipe):
            figures += [f"Figures of {recipe}:", *(f"!{link}" for link in links)]
        elif links:
            figures += [f"Figures of {recipe}: {', '.join(links)}."]
        if probe.blocks:
            blocks.append([recipe, results.size(record), str(probe.block_steps[-1]), *(
                f"{values[np.isfinite(values)].max():.3g}" if np.isfinite(values := probe.block[key][:, -1]).any() else NOT_TOLD
                for key in ("attention_logit_max", "swiglu_amax"))])
    parts = [table(["recipe", "size", "operand", "Linears, probed", "scales at the end", "underflow at the end, median [%]",
                    "underflow, worst [%]", "saturated, worst [%]", "error at the end, median [%]"], rows),
             table(["recipe", "size", "step", "largest attention logit", "largest SwiGLU output"], blocks),
             "Underflow: share of values not zero that FP8 rounds to zero; saturated: share beyond the format's largest; "
             "worst: of any Linear at any probe; error: of the rounded tensor, relative." if rows else "",
             f"No probes of {', '.join(unprobed)} (train with probe.every=STEPS)." if unprobed else "", " ".join(notes), *figures]
    return "\n\n".join(part for part in parts if part)


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _range(values: np.ndarray) -> str:
    values = _finite(values)
    return f"{values.min():.3g} to {values.max():.3g}" if len(values) else NOT_TOLD


def _share(function, values: np.ndarray) -> str:
    values = _finite(values)
    return f"{100 * function(values):.3g}" if len(values) else NOT_TOLD


def samples(results: Results) -> str:
    """Beginnings of what the largest run of each recipe wrote, fenced."""
    found = {}
    for record in sorted(results.records, key=lambda r: (r.N, r.tokens, -r.seed), reverse=True):
        if not record.repeat and (text := read_text(record.folder / "samples.txt").strip()):
            found.setdefault(record.recipe, (record.run_id, text))
    if not found:
        return missing("samples.txt of a run, which wants its checkpoint", "python -m eval.sample out/STUDY/RUN")
    parts = []
    for run_id, text in list(found.values())[:SAMPLES]:
        text = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
        cut = f" (the first {SAMPLE} of {len(text):,} characters)" if len(text) > SAMPLE else ""
        parts.append(f"`{run_id}`{cut}:\n\n{fenced(text[:SAMPLE])}")
    return "\n\n".join(parts)


def fenced(text: str) -> str:
    """Verbatim in Markdown: the fence is longer than any run of backticks in the text."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}text\n{text}\n{ticks}"


def notable(results: Results) -> str:
    """Every run that was given up or failed, with what is kept of it, then each that diverged, left out or took back a step."""
    lost, folder = [], results.folder
    there = {record.run_id for record in results.records}
    for row in results.study.get("runs", []):
        own = [path for path in (folder / "failed" / (row["run"] + end) for end in (".log", ".diagnosis.json")) if path.is_file()]
        if row["run"] in results.given_up or own and row["run"] not in there:
            since = results.given_up.get(row["run"])
            links = ", ".join(f"[{path.name}]({path.relative_to(folder).as_posix()})" for path in own)
            lost.append([row["run"], f"given up, slice {since}" if since else "failed", links or "nothing is kept of it"])
    rows = []
    for record in results.records:
        summary = results.summaries[record.run_id]
        skipped, rollbacks = (told(summary, key) for key in ("skipped_steps", "rollbacks"))
        if record.status != "ok" or skipped or rollbacks or not record.is_annealed:
            rows.append([record.run_id, record.status, *("not told" if n is None else f"{n:g}" for n in (skipped, rollbacks)),
                         "yes" if record.is_annealed else "no", f"{record.loss_bf16:.4f}"])
    parts = [table(["run without an end", "", "what is kept of it"], lost)] if lost else []
    if not rows:
        return "\n\n".join([*parts, f"None: of {len(results.records)} {'finished ' * bool(lost)}runs none diverged, left out a "
                            "step or was rolled back."])
    parts.append(table(["run", "status", "steps left out", "rollbacks", "learning rate annealed", "loss in BF16 [nats/token]"],
                       rows))
    return "\n\n".join([*parts, "A branch counts what its trunk did before it left: rows of one trunk may tell of one event."])
