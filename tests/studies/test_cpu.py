"""studies/cpu: the rows belong to the study as it stands, its text is refused where it differs, its
power is that of theory."""

import importlib.util
import io
import json
import math
import re
from collections import defaultdict
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import t

from lib.errors import UserError
from scaling import ledger
from scaling.cpu_kind import Kind
from scaling.gap_predictions import GapScore
from scaling.ledger import read_entries
from scaling.predictions import RunScore, ScoreFile
from scaling.study import expand, load_study
from tests.conftest import ROOT, asked, write_source
from tests.helpers.paired_runs import fake_pair

HOME = ROOT / "studies/cpu"


def module(name):
    """A script of studies/cpu, which is no package."""
    spec = importlib.util.spec_from_file_location(f"study_cpu_{name}", HOME / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def corpus():
    return module("corpus")


@pytest.fixture(scope="module")
def power():
    return module("power")


@pytest.mark.parametrize("name", ["cpu", "cpu_lr"])
def test_every_row_is_a_run_of_the_study_and_was_trained_on_one_text(
    name: str, capsys: pytest.CaptureFixture[str]
):
    entries = read_entries(ROOT / "studies" / name / "runs.jsonl")
    assert f"{len(entries)} of " in asked(capsys, ledger.main, ROOT / f"configs/study_{name}.py")
    assert len({entry.summary["data_sha256"] for entry in entries.values()}) <= 1
    assert all(
        entry.summary["status"] == "ok" and entry.summary["git_commit"]
        for entry in entries.values()
    )


def test_what_was_declared_is_the_study():
    rows = {row.run: row.pair_id for row in expand(load_study(ROOT / "configs/study_cpu.py"))}
    declared = json.loads((HOME / "study.json").read_text())
    assert {run["run"]: run["pair_id"] for run in declared["runs"]}.items() <= rows.items()
    assert declared["margin_percent"] == 0.25


@pytest.mark.parametrize(
    "path, is_text",
    [
        ("scipy/stats/_stats_py.py", True),
        ("torch/include/c10/util/Half.h", True),
        ("transformers/models/bert/modeling.py", True),
        ("torch/version.py", False),
        ("numpy/__config__.py", False),
        ("scipy/stats/tests/test_stats.py", False),
        ("torch/include/ATen/native/cuda/Loops.h", False),
        ("torch/_inductor/ir.py", False),
        ("torch/include/c10/cuda/CUDAStream.h", False),
    ],
)
def test_text_that_a_build_writes_or_one_device_has_is_left_out(path: str, is_text: bool, corpus):
    assert corpus.is_source(path) == is_text


def test_other_shards_are_refused(corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for seed, name in enumerate(corpus.LICENSES):
        write_source(tmp_path / name, seed)
    monkeypatch.setattr(corpus, "RECORD", tmp_path / "data.json")
    corpus.RECORD.write_text(json.dumps(corpus.describe(tmp_path)))
    corpus.check_shards(tmp_path)
    for path in (tmp_path / "c").iterdir():
        path.unlink()
    (tmp_path / "c").rmdir()
    write_source(tmp_path / "c", 9)
    with pytest.raises(
        UserError, match=r"/c holds other train tokens than the study was trained on"
    ):
        corpus.check_shards(tmp_path)


def test_another_version_of_a_package_is_refused(corpus, monkeypatch: pytest.MonkeyPatch):
    corpus.check_versions()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    with pytest.raises(
        UserError, match=r"accelerate 0\.1 is installed, but the study's text is that of"
    ):
        corpus.check_versions()


def test_a_missing_text_gets_a_sentence(corpus, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    told = asked(capsys, corpus.main, tmp_path / "none", f"out={tmp_path}/data", code=2)
    assert "prose.jsonl.xz: docs/study.md says where its text comes from" in told


def test_the_page_has_rows_of_the_power_table(power, capsys: pytest.CaptureFixture[str]):
    (printed,) = read_tables(asked(capsys, power.main))
    page = read_tables((ROOT / "docs/study.md").read_text())
    (of_page,) = [table for table in page if table[0] == printed[0]]
    assert [row for row in of_page if row not in printed] == []


@pytest.mark.parametrize("budgets", [1, 4])
def test_simulated_intervals_have_the_width_that_theory_gives_many_seeds(budgets: int, power):
    means, halves = power.simulate(np.random.default_rng(1), 200, budgets, 0.3, 0.5)
    se = 0.5 * math.sqrt((power.SHARED + (1 - power.SHARED) / budgets) / 200)
    assert np.median(halves) == pytest.approx(1.972 * se, rel=0.02)
    assert means.std() == pytest.approx(se, rel=0.05) and means.mean() == pytest.approx(
        0.3, abs=0.01
    )


def test_the_design_keeps_what_the_study_promises(power):
    """Half of the studies at least have the half-width, and see the positive control at each
    size."""
    for size, recipe, seeds, budgets in power.designs(load_study(ROOT / "configs/study_cpu.py")):
        sd, gap = (
            (power.NVFP4_SD, power.NVFP4_GAP)
            if recipe == "nvfp4"
            else (power.TENSORWISE_SD, power.TENSORWISE_GAP)
        )
        means, halves = power.simulate(np.random.default_rng(0), seeds, budgets, gap, sd)
        if recipe == "tensorwise" and size in ("cpu_30k", "cpu_101k"):
            assert np.median(halves) < power.TARGET
        if recipe == "nvfp4":
            assert np.mean(means > halves) > 0.5


CNXML = b"""<document xmlns="http://cnx.rice.edu/cnxml"
 xmlns:m="http://www.w3.org/1998/Math/MathML"><title>Forces</title>
<metadata><x>left out</x></metadata><content><note><label>Note</label>
<title>A title</title><para>One   <emphasis>line</emphasis>,<newline/>
no picture<media><image/> alt</media>: <m:math><m:mn>3</m:mn><m:mi>x</m:mi></m:math>.</para></note>
<para><title>Strategy</title>Go <list><item>one</item><item>two</item></list></para>
<table><row><entry>a\xc2\xa0b</entry><entry><para>c</para><para>d</para></entry></row></table></content>
</document>"""


def test_a_module_becomes_lines_of_text_without_metadata_and_pictures():
    assert (
        module("public_text").flatten(CNXML)
        == "Forces\n\nNote\nA title\n\nOne line, no picture: 3 x.\n\nStrategy Go one"
        " two\n\na\u00a0b\n\nc d"
    )


def test_a_long_latex_file_is_cut_at_its_sections_and_a_short_one_is_whole():
    text = module("public_text")
    body = "A \\label{x}  \n\n\n\\section{One}\nfirst\n\\section{Two}\n"
    assert text.sections(body.encode()) == ["A \\label{x}\n\n\\section{One}\nfirst\n\\section{Two}"]
    long = text.sections((body + "y" * 60_000).encode())
    assert [part[:13] for part in long] == ["A \\label{x}", "\\section{One}", "\\section{Two}"]


def test_short_texts_and_second_copies_are_left_out():
    documents = [
        {"text": letter * n, "source": source}
        for letter, n, source in (("a", 401, "first"), ("b", 400, "short"), ("a", 401, "copy"))
    ]
    assert [one["source"] for one in module("public_text").without_copies(iter(documents))] == [
        "first"
    ]


# -------------------------------------------------------------------------- another kind of machine


@pytest.fixture(scope="module")
def elsewhere():
    return module("elsewhere")


OLD_CPU = Kind(vendor="AuthenticAMD", model="", capability="AVX2", flags=("avx2",))
NEW_CPU = Kind(vendor="AuthenticAMD", model="", capability="AVX512", flags=("avx2", "avx512f"))


def entries_of(losses: dict[str, float], machine: Kind = OLD_CPU) -> dict[str, SimpleNamespace]:
    return {
        run: SimpleNamespace(summary={"loss_bf16": loss}, machine=machine)
        for run, loss in losses.items()
    }


BF16, FP8 = "cpu_30k_bf16_t5_s1", "cpu_30k_rowwise_t5_s1"


def test_a_change_of_a_loss_is_in_per_cent_of_the_old_cpus(elsewhere):
    there, here = entries_of({BF16: 2.0}), entries_of({BF16: 2.02, FP8: 1.0}, NEW_CPU)
    (change,) = elsewhere.changes_of_losses(there, here)
    assert change.percent == pytest.approx(1.0)


def test_a_change_names_its_arm(elsewhere):
    there, here = entries_of({BF16: 2.0}), entries_of({BF16: 2.02, FP8: 1.0}, NEW_CPU)
    (change,) = elsewhere.changes_of_losses(there, here)
    assert change.arm == "bf16"


def test_a_run_that_the_new_cpu_trained_first_changes_from_the_old_ones_loss(elsewhere):
    there, here = entries_of({BF16: 2.02}, NEW_CPU), entries_of({BF16: 2.0})
    (change,) = elsewhere.changes_of_losses(there, here)
    assert change.percent == pytest.approx(1.0)


def test_a_change_of_a_gap_needs_both_runs_of_the_pair(elsewhere):
    there = entries_of({BF16: 2.0, FP8: 2.02, "cpu_30k_rowwise_t5_s2": 2.0})
    here = entries_of({BF16: 1.0, FP8: 1.03, "cpu_30k_rowwise_t5_s2": 2.0})
    (change,) = elsewhere.changes_of_gaps(there, here)
    assert change.arm == "rowwise" and change.percent == pytest.approx(3.0 - 1.0)


def test_changes_in_one_direction_are_not_averaged_out(elsewhere):
    assert elsewhere.root_mean_square([3.0, 4.0, 5.0]) == pytest.approx(math.sqrt(50 / 3))


def test_the_page_has_the_table_of_the_command(elsewhere, capsys: pytest.CaptureFixture[str]):
    printed = asked(capsys, elsewhere.main)
    page = (ROOT / "docs/study.md").read_text()
    for line in printed.strip().split("\n")[2:]:
        numbers = " | ".join(cell.strip() for cell in line.strip("|").split("|")[2:])
        assert f"| {numbers} |" in page


# --------------------------------------------------------------------------- the tables of the page

Tables = list[list[list[str]]]  # of rows of cells


@pytest.fixture(scope="module")
def tables():
    return module("tables")


@pytest.fixture(scope="module")
def printed_tables(tables, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Those of the study's run folders, as its rows have them."""
    out = tmp_path_factory.mktemp("study")
    assert ledger.main([str(ROOT / "configs/study_cpu.py"), "--restore", f"out={out}"]) == 0
    page = io.StringIO()
    with redirect_stdout(page):
        assert tables.main([str(out / "cpu")]) == 0
    return read_tables(page.getvalue())


def read_tables(text: str) -> Tables:
    """Tables in Markdown, without the lines below their headers."""
    tables, is_inside = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            is_inside = False
            continue
        if not is_inside:
            tables.append([])
            is_inside = True
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if set(cells[0]) != {"-"}:
            tables[-1].append(cells)
    return tables


def row_of(tables: Tables, header: str, *names: str) -> dict[str, str]:
    """Cells by column of the row that begins with `names`, in the table whose header begins with
    `header`."""
    table = next(table for table in tables if table[0][0] == header)
    row = next(row for row in table if tuple(row[: len(names)]) == names)
    return dict(zip(table[0], row, strict=True))


@pytest.fixture(scope="module")
def summaries() -> dict[tuple[str, str, int, int], dict]:
    """(size, arm, tokens per parameter, seed) -> the row's summary."""
    by_place = {}
    for run, entry in read_entries(HOME / "runs.jsonl").items():
        size, arm, budget, seed = re.fullmatch(r"cpu_([0-9a-z]+)_(\w+)_t(\d+)_s(\d+)", run).groups()
        by_place[size, arm, int(budget), int(seed)] = entry.summary
    return by_place


def gaps_by_seed(summaries, of_arm: str, base: str = "bf16", of_size: str | None = None):
    """(size, seed) -> tokens per parameter -> 100 ln(loss / loss of base)."""
    gaps = defaultdict(dict)
    for (size, arm, budget, seed), summary in summaries.items():
        baseline = summaries.get((size, base, budget, seed))
        if arm == of_arm and of_size in (None, size) and baseline:
            ratio = summary["loss_bf16"] / baseline["loss_bf16"]
            gaps[size, seed][budget] = 100 * math.log(ratio)
    return gaps


def mean_and_half(values) -> tuple[float, float]:
    """With half the 95 % t-interval."""
    values = np.array(list(values))
    return values.mean(), t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5


def read_estimate(cell: str) -> list[float]:
    return [float(number) for number in cell.split(" ± ")]


def test_the_page_has_the_tables_of_the_command(printed_tables: Tables):
    page = read_tables((ROOT / "docs/study.md").read_text())
    assert [table[0] for table in printed_tables if table not in page] == []


@pytest.mark.parametrize("size", ["30k", "529k", "all sizes"])
def test_a_gap_is_the_mean_over_seeds_of_their_budgets(
    size: str, printed_tables: Tables, summaries
):
    of_size = None if size == "all sizes" else size
    gaps = gaps_by_seed(summaries, "tensorwise", of_size=of_size)
    expected = mean_and_half(np.mean(list(by_budget.values())) for by_budget in gaps.values())
    name = next(row[0] for row in printed_tables[0] if row[0].startswith("tensorwise ("))
    row = row_of(printed_tables, "arm (seeds)", name)
    assert read_estimate(row[size]) == pytest.approx(expected, abs=1e-3)


def test_seeds_are_counted_by_size(printed_tables: Tables):
    assert any(row[0].startswith("nvfp4 (10, 4, 3, 5, ") for row in printed_tables[0])


def test_a_gap_at_a_budget_is_the_mean_over_seeds(printed_tables: Tables, summaries):
    gaps = gaps_by_seed(summaries, "nvfp4", of_size="101k")
    expected = mean_and_half(by_budget[20] for by_budget in gaps.values())
    row = row_of(printed_tables, "arm", "nvfp4", "20")
    assert read_estimate(row["101k"]) == pytest.approx(expected, abs=1e-3)


def test_growth_is_each_seeds_slope_over_doublings(printed_tables: Tables, summaries):
    slopes = []
    for by_budget in gaps_by_seed(summaries, "nvfp4", of_size="30k").values():
        slopes.append(np.polyfit(np.log2(list(by_budget)), list(by_budget.values()), 1)[0])
    row = row_of(printed_tables, "change per doubling", "nvfp4")
    # budgets are whole steps: their logarithms are not quite those of 5 to 40
    assert read_estimate(row["30k"]) == pytest.approx(mean_and_half(slopes), abs=5e-3)


def test_a_difference_is_over_the_baselines_that_both_arms_have(printed_tables: Tables, summaries):
    gaps = gaps_by_seed(summaries, "mxfp8_e5m2", "mxfp8", "212k")
    expected = mean_and_half(np.mean(list(by_budget.values())) for by_budget in gaps.values())
    row = row_of(printed_tables, "difference", "mxfp8_e5m2 minus mxfp8")
    assert read_estimate(row["212k"]) == pytest.approx(expected, abs=2e-3)


def test_runs_that_skipped_steps_are_counted_by_size(printed_tables: Tables, summaries):
    of_size = [summary for place, summary in summaries.items() if place[0] == "101k"]
    skipped = [summary["skipped_steps"] for summary in of_size]
    assert max(skipped) > 1
    row = row_of(printed_tables, "the guard's skipped steps", "101k")
    assert row["runs"] == str(len(of_size))
    assert row["with skipped steps"] == str(sum(number > 0 for number in skipped))
    assert row["most in a run"] == str(max(skipped))
    assert row["rolled back"] == str(sum(summary["rollbacks"] > 0 for summary in of_size))


def test_a_run_that_was_rolled_back_is_counted_and_another_studys_is_not(tables):
    runs = {"cpu_30k_bf16_t5_s1": (2, 1), "cpu_30k_bf16_t5_s2": (0, 0), "other": (9, 9)}
    records = [
        SimpleNamespace(run_id=run, summary={"skipped_steps": skipped, "rollbacks": rollbacks})
        for run, (skipped, rollbacks) in runs.items()
    ]
    assert tables.guard_table(records)[1:] == [
        ["30k", "2", "1", "2", "1"],
        ["all sizes", "2", "1", "2", "1"],
    ]


def test_nulls_by_budget_are_root_mean_squares(printed_tables: Tables, summaries):
    gaps = gaps_by_seed(summaries, "bf16_null")
    at_budget = [by_budget[40] for by_budget in gaps.values() if 40 in by_budget]
    row = row_of(printed_tables, "null, at tokens per parameter", "40")
    assert row["pairs"] == str(len(at_budget))
    root_mean_square = math.sqrt(sum(gap**2 for gap in at_budget) / len(at_budget))
    assert float(row["root mean square"]) == pytest.approx(root_mean_square, abs=5e-3)


def test_pairs_are_counted_by_whether_their_runs_skipped_equally_many_steps(
    printed_tables: Tables, summaries
):
    counts = {True: 0, False: 0}
    for (size, arm, budget, seed), summary in summaries.items():
        if arm not in ("bf16", "bf16_null", "nvfp4"):
            baseline = summaries[size, "bf16", budget, seed]
            counts[summary["skipped_steps"] == baseline["skipped_steps"]] += 1
    header = "FP8 and BF16 run of a pair"
    equal = row_of(printed_tables, header, "skipped equally many steps")
    assert equal["pairs"] == str(counts[True])
    assert row_of(printed_tables, header, "did not")["pairs"] == str(counts[False])


@pytest.mark.parametrize("kind", ["", "gap_"])
def test_a_committed_score_is_of_its_frozen_prediction(kind: str):
    paths = sorted(HOME.glob(f"law/{kind}score_*.json"))
    assert paths
    for path in paths:
        score = json.loads(path.read_text())
        frozen = json.loads((HOME / f"law/{kind}prediction_{score['target']}.json").read_text())
        assert score["prediction_sha256"] == frozen["sha256"]


def test_a_committed_score_has_the_losses_of_the_rows():
    entries = read_entries(HOME / "runs.jsonl")
    for path in HOME.glob("law/score_*.json"):
        for run in json.loads(path.read_text())["runs"]:
            assert run["loss"] == entries[run["run_id"]].summary["loss_bf16"]


def test_every_run_that_was_predicted_began_after_its_prediction():
    entries = read_entries(HOME / "runs.jsonl")
    paths = sorted(HOME.glob("law/*prediction_cpu_1m_*.json"))
    assert len(paths) == 16  # twelve losses, four gaps
    for path in paths:
        frozen = json.loads(path.read_text())
        started = entries[frozen["target"]["name"]].summary["t_start"]
        assert datetime.fromisoformat(frozen["date"]) < datetime.fromisoformat(started)


def test_a_group_without_pairs_has_no_gap(tables, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "_skipped", lambda run: 0)
    equal, unequal = tables.skip_table([fake_pair(0.1), fake_pair(0.2, trunk="other")])[1:]
    assert equal[1] == "2" and unequal[1:] == ["0", ""]


FROZEN_LOSS, FROZEN_GAP = "prediction_cpu_1m_mxfp8_t10_s1", "gap_prediction_cpu_1m_mxfp8_t10_s1"


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    """A folder of one frozen loss and gap; the first of two runs is outside, the gap inside."""
    for name in (FROZEN_LOSS, FROZEN_GAP):
        (tmp_path / f"{name}.json").write_text((HOME / f"law/{name}.json").read_text())
    target = FROZEN_LOSS.removeprefix("prediction_")
    run = RunScore(
        run_id="",
        summary_sha256="",
        t_start="",
        loss=1.2,
        error_nats=0.0,
        error_percent=0.0,
        inside=False,
        forms=[],
    )
    score = ScoreFile(1, target, "", [run, replace(run, loss=1.3, inside=True)])
    (tmp_path / f"score_{target}.json").write_text(json.dumps(asdict(score)))
    gap = GapScore(1, target, "", [], 2, 0.4, None, None, 0.178, -0.3, 0.66, True, 0.0)
    (tmp_path / f"gap_score_{target}.json").write_text(json.dumps(asdict(gap)))
    return tmp_path


def test_a_scored_prediction_has_its_losses_and_its_gap(tables, scored: Path):
    row = tables.prediction_table(scored)[1]
    assert row == [
        "mxfp8", "10", "1.300 (1.228 to 1.424)", "1.200 (outside), 1.300", "+0.18 (-0.30 to +0.66)",
        "+0.40",
    ]  # fmt: skip


def test_a_gap_outside_its_interval_is_marked(tables, scored: Path):
    path = next(scored.glob("gap_score_*"))
    path.write_text(path.read_text().replace("true", "false"))
    assert tables.prediction_table(scored)[1][-1] == "+0.40 (outside)"


def test_a_prediction_without_a_score_stands_alone(tables, scored: Path):
    for path in scored.glob("*score_*"):
        path.unlink()
    assert tables.prediction_table(scored)[1][3:] == ["", "+0.18", ""]


def test_an_extrapolated_gap_stands_by_each_form(tables, tmp_path: Path):
    name = "gap_prediction_tensorwise_n1.25e+08_r20.json"
    (tmp_path / name).write_text((HOME / "law" / name).read_text())
    (row,) = tables.extrapolation_table(tmp_path)[1:]
    # what precision.py at=125e6:20 printed when it was frozen
    assert row == ["tensorwise", "125M, 236-fold", "+0.22", "+0.30", "+0.07", "0.04 to 1.55"]


def test_predictions_of_runs_are_no_extrapolations(tables, scored: Path):
    assert len(tables.extrapolation_table(scored)) == 1


@pytest.mark.parametrize("run, arm", [("gpt350m_mxfp8_t20_s1", "mxfp8"), ("cpu_30k_x_t5_s1", "x")])
def test_runs_of_another_study_have_no_tables(run: str, arm: str, tables):
    pair = fake_pair(0.1, recipe=arm)
    pair = replace(pair, fp8=replace(pair.fp8, run_id=run))
    with pytest.raises(UserError, match=f"{run} is .*no .* of configs/study_cpu.py"):
        tables.gap_table([pair])
