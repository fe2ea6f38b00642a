"""Progress display of rank 0: a live bar on a terminal, plain lines elsewhere. Other ranks show nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from paceline.system.logs import console, log
from paceline.system.progress_bar import OneLineProgress, steps_of


class Evaluation(Protocol):
    """The number of samples to evaluate: on all ranks, and on this rank."""

    num_samples: int
    rank_samples: int


class Display:
    """Shows nothing, for ranks other than 0."""

    def step(self, step: int) -> None: ...

    def train(self, record: dict[str, Any]) -> None: ...

    @contextmanager
    def evaluating(self, work: Evaluation, what: str = "evaluating") -> Iterator[Callable[[int], object]]:
        """Show an evaluation. Yields a function to call with the number of samples of every batch."""
        yield lambda _: None

    def evaluated(self, record: dict[str, Any]) -> None: ...

    def tested(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Lines(Display):
    """Logs a line per evaluation, and one every `quiet_seconds` in between."""

    quiet_seconds = 30.0

    def __init__(self) -> None:
        self._pending: dict[str, Any] = {}
        self._last_line = time.monotonic()

    def train(self, record: dict[str, Any]) -> None:
        self._pending = record
        if time.monotonic() - self._last_line > self.quiet_seconds:
            self._log(_place(record) + "".join(_training(record)))
            self._pending = {}

    @contextmanager
    def evaluating(self, work: Evaluation, what: str = "evaluating") -> Iterator[Callable[[int], object]]:
        seen = 0

        def advance(samples: int) -> None:
            nonlocal seen
            seen += samples
            if time.monotonic() - self._last_line > self.quiet_seconds:
                self._log(f"{what}: {seen / work.rank_samples:.0%}")

        yield advance

    def evaluated(self, record: dict[str, Any]) -> None:
        train, speed = _training(self._pending) if self._pending else ("", "")
        self._log(f"{_place(record)}{train}  val loss {record['loss']:.4f}  val top-1 {record['top1']:.2%}{speed}")
        self._pending = {}

    def tested(self, record: dict[str, Any]) -> None:
        counts = f"{record['correct']:,.0f} of {record['samples']:,.0f} images"
        self._log(f"test of step {record['step']}: top-1 {record['top1']:.2%} ({counts}), loss {record['loss']:.4f}")

    def _log(self, line: str) -> None:
        log.info("%s", line)
        self._last_line = time.monotonic()


class Bar(Lines):
    """A progress bar with loss, accuracy, images/s and time left, below the lines."""

    quiet_seconds = float("inf")  # the bar shows progress

    def __init__(self, total_steps: int = 0, first_step: int = 0):
        super().__init__()
        self._progress = OneLineProgress(steps_of, lambda task: task.fields["figures"], console)
        if total_steps:
            self._task = self._progress.add_task("training", total=total_steps, completed=first_step, figures=())
        self._progress.start()

    def step(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def train(self, record: dict[str, Any]) -> None:
        super().train(record)
        figures = (  # most important first
            f"epoch {record['epoch']:.1f}",
            f"loss {record['loss']:.3f}",
            f"train top-1 {record['top1']:.1%}",
            f"{record['images_per_second']:,.0f} images/s",
        )
        self._progress.update(self._task, figures=figures)

    @contextmanager
    def evaluating(self, work: Evaluation, what: str = "evaluating") -> Iterator[Callable[[int], object]]:
        task = self._progress.add_task(what, total=work.num_samples, figures=())
        factor = work.num_samples / max(1, work.rank_samples)  # assumes that the other ranks are as far as this one
        try:
            yield lambda samples: self._progress.advance(task, samples * factor)
        finally:
            self._progress.remove_task(task)

    def close(self) -> None:
        self._progress.stop()


def _place(record: dict[str, Any]) -> str:
    return f"epoch {record['epoch']:.2f}  step {record['step']}"


def _training(record: dict[str, Any]) -> tuple[str, str]:
    seconds = record["seconds"]
    total = sum(seconds.values()) or 1.0
    split = ", ".join(f"{name} {seconds[name] / total:.0%}" for name in ("data", "compute", "sync") if name in seconds)
    return f"  loss {record['loss']:.4f}", f"  {record['images_per_second']:,.0f} images/s ({split})"


def display(shown: bool, total_steps: int = 0, first_step: int = 0) -> Display:
    """Return a progress bar on a terminal, else lines; nothing unless it is to be shown, on rank 0."""
    if not shown:
        return Display()
    return Bar(total_steps, first_step) if console.is_terminal else Lines()
