"""Looking after a job on machines: where they meet, its start, its state, its run folder, its end."""

import json
import shlex
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import NoRunFolder, UserError
from paceline.launch import job as jobs
from paceline.launch import nodes
from paceline.launch.doctor import refuse_different_code
from paceline.launch.hosts import Host, HostError, SshHost, addresses, free_port, quoted
from paceline.launch.job import Job
from paceline.launch.nodes import HERE, Progress

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
    python = job.python or "python3"
    if where in ("auto", "here"):
        ours = {addresses(host)[0] for host in hosts}
        if len(ours) == 1 and all(_can_reach(host, python, *ours) for host in hosts):
            return replace(job, meeting=f"{ours.pop()}:{_free_port_here()}")
        if where == "here":
            raise UserError(
                f"--meet here: not all hosts can connect to this machine ({', '.join(ours)}); say --meet HOST"
            )
    keeper = next((host for host in hosts if host.name == where), hosts[0])
    return replace(job, meeting=f"{addresses(keeper)[1]}:{free_port(keeper, python)}", meeting_host=keeper.name)


def _free_port_here() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _can_reach(host: Host, python: str, address: str) -> bool:
    """Whether it can connect to a port that is opened here for a moment."""
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        attempt = f'import socket; socket.create_connection(("{address}", {port}), 3).close()'
        return host.call(f"{quoted(python)} -c '{attempt}'", timeout=30).status == 0


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
        raise NoRunFolder(f"no machine of {job.id} has a run folder; `paceline logs {job.id}` shows why")
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
    return [(own.host.name, own.state) for own in look(job)]


def look(job: Job) -> list[Progress]:
    hosts = hosts_of(job)
    progress = [Progress(hosts[name]) for name in job.hosts]
    for own in progress:
        own.look()
    return progress
