"""Tests of prepare/documents.py: every format and packing, what damaged files get."""

import gzip
import random
import re
import sys
import tracemalloc
from functools import partial

import pyarrow
import pyarrow.parquet
import pytest
from text_files import DOCUMENTS, PACK, jsonl, parquet, some_documents

from prepare import documents
from prepare.documents import TXT_CHARS, TXT_CHARS_MOST, local_files
from prepare.source import BATCH_BYTES, BadFile
from runtime.cli import UserError


def texts(file, column="text", skip_rows=0):
    """The documents of one file, put together again from its batches; what the batches say of themselves is checked."""
    (file,), out, rows, read = local_files([str(file)], column), [], skip_rows, 0.0
    for batch in file.read(skip_rows):
        starts = [0, *batch.ends[:-1].tolist()]
        out += [batch.text[start:end].decode() for start, end in zip(starts, batch.ends.tolist(), strict=True)]
        assert len(batch.ends) == batch.rows - rows > 0 and batch.ends[-1] == len(batch.text)
        assert read <= batch.read <= 1
        rows, read = batch.rows, batch.read
    return out


BAD_FILES = {       # name -> content and what must be said: the file's fault
    "a.jsonl": (b'{"text": "fine"}\n\n{"text": \n', "a.jsonl:3 is no line of JSON"),
    "list.jsonl": (b"[1, 2]\n", "list.jsonl:1 is not an object"),
    "deep.jsonl": (b"[" * 200_000, "deep.jsonl:1 is no line of JSON"),
    "digits.jsonl": (b'{"text": ' + b"1" * 5000 + b"}", "digits.jsonl:1 is no line of JSON"),
    "noise.txt.gz": (b"no gzip at all", "noise.txt.gz is damaged or was cut short"),
    "noise.txt.xz": (b"no xz at all", "noise.txt.xz is damaged or was cut short"),
    "noise.txt.zst": (b"no zstd at all", "noise.txt.zst is damaged or was cut short"),
    "noise.parquet": (b"no parquet at all", "noise.parquet is no sound parquet file"),
    "none.parquet": (b"", "none.parquet is no sound parquet file"),
    **{f"short.jsonl{packing}": (pack(jsonl(some_documents(3000)))[:-9],
                                 f"short.jsonl{packing} is damaged or was cut short")
       for packing, pack in PACK.items() if packing},
    "short.parquet": (parquet(DOCUMENTS)[:-9], "short.parquet is no sound parquet file"),
    "hole.parquet": ((whole := parquet(DOCUMENTS))[:50] + bytes(400) + whole[450:],
                     "hole.parquet is no sound parquet file"),
    "cut.parquet.zst": (PACK[".zst"](parquet(DOCUMENTS))[:-9], "cut.parquet.zst is damaged or was cut short"),
}
MISTAKES = {        # the user's
    "column.jsonl": (b'{"text": "x"}\n{"body": "x", "id": 3}\n',
                     "column.jsonl:2 has no column 'text': set column= to one of body, id"),
    "number.jsonl": (b'{"text": 3}\n', "number.jsonl:1: column 'text' holds int, not text"),
    "wide.txt": ("text".encode("utf-16"), "wide.txt is UTF-16: save it as UTF-8"),
    "column.parquet": (parquet(["x"], "body"), "column.parquet has no column 'text': set column= to one of id, body"),
    "bytes.parquet": (parquet([b"x"]), "bytes.parquet: column 'text' holds binary, not text: set column="),
}


@pytest.mark.parametrize("name", [*BAD_FILES, *MISTAKES])
def test_a_bad_file_is_a_sentence(tmp_path, name):
    """Its own fault is no reason to stop the other files."""
    data, expected = {**BAD_FILES, **MISTAKES}[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadFile if name in BAD_FILES else UserError) as error:
        texts(tmp_path / name)
    assert expected in str(error.value) and str(tmp_path) in str(error.value)


def test_a_disk_too_full_to_unpack_to_is_not_the_files_fault(tmp_path, monkeypatch):
    """A parquet file in a packing is unpacked to the disk of temporary files; left out, it would be missing for good."""
    (tmp_path / "a.parquet.gz").write_bytes(PACK[".gz"](parquet(DOCUMENTS)))
    monkeypatch.setattr(documents.tempfile, "TemporaryFile", partial(open, "/dev/full", "wb"))
    with pytest.raises(OSError, match="No space left on device") as error:
        texts(tmp_path / "a.parquet.gz")
    assert error.value.filename == documents.tempfile.gettempdir()


