import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from conftest import raises
from saved_checkpoints import read
from torch import nn

from paceline.checkpoint import store
from paceline.checkpoint.state import HostCopies
from paceline.checkpoint.writer import Writer
from paceline.distributed.mesh import ShardId
from paceline.system.trees import flatten, unflatten


def _parts(step: int) -> dict:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "ema": {},
        "optimizer": optimizer.state_dict(),
        "progress": {
            "step": step,
            "scaler": {},
            "evaluations": {"step": [], "top1": [], "top5": [], "loss": []},
            "recipe": {"data": {}, "checkpoint": {}},
            "epoch": 0.5,
            "data": {"name": "any", "fingerprint": "d1", "splits": {"train": 10, "val": 5, "test": 0}},
            "precision": "fp32",
            "versions": {"torch": "2"},
            "classes": [["a", "a"], ["b", "b"]],
            "preprocessing": {"mean": [0.5], "std": [0.2], "interpolation": "bilinear"},
            "model": {"name": "any", "num_classes": 2, "in_chans": 1, "options": {}},
        },
    }


def _write(folder: Path, step: int, **metrics: float) -> Path:
    path = folder / f"step-{step:08d}"
    store.write(path, step, HostCopies().take(_parts(step), ShardId()), metrics)
    return path


def _equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right


def test_state_survives_a_round_trip_through_tensors_and_json() -> None:
    parts = _parts(5)
    skeleton, tensors = flatten(parts)
    assert _equal(unflatten(json.loads(json.dumps(skeleton)), tensors), parts)
    with pytest.raises(TypeError, match=r"model is a set"):
        flatten({"model": {1}})


def test_checkpoint_is_read_back(tmp_path: Path) -> None:
    path = _write(tmp_path, 5, top1=0.5)
    checkpoint, parts = read(path)
    assert (checkpoint.step, checkpoint.metrics) == (5, {"top1": 0.5})
    assert parts["progress"]["step"] == 5
    assert 0 in parts["optimizer"]["state"]  # integer keys stay integers
    fresh = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    fresh.load_state_dict(parts["optimizer"])


def test_200_flipped_bits_are_all_detected(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    generator = random.Random(0)
    files = sorted(path.iterdir())
    assert {file.name for file in files} >= {"COMMIT", "manifest.json", "state.json", "model.safetensors"}
    for number in range(200):
        file = files[number % len(files)]
        content = file.read_bytes()
        bit = generator.randrange(len(content) * 8)
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with raises("checkpoint-corrupt", store.CorruptCheckpoint):
            read(path)
        file.write_bytes(content)
    read(path)


@pytest.mark.parametrize(
    "name", ["COMMIT", "manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"]
)
def test_missing_or_truncated_file_is_detected(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path, 1)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1])
    with raises("checkpoint-corrupt", store.CorruptCheckpoint):
        read(path)
    (path / name).unlink()
    with raises("checkpoint-incomplete", store.CorruptCheckpoint) as caught:
        read(path)
    assert str(path / name) in str(caught.value)


@pytest.mark.parametrize(
    "name", [".DS_Store", "Thumbs.db", "desktop.ini", "._model.safetensors", "state.json~", "ema.safetensors"]
)
def test_files_of_file_managers_and_editors_are_ignored(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path, 1)
    (path / name).write_bytes(b"not mine")
    (tmp_path / name).write_bytes(b"not mine")
    shutil.copytree(path, tmp_path / "step-00000001 copy")
    assert read(path)[1]["ema"] == {}
    assert name not in [file.name for file in store.files_of(path)]
    found = store.last(tmp_path)
    assert found
    assert found.folder == path


def test_corrupt_newest_checkpoint_is_named_and_the_previous_one_is_used(tmp_path: Path, caplog) -> None:
    _write(tmp_path, 1)
    newest = _write(tmp_path, 2)
    (newest / "model.safetensors").write_bytes(b"garbage")
    store.log.propagate = True
    found = store.last(tmp_path)
    assert found
    assert found.step == 1
    assert str(newest / "model.safetensors") in caplog.text


def test_training_does_not_start_over_if_every_checkpoint_is_corrupt(tmp_path: Path) -> None:
    for step in (1, 2):
        (_write(tmp_path, step) / "model.safetensors").write_bytes(b"garbage")
    with raises("all-checkpoints-corrupt") as caught:
        store.last(tmp_path)
    assert caught.value.fields == {"path": tmp_path, "count": 2}
    assert len(list(store.committed(tmp_path))) == 2  # a refused start moves nothing


