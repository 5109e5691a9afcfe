"""What the readers of prepare_data.py take of a file: encodings, odd rows, layouts of JSON and
parquet, borders of documents."""

import errno
import io
import json
import lzma
import os
import re
import tracemalloc
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from lib.errors import UserError
from prepare import hub, json_reader, pieces, text_reader
from prepare import local as local_files
from prepare import packed as packed_files
from prepare.decontaminate import found_in, read_grams
from prepare.readers import read_file
from prepare.sources import Reading
from prepare_data import main
from runtime import shards
from runtime.tokenizer import load_tokenizer
from tests.helpers.text_files import (
    DOCUMENTS,
    PACK,
    some_documents,
    write,
    write_rows,
    write_tokenizer,
)
from tests.prepare.test_pipeline import ids_in, ids_of, local, split_of

RUSSIAN = [f"Не было гвоздя, подкова пропала, номер {n}. " * 5 for n in range(20)]


def said(
    capsys: pytest.CaptureFixture[str], code: int, *files: object, out, **options: object
) -> str:
    """What the command prints on stderr where it ends with `code`."""
    capsys.readouterr()
    assert local(*files, out=out, **options) == code
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors


def shown(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    capsys.readouterr()
    assert main(["--show", str(folder)]) == 0
    return capsys.readouterr().out


def write_parquet(path: Path, **columns: object):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return path


# --------------------------------------------------------------------------------------- encodings


def write_raw(path: Path, texts: list[bytes]):
    """The texts, which may be of any encoding, as .txt, .jsonl or strings of parquet."""
    if path.suffix == ".parquet":
        return write_parquet(path, text=pyarrow.array(texts).view(pyarrow.string()))
    lines = (
        [b'{"text": "%s"}\n' % text for text in texts]
        if path.suffix == ".jsonl"
        else [text + b"\n" for text in texts]
    )
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("encoding", ["windows-1251", "gbk"])
def test_text_of_another_encoding_is_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, encoding: str
):
    texts = ["钉子缺，蹄铁卸。" * 9, "战马蹶" * 30] if encoding == "gbk" else RUSSIAN
    file = write_raw(tmp_path / name, [text.encode(encoding) for text in texts])
    good = write(tmp_path / "good.jsonl", DOCUMENTS)
    errors = said(capsys, 1, file, good, out=tmp_path)
    assert f"{name} is not UTF-8: " in errors and "iconv -f" in errors
    assert local(file, good, out=tmp_path, skip_bad="true") == 0 and ids_in(
        tmp_path / "mine"
    ) == ids_of(DOCUMENTS)


@pytest.mark.parametrize("n_bad, code", [(9, 0), (15, 1)])
def test_a_file_is_bad_above_one_bad_byte_in_a_hundred_characters(
    tmp_path: Path, n_bad: int, code: int
):
    text = b"x" * (1000 - n_bad) + b"\xff" * n_bad
    file = write_raw(tmp_path / "a.jsonl", [text])
    assert local(file, write(tmp_path / "good.jsonl", DOCUMENTS), out=tmp_path) == code


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_utf16_is_a_bad_file_with_and_without_a_byte_order_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], encoding: str
):
    (tmp_path / "a.txt").write_bytes(("for want of a nail" * 50).encode(encoding))
    assert f"a.txt is {encoding[:6].upper()}: save it as UTF-8" in said(
        capsys, 1, tmp_path / "a.txt", out=tmp_path
    )


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_replaced_characters_are_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    """Not those that the text holds itself, in UTF-8 or as JSON's escape."""
    texts = [f"{n} café \ufffd {'shoe ' * 500}\n".encode() for n in range(40)]
    if name == "a.jsonl":
        texts = [text.replace(b"\n", b"\\n\\ufffd") for text in texts]
    damaged = [text.replace("7 café".encode(), b"7 caf\xe9\xe9") for text in texts]
    assert (
        local(
            write_raw(tmp_path / name, damaged),
            write(tmp_path / "good.jsonl", DOCUMENTS),
            out=tmp_path,
        )
        == 0
    )
    assert shards.read_index(tmp_path / "mine").replaced == {name: 8}, "4 texts, two bytes each"
    assert f"replaced: 8 characters of {name}" in shown(capsys, tmp_path)


def test_whole_utf8_is_not_remarked_on(tmp_path: Path):
    assert local(write(tmp_path / "a.jsonl", ["\ufffd" * 50, *DOCUMENTS]), out=tmp_path) == 0
    assert "replaced" not in json.loads((tmp_path / "mine/index.json").read_text())


# ---------------------------------------------------------------------------------------- odd rows

