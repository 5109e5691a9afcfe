"""prepare_data.py from text to shards: what lies in them, cut off, in any number of processes, with
wrong input; its speed."""

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
from hashlib import blake2b, sha256
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
from datatrove.executor import slurm

from bench import data as benchmark
from lib import progress
from lib.errors import UserError
from lib.files import read_bytes
from prepare import harvest, layout, pieces, text_reader, writing
from prepare.decontaminate import found_in, read_grams
from prepare_data import main
from runtime import shards
from runtime.tokenizer import load_tokenizer
from tests.conftest import ROOT, asked, process
from tests.helpers.faults import flip_bit
from tests.helpers.text_files import DOCUMENTS, PACK, some_documents, write, write_rows


def split_of(data: bytes, val_per_10k: int = 2000):
    """The split rule, told a second time."""
    return (
        "val"
        if int.from_bytes(blake2b(data, digest_size=8).digest(), "little") % 10_000 < val_per_10k
        else "train"
    )


def due(documents: list[str], tokenizer: str = "byte", val_per_10k: int = 2000, budget=math.inf):
    """The ids that must lie in each split: of each text the first copy, in order, up to the one
    that fills the budget."""
    tok, ids = load_tokenizer(tokenizer), {"train": [], "val": []}
    for text in dict.fromkeys(documents):
        if text.strip() and len(ids["train"]) < budget:
            ids[split_of(text.encode(), val_per_10k)] += [tok.eot, *tok.encode(text).tolist()]
    return ids


def found(folder: Path):
    return {
        split: (
            np.concatenate(
                [np.fromfile(path, "<u2") for path in sorted(folder.glob(f"{split}_*.bin"))]
            ).tolist()
        )
        for split in ("train", "val")
    }


def content(folder: Path):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def local(*files: object, out, **options: object):
    options = {
        "name": "mine",
        "tokenizer": "byte",
        "val_share": "0.2",
        "processes": 1,
        "out": out,
    } | options
    return main(["local", *map(str, files), *(f"{key}={value}" for key, value in options.items())])


# ------------------------------------------------------------------------------------------ shards


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_shards_hold_the_documents_in_order(tmp_path: Path, tokenizer: str):
    first_train = next(
        text
        for text in map(str, range(10**6))
        if split_of(text.encode(), 2001) != split_of(text.encode())
    )
    # with the least hash that the validation split does not take
    documents = [*DOCUMENTS, first_train]
    gram, evaluation = (
        "which of these thirteen words in a row may no document of the set ever hold",
        tmp_path / "eval.txt",
    )
    evaluation.write_text(gram)
    file = write(tmp_path / "a.jsonl", [*DOCUMENTS, f"so: {gram.upper()}!", first_train])
    assert (
        local(file, out=tmp_path, tokenizer=tokenizer, license="CC0-1.0", decontaminate=evaluation)
        == 0
    )
    index, tok, ids = (
        json.loads((tmp_path / "mine/index.json").read_text()),
        load_tokenizer(tokenizer),
        due(documents, tokenizer),
    )
    assert found(tmp_path / "mine") == ids
    for split in ids:
        chosen = [d for d in documents if split_of(d.encode()) == split]
        assert ids[split].count(tok.eot) == len(chosen), "text that spells <|endoftext|> stays text"
        data = (tmp_path / "mine" / f"{split}_00000.bin").read_bytes()
        shard = {
            "file": f"{split}_00000.bin",
            "tokens": len(ids[split]),
            "sha256": sha256(data).hexdigest(),
        }
        assert index["splits"][split] == {
            "documents": len(chosen),
            "text_bytes": sum(len(d.encode()) for d in chosen),
            "tokens": len(ids[split]),
            "shards": [shard],
        }
    hashes = sorted(
        int.from_bytes(blake2b(d.encode(), digest_size=8).digest(), "little") for d in documents
    )
    assert np.load(tmp_path / "mine/hashes.npy").tolist() == hashes
    wanted = {
        "format_version": 2,
        "dtype": "uint16",
        "source": "mine",
        "duplicates": {},
        "files": ["a.jsonl"],
        "skipped": [],
        "is_whole": True,
        "budget": None,
        "tokenizer": tokenizer,
        "tokenizer_sha256": tok.sha256,
        "license": "CC0-1.0",
        "vocab_size": tok.vocab_size,
        "dataset": "local: a.jsonl; column text",
        "empty": 0,
        "contaminated": 1,
        "decontaminated_against": [
            {"file": "eval.txt", "sha256": sha256(gram.encode()).hexdigest()}
        ],
    }
    assert wanted.items() <= index.items() and "% 10000 < 2000" in index["split_rule"]


