"""eval/task_data.py: what a task reads is saved once, and scored from there without network, whole or not at all."""

import json
import random
from pathlib import Path

import datasets
import pytest
from eval_runs import build, build_lm, protect_environment, words

from eval import harness, results, task_data, task_list
from runtime.cli import UserError
from tests.hub_layout import write_repository
from tests.hub_server import HubServer, commit

PIQA = {"validation": [{"goal": f"goal {i} is", "sol1": f"one {i}", "sol2": f"another {i}", "label": i % 2} for i in range(7)]}
SUBJECT = {split: [{"question": f"{split} {i}?", "subject": "anatomy", "choices": ["a", "b", "c", "d"], "answer": i % 4}
                   for i in range(n)] for split, n in (("test", 9), ("dev", 5))}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    protect_environment(monkeypatch)
    task_data.write_task_data(tmp_path / "saved", "baber/piqa", None, PIQA)
    return tmp_path / "saved"


def load(names, folder):
    return task_list.load(names, None, offline=str(folder))["tasks"]


def test_rows_come_back_as_they_were_written(folder):
    task = load(["piqa"], folder)["piqa"]
    assert list(task.eval_docs) == PIQA["validation"] and task_data.splits_read(task) == ["validation"]
    assert len(task.dataset["train"]) == 0      # never saved, for no question shows an example
    task_data.write_task_data(folder, "Rowan/hellaswag", None, {"validation": [
        {"activity_label": "Dusting", "ctx_a": "A man", "ctx_b": "he", "endings": ["x", "y", "z", "u"], "label": "2"}]})
    both = load(["piqa", "hellaswag"], folder)
    assert both["hellaswag"].doc_to_target(both["hellaswag"].eval_docs[0]) == 2 and len(both["piqa"].eval_docs) == 7
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "baber--piqa", "Rowan--hellaswag"}
    assert datasets.load_dataset.__module__.startswith("datasets")      # nothing stays replaced


def test_examples_are_saved_with_the_questions_and_mmlu_shows_five(tmp_path, monkeypatch):
    protect_environment(monkeypatch)
    asked = []

    def load_dataset(path=None, name=None, **settings):
        asked.append((path, name))
        rows = {split: datasets.Dataset.from_list(rows) for split, rows in SUBJECT.items()}
        return rows | {"auxiliary_train": "never read"}
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setitem(task_list.FOLDERS, "mmlu_anatomy", "mmlu/default")
    assert harness.main(["--fetch", str(tmp_path / "all"), "tasks=mmlu_anatomy"]) == 0
    assert asked == [("cais/mmlu", "anatomy")]
    entry = task_data.read_manifest(tmp_path / "all")["cais--mmlu/anatomy"]
    assert (entry["revision"], entry["tasks"]) == (None, ["mmlu_anatomy"])
    assert {split: saved["rows"] for split, saved in entry["splits"].items()} == {"test": 9, "dev": 5}
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("network"))
    task = load(["mmlu_anatomy"], tmp_path / "all")["mmlu_anatomy"]
    task.build_all_requests(limit=1)
    assert task.instances[0].args[0].count("Answer:") == 6 and "dev 4?" in task.instances[0].args[0]


def test_what_the_hub_had_is_saved_with_its_revision(tmp_path, monkeypatch, capsys):
    from tests.hub_server import point_at
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
        *(f"{name}: nothing to save, it is made from a run's own validation shards" for name in task_list.DEMO),
        "piqa: 7 rows of validation"]
    entry = task_data.read_manifest(saved)["baber--piqa/default"]
    assert entry["revision"] == commit(hub, "baber/piqa") and set(entry["splits"]) == {"validation"}
    task_data.write_task_data(saved, "baber/piqa", None, {"train": PIQA["validation"]})     # of a revision that is not known
    task_data.write_task_data(saved, "baber/piqa", None, {"test": PIQA["validation"]})      # nor is this known to be the same
    assert set(task_data.read_manifest(saved)["baber--piqa/default"]["splits"]) == {"test"}