ODD_ROWS = [
    '{"text": 3}',
    '{"body": "x"}',
    '["x"]',
    '{"text": ["a", 1]}',
    '{"text": {"a": "b"}}',
    '{"text": tru',
    "3",
]


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_an_odd_row_is_named_or_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: str
):
    rows = [json.dumps({"text": text}) for text in DOCUMENTS]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join([*rows[:5], "", odd, *rows[5:]]) + "\n")
    errors = said(capsys, 1 if odd.endswith("tru") else 2, file, out=tmp_path)
    assert "a.jsonl:7" in errors and "skip_bad=true" in errors, (
        "lines are counted as editors count them"
    )
    assert local(file, out=tmp_path, skip_bad="true") == 0
    assert ids_in(tmp_path / "mine") == ids_of(DOCUMENTS)
    (entry,) = shards.read_index(tmp_path / "mine").odd_rows
    assert (entry["file"], entry["rows"]) == ("a.jsonl", 1) and "a.jsonl:7" in entry["first"]
    assert "left out: 1 rows of a.jsonl, the first: " in shown(capsys, tmp_path)


def test_an_odd_first_row_is_skipped_too(tmp_path: Path):
    write(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "a.jsonl").write_text(
        '{"text": 3}\n{"id": 3}\n' + (tmp_path / "a.jsonl").read_text()
    )
    assert local(tmp_path / "a.jsonl", out=tmp_path, skip_bad="true") == 0 and ids_in(
        tmp_path / "mine"
    ) == ids_of(DOCUMENTS)


def test_rows_that_were_skipped_are_asked_about_again_without_skip_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = [write(tmp_path / "a.jsonl", DOCUMENTS[:9]), tmp_path / "b.jsonl"]
    files[0].write_text(files[0].read_text() + '{"text": 3}\n')
    files[1].write_text("")
    assert local(*files, out=tmp_path, skip_bad="true", val_share=0.0001) == 2, (
        "no documents for val"
    )
    assert "a.jsonl:10" in said(capsys, 2, *files, out=tmp_path, val_share=0.0001)


def test_a_file_without_a_row_of_use_is_skipped_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = [write(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "b.jsonl", tmp_path / "c.parquet"]
    files[1].write_text('{"body": "x"}\n' * 1500)
    write_parquet(files[2], text=[1, 2])
    assert local(*files, out=tmp_path, skip_bad="true") == 0 and ids_in(
        tmp_path / "mine"
    ) == ids_of(DOCUMENTS)
    first, second = shards.read_index(tmp_path / "mine").skipped
    assert (
        first["reason"].startswith("none of 1,000 rows can be used; the first: ")
        and "b.jsonl:1 has no" in first["reason"]
    )
    assert "'text' holds int, not text" in second["reason"]


# ----------------------------------------------------------------------------------------- parquet

TEXTS = [*DOCUMENTS[:20], None, "", "naïve \U0001f642"]
PRESENT = [text for text in TEXTS if text]


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.binary(),
        pyarrow.large_binary(),
        pyarrow.binary_view(),
        pyarrow.dictionary(pyarrow.int32(), "string"),
    ],
)
def test_text_of_every_type_of_parquet_is_read(tmp_path: Path, kind):
    is_binary = "binary" in str(kind)
    values = (
        pyarrow.array([text.encode() if text and is_binary else text for text in TEXTS])
        if is_binary
        else TEXTS
    )
    column = (
        pyarrow.array(TEXTS).dictionary_encode()
        if pyarrow.types.is_dictionary(kind)
        else pyarrow.array(values, kind)
    )
    assert local(write_parquet(tmp_path / "a.parquet", text=column), out=tmp_path) == 0
    assert ids_in(tmp_path / "mine") == ids_of(PRESENT)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_nested_column_is_read(tmp_path: Path, form: str):
    rows = [{"meta": {"source": {"text": text}, "when": 5}} for text in TEXTS] + [
        {"meta": None},
        {"meta": {"source": None}},
    ]
    file = tmp_path / f"a.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert local(file, out=tmp_path, column="meta.source.text") == 0 and ids_in(
        tmp_path / "mine"
    ) == ids_of(PRESENT)


def test_a_column_with_a_dot_in_its_own_name_is_read(tmp_path: Path):
    table = write_parquet(
        tmp_path / "a.parquet", **{"meta.text": TEXTS, "meta": [{"text": "other"}] * len(TEXTS)}
    )
    assert local(table, out=tmp_path, column="meta.text") == 0 and ids_in(
        tmp_path / "mine"
    ) == ids_of(PRESENT)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_lists_of_strings_become_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
):
    lists = [DOCUMENTS[:3], [], None, ["naïve"], *[[text, "end"] for text in DOCUMENTS[3:]]]
    file = tmp_path / f"a.{form}"
    if form == "parquet":
        write_parquet(file, text=lists)
    else:
        file.write_text("".join(json.dumps({"text": texts}) + "\n" for texts in lists))
    wanted = ["\n".join(texts) for texts in lists if texts]
    assert local(file, out=tmp_path) == 0 and ids_in(tmp_path / "mine") == ids_of(wanted)
    assert f"joined: {len(lists) - 1} texts of a.{form} were lists of strings" in shown(
        capsys, tmp_path
    )