def test_files_of_all_formats_and_packings_are_read(tmp_path: Path):
    files = [write(tmp_path / "a.parquet", DOCUMENTS[:10])]
    for i, (packing, pack) in enumerate(PACK.items()):
        files += [
            write(tmp_path / f"a.jsonl{packing}", DOCUMENTS[10 + i : 20 : 4]),
            tmp_path / f"a.txt{packing}",
        ]
        files[-1].write_bytes(pack(DOCUMENTS[20 + i].encode()))
    wanted = [
        *DOCUMENTS[:10],
        *(text for i in range(4) for text in [*DOCUMENTS[10 + i : 20 : 4], DOCUMENTS[20 + i]]),
    ]
    assert local(*files, out=tmp_path) == 0 and found(tmp_path / "mine") == due(wanted)
    twins = [
        write(tmp_path / side / "a.jsonl", DOCUMENTS[i::2])
        for i, side in enumerate(("one", "other"))
    ]
    assert local(*twins, out=tmp_path, name="twins", tokenizer="gpt2") == 0
    assert shards.read_index(tmp_path / "twins").files == [*map(str, twins)], (
        "of one name: their folders tell them apart"
    )


def test_odd_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Half characters, nulls, blank lines, byte order marks, bytes that are not UTF-8; a long .txt
    is cut at blank lines."""
    rows = b'\xef\xbb\xbf{"text": "a\\ud800b"}\n\n{"text": "\\ud83d\\ude42"}\n{"text": null}\n'
    rows += (
        b'{"text": " \\n"}\n{"text": "\xff"}\n'
        + write(tmp_path / "a.jsonl", DOCUMENTS).read_bytes()
    )
    (tmp_path / "a.jsonl").write_bytes(rows)
    assert local(tmp_path / "a.jsonl", out=tmp_path) == 0
    assert "copies 0, empty 2" in capsys.readouterr().out
    assert found(tmp_path / "mine") == due(["a\ufffdb", "🙂", "\ufffd", *DOCUMENTS])
    texts = pyarrow.array([b"good", b"caf\xe9", None, *map(str.encode, DOCUMENTS)]).view(
        pyarrow.string()
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "c.parquet", row_group_size=7
    )
    assert local(tmp_path / "c.parquet", out=tmp_path / "other") == 0
    assert found(tmp_path / "other/mine") == due(["good", "caf\ufffd", *DOCUMENTS])
    monkeypatch.setattr(text_reader, "TXT_CHARS", 100)
    paragraphs = [f"line {n}\n" * 20 + "\n" for n in range(20)]
    (tmp_path / "b.txt").write_bytes("".join(paragraphs).replace("\n", "\r\n").encode())
    assert local(tmp_path / "b.txt", out=tmp_path, name="cut") == 0
    assert found(tmp_path / "cut") == due(paragraphs)


def test_shards_are_cut_at_their_size_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path / "a.jsonl", DOCUMENTS)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    monkeypatch.setattr(writing, "BLOCK", 70)
    assert local(file, out=tmp_path / "cut") == 0
    assert found(tmp_path / "cut/mine") == due(DOCUMENTS)
    for split in shards.read_index(tmp_path / "cut/mine").splits.values():
        sizes = [shard.tokens for shard in split.shards]
        assert len(sizes) > 2 and set(sizes[:-1]) == {100} and 0 < sizes[-1] <= 100
    assert main(["--verify", str(tmp_path)]) == main(["verify", str(tmp_path / "cut/mine")]) == 0
    assert capsys.readouterr().out.count("OK  ") == 2
    shard = tmp_path / "cut/mine/val_00001.bin"
    flip_bit(shard, 100)
    assert (
        main(["--verify", str(tmp_path / "cut")]) == 2
        and f"{shard} is damaged" in capsys.readouterr().err
    )
    assert "there is no" in asked(capsys, main, "--verify", tmp_path / "nowhere", code=2)


def test_copies_are_dropped_within_and_across_files_and_sources_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layout, "SORTED_AT_ONCE", 9)  # the hashes are taken in ranges
    texts = {
        "one": [*DOCUMENTS[:25], "", *DOCUMENTS[:3]],
        "two": DOCUMENTS[20:],
        "three": DOCUMENTS[:5] + some_documents(20, 7),
    }
    for name, documents in texts.items():
        halves = [
            write(tmp_path / name / f"{i}.jsonl", documents[i * 15 : (i + 1) * 15])
            for i in range(2)
        ]
        assert (
            local(*halves, out=tmp_path / "data", name=name, processes=2 if name == "two" else 1)
            == 0
        )
    duplicates = {name: shards.read_index(tmp_path / "data" / name).duplicates for name in texts}
    assert duplicates == {"one": {"one": 3}, "two": {"one": 5}, "three": {"one": 5}}
    assert found(tmp_path / "data/one") == due(texts["one"]) and found(
        tmp_path / "data/two"
    ) == due(DOCUMENTS[25:])
    assert (
        local(write(tmp_path / "b.jsonl", DOCUMENTS[:9]), out=tmp_path / "data", name="four") == 2
    )
    assert "left out are copies 9" in capsys.readouterr().err
    assert local(tmp_path / "b.jsonl", out=tmp_path / "data", name="five", tokenizer="gpt2") == 0, (
        "other ids are no copies"
    )
    flip_bit(tmp_path / "data/one/hashes.npy", 150)
    assert local(tmp_path / "b.jsonl", out=tmp_path / "data", name="six") == 2
    assert "one/hashes.npy is not what was written" in capsys.readouterr().err
    (tmp_path / "data/five/val_00000.bin").write_bytes(b"")
    assert main(["--show", str(tmp_path / "data")]) == 0
    said, split = (
        re.sub(" +", " ", capsys.readouterr().out),
        shards.read_index(tmp_path / "data/two").splits["train"],
    )
    assert f"\n| two | train | {split.documents} | {split.tokens:,} |" in said
    assert (
        "\nfive: damaged" in said
        and "\ntwo: dropped: copies 5 (first met in one 5), empty 0" in said
    )


def test_a_budget_counts_training_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    files = [
        write(tmp_path / f"{i}.jsonl", DOCUMENTS[i * 10 : i * 10 + 10] + DOCUMENTS[:2] * 20)
        for i in range(4)
    ]
    for budget in 300, 2000, 5000:
        out = tmp_path / str(budget)
        assert local(*files, out=out, tokens=budget) == 0 and found(out / "mine") == due(
            DOCUMENTS, budget=budget
        )
        index = shards.read_index(out / "mine")
        assert (index.is_whole, index.budget) == (False, budget) and (
            budget > 300 or index.files == ["0.jsonl"]
        )
    capsys.readouterr()
    # it holds as many
    assert local(*files, out=out, tokens=900) == 0 and "is complete" in capsys.readouterr().out
    assert local(*files, out=out, tokens=9000) == 2
    assert "training tokens, fewer than are asked for" in capsys.readouterr().err
    files[0].write_bytes(files[0].read_bytes() + b"no json")
    assert local(*files, out=tmp_path / "early", tokens=300) == 0, (
        "nothing is read behind what fills the budget"
    )
    write(files[0], DOCUMENTS[:10])
    assert local(*files, out=tmp_path / "all", tokens=9e9) == 0
    assert (
        "training tokens are all there are, 9,000,000,000 were asked for" in capsys.readouterr().err
    )
    write(files[0], [DOCUMENTS[0]] * 200 + DOCUMENTS)
    write_json, ends = pieces.write_json, []

    def stop_before_the_second_end(path: Path, value):
        ends.extend(["an end"] * bool(value.get("end")))
        if len(ends) == 2:
            raise KeyboardInterrupt
        write_json(path, value)

    with monkeypatch.context() as patched:
        patched.setattr(pieces, "write_json", stop_before_the_second_end)
        assert local(files[0], out=tmp_path / "anew", tokens=2000) == 130
    assert local(files[0], out=tmp_path / "anew", tokens=2000) == 0
    assert found(tmp_path / "anew/mine") == due(DOCUMENTS, budget=2000), (
        "copies filled the budget at first"
    )


def test_demo_writes_four_sources_and_stays_when_the_installation_ages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    texts = {source: some_documents(300, len(source)) for source in harvest.LICENSES}
    monkeypatch.setattr(harvest, "documents", lambda source: iter(texts[source]))
    monkeypatch.setattr(harvest, "revision", lambda source: "CPython 3.11")
    assert main(["demo", f"--out={tmp_path / 'demo'}"]) == 0
    for source, seen in ("python", []), ("prose", texts["c"]):
        assert found(tmp_path / "demo" / source) == due(
            [t for t in texts[source] if t not in seen], val_per_10k=400
        )
    before = content(tmp_path)
    monkeypatch.setattr(harvest, "revision", lambda source: "CPython 3.12")
    capsys.readouterr()
    assert main(["demo", f"out={tmp_path / 'demo'}"]) == 0
    assert (
        "c: from installed @ CPython 3.11" in capsys.readouterr().out
        and content(tmp_path) == before
    )


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


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory):
    """Three files with copies among them; what one process makes of them; the command."""
    base = tmp_path_factory.mktemp("big")
    texts = [some_documents(900, seed) for seed in range(3)]
    files = [
        write(base / "a.jsonl", texts[0] + texts[2][:50]),
        write(base / "b.jsonl.gz", texts[1] + texts[0][:100]),
        write(base / "c.parquet", texts[2]),
    ]
    (base / "small.py").write_text(CHILD)

    def command(out, processes: int = 1, *more: object):
        return [
            base / "small.py",
            "local",
            *files,
            "name=mine",
            "tokenizer=byte",
            "val_share=0.1",
            f"out={out}",
            f"processes={processes}",
            *more,
        ]

    finish(command(base / "calm"))
    calm = content(base / "calm")
    assert {"mine/train_00002.bin", "mine/val_00000.bin"} <= calm.keys() and not any(
        "parts" in name for name in calm
    )
    assert found(base / "calm/mine") == due(
        texts[0] + texts[2][:50] + texts[1] + texts[2], val_per_10k=1000
    )
    return SimpleNamespace(command=command, calm=calm, files=files)


def finish(command, cwd=ROOT, **environment: object):
    done = process(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr


def start(command, **more: object):
    """In a group of its own: a kill reaches its processes through their parent's end alone."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def storm(big, out, kills, seed: int):
    """kill -9 at random moments until `kills` have struck; then to the end."""
    rng, killed = random.Random(seed), 0
    while killed < kills:
        run = start(big.command(out, rng.choice((1, 1, 2, 3))))
        while run.poll() is None and not (out / "mine/parts/begun.json").exists():
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.5))
        run.kill()
        run.communicate()
        killed += run.returncode == -signal.SIGKILL
        if (out / "mine/index.json").exists():  # it was killed behind its work, or too late
            shutil.rmtree(out / "mine")
    finish(big.command(out, 2))
    assert content(out) == big.calm


