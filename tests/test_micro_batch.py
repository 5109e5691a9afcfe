import json
import os
import resource
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime import fp8
from runtime import plan as micro_batch
from runtime.cli import MachineError, UserError
from runtime.config import FP8Config
from runtime.log import pair_id, write_json
from runtime.parallel import World
from runtime.plan import Trial, candidates, measure, resolve_micro_batch, search, try_one
from scaling.study import Size, Study, expand
from tests.conftest import ROOT, call_train, with_recipe, write_config

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, CPU)
FULL = Trial(failure="does not fit", is_memory=True)
BROKEN = Trial(failure="the trial ended with exit code 7 (RuntimeError: a kernel's offset)")


def auto(config, **data):
    return replace(config, data=replace(config.data, **{"micro_batch": "auto", **data}))


def found(trials: dict[int, float | Trial], first: int = 0) -> tuple[int | None, list[int]]:
    """What search() finds among these numbers, whose speeds or failures are known, and which it tried in what order."""
    order = []

    def attempt(n):
        order.append(n)
        return trials[n] if isinstance(trials[n], Trial) else Trial(trials[n], 1.0)

    return search(list(trials), first, attempt, lambda line: None), order


# ---------------------------------------------------------------------------------------------------------------- search

@pytest.mark.parametrize("trials, first, best, order", [
    ({1: 10, 2: 20, 4: 30, 8: FULL, 16: 50}, 0, 4, [1, 2, 4, 8]),               # what is beyond one that fails is not tried
    ({1: 10, 2: 20, 4: 30}, 0, 4, [1, 2, 4]),
    ({1: 10, 2: 20, 4: 19, 8: 18, 16: 99}, 0, 2, [1, 2, 4, 8]),                 # two in a row slower
    ({1: 10, 2: 20, 4: 19, 8: 25, 16: 24, 32: 23}, 0, 8, [1, 2, 4, 8, 16, 32]),   # one slower is none in a row
    ({1: 10, 2: 20, 4: 20.1, 8: 20.15, 16: 99}, 0, 2, [1, 2, 4, 8]),            # nothing gained: the smaller one
    ({1: 10, 2: 10.05, 4: 10.15}, 0, 2, [1, 2, 4]),                             # less than GAIN below the best, not the first
    ({1: 5, 2: 10, 4: 20, 8: FULL}, 2, 4, [4, 8]),                              # begins where it is told to
    ({1: 5, 2: 10, 4: FULL, 8: FULL}, 2, 2, [4, 2]),                            # downwards to the first that fits
    ({1: FULL, 2: FULL, 4: FULL}, 1, None, [2, 1]),
    ({1: 10, 2: 20, 4: BROKEN, 8: 50}, 0, 2, [1, 2, 4]),                        # what broke is not chosen, what ran may be
    ({3: FULL}, 0, None, [3])])
def test_the_fastest_that_fits(trials, first, best, order):
    assert found(trials, first) == (best, order)


@pytest.mark.parametrize("trials, first", [({1: BROKEN, 2: 5}, 0), ({1: BROKEN, 2: FULL}, 1)])
def test_what_breaks_before_anything_ran_is_told(trials, first):
    with pytest.raises(MachineError, match=r"^data.micro_batch=auto cannot be found, the trial ended with exit code 7 "
                                           r"\(RuntimeError: a kernel's offset\): give a number, such as data.micro_batch=1$"):
        found(trials, first)


@pytest.mark.parametrize("sequences, size, recipe, n_ctx, numbers", [
    (512, 1, "off", 32, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]), (512, 8, "off", 32, [1, 2, 4, 8, 16, 32, 64]),
    (24, 2, "off", 32, [1, 2, 3, 4, 6, 12]), (24, 2, "tensorwise", 8, [2, 4, 6, 12]), (7, 1, "off", 32, [1]),
    (12, 1, "mxfp8", 8, [4, 12])])
def test_candidates_are_what_a_run_accepts(tiny, sequences, size, recipe, n_ctx, numbers):
    config = with_recipe(auto(tiny, tokens_per_step=sequences * n_ctx), recipe, model=replace(tiny.model, n_ctx=n_ctx))
    assert candidates(config, size) == numbers
    for n in numbers:
        assert replace(config, data=replace(config.data, micro_batch=n)).accumulation(size) * n * size == sequences


