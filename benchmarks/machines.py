"""Simulated hosts: network, mount, UTS and PID namespaces with a real sshd in each. Needs root."""

import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import networks
import psutil
from networks import Network, network, run, until

_NODES = ("null", "zero", "full", "random", "urandom")

# The hosts do not see the disks and GPUs of this machine, and /dev/shm has a fixed size.
# sshd refuses locked accounts, which root's is on some systems.
_INSIDE = """hostname {name}
mount -t tmpfs -o mode=755 none {device_folder}
for node in {nodes}; do touch {device_folder}/$node; mount --bind /dev/$node {device_folder}/$node; done
mkdir -p {device_folder}/shm {device_folder}/disk/by-id
mount -t tmpfs -o size=2g none {device_folder}/shm
ln -s /proc/self/fd {device_folder}/fd
mount --move {device_folder} /dev
[ ! -e /etc/shadow ] || mount --bind {shadow} /etc/shadow
mkdir -p /run/sshd
exec "$(command -v sshd)" -D -e -f {config}"""


def missing() -> str:
    """Return why hosts cannot be simulated here and how to fix it, or an empty string."""
    return networks.missing(sshd="openssh-server", ssh="openssh-client")


@dataclass
class Machine:
    """A simulated host."""

    name: str
    address: str
    root: Path
    """The home folder of its user."""
    process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        """Process ID of its first process."""
        return networks.first_process(self.process).pid

    def processes(self, named: str = "") -> list[psutil.Process]:
        """Return its processes except sshd and its parents, optionally only those whose names start with `named`."""
        found: list[psutil.Process] = []
        if self.process.poll() is not None:
            return found
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                name = process.name()
                wanted = name.startswith(named) and name not in ("sshd", "unshare", "sh", "sshd-session", "sshd-auth")
                if wanted and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks that run on this host."""
        return self.processes("paceline-rank-")

    def clear(self) -> None:
        """Kill all processes that were started over ssh."""

        def others() -> list[psutil.Process]:
            running = self.process.poll() is None
            return networks.first_process(self.process).children(recursive=True) if running else []

        def end() -> None:
            for process in others():
                with suppress(psutil.NoSuchProcess):
                    process.kill()

        until(lambda: not others(), f"processes of {self.name}", end)

    def lose(self) -> None:
        """Simulate a power cut: killing the first process of the PID namespace kills all others."""
        networks.kill(self.process)


class Cluster:
    """Simulated hosts on one network."""

    def __init__(self, folder: Path, names: Sequence[str], variables: Mapping[str, str], net: Network):
        self.folder, self.names, self._net = folder, list(names), net
        self._variables = {"PACELINE_THREADS": "1", **variables}
        self.machines: dict[str, Machine] = {}
        self.config = folder / "ssh_config"

    @property
    def gateway(self) -> str:
        """Address of this machine on their network."""
        return self._net.address(254)

    def set_up(self) -> None:
        """Connect the hosts by a bridge in its own namespace, where the firewall of this machine does not apply."""
        switch, outside = self._net.mark, self._net.mark
        run(f"ip -n {switch} link add br0 type bridge")
        run(f"ip -n {switch} link set br0 up")
        run(f"ip link add {outside} type veth peer name outside netns {switch}")
        run(f"ip -n {switch} link set outside master br0 up")
        run(f"ip address add {self.gateway}/24 dev {outside}")
        run(f"ip link set {outside} up")
        run(f"ssh-keygen -q -t ed25519 -N '' -f {self.folder}/key")
        (self.folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        lines = []
        for number, name in enumerate(self.names, start=1):
            address = self._net.address(number)
            space = self._net.add_space(name)
            run(f"ip -n {switch} link add {name} type veth peer name eth0 netns {space}")
            run(f"ip -n {switch} link set {name} master br0 up")
            run(f"ip -n {space} address add {address}/24 dev eth0")
            run(f"ip -n {space} link set eth0 up")
            run(f"ssh-keygen -q -t ed25519 -N '' -f {self.folder}/{name}.host_key")
            key = " ".join((self.folder / f"{name}.host_key.pub").read_text().split()[:2])
            with (self.folder / "known_hosts").open("a") as known:
                known.write(f"{address} {key}\n")
            lines += [f"Host {name}", f"  HostName {address}"]
            self.start(name)
        lines += ["Host *", "  User root", f"  IdentityFile {self.folder}/key", "  IdentitiesOnly yes"]
        lines += [f"  UserKnownHostsFile {self.folder}/known_hosts", "  StrictHostKeyChecking yes"]
        self.config.write_text("\n".join(lines) + "\n")

    def space(self, name: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._net.mark}-{name}"

    def start(self, name: str) -> Machine:
        """Boot a host; its files persist."""
        root, device_folder = self.folder / f"{name}.root", self.folder / f"{name}.dev"
        for folder in (root, device_folder):
            folder.mkdir(exist_ok=True)
        config, log = self.folder / f"{name}.sshd_config", self.folder / f"{name}.sshd.log"
        variables = " ".join(f"{key}={value}" for key, value in {"HOME": root, **self._variables}.items())
        config.write_text(
            f"HostKey {self.folder}/{name}.host_key\nPidFile none\nUsePAM no\nPermitRootLogin prohibit-password\n"
            f"PasswordAuthentication no\nMaxStartups 100\nMaxSessions 100\nPermitUserRC no\nSetEnv {variables}\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\nStrictModes no\n"
        )
        inside = _INSIDE.format(
            name=name, device_folder=device_folder, nodes=" ".join(_NODES), shadow=self.folder / "shadow", config=config
        )
        address = self._net.address(self.names.index(name) + 1)
        process = networks.start(self.space(name), inside, log, ["--uts"])
        self.machines[name] = Machine(name, address, root, process)

        def listens() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"{name} has ended: {log.read_text()}")
            with suppress(OSError):
                socket.create_connection((address, 22), 5).close()
                return True
            return False

        until(listens, f"sshd of {name} does not respond")
        return self.machines[name]

    def cut(self, name: str) -> None:
        """Pull the cable of a host: packets are lost without a reset."""
        run(f"ip -n {self._net.mark} link set {name} down")

    def plug_in(self, name: str) -> None:
        """Reconnect a host."""
        run(f"ip -n {self._net.mark} link set {name} up")


@contextmanager
def cluster_of(folder: Path, *names: str, variables: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Yield hosts that share the files of this machine; processes started over ssh get the variables."""
    with network() as net:
        made = Cluster(folder, names, variables or {}, net)
        try:
            made.set_up()
            yield made
        finally:
            for machine in made.machines.values():
                machine.lose()
