"""What a run was trained in is read from the settings in its summary; from its label in old files
alone."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from fp8.recipes import RECIPES, FP8Config
from fp8.trained_precision import read_precision, settings_in_label
from tests.conftest import process


def summary_of(*precisions: FP8Config, label: str | None = None) -> dict[str, Any]:
    """As a run's file holds it; the last precision is its own, those before it its trunks'."""
    *trunks, own = precisions
    stored = [asdict(fp8) if fp8.is_on else None for fp8 in precisions]
    precision = {
        "recipe": label or own.label,
        "fp8": stored[-1],
        "bits": min(fp8.bits for fp8 in precisions),
        "switched_from": ">".join(fp8.label for fp8 in trunks) or None,
        "switched_from_fp8": stored[:-1],
    }
    return json.loads(json.dumps({"precision": precision}))


def without_settings(summary: dict[str, Any]) -> dict[str, Any]:
    """The same run's file by older code."""
    new_keys = ("fp8", "bits", "switched_from_fp8")
    kept = {key: value for key, value in summary["precision"].items() if key not in new_keys}
    return {"precision": kept}


BF16, TENSORWISE, NVFP4 = FP8Config(), FP8Config(recipe="tensorwise"), FP8Config(recipe="nvfp4")


@pytest.mark.parametrize(
    "precisions, is_bf16, is_switched, name",
    [
        ([BF16], True, False, "BF16"),
        ([TENSORWISE], False, False, "FP8 tensorwise"),
        ([FP8Config(recipe="auto")], False, False, "FP8 auto"),
        ([NVFP4, BF16], False, True, "FP4 nvfp4>bf16"),
        ([BF16, NVFP4], False, True, "FP4 bf16>nvfp4"),
        ([BF16, TENSORWISE, BF16], False, True, "FP8 bf16>tensorwise>bf16"),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_a_summary_says_what_a_run_was_trained_in(precisions, is_bf16, is_switched, name, is_old):
    summary = summary_of(*precisions)
    precision = read_precision(without_settings(summary) if is_old else summary)
    assert (precision.is_bf16, precision.is_switched) == (is_bf16, is_switched)
    assert precision.display_name == name


def test_nothing_is_read_out_of_the_label_of_a_summary_that_has_settings():
    """A label that says otherwise changes the name alone."""
    precision = read_precision(summary_of(TENSORWISE, label="nvfp4"))
    assert precision.display_name == "FP8 nvfp4"
    assert read_precision(summary_of(BF16, label="rowwise")).is_bf16
    assert not read_precision(summary_of(TENSORWISE, label="bf16")).is_bf16


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_older_label_tells_the_number_format(recipe):
    summary = without_settings(summary_of(FP8Config(recipe=recipe)))
    assert read_precision(summary).bits == RECIPES[recipe].bits == FP8Config(recipe=recipe).bits


@pytest.mark.parametrize(
    "settings",
    [
        {"recipe": "tensorwise", "kernels": True, "scaling": "delayed", "head": True},
        {"recipe": "tensorwise", "kernels": True, "scaling": "bounded"},
        {"recipe": "rowwise", "first_bf16": 2, "last_bf16": 1},
        {"recipe": "mxfp8", "skip": ["attn.out", "layers.0.*"], "include": ["*"]},
        {"recipe": "cscale", "fast_backward": True},
    ],
)
def test_an_older_label_is_read_as_the_settings_it_was_made_of(settings):
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    assert settings_in_label(FP8Config(**values).label) == settings


def test_reading_it_needs_no_torch():
    code = "import fp8.trained_precision, sys; print('torch' in sys.modules)"
    assert process("-c", code).stdout == "False\n"


@pytest.mark.parametrize(
    "damage",
    [
        {"recipe": None},
        {"recipe": 5},
        {"fp8": "rowwise"},
        {"switched_from_fp8": ["bf16"]},
        {"bits": "8"},
        {"bits": None},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(damage: dict[str, Any]) -> None:
    summary = summary_of(FP8Config(recipe="rowwise"))
    summary["precision"] |= damage
    with pytest.raises(TypeError, match=r"precision\."):
        read_precision(summary)
