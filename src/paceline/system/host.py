"""This host: its name, its processor, the cores that processes may use, CPU affinity, and settings of torch.

OpenMP's threads synchronize many times per step. When other processes are busy, the kernel schedules two of them on one
core, where one blocks the other (benchmarks/shared_cpu.py measures it). Therefore each thread is bound to a core.
"""

import ctypes
import importlib
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.system import numa

_mask: frozenset[int] = frozenset()  # cores of this process, which may be more than those of its main thread
_AFFINITY = {"OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}


def host_name() -> str:
    """Return the name that the launcher gave this host, or its own."""
    return os.environ.get("PACELINE_HOST") or socket.gethostname()


def machine_id() -> str:
    """Return an ID that two processes share if they run on the same machine and see the same process IDs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(_available()) or os.cpu_count() or 1


def _available() -> frozenset[int]:
    return _mask or (frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset())


def cpu_name() -> str:
    """Return the model of the processor, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def limit_openmp_spinning() -> None:
    """Let OpenMP's threads sleep after a short wait; by default they spin and occupy their core.

    Call it before torch is imported, which reads the setting.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def expand_gpu_segments() -> None:
    """Let torch's allocator grow segments of GPU memory, unless the user configured it. Call it before importing torch.

    Phases change the image size. Segments of fixed sizes would be left unused, and the GPU would run out of memory.
    """
    if not _ALLOCATOR & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def bind_openmp() -> None:
    """Import torch so that every compute thread is bound to its own core, unless the user set another affinity.

    For a process that uses all cores. The main thread is bound to the first of them.
    """
    global _mask
    if "torch" in sys.modules:
        return  # OpenMP has already read its settings
    _mask = _available()
    if (_AFFINITY | {"PACELINE_THREADS"}) & os.environ.keys():
        return
    os.environ["OMP_PROC_BIND"] = "true"
    importlib.import_module("torch")
    del os.environ["OMP_PROC_BIND"]  # child processes are not bound


def unbind() -> None:
    """Let the calling thread run on all cores; threads inherit the single core of the main thread."""
    if _mask:
        os.sched_setaffinity(0, _mask)


def confine(number: int, processes: int) -> None:
    """Restrict this process to its own cores, if the processes of this node divide them evenly."""
    mask = sorted(_available())
    each = len(mask) // processes
    if each and each * processes == len(mask):
        os.sched_setaffinity(0, mask[number * each : (number + 1) * each])


def bind_near_gpu(addresses: Sequence[str], number: int, divided: bool) -> None:
    """Bind this rank to its part of the cores of its GPU's NUMA node; background threads may use spare cores as well.

    `addresses`: PCI addresses of the GPUs of this node's ranks, `number`: which of them is this one. `divided`: the
    launcher has already given each rank its own cores. Without NUMA nodes the rank keeps its cores.
    """
    global _mask
    unbind()
    mask = _available()
    if not mask or _AFFINITY & os.environ.keys():
        return
    local = [numa.cores_of(address) for address in (addresses[number : number + 1] if divided else addresses)]
    share = numa.divide(mask, local, 0 if divided else number, numa.siblings_of(mask))
    if share:
        _mask = share.near | share.spare
        os.sched_setaffinity(0, share.near)


def affinity_restorer() -> Callable[[], None]:
    """Return a function that gives the calling thread the cores that it has now."""
    before, mask = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(), _mask

    def restore() -> None:
        global _mask
        _mask = mask
        if before:
            os.sched_setaffinity(0, before)

    return restore


class BackgroundThread(threading.Thread):
    """A daemon thread that may run on any core of this process."""

    def __init__(self, target: object, name: str, args: tuple[object, ...] = ()):
        super().__init__(target=target, name=name, args=args, daemon=True)  # type: ignore[arg-type]

    def run(self) -> None:
        unbind()
        super().run()


def keep_freed_memory() -> None:
    """Let the C library keep large freed blocks for the next step instead of returning them to the kernel.

    Activations are allocated and freed at every step. Requesting them from the kernel each time, page by page, takes a
    large part of a step on CPUs (benchmarks/loop.py measures it).
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_max = -1, -4
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
