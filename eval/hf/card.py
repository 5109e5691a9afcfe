"""The model card, README.md of an exported folder."""

import re
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import ModelCardData

from eval.inference import read_json
from eval.table import table_of
from eval.table_rows import read_rows, sort_columns
from lib.errors import UserError
from lib.plots import name_recipe
from lib.text import grid
from runtime.config import Config

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

- It may write what is false, offensive or private: nothing was done to prevent it, and bias was not measured.
- Its context is {n_ctx:,} tokens. What it was not trained on, other languages above all, it does badly.
- {licence} The data, and weights that it goes back to, keep theirs.
"""


def model_card(run_dir: Path, config: Config, manifest: dict, form: str, license: str) -> str:
    """README.md, of what config.json, summary.json, eval/*.json and each source's index.json say,
    as far as they are there."""
    step, data, state, summary = (
        manifest["step"],
        config.data,
        manifest["state"],
        read_json(run_dir / "summary.json"),
    )
    sources = (
        {}
        if "imported" in state
        else {name: read_json(Path(data.dir) / name / "index.json") for name in data.mixture}
    )
    on_hub = {
        index["dataset"]
        for index in sources.values()
        if re.fullmatch("[0-9a-f]{40}", index.get("revision", ""))
    }
    # the precision of the trunk, if another
    recipe, before = config.fp8.label, state.get("switched_from")
    head = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        datasets=sorted(on_hub) or None,
        tags=["nanofp8", *["fp8"] * (recipe != "bf16" or before not in (None, "bf16"))],
    )
    shown = [["source", "share", "data set", "revision", "licence"]]
    for name, index in sources.items():
        shown.append(
            [
                name,
                f"{data.mixture[name] / sum(data.mixture.values()):.1%}",
                *(str(index.get(key, "not known")) for key in ("dataset", "revision", "license")),
            ]
        )
    base = (state.get("imported") or state.get("origin") or {}).get("folder")
    if "imported" in state:
        made, training = f"imported into nanoFP8 from {base} and not trained there", ""
    else:
        begin = (
            f"the weights of {base or '{} at step {}'.format(*config.parent)}"
            if config.parent
            else "scratch"
        )
        made = (
            f"trained with nanoFP8 from {begin}, {step:,} of {config.total_steps:,} steps of"
            f" {data.tokens_per_step:,} tokens"
        )
        optimizer = ", ".join(f"{key} {value}" for key, value in asdict(config.optim).items())
        training = f"Optimizer: {optimizer}. Precision of the matmuls: {name_recipe(recipe)}" + (
            f", before the branch point {name_recipe(before)}." if before else "."
        )
    if summary.get("steps") == step:  # else it tells of other weights
        training += (
            f" Validation loss {summary.get('loss_as_trained')} as trained,"
            f" {summary.get('loss_bf16')} in BF16 (nats per token)."
        )
    try:  # what the harness wrote of these weights on whole tasks, FP8 inference beside BF16
        rows = [
            row for row in read_rows([run_dir]) if (row.step or summary.get("steps", 0)) == step
        ]
        scores = grid(
            table_of(rows, [column for column in sort_columns(rows) if column.limit is None])
        )
    except UserError as error:
        scores = f"None: {error}"
    return CARD.format(
        head=head.to_yaml(),
        run=config.run,
        params=config.model.params_total,
        made=made,
        form=form,
        data=grid(shown),
        training=training,
        scores=scores,
        n_ctx=config.model.n_ctx,
        licence=(
            "These weights come without a licence."
            if license == "other"
            else "The licence above is of these weights."
        ),
    )
