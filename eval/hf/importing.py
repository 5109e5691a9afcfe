"""A folder in Hugging Face's format becomes a run."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

from eval.hf.config import architecture_named, gpt_config
from eval.hf.files import new_folder, read_object
from eval.hf.weights import from_hf, open_weights
from lib.errors import UserError
from runtime.checkpoint import FORMAT_VERSION, cause, describe, dump, name_of, seal
from runtime.config import Config, DataConfig, OptimConfig
from runtime.tokenizer import keep_tokenizer, load_tokenizer


def import_checkpoint(folder: str, run_dir: str) -> Path:
    """Write the run, weights and tokenizer as they are; returns the folder of its checkpoint: fp32
    weights, no optimizer. Of its config.json the model section and data.tokenizer alone say
    something: nothing was trained here.

    In fp32 on the CPU the logits are transformers' own, bit for bit (transformers 5.23, torch
    2.13), where intermediate_size is a multiple of 32, as in every published model: beyond it
    SiLU's last bit depends on where its vectors end.

    Memory: the whole model as fp32 on the host and one matrix more. Raises UserError where `folder`
    holds no model that can be held exactly (pickles, which can run code, are refused by their
    names, unopened) or `run_dir` exists; OSError where writing failed: then nothing is left."""
    source, target = Path(folder), Path(run_dir)
    if os.path.lexists(target):
        raise UserError(f"{target} exists: choose another out/RUN, or remove that one")
    raw = read_object(source / "config.json", f"{folder} is no downloaded model")
    model = gpt_config(raw)
    if dropout := raw.get("attention_dropout"):
        print(
            f"config.json's attention_dropout={dropout} is left out: nothing is dropped in training"
            " here"
        )
    files, tokenizer = (
        open_weights(source, raw.get("transformers_weights")),
        load_tokenizer(str(source)),
    )
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{source}: its tokenizer has {tokenizer.vocab_size} ids, config.json"
            f" vocab_size={model.vocab_size}"
        )
    config = Config(
        run=target.name,
        out=str(target.parent),
        model=model,
        steps=1,
        optim=OptimConfig(lr=2e-5),
        data=DataConfig(
            dir="data",
            mixture={"imported": 1.0},
            tokens_per_step=model.n_ctx,
            micro_batch=1,
            tokenizer=str(target / "tokenizer"),
        ),
    )
    with new_folder(target) as part:
        checkpoint = part / "checkpoints" / name_of(0)
        checkpoint.mkdir(parents=True)
        keep_tokenizer(part, folder)
        weights = dict(from_hf(model, files, lambda name: files[name].get_tensor(name)))
        write_checkpoint(
            checkpoint,
            config,
            weights,
            {
                "imported": {
                    "folder": source.resolve().name,
                    "architecture": architecture_named(raw),
                    "tokenizer_sha256": tokenizer.sha256,
                }
            },
        )
        (part / "config.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    return target / "checkpoints" / name_of(0)


def write_checkpoint(
    path: Path, config: Config, weights: dict[str, torch.Tensor], state: dict
) -> None:
    """Write the folder `path`, which is there and empty, as a checkpoint of step 0 with `weights`
    (our names) and no moments.

    `state` is plain JSON. Raises OSError. As runtime/checkpoint.py writes them from training, but
    for temporary name and rename."""
    # here: it imports sympy and what shards, a third of the command's start
    from torch.distributed.checkpoint.api import CheckpointException

    tensors = {f"model.{name}": t for name, t in weights.items()}
    try:
        files = dump(path, tensors)
    except CheckpointException as error:
        raise OSError(f"{path} could not be written ({cause(error)})") from error
    seal(
        path,
        {
            "format_version": FORMAT_VERSION,
            "step": 0,
            "state": state,
            "config": asdict(config),
            "torch": str(torch.__version__),
            "world_size": 1,
            "tensors": describe(tensors),
            "files": files,
        },
    )
