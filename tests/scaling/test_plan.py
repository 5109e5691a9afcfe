"""scaling/plan.py: what a budget of GPU hours buys and which run to add."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fp8.recipes import from_label
from lib.command import read_options
from runtime.config import load_config
from runtime.plan import ASSUMED_MFU
from runtime.plan import plan as train_plan
from scaling import plan, precision
from scaling.budgets import SizeOnGPU, optimum, tokens
from scaling.designs import Point, bound
from scaling.paired.cost import EPOCH
from scaling.plan import Options
from scaling.precision_result import PrecisionResult, read_precision
from scaling.reason_words import worded
from scaling.study import Row, expand, load_study
from tests.conftest import ROOT, asked
from tests.helpers.scaling_runs import cells, edit, write_run
from tests.scaling.test_designs import points

BUDGET = ["gpus=8", "hours=24", "gpu=h100"]
H100_PEAK = 989.4e12  # BF16 FLOP/s
FLOPS = 8 * H100_PEAK * 24 * 3600  # of BUDGET
STUDY = ROOT / "configs/study_chinchilla.py"
DEMO_SIZES = (33e3, 74e3, 131e3, 200e3)  # parameters
Capsys = pytest.CaptureFixture[str]
expand_once = cache(expand)


@pytest.fixture(autouse=True)
def expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same studies for every call of the command: their hundred configs take most of its
    time."""
    monkeypatch.setattr(plan, "expand", expand_once)


def read_sizes(*more: str) -> list[SizeOnGPU]:
    return plan.read_sizes(read_options(Options, [*BUDGET, *more]))[0]


def numbers(page: str, name: str) -> list[float]:
    """Of the line called so in a table of the page."""
    (line,) = [line for line in cells(page) if line[0] == name]
    return [float(cell) for cell in line[1:] if cell[-1].isdigit()]


def advice(page: str) -> str:
    return page[page.index("| run ") :]


def write_law(
    folder: Path,
    identified: bool = True,
    is_table: bool = False,
    sizes: Sequence[float] = (50e6, 125e6, 250e6, 350e6),
    **changes: object,
) -> Path:
    """A law.json of 16 runs under Epoch's law."""
    runs = [
        {"recipe": "bf16", "run_id": f"run{i}", "trunk": f"run{i}", "N": N, "D": D}
        for N, D, i in points(sizes)
    ]
    law = {
        "identified": identified,
        "reason": None if identified else "all points lie on one ray",
        "n": len(runs),
        **{key: getattr(EPOCH, key) for key in ("E", "A", "B", "alpha", "beta")},
    }
    laws = {"laws": {"chinchilla": law}}
    content = laws if is_table else {"groups": {"bf16": laws}, "inputs": runs}
    path = folder / "law.json"
    path.write_text(json.dumps(content | changes))
    return path


def ask(capsys: Capsys, *words: str, budget: Sequence[str] = BUDGET, code: int = 0) -> str:
    return asked(capsys, plan.main, *budget, *words, code=code)


# ----------------------------------------------------------------------------------- sizes, speeds


def test_the_optimum_with_real_sizes_is_the_best_of_a_fine_grid() -> None:
    sizes = read_sizes()
    N, D = optimum(EPOCH, sizes, FLOPS, in_fp8=True)
    grid = np.exp(np.linspace(np.log(1e8), np.log(2e10), 20_001))
    losses = EPOCH.loss(grid, tokens(grid, sizes, FLOPS, True))
    assert EPOCH.loss(N, D) <= losses.min() + 1e-9
    assert pytest.approx(grid[losses.argmin()], rel=1e-3) == N


def test_at_the_break_even_gap_fp8_needs_all_of_its_extra_tokens(capsys: Capsys) -> None:
    page = ask(capsys)
    for size in read_sizes():
        *_, speedup, gap = numbers(page, size.name)
        D = float(tokens(size.N, [size], FLOPS, False))
        nats = gap / 100 * EPOCH.loss(size.N, D * speedup)
        # gaps have two digits
        rounding = 6e-5 * EPOCH.loss(size.N, D) / EPOCH.slope(D)
        assert speedup == pytest.approx(size.speedup, abs=6e-4)
        assert EPOCH.extra_tokens(nats, D) == pytest.approx(speedup, rel=rounding)


