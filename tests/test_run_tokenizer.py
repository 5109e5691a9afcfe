"""eval/run_tokenizer.py: a model is never read with a tokenizer that it was not trained with."""

import json

import pytest
from eval_runs import BYTES, build_run

from eval import export, run_tokenizer, sample
from runtime.config import read_config


@pytest.fixture
def run(tmp_path, monkeypatch):
    return build_run(tmp_path, monkeypatch)


def manifest_with(state):
    return ("checkpoints/step_00000004/manifest.json", {"state": state})


@pytest.mark.parametrize("name, content", [
    manifest_with({"tokenizer_sha256": "f" * 64}), manifest_with({"imported": {"tokenizer_sha256": "f" * 64}}),
    ("summary.json", {"tokenizer_sha256": "f" * 64})])
@pytest.mark.parametrize("command", [sample, export])
def test_a_tokenizer_that_the_model_was_not_trained_with_is_refused(run, capsys, command, name, content):
    """As many ids, other text: nothing else would tell."""
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "DONE").touch()
    path.write_text(json.dumps(content))
    assert command.main([str(run), str(run / "new")]) == 2
    said = capsys.readouterr().err
    assert f"the tokenizer byte is not the one that the model of {run} was trained with (81fbde863..., not fffffffff...)" in said
    assert said.count("\n") == 1 and not (run / "new").exists()


def test_the_newest_checkpoint_says_which_tokenizer_it_was(run):
    """A summary may be of another time, a manifest that cannot be read is told of by who loads the checkpoint."""
    config = read_config(run)
    for step, state in ((2, {"tokenizer_sha256": "e" * 64}), (4, {"tokenizer_sha256": BYTES.sha256})):
        path = run / manifest_with({})[0].replace("4", str(step))
        path.parent.mkdir(parents=True)
        (path.parent / "DONE").touch()
        path.write_text(json.dumps({"state": state}))
    (run / "summary.json").write_text(json.dumps({"tokenizer_sha256": "f" * 64}))
    assert run_tokenizer.read_tokenizer(config, run).sha256 == BYTES.sha256
    for damaged in ("", "[]", "{", '{"state": 3}', '{"state": {"imported": [], "tokenizer_sha256": 5}}'):
        path.write_text(damaged)
        (run / "summary.json").write_text(damaged)
        assert run_tokenizer.read_tokenizer(config, run).sha256 == BYTES.sha256
