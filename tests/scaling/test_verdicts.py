"""docs/scaling.md: its tables have a row for every verdict that the commands can print."""

import inspect
import re

import pytest

from scaling import groups
from scaling.laws.forms import CHINCHILLA
from scaling.paired.equivalence import Equivalence, Part
from scaling.paired.estimates import Estimate, estimate, tost
from scaling.verdicts import Margin, format_equivalence, format_verdict
from tests.conftest import ROOT
from tests.helpers.paired_runs import exact_sample

MARGIN = Margin(1.0, "study.json", True)
PASSED = Part("size", 10**6, 10**7, 3, 0.1, 0.05, 2, p=0.01)
FAILED = Part("size", 10**6, 10**7, 3, 0.9, 0.3, 2, p=0.3)
UNKNOWN = Part("size", 10**6, 10**7, 1, 0.9)

VERDICTS = [
    format_verdict(Estimate(1, 0.3), MARGIN, None),
    format_verdict(estimate([0.3, 0.31, 0.32]), MARGIN, 0.3),
    format_verdict(estimate([-0.3, -0.31, -0.32]), MARGIN, 0.3),
    format_verdict(estimate([0.3, 0.31, 0.32]), MARGIN, 0.01),
    format_verdict(estimate([-0.1, 0.1, 0.02]), MARGIN, 0.01),
    format_verdict(estimate([-0.1, 0.1, 0.02]), MARGIN, 0.3),
    format_verdict(Estimate(1, 0.0), None, None, is_idle=True),
    format_equivalence(Equivalence([PASSED], 0.01, 0.4), MARGIN),
    format_equivalence(Equivalence([FAILED], 0.3, 0.4), MARGIN),
    format_equivalence(Equivalence([UNKNOWN], None, None), MARGIN),
    format_equivalence(Equivalence([UNKNOWN], None, None), None),
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
def test_every_verdict_has_its_row(clause: str) -> None:
    assert any(re.match(pattern(words), clause) for words in rows_of_verdicts())


@pytest.mark.parametrize("words", rows_of_verdicts())
def test_every_row_is_a_verdict(words: str) -> None:
    assert any(re.match(pattern(words), clause) for clause in clauses())


def test_every_law_that_fit_may_headline_has_its_row() -> None:
    source = inspect.getsource(groups.choose_headline)
    names = re.findall(r"Headline\(\s*(\"\w+\"|CHINCHILLA)", source)
    headlines = [CHINCHILLA if name == "CHINCHILLA" else name.strip('"') for name in names]
    rows = first_column("what fit.py says")
    assert len(headlines) == 5
    assert all(any(row.startswith(f"{form}:") for row in rows) for form in headlines)


@pytest.mark.parametrize(
    "n, mean, sd, words",
    [
        (2, 0.1, 0.1, "undecided"),
        (6, 0.1, 0.21, "undecided"),  # p between .05 and .1
        (30, 0.24, 0.1, "costs 0.24 %"),
        (5, 0.5, 0.1, "costs 0.5 %"),
        (5, -0.5, 0.1, "gains 0.5 %"),
        (6, 0.1, 0.05, "costs 0.1 %, within ±0.25 % (TOST, p="),
        (8, 0.01, 0.1, "equivalent within ±0.25 % (TOST, p="),
        (5, 0.01, 0.5, "undecided: interval -0.61 to +0.63"),
    ],
)
def test_a_verdict_follows_the_interval_and_the_test(
    n: int, mean: float, sd: float, words: str
) -> None:
    gap = estimate(exact_sample(n, mean, sd))
    margin = Margin(0.25, "study.json", True)
    assert format_verdict(gap, margin, tost(gap, 0.25)).startswith(words)
