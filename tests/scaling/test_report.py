"""scaling/report.py and study_report.py: a study's page says what its files say."""

import io
import json
import re
import shutil
import statistics
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scaling import fit, law_file, precision, report
from scaling.groups import Group, fit_points
from scaling.precision_result import read_precision
from scaling.precision_tables import format_tables
from scaling.study_report import format_laws
from tests.conftest import asked
from tests.helpers.scaling_runs import cells, edit, strict, write_branches, write_run
from tests.law_trials import bent_valleys


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory):
    """A study of 24 runs with its largest size held out, predicted, run and scored; its laws, its
    gaps."""
    folder, later = tmp_path_factory.mktemp("out") / "s", tmp_path_factory.mktemp("later") / "s"
    write_branches(
        folder, sizes=(30_000, 60_000, 120_000), ratios=(5, 20), t_start="2026-11-20T09:00:00Z"
    )
    write_branches(
        later,
        sizes=(240_000,),
        ratios=(20,),
        seeds=(1,),
        recipes=("bf16",),
        t_start="2999-01-01T00:00:00Z",
    )
    target = "s240000_bf16_1"
    row = strict(later / target / "summary.json") | {
        "run": target,
        "recipe": "bf16",
        "parent": None,
    }
    edit(
        folder / "study.json",
        study="s",
        held_out=[target],
        runs=[*strict(folder / "study.json")["runs"], row],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lib.plots.render", lambda figure, form: b"")  # most of the time
        for command, words in ((precision, ()), (fit, ("--predict", target))):
            assert command.main([str(folder), *words]) == 0
        (later / target).rename(folder / target)
        assert fit.main([str(folder), "--score"]) == 0
    return folder


@dataclass
class Page:
    """What the command prints of the study, and the README.md and report.json that it writes."""

    folder: Path
    printed: str
    readme: str
    report: dict[str, Any]


@pytest.fixture(scope="module")
def page(study: Path) -> Page:
    """Written twice: the page of the first call does not count as somebody else's."""
    for _ in range(2):
        printed = io.StringIO()
        with redirect_stdout(printed):
            assert report.main(["--study", str(study)]) == 0
    readme = (study / "README.md").read_text()
    return Page(study, printed.getvalue(), readme, strict(study / "report.json"))


def test_a_page_counts_the_runs_of_a_study(page: Page) -> None:
    assert "25 finished runs of 25 declared on 2026-11-19T00:00:00Z" in page.readme
    assert "Missing" not in page.readme


def test_a_page_has_the_score_of_a_prediction(page: Page) -> None:
    (score,) = strict(page.folder / "law/score_s240000_bf16_1.json")["runs"]
    where = "inside" if score["inside"] else "**outside**"
    row = f"| s240000_bf16_1 | {score['loss']:.4f} | {score['error_percent']:+.2f} | {where}"
    assert row in re.sub(" +", " ", page.printed)


def test_a_page_has_the_headline_of_each_law(page: Page) -> None:
    for group in strict(page.folder / "law/law.json")["groups"].values():
        form = group["headline"]["form"]
        assert f"| {form} (headline)" in page.readme
        assert f"{100 * group['laws'][form]['residual_rms']:.3f}" in page.readme


def test_a_page_shows_the_figures_of_laws_and_gaps(page: Page) -> None:
    assert "![law](law/figure.png)" in page.readme
    assert "![precision](law/precision.png)" in page.readme


def test_a_page_has_the_tables_of_gaps(page: Page) -> None:
    result = read_precision(page.folder / "law/precision.json")
    assert "\n\n".join(format_tables(result)) in page.readme


def test_each_run_is_in_one_row_of_the_report_whose_loss_is_the_seeds_mean(page: Page) -> None:
    summaries = {path.parent.name: strict(path) for path in page.folder.glob("*/summary.json")}
    rows = page.report["runs"]
    assert sorted(run for row in rows for run in row["runs"]) == sorted(summaries)
    for row in rows:
        losses = [summaries[run]["loss_bf16"] for run in row["runs"]]
        assert row["loss_bf16"] == pytest.approx(statistics.mean(losses))


def test_a_row_of_the_report_has_its_speed_against_bf16(page: Page) -> None:
    for row in page.report["runs"]:
        assert row["speed_against_bf16"] == (None if row["recipe"] == "bf16" else 0.75)


@pytest.fixture(scope="module")
def valleys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Group, list[list[str]]]:
    """IsoFLOP valleys, and the rows of the table of their laws."""
    group = fit_points(bent_valleys(), "isoflop.csv", resamples=0)
    law = {
        "conventions": {"N": "params_total", "loss": "loss_bf16"},
        "groups": {"bf16": law_file.plain(law_file.group_entry(group))},
    }
    path = tmp_path_factory.mktemp("valleys") / "law.json"
    path.write_text(json.dumps(law))
    return group, cells(format_laws(path))[1:]


def test_the_frontier_of_isoflop_minima_stands_below_its_headline(
    valleys: tuple[Group, list[list[str]]],
) -> None:
    group, rows = valleys
    assert [row[1] for row in rows] == [
        "isoflop (headline)",
        f"{group.frontier.form} through the minima (frontier)",
        "chinchilla",
    ]
    assert rows[0][3].startswith("a ") and ", b " in rows[0][3]


