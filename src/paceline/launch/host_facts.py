"""Facts about a host that multi-node training depends on. This module does not import torch."""

import hashlib
import json
import os
import platform
import shutil
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NotRequired

import psutil
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

import paceline
from paceline.launch.rdma import RdmaFacts, rdma_facts
from paceline.launch.values import first_problem
from paceline.system.files import printable, sha256
from paceline.system.host import cores
from paceline.track.checks import NonNegativeFloat, NonNegativeInt, PositiveInt
from paceline.track.devices import Gpus

_PING, _PINGS, _SECONDS = b"x", 20, 1.0
_Text = Annotated[str, Field(max_length=200), AfterValidator(printable)]


class _GpuFacts(TypedDict):
    name: _Text


class Facts(TypedDict):
    """What is accepted from a host's answer."""

    time: NonNegativeFloat
    python: _Text
    code: _Text
    torch: _Text | None
    cores: PositiveInt
    memory_bytes: NonNegativeInt
    shared_memory_bytes: NonNegativeInt | None
    disk_bytes: NonNegativeInt | None
    gpus: Annotated[list[_GpuFacts], Field(max_length=1000)]
    gpu_processes: Annotated[list[NonNegativeInt], Field(max_length=1000)]
    driver: _Text | None
    rdma: RdmaFacts
    data: NotRequired[_Text]


class Link(TypedDict):
    """A measured connection to another host: round trip and bandwidth."""

    seconds: NonNegativeFloat
    bytes_per_second: NonNegativeFloat


class AllReduceFigures(TypedDict):
    """Bus bandwidth of an all-reduce over all ranks, and between pairs of them."""

    ranks: Annotated[list[_Text], Field(min_length=1, max_length=10_000)]
    """Host and device of each rank."""
    bus_bytes_per_second: NonNegativeFloat
    pairs: Annotated[list[tuple[NonNegativeInt, NonNegativeInt, NonNegativeFloat]], Field(max_length=20_000)]


_CHECKS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Facts, Link, AllReduceFigures)}


def validated(text: str, kind: type) -> dict[str, Any]:
    """Return the last line of another host's output, parsed as JSON of this kind; raise ValueError if it is invalid."""
    lines = text.splitlines()
    try:
        parsed: dict[str, Any] = _CHECKS[kind].validate_json(lines[-1] if lines else "", strict=True)
        return parsed
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def facts(data: str = "") -> dict[str, Any]:
    """Return the facts of this machine, and a fingerprint of the prepared data in a folder."""
    gpus = Gpus()
    values = {
        "time": time.time(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "paceline": paceline.__version__,
        "code": code_digest(),
        "torch": _version("torch"),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "shared_memory_bytes": _free("/dev/shm"),
        "disk_bytes": _free(str(Path.home())),
        "gpus": gpus.described,
        "gpu_processes": gpus.processes(),
        "driver": gpus.driver(),
        "rdma": rdma_facts(),
    }
    gpus.close()
    return values | ({"data": _fingerprint(Path(data))} if data else {})


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


def code_digest() -> str:
    """Return a digest of the installed package."""
    root = Path(paceline.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".c", ".h", ".yaml")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _fingerprint(folder: Path) -> str:
    """Return a digest of the description of prepared data; of other folders, of file names and sizes."""
    if not folder.exists():
        return "missing"
    description = folder / "dataset.json"
    if description.is_file():
        return sha256(description)[:12]
    listing = sorted(
        (str(path.relative_to(folder)), path.stat().st_size) for path in folder.rglob("*") if path.is_file()
    )
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:12]


def serve(seconds: float = 60.0) -> None:
    """Print a free port, then serve one client for some seconds: echo its pings, discard the rest."""
    # listens only on the interface that the doctor's ssh connection uses
    address = (os.environ.get("SSH_CONNECTION", "").split() or ["", "", "127.0.0.1"])[2]
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        print(listener.getsockname()[1], flush=True)
        listener.settimeout(seconds)
        client, _ = listener.accept()
        with client:
            client.settimeout(seconds)
            for _ in range(_PINGS):
                client.sendall(client.recv(1))
            end = time.monotonic() + seconds
            while client.recv(1 << 20) and time.monotonic() < end:
                pass


def call(address: str, port: int) -> dict[str, float]:
    """Return the round trip in seconds and the bytes per second to a host that serves."""
    with socket.create_connection((address, port), timeout=5) as connection:
        connection.settimeout(10)
        times = []
        for _ in range(_PINGS):
            begin = time.perf_counter()
            connection.sendall(_PING)
            connection.recv(1)
            times.append(time.perf_counter() - begin)
        block, sent, begin = bytes(1 << 18), 0, time.perf_counter()
        while time.perf_counter() - begin < _SECONDS:
            connection.sendall(block)
            sent += len(block)
        return {"seconds": min(times), "bytes_per_second": sent / (time.perf_counter() - begin)}
