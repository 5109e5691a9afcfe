"""prepare_data.py against kills, full disks, signals, damage, hostile command lines: it goes on, and the bytes are the same."""

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

import prepare_data
from runtime.shards import SHARD_TOKENS
from tests.conftest import call_train
from tests.faults import flip_bit
from tests.prepare_runs import SIZES, Forge, Run, check_against, content, due, is_a_sentence, last_of_each, texts, write_files

STORM_SIZES = {"SHARD_TOKENS": 30_000, "PIECE_TOKENS": 20_000, "BATCH_BYTES": 5_000}     # of a source of a million tokens


def local(paths, out, *options, name="mine", processes=1):
    return last_of_each(["local", *paths, f"name={name}", "tokenizer=byte", "val_share=0.2", f"processes={processes}",
                         f"out={out}", *options])


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    forge = Forge(tmp_path_factory.mktemp("forge"))
    yield forge
    forge.close()


@pytest.fixture(scope="module")
def files():
    return texts(3, each=14)


@pytest.fixture(scope="module")
def paths(files, tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"), files)


@pytest.fixture(scope="module")
def calm(forge, files, paths, tmp_path_factory):
    """The folder of a run that nobody disturbed; what it changed on disk, in order, is in the file `trace` beside it."""
    folder = tmp_path_factory.mktemp("calm")
    out = folder / "out"
    code, said = forge.run(*local(paths, out), folder=str(out), trace=str(folder / "trace"))
    assert code == 0, said
    check_against(out / "mine", files)
    assert "00002_0001.bin" in (folder / "trace").read_text() and (out / "mine/train_00002.bin").exists(), "many small ones"
    return out


def moments(calm: Path, each: int = 1, besides: str = "none") -> list[int]:
    """Numbers of changes: of each kind of change that a run makes on disk, `each` of them, the first included."""
    kinds = {}
    for number, line in enumerate((calm.parent / "trace").read_text().splitlines(), 1):
        if not line.startswith(besides):
            kinds.setdefault(re.sub(r"\d+", "N", line.replace(str(calm), "")), []).append(number)
    picked = {numbers[round(i * (len(numbers) - 1) / max(1, each - 1))] for numbers in kinds.values() for i in range(each)}
    assert len(kinds) > 10, "pieces and shards appear by rename, and the index"
    return sorted(picked)


def first(calm: Path, words: str) -> int:
    """Number of the first change that names these words."""
    return next(n for n, line in enumerate((calm.parent / "trace").read_text().splitlines(), 1) if words in line)


# ---------------------------------------------------------------------------------------------------------------- kills

def storm(folder: Path, paths: list[Path], calm: dict[str, bytes], kills: int, seed: int) -> list[str]:
    """Kills real runs of two processes at random moments: in each folder five while pieces are made, then five while shards
    are written, the whole group or the parent alone. Each run that gets to its end is compared. Returns the kills' phases."""
    rng, told, runs, number, here = random.Random(seed), [], 0, 0, 0
    while True:
        out = folder / f"storm{seed}_{number}"
        aim, delay = n_pieces(out) + rng.randrange(8), rng.uniform(0, 0.01 if here < 5 else 0.08)
        run = Run(local(paths, out, processes=2), folder / f"storm{seed}_{runs}.log", sizes=STORM_SIZES)
        runs += 1
        is_due = here < 10 and len(told) < kills
        while is_due and run.process.poll() is None and not (is_assembling(out) or (here < 5 and n_pieces(out) > aim)):
            time.sleep(0.002)
        time.sleep(delay)
        if is_due and run.process.poll() is None:
            told.append("assembly" if is_assembling(out) else "tokens")
            run.kill_parent() if rng.random() < 0.5 else run.kill()
            here += 1
            continue
        assert run.wait() == 0, run.output
        assert content(out) == calm
        if len(told) == kills:
            return told
        assert runs < 5 * kills, "every run ends before it is hit"
        number, here = number + 1, 0


def n_pieces(out: Path) -> int:
    return len(list(out.glob("mine/parts/0*_*.json")))


def is_assembling(out: Path) -> bool:
    return (out / "mine/parts/layout.json").exists()


@pytest.fixture(scope="module")
def big(forge, tmp_path_factory):
    """A source of a million tokens: its files and the folder that a calm run makes of them."""
    folder = tmp_path_factory.mktemp("big")
    files = texts(8, seed=7, each=900)
    paths = write_files(folder / "files", files)
    code, said = forge.run(*local(paths, folder / "out"), sizes=STORM_SIZES)
    assert code == 0, said
    expected, _ = due(files)
    assert sum(map(len, expected.values())) > 1e6
    return paths, content(folder / "out")


def test_ten_kills_at_random_moments(big, tmp_path):
    """A hundred: tests/soak.py."""
    told = storm(tmp_path, *big, 10, 0)
    assert len(told) == 10 and min(told.count("tokens"), told.count("assembly")) >= 2


def test_a_kill_before_each_kind_of_change_on_disk(forge, paths, calm, tmp_path):
    kill_at_each(forge, paths, calm, tmp_path, moments(calm)[::3])      # all of them: tests/soak.py


def kill_at_each(forge: Forge, paths: list[Path], calm: Path, folder: Path, numbers: list[int]) -> None:
    for at in numbers:
        out = folder / f"at{at}"
        code, said = forge.run(*local(paths, out), folder=str(out), fault="kill", at=at)
        assert code == -signal.SIGKILL, (at, said)
        code, said = forge.run(*local(paths, out))
        assert code == 0 and content(out) == content(calm), (at, said)


def test_a_chain_of_kills_each_a_little_later(forge, paths, calm, tmp_path):
    """The folder of one killed run after the other: what a resume does is itself cut off."""
    out, at = tmp_path / "out", 0
    while True:
        at += 3
        code, said = forge.run(*local(paths, out), folder=str(out), fault="kill", at=at)
        if code == 0:
            break
        assert code == -signal.SIGKILL and at < 1000, (at, said)
    assert at > 15 and content(out) == content(calm)


def test_what_a_rename_makes_visible_was_synced_before(calm):
    synced = set()
    for line in (calm.parent / "trace").read_text().splitlines():
        what, _, path = line.partition(" ")
        if what == "fsync":
            synced.add(path)
        elif what == "open":
            synced.discard(path)
        elif what == "rename":
            assert path.split(" -> ")[0] in synced, line


def test_shards_are_a_hundred_million_tokens():
    assert SHARD_TOKENS == 100_000_000 != SIZES["SHARD_TOKENS"]


@pytest.mark.parametrize("killed_at", ["layout.npy", "train_00001.bin"])
@pytest.mark.parametrize("option", ["tokens=3000", "val_share=0.3"])
def test_other_options_than_those_of_a_killed_run_are_never_passed_over(forge, paths, calm, tmp_path, option, killed_at):
    """Killed before or while it wrote shards: what is asked for now comes out, or a sentence says why not."""
    out = tmp_path / "out"
    code, _ = forge.run(*local(paths, out), folder=str(out), fault="kill", at=first(calm, killed_at))
    assert code == -signal.SIGKILL
    code, said = forge.run(*local(paths, out, option))
    if killed_at == "layout.npy":
        assert code == 0 and forge.run(*local(paths, tmp_path / "fresh", option))[0] == 0, said
        assert content(out) == content(tmp_path / "fresh")
    else:
        assert code == 2 and is_a_sentence(said) and "finished otherwise" in said, said
        assert forge.run(*local(paths, out))[0] == 0 and content(out) == content(calm), "the killed command goes on"


def test_copies_across_sources_whatever_was_killed(forge, files, calm, tmp_path):
    ours = {"one": files, "two": texts(2, seed=3, each=25) + [files[1][:20]], "three": [files[2], files[0][:5] + texts(1, 9)[0]]}
    at = moments(calm)
    rng, where = random.Random(1), {name: write_files(tmp_path / f"files_{name}", own) for name, own in ours.items()}
    for kills in 0, 2:
        out, earlier = tmp_path / f"out{kills}", set()
        for name, own in ours.items():
            for _ in range(kills):
                code, said = forge.run(*local(where[name], out, name=name), folder=str(out), fault="kill", at=rng.choice(at))
                assert code in (0, -signal.SIGKILL), said
            code, said = forge.run(*local(where[name], out, name=name))
            assert code == 0, said
            check_against(out / name, own, earlier=earlier)
            earlier |= due(own, earlier=earlier)[1]
    assert content(tmp_path / "out0") == content(tmp_path / "out2")
    dropped = json.loads((tmp_path / "out0/three/index.json").read_text())["duplicates"]
    assert set(dropped) == {"one", "two", "three"} - ({"two"} - set(dropped)) and dropped["one"] > 20


@pytest.mark.parametrize("share", [0.0001, 0.3, 0.77, 2])
def test_a_budget_ends_with_the_document_that_reaches_it(forge, files, paths, calm, tmp_path, share):
    budget = max(1, round(share * len(due(files)[0]["train"])))
    out = tmp_path / "out"
    code, said = forge.run(*local(paths, out, f"tokens={budget}"))
    assert code == (0 if len(due(files, budget)[0]["val"]) else 2), said
    if code:
        assert "val" in said and is_a_sentence(said)
        return
    check_against(out / "mine", files, budget=budget)
    index = json.loads((out / "mine/index.json").read_text())
    assert index["is_whole"] == (share > 1) and index["budget"] == budget
    for at in moments(calm)[4::20]:
        cut = tmp_path / f"cut{at}"
        code, said = forge.run(*local(paths, cut, f"tokens={budget}"), folder=str(cut), fault="kill", at=at)
        assert code in (0, -signal.SIGKILL), said
        code, said = forge.run(*local(paths, cut, f"tokens={budget}"))
        assert code == 0 and content(cut) == content(out), (at, said)


# ----------------------------------------------------------------------------------------------------- disks and signals

def test_a_disk_that_is_full_from_some_change_on(forge, paths, calm, tmp_path):
    fill_at_each(forge, paths, calm, tmp_path, moments(calm, besides="rem")[::3])


def fill_at_each(forge: Forge, paths: list[Path], calm: Path, folder: Path, numbers: list[int]) -> int:
    """How many were tried: from the index on nothing needs room."""
    numbers = [at for at in numbers if at <= first(calm, "index.json.tmp -> ")]
    for at in numbers:
        out = folder / f"at{at}"
        code, said = forge.run(*local(paths, out), folder=str(out), fault="full", at=at)
        assert code == 1 and "No space left on device" in said and is_a_sentence(said) and said.count("\n") < 6, (at, said)
        code, said = forge.run(*local(paths, out))
        assert code == 0 and content(out) == content(calm), (at, said)
    return len(numbers)


@pytest.mark.parametrize("largest", [500, 1_000, 2 * SIZES["SHARD_TOKENS"] - 100])
def test_files_that_may_not_grow_end_both_phases_with_a_sentence(forge, paths, calm, tmp_path, largest):
    """A piece is about 3,000 bytes, a shard 4,000."""
    out = tmp_path / "out"
    code, said = forge.run(*local(paths, out), largest_file=largest)
    assert code == 1 and "File too large" in said and is_a_sentence(said), said
    assert (largest > 3_500) == (out / "mine/parts/layout.json").exists(), "the shards are what is too large"
    code, said = forge.run(*local(paths, out))
    assert code == 0 and content(out) == content(calm), said


@pytest.mark.parametrize("kilobytes", [40, 100])
def test_a_disk_that_is_full_and_then_not(forge, paths, calm, tmp_path, kilobytes):
    """A tmpfs of its own; where nobody has the right to mount one, files that may not grow stand in for the full disk."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(small)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        code, said = forge.run(*local(paths, small / "out"), **({} if is_mounted else {"largest_file": 1_000}))
        assert code == 1 and is_a_sentence(said), said
        assert ("No space left on device" if is_mounted else "File too large") in said
        if is_mounted:
            subprocess.run(["mount", "-o", "remount,size=20m", str(small)], check=True, capture_output=True)
        code, said = forge.run(*local(paths, small / "out"))
        assert code == 0 and content(small / "out") == content(calm), said
    finally:
        if is_mounted:
            subprocess.run(["umount", str(small)], check=True, capture_output=True)


@pytest.mark.parametrize("name, expected", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_it_with_a_sentence_and_the_next_run_goes_on(forge, paths, calm, tmp_path, name, expected):
    for at in first(calm, "00001_0000.bin"), first(calm, "layout.npy"), first(calm, "train_00001.bin"), first(calm, "index.json"):
        out = tmp_path / f"at{at}"
        code, said = forge.run(*local(paths, out), folder=str(out), fault=name, at=at)
        assert code == expected and is_a_sentence(said), (at, code, said)
        code, said = forge.run(*local(paths, out))
        assert code == 0 and content(out) == content(calm), (at, said)


def test_ctrl_c_in_a_terminal_reaches_the_pool_too(big, tmp_path):
    """As a terminal sends it, to the whole group."""
    paths, calm = big
    out = tmp_path / "out"
    run = Run(local(paths, out, processes=2), tmp_path / "log", sizes=STORM_SIZES)
    while run.process.poll() is None and not list(out.glob("mine/parts/*_*.json")):
        time.sleep(0.002)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130 and is_a_sentence(run.output), run.output
    run.wait_for_children()
    again = Run(local(paths, out, processes=2), tmp_path / "log2", sizes=STORM_SIZES)
    assert again.wait() == 0 and content(out) == calm, again.output


def test_a_child_that_is_killed_is_a_sentence_and_costs_nothing(big, tmp_path):
    paths, calm = big
    out = tmp_path / "out"
    run = Run(local(paths, out, processes=2), tmp_path / "log", sizes=STORM_SIZES)
    while run.process.poll() is None and not list(out.glob("mine/parts/*_*.json")):
        time.sleep(0.002)
    children = [pid for pid in run.living() if pid != run.process.pid]
    os.kill(max(children), signal.SIGKILL)
    assert run.wait() == 1 and is_a_sentence(run.output), run.output
    run.wait_for_children()
    again = Run(local(paths, out, processes=2), tmp_path / "log2", sizes=STORM_SIZES)
    assert again.wait() == 0 and content(out) == calm, again.output


# --------------------------------------------------------------------------------------------------------------- damage

def test_a_damaged_shard_is_found_by_verify_and_by_training(forge, files, paths, tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert forge.run(*local(paths, out), sizes={})[0] == 0
    config = replace(tiny, data=replace(tiny.data, dir=str(out), mixture={"mine": 1.0}, max_epochs=20))
    assert forge.run("--verify", out)[0] == 0
    done = call_train(capsys, config, tmp_path)
    assert done.returncode == 0, done.stderr
    shard = out / "mine/train_00000.bin"
    flip_bit(shard, 5_001)
    code, said = forge.run("--verify", out)
    assert code == 2 and f"{shard} is damaged" in said
    done = call_train(capsys, replace(config, run="again"), tmp_path)
    assert done.returncode != 0 and "train_00000.bin is damaged" in done.stderr + done.stdout


@pytest.mark.parametrize("is_lost", [False, True], ids=["cut", "lost"])
@pytest.mark.parametrize("what", ["bin", "npy", "json"])
def test_a_piece_that_is_not_what_was_written_does_not_become_a_shard(forge, paths, calm, tmp_path, what, is_lost):
    """As a machine that lost its power may leave it, or a hand: done again, or refused in words; never wrong tokens."""
    out, at = tmp_path / "out", first(calm, "layout.npy")
    assert forge.run(*local(paths, out), folder=str(out), fault="kill", at=at)[0] == -signal.SIGKILL
    piece = sorted((out / "mine/parts").glob(f"0*.{what}"))[-1]
    if is_lost:
        piece.unlink()
    else:
        with open(piece, "r+b") as file:
            file.truncate(piece.stat().st_size // 2)
    code, said = forge.run(*local(paths, out))
    if code == 0:
        assert content(out) == content(calm)
    else:
        assert code in (1, 2) and is_a_sentence(said) and piece.name in said and said.count("the same command") == 1, said
        assert not (out / "mine/index.json").exists()


# --------------------------------------------------------------------------------------------------------- command line

WORDS = ["", " ", "local", "demo", "--help", "--verify", "--show", "-", "--", "=", "\x00", "a\x00b", "\n", "é", "🙂", "\ud800",
         "../x", "/dev/null", "/", ".", "x.jsonl", "x" * 5000, "%s%n", "$(touch canary)", "; touch canary", "hf:", "hf:a",
         "lcoal"]
VALUES = ["", " ", "0", "-1", "1", "1e400", "nan", "inf", "1_0", "٣", "true", "None", "[]", "1/0", "0/1", "2/1", "1/1/1", "3/x",
          "/", "9" * 400, *WORDS]
KEYS = ["name", "out", "tokenizer", "val_share", "tokens", "processes", "worker", "decontaminate",
        "skip_bad", "column", "license", "revision", "files", "", "Name", "names", "--name", "\x00", "__class__", "tokens.x"]


def test_hundreds_of_command_lines_end_in_words(tmp_path, monkeypatch):
    """Hostile words and values; none may be a traceback, touch a server or write a file."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE":
        monkeypatch.delenv(name, raising=False)
    rng, codes = random.Random(8), []
    for _ in range(250):
        arguments = ["local", "tokenizer=byte"] if rng.random() < 0.7 else [rng.choice(WORDS)]
        arguments += [rng.choice(WORDS) for _ in range(rng.choice((0, 1, 1, 2)))]
        arguments += [f"{rng.choice(KEYS)}={rng.choice(VALUES)}" for _ in range(rng.choice((0, 1, 2, 3)))]
        if arguments[0] == "demo":
            arguments += ["val_share=2"]        # a harvest would take its time
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = prepare_data.main(arguments)
        codes.append(code)
        assert code in (0, 2), (arguments, code, err.getvalue())
        if code:
            said = err.getvalue()
            assert said.strip() and "Traceback" not in said and len(said) < 30_000, (arguments, said)
        else:
            assert "name=" not in out.getvalue() or "python prepare_data.py" in out.getvalue(), arguments      # help alone
        assert os.listdir(".") == [], arguments
    assert codes.count(2) > 180
