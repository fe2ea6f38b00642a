"""Checkpoints in several files, as FSDP ranks write them: read back whole, verified, and refused if they do not fit."""

import errno
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from attack.resealed import reseal
from conftest import raises
from safetensors import safe_open
from saved_checkpoints import read

from paceline.checkpoint import state, store
from paceline.checkpoint.state import HostCopies
from paceline.checkpoint.tensors import TensorChunk
from paceline.checkpoint.verified import CorruptCheckpoint
from paceline.checkpoint.writer import ShardedWriter, Writer
from paceline.distributed.mesh import ShardId
from paceline.distributed.world import World
from paceline.engine.checkpoints import Checkpoints
from paceline.errors import UserError

STEP, SHARDS = 5, 3
WEIGHT = torch.arange(28.0).view(7, 4)  # 3 + 3 + 1 rows


def _parts(shard: int) -> dict[str, Any]:
    """The state of one rank: rows of a weight and of its moments; what is not sharded is on rank 0."""
    rows = slice(3 * shard, 3 * shard + 3)
    chunk = TensorChunk(WEIGHT[rows].clone(), (7, 4), (3 * shard, 0))
    moment = TensorChunk(WEIGHT[rows] / 2, (7, 4), (3 * shard, 0))
    is_first = shard == 0
    return {
        "model": {"weight": chunk, "count": torch.tensor(9) if is_first else None},
        "ema": {},
        "optimizer": {
            "state": {0: {"exp_avg": moment, "step": torch.tensor(5.0) if is_first else None}},
            "param_groups": [{"params": [0]}],
        },
        "progress": {
            "step": STEP,
            "scaler": {},
            "recipe": {"data": {}, "checkpoint": {}},
            "data": "d1",
            "classes": [["a", "a"], ["b", "b"]],
            "preprocessing": {"mean": [0.5], "std": [0.2]},
            "model": {"name": "any", "num_classes": 2, "in_chans": 1, "options": {}},
        },
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / f"step-{STEP:08d}"
    store.begin(path)
    files: dict[str, Any] = {}
    for shard in range(SHARDS):
        files |= store.write_shard(path, STEP, _parts(shard), {}, ShardId(shard, SHARDS))
    store.commit(path, files)
    return path


def test_shards_are_read_as_whole_tensors(checkpoint: Path, tmp_path: Path) -> None:
    names = {f"{part}-{number:05d}-of-00003.safetensors" for part in ("model", "optimizer") for number in (1, 2, 3)}
    assert {path.name for path in checkpoint.iterdir()} == names | {"COMMIT", "manifest.json", "state.json"}
    _, parts = read(checkpoint)
    assert torch.equal(parts["model"]["weight"], WEIGHT)
    assert parts["model"]["count"] == 9
    assert torch.equal(parts["optimizer"]["state"][0]["exp_avg"], WEIGHT / 2)
    store.export_weights(checkpoint, tmp_path / "weights.safetensors", raw=False)
    with safe_open(tmp_path / "weights.safetensors", "pt") as exported:
        assert torch.equal(exported.get_tensor("weight"), WEIGHT)


def test_200_flipped_bits_in_shards_are_all_detected(checkpoint: Path) -> None:
    generator, files = random.Random(0), sorted(checkpoint.iterdir())
    for number in range(200):
        file = files[number % len(files)]
        content = file.read_bytes()
        bit = generator.randrange(len(content) * 8)
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with raises("checkpoint-corrupt", CorruptCheckpoint):
            read(checkpoint)
        file.write_bytes(content)
    read(checkpoint)


def _rewrite(
    folder: Path,
    shard: int,
    places: Callable[[dict[str, Any]], Any] = lambda places: places,
    tensors: Callable[[dict[str, torch.Tensor]], Any] = lambda tensors: tensors,
) -> None:
    """Change the header or the tensors of one model file, and make the checksums match."""
    path = folder / f"model-{shard:05d}-of-00003.safetensors"
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["chunks"])
    content = tensors(safetensors.torch.load_file(path))
    safetensors.torch.save_file(content, path, {"chunks": json.dumps(places(header))})
    reseal(folder)


