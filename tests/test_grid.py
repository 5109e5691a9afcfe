"""The table of a study says what is true: how far each run is, what it cost or will cost, and where that number comes from."""

import json
import shutil
from dataclasses import replace

import pytest

from scaling import sweep
from scaling.costs import Cost, costs_of, kind_of, table
from scaling.grid import has_trained, has_unsaved, placed, state_of, tokens_left
from scaling.study import expand
from scaling.sweep import Options
from tests.study_cases import tiny_study

OPTIONS = Options(study="x", start=2.0)


@pytest.fixture
def rows(tiny, tmp_path):
    """a_bf16_t20_s1, its branch t10, the same of b."""
    return expand(sweep.load_study(tiny_study(tiny, tmp_path)))


def finish(row, folder, **changes):
    (folder / row.run).mkdir(parents=True, exist_ok=True)
    summary = {"status": "ok", "tok_per_s_median": 1000.0, "n_gpu": 1, "device": "X", "loss_bf16": 2.0,
               "parent_step": row.parent_step}
    (folder / row.run / "summary.json").write_text(json.dumps(summary | changes))


def checkpoint(row, folder, step):
    (folder / row.run / f"checkpoints/step_{step:08d}").mkdir(parents=True)
    (folder / row.run / f"checkpoints/step_{step:08d}/DONE").touch()


def cells(line):
    return line.split()


def test_the_table_by_hand(rows, tmp_path):
    lines = table(rows, tmp_path / "none", OPTIONS)
    trunk, branch = rows[:2]
    assert (trunk.steps, branch.steps, branch.parent_step) == (884, 442, 354)
    assert cells(lines[0])[-2:] == ["seconds", "state"]
    assert cells(lines[2]) == ["a_bf16_t10_s1", "22.6k", "10", "226k", "354", f"{88 * 512 * trunk.flops_per_token:.2e}", "~2",
                               "missing"]
    assert " FLOPs, 8 device-seconds; left: 4 runs, " in lines[6]
    assert not (tmp_path / "none").exists()
    own, apart = (sum(getattr(row, key) for row in rows) for key in ("own_flops", "flops"))
    assert f"as 4 separate runs {apart:.3g} FLOPs: branches save {1 - own / apart:.0%}" in lines
    assert lines[-1] == ("~ assumed: 45% of the 989 BF16 TFLOP/s of one h100 (mfu=), FP8 as fast, "
                         "2 s to start and end a run (start=)")


def test_speed_and_start_are_those_of_the_runs_that_are_done(rows, tmp_path):
    # of the size: 1,500 and 1,000 tokens/s on each GPU; 8.5 and 1.5 seconds beside the steps, and 5 no summary tells of
    finish(rows[0], tmp_path, status="diverged", tok_per_s_median=3000.0, n_gpu=2, wall_s=884 * 512 / 3000 + 8.5)
    finish(rows[1], tmp_path, tok_per_s_median=1000.0, wall_s=88 * 512 / 1000 + 1.5)
    start = 5 + (8.5 + 1.5) / 2
    lines = table(rows, tmp_path, OPTIONS)
    assert cells(lines[0])[-2] == "minutes"
    assert cells(lines[1])[-2:] == [f"{(start + 884 * 512 / 1250) / 60:.3g}", "diverged"]
    assert cells(lines[2])[-2:] == [f"{(start + 88 * 512 / 1250) / 60:.3g}", "done"]
    assert cells(lines[3])[-2:] == ["~0.0333", "missing"]
    assert "measured: a bf16 1.25k tokens/s on each X, 10 s to start and end (5 of them assumed)" in lines
    assert "left: 2 runs" in lines[6]
    assert lines[-2].endswith("2 s to start and end a run (start=)")
    lines = table(rows, tmp_path, replace(OPTIONS, gpus=8))      # a start occupies all of them
    assert cells(lines[2])[-2:] == [f"{(8 * start + 88 * 512 / 1250) / 60:.3g}", "done"]
    finish(rows[2], tmp_path, tok_per_s_median=1.0)
    assert cells(table(rows, tmp_path, OPTIONS)[0])[-2] == "hours"


