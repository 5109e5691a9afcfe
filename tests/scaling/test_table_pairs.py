"""scaling/table_pairs.py: the pairs of anyone's table get what our own studies get."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from scaling import precision
from tests.conftest import asked
from tests.helpers.scaling_runs import strict

GAPS = {1: 0.1, 2: 0.3, 3: 0.2}  # per cent, of three pairs
SIZES = (10**8, 2 * 10**8, 4 * 10**8)


def write_table(path: Path, curve: Sequence[float] = (1.0,), sizes: Sequence[int] = SIZES):
    """Losses of both arms; `curve`: shares of the tokens at which they are given."""
    lines = ["precision,run,loss,N,D"]
    for N in sizes:
        for seed, gap in GAPS.items():
            for share in curve:
                loss = 3.0 + 0.01 * seed + 0.5 * (1 - share)
                lines += [
                    f"BF16,{seed},{loss!r},{N},{int(20 * N * share)}",
                    f"fp8,{seed},{loss * (1 + gap / 100)!r},{N},{int(20 * N * share)}",
                ]
    path.write_text("\n".join(lines) + "\n")
    return [
        "--points",
        path,
        "--arm",
        "precision",
        "--pair",
        "run",
        "--loss",
        "loss",
        "--out",
        path.parent / "out",
    ]


def test_the_gap_is_that_of_a_paired_t_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    asked(capsys, precision.main, *write_table(tmp_path / "t.csv", sizes=SIZES[:1]), "margin=1")
    row = strict(tmp_path / "out/precision.json")["common"]["fp8"]
    interval = ttest_1samp(
        [100 * np.log1p(gap / 100) for gap in GAPS.values()], 0
    ).confidence_interval()
    assert [row["bf16"]["low"], row["bf16"]["high"]] == pytest.approx([interval.low, interval.high])
    assert row["tost_p"] == pytest.approx(
        ttest_1samp([*GAPS.values()], 1, alternative="less").pvalue
    )


def test_points_of_one_curve_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *write_table(tmp_path / "t.csv", curve=(0.5, 0.75, 1.0)),
        "--n",
        "N",
        "--d",
        "D",
        "margin=1",
        "--all",
    ]
    output = asked(capsys, precision.main, *words)
    result = strict(tmp_path / "out/precision.json")
    assert (result["common"]["fp8"]["bf16"]["n"], result["common"]["fp8"]["pairs"]) == (9, 27)
    assert (
        "BF16, two of run" in output
        and len(result["sizes"]) == 9
        and (tmp_path / "out/precision.png").exists()
    )


@pytest.mark.parametrize(
    ("change", "words", "sentence"),
    [
        (("BF16", "half"), (), "which precision is the baseline? Give base=NAME, one of half, fp8"),
        ((",1,3.01", ",1,x"), (), "line 2, column 'loss': 'x' is no plain"),
        (("fp8,1,", "fp8,2,"), (), "are both the fp8 run of pair '2'"),
        (("", ""), ("--n", "N"), "give n= and d= both"),
        (("BF16,", "BF16,other"), (), "holds no pair"),
        (("", ""), ("--d", "tokns", "--n", "N"), "0 columns called 'tokns'"),
    ],
)
def test_mistakes_are_a_sentence_and_nothing_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str],
    words: tuple[str, ...],
    sentence: str,
) -> None:
    arguments = write_table(tmp_path / "t.csv", sizes=SIZES[:1])
    path = tmp_path / "t.csv"
    path.write_text(path.read_text().replace(*change) if change[0] else path.read_text())
    assert sentence in asked(capsys, precision.main, *arguments, *words, code=2)
    assert not (tmp_path / "out").exists()


OWN_WORDS = ("FP8", "BF16", "bf16", "CPU", "Linear", "as trained", "tok/s", "speed", "branches")


def other_table(
    path: Path, arms: Sequence[str] = ("int8", "int4"), curve: Sequence[float] = (1.0,)
):
    """The table under names of its own: baseline "float", a pair called a replica."""
    lines = ["format,replica,perplexity_nats,size,seen"]
    for N in SIZES:
        for replica, gap in GAPS.items():
            for share in curve:
                loss = 3.0 + 0.01 * replica + 0.5 * (1 - share)
                counts = f"{N},{int(20 * N * share)}"
                lines.append(f"float,{replica},{loss!r},{counts}")
                for factor, arm in enumerate(arms, 1):
                    worse = loss * (1 + factor * gap / 100)
                    lines.append(f"{arm},{replica},{worse!r},{counts}")
    path.write_text("\n".join(lines) + "\n")
    columns = "--arm format --pair replica --loss perplexity_nats --n size --d seen --base float"
    return ["--points", path, *columns.split(), "--out", path.parent / "out", "margin=1", "--all"]


def table_of_one_size(path: Path) -> list:
    """other_table() cut to one size and read without N and D."""
    words = other_table(path)
    path.write_text("\n".join(path.read_text().splitlines()[:10]))
    return [word for word in words if word not in ("--n", "size", "--d", "seen")]


@pytest.mark.parametrize("curve", [(1.0,), (0.5, 0.75, 1.0)])
def test_the_page_speaks_of_the_tables_own_arms_and_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None, curve: Sequence[float]
) -> None:
    output = asked(capsys, precision.main, *other_table(tmp_path / "t.csv", curve=curve))
    assert not [word for word in OWN_WORDS if word in output]
    assert "Each format minus float, column perplexity_nats" in output
    assert "| size" in output and "| seen" in output and "gap in perplexity_nats [%]" in output
    assert "float, two of replica" in output and "Null, other replica" in output
    assert "two float runs" in output


def test_a_difference_speaks_of_the_tables_own_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = other_table(tmp_path / "t.csv", curve=(0.5, 0.75, 1.0))
    output = asked(capsys, precision.main, *words, "compare=int4:int8")
    table = output[output.index("| difference") :].split("more table")[0]
    assert not [word for word in OWN_WORDS if word in table]
    header = table.split("\n")[0]
    for column in ("size", "independent pairs", "difference in perplexity_nats [%]"):
        assert f"| {column} " in header
    assert "points of one curve count once" in table
    gaps = np.array([*GAPS.values()])
    expected = np.mean(100 * np.log((100 + 2 * gaps) / (100 + gaps)))
    (difference,) = strict(tmp_path / "out/precision.json")["differences"]
    assert difference["gap"]["bf16"]["mean"] == pytest.approx(expected)


def test_a_difference_takes_names_with_colons_and_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = other_table(tmp_path / "t.csv", arms=("fp8:e4m3", "fp8 e5m2"))
    asked(capsys, precision.main, *words, "compare=fp8 e5m2:fp8:e4m3")
    (difference,) = strict(tmp_path / "out/precision.json")["differences"]
    assert (difference["recipe"], difference["minus"]) == ("fp8 e5m2", "fp8:e4m3")


def test_two_readings_of_a_difference_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = other_table(tmp_path / "t.csv", arms=("a", "b:c", "a:b", "c"))
    page = asked(capsys, precision.main, *words, "compare=a:b:c", code=2)
    assert "can be read as a and b:c, a:b and c" in page


def test_the_tables_baseline_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = other_table(tmp_path / "t.csv")
    page = asked(capsys, precision.main, *words, "compare=int4:float", code=2)
    assert "float is what every gap is to" in page


def test_a_difference_without_sizes_has_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = table_of_one_size(tmp_path / "t.csv")
    output = asked(capsys, precision.main, *words, "compare=int4:int8")
    assert output.count("| int4 minus int8 ") == 1
    assert strict(tmp_path / "out/precision.json")["differences"][0]["sizes"] == []


def test_a_page_without_sizes_speaks_of_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = table_of_one_size(tmp_path / "t.csv")
    output = asked(capsys, precision.main, *words)
    assert "over all pairs" in output and "The same pairs for all" in output
    assert "largest common budget" not in output and "decade" not in output


def test_the_json_names_the_columns_and_the_arms_as_the_table_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    asked(capsys, precision.main, *other_table(tmp_path / "t.csv"))
    result = strict(tmp_path / "out/precision.json")
    assert result["table"] == {
        "arm_column": "format",
        "pair_column": "replica",
        "loss_column": "perplexity_nats",
        "n_column": "size",
        "d_column": "seen",
        "baseline": "float",
    }
    assert result["conventions"] == {"N": "column size"} and set(result["common"]) == {
        "int8",
        "int4",
    }


def test_an_arm_called_bf16_is_not_the_baseline_where_base_names_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    asked(capsys, precision.main, *other_table(tmp_path / "t.csv", arms=("bf16",)))
    common = strict(tmp_path / "out/precision.json")["common"]
    expected = np.mean([100 * np.log1p(gap / 100) for gap in GAPS.values()])
    assert common["bf16"]["bf16"]["mean"] == pytest.approx(expected)


def test_the_figure_names_the_tables_baseline_and_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr("lib.plots.render", lambda figure, form: drawn.append(figure) or b"")
    asked(capsys, precision.main, *other_table(tmp_path / "t.csv"))
    title = drawn[0].legends[0].get_title().get_text()
    assert title.startswith("Loss minus that of float, column perplexity_nats (n = 18 pairs")


def test_pairs_that_never_differ_have_a_gap_of_zero_without_an_interval(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_figures: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table whose precisions agree in every digit is analysed, not refused."""
    monkeypatch.setitem(GAPS, 1, 0.0)
    monkeypatch.setitem(GAPS, 2, 0.0)
    monkeypatch.setitem(GAPS, 3, 0.0)
    words = [*write_table(tmp_path / "t.csv"), "--n", "N", "--d", "D", "margin=1"]
    page = asked(capsys, precision.main, *words)
    assert "second pair" not in page and "the pairs of a size have equal gaps" in page
    row = strict(tmp_path / "out/precision.json")["common"]["fp8"]
    assert row["bf16"]["mean"] == row["over_sizes"]["mean"] == 0
    assert row["over_sizes"]["low"] is None


