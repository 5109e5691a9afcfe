"""Tables are read as they stand: nothing is guessed, and what is left out is counted."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from lib.errors import UserError
from scaling.laws import Points
from scaling.table_points import LinesLeftOut, Selection, TableFile, read_points

HEAD = "run,N,tokens,flops,loss,lr"
ROWS = (
    "a,1e8,2e9,1.2e18,3.5,0.003",
    "b,2e8,4e9,4.8e18,3.25,0.003",
    "c,4e8,8e9,1.92e19,3.0,0.01",
    "d,8e8,1.6e10,7.68e19,2.75,0.03",
)
N, D = np.array([1e8, 2e8, 4e8, 8e8]), np.array([2e9, 4e9, 8e9, 1.6e10])
LOSS = np.array([3.5, 3.25, 3.0, 2.75])


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "points.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(folder: Path, rows: list[str] | tuple[str, ...] = ROWS) -> Path:
    return write(folder, "\n".join([HEAD, *rows, ""]))


def refusal(path: Path, n: str = "N", loss: str = "loss", **options: object) -> str:
    with pytest.raises(UserError) as error:
        read_points(path, n, loss, **options)
    return str(error.value).removeprefix(str(path)).lstrip(": ")


def columns_of(points: Points) -> list[list[float]]:
    return [points.N.tolist(), points.D.tolist(), points.loss.tolist()]


# ------------------------------------------------------------------------------ compute and tokens


@pytest.mark.parametrize(
    ("options", "derived"),
    [({"d": "tokens"}, "C = 6 N D"), ({"c": "flops"}, "D = C / (6 N)")],
)
def test_tokens_follow_from_compute_and_compute_from_tokens(
    tmp_path: Path, options: dict[str, str], derived: str
):
    selection = read_points(table(tmp_path), "N", "loss", **options)
    points = selection.points
    values = [points.N, points.D, points.C, points.loss]
    assert np.allclose(values, [N, D, 6 * N * D, LOSS], rtol=1e-12)
    assert selection.axes == "NDC" and selection.source.derived == derived


def test_each_row_is_a_trajectory_and_needs_no_note(tmp_path: Path):
    selection = read_points(table(tmp_path), "N", "loss", d="tokens")
    assert len(set(selection.points.cluster)) == 4 and selection.notes == []


def test_of_neither_only_N_is_known(tmp_path: Path):
    assert read_points(table(tmp_path), "N", "loss").axes == "N"


def test_tokens_and_compute_are_taken_as_they_stand_where_both_are_given(tmp_path: Path):
    rows = ["a,1e8,2e9,1.5e18,3.5,1", "b,2e8,4e9,5.0e18,3.2,1"]  # attention, a head: C is no 6 N D
    selection = read_points(table(tmp_path, rows), "N", "loss", d="tokens", c="flops")
    assert selection.points.D.tolist() == [2e9, 4e9]
    assert selection.points.C.tolist() == [1.5e18, 5.0e18]
    assert selection.source.derived is None
    assert "1.04 to 1.25 times 6 N D" in selection.notes[0]


@pytest.mark.parametrize(
    ("row", "doubts"),
    [
        ("a,124,2.5,,3,1", ["N is at most 124 ", "D is at most 2.5 ", "0.0202 tokens per"]),
        ("a,1.24e8,2.5,,3,1", ["D is at most 2.5 ", "e-08 tokens per"]),
        ("a,124,2.5e9,,3,1", ["N is at most 124 ", "e+07 tokens per"]),
        ("a,33000,165000,,3,1", []),
    ],
)
def test_counts_in_millions_or_billions_are_doubted(tmp_path: Path, row: str, doubts: list[str]):
    notes = read_points(table(tmp_path, [row]), "N", "loss", d="tokens").notes
    assert all(note.startswith("WARNING: points.csv: ") for note in notes)
    for doubt, note in zip(doubts, notes, strict=True):
        assert doubt in note


@pytest.mark.parametrize(
    ("column", "loss", "words"),
    [
        ("val_bpb", 0.9, "seems to hold bits per byte"),
        ("bits per byte", 0.9, "seems to hold bits per byte"),
        ("eval/bits-per-character", 1.5, "seems to hold bits per character"),
        ("bits_per_token", 4.5, "seems to hold bits per token"),
        ("Perplexity", 9.5, "give their logarithms"),
        ("loss", 18.0, "perplexities, 18 in the middle"),
    ],
)
def test_losses_that_are_no_nats_per_token_are_doubted(
    tmp_path: Path, column: str, loss: float, words: str
):
    text = f"N,tokens,{column}\n1e8,2e9,{loss}\n"
    (note,) = read_points(write(tmp_path, text), "N", column, d="tokens").notes
    assert note.startswith("WARNING: points.csv: ") and words in note


@pytest.mark.parametrize("column", ["loss", "val/loss", "loss_8_bits"])
def test_losses_in_nats_are_not_doubted(tmp_path: Path, column: str):
    text = f"N,tokens,{column}\n1e8,2e9,10.9\n"
    assert read_points(write(tmp_path, text), "N", column, d="tokens").notes == []


# ----------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    "text",
    [
        "N tokens loss\n1e8 2e9 3.5\n2e8 4e9 3.25\n",
        "   N   tokens  loss\n1e8      2e9   3.5\n\n2e8 4e9 3.25  \n",
        "     N tokens loss\n0  1e8    2e9  3.5\n1  2e8    4e9 3.25\n",
    ],
    ids=["plain", "aligned", "pandas' to_string"],
)
def test_a_table_separated_by_spaces_is_read(tmp_path: Path, text: str):
    points = read_points(write(tmp_path, text), "N", "loss", d="tokens").points
    assert columns_of(points) == [[1e8, 2e8], [2e9, 4e9], [3.5, 3.25]]


@pytest.mark.parametrize("separator", [",", "\t", ";"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_what_spreadsheets_write(tmp_path: Path, separator: str, end: str):
    """After a byte order mark."""
    lines = [line.replace(",", separator) for line in (HEAD, *ROWS)]
    path = write(tmp_path, "\ufeff" + end.join(lines) + end)
    points = read_points(path, "N", "loss", d="tokens").points
    assert columns_of(points) == [N.tolist(), D.tolist(), LOSS.tolist()]


PANDAS = (
    '\n,"Model Size (params)", Training FLOP ,"loss, final",note,note\n'
    '0,"100000000",1.2E+18, 3.5 ,"said ""fine""",x\n\n'
    "1,2e8,4800000000000000000,3.25,,\n"
    "2,+4e8,1.92e19,3.,,\n"
)


