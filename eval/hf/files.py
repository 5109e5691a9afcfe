"""Folders and JSON as both directions write and read them."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lib.errors import UserError
from lib.files import alone
from runtime.checkpoint import sync_folder


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `target`, an empty one at most, when all in there is on the
    disk: whole or not there."""
    part = target.with_name(f".tmp_{target.name}")
    with alone(target.parent):  # srun starts as many commands as there are tasks
        shutil.rmtree(part, ignore_errors=True)  # what a kill left
        part.mkdir()
        try:
            yield part
            for path in (*part.rglob("*"), part):
                sync_folder(path)
            os.replace(part, target)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def as_json(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def read_object(path: Path, otherwise: str) -> dict:
    """The JSON object that a file holds. Raises UserError, which begins with `otherwise`, where it
    holds none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{otherwise}: its {path.name} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{otherwise}: its {path.name} holds {type(content).__name__} where an object, {{...}},"
            " is needed"
        )
    return content
