"""Machines of a test's own: network, mount, host name and process namespaces with a real sshd in each. As root."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

NEEDED = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "unshare": "util-linux"}
_NETWORK = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"  # two workers may test at once


def missing() -> str:
    """Why such machines cannot be made here, in words that help."""
    if os.geteuid():
        return "needs root, to make network namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    lacking = [package for name, package in NEEDED.items() if not shutil.which(name, path=path)]
    return f"needs {', '.join(lacking)}: apt-get install {' '.join(lacking)}" if lacking else ""


@dataclass
class Machine:
    name: str
    address: str
    root: Path
    """Its user's home."""
    process: subprocess.Popen[bytes]

    def processes(self) -> list[psutil.Process]:
        """All that run there, but for sshd and what carries it."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.name() not in ("sshd", "unshare", "sh", "sshd-session"):
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        return [process for process in self.processes() if process.name().startswith("paceline-rank-")]

    def lose(self) -> None:
        """As if the power were cut: the first process of its process namespace dies, and all others with it."""
        for child in psutil.Process(self.process.pid).children():
            child.kill()
        self.process.kill()
        self.process.wait()


class Cluster:
    def __init__(self, folder: Path, names: Sequence[str]):
        self.folder, self.names = folder, list(names)
        self._mark = f"pl{os.getpid() % 10000}"
        self.machines: dict[str, Machine] = {}
        self.config = folder / "ssh_config"

    @property
    def gateway(self) -> str:
        """This machine, as the others see it."""
        return f"{_NETWORK}.254"

    def set_up(self) -> None:
        self._run(f"ip link add {self._mark} type bridge")
        self._run(f"ip address add {_NETWORK}.254/24 dev {self._mark}")
        self._run(f"ip link set {self._mark} up")
        self._run(f"ssh-keygen -q -t ed25519 -N '' -f {self.folder}/key")
        lines = []
        for number, name in enumerate(self.names, start=1):
            self._make_network(name, number)
            self._run(f"ssh-keygen -q -t ed25519 -N '' -f {self.folder}/{name}.host_key")
            key = " ".join((self.folder / f"{name}.host_key.pub").read_text().split()[:2])
            with (self.folder / "known_hosts").open("a") as known:
                known.write(f"{_NETWORK}.{number} {key}\n")
            lines += [f"Host {name}", f"  HostName {_NETWORK}.{number}"]
            self.start(name)
        lines += ["Host *", "  User root", f"  IdentityFile {self.folder}/key", "  IdentitiesOnly yes"]
        lines += [f"  UserKnownHostsFile {self.folder}/known_hosts", "  StrictHostKeyChecking yes"]
        self.config.write_text("\n".join(lines) + "\n")

    def _make_network(self, name: str, number: int) -> None:
        space = self.space(name)
        self._run(f"ip netns add {space}")
        self._run(f"ip link add {space} type veth peer name eth0 netns {space}")
        self._run(f"ip link set {space} master {self._mark} up")
        self._run(f"ip -n {space} address add {_NETWORK}.{number}/24 dev eth0")
        self._run(f"ip -n {space} link set eth0 up")
        self._run(f"ip -n {space} link set lo up")

    def space(self, name: str) -> str:
        return f"{self._mark}{name}"

    def start(self, name: str) -> Machine:
        """Switch the machine on; its disk is as it was."""
        root = self.folder / f"{name}.root"
        root.mkdir(parents=True, exist_ok=True)
        config = self.folder / f"{name}.sshd_config"
        config.write_text(
            f"HostKey {self.folder}/{name}.host_key\nPidFile none\nUsePAM no\nPermitRootLogin prohibit-password\n"
            f"PasswordAuthentication no\nMaxStartups 100\nMaxSessions 100\nSetEnv HOME={root} PACELINE_THREADS=1\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\nStrictModes no\n"
        )
        inside = f"hostname {name}; mkdir -p /run/sshd; exec /usr/sbin/sshd -D -e -f {config}"
        command = ["ip", "netns", "exec", self.space(name), "unshare", "--mount", "--uts", "--pid", "--fork"]
        command += ["--kill-child", "--mount-proc", "sh", "-c", inside]
        with (self.folder / f"{name}.sshd.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        number = self.names.index(name) + 1
        self.machines[name] = Machine(name, f"{_NETWORK}.{number}", root, process)
        self._wait_for_sshd(self.machines[name])
        return self.machines[name]

    def _wait_for_sshd(self, machine: Machine) -> None:
        import socket

        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection((machine.address, 22), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.folder / f"{machine.name}.sshd.log").read_text()
                time.sleep(0.05)

    def cut(self, name: str) -> None:
        """Its cable is pulled: packets vanish, nothing is said."""
        self._run(f"ip link set {self.space(name)} down")

    def plug_in(self, name: str) -> None:
        self._run(f"ip link set {self.space(name)} up")

    def tear_down(self) -> None:
        for machine in self.machines.values():
            with suppress(psutil.NoSuchProcess):
                machine.lose()
        for name in self.names:
            self._run(f"ip netns delete {self.space(name)}", must=False)
        self._run(f"ip link delete {self._mark}", must=False)

    @staticmethod
    def _run(command: str, must: bool = True) -> None:
        import shlex

        subprocess.run(shlex.split(command), check=must, capture_output=True)


@contextmanager
def cluster_of(folder: Path, *names: str) -> Iterator[Cluster]:
    made = Cluster(folder, names)
    try:
        made.set_up()
        yield made
    finally:
        made.tear_down()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
