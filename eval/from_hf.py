"""Bring a local Llama-family checkpoint of Hugging Face's layout into a run's folder, weights and tokenizer as they are.

    python -m eval.export --from-hf DIR out/RUN

DIR         config.json, model.safetensors (or its parts and their index), tokenizer.json, tokenizer_config.json
out/RUN     config.json, tokenizer/, checkpoints/step_00000000/ with the weights as fp32 and without an optimizer

What reads a run reads this one: eval.sample, eval.harness, eval.weights, eval.export. A new run trains it on with
start_from=out/RUN/checkpoints/step_00000000 and the same model section (configs/continue_llama.py). Of its config.json the
model section and data.tokenizer alone say something: nothing was trained here.

In fp32 on the CPU the logits are transformers' own, bit for bit (transformers 5.23, torch 2.13), where intermediate_size is a
multiple of 32, as in every published model: beyond it SiLU's last bit depends on where its vectors end.

Memory: the whole model as fp32 on the host and one matrix more, 4 bytes a parameter: about 32 GB for 8 billion. Weights that
can run code when they are read (pickles: .bin, .pt, .pth) are refused by their names, without opening them.
"""

import json
import os
import re
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException: `except Exception` misses it

from eval.hf_layout import from_hf, gpt_config
from model import GPTConfig
from runtime.checkpoint import FORMAT_VERSION, cause, describe, name_of, seal, sha256_of, sync_folder
from runtime.cli import UserError
from runtime.config import Config, DataConfig, OptimConfig
from runtime.tokenizer import keep_tokenizer, load_tokenizer

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
UNSAFE = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def import_checkpoint(folder: str, run_dir: str) -> Path:
    """Write the run; returns the folder of its checkpoint. It appears by one rename: whole or not at all.

    Raises UserError where `folder` holds no model that can be held exactly or `run_dir` exists; OSError where writing failed,
    MemoryError where the model does not fit: then nothing is left.
    """
    source, target = Path(folder), Path(run_dir)
    if not source.is_dir():
        raise UserError(f"{source} is no folder: give the local folder of a downloaded model, the one that holds config.json")
    if os.path.lexists(target):
        raise UserError(f"{target} exists: choose another out/RUN, or remove that one")
    model = gpt_config(_read_json(source / "config.json"))
    files = _weight_files(source)
    tokenizer_sha256 = _check_tokenizer(source, model)
    config = Config(
        run=target.name, out=str(target.parent), model=model, steps=1, optim=OptimConfig(lr=2e-5),
        data=DataConfig(dir="data", mixture={"imported": 1.0}, tokens_per_step=model.n_ctx, micro_batch=1,
                        tokenizer=str(target / "tokenizer")))
    part = target.with_name(f".tmp_{target.name}")
    try:
        shutil.rmtree(part, ignore_errors=True)     # what a killed import left
        checkpoint = part / "checkpoints" / name_of(0)
        checkpoint.mkdir(parents=True)
        _check_space(part, 4 * model.params_total)
        keep_tokenizer(part, folder)
        facts = _facts(source, files, tokenizer_sha256)
        write_checkpoint(checkpoint, config, _read_weights(model, files), {"imported": facts})
        (part / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n")
        for path in [*part.glob("tokenizer/*"), part / "config.json"]:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        for path in (part / "tokenizer", checkpoint.parent, part):
            sync_folder(path)
        os.rename(part, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return target / "checkpoints" / name_of(0)


# ------------------------------------------------------------------------------------------------------- what is there

def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no table")
        return content
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {path.name}: give the folder of a downloaded model") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON of a model ({error}): download it again") from error


def _weight_files(source: Path) -> dict[str, Path]:
    """The file of each tensor, by the index where there is one. Raises UserError: none, unsafe, damaged, not all there."""
    if (source / INDEX).is_file():
        place = _read_json(source / INDEX).get("weight_map")
        if not isinstance(place, dict) or not place or not all(isinstance(name, str) for name in place.values()):
            raise UserError(f"{source / INDEX} has no weight_map from tensors to files: download it again")
    elif (source / WHOLE).is_file():
        place = dict.fromkeys(_names(source / WHOLE), WHOLE)
    else:
        other = sorted(path.name for path in source.iterdir() if path.suffix in (*UNSAFE, ".gguf", ".safetensors"))
        raise UserError(f"{source} has neither {WHOLE} nor {INDEX}" + (
            f", but {', '.join(other[:3])}: pickles can run code and GGUF is no training format, so neither is read; get the "
            f"model as safetensors, under these names" if other else ": download the model's safetensors"))
    for name in set(place.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{source / INDEX} names {name!r}, which is no safetensors file of this folder: it is not opened")
        if absent := sorted({tensor for tensor, file in place.items() if file == name} - set(_names(source / name))):
            raise UserError(f"{source / name} lacks {absent[0]}, which the index has there: download both again")
    return {tensor: source / name for tensor, name in place.items()}


def _names(path: Path) -> list[str]:
    with ExitStack() as ending:
        return list(_open(path, ending).keys())


def _open(path: Path, ending: ExitStack):
    """A safetensors file, closed by `ending`: its header is checked against its length, nothing is read yet."""
    from safetensors import SafetensorError, safe_open
    try:
        return ending.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is not there: the download is incomplete") from error
    except SafetensorError as error:
        raise UserError(f"{path} is no whole safetensors file ({error}): download it again") from error


def _check_tokenizer(source: Path, model: GPTConfig) -> str:
    """The SHA-256 of the tokenizer in the folder, whose ids must all have a row in the model."""
    tokenizer = load_tokenizer(str(source))
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(f"{source}: its tokenizer has {tokenizer.vocab_size} ids, but config.json has vocab_size="
                          f"{model.vocab_size}: the two do not belong together")
    return tokenizer.sha256


def _facts(source: Path, files: dict[str, Path], tokenizer_sha256: str) -> dict:
    """Where the weights come from, for the manifest and the model card."""
    raw = _read_json(source / "config.json")
    hashed = {path.name: path for path in (source / "config.json", source / "tokenizer.json", *files.values())}
    readme = source / "README.md"
    head = re.match(r"---\n(.*?)\n---", readme.read_text(errors="replace"), re.S) if readme.is_file() else None
    licence = re.search(r"^license: *([\w.-]+) *$", head[1], re.M) if head else None
    cached = re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+$", source.resolve().as_posix())     # by the Hub's client
    return {"model": f"{cached[1]}/{cached[2]}" if cached else None, "folder": source.resolve().name,
            "architecture": raw["architectures"][0], "tokenizer_sha256": tokenizer_sha256,
            "license": licence[1] if licence else None, "files": {name: sha256_of(path) for name, path in sorted(hashed.items())}}


# -------------------------------------------------------------------------------------------------------------- writing

def _read_weights(model: GPTConfig, files: dict[str, Path]) -> dict[str, torch.Tensor]:
    """All weights by our names, fp32; of what is stored otherwise one tensor at a time is in memory."""
    with ExitStack() as ending:
        opened = {path: _open(path, ending) for path in set(files.values())}
        try:
            return dict(from_hf(model, files, lambda name: opened[files[name]].get_tensor(name)))
        except RuntimeError as error:       # torch's allocator says so in words alone
            if "allocate memory" in str(error):
                raise MemoryError(f"the model takes {4 * model.params_total / 1e9:.1f} GB as fp32") from error
            raise


def write_checkpoint(path: Path, config: Config, weights: dict[str, torch.Tensor], state: dict) -> None:
    """Write the folder `path`, which is there and empty, as a checkpoint of step 0 with `weights` (our names) and no moments.

    `state` is plain JSON. Raises OSError. As runtime/checkpoint.py writes them from training, but for temporary name and rename.
    """
    tensors = {f"model.{name}": t for name, t in weights.items()}
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")      # one process is no mistake
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    except CheckpointException as error:
        raise OSError(f"{path} could not be written ({cause(error)})") from error
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in sorted(path.iterdir())}
    seal(path, {"format_version": FORMAT_VERSION, "step": 0, "state": state, "config": config.to_dict(),
                "torch": str(torch.__version__), "world_size": 1, "tensors": describe(tensors), "files": files})


def _check_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < 1.01 * need:
        raise OSError(f"the model takes {_size(need)} as fp32 in {folder.parent}, and {_size(free)} are free")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
