"""bench/rows.py: the keys of a row, of those that are committed and of new ones."""

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from bench.cells import Cell
from bench.rows import Row, rows_of, schema_section
from lib.errors import UserError
from lib.files import to_line
from tests.conftest import ROOT

KEYS = {f.name for f in fields(Row)}


@pytest.mark.parametrize("name", ["h100", "h100_peers"])
def test_every_key_of_a_committed_row_is_described(name: str) -> None:
    rows = rows_of(ROOT / f"bench/results/{name}.jsonl")
    assert rows
    for row in rows:
        assert row.keys() <= KEYS


def test_every_key_of_a_cell_is_described() -> None:
    assert asdict(Cell("125m", "bf16", 4)).keys() <= KEYS


def test_a_row_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(to_line({"cell": "a/b"}) + to_line({"cell": "a/b", "schema_version": 7}))
    with pytest.raises(UserError, match=r"rows.jsonl, row 2, is of schema_version=7"):
        rows_of(path)


def test_docs_schemas_has_the_section_made_of_the_class_of_today() -> None:
    assert schema_section() in (ROOT / "docs/schemas.md").read_text()
