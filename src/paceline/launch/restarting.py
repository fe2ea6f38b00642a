"""Restart lost nodes of a job, and all of them if the rendezvous store is lost."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial

from paceline.errors import UserError
from paceline.launch import execution, planning, rendezvous, sessions
from paceline.launch import job as jobs
from paceline.launch.final_state import is_stopped
from paceline.launch.job import Job
from paceline.launch.job_hosts import HERE, hosts_of
from paceline.launch.planning import HostStep
from paceline.launch.sessions import NodeMonitor
from paceline.launch.states import KILLED, PREEMPTED, NodeState
from paceline.system.files import FolderLock, say

_MAX_RESTARTS, _RETRY_PAUSE, _NO_RESTART_PAUSE = 5, 60.0, 5.0
_SHORT_JOIN_TIMEOUT = 15  # seconds, when not all nodes are reachable

Restart = Callable[[Job, NodeMonitor], Job | None]
"""Restart a node that no longer runs; return the changed job, or None if the node is not to be restarted."""


def restart_if_lost(job: Job, node: NodeMonitor) -> Job | None:
    """Restart a node whose host was rebooted or whose processes were killed."""
    if node.state in (NodeState.LOST, NodeState.NOT_STARTED) or node.status.exit_status == KILLED:
        say(f"{node.host.name} was lost: restarting it")
        return restart_node(job, node.host.name)
    return None


def restart_node(job: Job, name: str) -> Job | None:
    """Restart one node; all of them if it ran the rendezvous store, without which no node can join."""
    if name == job.rendezvous_host:
        return _move_rendezvous(job)
    _execute(job, list(planning.node_steps(job, name)))
    return job


def _execute(job: Job, steps: list[HostStep]) -> None:
    execution.execute(steps, hosts_of(job), execution.secrets_of(job), partial(is_stopped, job))


def _move_rendezvous(job: Job) -> Job | None:
    """Restart all reachable nodes from the last checkpoint, with the rendezvous store on another one."""
    hosts = hosts_of(job)
    monitors = sessions.poll_all([hosts[name] for name in job.spec.hosts])
    reached = [node.host for node in monitors if node.state is not NodeState.UNREACHABLE]
    others = [host.name for host in reached if host.name != job.rendezvous_host]
    if is_stopped(job) or not reached:
        return None
    job = rendezvous.choose(job, others[0] if others else job.rendezvous_host)
    job = replace(job, join_timeout=_SHORT_JOIN_TIMEOUT if len(reached) < len(monitors) else job.join_timeout)
    say(f"the rendezvous store was lost: resuming from the last checkpoint, rendezvous at {job.rendezvous}")
    for line in sessions.stop(reached, grace=60):
        say(f"not stopped: {line}")
    jobs.save(job)
    names = {HERE, *(host.name for host in reached)}
    _execute(job, [step for step in planning.plan(job) if step.host in names])
    return job


def _lost_rendezvous(job: Job, monitors: dict[str, NodeMonitor]) -> bool:
    """Return whether the node with the rendezvous store is lost, and the others ended because they could not rejoin."""
    keeper = monitors.get(job.rendezvous_host)
    others = [node.status for node in monitors.values() if node is not keeper]
    if any(status.state in (NodeState.RUNNING, NodeState.FINISHED) for status in others):
        return False
    if all(status.exit_status is None for status in others):
        return False
    if keeper is None:
        return not sessions.is_alive(hosts_of(job)[HERE], "rendezvous")
    lost = (NodeState.LOST, NodeState.NOT_STARTED, NodeState.UNREACHABLE, NodeState.GONE)
    return keeper.state in lost or keeper.status.exit_status == PREEMPTED


class Restarts:
    """Restarts of lost nodes, one at a time and in the background, since launching an instance takes minutes."""

    def __init__(self, job: Job, restart: Restart | None):
        self._wanted, self._pool = restart, ThreadPoolExecutor(1)
        self._folder = jobs.folder_of(job.id)
        self._lock: FolderLock | None = None
        self.pending: tuple[str, Future[Job | None]] | None = None
        self._count: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def __enter__(self) -> "Restarts":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._lock:
            self._lock.release()

    def step(self, job: Job, monitors: dict[str, NodeMonitor]) -> Job:
        """Start a restart, or complete the pending one; return the changed job."""
        if self.pending:
            name, future = self.pending
            return self._complete(job, monitors, name, future) if future.done() else job
        lost_rendezvous = _lost_rendezvous(job, monitors)
        idle = [name for name, node in monitors.items() if node.state is not NodeState.RUNNING]
        if not idle or (len(idle) == len(monitors) and not lost_rendezvous) or (restart := self._restart) is None:
            return job
        if lost_rendezvous:
            if self._is_due(job.rendezvous_host):
                self.pending = job.rendezvous_host, self._pool.submit(_move_rendezvous, job)
        elif name := next(filter(self._is_due, idle), ""):
            self.pending = name, self._pool.submit(restart, job, copy(monitors[name]))
        return job

    @property
    def _restart(self) -> Restart | None:
        """Only one terminal restarts nodes: two would start everything twice."""
        if self._wanted and not self._lock:
            try:
                self._lock = FolderLock(self._folder)
            except UserError:
                return None
        return self._wanted

    def _is_due(self, name: str) -> bool:
        return time.monotonic() >= self._not_before.get(name, 0.0) and self._count.get(name, 0) < _MAX_RESTARTS

    def are_possible(self, job: Job, monitors: dict[str, NodeMonitor]) -> bool:
        """Return whether a node may still be restarted although no node trains."""
        left = self._count.get(job.rendezvous_host, 0) < _MAX_RESTARTS
        return self.pending is not None or (left and _lost_rendezvous(job, monitors) and self._restart is not None)

    def _complete(self, job: Job, monitors: dict[str, NodeMonitor], name: str, future: "Future[Job | None]") -> Job:
        self.pending = None
        try:
            changed = future.result()
        except UserError as error:
            say(f"{name} was not restarted, trying again in {_RETRY_PAUSE:.0f} s: {error.report}")
            self._not_before[name] = time.monotonic() + _RETRY_PAUSE
            return job
        if changed is None:  # it ended, or its state is unknown
            self._not_before[name] = time.monotonic() + _NO_RESTART_PAUSE
            return job
        self._count[name] = self._count.get(name, 0) + 1
        hosts = hosts_of(changed)
        if name in monitors and hosts[name] != monitors[name].host:  # another instance, with its own log
            monitors[name] = NodeMonitor(hosts[name])
        return changed
