"""scaling/report.py: every number by an independent count, every refusal a sentence; a study's page says what its files say."""

import json
import math
import shutil
import statistics

import numpy as np
import pytest
from scaling_runs import declare_branches, write_branches, write_run

from scaling import fit, precision, report
from scaling.report import BF16, STYLES, analyse, clock, draw_costs, draw_losses, read_arms, spread, styled
from tests.conftest import call_train, with_recipe

H100 = {"device": "NVIDIA H100 80GB HBM3", "n_gpu": 4}
GAPS = {"bf16": 0.0, "tensorwise": 0.01, "rowwise": -0.004}
SPEED = {"bf16": 1000.0, "tensorwise": 1300.0, "rowwise": 1150.0}


@pytest.fixture(autouse=True)
def render_nothing(monkeypatch, request):
    """Drawing and rendering are most of the time: the tests of figures draw, those of files on disk render too."""
    if "disk" not in request.node.name:
        monkeypatch.setattr(report, "render", lambda figure, form: b"")
        if "figure" not in request.node.name:
            monkeypatch.setattr(report, "DRAWINGS", {})


def step_row(step, loss=None, kind="train", **changes):
    return {"kind": kind, "step": step, "tokens": 512 * step, "loss": 2 + 4 / step if loss is None else loss, "lr": 1e-3,
            "grad_norm": 1.0, "tok_per_s": 512 / 0.5, "step_s": 0.5, "verdict": "OK", "since_start": step, **changes}


def ordinary(recipe, n=40, gpu=True):
    """Steps of half a second or less; the first takes eight more. GPU rows say what no mean may hold in their first step."""
    rows = []
    for step in range(1, n + 1):
        seconds = 0.5 * 1000 / SPEED[recipe]
        more = {"gpu_mem_pct": 70.0 + step % 3, "gpu_util_pct": 90.0 - step % 5} if gpu else {}
        rows.append(step_row(step, 2 + 4 / step + GAPS[recipe] + 0.01 * (step % 4), step_s=seconds + 8 * (step == 1), **more))
        if step == 1 and gpu:
            rows[0] |= {"gpu_mem_pct": 5.0, "gpu_util_pct": 0.0}
        if step % 10 == 0:
            rows.append({"kind": "val", "step": step, "tokens": 1, "loss": 2.5 + 4 / step + GAPS[recipe], "sources": {}})
    return rows


def write_arm(folder, recipe="bf16", rows=None, settings=None, **changes):
    gap = GAPS.get(recipe, 0.0)
    precision = {"recipe": recipe, "compile": True, "layers_converted": [], "layers_skipped": {}}
    changes = {"recipe": recipe, "precision": precision, "loss": 2.6, "gap": gap, "data_sha256": "d" * 64, "steps": 40,
               "wall_s": 60.0, "mem_peak_gib": 55.5, "torch": "2.13.0",
               "tok_per_s_median": SPEED.get(recipe, 1000.0), **H100, **changes}
    write_run(folder, curve=False, **changes)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or ordinary(recipe)))
    config = {"run": folder.name, "seed": 1337, "optim": {"lr": 1e-3}, "eval": {"every": 10}, "parallel": {"compile": True},
              "fp8": {"recipe": recipe}, **(settings or {})}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def runs(tmp_path):
    """tensorwise, rowwise, BF16, in the order of their names' letters."""
    return [write_arm(tmp_path / "runs" / f"{letter}_{recipe}", recipe)
            for letter, recipe in zip("abc", ("tensorwise", "rowwise", "bf16"), strict=True)]


