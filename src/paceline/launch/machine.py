"""Check this machine: installation, CPU, memory, folders, limits, other processes, network."""

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from paceline.launch.doctor import MIN_DISK, MIN_SHARED_MEMORY
from paceline.launch.host_facts import facts
from paceline.launch.installation import Finding, all_reduce, extras, gpus, import_all, packages, precision
from paceline.launch.rdma import rdma_problems
from paceline.system.files import size_text
from paceline.system.host import cores, cpu_name

_MIN_FREE, _MIN_MEMORY, _MIN_OPEN_FILES = 1e9, 2e9, 1024
_BUSY = 0.25  # fraction of the cores that other processes use
_SAMPLE_SECONDS = 0.5  # to measure other processes
_CGROUP = Path("/sys/fs/cgroup")


def check(runs: Path, quick: bool) -> Iterator[Finding]:
    """Yield the result of every check as soon as it is known."""
    machine = facts()
    yield Finding("ok", "paceline", f"{machine['paceline']}, {Path(__file__).parents[1]}")
    yield Finding("ok", "Python", f"{platform.python_version()}, {platform.platform()}")
    parts = import_all()
    yield from packages(parts)
    yield from processor(cores(), os.cpu_count() or 1, cpu_quota(_CGROUP / "cpu.max"))
    yield from precision(parts)
    yield from memory(psutil.virtual_memory().available, machine["memory_bytes"])
    yield from gpus(parts, machine)
    yield from folders(runs, machine["shared_memory_bytes"], len(machine["gpus"]))
    yield from open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from other_processes(busy_processes(_SAMPLE_SECONDS), cores())
    yield from network()
    yield from rdma(machine["rdma"])
    if not quick:
        yield from all_reduce(parts)
    yield from extras()


def processor(available: int, present: int, quota: float | None) -> Iterator[Finding]:
    count = f"{available} cores" if available == present else f"{available} of {present} cores (affinity)"
    if quota is not None and quota < available:
        fix = f"raise the limit, or train with --threads {max(1, int(quota))}"
        text = f"{cpu_name()}, {count}, but the container is limited to {quota:g} cores; {fix}"
        yield Finding("note", "processor", text)
    else:
        yield Finding("ok", "processor", f"{cpu_name()}, {count}")


def cpu_quota(path: Path) -> float | None:
    """Return the CPU limit of the container in cores, or None if there is none."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def memory(available: int, total: int) -> Iterator[Finding]:
    text = f"{size_text(available)} of {size_text(total)} available"
    if available < _MIN_MEMORY:
        yield Finding("note", "memory", f"{text}; close other programs, or train with a smaller batch")
    else:
        yield Finding("ok", "memory", text)


def folders(runs: Path, shared: int | None, num_gpus: int) -> Iterator[Finding]:
    yield from folder("runs folder", runs, MIN_DISK, "choose another folder with --runs DIR")
    yield from folder("temporary", Path(tempfile.gettempdir()), _MIN_FREE, "set TMPDIR to another folder")
    fix = "in a container use --shm-size or --ipc=host"
    if shared is None:
        yield Finding("note", "/dev/shm", f"missing: CPU ranks synchronize over the network, which is slower; {fix}")
    elif shared < MIN_SHARED_MEMORY:
        effect = "NCCL may fail" if num_gpus > 1 else "CPU ranks of large models synchronize over the network"
        level = "problem" if num_gpus > 1 else "note"
        yield Finding(level, "/dev/shm", f"{size_text(shared)} free: {effect}; {fix}")
    else:
        yield Finding("ok", "/dev/shm", f"{size_text(shared)} free")


def folder(subject: str, path: Path, enough: float, fix: str) -> Iterator[Finding]:
    """Check that a folder, or the nearest one above it, is writable and has enough space."""
    existing = next(one for one in (path.resolve(), *path.resolve().parents) if one.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".paceline-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        yield Finding("problem", subject, f"{path} is not writable ({error.strerror}); {fix}")
        return
    free = shutil.disk_usage(existing).free
    text = f"{path}, {size_text(free)} free"
    if free < min(enough, _MIN_FREE):
        yield Finding("problem", subject, f"{text}; free some space, or {fix}")
    elif free < enough:
        yield Finding("note", subject, f"{text}: little for checkpoints and data; free some space, or {fix}")
    else:
        yield Finding("ok", subject, text)


def open_files(limit: int) -> Iterator[Finding]:
    if 0 <= limit < _MIN_OPEN_FILES:
        yield Finding("problem", "open files", f"at most {limit}; run: ulimit -n {4 * _MIN_OPEN_FILES}")
    else:
        yield Finding("ok", "open files", "no limit" if limit < 0 else f"at most {limit:,}")


def busy_processes(seconds: float) -> list[tuple[float, int, str]]:
    """Return the cores that each other process uses, its id and its name, busiest first."""
    excluded = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    processes = [process for process in psutil.process_iter() if process.pid not in excluded]
    for process in processes:
        _usage(process)  # the first measurement is always 0
    time.sleep(seconds)
    usages = [(percent / 100, process.pid, name) for process in processes for percent, name in [_usage(process)]]
    return sorted(usages, reverse=True)


def _usage(process: psutil.Process) -> tuple[float, str]:
    try:
        return process.cpu_percent(), process.name()
    except psutil.Error:
        return 0.0, ""


def other_processes(busy: list[tuple[float, int, str]], available: int) -> Iterator[Finding]:
    used = sum(usage for usage, _, _ in busy)
    if used < _BUSY * available:
        yield Finding("ok", "other work", f"other processes use {used:.1f} of {available} cores")
        return
    names = ", ".join(f"{name} ({pid}, {usage:.1f} cores)" for usage, pid, name in busy[:3] if usage > 0.05)
    text = f"other processes use {used:.1f} of {available} cores: {names}; training will be slower"
    yield Finding("note", "other work", text)


def network() -> Iterator[Finding]:
    """Check the loopback interface, which local ranks use, and that the host name resolves for other nodes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        yield Finding("ok", "loopback", "127.0.0.1 is reachable")
    except OSError as error:
        yield Finding("problem", "loopback", f"127.0.0.1 is unreachable ({error}); run: ip link set lo up")
    name = socket.gethostname()
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
        yield Finding("ok", "host name", f"{name}, {', '.join(sorted(addresses))}")
    except OSError:
        fix = f"add `ADDRESS {name}` to /etc/hosts, with an address that the other nodes can reach"
        yield Finding("note", "host name", f"{name} does not resolve, which multi-node training needs; {fix}")


def rdma(found: Mapping[str, Any]) -> Iterator[Finding]:
    """Report the RDMA network, if there is one, and what keeps NCCL from using it."""
    for problem in rdma_problems(found):
        yield Finding("problem", "RDMA", problem.message)
    if found["verbs"] and not list(rdma_problems(found)):
        count = found["efa_interfaces"]
        efa = f"{count} EFA interface{'s' * (count > 1)}, with NCCL's EFA plugin"
        yield Finding("ok", "RDMA", efa if count else "InfiniBand")


def summarized(findings: list[Finding]) -> tuple[str, int]:
    """Return the last line of the output, and the exit status."""
    count = sum(finding.level == "problem" for finding in findings)
    if not count:
        return "no problems found", 0
    return f"{count} problem{'s' * (count > 1)} found", 1
