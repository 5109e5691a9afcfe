"""The planner: optimum against closed forms and brute force, break-even gaps against published numbers, advice by hand."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from runtime.config import load_config
from runtime.plan import ASSUMED_MFU
from scaling import plan
from scaling.budget import Size, break_even, optimum, read_gap, read_law, tokens
from scaling.chinchilla import fit_chinchilla
from scaling.design import PRIOR_SD, Candidate, bound, gradient, rank
from scaling.published import EPOCH, HOFFMANN
from scaling.records import RecordError
from tests.conftest import ROOT
from tests.scaling_runs import write_run
from train import plan as train_plan

BUDGET = ["gpus=8", "hours=24", "gpu=h100"]
PLAIN = [Size(str(N), int(N), 6 * N, 0.5, 1.25) for N in (1e8, 1e9, 1e10)]      # 6 N a token, one speed for all sizes


def ladder(sizes, ratios):
    N = np.repeat(np.array(sizes, dtype=float), len(ratios))
    return N, N * np.tile(ratios, len(sizes))


# ---------------------------------------------------------------------------------------------------------- the optimum


@pytest.mark.parametrize("law", [EPOCH, HOFFMANN], ids=lambda law: law.name)
@pytest.mark.parametrize("flops", [1e19, 1e21, 1e23])
def test_the_optimum_is_chinchillas_where_a_token_costs_6n(law, flops):
    N, D = optimum(law, PLAIN, flops, in_fp8=False)
    a = law.beta / (law.alpha + law.beta)           # Hoffmann et al. 2022, section 3.3
    G = (law.alpha * law.A / (law.beta * law.B)) ** (1 / (law.alpha + law.beta))
    assert pytest.approx(G * (0.5 * flops / 6) ** a, rel=1e-4) == N
    assert pytest.approx(0.5 * flops / (6 * N), rel=1e-6) == D


@pytest.mark.parametrize("in_fp8", [False, True])
def test_the_optimum_is_the_best_of_a_fine_grid_with_real_sizes(in_fp8):
    sizes, _ = plan.read_sizes(plan._parse(BUDGET))
    flops = 8 * 989.4e12 * 24 * 3600
    N, D = optimum(EPOCH, sizes, flops, in_fp8)
    grid = np.exp(np.linspace(np.log(1e8), np.log(2e10), 200_001))
    losses = EPOCH.loss(grid, tokens(grid, sizes, flops, in_fp8))
    assert EPOCH.loss(N, D) <= losses.min() + 1e-9
    assert pytest.approx(grid[losses.argmin()], rel=1e-3) == N


def test_fp8_is_a_larger_budget_where_its_speedup_is_the_same_for_all_sizes():
    assert optimum(EPOCH, PLAIN, 1e21, in_fp8=True) == pytest.approx(optimum(EPOCH, PLAIN, 1.25e21, in_fp8=False), rel=1e-6)


def test_tokens_at_a_size_are_flops_over_its_own_count():
    sizes = [Size("a", 10**8, 8.5e8, 0.3, 1.1), Size("b", 10**9, 7e9, 0.5, 1.3)]
    assert tokens(1e8, sizes, 1e20, False) == pytest.approx(1e20 * 0.3 / 8.5e8)
    assert tokens(1e9, sizes, 1e20, True) == pytest.approx(1e20 * 0.5 * 1.3 / 7e9)
    assert tokens(8e9, sizes, 1e20, False) == pytest.approx(1e20 * 0.5 / (8e9 * 6.5))       # attention 1 -> 1 / 8^(1/3)


@pytest.mark.parametrize("speedup, gap", [(1.10, 0.43), (1.17, 0.70), (1.28, 1.09)])
def test_break_even_gaps_at_the_target(speedup, gap):
    N = 1_541_785_600
    found = break_even(EPOCH, N, 20 * N, speedup)
    assert round(100 * found, 2) == gap
    # the other way round: at that gap, FP8 needs all of its extra tokens to make it up
    nats = found * EPOCH.loss(N, 20 * N * speedup)
    assert EPOCH.extra_tokens(nats, 20 * N) == pytest.approx(speedup, rel=1e-6)


def test_the_bound_on_the_speedup_is_train_pys(capsys):
    sizes, notes = plan.read_sizes(plan._parse(BUDGET))
    assert any("upper bound" in note for note in notes)
    for size in sizes:
        lines = "\n".join(train_plan(load_config(ROOT / f"configs/{size.name}_fp8.py"), "h100"))
        assert f"{size.speedup:.2f}x" in lines
        hours = float(re.search(r"  BF16 +([\d.]+) h", lines)[1])
        steps = load_config(ROOT / f"configs/{size.name}_bf16.py").total_tokens
        assert steps / tokens(size.N, sizes, 989.4e12 * 3600, False) == pytest.approx(hours, abs=0.051)


# ------------------------------------------------------------------------------------------------------------ the design


@pytest.mark.parametrize("sizes, ratios, alpha, beta, a, prediction", [
    ((125e6, 250e6, 350e6), (10, 20), .120, .033, .096, 1.24),
    ((125e6, 250e6, 350e6), (5, 10, 20), .097, .013, .072, 1.04),
    ((125e6, 250e6, 350e6), (5, 10, 20, 40), .081, .008, .059, .88),
    ((60e6, 125e6, 250e6, 350e6), (5, 10, 20, 40), .022, .005, .017, .33),
    ((125e6, 250e6, 350e6, 1.5e9), (5, 10, 20), .018, .008, .017, .08),
])
def test_cramer_rao_bounds_as_computed_elsewhere(sizes, ratios, alpha, beta, a, prediction):
    found = bound(EPOCH, *ladder(sizes, ratios), (1.5e9, 30e9))
    for mine, theirs, rounding in ((found.alpha, alpha, 6e-4), (found.beta, beta, 1e-3), (found.a, a, 6e-4),
                                   (100 * found.prediction, prediction, 6e-3)):
        assert mine == pytest.approx(theirs, abs=rounding)


def test_one_ray_identifies_nothing():
    assert bound(EPOCH, *ladder((60e6, 125e6, 250e6, 350e6, 1e9), (20,)), (1.5e9, 30e9)) is None
    assert bound(EPOCH, [], [], (1.5e9, 30e9)) is None


def test_the_gradient_is_that_of_the_law():
    """Central differences of ln L in each parameter, the factors' held at the target."""
    N, D, target, h = *ladder((6e7, 3.5e8), (5, 40)), (1.5e9, 3e10), 1e-6
    for i, name in enumerate(("E", "A", "B", "alpha", "beta")):
        def moved(step, name=name):
            law = replace(EPOCH, **{name: getattr(EPOCH, name) * np.exp(step) if name in "EAB" else getattr(EPOCH, name) + step})
            if name == "alpha":
                law = replace(law, A=law.A * target[0]**step)
            if name == "beta":
                law = replace(law, B=law.B * target[1]**step)
            return np.log(law.loss(N, D))
        assert gradient(EPOCH, N, D, target)[:, i] == pytest.approx((moved(h) - moved(-h)) / (2 * h), rel=1e-6, abs=1e-9)


