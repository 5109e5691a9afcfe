"""Data sets of the Hub: the production calls of datasets and huggingface_hub against a server on loopback, and its faults."""

import contextlib
import errno
import gzip
import json
import os
import random
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from hashlib import blake2b
from types import SimpleNamespace

import pytest
import zstandard

from configs.sources import SOURCES
from prepare import hub, hub_files
from prepare.hub_files import HubFile
from prepare.source import BadFile
from runtime.cli import UserError
from runtime.tokenizer import clean
from tests.conftest import ROOT
from tests.hub_layout import make_hub, write_repository
from tests.hub_server import HubServer, commit

PATIENCE = hub_files.WAITS
PACK = {".gz": lambda data: gzip.compress(data, mtime=0), ".zst": zstandard.compress}
STACK, WEB, ARXIV = (SOURCES[name].dataset for name in ("python", "fineweb_edu", "arxiv"))


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    return folder, make_hub(folder)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    """All tries, none of the pauses between them, neither ours nor huggingface_hub's."""
    import huggingface_hub.utils._http as http
    waited = []
    monkeypatch.setattr(http, "time", SimpleNamespace(**{**vars(time), "sleep": waited.append}))
    monkeypatch.setattr(hub_files, "WAITS", (0, 0, 0, 0))
    monkeypatch.setattr(hub, "WAITS", (0, 0))
    return waited


def point_at(url, monkeypatch):
    """What HF_ENDPOINT does, after the packages were imported."""
    import datasets
    from huggingface_hub import constants
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    """Nothing of another test, or of this machine, answers for the server; nothing is left in the home."""
    import datasets
    from huggingface_hub import HfFileSystem, constants
    HfFileSystem.clear_instance_cache()     # file sizes by endpoint: a later server may get an earlier one's port
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path / "cache"))


