"""bench.borrowed: parts within a budget, what is kept of them, and the pages made from it. The
parts here are processes of a line of Python."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from bench import borrowed, borrowed_report, fourway, noise, peak_memory, trainings
from bench.borrowed import PARTS, BorrowedPart, parts_table
from bench.cells import groups_of, our_cell
from bench.rows import CellFailure, FailedRow, TimedRow, row_line
from lib.errors import UserError
from lib.files import to_line
from lib.machine import GIB
from runtime.config import load_config
from runtime.data import Data
from runtime.environment import Environment
from runtime.tokenizer import load_tokenizer
from tests.conftest import ROOT, asked, process
from tests.helpers.bench_rows import answer, judged
from tests.helpers.faults import children, command_line, wait_for

WRITES_TWO = (
    "import sys; from pathlib import Path;"
    "Path(sys.argv[1], 'r.jsonl').write_text('{\"n\": 1}\\n{\"n\": 2}\\n')"
)


def part(name: str, code: str, guess_s: float = 1.0, results: str = "") -> BorrowedPart:
    words = ("-c", code, "{out}")
    return BorrowedPart(
        name=name,
        shows="-",
        measures="-",
        answers="-",
        guess_s=guess_s,
        words=words,
        rehearsal=words,
        results=results,
    )


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """call(parts, *words): the lines of borrowed.jsonl after a rehearsal of these parts, and what
    was printed."""

    def run(
        parts: list[BorrowedPart], *words: str, code: int = 0, rehearse: bool = True
    ) -> tuple[list[dict], str]:
        monkeypatch.setattr(borrowed, "PARTS", tuple(parts))
        words += (f"out={tmp_path / 'borrowed'}", f"rehearse={str(rehearse).lower()}")
        printed = asked(capsys, borrowed.main, *words, code=code)
        return rows(folder_of(tmp_path, rehearse) / "borrowed.jsonl"), printed

    return run


def folder_of(tmp_path: Path, rehearse: bool) -> Path:
    return tmp_path / "borrowed/rehearsal" if rehearse else tmp_path / "borrowed"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcomes(lines: list[dict]) -> dict[str, str]:
    return {line["part"]: line["outcome"] for line in lines if line["outcome"]}


def test_each_result_is_a_line_before_the_parts_outcome(call: Callable[..., Any]):
    lines, _ = call([part("two", WRITES_TWO, results="r.jsonl")])
    assert [(line["result"], line["outcome"]) for line in lines] == [
        ({"n": 1}, None),
        ({"n": 2}, None),
        ({}, "done"),
    ]


def test_a_second_call_goes_on_with_what_is_missing(call: Callable[..., Any]):
    parts = [part("sound", WRITES_TWO, results="r.jsonl"), part("broken", "1 / 0")]
    call(parts, code=1)
    lines, _ = call(parts, code=1)
    assert [line["part"] for line in lines if line["outcome"]] == ["sound", "broken", "broken"]


@pytest.mark.parametrize("key", ["torch", "device"])
def test_a_part_done_on_another_torch_or_gpu_runs_again(call, gpu, monkeypatch, key):
    sound = [part("sound", "")]
    for _ in range(2):
        lines, _ = call(sound, "seconds=60", rehearse=False)
    assert len(lines) == 1, "it is done"
    there = replace(environment_of_a_gpu(), **{key: "another"})
    monkeypatch.setattr(borrowed, "environment", lambda *_: there)
    lines, _ = call(sound, "seconds=60", rehearse=False)
    assert [line["outcome"] for line in lines] == ["done", "done"]


def test_a_part_that_fails_costs_itself_alone_and_its_last_line_is_told(call: Callable[..., Any]):
    lines, printed = call([part("broken", "1 / 0"), part("sound", "")], code=1)
    assert outcomes(lines) == {"broken": "failed", "sound": "done"}
    assert "ZeroDivisionError: division by zero" in printed


def test_what_a_part_wrote_before_its_time_was_up_is_kept(call: Callable[..., Any]):
    slow = part("slow", WRITES_TWO + "; import time; time.sleep(600)", results="r.jsonl")
    lines, _ = call([slow], f"seconds={borrowed.KEPT_S + 4}", code=1)
    assert [line["result"] for line in lines[:2]] == [{"n": 1}, {"n": 2}]
    assert outcomes(lines) == {"slow": "cut"}


def test_a_part_that_does_not_fit_is_left_out_and_a_shorter_one_still_runs(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    guesses = {"long": 500.0, "short": 1.0}
    monkeypatch.setattr(borrowed.Call, "estimate", lambda self, part: guesses[part.name])
    monkeypatch.setattr(borrowed.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(borrowed, "environment", environment_of_a_gpu)
    parts = [part("long", ""), part("short", "")]
    lines, printed = call(parts, "seconds=60", code=1, rehearse=False)
    assert outcomes(lines) == {"long": "left out", "short": "done"}
    assert "needs 500 s, 4" in printed


def environment_of_a_gpu(*_: object) -> Environment:
    words = dict.fromkeys((field.name for field in fields(Environment)), "x")
    return Environment(**words)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have a GPU."""
    monkeypatch.setattr(borrowed.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(borrowed, "environment", environment_of_a_gpu)


def test_what_a_part_has_started_ends_when_it_is_cut(call, gpu, tmp_path):
    """Processes of pytest-xdist would go on beside what is timed next."""
    starts = "import subprocess, sys, time; from pathlib import Path;"
    starts += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
    starts += "Path(sys.argv[1], 'r.jsonl').write_text(str(child.pid)); time.sleep(99)"
    slow = part("slow", starts, guess_s=2.0, results="r.jsonl")
    lines, _ = call([slow], "seconds=60", code=1, rehearse=False)
    assert outcomes(lines) == {"slow": "cut"}
    wait_for(lambda: not command_line(lines[0]["result"]), 10)


def test_a_result_that_has_a_line_gets_no_other(call):
    broken = part("broken", WRITES_TWO + "; sys.exit(1)", results="r.jsonl")
    for _ in range(2):
        lines, _ = call([broken], code=1)
    assert [line["result"] for line in lines if line["result"]] == [{"n": 1}, {"n": 2}]


def test_cells_that_take_too_long_are_cut_as_any_part(call, gpu, monkeypatch):
    """At twice what three cells of 0.2 s take, though bench.throughput goes on where it stopped."""
    monkeypatch.setattr(borrowed, "START_S", 0.0)
    monkeypatch.setattr(borrowed, "WARM_S", 0.0)
    rows_of_size = [row_here("350m/bf16", run="w", wall_s=0.2)]
    monkeypatch.setattr(borrowed, "rows_on_gpu", lambda _: rows_of_size)
    slow = replace(
        timing_part(cells=("350m/rowwise",)), words=("-c", "import time; time.sleep(99)")
    )
    lines, _ = call([slow], "seconds=60", code=1, rehearse=False)
    assert lines[0]["outcome"] == "cut" and lines[0]["seconds"] < 30


def test_rows_of_a_cpu_are_none_of_a_gpu(tmp_path):
    path = tmp_path / "rows.jsonl"
    on_cpu = judged(our_cell("350m", "bf16", 1), answer())
    path.write_bytes(row_line(on_cpu) + row_line(row_of("125m", "bf16", None)))
    assert [row.cell.size for row in borrowed.rows_on_gpu(path)] == ["125m"]


def test_one_part_cannot_take_the_time_of_all(call: Callable[..., Any], gpu: None):
    slow, sound = part("slow", "import time; time.sleep(600)", guess_s=1.0), part("sound", "")
    lines, printed = call([slow, sound], "seconds=120", code=1, rehearse=False)
    assert outcomes(lines) == {"slow": "cut", "sound": "done"}
    assert "not done after 2 s" in printed


WRITES_ITS_WORDS = (
    "import json, sys; from pathlib import Path;"
    "Path(sys.argv[1], 'r.jsonl').write_text(json.dumps(sys.argv[2:]))"
)
CELLS = ("350m/tensorwise", "350m/rowwise")


def timing_part(*words: str, cells: tuple[str, ...] = CELLS) -> BorrowedPart:
    """A part of cells, whose result is what it is given in the place of `words`."""
    plain = part("timing", "", results="r.jsonl")
    words = ("-c", WRITES_ITS_WORDS, "{out}", *words)
    return replace(plain, words=words, cells=cells, exit_code_when_unfinished=3)


def row_here(name: str, ratio: float | None = 1.2, wall_s: float = 20.0, **changes: Any):
    """A row of a cell by the machine of `gpu`, whose call began at "y", after this one's at "x"."""
    row = row_of(*name.split("/"), ratio)
    setup = {"gpu": "x", "torch": "x", "run": "y"}
    provenance = replace(row.provenance, **{**setup, **changes})
    return replace(row, provenance=provenance, wall_s=wall_s)


@pytest.fixture
def cell_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list:
    """The rows of cells once a part has run: to be filled."""
    later: list = []

    def rows_on_gpu(path: Path) -> list:
        return later if (tmp_path / "borrowed" / borrowed.LINES).is_file() else []

    monkeypatch.setattr(borrowed, "rows_on_gpu", rows_on_gpu)
    return later


def failed_row(row: TimedRow) -> FailedRow:
    failure = CellFailure(failure="out of memory")
    return FailedRow(cell=row.cell, provenance=row.provenance, wall_s=1.0, failure=failure)


@pytest.mark.parametrize(
    "changes, outcome",
    [
        ({}, "done"),
        ({"ratio": None}, "cut"),
        ({"run": "w"}, "cut"),
        ({"gpu": "another"}, "cut"),
        ({"torch": "another"}, "cut"),
        ({"run": "w", "commit": "x", "dirty": False}, "done"),
        ({"run": "w", "commit": "x", "dirty": True}, "cut"),
    ],
    ids=[
        "timed",
        "not compared",
        "timed by an earlier call",
        "on another GPU",
        "with another torch",
        "timed by an earlier call at this commit",
        "timed by an earlier call of a changed tree",
    ],
)
def test_a_cell_that_got_no_row_is_named(call, gpu, cell_rows, changes, outcome):
    cell_rows.append(row_here("350m/tensorwise", **changes))
    timing = timing_part(cells=("350m/tensorwise",))
    code = 0 if outcome == "done" else 1
    lines, printed = call([timing], "seconds=600", code=code, rehearse=False)
    assert outcomes(lines) == {"timing": outcome}
    assert ("no row of 350m/tensorwise" in printed) is (outcome == "cut")


def test_cells_that_the_budget_left_are_named(call, gpu, cell_rows):
    """bench.throughput ends with exit code 3 then."""
    words = ("-c", WRITES_ITS_WORDS + "; sys.exit(3)", "{out}")
    lines, printed = call(
        [replace(timing_part(), words=words)], "seconds=600", code=1, rehearse=False
    )
    assert outcomes(lines) == {"timing": "cut"}
    assert "no row of 350m/tensorwise, 350m/rowwise" in printed


def test_a_cell_that_failed_has_its_row(call, gpu, cell_rows):
    cell_rows.append(failed_row(row_here("350m/tensorwise")))
    timing = timing_part(cells=("350m/tensorwise",))
    lines, _ = call([timing], "seconds=600", rehearse=False)
    assert outcomes(lines) == {"timing": "done"}


def test_a_second_call_times_the_cells_that_have_no_row_yet(call, gpu, cell_rows, monkeypatch):
    """A row of the first call counts, though the commit may be another by then."""
    timing = timing_part("{cells}")
    cell_rows.append(row_here("350m/tensorwise", run="y"))
    for begun, commit in (("x", "x"), ("z", "another")):
        there = replace(environment_of_a_gpu(), t_start=begun, git_commit=commit)
        monkeypatch.setattr(borrowed, "environment", lambda *_, there=there: there)
        lines, _ = call([timing], "seconds=600", code=1, rehearse=False)
    given = [line["result"] for line in lines if line["result"]]
    assert given == [["350m/tensorwise,350m/rowwise"], ["350m/rowwise"]]


def test_a_part_that_is_done_times_all_its_cells_again_where_it_is_named(
    call, gpu, cell_rows, tmp_path
):
    timing = timing_part("{cells}")
    cell_rows += [row_here(name, commit="x", dirty=False, run="w") for name in CELLS]
    (tmp_path / "borrowed").mkdir()
    begun = line_of("timing", gpu="x", torch="x", run="v", outcome="cut")
    (tmp_path / "borrowed" / borrowed.LINES).write_bytes(to_line(asdict(begun)))
    lines, _ = call([timing], "seconds=600", rehearse=False)
    assert [line["outcome"] for line in lines] == ["cut", "done"], "all have rows"
    lines, _ = call([timing], "seconds=600", "parts=timing", code=1, rehearse=False)
    assert ["350m/tensorwise,350m/rowwise"] in [line["result"] for line in lines]


@pytest.mark.parametrize("seconds, outcome", [(200, "left out"), (260, "cut")])
def test_cells_begin_where_one_of_them_fits_between_two_of_bf16(
    call, gpu, cell_rows, seconds, outcome
):
    """Three cells of 66 s, 22 s to start and to warm the GPU, 15 s at the end: 235 s."""
    lines, _ = call([timing_part()], f"seconds={seconds}", code=1, rehearse=False)
    assert outcomes(lines) == {"timing": outcome}


def test_cells_are_expected_to_take_what_those_of_their_size_took(gpu, monkeypatch, tmp_path):
    """Five cells in two turns, three of BF16: eight of 20 s and a tenth; 22 s to start and warm."""
    monkeypatch.setattr(borrowed, "rows_on_gpu", lambda _: [row_here("350m/bf16", run="w")])
    cells = tuple(f"350m/{number}" for number in range(5))
    here = borrowed.Call(borrowed.Options(), tmp_path)
    assert here.estimate(timing_part(cells=cells)) == pytest.approx(8 * 22 + 22)


def test_cells_begin_where_those_of_the_smaller_size_fit(gpu, monkeypatch, tmp_path):
    """Three of 20 s and a tenth; those of 1.5B have not been timed and are guessed at 60 s."""
    monkeypatch.setattr(borrowed, "rows_on_gpu", lambda _: [row_here("350m/bf16", run="w")])
    here = borrowed.Call(borrowed.Options(), tmp_path)
    timing = timing_part(cells=("1p5b/tensorwise", "350m/tensorwise"))
    assert here.least(timing) == pytest.approx(3 * 22 + 22)


def test_a_part_is_expected_to_take_what_it_took_the_last_time(gpu, tmp_path):
    ends = [line_of("p", gpu="x", torch="x", outcome="done", seconds=s) for s in (10.0, 30.0)]
    ends.append(line_of("p", gpu="x", torch="x", outcome="failed", seconds=1.0))
    (tmp_path / borrowed.LINES).write_bytes(b"".join(to_line(asdict(end)) for end in ends))
    assert borrowed.Call(borrowed.Options(), tmp_path).estimate(part("p", "")) == pytest.approx(33)


def test_a_list_says_what_became_of_a_part_when_it_last_ran(tmp_path):
    """Not that a later call had no time for it, nor what a rehearsal did."""
    ends = [line_of("tests", outcome="failed", why="exit code 1", seconds=99.0, commit="abcdefgh")]
    ends.append(line_of("tests", outcome="left out", why="no time"))
    ends.append(line_of("tests", outcome="done", gpu=None))
    (tmp_path / borrowed.LINES).write_bytes(b"".join(to_line(asdict(end)) for end in ends))
    line = next(line for line in borrowed.format_parts(tmp_path).split("\n") if "| tests" in line)
    assert "| 99 " in line and "failed, r, commit abcdefg: exit code 1" in line


def test_the_budget_of_a_part_leaves_it_time_to_start_and_to_write(call, gpu):
    """It may take twice 30 s, then it is killed."""
    words = ("-c", WRITES_ITS_WORDS, "{out}", "{budget}")
    slow = replace(part("slow", "", guess_s=30, results="r.jsonl"), words=words)
    lines, _ = call([slow], "seconds=300", rehearse=False)
    (budget,) = lines[0]["result"]
    assert int(budget) == 60 - borrowed.START_S


@pytest.mark.parametrize("words, given", [((), []), (("commit=abc",), ["commit=abc"])])
def test_a_commit_that_is_given_is_given_to_the_parts(call, gpu, words, given):
    """Else the rows of cells would not say what ran, where there is no git."""
    of_commit = part("p", "", results="r.jsonl")
    of_commit = replace(of_commit, words=("-c", WRITES_ITS_WORDS, "{out}", "-", "commit={commit}"))
    lines, _ = call([of_commit], *words, "seconds=60", rehearse=False)
    assert lines[0]["result"] == ["-", *given]
    assert lines[0]["commit"] == ("abc" if given else "x")


def test_a_line_says_what_it_comes_from(call, gpu, monkeypatch):
    monkeypatch.setattr(borrowed, "nvidia_smi", lambda *_: ["580.159"])
    (line,), _ = call([part("p", "")], "seconds=60", rehearse=False)
    keys = ("run", "gpu", "commit", "driver", "torch")
    assert [line[key] for key in keys] == ["x", "x", "x", "580.159", "x"]


@pytest.mark.parametrize("package, given", [("numpy", ["-", "more"]), ("no_such", ["-"])])
def test_words_for_a_package_are_given_where_it_is_installed(call, gpu, package, given):
    plain = part("p", "", results="r.jsonl")
    words = ("-c", WRITES_ITS_WORDS, "{out}", "-")
    lines, _ = call(
        [replace(plain, words=words, words_with=(package, ("more",)))],
        "seconds=60",
        rehearse=False,
    )
    assert lines[0]["result"] == given


def test_a_gpu_takes_no_file_of_a_rehearsal_for_its_own(call, gpu):
    """Two arms of a training have the same names in both."""
    writes = part("p", WRITES_TWO, results="r.jsonl")
    call([writes])
    reads = replace(part("p", "", results="r.jsonl"), words=("-c", ""))
    lines, _ = call([reads], "seconds=60", rehearse=False)
    assert [line["result"] for line in lines] == [{}]


@pytest.mark.parametrize(
    "there, is_kept",
    [
        ({}, True),
        ({"git_commit": "another"}, False),
        ({"torch": "another"}, False),
        ({"device": "another"}, False),
    ],
    ids=["the same", "commit", "torch", "GPU"],
)
def test_a_part_goes_on_with_its_files_unless_they_are_of_another_setup(
    call, gpu, monkeypatch, there, is_kept
):
    """A training that has a row is not repeated: one of another GPU would pass for this one's."""
    code = "import sys; from pathlib import Path; path = Path(sys.argv[1], 'there');"
    code += "is_there = path.exists(); path.touch(); sys.exit(3 if is_there else 4)"
    call([part("p", code)], "seconds=60", code=1, rehearse=False)
    surroundings = replace(environment_of_a_gpu(), **there)
    monkeypatch.setattr(borrowed, "environment", lambda *_: surroundings)
    lines, _ = call([part("p", code)], "seconds=60", code=1, rehearse=False)
    assert lines[-1]["why"].startswith("exit code 3" if is_kept else "exit code 4")


def test_a_folder_of_a_parts_name_that_another_made_is_not_removed(call, gpu, tmp_path):
    """With out=. the part called tests would begin by removing the repository's tests/."""
    alien = tmp_path / "borrowed/p/test_model.py"
    alien.parent.mkdir(parents=True)
    alien.touch()
    with pytest.raises(FileNotFoundError, match=borrowed.LINES):  # nothing was run
        call([part("p", "")], "seconds=60", code=2, rehearse=False)
    assert alien.exists()


def test_a_part_that_is_done_begins_anew_where_it_is_named(call):
    fresh = "import sys; from pathlib import Path; path = Path(sys.argv[1], 'there');"
    fresh += "path.exists() and sys.exit('it is there'); path.touch()"
    for _ in range(2):
        lines, printed = call([part("p", fresh)], "parts=p")
        assert outcomes(lines) == {"p": "done"}, printed


def test_the_tests_run_again_at_another_commit_and_other_parts_do_not(call, gpu, monkeypatch):
    tests = replace(part("tests", ""), is_due_at_each_commit=True)
    call([tests, part("sound", "")], "seconds=60", rehearse=False)
    there = replace(environment_of_a_gpu(), git_commit="another")
    monkeypatch.setattr(borrowed, "environment", lambda *_: there)
    for _ in range(2):
        lines, _ = call([tests, part("sound", "")], "seconds=60", rehearse=False)
    assert [line["part"] for line in lines] == ["tests", "sound", "tests"]


@pytest.mark.parametrize(
    "commit, order",
    [
        ("x", ["broken", "long", "long", "broken"]),
        ("another", ["broken", "long", "broken", "long"]),
    ],
)
def test_what_this_commit_has_tried_in_vain_comes_last(call, gpu, monkeypatch, commit, order):
    """Tests that fail take two minutes, which the second call has a better use for."""
    long = part("long", "", guess_s=500.0)
    parts = [part("broken", "1 / 0"), long]
    call(parts, "seconds=60", code=1, rehearse=False)
    there = replace(environment_of_a_gpu(), git_commit=commit)
    monkeypatch.setattr(borrowed, "environment", lambda *_: there)
    lines, _ = call(parts, "seconds=60", code=1, rehearse=False)
    assert [line["part"] for line in lines] == order


def test_what_a_part_wrote_before_an_interrupt_is_kept(call, monkeypatch, tmp_path):
    def interrupt(self, part, folder: Path, limit_s: float):
        (folder / "r.jsonl").write_text('{"n": 1}\n')
        raise KeyboardInterrupt

    monkeypatch.setattr(borrowed.Call, "_process", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call([part("p", "", results="r.jsonl")])
    (line,) = rows(folder_of(tmp_path, True) / "borrowed.jsonl")
    assert line["result"] == {"n": 1}


def test_a_part_ends_with_the_command(call):
    """By SIGKILL (9), however the command ends: what goes on would share the GPU."""
    asks = "import ctypes, sys; from pathlib import Path; number = ctypes.c_int();"
    asks += "ctypes.CDLL(None).prctl(2, ctypes.byref(number));"  # PR_GET_PDEATHSIG
    asks += "Path(sys.argv[1], 'r.jsonl').write_text(str(number.value))"
    lines, _ = call([part("p", asks, results="r.jsonl")])
    assert lines[0]["result"] == 9


WRITES_ITS_PATH = "import os, sys; from pathlib import Path; path = os.environ['PYTHONPATH'];"
WRITES_ITS_PATH += "Path(sys.argv[1], 'r.jsonl').write_text('\"' + path + '\"')"


@pytest.mark.parametrize("rehearse", [False, True])
def test_a_part_finds_the_packages_that_the_caller_finds(call, gpu, monkeypatch, rehearse):
    """torchao's wheel may lie in a folder of PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", "/wheels")
    lines, _ = call(
        [part("p", WRITES_ITS_PATH, results="r.jsonl")], "seconds=60", rehearse=rehearse
    )
    folders = [str(borrowed.BARE)] if rehearse else []
    assert lines[0]["result"].split(":") == [*folders, str(ROOT), "/wheels"]


def test_a_process_of_a_test_finds_the_packages_that_the_test_finds(monkeypatch):
    """Those of tests/test_gpu.py train on the machine of the part above."""
    monkeypatch.setenv("PYTHONPATH", "/wheels")
    done = process("-c", "import os; print(os.environ['PYTHONPATH'])")
    assert done.stdout.strip().split(":") == [str(ROOT), "/wheels"]


def test_a_call_that_knows_no_commit_says_so(call, monkeypatch):
    unknown = replace(environment_of_a_gpu(), git_commit=None)
    monkeypatch.setattr(borrowed, "environment", lambda *_: unknown)
    _, printed = call([part("p", "")])
    assert "give commit=" in printed


def test_a_part_is_expected_to_take_what_it_took_here(call: Callable[..., Any], tmp_path: Path):
    lines, _ = call([part("sound", "")])
    took = next(line["seconds"] for line in lines if line["outcome"])
    rehearsal = borrowed.Call(borrowed.Options(rehearse=True), folder_of(tmp_path, True))
    assert rehearsal.estimate(part("sound", "", guess_s=99)) == pytest.approx(1.1 * took)
    assert rehearsal.estimate(part("new", "", guess_s=99)) == 99


def test_a_part_whose_folder_is_not_there_is_left_out_and_costs_nothing(call: Callable[..., Any]):
    needy = replace(part("needy", "1 / 0"), needs=("data/nowhere", "another code base"))
    lines, printed = call([needy, part("sound", "")])
    assert outcomes(lines) == {"needy": "left out", "sound": "done"}
    assert "there is no data/nowhere (another code base)" in printed


def test_a_rehearsal_of_a_part_whose_folder_is_not_there_is_another_one(call):
    needy = replace(
        part("needy", "1 / 0"),
        needs=("data/nowhere", "-"),
        rehearsal_without=("-c", WRITES_TWO, "{out}"),
        results="r.jsonl",
    )
    lines, _ = call([needy])
    assert outcomes(lines) == {"needy": "done"}
    assert [line["result"] for line in lines] == [{"n": 1}, {"n": 2}, {}]


def test_a_part_that_is_not_at_its_end_goes_on_the_next_time(call):
    study = replace(part("study", "raise SystemExit(3)"), exit_code_when_unfinished=3)
    lines, _ = call([study], code=1)
    assert outcomes(lines) == {"study": "cut"}
    lines, _ = call([study], code=1)
    assert [line["outcome"] for line in lines] == ["cut", "cut"]


def test_a_part_that_goes_on_may_take_all_the_time_that_is_left(
    call: Callable[..., Any], gpu: None
):
    slow = replace(
        part("slow", "import time; time.sleep(3)", guess_s=1.0), exit_code_when_unfinished=3
    )
    lines, _ = call([slow], "seconds=60", rehearse=False)
    assert outcomes(lines) == {"slow": "done"}


def test_without_a_gpu_it_is_refused_with_the_rehearsals_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert "rehearse=true" in asked(capsys, borrowed.main, f"out={tmp_path}", "seconds=9", code=2)


def test_an_unknown_part_is_refused_with_the_nearest_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = (f"out={tmp_path}", "parts=fouray")
    assert "fourway" in asked(capsys, borrowed.main, *words, code=2)


def test_no_seconds_are_refused(tmp_path, capsys):
    words = (f"out={tmp_path}", "seconds=0", "rehearse=true")
    assert "seconds" in asked(capsys, borrowed.main, *words, code=2)


def test_lines_of_another_version_are_refused(tmp_path: Path):
    (tmp_path / borrowed.LINES).write_bytes(to_line({"schema_version": 0}))
    with pytest.raises(UserError, match="schema_version=0"):
        borrowed.read_borrowed_rows(tmp_path)


BARE_MACHINE = ("torch", "torchao", "numpy", "pytest")


def required_packages() -> list[str]:
    """The names in requirements.txt that no package of a bare machine brings."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    names = [line.partition("==")[0] for line in lines if "==" in line]
    brought = {name for package in BARE_MACHINE for name in (package, *needs_of(package))}
    return [name for name in names if name not in brought]


def needs_of(package: str) -> list[str]:
    """What an installed package requires without an extra, by name."""
    requirements = map(Requirement, metadata.requires(package) or [])
    return [r.name for r in requirements if r.marker is None or "extra" not in str(r.marker)]


@pytest.mark.parametrize("package", required_packages())
def test_a_rehearsal_hides_what_a_bare_machine_lacks(package: str):
    package = package.replace("-", "_")
    done = process("-c", f"import {package}", PYTHONPATH=f"{borrowed.BARE}:{ROOT}")
    assert f"No module named '{package}'" in done.stderr


def test_a_rehearsal_has_what_a_bare_machine_has():
    """The parts below import them, which takes seconds."""
    words = (
        "import sys; from importlib.util import find_spec;"
        "sys.exit(None in [find_spec(name) for name in sys.argv[1:]])"
    )
    done = process("-c", words, *BARE_MACHINE, PYTHONPATH=f"{borrowed.BARE}:{ROOT}")
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["study", "peers"])
def test_a_part_starts_without_its_folder(name, call, tmp_path):
    folder = folder_of(tmp_path, True)
    folder.mkdir(parents=True)
    (folder / "toy.jsonl").write_bytes(b"")  # what a part before it leaves
    lines, printed = call([part for part in PARTS if part.name == name], f"parts={name}")
    assert outcomes(lines) == {name: "done"}, printed


@pytest.mark.parametrize("name", ["tests", "flagship"])
def test_a_part_runs_in_the_rehearsal(
    name: str, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    lines, printed = call([part for part in PARTS if part.name == name], f"parts={name}")
    assert outcomes(lines) == {name: "done"}, printed
    assert len(lines) > 2


def test_the_tests_are_rehearsed_with_the_words_of_the_gpu():
    """Words of a package that is not there, such as -n, would end pytest before its first test."""
    (tests,) = [part for part in PARTS if part.name == "tests"]
    assert tests.rehearsal == (*tests.words, "--collect-only")


# ------------------------------------------------------------------------------------------- pages


def test_the_page_on_speed_is_what_the_rows_say():
    rows_of_gpu = borrowed.rows_on_gpu(ROOT / "bench/results/h100_peers.jsonl")
    rows_of_gpu += borrowed.rows_on_gpu(ROOT / borrowed.CELLS)
    lines = borrowed.read_borrowed_rows(ROOT / borrowed.Options().out)
    page = borrowed_report.PAGE.read_text()
    assert borrowed_report.speed_page(page, rows_of_gpu, lines) == page
    readme = borrowed_report.README.read_text()
    row = borrowed_report.readme_row(rows_of_gpu)
    assert borrowed_report.with_readme_row(readme, row) == readme


def test_the_page_on_speed_lists_every_part_and_what_it_aims_at():
    page = borrowed_report.PAGE.read_text()
    assert borrowed_report.with_generated(page, parts_table(), borrowed_report.PARTS_BEGIN) == page
    lines = page.split("\n")
    for part in PARTS:
        (line,) = [line for line in lines if line.startswith(f"| {part.name} ")]
        assert all(words in line for words in (part.shows, part.measures, part.answers))
        assert all(f"{aim.least_ratio:.2f} in {aim.cell}" in line for aim in part.targets)


def test_a_part_times_the_cells_that_it_aims_at():
    suite_cells = {cell.name for group in groups_of("h100") for cell in group}
    for part in PARTS:
        assert set(part.cells) <= suite_cells
        assert {target.cell for target in part.targets} <= set(part.cells)


@pytest.mark.parametrize(
    "ratio, verdict", [(1.12, "met"), (1.119, "missed"), (None, "not compared")]
)
def test_a_report_says_which_targets_were_met(ratio, verdict):
    rows_of_gpu = [row_of("125m", "tensorwise+kernels+head", ratio)]
    lines = borrowed_report.targets_table(rows_of_gpu, "NVIDIA H200").split("\n")
    (line,) = [line for line in lines if "| 125m/" in line]
    assert line.rstrip(" |").endswith(f"| {verdict}")
    assert sum("not measured" in line for line in lines) == 2


def test_a_report_says_why_a_cell_with_a_target_does_not_count():
    """Though an earlier row of it does: it was another code."""
    row = row_of("125m", "tensorwise+kernels+head", 1.3)
    broken = replace(row, valid=False, invalid_because="its loss does not fall", ratio=1.2)
    table = borrowed_report.targets_table([row, broken], "NVIDIA H200")
    assert "does not count: its loss does not fall" in table


def test_no_two_precisions_of_a_table_have_one_name():
    """Columns of kernels are kept by it: the second would have taken the first one's place."""
    names = list(borrowed_report.SHOWN.values())
    assert len(set(names)) == len(names)


def test_a_second_gpu_takes_no_place_of_the_first():
    h200 = row_of("125m", "tensorwise+kernels", 1.25)
    h100 = replace(h200, ratio=1.5, provenance=replace(h200.provenance, gpu="NVIDIA H100"))
    rows_of_gpus = [h200, h100]
    assert borrowed_report.readme_row(rows_of_gpus).endswith(
        " H200: 1.25 at 125M; H100: 1.50 at 125M: docs/speed.md |"
    )
    assert "**1.250**" in borrowed_report.speed_table(rows_of_gpus, "NVIDIA H200")
    assert "**1.500**" in borrowed_report.speed_table(rows_of_gpus, "NVIDIA H100")
    assert borrowed_report.gpus_of(rows_of_gpus) == ["NVIDIA H200", "NVIDIA H100"]


def test_kernels_are_those_of_the_last_gpu_that_has_some():
    """A first call on another GPU may time 125M alone."""
    h200 = row_of("1p5b", "tensorwise", 1.2)
    h200 = replace(h200, measured=replace(h200.measured, kernels=[("nvjet_a", 12.5)]))
    h100 = row_of("125m", "tensorwise", 1.2)
    h100 = replace(h100, provenance=replace(h100.provenance, gpu="NVIDIA H100"))
    table = borrowed_report.kernels_table([h200, h100])
    assert table.startswith("On NVIDIA H200:") and "| 12.5 " in table


def line_of(part: str, **values: Any) -> borrowed.BorrowedRow:
    head = {"run": "r", "gpu": "NVIDIA H200", "commit": "c", "torch": "t"}
    return borrowed.BorrowedRow(**{"part": part, **head, **values})


def test_outcomes_of_tests_are_those_of_the_last_commit(tmp_path):
    test = {"test": "a", "outcome": "failed", "message": "x\nit is broken"}
    lines = [line_of("tests", result=test), line_of("tests", result={**test, "test": "b"})]
    lines.append(line_of("tests", commit="d", result={**test, "outcome": "passed"}))
    lines.append(line_of("tests", outcome="done"))
    text = "\n".join(borrowed_report._sections_of_parts(lines))
    assert "1 passed" in text and "failed" not in text and "broken" not in text


def test_a_report_says_why_a_part_is_not_done():
    lines = [line_of("linears", outcome="cut", why="not done after 480 s")]
    text = "\n".join(borrowed_report._sections_of_parts(lines))
    assert "linears on NVIDIA H200: cut" in text and "not done after 480 s" in text


def test_whole_trainings_are_on_the_page_each_run_once():
    old, new = row_of_training(3, None), replace(row_of_training(4, None), planned_gib=2.5)
    lines = [line_of("flagship", result=asdict(row)) for row in (old, new)]
    arm = row_of_arm("1p5b", "FP8 rowwise", [1.0] * 7, tok_per_s=1.0)
    text = borrowed_report.trainings_text([*lines, line_of("fourway", result=asdict(arm))])
    assert text.count("\n| n ") == 1 and "| 4 " in text and "2.5" in text
    assert "| FP8 rowwise | 7 " in text and "fourway.png" in text


def test_writing_draws_the_comparison_and_the_page(tmp_path, monkeypatch):
    """Of rows alone: a machine for an hour may have drawn nothing."""
    for name in ("README", "PAGE"):
        copy = tmp_path / name
        shutil.copy(getattr(borrowed_report, name), copy)
        monkeypatch.setattr(borrowed_report, name, copy)
    for name in ("h100.jsonl", "h100_peers.jsonl"):
        shutil.copy(ROOT / "bench/results" / name, tmp_path)
    arm = row_of_arm("1p5b", "FP8 rowwise", [1.0] * 7, tok_per_s=1.0)
    line = line_of("fourway", result=asdict(arm))
    (tmp_path / borrowed.LINES).write_bytes(to_line(asdict(line)))
    borrowed_report.report(tmp_path, tmp_path / "h100.jsonl", is_to_write=True)
    assert "| FP8 rowwise | 7 " in (tmp_path / "PAGE").read_text()
    for figure in ("fourway.png", "h100.png"):
        assert (tmp_path / figure).stat().st_size > 10_000


def row_of(size: str, label: str, ratio: float | None) -> TimedRow:
    row = judged(our_cell(size, label, 1), answer(), gpu="NVIDIA H200")
    return replace(row, ratio=ratio, valid=True, tok_per_s=123_456.0, mfu_bf16=0.5)


def test_a_later_row_of_a_cell_takes_the_place_of_an_earlier_one():
    rows_of_gpu = [
        row_of("125m", "bf16", None),
        row_of("125m", "tensorwise+kernels", 1.5),
        row_of("125m", "tensorwise+kernels", 1.25),
    ]
    table = borrowed_report.speed_table(rows_of_gpu, "NVIDIA H200")
    assert "**1.250** (1.081)" in table and "1.500" not in table
    assert "123.5k (50 %)" in table


def test_a_page_without_its_markers_is_refused():
    with pytest.raises(UserError, match="lacks the lines"):
        borrowed_report.with_generated("no table", "| a |")


# ---------------------------------------------------------------------------------- trainings, arms


def test_noise_is_read_as_any_source(tmp_path: Path):
    noise.write_noise(tmp_path / "data", 20_000, val_tokens=5_000)
    words = [*noise.SETTINGS, f"data.dir={tmp_path}/data", "steps=2", "data.micro_batch=1"]
    words += ["data.tokens_per_step=64", "model.n_ctx=64", "eval.tokens=1024"]
    config = load_config(ROOT / "configs/gpt50m_bf16.py", words)
    x, y = Data(config, load_tokenizer("byte").sha256).batch(0, 0, 0, 1)
    assert x.shape == y.shape == (1, 64) and int(x.max()) <= 256


def test_frequent_bytes_of_noise_are_as_frequent_as_zipfs_law_says(tmp_path: Path):
    noise.write_noise(tmp_path / "data", 200_000)
    ids = (tmp_path / "data/noise/train_00000.bin").read_bytes()[::2]
    assert ids.count(0) / ids.count(9) == pytest.approx((9 + 2.7) / 2.7, rel=0.05)


TOY = ["model.n_layer=1", "model.n_head=2", "model.n_embd=32", "model.n_ffn=64", "eval.tokens=512"]
STEP = ["model.n_ctx=32", "data.tokens_per_step=32", "data.micro_batch=1"]


@pytest.fixture(scope="module")
def toy_arms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the page of a comparison of two eager arms."""
    folder = tmp_path_factory.mktemp("fourway")
    patch = pytest.MonkeyPatch()
    eager = ("parallel.compile=off",)
    patch.setattr(fourway, "ARMS", {"BF16 eager": ("bf16", eager), "FP8 eager": ("fp8", eager)})
    patch.setitem(fourway.SUITES, "toy", fourway.Suite({"toy": "gpt50m"}, 32, 3, tuple(TOY)))
    try:
        return folder, fourway.train_arms("toy", 300, folder)
    finally:
        patch.undo()


def test_a_training_on_noise_has_losses_speed_and_a_label(toy_arms: tuple[Path, str]):
    folder, _ = toy_arms
    by_label = {row["label"]: row for row in rows(folder / trainings.ROWS)}
    assert set(by_label) == {"bf16", "tensorwise"}
    for row in by_label.values():
        assert row["steps"] == len(row["losses"]) == len(row["seconds"]) == 3
        assert row["tok_per_s"] > 0 and row["failure"] is None and not row["is_compiled"]


def test_the_comparison_has_a_row_an_arm_and_a_figure(toy_arms: tuple[Path, str]):
    folder, page = toy_arms
    assert "| BF16 eager |" in page and "| FP8 eager  |" in page
    assert (folder / "fourway.png").stat().st_size > 10_000


def test_a_training_that_is_there_is_not_repeated(
    toy_arms: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
):
    folder, _ = toy_arms
    monkeypatch.setattr(trainings, "_train", pytest.fail)
    row = trainings.train_on_noise(
        ROOT / "configs/gpt50m_bf16.py",
        [*TOY, *STEP, "parallel.compile=off"],
        steps=3,
        folder=folder,
        limit_s=1,
        name="toy_bf16_eager",
    )
    assert row.steps == 3


def test_a_training_that_failed_after_some_steps_begins_again(tmp_path, monkeypatch):
    """Its row was taken for the training's, also where bench.borrowed ran the part again. What the
    try has left would refuse the next one: a run that has saved and has no checkpoint."""
    left = tmp_path / "runs/gpt50m_bf16/saved.json"
    left.parent.mkdir(parents=True)
    left.touch()
    failed = replace(row_of_training(2, "out of memory"), name="gpt50m_bf16")
    (tmp_path / trainings.ROWS).write_bytes(to_line(asdict(failed)))
    tries = []
    monkeypatch.setattr(
        trainings, "_train", lambda *_: tries.append(left.exists()) or ("again", False)
    )
    row = trainings.train_on_noise(
        ROOT / "configs/gpt50m_bf16.py", [*TOY, *STEP], steps=3, folder=tmp_path, limit_s=1
    )
    assert tries == [False] and row.failure == "again"
    assert [row.failure for row in trainings.read_trainings(tmp_path)] == ["again"], "the last try"


def test_the_checkpoints_of_a_training_are_removed(toy_arms):
    """Those of five trainings at 1.5B would take 90 GB."""
    folder, _ = toy_arms
    assert len(list(folder.glob("runs/*/summary.json"))) == 2
    assert not list(folder.glob("runs/*/checkpoints"))


def test_a_training_that_was_stopped_keeps_its_speed_and_memory(toy_arms, tmp_path, monkeypatch):
    """On a GPU every arm of the comparison may be stopped by its share of the time."""
    folder, _ = toy_arms
    ended, *_ = trainings.read_trainings(folder)

    def stopped(file: Path, words: list[str], memory_file: Path, cache: Path, limit_s: float):
        run = tmp_path / "runs" / ended.name
        run.mkdir(parents=True)
        for name in ("metrics.jsonl", "env.json"):
            shutil.copy(folder / "runs" / ended.name / name, run)
        memory_file.write_text('{"mem_gib": 1.5}\n{"mem_gib": 2.5}\n{"mem_')
        return "", True

    monkeypatch.setattr(trainings, "_train", stopped)
    row = trainings.train_on_noise(
        Path(ended.config),
        ended.overrides,
        steps=3,
        folder=tmp_path,
        limit_s=1,
        name=ended.name,
    )
    assert row.failure == "stopped: its time was up"
    measured = ("losses", "seconds", "tok_per_s", "compile_s", "tflops", "device")
    assert [getattr(row, name) for name in measured] == [getattr(ended, name) for name in measured]
    assert row.mem_gib == 2.5


def test_of_a_single_step_no_speed_is_known(toy_arms, tmp_path):
    """It is compilation most of all."""
    folder, _ = toy_arms
    ended, *_ = trainings.read_trainings(folder)
    run = tmp_path / "runs" / ended.name
    shutil.copytree(folder / "runs" / ended.name, run)
    first, *_ = [row for row in rows(run / "metrics.jsonl") if row["kind"] == "train"]
    (run / "metrics.jsonl").write_bytes(to_line(first))
    words = [*noise.SETTINGS, *ended.overrides, f"out={tmp_path}/runs", f"run={ended.name}"]
    config = load_config(Path(ended.config), [*words, "steps=3"])
    bare = replace(ended, tok_per_s=None, compile_s=None, tflops=None)
    row = trainings._with_results(bare, config, tmp_path / "none")
    assert row.steps == 1 and row.tok_per_s is None and row.compiled_s is None


def test_memory_is_written_when_it_has_grown(tmp_path, monkeypatch):
    allocated = iter([0, 3 * GIB, 3 * GIB, 2 * GIB, 4 * GIB])
    monkeypatch.setattr(peak_memory, "_most_allocated", lambda: next(allocated))
    monkeypatch.setattr(peak_memory, "INTERVAL_S", 0.0)
    with pytest.raises(StopIteration):
        peak_memory._watch(tmp_path / "memory.jsonl")
    assert rows(tmp_path / "memory.jsonl") == [{"mem_gib": 3.0}, {"mem_gib": 4.0}]


def test_a_training_ends_with_who_asked_for_it(tmp_path):
    """Else it would go on beside what is timed after a part that was cut."""
    words = ["-m", "bench.trainings", "configs/gpt50m_bf16.py", f"out={tmp_path}", "steps=500"]
    words += [f"set={','.join((*TOY, *STEP, 'parallel.compile=off'))}"]
    parent = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    (training,) = wait_for(lambda: children(parent.pid))
    parent.kill()
    parent.wait()
    wait_for(lambda: not command_line(training), 10)


def row_of_training(steps: int, failure: str | None) -> trainings.TrainingRow:
    shape = {"tokens_per_step": 32, "context": 32, "micro_batch": 1, "is_compiled": False}
    names = {"name": "n", "config": "c", "overrides": [], "label": "bf16"}
    losses = [1.0] * steps
    return trainings.TrainingRow(**names, **shape, steps=steps, losses=losses, failure=failure)


@pytest.mark.parametrize(
    "steps, failure, code",
    [(3, None, 0), (2, trainings.STOPPED, 0), (0, trainings.STOPPED, 1), (2, "nan", 1)],
    ids=["whole", "stopped", "stopped before its first step", "failed"],
)
def test_the_exit_code_says_whether_all_trainings_are_sound(
    monkeypatch, capsys, steps, failure, code
):
    """By it bench.borrowed tells a part that is done."""
    row = row_of_training(steps, failure)
    monkeypatch.setattr(trainings, "train_on_noise", lambda *_, **__: row)
    asked(capsys, trainings.main, "configs/gpt50m_bf16.py", code=code)


def row_of_arm(size: str, arm: str, seconds: list[float], **changes: Any) -> trainings.TrainingRow:
    row = row_of_training(len(seconds), None)
    name = f"{size}_{arm.lower().replace(' ', '_')}"
    return replace(row, name=name, context=4096, device="a GPU", seconds=seconds, **changes)


def drawn_arms(rows_of_arms: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figure of the comparison."""
    figures = []
    monkeypatch.setattr("lib.plots.render", lambda figure, _: figures.append(figure) or b"")
    fourway.draw_arms(rows_of_arms, tmp_path / "fourway.png")
    return figures[0]


def panel_of(figure: Any, words: str) -> Any:
    (panel,) = [axes for axes in figure.axes if axes.get_xlabel().startswith(words)]
    return panel


def two_arms() -> list:
    """Stopped after 4 of 8 steps, 10 s each and 6 s of compilation; 8 steps of 5 s."""
    stopped = row_of_arm("1p5b", "BF16 compiled", [16.0, 10, 10, 10], tok_per_s=3.2, compile_s=6.0)
    return [stopped, row_of_arm("1p5b", "BF16 eager", [5.0] * 8, tok_per_s=6.4, compile_s=0.0)]


def test_arms_that_time_stopped_are_drawn_by_the_seconds_of_as_many_steps(tmp_path, monkeypatch):
    """Of 32 tokens. By their own seconds all that were stopped would look alike."""
    panel = panel_of(drawn_arms(two_arms(), tmp_path, monkeypatch), "seconds of 8 steps")
    widths = [bar.get_width() for bar in panel.patches]
    assert widths == pytest.approx([80, 40, 6, 0])


def test_the_hatched_end_of_the_longest_bar_is_drawn(tmp_path, monkeypatch):
    """On a CPU compilation takes a hundred times as long as the steps behind it."""
    arms = two_arms()
    arms[0] = replace(arms[0], compile_s=6000.0)
    panel = panel_of(drawn_arms(arms, tmp_path, monkeypatch), "seconds of 8 steps")
    assert 6080 < panel.get_xlim()[1] < 7000


def test_a_memory_panel_without_values_says_so(tmp_path, monkeypatch):
    panel = panel_of(drawn_arms(two_arms(), tmp_path, monkeypatch), "memory")
    assert [text.get_text() for text in panel.texts] == ["not measured"]


def test_a_small_training_has_a_speed_in_tflops():
    """A toy's steps are 0.01 TFLOP/s, an H200's several hundred."""
    speeds = 0.0123, 412.34
    arms = [replace(arm, tflops=tflops) for arm, tflops in zip(two_arms(), speeds, strict=True)]
    table = fourway.arms_table(arms)
    assert "| 0.0123  |" in table and "| 412     |" in table


def test_the_toy_is_not_called_by_the_size_of_another_model():
    assert fourway.arm_of(row_of_arm("toy", "BF16 eager", [1.0])) == ("toy", "BF16 eager")
    assert list(fourway.SUITES["fourway-toy"].sizes) == ["toy"]


@pytest.mark.parametrize(
    "failures, is_trained",
    [
        ([None], True),
        ([trainings.STOPPED], True),
        (["nan"], False),
        (["nan", None], True),
        ([], False),
    ],
    ids=["whole", "stopped", "failed", "failed, then whole", "not begun"],
)
def test_the_comparison_is_done_where_each_arm_has_trained(tmp_path, failures, is_trained):
    """The last arm ended so."""
    suite = fourway.SUITES["fourway-toy"]
    *others, last = [(size, arm) for size in suite.sizes for arm in fourway.ARMS]
    arms = [row_of_arm(*names, seconds=[1.0]) for names in others]
    arms += [row_of_arm(*last, seconds=[1.0], failure=failure) for failure in failures]
    (tmp_path / trainings.ROWS).write_bytes(b"".join(to_line(asdict(arm)) for arm in arms))
    assert fourway.all_trained("fourway-toy", tmp_path) is is_trained


def test_each_arm_of_the_comparison_has_a_line_of_its_own(tmp_path, monkeypatch):
    arms = [
        row_of_arm(size, arm, [1.0] * 3, tok_per_s=1.0, compile_s=0.0)
        for size in fourway.SUITES["fourway"].sizes
        for arm in fourway.ARMS
    ]
    panel = panel_of(drawn_arms(arms, tmp_path, monkeypatch), "step")
    looks = {(line.get_color(), line.get_linestyle()) for line in panel.lines}
    assert len(looks) == len(panel.lines) == 10


def test_a_table_of_arms_says_the_time_of_all_steps_of_one_that_was_stopped():
    """1,000 steps of 32 tokens at 3.2 tokens/s; it trained 46 s, 6 of them compilation."""
    page = fourway.arms_table(two_arms()[:1])
    head, _, line = [[cell.strip() for cell in row.split("|")] for row in page.split("\n")]
    cells = dict(zip(head, line, strict=True))
    assert cells["1,000 steps"] == "2 h 46 min"
    assert (cells["training"], cells["without compilation"]) == ("46 s", "40 s")


def test_trainings_share_the_seconds_that_there_are(monkeypatch, capsys):
    limits = []

    def train(*_, limit_s: float, **__):
        limits.append(limit_s)
        return row_of_training(1, None)

    monkeypatch.setattr(trainings, "train_on_noise", train)
    asked(capsys, trainings.main, "configs/gpt50m_bf16.py", "configs/gpt50m_fp8.py", "seconds=60")
    assert limits == pytest.approx([30, 60], abs=1)


def test_a_training_that_is_stopped_leaves_nothing_half_compiled(tmp_path, monkeypatch):
    """The next one would load an empty library."""
    environment = {}

    class Training:
        """Is compiling when its time is up."""

        pid = 0

        def __init__(self, _, env: dict[str, str], **__):
            environment.update(env)
            cache = Path(env["TORCHINDUCTOR_CACHE_DIR"])
            (cache / "bz").mkdir(parents=True)
            (cache / "bz/half.so").touch()

        def communicate(self, timeout: float | None = None):
            if timeout is None:
                return "", None
            raise subprocess.TimeoutExpired("train.py", timeout)

    monkeypatch.setattr(trainings.subprocess, "Popen", Training)
    monkeypatch.setattr(trainings.os, "killpg", lambda *_: None)
    folder = tmp_path / "arms"
    trainings.train_on_noise(
        ROOT / "configs/gpt50m_bf16.py", [*TOY, *STEP], steps=3, folder=folder, limit_s=0.1
    )
    assert environment["TORCHINDUCTOR_VEC_ISA_OK"] == "1"  # five arms in two minutes
    cache = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
    assert cache.is_absolute() and cache.is_relative_to(folder) and not cache.exists()


def test_a_training_whose_time_is_up_says_so(tmp_path):
    row = trainings.train_on_noise(
        ROOT / "configs/gpt50m_bf16.py", [*TOY, *STEP], steps=3, folder=tmp_path, limit_s=0.1
    )
    assert row.failure == "stopped: its time was up" and row.losses == []


# ------------------------------------------------------------------------------------------ command


@pytest.mark.parametrize(
    "has_environment, python", [(False, "python3"), (True, ".venv/bin/python")]
)
def test_make_borrowed_runs_with_the_python_that_has_torch(tmp_path, has_environment, python):
    """On a machine for an hour python3; on a developer's that of make setup."""
    if has_environment:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/python").touch()
    words = ["make", "-n", "--no-print-directory", "-f", str(ROOT / "Makefile"), "borrowed"]
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout.strip() == f"{python} -m bench.borrowed seconds=540"


SHARING = """
import pytest
from tests.helpers.processes import made_once

def train(folder):
    with open("trained", "a") as file:
        file.write("once\\n")
    BREAK

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return made_once(tmp_path_factory, "runs", train)

@pytest.mark.parametrize("n", range(4))
def test_it(trained, n):
    assert n < 3
"""


@pytest.mark.parametrize("ends", ["pass", "1 / 0"])
def test_tests_at_a_time_are_each_an_outcome_and_share_a_training(tmp_path, ends):
    """Those of test_gpu.py share sixty steps of gpt125m: each process would train them anew."""
    (tmp_path / "test_it.py").write_text(SHARING.replace("BREAK", ends))
    (tests,) = [part for part in PARTS if part.name == "tests"]
    _, words = tests.words_with
    words = ("-m", "pytest", "-q", "-p", "bench.outcomes", *words, "test_it.py")
    process(*words, cwd=tmp_path, BORROWED_OUT=str(tmp_path))
    found = {row["test"]: row["outcome"] for row in rows(tmp_path / "outcomes.jsonl")}
    passed = 3 if ends == "pass" else 0
    expected = ["passed"] * passed + ["failed"] * (4 - passed)
    assert found == {f"test_it.py::test_it[{n}]": expected[n] for n in range(4)}
    assert (tmp_path / "trained").read_text() == "once\n"
