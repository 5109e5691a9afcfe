"""Frozen predictions: what a file holds, what freezing and scoring refuse."""

import hashlib
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.cli import UserError
from runtime.config import load_config
from runtime.plan import plan as train_plan
from scaling import fit, predict
from scaling import predict as frozen
from scaling.laws import Points
from scaling.records import read_runs
from tests.conftest import ROOT
from tests.scaling_runs import law, surface, write_run

SIZES = (33_000, 74_000, 100_000)
GOAL = {"run": "big", "recipe": "bf16", "params_total": 184_320, "params_nonembed": 150_000, "params_matmul": 184_320,
        "tokens": 20 * 184_320, "flops_per_token": 6 * 184_320 + 300_000}


@pytest.fixture
def study(tmp_path):
    """A folder of three BF16 and three FP8 runs, with a study.json that declares a larger one, `big`, in either precision."""
    folder = tmp_path / "study"
    for name, params in zip("abc", SIZES, strict=True):
        write_run(folder / f"{name}_bf16", params=params, curve=False)
        write_run(folder / f"{name}_fp8", params=params, recipe="tensorwise", gap=0.01, curve=False)
    runs = [GOAL, GOAL | {"run": "big_fp8", "recipe": "tensorwise"}, GOAL | {"run": "big_row", "recipe": "rowwise"}]
    (folder / "study.json").write_text(json.dumps({"held_out": ["big"], "runs": runs}))
    return folder


def groups_of(folder, loss_key="loss_bf16", **changes):
    records, _ = read_runs([folder])
    groups = []
    for recipe in ("bf16", "tensorwise"):
        mine = sorted((one for one in records if one.recipe == recipe), key=lambda one: one.params_total)
        N, D, C = (np.array([value(one) for one in mine], dtype=float) for value in (
            lambda one: one.params_total, lambda one: one.tokens, lambda one: one.flops_per_token * one.tokens))
        points = Points(N, D, C, np.array([getattr(one, loss_key) for one in mine]), np.arange(len(mine)))
        groups.append(SimpleNamespace(recipe=recipe, records=tuple(mine), convention="total", points=points,
                                      seed_sd=0.0, held_out=()))
        vars(groups[-1]).update(changes)
    return groups


def write_big(folder, name="big", t_start="2999-01-01T00:00:00Z", **changes):
    count = {key: value for key, value in GOAL.items() if key not in ("run", "recipe", "params_total")}
    return write_run(folder / name, params=GOAL["params_total"], curve=False, t_start=t_start, **count | changes)


def test_a_prediction_is_written_with_all_that_it_rests_on(study, tmp_path):
    made = predict.freeze("big", groups_of(study), tmp_path / "law")
    content = json.loads((tmp_path / "law" / "prediction_big.json").read_text())
    rest = {key: value for key, value in content.items() if key != "sha256"}
    assert content["sha256"] == hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    for one in content["inputs"]:
        assert one["summary_sha256"] == hashlib.sha256((study / one["run_id"] / "summary.json").read_bytes()).hexdigest()
    assert [one["run_id"] for one in content["inputs"]] == ["a_bf16", "b_bf16", "c_bf16"]
    assert content["tokenizer_sha256"] == "t" * 64 and content["val_sha256"] == "v" * 64 and content["loss_key"] == "loss_bf16"
    assert (made.low, made.loss, made.high) == (content["low"], content["loss"], content["high"])
    assert made.low < made.loss < made.high and made.low < law(made.C) < made.high
    assert set(content["parts"]["conventions"]) == {"flops_per_token", "flops_per_token_causal", "flops_per_token_6n_total",
                                                    "flops_per_token_6n_nonembed", "flops_per_token_6n_matmul"}
    assert content["parts"]["conventions"]["flops_per_token"] == pytest.approx(made.loss)
    assert len(set(content["parts"]["conventions"].values())) > 1
    assert len(content["git_commit"] or "0" * 40) == 40 and content["extrapolation"] > 1
    text = "\n".join(predict.describe(made))
    assert f"{made.loss:.4f}" in text and f"{made.low:.4f} to {made.high:.4f}" in text and "counting convention" in text
    assert all(row["form"] in text for row in made.forms)
    assert [one.sha256 for one in predict.load(tmp_path / "law")] == [made.sha256] and predict.load(tmp_path / "none") == []