@pytest.mark.parametrize(
    "label", ["tensorwise", "tensorwise+kernels+delayed+head", "rowwise+skip=attn.out"]
)
def test_the_bound_on_the_speedup_is_train_pys(label: str) -> None:
    sizes = read_sizes(f"recipe={label}")
    for size in sizes:
        config = replace(load_config(ROOT / f"configs/{size.name}_fp8.py"), fp8=from_label(label))
        lines = "\n".join(train_plan(config, "h100"))
        hours = float(re.search(r"  BF16 +([\d.]+) h", lines)[1])
        per_hour = tokens(size.N, sizes, H100_PEAK * 3600, False)
        assert f"{size.speedup:.2f}x" in lines
        assert config.total_tokens / per_hour == pytest.approx(hours, abs=0.051)


H100 = "NVIDIA H100 80GB HBM3"


def test_a_measured_speed_counts_and_a_repeats_does_not(tmp_path: Path) -> None:
    shared = {"params": 123_587_328, "device": H100, "flops_per_token": 1e9, "n_gpu": 2}
    for recipe, speed in (("bf16", 400e3), ("tensorwise", 500e3)):
        run = {"recipe": recipe, **shared}
        write_run(tmp_path / recipe, tok_per_s_median=speed, **run)
        write_run(tmp_path / f"{recipe}_null", tok_per_s_median=speed / 3, repeat=1, **run)
    for size in read_sizes(f"runs={tmp_path}"):
        assert (size.mfu, size.speedup) == pytest.approx((400e3 * 1e9 / (2 * H100_PEAK), 1.25))


@pytest.mark.parametrize(
    "change",
    [
        {"params": 123_587_328, "device": "NVIDIA H200"},  # of equal peaks
        {"params": 38_912, "device": H100},  # tiny
    ],
)
def test_speeds_of_another_gpu_or_of_tiny_runs_do_not_count(tmp_path: Path, change: dict) -> None:
    for recipe in ("bf16", "tensorwise"):
        write_run(tmp_path / recipe, recipe=recipe, **change)
    assert {size.mfu for size in read_sizes(f"runs={tmp_path}")} == {ASSUMED_MFU}


# ----------------------------------------------------------------------------------- law and gap


def test_a_law_of_a_table_is_told_with_its_points(tmp_path: Path, capsys: Capsys) -> None:
    assert "16 points;" in ask(capsys, f"law={write_law(tmp_path, is_table=True)}")


def test_a_law_of_runs_is_told_with_its_reach(tmp_path: Path, capsys: Capsys) -> None:
    page = ask(capsys, f"law={write_law(tmp_path)}")
    assert f"16 points up to {6 * 350e6**2 * 40:.3g} FLOPs" in page
    assert "16 runs done; " in page and "a wide prior" not in page


def test_runs_of_tiny_models_say_nothing_of_the_target(tmp_path: Path, capsys: Capsys) -> None:
    """As out/demo: 33k to 131k parameters over bytes are no evidence for 1.5B."""
    page = ask(capsys, f"law={write_law(tmp_path, identified=False, sizes=DEMO_SIZES)}")
    without = ask(capsys)
    assert "after 0 runs done" in page and advice(page) == advice(without)
    assert numbers(page, "gpt1p5b") == numbers(without, "gpt1p5b")


def test_nor_does_their_law(tmp_path: Path, capsys: Capsys) -> None:
    law = {key: 2 * getattr(EPOCH, key) for key in ("E", "A", "B")}
    law |= {"alpha": 0.5, "beta": 0.5, "identified": True, "n": 16}
    groups = {"bf16": {"laws": {"chinchilla": law}}}
    path = write_law(tmp_path, sizes=DEMO_SIZES, groups=groups)
    assert advice(ask(capsys, f"law={path}")) == advice(ask(capsys))


def test_runs_beyond_the_target_are_no_evidence_either(tmp_path: Path, capsys: Capsys) -> None:
    path = write_law(tmp_path, sizes=(33e3, 50e6, 125e6, 7e9))
    assert "after 8 runs done" in ask(capsys, f"law={path}")


