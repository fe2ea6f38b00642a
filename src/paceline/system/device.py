"""The device of a rank: time, copies from host memory, and memory use. Only functions that say so wait for it.

CUDA and ROCm GPUs, both of type "cuda" in torch, have streams and copy from pinned memory while they compute. MPS has
one stream and events. CPUs compute synchronously, so the clock measures them.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def has_streams(device: torch.device) -> bool:
    """Return whether the device can copy from pinned host memory while it computes."""
    return device.type not in ("cpu", "mps")


def has_events(device: torch.device) -> bool:
    """Return whether the device computes asynchronously, so that only its own events can time it."""
    return device.type != "cpu"


def now(device: torch.device) -> Any:
    """Return a point in time: of the clock on CPUs, else an event on the current stream, which does not block it."""
    if not has_events(device):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def between(begin: Any, end: Any) -> Callable[[], float]:
    """Return a function for the seconds between two points, to be called when the device is done."""
    if isinstance(begin, float):
        return lambda: end - begin
    return lambda: begin.elapsed_time(end) / 1000


def wait(device: torch.device) -> None:
    """Wait until the device is done."""
    if has_events(device):
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes so far: allocated on the accelerator, or resident in the process on CPUs."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()  # it keeps what it frees, so this is the peak
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return 0


def release_memory(device: torch.device) -> None:
    """Free the memory of what is no longer used, and let the peak begin anew."""
    gc.collect()
    if device.type in ("cuda", "xpu"):
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU as the kernel writes it, or "" if torch does not know it."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:  # not every build of torch has them
        return ""
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def host_buffer(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return uninitialized uint8 host memory for copies to the device."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=has_streams(device))


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in pinned memory. torch reuses that memory only after pending copies from it."""
    return tensor if tensor.is_pinned() else tensor.pin_memory()


@dataclass(frozen=True)
class Upload:
    """Tensors that are being copied to the device."""

    tensors: tuple[torch.Tensor, ...]
    copied: torch.Event | None
    """Recorded right after the copies; None if they are complete, or if there was nothing to copy."""

    def arrive(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors for use on the current stream, which waits for the copies; the host does not."""
        if self.copied:
            stream = torch.accelerator.current_stream(self.tensors[0].device)
            stream.wait_event(self.copied)
            for tensor in self.tensors:
                tensor.record_stream(stream)  # their memory belongs to the copy stream, which must not reuse it before
        return self.tensors


class Uploader:
    """Copies host tensors to the device, on a stream of its own where there are streams."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.Stream(device) if has_streams(device) else None

    def start(self, *tensors: torch.Tensor) -> Upload:
        """Start to copy. Without streams the copies are complete on return, and tensors of the CPU stay as they are."""
        if self._stream is None:
            return Upload(tuple(tensor.to(self._device) for tensor in tensors), None)
        with self._stream:
            copies = tuple(
                torch.empty_like(tensor, device=self._device).copy_(pinned(tensor), non_blocking=True)
                for tensor in tensors
            )
            copied = torch.Event(self._device)
            copied.record(self._stream)
        return Upload(copies, copied)
