"""Evaluate a trained model through BF16 matmuls, then through FP8 ones.

    python -m eval.precision out/RUN recipes=tensorwise,rowwise

All arms see the run's own validation sequences, in the same batches. Their difference is paired:
the standard error is that of the mean difference over sequences. It says nothing of other training
runs. With one activation scale a tensor (tensorwise, amax) a sequence's loss depends a little on
what shares its batch, hence on micro_batch; with row, block and constant scales it does not. Scores
of tasks: eval.harness fp8=RECIPE, then --table, which pairs them by document.

Prints a Markdown table; writes out/RUN/eval/precision.json and, per recipe,
out/RUN/eval/probe_RECIPE.jsonl: what quantisation does to the weights and activations of each
Linear on one validation batch (rows as in fp8/probe.py; `python scaling/figures.py --fp8
out/RUN` draws them)."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from eval.inference import (
    Recipe,
    check_recipe,
    load_for_inference,
    pick_device,
    read_json,
    read_tokenizer,
)
from fp8 import probe, selection
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import to_line, write_atomically, write_json
from lib.text import grid
from lib.values import FilePath
from runtime.config import Config, read_config
from runtime.data import Data
from runtime.validation import ValLoss, evaluate


@dataclass(frozen=True, kw_only=True)
class Options:
    run: FilePath  # folder of a run, trained in any precision
    recipes: tuple[Recipe, ...] = ("tensorwise", "rowwise")
    micro_batch: int | None = None  # sequences per forward pass; none = the run's own
    device: str = "auto"  # auto (a GPU where there is one), cpu, cuda


@command(__doc__, Options, "run")
def main(options: Options) -> str:
    """Measure BF16 and every recipe, write what was found, return the table."""
    config, device, run_dir = (
        read_config(options.run),
        pick_device(options.device),
        Path(options.run),
    )
    for recipe in options.recipes:  # all of them before the first checkpoint is read
        check_recipe(config, recipe, device)
    data = Data(config, *read_tokenizer(config, run_dir).hashes)
    if read_json(run_dir / "summary.json").get("val_sha256", data.val_sha256) != data.val_sha256:
        raise UserError(
            f"{data.config.data.dir} holds other validation tokens than {run_dir} was measured on:"
            " restore them"
        )
    (run_dir / "eval").mkdir(exist_ok=True)
    micro_batch, arms, vals = options.micro_batch or config.data.micro_batch, {}, {}
    for recipe in ("off", *options.recipes):
        arms[recipe], vals[recipe] = _arm(
            recipe, options, config, data, micro_batch, arms.get("off", {}).get("step")
        )
    reference, bf16 = vals.pop("off"), arms.pop("off")
    for recipe, val in vals.items():
        pairs = {
            source: losses - reference.sequences[source] for source, losses in val.sequences.items()
        }
        # its loss and error are those of the differences
        gap = ValLoss(pairs, reference.weights, reference.targets)
        arms[recipe] |= {
            "difference": gap.loss,
            "difference_se": gap.standard_error,
            "difference_percent": 100 * gap.loss / reference.loss,
        }
    record = {
        "run": str(options.run),
        "step": bf16["step"],
        "device": str(device),
        "micro_batch": micro_batch,
        "n_ctx": data.n_ctx,
        "sequences": {source: len(data.val[source]) for source in data.sources},
        "weights": data.weights,
        "val_sha256": data.val_sha256,
        "bf16": bf16,
        "fp8": arms,
    }
    # null for a loss that overflowed
    write_json(run_dir / "eval" / "precision.json", json.loads(to_line(record)))
    return table(record)


def _arm(
    recipe: str, options: Options, config: Config, data: Data, micro_batch: int, step: int | None
) -> tuple[dict, ValLoss]:
    """Load, evaluate, probe; the model is gone before the next arm's is loaded. step: the first
    arm's, as the run may go on."""
    start = time.perf_counter()
    inference = load_for_inference(options.run, options.device, "bfloat16", recipe, step)
    if recipe != "off":
        print("\n".join(selection.table(inference.layers, recipe, inference.device.type)[-2:]))
    val = evaluate(inference.model, data.val, data.weights, micro_batch, inference.device)
    arm = {
        "loss": val.loss,
        "loss_se": val.standard_error,
        "sources": {s: val.source_loss(s) for s in val.sequences},
        "step": inference.step,
        "layers": {layer.name: layer.recipe for layer in inference.layers if layer.recipe},
    }
    name = "bf16" if recipe == "off" else recipe
    print(
        f"{name}: validation loss {val.loss:.4f}, {time.perf_counter() - start:.0f} s", flush=True
    )
    if recipe != "off":
        # the loss's scale concerns gradients alone
        recipes, seen = selection.recipes(inference.layers, loss_scale=1.0), {}
        # The first sequences of all sources in turn: mixed, as training batches are.
        rounds = range(max(map(len, data.val.values())))
        order = [(val, i) for i in rounds for val in data.val.values() if i < len(val)][
            :micro_batch
        ]
        x, y = (
            torch.cat(parts)
            for parts in zip(*(val.batch(i, i + 1) for val, i in order), strict=True)
        )
        n = probe.sequences(*x.shape, config.probe.tokens)
        with torch.no_grad(), probe.watching(inference.model, recipes, seen):
            inference.model(x[:n].to(inference.device), y[:n].to(inference.device))
        rows = b"".join(map(to_line, probe.rows(inference.step, seen, recipes)))
        write_atomically(Path(options.run) / "eval" / f"probe_{recipe}.jsonl", rows)
    return arm, val


def table(record: dict) -> str:
    """What FP8 costs, as Markdown."""
    bf16, arms, n = record["bf16"], record["fp8"], str(sum(record["sequences"].values()))
    losses = [
        ["measure", "n", "BF16", *arms],
        [
            "validation loss [nats/token]",
            n,
            *(f"{arm['loss']:.4f}" for arm in (bf16, *arms.values())),
        ],
        [
            "minus BF16, paired",
            n,
            "",
            *(
                f"{arm['difference']:+.5f}"
                + ("" if (error := arm["difference_se"]) is None else f" ± {error:.5f}")
                for arm in arms.values()
            ),
        ],
        ["minus BF16 [%]", n, "", *(f"{arm['difference_percent']:+.3f}" for arm in arms.values())],
    ]
    return f"\n{grid(losses)}\n\n± is one standard error over the validation sequences."


if __name__ == "__main__":
    raise SystemExit(run_command(main))
