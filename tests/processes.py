"""Starting the command line as a process, and meddling with it."""

import subprocess
import time
from pathlib import Path

import psutil
from conftest import command, environment

from paceline.track.records import RunFolder


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*words), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(record["step"] >= step for record in RunFolder(run).records()):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children(recursive=True) if "paceline" in child.cmdline()]
