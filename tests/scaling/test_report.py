"""scaling/report.py: every number by an independent count, every refusal a sentence; a study's page
says what its files say."""

import json
import re
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from lib.plots import STYLES
from runtime.config import Config
from scaling import fit, law_file, precision, report
from scaling.groups import fit_points
from scaling.pairing import pair_runs
from scaling.precision_result import read_precision
from scaling.precision_tables import format_tables
from scaling.records import read_runs
from scaling.study_report import format_laws
from scaling.training_figure import draw_losses
from scaling.training_report import read_arms, spread
from tests.conftest import asked, changed
from tests.helpers.scaling_runs import cells, edit, strict, write_branches, write_run
from tests.law_trials import bent_valleys
from tests.scaling.test_figures import event, write
from tests.scaling.test_figures import row as step_row

GAPS = {"bf16": 0.0, "tensorwise": 0.01, "rowwise": -0.004}
SPEED = {"bf16": 1000.0, "tensorwise": 1300.0, "rowwise": 1150.0}


def ordinary(recipe: str):
    """Steps of half a second or less; the first takes eight more. GPU rows say what no mean may
    hold in their first step."""
    rows = []
    for step in range(1, 41):
        memory, busy = (70.0 + step % 3, 90.0 - step % 5) if step > 1 else (5.0, 0.0)
        rows.append(
            step_row(
                step,
                loss=2 + 4 / step + GAPS[recipe] + 0.01 * (step % 4),
                gpu_mem_pct=memory,
                gpu_util_pct=busy,
                step_s=500 / SPEED[recipe] + 8 * (step == 1),
            )
        )
        if step % 10 == 0:
            rows.append(
                {
                    "kind": "val",
                    "step": step,
                    "tokens": 1,
                    "loss": 2.5 + 4 / step + GAPS[recipe],
                    "sources": {},
                }
            )
    return rows


def write_arm(folder: Path, recipe: str = "bf16", rows: list[dict] | None = None, **changes):
    write_run(
        folder,
        **{
            "recipe": recipe,
            "loss": 2.6,
            "gap": GAPS.get(recipe, 0.0),
            "data_sha256": "d" * 64,
            "steps": 40,
            "wall_s": 60.0,
            "mem_peak_gib": 55.5,
            "device": "NVIDIA H100 80GB HBM3",
            "tok_per_s_median": SPEED.get(recipe, 1000.0),
            **changes,
        },
    )
    return write(folder, rows or ordinary(recipe))


@pytest.fixture
def runs(tmp_path: Path):
    """tensorwise, rowwise, BF16, in the order of their names' letters."""
    return [
        write_arm(tmp_path / "runs" / f"{letter}_{recipe}", recipe)
        for letter, recipe in zip("abc", ("tensorwise", "rowwise", "bf16"), strict=True)
    ]


def call(capsys: pytest.CaptureFixture[str], *words):
    out = asked(capsys, report.main, *words)
    return out, strict(out.rsplit("wrote ", 1)[1].split("/: ")[0] + "/report.json")


def lines_of(text: str, label: str):
    """The cells of an arm's lines in the tables of training loss, validation loss and costs."""
    return [line for line in cells(text) if line[0] == label]


def counted(values: Sequence[float]):
    found = {
        "max": max(values),
        "min": min(values),
        "mean": statistics.mean(values),
        "sd": statistics.stdev(values),
    }
    return pytest.approx(found | {"final": values[-1], "n": len(values)})


