"""Known laws are recovered, optima are real optima, few points are not oversold, the command line refuses clearly."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scaling_runs import SIZES, law, write_ladder, write_run
from scipy.optimize import minimize

from scaling import fit as cli
from scaling import laws
from scaling.laws import DELTA, GAMMAS, fit_band, fit_power, fit_ray
from scaling.records import RecordError, read_runs

C = np.array([1e15, 6e15, 3e16, 2e17, 9e17, 5e18])
TRUE = {"E": 1.69, "K": 412.0, "gamma": 0.155}
L = TRUE["E"] + TRUE["K"] * C ** -TRUE["gamma"]
NOISY = L * np.exp(np.random.default_rng(1).normal(0, 2e-3, len(C)))     # beyond DELTA, so Huber's linear part is used


def objective(predicted, observed):
    """Hoffmann's objective written out again: Huber of log residuals, summed."""
    r = np.abs(np.log(predicted) - np.log(observed))
    return float(np.sum(np.where(r <= DELTA, r**2 / 2, DELTA * (r - DELTA / 2))))


@pytest.mark.parametrize("n", [3, 5, 6])
def test_ray_law_is_recovered(n):
    fit = fit_ray(C[:n], L[:n])
    assert fit.parameters == pytest.approx(TRUE, rel=1e-6)
    assert fit.n == n and fit.objective < 1e-20 and fit.starts == fit.starts_at_best == 15
    assert fit.gradient_norm < 1e-9 and len(fit.singular_values) == 3
    assert np.allclose(fit.predict(C), L, rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e12])
def test_ray_law_does_not_depend_on_the_unit_of_compute(scale):
    fit = fit_ray(C * scale, NOISY)
    assert fit.parameters["gamma"] == pytest.approx(fit_ray(C, NOISY).parameters["gamma"], rel=1e-5)
    assert fit.starts_at_best == fit.starts


def test_power_law_is_exact_with_three_points():
    x = np.array([4e4, 1.1e5, 1.8e5])
    fit = fit_power(x, 21.0 * x**-0.21)
    assert fit.parameters == pytest.approx({"A": 21.0, "exponent": 0.21}, rel=1e-10)
    assert fit.identified and fit.starts == fit.starts_at_best
    assert fit_power(x[:2], 21.0 * x[:2] ** -0.21).reason == "2 points for 2 parameters leave 0 degrees of freedom"


def test_noisy_optimum_is_the_optimum_of_the_objective_written_out():
    fit = fit_ray(C, NOISY)
    assert fit.objective == pytest.approx(objective(fit.predict(C), NOISY), rel=1e-12)
    assert fit.starts_at_best == fit.starts and fit.gradient_norm < 1e-9
    assert np.abs(np.log(fit.predict(C) / NOISY)).max() > DELTA

    # Another solver in another parametrisation, E, K / 1e3, gamma as they are, from the truth and from far away.
    def by_hand(p):
        predicted = p[0] + 1e3 * p[1] * C ** -p[2]
        return objective(predicted, NOISY) * 1e6 if (predicted > 0).all() else 1e9

    options = {"maxiter": 20000, "maxfev": 20000, "xatol": 1e-12, "fatol": 1e-14}
    best = min((minimize(by_hand, start, method="Nelder-Mead", options=options)
                for start in ([1.69, 0.412, 0.155], [1.2, 0.2, 0.12], [1.8, 1.0, 0.2])), key=lambda found: found.fun)
    assert fit.objective * 1e6 <= best.fun * (1 + 1e-9)
    assert best.fun == pytest.approx(fit.objective * 1e6, rel=1e-4)
    assert [fit.parameters["E"], fit.parameters["gamma"]] == pytest.approx([best.x[0], best.x[2]], rel=1e-3)


def test_power_law_against_a_grid():
    x = C / 1e15
    fit = fit_power(x, NOISY)
    a, s = np.log(fit.parameters["A"]), fit.parameters["exponent"]
    around = [objective(np.exp(a + da) * x ** -(s + ds), NOISY)
              for da in np.linspace(-0.02, 0.02, 81) for ds in np.linspace(-0.005, 0.005, 81)]
    assert fit.objective <= min(around) + 1e-15


def test_one_outlier_hardly_moves_the_fit():
    bent = L.copy()
    bent[2] *= 1.05
    assert fit_ray(C, bent).parameters["gamma"] == pytest.approx(0.155, abs=0.01)
    squares = minimize(lambda p: np.sum(np.log((p[0] + 1e3 * p[1] * C ** -p[2]) / bent) ** 2), [1.69, 0.412, 0.155],
                       method="Nelder-Mead")
    assert abs(squares.x[2] - 0.155) > 0.01


