"""Tests of runtime/data.py and runtime/shards.py: the order of tokens, batches, validation, damage,
index.json; ids of 32 bits, prompts and responses, from prepare_data.py to evaluation."""

import contextlib
import itertools
import json
import random
import re
import shutil
import threading
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eval import demo_questions
from lib.errors import UserError
from prepare_data import main
from runtime import data as runtime_data
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


def write_numbered(folder: Path, windows, offset, val_windows: int = 5, **changes: object):
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
def folder(tmp_path: Path):
    for i, (name, windows) in enumerate(WINDOWS.items()):
        write_numbered(tmp_path / "data" / name, windows, 1000 * (i + 1))
    return tmp_path / "data"


def config_of(folder: Path, words: str = ""):
    return conftest.changed(
        conftest.tiny_config(folder, folder.parent / "out"),
        "data.mixture=a:0.5,b:0.2,c:0.3 seed=1 data.tokenizer=./some/folder"
        f" data.tokens_per_step={8 * N_CTX} data.micro_batch=2 eval.tokens=24 data.max_epochs=50"
        f" model.vocab_size={VOCAB} model.n_ctx={N_CTX} {words}",
    )


def load(folder: Path, words: str = "", sha256=SHA):
    return Data(config_of(folder, words), sha256)


def refusal(*args: object, **kwargs: object):
    with pytest.raises(UserError) as caught:
        load(*args, **kwargs)
    return str(caught.value)


def firsts(batches):
    return [token for x, _ in batches for token in x[:, 0].tolist()]


def read(data, steps: int, start: int = 0):
    """First tokens of all sequences of these steps, in order; of one rank."""
    return firsts(data.stream(start, steps, 0, 1, "cpu"))


# ------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 65_537])
def test_permute_is_a_permutation_that_spreads(n: int):
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
        {"a": 0.80004, "b": 0.2},  # nearly a simple ratio, and none
        {"a": 1, "b": 2**0.5, "c": 0.1},
        {f"s{i}": 1 + i % 3 for i in range(12)},
        *(
            {f"s{i}": random.Random(seed).random() + seed * i / 9 for i in range(2 + seed)}
            for seed in range(5)
        ),
    ],
    ids=str,
)
def test_weights_hold_to_within_one_sequence_at_every_prefix(mixture: dict[str, Any]):
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


