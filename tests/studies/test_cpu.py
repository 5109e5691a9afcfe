"""studies/cpu: the rows belong to the study as it stands, its text is refused where it differs, its
power is that of theory."""

import importlib.util
import io
import json
import math
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import t

from lib.errors import UserError
from scaling import ledger
from scaling.cpu_kind import Kind
from scaling.ledger import read_entries
from scaling.study import expand, load_study
from tests.conftest import ROOT, asked, write_source

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


def test_the_page_has_the_table_of_the_command(elsewhere, capsys: pytest.CaptureFixture[str]):
    printed = asked(capsys, elsewhere.main)
    page = (ROOT / "docs/study.md").read_text()
    for line in printed.strip().split("\n")[2:]:
        numbers = " | ".join(cell.strip() for cell in line.strip("|").split("|")[2:])
        assert f"| {numbers} |" in page


# --------------------------------------------------------------------------- the tables of the page


@pytest.fixture(scope="module")
def tables():
    return module("tables")


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study's run folders, as its rows have them."""
    out = tmp_path_factory.mktemp("study")
    assert ledger.main([str(ROOT / "configs/study_cpu.py"), "--restore", f"out={out}"]) == 0
    return out / "cpu"


@pytest.fixture(scope="module")
def printed_tables(tables, restored: Path) -> list[list[str]]:
    """The cells of each row that the command prints."""
    page = io.StringIO()
    with redirect_stdout(page):
        assert tables.main([str(restored)]) == 0
    return table_rows(page.getvalue())


def table_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_the_tables_of_the_command(printed_tables: list[list[str]]):
    page = table_rows((ROOT / "docs/study.md").read_text())
    missing = [row for row in printed_tables if not row[0].startswith("-") and row not in page]
    assert not missing


def test_a_gap_of_the_tables_is_the_mean_over_seeds_of_their_budgets(
    printed_tables: list[list[str]],
):
    losses = {
        run: entry.summary["loss_bf16"] for run, entry in read_entries(HOME / "runs.jsonl").items()
    }
    gaps = defaultdict(list)
    for run, loss in losses.items():
        if run.startswith("cpu_30k_tensorwise_t"):
            seed = run.rpartition("_s")[2]
            gaps[seed].append(100 * math.log(loss / losses[run.replace("tensorwise", "bf16")]))
    of_seeds = [np.mean(values) for values in gaps.values()]
    half = t.ppf(0.975, len(of_seeds) - 1) * np.std(of_seeds, ddof=1) / math.sqrt(len(of_seeds))
    row = next(row for row in printed_tables if row[0].startswith("tensorwise (18"))
    assert row[1] == f"{np.mean(of_seeds):+.3f} ± {half:.3f}"


def test_a_difference_of_the_tables_is_over_the_baselines_that_both_arms_have(
    printed_tables: list[list[str]],
):
    entries = read_entries(HOME / "runs.jsonl")
    differences = defaultdict(list)
    for run, entry in entries.items():
        other = run.replace("mxfp8_e5m2", "mxfp8")
        if run.startswith("cpu_101k_mxfp8_e5m2_t") and other in entries:
            baseline = entries[run.replace("mxfp8_e5m2", "bf16")].summary["loss_bf16"]
            nats = entry.summary["loss_bf16"] - entries[other].summary["loss_bf16"]
            differences[run.rpartition("_s")[2]].append(100 * nats / baseline)
    row = next(row for row in printed_tables if row[0] == "mxfp8_e5m2 minus mxfp8")
    mean = np.mean([np.mean(values) for values in differences.values()])
    assert float(row[2].split(" ± ")[0]) == pytest.approx(mean, abs=1e-3)


def test_a_loss_outside_its_prediction_is_marked(tables):
    prediction = SimpleNamespace(low=1.2, high=1.4)
    assert [tables.format_loss(loss, prediction) for loss in (1.3, 1.41)] == [
        "1.300",
        "1.410 (outside)",
    ]


def test_runs_of_another_study_have_no_tables(tables):
    with pytest.raises(UserError, match="gpt350m_bf16_t20_s1 is no run of configs/study_cpu.py"):
        tables.size_of("gpt350m_bf16_t20_s1")
