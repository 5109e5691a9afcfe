"""The command against a Hub on loopback that drops connections, stumbles and lies: retried, listed,
finished, the same bytes."""

import io
import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.sources import SOURCES
from prepare import hub as hub_source
from prepare import sources
from prepare_data import main
from runtime import shards
from tests.conftest import process
from tests.helpers.hub_server import HubServer, write_repository
from tests.helpers.text_files import PACK
from tests.prepare.test_pipeline import content, ids_in

ASKED = ["fineweb_edu", "python", "c", "arxiv"]
LANGUAGES = {"python": "Python", "c": "C"}  # of the sources that are part of a data set
WEB, STACK, ARXIV = (SOURCES[name].dataset for name in ("fineweb_edu", "python", "arxiv"))
BAD = "arxiv-papers-0001.json.gz"
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
ENDS = ["", "\n", "\r\n", "<|endoftext|>", "\0", "\u2028", "\x85 end"]
OPTIONS = {"tokens": "10e6", "tokenizer": "byte", "val_share": 0.2, "processes": 1}

Row = dict[str, Any]


# ----------------------------------------------------------------------- what lies on the Hub


@dataclass
class Repositories:
    """Those of configs/sources.py as they lie on the Hub, with copies within and across the
    sources, empty documents, odd Unicode."""

    folder: Path
    rows: dict[str, dict[str, list[Row]]]  # of each file of each repository


class Texts:
    """Random texts; one in seven is empty or came before."""

    def __init__(self) -> None:
        self.rng = random.Random(3)
        self.earlier = ["", " \n\t"]

    def draw(self) -> str:
        if self.rng.random() < 1 / 7:
            return self.rng.choice(self.earlier)
        length = self.rng.randint(5, 300)
        text = " ".join(self.rng.choices(WORDS, k=length)) + self.rng.choice(ENDS)
        self.earlier.append(text)
        return text


def web_files(texts: Texts, n_rows: int) -> dict[str, list[Row]]:
    files = {}
    for name in ("000_00000", "000_00001", "001_00000", "001_00001"):
        rows = [{"text": texts.draw(), "id": f"<urn:{name}:{n}>"} for n in range(n_rows)]
        files[f"sample/100BT/{name}.parquet"] = rows
    files["sample/10BT/000_00000.parquet"] = [{"text": "of another sample", "id": "x"}]
    return files


