"""The ranks of one machine under torch's elastic agent: started by forking, watched, started again.

They fork from a process that has imported everything, and so begin in a moment, the first time and after a failure.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.distributed import forkserver
from paceline.distributed.env import AGENT, STORE
from paceline.distributed.plan import Plan
from paceline.distributed.rendezvous import ManyNodes, OneNode
from paceline.distributed.world import LOST_RANK
from paceline.errors import UserError

Entry = Callable[[list[str]], int]
_forks = multiprocessing.get_context("forkserver")
_MOST_FAILURES, _WITHIN = 5, 60.0
_RANK_NAME = "paceline-rank-"  # as top and ps show it


class Agent(SimpleElasticAgent):
    """With restarts allowed it starts its ranks again, in a new meeting of the machines that are left, when a rank was
    lost, when a machine left or came, but not after a message to the user, nor after many failures within a minute.
    """

    def __init__(self, handler: OneNode | ManyNodes, plan: Plan, entry: Entry, scratch: Path):
        self._goes_on = plan.join.min_nodes > 0
        # the agent counts restarts for itself, see _attempts_left
        spec = WorkerSpec("ranks", plan.procs, handler, entrypoint=entry, max_restarts=3 if self._goes_on else 0)
        super().__init__(spec, exit_barrier_timeout=60, shutdown_timeout=30)
        self._handler = handler
        self.received: list[int] = []
        """Signals that ask for the end."""
        self.stopped = 0
        """The signal that ended ranks of this or another machine."""
        self._entry, self._words, self._scratch = entry, plan.command, scratch
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._ranks: list[psutil.Process] = []  # the same, for signals from another thread
        self._failed_at: list[float] = []
        self._starts = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        shared = {
            "LOCAL_WORLD_SIZE": worker_group.spec.local_world_size,
            STORE: self._handler.store_of_ranks,
            "TORCHELASTIC_RUN_ID": self._handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": self._starts,
            AGENT: self._scratch,
        }
        self._starts += 1
        self._note.unlink(missing_ok=True)
        self._processes, self._ranks = [], []
        for worker in worker_group.workers:
            own = {"RANK": worker.global_rank, "WORLD_SIZE": worker.world_size, "LOCAL_RANK": worker.local_rank}
            error_file = {"TORCHELASTIC_ERROR_FILE": self._error_file(worker.local_rank)}
            environment = {name: str(value) for name, value in (shared | own | error_file).items()}
            process = _forks.Process(target=_begin, args=(self._entry, self._words, environment))
            try:
                forkserver.start_server()
                process.start()
            except (OSError, EOFError) as error:
                raise UserError(
                    f"rank {worker.global_rank} could not be started ({error}): the process that ranks fork from was "
                    "killed (out of memory?), or a limit was reached; start the same command again"
                ) from None
            self._processes.append(process)
            with suppress(psutil.NoSuchProcess):
                self._ranks.append(psutil.Process(process.pid))
        return {number: process.pid for number, process in enumerate(self._processes)}

    @property
    def _note(self) -> Path:
        return self._scratch / "stopped"

    def _error_file(self, local_rank: int) -> Path:
        return self._scratch / f"error-{self._starts}-{local_rank}.json"

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [process.exitcode for process in self._processes]
        if any(codes):
            self._shutdown(timeout=self._shutdown_timeout)  # the others have lost a rank
            failures = {
                worker.global_rank: self._failure(worker.local_rank)
                for worker in worker_group.workers
                if self._processes[worker.local_rank].exitcode
            }
            self._remaining_restarts = self._attempts_left(failures)
            return RunResult(WorkerState.FAILED, failures=failures)
        if None in codes:
            return RunResult(WorkerState.HEALTHY)
        self.stopped = int(self._note.read_text()) if self._note.exists() else 0
        if self.stopped and self._goes_on and not self.received:
            self._remaining_restarts = 1
            return RunResult(WorkerState.UNHEALTHY)  # another machine leaves: go on without it
        return RunResult(
            WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers}
        )

    def _failure(self, local_rank: int) -> ProcessFailure:
        process = self._processes[local_rank]
        return ProcessFailure(local_rank, process.pid or 0, process.exitcode or 0, str(self._error_file(local_rank)))

    def _attempts_left(self, failures: dict[int, ProcessFailure]) -> int:
        messages = [failure.error_file_data.get("message") for failure in failures.values()]
        if any(isinstance(text, str) and text != "<NONE>" and LOST_RANK not in text for text in messages):
            return 0  # the user's to mend: it would be the same again
        now = time.monotonic()
        self._failed_at = [then for then in self._failed_at if now - then < _WITHIN] + [now]
        return 1 if self._goes_on and not self.received and len(self._failed_at) < _MOST_FAILURES else 0

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Ask ranks to save and end; those that cannot are killed."""
        forkserver.end_stopped_children()
        self.signal(death_sig)
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.join()

    def signal(self, signum: signal.Signals) -> bool:
        """Send it to the ranks that live; whether there are any. From any thread: only the main one may ask a
        process of multiprocessing's how it is.
        """
        reached = False
        for rank in self._ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signum)
                reached = True
        return reached

    def _exit_barrier(self) -> None:
        if not self.received:  # who leaves does not wait for the others
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """After the end of all ranks the meeting is over; a machine that was told to leave lets the others go on."""
        if not self.received:
            self._handler.shutdown()


def _begin(entry: Entry, words: list[str], environment: dict[str, str]) -> None:
    """In the forked process: become a rank."""
    forkserver.enter_rank()
    os.environ.update(environment)
    if sys.platform == "linux":
        set_name = 15
        ctypes.CDLL(None).prctl(set_name, f"{_RANK_NAME}{environment['RANK']}".encode())
    sys.exit(entry(words))
