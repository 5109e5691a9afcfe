"""Tests of runtime/data.py and runtime/shards.py: the order of tokens, batches, validation, damage,
index.json; ids of 32 bits, prompts and responses, from prepare_data.py to evaluation."""

import contextlib
import itertools
import json
import random
import re
import threading
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
import torch

from eval import demo_questions
from lib.errors import UserError
from prepare_data import main
from runtime import shards
from runtime.data import Data, permute, schedule, shares
from runtime.shards import damage, read_index, remove_shards
from runtime.tokenizer import load_tokenizer
from tests import conftest
from tests.helpers.faults import flip_bit
from tests.helpers.text_files import DOCUMENTS, some_documents, write, write_tokenizer
from tests.prepare.test_pipeline import local, split_of

SHA, N_CTX, VOCAB, MASK = "0123abcd", 8, 60_000, np.uint32(2**31)
OURS = {"tokenizer": "folder", "tokenizer_sha256": SHA, "vocab_size": VOCAB}
WINDOWS = {"a": (20, 11), "b": (7,), "c": (40,)}  # train windows of each source's shards


def write_numbered(folder, windows, offset, val_windows=5, **changes):
    """Shards of consecutive token ids: a window's first id names it. The second lacks its last
    window's target alone."""
    splits, value = {"train": [], "val": []}, offset
    for split, counts in ("train", windows), ("val", (val_windows,)):
        for i, count in enumerate(counts):
            splits[split].append(
                np.arange(value, value + count * N_CTX + 1 + i * 7 % N_CTX, dtype="<u2")
            )
            value += len(splits[split][-1])
    conftest.write_shards(folder, splits, 4, **OURS, **changes)


@pytest.fixture
def folder(tmp_path):
    for i, (name, windows) in enumerate(WINDOWS.items()):
        write_numbered(tmp_path / "data" / name, windows, 1000 * (i + 1))
    return tmp_path / "data"


def config_of(folder, words=""):
    return conftest.changed(
        conftest.tiny_config(folder, folder.parent / "out"),
        "data.mixture=a:0.5,b:0.2,c:0.3 seed=1 data.tokenizer=./some/folder"
        f" data.tokens_per_step={8 * N_CTX} data.micro_batch=2 eval.tokens=24 data.max_epochs=50"
        f" model.vocab_size={VOCAB} model.n_ctx={N_CTX} {words}",
    )


def load(folder, words="", sha256=SHA):
    return Data(config_of(folder, words), sha256)


