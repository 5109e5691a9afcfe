"""scaling/plan.py: its inputs, its advice by hand, its sentences."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.config import load_config
from runtime.plan import ASSUMED_MFU
from runtime.plan import plan as train_plan
from scaling import plan
from scaling.budget import read_gap, read_law, tokens
from scaling.design import RHO
from scaling.pairs import EPOCH
from scaling.study import expand, load_study
from tests.conftest import ROOT
from tests.plan_cases import BUDGET, correlated, write_law
from tests.scaling_runs import write_run


def test_the_bound_on_the_speedup_is_train_pys(tmp_path):
    sizes, notes = plan.read_sizes(plan._parse(BUDGET))
    assert any("upper bound" in note for note in notes)
    for size in sizes:
        lines = "\n".join(train_plan(load_config(ROOT / f"configs/{size.name}_fp8.py"), "h100", torch.bfloat16, tmp_path))
        assert f"{size.speedup:.2f}x" in lines
        hours = float(re.search(r"  BF16 +([\d.]+) h", lines)[1])
        steps = load_config(ROOT / f"configs/{size.name}_bf16.py").total_tokens
        assert steps / tokens(size.N, sizes, 989.4e12 * 3600, False) == pytest.approx(hours, abs=0.051)


def output(capsys, *arguments, budget=BUDGET, code=0):
    assert plan.main([*budget, *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_own_law_brings_an_interval_and_knows_what_is_done(tmp_path, capsys):
    law = read_law(str(write_law(tmp_path)))
    loss, low, high = law.fit.interval_at(1.5e9, 30e9, new_run=True)
    assert low < EPOCH.loss(1.5e9, 30e9) < high and law.compute[1] == pytest.approx(6 * 350e6**2 * 40)
    out = output(capsys, f"law={tmp_path / 'law.json'}")
    assert "16 runs of 16 trajectories in bf16" in out and "16 runs done" in out
    assert re.search(r"BF16 .*2\.4\d+ \(2\.\d+ to 2\.\d+\)", out)
    assert "a wide prior" not in out and "gpt125m at 20 " not in out and "gpt760m at 20" in out


def test_branches_of_few_trunks_widen_the_interval_or_leave_none(tmp_path, capsys):
    alone = read_law(str(write_law(tmp_path))).fit.interval_at(1.5e9, 30e9)
    law = read_law(str(write_law(tmp_path, trunks=[f"trunk{i // 2}" for i in range(16)])))
    assert law.fit.interval == "cluster" and "16 runs of 8 trajectories" in law.note
    clustered = law.fit.interval_at(1.5e9, 30e9)
    assert clustered[2] - clustered[1] != pytest.approx(alone[2] - alone[1], rel=1e-3)
    law = read_law(str(write_law(tmp_path, trunks=[f"trunk{i // 8}" for i in range(16)])))
    assert law.fit is None and "no interval, because the law rests on single trajectories" in law.note
    out = output(capsys, f"law={tmp_path / 'law.json'}")
    assert re.search(r"BF16 .*2\.4\d+(   |$)", out, re.M) and " to 2." not in out and "no interval, because" in out


def test_a_law_that_does_not_reach_is_marked(tmp_path, capsys):
    out = output(capsys)
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("  gpt") and "%" in line}
    assert re.search(r"extrapolation: 17,222 tokens per parameter, the law's points have 0\.456 to 341$", rows["gpt50m"])
    assert "extrapolation" not in rows["gpt350m"] + rows["gpt1p5b"] and "beyond the sizes that speed is known for" in out
    out = output(capsys, f"law={write_law(tmp_path, sizes=(1e6, 2e6, 4e6, 8e6))}")
    assert re.search(r"gpt1p5b .*extrapolation: [\d.e+]+ times the law's largest compute", out)
    law = read_law(str(tmp_path / "law.json"))
    largest = 6 * 8e6**2 * 40
    assert law.beyond(8e6, 40 * 8e6) == "" and law.beyond(8e7, 10 * 3.2e7) == "10 times the law's largest compute"
    assert law.beyond(8e7, 99 * 3.2e7).startswith("99 times")
    assert law.beyond(101 * largest / 6 / 2e9, 2e9).startswith("extrapolation: 101 times")
    assert law.beyond(1e6, 121e6).startswith("extrapolation: 121 tokens per parameter") and law.beyond(1e6, 119e6) == ""
    assert law.beyond(1e4, 1e5).startswith("extrapolation: 0.0002 of the law's smallest compute")


def test_runs_of_another_world_say_nothing_of_the_target(tmp_path, capsys):
    """As out/demo: 33k to 131k parameters over bytes are no evidence for 1.5B, nor is FP8's gap there."""
    law = write_law(tmp_path, identified=False, sizes=(33e3, 74e3, 131e3, 200e3))
    measured = {"mean": 0.3, "low": 0.1, "high": 0.5}
    precision = {"common": {"tensorwise": {"bf16": measured}}, "sizes": [
        {"recipe": "tensorwise", "params_total": N} for N in (33_000, 131_000)] + [{"recipe": "rowwise", "params_total": 10**9}]}
    (tmp_path / "precision.json").write_text(json.dumps(precision))
    out = output(capsys, f"law={law}")
    assert "16 of the 16 runs done are left out, at 33k to 200k parameters" in out and "after 0 runs done" in out
    assert "at 33k to 131k parameters alone" in out and "FP8's losses count none" in out

    def losses(text):
        return re.findall(r"  gpt1p5b .*", text)[0]
    without = output(capsys)
    assert losses(out) == losses(without)
    advice = out[out.index("which extra run"):].splitlines()
    assert advice[3:] == without[without.index("which extra run"):].splitlines()[2:]
    changed = {key: 2 * getattr(EPOCH, key) for key in ("E", "A", "B")} | {"alpha": 0.5, "beta": 0.5, "identified": True, "n": 16}
    small = write_law(tmp_path, sizes=(33e3, 74e3, 131e3, 200e3), groups={"bf16": {"laws": {"chinchilla": changed}}})
    own = output(capsys, f"law={small}")        # a law of such runs alone does not judge the design either
    assert own[own.index("which extra run"):].splitlines()[3:] == advice[3:] and "so Epoch's law judges" in own
    precision["sizes"].append({"recipe": "tensorwise", "params_total": 123_587_328})
    (tmp_path / "precision.json").write_text(json.dumps(precision))
    assert "+0.300 % for tensorwise" in output(capsys, f"law={law}")
    # runs at a size that counts stay beside the others
    out = output(capsys, f"law={write_law(tmp_path, sizes=(33e3, 50e6, 125e6, 7e9))}")
    assert "8 of the 16 runs done are left out, at 33k to 7B parameters" in out and "after 8 runs done" in out


