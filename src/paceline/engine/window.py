"""Metrics and times between two log records."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from paceline.engine.clock import Clock

SPLIT = ("data", "compute", "sync", "optimizer")


@dataclass(frozen=True)
class StepResult:
    """The result of a step. Its tensors are on the device, and its times are known when the device is done."""

    loss: torch.Tensor
    correct: torch.Tensor
    sync_seconds: Callable[[], float]
    optimizer_seconds: Callable[[], float]


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

    def take(self) -> torch.Tensor:
        """Return [steps, loss, correct, first non-finite step or -1, images, *seconds by SPLIT] and reset."""
        losses = torch.stack([step.loss for step in self.steps]).double().cpu()  # synchronizes with the device
        bad = (~losses.isfinite()).nonzero()
        wall = time.perf_counter() - self._begin
        data = self.clock.take().get("data", 0.0)
        sync = sum(step.sync_seconds() for step in self.steps)
        optimizer = sum(step.optimizer_seconds() for step in self.steps)
        rest = wall - data - optimizer - (0.0 if math.isnan(sync) else sync)
        correct = torch.stack([step.correct for step in self.steps]).sum().item()
        first_bad = bad[0].item() if len(bad) else -1
        figures = [len(losses), losses.sum().item(), correct, first_bad, self.images, data, rest, sync, optimizer]
        self.steps, self.images = [], 0
        self.restart()
        return torch.tensor(figures, dtype=torch.float64)
