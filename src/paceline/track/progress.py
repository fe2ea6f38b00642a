"""What the user watches: a live bar on a terminal, plain lines elsewhere, nothing on ranks other than the leader."""

import time
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.base.logs import console, log


class Display(Protocol):
    def step(self, step: int) -> None: ...

    def train(self, record: dict[str, Any]) -> None: ...

    def evaluated(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Silent:
    def step(self, step: int) -> None: ...

    def train(self, record: dict[str, Any]) -> None: ...

    def evaluated(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line per evaluation, and one now and then in between."""

    quiet_seconds = 30.0

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        self._spoke = time.monotonic()

    def step(self, step: int) -> None: ...

    def train(self, record: dict[str, Any]) -> None:
        self._last = record
        if time.monotonic() - self._spoke > self.quiet_seconds:
            self._say(_training(record))

    def evaluated(self, record: dict[str, Any]) -> None:
        self._say(f"{_training(self._last)}  val loss {record['loss']:.4f}  top-1 {record['top1']:.2%}")

    def _say(self, line: str) -> None:
        log.info("%s", line)
        self._spoke = time.monotonic()

    def close(self) -> None: ...


class Bar(Lines):
    """A progress bar with loss, accuracy, images/s and time left, below the lines."""

    quiet_seconds = float("inf")  # the bar shows it

    def __init__(self, first_step: int, total_steps: int):
        super().__init__()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=first_step, figures="")
        self._progress.start()

    def step(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def train(self, record: dict[str, Any]) -> None:
        super().train(record)
        figures = f"loss {record['loss']:.3f}  top-1 {record['top1']:.1%}  {record['images_per_second']:,.0f} images/s"
        self._progress.update(self._task, figures=figures)

    def close(self) -> None:
        self._progress.stop()


def _training(record: dict[str, Any]) -> str:
    seconds = record["seconds"]
    total = sum(seconds.values()) or 1.0
    split = ", ".join(f"{name} {seconds[name] / total:.0%}" for name in ("data", "compute", "sync"))
    return (
        f"epoch {record['epoch']:.2f}  step {record['step']}  train loss {record['loss']:.4f}  "
        f"{record['images_per_second']:,.0f} images/s ({split})"
    )
