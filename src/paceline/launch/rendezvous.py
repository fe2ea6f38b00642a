"""Choose where the rendezvous store of a job runs: on this machine if all nodes can reach it, otherwise on a node."""

import shlex
import socket
import sys
from dataclasses import replace

from paceline.errors import UserError
from paceline.launch.hosts import Host, addresses, free_port
from paceline.launch.job import Job
from paceline.launch.job_hosts import HERE, hosts_of
from paceline.launch.specs import LocalSpec
from paceline.launch.values import quoted

_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


def choose(job: Job, where: str = "auto") -> Job:
    """Return the job with its rendezvous; `where` is "auto", "here", or one of the hosts."""
    if isinstance(job.spec, LocalSpec):
        return replace(job, rendezvous=f"127.0.0.1:{_free_local_port(job)}")
    names = job.spec.hosts
    if where not in ("auto", "here", *names):
        message = f"--rendezvous-host {where} is unknown. Use auto, here, or one of the hosts ({', '.join(names)})."
        raise UserError("unknown-rendezvous-host", message, host=where)
    hosts = [host for name, host in hosts_of(job).items() if name != HERE]
    python = job.spec.python or "python3"
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
    chosen = next((host for host in hosts if host.name == where), hosts[0])
    endpoint = f"{addresses(chosen)[1]}:{free_port(chosen, python)}"
    return replace(job, rendezvous=endpoint, rendezvous_host=chosen.name, join_timeout=Job.join_timeout)


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
