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


def plan(command: list[str], procs: int, nodes: int, node_rank: int, rendezvous: str, timeout: int = 300) -> Plan:
    """Run `python -m paceline COMMAND` as `procs` ranks here; with several nodes, meet the others at HOST:PORT."""
    environment = {
        # restarts after a killed worker fail with the shared store
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # keeps torchrun from warning; every rank sets its own threads (base/world.py)
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    shape = ["--nproc-per-node", str(procs), "--nnodes", str(nodes)]
    if nodes == 1:
        environment["GLOO_SOCKET_IFNAME"] = _interface_of("127.0.0.1")
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", uuid4().hex]
        meeting += ["--rdzv-conf", "is_host=true", "--local-addr", "127.0.0.1"]
    else:
        host, port = _endpoint(rendezvous)
        own = _own_address_towards(host, port)
        if node_rank == 0:
            _check_port_free(own, port)
        else:
            _wait_for_node_0(host, port, timeout)
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = _interface_of(own)
        # static: rank 0, and so the run folder, is on node 0, as a user who numbers nodes expects
        meeting = ["--rdzv-backend", "static", "--node-rank", str(node_rank), "--local-addr", own]
        meeting += ["--master-addr", host, "--master-port", str(port), "--rdzv-conf", f"timeout={timeout}"]
    kept = {name: value for name, value in environment.items() if name not in os.environ}
    return Plan([*shape, *meeting, "-m", "paceline", *command], kept)


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous {text!r}: write HOST:PORT of node 0, e.g. 10.0.0.5:29400")
    return host, int(port)


def _own_address_towards(host: str, port: int) -> str:
    """Address of the interface that leads to `host` (no packet is sent)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"--rendezvous {host}:{port}: no way to that host ({error}); check its name and the network"
        ) from None


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise UserError(f"no network interface has the address {address}; set GLOO_SOCKET_IFNAME yourself")


def _wait_for_node_0(host: str, port: int, timeout: int) -> None:
    """Until node 0 answers, so that its absence is said in one line and not by torch in fifty."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"node 0 does not answer at {host}:{port} after {timeout} s ({error}); start it there with "
                    f"--node-rank 0, and check that this machine can reach that port"
                ) from None
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
