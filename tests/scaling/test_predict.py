"""What a frozen prediction holds, what freezing and scoring refuse."""

import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lib.errors import UserError
from runtime.config import load_config
from runtime.plan import plan as train_plan
from scaling import fit, predict
from scaling.groups import Group, fit_group
from scaling.predictions import Held, Prediction, held_of, held_out, load
from scaling.records import Record, read_runs
from tests.conftest import ROOT, asked, figures_off
from tests.helpers.scaling_runs import edit, law, strict, write_ladder, write_run

BIG = 184_320
GOAL = {
    "params_total": BIG,
    "params_nonembed": 150_000,
    "params_matmul": BIG,
    "tokens": 20 * BIG,
    "flops_per_token": 6 * BIG + 300_000,
}
COMPUTE = GOAL["flops_per_token"] * GOAL["tokens"]
DECLARED = (("big", "bf16"), ("seed2", "bf16"), ("big_fp8", "tensorwise"), ("big_row", "rowwise"))


def fit_recipes(folder: Path) -> list[Group]:
    records = read_runs([folder])[0]
    return [
        fit_group([run for run in records if run.recipe == recipe], resamples=0)
        for recipe in ("bf16", "tensorwise")
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three BF16 and three FP8 runs, with a study.json that declares a larger one,
    `big`, in either precision."""
    sizes = (33_000, 74_000, 100_000)
    folder = write_ladder(tmp_path_factory.mktemp("ladder") / "study", sizes)
    runs = [GOAL | {"run": name, "recipe": recipe} for name, recipe in DECLARED]
    edit(folder / "study.json", held_out=["big"], runs=runs)
    return folder


@pytest.fixture(scope="module")
def groups(finished: Path) -> list[Group]:
    return fit_recipes(finished)


@pytest.fixture
def study(finished: Path, tmp_path: Path) -> Path:
    """A copy of the folder, which a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "study"))


Freeze = Callable[[str, Path, Path], Prediction]


@pytest.fixture
def freeze(groups: list[Group]) -> Freeze:
    """freeze(run, study, folder): what fit.py --predict does."""

    def frozen(name: str, study: Path, folder: Path) -> Prediction:
        return predict.freeze(name, groups, read_runs([study])[0], folder)

    return frozen


def write_big(folder: Path, name: str = "big", **changes: Any) -> dict[str, Any]:
    t_start = changes.pop("t_start", "2999-01-01T00:00:00Z")
    return write_run(folder / name, params=BIG, t_start=t_start, **GOAL | changes)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --------------------------------------------------------------------------------------- freezing


def test_a_prediction_has_the_hash_of_its_content(freeze: Freeze, study: Path, tmp_path: Path):
    freeze("big", study, tmp_path)
    content = strict(tmp_path / "prediction_big.json")
    signed = {key: value for key, value in content.items() if key != "sha256"}
    canonical = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    assert content["sha256"] == sha256(canonical.encode())


def test_a_prediction_names_the_runs_that_it_rests_on(freeze: Freeze, study: Path, tmp_path: Path):
    made = freeze("big", study, tmp_path)
    expected = {
        f"{letter}_bf16": sha256((study / f"{letter}_bf16/summary.json").read_bytes())
        for letter in "abc"
    }
    assert {run.run_id: run.summary_sha256 for run in made.file.inputs} == expected


def test_a_prediction_says_what_it_compares(freeze: Freeze, study: Path, tmp_path: Path):
    file = freeze("big", study, tmp_path).file
    assert (file.tokenizer_sha256, file.val_sha256) == ("t" * 64, "v" * 64)
    assert file.loss_key == "loss_bf16"


def test_the_interval_holds_the_known_law(freeze: Freeze, study: Path, tmp_path: Path):
    made = freeze("big", study, tmp_path)
    assert made.low < law(COMPUTE) < made.high


def test_the_page_has_the_interval_and_each_form(freeze: Freeze, study: Path, tmp_path: Path):
    made = freeze("big", study, tmp_path)
    page = "\n".join(predict.describe(made))
    assert f"{made.low:.4f} to {made.high:.4f}" in page
    assert all(row.form in page for row in made.file.forms)


def test_a_folder_with_a_configuration_is_no_run_yet(freeze: Freeze, study: Path, tmp_path: Path):
    edit(study / "big" / "config.json")
    assert freeze("big", study, tmp_path).target == "big"


def test_a_frozen_prediction_is_read_again(freeze: Freeze, study: Path, tmp_path: Path):
    made = freeze("big", study, tmp_path / "law")
    assert load(tmp_path / "law") == [made]
    assert load(tmp_path / "none") == []


def test_nothing_is_frozen_twice(freeze: Freeze, study: Path, tmp_path: Path):
    freeze("big", study, tmp_path)
    with pytest.raises(UserError, match="is there already"):
        freeze("big.py", study, tmp_path)


