"""Read the tokenizer of a run, which must be the one that its model was trained with."""

import json
from pathlib import Path

from runtime.checkpoint import latest
from runtime.cli import UserError
from runtime.config import Config
from runtime.tokenizer import Tokenizer, load_tokenizer, tokenizer_of


def read_tokenizer(config: Config, run_dir: str | Path) -> Tokenizer:
    """The tokenizer of a run; where it is a folder the run's own copy, or without one what the config names.

    Raises UserError where it cannot be read, or its ids mean other text than in the model's training.
    """
    tokenizer = load_tokenizer(tokenizer_of(Path(run_dir), config.data.tokenizer))
    trained = _trained_with(Path(run_dir))
    if trained not in (None, tokenizer.sha256):
        remedy = (f"put that one back as {Path(run_dir) / 'tokenizer'}" if tokenizer.kind == "folder" else
                  "use the version that trained it")
        raise UserError(f"the tokenizer {tokenizer.name} is not the one that the model of {run_dir} was trained with "
                          f"({tokenizer.sha256[:9]}..., not {trained[:9]}...): {remedy}")
    return tokenizer


def _trained_with(run_dir: Path) -> str | None:
    """The SHA-256 that the newest checkpoint's manifest holds, of an import with its source, else summary.json's.

    None where neither tells. Damage is no matter here: who loads the checkpoint says so.
    """
    newest = latest(run_dir)
    state = _table(_read(newest / "manifest.json").get("state")) if newest else {}
    for holder in (state, _table(state.get("imported")), _read(run_dir / "summary.json")):
        if isinstance(sha256 := holder.get("tokenizer_sha256"), str):
            return sha256
    return None


def _read(path: Path) -> dict:
    try:
        return _table(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def _table(value) -> dict:
    return value if isinstance(value, dict) else {}
