"""Supervise a job: print its logs, restart lost nodes, and wait for its end."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from paceline.errors import UserError
from paceline.launch import job as jobs
from paceline.launch import nodes, sessions
from paceline.launch.control import choose_rendezvous, hosts_of, is_stopped, poll_nodes, print_line
from paceline.launch.job import Job
from paceline.launch.nodes import HERE
from paceline.launch.sessions import NodeMonitor
from paceline.launch.states import described
from paceline.system.files import FolderLock

_POLL_INTERVAL = 1.0
_MAX_RESTARTS, _RETRY_PAUSE, _NO_RESTART_PAUSE = 5, 60.0, 5.0
_SHORT_JOIN_TIMEOUT = 15  # seconds, when not all nodes are reachable
PREEMPTED = "ended 143"
"""State of a node that received an interruption notice, checkpointed and exited."""
GONE = "gone"
"""State of a node whose EC2 instance was terminated."""
_KILLED = "ended 137"

Restart = Callable[[Job, NodeMonitor], Job | None]
"""Restart a node that no longer runs; return the changed job, or None if the node is not to be restarted."""


def restart_if_lost(job: Job, node: NodeMonitor) -> Job | None:
    """Restart a node whose host was rebooted or whose processes were killed."""
    name = node.host.name
    if node.state in ("lost", "absent", _KILLED):
        print_line(f"{name} was lost: restarting it")
        return restart_node(job, name)
    return None


def restart_node(job: Job, name: str) -> Job | None:
    """Restart one node; all of them if it ran the rendezvous store, without which no node can join."""
    if name == job.rendezvous_host:
        return _move_rendezvous(job)
    steps = list(nodes.node_steps(job, name))
    nodes.execute(steps, hosts_of(job), nodes.secrets_of(job), partial(is_stopped, job))
    return job


def _move_rendezvous(job: Job) -> Job | None:
    """Restart all reachable nodes from the last checkpoint, with the rendezvous store on another one."""
    reached = [node for node in poll_nodes(job) if not node.state.startswith("unreachable")]
    others = [node.host.name for node in reached if node.host.name != job.rendezvous_host]
    if is_stopped(job) or not reached:
        return None
    job = choose_rendezvous(job, others[0] if others else job.rendezvous_host)
    job = replace(job, join_timeout=_SHORT_JOIN_TIMEOUT if len(reached) < len(job.hosts) else job.join_timeout)
    print_line(f"the rendezvous store was lost: resuming from the last checkpoint, rendezvous at {job.rendezvous}")
    for line in sessions.stop([node.host for node in reached], grace=60):
        print_line(f"not stopped: {line}")
    jobs.save(job)
    names = {HERE, *(node.host.name for node in reached)}
    steps = [step for step in nodes.plan(job) if step.host in names]
    nodes.execute(steps, hosts_of(job), nodes.secrets_of(job), partial(is_stopped, job))
    return job


def _never(job: Job, name: str) -> bool:
    return False


def follow(
    job: Job,
    *,
    until: Callable[[], bool] = lambda: False,
    restart_lost: bool = True,
    restart: Restart = restart_if_lost,
    is_gone: Callable[[Job, str], bool] = _never,
) -> int:
    """Print the logs of all nodes until the job ends, restarting lost ones; return the job's exit status."""
    hosts = hosts_of(job)
    monitors = {name: NodeMonitor(hosts[name]) for name in job.hosts}
    states, width = dict.fromkeys(job.hosts, ""), max(map(len, job.hosts))
    with _Restarts(job, restart if restart_lost else None) as restarts:
        while any(node.has_more for node in monitors.values()) or not until():
            for name, node in monitors.items():
                for line in node.poll():
                    print_line(f"{name:<{width}} | {line}")
                if node.state.startswith("unreachable") and is_gone(job, name):
                    node.state = GONE
                if node.state != states[name] and not node.state.startswith(("running", "ended")):
                    print_line(f"{name:<{width}} | ({described(node.state)})")
                states[name] = node.state
            if any(node.has_more for node in monitors.values()):
                continue
            stopped = is_stopped(job)
            if _has_ended(monitors, stopped) and (stopped or not restarts.are_possible(job, monitors)):
                break
            job = job if stopped else restarts.step(job, monitors)
            time.sleep(_POLL_INTERVAL)
    return _exit_status(monitors.values())


def _exit_status(monitors: Iterable[NodeMonitor]) -> int:
    """Return 0 if any node finished the training: nodes that were lost before do not count."""
    ended = [int(node.state.split()[1]) for node in monitors if node.ended]
    return min(ended) if ended else 1


def _has_ended(monitors: dict[str, NodeMonitor], stopped: bool) -> bool:
    """Return whether no node trains; if none finished, an unreachable one may still be training."""
    states = [node.state for node in monitors.values()]
    unreachable = any(state.startswith("unreachable") for state in states)
    return "running" not in states and ("ended 0" in states or not unreachable or stopped)


def _lost_rendezvous(job: Job, monitors: dict[str, NodeMonitor]) -> bool:
    """Return whether the node with the rendezvous store is lost, and the others ended because they could not rejoin."""
    keeper = monitors.get(job.rendezvous_host)
    others = [node.state for node in monitors.values() if node is not keeper]
    if {"running", "ended 0"} & set(others) or not any(state.startswith("ended") for state in others):
        return False
    if keeper is None:
        return not sessions.is_alive(hosts_of(job)[HERE], "rendezvous")
    return keeper.state.startswith(("lost", "absent", "unreachable", GONE, PREEMPTED))


class _Restarts:
    """Restarts of lost nodes, one at a time and in the background, since launching an instance takes minutes."""

    def __init__(self, job: Job, restart: Restart | None):
        self._wanted, self._pool = restart, ThreadPoolExecutor(1)
        self._folder = jobs.folder_of(job.id)
        self._lock: FolderLock | None = None
        self.pending: tuple[str, Future[Job | None]] | None = None
        self._count: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def __enter__(self) -> "_Restarts":
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
        idle = [name for name, node in monitors.items() if node.state != "running"]
        if not idle or (len(idle) == len(monitors) and not lost_rendezvous) or (restart := self._restart) is None:
            return job
        if lost_rendezvous:
            if self._is_due(job.rendezvous_host):
                self.pending = job.rendezvous_host, self._pool.submit(_move_rendezvous, job)
        elif name := next(filter(self._is_due, idle), ""):
            self.pending = name, self._pool.submit(restart, job, replace(monitors[name]))
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
            print_line(f"{name} was not restarted, trying again in {_RETRY_PAUSE:.0f} s: {error.report}")
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
