"""Runs probes in rank processes, on this machine or on other hosts, and reads their figures."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.launch.groups import Nodes, RankGroup
from paceline.selftest.settings import Settings

HANG = 900.0
"""Seconds without a result after which processes are ended."""


def measure(nodes: Nodes, probes: Sequence[str], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each probe with its figures, or with {"error": reason}; after a failure the others run in new processes."""
    left = list(probes)
    while left:
        reason = ""
        words = ["selftest-probe", "--probes", ",".join(left), "--settings", settings.to_text()]
        for found in _run(nodes.commands(words)):
            if "probe" in found:
                left.remove(found["probe"])
                yield found["probe"], found["figures"] | {"probe_seconds": found["seconds"]}
            else:
                reason = found["error"]
        if left:
            yield left.pop(0), {"error": reason or "the processes ended without a result"}


def _run(commands: list[list[str]]) -> Iterator[dict[str, Any]]:
    """Start the processes of all nodes; yield the figures that they print, at the end the error if any."""
    with RankGroup(commands) as group:
        try:
            for line in group.lines(HANG):
                if line.startswith('{"probe"'):
                    yield json.loads(line)
        except TimeoutError as error:
            yield {"error": str(error)}
            return
        if any(group.statuses):
            yield {"error": group.reason}
