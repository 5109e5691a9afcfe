"""Say in Markdown what the rows of bench/throughput.py hold, whether the targets are reached, what became slower.

Which rows count, and that two cells are only compared within one run, is bench/speed_rows.py's.
"""

from bench.speed_rows import (
    BASELINE,
    PEERS,
    against,
    in_order,
    is_fp8,
    is_number,
    is_positive,
    key_of,
    newest,
    of_kind,
    over,
    problem,
    tflops,
    valid,
)

# At T=1024 on one H100 SXM: tokens/s of compiled BF16, FP8 / BF16, and `auto` / BF16 at the smallest, which must not lose.
TARGETS = {"125m": (500e3, (1.05,)), "350m": (186e3, (1.10,)), "760m": (98e3, (1.20,)), "1p5b": (54e3, (1.32, 1.40))}
TARGET_T, AUTO, AUTO_SIZE = 1024, 1.00, "125m"
GIB = 2**30


def table(rows: list) -> list[str]:
    """The Markdown of all that was measured, as lines; one sentence where nothing was."""
    cells, lines = valid(rows), []
    for gpu in dict.fromkeys(cell["gpu"] for cell in in_order(cells)):
        here = [cell for cell in cells if cell["gpu"] == gpu]
        lines += [f"## {gpu or 'No GPU: a rehearsal, its times say nothing about one'}", "", *_runs(rows, here), ""]
        lines += _targets(here) if _is_h100(gpu) else []
        shown = in_order(newest(here))
        for size, T in dict.fromkeys((cell["size"], cell["T"]) for cell in shown):
            lines += _cells([cell for cell in shown if (cell["size"], cell["T"]) == (size, T)])
        lines += [*_peers(here), *_loops(rows, gpu)]
    lines = lines or ["Nothing has been measured: there is no valid cell in these rows.", ""]
    return [*lines, *_ceilings(rows), *_rejected(rows)]


def _runs(rows, cells) -> list[str]:
    """Where the numbers come from."""
    names, lines = {cell["run"] for cell in cells}, []
    for run in of_kind(rows, "run"):
        if str(run.get("run")) in names:
            parts = [f"{name} {run[key]}" for key, name in (
                ("driver", "driver"), ("power_limit_w", "power limit [W]"), ("torch", "torch"), ("torchao", "torchao"),
                ("triton", "triton"), ("cuda", "CUDA"), ("cudnn", "cuDNN")) if run.get(key) is not None]
            origin = f"commit {str(run['commit'])[:10]}" if run.get("commit") else f"code {run.get('code')}"
            dirty = " with uncommitted changes" if run.get("dirty") else ""
            lines.append(f"- run {run['run']}, {run.get('t')}, {origin}{dirty}: {', '.join(parts)}; `{run.get('command')}`")
    return lines


def _targets(cells) -> list[str]:
    """Reached, not reached or not measured, for each target."""
    cells, lines = [cell for cell in cells if cell["T"] == TARGET_T], []
    last = newest(cells)
    for size, (least, ratios) in TARGETS.items():
        bf16 = max((cell for cell in last if cell["size"] == size and cell["label"] == BASELINE), key=tflops, default=None)
        lines.append((f"{size} BF16 compiled, tok/s", least, bf16 and bf16["tok_per_s"], ",.0f", bf16))
        fp8 = [cell for cell in last if cell["size"] == size and is_fp8(cell) and cell["ratio"]
               and cell.get("baseline") == BASELINE]
        fp8.sort(key=lambda cell: cell["ratio"]["median"])
        auto = [cell for cell in fp8 if cell["label"].startswith("auto")]
        lines += [(f"{size} FP8 / BF16", ratio, fp8[-1]["ratio"]["median"] if fp8 else None, ".3f", fp8[-1] if fp8 else None)
                  for ratio in ratios]
        if size == AUTO_SIZE:
            lines.append((f"{size} auto / BF16", AUTO, auto[0]["ratio"]["median"] if auto else None, ".3f",
                          auto[0] if auto else None))
    for name, size, labels, own, which, least in PEERS:
        if least:
            pair = against(cells, size, labels, own, which)
            lines.append((f"{own} ({which}) / {name}, per FLOP", least, pair and over(pair[1], pair[0]), ".3f",
                          pair and pair[1]))
    return [*_markdown(("target on one H100 SXM, T=1024", "at least", "measured", "by", "verdict"), [
        (name, format(least, spec), "-" if value is None else format(value, spec), cell["label"] if cell else "-",
         "not measured" if value is None else "reached" if value >= least else "NOT reached")
        for name, least, value, spec, cell in lines]), ""]


