"""Tests of prepare/parts.py, pieces.py and locks.py: what a killed run leaves, who takes which input file, whose a folder is."""

import errno
import fcntl
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import time
import tracemalloc
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import pytest

from prepare import pieces
from prepare.parts import Parts, begun
from prepare.source import DOCUMENT, Encoded
from runtime.cli import UserError

IDENTITY = {"tokenizer": "gpt2", "selection": {"column": "text"}, "share": [1, 2]}
FORK = multiprocessing.get_context("fork")      # quick; and no child inherits a lock


@dataclass(frozen=True)
class File:
    name: str
    bytes: int | None = None
    stamp: int = 0


def some_files(count):
    return [File(f"{i}.jsonl", 100 + i) for i in range(count)]


def some_rows(file, rows=40):
    """The tokens of each row of an input file; a third of the rows is left out (no tokens), as empty ones are."""
    rng = random.Random(file)
    return [[rng.randrange(65_536) for _ in range(rng.choice([0, 2, 9]))] for _ in range(rows)]


def encoded(rows, first, last):
    """A batch of the rows first .. last - 1."""
    documents = np.array([(first + i, len(ids), 3 * len(ids)) for i, ids in enumerate(rows[first:last])], DOCUMENT)
    return Encoded(np.array([i for ids in rows[first:last] for i in ids], np.uint16), documents, last, last / len(rows))


def write(parts, file, rows, step=3, upto=None, is_last=True):
    """Writes the rows from where the file's pieces end, as a run does."""
    writer = parts.writer(file)
    for first in range(writer.rows, upto or len(rows), step):
        writer.add(encoded(rows, first, min(first + step, upto or len(rows))))
    writer.close(is_last)


def work(parts, worker=1, workers=1, target=None, expected=None, step=3):
    """Takes files and writes them whole, as a worker does; their numbers."""
    taken = []
    while (file := parts.next_file(target, expected, worker, workers)) is not None:
        write(parts, file, some_rows(file), step)
        parts.release(file)
        taken.append(file)
        assert len(taken) < 100, "the same ones for ever"
    return taken


def content(found):
    """(ids, documents) that pieces hold, after a look at whether they are what they say."""
    ids, tables, ends = [np.zeros(0, "<u2")], [np.zeros(0, DOCUMENT)], {}
    for piece in found:
        ids.append(np.fromfile(f"{piece.stem}.bin", "<u2"))
        tables.append(np.load(f"{piece.stem}.npy"))
        assert piece.rows[0] == ends.get(piece.file, 0) and len(tables[-1]) == piece.documents == piece.rows[1] - piece.rows[0]
        assert len(ids[-1]) == piece.tokens == tables[-1]["tokens"].sum()
        ends[piece.file] = piece.rows[1]
    return np.concatenate(ids).tolist(), np.concatenate(tables).tolist()


def expected_content(files):
    rows = [row for file in files for row in some_rows(file)]
    numbers = [i for file in files for i in range(len(some_rows(file)))]
    return [i for row in rows for i in row], [(i, len(row), 3 * len(row)) for i, row in zip(numbers, rows, strict=True)]


@pytest.fixture
def make(tmp_path):
    """make(files) opens the folder anew, as the next process would."""
    def make(files=3, identity=IDENTITY):
        parts = Parts(make.folder, identity)
        parts.open(some_files(files) if isinstance(files, int) else files)
        return parts
    make.folder = tmp_path / "mine/parts"
    return make


@contextmanager
def process(function):
    """`function(say)` in another process, after its first word; it is killed at the end, if not before. Yields it."""
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=function, args=(theirs.send,))
    child.start()
    theirs.close()
    try:
        yield child, ours.recv()
    finally:
        child.kill()
        child.join()


# --------------------------------------------------------------------------------------------------------------- pieces

@pytest.mark.parametrize("piece_tokens, step", [(1, 1), (1, 7), (30, 3), (100, 40), (10**6, 5)])
def test_where_pieces_are_cut_changes_nothing(make, monkeypatch, piece_tokens, step):
    monkeypatch.setattr(pieces, "PIECE_TOKENS", piece_tokens)
    parts = make()
    assert work(parts, step=step) == [0, 1, 2]
    found = parts.prefix(False)
    assert content(found) == expected_content([0, 1, 2]) and parts.is_exhausted(False)
    assert [piece.file for piece in found if piece.is_last] == [0, 1, 2]
    if piece_tokens in (30, 10**6):
        assert len(found) >= 12 if piece_tokens == 30 else len(found) == 3
    assert parts.tokens() == len(content(found)[0])


