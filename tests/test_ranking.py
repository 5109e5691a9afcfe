"""scaling/ranking.py: the rule for the best FP8 recipe, against differences counted by hand."""

import json
import math

import pytest
from scaling_runs import write_run
from scipy.stats import ttest_1samp

from runtime.cli import UserError
from scaling import precision
from scaling.pairs import pairs
from scaling.precision import analyse, draw_precision, ranking, tables
from scaling.records import read_runs

LOSS = 2.0
SEEDS, SIZES = (1, 2), (40_000, 90_000)
NOISE = {(40_000, 1): 0.001, (40_000, 2): -0.002, (90_000, 1): 0.0015, (90_000, 2): -0.0004}     # nats, the BF16 run's own
OWN = {"a": (1, -1, 1, -1), "b": (1, 1, -1, -1), "c": (1, -1, -1, 1)}       # nats / 10,000, of each recipe and cell
GPU = "NVIDIA H100 80GB HBM3"


def write_cell(folder, recipe, N, seed, gap=0.0, ratio=20, speed=1000.0, linears=8, device=GPU, **changes):
    """A finished run; its gap to BF16 in nats."""
    write_run(folder / f"{recipe}_{N}_{seed}_{ratio}", recipe=recipe, params=N, tokens=ratio * N, seed=seed, loss=LOSS, gap=gap,
              device=device, tok_per_s_median=speed, curve=False, precision={
                  "recipe": recipe, "compile": True, "layers_converted": [f"layers.{i}" for i in range(linears)],
                  "layers_skipped": {}}, **changes)


def write_study(folder, recipes, sizes=SIZES, seeds=SEEDS, ratios=(20,), **changes):
    """recipes: name -> (mean gap in nats, tokens per second); BF16's own deviation is shared, each recipe adds its own."""
    for N in sizes:
        for seed in seeds:
            for ratio in ratios:
                write_cell(folder, "bf16", N, seed, ratio=ratio, **changes)
                for (recipe, (gap, speed)), own in zip(recipes.items(), OWN.values(), strict=False):
                    i = list(NOISE).index((N, seed)) if (N, seed) in NOISE else 0
                    write_cell(folder, recipe, N, seed, gap + NOISE.get((N, seed), 0) + 1e-4 * own[i], ratio, speed, **changes)
    return folder


def ranked(folder, arm="bf16"):
    records, _ = read_runs([folder])
    result = analyse(records, pairs(records)[0], arm, None)
    return result["ranking"], result


def names(found):
    return [row["recipe"] for row in found["recipes"]]


def drop(folder, pattern):
    for path in folder.glob(f"{pattern}/summary.json"):
        path.unlink()


def test_the_lowest_gap_is_first_and_the_paired_difference_decides_who_ties(tmp_path):
    write_study(tmp_path, {"rowwise": (0.002, 800), "tensorwise": (0.00205, 1100), "cscale": (0.02, 1300)})
    found, result = ranked(tmp_path)
    assert names(found) == ["rowwise", "tensorwise", "cscale"]
    assert [row["ties"] for row in found["recipes"]] == [True, True, False]
    percent = {recipe: [100 * gap for gap in gaps] for recipe, gaps in {
        "rowwise": [0.002 + noise + 1e-4 * own for noise, own in zip(NOISE.values(), OWN["a"], strict=True)],
        "tensorwise": [0.00205 + noise + 1e-4 * own for noise, own in zip(NOISE.values(), OWN["b"], strict=True)]}.items()}
    logs = {recipe: [100 * math.log1p(one / 100 / LOSS) for one in values] for recipe, values in percent.items()}
    theirs = [own - first for own, first in zip(logs["tensorwise"], logs["rowwise"], strict=True)]
    difference = found["recipes"][1]["difference"]
    interval = ttest_1samp(theirs, 0).confidence_interval()
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))
    # BF16's own deviations are a hundred times the difference: it is paired, or nothing could be told apart.
    assert difference.half < 0.2 * found["recipes"][0]["gap"].half
    assert found["best"] == "tensorwise" and "tensorwise is the fastest, 1.100 of BF16's tokens per second" in found["reason"]
    assert [row["throughput"]["ratio"] for row in found["recipes"]] == pytest.approx([0.8, 1.1, 1.3])
    assert [(cell["N"], cell["seed"]) for cell in found["cells"]] == list(NOISE)
    text = ranking(result)
    assert text.splitlines()[2].startswith("| rowwise | +0.10") and "| yes | 1.100 | 8 |" in text and "| no | 1.300 | 8 |" in text


