"""Which runs of a study are in BF16 is told by their overrides, not by their names."""

from pathlib import Path

from lib.machine import ROOT
from scaling.study import expand, load_study


def test_the_baseline_is_the_arm_that_converts_nothing():
    """configs/study_switch.py has BF16 trunks that decay in FP8, and FP8 trunks in BF16."""
    rows = expand(load_study(Path(ROOT) / "configs/study_switch.py"))
    baselines = {row.recipe for row in rows if row.is_baseline}
    assert baselines == {"bf16"}
    assert {row.recipe for row in rows if not row.is_baseline} >= {"tensorwise>bf16", "nvfp4"}
