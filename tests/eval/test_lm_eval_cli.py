"""eval/lm_eval_cli.py: lm-eval's own command line scores a run as eval.harness does."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model

from eval import harness, lm_eval_cli
from fp8.linears import EmulatedLinear
from tests.conftest import TINY, process
from tests.eval.test_harness import make_task
from tests.helpers.eval_runs import build, build_lm, build_run, call, write_run

run = pytest.fixture(build_run)
SUMS = [
    {"q": f"{a} + {b} =", "answers": [str(a + b), str(a + b + 1)], "gold": 0}
    for a in range(4)
    for b in range(4)
]
QUESTION = [Instance("loglikelihood", {}, ("1 + 2 =", " 3"), 0)]


def test_scores_are_those_of_the_harness(run: Path, tmp_path: Path) -> None:
    folder = make_task(tmp_path / "tasks", SUMS)
    call(harness, run, "tasks=sums", f"include={folder}", "device=cpu", "dtype=float32")
    ours = json.loads((run / "eval/sums_float32.json").read_text())["tasks"]["sums"]

    words = ["--model", "nanofp8", "--model_args", f"run={run},dtype=float32", "--device", "cpu"]
    words += ["--tasks", "sums", "--include_path", folder, "--output_path", tmp_path / "scores"]
    done = process("-m", "eval.lm_eval_cli", *words, "--log_samples", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "scores").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]["sums"]

    assert 0 < ours["acc"] < 1
    assert theirs["acc,none"] == ours["acc"] and theirs["sample_len"] == ours["n"] == 16
    assert "nanofp8" in done.stdout


def test_its_model_answers_as_the_harness(run: Path) -> None:
    lm_eval_cli.register()
    lm = get_model("nanofp8").create_from_arg_string(
        f"run={run},dtype=float32,micro_batch=2", {"device": "cpu", "batch_size": 1}
    )
    assert (lm.micro_batch, lm.device.type) == (2, "cpu")
    assert str(next(lm.model.parameters()).dtype) == "torch.float32"


def test_its_linears_multiply_in_the_recipe_that_is_asked_for(run: Path) -> None:
    lm = lm_eval_cli.NanoFP8LM(run=str(run), fp8="rowwise", device="cpu")
    plain = lm_eval_cli.NanoFP8LM(run=str(run), device="cpu")
    assert isinstance(lm.model.layers[0].mlp.down, EmulatedLinear)
    assert not isinstance(plain.model.layers[0].mlp.down, EmulatedLinear)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("rum={run}", "there is no key 'rum'; did you mean 'run'?"),
        ("step=1", "run is missing"),
        ("run={run},step=7", "step=7: {run} has no such checkpoint"),
        ("run={run},fp8=nvfp5", "fp8='nvfp5' is not one of"),
    ],
)
def test_a_mistake_is_a_sentence(
    words: str, sentence: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm_eval_cli.register()

    def make(_: list[str]) -> None:
        get_model("nanofp8").create_from_arg_string(words.format(run=run), {"device": "cpu"})

    assert lm_eval_cli.FRAME.run(["x"], make) == 2
    assert sentence.format(run=run) in capsys.readouterr().err


def test_several_processes_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(lm_eval_cli.UserError, match="is one process, and 2 were started"):
        lm_eval_cli.NanoFP8LM(run=str(run))


def test_a_batch_size_of_lm_eval_is_not_silently_dropped(run: Path) -> None:
    with pytest.raises(
        lm_eval_cli.UserError, match="--batch_size 8 is not used: give micro_batch="
    ):
        lm_eval_cli.NanoFP8LM(batch_size=8, run=str(run))


def cached(database: Path, **model_args: object) -> CachingLM:
    """A model with a database of answers, as lm-eval makes it for --use_cache."""
    lm = lm_eval_cli.NanoFP8LM(**{"device": "cpu", "dtype": "float32"} | model_args)
    return CachingLM(lm, str(database))


def test_a_database_gives_a_run_its_own_answers_back(run: Path, tmp_path: Path) -> None:
    database = tmp_path / "answers.db"
    first = cached(database, run=run).loglikelihood(QUESTION)
    again = cached(database, run=run.rename(tmp_path / "moved"))
    again.lm.loglikelihood = None  # must not be called
    assert again.loglikelihood(QUESTION) == first


@pytest.mark.parametrize(
    "changes", [{"run": "out/other"}, {"step": 2}, {"fp8": "rowwise"}, {"dtype": "float32"}]
)
def test_a_database_of_another_model_is_refused(changes: dict, run: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "out/other", step=1, seed=2, **asdict(TINY))
    write_run(run, step=2, seed=3, mixture={"prose": 0.5, "code": 0.5}, **asdict(TINY))
    database = tmp_path / "answers.db"
    own = {"run": run, "step": 1, "dtype": "bfloat16"}
    cached(database, **own).loglikelihood(QUESTION)

    owner = f"run={run} step=1 fp8=off dtype=bfloat16"
    with pytest.raises(lm_eval_cli.UserError, match=f"{database} holds answers of {owner}, not of"):
        cached(database, **own | changes)


def test_a_database_of_unknown_models_is_refused(run: Path, tmp_path: Path) -> None:
    database = tmp_path / "answers.db"
    plain = build_lm(build())  # as --model hf would fill it
    CachingLM(plain, str(database)).loglikelihood(QUESTION)
    with pytest.raises(lm_eval_cli.UserError, match="holds answers without a note of their model"):
        cached(database, run=run)


def test_another_database_is_refused_by_the_command(run: Path, tmp_path: Path) -> None:
    folder = make_task(tmp_path / "tasks", SUMS)
    words = ["--model", "nanofp8", "--device", "cpu", "--tasks", "sums", "--include_path", folder]
    words += ["--use_cache", tmp_path / "answers", "--model_args"]
    database = tmp_path / "answers_rank0.db"
    cached(database, run=run).loglikelihood(QUESTION)
    done = process("-m", "eval.lm_eval_cli", *words, f"run={run}", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    last_line = done.stderr.splitlines()[-1]
    assert f"{database} holds answers of run={run} step=1 fp8=off dtype=float32" in last_line
