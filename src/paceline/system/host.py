"""This machine: what it is called, its processor, which cores processes may use, and where their threads run.

OpenMP's threads wait for each other many times in a step. Beside other busy processes the kernel puts two of them on
one core, where one waits for the other to give way: benchmarks/shared_cpu.py shows how much that costs. So each has a
core of its own.
"""

import importlib
import os
import platform
import socket
import sys
import threading
from pathlib import Path

_mask: frozenset[int] = frozenset()  # cores of this process before its main thread was bound to one of them


def host_name() -> str:
    """As the launcher calls this machine, or as it calls itself."""
    return os.environ.get("PACELINE_HOST") or socket.gethostname()


def cores() -> int:
    return len(_available()) or os.cpu_count() or 1


def _available() -> frozenset[int]:
    return _mask or (frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset())


def cpu_name() -> str:
    """Model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def limit_openmp_spinning() -> None:
    """Let OpenMP's threads sleep after a short wait; by default they spin, and keep others from their core.

    It is read when torch is loaded.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def bind_openmp() -> None:
    """Load torch so that every compute thread has a core of its own, unless the user has said otherwise.

    For a process that uses all cores; the main thread is bound to the first of them.
    """
    global _mask
    if "torch" in sys.modules:
        return  # too late: OpenMP has read its settings
    _mask = _available()
    if {"OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "PACELINE_THREADS"} & os.environ.keys():
        return
    os.environ["OMP_PROC_BIND"] = "true"
    importlib.import_module("torch")
    del os.environ["OMP_PROC_BIND"]  # child processes are not bound


def unbind() -> None:
    """Let the calling thread run on all cores: one that the main thread starts would stay on its core."""
    if _mask:
        os.sched_setaffinity(0, _mask)


def confine(number: int, processes: int) -> None:
    """Give this process, one of several that share the machine out, cores of its own."""
    mask = sorted(_available())
    each = len(mask) // processes
    if each and each * processes == len(mask):
        os.sched_setaffinity(0, mask[number * each : (number + 1) * each])


class BackgroundThread(threading.Thread):
    """A daemon that runs where there is room."""

    def __init__(self, target: object, name: str, args: tuple[object, ...] = ()):
        super().__init__(target=target, name=name, args=args, daemon=True)  # type: ignore[arg-type]

    def run(self) -> None:
        unbind()
        super().run()