def test_no_candidate_is_told(tiny):
    config = replace(auto(tiny, tokens_per_step=7 * 32), model=replace(tiny.model, n_ctx=8), steps=2)
    config = with_recipe(replace(config, data=replace(config.data, tokens_per_step=56)), "tensorwise")
    with pytest.raises(UserError, match=r"^data.micro_batch=auto finds none by which 1 ranks .* a multiple of 256$"):
        candidates(config, 1)
    assert candidates(auto(config, tokens_per_step=256), 1)


# --------------------------------------------------------------------------------------------------------------- resolve

def test_a_number_is_left_alone(tiny, monkeypatch):
    monkeypatch.setattr(micro_batch, "_decide", lambda *_: pytest.fail("searched"))
    assert resolve_micro_batch(tiny, ALONE) is tiny


def test_every_rank_has_the_number_of_rank_0(tiny, monkeypatch):
    monkeypatch.setattr(micro_batch, "run_on_rank0", lambda world, work: 2)
    monkeypatch.setattr(micro_batch, "_decide", lambda *_: pytest.fail("searched"))
    got = resolve_micro_batch(auto(tiny), World(1, 1, 2, CPU))
    assert got == replace(tiny, data=replace(tiny.data, micro_batch=2))


def test_a_resume_has_the_number_that_the_run_was_begun_with(tiny, monkeypatch, capsys):
    monkeypatch.setattr(micro_batch, "search", lambda *_: pytest.fail("searched"))
    tiny.run_dir.mkdir(parents=True)
    write_json(tiny.run_dir / "config.json", auto(tiny, micro_batch=16).to_dict())
    assert resolve_micro_batch(auto(tiny), ALONE).data.micro_batch == 16
    assert f"data.micro_batch=auto: 16, which {tiny.run_dir} was begun with" in capsys.readouterr().out
    monkeypatch.setattr(micro_batch, "search", lambda numbers, *_: numbers[-1])
    monkeypatch.setattr(micro_batch, "run_on_rank0", lambda world, work: work())
    assert resolve_micro_batch(auto(tiny), World(0, 0, 4, CPU)).data.micro_batch == 4, "16 sequences a step are not shared by 4 ranks so"


def test_cheap_mistakes_are_told_before_the_search(tiny, monkeypatch):
    monkeypatch.setattr(micro_batch, "search", lambda *_: pytest.fail("searched"))
    with pytest.raises(UserError, match="mixture|web/index.json|no such|is not there|nowhere"):
        resolve_micro_batch(auto(tiny, dir=str(tiny.run_dir / "nowhere")), ALONE)
    with pytest.raises(UserError, match="data.max_epochs"):
        resolve_micro_batch(replace(auto(tiny), steps=100_000), ALONE)
    tiny.run_dir.mkdir(parents=True)
    write_json(tiny.run_dir / "config.json", replace(tiny, seed=5).to_dict())
    with pytest.raises(UserError, match=r"holds another run: seed was 5, now 1337"):
        resolve_micro_batch(auto(tiny), ALONE)


@pytest.mark.parametrize("size, remedy", [(1, "with parallel.recompute=true or model.loss_chunk=1024"), (
    2, "all the same, for it was tried with the model whole on one GPU, which 2 ranks may share")])
def test_none_that_fits_names_a_number_to_give(tiny, monkeypatch, size, remedy):
    monkeypatch.setattr(micro_batch, "try_one", lambda *_: FULL)
    monkeypatch.setattr(micro_batch, "run_on_rank0", lambda world, work: work())
    with pytest.raises(UserError) as error:
        resolve_micro_batch(auto(tiny), World(0, 0, size, CPU))
    assert str(error.value) == ("data.micro_batch=auto found none that fits into the memory of cpu, not even 1: give "
                                f"data.micro_batch=1 {remedy}")


def test_the_search_begins_where_a_gpu_has_something_to_do(tiny, monkeypatch):
    seen = []
    monkeypatch.setattr(micro_batch, "search", lambda numbers, first, *_: seen.append((numbers, first)) or numbers[0])
    monkeypatch.setattr(micro_batch, "FIRST_TOKENS", 100)       # of 32 each
    resolve_micro_batch(auto(tiny), ALONE)
    resolve_micro_batch(auto(tiny, tokens_per_step=64), ALONE)
    assert seen == [([1, 2, 4, 8, 16], 2), ([1, 2], 0)]