def test_a_prediction_names_its_commit_where_git_cannot_tell_it(study, tmp_path, monkeypatch, capsys):
    words = [str(study), "--out", str(tmp_path), "--predict", "big", "commit=" + "ab" * 20]
    for told, named in ((None, "ab" * 20), ("cd" * 20, "cd" * 20)):
        monkeypatch.setattr(predict, "_commit", lambda told=told: told)
        assert fit.main(words) == 0
        (made,) = predict.load(tmp_path)
        assert made.content["git_commit"] == named
        made.path.unlink()
    assert fit.main([str(study), "--out", str(tmp_path), "commit=ab"]) == 2
    assert "commit=ab wants --predict NAME" in capsys.readouterr().err


def test_an_fp8_run_is_predicted_from_its_own_recipe_alone(study, tmp_path):
    made = predict.freeze("big_fp8", groups_of(study), tmp_path)
    assert made.recipe == "tensorwise" and [one["run_id"] for one in made.content["inputs"]] == ["a_fp8", "b_fp8", "c_fp8"]
    assert made.loss > predict.freeze("big", groups_of(study), tmp_path).loss
    with pytest.raises(UserError, match="a run in rowwise, but the runs at hand are bf16, tensorwise"):
        predict.freeze("big_row", groups_of(study), tmp_path)
    with pytest.raises(UserError, match="no runs, only a table"):
        predict.freeze("big", groups_of(study, records=()), tmp_path / "table", roots=[study])


def test_chinchillas_law_counts_parameters_each_way(tmp_path):
    for i, params in enumerate((33_000, 74_000, 131_000, 160_000)):
        for ratio in (5, 10, 20, 40):
            write_run(tmp_path / "runs" / f"r{i}_{ratio}", params=params, tokens=ratio * params,
                      loss=surface(params, ratio * params), curve=False)
    (tmp_path / "runs" / "study.json").write_text(json.dumps({"runs": [GOAL]}))
    made = predict.freeze("big", groups_of(tmp_path / "runs")[:1], tmp_path)
    assert made.headline == "chinchilla" and made.loss == pytest.approx(surface(made.N, made.D), rel=1e-3)
    assert set(made.content["parts"]["conventions"]) == {"params_total", "params_nonembed", "params_matmul"}


def test_a_config_is_counted_exactly(study, tmp_path):
    """configs/demo_l_fp8.py, against the lines of train.py --plan."""
    made = predict.freeze("demo_l_fp8", groups_of(study), tmp_path)
    lines = "\n".join(train_plan(load_config(ROOT / "configs" / "demo_l_fp8.py"), "", torch.bfloat16))
    assert made.recipe == "tensorwise" and re.search(rf"  total +{made.N:,} ", lines)
    assert re.search(rf"  tokens +{made.D:,} ", lines)
    assert f"+ attention            {made.C:.4e}" in lines
    with pytest.raises(UserError, match="vocabulary of 50257"):
        predict.freeze("gpt1p5b_fp8", groups_of(study), tmp_path)


def test_nothing_is_frozen_twice(study, tmp_path):
    predict.freeze("big", groups_of(study), tmp_path)
    before = (tmp_path / "prediction_big.json").read_bytes()
    with pytest.raises(UserError, match="is there already"):
        predict.freeze("big.py", groups_of(study), tmp_path)
    assert (tmp_path / "prediction_big.json").read_bytes() == before


@pytest.mark.parametrize("name, sentence", [("bog", "did you mean big?"), ("../big", "is no name of a run"), ("", "no name")])
def test_an_unknown_target_is_refused(study, tmp_path, name, sentence):
    with pytest.raises(UserError, match=sentence.replace("?", r"\?")):
        predict.freeze(name, groups_of(study), tmp_path)
    assert not list(tmp_path.glob("prediction*"))


