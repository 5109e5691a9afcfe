"""scaling/plan.py: what a budget buys and which run to add, against closed forms, brute force, the whole covariance matrix."""

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.cli import UserError, read_options
from runtime.config import load_config
from runtime.plan import ASSUMED_MFU
from runtime.plan import plan as train_plan
from scaling import plan
from scaling.pairs import EPOCH, HOFFMANN
from scaling.plan import (
    EPOCH_COMPUTE,
    EPOCH_RATIO,
    PRIOR_SD,
    RHO,
    Candidate,
    Options,
    Size,
    bound,
    break_even,
    gradient,
    narrowing,
    optimum,
    read_gap,
    read_law,
    tokens,
)
from scaling.study import expand, load_study
from tests.conftest import ROOT
from tests.scaling_runs import write_run

BUDGET = ["gpus=8", "hours=24", "gpu=h100"]
PLAIN = [Size(str(N), int(N), 6 * N, 0.5, 1.25) for N in (1e8, 1e9, 1e10)]      # 6 N a token, one speed for all sizes
STUDY = ROOT / "configs/study_chinchilla.py"


def sizes_of(*more):
    return plan.read_sizes(read_options(Options, [*BUDGET, *more]))


def ladder(sizes, ratios):
    N = np.repeat(np.array(sizes, dtype=float), len(ratios))
    return N, N * np.tile(ratios, len(sizes))


def correlated(law, N, D, clusters, target, rho, sigma=1e-3, prior=False):
    """The bound's prediction by the whole covariance matrix, in other terms than plan.py's: values, not logarithms."""
    V = sigma**2 * np.where(np.equal.outer(clusters, clusters), np.where(np.eye(len(N)), 1.0, rho), 0.0)
    jacobian = gradient(law, N, D, target)
    information = jacobian.T @ np.linalg.solve(V, jacobian) + (np.diag(PRIOR_SD**-2) if prior else 0)
    here = gradient(law, *target, target)[0]
    return float(np.sqrt(here @ np.linalg.solve(information, here)))


def write_law(folder, identified=True, runs=True, sizes=(50e6, 125e6, 250e6, 350e6), trunks=None, **changes):
    N, D = ladder(sizes, (5, 10, 20, 40))
    loss = EPOCH.loss(N, D) * np.exp(np.random.default_rng(1).normal(0, 5e-4, len(N)))
    said = {"identified": identified, "reason": None if identified else "all points lie on one ray", "n": len(N),
            **{key: getattr(EPOCH, key) for key in ("E", "A", "B", "alpha", "beta")}}
    trunks = trunks or [f"run{i}" for i in range(len(N))]
    inputs = [{"recipe": "bf16", "run_id": f"run{i}", "trunk": trunk, "N": n, "D": d, "loss": one}
              for i, (trunk, n, d, one) in enumerate(zip(trunks, N, D, loss, strict=True))]
    content = {"groups": {"bf16": {"laws": {"chinchilla": said}}}, "inputs": inputs} if runs else {"laws": {"chinchilla": said}}
    path = folder / "law.json"
    path.write_text(json.dumps(content | changes))
    return path


