"""Write run folders from a known law, as train.py would leave them, for the tests of scaling/."""

import itertools
import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from scaling.laws.forecast import Counts, Parts
from scaling.predictions import SCHEMA_VERSION, PredictionFile, Target, sealed

SIZES = (38_912, 106_624, 184_320)  # the demo's order of magnitude


def law(C):
    """The known law: nats per token from training FLOPs."""
    return 0.9 + 330.0 * C**-0.2


def surface(N, D):
    """A known L(N, D), small numbers as in the demo."""
    return 0.8 + 40.0 * N**-0.35 + 60.0 * D**-0.3


def write_run(
    folder,
    *,
    recipe="bf16",
    params=SIZES[0],
    tokens=None,
    loss=None,
    gap=0.0,
    seed=1337,
    curve=False,
    per_source=12,
    **changes,
):
    """Write one finished run; `loss` (nats/token) is law(C) by default, `gap` is added to it in the
    FP8 arm.

    changes: keys of summary.json to replace, or to remove where the value is `...`. Returns the
    summary as written."""
    folder.mkdir(parents=True)
    # 12 L C T: 3 layers, T = 128
    tokens, attention = tokens or 20 * params, 12 * 3 * int(math.sqrt(params / 36)) * 128
    counts = {
        "total": params,
        "nonembed": params - 257 * int(math.sqrt(params / 12)),
        "matmul": params,
    }
    flops = 6 * params + attention
    loss, rng = law(flops * tokens) if loss is None else loss, np.random.default_rng(0)
    losses = {"as_trained": loss + 1.5 * gap, "bf16": loss + gap}
    # one pattern for all runs: some sequences are harder than others
    shape = rng.normal(0, 0.2, (3, per_source))
    shape += np.random.default_rng(params).normal(0, abs(gap), (3, per_source))
    shape -= shape.mean(axis=1, keepdims=True)
    np.savez(
        folder / "val_losses.npz",
        source=np.repeat(np.arange(3), per_source),
        n_tokens=np.full(3 * per_source, 128),
        **{arm: 128 * (value + shape.ravel()) for arm, value in losses.items()},
    )
    summary = {
        "schema_version": 1,
        "run_id": folder.name,
        "pair_id": f"pair{params}_{tokens}_{seed}",
        "status": "ok",
        "parent_run": None,
        "parent_step": None,
        "t_start": "2026-11-20T09:00:00Z",
        "device": "cpu test",
        "n_gpu": 1,
        "seed": seed,
        "val_sha256": "v" * 64,
        "tokenizer_sha256": "t" * 64,
        "vocab_size": 257,
        "vocab_padded": 384,
        "tokens": tokens,
        "is_annealed": True,
        "flops_per_token": flops,
        "flops_per_token_causal": flops - attention // 2,
        **{f"params_{name}": n for name, n in counts.items()},
        **{f"flops_per_token_6n_{name}": 6 * n for name, n in counts.items()},
        "precision": {
            "recipe": recipe,
            "compile": False,
            "layers_converted": ["head"] * (recipe != "bf16"),
        },
        **{f"loss_{arm}": value for arm, value in losses.items()},
        "tok_per_s_median": 9000.0 if gap else 12000.0,
        "sources": {
            name: {"weight": weight}
            for name, weight in (("docs", 0.1), ("latex", 0.1), ("python", 0.8))
        },
    }
    summary = {key: value for key, value in (summary | changes).items() if value is not ...}
    edit(folder / "config.json")
    if curve:
        rows = [
            {
                "kind": "train",
                "step": step,
                "tokens": tokens * step // 200,
                "loss": (
                    0.05 * float(rng.normal())
                    + loss
                    + (math.log(257) - loss) * (1 - step / 200) / (1 + step / 5)
                ),
            }
            for step in range(1, 201)
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    edit(folder / "summary.json", **summary)
    return summary


def write_ladder(folder, sizes=SIZES, gap=0.012, **changes):
    """Write a BF16/FP8 pair of each size; names are <letter>_bf16 and <letter>_fp8."""
    for letter, params in zip("abcdefgh", sizes, strict=False):
        write_run(folder / f"{letter}_bf16", params=params, **changes)
        write_run(
            folder / f"{letter}_fp8",
            recipe="tensorwise",
            params=params,
            gap=gap * (params / sizes[0]) ** -0.3,
            **changes,
        )
    return folder


def write_branches(
    folder,
    sizes=(30_000, 60_000, 120_000, 240_000, 480_000),
    ratios=(5, 10, 20, 40),
    seeds=(1, 2),
    recipes=("bf16", "tensorwise"),
    noise=5e-4,
    gap=0.004,
    **changes,
):
    """Write and declare a warm-up-stable-decay study from `surface`: per size, recipe and seed a
    trunk of the largest ratio of tokens per parameter, the other ratios as branches of it; every
    run's ln loss has its own noise and its trunk's."""
    rng, rows = np.random.default_rng(0), []
    for params, seed in itertools.product(sizes, seeds):
        shared = {ratio: noise * rng.normal() for ratio in ratios}  # the pair sees one data order
        for recipe, ratio in itertools.product(recipes, ratios):
            trunk, is_branch = f"s{params}_{recipe}_{seed}", ratio != max(ratios)
            lineage = (
                {"parent_run": trunk, "parent_step": 80 * ratio, "curve": False}
                if is_branch
                else {}
            )
            loss = surface(params, params * ratio) * math.exp(
                shared[ratio] + 0.3 * noise * rng.normal()
            )
            run = write_run(
                folder / (trunk + f"_d{ratio}" * is_branch),
                recipe=recipe,
                params=params,
                seed=seed,
                loss=loss,
                tokens=params * ratio,
                gap=gap * (recipe != "bf16"),
                **changes | lineage,
            )
            rows.append(
                {
                    "run": run["run_id"],
                    "parent": run["parent_run"],
                    "parent_step": run["parent_step"],
                }
            )
    edit(folder / "study.json", margin_percent=0.25, declared="2026-11-19T00:00:00Z", runs=rows)
    return folder


def write_prediction(folder, target):
    """A frozen prediction of a run, whose counts stand in `target` among other keys."""
    counts = {f.name: target.get(f.name) for f in fields(Target)}
    prediction = PredictionFile(
        schema_version=SCHEMA_VERSION,
        target=Target(**counts),
        date="2026-01-01T00:00:00Z",
        git_commit=None,
        loss_key="loss_bf16",
        loss_unit="nats per token",
        level=0.95,
        convention="total",
        loss=2.0,
        low=1.9,
        high=2.1,
        headline="ray",
        forms=[],
        forms_left_out=[],
        parts=Parts((1.9, 2.1), (1.9, 2.1), 0.0),
        points=Counts(3, 3),
        extrapolation=2.0,
        tokenizer_sha256="t" * 64,
        val_sha256="v" * 64,
        inputs=[],
        sha256="",
    )
    edit(Path(folder) / f"prediction_{counts['name']}.json", **sealed(prediction))


def edit(path, **changes):
    """Change keys of a JSON file, or write the first ones, its folder too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def strict(path):
    """A JSON file, which may hold no NaN and no infinity."""
    return json.loads(
        Path(path).read_text(), parse_constant=lambda name: pytest.fail(f"{name} in {path}")
    )


def cells(text):
    """The cells of each line of the Markdown tables in a text."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def errorbars(panel, colour=None):
    """(x, mean, low, high) of each error bar of a panel, those of one colour."""
    return [
        (x, y, *segment[:, 1])
        for one in panel.containers
        if colour in (None, one.lines[0].get_color())
        for (x, y), segment in zip(
            one.lines[0].get_xydata(), one.lines[2][0].get_segments(), strict=True
        )
    ]
