"""Strangers' tables are read as they stand: what can be read is, what cannot is refused by line, nothing is guessed."""

import itertools

import numpy as np
import pytest

from runtime.cli import UserError
from scaling.points import read_points

HEAD = "run,N,tokens,flops,loss,lr"
ROWS = ("a,1e8,2e9,1.2e18,3.5,0.003", "b,2e8,4e9,4.8e18,3.25,0.003", "c,4e8,8e9,1.92e19,3.0,0.01",
        "d,8e8,1.6e10,7.68e19,2.75,0.03")
N, D = np.array([1e8, 2e8, 4e8, 8e8]), np.array([2e9, 4e9, 8e9, 1.6e10])


def table(tmp_path, rows=ROWS, text=None):
    path = tmp_path / "points.csv"
    text = "\n".join([HEAD, *rows, ""]) if text is None else text
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path, n="N", loss="loss", **options):
    with pytest.raises(UserError) as error:
        read_points(path, n, loss, **options)
    return str(error.value).removeprefix(str(path)).lstrip(": ")


def test_compute_tokens_or_neither(tmp_path):
    path = table(tmp_path)
    for options in ({"d": "tokens"}, {"c": "flops"}):
        chosen = read_points(path, "N", "loss", **options)
        assert np.array_equal(chosen.points.N, N) and np.allclose(chosen.points.D, D, rtol=1e-12)
        assert np.allclose(chosen.points.C, 6 * N * D, rtol=1e-12) and chosen.axes == "NDC" and chosen.notes == []
        assert chosen.points.loss.tolist() == [3.5, 3.25, 3.0, 2.75] and len(set(chosen.points.cluster)) == 4
    assert chosen.source["derived"] == "D = C / (6 N)" and chosen.source["columns"]["C"] == "flops"
    assert read_points(path, "N", "loss").axes == "N"
    assert "d and c are both given" in refusal(path, d="tokens", c="flops")


def test_what_spreadsheets_and_pandas_write(tmp_path):
    for mark, end in itertools.product(",\t;", ("\n", "\r\n", "\r")):         # after a byte order mark
        text = "\ufeff" + end.join(line.replace(",", mark) for line in (HEAD, *ROWS)) + end
        chosen = read_points(table(tmp_path, text=text), "N", "loss", d="tokens")
        assert np.array_equal(chosen.points.N, N) and np.array_equal(chosen.points.D, D)
    text = ('\n,"Model Size (params)", Training FLOP ,"loss, final",note,note\n'
            '0,"100000000",1.2E+18, 3.5 ,"said ""fine""",x\n\n'
            "1,2e8,4800000000000000000,3.25,,\n"
            "2,+4e8,1.92e19,3.,,\n")
    chosen = read_points(table(tmp_path, text=text), "Model Size (params)", "loss, final", c="Training FLOP")
    assert chosen.points.N.tolist() == [1e8, 2e8, 4e8] and chosen.points.C.tolist() == [1.2e18, 4.8e18, 1.92e19]
    assert chosen.points.loss.tolist() == [3.5, 3.25, 3.0]
    assert "line 5, column 'loss, final': '-3.25'" in refusal(          # an editor's line number
        table(tmp_path, text=text.replace("3.25", "-3.25")), "Model Size (params)", "loss, final")


def test_unfinished_runs_and_the_highest_losses_are_left_out_and_named(tmp_path):
    rows = [row.replace("3.25", loss) for row, loss in zip(ROWS * 3, ["", "NaN", "inf", "-Inf", "None", "N/A"] * 2, strict=True)]
    chosen = read_points(table(tmp_path, rows), "N", "loss", d="tokens")
    assert chosen.source["lines_left_out"] == {"loss_missing": [3, 7, 11], "highest_losses": []}
    assert "3, 7, 11" in chosen.notes[0]
    # Such a row's other cells are not looked at; the row of a finite loss is held to them.
    assert len(read_points(table(tmp_path, [*ROWS, "e,,,,,"]), "N", "loss").points.N) == 4
    assert "line 6, column 'N'" in refusal(table(tmp_path, [*ROWS, "e,,,,2.5,"]))
    assert "no row is left to fit" in refusal(table(tmp_path, ["a,1,1,1,,1", "b,1,1,1,nan,1"]))
    path = table(tmp_path, [*ROWS, "e,1e9,2e10,1.2e20,3.5,1"])
    assert read_points(path, "N", "loss", drop_highest=1).points.N.tolist() == [2e8, 4e8, 8e8, 1e9]    # of equal ones the first
    chosen = read_points(path, "N", "loss", drop_highest=3)
    assert chosen.points.loss.tolist() == [3.0, 2.75] and chosen.source["lines_left_out"]["highest_losses"] == [2, 3, 6]
    assert "drop_highest=5" in refusal(path, drop_highest=5)


def test_conditions_and_clusters(tmp_path):
    path = table(tmp_path, [*ROWS, "b,3e8,6e9,1e19,3.1,.0030", "b,5e8,1e10,3e19,2.9,", "x,?,?,?,?,9"])     # left out: anything
    for where, kept in ((["run=b"], [2e8, 3e8, 5e8]), (["run=a", "run=c"], [1e8, 4e8]), (["lr=3e-3"], [1e8, 2e8, 3e8]),
                        (["run=b", "lr=0.003"], [2e8, 3e8]), (["lr="], [5e8]), ([" run = b "], [2e8, 3e8, 5e8])):
        assert read_points(path, "N", "loss", where=where).points.N.tolist() == kept
    chosen = read_points(path, "N", "loss", where=["run=b", "run=a"], cluster="run")
    assert chosen.source["filters"] == {"run": ["b", "a"]} and "4 of 7 rows" in chosen.notes[0]
    assert chosen.points.cluster.tolist() == ["a", "b", "b", "b"]
    for where, told in ((["run=z"], "no row has run=z; values there: a, b, c, d, x"), (["run=a", "lr=0.03"], "no row is left"),
                        (["runs=a"], "did you mean 'run'?")):
        assert told in refusal(path, where=where)
    # An empty cell is a trajectory of its own, and line 3 does not join the run called 3.
    path = table(tmp_path, ["3,1e8,1,1,3.5,", *[",2e8,1,1,3,"] * 2])
    assert len(set(read_points(path, "N", "loss", cluster="run").points.cluster)) == 3


@pytest.mark.parametrize("cell", ["1,240", "124M", "1.2 B", "diverged", "0", "-3", "0x10", "1e400", "nan", "inf"])
def test_no_number_is_guessed(tmp_path, cell):
    path = table(tmp_path, [*ROWS[:2], ROWS[2].replace("8e9", f'"{cell}"'), ROWS[3]])
    assert refusal(path, d="tokens").startswith(f"line 4, column 'tokens': {cell!r}")


@pytest.mark.parametrize(("text", "sentence"), [
    (b"", "0 columns called 'N'"), (b"\xff\xfeN\x00,\x00", "cannot be read"), (None, "cannot be read"),
    (b"N,loss\n", "no row is left to fit"), (b"a b c\n1 2 3\n", "0 columns called 'N'; there are: a b c"),
    (b"N,Loss\n1,2\n", "did you mean 'Loss'?"), (b"N,loss,loss\n1,2,3\n", "2 columns called 'loss'"),
    (b"N,loss\n1,2\n3\n", "line 3: 1 cells"), (b'N,loss,run\n1,2,a\n3,4,"b\n5,6,c\n', "is a quotation mark left open?")])
def test_tables_that_are_none(tmp_path, text, sentence):
    assert sentence in refusal(table(tmp_path, text=text) if text is not None else tmp_path / "x.csv")
