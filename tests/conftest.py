"""Helpers that every folder of tests uses."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from paceline.base.logs import log
from paceline.cli.main import main

# a busy machine takes longer for an example, and that is no failure
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# tests are of the CPU, whatever a machine has; those of GPUs stub them
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

# a shell lets what it starts in the background ignore SIGINT, and processes of tests would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

# small enough for seconds, with batch norm, whose statistics are the hardest part of an exact resume
TINY = (
    *("--model.options", "{widths: [8, 16], norm: batch}"),
    *("--train.global_batch", "48", "--train.duration", "60ba"),
    *("--checkpoint.every", "10ba", "--evaluate.every", "20ba", "--log.every", "1ba", "--log.tensorboard", "false"),
)


# how far losses on one and on several ranks may be apart
PRECISIONS = pytest.mark.parametrize(("precision", "distance"), [("fp32", 1e-5), ("bf16", 1e-2)])
TOKEN = "a secret of the nodes of tests, and of no others"
HANG = 900
"""Seconds after which something hangs; a busy machine is slow, and that is no failure."""


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "paceline", *map(str, words)]


def environment() -> dict[str, str]:
    """For processes of a test: on any machine one thread each, which small models compute fastest with."""
    kept = {"PACELINE_CODEC_PATH"}  # with which the tests themselves are run
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "OMP_")) or name in kept
    }
    return inherited | {"PACELINE_THREADS": "1", "PACELINE_TOKEN": TOKEN}


@pytest.fixture
def paceline(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in a folder of its own, as a user would."""

    def run(*words: object, **more: object) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": HANG}
        return subprocess.run(command(*words), **(options | more), check=False)

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch, capsys) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """The command line within this process: a lone process needs no new one, and torch is imported once."""
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PACELINE_THREADS", "1")

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        try:
            status = main([str(word) for word in words])
        except SystemExit as left:  # argparse
            status = int(left.code or 0)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess([*map(str, words)], status, printed.out, printed.err)

    yield run
    log.handlers, log.propagate = [], True


def complaint(answer: subprocess.CompletedProcess[str]) -> str:
    """The message of a command that must fail politely: non-zero, on standard error, no traceback."""
    assert answer.returncode not in (0, -11), answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr, answer.stderr
    assert "paceline: " in answer.stderr or "error: " in answer.stderr, answer.stderr
    return answer.stderr


def one_epoch(loader: Any, epoch: int, first_step: int = 0) -> list[Any]:
    """The steps of an epoch, from one of them on."""
    timeline = loader.plan.timeline
    begin, end = timeline.step_at(epoch), timeline.step_at(epoch + 1)
    return list(islice(loader.steps(begin + first_step), end - begin - first_step))


_SURVIVED = "attacks survived"


@pytest.fixture
def survived(record_property) -> Callable[[str, int], None]:
    """survived("flipped bits in checkpoints", 408): call it after the assertions on that many attacks passed."""

    def note(what: str, count: int = 1) -> None:
        assert count > 0, f"{what}: nothing was tried"
        record_property(_SURVIVED, (what, count))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Of attacks: what was survived how often, as a table."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for _, (what, count) in (own for own in report.user_properties if own[0] == _SURVIVED):
            counts[what] += count
    if counts:
        terminalreporter.section(_SURVIVED)
        for what, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:8,}  {what}")
