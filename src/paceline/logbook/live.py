"""A run as it stands now, from the ends of its files: cheap enough to ask every second, also over a mounted folder."""

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
    name: str
    status: str
    total_steps: int
    train: dict[str, Any] = field(default_factory=dict)
    evaluated: dict[str, Any] = field(default_factory=dict)
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last sample of each."""
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


def standing(folder: RunFolder, summary: dict[str, Any]) -> str:
    """The status of a run; one that nobody works on any more, though it has not ended, was killed."""
    status = summary.get("status", "starting")
    return "killed" if status in ("running", "starting") and not folder.in_use else printable(status)


def snapshot(path: Path) -> Snapshot:
    folder = RunFolder(path)
    summary, starts = folder.read_summary(), folder.read_starts()
    found = of_records(path.resolve().name, standing(folder, summary), summary, _tail(folder.metrics, path))
    found.ranks = starts[-1].get("ranks", 0) if starts else 0
    for file in folder.telemetry_files:
        if samples := samples_of(_tail(file, path)):
            found.hosts[printable(file.stem)] = samples[-1]
    return found


def of_records(name: str, status: str, summary: dict[str, Any], lines: list[bytes]) -> Snapshot:
    """From the text of a run's files, wherever they are."""
    found = Snapshot(printable(name), printable(status), summary.get("total_steps", 0))
    records = without_undone(records_of(lines))
    found.train = next((record for record in reversed(records) if record["kind"] == "train"), {})
    found.evaluated = next((record for record in reversed(records) if record["kind"] == "eval"), {})
    return found


def _tail(path: Path, inside: Path) -> list[bytes]:
    """Whole lines at the end of a file, whatever its size."""
    try:
        with open_regular(path, sys.maxsize, inside) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size > _TAIL else lines
