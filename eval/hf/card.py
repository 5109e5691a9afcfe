"""The model card, README.md of an exported folder."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import ModelCardData

from eval.inference import read_json_or_empty
from eval.table import table_of
from eval.table_rows import read_models, sort_columns
from fp8.recipes import FP8Config
from fp8.trained_precision import precision_name
from lib.errors import UserError
from lib.text import grid
from runtime.config import Config
from runtime.run_start import switch_label, trunk_precisions

CARD = """---
{head}
---

# {run}

A language model of {params:,} parameters, {made}. It continues text. The weights here: {form}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR")      # this folder
tokenizer = AutoTokenizer.from_pretrained("DIR")
ids = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```

## Data

{data}

## Training

{training}

## Scores

{scores}

## Limits

- It may write what is false, offensive or private: nothing was done to prevent it, \
and bias was not measured.
- Its context is {n_ctx:,} tokens. What it was not trained on, other languages \
above all, it does badly.
- {licence} The data, and weights that it goes back to, keep theirs.
"""


def model_card(run_dir: Path, config: Config, manifest: dict, form: str, license: str) -> str:
    """README.md, of what config.json, summary.json, eval/*.json and each source's index.json say,
    as far as they are there."""
    state = manifest["state"]
    summary = read_json_or_empty(run_dir / "summary.json")
    indexes = {} if "imported" in state else _indexes(config)
    license_note = "The licence above is of these weights."
    if license == "other":
        license_note = "These weights come without a licence."
    return CARD.format(
        head=_head(config, state, indexes, license),
        run=config.run,
        params=config.model.params_total,
        made=_made(config, manifest),
        form=form,
        data=grid(_data_table(config, indexes)),
        training=_training(config, manifest, summary),
        scores=_scores(run_dir, manifest["step"], summary),
        n_ctx=config.model.n_ctx,
        licence=license_note,
    )


def _indexes(config: Config) -> dict[str, dict]:
    """Source -> what its index.json says, {} where it is not there."""
    folder = Path(config.data.dir)
    return {name: read_json_or_empty(folder / name / "index.json") for name in config.data.mixture}


def _head(config: Config, state: dict, indexes: dict[str, dict], license: str) -> str:
    """The card's YAML, which the Hub reads."""
    on_hub = set()
    for index in indexes.values():
        if re.fullmatch("[0-9a-f]{40}", index.get("revision", "")):
            on_hub.add(index["dataset"])
    tags = ["nanofp8"]
    if _is_fp8(config, state):
        tags.append("fp8")
    head = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        datasets=sorted(on_hub) or None,
        tags=tags,
    )
    return head.to_yaml()


def _is_fp8(config: Config, state: dict) -> bool:
    """Whether the run, or its trunk, was trained in FP8."""
    return any(fp8.is_on for fp8 in (*trunk_precisions(state), config.fp8))


def _data_table(config: Config, indexes: dict[str, dict]) -> list[list[str]]:
    mixture = config.data.mixture
    rows = [["source", "share", "data set", "revision", "licence"]]
    for name, index in indexes.items():
        share = mixture[name] / sum(mixture.values())
        keys = ("dataset", "revision", "license")
        facts = [str(index.get(key, "not known")) for key in keys]
        rows.append([name, f"{share:.1%}", *facts])
    return rows


def _base(state: dict) -> str | None:
    """Name of the imported model, or run, whose weights the run began with."""
    return (state.get("imported") or state.get("origin") or {}).get("folder")


def _made(config: Config, manifest: dict) -> str:
    """From what and how far it was trained."""
    base = _base(manifest["state"])
    if "imported" in manifest["state"]:
        return f"imported into nanoFP8 from {base} and not trained there"
    begin = "scratch"
    if config.parent:
        trunk, step = config.parent
        begin = f"the weights of {base or f'{trunk} at step {step}'}"
    return (
        f"trained with nanoFP8 from {begin}, {manifest['step']:,} of {config.total_steps:,} steps"
        f" of {'up to ' if config.data.ramp else ''}{config.data.tokens_per_step:,} tokens"
    )


def _training(config: Config, manifest: dict, summary: dict) -> str:
    """Optimizer, precision, and the losses where they are of these weights."""
    text = ""
    if "imported" not in manifest["state"]:
        optimizer = ", ".join(f"{key} {value}" for key, value in asdict(config.optim).items())
        text = f"Optimizer: {optimizer}. Precision of the matmuls: {_name([config.fp8])}"
        trunks = trunk_precisions(manifest["state"])
        if trunks:
            text += f", before the branch point {_name(trunks)}"
        text += "."
    if summary.get("steps") == manifest["step"]:
        text += (
            f" Validation loss {summary['loss_as_trained']:.4f} as trained,"
            f" {summary['loss_bf16']:.4f} in BF16 (nats per token)."
        )
    return text


def _name(precisions: Sequence[FP8Config]) -> str:
    """Of precisions that followed each other, with their number format."""
    label = switch_label(precisions) or ""
    return precision_name(label, min(fp8.bits for fp8 in precisions))


def _scores(run_dir: Path, step: int, summary: dict) -> str:
    """What the harness wrote of these weights on whole tasks, FP8 inference beside BF16."""
    try:
        models = read_models([run_dir])
    except UserError as error:
        return f"None: {error}"
    models = [model for model in models if (model.step or summary.get("steps", 0)) == step]
    columns = [column for column in sort_columns(models) if column.limit is None]
    return grid(table_of(models, columns))
