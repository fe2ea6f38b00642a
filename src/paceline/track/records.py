"""The run folder: where everything a report says is read from. No torch here, so that readers start at once.

recipe.yaml        the resolved recipe
environment.json   one entry per start: versions, code, hardware, hosts, data
metrics.jsonl      one record a line (kinds: train, eval, save, resume)
telemetry/         use of each host, one file a host
log.txt            what the terminal showed
checkpoints/       saves
tensorboard/       event files
summary.json       status and results; rewritten as the run goes on
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.base.files import write_json


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

    @property
    def exists(self) -> bool:
        return self.recipe.is_file()

    def read_summary(self) -> dict[str, Any]:
        return _read_json(self.summary)

    @property
    def finished(self) -> bool:
        return self.read_summary().get("status") == "finished"

    def append_environment(self, start: dict[str, Any]) -> None:
        starts = _read_json(self.environment).get("starts", [])
        write_json(self.environment, {"starts": [*starts, start]})

    def records(self) -> Iterator[dict[str, Any]]:
        """Records that count: what a killed run wrote beyond the save it was resumed from is left out.

        A last line cut off by a kill is left out as well.
        """
        if not self.metrics.is_file():
            return
        kept: list[dict[str, Any]] = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
                continue
            if record["kind"] == "resume":
                kept = [old for old in kept if old["step"] <= record["step"]]
            kept.append(record)
        yield from kept


def largest_batch(root: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """What the newest `paceline find-batch` with this key, kept beside the runs, has found."""
    paths = sorted(root.glob("find-batch-*/find-batch.json"), key=lambda path: path.stat().st_mtime)
    found = [answer for answer in map(_read_json, paths) if answer.get("key") == key]
    wanted = ("largest", "largest_global", "fastest", "memory_limit", "searched")
    return {name: found[-1].get(name) for name in wanted} if found else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class JsonLines:
    """Appends records to metrics.jsonl; what could not be written (a full disk) is kept and written with the next."""

    def __init__(self, path: Path):
        cut_off = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("ab", buffering=0)
        self._unwritten = b"\n" if cut_off else b""

    def write(self, record: dict[str, Any]) -> None:
        self._unwritten += json.dumps(_rounded(record)).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._file.close()


def _rounded(value: Any) -> Any:
    """Nine significant digits keep float32 exact and lines short; JSON has no NaN, so it becomes null."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
