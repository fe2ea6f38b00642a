"""Following a job: its logs, machines that are lost and come back, its end."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from paceline.errors import UserError
from paceline.launch import job as jobs
from paceline.launch import nodes, sessions
from paceline.launch.control import hosts_of, is_stopped, look, say, with_rendezvous
from paceline.launch.job import Job
from paceline.launch.nodes import HERE
from paceline.launch.sessions import Progress
from paceline.launch.states import described
from paceline.system.files import FolderLock

_EVERY = 1.0
_MOST_RETURNS, _PAUSE, _GLANCE = 5, 60.0, 5.0
_SOON = 15  # seconds to wait for machines that are not expected
LEFT = "ended 143"
"""A machine that was told that it will be taken, and left in order."""
GONE = "gone"
"""A rented machine that was taken or given back."""
_KILLED = "ended 137"

Revive = Callable[[Job, Progress], Job | None]
"""Bring a machine back that does not run any more, if that can be done; the job as it is then."""


def revive(job: Job, own: Progress) -> Job | None:
    """A machine that was restarted, or whose processes were killed, begins again."""
    name = own.host.name
    if own.state in ("lost", "absent", _KILLED):
        say(f"{name} was lost: starting it again")
        return start_again(job, name)
    return None


def start_again(job: Job, name: str) -> Job | None:
    """On one machine; on all of them if it kept the meeting place, without which nobody can join."""
    if name == job.rendezvous_host:
        return _move_rendezvous(job)
    steps = list(nodes.node_steps(job, name))
    nodes.carry_out(steps, hosts_of(job), nodes.secrets_of(job), partial(is_stopped, job))
    return job


def _move_rendezvous(job: Job) -> Job | None:
    """All machines that can be reached stop, and go on from the last checkpoint, meeting at another one."""
    reached = [own for own in look(job) if not own.state.startswith("unreachable")]
    others = [own.host.name for own in reached if own.host.name != job.rendezvous_host]
    if is_stopped(job) or not reached:
        return None
    job = with_rendezvous(job, others[0] if others else job.rendezvous_host)
    job = replace(job, join_timeout=_SOON if len(reached) < len(job.hosts) else job.join_timeout)
    say(f"the meeting place was lost: going on from the last checkpoint, meeting at {job.rendezvous}")
    for line in sessions.stop([own.host for own in reached], grace=60):
        say(f"left over: {line}")
    jobs.save(job)
    there = {HERE, *(own.host.name for own in reached)}
    steps = [step for step in nodes.plan(job) if step.host in there]
    nodes.carry_out(steps, hosts_of(job), nodes.secrets_of(job), partial(is_stopped, job))
    return job


def _never(job: Job, name: str) -> bool:
    return False


def follow(
    job: Job,
    *,
    until: Callable[[], bool] = lambda: False,
    bring_back: bool = True,
    revive: Revive = revive,
    is_gone: Callable[[Job, str], bool] = _never,
) -> int:
    """Show the logs of all machines until the job is over, and bring lost ones back; the job's exit status."""
    hosts = hosts_of(job)
    progress = {name: Progress(hosts[name]) for name in job.hosts}
    states, width = dict.fromkeys(job.hosts, ""), max(map(len, job.hosts))
    with _Returns(job, revive if bring_back else None) as returns:
        while any(own.behind for own in progress.values()) or not until():
            for name, own in progress.items():
                for line in own.look():
                    say(f"{name:<{width}} | {line}")
                if own.state.startswith("unreachable") and is_gone(job, name):
                    own.state = GONE
                if own.state != states[name] and not own.state.startswith(("running", "ended")):
                    say(f"{name:<{width}} | ({described(own.state)})")
                states[name] = own.state
            if any(own.behind for own in progress.values()):
                continue
            stopped = is_stopped(job)
            if _is_over(progress, stopped) and (stopped or not returns.hope(job, progress)):
                break
            job = job if stopped else returns.step(job, progress)
            time.sleep(_EVERY)
    return _exit_status(progress.values())


