"""What is noted of a slice: where and by what code it ran, on which data."""

import json
import os
import shutil
import subprocess
from dataclasses import replace

from scaling import provenance


def test_sources_that_cannot_be_read_are_left_to_the_sweep(tiny, tmp_path, data_dir):
    shutil.copytree(data_dir, tmp_path / "torn")
    (tmp_path / "torn/code/index.json").write_text('{"a": ')
    data = replace(tiny.data, dir=str(tmp_path / "torn"))
    for torn in (data, replace(data, dir=str(tmp_path / "nowhere"))):
        provenance.write_sources(tmp_path / "folder", torn)
        assert not (tmp_path / "folder").exists()


def test_the_row_tells_of_the_machine_and_of_the_code(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.65.06'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setattr(provenance, "ROOT", code)
    kept = code / "kept"

    def write_row(start):
        provenance.write_row(kept, tmp_path / "out", start, 1.23, "abc", runs=["a"], exit=3)

    write_row("1")      # no git
    subprocess.run("git init -q && touch a && git add a && git -c user.name=n -c user.email=e commit -qm a", shell=True, cwd=code,
                   check=True)
    write_row("2")      # what is kept itself is not dirt; of two commits git's is the true one
    (code / "a").write_text("x")
    with open(kept / "slices.jsonl", "a") as file:
        file.write('{"torn')
    write_row("3")
    lines = (kept / "slices.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines[1:])
    assert (first["device"], first["driver"]) == ("NVIDIA H100 80GB HBM3", "580.65.06")
    assert [(len(row["commit"] or ""), row["dirty"]) for row in (first, second, third)] == [(3, None), (40, False), (40, True)]
    assert (lines[0], third["seconds"], third["exit"]) == ('{"torn', 1.2, 3)
    tool.write_text("#!/bin/sh\necho none; exit 9\n")
    write_row("4")
    assert json.loads((kept / "slices.jsonl").read_text().splitlines()[-1])["driver"] is None
