"""Supervise a job on hosts: print its logs, restart lost nodes, wait for its end, and stop it."""

import time
from collections.abc import Callable, Iterable

from paceline.launch import sessions
from paceline.launch.final_state import is_stopped, mark_stopped
from paceline.launch.job import Job
from paceline.launch.job_hosts import HERE, hosts_of
from paceline.launch.restarting import Restart, Restarts, restart_if_lost
from paceline.launch.sessions import NodeMonitor
from paceline.launch.states import FINAL, NodeState, NodeStatus
from paceline.system.files import say

_POLL_INTERVAL = 1.0


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
    hosts, names = hosts_of(job), job.spec.hosts
    monitors = {name: NodeMonitor(hosts[name]) for name in names}
    before: dict[str, NodeStatus] = {}
    width = max(map(len, names))
    with Restarts(job, restart if restart_lost else None) as restarts:
        while any(node.has_more for node in monitors.values()) or not until():
            for name, node in monitors.items():
                for line in node.poll():
                    say(f"{name:<{width}} | {line}")
                if node.state is NodeState.UNREACHABLE and is_gone(job, name):
                    node.status = NodeStatus(name, NodeState.GONE)
                if node.status != before.get(name) and node.state not in (NodeState.RUNNING, *FINAL):
                    say(f"{name:<{width}} | ({node.status})")
                before[name] = node.status
            if any(node.has_more for node in monitors.values()):
                continue
            stopped = is_stopped(job)
            if _has_ended(monitors.values(), stopped) and (stopped or not restarts.are_possible(job, monitors)):
                break
            job = job if stopped else restarts.step(job, monitors)
            time.sleep(_POLL_INTERVAL)
    return _exit_status(monitors.values())


def _exit_status(monitors: Iterable[NodeMonitor]) -> int:
    """Return 0 if any node finished training: nodes that were lost before do not count."""
    ended = [node.status.exit_status for node in monitors if node.status.exit_status is not None]
    return min(ended, default=1)


def _has_ended(monitors: Iterable[NodeMonitor], stopped: bool) -> bool:
    """Return whether no node trains; if none finished, an unreachable one may still be training."""
    states = {node.state for node in monitors}
    return NodeState.RUNNING not in states and (
        NodeState.FINISHED in states or NodeState.UNREACHABLE not in states or stopped
    )


def status(job: Job) -> list[NodeStatus]:
    hosts = hosts_of(job)
    return [node.status for node in sessions.poll_all([hosts[name] for name in job.spec.hosts])]


def stop(job: Job, grace: float) -> list[str]:
    """Stop the job for good; return a line for each part that did not stop."""
    mark_stopped(job)
    return stop_sessions(job, grace)


def stop_sessions(job: Job, grace: float) -> list[str]:
    """Stop what still runs of the job, here and on its hosts; return a line for each part that did not stop."""
    hosts = hosts_of(job)
    return sessions.stop([hosts[name] for name in job.spec.hosts], grace) + sessions.stop([hosts[HERE]], 5)


def clean_up(job: Job) -> None:
    """Stop the rendezvous store, which outlives the nodes."""
    stop_sessions(job, grace=5)
