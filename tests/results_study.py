"""Build a study's folder as publish.py leaves it, of known numbers, for the tests of its page of results."""

import functools
import gzip
import json
import math
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from scaling_runs import surface, write_run
from test_dynamics import rows_of

from scaling import figures, fit, precision, results

SIZES = {"s": 60_000, "m": 120_000, "l": 240_000}       # all parameters
SEEDS = {"s": (1, 2), "m": (1, 2), "l": (1,)}
H100 = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130", "cuda": "13.0", "n_layer": 4, "n_embd": 256, "n_ffn": 704,
        "n_ctx": 1024, "lr_peak": 0.004, "skipped_steps": 0, "rollbacks": 0, "compile_s": 30.25, "wall_s": 61.0,
        "mfu_bf16": 0.123, "mem_peak_gib": 11.5}
TRUNKS = {"bf16": 12_000.0, "tensorwise": 9_000.0}
HELD = "l_bf16_t20_s1"


def nonembed(size):
    return SIZES[size] - 257 * int(math.sqrt(SIZES[size] / 12))


def sources(loss, tokens):
    """Three sources, of which python is read more than once; losses in bits per byte at 4 bytes a token."""
    there = {"docs": 2e6, "latex": 2e6, "python": 5e5}
    weights = {"docs": 0.1, "latex": 0.1, "python": 0.8}
    return {name: {"weight": weights[name], "epochs": weights[name] * tokens / there[name], "loss_bf16": loss,
                   "bpb_bf16": loss / math.log(2) / 4, "tokens": 4096, "text_bytes": 4 * 4096} for name in weights}


def write_one(folder, size, recipe, ratio, seed, repeat=0, **changes):
    N, noise = nonembed(size), np.random.default_rng([ratio, seed, repeat, SIZES[size]]).normal()
    tokens, trunk = ratio * N, f"{size}_{recipe}{'_null' * repeat}_t20_s{seed}"
    gap = 0.004 if recipe != "bf16" else 0.0
    loss = surface(N, tokens) * (1 + 5e-4 * noise * (1 if not repeat else 1.2))
    lineage = {} if ratio == 20 else {"parent_run": trunk, "parent_step": 10 * ratio}
    extra = {"params_fp8": 4 * 256 * 256 // 10 if gap else 0, "tok_per_s_median": TRUNKS[recipe] / (1 + 2 * repeat),
             "precision": {"recipe": recipe, "compile": not repeat, "layers_converted": ["layers.0.mlp.down"] * bool(gap)}}
    return write_run(folder / trunk.replace("t20", f"t{ratio}"), recipe=recipe, params=SIZES[size], tokens=tokens, loss=loss,
                     gap=gap, seed=seed, curve=False, sources=sources(loss + gap, tokens), repeat=repeat,
                     **lineage, **{**H100, **extra, **changes})


def declared():
    runs = [(size, recipe, ratio, seed, 0) for size in SIZES for seed in SEEDS[size] for recipe in TRUNKS
            for ratio in (5, 10, 20)]
    runs += [("s", "bf16", ratio, 1, 1) for ratio in (5, 10, 20)]
    return [run for run in runs if run[0] != "l" or run[1:3] == ("bf16", 20)]


def row_of(size, recipe, ratio, seed, repeat):
    params, N = SIZES[size], nonembed(size)
    attention = 12 * 3 * int(math.sqrt(params / 36)) * 128
    return {"run": f"{size}_{recipe}{'_null' * repeat}_t{ratio}_s{seed}", "size": size, "recipe": recipe, "seed": seed,
            "tokens_per_param": ratio, "tokens": ratio * N, "params_total": params, "params_nonembed": N,
            "params_matmul": params, "flops_per_token": 6 * params + attention, "repeat": repeat}


def probed():
    """Rows of a probe whose worst underflow is at its first step."""
    rows = rows_of()
    rows[0]["weight"]["underflow"] = rows[0]["gradient"]["underflow"] = 0.25
    return rows


def write_study(folder: Path) -> None:
    """A study that is done: predicted, run, fitted, scored."""
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps({
        "format_version": 1, "study": "tiny", "declared": "2026-11-19T00:00:00Z", "margin_percent": 0.25, "params": "nonembed",
        "held_out": [HELD], "runs": [row_of(*one) for one in declared()]}))
    for one in declared():
        if one[0] != "l":
            write_one(folder, *one)
    with pytest.MonkeyPatch.context() as patch:
        for room in (figures, precision):
            patch.setattr(room, "render", lambda figure, form: form.encode())
        patch.setattr(fit, "draw", lambda *_: object())
        patch.setattr(precision, "draw_precision", lambda *_: object())
        patch.setattr(precision, "draw_pair", lambda *_: (object(), []))
        assert fit.main([str(folder), "--predict", HELD]) == 0
        later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 5))
        write_one(folder, "l", "bf16", 20, 1, t_start=later)
        assert fit.main([str(folder), "--score"]) == 0
        assert precision.main([str(folder)]) == 0
    probe = folder / "m_tensorwise_t20_s1" / "probe.jsonl.gz"
    probe.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in probed()).encode(), mtime=0))
    (probe.parent / "figures").mkdir()
    (probe.parent / "figures" / "fp8_scales.png").write_bytes(b"png")
    (folder / HELD / "samples.txt").write_text("$ python -m eval.sample\ndef f():\n    ```x```\x00\n")
    (folder / HELD / "config.json").write_text('{"data": {"dir": "data/tiny"}}')
    splits = {"train": {"documents": 900, "text_bytes": 2e6, "tokens": 5e5}, "val": {"documents": 45, "text_bytes": 5e5,
                                                                                   "tokens": 1e5}}
    (folder / "data.json").write_text(json.dumps({
        "python": {"dataset": "installed source code", "license": "PSF-2.0", "revision": "CPython 3.12", "splits": splits,
                   "duplicates": {"python": 7, "docs": 1}, "selection": {"left_out": {"large": "above 1,000,000 bytes"}}},
        "docs": {"dataset": "local: prose.jsonl.xz; column text", "splits": splits}}))
    (folder / "slices.jsonl").write_text("".join(json.dumps({
        "start": f"2026-11-20T0{n}:00:00Z", "end": "", "seconds": 540 - n, "commit": "abcdef0123456", "dirty": n == 1,
        "device": "NVIDIA H100 80GB HBM3", "driver": "580.1", "python": "3.12.3", "torch": "2.11.0+cu130", "torchao": "0.18.0",
        "triton": "3.6", "cuda": "13.0", "runs": ["a", "b"][n:], "exit": 3 - 3 * n}) + "\n" for n in (0, 1)))


@functools.cache
def whole(base: Path) -> Path:
    """A study that is done, made once for all tests below pytest's own folder."""
    write_study(folder := base / "whole_study")
    return folder


def copied(factory, tmp_path) -> Path:
    return Path(shutil.copytree(whole(factory.getbasetemp()), tmp_path / "tiny"))


def page_of(folder) -> str:
    assert results.main([str(folder)]) == 0
    return (folder / "README.md").read_text()


def section(text, title) -> str:
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.S | re.M)[1]


def cells(text, *beginning) -> list[str]:
    """The cells of the one table row whose first cells are these."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")]
    found = [row for row in rows if row[:len(beginning)] == list(beginning)]
    assert len(found) == 1, (beginning, found)
    return found[0]