def test_trials_are_of_the_run_alone_on_a_device_and_may_last_as_long_as_a_start(tiny, monkeypatch):
    seen = []
    monkeypatch.setattr(micro_batch, "try_one", lambda *job: seen.append(job) or FULL)
    monkeypatch.setattr(micro_batch, "run_on_rank0", lambda world, work: work())
    config = auto(replace(tiny, fp8=FP8Config(recipe="tensorwise", all_gather=True), parallel=replace(
        tiny.parallel, replicate=2, shard=2, recompute=True, start_timeout=900)))
    with pytest.raises(UserError):
        resolve_micro_batch(config, World(0, 0, 4, torch.device("cuda", 0)))
    (tried, device, end), = seen
    assert (tried.parallel.replicate, tried.parallel.shard) == (1, None) and tried.parallel.recompute
    assert not tried.fp8.all_gather
    assert tried.data.micro_batch == 1 and device == torch.device("cuda", 0) and 880 < end - time.monotonic() <= 900


def test_a_pair_needs_one_number_and_a_study_too(tiny, monkeypatch, tmp_path):
    pair = [with_recipe(auto(tiny, micro_batch=n), recipe) for n, recipe in ((4, "off"), (4, "tensorwise"), (8, "tensorwise"))]
    assert pair_id(pair[0]) == pair_id(pair[1]) != pair_id(pair[2])
    config = write_config(auto(tiny, micro_batch="auto"), tmp_path / "size_bf16.py")
    study = Study(name="s", sizes=(Size(config=str(config)),), tokens_per_param=(1.0,), margin_percent=1.0)
    with pytest.raises(UserError, match=r"size_bf16.py has data.micro_batch=auto: give a number, for runs are compared"):
        expand(study)


# ---------------------------------------------------------------------------------------------------------------- trials

@pytest.fixture
def child(tmp_path, monkeypatch):
    """Has a trial run these lines of shell instead of Python."""
    def as_child(lines: str) -> None:
        script = tmp_path / "child.sh"
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(stat.S_IRWXU)
        monkeypatch.setattr(sys, "executable", str(script))
    return as_child


@pytest.mark.parametrize("lines, outcome", [
    ("""echo noise; echo '{"tok_per_s": 3.5, "peak_gib": 2.0, "failure": null, "is_memory": false}'""", Trial(3.5, 2.0)),
    ("""echo '{"tok_per_s": 0.0, "peak_gib": 0.0, "failure": "does not fit", "is_memory": true}'""", FULL),
    ("kill -9 $$", FULL),
    ("echo Traceback >&2; echo \"RuntimeError: a kernel's offset\" >&2; exit 7", BROKEN),
    ("exit 7", Trial(failure="the trial ended with exit code 7 (it said nothing)")),
    ("kill -11 $$", Trial(failure="the trial ended with exit code -11 (it said nothing)")),
    ("echo no answer; exit 0", Trial(failure="the trial ended with exit code 0 (it said nothing)"))])
def test_what_a_trial_answers_however_it_ends(tiny, child, lines, outcome):
    child(lines)
    assert try_one(tiny, CPU, time.monotonic() + 60) == outcome