@pytest.mark.parametrize("gamma", [None, 0.18])
def test_jacobian_against_finite_differences(monkeypatch, gamma):
    caught = {}

    def catch(residual, jacobian, starts):
        caught.update(residual=residual, jacobian=jacobian, starts=starts)
        raise RecordError("caught")

    monkeypatch.setattr(laws, "_minimise", catch)
    with pytest.raises(RecordError, match="caught"):
        fit_ray(C, NOISY, gamma=gamma)
    assert len(caught["starts"]) == (15 if gamma is None else 2)
    for theta in caught["starts"]:
        h = 1e-6
        numeric = np.column_stack([(caught["residual"](theta + h * unit) - caught["residual"](theta - h * unit)) / (2 * h)
                                   for unit in np.eye(len(theta))])
        assert np.allclose(caught["jacobian"](theta), numeric, atol=1e-8)


def test_intervals_against_simulation():
    """Standard error of gamma = spread over repeated noise, where residuals are small enough to count squared."""
    rng = np.random.default_rng(0)
    noise = 3e-4
    x = np.geomspace(1e15, 1e20, 12)
    truth = 1.69 + 412 * x**-0.155
    fits = [fit_ray(x, truth * np.exp(rng.normal(0, noise, len(x)))) for _ in range(40)]
    for name in ("E", "K", "gamma"):
        spread = np.std([fit.parameters[name] for fit in fits])
        assert np.median([fit.se[name] for fit in fits]) == pytest.approx(spread, rel=0.35)
    covered = [fit.ci95["gamma"][0] < 0.155 < fit.ci95["gamma"][1] for fit in fits]
    assert np.mean(covered) > 0.85
    wide = fit_ray(x, truth, seed_sd=1e-3)
    assert wide.se["gamma"] == pytest.approx(fit_ray(x, truth, seed_sd=2e-3).se["gamma"] / 2, rel=1e-6)


def test_what_points_cannot_say_is_said():
    three = fit_ray(C[:3], NOISY[:3], seed_sd=1e-3)
    assert not three.identified and three.se is None and three.ci95 is None and three.residual_rms is None
    assert three.reason == "3 points for 3 parameters leave 0 degrees of freedom"
    pure = fit_ray(C, 30 * C**-0.06)
    assert not pure.identified
    assert pure.reason == "E runs to zero: the points fall at least as fast as a pure power law"
    rising = fit_ray(C, 2 + 1e-4 * C**0.1)
    assert not rising.identified and rising.reason
    vague = fit_ray(C[:4], L[:4] * np.array([1.002, 0.998, 1.003, 0.999]))
    assert not vague.identified or vague.ci95["gamma"][0] > 0


def test_unconverged_fits_are_flagged(monkeypatch):
    least_squares = laws.least_squares
    monkeypatch.setattr(laws, "least_squares", lambda *a, **k: least_squares(*a, **{**k, "max_nfev": 1}))
    fit = fit_ray(C, NOISY)
    assert not fit.identified and fit.reason == "the best of 15 starts did not converge"


@pytest.mark.parametrize(("x", "y", "sentence"), [
    ([1, 2, np.nan, 4], [2, 2, 2, 2], "point 2 is nan; a law needs finite values above zero"),
    ([1, 2, 3, 4], [2, 2, np.nan, 2], "loss 2 is nan; a law needs finite values above zero"),
    ([1, 2, 3, 4], [2, 0, 2, 2], "loss 1 is 0.0; a law needs finite values above zero"),
    ([1, 2, 3, np.inf], [2, 2, 2, 2], "point 3 is inf; a law needs finite values above zero"),
    ([5, 5, 5, 5], [2, 2.1, 2.2, 2.3], "1 distinct point(s); this law needs at least "),
    ([], [], "0 distinct point(s); this law needs at least "),
    ([1, 2], [1, 2, 3], "a law needs as many losses as points; found shapes (2,) against (3,)"),
])
@pytest.mark.parametrize("fit", [fit_ray, fit_power])
def test_hostile_points(fit, x, y, sentence):
    with pytest.raises(RecordError) as error:
        fit(x, y)
    assert str(error.value).startswith(sentence)