def _cells(cells) -> list[str]:
    """One size: a row a cell."""
    first = cells[0]
    lines = [f"### {first['size']}, T={first['T']}: {first['flops_per_token'] / 1e9:.3f} GFLOP per token, "
             f"{_show(first.get('tokens_per_step'), ',.0f')} tokens per optimizer step", ""]
    lines += _markdown(
        ("label", "micro-batch", "tok/s", "step ms", "micro-step ms: p10, median, p90", "TFLOP/s", "mfu_bf16", "TCU",
         "speed over the baseline in turns (p10 to p90)", "peak GiB", "compile s", "second start s", "loss difference"),
        [(cell["label"], _micro_batch(cell), _show(cell["tok_per_s"], ",.0f"), _show(cell["step_s"], ",.1f", 1e3),
          ", ".join(_show(_dig(cell, "micro_s", name), ".2f", 1e3) for name in ("p10", "median", "p90")),
          f"{tflops(cell):.1f}", _show(cell.get("mfu_bf16"), ".1%"), _show(cell.get("tcu"), ".1%"), _ratio(cell),
          _show(cell.get("peak_bytes"), ".1f", 1 / GIB), _show(cell["cold_s"], ".1f"),
          _show(cell["warm_s"], ".1f"), _show(cell.get("largest_difference"), ".4f")) for cell in cells])
    clocks = [clock for cell in cells if is_positive(clock := _dig(cell, "clocks", "sm_mhz", "median"))]
    drifts = [abs(cell["drift"]) for cell in cells if is_number(cell.get("drift"))]
    throttled = [f"{cell['label']} ({', '.join(map(str, why))})" for cell in cells
                 if isinstance(why := _dig(cell, "clocks", "throttled"), list) and why]
    broken = [f"{cell['label']} ({cell['graph_breaks']})" for cell in cells if is_positive(cell.get("graph_breaks"))]
    kernels = sorted({name for cell in cells if isinstance(name := cell.get("attention_kernel"), str)})
    if kernels and any(cell.get("profile_error") for cell in cells):
        kernels.append("of some not known, the profiler failed")
    notes = [f"Graph breaks: {', '.join(broken) or 'none'}", f"throttled: {', '.join(throttled) or 'none'}" if clocks else "",
             f"median SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else "clocks unknown",
             f"largest drift {max(drifts):.1%}" if drifts else "", f"attention: {', '.join(kernels)}" if kernels else ""]
    return [*lines, "", "; ".join(filter(None, notes)) + ".", ""]


def _peers(cells) -> list[str]:
    lines = []
    for name, size, labels, own, which, _ in PEERS:
        if not any(cell["size"] == size and cell["label"] in labels for cell in cells):
            continue
        pair = against(cells, size, labels, own, which)
        if pair is None:
            lines.append((name, *"----", f"no run holds our {own} ({which}) beside it", *"----"))
        else:
            said = [(cell["micro_batch"], _show(cell["tok_per_s"], ",.0f"), f"{tflops(cell):.1f}") for cell in pair]
            lines.append((name, pair[0]["label"], *said[0], f"{own} {pair[1]['label']}", *said[1],
                          f"{over(pair[1], pair[0]):.3f}"))
    columns = ("micro-batch", "tok/s", "TFLOP/s")
    return lines and [
        "### Peers, same card, same run", "",
        "Their models are not ours: the last column compares tokens/s scaled by FLOPs per token (6 a matmul parameter",
        "+ 12 L H D T, for both), as they were timed in turns with one baseline, else by the TFLOP/s of their run.", "",
        *_markdown(("peer", "its label", *columns, "ours", *columns, "ours / theirs, per FLOP"), lines), ""]


