"""The command against a Hub on loopback that drops connections, stumbles and lies: retried, listed, finished, the same bytes."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from configs.sources import SOURCES
from prepare import hub as hub_room
from prepare import pipeline, sources
from prepare_data import main
from runtime import shards
from tests.conftest import ROOT
from tests.hub_layout import write_repository
from tests.hub_server import HubServer, make_hub, point_at
from tests.test_prepare import content, environment

SOURCES_ASKED = ["fineweb_edu", "python", "c", "arxiv"]
ARXIV, BAD = SOURCES["arxiv"].dataset, "arxiv-papers-0001.json.gz"
SMALL = {(shards, "SHARD_TOKENS"): 20_000, (pipeline, "PIECE_TOKENS"): 9_000, (sources, "TASK_BYTES"): 60_000,
         (hub_room, "READ_WAITS"): (0.1,) * 4, (hub_room, "ASK_WAITS"): (0.1, 0.1)}
# The budget holds all there is here; what the real sources hold would not go on this disk.
OPTIONS = {"tokens": "10e6", "tokenizer": "byte", "val_share": 0.2, "processes": 1}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    known = make_hub(folder)
    with HubServer(folder) as server:
        server.known = known
        yield server


@pytest.fixture(autouse=True)
def here(hub, tmp_path, monkeypatch):
    """Small pieces; all tries, none of the pauses between them; nothing that an earlier server said."""
    import datasets
    import huggingface_hub.utils._http as http
    from huggingface_hub import constants
    for (room, name), value in SMALL.items():
        monkeypatch.setattr(room, name, value)
    monkeypatch.setattr(http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda s: None}))
    point_at(hub.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path / "cache"))
    yield
    hub.heal()


def words(out, *names, **options):
    return [*(names or SOURCES_ASKED), *(f"{key}={value}" for key, value in (OPTIONS | {"out": out} | options).items())]


@pytest.fixture(scope="module")
def calm(hub, tmp_path_factory):
    """By the command as a user starts it, with small pieces."""
    base = tmp_path_factory.mktemp("calm")
    (base / "small.py").write_text("import sys\n" + "".join(
        f"import {room.__name__}\n{room.__name__}.{name} = {value}\n" for (room, name), value in SMALL.items()) +
        "import prepare_data\nif __name__ == '__main__':\n    sys.exit(prepare_data.main(sys.argv[1:]))")
    env = environment(HF_ENDPOINT=hub.url, HF_HOME=str(base / "home"), HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="127.0.0.1")
    found = SimpleNamespace(out=base / "out", start=lambda out, **options: subprocess.Popen(
        [sys.executable, base / "small.py", *words(out, **options)], cwd=ROOT, env=env, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True))
    run = found.start(found.out)
    said = run.communicate()[1]
    assert run.returncode == 0, said
    return found


def shards_of(folder):
    """Without the index, which tells the budget."""
    return {name: data for name, data in content(folder).items() if name != "index.json"}


def documents(folder):
    """The texts that byte-tokenised shards hold."""
    index = json.loads((folder / "index.json").read_text())
    data = [b"".join((folder / shard["file"]).read_bytes() for shard in split["shards"]) for split in index["splits"].values()]
    numbers = [memoryview(ids).cast("H").tolist() for ids in data]
    return [bytes(number for number in text if number < 256).decode() for ids in numbers for text in _cut(ids)]


def _cut(ids):
    places = [place for place, number in enumerate(ids) if number == 256]
    return [ids[begin + 1:end] for begin, end in zip(places, [*places[1:], len(ids)], strict=True)]


def test_the_mixture_is_what_the_files_hold(hub, calm):
    """Each source's documents, once, by language, whatever order the files were taken in."""
    seen = set()
    for name in SOURCES_ASKED:
        source = SOURCES[name]
        found = documents(calm.out / name)
        rows = [row for file, rows in hub.known[source.dataset].items() for row in rows if "10BT" not in file]
        language = {"python": "Python", "c": "C"}.get(name)
        texts = [row["text"] for row in rows if language is None or row["metadata"]["language"] == language]
        wanted = {text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for text in texts if text.strip()}
        assert set(found) == wanted - seen and len(found) == len(set(found))
        seen |= wanted
        index = json.loads((calm.out / name / "index.json").read_text())
        assert index["license"] and index["revision"] == source.revision and index["is_whole"]
        if language:        # the files that hold none of it are not read
            first = 2 if name == "python" else 0
            assert sorted(index["files"]) == [f"stack-edu-{n:04d}.json.gz" for n in range(first, first + 3)]


@pytest.mark.parametrize("kind, times, after", [("drop", 2, 2_000), ("503", 1, 0), ("429", 1, 0), ("short", 1, 3_000)])
def test_a_network_that_stumbles_costs_time_alone(hub, calm, tmp_path, kind, times, after):
    for name in "fineweb_edu", "python":
        folder = hub.folder / SOURCES[name].dataset
        for path in sorted(folder.rglob("*.parquet" if name == "fineweb_edu" else "*3.json.gz"))[:2]:
            hub.fault(f"{SOURCES[name].dataset}/{path.relative_to(folder)}", kind, times, after)
    assert main(words(tmp_path, "fineweb_edu", "python")) == 0
    for name in "fineweb_edu", "python":
        assert shards_of(tmp_path / name) == shards_of(calm.out / name)


def test_kills_while_it_streams(calm, tmp_path):
    rng, out, killed = random.Random(3), tmp_path / "out", 0
    for _ in range(3):
        run = calm.start(out, processes=rng.choice((1, 2)))
        while run.poll() is None and not list(out.glob("*/parts/*.bin")):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 1))
        run.kill()
        run.communicate()
        killed += run.returncode == -signal.SIGKILL
    run = calm.start(out)
    said = run.communicate()[1]
    assert run.returncode == 0 and content(out) == content(calm.out) and killed > 1, said


