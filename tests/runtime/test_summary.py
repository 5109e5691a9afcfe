"""summary.json: its keys in their order, and the page that describes them."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from runtime.config import Config, FP8Config
from runtime.metrics_file import EVENTS
from runtime.parallel import World
from runtime.run_start import Progress, Start, StartKind
from runtime.summary import PrecisionSummary, SourceSummary, Summary, _precision, schema_page
from tests.conftest import ROOT, changed


def test_docs_schemas_is_made_of_the_classes_of_today():
    assert (ROOT / "docs/schemas.md").read_text().startswith(schema_page())


def test_every_key_of_a_summary_has_a_meaning():
    for line in schema_page().splitlines():
        if line.startswith("| `"):
            key, kind, meaning = [cell.strip() for cell in line.strip("| ").split(" | ")]
            assert meaning, key


def test_the_page_names_the_events_that_a_run_writes():
    """Found in the source: the words of _log_event(), of rows, and of the reports on copies."""
    source = "".join(path.read_text() for path in (ROOT / "runtime").glob("*.py"))
    forms = (
        r'_log_event\(\s*"(\w+)"',
        r'"event": "(\w+)"',
        r'\(?"(cop[a-z]+_?\w*)", (?:f"|sentence)',
    )
    written = {name for form in forms for name in re.findall(form, source)}
    starts = {"resume", "branch"}  # chosen by the kind of the start
    assert written | starts == set(EVENTS)


@pytest.mark.parametrize(
    "trunk, own, bits",
    [
        (None, "off", 16),
        (None, "nvfp4", 4),
        ("off", "rowwise", 8),
        ("rowwise", "off", 8),
        ("nvfp4", "rowwise", 4),
        ("rowwise", "nvfp4", 4),
    ],
)
def test_bits_are_the_fewest_of_a_run_and_of_its_trunk(
    tiny: Config, trunk: str | None, own: str, bits: int
) -> None:
    trunks = () if trunk is None else (FP8Config(recipe=trunk),)
    start = Start(StartKind.SWITCHED_BRANCH, Progress(), trunk_precisions=trunks)
    config = replace(tiny, fp8=FP8Config(recipe=own))
    world = World(0, 0, 1, torch.device("cpu"))
    assert _precision(config, world, [], start).bits == bits


@pytest.fixture
def summary(tiny: Config, run: Callable[..., str]) -> dict:
    """summary.json of a run in FP8."""
    config = changed(tiny, "fp8.recipe=tensorwise")
    run(config)
    return json.loads((config.run_dir / "summary.json").read_text())


JSON_TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


def test_summary_json_has_the_keys_order_and_types_of_the_schema(summary: dict):
    parts = {
        Summary: summary,
        PrecisionSummary: summary["precision"],
        SourceSummary: summary["sources"]["web"],
    }
    for cls, part in parts.items():
        assert list(part) == [f.name for f in fields(cls)]
    kinds = {}
    for line in schema_page().splitlines():
        if line.startswith("| `"):
            key, kind, _ = line.strip("| ").split(" | ", 2)
            kinds[key.strip("`")] = kind
    for part in parts.values():
        for key, value in part.items():
            allowed = [JSON_TYPES[kind] for kind in kinds[key].split(" or ")]
            assert any(isinstance(value, kind) for kind in allowed), key
