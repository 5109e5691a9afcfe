"""scaling/plan.py: what a budget buys and which run to add, against closed forms, brute force,
simulated least squares."""

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fp8.recipes import by_name
from lib.command import read_options
from runtime.config import load_config
from runtime.plan import ASSUMED_MFU
from runtime.plan import plan as train_plan
from scaling import plan
from scaling.pairs import EPOCH
from scaling.plan import PRIOR_SD, RHO, Options, Size, bound, gradient, optimum, tokens
from scaling.study import expand, load_study
from tests.conftest import ROOT, asked
from tests.helpers.law_points import ladder
from tests.helpers.scaling_runs import cells, edit, write_run

BUDGET = ["gpus=8", "hours=24", "gpu=h100"]
# 6 N a token, one speed for all sizes
PLAIN = [Size(str(N), int(N), 6 * N, 0.5, 1.25) for N in (1e8, 1e9, 1e10)]
STUDY = ROOT / "configs/study_chinchilla.py"
expand_once = cache(expand)


@pytest.fixture(autouse=True)
def expanded_once(monkeypatch):
    """The same studies for every call of the command: their hundred configs take most of its
    time."""
    monkeypatch.setattr(plan, "expand", expand_once)


def read_sizes(*more):
    return plan.read_sizes(read_options(Options, [*BUDGET, *more]))


def points(*grid):
    """Runs of sizes x ratios, each a trajectory of its own."""
    return [(N, D, i) for i, (N, D, _) in enumerate(zip(*ladder(*grid), strict=True))]


def row(text, name):
    """The numbers of the line called so in a table of the output."""
    return next(
        [float(cell) for cell in one[1:] if cell[-1].isdigit()]
        for one in cells(text)
        if one[0] == name
    )


def write_law(
    folder, identified=True, is_table=False, sizes=(50e6, 125e6, 250e6, 350e6), **changes
):
    runs = [
        {"recipe": "bf16", "run_id": f"run{i}", "trunk": f"run{i}", "N": N, "D": D}
        for N, D, i in points(sizes)
    ]
    said = {
        "identified": identified,
        "reason": None if identified else "all points lie on one ray",
        "n": len(runs),
        **{key: getattr(EPOCH, key) for key in ("E", "A", "B", "alpha", "beta")},
    }
    laws, path = {"laws": {"chinchilla": said}}, folder / "law.json"
    path.write_text(
        json.dumps((laws if is_table else {"groups": {"bf16": laws}, "inputs": runs}) | changes)
    )
    return path


def output(capsys, *arguments, budget=BUDGET, code=0):
    return asked(capsys, plan.main, *budget, *arguments, code=code)


@pytest.mark.parametrize("flops", [1e19, 1e23])
def test_the_optimum_is_chinchillas_where_a_token_costs_6n(flops):
    law, (N, D) = EPOCH, optimum(EPOCH, PLAIN, flops, in_fp8=False)
    a = law.beta / (law.alpha + law.beta)  # Hoffmann et al. 2022, section 3.3
    G = (law.alpha * law.A / (law.beta * law.B)) ** (1 / (law.alpha + law.beta))
    assert pytest.approx(G * (0.5 * flops / 6) ** a, rel=1e-4) == N
    assert pytest.approx(0.5 * flops / (6 * N), rel=1e-6) == D


def test_the_optimum_is_the_best_of_a_fine_grid_with_real_sizes():
    flops, (sizes, _) = 8 * 989.4e12 * 24 * 3600, read_sizes()
    N, D = optimum(EPOCH, sizes, flops, in_fp8=True)
    grid = np.exp(np.linspace(np.log(1e8), np.log(2e10), 20_001))
    losses = EPOCH.loss(grid, tokens(grid, sizes, flops, True))
    assert (
        EPOCH.loss(N, D) <= losses.min() + 1e-9
        and pytest.approx(grid[losses.argmin()], rel=1e-3) == N
    )
    # a token costs what its size counts
    two = [Size("a", 10**8, 8.5e8, 0.3, 1.1), Size("b", 10**9, 7e9, 0.5, 1.3)]
    assert tokens(1e8, two, 1e20, False) == pytest.approx(1e20 * 0.3 / 8.5e8)
    assert tokens(1e9, two, 1e20, True) == pytest.approx(1e20 * 0.5 * 1.3 / 7e9)
    # attention 1 -> 1 / 8^(1/3)
    assert tokens(8e9, two, 1e20, False) == pytest.approx(1e20 * 0.5 / (8e9 * 6.5))


