"""Score a run by lm-eval's own command line, under the model name nanofp8.

    python -m eval.lm_eval_cli --model nanofp8 --model_args run=out/RUN --tasks piqa
    python -m eval.lm_eval_cli --model nanofp8 --model_args run=out/RUN,fp8=rowwise --tasks piqa
    python -m eval.lm_eval_cli ls tasks

It is `lm_eval`, all of whose options and subcommands it takes, with one more model: lm-eval 0.4.13
finds no models of other packages by itself. In a program of yours, call register() and then
lm_eval.simple_evaluate(model="nanofp8", model_args={"run": "out/RUN"}). One process; the scores are
those of eval.harness, which is shorter to type, shares the work among GPUs, compares pairs and
knows the demo tasks. mmlu has five examples there and as many here as --num_fewshot says.

model_args: run, and step, fp8, dtype and micro_batch as eval.harness has them. A database of
--use_cache belongs to the model that filled it: another run, step, fp8 or dtype is refused."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eval.inference import Recipe, load_for_inference
from eval.lm import CheckpointLM
from lib.command import Frame, read_options, run_command
from lib.errors import UserError
from lib.help import field_lines, help_page
from lib.values import FilePath
from runtime.checkpoint import name_of
from runtime.parallel import World, read_launch

if TYPE_CHECKING:
    from lm_eval.api.model import CacheHook
    from sqlitedict import SqliteDict

NAME = "nanofp8"
NOTE_KEY = "nanofp8"  # in a database of --use_cache; lm-eval's own keys are hashes


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    run: FilePath  # folder of a run
    step: int | None = None  # of a checkpoint that was kept; none = the newest
    # the Linears that this recipe converts multiply in FP8, whatever trained the run
    fp8: Recipe = "off"
    # as trained (an FP8 run: plain BF16 matmuls), or float32
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    micro_batch: int = 16  # sequences of a full context per forward pass; more if they are shorter


@dataclass(frozen=True)
class AnswersOf:
    """Whose answers a database of --use_cache holds: a row of it."""

    checkpoint: str  # SHA-256 of its manifest, which lists the hash of each file
    fp8: str
    dtype: str
    run: str  # for people: a run's folder may move
    step: int

    def __str__(self) -> str:
        return f"run={self.run} step={self.step} fp8={self.fp8} dtype={self.dtype}"

    def are_those_of(self, other: "AnswersOf") -> bool:
        """Whether the model is the same; its folder may have moved."""
        return (self.checkpoint, self.fp8, self.dtype) == (other.checkpoint, other.fp8, other.dtype)


class NanoFP8LM(CheckpointLM):
    """A run as lm-eval makes a model: from the words of --model_args and --device."""

    def __init__(
        self,
        batch_size: object = None,
        max_batch_size: object = None,
        device: str | None = None,
        **model_args: object,
    ):
        """batch_size, max_batch_size: lm-eval's own options, replaced here by micro_batch. Raises
        UserError for an unknown argument, and where the run cannot be read."""
        words = [f"{name}={value}" for name, value in model_args.items()]
        options = read_options(ModelArguments, words)
        if batch_size not in (None, 1, "1"):  # 1 is lm-eval's default
            raise UserError(
                f"--batch_size {batch_size} is not used: give micro_batch= in --model_args, which"
                " counts sequences of a full context"
            )
        size, _, _ = read_launch(os.environ)
        if size > 1:
            raise UserError(
                f"--model {NAME} is one process, and {size} were started: eval.harness shares the"
                " work among several"
            )
        model, tokenizer, torch_device, _, step = load_for_inference(
            options.run, device or "auto", options.dtype, options.fp8, options.step
        )
        world = World(0, 0, 1, torch_device)
        super().__init__(model, tokenizer, options.micro_batch, torch_device, world)
        path = Path(options.run, "checkpoints", name_of(step))
        manifest_hash = (path / "DONE").read_text()
        self.answers = AnswersOf(manifest_hash, options.fp8, options.dtype, options.run, step)

    def set_cache_hook(self, cache_hook: "CacheHook") -> None:
        """lm-eval's call, before any question, that hands over the database of --use_cache. Raises
        UserError where it holds another model's answers."""
        super().set_cache_hook(cache_hook)
        if cache_hook.dbdict is not None:
            claim_database(cache_hook.dbdict, self.answers)


def claim_database(database: "SqliteDict", answers: AnswersOf) -> None:
    """Note in an empty database of lm-eval whose answers it is going to hold.

    lm-eval looks an answer up by its question alone, so without the note every model would be
    given the answers of the first. Raises UserError where the database holds those of another."""
    note = database.get(NOTE_KEY)
    n_answers = len(database) - (note is not None)
    if n_answers == 0:
        database[NOTE_KEY] = asdict(answers)
        return
    remedy = "give another --use_cache, or delete the file"
    if note is None:
        raise UserError(
            f"{database.filename} holds answers without a note of their model: {remedy}"
        )
    owner = AnswersOf(**note)
    if not answers.are_those_of(owner):
        raise UserError(f"{database.filename} holds answers of {owner}, not of {answers}: {remedy}")


def register() -> None:
    """Register the model with lm-eval under NAME."""
    import lm_eval.models  # noqa: F401  lm-eval fills its registry only where it is empty
    from lm_eval.api.registry import model_registry

    model_registry.register(NAME, target=NanoFP8LM)


def evaluate(words: Sequence[str]) -> int:
    """lm_eval with these words; its exit code. Raises UserError."""
    from lm_eval.__main__ import cli_evaluate

    register()
    sys.argv = ["lm_eval", *words]
    try:
        cli_evaluate()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


FRAME: Frame[list[str]] = Frame(
    page=lambda: help_page(__doc__, "\n".join(field_lines("", ModelArguments).values())),
    read=list,
)


def main(words: list[str]) -> int:
    return FRAME.run(words, evaluate)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
