import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint import store
from paceline.checkpoint.state import snapshot
from paceline.checkpoint.writer import Writer
from paceline.errors import UserError
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
            "recipe": {"data": {}, "checkpoint": {}},
            "data": "d1",
            "classes": [["a", "a"], ["b", "b"]],
            "preprocessing": {"mean": [0.5], "std": [0.2]},
            "model": {"name": "any", "num_classes": 2, "in_chans": 1, "options": {}},
        },
    }


def _write(folder: Path, step: int, **metrics: float) -> Path:
    path = folder / f"step-{step:08d}"
    store.write(path, step, snapshot(_parts(step)), metrics)
    return path


def _equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right


def test_state_survives_a_trip_through_tensors_and_json() -> None:
    parts = _parts(5)
    skeleton, tensors = flatten(parts)
    assert _equal(unflatten(json.loads(json.dumps(skeleton)), tensors), parts)
    with pytest.raises(TypeError, match=r"model is a set"):
        flatten({"model": {1}})


def test_a_checkpoint_is_read_back(tmp_path: Path) -> None:
    path = _write(tmp_path, 5, top1=0.5)
    checkpoint, parts = store.read(path)
    assert (checkpoint.step, checkpoint.metrics) == (5, {"top1": 0.5})
    assert parts["progress"]["step"] == 5
    assert 0 in parts["optimizer"]["state"]  # whole-number keys stay whole numbers
    fresh = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    fresh.load_state_dict(parts["optimizer"])


def test_a_flipped_bit_in_any_file_is_noticed_200_of_200(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    chance = random.Random(0)
    files = sorted(path.iterdir())
    assert {file.name for file in files} >= {"COMMIT", "manifest.json", "state.json", "model.safetensors"}
    for number in range(200):
        file = files[number % len(files)]
        content = file.read_bytes()
        place = chance.randrange(len(content) * 8)
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        file.write_bytes(changed)
        with pytest.raises(store.CorruptCheckpoint):
            store.read(path)
        file.write_bytes(content)
    store.read(path)


@pytest.mark.parametrize(
    "name", ["COMMIT", "manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"]
)
def test_a_missing_or_cut_file_is_noticed(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path, 1)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1])
    with pytest.raises(store.CorruptCheckpoint):
        store.read(path)
    (path / name).unlink()
    with pytest.raises(store.CorruptCheckpoint, match="missing"):
        store.read(path)


@pytest.mark.parametrize(
    "name", [".DS_Store", "Thumbs.db", "desktop.ini", "._model.safetensors", "state.json~", "ema.safetensors"]
)
def test_what_file_managers_and_editors_leave_is_not_part_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path, 1)
    (path / name).write_bytes(b"not mine")
    (tmp_path / name).write_bytes(b"not mine")
    shutil.copytree(path, tmp_path / "step-00000001 copy")
    assert store.read(path)[1]["ema"] == {}
    assert name not in [file.name for file in store.files_of(path)]
    found = store.last(tmp_path)
    assert found
    assert found[0].folder == path


def test_a_corrupt_newest_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, caplog) -> None:
    _write(tmp_path, 1)
    newest = _write(tmp_path, 2)
    (newest / "model.safetensors").write_bytes(b"rubbish")
    store.log.propagate = True
    found = store.last(tmp_path)
    assert found
    assert found[0].step == 1
    assert str(newest / "model.safetensors") in caplog.text


def test_when_every_checkpoint_is_corrupt_nothing_starts_anew_by_itself(tmp_path: Path) -> None:
    for step in (1, 2):
        (_write(tmp_path, step) / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="all 2 checkpoints are corrupt"):
        store.last(tmp_path)
    assert len(list(tmp_path.glob("corrupt-*"))) == 2


def test_saves_from_a_step_on_are_put_aside_corrupt_ones_too(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _write(tmp_path, step)
    (tmp_path / "step-00000003" / "state.json").write_bytes(b"rubbish")
    assert store.put_aside_from(tmp_path, 4) == tmp_path / "step-00000002"
    assert [path.name for path in store.committed(tmp_path)] == ["step-00000002", "step-00000001"]


def test_what_a_kill_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    (tmp_path / ".writing-step-00000002").mkdir()
    (tmp_path / ".deleting-step-00000000").mkdir()
    store.last(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_that_lacked_only_its_name_counts(tmp_path: Path) -> None:
    """Killed between taking the old checkpoint of a step away and giving the new one its name."""
    _write(tmp_path, 1)
    _write(tmp_path, 2).rename(tmp_path / ".writing-step-00000002")
    found = store.last(tmp_path)
    assert found
    assert found[0].step == 2
    assert store.read(tmp_path / "step-00000002")[0].step == 2


def test_a_checkpoint_that_is_corrupt_for_the_second_time_is_put_aside_too(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    for _ in range(2):
        (_write(tmp_path, 2) / "model.safetensors").write_bytes(b"rubbish")
        found = store.last(tmp_path)
        assert found
        assert found[0].step == 1
    assert sorted(path.name for path in tmp_path.glob("corrupt-*")) == [
        "corrupt-step-00000002",
        "corrupt-step-00000002-2",
    ]


def test_what_was_being_written_does_not_exist(tmp_path: Path, monkeypatch) -> None:
    _write(tmp_path, 1)
    monkeypatch.setattr(store, "write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        _write(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found = store.last(tmp_path)
    assert found
    assert found[0].step == 1


def test_nothing_is_committed_before_what_must_survive_with_it(tmp_path: Path) -> None:
    """What the last step before the marker does is called when all else is on disk, and may refuse."""
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


def test_best_is_found_by_its_metric_not_by_a_name(tmp_path: Path) -> None:
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


def test_the_writer_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=2, best_metric="top1")
    for step, top1 in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.6), (5, 0.1)):
        writer.start(step, writer.snapshot(lambda step=step: _parts(step)), {"top1": top1})
    writer.wait()
    assert [path.name for path in store.committed(tmp_path)] == ["step-00000005", "step-00000004", "step-00000002"]
    assert writer.error is None


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    weights = torch.zeros(1000)
    writer = Writer(tmp_path, keep=2, best_metric="top1")
    writer.start(1, writer.snapshot(lambda: _parts(1) | {"model": {"weights": weights}}), {})
    weights.fill_(1.0)
    writer.wait()
    assert store.read(tmp_path / "step-00000001")[1]["model"]["weights"].sum() == 0