def test_a_recipe_is_predicted_from_its_own_runs(freeze: Freeze, study: Path, tmp_path: Path):
    fp8, bf16 = freeze("big_fp8", study, tmp_path), freeze("big", study, tmp_path)
    assert [run.run_id for run in fp8.file.inputs] == ["a_fp8", "b_fp8", "c_fp8"]
    assert fp8.loss > bf16.loss


def test_a_config_is_counted_as_train_counts_it(freeze: Freeze, study: Path, tmp_path: Path):
    target = freeze("demo_s_fp8", study, tmp_path).file.target
    page = "\n".join(train_plan(load_config(ROOT / "configs/demo_s_fp8.py"), ""))
    assert target.recipe == "tensorwise"
    assert re.search(rf"  total +{target.params_total:,} ", page)
    assert re.search(rf"  tokens +{target.tokens:,} ", page)
    assert f"+ attention            {target.flops:.4e}" in page


def test_a_study_of_nonembedding_parameters_predicts_by_them(study: Path, tmp_path: Path):
    """At the target's 24.6 tokens per non-embedding parameter."""
    for path in study.glob("*_bf16/summary.json"):
        tokens = strict(path)["tokens"]
        edit(path, params_nonembed=round(tokens * 150_000 / GOAL["tokens"]))
    edit(study / "study.json", params="nonembed")
    made = predict.freeze("big", fit_recipes(study), read_runs([study])[0], tmp_path)
    assert made.file.convention == "nonembed"
    assert "150,000 non-embedding parameters" in predict.describe(made)[1]


def begin(*path: str) -> Callable[[Path], Any]:
    return lambda study: study.joinpath(*path).mkdir(parents=True)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("bog", None, "did you mean 'big'?"),
        ("../big", None, "there is no run"),
        ("gpt1p5b_fp8", None, "vocabulary of 50257"),
        ("big_row", None, "a run in rowwise, but the runs at hand are bf16, tensorwise"),
        ("big", begin("big", "metrics.jsonl"), "big has begun or is finished"),
        # the same point
        ("big", begin("seed2", "checkpoints"), "seed2 has begun or is finished"),
        (
            "big",
            lambda study: write_big(study, "other_name", seed=7),
            "other_name has begun or is finished",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    freeze: Freeze,
    study: Path,
    tmp_path: Path,
    name: str,
    change: Callable[[Path], Any] | None,
    sentence: str,
):
    if change:
        change(study)
    with pytest.raises(UserError, match=re.escape(sentence)):
        freeze(name, study, tmp_path)
    assert not list(tmp_path.glob("prediction*"))


# --------------------------------------------------------------------------------- what is held out


@pytest.mark.parametrize(("convention", "N"), [("total", BIG), ("nonembed", 150_000)])
def test_a_run_to_come_is_held_by_its_prediction(
    freeze: Freeze, study: Path, tmp_path: Path, convention: str, N: int
):
    """A figure counts as its own laws do."""
    made = freeze("big_fp8", study, tmp_path)
    held = held_of("tensorwise", [], [made], "loss_bf16", convention)
    assert held == (Held("big_fp8", N, GOAL["tokens"], COMPUTE, None, made),)


def held_records(study: Path, made: Prediction) -> list[Record]:
    """`big`, which the study holds out, and another seed of the predicted run."""
    write_big(study, loss=1.5)
    write_big(study, "big_fp8_2", recipe="tensorwise", seed=2, loss=1.5)
    return held_out(read_runs([study])[0], [made])


@pytest.mark.parametrize(
    ("recipe", "loss_key", "name", "is_predicted"),
    [
        ("tensorwise", "loss_bf16", "big_fp8_2", True),
        ("bf16", "loss_bf16", "big", False),
        # only loss_bf16 was predicted
        ("tensorwise", "loss_as_trained", "big_fp8_2", False),
    ],
)
def test_a_held_out_run_that_is_there(
    freeze: Freeze,
    study: Path,
    tmp_path: Path,
    recipe: str,
    loss_key: str,
    name: str,
    is_predicted: bool,
):
    made = freeze("big_fp8", study, tmp_path)
    held = held_of(recipe, held_records(study, made), [made], loss_key, "total")
    prediction = made if is_predicted else None
    assert held == (Held(name, BIG, GOAL["tokens"], COMPUTE, 1.5, prediction),)


# ---------------------------------------------------------------------------------------- scoring


@pytest.mark.usefixtures("no_figures")
def test_a_run_that_is_nowhere_declared_is_refused(study: Path, capsys: pytest.CaptureFixture):
    assert "nobody" in asked(capsys, fit.main, study, "--predict", "nobody", code=2)
    assert not (study / "law").exists()


