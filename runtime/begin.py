"""Begin a run from a checkpoint of another: the rest of a schedule, or the weights of an imported model alone.

A branch goes on with all that its parent had (weights, moments, step); see runtime/optim.py for when it may. An imported
checkpoint (eval/from_hf.py) is at step 0 and holds weights alone: the run has a data order, moments and schedule of its own.
"""

from dataclasses import asdict, replace
from pathlib import Path

import torch

from runtime.checkpoint import branch_point, load, read_manifest
from runtime.config import Config, ConfigError, config_from_dict
from runtime.optim import check_branch

FREE = {"n_ctx", "loss_chunk"}      # of the model section: no weight depends on them


def branch(config: Config, tokenizer_sha256: str, tensors: dict[str, torch.Tensor], world) -> tuple[Path, dict]:
    """Fill `tensors` ("model." and "optim." names), in place, from the checkpoint config.start_from; its path and manifest.

    Of a checkpoint that is_weights_only() the weights alone are filled. By all ranks of `world` together. Raises ConfigError
    where there is no such checkpoint, it is damaged, or it does not fit this run.
    """
    path = Path(config.start_from)
    if config.parent[1] == 0 and not path.is_dir():     # training writes none of step 0
        raise ConfigError(f"start_from={path} is not there: import the model first, python -m eval.export --from-hf DIR "
                          f"{path.parent.parent}")
    checkpoint = branch_point(config)
    manifest = read_manifest(checkpoint)
    if is_weights_only(manifest):
        check(config, manifest, tokenizer_sha256)
        tensors = {name: t for name, t in tensors.items() if name.startswith("model.")}
    else:
        check_branch(config, config_from_dict(manifest["config"]), manifest["step"])
    load(checkpoint, manifest, tensors, world)
    return checkpoint, manifest


def is_weights_only(manifest: dict) -> bool:
    """Whether a checkpoint is an imported model: no moments, no place in a data order."""
    return "imported" in manifest["state"]


def origin_of(manifest: dict) -> dict | None:
    """What was imported (see eval/from_hf.py) that a checkpoint's weights go back to; None where they began from nothing."""
    return manifest["state"].get("imported") or manifest["state"].get("origin")


def check(config: Config, manifest: dict, tokenizer_sha256: str) -> None:
    """That the imported weights mean in `config` what they meant where they come from. Raises ConfigError with what differs."""
    parent = config_from_dict(manifest["config"])
    theirs, ours = (asdict(replace(c.model, n_kv_head=c.model.kv_heads)) for c in (parent, config))
    where = f"start_from={config.start_from}"
    if changes := [f"model.{key} is {theirs[key]} there, {ours[key]} here" for key in ours
                   if key not in FREE and ours[key] != theirs[key]]:
        raise ConfigError(f"{where} is another model: {'; '.join(changes)}; give the model section of its config.json, of which "
                          f"n_ctx and loss_chunk alone are free")
    if tokenizer_sha256 != manifest["state"]["imported"]["tokenizer_sha256"]:
        raise ConfigError(f"{where} was imported with another tokenizer than data.tokenizer={config.data.tokenizer}, so its ids "
                          f"mean other text: give data.tokenizer={Path(config.start_from).parent.parent / 'tokenizer'}, and "
                          f"shards that were prepared with it")