def test_a_column_of_type_json_is_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As `datasets` writes columns of mixed types."""
    import datasets

    datasets.disable_progress_bars()
    texts = ['He said "no",\n\tnaïve \\ \U0001f642', *DOCUMENTS]
    values = [*texts, None, ["two", "lines"]]
    mixed = datasets.Dataset.from_list(
        [{"text": value} for value in [*values, 3]], on_mixed_types="use_json"
    )
    mixed.to_parquet(tmp_path / "a.parquet")
    assert "a.parquet, row 44: column 'text' holds int, not text" in said(
        capsys, 2, tmp_path / "a.parquet", out=tmp_path
    )
    assert local(tmp_path / "a.parquet", out=tmp_path, skip_bad="true") == 0
    assert ids_in(tmp_path / "mine") == ids_of([*texts, "two\nlines"])
    assert shards.read_index(tmp_path / "mine").odd_rows[0]["rows"] == 1


def test_a_broken_value_of_type_json_is_an_odd_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    storage = pyarrow.array([*map(json.dumps, DOCUMENTS), "{"])
    write_parquet(
        tmp_path / "a.parquet", text=pyarrow.ExtensionArray.from_storage(pyarrow.json_(), storage)
    )
    assert "row 41: column 'text' is of type JSON, but what it holds is not valid" in said(
        capsys, 2, tmp_path / "a.parquet", out=tmp_path
    )


FAR = pyarrow.array([10**17] * 3, pyarrow.timestamp("ms"))
NOWHERE = pyarrow.array([1, 2, 3], pyarrow.timestamp("ms", tz="Mars/Olympus"))


@pytest.mark.parametrize("odd", [FAR, NOWHERE])
def test_dates_that_python_has_not_are_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], odd
):
    file = write_parquet(tmp_path / "a.parquet", body=["a", "b", "c"], created=odd)
    errors = said(capsys, 2, file, out=tmp_path)
    assert (
        "a.parquet has no column 'text', only body, created: set column= to one of them" in errors
    )
    assert f"column 'created' holds {odd.type}, not text" in said(
        capsys, 2, file, out=tmp_path, column="created"
    )
    assert local(file, out=tmp_path, column="body", val_share=0.5) == 0


@pytest.mark.parametrize(
    "values, name",
    [
        ([1], "int"),
        ([1.5], "float"),
        ([True], "bool"),
        ([datetime(2020, 1, 1)], "timestamp[us]"),
        ([{"a": "x"}], "struct<a: string>"),
        ([[1]], "list<element: int64>"),
        ([[{"a": "x"}]], "list<element: struct<a: string>>"),
    ],
)
def test_a_column_of_another_type_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: list, name: str
):
    file = write_parquet(tmp_path / "a.parquet", text=values)
    assert f"column 'text' holds {name}, not text: set column=" in said(
        capsys, 2, file, out=tmp_path
    )


def test_parquet_packed_as_a_whole_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.parquet.gz").write_bytes(PACK[".gz"](b"PAR1"))
    assert "unpack it" in said(capsys, 2, tmp_path / "a.parquet.gz", out=tmp_path)


# ------------------------------------------------------------------------- documents of text files

STORIES = [f"Once upon a time, {n}.\n\n{text.strip()}" for n, text in enumerate(DOCUMENTS)]


@pytest.mark.parametrize(
    "layout",
    [
        "{}\n<|endoftext|>\n",
        "\n{}\n\n<|endoftext|>\n\n",
        "<|endoftext|>\n{}\n",
        "{}\r\n <|endoftext|> \r\n",
    ],
)
def test_a_line_that_is_only_the_marker_ends_a_document(tmp_path: Path, layout: str):
    (tmp_path / "a.txt").write_text("".join(map(layout.format, STORIES)), newline="")
    assert local(tmp_path / "a.txt", out=tmp_path) == 0
    assert ids_in(tmp_path / "mine") == ids_of(STORIES)
    assert shards.read_index(tmp_path / "mine").empty == 0


def test_the_tokenizers_own_end_of_text_is_a_marker(tmp_path: Path):
    write_tokenizer(tmp_path / "tokenizer", {"eos_token": "<|end|>"})
    (tmp_path / "a.txt").write_text("\n<|end|>\n".join(STORIES))
    assert local(tmp_path / "a.txt", out=tmp_path, tokenizer=tmp_path / "tokenizer") == 0
    assert ids_in(tmp_path / "mine") == ids_of(STORIES, str(tmp_path / "tokenizer"))


def test_a_marker_within_a_line_stays_text_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.txt").write_text(
        "\n<|endoftext|>\n".join([*STORIES, "an end.<|endoftext|>\nThe next"])
    )
    assert local(tmp_path / "a.txt", out=tmp_path) == 0
    assert ids_in(tmp_path / "mine") == ids_of([*STORIES, "an end.<|endoftext|>\nThe next"])
    told = sum("<|endoftext|>" in line for story in STORIES for line in story.split("\n")) + 1
    assert f"not borders: {told:,} lines of a.txt hold an end-of-text token" in shown(
        capsys, tmp_path
    )


def paragraphs_of(book, count: int = 8):
    return [f"Chapter {n} of book {book}. {'and so on ' * 20}\n\n" for n in range(count)]


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch):
    """A text file is cut behind 100 characters, so that each paragraph becomes a piece."""
    monkeypatch.setattr(text_reader, "TXT_CHARS", 100)


@pytest.mark.parametrize("is_one_file", [True, False])
def test_all_pieces_of_a_document_are_in_the_split_of_its_first_piece(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], short_pieces, is_one_file: bool
):
    books = [paragraphs_of(book) for book in range(12)]
    if is_one_file:
        (tmp_path / "all.txt").write_text("<|endoftext|>\n".join(map("".join, books)))
    else:
        for n, book in enumerate(books):
            (tmp_path / f"{n:02d}.txt").write_text("".join(book))
    assert local(*sorted(tmp_path.glob("*.txt")), out=tmp_path) == 0
    ids = ids_in(tmp_path / "mine")
    wanted = {"train": [], "val": []}
    for book in books:
        split = split_of(book[0].encode())
        wanted[split] += [id for piece in book for id in (256, *piece.encode())]
    assert ids == wanted and ids["val"]
    told = shown(capsys, tmp_path)
    assert (
        "cut: 12 documents of text files" in told
        and "96 pieces, those of a document in one split" in told
    )


def test_a_piece_of_white_space_before_a_document_does_not_choose_its_split(
    tmp_path: Path, short_pieces
):
    """120 blank lines before each book are a piece of 100, which is dropped, and 20."""
    wanted = {"train": [], "val": []}
    for n in range(12):
        first, *others = paragraphs_of(n)
        (tmp_path / f"{n:02d}.txt").write_text("".join(["\n" * 120, first, *others]))
        first = "\n" * 20 + first
        split = split_of(first.encode())
        wanted[split] += [id for piece in (first, *others) for id in (256, *piece.encode())]
    assert local(*sorted(tmp_path.glob("*.txt")), out=tmp_path) == 0
    assert ids_in(tmp_path / "mine") == wanted


def test_no_blank_line_is_lost_between_the_pieces_of_a_document(tmp_path: Path, short_pieces):
    """Several blank lines between paragraphs: the cut is behind the first of them."""
    book = "\n\n".join(paragraphs_of(1)).rstrip("\n")
    (tmp_path / "a.txt").write_text(f"{book}\n<|endoftext|>\n")
    reading = Reading(borders=("<|endoftext|>",))
    opened = partial(open, tmp_path / "a.txt", "rb")
    rows = read_file(opened, "a.txt", ("text",), {}, True, reading)
    assert "".join(row.texts[0] for row in rows) == book


def test_half_a_pair_of_utf16_in_an_evaluation_file_is_no_error(tmp_path: Path):
    """JSON may spell one; it has no form in UTF-8."""
    text = " ".join(f"word{i}" for i in range(13))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"text": f"\ud83d {text}"}))
    grams = read_grams([str(tmp_path / "eval.jsonl")])[1]
    assert found_in(grams, text)


def test_the_pieces_of_an_only_document_fill_both_splits_and_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], short_pieces
):
    (tmp_path / "book.txt").write_text("".join(paragraphs_of(0, 40)))
    assert local(tmp_path / "book.txt", out=tmp_path) == 0 and ids_in(tmp_path / "mine") == ids_of(
        paragraphs_of(0, 40)
    )
    assert "as there is no other document: validation text lies between training text" in shown(
        capsys, tmp_path
    )


def test_a_budget_ends_within_a_document_that_was_cut(tmp_path: Path, short_pieces):
    """However much was read: whether there is another document behind the budget changes
    nothing."""
    (tmp_path / "a.txt").write_text("".join(paragraphs_of(0, 40)))
    (tmp_path / "b.txt").write_text("".join(paragraphs_of(1, 40)))
    assert local(tmp_path / "a.txt", tmp_path / "b.txt", out=tmp_path / "one", tokens=3000) == 0
    assert ids_in(tmp_path / "one/mine") == ids_of(paragraphs_of(0, 40), budget=3000)


def test_a_file_that_is_read_again_has_the_cuts_of_its_last_reading(
    tmp_path: Path, short_pieces: None
):
    """A kill before the piece's end left those of an earlier content."""
    (tmp_path / "a.txt").write_text("".join(paragraphs_of(0, 30)))
    (tmp_path / "b.jsonl").write_text("no json")
    files = tmp_path / "a.txt", tmp_path / "b.jsonl"
    assert local(*files, out=tmp_path) == 1
    piece = tmp_path / "mine/parts/00000.json"
    assert piece.with_suffix(".cuts").exists()
    piece.unlink()
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(STORIES))
    write(tmp_path / "b.jsonl", DOCUMENTS)
    assert local(*files, out=tmp_path) == 0
    assert ids_in(tmp_path / "mine") == ids_of([*STORIES, *DOCUMENTS])