def test_band_spans_the_forms_and_leaves_out_what_needs_negative_E():
    forms, left_out = fit_band(C[:3], L[:3])
    assert left_out == [] and len(forms) == 1 + len(GAMMAS)
    far = [float(form.predict(1e21)) for form in forms]
    truth = TRUE["E"] + TRUE["K"] * 1e21 ** -TRUE["gamma"]
    assert far == sorted(far) and far[0] < truth < far[-1]      # the power law is lowest, the largest gamma highest
    _, left_out = fit_band(C, 30 * C**-0.13)
    assert left_out == [0.10, 0.12]
    assert len(fit_band(C, 1e9 * C**-0.5)[0]) == 1


# --------------------------------------------------------------------------------------------------- the command line


def run(*arguments, cwd=None):
    script = Path(cli.__file__).resolve()
    return subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, cwd=cwd)


def strict(path):
    def refuse(name):
        raise AssertionError(f"{name} in {path}")
    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    write_ladder(folder / "out")
    write_run(folder / "out" / "mid", params=300_000, is_annealed=False)
    result = run("out", "out=report", cwd=folder)       # from elsewhere than the repository
    return folder, result


def test_command_line_end_to_end(finished):
    folder, result = finished
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith("left out mid: its learning rate had not annealed")
    for line in ("| bf16 | ray: L = 0.9 + 330 C^-0.2 | 3 | none: 3 points for 3 parameters leave 0 degrees of freedom |",
                 "With one ratio L(N), L(D) and L(C) are one curve under three labels.",
                 "| a_fp8 (tensorwise) | 38.9k | 778k | 2.57542 | 2.59342 | 2.58742 | +0.01800 ± 0.00304 |",
                 "evaluation noise only, not run-to-run noise, which needs several seeds."):
        assert line in result.stdout, line
    assert sorted(path.name for path in (folder / "report").iterdir()) == ["figure.png", "figure.svg", "law.json"]
    assert (folder / "report" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / "report" / "figure.svg").read_text()


def test_law_json(finished):
    folder, _ = finished
    content = strict(folder / "report" / "law.json")
    assert set(content["groups"]) == {"bf16", "tensorwise"} and content["one_ray"] and content["delta"] == DELTA
    assert content["conventions"]["C"] == "flops_per_token * tokens"
    ray = content["groups"]["bf16"]["laws"]["ray"]
    assert [ray["E"], ray["K"], ray["gamma"]] == pytest.approx([0.9, 330, 0.2], rel=1e-6)
    assert ray["identified"] is False and ray["ci95"] is None and ray["starts_at_best"] == ray["starts"] == 15
    power = content["groups"]["bf16"]["laws"]["power_c"]
    assert power["identified"] and power["ci95"]["exponent"][0] < power["exponent"] < power["ci95"]["exponent"][1]
    assert {"objective", "n", "gradient_norm", "singular_values", "residual_rms", "se", "reason"} <= power.keys()
    # The slope under another convention is the power law on that convention's numbers.
    x = [row["flops_per_token_6n_nonembed"] * row["tokens"] for row in
         (json.loads((folder / "out" / f"{letter}_bf16" / "summary.json").read_text()) for letter in "abc")]
    losses = [json.loads((folder / "out" / f"{letter}_bf16" / "summary.json").read_text())["loss_bf16"] for letter in "abc"]
    assert content["groups"]["bf16"]["slopes"]["flops_per_token_6n_nonembed"] == pytest.approx(
        fit_power(x, losses).parameters["exponent"])
    assert len(content["inputs"]) == 6 and all(len(one["summary_sha256"]) == 64 for one in content["inputs"])
    assert content["pairs"][0]["gap_bf16"]["nats"] == pytest.approx(0.012, rel=1e-6)
    assert content["notes"][0].startswith("left out mid")


def test_same_runs_same_bytes(finished, capsys):
    folder, _ = finished
    assert cli.main([str(folder / "out"), "--out", str(folder / "again")]) == 0
    for name in ("law.json", "figure.svg"):
        assert (folder / "again" / name).read_bytes() == (folder / "report" / name).read_bytes()


def test_as_trained_losses_and_seed_sd(tmp_path, capsys):
    write_ladder(tmp_path / "out")
    assert cli.main([str(tmp_path / "out"), f"out={tmp_path / 'r'}", "loss=as_trained", "--seed-sd=0.01"]) == 0
    content = strict(tmp_path / "r" / "law.json")
    assert content["conventions"]["loss"] == "loss_as_trained" and content["seed_sd"] == 0.01
    loss = [json.loads((tmp_path / "out" / f"{letter}_fp8" / "summary.json").read_text())["loss_as_trained"]
            for letter in "abc"]
    compute = [json.loads((tmp_path / "out" / f"{letter}_fp8" / "summary.json").read_text())["flops_per_token"]
               * 20 * size for letter, size in zip("abc", SIZES, strict=True)]
    law_c = content["groups"]["tensorwise"]["laws"]["power_c"]
    assert law_c["exponent"] == pytest.approx(fit_power(compute, loss).parameters["exponent"])


