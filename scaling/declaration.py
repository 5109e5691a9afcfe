"""study.json: what a study declares before its first run, beside its runs.

Declaration is the schema of the file; docs/schemas.md is made of its fields and comments."""

import os
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.files import write_json
from scaling.records import read_study

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Declaration:
    """What study.json holds. A file of older code has format_version in place of schema_version."""

    schema_version: int  # of this list of keys
    study: str | None  # its name
    declared: str | None  # UTC time of the declaration, ISO 8601
    # difference that counts as equivalent, per cent of the loss; null: none was declared
    margin_percent: float | None
    params: str  # which parameters the budgets count: "total" or "nonembed"
    held_out: list[str]  # runs that are trained only once their prediction is frozen
    runs: list[dict[str, Any]]  # every run, each as below

    @property
    def declared_at(self) -> datetime:
        """Raises ValueError or TypeError where it is no time."""
        return datetime.fromisoformat(self.declared)  # type: ignore[arg-type]

    @property
    def run_names(self) -> list[str]:
        return [run["run"] for run in self.runs]


def read_declaration(folder: Path) -> Declaration | None:
    """The study.json of a folder of runs; None where there is none. Keys that are not there are
    empty. Raises UserError naming the file where it is damaged or of a later version."""
    content = read_study(folder)
    if not content:
        return None
    path = folder / "study.json"
    version = content.get("schema_version", content.get("format_version", SCHEMA_VERSION))
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema_version {version}, and this code reads {SCHEMA_VERSION}: use the"
            " code that wrote it"
        )
    runs = content.get("runs", [])
    if not isinstance(runs, list) or any("run" not in run for run in runs):
        raise UserError(f"{path}: runs must be a list of objects with a key run; restore the file")
    return Declaration(
        schema_version=SCHEMA_VERSION,
        study=content.get("study"),
        declared=content.get("declared"),
        margin_percent=content.get("margin_percent"),
        params=content.get("params", "total"),
        held_out=content.get("held_out", []),
        runs=runs,
    )


def write_declaration(declaration: Declaration, folder: Path) -> None:
    """Write folder/study.json; several sweeps of one study may all be the first."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".study.json.{os.getpid()}"
    write_json(temporary, content_of(declaration))
    os.replace(temporary, folder / "study.json")


def content_of(declaration: Declaration) -> dict[str, Any]:
    return {field.name: getattr(declaration, field.name) for field in fields(declaration)}


def changed_keys(old: Declaration, new: Declaration) -> list[str]:
    """What the new declaration says otherwise than the old one; runs that are only new do not
    count."""
    changes = [
        key
        for key in ("study", "margin_percent", "params")
        if getattr(old, key) != getattr(new, key)
    ]
    rows = {row["run"]: row for row in new.runs}
    for row in old.runs:
        new_row = rows.get(row["run"], {})
        changes += [f"{key} of {row['run']}" for key in row if row[key] != new_row.get(key)]
    return changes
