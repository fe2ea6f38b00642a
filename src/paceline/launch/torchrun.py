"""Processes of this machine, alone or as one node of several: a plan in torchrun's words. No torch here."""

import os
import socket
import time
from dataclasses import dataclass
from uuid import uuid4

import psutil

from paceline.errors import UserError


@dataclass(frozen=True)
class Plan:
    """What to hand to torchrun, and what to add to its environment."""

    arguments: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Meeting:
    """How the machines of a run find each other."""

    nodes: int = 1
    rendezvous: str = ""
    """HOST:PORT of node 0; or, with `fewest`, of the meeting place that `paceline meet` keeps."""
    node_rank: int = 0
    fewest: int = 0
    """Machines that are enough to go on; 0: all are needed, and numbered."""
    within: int = 300
    job: str = ""

    def __str__(self) -> str:
        if self.nodes == 1 and not self.fewest:
            return ""
        who = f"one of {self.nodes} nodes" if self.fewest else f"node {self.node_rank} of {self.nodes}"
        return f"{who}, meeting at {self.rendezvous}: "


def plan(command: list[str], procs: int, meeting: Meeting) -> Plan:
    """Run `python -m paceline COMMAND` as `procs` ranks here, alone or together with other machines."""
    environment = {
        # restarts after a killed worker fail with the shared store
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # machines without names in DNS make every connection warn; what fails raises
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        # keeps torchrun from warning; every rank sets its own threads (base/world.py)
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    arguments = ["--nproc-per-node", str(procs)]
    if meeting.nodes == 1 and not meeting.fewest:
        environment["GLOO_SOCKET_IFNAME"] = _interface_of("127.0.0.1")
        arguments += ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        arguments += ["--rdzv-id", uuid4().hex, "--rdzv-conf", "is_host=true", "--local-addr", "127.0.0.1"]
    else:
        host, port = _endpoint(meeting.rendezvous)
        own = _own_address_towards(host, port, meeting.within)
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = _interface_of(own)
        arguments += ["--local-addr", own]
        arguments += _changing(meeting, host, port) if meeting.fewest else _numbered(meeting, own, host, port)
    kept = {name: value for name, value in environment.items() if name not in os.environ}
    return Plan([*arguments, "-m", "paceline", *command], kept)


def _numbered(meeting: Meeting, own: str, host: str, port: int) -> list[str]:
    """Static: rank 0, and so the run folder, is on node 0, as a user who numbers nodes expects."""
    if meeting.node_rank == 0:
        _check_port_free(own, port)
    else:
        cure = "start it there with --node-rank 0, and check that this machine can reach that port"
        _wait_for(host, port, meeting.within, "node 0", cure)
    place = ["--nnodes", str(meeting.nodes), "--rdzv-backend", "static", "--node-rank", str(meeting.node_rank)]
    return [*place, "--master-addr", host, "--master-port", str(port), "--rdzv-conf", f"timeout={meeting.within}"]


def _changing(meeting: Meeting, host: str, port: int) -> list[str]:
    """Machines may leave and join; lost ones are noticed within seconds, where torch's own times are minutes."""
    _wait_for(host, port, meeting.within, "the meeting place", "check that this machine can reach that port")
    times = f"join_timeout={meeting.within},last_call_timeout=2,close_timeout=5,heartbeat_timeout=5,read_timeout=10"
    alive = "keep_alive_interval=1,keep_alive_max_attempt=3"
    place = ["--nnodes", f"{meeting.fewest}:{meeting.nodes}", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    place += ["--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", meeting.job or "paceline"]
    return [*place, "--rdzv-conf", f"is_host=false,{times},{alive}"]


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous {text!r}: write HOST:PORT of node 0, e.g. 10.0.0.5:29400")
    return host, int(port)


def _own_address_towards(host: str, port: int, within: int) -> str:
    """Address of the interface that leads to `host` (no packet is sent); engines make names known after a while."""
    deadline = time.monotonic() + within
    while True:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--rendezvous {host}:{port}: no way to that host ({error}); check its name and the network"
                ) from None
            time.sleep(0.5)


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise UserError(f"no network interface has the address {address}; set GLOO_SOCKET_IFNAME yourself")


def _wait_for(host: str, port: int, timeout: int, who: str, cure: str) -> None:
    """Until it answers, so that its absence is said in one line and not by torch in fifty."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"{who} does not answer at {host}:{port} after {timeout} s ({error}); {cure}") from None
            time.sleep(0.2)


def _check_port_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"--rendezvous: port {port} of {host} cannot be used ({error.strerror}); end what uses it, or choose "
                "another port on every node"
            ) from None
