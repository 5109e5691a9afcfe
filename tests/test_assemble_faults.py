"""Tests of prepare/assemble.py: killed, damaged or out of room, it ends as if nothing had happened or says a sentence."""

import os
import random
import resource
import shutil
from pathlib import Path

import pytest
from piece_files import (
    FACTS,
    content,
    cut_at_random,
    expected_shards,
    reference,
    save_hashes,
    shards_of,
    small,
    some_documents,
    whole,
    write_pieces,
)

from prepare import assemble
from prepare.assemble import Assembly
from runtime import shards

__all__ = ["small"]     # the fixture


class Killed(BaseException):
    """The process is gone: whatever it would still have done on disk does not happen either."""


def die_at(monkeypatch, change):
    """The `change`-th rename or removal from now on does not happen, nor does any after it; returns what was asked for."""
    asked = []
    for name, real in ("replace", os.replace), ("unlink", os.unlink):
        def stop(*arguments, real=real, name=name, **options):
            if Path(arguments[0]).exists():
                asked.append(f"{name} {Path(arguments[0]).name}")
            if len(asked) >= change:
                raise Killed
            return real(*arguments, **options)
        monkeypatch.setattr(os, name, stop)
    return asked


def assemble_on(folder, pieces, earlier, budget=None):
    """As the command does: goes on where there is something to go on with."""
    assembly = Assembly.resume(folder)
    if assembly is None:
        assembly = Assembly(folder, pieces, earlier, 1000, budget)
        assembly.layout()
        assembly.commit(FACTS)
    splits = assembly.write()
    return {**assembly.facts, "splits": splits, "n": [assembly.duplicates, assembly.last_file, assembly.budget, assembly.is_full]}


def test_killed_at_every_rename_and_removal_it_ends_as_if_nothing_had_happened(tmp_path, small):
    rng = random.Random(2)
    files = [some_documents(rng, 40, hashes=80) for _ in range(2)]
    earlier = {"a": save_hashes(tmp_path / "a/hashes.npy", {d.hash for d in files[0][:9]})}
    undisturbed = tmp_path / "undisturbed" / "s"
    pieces = write_pieces(undisturbed, files, cut_at_random(random.Random(3)))
    index = assemble_on(undisturbed, pieces, earlier, 250)
    assert len(index["splits"]["train"]["shards"]) == 6
    kills, asked = 0, []
    while True:
        folder = tmp_path / "killed" / "s"
        shutil.rmtree(folder.parent, ignore_errors=True)
        pieces = write_pieces(folder, files, cut_at_random(random.Random(3)))
        with pytest.MonkeyPatch.context() as monkeypatch:
            asked = die_at(monkeypatch, kills + 1)
            try:
                assemble_on(folder, pieces, earlier, 250)
                break
            except Killed:
                kills += 1
        for path in folder.glob("*.tmp"):       # what is there of a file that was not whole may be anything
            path.write_bytes(b"torn")
        if (folder / "parts/layout.json").exists():     # committed: other sources and more pieces change nothing any more
            assert assemble_on(folder, [], {}) == index
        else:
            assert assemble_on(folder, pieces, earlier, 250) == index
        assert content(folder) == content(undisturbed)
    assert kills == len(asked) > 20 and any("unlink" in change for change in asked)


def test_killed_again_and_again_it_still_ends(tmp_path, small):
    rng = random.Random(4)
    files = [some_documents(rng, 120)]
    undisturbed, folder = tmp_path / "u" / "s", tmp_path / "k" / "s"
    index = assemble_on(undisturbed, write_pieces(undisturbed, files, cut_at_random(random.Random(5))), {})
    pieces, runs = write_pieces(folder, files, cut_at_random(random.Random(5))), 0
    while True:
        runs += 1
        with pytest.MonkeyPatch.context() as monkeypatch:
            die_at(monkeypatch, 5)
            try:
                assert assemble_on(folder, pieces, {}) == index
                break
            except Killed:
                pass
    assert runs > 4 and content(folder) == content(undisturbed)


def test_shards_that_are_there_are_not_hashed_again(tmp_path, small, monkeypatch):
    folder = tmp_path / "s"
    index = assemble_on(folder, write_pieces(folder, [some_documents(random.Random(6), 60)], whole), {})
    hashed = []
    monkeypatch.setattr(assemble, "file_sha256", lambda path, real=shards.file_sha256: hashed.append(path.name) or real(path))
    assert assemble_on(folder, [], {}) == index and hashed == []
    os.utime(folder / "train_00001.bin", (1, 1))        # copied to another disk, or changed: the hash tells
    assert assemble_on(folder, [], {}) == index and hashed == ["train_00001.bin"]


