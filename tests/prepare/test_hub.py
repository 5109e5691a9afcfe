"""The command against a Hub on loopback that drops connections, stumbles and lies: retried, listed,
finished, the same bytes."""

import json
import random
import shutil
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.sources import SOURCES
from prepare import hub as hub_source
from prepare import sources
from prepare_data import main
from runtime import shards
from tests.conftest import process
from tests.helpers.hub_server import HubServer, write_repository
from tests.helpers.text_files import PACK
from tests.prepare.test_pipeline import content, found

ASKED = ["fineweb_edu", "python", "c", "arxiv"]
ARXIV, BAD = SOURCES["arxiv"].dataset, "arxiv-papers-0001.json.gz"
WORDS = [
    "the",
    "of",
    "energy",
    "matrix",
    "naïve",
    "Größe",
    "東京",
    "данные",
    "theorem",
    "🙂",
    "function",
    "return",
    "print",
]
OPTIONS = {"tokens": "10e6", "tokenizer": "byte", "val_share": 0.2, "processes": 1}


def make_hub(folder: Path, documents: int = 60):
    """Writes the repositories of configs/sources.py as they lie on the Hub, `documents` rows a
    file, and returns what lies in them: repository -> file -> rows. There are copies within and
    across the sources, empty documents, odd Unicode."""
    rng, hub, said = random.Random(3), {}, ["", " \n\t"]

    def text():
        if rng.random() < 1 / 7:
            return rng.choice(said)
        said.append(
            " ".join(rng.choices(WORDS, k=rng.randint(5, 300)))
            + rng.choice(["", "\n", "\r\n", "<|endoftext|>", "\0", "\u2028", "\x85 end"])
        )
        return said[-1]

    web, stack, arxiv = (SOURCES[name].dataset for name in ("fineweb_edu", "python", "arxiv"))
    hub[web] = {
        f"sample/100BT/{name}.parquet": [
            {"text": text(), "id": f"<urn:{name}:{n}>"} for n in range(documents)
        ]
        for name in ("000_00000", "000_00001", "001_00000", "001_00001")
    }
    hub[web]["sample/10BT/000_00000.parquet"] = [{"text": "of another sample", "id": "x"}]
    # As there: grouped by language, and a language may begin in mid-file. JSON, unlike parquet, can
    # say half a character.
    runs = [
        ("Markdown", 1),
        ("C", 1.5),
        ("HTML", 0.5),
        ("Python", 1.5),
        ("TypeScript", 0.5),
        ("Zig", 1),
    ]
    rows = [
        {
            "text": text() + ("\ud83d cut in half" if n % 20 == 7 else ""),
            "score": 3.2,
            "created": None,
            "metadata": {"language": language, "gha_language": rng.choice(["C", "Python", None])},
        }
        for language, files in runs
        for n in range(int(files * documents))
    ]
    hub[stack] = {
        f"stack-edu-{i:04d}.json.gz": rows[i * documents : (i + 1) * documents]
        for i in range(len(rows) // documents)
    }
    hub[arxiv] = {
        f"arxiv-papers-{i:04d}.json.gz": [
            {"id": f"{i}.{n}", "text": text()} for n in range(documents // 2)
        ]
        for i in range(3)
    }
    for repo, files in hub.items():
        write_repository(
            folder,
            repo,
            files,
            revision=next(s.revision for s in SOURCES.values() if s.dataset == repo),
        )
    return hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(folder) as server:
        server.known = make_hub(folder)
        yield server


@pytest.fixture(autouse=True)
def here(hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Small shards; all tries, none of the pauses between them; nothing that an earlier server
    said."""
    import datasets
    import huggingface_hub.utils._http as http
    from huggingface_hub import constants

    monkeypatch.setattr(shards, "SHARD_TOKENS", 20_000)
    monkeypatch.setattr(hub_source, "READ_WAITS", (0.1,) * 4)
    monkeypatch.setattr(hub_source, "ASK_WAITS", (0.1, 0.1))
    monkeypatch.setattr(http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda s: None}))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield
    hub.faults.clear()


def words(out, *names: object, **options: object):
    return [
        *(names or ASKED),
        *(f"{key}={value}" for key, value in (OPTIONS | {"out": out} | options).items()),
    ]


@pytest.fixture(scope="module")
def calm(hub, tmp_path_factory: pytest.TempPathFactory):
    """What the command makes as a user starts it, in two processes, with small shards."""
    base = tmp_path_factory.mktemp("calm")
    code = (
        "import sys, prepare_data, runtime.shards as s; s.SHARD_TOKENS = 20_000;"
        " sys.exit(prepare_data.main(sys.argv[1:]))"
    )
    done = process(
        "-c",
        code,
        *words(base / "out", processes=2),
        HF_ENDPOINT=hub.url,
        HF_HOME=str(base / "home"),
        HF_HUB_DISABLE_TELEMETRY="1",
        NO_PROXY="127.0.0.1",
    )
    assert done.returncode == 0, done.stderr
    return base / "out"


def documents(folder: Path):
    """The texts that byte-tokenised shards hold."""
    texts = "".join(chr(number) for ids in found(folder).values() for number in ids).split(
        chr(256)
    )[1:]
    return [text.encode("latin-1").decode() for text in texts]


def test_the_mixture_is_what_the_files_hold(hub, calm):
    """Each source's documents, once, by language, whatever order the files were taken in."""
    seen = set()
    for name in ASKED:
        source = SOURCES[name]
        made = documents(calm / name)
        rows = [
            row
            for file, rows in hub.known[source.dataset].items()
            for row in rows
            if "10BT" not in file
        ]
        language = {"python": "Python", "c": "C"}.get(name)
        texts = [
            row["text"]
            for row in rows
            if language is None or row["metadata"]["language"] == language
        ]
        wanted = {
            text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            for text in texts
            if text.strip()
        }
        assert set(made) == wanted - seen and len(made) == len(set(made))
        seen |= wanted
        index = json.loads((calm / name / "index.json").read_text())
        assert index["license"] and index["revision"] == source.revision and index["is_whole"]
        assert index["files"] == sorted(
            index["files"], key=lambda path: blake2b(path.encode(), digest_size=8).digest()
        )
        if language:  # the files that hold none of it are not read
            first = 2 if name == "python" else 0
            assert sorted(index["files"]) == [
                f"stack-edu-{n:04d}.json.gz" for n in range(first, first + 3)
            ]


@pytest.mark.parametrize(
    "kind, times, after", [("drop", 8, 2_000), ("503", 8, 0), ("403", 1, 0), ("short", 3, 3_000)]
)
def test_a_network_that_stumbles_costs_time_alone(
    hub, calm, tmp_path: Path, kind: str, times: int, after: int
):
    """huggingface_hub itself asks six times. A 403 without the Hub's own code is no refusal."""
    for name, pattern in ("fineweb_edu", "*.parquet"), ("python", "*3.json.gz"):
        for path in sorted((hub.folder / SOURCES[name].dataset).rglob(pattern))[:2]:
            hub.fault(path.relative_to(hub.folder).as_posix(), kind, times, after)
    assert main(words(tmp_path / "out")) == 0
    assert content(tmp_path / "out") == content(calm), "no row was read twice"


@pytest.mark.parametrize("kind", ["truncate", "corrupt", "503"])
def test_a_file_that_cannot_be_read_is_listed_and_tried_again(
    hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
):
    out = tmp_path / "out"
    hub.fault(f"{ARXIV}/{BAD}", kind, after=2_000)
    assert main(words(out, "arxiv")) == 1
    said = capsys.readouterr().err
    assert (
        "1 of 3 input files could not be read" in said
        and BAD in said.partition("leave them out:\n  ")[2]
    )
    assert said.count("it is opened again") == (kind != "503"), (
        "a damaged file, unlike the network, is tried twice"
    )
    hub.faults.clear()
    assert main(words(out, "arxiv")) == main(words(tmp_path / "calm", "arxiv")) == 0
    hub.fault(f"{ARXIV}/{BAD}", "corrupt", 1, 3_500)
    assert (
        main(words(tmp_path / "once", "arxiv")) == 0
        and "after 0 rows" not in capsys.readouterr().err
    )
    assert content(out) == content(tmp_path / "once") == content(tmp_path / "calm")


@pytest.mark.parametrize("kind", ["moved", "gated", "forbidden"])
def test_a_data_set_that_is_gone_is_a_sentence(
    hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
):
    hub.fault(ARXIV, kind)
    assert main(words(tmp_path / "out", "arxiv")) == 2
    said = capsys.readouterr().err
    assert ARXIV in said and said.count("\n") == 1 and "Traceback" not in said
    assert main(["--check-sources", "fineweb_edu", "arxiv", "c"]) == 2
    out, said = capsys.readouterr()
    assert ARXIV in said and SOURCES["fineweb_edu"].dataset in out and "c: " in out


def test_check_sources_shows_a_record_or_says_that_the_hub_is_silent(
    hub, capsys: pytest.CaptureFixture[str]
):
    assert main(["--check-sources"]) == 0
    out = capsys.readouterr().out
    assert (
        "fineweb_edu: HuggingFaceFW/fineweb-edu@87f0" in out
        and "  4 files, 0.00 GB" in out
        and len(out.splitlines()) == 12
    )
    # too short to say its language
    hub.fault(f"{SOURCES['c'].dataset}/stack-edu-0000.json.gz", "truncate", after=300)
    assert (
        main(["--check-sources", "c"]) == 1
        and "0000.json.gz is damaged or was cut short" in capsys.readouterr().err
    )
    hub.fault(ARXIV, "500")
    assert (
        main(["--check-sources", "arxiv"]) == 1
        and "gives no sound answer about" in capsys.readouterr().err
    )


@pytest.mark.parametrize("form", [".parquet", ".jsonl", ".json.zst"])
def test_any_data_set_of_the_hub(
    hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
):
    rows = [{"body": f"text {n} " * 9, "more": {"n": str(n)}} for n in range(60)]
    rows += [{"body": None, "more": {"n": ""}}, {"more": {"n": ""}}]
    write_repository(
        hub.folder, "own/Set", {f"train-{i}{form}": rows[i::2] for i in range(2)}, license="mit"
    )
    assert main(words(tmp_path / "out", "hf:own/Set", column="body", files=f"train-*{form}")) == 0
    index = json.loads((tmp_path / "out/set/index.json").read_text())
    assert sorted(documents(tmp_path / "out/set")) == sorted(row["body"] for row in rows[:60])
    assert (index["license"], index["empty"], len(index["files"]), len(index["revision"])) == (
        "mit",
        2,
        2,
        40,
    )
    some = sources.Source(
        dataset="own/Set",
        revision=index["revision"],
        license="",
        files=f"train-*{form}",
        column="body",
        keep={"more.n": ("0", "3")},
    )
    # 3 is in a file that begins with another number
    for grouped_by, numbers in ((None, (0, 3)), ("more.n", (0,))):
        files = hub_source.list_files(replace(some, grouped_by=grouped_by))
        assert {row.texts[0] for file in files for row in file.read(sources.Reading())} == {
            f"text {n} " * 9 for n in numbers
        }
    write_repository(hub.folder, "own/Set", {"only.test.jsonl": rows})
    for more, sentence in (
        ({}, "give files= a pattern"),
        ({"column": "nope", "files": f"train-*{form}"}, "only body, more.n: set column="),
        ({"column": "more", "files": f"train-*{form}"}, "not text"),
        ({"files": "data/*.csv"}, "has no file data/*.csv"),
        ({"files": "*"}, "README.md cannot be read"),
        ({"revision": "nope"}, "RevisionNotFound"),
    ):
        assert main(words(tmp_path / "other", "hf:own/Set", **more)) == 2
        said = capsys.readouterr().err
        assert sentence in said and "Traceback" not in said, said
    shutil.rmtree(hub.folder / "own")


def test_the_train_split_is_found_and_a_resume_stays_at_its_commit(
    hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Someone pushes meanwhile: what `main` means now is not asked for, unless revision= says
    so."""
    files = {
        f"data/{split}-{i}.jsonl": [{"text": f"{split} {i} {n} " * 9} for n in range(40)]
        for split in ("train", "test")
        for i in range(2)
    }
    write_repository(hub.folder, "own/Pushed", files)
    old, pinned = "a" * 40, hub.folder / "own/Pushed/.revision"
    pinned.write_text(old)
    hub.fault("own/Pushed/data/train-1.jsonl", "truncate", after=2_000)
    assert main(words(tmp_path, "hf:own/Pushed", name="x")) == 1
    hub.faults.clear()
    pinned.write_text("b" * 40)
    assert main(words(tmp_path, "hf:own/Pushed", name="x")) == 2, (
        "the server has forgotten the old commit"
    )
    assert f"own/Pushed@{old}" in capsys.readouterr().err
    pinned.write_text(old)
    assert main(words(tmp_path, "hf:own/Pushed", name="x")) == 0
    assert sorted(documents(tmp_path / "x")) == sorted(
        row["text"] for name in files if "train" in name for row in files[name]
    )


def test_a_budget_is_shared_by_weight(tmp_path: Path):
    assert main(words(tmp_path, tokens=150_000)) == 0
    for name, share in {"fineweb_edu": 0.8, "python": 0.07, "c": 0.03, "arxiv": 0.1}.items():
        index = json.loads((tmp_path / name / "index.json").read_text())
        assert 150_000 * share <= index["splits"]["train"]["tokens"] < 150_000 * share + 4_000


def write_file(folder: Path, repo, name: str, content: bytes):
    path = folder / repo / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    write_repository(folder, repo, {})


LAYOUTS = {
    "a/array.json": lambda texts: json.dumps([{"text": text} for text in texts], indent=1).encode(),
    "b/lines.json.gz": lambda texts: PACK[".gz"](
        "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    ),
    "c/array.json.zst": lambda texts: PACK[".zst"](
        json.dumps([{"text": text} for text in texts]).encode()
    ),
    "d/stories.txt": lambda texts: "\n<|endoftext|>\n".join(texts).encode(),
}


@pytest.mark.parametrize(
    "pattern, chosen", [("{a,b}/*", "ab"), ("{a,{c,d}}/{array,stories}.*", "acd"), ("d/*.txt", "d")]
)
def test_layouts_of_the_hub_by_a_pattern_with_braces(
    hub, tmp_path: Path, pattern: str, chosen: str
):
    texts = {name: [f"{name} {n} " * 9 for n in range(40)] for name in LAYOUTS}
    for name, pack in LAYOUTS.items():
        write_file(hub.folder, "own/Layouts", name, pack([text.strip() for text in texts[name]]))
    assert main(words(tmp_path, "hf:own/Layouts", files=pattern)) == 0
    wanted = [text.strip() for name in LAYOUTS if name[0] in chosen for text in texts[name]]
    assert sorted(documents(tmp_path / "layouts")) == sorted(wanted)


@pytest.mark.parametrize("odd", ['{"text": 3}', "no json"])
def test_an_odd_row_of_the_hub_is_named_or_skipped(
    hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: str
):
    """A line that is no JSON may be the transfer's fault: the file is opened again before it is
    skipped."""
    rows = [json.dumps({"text": f"text {n} " * 9}) for n in range(60)]
    write_file(hub.folder, "own/Odd", "a.jsonl", "\n".join([*rows[:30], odd, *rows[30:]]).encode())
    assert main(words(tmp_path, "hf:own/Odd", files="a.jsonl")) == (1 if odd == "no json" else 2)
    assert "a.jsonl:31" in capsys.readouterr().err
    assert main(words(tmp_path, "hf:own/Odd", files="a.jsonl", skip_bad="true")) == 0
    assert ("it is opened again" in capsys.readouterr().err) is (odd == "no json")
    assert sorted(documents(tmp_path / "odd")) == sorted(json.loads(row)["text"] for row in rows)
    assert shards.read_index(tmp_path / "odd").odd_rows[0]["rows"] == 1
