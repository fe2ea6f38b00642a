"""The run folder: where everything a report says is read from. No torch here, so that readers start at once.

recipe.yaml        the resolved recipe
environment.json   one entry per start: versions, code, hardware, hosts, data
metrics.jsonl      one record a line (kinds: train, eval, checkpoint, resume)
telemetry/         use of each host, one file a host
log.txt            what the terminal showed
checkpoints/       checkpoints
tensorboard/       event files
summary.json       status and results; rewritten as the run goes on
"""

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from paceline.config import yamls
from paceline.system.files import GrowingFile, is_locked, sync, write_text
from paceline.system.host import host_name
from paceline.system.untrusted import check_regular, is_plain, open_regular, read_regular
from paceline.track.checks import Sample, Start, Summary, is_sound, is_sound_record, sound
from paceline.track.sealed import is_intact, seal, write_sealed

_MOMENT = 60.0
_MOST_JSON = 1 << 26
_MOST_LINES = 1 << 30
_LONGEST_LINE = 1 << 22  # the figures of tens of thousands of ranks
# what is left of a line without them no longer has its checksum
_PER_RANK = re.compile(rb', "(?:(?:seconds|memory)_per_rank": (?:\{[^}]*\}|\[[^]]*\])|crc": "[0-9a-f]{8}")')


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.telemetry = path / "telemetry"
        self.log = path / "log.txt"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.summary = path / "summary.json"
        self.num_corrupt = 0
        """Lines of the records that were read last which tell nothing."""
        self.cut_off = False
        """Whether they end within a line, as those of a killed run may."""

    @property
    def exists(self) -> bool:
        return self.recipe.is_file()

    @property
    def is_taken(self) -> bool:
        """Whether a run lives here, even one that lost its recipe."""
        return any(map(os.path.lexists, (self.recipe, self.environment, self.metrics, self.checkpoints)))

    @property
    def recipe_is_lost(self) -> bool:
        """Whether recipe.yaml is missing or empty."""
        return not os.path.lexists(self.recipe) or (self.exists and not self.recipe.stat().st_size)

    def write_recipe(self, text: str) -> str:
        """Its checksum, which the entry of this start keeps."""
        write_text(self.recipe, text)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def recipe_is_as_written(self) -> bool | None:
        """Whether recipe.yaml is what the last start wrote; None if that is not known."""
        checksum = next((start.get("recipe_sha256") for start in self.read_starts()[-1:]), None)
        try:
            text = read_regular(self.recipe, yamls.MOST_BYTES, self.path)
        except OSError:
            return None
        return hashlib.sha256(text).hexdigest() == checksum if checksum else None

    @property
    def telemetry_files(self) -> list[Path]:
        """One of each host; what file managers leave beside them is hidden."""
        return sorted(path for path in self.telemetry.glob("*.jsonl") if not path.name.startswith("."))

    def refused(self) -> Iterator[str]:
        """Files that are not read, and why: FIFOs, devices, links that lead out of the folder, enormous files."""
        most = {self.recipe: yamls.MOST_BYTES, self.environment: _MOST_JSON, self.summary: _MOST_JSON}
        for path in (*most, self.metrics, self.log, *self.telemetry_files):
            try:
                open_regular(path, most.get(path, _MOST_LINES), self.path).close()
            except FileNotFoundError:
                continue
            except OSError as error:
                yield f"{path.relative_to(self.path)}: {error.strerror}"
        if not Path(os.path.realpath(self.telemetry)).is_relative_to(os.path.realpath(self.path)):
            yield f"telemetry leads out of {self.path}; replace the link by a folder"

    def read_summary(self) -> dict[str, Any]:
        summary = _read_json(self.summary, self.path)
        return summary if is_sound(summary, Summary) else {}

    @property
    def finished(self) -> bool:
        return self.read_summary().get("status") == "finished"

    def read_starts(self) -> list[dict[str, Any]]:
        starts = _read_json(self.environment, self.path).get("starts", [])
        return sound(starts, Start) if isinstance(starts, list) else []

    @property
    def in_use(self) -> bool:
        """Whether a process of this machine holds the folder, or one of another machine wrote to it a moment ago."""
        if is_locked(self.path):
            return True
        hosts = {host for start in self.read_starts()[-1:] for host in start.get("hosts", {})}
        if host_name() in hosts:
            return False
        files = (self.metrics, self.summary, self.environment, self.recipe, *self.telemetry_files)
        written = [path.stat().st_mtime for path in files if path.exists()]
        return bool(written) and time.time() - max(written) < _MOMENT

    def append_environment(self, start: dict[str, Any]) -> None:
        starts = self.read_starts()
        if not starts and self.environment.exists():  # what can still be read of it is not to be lost
            self.environment.rename(self.path / f"corrupt-{self.environment.name}")
        write_sealed(self.environment, {"starts": [*starts, start]})

    def sync(self) -> None:
        """Bring all but the checkpoints to disk: a checkpoint that survives a power cut must find its records."""
        for path in (self.recipe, self.environment, self.metrics, self.log, self.telemetry, self.tensorboard):
            for file in path.glob("*.*") if path.is_dir() else ():
                if not file.name.startswith(".") and file.is_file():  # hidden ones are being written; a FIFO blocks
                    sync(file)
            if path.exists():
                sync(path)
        sync(self.path)

    @property
    def last_recorded_step(self) -> int:
        """The step that the records reach; those that a resumed run marks as missing count."""
        steps = [record["step"] for record in self.records() if record["kind"] == "train" or "missing" in record]
        return max(steps, default=0)

    def records(self, per_rank: int = 0) -> list[dict[str, Any]]:
        """Records that count: what a killed run wrote beyond the checkpoint it was resumed from is left out.

        Lines that were cut off or corrupt are left out as well, and counted. With `per_rank`, only about that many of
        the records keep their figures of single ranks, evenly spread: those of a long run on many ranks take long to
        read.
        """
        read = [line for line in lines_of(self.metrics, self.path) if line.strip()]
        self.cut_off = bool(read) and not read[-1].endswith(b"\n")
        lines = [line if is_intact(line) else b"?" for line in read]
        telling = [number for number, line in enumerate(lines) if b"_per_rank" in line]
        every = max(1, len(telling) // per_rank) if per_rank else 1
        for number in set(telling) - set(telling[::-1][::every]):
            lines[number] = _PER_RANK.sub(b"", lines[number])
        found = [next(iter(records_of([line])), None) for line in lines]
        if self.cut_off and found[-1] is None:
            found.pop()  # it was being written
        counted = _without_undone(found)
        self.num_corrupt = counted.count(None)
        return [record for record in counted if record is not None]


def lines_of(path: Path, inside: Path) -> Iterator[bytes]:
    """Lines of a file in a run folder; of one that is longer than any record the beginning, which is not a record."""
    try:
        with open_regular(path, _MOST_LINES, inside) as file:
            while line := file.readline(_LONGEST_LINE):
                yield line
                while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                    line = file.readline(_LONGEST_LINE)
    except OSError:
        return


def records_of(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    return [record for record in json_lines(lines) if is_sound_record(record)]


def samples_of(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Of telemetry."""
    return sound((line for line in json_lines(lines) if line.get("kind") == "sample"), Sample)


def without_undone(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a resumed run did again is told once."""
    return [record for record in _without_undone(records) if record is not None]


def _without_undone(records: Iterable[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """The same; None is a corrupt line, of which a kill or a power cut may leave some before the run is resumed."""
    kept: list[dict[str, Any] | None] = []
    for record in records:
        if record is not None and record["kind"] == "resume":
            kept = [old for old in kept if old is None or old["step"] <= record["step"]]
            while kept and kept[-1] is None:
                kept.pop()
        kept.append(record)
    return kept


def json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of lines; one that was cut off by a kill, or is none, is left out."""
    for line in lines:
        try:
            record = from_json(line, allow_inf_nan=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and is_intact(line):
            yield record


def split_seconds(trained: list[dict[str, Any]]) -> dict[str, float]:
    """Times of training by part; what only some records could tell apart counts as computing."""
    splits = [record["seconds"] for record in trained if record.get("seconds")]
    known = set.intersection(*map(set, splits)) if splits else set()
    found: dict[str, float] = {}
    for split in splits:
        for part, seconds in split.items():
            name = part if part in known else "compute"
            found[name] = found.get(name, 0.0) + seconds
    return found


def largest_batch(root: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """What the newest `paceline find-batch` with this key, kept beside the runs, has found."""
    paths = sorted(root.glob("find-batch-*/find-batch.json"), key=lambda path: path.stat().st_mtime)
    found = [answer for path in paths if (answer := _read_json(path, root)).get("key") == key and is_plain(answer)]
    wanted = ("largest", "largest_global", "fastest", "memory_limit", "searched")
    return {name: found[-1].get(name) for name in wanted} if found else None


def _read_json(path: Path, inside: Path) -> dict[str, Any]:
    try:
        text = read_regular(path, _MOST_JSON, inside)
        content = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and is_intact(text) else {}


class JsonLines:
    """Appends records to a file, each with the time; see GrowingFile for a full disk."""

    def __init__(self, path: Path):
        if path.exists():
            check_regular(path, path.parent)
        cut_off = _is_cut_off(path)
        self._file = GrowingFile(path)
        if cut_off:
            self._file.write(b"\n")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(seal(_rounded(record) | {"time": round(time.time(), 3)}) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self, status: str = "finished") -> None:
        self._file.close()


def _is_cut_off(path: Path) -> bool:
    """Whether the last line was not written to its end."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except OSError:  # there is no file, or nothing in it
        return False


def _rounded(value: Any) -> Any:
    """Nine significant digits keep float32 exact and lines short; JSON has no NaN, so it becomes null."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
