"""Run folders as the engine writes them, every command that reads them, and what its output must not contain."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.track.records import RunFolder
from paceline.track.sealed import seal, write_sealed

FILES = ("recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "telemetry/host-0.jsonl")
READERS = ("compare", "report", "logbook", "doctor", "runs", "runs --json", "watch --once", "plan")
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def sealed(folder: Path) -> Path:
    """Add checksums and a summary to a made run folder, as the engine writes them."""
    for name in ("metrics.jsonl", "telemetry/host-0.jsonl"):
        lines = (folder / name).read_text().splitlines()
        (folder / name).write_bytes(b"".join(seal(json.loads(line)) + b"\n" for line in lines))
    run = RunFolder(folder)
    checksum = hashlib.sha256(run.recipe.read_bytes()).hexdigest()
    start = json.loads(run.environment.read_text())["starts"][0]
    write_sealed(run.environment, {"starts": [start | {"recipe_sha256": checksum}]})
    summary = {"train_seconds": 4.0, "images_per_second": 1280.0, "ranks": 2, "total_steps": 40, "step": 40}
    summary |= {"seconds": {"data": 0.1, "compute": 3.7, "sync": 0.2}}
    write_sealed(run.summary, json.loads(run.summary.read_text()) | summary)
    return folder


def commands(run: Path, other: Path) -> Iterator[tuple[str, ...]]:
    for reader in READERS:
        verb, *options = reader.split()
        if verb == "compare":
            yield verb, str(other), str(run)
        elif verb == "runs":
            yield verb, str(run.parent), *options
        elif verb == "plan":
            yield verb, "digits", "--learn-from", str(run)
        else:
            yield verb, str(run), *options


def check_polite(answer: Any) -> None:
    """Check for output or an error message without traceback and without control characters."""
    assert answer.returncode in (0, 1), answer
    assert "Traceback" not in answer.stderr, answer.stderr
    assert answer.returncode == 0 or "paceline: " in answer.stderr, answer
    assert not CONTROL.search(answer.stdout + answer.stderr), answer


HOSTILE_NUMBERS = (
    "1e400",
    "-1",
    "NaN",
    "Infinity",
    '"5"',
    "9" * 4000,
    "9" * 5000,
    "[1]",
    "{}",
    "true",
    "null",
    "1e308",
)
