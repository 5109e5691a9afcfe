"""Files of JSON lines after a kill."""

import json
from pathlib import Path

from lib.files import append_line, read_rows


def test_a_line_behind_one_that_was_cut_short_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2, "lo')
    append_line(path, b'{"n": 3}\n')
    assert read_rows(path) == [{"n": 1}, {"n": 3}]


def test_lines_are_added_without_empty_ones_between_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for n in (1, 2):
        append_line(path, b'{"n": %d}\n' % n)
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == [{"n": 1}, {"n": 2}]