def test_kills_at_random_moments_change_nothing(big, tmp_path: Path):
    storm(big, tmp_path, 6, 1)


@pytest.mark.parametrize("kind", ["kill", "full"])
def test_a_kill_or_a_full_disk_at_a_change_on_disk(big, tmp_path: Path, kind: str):
    """At moments among the pieces and the shards; a full disk is a sentence, and the same command
    goes on."""
    for at in 30, 25, 20, 45:
        done = process(*big.command(tmp_path / "out"), FAULT=f"{at} {kind} {tmp_path / 'out'}")
        assert done.returncode == (-signal.SIGKILL if kind == "kill" else 1), done.stderr
        assert kind == "kill" or (
            "No space left" in done.stderr and "the same command goes on" in done.stderr
        )
        assert "Traceback" not in done.stderr
    assert (tmp_path / "out/mine/train_00001.bin").exists() and not (
        tmp_path / "out/mine/index.json"
    ).exists()
    finish(big.command(tmp_path / "out"))
    assert content(tmp_path / "out") == big.calm


def test_a_killed_process_is_a_sentence_and_none_outlives_its_parent(big, tmp_path: Path):
    for victim in True, False:
        out = tmp_path / str(victim)
        run = start(big.command(out, 2), SLOW="1")
        children = []
        # both workers are at work
        while run.poll() is None and len(list(out.glob("mine/parts/0*.json"))) < 2:
            time.sleep(0.01)
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        workers = [
            int(pid)
            for pid in children
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(workers[0] if victim else run.pid, signal.SIGKILL)
        assert run.wait(60) == (1 if victim else -signal.SIGKILL)
        end = time.monotonic() + 10
        while any(read_bytes(f"/proc/{pid}/cmdline") for pid in workers):  # of a zombie it is empty
            assert time.monotonic() < end
            time.sleep(0.02)
        said = run.communicate()[1]
        assert (
            not victim
            or "killed, mostly for want of memory" in said
            and "the same command goes on" in said
        )
    finish(big.command(out, 2))
    assert content(out) == big.calm


def test_two_commands_on_one_source_do_not_mix_and_sigterm_is_a_pause(
    big, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = start(big.command(tmp_path), SLOW="1")
    # behind np.load, where NumPy makes a TypeError of an exit
    while not (tmp_path / "mine/parts/00000.json").exists():
        time.sleep(0.005)
    assert "another process prepares" in asked(capsys, main, *big.command(tmp_path)[1:], code=2)
    run.terminate()
    assert "interrupted: what was prepared stays" in run.communicate()[1] and run.returncode == 143
    finish(big.command(tmp_path, 5))
    assert content(tmp_path) == big.calm


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
def test_a_damaged_file_is_listed_retried_and_skipped_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: str
):
    bad, others = f"b.jsonl{packing}", (DOCUMENTS, some_documents(40, 6))
    files = [
        write(tmp_path / "a.jsonl", others[0]),
        write(tmp_path / bad, some_documents(500, 5)),
        write(tmp_path / "c.jsonl", others[1]),
    ]
    os.truncate(files[1], files[1].stat().st_size // 2)
    for processes in 1, 2 if packing == ".zst" else 1:
        assert local(*files, out=tmp_path / "out", processes=processes) == 1
        said = capsys.readouterr().err
        assert (
            "1 of 3 input files could not be read" in said
            and f"{bad} is damaged or was cut short" in said
        )
        assert "skip_bad=true" in said and not (tmp_path / "out/mine/index.json").exists()
    assert main(["--show", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "of 3 input files 2 are read" in said and f"failed: {bad}" in said
    assert local(*files, out=tmp_path / "out", skip_bad="true") == 0
    index = shards.read_index(tmp_path / "out/mine")
    assert [entry["file"] for entry in index.skipped] == [bad] and index.files == [
        "a.jsonl",
        "c.jsonl",
    ]
    assert found(tmp_path / "out/mine") == due([*others[0], *others[1]])


def test_a_skipped_file_does_not_end_a_source_below_its_budget(
    tmp_path: Path,
) -> None:
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
    assert found(tmp_path / "out/mine") == due(texts[0] + texts[1], budget=budget)


def test_what_was_begun_otherwise_is_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "b.jsonl").write_text("no json")
    files = [write(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "b.jsonl"]
    assert local(*files, out=tmp_path / "data") == 1
    two = write(tmp_path / "c.jsonl", DOCUMENTS + [""] * 9)
    two.write_bytes(two.read_bytes() + b"no json")
    assert local(files[1], two, out=tmp_path / "other") == 1
    assert local(files[0], out=tmp_path / "other") == 0, "nothing was made before"
    assert (
        local(files[0], out=tmp_path / "data") == 2 and "is of dataset=" in capsys.readouterr().err
    )
    write(files[1], DOCUMENTS[20:])
    (tmp_path / "data/mine/parts/00000.bin").write_bytes(b"")
    assert (
        local(*files, out=tmp_path / "data") == 1
        and "is shorter than what was written" in capsys.readouterr().err
    )
    # and b.jsonl, which failed, was fetched again: what stays of the others stays
    write(files[0], DOCUMENTS[:30])
    assert (
        local(*files, out=tmp_path / "data") == 0
        and "a.jsonl changed or could not be read" in capsys.readouterr().err
    )
    assert found(tmp_path / "data/mine") == due(DOCUMENTS)


def test_a_finished_folder_is_left_alone_and_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path / "a.jsonl", DOCUMENTS)
    assert local(file, out=tmp_path) == 0
    before = content(tmp_path)
    capsys.readouterr()
    assert local(file, out=tmp_path) == 0 and "mine is complete" in capsys.readouterr().out
    for key, value, sentence in (
        ("tokenizer", "gpt2", "is of tokenizer='byte', not 'gpt2'"),
        ("val_share", 0.3, "is finished with val_share=0.2, and"),
        ("column", "code", "column code"),
    ):
        assert (
            local(file, out=tmp_path, **{key: value}) == 2 and sentence in capsys.readouterr().err
        )
    assert content(tmp_path) == before
    write(file, DOCUMENTS[1:])
    assert local(file, out=tmp_path) == 2 and "is of revision=" in capsys.readouterr().err


def test_progress_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(progress, "LOG_S", 0.0)
    monkeypatch.setattr(pieces, "TELL_S", 0.0)
    assert local(write(tmp_path / "a.jsonl", some_documents(300)), out=tmp_path) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mine: ")]
    assert len(lines) > 50 and all(
        "documents" in line and "tokens" in line and "MB/s" in line for line in lines
    )
    assert any(line.startswith("mine: 50%") and "left" in line for line in lines)


def test_memory_does_not_grow_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1_000_000)
    monkeypatch.setattr(writing, "BLOCK", 1_000_000)
    rng = random.Random(0)
    file = write(tmp_path / "a.jsonl", [rng.randbytes(50_000).hex() for _ in range(200)])  # 20 MB
    tracemalloc.start()
    try:
        assert local(file, out=tmp_path) == 0
        assert tracemalloc.get_traced_memory()[1] < 6e6, (
            "a block of 1 MB, of a source of 20 MB, 40 on disk"
        )
    finally:
        tracemalloc.stop()


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


def test_slurm_submits_an_array_and_a_job_that_makes_the_shards(
    big: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """sbatch is a stub that runs each task of an array at once, by datatrove's own script and in
    another folder than ours."""
    commands = {
        "sbatch": SBATCH,
        "scontrol": "#!/bin/bash\necho node1\n",
        "srun": '#!/bin/bash\nshift 3\nexec "$@"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB", str(tmp_path / "stub"))
    monkeypatch.chdir(tmp_path)
    files = [os.path.relpath(file) for file in (big.files[0], big.files[2])]
    assert local(*files, out="calm", val_share=0.1) == 0
    command = [
        ROOT / "prepare_data.py",
        "local",
        *files,
        "name=mine",
        "tokenizer=byte",
        "val_share=0.1",
        "out=out",
        "on=slurm",
        "partition=cpu",
    ]
    options = list(map(str, command[1:]))
    with monkeypatch.context() as patched:  # puts back what a dry run changes in datatrove
        patched.setattr(slurm, "launch_slurm_job", slurm.launch_slurm_job)
        dry = asked(capsys, main, *options, "--dry-run")
    assert (
        "#SBATCH --array=0-1%100" in dry
        and "#SBATCH --partition=cpu" in dry
        and not list(tmp_path.glob("stub*"))
    )
    wrong = process(*command[:-1], "partition=cpux", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "sbatch refused" in wrong.stderr and "Traceback" not in wrong.stderr
    finish(command, tmp_path)
    said, (array, last) = (
        (tmp_path / "stub.log").read_text(),
        (tmp_path / "stub.arguments").read_text().splitlines(),
    )
    assert array.endswith("pieces: 2") and "--dependency=afterany:7" in last, said
    assert len([*tmp_path.glob("out/.slurm/*/pieces/executor.pik")]) == 3, (
        "what a job reads is no later command's"
    )
    made = {
        name: data
        for name, data in content(tmp_path / "out").items()
        if not name.startswith(".slurm")
    }
    assert made == content(tmp_path / "calm"), said
    assert main(options) == 0
    assert len((tmp_path / "stub.arguments").read_text().splitlines()) == 2, (
        "nothing is submitted where all is complete"
    )


# ---------------------------------------------------------- decontamination, against sets of words

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def grams_of(text: str) -> set[tuple[str, ...]]:
    """The 13-grams of a text, from the definition alone."""
    bare = [
        "".join(c for c in word if unicodedata.category(c)[0] not in "PS")
        for word in text.lower().split()
    ]
    words = [word for word in bare if word]
    return {tuple(words[i : i + 13]) for i in range(len(words) - 12)}


def compare(evaluation: list[str], documents: list[str], folder: Path) -> int:
    """How many of the documents are found, by us and by sets of words alike."""
    (_, grams), wanted = (
        read_grams([write(folder / "eval.jsonl", evaluation)]),
        set().union(*map(grams_of, evaluation)),
    )
    found = [found_in(grams, document) for document in documents]
    assert len(grams) == len(wanted) and found == [
        not wanted.isdisjoint(grams_of(document)) for document in documents
    ]
    return sum(found)


def test_what_is_found_is_what_sets_of_words_find(tmp_path: Path):
    """Few words, so that long matches, near misses and other cuts of the same letters all come by
    chance."""
    rng = random.Random(0)
    texts = [
        " ".join(rng.choice(["a", "a", "a", "a", "ab", "aa b"]) for _ in range(rng.randrange(40)))
        for _ in range(3000)
    ]
    assert 50 < compare(texts[:60], texts[60:], tmp_path) < 2500


def test_case_punctuation_and_white_space_of_any_script(tmp_path: Path):
    rng = random.Random(1)
    pieces = [
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
    texts = [
        "".join(rng.choice(pieces) + rng.choice(gaps) for _ in range(rng.randrange(45)))
        for _ in range(400)
    ]
    copies = [rng.choice(["", "so "]) + "!" + text.title().replace(" ", " \n") for text in texts]
    assert 40 < compare(texts[:100], texts[100:] + copies, tmp_path) < 450


TEXTS = [LONG, LONG.replace("one", "uno"), LONG.replace("two", "due")]
ROWS = [
    {"q": TEXTS[0], "choices": {"text": [TEXTS[1], "short"], "n": 3}},
    {"q": TEXTS[2], "choices": None},
]
LINES = "\n\n".join(map(json.dumps, ROWS))


@pytest.mark.parametrize(
    "name, content",
    [
        ("rows.jsonl", LINES),
        ("lines.json", LINES),
        ("bom.jsonl", f"\ufeff{LINES}\n"),
        ("list.json", json.dumps(ROWS)),
        ("nested.json", json.dumps({"data": {"rows": ROWS}})),
        ("all.txt", "\r\n".join(TEXTS)),
        ("rows.parquet", None),
    ],
)
def test_every_string_of_a_file_is_looked_for(
    tmp_path: Path, name: str, content: str | None, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / name
    path.write_text(content) if content else write_rows(path, ROWS)
    (tmp_path / "more.txt").write_text(LONG + " fourteen")
    files, grams = read_grams([str(path), str(tmp_path / "more.txt")])
    assert all(found_in(grams, text) for text in [*TEXTS, "so " + LONG[4:] + " fourteen"])
    assert not found_in(grams, LONG.replace("three", "tre"))
    assert files[0] == {"file": name, "sha256": sha256(path.read_bytes()).hexdigest()}
    if name != "all.txt":
        assert len(grams) == 4
        assert (
            f"{path}: 4 texts, 3 stretches of 13 words to look for; 1 texts are shorter"
            in capsys.readouterr().out
        )


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
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        read_grams([str(tmp_path / name)])
    assert name in str(caught.value) and "\n" not in str(caught.value)


# --------------------------------------------------------------------------------- the demo's text


@pytest.mark.parametrize("source", harvest.LICENSES)
def test_the_installation_has_every_source_in_a_fixed_order(source: str):
    first, again = (list(islice(harvest.documents(source), 30)) for _ in range(2))
    assert len(first) == 30 and first == again and all(isinstance(text, str) for text in first)
    assert harvest.revision(source).startswith("CPython 3.")
    if source in ("science", "prose"):
        assert all(len(text) >= 400 for text in first)


def test_harvesting_imports_no_package():
    code = (
        "import sys; from prepare import harvest\nnext(harvest.documents('science'))\n"
        "assert not {'scipy', 'sympy', 'sklearn', 'torch'} & set(sys.modules)"
    )
    assert process("-c", code).returncode == 0


def test_odd_files_are_read_or_left_out(tmp_path: Path):
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
    assert list(harvest.read_files(tmp_path, "*.py")) == ["x = 1\n", "y", "caf\ufffd"]
    assert sorted(harvest.read_files(tmp_path, "*.py", mixed=True)) == ["caf\ufffd", "x = 1\n", "y"]
    assert list(harvest.read_files(None, "*.py")) == []


def test_docstrings_come_from_the_syntax_tree(monkeypatch: pytest.MonkeyPatch):
    source = (
        '"""Module."""\nclass A:\n    """Class\n\n    more\n      indented."""\n'
        '    async def f(self):\n        "f"\n    def g(self): 1\n'
    )
    assert harvest.docstrings(source) == [], "all of them are short"
    monkeypatch.setattr(harvest, "DOCSTRING_CHARS", 0)
    assert harvest.docstrings(source) == ["Module.", "Class\n\nmore\n  indented.", "f"]
    for broken in ["def", "\0", "(" * 5000, "'\\d'", ""]:
        assert harvest.docstrings(broken) in ([], ["\\d"])


def test_a_rehearsal_of_the_benchmark_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert benchmark.main(["mb=1.5", "processes=2", "repeats=1", f"folder={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "nothing stays behind"
    texts = list(benchmark.some_text(1.5))
    assert len(set(texts)) == len(texts) and 0 <= sum(
        len(text.encode()) for text in texts
    ) - 1.5e6 < len(texts[-1].encode())
    raw, prepared, ratio = map(
        float,
        re.search(
            r"raw tiktoken ([\d.]+) MB/s in one, prepare_data.py ([\d.]+) MB/s, median ratio"
            r" ([\d.]+) of 2 x raw",
            said,
        ).groups(),
    )
    assert abs(ratio - prepared / raw / 2) < 0.02 + 0.06 / raw and re.search(
        r"loader: [1-9]\d*M tokens/s on one core", said
    )


def test_raw_is_tiktokens_own_encoding_of_each_document_once():
    encoded, encode = [], benchmark.tiktokens_own()
    benchmark.raw_seconds(lambda text, **how: encoded.append((text, how)), ["a", "b"])
    assert encoded == [("a", {"disallowed_special": ()}), ("b", {"disallowed_special": ()})]
    text = "Raw text, 1,234 numbers\n\n  and  spaces'll do."
    assert encode(text).tolist() == load_tokenizer("gpt2").encode(text).tolist()


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["local", "nowhere.txt", "name=mine"], "nowhere.txt is no file"),
        (["local", "name=mine"], "no file is named"),
        (["local", "../a.jsonl", "name=../up"], "name='../up' must be one folder name"),
        (["local", "x.txt", "nmae=mine"], "there is no key 'nmae'; did you mean 'name'"),
        (["demo", "tokenizer=gpt3"], "there is no tokenizer 'gpt3'; there are: gpt2, byte"),
        (["demo", "val_share=0.9"], "val_share=0.9 must be"),
        (["tokens=31e9"], "tokens=31e9 does not say what to prepare: name a source"),
        (["dmo"], "there is no command 'dmo'; did you mean 'demo'"),
        (["local", "../a.jsonl", "name=mine", "out=../a.jsonl"], "a.jsonl/mine: Not a directory"),
        (["fineweb_edu", "pyhton"], "there is no source 'pyhton'; did you mean 'python'"),
        (["local", "../a.jsonl", "name=mine", "on=slurm"], "needs partition="),
        (["hf:nobody", "tokens=1e6"], "must look like hf:OWNER/NAME"),
        (["fineweb_edu", "arxiv", "name=mine"], "name=mine can name one source, not 2"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
):
    write(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert expected in asked(capsys, main, *arguments, code=2)
    assert not list((tmp_path / "here").iterdir())
    assert main(["--help"]) == main([]) == 0 and "hash every shard again" in capsys.readouterr().out


PAIR_LINES = b'{"prompt": "a", "response": "b"}\n' * 40


@pytest.mark.parametrize(
    "name, data, expected",
    [
        ("a.csv", b"x", "must end in .txt, .jsonl, .parquet"),
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
        ("chat.jsonl", PAIR_LINES + b"no json", ":41 is no line of JSON"),
    ],
)
def test_a_file_that_cannot_serve_is_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    data: bytes | list[dict[str, Any]] | list[dict[str, int]],
    expected: str,
):
    """Also from a worker process."""
    is_chat, files = name == "chat.jsonl", [tmp_path / name, tmp_path / f"more_{name}"]
    for file in files:
        write_rows(file, data) if isinstance(data, list) else file.write_bytes(data)
    assert local(
        *files, out=tmp_path / "out", instruct=str(is_chat).lower(), processes=2 if is_chat else 1
    ) in (1, 2)
    said = capsys.readouterr().err
    assert expected in said and (name in said or "mine" in said) and "Traceback" not in said
    assert not list(tmp_path.rglob("index.json"))