def test_text_files_of_a_half_made_folder_of_before_are_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(STORIES))
    (tmp_path / "b.jsonl").write_text("no json")
    assert local(tmp_path / "a.txt", tmp_path / "b.jsonl", out=tmp_path) == 1
    piece = tmp_path / "mine/parts/00000.json"
    earlier = {"stem", "input", "documents", "tokens", "bytes", "share", "end", "reason", "homes"}
    written = {key: value for key, value in json.loads(piece.read_text()).items() if key in earlier}
    piece.write_text(json.dumps(written))
    write(tmp_path / "b.jsonl", DOCUMENTS)
    errors = said(capsys, 0, tmp_path / "a.txt", tmp_path / "b.jsonl", out=tmp_path)
    assert "a.txt was read by an earlier version" in errors
    assert ids_in(tmp_path / "mine") == ids_of([*STORIES, *DOCUMENTS])


# --------------------------------------------------------------------------------------- the split


def test_another_val_share_goes_on_with_what_was_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The first small file: nothing falls to validation by the default, and the sentence says which
    share would do."""
    file = write(tmp_path / "a.jsonl", DOCUMENTS)
    errors = said(capsys, 2, file, out=tmp_path, val_share=0.0001)
    assert (
        "mine has no documents for val; " in errors
        and "there are 40 documents, and val_share=0.0001 leaves" in errors
    )
    share, count = re.search(r"give val_share=([\d.]+), which keeps (\d+) of them", errors).groups()
    with monkeypatch.context() as patched:
        patched.setattr(pieces, "make_piece", None)  # nothing is tokenised again
        assert local(file, out=tmp_path, val_share=share) == 0
    assert ids_in(tmp_path / "mine") == ids_of(DOCUMENTS, val_per_10k=round(float(share) * 10_000))
    assert shards.read_index(tmp_path / "mine").splits["val"].documents == int(count) >= 5


def test_a_book_of_a_megabyte_needs_no_more_than_the_proposed_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "input.txt").write_text(
        "".join(f"Line {n} of a play, spoken by someone.\n\n" for n in range(28_000))
    )
    errors = said(capsys, 2, tmp_path / "input.txt", out=tmp_path, val_share=0.0001)
    assert "pieces of its only document" in errors
    share = re.search(r"give val_share=([\d.]+),", errors)[1]
    assert local(tmp_path / "input.txt", out=tmp_path, val_share=share) == 0


def test_few_long_documents_are_told_how_to_become_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], short_pieces
):
    for n in range(2):
        (tmp_path / f"{n}.txt").write_text("".join(paragraphs_of(n)))
    errors = said(capsys, 2, tmp_path / "0.txt", tmp_path / "1.txt", out=tmp_path, val_share=0.0001)
    assert (
        "there are 2 documents" in errors
        and "end documents within a text file by lines of <|endoftext|>" in errors
    )


def test_text_that_the_tokenizer_cannot_spell_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A unigram tokenizer of Latin letters, on texts of which each has two emoji."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(["plain words of latin letters"] * 9, trainer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    texts = [f"{'words ' * i}🙂 of 🙂 letters" for i in range(40)]
    file = write(tmp_path / "a.jsonl", texts)
    assert local(file, out=tmp_path, tokenizer=folder) == 0
    assert shards.read_index(tmp_path / "mine").unknown == {"a.jsonl": 80}
    assert "unknown: 80 tokens of a.jsonl stand for text" in shown(capsys, tmp_path)


def test_one_document_cannot_fill_two_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    errors = said(capsys, 2, write(tmp_path / "a.jsonl", ["x"]), out=tmp_path)
    assert "each split needs a document, and there is 1 beside those" in errors


# ---------------------------------------------------------------------------- layouts and packings

ROWS = [{"id": n, "text": text, "more": {"list": [1, "]", {}]}} for n, text in enumerate(DOCUMENTS)]


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("layout", ["lines", "array", "indented", "strings"])
def test_json_of_every_layout_and_packing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, layout: str
):
    monkeypatch.setattr(json_reader, "JSON_CHARS", 50)  # elements are cut at every place
    content = {
        "lines": "".join(json.dumps(row) + "\n" for row in ROWS),
        "array": json.dumps(ROWS, ensure_ascii=False),
        "indented": "\ufeff\n " + json.dumps(ROWS, indent=2) + "\n\n",
        "strings": json.dumps(DOCUMENTS),
    }[layout]
    file = tmp_path / f"a.json{packing}"
    file.write_bytes(PACK[packing](content.encode()))
    assert local(file, out=tmp_path) == 0 and ids_in(tmp_path / "mine") == ids_of(DOCUMENTS)


def test_an_array_is_read_in_bounded_memory(tmp_path: Path):
    """15 MB of it, of which a part and an element are in memory at a time."""
    (tmp_path / "a.json").write_text(
        json.dumps([{"text": f"{n} " + "x" * 50_000} for n in range(300)])
    )
    tracemalloc.start()
    try:
        assert local(tmp_path / "a.json", out=tmp_path) == 0
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content, sentence",
    [
        ('[{"text": "a"}, {"text": "b"', "a.json is damaged or was cut short"),
        ('[{"text": "a"}, {"text": "b', "cut short"),
        ('[{"text": "a"}', "cut short"),
        ('[{"text": "a"} {"text": "b"}]', "element 1 of its array"),
        ('[{"text": "a"}, {"text": b}]', "element 2 of its array"),
        ('[{"text": "a"},]', "element 2 of its array"),
        ('[{"text": "a"}] {}', "text follows the end"),
        ("[" * 200_000, "element 1 of its array"),
    ],
)
def test_an_array_that_is_no_json_is_a_bad_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    sentence: str,
):
    monkeypatch.setattr(json_reader, "JSON_CHARS", 8)
    (tmp_path / "a.json").write_text(content)
    assert sentence in said(capsys, 1, tmp_path / "a.json", out=tmp_path)


def test_an_element_without_end_is_not_read_into_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(json_reader, "JSON_CHARS_MOST", 1000)
    (tmp_path / "a.json").write_text('[{"text": "' + "x" * 600_000)
    assert "longer than 1,000 characters" in said(capsys, 1, tmp_path / "a.json", out=tmp_path)


def test_an_odd_element_of_an_array_is_named_or_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.json").write_text(json.dumps([*ROWS[:5], 7, {"text": 3}, *ROWS[5:]]))
    assert "a.json, element 6 is no object but int" in said(
        capsys, 2, tmp_path / "a.json", out=tmp_path
    )
    assert local(tmp_path / "a.json", out=tmp_path, skip_bad="true") == 0 and ids_in(
        tmp_path / "mine"
    ) == ids_of(DOCUMENTS)
    assert shards.read_index(tmp_path / "mine").odd_rows[0]["rows"] == 2


def test_replaced_characters_of_an_array_are_counted(tmp_path: Path):
    content = json.dumps(
        [*ROWS, {"text": "caf!! " * 3 + "\ufffd" + "x" * 1000}], ensure_ascii=False
    ).encode()
    (tmp_path / "a.json").write_bytes(content.replace(b"!!", b"\xe9\xe9"))
    assert local(tmp_path / "a.json", out=tmp_path) == 0
    assert shards.read_index(tmp_path / "mine").replaced == {"a.json": 6}
    assert ids_in(tmp_path / "mine") == ids_of(
        [*DOCUMENTS, "caf\ufffd\ufffd " * 3 + "\ufffd" + "x" * 1000]
    )


def test_a_row_that_is_kept_meets_every_condition(tmp_path: Path):
    """A value that is wanted in one column does not make up for another column's."""
    pairs = [(language, kind) for language in ("py", "c") for kind in ("test", "code", "data")]
    rows = [
        {"text": f"{language} {kind}", "language": language, "kind": kind}
        for language, kind in pairs
    ]
    file = write_rows(tmp_path / "a.jsonl", rows)
    keep = {"language": ("py",), "kind": ("test", "code")}
    read = read_file(lambda: file.open("rb"), "a.jsonl", ("text",), keep, True, Reading())
    assert [row.texts for row in read] == [("py test",), ("py code",)]


