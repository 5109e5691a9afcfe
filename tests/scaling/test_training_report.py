"""scaling/training_report.py: every number of one training by an independent count, every refusal a
sentence; its figure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from lib.plots import STYLES
from runtime.config import Config
from scaling import report
from scaling.pairing import pair_runs
from scaling.records import read_runs
from scaling.training_figure import draw_losses
from scaling.training_report import TrainingRun, read_training_runs, spread
from tests.conftest import asked, changed
from tests.helpers.scaling_runs import cells, strict, write_run
from tests.scaling.test_figures import event, write
from tests.scaling.test_figures import row as step_row

GAPS = {"bf16": 0.0, "tensorwise": 0.01, "rowwise": -0.004}
SPEED = {"bf16": 1000.0, "tensorwise": 1300.0, "rowwise": 1150.0}
Capsys = pytest.CaptureFixture[str]


def train_row(step: int, recipe: str) -> dict[str, Any]:
    """Half a second or less; the first takes eight more. GPU columns say what no mean may hold in
    their first step."""
    memory, utilisation = (70.0 + step % 3, 90.0 - step % 5) if step > 1 else (5.0, 0.0)
    compiling = 8 if step == 1 else 0
    return step_row(
        step,
        loss=2 + 4 / step + GAPS[recipe] + 0.01 * (step % 4),
        gpu_mem_pct=memory,
        gpu_util_pct=utilisation,
        step_s=500 / SPEED[recipe] + compiling,
    )


def ordinary(recipe: str) -> list[dict[str, Any]]:
    """Forty steps, a validation after each tenth."""
    rows = []
    for step in range(1, 41):
        rows.append(train_row(step, recipe))
        if step % 10 == 0:
            loss = 2.5 + 4 / step + GAPS[recipe]
            rows.append({"kind": "val", "step": step, "tokens": 1, "loss": loss, "sources": {}})
    return rows


def write_arm(
    folder: Path, recipe: str = "bf16", rows: list[dict] | None = None, **changes: object
) -> Path:
    summary = {
        "recipe": recipe,
        "loss": 2.6,
        "gap": GAPS.get(recipe, 0.0),
        "data_sha256": "d" * 64,
        "steps": 40,
        "wall_s": 60.0,
        "mem_peak_gib": 55.5,
        "device": "NVIDIA H100 80GB HBM3",
        "tok_per_s_median": SPEED.get(recipe, 1000.0),
    }
    write_run(folder, **{**summary, **changes})
    return write(folder, rows or ordinary(recipe))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """tensorwise, rowwise, BF16, in the order of their names' letters."""
    names = zip("abc", ("tensorwise", "rowwise", "bf16"), strict=True)
    return [write_arm(tmp_path / "runs" / f"{letter}_{name}", name) for letter, name in names]


def call(capsys: Capsys, *words: object) -> tuple[str, dict]:
    """(page, report.json)."""
    page = asked(capsys, report.main, *words)
    return page, strict(page.rsplit("wrote ", 1)[1].split("/: ")[0] + "/report.json")


def lines_of(page: str, label: str) -> list[list[str]]:
    """The cells of an arm's lines in the tables of training loss, validation loss and costs."""
    return [line for line in cells(page) if line[0] == label]


# ------------------------------------------------------------------------------------- the numbers


def counted(values: Sequence[float]) -> Any:
    expected = {"max": max(values), "min": min(values), "mean": statistics.mean(values)}
    expected |= {"sd": statistics.stdev(values), "final": values[-1], "n": len(values)}
    return pytest.approx(expected)


@pytest.fixture
def reported(runs: list[Path], capsys: Capsys, no_figures: None) -> tuple[str, dict]:
    return call(capsys, *runs)


def test_bf16_is_first_then_the_runs_as_given(reported: tuple[str, dict]) -> None:
    labels = [row["label"] for row in reported[1]["runs"]]
    assert labels == ["bf16", "tensorwise", "rowwise"]


@pytest.mark.parametrize("key, kind", [("train_loss", "train"), ("val_loss", "val")])
def test_losses_are_those_of_the_rows(reported: tuple[str, dict], key: str, kind: str) -> None:
    for row in reported[1]["runs"]:
        rows = [line for line in ordinary(row["recipe"]) if line["kind"] == kind]
        assert row[key] == counted([line["loss"] for line in rows])