def test_a_micro_batch_is_consecutive_tokens_and_their_successors(folder):
    x, y = load(folder).batch(0, 0, 0, 1)
    for tensor in x, y:
        assert tensor.shape == (2, N_CTX) and tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert (x == x[:, :1] + torch.arange(N_CTX)).all()
    assert (y == x + 1).all()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_a_step_whatever_their_number(folder, size: int):
    data = load(folder)
    micros = range(4 // size)
    for step in range(6):
        alone = firsts(data.batch(step, micro, 0, 1) for micro in range(4))
        places = itertools.product(micros, range(size))
        assert firsts(data.batch(step, micro, rank, size) for micro, rank in places) == alone


@pytest.mark.parametrize(
    "a, b, is_same_order",
    [
        ("", "data.micro_batch=4", True),
        ("", "seed=2", False),
        ("data.mixture=a:2,b:2,c:2", "data.mixture=c:1,b:1,a:1", True),
    ],
)
def test_the_order_depends_on_seed_and_mixture_alone(folder, a: str, b: str, is_same_order: bool):
    assert (read(load(folder, a), 6) == read(load(folder, b), 6)) is is_same_order


def test_a_micro_batch_of_the_next_step_is_an_error(folder):
    with pytest.raises(AssertionError):
        load(folder).batch(0, 4, 0, 1)


@pytest.mark.parametrize("words", ["", "data.mixture=a:0.501,b:0.2,c:0.299"])
def test_a_run_reads_on_past_its_plan_as_a_longer_run_does(folder, words: str):
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


def windows_of(name: str) -> list[int]:
    """The first tokens of all train windows of a source, as write_numbered() laid them out."""
    start, windows = 1000 * (list(WINDOWS).index(name) + 1), []
    for shard, count in enumerate(WINDOWS[name]):
        windows += [start + window * N_CTX for window in range(count)]
        start += count * N_CTX + 1 + shard * 7 % N_CTX
    return windows


@pytest.mark.parametrize("name", WINDOWS)
def test_each_epoch_reads_every_window_once_in_a_new_order(folder, name: str):
    data, windows = load(folder, "steps=60"), windows_of(name)
    n, number = len(windows), windows[0] // 1000
    order = [token for token in read(data, 60) if token // 1000 == number]
    assert data.epochs[name] == len(order) / n
    epochs = [order[start : start + n] for start in range(0, len(order) - n + 1, n)]
    assert len(epochs) >= 3
    for earlier, epoch in itertools.pairwise([windows, *epochs]):
        assert sorted(epoch) == windows and epoch != earlier


def test_a_run_reads_of_each_source_what_was_planned(folder):
    data = load(folder, "steps=60")
    sources = np.array(read(data, 60)) // 1000 - 1
    assert np.bincount(sources).tolist() == data.planned.tolist()
    assert data.weights == {"a": 0.5, "b": 0.2, "c": 0.3}


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
    data, other_data = load(folder), load(folder, "seed=7 eval.tokens=8")
    assert data.train_sha256 == other_data.train_sha256 and data.val_sha256 != other_data.val_sha256
    assert data.val_sha256 == load(folder, "seed=7").val_sha256
    for split in "train", "val":
        splits = json.loads((folder / "a/index.json").read_text())["splits"]
        splits[split]["shards"][0]["sha256"] = "other"
        conftest.write_index(folder / "a", splits=splits)
        assert getattr(load(folder), f"{split}_sha256") != getattr(data, f"{split}_sha256")


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


# source and name of each file that an index describes
SHARDS = [f"{source}/{split}_00000.bin" for source in "abc" for split in ("train", "val")]
SHARDS += ["a/train_00001.bin"]
FILES = SHARDS + [f"{source}/hashes.npy" for source in "abc"]
PLACES = [0.0, 0.5, 1.0]  # of a flipped bit in a file


def flip(path: Path, place: float) -> None:
    flip_bit(path, int(place * (path.stat().st_size - 1)))


def test_a_sound_folder_has_no_damage(folder):
    names = {str(path.relative_to(folder)) for path in folder.glob("*/*.[bn]*")}
    assert names == set(FILES), "the lists above are complete"
    assert [sentence for source in "abc" for sentence in damage(folder / source)] == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_of_any_file_is_found_and_named(folder, name: str, place: float):
    path = folder / name
    flip(path, place)
    (sentence,) = damage(path.parent)
    assert sentence.startswith(f"{path} is damaged: ")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SHARDS)
def test_a_flipped_bit_ends_the_stream_of_the_rank_that_verifies_it(
    folder, name: str, place: float
):
    path, notes = folder / name, []
    flip(path, place)
    for rank in range(3):
        data = load(folder)
        data.verify(rank, 3)
        try:
            data.verified()
        except UserError as error:
            with pytest.raises(UserError, match=f"{path} is damaged"):
                next(data.stream(0, 6, 0, 1, "cpu"))
            # by which train.py prints it on this rank, which may be the only one
            notes += error.__notes__
    assert len(notes) == 1


def resize(path: Path, change: str) -> None:
    """Cut a byte off, add two, or delete the file."""
    content = path.read_bytes()
    path.unlink()
    if change != "gone":
        path.write_bytes(content[:-1] if change == "cut" else content + b"\0\0")


@pytest.mark.parametrize("change", ["cut", "longer", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_another_size_of_any_file_is_found_and_named(folder, name: str, change: str):
    path = folder / name
    resize(path, change)
    (sentence,) = damage(path.parent)
    assert f"{path} {'is missing' if change == 'gone' else ''}" in sentence


@pytest.mark.parametrize("change", ["cut", "longer", "gone"])
@pytest.mark.parametrize("name", SHARDS)
def test_another_size_of_a_shard_is_refused_before_anything_is_read(folder, name: str, change: str):
    """Training does without hashes.npy."""
    size = (folder / name).stat().st_size
    resize(folder / name, change)
    assert f"promises {size} bytes" in refusal(folder)


def test_verification_delays_nothing_and_its_error_is_not_lost(
    folder, monkeypatch: pytest.MonkeyPatch
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
    sentence = refusal(
        folder, "steps=40 data.max_epochs=1.5"
    )  # 64 sequences of b, which has 7 windows
    assert (
        "512 tokens of b" in sentence
        and "has 56 and data.max_epochs=1.5; set it to 9.15," in sentence
        and sentence.count("\n") == 2
    )
    load(
        folder,
        "steps=7"
        + (words := f" data.mixture=b:1 data.tokens_per_step={2 * N_CTX} data.max_epochs=2"),
    )
    assert "set it to 2.29," in refusal(folder, "steps=8" + words)
    write_numbered(folder / "short", (0,), 0, val_windows=0)
    sentence = refusal(folder, "data.mixture=short:1")
    assert "1 train tokens, too few" in sentence and "1 val tokens, too few" in sentence
    assert re.search(
        r"there is no .*/ghost/index.json \(.* holds a, b, c, short\)",
        refusal(folder, "data.mixture=a:1,ghost:1"),
    )
    sentence = refusal(folder, sha256="4567")
    assert re.search(
        r"made with tokenizer=folder \(0123abcd.* another tokenizer \(4567.*: set"
        r" data.tokenizer to",
        sentence,
    )
    sentence = refusal(folder, "model.vocab_size=300")
    assert (
        f"holds ids below {VOCAB}, but model.vocab_size=300: set model.vocab_size={VOCAB}"
        in sentence
    )
    conftest.write_index(folder / "b", tokenizer="gpt2")
    assert "tokenizer=gpt2 (0123abcd...), but data.tokenizer=./some/folder" in refusal(folder)


# -------------------------------------------------------------------------------------- index.json


def test_the_index_is_read_as_it_is_written(tmp_path: Path):
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
        "unknown": {},
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


def test_only_shards_hashes_and_index_are_removed(tmp_path: Path):
    foreign = {"my_hashes.npy", "my_train_00000.bin", "notes.txt", "train.bin", "train_1.bin"}
    for name in {"train_00002.bin.tmp", "hashes.npy", "val_00000.bin", *foreign}:
        (tmp_path / name).touch()
    remove_shards(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == foreign


# --------------------------------------------------------------- from prepare_data.py to the batch


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory):
    """A tokenizer of more than 2**16 ids, by its folder."""
    return str(write_tokenizer(tmp_path_factory.mktemp("wide"), spare=70_000))


@pytest.fixture(scope="module")
def wide_shards(tmp_path_factory: pytest.TempPathFactory, wide):
    """The data folder of DOCUMENTS in its ids."""
    folder = tmp_path_factory.mktemp("wide_shards")
    file = write(folder / "a.jsonl", DOCUMENTS)
    assert local(file, out=folder / "data", tokenizer=wide) == 0
    return folder / "data"


def wide_config(folder: Path, tokenizer, vocab_size):
    words = f"data.mixture=mine:1 data.tokenizer={tokenizer} model.vocab_size={vocab_size}"
    return config_of(folder, words)


def test_ids_beyond_16_bits_are_stored_in_32(wide, wide_shards):
    tok, index = load_tokenizer(wide), read_index(wide_shards / "mine")
    assert json.loads((wide_shards / "mine/index.json").read_text())["dtype"] == "uint32"
    ids = np.concatenate([np.fromfile(shard.path, "<u4") for shard in index.shards])
    ends = (ids == tok.eot).nonzero()[0][1:]
    documents = [piece.tolist() for piece in np.split(ids, ends)]
    assert sorted(documents) == sorted([*tok.prefix, *tok.encode(text)] for text in DOCUMENTS)


def test_an_index_names_its_tokenizer_by_hash_and_not_by_its_place(wide, wide_shards):
    index, text = read_index(wide_shards / "mine"), (wide_shards / "mine/index.json").read_text()
    tokenizer_sha256 = load_tokenizer(wide).sha256
    assert (index.tokenizer, index.tokenizer_sha256) == ("folder", tokenizer_sha256)
    assert wide not in text and "is_masked" not in text, "nor a mask where there is none"


def test_batches_of_ids_beyond_16_bits_are_those_of_the_shards(wide, wide_shards):
    tok = load_tokenizer(wide)
    x, y = Data(wide_config(wide_shards, wide, tok.vocab_size + 8), tok.sha256).batch(0, 0, 0, 1)
    assert (x[:, 1:] == y[:, :-1]).all() and x.max() < tok.vocab_size


def test_show_names_a_tokenizer_in_a_folder_by_hash_and_size(
    wide, wide_shards, capsys: pytest.CaptureFixture[str]
):
    tok = load_tokenizer(wide)
    page = conftest.asked(capsys, main, "--show", wide_shards)
    assert f"folder (sha256 {tok.sha256[:9]}..., {tok.vocab_size:,} ids)" in page


def test_the_folder_of_a_tokenizer_may_move(wide, wide_shards):
    """The shards say which it is."""
    size = load_tokenizer(wide).vocab_size + 8
    identity = wide_config(wide_shards, wide, size).identity()
    assert wide_config(wide_shards, "/else/where", size).identity() == identity
    assert wide_config(wide_shards, "gpt2", 50257).identity() != identity


# ---------------------------------------------------------------------------- prompts and responses

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


UNIQUE = [pair for pair in dict.fromkeys(PAIRS) if pair[1].strip()]


@dataclass
class Chat:
    """Prompts and responses, prepared; and what they must have become, from PAIRS."""

    folder: Path
    name: str  # of the tokenizer
    ids: dict[str, np.ndarray]  # of each split, the marked ones those of prompts
    response_bytes: dict[str, list[int]]  # of each split's documents

    @property
    def tokenizer(self):
        return load_tokenizer(self.name)

    @property
    def config(self):
        words = f"data.mixture=chat:1 eval.tokens={10**6} data.tokenizer={self.name}"
        return config_of(self.folder, f"{words} model.vocab_size={self.tokenizer.vocab_size}")

    @property
    def data(self):
        return Data(self.config, self.tokenizer.sha256)

    def windows(self, split: str) -> list[tuple[list[int], list[int]]]:
        """Inputs and targets of every window."""
        raw = self.ids[split]
        ids, targets = (raw & ~MASK).tolist(), np.where(raw < MASK, raw, -100).tolist()
        starts = range(0, len(ids) - N_CTX, N_CTX)
        return [(ids[i : i + N_CTX], targets[i + 1 : i + N_CTX + 1]) for i in starts]


@pytest.fixture(scope="module", params=["byte", "gpt2", "folder"])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder, name = tmp_path_factory.mktemp("chat"), request.param
    if name == "folder":
        name = str(write_tokenizer(folder / "tokenizer"))
    rows = [{"id": i, "prompt": p, "response": r} for i, (p, r) in enumerate(PAIRS)]
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = local(
        file, out=folder / "data", name="chat", tokenizer=name, instruct="true", val_share=0.3
    )
    assert made == 0
    tok, documents, sizes = load_tokenizer(name), {"train": [], "val": []}, {"train": [], "val": []}
    for prompt, response in UNIQUE:
        context = np.array([*tok.prefix[1:], *tok.encode(prompt)], "<u4") | MASK
        split = split_of(f"{prompt}\0{response}".encode(), 3000)
        documents[split].append(np.concatenate([[tok.eot], context, tok.encode(response)]))
        sizes[split].append(len(response.encode()))
    ids = {split: np.concatenate(parts) for split, parts in documents.items()}
    return Chat(folder / "data", name, ids, sizes)


@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_of_prompts_are_marked_in_the_shards(chat: Chat, split: str):
    written = np.fromfile(chat.folder / f"chat/{split}_00000.bin", "<u4")
    assert written.tolist() == chat.ids[split].tolist()


def test_the_index_of_a_masked_source_counts_responses(chat: Chat):
    index = read_index(chat.folder / "chat")
    assert index.is_masked and index.dtype == "<u4"
    assert index.duplicates == {"chat": 1} and index.empty == 3
    for split, sizes in chat.response_bytes.items():
        described = index.splits[split]
        assert (described.text_bytes, described.documents) == (sum(sizes), len(sizes))


def test_prompts_are_context_and_responses_targets(chat: Chat):
    data, windows = chat.data, chat.windows("train")
    for step in range(6):
        targets = 0
        for micro, rank in itertools.product(range(2), range(2)):
            x, y = data.batch(step, micro, rank, 2)
            targets += int((y != -100).sum())
            assert all(window in windows for window in zip(x.tolist(), y.tolist(), strict=True))
        assert data.targets(step) == targets < 8 * N_CTX


def test_validation_counts_targets_alone(chat: Chat):
    val, windows = chat.data.val["chat"], chat.windows("val")
    x, y = val.batch(0, len(val))
    assert all(window in windows for window in zip(x.tolist(), y.tolist(), strict=True))
    assert val.targets.tolist() == (y != -100).sum(1).tolist()
    assert 0 in val.targets and val.tokens == val.targets.sum()
    targets = (chat.ids["val"] < MASK).sum()
    assert val.text_bytes == round(val.tokens * sum(chat.response_bytes["val"]) / targets)


def test_tasks_on_a_masked_source_read_prompts_and_responses(chat: Chat):
    config = chat.config
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.json").write_text(json.dumps(asdict(config)))
    (source,) = demo_questions._sources(str(config.run_dir))
    picked = demo_questions._pick(source, 999, "seed", lambda text: text)
    assert len(picked) == len(chat.response_bytes["val"])
    assert set(picked) <= {prompt + response for prompt, response in UNIQUE}


def test_show_says_what_is_learned_of_a_masked_source(
    chat: Chat, capsys: pytest.CaptureFixture[str]
):
    page = conftest.asked(capsys, main, "--show", chat.folder)
    assert "the responses and the ends of documents" in page


def test_a_mark_is_no_token_id(chat: Chat, tmp_path: Path):
    folder = shutil.copytree(chat.folder, tmp_path / "data")
    conftest.write_index(folder / "chat", is_masked=False)
    unmasked = replace(chat, folder=folder)
    with pytest.raises(UserError, match=r"holds the id \d{10}, "):
        read(unmasked.data, 6)


def test_validation_tokens_that_are_prompts_alone_are_refused(tmp_path: Path):
    only_prompts = {split: [np.full(101, MASK)] for split in ("train", "val")}
    conftest.write_shards(tmp_path / "prompts", only_prompts, **OURS, is_masked=True)
    sentence = refusal(tmp_path, "data.mixture=prompts:1")
    assert re.search(r"none of the 12 .* holds a response to learn", sentence)


def test_few_validation_windows_without_a_response_are_told_how_many_it_takes(tmp_path: Path):
    """Of twelve windows, of which eval.tokens=24 takes three, the last alone has responses."""
    val = np.full(101, MASK)
    val[-8:] = 97
    splits = {"train": [np.full(1001, 97, "<u4")], "val": [val]}
    conftest.write_shards(tmp_path / "prompts", splits, **OURS, is_masked=True)
    sentence = refusal(tmp_path, "data.mixture=prompts:1")
    needed = re.search(r"eval.tokens=24 selects 3 .* give eval.tokens=(\d+) or more", sentence)
    assert needed, sentence
    data = load(tmp_path, f"data.mixture=prompts:1 eval.tokens={needed[1]}")
    assert data.val["prompts"].tokens


def test_the_share_of_targets_is_of_windows_all_over_the_source(tmp_path: Path, monkeypatch):
    """The first half of the tokens are prompts, the second responses."""
    train = np.full(100 * N_CTX + 1, 97, "<u4")
    train[: 50 * N_CTX] |= MASK
    splits = {"train": [train], "val": [np.full(101, 97, "<u4")]}
    conftest.write_shards(tmp_path / "halves", splits, **OURS, is_masked=True)
    monkeypatch.setattr(runtime_data, "SAMPLED_SEQUENCES", 10)
    lines = load(tmp_path, "data.mixture=halves:1").describe()
    assert any("50.00% of its tokens are targets" in line for line in lines), lines


def test_training_tokens_that_are_prompts_alone_are_refused(tmp_path: Path):
    split = {"train": [np.full(1001, MASK)], "val": [np.full(1001, 97, "<u4")]}
    conftest.write_shards(tmp_path / "prompts", split, **OURS, is_masked=True)
    assert "prompts has no target in its 1001 training tokens" in refusal(
        tmp_path, "data.mixture=prompts:1"
    )