def output(capsys, *arguments, budget=BUDGET, code=0):
    assert plan.main([*budget, *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    return err if code else out


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
    sizes, _ = sizes_of()
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


def test_the_bound_on_the_speedup_is_train_pys(tmp_path):
    sizes, notes = sizes_of()
    assert any("upper bound" in note for note in notes)
    for size in sizes:
        lines = "\n".join(train_plan(load_config(ROOT / f"configs/{size.name}_fp8.py"), "h100", torch.bfloat16, tmp_path))
        assert f"{size.speedup:.2f}x" in lines
        hours = float(re.search(r"  BF16 +([\d.]+) h", lines)[1])
        steps = load_config(ROOT / f"configs/{size.name}_bf16.py").total_tokens
        assert steps / tokens(size.N, sizes, 989.4e12 * 3600, False) == pytest.approx(hours, abs=0.051)


def test_own_law_brings_an_interval_and_knows_what_is_done(tmp_path, capsys):
    points = read_law(str(write_law(tmp_path, runs=False)))
    assert points.fit is None and points.surface.alpha == EPOCH.alpha and "neither an interval" in points.note
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

    def fp8_interval(*more):
        row = next(line for line in output(capsys, f"law={law}", *more).splitlines() if line.startswith("  gpt1p5b"))
        return [float(end) for end in re.findall(r"\((\S+) to (\S+)\)", row)[1]]
    low, high = fp8_interval("gap=0")
    assert fp8_interval() == pytest.approx([low * 1.001, high * 1.005], abs=1e-4)

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
    sizes, notes = sizes_of(f"runs={tmp_path / 'here'}")
    assert {round(size.mfu, 6) for size in sizes} == {round(400e3 * flops / (2 * 989.4e12), 6)}
    assert {round(size.speedup, 9) for size in sizes} == {1.25}
    assert "measured, tensorwise against bf16 at 1 size" in " ".join(notes)
    sizes, notes = sizes_of(f"runs={tmp_path / 'there'}")
    assert {size.mfu for size in sizes} == {ASSUMED_MFU}
    assert "say nothing of a h100" in " ".join(notes) and "assumed" in " ".join(notes)


def test_a_gpu_without_fp8_gets_bf16_alone(capsys):
    assert plan.main(["gpus=1", "hours=5", "gpu=a100"]) == 0
    out = capsys.readouterr().out
    assert "has no FP8 matmuls" in out and "break-even" not in out


def test_the_published_range_is_that_of_the_points():
    path = ROOT.parent / "shared" / "reference" / "chinchilla_points.csv"
    if not path.exists():
        pytest.skip(f"{path} is absent: the range of the published law's points cannot be checked")
    rows = [tuple(float(row[key]) for key in ("loss", "Model Size", "Training FLOP"))
            for row in csv.DictReader(path.read_text().splitlines())]
    kept = [row for row in rows if row[0] < sorted(one[0] for one in rows)[-5]]
    ratios = [C / (6 * N**2) for _, N, C in kept]
    assert len(kept) == 240 and (min(ratios), max(ratios)) == pytest.approx(EPOCH_RATIO, rel=1e-3)
    assert (min(row[2] for row in kept), max(row[2] for row in kept)) == pytest.approx(EPOCH_COMPUTE, rel=1e-3)


@pytest.mark.parametrize("name, text", [
    ("law", ""), ("law", "[1]"), ("law", '{"groups": {"bf16": {}}}'), ("law", '{"laws": {"chinchilla": {"identified": true}}}'),
    ("law", '{"groups": [], "inputs": 3}'), ("precision", '{"common": {"tensorwise": {"bf16": {}}}}')])
def test_damaged_files_are_refused(tmp_path, name, text):
    (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(UserError, match=f"{name}.json"):
        read_law(str(tmp_path / "law.json")) if name == "law" else read_gap(str(tmp_path / "law.json"), "tensorwise")


@pytest.mark.parametrize("sizes, ratios, prediction", [
    ((125e6, 250e6, 350e6), (10, 20), 1.24), ((125e6, 250e6, 350e6), (5, 10, 20), 1.04),
    ((125e6, 250e6, 350e6), (5, 10, 20, 40), .88), ((60e6, 125e6, 250e6, 350e6), (5, 10, 20, 40), .33),
    ((125e6, 250e6, 350e6, 1.5e9), (5, 10, 20), .08)])
def test_cramer_rao_bounds_as_computed_elsewhere(sizes, ratios, prediction):
    assert 100 * bound(EPOCH, *ladder(sizes, ratios), (1.5e9, 30e9)) == pytest.approx(prediction, abs=6e-3)


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


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9])
def test_points_of_one_trunk_share_their_noise(rho):
    N, D = ladder((60e6, 125e6, 250e6, 350e6), (5, 10, 20, 40))
    clusters, target = np.array([*np.repeat(list("abc"), 4), "d", "d", "e", "f"]), (1.5e9, 30e9)
    found = bound(EPOCH, N, D, target, clusters=clusters, rho=rho)
    assert found == pytest.approx(correlated(EPOCH, N, D, clusters, target, rho), rel=1e-6)
    alone = bound(EPOCH, N, D, target)
    assert bound(EPOCH, N, D, target, clusters=range(16), rho=rho) == pytest.approx(alone, rel=1e-9)
    if rho:
        assert found > 1.1 * alone


def test_generalised_least_squares_on_shared_luck_scatters_as_the_bound_says():
    """Ladders whose trunks have luck of their own: what GLS of ln L on the law's gradient finds, 4,000 times."""
    N, D = ladder((50e6, 125e6, 350e6, 1e9), (5, 20, 80))
    clusters, target, rng = np.repeat(np.arange(4), 3), (3e9, 6e10), np.random.default_rng(0)
    noise = 1e-3 * (np.sqrt(RHO) * rng.normal(size=(4000, 4))[:, clusters] + np.sqrt(1 - RHO) * rng.normal(size=(4000, 12)))
    jacobian, V = gradient(EPOCH, N, D, target), np.where(np.equal.outer(clusters, clusters), RHO, 0) + (1 - RHO) * np.eye(12)
    weights = np.linalg.solve(jacobian.T @ np.linalg.solve(V, jacobian), jacobian.T @ np.linalg.inv(V))
    spread = np.std(noise @ weights.T @ gradient(EPOCH, *target, target)[0])
    assert bound(EPOCH, N, D, target, clusters=clusters) == pytest.approx(spread, rel=0.04)


def test_candidates_narrow_as_by_brute_force_and_the_prior_only_where_needed():
    done, target = ladder((60e6, 125e6, 250e6), (5, 10, 20)), (1.5e9, 30e9)
    trunks = [*"aaabbbccc"]
    a, own, d = candidates = [Candidate("a", 60e6, (60e6 * 40,), 1e18, "a"), Candidate("own", 60e6, (60e6 * 40,), 1e18, "own"),
                              Candidate("d", 350e6, tuple(350e6 * np.array([5.0, 10, 20, 40])), 1e19, "d")]
    after, prior = narrowing(EPOCH, *done, trunks, target)
    assert not prior and after([]) == pytest.approx(correlated(EPOCH, *done, trunks, target, RHO), rel=1e-6)
    for one in candidates:
        by_hand = correlated(EPOCH, np.append(done[0], [one.N] * len(one.D)), np.append(done[1], one.D),
                             trunks + [one.cluster] * len(one.D), target, RHO)
        assert after([one]) == pytest.approx(by_hand, rel=1e-6) and after(candidates) <= after([one]) <= after([])
    assert after([a]) != pytest.approx(after([own]), rel=1e-3)      # a branch of what is done is no run of its own
    after, prior = narrowing(EPOCH, [], [], [], target)
    weights = np.array([EPOCH.E, EPOCH.A * target[0]**-EPOCH.alpha, EPOCH.B * target[1]**-EPOCH.beta]) / EPOCH.loss(*target)
    assert prior and after([]) == pytest.approx(np.linalg.norm(weights * PRIOR_SD[:3]))
    assert after([d]) == pytest.approx(correlated(EPOCH, np.full(4, d.N), np.array(d.D), ["d"] * 4, target, RHO, prior=True),
                                       rel=1e-6)


def test_the_study_says_what_the_bound_says():
    """The numbers in configs/study_chinchilla.py's docstring."""
    rows = study_rows()
    target = next((row.params_total, row.tokens) for row in expand(load_study(STUDY)) if row.held_out)

    def least(mine):
        N, D = (np.array([getattr(row, key) for row in mine], dtype=float) for key in ("params_total", "tokens"))
        return f"{100 * correlated(EPOCH, N, D, [row.parent or row.run for row in mine], target, RHO):.2f} %"
    few = least([row for row in rows if row.seed == 1337 and row.tokens_per_param in (10, 20) and row.size != "gpt50m"])
    text = " ".join(STUDY.read_text().split('"""')[1].split())
    assert f"at least {few} of the loss per 0.1 % of noise" in text
    assert f"that to {least([row for row in rows if row.seed == 1337])}, the further seeds to {least(rows)}" in text


def study_rows():
    return [row for row in expand(load_study(STUDY)) if row.recipe == "bf16" and not row.held_out]


def test_a_study_gives_trajectories_a_branch_never_without_its_trunk():
    sizes, _ = sizes_of()
    law, rows = read_law(None), study_rows()
    found, smallest = plan._candidates(law, sizes, STUDY, sizes[-1])
    trunks = {row.run: row for row in rows if row.parent is None}
    assert {one.cluster for one in found} == set(trunks) and len(found) == 10 and smallest == sizes[0].N
    for one in found:
        assert len(one.D) == 4 and one.name == f"{one.cluster} with 3 branches"
        assert one.flops == pytest.approx(trunks[one.cluster].flops * (1 + 0.2 * 35 / 40), rel=0.01)
    # the trunk done with one of its branches: the others alone, at their own cost
    done = {"gpt350m_bf16_t40_s1337", "gpt350m_bf16_t20_s1337"} | {row.run for row in rows if row.size == "gpt50m"}
    found, smallest = plan._candidates(replace(law, names=tuple(done)), sizes, STUDY, sizes[-1])
    one = next(one for one in found if one.cluster == "gpt350m_bf16_t40_s1337")
    assert one.name == "2 branches of gpt350m_bf16_t40_s1337"
    assert one.flops == pytest.approx(trunks[one.cluster].flops * 0.2 * 15 / 40, rel=0.01)
    assert len(found) == 7 and smallest == sizes[0].N
    assert not plan._candidates(replace(law, names=tuple(row.run for row in rows)), sizes, STUDY, sizes[-1])[0]


def test_a_repeat_is_no_candidate(tmp_path):
    (tmp_path / "study.py").write_text(
        "from scaling.study import Size, Study\nstudy = Study(name='s', margin_percent=1.0, tokens_per_param=(10, 20), "
        "null=('parallel.compile=false',), sizes=(Size(config='configs/gpt50m_bf16.py', null_seeds=(1337,)),))\n")
    sizes, _ = sizes_of()
    found, _ = plan._candidates(read_law(None), sizes, tmp_path / "study.py", sizes[-1])
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


def test_the_winners_are_among_the_rows(capsys):
    table = output(capsys).partition("which extra run")[2].splitlines()
    rows = [re.split(r" {2,}", line.strip()) for line in table if re.match(r"  gpt\S+ at ", line)]
    assert len(rows) in (plan.SHOWN, plan.SHOWN + 1)
    for _, _, change, hours, rate in rows:
        assert float(rate) == pytest.approx(float(change) / float(hours), rel=0.5 if float(hours) < 1 else 0.05)
    most, hourly = re.search(r"most in all: (.*); most per GPU-hour: (.*)$", table[-1]).groups()
    assert rows[0][0] == most == min(rows, key=lambda row: float(row[1]))[0]
    assert hourly == min(rows, key=lambda row: float(row[4]))[0]


@pytest.mark.parametrize("arguments, sentence", [
    (["hours=0"], "hours=0.0 must be a positive"), (["hours=nan"], "hours"), (["gpus=1.5"], "whole number"),
    (["gpu=h10"], "not in runtime/log.py"), (["hors=3"], "did you mean 'hours'?"), (["--law"], "needs a value"),
    (["law=nowhere.json"], "law=nowhere.json is not there: give the law.json"),
    (["law=configs"], "law=configs is a folder: give the law.json"),
    (["--gpu", "a100", "gpu=h100"], "gpu is given twice"), (["hours=1e300"], "must lie between 1e+15 and 1e+32"),
    (["study=configs/study_demo.py"], "another vocabulary"), (["recipe=auto"], "must be one FP8 recipe"),
    (["gap=700"], "in per cent"), (["runs=nowhere"], "does not exist"), (["study=configs/study_chinchila.py"], "did you mean")])
def test_mistakes_are_told_in_a_sentence(capsys, monkeypatch, arguments, sentence):
    monkeypatch.chdir(ROOT)
    key = arguments[0].split("=")[0].removeprefix("--")
    said = output(capsys, *arguments, budget=[one for one in BUDGET if not one.startswith(key + "=")], code=2)
    assert sentence in said and said.startswith("scaling/plan.py: ") and "Traceback" not in said
    assert plan.main(["gpus=8", "hours=2"]) == 2 and "gpu is missing" in capsys.readouterr().err
