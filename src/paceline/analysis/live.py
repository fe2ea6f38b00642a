"""The current state of a run, from the ends of its files: cheap enough to read every second from a mounted folder."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.system.files import printable
from paceline.system.untrusted import open_regular
from paceline.track.records import RunFolder, records_of, samples_of, without_undone

_TAIL = 1 << 18


@dataclass
class Snapshot:
    """Status of a run with its newest records."""

    name: str
    status: str
    total_steps: int
    train: dict[str, Any] = field(default_factory=dict)
    evaluated: dict[str, Any] = field(default_factory=dict)
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The newest telemetry sample per host."""
    ranks: int = 0

    @property
    def step(self) -> int:
        return int(self.train.get("step", 0))

    @property
    def seconds_left(self) -> float | None:
        steps, seconds = self.train.get("steps"), self.train.get("seconds")
        if not steps or not seconds or not self.total_steps:
            return None
        return (self.total_steps - self.step) * sum(seconds.values()) / steps


def current_status(folder: RunFolder, summary: dict[str, Any]) -> str:
    """Return the status of a run; `killed` if it has not ended and no process holds its folder."""
    status = summary.get("status", "starting")
    return "killed" if status in ("running", "starting") and not folder.in_use else printable(status)


def snapshot(path: Path) -> Snapshot:
    """Return the current state of the run in a folder."""
    folder = RunFolder(path)
    summary, starts = folder.read_summary(), folder.read_starts()
    now = of_records(path.resolve().name, current_status(folder, summary), summary, _tail(folder.metrics, path))
    now.ranks = starts[-1].get("ranks", 0) if starts else 0
    for file in folder.telemetry_files:
        if samples := samples_of(_tail(file, path)):
            now.hosts[printable(file.stem)] = samples[-1]
    return now


def of_records(name: str, status: str, summary: dict[str, Any], lines: list[bytes]) -> Snapshot:
    """Return the state of a run from the lines of its metrics.jsonl, which may be on another host."""
    now = Snapshot(printable(name), printable(status), summary.get("total_steps", 0))
    records = without_undone(records_of(lines))
    now.train = next((record for record in reversed(records) if record["kind"] == "train"), {})
    now.evaluated = next((record for record in reversed(records) if record["kind"] == "eval"), {})
    return now


def _tail(path: Path, inside: Path) -> list[bytes]:
    """Return the complete lines at the end of a file of any size."""
    try:
        with open_regular(path, sys.maxsize, inside) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size > _TAIL else lines
