"""The run folder and its records. This module does not import torch, so that readers start fast.

recipe.yaml        the resolved recipe
environment.json   one entry per start: versions, code, hardware, hosts, data
metrics.jsonl      one record per line (kinds: train, eval, checkpoint, resume, callback, profile)
telemetry/         utilization, one file per host
log.txt            the terminal output
checkpoints/       checkpoints
tensorboard/       event files
profile/           trace and memory snapshot of --profile
evaluations/       what the model gets wrong, of `paceline evaluate --details`
flight-recorder/   recent collectives of each rank, if one timed out
summary.json       status and results; rewritten during the run
stop-request.json  why another process, such as `paceline sweep`, asks the run to end early
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from paceline.config import yamls
from paceline.system.files import LOCK_NAME, is_locked, sync
from paceline.system.host import host_name
from paceline.system.untrusted import is_plain, leads_out, open_regular, read_regular
from paceline.track.checks import Start, Summary, TelemetrySample, is_valid, is_valid_record, valid
from paceline.track.sealed import is_intact, write_sealed

_RECENT = 60.0  # seconds
_MAX_JSON = 1 << 26
_MAX_LINES = 1 << 30
_MAX_LINE = 1 << 22  # values of tens of thousands of ranks
# the checksum is removed as well, because it does not match the rest of the line
_PER_RANK = re.compile(rb', "(?:(?:seconds|memory)_per_rank": (?:\{[^}]*\}|\[[^]]*\])|crc": "[0-9a-f]{8}")')


class RunFolder:
    """Paths and content of a run folder, which may be untrusted."""

    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.telemetry = path / "telemetry"
        self.log = path / "log.txt"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.profile = path / "profile"
        self.evaluations = path / "evaluations"
        self.flight_recorder = path / "flight-recorder"
        self.summary = path / "summary.json"
        self.stop_request = path / "stop-request.json"
        self.num_corrupt = 0
        """The number of corrupt lines found by the last call of `records`."""
        self.cut_off = False
        """Whether the last line was incomplete, as in the records of a killed run."""

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "RunFolder | None":
        """Return the run folder that a checkpoint is in; None if it is elsewhere."""
        # a path stays as the user gave it, unless it is too short to have the run folder in it
        place = checkpoint if len(checkpoint.parts) > 2 else checkpoint.absolute()
        return cls(place.parent.parent) if place.parent.name == "checkpoints" else None

    @property
    def exists(self) -> bool:
        return self.recipe.is_file()

    @property
    def contains_run(self) -> bool:
        """Whether the folder contains a run, even one without recipe.yaml."""
        return any(map(os.path.lexists, (self.recipe, self.environment, self.metrics, self.checkpoints)))

    @property
    def recipe_is_missing(self) -> bool:
        """Whether recipe.yaml is missing or empty."""
        return not os.path.lexists(self.recipe) or (self.exists and not self.recipe.stat().st_size)

    @property
    def recipe_is_unchanged(self) -> bool | None:
        """Whether recipe.yaml is unchanged since the last start; None if unknown."""
        # of the last two starts, because a start may have been killed between its entry and its recipe.yaml
        known = {start["recipe_sha256"] for start in self.read_starts()[-2:] if start.get("recipe_sha256")}
        try:
            text = read_regular(self.recipe, yamls.MAX_BYTES, self.path)
        except OSError:
            return None
        return hashlib.sha256(text).hexdigest() in known if known else None

    @property
    def telemetry_files(self) -> list[Path]:
        """One file per host. Hidden files, e.g. of file managers, are ignored."""
        return sorted(path for path in self.telemetry.glob("*.jsonl") if not path.name.startswith("."))

    def unreadable(self, max_telemetry: int = _MAX_LINES) -> Iterator[str]:
        """Yield files that are not read, with the reason: FIFOs, devices, links out of the folder, huge files."""
        limits = {self.recipe: yamls.MAX_BYTES, self.environment: _MAX_JSON, self.summary: _MAX_JSON}
        limits |= {self.metrics: _MAX_LINES} | dict.fromkeys((self.log, *self.telemetry_files), max_telemetry)
        for path, limit in limits.items():
            try:
                open_regular(path, limit, self.path).close()
            except FileNotFoundError:
                if path.is_symlink():
                    yield f"{path.relative_to(self.path)} is a dangling link; remove it"
            except OSError as error:
                yield f"{path.relative_to(self.path)}: {error.strerror}"

    def unwritable(self) -> Iterator[str]:
        """Yield why training must not write here: unreadable files, and links that redirect what it writes."""
        yield from self.unreadable(max_telemetry=sys.maxsize)
        if (self.path / LOCK_NAME).is_symlink():
            yield f"{LOCK_NAME} is a link; remove it"
        for folder in (self.telemetry, self.checkpoints, self.tensorboard, self.profile, self.flight_recorder):
            if leads_out(self.path, folder):
                yield f"{folder.name} is a link to a folder outside {self.path}; replace it with a folder"
            elif links := [path.name for path in folder.glob("*") if path.is_symlink()]:
                yield f"{folder.name} contains links ({', '.join(links[:3])}); replace them with their targets"

    def read_summary(self) -> dict[str, Any]:
        """Return summary.json, or {} if it is missing or invalid."""
        summary = _read_json(self.summary, self.path)
        return summary if is_valid(summary, Summary) else {}

    def record_failure(self, message: str) -> None:
        """Mark the run as failed, unless rank 0 has recorded how it ended."""
        summary = self.read_summary()
        if summary.get("status") == "running" and not self.in_use:
            with suppress(OSError):  # the error itself is more important
                write_sealed(self.summary, summary | {"status": "failed", "message": message})

    def request_stop(self, by: str, reason: str) -> None:
        """Ask the process that trains here to evaluate, checkpoint and finish the run after its next step."""
        write_sealed(self.stop_request, {"by": by, "reason": reason})

    def requested_stop(self) -> tuple[str, str] | None:
        """Return who asked the run to end, and why; None if nobody did."""
        if not self.stop_request.exists():
            return None
        request = _read_json(self.stop_request, self.path)
        by, reason = request.get("by"), request.get("reason")
        return (by, reason) if isinstance(by, str) and isinstance(reason, str) else None

    @property
    def finished(self) -> bool:
        return self.read_summary().get("status") == "finished"

    def read_starts(self) -> list[dict[str, Any]]:
        """Return the valid entries of environment.json, one per start."""
        starts = _read_json(self.environment, self.path).get("starts", [])
        return valid(starts, Start) if isinstance(starts, list) else []

    @property
    def in_use(self) -> bool:
        """Whether a process on this host locks the folder, or one on another host wrote to it recently."""
        if is_locked(self.path):
            return True
        hosts = {host for start in self.read_starts()[-1:] for host in start.get("hosts", {})}
        if host_name() in hosts:
            return False
        files = (self.metrics, self.summary, self.environment, self.recipe, *self.telemetry_files)
        written = [path.stat().st_mtime for path in files if path.exists()]
        return bool(written) and time.time() - max(written) < _RECENT

    def append_environment(self, start: dict[str, Any]) -> None:
        """Add a start to environment.json. A corrupt file is kept under another name."""
        starts = self.read_starts()
        if not starts and self.environment.exists():
            self.environment.rename(self.path / f"corrupt-{self.environment.name}")
        write_sealed(self.environment, {"starts": [*starts, start]})

    def sync(self) -> None:
        """Sync all files but the checkpoints: a checkpoint that survives a power cut needs its records."""
        for path in (self.recipe, self.environment, self.metrics, self.log, self.telemetry, self.tensorboard):
            for file in path.glob("*.*") if path.is_dir() else ():
                if (
                    not file.name.startswith(".") and file.is_file()
                ):  # hidden files are temporary; opening a FIFO blocks
                    sync(file)
            if path.exists():
                sync(path)
        sync(self.path)

    @property
    def last_recorded_step(self) -> int:
        """The last step before the first gap in the records. Steps that a resumed run marked as missing count."""
        end = 0
        for record in self.records():
            if "missing" in record or (record["kind"] == "train" and record["step"] - record["steps"] <= end):
                end = max(end, record["step"])
        return end

    def records(self, per_rank: int = 0) -> list[dict[str, Any]]:
        """Return the valid records, without those after the checkpoint that the run was resumed from.

        Corrupt lines are left out and counted. With `per_rank`, only about that many records, evenly spaced, keep
        their per-rank values, which are slow to read for a long run on many ranks.
        """
        read = [line for line in read_lines(self.metrics, self.path) if line.strip()]
        self.cut_off = bool(read) and not read[-1].endswith(b"\n")
        lines = [line if is_intact(line) else b"?" for line in read]
        detailed = [number for number, line in enumerate(lines) if b"_per_rank" in line]
        every = max(1, len(detailed) // per_rank) if per_rank else 1
        for number in set(detailed) - set(detailed[::-1][::every]):
            lines[number] = _PER_RANK.sub(b"", lines[number])
        found = [next(iter(records_of([line])), None) for line in lines]
        if self.cut_off and found[-1] is None:
            found.pop()  # still being written
        kept = _without_undone(found)
        self.num_corrupt = kept.count(None)
        return [record for record in kept if record is not None]


def read_lines(path: Path, inside: Path) -> Iterator[bytes]:
    """Yield the lines of a file in a run folder. Lines longer than any record are truncated."""
    try:
        with open_regular(path, _MAX_LINES, inside) as file:
            while line := file.readline(_MAX_LINE):
                yield line
                while len(line) == _MAX_LINE and not line.endswith(b"\n"):
                    line = file.readline(_MAX_LINE)
    except OSError:
        return


def records_of(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the valid records of lines of metrics.jsonl."""
    return [record for record in json_lines(lines) if is_valid_record(record)]


