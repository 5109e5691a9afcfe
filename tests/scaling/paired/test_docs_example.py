"""The example in docs/scaling.md on the statistics of pairs prints what the page shows."""

import subprocess
import sys

from tests.conftest import ROOT


def test_the_example_prints_what_the_page_says() -> None:
    page = (ROOT / "docs/scaling.md").read_text()
    section = page.split("## The statistics of pairs in a notebook")[1]
    code = section.split("```python\n")[1].split("```")[0]
    printed = section.split("```\n")[2]
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == printed