def test_what_is_no_input_file_is_a_sentence_at_once(tmp_path):
    for name in ("picture.png", "a.gz", "fine.txt"):
        (tmp_path / name).write_bytes(b"x")
    for paths, expected in [
        (["picture.png"], "picture.png: its name must end in .txt, .jsonl, .parquet, optionally followed by .gz, .xz, .zst"),
        (["fine.txt", "a.gz"], "a.gz: its name must end in"), (["fine.txt", "none.txt"], "there is no file"),
        (["."], "is a folder: name the files in it"), (["fine.txt", "./fine.txt"], "fine.txt is named twice"),
    ]:
        with pytest.raises(UserError, match=re.escape(expected)):
            local_files([str(tmp_path / path) for path in paths], "text")


def test_input_files_have_names_of_their_own(tmp_path):
    paths = [tmp_path / "a/x.txt", tmp_path / "b/x.txt", tmp_path / "b/y.txt"]
    for i, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x" * i)
    files = local_files([str(path) for path in paths], "text")
    assert [(file.name, file.bytes) for file in files] == [(str(paths[0]), 0), (str(paths[1]), 1), ("y.txt", 2)]
    assert [file.stamp for file in files] == [path.stat().st_mtime_ns for path in paths]


def test_what_holds_nothing_gives_no_document(tmp_path):
    empty = {"blank.jsonl": b"\n \t\r\n\n", "mark.jsonl": b"\xef\xbb\xbf\n", "empty.jsonl.gz": gzip.compress(b""),
             "empty.parquet": parquet([], type=pyarrow.string())}
    for name, data in empty.items():
        (tmp_path / name).write_bytes(data)
        assert texts(tmp_path / name) == []
    nulls = {"nulls.jsonl": b'{"text": null}\n{"text": ""}', "nulls.parquet": parquet([None, ""]),
             "null.parquet": parquet([None, None], type=pyarrow.null()), "empty.txt": b""}
    for name, data in nulls.items():
        (tmp_path / name).write_bytes(data)
        assert texts(tmp_path / name) == [""] * (1 if name == "empty.txt" else 2), "an empty document keeps its row"


@pytest.mark.parametrize("batch_bytes", [1, 300, BATCH_BYTES])
def test_reading_may_begin_at_any_row(tmp_path, monkeypatch, batch_bytes):
    """Against the documents that were written; a resumed run reads the rows that an earlier one did not."""
    monkeypatch.setattr(documents, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr("prepare.source.BATCH_BYTES", batch_bytes)
    lines = jsonl(DOCUMENTS).splitlines(keepends=True)
    with_blanks = b"".join(line + b" \n" * (i % 3) for i, line in enumerate(lines))
    with_nulls = [None if i % 7 == 3 else text for i, text in enumerate(DOCUMENTS)]
    dictionary = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    cases = {"a.jsonl": (jsonl(DOCUMENTS), DOCUMENTS), "b.jsonl": (with_blanks, DOCUMENTS),
             "a.parquet": (parquet(DOCUMENTS), DOCUMENTS), "d.parquet": (parquet(DOCUMENTS, type=dictionary), DOCUMENTS),
             "n.parquet": (parquet(with_nulls), [text or "" for text in with_nulls]),
             "v.parquet": (parquet(DOCUMENTS, type=pyarrow.string_view()), DOCUMENTS)}
    for name, (data, expected) in cases.items():
        for packing in ("", ".gz"):
            file = tmp_path / (name + packing)
            file.write_bytes(PACK[packing](data))
            for skip in range(0, len(expected) + 1, 3 if packing else 1):
                assert texts(file, skip_rows=skip) == expected[skip:], (name, skip)
    paragraphs = [f"paragraph {i} " + "word " * 4000 + "\n\n" for i in range(9)]
    (tmp_path / "a.txt").write_text("".join(paragraphs))
    for skip in range(10):
        assert texts(tmp_path / "a.txt", skip_rows=skip) == [*paragraphs, ""][skip:]


def test_batches_are_of_about_the_same_size(tmp_path):
    rng = random.Random(1)
    sizes = [rng.choice([1, 100, 5_000, 60_000]) for _ in range(600)]
    written = [rng.choice("xé日🙂") * size for size in sizes]
    for name, data in ("a.jsonl", jsonl(written)), ("a.parquet", parquet(written)):
        (tmp_path / name).write_bytes(data)
        assert texts(tmp_path / name) == written
        (file,) = local_files([str(tmp_path / name)], "text")
        found = [len(batch.text) for batch in file.read(0)]
        assert len(found) > 5 and all(BATCH_BYTES <= size <= 2 * BATCH_BYTES for size in found[:-1]), found


def test_skipped_lines_are_not_parsed(tmp_path):
    """A resume must not take as long as the run it goes on with: what is skipped may even be no JSON."""
    (tmp_path / "a.jsonl").write_bytes(b"{" * 1000 + b"\n" + jsonl(["kept"]))
    assert texts(tmp_path / "a.jsonl", skip_rows=1) == ["kept"]


def test_skipped_row_groups_are_not_read(tmp_path):
    data = bytearray(parquet(DOCUMENTS))        # 7 rows a group
    first = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(bytes(data))).metadata.row_group(0)
    end = first.column(1).data_page_offset + 20
    data[4:end] = bytes(end - 4)                # nothing of the first one can be read
    (tmp_path / "a.parquet").write_bytes(data)
    assert texts(tmp_path / "a.parquet", skip_rows=7) == DOCUMENTS[7:]
    with pytest.raises(BadFile, match="no sound parquet file"):
        texts(tmp_path / "a.parquet", skip_rows=6)