def test_shards_of_whatever_was_there_before_are_not_taken_for_new_ones(tmp_path, small):
    folder, other = tmp_path / "s", tmp_path / "other" / "s"
    made = assemble_on(other, write_pieces(other, [some_documents(random.Random(15), 90)], whole), {})
    pieces = write_pieces(folder, [some_documents(random.Random(16), 60)], whole)
    for path in [*other.iterdir(), *(other / "parts").glob("*_?????.json")]:
        if path.is_file():
            shutil.copy2(path, folder / path.relative_to(other))       # with its modification time
    splits, *_ = reference([some_documents(random.Random(16), 60)], "s", {}, 1000, None)
    assert assemble_on(folder, pieces, {}) != made
    assert shards_of(folder) == expected_shards(splits, 50)
    assert len(list((folder / "parts").glob("*_?????.json"))) == len(shards_of(folder))


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_shard_that_was_changed_is_made_again_or_told(tmp_path, small, harm):
    """While its pieces are there it is made again; when they are gone, a sentence says what to do."""
    folder, documents = tmp_path / "s", [some_documents(random.Random(7), 60)]
    pieces = write_pieces(folder, documents, cut_at_random(random.Random(8)))
    shutil.copytree(folder / "parts", tmp_path / "spare")
    index, made = assemble_on(folder, pieces, {}), content(folder)
    victim = folder / "train_00001.bin"

    def do_harm():
        data, written_ns = bytearray(victim.read_bytes()), victim.stat().st_mtime_ns
        data[3] ^= 4
        victim.unlink()
        if harm == "flip":
            victim.write_bytes(data)
        elif harm == "cut":
            victim.write_bytes(data[:-2])
            os.utime(victim, ns=(written_ns, written_ns))   # within what the file system's clock tells apart

    do_harm()
    with pytest.raises(OSError, match=f"is gone, and a shard .* missing or was changed: delete {folder}"):
        assemble_on(folder, [], {})
    for path in (tmp_path / "spare").glob("*.bin"):
        shutil.copy(path, folder / "parts")
    assert assemble_on(folder, [], {}) == index and content(folder) == made


def test_a_damaged_piece_is_told(tmp_path, small):
    documents = [some_documents(random.Random(9), 60)]
    for case, (name, harm) in enumerate([
            ("npy", lambda data: data[:-3]), ("npy", lambda data: data[:20]), ("npy", lambda data: b""),
            ("npy", lambda data: data[:-8] + b"\xff" + data[-7:]), ("npy", None), ("bin", lambda data: data[:len(data) // 2])]):
        folder = tmp_path / str(case) / "s"
        pieces = write_pieces(folder, documents, whole)
        path = Path(f"{pieces[0].stem}.{name}")
        if harm:
            path.write_bytes(harm(path.read_bytes()))
        else:
            path.unlink()
        with pytest.raises(OSError, match=rf"{path} (is not what was written|ends early): delete .* run the same command again"):
            assemble_on(folder, pieces, {})


@pytest.mark.parametrize("name", ["00000_0000.npy", "layout.npy"])
@pytest.mark.parametrize("size", [None, 0, 20, 150])
def test_a_table_damaged_after_the_commit_is_told(tmp_path, small, name, size):
    folder = tmp_path / "s"
    assembly = Assembly(folder, write_pieces(folder, [some_documents(random.Random(17), 60)], whole), {}, 1000, None)
    assembly.layout()
    assembly.commit(FACTS)
    path = folder / "parts" / name
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(OSError, match=f"{path} is not what was written: delete {path.parent} and run the same command again"):
        Assembly.resume(folder).write()


def test_a_damaged_layout_or_hashes_file_is_told(tmp_path, small):
    folder = tmp_path / "s"
    pieces = write_pieces(folder, [some_documents(random.Random(10), 60)], whole)
    bad = tmp_path / "a" / "hashes.npy"
    save_hashes(bad, {1, 2, 3})
    for data in bad.read_bytes()[:-4], b"", b"not an array":
        bad.write_bytes(data)
        with pytest.raises(OSError, match=f"{bad} cannot be read"):
            assemble_on(folder, pieces, {"a": bad})
    assemble_on(folder, pieces, {})
    (folder / "parts/layout.json").write_text("{")
    with pytest.raises(OSError, match="layout.json cannot be read .*: delete"):
        Assembly.resume(folder)


def test_a_full_disk_leaves_nothing_half_written_and_the_next_try_goes_on(tmp_path, small):
    """A file may not grow beyond a limit: what the system says then is what it says of a full disk, but for the number."""
    documents, index = [some_documents(random.Random(11), 900, hashes=60)], None
    # None that counts; in mid-shard, in hashes.npy, in layout.npy (of 128 + 900 bytes).
    for limit in 2_000, 90, 200, 1_000, 1_020:
        folder = tmp_path / str(limit) / "s"
        pieces = write_pieces(folder, documents, whole)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit if index else soft, hard))
        try:
            if index is None:
                index = assemble_on(folder, pieces, {})
                continue
            with pytest.raises(OSError):
                assemble_on(folder, pieces, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list(folder.rglob("*.tmp"))
        assert assemble_on(folder, pieces, {}) == index and content(folder) == content(tmp_path / "2000" / "s")