def test_a_death_at_any_step_loses_the_piece_at_hand_alone(tmp_path, monkeypatch):
    """Death before each call that changes what is on disk, a restart, death again; against what no death would have given."""
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 60)

    class Death(BaseException):
        pass

    def dying(real):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise Death
            return real(*arguments, **options)
        return call

    left = 10**9
    for name in "replace", "fsync", "unlink":
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", dying(np.lib.format.write_array_header_1_0))
    deaths = 0
    for lifetime in (1, 2, 3, 5, 8, 13, 14, 15, 16):
        folder, steps, progress = tmp_path / str(lifetime), 0, -1
        while True:
            left, parts = lifetime + steps // 3, Parts(folder, IDENTITY)    # it must come through in the end
            try:
                parts.open(some_files(2))
                work(parts)
                break
            except Death:
                deaths, steps = deaths + 1, steps + 1
                there = Parts(folder, IDENTITY)
                there.files = some_files(2)
                ids, documents = content(there.prefix(False))
                assert (ids, documents) == tuple(whole[:len(part)] for whole, part in
                                                 zip(expected_content([0, 1]), (ids, documents), strict=True))
                assert len(documents) >= progress, "what was finished stays"
                progress = len(documents)
        assert content(parts.prefix(False)) == expected_content([0, 1])
        left = 10**9
        parts.remove()
        assert not folder.exists()
    assert deaths > 50


def test_a_killed_process_is_gone_on_with(make, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 60)
    make()

    def begin(say):
        parts, rows = make(), some_rows(0)
        writer = parts.writer(parts.next_file(None, None, 1, 1))
        for first in range(len(rows)):
            writer.add(encoded(rows, first, first + 1))
            if writer.rows > 20:
                say(writer.rows)
                signal.pause()

    with process(begin) as (child, rows):
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        parts = make()
        assert parts.next_file(None, None, 1, 1) == 0, "the kernel has dropped the lock"
        writer = parts.writer(0)
        assert writer.rows == rows
        assert writer.tokens == sum(map(len, some_rows(0)[:rows])) == parts.tokens()
        parts.release(0)
        work(parts, step=7)
    assert content(parts.prefix(False)) == expected_content([0, 1, 2])


def test_leftovers_go_when_the_file_is_written_again(make, monkeypatch, tmp_path):
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 30)
    parts, folder = make(), tmp_path / "mine/parts"
    work(parts)
    assert (folder / "00001_0003.json").exists()
    (folder / "00001_0001.json").unlink()                       # a gap: what follows may be cut elsewhere
    (folder / "00001_0002.bin.tmp").write_bytes(b"x" * 999)
    (folder / "00001_notes.txt").write_text("somebody's")
    parts = make()
    assert [piece.stem.name for piece in parts.prefix(False) if piece.file == 1] == ["00001_0000"]
    assert not parts.is_exhausted(False) and parts.next_file(None, None, 1, 1) == 1
    parts.writer(1)
    assert sorted(p.name for p in folder.glob("00001_*")) == [f"00001_0000.{s}" for s in ("bin", "json", "npy")] + [
        "00001_notes.txt"]
    write(parts, 1, some_rows(1))
    assert content(parts.prefix(False)) == expected_content([0, 1, 2])


def test_a_stop_in_mid_file_can_be_gone_on_with(make):
    parts, rows = make(1), some_rows(0)
    assert parts.next_file(None, None, 1, 1) == 0
    for upto in 7, 7, 8, 30:
        write(parts, 0, rows, upto=upto, is_last=False)
        assert parts.prefix(False)[-1].rows[1] == upto and not parts.prefix(False)[-1].is_last
    assert not parts.is_exhausted(False)
    write(parts, 0, rows)
    assert parts.is_exhausted(False) and content(parts.prefix(False)) == expected_content([0])
    assert len(parts.prefix(False)) == 4, "nothing new, no piece"


def test_a_file_without_documents_is_done(make):
    parts = make(1)
    parts.next_file(None, None, 1, 1)
    parts.writer(0).close(is_last=True)
    (piece,) = parts.prefix(False)
    assert (piece.rows, piece.documents, piece.tokens, piece.is_last) == ((0, 0), 0, 0, True)
    assert content([piece]) == ([], []) and parts.is_exhausted(False) and parts.next_file(9, 9, 1, 1) is None


