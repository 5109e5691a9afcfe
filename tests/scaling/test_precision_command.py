"""scaling/precision.py: the command's files, tables and figure say what the gaps are, in words that
follow the numbers."""

import math
import re

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from scaling import precision
from scaling.paired.cost import EPOCH
from scaling.paired.published import kumar_gap, sun_gap
from scaling.pairing import pair_runs
from scaling.precision_figure import NULL_COLOURS, draw_precision
from scaling.precision_result import analyse, read_precision
from scaling.records import read_runs
from scaling.verdicts import Margin
from tests.conftest import asked
from tests.helpers.scaling_runs import (
    cells,
    edit,
    errorbars,
    legend,
    strict,
    write_branches,
    write_run,
)

BF16 = 2.20, 2.21, 2.18  # nats, of seeds 1, 2, 3


def write_seeds(folder, gaps, recipe="tensorwise", params=38_912, **changes):
    """A BF16 run and its FP8 partner for each seed; gaps in nats."""
    for seed, gap in enumerate(gaps, 1):
        for name, own in (("bf16", 0.0), (recipe, gap)):
            if not (path := folder / f"{name}_{params}_{seed}").exists():
                write_run(
                    path,
                    recipe=name,
                    loss=BF16[seed - 1],
                    gap=own,
                    seed=seed,
                    params=params,
                    **changes,
                )
    return folder


def study(folder, percent=0.25, declared="2026-11-19T00:00:00Z"):
    """A study.json from before write_run's runs began (20 November)."""
    edit(folder / "study.json", margin_percent=percent, declared=declared)
    return folder


def run(capsys, folder, *arguments):
    return asked(capsys, precision.main, folder, *arguments, "--all"), strict(
        folder / "law/precision.json"
    )


def row(output, name, first="N"):
    """Cells of the line that holds `name`, in the table whose first column is `first`."""
    table = re.split(rf"^\| {first} ", output, maxsplit=1, flags=re.M)[1].split("\n\n")[0]
    return next(line for line in cells(table) if name in line)


def test_mean_interval_and_null_are_those_of_the_textbook_and_a_speed_up_is_a_gpus(
    tmp_path, capsys, no_figures
):
    gaps = [0.004, 0.010, 0.007]
    output, result = run(capsys, write_seeds(tmp_path, gaps))
    theirs = ttest_1samp(percents := 100 * np.divide(gaps, BF16), 0).confidence_interval()
    mean, half = (theirs.low + theirs.high) / 2, (theirs.high - theirs.low) / 2
    assert row(output, "tensorwise")[3:5] == ["3", f"{mean:+.3f} ± {half:.3f}"]
    assert result["common"]["tensorwise"]["bf16"]["mean"] == pytest.approx(
        np.mean(100 * np.log1p(percents / 100)), rel=1e-9
    )
    null = 100 * math.sqrt(2) * np.log(BF16).std(ddof=1)
    assert row(output, "bf16, two seeds")[3:6] == ["3 runs", f"SD {null:.3f}", f"SD {null:.3f}"]
    output, result = run(capsys, study(write_seeds(tmp_path / "one", [0.01], "amax")))
    assert row(output, "amax")[-1] == "no interval (n = 1)" and "two seeds" not in output
    assert result["null"]["pooled"] is result["null"]["same_seed"]["pooled"] is None
    assert "a CPU has no FP8 units" in output and all(
        cost["speedup"] is None for cost in result["sizes"][0]["costs"]
    )
    _, result = run(
        capsys,
        write_seeds(
            tmp_path / "gpu", gaps, device="NVIDIA H100", params=1_500_000_000, tok_per_s_median=1.0
        ),
    )
    cost = next(one for one in result["sizes"][0]["costs"] if one["law"] == "Epoch")
    assert cost["speedup"] == pytest.approx(1 / EPOCH.extra_tokens(0.007, 30e9))  # equal throughput