def test_at_the_break_even_gap_fp8_needs_all_of_its_extra_tokens(capsys):
    out = output(capsys)
    for size in read_sizes()[0]:
        *_, speedup, gap = row(out, size.name)
        D = float(tokens(size.N, [size], 8 * 989.4e12 * 24 * 3600, False))
        assert speedup == pytest.approx(size.speedup, abs=6e-4)
        extra = EPOCH.extra_tokens(gap / 100 * EPOCH.loss(size.N, D * speedup), D)
        # gaps have two digits
        assert extra == pytest.approx(speedup, rel=6e-5 * EPOCH.loss(size.N, D) / EPOCH.slope(D))


@pytest.mark.parametrize(
    "label", ["tensorwise", "tensorwise+kernels+delayed+head", "rowwise+skip=attn.out"]
)
def test_the_bound_on_the_speedup_is_train_pys(label):
    sizes, _ = read_sizes(f"recipe={label}")
    for size in sizes:
        config = replace(load_config(ROOT / f"configs/{size.name}_fp8.py"), fp8=by_name(label))
        lines = "\n".join(train_plan(config, "h100"))
        assert f"{size.speedup:.2f}x" in lines
        hours = float(re.search(r"  BF16 +([\d.]+) h", lines)[1])
        assert config.total_tokens / tokens(size.N, sizes, 989.4e12 * 3600, False) == pytest.approx(
            hours, abs=0.051
        )


def test_a_law_is_told_with_its_reach_and_runs_of_another_world_say_nothing_of_the_target(
    tmp_path, capsys
):
    """As out/demo: 33k to 131k parameters over bytes are no evidence for 1.5B, nor is their law."""

    def advice(text):
        return text[text.index("| run ") :]

    assert "16 points;" in output(capsys, f"law={write_law(tmp_path, is_table=True)}")
    out = output(capsys, f"law={write_law(tmp_path)}")
    assert (
        f"16 points up to {6 * 350e6**2 * 40:.3g} FLOPs" in out
        and "16 runs done; " in out
        and "a wide prior" not in out
    )
    small, without = (33e3, 74e3, 131e3, 200e3), output(capsys)
    out = output(capsys, f"law={write_law(tmp_path, identified=False, sizes=small)}")
    assert (
        "after 0 runs done" in out
        and row(out, "gpt1p5b") == row(without, "gpt1p5b")
        and advice(out) == advice(without)
    )
    changed = {key: 2 * getattr(EPOCH, key) for key in ("E", "A", "B")} | {
        "alpha": 0.5,
        "beta": 0.5,
        "identified": True,
        "n": 16,
    }
    law = write_law(tmp_path, sizes=small, groups={"bf16": {"laws": {"chinchilla": changed}}})
    assert advice(output(capsys, f"law={law}")) == advice(without)
    assert output(capsys, f"study={ROOT}/configs/study_demo.py").endswith(
        "each is done, too small or too large to count\n"
    )
    assert "after 8 runs done" in output(
        capsys, f"law={write_law(tmp_path, sizes=(33e3, 50e6, 125e6, 7e9))}"
    )


def test_the_gap_is_given_or_measured_or_counted_as_none(tmp_path, capsys):
    law, none = write_law(tmp_path), output(capsys, "gap=0")
    edit(
        tmp_path / "precision.json",
        common={"tensorwise": {"bf16": {"mean": 0.5}}},
        sizes=[
            {"recipe": recipe, "params_total": params}
            for recipe, params in (("tensorwise", 10**8), ("rowwise", 10**5))
        ],
    )
    for arguments, gap in (
        ((), 0),
        (["gap=0.3"], 0.003),
        ([f"law={law}"], 0.005),
        ([f"law={law}", "gap=0.3"], 0.003),
        ([f"law={law}", "recipe=rowwise"], 0),
    ):
        out, free = (
            output(capsys, *arguments),
            output(capsys, "gap=0", *(a for a in arguments if a.startswith("recipe"))),
        )
        for name, column, factor in (
            ("BF16", -1, 1),
            ("FP8", -1, 1 + gap),
            ("gpt350m", -3, 1 + gap),
        ):
            assert row(out, name)[column] == pytest.approx(
                factor * row(free, name)[column], abs=2e-4
            )
    level = re.search(r"FP8 equals BF16 at a gap of (\S+) %", none)[1]
    assert row(none, "BF16")[-1] == pytest.approx(
        row(output(capsys, f"gap={level}"), "FP8")[-1], abs=3e-4
    )


