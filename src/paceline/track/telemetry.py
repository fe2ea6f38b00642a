"""Samples the utilization of the host and of the run's GPUs, once per second, in one thread per host.

telemetry/<host>.jsonl has a line about the hardware per start, then one sample per line. Counters of disk and network
count from boot. telemetry/<host>.txt is a human-readable table like that of nvidia-smi.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from paceline.system.files import make_folder, write_text
from paceline.system.host import BackgroundThread, host_name
from paceline.track.devices import Gpus
from paceline.track.json_lines import JsonLines
from paceline.track.other_work import OtherWork

_STOP_TIMEOUT = 5.0


class HostSampler:
    """Writes the utilization of CPU, memory, disk, network and GPUs until it is stopped."""

    def __init__(
        self, folder: Path, interval: float = 1.0, gpus: Sequence[str] | None = None, processes: Sequence[int] = ()
    ):
        """`gpus`: endings of UUIDs, None for all GPUs of the host. `processes`: ids of the run's processes."""
        make_folder(folder)
        self._path = folder / f"{host_name()}.jsonl"
        self._lines = JsonLines(self._path)
        self._interval, self._stop = interval, threading.Event()
        self._gpus = Gpus(gpus)
        self._totals = Totals()
        self._others = OtherWork(processes)
        self._thread = BackgroundThread(self._run, "telemetry")
        self._thread.start()

    def _run(self) -> None:
        psutil.cpu_percent()  # the first call sets the baseline
        self._others.cpu_percent(0.0)
        host = {
            "kind": "host",
            "cores": psutil.cpu_count(),
            "memory_total_bytes": psutil.virtual_memory().total,
            "gpus": self._gpus.described,
        }
        with suppress(Exception):  # telemetry must not fail training
            self._write(host)
            while not self._stop.wait(self._interval):
                sample = self._sample()
                self._totals.add(sample)
                self._write(sample)

    def _write(self, record: dict[str, Any]) -> None:
        with suppress(OSError):  # the metrics warn about a full disk; the record is buffered until there is space
            self._lines.write(record)

    def _sample(self) -> dict[str, Any]:
        traffic, disk = psutil.net_io_counters(), psutil.disk_io_counters()
        busy = psutil.cpu_percent()
        sample: dict[str, Any] = {
            "kind": "sample",
            "cpu_percent": busy,
            "other_cpu_percent": round(self._others.cpu_percent(busy), 1),
            "memory_bytes": psutil.virtual_memory().used,
            "sent_bytes": traffic.bytes_sent if traffic else 0,
            "received_bytes": traffic.bytes_recv if traffic else 0,
            "read_bytes": disk.read_bytes if disk else 0,
            "written_bytes": disk.write_bytes if disk else 0,
        }
        if gpus := self._gpus.sample():
            sample["gpus"] = gpus
            sample["other_gpu_processes"] = len(self._others.on_gpus(self._gpus.processes()))
        self._others.warn(sample)
        return sample

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(_STOP_TIMEOUT)
        if self._thread.is_alive():
            return  # the driver hangs; the thread ends with the process
        self._gpus.close()
        self._lines.close()
        write_text(self._path.with_suffix(".txt"), self._totals.table(self._gpus.described))


class Totals:
    """Means and peaks over all samples."""

    def __init__(self) -> None:
        self._samples = 0
        self._counts: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._peaks: dict[str, float] = {}

    def add(self, sample: dict[str, Any]) -> None:
        self._samples += 1
        figures = {"cpu": sample["cpu_percent"], "memory": sample["memory_bytes"] / 2**20}
        for number, gpu in enumerate(sample.get("gpus", [])):
            figures |= {f"{name}{number}": value for name, value in gpu.items() if value is not None}
        for name, value in figures.items():
            self._counts[name] += 1
            self._sums[name] += value
            self._peaks[name] = max(self._peaks.get(name, value), value)

    def _text(self, name: str, form: str, scale: float = 1.0) -> str:
        if name not in self._sums:
            return "N/A"
        mean = self._sums[name] / self._counts[name]
        return f"{mean / scale:{form}} / {self._peaks[name] / scale:{form}}"

    def table(self, gpus: list[dict[str, Any]]) -> str:
        """Return a table like that of nvidia-smi with mean / peak over the whole run."""
        rows = [" mean / peak of the run", ""]
        for number, gpu in enumerate(gpus):
            total = gpu["memory_total_bytes"] / 2**20
            figures = {
                name: self._text(f"{key}{number}", ".0f")
                for name, key in (("C", "celsius"), ("W", "watts"), ("%", "use_percent"), ("MHz", "megahertz"))
            }
            rows += [
                f" GPU {number}  {gpu['name']:<46.46}  {figures['C']:>12} C   {figures['W']:>14} W",
                f"   memory {self._text(f'memory_bytes{number}', ',.0f', 2**20):>20} of {total:,.0f} MiB   "
                f"util {figures['%']:>11} %   clock {figures['MHz']:>13} MHz",
                "",
            ]
        rows.append(f" host  CPU {self._text('cpu', '.0f'):>12} %   memory {self._text('memory', ',.0f'):>20} MiB")
        title = f"{time.strftime('%a %b %d %H:%M:%S %Y')}   {host_name()}   {self._samples} samples"
        width = max(map(len, rows)) + 1
        line = f"+{'-' * width}+"
        return "\n".join([title, line, *(f"|{row:<{width}}|" if row else line for row in rows), line, ""])
