import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HANG, raises

from paceline.config.recipe import Recipe, Train
from paceline.config.timeline import Timeline
from paceline.engine.interval import IntervalTrigger
from paceline.system.files import FolderLock, replacing
from paceline.system.logs import log
from paceline.track.json_lines import JsonLines
from paceline.track.records import RunFolder
from paceline.track.sinks import DiskWarning, Guarded, InBackground, MLflow, WeightsAndBiases, identity
from paceline.track.tensorboard import TensorBoard


def _train(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step, "steps": 1, "images": 1, "seconds": {}}


def test_records_of_repeated_steps_count_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines = JsonLines(folder.metrics)
    for step in (1, 2, 3):
        lines.write(_train(step) | {"loss": math.nan})
    lines.close()
    with folder.metrics.open("a") as file:
        file.write('{"kind": "train", "st')  # killed while writing a line
    again = JsonLines(folder.metrics)
    again.write({"kind": "resume", "step": 2})
    again.write(_train(3) | {"loss": 0.1 + 0.2})
    again.close()
    records = list(folder.records())
    assert [(record["kind"], record["step"]) for record in records] == [
        ("train", 1),
        ("train", 2),
        ("resume", 2),
        ("train", 3),
    ]
    assert records[0]["loss"] is None
    assert records[-1]["loss"] == 0.3
    assert folder.num_corrupt == 0
    folder.metrics.write_text("garbage\n" + folder.metrics.read_text())
    folder.records()
    assert folder.num_corrupt == 1


def test_failing_sink_is_dropped() -> None:
    class Broken:
        calls = 0

        def write(self, record: dict) -> None:
            self.calls += 1
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise AssertionError("closed after it was dropped")

    broken = Broken()
    guarded = Guarded(broken)
    guarded.write({"kind": "train"})
    guarded.write({"kind": "train"})
    guarded.close()
    assert broken.calls == 1


def test_records_of_a_full_disk_are_written_when_there_is_space(tmp_path: Path, caplog) -> None:
    log.propagate = True
    caplog.set_level("INFO", "paceline")
    lines, disk = JsonLines(tmp_path / "metrics.jsonl"), DiskWarning()
    guarded = Guarded(lines, disk)
    guarded.write(_train(1))

    class Full:
        """Accepts five bytes, then none."""

        room = 5

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            took, self.room = self.room, 0
            return file.write(data[:took])

    growing = lines._file
    file, growing._file = growing._file, Full()  # type: ignore[assignment]
    guarded.write(_train(2))
    guarded.write(_train(3))
    assert [record["step"] for record in RunFolder(tmp_path).records()] == [1]
    with pytest.raises(OSError, match="No space"):
        guarded.flush()
    assert caplog.text.count(f"{tmp_path / 'metrics.jsonl'}: No space left on device (") == 1
    assert caplog.text.count("Training continues") == 1
    growing._file = file
    guarded.flush()
    disk.clear()
    guarded.write(_train(4))
    guarded.close()
    assert caplog.text.count("the disk accepts writes again") == 1
    assert [record["step"] for record in RunFolder(tmp_path).records()] == [1, 2, 3, 4]


def test_records_without_per_rank_values_are_not_corrupt(tmp_path: Path) -> None:
    """Their lines no longer match their checksums."""
    folder = RunFolder(tmp_path)
    lines = JsonLines(folder.metrics)
    for step in range(1, 9):
        lines.write(_train(step) | {"seconds_per_rank": {"data": [0.1, 0.2]}, "memory_per_rank": [1, 2]})
    lines.close()
    records = folder.records(per_rank=2)
    assert [record["step"] for record in records] == list(range(1, 9))
    assert sum("seconds_per_rank" in record for record in records) == 2
    assert folder.num_corrupt == 0


def test_flipped_bit_in_the_last_record_is_counted_as_corrupt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines = JsonLines(folder.metrics)
    for step in (1, 2):
        lines.write(_train(step))
    lines.close()
    text = folder.metrics.read_bytes()
    folder.metrics.write_bytes(text.replace(b'"step": 2', b'"step": 6'))
    assert [record["step"] for record in folder.records()] == [1]
    assert folder.num_corrupt == 1


def test_garbage_of_a_power_cut_before_a_resume_is_not_counted(tmp_path: Path) -> None:
    """Blocks that had not reached the disk are zeros, and later ones may have reached it."""
    folder = RunFolder(tmp_path)
    lines = JsonLines(folder.metrics)
    for step in (1, 2):
        lines.write(_train(step))
    lines.close()
    with folder.metrics.open("ab") as file:
        file.write(bytes(100) + b'"loss": 1}\n' + json.dumps(_train(5)).encode() + b'\n{"kind": "tr' + bytes(50))
    again = JsonLines(folder.metrics)
    again.write({"kind": "resume", "step": 2})
    again.write(_train(3))
    assert [record["step"] for record in folder.records() if record["kind"] == "train"] == [1, 2, 3]
    assert folder.num_corrupt == 0


