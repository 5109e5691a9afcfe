"""Select the rows of bench/throughput.py that count.

Rows are the JSON objects of one file in its order: the later is the newer. A cell counts if it is valid. Two cells are only
ever compared within one run (one call, one card, one temperature), so a ratio is the one that its own run measured in turns.
"""

import math

BASELINE, EAGER = "bf16", "bf16_eager"
# Whom we compare: name, the peer's size and labels, our size, which of our labels, the ratio to reach on one H100 SXM.
PEERS = (
    ("nanoGPT 124M", "nanogpt_124m", ("nanogpt",), "125m", "bf16", 1.25),
    ("nanochat d12, its faster precision", "nanochat_d12", ("nanochat_bf16", "nanochat_fp8"), "125m", "any", 1.05),
    ("nanoGPT XL", "nanogpt_xl", ("nanogpt",), "1p5b", "bf16", 1.10),
    ("nanochat d26 in its FP8", "nanochat_d26", ("nanochat_fp8",), "1p5b", "fp8", 1.15),
    # our model at their width, depth and vocabulary
    ("nanochat d12 in BF16", "nanochat_d12", ("nanochat_bf16",), "ours_d12", "bf16", None),
    ("nanochat d12 in its FP8", "nanochat_d12", ("nanochat_fp8",), "ours_d12", "fp8", None),
    ("nanochat d26 in BF16", "nanochat_d26", ("nanochat_bf16",), "ours_d26", "bf16", None),
    ("nanochat d26 in its FP8", "nanochat_d26", ("nanochat_fp8",), "ours_d26", "fp8", None),
)
PEER_LABELS = {label for _, _, labels, _, _, _ in PEERS for label in labels}


def of_kind(rows: list, kind: str) -> list[dict]:
    """The rows of one kind, each with the `gpu` of its run (None where the run's own row does not tell one)."""
    rows = [row for row in rows if isinstance(row, dict)]
    gpus = {str(row.get("run")): row.get("gpu") for row in rows if row.get("kind") == "run" and isinstance(row.get("gpu"), str)}
    return [row | {"gpu": gpus.get(str(row.get("run")))} for row in rows if row.get("kind") == kind]


def key_of(row: dict, names=("gpu", "size", "label", "T", "micro_batch")) -> tuple:
    """The values of these names, each hashable."""
    return tuple(value if isinstance(value := row.get(name), str | int | None) else str(value) for name in names)


def problem(cell: dict) -> str | None:
    """Why a cell must not count, None where it may."""
    types = {"run": str, "size": str, "label": str, "T": int, "micro_batch": int}
    if wrong := [name for name, kind in types.items() if not isinstance(cell.get(name), kind)]:
        return f"the row has no {', '.join(wrong)}"
    if cell.get("valid") is not True:
        return str(cell.get("invalid_because") or "no reason given")
    wrong = [name for name in ("tok_per_s", "step_s", "flops_per_token") if not is_positive(cell.get(name))]
    return f"{wrong[0]} is {cell.get(wrong[0])}" if wrong else None


def valid(rows: list) -> list[dict]:
    """All cells that count, in their order, with what _with_starts adds. The ratio of one whose baseline in the same run does
    not count is None."""
    cells = of_kind(rows, "cell")
    sound = {(cell.get("run"), *key_of(cell)): True for cell in cells if problem(cell) is None}
    unsound = {(str(cell.get("run")), *key_of(cell)) for cell in cells if problem(cell) is not None} - set(sound)
    kept = []
    for cell in cells:
        if problem(cell) is None:
            base = (cell["run"], *key_of(cell | {"size": cell.get("baseline_size", cell["size"]), "label": cell.get("baseline")}))
            ratio = cell.get("ratio")
            is_ratio = isinstance(ratio, dict) and all(is_positive(ratio.get(name)) for name in ("p10", "median", "p90"))
            kept.append(cell | {"ratio": ratio if is_ratio and base not in unsound else None})
    return _with_starts(kept)


