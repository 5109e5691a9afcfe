"""A branch in another precision than its trunk's: the same state at the branch point, a label of its own afterwards."""

import json
from dataclasses import replace

import pytest

from runtime.config import FP8Config
from runtime.rows import read_rows
from tests.conftest import call_train


@pytest.mark.parametrize("before, after, label", [("tensorwise", "off", "tensorwise"), ("off", "tensorwise", "bf16")])
def test_a_branch_may_switch_its_precision_and_says_so(tiny, tmp_path, capsys, before, after, label):
    wsd = replace(tiny.optim, schedule="wsd", decay_share=0.25, warmup_share=0.25)
    trunk = replace(tiny, run="trunk", steps=8, optim=wsd, fp8=FP8Config(recipe=before),
                    checkpoint=replace(tiny.checkpoint, every=None, at=(4,)))
    assert call_train(capsys, trunk, tmp_path).returncode == 0
    shorter = replace(trunk, steps=6, optim=replace(wsd, warmup_share=1 / 3, decay_share=1 / 3),
                      start_from=f"{trunk.run_dir}/checkpoints/step_00000004", checkpoint=replace(tiny.checkpoint, every=1))
    branches = {name: replace(shorter, run=name, fp8=fp8)
                for name, fp8 in (("same", trunk.fp8), ("other", FP8Config(recipe=after)))}
    for branch in branches.values():
        assert call_train(capsys, branch, tmp_path).returncode == 0
    first = {name: read_rows(branch.run_dir / "metrics.jsonl") for name, branch in branches.items()}
    losses = {name: [row["loss"] for row in rows if row["kind"] == "train"] for name, rows in first.items()}
    assert losses["same"] != losses["other"] and losses["other"] == pytest.approx(losses["same"], rel=0.02)

    if before != "off":
        refused = call_train(capsys, replace(shorter, run="partial", fp8=replace(trunk.fp8, skip=("attn.out",))), tmp_path)
        assert (refused.returncode, "fp8.skip was" in refused.stderr) == (2, True), "another choice of Linears is no switch"

    other = branches["other"]
    (other.run_dir / "summary.json").unlink()      # the label outlives a resume
    (other.run_dir / "checkpoints/step_00000006/DONE").unlink()
    assert call_train(capsys, other, tmp_path).returncode == 0
    summaries = {name: json.loads((branch.run_dir / "summary.json").read_text()) for name, branch in branches.items()}
    assert [summaries[name]["precision"]["switched_from"] for name in ("same", "other")] == [None, label]
    assert summaries["same"]["pair_id"] == summaries["other"]["pair_id"], "a pair: all but the precision is equal"
    resumed = [row["loss"] for row in read_rows(other.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert resumed == losses["other"]
