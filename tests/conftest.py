"""Helpers for all tests."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from paceline.cli.main import main
from paceline.errors import UserError
from paceline.system.logs import log

# a busy machine takes longer per example, which is not a failure
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# tests run on the CPU even where there are GPUs; tests about GPUs use stubs
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

# no test finds keys for AWS, or asks for some over the network
for name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[name]
os.environ |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"

# a shell makes background jobs ignore SIGINT, which the processes of tests would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)

# trains in seconds; batch norm, because its statistics are the hardest part of an exact resume
TINY = (
    *("--model.options", "{widths: [8, 16], norm: batch}"),
    *("--train.global_batch", "48", "--train.duration", "60ba"),
    *("--checkpoint.every", "10ba", "--evaluate.every", "20ba", "--log.every", "1ba", "--log.tensorboard", "false"),
)


# tolerated difference between the losses on one and on several ranks
PRECISIONS = pytest.mark.parametrize(("precision", "distance"), [("fp32", 1e-5), ("bf16", 1e-2)])
TOKEN = "a secret shared by the nodes of these tests only"
HANG = 900
"""Seconds after which a command counts as hanging; long, because a busy machine is slow."""


def command(*words: object) -> list[str]:
    """The command line of a new paceline process."""
    return [sys.executable, "-m", "paceline", *map(str, words)]


def environment() -> dict[str, str]:
    """Variables of a test's processes: one thread each, which is fastest for small models."""
    kept = {"PACELINE_CODEC_PATH"}  # the codec under test
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "OMP_")) or name in kept
    }
    return inherited | {"PACELINE_THREADS": "1", "PACELINE_TOKEN": TOKEN}


@pytest.fixture
def paceline(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line as a new process in an empty folder."""

    def run(*words: object, **more: object) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": HANG}
        return subprocess.run(command(*words), **(options | more), check=False)

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch, capsys) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run the command line within this process, which saves the import of torch; for commands without ranks."""
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, which is fastest for small tensors, most of all on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stand-in for NVIDIA's library, which lists two GPUs."""
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent / "native" / "nvml.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


@contextmanager
def raises(code: str, kind: type[UserError] = UserError) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a UserError with this code."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"[{caught.value.code}] {caught.value}"


def complaint(answer: subprocess.CompletedProcess[str]) -> str:
    """Standard error of a command that must fail with a message and without a traceback."""
    assert answer.returncode not in (0, -11), answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr, answer.stderr
    assert "paceline: " in answer.stderr or "error: " in answer.stderr, answer.stderr
    return answer.stderr


def one_epoch(loader: Any, epoch: int, first_step: int = 0) -> list[Any]:
    """The steps of an epoch from `first_step`."""
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
    """Print how many attacks of each kind were survived."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for _, (what, count) in (item for item in report.user_properties if item[0] == _SURVIVED):
            counts[what] += count
    if counts:
        terminalreporter.section(_SURVIVED)
        for what, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:8,}  {what}")
