"""Callbacks: user code that follows a run on rank 0, and can log values and stop the run.

They are called between steps and take part in no communication. What they ask for is a vote that all ranks agree on,
as they do on signals, so a callback cannot make ranks diverge.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline import extensions
from paceline.config.recipe import Recipe
from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.extensions import Extension
from paceline.system.logs import log
from paceline.track.records import RunFolder
from paceline.track.sinks import Sink

STOP, FAILED = 1, 2
"""Votes of rank 0."""


@dataclass(frozen=True)
class StepInfo:
    """A completed training step."""

    step: int
    """Steps done so far."""
    epoch: float
    lr: float
    _loss: torch.Tensor

    @property
    def loss(self) -> float:
        """The loss of rank 0. Reading it waits for the device, so do not read it at every step on a GPU."""
        return self._loss.item()


@dataclass
class RunInfo:
    """What a callback knows about its run, and what it can ask for."""

    path: Path
    recipe: Recipe
    world_size: int
    first_step: int
    total_steps: int
    step: int = 0
    """Steps done so far."""
    _sink: Sink | None = None
    _stop: str = ""

    def log(self, **values: float | str) -> None:
        """Write a record of kind `callback` to metrics.jsonl; numbers also go to TensorBoard and other trackers."""
        for name, value in values.items():
            if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
                raise TypeError(f"log({name}={value!r:.60}): the value is not a finite number or a string")
        assert self._sink
        self._sink.write({"kind": "callback", "step": self.step, "values": values})

    def stop(self, reason: str) -> None:
        """End the run after this step: it is evaluated, checkpointed and finished there."""
        self._stop = reason


class Callback:
    """Base class of callbacks. Override the methods you need; all are called on rank 0 only."""

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step, also of a resumed run (`run.first_step` > 0)."""

    def on_step(self, run: RunInfo, step: StepInfo) -> None:
        """Called after every step."""

    def on_evaluation(self, run: RunInfo, metrics: Mapping[str, Any]) -> None:
        """Called after every evaluation, with its record: top1, top5, loss, ..."""

    def on_checkpoint(self, run: RunInfo, path: Path) -> None:
        """Called when a checkpoint is complete on disk."""

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        """Called when the run is finished or interrupted (`summary["status"]`)."""

    def on_failure(self, run: RunInfo, message: str) -> None:
        """Called when the run has failed."""


@dataclass
class Callbacks:
    """The callbacks of a run; ranks other than 0 have none."""

    run: RunInfo
    active: list[tuple[Extension, Callback]] = field(default_factory=list)
    failure: str = ""
    _pending: Path | None = None
    """A checkpoint that is being written."""

    @classmethod
    def create(cls, recipe: Recipe, world: World, folder: RunFolder, total_steps: int, first_step: int) -> "Callbacks":
        """Return the callbacks of a recipe. An error in a constructor is raised on all ranks."""
        run = RunInfo(folder.path, recipe, world.size, first_step, total_steps, first_step)
        created = cls(run)

        def construct() -> None:
            created.active = [_construct(name, options) for name, options in recipe.callbacks.items()]

        world.on_rank_zero(construct)
        return created

    @property
    def vote(self) -> int:
        """What rank 0 asks for after this step."""
        return FAILED if self.failure else STOP if self.run._stop else 0

    @property
    def reason(self) -> str:
        """Why a callback asked to stop."""
        return self.run._stop

    def start(self, sink: Sink) -> None:
        self.run._sink = sink
        self._call(lambda callback: callback.on_start(self.run))

    def step(self, step: int, epoch: float, lr: float, loss: torch.Tensor, writing: bool) -> None:
        """`writing`: a checkpoint is still being written."""
        if self.active:
            self.run.step = step
            info = StepInfo(step, epoch, lr, loss)
            self._call(lambda callback: callback.on_step(self.run, info))
            if self._pending and not writing:
                self.checkpoint_written()

    def evaluation(self, record: dict[str, Any]) -> None:
        self._call(lambda callback: callback.on_evaluation(self.run, dict(record)))

    def checkpoint(self, path: Path | None) -> None:
        """Remember a checkpoint whose writing has started."""
        self._pending = path

    def checkpoint_written(self) -> None:
        """Notify callbacks of the last checkpoint, if it is complete."""
        path, self._pending = self._pending, None
        if path and (path / "COMMIT").exists():
            self._call(lambda callback: callback.on_checkpoint(self.run, path))

    def end(self, summary: dict[str, Any]) -> None:
        self._call(lambda callback: callback.on_end(self.run, dict(summary)), final=True)

    def failed(self, message: str) -> None:
        self._call(lambda callback: callback.on_failure(self.run, message), final=True)

    def _call(self, notify: Callable[[Callback], None], final: bool = False) -> None:
        """Call all of them. An exception ends the run, unless it has ended already (`final`)."""
        for extension, callback in self.active:
            try:
                notify(callback)
            except Exception as error:
                problem = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                message = str(extension.error(problem))
                log.debug("%s", message, exc_info=error)
                if final:
                    log.warning("%s", message)
                self.failure = self.failure or message


def _construct(name: str, options: dict[str, Any]) -> tuple[Extension, Callback]:
    extension = extensions.find("callback", name)
    if extension is None:
        raise extensions.unknown("callback", "callbacks", name, ())
    callback = extension(**options)
    if not isinstance(callback, Callback):
        raise extension.error(f"returns {type(callback).__name__}, which is not derived from paceline.Callback")
    return extension, callback


def callback_error(message: str) -> UserError:
    return UserError("extension-failed", message, kind="callback")