def test_tokens_wait_on_disk_not_in_memory(make, tmp_path):
    parts = make(1)
    parts.next_file(None, None, 1, 1)
    writer, ids = parts.writer(0), np.arange(500_000, dtype=np.uint16)
    table = np.array([(1, 500_000, 5)], DOCUMENT)
    tracemalloc.start()
    for row in range(1, 31):
        writer.add(Encoded(ids, table, row, 0.0))
        assert parts.tokens() == writer.tokens == row * 500_000, "what is written is counted at once"
    assert tracemalloc.get_traced_memory()[1] < 500_000         # all of it: 30 MB
    tracemalloc.stop()
    writer.abandon()
    writer.abandon()
    assert parts.tokens() == 0 and parts.prefix(False) == []


@contextmanager
def disk_of(size):
    """No file may grow beyond `size` bytes: a write stops there, the next one fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_names_the_file_and_loses_nothing(make, monkeypatch):
    parts, rows, full = make(1), some_rows(0), 0
    parts.next_file(None, None, 1, 1)
    writer = parts.writer(0)
    with disk_of(100), pytest.raises(OSError):
        writer.add(encoded(rows, 0, len(rows)))         # of which the disk takes a part
    writer.abandon()
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 60)
    for size in 1, 50, 100, 200, 400, 800:
        writer = parts.writer(0)
        try:
            with disk_of(size):
                for first in range(writer.rows, len(rows), 3):
                    writer.add(encoded(rows, first, min(first + 3, len(rows))))
        except OSError as error:
            assert error.errno == errno.EFBIG and "mine/parts/00000_0" in str(error.filename)
            full += 1
        writer.abandon()
        assert not list(parts.folder.glob("*.tmp")), "what is dropped makes room"
    assert full >= 4
    write(parts, 0, rows)
    assert content(parts.prefix(False)) == expected_content([0])


def test_a_piece_outlives_a_power_cut(make, monkeypatch):
    """What can be said of it without one: its files are on disk before they are renamed, and the folder when all three are."""
    calls, replace, fsync = [], os.replace, os.fsync

    def record_fsync(descriptor):
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def record_replace(old, new):
        calls.append(("replace", os.path.basename(new)))
        replace(old, new)

    parts = make(1)
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    work(parts)
    files = [f"00000_0000.{suffix}" for suffix in ("bin", "npy", "json")]
    assert calls == [("fsync", f"{files[0]}.tmp"), ("fsync", f"{files[1]}.tmp"), ("replace", files[0]), ("replace", files[1]),
                     ("fsync", f"{files[2]}.tmp"), ("replace", files[2]), ("fsync", "parts")]


def test_a_damaged_piece_is_a_sentence(make):
    parts = make(1)
    work(parts)
    for damage in (b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, b'{"rows": 3}'):
        (parts.folder / "00000_0000.json").write_bytes(damage)
        with pytest.raises(UserError, match="00000_0000.json is damaged: delete .*parts and run the same command again"):
            make(1).prefix(False)


# ---------------------------------------------------------------------------------------------------- who takes which file

def done_with(parts, tokens_of):
    """Writes files of so many tokens; None: begun, nothing done. A negative number: begun, so many tokens so far."""
    for file, tokens in tokens_of.items():
        parts._held[file] = os.open(os.devnull, os.O_RDONLY)
        writer = parts.writer(file)
        writer.add(Encoded(np.zeros(abs(tokens), np.uint16), np.array([(1, abs(tokens), 1)], DOCUMENT), 1, 1.0))
        writer.close(is_last=tokens >= 0)
        parts.release(file)


@pytest.mark.parametrize("tokens_of, failed, target, expected, wanted", [
    ({}, [], None, None, [0, 1, 2, 3, 4]),
    ({}, [], 250, 100, [0, 1, 2]),                      # 100 + 100 < 250
    ({}, [], 300, 100, [0, 1, 2]),
    ({}, [], 301, 100, [0, 1, 2, 3]),
    ({}, [], 250, None, [0, 1, 2, 3, 4]),               # nobody knows: 0.4 a byte of 100, 101, .. bytes
    ({}, [], 81, None, [0, 1, 2]),                      # 40 + 40.4
    ({1: 5}, [], 46, None, [0, 2]),                     # the guess holds for those that are not done: 40 + 5
    ({0: 90}, [], 271, None, [1, 2, 3]),                # 90 + 90 + 90: what is counted counts where it is more
    ({0: 50}, [], 250, 100, [1, 2, 3, 4]),              # what is counted counts: 50 a file
    ({0: 500}, [], 250, 100, []),
    ({1: 200}, [], 250, 100, [0, 2, 3, 4][:1]),         # 200 expected of file 0, 200 there: enough
    ({1: 200}, [], 450, 100, [0, 2]),
    ({}, [0, 2], 150, 100, [1, 3]),                     # failed ones count nothing
    ({0: -80}, [0], 150, 100, [1, 2]),                  # whatever was read of them
    ({0: -30}, [], 100, 100, [0]),                      # begun: at least what is expected of it
    ({0: -100}, [], 100, 100, []),                      # stopped where the target was
    ({0: -130}, [], 200, 100, [0, 1]),
    ({0: 60, 1: -70}, [], 100, 100, []),                # 60 + 70
    ({0: 0}, [], 10, 100, [1, 2, 3, 4]),                # a file without documents promises nothing
])
def test_files_are_wanted_until_the_target_is_reached(make, tokens_of, failed, target, expected, wanted):
    parts = make(5)
    done_with(parts, tokens_of)
    for file in failed:
        parts.fail(file, "why")
    taken = []
    while (file := parts.next_file(target, expected, 1, 1)) is not None:    # held ones count as expected
        taken.append(file)
    assert taken == wanted


def test_before_counts_as_next_file_does(make):
    parts = make(5)
    done_with(parts, {0: 40, 1: -90, 3: 80})
    parts.fail(2, "why")
    assert parts.next_file(10**6, 1, 1, 1) == 1
    assert [parts.before(file) for file in range(5)] == [0, 40, 130, 130, 210]      # 60 expected of a file, 90 there
    assert parts.tokens() == 210 and parts.done() == [True, False, True, True, False]


def test_a_worker_takes_its_share_first_then_what_is_left(make):
    taken = []
    parts = make(7)
    while (file := parts.next_file(None, None, 2, 3)) is not None:
        taken.append(file)
    assert taken == [1, 4, 0, 2, 3, 5, 6]


def test_no_two_workers_take_one_file(make, tmp_path):
    """Five processes at once, whose lists of taken files are then laid side by side."""
    make(40)

    def worker(number):
        (tmp_path / f"{number}.json").write_text(json.dumps(work(make(40), number, 5)))

    processes = [FORK.Process(target=worker, args=(number,)) for number in range(1, 6)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
        assert one.exitcode == 0
    taken = {number: json.loads((tmp_path / f"{number}.json").read_text()) for number in range(1, 6)}
    assert sorted(file for files in taken.values() for file in files) == list(range(40))
    assert content(make(40).prefix(False)) == expected_content(range(40))


def test_a_held_file_is_left_alone_until_its_holder_dies(make):
    parts = make(3)

    def hold(say):
        theirs = make(3)
        say(theirs.next_file(None, None, 2, 3))
        signal.pause()

    with process(hold) as (child, file):
        assert file == 1 and parts.others() == ["1.jsonl"]
        assert work(parts, 1, 1) == [0, 2]
        assert parts.others() == ["1.jsonl"] and parts.next_file(None, None, 2, 3) is None
        assert [piece.file for piece in parts.prefix(False)] == [0] and not parts.is_exhausted(False)
        child.kill()
        child.join()
        assert parts.others() == [] and work(parts, 1, 3) == [1]
    assert parts.is_exhausted(False)


def test_looking_at_others_drops_no_lock_of_ones_own(make):
    parts = make(2)
    assert parts.next_file(None, None, 1, 1) == 0
    assert parts.others() == [] and parts.has_locks

    def look(say):
        theirs = make(2)
        say((theirs.others(), theirs.next_file(None, None, 1, 1)))

    with process(look) as (_, found):
        assert found == (["0.jsonl"], 1)


def test_a_file_that_is_finished_is_waited_for_no_longer(make):
    parts = make(2)

    def hold(say):
        theirs = make(2)
        write(theirs, theirs.next_file(None, None, 1, 1), some_rows(0))
        say("not let go yet")
        signal.pause()

    with process(hold):
        assert parts.others() == []


def test_who_only_looks_does_not_seem_to_hold(make):
    """others() in a loop beside next_file: a lock that is looked at is locked for a moment."""
    parts = make(1)

    def look(say):
        theirs = make(1)
        real = theirs._locks.take

        def take(*arguments, **options):
            descriptor = real(*arguments, **options)
            time.sleep(0.002)
            return descriptor

        theirs._locks.take = take
        say("looking")
        while True:
            theirs.others()

    with process(look):
        for _ in range(50):
            assert parts.next_file(None, None, 1, 1) == 0
            parts.release(0)


def test_a_file_finished_while_one_looks_is_not_taken(make, monkeypatch):
    """Its holder lets go between the look at the pieces and the lock."""
    parts, other = make(2), make(2)
    real = parts._locks.take

    def take(name, *arguments, **options):
        if name == "00000.lock" and not other.prefix(False):
            done_with(other, {0: 5})
        return real(name, *arguments, **options)

    monkeypatch.setattr(parts._locks, "take", take)
    assert parts.next_file(None, None, 1, 1) == 1
    assert list(parts._held) == [1]


# --------------------------------------------------------------------------------------------------------------- failures

def test_failed_files_end_the_prefix_or_are_left_out(make, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 60)
    parts = make(4)
    assert parts.next_file(None, None, 1, 1) == 0
    write(parts, 0, some_rows(0))
    parts.release(0)
    assert parts.next_file(None, None, 1, 1) == 1
    write(parts, 1, some_rows(1), upto=20, is_last=False)
    parts.fail(1, "cut short: \n\"naïve\"")
    parts.release(1)
    assert work(parts) == [2, 3], "a failed file is not tried again in this run"
    for one in parts, make(4):
        assert one.failures() == {"1.jsonl": "cut short: \n\"naïve\""}
        assert content(one.prefix(True)) == expected_content([0, 2, 3]) and one.is_exhausted(True)
        there = one.prefix(False)
        assert {piece.file for piece in there} == {0, 1} and there[-1].rows[1] == 20 and not one.is_exhausted(False)
    parts.forgive()
    assert parts.failures() == {} and work(parts) == [1]
    assert content(parts.prefix(False)) == expected_content([0, 1, 2, 3]) == content(parts.prefix(True))


# ------------------------------------------------------------------------------------------------------------ whose it is

def there(folder):
    """Name -> bytes of all that is not a lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