def test_few_runs_and_several_ratios(tmp_path, capsys):
    write_run(tmp_path / "one" / "a")
    assert cli.main([str(tmp_path / "one"), f"out={tmp_path / 'r1'}"]) == 0
    content = strict(tmp_path / "r1" / "law.json")["groups"]["bf16"]["laws"]
    assert content["power_n"]["reason"] == "1 distinct point(s); this law needs at least 2"
    assert content["ray"]["E"] is None and not content["ray"]["identified"]
    assert "No BF16/FP8 pair among these runs." in capsys.readouterr().out
    for i, (params, ratio) in enumerate([(40_000, 5), (40_000, 20), (90_000, 20), (90_000, 40), (200_000, 10)]):
        write_run(tmp_path / "many" / str(i), params=params, tokens=params * ratio)
    assert cli.main([str(tmp_path / "many"), f"out={tmp_path / 'r2'}"]) == 0
    assert "With several ratios each of L(N), L(D) and L(C) mixes" in capsys.readouterr().out
    content = strict(tmp_path / "r2" / "law.json")
    assert not content["one_ray"] and set(content["groups"]["bf16"]["band"]) == {"C"}
    assert content["groups"]["bf16"]["laws"]["ray"]["reason"] == (
        "the runs lie at 5 to 40 tokens per parameter; the ray law needs one ratio")


@pytest.mark.parametrize(("arguments", "sentence"), [
    ([], "out=DIR is missing: name the folder that receives law.json and the figure"),
    (["out=r"], "no runs given: name run folders such as out/<run>, or a folder that holds them"),
    (["good", "--out"], "--out lacks its value: DIR that receives law.json, figure.png and figure.svg (required)"),
    (["good", "out="], "out=DIR is missing: name the folder that receives law.json and the figure"),
    (["good", "out=r", "los=bf16"], "'los=bf16' is no option; did you mean loss?"),
    (["good", "out=r", "--wombat", "3"], "'--wombat' is no option; there are out, loss, seed_sd"),
    (["good", "out=r", "loss=fp8"], "loss='fp8' must be bf16 or as_trained"),
    (["good", "out=r", "seed_sd=-1"], "seed_sd='-1' must be a number, at least 0: standard deviation of"),
    (["good", "out=r", "seed_sd=nan"], "seed_sd='nan' must be a number, at least 0: standard deviation of"),
    (["good", "out=good/a/summary.json"], "out=good/a/summary.json is a file: name a folder"),
    (["absent", "out=r"], "absent does not exist: give a run's folder such as out/<run>, or a folder that holds"),
    (["mixed", "out=r"], "a and b differ in tokenizer_sha256"),
    (["broken", "out=r"], "broken/a/summary.json is not valid JSON"),
    (["raw", "out=r"], "no run is left to fit"),
    (["good", "out=good/a/summary.json/x"], "good/a/summary.json/x cannot be written (Not a directory): choose another"),
])
def test_mistakes_end_with_code_2_and_nothing_written(tmp_path, monkeypatch, capsys, arguments, sentence):
    write_run(tmp_path / "good" / "a")
    write_run(tmp_path / "mixed" / "a")
    write_run(tmp_path / "mixed" / "b", params=106_624, tokenizer_sha256="u")
    write_run(tmp_path / "broken" / "a")
    (tmp_path / "broken" / "a" / "summary.json").write_text('{"schema_version": 1,')
    write_run(tmp_path / "raw" / "a", is_annealed=False)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"scaling/fit.py: {sentence}")
    assert sorted(tmp_path.rglob("*")) == before


def test_exit_code_of_the_process(tmp_path):
    result = run("nothing_here", "out=r", cwd=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr and "nothing_here does not exist" in result.stderr
    result = run("--help")
    assert result.returncode == 0 and "seed_sd" in result.stdout


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "law.json"
    target.write_text("old")
    monkeypatch.setattr("scaling.figures.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        cli.write(target, b"new")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_group_keeps_seeds_apart(tmp_path):
    for seed in (1, 2):
        for size in SIZES:
            write_run(tmp_path / f"{size}_{seed}", params=size, seed=seed, curve=False)
    records, _ = read_runs([tmp_path])
    group = cli.fit_group(records, "loss_bf16", (20, 20))
    assert group.laws["ray"].n == 6 and group.loss.shape == (6,)
    assert np.allclose(group.loss, law(group.x["C"]))
