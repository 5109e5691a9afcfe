"""What a second run of prepare_data.py meets: changed files, other options, damaged files, what other sources left behind."""

import errno
import json
import os
import shutil
import signal
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest

import prepare_data
from configs.mixture import MIXTURE
from prepare import phases, pieces, source
from prepare.job import Job
from prepare.parts import Parts
from prepare.source import BadFile, Source, batches
from runtime import shards
from runtime.tokenizer import load_tokenizer
from tests.faults import flip_bit
from tests.prepare_runs import SIZES, Forge, Run, check_against, content, due, is_a_sentence, last_of_each, texts, write_files


def local(paths, out, *options, name="mine"):
    return last_of_each(["local", *paths, f"name={name}", "tokenizer=byte", "val_share=0.2", "processes=1", f"out={out}",
                         *options])


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    forge = Forge(tmp_path_factory.mktemp("forge"))
    yield forge
    forge.close()


@pytest.fixture
def small(monkeypatch):
    """The sizes of the other runs, for one in this process."""
    monkeypatch.setattr(shards, "SHARD_TOKENS", SIZES["SHARD_TOKENS"])
    monkeypatch.setattr(pieces, "PIECE_TOKENS", SIZES["PIECE_TOKENS"])
    monkeypatch.setattr(source, "BATCH_BYTES", SIZES["BATCH_BYTES"])


@pytest.fixture(scope="module")
def files():
    return texts(3, each=14)


@pytest.fixture
def paths(files, tmp_path):
    return write_files(tmp_path / "files", files)


@pytest.fixture
def begun(forge, paths, tmp_path):
    """begun(out, words, *options): `out` as a kill leaves it before the first change on disk that names these words."""
    def kill(out: Path, words: str, *options: str, name="mine") -> None:
        trace = tmp_path / "trace"
        trace.unlink(missing_ok=True)
        calm = tmp_path / "traced"
        assert forge.run(*local(paths, calm, *options, name=name), folder=str(calm), trace=str(trace))[0] == 0
        shutil.rmtree(calm)
        at = next(n for n, line in enumerate(trace.read_text().splitlines(), 1) if words in line)
        code, said = forge.run(*local(paths, out, *options, name=name), folder=str(out), fault="kill", at=at)
        assert code == -signal.SIGKILL, said
    return kill


def calm(forge, paths, out, *options, name="mine"):
    code, said = forge.run(*local(paths, out, *options, name=name))
    assert code == 0, said
    return content(out)


# --------------------------------------------------------------------------------------------------- the disk, the budget