def _exit_status(progress: Iterable[Progress]) -> int:
    """0 if a machine saw the end of the training; machines that were lost on the way do not count."""
    ended = [int(own.state.split()[1]) for own in progress if own.over]
    return min(ended) if ended else 1


def _is_over(progress: dict[str, Progress], stopped: bool) -> bool:
    """Nobody trains; where nobody saw the end, a machine that cannot be reached may still do it."""
    states = [own.state for own in progress.values()]
    silent = any(state.startswith("unreachable") for state in states)
    return "running" not in states and ("ended 0" in states or not silent or stopped)


def _stranded(job: Job, progress: dict[str, Progress]) -> bool:
    """The machine that kept the meeting place is lost, and others ended since they could not meet again."""
    keeper = progress.get(job.rendezvous_host)
    others = [own.state for own in progress.values() if own is not keeper]
    if {"running", "ended 0"} & set(others) or not any(state.startswith("ended") for state in others):
        return False
    if keeper is None:
        return not sessions.is_alive(hosts_of(job)[HERE], "rendezvous")
    return keeper.state.startswith(("lost", "absent", "unreachable", GONE, LEFT))


class _Returns:
    """Of lost machines, one at a time and in the background, since renting takes minutes."""

    def __init__(self, job: Job, revive: Revive | None):
        self._wanted, self._pool = revive, ThreadPoolExecutor(1)
        self._folder = jobs.folder_of(job.id)
        self._lock: FolderLock | None = None
        self.pending: tuple[str, Future[Job | None]] | None = None
        self._done: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def __enter__(self) -> "_Returns":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._lock:
            self._lock.release()

    def step(self, job: Job, progress: dict[str, Progress]) -> Job:
        """Begin or end one; as long as others go on."""
        if self.pending:
            name, future = self.pending
            return self._taken_up(job, progress, name, future) if future.done() else job
        stranded = _stranded(job, progress)
        idle = [name for name, own in progress.items() if own.state != "running"]
        if not idle or (len(idle) == len(progress) and not stranded) or (revive := self._revive) is None:
            return job
        if stranded:
            if self._may(job.rendezvous_host):
                self.pending = job.rendezvous_host, self._pool.submit(_move_rendezvous, job)
        elif name := next(filter(self._may, idle), ""):
            self.pending = name, self._pool.submit(revive, job, replace(progress[name]))
        return job

    @property
    def _revive(self) -> Revive | None:
        """Only one terminal brings machines back: two would start everything twice."""
        if self._wanted and not self._lock:
            try:
                self._lock = FolderLock(self._folder)
            except UserError:
                return None
        return self._wanted

    def _may(self, name: str) -> bool:
        return time.monotonic() >= self._not_before.get(name, 0.0) and self._done.get(name, 0) < _MOST_RETURNS

    def hope(self, job: Job, progress: dict[str, Progress]) -> bool:
        """Whether a machine may still be brought back, though nobody trains."""
        left = self._done.get(job.rendezvous_host, 0) < _MOST_RETURNS
        return self.pending is not None or (left and _stranded(job, progress) and self._revive is not None)

    def _taken_up(self, job: Job, progress: dict[str, Progress], name: str, future: "Future[Job | None]") -> Job:
        self.pending = None
        try:
            changed = future.result()
        except UserError as error:
            say(f"{name} could not be brought back: {error}; trying again in {_PAUSE:.0f} s")
            self._not_before[name] = time.monotonic() + _PAUSE
            return job
        if changed is None:  # it ended, or nothing is known of it
            self._not_before[name] = time.monotonic() + _GLANCE
            return job
        self._done[name] = self._done.get(name, 0) + 1
        hosts = hosts_of(changed)
        if name in progress and hosts[name] != progress[name].host:  # another machine, with a log of its own
            progress[name] = Progress(hosts[name])
        return changed