def test_instructions_may_be_an_array(tmp_path: Path):
    rows = [{"prompt": f"What is {n}?", "response": text} for n, text in enumerate(DOCUMENTS)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    write_rows(tmp_path / "a.jsonl", rows)
    for form in ("json", "jsonl"):
        assert local(tmp_path / f"a.{form}", out=tmp_path / form, instruct="true") == 0
    shard = "mine/train_00000.bin"
    assert (tmp_path / "json" / shard).read_bytes() == (tmp_path / "jsonl" / shard).read_bytes()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(data=LINES, **options: object):
    parameters = zstandard.ZstdCompressionParameters.from_level(3, **options)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"


@pytest.mark.parametrize(
    "packed",
    [
        zstd(window_log=28),
        zstd(window_log=31),
        zstd(write_checksum=True),
        zstd(LINES[:3000]) + zstd(b"") + zstd(LINES[3000:]),
        SKIPPABLE + zstd(),
        zstd() + SKIPPABLE,
    ],
)
def test_zstd_of_any_window_and_any_frames_is_read(tmp_path: Path, packed: bytes):
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert local(tmp_path / "a.jsonl.zst", out=tmp_path) == 0 and ids_in(
        tmp_path / "mine"
    ) == ids_of(DOCUMENTS)


@pytest.mark.parametrize(
    "packed",
    [
        zstd()[:-3],
        zstd(LINES[:3000]) + zstd()[:50],
        zstd() + b"more",
        zstd(write_checksum=True)[:-1] + b"?",
        b"no zstd",
    ],
)
def test_damaged_zstd_is_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bytes
):
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert "a.jsonl.zst is damaged or was cut short" in said(
        capsys, 1, tmp_path / "a.jsonl.zst", out=tmp_path
    )


