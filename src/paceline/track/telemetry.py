"""A light sampler of the host: one thread per host, one line per interval."""

import json
import socket
import threading
import time
from pathlib import Path

import psutil


class HostSampler:
    """Writes use of processor, memory and network to telemetry/<host>.jsonl until it is stopped."""

    def __init__(self, folder: Path, interval: float = 1.0):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{socket.gethostname()}.jsonl").open("a", encoding="utf-8", buffering=1)
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        psutil.cpu_percent()  # the first call only sets the starting point
        while not self._stop.wait(self._interval):
            traffic = psutil.net_io_counters()
            sample = {
                "time": round(time.time(), 3),
                "cpu_percent": psutil.cpu_percent(),
                "memory_bytes": psutil.virtual_memory().used,
                "sent_bytes": traffic.bytes_sent if traffic else 0,
                "received_bytes": traffic.bytes_recv if traffic else 0,
            }
            try:
                self._file.write(json.dumps(sample) + "\n")
            except OSError:
                return  # a full disk must not disturb training

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._file.close()
