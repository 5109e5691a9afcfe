"""scaling/pairs.py and null.py: who is whose partner, what BF16 differs by from itself, under both counts of parameters."""

import gzip
import json
import math

import numpy as np
import pytest
from scaling_runs import surface, write_run
from scipy.stats import linregress
from scipy.stats import t as student

from scaling import precision
from scaling.pairs import estimate, null_pairs, pairs
from scaling.precision import analyse, draw_precision, grid, read_result, tables
from scaling.records import counted_as, read_runs

RECIPE = {"recipe": "tensorwise", "compile": True, "layers_converted": ["layers.0.attn.qkv"], "layers_skipped": {}}
LOSS, GAP, NULL = {1: 2.20, 2: 2.21}, {1: 0.010, 2: 0.014}, {1: 0.002, 2: -0.004}       # nats


def write_null(folder, null=NULL, **changes):
    """Two seeds in BF16, FP8 and BF16 once more; the repeat differs by `null` nats."""
    for seed, loss in LOSS.items():
        write_run(folder / f"bf16_{seed}", loss=loss, seed=seed, curve=False, **changes)
        write_run(folder / f"fp8_{seed}", recipe="tensorwise", loss=loss, gap=GAP[seed], seed=seed, curve=False, precision=RECIPE,
                  **changes)
        write_run(folder / f"null_{seed}", loss=loss + null[seed], seed=seed, repeat=1, curve=False, **changes)
    return folder


def analysed(folder, convention=None):
    records = counted_as(read_runs([folder])[0], convention)
    return analyse(records, pairs(records)[0], "bf16", None)


