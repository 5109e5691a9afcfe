"""One, two or five workers on one folder, some of them killed: the same bytes, and the same order of training."""

import contextlib
import json
import random
import signal
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from runtime.data import open_data
from runtime.tokenizer import load_tokenizer
from tests.faults import free_port
from tests.prepare_runs import Forge, Run, check_against, content, is_a_sentence, last_of_each, texts, write_files

BIG = {"SHARD_TOKENS": 30_000, "PIECE_TOKENS": 20_000, "BATCH_BYTES": 5_000}


def local(paths, out, *options):
    return last_of_each(["local", *paths, "name=mine", "tokenizer=byte", "val_share=0.2", "processes=1", f"out={out}", *options])


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    forge = Forge(tmp_path_factory.mktemp("forge"))
    yield forge
    forge.close()


@pytest.fixture(scope="module")
def files():
    return texts(7, seed=5, each=400)


@pytest.fixture(scope="module")
def paths(files, tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"), files)


@pytest.fixture(scope="module")
def calm(forge, files, paths, tmp_path_factory):
    out = tmp_path_factory.mktemp("calm")
    code, said = forge.run(*local(paths, out), sizes=BIG)
    assert code == 0, said
    return content(out)


def at_once(folder: Path, paths, out: Path, workers: int, *options, **faults) -> list[Run]:
    folder.mkdir(exist_ok=True)
    return [Run(local(paths, out, f"worker={i}/{workers}", *options), folder / f"worker{i}.log", sizes=BIG, **faults)
            for i in range(1, workers + 1)]


def ends(runs: list[Run]) -> None:
    for run in runs:
        assert run.wait() == 0, run.output
    assert sum("with other workers" in run.output for run in runs) <= len(runs) - 1, [run.output for run in runs]


@pytest.mark.parametrize("workers", [2, 5])
def test_any_number_of_workers_makes_the_same_bytes(paths, calm, tmp_path, workers):
    runs = at_once(tmp_path / "logs", paths, tmp_path / "out", workers)
    ends(runs)
    assert content(tmp_path / "out") == calm


def test_workers_one_after_the_other_and_more_than_files(forge, paths, calm, tmp_path):
    """A job array of which each machine comes when it may; the first does all that nobody holds."""
    for worker in (9, 2):
        code, said = forge.run(*local(paths, tmp_path / "out", f"worker={worker}/9"), sizes=BIG)
        assert code == 0, said
    assert content(tmp_path / "out") == calm


def test_a_worker_that_was_killed_is_made_up_for(paths, calm, tmp_path):
    """Whoever is left does the dead one's files, or the next run of another number of workers does."""
    out, rng = tmp_path / "out", random.Random(2)
    for number, workers in enumerate((5, 3, 2)):
        runs = at_once(tmp_path / f"logs{number}", paths, out, workers)
        while all(run.process.poll() is None for run in runs) and len(list(out.glob("mine/parts/*_*.json"))) < 4 * (number + 1):
            time.sleep(0.002)
        for run in runs if number == 0 else [rng.choice(runs)]:
            run.kill()
        for run in runs:
            assert run.wait() in (0, -signal.SIGKILL), run.output
        if (out / "mine/index.json").exists():
            break
    ends(at_once(tmp_path / "last", paths, out, 1))
    assert content(out) == calm


def test_a_worker_that_comes_late_finds_a_finished_folder(forge, paths, calm, tmp_path):
    code, said = forge.run(*local(paths, tmp_path / "out"), sizes=BIG)
    assert code == 0, said
    code, said = forge.run(*local(paths, tmp_path / "out", "worker=2/2"), sizes=BIG)
    assert code == 0 and "complete" in said and content(tmp_path / "out") == calm


def test_the_same_command_twice_at_once(paths, calm, tmp_path):
    """By mistake in two terminals: they share the work."""
    runs = [Run(local(paths, tmp_path / "out"), tmp_path / f"log{i}", sizes=BIG) for i in range(2)]
    ends(runs)
    assert content(tmp_path / "out") == calm


def test_another_command_on_a_source_at_work_is_refused_in_words(forge, paths, calm, tmp_path):
    """Other options for the same source while a process works on it: the second is told who has it; nothing is mixed."""
    out, trace, let_go = tmp_path / "out", tmp_path / "trace", tmp_path / "let_go"
    assert forge.run(*local(paths, out), sizes=BIG, folder=str(out), trace=str(trace))[0] == 0
    at = next(n for n, line in enumerate(trace.read_text().splitlines(), 1) if "00001_0000.bin" in line)
    out = tmp_path / "other"
    first = Run(local(paths, out), tmp_path / "log", sizes=BIG, folder=str(out), fault="wait", at=at, until=str(let_go))
    try:
        while first.process.poll() is None and not (out / "mine/parts/00000_0000.json").exists():
            time.sleep(0.01)
        for other in local(paths, out, "tokenizer=gpt2"), local(paths[1:], out):
            second = Run(other, tmp_path / "log2", sizes=BIG)
            assert second.wait() == 2 and str(first.process.pid) in second.output and is_a_sentence(second.output), second.output
    finally:
        let_go.touch()
    assert first.wait() == 0 and content(out) == calm, first.output


def test_two_sources_at_once_in_one_folder(forge, files, paths, tmp_path):
    """Copies across them are dropped from whichever was finished second."""
    out = tmp_path / "out"
    ours = {"one": files[:3], "two": texts(2, seed=6, each=300) + [files[2][:100]]}
    where = {name: write_files(tmp_path / name, own) for name, own in ours.items()}
    runs = [Run(local(where[name], out, f"name={name}"), tmp_path / f"{name}.log", sizes=BIG) for name in ours]
    for run in runs:
        assert run.wait() == 0, run.output
    found = content(out)
    for order in ("one", "two"), ("two", "one"):
        alone = tmp_path / f"first_{order[0]}"
        for name in order:
            code, said = forge.run(*local(where[name], alone, f"name={name}"), sizes=BIG)
            assert code == 0, said
        if content(alone) == found:
            break
    else:
        raise AssertionError("neither order of the two commands gives these shards")


@pytest.mark.parametrize("workers", [1, 3])
def test_a_budget_is_the_same_cut_for_any_number_of_workers(forge, files, paths, tmp_path, workers):
    budget = 150_000
    ends(at_once(tmp_path / "logs", paths, tmp_path / "out", workers, f"tokens={budget}"))
    check_against(tmp_path / "out/mine", files, BIG["SHARD_TOKENS"], budget=budget)


def test_torchrun_starts_the_workers(paths, calm, tmp_path):
    out = tmp_path / "out"
    launcher = ["-m", "torch.distributed.run", f"--master-port={free_port()}", "--nproc_per_node=2", "-m", "tests.faulty_prepare"]
    run = Run(local(paths, out), tmp_path / "log", launcher=launcher, sizes=BIG)
    assert run.wait() == 0, run.output
    assert content(out) == calm
    assert run.output.count("documents dropped that came before") == 1, run.output


def test_training_sees_the_same_batches_whoever_prepared_them(calm, paths, tiny, tmp_path):
    out = tmp_path / "five"
    ends(at_once(tmp_path / "logs", paths, out, 5))
    with contextlib.suppress(FileExistsError):
        for name, data in calm.items():
            path = tmp_path / "one" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    digests = []
    for folder in tmp_path / "one", out:
        config = replace(tiny, data=replace(tiny.data, dir=str(folder), mixture={"mine": 1.0}, max_epochs=20), steps=20)
        data, hash = open_data(config, load_tokenizer("byte").sha256), sha256()
        for step in range(20):
            for micro in range(config.accumulation(1)):
                x, y = data.batch(step, micro, 0, 1)
                hash.update(np.asarray(x).tobytes() + np.asarray(y).tobytes())
        digests.append((hash.hexdigest(), data.train_sha256, data.val_sha256))
    assert digests[0] == digests[1]


def test_the_workers_table_is_written_for_people(paths, tmp_path):
    """--show while others work: what is there so far, and nothing is changed by looking."""
    out = tmp_path / "out"
    runs = at_once(tmp_path / "logs", paths, out, 2)
    while any(run.process.poll() is None for run in runs) and not list(out.glob("mine/parts/*.json")):
        time.sleep(0.002)
    for run in runs:
        run.process.send_signal(signal.SIGSTOP)
    try:
        before = content(out)
        show = Run(["--show", str(out)], tmp_path / "show.log")
        assert show.wait() == 0 and "mine" in show.output and is_a_sentence(show.output), show.output
        assert content(out) == before
    finally:
        for run in runs:
            run.process.send_signal(signal.SIGCONT)
    ends(runs)
    assert json.loads((out / "mine/index.json").read_text())["source"] == "mine"