CHANGED = [File("0.jsonl", 100), File("1.jsonl", 101, stamp=3)]


def test_the_same_input_goes_on_and_another_one_is_refused(make, capsys):
    assert begun(make.folder) is None
    work(make(2))
    assert make(2).known() == [("0.jsonl", 100), ("1.jsonl", 101)] and make(2).is_exhausted(False)
    assert begun(make.folder) == json.loads(json.dumps(IDENTITY)) and Parts(make.folder, {}).known() is None
    before = there(make.folder)
    for change, files, identity in [
        ("tokenizer was 'gpt2', now 'byte'", 2, IDENTITY | {"tokenizer": "byte"}),
        ("tokenizer was 'gpt2', now None", 2, {key: IDENTITY[key] for key in ("selection", "share")}),
        ("revision was None, now 'abc'; other input files, 1.jsonl was among them", 1, IDENTITY | {"revision": "abc"}),
        ("tokenizer was 'gpt2', now 'byte'", CHANGED, IDENTITY | {"tokenizer": "byte"}),
        ("other input files, 1.jsonl was among them", 1, IDENTITY),
        ("other input files, 2.jsonl was not among them", 3, IDENTITY),
        ("other input files, or in another order", some_files(2)[::-1], IDENTITY),
    ]:
        with pytest.raises(UserError) as error:
            make(files, identity)
        assert str(error.value) == (f"{make.folder} was begun otherwise ({change}): give the same options again, "
                                    f"or delete {make.folder}")
        assert there(make.folder) == before
    assert make(2).is_exhausted(False) and capsys.readouterr().err == ""


