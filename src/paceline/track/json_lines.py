"""Writes metrics.jsonl and telemetry: one record per line, with a checksum."""

import math
import os
import time
from pathlib import Path
from typing import Any

from paceline.system.files import GrowingFile
from paceline.system.untrusted import check_regular
from paceline.track.sealed import seal


class JsonLines:
    """Appends records with a time stamp to a file. GrowingFile handles a full disk."""

    def __init__(self, path: Path):
        if path.exists():
            check_regular(path, path.parent)
        truncated = _is_truncated(path)
        self._file = GrowingFile(path)
        if truncated:
            self._file.write(b"\n")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(seal(_rounded(record) | {"time": round(time.time(), 3)}) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self, status: str = "finished") -> None:
        self._file.close()


def _is_truncated(path: Path) -> bool:
    """Return whether the last line is incomplete."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except OSError:  # no file, or an empty one
        return False


def _rounded(value: Any) -> Any:
    """Round to nine significant digits, which keep float32 exact. NaN becomes null, because JSON has no NaN."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
