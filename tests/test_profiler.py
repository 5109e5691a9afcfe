"""Traces hold the steps that were asked for, change no number, and never cost a run."""

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profile

from runtime.log import Profiler
from tests.conftest import call_train


def world(rank=0, device="cpu"):
    return SimpleNamespace(rank=rank, is_main=rank == 0, device=torch.device(device))


def train(profiler, steps=range(1, 8)):
    """A few steps of a little model; its weights afterwards."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in steps:
        profiler.begin(step)
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.end(step)
    profiler.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def steps_of(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert any(name in ("aten::mm", "aten::addmm") for name in names)       # what the step does is in it
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))


def files(run_dir):
    return sorted(path.name for path in run_dir.rglob("*") if path.is_file())


def test_the_steps_asked_for_are_traced_and_no_number_changes(tmp_path):
    said = []
    traced = train(Profiler((3, 5), tmp_path, world(), said.append))
    assert torch.equal(traced, train(Profiler(None, tmp_path / "none", world())))
    assert files(tmp_path) == ["trace_rank0.pt.trace.json.gz"]      # the name by which torch-tb-profiler finds it; no rest
    assert steps_of(tmp_path / "profile" / "trace_rank0.pt.trace.json.gz") == [3, 4, 5]
    assert said == [f"profile: steps 3 to 5 -> {tmp_path}/profile/ (open in ui.perfetto.dev)"]


def test_every_rank_writes_and_the_main_one_says_so(tmp_path):
    said = []
    train(Profiler((2, 2), tmp_path, world(rank=3), said.append))
    assert files(tmp_path) == ["trace_rank3.pt.trace.json.gz"] and said == []


@pytest.mark.parametrize("steps, asked, traced", [
    (range(4, 8), (3, 5), [4, 5]),                      # resumed in between
    (range(6, 8), (3, 5), None),                        # resumed after them
    (range(1, 5), (3, 9), [3, 4]),                      # the run ends in between
    ([1, 2, 3, 4, 2, 3, 4], (2, 3), [2, 3]),            # a rollback repeats them: once is enough
    ([1, 2, 3, 2, 3, 4, 5], (3, 4), [2, 3, 3, 4])])     # a rollback in between
def test_what_of_them_is_done_is_traced(tmp_path, steps, asked, traced):
    said = []
    train(Profiler(asked, tmp_path, world(), said.append), steps)
    found = files(tmp_path)
    assert (steps_of(tmp_path / "profile" / found[0]) if found else None) == traced
    assert len(said) == (traced is not None)


def test_an_error_inside_a_step_leaves_a_trace_that_can_be_read(tmp_path):
    profiler = Profiler((1, 9), tmp_path, world(), lambda line: None)
    train_one = torch.nn.Linear(4, 4)
    profiler.begin(1)
    train_one(torch.ones(4, 4))
    profiler.close()        # as the run's end does after an error
    profiler.close()
    assert steps_of(tmp_path / "profile" / "trace_rank0.pt.trace.json.gz") == [1]


def test_a_folder_that_cannot_be_written_costs_the_trace_alone(tmp_path):
    (tmp_path / "profile").write_text("a file")
    said = []
    train(Profiler((2, 3), tmp_path, world(rank=1), said.append))
    assert len(said) == 1 and said[0].startswith("profile: rank 1 wrote no trace: FileExistsError")


def test_a_full_disk_leaves_no_half_trace(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("runtime.log.shutil.copyfileobj", full)
    said = []
    train(Profiler((2, 3), tmp_path, world(), said.append))
    assert files(tmp_path) == [] and "No space left on device" in said[0]


def test_a_profiler_that_cannot_start_costs_nothing(tmp_path, monkeypatch):
    def refuse(**options):
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")
    monkeypatch.setattr("runtime.log.profile", refuse)
    said = []
    train(Profiler((2, 3), tmp_path, world(), said.append))
    assert files(tmp_path) == []
    assert said == ["profile: rank 0 wrote no trace: RuntimeError: CUPTI_ERROR_NOT_INITIALIZED"]


def test_on_a_gpu_the_allocator_is_recorded_too(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options), raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: (calls.append("dump"), open(path, "w").close()),
                        raising=False)

    def on_a_cpu(activities, **options):
        calls.append(len(activities))
        return profile(**options)

    monkeypatch.setattr("runtime.log.profile", on_a_cpu)
    train(Profiler((2, 3), tmp_path, world(device="cuda"), lambda line: None))
    assert calls == [{"max_entries": 100_000}, 2, "dump", {"enabled": None}]
    assert files(tmp_path) == ["memory_rank0.pickle", "trace_rank0.pt.trace.json.gz"]


def test_a_gpu_without_the_private_calls_is_traced_all_the_same(tmp_path, monkeypatch):
    for name in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.delattr(torch.cuda.memory, name, raising=False)
    monkeypatch.setattr("runtime.log.profile", lambda activities, **options: profile(**options))
    train(Profiler((2, 3), tmp_path, world(device="cuda"), lambda line: None))
    assert files(tmp_path) == ["trace_rank0.pt.trace.json.gz"]


def test_train_writes_the_trace_and_the_same_losses(tiny, tmp_path, capsys):
    losses = {}
    for name, profile_steps in (("plain", None), ("traced", "2:3")):
        config = replace(tiny, run=name, steps=4, profile=profile_steps)
        done = call_train(capsys, config, tmp_path)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").open()]
        losses[name] = [(row["loss"], row["grad_norm"]) for row in rows if row["kind"] == "train"]
        assert ("profile: steps 2 to 3 -> " in done.stdout) == (name == "traced")
    assert losses["plain"] == losses["traced"] and len(losses["plain"]) == 4
    assert steps_of(tmp_path / "out" / "traced" / "profile" / "trace_rank0.pt.trace.json.gz") == [2, 3]
