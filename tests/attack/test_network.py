"""Attacks on the ports of a job by other users of the host and by other hosts."""

import ipaddress
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import networks
import psutil
import pytest
from conftest import HANG, TINY, TOKEN, command, environment
from networks import network

from paceline.distributed.channel import GREETING, NONCE, PROOF, Channel
from paceline.distributed.server import Server
from paceline.track.records import RunFolder

Job = subprocess.Popen[str]
CLIENT = Path(__file__).with_name("hostile_client.py")
NOBODY = 65534
LONG = (*TINY, "--train.duration", "600ba", "--precision", "fp32", "--device", "cpu")


def listening(job: Job) -> set[tuple[str, int]]:
    """Return the addresses at which the processes of a job listen, read from its network namespace."""
    found = set()
    with suppress(OSError, psutil.Error):
        launcher = psutil.Process(job.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            sockets = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.is_symlink()}
            for kind in ("tcp", "tcp6"):
                for line in Path(f"/proc/{process.pid}/net/{kind}").read_text().splitlines()[1:]:
                    _, local, _, state, *rest = line.split()
                    if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                        address, port = local.split(":")
                        words = bytes.fromhex(address)
                        host = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                        found.add((str(ipaddress.ip_address(host)), int(port, 16)))
    return found


def attack(address: tuple[str, int], folder: Path, prefix: Sequence[str] = ()) -> int:
    """Attack an address as another user, with a command prefix for a namespace. Returns the number of attacks."""
    canary = folder / "canary"
    as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
    python = shutil.which("python3", path="/usr/bin") or sys.executable  # one that the other user can execute
    words = [*prefix, *as_nobody, python, folder / "client.py", *address, canary]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    count, *answers = done.stdout.splitlines()
    for answer in map(bytes.fromhex, answers):  # only the greeting and random bytes, more of them for a wrong token
        assert answer.startswith(GREETING)
        assert len(answer) - len(GREETING) in (NONCE, NONCE + PROOF)
    assert len({answer[-NONCE:] for answer in answers}) == len(answers)
    assert not canary.exists()
    return int(count)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(run).records() if "lr" in record]


@pytest.fixture
def attacker() -> Iterator[Path]:
    """Yield a folder that another user can write to, with the hostile client in it."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(CLIENT, folder / "client.py")
        folder.chmod(0o777)
        (folder / "client.py").chmod(0o644)
        yield folder


def attack_each(jobs: Sequence[Job], attacks: Callable[[int, tuple[str, int]], int]) -> dict[tuple[str, int], int]:
    """Attack every port that the jobs open twice, from their start until they end. Returns counts by address."""
    counts: Counter[tuple[str, int]] = Counter()
    times: Counter[tuple[str, int]] = Counter()
    while any(job.poll() is None for job in jobs):
        for number, job in enumerate(jobs):
            for address in listening(job) if job.poll() is None else ():
                if times[address] < 2:
                    times[address] += 1
                    counts[address] += attacks(number, address)
    return counts


def test_other_users_of_this_host_cannot_disturb_a_job(
    tmp_path: Path, attacker: Path, survived: Callable[[str, int], None]
) -> None:
    words = command("train", "digits", *LONG, "--procs", 2, "--name")
    options = {"cwd": tmp_path, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    quiet = subprocess.run([*words, "quiet"], **options, timeout=HANG)
    assert quiet.returncode == 0, quiet.stderr
    job = subprocess.Popen([*words, "attacked"], **options)

    def attacks(_job: int, address: tuple[str, int]) -> int:
        assert address[0] in ("127.0.0.1", "::1"), f"listens at {address}"
        return attack(address, attacker)

    attacked = attack_each([job], attacks)
    assert job.returncode == 0, job.stderr.read()
    assert attacked, "gloo opened no ports"
    assert losses(tmp_path / "runs" / "attacked") == losses(tmp_path / "runs" / "quiet")
    survived("hostile connections to the ports of a job on one node", sum(attacked.values()))


def test_unauthenticated_clients_cannot_disturb_the_rendezvous(
    attacker: Path, survived: Callable[[str, int], None]
) -> None:
    server = Server("127.0.0.1", 0, TOKEN.encode())
    server.start()
    member = Channel("127.0.0.1", server.port, TOKEN.encode())
    assert member.call({"do": "set", "key": "1/a", "value": "Yg=="}, HANG) == {"value": None}
    count = sum(attack(("127.0.0.1", server.port), attacker) for _ in range(3))
    assert member.call({"do": "get", "key": "1/a", "timeout": 1}, HANG) == {"value": "Yg=="}
    late = Channel("127.0.0.1", server.port, TOKEN.encode())
    assert late.call({"do": "count"}, HANG) == {"value": 1}
    survived("hostile connections to a rendezvous", count)


@pytest.mark.skipif(bool(networks.missing()), reason=networks.missing() or "-")
def test_other_hosts_cannot_disturb_a_multi_node_job(
    tmp_path: Path, attacker: Path, survived: Callable[[str, int], None]
) -> None:
    """Two nodes that share a token, and a third host on their network without it."""
    with network() as net:
        hosts = [_add_host(net, name, number) for number, name in enumerate(("one", "two", "other"), 1)]
        rendezvous = net.address(1), 29400
        words = command(
            "train", "digits", *LONG, "--nodes", 2, "--rendezvous", "{}:{}".format(*rendezvous), "--node-rank"
        )
        nodes = []
        for rank in range(2):
            (folder := tmp_path / str(rank)).mkdir()
            prefix = ["ip", "netns", "exec", hosts[rank]]
            options = {"cwd": folder, "env": environment(), "stderr": subprocess.PIPE, "text": True}
            nodes.append(subprocess.Popen([*prefix, *words, str(rank)], **options))

        def attacks(rank: int, address: tuple[str, int]) -> int:
            assert address[0] == net.address(rank + 1), f"node {rank} listens at {address}"
            return attack(address, attacker, ["ip", "netns", "exec", hosts[2]])

        attacked = attack_each(nodes, attacks)
        assert [node.returncode for node in nodes] == [0, 0], [node.stderr.read() for node in nodes]
    assert rendezvous in attacked
    survived("hostile connections to the ports of two nodes from a third host", sum(attacked.values()))


def _add_host(net: networks.Network, name: str, number: int) -> str:
    """Add a namespace with one interface, connected to a bridge in the first namespace. Returns its name."""
    space = net.add_space(name)
    if number == 1:
        networks.run(f"ip -n {net.mark} link add br0 type bridge")
        networks.run(f"ip -n {net.mark} link set br0 up")
    networks.run(f"ip -n {net.mark} link add {name} type veth peer name eth0 netns {space}")
    networks.run(f"ip -n {net.mark} link set {name} master br0 up")
    networks.run(f"ip -n {space} address add {net.address(number)}/24 dev eth0")
    networks.run(f"ip -n {space} link set eth0 up")
    return space
