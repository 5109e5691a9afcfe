"""prepare_data.py from text to shards: what lies in them, cut off, in any number of processes, with
wrong input; its speed."""

import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import unicodedata
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from datatrove.executor import slurm

from bench import data as benchmark
from lib import progress
from lib.errors import UserError
from lib.files import write_json
from prepare import harvest, layout, pieces, text_reader, writing
from prepare.decontaminate import found_in, read_grams
from prepare_data import main
from runtime import shards
from runtime.tokenizer import Tokenizer, load_tokenizer
from tests.conftest import ROOT, asked, process
from tests.helpers.faults import children, command_line, flip_bit, wait_for
from tests.helpers.text_files import DOCUMENTS, PACK, some_documents, write, write_rows


def hash_of(data: bytes) -> int:
    """blake2b-64, written a second time."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def split_of(data: bytes, val_per_10k: int = 2000) -> str:
    """The split rule, written a second time."""
    return "val" if hash_of(data) % 10_000 < val_per_10k else "train"


def ids_of(
    documents: list[str],
    tokenizer: str = "byte",
    val_per_10k: int = 2000,
    budget: float = math.inf,
) -> dict[str, list[int]]:
    """The ids that must lie in each split: of each text the first copy, in order, up to the one
    that fills the budget."""
    tok = load_tokenizer(tokenizer)
    ids: dict[str, list[int]] = {"train": [], "val": []}
    for text in dict.fromkeys(documents):
        if text.strip() and len(ids["train"]) < budget:
            split = split_of(text.encode(), val_per_10k)
            ids[split] += [tok.eot, *tok.encode(text).tolist()]
    return ids


def ids_in(folder: Path) -> dict[str, list[int]]:
    """The ids that lie in the shards of each split."""
    ids = {}
    for split in ("train", "val"):
        paths = sorted(folder.glob(f"{split}_*.bin"))
        ids[split] = np.concatenate([np.fromfile(path, "<u2") for path in paths]).tolist()
    return ids


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of each file in a folder, by its relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def local(*files: object, out: Path | str, **options: object) -> int:
    """The exit code of `prepare_data.py local`: bytes as tokens, a fifth of the documents for
    validation."""
    options = {
        "name": "mine",
        "tokenizer": "byte",
        "val_share": "0.2",
        "processes": 1,
        "out": out,
    } | options
    words = [f"{key}={value}" for key, value in options.items()]
    return main(["local", *map(str, files), *words])


# ------------------------------------------------------------------------------------------ shards

BANNED = "which of these thirteen words in a row may no document of the set ever hold"


@dataclass
class Prepared:
    """A source made of one file, against an evaluation file that holds BANNED."""

    folder: Path
    documents: list[str]  # those that it must hold
    tokenizer_name: str
    tokenizer: Tokenizer
    index: dict[str, Any]

    def documents_of(self, split: str) -> list[str]:
        return [text for text in self.documents if split_of(text.encode()) == split]


def text_at_the_border_of_the_splits() -> str:
    """A text with the least hash that the validation split does not take."""
    texts = map(str, itertools.count())
    return next(text for text in texts if hash_of(text.encode()) % 10_000 == 2000)


@pytest.fixture(scope="module", params=["byte", "gpt2"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    base = tmp_path_factory.mktemp("prepared")
    evaluation = base / "eval.txt"
    evaluation.write_text(BANNED)
    border = text_at_the_border_of_the_splits()
    file = write(base / "a.jsonl", [*DOCUMENTS, f"so: {BANNED.upper()}!", border])
    tokenizer = request.param
    code = local(file, out=base, tokenizer=tokenizer, license="CC0-1.0", decontaminate=evaluation)
    assert code == 0
    return Prepared(
        folder=base / "mine",
        documents=[*DOCUMENTS, border],
        tokenizer_name=tokenizer,
        tokenizer=load_tokenizer(tokenizer),
        index=json.loads((base / "mine/index.json").read_text()),
    )


def test_shards_hold_the_documents_in_order(prepared: Prepared) -> None:
    assert ids_in(prepared.folder) == ids_of(prepared.documents, prepared.tokenizer_name)


@pytest.mark.parametrize("split", ["train", "val"])
def test_text_that_spells_end_of_text_stays_text(prepared: Prepared, split: str) -> None:
    ids = ids_in(prepared.folder)[split]
    assert ids.count(prepared.tokenizer.eot) == len(prepared.documents_of(split))


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_index_describes_each_split_and_its_shards(prepared: Prepared, split: str) -> None:
    documents = prepared.documents_of(split)
    tokens = len(ids_of(prepared.documents, prepared.tokenizer_name)[split])
    name = f"{split}_00000.bin"
    digest = sha256((prepared.folder / name).read_bytes()).hexdigest()
    assert prepared.index["splits"][split] == {
        "documents": len(documents),
        "text_bytes": sum(len(text.encode()) for text in documents),
        "tokens": tokens,
        "shards": [{"file": name, "tokens": tokens, "sha256": digest}],
    }


def test_the_hash_of_each_document_is_kept_in_ascending_order(prepared: Prepared) -> None:
    hashes = np.load(prepared.folder / "hashes.npy").tolist()
    assert hashes == sorted(hash_of(text.encode()) for text in prepared.documents)


def test_the_index_says_what_the_source_was_made_of(prepared: Prepared) -> None:
    expected = {
        "format_version": 2,
        "dtype": "uint16",
        "source": "mine",
        "duplicates": {},
        "files": ["a.jsonl"],
        "skipped": [],
        "is_whole": True,
        "budget": None,
        "tokenizer": prepared.tokenizer_name,
        "tokenizer_sha256": prepared.tokenizer.sha256,
        "license": "CC0-1.0",
        "vocab_size": prepared.tokenizer.vocab_size,
        "dataset": "local: a.jsonl; column text",
        "empty": 0,
        "contaminated": 1,
        "decontaminated_against": [
            {"file": "eval.txt", "sha256": sha256(BANNED.encode()).hexdigest()}
        ],
    }
    assert {key: prepared.index[key] for key in expected} == expected


def test_the_index_states_the_split_rule(prepared: Prepared) -> None:
    assert "% 10000 < 2000" in prepared.index["split_rule"]


def test_files_of_all_formats_and_packings_are_read(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.parquet", DOCUMENTS[:10])]
    expected = DOCUMENTS[:10]
    for i, (packing, pack) in enumerate(PACK.items()):
        lines = DOCUMENTS[10 + i : 20 : 4]
        text = DOCUMENTS[20 + i]
        text_file = tmp_path / f"a.txt{packing}"
        text_file.write_bytes(pack(text.encode()))
        files += [write(tmp_path / f"a.jsonl{packing}", lines), text_file]
        expected += [*lines, text]
    assert local(*files, out=tmp_path) == 0
    assert ids_in(tmp_path / "mine") == ids_of(expected)


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    twins = [
        write(tmp_path / "one/a.jsonl", DOCUMENTS[::2]),
        write(tmp_path / "other/a.jsonl", DOCUMENTS[1::2]),
    ]
    assert local(*twins, out=tmp_path, name="twins", tokenizer="gpt2") == 0
    assert shards.read_index(tmp_path / "twins").files == [str(file) for file in twins]


@pytest.fixture
def odd_lines(tmp_path: Path) -> Path:
    """Lines of JSON after a byte order mark: half a character, a blank line, an escaped pair, two
    documents that are empty, a byte that is not UTF-8; then DOCUMENTS."""
    odd = (
        b'\xef\xbb\xbf{"text": "a\\ud800b"}\n\n{"text": "\\ud83d\\ude42"}\n{"text": null}\n'
        b'{"text": " \\n"}\n{"text": "\xff"}\n'
    )
    file = write(tmp_path / "a.jsonl", DOCUMENTS)
    file.write_bytes(odd + file.read_bytes())
    return file


def test_what_is_no_character_in_a_line_of_json_is_replaced(
    odd_lines: Path, tmp_path: Path
) -> None:
    assert local(odd_lines, out=tmp_path) == 0
    assert ids_in(tmp_path / "mine") == ids_of(["a\ufffdb", "🙂", "\ufffd", *DOCUMENTS])


def test_null_and_white_space_count_as_empty_documents(
    odd_lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local(odd_lines, out=tmp_path) == 0
    assert "copies 0, empty 2" in capsys.readouterr().out


def test_bytes_of_parquet_that_are_not_utf8_are_replaced(tmp_path: Path) -> None:
    encoded = [b"good", b"caf\xe9", None, *map(str.encode, DOCUMENTS)]
    # a view, as pyarrow makes no string of such bytes
    texts = pyarrow.array(encoded).view(pyarrow.string())
    file = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=7)
    assert local(file, out=tmp_path / "other") == 0
    assert ids_in(tmp_path / "other/mine") == ids_of(["good", "caf\ufffd", *DOCUMENTS])


def test_a_long_text_file_is_cut_at_blank_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_reader, "TXT_CHARS", 100)
    paragraphs = [f"line {n}\n" * 20 + "\n" for n in range(20)]
    file = tmp_path / "b.txt"
    file.write_bytes("".join(paragraphs).replace("\n", "\r\n").encode())
    assert local(file, out=tmp_path, name="cut") == 0
    assert ids_in(tmp_path / "cut") == ids_of(paragraphs)


@pytest.fixture(scope="module")
def small_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose source cut/mine has shards of 100 tokens; shared, so no test may change it."""
    base = tmp_path_factory.mktemp("small_shards")
    file = write(base / "a.jsonl", DOCUMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", 100)
        patch.setattr(writing, "BLOCK", 70)
        assert local(file, out=base / "cut") == 0
    return base


def test_shards_go_on_with_one_another(small_shards: Path) -> None:
    assert ids_in(small_shards / "cut/mine") == ids_of(DOCUMENTS)


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_shard_but_the_last_is_full(small_shards: Path, split: str) -> None:
    index = shards.read_index(small_shards / "cut/mine")
    *full, last = [shard.tokens for shard in index.splits[split].shards]
    assert len(full) >= 2
    assert set(full) == {100}
    assert 0 < last <= 100


@pytest.mark.parametrize("command, folder", [("--verify", "."), ("verify", "cut/mine")])
def test_verify_reports_whole_shards(
    small_shards: Path, capsys: pytest.CaptureFixture[str], command: str, folder: str
) -> None:
    assert main([command, str(small_shards / folder)]) == 0
    assert capsys.readouterr().out.count("OK  ") == 1


@pytest.mark.parametrize("folder", [".", "demo"])
def test_verify_hashes_a_source_that_is_a_link(
    small_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """A source on another disk, beside one that is none."""
    data = tmp_path / "data"
    shutil.copytree(small_shards / "cut/mine", data / "here")
    (data / folder).mkdir(exist_ok=True)
    (data / folder / "linked").symlink_to(small_shards / "cut/mine")
    assert main(["--verify", str(data)]) == 0
    out = capsys.readouterr().out
    assert f"OK  {data / folder / 'linked'}" in out
    assert out.count("OK  ") == 2


def test_verify_names_a_damaged_shard(
    small_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(small_shards / "cut", tmp_path / "cut")
    shard = tmp_path / "cut/mine/val_00001.bin"
    flip_bit(shard, 100)
    assert main(["--verify", str(tmp_path / "cut")]) == 2
    assert f"{shard} is damaged" in capsys.readouterr().err


def test_verify_refuses_a_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no" in asked(capsys, main, "--verify", tmp_path / "nowhere", code=2)


# ------------------------------------------------------------------------------------------ copies

TEXTS_OF_SOURCES = {
    "one": [*DOCUMENTS[:25], "", *DOCUMENTS[:3]],
    "two": DOCUMENTS[20:],
    "three": DOCUMENTS[:5] + some_documents(20, 7),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the sources of TEXTS_OF_SOURCES, each of two files; shared, so no test may
    change it."""
    base = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SORTED_AT_ONCE", 9)  # the hashes are taken in ranges
        for name, documents in TEXTS_OF_SOURCES.items():
            halves = [
                write(base / name / "0.jsonl", documents[:15]),
                write(base / name / "1.jsonl", documents[15:]),
            ]
            processes = 2 if name == "two" else 1
            assert local(*halves, out=base / "data", name=name, processes=processes) == 0
    return base / "data"


@pytest.fixture
def own_sources(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `sources` that a test may change."""
    monkeypatch.setattr(layout, "SORTED_AT_ONCE", 9)
    return shutil.copytree(sources, tmp_path / "data")


@pytest.fixture
def copies_file(tmp_path: Path) -> Path:
    """A file whose documents all lie in source one."""
    return write(tmp_path / "b.jsonl", DOCUMENTS[:9])


def test_copies_are_counted_by_the_source_that_held_them_first(sources: Path) -> None:
    duplicates = {name: shards.read_index(sources / name).duplicates for name in TEXTS_OF_SOURCES}
    assert duplicates == {"one": {"one": 3}, "two": {"one": 5}, "three": {"one": 5}}


def test_copies_within_a_source_are_dropped(sources: Path) -> None:
    assert ids_in(sources / "one") == ids_of(TEXTS_OF_SOURCES["one"])


def test_copies_of_an_earlier_source_are_dropped(sources: Path) -> None:
    assert ids_in(sources / "two") == ids_of(DOCUMENTS[25:])


def test_a_source_of_copies_alone_is_refused(
    own_sources: Path, copies_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local(copies_file, out=own_sources, name="four") == 2
    error = capsys.readouterr().err
    assert "left out are copies 9 (first met in one 9)" in error
    assert "give more documents, or give another out=, which keeps copies of other sources" in error


def test_ids_of_another_tokenizer_are_no_copies(own_sources: Path, copies_file: Path) -> None:
    assert local(copies_file, out=own_sources, name="five", tokenizer="gpt2") == 0


def test_damaged_hashes_of_an_earlier_source_are_refused(
    own_sources: Path, copies_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(own_sources / "one/hashes.npy", 150)
    assert local(copies_file, out=own_sources, name="six") == 2
    assert "one/hashes.npy is not what was written" in capsys.readouterr().err


@pytest.fixture
def shown(own_sources: Path, copies_file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What --show prints, its blanks single, of `sources` and of source five, which has an empty
    shard."""
    assert local(copies_file, out=own_sources, name="five", tokenizer="gpt2") == 0
    (own_sources / "five/val_00000.bin").write_bytes(b"")
    capsys.readouterr()
    assert main(["--show", str(own_sources)]) == 0
    return re.sub(" +", " ", capsys.readouterr().out)


def test_show_counts_the_documents_and_tokens_of_a_split(shown: str, sources: Path) -> None:
    split = shards.read_index(sources / "two").splits["train"]
    assert f"\n| two | train | {split.documents} | {split.tokens:,} |" in shown


def test_show_tells_of_a_damaged_source(shown: str) -> None:
    assert "\nfive: damaged" in shown


def test_show_tells_what_was_dropped(shown: str) -> None:
    assert "\ntwo: dropped: copies 5 (first met in one 5), empty 0" in shown


def test_show_names_the_licence_as_such(shown: str) -> None:
    assert re.search("^two: from .*, licence: not stated$", shown, re.M)


def test_a_validation_split_of_few_documents_is_remarked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loss is that of one text: a pair's was once 1.5 % apart in the wrong direction."""
    file = write(tmp_path / "few.jsonl", DOCUMENTS[:40])
    assert local(file, out=tmp_path / "data", name="few", val_share=0.05) == 0
    validation = shards.read_index(tmp_path / "data/few").splits["val"].documents
    assert 0 < validation < 5
    assert f"few: validation is {validation} of 40 documents" in capsys.readouterr().out


def test_a_validation_split_of_many_documents_has_no_remark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "many.jsonl", DOCUMENTS[:40])
    assert local(file, out=tmp_path / "data", name="many", val_share=0.4) == 0
    assert shards.read_index(tmp_path / "data/many").splits["val"].documents >= 5
    assert "many: validation" not in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- a budget


def write_budget_files(folder: Path) -> list[Path]:
    """Four files of ten DOCUMENTS each; behind these, in each, copies of the first two."""
    return [
        write(folder / f"{i}.jsonl", DOCUMENTS[i * 10 : i * 10 + 10] + DOCUMENTS[:2] * 20)
        for i in range(4)
    ]


@pytest.fixture
def budget_files(tmp_path: Path) -> list[Path]:
    return write_budget_files(tmp_path)


@dataclass
class Budgeted:
    """The same files, prepared with several budgets of training tokens."""

    files: list[Path]
    out: dict[int, Path]  # by the budget


BUDGETS = (300, 2000, 5000)


@pytest.fixture(scope="module")
def budgeted(tmp_path_factory: pytest.TempPathFactory) -> Budgeted:
    """Shared, so no test may change it."""
    base = tmp_path_factory.mktemp("budgeted")
    files = write_budget_files(base)
    out = {budget: base / str(budget) for budget in BUDGETS}
    for budget, folder in out.items():
        assert local(*files, out=folder, tokens=budget) == 0
    return Budgeted(files, out)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_source_ends_with_the_document_that_fills_its_budget(
    budgeted: Budgeted, budget: int
) -> None:
    assert ids_in(budgeted.out[budget] / "mine") == ids_of(DOCUMENTS, budget=budget)


def test_no_document_follows_one_that_fills_the_budget_to_the_token(
    budgeted: Budgeted, tmp_path: Path
) -> None:
    budget = len(ids_of(DOCUMENTS, budget=2000)["train"])
    assert local(*budgeted.files, out=tmp_path, tokens=budget) == 0
    assert len(ids_in(tmp_path / "mine")["train"]) == budget


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_index_tells_of_the_budget(budgeted: Budgeted, budget: int) -> None:
    index = shards.read_index(budgeted.out[budget] / "mine")
    assert index.is_whole is False
    assert index.budget == budget


def test_the_index_leaves_out_files_behind_the_budget(budgeted: Budgeted) -> None:
    assert shards.read_index(budgeted.out[300] / "mine").files == ["0.jsonl"]


def test_a_source_that_holds_as_many_tokens_is_complete(
    budgeted: Budgeted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local(*budgeted.files, out=budgeted.out[5000], tokens=900) == 0
    assert "is complete" in capsys.readouterr().out


@pytest.mark.parametrize("wanted", [{"tokens": 9000}, {}], ids=["9000", "all"])
def test_a_finished_source_with_fewer_tokens_is_refused(
    budgeted: Budgeted, capsys: pytest.CaptureFixture[str], wanted: dict[str, int]
) -> None:
    assert local(*budgeted.files, out=budgeted.out[5000], **wanted) == 2
    assert "training tokens, fewer than are asked for" in capsys.readouterr().err


def test_nothing_is_read_behind_what_fills_the_budget(
    budget_files: list[Path], tmp_path: Path
) -> None:
    budget_files[0].write_bytes(budget_files[0].read_bytes() + b"no json")
    assert local(*budget_files, out=tmp_path / "early", tokens=300) == 0


def test_a_budget_that_all_files_do_not_fill_is_told(
    budget_files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(budget_files[0], DOCUMENTS[:10])
    assert local(*budget_files, out=tmp_path / "all", tokens=9e9) == 0
    sentence = "training tokens are all there are, 9,000,000,000 were asked for"
    assert sentence in capsys.readouterr().err


def test_copies_that_filled_the_budget_at_first_are_made_up_for_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "0.jsonl", [DOCUMENTS[0]] * 200 + DOCUMENTS)
    ends = 0

    def stop_before_the_second_end(path: Path, value: dict[str, Any]) -> None:
        nonlocal ends
        if value.get("end"):
            ends += 1
        if ends == 2:
            raise KeyboardInterrupt
        write_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(pieces, "write_json", stop_before_the_second_end)
        assert local(file, out=tmp_path / "anew", tokens=2000) == 130
    assert local(file, out=tmp_path / "anew", tokens=2000) == 0
    assert ids_in(tmp_path / "anew/mine") == ids_of(DOCUMENTS, budget=2000)


# ---------------------------------------------------------------------------------------- the demo

TEXTS_OF_DEMO = {source: some_documents(300, len(source)) for source in harvest.LICENSES}


def install(patch: pytest.MonkeyPatch, revision: str) -> None:
    """Let the demo's text be TEXTS_OF_DEMO, of an installation of this revision."""
    patch.setattr(harvest, "documents", lambda source: iter(TEXTS_OF_DEMO[source]))
    patch.setattr(harvest, "revision", lambda source: revision)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo, made from CPython 3.11."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        install(patch, "CPython 3.11")
        assert main(["demo", f"--out={out}"]) == 0
    return out


def test_the_demo_holds_the_text_of_the_installation(demo: Path) -> None:
    assert ids_in(demo / "python") == ids_of(TEXTS_OF_DEMO["python"], val_per_10k=400)


def test_the_demo_drops_copies_of_its_earlier_sources(demo: Path) -> None:
    copies = TEXTS_OF_DEMO["c"]
    prose = [text for text in TEXTS_OF_DEMO["prose"] if text not in copies]
    assert ids_in(demo / "prose") == ids_of(prose, val_per_10k=400)


def test_a_demo_stays_when_the_installation_ages(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(demo)
    install(monkeypatch, "CPython 3.12")
    assert main(["demo", f"out={demo}"]) == 0
    assert "c: from installed @ CPython 3.11" in capsys.readouterr().out
    assert content(demo) == before


# ------------------------------------------------------------------------ processes, kills, faults

CHILD = """
import errno, hashlib, os, signal, sys, time
import prepare_data
from prepare import encoding, pieces, pipeline, writing
from runtime import shards
from tests.helpers.changes import on_change
pieces.TELL_S, shards.SHARD_TOKENS, writing.BLOCK = 0.01, 20_000, 30_000
if "SLOW" in os.environ:
    encoding.blake2b = lambda *a, **k: time.sleep(0.02) or hashlib.blake2b(*a, **k)
if "FAULT" in os.environ:
    pieces.TELL_S = 1000      # the changes are those of every run
    at, kind, folder = os.environ["FAULT"].split()
    def fault(count, what):
        if count == int(at) and kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if count >= int(at) and kind == "full" and what.split()[0] in ("open", "fsync"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    on_change(lambda path: folder in path, fault)
if "ELSEWHERE" in os.environ:
    pipeline.run_here = lambda tasks, *_: sys.exit(9) if tasks else None
if __name__ == '__main__':
    sys.exit(prepare_data.main(sys.argv[1:]))
"""


@dataclass
class Big:
    """Three files with copies among them, and what one process makes of them undisturbed."""

    folder: Path
    files: list[Path]
    documents: list[str]  # in order, copies included
    calm: dict[str, bytes]  # content() of calm/

    def command(self, out: Path | str, processes: int = 1, *more: str) -> list[str | Path]:
        return [
            self.folder / "small.py",
            "local",
            *self.files,
            "name=mine",
            "tokenizer=byte",
            "val_share=0.1",
            f"out={out}",
            f"processes={processes}",
            *more,
        ]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Big:
    folder = tmp_path_factory.mktemp("big")
    first, second, third = (some_documents(900, seed) for seed in range(3))
    files = [
        write(folder / "a.jsonl", first + third[:50]),
        write(folder / "b.jsonl.gz", second + first[:100]),
        write(folder / "c.parquet", third),
    ]
    (folder / "small.py").write_text(CHILD)
    big = Big(folder, files, first + third[:50] + second + third, {})
    finish(big.command(folder / "calm"))
    big.calm = content(folder / "calm")
    return big


def finish(command: list[str | Path], cwd: Path = ROOT, **environment: str) -> None:
    """Run a command, which must succeed."""
    done = process(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr


def start(command: list[str | Path], **environment: str) -> subprocess.Popen[str]:
    """In a group of its own: a kill reaches its processes through their parent's end alone."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_an_undisturbed_command_makes_several_shards(big: Big) -> None:
    """As the faults below must strike between them."""
    assert {"mine/train_00002.bin", "mine/val_00000.bin"} <= big.calm.keys()


def test_an_undisturbed_command_leaves_no_parts(big: Big) -> None:
    assert [name for name in big.calm if "parts" in name] == []


def test_an_undisturbed_command_makes_shards_of_all_files(big: Big) -> None:
    assert ids_in(big.folder / "calm/mine") == ids_of(big.documents, val_per_10k=1000)


def storm(big: Big, out: Path, kills: int, seed: int) -> None:
    """kill -9 at random moments until `kills` have struck; then to the end."""
    rng = random.Random(seed)
    killed = 0
    while killed < kills:
        run = start(big.command(out, rng.choice((1, 1, 2, 3))))
        while run.poll() is None and not (out / "mine/parts/begun.json").exists():
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.5))
        run.kill()
        run.communicate()
        if run.returncode == -signal.SIGKILL:
            killed += 1
        if (out / "mine/index.json").exists():  # it was killed behind its work, or too late
            shutil.rmtree(out / "mine")
    finish(big.command(out, 2))
    assert content(out) == big.calm


def test_kills_at_random_moments_change_nothing(big: Big, tmp_path: Path) -> None:
    storm(big, tmp_path, 6, 1)


CHANGES = (30, 25, 20, 45)  # on disk, counted from 1: among the pieces and the shards


def run_with_fault(big: Big, out: Path, change: int, kind: str) -> subprocess.CompletedProcess[str]:
    """The command where a change on disk meets "kill" or a "full" disk."""
    return process(*big.command(out), FAULT=f"{change} {kind} {out}")


def check_goes_on(big: Big, out: Path) -> None:
    """The last fault has struck among the shards, and the same command ends as an undisturbed
    one."""
    assert (out / "mine/train_00001.bin").exists()
    assert not (out / "mine/index.json").exists()
    finish(big.command(out))
    assert content(out) == big.calm


def test_kills_at_changes_on_disk_change_nothing(big: Big, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for change in CHANGES:
        run = run_with_fault(big, out, change, "kill")
        assert run.returncode == -signal.SIGKILL, run.stderr
        assert "Traceback" not in run.stderr
    check_goes_on(big, out)


def test_a_full_disk_is_a_sentence_and_the_same_command_goes_on(big: Big, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for change in CHANGES:
        run = run_with_fault(big, out, change, "full")
        assert run.returncode == 1, run.stderr
        assert "No space left" in run.stderr
        assert "the same command goes on" in run.stderr
        assert "Traceback" not in run.stderr
    check_goes_on(big, out)


def start_with_workers(big: Big, out: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A slow command and the process ids of its two workers, both at work."""
    run = start(big.command(out, 2), SLOW="1")
    while run.poll() is None and len(list(out.glob("mine/parts/0*.json"))) < 2:
        time.sleep(0.01)
    workers = [pid for pid in children(run.pid) if b"spawn_main" in command_line(pid)]
    return run, workers


def wait_for_ends(pids: list[int]) -> None:
    wait_for(lambda: not any(map(command_line, pids)), seconds=10)


def test_a_killed_worker_is_a_sentence(big: Big, tmp_path: Path) -> None:
    run, workers = start_with_workers(big, tmp_path)
    os.kill(workers[0], signal.SIGKILL)
    assert run.wait(60) == 1
    wait_for_ends(workers)
    stderr = run.communicate()[1]
    assert "killed, mostly for want of memory" in stderr
    assert "the same command goes on" in stderr


def test_no_worker_outlives_its_parent(big: Big, tmp_path: Path) -> None:
    run, workers = start_with_workers(big, tmp_path)
    run.kill()
    assert run.wait(60) == -signal.SIGKILL
    wait_for_ends(workers)
    run.communicate()
    finish(big.command(tmp_path, 2))
    assert content(tmp_path) == big.calm


@dataclass
class Terminated:
    """A command that SIGTERM has ended, and a second one on its source before that."""

    out: Path
    exit_code: int
    stderr: str
    second: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def terminated(big: Big, tmp_path_factory: pytest.TempPathFactory) -> Terminated:
    out = tmp_path_factory.mktemp("terminated")
    run = start(big.command(out), SLOW="1")
    # behind np.load, where NumPy makes a TypeError of an exit
    wait_for((out / "mine/parts/00000.json").exists)
    second = process(*big.command(out))
    run.terminate()
    stderr = run.communicate()[1]
    return Terminated(out, run.returncode, stderr, second)


def test_a_second_command_on_one_source_is_refused(terminated: Terminated) -> None:
    second = terminated.second
    assert second.returncode == 2
    assert "another process prepares" in second.stderr
    assert "Traceback" not in second.stderr
    assert not second.stdout


def test_sigterm_is_told_as_a_pause(terminated: Terminated) -> None:
    assert terminated.exit_code == 143
    assert "interrupted: what was prepared stays" in terminated.stderr


def test_after_sigterm_another_number_of_processes_goes_on(
    big: Big, terminated: Terminated
) -> None:
    finish(big.command(terminated.out, 5))
    assert content(terminated.out) == big.calm


# --------------------------------------------------------------------------- what was begun before


@dataclass
class Damaged:
    """Three files of which the second is cut short, and what the first command on them said."""

    files: list[Path]
    name: str  # of the second
    documents: list[str]  # of the others
    stderr: str


@pytest.fixture(params=[".gz", ".xz", ".zst"])
def damaged(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Damaged:
    first, last = DOCUMENTS, some_documents(40, 6)
    name = f"b.jsonl{request.param}"
    files = [
        write(tmp_path / "a.jsonl", first),
        write(tmp_path / name, some_documents(500, 5)),
        write(tmp_path / "c.jsonl", last),
    ]
    os.truncate(files[1], files[1].stat().st_size // 2)
    assert local(*files, out=tmp_path / "out", processes=1) == 1
    return Damaged(files, name, [*first, *last], capsys.readouterr().err)


def check_is_listed(name: str, stderr: str) -> None:
    assert "1 of 3 input files could not be read" in stderr
    assert f"{name} is damaged or was cut short" in stderr
    assert "skip_bad=true" in stderr


def test_a_damaged_file_is_listed(damaged: Damaged, tmp_path: Path) -> None:
    check_is_listed(damaged.name, damaged.stderr)
    assert not (tmp_path / "out/mine/index.json").exists()


def test_a_damaged_file_is_tried_again(
    damaged: Damaged, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = 2 if damaged.name.endswith(".zst") else 1
    assert local(*damaged.files, out=tmp_path / "out", processes=processes) == 1
    check_is_listed(damaged.name, capsys.readouterr().err)
    assert not (tmp_path / "out/mine/index.json").exists()


def test_show_tells_of_a_damaged_file(
    damaged: Damaged, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--show", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "of 3 input files 2 are read" in shown
    assert f"failed: {damaged.name}" in shown


def test_a_damaged_file_is_skipped_on_request(damaged: Damaged, tmp_path: Path) -> None:
    assert local(*damaged.files, out=tmp_path / "out", skip_bad="true") == 0
    index = shards.read_index(tmp_path / "out/mine")
    assert [entry["file"] for entry in index.skipped] == [damaged.name]
    assert index.files == ["a.jsonl", "c.jsonl"]
    assert ids_in(tmp_path / "out/mine") == ids_of(damaged.documents)


def test_a_skipped_file_does_not_end_a_source_below_its_budget(tmp_path: Path) -> None:
    """The first pieces hold tokens enough, but half of them are copies: more files are read."""
    texts = [some_documents(60, seed) for seed in range(2)]
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"no gzip")
    files = [
        broken,
        write(tmp_path / "a.jsonl", texts[0] + texts[0]),
        write(tmp_path / "b.jsonl", texts[1]),
    ]
    budget = sum(len(text.encode()) for text in texts[0])
    assert local(*files, out=tmp_path / "out", skip_bad="true", tokens=budget) == 0
    assert ids_in(tmp_path / "out/mine") == ids_of(texts[0] + texts[1], budget=budget)


def test_a_damaged_file_behind_the_budget_is_not_called_skipped(tmp_path: Path) -> None:
    """It was read, since the first file's tokens were estimated as too few."""
    documents = some_documents(60)
    files = [write(tmp_path / "a.jsonl", documents), tmp_path / "b.jsonl.gz"]
    files[1].write_bytes(b"no gzip")
    budget = len(ids_of(documents)["train"]) - 9
    assert budget > 0.4 * files[0].stat().st_size
    assert local(*files, out=tmp_path / "out", tokens=budget, skip_bad="true") == 0
    assert shards.read_index(tmp_path / "out/mine").skipped == []


@pytest.fixture
def begun(tmp_path: Path) -> list[Path]:
    """Files a.jsonl, which has its piece in data/, and b.jsonl, which could not be read."""
    files = [write(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "b.jsonl"]
    files[1].write_text("no json")
    assert local(*files, out=tmp_path / "data") == 1
    return files


def test_other_files_are_refused_where_a_piece_was_made(
    begun: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local(begun[0], out=tmp_path / "data") == 2
    expected = "data/mine is of 2 files, the command names 1 (1 missing: b.jsonl): give the"
    assert expected in capsys.readouterr().err


def test_other_files_are_taken_where_no_piece_was_made(begun: list[Path], tmp_path: Path) -> None:
    broken = write(tmp_path / "c.jsonl", DOCUMENTS + [""] * 9)
    broken.write_bytes(broken.read_bytes() + b"no json")
    assert local(begun[1], broken, out=tmp_path / "other") == 1
    assert local(begun[0], out=tmp_path / "other") == 0


@pytest.fixture
def stderr_at_empty_piece(
    begun: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a command says that reads b.jsonl, mended by now, and finds the piece of a.jsonl
    empty."""
    write(begun[1], DOCUMENTS[20:])
    (tmp_path / "data/mine/parts/00000.bin").write_bytes(b"")
    capsys.readouterr()
    assert local(*begun, out=tmp_path / "data") == 1
    return capsys.readouterr().err


def test_a_piece_that_was_cut_short_is_not_taken(stderr_at_empty_piece: str) -> None:
    assert "is shorter than what was written" in stderr_at_empty_piece


@pytest.mark.usefixtures("stderr_at_empty_piece")
def test_a_file_that_has_changed_is_read_again(
    begun: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """b.jsonl, which failed at first, was read before: its piece stays."""
    write(begun[0], DOCUMENTS[:30])
    assert local(*begun, out=tmp_path / "data") == 0
    assert "a.jsonl changed or could not be read" in capsys.readouterr().err
    assert ids_in(tmp_path / "data/mine") == ids_of(DOCUMENTS)


@pytest.fixture
def finished_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The file that the finished source mine/ was made of."""
    file = write(tmp_path / "a.jsonl", DOCUMENTS)
    assert local(file, out=tmp_path) == 0
    capsys.readouterr()
    return file


def test_a_finished_folder_is_left_alone(
    finished_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(tmp_path)
    assert local(finished_file, out=tmp_path) == 0
    assert "mine is complete" in capsys.readouterr().out
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "key, value, sentence",
    [
        ("tokenizer", "gpt2", "is of tokenizer='byte', not 'gpt2'"),
        ("val_share", 0.3, "is finished with val_share=0.2, and"),
        ("column", "code", "column code"),
    ],
)
def test_a_finished_folder_is_not_overwritten_with_other_options(
    finished_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    key: str,
    value: object,
    sentence: str,
) -> None:
    before = content(tmp_path)
    assert local(finished_file, out=tmp_path, **{key: value}) == 2
    assert sentence in capsys.readouterr().err
    assert content(tmp_path) == before


def test_a_finished_folder_names_the_files_that_are_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a hundred files: their names alone would be a page."""
    files = [write(tmp_path / f"{i:03}.jsonl", some_documents(9, i)) for i in range(100)]
    assert local(*files[:99], out=tmp_path, processes=1) == 0
    capsys.readouterr()
    assert local(*files, out=tmp_path) == 2
    error = capsys.readouterr().err
    assert "is of 99 files, the command names 100 (1 new: 099.jsonl): give the same" in error
    assert "the new ones as a source of their own by another name=" in error
    assert len(error) < 400


def test_a_finished_folder_is_not_overwritten_with_other_text(
    finished_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(finished_file, DOCUMENTS[1:])
    assert local(finished_file, out=tmp_path) == 2
    assert "is of revision=" in capsys.readouterr().err


def test_progress_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_S", 0.0)
    monkeypatch.setattr(pieces, "TELL_S", 0.0)
    assert local(write(tmp_path / "a.jsonl", some_documents(300)), out=tmp_path) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mine: ")]
    assert len(lines) > 50
    for line in lines:
        assert "documents" in line
        assert "tokens" in line
        assert "MB/s" in line
    halfway = [line for line in lines if line.startswith("mine: 50%")]
    assert any("left" in line for line in halfway)


def test_memory_does_not_grow_with_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of 1 MB, of a source of 20 MB, which is 40 MB on disk."""
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1_000_000)
    monkeypatch.setattr(writing, "BLOCK", 1_000_000)
    rng = random.Random(0)
    file = write(tmp_path / "a.jsonl", [rng.randbytes(50_000).hex() for _ in range(200)])
    tracemalloc.start()
    try:
        assert local(file, out=tmp_path) == 0
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 6e6


# ------------------------------------------------------------------------------------------- slurm

SBATCH = """#!/bin/bash
for last; do :; done
grep -q partition=cpu$ "$last" || exit 1
cd /
array=$(sed -n 's/#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' $last)
for task in $(seq 0 $array); do
  SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=node1 bash $last >> $STUB.log 2>&1 || true
done
echo "$@" pieces: $(ls ${STUB%stub}out/mine/parts | grep -c docs) >> $STUB.arguments
echo "Submitted batch job 7"
"""


COMMANDS = {
    "sbatch": SBATCH,
    "scontrol": "#!/bin/bash\necho node1\n",
    "srun": '#!/bin/bash\nshift 3\nexec "$@"\n',
}


def enter_cluster(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Go to a folder where Slurm's commands are the stubs in bin/."""
    patch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    patch.setenv("STUB", str(folder / "stub"))
    patch.chdir(folder)


@dataclass
class Submitted:
    """What a dry run, a submission to a partition that does not exist and a right one left in one
    folder, in this order."""

    folder: Path
    arguments: list[str]  # of prepare_data.py
    dry_run_stdout: str
    dry_run_stderr: str
    files_after_dry_run: list[Path]  # of the stubs
    refused: subprocess.CompletedProcess[str]
    log: str  # of the tasks
    submissions: list[str]  # arguments of sbatch
    pickles: list[Path]  # what jobs read


@pytest.fixture(scope="module")
def submitted(big: Big, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """sbatch is a stub that runs each task of an array at once, by datatrove's own script and in
    another folder than ours."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "bin").mkdir()
    for name, text in COMMANDS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        enter_cluster(patch, folder)
        # puts back what a dry run changes in datatrove
        patch.setattr(slurm, "launch_slurm_job", slurm.launch_slurm_job)
        files = [os.path.relpath(file) for file in (big.files[0], big.files[2])]
        assert local(*files, out="calm", val_share=0.1) == 0
        options = ["name=mine", "tokenizer=byte", "val_share=0.1", "out=out", "on=slurm"]
        arguments = ["local", *files, *options, "partition=cpu"]
        with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
            assert main([*arguments, "--dry-run"]) == 0
        files_after_dry_run = list(folder.glob("stub*"))
        program = ROOT / "prepare_data.py"
        refused = process(program, *arguments[:-1], "partition=cpux", cwd=folder)
        finish([program, *arguments], folder)
    return Submitted(
        folder=folder,
        arguments=arguments,
        dry_run_stdout=stdout.getvalue(),
        dry_run_stderr=stderr.getvalue(),
        files_after_dry_run=files_after_dry_run,
        refused=refused,
        log=(folder / "stub.log").read_text(),
        submissions=(folder / "stub.arguments").read_text().splitlines(),
        pickles=list(folder.glob("out/.slurm/*/pieces/executor.pik")),
    )


def test_a_dry_run_prints_the_array(submitted: Submitted) -> None:
    assert "#SBATCH --array=0-1%100" in submitted.dry_run_stdout
    assert "#SBATCH --partition=cpu" in submitted.dry_run_stdout
    assert not submitted.dry_run_stderr


def test_a_dry_run_submits_nothing(submitted: Submitted) -> None:
    assert submitted.files_after_dry_run == []


def test_a_partition_that_sbatch_refuses_is_a_sentence(submitted: Submitted) -> None:
    assert submitted.refused.returncode == 2
    assert "sbatch refused" in submitted.refused.stderr
    assert "Traceback" not in submitted.refused.stderr


def test_slurm_gets_an_array_and_a_job_that_waits_for_it(submitted: Submitted) -> None:
    array, last_job = submitted.submissions
    assert array.endswith("pieces: 2"), submitted.log
    assert "--dependency=afterany:7" in last_job, submitted.log


def test_what_a_job_reads_is_not_overwritten_by_a_later_command(submitted: Submitted) -> None:
    assert len(submitted.pickles) == 3


def test_slurm_makes_the_same_shards(submitted: Submitted) -> None:
    files = content(submitted.folder / "out")
    of_source = {name: data for name, data in files.items() if not name.startswith(".slurm")}
    assert of_source == content(submitted.folder / "calm"), submitted.log


def test_nothing_is_submitted_where_all_is_complete(
    submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_cluster(monkeypatch, submitted.folder)
    assert main(submitted.arguments) == 0
    assert (submitted.folder / "stub.arguments").read_text().splitlines() == submitted.submissions


# ---------------------------------------------------------- decontamination, against sets of words

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def grams_of(text: str) -> set[tuple[str, ...]]:
    """The 13-grams of a text, from the definition alone."""
    words = []
    for word in text.lower().split():
        bare = "".join(c for c in word if unicodedata.category(c)[0] not in "PS")
        if bare:
            words.append(bare)
    return {tuple(words[i : i + 13]) for i in range(len(words) - 12)}


def compare(evaluation: list[str], documents: list[str], folder: Path) -> int:
    """How many of the documents hold 13 words of the evaluation texts; found_in() must say the same
    of each as sets of words do."""
    _, grams = read_grams([write(folder / "eval.jsonl", evaluation)])
    expected_grams = set().union(*map(grams_of, evaluation))
    assert len(grams) == len(expected_grams)
    contaminated = [found_in(grams, document) for document in documents]
    expected = [not expected_grams.isdisjoint(grams_of(document)) for document in documents]
    assert contaminated == expected
    return sum(contaminated)


def test_what_is_found_is_what_sets_of_words_find(tmp_path: Path) -> None:
    """Few words, so that long matches, near misses and other cuts of the same letters all come by
    chance."""
    rng = random.Random(0)
    words = ["a", "a", "a", "a", "ab", "aa b"]
    texts = []
    for _ in range(3000):
        length = rng.randrange(40)
        texts.append(" ".join(rng.choice(words) for _ in range(length)))
    assert 50 < compare(texts[:60], texts[60:], tmp_path) < 2500


def test_case_punctuation_and_white_space_of_any_script(tmp_path: Path) -> None:
    rng = random.Random(1)
    words = [
        "don't",
        "DON’T",
        "dont",
        "Straße",
        "STRASSE",
        "İstanbul",
        "ΣΊΣΥΦΟΣ",
        "σίσυφος",
        "日本",
        "𠀋",
        "𐐀",
        "𐐨",
        "x",
        "👍",
        "…",
        "$",
        "“quoted”",
        "\u0301",
        "\u200b",
        "1.5",
        "15",
        "ﬁ",
        "\x00",
    ]
    gaps = [" ", "\n", "\u00a0", "\u2003", "\x1f", "\t \r\n", " — ", "-", "\u3000", "\x85"]
    texts = []
    for _ in range(400):
        length = rng.randrange(45)
        texts.append("".join(rng.choice(words) + rng.choice(gaps) for _ in range(length)))
    copies = [rng.choice(["", "so "]) + "!" + text.title().replace(" ", " \n") for text in texts]
    assert 40 < compare(texts[:100], texts[100:] + copies, tmp_path) < 450


TEXTS = [LONG, LONG.replace("one", "uno"), LONG.replace("two", "due")]
ROWS = [
    {"q": TEXTS[0], "choices": {"text": [TEXTS[1], "short"], "n": 3}},
    {"q": TEXTS[2], "choices": None},
]
LINES = "\n\n".join(map(json.dumps, ROWS))
# name -> content; of parquet, which is no text, ROWS
FILES_OF_ROWS = {
    "rows.jsonl": LINES,
    "lines.json": LINES,
    "bom.jsonl": f"\ufeff{LINES}\n",
    "list.json": json.dumps(ROWS),
    "nested.json": json.dumps({"data": {"rows": ROWS}}),
    "rows.parquet": "",
}
EVALUATION_FILES = {**FILES_OF_ROWS, "all.txt": "\r\n".join(TEXTS)}


@dataclass
class Evaluation:
    """What read_grams() makes of a file with TEXTS and of one with one text more."""

    path: Path
    files: list[dict[str, str]]
    grams: np.ndarray
    stdout: str


@pytest.fixture(params=EVALUATION_FILES)
def evaluation(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Evaluation:
    path = tmp_path / request.param
    if path.suffix == ".parquet":
        write_rows(path, ROWS)
    else:
        path.write_text(EVALUATION_FILES[path.name])
    more = tmp_path / "more.txt"
    more.write_text(LONG + " fourteen")
    files, grams = read_grams([str(path), str(more)])
    return Evaluation(path, files, grams, capsys.readouterr().out)


def test_every_string_of_a_file_is_looked_for(evaluation: Evaluation) -> None:
    for text in [*TEXTS, "so " + LONG[4:] + " fourteen"]:
        assert found_in(evaluation.grams, text)


def test_a_text_that_differs_by_one_word_is_not_found(evaluation: Evaluation) -> None:
    assert not found_in(evaluation.grams, LONG.replace("three", "tre"))


def test_an_evaluation_file_is_known_by_its_name_and_hash(evaluation: Evaluation) -> None:
    path = evaluation.path
    digest = sha256(path.read_bytes()).hexdigest()
    assert evaluation.files[0] == {"file": path.name, "sha256": digest}


@pytest.mark.parametrize("evaluation", FILES_OF_ROWS, indirect=True)
def test_texts_and_grams_of_an_evaluation_file_are_counted(evaluation: Evaluation) -> None:
    counts = "4 texts, 3 stretches of 13 words to look for; 1 texts are shorter"
    assert len(evaluation.grams) == 4
    assert f"{evaluation.path}: {counts}" in evaluation.stdout


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("none.txt", None, "No such file"),
        ("a.csv", b"", "as .txt, .json, .jsonl"),
        ("a.txt", b"", "no text of 13 words"),
        ("a.txt", LONG[:-9].encode(), "no text of 13 words"),
        ("a.json", b'{"a": ', "cannot be read .*Expecting value"),
        ("a.jsonl", b'{"a": 1} {"b": 2}', "cannot be read .*Extra data"),
        ("a.json", b"[" * 200_000, "cannot be read"),
        ("a.parquet", b"PAR1 no", "cannot be read"),
    ],
)
def test_an_evaluation_file_that_cannot_serve_is_a_sentence(
    tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        read_grams([str(tmp_path / name)])
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------- the demo's text


@pytest.fixture(scope="module", params=harvest.LICENSES)
def harvested(request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    """A source's name and its first texts, as they are in this installation."""
    return request.param, list(islice(harvest.documents(request.param), 30))


def test_the_installation_has_every_source(harvested: tuple[str, list[str]]) -> None:
    _, texts = harvested
    assert len(texts) == 30
    assert {type(text) for text in texts} == {str}


def test_the_texts_of_a_source_come_in_a_fixed_order(harvested: tuple[str, list[str]]) -> None:
    source, texts = harvested
    assert list(islice(harvest.documents(source), 30)) == texts


@pytest.mark.parametrize("harvested", ["science", "prose"], indirect=True)
def test_short_texts_are_left_out(harvested: tuple[str, list[str]]) -> None:
    _, texts = harvested
    assert min(map(len, texts)) >= 400


@pytest.mark.parametrize("source", harvest.LICENSES)
def test_the_revision_of_a_source_is_the_version_of_python(source: str) -> None:
    assert harvest.revision(source).startswith("CPython 3.")


def test_harvesting_imports_no_package() -> None:
    code = (
        "import sys; from prepare import harvest\nnext(harvest.documents('science'))\n"
        "assert not {'scipy', 'sympy', 'sklearn', 'torch'} & set(sys.modules)"
    )
    assert process("-c", code).returncode == 0


@pytest.fixture
def odd_files(tmp_path: Path) -> Path:
    """A folder with Python files, some of which are tests, not UTF-8, folders or dead links."""
    files = {
        "b/z.py": b"caf\xe9",
        "a.py": b"x = 1\n",
        "test/t.py": b"no",
        "b/test_x.py": b"y",
        "c.txt": b"no",
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    return tmp_path


def test_odd_files_are_read_or_left_out(odd_files: Path) -> None:
    assert list(harvest.read_files(odd_files, "*.py")) == ["x = 1\n", "y", "caf\ufffd"]


def test_a_mixed_order_holds_the_same_files(odd_files: Path) -> None:
    texts = sorted(harvest.read_files(odd_files, "*.py", mixed=True))
    assert texts == ["caf\ufffd", "x = 1\n", "y"]


def test_no_folder_has_no_files() -> None:
    assert list(harvest.read_files(None, "*.py")) == []


SOURCE_CODE = (
    '"""Module."""\nclass A:\n    """Class\n\n    more\n      indented."""\n'
    '    async def f(self):\n        "f"\n    def g(self): 1\n'
)


def test_short_docstrings_are_left_out() -> None:
    assert harvest.docstrings(SOURCE_CODE) == []


def test_docstrings_come_from_the_syntax_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harvest, "DOCSTRING_CHARS", 0)
    assert harvest.docstrings(SOURCE_CODE) == ["Module.", "Class\n\nmore\n  indented.", "f"]


@pytest.mark.parametrize("broken", ["def", "\0", "(" * 5000, "'\\d'", ""], ids=repr)
def test_broken_source_code_has_no_docstrings(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(harvest, "DOCSTRING_CHARS", 0)
    assert harvest.docstrings(broken) in ([], ["\\d"])


# ----------------------------------------------------------------------------------- the benchmark


@dataclass
class Rehearsal:
    """A small run of the benchmark from end to end."""

    folder: Path
    stdout: str


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    folder = tmp_path_factory.mktemp("rehearsal")
    with redirect_stdout(io.StringIO()) as stdout:
        assert benchmark.main(["mb=1.5", "processes=2", "repeats=1", f"folder={folder}"]) == 0
    return Rehearsal(folder, stdout.getvalue())


def test_the_benchmark_leaves_nothing_behind(rehearsal: Rehearsal) -> None:
    assert list(rehearsal.folder.iterdir()) == []


def test_the_benchmarks_ratio_is_that_of_its_rates(rehearsal: Rehearsal) -> None:
    rates = re.search(
        r"raw tiktoken ([\d.]+) MB/s in one, prepare_data.py ([\d.]+) MB/s, median ratio"
        r" ([\d.]+) of 2 x raw",
        rehearsal.stdout,
    )
    assert rates
    raw, prepared, ratio = map(float, rates.groups())
    assert abs(ratio - prepared / raw / 2) < 0.02 + 0.06 / raw


def test_the_benchmark_measures_the_loader(rehearsal: Rehearsal) -> None:
    assert re.search(r"loader: [1-9]\d*M tokens/s on one core", rehearsal.stdout)


@pytest.fixture(scope="module")
def benchmark_texts() -> list[str]:
    return list(benchmark.some_text(1.5))


def test_no_text_of_the_benchmark_comes_twice(benchmark_texts: list[str]) -> None:
    assert len(set(benchmark_texts)) == len(benchmark_texts)


def test_the_benchmarks_texts_end_with_the_one_that_reaches_the_size(
    benchmark_texts: list[str],
) -> None:
    excess = sum(len(text.encode()) for text in benchmark_texts) - 1.5e6
    assert 0 <= excess < len(benchmark_texts[-1].encode())


def test_raw_encodes_each_document_once() -> None:
    calls = []

    def encode(text: str, **options: object) -> None:
        calls.append((text, options))

    benchmark.raw_seconds(encode, ["a", "b"])
    assert calls == [("a", {"disallowed_special": ()}), ("b", {"disallowed_special": ()})]


def test_tiktokens_own_encoding_is_gpt2s() -> None:
    encode = benchmark.tiktokens_own()
    text = "Raw text, 1,234 numbers\n\n  and  spaces'll do."
    assert encode(text).tolist() == load_tokenizer("gpt2").encode(text).tolist()


@pytest.mark.parametrize("option", ["mb=0", "repeats=0", "processes=2,0"])
def test_the_benchmark_refuses_a_number_below_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    assert asked(capsys, benchmark.main, f"folder={tmp_path}", option, code=2).endswith(
        "=0 must be 1 or more\n"
    )


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["local", "nowhere.txt", "name=mine"], "nowhere.txt is no file"),
        (["local", "name=mine"], "no file is named"),
        (["local", "../a.jsonl", "name=../up"], "name='../up' must be one folder name"),
        (["local", "x.txt", "nmae=mine"], "there is no key 'nmae'; did you mean 'name'"),
        (["demo", "tokenizer=gpt3"], "there is no tokenizer 'gpt3'; there are: gpt2, byte"),
        (["demo", "tokenizer=../a.jsonl"], "tokenizer='../a.jsonl' is a file: name the folder"),
        (["demo", "val_share=0.9"], "val_share=0.9 must be"),
        (["tokens=31e9"], "tokens=31e9 does not say what to prepare: name a source"),
        (["../a.jsonl"], "a file is prepared by `python prepare_data.py local ../a.jsonl name="),
        (["roneneldan/TinyStories"], "a data set of the Hub is written hf:roneneldan/TinyStories"),
        (["dmo"], "there is no command 'dmo'; did you mean 'demo'"),
        (
            ["local", "../a.jsonl", "name=mine", "out=../a.jsonl"],
            "a.jsonl/mine: Not a directory: give an out=",
        ),
        (["fineweb_edu", "pyhton"], "there is no source 'pyhton'; did you mean 'python'"),
        (["local", "../a.jsonl", "name=mine", "on=slurm"], "needs partition="),
        (
            ["local", "../a.jsonl", "name=mine", "instruct=true", "column=body"],
            "column=body is for plain text, and instruct=true reads prompt and response",
        ),
        (
            ["local", "../a.jsonl", "name=mine", "column=messages"],
            "column=messages holds conversations: prepare them by `local FILE... instruct=true`",
        ),
        (["hf:a/b", "column=messages"], "column=messages holds conversations"),
        (["hf:nobody", "tokens=1e6"], "must look like hf:OWNER/NAME"),
        (["fineweb_edu", "arxiv", "name=mine"], "name=mine can name one source, not 2"),
    ],
)
def test_a_wrong_command_line_is_a_sentence_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    write(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert expected in asked(capsys, main, *arguments, code=2)
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_column_that_is_not_there_leaves_no_folder(tmp_path: Path, processes: int) -> None:
    files = [write(tmp_path / f"{i}.jsonl", DOCUMENTS) for i in range(2)]
    out = tmp_path / "out"
    assert local(*files, out=out, column="body", processes=processes) == 2
    assert list(out.iterdir()) == []


def test_a_column_that_is_not_there_leaves_what_was_read(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "b.jsonl"]
    files[1].write_text('{"body": "x"}')
    assert local(*files, out=tmp_path / "out") == 2
    assert pieces.read_piece(tmp_path / "out/mine/parts/00000").end == "whole"


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_is_printed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 0
    assert "hash every shard again" in capsys.readouterr().out


PAIR_LINES = b'{"prompt": "a", "response": "b"}\n' * 40


@pytest.mark.parametrize(
    "name, data, expected",
    [
        ("a.csv", b"x", "must end in .txt, .jsonl, .parquet"),
        ("a.csv", b"x", "pandas.read_csv('a.csv', dtype=str, keep_default_na=False)"),
        ("a.tsv", b"x", "keep_default_na=False, sep='\\t').to_parquet('a.parquet')"),
        ("a.md", b"x", "give plain text a name in .txt"),
        ("A.TXT", b"x", "give plain text a name in .txt"),
        ("a.jsonl.bz2", b"x", "unpack it first"),
        ("train.bin", b"x", "docs/coming_from.md#token-files"),
        ("a.jsonl", b'{"body": "x"}', "only body: set column= to one of them"),
        ("a.jsonl", b'{"text": 3}', "'text' holds int, not text"),
        ("a.txt", b"\xff\xfea\x00", "is UTF-16: save it as UTF-8"),
        ("a.parquet", [{"text": 1}], "'text' holds int, not text"),
        ("a.txt", b" \n", "left out are copies 0, empty 2"),
        ("a.parquet", [{"id": 0, "body": "x"}], "only id, body: set column= to one"),
        ("a.txt", b"one", "no documents for val;"),
        (
            "chat.jsonl",
            PAIR_LINES + b'{"instruction": "a", "output": "b"}',
            ":41 has no column 'prompt', only instruction, output",
        ),
        (
            "chat.jsonl",
            PAIR_LINES + b'{"prompt": ["a"], "response": "b"}',
            ":41: column 'prompt' holds list, not text",
        ),
        (
            "chat.jsonl",
            b'[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]\n' * 2,
            'write a conversation as {"messages": [...]}',
        ),
        ("chat.jsonl", PAIR_LINES + b"no json", ":41 is no line of JSON"),
    ],
)
def test_a_file_that_cannot_serve_is_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    data: bytes | list[dict[str, Any]],
    expected: str,
) -> None:
    """Also from a worker process."""
    files = [tmp_path / name, tmp_path / f"more_{name}"]
    for file in files:
        if isinstance(data, bytes):
            file.write_bytes(data)
        else:
            write_rows(file, data)
    options = {"instruct": "true", "processes": 2} if name == "chat.jsonl" else {}
    assert local(*files, out=tmp_path / "out", **options) in (1, 2)
    stderr = capsys.readouterr().err
    assert expected in stderr
    assert name in stderr or "mine" in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.rglob("index.json")) == []