def test_an_unidentified_law_falls_back_and_says_so(tmp_path, capsys):
    out = output(capsys, f"law={write_law(tmp_path, identified=False)}")
    assert "identifies no L(N, D) (all points lie on one ray)" in out and "Besiroglu" in out
    assert "Besiroglu" in output(capsys)


def test_the_gap_is_given_or_measured_or_counted_as_none(tmp_path, capsys):
    law = write_law(tmp_path)
    assert read_gap(str(law), "tensorwise", 0.5)[0] == (0.005,) * 3
    assert read_gap(str(law), "tensorwise")[0] == (0, 0, 0) and "not measured" in read_gap(str(law), "tensorwise")[1]
    sizes = [{"recipe": recipe, "params_total": 10**8} for recipe in ("tensorwise", "rowwise")]
    (tmp_path / "precision.json").write_text(json.dumps({"sizes": sizes, "common": {
        "tensorwise": {"bf16": {"mean": 0.3, "low": 0.1, "high": 0.5}},
        "rowwise": {"bf16": {"mean": 0.2, "low": None, "high": None}}}}))
    assert read_gap(str(law), "tensorwise")[0] == pytest.approx((0.003, 0.001, 0.005))
    assert read_gap(str(law), "rowwise")[0] == pytest.approx((0.002,) * 3) and "one pair" in read_gap(str(law), "rowwise")[1]
    assert read_gap(None, "tensorwise")[0] == (0, 0, 0)

    def fp8_loss(text):
        return float(re.search(r"  FP8 +\S+ +\S+ +\S+ +(\S+)", text)[1])
    assert fp8_loss(output(capsys, "gap=0.5")) == pytest.approx(1.005 * fp8_loss(output(capsys, "gap=0")), abs=2e-4)


def test_the_level_gap_is_where_the_two_losses_meet(capsys):
    level = re.search(r"level with BF16 at a gap of (\S+) %", output(capsys))[1]
    out = output(capsys, f"gap={level}")
    losses = [float(re.search(rf"  {arm} +\S+ +\S+ +\S+ +(\S+)", out)[1]) for arm in ("BF16", "FP8")]
    assert losses[0] == pytest.approx(losses[1], abs=3e-4)


