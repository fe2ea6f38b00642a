"""Nominal bandwidth of the links between ranks, where the system knows it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second and direction of a lane, by generation."""
_NVLINK = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Bytes per second and direction of a link, by version."""
_MAX_NVLINKS = 18


def network_link(folder: Path = Path("/sys/class/net")) -> float | None:
    """Return the bytes per second of the network interface between nodes; None if it is virtual or unknown."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").lstrip("=")
    try:
        megabits = int((folder / interface / "speed").read_text())
    except (OSError, ValueError):  # loopback and most virtual interfaces have no speed
        return None
    return megabits * 1e6 / 8 if interface and megabits > 0 else None


def gpu_link(device: "torch.device") -> float | None:
    """Return the bytes per second and direction of a GPU's NVLinks, or of its PCIe slot; None if it is unknown."""
    if device.type != "cuda":
        return None
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return _nvlinks(pynvml, handle) or _pcie(pynvml, handle)
    except Exception:  # ROCm has no NVML, and virtual GPUs answer not all queries
        return None


def _nvlinks(nvml: Any, handle: Any) -> float:
    total = 0.0
    for number in range(_MAX_NVLINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, number):
                total += _NVLINK.get(nvml.nvmlDeviceGetNvLinkVersion(handle, number), 0.0)
        except nvml.NVMLError:
            break  # there are no more
    return total


def _pcie(nvml: Any, handle: Any) -> float | None:
    generation, lanes = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    return _PCIE_LANE.get(generation, 0.0) * lanes or None