@pytest.fixture
def server(laid_out, monkeypatch):
    with HubServer(laid_out[0]) as server:
        point_at(server.url, monkeypatch)
        yield server


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A server of one data set that the test lays out: own({name: rows}) -> (server, function from name to HubFile)."""
    servers = []

    def serve(files, column="text", keep=None):
        if files:
            write_repository(tmp_path, "own/set", files)
        server = HubServer(tmp_path)
        servers.append(server.__enter__())
        point_at(server.url, monkeypatch)
        return server, lambda name: HubFile(name, None, "own/set", commit(tmp_path, "own/set"), column, keep or {})
    yield serve
    for server in servers:
        server.__exit__()


def documents(batches):
    """Bytes that are no UTF-8 are decoded as the pool does it."""
    out = []
    for batch in batches:
        assert len(batch.text) == batch.ends[-1] and len(batch.ends)
        out += [batch.text[begin:end].decode(errors="replace").encode()
                for begin, end in zip([0, *batch.ends[:-1]], batch.ends, strict=True)]
    return out


def expected(rows, value):
    """The texts of the rows wanted, by plain Python."""
    def at(row, path):
        for name in path.split("."):
            row = row[name]
        return row
    return [clean(row[value.column] or "").encode() for row in rows
            if all(at(row, path) in values for path, values in value.keep.items())]


# ---------------------------------------------------------------------------------------------------------- what is read

@pytest.mark.parametrize("name", SOURCES)
def test_each_source_gives_its_documents_from_any_row_on(name, laid_out, server):
    value = SOURCES[name]
    files = hub.hub_source(name, value).files(None)
    assert files
    for file in files:
        rows = laid_out[1][value.dataset][file.name]
        for skip in {0, 1, 63, 64, 65, len(rows) - 1, len(rows), len(rows) + 9}:
            assert documents(file.read(skip)) == expected(rows[skip:], value), skip


def test_rows_of_a_batch_are_where_the_next_run_goes_on(laid_out, server, monkeypatch):
    monkeypatch.setattr(hub_files, "BATCH_BYTES", 2_000)
    monkeypatch.setattr(hub_files, "LINES", 1_000)
    value = SOURCES["c"]
    file = next(f for f in hub.hub_source("c", value).files(None) if f.name.endswith("0002.json.gz"))    # half of it is C
    batches, whole = list(file.read(0)), expected(laid_out[1][STACK][file.name], value)
    assert len(batches) > 10
    done = []
    for batch in batches:
        assert len(batch.text) < 2_000 + 3 * 3_000, "a batch ends soon after BATCH_BYTES"
        done += documents([batch])
        assert done + documents(file.read(batch.rows)) == whole


def test_a_source_lists_what_it_reads_in_the_order_of_hashes(laid_out, server):
    value = SOURCES["fineweb_edu"]
    files = hub.hub_source("web", value).files(None)
    names = {name for name in laid_out[1][WEB] if name.startswith("sample/100BT/")}
    assert [f.name for f in files] == sorted(names, key=lambda name: blake2b(name.encode(), digest_size=8).digest())
    assert [f.bytes for f in files] == [(laid_out[0] / WEB / f.name).stat().st_size for f in files]
    assert len([path for _, path, _ in server.requests if "cursor" in path]) == 1, "a listing has pages"


def test_a_known_list_asks_nobody(server):
    source = hub.hub_source("python", SOURCES["python"])
    first = source.files(None)
    server.requests.clear()
    assert source.files([(f.name, f.bytes) for f in first]) == first
    assert not server.requests


def test_grouped_files_are_probed_by_their_first_bytes(server):
    assert {f.name[-12:-8] for f in hub.hub_source("c", SOURCES["c"]).files(None)} == {"0000", "0001", "0002"}
    assert server.sent and max(server.sent.values()) <= 1 << 16
    # C begins in 0001 and ends in mid-0002; 0000 is read as C may begin in it.


def test_a_first_row_longer_than_the_probe(own):
    text = "".join(chr(random.Random(1).randrange(33, 127)) for _ in range(20))
    noise = "".join(random.Random(2).choices("0123456789abcdefghijklmnopqrstuvwxyz", k=200_000))
    _, _ = own({"a.json.gz": [{"text": noise, "metadata": {"language": "C"}}], "b.json.gz": [{"text": text, "metadata": {}}]})
    value = hub.HubSource("own/set", "main", "a*.json.gz", "text", "", None, {"metadata.language": ("C",)}, "metadata.language")
    assert [f.name for f in hub.hub_source("x", value).files(None)] == ["a.json.gz"]
    with pytest.raises(UserError, match=r"b.json.gz: its first rows have no metadata.language"):
        hub.hub_source("x", hub.HubSource("own/set", "main", "b*", "text", "", None, value.keep, value.grouped_by)).files(None)


def test_what_the_files_hold_is_told_and_a_null_in_front_is_passed_over(own, capsys):
    def rows(*values):
        return [{"text": "x", "metadata": {"language": value} if value != "none" else None} for value in values]

    own({"a.json.gz": rows(None, "none", 7, "C"), "b.json.gz": rows("Python"), "c.json.gz": rows("Python"),
         "d.json.gz": rows("Zig")})
    value = hub.HubSource("own/set", "main", "*.gz", "text", "", None, {"metadata.language": ("C",)}, "metadata.language")
    assert {f.name for f in hub.hub_source("x", value).files(None)} == {"a.json.gz"}
    assert capsys.readouterr().err == ("own/set: 1 of 4 files may hold metadata.language in C; the others begin with Python (2), "
                                       "Zig (1)\n")


def test_a_server_that_limits_the_rate_of_probes_or_knows_no_ranges(server, monkeypatch):
    server.fault(f"{STACK}/stack-edu-0001.json.gz", "429", 5)
    assert len(hub.hub_source("c", SOURCES["c"]).files(None)) == 3
    taken = []

    def endless():
        noise = random.Random(1)
        packer = zlib.compressobj(wbits=31)
        yield packer.compress(b'{"metadata": {"language": "C"}}\n') + packer.flush(zlib.Z_SYNC_FLUSH)
        while True:
            taken.append(30_000)
            yield packer.compress(noise.randbytes(30_000)) + packer.flush(zlib.Z_SYNC_FLUSH)

    answer = SimpleNamespace(iter_bytes=endless)
    monkeypatch.setattr("huggingface_hub.utils.http_stream_backoff", lambda *_, **__: contextlib.nullcontext(answer))
    monkeypatch.setattr("huggingface_hub.utils.hf_raise_for_status", lambda answer: None)
    assert hub._first_value(SOURCES["c"], "stack-edu-0001.json.gz") == "C" and sum(taken) < 300_000


def test_check_prints_no_control_characters(own):
    own({"a.jsonl": [{"text": "\n \x1b[31mred\x07 \u202eturned end\u2028second"}]})
    *_, first = hub.check("x", hub.HubSource("own/set", "main", "a.jsonl", "text", "", None))
    assert first == "   [31mred   turned end"


def test_check_names_what_is_there(laid_out, server):
    for name, value in SOURCES.items():
        head, size, first = hub.check(name, value)
        assert all(word in head for word in (name, value.dataset, value.revision, value.license))
        assert "files" in size
        texts = {"".join(c if c.isprintable() else " " for c in text).strip() for rows in laid_out[1][value.dataset].values()
                 for row in rows for text in clean(row[value.column]).splitlines()}
        assert any(text.startswith(first.strip()) for text in texts) and first.strip()


# -------------------------------------------------------------------------------------------------------- odd but sound

def odd_lines():
    """Lines of JSON that are lawful, or that Python's parser takes, each with its text."""
    texts = ["", "a", "\u2028\u2029\x85\x0b\x0c\x1c", "\0", "\ud83d", "\ude42\ud83d", "🙂", "\\n\"", "é" * 9, " ",
             "\ufeff", "\x7f"]
    for text in texts:
        for record in ({"text": text}, {"n": 1e400, "text": text}, {"text": text, "deep": [[[{"a": [None]}]]]},
                       {"text": text, "big": 10**40, "text2": text}, {"text": text, "nan": float("nan")}):
            yield json.dumps(record), text
            if text.isprintable():
                yield json.dumps(record, ensure_ascii=False, indent=None), text
    yield '{"text": "first", "text": "last"}', "last"
    yield '{"text":"\t raw control"}', "\t raw control"
    yield '  {"text" : "blanks around" }  ', "blanks around"
    yield '{"text": null}', ""
    yield '{"other": 1}', ""
    yield "", ""
    yield "   ", ""


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_odd_lines_one_by_one_and_together(ending, own, tmp_path, monkeypatch):
    rng, lines = random.Random(5), list(odd_lines())
    rng.shuffle(lines)
    lines = [('{"text": "begins", "number": 1}', "begins"), *lines, *[('{"text": "plain"}', "plain")] * 200]
    folder = tmp_path / "own/set"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes("\ufeff".encode() + ending.join(line for line, _ in lines).encode())    # no last line end
    _, file = own({})
    wanted = [clean(text).encode() for _, text in lines]
    for size in (10, 300, 1 << 20):
        monkeypatch.setattr(hub_files, "LINES", size)
        assert documents(file("a.jsonl").read(0)) == wanted
        assert documents(file("a.jsonl").read(70)) == wanted[70:]


