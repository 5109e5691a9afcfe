"""The command against a Hub on loopback that drops connections, stumbles and lies: retried, listed, finished, the same bytes."""

import json
import random
import shutil
import signal

import pytest

import prepare_data
from configs.sources import SOURCES
from runtime.cli import UserError
from tests.hub_server import HubServer, make_hub
from tests.prepare_runs import Forge, Run, content, is_a_sentence, last_of_each

SOURCES_ASKED = ["fineweb_edu", "python", "c", "arxiv"]
SIZES = {"SHARD_TOKENS": 20_000, "PIECE_TOKENS": 9_000, "BATCH_BYTES": 4_000, "WAITS": [0.1, 0.1, 0.1, 0.1]}
ARXIV = SOURCES["arxiv"].dataset


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    make_hub(folder)
    with HubServer(folder) as server:
        yield server


@pytest.fixture(scope="module")
def forge(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forge")
    forge = Forge(folder, environment(hub, folder), ["datasets"])
    yield forge
    forge.close()


def environment(hub, folder) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}


@pytest.fixture(autouse=True)
def healthy(hub):
    yield
    hub.heal()


# The budget holds all there is here; what the real sources hold would not go on this disk.
OPTIONS = ["tokens=10e6", "tokenizer=byte", "val_share=0.2", "processes=1"]


def stream(forge, out, *words, **faults):
    return forge.run(*last_of_each([*OPTIONS, f"out={out}", *(words or SOURCES_ASKED)]), sizes=SIZES, patience=0.1, **faults)


@pytest.fixture(scope="module")
def calm(forge, tmp_path_factory):
    out = tmp_path_factory.mktemp("calm") / "out"
    code, said = stream(forge, out)
    assert code == 0, said
    return out


def test_the_mixture_is_what_the_files_hold(hub, calm):
    """Each source's documents, once, by language, whatever order the files were taken in."""
    known = make_hub(calm.parent / "hub")
    seen = set()
    for name in SOURCES_ASKED:
        source = SOURCES[name]
        found = documents(calm / name)
        rows = [row for file, rows in known[source.dataset].items() for row in rows if "10BT" not in file]
        language = {"python": "Python", "c": "C"}.get(name)
        texts = [row["text"] for row in rows if language is None or row["metadata"]["language"] == language]
        wanted = {text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for text in texts if text.strip()}
        assert set(found) == wanted - seen and len(found) == len(set(found))
        seen |= wanted
        index = json.loads((calm / name / "index.json").read_text())
        assert index["license"] and index["revision"] == source.revision and index["is_whole"]


def documents(folder):
    """The texts that byte-tokenised shards hold."""
    index, found = json.loads((folder / "index.json").read_text()), []
    for split in index["splits"].values():
        ids = b"".join((folder / shard["file"]).read_bytes() for shard in split["shards"])
        numbers = memoryview(ids).cast("H").tolist()
        text = []
        for number in [*numbers[1:], 256]:
            if number == 256:
                found.append(bytes(text).decode())
                text = []
            else:
                text.append(number)
    return found


@pytest.mark.parametrize("kind, times, after", [("drop", 2, 2_000), ("503", 1, 0), ("429", 1, 0), ("short", 1, 3_000)])
def test_a_network_that_stumbles_costs_time_alone(hub, forge, calm, tmp_path, kind, times, after):
    for name in "fineweb_edu", "arxiv":
        folder = hub.folder / SOURCES[name].dataset
        for path in sorted(folder.rglob("*.parquet" if name == "fineweb_edu" else "*.gz"))[:2]:
            hub.fault(f"{SOURCES[name].dataset}/{path.relative_to(folder)}", kind, times, after)
    code, said = stream(forge, tmp_path / "out")
    assert code == 0, said
    assert content(tmp_path / "out") == content(calm)


def test_kills_while_it_streams(hub, forge, calm, tmp_path):
    rng, out, killed = random.Random(3), tmp_path / "out", 0
    for at in sorted(rng.sample(range(5, 150), 6)):
        code, said = stream(forge, out, folder=str(out), fault="kill", at=at)
        assert code in (0, -signal.SIGKILL), said
        killed += code != 0
    code, said = stream(forge, out)
    assert code == 0 and content(out) == content(calm), said
    assert killed > 3


