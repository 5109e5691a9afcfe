"""Forecasts cover known laws and real ladders; what a frozen prediction holds, what freezing and
scoring refuse."""

import csv
import hashlib
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from lib.errors import UserError
from runtime.config import load_config
from runtime.plan import plan as train_plan
from scaling import fit, predict
from scaling.laws import GAMMAS, fit_law, rivals
from scaling.paired.cost import EPOCH, Surface
from scaling.predict import FLOOR, forecast
from scaling.records import read_runs
from tests.conftest import ROOT, asked
from tests.helpers.scaling_runs import edit, law, strict, write_ladder, write_run
from tests.law_trials import (
    BENT,
    OFF_THE_RAY,
    TRUTH,
    bent_valleys,
    best_size,
    forecast_trial,
    loss_of,
)
from tests.scaling.test_laws import FOLDER, ladder, points_at, published

SMALL = (53e6, 124e6, 257e6, 360e6)
ALL = (5, 10, 20, 40)  # tokens per parameter
TARGET = (1.54e9, 30.8e9, 6 * 1.54e9 * 30.8e9)
# Constants that give the slopes -dL/d ln D at 20 tokens per parameter published for OLMo's ladder
# (.179 at 125M to .121 at 1.5B) and its compute exponent of about .1: a truth whose exponent lies
# outside GAMMAS' middle.
OLMO_LIKE = Surface("OLMo-like", "", E=1.15, A=57.0, B=32.9, alpha=0.232, beta=0.1548)
# Power law and rays of gamma .13, .155, .178, .20 on the losses of 79M, 154M and 411M at 20 tokens
# per parameter, against the loss of 1.44B: signed error in per cent, by straight least squares,
# computed elsewhere.
HOLD_OUTS = {
    ("c4_original", "loss_c4_val"): (-3.49, -0.53, 0.60, 1.57, 2.46),
    ("rpj", "loss_paloma_redpajama"): (-4.17, -1.31, -0.00, 1.13, 2.16),
    ("rw_original", "loss_paloma_falcon-refinedweb"): (-3.34, -0.29, 0.81, 1.76, 2.63),
}
BIG = 184_320
GOAL = {
    "params_total": BIG,
    "params_nonembed": 150_000,
    "params_matmul": BIG,
    "tokens": 20 * BIG,
    "flops_per_token": 6 * BIG + 300_000,
}


def points_of(
    truth, ratios=(20,), sizes=SMALL, noise=0.0, tuning=0.0, rng=None, seeds=1, trunk=None
):
    """A ladder with noise in each run, in each size's tuning and in each trunk: runs of one size
    and seed are branches then."""
    N, D, label = ladder(np.repeat(sizes, seeds), ratios)
    loss = truth.loss(N, D)
    if rng is not None:
        loss = loss * np.exp(
            noise * rng.normal(size=len(N))
            + (trunk or 0) * rng.normal(size=len(sizes) * seeds)[label]
            + tuning * np.repeat(rng.normal(size=len(sizes)), len(ratios) * seeds)
        )
    return points_at(N, D, loss, None if trunk is None else label)


def forms(said):
    return {row["form"]: row for row in said["forms"]}


