"""Write run folders from a known law, as train.py would leave them, for the tests of scaling/."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scaling.laws.forecast import Counts, Parts
from scaling.predictions import SCHEMA_VERSION, PredictionFile, Target, sealed

Number = TypeVar("Number", float, np.ndarray)

SIZES = (38_912, 106_624, 184_320)  # the demo's order of magnitude


SOURCES = {"docs": 0.1, "latex": 0.1, "python": 0.8}  # weights of the mixture


def law(C: Number) -> Number:
    """The known law: nats per token from training FLOPs."""
    return 0.9 + 330.0 * C**-0.2


def surface(N: Number, D: Number) -> Number:
    """A known L(N, D), small numbers as in the demo."""
    return 0.8 + 40.0 * N**-0.35 + 60.0 * D**-0.3


def write_run(
    folder: Path,
    *,
    recipe: str = "bf16",
    params: int = SIZES[0],
    tokens: int | None = None,
    loss: float | None = None,
    gap: float = 0.0,
    seed: int = 1337,
    curve: bool = False,
    per_source: int = 12,
    **changes: Any,
) -> dict[str, Any]:
    """Write one finished run; `loss` (nats/token) is law(C) by default, `gap` is added to it in the
    FP8 arm.

    changes: keys of summary.json to replace, or to remove where the value is `...`. Returns the
    summary as written."""
    folder.mkdir(parents=True)
    tokens = tokens or 20 * params
    flops = 6 * params + _attention(params)
    if loss is None:
        loss = law(flops * tokens)
    losses = {"as_trained": loss + 1.5 * gap, "bf16": loss + gap}
    rng = np.random.default_rng(0)
    _write_sequences(folder / "val_losses.npz", losses, rng, params, gap, per_source)
    precision = {
        "recipe": recipe,
        "compile": False,
        "layers_converted": [] if recipe == "bf16" else ["head"],
    }
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
        **_counts(params),
        "precision": precision,
        **{f"loss_{arm}": value for arm, value in losses.items()},
        "tok_per_s_median": 9000.0 if gap else 12000.0,
        "sources": {name: {"weight": weight} for name, weight in SOURCES.items()},
    }
    summary = {key: value for key, value in (summary | changes).items() if value is not ...}
    edit(folder / "config.json")
    if curve:
        _write_curve(folder / "metrics.jsonl", tokens, loss, rng)
    edit(folder / "summary.json", **summary)
    return summary


def _attention(params: int) -> int:
    """FLOPs per token, 12 L C T: 3 layers, T = 128."""
    return 12 * 3 * int(math.sqrt(params / 36)) * 128


def _counts(params: int) -> dict[str, int]:
    """Parameters and FLOPs per token under every convention."""
    attention = _attention(params)
    counts = {
        "total": params,
        "nonembed": params - 257 * int(math.sqrt(params / 12)),
        "matmul": params,
    }
    return {
        "flops_per_token": 6 * params + attention,
        "flops_per_token_causal": 6 * params + attention - attention // 2,
        **{f"params_{name}": n for name, n in counts.items()},
        **{f"flops_per_token_6n_{name}": 6 * n for name, n in counts.items()},
    }


def _write_sequences(
    path: Path,
    losses: dict[str, float],
    rng: np.random.Generator,
    params: int,
    gap: float,
    per_source: int,
) -> None:
    """Losses of single sequences: one pattern for all runs, as some sequences are harder than
    others, and noise of the size of the gap."""
    pattern = rng.normal(0, 0.2, (3, per_source))
    pattern += np.random.default_rng(params).normal(0, abs(gap), (3, per_source))
    pattern -= pattern.mean(axis=1, keepdims=True)
    np.savez(
        path,
        source=np.repeat(np.arange(3), per_source),
        n_tokens=np.full(3 * per_source, 128),
        **{arm: 128 * (value + pattern.ravel()) for arm, value in losses.items()},
    )


def _write_curve(path: Path, tokens: int, loss: float, rng: np.random.Generator) -> None:
    """Two hundred steps of training that come down to the loss."""
    lines = []
    for step in range(1, 201):
        noise = 0.05 * float(rng.normal())
        excess = (math.log(257) - loss) * (1 - step / 200) / (1 + step / 5)
        row = {
            "kind": "train",
            "step": step,
            "tokens": tokens * step // 200,
            "loss": noise + loss + excess,
        }
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")


def write_ladder(
    folder: Path, sizes: Sequence[int] = SIZES, gap: float = 0.012, **changes: Any
) -> Path:
    """Write a BF16/FP8 pair of each size; names are <letter>_bf16 and <letter>_fp8."""
    for letter, params in zip("abcdefgh", sizes, strict=False):
        gap_of_size = gap * (params / sizes[0]) ** -0.3
        fp8 = {"recipe": "tensorwise", "gap": gap_of_size} | changes
        write_run(folder / f"{letter}_bf16", params=params, **changes)
        write_run(folder / f"{letter}_fp8", params=params, **fp8)
    return folder


def write_branches(
    folder: Path,
    sizes: Sequence[int] = (30_000, 60_000, 120_000, 240_000, 480_000),
    ratios: Sequence[int] = (5, 10, 20, 40),
    seeds: Sequence[int] = (1, 2),
    recipes: Sequence[str] = ("bf16", "tensorwise"),
    noise: float = 5e-4,
    gap: float = 0.004,
    **changes: Any,
) -> Path:
    """Write and declare a warm-up-stable-decay study from `surface`: per size, recipe and seed a
    trunk of the largest ratio of tokens per parameter, the other ratios as branches of it; every
    run's ln loss has its own noise and its trunk's."""
    rng = np.random.default_rng(0)
    rows = []
    for params, seed in itertools.product(sizes, seeds):
        shared = {ratio: noise * rng.normal() for ratio in ratios}  # the pair sees one data order
        for recipe, ratio in itertools.product(recipes, ratios):
            name, lineage = f"s{params}_{recipe}_{seed}", {}
            if ratio != max(ratios):
                lineage = {"parent_run": name, "parent_step": 80 * ratio, "curve": False}
                name = f"{name}_d{ratio}"
            deviation = shared[ratio] + 0.3 * noise * rng.normal()
            run = write_run(
                folder / name,
                recipe=recipe,
                params=params,
                seed=seed,
                loss=surface(params, params * ratio) * math.exp(deviation),
                tokens=params * ratio,
                gap=0.0 if recipe == "bf16" else gap,
                **changes | lineage,
            )
            row = {
                "run": run["run_id"],
                "parent": run["parent_run"],
                "parent_step": run["parent_step"],
            }
            rows.append(row)
    edit(folder / "study.json", margin_percent=0.25, declared="2026-11-19T00:00:00Z", runs=rows)
    return folder


def write_prediction(folder: str | Path, target: dict[str, Any]) -> None:
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


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file, or write the first ones, its folder too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def strict(path: str | Path) -> dict[str, Any]:
    """A JSON file, which may hold no NaN and no infinity."""

    def refuse(name: str) -> None:
        pytest.fail(f"{name} in {path}")

    return json.loads(Path(path).read_text(), parse_constant=refuse)


def cells(text: str) -> list[list[str]]:
    """The cells of each line of the Markdown tables in a text."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def errorbars(panel: Axes, colour: str | None = None) -> list[tuple[float, ...]]:
    """(x, mean, low, high) of each error bar of a panel, those of one colour."""
    bars = []
    for container in panel.containers:
        markers, _, (lines,) = container.lines
        if colour not in (None, markers.get_color()):
            continue
        for (x, y), segment in zip(markers.get_xydata(), lines.get_segments(), strict=True):
            bars.append((x, y, *segment[:, 1]))
    return bars
