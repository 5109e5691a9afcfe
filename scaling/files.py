"""Handle the files that runs leave: a damaged one gets a sentence, a new one is never half there."""

import gzip
import json
import os
import zlib
from pathlib import Path

from runtime.cli import UserError


def read_bytes(path) -> bytes:
    """The content of a file, or of its .gz where only that is there, as results are published; b"" where neither is.

    Raises UserError for a file that cannot be read, a .gz that is cut off or damaged."""
    path = Path(path)
    packed = path.with_name(path.name + ".gz")
    try:
        if path.is_file():
            return path.read_bytes()
        if not packed.is_file():
            return b""
        if not (content := packed.read_bytes()):
            raise EOFError("it is empty")       # gzip takes that for no text
        return gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{packed} cannot be unpacked ({error}): the file is cut off or edited; restore it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def read_text(path) -> str:
    """What read_bytes gives, as text; bytes that are not UTF-8 become a sign that says so."""
    return read_bytes(path).decode(errors="replace")


def read_json(path: Path) -> dict:
    """The object that a JSON file holds. Raises UserError naming the file where it cannot be read or holds none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): the file is cut off or edited; restore it") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def read_study(root: Path) -> dict:
    """The study.json of a folder of runs; {} where there is none. Raises UserError where it cannot be read."""
    path = root / "study.json"
    if not path.is_file():
        return {}
    study = read_json(path)
    runs, held = study.get("runs", []), study.get("held_out", [])
    if not isinstance(held, list) or not all(isinstance(name, str) for name in held):
        raise UserError(f"{path}: held_out must be a list of runs' names; write it anew: scaling/sweep.py")
    if not isinstance(runs, list) or not all(isinstance(run, dict) and isinstance(run.get("run"), str) for run in runs):
        raise UserError(f"{path}: runs must be a list of objects, each with its run's name; write it anew: scaling/sweep.py")
    for run in runs:
        parent, step = run.get("parent"), run.get("parent_step")
        if not (parent is None or isinstance(parent, str) and isinstance(step, int)):
            raise UserError(f"{path}: {run['run']} has the parent {parent!r} at step {step!r}; expected a run's name and a "
                              "whole number, or null; write it anew: scaling/sweep.py")
    return study


def write(path: Path, content: bytes) -> None:
    """Write by a temporary name, so that a reader finds the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
