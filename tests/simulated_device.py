"""A device with streams and a clock of its own, simulated on the CPU.

Kernels and copies take time on their stream, the host takes time only where a test says so or where it waits. Every
call is recorded with the stream that it was made on.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline.data.load import batch, decode, in_memory
from paceline.system import device

COMPUTE, COPY = "compute", "copy"


class SimulatedDevice:
    """Replaces streams, events and pinned memory of torch for the CPU device."""

    def __init__(self, copy_seconds: float = 0.0) -> None:
        self.host = 0.0
        self.calls: list[tuple[str, str]] = []
        """(call, stream) in the order of the host."""
        self.copy_seconds = copy_seconds
        self.buffers = 0
        """Pinned buffers that were allocated."""
        self.compute = _Stream(self, COMPUTE)
        self.current = self.compute

    def install(self, replace: Callable[[Any, str, Any], None]) -> None:
        """`replace` is setattr, or monkeypatch.setattr to undo it."""
        replace(time, "perf_counter", lambda: self.host)
        for module in (device, batch, decode, in_memory):
            replace(module, "has_streams", lambda _: True)
        replace(device, "has_events", lambda _: True)
        replace(torch, "Stream", lambda _: _Stream(self, COPY))
        replace(torch, "Event", lambda _=None, enable_timing=False: _Event(self, enable_timing))
        replace(torch.accelerator, "current_stream", lambda _=None: self.current)
        replace(torch.accelerator, "synchronize", lambda _=None: self.wait())
        replace(torch.Tensor, "record_stream", lambda tensor, stream: self.calls.append(("record_stream", stream.name)))
        replace(device, "pinned", self._pinned)
        replace(decode, "host_buffer", self._host_buffer)
        copy_ = torch.Tensor.copy_

        def copied(self_: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if self.current is not self.compute:
                assert non_blocking, "a blocking copy"
                self.calls.append((f"copy {source.dtype}".replace("torch.", ""), self.current.name))
                self.run(self.copy_seconds)
            return copy_(self_, source)

        replace(torch.Tensor, "copy_", copied)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append((f"pinned {tensor.dtype}".replace("torch.", ""), "host"))
        return tensor

    def _host_buffer(self, shape: tuple[int, ...], _device: torch.device) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(shape, dtype=torch.uint8)

    def run(self, seconds: float) -> None:
        """Enqueue a kernel on the current stream; the host goes on."""
        self.current.done = max(self.current.done, self.host) + seconds

    def wait(self) -> None:
        """Let the host wait for the compute stream."""
        self.host = max(self.host, self.compute.done)


class _Stream(AbstractContextManager["_Stream"]):
    def __init__(self, owner: SimulatedDevice, name: str) -> None:
        self.owner, self.name, self.done = owner, name, 0.0

    def __enter__(self) -> "_Stream":
        self._before, self.owner.current = self.owner.current, self
        return self

    def __exit__(self, *_: object) -> None:
        self.owner.current = self._before

    def wait_event(self, event: "_Event") -> None:
        self.owner.calls.append(("wait_event", self.name))
        assert event.time is not None, "waits for an event that was not recorded"
        self.done = max(self.done, event.time)


class _Event:
    def __init__(self, owner: SimulatedDevice, timing: bool) -> None:
        self.owner, self.timing, self.time = owner, timing, None

    def record(self, stream: _Stream) -> None:
        if not self.timing:
            self.owner.calls.append(("record", stream.name))
        stream.done = max(stream.done, self.owner.host)
        self.time = stream.done

    def query(self) -> bool:
        return self.time is not None and self.time <= self.owner.host

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")

    def elapsed_time(self, end: "_Event") -> float:
        assert self.timing
        assert end.timing
        return 1000 * (end.time - self.time)