def test_where_nothing_was_made_yet_nothing_is_in_the_way(make, capsys):
    """Such as after a first try with another column, which no file had."""
    parts = make(2, IDENTITY | {"selection": {"column": "txet"}})
    assert parts.next_file(None, None, 1, 1) == 0
    writer = parts.writer(0)
    writer.add(encoded(some_rows(0), 0, 3))         # killed in its first piece
    parts.fail(1, "why")
    parts.release(0)
    parts._presence = None
    other = make(2)
    assert begun(other.folder) == json.loads(json.dumps(IDENTITY)) and capsys.readouterr().err == ""
    assert there(other.folder).keys() == {"plan.json"} and work(other) == [0, 1]


@pytest.mark.parametrize("changed", [CHANGED[1], File("1.jsonl", 999), File("1.jsonl", None)])
def test_of_a_file_that_changed_its_own_pieces_are_removed(make, monkeypatch, capsys, changed):
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 60)
    parts = make(12)
    for file in 1, 2, 10, 11:
        done_with(parts, {file: 7})
        parts.fail(file, "why")
    for name in "00001_0001.bin.tmp", "notes.txt", "00001.txt", "100001_0000.json", "00001_0000.txt":
        (parts.folder / name).write_text("x")
    before = there(parts.folder)
    files = some_files(12)
    files[1] = changed
    other = make(files)
    assert capsys.readouterr().err == f"{other.folder}: what was made of it is removed: 1.jsonl has changed\n"
    gone = {f"00001_0000.{suffix}" for suffix in ("bin", "npy", "json")} | {"00001.failed", "00001_0001.bin.tmp"}
    after = there(other.folder)
    assert after.pop("plan.json") != before.pop("plan.json")
    assert after == {name: data for name, data in before.items() if name not in gone}
    assert [file for file, own in enumerate(other._pieces()) if own] == [2, 10, 11]
    assert make(files).failures().keys() == {"2.jsonl", "10.jsonl", "11.jsonl"} and capsys.readouterr().err == ""
    make([File(file.name, 5) for file in files[:3]] + files[3:])
    assert "0.jsonl and 2 other files have changed" in capsys.readouterr().err


