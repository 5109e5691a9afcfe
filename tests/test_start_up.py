"""The bench of first and second starts: two processes a label over one folder of caches, the ratio, mistakes in a sentence."""

import json
import sys

import pytest

from bench import start_up, suites
from bench.children import Child
from tests.conftest import ROOT

CELL = """
import json, os, pathlib, sys
marks = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
again = marks.exists()
marks.mkdir(parents=True, exist_ok=True)
spec = json.loads(sys.argv[1])
if spec["label"] == "broken":
    print(json.dumps({"ok": False, "error": "no such kernel", "oom": False}), flush=True)
print(json.dumps({"ok": True, "import_s": 2.0, "build_s": 1.0, "first_step_s": 5.0 if again else 50.0, "compile_s": 1.0,
                  "cache_hits": int(again), "cache_misses": int(not again)}), flush=True)
sys.stdin.readline()
print(json.dumps({"ok": True}), flush=True)
"""


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """Processes that remember a start by the folder of caches that they are given."""
    script = tmp_path / "cell.py"
    script.write_text(CELL)
    monkeypatch.setattr(start_up, "Child",
                        lambda name, command, *rest: Child(name, [sys.executable, str(script), command[-1]], *rest))


def test_the_second_start_finds_the_caches_of_the_first_and_no_others(cells, tmp_path, capsys):
    out = tmp_path / "start_up.json"
    assert start_up.main(["size=toy_s", "labels=bf16,tensorwise", f"out={out}"]) == 0
    result = json.loads(out.read_text())
    assert [row["label"] for row in result["rows"]] == ["bf16", "tensorwise"]
    for row in result["rows"]:      # the first start of the second label is cold again
        assert (row["first"]["cache_hits"], row["second"]["cache_hits"]) == (0, 1)
        assert row["ratio_first_step"] == pytest.approx(0.1) and row["ratio_start"] == pytest.approx(8 / 53)
    assert "second / first: 0.10 of the first step, 0.15 of the whole start" in capsys.readouterr().out


def test_a_start_that_fails_is_one_sentence(cells, capsys):
    assert start_up.main(["size=toy_s", "labels=broken"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "bench/start_up.py: a start failed: no such kernel"


@pytest.mark.parametrize("arguments, sentence", [
    (["size=125n"], "size=125n is no size; did you mean '125m'?"),
    (["size=toy_s", "micro_batch=0"], "micro_batch=0 must be at least 1"),
    (["sise=toy_s"], "there is no key 'sise'; did you mean 'size'?"),
])
def test_mistakes(arguments, sentence, capsys):
    assert start_up.main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_a_real_size_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(start_up.torch.cuda, "is_available", lambda: False)
    assert start_up.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_what_is_started_is_the_suite_s_cell():
    cell = start_up.cell_of(start_up.Options(size="1p5b"), "tensorwise", start_up.torch.device("cuda"))
    assert cell == suites.Cell("1p5b", "tensorwise", suites.MICRO_BATCH["1p5b"])
    assert (ROOT / "bench" / "cell.py").exists()