def test_counts_in_millions_are_doubted_as_by_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = write_table(tmp_path / "t.csv", sizes=(100, 200, 400))
    page = asked(capsys, precision.main, *words, "--n", "N", "--d", "D")
    assert "t.csv: N is at most 400 parameters: is it in millions or billions?" in page


def test_tokens_in_billions_are_not_rounded_to_whole_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.15 and 0.3 billion would both be 0, and two budgets one."""
    words = write_table(tmp_path / "t.csv", sizes=SIZES[:1])
    table = tmp_path / "t.csv"
    table.write_text(table.read_text().replace(f",{20 * SIZES[0]}", ",0.15"))
    words += ["--n", "N", "--d", "D"]
    assert "line 2, column 'D': 0.15 is no count" in asked(capsys, precision.main, *words, code=2)


def test_a_huge_gap_over_all_sizes_is_given_in_both_units(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_figures: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each size says +82 %; the mean of logarithms over all sizes is +60 %."""
    for seed, gap in {1: 82.0, 2: 82.2, 3: 82.4}.items():
        monkeypatch.setitem(GAPS, seed, gap)
    page = asked(capsys, precision.main, *write_table(tmp_path / "t.csv"), "--n", "N", "--d", "D")
    assert "+60 % here is a loss that differs by +82.2 %" in page


def test_losses_in_bits_are_doubted_as_by_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = [*write_table(tmp_path / "t.csv"), "--n", "N", "--d", "D"]
    table = tmp_path / "t.csv"
    heading, rows = table.read_text().split("\n", 1)
    column = words[words.index("--loss") + 1]
    table.write_text(heading.replace(column, "bpb") + "\n" + rows)
    words[words.index("--loss") + 1] = "bpb"
    page = asked(capsys, precision.main, *words)
    assert "WARNING: t.csv: column 'bpb' seems to hold bits per byte" in page


def test_some_counts_in_millions_among_others_are_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    words = write_table(tmp_path / "t.csv", sizes=(100, 2 * 10**8, 4 * 10**8))
    page = asked(capsys, precision.main, *words, "--n", "N", "--d", "D")
    assert "WARNING: t.csv: N is below" in page and "up to 4e+08 at others" in page


def test_an_arm_with_a_bar_in_its_name_keeps_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    page = asked(capsys, precision.main, *other_table(tmp_path / "t.csv", arms=("int8|sym",)))
    rows = [line for line in page.splitlines() if r"int8\|sym" in line]
    heads = page.splitlines()[0]
    assert rows[0].replace(r"\|", "").count("|") == heads.count("|")
