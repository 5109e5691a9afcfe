"""docs/extending.md: each change, applied to a copy of the repository, does what the page says."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, process

CODE = ("lib", "fp8", "runtime", "scaling", "eval", "prepare", "configs")
PAGE = (ROOT / "docs/extending.md").read_text()
SECTIONS = {
    section.partition("\n")[0]: section for section in re.split(r"^## ", PAGE, flags=re.M)[1:]
}


def block(title: str, language: str) -> str:
    """The only fenced block of a section in this language; "" for output."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", SECTIONS[title], re.DOTALL | re.MULTILINE)
    blocks = [text for name, text in fences if name == language]
    assert len(blocks) == 1
    return blocks[0]


def apply(change: str, folder: Path) -> None:
    """Change files as a block says: a line without a mark names a file or, indented by a blank, a
    line that stands there; "+" lines come behind it, "-" lines go away."""
    file, place = folder, 0
    for line in change.splitlines():
        mark, words = line[0], line[1:] + "\n"
        if mark not in " +-":
            file, place = folder / line, 0
            continue
        text = file.read_text()
        if mark == "+":
            file.write_text(text[:place] + words + text[place:])
            place += len(words)
            continue
        begin = f"\n{text}".find(f"\n{words}")
        assert begin >= 0, f"{file.name} has no line {words!r}"
        if mark == "-":
            file.write_text(text[:begin] + text[begin + len(words) :])
        place = begin if mark == "-" else begin + len(words)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the code."""
    for folder in CODE:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.parametrize("title", SECTIONS)
def test_a_change_works_as_the_page_says(title: str, repository: Path) -> None:
    apply(block(title, "diff"), repository)
    done = process("-c", block(title, "python"), cwd=repository, PYTHONPATH=str(repository))
    assert done.stdout == block(title, ""), done.stderr


# Runs the programs that stand in a file of JSON, title -> text, each in a namespace of its own, and
# prints what each printed up to its end or its error.
EACH = """
import contextlib, io, json, sys
printed = {}
for title, code in json.load(open(sys.argv[1])).items():
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(BaseException):
        exec(code, {"__name__": "__main__"})
    printed[title] = output.getvalue()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Title -> what its example prints in this repository; one process, since most of the time
    goes into its imports."""
    file = tmp_path_factory.mktemp("examples") / "examples.json"
    file.write_text(json.dumps({title: block(title, "python") for title in SECTIONS}))
    done = process("-c", EACH, file, cwd=ROOT)
    return json.loads(done.stdout)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_example_needs_the_change(title: str, unchanged: dict[str, str]) -> None:
    assert unchanged[title] != block(title, "")
