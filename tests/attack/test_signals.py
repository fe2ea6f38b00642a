"""SIGINT and SIGTERM at any moment: the status says so, nothing is left, nothing is lost."""

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
    said = [line for line in errors.splitlines() if line and not line.startswith("starting") and line[2:3] != ":"]
    assert len(said) <= 1, errors  # beside log lines, which begin with the time
    return errors


def _check_saved(job: Job, run: Path, signum: int) -> None:
    errors = _check(job, signum)
    summary = RunFolder(run).read_summary()
    assert f"stopped after step {summary['step']}" in errors
    assert summary["status"] == "interrupted"
    assert next(store.committed(run / "checkpoints")).name == f"step-{summary['step']:08d}"


@pytest.mark.parametrize(("procs", "moments"), [(2, 20), (1, 8)])
def test_signals_while_a_job_starts(begin: Begin, survived, tmp_path: Path, procs: int, moments: int) -> None:
    """At moments from the first to somewhat beyond the first step, however long that takes here."""
    run, begun = tmp_path / "runs" / "digits", time.monotonic()
    job = begin(command(*ENDLESS, "--procs", procs))
    job.wait_for_step(run, 1)
    start_time = time.monotonic() - begun
    job.launcher.terminate()
    _check_saved(job, run, signal.SIGTERM)
    for number in range(moments):
        signum = (signal.SIGTERM, signal.SIGINT)[number % 2]
        job = begin(command(*ENDLESS, "--procs", procs))
        if signum == signal.SIGINT:  # of which Python itself prints a traceback while it starts
            job.wait_for(lambda pid=job.launcher.pid: "pydantic" in Path(f"/proc/{pid}/maps").read_text())
        time.sleep(1.2 * start_time * number / moments)
        job.launcher.send_signal(signum)
        _check(job, signum)
    job = begin(command(*ENDLESS, "--procs", procs))
    job.wait_for_step(run, last_step(run) + 1)
    job.launcher.terminate()
    _check_saved(job, run, signal.SIGTERM)
    survived("signals at moments of a start", moments + 2)


@pytest.mark.parametrize("role", ["forkserver", *RANKS])
def test_ctrl_c_in_a_terminal_reaches_all_processes(begin: Begin, survived, role: str) -> None:
    job = begin(command(*ENDLESS, "--procs", 2))
    job.wait_for_roles(role)
    os.killpg(job.launcher.pid, signal.SIGINT)
    _check(job, signal.SIGINT)
    survived("signals to all processes")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_checkpoints_all_the_same(
    begin: Begin, survived, tmp_path: Path, signum: int
) -> None:
    """As the end of a service does, also to those that ranks fork from."""
    run = tmp_path / "runs" / "digits"
    job = begin(command(*ENDLESS, "--procs", 2))
    job.wait_for_step(run, 5)
    os.killpg(job.launcher.pid, signum)
    _check_saved(job, run, signum)
    survived("signals to all processes")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_all_at_once(begin: Begin, survived, tmp_path: Path, signum: int) -> None:
    """Also ranks that do not answer: one is stopped."""
    job = begin(command(*ENDLESS, "--procs", 2))
    members = job.wait_for_roles(*ROLES)
    job.wait_for_step(tmp_path / "runs" / "digits", 5)
    members[RANKS[1]].suspend()
    while job.launcher.poll() is None:  # two that come together are seen as one
        job.launcher.send_signal(signum)
        time.sleep(0.5)
    _check(job, signum)
    survived("second signals")


@pytest.mark.parametrize("role", ["forkserver", *RANKS])
def test_what_is_stopped_is_killed_after_the_rank_timeout(begin: Begin, survived, tmp_path: Path, role: str) -> None:
    job = begin(command(*ENDLESS, "--procs", 2), PACELINE_RANK_TIMEOUT="2")
    members = job.wait_for_roles(*ROLES)
    job.wait_for_step(tmp_path / "runs" / "digits", 5)
    members[role].suspend()
    job.launcher.terminate()
    assert job.end()[0] == 128 + signal.SIGTERM
    survived("signals beside a stopped process")
