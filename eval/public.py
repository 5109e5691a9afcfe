"""Load a public model for the harness: `hf:gpt2`, or `hf:/a/folder` in Hugging Face's format.

lm-eval's own class for transformers answers for it, so the requests, the tasks and the table are the same as for our runs
and only the model differs. transformers and accelerate are needed here and nowhere else. Weights come from safetensors
alone, and no code that a model brings along is run.
"""

import importlib.metadata
import os
import re
from pathlib import Path

from runtime.cli import UserError
from runtime.machine import memory_error

UNPICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf")   # weights in a folder that are no safetensors


def public_dir(name: str, out: str = "out") -> Path:
    """Where the scores of hf:NAME lie: out/hf_<name>, what no file name should hold replaced."""
    return Path(out) / ("hf_" + (re.sub(r"[^\w.-]+", "_", name).strip("_") or "model")[-150:])


def public_lm(name: str, device, dtype: str, micro_batch: int):
    """lm-eval's model for `name`, a repository of the Hub or a local folder.

    dtype: "bfloat16" or "float32". Requests that lose their beginning are not counted: n_truncated is None. Raises
    UserError: transformers lacks, no such model, no network, weights that are not safetensors, code of the model's own.
    """
    folder = Path(name).expanduser()
    is_local = bool(name) and folder.is_dir() or name.startswith(("/", "./", "../", "~"))
    if is_local:
        _check_folder(folder, name)
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or ".." in name:
        raise UserError(f"hf:{name} is neither a folder nor a name such as hf:gpt2 or hf:EleutherAI/pythia-160m")
    try:
        import accelerate  # noqa: F401  lm-eval imports it too; its absence would be told less well there
        import transformers
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(f"hf:{name} is read by transformers, which our own runs do without ({error}): "
                          f"pip install transformers accelerate") from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:    # lm-eval refuses a model's own code unless told otherwise
        lm = HFLM(pretrained=str(folder) if is_local else name, device=str(device), dtype=dtype, batch_size=micro_batch,
                  use_safetensors=True,
                  softmax_dtype="float32")      # as ours: BF16 holds a log-likelihood to three digits
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:      # foreign code and foreign files: whatever it raises, name the model
        raise UserError(_sentence(name, is_local, error)) from error
    lm.n_truncated, lm.version = None, importlib.metadata.version("lm_eval")
    return lm


def _check_folder(folder: Path, name: str) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"hf:{name} has no config.json: expected a folder as eval.export writes it, with config.json, "
                          f"*.safetensors and the tokenizer's files")
    if not any(folder.glob("*.safetensors")):
        other = sorted(p.name for p in folder.iterdir() if p.suffix in UNPICKLED)
        raise UserError(f"hf:{name} has no *.safetensors" + (
            f", only {', '.join(other[:3])}, which can run code when read: convert it to safetensors first" if other else ""))


def _sentence(name: str, is_local: bool, error: Exception) -> str:
    said = (str(error).strip().splitlines() or [""])[0][:300]
    text = str(error).lower()
    if "remote" in text and "code" in text:
        return f"hf:{name} brings code of its own, which is not run here: choose a model that transformers knows by itself"
    if memory_error(error):
        return f"hf:{name} does not fit into the memory of the device: try dtype=bfloat16, a smaller micro_batch or device=cpu"
    if is_local:
        return f"hf:{name} could not be loaded ({type(error).__name__}: {said})"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return (f"hf:{name} could not be loaded without network ({type(error).__name__}: {said}): it must lie in the Hub's "
                f"cache; leave out offline= once, or give a local folder as hf:/a/folder")
    return (f"hf:{name} could not be loaded ({type(error).__name__}: {said}): check the name, that it has safetensors, and that "
            f"the Hugging Face Hub is in reach, or give a local folder as hf:/a/folder")
