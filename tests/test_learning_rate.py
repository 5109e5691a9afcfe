"""scaling/learning_rate.py: the optimum of a sweep with a known one, refused where the rates do not hold it."""

import json
import math
import re
import subprocess
import sys

import pytest
from scaling_runs import write_run

from scaling import learning_rate
from scaling.learning_rate import main, tables
from tests.conftest import ROOT

RATES = (0.002, 0.004, 0.008, 0.016, 0.032)


@pytest.fixture(autouse=True)
def render_nothing(monkeypatch, request):
    """Rendering is most of the time; the tests named so draw."""
    if "drawn" not in request.node.name:
        monkeypatch.setattr(learning_rate, "draw_rates", lambda found, name: None)
        monkeypatch.setattr("scaling.figures.render", lambda figure, form: b"")


def known(lr, best=0.0061, lowest=3.2, curvature=0.01):
    """A loss of which ln is a parabola in ln lr."""
    return lowest * math.exp(curvature * math.log(lr / best) ** 2)


def write_trial(folder, lr, loss=None, seed=1337, params=38_912, **changes):
    """A finished run named by its rate and seed."""
    shape = {"n_layer": 4, "n_embd": params // 100, "n_head": 2, "n_ffn": 704, "n_ctx": 128, "steps": 981, "warmup_steps": 49}
    shared = {"data_sha256": "d" * 64, "tokens_per_step": 65536, "optimizer": "AdamW", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
              "weight_decay": 0.1, "clip": 1.0, "schedule": "wsd", "skipped_steps": 0, "rollbacks": 0}
    name = f"p{params}_lr{lr:g}_s{seed}"
    write_run(folder / name, params=params, loss=known(lr) if loss is None else loss, seed=seed, curve=False,
              **{"lr_peak": lr, **shared, **shape, **changes})
    return folder / name


def write_sweep(folder, rates=RATES, **changes):
    for lr in rates:
        write_trial(folder, lr, **changes)
    return folder


def ask(capsys, *arguments, code=0):
    """(stdout, learning_rate.json) of a call that ends in `code`; the JSON is strict."""
    assert main([str(argument) for argument in arguments]) == code
    output = capsys.readouterr().out
    with open(re.search(r"wrote (\S+learning_rate\.json)", output)[1]) as file:
        return output, json.load(file, parse_constant=lambda name: pytest.fail(name))


def refused(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("scaling/learning_rate.py: ")
    return said.err


# ---------------------------------------------------------------------------------------------------------- the optimum


@pytest.mark.parametrize("best", [0.0031, 0.0061, 0.008, 0.0158])
def test_a_known_optimum_is_found_with_its_loss_and_its_curvature(tmp_path, capsys, best):
    for lr in RATES:
        write_trial(tmp_path, lr, loss=known(lr, best))
    output, found = ask(capsys, tmp_path)
    optimum = found["sweeps"][0]["optimum"]
    assert optimum["lr"] == pytest.approx(best, rel=1e-9)
    assert optimum["loss"] == pytest.approx(3.2, rel=1e-12)
    assert optimum["factor_2_percent"] == pytest.approx(100 * math.expm1(0.01 * math.log(2) ** 2))
    low, high = optimum["flat"]     # by the definition: there the loss is 0.1 % higher
    assert known(low, best) / 3.2 == pytest.approx(math.exp(0.001)) == known(high, best) / 3.2 and low < best < high
    assert all(value == pytest.approx(best) for value in optimum["others"].values()) and optimum["others"]
    assert f"Optimum {best:.3g}" in output


def test_where_the_curve_is_no_parabola_the_wider_fit_says_how_well_the_optimum_is_known(tmp_path, capsys):
    for lr in RATES:
        write_trial(tmp_path, lr, loss=known(lr, 0.007) + 0.003 * math.log(lr / 0.007) ** 3 * (lr > 0.007))
    output, found = ask(capsys, tmp_path)
    optimum = found["sweeps"][0]["optimum"]
    before, lowest, after = (math.log(row["loss"]) for row in found["sweeps"][0]["rows"][1:4])
    vertex = 0.5 * (before - after) / (before - 2 * lowest + after)     # in steps of ln 2 from the middle one of three
    assert optimum["lr"] == pytest.approx(0.008 * 2**vertex) and abs(optimum["others"]["5 rates"] / optimum["lr"] - 1) > 0.02
    assert "; 5 rates: " in output


def test_a_loss_far_above_the_lowest_does_not_bend_the_wider_fit(tmp_path, capsys):
    for lr in RATES[:4]:
        write_trial(tmp_path, lr)
    write_trial(tmp_path, 0.032, loss=7.9)      # learned nothing, though it finished
    _, found = ask(capsys, tmp_path)
    assert found["sweeps"][0]["optimum"]["others"] == {"4 rates": pytest.approx(0.0061)}


def test_rates_that_are_unevenly_spaced_are_fitted_where_they_are(tmp_path, capsys):
    _, found = ask(capsys, write_sweep(tmp_path, (0.001, 0.005, 0.0066, 0.03)))
    assert found["base"]["lr"] == pytest.approx(0.0061)
    assert found["sweeps"][0]["optimum"]["bracket"] == [0.005, 0.03]        # 0.0066 is the lowest


def test_seeds_are_averaged_and_each_alone_is_told(tmp_path, capsys):
    for seed, best in ((1, 0.005), (2, 0.0075)):
        for lr in RATES:
            write_trial(tmp_path, lr, seed=seed, loss=known(lr, best, lowest=3.2 + 0.1 * seed))
    output, found = ask(capsys, tmp_path)
    optimum = found["sweeps"][0]["optimum"]
    assert optimum["lr"] == pytest.approx(math.sqrt(0.005 * 0.0075))        # of parabolas of one curvature
    assert optimum["others"]["seed 1 alone"] is None and "seed 1 alone: not bracketed" in output     # 0.004 is its lowest
    assert optimum["others"]["seed 2 alone"] == pytest.approx(0.0075)
    assert optimum["loss"] == pytest.approx(math.sqrt(3.3 * 3.4) * math.exp(0.01 * math.log(0.0075 / 0.005) ** 2 / 4))
    assert "2 seeds" in output and len(found["sweeps"][0]["rows"]) == 5


def test_a_seed_that_some_rate_lacks_is_left_out_of_the_means(tmp_path, capsys):
    write_sweep(tmp_path)
    write_trial(tmp_path, 0.016, seed=2, loss=2.0)      # averaged in, it would move the optimum
    _, found = ask(capsys, tmp_path)
    assert found["sweeps"][0]["seeds"] == [1337] and found["base"]["lr"] == pytest.approx(0.0061)


def test_without_a_common_seed_nothing_is_compared(tmp_path, capsys):
    for seed, lr in enumerate(RATES):
        write_trial(tmp_path, lr, seed=seed)
    output, found = ask(capsys, tmp_path, code=3)
    assert "no seed has finished at every rate" in output and found["base"] is None


# --------------------------------------------------------------------------------------------------------- not bracketed


@pytest.mark.parametrize("rates, best, end, remedy", [
    ((0.002, 0.004, 0.008), 0.02, "0.008, the highest", "0.016 and 0.032"),
    ((0.002, 0.004, 0.008), 0.001, "0.002, the lowest", "0.0005 and 0.001"),
    ((0.01, 0.03), 0.05, "0.03, the highest", "0.09 and 0.27"),
    ((0.01,), 0.01, "0.01, the only", "0.0025 and 0.005 and 0.02 and 0.04"),
])
def test_an_optimum_at_an_end_is_refused_with_the_rates_to_add(tmp_path, capsys, rates, best, end, remedy):
    for lr in rates:
        write_trial(tmp_path, lr, loss=known(lr, best))
    output, found = ask(capsys, tmp_path, code=3)
    assert f"No optimum: the loss is lowest at {end} of the rates that have one, " in output
    assert f"so the optimum is not bracketed: add {remedy}." in output
    assert found["base"] is None and found["rates"] == [] and found["sweeps"][0]["optimum"] is None
    assert "Peak rates" not in output


def test_a_diverged_run_is_shown_and_not_fitted(tmp_path, capsys):
    write_sweep(tmp_path, RATES[:4])
    write_trial(tmp_path, 0.032, status="diverged", loss=math.nan, skipped_steps=31, rollbacks=3)
    output, found = ask(capsys, tmp_path)
    assert "| 0.032 |  |  | 31 | 3 | diverged |" in output
    assert found["base"]["lr"] == pytest.approx(0.0061) and found["sweeps"][0]["rows"][-1]["loss"] is None


def test_a_rate_at_which_one_of_two_seeds_diverged_is_not_fitted(tmp_path, capsys):
    for seed in (1, 2):
        write_sweep(tmp_path, RATES[:4], seed=seed)
    write_trial(tmp_path, 0.032, seed=1, loss=3.0)
    write_trial(tmp_path, 0.032, seed=2, status="diverged")
    _, found = ask(capsys, tmp_path)
    assert found["sweeps"][0]["rows"][-1]["status"] == "diverged" and found["base"]["lr"] == pytest.approx(0.0061)


def test_next_to_a_diverged_rate_the_one_between_is_asked_for(tmp_path, capsys):
    for lr in RATES[:3]:
        write_trial(tmp_path, lr, loss=known(lr, 0.011))
    write_trial(tmp_path, 0.016, status="diverged")
    output, _ = ask(capsys, tmp_path, code=3)
    assert "at 0.008, the highest of the rates that have one, so the optimum is not bracketed: add 0.011." in output


def test_below_the_lowest_sound_rate_the_nearest_diverged_one_counts(tmp_path, capsys):
    for lr in RATES[2:]:
        write_trial(tmp_path, lr, loss=known(lr, 0.006))
    for lr in RATES[:2]:
        write_trial(tmp_path, lr, status="diverged")
    assert "at 0.008, the lowest of the rates that have one, so the optimum is not bracketed: add 0.0057." in ask(
        capsys, tmp_path, code=3)[0]


def test_a_sweep_in_which_all_diverged_asks_for_lower_rates(tmp_path, capsys):
    for lr in (0.1, 0.2):
        write_trial(tmp_path, lr, status="diverged")
    output, _ = ask(capsys, tmp_path, code=3)
    assert "No optimum: every rate diverged: add 0.025 and 0.05." in output


def declare(folder, rates, **changes):
    rows = [{"run": f"p38912_lr{lr:g}_s1337", "lr": lr, "seed": 1337, "repeat": 0, "tokens": 20 * 38_912,
             "params_nonembed": json.loads(next(folder.glob("*/summary.json")).read_text())["params_nonembed"], **changes}
            for lr in rates]
    (folder / "study.json").write_text(json.dumps({"runs": rows, "params": "nonembed"}))


def test_a_cut_sweep_names_the_run_to_finish(tmp_path, capsys):
    for lr in RATES[:3]:
        write_trial(tmp_path, lr, loss=known(lr, 0.02))
    declare(tmp_path, RATES)
    output, found = ask(capsys, tmp_path, code=3)
    assert "not bracketed: finish p38912_lr0.016_s1337" in output
    assert "| 0.032 |  |  | 0 | 0 | unfinished |" in output and len(found["sweeps"]) == 1


def test_a_second_seed_that_has_not_finished_costs_nothing(tmp_path, capsys):
    write_sweep(tmp_path)
    write_trial(tmp_path, 0.008, seed=2)
    declare(tmp_path, RATES[:2], seed=2)
    rows = json.loads((tmp_path / "study.json").read_text())["runs"]
    (tmp_path / "study.json").write_text(json.dumps({"runs": [{**row, "run": row["run"].replace("1337", "2")} for row in rows]}))
    output, found = ask(capsys, tmp_path)
    assert found["sweeps"][0]["seeds"] == [1337] and found["base"]["lr"] == pytest.approx(0.0061)
    assert [row["status"] for row in found["sweeps"][0]["rows"]] == ["unfinished", "unfinished", "ok", "ok", "ok"]
    assert f"| 0.002 | {known(0.002):.4f} |" in output


def test_of_a_size_that_has_not_begun_the_first_run_is_named(tmp_path, capsys):
    write_sweep(tmp_path)
    declare(tmp_path, RATES[:2], params_nonembed=999_999)
    rows = json.loads((tmp_path / "study.json").read_text())["runs"]
    (tmp_path / "study.json").write_text(json.dumps({"runs": [{**row, "run": f"b_lr{row['lr']:g}"} for row in rows]}))
    output, found = ask(capsys, tmp_path)
    assert "No optimum: no run has finished: finish b_lr0.002." in output and found["base"]["lr"] == pytest.approx(0.0061)


@pytest.mark.parametrize("change", [{"lr": None}, {"repeat": 1}])
def test_declared_runs_without_a_rate_of_their_own_are_no_part_of_the_sweep(tmp_path, capsys, change):
    write_sweep(tmp_path)
    declare(tmp_path, RATES, **{**change, "run": "another"})
    output, found = ask(capsys, tmp_path)
    assert [row["lr"] for row in found["sweeps"][0]["rows"]] == list(RATES) and "unfinished" not in output


def test_a_run_that_stopped_itself_has_diverged(tmp_path, capsys):
    """Its rollbacks used up, train.py leaves a diagnosis.json and no summary.json."""
    write_sweep(tmp_path, RATES[:4])
    (tmp_path / "p38912_lr0.032_s1337").mkdir()
    (tmp_path / "p38912_lr0.032_s1337/diagnosis.json").write_text("{}")
    declare(tmp_path, RATES)
    output, found = ask(capsys, tmp_path)
    assert "| 0.032 |  |  | 0 | 0 | diverged |" in output and found["base"]["lr"] == pytest.approx(0.0061)


def test_an_unfinished_run_that_nobody_declared_is_named(tmp_path, capsys):
    write_sweep(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    assert "left out other: it has not finished" in ask(capsys, tmp_path)[0]


# ------------------------------------------------------------------------------------------------------ the other sizes


def test_other_sizes_get_the_rates_of_the_rule(tmp_path, capsys):
    _, found = ask(capsys, write_sweep(tmp_path), "at=1M,9000000")
    rule, growing = learning_rate.RULES
    N = found["base"]["N"]
    assert [row["N"] for row in found["rates"]] == [N, 1e6, 9e6]
    for row in found["rates"]:
        assert row[rule] == pytest.approx(0.0061 * math.sqrt(N / row["N"]))
        assert row[growing] == pytest.approx(0.0061 * (N / row["N"]) ** 0.25)


def test_a_second_size_is_held_against_the_rule(tmp_path, capsys):
    write_sweep(tmp_path)
    for lr in RATES:
        write_trial(tmp_path, lr, params=155_648, loss=known(lr, 0.0042))
    output, found = ask(capsys, tmp_path)
    small, large = (sweep["N"] for sweep in found["sweeps"])
    check, = found["checks"]
    assert check["N"] == large and check["lr"] == pytest.approx(0.0042)
    assert check["exponent"] == pytest.approx(math.log(0.0042 / 0.0061) / math.log(large / small))
    assert f"an exponent of {check['exponent']:+.2f}" in output


def test_of_one_size_the_longest_runs_set_the_rate(tmp_path, capsys):
    for tokens, best in ((400_000, 0.009), (800_000, 0.0061)):
        for lr in RATES:
            write_trial(tmp_path / str(tokens), lr, tokens=tokens, loss=known(lr, best), steps=tokens // 1000)
            (tmp_path / str(tokens) / f"p38912_lr{lr:g}_s1337").rename(tmp_path / f"{tokens}_{lr:g}")
        (tmp_path / str(tokens)).rmdir()
    output, found = ask(capsys, tmp_path)
    assert len(found["sweeps"]) == 2 and found["base"]["lr"] == pytest.approx(0.0061) and found["base"]["tokens"] == 800_000
    assert found["checks"] == []


def test_the_rule_of_the_configs_is_the_rule_that_is_printed():
    """configs/h100.py takes its rates from a rate of the smallest size by the same exponent."""
    from configs import h100
    exponent = next(iter(learning_rate.RULES.values()))
    for N in (h100.NONEMBED, 6_491_520, 12_849_664, 25_402_240):
        assert h100.learning_rate(N) == pytest.approx(h100.LR * (N / h100.NONEMBED) ** exponent, abs=1e-6)


def test_the_sweep_of_the_repository_can_be_expanded():
    from scaling.study import expand, load_study
    rows = expand(load_study(ROOT / "configs/study_h100_lr.py"))
    assert [row.lr for row in rows] == list(RATES) and {row.steps for row in rows} == {981}
    assert all(row.parent is None and row.recipe == "bf16" for row in rows)


# ------------------------------------------------------------------------------------------------------- mistakes, files


@pytest.mark.parametrize("change, said", [
    ({"weight_decay": 0.2}, "differ in weight_decay"), ({"clip": 0.5}, "differ in clip"),
    ({"warmup_steps": 10}, "differ in warmup_steps"), ({"tokens_per_step": 32768}, "differ in tokens_per_step"),
    ({"data_sha256": "e" * 64}, "differ in data_sha256"), ({"val_sha256": "e" * 64}, "differ in val_sha256"),
    ({"precision": {"recipe": "tensorwise", "compile": False}}, "differ in precision"),
    ({"sources": {"docs": {"weight": 1.0, "loss_bf16": 2.0}}}, "differ in sources"),
    ({"lr_peak": ...}, "lr_peak is None; expected a finite number above zero"), ({"lr_peak": "high"}, "lr_peak is 'high'"),
    ({"lr_peak": math.nan}, "lr_peak is nan"), ({"lr_peak": 10**400}, "lr_peak is 1000"),
    ({"loss_bf16": math.nan}, "loss_bf16 is nan"), ({"loss_bf16": True}, "loss_bf16 is True"),
    ({"params_nonembed": 0}, "params_nonembed is 0"), ({"status": 3}, "status is 3"), ({"seed": -1}, "seed is -1"),
    ({"schema_version": 2}, "schema_version is 2"),
])
def test_runs_that_are_no_sweep_are_refused_with_the_key(tmp_path, capsys, change, said):
    write_sweep(tmp_path, RATES[:3])
    write_trial(tmp_path, 0.016, **change)
    assert said in refused(capsys, tmp_path)
    assert not (tmp_path / "law").exists()


def test_one_rate_twice_is_refused(tmp_path, capsys):
    write_sweep(tmp_path)
    write_trial(tmp_path / "b", 0.004)
    (tmp_path / "b/p38912_lr0.004_s1337").rename(tmp_path / "again")
    assert "have the same size, tokens, lr_peak and seed: leave one out" in refused(capsys, tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00\xff"])
def test_a_torn_summary_is_refused_by_name(tmp_path, capsys, content):
    write_sweep(tmp_path)
    (tmp_path / "p38912_lr0.004_s1337/summary.json").write_text(content)
    assert "p38912_lr0.004_s1337/summary.json" in refused(capsys, tmp_path)


@pytest.mark.parametrize("content", ['{"runs": [{"run": "a", "lr": 0.1}]}', '{"runs": [3]}', '{"runs": 3}', "[]"])
def test_a_damaged_study_is_refused_by_name(tmp_path, capsys, content):
    write_sweep(tmp_path)
    (tmp_path / "study.json").write_text(content)
    assert "study.json" in refused(capsys, tmp_path)


@pytest.mark.parametrize("arguments, said", [
    (["nowhere"], "nowhere is no folder"), (["."], "no finished run in ."), ([".", "at=3X"], "'3X' is no number"),
    ([".", "at=nan"], "'nan' is no number"), ([".", "at=0"], "'0' is no number"), ([".", "at=1e99"], "'1e99' is no number"),
    ([".", "of=3"], "no option"),
    (["at=3M"], "0 folders"), ([".", "."], "2 folders"),
])
def test_mistakes_in_the_command_are_told_in_a_sentence(tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, *arguments)


def test_repeats_are_left_out(tmp_path, capsys):
    write_sweep(tmp_path)
    write_trial(tmp_path, 0.064, repeat=1)
    output, found = ask(capsys, tmp_path)
    assert "left out p38912_lr0.064_s1337: it repeats" in output and len(found["sweeps"][0]["rows"]) == 5


def test_the_text_comes_from_the_file_alone(tmp_path, capsys):
    output, found = ask(capsys, write_sweep(tmp_path), f"out={tmp_path / 'elsewhere'}")
    assert tables(found) in output
    there = sorted(path.suffix for path in (tmp_path / "elsewhere").iterdir())
    assert there == [".json", ".png", ".svg"]


def test_everything_is_drawn_with_the_same_bytes_twice(tmp_path, capsys):
    """Two sizes, a diverged rate, one beyond the axis; then a sweep without an optimum."""
    write_sweep(tmp_path / "a", RATES[:4])
    write_trial(tmp_path / "a", 0.032, loss=7.9)
    write_trial(tmp_path / "a", 0.064, status="diverged", loss=math.nan)
    write_sweep(tmp_path / "a", params=155_648)
    ask(capsys, tmp_path / "a")
    first = {form: (tmp_path / f"a/law/learning_rate.{form}").read_bytes() for form in ("png", "svg", "json")}
    ask(capsys, tmp_path / "a")
    assert all((tmp_path / f"a/law/learning_rate.{form}").read_bytes() == content for form, content in first.items())
    ask(capsys, write_sweep(tmp_path / "b", RATES[:2]), code=3)
    assert (tmp_path / "b/law/learning_rate.png").read_bytes()[:4] == b"\x89PNG"


def test_as_a_command_it_needs_no_torch(tmp_path):
    code = ("import sys; from scaling.learning_rate import main; code = main(sys.argv[1:]); "
            "sys.exit(code or 'torch' in sys.modules and 9)")
    done = subprocess.run([sys.executable, "-c", code, str(write_sweep(tmp_path))], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Optimum 0.0061" in done.stdout