def test_measured_speed_counts_on_that_gpu_alone(tmp_path):
    N, flops = 123_587_328, 1e9
    shared = {"params": N, "device": "NVIDIA H100 80GB HBM3", "flops_per_token": flops, "n_gpu": 2}
    for recipe, speed in (("bf16", 400e3), ("tensorwise", 500e3)):
        write_run(tmp_path / "here" / recipe, recipe=recipe, tok_per_s_median=speed, **shared)
        write_run(
            tmp_path / "here" / f"{recipe}_null",
            recipe=recipe,
            tok_per_s_median=speed / 3,
            repeat=1,
            **shared,
        )
        # equal peaks
        write_run(tmp_path / "there" / recipe, recipe=recipe, params=N, device="NVIDIA H200")
        # tiny
        write_run(tmp_path / "there" / f"demo_{recipe}", recipe=recipe, device=shared["device"])
    for size in read_sizes(f"runs={tmp_path / 'here'}")[0]:
        assert (size.mfu, size.speedup) == pytest.approx((400e3 * flops / (2 * 989.4e12), 1.25))
    assert {size.mfu for size in read_sizes(f"runs={tmp_path / 'there'}")[0]} == {ASSUMED_MFU}


def test_cramer_rao_bounds_as_computed_elsewhere_and_a_prior_where_runs_identify_nothing():
    three, target = (125e6, 250e6, 350e6), (1.5e9, 30e9)
    for sizes, ratios, prediction in (
        (three, (10, 20), 1.24),
        (three, (5, 10, 20), 1.04),
        (three, (5, 10, 20, 40), 0.88),
        ((60e6, *three), (5, 10, 20, 40), 0.33),
        ((*three, 1.5e9), (5, 10, 20), 0.08),
    ):
        for rho in (RHO, 0.9):  # each run a trajectory of its own
            assert 100 * bound(EPOCH, points(sizes, ratios), target, rho=rho) == pytest.approx(
                prediction, abs=6e-3
            )
    terms = np.array(
        [EPOCH.E, EPOCH.A * target[0] ** -EPOCH.alpha, EPOCH.B * target[1] ** -EPOCH.beta, 0, 0]
    )
    here = terms / EPOCH.loss(*target)
    for runs in ([], points((350e6,)), points((60e6, *three, 1e9), (20,))):  # the last: one ray
        assert bound(EPOCH, runs, target) is None
        N, D, _ = np.reshape(runs, (-1, 3)).T
        rows = gradient(EPOCH, N, D, target)
        exact = here @ np.linalg.inv(rows.T @ rows / 1e-3**2 + np.diag(PRIOR_SD**-2)) @ here
        assert bound(EPOCH, runs, target, prior=True) == pytest.approx(np.sqrt(exact), rel=1e-6)


@pytest.mark.parametrize("rho", [RHO, 0.9])
def test_generalised_least_squares_on_shared_luck_scatters_as_the_bound_says(rho):
    """Ladders whose trunks have luck of their own: what GLS of ln L on the law's gradient finds,
    4,000 times."""
    N, D, clusters = ladder((50e6, 125e6, 350e6, 1e9), (5, 20, 80))
    target, rng = (3e9, 6e10), np.random.default_rng(0)
    noise = 1e-3 * (
        np.sqrt(rho) * rng.normal(size=(4000, 4))[:, clusters]
        + np.sqrt(1 - rho) * rng.normal(size=(4000, 12))
    )
    jacobian, V = (
        gradient(EPOCH, N, D, target),
        np.where(np.equal.outer(clusters, clusters), rho, 0) + (1 - rho) * np.eye(12),
    )
    weights = np.linalg.solve(
        jacobian.T @ np.linalg.solve(V, jacobian), jacobian.T @ np.linalg.inv(V)
    )
    spread = np.std(noise @ weights.T @ gradient(EPOCH, *target, target))
    assert bound(EPOCH, list(zip(N, D, clusters, strict=True)), target, rho=rho) == pytest.approx(
        spread, rel=0.04
    )