def test_each_number_is_that_of_an_independent_count(
    runs: list[Path], capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    out, result = call(capsys, *runs)
    # BF16 first, then as given
    assert [row["label"] for row in result["runs"]] == ["bf16", "tensorwise", "rowwise"]
    for row in result["runs"]:
        train, val = (
            [one for one in ordinary(row["recipe"]) if one["kind"] == kind]
            for kind in ("train", "val")
        )
        assert [row["train_loss"], row["val_loss"]] == [
            counted([one["loss"] for one in rows]) for rows in (train, val)
        ]
        for key, field in (
            ("memory_percent", "gpu_mem_pct"),
            ("utilisation_percent", "gpu_util_pct"),
        ):
            assert row[key] == counted([one[field] for one in train[1:]])
        each = 0.5 * 1000 / SPEED[row["recipe"]]
        assert row["step_time_s"] == pytest.approx(
            {"with_compile": 40 * each + 8, "without_compile": 40 * each, "compile": 8}
        )
        assert row["speed_against_bf16"] == (
            None if row["recipe"] == "bf16" else pytest.approx(SPEED[row["recipe"]] / 1000)
        )
    whole, steps = f"{20 / 1.3 + 8:.2f}", f"{20 / 1.3:.2f}"
    assert (
        lines_of(out, "tensorwise")[2]
        == f"tensorwise 1.300 1,300 {whole} {steps} 8.00 60.00 71.0 55.50 88.0".split()
    )
    loss = lines_of(out, "rowwise")[0]
    assert [*loss[1:3], loss[4], loss[6]] == [
        "6.0060",
        "2.0960",
        "2.0960",
        "40",
    ] and "CPU" not in out


def test_gaps_are_those_of_the_pairs_a_repeat_has_one_too_and_two_machines_are_two_arms(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    """Given first, a repeat is still not what the others are held to. Another machine has no speed
    against BF16."""
    null = write_arm(runs[0].parent / "a_null", loss=2.605, repeat=1, tok_per_s_median=900.0)
    again = write_arm(
        tmp_path / "there" / runs[0].name, "tensorwise", device="NVIDIA H200", loss=2.7
    )
    out, result = call(capsys, null, *runs, again)
    assert [row["run_id"] for row in result["runs"]] == [
        "c_bf16",
        "a_null",
        "a_tensorwise",
        "b_rowwise",
        "a_tensorwise",
    ]
    for pair in pair_runs(read_runs(runs)[0])[0]:
        row = next(one for one in result["runs"] if one["run_id"] == pair.fp8.run_id)
        assert row["gap"] == {
            arm: asdict(gap) | {"se_percent": pytest.approx(100 * gap.se / 2.6)}
            for arm, gap in pair.gap.items()
        }
    for label, gap, speed in (
        (f"tensorwise ({runs[0]})", 0.01, "1.300"),
        (f"tensorwise ({again})", 0.11, ""),
        ("bf16 (a_null)", 0.005, "0.900"),
        ("bf16 (c_bf16)", None, ""),
    ):
        _, losses, costs = lines_of(out, label)
        assert (
            losses[-1].split(" ")[0] == (f"{100 * gap / 2.6:+.3f}" if gap else "")
            and costs[1] == speed
        )


def test_time_counts_undone_steps_and_each_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    """Ten steps of a second, the last of two; two starts compile for 5 and 3 s more; 5 and 6 are
    done twice."""
    rows = [
        step_row(step, step_s=seconds, since_start=step - 6 * (step > 6))
        for step, seconds in enumerate((6.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 2.0), 1)
    ]
    rows[6:6] = [event("resume", 6)]
    rows[4:4] = [
        step_row(5, "undone", step_s=1.5),
        step_row(6, "undone", step_s=2.0),
        event("rollback", 6, to=4),
    ]
    _, result = call(capsys, write_arm(tmp_path / "run", rows=rows, steps=12))
    assert result["runs"][0]["step_time_s"] == {
        "with_compile": 22.5,
        "without_compile": 14.5,
        "compile": 8.0,
    }
    missing, undone = result["notes"]
    assert (
        "2 of 12 steps have no row" in missing
        and "1 times" in undone
        and result["runs"][0]["train_loss"]["n"] == 10
    )
    # of two steps the second tells what one takes, unless it compiles as well
    for starts, compiling in ((2, 5), (1, 0)):
        rows = [step_row(1, step_s=6.0), step_row(2, step_s=1.0, since_start=starts)]
        _, result = call(capsys, write_arm(tmp_path / f"short{starts}", rows=rows))
        assert result["runs"][0]["step_time_s"] == {
            "with_compile": 7,
            "without_compile": 7 - compiling,
            "compile": compiling,
        }


def test_steps_without_a_finite_loss_are_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    rows = ordinary("bf16")
    # without a target: the fifth step and the last but its validation
    rows[4]["loss"] = rows[-2]["loss"] = 0.0
    rows[7] |= {"loss": None, "verdict": "SKIP"}
    _, result = call(
        capsys, write_arm(tmp_path / "run", rows=rows, status="diverged"), f"out={tmp_path / 'law'}"
    )
    losses = [row["loss"] for row in rows if row["kind"] == "train" and row["loss"]]
    assert result["runs"][0]["train_loss"] == counted(losses) and len(losses) == 37
    assert spread([3.0]).sd is None  # of one validation; strict JSON holds no NaN
    assert "3 steps had no target" in result["notes"][0] and "'diverged'" in result["notes"][1]
    # they took their time
    assert result["runs"][0]["step_time_s"]["with_compile"] == pytest.approx(28)


@pytest.mark.parametrize(
    "words, damage, sentence",
    [
        ("{0}/nowhere", None, "does not exist"),
        ("out=x", None, "name the runs of one training"),
        ("{0}/c_bf16 study={0}", None, "or --study out/STUDY alone"),
        ("{0}/c_bf16 out={0}/c_bf16/config.json", None, "cannot be written"),
        ("{0}", lambda one: (one / "metrics.jsonl").unlink(), "metrics.jsonl does not exist"),
        ("{0}", lambda one: (one / "val_losses.npz").unlink(), "val_losses.npz cannot be read"),
        ("{0}", lambda one: write(one, [step_row(1, kind="undone")]), "holds no step that counts"),
        (
            "{0}",
            lambda one: write_arm(one.parent / "a_other", "rowwise", pair_id="another"),
            "a_other differ in more than the",
        ),
        (
            "{0}",
            lambda one: write_arm(one.parent / "a_other", "rowwise", data_sha256="e" * 64),
            "(data_sha256)",
        ),
    ],
)
def test_mistakes_are_a_sentence_and_nothing_is_written(
    runs: list[Path],
    capsys: pytest.CaptureFixture[str],
    no_figures: None,
    words: str,
    damage: Callable[[Path], object] | None,
    sentence: str,
) -> None:
    if damage:
        damage(runs[0])
    before = sorted(runs[0].parent.rglob("*"))
    assert sentence in asked(capsys, report.main, *words.format(runs[0].parent).split(), code=2)
    assert sorted(runs[0].parent.rglob("*")) == before


def test_lines_of_the_figure_are_where_the_rows_are_and_no_run_that_diverged_governs_it(
    runs: list[Path], tmp_path: Path
) -> None:
    arms = read_arms(runs)[0]
    _, val, gap = panels = draw_losses(arms).axes
    assert [len(panel.get_lines()) for panel in panels] == [3, 3, 3] and not gap.get_lines()[
        0
    ].get_ydata().any()
    assert val.get_lines()[0].get_ydata().tolist() == arms[0].history.val["loss"].tolist()
    assert gap.get_ylim()[0] < 100 * -0.004 / 2.1 and 100 * 0.01 / 2.1 < gap.get_ylim()[1] < 1
    # without BF16, whose colour nobody else gets
    for panel in (alone := draw_losses(arms[1:]).axes):
        assert len(alone) == 2 and [one.get_color() for one in panel.get_lines()] == [
            STYLES[i]["color"] for i in (1, 2)
        ]
    arms[1].history.train["loss"][20] += 0.3  # a difference is the mean over three steps
    assert draw_losses(arms).axes[2].get_lines()[1].get_ydata()[20] == pytest.approx(
        11 / np.mean([2 + 4 / s + 0.01 * (s % 4) for s in (20, 21, 22)]), rel=1e-6
    )
    rows = ordinary("bf16")
    rows[35] |= {"loss": 1e9, "verdict": "SKIP"}
    blown = [row | {"loss": 1e6} if row["step"] > 20 else row for row in ordinary("bf16")]
    bad = [
        write_arm(tmp_path / f"runs/{name}", name, rows=some)
        for name, some in (("amax", rows), ("cscale", blown))
    ]
    for panel in draw_losses(read_arms([runs[2], *bad])[0]).axes[:2]:
        assert panel.get_ylim()[1] < 20  # neither a spike nor a whole run governs the axis


def test_what_train_writes_is_what_the_report_reads(
    tiny: Config, tmp_path: Path, run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [
        changed(tiny, f"run=tiny_{recipe} fp8.recipe={recipe} eval.every=2")
        for recipe in ("off", "tensorwise")
    ]
    assert all(map(run, configs))
    out, result = call(capsys, *(config.run_dir for config in configs))
    assert "| whole run [s] |\n" in out and "A CPU has no FP8 units" in out
    for row, config in zip(result["runs"], configs, strict=True):
        summary, train, val = (
            strict(config.run_dir / "summary.json"),
            row["train_loss"],
            row["val_loss"],
        )
        assert (val["n"], val["final"]) == (3, pytest.approx(summary["loss_as_trained"]))
        assert (train["n"], train["final"]) == (6, summary["train_loss_last"])
        assert (
            row["speed_against_bf16"] != 1
            and row["step_time_s"]["with_compile"] < summary["wall_s"]
        )
    law = tmp_path / "out/law"
    assert sorted(path.name for path in law.iterdir()) == [
        "report.json",
        "report.md",
        "report_loss.png",
        "report_loss.svg",
    ]
    page = (law / "report.md").read_text()
    assert (
        result["notes"] == []
        and page.startswith(out.rsplit("\n\nwrote", 1)[0])
        and "![loss](report_loss.png)" in page
    )


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


def test_runs_at_several_learning_rates_and_on_several_machines_are_not_taken_for_seeds(
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
        write_arm(
            tmp_path / "g" / f"{recipe}_{seed}",
            recipe,
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