def test_a_trial_that_hangs_ends_in_time_and_leaves_no_process(tiny, child, tmp_path):
    child(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    trial = try_one(tiny, CPU, time.monotonic() + 1)
    assert trial == Trial(failure="no answer before parallel.start_timeout was over")
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert try_one(tiny, CPU, time.monotonic() - 1).failure, "no time left is no time"


def test_what_no_micro_batch_helps_is_the_users_mistake(tiny, child):
    child("""echo '{"mistake": "fp8.recipe=tensorwise needs another GPU"}'""")
    with pytest.raises(UserError, match="^fp8.recipe=tensorwise needs another GPU$"):
        try_one(tiny, CPU, time.monotonic() + 60)


@pytest.mark.parametrize("recipe", ["off", "tensorwise"])
def test_a_trial_trains_and_evaluates_as_the_run_does(tiny, monkeypatch, recipe):
    limited, evaluated, in_bf16 = [], [], fp8.in_bf16
    monkeypatch.setattr(micro_batch, "_limit_memory", limited.append)
    monkeypatch.setattr(fp8, "in_bf16", lambda model: evaluated.append(model) or in_bf16(model))
    monkeypatch.setattr(micro_batch, "MEASURED_S", 0.01)
    trial = measure(with_recipe(tiny, recipe), CPU)
    assert trial.failure is None and trial.tok_per_s > 0 and limited == [CPU]
    assert abs(trial.peak_gib - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20) < 0.1
    assert len(evaluated) == 1, "the evaluation in BF16 is uncompiled, and may need more memory than the training"
    assert (next(evaluated[0].parameters()).std() - (0.4 / 32) ** 0.5).abs() < 0.05, "random weights: zeros are faster"


def test_a_trial_leaves_memory_to_others(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *call: calls.append(call))
    micro_batch._limit_memory(torch.device("cuda", 3))
    assert calls == [(0.94 * 60 / 80, torch.device("cuda", 3))]
    wrote, kept = {}, Path.read_text
    monkeypatch.setattr(Path, "write_text", lambda path, text: wrote.update({str(path): text}))
    monkeypatch.setattr(Path, "read_text", lambda path, *a: "MemTotal: 9 kB\nMemAvailable:    1000 kB\n"
                        if str(path) == "/proc/meminfo" else kept(path, *a))
    for limits, expected in (((-1, -1), 962_560), ((500_000, 600_000), 500_000)):       # never above what is set already
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda kind, values: calls.append((kind, values)))
        micro_batch._limit_memory(CPU)
        assert calls[-1] == (resource.RLIMIT_DATA, (expected, limits[1]))
    assert wrote == {"/proc/self/oom_score_adj": "1000"}


def test_a_real_trial_that_does_not_fit_and_one_whose_parent_is_gone(tiny):
    vast = replace(tiny, model=replace(tiny.model, n_embd=2**16, n_ffn=2**18, n_layer=64))      # 15 TB of weights
    job = json.dumps({"config": tiny.to_dict(), "device": "cpu"})
    orphan = subprocess.Popen([sys.executable, "-P", "-m", "runtime.plan", job], stdin=subprocess.DEVNULL, cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert try_one(vast, CPU, time.monotonic() + 300) == FULL
    assert orphan.communicate(timeout=300)[0] == b"" and orphan.returncode == 1


def test_a_run_finds_its_micro_batch_and_keeps_it(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = auto(tiny, tokens_per_step=32)     # one sequence: one trial, which takes a process of its own
    done = call_train(capsys, config, tmp_path, "steps=2", "checkpoint.every=none")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("data.micro_batch=auto: ")]
    assert len(said) == 2 and "tokens/s" in said[0] and said[1].startswith("data.micro_batch=auto: 1 it is.")
    assert json.loads((tiny.run_dir / "config.json").read_text())["data"]["micro_batch"] == 1
    assert json.loads((tiny.run_dir / "summary.json").read_text())["micro_batch"] == 1
    again = call_train(capsys, config, tmp_path, "steps=2", "checkpoint.every=none")
    assert again.returncode == 0 and "nothing to do" in again.stdout and "tokens/s" not in again.stdout


@pytest.mark.gpu
def test_on_a_gpu_too_large_a_micro_batch_is_no_crash(tiny):
    device, wide = torch.device("cuda", 0), replace(tiny.model, n_embd=512, n_ffn=1536, n_ctx=1024)
    config = replace(auto(tiny, tokens_per_step=1024), model=wide, parallel=replace(tiny.parallel, compile=True))
    huge, small = (auto(config, micro_batch=n, tokens_per_step=n * 1024) for n in (2**15, 4))
    end = time.monotonic() + 500
    assert try_one(huge, device, end) == FULL
    trial = try_one(small, device, end)
    assert trial.failure is None and trial.tok_per_s > 10_000 and 0 < trial.peak_gib < 20
    assert resolve_micro_batch(auto(config, tokens_per_step=4 * 1024), SimpleNamespace(
        rank=0, size=1, device=device, is_main=True)).data.micro_batch in (1, 2, 4)