def test_the_interval_is_the_union_of_its_forms():
    said = forecast(points := points_of(EPOCH), TARGET)
    rows = said["forms"]
    losses = [row["loss"] for row in rows]
    assert [row["form"] for row in rows] == [
        "power_c",
        *(f"ray gamma={gamma:.2f}" for gamma in GAMMAS),
    ]
    assert said["low"] == min(row["low"] for row in rows) and said["high"] == max(
        row["high"] for row in rows
    )
    assert (
        said["headline"] == "ray gamma=0.12"
        and said["loss"] == forms(said)["ray gamma=0.12"]["loss"]
    )
    assert said["extrapolation"] == pytest.approx((TARGET[0] / SMALL[-1]) ** 2, rel=0.01)
    # the power law is lowest
    assert losses == sorted(losses) and said["parts"]["model_form"] == [losses[0], losses[-1]]
    mixed, alone = (
        forecast(points_of(EPOCH, ratios), TARGET) for ratios in ((5, 20, 20.5, 40), (20, 20.5))
    )
    assert mixed["points"] == {"all": 16, "at_this_ratio": 8}
    # of the target's ratio alone
    for name in set(forms(mixed)) & set(forms(alone)) - {"chinchilla"}:
        assert (
            forms(mixed)[name]["loss"] == forms(alone)[name]["loss"]
            and forms(mixed)[name]["n"] == 8
        )
    for few, why in (
        (points_of(EPOCH, sizes=SMALL[:2], seeds=3), "6 of 6 points"),
        (points_of(EPOCH, (5,)), "0 of 4 points"),
    ):
        with pytest.raises(UserError, match=why):
            forecast(few, TARGET)
    steep = forecast(replace(points, loss=400 * points.C**-0.13), TARGET)
    assert [one["form"] for one in steep["forms_left_out"] if "gamma" in one["form"]] == [
        "ray gamma=0.10",
        "ray gamma=0.12",
    ]
    for sd in (0, FLOOR, 5e-3):  # the noise is at least that of seeds and the floor
        assert forms(forecast(points, TARGET, seed_sd=sd))["power_c"]["sigma"] == max(sd, FLOOR)


