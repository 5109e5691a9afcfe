"""What several processes of pytest-xdist share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.files import alone


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of this call of pytest, which make(folder) fills in the first process that asks for
    it; the others wait. Where that one failed the others fail at once."""
    base = factory.getbasetemp()
    is_one_of_several = "PYTEST_XDIST_WORKER" in os.environ
    folder = base.parent / name if is_one_of_several else base / name
    with alone(folder):
        state = folder / "made_once"
        if state.exists():
            assert state.read_text() == "made", "the process that made it failed"
            return folder
        state.write_text("failed")
        make(folder)
        state.write_text("made")
    return folder
