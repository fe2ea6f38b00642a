"""Destinations of records. A sink that fails is dropped with a warning, and training continues."""

import contextlib
import hashlib
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from paceline.config.io import leaves
from paceline.errors import UserError
from paceline.system.files import disk_error
from paceline.system.host import BackgroundThread
from paceline.system.logs import log
from paceline.system.packages import needs_package


class Sink(Protocol):
    """A destination of records."""

    def write(self, record: dict[str, Any]) -> None: ...

    def flush(self) -> None:
        """Write buffered records to disk. Raises OSError if the disk is full."""

    def close(self, status: str = "finished") -> None:
        """`status` is the run's: finished, interrupted or failed."""


def scalars(record: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (tag, value) pairs for TensorBoard and other trackers."""
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
        case "eval" | "test" as kind:
            split = "val" if kind == "eval" else kind
            return [
                (f"Loss/{split}", record["loss"]),
                (f"Accuracy/{split}", record["top1"]),
                (f"Accuracy5/{split}", record["top5"]),
            ]
        case "callback":
            return [
                (f"Callback/{name}", value) for name, value in record["values"].items() if not isinstance(value, str)
            ]
    return []


class WeightsAndBiases:
    """Logs to Weights & Biases."""

    def __init__(self, folder: Path, identity: str, project: str, recipe: dict[str, Any]):
        with needs_package("wandb", "log.wandb", extra="wandb", otherwise="set log.wandb to false"):
            import wandb

        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=recipe,
            reinit="create_new",
        )

    def write(self, record: dict[str, Any]) -> None:
        if values := dict(scalars(record)):
            self._run.log(values | {"epoch": record.get("epoch")}, step=record["step"])

    def flush(self) -> None: ...

    def close(self, status: str = "finished") -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


class MLflow:
    """Logs to the MLflow server in MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, identity: str, project: str, recipe: dict[str, Any]):
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            message = "log.mlflow needs the address of a server. Set MLFLOW_TRACKING_URI."
            raise UserError("mlflow-server-not-set", message)
        with needs_package("mlflow", "log.mlflow", extra="mlflow", otherwise="set log.mlflow to false"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)
        same = self._client.search_runs([experiment], f"tags.`paceline.run` = '{identity}'")
        made = same or [self._client.create_run(experiment, run_name=folder.name, tags={"paceline.run": identity})]
        self._run = made[0].info.run_id
        if same:
            self._client.update_run(self._run, "RUNNING")
            return  # parameters cannot be logged again
        settings = [Param(key, str(value)) for key, value in leaves(recipe)]
        for begin in range(0, len(settings), limit := 100):
            self._client.log_batch(self._run, params=settings[begin : begin + limit])

    def write(self, record: dict[str, Any]) -> None:
        now = int(1000 * time.time())
        if values := [self._metric(tag, value, now, record["step"]) for tag, value in scalars(record)]:
            self._client.log_batch(self._run, metrics=values)

    def flush(self) -> None: ...

    def close(self, status: str = "finished") -> None:
        statuses = {"finished": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._run, statuses.get(status, "KILLED"))


def identity(folder: Path, started: str) -> str:
    """Return the tracker id of a run, which stays the same when it is resumed, but not when it is replaced."""
    return hashlib.sha256(f"{folder.resolve()} {started}".encode()).hexdigest()[:12]


class InBackground:
    """Passes records to a slow sink in a background thread, so that training never waits for it.

    Records are dropped if the sink cannot keep up, and closing has a timeout; both log a warning.
    """

    def __init__(self, make: Callable[[], Sink], name: str, close_timeout: float = 20.0):
        self._queue: queue.Queue[dict[str, Any] | str] = queue.Queue(maxsize=1000)
        self._make, self._name, self._close_timeout = make, name, close_timeout
        self._dropped = 0
        self._thread = BackgroundThread(self._work, name)
        self._thread.start()

    def _work(self) -> None:
        sink = started(self._make, self._name)
        while not isinstance(record := self._queue.get(), str):
            sink.write(record)
        sink.close(record)

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None: ...

    def close(self, status: str = "finished") -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(status)
        self._thread.join(self._close_timeout)
        if self._thread.is_alive():
            log.warning(
                "%s did not finish within %g s; records that it has not sent are in metrics.jsonl",
                *(self._name, self._close_timeout),
            )
        if self._dropped:
            log.warning("%s was too slow and missed %d records; they are in metrics.jsonl", self._name, self._dropped)


class DiskWarning:
    """Warns once if the disk refuses records, and again only after all records could be written."""

    def __init__(self) -> None:
        self._warned = False

    def warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("%s. Training continues, and unwritten records are kept in memory", disk_error(error))
        self._warned = True

    def clear(self) -> None:
        if self._warned:
            log.info("the disk accepts writes again; all records are on disk")
        self._warned = False


class Guarded:
    """Passes records to a sink until it fails for the first time.

    With `disk`, a sink that fails with OSError is kept, because it buffers its records, and `disk` warns.
    """

    def __init__(self, sink: Sink, disk: DiskWarning | None = None):
        self._sink: Sink | None = sink
        self._disk = disk

    def write(self, record: dict[str, Any]) -> None:
        try:
            if self._sink:
                self._sink.write(record)
        except Exception as error:
            if self._disk and isinstance(error, OSError):
                self._disk.warn(error)
            else:
                log.warning("%s stopped: %s", type(self._sink).__name__, error)
                self._sink = None

    def flush(self) -> None:
        if self._sink:
            self._sink.flush()

    def close(self, status: str = "finished") -> None:
        try:
            if self._sink:
                self._sink.close(status)
        except Exception as error:
            if not (self._disk and isinstance(error, OSError)):  # `disk` has warned already
                log.warning("%s did not close: %s", type(self._sink).__name__, error)


def started(make: Callable[[], Sink], name: str, disk: DiskWarning | None = None) -> Sink:
    """Return the guarded sink, or one that ignores all records if it cannot be started."""
    try:
        return Guarded(make(), disk)
    except Exception as error:
        log.warning("%s stopped: %s", name, error)
        return MultiSink([])


class MultiSink:
    """Passes records to several sinks; without sinks, the null object of ranks that write nothing."""

    def __init__(self, sinks: list[Sink]):
        self._sinks = sinks

    def write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def flush(self) -> None:
        for sink in self._sinks:
            sink.flush()

    def close(self, status: str = "finished") -> None:
        for sink in self._sinks:
            sink.close(status)
