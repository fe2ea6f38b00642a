"""Time and memory of the device a rank computes on, read without making it wait."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def now(device: torch.device) -> Any:
    """A point in time: of the clock on CPUs, of the stream on GPUs (reading it later does not make the stream wait)."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> Callable[[], float]:
    """Seconds from one point to another; to be called when the device is done."""
    if isinstance(begin, float):
        return lambda: end - begin
    return lambda: begin.elapsed_time(end) / 1000


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: of the device as allocated; on CPUs of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not on every system
        return 0
