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
from typing import Annotated, Any, NotRequired

import psutil
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

import paceline
from paceline.system.files import printable, sha256
from paceline.system.host import cores
from paceline.track.checks import Count, NotNegative, Positive
from paceline.track.devices import Gpus

_PING, _PINGS, _SECONDS = b"x", 20, 1.0
_Text = Annotated[str, Field(max_length=200), AfterValidator(printable)]


class _Gpu(TypedDict):
    name: _Text


class Facts(TypedDict):
    """What is believed of a machine's answer."""

    time: NotNegative
    python: _Text
    code: _Text
    torch: _Text | None
    cores: Positive
    memory_bytes: Count
    shared_memory_bytes: Count | None
    disk_bytes: Count | None
    gpus: Annotated[list[_Gpu], Field(max_length=1000)]
    gpu_processes: Annotated[list[Count], Field(max_length=1000)]
    driver: _Text | None
    data: NotRequired[_Text]


class Link(TypedDict):
    """Of a connection to another machine."""

    seconds: NotNegative
    bytes_per_second: NotNegative


class Rate(TypedDict):
    bytes_per_second: NotNegative


_CHECKS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Facts, Link, Rate)}


def believed(text: str, kind: type) -> dict[str, Any]:
    """The last line of what another machine printed, as JSON of this kind; a ValueError says what is wrong with it."""
    lines = text.splitlines()
    try:
        found: dict[str, Any] = _CHECKS[kind].validate_json(lines[-1] if lines else "", strict=True)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(printable(f"{place}: {first['msg']}" if place else first["msg"])[:200]) from None


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
    """Tell a free port, then answer one caller for some seconds: echo its pings, swallow the rest."""
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
            end = time.monotonic() + seconds
            while caller.recv(1 << 20) and time.monotonic() < end:
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
