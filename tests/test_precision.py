"""scaling/precision.py's command: gaps over seeds beside the null, in words that follow the numbers."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from scaling_runs import cut, declare_branches, write_branches, write_ladder, write_run
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from scaling import precision
from scaling.pairs import EPOCH, over

BF16 = {1: 2.20, 2: 2.21, 3: 2.18}


@pytest.fixture(autouse=True)
def render_nothing(monkeypatch, request):
    """Drawing is test_gap_figure.py's business, and most of the time; one test here renders."""
    if "chosen" not in request.node.name:
        monkeypatch.setattr(precision, "draw_precision", lambda result: "figure")
        monkeypatch.setattr(precision, "render", lambda figure, form: b"")


def write_seeds(folder, gaps, recipe="tensorwise", **changes):
    """A BF16 run and its FP8 partner for each seed; gaps in nats."""
    for seed, loss in BF16.items():
        if not (folder / f"bf16_{seed}").exists():
            write_run(folder / f"bf16_{seed}", loss=loss, seed=seed, curve=False, **changes)
        write_run(folder / f"{recipe}_{seed}", recipe=recipe, loss=loss, gap=gaps[seed - 1], seed=seed, curve=False, **changes)
    return folder


def study(folder, percent=0.25, declared="2026-11-19T00:00:00Z"):
    """A study.json from before write_run's runs began (20 November)."""
    (folder / "study.json").write_text(json.dumps({"margin_percent": percent, "declared": declared}))
    return folder


def run(capsys, *arguments):
    """Standard output of a call that succeeds, precision.json as strict JSON."""
    assert precision.main([str(argument) for argument in arguments]) == 0
    output = capsys.readouterr().out
    folder = re.search(r"wrote (\S+)/precision\.json", output)[1]

    def refuse(name):
        raise AssertionError(f"{name} in precision.json")
    with open(f"{folder}/precision.json") as file:
        return output, json.load(file, parse_constant=refuse)