def test_what_pandas_writes(tmp_path: Path):
    path = write(tmp_path, PANDAS)
    points = read_points(path, "Model Size (params)", "loss, final", c="Training FLOP").points
    assert points.N.tolist() == [1e8, 2e8, 4e8]
    assert points.C.tolist() == [1.2e18, 4.8e18, 1.92e19]
    assert points.loss.tolist() == [3.5, 3.25, 3.0]


def test_a_refusal_has_the_line_number_of_an_editor(tmp_path: Path):
    path = write(tmp_path, PANDAS.replace("3.25", "-3.25"))
    sentence = refusal(path, "Model Size (params)", "loss, final")
    assert "line 5, column 'loss, final': '-3.25'" in sentence


def test_columns_with_a_dash_are_no_chart(tmp_path: Path):
    path = write(tmp_path, "N,loss - final\n1e8,3.5\n2e8,3.25\n")
    assert read_points(path, "N", "loss - final").points.loss.tolist() == [3.5, 3.25]


# ---------------------------------------------------------------------------------- charts of W&B

CHART = (
    "Step,a - val/loss,a - val/loss__MIN,a - val/loss__MAX,b - val/loss,b - val/loss__MIN,b -"
    " val/loss__MAX\n100,4.0,3.9,4.1,,,\n200,3.5,3.4,3.6,3.8,3.7,3.9\n300,,,,3.25,3.2,3.3\n"
)
RUNS = "Name,State,N,tokens\nb,finished,2e8,4e9\na,finished,1e8,2e9\nz,failed,,\n"