def test_the_bound_is_the_spread_of_real_fits():
    """Fits of noisy ladders scatter as the bound says (Huber's loss costs a little more than least squares)."""
    N, D = ladder((50e6, 125e6, 350e6, 1e9), (5, 20, 80))
    target, rng = (3e9, 6e10), np.random.default_rng(0)
    found = [float(np.log(fit_chinchilla(N, D, EPOCH.loss(N, D) * np.exp(rng.normal(0, 1e-3, len(N)))).predict(*target)))
             for _ in range(40)]
    assert 0.7 < np.std(found) / bound(EPOCH, N, D, target).prediction < 1.6


def test_ranking_is_by_brute_force_and_the_prior_only_where_needed():
    done, target = ladder((60e6, 125e6, 250e6), (5, 10, 20)), (1.5e9, 30e9)
    candidates = [Candidate(f"{N:g} {ratio}", N, N * ratio, 6 * N * N * ratio) for N in (60e6, 350e6) for ratio in (20, 40)]
    now, prior, ranked = rank(EPOCH, *done, candidates, target)
    assert not prior and now == bound(EPOCH, *done, target)
    by_hand = {one.name: bound(EPOCH, np.append(done[0], one.N), np.append(done[1], one.D), target).prediction
               for one in candidates}
    assert [one.name for one, _ in ranked] == sorted(by_hand, key=by_hand.get) and ranked[0][0].N == 350e6
    for one, after in ranked:
        assert after.prediction == pytest.approx(by_hand[one.name], rel=1e-6)
        assert after.prediction <= now.prediction
    empty, prior, _ = rank(EPOCH, [], [], candidates, target)
    weights = np.array([EPOCH.E, EPOCH.A * target[0]**-EPOCH.alpha, EPOCH.B * target[1]**-EPOCH.beta]) / EPOCH.loss(*target)
    assert prior and empty.prediction == pytest.approx(np.linalg.norm(weights * PRIOR_SD[:3]))


# ------------------------------------------------------------------------------------------------------------ the inputs


