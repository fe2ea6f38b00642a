"""Whether this machine is fit for training: processor, memory, folders, limits, other work, network."""

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from paceline.launch.doctor import LEAST_DISK, LEAST_SHARED
from paceline.launch.host_facts import facts
from paceline.launch.installation import Finding, all_reduce, ask_installation, extras, gpus, packages, precision
from paceline.system.files import size_text
from paceline.system.host import cores, cpu_name

_NO_ROOM, _LEAST_MEMORY, _LEAST_FILES = 1e9, 2e9, 1024
_BUSY = 0.25  # of the cores, by others
_LOOK = 0.5  # seconds to watch other processes
_CGROUP = Path("/sys/fs/cgroup")


def check(runs: Path, quick: bool) -> Iterator[Finding]:
    """Everything, as soon as it is known."""
    machine = facts()
    yield Finding("ok", "paceline", f"{machine['paceline']}, {Path(__file__).parents[1]}")
    yield Finding("ok", "Python", f"{platform.python_version()}, {platform.platform()}")
    told = ask_installation()
    yield from packages(told)
    yield from processor(cores(), os.cpu_count() or 1, cpu_quota(_CGROUP / "cpu.max"))
    yield from precision(told)
    yield from memory(psutil.virtual_memory().available, machine["memory_bytes"])
    yield from gpus(told, machine)
    yield from folders(runs, machine["shared_memory_bytes"], len(machine["gpus"]))
    yield from open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from other_work(busy_processes(_LOOK), cores())
    yield from network()
    if not quick:
        yield from all_reduce(told)
    yield from extras()


def processor(available: int, there: int, quota: float | None) -> Iterator[Finding]:
    count = f"{available} cores" if available == there else f"{available} of {there} cores (affinity)"
    if quota is not None and quota < available:
        cure = f"give it more, or train with --threads {max(1, int(quota))}"
        yield Finding("note", "processor", f"{cpu_name()}, {count}, but the container may only use {quota:g}; {cure}")
    else:
        yield Finding("ok", "processor", f"{cpu_name()}, {count}")


def cpu_quota(path: Path) -> float | None:
    """Cores that the container's limit lets run at once; None: there is no limit."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def memory(available: int, total: int) -> Iterator[Finding]:
    text = f"{size_text(available)} of {size_text(total)} available"
    if available < _LEAST_MEMORY:
        yield Finding("note", "memory", f"{text}; end other programs, or train with a smaller batch")
    else:
        yield Finding("ok", "memory", text)


def folders(runs: Path, shared: int | None, num_gpus: int) -> Iterator[Finding]:
    yield from folder("runs folder", runs, LEAST_DISK, "choose another one with --runs DIR")
    yield from folder("temporary", Path(tempfile.gettempdir()), _NO_ROOM, "set TMPDIR to another folder")
    cure = "in a container use --shm-size or --ipc=host"
    if shared is None:
        yield Finding("note", "/dev/shm", f"not there: CPU ranks synchronize through the network, slower; {cure}")
    elif shared < LEAST_SHARED:
        slow = "NCCL may fail" if num_gpus > 1 else "CPU ranks of large models synchronize through the network, slower"
        level = "problem" if num_gpus > 1 else "note"
        yield Finding(level, "/dev/shm", f"{size_text(shared)} free: {slow}; {cure}")
    else:
        yield Finding("ok", "/dev/shm", f"{size_text(shared)} free")


def folder(subject: str, path: Path, enough: float, cure: str) -> Iterator[Finding]:
    """Whether files can be written there, and how many."""
    there = next(own for own in (path.resolve(), *path.resolve().parents) if own.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".paceline-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        yield Finding("problem", subject, f"{path} cannot be written to ({error.strerror}); {cure}")
        return
    free = shutil.disk_usage(there).free
    text = f"{path}, {size_text(free)} free"
    if free < min(enough, _NO_ROOM):
        yield Finding("problem", subject, f"{text}; make room, or {cure}")
    elif free < enough:
        yield Finding("note", subject, f"{text}: little for checkpoints and data; make room, or {cure}")
    else:
        yield Finding("ok", subject, text)


def open_files(limit: int) -> Iterator[Finding]:
    if 0 <= limit < _LEAST_FILES:
        yield Finding("problem", "open files", f"at most {limit}; run: ulimit -n {4 * _LEAST_FILES}")
    else:
        yield Finding("ok", "open files", "no limit" if limit < 0 else f"at most {limit:,}")


def busy_processes(seconds: float) -> list[tuple[float, int, str]]:
    """Cores that each process of others keeps busy, its number and name, the busiest first."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    processes = [process for process in psutil.process_iter() if process.pid not in own]
    for process in processes:
        _share(process)  # the first answer is always 0
    time.sleep(seconds)
    found = [(share / 100, process.pid, name) for process in processes for share, name in [_share(process)]]
    return sorted(found, reverse=True)


def _share(process: psutil.Process) -> tuple[float, str]:
    try:
        return process.cpu_percent(), process.name()
    except psutil.Error:
        return 0.0, ""


def other_work(busy: list[tuple[float, int, str]], available: int) -> Iterator[Finding]:
    used = sum(share for share, _, _ in busy)
    if used < _BUSY * available:
        yield Finding("ok", "other work", f"other processes keep {used:.1f} of {available} cores busy")
        return
    names = ", ".join(f"{name} ({number}, {share:.1f} cores)" for share, number, name in busy[:3] if share > 0.05)
    text = f"other processes keep {used:.1f} of {available} cores busy: {names}; training will be slower"
    yield Finding("note", "other work", text)


def network() -> Iterator[Finding]:
    """Ranks of one machine talk over the loopback interface; machines find each other by name."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        yield Finding("ok", "loopback", "127.0.0.1 can be reached")
    except OSError as error:
        yield Finding("problem", "loopback", f"127.0.0.1 cannot be reached ({error}); run: ip link set lo up")
    name = socket.gethostname()
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
        yield Finding("ok", "host name", f"{name}, {', '.join(sorted(addresses))}")
    except OSError:
        cure = f"add `ADDRESS {name}` to /etc/hosts, with an address that the other nodes can reach"
        yield Finding("note", "host name", f"{name} does not resolve, which multi-node training needs; {cure}")


def summarized(findings: list[Finding]) -> tuple[str, int]:
    """The last line, and the exit status."""
    count = sum(finding.level == "problem" for finding in findings)
    if not count:
        return "no problems found", 0
    return f"{count} problem{'s' * (count > 1)} found", 1
