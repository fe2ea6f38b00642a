"""Looking after a job: submit it, follow it, bring back lost machines, fetch the run folder, end it."""

import json
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from paceline.base.files import FolderLock, printable
from paceline.errors import UserError
from paceline.launch import job as jobs
from paceline.launch import nodes
from paceline.launch.doctor import refuse_different_code
from paceline.launch.hosts import Host, HostError, SshHost, addresses, free_port
from paceline.launch.job import Job
from paceline.launch.nodes import HERE, Progress

_EVERY = 1.0
_MOST_RETURNS, _PAUSE, _GLANCE = 5, 60.0, 5.0
_MARK = ".job"  # in a run folder that was fetched: of which job


def say(line: str) -> None:
    print(line, flush=True)


def hosts_of(job: Job) -> dict[str, Host]:
    """The machines of a job by name, and this one."""
    here = Host(HERE, str(jobs.folder_of(job.id)))
    if job.backend == "local":
        found: dict[str, Host] = {name: Host(name, f"{here.folder}/{name}") for name in job.hosts}
    else:
        # a folder of its own for each, since machines may share the user's home
        found = {
            name: SshHost(name, f"$HOME/.paceline/jobs/{job.id}/{name}", ssh_options(job, name)) for name in job.hosts
        }
    return found | {HERE: here}


def ssh_options(job: Job, host: str) -> tuple[str, ...]:
    """Rented machines have no names that ssh knows: their addresses may change, and be those of others before."""
    rented = job.extra.get("machines", {}).get(host)
    named = ("-o", f"HostName={rented['address']}", "-o", f"HostKeyAlias={rented['id']}") if rented else ()
    return (*job.extra.get("ssh", ()), *named)


def with_meeting_place(job: Job, where: str) -> Job:
    """Decide which machine keeps the list of the others: this one if they can reach it, else the first of them.

    `where` is "auto", "here", or one of the hosts.
    """
    if job.backend == "local":
        return replace(job, meeting=f"127.0.0.1:{_free_port_here()}")
    if where not in ("auto", "here", *job.hosts):
        raise UserError(f"--meet {where}: say auto, here, or one of the hosts ({', '.join(job.hosts)})")
    hosts = [host for name, host in hosts_of(job).items() if name != HERE]
    if where in ("auto", "here"):
        ours = {addresses(host)[0] for host in hosts}
        if len(ours) == 1 and all(_can_reach(host, *ours) for host in hosts):
            return replace(job, meeting=f"{ours.pop()}:{_free_port_here()}")
        if where == "here":
            raise UserError(
                f"--meet here: not all hosts can connect to this machine ({', '.join(ours)}); say --meet HOST"
            )
    keeper = next((host for host in hosts if host.name == where), hosts[0])
    return replace(job, meeting=f"{addresses(keeper)[1]}:{free_port(keeper, 'python3')}", meeting_host=keeper.name)


def _free_port_here() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _can_reach(host: Host, address: str) -> bool:
    """Whether it can connect to a port that is opened here for a moment."""
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        attempt = f'import socket; socket.create_connection(("{address}", {port}), 3).close()'
        return host.call(f"python3 -c '{attempt}'", timeout=30).status == 0


def plan(job: Job) -> Sequence[object]:
    """Where the machines meet is found when it is submitted."""
    keeper = job.extra["meet"] if job.extra["meet"] in job.hosts else ""
    return nodes.plan(replace(job, meeting="ADDRESS:PORT", meeting_host=keeper))


def submit(job: Job) -> Job:
    """Start it everywhere, or nowhere."""
    hosts = hosts_of(job)
    secrets = nodes.secrets_of(job)
    if job.python and job.backend != "local":
        refuse_different_code([hosts[name] for name in job.hosts], job.python)
    job = with_meeting_place(job, job.extra["meet"])
    jobs.save(job)
    try:
        nodes.carry_out(nodes.plan(job), hosts, secrets)
    except BaseException:
        left = nodes.stop([hosts[name] for name in (*job.hosts, HERE)], grace=2)
        for line in left:
            say(f"left over: {line}")
        raise
    return job


Revive = Callable[[Job, Progress], Job | None]
"""Bring a machine back that does not run any more, if that can be done; the job as it is then."""


def revive(job: Job, own: Progress) -> Job | None:
    """A machine that was restarted, or whose processes were killed, begins again."""
    if own.state not in ("lost", "absent"):
        return None
    say(f"{own.host.name} was lost: starting it again")
    return start_again(job, own.host.name)