def test_shards_take_the_room_that_their_pieces_give_back(forge, files, paths, begun, small, tmp_path, monkeypatch, capsys):
    """Killed when all shards were written, on a disk that is all but full: nothing is asked for that is there already."""
    out, budget = tmp_path / "out", f"tokens={round(0.9 * len(due(files)[0]['train']))}"
    begun(out, "index.json", budget)
    room = namedtuple("usage", "total used free")(0, 0, 2_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    code = prepare_data.main(local(paths, out, budget))
    assert code == 0, capsys.readouterr().err
    assert content(out) == calm(forge, paths, tmp_path / "calm", budget)


def test_what_falls_short_of_the_budget_is_told(forge, files, paths, tmp_path):
    there = len(due(files)[0]["train"])
    code, said = forge.run(*local(paths, tmp_path / "out", f"tokens={there + 1}"))
    assert code == 0 and f"{there:,} training tokens are all there are, {there + 1:,} were asked for" in said, said
    code, said = forge.run(*local(paths, tmp_path / "enough", f"tokens={there}"))
    assert code == 0 and "were asked for" not in said, said


def test_a_budget_too_small_to_share_is_still_a_budget(tmp_path, monkeypatch):
    """0 would mean all there are."""
    asked = []
    monkeypatch.setattr(prepare_data, "prepare", lambda sources, job: asked.append(job.budgets))
    assert prepare_data.main([*MIXTURE, "tokens=10", "tokenizer=byte", f"out={tmp_path}"]) == 0
    assert set(asked[0]) == set(MIXTURE) and min(asked[0].values()) >= 1


# ------------------------------------------------------------------------------------------------ what other runs left here

@pytest.mark.parametrize("killed_at, drops", [("layout.npy", False), ("layout.json.tmp -> ", False), ("train_00001.bin", True)])
def test_only_what_is_final_counts_as_here_before(forge, files, paths, begun, tmp_path, killed_at, drops):
    """The hashes of a source whose layout is not final yet may be those of documents that it will never hold."""
    out, other = tmp_path / "out", texts(1, seed=3, each=25) + [files[0]]
    begun(out, killed_at, name="one")
    assert (out / "one/hashes.npy").exists()
    calm(forge, write_files(tmp_path / "other", other), out, name="two")
    ours, theirs = due(files)[1], due(other)[1]
    check_against(out / "two", other, earlier=ours if drops else set())
    calm(forge, paths, out, name="one")
    check_against(out / "one", files, earlier=set() if drops else theirs)


@pytest.mark.parametrize("what", ["lost", "damaged"])
def test_a_finished_source_that_lost_its_hashes_stops_the_next(forge, files, paths, tmp_path, what):
    out, hashes = tmp_path / "out", tmp_path / "out/one/hashes.npy"
    calm(forge, paths, out, name="one")
    whole = hashes.read_bytes()
    hashes.unlink() if what == "lost" else flip_bit(hashes, 301)
    other = write_files(tmp_path / "other", [files[1]])
    code, said = forge.run(*local(other, out, name="two"))
    assert code == 2 and str(hashes) in said and is_a_sentence(said), said
    assert not (out / "two/index.json").exists()
    hashes.write_bytes(whole)
    other = write_files(tmp_path / "other", [files[1] + ["of its own"] * 2 + [f"own {i}" for i in range(30)]])
    calm(forge, other, out, name="two")
    assert json.loads((out / "two/index.json").read_text())["duplicates"]["one"] > 10


# ---------------------------------------------------------------------------------------------------------- changed input

def test_only_the_changed_file_is_read_again(forge, files, paths, begun, tmp_path):
    out, trace = tmp_path / "out", tmp_path / "trace2"
    begun(out, "layout.npy")
    paths[2].write_bytes(paths[2].read_bytes() + b'{"text": "one more"}\n')
    code, said = forge.run(*local(paths, out), folder=str(out), trace=str(trace))
    assert code == 0 and "c.jsonl" in said, said
    lines = trace.read_text().splitlines()
    made = {line.rpartition("/")[2][:5] for line in lines if line.startswith("rename") and "_0000.bin" in line}
    assert made == {"00002"}, "the pieces of the others were there"
    check_against(out / "mine", [*files[:2], files[2] + ["one more"]])
    assert content(out) == calm(forge, paths, tmp_path / "calm")


def test_a_file_that_changed_when_shards_were_begun_is_refused(forge, files, paths, begun, tmp_path):
    """Some of its tokens are in shards by then."""
    out, whole = tmp_path / "out", paths[2].read_bytes()
    stat = paths[2].stat()
    begun(out, "train_00001.bin")
    before = content(out)
    paths[2].write_bytes(whole + b'{"text": "one more"}\n')
    code, said = forge.run(*local(paths, out))
    assert code == 2 and "c.jsonl" in said and is_a_sentence(said), said
    assert content(out).items() >= {name: data for name, data in before.items() if name.endswith((".bin", ".npy"))}.items()
    paths[2].write_bytes(whole)
    os.utime(paths[2], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert calm(forge, paths, out) == calm(forge, paths, tmp_path / "calm")


@pytest.mark.parametrize("killed_at, change", [("00001_0001.json", "tokenizer"), ("layout.npy", "order"), ("layout.npy", "fewer"),
                                               ("train_00001.bin", "column"), ("train_00001.bin", "tokenizer")])
def test_what_was_begun_otherwise_is_refused_and_stays(forge, paths, begun, tmp_path, killed_at, change):
    out = tmp_path / "out"
    begun(out, killed_at)
    before = {name: data for name, data in content(out).items() if name.endswith((".bin", ".npy", ".json"))}
    other = {"tokenizer": local(paths, out, "tokenizer=gpt2"), "order": local(paths[::-1], out),
             "column": local(paths, out, "column=id"), "fewer": local(paths[:2], out)}[change]
    code, said = forge.run(*other)
    assert code == 2 and "begun otherwise" in said and str(out / "mine") in said and is_a_sentence(said), said
    assert content(out).items() >= before.items()
    assert calm(forge, paths, out) == calm(forge, paths, tmp_path / "calm"), "the command that was killed goes on"


# --------------------------------------------------------------------------------------------------------- damaged input

@pytest.mark.parametrize("bad, damage", [
    (0, lambda data: data[:len(data) // 2]), (0, lambda data: data[:60] + b"?" * 20 + data[80:]),
    (1, lambda data: data[:-9]), (1, lambda data: b"PAR1"), (2, lambda data: data + b"{\n"), (2, lambda data: data + b"3\n")],
    ids=["gzip cut", "gzip damaged", "parquet cut", "no parquet", "no JSON", "no object"])
def test_a_damaged_file_costs_itself_alone(forge, files, paths, tmp_path, bad, damage):
    """Listed, the others done; mended, the same command finishes; or it finishes without, on request."""
    out, name, whole = tmp_path / "out", paths[bad].name, paths[bad].read_bytes()
    paths[bad].write_bytes(damage(whole))
    for _ in range(2):
        code, said = forge.run(*local(paths, out))
        assert code == 1 and name in said and "skip_bad=true" in said and is_a_sentence(said), said
        complete = {json.loads(path.read_text())["file"] for path in (out / "mine/parts").glob("0*_*.json")
                    if json.loads(path.read_text())["is_last"]}
        assert complete == {0, 1, 2} - {bad}
    shutil.copytree(out, tmp_path / "skipped")
    calm(forge, paths, tmp_path / "skipped", "skip_bad=true")
    index = json.loads((tmp_path / "skipped/mine/index.json").read_text())
    assert [entry["file"] for entry in index["skipped"]] == [name] and index["skipped"][0]["reason"]
    assert index["files"] == [path.name for path in paths if path.name != name]
    check_against(tmp_path / "skipped/mine", [own for number, own in enumerate(files) if number != bad])
    paths[bad].write_bytes(whole)
    assert calm(forge, paths, out) == calm(forge, paths, tmp_path / "calm")


def test_all_files_damaged_is_no_empty_source(forge, paths, tmp_path):
    for path in paths:
        path.write_bytes(path.read_bytes()[:40])
    code, said = forge.run(*local(paths, tmp_path / "out", "skip_bad=true"))
    assert code == 1 and "could not be read" in said and "a.jsonl.gz" in said and is_a_sentence(said), said
    assert not (tmp_path / "out/mine/index.json").exists()


# ------------------------------------------------------------------------------------------------------------ other workers

@dataclass
class Texts:
    """An input file of this process; `meanwhile` is called before its last document."""
    name: str
    texts: list[str]
    meanwhile: callable = lambda: None
    bytes: int = 1_000
    times_read: int = 0

    def read(self, skip_rows):
        self.times_read += 1

        def documents():
            yield from self.texts[:-1]
            self.meanwhile()
            yield self.texts[-1]
        yield from batches(documents(), skip_rows)


def job(out, **options):
    return Job(**{"out": out, "tokenizer": load_tokenizer("byte"), "val_per_10k": 2000, "processes": 1,
                  "worker": 1, "workers": 1, "grams": None, "skip_bad": False, "is_quiet": True} | options)


@pytest.mark.parametrize("call", [2, 3])
def test_a_file_whose_holder_died_is_taken_over_by_who_looks_last(files, tmp_path, monkeypatch, call):
    """Without a budget: held when this worker asked for more, free when it asked who is at work."""
    calls, next_file = [], Parts.next_file

    def held_for_now(self, *arguments):
        calls.append(arguments)
        return None if len(calls) == call else next_file(self, *arguments)
    monkeypatch.setattr(Parts, "next_file", held_for_now)
    own = [Texts(f"f{i}", texts) for i, texts in enumerate(files)]
    phases.prepare([Source("mine", lambda known: own, "d", "r", "l")], job(tmp_path))
    check_against(tmp_path / "mine", files, shard_tokens=shards.SHARD_TOKENS)


@pytest.mark.parametrize("order", [("2/2", "1/2"), ("1/2", "2/2", None), ("2/3", "3/3", None)])
def test_without_locks_shards_are_made_once(forge, paths, small, tmp_path, monkeypatch, capsys, order):
    """Each worker its own share, then the first of them, or a run without others, the shards."""
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr("fcntl.lockf", none)
    out = tmp_path / "out"
    for worker in order:
        assert not (out / "mine/parts/layout.json").exists() and not (out / "mine/index.json").exists()
        assert prepare_data.main(local(paths, out, *([f"worker={worker}"] if worker else []))) == 0, capsys.readouterr().err
    assert "has no locks" in capsys.readouterr().err
    assert content(out) == calm(forge, paths, tmp_path / "calm")


def test_what_failed_while_this_one_was_elsewhere_is_not_tried_again(files, tmp_path):
    """Forgiven at the start alone: another worker may have decided by now to finish without the file."""
    def fail():
        (tmp_path / "two/parts/00001.failed").write_text(json.dumps({"reason": "as another worker found"}))
    one = Source("one", lambda known: [Texts("a", files[0], fail)], "d1", "r", "l")
    own = [Texts(f"f{i}", texts(1, seed=5 + i, each=14)[0]) for i in range(2)]
    two = Source("two", lambda known: own, "d2", "r", "l")
    with pytest.raises(phases.Unfinished, match="as another worker found"):
        phases.prepare([one, two], job(tmp_path))
    assert [file.times_read for file in own] == [1, 0]
    phases.prepare([one, two], job(tmp_path))       # a new run tries it again
    assert own[1].times_read == 1 and (tmp_path / "two/index.json").exists()


def test_a_file_that_failed_is_in_no_index_that_holds_its_documents(files, tmp_path):
    """Read in the end, by a run that skips bad files or not: nothing in the index says that it is missing."""
    class Bad(Texts):
        def read(self, skip_rows):
            for batch in super().read(skip_rows):
                yield batch
                if self.times_read == 1:
                    raise BadFile("cut short")
    own = [Bad("f0", files[0]), Texts("f1", files[1])]
    mine = Source("mine", lambda known: own, "d", "r", "l")
    with pytest.raises(phases.Unfinished, match="cut short"):
        phases.prepare([mine], job(tmp_path))
    phases.prepare([mine], job(tmp_path, skip_bad=True))
    index = shards.read_index(tmp_path / "mine")
    assert (index.files, index.skipped) == (["f0", "f1"], [])
    check_against(tmp_path / "mine", files[:2], shard_tokens=shards.SHARD_TOKENS)


# --------------------------------------------------------------------------------------------------- where the command runs

def test_a_terminal_of_ascii_alone(paths, tmp_path):
    strange = paths[2].rename(tmp_path / "日本é.jsonl")
    run = Run(local([strange], tmp_path / "out"), tmp_path / "log", env={"PYTHONIOENCODING": "ascii"})
    assert run.wait() == 0, run.output
    for command in ["--show", str(tmp_path / "out")], ["--verify", str(tmp_path / "out")]:
        run = Run(command, tmp_path / "log", env={"PYTHONIOENCODING": "ascii"})
        assert run.wait() == 0, run.output
    strange.write_bytes(b"3\n")
    run = Run(local([strange], tmp_path / "out2"), tmp_path / "log", env={"PYTHONIOENCODING": "ascii"})
    assert run.wait() == 1 and ascii("日本é").strip("'") in run.output and is_a_sentence(run.output), run.output


@pytest.mark.parametrize("variables", [{"LOCAL_WORLD_SIZE": "many"}, {"TORCHELASTIC_RUN_ID": "none"}, {"LOCAL_WORLD_SIZE": "0"},
                                       {"TORCHELASTIC_RUN_ID": "none", "RANK": "x", "WORLD_SIZE": "2"}],
                         ids=["words", "no rank", "zero", "rank of letters"])
def test_a_strange_environment_means_one_worker(paths, tmp_path, monkeypatch, variables, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arguments = [word for word in local(paths, tmp_path / "out") if not word.startswith("processes")]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert prepare_data.main(arguments) == 0, capsys.readouterr().err