def test_what_is_there_or_begun_cannot_be_predicted(study, tmp_path):
    clean = groups_of(study)
    (study / "big").mkdir()
    (study / "big" / "config.json").write_text("{}")
    predict.freeze("big", clean, tmp_path / "1")        # a folder with a configuration is no run yet
    (study / "big" / "metrics.jsonl").write_text("{}")
    with pytest.raises(UserError, match="has begun already"):
        predict.freeze("big", clean, tmp_path)
    (study / "big" / "metrics.jsonl").unlink()
    (study / "big" / "config.json").unlink()
    (study / "big").rmdir()
    write_big(study, "other_seed", seed=7)              # another name and seed, the same point
    with pytest.raises(UserError, match="other_seed is finished"):
        predict.freeze("big", groups_of(study), tmp_path)
    held = predict.Held("other_seed", GOAL["params_total"], GOAL["tokens"], 1.0, 2.0, None)
    clean[0].held_out = (held,)
    with pytest.raises(UserError, match="other_seed is finished"):
        predict.freeze("big", clean, tmp_path)


def test_mixed_conventions_and_vocabularies_are_refused(study, tmp_path):
    write_run(study / "d_bf16", params=50_000, flops_per_token_6n_total=6.5 * 50_000, curve=False)
    with pytest.raises(UserError, match="counts FLOPs in another way"):
        predict.freeze("big", groups_of(study), tmp_path)


def test_a_study_without_counts_is_refused(study, tmp_path):
    for text, sentence in (('{"runs": [{"run": "big", "recipe": "bf16"}]}', "says nothing usable of params_total"),
                           ('{"runs": [], "held_out": "big"}', "held_out must be a list"),
                           ('{"runs": [3]}', "list of objects"), ('{"runs": [', "not valid JSON"), ("[]", "expected an object")):
        (study / "study.json").write_text(text)
        with pytest.raises(UserError, match=sentence):
            predict.freeze("big", groups_of(study), tmp_path)


def test_held_out_runs_are_told_apart(study, tmp_path):
    made = predict.freeze("big_fp8", groups_of(study), tmp_path)
    names = predict.named_held_out([study])
    assert names == {"big"} and predict.named_held_out([tmp_path]) == set()
    assert predict.held_of("tensorwise", read_runs([study])[0], [made], names) == (
        predict.Held("big_fp8", made.N, made.D, made.C, None, made),)
    write_big(study)
    write_big(study, "big_fp8_seed2", recipe="tensorwise", seed=2, loss=1.5)
    records, _ = read_runs([study])
    assert {one.run_id for one in records if predict.is_held(one, [made], names)} == {"big", "big_fp8_seed2"}
    (held,) = predict.held_of("tensorwise", records, [made], names, "loss_as_trained")
    assert (held.name, held.loss, held.prediction) == ("big_fp8_seed2", 1.5, made)
    (held,) = predict.held_of("bf16", records, [made], names)
    assert held.name == "big" and held.prediction is None


def test_scoring(study, tmp_path):
    made = predict.freeze("big", groups_of(study), tmp_path)
    records, _ = read_runs([study])
    assert "not there yet" in predict.score(tmp_path, records)[0] and not (tmp_path / "score_big.json").exists()
    loss = 1.001 * made.loss
    write_big(study, loss=loss)
    write_big(study, "seed2", seed=2, loss=1.01 * made.high)
    records, _ = read_runs([study])
    text = "\n".join(predict.score(tmp_path, records))
    said = json.loads((tmp_path / "score_big.json").read_text())
    one, two = said["runs"]
    assert (one["run_id"], two["run_id"]) == ("big", "seed2") and said["prediction_sha256"] == made.sha256
    assert one["error_nats"] == pytest.approx(-0.001 * made.loss) and one["error_percent"] == pytest.approx(100 * (1 / 1.001 - 1))
    assert one["inside"] and not two["inside"] and "OUTSIDE" in text and "inside the interval of 0 of" in text
    for row, form in zip(one["forms"], made.forms, strict=True):
        assert row["inside"] == (form["low"] <= loss <= form["high"])