def stack_files(texts: Texts, n_rows: int) -> dict[str, list[Row]]:
    """As there: grouped by language, and a language may begin in mid-file."""
    files_of_language = {
        "Markdown": 1,
        "C": 1.5,
        "HTML": 0.5,
        "Python": 1.5,
        "TypeScript": 0.5,
        "Zig": 1,
    }
    rows = []
    for language, n_files in files_of_language.items():
        for n in range(int(n_files * n_rows)):
            # JSON, unlike parquet, can hold half a character
            half = "\ud83d cut in half" if n % 20 == 7 else ""
            text = texts.draw() + half
            of_repository = texts.rng.choice(["C", "Python", None])
            metadata = {"language": language, "gha_language": of_repository}
            rows.append({"text": text, "score": 3.2, "created": None, "metadata": metadata})
    return {
        f"stack-edu-{i:04d}.json.gz": rows[i * n_rows : (i + 1) * n_rows]
        for i in range(len(rows) // n_rows)
    }


def arxiv_files(texts: Texts, n_rows: int) -> dict[str, list[Row]]:
    files = {}
    for i in range(3):
        rows = [{"id": f"{i}.{n}", "text": texts.draw()} for n in range(n_rows)]
        files[f"arxiv-papers-{i:04d}.json.gz"] = rows
    return files


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Repositories:
    folder = tmp_path_factory.mktemp("hub")
    texts = Texts()
    rows = {
        WEB: web_files(texts, 60),
        STACK: stack_files(texts, 60),
        ARXIV: arxiv_files(texts, 30),
    }
    for repository, files in rows.items():
        (revision,) = {
            source.revision for source in SOURCES.values() if source.dataset == repository
        }
        write_repository(folder, repository, files, revision=revision)
    return Repositories(folder, rows)


@pytest.fixture(scope="module")
def hub(repositories: Repositories) -> Iterator[HubServer]:
    with HubServer(repositories.folder) as server:
        yield server


def write_file(hub: HubServer, repository: str, name: str, data: bytes) -> None:
    path = hub.folder / repository / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    write_repository(hub.folder, repository, {})


# ------------------------------------------------------------------------------- how it is asked


@contextmanager
def connected(hub: HubServer, cache: Path) -> Iterator[None]:
    """Small shards; all tries, none of the pauses between them; nothing that an earlier server
    said."""
    import datasets
    import huggingface_hub.utils._http as http
    from huggingface_hub import constants

    file_url = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    without_pauses = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", 20_000)
        patch.setattr(hub_source, "READ_WAITS", (0.1,) * 4)
        patch.setattr(hub_source, "ASK_WAITS", (0.1, 0.1))
        patch.setattr(http, "time", without_pauses)
        patch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", file_url)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        try:
            yield
        finally:
            hub.faults.clear()


@pytest.fixture(autouse=True)
def connection(hub: HubServer, tmp_path: Path) -> Iterator[None]:
    """Each test is connected(); a fixture of the module connects by itself."""
    with connected(hub, tmp_path / "cache"):
        yield


def arguments(out: Path, *names: str, **options: object) -> list[str]:
    """Of prepare_data.py, which makes the sources of ASKED where none is named."""
    options = OPTIONS | {"out": out} | options
    return [*(names or ASKED), *(f"{key}={value}" for key, value in options.items())]


def exit_and_stderr(words: list[str]) -> tuple[int, str]:
    """What the command returns and prints, where capsys, which is a test's own, does not serve."""
    with redirect_stderr(io.StringIO()) as stderr:
        code = main(words)
    return code, stderr.getvalue()


def documents(folder: Path) -> list[str]:
    """The texts that byte-tokenised shards hold."""
    texts = []
    for ids in ids_in(folder).values():
        joined = "".join(map(chr, ids))
        texts += joined.split(chr(256))[1:]
    return [text.encode("latin-1").decode() for text in texts]


def read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


# --------------------------------------------------------------------------------- the mixture


@pytest.fixture(scope="module")
def calm(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command makes as a user starts it, in two processes, with small shards."""
    base = tmp_path_factory.mktemp("calm")
    code = (
        "import sys, prepare_data, runtime.shards as s; s.SHARD_TOKENS = 20_000;"
        " sys.exit(prepare_data.main(sys.argv[1:]))"
    )
    done = process(
        "-c",
        code,
        *arguments(base / "out", processes=2),
        HF_ENDPOINT=hub.url,
        HF_HOME=str(base / "home"),
        HF_HUB_DISABLE_TELEMETRY="1",
        NO_PROXY="127.0.0.1",
    )
    assert done.returncode == 0, done.stderr
    return base / "out"


def texts_of(repositories: Repositories, name: str) -> set[str]:
    """Those that the files of a source hold, empty ones left out, half characters replaced."""
    texts = set()
    for file, rows in repositories.rows[SOURCES[name].dataset].items():
        if "10BT" in file:
            continue
        for row in rows:
            is_wanted = name not in LANGUAGES or row["metadata"]["language"] == LANGUAGES[name]
            if is_wanted and row["text"].strip():
                encoded = row["text"].encode("utf-16-le", "surrogatepass")
                texts.add(encoded.decode("utf-16-le", "replace"))
    return texts


@pytest.mark.parametrize("name", ASKED)
def test_a_source_holds_the_texts_of_its_files_that_no_earlier_one_has(
    repositories: Repositories, calm: Path, name: str
) -> None:
    earlier = set()
    for other in ASKED[: ASKED.index(name)]:
        earlier |= texts_of(repositories, other)
    assert set(documents(calm / name)) == texts_of(repositories, name) - earlier


@pytest.mark.parametrize("name", ASKED)
def test_no_text_lies_twice_in_a_source(calm: Path, name: str) -> None:
    texts = documents(calm / name)
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize("name", ASKED)
def test_the_index_states_the_licence_and_the_commit(calm: Path, name: str) -> None:
    index = read_index(calm / name)
    assert index["license"]
    assert index["revision"] == SOURCES[name].revision


@pytest.mark.parametrize("name", ASKED)
def test_a_source_below_its_budget_is_whole(calm: Path, name: str) -> None:
    assert read_index(calm / name)["is_whole"]


def hash_of_path(path: str) -> bytes:
    return blake2b(path.encode(), digest_size=8).digest()


@pytest.mark.parametrize("name", ASKED)
def test_files_are_taken_in_the_order_of_the_hashes_of_their_names(calm: Path, name: str) -> None:
    files = read_index(calm / name)["files"]
    assert files == sorted(files, key=hash_of_path)


@pytest.mark.parametrize("name, first", [("python", 2), ("c", 0)])
def test_files_that_hold_none_of_the_language_are_not_read(
    calm: Path, name: str, first: int
) -> None:
    expected = [f"stack-edu-{n:04d}.json.gz" for n in range(first, first + 3)]
    assert sorted(read_index(calm / name)["files"]) == expected


def test_a_budget_is_shared_by_weight(tmp_path: Path) -> None:
    assert main(arguments(tmp_path, tokens=150_000)) == 0
    for name, share in {"fineweb_edu": 0.8, "python": 0.07, "c": 0.03, "arxiv": 0.1}.items():
        budget = 150_000 * share
        tokens = read_index(tmp_path / name)["splits"]["train"]["tokens"]
        assert budget <= tokens < budget + 4_000


# ---------------------------------------------------------------------- faults of the network


@pytest.mark.parametrize(
    "kind, times, after", [("drop", 8, 2_000), ("503", 8, 0), ("403", 1, 0), ("short", 3, 3_000)]
)
def test_a_network_that_stumbles_costs_time_alone(
    hub: HubServer, calm: Path, tmp_path: Path, kind: str, times: int, after: int
) -> None:
    """No row is read twice. huggingface_hub itself asks six times. A 403 without the Hub's own code
    is no refusal."""
    for repository, pattern in (WEB, "*.parquet"), (STACK, "*3.json.gz"):
        for path in sorted((hub.folder / repository).rglob(pattern))[:2]:
            hub.fault(path.relative_to(hub.folder).as_posix(), kind, times, after)
    assert main(arguments(tmp_path / "out")) == 0
    assert content(tmp_path / "out") == content(calm)


@dataclass
class Unreadable:
    """What a command left and said that could not read BAD, one of three files."""

    kind: str  # of the fault
    out: Path
    stderr: str


@pytest.fixture(scope="module", params=["truncate", "corrupt", "503"])
def unreadable(
    request: pytest.FixtureRequest, hub: HubServer, tmp_path_factory: pytest.TempPathFactory
) -> Unreadable:
    base = tmp_path_factory.mktemp("unreadable")
    with connected(hub, base / "cache"):
        hub.fault(f"{ARXIV}/{BAD}", request.param, after=2_000)
        code, stderr = exit_and_stderr(arguments(base / "out", "arxiv"))
    assert code == 1
    return Unreadable(request.param, base / "out", stderr)


@pytest.fixture(scope="module")
def calm_arxiv(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the same command makes of a Hub without faults."""
    base = tmp_path_factory.mktemp("calm_arxiv")
    with connected(hub, base / "cache"):
        assert main(arguments(base / "out", "arxiv")) == 0
    return content(base / "out")


def test_a_file_that_cannot_be_read_is_listed(unreadable: Unreadable) -> None:
    assert "1 of 3 input files could not be read" in unreadable.stderr
    assert BAD in unreadable.stderr.partition("leave them out:\n  ")[2]


def test_a_damaged_file_is_opened_again_where_one_without_an_answer_is_not(
    unreadable: Unreadable,
) -> None:
    reopenings = 0 if unreadable.kind == "503" else 1
    assert unreadable.stderr.count("it is opened again") == reopenings


def test_a_file_that_could_not_be_read_is_tried_again(
    unreadable: Unreadable, calm_arxiv: dict[str, bytes]
) -> None:
    """The next command finds it sound."""
    assert main(arguments(unreadable.out, "arxiv")) == 0
    assert content(unreadable.out) == calm_arxiv


def test_a_file_that_is_damaged_once_is_read_on_where_it_broke(
    hub: HubServer,
    calm_arxiv: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.fault(f"{ARXIV}/{BAD}", "corrupt", 1, 3_500)
    assert main(arguments(tmp_path / "once", "arxiv")) == 0
    assert "after 0 rows" not in capsys.readouterr().err
    assert content(tmp_path / "once") == calm_arxiv


@pytest.mark.parametrize("kind", ["moved", "gated", "forbidden"])
def test_a_data_set_that_is_gone_is_a_sentence(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    hub.fault(ARXIV, kind)
    assert main(arguments(tmp_path / "out", "arxiv")) == 2
    stderr = capsys.readouterr().err
    assert ARXIV in stderr
    assert stderr.count("\n") == 1
    assert "Traceback" not in stderr


@pytest.mark.parametrize("kind", ["moved", "gated", "forbidden"])
def test_check_sources_names_the_data_set_that_is_gone_and_goes_on(
    hub: HubServer, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    hub.fault(ARXIV, kind)
    assert main(["--check-sources", "fineweb_edu", "arxiv", "c"]) == 2
    stdout, stderr = capsys.readouterr()
    assert ARXIV in stderr
    assert WEB in stdout
    assert "c: " in stdout


def test_check_sources_shows_the_size_and_a_record_of_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--check-sources"]) == 0
    stdout = capsys.readouterr().out
    assert "fineweb_edu: HuggingFaceFW/fineweb-edu@87f0" in stdout
    assert "  4 files, 0.00 GB" in stdout
    assert len(stdout.splitlines()) == 12


def test_check_sources_names_a_file_too_short_to_hold_its_language(
    hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fault(f"{STACK}/stack-edu-0000.json.gz", "truncate", after=300)
    assert main(["--check-sources", "c"]) == 1
    assert "0000.json.gz is damaged or was cut short" in capsys.readouterr().err


def test_check_sources_says_that_the_hub_is_silent(
    hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fault(ARXIV, "500")
    assert main(["--check-sources", "arxiv"]) == 1
    assert "gives no sound answer about" in capsys.readouterr().err


# ------------------------------------------------------------------------ any data set of the Hub


@dataclass
class OwnSet:
    """The data set own/Set, prepared from its column body, and own/Mixed, which has a file of
    another form besides."""

    form: str  # of the files: what their names end with
    out: Path

    @property
    def files(self) -> str:
        """Pattern of the files' names."""
        return f"train-*{self.form}"

    @property
    def index(self) -> dict[str, Any]:
        return read_index(self.out / "set")


def body(n: int) -> str:
    return f"text {n} " * 9


@pytest.fixture(scope="module", params=[".parquet", ".jsonl", ".json.zst"])
def own_set(
    request: pytest.FixtureRequest, hub: HubServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnSet]:
    base = tmp_path_factory.mktemp("own_set")
    own = OwnSet(request.param, base / "out")
    rows: list[Row] = [{"body": body(n), "more": {"n": str(n)}} for n in range(60)]
    rows += [{"body": None, "more": {"n": ""}}, {"more": {"n": ""}}]
    files = {f"train-{i}{own.form}": rows[i::2] for i in range(2)}
    write_repository(hub.folder, "own/Set", files, license="mit")
    write_repository(hub.folder, "own/Mixed", {**files, "only.test.jsonl": rows})
    with connected(hub, base / "cache"):
        assert main(arguments(own.out, "hf:own/Set", column="body", files=own.files)) == 0
    yield own
    # the files of the next form are to be the only ones
    shutil.rmtree(hub.folder / "own/Set")
    shutil.rmtree(hub.folder / "own/Mixed")


def test_any_data_set_of_the_hub_is_prepared_from_a_column(own_set: OwnSet) -> None:
    assert sorted(documents(own_set.out / "set")) == sorted(body(n) for n in range(60))


def test_the_index_of_any_data_set_says_what_it_was_made_of(own_set: OwnSet) -> None:
    index = own_set.index
    assert index["license"] == "mit"
    assert index["empty"] == 2
    assert len(index["files"]) == 2
    assert len(index["revision"]) == 40


@pytest.mark.parametrize(
    "grouped_by, numbers",
    [
        (None, (0, 3)),
        # 3 is in a file that begins with another number
        ("more.n", (0,)),
    ],
)
def test_rows_are_kept_by_the_value_of_a_nested_column(
    own_set: OwnSet, grouped_by: str | None, numbers: tuple[int, ...]
) -> None:
    source = sources.Source(
        dataset="own/Set",
        revision=own_set.index["revision"],
        license="",
        files=own_set.files,
        column="body",
        keep={"more.n": ("0", "3")},
    )
    texts = set()
    for file in hub_source.list_files(replace(source, grouped_by=grouped_by)):
        texts |= {row.texts[0] for row in file.read(sources.Reading())}
    assert texts == {body(n) for n in numbers}


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({}, "give files= a pattern"),
        ({"column": "nope", "files": "train-*{form}"}, "only body, more.n: set column="),
        ({"column": "more", "files": "train-*{form}"}, "not text"),
        ({"files": "data/*.csv"}, "has no file data/*.csv"),
        ({"files": "*"}, "README.md cannot be read"),
        ({"revision": "nope"}, "RevisionNotFound"),
    ],
)
def test_options_that_do_not_fit_the_data_set_get_a_sentence(
    own_set: OwnSet,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, str],
    sentence: str,
) -> None:
    fitted = {key: value.format(form=own_set.form) for key, value in options.items()}
    assert main(arguments(tmp_path / "other", "hf:own/Mixed", **fitted)) == 2
    stderr = capsys.readouterr().err
    assert sentence in stderr
    assert "Traceback" not in stderr


@dataclass
class Pushed:
    """A data set to which someone pushed while it was prepared."""

    out: Path
    files: dict[str, list[Row]]
    exit_codes: list[int]  # cut off; while the server has forgotten the first commit; with it again
    refusal: str  # stderr of the second command


FIRST_COMMIT = "a" * 40


@pytest.fixture(scope="module")
def pushed(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    base = tmp_path_factory.mktemp("pushed")
    files = {}
    for split in ("train", "test"):
        for i in range(2):
            rows = [{"text": f"{split} {i} {n} " * 9} for n in range(40)]
            files[f"data/{split}-{i}.jsonl"] = rows
    write_repository(hub.folder, "own/Pushed", files, revision=FIRST_COMMIT)
    revision = hub.folder / "own/Pushed/.revision"
    command = arguments(base / "out", "hf:own/Pushed", name="x")
    with connected(hub, base / "cache"):
        hub.fault("own/Pushed/data/train-1.jsonl", "truncate", after=2_000)
        cut_off, _ = exit_and_stderr(command)
        hub.faults.clear()
        revision.write_text("b" * 40)
        refused, refusal = exit_and_stderr(command)
        revision.write_text(FIRST_COMMIT)
        finished, _ = exit_and_stderr(command)
    return Pushed(base / "out", files, [cut_off, refused, finished], refusal)


def test_a_resume_stays_at_its_commit(pushed: Pushed) -> None:
    """What `main` means now is not asked for, unless revision= says so."""
    assert pushed.exit_codes == [1, 2, 0]
    assert f"own/Pushed@{FIRST_COMMIT}" in pushed.refusal


def test_the_train_split_is_found(pushed: Pushed) -> None:
    texts = []
    for name, rows in pushed.files.items():
        if "train" in name:
            texts += [row["text"] for row in rows]
    assert sorted(documents(pushed.out / "x")) == sorted(texts)


def json_array(texts: list[str], indent: int | None = None) -> bytes:
    return json.dumps([{"text": text} for text in texts], indent=indent).encode()


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


LAYOUTS = ("a/array.json", "b/lines.json.gz", "c/array.json.zst", "d/stories.txt")


def layout_texts(name: str) -> list[str]:
    """Those of a file of own/Layouts."""
    return [(f"{name} {n} " * 9).strip() for n in range(40)]


@pytest.fixture(scope="module")
def layouts(hub: HubServer) -> None:
    """The data set own/Layouts, each file of which has another layout."""
    array, packed_lines, packed_array, stories = map(layout_texts, LAYOUTS)
    contents = (
        json_array(array, indent=1),
        PACK[".gz"](json_lines(packed_lines)),
        PACK[".zst"](json_array(packed_array)),
        "\n<|endoftext|>\n".join(stories).encode(),
    )
    for name, data in zip(LAYOUTS, contents, strict=True):
        write_file(hub, "own/Layouts", name, data)


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize(
    "pattern, folders",
    [("{a,b}/*", "ab"), ("{a,{c,d}}/{array,stories}.*", "acd"), ("d/*.txt", "d")],
)
def test_layouts_of_the_hub_by_a_pattern_with_braces(
    tmp_path: Path, pattern: str, folders: str
) -> None:
    assert main(arguments(tmp_path, "hf:own/Layouts", files=pattern)) == 0
    texts = []
    for name in LAYOUTS:
        if name[0] in folders:
            texts += layout_texts(name)
    assert sorted(documents(tmp_path / "layouts")) == sorted(texts)


@dataclass
class OddRow:
    """A file whose 31st line is odd, and two commands on it, of which the second may skip it."""

    line: str
    texts: list[str]  # of the other lines
    out: Path
    exit_code: int  # of the first command
    stderr: str
    stderr_of_skipping: str

    @property
    def is_broken(self) -> bool:
        """A line that is no JSON may be the transfer's fault."""
        return self.line == "no json"


@pytest.fixture(scope="module", params=['{"text": 3}', "no json"])
def odd_row(
    request: pytest.FixtureRequest, hub: HubServer, tmp_path_factory: pytest.TempPathFactory
) -> OddRow:
    base = tmp_path_factory.mktemp("odd_row")
    texts = [body(n) for n in range(60)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines.insert(30, request.param)
    write_file(hub, "own/Odd", "a.jsonl", "\n".join(lines).encode())
    command = arguments(base / "out", "hf:own/Odd", files="a.jsonl")
    with connected(hub, base / "cache"):
        code, stderr = exit_and_stderr(command)
        code_of_skipping, stderr_of_skipping = exit_and_stderr([*command, "skip_bad=true"])
    assert code_of_skipping == 0, stderr_of_skipping
    return OddRow(request.param, texts, base / "out", code, stderr, stderr_of_skipping)


def test_an_odd_row_of_the_hub_is_named(odd_row: OddRow) -> None:
    assert odd_row.exit_code == (1 if odd_row.is_broken else 2)
    assert "a.jsonl:31" in odd_row.stderr


def test_an_odd_row_of_the_hub_is_skipped_on_request(odd_row: OddRow) -> None:
    assert sorted(documents(odd_row.out / "odd")) == sorted(odd_row.texts)


def test_the_index_counts_the_odd_rows(odd_row: OddRow) -> None:
    assert shards.read_index(odd_row.out / "odd").odd_rows[0]["rows"] == 1


def test_a_file_with_a_broken_line_is_opened_again_before_that_is_skipped(
    odd_row: OddRow,
) -> None:
    is_opened_again = "it is opened again" in odd_row.stderr_of_skipping
    assert is_opened_again is odd_row.is_broken
