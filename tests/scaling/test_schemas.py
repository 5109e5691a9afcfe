"""docs/schemas.md: made of the dataclasses of today, each key with its meaning, and the files hold
what it says."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from lib.help import field_meanings
from scaling import learning_rate, precision, report
from scaling.declaration import Declaration, read_declaration
from scaling.precision_result import PrecisionResult, SizeGap, read_precision
from scaling.rate_sweep import RateResult, read_result
from scaling.reason_words import worded
from scaling.schemas import SECTIONS, schema_page
from scaling.study_report import StudyReport
from scaling.training_report import RunReport, TrainingReport, read_training_report
from scaling.typed_json import read_typed
from tests.conftest import ROOT
from tests.helpers.scaling_runs import strict, write_ladder, write_run


def test_docs_schemas_is_made_of_the_classes_of_today() -> None:
    assert schema_page() in (ROOT / "docs/schemas.md").read_text()


@pytest.mark.parametrize(
    "cls",
    sorted(set(SECTIONS.values()), key=lambda cls: cls.__name__),
    ids=lambda cls: cls.__name__,
)
def test_every_key_has_a_meaning(cls: type) -> None:
    meanings = field_meanings(cls)
    assert [field.name for field in fields(cls) if not meanings.get(field.name)] == []


def keys(cls: type) -> set[str]:
    return {field.name for field in fields(cls)}


@pytest.fixture
def runs(tmp_path: Path, no_figures: None) -> Path:
    return write_ladder(tmp_path / "runs", curve=True, data_sha256="d" * 64)


def test_precision_json_holds_the_keys_of_its_schema(runs: Path) -> None:
    precision.main([str(runs)])
    content = strict(runs / "law/precision.json")
    assert set(content) == keys(PrecisionResult)
    assert set(content["sizes"][0]) == keys(SizeGap)


def test_precision_json_is_read_as_it_was_written(runs: Path) -> None:
    """Also where a recipe is left out of the ranking: it converts no Linear."""
    idle = {"recipe": "auto", "compile": False, "layers_converted": []}
    write_run(runs / "idle", recipe="auto", precision=idle)
    precision.main([str(runs)])
    path = runs / "law/precision.json"
    assert json.loads(json.dumps(worded(read_precision(path)))) == strict(path)


def test_report_json_of_one_training_holds_the_keys_of_its_schema(runs: Path) -> None:
    assert report.main([str(runs / "a_bf16"), str(runs / "a_fp8")]) == 0
    path = runs / "law/report.json"
    content = strict(path)
    assert set(content) == keys(TrainingReport)
    assert set(content["runs"][0]) == keys(RunReport)
    assert asdict(read_training_report(path)) == content


def test_report_json_of_a_study_holds_the_keys_of_its_schema(runs: Path) -> None:
    report.main(["--study", str(runs)])
    path = runs / "report.json"
    assert set(strict(path)) == keys(StudyReport)
    assert asdict(read_typed(StudyReport, path, 1, "report")) == strict(path)


def test_learning_rate_json_is_read_as_it_was_written(tmp_path: Path, no_figures: None) -> None:
    for lr in (0.001, 0.002, 0.004):
        loss = 2.0 + abs(lr - 0.002)
        write_run(tmp_path / f"lr{lr:g}", lr_peak=lr, loss=loss)
    assert learning_rate.main([str(tmp_path)]) == 0
    path = tmp_path / "law/learning_rate.json"
    assert set(strict(path)) == keys(RateResult)
    assert json.loads(json.dumps(worded(read_result(path)))) == strict(path)


def test_the_declaration_of_older_code_is_read() -> None:
    """studies/cpu/study.json has format_version in place of schema_version."""
    declaration = read_declaration(ROOT / "studies/cpu")
    assert isinstance(declaration, Declaration)
    assert declaration.margin_percent and len(declaration.runs) > 700


@pytest.mark.parametrize(
    "read, name",
    [
        (read_precision, "precision.json"),
        (read_result, "learning_rate.json"),
        (read_training_report, "report.json"),
        (lambda path: read_declaration(path.parent), "study.json"),
    ],
    ids=["precision", "learning_rate", "training", "study"],
)
def test_a_file_of_another_version_is_refused_by_name(
    tmp_path: Path, read: Callable[[Path], object], name: str
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(Exception, match=f"{name}.* 99"):
        read(path)