def printed(capsys, folder, *words):
    assert precision.main([str(folder), f"out={folder / 'law'}", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(precision, "draw_precision", lambda result: "figure")
    monkeypatch.setattr(precision, "render", lambda figure, form: b"")


# ----------------------------------------------------------------------------------------------------- the same seed


def test_a_repeat_is_the_null_of_its_seed_and_no_partner(tmp_path):
    write_null(tmp_path)
    records, _ = read_runs([tmp_path])
    for order in (records, records[::-1]):
        found, notes = pairs(order)
        assert [(p.bf16.run_id, p.fp8.run_id) for p in sorted(found, key=lambda p: p.fp8.seed)] == [
            ("bf16_1", "fp8_1"), ("bf16_2", "fp8_2")] and notes == []
        again, notes = null_pairs(order)
        assert [(p.bf16.run_id, p.fp8.run_id, round(p.in_bf16.nats, 6)) for p in again] == [
            ("bf16_1", "null_1", 0.002), ("bf16_2", "null_2", -0.004)] and notes == []


def test_the_null_of_one_seed_is_the_root_mean_square_around_nought(tmp_path, capsys, undrawn):
    output = printed(capsys, write_null(tmp_path))
    percent = [100 * NULL[seed] / LOSS[seed] for seed in (1, 2)]
    sd = math.sqrt((percent[0]**2 + percent[1]**2) / 2)
    same = json.loads((tmp_path / "law/precision.json").read_text())["null"]["same_seed"]
    assert same["pooled"] == {"pairs": 2, "dof": 2, "sd_percent": pytest.approx(sd),
                              "band": pytest.approx(4.302652729911275 * sd)}     # Student's t, 97.5 %, two degrees of freedom
    (row,) = same["sizes"]
    assert row["bf16"]["mean"] == pytest.approx(sum(percent) / 2) and row["pairs"] == 2 and same["equal"] == 0
    assert [(one["first"], one["second"]) for one in row["differences"]] == [("bf16_1", "null_1"), ("bf16_2", "null_2")]
    line = next(line for line in output.splitlines() if "| bf16, same seed |" in line)
    half = 12.706204736174698 * np.std(percent, ddof=1) / math.sqrt(2)
    assert f"| 2 | {sum(percent) / 2:+.3f} ± {half:.3f} |" in line and "null: rounded otherwise" in line
    assert f"SD around 0 over 2 pairs {sd:.3f} %, 2 degrees of freedom" in output
    # Two seeds are two: a repeat is no third run of the null of other seeds.
    assert "| bf16, two seeds | 2 runs |" in output and "unpaired" not in output


def test_branches_of_a_repeated_trunk_add_no_freedom(tmp_path):
    for ratio, loss, null in ((5, 2.6, 0.001), (10, 2.4, 0.003), (20, 2.2, 0.002)):
        for name, repeat, recipe in (("bf16", 0, "bf16"), ("null", 1, "bf16"), ("fp8", 0, "tensorwise")):
            lineage = {} if ratio == 20 else {"parent_run": f"{name}_20", "parent_step": 8 * ratio}
            write_run(tmp_path / f"{name}_{ratio}", recipe=recipe, tokens=ratio * 40_000, params=40_000, repeat=repeat,
                      loss=loss + null * repeat, gap=0.01 * (name == "fp8"), curve=False, **lineage)
    same = analysed(tmp_path)["null"]["same_seed"]
    percent = [100 * 0.001 / 2.6, 100 * 0.003 / 2.4, 100 * 0.002 / 2.2]
    assert (same["pooled"]["pairs"], same["pooled"]["dof"]) == (3, 1) and len(same["sizes"]) == 3
    assert same["pooled"]["sd_percent"] == pytest.approx(math.sqrt(sum(one**2 for one in percent) / 3))
    assert same["pooled"]["band"] == pytest.approx(student.ppf(0.975, 1) * same["pooled"]["sd_percent"])


def test_equal_bits_are_said_and_are_no_band(tmp_path, capsys, undrawn):
    output = printed(capsys, write_null(tmp_path / "all", {1: 0.0, 2: 0.0}))
    assert "no null: equal to the last bit" in output
    assert "2 pairs of BF16 with BF16 of the same seed are equal to the last bit" in output
    result = analysed(tmp_path / "all")
    assert result["null"]["same_seed"]["pooled"] is None and result["null"]["same_seed"]["equal"] == 2
    figure = draw_precision(result)
    assert not any("one seed" in text.get_text() for text in figure.legends[0].get_texts())
    assert "No null of one seed: such runs are equal to the last bit" in said(figure)
    output = printed(capsys, write_null(tmp_path / "one", {1: 0.0, 2: 0.004}))
    assert "1 pair of BF16 with BF16 of the same seed is equal to the last bit" in output and "over 1 pair " in output
    pooled = analysed(tmp_path / "one")["null"]["same_seed"]["pooled"]
    assert (pooled["pairs"], pooled["dof"], pooled["sd_percent"]) == (1, 1, pytest.approx(100 * 0.004 / LOSS[2]))


def said(figure):
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def bands(figure):
    """label -> (low, high) of the grey bands, the last drawn last."""
    return {patch.get_label(): (patch.get_y(), patch.get_y() + patch.get_height())
            for patch in figure.axes[0].patches if "null" in patch.get_label()}


def test_both_nulls_are_bands_of_their_own(tmp_path):
    result = analysed(write_null(tmp_path, {1: 0.0005, 2: -0.0004}))
    figure = draw_precision(result)
    same = result["null"]["same_seed"]["pooled"]["band"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert bands(figure) == {f"null of one seed, ±{same:.2g} %": pytest.approx((-same, same))}
    assert f"null, ±{result['null']['pooled']['band']:.2g} % (beyond the axis)" in names        # two seeds, one degree of freedom
    assert "Darker grey: the same of one seed, rounded otherwise (n = 2 pairs, 2 degrees of freedom)." in said(figure)
    result["null"]["pooled"]["band"] = 2 * same
    figure = draw_precision(result)
    assert [*bands(figure)] == [f"null, ±{2 * same:.2g} %", f"null of one seed, ±{same:.2g} %"]     # the narrower on top
    result["null"]["same_seed"]["pooled"]["band"] = 500.0
    figure = draw_precision(result)
    assert [*bands(figure)] == [f"null, ±{2 * same:.2g} %"] and figure.axes[0].get_ylim()[1] < 10
    assert "Not drawn, beyond the axis: the same of one seed" in said(figure)


@pytest.mark.parametrize("change, sentence", [
    ({"pair_id": "another"}, "unpaired null_1: the BF16 run that it repeats is not there (pair_id another)"),
    ({"recipe": "tensorwise"}, "unpaired null_1: it repeats an FP8 run"),
])
def test_a_repeat_without_its_run_is_said(tmp_path, capsys, undrawn, change, sentence):
    write_null(tmp_path)
    (tmp_path / "null_1/summary.json").unlink()
    write_run(tmp_path / "more/null_1", loss=2.203, seed=1, repeat=1, curve=False, **change)
    (tmp_path / "more/null_1").rename(tmp_path / "null_1b")
    assert sentence in printed(capsys, tmp_path)
    assert analysed(tmp_path)["null"]["same_seed"]["pooled"]["pairs"] == 1


# ------------------------------------------------------------------------------------------------ which parameters N is

# Parameters without and with the vocabulary.
SHAPES = {"a": (3_150_000, 16_000_000), "b": (6_490_000, 25_800_000), "c": (12_600_000, 38_300_000)}


def write_counted(folder, params="nonembed", gap=0.005):
    """Three sizes at 5, 10 and 20 tokens per parameter without the vocabulary, losses from a known law of those."""
    for name, (nonembed, total) in SHAPES.items():
        for seed in (1, 2):
            for ratio in (5, 10, 20):
                for recipe in ("bf16", "tensorwise"):
                    noise = math.exp(np.random.default_rng([seed, ratio, nonembed]).normal(0, 1e-4))
                    trunk, tokens = f"{name}_{recipe}_{seed}", ratio * nonembed + 40_000
                    lineage = {} if ratio == 20 else {"parent_run": trunk, "parent_step": 8 * ratio}
                    write_run(folder / (trunk if ratio == 20 else f"{trunk}_{ratio}"), recipe=recipe, params=total, seed=seed,
                              params_nonembed=nonembed, tokens=tokens, loss=surface(nonembed, tokens) * noise, curve=False,
                              gap=gap * seed * (recipe != "bf16"), precision={**RECIPE, "recipe": recipe}, **lineage)
    (folder / "study.json").write_text(json.dumps({"margin_percent": 1, "declared": "2026-11-19T00:00:00Z", "params": params}))
    return folder


def test_sizes_and_labels_follow_the_studys_count(tmp_path, capsys, undrawn):
    write_counted(tmp_path)
    output = printed(capsys, tmp_path)
    assert "| 3,150,000 | 15,790,000 | tensorwise | 2 |" in output and "N: params_nonembed." in output
    assert "at 5 tokens per parameter [%] | at 10 | at 20 |" in output and "| 3.15M | FP8 tensorwise | 2 |" in output
    result = json.loads((tmp_path / "law/precision.json").read_text())
    assert result["conventions"] == {"N": "params_nonembed"} and len(result["sizes"]) == 9
    row = result["sizes"][0]
    assert (row["N"], row["params_total"], row["params_nonembed"]) == (3_150_000, 16_000_000, 3_150_000)
    assert row["tokens_per_param"] == 15_790_000 / 3_150_000
    assert "Published laws take params_total, ours params_nonembed." in output
    output = printed(capsys, tmp_path, "n=total")
    assert "| 16,000,000 | 15,790,000 | tensorwise | 2 |" in output and "N: params_total." in output
    assert "ours params_nonembed" not in output


@pytest.mark.parametrize("ratios, cells", [
    ((5.02, 10.01, 20), ["5", "10", "20"]), ((5.3, 5.0), ["5.2"]), (range(1, 7), list("123456")),
    ([2**i for i in range(7)], None)])
def test_budgets_rounded_to_whole_steps_share_a_column(ratios, cells):
    rows = [{"N": 1000 + i, "recipe": "amax", "converted": [1, 1], "tokens_per_param": ratio, "bf16": estimate([0.1])}
            for i, ratio in enumerate(ratios)]
    text = grid({"loss": "bf16", "sizes": rows, "null": {"sizes": [], "same_seed": {"sizes": []}}})
    if cells is None:
        assert text == ""
        return
    head = [cell.strip() for cell in text.splitlines()[0].split("|")[4:-1]]
    assert [cell.removeprefix("at ").split(" ")[0] for cell in head] == cells
    assert all(len(line.split("|")) == 5 + len(cells) for line in text.splitlines())


def test_our_law_is_of_our_count_and_published_ones_of_all_parameters(tmp_path):
    """Effective parameters by hand: under a law's own A, alpha and count of N."""
    write_run(write_counted(tmp_path) / "again", params=16_000_000, params_nonembed=3_150_000, tokens=63_040_000, seed=1,
              loss=2.9, repeat=1, curve=False)
    result = analysed(tmp_path)
    assert "these 18 BF16 runs" in result["laws"]["own"]        # a repeat is no point of it
    row = next(row for row in result["sizes"] if row["N"] == 3_150_000)
    own, epoch = row["costs"]
    nats = row["nats"].mean
    assert own["effective_parameters"] == pytest.approx((1 + nats / (40.0 * 3_150_000**-0.35))**(-1 / 0.35), rel=0.02)
    assert epoch["effective_parameters"] == pytest.approx((1 + nats / (477.826 * 16e6**-0.347310))**(-1 / 0.347310))
    total = next(row for row in analysed(tmp_path, "total")["sizes"] if row["N"] == 16_000_000)
    assert total["costs"][-1]["effective_parameters"] == pytest.approx(epoch["effective_parameters"])


@pytest.mark.parametrize("convention, count", [("nonembed", 0), ("total", 1)])
def test_the_trend_over_size_is_over_the_count_that_is_asked_for(tmp_path, convention, count):
    result = analysed(write_counted(tmp_path), convention)
    own = {}                            # a trunk's mean gap
    for pair in result["pairs"]:
        own.setdefault((pair["fp8"][0], pair["fp8"].split("_")[2]), []).append(pair["gap_bf16"].percent)
    line = linregress([math.log10(SHAPES[name][count]) for name, _ in own], [np.mean(gaps) for gaps in own.values()])
    assert result["common"]["tensorwise"]["trend"].half == pytest.approx(student.ppf(0.975, len(own) - 2) * line.stderr, rel=1e-6)


def test_the_figures_left_side_is_of_our_count_and_its_right_of_all_parameters(tmp_path):
    figure = draw_precision(analysed(write_counted(tmp_path)))
    left, right = figure.axes[:2]
    x = next(one for one in left.containers if one.get_label() == "FP8 tensorwise").lines[0].get_xdata()
    assert 3e6 / 1.6 < min(x) < 3.2e6 and 12e6 < max(x) < 12.6e6 * 1.6
    beside = [line.get_xdata()[0] for line in right.lines if line.get_marker() == "s"]
    assert min(beside) == pytest.approx(16e6, rel=0.05) and max(beside) == pytest.approx(38.3e6, rel=0.05)
    assert "N = params_nonembed, right params_total, which the laws count" in said(figure)
    assert left.get_xlabel() == "non-embedding parameters N" and right.get_xlabel() == "parameters N, all"


# --------------------------------------------------------------------------------------------------- published results


def test_results_come_back_from_their_file_as_they_were(tmp_path, capsys, undrawn):
    write_null(tmp_path)
    output = printed(capsys, tmp_path)
    assert tables(read_result(tmp_path / "law/precision.json")) == output.split("\n\npair.png is not drawn")[0]


def test_published_runs_without_their_plain_logs_give_the_same_result(tmp_path, capsys, undrawn):
    for name, recipe in (("bf16", "bf16"), ("fp8", "tensorwise")):
        write_run(tmp_path / name, recipe=recipe, gap=0.01 * (name == "fp8"))
    before = printed(capsys, tmp_path)
    for log in tmp_path.glob("*/metrics.jsonl"):
        (log.parent / "metrics.jsonl.gz").write_bytes(gzip.compress(log.read_bytes(), mtime=0))
        log.unlink()
    assert printed(capsys, tmp_path) == before and "pair.png is not drawn" not in before


@pytest.mark.parametrize("content, sentence", [
    ("[]", "expected an object"), ("{", "not valid JSON"), ("{}", "lacks 'conventions'")])
def test_a_damaged_result_is_a_sentence(tmp_path, content, sentence):
    (tmp_path / "precision.json").write_text(content)
    with pytest.raises(precision.UserError, match=sentence):
        read_result(tmp_path / "precision.json")
