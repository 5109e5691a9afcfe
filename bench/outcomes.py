"""A plugin of pytest (`-p bench.outcomes`): a JSON line a test as soon as it has ended, in the
folder that BORROWED_OUT names, so that a run that is cut short keeps what it knows."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lib.files import append_line, to_line

if TYPE_CHECKING:  # results are read on machines that have no pytest, too
    import pytest

FILE = "outcomes.jsonl"
MESSAGE_LENGTH = 2000  # characters of a failure's message that are kept, its last ones


@dataclass(frozen=True, kw_only=True)
class TestOutcome:
    """A line of outcomes.jsonl: a test that has ended."""

    schema_version: int = 1  # of this list of keys
    test: str  # file::name of it
    outcome: str  # passed, failed, skipped; collected where tests are only collected
    seconds: float | None = None  # of the test itself; null where it is only collected
    message: str | None = None  # the end of what pytest says of a failure


def pytest_configure(config: "pytest.Config") -> None:
    folder = os.environ.get("BORROWED_OUT")
    # with pytest-xdist its processes report to the first one, which alone writes
    if folder is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(folder) / FILE), "outcomes-of-tests")


class Outcomes:
    """Writes the outcome of each test to `path`."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_collection_finish(self, session: "pytest.Session") -> None:
        """Of a collection alone, the tests that there are."""
        if session.config.option.collectonly:
            for item in session.items:
                self._write(TestOutcome(test=item.nodeid, outcome="collected"))

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        # a test is its call; a set-up that fails or skips has none
        if report.when != "call" and not (report.when == "setup" and not report.passed):
            return
        message = str(report.longrepr)[-MESSAGE_LENGTH:] if report.failed else None
        self._write(
            TestOutcome(
                test=report.nodeid,
                outcome=report.outcome,
                seconds=report.duration,
                message=message,
            )
        )

    def _write(self, outcome: TestOutcome) -> None:
        append_line(self.path, to_line(asdict(outcome)))
