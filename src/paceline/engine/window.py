"""Metrics and times between two log records.

All times are intervals between points on one timeline: that of the compute stream on accelerators, of the clock on
CPUs. A window starts where the previous one ended, and compute is what no other part covers, so the parts add up to the
wall time. A batch that is decoded and copied while the stream still computes costs no time.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields

import torch

from paceline.system.device import between, now


@dataclass(frozen=True)
class StepResult:
    """The result of a step. Its tensors are on the device, and its times are known when the device is done."""

    loss: torch.Tensor
    correct: torch.Tensor
    sync_seconds: Callable[[], float]
    optimizer_seconds: Callable[[], float]


@dataclass(frozen=True)
class WindowFigures:
    """The figures of one rank since the last log record. Ranks gather them as one tensor."""

    steps: int
    loss: float
    """Sum over steps."""
    correct: int
    """On this rank."""
    first_bad: int
    """The first step with a loss that is not finite, counted from 0, or -1."""
    images: int
    """On all ranks."""
    data_seconds: float
    compute_seconds: float
    sync_seconds: float
    """NaN if not measured: under FSDP communication overlaps forward and backward."""
    optimizer_seconds: float
    num_corrupt: int = 0
    """Since the start of the run."""
    peak_memory: int = 0
    newest_checkpoint: int = -1
    """Its step, on rank 0."""
    compile_seconds: float = 0.0
    """Not part of the times above."""

    @property
    def seconds(self) -> dict[str, float]:
        """The measured parts of the time, by name."""
        parts = {
            "data": self.data_seconds,
            "compute": self.compute_seconds,
            "sync": self.sync_seconds,
            "optimizer": self.optimizer_seconds,
        }
        return {name: seconds for name, seconds in parts.items() if not math.isnan(seconds)}

    def pack(self) -> torch.Tensor:
        """Return all fields as float64, which holds integers up to 2**53 exactly."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "WindowFigures":
        """Return the figures that a rank packed."""
        pairs = zip(fields(cls), packed.tolist(), strict=True)
        return cls(**{field.name: int(value) if field.type is int else value for field, value in pairs})


class Window:
    """Accumulates results since the last log record. Tensors stay on the device until `take`."""

    def __init__(self, device: torch.device):
        self._device = device
        self.steps: list[StepResult] = []
        self.images = 0
        self._data_seconds: list[Callable[[], float]] = []
        self.restart()

    def restart(self) -> None:
        """Begin after a pause that belongs to no window."""
        self._begin = now(self._device)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Measure how long the stream is idle until the next batch has arrived."""
        begin = now(self._device)
        yield
        self._data_seconds.append(between(begin, now(self._device)))

    def add(self, step: StepResult, images: int) -> None:
        self.steps.append(step)
        self.images += images

    def take(self) -> WindowFigures:
        """Return the figures since the last call, and reset."""
        begin, end = self._begin, now(self._device)
        losses = torch.stack([step.loss for step in self.steps]).cpu().double()  # synchronizes with the device
        bad = (~losses.isfinite()).nonzero()
        data = sum(seconds() for seconds in self._data_seconds)
        sync = sum(step.sync_seconds() for step in self.steps)
        optimizer = sum(step.optimizer_seconds() for step in self.steps)
        figures = WindowFigures(
            steps=len(losses),
            loss=losses.sum().item(),
            correct=int(torch.stack([step.correct for step in self.steps]).sum()),
            first_bad=int(bad[0]) if len(bad) else -1,
            images=self.images,
            data_seconds=data,
            compute_seconds=between(begin, end)() - data - optimizer - (0.0 if math.isnan(sync) else sync),
            sync_seconds=sync,
            optimizer_seconds=optimizer,
        )
        self.steps, self.images, self._data_seconds, self._begin = [], 0, [], end
        return figures
