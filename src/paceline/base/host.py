"""This machine: what it is called, and how many cores processes may use."""

import os
import socket


def host_name() -> str:
    """As the launcher calls this machine, or as it calls itself."""
    return os.environ.get("PACELINE_HOST") or socket.gethostname()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
