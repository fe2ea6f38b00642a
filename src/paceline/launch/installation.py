"""Check the installation: versions, imports, the native codec, GPUs, and an all-reduce between two processes.

A child process imports torch, so that an import that crashes is reported as a problem.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from paceline.launch.doctor import figure
from paceline.system.lifetime import child_env, own_command

PACKAGES = ("torch", "torchvision", "timm")
DEVICES, CODEC = "devices", "codec"
_TIMEOUT = 180.0  # seconds; imports are slow with a cold file cache or a network file system
_EXTRAS = {
    "obstore": ("s3", "data and results in s3://"),
    "boto3": ("aws", "paceline launch ec2"),
    "wandb": ("wandb", "log.wandb"),
    "mlflow-skinny": ("mlflow", "log.mlflow"),
}
_GET_TORCH = "https://pytorch.org/get-started/locally"


class Finding(NamedTuple):
    """One line of the output of doctor."""

    level: str
    """ok, note or problem."""
    subject: str
    text: str


def import_all() -> dict[str, dict[str, Any]]:
    """Return by part what a child process could import; the first missing part is where it ended."""
    words = own_command("installation")
    try:
        done = subprocess.run(words, env=child_env(), capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        out, ended = done.stdout, f"the process ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        out, ended = _text(error.stdout), f"no result within {_TIMEOUT:.0f} s"
    results = [json.loads(line) for line in out.splitlines() if line.startswith('{"part"')]
    parts = {result["part"]: result for result in results}
    missing = [part for part in (*PACKAGES, DEVICES, CODEC) if part not in parts]
    return parts | {part: {"error": ended if part == missing[0] else "not reached"} for part in missing}


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def packages(parts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Check the versions of packages, and whether they can be imported."""
    wrong = dict(_unsatisfied())
    for name in PACKAGES:
        error, version = parts[name].get("error"), parts[name].get("version", "")
        if error:
            yield Finding("problem", name, f"cannot be imported ({error}); run: {_pip(name)}")
        elif name in wrong:
            yield Finding(
                "problem", name, f"{version} is installed, {wrong[name]} is required; run: {_pip(wrong[name])}"
            )
        else:
            yield Finding("ok", name, version)
    for name, required in wrong.items():
        if name not in PACKAGES:
            installed = f"{_version(name) or 'nothing'} is installed"
            yield Finding("problem", name, f"{installed}, {required} is required; run: {_pip(required)}")
    codec = parts[CODEC]
    if error := codec.get("error"):
        fix = "run: pip install --force-reinstall --no-deps paceline (it needs a C compiler)"
        yield Finding("problem", "native codec", f"cannot be loaded ({error}); {fix}")
    else:
        slower = "" if "avx2" in codec["paths"] else "; this CPU has no AVX2, so images decode more slowly"
        yield Finding("note" if slower else "ok", "native codec", f"{codec['paths'][-1]} path{slower}")


def _pip(requirement: str) -> str:
    return f"pip install --upgrade {shlex.quote(requirement)}"


def _unsatisfied() -> Iterator[tuple[str, str]]:
    """Yield the packages that are missing or have the wrong version, with the requirement of paceline."""
    try:
        requirements = metadata.requires("paceline") or []
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra, or of another platform
        if not requirement.specifier.contains(_version(requirement.name) or "0", prereleases=True):
            yield requirement.name, str(requirement)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpus(parts: dict[str, dict[str, Any]], machine: dict[str, Any]) -> Iterator[Finding]:
    """Compare the GPUs that the driver reports with those that torch can use."""
    present, devices = [gpu["name"] for gpu in machine["gpus"]], parts[DEVICES]
    if "error" in devices:
        return
    version = parts["torch"].get("version", "torch")
    names = ", ".join(f"{present.count(name)} x {name}" for name in dict.fromkeys(present))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if present and not devices["cuda"]:
        fix = f"install a CUDA build: {_GET_TORCH}"
        yield Finding("problem", "GPUs", f"{names}, but torch {version} is a CPU build and cannot use them; {fix}")
    elif present and not devices["gpus"] and hidden is None:
        driver = f"driver {machine['driver']}, torch built for CUDA {devices['cuda']}"
        yield Finding("problem", "GPUs", f"{names}, but torch detects none of them ({driver}); update the driver")
    elif len(present) != devices["gpus"]:
        why = f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else ""
        yield Finding("note", "GPUs", f"torch detects {devices['gpus']}, the driver reports {len(present)}{why}")
    elif present:
        yield Finding("ok", "GPUs", f"{names}, driver {machine['driver']}, CUDA {devices['cuda']}")
    elif os.path.exists("/proc/driver/nvidia"):
        yield Finding("problem", "GPUs", "the NVIDIA driver is loaded but does not answer; see nvidia-smi and dmesg")
    else:
        yield Finding("ok", "GPUs", "none: training runs on the CPU")
    if machine["gpu_processes"]:
        pids = ", ".join(map(str, machine["gpu_processes"]))
        text = f"processes {pids} use the GPUs; terminate them if nobody needs them"
        yield Finding("note", "GPU processes", text)


def precision(parts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Report which precision precision=auto selects."""
    devices = parts[DEVICES]
    if "error" in devices:
        yield Finding("problem", "devices", f"torch cannot list its devices ({devices['error']})")
    elif devices["gpus"]:
        native = all(devices["gpu_bf16"])
        yield Finding("ok", "bf16", "native on the GPUs" if native else "not native: precision=auto selects fp16")
    else:
        native = devices["bf16"]
        yield Finding("ok", "bf16", "native on this CPU" if native else "not native: precision=auto selects fp32")


def all_reduce(parts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Run an all-reduce over all GPUs, or two CPU processes, started as `paceline train --procs N` starts its ranks."""
    if "error" in parts[DEVICES]:
        return
    gpus = parts[DEVICES]["gpus"]
    count, device = (gpus, "cuda") if gpus > 1 else (2, "cpu")  # two ranks cannot share a GPU
    words = own_command("test-allreduce", "--procs", str(count), "--device", device, "--seconds", "1")
    fix = "check the firewall of the loopback interface and the variables GLOO_*, NCCL_* and TORCH_*"
    try:
        done = subprocess.run(words, env=child_env(), capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("problem", "all-reduce", f"{count} processes got no result within {_TIMEOUT:.0f} s; {fix}")
        return
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        yield Finding("problem", "all-reduce", f"{count} processes failed ({reason}); {fix}")
        return
    low, high, rate = min(found[0]["pairs"], key=lambda pair: pair[2])
    slowest = f", slowest pair {low} - {high} {figure(rate / 1e9)} GB/s" if count > 2 else ""
    bandwidth = f"bus bandwidth {figure(found[0]['bus_bytes_per_second'] / 1e9)} GB/s"
    yield Finding("ok", "all-reduce", f"{count} {device.upper()} ranks, {bandwidth}{slowest}")


def extras() -> Iterator[Finding]:
    """Report which optional packages are installed."""
    for package, (extra, use) in _EXTRAS.items():
        version = _version(package) or (_version("mlflow") if extra == "mlflow" else None)
        name = package.removesuffix("-skinny")
        if version:
            yield Finding("ok", name, version)
        else:
            yield Finding("note", name, f"not installed; for {use} run: pip install 'paceline[{extra}]'")