@pytest.mark.parametrize("cut_off", ["none", "*_tensorwise_1_*", "*_d5"])
def test_branches_of_one_trunk_count_once_and_the_console_gets_forty_lines(
    tmp_path, capsys, no_figures, cut_off
):
    """Also where they were trained from scratch without their trunk's checkpoint: they share its
    seed, data and schedule."""
    write_branches(tmp_path, sizes=(30_000, 60_000, 120_000))
    for i in range(12):
        write_run(tmp_path / f"alone_{i}", params=50_000 + i, recipe="amax")
    for path in tmp_path.glob(f"{cut_off}/summary.json"):
        edit(path, parent_run=None, parent_step=None)
    output, result = run(capsys, tmp_path)
    assert row(output, "tensorwise", "recipe")[3] == "6 of 24" and "own" in result["laws"]
    # two seeds at each of three sizes
    assert (result["null"]["pooled"]["runs"], result["null"]["pooled"]["dof"]) == (24, 3)
    assert all(one["bf16"]["n"] == 2 for one in result["sizes"]) and len(result["sizes"]) == 12
    short = asked(capsys, precision.main, tmp_path)
    assert (
        output.count("\n") > 55
        and output.count("WARNING: unpaired alone") == 12
        and short.count("\n") <= 40
    )
    assert "tensorwise" in short.splitlines()[2] and "--all" in short


def test_a_margin_declared_before_the_runs_makes_an_equivalence_test(tmp_path, capsys, no_figures):
    output, result = run(capsys, write_seeds(tmp_path, [0.0002, -0.0003, 0.0002]))
    assert "No margin was declared" in output and result["margin"] is None
    output, result = run(capsys, study(tmp_path))
    words = row(output, "tensorwise", "recipe")
    assert (
        re.fullmatch(r"equivalent within ±0\.25 % \(TOST, p=[\d.e-]+\)", words[2])
        and result["margin"]["is_declared"]
    )
    assert words[-1] == f"{result['common']['tensorwise']['smallest_seen']:.4g}"
    output, result = run(capsys, tmp_path, "margin=0.5")
    assert (
        "margin after the fact" in output
        and "±0.5 %" in output
        and not result["margin"]["is_declared"]
    )
    study(write_seeds(tmp_path / "later", [0.0002], params=60_000))
    study(tmp_path, declared="2026-11-20T09:00:01Z")
    output = asked(capsys, precision.main, tmp_path, tmp_path / "later", f"out={tmp_path}/law")
    # not the other's
    assert "margin after the fact" in output and f"{tmp_path}/study.json" in output
    assert "after 6 of 6 runs had begun" in output
    # nobody knows when they began
    study(write_seeds(tmp_path / "b", [0.0002], params=50_000, t_start=...), 0.5)
    assert not run(capsys, tmp_path / "b")[1]["margin"]["is_declared"]
    assert "0.25, 0.5" in asked(
        capsys, precision.main, tmp_path, tmp_path / "b", f"out={tmp_path}/c", code=2
    )


def test_a_recipe_that_converts_nothing_is_called_bf16_and_the_best_is_named(
    tmp_path, capsys, no_figures
):
    write_seeds(tmp_path, [0.010, 0.011, 0.012])
    write_seeds(tmp_path, [0.020, 0.021, 0.025], "cscale")
    write_seeds(
        tmp_path,
        [1e-5, 2e-5, 3e-5],
        "auto",
        precision={"recipe": "auto", "compile": False, "layers_converted": []},
    )
    output, result = run(capsys, tmp_path)
    assert row(output, "auto", "recipe")[2].startswith("BF16 again") and len(result["pairs"]) == 9
    assert "Best: tensorwise has the lowest gap" in output and "Not ranked: auto" in output


def test_without_a_law_of_our_own_the_runs_of_one_size_say_what_tokens_gain(
    tmp_path, capsys, no_figures
):
    for ratio, loss, params in ((10, 2.2, 30_000), (20, 2.0, 30_000), (20, 1.9, 60_000)):
        for recipe in ("bf16", "tensorwise"):
            write_run(
                tmp_path / f"{recipe}_{params}_{ratio}",
                recipe=recipe,
                gap=0.01 * (recipe != "bf16"),
                params=params,
                tokens=ratio * params,
                loss=loss,
            )
    _, result = run(capsys, tmp_path)
    beta, (one, epoch) = math.log(2.2 / 2.0) / math.log(2), result["sizes"][1]["costs"]
    assert (one["law"], epoch["law"]) == ("own, at this N", "Epoch")
    assert one["extra_tokens"] == pytest.approx((1 - 0.01 / 2.0) ** (-1 / beta))
    # one token count at that size
    assert [cost["law"] for cost in result["sizes"][2]["costs"]] == ["Epoch"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("{runs}/nowhere", "does not exist"),
        ("{runs} loss=fp8", "loss='fp8'"),
        ("{runs} margin=0", "margin: 0"),
        ("{runs}/bf16_38912_1", "out=DIR is missing"),
        ("{runs}/bf16_38912_1 out=x", "no BF16/FP8 pair among these runs"),
    ],
)
def test_mistakes_are_a_sentence(tmp_path, capsys, arguments, sentence):
    write_seeds(tmp_path, [0.004])
    before = sorted(tmp_path.rglob("*"))
    assert sentence in asked(
        capsys, precision.main, *arguments.format(runs=tmp_path).split(), code=2
    )
    assert sorted(tmp_path.rglob("*")) == before


