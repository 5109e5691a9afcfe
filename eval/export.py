"""Turn a run into a folder that Hugging Face's transformers loads, or such a folder into a run.

    python -m eval.export out/RUN DIR                 the newest checkpoint -> DIR
    python -m eval.export out/RUN DIR float8=rowwise  its Linears in float8, for torchao's inference
    python -m eval.export --from-hf DIR out/RUN       a Llama-family checkpoint -> a run

DIR must be new or empty. It gets the weights (model.safetensors, in several files beyond 5 GB),
config.json, the tokenizer, generation_config.json and a model card, README.md; written under
another name, synced and renamed: whole or not there. Nothing here needs transformers. The weights
are held in fp32 meanwhile: 4 bytes a parameter.

Source: configuration and modelling of both in transformers 5.23; both rotate RoPE by halves, as
model.py does."""

from dataclasses import dataclass
from typing import Literal

from eval.hf.export import export
from eval.hf.importing import import_checkpoint
from eval.inference import Recipe
from lib.command import command, run_command
from lib.values import FilePath


@dataclass(frozen=True, kw_only=True)
class Options:
    run: FilePath  # folder of a run
    folder: FilePath  # the folder to write
    # fp32, the weights' own: then the logits of both sides are equal bit by bit
    dtype: Literal["bf16", "fp32"] = "bf16"
    float8: Recipe = "off"  # a recipe of training: which Linears, and how they are rounded
    license: str = "other"  # the model's, as the Hub names it (apache-2.0, mit, ..), for the card
    step: int | None = None  # of a checkpoint that was kept; none = the newest
    # mean of the weights of so many checkpoints of checkpoint.every, that one the last of them
    average: int = 1


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    from_hf: FilePath  # a folder in Hugging Face's format
    run: FilePath  # the run to make


def main(argv: list[str]) -> int:
    if any(word.startswith(("--from-hf", "--from_hf", "from_hf=")) for word in argv):
        return command(__doc__, ImportOptions, "run")(
            lambda o: import_checkpoint(o.from_hf, o.run)
        )(argv)
    return command(__doc__, Options, "run", "folder")(
        lambda o: export(o.run, o.folder, o.dtype, o.float8, o.license, o.step, o.average)
    )(argv)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
