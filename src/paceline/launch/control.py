"""Looking after a job: submit it, follow it, bring back lost machines, fetch the run folder, end it."""

import json
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.base.files import printable
from paceline.errors import UserError
from paceline.launch import job as jobs
from paceline.launch import nodes
from paceline.launch.hosts import Host, HostError, SshHost, last_line
from paceline.launch.job import Job
from paceline.launch.nodes import HERE, Progress

_FREE_PORT = "import socket; s = socket.socket(); s.bind((str(), 0)); print(s.getsockname()[1])"
_MOST_RETURNS = 5
_MARK = ".job"  # in a run folder that was fetched: of which job
Say = Callable[[str], object]


def say(line: str) -> None:
    print(line, flush=True)


def hosts_of(job: Job) -> dict[str, Host]:
    """The machines of a job by name, and this one."""
    here = Host(HERE, str(jobs.folder_of(job.id)))
    if job.backend == "local":
        found: dict[str, Host] = {name: Host(name, f"{here.folder}/{name}") for name in job.hosts}
    else:
        # a folder of its own for each, since machines may share the user's home
        options = tuple(job.extra.get("ssh", ()))
        found = {name: SshHost(name, f"$HOME/.paceline/jobs/{job.id}/{name}", options) for name in job.hosts}
    return found | {HERE: here}


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


def addresses(host: Host) -> tuple[str, str]:
    """Address of this machine as the host sees it, and its own."""
    answer = host.call('echo "$SSH_CONNECTION"').text.split()
    if len(answer) != 4:
        raise HostError(
            f"{host.name}: SSH_CONNECTION is not set there, which tells addresses; look at its sshd's settings"
        )
    return answer[0], answer[2]


def free_port(host: Host, python: str) -> int:
    answer = host.call(f"{python} -c '{_FREE_PORT}'")
    if answer.status:
        raise HostError(f"{host.name}: looking for a free port failed: {last_line(answer)}")
    return int(answer.text)


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
    job = with_meeting_place(job, job.extra["meet"])
    hosts = hosts_of(job)
    secrets = nodes.secrets_of(job)
    jobs.save(job)
    try:
        nodes.carry_out(nodes.plan(job), hosts, secrets)
    except BaseException:
        left = nodes.stop([hosts[name] for name in (*job.hosts, HERE)], grace=2)
        for line in left:
            say(f"left over: {line}")
        raise
    return job


def follow(job: Job, tell: Say = say, every: float = 1.0, until: Callable[[], bool] = lambda: False) -> int:
    """Show the logs of all machines until the job is over, and start lost ones again; the job's exit status."""
    hosts = hosts_of(job)
    progress = [Progress(hosts[name]) for name in job.hosts]
    states, returns = dict.fromkeys(job.hosts, ""), dict.fromkeys(job.hosts, 0)
    width = max(map(len, job.hosts))
    while not until():
        for own in progress:
            for line in own.look():
                tell(f"{own.host.name:<{width}} | {printable(line)}")
            if own.state != states[own.host.name] and not own.state.startswith(("running", "ended")):
                tell(f"{own.host.name:<{width}} | ({own.state})")
            states[own.host.name] = own.state
        if all(own.over or own.state == "absent" for own in progress):
            break
        _bring_back(job, hosts, progress, returns, tell)
        time.sleep(every)
    return exit_status(progress)


def _bring_back(job: Job, hosts: dict[str, Host], progress: list[Progress], returns: dict[str, int], tell: Say) -> None:
    """A machine that was restarted, or whose processes were killed, joins again as long as others go on."""
    if not any(own.state == "running" for own in progress):
        return
    for own in progress:
        name = own.host.name
        if own.state in ("lost", "absent") and returns[name] < _MOST_RETURNS:
            returns[name] += 1
            tell(f"{name} was lost: starting it again")
            try:
                nodes.carry_out(list(nodes.node_steps(job, name)), hosts, nodes.secrets_of(job))
            except UserError as error:
                tell(f"{name} could not be started again: {error}")


def exit_status(progress: Sequence[Progress]) -> int:
    """0 if a machine saw the end of the training; machines that were lost on the way do not count."""
    ended = [int(own.state.split()[1]) for own in progress if own.over]
    return min(ended) if ended else 1


def fetch(job: Job, tell: Say = say) -> Path:
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
            tell(f"{name}: {error}")
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
    hosts = hosts_of(job)
    progress = [Progress(hosts[name]) for name in job.hosts]
    for own in progress:
        own.look()
    return [(own.host.name, own.state) for own in progress]