def test_one_that_is_worse_by_more_than_chance_does_not_win_by_speed(tmp_path):
    found, _ = ranked(write_study(tmp_path, {"rowwise": (0.002, 700), "tensorwise": (0.006, 1400)}))
    assert found["best"] == "rowwise" and "higher by more than chance" in found["reason"]
    assert found["recipes"][1]["difference"].low > 0


def test_a_gain_is_lower_than_a_small_cost(tmp_path):
    found, _ = ranked(write_study(tmp_path, {"rowwise": (-0.03, 700), "tensorwise": (0.001, 1400)}))
    assert found["best"] == "rowwise" and names(found) == ["rowwise", "tensorwise"]


def test_without_a_meaningful_speed_the_lowest_gap_decides(tmp_path):
    write_study(tmp_path / "cpu", {"rowwise": (0.002, 800), "tensorwise": (0.00205, 1100)}, device="cpu EPYC")
    found, result = ranked(tmp_path / "cpu")
    assert found["best"] == "rowwise" and "a CPU has no FP8 units" in found["reason"] and "so the gap does" in found["reason"]
    assert "| no number |" in ranking(result)
    write_study(tmp_path / "mixed", {"rowwise": (0.002, 800)})
    for N, seed in NOISE:
        gap = 0.00205 + NOISE[N, seed] + 1e-4 * (seed - 1.5)
        write_cell(tmp_path / "mixed", "tensorwise", N, seed, gap, device="NVIDIA H200")
    found, _ = ranked(tmp_path / "mixed")
    assert found["recipes"][1]["ties"] and found["best"] == "rowwise" and "different devices" in found["reason"]


def test_one_pair_of_each_tells_nothing_apart(tmp_path):
    found, _ = ranked(write_study(tmp_path, {"rowwise": (0.002, 800), "tensorwise": (0.02, 1100)}, SIZES[:1], SEEDS[:1]))
    assert [row["ties"] for row in found["recipes"]] == [True, True] and found["best"] == "tensorwise"
    assert found["recipes"][1]["difference"].half is None and "over 1 pair at" in found["reason"]


def test_a_recipe_that_converts_nothing_somewhere_is_not_ranked(tmp_path):
    write_study(tmp_path, {"rowwise": (0.002, 800), "tensorwise": (0.003, 1100)}, ratios=(10, 20))
    for N, seed in NOISE:
        for ratio in (10, 20):
            write_cell(tmp_path, "auto", N, seed, -0.5, ratio, 2000.0, linears=0 if (N, seed, ratio) == (40_000, 2, 10) else 3)
    found, result = ranked(tmp_path)
    assert names(found) == ["rowwise", "tensorwise"]
    reason = "converts no Linear in 1 of 8 pairs (auto_40000_2_10): it is BF16 there"
    assert found["left_out"] == [{"recipe": "auto", "reason": reason}]
    assert "Not ranked: auto (converts no Linear in 1 of 8 pairs" in ranking(result)
    assert all(row["converted"] == [8, 8] for row in found["recipes"])
    write_cell(tmp_path / "more", "auto", 40_000, 2, -0.5, 10, 2000.0, linears=1)
    drop(tmp_path, "auto_40000_2_10")
    (tmp_path / "more/auto_40000_2_10").rename(tmp_path / "auto_again")
    write_cell(tmp_path / "more", "auto", 90_000, 2, -0.5, 20, 2000.0, linears=16)
    drop(tmp_path, "auto_90000_2_20")
    (tmp_path / "more/auto_90000_2_20").rename(tmp_path / "auto_once_more")
    found, result = ranked(tmp_path)
    assert found["best"] == "auto" and found["recipes"][0]["converted"] == [3, 16] and "| 3 to 16 |" in ranking(result)
    assert result["common"]["auto"]["converted"] == [1, 16]


def test_a_recipe_that_converts_nothing_anywhere_is_called_bf16(tmp_path):
    write_study(tmp_path, {"rowwise": (0.002, 800)})
    for N, seed in NOISE:
        write_cell(tmp_path, "auto", N, seed, 1e-5 * seed, linears=0)
    found, result = ranked(tmp_path)
    assert names(found) == ["rowwise"] and result["common"]["auto"]["verdict"] == "BF16 again: no Linear converted"
    text = tables(result)
    assert "| auto: BF16 again |" in text and "FP8 auto" not in text and "equivalent" not in text
    assert text.count("BF16 again: no Linear converted |") == 3         # in common, then at each of two sizes
    labels = [text.get_text() for text in draw_precision(result).legends[0].get_texts()]
    assert "auto: BF16 again" in labels and "FP8 rowwise" in labels
    drop(tmp_path, "rowwise_*")
    found, result = ranked(tmp_path)
    assert found["best"] is None and "Not ranked: auto (converts no Linear in 4 of 4 pairs" in tables(result)