def damaged(runs, shift=0, **arrays):
    with np.load(runs / "bf16_38912_2/val_losses.npz") as file:
        whole = {name: np.roll(array, shift) for name, array in file.items()}
    np.savez(runs / "bf16_38912_2/val_losses.npz", **whole | arrays)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (
            lambda runs: (runs / "study.json").write_text('{"margin_percent": 1}'),
            "study.json cannot be read",
        ),
        (lambda runs: study(runs, percent=0), "margin"),
        (lambda runs: study(runs, declared="yesterday"), "margin"),
        (
            lambda runs: write_run(runs / "d", seed=9, pair_id="pair38912_778240_1"),
            "d are both the BF16 run of pair",
        ),
        (
            lambda runs: (runs / "bf16_38912_2/val_losses.npz").unlink(),
            "val_losses.npz cannot be read",
        ),
        (
            lambda runs: (runs / "bf16_38912_2/val_losses.npz").write_bytes(b"PK"),
            "val_losses.npz cannot be read",
        ),
        (lambda runs: damaged(runs, bf16=np.full(35, 9.9)), "val_losses.npz cannot be read"),
        (lambda runs: damaged(runs, bf16=np.full(36, math.nan)), "not from one evaluation"),
        # a source without a target
        (lambda runs: damaged(runs, n_tokens=np.arange(36) // 12 * 9), "not from one evaluation"),
        (lambda runs: damaged(runs, bf16=np.full(36, 9.9)), "not from one evaluation"),
        (lambda runs: damaged(runs, shift=5), "same validation sequences in the same order"),
        (
            lambda runs: [
                write_run(runs / name, recipe=name, loss=2.2, seed=9, **more)
                for name, more in (("tensorwise", {}), ("bf16", {"per_source": 5}))
            ],
            "same validation sequences",
        ),
        (lambda runs: write_run(runs / "other", params=50_000, val_sha256="w" * 64), "val_sha256"),
        (
            lambda runs: (
                [path.unlink() for path in runs.glob("*/summary.json")]
                + [write_run(runs / "x", status="diverged")]
            ),
            "no run is left to compare",
        ),
    ],
)
def test_damaged_runs_are_a_sentence_and_nothing_is_written(tmp_path, capsys, damage, sentence):
    damage(study(write_seeds(tmp_path, [0.004, 0.010, 0.007])))
    assert (
        sentence in asked(capsys, precision.main, tmp_path, code=2)
        and not (tmp_path / "law").exists()
    )


def test_gaps_nulls_and_margin_are_drawn_where_they_belong(tmp_path):
    write_seeds(tmp_path, [0.010, 0.012, 0.015], params=40_000)
    write_seeds(tmp_path, [-0.004, -0.006, -0.009], "rowwise", params=40_000)
    write_seeds(tmp_path, [0.004], params=300_000)
    write_run(tmp_path / "again", loss=BF16[0] + 1e-3, params=40_000, seed=1, repeat=1)
    records, _ = read_runs([tmp_path])
    result = analyse(records, pair_runs(records)[0], "bf16", Margin(0.25, "study.json", True))
    figure = draw_precision(result)
    left, right = figure.axes
    theirs = ttest_1samp(
        percent := 100 * np.divide([0.010, 0.012, 0.015], BF16), 0
    ).confidence_interval()
    first, alone = errorbars(left, "#D55E00")
    assert first[1:] == pytest.approx((np.mean(percent), theirs.low, theirs.high), rel=1e-6)
    se = next(
        pair.gap["bf16"].se_percent for pair in pair_runs(records)[0] if pair.fp8.N == 300_000
    )
    mean = 100 * 0.004 / 2.2
    # one pair: the bar is the evaluation's noise, not the seeds'
    assert alone == pytest.approx((300_000, mean, mean - 1.96 * se, mean + 1.96 * se), rel=1e-4)
    (other,) = errorbars(left, "#009E73")
    # two recipes of one size stand side by side
    assert other[0] < 40_000 < first[0] and other[1] < 0
    bands = [result.null.pooled.band, result.null.same_seed.pooled.band]
    # the null of other seeds leaves the panel, that of the same seed does not
    assert 0.25 < left.get_ylim()[1] < 1.2 < bands[0] and bands[1] < left.get_ylim()[1]
    assert null_ends(left, "v") == [-left.get_ylim()[1]] == [-end for end in null_ends(left, "^")]
    assert null_ends(left, "_") == pytest.approx([-bands[1], bands[1]])
    assert [text.get_text() for text in left.texts] == [f"±{band:.2g} %" for band in bands]
    assert {-0.25, 0.25} <= {
        line.get_ydata()[0] for line in left.lines if line.get_linestyle() == "--"
    }
    assert legend(figure) == [
        f"null, other seed, ±{bands[0]:.2g} %",
        f"null, same seed, ±{bands[1]:.2g} %",
        "margin, ±0.25 %",
        "rowwise",
        "tensorwise",
        "mean of pairs, 95 % interval",
        "single pair, evaluation noise",
    ]
    lines = {line.get_label(): line.get_data() for line in right.lines}
    N, nats = lines["Kumar INT8"]
    assert nats == pytest.approx(kumar_gap(N)) and N.min() >= 30e6 and N.max() <= 220e6
    N, nats = lines["Sun E4M3, block 128"]
    assert (
        nats == pytest.approx(sun_gap(N, 20 * N))
        and N.min() >= 41e6
        and right.get_xlim()[1] > 1.5e9
    )
    markers = {line.get_xdata()[0]: line.get_markerfacecolor() for line, *_ in right.containers}
    assert markers == {40_000: "#D55E00", 300_000: "white"}
    assert sorted(nats for _, nats, *_ in errorbars(right)) == pytest.approx(
        [0.004, np.mean([0.010, 0.012, 0.015])], rel=1e-6
    )


