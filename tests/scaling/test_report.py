"""scaling/report.py and study_report.py: a study's page says what its files say."""

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest

from scaling import fit, law_file, precision, report
from scaling.groups import fit_points
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


def test_a_studys_page_says_what_its_files_say(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    asked(capsys, report.main, "--study", study)  # which does not count as a page of somebody else
    out, page = asked(capsys, report.main, "--study", study), (study / "README.md").read_text()
    said, law = (strict(study / name) for name in ("report.json", "law/law.json"))
    (score,) = strict(study / "law/score_s240000_bf16_1.json")["runs"]
    assert "25 finished runs of 25 declared on 2026-11-19T00:00:00Z" in page
    assert f"| s240000_bf16_1 | {score['loss']:.4f} | {score['error_percent']:+.2f} | " + (
        "inside" if score["inside"] else "**outside**"
    ) in re.sub(" +", " ", out)
    for group in law["groups"].values():
        fitted = group["laws"][group["headline"]["form"]]
        assert (
            f"| {group['headline']['form']} (headline)" in page
            and f"{100 * fitted['residual_rms']:.3f}" in page
        )
    assert (
        "![law](law/figure.png)" in page
        and "![precision](law/precision.png)" in page
        and "Missing" not in page
    )
    assert "\n\n".join(format_tables(read_precision(study / "law/precision.json"))) in page
    summaries = {path.parent.name: strict(path) for path in study.glob("*/summary.json")}
    assert sorted(run for row in said["runs"] for run in row["runs"]) == sorted(summaries)
    for row in said["runs"]:
        assert row["loss_bf16"] == pytest.approx(
            statistics.mean(summaries[run]["loss_bf16"] for run in row["runs"])
        )
        assert row["speed_against_bf16"] == (None if row["recipe"] == "bf16" else 0.75)


def test_the_frontier_of_isoflop_minima_stands_below_its_headline(tmp_path: Path) -> None:
    group = fit_points(bent_valleys(), "isoflop.csv", resamples=0)
    law = {
        "conventions": {"N": "params_total", "loss": "loss_bf16"},
        "groups": {"bf16": law_file.plain(law_file.group_entry(group))},
    }
    (tmp_path / "law.json").write_text(json.dumps(law))
    rows = cells(format_laws(tmp_path / "law.json"))[1:]
    assert [row[1] for row in rows] == [
        "isoflop (headline)",
        f"{group.frontier.form} through the minima (frontier)",
        "chinchilla",
    ]
    assert rows[1][2] == group.frontier.formula()
    low, high = group.frontier.ci95["gamma"]
    assert f"gamma {low:.3g} to {high:.3g}" in rows[1][3]
    assert rows[0][3].startswith("a ") and ", b " in rows[0][3]


def test_what_a_study_lacks_is_said_with_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_branches(tmp_path / "s", sizes=(30_000,), ratios=(5, 20), seeds=(1,))
    (folder / "s30000_bf16_1_d5/summary.json").unlink()
    page = asked(capsys, report.main, "--study", folder)
    assert "3 finished runs of 4" in page and "missing: s30000_bf16_1_d5" in page
    assert all(
        f"`python scaling/{command}.py {folder}`" in page for command in ("fit", "precision")
    )
    (folder / "README.md").write_text("mine")
    assert "was not written by this command" in asked(
        capsys, report.main, "--study", folder, code=2
    )
    (folder / "README.md").unlink()
    edit(folder / "law/law.json", groups={"bf16": {}}, inputs=[])
    assert "a file is damaged or of another version" in asked(
        capsys, report.main, "--study", folder, code=2
    )


def test_runs_of_several_rates_or_machines_are_not_taken_for_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lr in (0.002, 0.004):
        for seed in (1, 2):
            write_run(
                tmp_path / "s" / f"lr{lr:g}_{seed}",
                loss=3 + 100 * lr,
                seed=seed,
                lr_peak=lr,
                pair_id=f"{lr}_{seed}",
            )
    out = asked(capsys, report.main, "--study", tmp_path / "s")
    assert [line[4:7] for line in cells(out)[1:3]] == [
        ["0.002", "1, 2", "3.2000"],
        ["0.004", "1, 2", "3.4000"],
    ]
    # no law: fit.py would refuse the runs
    assert re.findall(r"scaling/(\w+)\.py", out) == ["report", "learning_rate"]
    # Speeds of other numbers of GPUs are not compared.
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


def test_a_score_of_another_prediction_and_a_law_of_other_runs_are_told(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(study, tmp_path / "s")
    write_run(folder / "later_null", params=90_000, repeat=1)  # of use to precision.py alone
    stale = "law/{}.json was made from other runs than those that are here now"
    page = asked(capsys, report.main, "--study", folder)
    assert stale.format("precision") in page and stale.format("law") not in page
    # as fit.py was told
    edit(folder / "law/law.json", conventions={"N": "params_nonembed", "loss": "loss_as_trained"})
    edit(folder / "s30000_bf16_1/summary.json", other="bytes")
    runs, laws = asked(capsys, report.main, "--study", folder).split("## Laws")
    assert (
        "N: params_nonembed. Losses: evaluated as trained." in laws and "N: params_total." in runs
    )
    assert stale.format("law") in laws
    edit(folder / "law/score_s240000_bf16_1.json", prediction_sha256="0")
    page = asked(capsys, report.main, "--study", folder)
    assert (
        f"**Missing:** the score of s240000_bf16_1 (`python scaling/fit.py {folder} --score`)"
        in page
    )
