"""Tests of prepare/harvest.py: what an installation yields, and that odd files do no harm."""

from itertools import islice

import pytest

from prepare import harvest
from tests.conftest import process


@pytest.mark.parametrize("source", harvest.LICENSES)
def test_the_installation_has_every_source_in_a_fixed_order(source):
    first, again = (list(islice(harvest.documents(source), 30)) for _ in range(2))
    assert len(first) == 30 and first == again and all(isinstance(text, str) for text in first)
    assert harvest.revision(source).startswith("CPython 3.")
    if source in ("science", "prose"):
        assert all(len(text) >= 400 for text in first)


def test_harvesting_imports_no_package():
    code = ("import sys; from prepare import harvest\nnext(harvest.documents('science'))\n"
            "assert not {'scipy', 'sympy', 'sklearn', 'torch'} & set(sys.modules)")
    assert process("-c", code).returncode == 0


def test_odd_files_are_read_or_left_out(tmp_path):
    files = {"b/z.py": b"caf\xe9", "a.py": b"x = 1\n", "test/t.py": b"no", "b/test_x.py": b"y", "c.txt": b"no"}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    assert list(harvest.read_files(tmp_path, "*.py")) == ["x = 1\n", "y", "caf\ufffd"]
    assert sorted(harvest.read_files(tmp_path, "*.py", mixed=True)) == ["caf\ufffd", "x = 1\n", "y"]
    assert list(harvest.read_files(None, "*.py")) == []


def test_docstrings_come_from_the_syntax_tree():
    source = ('"""Module."""\nclass A:\n    """Class\n\n    more\n      indented."""\n'
              '    async def f(self):\n        "f"\n    def g(self): 1\n')
    assert harvest.docstrings(source) == ["Module.", "Class\n\nmore\n  indented.", "f"]
    for broken in ["def", "\0", "(" * 5000, "'\\d'", ""]:
        assert harvest.docstrings(broken) in ([], ["\\d"])