def start_again(job: Job, name: str) -> Job:
    """On one machine; on all of them if it kept the meeting place, without which nobody can join."""
    if name != job.meeting_host:
        nodes.carry_out(list(nodes.node_steps(job, name)), hosts_of(job), nodes.secrets_of(job))
        return job
    hosts = hosts_of(job)
    running = [own for own in _look(job) if own.state == "running"]
    job = with_meeting_place(job, running[0].host.name if running else name)
    say(f"{name} kept the meeting place: all go on from the last save, meeting at {job.meeting_host}")
    for line in nodes.stop([own.host for own in running], grace=60):
        say(f"left over: {line}")
    jobs.save(job)
    nodes.carry_out(nodes.plan(job), hosts, nodes.secrets_of(job))
    return job


def follow(
    job: Job, *, until: Callable[[], bool] = lambda: False, bring_back: bool = True, revive: Revive = revive
) -> int:
    """Show the logs of all machines until the job is over, and bring lost ones back; the job's exit status."""
    hosts = hosts_of(job)
    progress = {name: Progress(hosts[name]) for name in job.hosts}
    states, width = dict.fromkeys(job.hosts, ""), max(map(len, job.hosts))
    with _Returns(job, revive if bring_back else None) as returns:
        while not until():
            for name, own in progress.items():
                for line in own.look():
                    say(f"{name:<{width}} | {printable(line)}")
                if own.state != states[name] and not own.state.startswith(("running", "ended")):
                    say(f"{name:<{width}} | ({own.state})")
                states[name] = own.state
            if all(own.over or own.state == "absent" for own in progress.values()) and not returns.pending:
                break
            job = returns.step(job, progress)
            time.sleep(_EVERY)
    return exit_status(list(progress.values()))


class _Returns:
    """Of lost machines, one at a time and in the background, since renting takes minutes."""

    def __init__(self, job: Job, revive: Revive | None):
        self._revive, self._pool = revive, ThreadPoolExecutor(1)
        try:
            self._lock = FolderLock(jobs.folder_of(job.id)) if revive else None
        except UserError:  # another terminal does it: two would start everything twice
            self._revive = self._lock = None
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
        if self._revive and any(own.state == "running" for own in progress.values()):
            for name, own in progress.items():
                waits = time.monotonic() < self._not_before.get(name, 0.0)
                if own.state != "running" and not waits and self._done.get(name, 0) < _MOST_RETURNS:
                    self.pending = name, self._pool.submit(self._revive, job, replace(own))
                    break
        return job

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
        if hosts[name] != progress[name].host:  # another machine, with a log of its own
            progress[name] = Progress(hosts[name])
        return changed


def exit_status(progress: Sequence[Progress]) -> int:
    """0 if a machine saw the end of the training; machines that were lost on the way do not count."""
    ended = [int(own.state.split()[1]) for own in progress if own.over]
    return min(ended) if ended else 1


def fetch(job: Job) -> Path:
    """Bring the run folder here: from the machine that got furthest, with the telemetry of all."""
    target = Path(job.runs) / job.name
    mark = target / _MARK
    if target.exists() and (not mark.is_file() or mark.read_text() != job.id):
        raise UserError(f"{target} is another run; move it away, and fetch again")
    hosts = hosts_of(job)
    found = {}
    for name in job.hosts:
        try:
            answer = hosts[name].run(f"cat {shlex.quote(f'runs/{job.name}/summary.json')}")
            if answer.status == 0:
                found[name] = json.loads(answer.text)
        except (HostError, ValueError) as error:
            say(f"{name}: {error}")
    if not found:
        raise UserError(f"no machine of {job.id} has a run folder yet; `paceline logs {job.id}` shows why")
    furthest = max(found, key=lambda name: (found[name].get("status") == "finished", found[name].get("step", -1)))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        for name in sorted(found, key=lambda name: name == furthest):
            own = f"runs/{job.name}" + ("" if name == furthest else "/telemetry")
            hosts[name].fetch([own], Path(scratch))
        brought = Path(scratch) / "runs" / job.name
        (brought / _MARK).write_text(job.id)
        if target.exists():
            shutil.rmtree(target)
        brought.rename(target)
    return target


def stop(job: Job, grace: float) -> list[str]:
    hosts = hosts_of(job)
    return nodes.stop([hosts[name] for name in job.hosts], grace) + nodes.stop([hosts[HERE]], 5)


def tidy(job: Job) -> None:
    """The meeting place is of no use any more."""
    stop(job, grace=5)


def status(job: Job) -> list[tuple[str, str]]:
    return [(own.host.name, own.state) for own in _look(job)]


def _look(job: Job) -> list[Progress]:
    hosts = hosts_of(job)
    progress = [Progress(hosts[name]) for name in job.hosts]
    for own in progress:
        own.look()
    return progress
