"""How the agent ends ranks: soon if they are stuck, later if they may still write a checkpoint."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG, environment

from paceline.distributed import elastic_agent
from paceline.distributed.reports import leaving_file

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


def test_a_rank_that_exits_in_time_is_not_killed(monkeypatch, tmp_path) -> None:
    clock = [0.0]
    monkeypatch.setattr(elastic_agent.time, "monotonic", lambda: clock[0])
    agent = object.__new__(elastic_agent.Agent)
    agent._processes = agent._ranks = [_Process(clock, 0.0, exitcode=1), _Process(clock, ends=2.0)]
    agent.received, agent._scratch = [], tmp_path
    assert agent._stop(rank_lost=True) == set()
    assert agent._processes[1].exitcode == 0