def _weight(**change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda places: {"weight": places["weight"] | change}


def _drop(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()
    reseal(folder)


def _also_whole(folder: Path) -> None:
    safetensors.torch.save_file({"weight": WEIGHT}, folder / "model.safetensors")
    reseal(folder)


def _stranger(folder: Path, name: str) -> None:
    reseal(folder, **{name: {"bytes": 1, "sha256": 64 * "0"}})


HUGE = 10**12
ATTACKS: dict[str, Callable[[Path], None]] = {
    "a shard is missing": _drop,
    "a chunk overlaps another": lambda path: _rewrite(path, 2, _weight(offsets=[2, 0])),
    "a chunk occurs twice": lambda path: _rewrite(path, 2, _weight(offsets=[0, 0])),
    "a gap between chunks": lambda path: _rewrite(path, 3, _weight(offsets=[7, 0])),
    "a chunk out of bounds": lambda path: _rewrite(path, 3, _weight(offsets=[HUGE, 0])),
    "a chunk out of bounds on another axis": lambda path: _rewrite(path, 3, _weight(offsets=[6, 1])),
    "a negative offset": lambda path: _rewrite(path, 3, _weight(offsets=[-1, 0])),
    "an offset that is a string": lambda path: _rewrite(path, 3, _weight(offsets=["6", 0])),
    "too few offsets": lambda path: _rewrite(path, 3, _weight(offsets=[6])),
    "a huge shape": lambda path: _rewrite(path, 3, _weight(shape=[HUGE, HUGE])),
    "all shapes are huge": lambda path: (
        [_rewrite(path, number, _weight(shape=[HUGE, HUGE])) for number in (1, 2, 3)] and None
    ),
    "shapes that differ": lambda path: _rewrite(path, 2, _weight(shape=[8, 4])),
    "more dimensions": lambda path: _rewrite(path, 2, _weight(shape=[7, 4, 1], offsets=[3, 0, 0])),
    "a thousand dimensions": lambda path: _rewrite(path, 2, _weight(shape=[1] * 1000, offsets=[0] * 1000)),
    "types that differ": lambda path: _rewrite(path, 2, tensors=lambda found: {"weight": found["weight"].long()}),
    "fewer columns": lambda path: _rewrite(
        path, 2, tensors=lambda found: {"weight": found["weight"][:, :3].contiguous()}
    ),
    "a chunk without a place": lambda path: _rewrite(path, 2, lambda places: {}),
    "a place without a chunk": lambda path: _rewrite(path, 2, lambda places: places | {"more": places["weight"]}),
    "an unknown key": lambda path: _rewrite(path, 2, _weight(file="../../x")),
    "places that are a list": lambda path: _rewrite(path, 2, lambda places: [1]),
    "a whole tensor beside its chunks": _also_whole,
    "a file outside the folder": lambda path: _stranger(path, "../model-00001-of-00003.safetensors"),
    "a file below the folder": lambda path: _stranger(path, "model-00001-of-00003/x.safetensors"),
    "a file of another name": lambda path: _stranger(path, "model-1-of-3.safetensors"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_shards_are_refused(checkpoint: Path, name: str) -> None:
    ATTACKS[name](checkpoint)
    with pytest.raises(UserError) as caught:
        read(checkpoint)
    assert caught.value.code in {"checkpoint-corrupt", "checkpoint-incomplete"}


class _TwoRanks(World):
    """Rank 0 of two. `other` is what rank 1 reports about its shard."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value | OTHER if isinstance(value, dict) else value]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        POLLS.append(1)
        ENOUGH.extend(POLLS[5:])
        return tensor

    def barrier(self) -> None: ...

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value


OTHER: dict[str, Any] = {}
POLLS: list[int] = []
ENOUGH: list[int] = []
RANK_0 = _TwoRanks(0, 2, 0, 2)
NO_REPLICAS: Any = SimpleNamespace(needed=False, keeps_copy=False, collect=lambda *_: None, follow=lambda *_: None)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    OTHER.clear()
    writer = ShardedWriter(tmp_path, 2, "top1", ShardId(0, 1))
    checkpoints = Checkpoints(RANK_0, writer, NO_REPLICAS)
    parts = {"model": {"weight": WEIGHT}, "ema": {}, "optimizer": _parts(0)["optimizer"]}
    state = parts | {"optimizer": {"state": {}, "param_groups": []}, "progress": _parts(0)["progress"]}
    checkpoints.save(STEP, lambda: state, {}, lambda: None, lambda: None)
    writer.wait()
    return checkpoints


def test_checkpoint_is_committed_when_all_ranks_have_written(checkpoints: Checkpoints, tmp_path: Path) -> None:
    OTHER.update(busy=True)
    checkpoints.poll(-1)
    assert not list(store.committed(tmp_path))
    assert checkpoints.writing
    OTHER.update(busy=False)
    checkpoints.complete()
    assert [path.name for path in store.committed(tmp_path)] == [f"step-{STEP:08d}"]
    assert checkpoints.error() is None
    assert not checkpoints.writing


def test_full_disk_of_another_rank_is_reported_and_nothing_is_left(checkpoints: Checkpoints, tmp_path: Path) -> None:
    OTHER.update(error="No space left on device", host="node-1")
    checkpoints.complete()
    assert "No space left on device (on node-1)" in (checkpoints.error() or "")
    assert not list(tmp_path.iterdir())


def test_ranks_wait_for_a_slow_disk_in_short_collectives(tmp_path: Path, monkeypatch) -> None:
    """A single collective would exceed the rank timeout, and the job would be restarted forever."""
    POLLS.clear()
    ENOUGH.clear()
    write = store.write

    def slow(*arguments: Any) -> None:
        while not ENOUGH:
            time.sleep(0.01)
        write(*arguments)

    monkeypatch.setattr(store, "write", slow)
    checkpoints = Checkpoints(RANK_0, Writer(tmp_path, 2, "top1"), NO_REPLICAS)
    parts = {"model": {"weight": WEIGHT}, "ema": {}, "optimizer": {"state": {}, "param_groups": []}}
    state = HostCopies().take(parts, ShardId())
    checkpoints.save(STEP, lambda: state | {"progress": _parts(0)["progress"]}, {}, lambda: None, lambda: None)
    checkpoints.complete()
    assert len(POLLS) > 5
    assert next(store.committed(tmp_path))


def test_shards_on_cpus_are_written_without_a_copy(tmp_path: Path) -> None:
    """Training goes on after they are written."""
    weight, ends = torch.arange(4.0), []
    writer = ShardedWriter(tmp_path, 2, "top1", ShardId(0, 1), copies_cpu=False)
    parts = {"model": {"weight": weight, "tied": weight[:2]}, "ema": {}, "optimizer": {"state": {}, "param_groups": []}}
    copies = writer.snapshot(lambda: parts)
    assert copies["model"]["weight"].data_ptr() == weight.data_ptr()
    assert copies["model"]["tied"].data_ptr() != weight.data_ptr()
    OTHER.clear()
    checkpoints = Checkpoints(RANK_0, writer, NO_REPLICAS)
    state = parts | {"progress": _parts(0)["progress"]}
    checkpoints.save(STEP, lambda: state, {}, lambda: None, lambda: ends.append(writer.busy))
    assert ends == [False]


def test_the_reason_why_a_checkpoint_could_not_begin_is_kept(tmp_path: Path, monkeypatch) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "begin", full)
    writer = ShardedWriter(tmp_path, 2, "top1", ShardId(0, 1))
    writer.begin(STEP)
    writer.start(STEP, {"model": {}}, {})
    writer.wait()
    assert "No space left on device" in (writer.error or "")


class _Pinned(SimpleNamespace):
    def copy_(self, source: Any, non_blocking: bool) -> "_Pinned":
        self.calls.append(("copy", non_blocking))
        return self


def test_gpu_tensors_are_copied_to_pinned_memory_with_one_wait(monkeypatch) -> None:
    calls: list[Any] = []

    def empty(shape: Any, dtype: Any, pin_memory: bool) -> _Pinned:
        calls.append(("allocate", pin_memory))
        return _Pinned(shape=shape, dtype=dtype, calls=calls)

    monkeypatch.setattr(state.torch, "empty", empty)
    monkeypatch.setattr(state.torch.accelerator, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(state, "own_chunk", lambda tensor, _: tensor.stands_for)
    tensors = []
    for _ in range(2):
        tensor = torch.zeros(2)
        tensor.detach = lambda tensor=tensor: tensor
        tensor.stands_for = SimpleNamespace(shape=(2,), dtype=torch.float32, device=torch.device("cuda", 0))
        tensors.append(tensor)
    copies = HostCopies()
    copies.take({"a": tensors[0], "b": tensors[1]}, ShardId())
    assert calls == [("allocate", True), ("copy", True)] * 2 + ["wait"]
    calls.clear()
    copies.take({"a": tensors[0], "b": tensors[1]}, ShardId())
    assert calls == [("copy", True)] * 2 + ["wait"]  # the memory of the last checkpoint