def test_a_summary_without_hours_leaves_the_start_assumed(rows, tmp_path):
    for row in rows:
        finish(row, tmp_path)
    lines = table(rows, tmp_path, OPTIONS)
    assert cells(lines[2])[-2:] == [f"{(2 + 88 * 512 / 1000) / 60:.3g}", "done"]
    assert lines[-3:] == ["~ assumed: 2 s to start and end a run (start=)", "measured: a bf16 1k tokens/s on each X",
                          "measured: b bf16 1k tokens/s on each X"]


def test_mfu_start_and_limit_are_what_is_asked(rows, tmp_path):
    flops = [row.own_flops for row in rows]
    options = replace(OPTIONS, mfu=1e-7, start=6.0, gpus=2, jobs=2, limit=100.0)
    lines = table(rows, tmp_path, options)
    seconds = 4 * 6 * 2 + sum(flops) / (989.4e12 * 1e-7)
    assert f"; left: 4 runs, {sum(flops):.3g} FLOPs, {seconds / 60:.3g} device-minutes" in lines[6]
    slices = -(-(seconds / 4 - 6) // (100 - 6))
    assert slices > 2
    assert any(line.startswith(f"left: {slices:.0f} slices of 100 s, ") for line in lines)
    assert lines[-1].startswith("~ assumed: 1e-05% of the 989 ")
    assert any(line.startswith("limit=6 is no more than the 6 s that a run takes to start and end")
               for line in table(rows, tmp_path, replace(options, limit=6.0)))
    checkpoint(rows[0], tmp_path, 800)      # of a run in progress only the rest is left, with a start
    seconds -= 800 * 512 * rows[0].flops_per_token / (989.4e12 * 1e-7)
    assert f" FLOPs, {seconds / 60:.3g} device-minutes" in table(rows, tmp_path, options)[6].partition("left")[2]
    for row in rows:
        finish(row, tmp_path)
    assert not any("slices" in line for line in table(rows, tmp_path, options))


def test_null_runs_are_a_kind_of_their_own_and_follow_their_partner(tiny, tmp_path):
    rows = expand(sweep.load_study(tiny_study(tiny, tmp_path, null=True, recipes=("bf16", "tensorwise"), sizes=(64,))))
    assert [row.run for row in rows] == ["a_bf16_t20_s1", "a_bf16_t10_s1", "a_bf16_null_t20_s1", "a_bf16_null_t10_s1",
                                         "a_tensorwise_t20_s1", "a_tensorwise_t10_s1"]
    finish(rows[0], tmp_path)
    finish(rows[2], tmp_path, tok_per_s_median=100.0, wall_s=1e4)
    costs = costs_of(rows, tmp_path, OPTIONS)
    assert costs[kind_of(rows[0])] == Cost(1000.0, 2.0, "X", False)
    assert costs["a", "bf16 null"] == Cost(100.0, 5 + 1e4 - 884 * 512 / 100, "X", True)
    assert costs["a", "tensorwise"].device is None


def test_a_branch_whose_trunk_has_lost_its_checkpoints_costs_its_whole_length(rows, tmp_path):
    trunk, branch = rows[:2]
    alone = replace(branch, parent=None, parent_step=None)
    assert [placed(trunk, tmp_path), placed(branch, tmp_path)] == [trunk, branch]
    finish(trunk, tmp_path)
    assert placed(branch, tmp_path) == alone
    lines, tokens = table(rows, tmp_path, OPTIONS), 442 * 512
    assert cells(lines[2])[4:] == ["-", f"{tokens * trunk.flops_per_token:.2e}", f"{(2 + tokens / 1000) / 60:.3g}", "missing"]
    assert "from scratch, for the checkpoints of their trunks are gone: a_bf16_t10_s1" in lines
    checkpoint(trunk, tmp_path, 354)
    assert placed(branch, tmp_path) == branch
    assert not any(line.startswith("from scratch") for line in table(rows, tmp_path, OPTIONS))
    shutil.rmtree(tmp_path / trunk.run / "checkpoints")
    finish(branch, tmp_path)        # it is done, as a branch: so it cost
    assert placed(branch, tmp_path) == branch
    finish(branch, tmp_path, parent_step=None)
    assert placed(branch, tmp_path) == alone


def test_a_branch_that_has_begun_goes_on_as_it_began(rows, tiny, tmp_path):
    trunk, branch = rows[:2]
    checkpoint(branch, tmp_path, 360)
    for start_from, is_branch in ((f"{tmp_path}/{trunk.run}/checkpoints/step_00000354", True), (None, False)):
        config = replace(tiny, steps=442, start_from=start_from).to_dict()
        (tmp_path / branch.run / "config.json").write_text(json.dumps(config))
        assert (placed(branch, tmp_path).parent is not None) == is_branch
    (tmp_path / branch.run / "config.json").write_text("{")     # train.py's to tell
    assert placed(branch, tmp_path) == branch
    assert state_of(branch, tmp_path) == "at step 360"
    assert tokens_left(branch, tmp_path) == 82 * 512


def test_what_is_unsaved(rows, tmp_path):
    trunk = rows[0]
    path = tmp_path / trunk.run / "metrics.jsonl"
    assert not has_unsaved(trunk, tmp_path)
    path.parent.mkdir()
    path.write_text('{"kind": "event", "step": 9}\n{"kind": "train", "ste')
    assert not has_unsaved(trunk, tmp_path)
    path.write_text('{"kind": "train", "step": 400}\n{"kind": "val", "step": 400}\n{"kind": "train", "ste')
    assert has_unsaved(trunk, tmp_path)
    checkpoint(trunk, tmp_path, 399)
    assert has_unsaved(trunk, tmp_path)
    checkpoint(trunk, tmp_path, 400)
    assert not has_unsaved(trunk, tmp_path)


def test_what_has_done_its_steps(rows, tmp_path):
    path = tmp_path / rows[0].run / "metrics.jsonl"
    assert not has_trained(rows[0], tmp_path)
    path.parent.mkdir()
    for last, told in ((883, False), (884, True)):
        path.write_text(f'{{"kind": "train", "step": {last}}}\n{{"kind": "val", "step": 884}}\n{{"kind": "train", "st')
        assert has_trained(rows[0], tmp_path) is told


@pytest.mark.parametrize("text, told", [
    ("[1]", "it holds a list"), ("{}", "status is None"), ("null", "it holds a NoneType"), ("{", "Expecting"),
    ("[" * 10**5, "recursion"),
    ('{"status": "ok", "loss_bf16": "2"}', "loss_bf16 is '2'"), ('{"status": "ok", "loss_bf16": NaN}', "loss_bf16 is nan"),
    ('{"status": "ok", "loss_bf16": 2, "tok_per_s_median": 0}', "tok_per_s_median is 0"),
    ('{"status": "ok", "loss_bf16": 2, "tok_per_s_median": 9.0, "n_gpu": true, "device": "X"}', "n_gpu is True"),
    ('{"status": "ok", "loss_bf16": 2, "tok_per_s_median": 9.0, "n_gpu": 1, "device": "X", "wall_s": -1}', "wall_s is -1"),
    ('{"status": "ok", "loss_bf16": 2, "tok_per_s_median": 9.0, "n_gpu": 1, "device": "X", "val_sha256": 3}', "val_sha256 is 3"),
])
def test_a_damaged_summary_is_no_finished_run(tiny, tmp_path, capsys, text, told):
    folder = tmp_path / "out/tiny/a_bf16_t20_s1"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(text)
    for more in ([], ["--run"]):
        assert sweep.main([str(tiny_study(tiny, tmp_path)), f"out={tmp_path}/out", *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"sweep.py: {folder}/summary.json is damaged (") and told in error
        assert error.endswith("delete it, and --run evaluates the last checkpoint again\n")