def test_fetching_what_needs_no_network_says_so(tmp_path, monkeypatch, capsys):
    protect_environment(monkeypatch)
    assert harness.main(["--fetch", str(tmp_path / "saved"), "tasks=demo"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and said[-1] == f"{tmp_path / 'saved'} was not made: score these tasks without offline="
    assert not (tmp_path / "saved").exists()


def test_scores_from_saved_data_are_those_of_the_data_itself(folder, tmp_path):
    lm, saved = build_lm(build()), load(["piqa"], folder)
    copied = task_data.save_tasks(tmp_path / "copy", saved)
    assert copied == ["piqa: 7 rows of validation"]
    ours, theirs = (results.evaluate(lm, {"tasks": load(["piqa"], where), "groups": {}, "group_map": {}}, None)
                    for where in (folder, tmp_path / "copy"))
    assert ours == theirs and ours[0]["piqa"]["n"] == 7 and ours[0]["piqa"]["chance"] == 0.5


def test_what_is_damaged_or_lacks_gets_a_sentence(folder):
    path = folder / "baber--piqa" / "default" / "validation.parquet"
    whole, manifest = path.read_bytes(), (folder / "manifest.json").read_text()
    with pytest.raises(UserError, match=r"holds no data of Rowan--hellaswag/default: add the task with --fetch"):
        load(["hellaswag"], folder)
    for content, sentence in [(whole[:-1] + b"\0", "is not what was saved"), (None, "is missing, though the manifest")]:
        path.unlink(missing_ok=True)
        if content:
            path.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            load(["piqa"], folder)
    path.write_bytes(whole)
    for content in ("{", "[]", json.dumps({"format_version": 1, "datasets": {"x": {"splits": {"test": 3}}}}),
                    manifest.replace("sha256", "sha"), '{"format_version": 1, "datasets": {"x": {"splits": {}}}}'):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(UserError, match="manifest.json is damaged"):
            load(["piqa"], folder)
    (folder / "manifest.json").write_text(manifest.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UserError, match="has format_version=2, this program reads 1"):
        load(["piqa"], folder)
    with pytest.raises(UserError, match="holds no manifest.json, so no saved tasks"):
        load(["piqa"], folder / "elsewhere")
    (folder / "manifest.json").write_text(manifest)
    task_data.write_task_data(folder, "allenai/ai2_arc", "ARC-Easy", {"train": [{"question": "?", "answerKey": "A"}]})
    with pytest.raises(UserError, match="'arc_easy' could not be loaded .* may never have been saved"):
        load(["arc_easy"], folder)


def test_a_write_that_fails_leaves_what_was_there(folder, monkeypatch):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def full(table, part):
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(OSError, match="validation.parquet"):
        task_data.write_task_data(folder, "baber/piqa", None, {"validation": [{"goal": "other"}]})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_files_of_the_users_own_lie_beside_their_yaml(folder, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "rows.jsonl").write_text("".join(json.dumps({"q": words(random.Random(i), 3)}) + "\n" for i in range(3)))
    (mine / "task.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: rows.jsonl}}, cache_dir: {tmp_path / 'cache'}}}\n"
        "output_type: loglikelihood_rolling\ntest_split: test\ndoc_to_text: ''\ndoc_to_target: q\n"
        "metric_list: [{metric: bits_per_byte}]\n")
    monkeypatch.chdir(tmp_path)
    for offline in (None, str(folder)):
        assert len(task_list.load(["mine"], str(mine), offline=offline)["tasks"]["mine"].eval_docs) == 3
    (mine / "rows.jsonl").rename(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match=f"FileNotFoundError: .*{mine}/rows.jsonl.*: its data lie in files that its YAML names"):
        task_list.load(["mine"], str(mine))     # not the file of that name where the command happens to run


def test_the_groups_are_lm_evals_own_tasks():

    import lm_eval
    from lm_eval.tasks import TaskManager
    theirs = Path(lm_eval.__file__).parent / "tasks"
    names = TaskManager(include_path=[theirs / folder for folder in dict.fromkeys(task_list.FOLDERS.values())],
                        include_defaults=False).all_tasks
    assert set(task_list.FULL) <= set(names) and set(task_list.FOLDERS) == set(task_list.FULL)
    assert task_list.expand(("core", "piqa", "full")) == list(task_list.FULL) and len(task_list.FULL) == 12
