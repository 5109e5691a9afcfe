"""law.json and predictions: their keys, the page that describes them, and files of older code."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.errors import UserError
from scaling import law_file, predictions
from scaling.groups import fit_group, fit_points
from scaling.law_file import (
    SCHEMA_VERSION,
    BudgetEntry,
    GroupEntry,
    LackOfFitEntry,
    LawEntry,
    LawsOfRuns,
    RefitEntry,
    SeedNoise,
    group_entry,
    laws_of_runs,
    laws_of_table,
    plain,
    read_law_file,
)
from scaling.predictions import PredictionFile
from scaling.records import read_runs
from scaling.table_points import TableSource, read_points
from tests.conftest import ROOT
from tests.helpers.law_points import early, made
from tests.helpers.scaling_runs import edit, strict, write_ladder, write_prediction
from tests.law_trials import bent_valleys

PAGES = (law_file.schema_page(), predictions.schema_page())


@pytest.mark.parametrize("page", PAGES, ids=["laws", "predictions"])
def test_docs_schemas_is_made_of_the_classes_of_today(page: str):
    assert page in (ROOT / "docs/schemas.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=["laws", "predictions"])
def test_every_key_has_a_meaning(page: str):
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows
    for row in rows:
        _, kind, meaning = row.strip("| ").split(" | ", 2)
        assert kind and meaning, row


def keys(cls: type, *absent: str) -> set[str]:
    return {f.name for f in fields(cls)} - {"parameters", *absent}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def group() -> dict[str, Any]:
    """The laws of a grid whose early points lie off, as law.json has them."""
    return plain(group_entry(fit_points(early(0.3), "early.csv", resamples=0)))


def test_a_group_has_the_keys_of_the_schema(group: dict[str, Any]):
    assert set(group) == keys(GroupEntry)
    assert set(group["lack_of_fit"]) == keys(LackOfFitEntry)


def test_a_law_has_its_parameters_beside_the_keys_of_the_schema(group: dict[str, Any]):
    parameters = {"E", "A", "B", "alpha", "beta", "a", "b", "gamma"}
    assert set(group["laws"]["chinchilla"]) == keys(LawEntry) | parameters


def test_the_names_that_scripts_rely_on_stay(group: dict[str, Any]):
    names = ("A", "B", "E", "alpha", "beta", "objective", "starts", "starts_at_best")
    assert all(isinstance(group["laws"]["chinchilla"][name], int | float) for name in names)


def test_minima_of_budgets_have_the_keys_of_the_schema():
    group = plain(group_entry(fit_points(bent_valleys(), "isoflop.csv", resamples=0)))
    isoflop = group["laws"]["isoflop"]
    assert isinstance(isoflop["a"], float)
    assert set(isoflop["budgets"][0]) == keys(BudgetEntry)


@pytest.mark.parametrize(("variant", "has_errors"), [("declared", False), ("leave out N", True)])
def test_a_choice_has_the_errors_on_what_is_left_out_alone(variant: str, has_errors: bool):
    group = plain(group_entry(fit_points(made(), "made.csv", resamples=0)))
    row = next(row for row in group["robustness"] if row["variant"] == variant)
    absent = () if has_errors else ("error_percent", "largest_error_percent")
    assert set(row) >= keys(RefitEntry, *absent)
    assert ("error_percent" in row) == has_errors


def test_law_json_of_runs_has_the_keys_of_the_schema(tmp_path: Path):
    records = read_runs([write_ladder(tmp_path / "out")])[0]
    bf16 = [record for record in records if record.is_baseline]
    content = laws_of_runs([fit_group(bf16)], "loss_bf16", SeedNoise(None, 0, 0.0), [])
    assert set(content) == keys(LawsOfRuns)
    assert content["schema_version"] == SCHEMA_VERSION


def test_law_json_of_a_table_has_the_keys_of_its_group(tmp_path: Path):
    points = made()
    table = np.transpose([points.N, points.D, points.loss])
    np.savetxt(tmp_path / "p.csv", table, "%.12g", ",", header="N,D,loss", comments="")
    selection = read_points(tmp_path / "p.csv", "N", "loss", "D")
    group = fit_points(selection.points, "p.csv", resamples=0)
    content = laws_of_table(group, selection.source, selection.notes)
    assert set(content) == {"schema_version", "delta", "source", "notes"} | keys(GroupEntry)
    assert set(content["source"]) == keys(TableSource)


def test_what_json_lacks_is_null():
    fit = fit_points(made(), "made.csv", resamples=0).laws["chinchilla"]
    fit.parameters["A"] = float("inf")
    assert plain(law_file.law_entry(fit))["A"] is None


def test_a_prediction_has_the_keys_of_the_schema(tmp_path: Path):
    target = dict.fromkeys(("params_total", "params_nonembed", "params_matmul", "tokens"), 10)
    write_prediction(tmp_path, target | {"name": "x", "recipe": "bf16", "flops_per_token": 60})
    content = strict(tmp_path / "prediction_x.json")
    assert list(content) == [f.name for f in fields(PredictionFile)]


@pytest.mark.parametrize("version", [{"format_version": 2}, {}, {"schema_version": 3}])
def test_files_of_older_code_are_read(tmp_path: Path, version: dict[str, int]):
    edit(tmp_path / "law.json", **version, laws={})
    assert read_law_file(tmp_path / "law.json")["laws"] == {}


@pytest.mark.parametrize("version", [{"format_version": 1}, {"schema_version": 4}])
def test_a_file_of_another_version_is_refused_by_name(tmp_path: Path, version: dict[str, int]):
    (tmp_path / "law.json").write_text(json.dumps(version))
    with pytest.raises(UserError, match=r"law\.json has schema_version .* make it anew"):
        read_law_file(tmp_path / "law.json")
