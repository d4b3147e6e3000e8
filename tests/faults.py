"""The table of faults tried and what happened, as the tests that tried them saw it.

    python -m pytest --faults=data/results/faults.md

A test says what it did and what came of it with the fixture `fault`; the row is kept if the test
passes. Without `--faults` nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

Fault = Callable[[str, str, str], None]
PROPERTY = "fault"
FOLDERS = re.compile(r"(?<![\w.>:/])/(?:[^\s/:'\"]+/)+")  # of this machine; files keep their names
PORT = re.compile(r"(127\.0\.0\.1):\d+")  # another one each time


class Row(NamedTuple):
    """One fault: the area it is of, what was done, what happened, and the test that shows it."""

    area: str
    done: str
    happened: str
    test: str


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Fault:
    """`fault("translate", "a truncated checkpoint", done.stderr)`: a row of the table."""

    def record(area: str, done: str, happened: str) -> None:
        happened = PORT.sub(r"\1", FOLDERS.sub("", happened))
        if "╭" in happened:  # a usage error: what stands in the box is the message
            happened = " ".join(re.findall("│(.*)│", happened))
        row = (area, *(plain(text) for text in (done, happened)))
        request.node.user_properties.append((PROPERTY, row))

    return record


def plain(text: str) -> str:
    """One line that any file and any pipe takes: a name of bytes that are no UTF-8 is escaped."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode()


class FaultsTable:
    """Collects the rows of the tests that passed, on whichever worker they ran."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            test = report.nodeid.split("[")[0]
            for name, row in report.user_properties:
                if name == PROPERTY:
                    self.rows.append(Row(*row, test=test))

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(table(self.rows), encoding="utf-8")


def table(rows: list[Row]) -> str:
    """The rows as Markdown, a table for each area."""
    text = [
        "# Faults tried, and what happened",
        "",
        "Written by the tests that tried them: `python -m pytest --faults=data/results/faults.md`.",
        "Messages are the program's own, without folders.",
    ]
    for area in sorted({row.area for row in rows}):
        text += ["", f"## {area}", "", "| what was done | what happened | test |", "|---|---|---|"]
        for row in sorted(row for row in rows if row.area == area):
            cells = (cell.replace("|", r"\|") for cell in (row.done, row.happened))
            text.append(f"| {' | '.join(cells)} | `{row.test}` |")
    return "\n".join(text) + "\n"
