"""Network namespaces with unique names and addresses. Needs root and Debian's iproute2."""

import os
import random
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from ipaddress import IPv4Interface, IPv4Network
from itertools import chain
from pathlib import Path

import psutil

os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # not in every user's PATH
_NEEDED = {"ip": "iproute2", "unshare": "util-linux", "setpriv": "util-linux", "mount": "mount"}
# run in new namespaces, so that nothing stays behind
_TRIAL = "mount -t tmpfs none /tmp && ip link add name br0 type bridge && ip link add name a type veth peer name b"
LIMIT = 300.0
"""Seconds after which something hangs."""
_PRIVATE = [IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")]
_NAMED = Path("/run/netns")


@cache
def missing(**more: str) -> str:
    """Return why namespaces cannot be created here, or which Debian packages are missing; otherwise empty."""
    if os.geteuid():
        return "needs root to create network namespaces"
    if lacking := sorted({package for name, package in (_NEEDED | more).items() if not shutil.which(name)}):
        return f"needs {', '.join(lacking)}: apt-get install {' '.join(lacking)}"
    words = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "sh", "-c", _TRIAL]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"needs permission to create namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def run(command: str) -> None:
    """Run a command that must succeed."""
    try:
        subprocess.run(shlex.split(command), check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise


@dataclass
class Network:
    """A subnet and the namespaces on it."""

    mark: str
    """Unique, and short enough for an interface name."""
    subnet: IPv4Network
    spaces: list[str] = field(default_factory=list)

    def address(self, number: int) -> str:
        """Return the address with this number in the subnet."""
        return str(self.subnet[number])

    def add_space(self, name: str) -> str:
        """Add a namespace in which only the loopback interface is up. Returns its name."""
        space = f"{self.mark}-{name}"
        run(f"ip netns add {space}")
        self.spaces.append(space)
        run(f"ip -n {space} link set lo up")
        return space

    def remove(self) -> None:
        """Remove all namespaces and their processes."""
        link = Path("/sys/class/net") / self.mark
        until(lambda: not link.exists(), f"interface {self.mark}", partial(_delete, "link", self.mark))
        for space in reversed(self.spaces):
            _remove_space(space)


@contextmanager
def network() -> Iterator[Network]:
    """Yield a network with a unique mark, and remove it at the end.

    The namespace `spaces[0]`, named after the mark, claims it: only one process can create it. Networks that a killed
    process left behind keep their names and addresses, and are skipped.
    """
    made = _claimed()
    try:
        run(f"ip -n {made.mark} link set lo up")
        yield made
    finally:
        made.remove()


def _claimed() -> Network:
    entries = chain.from_iterable(psutil.net_if_addrs().values())
    taken = [
        IPv4Interface(f"{own.address}/{own.netmask or 32}").network for own in entries if own.family == socket.AF_INET
    ]
    subnets = list(chain.from_iterable(private.subnets(new_prefix=24) for private in _PRIVATE))
    for number in random.sample(range(len(subnets)), len(subnets)):
        made = Network(f"pl{number:05x}", subnets[number])
        if not any(made.subnet.overlaps(own) for own in taken) and _is_free(made.mark):
            made.spaces.append(made.mark)
            return made
    raise RuntimeError("all private subnets are in use on this machine")


def _is_free(mark: str) -> bool:
    try:
        run(f"ip netns add {mark}")
        return True
    except subprocess.CalledProcessError as error:
        if "File exists" in error.stderr:
            return False
        raise


def until(happened: Callable[[], bool], what: str, action: Callable[[], object] = lambda: None) -> None:
    """Repeat the action until a condition holds; a timeout is an error."""
    deadline = time.monotonic() + LIMIT
    while not happened():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timeout after {LIMIT:.0f} s: {what}")
        action()
        if not happened():
            time.sleep(0.02)


def _remove_space(space: str) -> None:
    def pids() -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
        return [int(word) for word in listed.stdout.split()]

    def kill_all() -> None:
        for pid in pids():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    until(lambda: not pids(), f"processes in namespace {space}", kill_all)
    until(lambda: not (_NAMED / space).exists(), f"namespace {space}", partial(_delete, "netns", space))


def _delete(kind: str, name: str) -> None:
    with suppress(subprocess.CalledProcessError):  # it may be busy for a moment
        run(f"ip {kind} delete {name}")


def start(
    space: str, script: str, log: Path, options: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Run a shell script as the first process of a new PID namespace, which ends with this process."""
    words = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", space]
    words += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *options, "sh", "-ec", script]
    with log.open("ab") as output:
        return subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=variables)


def first_process(process: "subprocess.Popen[bytes]") -> psutil.Process:
    """Return the first process of the PID namespace that `start` created."""
    return psutil.Process(process.pid).children()[0]


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill all processes of a PID namespace: the kernel ends them with the first one, and reaps it last."""

    def attempt() -> None:
        with suppress(psutil.NoSuchProcess):
            for own in psutil.Process(process.pid).children() or [psutil.Process(process.pid)]:
                own.kill()

    until(lambda: process.poll() is not None, f"process {process.pid} and its namespace", attempt)
