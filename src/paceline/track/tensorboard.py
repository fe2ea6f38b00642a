"""Writes TensorBoard event files."""

import io
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from paceline.config.io import leaves
from paceline.system.files import GrowingFile, make_folder
from paceline.system.host import host_name
from paceline.track.sinks import scalars

if TYPE_CHECKING:
    import numpy as np

_PLAIN = (bool, int, float, str)
_HPARAM_METRICS = ("Accuracy/val", "Loss/val", "Loss/train")
"""Metrics in TensorBoard's table of hyperparameters: tags of `scalars`."""


class TensorBoard:
    """Writes scalars by step, and again by images seen, to compare runs with different batch sizes.

    torch's SummaryWriter is not used because its thread ends with a traceback when the disk is full.
    """

    def __init__(self, folder: Path, first_step: int, recipe: dict[str, Any], examples: "np.ndarray | None" = None):
        """`examples`: a contact sheet of training images, uint8 (height, width, 3)."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        make_folder(folder)
        now = time.time()
        self._file = GrowingFile(folder / f"events.out.tfevents.{now:.6f}.{host_name()}.{os.getpid()}")
        self._events = io.BytesIO()  # the events of a record are written together
        self._records, self._event, self._summary = RecordWriter(self._events), Event, summary
        self._seen = 0
        start = SessionLog(status=SessionLog.START)  # hides events of an earlier start from this step on
        for event in (Event(file_version="brain.Event:2"), Event(step=first_step + 1, session_log=start)):
            event.wall_time = now
            self._records.write(event.SerializeToString())
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120)
        self._add(summary.text("recipe", f"```\n{text}\n```"), first_step)
        settings = {key: value for key, value in leaves(recipe) if not key.startswith("about.")}
        plain = {key: value if isinstance(value, _PLAIN) else str(value) for key, value in settings.items()}
        for part in summary.hparams(plain, dict.fromkeys(_HPARAM_METRICS, 0.0)):
            self._add(part, first_step)
        if examples is not None:
            self._add(summary.image("examples", examples, dataformats="HWC"), first_step)
        self._write_events()

    def _add(self, content: Any, step: int) -> None:
        self._records.write(self._event(wall_time=time.time(), step=step, summary=content).SerializeToString())

    def write(self, record: dict[str, Any]) -> None:
        step = record["step"]
        self._seen += record.get("images", 0)
        for tag, value in scalars(record):
            self._add(self._summary.scalar(tag, value), step)
            if tag.startswith(("Loss", "Accuracy")):
                self._add(self._summary.scalar(f"by images/{tag}", value), self._seen)
        self._write_events()

    def _write_events(self) -> None:
        content = self._events.getvalue()
        self._events.seek(0)
        self._events.truncate()
        self._file.write(content)

    def flush(self) -> None:
        self._file.flush()

    def close(self, status: str = "finished") -> None:
        self._file.close()
