"""Work on a host that is not the run's: it takes time from the run, and makes its figures worth less."""

import time
from collections.abc import Sequence
from typing import Any

import psutil

from paceline.system.host import host_name
from paceline.system.logs import log

FULL, OTHERS = 90.0, 10.0
"""Percent of all cores: a host is full, and others use a part of it that counts. Idle cores are there for everybody."""
_SAMPLES = 10  # in a row before it is said: starting programs does not count


def is_disturbed(sample: dict[str, Any]) -> bool:
    """Whether other work took time from the run while this sample was taken."""
    crowded = sample["cpu_percent"] >= FULL and sample.get("other_cpu_percent", 0.0) >= OTHERS
    return crowded or bool(sample.get("other_gpu_processes"))


class OtherWork:
    def __init__(self, processes: Sequence[int]):
        """`processes`: the run's own on this host."""
        self._own = list(processes)
        self._seconds, self._time = 0.0, time.perf_counter()
        self._crowded, self._warned = 0, False

    def cpu_percent(self, busy: float) -> float:
        """Of all cores since the last call, where `busy` percent were used by all processes together."""
        seconds, now = sum(map(_seconds, self._own)), time.perf_counter()
        used = max(0.0, seconds - self._seconds)  # less where one of them has ended
        share = used / max(now - self._time, 1e-3) / (psutil.cpu_count() or 1)
        self._seconds, self._time = seconds, now
        return min(100.0, max(0.0, busy - 100 * share)) if self._own else 0.0

    def on_gpus(self, processes: Sequence[int]) -> list[int]:
        """Those that are not the run's; in containers that hide process numbers nobody can tell."""
        return [number for number in processes if number not in self._own] if set(processes) & set(self._own) else []

    def warn(self, sample: dict[str, Any]) -> None:
        """Once, when the host has been shared for some time."""
        self._crowded = self._crowded + 1 if is_disturbed(sample) else 0
        if self._crowded < _SAMPLES or self._warned:
            return
        self._warned = True
        gpus = sample.get("other_gpu_processes")
        what = (
            f"{gpus} other process{'es' * (gpus > 1)} are using its GPUs"
            if gpus
            else f"other processes use {sample['other_cpu_percent']:.0f} % of its CPU"
        )
        log.warning("%s: %s; this slows down the run, and its timings are not comparable", host_name(), what)


def _seconds(process: int) -> float:
    try:
        used = psutil.Process(process).cpu_times()
    except psutil.Error:
        return 0.0
    return float(used.user + used.system)
