"""What a machine is and has, as far as training on several of them depends on it. No torch is imported."""

import hashlib
import json
import os
import platform
import shutil
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import paceline
from paceline.base.files import sha256
from paceline.base.host import cores
from paceline.track.devices import Gpus

_PING, _PINGS, _SECONDS = b"x", 20, 1.0


def facts(data: str = "") -> dict[str, Any]:
    gpus = Gpus()
    found = {
        "time": time.time(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "paceline": paceline.__version__,
        "code": _code(),
        "torch": _version("torch"),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "shared_memory_bytes": _free("/dev/shm"),
        "disk_bytes": _free(str(Path.home())),
        "gpus": gpus.described,
        "gpu_processes": gpus.processes(),
        "driver": gpus.driver(),
    }
    gpus.close()
    return found | ({"data": _fingerprint(Path(data))} if data else {})


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _code() -> str:
    """Digest of the package as it is installed there."""
    root = Path(paceline.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".c", ".h", ".yaml")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _fingerprint(folder: Path) -> str:
    """Of prepared data, by their description; of other files by names and sizes."""
    if not folder.exists():
        return "missing"
    described = folder / "dataset.json"
    if described.is_file():
        return sha256(described)[:12]
    listing = sorted(
        (str(path.relative_to(folder)), path.stat().st_size) for path in folder.rglob("*") if path.is_file()
    )
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:12]


def serve(seconds: float = 60.0) -> None:
    """Tell a free port, then answer one caller: echo its pings, swallow the rest."""
    # where the doctor's own connection came in, and nowhere else
    address = (os.environ.get("SSH_CONNECTION", "").split() or ["", "", "127.0.0.1"])[2]
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        print(listener.getsockname()[1], flush=True)
        listener.settimeout(seconds)
        caller, _ = listener.accept()
        with caller:
            caller.settimeout(seconds)
            for _ in range(_PINGS):
                caller.sendall(caller.recv(1))
            while caller.recv(1 << 20):
                pass


def call(address: str, port: int) -> dict[str, float]:
    """Round trip in seconds, and bytes a second, to a machine that serves."""
    with socket.create_connection((address, port), timeout=5) as there:
        there.settimeout(10)
        times = []
        for _ in range(_PINGS):
            begin = time.perf_counter()
            there.sendall(_PING)
            there.recv(1)
            times.append(time.perf_counter() - begin)
        block, sent, begin = bytes(1 << 18), 0, time.perf_counter()
        while time.perf_counter() - begin < _SECONDS:
            there.sendall(block)
            sent += len(block)
        return {"seconds": min(times), "bytes_per_second": sent / (time.perf_counter() - begin)}