def test_measured_speed_counts_on_that_gpu_alone(tmp_path, capsys):
    N, flops = 123_587_328, 1e9
    for recipe, speed in (("bf16", 400e3), ("tensorwise", 500e3)):
        write_run(tmp_path / "here" / recipe, recipe=recipe, params=N, device="NVIDIA H100 80GB HBM3", tok_per_s_median=speed,
                  flops_per_token=flops, n_gpu=2, curve=False)
        write_run(tmp_path / "here" / f"{recipe}_null", recipe=recipe, params=N, device="NVIDIA H100 80GB HBM3", curve=False,
                  tok_per_s_median=speed / 3, flops_per_token=flops, n_gpu=2, repeat=1)     # not compiled
        write_run(tmp_path / "there" / recipe, recipe=recipe, params=N, device="NVIDIA H200", curve=False)      # equal peaks
    sizes, notes = plan.read_sizes(plan._parse([*BUDGET, f"runs={tmp_path / 'here'}"]))
    assert {round(size.mfu, 6) for size in sizes} == {round(400e3 * flops / (2 * 989.4e12), 6)}
    assert {round(size.speedup, 9) for size in sizes} == {1.25}
    assert "measured, tensorwise against bf16 at 1 size" in " ".join(notes)
    sizes, notes = plan.read_sizes(plan._parse([*BUDGET, f"runs={tmp_path / 'there'}"]))
    assert {size.mfu for size in sizes} == {ASSUMED_MFU}
    assert "say nothing of a h100" in " ".join(notes) and "assumed" in " ".join(notes)


def test_a_gpu_without_fp8_gets_bf16_alone(capsys):
    assert plan.main(["gpus=1", "hours=5", "gpu=a100"]) == 0
    out = capsys.readouterr().out
    assert "has no FP8 matmuls" in out and "break-even" not in out


STUDY = ROOT / "configs/study_chinchilla.py"


def study_rows():
    return [row for row in expand(load_study(STUDY)) if row.recipe == "bf16" and not row.held_out]


def test_a_study_gives_trajectories_a_branch_never_without_its_trunk():
    sizes, _ = plan.read_sizes(plan._parse(BUDGET))
    law, rows = read_law(None), study_rows()
    found, smallest = plan._candidates(law, sizes, {"study": STUDY}, sizes[-1])
    trunks = {row.run: row for row in rows if row.parent is None}
    assert {one.cluster for one in found} == set(trunks) and len(found) == 10 and smallest == sizes[0].N
    for one in found:
        assert len(one.D) == 4 and one.name == f"{one.cluster} with 3 branches"
        assert one.flops == pytest.approx(trunks[one.cluster].flops * (1 + 0.2 * 35 / 40), rel=0.01)
    # the trunk done with one of its branches: the others alone, at their own cost
    done = {"gpt350m_bf16_t40_s1337", "gpt350m_bf16_t20_s1337"} | {row.run for row in rows if row.size == "gpt50m"}
    found, smallest = plan._candidates(replace(law, names=tuple(done)), sizes, {"study": STUDY}, sizes[-1])
    one = next(one for one in found if one.cluster == "gpt350m_bf16_t40_s1337")
    assert one.name == "2 branches of gpt350m_bf16_t40_s1337"
    assert one.flops == pytest.approx(trunks[one.cluster].flops * 0.2 * 15 / 40, rel=0.01)
    assert len(found) == 7 and smallest == sizes[0].N
    assert not plan._candidates(replace(law, names=tuple(row.run for row in rows)), sizes, {"study": STUDY}, sizes[-1])[0]


def test_a_repeat_is_no_candidate(tmp_path):
    (tmp_path / "study.py").write_text(
        "from scaling.study import Size, Study\nstudy = Study(name='s', margin_percent=1.0, tokens_per_param=(10, 20), "
        "null=('parallel.compile=false',), sizes=(Size(config='configs/gpt50m_bf16.py', null_seeds=(1337,)),))\n")
    sizes, _ = plan.read_sizes(plan._parse(BUDGET))
    found, _ = plan._candidates(read_law(None), sizes, {"study": tmp_path / "study.py"}, sizes[-1])
    assert [one.cluster for one in found] == ["gpt50m_bf16_t20_s1337"]


