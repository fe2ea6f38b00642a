"""This machine: what it is called, its processor, and how many cores processes may use."""

import os
import platform
import socket
from pathlib import Path


def host_name() -> str:
    """As the launcher calls this machine, or as it calls itself."""
    return os.environ.get("PACELINE_HOST") or socket.gethostname()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """Model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
