"""Callbacks: user code that follows a run on rank 0, and can log values and stop the run.

They are called between steps and take part in no communication. What they ask for is a vote that all ranks agree on,
as they do on signals, so a callback cannot make ranks diverge.
"""

import bdb
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline import extensions
from paceline.config.recipe import Recipe
from paceline.distributed.world import World
from paceline.errors import USER_CODE_ERRORS, UserError, raised
from paceline.extensions import Extension
from paceline.system.logs import log
from paceline.track.records import RunFolder
from paceline.track.sinks import Sink

STOP, FAILED = 1, 2
"""Votes of rank 0."""
_MAX_TEXT = 1000  # characters of a logged string
_REQUEST_SECONDS = 1.0  # between looks for a request to stop, which may be on a slow shared file system
_INT64 = range(-(2**63), 2**63)


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
    _refused: set[str] = field(default_factory=set)
    """Names of values that were not logged; there is one warning for each."""

    def log(self, **values: Any) -> None:
        """Write a record of kind `callback` to metrics.jsonl; numbers also go to TensorBoard and other trackers.

        Values are finite numbers, also of numpy or as 0-d tensors, and strings. Others are left out with a warning.
        """
        plain = {name: _plain(value) for name, value in values.items() if isinstance(_plain(name), str)}
        kept = {name: value for name, value in plain.items() if value is not None}
        for name in sorted(values.keys() - kept.keys() - self._refused):
            self._refused.add(name)
            log.warning(
                "run.log: %s is not recorded. A value is a finite number, an integer of at most 64 bits or a valid "
                "string of at most %d characters.",
                *(ascii(name)[:60], _MAX_TEXT),
            )
        assert self._sink
        if kept:
            self._sink.write({"kind": "callback", "step": self.step, "values": kept})

    def stop(self, reason: str = "") -> None:
        """End the run after this step: it is evaluated, checkpointed and finished there. The first reason counts."""
        text = str(reason).encode(errors="replace").decode()[:_MAX_TEXT]
        self._stop = self._stop or text or "no reason given"


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
    cause: BaseException | None = None
    """The exception of the failure."""
    stopped_by: str = ""
    """The name of the callback that asked to stop."""
    requests: RunFolder | None = None
    """Where other processes ask the run to end; None on ranks other than 0."""
    _looked: float = -math.inf
    _pending: Path | None = None
    """A checkpoint that is being written."""

    @classmethod
    def create(cls, recipe: Recipe, world: World, folder: RunFolder, total_steps: int, first_step: int) -> "Callbacks":
        """Return the callbacks of a recipe. An error in a constructor is raised on all ranks."""
        run = RunInfo(folder.path, recipe, world.size, first_step, total_steps, first_step)
        created = cls(run, requests=folder if world.is_rank_zero else None)

        def construct() -> None:
            created.active = [_construct(name, options) for name, options in recipe.callbacks.items()]

        world.on_rank_zero(construct)
        return created

    @property
    def vote(self) -> int:
        """What rank 0 asks for after this step."""
        return FAILED if self.failure else STOP if self.run._stop else 0

    def start(self, sink: Sink) -> None:
        self.run._sink = sink
        self._call("on_start", self.run)

    def step(self, step: int, epoch: float, lr: float, loss: torch.Tensor, writing: bool) -> None:
        """`writing`: a checkpoint is still being written."""
        if self.active:
            self.run.step = step
            info = StepInfo(step, epoch, lr, loss)
            self._call("on_step", self.run, info)
            if self._pending and not writing:
                self.checkpoint_written()
        if self.requests and time.monotonic() - self._looked >= _REQUEST_SECONDS:
            self._look_for_request(self.requests)

    def _look_for_request(self, folder: RunFolder) -> None:
        """Vote to stop if another process asks for it."""
        self._looked = time.monotonic()
        if request := folder.requested_stop():
            by, reason = request
            self.run.stop(reason)
            self.stopped_by = self.stopped_by or by

    def evaluation(self, record: dict[str, Any]) -> None:
        self._call("on_evaluation", self.run, dict(record))

    def checkpoint(self, path: Path | None) -> None:
        """Remember a checkpoint whose writing has started."""
        self._pending = path

    def checkpoint_written(self) -> None:
        """Notify callbacks of the last checkpoint, if it is complete."""
        path, self._pending = self._pending, None
        if path and (path / "COMMIT").exists():
            self._call("on_checkpoint", self.run, path)

    def early_stop(self, step: int) -> dict[str, Any]:
        """Return what the summary says about a run that a callback stopped before its last step."""
        reason, planned = self.run._stop, self.run.total_steps
        if not reason or step == planned:
            return {}
        return {"stopped_by": self.stopped_by, "stop_reason": reason, "total_steps": step}

    def end(self, summary: dict[str, Any]) -> None:
        self._call("on_end", self.run, dict(summary), final=True)
        if (folder := self.requests) and summary["status"] == "finished":  # the run may be continued later
            with suppress(OSError):
                folder.stop_request.unlink(missing_ok=True)

    def failed(self, message: str) -> None:
        self._call("on_failure", self.run, message, final=True)

    def _call(self, method: str, *arguments: Any, final: bool = False) -> None:
        """Call a method of all of them. An exception ends the run, unless it has ended already (`final`)."""
        for extension, callback in self.active:
            try:
                getattr(callback, method)(*arguments)
            except bdb.BdbQuit:
                raise
            except USER_CODE_ERRORS as error:
                message = str(extension.error(raised(error, method)))
                if final:
                    log.warning("%s", message)
                if not self.failure:
                    self.failure, self.cause = message, error
            if self.run._stop and not self.stopped_by:
                self.stopped_by = extension.name


def _plain(value: Any) -> float | str | None:
    """Return a value as JSON has it, None if it cannot be recorded."""
    if getattr(value, "ndim", None) == 0:  # numbers of numpy, and tensors
        value = value.item()
    if isinstance(value, str):
        valid = len(value) <= _MAX_TEXT and not any("\ud800" <= letter <= "\udfff" for letter in value)
        return value if valid else None
    if isinstance(value, int):
        return value if value in _INT64 else None
    return value if isinstance(value, float) and math.isfinite(value) else None


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
