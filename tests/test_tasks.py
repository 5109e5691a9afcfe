"""eval/tasks.py: what a task reads is saved once, and scored from there without network, whole or not at all."""

from pathlib import Path

import datasets
import pytest

from eval import harness, tasks
from runtime.cli import UserError
from tests.eval_runs import build, build_lm, make_task, protect_environment
from tests.hub_server import HubServer, commit, point_at, write_repository

PIQA = {"validation": [{"goal": f"goal {i} is", "sol1": f"one {i}", "sol2": f"another {i}", "label": i % 2} for i in range(7)]}
SUBJECT = {split: [{"question": f"{split} {i}?", "subject": "anatomy", "choices": ["a", "b", "c", "d"], "answer": i % 4}
                   for i in range(n)] for split, n in (("test", 9), ("dev", 5))}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    protect_environment(monkeypatch)
    tasks.write_task_data(tmp_path / "saved", "baber/piqa", None, PIQA)
    return tmp_path / "saved"


def load(names, folder):
    return tasks.load(names, None, offline=str(folder))["tasks"]


def test_rows_come_back_as_they_were_written_and_score_alike(folder, tmp_path):
    task = load(["piqa"], folder)["piqa"]
    assert list(task.eval_docs) == PIQA["validation"] and len(task.dataset["train"]) == 0      # no question shows an example
    assert tasks.save_tasks(tmp_path / "copy", {"piqa": task}) == ["piqa: 7 rows of validation"]
    ours, theirs = (harness.evaluate(build_lm(build()), {"tasks": load(["piqa"], where), "groups": {}, "group_map": {}}, None)
                    for where in (folder, tmp_path / "copy"))
    assert ours == theirs and ours[0]["piqa"]["n"] == 7 and ours[0]["piqa"]["chance"] == 0.5
    tasks.write_task_data(folder, "Rowan/hellaswag", None, {"validation": [
        {"activity_label": "Dusting", "ctx_a": "A man", "ctx_b": "he", "endings": ["x", "y", "z", "u"], "label": "2"}]})
    both = load(["piqa", "hellaswag"], folder)
    assert both["hellaswag"].doc_to_target(both["hellaswag"].eval_docs[0]) == 2 and len(both["piqa"].eval_docs) == 7
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "baber--piqa", "Rowan--hellaswag"}


def test_examples_are_saved_with_the_questions_and_mmlu_shows_five(tmp_path, monkeypatch):
    protect_environment(monkeypatch)
    rows = {split: datasets.Dataset.from_list(rows) for split, rows in SUBJECT.items()} | {"auxiliary_train": "never read"}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    monkeypatch.setitem(tasks.FOLDERS, "mmlu_anatomy", "mmlu/default")
    assert harness.main(["--fetch", str(tmp_path / "all"), "tasks=mmlu_anatomy"]) == 0
    entry = tasks.read_manifest(tmp_path / "all")["cais--mmlu/anatomy"]
    assert (entry["revision"], entry["tasks"]) == (None, ["mmlu_anatomy"])
    assert {split: saved["rows"] for split, saved in entry["splits"].items()} == {"test": 9, "dev": 5}
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("network"))
    task = load(["mmlu_anatomy"], tmp_path / "all")["mmlu_anatomy"]
    task.build_all_requests(limit=1)
    assert task.instances[0].args[0].count("Answer:") == 6 and "dev 4?" in task.instances[0].args[0]


def test_what_the_hub_had_is_saved_with_its_revision(tmp_path, monkeypatch, capsys):
    protect_environment(monkeypatch)
    hub, saved = tmp_path / "hub", tmp_path / "saved"
    write_repository(hub, "baber/piqa", {f"data/{split}-00000-of-00001.parquet": PIQA["validation"] for split in
                                         ("train", "validation")})
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with HubServer(hub) as server:
        point_at(server.url, monkeypatch)
        assert harness.main(["--fetch", str(saved), "tasks=piqa,demo"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"{name}: nothing to save, it is made from a run's own validation shards" for name in tasks.DEMO),
        "piqa: 7 rows of validation"]
    entry = tasks.read_manifest(saved)["baber--piqa/default"]
    assert entry["revision"] == commit(hub, "baber/piqa") and set(entry["splits"]) == {"validation"}
    for split in ("train", "test"):     # of a revision that is not known: nor is it known to be the same
        tasks.write_task_data(saved, "baber/piqa", None, {split: PIQA["validation"]})
    assert set(tasks.read_manifest(saved)["baber--piqa/default"]["splits"]) == {"test"}


def test_what_is_damaged_or_lacks_gets_a_sentence(folder):
    path = folder / "baber--piqa" / "default" / "validation.parquet"
    whole, manifest = path.read_bytes(), (folder / "manifest.json").read_text()

    def refused(name, words, where=folder):
        with pytest.raises(UserError, match=words):
            load([name], where)
    refused("hellaswag", "holds no data of Rowan--hellaswag/default: add the task with --fetch")
    path.write_bytes(whole[:-1] + b"\0")
    refused("piqa", "its sha256 differs")
    path.unlink()
    refused("piqa", "is missing")
    for content, words in (("{", "is damaged"), (manifest.replace('version": 1', 'version": 2'), "version=2, this program")):
        (folder / "manifest.json").write_text(content)
        refused("piqa", words)
    refused("piqa", "holds no manifest.json, so no saved tasks", folder / "elsewhere")
    (folder / "manifest.json").write_text(manifest)
    tasks.write_task_data(folder, "allenai/ai2_arc", "ARC-Easy", {"train": [{"question": "?", "answerKey": "A"}]})
    refused("arc_easy", "'arc_easy' could not be loaded .* may never have been saved")


def test_a_write_that_fails_leaves_what_was_there(folder, monkeypatch):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def full(descriptor):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        tasks.write_task_data(folder, "baber/piqa", None, {"validation": [{"goal": "other"}]})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_files_of_the_users_own_lie_beside_their_yaml(folder, tmp_path, monkeypatch):
    mine = make_task(tmp_path / "mine", [{"q": "a", "answers": ["b", "c"], "gold": 0}] * 3)
    monkeypatch.chdir(tmp_path)
    for offline in (None, str(folder)):
        assert len(tasks.load(["sums"], str(mine), offline=offline)["tasks"]["sums"].eval_docs) == 3
    assert tasks.is_local(["sums", "val_ppl"], str(mine)) and not tasks.is_local(["sums", "piqa"], str(mine))
    (mine / "sums.jsonl").rename(tmp_path / "sums.jsonl")
    with pytest.raises(UserError, match=f"FileNotFoundError: .*{mine}/sums.jsonl.*: its data lie in files that its YAML names"):
        tasks.load(["sums"], str(mine))     # not the file of that name where the command happens to run


def test_the_groups_are_lm_evals_own_tasks():
    import lm_eval
    from lm_eval.tasks import TaskManager
    theirs = Path(lm_eval.__file__).parent / "tasks"
    names = TaskManager(include_path=[theirs / folder for folder in dict.fromkeys(tasks.FOLDERS.values())],
                        include_defaults=False).all_tasks
    assert set(tasks.FULL) <= set(names) and set(tasks.FOLDERS) == set(tasks.FULL)
    assert tasks.expand(("core", "piqa", "full")) == list(tasks.FULL) and len(tasks.FULL) == 12
