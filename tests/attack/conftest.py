"""Attacks are counted, and the counts printed as a table at the end of `make attack`."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

_SURVIVED = "attacks survived"


@pytest.fixture
def survived(record_property) -> Callable[[str, int], None]:
    """survived("flipped bits in checkpoints", 408): call it after the assertions on that many attacks passed."""

    def note(what: str, count: int = 1) -> None:
        assert count > 0, f"{what}: nothing was tried"
        record_property(_SURVIVED, (what, count))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for _, (what, count) in (own for own in report.user_properties if own[0] == _SURVIVED):
            counts[what] += count
    if counts:
        terminalreporter.section(_SURVIVED)
        for what, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:8,}  {what}")