def test_only_the_largest_budget_of_each_size_counts(tmp_path):
    """At ten tokens per parameter the order is the other way round."""
    write_study(tmp_path, {"rowwise": (0.002, 800), "tensorwise": (0.006, 1100)})
    write_study(tmp_path, {"rowwise": (0.9, 800), "tensorwise": (0.1, 1100)}, ratios=(10,))
    found, _ = ranked(tmp_path)
    assert found["best"] == "rowwise" and {cell["tokens_per_param"] for cell in found["cells"]} == {20}
    drop(tmp_path, "rowwise_40000_1_20")        # its branch at 10 is no substitute
    found, _ = ranked(tmp_path)
    assert names(found) == ["rowwise", "tensorwise"] and len(found["cells"]) == 3


def test_sizes_where_the_best_ran_alone_are_not_compared(tmp_path):
    """What the study is extended by after the choice must not undo it."""
    write_study(tmp_path, {"rowwise": (0.002, 800), "tensorwise": (0.006, 1100), "cscale": (0.02, 1300)})
    before, _ = ranked(tmp_path)
    write_study(tmp_path, {"rowwise": (0.5, 800)}, sizes=(200_000,))
    after, result = ranked(tmp_path)
    assert after == before and after["best"] == "rowwise" and result["common"]["rowwise"]["sizes"] == 3


def test_a_recipe_that_lacks_a_run_where_most_ran_is_out_until_it_is_there(tmp_path):
    write_study(tmp_path, {"rowwise": (0.002, 800), "tensorwise": (0.006, 1100), "cscale": (0.001, 1300)})
    drop(tmp_path, "cscale_90000_2_*")
    found, _ = ranked(tmp_path)
    assert names(found) == ["rowwise", "tensorwise"]
    assert found["left_out"] == [{"recipe": "cscale", "reason": "no finished pair at the largest budget of 90k seed 2"}]
    drop(tmp_path, "tensorwise_90000_*")        # now two of three lack it: it is not compared at all
    found, _ = ranked(tmp_path)
    assert names(found) == ["cscale", "rowwise"] and [row["recipe"] for row in found["left_out"]] == ["tensorwise"]


def test_recipes_that_share_nothing_are_not_ranked(tmp_path):
    write_study(tmp_path, {"rowwise": (0.002, 800)}, sizes=SIZES[:1])
    write_study(tmp_path, {"tensorwise": (0.002, 800)}, sizes=SIZES[1:])
    found, result = ranked(tmp_path)
    assert found["best"] is None and found["recipes"] == [] and len(found["left_out"]) == 2
    assert "none is ranked" in ranking(result) and "ran at no size and seed" in ranking(result)
    json.dumps(found, allow_nan=False)


def test_one_recipe_is_the_best_of_one_and_fills_no_screen(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(precision, "draw_precision", lambda result: "figure")
    monkeypatch.setattr(precision, "render", lambda figure, form: b"")
    write_study(tmp_path, {"rowwise": (0.002, 800)})
    found, _ = ranked(tmp_path)
    assert found["best"] == "rowwise" and "the only recipe" in found["reason"]
    assert precision.main([str(tmp_path)]) == 0
    assert "lowest gap first" not in capsys.readouterr().out
    write_study(tmp_path / "two", {"rowwise": (0.002, 800), "tensorwise": (0.006, 1100)})
    assert precision.main([str(tmp_path / "two")]) == 0
    assert "| recipe, lowest gap first |" in capsys.readouterr().out
    stored = json.loads((tmp_path / "two/law/precision.json").read_text())["ranking"]
    assert stored["best"] == "rowwise" and stored["recipes"][1]["difference"]["low"] > 0 and len(stored["cells"]) == 4


def test_the_judged_loss_is_the_one_that_ranks(tmp_path):
    """as_trained gaps are half as large again: the means say which one was taken."""
    write_study(tmp_path, {"rowwise": (0.002, 800), "tensorwise": (0.006, 1100)})
    plain, trained = (ranked(tmp_path, arm)[0]["recipes"][1]["gap"].mean for arm in ("bf16", "as_trained"))
    assert trained == pytest.approx(1.5 * plain, rel=1e-3)


@pytest.mark.parametrize("value", [..., None, 3, "attn"])
def test_a_summary_that_does_not_list_its_linears_is_a_sentence(tmp_path, value):
    write_study(tmp_path, {"rowwise": (0.002, 800)})
    path = tmp_path / "rowwise_40000_1_20/summary.json"
    summary = json.loads(path.read_text())
    summary["precision"]["layers_converted"] = value
    if value is ...:
        del summary["precision"]["layers_converted"]
    path.write_text(json.dumps(summary))
    with pytest.raises(UserError, match="expected a list of the Linears"):
        ranked(tmp_path)