@pytest.mark.parametrize(
    "key, field", [("memory_percent", "gpu_mem_pct"), ("utilisation_percent", "gpu_util_pct")]
)
def test_the_gpu_is_counted_after_the_first_step(
    reported: tuple[str, dict], key: str, field: str
) -> None:
    for row in reported[1]["runs"]:
        rows = [line for line in ordinary(row["recipe"]) if line["kind"] == "train"]
        assert row[key] == counted([line[field] for line in rows[1:]])


def test_what_the_first_step_takes_more_is_compilation(reported: tuple[str, dict]) -> None:
    for row in reported[1]["runs"]:
        steps_s = 40 * 500 / SPEED[row["recipe"]]
        expected = {"with_compile": steps_s + 8, "without_compile": steps_s, "compile": 8}
        assert row["step_time_s"] == pytest.approx(expected)


def test_speed_is_against_bf16(reported: tuple[str, dict]) -> None:
    speeds = {row["recipe"]: row["speed_against_bf16"] for row in reported[1]["runs"]}
    assert speeds.pop("bf16") is None
    assert speeds == pytest.approx({"tensorwise": 1.3, "rowwise": 1.15})


def test_the_table_of_costs_holds_them(reported: tuple[str, dict]) -> None:
    whole, steps = f"{20 / 1.3 + 8:.2f}", f"{20 / 1.3:.2f}"
    expected = f"tensorwise 1.300 1,300 {whole} {steps} 8.00 60.00 71.0 55.50 88.0".split()
    assert lines_of(reported[0], "tensorwise")[2] == expected and "CPU" not in reported[0]


def test_the_table_of_training_losses_holds_them(reported: tuple[str, dict]) -> None:
    _, largest, smallest, _, final, _, steps = lines_of(reported[0], "rowwise")[0]
    assert [largest, smallest, final, steps] == ["6.0060", "2.0960", "2.0960", "40"]


# ---------------------------------------------------------------------------------------- the gaps


class Four:
    """BF16 with a repeat, given first, and tensorwise from two machines."""

    def __init__(self, runs: list[Path], folder: Path, capsys: Capsys) -> None:
        self.null = write_arm(
            runs[0].parent / "a_null", loss=2.605, repeat=1, tok_per_s_median=900.0
        )
        self.here = runs[0]
        other = {"device": "NVIDIA H200", "loss": 2.7}
        self.there = write_arm(folder / "there" / runs[0].name, "tensorwise", **other)
        self.page, self.result = call(capsys, self.null, *runs, self.there)
        self.rows = self.result["runs"]

    def cells(self, label: str) -> tuple[str, str]:
        """(gap in BF16 without its error, speed against BF16)."""
        _, losses, costs = lines_of(self.page, label)
        return losses[-1].split(" ")[0], costs[1]


@pytest.fixture
def four(runs: list[Path], tmp_path: Path, capsys: Capsys, no_figures: None) -> Four:
    return Four(runs, tmp_path, capsys)


def test_a_repeat_is_not_what_the_others_are_held_to(four: Four) -> None:
    names = [row["run_id"] for row in four.rows]
    assert names == ["c_bf16", "a_null", "a_tensorwise", "b_rowwise", "a_tensorwise"]
    assert four.cells("bf16 (c_bf16)") == ("", "")


def test_gaps_are_those_of_the_pairs(four: Four, runs: list[Path]) -> None:
    by_name = {row["run_id"]: row["gap"] for row in four.rows[:4]}
    for pair in pair_runs(read_runs(runs)[0])[0]:
        for name, gap in pair.gap.items():
            expected = asdict(gap) | {"se_percent": 100 * gap.se / 2.6}
            assert by_name[pair.fp8.run_id][name] == pytest.approx(expected)


def test_a_repeat_has_a_gap_and_a_speed(four: Four) -> None:
    assert four.cells("bf16 (a_null)") == (f"{100 * 0.005 / 2.6:+.3f}", "0.900")


def test_a_run_of_another_machine_has_a_gap_and_no_speed(four: Four) -> None:
    assert four.cells(f"tensorwise ({four.here})") == (f"{100 * 0.01 / 2.6:+.3f}", "1.300")
    assert four.cells(f"tensorwise ({four.there})") == (f"{100 * 0.11 / 2.6:+.3f}", "")


# ------------------------------------------------------------------------------ interrupted, undone


