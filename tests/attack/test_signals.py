"""SIGINT and SIGTERM at any time: exit status of the signal, no processes left, no progress lost."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TINY, command

from attack.marked import RANKS, ROLES, Begin, Job, jobs, last_step
from paceline.checkpoint import store
from paceline.track.records import RunFolder

ENDLESS = ("train", "digits", *TINY, "--train.duration", "1000000ba", "--evaluate.every", "1000000ba")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with jobs(tmp_path) as started:
        yield started


def _check(job: Job, signum: int) -> str:
    status, errors = job.end()
    assert status in (128 + signum, -signum), errors
    assert "Traceback" not in errors
    assert "KeyboardInterrupt" not in errors
    messages = [line for line in errors.splitlines() if line and not line.startswith("starting") and line[2:3] != ":"]
    assert len(messages) <= 1, errors  # beside log lines, which start with the time
    return errors


def _check_checkpointed(job: Job, run: Path, signum: int) -> None:
    errors = _check(job, signum)
    summary = RunFolder(run).read_summary()
    assert f"stopped after step {summary['step']}" in errors
    assert summary["status"] == "interrupted"
    assert next(store.committed(run / "checkpoints")).name == f"step-{summary['step']:08d}"


@pytest.mark.parametrize(("procs", "moments"), [(2, 20), (1, 8)])
def test_signals_during_startup(begin: Begin, survived, tmp_path: Path, procs: int, moments: int) -> None:
    """At times between the start and somewhat after the first step, however long that takes on this host."""
    run, begin_time = tmp_path / "runs" / "digits", time.monotonic()
    job = begin(command(*ENDLESS, "--procs", procs))
    job.wait_for_step(run, 1)
    startup_seconds = time.monotonic() - begin_time
    job.launcher.terminate()
    _check_checkpointed(job, run, signal.SIGTERM)
    for number in range(moments):
        signum = (signal.SIGTERM, signal.SIGINT)[number % 2]
        job = begin(command(*ENDLESS, "--procs", procs))
        if signum == signal.SIGINT:  # Python itself prints a traceback while it starts
            job.wait_for(lambda pid=job.launcher.pid: "pydantic" in Path(f"/proc/{pid}/maps").read_text())
        time.sleep(1.2 * startup_seconds * number / moments)
        job.launcher.send_signal(signum)
        _check(job, signum)
    job = begin(command(*ENDLESS, "--procs", procs))
    job.wait_for_step(run, last_step(run) + 1)
    job.launcher.terminate()
    _check_checkpointed(job, run, signal.SIGTERM)
    survived("signals during startup", moments + 2)


@pytest.mark.parametrize("role", ["forkserver", *RANKS])
def test_ctrl_c_in_a_terminal_stops_all_processes(begin: Begin, survived, role: str) -> None:
    job = begin(command(*ENDLESS, "--procs", 2))
    job.wait_for_roles(role)
    os.killpg(job.launcher.pid, signal.SIGINT)
    _check(job, signal.SIGINT)
    survived("signals to all processes")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_still_checkpoints(begin: Begin, survived, tmp_path: Path, signum: int) -> None:
    """Stopping a service signals every process, including the fork server."""
    run = tmp_path / "runs" / "digits"
    job = begin(command(*ENDLESS, "--procs", 2))
    job.wait_for_step(run, 5)
    os.killpg(job.launcher.pid, signum)
    _check_checkpointed(job, run, signum)
    survived("signals to all processes")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_all_processes(begin: Begin, survived, tmp_path: Path, signum: int) -> None:
    """Also ranks that do not respond: one is suspended."""
    job = begin(command(*ENDLESS, "--procs", 2))
    members = job.wait_for_roles(*ROLES)
    job.wait_for_step(tmp_path / "runs" / "digits", 5)
    members[RANKS[1]].suspend()
    while job.launcher.poll() is None:  # signals that arrive together count as one
        job.launcher.send_signal(signum)
        time.sleep(0.5)
    _check(job, signum)
    survived("second signals")


@pytest.mark.parametrize("role", ["forkserver", *RANKS])
def test_a_suspended_process_is_killed_after_the_rank_timeout(
    begin: Begin, survived, tmp_path: Path, role: str
) -> None:
    job = begin(command(*ENDLESS, "--procs", 2), PACELINE_RANK_TIMEOUT="2")
    members = job.wait_for_roles(*ROLES)
    job.wait_for_step(tmp_path / "runs" / "digits", 5)
    members[role].suspend()
    job.launcher.terminate()
    assert job.end()[0] == 128 + signal.SIGTERM
    survived("signals beside a suspended process")