@pytest.mark.parametrize(
    "packed",
    [
        lzma.compress(LINES[:3000]) + lzma.compress(LINES[3000:]),
        lzma.compress(LINES[:3000]) + bytes(8) + lzma.compress(LINES[3000:]),
        lzma.compress(LINES) + bytes(4),
    ],
)
def test_xz_of_any_frames_is_read(tmp_path: Path, packed: bytes):
    (tmp_path / "a.jsonl.xz").write_bytes(packed)
    assert local(tmp_path / "a.jsonl.xz", out=tmp_path) == 0 and ids_in(
        tmp_path / "mine"
    ) == ids_of(DOCUMENTS)


@pytest.mark.parametrize(
    "packed",
    [
        lzma.compress(LINES[:3000]) + b"?" + lzma.compress(LINES[3000:])[1:],
        lzma.compress(LINES) + b"more",
        lzma.compress(LINES)[:-4],
        bytes(5000),
    ],
)
def test_damaged_xz_is_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bytes
):
    """Also behind its first frame, where Python's own reader takes the damage for the end."""
    (tmp_path / "a.jsonl.xz").write_bytes(packed)
    assert "a.jsonl.xz is damaged or was cut short" in said(
        capsys, 1, tmp_path / "a.jsonl.xz", out=tmp_path
    )