@pytest.fixture
def undone(tmp_path: Path, capsys: Capsys, no_figures: None) -> dict:
    """Ten steps of a second, the last of two; two starts compile for 5 and 3 s more; 5 and 6 are
    done twice."""
    seconds = (6.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 2.0)
    steps = [
        step_row(step, step_s=step_s, since_start=step - 6 if step > 6 else step)
        for step, step_s in enumerate(seconds, 1)
    ]
    stretch = [step_row(5, "undone", step_s=1.5), step_row(6, "undone", step_s=2.0)]
    rows = [*steps[:4], *stretch, event("rollback", 6, to=4), *steps[4:6], event("resume", 6)]
    return call(capsys, write_arm(tmp_path / "run", rows=[*rows, *steps[6:]], steps=12))[1]


def test_time_counts_undone_steps_and_each_start(undone: dict) -> None:
    expected = {"with_compile": 22.5, "without_compile": 14.5, "compile": 8.0}
    assert undone["runs"][0]["step_time_s"] == expected


def test_losses_do_not_count_undone_steps(undone: dict) -> None:
    assert undone["runs"][0]["train_loss"]["n"] == 10


def test_missing_rows_and_rollbacks_are_told(undone: dict) -> None:
    missing, rollbacks = undone["notes"]
    assert "2 of 12 steps have no row" in missing and "1 times" in rollbacks


@pytest.mark.parametrize("since_start, compiling", [(2, 5), (1, 0)])
def test_the_second_of_two_steps_is_timed_unless_it_compiles_too(
    tmp_path: Path, capsys: Capsys, no_figures: None, since_start: int, compiling: int
) -> None:
    rows = [step_row(1, step_s=6.0), step_row(2, step_s=1.0, since_start=since_start)]
    _, result = call(capsys, write_arm(tmp_path / "short", rows=rows))
    expected = {"with_compile": 7, "without_compile": 7 - compiling, "compile": compiling}
    assert result["runs"][0]["step_time_s"] == expected


@pytest.fixture
def lossless(tmp_path: Path, capsys: Capsys, no_figures: None) -> dict:
    """Without a target: the fifth step and the last but its validation; one step has no loss."""
    rows = ordinary("bf16")
    rows[4]["loss"] = rows[-2]["loss"] = 0.0
    rows[7] |= {"loss": None, "verdict": "SKIP"}
    folder = write_arm(tmp_path / "run", rows=rows, status="diverged")
    return call(capsys, folder, f"out={tmp_path / 'law'}")[1]


def test_steps_without_a_finite_loss_are_left_out(lossless: dict) -> None:
    losses = [row["loss"] for row in ordinary("bf16") if row["kind"] == "train"]
    finite = [loss for step, loss in enumerate(losses, 1) if step not in (5, 8, 40)]
    assert lossless["runs"][0]["train_loss"] == counted(finite)


def test_they_are_told_and_so_is_a_run_that_diverged(lossless: dict) -> None:
    without_target, status = lossless["notes"]
    assert "3 steps had no target" in without_target and "'diverged'" in status


def test_they_took_their_time(lossless: dict) -> None:
    assert lossless["runs"][0]["step_time_s"]["with_compile"] == pytest.approx(28)


def test_one_value_has_no_spread() -> None:
    """Of one validation; strict JSON holds no NaN."""
    single = spread([3.0])
    assert single is not None and single.sd is None


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "words, damage, sentence",
    [
        ("{0}/nowhere", None, "does not exist"),
        ("out=x", None, "name the runs of one training"),
        ("{0}/c_bf16 study={0}", None, "or --study out/STUDY alone"),
        ("{0}/c_bf16 out={0}/c_bf16/config.json", None, "cannot be written"),
        ("{0}", lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl does not exist"),
        ("{0}", lambda run: (run / "val_losses.npz").unlink(), "val_losses.npz cannot be read"),
        ("{0}", lambda run: write(run, [step_row(1, kind="undone")]), "holds no step that counts"),
        (
            "{0}",
            lambda run: write_arm(run.parent / "a_other", "rowwise", pair_id="another"),
            "a_other differ in more than the",
        ),
        (
            "{0}",
            lambda run: write_arm(run.parent / "a_other", "rowwise", data_sha256="e" * 64),
            "(data_sha256)",
        ),
    ],
)
def test_mistakes_are_a_sentence_and_nothing_is_written(
    runs: list[Path],
    capsys: Capsys,
    no_figures: None,
    words: str,
    damage: Callable[[Path], object] | None,
    sentence: str,
) -> None:
    if damage:
        damage(runs[0])
    files = sorted(runs[0].parent.rglob("*"))
    assert sentence in asked(capsys, report.main, *words.format(runs[0].parent).split(), code=2)
    assert sorted(runs[0].parent.rglob("*")) == files


