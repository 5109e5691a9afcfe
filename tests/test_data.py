"""Tests of runtime/data.py: which tokens a step reads, what unusable data is answered."""

import hashlib
import itertools
import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from text_files import N_CTX, SHA, VOCAB, write_source

import runtime.shards
from model import GPTConfig
from runtime.cli import UserError
from runtime.config import Config, DataConfig, EvalConfig, OptimConfig
from runtime.data import open_data
from tests import conftest

WINDOWS = {"a": (20, 11), "b": (7,), "c": (40,)}        # train windows of each source's shards


@pytest.fixture
def folder(tmp_path):
    for i, (name, windows) in enumerate(WINDOWS.items()):
        write_source(tmp_path / "data" / name, windows, 1000 * (i + 1))
    return tmp_path / "data"


def config(folder, mixture=None, *, steps=6, micro_batch=2, sequences=8, seed=1, max_epochs=50.0, eval_tokens=24):
    made = Config(
        run="t", steps=steps, seed=seed, optim=OptimConfig(lr=1e-3), eval=EvalConfig(tokens=eval_tokens),
        model=GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=N_CTX, vocab_size=257),
        data=DataConfig(dir=str(folder), mixture=mixture or {"a": 0.5, "b": 0.2, "c": 0.3}, tokenizer="byte",
                        tokens_per_step=sequences * N_CTX, micro_batch=micro_batch, max_epochs=max_epochs))
    object.__setattr__(made.model, "vocab_size", VOCAB)     # ids far above bytes, so that each names its place
    return made


def load(folder, *args, **kwargs):
    return open_data(config(folder, *args, **kwargs), SHA)


def firsts(x):
    return x[:, 0].tolist()