def test_a_row_group_of_any_size_is_read_in_little_memory(tmp_path):
    """pyarrow's bytes come through Python's file object, so their trace is seen."""
    rng = random.Random(2)
    written = [rng.randbytes(2_000).hex() for _ in range(8_000)]        # 32 MB
    table = pyarrow.table({"text": written})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10**6, compression="none", use_dictionary=False)
    (file,) = local_files([str(tmp_path / "a.parquet")], "text")
    tracemalloc.start()
    rows = [len(batch.ends) for batch in file.read(0)]
    assert tracemalloc.get_traced_memory()[1] < 12_000_000
    tracemalloc.stop()
    assert sum(rows) == 8_000


def test_halves_of_pairs_become_text(tmp_path):
    r"""JSON may spell half a UTF-16 pair: a pair is its character, a lone half U+FFFD."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud83d\\ude42 a\\ud83d b\\ude42"}\n{"text": "\xff"}')
    assert texts(tmp_path / "a.jsonl") == ["\U0001f642 a\ufffd b\ufffd", "\ufffd"]


def test_a_large_value_beside_the_text_costs_no_memory_at_once(tmp_path):
    """Rows are taken by the size of their group, few at a time where they are long."""
    table = pyarrow.table({"text": ["a" * 3_000_000, "b" * 3_000_000, "c"], "image": [b"x" * 1000] * 3})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (file,) = local_files([str(tmp_path / "a.parquet")], "text")
    assert [len(batch.ends) for batch in file.read(0)] == [1, 1, 1]


def test_files_in_several_frames_are_read_whole(tmp_path):
    halves = jsonl(DOCUMENTS[:20]), jsonl(DOCUMENTS[20:])
    for packing, pack in PACK.items():
        file = tmp_path / f"a.jsonl{packing}"
        file.write_bytes(b"".join(map(pack, halves)))
        assert texts(file) == DOCUMENTS


def test_parquet_of_other_text_types(tmp_path):
    for type in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        (tmp_path / "a.parquet").write_bytes(parquet(DOCUMENTS, "code", type))
        assert texts(tmp_path / "a.parquet", "code") == DOCUMENTS


def test_a_long_text_file_is_cut_at_blank_lines(tmp_path):
    paragraphs = [f"paragraph {i} " + "word " * 200 + "\n\n" for i in range(100)]
    file = tmp_path / "corpus.txt"
    file.write_text("".join(paragraphs))
    pieces = texts(file)
    assert "".join(pieces) == "".join(paragraphs) and len(pieces) > 4
    assert all(TXT_CHARS <= len(p) <= TXT_CHARS + 2000 and p.endswith("\n\n") for p in pieces[:-1])
    file.write_text("x" * (2 * TXT_CHARS_MOST + 5))         # one endless line
    assert [len(p) for p in texts(file)] == [TXT_CHARS_MOST, TXT_CHARS_MOST, 5]
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo \xff\r\n")
    assert texts(file) == ["one\ntwo \ufffd\n"]


@pytest.mark.parametrize("package, name", [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package, name):
    (tmp_path / name).write_bytes(PACK[".zst"](b"{}") if package == "zstandard" else parquet(DOCUMENTS))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        texts(tmp_path / name)
