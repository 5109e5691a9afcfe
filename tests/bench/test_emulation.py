"""bench/emulation.py: steps of each arm in turns, and the table of the best."""

import mmap
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench import emulation
from bench.cells import Cell, Subject, build_ours
from bench.emulation import Shape, Step

TINY = {"n_layer": 1, "n_head": 1, "n_embd": 32, "n_ffn": 32, "vocab_size": 257}


def test_the_table_divides_best_steps_by_bf16s() -> None:
    steps = {
        "bf16": [Step(0.5, 7), Step(0.4, 9)],
        "mxfp8": [Step(0.5, 3000), Step(0.9, 2000)],
    }
    page = emulation.table(4096, {"bf16": Step(2.0, 0), "mxfp8": Step(3.0, 0)}, steps)
    assert "| mxfp8 | 3.000             | 0.500            | 1.250     | 8,192    | 2,000 " in page


def test_each_arm_takes_a_step_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulation, "DEFAULT", Shape(TINY, sequences=2, T=32))
    assert emulation.main(["recipes=mxfp8,rowwise", "rounds=2"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows[2:5]] == ["bf16", "mxfp8", "rowwise"]
    assert rows[2].split("|")[4].strip() == "1.000"


def test_a_config_file_gives_the_model_and_its_micro_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = []

    def build(cell: Cell, *_: object) -> Subject:
        built.append((cell.model["n_embd"], cell.T, cell.tokens_per_step))
        return build_ours(cell, torch.device("cpu"), "off", True)

    monkeypatch.setattr(emulation, "build_ours", build)
    assert emulation.main(["config=configs/cpu_30k_bf16.py", "recipes=mxfp8", "rounds=1"]) == 0
    assert built == [(32, 128, 1024)] * 2
    assert "| mxfp8 |" in capsys.readouterr().out


@pytest.mark.parametrize("word, calls", [("true", 1), ("false", 0)])
def test_freed_memory_is_kept_unless_the_command_says_otherwise(
    word: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = mock.Mock()
    monkeypatch.setattr(emulation, "keep_freed_memory", keep)
    monkeypatch.setattr(emulation, "DEFAULT", Shape(TINY, sequences=2, T=32))
    words = ["recipes=mxfp8", "rounds=1", f"keep_freed_memory={word}"]
    assert emulation.main(words) == 0
    assert keep.call_count == calls


def test_a_step_counts_the_page_faults_of_its_own() -> None:
    """Of a step that touches 4 MiB for the first time, not those of the process."""

    def touch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        memory = mmap.mmap(-1, 1024 * mmap.PAGESIZE)
        for page in range(1024):
            memory[page * mmap.PAGESIZE] = 1
        return x.sum()

    arm = mock.Mock(micro_step=touch)
    step = emulation._step(arm, torch.zeros(2), torch.zeros(2))
    assert 1024 <= step.page_faults < 1200


def test_no_timed_step_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert emulation.main(["rounds=0"]) == 2
    assert "rounds=0 must be at least 1" in capsys.readouterr().err


def test_a_config_without_a_number_of_sequences_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "auto.py"
    words = "config = replace(config, data=replace(config.data, micro_batch='auto'))"
    imports = "from dataclasses import replace\nfrom configs.cpu_30k_bf16 import config"
    file.write_text(f"{imports}\n\n{words}\n")
    assert emulation.main([f"config={file}"]) == 2
    assert "has data.micro_batch=auto, expected a number" in capsys.readouterr().err