def _loops(rows, gpu) -> list[str]:
    loops = {key_of(row, ("size", "label")): row for row in of_kind(rows, "loop") if row["gpu"] == gpu}
    lines = [(*key, _show(row.get("tok_per_s"), ",.0f"), _show(row.get("of_cell"), ".3f")) for key, row in loops.items()]
    return lines and ["### train.py itself: what loader, host read, guard and log leave of the cell's speed", "",
                      *_markdown(("size", "label", "tok/s", "of the cell"), lines), ""]


def _ceilings(rows) -> list[str]:
    """What the card can do at best: copy, matmuls at our shapes, attention; ratios within one run alone."""
    lines = []
    for copy in {row["gpu"]: row for row in of_kind(rows, "copy")}.values():
        lines += [f"Copy on {copy['gpu'] or 'no GPU'}: {_show(copy.get('gb_per_s'), ',.0f')} GB/s "
                  f"({_show(copy.get('bytes'), '.2f', 1 / GIB)} GiB).", ""]
    shapes: dict[tuple, dict] = {}      # (gpu, shape) -> run -> dtype -> TFLOP/s
    for row in of_kind(rows, "matmul"):
        if is_positive(row.get("tflops")):
            of_run = shapes.setdefault(key_of(row, ("gpu", "size", "linear", "pass", "M", "K", "N")), {})
            of_run.setdefault(str(row.get("run")), {})[str(row.get("dtype"))] = row["tflops"]
    fullest = {key: max(reversed(of_runs.values()), key=len) for key, of_runs in shapes.items()}    # of equals the newest run
    matmuls = [(key[0] or "no GPU", *key[1:4], f"{key[4]} x {key[5]} x {key[6]}",
                *(_show(by.get(dtype), ",.1f") for dtype in ("bf16", "fp8", "fp8_fp32", "fp8_rowwise")),
                f"{by['fp8'] / by['bf16']:.2f}" if {"fp8", "bf16"} <= by.keys() else "-") for key, by in fullest.items()]
    if matmuls:
        lines += [*_markdown(("matmul on", "size", "Linear", "pass", "M x K x N", "BF16 TFLOP/s", "FP8 TFLOP/s",
                              "FP8 to fp32 TFLOP/s", "FP8 rowwise TFLOP/s", "FP8 / BF16"), matmuls), ""]
    last = {key_of(row, ("gpu", "size", "B", "H", "T", "D", "backend")): row for row in of_kind(rows, "attention")}
    attention = [(key[0] or "no GPU", key[1], " x ".join(map(str, key[2:6])), key[6] or "-", _show(row.get("forward_ms"), ".3f"),
                  _show(row.get("both_ms"), ".3f"), _show(row.get("tflops"), ",.1f"),
                  ", ".join(map(str, row.get("kernels") or [])))
                 for key, row in last.items()]
    if attention:
        lines += [*_markdown(("attention on", "size", "B x H x T x D", "backend", "forward ms", "forward + backward ms",
                              "TFLOP/s", "kernels"), attention), ""]
    return lines and ["### Ceilings on random data", "", *lines]


def _rejected(rows) -> list[str]:
    """Every cell that does not count, every failure, with its reason."""
    lines = [("INVALID", row, why) for row in of_kind(rows, "cell") if (why := problem(row)) is not None]
    lines += [("out of memory" if row.get("oom") else "failed", row, row.get("error")) for row in of_kind(rows, "failed")]
    lines = [f"- {what}: {_what(row)}, run {row.get('run')}: {why}" for what, row, why in lines]
    if strange := sum(not isinstance(row, dict) or not isinstance(row.get("kind"), str) for row in rows):
        lines.append(f"- {strange} rows are no objects with a kind")
    return lines and ["### Not counted: in no ratio, in no figure", "", *lines, ""]