def test_bytes_that_are_no_utf8_become_replacements_in_json(own, tmp_path):
    folder = tmp_path / "own/set"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(b'{"text": "a\xff\xc3b"}\n{"text": "c"}\n')
    _, file = own({})
    assert documents(file("a.jsonl").read(0)) == ["a\ufffd\ufffdb".encode(), b"c"]


def test_fields_that_change_their_type_in_mid_file(own):
    """What ends the reading of datasets' own json builder: null, then text; a number, then a table."""
    rows = [{"text": f"t{n}" * 50, "a": None if n < 900 else "word", "b": n if n < 900 else {"c": [n]}, "metadata": {"x": None}}
            for n in range(1_000)]
    _, file = own({"a.json.gz": rows}, keep={"b.c": ("x",)})
    assert documents(file("a.json.gz").read(0)) == []
    _, file = own({"a.json.gz": rows})
    assert documents(file("a.json.gz").read(0)) == [row["text"].encode() for row in rows]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_parquet_texts_of_each_type_and_nulls(kind, own, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    texts = ["a", None, "", "é", "b" * 100] * 30
    column = pa.array(texts, {"string": pa.string(), "large_string": pa.large_string(), "string_view": pa.string_view(),
                              "dictionary": pa.dictionary(pa.int32(), pa.string())}[kind])
    (tmp_path / "own/set").mkdir(parents=True)
    pq.write_table(pa.table({"content": column, "n": range(150)}), tmp_path / "own/set/a.parquet", row_group_size=40)
    _, file = own({}, column="content")
    assert documents(file("a.parquet").read(0)) == [(text or "").encode() for text in texts]


@pytest.mark.parametrize("groups", [1, 75])
def test_a_parquet_file_is_not_kept_in_memory(groups, own, tmp_path, monkeypatch):
    """Neither by Python nor by pyarrow, whose memory Python's own count does not see."""
    import tracemalloc

    import pyarrow as pa
    monkeypatch.setattr(hub_files, "BLOCK", 1 << 20)
    monkeypatch.setattr(hub_files, "BLOCK_LEAST", 1 << 20)
    monkeypatch.setattr(hub_files, "LINES", 1 << 17)
    monkeypatch.setattr(hub_files, "BATCH_BYTES", 100_000)
    large_parquet(tmp_path, groups)
    _, file = own({})
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        shares = [(batch.rows, batch.read) for batch in file("a.parquet").read(0)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert shares == [(rows, rows / 1_500) for rows, _ in shares] and shares[-1][0] == 1_500 and len(shares) > 20
    assert peak < 10e6 and pool.max_memory() < 10e6, f"{peak / 1e6:.0f} and {pool.max_memory() / 1e6:.0f} MB"


def large_parquet(tmp_path, groups):
    """1,500 documents, 30 MB of text, 15 MB packed."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    rng = random.Random(0)
    (tmp_path / "own/set").mkdir(parents=True)
    table = pa.table({"text": [rng.randbytes(10_000).hex() for _ in range(1_500)]})
    pq.write_table(table, tmp_path / "own/set/a.parquet", row_group_size=1_500 // groups, write_batch_size=10)


def test_row_groups_that_are_passed_over_are_not_sent(own, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_files, "BLOCK", 1 << 16)
    monkeypatch.setattr(hub_files, "BLOCK_LEAST", 1 << 16)
    monkeypatch.setattr(hub_files, "LINES", 1 << 14)
    large_parquet(tmp_path, 75)
    server, file = own({})
    assert len(documents(file("a.parquet").read(1_470))) == 30
    assert server.sent["own/set/a.parquet"] < 1.5e6


# --------------------------------------------------------------------------------------------------------------- faults

PASSING = {"drop once": ("drop", 1, 700), "drop in the header": ("drop", 2, 0), "drop again and again": ("drop", 9, 2_000),
           "503": ("503", 3, 0), "429": ("429", 8, 0), "500": ("500", 1, 0), "slow": ("slow", 1, 50),
           "short once": ("short", 1, 3_000), "more than huggingface_hub tries": ("503", 20, 0)}


@pytest.mark.parametrize("name", ["fineweb_edu", "arxiv"])
@pytest.mark.parametrize("fault", PASSING)
def test_faults_that_pass_leave_no_trace(fault, name, laid_out, server):
    value = SOURCES[name]
    file = hub.hub_source(name, value).files(None)[0]
    kind, times, after = PASSING[fault]
    server.fault(f"{value.dataset}/{file.name}", kind, times, after)
    assert documents(file.read(0)) == expected(laid_out[1][value.dataset][file.name], value)
    assert server.left(f"{value.dataset}/{file.name}") == 0, "the fault was met each time"


@pytest.mark.parametrize("name", ["a.json.gz", "a.parquet", "a.jsonl"])
def test_a_reader_goes_on_where_it_was_when_the_connection_goes_for_good(name, own, monkeypatch, capsys):
    """In mid-file: what was handed out is not handed out again, and one line tells of it."""
    monkeypatch.setattr(hub_files, "BLOCK", 4_000)
    monkeypatch.setattr(hub_files, "BATCH_BYTES", 3_000)
    monkeypatch.setattr(hub_files, "LINES", 1_000)
    monkeypatch.setattr(hub_files, "TABLE_ROWS", 8)
    rng = random.Random(1)
    rows = [{"text": rng.randbytes(rng.randrange(400)).hex()} for _ in range(500)]
    server, file = own({name: rows})
    got = []
    for n, batch in enumerate(file(name).read(0)):
        got += documents([batch])
        if n == 5:
            server.fault(f"own/set/{name}", "drop", 9, after=10)     # more than the six tries of huggingface_hub
    assert n > 20 and got == [row["text"].encode() for row in rows]
    told = capsys.readouterr().err
    assert told.count(name) == 1 and "opened again" in told, told


def test_connections_too_short_for_a_large_request_suffice_for_small_ones(own, monkeypatch):
    monkeypatch.setattr(hub_files, "BLOCK", 1 << 17)
    monkeypatch.setattr(hub_files, "BLOCK_LEAST", 1 << 12)
    monkeypatch.setattr(hub_files, "LINES", 1_000)
    rows = [{"text": random.Random(n).randbytes(100).hex()} for n in range(500)]
    server, file = own({"a.jsonl": rows})
    server.fault("own/set/a.jsonl", "drop", after=10_000)       # each connection, for ever
    assert documents(file("a.jsonl").read(0)) == [row["text"].encode() for row in rows]


def test_a_full_disk_is_no_bad_file(laid_out, server, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    file = hub.hub_source("web", SOURCES["fineweb_edu"]).files(None)[0]
    monkeypatch.setattr(HubFile, "_opened", full)
    monkeypatch.setattr("datasets.load_dataset_builder", full)
    for step in (lambda: list(file.read(0)), lambda: hub.any_dataset(WEB, "text", None, None, None)):
        with pytest.raises(OSError, match="No space left"):
            step()


def opened(monkeypatch):
    """The sizes of requests that files are opened with from now on."""
    blocks, before = [], HubFile._opened
    monkeypatch.setattr(HubFile, "_opened", lambda self, block: blocks.append(block) or before(self, block))
    return blocks


def test_requests_are_smaller_only_where_they_break_off(own, monkeypatch):
    server, file = own({"a.jsonl": [{"text": random.Random(n).randbytes(100).hex()} for n in range(100)]})
    blocks = opened(monkeypatch)
    for kind in "503", "429", "404":
        server.fault("own/set/a.jsonl", kind, 6 if kind != "404" else 1)
        assert len(documents(file("a.jsonl").read(0))) == 100
    assert blocks == [32 << 20] * 6
    blocks.clear()
    server.fault("own/set/a.jsonl", "drop", 6 * 3 + 2)
    assert len(documents(file("a.jsonl").read(0))) == 100
    assert blocks == [32 << 20, 8 << 20, 2 << 20, 2 << 20]


def script(monkeypatch, *opens):
    """HubFile.tables is played: each time a file is opened, (rows handed out or not, rows passed when the connection goes)."""
    import pyarrow
    opens = list(opens)

    def tables(self, skip_rows, block, place):
        rows, passed = opens.pop(0)
        blocks.append(block)
        if rows:
            yield pyarrow.array(["x"] * (rows - skip_rows), pyarrow.large_string()), rows, 0.5
        place[0] = passed
        if passed is not None:
            raise httpx2.ReadError("gone")

    import httpx2
    blocks = []
    monkeypatch.setattr(HubFile, "tables", tables)
    monkeypatch.setattr(hub_files, "BATCH_BYTES", 1)
    return blocks


def test_getting_further_counts_as_progress(monkeypatch):
    """Two pauses are allowed here; rows passed over again on the way back are progress, a place met before is none."""
    monkeypatch.setattr(hub_files, "WAITS", (0, 0))
    file = HubFile("a.gz", None, "own/set", "main", "text")
    blocks = script(monkeypatch, (100, 110), (0, 20), (0, 30), (0, 40), (0, 50), (0, 60), (200, 200), (0, -1), (300, None))
    assert len(documents(file.read(0))) == 300
    assert blocks == [32 << 20, 8 << 20, 2 << 20, 2 << 20, 2 << 20, 2 << 20, 2 << 20, 8 << 20, 2 << 20], "grows back with rows"
    script(monkeypatch, (100, 110), (0, 20), (0, 20), (300, None))
    with pytest.raises(BadFile, match="after 100 rows"):
        list(file.read(0))


def test_an_outage_of_a_quarter_of_an_hour_costs_no_file():
    assert sum(PATIENCE) >= 15 * 60


def test_a_refusal_without_the_hubs_word_may_pass(laid_out, server):
    """A server of large files may say 403 for a link that ran out. The listing was allowed before."""
    value = SOURCES["arxiv"]
    file = hub.hub_source("arxiv", value).files(None)[0]
    server.fault(f"{ARXIV}/{file.name}", "403", 3)
    assert documents(file.read(0)) == expected(laid_out[1][ARXIV][file.name], value)
    server.fault(f"{ARXIV}/{file.name}", "403")
    with pytest.raises(BadFile, match="403"):
        list(file.read(0))


def test_a_file_that_is_gone_is_not_waited_for(laid_out, server, capsys):
    server.fault(f"{ARXIV}/arxiv-papers-0001.json.gz", "404")
    with pytest.raises(BadFile):
        list(HubFile("arxiv-papers-0001.json.gz", None, ARXIV, commit(laid_out[0], ARXIV), "text").read(0))
    assert capsys.readouterr().err.count("opened again") == 1


@pytest.mark.parametrize("kind", ["503", "429"])
def test_an_outage_ends_soon_enough(kind, laid_out, server):
    """Six tries of huggingface_hub, five of ours, none of datasets' twenty."""
    name = "arxiv-papers-0001.json.gz"
    server.fault(f"{ARXIV}/{name}", kind)
    with pytest.raises(BadFile, match=kind):
        list(HubFile(name, None, ARXIV, commit(laid_out[0], ARXIV), "text").read(0))
    assert len([status for _, _, status in server.requests if status == int(kind)]) == 6 * 5


def test_a_listing_is_asked_for_again(server, capsys):
    server.fault(STACK, "503", 2)
    assert len(hub.hub_source("c", SOURCES["c"]).files(None)) == 3
    assert capsys.readouterr().err.count("asked again") == 2


@pytest.mark.parametrize("kind", ["truncate", "short", "corrupt", "404"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("repo, name", [(ARXIV, "arxiv-papers-0001.json.gz"), (WEB, "sample/100BT/001_00000.parquet")])
def test_a_file_that_stays_bad_is_bad(repo, name, share, kind, laid_out, server):
    if kind == "corrupt" and repo == WEB:
        share = 0.999       # the footer: pages have no checksum there, gzip has one
    whole = expected(laid_out[1][repo][name], SOURCES["arxiv"])
    size = (laid_out[0] / repo / name).stat().st_size
    server.fault(f"{repo}/{name}", kind, after=int(size * share))
    got = []
    with pytest.raises(BadFile) as error:
        for batch in HubFile(name, size, repo, commit(laid_out[0], repo), "text").read(0):
            got += documents([batch])
    assert got == whole[:len(got)]
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_packed_files_of_several_members_are_read_to_their_end(packing, own, tmp_path):
    members = [PACK[packing](b'{"text": "%d"}\n' % n * 500) for n in range(3)]
    (tmp_path / "own/set").mkdir(parents=True)
    name = f"a.jsonl{packing}"
    (tmp_path / "own/set" / name).write_bytes(b"".join(members))
    server, file = own({})
    assert documents(file(name).read(0)) == [b"0"] * 500 + [b"1"] * 500 + [b"2"] * 500
    for cut in (len(members[0]), len(members[0]) + 9, sum(map(len, members)) - 1):  # at the end of a member, listed as whole
        server.fault(f"own/set/{name}", "short", after=cut)
        with pytest.raises(BadFile):
            documents(file(name).read(0))
    (tmp_path / "own/set" / name).write_bytes(b"".join(members)[:-5])
    server.heal()
    with pytest.raises(BadFile, match="end"):
        documents(HubFile(name, None, "own/set", "main", "text").read(0))


def test_a_line_that_is_none_makes_a_bad_file(own, tmp_path):
    (tmp_path / "own/set").mkdir(parents=True)
    (tmp_path / "own/set/a.jsonl").write_bytes(b'{"text": "a"}\n' * 100 + b'{"text": "b", ]}\n')
    _, file = own({})
    with pytest.raises(BadFile, match="row 100 is no line of JSON"):
        documents(file("a.jsonl").read(0))


# ----------------------------------------------------------------------------------------------------- the user's mistakes

REFUSALS = {"gated": "gated: accept its terms", "forbidden": "gated: accept its terms", "moved": "there is no data set",
            "403": r"the Hub refuses it \(403\)"}


@pytest.mark.parametrize("name", ["python", "fineweb_edu"])
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_a_sentence_at_each_step(kind, name, server):
    value = SOURCES[name]
    file = hub.hub_source(name, value).files(None)[0]
    server.fault(value.dataset, kind)
    steps = [lambda: hub.hub_source("x", value).files(None), lambda: list(hub.check("x", value)),
             lambda: hub.any_dataset(value.dataset, "text", None, None, None)]
    for step in steps if kind == "403" else [*steps, lambda: list(file.read(0))]:
        with pytest.raises(UserError, match=REFUSALS[kind]) as error:
            step()
        assert value.dataset in str(error.value)


@pytest.mark.parametrize("change, words", [
    ({"revision": "0" * 40}, "no such revision"), ({"files": "nowhere/*.parquet"}, "has no file nowhere"),
    ({"files": "sample/**.parquet"}, r"files=sample/\*\*.parquet is no pattern"),
    ({"files": "README.md"}, "README.md cannot be streamed"), ({"dataset": "HuggingFaceFW/other"}, "there is no data set"),
    ({"column": "words"}, "has no column 'words': set column= to one of text, id, dump"),
    ({"column": "score"}, "column 'score' holds double, not text"), ({"keep": {"language": ("xx",)}}, "no row of"),
    ({"keep": {"lang": ("xx",)}}, "has no column 'lang'")])
def test_a_wrong_value_is_a_sentence(change, words, server):
    with pytest.raises(UserError, match=words):
        list(hub.check("web", replace(SOURCES["fineweb_edu"], **change)))


@pytest.mark.parametrize("rows, words", [([{"n": 1}], "has no column 'text': set column= to one of n"),
                                         ([{"text": 5}], "column 'text' holds int, not text"), ([7], "is no object")])
def test_json_without_the_column_is_a_sentence(rows, words, own):
    _, file = own({"a.json.gz": rows * 3})
    with pytest.raises(UserError, match=words):
        list(file("a.json.gz").read(0))


def test_a_json_list_is_refused_before_it_fills_the_memory(own, tmp_path):
    (tmp_path / "own/set").mkdir(parents=True)
    (tmp_path / "own/set/a.json").write_text(json.dumps([{"text": "x" * 1000}] * 5_000))
    server, file = own({})
    with pytest.raises(UserError, match=r"a.json is one list"):
        list(file("a.json").read(0))


def test_without_a_network_there_is_one_sentence(monkeypatch, no_waits, capsys):
    point_at("http://127.0.0.1:9", monkeypatch)         # nobody listens to the discard port
    for step in (lambda: hub.hub_source("x", SOURCES["arxiv"]).files(None), lambda: list(hub.check("x", SOURCES["arxiv"])),
                 lambda: hub.any_dataset("a/b", "text", None, None, None)):
        with pytest.raises(OSError, match=r"http://127.0.0.1:9 gives no sound answer about .*: check the network"):
            step()
    assert not no_waits, "huggingface_hub does not try for minutes before"


# ----------------------------------------------------------------------------------------------------------- any data set

def test_any_data_set_is_pinned_and_licensed_by_its_card(laid_out, server):
    value = hub.any_dataset(WEB, "text", None, "sample/10BT/*", None)
    assert (value.revision, value.license, value.files) == (SOURCES["fineweb_edu"].revision, "odc-by", "sample/10BT/*")
    assert hub.any_dataset(ARXIV, "text", None, "*.gz", None).license == "not stated"
    assert hub.any_dataset(ARXIV, "text", "main", "*.gz", "CC0").license == "CC0"
    file, = hub.hub_source("x", value).files(None)
    assert documents(file.read(0)) == [b"of another sample"]


def test_any_data_set_is_its_train_split(own):
    rows = [{"text": "x"}]
    server, _ = own({"data/train-00000.parquet": rows, "data/train-00001.parquet": rows, "data/test-00000.parquet": rows,
                     "data/validation-00000.parquet": rows})
    value = hub.any_dataset("own/set", "text", None, None, None)
    assert value.files == ("data/train-00000.parquet", "data/train-00001.parquet")
    assert {f.name for f in hub.hub_source("x", value).files(None)} == set(value.files)


@pytest.mark.parametrize("files, words", [
    ({"set.py": "import x"}, "needs a loading script"), ({"a.csv": "text\nx"}, "a.csv cannot be streamed"),
    ({"README.md": "---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  data_files: b.jsonl\n---\n",
      "a.jsonl": "{}", "b.jsonl": "{}"}, "give files= a pattern"), ({}, "give files= a pattern")])
def test_a_data_set_that_cannot_be_streamed_is_a_sentence(files, words, own, tmp_path):
    folder = tmp_path / "own/set"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    own({})
    with pytest.raises(UserError, match=words) as error:
        hub.hub_source("x", hub.any_dataset("own/set", "text", None, None, None)).files(None)
    assert "own/set" in str(error.value)


@pytest.mark.parametrize("name", ["a", "a/b/c", "a b/c", "", "/", "../x"])
def test_a_name_that_is_none(name):
    with pytest.raises(UserError, match="must look like"):
        hub.any_dataset(name, "text", None, None, None)


# -------------------------------------------------------------------------------------------------------- as a process

def test_a_process_reads_by_hf_endpoint_without_torch_or_a_home(laid_out):
    """As prepare_data.py does: HF_ENDPOINT from the environment, a home that cannot be written, nothing loaded in vain."""
    code = ("import sys; from configs.sources import SOURCES; from prepare import hub\n"
            "assert not {'datasets', 'huggingface_hub', 'pyarrow'} & set(sys.modules)\n"
            "for name in SOURCES:\n"
            "    file = hub.hub_source(name, SOURCES[name]).files(None)[0]\n"
            "    print(name, sum(len(batch.ends) for batch in file.read(0)))\n"
            "assert not {'torch', 'model', 'runtime.config'} & set(sys.modules)\n")
    with HubServer(laid_out[0]) as server:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": "/proc/none"})
    assert done.returncode == 0, done.stderr
    assert all(" files may hold " in line for line in done.stderr.splitlines()) and len(done.stdout.splitlines()) == len(SOURCES)