def refusal(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        load(*args, **kwargs)
    return str(caught.value)


def firsts(batches):
    return [token for x, _ in batches for token in x[:, 0].tolist()]


def read(data, steps, start=0):
    """First tokens of all sequences of these steps, in order; of one rank."""
    return firsts(data.stream(start, steps, 0, 1, "cpu"))


# ------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 65_537])
def test_permute_is_a_permutation_that_spreads(n):
    images = [permute(np.arange(n), n, key) for key in (b"1/a/0", b"1/a/1", b"2/a/0")]
    assert all(sorted(image.tolist()) == list(range(n)) for image in images)
    if n >= 1000:  # rank correlation and fixed points near those of a random permutation
        assert not (images[0] == images[1]).all() and not (images[0] == images[2]).all()
        for image in images:
            assert (
                abs(np.corrcoef(image, np.arange(n))[0, 1]) < 4 / n**0.5
                and (image == np.arange(n)).sum() <= 8
            )
        assert np.unique(np.diff(images[0]) % n).size > 0.55 * n, (
            "neighbours do not stay neighbours"
        )


@pytest.mark.parametrize(
    "mixture",
    [
        {"a": 0.8, "b": 0.07, "c": 0.03, "d": 0.1},
        {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3},
        {"a": 1},
        {"a": 0.999, "b": 0.001},
        {"a": 1, "b": 2**0.5, "c": 0.1},
        {f"s{i}": 1 + i % 3 for i in range(12)},
        *(
            {f"s{i}": random.Random(seed).random() + seed * i / 9 for i in range(2 + seed)}
            for seed in range(5)
        ),
    ],
    ids=str,
)
def test_weights_hold_to_within_one_sequence_at_every_prefix(mixture):
    counts = shares(mixture)
    period, n, total = sum(counts.values()), 20_000, sum(map(Fraction, mixture.values()))
    table, _ = schedule(list(counts.values()), min(period, n))
    table = np.resize(table, n) if len(table) == period else table
    for s, name in enumerate(mixture):
        share, rounded, so_far = (
            Fraction(mixture[name]) / total,
            Fraction(counts[name], period),
            np.cumsum(table == s),
        )
        for weight, slack in (float(rounded), 1e-6), (float(share), n * 2**-21 + 1e-6):
            assert np.abs(so_far - weight * np.arange(1, n + 1)).max() < 1 + slack
        assert abs(rounded - share) < Fraction(1, 2**20)


def test_ranks_share_a_step_whatever_their_number(folder):
    """A step's sequences are the same on 1, 2 and 4 ranks, in micro-batches of 2 or 4: consecutive
    tokens, their successors."""
    data = load(folder)
    x, y = data.batch(0, 0, 0, 1)
    assert (
        x.shape == y.shape == (2, N_CTX)
        and x.dtype == y.dtype == torch.int64
        and x.is_contiguous()
        and y.is_contiguous()
    )
    assert (y == x + 1).all() and (x == x[:, :1] + torch.arange(N_CTX)).all()
    for step in range(6):
        alone = firsts(data.batch(step, micro, 0, 1) for micro in range(4))
        for size in (2, 4):
            assert (
                firsts(
                    data.batch(step, micro, rank, size)
                    for micro in range(4 // size)
                    for rank in range(size)
                )
                == alone
            )
    assert (
        read(load(folder, "data.micro_batch=4"), 6)
        == read(data, 6)
        != read(load(folder, "seed=2"), 6)
    )
    assert read(load(folder, "data.mixture=c:1,b:1,a:1"), 6) == read(
        load(folder, "data.mixture=a:2,b:2,c:2"), 6
    )
    with pytest.raises(AssertionError):
        data.batch(0, 4, 0, 1)  # a fifth micro-batch would belong to the next step


@pytest.mark.parametrize("words", ["", "data.mixture=a:0.501,b:0.2,c:0.299"])
def test_a_run_resumes_at_any_step_and_reads_on_past_its_plan_as_a_longer_run_does(folder, words):
    """A rollback moves the data on. The second mixture's period is longer than the short run. A run
    that was begun by an older version goes on with the same tokens, too: as printed by commit
    4385f5b."""
    assert read(load(folder), 1) == [1096, 3080, 1185, 2024, 1201, 3008, 1152, 2008]
    assert read(load(folder, "seed=7"), 1000, 999) == [
        1008,
        2000,
        1032,
        3208,
        1080,
        2016,
        3040,
        1104,
    ]
    short, whole = load(folder, f"{words} steps=2"), read(load(folder, f"{words} steps=40"), 40)
    assert (
        all(read(short, 40, step) == whole[8 * step :] for step in (0, 1, 2, 7, 39))
        and short.planned.sum() == 2 * 8
    )
    assert np.array_equal(
        load(folder, f"{words} steps=2").locate(np.arange(17)), short.locate(np.arange(17))
    )


def test_each_epoch_reads_every_window_once_in_a_new_order(folder):
    data = load(folder, "steps=60")
    found = np.array(read(data, 60))
    assert data.weights == {"a": 0.5, "b": 0.2, "c": 0.3}
    assert np.bincount(found // 1000 - 1).tolist() == data.planned.tolist()
    for i, (name, counts) in enumerate(WINDOWS.items()):
        n, start, every = sum(counts), 1000 * (i + 1), []
        # enumerated from the way write_numbered laid the tokens out
        for j, count in enumerate(counts):
            every += [start + w * N_CTX for w in range(count)]
            start += count * N_CTX + 1 + j * 7 % N_CTX
        mine = found[found // 1000 == i + 1].tolist()
        epochs = [mine[e * n : (e + 1) * n] for e in range(len(mine) // n)]
        assert (
            len(epochs) >= 3
            and data.epochs[name] == len(mine) / n
            and all(sorted(epoch) == every for epoch in epochs)
        )
        assert all(one != other for one, other in itertools.pairwise([every, *epochs]))


# -------------------------------------------------------------------------------------- validation


def test_validation_windows_are_fixed_and_evenly_strided(folder):
    val = load(folder, "eval.tokens=20").val["b"]  # 2.5 windows of 8: three
    x, y = val.batch(0, len(val))
    assert (len(val), val.tokens, val.n_ctx, val.text_bytes) == (3, 24, N_CTX, 4 * 24)
    # 0, 5/3, 10/3 rounded down
    assert x[:, 0].tolist() == [2000 + 7 * N_CTX + 1 + N_CTX * window for window in (0, 1, 3)]
    assert (
        (y == x + 1).all()
        and torch.equal(val.batch(2, 99)[0], x[2:])
        and val.batch(3, 5)[0].shape == (0, N_CTX)
    )
    assert len(load(folder, f"eval.tokens={10**9}").val["b"]) == 5  # all there are


def test_identities_change_with_what_they_name(folder):
    one, other = load(folder), load(folder, "seed=7 eval.tokens=8")
    assert one.train_sha256 == other.train_sha256 and one.val_sha256 != other.val_sha256
    assert one.val_sha256 == load(folder, "seed=7").val_sha256
    for split in "train", "val":
        splits = json.loads((folder / "a/index.json").read_text())["splits"]
        splits[split]["shards"][0]["sha256"] = "other"
        conftest.write_index(folder / "a", splits=splits)
        assert getattr(load(folder), f"{split}_sha256") != getattr(one, f"{split}_sha256")


# ------------------------------------------------------------------------ stream, damage, refusals


def test_an_error_in_the_thread_surfaces_in_its_turn(folder):
    source, window = load(folder).locate(np.arange(8 * 6))
    path = folder / "c" / "train_00000.bin"
    place = int(np.flatnonzero(source == 2)[3])  # the fourth sequence drawn from c
    np.memmap(path, "<u2", "r+")[window[place] * N_CTX + 3] = VOCAB
    seen, threads = [], threading.active_count()
    with pytest.raises(UserError, match=rf"{path.parent} holds the id {VOCAB}, ") as caught:
        seen.extend(load(folder).stream(0, 6, 0, 1, "cpu"))
    assert len(seen) == place // 2, "all batches before it were served"
    assert caught.value.__notes__, "train.py prints it on this rank, which may be the only one"
    assert threading.active_count() == threads, "the preparing thread has ended"


def test_a_flipped_bit_or_another_size_of_any_file_is_found_and_named(folder):
    """By damage() in a folder; in training, which does without hashes.npy, a bit by the rank whose
    share the shard is and whose stream it ends, another size before anything is read."""
    files = sorted((*folder.glob("*/*.bin"), *folder.glob("*/hashes.npy")))
    assert len(files) == 10 and not [
        sentence for source in folder.iterdir() for sentence in damage(source)
    ]
    for path in files:
        content, is_shard = path.read_bytes(), path.suffix == ".bin"
        for at in (0, len(content) // 2, len(content) - 1):
            flip_bit(path, at)
            assert [sentence.partition(": ")[0] for sentence in damage(path.parent)] == [
                f"{path} is damaged"
            ]
            found = []
            for rank in range(3):
                data = load(folder)
                data.verify(rank, 3)
                try:
                    data.verified()
                except UserError as error:
                    with pytest.raises(UserError, match=f"{path} is damaged"):
                        next(data.stream(0, 6, 0, 1, "cpu"))
                    # by which train.py prints it on this rank, which may be the only one
                    found += error.__notes__
            assert len(found) == is_shard
            flip_bit(path, at)
        for other, said in (content[:-1], ""), (content + b"\0\0", ""), (None, "is missing"):
            path.unlink() if other is None else path.write_bytes(other)
            assert [f"{path} {said}" in sentence for sentence in damage(path.parent)] == [True]
            assert not is_shard or f"promises {len(content)} bytes" in refusal(folder)
        path.write_bytes(content)


def test_verification_delays_neither_the_stream_nor_the_exit_and_its_error_is_not_lost(
    folder, monkeypatch
):
    go_on, data = threading.Event(), load(folder)
    monkeypatch.setattr(
        shards, "file_sha256", lambda path: go_on.wait(60) and {}["a shard that cannot be hashed"]
    )
    data.verify(0, 1)
    assert len(list(data.stream(0, 6, 0, 1, "cpu"))) == 24
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "verify")
    go_on.set()
    for ends in data.verified, lambda: next(data.stream(0, 6, 0, 1, "cpu")):
        with pytest.raises(KeyError):  # it does not pass as sound
            ends()


def test_more_than_the_data_allows_or_too_little_is_refused(folder):
    said = refusal(folder, "steps=40 data.max_epochs=1.5")  # 64 sequences of b, which has 7 windows
    assert (
        "512 tokens of b" in said
        and "has 56 and data.max_epochs=1.5; set it to 9.15," in said
        and said.count("\n") == 2
    )
    load(
        folder,
        "steps=7"
        + (words := f" data.mixture=b:1 data.tokens_per_step={2 * N_CTX} data.max_epochs=2"),
    )
    assert "set it to 2.29," in refusal(folder, "steps=8" + words)
    write_numbered(folder / "short", (0,), 0, val_windows=0)
    said = refusal(folder, "data.mixture=short:1")
    assert "1 train tokens, too few" in said and "1 val tokens, too few" in said
    assert re.search(
        r"there is no .*/ghost/index.json \(.* holds a, b, c, short\)",
        refusal(folder, "data.mixture=a:1,ghost:1"),
    )
    said = refusal(folder, sha256="4567")
    assert re.search(
        r"made with tokenizer=folder \(0123abcd.* another tokenizer \(4567.*: set"
        r" data.tokenizer to",
        said,
    )
    said = refusal(folder, "model.vocab_size=300")
    assert (
        f"holds ids below {VOCAB}, but model.vocab_size=300: set model.vocab_size={VOCAB}" in said
    )
    conftest.write_index(folder / "b", tokenizer="gpt2")
    assert "tokenizer=gpt2 (0123abcd...), but data.tokenizer=./some/folder" in refusal(folder)


# -------------------------------------------------------------------------------------- index.json


def test_the_index_is_read_as_it_is_written(tmp_path):
    write_numbered(
        tmp_path / "a",
        (20, 11),
        1000,
        duplicates={"a": 2, "other": 1},
        empty=1,
        contaminated=4,
        budget=150,
    )
    index, by_hand = read_index(tmp_path / "a"), json.loads((tmp_path / "a/index.json").read_text())
    left_out = {
        "cut": {},
        "inner_borders": {},
        "replaced": {},
        "joined_lists": {},
        "odd_rows": [],
        "is_masked": False,
    }
    assert {**by_hand, **vars(index)} == {
        **by_hand,
        "splits": index.splits,
        "dtype": "<u2",
        **left_out,
    }
    assert [shard.path.name for shard in index.shards] == [
        "train_00000.bin",
        "train_00001.bin",
        "val_00000.bin",
    ]
    assert (index.dtype, index.is_masked, index.splits["train"].tokens) == (
        "<u2",
        False,
        31 * N_CTX + 9,
    )
    shards.write_index(
        tmp_path / "a",
        {key: by_hand[key] for key in by_hand if key not in ("format_version", "sha256")},
    )
    assert (
        json.loads((tmp_path / "a/index.json").read_text()) == by_hand
        and read_index(tmp_path / "a") == index
    )
    by_hand["splits"]["train"]["shards"][0]["file"] = "../b/train_00000.bin"
    conftest.write_index(tmp_path / "a", splits=by_hand["splits"])
    assert read_index(tmp_path / "a") == index, "no index names files of another folder"


def test_no_flipped_bit_and_no_edit_of_an_index_stays_unseen(folder):
    """In white space a flip that leaves it JSON changes nothing."""
    path, rng = folder / "a" / "index.json", np.random.default_rng(0)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))  # another layout is no edit
    sound, meant = path.read_bytes(), read_index(folder / "a")
    for byte in rng.choice(len(sound), 300, replace=False):
        flip_bit(path, byte)
        with contextlib.suppress(UserError):
            assert read_index(folder / "a") == meant and chr(sound[byte]).isspace()
        path.write_bytes(sound)
    for content, changes in (
        (b"", {}),
        (b"[]", {}),
        (sound.replace(b"CC0", b"MIT"), {}),
        (sound, {"format_version": 3}),
        (sound, {"note": "of another program"}),
    ):
        path.write_bytes(content)
        if changes:
            conftest.write_index(folder / "a", **changes)
        assert refusal(folder).startswith(f"{path} is damaged")


def test_only_shards_hashes_and_index_are_removed(tmp_path):
    foreign = {"my_hashes.npy", "my_train_00000.bin", "notes.txt", "train.bin", "train_1.bin"}
    for name in {"train_00002.bin.tmp", "hashes.npy", "val_00000.bin", *foreign}:
        (tmp_path / name).touch()
    remove_shards(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == foreign


# --------------------------------------------------------------- from prepare_data.py to the batch


def test_shards_of_a_vocabulary_beyond_16_bits(tmp_path, capsys):
    wide = str(write_tokenizer(tmp_path / "wide", spare=70_000))
    assert local(write(tmp_path / "a.jsonl", DOCUMENTS), out=tmp_path / "data", tokenizer=wide) == 0
    tok, index, text = (
        load_tokenizer(wide),
        read_index(tmp_path / "data/mine"),
        (tmp_path / "data/mine/index.json").read_text(),
    )
    assert (json.loads(text)["dtype"], index.tokenizer, index.tokenizer_sha256) == (
        "uint32",
        "folder",
        tok.sha256,
    )
    assert wide not in text and "is_masked" not in text, (
        "no machine's path, and no mask where there is none"
    )
    ids = np.concatenate([np.fromfile(shard.path, "<u4") for shard in index.shards])
    found = [piece.tolist() for piece in np.split(ids, (ids == tok.eot).nonzero()[0][1:])]
    assert sorted(found) == sorted([*tok.prefix, *tok.encode(document)] for document in DOCUMENTS)
    made, moved, other = (
        config_of(
            tmp_path / "data", f"data.mixture=mine:1 data.tokenizer={name} model.vocab_size={size}"
        )
        for name, size in (
            (wide, tok.vocab_size + 8),
            ("/else/where", tok.vocab_size + 8),
            ("gpt2", 50257),
        )
    )
    x, y = Data(made, tok.sha256).batch(0, 0, 0, 1)
    assert (x[:, 1:] == y[:, :-1]).all() and x.max() < tok.vocab_size
    told = conftest.asked(capsys, main, "--show", tmp_path / "data")
    assert f"folder (sha256 {tok.sha256[:9]}..., {tok.vocab_size:,} ids)" in told
    assert made.identity() == moved.identity() != other.identity(), "the shards say which it is"


# tests/runtime/test_chat.py has the rows that spell special tokens.
SPELLED = [
    text.replace("<|endoftext|>", "<|none|>")
    for seed in (3, 4)
    for text in some_documents(60, seed)
]
PAIRS = list(zip(SPELLED[:60], SPELLED[60:], strict=True))
# The same two texts parted elsewhere are another pair; an empty prompt is one too; rows without a
# response are none.
PAIRS += [
    ("ab", "c"),
    ("a", "bc"),
    ("", "abc"),
    ("abc", ""),
    ("abc", " \n"),
    ("", ""),
    PAIRS[0],
    (PAIRS[1][0], "other"),
]


@pytest.mark.parametrize("kind", ["byte", "gpt2", "folder"])
def test_prompts_are_context_and_responses_targets(tmp_path, kind, capsys):
    name, file = (
        (str(write_tokenizer(tmp_path / "tokenizer")) if kind == "folder" else kind),
        tmp_path / "chat.jsonl",
    )
    file.write_text(
        "".join(
            json.dumps({"id": i, "prompt": p, "response": r}) + "\n"
            for i, (p, r) in enumerate(PAIRS)
        )
    )
    assert (
        local(
            file, out=tmp_path / "data", name="chat", tokenizer=name, instruct="true", val_share=0.3
        )
        == 0
    )
    tok, index = load_tokenizer(name), read_index(tmp_path / "data/chat")
    assert (
        index.is_masked
        and index.dtype == "<u4"
        and index.duplicates == {"chat": 1}
        and index.empty == 3
    )
    # tokens of each document, bytes of its response
    expected = {"train": ([], []), "val": ([], [])}
    for prompt, response in dict.fromkeys(pair for pair in PAIRS if pair[1].strip()):
        context = np.array([*tok.prefix[1:], *tok.encode(prompt)], "<u4") | MASK
        tokens, sizes = expected[split_of(f"{prompt}\0{response}".encode(), 3000)]
        tokens.append(np.concatenate([[tok.eot], context, tok.encode(response)]))
        sizes.append(len(response.encode()))
    windows = []
    for split, (tokens, sizes) in expected.items():
        raw = np.concatenate(tokens)
        assert (
            np.fromfile(tmp_path / f"data/chat/{split}_00000.bin", "<u4").tolist() == raw.tolist()
        )
        assert (index.splits[split].text_bytes, index.splits[split].documents) == (
            sum(sizes),
            len(sizes),
        )
        ids, targets = (raw & ~MASK).tolist(), np.where(raw < MASK, raw, -100).tolist()
        windows += [
            (ids[at : at + N_CTX], targets[at + 1 : at + N_CTX + 1])
            for at in range(0, len(ids) - N_CTX, N_CTX)
        ]
    assert "the responses and the ends of documents" in conftest.asked(
        capsys, main, "--show", tmp_path / "data"
    )

    config = config_of(
        tmp_path / "data",
        "data.mixture=chat:1"
        f" eval.tokens={10**6} data.tokenizer={name} model.vocab_size={tok.vocab_size}",
    )
    data = Data(config, tok.sha256)
    val = data.val["chat"]
    for step in range(6):
        batches = [data.batch(step, micro, rank, 2) for micro in range(2) for rank in range(2)]
        assert all(
            (a.tolist(), b.tolist()) in windows
            for x, y in batches
            for a, b in zip(x, y, strict=True)
        )
        assert data.targets(step) == sum(int((y != -100).sum()) for _, y in batches) < 8 * N_CTX
    x, y = val.batch(0, len(val))
    assert all((a.tolist(), b.tolist()) in windows for a, b in zip(x, y, strict=True))
    assert (
        val.targets.tolist() == (y != -100).sum(1).tolist()
        and 0 in val.targets
        and val.tokens == val.targets.sum()
    )
    assert val.text_bytes == round(val.tokens * sum(sizes) / (raw < MASK).sum())
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.json").write_text(json.dumps(asdict(config)))
    (source,) = demo_questions._sources(str(config.run_dir))
    found = demo_questions._pick(source, 999, "seed", lambda text: text)
    assert len(found) == len(sizes) and set(found) <= {p + r for p, r in PAIRS if r.strip()}
    conftest.write_index(tmp_path / "data/chat", is_masked=False)  # a mark is no token id
    with pytest.raises(UserError, match=r"holds the id \d{10}, "):
        read(Data(config, tok.sha256), 6)
    only_prompts = {split: [np.full(101, MASK)] for split in ("train", "val")}
    conftest.write_shards(tmp_path / "prompts", only_prompts, **OURS, is_masked=True)
    assert re.search(
        r"none of the 12 .* holds a response to learn", refusal(tmp_path, "data.mixture=prompts:1")
    )


def test_training_tokens_that_are_prompts_alone_are_refused(tmp_path):
    split = {"train": [np.full(1001, MASK)], "val": [np.full(1001, 97, "<u4")]}
    conftest.write_shards(tmp_path / "prompts", split, **OURS, is_masked=True)
    assert "prompts has no target in its 1001 training tokens" in refusal(
        tmp_path, "data.mixture=prompts:1"
    )
