"""Timing and memory of a rank's device, measured without synchronizing it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def now(device: torch.device) -> Any:
    """Return a point in time: of the clock on CPUs, a CUDA event on GPUs, which does not block the stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> Callable[[], float]:
    """Return a function for the seconds between two points, to be called when the device is done."""
    if isinstance(begin, float):
        return lambda: end - begin
    return lambda: begin.elapsed_time(end) / 1000


def wait(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes so far: allocated on the GPU, or resident in the process on CPUs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return 0
