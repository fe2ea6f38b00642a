"""Helpers that every folder of tests uses."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# small enough for seconds, with batch norm, whose statistics are the hardest part of an exact resume
TINY = (
    *("--model.options", "{widths: [8, 16], norm: batch}"),
    *("--train.global_batch", "48", "--train.duration", "60ba"),
    *("--checkpoint.every", "10ba", "--evaluate.every", "20ba", "--log.every", "1ba", "--log.tensorboard", "false"),
)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "paceline", *map(str, words)]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "OMP_"))}


@pytest.fixture
def paceline(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in a folder of its own, as a user would."""

    def run(*words: object, **more: object) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 240}
        return subprocess.run(command(*words), **(options | more), check=False)

    return run


def complaint(answer: subprocess.CompletedProcess[str]) -> str:
    """The message of a command that must fail politely: non-zero, on standard error, no traceback."""
    assert answer.returncode not in (0, -11), answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr, answer.stderr
    assert "paceline: " in answer.stderr or "error: " in answer.stderr, answer.stderr
    return answer.stderr
