"""Looking after a job on machines: where they meet, its start, its state, its run folder, its end."""

import json
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from paceline.base.files import make_folder, printable, sync, sync_tree, write_text
from paceline.errors import NoRunFolder, UserError
from paceline.launch import job as jobs
from paceline.launch import nodes, sessions
from paceline.launch.doctor import refuse_different_code
from paceline.launch.hosts import Host, HostError, SshHost, addresses, free_port
from paceline.launch.job import Job
from paceline.launch.nodes import HERE
from paceline.launch.sessions import Progress
from paceline.launch.values import quoted

STOPPED = "stopped"
"""File in the folder of a job that its user ended."""
_OVER = "over"  # file in the folder of a job that holds how it ended
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"
_MARK = ".job"  # in a run folder that was fetched: of which job


def say(line: str) -> None:
    """One line, whatever a machine put into it."""
    print(printable(line), flush=True)


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
        return replace(job, meeting=f"127.0.0.1:{_free_port_here(job)}")
    if where not in ("auto", "here", *job.hosts):
        raise UserError(f"--meet {where}: say auto, here, or one of the hosts ({', '.join(job.hosts)})")
    hosts = [host for name, host in hosts_of(job).items() if name != HERE]
    python = job.python or "python3"
    if where in ("auto", "here"):
        ours = {addresses(host)[0] for host in hosts}
        if len(ours) == 1 and all(_can_reach(host, python, *ours) for host in hosts):
            return replace(job, meeting=f"{ours.pop()}:{_free_port_here(job)}", meeting_host="", within=Job.within)
        if where == "here":
            raise UserError(
                f"--meet here: not all hosts can connect to this machine ({', '.join(ours)}); say --meet HOST"
            )
    keeper = next((host for host in hosts if host.name == where), hosts[0])
    place = f"{addresses(keeper)[1]}:{free_port(keeper, python)}"
    return replace(job, meeting=place, meeting_host=keeper.name, within=Job.within)


def _free_port_here(job: Job) -> int:
    return free_port(hosts_of(job)[HERE], sys.executable)


def _can_reach(host: Host, python: str, address: str) -> bool:
    """Whether it can connect to a port that is opened here for a moment."""
    try:
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError:  # behind a router, which has that address
        return False
    with listener:
        port = listener.getsockname()[1]
        attempt = shlex.join(["-c", _CONNECT, address, str(port)])
        return host.call(f"{quoted(python)} {attempt}", timeout=30).status == 0


@contextmanager
def _handling(handler: Any, *signums: signal.Signals) -> Iterator[None]:
    previous = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


def interruptible() -> AbstractContextManager[None]:
    """A launcher that is ended, or whose terminal is closed, cleans up behind it."""
    return _handling(lambda number, _: sys.exit(128 + number), signal.SIGTERM, signal.SIGHUP)


def uninterruptible() -> AbstractContextManager[None]:
    """While cleaning up: closing a terminal may send several signals."""
    return _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_stopped(job: Job) -> bool:
    """Whether nothing of it is to be started any more."""
    return (jobs.folder_of(job.id) / STOPPED).exists() or bool(concluded(job))


def conclude(job: Job, state: str) -> None:
    """Remember how it ended, so that nobody has to ask its machines again."""
    with suppress(FileNotFoundError):  # stopped before it began, and forgotten
        write_text(jobs.folder_of(job.id) / _OVER, state, 0o600)


def concluded(job: Job) -> str:
    """How it ended, if that is known here."""
    return _text(jobs.folder_of(job.id) / _OVER)


def reopen(job: Job) -> None:
    """It starts again."""
    for name in (STOPPED, _OVER):
        (jobs.folder_of(job.id) / name).unlink(missing_ok=True)


def plan(job: Job) -> Sequence[object]:
    """Where the machines meet is found when it is submitted."""
    keeper = job.extra["meet"] if job.extra["meet"] in job.hosts else ""
    return nodes.plan(replace(job, meeting="ADDRESS:PORT", meeting_host=keeper))


