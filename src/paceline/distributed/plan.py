"""Processes of this machine, alone or as one node of several: what to start, and how nodes join. No torch."""

import ipaddress
import os
import socket
import time
from dataclasses import dataclass

import psutil

from paceline.distributed.channel import token_of
from paceline.errors import UserError


@dataclass(frozen=True)
class JoinSpec:
    """How the machines of a run find each other."""

    nodes: int = 1
    rendezvous: str = ""
    """HOST:PORT of node 0; or, with `min_nodes`, of the server that `paceline rendezvous` runs."""
    node_rank: int = 0
    min_nodes: int = 0
    """Machines that are enough to go on; 0: all are needed, and numbered."""
    join_timeout: int = 300
    job: str = ""

    @property
    def is_alone(self) -> bool:
        return self.nodes == 1 and not self.min_nodes

    def __str__(self) -> str:
        if self.is_alone:
            return ""
        who = f"one of {self.nodes} nodes" if self.min_nodes else f"node {self.node_rank} of {self.nodes}"
        return f"{who}, meeting at {self.rendezvous}: "


@dataclass(frozen=True)
class Plan:
    """What the agent of this machine starts."""

    command: list[str]
    procs: int
    join: JoinSpec
    listen: str
    """Address at which this machine serves the rendezvous; empty: it does not."""
    environment: dict[str, str]


def plan(command: list[str], procs: int, join: JoinSpec) -> Plan:
    """Run `paceline COMMAND` as `procs` ranks here, alone or together with other machines."""
    environment = {
        # machines without names in DNS make every connection warn; what fails raises
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # every rank sets its own threads; libraries that it does not reach must not take them all
        "OMP_NUM_THREADS": "1",
    }
    listen = ""
    if join.is_alone:
        interface = interface_of("127.0.0.1")
    else:
        token_of(os.environ)
        host, port = _endpoint(join.rendezvous)
        own = _own_address_towards(host, port, join.join_timeout)
        interface = interface_of(own)
        # NCCL would ask the store every second from a thread of its own, and that store is in Python
        environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        if not join.min_nodes and join.node_rank == 0:
            _refuse_loopback_name(host, own)
            listen = own
        else:
            _wait_for(host, port, join)
    environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = interface
    kept = {name: value for name, value in environment.items() if name not in os.environ}
    return Plan(command, procs, join, listen, kept)


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
            return own_address_towards(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--rendezvous {host}:{port}: no way to that host ({error}); check its name and the network"
                ) from None
            time.sleep(0.5)


def own_address_towards(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _refuse_loopback_name(host: str, own: str) -> None:
    """Debian gives a machine's own name an address that no other machine can reach."""
    is_meant = host == "localhost" or host.startswith("127.") or ":" in host
    if is_loopback(own) and not is_meant:
        raise UserError(
            f"--rendezvous {host}: on this machine that name means {own}, which no other machine can reach; give its "
            "address in the network, or mend /etc/hosts"
        )


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise UserError(f"no network interface has the address {address}; set GLOO_SOCKET_IFNAME yourself")


def _wait_for(host: str, port: int, join: JoinSpec) -> None:
    """Until the rendezvous answers, so that its absence is said in one line."""
    deadline = time.monotonic() + join.join_timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                who, cure = (
                    ("the rendezvous", "check")
                    if join.min_nodes
                    else ("node 0", "start it there with --node-rank 0, and check")
                )
                raise UserError(
                    f"{who} does not answer at {host}:{port} after {join.join_timeout} s ({error}); {cure} that this "
                    "machine can reach that port"
                ) from None
            time.sleep(0.2)