def write_law(folder, identified=True, runs=True, **changes):
    N, D = ladder((50e6, 125e6, 250e6, 350e6), (5, 10, 20, 40))
    loss = EPOCH.loss(N, D) * np.exp(np.random.default_rng(1).normal(0, 5e-4, len(N)))
    said = {"identified": identified, "reason": None if identified else "all points lie on one ray", "n": len(N),
            **{key: getattr(EPOCH, key) for key in ("E", "A", "B", "alpha", "beta")}}
    inputs = [{"recipe": "bf16", "N": n, "D": d, "loss": one} for n, d, one in zip(N, D, loss, strict=True)]
    content = {"groups": {"bf16": {"laws": {"chinchilla": said}}}, "inputs": inputs} if runs else {"laws": {"chinchilla": said}}
    path = folder / "law.json"
    path.write_text(json.dumps(content | changes))
    return path


def output(capsys, *arguments, code=0):
    assert plan.main([*BUDGET, *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_own_law_brings_an_interval_and_knows_what_is_done(tmp_path, capsys):
    law = read_law(str(write_law(tmp_path)))
    loss, low, high = law.fit.interval_at(1.5e9, 30e9, new_run=True)
    assert low < EPOCH.loss(1.5e9, 30e9) < high and law.largest == pytest.approx(6 * 350e6**2 * 40)
    out = output(capsys, f"law={tmp_path / 'law.json'}")
    assert "16 runs in bf16" in out and re.search(r"BF16 .*2\.4\d+ \(2\.\d+ to 2\.\d+\)", out) and "16 BF16 runs done" in out
    assert "a wide prior" not in out and "gpt125m at 20 " not in out and "gpt760m at 20" in out


def test_a_table_of_points_brings_no_interval(tmp_path):
    law = read_law(str(write_law(tmp_path, runs=False)))
    assert law.fit is None and law.surface.alpha == EPOCH.alpha and "no interval" in law.note


def test_an_unidentified_law_falls_back_and_says_so(tmp_path, capsys):
    out = output(capsys, f"law={write_law(tmp_path, identified=False)}")
    assert "identifies no L(N, D) (all points lie on one ray)" in out and "Besiroglu" in out
    assert "Besiroglu" in output(capsys)


def test_the_gap_is_given_or_measured_or_counted_as_none(tmp_path, capsys):
    law = write_law(tmp_path)
    assert read_gap(str(law), "tensorwise", 0.5)[0] == (0.005,) * 3
    assert read_gap(str(law), "tensorwise")[0] == (0, 0, 0) and "not measured" in read_gap(str(law), "tensorwise")[1]
    (tmp_path / "precision.json").write_text(json.dumps({"common": {
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


def test_a_study_gives_the_candidates_branches_at_their_own_cost(capsys):
    sizes, _ = plan.read_sizes(plan._parse(BUDGET))
    rows = plan._candidates(sizes, {"study": ROOT / "configs/study_chinchilla.py"}, sizes[-1])
    assert all(one.N < sizes[-1].N for one in rows) and len({(one.N, one.D) for one in rows}) == len(rows)
    trunk = next(one for one in rows if one.name.startswith("gpt350m") and "_t40_" in one.name)
    branch = next(one for one in rows if one.name.startswith("gpt350m") and "_t20_" in one.name)
    assert branch.name.endswith("(branch)") and branch.flops == pytest.approx(0.2 * trunk.flops / 2, rel=0.01)


@pytest.mark.parametrize("arguments, sentence", [
    (["hours=0"], "hours=0 must be above 0"), (["hours=nan"], "must be a number"), (["gpus=1.5"], "whole number"),
    (["gpus=0"], "at least 1"),
    (["gpu=h10"], "not in runtime/metrics.py"), (["hors=3"], "did you mean hours?"), (["--law"], "lacks its value"),
    (["law=nowhere.json"], "cannot be read"), (["recipe=fp9"], "must be one of tensorwise"), (["gap=700"], "in per cent"),
    (["runs=nowhere"], "does not exist"), (["study=configs/study_chinchila.py"], "did you mean"),
])
def test_mistakes_are_told_in_a_sentence(capsys, monkeypatch, arguments, sentence):
    monkeypatch.chdir(ROOT)
    said = output(capsys, *arguments, code=2)
    assert sentence in said and said.startswith("scaling/plan.py: ") and "Traceback" not in said
    assert plan.main(["gpus=8", "hours=2"]) == 2 and "gpu= is missing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[1]", '{"groups": {"bf16": {}}}', '{"laws": {"chinchilla": {"identified": true, "n": 3}}}',
                                  '{"groups": [], "inputs": 3}', '{"laws": {"chinchilla": {"identified"'])
def test_a_damaged_law_is_refused(tmp_path, text):
    path = tmp_path / "law.json"
    path.write_text(text)
    with pytest.raises(RecordError, match="law.json"):
        read_law(str(path))


def test_a_damaged_precision_json_is_refused(tmp_path):
    (tmp_path / "precision.json").write_text('{"common": {"tensorwise": {"bf16": {}}}}')
    with pytest.raises(RecordError, match="precision.json"):
        read_gap(str(tmp_path / "law.json"), "tensorwise")