def samples_of(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the valid samples of lines of telemetry."""
    return valid((line for line in json_lines(lines) if line.get("kind") == "sample"), TelemetrySample)


def without_undone(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records without those of steps that a resumed run repeated."""
    return [record for record in _without_undone(records) if record is not None]


def _without_undone(records: Iterable[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """The same with None for corrupt lines. Those directly before a resume come from a kill and are left out."""
    kept: list[dict[str, Any] | None] = []
    for record in records:
        if record is not None and record["kind"] == "resume":
            kept = [old for old in kept if old is None or old["step"] <= record["step"]]
            while kept and kept[-1] is None:
                kept.pop()
        kept.append(record)
    return kept


def json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of lines. Incomplete and other lines are left out."""
    for line in lines:
        try:
            record = from_json(line, allow_inf_nan=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and is_intact(line):
            yield record


def split_seconds(trained: list[dict[str, Any]]) -> dict[str, float]:
    """Return training seconds by part. Parts that some records did not measure count as compute."""
    splits = [record["seconds"] for record in trained if record.get("seconds")]
    known = set.intersection(*map(set, splits)) if splits else set()
    found: dict[str, float] = {}
    for split in splits:
        for part, seconds in split.items():
            name = part if part in known else "compute"
            found[name] = found.get(name, 0.0) + seconds
    return found


def largest_batch(root: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of the newest `paceline find-batch` with this key, which is stored next to the runs."""
    paths = sorted(root.glob("find-batch-*/find-batch.json"), key=lambda path: path.stat().st_mtime)
    found = [answer for path in paths if (answer := _read_json(path, root)).get("key") == key and is_plain(answer)]
    wanted = ("largest", "largest_global", "fastest", "memory_limit", "searched")
    return {name: found[-1].get(name) for name in wanted} if found else None


def _read_json(path: Path, inside: Path) -> dict[str, Any]:
    try:
        text = read_regular(path, _MAX_JSON, inside)
        content = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and is_intact(text) else {}
