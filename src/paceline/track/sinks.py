"""Where records go besides metrics.jsonl. A sink that fails is dropped with a warning; training goes on."""

from pathlib import Path
from typing import Any, Protocol

from paceline.base.logs import log


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=first_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        step = record["step"]
        for tag, value in scalars(record):
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


def scalars(record: dict[str, Any]) -> list[tuple[str, float]]:
    """Tags in this field's words, for TensorBoard and its like."""
    match record["kind"]:
        case "train":
            times = [(f"Time/{name}", seconds) for name, seconds in record["seconds"].items()]
            return [
                ("Loss/train", record["loss"]),
                ("Accuracy/train", record["top1"]),
                ("LearningRate", record["lr"]),
                ("Throughput/images_per_second", record["images_per_second"]),
                *times,
            ]
        case "eval":
            return [
                ("Loss/val", record["loss"]),
                ("Accuracy/val", record["top1"]),
                ("Accuracy5/val", record["top5"]),
            ]
    return []


class Guarded:
    """Passes records on until the sink fails for the first time; a persistent sink is tried again every time."""

    def __init__(self, sink: Sink, persistent: bool = False):
        self._sink: Sink | None = sink
        self._persistent = persistent
        self._warned = False

    def write(self, record: dict[str, Any]) -> None:
        if self._sink:
            try:
                self._sink.write(record)
                self._warned = False
            except Exception as error:
                if not self._warned:
                    fate = "will be tried again" if self._persistent else "stopped"
                    log.warning("%s %s: %s", type(self._sink).__name__, fate, error)
                self._warned = True
                self._sink = self._sink if self._persistent else None

    def close(self) -> None:
        if self._sink:
            try:
                self._sink.close()
            except Exception as error:
                log.warning("%s did not close: %s", type(self._sink).__name__, error)


class Fan:
    """One sink that is many; with none, the null object of ranks that write nothing."""

    def __init__(self, sinks: list[Sink]):
        self._sinks = sinks

    def write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