def test_inside_an_interval_that_holds_everything_is_no_success(study, tmp_path):
    made = predict.freeze("big", groups_of(study), tmp_path)
    write_big(study, loss=1.001 * made.loss)
    for share, is_wide in ((0.09, False), (0.75, True)):
        ends = {"low": made.loss * (1 - share), "high": made.loss * (1 + share)}
        made.path.write_text(json.dumps(resigned(made.content | ends)))
        text = "\n".join(predict.score(tmp_path, read_runs([study])[0]))
        assert ("which reaches 75% from the predicted loss: so wide that it tests nothing" in text) == is_wide, text


@pytest.mark.parametrize("changes, sentence", [
    ({"t_start": "2020-01-01T00:00:00Z"}, "is younger than its run.*move .*/prediction_big.json away to use the run in fits"),
    ({"t_end": "2998-12-31T23:59:59Z"}, "began at 2999-01-01T00:00:00Z and ended at 2998-12-31T23:59:59Z: the file was edited"),
    ({"t_start": None}, "no t_start"),
    ({"val_sha256": "w" * 64}, "another validation set"),
    ({"tokenizer_sha256": "w" * 64}, "another tokenizer"),
    ({"tokens": 40 * 184_320}, "is not the run"),
])
def test_a_run_that_is_not_the_predicted_one_is_not_scored(study, tmp_path, changes, sentence):
    predict.freeze("big", groups_of(study), tmp_path)
    (study / "elsewhere").mkdir()
    write_big(study / "elsewhere", **changes)
    with pytest.raises(UserError, match=sentence):
        predict.score(tmp_path, read_runs([study / "elsewhere"])[0])
    assert not (tmp_path / "score_big.json").exists()


def resigned(content):
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return rest | {"sha256": hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()}


@pytest.mark.parametrize("damage, sentence", [
    (lambda text: text.replace('"low": ', '"low": 0'), "not valid JSON"),
    (lambda text: json.dumps(json.loads(text) | {"high": 9.0}), "was edited after it was frozen"),
    (lambda text: json.dumps(json.loads(text) | {"date": "2020-01-01T00:00:00Z"}), "was edited after it was frozen"),
    (lambda text: json.dumps(resigned(json.loads(text) | {"date": "2999-01-01T00:00:00Z"})), "yet to come"),
    (lambda text: json.dumps(resigned(json.loads(text) | {"date": "yesterday"})), "no prediction of this version"),
    (lambda text: json.dumps(resigned({"target": 3})), "no prediction of this version"),
    (lambda text: text[:len(text) // 2], "not valid JSON"),
    (lambda text: "", "not valid JSON"),
    (lambda text: "[1]", "expected an object"),
    (lambda text: text.replace('"loss_unit"', '"level2": NaN, "loss_unit"'), "no prediction of this version"),
])
def test_a_damaged_prediction_is_refused(study, tmp_path, damage, sentence):
    path = predict.freeze("big", groups_of(study), tmp_path).path
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    with pytest.raises(UserError, match=sentence):
        predict.score(tmp_path, [])


def test_an_input_is_no_test(study, tmp_path):
    """Even where dates would allow it: a run that the prediction was made from is not scored by it."""
    made = predict.freeze("big", groups_of(study), tmp_path)
    write_big(study)
    record = next(one for one in read_runs([study])[0] if one.run_id == "big")
    content = dict(made.content, inputs=[{"run_id": "x", "summary_sha256": record.summary_sha256}])
    made.path.write_text(json.dumps(resigned(content)))
    with pytest.raises(UserError, match="one of the inputs"):
        predict.score(tmp_path, [record])


def test_a_folder_without_predictions_has_no_score(tmp_path):
    with pytest.raises(UserError, match="holds no prediction"):
        predict.score(tmp_path, [])


def test_predict_reads_without_torch():
    code = "import sys, scaling.predict, scaling.design, scaling.budget; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert frozen.Held is predict.Held