@pytest.fixture
def chart(tmp_path: Path) -> Selection:
    """A chart with the table of its runs."""
    (tmp_path / "runs.csv").write_text(RUNS)
    path = write(tmp_path, CHART)
    runs = str(tmp_path / "runs.csv")
    return read_points(path, "N", "val/loss", d="tokens", runs=runs, cluster="run")


def test_a_chart_gives_the_last_value_of_each_run(chart: Selection):
    assert columns_of(chart.points) == [[1e8, 2e8], [2e9, 4e9], [3.5, 3.25]]
    assert chart.points.cluster.tolist() == ["a", "b"]
    assert "each of its 2 runs counts with its last val/loss" in chart.notes[0]


def test_the_table_of_runs_is_named_by_its_hash(chart: Selection):
    sha256 = hashlib.sha256(RUNS.encode()).hexdigest()
    assert chart.source.runs == TableFile("runs.csv", sha256)


def test_a_chart_without_a_table_of_runs_is_refused(tmp_path: Path):
    expected = "the chart holds run, Step, val/loss: give the others by --runs TABLE"
    assert expected in refusal(write(tmp_path, CHART), "N", "val/loss")


def test_a_run_that_nobody_describes_is_refused(tmp_path: Path):
    runs = tmp_path / "runs.csv"
    runs.write_text("Name,N\na,1e8\n")
    sentence = refusal(write(tmp_path, CHART), "N", "val/loss", runs=str(runs))
    assert "0 rows for the run 'b'" in sentence


# ------------------------------------------------------------------------------- what is left out


def test_rows_without_a_finite_loss_are_left_out_and_named(tmp_path: Path):
    missing = ["", "NaN", "inf", "-Inf", "None", "N/A"] * 2
    rows = [row.replace("3.25", text) for row, text in zip(ROWS * 3, missing, strict=True)]
    selection = read_points(table(tmp_path, rows), "N", "loss", d="tokens")
    assert selection.source.lines_left_out.loss_missing == [3, 7, 11]
    assert "3, 7, 11" in selection.notes[-1]


def test_a_row_that_repeats_another_is_no_further_run(tmp_path: Path):
    """Another seed differs in some cell; a row pasted twice would narrow every interval."""
    selection = read_points(table(tmp_path, [*ROWS, ROWS[1], ROWS[1]]), "N", "loss", d="tokens")
    assert len(selection.points) == len(ROWS)
    assert selection.source.lines_left_out == LinesLeftOut([], [], copies=[6, 7])
    assert (
        "repeat another in every cell and so are no further runs: lines 6, 7"
        in (selection.notes[-1])
    )


def test_a_row_is_left_out_for_one_reason(tmp_path: Path):
    without_loss = ROWS[1].replace("3.25", "nan")
    selection = read_points(table(tmp_path, [*ROWS, *[without_loss] * 2]), "N", "loss", d="tokens")
    assert selection.source.lines_left_out == LinesLeftOut([6], [], copies=[7])


def test_the_other_cells_of_a_row_without_a_loss_are_not_looked_at(tmp_path: Path):
    assert len(read_points(table(tmp_path, [*ROWS, "e,,,,,"]), "N", "loss").points) == 4


def test_the_row_of_a_finite_loss_is_held_to_its_cells(tmp_path: Path):
    assert "line 6, column 'N'" in refusal(table(tmp_path, [*ROWS, "e,,,,2.5,"]))


def test_a_table_without_a_finite_loss_is_refused(tmp_path: Path):
    path = table(tmp_path, ["a,1,1,1,,1", "b,1,1,1,nan,1"])
    assert "no row is left to fit" in refusal(path)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """Five rows, of which the first and the last have the highest loss."""
    return table(tmp_path, [*ROWS, "e,1e9,2e10,1.2e20,3.5,1"])


def test_of_equal_highest_losses_the_first_goes(tied: Path):
    points = read_points(tied, "N", "loss", drop_highest=1).points
    assert points.N.tolist() == [2e8, 4e8, 8e8, 1e9]


