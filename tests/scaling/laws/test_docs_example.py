"""The worked example of docs/scaling.md runs as it stands there."""

import re

from tests.conftest import ROOT, process


def test_the_example_in_a_notebook_prints_what_the_page_says():
    section = (ROOT / "docs/scaling.md").read_text().split("## The laws in a notebook")[1]
    match = re.search(r"```python\n(.+?)```\n\nprints\n\n```\n(.+?)```", section, re.DOTALL)
    assert match is not None
    code, output = match.groups()
    assert process("-c", code).stdout == output
