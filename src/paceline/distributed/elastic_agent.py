"""torch's elastic agent for the ranks of one node: starts, monitors and restarts them.

Ranks fork from a process that has imported everything, so that starting and restarting them takes little time.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil
from torch.distributed.elastic.agent.server import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.distributed import forkserver
from paceline.distributed.env import AGENT, STORE
from paceline.distributed.failures import is_own_error
from paceline.distributed.plan import AgentPlan
from paceline.distributed.rendezvous import MultiNode, SingleNode
from paceline.distributed.reports import STOP_FILE, leaving_file, reported_progress
from paceline.errors import UserError
from paceline.system.logs import log
from paceline.system.torch_internals.elastic import ElasticAgentBase

RankEntry = Callable[[list[str]], int]
_context = multiprocessing.get_context("forkserver")
_MAX_FAILURES = 5
_SHUTDOWN_TIMEOUT = 30.0  # seconds that ranks have to checkpoint and exit
_STUCK_TIMEOUT = 3.0  # seconds until a rank has noticed that it lost another one, unless a GPU kernel blocks it
_RANK_NAME = "paceline-rank-"  # as top and ps show it


# torch's LocalElasticAgent with the start method "forkserver" cannot replace this class: it installs its own signal
# handlers, reports only one of several failed ranks, and lets neither signals nor errors decide about a restart.
class Agent(ElasticAgentBase):
    """If the job is elastic, restarts its ranks in a new rendezvous round when a rank fails or a node leaves or joins.

    It does not restart after an error that the user has to fix, nor after many failures without a new step, because a
    crash that repeats itself would keep the nodes busy forever.
    """

    def __init__(self, handler: SingleNode | MultiNode, plan: AgentPlan, entry: RankEntry, scratch: Path):
        self._is_elastic = plan.join.min_nodes > 0
        # this class counts restarts itself, see _restarts_after
        spec = WorkerSpec("ranks", plan.procs, handler, entrypoint=entry, max_restarts=3 if self._is_elastic else 0)
        super().__init__(spec, exit_barrier_timeout=60)
        self._handler = handler
        self.received: list[int] = []
        """Stop signals received so far."""
        self.stopped = 0
        """The signal that stopped the ranks of this or another node."""
        self._entry, self._command, self._scratch = entry, plan.command, scratch
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._ranks: list[psutil.Process] = []  # the same processes, for signals from another thread
        self._furthest_step, self._failures_there = 0, 0
        self._starts = 0

    def start_ranks(self, workers: list[Worker]) -> list[int]:
        shared = {
            "LOCAL_WORLD_SIZE": len(workers),
            STORE: self._handler.rank_store,
            "TORCHELASTIC_RUN_ID": self._handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": self._starts,
            AGENT: self._scratch,
        }
        self._starts += 1
        for file in (self._scratch / STOP_FILE, *(leaving_file(self._scratch, each.local_rank) for each in workers)):
            file.unlink(missing_ok=True)
        self._processes, self._ranks = [], []
        for worker in workers:
            variables = {"RANK": worker.global_rank, "WORLD_SIZE": worker.world_size, "LOCAL_RANK": worker.local_rank}
            error_file = {"TORCHELASTIC_ERROR_FILE": self._error_file(worker.local_rank)}
            environment = {name: str(value) for name, value in (shared | variables | error_file).items()}
            process = _context.Process(target=_run_rank, args=(self._entry, self._command, environment))
            try:
                forkserver.start_server()
                process.start()
            except (OSError, EOFError) as error:
                raise UserError(
                    "rank-start-failed",
                    f"cannot start rank {worker.global_rank} ({error}): the fork server was killed, perhaps because "
                    "the node ran out of memory, or a process limit was reached. Run the same command again.",
                    rank=worker.global_rank,
                ) from None
            self._processes.append(process)
            with suppress(psutil.NoSuchProcess):
                self._ranks.append(psutil.Process(process.pid))
        return [process.pid or 0 for process in self._processes]

    def _error_file(self, local_rank: int) -> Path:
        return self._scratch / f"error-{self._starts}-{local_rank}.json"

    def check_ranks(self, workers: list[Worker]) -> RunResult:
        codes = [process.exitcode for process in self._processes]
        if any(codes):
            killed = self._stop(rank_lost=True)  # the others cannot continue
            failures = {
                worker.global_rank: self._failure(worker.local_rank)
                for worker in workers
                if self._processes[worker.local_rank].exitcode and worker.local_rank not in killed
            }
            self.set_restarts_left(self._restarts_after(failures))
            return RunResult(WorkerState.FAILED, failures=failures)
        if None in codes:
            return RunResult(WorkerState.HEALTHY)
        stop_file = self._scratch / STOP_FILE
        self.stopped = int(stop_file.read_text()) if stop_file.exists() else 0
        if self.stopped and self._is_elastic and not self.received:
            self.set_restarts_left(1)
            return RunResult(WorkerState.UNHEALTHY)  # another node leaves: continue without it
        return RunResult(WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in workers})

    def _failure(self, local_rank: int) -> ProcessFailure:
        process = self._processes[local_rank]
        return ProcessFailure(local_rank, process.pid or 0, process.exitcode or 0, str(self._error_file(local_rank)))

    def _restarts_after(self, failures: dict[int, ProcessFailure]) -> int:
        if any(map(is_own_error, failures.values())):
            return 0  # an error that the user has to fix would occur again
        if (step := reported_progress(self._scratch)) > self._furthest_step:
            self._furthest_step, self._failures_there = step, 0
        self._failures_there += 1
        if not self._is_elastic or self.received:
            return 0
        if self._failures_there < _MAX_FAILURES:
            return 1
        log.error("the ranks failed %d times without a new step, so they are not restarted", _MAX_FAILURES)
        return 0

    def stop_ranks(self) -> None:
        """Ask ranks to checkpoint and exit, and kill those that do not."""
        self._stop(rank_lost=False)

    def _stop(self, rank_lost: bool) -> set[int]:
        """Stop all ranks and return the local ranks that had to be killed.

        A rank behind a NCCL kernel that waits for a lost rank never returns to Python, so it cannot handle SIGTERM.
        It is killed soon; ranks that have noticed the loss, or that a user signal stops, have time to finish.
        """
        suspended = forkserver.end_stopped_children()
        self.signal(signal.SIGTERM)
        begin = time.monotonic()
        soon = rank_lost and not self.received
        self._join(range(len(self._processes)), begin + (_STUCK_TIMEOUT if soon else _SHUTDOWN_TIMEOUT))
        self._join(filter(self._is_leaving, range(len(self._processes))), begin + _SHUTDOWN_TIMEOUT)
        killed = {
            number
            for number, process in enumerate(self._processes)
            if process.exitcode is None or process.pid in suspended
        }
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.join()
        return killed

    def _join(self, local_ranks: Iterable[int], deadline: float) -> None:
        for local_rank in local_ranks:
            self._processes[local_rank].join(max(0.0, deadline - time.monotonic()))

    def _is_leaving(self, local_rank: int) -> bool:
        return leaving_file(self._scratch, local_rank).exists()

    def signal(self, signum: signal.Signals) -> bool:
        """Send a signal to the live ranks. Returns whether there are any.

        May be called from any thread, so it uses psutil: multiprocessing's processes belong to the main thread.
        """
        reached = False
        for rank in self._ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signum)
                reached = True
        return reached

    def waits_for_other_nodes(self) -> bool:
        return not self.received  # a node that leaves does not wait for the others

    def leave(self) -> None:
        """Close the rendezvous after the ranks have ended; a node that was asked to stop leaves it open."""
        if not self.received:
            self._handler.shutdown()


def _run_rank(entry: RankEntry, command: list[str], environment: dict[str, str]) -> None:
    """Become a rank, in the forked process."""
    forkserver.enter_child()
    os.environ.update(environment)
    if sys.platform == "linux":
        set_name = 15
        ctypes.CDLL(None).prctl(set_name, f"{_RANK_NAME}{environment['RANK']}".encode())
    sys.exit(entry(command))
