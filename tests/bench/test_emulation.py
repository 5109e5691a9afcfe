"""bench/emulation.py: steps of each arm in turns, and the table of the best."""

import pytest

from bench import emulation

TINY = {"n_layer": 1, "n_head": 1, "n_embd": 32, "n_ffn": 32, "vocab_size": 257}


def test_the_table_divides_best_steps_by_bf16s() -> None:
    seconds = {"bf16": [0.5, 0.4], "mxfp8": [0.5, 0.9]}
    page = emulation.table({"bf16": 2.0, "mxfp8": 3.0}, seconds)
    assert "| mxfp8 | 3.000             | 0.500            | 1.250     | 8,192    |" in page


def test_each_arm_takes_a_step_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulation, "MODEL", TINY)
    monkeypatch.setattr(emulation, "T", 32)
    assert emulation.main(["recipes=mxfp8,rowwise", "rounds=2"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows[2:5]] == ["bf16", "mxfp8", "rowwise"]
    assert rows[2].split("|")[4].strip() == "1.000"


def test_no_timed_step_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert emulation.main(["rounds=0"]) == 2
    assert "rounds=0 must be at least 1" in capsys.readouterr().err