def test_tensorboard_tags(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sheet = np.zeros((4, 6, 3), np.uint8)
    board = TensorBoard(tmp_path, 0, {"name": "x", "optim": {"lr": 0.1}, "about": {"source": "paper"}}, sheet)
    seconds = {"data": 0.1, "compute": 0.2, "sync": 0.3}
    train = {"kind": "train", "step": 5, "loss": 1.5, "top1": 0.25, "lr": 0.1, "images_per_second": 9.0}
    board.write(train | {"seconds": seconds})
    board.write({"kind": "eval", "step": 5, "loss": 1.0, "top1": 0.5, "top5": 0.75})
    board.write({"kind": "checkpoint", "step": 5})
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) >= {"Loss/train", "Accuracy/train", "Loss/val", "Accuracy/val", "LearningRate"}
    assert events.Scalars("Loss/val")[0].step == 5
    assert events.Tags()["images"] == ["examples"]
    parameters = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"optim.lr" in parameters
    assert b"about" not in parameters


def test_folder_has_one_writer(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with raises("folder-in-use") as caught:
        FolderLock(tmp_path)
    assert caught.value.fields == {"path": tmp_path}
    first.release()
    FolderLock(tmp_path).release()


def test_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"half of the n")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        interrupted()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_intervals_in_steps_and_seconds() -> None:
    timeline = Timeline.of(Recipe("any", train=Train(global_batch=10)), 100)
    steps = IntervalTrigger("0.5ep", timeline)
    assert [step for step in range(1, 21) if steps.due(step, 0, 0.0)] == [5, 10, 15, 20]
    seconds = IntervalTrigger("3s", timeline)
    start = seconds._last
    pending, due = 0, []
    for second in range(12):  # one step per second; votes take effect one step later, as between ranks
        now = start + second
        vote = seconds.vote(now)
        if seconds.due(second, pending, now):
            due.append(second)
        pending = vote
    assert due == [4, 8]


class Slow:
    """A tracker whose server does not answer."""

    def __init__(self, release: threading.Event):
        self.release, self.records = release, []

    def write(self, record: dict) -> None:
        self.release.wait(60)
        self.records.append(record)

    def close(self, status: str = "finished") -> None: ...


def test_slow_tracker_does_not_block_training(caplog) -> None:
    log.propagate = True
    release = threading.Event()
    slow = Slow(release)
    sink = InBackground(lambda: slow, "Slow", close_timeout=0.1)
    for step in range(1100):
        sink.write({"kind": "train", "step": step})
    sink.close()
    assert "Slow did not finish within 0.1 s" in caplog.text
    assert "Slow was too slow" in caplog.text
    release.set()


def test_failing_tracker_is_dropped(caplog) -> None:
    log.propagate = True

    def make() -> Slow:
        raise RuntimeError("no server")

    sink = InBackground(make, "Absent", close_timeout=5)
    sink.write({"kind": "train", "step": 1})
    sink.close()
    assert "Absent stopped: no server" in caplog.text


def test_mlflow_continues_a_resumed_run(tmp_path: Path, monkeypatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for step, loss in ((1, 0.5), (2, 0.25)):
        sink = MLflow(
            tmp_path / "run", identity(tmp_path / "run", "then"), "project", {"seed": step, "optim": {"lr": 0.1}}
        )
        sink.write({"kind": "eval", "step": step, "epoch": 1.0, "loss": loss, "top1": 0.75, "top5": 0.9})
        sink.close("finished" if step == 1 else "failed")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"seed": "1", "optim.lr": "0.1"}
    assert run.info.status == "FAILED"
    history = client.get_metric_history(run.info.run_id, "Loss/val")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.25)]


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = WeightsAndBiases(tmp_path, "abc", "project", {"seed": 1})
    sink.write({"kind": "eval", "step": 5, "epoch": 1.0, "loss": 0.5, "top1": 0.75, "top5": 0.9, "seconds": 1.0})
    sink.close()
    (written,) = tmp_path.rglob("*.wandb")
    deadline = time.monotonic() + HANG
    while b"Accuracy/val" not in written.read_bytes():  # a separate process writes it
        assert time.monotonic() < deadline
        time.sleep(0.1)
