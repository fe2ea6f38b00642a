"""Detects load on a host from other processes, which slows down a run and makes its timings unreliable."""

import time
from collections.abc import Sequence
from typing import Any

import psutil

from paceline.system.host import host_name
from paceline.system.logs import log

FULL, OTHERS = 90.0, 10.0
"""Percent of all cores: above FULL in total and OTHERS by other processes, the run is slowed down."""
_SAMPLES = 10  # in a row before a warning, so that short load is ignored


def is_disturbed(sample: dict[str, Any]) -> bool:
    """Return whether other processes slowed down the run during this sample."""
    overloaded = sample["cpu_percent"] >= FULL and sample.get("other_cpu_percent", 0.0) >= OTHERS
    return overloaded or bool(sample.get("other_gpu_processes"))


class OtherWork:
    """Measures the load of processes that do not belong to the run."""

    def __init__(self, processes: Sequence[int]):
        """`processes`: ids of the run's processes on this host."""
        self._processes = list(processes)
        self._seconds, self._time = 0.0, time.perf_counter()
        self._disturbed, self._warned = 0, False

    def cpu_percent(self, busy: float) -> float:
        """Return the CPU percent of other processes since the last call; `busy` is that of all processes."""
        seconds, now = sum(map(_seconds, self._processes)), time.perf_counter()
        used = max(0.0, seconds - self._seconds)  # negative if a process has exited
        fraction = used / max(now - self._time, 1e-3) / (psutil.cpu_count() or 1)
        self._seconds, self._time = seconds, now
        return min(100.0, max(0.0, busy - 100 * fraction)) if self._processes else 0.0

    def on_gpus(self, processes: Sequence[int]) -> list[int]:
        """Return the processes that do not belong to the run; none in containers that hide process ids."""
        if not set(processes) & set(self._processes):
            return []
        return [process for process in processes if process not in self._processes]

    def warn(self, sample: dict[str, Any]) -> None:
        """Warn once if the host has been shared for some time."""
        self._disturbed = self._disturbed + 1 if is_disturbed(sample) else 0
        if self._disturbed < _SAMPLES or self._warned:
            return
        self._warned = True
        gpus = sample.get("other_gpu_processes")
        what = (
            f"{gpus} other process{'es use' if gpus > 1 else ' uses'} its GPUs"
            if gpus
            else f"other processes use {sample['other_cpu_percent']:.0f}% of its CPU"
        )
        log.warning("%s: %s. This slows down the run and makes its timings incomparable", host_name(), what)


def _seconds(process: int) -> float:
    try:
        used = psutil.Process(process).cpu_times()
    except psutil.Error:
        return 0.0
    return float(used.user + used.system)
