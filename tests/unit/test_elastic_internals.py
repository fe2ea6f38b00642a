"""The private names of torch's elastic agent still exist and do what Paceline needs."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server import RunResult, SimpleElasticAgent, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch_changes import changed

from paceline.distributed.rendezvous import SingleNode
from paceline.system.torch_internals.elastic import ElasticAgentBase


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


class _Agent(ElasticAgentBase):
    """Has no processes: it notes what torch calls, and answers with the given results."""

    def __init__(self, folder: Path, results: list[RunResult], restarts_left: int, waits: bool = True):
        spec = WorkerSpec("ranks", 2, SingleNode(folder), entrypoint=print, max_restarts=0, monitor_interval=0.001)
        super().__init__(spec, exit_barrier_timeout=1)
        self.called: list[str] = []
        self._results, self._restarts_left, self._waits = results, restarts_left, waits

    def start_ranks(self, workers: list[Worker]) -> list[int]:
        ranks = [(worker.local_rank, worker.global_rank, worker.world_size) for worker in workers]
        assert ranks == [(0, 0, 2), (1, 1, 2)], changed("Worker")
        self.called.append("start")
        return [101, 102]

    def check_ranks(self, workers: list[Worker]) -> RunResult:
        assert [worker.id for worker in workers] == [101, 102], changed("SimpleElasticAgent._start_workers")
        self.called.append("check")
        self.set_restarts_left(self._restarts_left)
        return self._results.pop(0)

    def stop_ranks(self) -> None:
        self.called.append("stop")

    def waits_for_other_nodes(self) -> bool:
        self.called.append("exit")
        return self._waits


HEALTHY = RunResult(WorkerState.HEALTHY)
SUCCEEDED = RunResult(WorkerState.SUCCEEDED, return_values={0: None, 1: None})
FAILED = RunResult(WorkerState.FAILED, failures={rank: ProcessFailure(rank, 101 + rank, 1, "") for rank in range(2)})


def test_the_elastic_agent_has_the_methods_that_we_override() -> None:
    expected = {
        "_start_workers": ["self", "worker_group"],
        "_monitor_workers": ["self", "worker_group"],
        "_stop_workers": ["self", "worker_group"],
        "_shutdown": ["self", "death_sig", "timeout"],
        "_exit_barrier": ["self"],
    }
    for name, names in expected.items():
        found = getattr(SimpleElasticAgent, name, None)
        assert found, changed(f"SimpleElasticAgent.{name}")
        assert parameters(found) == names, changed(f"the parameters of SimpleElasticAgent.{name}")
    abstract = SimpleElasticAgent.__abstractmethods__
    assert abstract <= expected.keys(), changed("the abstract methods of SimpleElasticAgent")


@pytest.mark.parametrize("waits", [True, False])
def test_the_elastic_agent_starts_checks_and_stops_ranks(tmp_path: Path, waits: bool) -> None:
    agent = _Agent(tmp_path, [HEALTHY, SUCCEEDED], restarts_left=0, waits=waits)
    assert agent.run() is SUCCEEDED
    assert agent.called == ["start", "check", "check", "exit", "stop"], changed("SimpleElasticAgent.run")


def test_the_elastic_agent_restarts_ranks_while_restarts_are_left(tmp_path: Path) -> None:
    agent = _Agent(tmp_path, [FAILED, SUCCEEDED], restarts_left=1)
    agent.run()
    called = ["start", "check", "stop", "start", "check", "exit", "stop"]
    assert agent.called == called, changed("SimpleElasticAgent._remaining_restarts")


def test_the_elastic_agent_gives_up_without_restarts_left(tmp_path: Path) -> None:
    agent = _Agent(tmp_path, [FAILED], restarts_left=0)
    assert agent.run() is FAILED
    assert agent.called == ["start", "check", "stop", "stop"], changed("SimpleElasticAgent._remaining_restarts")
