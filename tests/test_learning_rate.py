"""scaling/learning_rate.py: the optimum of a sweep with a known one, refused where the rates do not hold it."""

import json
import math
import re

import pytest
from scaling_runs import write_run

from scaling import learning_rate
from scaling.learning_rate import main, tables

RATES = (0.002, 0.004, 0.008, 0.016, 0.032)


@pytest.fixture(autouse=True)
def render_nothing(monkeypatch, request):
    """Rendering is most of the time; the tests named so draw."""
    if "drawn" not in request.node.name:
        monkeypatch.setattr(learning_rate, "draw", lambda found, name: None)
        monkeypatch.setattr("scaling.figures.render", lambda figure, form: b"")


def known(lr, best=0.0061, lowest=3.2, curvature=0.01):
    """A loss of which ln is a parabola in ln lr."""
    return lowest * math.exp(curvature * math.log(lr / best) ** 2)


def write_trial(folder, lr, loss=None, seed=1337, params=38_912, name=None, **changes):
    """A finished run named by its rate and seed."""
    shape = {"n_layer": 4, "n_embd": params // 100, "n_head": 2, "n_ffn": 704, "n_ctx": 128, "steps": 981, "warmup_steps": 49}
    shared = {"data_sha256": "d" * 64, "tokens_per_step": 65536, "optimizer": "AdamW", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
              "weight_decay": 0.1, "clip": 1.0, "schedule": "wsd", "skipped_steps": 0, "rollbacks": 0}
    loss = known(lr) if loss is None else loss
    write_run(folder / (name or f"p{params}_lr{lr:g}_s{seed}"), params=params, loss=loss, seed=seed, curve=False,
              **{"lr_peak": lr, **shared, **shape, **changes})


def write_sweep(folder, rates=RATES, best=0.0061, **changes):
    for lr in rates:
        write_trial(folder, lr, **{"loss": known(lr, best), **changes})
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


@pytest.mark.parametrize("best", [0.0031, 0.008, 0.0158])
def test_a_known_optimum_is_found_with_its_loss_and_its_curvature(tmp_path, capsys, best):
    write_trial(tmp_path, 0.064, repeat=1)
    output, found = ask(capsys, write_sweep(tmp_path, best=best), f"out={tmp_path / 'elsewhere'}")
    optimum = found["sweeps"][0]["optimum"]
    assert optimum["lr"] == pytest.approx(best, rel=1e-9) and optimum["loss"] == pytest.approx(3.2, rel=1e-12)
    assert optimum["factor_2_percent"] == pytest.approx(100 * math.expm1(0.01 * math.log(2) ** 2))
    low, high = optimum["flat"]     # by the definition: there the loss is 0.1 % higher
    assert known(low, best) / 3.2 == pytest.approx(math.exp(0.001)) == known(high, best) / 3.2 and low < best < high
    assert all(value == pytest.approx(best) for value in optimum["others"].values()) and optimum["others"]
    assert f"Optimum {best:.3g}" in output and tables(found) in output      # the text comes from the file alone
    assert "left out p38912_lr0.064_s1337: it repeats" in output and len(found["sweeps"][0]["rows"]) == 5


def test_where_the_curve_is_no_parabola_the_wider_fit_says_how_well_the_optimum_is_known(tmp_path, capsys):
    for lr in RATES:
        write_trial(tmp_path, lr, loss=known(lr, 0.007) + 0.003 * math.log(lr / 0.007) ** 3 * (lr > 0.007))
    output, found = ask(capsys, tmp_path)
    optimum = found["sweeps"][0]["optimum"]
    before, lowest, after = (math.log(row["loss"]) for row in found["sweeps"][0]["rows"][1:4])
    vertex = 0.5 * (before - after) / (before - 2 * lowest + after)     # in steps of ln 2 from the middle one of three
    assert optimum["lr"] == pytest.approx(0.008 * 2**vertex) and abs(optimum["others"]["5 rates"] / optimum["lr"] - 1) > 0.02


def test_a_loss_far_above_the_lowest_does_not_bend_the_wider_fit_and_uneven_rates_count_where_they_are(tmp_path, capsys):
    write_trial(write_sweep(tmp_path / "a", RATES[:4]), 0.032, loss=7.9)      # learned nothing, though it finished
    assert ask(capsys, tmp_path / "a")[1]["sweeps"][0]["optimum"]["others"] == {"4 rates": pytest.approx(0.0061)}
    _, found = ask(capsys, write_sweep(tmp_path / "b", (0.001, 0.005, 0.0066, 0.03)))
    assert found["base"]["lr"] == pytest.approx(0.0061) and found["sweeps"][0]["optimum"]["bracket"] == [0.005, 0.03]


def test_seeds_that_every_rate_has_are_averaged_and_each_alone_is_told(tmp_path, capsys):
    for seed, best in ((1, 0.005), (2, 0.0075)):
        for lr in RATES:
            write_trial(tmp_path, lr, seed=seed, loss=known(lr, best, lowest=3.2 + 0.1 * seed))
    write_trial(tmp_path, 0.016, seed=3, loss=2.0)      # averaged in, it would move the optimum
    output, found = ask(capsys, tmp_path)
    optimum = found["sweeps"][0]["optimum"]
    assert optimum["lr"] == pytest.approx(math.sqrt(0.005 * 0.0075))        # of parabolas of one curvature
    assert optimum["others"]["seed 1 alone"] is None and "seed 1 alone: not bracketed" in output     # 0.004 is its lowest
    assert optimum["others"]["seed 2 alone"] == pytest.approx(0.0075) and found["sweeps"][0]["seeds"] == [1, 2]
    assert optimum["loss"] == pytest.approx(math.sqrt(3.3 * 3.4) * math.exp(0.01 * math.log(0.0075 / 0.005) ** 2 / 4))


@pytest.mark.parametrize("rates, best, diverged, told", [
    ((0.002, 0.004, 0.008), 0.02, (), "0.008, the highest of the rates that have one, so the optimum is not bracketed: add 0.016 "
                                      "and 0.032."),
    ((0.002, 0.004, 0.008), 0.001, (), "0.002, the lowest of the rates that have one, so the optimum is not bracketed: add 0.0"),
    ((0.01, 0.03), 0.05, (), "add 0.09 and 0.27."), ((0.01,), 0.01, (), "add 0.0025 and 0.005 and 0.02 and 0.04."),
    ((0.002, 0.004, 0.008), 0.011, (0.016,), "at 0.008, the highest of the rates that have one, so the optimum is not bracketed: "
                                             "add 0.011."),
    ((0.008, 0.016, 0.032), 0.006, (0.002, 0.004), "add 0.0057."),
    ((), None, (0.1, 0.2), "No optimum: every rate diverged: add 0.025 and 0.05.")])
def test_an_optimum_at_an_end_is_refused_with_the_rates_to_add(tmp_path, capsys, rates, best, diverged, told):
    write_sweep(tmp_path, rates, best=best)
    for lr in diverged:
        write_trial(tmp_path, lr, status="diverged", loss=math.nan)
    output, found = ask(capsys, tmp_path, code=3)
    assert told in output and "Peak rates" not in output
    assert found["base"] is None and found["rates"] == [] and found["sweeps"][0]["optimum"] is None


def test_a_rate_at_which_a_seed_diverged_is_shown_and_not_fitted(tmp_path, capsys):
    for seed in (1, 2):
        write_sweep(tmp_path, RATES[:4], seed=seed)
    write_trial(tmp_path, 0.032, seed=1, loss=3.0)
    write_trial(tmp_path, 0.032, seed=2, status="diverged", loss=math.nan, skipped_steps=31, rollbacks=3)
    output, found = ask(capsys, tmp_path)
    assert "| 0.032 |  |  | 31 | 3 | diverged |" in output and found["base"]["lr"] == pytest.approx(0.0061)


def test_without_a_common_seed_nothing_is_compared(tmp_path, capsys):
    for seed, lr in enumerate(RATES):
        write_trial(tmp_path, lr, seed=seed)
    assert "no seed has finished at every rate" in ask(capsys, tmp_path, code=3)[0]


def declare(folder, rates, **changes):
    N = json.loads(next(folder.glob("*/summary.json")).read_text())["params_nonembed"]
    rows = [{"run": f"p38912_lr{lr:g}_s1337", "lr": lr, "seed": 1337, "repeat": 0, "tokens": 20 * 38_912, "params_nonembed": N,
             **changes} for lr in rates]
    (folder / "study.json").write_text(json.dumps({"runs": rows, "params": "nonembed"}))


def test_what_was_declared_and_has_not_finished_is_named(tmp_path, capsys):
    write_sweep(tmp_path, RATES[:3], best=0.02)
    declare(tmp_path, RATES)
    output, found = ask(capsys, tmp_path, code=3)
    assert "not bracketed: finish p38912_lr0.016_s1337" in output and "| 0.032 |  |  | 0 | 0 | unfinished |" in output
    (tmp_path / "p38912_lr0.016_s1337").mkdir()     # its rollbacks used up, train.py leaves a diagnosis and no summary
    (tmp_path / "p38912_lr0.016_s1337/diagnosis.json").write_text("{}")
    assert "| 0.016 |  |  | 0 | 0 | diverged |" in ask(capsys, tmp_path, code=3)[0]
    for change in ({"lr": None}, {"repeat": 1}):
        declare(tmp_path, RATES, **change, run="another")
        assert "unfinished" not in ask(capsys, tmp_path, code=3)[0]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    assert "left out other: it has not finished" in ask(capsys, tmp_path, code=3)[0]


def test_other_sizes_get_the_rates_of_the_rule_and_are_held_against_it(tmp_path, capsys):
    write_sweep(tmp_path)
    write_sweep(tmp_path, params=155_648, best=0.0042)
    for lr in RATES:        # shorter runs of the smallest size, whose rate is no trunk's
        write_trial(tmp_path, lr, loss=known(lr, 0.009), tokens=400_000, steps=400, name=f"short{lr}")
    output, found = ask(capsys, tmp_path, "at=1M,9000000")
    rule, growing = learning_rate.RULES
    N, base = found["base"]["N"], found["base"]["lr"]
    assert base == pytest.approx(0.0061) and found["base"]["tokens"] == 20 * 38_912
    assert [row["N"] for row in found["rates"]] == [N, 1e6, 9e6]
    for row in found["rates"]:
        assert row[rule] == pytest.approx(0.0061 * math.sqrt(N / row["N"]))
        assert row[growing] == pytest.approx(0.0061 * (N / row["N"]) ** 0.25)
    check, = found["checks"]
    assert check["lr"] == pytest.approx(0.0042)
    assert check["exponent"] == pytest.approx(math.log(0.0042 / 0.0061) / math.log(check["N"] / N))
    assert f"an exponent of {check['exponent']:+.2f}" in output


def test_the_rule_of_the_configs_is_the_rule_that_is_printed():
    """configs/h100.py takes its rates from a rate of the smallest size by the same exponent."""
    from configs import h100
    exponent = next(iter(learning_rate.RULES.values()))
    for N in (h100.NONEMBED, 6_491_520, 25_402_240):
        assert h100.learning_rate(N) == pytest.approx(h100.LR * (N / h100.NONEMBED) ** exponent, abs=1e-6)


@pytest.mark.parametrize("change, said", [
    ({"weight_decay": 0.2}, "differ in weight_decay"), ({"warmup_steps": 10}, "differ in warmup_steps"),
    ({"val_sha256": "e" * 64}, "differ in val_sha256"),
    ({"precision": {"recipe": "tensorwise", "compile": False}}, "differ in precision"),
    ({"sources": {"docs": {"weight": 1.0, "loss_bf16": 2.0}}}, "differ in sources"),
    ({"lr_peak": ...}, "lr_peak is None; expected a finite number above zero"), ({"lr_peak": math.nan}, "lr_peak is nan"),
    ({"loss_bf16": math.nan}, "loss_bf16 is nan"), ({"loss_bf16": True}, "loss_bf16 is True"),
    ({"params_nonembed": 0}, "params_nonembed is 0"), ({"schema_version": 2}, "schema_version is 2"),
    ({"name": "again", "lr_peak": 0.004}, "have the same size, tokens, lr_peak and seed: leave one out"),
])
def test_runs_that_are_no_sweep_are_refused_with_the_key(tmp_path, capsys, change, said):
    write_trial(write_sweep(tmp_path, RATES[:3]), 0.016, **change)
    assert said in refused(capsys, tmp_path)
    assert not (tmp_path / "law").exists()


@pytest.mark.parametrize("path, content", [("p38912_lr0.004_s1337/summary.json", "{"), ("study.json", '{"runs": [{"lr": 0.1}]}')])
def test_damaged_files_are_refused_by_name(tmp_path, capsys, path, content):
    write_sweep(tmp_path)
    (tmp_path / path).write_text(content)
    assert path in refused(capsys, tmp_path)


@pytest.mark.parametrize("arguments, said", [
    (["nowhere"], "nowhere is no folder"), (["."], "no finished run in ."), ([".", "at=3X"], "'3X' is no number"),
    ([".", "at=1e99"], "'1e99' is no number"), ([".", "of=3"], "there is no key 'of'"), (["at=3M"], "runs is missing")])
def test_mistakes_in_the_command_are_told_in_a_sentence(tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, *arguments)


def test_everything_is_drawn_with_the_same_bytes_twice(tmp_path, capsys):
    """Two sizes, a diverged rate, one beyond the axis; then a sweep without an optimum."""
    write_sweep(tmp_path / "a", RATES[:4])
    write_trial(tmp_path / "a", 0.032, loss=7.9)
    write_trial(tmp_path / "a", 0.064, status="diverged", loss=math.nan)
    write_sweep(tmp_path / "a", params=155_648)
    _, found = ask(capsys, tmp_path / "a")
    first = (tmp_path / "a/law/learning_rate.svg").read_bytes()
    ask(capsys, tmp_path / "a")
    assert (tmp_path / "a/law/learning_rate.svg").read_bytes() == first
    left, right = learning_rate.draw(found, "a").axes
    points = [xy for line in left.get_lines() for xy in line.get_xydata().tolist()]
    for row in found["sweeps"][0]["rows"][:4]:
        assert [row["lr"], row["percent"]] in points
    assert left.get_ylim()[1] < 10 and {0.032, 0.064} <= {x for x, _ in points} and right.get_xscale() == "log"
    ask(capsys, write_sweep(tmp_path / "b", RATES[:2]), code=3)
    assert (tmp_path / "b/law/learning_rate.png").read_bytes()[:4] == b"\x89PNG"