def submit(job: Job) -> Job:
    """Start it everywhere, or nowhere."""
    hosts = hosts_of(job)
    secrets = nodes.secrets_of(job)
    if job.python and (job.backend != "local" or job.python != sys.executable):
        refuse_different_code([hosts[name] for name in job.hosts], job.python)
    job = with_meeting_place(job, job.extra["meet"])
    again = jobs.is_known(job)
    jobs.save(job)
    reopen(job)
    with interruptible():
        try:
            nodes.carry_out(nodes.plan(job), hosts, secrets, partial(is_stopped, job))
        except BaseException:
            with uninterruptible():
                left = sessions.stop([hosts[name] for name in (*job.hosts, HERE)], grace=2)
            for line in left:
                say(f"left over: {line}")
            if not left and not again:
                jobs.forget(job)  # it never began
            raise
    return job


def fetch(job: Job) -> Path:
    """Bring the run folder here: from the machine that got furthest, with the telemetry of all."""
    target = Path(job.runs) / job.name
    if target.exists() and not fetched(job):
        raise UserError(f"{target} is another run; move it away, and `paceline fetch {job.id}`")
    hosts = hosts_of(job)
    own = shlex.quote(f"runs/{job.name}")
    script = f"cat {own}/summary.json || exit 1; echo; cd {own}; ls -d log.txt telemetry 2> /dev/null; true"
    found: dict[str, tuple[bool, int, bool]] = {}
    silent, sampled = [], []
    for name in job.hosts:
        try:
            answer = hosts[name].run(script)
            if answer.status == 0:
                text, _, files = answer.text.rpartition("}")
                found[name] = (*_reached(text + "}"), "log.txt" in files)
                sampled += [name] if "telemetry" in files else []
        except HostError as error:
            silent.append(str(error))
    if not found and silent:  # the run folder may well be there
        raise HostError(f"{'; '.join(silent)}; fetch again when its machines can be reached")
    for line in silent:
        say(line)
    if not found:
        raise NoRunFolder(f"no machine of {job.id} has a run folder; `paceline logs {job.id}` shows why")
    furthest = max(found, key=lambda name: found[name])  # of several the leader's, which has the log
    if target.exists() and (here := _reached(_text(target / "summary.json"))) > found[furthest][:2]:
        raise UserError(
            f"{target} has got further meanwhile (step {here[1]}; on {furthest} step {found[furthest][1]}); "
            "move it away to fetch again"
        )
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        for name in sampled:
            if name != furthest:
                hosts[name].fetch([f"runs/{job.name}/telemetry"], Path(scratch))
        hosts[furthest].fetch([f"runs/{job.name}"], Path(scratch))
        brought = Path(scratch) / "runs" / job.name
        if not brought.is_dir():
            raise HostError(f"{furthest}: runs/{job.name} is no folder there; look at what it runs")
        (brought / _MARK).write_text(job.id)
        sync_tree(brought)
        if target.exists():
            target.rename(Path(scratch) / "replaced")
        brought.rename(target)
        sync(target.parent)
    return target


def fetched(job: Job) -> Path | None:
    """The run folder here, if it was brought."""
    target = Path(job.runs) / job.name
    return target if _text(target / _MARK) == job.id else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _reached(summary: str) -> tuple[bool, int]:
    """Whether a run is finished, and how far it got."""
    try:
        told = json.loads(summary)
        return told.get("status") == "finished", int(told.get("step", -1))
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return False, -1


def stop(job: Job, grace: float) -> list[str]:
    """End it; whoever follows it knows that this was wanted."""
    (jobs.folder_of(job.id) / STOPPED).touch(0o600)
    return end_sessions(job, grace)


def end_sessions(job: Job, grace: float) -> list[str]:
    """Whatever of it still runs, here and there; what could not be ended."""
    hosts = hosts_of(job)
    return sessions.stop([hosts[name] for name in job.hosts], grace) + sessions.stop([hosts[HERE]], 5)


def tidy(job: Job) -> None:
    """The meeting place is of no use any more."""
    end_sessions(job, grace=5)


def status(job: Job) -> list[tuple[str, str]]:
    return [(own.host.name, own.state) for own in look(job)]


def look(job: Job) -> list[Progress]:
    hosts = hosts_of(job)
    progress = [Progress(hosts[name]) for name in job.hosts]
    # daemons: who lists jobs does not wait for machines that do not answer
    threads = [Thread(target=own.look, daemon=True) for own in progress]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return progress
