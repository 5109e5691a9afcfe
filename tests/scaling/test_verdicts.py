"""docs/scaling.md: its tables have a row for every verdict that precision.py and fit.py can print."""

import inspect
import re

import pytest

from scaling import groups
from scaling.equivalence import Equivalence, Part
from scaling.pairs import Estimate, Margin, estimate, judged, verdict
from scaling.precision import _equivalence_words
from tests.conftest import ROOT

MARGIN = Margin(1.0, "study.json", True)
PASSED = Part("size", 10**6, 10**7, 3, 0.1, 0.05, 2, p=0.01)
FAILED = Part("size", 10**6, 10**7, 3, 0.9, 0.3, 2, p=0.3)
UNKNOWN = Part("size", 10**6, 10**7, 1, 0.9)

VERDICTS = [
    verdict(Estimate(1, 0.3), MARGIN, None),
    verdict(estimate([0.3, 0.31, 0.32]), MARGIN, 0.3),
    verdict(estimate([-0.3, -0.31, -0.32]), MARGIN, 0.3),
    verdict(estimate([0.3, 0.31, 0.32]), MARGIN, 0.01),
    verdict(estimate([-0.1, 0.1, 0.02]), MARGIN, 0.01),
    verdict(estimate([-0.1, 0.1, 0.02]), MARGIN, 0.3),
    judged([], Estimate(1, 0.0), None, None)["verdict"],
    _equivalence_words(Equivalence([PASSED], 0.01, 0.4), MARGIN),
    _equivalence_words(Equivalence([FAILED], 0.3, 0.4), MARGIN),
    _equivalence_words(Equivalence([UNKNOWN], None, None), MARGIN),
    _equivalence_words(Equivalence([UNKNOWN], None, None), None),
]


def first_column(heading: str) -> list[str]:
    """The first cells of the table in docs/scaling.md whose header starts with `heading`."""
    table = (ROOT / "docs/scaling.md").read_text().split(f"| {heading} |")[1].split("\n\n")[0]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


def pattern(words: str) -> str:
    """Words of the table, X and M standing for numbers, as a regular expression."""
    number = r"[\\d.e+-]+"
    return re.sub(r"\b[XM]\b", number, re.escape(words))


def rows_of_verdicts() -> list[str]:
    rows = first_column("verdict of `precision.py`")
    return [words for row in rows for words in row.split(", ")]


def clauses() -> list[str]:
    """What the sentences consist of, such as "costs 0.3 %" and "within ±1 % (TOST, p=0.01)"."""
    parts = [clause for words in VERDICTS for clause in re.split(r", (?=within)|; ", words)]
    return [*(part.removeprefix("this design ") for part in parts), "null"]


@pytest.mark.parametrize("clause", dict.fromkeys(clauses()))
def test_every_verdict_has_its_row(clause):
    assert any(re.match(pattern(words), clause) for words in rows_of_verdicts())


@pytest.mark.parametrize("words", rows_of_verdicts())
def test_every_row_is_a_verdict(words):
    assert any(re.match(pattern(words), clause) for clause in clauses())


def test_every_law_that_fit_may_headline_has_its_row():
    source = inspect.getsource(groups.choose_headline)
    headlines = re.findall(r"Headline\(\s*\"(\w+)\"", source)
    rows = first_column("what fit.py says")
    assert len(headlines) == 5
    assert all(any(row.startswith(f"{form}:") for row in rows) for form in headlines)
