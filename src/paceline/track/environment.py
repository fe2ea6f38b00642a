"""Collects the software, hardware and code version of a run, to reproduce it or explain differences."""

import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from typing import Any

import psutil
import torch

from paceline.system.host import cpu_name
from paceline.system.remote import is_remote, redacted

_PACKAGES = ("paceline", "torch", "torchvision", "timm", "numpy", "safetensors")


def collect(hosts: list[str], device: torch.device) -> dict[str, Any]:
    """Return the environment of a start, for environment.json."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(map(_without_password, sys.argv)),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "code": _code(),
        "hosts": dict(Counter(hosts)),
        "hardware": _hardware(device),
    } | _price()


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of the packages that affect the results of training."""
    return {name: metadata.version(name) for name in _PACKAGES}


def _without_password(word: str) -> str:
    name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{name}{equals}{redacted(value)}" if is_remote(value) else word


def _price() -> dict[str, float]:
    """Return the hourly price of this node, which the launcher sets."""
    try:
        return {"price": float(os.environ["PACELINE_PRICE"])}
    except (KeyError, ValueError):
        return {}


def _hardware(device: torch.device) -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "threads_per_process": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "device": device.type,
    }
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
        hardware["gpus"] = torch.cuda.device_count()
        hardware["gpu_memory_gb"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
        hardware["cuda"] = torch.version.cuda
    return hardware


def _code() -> dict[str, Any]:
    """Return the commit of the current repository and whether it has uncommitted changes."""
    git = shutil.which("git")
    if not git:
        return {}

    def run_git(*words: str) -> str | None:
        # settings of an untrusted repository may name programs to run
        safe = [git, "--no-optional-locks", "-c", "core.fsmonitor=false"]
        answer = subprocess.run([*safe, *words], capture_output=True, text=True, check=False)
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = run_git("rev-parse", "HEAD")
    return {"commit": commit, "changed": bool(run_git("status", "--porcelain"))} if commit else {}