# -------------------------------------------------------------------------------------- the figure


@pytest.fixture
def arms(runs: list[Path]) -> list[TrainingRun]:
    return read_training_runs(runs)[0]


def test_each_panel_has_a_line_of_each_run(arms: list[TrainingRun]) -> None:
    _, val, gap = panels = draw_losses(arms).axes
    assert [len(panel.get_lines()) for panel in panels] == [3, 3, 3]
    assert val.get_lines()[0].get_ydata().tolist() == arms[0].history.val["loss"].tolist()
    assert not gap.get_lines()[0].get_ydata().any()


def test_the_panel_of_differences_holds_them(arms: list[TrainingRun]) -> None:
    low, high = draw_losses(arms).axes[2].get_ylim()
    assert low < 100 * -0.004 / 2.1 and 100 * 0.01 / 2.1 < high < 1


def test_without_bf16_there_is_no_difference_and_nobody_gets_its_colour(
    arms: list[TrainingRun],
) -> None:
    panels = draw_losses(arms[1:]).axes
    colours = [STYLES[i]["color"] for i in (1, 2)]
    assert len(panels) == 2
    assert all([line.get_color() for line in panel.get_lines()] == colours for panel in panels)


def test_a_difference_is_the_mean_over_three_steps(arms: list[TrainingRun]) -> None:
    arms[1].history.train["loss"][20] += 0.3
    base = [2 + 4 / step + 0.01 * (step % 4) for step in (20, 21, 22)]
    drawn = draw_losses(arms).axes[2].get_lines()[1].get_ydata()[20]
    assert drawn == pytest.approx(11 / np.mean(base), rel=1e-6)


def spiked() -> list[dict]:
    rows = ordinary("bf16")
    rows[35] |= {"loss": 1e9, "verdict": "SKIP"}
    return rows


def diverged() -> list[dict]:
    return [row | {"loss": 1e6} if row["step"] > 20 else row for row in ordinary("bf16")]


def test_neither_a_spike_nor_a_run_that_diverged_governs_the_axis(
    runs: list[Path], tmp_path: Path
) -> None:
    bad = [
        write_arm(tmp_path / "runs/amax", "amax", rows=spiked()),
        write_arm(tmp_path / "runs/cscale", "cscale", rows=diverged()),
    ]
    panels: list[Axes] = draw_losses(read_training_runs([runs[2], *bad])[0]).axes
    assert all(panel.get_ylim()[1] < 20 for panel in panels[:2])


# ----------------------------------------------------------------------------- what train.py writes


@pytest.fixture
def trained(tiny: Config, run: Callable[..., str]) -> list[Path]:
    """A BF16 and an FP8 run of one training."""
    configs = [
        changed(tiny, f"run=tiny_{recipe} fp8.recipe={recipe} eval.every=2")
        for recipe in ("off", "tensorwise")
    ]
    for config in configs:
        assert run(config)
    return [config.run_dir for config in configs]


def test_what_train_writes_is_what_the_report_reads(trained: list[Path], capsys: Capsys) -> None:
    page, result = call(capsys, *trained)
    assert "| whole run [s] |\n" in page and "A CPU has no FP8 units" in page
    for row, folder in zip(result["runs"], trained, strict=True):
        summary, train, val = strict(folder / "summary.json"), row["train_loss"], row["val_loss"]
        assert (val["n"], val["final"]) == (3, pytest.approx(summary["loss_as_trained"]))
        assert (train["n"], train["final"]) == (6, summary["train_loss_last"])
        assert row["step_time_s"]["with_compile"] < summary["wall_s"]
        assert row["speed_against_bf16"] != 1


def test_page_figure_and_json_are_written(trained: list[Path], capsys: Capsys) -> None:
    page, result = call(capsys, *trained)
    law = trained[0].parent / "law"
    names = ["report.json", "report.md", "report_loss.png", "report_loss.svg"]
    written = (law / "report.md").read_text()
    assert sorted(path.name for path in law.iterdir()) == names and result["notes"] == []
    assert written.startswith(page.rsplit("\n\nwrote", 1)[0])
    assert "![loss](report_loss.png)" in written