def test_a_file_that_changed_stops_shards_in_the_making(make):
    parts = make(2)
    work(parts)
    (parts.folder / "layout.json").write_text("{}")
    before = there(parts.folder)
    with pytest.raises(UserError, match=r"\(1.jsonl has changed\): give the same files again, or delete .*parts$"):
        make(CHANGED)
    assert there(parts.folder) == before and make(2).is_exhausted(False)


def test_a_file_that_changed_while_somebody_works_is_refused(make):
    def hold(say):
        theirs = make(2)
        work(theirs)
        say("between two files")
        signal.pause()

    with process(hold) as (child, _):
        with pytest.raises(UserError, match=f"process {child.pid} .* works there on other input: 1.jsonl has changed; wait"):
            make(CHANGED)
        assert make(2).is_exhausted(False)


def test_another_identity_is_refused_while_somebody_works(make):
    """Also where that process is between two input files, with none locked."""
    def hold(say):
        theirs = make(2)
        say(work(theirs)[:1])
        signal.pause()

    with process(hold) as (child, _):
        with pytest.raises(UserError) as error:
            make(2, IDENTITY | {"tokenizer": "byte"})
        assert f"process {child.pid} on host {socket.gethostname()!r}" in str(error.value)
        assert "tokenizer was 'gpt2', now 'byte'" in str(error.value)
        assert make(2).is_exhausted(False)
        child.kill()
        child.join()
        trace = f"worker_*_{child.pid}.lock"
        assert list(make.folder.glob(trace))
        assert make(2).is_exhausted(False) and not list(make.folder.glob(trace)), "the trace of a dead process goes"
        with pytest.raises(UserError, match="was begun otherwise"):
            make(2, IDENTITY | {"tokenizer": "byte"})


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_death_while_pieces_are_removed_leaves_no_half_of_one(make, monkeypatch, is_changed):
    """Death at each file that goes, since an input file changed or the plan was lost; then the input file as it was."""
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 60)
    real, deaths = type(make.folder).unlink, 0
    while True:
        parts = make(1)
        work(parts)
        left = deaths
        if not is_changed:
            (parts.folder / "plan.json").write_text("lost")

        def unlink(path, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            real(path, **options)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(type(make.folder), "unlink", unlink)
            make([File("0.jsonl", 100, stamp=3)] if is_changed else 1)
            break
        deaths += 1
        parts = make(1)
        for piece in parts.prefix(False):
            assert piece.stem.with_suffix(".bin").exists() and piece.stem.with_suffix(".npy").exists()
        content(parts.prefix(False))
        work(parts)
        assert content(parts.prefix(False)) == expected_content([0])
        parts.remove()
    assert deaths > 8


@pytest.mark.parametrize("plan", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"identity": {}}',
                                  b'{"identity": 1, "files": []}', b'{"identity": {}, "files": [3]}',
                                  b'{"identity": {}, "files": [{"name": "x"}]}', None])
