"""Whether the installation works: versions, imports, the native codec, GPUs, and two processes that train together.

torch is imported by a child process, so that an import that crashes is a finding and not the end.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

from paceline.system.lifetime import tied

PACKAGES = ("torch", "torchvision", "timm")
DEVICES, CODEC = "devices", "codec"
_LONGEST = 180.0  # a cold file cache, or a network file system
_EXTRAS = {
    "obstore": ("s3", "data and results in s3://"),
    "boto3": ("aws", "paceline launch ec2"),
    "wandb": ("wandb", "log.wandb"),
    "mlflow-skinny": ("mlflow", "log.mlflow"),
}
_GET_TORCH = "https://pytorch.org/get-started/locally"


class Finding(NamedTuple):
    """One line of the doctor's."""

    level: str
    """ok, note or problem."""
    subject: str
    text: str


def ask_installation() -> dict[str, dict[str, Any]]:
    """What a child process could import, by part; without a part, it ended at that one."""
    words = [sys.executable, "-m", "paceline", "installation"]
    try:
        done = subprocess.run(words, env=tied(), capture_output=True, text=True, timeout=_LONGEST, check=False)
        out, ended = done.stdout, f"the process ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        out, ended = _text(error.stdout), f"no answer within {_LONGEST:.0f} s"
    told = [json.loads(line) for line in out.splitlines() if line.startswith('{"part"')]
    found = {own["part"]: own for own in told}
    missing = [part for part in (*PACKAGES, DEVICES, CODEC) if part not in found]
    return found | {part: {"error": ended if part == missing[0] else "not reached"} for part in missing}


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def packages(told: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Versions, and whether they can be imported."""
    lacking = dict(_too_old())
    for name in PACKAGES:
        error, version = told[name].get("error"), told[name].get("version", "")
        if error:
            yield Finding("problem", name, f"cannot be imported ({error}); run: {_pip(name)}")
        elif name in lacking:
            yield Finding("problem", name, f"{version} is too old, {lacking.pop(name)} is needed; run: {_pip(name)}")
        else:
            yield Finding("ok", name, version)
    for name, wanted in lacking.items():
        if name not in PACKAGES:
            yield Finding("problem", name, f"{wanted} is required, {_found(name)}; run: {_pip(name)}")
    codec = told[CODEC]
    if error := codec.get("error"):
        cure = "run: pip install --force-reinstall --no-deps paceline (it needs a C compiler)"
        yield Finding("problem", "native codec", f"cannot be loaded ({error}); {cure}")
    else:
        slower = "" if "avx2" in codec["paths"] else "; this processor has no AVX2, images decode more slowly"
        yield Finding("note" if slower else "ok", "native codec", f"{codec['paths'][-1]} path{slower}")


def _pip(name: str) -> str:
    return f"pip install --upgrade {name}"


def _too_old() -> Iterator[tuple[str, str]]:
    """Packages that are missing or older than this version of paceline needs, and what it needs."""
    try:
        wanted = metadata.requires("paceline") or []
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return
    for requirement in wanted:
        name, least, floor = requirement.partition(">=")
        if ";" in requirement or not least:
            continue  # of an extra, or without a floor
        if _numbers(_version(name) or "0") < _numbers(floor):
            yield name, requirement


def _found(name: str) -> str:
    version = _version(name)
    return f"found {version}" if version else "not installed"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    plain = version.partition("+")[0].split(".")
    return [int("".join(filter(str.isdigit, part)) or 0) for part in plain]


def gpus(told: dict[str, dict[str, Any]], machine: dict[str, Any]) -> Iterator[Finding]:
    """The GPUs that the driver knows, against those that torch can use."""
    there, devices = [gpu["name"] for gpu in machine["gpus"]], told[DEVICES]
    if "error" in devices:
        return
    version = told["torch"].get("version", "torch")
    names = ", ".join(f"{there.count(name)} x {name}" for name in dict.fromkeys(there))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if there and not devices["cuda"]:
        cure = f"install a CUDA build: {_GET_TORCH}"
        yield Finding("problem", "GPUs", f"{names}, but torch {version} is a CPU build and cannot use them; {cure}")
    elif there and not devices["gpus"] and hidden is None:
        driver = f"driver {machine['driver']}, torch built for CUDA {devices['cuda']}"
        yield Finding("problem", "GPUs", f"{names}, but torch sees none of them ({driver}); update the driver")
    elif len(there) != devices["gpus"]:
        why = f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else ""
        yield Finding("note", "GPUs", f"torch sees {devices['gpus']}, the driver reports {len(there)}{why}")
    elif there:
        yield Finding("ok", "GPUs", f"{names}, driver {machine['driver']}, CUDA {devices['cuda']}")
    elif os.path.exists("/proc/driver/nvidia"):
        yield Finding("problem", "GPUs", "the NVIDIA driver is loaded but does not answer; see nvidia-smi and dmesg")
    else:
        yield Finding("ok", "GPUs", "none: training runs on the processor")
    if machine["gpu_processes"]:
        numbers = ", ".join(map(str, machine["gpu_processes"]))
        yield Finding(
            "note", "GPU processes", f"processes {numbers} compute on the GPUs; end them if they are left over"
        )


def precision(told: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """What precision=auto becomes."""
    devices = told[DEVICES]
    if "error" in devices:
        yield Finding("problem", "devices", f"torch cannot tell its devices ({devices['error']})")
    elif devices["gpus"]:
        native = all(devices["gpu_bf16"])
        yield Finding("ok", "bf16", "native on the GPUs" if native else "not native: precision=auto means fp16")
    else:
        native = devices["bf16"]
        yield Finding("ok", "bf16", "native on this processor" if native else "not native: precision=auto means fp32")


def all_reduce(told: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Two processes of this machine meet and sum tensors, started as `paceline train --procs 2` starts its ranks."""
    if "error" in told[DEVICES]:
        return
    words = [sys.executable, "-m", "paceline", "test-allreduce", "--procs", "2", "--seconds", "1"]
    hidden = {} if told[DEVICES]["gpus"] > 1 else {"CUDA_VISIBLE_DEVICES": ""}  # two ranks cannot share a GPU
    cure = "check the firewall of the loopback interface and the variables GLOO_*, NCCL_* and TORCH_*"
    try:
        done = subprocess.run(words, env=tied() | hidden, capture_output=True, text=True, timeout=_LONGEST, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("problem", "all-reduce", f"two processes got no result within {_LONGEST:.0f} s; {cure}")
        return
    rates = [json.loads(line)["bytes_per_second"] for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rates:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        yield Finding("problem", "all-reduce", f"two processes failed ({reason}); {cure}")
    else:
        yield Finding("ok", "all-reduce", f"two processes, {rates[0] / 1e9:.2g} GB/s")


def extras() -> Iterator[Finding]:
    for package, (extra, use) in _EXTRAS.items():
        version = _version(package) or (_version("mlflow") if extra == "mlflow" else None)
        name = package.removesuffix("-skinny")
        if version:
            yield Finding("ok", name, version)
        else:
            yield Finding("note", name, f"not installed; for {use} run: pip install 'paceline[{extra}]'")
