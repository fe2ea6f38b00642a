"""The private names of torch's elastic agent. A module of its own, because a single process does not need it."""

import signal
from abc import abstractmethod
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, SimpleElasticAgent, Worker, WorkerGroup


class ElasticAgentBase(SimpleElasticAgent):
    """torch's elastic agent with public names for what a subclass implements.

    torch documents SimpleElasticAgent as the class to extend, but the methods to implement, the barrier at the end and
    the number of restarts left have only private names.
    """

    @abstractmethod
    def start_ranks(self, workers: list[Worker]) -> list[int]:
        """Start one process per worker and return their process IDs."""

    @abstractmethod
    def check_ranks(self, workers: list[Worker]) -> RunResult:
        """Return the state of the processes. Called at every monitor interval."""

    @abstractmethod
    def stop_ranks(self) -> None:
        """End the processes that still run. Called before a restart and at the end, also if there are none."""

    @abstractmethod
    def waits_for_other_nodes(self) -> bool:
        """Return whether to wait until the ranks of all nodes have ended, when those of this node have succeeded."""

    def set_restarts_left(self, count: int) -> None:
        """Set how many restarts may follow. torch counts down from `max_restarts`, whatever the cause of a failure."""
        self._remaining_restarts = count

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return dict(enumerate(self.start_ranks(worker_group.workers)))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.check_ranks(worker_group.workers)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_ranks()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.stop_ranks()

    def _exit_barrier(self) -> None:
        if self.waits_for_other_nodes():
            super()._exit_barrier()  # type: ignore[no-untyped-call]
