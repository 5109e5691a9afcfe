"""Evaluate a trained model through BF16 matmuls, then through FP8 ones.

    python -m eval.precision out/RUN recipes=tensorwise,rowwise

All precisions see the run's own validation sequences, in the same batches. Their difference is
paired: the standard error is that of the mean difference over sequences. It says nothing of other
training runs. With one activation scale a tensor (tensorwise, amax) a sequence's loss depends a
little on what shares its batch, hence on micro_batch; with row, block and constant scales it does
not. Scores of tasks: eval.harness fp8=RECIPE, then --table, which pairs them by document.

Prints a Markdown table; writes out/RUN/eval/precision.json and, per recipe,
out/RUN/eval/probe_RECIPE.jsonl: what quantisation does to the weights and activations of each
Linear on one validation batch (rows as in fp8/probe.py; `python scaling/figures.py --fp8
out/RUN` draws them)."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eval.inference import (
    Inference,
    Recipe,
    check_recipe,
    load_for_inference,
    pick_device,
    read_json_or_empty,
    read_tokenizer,
)
from eval.results import EvaluatedPrecision, PrecisionRecord, write_precision
from fp8 import probe, selection
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import to_line, write_atomically
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
    config = read_config(options.run)
    device, run_dir = pick_device(options.device), Path(options.run)
    for recipe in options.recipes:  # all of them before the first checkpoint is read
        check_recipe(config, recipe, device)
    data = Data(config, *read_tokenizer(config, run_dir).hashes)
    _check_validation(data, run_dir)
    (run_dir / "eval").mkdir(exist_ok=True)
    micro_batch = options.micro_batch or config.data.micro_batch
    assert isinstance(micro_batch, int)  # a run's own config holds what "auto" became
    bf16, reference = _evaluate_in("off", options, config, data, micro_batch)
    in_fp8 = {}
    for recipe in options.recipes:
        evaluated, val = _evaluate_in(recipe, options, config, data, micro_batch, bf16.step)
        in_fp8[recipe] = _with_difference(evaluated, val, reference)
    record = PrecisionRecord(
        run=str(options.run),
        step=bf16.step,
        device=str(device),
        micro_batch=micro_batch,
        n_ctx=data.n_ctx,
        sequences={source: len(data.val[source]) for source in data.sources},
        weights=data.weights,
        val_sha256=data.val_sha256,
        bf16=bf16,
        fp8=in_fp8,
    )
    write_precision(run_dir / "eval" / "precision.json", record)
    return precision_table(record)


def _check_validation(data: Data, run_dir: Path) -> None:
    """Raises UserError where the validation tokens are not those that the run was measured on."""
    summary = read_json_or_empty(run_dir / "summary.json")
    if summary.get("val_sha256", data.val_sha256) != data.val_sha256:
        raise UserError(
            f"{data.config.data.dir} holds other validation tokens than {run_dir} was measured on:"
            " restore them"
        )


def _with_difference(
    evaluated: EvaluatedPrecision, val: ValLoss, reference: ValLoss
) -> EvaluatedPrecision:
    """The precision with its distance from BF16, whose losses are `reference`."""
    differences = {
        source: losses - reference.sequences[source] for source, losses in val.sequences.items()
    }
    # its loss and error are those of the differences
    gap = ValLoss(differences, reference.weights, reference.targets)
    return replace(
        evaluated,
        difference=gap.loss,
        difference_se=gap.standard_error,
        difference_percent=100 * gap.loss / reference.loss,
    )


def _evaluate_in(
    recipe: str,
    options: Options,
    config: Config,
    data: Data,
    micro_batch: int,
    step: int | None = None,
) -> tuple[EvaluatedPrecision, ValLoss]:
    """Load, evaluate, probe; the model is gone before that of the next precision is loaded.
    step: of the first one, as the run may go on."""
    start = time.perf_counter()
    inference = load_for_inference(options.run, options.device, "bfloat16", recipe, step)
    if recipe != "off":
        print(
            "\n".join(selection.verdict_lines(inference.layers, recipe, inference.device.type)[-2:])
        )
    val = evaluate(inference.model, data.val, data.weights, micro_batch, inference.device)
    assert val is not None  # it is for rank 0, which is alone here
    evaluated = EvaluatedPrecision(
        loss=val.loss,
        loss_se=val.standard_error,
        sources={source: val.source_loss(source) for source in val.sequences},
        step=inference.step,
        layers={layer.name: layer.recipe for layer in inference.layers if layer.recipe},
    )
    name = "bf16" if recipe == "off" else recipe
    seconds = time.perf_counter() - start
    print(f"{name}: validation loss {val.loss:.4f}, {seconds:.0f} s", flush=True)
    if recipe != "off":
        path = Path(options.run) / "eval" / f"probe_{recipe}.jsonl"
        write_atomically(path, _probe(inference, recipe, config, data, micro_batch))
    return evaluated, val


def _probe(
    inference: Inference, recipe: str, config: Config, data: Data, micro_batch: int
) -> bytes:
    """Rows of fp8/probe.py, as JSON lines, of one validation batch."""
    # the loss's scale concerns gradients alone
    recipes = selection.recipes(inference.layers, loss_scale=1.0)
    x, y = _mixed_batch(data, micro_batch)
    n = probe.sequences(x.size(0), x.size(1), config.probe.tokens)
    statistics: dict = {}
    with torch.no_grad(), probe.watching(inference.model, recipes, statistics):
        inference.model(x[:n].to(inference.device), y[:n].to(inference.device))
    rows = probe.rows(inference.step, statistics, recipes, evaluated_in=recipe)
    return b"".join(map(to_line, rows))


def _mixed_batch(data: Data, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x, y (at most micro_batch, T): the first sequences of all sources in turn, mixed as training
    batches are."""
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(max(map(len, data.val.values()))):
        for val in data.val.values():
            if i < len(val) and len(batches) < micro_batch:
                batches.append(val.batch(i, i + 1))
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def precision_table(record: PrecisionRecord) -> str:
    """What FP8 costs, as Markdown."""
    n = str(sum(record.sequences.values()))
    in_fp8 = list(record.fp8.values())
    losses = [f"{evaluated.loss:.4f}" for evaluated in (record.bf16, *in_fp8)]
    percents = [f"{evaluated.difference_percent:+.3f}" for evaluated in in_fp8]
    lines = [
        ["measure", "n", "BF16", *record.fp8],
        ["validation loss [nats/token]", n, *losses],
        ["minus BF16, paired", n, "", *map(_difference, in_fp8)],
        ["minus BF16 [%]", n, "", *percents],
    ]
    return f"\n{grid(lines)}\n\n± is one standard error over the validation sequences."


def _difference(evaluated: EvaluatedPrecision) -> str:
    text = f"{evaluated.difference:+.5f}"
    return text if evaluated.difference_se is None else f"{text} ± {evaluated.difference_se:.5f}"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