def test_zeros_packed_by_zstd_are_unpacked_in_bounded_memory():
    packed = zstd(bytes(1 << 28))
    tracemalloc.start()
    try:
        frames = packed_files.FramesReader(
            io.BytesIO(packed), zstandard.ZstdDecompressor().decompressobj
        )
        reader = io.BufferedReader(frames)
        assert sum(len(block) for block in iter(lambda: reader.read(1 << 16), b"")) == 1 << 28
        assert tracemalloc.get_traced_memory()[1] < 1.5e8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "pattern, expanded",
    [
        ("{a,b}/*", ["a/*", "b/*"]),
        ("x{a,b{c,d}}.{e,f}", ["xa.e", "xa.f", "xbc.e", "xbc.f", "xbd.e", "xbd.f"]),
        ("{,a}b", ["b", "ab"]),
        ("a", ["a"]),
        ("{a}", ["{a}"]),
        ("{a", ["{a"]),
        ("{a}{b,c}", ["{a}b", "{a}c"]),
    ],
)
def test_braces_are_expanded_as_a_shell_does(pattern: str, expanded: list[str]):
    assert hub.expand_braces(pattern) == expanded


# -------------------------------------------------------------------- what was made of these files


def touch(file: Path, content=None):
    """Give a file, with another content or its own, a time of its own."""
    file.write_bytes(content or file.read_bytes())
    os.utime(file, (1, len(file.read_bytes())))


@pytest.mark.parametrize("options", [{}, {"tokens": 900}])
def test_a_file_whose_time_alone_changed_is_still_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, int]
):
    earlier = write(tmp_path / "earlier.jsonl", some_documents(9, 5) + DOCUMENTS[:4])
    assert local(earlier, out=tmp_path, name="earlier") == 0
    files = [write(tmp_path / "a.jsonl", [*DOCUMENTS[:30], "", *DOCUMENTS[:3]]), tmp_path / "b.txt"]
    files[1].write_text("\n<|endoftext|>\n".join(STORIES))
    (tmp_path / "eval.txt").write_text(" ".join(map(str, range(13))))
    write(files[0], [" ".join(map(str, range(14))), *DOCUMENTS[:30], "", *DOCUMENTS[:3]])
    options = {"decontaminate": tmp_path / "eval.txt", **options}
    assert local(*files, out=tmp_path, **options) == 0
    made = (tmp_path / "mine/index.json").read_bytes()
    for file in files:
        touch(file)
    capsys.readouterr()
    assert local(*files, out=tmp_path, **options) == 0
    out, errors = capsys.readouterr()
    assert "mine is complete" in out and "are read to compare their documents" in errors
    assert (tmp_path / "mine/index.json").read_bytes() == made


@pytest.mark.parametrize(
    "change",
    [
        lambda texts: texts[:-1],
        lambda texts: [*texts, "more"],
        lambda texts: [texts[0].upper(), *texts[1:]],
        lambda texts: [*texts, texts[0]],
    ],
)
def test_a_file_with_other_documents_is_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[..., Any]
):
    file = write(tmp_path / "a.jsonl", DOCUMENTS)
    assert local(file, out=tmp_path) == 0
    touch(write(file, change(DOCUMENTS)))
    assert "and these hold other documents than it does" in said(capsys, 2, file, out=tmp_path)


def test_a_broken_line_has_one_line_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('\n\n{"text": "one"}\n\n{"text": "two"\n')
    sentence = said(capsys, 1, tmp_path / "a.jsonl", out=tmp_path)
    assert "a.jsonl:5 is no line of JSON (Expecting ',' delimiter, character 15" in sentence
    assert "line 2 column" not in sentence