def test_pieces_without_a_plan_are_removed(make, capsys, plan):
    """A kill while a folder is being cleared: the plan goes first."""
    parts = make(2)
    work(parts)
    if plan is None:
        (parts.folder / "plan.json").unlink()
    else:
        (parts.folder / "plan.json").write_bytes(plan)
    assert Parts(parts.folder, IDENTITY).known() is None and begun(parts.folder) is None
    again = make(2)
    assert "what was made of it is removed: nothing says how" in capsys.readouterr().err
    assert again.prefix(False) == [] and work(again) == [0, 1]


def test_remove_leaves_nothing_but_what_is_not_ours(make):
    parts = make(2)
    work(parts, target=1, expected=1)
    parts.next_file(None, None, 1, 1)
    parts.fail(1, "why")
    for name in "layout.json", "layout.npy.tmp", "train_00012.json", "val_00000.json.tmp", "plan.json.tmp", "00001_0000.bin.tmp":
        (parts.folder / name).write_text("")
    parts.remove()
    assert not parts.folder.exists() and parts.folder.parent.exists()
    parts.remove()
    assert parts.next_file(None, None, 1, 1) is None and parts.others() == [] and parts.tokens() == 0
    assert parts.prefix(False) == [] and parts.failures() == {} and not parts.folder.exists()
    parts = make(2)
    (parts.folder / "notes.txt").write_text("somebody's")
    (parts.folder / "train_00000.bin").write_text("somebody's")
    parts.remove()
    assert sorted(path.name for path in parts.folder.iterdir()) == ["notes.txt", "train_00000.bin"]


def test_who_waits_while_the_folder_is_removed_finds_nothing_to_do(make):
    parts = make(2)

    def wait(say):
        theirs = make(2)
        say("opened")
        while not (theirs.folder.parent / "go").exists():
            pass
        say(theirs.next_file(None, None, 1, 1))

    with process(wait) as (child, _):
        with parts._locks.alone():
            (parts.folder.parent / "go").touch()
            child.join(0.5)             # it stands before the mutex now; if not yet, it finds no folder, as well
            assert child.is_alive()
            parts._unlink(keep=())
            parts.folder.rmdir()
        child.join()
        assert child.exitcode == 0 and not parts.folder.exists()


def test_who_waited_for_a_mutex_that_was_removed_waits_for_its_successor(make):
    parts = make(2)

    def wait(say):
        theirs = make(2)
        say("opened")
        while not (theirs.folder.parent / "go").exists():
            pass
        with theirs._locks.alone():
            say("in")

    with process(wait) as (child, _):
        with parts._locks.alone():
            (parts.folder.parent / "go").touch()
            child.join(0.3)
            (parts.folder / "plan.lock").unlink()
            successor = parts._locks.take("plan.lock")
        child.join(0.5)
        assert child.is_alive(), "the lock of a file that is gone keeps nobody out"
        os.close(successor)
        child.join()
        assert child.exitcode == 0


# --------------------------------------------------------------------------------------------------------------- no locks

def test_without_locks_each_worker_keeps_to_its_share(make, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    first, second = make(5), make(5)
    assert not first.has_locks
    assert first.next_file(None, None, 1, 2) == 0 and first.others() == ["1.jsonl", "3.jsonl"]
    first.release(0)
    assert work(first, 1, 2) == [0, 2, 4]
    assert first.others() == ["1.jsonl", "3.jsonl"]
    assert first.next_file(None, None, 1, 2) is None
    second.next_file(None, None, 2, 2)
    second.fail(3, "why")
    assert first.others() == ["1.jsonl"]
    second.release(1)
    assert work(second, 2, 2) == [1] and first.others() == []
    assert capsys.readouterr().err.count("has no locks (No locks available): each worker takes its own share") == 2
    (first.folder / "worker_far_17.lock").touch()
    with pytest.raises(UserError, match="process 17 on host 'far' works there on other input.*if it is no more, delete"):
        make(5, {})
    assert json.loads((first.folder / "plan.json").read_text())["identity"] == IDENTITY
