"""What happens between two log records, and where its time went."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from paceline.engine.clock import Clock

SPLIT = ("data", "compute", "sync", "optimizer")


@dataclass(frozen=True)
class Step:
    """What a step did; its tensors are still on the device, its times are known when that is done."""

    loss: torch.Tensor
    correct: torch.Tensor
    sync_seconds: Callable[[], float]
    optimizer_seconds: Callable[[], float]


class Window:
    """What happened since the last log record. Tensors stay on the device until somebody looks."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.images = 0
        self.clock = Clock()
        self.restart()

    def restart(self) -> None:
        self._begin = time.perf_counter()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        with self.clock.part("data"):
            yield

    def add(self, step: Step, images: int) -> None:
        self.steps.append(step)
        self.images += images

    def take(self) -> torch.Tensor:
        """This rank's [steps, loss, correct, first bad step or -1, images, seconds as split]; then anew."""
        losses = torch.stack([step.loss for step in self.steps]).double().cpu()  # waits for the device: when logging
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
