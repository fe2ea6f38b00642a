"""What the agent of this node starts, and how the nodes of a job rendezvous. Does not import torch."""

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
    """How the nodes of a job find each other."""

    nodes: int = 1
    rendezvous: str = ""
    """HOST:PORT of node 0, or with `min_nodes` of the server that `paceline rendezvous` runs."""
    node_rank: int = 0
    min_nodes: int = 0
    """An elastic job continues with this many nodes; 0: not elastic, all nodes are needed and have a node rank."""
    join_timeout: int = 300
    job: str = ""

    @property
    def is_alone(self) -> bool:
        return self.nodes == 1 and not self.min_nodes

    def __str__(self) -> str:
        if self.is_alone:
            return ""
        who = f"one of {self.nodes} nodes" if self.min_nodes else f"node {self.node_rank} of {self.nodes}"
        return f"{who}, rendezvous at {self.rendezvous}: "


@dataclass(frozen=True)
class AgentPlan:
    """What the agent of this node starts."""

    command: list[str]
    procs: int
    join: JoinSpec
    listen: str
    """Address at which this node serves the rendezvous; empty if it does not."""
    environment: dict[str, str]


def plan(command: list[str], procs: int, join: JoinSpec) -> AgentPlan:
    """Return how to run `paceline COMMAND` as `procs` ranks on this node, alone or together with other nodes."""
    environment = {
        # hosts without DNS names cause a warning per connection; failures raise anyway
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # every rank sets its own number of threads; other libraries must not use all cores
        "OMP_NUM_THREADS": "1",
        # its thread polls the store, which is written in Python, every second; flight_recorder.py dumps instead
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    listen = ""
    if join.is_alone:
        interface = interface_of("127.0.0.1")
    else:
        token_of(os.environ)
        host, port = endpoint(join.rendezvous)
        address = _wait_for_route(host, port, join.join_timeout)
        interface = interface_of(address)
        if not join.min_nodes and join.node_rank == 0:
            _refuse_loopback_name(host, address)
            listen = address
        else:
            _wait_for_rendezvous(host, port, join)
    interfaces = interface_env(interface)
    kept = {name: value for name, value in (environment | interfaces).items() if name not in os.environ}
    if join.is_alone:  # a single node must not listen on the interface of multi-node jobs
        kept |= interfaces
    return AgentPlan(command, procs, join, listen, kept)


def endpoint(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; brackets around an IPv6 address are allowed."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError("invalid-rendezvous", f"--rendezvous {text!r} is not HOST:PORT of node 0, e.g. 10.0.0.5:29400")
    return host, int(port)


def _wait_for_route(host: str, port: int, timeout: int) -> str:
    """Return this node's address towards `host`. Retries, because Kubernetes publishes DNS names with a delay."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return own_address_towards(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    "rendezvous-no-route",
                    f"--rendezvous {host}:{port}: there is no route to that host ({error}). Check its name and the "
                    "network.",
                    host=host,
                ) from None
            time.sleep(0.5)


def own_address_towards(host: str, port: int) -> str:
    """Return the address of the interface that leads to `host`. Sends no packet."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _refuse_loopback_name(host: str, address: str) -> None:
    """Refuse a name that resolves to loopback, as Debian sets it up: no other node can reach that address."""
    is_intended = host == "localhost" or host.startswith("127.") or ":" in host
    if is_loopback(address) and not is_intended:
        raise UserError(
            "rendezvous-loopback",
            f"--rendezvous {host}: on this node that name resolves to {address}, which no other node can reach. Give "
            "the node's network address, or fix /etc/hosts.",
            host=host,
        )


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise UserError(
        "no-network-interface",
        f"no network interface has the address {address}. Set GLOO_SOCKET_IFNAME to the interface to use.",
        address=address,
    )


def interface_env(interface: str) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use one network interface."""
    # without "=", NCCL takes the name as a prefix: ens5 would also match ens50
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def _wait_for_rendezvous(host: str, port: int, join: JoinSpec) -> None:
    """Wait until the rendezvous accepts connections, so that its absence is reported in one line."""
    deadline = time.monotonic() + join.join_timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                who, fix = (
                    ("the rendezvous", "Check")
                    if join.min_nodes
                    else ("node 0", "Start it there with --node-rank 0, and check")
                )
                raise UserError(
                    "rendezvous-unreachable",
                    f"{who} did not respond at {host}:{port} within {join.join_timeout} s ({error}). {fix} that this "
                    "node can reach that port.",
                    host=host,
                    port=port,
                ) from None
            time.sleep(0.2)
