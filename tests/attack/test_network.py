"""Strangers at the ports of a job: other users of the machine, and other machines."""

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
    """Addresses at which the processes of a job listen; read from the job's own network namespace."""
    found = set()
    with suppress(OSError, psutil.Error):
        own = psutil.Process(job.pid)
        for process in [own, *own.children(recursive=True)]:
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


def attack(place: tuple[str, int], folder: Path, inside: Sequence[str] = ()) -> int:
    """As another user, from within a namespace if one is given; how many attacks were made."""
    canary = folder / "canary"
    other = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
    python = shutil.which("python3", path="/usr/bin") or sys.executable  # one that the other user can read
    words = [*inside, *other, python, folder / "client.py", *place, canary]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    count, *answers = done.stdout.splitlines()
    for answer in map(bytes.fromhex, answers):  # nothing but the greeting and random bytes, more for a wrong token
        assert answer.startswith(GREETING)
        assert len(answer) - len(GREETING) in (NONCE, NONCE + PROOF)
    assert len({answer[-NONCE:] for answer in answers}) == len(answers)
    assert not canary.exists()
    return int(count)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(run).records() if "lr" in record]


@pytest.fixture
def stranger() -> Iterator[Path]:
    """A folder that another user can write to, with the client in it."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(CLIENT, folder / "client.py")
        folder.chmod(0o777)
        (folder / "client.py").chmod(0o644)
        yield folder


def attack_each(jobs: Sequence[Job], attacks: Callable[[int, tuple[str, int]], int]) -> dict[tuple[str, int], int]:
    """Attack every port that the jobs open, from the first moment on, twice each, until they end; counts of each."""
    found: Counter[tuple[str, int]] = Counter()
    times: Counter[tuple[str, int]] = Counter()
    while any(job.poll() is None for job in jobs):
        for number, job in enumerate(jobs):
            for place in listening(job) if job.poll() is None else ():
                if times[place] < 2:
                    times[place] += 1
                    found[place] += attacks(number, place)
    return found


def test_strangers_on_this_machine(tmp_path: Path, stranger: Path, survived: Callable[[str, int], None]) -> None:
    words = command("train", "digits", *LONG, "--procs", 2, "--name")
    options = {"cwd": tmp_path, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    quiet = subprocess.run([*words, "quiet"], **options, timeout=HANG)
    assert quiet.returncode == 0, quiet.stderr
    job = subprocess.Popen([*words, "attacked"], **options)

    def attacks(_job: int, place: tuple[str, int]) -> int:
        assert place[0] in ("127.0.0.1", "::1"), f"listens at {place}"
        return attack(place, stranger)

    attacked = attack_each([job], attacks)
    assert job.returncode == 0, job.stderr.read()
    assert attacked, "gloo's ports were expected"
    assert losses(tmp_path / "runs" / "attacked") == losses(tmp_path / "runs" / "quiet")
    survived("hostile connections to the ports of a job on one machine", sum(attacked.values()))


def test_strangers_at_the_rendezvous(stranger: Path, survived: Callable[[str, int], None]) -> None:
    server = Server("127.0.0.1", 0, TOKEN.encode())
    server.start()
    member = Channel("127.0.0.1", server.port, TOKEN.encode())
    assert member.call({"do": "set", "key": "1/a", "value": "Yg=="}, HANG) == {"value": None}
    count = sum(attack(("127.0.0.1", server.port), stranger) for _ in range(3))
    assert member.call({"do": "get", "key": "1/a", "timeout": 1}, HANG) == {"value": "Yg=="}
    late = Channel("127.0.0.1", server.port, TOKEN.encode())
    assert late.call({"do": "count"}, HANG) == {"value": 1}
    survived("hostile connections to a rendezvous", count)


@pytest.mark.skipif(bool(networks.missing()), reason=networks.missing() or "-")
def test_strangers_of_another_machine(tmp_path: Path, stranger: Path, survived: Callable[[str, int], None]) -> None:
    """Two nodes that share a token, and a third machine in their network that does not know it."""
    with network() as net:
        machines = [_machine(net, name, number) for number, name in enumerate(("one", "two", "other"), 1)]
        rendezvous = net.address(1), 29400
        words = command(
            "train", "digits", *LONG, "--nodes", 2, "--rendezvous", "{}:{}".format(*rendezvous), "--node-rank"
        )
        nodes = []
        for rank in range(2):
            (folder := tmp_path / str(rank)).mkdir()
            inside = ["ip", "netns", "exec", machines[rank]]
            options = {"cwd": folder, "env": environment(), "stderr": subprocess.PIPE, "text": True}
            nodes.append(subprocess.Popen([*inside, *words, str(rank)], **options))

        def attacks(rank: int, place: tuple[str, int]) -> int:
            assert place[0] == net.address(rank + 1), f"node {rank} listens at {place}"
            return attack(place, stranger, ["ip", "netns", "exec", machines[2]])

        attacked = attack_each(nodes, attacks)
        assert [node.returncode for node in nodes] == [0, 0], [node.stderr.read() for node in nodes]
    assert rendezvous in attacked
    survived("hostile connections to the ports of two nodes from a third machine", sum(attacked.values()))


def _machine(net: networks.Network, name: str, number: int) -> str:
    """A namespace with one interface, joined to the others by a bridge in the first namespace of the network."""
    space = net.add_space(name)
    if number == 1:
        networks.run(f"ip -n {net.mark} link add br0 type bridge")
        networks.run(f"ip -n {net.mark} link set br0 up")
    networks.run(f"ip -n {net.mark} link add {name} type veth peer name eth0 netns {space}")
    networks.run(f"ip -n {net.mark} link set {name} master br0 up")
    networks.run(f"ip -n {space} address add {net.address(number)}/24 dev eth0")
    networks.run(f"ip -n {space} link set eth0 up")
    return space
