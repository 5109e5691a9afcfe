"""bench/rows.py: rows that are committed, older ones and new ones, as they are read and written."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from bench.cells import Cell, our_cell
from bench.judging import compare_with_bf16
from bench.rows import (
    CellFailure,
    CellRow,
    FailedRow,
    TimedRow,
    row_line,
    rows_of,
)
from bench.schemas import ROW_TABLES, schema_page
from fp8.recipes import FP8Config
from lib.errors import UserError
from lib.files import read_rows, to_line
from tests.conftest import ROOT
from tests.helpers.bench_rows import answer, judged, provenance

COMMITTED = [ROOT / f"bench/results/{name}.jsonl" for name in ("h100", "h100_peers")]
BF16_CELL = our_cell("125m", "bf16", 64)
PEER_CELL = replace(BF16_CELL, peer="/x", peer_name="nanochat", peer_precision="fp8")
H200 = "NVIDIA H200"


def timed_row(cell: Cell = BF16_CELL, **changes) -> TimedRow:
    baseline = judged(BF16_CELL, answer())
    kernels, clocks = [("nvjet", 2.0), ("cast_both", 1.0)], {"sm_mhz": 1980.0, "power_w": None}
    measured = answer(1200, kernels=kernels, clocks=clocks, peak_gib=1.5, reserved_gib=2.5)
    row = compare_with_bf16(judged(cell, measured, baseline, gpu=H200), baseline, baseline)
    return replace(row, **changes)


FP8 = FP8Config(recipe="tensorwise", kernels=True, head=True, skip=("attn.out", "layers.0.*"))
FAILED = FailedRow(
    cell=BF16_CELL,
    provenance=provenance(),
    wall_s=9.0,
    failure=CellFailure(failure="out of memory"),
)


@pytest.mark.parametrize(
    "row",
    [
        timed_row(),
        timed_row(replace(BF16_CELL, fp8=FP8)),
        timed_row(replace(BF16_CELL, document_mask=True, model={"n_layer": 2})),
        timed_row(PEER_CELL),
        judged(BF16_CELL, answer()),
        FAILED,
        replace(FAILED, failure=CellFailure(failure="out of memory", oom=True)),
    ],
    ids=["bf16", "fp8", "documents", "peer", "cpu", "failed", "out_of_memory"],
)
def test_a_row_is_read_as_it_was_written(row: CellRow, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(row_line(row))
    assert rows_of(tmp_path / "rows.jsonl") == [row]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_row_keeps_its_keys_and_values_when_it_is_written_anew(path: Path) -> None:
    rows, committed = rows_of(path), read_rows(path)
    assert rows
    for row, values in zip(rows, committed, strict=True):
        assert json.loads(row_line(row)).items() >= _without_version(values).items()


def _without_version(values: dict) -> dict:
    return {key: value for key, value in values.items() if key != "schema_version"}


@pytest.mark.parametrize(
    "label, baseline, cell, size",
    [
        ("bf16", None, BF16_CELL, "125m"),
        ("bf16+documents", "125m bf16", replace(BF16_CELL, document_mask=True), "125m"),
        ("tensorwise+head", "1p5b bf16", our_cell("125m", "tensorwise+head", 64), "1p5b"),
        ("nanochat_fp8", "1p5b bf16", PEER_CELL, "1p5b"),
        ("nanochat_fp8", None, PEER_CELL, "125m"),
    ],
)
def test_what_version_1_lacks_is_read_from_its_label_and_baseline(
    label: str, baseline: str | None, cell: Cell, size: str, tmp_path: Path
) -> None:
    values = json.loads(row_line(timed_row(cell))) | {"label": label, "baseline": baseline}
    for name in ("schema_version", "fp8", "document_mask", "peer_name", "peer_precision"):
        del values[name]
    del values["baseline_size"]
    (tmp_path / "old.jsonl").write_bytes(to_line(values))
    (row,) = rows_of(tmp_path / "old.jsonl")
    assert row.cell == cell
    assert row.compared_size == size


def test_a_row_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row_line(timed_row()) + to_line({"cell": "a/b", "schema_version": 7}))
    with pytest.raises(UserError, match=r"rows.jsonl, row 2, is of schema_version=7"):
        rows_of(path)


@pytest.mark.parametrize("key", ["size", "fp8", "run", "steps_s", "tok_per_s"])
def test_a_row_that_lacks_a_key_is_refused_by_name(key: str, tmp_path: Path) -> None:
    path, values = tmp_path / "rows.jsonl", json.loads(row_line(timed_row()))
    del values[key]
    path.write_bytes(to_line(values))
    with pytest.raises(UserError, match=rf"rows.jsonl, row 1, lacks '{key}'"):
        rows_of(path)


@pytest.mark.parametrize("settings", [5, ["recipe"], {"recipes": "mxfp8"}])
def test_a_row_whose_fp8_is_no_section_is_refused(settings: object, tmp_path: Path) -> None:
    path, values = tmp_path / "rows.jsonl", json.loads(row_line(timed_row()))
    path.write_bytes(to_line(values | {"fp8": settings}))
    with pytest.raises(UserError, match="rows.jsonl, row 1, has fp8=.*section fp8 were expected"):
        rows_of(path)


def test_every_key_of_a_line_is_described() -> None:
    page = schema_page()
    for key in json.loads(row_line(timed_row(PEER_CELL))) | json.loads(row_line(FAILED)):
        assert f"`{key}`" in page


def test_no_key_of_a_line_is_of_two_classes() -> None:
    names = [f.name for cls in ROW_TABLES.values() for f in fields(cls)]
    assert len(set(names)) == len(names)


def test_docs_schemas_has_the_page_made_of_the_classes_of_today() -> None:
    assert schema_page() in (ROOT / "docs/schemas.md").read_text()
