"""Tests of runtime/documents.py: every format and packing, what damaged files get."""

import gzip
import sys

import pyarrow
import pytest
from text_files import DOCUMENTS, PACK, jsonl, parquet, refused, some_documents

from runtime.documents import TXT_CHARS, TXT_CHARS_MOST, LocalFiles

BAD_FILES = {       # name -> content and what must be said
    "a.jsonl": (b'{"text": "fine"}\n\n{"text": \n', "a.jsonl:3 is no line of JSON"),
    "list.jsonl": (b"[1, 2]\n", "list.jsonl:1 is not an object"),
    "deep.jsonl": (b"[" * 200_000, "deep.jsonl:1 is no line of JSON"),
    "digits.jsonl": (b'{"text": ' + b"1" * 5000 + b"}", "digits.jsonl:1 is no line of JSON"),
    "column.jsonl": (b'{"text": "x"}\n{"body": "x", "id": 3}\n',
                     "column.jsonl:2 has no column 'text': set column= to one of body, id"),
    "number.jsonl": (b'{"text": 3}\n', "number.jsonl:1: column 'text' holds int, not text"),
    "wide.txt": ("text".encode("utf-16"), "wide.txt is UTF-16: save it as UTF-8"),
    "empty.txt": (b"", "mine has no documents: local: empty.txt; column text holds no text"),
    "blank.jsonl": (b"\n\n", "mine has no documents"),
    "empty.jsonl.gz": (gzip.compress(b""), "mine has no documents"),
    "empty.parquet": (parquet([], type=pyarrow.string()), "mine has no documents"),
    "one.txt": (b"a single document", "none of the 1 documents of mine fell to the"),
    "picture.png": (b"\x89PNG", "picture.png: its name must end in .txt, .jsonl, .parquet, optionally followed by"),
    "a.gz": (gzip.compress(b"x"), "a.gz: its name must end in"),
    "noise.txt.gz": (b"no gzip at all", "noise.txt.gz is damaged or was cut short"),
    "noise.txt.xz": (b"no xz at all", "noise.txt.xz is damaged or was cut short"),
    "noise.txt.zst": (b"no zstd at all", "noise.txt.zst is damaged or was cut short"),
    "noise.parquet": (b"no parquet at all", "noise.parquet is no sound parquet file"),
    "none.parquet": (b"", "none.parquet is no sound parquet file"),
    "column.parquet": (parquet(["x"], "body"), "column.parquet has no column 'text': set column= to one of id, body"),
    "bytes.parquet": (parquet([b"x"]), "bytes.parquet row 1: column 'text' holds bytes, not text"),
    **{f"short.jsonl{packing}": (pack(jsonl(some_documents(3000)))[:-9],
                                 f"short.jsonl{packing} is damaged or was cut short")
       for packing, pack in PACK.items() if packing},
    "short.parquet": (parquet(DOCUMENTS)[:-9], "short.parquet is no sound parquet file"),
    "hole.parquet": ((whole := parquet(DOCUMENTS))[:50] + bytes(400) + whole[450:],
                     "hole.parquet is no sound parquet file"),
    "cut.parquet.zst": (PACK[".zst"](parquet(DOCUMENTS))[:-9], "cut.parquet.zst is damaged or was cut short"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_a_sentence_and_nothing_stays(tmp_path, capsys, name):
    data, expected = BAD_FILES[name]
    (tmp_path / name).write_bytes(data)
    said = refused(capsys, "local", tmp_path / name, "name=mine", "tokenizer=byte", f"out={tmp_path / 'out'}",
                   out=tmp_path)
    assert expected in said
    assert not (tmp_path / "out/mine").exists()


def test_files_in_several_frames_are_read_whole(tmp_path):
    halves = jsonl(DOCUMENTS[:20]), jsonl(DOCUMENTS[20:])
    for packing, pack in PACK.items():
        file = tmp_path / f"a.jsonl{packing}"
        file.write_bytes(b"".join(map(pack, halves)))
        assert list(LocalFiles([file], "text")) == DOCUMENTS


def test_parquet_of_other_text_types(tmp_path):
    for type in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        (tmp_path / "a.parquet").write_bytes(parquet(DOCUMENTS, "code", type))
        assert list(LocalFiles([tmp_path / "a.parquet"], "code")) == DOCUMENTS


def test_a_long_text_file_is_cut_at_blank_lines(tmp_path):
    paragraphs = [f"paragraph {i} " + "word " * 200 + "\n\n" for i in range(100)]
    file = tmp_path / "corpus.txt"
    file.write_text("".join(paragraphs))
    pieces = list(LocalFiles([file], "text"))
    assert "".join(pieces) == "".join(paragraphs) and len(pieces) > 4
    assert all(TXT_CHARS <= len(p) <= TXT_CHARS + 2000 and p.endswith("\n\n") for p in pieces[:-1])
    file.write_text("x" * (2 * TXT_CHARS_MOST + 5))         # one endless line
    assert [len(p) for p in LocalFiles([file], "text")] == [TXT_CHARS_MOST, TXT_CHARS_MOST, 5]
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo \xff\r\n")
    assert list(LocalFiles([file], "text")) == ["one\ntwo \ufffd\n"]


@pytest.mark.parametrize("package, name", [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys, package, name):
    (tmp_path / name).write_bytes(PACK[".zst"](b"{}") if package == "zstandard" else parquet(DOCUMENTS))
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(capsys, "local", tmp_path / name, "name=mine", "tokenizer=byte", f"out={tmp_path}", out=tmp_path)
    assert f"pip install {package}" in said
