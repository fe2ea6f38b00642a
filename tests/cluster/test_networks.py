"""Networks of namespaces: unique names and addresses, and complete removal."""

import os
import random
import signal
import socket
import subprocess
import sys
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import machines
import psutil
import pytest
from machines import cluster_of
from networks import Network, network, until

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())

KILLED = """
import os, sys
from pathlib import Path
from machines import cluster_of
with cluster_of(Path(sys.argv[1]), "n1") as made:
    print(made.space(""), made.gateway, made.machines["n1"].pid, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_concurrent_networks_share_nothing(monkeypatch) -> None:
    monkeypatch.setattr(random, "sample", lambda all_of, _number: [*all_of])  # all try the same ones
    with network() as one, network() as other:
        assert one.mark != other.mark
        assert not one.subnet.overlaps(other.subnet)
        found = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
        used = [IPv4Address(entry.address) for entry in found if entry.family == socket.AF_INET]
        assert not [address for address in used if address in one.subnet]
        assert len(one.mark) <= 15  # the longest name of an interface


def test_network_is_removed_completely(tmp_path: Path) -> None:
    with network() as net:
        space = net.add_space("n1")
        subprocess.run(f"ip link add {net.mark} type veth peer name eth0 netns {space}".split(), check=True)
        process = subprocess.Popen(["ip", "netns", "exec", space, "sleep", "infinity"])
    assert process.wait() == -signal.SIGKILL
    assert not [path for path in Path("/run/netns").iterdir() if path.name.startswith(net.mark)]
    assert net.mark not in [name for _, name in socket.if_nameindex()]


def test_network_of_a_killed_process_does_not_interfere(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "next").mkdir()
    path = os.pathsep.join(filter(None, [str(Path(machines.__file__).parent), os.environ.get("PYTHONPATH")]))
    answer = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed")],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == -signal.SIGKILL, answer.stderr
    mark, gateway, pid = answer.stdout.replace("-", "").split()
    remaining = Network(mark, IPv4Network(f"{gateway}/24", strict=False), [mark, f"{mark}-n1"])
    try:
        until(lambda: not _runs(int(pid)), "its host")
        with cluster_of(tmp_path / "next", "n1") as made:
            assert made.gateway != gateway
            assert made.machines["n1"].processes() == []
    finally:
        remaining.remove()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