def study_rows():
    return [
        row for row in expand_once(load_study(STUDY)) if row.recipe == "bf16" and not row.held_out
    ]


def test_a_study_gives_trajectories_a_branch_never_without_its_trunk():
    rows, found = study_rows(), plan.candidates_of(STUDY, ())
    trunks = {row.run: row.flops_per_token * row.tokens for row in rows if row.parent is None}
    assert {runs[0][2] for _, runs, _ in found} == set(trunks) and len(found) == 10
    for _, runs, flops in found:
        assert len(runs) == 4 and flops == pytest.approx(
            trunks[runs[0][2]] * (1 + 0.2 * 35 / 40), rel=0.01
        )
    assert not plan.candidates_of(STUDY, {row.run for row in rows})
    # no repeat, none held out
    assert len(plan.candidates_of(ROOT / "configs/study_h100.py", ())) == 6


def test_the_advice_knows_the_trunks_that_are_done(tmp_path, capsys):
    rows = [row for row in study_rows() if row.seed == 1337]
    *inputs, last = [
        {
            "recipe": "bf16",
            "run_id": row.run,
            "trunk": row.parent or row.run,
            "N": row.params_total,
            "D": row.tokens,
        }
        for row in sorted(rows, key=lambda row: row.run == "gpt250m_bf16_t10_s1337")
    ]
    # of configs/study_chinchilla.py
    out = output(capsys, f"law={write_law(tmp_path, identified=False, inputs=inputs)}")
    runs, target = (
        [(one["N"], one["D"], one["trunk"]) for one in (*inputs, last)],
        (
            1_541_785_600,
            20 * 1_541_785_600,
        ),
    )
    now, after = bound(EPOCH, runs[:-1], target), bound(EPOCH, runs, target)
    left = next(row for row in rows if row.run == last["run_id"])
    assert f"{100 * now:.2f} % after 15 runs done; " in out and "7 candidates too" in out
    then, change, hours, rate = row(out, "gpt250m_bf16_t40_s1337, 1 of its runs")
    assert then == pytest.approx(100 * after, abs=0.006) and change == pytest.approx(
        100 * (after - now), abs=0.0006
    )
    spent = left.flops_per_token * left.own_tokens / (989.4e12 * ASSUMED_MFU * 3600)
    assert hours == pytest.approx(spent, abs=0.051) and rate == pytest.approx(
        100 * (after - now) / spent, abs=6e-5
    )
    ranked = {
        name: row(out, name) for name in re.findall(r"^\| (gpt\S+, \d of its runs)", out, re.M)
    }
    said = re.search(r"most in all: (.*); most per GPU-hour: (.*)$", out.strip()).groups()
    assert said == tuple(
        min(ranked, key=lambda name, column=column: ranked[name][column]) for column in (0, 3)
    )


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["hours=0"], "hours=0.0 must be a positive"),
        (["gpu=h10"], "no FP8 peak"),
        (["gpu=a100"], "no FP8 peak"),
        (["law=nowhere.json"], "nowhere.json cannot be read"),
        (["study=configs/study_chinchila.py"], "did you mean"),
        (["recipe=rowise"], "did you mean 'rowwise'"),
        ("law", "[1]"),
        ("law", '{"groups": {"tensorwise": {}}}'),
        ("law", '{"conventions": {"N": "params_nonembed"}}'),
        ("precision", '{"sizes": [{}], "common": {}}'),
    ],
)
def test_mistakes_and_damaged_files_are_told_in_a_sentence(
    tmp_path, capsys, monkeypatch, arguments, sentence
):
    monkeypatch.chdir(ROOT)
    if isinstance(arguments, str):  # a file of that name and content
        law = write_law(tmp_path)
        (tmp_path / f"{arguments}.json").write_text(sentence)
        arguments, sentence = [f"law={law}"], f"{arguments}.json"
    key = arguments[0].split("=")[0]
    assert sentence in output(
        capsys, *arguments, budget=[one for one in BUDGET if not one.startswith(key + "=")], code=2
    )