def test_the_frontier_has_its_formula_and_interval(
    valleys: tuple[Group, list[list[str]]],
) -> None:
    group, rows = valleys
    low, high = group.frontier.ci95["gamma"]
    assert rows[1][2] == group.frontier.formula()
    assert f"gamma {low:.3g} to {high:.3g}" in rows[1][3]


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A study without laws, one of whose four runs has not finished."""
    folder = write_branches(tmp_path / "s", sizes=(30_000,), ratios=(5, 20), seeds=(1,))
    (folder / "s30000_bf16_1_d5/summary.json").unlink()
    return folder


def test_what_a_study_lacks_is_said_with_its_command(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = asked(capsys, report.main, "--study", unfinished)
    assert "3 finished runs of 4" in page
    assert "missing: s30000_bf16_1_d5" in page
    for command in ("fit", "precision"):
        assert f"`python scaling/{command}.py {unfinished}`" in page


def test_a_readme_of_somebody_else_is_not_overwritten(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (unfinished / "README.md").write_text("mine")
    sentence = asked(capsys, report.main, "--study", unfinished, code=2)
    assert "was not written by this command" in sentence
    assert (unfinished / "README.md").read_text() == "mine"


def test_a_damaged_law_is_refused(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(unfinished / "law/law.json", groups={"bf16": {}}, inputs=[])
    sentence = asked(capsys, report.main, "--study", unfinished, code=2)
    assert "a file is damaged or of another version" in sentence


@pytest.fixture
def page_of_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Of two learning rates with two seeds each."""
    for lr in (0.002, 0.004):
        for seed in (1, 2):
            write_run(
                tmp_path / "s" / f"lr{lr:g}_{seed}",
                loss=3 + 100 * lr,
                seed=seed,
                lr_peak=lr,
                pair_id=f"{lr}_{seed}",
            )
    return asked(capsys, report.main, "--study", tmp_path / "s")


def test_runs_of_several_rates_are_not_taken_for_seeds(page_of_rates: str) -> None:
    assert [line[4:7] for line in cells(page_of_rates)[1:3]] == [
        ["0.002", "1, 2", "3.2000"],
        ["0.004", "1, 2", "3.4000"],
    ]


def test_a_sweep_of_rates_is_sent_to_learning_rate_and_to_no_law(page_of_rates: str) -> None:
    """fit.py would refuse the runs."""
    assert re.findall(r"scaling/(\w+)\.py", page_of_rates) == ["report", "learning_rate"]


def test_speeds_of_other_numbers_of_gpus_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for recipe, seed, n_gpu, speed in (
        ("bf16", 1, 8, 8000.0),
        ("bf16", 2, 8, 8200.0),
        ("bf16", 3, 1, 1000.0),
        ("tensorwise", 1, 1, 1300.0),
        ("tensorwise", 2, 8, 9720.0),
    ):
        write_run(
            tmp_path / "g" / f"{recipe}_{seed}",
            recipe=recipe,
            loss=2.6,
            device="NVIDIA H100 80GB HBM3",
            seed=seed,
            n_gpu=n_gpu,
            tok_per_s_median=speed,
        )
    out = asked(capsys, report.main, "--study", tmp_path / "g")
    assert [" ".join([line[1], *line[-3:-1], line[-1][:3]]) for line in cells(out)[1:5]] == [
        "bf16 8,100  8 x",
        "bf16 1,000  NVI",
        "tensorwise 1,300 1.300 NVI",
        "tensorwise 9,720 1.200 8 x",
    ]


STALE = "law/{}.json was made from other runs than those that are here now"


@pytest.fixture
def own_study(study: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return shutil.copytree(study, tmp_path / "s")


def test_gaps_of_other_runs_are_said_to_be_stale(
    own_study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(own_study / "later_null", params=90_000, repeat=1)  # of use to precision.py alone
    page = asked(capsys, report.main, "--study", own_study)
    assert STALE.format("precision") in page
    assert STALE.format("law") not in page


def test_a_law_of_other_runs_is_said_to_be_stale(
    own_study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(own_study / "s30000_bf16_1/summary.json", other="bytes")
    _, laws = asked(capsys, report.main, "--study", own_study).split("## Laws")
    assert STALE.format("law") in laws


def test_laws_are_shown_by_the_counts_and_losses_that_fit_was_given(
    own_study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conventions = {"N": "params_nonembed", "loss": "loss_as_trained"}
    edit(own_study / "law/law.json", conventions=conventions)
    runs, laws = asked(capsys, report.main, "--study", own_study).split("## Laws")
    assert "N: params_nonembed. Losses: evaluated as trained." in laws
    assert "N: params_total." in runs


def test_a_score_of_another_prediction_is_missing(
    own_study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(own_study / "law/score_s240000_bf16_1.json", prediction_sha256="0")
    page = asked(capsys, report.main, "--study", own_study)
    command = f"`python scaling/fit.py {own_study} --score`"
    assert f"**Missing:** the score of s240000_bf16_1 ({command})" in page
