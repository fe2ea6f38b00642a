"""Control a job on hosts: its rendezvous, start, state, run folder and end."""

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

from paceline.errors import NoRunFolder, UserError
from paceline.launch import job as jobs
from paceline.launch import nodes, sessions
from paceline.launch.doctor import refuse_different_code
from paceline.launch.hosts import Host, HostError, SshHost, addresses, free_port
from paceline.launch.job import Job
from paceline.launch.nodes import HERE
from paceline.launch.sessions import NodeMonitor
from paceline.launch.values import quoted
from paceline.system.files import make_folder, printable, sync, sync_tree, write_text

STOPPED = "stopped"
"""File in the folder of a job that its user stopped."""
_FINAL_STATE = "final_state"  # file in the folder of a job that has ended
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"
_JOB_ID = ".job"  # file in a fetched run folder


def print_line(line: str) -> None:
    """Print one line, whatever control characters a host put into it."""
    print(printable(line), flush=True)


def hosts_of(job: Job) -> dict[str, Host]:
    """Return the hosts of a job by name, and this machine as HERE."""
    here = Host(HERE, str(jobs.folder_of(job.id)))
    if job.backend == "local":
        hosts: dict[str, Host] = {name: Host(name, f"{here.folder}/{name}") for name in job.hosts}
    else:
        # one folder per node, since hosts may share the home folder
        hosts = {
            name: SshHost(name, f"$HOME/.paceline/jobs/{job.id}/{name}", ssh_options(job, name)) for name in job.hosts
        }
    return hosts | {HERE: here}


def ssh_options(job: Job, host: str) -> tuple[str, ...]:
    """Return the arguments of ssh for a host; EC2 addresses change and are reused, so keys belong to instance ids."""
    instance = job.extra.get("instances", {}).get(host)
    named = ("-o", f"HostName={instance['address']}", "-o", f"HostKeyAlias={instance['id']}") if instance else ()
    return (*job.extra.get("ssh", ()), *named)


def choose_rendezvous(job: Job, where: str) -> Job:
    """Return the job with its rendezvous: on this machine if all nodes can reach it, otherwise on the first node.

    `where` is "auto", "here", or one of the hosts.
    """
    if job.backend == "local":
        return replace(job, rendezvous=f"127.0.0.1:{_free_local_port(job)}")
    if where not in ("auto", "here", *job.hosts):
        message = f"--rendezvous-host {where} is unknown. Use auto, here, or one of the hosts ({', '.join(job.hosts)})."
        raise UserError("unknown-rendezvous-host", message, host=where)
    hosts = [host for name, host in hosts_of(job).items() if name != HERE]
    python = job.python or "python3"
    if where in ("auto", "here"):
        local = {addresses(host)[0] for host in hosts}
        if len(local) == 1 and all(_can_reach(host, python, *local) for host in hosts):
            endpoint = f"{local.pop()}:{_free_local_port(job)}"
            return replace(job, rendezvous=endpoint, rendezvous_host="", join_timeout=Job.join_timeout)
        if where == "here":
            message = (
                f"--rendezvous-host here: not all hosts can connect to this machine ({', '.join(local)}). "
                "Use --rendezvous-host HOST."
            )
            raise UserError("launcher-unreachable", message)
    rendezvous_host = next((host for host in hosts if host.name == where), hosts[0])
    endpoint = f"{addresses(rendezvous_host)[1]}:{free_port(rendezvous_host, python)}"
    return replace(job, rendezvous=endpoint, rendezvous_host=rendezvous_host.name, join_timeout=Job.join_timeout)


def _free_local_port(job: Job) -> int:
    return free_port(hosts_of(job)[HERE], sys.executable)


def _can_reach(host: Host, python: str, address: str) -> bool:
    """Return whether the host can connect to a port that is briefly opened here."""
    try:
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError:  # the address belongs to a router in front of this machine
        return False
    with listener:
        port = listener.getsockname()[1]
        attempt = shlex.join(["-c", _CONNECT, address, str(port)])
        return host.call(f"{quoted(python)} {attempt}", timeout=30).status == 0


@contextmanager
def _signal_handler(handler: Any, *signums: signal.Signals) -> Iterator[None]:
    previous = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


