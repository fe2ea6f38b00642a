"""Metrics and times between two log records."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields

import torch

from paceline.engine.clock import Clock


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

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.images = 0
        self.clock = Clock()
        self.restart()

    def restart(self) -> None:
        self._begin = time.perf_counter()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        with self.clock.part("data"):
            yield

    def add(self, step: StepResult, images: int) -> None:
        self.steps.append(step)
        self.images += images

    def take(self) -> WindowFigures:
        """Return the figures since the last call, and reset."""
        losses = torch.stack([step.loss for step in self.steps]).cpu().double()  # synchronizes with the device
        bad = (~losses.isfinite()).nonzero()
        wall = time.perf_counter() - self._begin
        data = self.clock.take().get("data", 0.0)
        sync = sum(step.sync_seconds() for step in self.steps)
        optimizer = sum(step.optimizer_seconds() for step in self.steps)
        rest = wall - data - optimizer - (0.0 if math.isnan(sync) else sync)
        figures = WindowFigures(
            steps=len(losses),
            loss=losses.sum().item(),
            correct=int(torch.stack([step.correct for step in self.steps]).sum()),
            first_bad=int(bad[0]) if len(bad) else -1,
            images=self.images,
            data_seconds=data,
            compute_seconds=rest,
            sync_seconds=sync,
            optimizer_seconds=optimizer,
        )
        self.steps, self.images = [], 0
        self.restart()
        return figures
