"""One style for all figures, and files of which the JSON comes last."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from lib import plots
from lib.plots import STYLES, styles, write_with

NAMES = (
    ["tensorwise", "own", "bf16"],
    ["bf16", "mxfp8", "nvfp4", "nvfp4_hadamard", "nvfp4_nearest", "tensorwise"],
)


def test_styles_are_told_apart_without_colour():
    assert len({style["marker"] for style in STYLES}) == len(STYLES)
    assert len({str(style["linestyle"]) for style in STYLES}) == len(STYLES)


@pytest.mark.parametrize("names", NAMES)
def test_a_recipe_has_one_style_in_every_figure(names: list[str]):
    looks = dict(zip(names, styles(names), strict=True))
    assert looks["bf16"]["color"] == "#0072B2" and looks["tensorwise"] is STYLES[1]
    assert len({(style["color"], style["marker"]) for style in looks.values()}) == len(names)


def test_more_recipes_than_colours_are_told_apart_by_marker_and_dash():
    names = ["bf16", "tensorwise", *(f"recipe{i}" for i in range(12))]
    looks = styles(names)
    assert len({(look["color"], look["marker"]) for look in looks}) == len(names)
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == len(names)


def test_the_json_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever finds law.json finds all of it, old or new."""
    written: list[str] = []
    monkeypatch.setattr(plots, "write_atomically", lambda path, _: written.append(path.name))
    write_with(tmp_path, "figure", Figure(), {"law.json": "{}"})
    assert written == ["figure.png", "figure.svg", "law.json"]


def test_json_holds_no_nan(tmp_path: Path):
    with pytest.raises(ValueError, match="Out of range float"):
        write_with(tmp_path, "figure", None, {"law.json": {"loss": np.nan}})
