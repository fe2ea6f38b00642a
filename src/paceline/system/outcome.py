"""Reports the result of a command to the program that started it, which then need not parse its output."""

import json
import os
from pathlib import Path
from typing import Any

from paceline.system.files import write_json

FILE = "PACELINE_OUTCOME"
"""Environment variable with the path of a JSON file to write."""


def report_outcome(**values: Any) -> bool:
    """Add values to the file, if the program that started this one asked for it. Return whether it did."""
    if not (path := os.environ.get(FILE)):
        return False
    write_json(Path(path), read_outcome(Path(path)) | values)
    return True


def read_outcome(path: Path) -> dict[str, Any]:
    """Return what has been reported so far."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