def test_the_highest_losses_are_named(tied: Path):
    selection = read_points(tied, "N", "loss", drop_highest=3)
    assert selection.points.loss.tolist() == [3.0, 2.75]
    assert selection.source.lines_left_out.highest_losses == [2, 3, 6]


def test_not_all_losses_can_be_dropped(tied: Path):
    assert "drop_highest=5" in refusal(tied, drop_highest=5)


# -------------------------------------------------------------------------- conditions and clusters


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Rows of several runs and rates; the last has nothing that could be fitted."""
    return table(
        tmp_path, [*ROWS, "b,3e8,6e9,1e19,3.1,.0030", "b,5e8,1e10,3e19,2.9,", "x,?,?,?,?,9"]
    )


@pytest.mark.parametrize(
    ("conditions", "sizes"),
    [
        (["run=b"], [2e8, 3e8, 5e8]),
        (["run=a", "run=c"], [1e8, 4e8]),
        (["lr=3e-3"], [1e8, 2e8, 3e8]),
        (["run=b", "lr=0.003"], [2e8, 3e8]),
        (["lr="], [5e8]),
        ([" run = b "], [2e8, 3e8, 5e8]),
    ],
)
def test_conditions_keep_rows(mixed: Path, conditions: list[str], sizes: list[float]):
    assert read_points(mixed, "N", "loss", where=conditions).points.N.tolist() == sizes


def test_conditions_are_recorded(mixed: Path):
    selection = read_points(mixed, "N", "loss", where=["run=b", "run=a"])
    assert selection.source.filters == {"run": ["b", "a"]}
    assert "4 of 7 rows" in selection.notes[0]


@pytest.mark.parametrize(
    ("conditions", "sentence"),
    [
        (["run=z"], "no row has run=z; values there: a, b, c, d, x"),
        (["run=a", "lr=0.03"], "no row is left"),
        (["runs=a"], "did you mean 'run'?"),
    ],
)
def test_conditions_that_no_row_meets_are_refused(
    mixed: Path, conditions: list[str], sentence: str
):
    assert sentence in refusal(mixed, where=conditions)


def test_a_column_names_trajectories(mixed: Path):
    selection = read_points(mixed, "N", "loss", where=["run=b", "run=a"], cluster="run")
    assert selection.points.cluster.tolist() == ["a", "b", "b", "b"]


def test_an_empty_cell_is_a_trajectory_of_its_own(tmp_path: Path):
    """And line 3 does not join the run called 3."""
    path = table(tmp_path, ["3,1e8,1,1,3.5,", ",2e8,1,1,3,", ",2e8,1,1,3.1,"])
    assert len(set(read_points(path, "N", "loss", cluster="run").points.cluster)) == 3


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "cell",
    ["1,240", "124M", "1.2 B", "diverged", "0", "-3", "0x10", "1e400", "nan", "inf"],
)
def test_no_number_is_guessed(tmp_path: Path, cell: str):
    path = write(tmp_path, f'N,loss\n1e8,3\n"{cell}",2\n')
    assert f"line 3, column 'N': {cell!r}" in refusal(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "0 columns called 'N'"),
        (b"\xff\xfeN\x00,\x00", "cannot be read"),
        (b"N,loss\n", "no row is left to fit"),
        (b"a b c\n1 2 3\n", "0 columns called 'N'; there are: a, b, c"),
        (b"N,Loss\n1,2\n", "did you mean 'Loss'?"),
        (b"N,loss,loss\n1,2,3\n", "2 columns called 'loss'"),
        (b"N,loss\n1,2\n3\n", "line 3: 1 cells"),
        (b'N,loss,run\n1,2,a\n3,4,"b\n5,6,c\n', "is a quotation mark left open?"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, content: bytes, sentence: str):
    assert sentence in refusal(write(tmp_path, content))


def test_a_table_that_is_not_there_is_refused(tmp_path: Path):
    assert "cannot be read" in refusal(tmp_path / "x.csv")