def test_a_source_that_is_not_there_is_not_advised_to_be_a_command(tmp_path: Path):
    """An imported model's data is called so, and no source of configs/sources.py."""
    with pytest.raises(UserError) as caught:
        shards.read_index(tmp_path / "imported")
    assert "prepare_data.py imported" not in str(caught.value)
    assert f"`python prepare_data.py local FILE... name=imported out={tmp_path}`" in str(
        caught.value
    )
    assert "set data.mixture= and data.dir= to what there is" in str(caught.value)


def test_a_source_that_is_being_prepared_is_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """As where training is started too early; the sentence for absent sources is another line."""
    assert said(capsys, 2, write(tmp_path / "a.jsonl", ["one text"]), out=tmp_path)
    lines = shards.missing_source([tmp_path / "mine", tmp_path / "nowhere"]).splitlines()
    assert lines[0].startswith(f"{tmp_path}/mine is not finished: wait for the `python prepare")
    assert lines[1].startswith(f"there is no {tmp_path}/nowhere/index.json")


def test_a_file_that_may_not_be_read_is_not_to_be_fetched_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = write(tmp_path / "a.jsonl", DOCUMENTS)

    def refuse(*_: object):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(local_files, "open", refuse, raising=False)
    errors = said(capsys, 1, file, out=tmp_path)
    assert "Permission denied): check its permissions" in errors and "fetch" not in errors


@pytest.mark.parametrize(
    "roles, sentence",
    [
        (
            {},
            (
                "says eos_token=None and bos_token=None, but a token of tokenizer.json must end"
                " each document"
            ),
        ),
        (
            {"eos_token": "</s>"},
            "name one of its tokens there; its special ones are <|begin|>, <|end|>",
        ),
    ],
)
def test_a_tokenizer_without_an_end_is_not_to_be_fetched_again(
    tmp_path: Path, roles: dict[str, str], sentence: str
):
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer", roles)))
    assert "fetch" not in str(caught.value)


# -------------------------------------------------------------------------------- evaluation files

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([LONG.encode(), None, b"\xff"]),
        pyarrow.array([{"a": [LONG]}, None, {"a": None}]),
        pyarrow.array([LONG, None, LONG]).dictionary_encode(),
        pyarrow.ExtensionArray.from_storage(
            pyarrow.json_(), pyarrow.array([json.dumps({"q": LONG.replace(" ", "\n")}), None, "3"])
        ),
    ],
)
def test_evaluation_texts_of_every_type_of_parquet_are_looked_for(tmp_path: Path, column):
    file = write_parquet(tmp_path / "eval.parquet", when=FAR, where=NOWHERE, question=column)
    _, grams = read_grams([str(file)])
    assert len(grams) == 1 and found_in(grams, f"so: {LONG}!")


@pytest.mark.parametrize("column", ["prompt", "response"])
def test_evaluation_texts_are_looked_for_in_both_columns_of_an_instruction(tmp_path, column):
    """The question of a benchmark most often stands in the prompt."""
    rows = [{"prompt": f"What is {n}?", "response": text} for n, text in enumerate(DOCUMENTS)]
    rows[7][column] = f"so: {LONG}?"
    (tmp_path / "eval.txt").write_text(LONG)
    file = write_rows(tmp_path / "a.jsonl", rows)
    options = {"instruct": "true", "decontaminate": tmp_path / "eval.txt"}
    assert local(file, out=tmp_path, **options) == 0
    index = json.loads((tmp_path / "mine/index.json").read_text())
    kept = sum(split["documents"] for split in index["splits"].values())
    assert (index["contaminated"], kept) == (1, len(DOCUMENTS) - 1)


@pytest.mark.parametrize(
    "name, content", [("a.txt", f"café {LONG}"), ("a.jsonl", f'{{"q": "café {LONG}"}}')]
)
def test_an_evaluation_file_that_is_not_utf8_is_a_sentence(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match="cannot be read .*utf-8"):
        read_grams([str(tmp_path / name)])


def test_a_column_within_one_of_type_json_is_read(tmp_path: Path):
    storage = pyarrow.array([json.dumps({"body": text, "other": 5}) for text in DOCUMENTS])
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), storage)
    file = write_parquet(tmp_path / "a.parquet", meta=column)
    assert local(file, out=tmp_path, column="meta.body") == 0
    assert ids_in(tmp_path / "mine") == ids_of(DOCUMENTS)


def test_the_sentence_about_an_empty_split_names_markers_within_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.txt").write_text("".join(f"story {n}.<|endoftext|>\n" for n in range(9)))
    errors = said(capsys, 2, tmp_path / "a.txt", out=tmp_path)
    assert "put each end-of-text token of a.txt alone on its line" in errors
    assert "9 lines hold one beside other text" in errors and "files 0" in errors


def test_a_bad_file_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "koi.jsonl").write_bytes(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in RUSSIAN).encode(
            "koi8-r"
        )
    )
    errors = said(capsys, 1, tmp_path / "koi.jsonl", out=tmp_path)
    assert errors.count("koi.jsonl") == 1 and "mend what is said of each" in errors