@pytest.mark.parametrize("kind", ["truncate", "corrupt"])
def test_a_file_that_cannot_be_read_is_listed_retried_and_skipped_only_on_request(hub, tmp_path, capsys, kind):
    out, skipped = tmp_path / "out", tmp_path / "skipped"
    hub.fault(f"{ARXIV}/{BAD}", kind, None, 2_000)
    for _ in range(2):
        assert main(words(out, "arxiv")) == 1
        said = capsys.readouterr().err
        assert f"1 of 3 input files could not be read; run the same command again to try them again, or add skip_bad=true to " \
               f"leave them out:\n  {BAD}: " in said and not (out / "arxiv/index.json").exists()
    shutil.copytree(out, skipped)
    assert main(words(skipped, "arxiv", skip_bad="true")) == 0
    index = json.loads((skipped / "arxiv/index.json").read_text())
    assert [entry["file"] for entry in index["skipped"]] == [BAD] and index["skipped"][0]["reason"] and len(index["files"]) == 2
    hub.heal()
    assert main(words(out, "arxiv")) == main(words(tmp_path / "calm", "arxiv")) == 0
    assert content(out) == content(tmp_path / "calm")


@pytest.mark.parametrize("kind", ["moved", "gated", "forbidden"])
def test_a_data_set_that_is_gone_is_a_sentence(hub, tmp_path, capsys, kind):
    hub.fault(ARXIV, kind)
    assert main(words(tmp_path / "out", "arxiv")) == 2
    said = capsys.readouterr().err
    assert ARXIV in said and said.count("\n") == 1 and "Traceback" not in said
    assert main(["--check-sources", "fineweb_edu", "arxiv", "c"]) == 2
    out, said = capsys.readouterr()
    assert ARXIV in said and SOURCES["fineweb_edu"].dataset in out and "c: " in out


def test_check_sources_shows_a_record_and_tells_of_a_hub_that_does_not_answer(hub, capsys, monkeypatch):
    assert main(["--check-sources"]) == 0
    out = capsys.readouterr().out
    assert "fineweb_edu: HuggingFaceFW/fineweb-edu@87f0" in out and "  4 files, 0.00 GB" in out and len(out.splitlines()) == 12
    hub.fault(ARXIV, "500", None)
    assert main(["--check-sources", "arxiv"]) == 1 and "gives no sound answer about" in capsys.readouterr().err


@pytest.mark.parametrize("form", [".parquet", ".jsonl", ".json.zst"])
def test_any_data_set_of_the_hub(hub, tmp_path, capsys, form):
    rows = [{"body": f"text {n} " * 9, "more": {"n": n}} for n in range(60)] + [{"body": None, "more": {"n": 0}}]
    write_repository(hub.folder, "own/Set", {f"train-{i}{form}": rows[i::2] for i in range(2)}, license="mit")
    try:
        assert main(words(tmp_path / "out", "hf:own/Set", column="body", files=f"train-*{form}")) == 0
        index = json.loads((tmp_path / "out/set/index.json").read_text())
        assert sorted(documents(tmp_path / "out/set")) == sorted(row["body"] for row in rows[:60])
        assert (index["license"], index["empty"], len(index["files"]), len(index["revision"])) == ("mit", 1, 2, 40)
        for more, sentence in (({"column": "nope", "files": f"train-*{form}"}, "to one of body, more"),
                               ({"column": "more", "files": f"train-*{form}"}, "not text"),
                               ({"files": "data/*.csv"}, "has no file data/*.csv"), ({"files": "*.md"}, "cannot be streamed"),
                               ({"revision": "nope"}, "has no such revision")):
            capsys.readouterr()
            assert main(words(tmp_path / "other", "hf:own/Set", **more)) == 2
            said = capsys.readouterr().err
            assert sentence in said and "Traceback" not in said, said
    finally:
        shutil.rmtree(hub.folder / "own")


def test_the_train_split_is_found_and_a_resume_stays_at_the_commit_that_was_begun(hub, tmp_path, capsys):
    """Someone pushes meanwhile: what `main` means now is not asked for, unless revision= says so."""
    files = {f"data/{split}-{i}.jsonl": [{"text": f"{split} {i} {n} " * 9} for n in range(40)] for split in ("train", "test")
             for i in range(2)}
    try:
        write_repository(hub.folder, "own/Set", files)
        old, new = "a" * 40, "b" * 40
        (hub.folder / "own/Set/.revision").write_text(old)
        hub.fault("own/Set/data/train-1.jsonl", "truncate", None, 2_000)
        assert main(words(tmp_path, "hf:own/Set", name="x")) == 1
        hub.heal()
        (hub.folder / "own/Set/.revision").write_text(new)
        assert main(words(tmp_path, "hf:own/Set", name="x")) == 2, "the server has forgotten the old commit"
        assert f"own/Set@{old}" in capsys.readouterr().err
        (hub.folder / "own/Set/.revision").write_text(old)
        assert main(words(tmp_path, "hf:own/Set", name="x")) == 0
        wanted = [row["text"] for name in files if "train" in name for row in files[name]]
        assert sorted(documents(tmp_path / "x")) == sorted(wanted)
    finally:
        shutil.rmtree(hub.folder / "own")


def test_a_budget_is_shared_by_weight(tmp_path):
    assert main(words(tmp_path, tokens=150_000)) == 0
    for name, share in {"fineweb_edu": 0.8, "python": 0.07, "c": 0.03, "arxiv": 0.1}.items():
        index = json.loads((tmp_path / name / "index.json").read_text())
        assert 150_000 * share <= index["splits"]["train"]["tokens"] < 150_000 * share + 4_000