def exit_on_signals() -> AbstractContextManager[None]:
    """Turn signals into SystemExit, so that a terminated launcher cleans up."""
    return _signal_handler(lambda number, _: sys.exit(128 + number), signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> AbstractContextManager[None]:
    """Ignore signals during the clean-up: closing a terminal may send several."""
    return _signal_handler(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_stopped(job: Job) -> bool:
    """Return whether no part of the job may be started any more."""
    return (jobs.folder_of(job.id) / STOPPED).exists() or bool(final_state(job))


def record_final_state(job: Job, state: str) -> None:
    """Remember how the job ended, so that its hosts need not be asked again."""
    with suppress(FileNotFoundError):  # stopped before it started, and forgotten
        write_text(jobs.folder_of(job.id) / _FINAL_STATE, state, 0o600)


def final_state(job: Job) -> str:
    """Return how the job ended, or "" if that is not known here."""
    return _text(jobs.folder_of(job.id) / _FINAL_STATE)


def clear_final_state(job: Job) -> None:
    """Forget that the job was stopped or ended, because it starts again."""
    for name in (STOPPED, _FINAL_STATE):
        (jobs.folder_of(job.id) / name).unlink(missing_ok=True)


def plan(job: Job) -> Sequence[object]:
    """Return the steps; the rendezvous endpoint is chosen only when the job is submitted."""
    host = job.extra["rendezvous_host"] if job.extra["rendezvous_host"] in job.hosts else ""
    return nodes.plan(replace(job, rendezvous="ADDRESS:PORT", rendezvous_host=host))


def submit(job: Job) -> Job:
    """Start the job on all hosts; if one fails, stop it on all. Return the job with its rendezvous."""
    hosts = hosts_of(job)
    secrets = nodes.secrets_of(job)
    if job.python and (job.backend != "local" or job.python != sys.executable):
        refuse_different_code([hosts[name] for name in job.hosts], job.python)
    job = choose_rendezvous(job, job.extra["rendezvous_host"])
    was_known = jobs.is_known(job)
    jobs.save(job)
    clear_final_state(job)
    with exit_on_signals():
        try:
            nodes.execute(nodes.plan(job), hosts, secrets, partial(is_stopped, job))
        except BaseException:
            with ignore_signals():
                remaining = sessions.stop([hosts[name] for name in (*job.hosts, HERE)], grace=2)
            for line in remaining:
                print_line(f"not stopped: {line}")
            if not remaining and not was_known:
                jobs.forget(job)  # it never started
            raise
    return job


_Progress = tuple[bool, int, bool]
"""Of a run folder: finished, step, has the log, which only rank 0 writes. The largest is fetched."""


def fetch(job: Job) -> Path:
    """Copy the most advanced run folder here, with the telemetry of all nodes; return its path."""
    target = Path(job.runs) / job.name
    if target.exists() and not fetched_folder(job):
        message = f"{target} is the folder of another run. Move it away, then run `paceline fetch {job.id}`."
        raise UserError("run-exists", message, path=target)
    hosts = hosts_of(job)
    progress, with_telemetry = _progress_on_hosts(job, hosts)
    newest = max(progress, key=lambda name: progress[name])
    if target.exists() and (here := _progress(_text(target / "summary.json"))) > progress[newest][:2]:
        message = (
            f"{target} is at step {here[1]}, but {newest} only at step {progress[newest][1]}. "
            "Move the folder away to fetch again."
        )
        raise UserError("local-run-newer", message, path=target)
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        for name in with_telemetry:
            if name != newest:
                hosts[name].fetch([f"runs/{job.name}/telemetry"], Path(scratch))
        hosts[newest].fetch([f"runs/{job.name}"], Path(scratch))
        fetched = Path(scratch) / "runs" / job.name
        if not fetched.is_dir():
            message = f"runs/{job.name} is not a folder there. Check what runs on the host."
            raise hosts[newest].error("host-fetch-failed", message)
        (fetched / _JOB_ID).write_text(job.id)
        sync_tree(fetched)
        if target.exists():
            target.rename(Path(scratch) / "replaced")
        fetched.rename(target)
        sync(target.parent)
    return target


def _progress_on_hosts(job: Job, hosts: dict[str, Host]) -> tuple[dict[str, _Progress], list[str]]:
    """Return the progress of the run per host that has its folder, and the hosts that have telemetry."""
    folder = shlex.quote(f"runs/{job.name}")
    script = f"cat {folder}/summary.json || exit 1; echo; cd {folder}; ls -d log.txt telemetry 2> /dev/null; true"
    progress: dict[str, _Progress] = {}
    unreachable, with_telemetry = [], []
    for name in job.hosts:
        try:
            result = hosts[name].run(script)
            if result.status == 0:
                text, _, files = result.text.rpartition("}")
                progress[name] = (*_progress(text + "}"), "log.txt" in files)
                with_telemetry += [name] if "telemetry" in files else []
        except HostError as error:
            unreachable.append(str(error))
    if not progress and unreachable:  # the run folder may exist there
        message = f"{'; '.join(unreachable)}. Fetch again when the nodes are reachable."
        raise HostError("nodes-unreachable", message, job=job.id)
    for line in unreachable:
        print_line(line)
    if not progress:
        message = f"no node of {job.id} has a run folder. `paceline logs {job.id}` shows why."
        raise NoRunFolder("no-run-folder", message, job=job.id)
    return progress, with_telemetry


def fetched_folder(job: Job) -> Path | None:
    """Return the run folder on this machine, if it was fetched."""
    target = Path(job.runs) / job.name
    return target if _text(target / _JOB_ID) == job.id else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _progress(summary: str) -> tuple[bool, int]:
    """Return whether a run is finished, and its step, from its untrusted summary.json."""
    try:
        content = json.loads(summary)
        return content.get("status") == "finished", int(content.get("step", -1))
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return False, -1


def stop(job: Job, grace: float) -> list[str]:
    """Stop the job and mark it, so that nobody who follows it restarts nodes; return what did not stop."""
    (jobs.folder_of(job.id) / STOPPED).touch(0o600)
    return stop_sessions(job, grace)


def stop_sessions(job: Job, grace: float) -> list[str]:
    """Stop what still runs of the job, here and on its hosts; return a line for each part that did not stop."""
    hosts = hosts_of(job)
    return sessions.stop([hosts[name] for name in job.hosts], grace) + sessions.stop([hosts[HERE]], 5)


def clean_up(job: Job) -> None:
    """Stop the rendezvous store, which outlives the nodes."""
    stop_sessions(job, grace=5)


def status(job: Job) -> list[tuple[str, str]]:
    return [(node.host.name, node.state) for node in poll_nodes(job)]


def poll_nodes(job: Job) -> list[NodeMonitor]:
    """Return the nodes of a job, each asked once."""
    hosts = hosts_of(job)
    monitors = [NodeMonitor(hosts[name]) for name in job.hosts]
    # daemon threads: listing jobs does not wait for hosts that do not answer
    threads = [Thread(target=node.poll, daemon=True) for node in monitors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return monitors