@pytest.mark.usefixtures("no_figures")
def test_a_prediction_waits_for_its_run(study: Path, capsys: pytest.CaptureFixture):
    page = asked(capsys, fit.main, study, "--predict", "big", "--score")
    assert "big: predicted loss_bf16 " in page and "big: not there yet" in page
    assert not (study / "law/score_big.json").exists()


@dataclass
class Scored:
    """A study whose predicted run has come, and another seed of it, outside of the interval: the
    groups of law.json before and after, and what was printed."""

    folder: Path
    before: dict
    after: dict
    page: str


@pytest.fixture(scope="module")
def scored(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    folder = Path(shutil.copytree(finished, tmp_path_factory.mktemp("scored") / "study"))
    page = io.StringIO()
    with figures_off(), redirect_stdout(page):
        assert fit.main([str(folder), "--predict", "big"]) == 0
        before = strict(folder / "law/law.json")["groups"]
        (made,) = load(folder / "law")
        write_big(folder, loss=1.001 * made.loss)
        write_big(folder, "large", seed=2, loss=1.01 * made.high)
        assert fit.main([str(folder), "--score"]) == 0
    return Scored(folder, before, strict(folder / "law/law.json")["groups"], page.getvalue())


def test_what_is_predicted_is_in_no_fit(scored: Scored):
    """Nor is another seed of it."""
    for run in ("big", "large"):
        assert f"held out of every fit: {run}\n" in scored.page
    assert scored.after == scored.before


def test_what_is_predicted_is_scored_when_it_is_there(scored: Scored):
    assert "OUTSIDE" in scored.page
    assert (scored.folder / "law/score_big.json").exists()


@pytest.fixture
def score(freeze: Freeze, study: Path, tmp_path: Path) -> dict[str, Any]:
    """score_big.json of two seeds, one inside and one outside the interval."""
    made = freeze("big", study, tmp_path)
    write_big(study, loss=1.001 * made.loss)
    write_big(study, "large", seed=2, loss=1.01 * made.high)
    predict.score(tmp_path, read_runs([study])[0])
    return strict(tmp_path / "score_big.json")


def test_a_score_names_its_prediction_and_each_seed(score: dict[str, Any], tmp_path: Path):
    (made,) = load(tmp_path)
    assert score["prediction_sha256"] == made.sha256
    runs = [(row["run_id"], row["inside"]) for row in score["runs"]]
    assert runs == [("big", True), ("large", False)]


def test_errors_are_predicted_less_measured(score: dict[str, Any], tmp_path: Path):
    (made,) = load(tmp_path)
    run = score["runs"][0]
    errors = [run["error_nats"], run["error_percent"]]
    assert errors == pytest.approx([-0.001 * made.loss, 100 * (1 / 1.001 - 1)])


def test_each_form_is_scored(score: dict[str, Any], tmp_path: Path):
    (made,) = load(tmp_path)
    run = score["runs"][0]
    expected = [row.low <= run["loss"] <= row.high for row in made.file.forms]
    assert [row["inside"] for row in run["forms"]] == expected


@pytest.mark.parametrize(
    ("changes", "damage", "sentence"),
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
    freeze: Freeze,
    study: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    damage: Callable[[Path], Any] | None,
    sentence: str,
):
    path = freeze("big", study, tmp_path).path
    if damage:
        damage(path)
    write_big(study / "elsewhere", **changes)
    records = read_runs([study / "elsewhere"])[0]
    with pytest.raises(UserError, match=sentence):
        predict.score(tmp_path, records)
    assert not (tmp_path / "score_big.json").exists()


# --------------------------------------------------------------------------------------- versions


def rewrite(path: Path, **changes: Any) -> None:
    """Another content with a right hash; a key that is None goes."""
    content = strict(path) | changes
    signed = {key: value for key, value in content.items() if value is not None and key != "sha256"}
    canonical = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(signed | {"sha256": sha256(canonical.encode())}))


def test_a_prediction_of_older_code_is_read(freeze: Freeze, study: Path, tmp_path: Path):
    """It called its schema_version format_version."""
    made = freeze("big", study, tmp_path)
    rewrite(made.path, schema_version=None, format_version=1, git_commit="0" * 40)
    (old,) = load(tmp_path)
    assert old.file.schema_version == 1 and old.file.forms == made.file.forms


@pytest.mark.parametrize("changes", [{"schema_version": 99}, {"new_key": 1}, {"loss": None}])
def test_a_prediction_of_another_version_is_refused_by_name(
    freeze: Freeze, study: Path, tmp_path: Path, changes: dict[str, Any]
):
    made = freeze("big", study, tmp_path)
    rewrite(made.path, **changes)
    with pytest.raises(UserError, match=r"prediction_big\.json is of another version"):
        load(tmp_path)