def _with_starts(cells: list[dict]) -> list[dict]:
    """Each with `cold_s` and `warm_s`, None where nobody measured them: seconds to compile of the newest cell like it that found
    nothing in the compiler's caches, and of the newest that found all. A cell whose graphs lay there in part is neither."""
    found: dict[str, dict] = {"cold_s": {}, "warm_s": {}}
    for cell in cells:
        hits, misses, seconds = (cell.get(name) for name in ("cache_hits", "cache_misses", "compile_s"))
        if is_number(seconds) and seconds >= 0 and is_number(hits) and is_number(misses):
            if hits == 0:
                found["cold_s"][key_of(cell)] = seconds
            elif misses == 0:
                found["warm_s"][key_of(cell)] = seconds
    return [cell | {name: by.get(key_of(cell)) for name, by in found.items()} for cell in cells]


def newest(cells: list[dict]) -> list[dict]:
    """The last cell of each GPU, size, label, T and micro-batch."""
    return list({key_of(cell): cell for cell in cells}.values())


def is_fp8(cell: dict) -> bool:
    """Whether a cell is one of our models in FP8."""
    return cell["label"] not in (BASELINE, EAGER) and cell["label"] not in PEER_LABELS


def in_order(cells: list[dict]) -> list[dict]:
    """By GPU, then ours before the peers', small before large, T; in each size BF16 first."""
    flops: dict[str, float] = {}
    for cell in cells:
        flops[cell["size"]] = min(cell["flops_per_token"], flops.get(cell["size"], math.inf))
    return sorted(cells, key=lambda cell: (
        str(cell["gpu"]), cell["label"] in PEER_LABELS, flops[cell["size"]], cell["size"], cell["T"],
        {EAGER: 0, BASELINE: 1}.get(cell["label"], 2), cell["label"], cell["micro_batch"]))


def against(cells: list[dict], peer_size: str, peer_labels, own_size: str, which: str) -> tuple[dict, dict] | None:
    """(theirs, ours): the fastest of each in the newest run that holds both at one T on one GPU; None where no run does.

    which: "bf16", "fp8" or "any" of our labels, never the uncompiled one."""
    for run in reversed(list(dict.fromkeys(cell["run"] for cell in cells))):
        here = newest([cell for cell in cells if cell["run"] == run])
        theirs = max((cell for cell in here if cell["size"] == peer_size and cell["label"] in peer_labels),
                     key=tflops, default=None)
        ours = [cell for cell in here if theirs and cell["size"] == own_size and cell["T"] == theirs["T"]
                and (cell["label"] == BASELINE and which != "fp8" or is_fp8(cell) and which != "bf16")]
        if ours:
            return theirs, max(ours, key=tflops)
    return None


def tflops(cell: dict) -> float:
    """Model TFLOP/s of a cell that counts: 6 a matmul parameter + 12 L H D T per token."""
    return cell["tok_per_s"] * cell["flops_per_token"] / 1e12


def over(ours: dict, theirs: dict) -> float:
    """Ours over theirs per FLOP: by the turns that both took with one baseline where they did, else by their TFLOP/s."""
    (base, mine), (other, yours) = map(_in_turns, (ours, theirs))
    if base == other and base is not None:
        return mine * ours["flops_per_token"] / (yours * theirs["flops_per_token"])
    return tflops(ours) / tflops(theirs)


def _in_turns(cell: dict) -> tuple[tuple | None, float]:
    """(size and label of the baseline that it took turns with, tokens/s over the baseline's)."""
    if cell["ratio"] and isinstance(cell.get("baseline_size"), str):
        return (cell["baseline_size"], cell.get("baseline")), cell["ratio"]["median"]
    return ((cell["size"], cell["label"]), 1.0) if cell["label"] == BASELINE else (None, 1.0)


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_positive(value) -> bool:
    return is_number(value) and value > 0
