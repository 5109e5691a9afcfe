"""lib/text.py: tables that Markdown and a terminal can read."""

from lib.text import counted, grid


def test_columns_are_aligned() -> None:
    assert grid([["a", "bb"], ["ccc", "d"]]) == "| a   | bb |\n|-----|----|\n| ccc | d  |"


def test_an_empty_column_goes() -> None:
    assert grid([["a", "b"], ["c", ""]]) == "| a |\n|---|\n| c |"


def test_a_bar_in_a_cell_begins_no_other_cell() -> None:
    assert grid([["arm"], ["int8|sym"]]).splitlines()[-1] == r"| int8\|sym |"


def test_a_count_of_one_has_its_noun_in_the_singular() -> None:
    assert [counted(n, "more table") for n in (0, 1, 2)] == [
        "0 more tables",
        "1 more table",
        "2 more tables",
    ]