def test_the_advice_knows_the_trunks_that_are_done(tmp_path, capsys):
    rows = [row for row in study_rows() if row.seed == 1337]
    inputs = [{"recipe": "bf16", "run_id": row.run, "trunk": row.parent or row.run, "N": row.params_total, "D": row.tokens,
               "loss": EPOCH.loss(row.params_total, row.tokens)} for row in rows if row.run != "gpt250m_bf16_t10_s1337"]
    out = output(capsys, f"law={write_law(tmp_path, identified=False, inputs=inputs)}", f"study={STUDY}")
    N, D = (np.array([one[key] for one in inputs], dtype=float) for key in ("N", "D"))
    target = (1_541_785_600, 20 * 1_541_785_600)
    now = correlated(EPOCH, N, D, [one["trunk"] for one in inputs], target, RHO)
    left = next(row for row in rows if row.run == "gpt250m_bf16_t10_s1337")
    after = correlated(EPOCH, [*N, left.params_total], [*D, left.tokens], [one["trunk"] for one in inputs] + [left.parent],
                       target, RHO)
    assert f"{100 * now:.2f} % after 15 runs done; " in out and "7 candidates too, 2 of them further seeds" in out
    line = re.search(r"  1 branch of gpt250m_bf16_t40_s1337 +(\S+) +(\S+) +(\S+) +(\S+)$", out, re.M)
    assert float(line[1]) == pytest.approx(100 * after, abs=0.006)
    assert float(line[2]) == pytest.approx(100 * (after - now), abs=0.0006)
    assert float(line[3]) == pytest.approx(left.own_flops / (989.4e12 * ASSUMED_MFU * 3600), abs=0.051)


def test_columns_have_headings_and_the_winners_are_among_the_rows(capsys):
    out = output(capsys)
    table = out[out.index("which extra run"):].splitlines()
    head = next(i for i, line in enumerate(table) if line.endswith("points per GPU-hour"))
    assert table[head].split("  ")[1] == "run"
    assert all(text in table[head] for text in ("standard error after [%]", "change [points]", "GPU-hours"))
    rows = [re.split(r" {2,}", line.strip()) for line in table[head + 1:-2]]
    assert len(rows) in (plan.SHOWN, plan.SHOWN + 1) and {len(row) for row in rows} == {5}
    for _, _, change, hours, rate in rows:
        assert float(rate) == pytest.approx(float(change) / float(hours), rel=0.5 if float(hours) < 1 else 0.05)
    most, hourly = re.search(r"most in all: (.*); most per GPU-hour: (.*)$", table[-1]).groups()
    assert rows[0][0] == most == min(rows, key=lambda row: float(row[1]))[0]
    assert hourly == min(rows, key=lambda row: float(row[4]))[0]
    assert "points" in plan.__doc__


@pytest.mark.parametrize("arguments, sentence", [
    (["hours=0"], "hours=0 must be above 0"), (["hours=nan"], "must be a number"), (["gpus=1.5"], "whole number"),
    (["gpus=0"], "at least 1"),
    (["gpu=h10"], "not in runtime/log.py"), (["hors=3"], "did you mean hours?"), (["--law"], "lacks its value"),
    (["law=nowhere.json"], "law=nowhere.json is not there: give the law.json"),
    (["law=configs"], "law=configs is a folder: give the law.json"),
    (["--gpu", "a100", "gpu=h100"], "gpu is given twice"), (["--gpus", "--gap", "1"], "gpus lacks its value"),
    (["hours=1e300"], "must lie between 1e+15 and 1e+32"), (["hours=1e-9"], "must lie between"), (["gpus=1e306"], "must lie"),
    (["--law", "--gap", "1"], "law lacks its value"), (["law="], "law lacks its value"),
    (["study=configs/study_demo.py"], "another vocabulary"), (["recipe=fp9"], "must be one of tensorwise"),
    (["gap=700"], "in per cent"),
    (["runs=nowhere"], "does not exist"), (["study=configs/study_chinchila.py"], "did you mean"),
])
def test_mistakes_are_told_in_a_sentence(capsys, monkeypatch, arguments, sentence):
    monkeypatch.chdir(ROOT)
    key = arguments[0].split("=")[0].removeprefix("--")
    said = output(capsys, *arguments, budget=[one for one in BUDGET if not one.startswith(key + "=")], code=2)
    assert sentence in said and said.startswith("scaling/plan.py: ") and "Traceback" not in said
    assert plan.main(["gpus=8", "hours=2"]) == 2 and "gpu= is missing" in capsys.readouterr().err