def test_later_checkpoints_are_set_aside_including_corrupt_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _write(tmp_path, step)
    (tmp_path / "step-00000003" / "state.json").write_bytes(b"garbage")
    assert store.set_aside_from(tmp_path, 4) == tmp_path / "step-00000002"
    assert [path.name for path in store.committed(tmp_path)] == ["step-00000002", "step-00000001"]


def test_partial_checkpoints_of_a_kill_are_removed(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    (tmp_path / ".writing-step-00000002").mkdir()
    (tmp_path / ".deleting-step-00000000").mkdir()
    store.last(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_complete_checkpoint_that_was_not_renamed_is_used(tmp_path: Path) -> None:
    """A kill between hiding the old checkpoint of a step and renaming the new one."""
    _write(tmp_path, 1)
    _write(tmp_path, 2).rename(tmp_path / ".writing-step-00000002")
    found = store.last(tmp_path)
    assert found
    assert found.step == 2
    assert read(tmp_path / "step-00000002")[0].step == 2


def test_second_corrupt_checkpoint_of_the_same_step_is_set_aside(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    for _ in range(2):
        (_write(tmp_path, 2) / "model.safetensors").write_bytes(b"garbage")
        found = store.last(tmp_path)
        assert found
        assert found.step == 1
        store.set_aside_from(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("corrupt-*")) == [
        "corrupt-step-00000002",
        "corrupt-step-00000002-2",
    ]


def test_checkpoint_that_cannot_be_replaced_is_kept(tmp_path: Path, monkeypatch) -> None:
    path = _write(tmp_path, 2, top1=0.5)

    def rename(self: Path, target: Path, rename=Path.rename) -> Path:
        if self.name.startswith(".writing"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        _write(tmp_path, 2, top1=0.75)
    monkeypatch.undo()
    store.clean_up(tmp_path)
    assert store.describe(path).metrics == {"top1": 0.5}


def test_failed_write_leaves_no_checkpoint(tmp_path: Path, monkeypatch) -> None:
    _write(tmp_path, 1)
    monkeypatch.setattr(store, "write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        _write(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found = store.last(tmp_path)
    assert found
    assert found.step == 1


def test_checkpoint_is_not_committed_if_its_records_cannot_be_written(tmp_path: Path) -> None:
    """`before_commit` runs when all files but the marker are on disk, and may fail."""
    seen: list[set[str]] = []

    def refuse() -> None:
        seen.append({path.name for path in (tmp_path / ".writing-step-00000002").iterdir()})
        raise OSError(28, "No space left on device", "metrics.jsonl")

    writer = Writer(tmp_path, keep=2, best_metric="top1")
    writer.start(1, writer.snapshot(lambda: _parts(1)), {})
    writer.start(2, writer.snapshot(lambda: _parts(2)), {}, refuse)
    writer.wait()
    tensors = {f"{part}.safetensors" for part in ("model", "optimizer")}
    assert seen == [{"manifest.json", "state.json"} | tensors]
    assert "metrics.jsonl: No space left on device" in (writer.error or "")
    assert [path.name for path in store.committed(tmp_path)] == ["step-00000001"]


def test_best_is_found_by_its_metric(tmp_path: Path) -> None:
    for step, top1 in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.9)):
        _write(tmp_path, step, top1=top1, loss=1 - top1)
    _write(tmp_path, 5)
    _write(tmp_path, 6, top1=float("nan"), loss=float("nan"))
    for metric in ("top1", "loss"):
        best = store.best(tmp_path, metric)
        assert best
        assert best.step == 2
    shutil.rmtree(tmp_path / "step-00000002")
    assert store.best(tmp_path, "top1").step == 4  # type: ignore[union-attr]


def test_writer_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=2, best_metric="top1")
    for step, top1 in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.6), (5, 0.1)):
        writer.start(step, writer.snapshot(lambda step=step: _parts(step)), {"top1": top1})
    writer.wait()
    assert [path.name for path in store.committed(tmp_path)] == ["step-00000005", "step-00000004", "step-00000002"]
    assert writer.error is None


def test_checkpoint_has_the_state_at_the_time_of_its_snapshot(tmp_path: Path) -> None:
    weights = torch.zeros(1000)
    writer = Writer(tmp_path, keep=2, best_metric="top1")
    writer.start(1, writer.snapshot(lambda: _parts(1) | {"model": {"weights": weights}}), {})
    weights.fill_(1.0)
    writer.wait()
    assert read(tmp_path / "step-00000001")[1]["model"]["weights"].sum() == 0