def source_of(first):
    return "abc"[first // 1000 - 1]


# ---------------------------------------------------------------------------------------------------------------- order

def test_a_batch_holds_consecutive_tokens_and_their_successors(folder):
    data = load(folder)
    x, y = data.batch(0, 0, 0, 1)
    assert x.shape == y.shape == (2, N_CTX) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert (y == x + 1).all() and (x == x[:, :1] + torch.arange(N_CTX)).all()


def test_ranks_share_a_step_whatever_their_number(folder):
    """The set of a step's sequences is the same on 1, 2 and 4 ranks, no two ranks read the same place in it."""
    data = load(folder)
    for step in range(6):
        alone = [f for micro in range(4) for f in firsts(data.batch(step, micro, 0, 1)[0])]
        for world_size in (2, 4):
            dealt = [[firsts(data.batch(step, micro, rank, world_size)[0]) for rank in range(world_size)]
                     for micro in range(4 // world_size)]
            assert [f for micro in dealt for rank in micro for f in rank] == alone
    with pytest.raises(AssertionError):
        data.batch(0, 4, 0, 1)      # a fifth micro-batch would belong to the next step


def test_resuming_at_any_step_continues_the_same_stream(folder):
    data, cpu = load(folder), torch.device("cpu")
    whole = [(firsts(x), y.tolist()) for x, y in data.stream(0, 6, 1, 2, cpu)]
    assert len(whole) == 12
    for k in range(7):
        rest = [(firsts(x), y.tolist()) for x, y in load(folder).stream(k, 6, 1, 2, cpu)]
        assert rest == whole[2 * k:]
    assert whole == [(firsts(x), y.tolist()) for step in range(6) for micro in range(2)
                     for x, y in [data.batch(step, micro, 1, 2)]]


def test_seed_decides_the_order_and_micro_batch_does_not(folder):
    def run(**kwargs):
        data = load(folder, **kwargs)
        return [firsts(x) for x, _ in data.stream(0, 6, 0, 1, "cpu")]
    assert run() == run()
    assert run(seed=2) != run()
    assert sum(run(micro_batch=4), []) == sum(run(), [])
    assert run(mixture={"c": 1, "b": 1, "a": 1}) == run(mixture={"a": 2, "b": 2, "c": 2})


def test_each_epoch_reads_every_window_once_in_a_new_order(folder):
    data = load(folder, steps=60)
    read = {name: [] for name in WINDOWS}
    for x, _ in data.stream(0, 60, 0, 1, "cpu"):
        for first in firsts(x):
            read[source_of(first)].append(first)
    for i, (name, shards) in enumerate(WINDOWS.items()):
        n, start, every = sum(shards), 1000 * (i + 1), set()
        for j, count in enumerate(shards):      # enumerated from the way write_source laid the tokens out
            every |= {start + w * N_CTX for w in range(count)}
            start += count * N_CTX + 1 + j % N_CTX
        epochs = [read[name][e * n:(e + 1) * n] for e in range(len(read[name]) // n)]
        assert len(epochs) >= 3
        assert all(set(epoch) == every and len(epoch) == n for epoch in epochs), name
        assert all(one != other for one, other in itertools.pairwise(epochs)), name
        assert epochs[0] != sorted(every)


def test_a_run_keeps_to_its_mixture(folder):
    data = load(folder, steps=25)
    assert data.weights == {"a": 0.5, "b": 0.2, "c": 0.3}
    read = [source_of(f) for x, _ in data.stream(0, 25, 0, 1, "cpu") for f in firsts(x)]
    assert {name: read.count(name) for name in "abc"} == dict(zip("abc", data.planned.tolist(), strict=True))
    for i in range(1, len(read)):
        for name, weight in data.weights.items():
            assert abs(read[:i].count(name) - weight * i) < 1


@pytest.mark.parametrize("mixture", [{"a": 0.5, "b": 0.2, "c": 0.3}, {"a": 0.501, "b": 0.2, "c": 0.299}])
def test_a_run_reads_on_past_its_plan_as_a_longer_run_does(folder, mixture):
    """A rollback moves the data on. The second mixture's period is longer than the short run."""
    def read(steps, start):
        data = load(folder, mixture, steps=steps)
        return [firsts(x) for x, _ in data.stream(start, 40, 0, 1, "cpu")], data.planned.sum(), len(data._table)
    past, planned, _ = read(2, 1)
    longer, _, _ = read(40, 1)
    assert past == longer and planned == 2 * 8


# ----------------------------------------------------------------------------------------------------------- validation

def test_validation_windows_are_fixed_and_evenly_strided(folder):
    data = load(folder, eval_tokens=20)         # 2.5 windows of 8: three
    val = data.val("b")
    x, y = val.batch(0, len(val))
    assert len(val) == 3 and val.tokens == 24 and val.n_ctx == N_CTX
    start = 2000 + 7 * N_CTX + 1
    assert firsts(x) == [start, start + N_CTX, start + 3 * N_CTX] and (y == x + 1).all()    # 0, 5/3, 10/3 rounded down
    assert firsts(val.batch(2, 99)[0]) == firsts(x)[2:] and val.batch(3, 5)[0].shape == (0, N_CTX)
    assert val.text_bytes == 4 * 24
    assert len(load(folder, eval_tokens=10**9).val("b")) == 5       # all there are


def test_identities_change_with_what_they_name(folder):
    one, same = load(folder), load(folder, seed=7)
    assert (one.train_sha256, one.val_sha256) == (same.train_sha256, same.val_sha256)
    assert load(folder, eval_tokens=8).val_sha256 != one.val_sha256
    for split in "train", "val":
        path = folder / "a" / "index.json"
        index = json.loads(path.read_text())
        index["splits"][split]["shards"][0]["sha256"] = "other"
        path.write_text(json.dumps(index))
        assert getattr(load(folder), f"{split}_sha256") != getattr(one, f"{split}_sha256")


# --------------------------------------------------------------------------------------------------------------- stream

def test_leaving_the_stream_ends_its_thread(folder):
    before = threading.active_count()
    stream = load(folder).stream(0, 6, 0, 1, "cpu")
    next(stream)
    stream.close()
    assert threading.active_count() == before


def test_an_error_in_the_thread_surfaces_in_its_turn(folder):
    data = load(folder)
    source, window = data.locate(np.arange(8 * 6))
    path = folder / "c" / "train_00000.bin"
    place = int(np.flatnonzero(source == 2)[3])         # the fourth sequence drawn from c
    tokens = np.fromfile(path, "<u2")
    tokens[window[place] * N_CTX + 3] = VOCAB
    tokens.tofile(path)
    seen = []
    with pytest.raises(UserError, match=rf"{path} holds the id {VOCAB} near token .*--verify {folder / 'c'}"):
        for x, _ in load(folder).stream(0, 6, 0, 1, "cpu"):
            seen.append(x)
    assert len(seen) == place // 2


def test_batches_are_prepared_ahead(folder):
    data, asked = load(folder), []
    data.batch = lambda *place: asked.append(place) or (torch.zeros(1), torch.zeros(1))
    stream = data.stream(0, 6, 0, 1, "cpu")
    next(stream)
    for _ in range(200):
        if len(asked) >= 3:
            break
        time.sleep(0.01)
    assert asked == [(0, 0, 0, 1), (0, 1, 0, 1), (0, 2, 0, 1)]      # one handed out, two ahead
    stream.close()


# ------------------------------------------------------------------------------------------------------------- damage

def hashed(folder):
    """The folder's indexes with the true SHA-256 of each shard, which write_source() leaves out."""
    for path in folder.glob("*/index.json"):
        index = json.loads(path.read_text())
        for shard in (shard for split in index["splits"].values() for shard in split["shards"]):
            shard["sha256"] = hashlib.sha256((path.parent / shard["file"]).read_bytes()).hexdigest()
        path.write_text(json.dumps(index))
    return folder


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_one_flipped_bit_in_any_shard_is_found_by_the_rank_whose_share_it_is(folder):
    hashed(folder)
    shards = sorted(folder.glob("*/*.bin"))
    assert len(shards) == 7
    rng = np.random.default_rng(0)
    for path in shards:
        for bit in (0, 8 * path.stat().st_size - 1, int(rng.integers(8 * path.stat().st_size))):
            flip(path, bit)
            found = []
            for rank in range(3):
                data = load(folder)
                data.verify(rank, 3)
                try:
                    data.verified()
                except UserError as error:
                    found.append(str(error))
            assert len(found) == 1 and str(path) in found[0] and "goes on from the last checkpoint" in found[0]
            flip(path, bit)
    data = load(folder)
    data.verify(0, 1)
    data.verified()


def test_the_stream_ends_at_the_first_batch_after_damage_is_known(folder):
    path = hashed(folder) / "b" / "val_00000.bin"
    flip(path, 5)
    data = load(folder)
    stream = data.stream(0, 6, 0, 1, "cpu")
    next(stream)
    data.verify(0, 1)
    data._verification.wait()
    threads = threading.active_count()
    with pytest.raises(UserError, match=f"{path} is damaged"):
        next(stream)
    assert threading.active_count() < threads, "the preparing thread has ended"


def test_verification_does_not_hold_up_the_stream(folder, monkeypatch):
    """The first batches come while the hashes are still being computed, and no thread keeps the process from ending."""
    go_on = threading.Event()
    monkeypatch.setattr(runtime.shards, "_damage", lambda shard: go_on.wait(60) and None)
    data = load(folder)
    data.verify(0, 1)
    assert len(list(data.stream(0, 6, 0, 1, "cpu"))) == 24
    assert data._verification._thread.is_alive() and data._verification._thread.daemon
    go_on.set()
    data.verified()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error", "train_00000.bin"), MemoryError("no memory")])
def test_a_shard_that_could_not_be_hashed_does_not_pass_for_a_sound_one(folder, monkeypatch, error):
    def fail(shard):
        raise error
    monkeypatch.setattr(runtime.shards, "_damage", fail)
    data = load(folder)
    data.verify(0, 1)
    with pytest.raises(type(error)):
        data.verified()
    with pytest.raises(type(error)):
        next(data.stream(0, 6, 0, 1, "cpu"))


# ------------------------------------------------------------------------------------------------------------- bad data

def refusal(folder, *args, sha=SHA, **kwargs):
    with pytest.raises(UserError) as caught:
        open_data(config(folder, *args, **kwargs), sha)
    return str(caught.value)


def test_more_than_the_data_allows_is_refused(folder):
    said = refusal(folder, steps=40, max_epochs=1.5)        # 64 sequences of b, which has 7 windows
    assert "plans 512 tokens of b, but" in said and "has 56: 9.14 epochs, and data.max_epochs=1.5" in said
    assert "set data.max_epochs=9.15, or steps=6 at most" in said
    assert said.count("\n") == 2, "a and c are short as well"
    load(folder, {"b": 1.0}, steps=7, sequences=2, max_epochs=2)
    assert "steps=7 at most" in refusal(folder, {"b": 1.0}, steps=8, sequences=2, max_epochs=2)


def test_a_missing_source_names_the_others_and_the_command(folder):
    said = refusal(folder, {"a": 1, "ghost": 1})
    assert "there is no" in said and "holds a, b, c" in said and f"python prepare_data.py demo out={folder}" in said
    assert "name=ghost" in refusal(folder / "nowhere", {"ghost": 1})


def test_shards_of_another_tokenizer_are_refused(folder):
    assert "was made with other rules of tokenizer=byte (0123abcd..., not ffff...)" in refusal(folder, sha="ffff")
    path = folder / "b" / "index.json"
    path.write_text(path.read_text().replace('"byte"', '"gpt2"'))
    assert "b was made with tokenizer=gpt2, but data.tokenizer=byte: set data.tokenizer=gpt2" in refusal(folder)


@pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "folder"])
def test_a_damaged_shard_names_file_size_and_command(folder, damage):
    path = folder / "a" / "train_00001.bin"
    size = path.stat().st_size
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "longer":
        path.write_bytes(path.read_bytes() + b"\0\0")
    else:
        path.unlink()
    if damage == "folder":
        path.mkdir()
    said = refusal(folder)
    assert str(path) in said and f"promises {size} bytes" in said and f"prepare_data.py --verify {folder / 'a'}" in said


def test_too_little_text_for_a_window_is_refused(tmp_path):
    write_source(tmp_path / "short", (0,), 0, val_windows=0)
    said = refusal(tmp_path, {"short": 1})
    assert "1 train tokens, too few for one window of model.n_ctx=8" in said and "1 val tokens" in said


@pytest.mark.parametrize("name", ["web/train_00000.bin", "code/val_00000.bin"])
def test_training_itself_finds_one_flipped_bit_and_keeps_nothing_learned_from_it(tiny, tmp_path, capsys, name):
    """Sizes and ids are all possible; the run ends with the file's name before its first checkpoint, and goes on once the
    bit is back."""
    for seed, source in enumerate(("web", "code")):
        conftest.write_source(tmp_path / "data" / source, seed)
    short = replace(tiny, steps=2, checkpoint=replace(tiny.checkpoint, every=1),
                    data=replace(tiny.data, dir=str(tmp_path / "data")))
    flip(tmp_path / "data" / name, 16 * 777)        # the lowest bit of a token
    refused = conftest.call_train(capsys, short, tmp_path)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"{name} is damaged: its sha256 is not the one in index.json; restore the file" in refused.stderr
    assert not (short.run_dir / "summary.json").exists() and not list(short.run_dir.glob("checkpoints/step_*"))
    flip(tmp_path / "data" / name, 16 * 777)
    assert conftest.call_train(capsys, short, tmp_path).returncode == 0
