"""How the agent ends ranks, soon if they are stuck, and when it does not restart them any more."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG, TINY, environment
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.distributed import elastic_agent
from paceline.distributed.env import AGENT
from paceline.distributed.reports import leaving_file, report_progress
from paceline.engine import run

_AGENT = """
import os, signal, sys, time
from paceline.distributed.plan import JoinSpec, plan
from paceline.distributed.run import run
from paceline.errors import UserError

def entry(command):
    if os.environ["RANK"] == "1":
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as if the main thread were inside a CUDA call
    time.sleep(100000)

if __name__ == "__main__":
    planned = plan(["train"], 2, JoinSpec())
    os.environ.update(planned.environment)
    try:
        run(planned, entry)
    except UserError as error:
        print(error.code, error.fields["rank"])
"""


def test_ranks_that_the_agent_kills_are_not_the_cause(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(_AGENT)
    answer = subprocess.run(
        [sys.executable, "stuck.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=HANG
    )
    assert answer.stdout.split() == ["rank-failed", "1"], answer.stderr


class _Process:
    """Ends after some seconds of a simulated clock, or when it is killed."""

    pid = 0

    def __init__(self, clock: list[float], ends: float, exitcode: int | None = None):
        self._clock, self._ends, self.exitcode = clock, ends, exitcode
        self.killed_at: float | None = None

    def join(self, timeout: float | None = None) -> None:
        if self.exitcode is None:
            self._clock[0] = min(self._ends, self._clock[0] + (timeout or 0.0))
            self.exitcode = 0 if self._clock[0] >= self._ends else None

    def send_signal(self, signum: int) -> None:
        if self.exitcode is None and signum == signal.SIGKILL:
            self.exitcode, self.killed_at = -signum, self._clock[0]


@pytest.mark.parametrize(
    ("rank_lost", "received", "leaving", "killed_at"),
    [
        (True, [], False, 3.0),  # stuck behind a kernel
        (True, [], True, 30.0),  # it has noticed the loss, and finishes its checkpoint
        (True, [signal.SIGTERM], False, 30.0),  # the user asked it to checkpoint
        (False, [], False, 30.0),
    ],
)
def test_stuck_ranks_are_killed_soon(monkeypatch, tmp_path, rank_lost, received, leaving, killed_at) -> None:
    clock = [0.0]
    monkeypatch.setattr(elastic_agent.time, "monotonic", lambda: clock[0])
    agent = object.__new__(elastic_agent.Agent)
    agent._processes = agent._ranks = [_Process(clock, 0.0, exitcode=1), _Process(clock, ends=1000.0)]
    agent.received, agent._scratch = received, tmp_path
    if leaving:
        leaving_file(tmp_path, 1).touch()
    assert agent._stop(rank_lost) == {1}
    assert agent._processes[1].killed_at == killed_at


def test_a_suspended_rank_is_not_reported_as_killed(monkeypatch, tmp_path) -> None:
    """The rank that noticed it names it."""
    agent = object.__new__(elastic_agent.Agent)
    agent._processes = agent._ranks = [_Process([0.0], 0.0, exitcode=1), _Process([0.0], 0.0, exitcode=-9)]
    agent._processes[1].pid, agent.received, agent._scratch = 77, [], tmp_path
    monkeypatch.setattr(elastic_agent.forkserver, "end_stopped_children", lambda: {77})
    assert agent._stop(rank_lost=True) == {1}


def test_a_rank_that_exits_in_time_is_not_killed(monkeypatch, tmp_path) -> None:
    clock = [0.0]
    monkeypatch.setattr(elastic_agent.time, "monotonic", lambda: clock[0])
    agent = object.__new__(elastic_agent.Agent)
    agent._processes = agent._ranks = [_Process(clock, 0.0, exitcode=1), _Process(clock, ends=2.0)]
    agent.received, agent._scratch = [], tmp_path
    assert agent._stop(rank_lost=True) == set()
    assert agent._processes[1].exitcode == 0


class _Restarts:
    """An elastic agent, and the folder in which its ranks report their progress."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path):
        monkeypatch.setenv(AGENT, str(folder))
        monkeypatch.setenv("LOCAL_RANK", "0")
        self._agent = object.__new__(elastic_agent.Agent)
        self._agent._is_elastic, self._agent.received, self._agent._scratch = True, [], folder
        self._agent._furthest_step, self._agent._failures_there = 0, 0

    def after(self, step: int = 0, exitcode: int = 1) -> int:
        """Fail after the ranks reported a step; return the restarts that may follow."""
        if step:
            report_progress(step)
        return self._agent._restarts_after({0: ProcessFailure(0, 1, exitcode, "no-such-file")})


@pytest.mark.parametrize("exitcode", [1, -signal.SIGKILL, -signal.SIGSEGV])
@pytest.mark.parametrize("step", [0, 990])
def test_a_crash_that_repeats_itself_is_not_restarted_forever(monkeypatch, tmp_path, step: int, exitcode: int) -> None:
    """It is resumed from the checkpoint of step 900, and never comes further."""
    restarts = _Restarts(monkeypatch, tmp_path)
    assert [restarts.after(step, exitcode) for _ in range(5)] == [1, 1, 1, 1, 0]


def test_failures_of_a_job_that_makes_progress_are_restarted(monkeypatch, tmp_path) -> None:
    restarts = _Restarts(monkeypatch, tmp_path)
    assert [restarts.after(10 * number, -signal.SIGKILL) for number in range(1, 40)] == [1] * 39


def test_progress_is_counted_from_the_furthest_step(monkeypatch, tmp_path) -> None:
    restarts = _Restarts(monkeypatch, tmp_path)
    assert [restarts.after(step) for step in (50, 40, 30, 49, 51)] == [1] * 5
    assert [restarts.after(step) for step in (40, 51, 50, 45)] == [1, 1, 1, 0]


def test_a_progress_file_that_was_not_written_completely_is_no_progress(monkeypatch, tmp_path) -> None:
    restarts = _Restarts(monkeypatch, tmp_path)
    assert restarts.after(50) == 1
    (tmp_path / "progress").write_text("")
    assert restarts.after() == 1


def test_training_reports_the_steps_that_it_logs(here, monkeypatch) -> None:
    reported: list[int] = []
    monkeypatch.setattr(run, "report_progress", reported.append)
    words = (*TINY, "--train.duration", "3ba", "--precision", "fp32", "--device", "cpu")
    assert here("train", "digits", *words).returncode == 0
    assert reported == [1, 2, 3]
