"""eval/results.py: what is written is what is read; older files, other versions, the page."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.results import (
    Metric,
    ScoreRecord,
    TaskScores,
    read_scores,
    schema_section,
    write_scores,
)
from lib.errors import UserError
from tests.conftest import ROOT

RECORD = ScoreRecord(
    run="out/a",
    step=3,
    time="2026-01-01T00:00:00+00:00",
    tasks={
        "piqa": TaskScores(
            metrics={"acc": Metric(0.5, 0.01), "acc_norm": Metric(0.625, None)},
            version=1.0,
            not_scored=["brier_score"],
            n=8,
            num_fewshot=0,
            chance=0.5,
            docs_sha256="d",
            samples="samples_piqa.jsonl.gz",
        ),
        "openllm": TaskScores(version=None, subtasks=["piqa"]),
    },
    limit=None,
    dtype="bfloat16",
    fp8="off",
)


def edited(path: Path, **changes: Any) -> Path:
    """The file with keys changed; ... removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_scores(tmp_path / "core.json", RECORD)
    return tmp_path / "core.json"


def test_what_is_written_is_read(file: Path) -> None:
    assert read_scores(file) == RECORD


def test_a_metric_is_two_keys_of_its_tasks_row(file: Path) -> None:
    row = json.loads(file.read_text())["tasks"]["piqa"]
    assert (row["acc"], row["acc_se"], row["acc_norm"], row["acc_norm_se"]) == (
        0.5,
        0.01,
        0.625,
        None,
    )


def test_a_file_from_before_the_versions_is_read(file: Path) -> None:
    assert read_scores(edited(file, schema_version=...)) == RECORD


def test_another_version_is_refused_by_name(file: Path) -> None:
    with pytest.raises(UserError, match=r"core.json is of schema_version=7, and this code reads 1"):
        read_scores(edited(file, schema_version=7))


def test_scores_without_the_documents_hash_are_damaged(file: Path) -> None:
    with pytest.raises(UserError, match=r"core.json is damaged \(KeyError: 'docs_sha256'\)"):
        read_scores(edited(file, tasks={"piqa": {"acc": 0.5, "acc_se": 0.1}}))


def test_docs_schemas_has_the_section_made_of_the_classes_of_today() -> None:
    assert schema_section() in (ROOT / "docs/schemas.md").read_text()
