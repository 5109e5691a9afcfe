"""eval/tasks.py: what --fetch saved is scored without network; the groups; examples shown: tests/test_harness.py."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from eval_runs import make_task, process, write_run

from eval import tasks
from runtime.cli import UserError
from tests.hub_server import HubServer, write_repository


def test_what_was_fetched_is_scored_without_network(tmp_path):
    """Each time with an empty cache elsewhere, as on another machine."""
    write_run(tmp_path / "run")
    rows = [{"goal": f"goal {i} is", "sol1": f"one {i}", "sol2": f"another {i}", "label": i % 2} for i in range(7)]
    write_repository(tmp_path / "hub", "baber/piqa", {f"data/{split}-00000-of-00001.parquet": rows[:n] for split, n in
                                                      (("train", 3), ("validation", 7))})
    scoring = (tmp_path / "run", f"offline={tmp_path / 'saved'}", "dtype=float32")

    def harness(*arguments, home, url="http://127.0.0.1:1"):
        return process("-m", "eval.harness", *arguments, HF_ENDPOINT=url, HF_HOME=f"{tmp_path / home}")
    with HubServer(tmp_path / "hub") as server:
        done = harness("--fetch", tmp_path / "saved", "tasks=piqa,demo", home="a", url=server.url)
    assert (done.returncode, done.stdout) == (0, "piqa: 7 documents\n"), done.stderr
    done = harness(*scoring, "tasks=piqa", home="b")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "run/eval/piqa_float32.json").read_text())["tasks"]["piqa"]
    assert (found["n"], found["chance"]) == (7, 0.5)
    done = harness(*scoring, "tasks=hellaswag", home="c")
    assert done.returncode == 2 and "the task 'hellaswag' could not be loaded" in done.stderr and "--fetch DIR" in done.stderr


def test_the_groups_are_lm_evals_own_tasks():
    import lm_eval
    from lm_eval.tasks import TaskManager
    folders = {Path(lm_eval.__file__).parent / "tasks" / tasks.FOLDERS.get(name, name) for name in tasks.FULL}
    assert set(tasks.FULL) <= set(TaskManager(include_path=[*folders], include_defaults=False).all_tasks)
    assert set(tasks.FOLDERS) < set(tasks.FULL) and len(tasks.FULL) == 12
    assert tasks.expand(("core", "piqa", "full")) == list(tasks.FULL)


def test_another_group_is_not_looked_for_in_its_own_folder_alone(monkeypatch):
    """The group spanish_bench of the folder spanish_bench names tasks of other folders."""
    manager = Mock(return_value=SimpleNamespace(all_tasks=["spanish_bench"], load=Mock(side_effect=KeyError)))
    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)
    with pytest.raises(UserError):
        tasks.load(["spanish_bench"], None)
    assert manager.call_args.kwargs["include_path"] == [tasks.DEMO_TASKS]


def test_what_cannot_be_scored_as_asked_is_refused_by_name(tmp_path):
    mine = make_task(tmp_path / "mine", [{"q": "a", "answers": ["b", "c"], "gold": 0}] * 3)
    make_task(mine, [], "drawn", output_type="generate_until", doc_to_choice=None, generation_kwargs={"do_sample": True},
              dataset_kwargs={"data_files": {"validation": str(mine / "sums.jsonl")}})
    (mine / "group.yaml").write_text("group: five\ntask: [{task: sums, num_fewshot: 2, fewshot_split: validation}]\n")
    assert tasks.load(["five"], str(mine))["tasks"]["sums"].config.num_fewshot == 2
    assert len(tasks.load(["sums"], str(mine))["tasks"]["sums"].eval_docs) == 3
    for names, words in ((["sums", "five"], "five shows 2 examples to 'sums', other tasks= another number"),
                         (["drawn"], "'drawn' asks for sampled answers")):
        with pytest.raises(UserError, match=words):
            tasks.load(names, str(mine))
    (mine / "sums.jsonl").unlink()
    with pytest.raises(UserError, match="the task 'sums' could not be loaded .FileNotFoundError: .*: its data come from where"):
        tasks.load(["sums"], str(mine))