def call(capsys, *words, said=report.main):
    """Standard output and report.json of a call that succeeds; the JSON is strict."""
    assert said([*map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    folder = out.rsplit("wrote ", 1)[1].split("/: ")[0]
    with open(f"{folder}/report.json") as file:
        return out, json.load(file, parse_constant=lambda name: pytest.fail(name))


def refused(capsys, *words):
    assert report.main([*map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("scaling/report.py: ") and "Traceback" not in err
    return err


def tables_of(text):
    """{title: {label: {column: cell}}} of Markdown; a row that has another number of cells than its head fails."""
    found = {}
    for block in text.split("\n\n**")[1:]:
        title, body = block.split("**\n\n", 1)
        lines = [[cell.strip() for cell in line[1:-1].replace("\\|", "\0").split("|")]
                 for line in body.split("\n\n")[0].splitlines()]
        found[title] = {cells[0]: dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]}
    return found


def test_each_number_is_that_of_an_independent_count(runs, tmp_path, capsys):
    out, result = call(capsys, *runs)
    assert [row["label"] for row in result["runs"]] == ["bf16", "tensorwise", "rowwise"]      # BF16 first, then as given
    for row in result["runs"]:
        rows = ordinary(row["recipe"])
        train = [one for one in rows if one["kind"] == "train"]
        for key, kind in (("train_loss", "train"), ("val_loss", "val")):
            losses = [one["loss"] for one in rows if one["kind"] == kind]
            assert row[key] == {"max": max(losses), "min": min(losses), "mean": pytest.approx(statistics.mean(losses)),
                                "final": losses[-1], "sd": pytest.approx(statistics.stdev(losses)), "n": len(losses)}
        each = 0.5 * 1000 / SPEED[row["recipe"]]
        assert row["step_time_s"] == pytest.approx({"with_compile": 40 * each + 8, "without_compile": 40 * each, "compile": 8})
        assert row["memory_percent"]["mean"] == pytest.approx(statistics.mean(one["gpu_mem_pct"] for one in train[1:]))
        assert row["utilisation_percent"]["mean"] == pytest.approx(statistics.mean(one["gpu_util_pct"] for one in train[1:]))
        assert row["memory_percent"]["min"] == 70 and row["mem_peak_gib"] == 55.5 and row["wall_s"] == 60
        assert row["speed_against_bf16"] == (None if row["recipe"] == "bf16" else pytest.approx(SPEED[row["recipe"]] / 1000))
    cells = tables_of(out)
    assert cells["Time, memory, speed"]["tensorwise"] == {
        "recipe": "tensorwise", "speed against BF16": "1.300", "tokens/s": "1,300", "steps [s]": f"{20 / 1.3 + 8:.2f}",
        "without compilation [s]": f"{20 / 1.3:.2f}", "compilation [s]": "8.00", "whole run [s]": "60.00",
        "memory allocated, mean [%]": "71.0", "memory, peak [GiB]": "55.50", "GPU utilisation, mean [%]": "88.0"}
    loss = cells["Training loss [nats/token]"]["rowwise"]
    assert (loss["max"], loss["min"], loss["final"], loss["steps"]) == ("6.0060", "2.0960", "2.0960", "40")
    assert cells["Validation loss, as trained [nats/token]"]["bf16"]["gap in BF16 [%]"] == ""
    assert "not told" not in out.lower() and "CPU" not in out


def test_gaps_are_those_of_the_paired_analysis(runs, tmp_path, capsys, monkeypatch):
    out, result = call(capsys, *runs)
    for name, drawn in (("draw_precision", None), ("draw_pair", (None, []))):
        monkeypatch.setattr(precision, name, lambda result, drawn=drawn: drawn)
    assert precision.main([str(runs[0].parent), f"out={tmp_path / 'law'}"]) == 0
    for pair in json.loads((tmp_path / "law/precision.json").read_text())["pairs"]:
        row = next(one for one in result["runs"] if one["run_id"] == pair["fp8"])
        for arm in ("as_trained", "bf16"):
            theirs = pair[f"gap_{arm}"]
            assert {key: row["gap"][arm][key] for key in theirs} == theirs
            assert row["gap"][arm]["se_percent"] == pytest.approx(100 * theirs["se"] / 2.6)
    shown = tables_of(out)["Validation loss, as trained [nats/token]"]["tensorwise"]["gap in BF16 [%]"]
    assert shown.startswith(f"{100 * 0.01 / 2.6:+.3f} ± ")


def test_spread_of_nothing_and_of_one():
    assert spread([]) is None and spread([math.nan, math.inf]) is None
    assert spread([math.nan, 3.0]) == {"max": 3.0, "min": 3.0, "mean": 3.0, "final": 3.0, "sd": None, "n": 1}


def test_time_counts_undone_steps_each_start_and_what_is_not_told(tmp_path):
    """Ten steps of a second; two starts compile for 5 and 3 s more; steps 5 and 6 are done twice, step 9 tells no time."""
    rows = [step_row(1, step_s=6.0), *(step_row(s, step_s=1.0) for s in (2, 3, 4)),
            step_row(5, kind="undone", step_s=1.5), step_row(6, kind="undone", step_s=2.0, verdict="ROLLBACK"),
            {"kind": "event", "event": "rollback", "step": 6, "to": 4},
            step_row(5, step_s=1.0), step_row(6, step_s=1.0), {"kind": "event", "event": "resume", "step": 6},
            step_row(7, step_s=4.0, since_start=1), *(step_row(s, step_s=1.0, since_start=s - 6) for s in (8, 9, 10))]
    rows[-2]["step_s"] = None
    arms, notes = read_arms([write_arm(tmp_path / "run", rows=rows, steps=12, moved_on_steps=2)])
    assert arms[0].clock.tolist() == [[6, 7, 8, 9, 13.5, 14.5, 18.5, 19.5, 20.5, 21.5],
                                      [1, 2, 3, 4, 8.5, 9.5, 10.5, 11.5, 12.5, 13.5]]
    row = analyse(arms)["runs"][0]
    assert row["step_time_s"] == {"with_compile": 21.5, "without_compile": 13.5, "compile": 8.0}
    assert notes == ["bf16: 2 of 12 steps have no row in metrics.jsonl: time is too short",
                     "bf16: went back 1 times: that time is counted, those losses are not; 2 steps' worth of data were left out, "
                     "so its data order is not the others'"]
    assert row["train_loss"]["n"] == 10


@pytest.mark.parametrize("seconds, unit, shown", [(7.4, "s", "296.00"), (18.0, "min", "12.00"), (450.0, "h", "5.00")])
def test_times_have_a_unit_that_reads_easily(tmp_path, capsys, seconds, unit, shown):
    rows = [step_row(step, step_s=seconds, since_start=step + 1) for step in range(1, 41)]
    row = tables_of(call(capsys, write_arm(tmp_path / "run", rows=rows, wall_s=40 * seconds))[0])["Time, memory, speed"]["bf16"]
    assert [row[f"{name} [{unit}]"] for name in ("steps", "without compilation", "compilation", "whole run")] == [
        shown, shown, "0.00", shown]


def test_steps_without_targets_have_no_loss(tmp_path, capsys):
    rows = ordinary("bf16")
    rows[4]["loss"] = rows[-2]["loss"] = 0.0        # the fifth step and the last but its validation
    rows[7]["loss"] = None
    assert rows[-2]["kind"] == "train"
    out, result = call(capsys, write_arm(tmp_path / "run", rows=rows), f"out={tmp_path / 'law'}")
    losses = [row["loss"] for row in rows if row["kind"] == "train" and row["loss"]]
    found = result["runs"][0]["train_loss"]
    assert (found["n"], found["min"], found["final"]) == (37, min(losses), losses[-1])
    assert found["mean"] == pytest.approx(statistics.mean(losses)) and found["sd"] == pytest.approx(statistics.stdev(losses))
    assert result["notes"] == ["bf16: 2 steps had a training loss of exactly 0, so no target: left out of the statistics",
                               "bf16: 1 training losses are not finite: left out of the statistics"]
    assert result["runs"][0]["step_time_s"]["with_compile"] == pytest.approx(28)      # they took their time
    train = draw_losses(arms_of([tmp_path / "run"])).axes[0].get_lines()[0]
    assert len(train.get_xdata()) == 37 and min(train.get_ydata()) > 2


@pytest.mark.parametrize("starts, bare", [((1, 2), [1.0, 2.0]), ((1, 1), [3.5, 4.5]), ((None, None), [6.0, 7.0])])
def test_two_steps_tell_what_compiled(tmp_path, starts, bare):
    """6 s and 1 s: the second is what a step takes, unless both are the first after a start, or nobody says."""
    rows = [step_row(step, step_s=s, since_start=start) for step, s, start in zip((1, 2), (6.0, 1.0), starts, strict=True)]
    assert read_arms([write_arm(tmp_path / "run", rows=rows, steps=2)])[0][0].clock.tolist() == [[6.0, 7.0], bare]


def test_without_any_time_there_is_neither_number_nor_figure(tmp_path, capsys):
    rows = [step_row(step, step_s=value) for step, value in enumerate((None, "1", -1.0, [2]), 1)]
    folder = write_arm(tmp_path / "run", rows=rows, steps=4)
    assert clock(read_arms([folder])[0][0].history) is None
    out, result = call(capsys, folder)
    assert result["runs"][0]["step_time_s"] is None and "bf16: no row tells step_s: no time" in result["notes"]
    assert draw_costs(arms_of([folder])) is None


def test_without_gpu_rows_words_stand_for_numbers_and_for_a_figure(tmp_path, capsys):
    bare = [write_arm(tmp_path / "runs" / recipe, recipe, ordinary(recipe, gpu=False), device="cpu test", n_gpu=1,
                      mem_peak_gib=None) for recipe in GAPS]
    out, result = call(capsys, *bare)
    row = tables_of(out)["Time, memory, speed"]["tensorwise"]
    assert list(row.values())[-3:] == ["not told"] * 3
    assert row["speed against BF16"] == "1.300 (CPU)" and "A CPU has no FP8 units" in out
    assert all(one["memory_percent"] is None and one["utilisation_percent"] is None for one in result["runs"])
    assert len(draw_costs(arms_of(bare)).axes) == 2 and "it takes a GPU, its driver" in out


def test_runs_that_differ_in_more_than_the_precision_are_refused(runs, tmp_path, capsys):
    other = write_arm(tmp_path / "runs/other", "rowwise", pair_id="another",
                      settings={"seed": 1338, "optim": {"lr": 2e-3}, "eval": {"every": 5}})
    err = refused(capsys, runs[2], other, f"out={tmp_path / 'r'}")
    assert "differ in more than the precision: seed 1337 against 1338, optim.lr 0.001 against 0.002; give the runs of one" in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("key, words", [("data_sha256", "another training data"), ("val_sha256", "another validation set"),
                                        ("tokenizer_sha256", "another tokenizer")])
def test_other_data_is_refused(runs, tmp_path, capsys, key, words):
    err = refused(capsys, runs[2], write_arm(tmp_path / "runs/other", "rowwise", **{key: "e" * 64}))
    assert words in err and key in err and str(tmp_path / "runs/other") in err


def test_what_differs_besides_is_said_and_another_machine_has_no_speed(runs, tmp_path, capsys):
    other = write_arm(tmp_path / "runs/other", "amax", settings={"eval": {"every": 5}, "parallel": {"compile": True, "shard": 2}},
                      device="NVIDIA H200", rows=ordinary("bf16"))
    out, result = call(capsys, runs[2], runs[0], other)
    assert tables_of(out)["Time, memory, speed"]["amax"]["speed against BF16"] == "not alike"
    assert result["notes"] == [
        'amax differs from bf16 beside the recipe: eval.every 10 against 5, device "NVIDIA H100 80GB HBM3" against '
        '"NVIDIA H200", parallel.shard not there against 2. The training is the same; times and validations may not be alike']


def test_runs_of_one_recipe_are_called_by_their_names(runs, tmp_path, capsys):
    twin = write_arm(tmp_path / "runs/head", "tensorwise", settings={"fp8": {"recipe": "tensorwise", "head": True}})
    out, result = call(capsys, *runs, twin)
    assert [row["label"] for row in result["runs"]] == ["bf16", "tensorwise (a_tensorwise)", "rowwise", "tensorwise (head)"]
    assert "tensorwise (head) differs from bf16 beside the recipe: fp8.head not there against true" in result["notes"][0]


def test_a_repeat_of_the_bf16_run_stands_beside_it_with_its_gap(runs, tmp_path, capsys):
    """The null of the same seed: same pair_id, rounded otherwise; given first, it is still not what the others are held to."""
    again = write_arm(tmp_path / "null" / "a_null", loss=2.605, repeat=1, tok_per_s_median=900.0)
    out, result = call(capsys, again, *runs, f"out={tmp_path}/law")
    assert [row["run_id"] for row in result["runs"]] == ["c_bf16", "a_null", "a_tensorwise", "b_rowwise"]
    found = tables_of(out)
    losses, costs = (next(table for title, table in found.items() if title.startswith(name)) for name in ("Validation", "Time"))
    assert losses["bf16 (a_null)"]["gap in BF16 [%]"].startswith(f"{100 * 0.005 / 2.6:+.3f}")
    assert losses["bf16 (c_bf16)"]["gap in BF16 [%]"] == "" and costs["bf16 (c_bf16)"]["speed against BF16"] == "1"
    assert costs["bf16 (a_null)"]["speed against BF16"] == "0.900"
    assert losses["tensorwise"]["gap in BF16 [%]"].startswith(f"{100 * 0.01 / 2.6:+.3f}")


def test_without_bf16_there_is_no_speed_up(runs, capsys):
    out, result = call(capsys, runs[0], runs[1])
    assert tables_of(out)["Time, memory, speed"]["rowwise"]["speed against BF16"] == "no BF16 run"
    assert result["notes"][-1].startswith("no BF16 run among these") and result["runs"][0]["gap"] is None


def test_an_unfinished_run_is_left_out_with_a_line(runs, tmp_path, capsys):
    (runs[1] / "summary.json").unlink()
    out, result = call(capsys, *runs)
    assert len(result["runs"]) == 2
    assert f"- skipped {runs[1]}: the run is unfinished (it has no summary.json)" in out
    assert "no finished run in" in refused(capsys, runs[1])


def test_a_diverged_run_is_shown_with_its_losses(runs, tmp_path, capsys):
    rows = ordinary("bf16")
    rows[30] |= {"loss": None, "verdict": "SKIP"}
    rows[35] |= {"loss": 1e9, "verdict": "SKIP"}
    bad = write_arm(tmp_path / "runs/bad", "amax", rows=rows, status="diverged")
    out, result = call(capsys, runs[2], bad)
    assert result["notes"] == ["amax: 1 training losses are not finite: left out of the statistics",
                               "amax: the guard judged 2 steps as other than OK: their losses are counted",
                               "amax: its status is 'diverged'"]
    assert tables_of(out)["Training loss [nats/token]"]["amax"]["max"] == "1e+09"
    blown = [row | {"loss": 1e6} if row["step"] > 20 else row for row in ordinary("bf16")]
    blown = write_arm(tmp_path / "runs/blown", "cscale", rows=blown, status="diverged")
    loss, val, *_ = draw_losses(read_arms([runs[2], bad, blown])[0]).axes
    assert loss.get_ylim()[1] < 20 and val.get_ylim()[1] < 20       # neither a spike nor a whole run governs the axis


@pytest.mark.parametrize("words, sentence", [
    (["{runs}/nowhere"], "does not exist"), ([], "no runs given: name those of one training"), (["out=x"], "no runs given"),
    (["{runs}/c_bf16", "loss=bf16"], "there is no key 'loss'"), (["{runs}/c_bf16", "study={runs}"], "or --study out/STUDY"),
    (["{runs}/c_bf16", "out={runs}/c_bf16/config.json"], "cannot be written"), (["study={runs}/nowhere"], "does not exist")])
def test_mistakes_are_a_sentence(runs, capsys, words, sentence):
    before = sorted(runs[0].parent.rglob("*"))
    assert sentence in refused(capsys, *(word.format(runs=runs[0].parent) for word in words))
    assert sorted(runs[0].parent.rglob("*")) == before


@pytest.mark.parametrize("name, content, sentence", [
    ("config.json", "{", "config.json is not valid JSON"), ("config.json", None, "config.json cannot be read"),
    ("summary.json", "{}", "schema_version"), ("metrics.jsonl", None, "has no metrics.jsonl"),
    ("val_losses.npz", None, "val_losses.npz is missing"),
    ("metrics.jsonl", json.dumps(step_row(1, kind="undone")) + "\n", "holds no step that counts")])
def test_damaged_runs_are_a_sentence_and_nothing_is_written(runs, capsys, name, content, sentence):
    path = runs[0] / name
    path.unlink() if content is None else path.write_text(content)
    assert sentence in refused(capsys, *runs)
    assert not (runs[0].parent / "law").exists()


def arms_of(folders):
    return read_arms(folders)[0]


def test_lines_of_the_figures_are_where_the_rows_are_and_an_arm_looks_the_same_in_all(runs):
    arms = arms_of(runs)
    loss, val, gap = (panel.get_lines() for panel in draw_losses(arms).axes)
    assert val[0].get_xydata().tolist() == arms[0].history.val.tolist() and len(loss) == 3
    steps = np.arange(1, 41)
    assert gap[1].get_ydata()[20] == pytest.approx(1 / np.mean([2 + 4 / s + 0.01 * (s % 4) for s in steps[19:22]]), rel=1e-6)
    low, high = draw_losses(arms).axes[2].get_ylim()
    assert low < 100 * -0.004 / 2.1 and 100 * 0.01 / 2.1 < high < 1
    whole, bare, memory, busy = (panel.get_lines() for panel in draw_costs(arms).axes)
    assert whole[1].get_ydata()[-1] == pytest.approx(40 * 0.5 / 1.3 + 8) and bare[1].get_ydata()[-1] == pytest.approx(20 / 1.3)
    assert memory[0].get_ydata()[5] == 70 and busy[2].get_ydata()[5] == 90 - 6 % 5
    for key in ("color", "marker"):        # each alone tells arms apart: in grey, and without colour vision
        assert len({str(look[key]) for look in (BF16, *STYLES)}) == 1 + len(STYLES), key
    for lines in (loss, val, whole, busy):
        assert [one.get_color() for one in lines] == [BF16["color"], STYLES[0]["color"], STYLES[1]["color"]]
    assert [look for _, look in styled(arms[1:])] == list(STYLES[:2])       # BF16's is its own, where it is missing too


def test_what_train_writes_is_what_the_report_reads_on_disk(tiny, tmp_path, capsys):
    folders = []
    for recipe in ("off", "tensorwise"):
        config = with_recipe(tiny, recipe, run=f"tiny_{recipe}")
        assert call_train(capsys, config, tmp_path, "eval.every=2").returncode == 0
        folders.append(config.run_dir)
    out, result = call(capsys, "--report", *folders, said=precision.main)
    for row, folder in zip(result["runs"], folders, strict=True):
        summary = json.loads((folder / "summary.json").read_text())
        assert row["val_loss"]["final"] == pytest.approx(summary["loss_as_trained"]) and row["val_loss"]["n"] == 3
        assert row["train_loss"]["n"] == 6 and row["train_loss"]["final"] == summary["train_loss_last"]
        assert row["speed_against_bf16"] != 1 and row["step_time_s"]["with_compile"] < summary["wall_s"]
    law, names = tmp_path / "out/law", [f"report_{name}.{form}" for name in ("loss", "cost") for form in ("png", "svg")]
    assert result["notes"] == [] and (law / "report_loss.svg").read_bytes().startswith(b"<?xml")
    assert sorted(path.name for path in law.iterdir()) == sorted([*names, "report.json", "report.md"])
    page = (law / "report.md").read_text()
    assert page.startswith(out.rsplit("\n\nwrote", 1)[0]) and "![cost](report_cost.png)" in page


# ---------------------------------------------------------------------------------------------------------------- a study

@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of 24 runs with its largest size held out, predicted, run and scored; its laws, its gaps."""
    folder, later = tmp_path_factory.mktemp("out") / "s", tmp_path_factory.mktemp("later") / "s"
    write_branches(folder, sizes=(30_000, 60_000, 120_000), ratios=(5, 20), t_start="2026-11-20T09:00:00Z")
    write_branches(later, sizes=(240_000,), ratios=(20,), seeds=(1,), recipes=("bf16",), t_start="2999-01-01T00:00:00Z")
    target = "s240000_bf16_1"
    goal = json.loads((later / target / "summary.json").read_text())
    declare_branches(folder)
    declared = json.loads((folder / "study.json").read_text())
    row = {"run": target, "size": "x", "recipe": "bf16", "parent": None, "parent_step": None, "tokens": goal["tokens"]}
    row |= {key: goal[key] for key in ("params_total", "params_nonembed", "params_matmul", "flops_per_token", "seed")}
    declared |= {"study": "s", "held_out": [target], "runs": [*declared["runs"], row]}
    (folder / "study.json").write_text(json.dumps(declared))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("figures", "precision"):     # rendering is most of the time
            patch.setattr(f"scaling.{module}.render", lambda figure, form: b"", raising=False)
        for command, words in ((precision, ()), (fit, ("--predict", target))):
            assert command.main([str(folder), *words]) == 0
        (later / target).rename(folder / target)
        assert fit.main([str(folder), "--score"]) == 0
    return folder


def test_a_studys_page_says_what_its_files_say(study, capsys):
    assert report.main(["--study", str(study)]) == 0
    out, page = capsys.readouterr().out, (study / "README.md").read_text()
    said, law = (json.loads((study / name).read_text()) for name in ("report.json", "law/law.json"))
    found = json.loads((study / "law/precision.json").read_text())["common"]["tensorwise"]["bf16"]
    score, = json.loads((study / "law/score_s240000_bf16_1.json").read_text())["runs"]
    assert "25 finished runs of 25 declared on 2026-11-19T00:00:00Z, held out: s240000_bf16_1." in page
    assert f"Gap of tensorwise to BF16: {found['mean']:+.3f} ± {found['high'] - found['mean']:.3f} % of the loss" in out
    assert f"measured {score['loss']:.4f} in s240000_bf16_1, {'inside' if score['inside'] else 'OUTSIDE'} the interval" in page
    for group in law["groups"].values():
        fitted = group["laws"][group["headline"]["form"]]
        assert f"| {group['headline']['form']} (headline)" in page and f"{100 * fitted['residual_rms']:.3f}" in page
    assert "![figure](law/figure.png)" in page and "![precision](law/precision.png)" in page and "Missing" not in page
    summaries = {path.parent.name: json.loads(path.read_text()) for path in study.glob("*/summary.json")}
    assert sorted(run for row in said["runs"] for run in row["runs"]) == sorted(summaries)
    for row in said["runs"]:
        assert row["loss_bf16"] == pytest.approx(statistics.mean(summaries[run]["loss_bf16"] for run in row["runs"]))
        assert row["speed_against_bf16"] == (None if row["recipe"] == "bf16" else 0.75)
    assert said["predictions"][0]["scored"][0]["error_percent"] == score["error_percent"]
    assert said["gaps"]["tensorwise"]["bf16"] == found
    assert report.main(["--study", str(study)]) == 0 and (study / "README.md").read_text() == page      # again: the same bytes


def test_what_a_study_lacks_is_said_with_its_command(tmp_path, capsys):
    folder = declare_branches(write_branches(tmp_path / "s", sizes=(30_000,), ratios=(5, 20), seeds=(1,)))
    (folder / "s30000_bf16_1_d5/summary.json").unlink()
    assert report.main(["--study", str(folder)]) == 0
    page = (folder / "README.md").read_text()
    assert "3 finished runs of 4 declared on 2026-11-19T00:00:00Z; missing: s30000_bf16_1_d5" in page
    assert f"**Missing:** law/law.json (`python scaling/fit.py {folder}`)." in page
    assert f"**Missing:** law/precision.json (`python scaling/precision.py {folder}`)." in page
    capsys.readouterr()
    (folder / "README.md").write_text("mine")
    assert "was not written by this command" in refused(capsys, "--study", folder)
    (folder / "README.md").unlink()
    (folder / "law").mkdir()
    (folder / "law/law.json").write_text('{"groups": {"bf16": {}}}')
    assert "a file is damaged or of another version (KeyError: 'headline')" in refused(capsys, "--study", folder)


def test_a_score_of_another_prediction_and_a_law_of_other_runs_are_told(study, tmp_path, capsys):
    folder = shutil.copytree(study, tmp_path / "s")
    path = folder / "s30000_bf16_1/summary.json"
    path.write_text(path.read_text() + " ")
    assert report.main(["--study", str(folder)]) == 0
    assert "law.json is not of these files: s30000_bf16_1 went in with other bytes" in (folder / "README.md").read_text()
    score = folder / "law/score_s240000_bf16_1.json"
    score.write_text(json.dumps(json.loads(score.read_text()) | {"prediction_sha256": "0"}))
    capsys.readouterr()
    assert "judges another prediction than the one that lies beside it" in refused(capsys, "--study", folder)
