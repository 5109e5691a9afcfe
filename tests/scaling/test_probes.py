"""A probe of inference is named by what eval.precision was asked for, which its rows say."""

import json
from pathlib import Path

import pytest

from scaling.probes import read_probe

STATISTICS = {"amax": 1.0, "scale": 2.0, "scale_min": 2.0, "scale_max": 2.0}
ROW = {
    "kind": "linear",
    "step": 4,
    "layer": "layers.0.attn.qkv",
    "recipe": "rowwise",
    "weight": STATISTICS,
    "activation": STATISTICS,
}


@pytest.mark.parametrize(
    "said, name",
    [({"evaluated_in": "auto"}, "auto"), ({}, "mxfp8")],
    ids=["by its rows", "an older file by its name"],
)
def test_a_probe_of_inference_is_named_by_what_was_asked_for(tmp_path: Path, said, name):
    path = tmp_path / "probe_mxfp8.jsonl"
    path.write_text(json.dumps(ROW | said) + "\n")
    probe = read_probe(path)
    assert (probe.evaluated_in, probe.recipe) == (name, "rowwise")


def test_the_last_step_counts_that_has_every_layer(tmp_path: Path):
    rows = [ROW, ROW | {"layer": "head"}, ROW | {"step": 8}]
    path = tmp_path / "probe.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_probe(path).last == 0
