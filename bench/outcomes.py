"""A plugin of pytest (`-p bench.outcomes`): a JSON line a test as soon as it has ended, in the
folder that BORROWED_OUT names, so that a run that is cut short keeps what it knows."""

import json
import os
from pathlib import Path

import pytest

FILE = "outcomes.jsonl"


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("BORROWED_OUT")
    # with pytest-xdist its processes report to the first one, which alone writes
    if folder is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(folder) / FILE), "outcomes-of-tests")


class Outcomes:
    """Writes the outcome of each test to `path`."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Of a collection alone, the tests that there are."""
        if session.config.option.collectonly:
            for item in session.items:
                self._write({"test": item.nodeid, "outcome": "collected"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # a test is its call; a set-up that fails or skips has none
        if report.when != "call" and not (report.when == "setup" and not report.passed):
            return
        outcome = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            outcome["message"] = str(report.longrepr)[-2000:]
        self._write(outcome)

    def _write(self, outcome: dict) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(outcome) + "\n")
