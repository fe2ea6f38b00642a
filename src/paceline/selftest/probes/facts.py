"""Facts about the machine that a report of a problem needs."""

import os
import platform
from importlib import metadata
from typing import Any

import psutil
import torch

from paceline.selftest.probes import Probing
from paceline.system.host import cores, cpu_name
from paceline.track.devices import Gpus

_PACKAGES = ("paceline", "torch", "torchvision", "timm", "numpy")
_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_", "PYTORCH_", "OMP_", "ATEN_", "ONEDNN_")


def facts(probing: Probing) -> dict[str, Any]:
    """Return software, processor, GPUs and the variables that change how torch and NCCL work."""
    device, gpus = probing.world.device, Gpus()
    found = {
        "device": device.type,
        "procs": probing.settings.procs,
        "gpus": [torch.cuda.get_device_name(number) for number in range(num_gpus(device))],
        "driver": gpus.driver(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl(),
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }
    gpus.close()
    return found


def num_gpus(device: torch.device) -> int:
    """Return the number of GPUs that ranks of this kind can use on this host."""
    return torch.cuda.device_count() if device.type == "cuda" else 0


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
