"""Read and write the files of a run so that a kill leaves all of a change or nothing of it.

Rows of metrics.jsonl, in the order in which things happened:

    {"kind": "train", "step", "loss", "verdict", ...}       a step; "val": a validation after it
    {"kind": "undone", ...}, {"kind": "undone_val", ...}    the same in a stretch that a rollback took back
    {"kind": "event", "event": name, "step", ...}           what else happened: a resume, a rollback, a failed save
"""

import json
import math
import os
from pathlib import Path

UNDONE = {"train": "undone", "val": "undone_val"}       # kind of a row -> its kind after a rollback


def read_rows(path: str | Path) -> list:
    """The values of a file of JSON lines; a line that cannot be read, as the last that a kill cut short, is left out."""
    return parse(read_bytes(path))


def parse(content: bytes) -> list:
    values = []
    for line in content.splitlines():
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return values


def metrics_rows(values: list) -> list[dict]:
    """What of a metrics.jsonl is a row: an object with a kind and a step."""
    return [row for row in values
            if isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("kind"), str)]


def kept(rows: list[dict], step: int) -> list[dict]:
    """The rows, in file order, that a run resumed from `step` keeps: up to that step's, and what was noted right after.

    Steps of train rows ascend, since a rollback relabels; the same step may stand earlier among the undone."""
    end = max((i for i, row in enumerate(rows, 1) if row["kind"] == "train" and row["step"] <= step), default=0)
    while end < len(rows) and rows[end]["kind"] in ("val", "event") and rows[end]["step"] == step:
        end += 1
    return rows[:end]


def undone(rows: list[dict], to_step: int) -> list[dict]:
    """The rows after a rollback to `to_step`: steps and validations after it get kinds of their own."""
    return [row if row["step"] <= to_step else row | {"kind": UNDONE.get(row["kind"], row["kind"])} for row in rows]


def to_line(row: dict) -> bytes:
    """A row as strict JSON: NaN and infinities become null, for which JSON has no words."""
    return (json.dumps(_strict(row), allow_nan=False) + "\n").encode()


def read_bytes(path: str | Path) -> bytes:
    """All of a file, nothing where there is none."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return b""


def write_atomically(path: Path, content: str | bytes) -> None:
    """All of `content` at `path` or what was there before, never half of it."""
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        with open(tmp, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())     # a rename can outlive a power cut that the file's content does not
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def write_json(path: Path, value: dict) -> None:
    """Strict JSON: a NaN in it is our mistake, not the reader's."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def _strict(value):
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