def _what(row) -> str:
    """A cell, or a ceiling, which has neither size nor micro-batch."""
    size, micro_batch = row.get("size"), _micro_batch(row)
    return f"{size or ''} {row.get('label')}".strip() + f", micro-batch {micro_batch}" * (row.get("micro_batch") is not None)


def _micro_batch(row) -> str:
    """In sequences, with what was out of memory before."""
    planned, done = row.get("planned_micro_batch"), row.get("micro_batch")
    return f"{done}" if planned in (None, done) else f"{done} ({planned} out of memory)"


# -------------------------------------------------------------------------------------------------------------- comparing

def ratios(rows: list) -> dict[tuple, float]:
    """Every ratio that a check guards: FP8 over BF16 of each cell, ours over each peer's, train.py over its cell."""
    cells = valid(rows)
    found = {("FP8 / BF16", *key_of(cell)): cell["ratio"]["median"] for cell in newest(cells) if is_fp8(cell) and cell["ratio"]}
    for gpu in dict.fromkeys(cell["gpu"] for cell in cells):
        for name, size, labels, own, which, _ in PEERS:
            if pair := against([cell for cell in cells if cell["gpu"] == gpu], size, labels, own, which):
                found["ours / theirs, per FLOP", gpu, own, which, name] = over(pair[1], pair[0])
    return found | {("train.py / cell", *key_of(row, ("gpu", "size", "label"))): row["of_cell"]
                    for row in of_kind(rows, "loop") if is_positive(row.get("of_cell"))}


def compare(old_rows: list, new_rows: list, tolerance: float = 0.03) -> list[str]:
    """What the new rows lost against the old: ratios more than `tolerance` lower, cells no longer valid; [] where nothing.

    What only one of them holds is no loss, but nothing in common is: a check that checked nothing must not pass."""
    old, new = ratios(old_rows), ratios(new_rows)
    losses = [f"{_name(key)}: {old[key]:.3f} before, {new[key]:.3f} now ({new[key] / old[key] - 1:+.1%})"
              for key in old if key in new and new[key] < old[key] * (1 - tolerance)]
    what = ("gpu", "size", "label")     # at whatever micro-batch: half of it after running out of memory is no failure
    before, now = ({key_of(cell, what) for cell in valid(rows)} for rows in (old_rows, new_rows))
    tried = {key_of(cell, what): f"INVALID: {problem(cell)}" for cell in of_kind(new_rows, "cell")}
    tried |= {key_of(row, what): f"failed: {row.get('error')}" for row in of_kind(new_rows, "failed")}
    losses += [f"{_name(key)}: valid before, now {why}" for key, why in tried.items() if key in before and key not in now]
    if not losses and not old.keys() & new.keys():
        losses.append("no ratio is in both: nothing was compared")
    return losses


def _name(key) -> str:
    return ", ".join(str(part) for part in key if part is not None)


# ----------------------------------------------------------------------------------------------------------------- formats

def _is_h100(gpu) -> bool:
    """The SXM one, for which the targets are; its other variants, slower, tell it in their names."""
    return "H100" in (gpu or "") and not any(other in gpu for other in ("PCIe", "NVL"))


def _dig(row, *names):
    for name in names:
        row = row.get(name) if isinstance(row, dict) else None
    return row


def _show(value, spec: str, factor: float = 1.0) -> str:
    return format(value * factor, spec) if is_number(value) else "-"


def _ratio(cell) -> str:
    if not cell["ratio"]:
        return "-"
    of = "" if cell.get("baseline_size", cell["size"]) == cell["size"] else f"{cell['baseline_size']} "     # a peer's: ours
    return "{median:.3f} x {of}{baseline} ({p10:.3f} to {p90:.3f})".format(**cell["ratio"], of=of, baseline=cell.get("baseline"))


def _markdown(header, lines) -> list[str]:
    return ["| " + " | ".join(str(value).replace("|", "/").replace("\n", " ") for value in line) + " |"
            for line in (header, ["---"] * len(header), *lines)]