def row(output, name, first="N"):
    """Cells of the line that holds `name`, in the table whose first column is `first`."""
    table = output.split(f"| {first} |", 1)[1].split("\n\n")[0]
    return next([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if f"| {name} |" in line)


def common(output, recipe="tensorwise"):
    return row(output, recipe, "recipe")


# ------------------------------------------------------------------------------------------------------ statistics


def test_mean_interval_and_null_are_those_of_the_textbook(tmp_path, capsys):
    gaps = [0.004, 0.010, 0.007]
    output, result = run(capsys, write_seeds(tmp_path, gaps))
    percent = [100 * gap / loss for gap, loss in zip(gaps, BF16.values(), strict=True)]
    mean = sum(percent) / 3
    sd = math.sqrt(sum((p - mean) ** 2 for p in percent) / 2)
    half = 4.302652729911275 * sd / math.sqrt(3)        # Student's t, 97.5 %, two degrees of freedom
    cells = row(output, "tensorwise")
    assert cells[3:5] == ["3", f"{mean:+.3f} ± {half:.3f}"]
    logs = np.log(list(BF16.values()))
    null = 100 * math.sqrt(2) * logs.std(ddof=1)
    assert row(output, "bf16, two seeds")[3:6] == ["3 runs", f"SD {null:.3f}", f"SD {null:.3f}"]
    pooled = result["null"]["pooled"]
    assert (pooled["runs"], pooled["dof"]) == (3, 2) and pooled["sd_percent"] == pytest.approx(null)
    assert pooled["band"] == pytest.approx(4.302652729911275 * null)
    differences = result["null"]["sizes"][0]["differences"]
    assert [round(one["nats"], 6) for one in differences] == [0.01, -0.02, -0.03]    # all three, from two degrees of freedom


def test_the_common_gap_is_one_parameter_over_all_sizes(tmp_path, capsys):
    output, result = run(capsys, write_ladder(tmp_path, curve=False))
    deltas = []
    for letter in "abc":
        bf16, fp8 = (json.loads((tmp_path / f"{letter}_{arm}/summary.json").read_text()) for arm in ("bf16", "fp8"))
        deltas.append(100 * math.log(fp8["loss_bf16"] / bf16["loss_bf16"]))
    found, theirs = result["common"]["tensorwise"]["bf16"], ttest_1samp(deltas, 0).confidence_interval()
    assert (found["n"], found["mean"]) == (3, pytest.approx(np.mean(deltas)))
    assert (found["low"], found["high"]) == pytest.approx((theirs.low, theirs.high))
    assert common(output)[1:4] == [f"{found['mean']:+.3f} ± {found['high'] - found['mean']:.3f}", "3 of 3", "3"]
    trained = result["common"]["tensorwise"]["as_trained"]
    assert trained["mean"] == pytest.approx(1.5 * found["mean"], rel=0.01)


def test_branches_of_a_trunk_are_one_cluster_and_add_no_freedom_to_the_null(tmp_path, capsys):
    output, result = run(capsys, write_branches(tmp_path, sizes=(30_000, 60_000, 120_000), seeds=(1, 2), curve=False))
    assert common(output)[2] == "6 of 24"
    pooled = result["null"]["pooled"]
    assert (pooled["runs"], pooled["dof"]) == (24, 3)       # two seeds at each of three sizes: 3, not 12
    assert all(one["bf16"]["n"] == 2 for one in result["sizes"]) and len(result["sizes"]) == 12
    clusters = {}
    for pair in result["pairs"]:
        trunk = re.sub(r"_d\d+$", "", pair["fp8"])
        clusters.setdefault(trunk, []).append(100 * math.log1p(pair["gap_bf16"]["percent"] / 100))
    theirs = ttest_1samp([np.mean(own) for own in clusters.values()], 0).confidence_interval()
    found = result["common"]["tensorwise"]["bf16"]
    assert (found["low"], found["high"]) == pytest.approx((theirs.low, theirs.high))
    assert "own" in result["laws"]                          # four ratios a size: our own law is fitted
    again, _ = run(capsys, tmp_path)
    assert "skipped" not in again                           # the law folder that the first call left is no run


def fake_pair(percent, trunk):
    return SimpleNamespace(bf16=SimpleNamespace(trunk=f"{trunk}_bf16"), fp8=SimpleNamespace(trunk=f"{trunk}_fp8"),
                           in_bf16=SimpleNamespace(percent=percent))


def test_the_clustered_interval_covers_with_clusters_of_unequal_size():
    """95 % nominal over 1,500 studies of six trunks with one to four branches; the truth is 0.1 %."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(1500):
        found = [fake_pair(0.1 + shift + rng.normal(0, 0.02), i) for i, shift in enumerate(rng.normal(0, 0.1, 6))
                 for _ in range(1 + i % 4)]
        estimate = over(found, lambda pair: pair.in_bf16.percent)
        assert estimate.n == 6
        covered += estimate.low < 0.1 < estimate.high
    assert covered / 1500 == pytest.approx(0.95, abs=0.017)


def test_scratch_runs_at_several_ratios_are_all_independent(tmp_path, capsys):
    for ratio in (10, 20):
        for seed in (1, 2):
            for recipe, gap in (("bf16", 0.0), ("tensorwise", 0.01)):
                write_run(tmp_path / f"{recipe}_{ratio}_{seed}", recipe=recipe, gap=gap * (1 + seed / 5), seed=seed, curve=False,
                          params=30_000, tokens=ratio * 30_000, loss=2 - ratio / 100 + seed / 1000)
    output, result = run(capsys, tmp_path)
    assert common(output)[2] == "4 of 4" and result["null"]["pooled"]["dof"] == 2


# ----------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize("gaps, reading", [
    ([0.010, 0.011, 0.012], r"costs 0\.\d+ %"), ([-0.010, -0.011, -0.012], r"gains 0\.\d+ %"),
    ([-0.010, 0.011, 0.003], r"undecided: interval -\d\.\d+ to \+\d\.\d+, could not have seen less than \d(\.\d+)?"),
    ([0.0002, -0.0003, 0.0002], r"undecided: .*"),
])
def test_words_follow_numbers(tmp_path, capsys, gaps, reading):
    output, _ = run(capsys, write_seeds(tmp_path, gaps))
    assert re.fullmatch(reading, row(output, "tensorwise")[-1])
    assert "no loss" not in output and "No margin was declared" in output


def test_a_margin_declared_before_the_runs_makes_an_equivalence_test(tmp_path, capsys):
    output, result = run(capsys, study(write_seeds(tmp_path, [0.0002, -0.0003, 0.0002])))
    assert re.fullmatch(r"equivalent within ±0\.25 % \(TOST, p=[\d.e-]+\)", common(output)[4])
    assert result["margin"]["is_declared"] and "before the runs" in output
    output, result = run(capsys, tmp_path, "margin=0.5")
    assert "margin after the fact" in common(output)[4] and "±0.5 %" in output and not result["margin"]["is_declared"]
    output, result = run(capsys, study(tmp_path, declared="2026-11-20T09:00:01Z"))
    assert "margin after the fact" in common(output)[4] and "after 6 of 6 runs had begun" in output


def test_plans_for_the_margin_are_printed(tmp_path, capsys):
    output, result = run(capsys, study(write_seeds(tmp_path, [-0.010, 0.011, 0.003])))
    one = result["common"]["tensorwise"]
    assert common(output)[6:] == [str(one["pairs_to_see_margin"]), str(one["pairs_to_show_margin"])]
    assert one["pairs_to_see_margin"] > 3 and one["smallest_seen"] > 0.5


def test_one_pair_has_no_interval_and_one_seed_no_null(tmp_path, capsys):
    write_run(tmp_path / "a", seed=1, curve=False)
    write_run(tmp_path / "b", recipe="amax", gap=0.01, seed=1, curve=False)
    output, result = run(capsys, study(tmp_path))
    assert row(output, "amax")[-1] == "one pair: no interval"
    assert row(output, "bf16")[-1] == "no null: one BF16 seed"
    assert result["null"] == {"sizes": [], "pooled": None, "same_seed": {"sizes": [], "equal": 0, "pooled": None}}
    assert result["sizes"][0]["tost_p"] is None and result["common"]["amax"]["trend"]["slope"] is None
    assert "pair.png is not drawn" in output and not (tmp_path / "law/pair.png").exists()


def test_losses_that_are_equal_to_the_last_bit_are_no_evidence(tmp_path, capsys):
    output, _ = run(capsys, study(write_seeds(tmp_path, [0.0, 0.0, 0.0])))
    assert "copies" in common(output)[4]


def test_without_a_pair_it_says_so(tmp_path, capsys):
    for seed, loss in BF16.items():
        write_run(tmp_path / f"bf16_{seed}", loss=loss, seed=seed, curve=False)
    output, result = run(capsys, tmp_path)
    assert output.startswith("No BF16/FP8 pair") and result["pairs"] == [] and "unpaired bf16_1" in output
    assert row(output, "bf16, two seeds")[3] == "3 runs"
    assert sorted(path.name for path in (tmp_path / "law").iterdir()) == ["precision.json"]
    assert output.endswith(f"wrote {tmp_path}/law/precision.json\n")
    for name in ("precision.png", "pair.svg", "figure.png"):
        (tmp_path / "law" / name).touch()
    output, result = run(capsys, tmp_path)
    assert f"removed precision.png, pair.svg of an earlier call from {tmp_path}/law\n" in output
    assert sorted(path.name for path in (tmp_path / "law").iterdir()) == ["figure.png", "precision.json"]
    output, result = run(capsys, tmp_path / "bf16_1", f"out={tmp_path}/one")
    assert "|" not in output and "removed" not in output        # no table without a row


def test_several_recipes_are_lines_of_their_own(tmp_path, capsys):
    write_seeds(tmp_path, [0.01, 0.011, 0.012])
    write_seeds(tmp_path, [0.02, 0.021, 0.025], "cscale")
    output, result = run(capsys, tmp_path)
    assert row(output, "cscale")[3] == row(output, "tensorwise")[3] == "3"
    assert list(result["common"]) == ["cscale", "tensorwise"] and len(result["pairs"]) == 6


# ----------------------------------------------------------------------------------------------------------- costs


def test_on_a_cpu_there_is_no_speed_up_and_on_a_gpu_there_is(tmp_path, capsys):
    output, result = run(capsys, write_seeds(tmp_path / "cpu", [0.004, 0.010, 0.007]))
    assert "a CPU has no FP8 units" in output and "means nothing (CPU)" in output
    assert all(cost["speedup"] is None for cost in result["sizes"][0]["costs"])
    assert "factor of ten" in output and "No law of our own" in output
    output, result = run(capsys, write_seeds(tmp_path / "gpu", [0.004, 0.010, 0.007], device="NVIDIA H100",
                                             params=1_500_000_000, tok_per_s_median=1.0))
    size = result["sizes"][0]
    cost = next(one for one in size["costs"] if one["law"] == "Epoch")
    r = EPOCH.extra_tokens(0.007, 30e9)
    assert cost["extra_tokens"] == pytest.approx(r) and cost["speedup"] == pytest.approx(1 / r)     # equal throughput
    half = student.ppf(0.975, 2) * 0.003 / math.sqrt(3) / EPOCH.slope(30e9)
    assert np.log(cost["speedup_ci95"]) == pytest.approx([-math.log(r) - half, -math.log(r) + half], rel=1e-5)
    assert "factor of ten" not in output


def test_a_gap_beyond_the_law_is_none_with_the_reason(tmp_path, capsys):
    output, result = run(capsys, write_seeds(tmp_path, [1.0, 0.9, 1.1], device="NVIDIA H100", params=1_500_000_000))
    cost = result["sizes"][0]["costs"][0]
    assert cost["extra_tokens"] is cost["speedup"] is None and "no number of tokens makes up 1.0" in cost["reason"]
    assert "| none |" in output and "no number of tokens makes up 1.0" in output and "nan" not in output.lower()


def test_without_a_law_of_our_own_the_runs_of_one_size_say_what_tokens_gain(tmp_path, capsys):
    for ratio, loss in ((10, 2.2), (20, 2.0)):
        for recipe in ("bf16", "tensorwise"):
            write_run(tmp_path / f"{recipe}_{ratio}", recipe=recipe, gap=0.01 * (recipe != "bf16"), params=30_000,
                      tokens=ratio * 30_000, loss=loss, curve=False)
    for recipe in ("bf16", "tensorwise"):
        write_run(tmp_path / f"{recipe}_other", recipe=recipe, gap=0.01 * (recipe != "bf16"), params=60_000, loss=1.9,
                  curve=False)
    output, result = run(capsys, tmp_path)
    beta = math.log(2.2 / 2.0) / math.log(2)
    one, epoch = result["sizes"][1]["costs"]
    assert one["law"] == "own, at this N" and epoch["law"] == "Epoch"
    assert one["extra_tokens"] == pytest.approx((1 - 0.01 / 2.0) ** (-1 / beta)) and one["effective_parameters"] is None
    assert [cost["law"] for cost in result["sizes"][2]["costs"]] == ["Epoch"]       # one token count at that size
    assert "| 60k | 1.2M | tensorwise | none | none | none | +" in output
    assert list(result["laws"])[0] == "own, at this N"


def test_the_arm_that_is_judged_can_be_chosen(tmp_path, capsys):
    _, plain = run(capsys, write_seeds(tmp_path, [0.004, 0.010, 0.007]))
    output, trained = run(capsys, tmp_path, "loss=as_trained", "--out", tmp_path / "elsewhere")
    assert trained["loss"] == "as_trained" and "common gap as trained" in output
    assert trained["sizes"][0]["nats"]["mean"] == pytest.approx(1.5 * plain["sizes"][0]["nats"]["mean"])
    assert (tmp_path / "elsewhere/precision.png").stat().st_size > 10_000


# -------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("arguments, sentence", [
    (["{runs}/nowhere"], "does not exist"), (["{runs}", "margn=1"], "did you mean margin?"),
    (["{runs}", "--verbose"], "there are out, loss, margin"), (["{runs}", "loss=fp8"], "must be bf16 or as_trained"),
    (["{runs}", "n=matmul"], "must be total or nonembed"),
    (["{runs}", "margin=0"], "is no margin"), (["{runs}", "--margin"], "lacks its value"),
    (["{runs}", "out="], "lacks its value"), (["{runs}/bf16_1", "{runs}/tensorwise_1"], "out=DIR is missing"),
    (["{runs}", "margin=1", "--margin", "2"], "margin is given twice: '1' and '2'"),
    (["{runs}", "--out", "--loss=bf16"], "--out lacks its value"),
    (["{runs}", "--margin", "--out", "x"], "--margin lacks its value"),
    (["{runs}/bf16_1"], "out=DIR is missing"), (["out=x"], "no runs given"), (["{runs}", "out={runs}/study.json"], "is a file"),
])
def test_mistakes_are_a_sentence(tmp_path, capsys, arguments, sentence):
    study(write_seeds(tmp_path, [0.004, 0.010, 0.007]))
    before = sorted(tmp_path.rglob("*"))
    assert precision.main([word.format(runs=tmp_path) for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.startswith("scaling/precision.py: ") and out == "" and "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage, sentence", [
    (lambda runs: (runs / "study.json").write_text("{"), "study.json is not valid JSON"),
    (lambda runs: (runs / "study.json").write_text('{"margin_percent": 1}'), "study.json cannot be read (KeyError"),
    (lambda runs: write_run(runs / "again", loss=2.2, seed=1, recipe="tensorwise", curve=False), "given twice"),
    (lambda runs: (runs / "bf16_2/val_losses.npz").unlink(), "delete summary.json and repeat the run's command"),
    (lambda runs: (runs / "bf16_2/val_losses.npz").write_bytes(b"PK"), "cannot be read"),
    (lambda runs: (runs / "tensorwise_1/summary.json").write_text("{}"), "schema_version"),
    (lambda runs: write_run(runs / "other", params=50_000, val_sha256="w" * 64), "val_sha256"),
    (lambda runs: write_run(runs / "null", loss=2.2, seed=9, per_source=5, curve=False), "same validation sequences"),
])
def test_damaged_runs_are_a_sentence_and_nothing_is_written(tmp_path, capsys, damage, sentence):
    damage(study(write_seeds(tmp_path, [0.004, 0.010, 0.007])))
    assert precision.main([str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "law").exists()


def masked(folder, tokens):
    """The run's val_losses.npz with other n_tokens in its first source; the losses of its targets follow, the rest is kept."""
    with np.load(folder / "val_losses.npz") as file:
        losses = dict(file)
    first = losses["source"] == 0
    for arm in ("as_trained", "bf16"):
        level = losses[arm][first].sum() / losses["n_tokens"][first].sum()
        losses[arm][first] = level * np.array(tokens)
    losses["n_tokens"][first] = tokens
    np.savez(folder / "val_losses.npz", **losses)


def test_a_sequence_may_be_context_alone(tmp_path, capsys):
    """Instruction data: sequences differ in their targets, a window of prompt has none; the loss is the same by construction."""
    _, plain = run(capsys, write_seeds(tmp_path, [0.004, 0.010, 0.007]))
    for folder in tmp_path.glob("*_[123]"):
        masked(folder, [0, 0, 5, 128, 7, 0, 64, 1, 2, 3, 0, 90])
    _, result = run(capsys, tmp_path)
    for before, after in zip(plain["pairs"], result["pairs"], strict=True):
        assert after["gap_bf16"]["nats"] == pytest.approx(before["gap_bf16"]["nats"]) and after["gap_bf16"]["se"] > 0
    for tokens, sentence in (([-1] + [9] * 11, "fewer tokens than none"), ([0] * 12, "a source has no sequence with a token")):
        masked(tmp_path / "bf16_1", tokens)
        assert precision.main([str(tmp_path)]) == 2
        assert sentence in capsys.readouterr().err


def test_runs_that_stopped_early_are_left_out(tmp_path, capsys):
    write_run(tmp_path / "a", status="diverged", curve=False)
    assert precision.main([str(tmp_path)]) == 2
    assert "no run is left to compare" in capsys.readouterr().err


def test_help_lists_the_options(capsys):
    assert precision.main(["--help"]) == 0 and precision.main([]) == 2
    output = capsys.readouterr().out
    assert "margin" in output and "loss" in output and "out" in output


@pytest.mark.parametrize("names", ["*", "*_tensorwise_1_*", "*_bf16_*", "*_d5"])
def test_branches_that_were_trained_from_scratch_are_no_pairs_of_their_own(tmp_path, capsys, names):
    """Without their trunk's checkpoint they share its seed, data and schedule all the same."""
    folder = declare_branches(write_branches(tmp_path, sizes=(30_000, 60_000), seeds=(1, 2), curve=False))
    _, branched = run(capsys, folder)
    cut(folder, names)
    _, result = run(capsys, folder)
    for key in ("common", "null", "sizes", "ranking"):
        assert result[key] == branched[key]
    assert result["common"]["tensorwise"]["bf16"]["n"] == 4 and result["common"]["tensorwise"]["pairs"] == 16