def test_two_workers_on_four_sources_drop_the_same_copies(hub, calm, tmp_path):
    """A copy is dropped from the later source of the command, whichever worker finishes which source first."""
    runs = [Run([*OPTIONS, f"out={tmp_path / 'out'}", *SOURCES_ASKED, f"worker={i}/2"], tmp_path / f"{i}.log", sizes=SIZES,
                env=environment(hub, tmp_path / str(i))) for i in (1, 2)]
    for run in runs:
        assert run.wait() == 0, run.output
    assert content(tmp_path / "out") == content(calm)


def test_a_file_that_cannot_be_read_is_listed_retried_and_skipped_only_on_request(hub, forge, tmp_path):
    bad = "arxiv-papers-0001.json.gz"
    for kind in "truncate", "corrupt":
        out = tmp_path / kind
        hub.fault(f"{ARXIV}/{bad}", kind, None, 2_000)
        for _ in range(2):
            code, said = stream(forge, out, "arxiv")
            assert code == 1 and bad in said and "skip_bad=true" in said and is_a_sentence(said), (kind, said)
            assert not (out / "arxiv/index.json").exists()
        shutil.copytree(out, tmp_path / f"{kind}_skipped")
        code, said = stream(forge, tmp_path / f"{kind}_skipped", "arxiv", "skip_bad=true")
        assert code == 0 and bad in said, said
        index = json.loads((tmp_path / f"{kind}_skipped/arxiv/index.json").read_text())
        assert [skipped["file"] for skipped in index["skipped"]] and bad in index["skipped"][0]["file"]
        assert index["skipped"][0]["reason"] and len(index["files"]) == 2
        hub.heal()
        code, said = stream(forge, out, "arxiv")
        assert code == 0, said
        code, said = stream(forge, tmp_path / f"{kind}_calm", "arxiv")
        assert code == 0 and content(out) == content(tmp_path / f"{kind}_calm"), said


@pytest.mark.parametrize("kind", ["moved", "gated", "forbidden"])
def test_a_data_set_that_is_gone_is_a_sentence(hub, forge, tmp_path, kind):
    hub.fault(ARXIV, kind)
    code, said = stream(forge, tmp_path / "out", "arxiv")
    assert code == 2 and ARXIV in said and is_a_sentence(said), said
    code, said = forge.run("--check-sources", "fineweb_edu", "arxiv", "c")
    assert code == 2 and ARXIV in said and SOURCES["fineweb_edu"].dataset in said and is_a_sentence(said), said


def test_any_data_set_of_the_hub(forge, calm, tmp_path):
    code, said = stream(forge, tmp_path / "out", f"hf:{ARXIV}", "column=text", "name=arxiv")
    assert code == 0, said
    assert len(documents(tmp_path / "out/arxiv")) >= len(documents(calm / "arxiv")) > 20
    code, said = stream(forge, tmp_path / "other", f"hf:{ARXIV}", "column=nope", "name=arxiv")
    assert code == 2 and "nope" in said and "text" in said and is_a_sentence(said), said


def test_a_resume_stays_at_the_commit_that_was_begun(forge, tmp_path, monkeypatch):
    """Someone pushes meanwhile: what `main` means now is not asked for, unless revision= says so."""
    asked, out = [], tmp_path / "out"

    def resolve(dataset, column, revision, *_):
        asked.append(revision)
        raise UserError("far enough")
    monkeypatch.setattr(prepare_data.hub, "any_dataset", resolve)
    command = [f"hf:{ARXIV}", "name=arxiv", *OPTIONS, f"out={out}"]
    prepare_data.main(command)
    code, said = forge.run(*command, sizes=SIZES, folder=str(out), fault="kill", at=40)
    assert code == -signal.SIGKILL, said
    commit = json.loads((out / "arxiv/parts/plan.json").read_text())["identity"]["revision"]
    prepare_data.main(command)
    prepare_data.main([*command, "revision=main"])
    prepare_data.main([f"hf:{ARXIV}2", *command[1:]])
    code, said = forge.run(*command, sizes=SIZES)
    assert code == 0, said
    prepare_data.main(command)
    assert asked == [None, commit, "main", None, commit] and len(commit) == 40


def test_a_budget_is_shared_by_weight(forge, tmp_path):
    code, said = stream(forge, tmp_path / "out", *SOURCES_ASKED, "tokens=150000")
    assert code == 0, said
    for name, share in {"fineweb_edu": 0.8, "python": 0.07, "c": 0.03, "arxiv": 0.1}.items():
        index = json.loads((tmp_path / "out" / name / "index.json").read_text())
        assert 150000 * share <= index["splits"]["train"]["tokens"] < 150000 * share + 4_000
