"""Processes of this machine, alone or as one node of several: what is to be started, and where nodes meet. No torch."""

import ipaddress
import os
import socket
import time
from dataclasses import dataclass

import psutil

from paceline.distributed.channel import token_of
from paceline.errors import UserError


@dataclass(frozen=True)
class Meeting:
    """How the machines of a run find each other."""

    nodes: int = 1
    rendezvous: str = ""
    """HOST:PORT of node 0; or, with `fewest`, of the server that `paceline meet` runs."""
    node_rank: int = 0
    fewest: int = 0
    """Machines that are enough to go on; 0: all are needed, and numbered."""
    within: int = 300
    job: str = ""

    @property
    def is_alone(self) -> bool:
        return self.nodes == 1 and not self.fewest

    def __str__(self) -> str:
        if self.is_alone:
            return ""
        who = f"one of {self.nodes} nodes" if self.fewest else f"node {self.node_rank} of {self.nodes}"
        return f"{who}, meeting at {self.rendezvous}: "


@dataclass(frozen=True)
class Plan:
    """What the agent of this machine starts."""

    command: list[str]
    procs: int
    meeting: Meeting
    listen: str
    """Address at which this machine serves the rendezvous; empty: it does not."""
    environment: dict[str, str]


def plan(command: list[str], procs: int, meeting: Meeting) -> Plan:
    """Run `paceline COMMAND` as `procs` ranks here, alone or together with other machines."""
    environment = {
        # machines without names in DNS make every connection warn; what fails raises
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # every rank sets its own threads; libraries that it does not reach must not take them all
        "OMP_NUM_THREADS": "1",
    }
    listen = ""
    if meeting.is_alone:
        interface = interface_of("127.0.0.1")
    else:
        token_of(os.environ)
        host, port = endpoint(meeting.rendezvous)
        own = _own_address_towards(host, port, meeting.within)
        interface = interface_of(own)
        # NCCL would ask the store every second from a thread of its own, and that store is in Python
        environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        if not meeting.fewest and meeting.node_rank == 0:
            _refuse_loopback_name(host, own)
            listen = own
        else:
            _wait_for(host, port, meeting)
    interfaces = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    kept = {name: value for name, value in (environment | interfaces).items() if name not in os.environ}
    if meeting.is_alone:  # whatever is set for jobs on several machines
        kept |= interfaces
    return Plan(command, procs, meeting, listen, kept)


def endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # around an IPv6 address
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


def _wait_for(host: str, port: int, meeting: Meeting) -> None:
    """Until the rendezvous answers, so that its absence is said in one line."""
    deadline = time.monotonic() + meeting.within
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                who, cure = (
                    ("the rendezvous", "check")
                    if meeting.fewest
                    else ("node 0", "start it there with --node-rank 0, and check")
                )
                raise UserError(
                    f"{who} does not answer at {host}:{port} after {meeting.within} s ({error}); {cure} that this "
                    "machine can reach that port"
                ) from None
            time.sleep(0.2)