@pytest.mark.parametrize("N", [1.9e8, 1.54e9], ids=["among the points", "beyond them"])
def test_the_power_laws_interval_is_that_of_a_straight_line(N):
    """Closed form: t-interval of one new point of ordinary regression, sigma never below the best
    form's residuals."""
    points = points_of(EPOCH, noise=2e-3, rng=np.random.default_rng(3))
    said = forecast(points, (N, 20 * N, 120 * N * N))
    row, x, x0 = forms(said)["power_c"], np.log(points.C), math.log(120 * N * N)
    share = 1 + 1 / 4 + (x0 - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    sigma = max(FLOOR, min(one["residual_rms"] for one in said["forms"]))
    # Huber's estimate is a little less certain than least squares: at most by pi / 2 in variance
    # t, 2 degrees of freedom
    width = math.log(row["high"] / row["loss"]) / (4.302652729911275 * sigma * math.sqrt(share))
    assert row["sigma"] == sigma and 1 - 1e-9 <= width < math.sqrt(math.pi / 2)
    assert row["loss"] == pytest.approx(
        float(fit_law("power_c", points.C, points.loss).predict(math.exp(x0)))
    )


def test_chinchillas_law_leads_where_the_points_identify_it_and_refutes_what_misses_them():
    seven = (20e6, 34e6, 53e6, 90e6, 124e6, 257e6, 360e6)
    said = forecast(
        points_of(EPOCH, ALL, sizes=seven, noise=3e-4, rng=np.random.default_rng(0)), TARGET
    )
    assert said["headline"] == "chinchilla" and said["loss"] == pytest.approx(
        EPOCH.loss(*TARGET[:2]), rel=0.01
    )
    refuted = {one["form"]: one["reason"] for one in said["forms_left_out"]}
    assert "the points refute it" in refuted["power_c"] and "power_c" not in forms(said)
    assert said["parts"]["all_forms"][0] < said["low"] and said["high"] - said["low"] < 0.15
    # Few sizes fix E, A and alpha with nothing to spare, however many runs each has: there nothing
    # may be refuted.
    for sizes, seeds in ((SMALL[:3], 1), (SMALL, 1), (SMALL, 3)):
        few = points_of(
            EPOCH, ALL, sizes=sizes, noise=1e-3, rng=np.random.default_rng(0), seeds=seeds
        )
        assert "power_c" in forms(forecast(few, TARGET))


def test_a_headline_of_chinchillas_law_counts_trajectories():
    """Branches that share their trunk's luck: the law answers with the interval of its
    trajectories, or not at all."""
    rng, hits = np.random.default_rng(3), []
    for _ in range(40):
        said = forecast(points_of(EPOCH, ALL, noise=2e-4, trunk=1e-3, seeds=3, rng=rng), TARGET)
        if said["headline"] == "chinchilla":
            low, high = (forms(said)["chinchilla"][end] for end in ("low", "high"))
            hits.append(low <= EPOCH.loss(*TARGET[:2]) * math.exp(1e-3 * rng.normal()) <= high)
    assert len(hits) >= 20 and np.mean(hits) >= 0.88  # 95 % of 40, less two standard deviations


@pytest.mark.parametrize(
    "truth, ratios, runs, noises",
    [
        (EPOCH, (20,), 50, {"noise": 1e-3}),
        (EPOCH, ALL, 50, {"noise": 1e-3}),
        (OLMO_LIKE, (20,), 50, {"noise": 1e-3}),
        (OLMO_LIKE, ALL, 50, {"noise": 1e-3}),
        (EPOCH, ALL, 30, {"noise": 3e-4, "trunk": 1e-3, "tuning": 4e-3}),
        (EPOCH, ALL, 30, {"noise": 3e-4, "trunk": 1e-3, "tuning": 4e-3, "seeds": 3}),
    ],
)
def test_the_interval_covers_what_a_new_run_does(truth, ratios, runs, noises):
    """Nominal 95 % holds at least 90 %; also where sizes are badly tuned, so that seeds and
    branches agree, and agree wrongly."""
    inside, rng = [], np.random.default_rng(7)
    for _ in range(runs):
        said = forecast(points_of(truth, ratios, rng=rng, **noises), TARGET)
        new = truth.loss(*TARGET[:2]) * math.exp(noises.get("tuning", 1e-3) * rng.normal())
        inside.append(said["low"] <= new <= said["high"])
    assert np.mean(inside) >= 0.9


@pytest.mark.parametrize("design", OFF_THE_RAY)
def test_the_interval_holds_surfaces_that_bend(design):
    """Four surfaces that Chinchilla's law is not, and it; law_trials.py forecasts draws more."""
    said = [forecast_trial(seed, surface, design) for surface in BENT for seed in range(2)]
    assert sum(one["low"] <= one["truth"] <= one["high"] for one in said) >= 9
    assert all(one["high"] / one["low"] < 1.25 for one in said)


def test_rivals_speak_only_where_the_ray_is_silent_and_only_if_they_fit():
    off = forecast_trial(0, BENT[0], "6 sizes")
    assert off["headline"] == "chinchilla" and off["points"]["at_this_ratio"] == 0
    names = [row["form"] for row in off["forms"]]
    assert any(name.startswith("surface ") for name in names) and any(
        name.startswith("frontier ") for name in names
    )
    assert max(row["residual_rms"] for row in off["forms"]) <= 0.01
    assert any("it misses the points by" in one["reason"] for one in off["forms_left_out"])
    on = forecast(points_of(EPOCH, ALL, noise=1e-3, rng=np.random.default_rng(0)), TARGET)
    assert not [
        name for name in forms(on) if name.startswith(("surface", "frontier", "power surface"))
    ]


def test_a_surface_that_does_not_fit_is_silent_and_the_minima_speak():
    """IsoFLOP budgets: the lowest loss at ten times the largest compute is that of the known law
    along its frontier."""
    C = 1e22
    N = best_size(C, TRUTH)
    said = forecast(bent_valleys(), (N, C / 6 / N, C))
    refused = {one["form"]: one["reason"] for one in said["forms_left_out"]}
    assert "it does not fit the points" in refused["chinchilla"] and "chinchilla" not in forms(said)
    assert said["headline"].startswith("frontier ray")
    truth = loss_of(N, C / 6 / N)
    assert said["low"] <= truth <= said["high"] and abs(said["loss"] / truth - 1) < 0.04


def test_rival_surfaces_are_least_squares():
    """Of their own truth they find every factor; the variance is that of repeated noise."""
    N, D, _ = ladder(SMALL, (5, 20, 80))
    truth = 1.7 + 300 * N**-0.3 + 900 * D**-0.3
    at = TARGET[:2]
    exact = rivals.surface_with(0.15, points_at(N, D, truth), at)
    assert [exact.parameters[name] for name in "EAB"] == pytest.approx([1.7, 300, 900], rel=1e-8)
    assert (
        exact.loss == pytest.approx(1.7 + 300 * at[0] ** -0.3 + 900 * at[1] ** -0.3)
        and exact.residual_rms < 1e-9
    )
    power = 20 * N**-0.1 + 30 * D**-0.09
    found = rivals.power_surface(points_at(N, D, power), at)
    assert found.loss == pytest.approx(20 * at[0] ** -0.1 + 30 * at[1] ** -0.09, rel=1e-6)
    assert [found.parameters[name] for name in ("A", "B", "alpha", "beta")] == pytest.approx(
        [20, 30, 0.1, 0.09], rel=1e-4
    )
    rng = np.random.default_rng(0)
    tables = [points_at(N, D, truth * np.exp(rng.normal(0, 1e-3, len(N)))) for _ in range(300)]
    losses = [rivals.surface_with(0.15, points, at).loss for points in tables]
    assert 1e-3 * math.sqrt(exact.variance) == pytest.approx(np.std(np.log(losses)), rel=0.15)


@published
@pytest.mark.parametrize("train_set, known", HOLD_OUTS)
def test_real_ladders_hold_out_sizes(train_set, known):
    """4 validation sets in distribution, targets of 1.44B and 6.89B each: of the three ladders the
    interval must hold all 24."""
    with (FOLDER / "gadre2024_104runs.csv").open() as file:
        table = [
            row
            for row in csv.DictReader(file)
            if row["train_set"] == train_set and float(row["mult"]) == 1
        ]
    for column in (
        "loss_openlm",
        "loss_c4_val",
        "loss_paloma_falcon-refinedweb",
        "loss_paloma_redpajama",
    ):
        rows = np.array(
            sorted((float(row["N"]), float(row["D"]), float(row[column])) for row in table)
        )
        points = points_at(*rows[1:4].T)
        for N, D, truth in rows[4:6]:
            said = forecast(points, (N, D, 6 * N * D))
            assert said["low"] <= truth <= said["high"], (column, N)
            if (column, N) == (known, rows[4, 0]):
                power, *rays = HOLD_OUTS[train_set, column]
                squares = fit_law("power_c", points.C, points.loss, delta=None)
                assert round(100 * (squares.predict(6 * N * D) / truth - 1), 2) == power
                # Huber's
                assert 100 * (forms(said)["power_c"]["loss"] / truth - 1) == pytest.approx(
                    power, abs=0.3
                )
                errors = {
                    float(name[-4:]): 100 * (row["loss"] / truth - 1)
                    for name, row in forms(said).items()
                    if "ga" in name
                }
                for gamma, golden in zip((0.13, 0.155, 0.178, 0.20), rays, strict=True):
                    assert np.interp(gamma, list(errors), list(errors.values())) == pytest.approx(
                        golden, abs=0.5
                    )


@pytest.fixture
def study(tmp_path):
    """A folder of three BF16 and three FP8 runs, with a study.json that declares a larger one,
    `big`, in either precision."""
    folder = write_ladder(tmp_path / "study", (33_000, 74_000, 100_000))
    edit(
        folder / "study.json",
        held_out=["big"],
        runs=[
            GOAL | {"run": name, "recipe": recipe}
            for name, recipe in (
                ("big", "bf16"),
                ("seed2", "bf16"),
                ("big_fp8", "tensorwise"),
                ("big_row", "rowwise"),
            )
        ],
    )
    return folder


def freeze(name, study, folder):
    """What fit.py --predict does."""
    records = read_runs([study])[0]
    groups = [
        fit.fit_group(
            [one for one in records if one.recipe == recipe and one.params_total < BIG], resamples=0
        )
        for recipe in ("bf16", "tensorwise")
    ]
    return predict.freeze(name, groups, records, folder)


def write_big(folder, name="big", t_start="2999-01-01T00:00:00Z", **changes):
    return write_run(folder / name, params=BIG, t_start=t_start, **GOAL | changes)


def test_a_prediction_is_written_with_all_that_it_rests_on(study, tmp_path):
    edit(study / "big" / "config.json")  # a folder with a configuration is no run yet
    made = freeze("big", study, tmp_path / "law")
    content = strict(tmp_path / "law" / "prediction_big.json")
    rest = {key: value for key, value in content.items() if key != "sha256"}
    assert (
        content["sha256"]
        == hashlib.sha256(
            json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
    )
    assert [(one["run_id"], one["summary_sha256"]) for one in content["inputs"]] == [
        (
            f"{name}_bf16",
            hashlib.sha256((study / f"{name}_bf16" / "summary.json").read_bytes()).hexdigest(),
        )
        for name in "abc"
    ]
    assert (
        content["tokenizer_sha256"] == "t" * 64
        and content["val_sha256"] == "v" * 64
        and content["loss_key"] == "loss_bf16"
    )
    assert made.low < law(GOAL["flops_per_token"] * GOAL["tokens"]) < made.high
    text = "\n".join(predict.describe(made))
    assert all(
        word in text
        for word in (
            f"{content['low']:.4f} to {content['high']:.4f}",
            *(row["form"] for row in made.forms),
        )
    )
    assert [one.sha256 for one in predict.load(tmp_path / "law")] == [made.sha256] and predict.load(
        tmp_path / "none"
    ) == []
    with pytest.raises(UserError, match="is there already"):  # nothing is frozen twice
        freeze("big.py", study, tmp_path / "law")
    fp8 = freeze("big_fp8", study, tmp_path)  # from its own recipe alone
    assert [one["run_id"] for one in fp8.content["inputs"]] == [
        "a_fp8",
        "b_fp8",
        "c_fp8",
    ] and fp8.loss > made.loss
    demo = freeze("demo_s_fp8", study, tmp_path)  # a config, counted as train.py --plan counts it
    lines, goal = (
        "\n".join(train_plan(load_config(ROOT / "configs/demo_s_fp8.py"), "")),
        demo.content["target"],
    )
    assert demo.recipe == fp8.recipe == "tensorwise"
    assert re.search(
        rf"  total +{goal['params_total']:,} [\s\S]+  tokens +{goal['tokens']:,} ", lines
    )
    assert f"+ attention            {goal['flops_per_token'] * goal['tokens']:.4e}" in lines
    # as the goal: 24.6 tokens per non-embedding parameter
    for path in study.glob("*_bf16/summary.json"):
        edit(path, params_nonembed=round(strict(path)["tokens"] * 150_000 / GOAL["tokens"]))
    edit(study / "study.json", params="nonembed")  # what the study counts
    made = freeze("big", study, tmp_path)
    assert (
        made.content["convention"] == "nonembed"
        and "150,000 non-embedding parameters" in predict.describe(made)[1]
    )


@pytest.mark.parametrize(
    "name, before, sentence",
    [
        ("bog", None, "did you mean 'big'?"),
        ("../big", None, "there is no run"),
        ("gpt1p5b_fp8", None, "vocabulary of 50257"),
        ("big_row", None, "a run in rowwise, but the runs at hand are bf16, tensorwise"),
        (
            "big",
            lambda study: (study / "big/metrics.jsonl").mkdir(parents=True),
            "big has begun or is finished",
        ),
        # the same point
        (
            "big",
            lambda study: (study / "seed2/checkpoints").mkdir(parents=True),
            "seed2 has begun or is finished",
        ),
        (
            "big",
            lambda study: write_big(study, "other_name", seed=7),
            "other_name has begun or is finished",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(study, tmp_path, name, before, sentence):
    if before:
        before(study)
    with pytest.raises(UserError, match=re.escape(sentence)):
        freeze(name, study, tmp_path)
    assert not list(tmp_path.glob("prediction*"))


def test_what_is_held_out_is_there_or_to_come(study, tmp_path):
    made, C = freeze("big_fp8", study, tmp_path), GOAL["flops_per_token"] * GOAL["tokens"]
    # a figure counts as its own laws do
    for convention, N in (("total", BIG), ("nonembed", 150_000)):
        held = predict.held_of(
            "tensorwise",
            predict.held_out(read_runs([study])[0], [made]),
            [made],
            "loss_bf16",
            convention,
        )
        assert held == (predict.Held("big_fp8", N, GOAL["tokens"], C, None, made),)
    write_big(study, loss=1.5)
    write_big(study, "big_fp8_2", recipe="tensorwise", seed=2, loss=1.5)
    held = predict.held_out(read_runs([study])[0], [made])
    for recipe, loss_key, name, said in (
        ("tensorwise", "loss_bf16", "big_fp8_2", made),
        ("bf16", "loss_bf16", "big", None),
        # only loss_bf16 was predicted
        ("tensorwise", "loss_as_trained", "big_fp8_2", None),
    ):
        (one,) = predict.held_of(recipe, held, [made], loss_key, "total")
        assert one == predict.Held(name, BIG, GOAL["tokens"], C, 1.5, said)


def test_what_is_predicted_is_in_no_fit_and_scored_when_it_is_there(study, capsys, no_figures):
    assert (
        "nobody" in asked(capsys, fit.main, study, "--predict", "nobody", code=2)
        and not (study / "law").exists()
    )
    out = asked(capsys, fit.main, study, "--predict", "big", "--score")
    before, (made,) = strict(study / "law/law.json"), predict.load(study / "law")
    assert (
        "big: predicted loss_bf16 " in out
        and "big: not there yet" in out
        and not (study / "law/score_big.json").exists()
    )
    write_big(study, loss=(loss := 1.001 * made.loss))
    # another seed of what was predicted is held out too
    write_big(study, "large", seed=2, loss=1.01 * made.high)
    out = asked(capsys, fit.main, study, "--score")
    assert all(
        line in out
        for line in ("held out of every fit: big\n", "held out of every fit: large\n", "OUTSIDE")
    )
    assert strict(study / "law/law.json")["groups"] == before["groups"]
    said = strict(study / "law/score_big.json")
    one, _ = said["runs"]
    assert [(row["run_id"], row["inside"]) for row in said["runs"]] == [
        ("big", True),
        ("large", False),
    ]
    assert said["prediction_sha256"] == made.sha256
    assert [one["error_nats"], one["error_percent"]] == pytest.approx(
        [-0.001 * made.loss, 100 * (1 / 1.001 - 1)]
    )
    assert [row["inside"] for row in one["forms"]] == [
        form["low"] <= loss <= form["high"] for form in made.forms
    ]


@pytest.mark.parametrize(
    "changes, damage, sentence",
    [
        ({"t_start": "2020-01-01T00:00:00Z"}, None, "not older than its run"),
        ({"t_start": None}, None, "not older than its run"),
        ({"val_sha256": "w" * 64}, None, "another validation set"),
        ({"tokenizer_sha256": "w" * 64}, None, "another tokenizer"),
        ({"tokens": 40 * BIG}, None, "another recipe, size or number"),
        ({}, lambda path: edit(path, high=9.0), "was edited"),
        ({}, lambda path: path.write_text('{"a'), "not valid JSON"),
    ],
)
def test_neither_another_run_nor_a_damaged_prediction_is_scored(
    study, tmp_path, changes, damage, sentence
):
    path = freeze("big", study, tmp_path).path
    if damage:
        damage(path)
    write_big(study / "elsewhere", **changes)
    with pytest.raises(UserError, match=sentence):
        predict.score(tmp_path, read_runs([study / "elsewhere"])[0])
    assert not (tmp_path / "score_big.json").exists()
