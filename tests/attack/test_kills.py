"""A job that is killed in any order at any time leaves no process behind, and the same command resumes it."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import TINY, command
from processes import run_ranks

from attack.marked import RANKS, ROLES, Begin, jobs, kill, last_step
from paceline.track.records import RunFolder

# long enough for a kill to arrive before the end
WORDS = ("train", "digits", *TINY, "--train.duration", "150ba", "--precision", "fp32")
ENDLESS = (*WORDS, "--train.duration", "1000000ba", "--evaluate.every", "1000000ba", "--procs", 2)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with jobs(tmp_path) as started:
        yield started


def _losses(run: Path) -> list[tuple[int, float]]:
    assert RunFolder(run).finished
    return [(record["step"], record["loss"]) for record in RunFolder(run).records() if "loss" in record]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[tuple[int, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(folder, 2, *WORDS)
    return _losses(folder / "runs" / "digits")


@pytest.mark.parametrize("seed", range(10))
def test_a_job_killed_at_a_random_step_resumes_to_the_same_losses(
    begin: Begin, survived, tmp_path: Path, undisturbed: list[tuple[int, float]], seed: int
) -> None:
    rng, run = random.Random(seed), tmp_path / "runs" / "digits"
    victims = rng.sample(ROLES, rng.randint(1, 3))
    if victims == ["resource_tracker"]:  # the job can do without it
        victims.append("launcher")
    job = begin(command(*WORDS, "--procs", 2))
    members = job.wait_for_roles(*ROLES)
    job.wait_for_step(run, rng.randrange(100))
    for name in victims:
        kill(members[name])
    status, errors = job.end()
    assert status in (1, -9)
    assert "Traceback" not in errors
    assert not RunFolder(run).finished
    run_ranks(tmp_path, 2, *WORDS)
    assert _losses(run) == undisturbed
    survived("kills at random steps, resumed to the same losses", len(victims))


def test_kills_in_any_order_leave_no_process_and_no_lock(begin: Begin, survived, tmp_path: Path) -> None:
    """Each start resumes the run of the previous one, and does not wait for its processes to end."""
    run, started_jobs = tmp_path / "runs" / "digits", []
    orders = [
        ("launcher",),
        ("forkserver",),
        ("launcher", "forkserver"),
        ("forkserver", "launcher"),
        ("resource_tracker", "launcher"),
        ("launcher", RANKS[0]),
        (RANKS[1], "launcher"),
        (RANKS[0], "forkserver", "resource_tracker"),
    ]
    for order in orders:
        started_jobs.append(begin(command(*ENDLESS)))
        members = started_jobs[-1].wait_for_roles(*ROLES)
        started_jobs[-1].wait_for_step(run, last_step(run) + 1)
        for name in order:
            kill(members[name])
    for job in started_jobs:
        assert job.end()[0] in (1, -9)
    survived("orders of kills", len(orders))


@pytest.mark.parametrize("role", ["forkserver", *RANKS])
def test_kill_of_the_launcher_during_startup(begin: Begin, survived, tmp_path: Path, role: str) -> None:
    job = begin(command(*ENDLESS))
    job.wait_for_roles(role)
    job.launcher.kill()
    assert job.end()[0] == -9
    survived("kills while ranks start")


def test_kill_of_the_fork_server_before_ranks_start(begin: Begin, survived) -> None:
    job = begin(command(*ENDLESS))
    kill(job.wait_for_roles("forkserver")["forkserver"])
    # the launcher replaces a fork server that was killed early
    while job.launcher.poll() is None and RANKS[1] not in job.by_role():
        time.sleep(0.1)
    job.launcher.terminate()
    status, errors = job.end()
    assert status in (1, 128 + signal.SIGTERM), errors
    assert "Traceback" not in errors
    survived("kills while ranks start")


def test_a_suspended_rank_ends_with_its_launcher(begin: Begin, survived) -> None:
    job = begin(command(*ENDLESS))
    members = job.wait_for_roles(*ROLES)
    members[RANKS[1]].suspend()
    psutil.Process(job.launcher.pid).kill()
    assert job.end()[0] == -9
    survived("kills beside a suspended rank")