def test_few_and_extreme_pairs_are_drawn(tmp_path, capsys):
    for gaps in ([-0.01], [2.0, 2.5]):
        runs, out = write_seeds(tmp_path / f"{len(gaps)}/runs", gaps), tmp_path / f"{len(gaps)}/out"
        assert "FP8 minus BF16, as trained" in asked(
            capsys, precision.main, runs, "loss=as_trained", "--out", out
        )
        assert {path.suffix for path in out.iterdir()} == {".json", ".png", ".svg"}
        assert strict(out / "precision.json")["sizes"][0]["nats"]["mean"] == pytest.approx(
            1.5 * np.mean(gaps)
        )
        limit = (
            draw_precision(found := read_precision(out / "precision.json")).axes[0].get_ylim()[1]
        )
        mean = abs(found.sizes[0].as_trained.mean)
        if len(gaps) == 2:
            assert limit == pytest.approx(1.2 * mean), "two pairs' bar may leave the panel"
        else:
            assert limit > 1.2 * mean, "a single pair's bar may not"


def null_ends(panel, marker):
    """Where brackets of nulls end with this marker."""
    lines = [line for line in panel.lines if line.get_color() in NULL_COLOURS]
    return [line.get_ydata()[0] for line in lines if line.get_marker() == marker]


@pytest.mark.parametrize("gap", [0.001, 0.3, 1.0, 6.0, 150.0])
def test_the_margin_can_be_read_whatever_the_gaps_and_nulls_are(tmp_path, gap):
    """Its lines lie a tenth of the axis away from the edges and from each other."""
    write_seeds(tmp_path, [gap * loss / 100 for loss in BF16], params=40_000)
    records, _ = read_runs([tmp_path])
    result = analyse(records, pair_runs(records)[0], "bf16", Margin(0.25, "study.json", True))
    panel = draw_precision(result).axes[0]
    heights = panel.transAxes.inverted().transform(
        panel.transData.transform([(40_000, side * 0.25) for side in (-1, 1)])
    )[:, 1]
    assert heights[0] > 0.1 and heights[1] < 0.9 and heights[1] - heights[0] > 0.1
    low, high = panel.get_ylim()
    ticks = [tick for tick in panel.get_yticks() if low <= tick <= high]
    assert 0 in ticks and len(ticks) >= 3
    assert all(low < mean < high for _, mean, *_ in errorbars(panel))


def test_bars_that_reach_nought_end_in_an_arrow_on_the_logarithmic_panel(tmp_path):
    write_seeds(tmp_path, [0.010, -0.004, 0.002])
    records, _ = read_runs([tmp_path])
    panel = draw_precision(analyse(records, pair_runs(records)[0], "bf16", None)).axes[1]
    ((_, _, low, high),) = errorbars(panel)
    floor = panel.get_ylim()[0]
    arrows = [line for line in panel.lines if line.get_marker() == "v"]
    assert low == pytest.approx(floor) and high > 0.01
    assert [line.get_ydata() for line in arrows] == [[floor]]