@pytest.fixture(scope="module")
def measured_gaps(tmp_path_factory: pytest.TempPathFactory) -> PrecisionResult:
    """Gaps of tensorwise at 10^8 parameters, .5 %, and at 10^5, 3 %, and of rowwise at 10^5."""
    folder = tmp_path_factory.mktemp("runs")
    for params in (10**8, 10**5):
        write_run(folder / f"bf16_{params}", params=params)
    for recipe, params in (("tensorwise", 10**8), ("tensorwise", 10**5), ("rowwise", 10**5)):
        write_run(folder / f"{recipe}_{params}", recipe=recipe, params=params, gap=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lib.plots.render", lambda figure, form: b"")
        precision.main([str(folder)])
    result = read_precision(folder / "law/precision.json")
    percents = {10**8: 0.5, 10**5: 3.0}
    sizes = [
        replace(size, bf16=replace(size.bf16, mean=percents[size.params_total]))
        for size in result.sizes
    ]
    return replace(result, sizes=sizes)


@pytest.mark.parametrize(
    "words, has_law, gap",
    [
        ([], False, 0),
        (["gap=0.3"], False, 0.003),
        ([], True, 0.005),  # measured
        (["gap=0.3"], True, 0.003),
        (["recipe=rowwise"], True, 0),  # measured at tiny sizes
    ],
)
def test_the_gap_is_given_or_measured_or_counted_as_none(
    tmp_path: Path,
    capsys: Capsys,
    measured_gaps: PrecisionResult,
    words: list[str],
    has_law: bool,
    gap: float,
) -> None:
    law = [f"law={write_law(tmp_path)}"] if has_law else []
    edit(tmp_path / "precision.json", **worded(measured_gaps))
    page = ask(capsys, *law, *words)
    free = ask(capsys, "gap=0", *[word for word in words if word.startswith("recipe")])
    for name, column, factor in (("BF16", -1, 1), ("FP8", -1, 1 + gap), ("gpt350m", -3, 1 + gap)):
        expected = factor * numbers(free, name)[column]
        assert numbers(page, name)[column] == pytest.approx(expected, abs=2e-4)


def test_sizes_of_the_gap_weigh_by_their_pairs(
    tmp_path: Path, measured_gaps: PrecisionResult
) -> None:
    """(3 x .5 + 1 x .9) / 4; a size of 10^12 is out of reach."""
    row = next(row for row in measured_gaps.sizes if row.params_total == 10**8)
    rows = [
        replace(row, params_total=params, bf16=replace(row.bf16, n=pairs, mean=percent))
        for params, pairs, percent in ((10**8, 3, 0.5), (10**9, 1, 0.9), (10**12, 1, 7.0))
    ]
    edit(tmp_path / "precision.json", **worded(replace(measured_gaps, sizes=rows)))
    options = Options(gpus=8, hours=1, gpu="h100", law=str(tmp_path / "law.json"))
    sizes = [SizeOnGPU("a", N, 6 * N, 0.4, 1.2) for N in (5e7, 1.5e9)]
    assert plan.read_gap(options, sizes).share == pytest.approx(0.006)


def test_at_the_named_gap_both_precisions_reach_one_loss(capsys: Capsys) -> None:
    page = ask(capsys, "gap=0")
    level = re.search(r"FP8 equals BF16 at a gap of (\S+) %", page)[1]
    fp8_loss = numbers(ask(capsys, f"gap={level}"), "FP8")[-1]
    assert numbers(page, "BF16")[-1] == pytest.approx(fp8_loss, abs=3e-4)


# ------------------------------------------------------------------------------- the next extra run


def study_rows() -> list[Row]:
    rows = expand_once(load_study(STUDY))
    return [row for row in rows if row.recipe == "bf16" and not row.held_out]


def test_a_study_gives_a_candidate_for_each_trunk() -> None:
    trunks = {row.run for row in study_rows() if row.parent is None}
    candidates = plan.candidates_of(str(STUDY), {})
    assert len(candidates) == 10
    assert {candidate.points[0].trajectory for candidate in candidates} == trunks


def test_a_candidate_costs_its_trunk_and_the_decays_of_its_branches() -> None:
    trunk_flops = {row.run: row.flops_per_token * row.tokens for row in study_rows()}
    for candidate in plan.candidates_of(str(STUDY), {}):
        whole = trunk_flops[candidate.points[0].trajectory]
        assert len(candidate.points) == 4
        assert candidate.flops == pytest.approx(whole * (1 + 0.2 * 35 / 40), rel=0.01)


def test_what_is_done_is_no_candidate() -> None:
    done = {row.run: Point(1, 1, "") for row in study_rows()}
    assert plan.candidates_of(str(STUDY), done) == []


def test_repeats_and_held_out_runs_are_no_candidates() -> None:
    assert len(plan.candidates_of(str(ROOT / "configs/study_h100.py"), {})) == 6


def test_no_candidate_is_left_where_all_are_too_small(capsys: Capsys) -> None:
    page = ask(capsys, f"study={ROOT}/configs/study_demo.py")
    assert page.endswith("each is done, too small or too large to count\n")


class Advised:
    """All runs of a seed but one branch are done."""

    def __init__(self, folder: Path, capsys: Capsys) -> None:
        rows = [row for row in study_rows() if row.seed == 1337]
        (self.left,) = [row for row in rows if row.run == "gpt250m_bf16_t10_s1337"]
        done = [row for row in rows if row is not self.left]
        inputs = [
            {
                "recipe": "bf16",
                "run_id": row.run,
                "trunk": row.parent or row.run,
                "N": row.params_total,
                "D": row.tokens,
            }
            for row in done
        ]
        self.page = ask(capsys, f"law={write_law(folder, identified=False, inputs=inputs)}")
        self.now = self.error(done)
        self.after = self.error([*done, self.left])

    def error(self, rows: Sequence[Row]) -> float:
        """Per cent, of a run of gpt1p5b at 20 tokens per parameter."""
        runs = [Point(row.params_total, row.tokens, row.parent or row.run) for row in rows]
        error = bound(EPOCH, runs, (1_541_785_600, 20 * 1_541_785_600))
        assert error is not None
        return 100 * error


@pytest.fixture
def advised(tmp_path: Path, capsys: Capsys) -> Advised:
    return Advised(tmp_path, capsys)


def test_the_advice_says_how_far_the_runs_that_are_done_lead(advised: Advised) -> None:
    assert f"{advised.now:.2f} % after 15 runs done; " in advised.page
    assert "7 candidates too" in advised.page


def test_a_branch_of_a_trunk_that_is_done_costs_its_own_steps(advised: Advised) -> None:
    error, change, hours, rate = numbers(advised.page, "gpt250m_bf16_t40_s1337, 1 of its runs")
    gain = advised.after - advised.now
    spent = advised.left.flops_per_token * advised.left.own_tokens
    spent_hours = spent / (H100_PEAK * ASSUMED_MFU * 3600)
    assert error == pytest.approx(advised.after, abs=0.006)
    assert change == pytest.approx(gain, abs=0.0006)
    assert hours == pytest.approx(spent_hours, abs=0.051)
    assert rate == pytest.approx(gain / spent_hours, abs=6e-5)


def test_the_best_candidates_are_those_of_the_table(advised: Advised) -> None:
    names = re.findall(r"^\| (gpt\S+, \d of its runs)", advised.page, re.M)
    table = {name: numbers(advised.page, name) for name in names}
    words = re.search(r"most in all: (.*); most per GPU-hour: (.*)$", advised.page.strip())
    most_in_all = min(table, key=lambda name: table[name][0])
    most_per_hour = min(table, key=lambda name: table[name][3])
    assert words is not None and words.groups() == (most_in_all, most_per_hour)


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "word, sentence",
    [
        ("hours=0", "hours=0.0 must be a positive"),
        ("gpu=h10", "no FP8 peak"),
        ("gpu=a100", "no FP8 peak"),
        ("law=nowhere.json", "nowhere.json cannot be read"),
        ("study=configs/study_chinchila.py", "did you mean"),
        ("recipe=rowise", "did you mean 'rowwise'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, word: str, sentence: str
) -> None:
    monkeypatch.chdir(ROOT)
    key = word.split("=")[0]
    budget = [word for word in BUDGET if not word.startswith(f"{key}=")]
    assert sentence in ask(capsys, word, budget=budget, code=2)


@pytest.mark.parametrize(
    "name, content",
    [
        ("law.json", "[1]"),
        ("law.json", '{"groups": {"tensorwise": {}}}'),
        ("law.json", '{"conventions": {"N": "params_nonembed"}}'),
        ("precision.json", '{"sizes": [{}], "common": {}}'),
    ],
)
def test_damaged_files_are_told_by_name(
    tmp_path: Path, capsys: Capsys, name: str, content: str
) -> None:
    law = write_law(tmp_path)
    (tmp_path / name).write_text(content)
    assert name in ask(capsys, f"law={law}", code=2)
